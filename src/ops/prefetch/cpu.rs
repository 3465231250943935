//! Gather on the CPU: the session's threads copy one block after the other.

use super::GatherRequest;
use crate::core::copy::copy_strided;
use crate::core::tensor::{MAX_RANK, Tensor};
use crate::runtime::cpu::Cpu;

pub fn gather(cpu: &Cpu, r: &GatherRequest) {
    // Nothing to copy, however long the list is. Offsets may not even exist.
    if r.source.is_empty() || r.target.is_empty() {
        return;
    }
    let listed = r.source_ids.dim(0);
    // SAFETY: the op's caller vouches for the tensors; count has one element.
    let count = r.count.map_or(listed, |count| (unsafe { count.get::<i32, 1>([0]) }.max(0) as usize).min(listed));
    let size = r.source.dtype.bytes();
    let block_bytes = r.source.shape()[1..].iter().product::<i64>() as usize * size;
    cpu.parallel(count, block_bytes, |j| {
        // SAFETY: as above; j is below the count.
        let (from, to) = unsafe {
            let to = r.target_ids.map_or(Some(j), |ids| usize::try_from(ids.get::<i32, 1>([j])).ok());
            (usize::try_from(r.source_ids.get::<i32, 1>([j])).ok(), to)
        };
        let (Some(from), Some(to)) = (from, to) else { return };
        if from < r.source.dim(0) && to < r.target.dim(0) {
            // SAFETY: both blocks exist; no other pair names this target.
            unsafe { copy_block(&r.source, from, &r.target, to, size) }
        }
    });
}

/// # Safety
/// The tensors are valid and equal in their trailing shape, the blocks inside them, and nothing else writes the target.
unsafe fn copy_block(source: &Tensor, from: usize, target: &Tensor, to: usize, size: usize) {
    let address = |t: &Tensor, block: usize| t.data().wrapping_offset(block as isize * t.byte_stride(0) as isize);
    let strides = |t: &Tensor| std::array::from_fn::<isize, { MAX_RANK - 1 }, _>(|d| t.byte_stride(d + 1) as isize);
    let shape: [usize; MAX_RANK - 1] = std::array::from_fn(|d| source.dim(d + 1));
    let inner = source.rank() - 1;
    let (source_strides, target_strides) = (strides(source), strides(target));
    // SAFETY: both blocks have this shape and lie inside their tensors, which do not overlap.
    unsafe {
        copy_strided(
            address(source, from),
            address(target, to),
            &shape[..inner],
            &source_strides[..inner],
            &target_strides[..inner],
            size,
        )
    }
}
