//! What dictionaries of tokens compare a decoder with: plain formulas of lists and attention. And tensors of a call's arguments on the CPU.

use super::*;

pub const DIM: usize = 16;
pub const BLOCK: usize = 8;
pub const SCALE: f64 = 0.25;

pub type Vector = [f32; DIM];

#[derive(Clone, Copy)]
pub struct Token {
    pub key: Vector,
    pub value: Vector,
}

/// The rows of a step, their modes, and as many tokens of each as `counts` says.
pub struct Part<'a> {
    pub rows: &'a [usize],
    pub modes: &'a [u32],
    pub counts: &'a [usize],
    pub positions: usize,
}

impl Part<'_> {
    /// The tokens that a row writes in the step.
    pub fn count(&self, i: usize) -> usize {
        if self.modes[i] == VWD_DECODER_SKIP { 0 } else { self.counts[i] }
    }
}

/// Numbers of a dtype, as a call takes them.
pub struct Numbers {
    dtype: DType,
    /// Aligned for every dtype.
    words: Vec<u64>,
}

impl Numbers {
    pub fn new(dtype: DType, values: &[f32]) -> Numbers {
        let mut numbers = Numbers { dtype, words: vec![0; (values.len() * dtype.bytes()).div_ceil(8)] };
        numbers.set(0, values);
        numbers
    }

    pub fn set(&mut self, at: usize, values: &[f32]) {
        let (size, bytes) = (self.dtype.bytes(), self.words.len() * 8);
        // SAFETY: the bytes of the words, which nothing else uses meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), bytes) };
        for (to, &value) in bytes[at * size..].chunks_mut(size).zip(values) {
            self.dtype.encode_float(value as f64, to);
        }
    }

    pub fn c(&self, extents: &[usize]) -> vwd_tensor {
        vwd_tensor { dtype_bits: self.dtype.bits, ..packed(&self.words, self.dtype.code, extents) }
    }
}

pub fn numbers(data: &[i32]) -> vwd_tensor {
    packed(data, 0, &[data.len()])
}

pub fn floats(data: &[f32], extents: &[usize]) -> vwd_tensor {
    packed(data, 2, extents)
}

fn dot(a: &Vector, b: &Vector) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b) as f64).sum()
}

/// The scores of blocks: the largest product that a key of the block could have. `queries` are those of the last tokens; each scores the blocks
/// that do not begin after it, and the best score of a block counts.
pub fn scores(tokens: &[Token], queries: &[Vec<Vector>]) -> Vec<i64> {
    let largest = |keys: &[Token], q: &Vector| -> i64 {
        let of_channel = |c: usize| {
            let keys = || keys.iter().map(|token| token.key[c]);
            let (most, least) = (keys().fold(f32::MIN, f32::max), keys().fold(f32::MAX, f32::min));
            (q[c].max(0.0) * most + q[c].min(0.0) * least) as i64
        };
        (0..DIM).map(of_channel).sum()
    };
    let first = tokens.len() - queries.len();
    let of_block = |(block, keys): (usize, &[Token])| {
        let seen = queries.iter().enumerate().filter(|(r, _)| block * BLOCK <= first + r);
        seen.map(|(_, queries)| queries.iter().map(|q| largest(keys, q)).sum()).max().expect("a query")
    };
    tokens.chunks(BLOCK).enumerate().map(of_block).collect()
}

/// The blocks of a list: the first, the last, and those of the others with the best scores.
pub fn list(tokens: &[Token], queries: &[Vec<Vector>], k: usize) -> Vec<usize> {
    let last = tokens.len().div_ceil(BLOCK) - 1;
    let scores = scores(tokens, queries).into_iter().zip(0..);
    let mut others: Vec<(i64, usize)> = scores.filter(|&(_, block)| block != 0 && block != last).collect();
    others.sort_by_key(|&(score, block)| (-score, block));
    let forced = if last == 0 { vec![0] } else { vec![0, last] };
    let mut blocks: Vec<usize> = others.iter().map(|&(_, block)| block).take(k - forced.len()).chain(forced).collect();
    blocks.sort_unstable();
    blocks
}

/// Attention over those of the tokens that lie in some blocks.
pub fn attention(tokens: &[Token], blocks: impl Iterator<Item = usize>, q: &Vector) -> [f64; DIM] {
    let (mut sum, mut out) = (0.0, [0.0; DIM]);
    for token in blocks.flat_map(|block| tokens.iter().skip(block * BLOCK).take(BLOCK)) {
        let weight = (SCALE * dot(q, &token.key)).exp();
        sum += weight;
        out.iter_mut().zip(token.value).for_each(|(out, value)| *out += weight * value as f64);
    }
    out.map(|x| x / sum)
}
