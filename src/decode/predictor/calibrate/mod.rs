//! Choice of the smoothing factors on a history of score rows.
//!
//! Every point of a grid runs through every history and is rated by the share of each selection that it would have
//! predicted. A selected block weighs as much as its score exceeds c, the best score left out: w_j = max(s_j − c, 0). Raw
//! block scores have no fixed offset, scale or sign, so neither s_j itself nor its softmax would do as a weight.
//!
//! Weights are whole numbers of a step's unit, a power of two, so that a sum of them has the same bits in any order: a device adds them
//! in another one.

mod cpu;
pub(super) mod cuda;

use super::{Ratio, check_holt};
use crate::abi::{vwd_holt, vwd_predictor_calibrate_args};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor};
use crate::ops::contents::{self, Rule};
use crate::ops::topk::Budget;
use crate::runtime::{On, Session, require_no_flags};

pub struct CalibrateRequest<'a> {
    ratio: Ratio,
    /// The budget of the selection, before the ratio.
    budget: Budget,
    /// The points of the grid, at least one.
    grid: Vec<vwd_holt>,
    /// [N, T, Hk, nb]
    scores: Tensor<'a>,
    /// [N, T]
    block_counts: Tensor<'a>,
}

impl<'a> CalibrateRequest<'a> {
    /// # Safety
    /// `c.grid` is NULL or holds `grid_count` points.
    pub unsafe fn from_c(session: &Session, c: &'a vwd_predictor_calibrate_args) -> Result<CalibrateRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let grid = match (c.grid.is_null(), c.grid_count) {
            (true, 0) => built_in_grid(),
            (true, count) => {
                return Err(Error::argument("grid", "NULL", format!("{count} points, as grid_count says")));
            }
            (false, 0) => return Err(Error::argument("grid_count", 0, "at least 1, or no grid")),
            (false, _) if !c.grid.is_aligned() => {
                return Err(Error::argument("grid", format!("{:p} is misaligned", c.grid), "alignment to 4 bytes"));
            }
            (false, count) => {
                // SAFETY: not NULL, aligned; the caller vouches for the length.
                let points = unsafe { std::slice::from_raw_parts(c.grid, count as usize) };
                let checked = points.iter().enumerate().map(|(i, point)| check_holt(&format!("grid[{i}]"), point));
                checked.collect::<Result<Vec<_>>>()?
            }
        };
        let ratio = Ratio::from_c(c.ratio)?;
        let checks = session.checks();
        let shape = [("N", ANY), ("T", ANY), ("Hk", ANY), ("nb", ANY)];
        let scores = checks.input("scores", &c.scores, &[DType::F32], &shape)?;
        let steps = [("N", scores.dim(0)), ("T", scores.dim(1))];
        let block_counts = checks.input("block_counts", &c.block_counts, &[DType::I32], &steps)?;
        let budget = Budget { k: c.k as usize, init: c.init_blocks as usize, local: c.local_blocks as usize };
        Ok(CalibrateRequest { ratio, budget, grid, scores, block_counts })
    }

    /// N·Hk
    pub fn runs(&self) -> usize {
        self.scores.dim(0) * self.scores.dim(2)
    }

    /// The budget of a prediction.
    pub fn wider(&self) -> Budget {
        Budget { k: self.ratio.of(self.budget.k), ..self.budget }
    }
}

pub struct Best {
    pub holt: vwd_holt,
    pub hit_rate: f64,
}

pub fn calibrate(session: &Session, request: &CalibrateRequest) -> Result<Best> {
    let on = session.on(std::ptr::null_mut())?;
    contents::check(session, &on, || vec![Rule::up_to(request.block_counts, request.scores.dim(3))])?;
    if request.scores.shape().contains(&0) {
        return Ok(Best { holt: request.grid[0], hit_rate: 0.0 });
    }
    match on {
        On::Cpu(cpu) => cpu::search(cpu, request),
        On::Cuda(enqueue) => {
            // Its kernels run on a stream of the call's own.
            drop(enqueue);
            cuda::search(session.cuda().expect("a CUDA session"), request)
        }
    }
}

/// The best point; `rating` gives the shares that a point hit in a run, and how many steps count in it.
fn best(grid: &[vwd_holt], runs: usize, rating: impl Fn(usize, usize) -> (f64, u64)) -> Best {
    let mut best = Best { holt: grid[0], hit_rate: 0.0 };
    for (n, point) in grid.iter().enumerate() {
        let ratings = (0..runs).map(|run| rating(n, run));
        let (hits, steps) = ratings.fold((0.0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let hit_rate = hits / steps.max(1) as f64;
        if hit_rate > best.hit_rate {
            best = Best { holt: *point, hit_rate };
        }
    }
    best
}

/// {1, 0, 0}, then points with less and less weight of the newest score, each without a trend and with trends of several
/// speeds.
fn built_in_grid() -> Vec<vwd_holt> {
    let mut grid = Vec::new();
    for alpha in [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1] {
        grid.push(vwd_holt { alpha, beta: 0.0, gamma: 0.0 });
        for beta in [0.1, 0.3, 0.5] {
            grid.extend([0.25, 0.5, 1.0].map(|gamma| vwd_holt { alpha, beta, gamma }));
        }
    }
    grid
}
