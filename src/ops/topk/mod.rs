//! The exact top k of rows of scores, and the cut that selection finds them by.
//!
//! Order: larger first; equal scores (−0 and +0 are equal) by the lower index; NaN ranks as −inf.

mod choose;
mod cpu;
mod cuda;
mod cut;

pub use cuda::Clusters;
pub(super) use cuda::Kernels;
pub use cut::{Budget, Cut, Run, select_top, select_top_of};

use super::contents::{self, Rule};
use crate::abi::{VWD_TOPK_ASCENDING, VWD_TOPK_BEST_FIRST, vwd_stream, vwd_topk_args};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor};
use crate::runtime::{On, Session, require_no_flags};

/// Checked arguments; shapes as in `vwd_topk`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    k: usize,
    /// Rather than by index.
    best_first: bool,
    /// [R, n]
    scores: Tensor<'a>,
    /// [R]
    lens: Option<Tensor<'a>>,
    /// [R]
    budgets: Option<Tensor<'a>>,
    /// [R, cap]
    ids: Tensor<'a>,
    /// [R]
    counts: Tensor<'a>,
    /// [R, cap]
    values: Option<Tensor<'a>>,
}

impl<'a> Request<'a> {
    #[inline(always)]
    pub fn from_c(session: &Session, c: &'a vwd_topk_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let best_first = match c.order {
            VWD_TOPK_ASCENDING => false,
            VWD_TOPK_BEST_FIRST => true,
            other => return Err(Error::argument("order", other, "a VWD_TOPK_* value (0 or 1)")),
        };
        let checks = session.checks();
        let scores = checks.input("scores", &c.scores, DType::FLOATS, &[("R", ANY), ("n", ANY)])?;
        if scores.dim(1) > i32::MAX as usize {
            return Err(Error::argument("scores", format!("{} scores a row", scores.dim(1)), "at most 2^31 − 1"));
        }
        let rows = ("R", scores.dim(0));
        let ids = checks.output("ids", &c.ids, &[DType::I32], &[rows, ("cap", ANY)])?;
        let cap = ids.dim(1);
        if c.k as usize > cap {
            return Err(Error::argument("k", c.k, format!("at most the {cap} places of ids")));
        }
        let budgets = checks.optional_input("budgets", &c.budgets, &[DType::I32], &[rows])?;
        Budget { k: c.k as usize, init: 0, local: 0 }.require_some(budgets.is_some(), cap, "no budgets")?;
        let request = Request {
            k: c.k as usize,
            best_first,
            scores,
            lens: checks.optional_input("lens", &c.lens, &[DType::I32], &[rows])?,
            budgets,
            ids,
            counts: checks.output("counts", &c.counts, &[DType::I32], &[rows])?,
            values: checks.optional_output("values", &c.values, &[scores.dtype], &[rows, ("cap", cap)])?,
        };
        overlap::reject(
            &[Some(&request.ids), Some(&request.counts), request.values.as_ref()],
            &[Some(&request.scores), request.lens.as_ref(), request.budgets.as_ref()],
        )?;
        Ok(request)
    }

    /// What a session that checks contents reads.
    fn contents(&self) -> Vec<Rule<'a>> {
        let lens = self.lens.map(|lens| Rule::up_to(lens, self.scores.dim(1)));
        let budgets = self.budgets.map(|budgets| Rule::up_to(budgets, self.cap()));
        [lens, budgets].into_iter().flatten().collect()
    }

    fn rows(&self) -> usize {
        self.scores.dim(0)
    }

    fn cap(&self) -> usize {
        self.ids.dim(1)
    }

    /// The most that a row can select.
    fn most(&self) -> usize {
        self.scores.dim(1).min(if self.budgets.is_some() { self.cap() } else { self.k })
    }
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}
