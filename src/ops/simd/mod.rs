//! Vectors of f32 lanes, and the row operations of attention and selection.
//!
//! Code is written once, as a [`Kernel`] against [`Lanes`] or as a [`WideKernel`] against [`Vector`], and [`dispatch`] or
//! [`dispatch_wide`] runs it with the best instructions of the machine. The order of every sum depends on the row length and
//! the instructions alone, not on alignment, neighbours or threads. D is a multiple of 8, so a row is a whole number of
//! vectors of eight lanes.

mod code_rows;
pub mod codes;
#[cfg(target_arch = "x86_64")]
mod codes_x86;
mod hadamard;
mod portable;
mod rows;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use hadamard::rotate;
pub use rows::{dot, dot_four, fetch, widen};

use crate::core::dtype::Float;
use crate::core::float8::{F8E4M3, F8E5M2};
use crate::core::instructions::Instructions;
use half::{bf16, f16};

/// The number of lanes of a [`Lanes`].
pub const LANES: usize = 8;
/// The largest number of lanes of a [`Vector`].
const MOST_LANES: usize = 16;

/// f32 values, eight or more. The implementations are private: only [`dispatch`] and [`dispatch_wide`], which know the CPU's
/// instructions, can name one.
pub trait Vector: Copy {
    /// Eight lanes of the same machine.
    type Eight: Lanes;
    /// The number of lanes: a multiple of 8, at most 16.
    const LANES: usize;
    /// The number of vectors that fit in registers.
    const REGISTERS: usize;

    fn splat(x: f32) -> Self;
    /// # Safety
    /// Values for all lanes are readable at `p`, which may be unaligned.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// As for [`Vector::load`].
    unsafe fn load_f16(p: *const f16) -> Self;
    /// # Safety
    /// As for [`Vector::load`].
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// # Safety
    /// Values of all lanes are writable at `p`, which may be unaligned.
    unsafe fn store(self, p: *mut f32);
    /// These eight lanes, and zeros in the rest.
    fn extend(eight: Self::Eight) -> Self;
    /// Lane i + lane i + 8, where there are sixteen.
    fn folded(self) -> Self::Eight;
    /// The largest lane; no lane is NaN.
    fn largest(self) -> f32;
    /// The sum of all lanes: ((0+4)+(2+6)) + ((1+5)+(3+7)) of [`Vector::folded`].
    fn total(self) -> f32;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// self · factor + addend, rounded once or twice, depending on the machine.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The larger value in each lane; `other` if either is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller value in each lane; `other` if either is NaN.
    fn min(self, other: Self) -> Self;
    /// Rounds to the nearest whole number, ties to even.
    fn round(self) -> Self;
    /// 2^self for whole numbers −126 … 127; infinity at 128.
    fn exp2_whole(self) -> Self;
    /// 0 in the lanes where `x` < `limit`, self elsewhere.
    fn zero_below(self, x: Self, limit: f32) -> Self;

    /// e^self within 2 ulp; 0 below −87.3, infinity above 88.4; NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        Self::exp_each([self])[0]
    }

    /// [`Vector::exp`] of each, step by step together: one alone is a chain of operations that wait for each other.
    #[inline(always)]
    fn exp_each<const N: usize>(x: [Self; N]) -> [Self; N] {
        const LOW: f32 = -87.336;
        // Cody and Waite: x = n·ln 2 + r, |r| ≤ ln 2 / 2; the polynomial is Cephes' expf.
        let (mut n, mut r, mut p) = (x, x, [Self::splat(1.987_569_1e-4); N]);
        for i in 0..N {
            r[i] = Self::splat(LOW).max(Self::splat(89.0).min(x[i]));
            n[i] = r[i].mul(Self::splat(std::f32::consts::LOG2_E)).round();
        }
        for i in 0..N {
            r[i] = n[i].mul_add(Self::splat(-0.693_359_4), r[i]);
            r[i] = n[i].mul_add(Self::splat(2.121_944_4e-4), r[i]);
        }
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            for i in 0..N {
                p[i] = p[i].mul_add(r[i], Self::splat(c));
            }
        }
        for i in 0..N {
            p[i] = p[i].mul_add(r[i].mul(r[i]), r[i]).add(Self::splat(1.0));
            p[i] = p[i].mul(n[i].exp2_whole()).zero_below(x[i], LOW);
        }
        p
    }

    /// ln(2·cosh self) within 3 ulp; NaN stays NaN.
    #[inline(always)]
    fn ln_2cosh(self) -> Self {
        let two = Self::splat(2.0);
        let size = self.max(Self::splat(0.0).sub(self));
        // |x| + ln(1 + y) with y = e^(−2|x|) ≤ 1, and ln(1 + y) = 2·artanh w with w = y / (2 + y) ≤ 1/3.
        let y = Self::splat(0.0).sub(size.mul(two)).exp();
        let w = y.div(y.add(two));
        let square = w.mul(w);
        let mut p = Self::splat(1.0 / 13.0);
        for c in [1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0] {
            p = p.mul_add(square, Self::splat(c));
        }
        let half = p.mul(square).mul_add(w, w);
        half.mul_add(two, size)
    }

    /// tanh self within 3 ulp; NaN stays NaN.
    #[inline(always)]
    fn tanh(self) -> Self {
        const SMALL: f32 = 0.625;
        // Beyond ±10 tanh is ±1. Close to 0 it is Cephes' polynomial, elsewhere 1 − 2 / (e^(2|x|) + 1).
        let x = Self::splat(-10.0).max(Self::splat(10.0).min(self));
        let (square, size) = (x.mul(x), x.max(Self::splat(0.0).sub(x)));
        let mut p = Self::splat(-5.704_988_8e-3);
        for c in [2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -0.333_332_8] {
            p = p.mul_add(square, Self::splat(c));
        }
        let close = p.mul(square).mul_add(x, x);
        let two = Self::splat(2.0);
        let far = Self::splat(1.0).sub(two.div(size.mul(two).exp().add(Self::splat(1.0))));
        let far = far.zero_below(size, SMALL);
        let signed = far.sub(far.add(far).zero_below(Self::splat(0.0).sub(x), 0.0));
        close.sub(close.zero_below(size, SMALL)).add(signed)
    }
}

/// Eight f32 values.
pub trait Lanes: Vector<Eight = Self> {
    /// self · factor + addend, rounded once on every machine.
    fn fused(self, factor: Self, addend: Self) -> Self;
    /// The sum of each vector's lanes: ((0+1)+(2+3)) + ((4+5)+(6+7)).
    fn sums(of: [Self; 4]) -> [f32; 4];
    /// The sum of each vector's lanes, in the lane of the vector's number: ((0+2)+(1+3)) + ((4+6)+(5+7)).
    fn sums_of_eight(of: [Self; 8]) -> Self;
    /// Butterflies (a + b, a − b) over lanes 1, then 2, then 4 apart.
    fn butterflies(self) -> Self;
    /// Stores lanes 0 … 3 and 4 … 7.
    ///
    /// # Safety
    /// Four values are writable at each place.
    unsafe fn store_halves(self, to: [*mut f32; 2]);
    /// Stores lanes 0 and 1, 2 and 3, 4 and 5, 6 and 7.
    ///
    /// # Safety
    /// Two values are writable at each place.
    unsafe fn store_quarters(self, to: [*mut f32; 4]);

    #[inline(always)]
    fn sum(self) -> f32 {
        Self::sums([self, Self::splat(0.0), Self::splat(0.0), Self::splat(0.0)])[0]
    }

    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has eight values.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    #[inline(always)]
    fn from_array(lanes: &[f32; LANES]) -> Self {
        // SAFETY: the array has eight values.
        unsafe { Self::load(lanes.as_ptr()) }
    }
}

/// An element of rows that can be read a vector at a time.
pub trait Row: Float {
    /// # Safety
    /// Elements for all lanes are readable at `p`.
    unsafe fn load<V: Vector>(p: *const Self) -> V;
}

impl Row for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const f32) -> V {
        // SAFETY: as the caller says.
        unsafe { V::load(p) }
    }
}

impl Row for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const f16) -> V {
        // SAFETY: as the caller says.
        unsafe { V::load_f16(p) }
    }
}

impl Row for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const bf16) -> V {
        // SAFETY: as the caller says.
        unsafe { V::load_bf16(p) }
    }
}

impl Row for F8E4M3 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const F8E4M3) -> V {
        // SAFETY: as the caller says.
        unsafe { load_each(p) }
    }
}

impl Row for F8E5M2 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const F8E5M2) -> V {
        // SAFETY: as the caller says.
        unsafe { load_each(p) }
    }
}

/// Converts one element after the other.
///
/// # Safety
/// Elements for all lanes are readable at `p`.
#[inline(always)]
unsafe fn load_each<T: Float, V: Vector>(p: *const T) -> V {
    let mut lanes = [0.0; MOST_LANES];
    for (lane, x) in lanes[..V::LANES].iter_mut().enumerate() {
        // SAFETY: there is an element for each lane.
        *x = unsafe { p.add(lane).read() }.to_f32();
    }
    // SAFETY: the array has as many values as any vector.
    unsafe { V::load(lanes.as_ptr()) }
}

/// Code that runs with the machine's vectors of eight lanes. Every function that it calls is `#[inline(always)]`: a function
/// that is not inlined is not compiled for these vectors.
pub trait Kernel {
    type Output;
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Code that runs with the machine's widest vectors, in the same way.
pub trait WideKernel {
    type Output;
    fn run<V: Vector>(self) -> Self::Output;
}

/// Runs a kernel with the best instructions of this machine for eight lanes.
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if Instructions::used() >= Instructions::Avx2 {
        // SAFETY: the CPU has the instructions that it uses.
        return unsafe { x86::run_avx2(kernel) };
    }
    run_portable(kernel)
}

/// Runs a kernel with the best instructions of this machine.
pub fn dispatch_wide<K: WideKernel>(kernel: K) -> K::Output {
    // SAFETY: the machine has what is used.
    unsafe { run_wide(Instructions::used(), kernel) }
}

/// Runs a kernel with these instructions.
///
/// # Safety
/// The machine has them.
unsafe fn run_wide<K: WideKernel>(instructions: Instructions, kernel: K) -> K::Output {
    match instructions {
        // SAFETY: as the caller says.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { x86::run_wide_avx512(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { x86::run_wide_avx2(kernel) },
        _ => run_wide_portable(kernel),
    }
}

/// It is not inlined, so that calls with wider vectors need not reserve its stack.
#[inline(never)]
fn run_portable<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<portable::Portable>()
}

/// As above.
#[inline(never)]
fn run_wide_portable<K: WideKernel>(kernel: K) -> K::Output {
    kernel.run::<portable::Portable>()
}

/// Instructions for each of which a test runs kernels by [`run_with`].
#[cfg(test)]
pub fn of_this_machine() -> impl Iterator<Item = Instructions> {
    let all = [Instructions::Portable, Instructions::Avx2, Instructions::Avx512];
    all.into_iter().filter(|&instructions| instructions <= Instructions::of_machine())
}

#[cfg(test)]
pub fn run_with<K: WideKernel>(instructions: Instructions, kernel: K) -> K::Output {
    assert!(instructions <= Instructions::of_machine());
    // SAFETY: the machine has them.
    unsafe { run_wide(instructions, kernel) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function of each lane, of which one holds the argument and the others 1.
    struct OfLane(usize, f32, Function);
    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        Tanh,
    }

    impl WideKernel for OfLane {
        type Output = f32;
        #[inline(always)]
        fn run<V: Vector>(self) -> f32 {
            let mut lanes = [1.0; MOST_LANES];
            let lane = self.0 % V::LANES;
            lanes[lane] = self.1;
            // SAFETY: the array has a value for each lane.
            unsafe {
                let x = V::load(lanes.as_ptr());
                let y = match self.2 {
                    Function::Exp => x.exp(),
                    Function::Tanh => x.tanh(),
                };
                y.store(lanes.as_mut_ptr());
            }
            lanes[lane]
        }
    }

    #[test]
    fn exp_is_within_two_ulp_where_the_result_is_normal() {
        for name in of_this_machine() {
            let exp = |i, x| run_with(name, OfLane(i, x, Function::Exp));
            for i in 0..400_000 {
                let x = -87.3 + i as f32 * (175.6 / 400_000.0);
                let want = (x as f64).exp();
                let ulp = 2f64.powi(want.log2().floor() as i32 - 23);
                let error = (exp(i, x) as f64 - want).abs() / ulp;
                assert!(error <= 2.0, "{name:?}: e^{x} is off by {error} ulp");
            }
            assert_eq!(exp(0, f32::NEG_INFINITY), 0.0);
            assert_eq!(exp(1, -1000.0), 0.0);
            assert_eq!(exp(2, 0.0), 1.0);
            assert_eq!(exp(3, f32::INFINITY), f32::INFINITY);
            assert!(exp(4, f32::NAN).is_nan());
        }
    }

    #[test]
    fn tanh_is_within_three_ulp() {
        for name in of_this_machine() {
            let tanh = |i, x| run_with(name, OfLane(i, x, Function::Tanh));
            for i in 1..400_000 {
                // The magnitudes grow geometrically from 10⁻⁶ to 12.
                let x = 1e-6 * (12e6f64).powf(i as f64 / 400_000.0) as f32;
                let want = (x as f64).tanh();
                let ulp = 2f64.powi(want.log2().floor() as i32 - 23);
                for (x, want) in [(x, want), (-x, -want)] {
                    let error = (tanh(i, x) as f64 - want).abs() / ulp;
                    assert!(error <= 3.0, "{name:?}: tanh {x} is off by {error} ulp");
                }
            }
            assert_eq!(tanh(0, 0.0), 0.0);
            assert_eq!(tanh(1, f32::INFINITY), 1.0);
            assert_eq!(tanh(2, f32::NEG_INFINITY), -1.0);
            assert!(tanh(3, f32::NAN).is_nan());
        }
    }

    /// Adds powers of two, so that every order gives the same sum and every missing or doubled lane another.
    struct Sums;
    impl WideKernel for Sums {
        type Output = ();
        #[inline(always)]
        fn run<V: Vector>(self) {
            let powers: [f32; MOST_LANES] = std::array::from_fn(|i| (1 << i) as f32);
            let all = ((1u32 << V::LANES) - 1) as f32;
            // SAFETY: the array has a value for each lane.
            let v = unsafe { V::load(powers.as_ptr()) };
            assert_eq!(v.total(), all);
            assert_eq!(v.largest(), (1 << (V::LANES - 1)) as f32);
            assert_eq!(v.folded().to_array().iter().sum::<f32>(), all);
            assert_eq!(V::extend(V::Eight::splat(1.0)).total(), 8.0);
            let mut eight = [V::Eight::splat(0.0); 8];
            for (i, v) in eight.iter_mut().enumerate() {
                *v = V::Eight::from_array(&std::array::from_fn(|lane| (i * 256 + (1 << lane)) as f32));
            }
            let sums = V::Eight::sums_of_eight(eight);
            assert_eq!(sums.to_array(), std::array::from_fn(|i| (i * 2048 + 255) as f32));
            let mut parts = [[0.0; 4]; 4];
            let [a, b, c, d] = &mut parts;
            // SAFETY: each place has four values.
            unsafe { sums.store_quarters([a, b, c, d].map(|place| place.as_mut_ptr())) };
            let quarters: Vec<f32> = parts.iter().flat_map(|part| &part[..2]).copied().collect();
            assert_eq!(quarters, sums.to_array());
            let [a, b, ..] = &mut parts;
            // SAFETY: as above.
            unsafe { sums.store_halves([a.as_mut_ptr(), b.as_mut_ptr()]) };
            assert_eq!(parts[..2].as_flattened(), sums.to_array());
        }
    }

    #[test]
    fn sums_and_stores_of_lanes_leave_none_out() {
        for name in of_this_machine() {
            run_with(name, Sums);
        }
    }

    struct Four<'a, T>(&'a [*const T], &'a [f32]);
    impl<T: Row> WideKernel for Four<'_, T> {
        type Output = bool;
        #[inline(always)]
        fn run<V: Vector>(self) -> bool {
            let dim = self.1.len() / 4;
            let mut scores = vec![[0.0; 4]; self.0.len()];
            // SAFETY: the test below gives rows of dim elements.
            unsafe { dot_four::<V::Eight, T>(self.0, self.1, &mut scores) };
            let mut alike = true;
            for (t, scores) in scores.iter().enumerate() {
                for (j, score) in scores.iter().enumerate() {
                    // SAFETY: as above.
                    let single = unsafe { dot::<V::Eight, T>(self.0[t], &self.1[j * dim..(j + 1) * dim]) };
                    alike &= score.to_bits() == single.to_bits();
                }
            }
            alike
        }
    }

    #[test]
    fn four_dot_products_have_the_bits_of_one() {
        let dim = 24;
        let values: Vec<f16> = (0..5 * dim).map(|i| f16::from_f32((i as f32 * 0.7).sin())).collect();
        let rows: Vec<*const f16> = values.chunks(dim).map(<[f16]>::as_ptr).collect();
        let queries: Vec<f32> = (0..4 * dim).map(|i| (i as f32 * 1.3).cos()).collect();
        for name in of_this_machine() {
            assert!(run_with(name, Four(&rows, &queries)), "{name:?}");
        }
    }
}
