//! Sums over codes with AVX2, and where there is AVX-VNNI with one instruction for a product and its addition.

use super::code_rows::{MOST_ROWS, UNIT, padded};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Bytes of a vector.
const BYTES: usize = UNIT / 2;

/// sums + products of neighbouring 16-bit numbers, added in pairs.
trait Multiply {
    /// # Safety
    /// The CPU has the instruction.
    unsafe fn add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

struct Avx2;

impl Multiply for Avx2 {
    #[inline(always)]
    unsafe fn add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: says the caller.
        unsafe { _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)) }
    }
}

struct Vnni;

impl Multiply for Vnni {
    #[inline(always)]
    unsafe fn add(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: says the caller.
        unsafe { _mm256_dpwssd_avx_epi32(sums, a, b) }
    }
}

fn has_vnni() -> bool {
    is_x86_feature_detected!("avxvnni")
}

/// # Safety
/// As for `codes::dot_codes`, and the CPU has AVX2.
pub unsafe fn dot_codes(queries: &[i16], rows: &[*const u8], bytes: usize, dots: &mut [[i32; MOST_ROWS]]) {
    // SAFETY: says the caller.
    unsafe { if has_vnni() { dot_vnni(queries, rows, bytes, dots) } else { dot_avx2(queries, rows, bytes, dots) } }
}

/// # Safety
/// As for `codes::sum_codes`, and the CPU has AVX2.
pub unsafe fn sum_codes(rows: &[*const u8], bytes: usize, weights: &[[i16; MOST_ROWS]], sums: &mut [i32]) {
    // SAFETY: says the caller.
    unsafe { if has_vnni() { sum_vnni(rows, bytes, weights, sums) } else { sum_avx2(rows, bytes, weights, sums) } }
}

#[target_feature(enable = "avx2")]
unsafe fn dot_avx2(queries: &[i16], rows: &[*const u8], bytes: usize, dots: &mut [[i32; MOST_ROWS]]) {
    // SAFETY: says the caller.
    unsafe { dot::<Avx2>(queries, rows, bytes, dots) }
}

#[target_feature(enable = "avx2,avxvnni")]
unsafe fn dot_vnni(queries: &[i16], rows: &[*const u8], bytes: usize, dots: &mut [[i32; MOST_ROWS]]) {
    // SAFETY: says the caller.
    unsafe { dot::<Vnni>(queries, rows, bytes, dots) }
}

#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(rows: &[*const u8], bytes: usize, weights: &[[i16; MOST_ROWS]], sums: &mut [i32]) {
    // SAFETY: says the caller.
    unsafe { sum::<Avx2>(rows, bytes, weights, sums) }
}

#[target_feature(enable = "avx2,avxvnni")]
unsafe fn sum_vnni(rows: &[*const u8], bytes: usize, weights: &[[i16; MOST_ROWS]], sums: &mut [i32]) {
    // SAFETY: says the caller.
    unsafe { sum::<Vnni>(rows, bytes, weights, sums) }
}

/// Vector `m` of a row; zeros past its end.
///
/// # Safety
/// The row has `bytes` bytes, a multiple of 4 above 32·m.
#[inline(always)]
unsafe fn load(row: *const u8, bytes: usize, m: usize) -> __m256i {
    const WORDS: usize = BYTES / 4;
    static MASK: [i32; 2 * WORDS] = {
        let mut mask = [-1; 2 * WORDS];
        let mut n = WORDS;
        while n < 2 * WORDS {
            mask[n] = 0;
            n += 1;
        }
        mask
    };
    let left = bytes - m * BYTES;
    // SAFETY: a masked load reads no more than the mask names; the mask begins inside of MASK.
    unsafe {
        let row = row.add(m * BYTES);
        if left >= BYTES {
            return _mm256_loadu_si256(row.cast());
        }
        _mm256_maskload_epi32(row.cast(), _mm256_loadu_si256(MASK.as_ptr().add(WORDS - left / 4).cast()))
    }
}

/// The codes in bits 4·N … 4·N + 3 of each word.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn codes<const N: i32>(words: __m256i) -> __m256i {
    // SAFETY: says the caller.
    unsafe {
        match N {
            0 => _mm256_and_si256(words, _mm256_set1_epi16(15)),
            1 => _mm256_and_si256(_mm256_srli_epi16::<4>(words), _mm256_set1_epi16(15)),
            2 => _mm256_and_si256(_mm256_srli_epi16::<8>(words), _mm256_set1_epi16(15)),
            _ => _mm256_srli_epi16::<12>(words),
        }
    }
}

/// # Safety
/// As for `codes::dot_codes`.
#[inline(always)]
unsafe fn dot<X: Multiply>(queries: &[i16], rows: &[*const u8], bytes: usize, dots: &mut [[i32; MOST_ROWS]]) {
    // SAFETY: says the caller; the number of vectors is that of the rows.
    unsafe {
        match bytes.div_ceil(BYTES) {
            1 => dot_of_vectors::<X, 1>(queries, rows, bytes, dots),
            2 => dot_of_vectors::<X, 2>(queries, rows, bytes, dots),
            3 => dot_of_vectors::<X, 3>(queries, rows, bytes, dots),
            _ => dot_of_vectors::<X, 4>(queries, rows, bytes, dots),
        }
    }
}

/// # Safety
/// As for `codes::dot_codes`, and rows are M vectors.
#[inline(always)]
unsafe fn dot_of_vectors<X: Multiply, const M: usize>(
    queries: &[i16],
    rows: &[*const u8],
    bytes: usize,
    dots: &mut [[i32; MOST_ROWS]],
) {
    const TOGETHER: usize = 8;
    const HEADS: usize = 8;
    for first in (0..rows.len()).step_by(TOGETHER) {
        for (dots, queries) in dots.chunks_mut(HEADS).zip(queries.chunks(HEADS * M * UNIT)) {
            // SAFETY: says the caller; a row past the last is the last one again.
            unsafe {
                let mut sums = [[MaybeUninit::<__m256i>::uninit(); TOGETHER]; HEADS];
                for n in 0..TOGETHER {
                    let row = rows[(first + n).min(rows.len() - 1)];
                    let mut vectors = [[_mm256_setzero_si256(); 4]; M];
                    for (m, vectors) in vectors.iter_mut().enumerate() {
                        let words = load(row, bytes, m);
                        *vectors = [codes::<0>(words), codes::<1>(words), codes::<2>(words), codes::<3>(words)];
                    }
                    for (h, sums) in sums.iter_mut().enumerate().take(dots.len()) {
                        let query = queries.as_ptr().add(h * M * UNIT).cast::<__m256i>();
                        let mut sum = [_mm256_setzero_si256(); 2];
                        for (m, vectors) in vectors.iter().enumerate() {
                            for (v, vector) in vectors.iter().enumerate() {
                                let query = _mm256_loadu_si256(query.add(4 * m + v));
                                sum[v % 2] = X::add(sum[v % 2], *vector, query);
                            }
                        }
                        sums[n].write(_mm256_add_epi32(sum[0], sum[1]));
                    }
                }
                for (dots, sums) in dots.iter_mut().zip(&sums) {
                    _mm256_storeu_si256(
                        dots[first..first + TOGETHER].as_mut_ptr().cast(),
                        sums_of_eight(sums.map(|sum| sum.assume_init())),
                    );
                }
            }
        }
    }
}

/// The sum of each vector's lanes, in the lane of the vector's number.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn sums_of_eight([a, b, c, d, e, f, g, h]: [__m256i; 8]) -> __m256i {
    // SAFETY: says the caller.
    unsafe {
        let low = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        let high = _mm256_hadd_epi32(_mm256_hadd_epi32(e, f), _mm256_hadd_epi32(g, h));
        let swapped = _mm256_permute2x128_si256::<0x21>(low, high);
        _mm256_add_epi32(_mm256_blend_epi32::<0xf0>(low, high), swapped)
    }
}

/// # Safety
/// As for `codes::sum_codes`.
#[inline(always)]
unsafe fn sum<X: Multiply>(rows: &[*const u8], bytes: usize, weights: &[[i16; MOST_ROWS]], sums: &mut [i32]) {
    let stride = padded(2 * bytes);
    let (mut weights, mut sums) = (weights, sums);
    while !weights.is_empty() {
        let heads = heads_together(weights.len());
        let (now, sums_now);
        (now, weights) = weights.split_at(heads);
        (sums_now, sums) = std::mem::take(&mut sums).split_at_mut(heads * stride);
        for m in 0..bytes.div_ceil(BYTES) {
            // SAFETY: says the caller; there are so many heads.
            unsafe {
                let sums = &mut sums_now[m * UNIT..];
                match heads {
                    1 => sum_of_vector::<X, 1>(rows, bytes, m, now, sums, stride),
                    2 => sum_of_vector::<X, 2>(rows, bytes, m, now, sums, stride),
                    3 => sum_of_vector::<X, 3>(rows, bytes, m, now, sums, stride),
                    _ => sum_of_vector::<X, 4>(rows, bytes, m, now, sums, stride),
                }
            }
        }
    }
}

/// How many of the heads that are left are summed together.
fn heads_together(left: usize) -> usize {
    match left {
        5 | 6 => 3,
        _ => left.min(4),
    }
}

/// The sums of the channels of vector `m`.
///
/// # Safety
/// As for `codes::sum_codes`; there are R heads.
#[inline(always)]
unsafe fn sum_of_vector<X: Multiply, const R: usize>(
    rows: &[*const u8],
    bytes: usize,
    m: usize,
    weights: &[[i16; MOST_ROWS]],
    sums: &mut [i32],
    stride: usize,
) {
    // SAFETY: says the caller.
    unsafe {
        let low = [pass::<X, R, 0, 0>(rows, bytes, m, weights), pass::<X, R, 0, 2>(rows, bytes, m, weights)];
        store(low, sums.as_mut_ptr(), stride);
        let high = [pass::<X, R, 1, 0>(rows, bytes, m, weights), pass::<X, R, 1, 2>(rows, bytes, m, weights)];
        store(high, sums.as_mut_ptr().add(UNIT / 4), stride);
    }
}

/// Sums of every fourth channel from FIRST and from FIRST + 1 on, of half of the words: words 0 … 3 of both halves of the vector, or
/// words 4 … 7.
///
/// # Safety
/// As for [`sum_of_vector`].
#[inline(always)]
unsafe fn pass<X: Multiply, const R: usize, const HIGH: usize, const FIRST: usize>(
    rows: &[*const u8],
    bytes: usize,
    m: usize,
    weights: &[[i16; MOST_ROWS]],
) -> [[__m256i; 2]; R] {
    // SAFETY: says the caller; past an odd number of rows the weight is 0.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for (n, pair) in rows.chunks(2).enumerate() {
            let (a, b) = (load(pair[0], bytes, m), load(pair[pair.len() - 1], bytes, m));
            let words = if HIGH == 0 { _mm256_unpacklo_epi16(a, b) } else { _mm256_unpackhi_epi16(a, b) };
            let vectors = if FIRST == 0 {
                [codes::<0>(words), codes::<1>(words)]
            } else {
                [codes::<2>(words), codes::<3>(words)]
            };
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let weights = _mm256_set1_epi32(weights.as_ptr().cast::<i32>().add(n).read_unaligned());
                sums[0] = X::add(sums[0], vectors[0], weights);
                sums[1] = X::add(sums[1], vectors[1], weights);
            }
        }
        sums
    }
}

/// Stores what two passes summed in the order of the channels.
///
/// # Safety
/// Sums of 16 channels are writable for each head, `stride` apart, and of the 16 channels 32 further.
#[inline(always)]
unsafe fn store<const R: usize>(passes: [[[__m256i; 2]; R]; 2], to: *mut i32, stride: usize) {
    let [first, second] = passes;
    for (h, ([a, b], [c, d])) in first.into_iter().zip(second).enumerate() {
        // SAFETY: says the caller.
        unsafe {
            let [ab, cd] = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
            let [ab_high, cd_high] = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
            let fours = [
                _mm256_unpacklo_epi64(ab, cd),
                _mm256_unpackhi_epi64(ab, cd),
                _mm256_unpacklo_epi64(ab_high, cd_high),
                _mm256_unpackhi_epi64(ab_high, cd_high),
            ];
            for (n, four) in fours.into_iter().enumerate() {
                let to = to.add(h * stride + 4 * n);
                _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(four));
                _mm_storeu_si128(to.add(UNIT / 2).cast(), _mm256_extracti128_si256::<1>(four));
            }
        }
    }
}

#[cfg(test)]
type Pair = (
    &'static str,
    unsafe fn(&[i16], &[*const u8], usize, &mut [[i32; MOST_ROWS]]),
    unsafe fn(&[*const u8], usize, &[[i16; MOST_ROWS]], &mut [i32]),
);

/// What this machine has.
#[cfg(test)]
pub fn of_this_machine() -> Vec<Pair> {
    let has_avx2 = is_x86_feature_detected!("avx2");
    let plain: Pair = ("avx2", dot_avx2, sum_avx2);
    let vnni: Pair = ("vnni", dot_vnni, sum_vnni);
    [(has_avx2, plain), (has_avx2 && has_vnni(), vnni)]
        .into_iter()
        .filter(|(has, _)| *has)
        .map(|(_, pair)| pair)
        .collect()
}
