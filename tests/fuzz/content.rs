//! What stands in tensors: mostly what a call expects, sometimes what it must survive.

use crate::support::*;
use half::{bf16, f16};

/// Kinds of elements. Wherever a call reads them, some are out of range.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    Floats,
    /// Seldom anything but numbers: one that is not finite refuses the call.
    Finite,
    Bytes,
    /// Tokens of a small vocabulary, so that drafts meet targets; some are negative.
    Tokens,
    /// 0 … n, often n.
    Counts(i64),
    /// Below n.
    Indices(i64),
    /// Below n, ascending along the last dimension.
    Ascending(i64),
    /// Below n, no two alike.
    Distinct(i64),
}

/// How hostile a tensor is.
#[derive(Clone, Copy, PartialEq)]
enum Temper {
    Tame,
    Hostile,
    /// Any bits.
    Wild,
}

impl Content {
    /// `count` elements of `width` bytes, in rows of `row`.
    pub fn bytes(self, rng: &mut Rng, dtype: DType, width: usize, count: usize, row: usize) -> Vec<u8> {
        let temper = match rng.size(0..=7) {
            0..5 => Temper::Tame,
            5..7 => Temper::Hostile,
            _ => Temper::Wild,
        };
        let is_float = [F32, F16, BF16, F8E4M3, F8E5M2].contains(&dtype);
        let fits = match self {
            Content::Floats | Content::Finite => is_float,
            Content::Bytes => false,
            _ => [I32, I64].contains(&dtype),
        };
        let temper = if matches!(self, Content::Finite) && !rng.one_in(4) { Temper::Tame } else { temper };
        // Ids that are promised to be distinct stay so.
        let may_be_wild = !matches!(self, Content::Distinct(_));
        let is_wild = !fits || (temper == Temper::Wild && may_be_wild);
        if is_wild || is_float {
            // Many elements are these again: their number is a prime, so that no two rows are alike.
            let elements = count.min(1021);
            let bytes = match is_wild {
                true => rng.bytes(elements * width),
                false => (0..elements).flat_map(|_| float(rng, dtype, temper != Temper::Tame)).collect(),
            };
            return bytes.into_iter().cycle().take(count * width).collect();
        }
        let numbers = self.numbers(rng, temper != Temper::Tame, count, row.max(1));
        numbers.into_iter().flat_map(|x| x.to_le_bytes().into_iter().chain([0; 8]).take(width)).collect()
    }

    fn numbers(self, rng: &mut Rng, is_hostile: bool, count: usize, row: usize) -> Vec<i64> {
        let (n, least) = match self {
            Content::Counts(n) => (n.min(i32::MAX as i64) + 1, 0),
            Content::Indices(n) | Content::Ascending(n) | Content::Distinct(n) => (n.min(i32::MAX as i64), 0),
            _ => (3, -1),
        };
        let one = |rng: &mut Rng| match self {
            Content::Counts(_) if rng.one_in(3) => n - 1,
            _ if n > least => rng.int(least..=n - 1),
            _ => 0,
        };
        let mut numbers: Vec<i64> = match self {
            Content::Distinct(_) => distinct(rng, n, count),
            _ => (0..count).map(|_| one(rng)).collect(),
        };
        if let Content::Ascending(_) = self {
            numbers.chunks_mut(row).for_each(|row| row.sort_unstable());
            if !is_hostile {
                numbers.chunks_mut(row).for_each(only_last_repeats);
            }
        }
        if is_hostile {
            let outside = [-1, n, n + 1, i32::MAX as i64, i32::MIN as i64];
            for x in &mut numbers {
                if rng.one_in(4) {
                    *x = rng.pick(&outside);
                }
            }
        }
        numbers
    }
}

/// Some of 0 … n−1 in any order; −1 where there are no more.
fn distinct(rng: &mut Rng, n: i64, count: usize) -> Vec<i64> {
    let mut all: Vec<i64> = (0..n.min(1 << 12)).collect();
    rng.shuffle(&mut all);
    all.resize(count, -1);
    rng.shuffle(&mut all);
    all
}

/// Each id once; the last as often as places are left.
fn only_last_repeats(row: &mut [i64]) {
    let mut ids = row.to_vec();
    ids.dedup();
    row.iter_mut().enumerate().for_each(|(j, id)| *id = ids[j.min(ids.len() - 1)]);
}

fn float(rng: &mut Rng, dtype: DType, is_hostile: bool) -> Vec<u8> {
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, -1e-45, f32::MAX, f32::MIN, 6e-8];
    let x = if is_hostile && rng.one_in(6) { rng.pick(&special) } else { (rng.unit() * 4.0 - 2.0) as f32 };
    match dtype {
        F32 => x.to_le_bytes().to_vec(),
        F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        // A few of the 256 codes are no numbers.
        _ => rng.bytes(1),
    }
}
