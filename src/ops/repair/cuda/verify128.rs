//! Shared memory of kernels/attention/repair_verify128.cuh.

use super::Request;
use crate::ops::attention::device::{RepairParams, VERIFY128_SHARED};

/// Both lists lie here until tiles do, and the sums of kept states begin here: KEPT_STAGE stages of the kernel.
const LISTS_BYTES: usize = 3 * 2 * 64 * 128 * 2;

/// Dynamic shared memory of a CTA: a block or a partial, and a page, for each selected entry behind what attention has.
fn shared(r: &Request) -> usize {
    r.selected.cap().saturating_mul(2 * size_of::<i32>()).saturating_add(VERIFY128_SHARED as usize)
}

pub fn fits(r: &Request, most: u32) -> bool {
    let lists = r.selected.cap().saturating_add(r.predicted.cap()).saturating_mul(size_of::<i32>());
    shared(r) <= most as usize && lists <= LISTS_BYTES
}

/// Lays shared memory out, and returns how much it takes.
pub fn lay_out(params: &mut RepairParams, r: &Request) -> u32 {
    params.lists_offset = VERIFY128_SHARED;
    shared(r) as u32
}
