//! Verification on the CPU: one pass over each row up to its first mismatch.

use super::Request;
use crate::core::along::Along;
use crate::core::dtype::{DType, Token};
use crate::runtime::cpu::Cpu;

/// The number of rows of one task.
const ROWS: usize = 64;

pub fn run(cpu: &Cpu, request: &Request) {
    match request.draft.dtype {
        DType::I32 => rows::<i32>(cpu, request),
        _ => rows::<i64>(cpu, request),
    }
}

fn rows<T: Token>(cpu: &Cpu, r: &Request) {
    let batch = r.batch();
    let bytes = ROWS * r.gamma() * 2 * size_of::<T>();
    cpu.parallel(batch.div_ceil(ROWS), bytes, |task| {
        for i in task * ROWS..batch.min((task + 1) * ROWS) {
            // SAFETY: shapes were checked; each row's outputs belong to one task.
            unsafe { row::<T>(r, i) }
        }
    });
}

/// # Safety
/// `i` is below the batch size, the tensors are valid and of dtype `T`, and no other task handles row `i`.
unsafe fn row<T: Token>(r: &Request, i: usize) {
    let gamma = r.gamma();
    // SAFETY: every index below is inside the checked shapes: j < len ≤ γ and k ≤ γ.
    unsafe {
        let len = r.draft_lens.map_or(gamma, |lens| (lens.get::<i32, 1>([i]).max(0) as usize).min(gamma));
        let (draft, target) = (r.draft.row::<T, 1>([i]), r.target.row::<T, 1>([i]));
        let agrees = |j: usize| {
            let guess = draft.get(j);
            !guess.is_negative() && guess == target.get(j)
        };
        let k = (0..len).position(|j| !agrees(j)).unwrap_or(len);
        let next = target.get(k);
        r.accepted.set([i], k as i32);
        r.next_token.set([i], next);
        if let Some(mismatch) = r.mismatch {
            let refused = k < len;
            match mismatch.dtype {
                DType::I32 => mismatch.set([i], refused as i32),
                // uint8 and bool are both one byte.
                _ => Along::new(mismatch.data(), mismatch.stride(0)).set(i, refused as u8),
            }
        }
        if let Some(committed) = r.committed {
            let committed = committed.row::<T, 1>([i]);
            (0..k).for_each(|j| committed.set(j, draft.get(j)));
            committed.set(k, next);
            (k + 1..=gamma).for_each(|j| committed.set(j, T::NONE));
        }
    }
}
