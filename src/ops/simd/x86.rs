//! The implementations for x86-64.

use super::{Kernel, Lanes, Vector, WideKernel};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn run_wide_avx2<K: WideKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// # Safety
/// The CPU has AVX2, FMA, F16C, and AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn run_wide_avx512<K: WideKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// Eight lanes.
#[derive(Clone, Copy)]
struct Avx2(__m256);

// SAFETY of every block below: the type is reached through the functions above alone, whose caller has asked the CPU;
// addresses are forwarded to the caller.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx2 {
    type Eight = Self;
    const LANES: usize = 8;
    const REGISTERS: usize = 16;

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
    fn extend(eight: Self) -> Self {
        eight
    }
    #[inline(always)]
    fn folded(self) -> Self {
        self
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn total(self) -> f32 {
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
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
}

// SAFETY of every block below: the type is reached through the functions above alone, whose caller has asked the CPU;
// addresses are forwarded to the caller.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx2 {
    #[inline(always)]
    fn fused(self, factor: Self, addend: Self) -> Self {
        self.mul_add(factor, addend)
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
    #[inline(always)]
    fn sums_of_eight([a, b, c, d, e, f, g, h]: [Self; 8]) -> Self {
        // Each step adds the halves of what is left of two vectors, and keeps one half of each. Only the last crosses the
        // middle of vectors, which takes longer.
        unsafe {
            let abcd = lanes_1_apart(lanes_2_apart(a.0, b.0), lanes_2_apart(c.0, d.0));
            let efgh = lanes_1_apart(lanes_2_apart(e.0, f.0), lanes_2_apart(g.0, h.0));
            let swapped = _mm256_permute2f128_ps::<0x21>(abcd, efgh);
            Avx2(_mm256_add_ps(_mm256_blend_ps::<0xf0>(abcd, efgh), swapped))
        }
    }
    #[inline(always)]
    fn butterflies(self) -> Self {
        // The other lane plus or minus the own one: a product with ±1 is exact.
        unsafe {
            let x = self.0;
            let signs = _mm256_setr_ps(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0);
            let x = _mm256_fmadd_ps(x, signs, _mm256_permute_ps::<0b10_11_00_01>(x));
            let signs = _mm256_setr_ps(1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0);
            let x = _mm256_fmadd_ps(x, signs, _mm256_permute_ps::<0b01_00_11_10>(x));
            let signs = _mm256_setr_ps(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0);
            Avx2(_mm256_fmadd_ps(x, signs, _mm256_permute2f128_ps::<0x01>(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn store_halves(self, to: [*mut f32; 2]) {
        unsafe {
            _mm_storeu_ps(to[0], _mm256_castps256_ps128(self.0));
            _mm_storeu_ps(to[1], _mm256_extractf128_ps::<1>(self.0));
        }
    }
    #[inline(always)]
    unsafe fn store_quarters(self, to: [*mut f32; 4]) {
        unsafe {
            let low = _mm_castps_pd(_mm256_castps256_ps128(self.0));
            let high = _mm_castps_pd(_mm256_extractf128_ps::<1>(self.0));
            _mm_storel_pd(to[0].cast(), low);
            _mm_storeh_pd(to[1].cast(), low);
            _mm_storel_pd(to[2].cast(), high);
            _mm_storeh_pd(to[3].cast(), high);
        }
    }
}

/// Lane i + lane i ± 2: of `low` in the lower two lanes of each half, of `high` in the upper two.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn lanes_2_apart(low: __m256, high: __m256) -> __m256 {
    // SAFETY: as the caller says.
    unsafe {
        let swapped = _mm256_shuffle_ps::<0b01_00_11_10>(low, high);
        _mm256_add_ps(_mm256_blend_ps::<0b1100_1100>(low, high), swapped)
    }
}

/// Lane 2·i + lane 2·i + 1: of `low` in the lower two lanes of each half, of `high` in the upper two.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn lanes_1_apart(low: __m256, high: __m256) -> __m256 {
    // SAFETY: as the caller says.
    unsafe {
        let (even, odd) =
            (_mm256_shuffle_ps::<0b10_00_10_00>(low, high), _mm256_shuffle_ps::<0b11_01_11_01>(low, high));
        _mm256_add_ps(even, odd)
    }
}

/// Sixteen lanes.
#[derive(Clone, Copy)]
struct Avx512(__m512);

// SAFETY of every block below: the type is reached through the functions above alone, whose caller has asked the CPU;
// addresses are forwarded to the caller.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx512 {
    type Eight = Avx2;
    const LANES: usize = 16;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Avx512(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Avx512(unsafe { _mm512_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        let wide = unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())) };
        Avx512(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    fn extend(eight: Avx2) -> Self {
        Avx512(unsafe { _mm512_zextps256_ps512(eight.0) })
    }
    #[inline(always)]
    fn folded(self) -> Avx2 {
        unsafe { Avx2(_mm512_castps512_ps256(self.0)).add(Avx2(_mm512_extractf32x8_ps::<1>(self.0))) }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { Avx2(_mm512_castps512_ps256(self.0)).max(Avx2(_mm512_extractf32x8_ps::<1>(self.0))) }.largest()
    }
    #[inline(always)]
    fn total(self) -> f32 {
        self.folded().total()
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        Avx512(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Avx512(unsafe { _mm512_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Avx512(unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: f32) -> Self {
        unsafe {
            let below = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x.0, _mm512_set1_ps(limit));
            Avx512(_mm512_maskz_mov_ps(!below, self.0))
        }
    }
}
