//! Choice of the smoothing factors on a history of score rows.
//!
//! Every point of a grid runs through every history and is rated by the share of each selection that it would have
//! predicted. A selected block weighs as much as its score exceeds c, the best score left out: w_j = max(s_j − c, 0). Raw
//! block scores have no fixed offset, scale or sign, so neither s_j itself nor its softmax would do as a weight.

use super::cpu::{forecast, smooth};
use super::{Ratio, check_holt};
use crate::abi::{vwd_holt, vwd_predictor_calibrate_args};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor};
use crate::ops::contents::{self, Rule};
use crate::ops::topk::{Budget, select_top};
use crate::runtime::cpu::Cpu;
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
}

pub struct Best {
    pub holt: vwd_holt,
    pub hit_rate: f64,
}

pub fn calibrate(session: &Session, request: &CalibrateRequest) -> Result<Best> {
    let on = session.on(std::ptr::null_mut())?;
    contents::check(session, &on, || vec![Rule::up_to(request.block_counts, request.scores.dim(3))])?;
    match on {
        On::Cpu(cpu) => search(cpu, request),
        On::Cuda(_) => Err(Error::unsupported("vwd_predictor_calibrate has no CUDA kernel in this build")),
    }
}

/// The number of points that run through a history together, so that its targets are found once for all of them.
const GROUP: usize = 8;

/// How well a group of points predicted one history of one head.
#[derive(Clone, Copy, Default)]
struct Rating {
    /// The sum of the shares hit, per point.
    hits: [f64; GROUP],
    /// The number of steps that count.
    steps: u64,
}

fn search(cpu: &Cpu, r: &CalibrateRequest) -> Result<Best> {
    let grid = &r.grid[..];
    let mut best = Best { holt: grid[0], hit_rate: 0.0 };
    if r.scores.shape().contains(&0) {
        return Ok(best);
    }
    let (heads, runs) = (r.scores.dim(2), r.scores.dim(0) * r.scores.dim(2));
    let tasks = grid.len().div_ceil(GROUP).saturating_mul(runs);
    let mut ratings: Vec<Result<Rating>> = Vec::new();
    let bytes = tasks.saturating_mul(size_of::<Result<Rating>>());
    ratings.try_reserve_exact(tasks).map_err(|_| Error::out_of_memory(bytes, "vwd_predictor_calibrate"))?;
    ratings.resize(tasks, Ok(Rating::default()));
    cpu.parallel_chunks(&mut ratings, 1, r.scores.dim(1) * r.scores.dim(3) * 4, |task, rating| {
        let (group, run) = (task / runs, task % runs);
        let points = &grid[group * GROUP..grid.len().min((group + 1) * GROUP)];
        // SAFETY: the run is below N·Hk.
        rating[0] = unsafe { rate(cpu, r, points, run / heads, run % heads) };
    });

    for (points, ratings) in grid.chunks(GROUP).zip(ratings.chunks(runs)) {
        let mut sum = Rating::default();
        for rating in ratings {
            let rating = rating.as_ref().map_err(Error::clone)?;
            sum.hits.iter_mut().zip(rating.hits).for_each(|(sum, hits)| *sum += hits);
            sum.steps += rating.steps;
        }
        for (point, hits) in points.iter().zip(sum.hits) {
            let hit_rate = hits / sum.steps.max(1) as f64;
            if hit_rate > best.hit_rate {
                best = Best { holt: *point, hit_rate };
            }
        }
    }
    Ok(best)
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

/// Runs a group of points through history `n` of head `g`.
///
/// # Safety
/// The caller of the op keeps the tensors valid, the session computes on the CPU, and `n` and `g` are inside the shape.
unsafe fn rate(cpu: &Cpu, r: &CalibrateRequest, points: &[vwd_holt], n: usize, g: usize) -> Result<Rating> {
    let steps = r.scores.dim(1);
    // SAFETY: n is below N, t below T.
    let blocks = |t: usize| (unsafe { r.block_counts.get::<i32, 2>([n, t]) }.max(0) as usize).min(r.scores.dim(3));
    let most = (0..steps).map(blocks).max().unwrap_or(0);
    let scratch = cpu.scratch();
    let (scores, predicted) = (scratch.slice(most, 0.0f32)?, scratch.slice(most, 0.0f32)?);
    // The level and trend of every block, per point.
    let states = scratch.slice(points.len() * most, (f32::NEG_INFINITY, 0.0f32))?;
    let wider = Budget { k: r.ratio.of(r.budget.k), ..r.budget };
    let mut rating = Rating::default();
    for t in 0..steps {
        let scores = &mut scores[..blocks(t)];
        for (j, score) in scores.iter_mut().enumerate() {
            // SAFETY: n, t and g are inside the shape; j stays below nb.
            *score = unsafe { r.scores.get([n, t, g, j]) };
        }
        let scores = &*scores;
        let target = if t > 0 { Target::of(scores, r.budget) } else { None };
        rating.steps += target.is_some() as u64;
        for ((holt, hits), state) in points.iter().zip(&mut rating.hits).zip(states.chunks_mut(most.max(1))) {
            if let Some(target) = &target {
                let predicted = &mut predicted[..scores.len()];
                for (predicted, &(level, trend)) in predicted.iter_mut().zip(&*state) {
                    *predicted = forecast(level, trend, holt.gamma);
                }
                let mut hit = 0.0;
                select_top(predicted, wider, |j| hit += target.weight(scores, j));
                *hits += hit / target.total;
            }
            for ((level, trend), &score) in state.iter_mut().zip(scores) {
                (*level, *trend) = smooth(*level, *trend, score, holt);
            }
        }
    }
    Ok(rating)
}

/// The blocks to hit in one step of one head.
struct Target {
    /// The blocks that are not forced.
    free: std::ops::Range<usize>,
    /// c, the best finite score that the selection leaves out.
    best_left_out: f64,
    /// Σ w_j, above 0.
    total: f64,
}

impl Target {
    /// `None` if the selection leaves no finite score out, or takes no score above c.
    fn of(scores: &[f32], budget: Budget) -> Option<Target> {
        let n = scores.len();
        let init = budget.init.min(n);
        let free = init..n - budget.local.min(n - init);
        let mut left_out = free.start;
        let mut best_left_out = f32::NEG_INFINITY;
        let mut leave_out = |range: std::ops::Range<usize>| {
            let finite = scores[range].iter().filter(|score| score.is_finite());
            finite.for_each(|&score| best_left_out = best_left_out.max(score));
        };
        select_top(scores, budget, |j| {
            if free.contains(&j) {
                leave_out(left_out..j);
                left_out = j + 1;
            }
        });
        leave_out(left_out..free.end);
        let mut target = Target { free: free.clone(), best_left_out: best_left_out as f64, total: 0.0 };
        if best_left_out.is_finite() {
            target.total = free.map(|j| target.weight(scores, j)).sum();
        }
        (target.total > 0.0).then_some(target)
    }

    fn weight(&self, scores: &[f32], j: usize) -> f64 {
        let counts = self.free.contains(&j) && scores[j].is_finite();
        if counts { (scores[j] as f64 - self.best_left_out).max(0.0) } else { 0.0 }
    }
}
