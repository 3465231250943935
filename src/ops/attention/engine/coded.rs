//! Attention to tokens that are coded in INT4, on the codes themselves.
//!
//! With H the rotation, w the weights, μ the mean of a block and c a code: a key is μ + w∘(H·(s·(c − 7.5))), so that
//! q·k = q·μ + s·(H·(w∘q))·(c − 7.5), since H is symmetric. A query is weighted and rotated once, and rounded to 16 bits of its largest
//! number; its products with codes are then whole numbers, and exact. Values are H·(s·(c − 7.5)): the weights e^(s−m)·s of a tile are
//! rounded to 16 bits of the largest, and the sum of the tile is rotated back.

use super::span::HEADS;
use crate::ops::int4::{Int4Kv, MAX_CODED};
use crate::ops::simd::codes::{LARGEST, padded, place};
use crate::ops::simd::rotate;
use std::ops::Range;

/// The most blocks that a tile touches: tiles have 64 tokens, blocks at least 16, and both begin at multiples of 16.
pub const MEANS: usize = 4;

/// The coded tokens of one sequence, for one KV head.
#[derive(Clone, Copy)]
pub struct Coded<'a> {
    pub int4: &'a Int4Kv<'a>,
    pub sequence: usize,
    pub head: usize,
    pub first: usize,
    pub end: usize,
    /// The page of the current entry, where slots name the pages: of its tokens all are coded or none.
    pub slot: Option<usize>,
}

impl Coded<'_> {
    pub fn tokens(&self) -> Range<usize> {
        self.first..self.end
    }
}

/// Queries of a span as they are multiplied with codes.
pub struct CodedQueries<'w> {
    /// Query h from h·padded(D) on, in the order of `simd::codes`.
    pub numbers: &'w mut [i16],
    /// What a number stands for, halved.
    pub halves: [f32; HEADS],
    /// 15 times the sum of the numbers.
    pub sums: [i32; HEADS],
}

impl<'w> CodedQueries<'w> {
    /// Floats of memory that the queries of `heads` take.
    pub fn floats(dim: usize) -> usize {
        HEADS * padded(dim) / 2
    }

    /// Places for queries, none of which is set.
    pub fn new(memory: &'w mut [f32]) -> CodedQueries<'w> {
        // SAFETY: any bits are numbers, and a float32 has room for two and their alignment.
        let numbers = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), 2 * memory.len()) };
        CodedQueries { numbers, halves: [0.0; HEADS], sums: [0; HEADS] }
    }

    /// Sets query `h`, times the scale; `weights` are those of its KV head.
    pub fn set(&mut self, h: usize, query: &[f32], weights: &[f32]) {
        let mut row = [0.0; MAX_CODED];
        let row = &mut row[..query.len()];
        row.iter_mut().zip(query).zip(weights).for_each(|((x, q), w)| *x = q * w);
        rotate(row);
        let numbers = &mut self.numbers[h * padded(query.len())..][..padded(query.len())];
        numbers.fill(0);
        let unit = unit_of(row);
        let mut sum = 0;
        for (c, &x) in row.iter().enumerate() {
            let number = nearest(x / unit) as i16;
            numbers[place(c)] = number;
            sum += i32::from(number);
        }
        (self.halves[h], self.sums[h]) = (0.5 * unit, 15 * sum);
    }
}

/// Coded tokens of a tile.
pub struct CodedRows<'r> {
    pub keys: &'r [*const u8],
    pub values: &'r [*const u8],
    /// The scales of keys and of values.
    pub scales: [&'r [f32]; 2],
    /// Which of the means is that of each token.
    pub mean_of: &'r [u8],
    pub means: &'r [*const f32],
}

/// What 1 stands for where the largest of the numbers becomes [`LARGEST`]; NaN if one is not finite. At least the smallest normal
/// number, so that nothing is divided by 0.
#[inline(always)]
pub fn unit_of(numbers: &[f32]) -> f32 {
    // Bits of numbers of one sign ascend with them, and those that are not finite are the largest.
    let most = numbers.iter().fold(0, |most, x| most.max(x.to_bits() & !(1 << 31)));
    if most < f32::INFINITY.to_bits() { (f32::from_bits(most) / LARGEST).max(f32::MIN_POSITIVE) } else { f32::NAN }
}

/// The whole number nearest to `x`, ties to even, for sizes up to 2^22; any number for NaN.
#[inline(always)]
pub fn nearest(x: f32) -> i32 {
    // Between 2^23 and 2^24 numbers are 1 apart, and their bits count them.
    const SHIFT: f32 = 12_582_912.0;
    ((x + SHIFT).to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32)
}
