//! The summaries of AXIS as numbers.

use crate::core::dtype::Float;
use crate::core::tensor::Tensor;
use crate::ops::index::{Axes, GROUP};
use crate::ops::simd::{self, LANES, Lanes};
use crate::ops::views::MAX_DIM;
use crate::with_float;
use half::f16;

/// How the channels of an unpacked part lie: as they are, or of INT4 the even ones, then the odd ones, each padded to whole
/// vectors.
#[derive(Clone, Copy)]
pub struct Order {
    dim: usize,
    is_int4: bool,
}

impl Order {
    pub fn of(axes: &Axes, dim: usize) -> Order {
        Order { dim, is_int4: axes.range.is_some() }
    }

    fn half(self) -> usize {
        (self.dim / 2).next_multiple_of(LANES)
    }

    pub fn len(self) -> usize {
        if self.is_int4 { 2 * self.half() } else { self.dim }
    }

    pub fn place(self, c: usize) -> usize {
        if self.is_int4 { c % 2 * self.half() + c / 2 } else { c }
    }
}

/// Places for the even and the odd channels of a part.
pub const MOST: usize = MAX_DIM + 2 * LANES;

/// The mean (part 0) or the axis (part 1) of a summary.
///
/// # Safety
/// `at` is a row of the tensors, which are valid.
#[inline(always)]
pub unsafe fn unpack<L: Lanes>(axes: &Axes, order: Order, at: [usize; 3], part: usize, to: &mut [f32; MOST]) {
    let (range, axes, dim) = (&axes.range, &axes.axes, order.dim);
    // SAFETY: forwarded to the caller.
    unsafe {
        let Some(range) = range else {
            return with_float!(axes.dtype, T => {
                let row = axes.row::<T, 3>(at);
                match row.packed() {
                    Some(first) => simd::widen::<L, T>(first.add(part * dim), 1.0, &mut to[..dim]),
                    None => to[..dim].iter_mut().enumerate().for_each(|(c, to)| *to = row.get(part * dim + c).to_f32()),
                }
            });
        };
        let (even, odd) = to.split_at_mut(order.half());
        let groups = dim.div_ceil(GROUP);
        let bytes = dim / 2;
        let mut packed = [0u8; MAX_DIM / 2];
        copy(axes, at, part * bytes, &mut packed[..bytes]);
        let pairs = packed[..bytes].chunks(GROUP / 2);
        let halves = even[..bytes].chunks_mut(GROUP / 2).zip(odd[..bytes].chunks_mut(GROUP / 2));
        for (n, (pairs, (even, odd))) in pairs.zip(halves).enumerate() {
            let of = |which| range.get::<f16, 4>([at[0], at[1], at[2], 2 * (part * groups + n) + which]).to_f32();
            let (scale, min) = (of(0), of(1));
            for ((even, odd), &pair) in even.iter_mut().zip(odd).zip(pairs) {
                *even = min + scale * (pair & 15) as i32 as f32;
                *odd = min + scale * (pair >> 4) as i32 as f32;
            }
        }
    }
}

/// Some bytes of a row, from `first` on.
///
/// # Safety
/// The bytes are inside the tensor, which is valid and of bytes.
#[inline(always)]
unsafe fn copy(t: &Tensor, at: [usize; 3], first: usize, to: &mut [u8]) {
    // SAFETY: forwarded to the caller.
    unsafe {
        let (row, stride) = (t.at::<u8, 4>([at[0], at[1], at[2], first]), t.stride(3));
        if stride == 1 {
            to.copy_from_slice(std::slice::from_raw_parts(row, to.len()));
        } else {
            to.iter_mut().enumerate().for_each(|(n, to)| *to = row.wrapping_offset(n as isize * stride).read());
        }
    }
}
