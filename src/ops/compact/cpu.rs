//! Compaction on the CPU: a task for each cache, which moves the rows of one sequence after the other in ascending order.

use super::{Compactor, Request};
use crate::core::copy::copy_strided;
use crate::core::dtype::DType;
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;

pub fn run(cpu: &Cpu, compactor: &Compactor, r: &Request) {
    let row = compactor.cache(0);
    let row_bytes = (2..row.rank()).fold(row.dtype.bytes(), |bytes, d| bytes.saturating_mul(row.dim(d)));
    let bytes = r.batch().saturating_mul(r.path.dim(1)).saturating_mul(row_bytes);
    cpu.parallel(compactor.count(), bytes, |n| {
        let cache = compactor.cache(n);
        if !cache.is_empty() {
            // SAFETY: caches do not overlap, and this one is the task's alone.
            (0..r.batch()).for_each(|i| unsafe { compact(compactor, &cache, r, i) });
        }
    });
}

/// # Safety
/// The tensors are valid and have a sequence `i`; no other task moves rows of the cache.
unsafe fn compact(compactor: &Compactor, cache: &Tensor, r: &Request, i: usize) {
    // SAFETY: i is a sequence, j below M; rows are those of pages that are there.
    unsafe {
        let base = match r.bases.dtype {
            DType::I32 => r.bases.get::<i32, 1>([i]) as i64,
            _ => r.bases.get::<i64, 1>([i]),
        };
        let last = r.accepted.map_or(i64::MAX, |accepted| accepted.get::<i32, 1>([i]) as i64);
        let mut before = -1;
        for j in 0..r.path.dim(1) {
            let node = r.path.get::<i32, 2>([i, j]);
            if node <= before || j as i64 > last || base < 0 {
                return;
            }
            before = node;
            let place = |n: i64| base.checked_add(n).and_then(|t| row(compactor, cache, r, i, t as usize));
            let (Some(from), Some(to)) = (place(node as i64), place(j as i64)) else { continue };
            if from != to {
                copy_row(cache, from, to);
            }
        }
    }
}

/// The address of the row of token `t` of sequence `i`; none where no page holds it.
///
/// # Safety
/// The tensors are valid and have a sequence `i`.
unsafe fn row(compactor: &Compactor, cache: &Tensor, r: &Request, i: usize, t: usize) -> Option<*mut u8> {
    let (p, row) = (t / compactor.rows, t % compactor.rows);
    let page = match &r.page_table {
        None => (p == 0).then_some(i)?,
        Some(table) if p < table.dim(1) => {
            // SAFETY: the table has a row for each sequence, and p is inside it.
            usize::try_from(unsafe { table.get::<i32, 2>([i, p]) }).ok().filter(|&page| page < compactor.pages)?
        }
        Some(_) => return None,
    };
    let offset = page as i64 * cache.byte_stride(0) + row as i64 * cache.byte_stride(1);
    Some(cache.data().wrapping_offset(offset as isize))
}

/// # Safety
/// Both are different rows of the cache, which are this task's alone.
unsafe fn copy_row(cache: &Tensor, from: *const u8, to: *mut u8) {
    let dims = cache.rank() - 2;
    let shape: [usize; 3] = std::array::from_fn(|d| cache.dim(d + 2));
    let steps: [isize; 3] = std::array::from_fn(|d| cache.byte_stride(d + 2) as isize);
    // SAFETY: the elements of a cache are distinct, so that two of its rows are apart.
    unsafe { copy_strided(from, to, &shape[..dims], &steps[..dims], &steps[..dims], cache.dtype.bytes()) }
}
