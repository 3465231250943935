//! What the host knows of kernels/quantize/rows.cuh: which rows it codes, and the shared memory that they take.

use crate::core::dtype::DType;
use crate::runtime::cuda::Facts;
use crate::runtime::cuda::views::element_code;

/// Channels of the rows, in the order of the kernels.
const DIMS: [usize; 2] = [64, 128];
/// Neighbouring threads that have a row where a call codes.
const LANES: usize = 2;
/// The channels of a thread where a cache codes, and its threads.
const CACHE_SPAN: usize = 32;
pub const CACHE_THREADS: u32 = 128;
/// What the kernels declare, at most.
const DECLARED: u32 = 2048;
/// Threads that a multiprocessor runs at a time, which their registers allow.
const RESIDENT_THREADS: u32 = 640;

/// How a call's kernel is launched.
pub struct Launch {
    /// Its place in the order of the kernels.
    pub number: usize,
    pub threads: u32,
    pub shared: u32,
    /// CTAs that a multiprocessor runs at a time.
    pub resident: usize,
}

/// The most shared memory that launches add to what the kernels declare.
pub fn most_shared(facts: &Facts) -> u32 {
    (2 * part_bytes(DIMS[1], crate::ops::int4::MAX_BLOCK, DIMS[1] / CACHE_SPAN)).min(facts.shared_bytes - DECLARED)
}

/// The keys or the values of a block, whose rows have so many spans, each with a gap of 16 bytes behind it.
fn part_bytes(dim: usize, block: usize, spans: usize) -> u32 {
    (block * (dim * 2 + spans * 16)) as u32
}

/// Which of the kernels codes rows of these channels, whose elements have such a code.
fn number(dims: [usize; 2], dtype: u32) -> Option<usize> {
    let is_16_bits = [DType::F16, DType::BF16].map(element_code).contains(&dtype);
    DIMS.iter().position(|&dim| is_16_bits && dims == [dim; 2])
}

/// How a call codes rows of these channels, whose elements have such a code; None where the general kernel does.
pub fn find(facts: &Facts, dims: [usize; 2], dtype: u32, block: usize) -> Option<Launch> {
    let number = number(dims, dtype)?;
    let shared = 2 * part_bytes(DIMS[number], block, LANES);
    let threads = (block.div_ceil(32) * 32 * LANES) as u32;
    let resident = (RESIDENT_THREADS / threads).min(facts.shared_bytes / (shared + DECLARED)).max(1) as usize;
    (shared <= most_shared(facts)).then_some(Launch { number, threads, shared, resident })
}

/// The same of a cache's kernels: the number and the shared memory that a launch adds.
pub fn find_cache(facts: &Facts, dims: [usize; 2], dtype: u32, block: usize) -> Option<(usize, u32)> {
    let number = number(dims, dtype)?;
    let shared = 2 * part_bytes(DIMS[number], block, DIMS[number] / CACHE_SPAN);
    (shared <= most_shared(facts)).then_some((number, shared))
}
