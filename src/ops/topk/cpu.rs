//! Top-k on the CPU: the cut by counting digits, then one pass that takes what is above it.

use super::{Cut, Request};
use crate::core::dtype::Float;
use crate::core::status::Result;
use crate::runtime::cpu::{Cpu, Rows};
use crate::with_float;

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    if r.rows() == 0 {
        return Ok(());
    }
    // Only entries that are put in order need scratch.
    let most = if r.best_first { r.most() } else { 0 };
    let scratch = cpu.scratch();
    let entries = scratch.slice(r.rows().saturating_mul(most), Entry { score: 0.0, id: 0 })?;
    let entries = Rows::new(entries, most);
    with_float!(r.scores.dtype, T => {
        cpu.parallel(r.rows(), r.scores.dim(1) * size_of::<T>(), |row| {
            // SAFETY: each task has a row of its own, and the caller keeps the tensors valid.
            unsafe { select::<T>(r, row, entries.row(row)) }
        });
    });
    Ok(())
}

/// One that is selected.
#[derive(Clone, Copy)]
struct Entry {
    /// No NaN.
    score: f32,
    id: u32,
}

/// # Safety
/// The tensors are valid, scores of dtype `T`, and no other task handles this row; `entries` has places for all that it
/// selects, or none where they are not put in order.
unsafe fn select<T: Float>(r: &Request, row: usize, entries: &mut [Entry]) {
    // SAFETY: forwarded to the caller; j is below n, and places below cap.
    unsafe {
        let count = |given: i32, most: usize| (given.max(0) as usize).min(most);
        let len = r.lens.map_or(r.scores.dim(1), |lens| count(lens.get([row]), r.scores.dim(1)));
        let wanted = r.budgets.map_or(r.k, |budgets| count(budgets.get([row]), r.cap())).min(len);
        let (first, step) = (r.scores.at::<T, 1>([row]), r.scores.stride(1));
        let score = |j: usize| first.wrapping_offset(j as isize * step).read().to_f32();
        let mut cut = Cut::of_best((0..len).map(|j| (score(j), 1)), len, wanted);
        let mut place = 0;
        for j in (0..len).filter(|&j| cut.takes(score(j))) {
            if r.best_first {
                let score = score(j);
                entries[place] = Entry { score: if score.is_nan() { f32::NEG_INFINITY } else { score }, id: j as u32 };
            } else {
                write::<T>(r, row, place, j);
            }
            place += 1;
        }
        if r.best_first {
            let chosen = &mut entries[..place];
            chosen.sort_unstable_by(|a, b| b.score.partial_cmp(&a.score).expect("no NaN").then(a.id.cmp(&b.id)));
            for (place, entry) in chosen.iter().enumerate() {
                write::<T>(r, row, place, entry.id as usize);
            }
        }
        r.counts.set([row], place as i32);
    }
}

/// # Safety
/// As for [`select`]; score `j` is there and has this place.
unsafe fn write<T: Float>(r: &Request, row: usize, place: usize, j: usize) {
    // SAFETY: forwarded to the caller.
    unsafe {
        r.ids.set([row, place], j as i32);
        if let Some(values) = &r.values {
            values.set([row, place], r.scores.get::<T, 2>([row, j]));
        }
    }
}
