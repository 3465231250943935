//! What selection, summaries and maps do with rows, in vectors of eight lanes.

use super::{LANES, Lanes, Row};

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

/// Prefetches a row of `len` elements, and up to a line more; any address is allowed.
#[inline(always)]
pub fn fetch<T>(row: *const T, len: usize) {
    const LINE: usize = 64;
    // Rows of two lines are the rule, so that the loop seldom goes round.
    for offset in (0..len * size_of::<T>()).step_by(2 * LINE) {
        let line = row.cast::<i8>().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: hints, which never fault.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line);
            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(LINE));
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
