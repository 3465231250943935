//! Verification on the CPU: one pass over each draft up to its first mismatch.

use super::Request;
use crate::abi::VWD_FINISH_NONE;
use crate::core::along::Along;
use crate::core::dtype::{DType, Token};
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;

/// The number of rows of one task.
const ROWS: usize = 64;

pub fn run(cpu: &Cpu, request: &Request) {
    match request.draft.dtype {
        DType::I32 => rows::<i32>(cpu, request),
        _ => rows::<i64>(cpu, request),
    }
}

fn rows<T: Token + Into<i64>>(cpu: &Cpu, r: &Request) {
    let batch = r.batch();
    let bytes = ROWS * r.gamma() * 2 * size_of::<T>();
    cpu.parallel(batch.div_ceil(ROWS), bytes, |task| {
        for i in task * ROWS..batch.min((task + 1) * ROWS) {
            // SAFETY: shapes were checked; each row's outputs belong to one task.
            unsafe { row::<T>(r, i) }
        }
    });
}

/// The tokens of one request.
struct Row<T> {
    draft: Along<T>,
    target: Along<T>,
    /// Draft tokens that are looked at.
    len: usize,
    /// The bonus token, and how many of the target's tokens come before it; absent where it is one of the target's.
    bonus: Option<(usize, T)>,
}

impl<T: Token> Row<T> {
    /// # Safety
    /// `i` is below the batch size, the tensors are valid and of dtype `T`.
    unsafe fn of(r: &Request, i: usize) -> Row<T> {
        let gamma = r.gamma();
        // SAFETY: forwarded to the caller.
        unsafe {
            let Some(flat) = &r.flat else {
                let len = r.draft_lens.map_or(gamma, |lens| (lens.get::<i32, 1>([i]).max(0) as usize).min(gamma));
                return Row { draft: r.draft.row::<T, 1>([i]), target: r.target.row::<T, 1>([i]), len, bonus: None };
            };
            let end = |i: usize| (flat.ends.get::<i32, 1>([i]).max(0) as usize).min(r.draft.dim(0));
            let begin = if i > 0 { end(i - 1) } else { 0 };
            let count = end(i).saturating_sub(begin);
            let from = |t: &Tensor| {
                let all = Along::new(t.data().cast::<T>(), t.stride(0));
                Along::new(all.at(begin), t.stride(0))
            };
            let bonus = Some((count, flat.bonus.get::<T, 1>([i])));
            Row { draft: from(&r.draft), target: from(&r.target), len: count.min(gamma), bonus }
        }
    }

    /// The target's token at a position, of which there is one more than draft tokens: the bonus token, too.
    ///
    /// # Safety
    /// The row is valid, and `j` at most `len`.
    unsafe fn token(&self, j: usize) -> T {
        match self.bonus {
            Some((count, bonus)) if j == count => bonus,
            // SAFETY: forwarded to the caller.
            _ => unsafe { self.target.get(j) },
        }
    }
}

/// # Safety
/// `i` is below the batch size, the tensors are valid and of dtype `T`, and no other task handles row `i`.
unsafe fn row<T: Token + Into<i64>>(r: &Request, i: usize) {
    // SAFETY: every index below is inside the checked shapes: j < len ≤ γ and k ≤ len.
    unsafe {
        let row = Row::<T>::of(r, i);
        let agrees = |j: usize| {
            let guess = row.draft.get(j);
            !guess.is_negative() && guess == row.target.get(j)
        };
        let k = (0..row.len).position(|j| !agrees(j)).unwrap_or(row.len);
        // Accepted draft tokens are the target's.
        let (n, finish) = match &r.end {
            Some(end) => end.cut(i, k + 1, |j| row.token(j).into()),
            None => (k + 1, VWD_FINISH_NONE),
        };
        let has_next = n > k;
        r.accepted.set([i], k.min(n) as i32);
        r.next_token.set([i], if has_next { row.token(k) } else { T::NONE });
        if let Some(mismatch) = r.mismatch {
            let refused = has_next && k < row.len;
            match mismatch.dtype {
                DType::I32 => mismatch.set([i], refused as i32),
                // uint8 and bool are both one byte.
                _ => Along::new(mismatch.data(), mismatch.stride(0)).set(i, refused as u8),
            }
        }
        if let Some(committed) = r.committed {
            let committed = committed.row::<T, 1>([i]);
            (0..n).for_each(|j| committed.set(j, row.token(j)));
            (n..=r.gamma()).for_each(|j| committed.set(j, T::NONE));
        }
        if let Some(end) = &r.end {
            end.write(i, n, finish);
        }
    }
}
