//! Weighted sums of the values of a tile, for a few rows.
//!
//! Each channel of a row is summed over the tokens in their order, so that its bits depend on weights, values and the
//! instructions alone, whatever rows and channels are computed beside it.
//!
//! A pass keeps N vectors of channels of R rows in registers. For a token it loads N vectors of the value and R weights, and
//! makes R·N multiplications. A multiplication takes four cycles and two start in each, so that a pass wants eight sums.

use super::scores::{prefers_eight, rows_together};
use super::tile::{Ahead, TILE};
use crate::ops::simd::{LANES, Row, Vector, WideKernel, dispatch_wide};

/// Tokens after which rows are fetched again.
const BETWEEN_FETCHES: usize = 8;

/// acc[r] = Σ_t weights[r][t] · values[t]. Meanwhile the rows `ahead` are fetched.
///
/// # Safety
/// Row r of `acc` has `dim` places from r·dim on, a multiple of 8; every value has `dim` readable elements; there are at
/// most 64.
pub unsafe fn weigh_rows<T: Row>(
    values: &[*const T],
    dim: usize,
    weights: &[[f32; TILE]],
    acc: &mut [f32],
    ahead: Ahead<T>,
) {
    let mut first = 0;
    while first < weights.len() {
        let rows = rows_together(weights.len() - first);
        // Only the last rows prefetch, so that what they prefetch is in the cache when it is read next.
        let ahead = if first + rows == weights.len() { ahead } else { Ahead::nothing() };
        let (weights, acc) = (&weights[first..first + rows], &mut acc[first * dim..(first + rows) * dim]);
        match rows {
            1 => dispatch_wide(WeighRows::<T, 1> { values, dim, weights, acc, ahead }),
            2 => dispatch_wide(WeighRows::<T, 2> { values, dim, weights, acc, ahead }),
            3 => dispatch_wide(WeighRows::<T, 3> { values, dim, weights, acc, ahead }),
            _ => dispatch_wide(WeighRows::<T, 4> { values, dim, weights, acc, ahead }),
        }
        first += rows;
    }
}

/// The sums of R rows. Constructing one takes the promises of [`weigh_rows`].
struct WeighRows<'a, T, const R: usize> {
    values: &'a [*const T],
    dim: usize,
    weights: &'a [[f32; TILE]],
    acc: &'a mut [f32],
    ahead: Ahead<'a, T>,
}

impl<T: Row, const R: usize> WideKernel for WeighRows<'_, T, R> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        if prefers_eight::<T, R>() { self.passes::<V::Eight>() } else { self.passes::<V>() }
    }
}

impl<T: Row, const R: usize> WeighRows<'_, T, R> {
    #[inline(always)]
    fn passes<V: Vector>(mut self) {
        // The most vectors of a pass: as many as registers allow beside R weights and a value.
        let most = match R {
            1 => 8,
            2 if V::REGISTERS >= 32 => 8,
            3 if V::REGISTERS < 32 => 3,
            4 if V::REGISTERS < 32 => 2,
            _ => 4,
        };
        let vectors = self.dim / V::LANES;
        self.ahead.share_out(vectors.div_ceil(most) * self.values.len().div_ceil(BETWEEN_FETCHES));
        let mut done = 0;
        while done < vectors {
            let width = width(vectors - done, most);
            let d = done * V::LANES;
            // SAFETY: as many vectors of channels are left.
            unsafe {
                match width {
                    8 if R < 3 => self.pass::<V, 8>(d),
                    6 if R < 3 => self.pass::<V, 6>(d),
                    4 if R < 4 || V::REGISTERS >= 32 => self.pass::<V, 4>(d),
                    3 if R < 4 || V::REGISTERS >= 32 => self.pass::<V, 3>(d),
                    2 => self.pass::<V, 2>(d),
                    1 => self.pass::<V, 1>(d),
                    _ => unreachable!("no pass is wider than its most"),
                }
            }
            done += width;
        }
        if V::LANES > LANES && !self.dim.is_multiple_of(V::LANES) {
            // SAFETY: eight channels are left, since dim is a multiple of 8 and vectors have at most 16 lanes.
            unsafe { self.pass::<V::Eight, 1>(self.dim - LANES) };
        }
    }
}

/// The vectors of the next pass, of as many as are left: passes are alike, because a narrow one would wait for its own sums.
#[inline(always)]
fn width(left: usize, most: usize) -> usize {
    let alike = left.div_ceil(left.div_ceil(most));
    let fits = |width: usize| width <= left && width <= most && width <= alike + 1;
    [8, 6, 4, 3, 2].into_iter().find(|&width| fits(width)).unwrap_or(1)
}

impl<T: Row, const R: usize> WeighRows<'_, T, R> {
    /// The sums of N vectors of channels from d on.
    ///
    /// # Safety
    /// The channels exist.
    #[inline(always)]
    unsafe fn pass<V: Vector, const N: usize>(&mut self, d: usize) {
        let weights: &[[f32; TILE]; R] = self.weights.try_into().expect("R rows");
        let mut sums = [[V::splat(0.0); N]; R];
        for (first, values) in (0..).step_by(BETWEEN_FETCHES).zip(self.values.chunks(BETWEEN_FETCHES)) {
            self.ahead.fetch_share();
            for (t, &value) in (first..).zip(values) {
                let mut of_rows = [V::splat(0.0); R];
                for (weight, row) in of_rows.iter_mut().zip(weights) {
                    // SAFETY: there are at most 64 values.
                    *weight = V::splat(*unsafe { row.get_unchecked(t) });
                }
                for n in 0..N {
                    // SAFETY: the value has these channels.
                    let value = unsafe { T::load::<V>(value.add(d + n * V::LANES)) };
                    for (sums, weight) in sums.iter_mut().zip(of_rows) {
                        sums[n] = value.mul_add(weight, sums[n]);
                    }
                }
            }
        }
        for (sums, acc) in sums.iter().zip(self.acc.chunks_exact_mut(self.dim)) {
            for (n, sum) in sums.iter().enumerate() {
                // SAFETY: acc has these channels.
                unsafe { sum.store(acc.as_mut_ptr().add(d + n * V::LANES)) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::{of_this_machine, run_with};
    use half::{bf16, f16};

    fn numbers(count: usize, seed: f64) -> Vec<f32> {
        (0..count).map(|i| (seed + i as f64 * 0.37).sin() as f32).collect()
    }

    /// Sums of R rows are those in double precision, and bit for bit those of each row alone.
    fn check<T: Row, const R: usize>(make: fn(f32) -> T) {
        for name in of_this_machine() {
            for (dim, len) in (16..=576).step_by(8).flat_map(|dim| [1, 7, 8, 64].map(|len| (dim, len))) {
                let values: Vec<T> = numbers(len * dim, 2.0).into_iter().map(make).collect();
                let rows: Vec<*const T> = values.chunks(dim).map(<[T]>::as_ptr).collect();
                let mut weights = [[f32::NAN; TILE]; R];
                weights.iter_mut().enumerate().for_each(|(r, row)| row[..len].copy_from_slice(&numbers(len, r as f64)));
                let (mut acc, ahead) = (vec![f32::NAN; R * dim], Ahead::nothing());
                run_with(name, WeighRows::<T, R> { values: &rows, dim, weights: &weights, acc: &mut acc, ahead });
                for (weights, acc) in weights.iter().zip(acc.chunks(dim)) {
                    for (d, &x) in acc.iter().enumerate().step_by(5) {
                        let want: f64 = (0..len).map(|t| weights[t] as f64 * values[t * dim + d].to_f32() as f64).sum();
                        // A sum of len products, each below 1, one after the other.
                        assert!((x as f64 - want).abs() < 1e-6 * len as f64, "{name:?}, Dv={dim}: {x}, not {want}");
                    }
                    let mut single = vec![f32::NAN; dim];
                    let weights = std::slice::from_ref(weights);
                    run_with(name, WeighRows::<T, 1> { values: &rows, dim, weights, acc: &mut single, ahead });
                    let same = single.iter().zip(acc).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{name:?}, Dv={dim}, R={R}, {len} tokens");
                }
            }
        }
    }

    #[test]
    fn sums_do_not_depend_on_rows_beside_them() {
        check::<f16, 1>(f16::from_f32);
        check::<f16, 2>(f16::from_f32);
        check::<f16, 3>(f16::from_f32);
        check::<f16, 4>(f16::from_f32);
        check::<bf16, 2>(bf16::from_f32);
        check::<f32, 4>(|x| x);
    }
}
