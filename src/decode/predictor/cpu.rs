//! The predictor on the CPU: one task per (sequence, KV head), one pass over its blocks.

use super::{PredictRequest, ResetRequest, UpdateRequest};
use crate::abi::vwd_holt;
use crate::core::status::Result;
use crate::ops::topk::{Budget, select_top};
use crate::runtime::cpu::{Cpu, Rows};

const UNSEEN: f32 = f32::NEG_INFINITY;

/// ŝ of a block.
#[inline(always)]
pub(super) fn forecast(level: f32, trend: f32, gamma: f32) -> f32 {
    if level.is_finite() { level + gamma * trend } else { UNSEEN }
}

/// L' and T' of a block.
#[inline(always)]
pub(super) fn smooth(level: f32, trend: f32, score: f32, holt: &vwd_holt) -> (f32, f32) {
    let next = holt.alpha * score + (1.0 - holt.alpha) * level;
    let slope = holt.beta * (next - level) + (1.0 - holt.beta) * trend;
    let known = level.is_finite() & trend.is_finite() & score.is_finite();
    if known { (next, slope) } else { (score, 0.0) }
}

pub fn reset(cpu: &Cpu, r: &ResetRequest) {
    let (batch, blocks) = (r.state.sequences(), r.state.max_blocks());
    let listed = r.rows.map_or(batch, |rows| rows.dim(0));
    if r.state.is_empty() || listed == 0 {
        return;
    }
    // A task takes one head of every row, so that a row listed twice is not written by two tasks.
    cpu.parallel(r.state.kv_heads(), listed.saturating_mul(blocks).saturating_mul(8), |g| {
        for n in 0..listed {
            // SAFETY: n is below the number of rows.
            let i = r.rows.map_or(n as i64, |rows| unsafe { rows.get::<i32, 1>([n]) } as i64);
            if i < 0 || i >= batch as i64 {
                continue;
            }
            for j in 0..blocks {
                // SAFETY: i was checked, g and j are inside the state; no other task has head g.
                unsafe {
                    r.state.level.set([i as usize, g, j], UNSEEN);
                    r.state.trend.set([i as usize, g, j], 0.0f32);
                }
            }
        }
    });
}

pub fn predict(cpu: &Cpu, r: &PredictRequest) -> Result<()> {
    let (batch, heads) = (r.blocks.batch(), r.state.kv_heads());
    if heads == 0 {
        return Ok(());
    }
    // SAFETY: i is below B.
    let most = (0..batch).map(|i| unsafe { r.blocks.count(i) }).max().unwrap_or(0);
    let scratch = cpu.scratch();
    let tasks = batch * heads;
    // ŝ of each task's blocks.
    let rows = Rows::new(scratch.slice(tasks * most, 0.0f32)?, most);
    cpu.parallel(tasks, most * 8, |task| {
        // SAFETY: the task is below B·Hk, and has this (sequence, KV head) and this row to itself.
        unsafe { predict_row(r, task / heads, task % heads, rows.row(task)) }
    });
    Ok(())
}

/// # Safety
/// `i` and `g` are inside the checked shapes, and no other task handles them.
unsafe fn predict_row(r: &PredictRequest, i: usize, g: usize, row: &mut [f32]) {
    let capacity = r.predicted.cap();
    // SAFETY: every index below is inside the checked shapes; at most `capacity` blocks are emitted, because neither the
    // clamped budget nor the number of forced blocks exceeds it.
    unsafe {
        let row = &mut row[..r.blocks.count(i)];
        row.fill(UNSEEN);
        let sequence = r.blocks.sequence(i, &r.state);
        if let Some(n) = sequence {
            let (level, trend) = (r.state.level.row::<f32, 2>([n, g]), r.state.trend.row::<f32, 2>([n, g]));
            for (j, score) in row.iter_mut().enumerate() {
                *score = forecast(level.get(j), trend.get(j), r.gamma);
            }
        }
        if let Some(scores) = r.scores {
            for (j, &score) in row.iter().enumerate() {
                scores.set([i, g, j], score);
            }
        }
        let k = r.budgets.map_or(r.budget.k, |budgets| budgets.get::<i32, 1>([i]).max(0) as usize);
        // A sequence that the state has not gets its forced blocks alone.
        let k = if sequence.is_some() { r.ratio.of(k).min(capacity) } else { 0 };
        let budget = Budget { k, ..r.budget };
        let mut count = 0;
        select_top(row, budget, |j| {
            r.predicted.ids.set([i, g, count], j as i32);
            count += 1;
        });
        r.predicted.counts.set([i, g], count as i32);
    }
}

pub fn update(cpu: &Cpu, r: &UpdateRequest) {
    let heads = r.state.kv_heads();
    if r.state.is_empty() {
        return;
    }
    cpu.parallel(r.blocks.batch() * heads, r.state.max_blocks() * 12, |task| {
        // SAFETY: the task is below B·Hk, and has this (sequence, KV head) to itself.
        unsafe { update_row(r, task / heads, task % heads) }
    });
}

/// # Safety
/// `i` and `g` are inside the checked shapes, and no other task handles them or has the same sequence.
unsafe fn update_row(r: &UpdateRequest, i: usize, g: usize) {
    // SAFETY: j stays below n_i ≤ max_blocks.
    unsafe {
        let Some(n) = r.blocks.sequence(i, &r.state) else { return };
        let (level, trend) = (r.state.level.row::<f32, 2>([n, g]), r.state.trend.row::<f32, 2>([n, g]));
        let scores = r.scores.row::<f32, 2>([i, g]);
        for j in 0..r.blocks.count(i) {
            let (l, t) = smooth(level.get(j), trend.get(j), scores.get(j), &r.holt);
            level.set(j, l);
            trend.set(j, t);
        }
    }
}
