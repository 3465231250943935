//! Means and covariance on the CPU: a task merges the new blocks of one sequence's KV head, one after the other.

use super::Request;
use crate::core::dtype::{Element, Float};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::simd::{self, Kernel, LANES, Lanes};
use crate::ops::views::Scale;
use crate::runtime::cpu::Cpu;
use crate::with_key;

/// Sums over a block that are joined at its end: its n-th token is added to the sum of n modulo 4.
const PARTS: usize = 4;

pub fn update(cpu: &Cpu, r: &Request) -> Result<()> {
    let kv = &r.kv;
    let (batch, heads, size) = (kv.pages.batch(), kv.k.dim(2), r.block_size);
    let (dim, value_dim) = (kv.k.dim(3), kv.value_dim());
    // There is no whole block, and tensors without an element may have any number of heads.
    if kv.pages.capacity() < size || kv.k.is_empty() {
        (0..batch * if kv.k.is_empty() { 0 } else { heads }).for_each(|n| forget(r, n / heads, n % heads));
        return Ok(());
    }
    // A block's keys and values, what their sums are made of, what they move the means by, and those.
    let floats = (size + PARTS + 2) * (dim + value_dim) + value_dim;
    let bytes = size * (dim + value_dim) * kv.k.dtype.bytes();
    let scratch = cpu.scratch();
    cpu.in_shares(&scratch, batch * heads, floats, bytes, |task, memory| {
        // SAFETY: the op's caller keeps the tensors valid; no other task has this row and head.
        with_key!(kv.k.dtype, T => unsafe { extend::<T>(r, task / heads, task % heads, memory) });
    })
}

/// No block of sequence `i` is whole.
fn forget(r: &Request, i: usize, g: usize) {
    // SAFETY: the op's caller keeps the tensors valid.
    unsafe {
        if let Some(row) = r.remainder.row(i) {
            r.remainder.tokens.set([row, g], 0i32);
        }
    }
}

/// The tokens that stay counted of what `tokens` of the row were, for a sequence with so many whole blocks.
///
/// # Safety
/// There is a sequence `i`, and the op's caller keeps the tensors valid.
unsafe fn kept(r: &Request, i: usize, tokens: i32, whole: usize) -> usize {
    let size = r.block_size;
    let counted = tokens.max(0) as usize;
    // SAFETY: begin has an entry for each sequence.
    let begin = r.begin.map_or(usize::MAX, |begin| unsafe { begin.get::<i32, 1>([i]) }.max(0) as usize);
    let is_kept = counted.is_multiple_of(size) && counted / size < whole.max(1) && counted + size <= begin;
    if is_kept { counted } else { 0 }
}

/// The first block of a sequence that may be merged.
///
/// # Safety
/// There is a sequence `i`, and the op's caller keeps the tensors valid.
unsafe fn first_block(r: &Request, i: usize) -> usize {
    // SAFETY: floors has an entry for each sequence.
    let floor = r.floors.map_or(0, |floors| unsafe { floors.get::<i32, 1>([i]) }.max(0) as usize);
    floor.div_ceil(r.block_size).max(1)
}

/// Merges what became whole of KV head `g` of sequence `i`.
///
/// # Safety
/// The tensors are valid, k and v of dtype `T`, and no other task has this row and head.
unsafe fn extend<T: Element + Float>(r: &Request, i: usize, g: usize, memory: &mut [f32]) {
    let Request { kv, remainder, block_size: size, .. } = r;
    let (dim, value_dim, size) = (kv.k.dim(3), kv.value_dim(), *size);
    // SAFETY: says the caller; rows have D and Dv channels.
    unsafe {
        let Some(row) = remainder.row(i) else { return };
        let whole = kv.pages.len(i) / size;
        let before = remainder.tokens.get::<i32, 2>([row, g]);
        let mut counted = kept(r, i, before, whole);
        let (keys, memory) = memory.split_at_mut(size * dim);
        let (values, memory) = memory.split_at_mut(size * value_dim);
        let (sums, memory) = memory.split_at_mut(PARTS * (dim + value_dim));
        let (deltas, memory) = memory.split_at_mut(dim + value_dim);
        let (means, line) = memory.split_at_mut(dim + value_dim);
        if counted > 0 {
            remainder.mean_k.row::<f32, 2>([row, g]).read_into(&mut means[..dim]);
            remainder.mean_v.row::<f32, 2>([row, g]).read_into(&mut means[dim..]);
        }
        let first = (1 + counted / size).max(first_block(r, i));
        if counted > 0 && first < whole {
            // With the blocks that are passed over.
            counted = (first - 1) * size;
        }
        for j in first..whole {
            let place = |t: usize| kv.pages.page(i, t / kv.pages.size).map(|page| [page, t % kv.pages.size, g]);
            if (j * size..(j + 1) * size).any(|t| place(t).is_none()) {
                break;
            }
            let share = size as f32 / (counted + size) as f32;
            // The first block of all is taken twice: less its first token, for means, and less these.
            for pass in 0..1 + (counted == 0) as usize {
                for (n, at) in (j * size..(j + 1) * size).filter_map(place).enumerate() {
                    let (key, value) = (&mut keys[n * dim..][..dim], &mut values[n * value_dim..][..value_dim]);
                    read::<T>(&kv.k, &kv.k_scale, at, key);
                    read::<T>(&kv.v, &kv.v_scale, at, value);
                    if counted == 0 && pass == 0 && n == 0 {
                        means[..dim].copy_from_slice(key);
                        means[dim..].copy_from_slice(value);
                    }
                    key.iter_mut().zip(&means[..dim]).for_each(|(x, mean)| *x -= mean);
                    value.iter_mut().zip(&means[dim..]).for_each(|(x, mean)| *x -= mean);
                }
                let (of_keys, of_values) = sums.split_at_mut(PARTS * dim);
                average(keys, of_keys, &mut deltas[..dim]);
                average(values, of_values, &mut deltas[dim..]);
                means.iter_mut().zip(&*deltas).for_each(|(mean, delta)| *mean = delta.mul_add(share, *mean));
            }
            for c in 0..dim {
                let to = remainder.covariance.row::<f32, 3>([row, g, c]);
                (0..value_dim).for_each(|d| line[d] = if counted > 0 { to.get(d) } else { 0.0 });
                let factor = -(share * share) * deltas[c];
                let delta = &deltas[dim..];
                simd::dispatch(Merge { keys, dim, c, values, share, factor, delta, inverse: 1.0 / size as f32, line });
                line.iter().enumerate().for_each(|(d, &x)| to.set(d, x));
            }
            counted = j * size;
        }
        if counted > 0 {
            let (mean_k, mean_v) = (remainder.mean_k.row::<f32, 2>([row, g]), remainder.mean_v.row::<f32, 2>([row, g]));
            means[..dim].iter().enumerate().for_each(|(c, &x)| mean_k.set(c, x));
            means[dim..].iter().enumerate().for_each(|(c, &x)| mean_v.set(c, x));
        }
        if counted as i32 != before {
            remainder.tokens.set([row, g], counted as i32);
        }
    }
}

/// A row as numbers.
///
/// # Safety
/// The tensors are valid, `t` of dtype `T`, and have such a row, as long as `row`.
unsafe fn read<T: Element + Float>(t: &Tensor, scale: &Option<Scale>, at: [usize; 3], row: &mut [f32]) {
    let from = t.row::<T, 3>(at);
    // SAFETY: says the caller.
    unsafe {
        row.iter_mut().enumerate().for_each(|(c, x)| *x = from.get(c).to_f32());
        if let Some(scale) = scale {
            let scale = scale.of(at);
            row.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// The means of rows of as many channels. Every [`PARTS`]-th row has a sum of its own, in `sums`.
fn average(rows: &[f32], sums: &mut [f32], means: &mut [f32]) {
    let dim = means.len();
    let inverse = 1.0 / (rows.len() / dim) as f32;
    sums.fill(0.0);
    for (n, row) in rows.chunks_exact(dim).enumerate() {
        sums[n % PARTS * dim..][..dim].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    for (c, mean) in means.iter_mut().enumerate() {
        let [a, b, c, d]: [f32; PARTS] = std::array::from_fn(|n| sums[n * dim + c]);
        *mean = ((a + b) + (c + d)) * inverse;
    }
}

/// Merges a block into the covariance of key channel `c` with all channels of values.
struct Merge<'a> {
    /// Keys [S, D] and values [S, Dv] less the means of the blocks before.
    keys: &'a [f32],
    dim: usize,
    c: usize,
    values: &'a [f32],
    share: f32,
    /// −share²·(the mean of the keys' channel)
    factor: f32,
    /// The means of the values.
    delta: &'a [f32],
    /// 1 / S
    inverse: f32,
    /// [Dv]
    line: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Merge { keys, dim, c, values, share, factor, delta, inverse, line } = self;
        let value_dim = line.len();
        for d in (0..value_dim).step_by(LANES) {
            let mut sums = [L::splat(0.0); PARTS];
            // SAFETY: Dv is a multiple of eight.
            let add = |sum: &mut L, key: &[f32], value: &[f32]| unsafe {
                *sum = L::splat(key[c]).fused(L::load(value.as_ptr().add(d)), *sum);
            };
            let (fours, of_fours) = (keys.chunks_exact(PARTS * dim), values.chunks_exact(PARTS * value_dim));
            let (rest, of_rest) = (fours.remainder(), of_fours.remainder());
            for (keys, values) in fours.zip(of_fours) {
                for n in 0..PARTS {
                    add(&mut sums[n], &keys[n * dim..], &values[n * value_dim..]);
                }
            }
            let rest = rest.chunks_exact(dim).zip(of_rest.chunks_exact(value_dim));
            rest.zip(&mut sums).for_each(|((key, value), sum)| add(sum, key, value));
            let sum = sums[0].add(sums[1]).add(sums[2].add(sums[3]));
            // SAFETY: as above.
            unsafe {
                let old = L::load(line.as_ptr().add(d));
                let kept = sum.mul(L::splat(inverse)).sub(old).fused(L::splat(share), old);
                L::load(delta.as_ptr().add(d)).fused(L::splat(factor), kept).store(line.as_mut_ptr().add(d));
            }
        }
    }
}
