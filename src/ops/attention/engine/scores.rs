//! Scores of a few rows with the keys of a tile, and the softmax that makes weights of them.
//!
//! Each score is summed in vectors along the channels, whose lanes are then added. So its bits depend on its query, its key
//! and the instructions alone, whatever rows and keys are computed beside it.
//!
//! A block of R rows and N keys keeps R·N sums in registers, up to 8 of 16 and 16 of 32, and leaves the rest to what is
//! multiplied. A step along the channels loads R + N vectors for R·N multiplications. Two loads and two multiplications start
//! in a cycle, so that loads bound blocks of one row, and multiplications those of more.

use super::span::HEADS;
use super::tile::{Ahead, TILE};
use crate::core::dtype::DType;
use crate::ops::simd::{LANES, Lanes, Row, Vector, WideKernel, dispatch_wide};

/// Scores of a span's rows with the tokens of a tile, and later their weights.
#[repr(align(64))]
pub struct Scores(pub [[f32; TILE]; HEADS]);

/// How many of the rows that are left are computed together: up to four, and not one alone after others if that can be
/// avoided.
pub fn rows_together(left: usize) -> usize {
    match left {
        5 | 6 => 3,
        _ => left.min(4),
    }
}

/// Whether vectors of eight lanes are faster than those of sixteen: one row of float16 takes as long as its conversion, and Zen 4 converts
/// sixteen float16 to one vector in twice the time in which it converts them to two.
pub fn prefers_eight<T: Row, const R: usize>() -> bool {
    R == 1 && T::DTYPE == DType::F16
}

/// scores[r][t] = queries[r] · keys[t]. Up to seven scores past the last key are written, too. Meanwhile the rows `ahead` are
/// fetched.
///
/// # Safety
/// Query r has `dim` values from r·dim on, a multiple of 8; every key has `dim` readable elements; there are 1 … 64 keys.
pub unsafe fn score_rows<T: Row>(
    queries: &[f32],
    dim: usize,
    keys: &[*const T],
    scores: &mut [[f32; TILE]],
    mut ahead: Ahead<T>,
) {
    let mut first = 0;
    while first < scores.len() {
        let rows = rows_together(scores.len() - first);
        let queries = &queries[first * dim..(first + rows) * dim];
        let scores = &mut scores[first..first + rows];
        let ahead = std::mem::replace(&mut ahead, Ahead::nothing());
        match rows {
            1 => dispatch_wide(ScoreRows::<T, 1> { queries, dim, keys, scores, ahead }),
            2 => dispatch_wide(ScoreRows::<T, 2> { queries, dim, keys, scores, ahead }),
            3 => dispatch_wide(ScoreRows::<T, 3> { queries, dim, keys, scores, ahead }),
            _ => dispatch_wide(ScoreRows::<T, 4> { queries, dim, keys, scores, ahead }),
        }
        first += rows;
    }
}

/// The scores of R rows. Constructing one takes the promises of [`score_rows`].
struct ScoreRows<'a, T, const R: usize> {
    queries: &'a [f32],
    dim: usize,
    keys: &'a [*const T],
    scores: &'a mut [[f32; TILE]],
    ahead: Ahead<'a, T>,
}

impl<T: Row, const R: usize> WideKernel for ScoreRows<'_, T, R> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let has_many_registers = V::REGISTERS >= 32;
        match R {
            1 if V::LANES > LANES && prefers_eight::<T, R>() => self.in_pairs::<V::Eight, 8>(),
            1 => self.in_blocks::<V, 8>(),
            2 if has_many_registers => self.in_blocks::<V, 8>(),
            3 if !has_many_registers => self.in_blocks::<V, 2>(),
            4 if !has_many_registers => self.in_blocks::<V, 2>(),
            _ => self.in_blocks::<V, 4>(),
        }
    }
}

impl<T: Row, const R: usize> ScoreRows<'_, T, R> {
    /// [`ScoreRows::in_blocks`] of vectors of sixteen lanes, with two of eight for each and the same bits. R is 1.
    #[inline(always)]
    fn in_pairs<E: Lanes, const N: usize>(self) {
        let ScoreRows { queries, dim, keys, scores, mut ahead } = self;
        let scores: &mut [[f32; TILE]; R] = scores.try_into().expect("R rows");
        let queries = queries.as_ptr();
        let whole = dim - dim % (2 * LANES);
        for first in (0..keys.len()).step_by(N) {
            ahead.fetch(N);
            let block: [*const T; N] = block(keys, first);
            let (mut low, mut high) = ([[E::splat(0.0); N]; R], [[E::splat(0.0); N]; R]);
            for d in (0..whole).step_by(2 * LANES) {
                // SAFETY: d + 16 is at most dim, the length of the query and of keys.
                unsafe {
                    let (row, next) = (E::load(queries.add(d)), E::load(queries.add(d + LANES)));
                    for (n, key) in block.iter().enumerate() {
                        multiply(&mut low, n, [row; R], T::load::<E>(key.add(d)));
                        multiply(&mut high, n, [next; R], T::load::<E>(key.add(d + LANES)));
                    }
                }
            }
            if whole < dim {
                // SAFETY: eight channels are left, since dim is a multiple of 8.
                unsafe {
                    let (row, zeros) = (E::load(queries.add(whole)), E::splat(0.0));
                    for (n, key) in block.iter().enumerate() {
                        multiply(&mut low, n, [row; R], T::load::<E>(key.add(whole)));
                        multiply(&mut high, n, [zeros; R], zeros);
                    }
                }
            }
            for (low, high) in low.iter_mut().flatten().zip(high.as_flattened()) {
                *low = low.add(*high);
            }
            store(low, scores, first);
        }
    }

    /// N keys at a time.
    #[inline(always)]
    fn in_blocks<V: Vector, const N: usize>(self) {
        let ScoreRows { queries, dim, keys, scores, mut ahead } = self;
        let scores: &mut [[f32; TILE]; R] = scores.try_into().expect("R rows");
        let queries = queries.as_ptr();
        let whole = dim - dim % V::LANES;
        for first in (0..keys.len()).step_by(N) {
            ahead.fetch(N);
            let block: [*const T; N] = block(keys, first);
            let mut sums = [[V::splat(0.0); N]; R];
            let mut rows = [V::splat(0.0); R];
            for d in (0..whole).step_by(V::LANES) {
                // SAFETY: d + V::LANES is at most dim, the length of queries and keys.
                unsafe {
                    for (r, row) in rows.iter_mut().enumerate() {
                        *row = V::load(queries.add(r * dim + d));
                    }
                    for (n, key) in block.iter().enumerate() {
                        multiply(&mut sums, n, rows, T::load::<V>(key.add(d)));
                    }
                }
            }
            if V::LANES > LANES && whole < dim {
                // SAFETY: eight channels are left, since dim is a multiple of 8 and vectors have at most 16 lanes.
                unsafe {
                    for (r, row) in rows.iter_mut().enumerate() {
                        *row = V::extend(V::Eight::load(queries.add(r * dim + whole)));
                    }
                    for (n, key) in block.iter().enumerate() {
                        multiply(&mut sums, n, rows, V::extend(T::load::<V::Eight>(key.add(whole))));
                    }
                }
            }
            store(sums, scores, first);
        }
    }
}

/// N keys from `first` on. Past the last key it stands in for those that are missing.
#[inline(always)]
fn block<T, const N: usize>(keys: &[*const T], first: usize) -> [*const T; N] {
    let mut block = [keys[first]; N];
    for (n, key) in block.iter_mut().enumerate() {
        *key = keys[(first + n).min(keys.len() - 1)];
    }
    block
}

/// sums[r][n] += rows[r] · key
#[inline(always)]
fn multiply<V: Vector, const R: usize, const N: usize>(sums: &mut [[V; N]; R], n: usize, rows: [V; R], key: V) {
    for (sums, row) in sums.iter_mut().zip(rows) {
        sums[n] = key.mul_add(row, sums[n]);
    }
}

/// Adds the lanes of each sum, and stores them from column `first` on, a multiple of N. R·N is a multiple of 8, but for 3 · 4.
#[inline(always)]
fn store<V: Vector, const R: usize, const N: usize>(sums: [[V; N]; R], scores: &mut [[f32; TILE]; R], first: usize) {
    let step = 8 / N;
    for r in (0..R).step_by(step) {
        let mut eight = [V::Eight::splat(0.0); 8];
        let mut places = [std::ptr::null_mut(); 4];
        for (i, eight) in eight.iter_mut().enumerate() {
            // A row that is missing is the last one again.
            let row = (r + i / N).min(R - 1);
            *eight = sums[row][i % N].folded();
            if i % N == 0 && N < 8 {
                places[i / N] = scores[row][first..first + N].as_mut_ptr();
            }
        }
        let eight = V::Eight::sums_of_eight(eight);
        // SAFETY: each place was sliced with N columns, and a store writes as many to each.
        unsafe {
            match N {
                8 => eight.store(scores[r][first..first + N].as_mut_ptr()),
                4 => eight.store_halves([places[0], places[1]]),
                _ => eight.store_quarters(places),
            }
        }
    }
}

/// Turns the first `len` scores of each row, 1 … 64 of them, into weights e^(s − m), and gives m and l = Σ e^(s − m). With a
/// cap, s is first cap·tanh(s / cap). A NaN among the scores stays one and makes the sum NaN.
pub struct Softmax<'a> {
    pub scores: &'a mut [[f32; TILE]],
    pub len: usize,
    pub cap: Option<f32>,
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
}

impl WideKernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let Softmax { scores, len, cap, m, l } = self;
        let padded = len.next_multiple_of(V::LANES);
        // Largest scores first, then weights: the sums of one row are long under way when those of the next begin.
        for (scores, m) in scores.iter_mut().zip(&mut *m) {
            if let Some(cap) = cap {
                cap_scores::<V>(&mut scores[..padded], cap);
            }
            scores[len..padded].fill(f32::NEG_INFINITY);
            *m = largest::<V>(&scores[..padded]);
        }
        for ((scores, m), l) in scores.iter_mut().zip(m).zip(l) {
            // Where every score is −inf, s − m has to be −inf, too, and not NaN.
            *l = weights::<V>(&mut scores[..padded], m.max(f32::MIN));
        }
    }
}

/// The largest of some scores, among which NaN does not count.
#[inline(always)]
fn largest<V: Vector>(scores: &[f32]) -> f32 {
    let mut top = V::splat(f32::NEG_INFINITY);
    for part in scores.chunks_exact(V::LANES) {
        // SAFETY: the part has a value for each lane.
        top = unsafe { V::load(part.as_ptr()) }.max(top);
    }
    top.largest()
}

/// Turns scores into weights e^(s − m), and sums them.
#[inline(always)]
fn weights<V: Vector>(scores: &mut [f32], m: f32) -> f32 {
    const TOGETHER: usize = 4;
    let m = V::splat(m);
    let mut sum = V::splat(0.0);
    let mut whole = scores.chunks_exact_mut(TOGETHER * V::LANES);
    for part in &mut whole {
        let mut weights = [V::splat(0.0); TOGETHER];
        for (weight, part) in weights.iter_mut().zip(part.chunks_exact(V::LANES)) {
            // SAFETY: the part has a value for each lane.
            *weight = unsafe { V::load(part.as_ptr()) }.sub(m);
        }
        weights = V::exp_each(weights);
        for (weight, part) in weights.into_iter().zip(part.chunks_exact_mut(V::LANES)) {
            // SAFETY: as above.
            unsafe { weight.store(part.as_mut_ptr()) };
            sum = sum.add(weight);
        }
    }
    for part in whole.into_remainder().chunks_exact_mut(V::LANES) {
        // SAFETY: as above.
        unsafe {
            let weight = V::load(part.as_ptr()).sub(m).exp();
            weight.store(part.as_mut_ptr());
            sum = sum.add(weight);
        }
    }
    sum.total()
}

/// s becomes cap·tanh(s / cap).
#[inline(always)]
fn cap_scores<V: Vector>(scores: &mut [f32], cap: f32) {
    let (cap, share) = (V::splat(cap), V::splat(1.0 / cap));
    for part in scores.chunks_exact_mut(V::LANES) {
        // SAFETY: the part has a value for each lane.
        unsafe { V::load(part.as_ptr()).mul(share).tanh().mul(cap).store(part.as_mut_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::{of_this_machine, run_with};
    use half::{bf16, f16};

    const DIMS: [usize; 6] = [16, 24, 64, 72, 128, 576];

    fn numbers(count: usize, seed: f64) -> Vec<f32> {
        (0..count).map(|i| (seed + i as f64 * 0.37).sin() as f32).collect()
    }

    /// Scores of R rows are those in double precision, and bit for bit those of each row alone with each key alone.
    fn check<T: Row, const R: usize>(make: fn(f32) -> T) {
        for name in of_this_machine() {
            for (dim, len) in DIMS.into_iter().flat_map(|dim| [1, 2, 7, 8, 63, 64].map(|len| (dim, len))) {
                let (queries, data) = (numbers(R * dim, 1.0), numbers(len * dim, 2.0));
                let data: Vec<T> = data.into_iter().map(make).collect();
                let keys: Vec<*const T> = data.chunks(dim).map(<[T]>::as_ptr).collect();
                let mut scores = [[f32::NAN; TILE]; R];
                let ahead = Ahead::nothing();
                run_with(name, ScoreRows::<T, R> { queries: &queries, dim, keys: &keys, scores: &mut scores, ahead });
                for (query, scores) in queries.chunks(dim).zip(&scores) {
                    for (t, key) in data.chunks(dim).enumerate() {
                        let want: f64 = query.iter().zip(key).map(|(&q, &k)| q as f64 * k.to_f32() as f64).sum();
                        // A sum of dim products, each below 1, in vectors.
                        assert!((scores[t] as f64 - want).abs() < 2e-7 * dim as f64, "{name:?}, D={dim}: {want}");
                        let mut single = [[f32::NAN; TILE]];
                        let keys = &keys[t..t + 1];
                        run_with(name, ScoreRows::<T, 1> { queries: query, dim, keys, scores: &mut single, ahead });
                        assert_eq!(single[0][0].to_bits(), scores[t].to_bits(), "{name:?}, D={dim}, R={R}, {len} keys");
                    }
                }
            }
        }
    }

    #[test]
    fn scores_do_not_depend_on_rows_and_keys_beside_them() {
        check::<f16, 1>(f16::from_f32);
        check::<f16, 2>(f16::from_f32);
        check::<f16, 3>(f16::from_f32);
        check::<f16, 4>(f16::from_f32);
        check::<bf16, 3>(bf16::from_f32);
        check::<f32, 4>(|x| x);
    }

    #[test]
    fn softmax_gives_weights_and_sums_of_each_row() {
        for name in of_this_machine() {
            for len in 1..=TILE {
                let (mut rows, cap) = ([[f32::NAN; TILE]; 3], (len % 2 == 0).then_some(2.0));
                let given = numbers(3 * len, len as f64).chunks(len).map(<[f32]>::to_vec).collect::<Vec<_>>();
                rows.iter_mut().zip(&given).for_each(|(row, given)| row[..len].copy_from_slice(given));
                // A row without tokens to see has scores of −inf alone.
                rows[1][..len].fill(f32::NEG_INFINITY);
                let (mut m, mut l) = ([0.0; 3], [0.0; 3]);
                run_with(name, Softmax { scores: &mut rows, len, cap, m: &mut m, l: &mut l });
                for r in [0, 2] {
                    let capped = |&s: &f32| cap.map_or(s as f64, |cap| cap as f64 * (s as f64 / cap as f64).tanh());
                    let top = given[r].iter().map(capped).fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = given[r].iter().map(|s| (capped(s) - top).exp()).collect();
                    assert!((m[r] as f64 - top).abs() < 1e-6, "{name:?}");
                    assert!((l[r] as f64 - weights.iter().sum::<f64>()).abs() < 1e-6 * len as f64, "{name:?}");
                    assert!(rows[r].iter().zip(&weights).all(|(&w, want)| (w as f64 - want).abs() < 1e-6), "{name:?}");
                }
                if cap.is_none() {
                    assert_eq!((m[1], l[1]), (f32::NEG_INFINITY, 0.0), "{name:?}");
                }
            }
        }
    }
}
