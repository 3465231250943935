//! Sums over codes of four bits: products of rows of codes with queries, and weighted sums of rows. Both are sums of whole numbers,
//! exact and so the same with all instructions.
//!
//! A row of D channels is D/2 bytes: channel 2i in the low four bits of byte i, 2i + 1 in the high ones. Its 16-bit words hold four
//! channels each, so that shifts of words make vectors of every fourth channel. Queries lie in that order: of each 64 channels first
//! those at 0, 4, 8 …, then those at 1, 5, 9 … ([`place`]).

pub use super::code_rows::{MOST_ROWS, padded, place};
use crate::core::instructions::Instructions;

/// The largest number of a query and the largest weight: sums of products with 256 codes up to 15 stay below 2^27.
pub const LARGEST: f32 = 32767.0;

/// dots[r][t] = Σ_c query r, channel c · code c of row t. Up to seven results past the last row are written, too.
///
/// # Safety
/// Every row has `bytes` readable bytes, a multiple of 8 up to 128; there are 1 … 64 rows; query r has padded(2·bytes) numbers from
/// r times that on, zeros where there is no channel.
pub unsafe fn dot_codes(queries: &[i16], rows: &[*const u8], bytes: usize, dots: &mut [[i32; MOST_ROWS]]) {
    debug_assert!(queries.len() >= dots.len() * padded(2 * bytes));
    // SAFETY: the CPU has the instructions that it uses; the rest says the caller.
    unsafe {
        match Instructions::used() {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 | Instructions::Avx512 => super::codes_x86::dot_codes(queries, rows, bytes, dots),
            _ => dot_portably(queries, rows, bytes, dots),
        }
    }
}

/// sums[r·padded(2·bytes) + c] = Σ_t weights[r][t] · code c of row t. Weights past the last row are 0.
///
/// # Safety
/// As for [`dot_codes`], of rows; `sums` has a place for each.
pub unsafe fn sum_codes(rows: &[*const u8], bytes: usize, weights: &[[i16; MOST_ROWS]], sums: &mut [i32]) {
    debug_assert!(sums.len() >= weights.len() * padded(2 * bytes));
    // SAFETY: as for dot_codes.
    unsafe {
        match Instructions::used() {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 | Instructions::Avx512 => super::codes_x86::sum_codes(rows, bytes, weights, sums),
            _ => sum_portably(rows, bytes, weights, sums),
        }
    }
}

/// # Safety
/// As for [`dot_codes`].
unsafe fn dot_portably(queries: &[i16], rows: &[*const u8], bytes: usize, dots: &mut [[i32; MOST_ROWS]]) {
    for (dots, query) in dots.iter_mut().zip(queries.chunks_exact(padded(2 * bytes))) {
        for (dot, &row) in dots.iter_mut().zip(rows) {
            // SAFETY: says the caller.
            let row = unsafe { std::slice::from_raw_parts(row, bytes) };
            let of_byte = |(i, byte): (usize, &u8)| {
                let [low, high] = [2 * i, 2 * i + 1].map(|c| i32::from(query[place(c)]));
                low * i32::from(byte & 15) + high * i32::from(byte >> 4)
            };
            *dot = row.iter().enumerate().map(of_byte).sum();
        }
    }
}

/// # Safety
/// As for [`sum_codes`].
unsafe fn sum_portably(rows: &[*const u8], bytes: usize, weights: &[[i16; MOST_ROWS]], sums: &mut [i32]) {
    for (weights, sums) in weights.iter().zip(sums.chunks_exact_mut(padded(2 * bytes))) {
        sums.fill(0);
        for (&weight, &row) in weights.iter().zip(rows) {
            // SAFETY: says the caller.
            let row = unsafe { std::slice::from_raw_parts(row, bytes) };
            for (pair, byte) in sums.chunks_exact_mut(2).zip(row) {
                pair[0] += i32::from(weight) * i32::from(byte & 15);
                pair[1] += i32::from(weight) * i32::from(byte >> 4);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::random::Random;

    type Dot = unsafe fn(&[i16], &[*const u8], usize, &mut [[i32; MOST_ROWS]]);
    type Sum = unsafe fn(&[*const u8], usize, &[[i16; MOST_ROWS]], &mut [i32]);

    fn all_of_this_machine() -> Vec<(&'static str, Dot, Sum)> {
        #[allow(unused_mut)]
        let mut all: Vec<(&'static str, Dot, Sum)> = vec![("portable", dot_portably, sum_portably)];
        #[cfg(target_arch = "x86_64")]
        all.extend(super::super::codes_x86::of_this_machine());
        all
    }

    #[test]
    fn sums_over_codes_are_exact() {
        let mut random = Random::new(1);
        for bytes in (32..=128).step_by(8) {
            for (len, heads) in [(1, 1), (2, 3), (7, 4), (8, 8), (63, 5), (64, 7)] {
                let (channels, stride) = (2 * bytes, padded(2 * bytes));
                let codes: Vec<Vec<u8>> =
                    (0..len).map(|_| (0..bytes).map(|_| random.next_u32() as u8).collect()).collect();
                let rows: Vec<*const u8> = codes.iter().map(Vec::as_ptr).collect();
                let code = |t: usize, c: usize| (codes[t][c / 2] >> (c % 2 * 4) & 15) as i64;
                let number = |x: u32| [x as i16, i16::MAX, -i16::MAX, 0][(x >> 16) as usize % 4].max(-i16::MAX);
                let (mut queries, mut weights) = (vec![0i16; heads * stride], vec![[0i16; MOST_ROWS]; heads]);
                for h in 0..heads {
                    (0..channels).for_each(|c| queries[h * stride + place(c)] = number(random.next_u32()));
                    (0..len).for_each(|t| weights[h][t] = number(random.next_u32()));
                }
                for (name, dot, sum) in all_of_this_machine() {
                    let (mut dots, mut sums) = (vec![[0; MOST_ROWS]; heads], vec![i32::MAX; heads * stride]);
                    // SAFETY: rows, queries and results are as long as they have to be.
                    unsafe {
                        dot(&queries, &rows, bytes, &mut dots);
                        sum(&rows, bytes, &weights, &mut sums);
                    }
                    for h in 0..heads {
                        for (t, dot) in dots[h].iter().enumerate().take(len) {
                            let terms = (0..channels).map(|c| queries[h * stride + place(c)] as i64 * code(t, c));
                            assert_eq!(*dot as i64, terms.sum::<i64>(), "{name}, {bytes} bytes, row {t} of {len}");
                        }
                        for c in 0..channels {
                            let want = (0..len).map(|t| weights[h][t] as i64 * code(t, c)).sum::<i64>();
                            assert_eq!(
                                sums[h * stride + c] as i64,
                                want,
                                "{name}, {bytes} bytes, {len} rows, channel {c}"
                            );
                        }
                    }
                }
            }
        }
    }
}
