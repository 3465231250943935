//! Multiplication by the Hadamard matrix.

use super::{Kernel, LANES, Lanes, dispatch};

/// Multiplies a row by H (Sylvester's, times 1/√n) of the largest power of two n that divides its length, a multiple of 16, part by
/// part: butterflies (a + b, a − b) over numbers 1, 2, 4 … apart, then the factor, each step in float32. Every machine gives the same
/// bits.
pub fn rotate(row: &mut [f32]) {
    debug_assert!(row.len().is_multiple_of(2 * LANES));
    dispatch(Rotate(row));
}

struct Rotate<'r>(&'r mut [f32]);

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let n = 1usize << self.0.len().trailing_zeros();
        let factor = L::splat(1.0 / (n as f32).sqrt());
        for part in self.0.chunks_exact_mut(n) {
            for eight in part.chunks_exact_mut(LANES) {
                // SAFETY: there are eight values.
                unsafe { L::load(eight.as_ptr()).butterflies().store(eight.as_mut_ptr()) };
            }
            let mut distance = LANES;
            while distance < n {
                let last = 2 * distance == n;
                for pair in part.chunks_exact_mut(2 * distance) {
                    let (low, high) = pair.split_at_mut(distance);
                    for (low, high) in low.chunks_exact_mut(LANES).zip(high.chunks_exact_mut(LANES)) {
                        // SAFETY: as above.
                        unsafe {
                            let (a, b) = (L::load(low.as_ptr()), L::load(high.as_ptr()));
                            let (mut sum, mut difference) = (a.add(b), a.sub(b));
                            if last {
                                (sum, difference) = (sum.mul(factor), difference.mul(factor));
                            }
                            sum.store(low.as_mut_ptr());
                            difference.store(high.as_mut_ptr());
                        }
                    }
                }
                distance *= 2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::portable::Portable;

    #[test]
    fn rotation_is_hadamards_and_its_own_inverse() {
        for dim in [16usize, 64, 80, 96, 128, 256] {
            let n = 1usize << dim.trailing_zeros();
            for c in 0..dim {
                let mut row = vec![0.0; dim];
                row[c] = 1.0;
                rotate(&mut row);
                for (d, &x) in row.iter().enumerate() {
                    let sign = if ((c & d) % n).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    let expected = if c / n == d / n { sign / (n as f32).sqrt() } else { 0.0 };
                    assert!((x - expected).abs() < 1e-6, "dim {dim}: H[{c}, {d}] is {x}, expected {expected}");
                }
                rotate(&mut row);
                assert!((row[c] - 1.0).abs() < 1e-6, "dim {dim}, channel {c}: {}", row[c]);
            }
        }
    }

    #[test]
    fn rotation_has_the_bits_of_butterflies_one_after_the_other() {
        for dim in [64usize, 80, 128, 256] {
            let n = 1usize << dim.trailing_zeros();
            let given: Vec<f32> = (0..dim).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut want = given.clone();
            let mut distance = 1;
            while distance < n {
                for c in (0..dim).filter(|c| c & distance == 0) {
                    let (a, b) = (want[c], want[c + distance]);
                    (want[c], want[c + distance]) = (a + b, a - b);
                }
                distance *= 2;
            }
            let factor = 1.0 / (n as f32).sqrt();
            want.iter_mut().for_each(|x| *x *= factor);
            let (mut row, mut portable) = (given.clone(), given);
            rotate(&mut row);
            Rotate(&mut portable).run::<Portable>();
            assert_eq!(row, want, "dim {dim}");
            assert_eq!(portable, want, "dim {dim}");
        }
    }
}
