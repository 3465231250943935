//! Holt's linear smoothing of block scores (PRR), per sequence, KV head and block.
//!
//! Before a step, ŝ = L + γ·T predicts the scores, and its top ⌈r·k⌉ the selection. After it, the true scores s enter:
//! L' = α·s + (1−α)·L and T' = β·(L'−L) + (1−β)·T. A block that has not been seen has L = −inf, and so ŝ = −inf; its
//! first finite score becomes its level, with trend 0.

mod calibrate;
mod choose;
mod cpu;
mod cuda;

pub use calibrate::{CalibrateRequest, calibrate};
pub(super) use cuda::Kernels;

use crate::abi::{
    vwd_holt, vwd_predictor_predict_args, vwd_predictor_reset_args, vwd_predictor_state, vwd_predictor_update_args,
    vwd_stream, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::ops::contents::{self, Number, Rule};
use crate::ops::topk::Budget;
use crate::ops::views::{BlockList, Lists};
use crate::runtime::{On, Session, require_no_flags};

/// The smoothed scores: level and trend, both [N, Hk, max_blocks] float32, of N sequences.
#[derive(Clone, Copy)]
struct State<'a> {
    level: Tensor<'a>,
    trend: Tensor<'a>,
}

impl<'a> State<'a> {
    fn from_c(checks: &Checks, c: &'a vwd_predictor_state) -> Result<State<'a>> {
        let shape = [("N", ANY), ("Hk", ANY), ("max_blocks", ANY)];
        let level = checks.input("state.level", &c.level, &[DType::F32], &shape)?;
        let trend = checks.input("state.trend", &c.trend, &[DType::F32], &shape_of(&level))?;
        Ok(State { level, trend })
    }

    /// Whether the state has no elements, however large its other extents are.
    fn is_empty(&self) -> bool {
        self.level.shape().contains(&0)
    }

    fn writable(self) -> Result<State<'a>> {
        Ok(State { level: self.level.writable()?, trend: self.trend.writable()? })
    }

    /// N
    fn sequences(&self) -> usize {
        self.level.dim(0)
    }

    fn kv_heads(&self) -> usize {
        self.level.dim(1)
    }

    fn max_blocks(&self) -> usize {
        self.level.dim(2)
    }
}

/// The shape of the trend.
fn shape_of(level: &Tensor) -> [(&'static str, usize); 3] {
    [("N", level.dim(0)), ("Hk", level.dim(1)), ("max_blocks", level.dim(2))]
}

/// The rows of a call: the number of blocks of each, and which sequence of the state it is.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    /// [B]
    seq_lens: Tensor<'a>,
    /// [B]; absent: row i is sequence i, and B is N.
    sequences: Option<Tensor<'a>>,
    size: usize,
    most: usize,
}

impl<'a> Blocks<'a> {
    /// `c` are seq_lens and sequences.
    fn from_c(checks: &Checks, c: [&'a vwd_tensor; 2], size: u32, state: &State) -> Result<Blocks<'a>> {
        if size == 0 {
            return Err(Error::argument("block_size", 0, "at least 1"));
        }
        let i32 = &[DType::I32];
        let rows = if given(c[1]).is_some() { ("B", ANY) } else { ("B", state.sequences()) };
        let seq_lens = checks.input("seq_lens", c[0], i32, &[rows])?;
        let sequences = checks.optional_input("sequences", c[1], i32, &[("B", seq_lens.dim(0))])?;
        if sequences.is_some() && state.sequences() == 0 {
            return Err(Error::argument("state.level", "no sequences", "at least 1 beside sequences"));
        }
        Ok(Blocks { seq_lens, sequences, size: size as usize, most: state.max_blocks() })
    }

    /// B
    fn batch(&self) -> usize {
        self.seq_lens.dim(0)
    }

    /// The shape of tensors with a value for every block of each row.
    fn shape(&self, state: &State) -> [(&'static str, usize); 3] {
        [("B", self.batch()), ("Hk", state.kv_heads()), ("max_blocks", self.most)]
    }

    /// What a session that checks contents reads.
    fn contents(&self, state: &State) -> Vec<Rule<'a>> {
        let mut rules = vec![Rule::up_to(self.seq_lens, self.most.saturating_mul(self.size))];
        rules.extend(self.sequences.map(|t| Rule::within(t, -1, Number::constant(state.sequences()))));
        rules
    }

    /// The sequence of row `i`, if the state has it.
    ///
    /// # Safety
    /// There is a row `i`, the op's caller keeps sequences valid, and the session computes on the CPU.
    unsafe fn sequence(&self, i: usize, state: &State) -> Option<usize> {
        // SAFETY: sequences has an entry for each row, of which i is one.
        let number = self.sequences.map_or(i as i64, |t| unsafe { t.get::<i32, 1>([i]) } as i64);
        usize::try_from(number).ok().filter(|&number| number < state.sequences())
    }

    /// n_i = ⌈len/S⌉, clamped to max_blocks.
    ///
    /// # Safety
    /// There is a sequence `i`, the op's caller keeps seq_lens valid, and the session computes on the CPU.
    unsafe fn count(&self, i: usize) -> usize {
        // SAFETY: seq_lens has an entry for each sequence, of which i is one.
        let len = unsafe { self.seq_lens.get::<i32, 1>([i]) };
        (len.max(0) as usize).div_ceil(self.size).min(self.most)
    }
}

/// Checks the bounds of smoothing factors and fills in the default.
pub fn check_holt(name: &str, holt: &vwd_holt) -> Result<vwd_holt> {
    for (part, value) in [("alpha", holt.alpha), ("beta", holt.beta)] {
        if !(0.0..=1.0).contains(&value) {
            return Err(Error::argument(&format!("{name}.{part}"), value, "0 to 1"));
        }
    }
    if !holt.gamma.is_finite() {
        return Err(Error::argument(&format!("{name}.gamma"), holt.gamma, "a finite number"));
    }
    let unset = [holt.alpha, holt.beta, holt.gamma] == [0.0; 3];
    Ok(if unset { vwd_holt { alpha: 1.0, beta: 0.0, gamma: 0.0 } } else { *holt })
}

/// How many blocks are predicted for a selection of k: ⌈r·k⌉.
#[derive(Clone, Copy)]
pub struct Ratio(f64);

impl Ratio {
    pub fn from_c(ratio: f32) -> Result<Ratio> {
        match ratio {
            0.0 => Ok(Ratio(1.0)),
            r if r >= 1.0 && r.is_finite() => Ok(Ratio(r as f64)),
            r => Err(Error::argument("ratio", r, "a finite number from 1, or 0 for 1")),
        }
    }

    /// ⌈r·k⌉, tolerant to the rounding of r to float32: 1.1f is a little above 1.1, and ⌈1.1·10⌉ is 11.
    pub fn of(self, k: usize) -> usize {
        ((self.0 * k as f64 * (1.0 - 1e-6)).ceil() as usize).max(k)
    }

    /// The largest k with ⌈r·k⌉ up to `most`.
    fn largest(self, most: usize) -> usize {
        let near = (most as f64 / self.0) as usize;
        (near.saturating_sub(1)..=near + 1).rev().find(|&k| self.of(k) <= most).unwrap_or(0)
    }
}

pub struct ResetRequest<'a> {
    state: State<'a>,
    /// [n]
    rows: Option<Tensor<'a>>,
}

impl<'a> ResetRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_predictor_reset_args) -> Result<ResetRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let state = State::from_c(&checks, &c.state)?.writable()?;
        let rows = checks.optional_input("rows", &c.rows, &[DType::I32], &[("n", ANY)])?;
        overlap::reject(&[Some(&state.level), Some(&state.trend)], &[rows.as_ref()])?;
        Ok(ResetRequest { state, rows })
    }
}

pub fn reset(session: &Session, request: &ResetRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    let rows = || request.rows.map(|rows| Rule::within(rows, -1, Number::constant(request.state.sequences())));
    contents::check(session, &on, || rows().into_iter().collect())?;
    match on {
        On::Cpu(cpu) => {
            cpu::reset(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::reset(&enqueue, request),
    }
}

pub struct PredictRequest<'a> {
    state: State<'a>,
    blocks: Blocks<'a>,
    gamma: f32,
    ratio: Ratio,
    /// The budget of the selection, before the ratio.
    budget: Budget,
    /// [B]
    budgets: Option<Tensor<'a>>,
    predicted: BlockList<'a>,
    /// [B, Hk, max_blocks]
    scores: Option<Tensor<'a>>,
}

impl<'a> PredictRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_predictor_predict_args) -> Result<PredictRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        if !c.holt.gamma.is_finite() {
            return Err(Error::argument("holt.gamma", c.holt.gamma, "a finite number"));
        }
        let ratio = Ratio::from_c(c.ratio)?;
        let state = State::from_c(&checks, &c.state)?;
        let blocks = Blocks::from_c(&checks, [&c.seq_lens, &c.sequences], c.block_size, &state)?;
        let (batch, heads) = (blocks.batch(), state.kv_heads());
        let budgets = checks.optional_input("budgets", &c.budgets, &[DType::I32], &[("B", batch)])?;
        let names = ["predicted.ids", "predicted.counts", "predicted.slots"];
        let lists = Lists { batch, positions: None, kv_heads: heads };
        let predicted = BlockList::from_c(&checks, &c.predicted, names, lists)?.writable()?;
        let budget = Budget { k: c.k as usize, init: c.init_blocks as usize, local: c.local_blocks as usize };
        let capacity = predicted.cap();
        budget.require_some(budgets.is_some(), capacity, "no budgets, init_blocks or local_blocks")?;
        if ratio.of(budget.k) > capacity {
            let found = format!("{} predicted of a selection of {}", ratio.of(budget.k), budget.k);
            return Err(Error::argument("k", found, format!("at most predicted's cap, {capacity}")));
        }
        if budget.init + budget.local > capacity {
            let found = format!("{} with local_blocks {}", budget.init, budget.local);
            return Err(Error::argument(
                "init_blocks",
                found,
                format!("at most predicted's cap, {capacity}, together"),
            ));
        }
        let scores = checks.optional_output("scores", &c.scores, &[DType::F32], &blocks.shape(&state))?;
        let (lens, sequences) = (Some(&blocks.seq_lens), blocks.sequences.as_ref());
        overlap::reject(
            &[Some(&predicted.ids), Some(&predicted.counts), scores.as_ref()],
            &[Some(&state.level), Some(&state.trend), lens, sequences, budgets.as_ref()],
        )?;
        Ok(PredictRequest { state, blocks, gamma: c.holt.gamma, ratio, budget, budgets, predicted, scores })
    }
}

pub fn predict(session: &Session, request: &PredictRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || {
        let budgets = request.budgets.map(|t| Rule::up_to(t, request.ratio.largest(request.predicted.cap())));
        request.blocks.contents(&request.state).into_iter().chain(budgets).collect()
    })?;
    match on {
        On::Cpu(cpu) => cpu::predict(cpu, request),
        On::Cuda(enqueue) => cuda::predict(&enqueue, request),
    }
}

pub struct UpdateRequest<'a> {
    state: State<'a>,
    blocks: Blocks<'a>,
    holt: vwd_holt,
    /// [B, Hk, max_blocks]
    scores: Tensor<'a>,
}

impl<'a> UpdateRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_predictor_update_args) -> Result<UpdateRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let holt = check_holt("holt", &c.holt)?;
        let state = State::from_c(&checks, &c.state)?.writable()?;
        let blocks = Blocks::from_c(&checks, [&c.seq_lens, &c.sequences], c.block_size, &state)?;
        let scores = checks.input("scores", &c.scores, &[DType::F32], &blocks.shape(&state))?;
        let (lens, sequences) = (Some(&blocks.seq_lens), blocks.sequences.as_ref());
        overlap::reject(&[Some(&state.level), Some(&state.trend)], &[lens, sequences, Some(&scores)])?;
        Ok(UpdateRequest { state, blocks, holt, scores })
    }
}

pub fn update(session: &Session, request: &UpdateRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || {
        let distinct = request.blocks.sequences.map(Rule::distinct);
        request.blocks.contents(&request.state).into_iter().chain(distinct).collect()
    })?;
    match on {
        On::Cpu(cpu) => {
            cpu::update(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::update(&enqueue, request),
    }
}
