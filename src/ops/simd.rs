//! Vectors of eight f32 lanes, and the row operations of attention and selection.
//!
//! Code is written once against [`Lanes`], as a [`Kernel`], and [`dispatch`] runs it with the widest instructions of the
//! machine. The order of every sum depends on the row length alone, not on alignment, neighbours or threads. D is a
//! multiple of 8, so a row is a whole number of vectors.

use crate::core::dtype::Float;
use crate::core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// The number of lanes of a vector.
pub const LANES: usize = 8;

/// Eight f32 values. The implementations are private: only [`dispatch`], which knows the CPU's instructions, can name one.
pub trait Lanes: Copy {
    fn splat(x: f32) -> Self;
    /// # Safety
    /// Eight values are readable at `p`, which may be unaligned.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// As for [`Lanes::load`].
    unsafe fn load_f16(p: *const f16) -> Self;
    /// # Safety
    /// As for [`Lanes::load`].
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// # Safety
    /// Eight values are writable at `p`, which may be unaligned.
    unsafe fn store(self, p: *mut f32);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// self · factor + addend, rounded once or twice, depending on the machine.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// self · factor + addend, rounded once on every machine.
    fn fused(self, factor: Self, addend: Self) -> Self;
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
    /// The sum of each vector's lanes: ((0+1)+(2+3)) + ((4+5)+(6+7)).
    fn sums(of: [Self; 4]) -> [f32; 4];

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

    /// e^self within 2 ulp; 0 below −87.3, infinity above 88.4; NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        const LOW: f32 = -87.336;
        // Cody and Waite: x = n·ln 2 + r, |r| ≤ ln 2 / 2; the polynomial is Cephes' expf.
        let x = Self::splat(LOW).max(Self::splat(89.0).min(self));
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        let r = n.mul_add(Self::splat(-0.693_359_4), x);
        let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = p.mul_add(r, Self::splat(c));
        }
        let p = p.mul_add(r.mul(r), r).add(Self::splat(1.0));
        p.mul(n.exp2_whole()).zero_below(self, LOW)
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

/// An element of rows that can be read eight at a time.
pub trait Row: Float {
    /// # Safety
    /// Eight elements are readable at `p`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
}

impl Row for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: eight values are readable at p.
        unsafe { L::load(p) }
    }
}

impl Row for f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f16) -> L {
        // SAFETY: eight values are readable at p.
        unsafe { L::load_f16(p) }
    }
}

impl Row for bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const bf16) -> L {
        // SAFETY: eight values are readable at p.
        unsafe { L::load_bf16(p) }
    }
}

impl Row for F8E4M3 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const F8E4M3) -> L {
        // SAFETY: eight elements are readable at p.
        L::from_array(&std::array::from_fn(|lane| unsafe { p.add(lane).read() }.to_f32()))
    }
}

impl Row for F8E5M2 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const F8E5M2) -> L {
        // SAFETY: eight elements are readable at p.
        L::from_array(&std::array::from_fn(|lane| unsafe { p.add(lane).read() }.to_f32()))
    }
}

/// Code that runs with the machine's vectors. Every function that it calls is `#[inline(always)]`: a function that is not
/// inlined is not compiled for these vectors.
pub trait Kernel {
    type Output;
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Runs a kernel with the best instructions of this machine.
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        // SAFETY: the CPU has just said so.
        return unsafe { x86::run_avx2(kernel) };
    }
    run_portable(kernel)
}

/// It is not inlined, so that calls with wider vectors need not reserve its stack.
#[inline(never)]
fn run_portable<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Portable>()
}

// --- rows --------------------------------------------------------------------------------------------------------

/// row · query
///
/// # Safety
/// `row` has as many readable elements as `query`, a multiple of 8.
#[inline(always)]
pub unsafe fn dot<L: Lanes, T: Row>(row: *const T, query: &[f32]) -> f32 {
    let mut sum = L::splat(0.0);
    for d in (0..query.len()).step_by(LANES) {
        // SAFETY: d + 8 is at most the length of both, a multiple of 8.
        sum = unsafe { T::load::<L>(row.add(d)).mul_add(L::load(query.as_ptr().add(d)), sum) };
    }
    sum.sum()
}

/// Four dot products with each row: scores[t][j] = rows[t] · queries[j], bit for bit those of [`dot`].
///
/// # Safety
/// `queries` holds four times D values, D a multiple of 8; every row has D readable elements; `scores` is
/// as long as `rows`.
#[inline(always)]
pub unsafe fn dot_four<L: Lanes, T: Row>(rows: &[*const T], queries: &[f32], scores: &mut [[f32; 4]]) {
    let dim = queries.len() / 4;
    // Two rows at a time: 8 sums, 2 rows and a query fit in 16 registers, and each row is converted once.
    for (pair, scores) in rows.chunks(2).zip(scores.chunks_mut(2)) {
        let (first, second) = (pair[0], pair[pair.len() - 1]);
        let (mut first_sums, mut second_sums) = ([L::splat(0.0); 4], [L::splat(0.0); 4]);
        for d in (0..dim).step_by(LANES) {
            // SAFETY: d + 8 ≤ D: rows have as many elements, and query j begins at j·D.
            unsafe {
                let (a, b) = (T::load::<L>(first.add(d)), T::load::<L>(second.add(d)));
                for (j, (of_first, of_second)) in first_sums.iter_mut().zip(&mut second_sums).enumerate() {
                    let q = L::load(queries.as_ptr().add(j * dim + d));
                    *of_first = a.mul_add(q, *of_first);
                    *of_second = b.mul_add(q, *of_second);
                }
            }
        }
        for (score, sums) in scores.iter_mut().zip([first_sums, second_sums]) {
            *score = L::sums(sums);
        }
    }
}

/// Four weighted sums of rows: totals[j] = Σ_t weights[t][j] · rows[t], added in the order of the rows. Meanwhile it
/// prefetches the rows `ahead`.
///
/// # Safety
/// `totals` holds four times D values, D a multiple of 8; every row has D readable elements; `weights` is as long as
/// `rows`.
#[inline(always)]
pub unsafe fn weigh_four<L: Lanes, T: Row>(
    rows: &[*const T],
    weights: &[[f32; 4]],
    totals: &mut [f32],
    ahead: &[*const T],
) {
    let dim = totals.len() / 4;
    let per_step = ahead.len().div_ceil(dim.div_ceil(2 * LANES)).max(1);
    let mut ahead = ahead.chunks(per_step);
    for d in (0..dim).step_by(2 * LANES) {
        for &row in ahead.next().unwrap_or_default() {
            fetch(row, dim);
        }
        // SAFETY: `rows`, `weights` and `totals` are the caller's as they are; these channels exist.
        unsafe {
            if d + 2 * LANES <= dim {
                weigh_channels::<L, T, 2>(rows, weights, totals, d);
            } else {
                weigh_channels::<L, T, 1>(rows, weights, totals, d);
            }
        }
    }
}

/// The part of [`weigh_four`] in channels d … d + 8·WIDTH − 1, whose totals stay in registers.
///
/// # Safety
/// The conditions of [`weigh_four`] hold, and the channels exist.
#[inline(always)]
unsafe fn weigh_channels<L: Lanes, T: Row, const WIDTH: usize>(
    rows: &[*const T],
    weights: &[[f32; 4]],
    totals: &mut [f32],
    d: usize,
) {
    let mut sums = [[L::splat(0.0); WIDTH]; 4];
    for (&row, weights) in rows.iter().zip(weights) {
        for w in 0..WIDTH {
            // SAFETY: the row has these eight channels, which are below D.
            let channels = unsafe { T::load::<L>(row.add(d + w * LANES)) };
            for (sums, &weight) in sums.iter_mut().zip(weights) {
                sums[w] = channels.mul_add(L::splat(weight), sums[w]);
            }
        }
    }
    let dim = totals.len() / 4;
    for (j, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            // SAFETY: total j has D places from j·D on, and these channels are below D.
            unsafe { sum.store(totals.as_mut_ptr().add(j * dim + d + w * LANES)) };
        }
    }
}

/// Prefetches a row of `len` elements; any address is allowed.
#[inline(always)]
pub fn fetch<T>(row: *const T, len: usize) {
    const LINE: usize = 64;
    for offset in (0..len * size_of::<T>()).step_by(LINE) {
        let line = row.cast::<i8>().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which never faults.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line)
        };
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}

/// Converts a row to f32 and multiplies it by `scale`.
///
/// # Safety
/// `row` has as many readable elements as `out`, a multiple of 8.
#[inline(always)]
pub unsafe fn widen<L: Lanes, T: Row>(row: *const T, scale: f32, out: &mut [f32]) {
    for d in (0..out.len()).step_by(LANES) {
        // SAFETY: d + 8 is at most the length of both, a multiple of 8.
        unsafe { T::load::<L>(row.add(d)).mul(L::splat(scale)).store(out.as_mut_ptr().add(d)) };
    }
}

// --- implementations -----------------------------------------------------------------------------------------------

/// The portable implementation in scalar Rust, which the compiler turns into the target's vectors.
#[derive(Clone, Copy)]
struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn map(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
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
    fn fused(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
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
    #[inline(always)]
    fn sums(of: [Self; 4]) -> [f32; 4] {
        of.map(|Portable(x)| ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, Lanes};
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Avx2>()
    }

    #[derive(Clone, Copy)]
    struct Avx2(__m256);

    // SAFETY of every block below: the type is reached through run_avx2 alone, whose caller has asked the CPU; addresses
    // are forwarded to the caller.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            Avx2(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Avx2(unsafe { _mm256_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const bf16) -> Self {
            let wide = unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())) };
            Avx2(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            Avx2(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            Avx2(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            Avx2(unsafe { _mm256_div_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            Avx2(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }
        #[inline(always)]
        fn fused(self, factor: Self, addend: Self) -> Self {
            self.mul_add(factor, addend)
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            Avx2(unsafe { _mm256_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Avx2(unsafe { _mm256_min_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn round(self) -> Self {
            Avx2(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }
        #[inline(always)]
        fn exp2_whole(self) -> Self {
            unsafe {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
                Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
            }
        }
        #[inline(always)]
        fn zero_below(self, x: Self, limit: f32) -> Self {
            unsafe { Avx2(_mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x.0, _mm256_set1_ps(limit)), self.0)) }
        }
        #[inline(always)]
        fn sums([a, b, c, d]: [Self; 4]) -> [f32; 4] {
            let mut sums = [0.0; 4];
            unsafe {
                let halves = _mm256_hadd_ps(_mm256_hadd_ps(a.0, b.0), _mm256_hadd_ps(c.0, d.0));
                let whole = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
                _mm_storeu_ps(sums.as_mut_ptr(), whole);
            }
            sums
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp(f32);
    impl Kernel for Exp {
        type Output = f32;
        fn run<L: Lanes>(self) -> f32 {
            L::splat(self.0).exp().to_array()[3]
        }
    }

    #[test]
    fn exp_is_within_two_ulp_where_the_result_is_normal() {
        for (run, name) in [(dispatch::<Exp> as fn(Exp) -> f32, "machine"), (|e: Exp| e.run::<Portable>(), "portable")]
        {
            for i in 0..400_000 {
                let x = -87.3 + i as f32 * (175.6 / 400_000.0);
                let want = (x as f64).exp();
                let ulp = 2f64.powi(want.log2().floor() as i32 - 23);
                let error = (run(Exp(x)) as f64 - want).abs() / ulp;
                assert!(error <= 2.0, "{name}: e^{x} is off by {error} ulp");
            }
            assert_eq!(run(Exp(f32::NEG_INFINITY)), 0.0);
            assert_eq!(run(Exp(-1000.0)), 0.0);
            assert_eq!(run(Exp(0.0)), 1.0);
            assert_eq!(run(Exp(f32::INFINITY)), f32::INFINITY);
            assert!(run(Exp(f32::NAN)).is_nan());
        }
    }

    struct Tanh(f32);
    impl Kernel for Tanh {
        type Output = f32;
        fn run<L: Lanes>(self) -> f32 {
            L::splat(self.0).tanh().to_array()[5]
        }
    }

    #[test]
    fn tanh_is_within_three_ulp() {
        for (run, name) in
            [(dispatch::<Tanh> as fn(Tanh) -> f32, "machine"), (|t: Tanh| t.run::<Portable>(), "portable")]
        {
            for i in 1..400_000 {
                // The magnitudes grow geometrically from 10⁻⁶ to 12.
                let x = 1e-6 * (12e6f64).powf(i as f64 / 400_000.0) as f32;
                let want = (x as f64).tanh();
                let ulp = 2f64.powi(want.log2().floor() as i32 - 23);
                for (x, want) in [(x, want), (-x, -want)] {
                    let error = (run(Tanh(x)) as f64 - want).abs() / ulp;
                    assert!(error <= 3.0, "{name}: tanh {x} is off by {error} ulp");
                }
            }
            assert_eq!(run(Tanh(0.0)), 0.0);
            assert_eq!(run(Tanh(f32::INFINITY)), 1.0);
            assert_eq!(run(Tanh(f32::NEG_INFINITY)), -1.0);
            assert!(run(Tanh(f32::NAN)).is_nan());
        }
    }

    struct Four<'a, T>(&'a [*const T], &'a [f32]);
    impl<T: Row> Kernel for Four<'_, T> {
        type Output = bool;
        fn run<L: Lanes>(self) -> bool {
            let dim = self.1.len() / 4;
            let mut scores = vec![[0.0; 4]; self.0.len()];
            // SAFETY: the test below gives rows of dim elements.
            unsafe { dot_four::<L, T>(self.0, self.1, &mut scores) };
            // SAFETY: as above.
            let single = |t: usize, j: usize| unsafe { dot::<L, T>(self.0[t], &self.1[j * dim..(j + 1) * dim]) };
            (0..scores.len()).all(|t| (0..4).all(|j| scores[t][j].to_bits() == single(t, j).to_bits()))
        }
    }

    #[test]
    fn four_dot_products_have_the_bits_of_one() {
        let dim = 24;
        let values: Vec<f16> = (0..5 * dim).map(|i| f16::from_f32((i as f32 * 0.7).sin())).collect();
        let rows: Vec<*const f16> = values.chunks(dim).map(<[f16]>::as_ptr).collect();
        let queries: Vec<f32> = (0..4 * dim).map(|i| (i as f32 * 1.3).cos()).collect();
        assert!(dispatch(Four(&rows, &queries)));
        assert!(Four(&rows, &queries).run::<Portable>());
    }
}
