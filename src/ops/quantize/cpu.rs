//! Coding on the CPU: a task codes the blocks of one sequence's KV head, one after the other.

use super::block::{self, Shape};
use super::{Layer, Request, WeightsRequest};
use crate::core::dtype::{Element, Float};
use crate::core::float8::F8E4M3;
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::int4::{Int4Kv, encode};
use crate::ops::views::{MAX_DIM, Pages};
use crate::runtime::cpu::Cpu;
use crate::with_float;

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    let (batch, heads) = (r.first.kv.pages.batch(), r.first.kv.k.dim(2));
    let bytes = r.first.int4.block_size * r.first.kv.k.dim(3) * r.first.kv.k.dtype.bytes();
    // Tensors without an element may have any number of heads.
    let has_tokens = !r.first.kv.k.is_empty() && !r.first.int4.k.is_empty();
    for n in 0..if has_tokens { r.layers() } else { 0 } {
        // SAFETY: the caller of the op keeps structs and tensors valid.
        unsafe {
            r.with_layer(n, |layer| {
                cpu.parallel(batch * heads, bytes, |task| code_head(r, layer, task / heads, task % heads));
            })?;
        }
    }
    let Int4Kv { pages, block_size, .. } = &r.first.int4;
    for i in 0..batch {
        // SAFETY: as above; coded_lens has an entry for each sequence.
        unsafe {
            let tokens = r.first.tokens(i);
            pages.seq_lens.set([i], (tokens - tokens % block_size) as i32);
        }
    }
    Ok(())
}

/// Codes what there is to code of KV head `g` of sequence `i`.
fn code_head(r: &Request, layer: &Layer, i: usize, g: usize) {
    let size = layer.int4.block_size;
    // SAFETY: the caller of the op keeps the tensors valid; there is such a sequence.
    unsafe {
        for j in r.first_block(i)..layer.tokens(i) / size {
            if (j * size..(j + 1) * size).all(|t| layer.places(i, t).is_some()) {
                with_float!(layer.kv.k.dtype, T => layer.code_block::<T>(i, g, j));
            }
        }
    }
}

impl Layer<'_> {
    /// Page and row of token `t` of sequence `i`, exact and coded, if it has both.
    ///
    /// # Safety
    /// The op's caller keeps the tensors valid, and there is such a sequence.
    unsafe fn places(&self, i: usize, t: usize) -> Option<[[usize; 2]; 2]> {
        let place = |pages: &Pages| {
            // SAFETY: says the caller.
            unsafe { pages.page(i, t / pages.size) }.map(|page| [page, t % pages.size])
        };
        Some([place(&self.kv.pages)?, place(&self.int4.pages)?])
    }

    /// # Safety
    /// As for [`Layer::places`]; each token of block `j` has a place, `g` is a head, and `T` the dtype of k.
    unsafe fn code_block<T: Element + Float>(&self, i: usize, g: usize, j: usize) {
        let Int4Kv { block_size, k, v, k_scale, v_scale, .. } = &self.int4;
        // SAFETY: says the caller.
        let weights = unsafe { self.int4.weights_of(g) };
        let shape = Shape { tokens: *block_size, dims: [self.kv.k.dim(3), self.kv.v.dim(3)], weights: &weights };
        // SAFETY: says the caller.
        let places = |t: usize| unsafe { self.places(i, j * block_size + t) }.expect("a place of each token");
        block::code(
            &shape,
            |t, part, row| {
                let [[page, at], _] = places(t);
                // SAFETY: says the caller; the row has as many channels as the tensor.
                unsafe { read::<T>([&self.kv.k, &self.kv.v][part], [page, at, g], row) }
            },
            // SAFETY: says the caller.
            |sums| unsafe { self.store_mean(i, g, j, sums) },
            |t, part, y| {
                let [_, [page, at]] = places(t);
                // SAFETY: says the caller.
                unsafe { store(y, [k, v][part], [k_scale, v_scale][part], [page, at, g]) }
            },
        );
    }

    /// Turns sums into means as they are stored, and stores them; zeros where there is no row.
    ///
    /// # Safety
    /// As for [`Layer::code_block`].
    unsafe fn store_mean(&self, i: usize, g: usize, j: usize, sums: &mut [f32]) {
        let means = &self.int4.means;
        // SAFETY: says the caller; the place is inside the means.
        unsafe {
            let Some([page, at]) = self.int4.mean_place(i, j) else { return sums.fill(0.0) };
            with_float!(means.dtype, T => {
                let row = means.row::<T, 3>([page, at, g]);
                for (d, x) in sums.iter_mut().enumerate() {
                    let mean: T = block::mean_of(*x, self.int4.block_size);
                    row.set(d, mean);
                    *x = mean.to_f32();
                }
            })
        }
    }
}

/// # Safety
/// The tensor is valid, of dtype `T`, and has such a row, as long as `row`.
unsafe fn read<T: Element + Float>(t: &Tensor, place: [usize; 3], row: &mut [f32]) {
    let from = t.row::<T, 3>(place);
    // SAFETY: says the caller.
    row.iter_mut().enumerate().for_each(|(d, x)| *x = unsafe { from.get(d) }.to_f32());
}

/// Stores the codes and the scale of a row that is rotated.
///
/// # Safety
/// The tensors are valid and have such a row, and no other task writes it.
unsafe fn store(y: &[f32], codes: &Tensor, scales: &Tensor, place: [usize; 3]) {
    let row = codes.row::<u8, 3>(place);
    // SAFETY: says the caller; the row has a byte for two channels.
    unsafe {
        let scale = encode(y, |n, byte| row.set(n, byte));
        scales.set::<F8E4M3, 3>(place, scale);
    }
}

pub fn weights(cpu: &Cpu, r: &WeightsRequest) {
    let tokens = r.heads.group().saturating_mul(r.q.dim(0)).saturating_add(r.k.dim(0));
    let bytes = tokens.saturating_mul(r.heads.dim * r.q.dtype.bytes());
    cpu.parallel(r.heads.kv, bytes, |g| {
        // SAFETY: the caller of the op keeps the tensors valid; the weights of a head are one task's.
        with_float!(r.q.dtype, T => unsafe { weigh::<T>(r, g) });
    });
}

/// Writes the weights of KV head `g`.
///
/// # Safety
/// The tensors are valid, there is such a head, and no other task writes its weights.
unsafe fn weigh<T: Element + Float>(r: &WeightsRequest, g: usize) {
    let (dim, group, size) = (r.heads.dim, r.heads.group(), r.block_size);
    let (mut row, mut queries, mut spread) = ([0.0; MAX_DIM], [0.0; MAX_DIM], [0.0; MAX_DIM]);
    // SAFETY: says the caller; rows have `dim` channels.
    unsafe {
        let mut read = |t: &Tensor, at: [usize; 2], then: &mut dyn FnMut(usize, f32)| {
            let from = t.row::<T, 2>(at);
            for (d, x) in row[..dim].iter_mut().enumerate() {
                *x = from.get(d).to_f32();
                then(d, *x);
            }
        };
        // Without queries there may be any number of heads.
        let heads = if r.q.dim(0) == 0 { 0..0 } else { g * group..(g + 1) * group };
        for h in heads {
            for t in 0..r.q.dim(0) {
                read(&r.q, [t, h], &mut |d, x| queries[d] += x.abs());
            }
        }
        let tokens = r.k.dim(0);
        for first in (0..tokens).step_by(size) {
            let (block, mut mean) = (first..tokens.min(first.saturating_add(size)), [0.0; MAX_DIM]);
            for t in block.clone() {
                read(&r.k, [t, g], &mut |d, x| mean[d] += x);
            }
            mean.iter_mut().for_each(|sum| *sum /= block.len() as f32);
            for t in block {
                read(&r.k, [t, g], &mut |d, x| spread[d] += (x - mean[d]) * (x - mean[d]));
            }
        }
        let asked = (r.q.dim(0) * group) as f32;
        let (mut sum, mut defined) = (0.0f32, 0);
        for (spread, query) in spread[..dim].iter_mut().zip(&queries) {
            *spread = ((*spread / tokens as f32).sqrt() / (query / asked)).sqrt();
            if is_defined(*spread) {
                sum += *spread;
                defined += 1;
            }
        }
        let mean = sum / defined as f32;
        for (d, &weight) in spread[..dim].iter().enumerate() {
            r.weights.set([g, d], if is_defined(weight) { weight / mean } else { 1.0f32 });
        }
    }
}

fn is_defined(weight: f32) -> bool {
    weight > 0.0 && weight.is_finite()
}
