//! Whether a layer attends by its strategy or by SERIAL, where the decoder has a budget: by its times, when a step begins, from the
//! sizes that the host knows. So the decision is part of what a capture records, and takes no launch.

use super::options::{Method, Options, Policy, Strategy};
use crate::abi::{VWD_SELECT_AXIS, VWD_SELECT_MINMAX};
use crate::core::allocate::reserved;
use crate::core::status::{Error, Result};
use crate::decode::budget::costs::{Costs, Trade};
use crate::decode::budget::table::Kind;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

pub struct Fallback {
    costs: Arc<Costs>,
    /// The strategies that layers have, each once.
    choices: Vec<Choice>,
    /// The choice of each layer; absent for SERIAL and dense layers.
    choice_of: Vec<Option<usize>>,
    /// Layers that fell back in the last step, and in all steps together.
    last: AtomicU64,
    total: AtomicU64,
}

struct Choice {
    trade: Trade,
    layers: u64,
    /// Whether the strategy ran in the last step that was decided.
    runs: AtomicBool,
}

impl Fallback {
    /// `has_policies`: whether layers have policies of their own. `device`: where the decoder computes.
    pub fn new(costs: &Arc<Costs>, options: &Options, has_policies: bool, device: &str) -> Result<Fallback> {
        const PURPOSE: &str = "the strategies of a decoder";
        check(costs, options, has_policies, device)?;
        let mut choices: Vec<Choice> = reserved(options.layers.len(), PURPOSE)?;
        let mut choice_of = reserved(options.layers.len(), PURPOSE)?;
        for policy in &options.layers {
            let Some(trade) = trade(policy, options.coverage) else {
                choice_of.push(None);
                continue;
            };
            let at = choices.iter().position(|choice| choice.trade == trade).unwrap_or_else(|| {
                choices.push(Choice { trade, layers: 0, runs: AtomicBool::new(false) });
                choices.len() - 1
            });
            choices[at].layers += 1;
            choice_of.push(Some(at));
        }
        Ok(Fallback { costs: costs.clone(), choices, choice_of, last: AtomicU64::new(0), total: AtomicU64::new(0) })
    }

    /// Decides for a step of `batch` rows of up to `longest` tokens. `has_sparse`: whether rows may be sparse; in a step without such rows no layer
    /// counts as one that fell back.
    pub fn decide(&self, longest: usize, batch: usize, has_sparse: bool) {
        let mut layers = 0;
        for choice in &self.choices {
            let runs = self.costs.pays(&choice.trade, longest, batch);
            choice.runs.store(runs, Relaxed);
            layers += if runs { 0 } else { choice.layers };
        }
        let layers = if has_sparse { layers } else { 0 };
        self.last.store(layers, Relaxed);
        self.total.fetch_add(layers, Relaxed);
    }

    /// Whether a layer of the step is SERIAL instead of what its policy says.
    pub fn of(&self, layer: usize) -> bool {
        self.choice_of[layer].is_some_and(|at| !self.choices[at].runs.load(Relaxed))
    }

    /// Layers that fell back in the last step, and in all steps together.
    pub fn counts(&self) -> [u64; 2] {
        [self.last.load(Relaxed), self.total.load(Relaxed)]
    }
}

fn trade(policy: &Policy, coverage: f32) -> Option<Trade> {
    let kind = match policy.strategy {
        Strategy::PrrByScores { .. } => Kind::Prr,
        Strategy::PrrForeseen => Kind::PrrForeseen,
        Strategy::Foreseen => Kind::Foreseen,
        Strategy::Serial | Strategy::AsyncTls => return None,
    };
    let missed = if kind == Kind::Foreseen { 0.0 } else { 1.0 - coverage as f64 };
    Some(Trade { kind, ratio: policy.predicted as f64 / policy.k as f64, missed })
}

/// Checks that the budget is of this device and of these layers.
fn check(costs: &Costs, options: &Options, has_policies: bool, device: &str) -> Result<()> {
    if costs.device != device {
        let expected = format!("one of {device}");
        return Err(Error::argument("options.budget", format!("a budget of {}", costs.device), expected));
    }
    let shape = &costs.shape;
    same("options.query_heads", options.query_heads, shape.query_heads)?;
    same("options.kv_heads", options.kv_heads, shape.kv_heads)?;
    same("options.key_dim", options.dims[0], shape.dims[0])?;
    same("options.value_dim", options.dims[1], shape.dims[1])?;
    same("options.dtype_code", options.dtype, shape.dtype)?;
    same("options.page_size", options.page_size, shape.page_size)?;
    same("options.block_size", options.block_size, shape.block_size)?;
    for (n, policy) in options.layers.iter().enumerate().filter(|(_, policy)| trade(policy, 0.0).is_some()) {
        let name = |field: &str| match has_policies {
            true => format!("options.policies[{n}].{field}"),
            false => format!("options.policy.{field}"),
        };
        let method = if policy.method == Method::Axis { VWD_SELECT_AXIS } else { VWD_SELECT_MINMAX };
        same(&name("method"), method, shape.method)?;
        same(&name("k"), policy.k as usize, shape.k)?;
        same(&name("init_blocks"), policy.init as usize, shape.init_blocks)?;
        same(&name("local_blocks"), policy.local as usize, shape.local_blocks)?;
    }
    Ok(())
}

fn same<T: PartialEq + Display>(name: &str, found: T, measured: T) -> Result<()> {
    match found == measured {
        true => Ok(()),
        false => Err(Error::argument(name, found, format!("{measured}, with which options.budget was measured"))),
    }
}
