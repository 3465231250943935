//! The implementation in scalar Rust, which the compiler turns into the target's vectors.

use super::{LANES, Lanes, Vector};
use half::{bf16, f16};

/// Eight lanes.
#[derive(Clone, Copy)]
pub struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn map(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Vector for Portable {
    type Eight = Self;
    const LANES: usize = LANES;
    const REGISTERS: usize = 16;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Portable([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: eight values are readable at p.
        Portable(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: eight values are readable at p.
        Portable(unsafe { p.cast::<[f16; LANES]>().read_unaligned() }.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: eight values are readable at p.
        Portable(unsafe { p.cast::<[bf16; LANES]>().read_unaligned() }.map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: eight values are writable at p.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn extend(eight: Self) -> Self {
        eight
    }
    #[inline(always)]
    fn folded(self) -> Self {
        self
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn total(self) -> f32 {
        let x = self.0;
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.map(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.map(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.map(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.map(other, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // f32::mul_add would be a library call on machines without the instruction.
        self.mul(factor).add(addend)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.map(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.map(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Portable(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        Portable(self.0.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23)))
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: f32) -> Self {
        self.map(x, |value, x| if x < limit { 0.0 } else { value })
    }
}

impl Lanes for Portable {
    #[inline(always)]
    fn fused(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }
    #[inline(always)]
    fn sums(of: [Self; 4]) -> [f32; 4] {
        of.map(|Portable(x)| ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])))
    }
    #[inline(always)]
    fn sums_of_eight(of: [Self; 8]) -> Self {
        Portable(of.map(|Portable(x)| ((x[0] + x[2]) + (x[1] + x[3])) + ((x[4] + x[6]) + (x[5] + x[7]))))
    }
    #[inline(always)]
    fn butterflies(self) -> Self {
        let mut x = self.0;
        for distance in [1, 2, 4] {
            for lane in (0..LANES).filter(|lane| lane & distance == 0) {
                let (a, b) = (x[lane], x[lane + distance]);
                (x[lane], x[lane + distance]) = (a + b, a - b);
            }
        }
        Portable(x)
    }
    #[inline(always)]
    unsafe fn store_halves(self, to: [*mut f32; 2]) {
        for (half, to) in self.0.chunks_exact(4).zip(to) {
            // SAFETY: four values are writable at each place.
            unsafe { to.copy_from_nonoverlapping(half.as_ptr(), 4) };
        }
    }
    #[inline(always)]
    unsafe fn store_quarters(self, to: [*mut f32; 4]) {
        for (quarter, to) in self.0.chunks_exact(2).zip(to) {
            // SAFETY: two values are writable at each place.
            unsafe { to.copy_from_nonoverlapping(quarter.as_ptr(), 2) };
        }
    }
}
