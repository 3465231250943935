//! What the host knows of kernels/quantize/rows.cuh: which rows it codes, and the shared memory that they take.

use crate::core::dtype::DType;
use crate::runtime::cuda::Facts;
use crate::runtime::cuda::views::element_code;

pub const THREADS: u32 = 128;
/// Channels of the rows, in the order of the kernels.
const DIMS: [usize; 2] = [64, 128];
/// A lane's channels, and the bytes that they are apart in shared memory.
const SPAN: usize = 32;
const SPAN_PITCH: usize = SPAN * 2 + 16;
/// What the kernels declare, at most.
const DECLARED: u32 = 2048;

/// The most shared memory that launches add to what the kernels declare.
pub fn most_shared(facts: &Facts) -> u32 {
    (shared(DIMS[1], crate::ops::int4::MAX_BLOCK)).min(facts.shared_bytes - DECLARED)
}

/// The keys and values of a block.
fn shared(dim: usize, block: usize) -> u32 {
    (2 * block * (dim / SPAN * SPAN_PITCH)) as u32
}

/// Which of the kernels codes rows of these channels, whose elements have such a code, and the shared memory that a launch adds; None where none does.
pub fn find(facts: &Facts, dims: [usize; 2], dtype: u32, block: usize) -> Option<(usize, u32)> {
    let is_16_bits = [DType::F16, DType::BF16].map(element_code).contains(&dtype);
    let n = DIMS.iter().position(|&dim| dims == [dim; 2])?;
    let shared = shared(DIMS[n], block);
    (is_16_bits && shared <= most_shared(facts)).then_some((n, shared))
}
