//! Packing on the CPU: a running sum, then every sequence copies its rows.

use super::{Pair, Request, row_bytes};
use crate::core::copy::copy_strided;
use crate::core::dtype::DType;
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;

pub fn run(cpu: &Cpu, r: &Request) {
    let batch = r.batch();
    // SAFETY: shapes were checked, and this thread alone writes offsets.
    unsafe {
        let mut total = 0i64;
        for i in 0..batch {
            write_offset(&r.offsets, i, total);
            total += accepted(r, i) as i64;
        }
        write_offset(&r.offsets, batch, total);
    }
    let first = r.pairs.get(0).rows;
    let bytes = r.gamma.saturating_mul(row_bytes(&first));
    cpu.parallel(r.pairs.len() * batch, bytes, |task| {
        let (n, i) = (task / batch, task % batch);
        // SAFETY: tasks copy to disjoint rows of packed; offsets were written above.
        unsafe { copy_rows(&r.pairs.get(n), i, accepted(r, i), read_offset(&r.offsets, i)) }
    });
}

/// # Safety
/// `i` is below the batch size.
unsafe fn accepted(r: &Request, i: usize) -> usize {
    // SAFETY: accepted has an entry for each sequence, of which i is one.
    (unsafe { r.accepted.get::<i32, 1>([i]) }.max(0) as usize).min(r.gamma)
}

/// # Safety
/// `i` is at most the batch size.
unsafe fn write_offset(offsets: &Tensor, i: usize, value: i64) {
    // SAFETY: offsets has B+1 entries.
    unsafe {
        match offsets.dtype {
            DType::I32 => offsets.set([i], value as i32),
            _ => offsets.set([i], value),
        }
    }
}

/// # Safety
/// The conditions of [`write_offset`] hold.
unsafe fn read_offset(offsets: &Tensor, i: usize) -> i64 {
    // SAFETY: offsets has B+1 entries.
    unsafe {
        match offsets.dtype {
            DType::I32 => offsets.get::<i32, 1>([i]) as i64,
            _ => offsets.get([i]),
        }
    }
}

/// Copies `count` rows of sequence `i` to the packed rows from `first` on, up to the capacity.
///
/// # Safety
/// `i` is below the batch size, `count` at most γ; no other task writes these rows.
unsafe fn copy_rows(pair: &Pair, i: usize, count: usize, first: i64) {
    let Pair { rows, packed } = pair;
    let capacity = packed.dim(0) as i64;
    let count = count.min((capacity - first).max(0) as usize);
    // The offsets of a tensor without elements may overflow.
    if count == 0 || packed.is_empty() {
        return;
    }
    let size = rows.dtype.bytes();
    let source = rows.data().wrapping_offset(i as isize * rows.byte_stride(0) as isize);
    let target = packed.data().wrapping_offset(first as isize * packed.byte_stride(0) as isize);
    // The dimensions of the copied box: the number of rows, then the dimensions of a row.
    let dims = rows.rank() - 1;
    let shape: [usize; 4] = std::array::from_fn(|d| if d == 0 { count } else { rows.dim(d + 1) });
    let from: [isize; 4] = std::array::from_fn(|d| rows.byte_stride(d + 1) as isize);
    let to: [isize; 4] = std::array::from_fn(|d| packed.byte_stride(d) as isize);
    // SAFETY: the walk stays inside the checked shapes of both.
    unsafe { copy_strided(source, target, &shape[..dims], &from[..dims], &to[..dims], size) }
}
