//! Gather on the CPU: the session's threads copy one block after the other.

use super::GatherRequest;
use crate::core::copy::copy_strided;
use crate::core::tensor::MAX_RANK;
use crate::runtime::cpu::Cpu;

pub fn gather(cpu: &Cpu, r: &GatherRequest) {
    if r.is_empty() {
        return;
    }
    let heads = r.pairs.heads();
    let lists = r.pairs.batch() * heads;
    // SAFETY: the op's caller vouches for the tensors, and on a CPU session all lie in host memory.
    let count = |list: usize| unsafe { r.pairs.count(list / heads, list % heads) };
    let longest = (0..lists).map(count).max().unwrap_or(0);
    let block_bytes = r.target.shape()[1..].iter().product::<i64>() as usize * r.target.dtype.bytes();
    cpu.parallel(lists * longest, block_bytes, |n| {
        let (list, j) = (n / longest, n % longest);
        if j < count(list) {
            // SAFETY: as above; the entry is below its list's count. No other entry names its target.
            unsafe { copy_block(r, [list / heads, list % heads, j]) }
        }
    });
}

/// # Safety
/// The tensors are valid, the entry is inside the lists, and nothing else writes the target that it names.
unsafe fn copy_block(r: &GatherRequest, entry: [usize; 3]) {
    // SAFETY: the lists are valid and in host memory, as on a CPU session all are, and the entry is inside them.
    let Some([from, to]) = (unsafe { r.offsets(entry) }) else { return };
    let dims = r.block_dims();
    let shape: [usize; MAX_RANK - 1] = std::array::from_fn(|d| r.target.dim(d + 1));
    let strides = |of: usize| std::array::from_fn::<isize, { MAX_RANK - 1 }, _>(|d| r.block_strides(d)[of] as isize);
    let (source, target) = (strides(0), strides(1));
    // SAFETY: both blocks are inside their tensors, which the caller vouches for.
    unsafe {
        copy_strided(
            r.source.data().wrapping_offset(from as isize),
            r.target.data().wrapping_offset(to as isize),
            &shape[..dims],
            &source[..dims],
            &target[..dims],
            r.target.dtype.bytes(),
        )
    }
}
