//! Means and covariance on the CPU: a task merges the new blocks of one sequence's KV head, one after the other.

use super::Request;
use crate::core::dtype::{Element, Float};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::simd::{self, Kernel, LANES, Lanes};
use crate::ops::views::Scale;
use crate::runtime::cpu::Cpu;
use crate::with_float;

pub fn update(cpu: &Cpu, r: &Request) -> Result<()> {
    let kv = &r.kv;
    let (batch, heads, size) = (kv.pages.batch(), kv.k.dim(2), r.block_size);
    let (dim, value_dim) = (kv.k.dim(3), kv.value_dim());
    // There is no whole block, and tensors without an element may have any number of heads.
    if kv.pages.capacity() < size || kv.k.is_empty() {
        (0..batch * if kv.k.is_empty() { 0 } else { heads }).for_each(|n| forget(r, n / heads, n % heads));
        return Ok(());
    }
    // A block's keys and values, its means, and those of the blocks before.
    let floats = (size + 2) * (dim + value_dim) + value_dim;
    let bytes = size * (dim + value_dim) * kv.k.dtype.bytes();
    let scratch = cpu.scratch();
    cpu.in_shares(&scratch, batch * heads, floats, bytes, |task, memory| {
        // SAFETY: the op's caller keeps the tensors valid; no other task has this row and head.
        with_float!(kv.k.dtype, T => unsafe { extend::<T>(r, task / heads, task % heads, memory) });
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
        let (key_mean, memory) = memory.split_at_mut(dim);
        let (value_mean, memory) = memory.split_at_mut(value_dim);
        let (key_before, memory) = memory.split_at_mut(dim);
        let (value_before, line) = memory.split_at_mut(value_dim);
        for j in 1 + counted / size..whole {
            let place = |t: usize| kv.pages.page(i, t / kv.pages.size).map(|page| [page, t % kv.pages.size, g]);
            if (j * size..(j + 1) * size).any(|t| place(t).is_none()) {
                break;
            }
            for (n, at) in (j * size..(j + 1) * size).filter_map(place).enumerate() {
                read::<T>(&kv.k, &kv.k_scale, at, &mut keys[n * dim..][..dim]);
                read::<T>(&kv.v, &kv.v_scale, at, &mut values[n * value_dim..][..value_dim]);
            }
            centre(keys, key_mean);
            centre(values, value_mean);
            let share = size as f32 / (counted + size) as f32;
            for (mean, (of_block, before)) in
                [(&remainder.mean_k, (&*key_mean, &mut *key_before)), (&remainder.mean_v, (value_mean, value_before))]
            {
                let to = mean.row::<f32, 2>([row, g]);
                for (c, (&x, before)) in of_block.iter().zip(&mut *before).enumerate() {
                    *before = if counted > 0 { to.get(c) } else { x };
                    to.set(c, (x - *before).mul_add(share, *before));
                }
            }
            let between = share * (1.0 - share);
            for c in 0..dim {
                let to = remainder.covariance.row::<f32, 3>([row, g, c]);
                (0..value_dim).for_each(|d| line[d] = if counted > 0 { to.get(d) } else { 0.0 });
                let factor = between * (key_mean[c] - key_before[c]);
                let means = [&*value_mean, &*value_before];
                simd::dispatch(Merge { keys, dim, c, values, share, factor, means, inverse: 1.0 / size as f32, line });
                line.iter().enumerate().for_each(|(d, &x)| to.set(d, x));
            }
            counted += size;
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

/// Takes the mean from rows of as many channels, whose sums are in their order.
fn centre(rows: &mut [f32], mean: &mut [f32]) {
    let share = 1.0 / (rows.len() / mean.len()) as f32;
    mean.fill(0.0);
    for row in rows.chunks_exact(mean.len()) {
        mean.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    mean.iter_mut().for_each(|sum| *sum *= share);
    for row in rows.chunks_exact_mut(mean.len()) {
        row.iter_mut().zip(&*mean).for_each(|(x, mean)| *x -= mean);
    }
}

/// Merges a block into the covariance of key channel `c` with all channels of values.
struct Merge<'a> {
    /// Keys [S, D] and values [S, Dv] without their means.
    keys: &'a [f32],
    dim: usize,
    c: usize,
    values: &'a [f32],
    share: f32,
    /// share·(1 − share)·(the mean key of the block less that of the blocks before).
    factor: f32,
    /// The mean values of the block, and of the blocks before.
    means: [&'a [f32]; 2],
    /// 1 / S
    inverse: f32,
    /// [Dv]
    line: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Merge { keys, dim, c, values, share, factor, means: [mean, before], inverse, line } = self;
        let value_dim = line.len();
        for d in (0..value_dim).step_by(LANES) {
            let mut sum = L::splat(0.0);
            for (key, value) in keys.chunks_exact(dim).zip(values.chunks_exact(value_dim)) {
                // SAFETY: Dv is a multiple of eight.
                sum = L::splat(key[c]).fused(unsafe { L::load(value.as_ptr().add(d)) }, sum);
            }
            // SAFETY: as above.
            unsafe {
                let old = L::load(line.as_ptr().add(d));
                let step = L::load(mean.as_ptr().add(d)).sub(L::load(before.as_ptr().add(d)));
                let kept = sum.mul(L::splat(inverse)).sub(old).fused(L::splat(share), old);
                step.fused(L::splat(factor), kept).store(line.as_mut_ptr().add(d));
            }
        }
    }
}
