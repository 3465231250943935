//! Calibration on the CPU: a task takes a group of points through a history of a head.

use super::super::cpu::{forecast, smooth};
use super::{Best, CalibrateRequest, best};
use crate::abi::vwd_holt;
use crate::core::allocate::filled;
use crate::core::status::Result;
use crate::ops::topk::{Budget, select_top};
use crate::runtime::cpu::Cpu;

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

pub fn search(cpu: &Cpu, r: &CalibrateRequest) -> Result<Best> {
    let grid = &r.grid[..];
    let (heads, runs) = (r.scores.dim(2), r.runs());
    let tasks = grid.len().div_ceil(GROUP).saturating_mul(runs);
    let mut ratings = filled(Ok(Rating::default()), tasks, "vwd_predictor_calibrate")?;
    cpu.parallel_chunks(&mut ratings, 1, r.scores.dim(1) * r.scores.dim(3) * 4, |task, rating| {
        let (group, run) = (task / runs, task % runs);
        let points = &grid[group * GROUP..grid.len().min((group + 1) * GROUP)];
        // SAFETY: the run is below N·Hk.
        rating[0] = unsafe { rate(cpu, r, points, run / heads, run % heads) };
    });
    let ratings = ratings.into_iter().collect::<Result<Vec<Rating>>>()?;
    Ok(best(grid, runs, |point, run| {
        let Rating { hits, steps } = ratings[point / GROUP * runs + run];
        (hits[point % GROUP], steps)
    }))
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
    let wider = r.wider();
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
                let mut hit = 0;
                select_top(predicted, wider, |j| hit += target.weight(scores, j));
                *hits += hit as f64 / target.total as f64;
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
    /// What weights are multiplied by before their fraction is dropped.
    unit: f64,
    /// Σ w_j in units, above 0.
    total: u64,
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
        let finite = scores[free.clone()].iter().filter(|score| score.is_finite());
        let best = finite.fold(f32::NEG_INFINITY, |best, &score| best.max(score));
        if !best_left_out.is_finite() || best <= best_left_out {
            return None;
        }
        let best_left_out = best_left_out as f64;
        let unit = unit(best as f64 - best_left_out, free.len());
        let mut target = Target { free: free.clone(), best_left_out, unit, total: 0 };
        target.total = free.map(|j| target.weight(scores, j)).sum();
        Some(target)
    }

    /// w_j in units.
    fn weight(&self, scores: &[f32], j: usize) -> u64 {
        let counts = self.free.contains(&j) && scores[j].is_finite();
        if counts { ((scores[j] as f64 - self.best_left_out).max(0.0) * self.unit) as u64 } else { 0 }
    }
}

/// A power of two: that many times the weights of up to `blocks` blocks, `most` at most, add up to 2^63 at most.
fn unit(most: f64, blocks: usize) -> f64 {
    /// The bias of a float64's exponent, twice, and the bits of a sum that are one weight's if there is one block.
    const EXPONENT: u64 = 2 * 1023 + 62;
    let bits = usize::BITS - blocks.saturating_sub(1).leading_zeros();
    f64::from_bits((EXPONENT - bits as u64 - (most.to_bits() >> 52)) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_weights_keep_as_many_bits_as_fit() {
        for (most, blocks) in [(1.0, 1), (1.0, 2), (1.5, 5), (6.8e38, 1 << 30), (1e-45f32 as f64, 8192), (0.3, 100)] {
            let largest = (most * unit(most, blocks)) as u64;
            let sum = largest as u128 * blocks as u128;
            assert!(sum <= 1 << 63 && sum > 1 << 60, "{most} of {blocks} blocks: {sum}");
        }
    }
}
