//! Keys and values in INT4: random ones, what they stand for in double precision, and their tensors.

use super::array::Array;
use super::backend::Backend;
use super::rng::Rng;
use super::tensor::{BF16, DType, F8E4M3, F16, F32, I32, Layout, Tensor, U8, absent};
use super::{args, kept};
use std::ops::Range;
use vanward::abi::*;

/// Element [c, d] of the Hadamard matrix of `dim` channels: blocks of the largest power of two that divides it.
pub fn hadamard(dim: usize, c: usize, d: usize) -> f64 {
    let n = 1usize << dim.trailing_zeros();
    if c / n != d / n {
        return 0.0;
    }
    let sign = if ((c % n) & (d % n)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    sign / (n as f64).sqrt()
}

/// y·H
pub fn rotated(y: &[f64]) -> Vec<f64> {
    let dim = y.len();
    (0..dim).map(|d| (0..dim).map(|c| y[c] * hadamard(dim, c, d)).sum()).collect()
}

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub kv_heads: usize,
    /// D and Dv.
    pub dims: [usize; 2],
    /// S
    pub block: usize,
    /// Most tokens of a sequence.
    pub most: usize,
    /// Means are of this type, and pages whole tiles of 16 tokens.
    pub in_tiles: Option<DType>,
    /// Slots name the pages, each of one block and KV head with its mean.
    pub in_slots: bool,
}

/// A layer's coded tokens, as the tensors hold them.
#[derive(Clone)]
pub struct Int4 {
    pub block: usize,
    pub exact: usize,
    /// Codes of keys and of values, 0 … 15: [pages, P, Hk, D] and [.., Dv].
    pub codes: [Array<i64>; 2],
    /// [pages, P, Hk] each, rounded to e4m3.
    pub scales: [Array<f64>; 2],
    /// What the codes, less 7.5, are rotated.
    rotated: [Array<f64>; 2],
    /// [B, max_pages]
    pub table: Option<Array<i64>>,
    pub lens: Vec<i64>,
    /// [pages, rows, Hk, D]
    pub means: Array<f64>,
    pub mean_type: DType,
    pub mean_table: Option<Array<i64>>,
    /// [Hk, D]
    pub weights: Option<Array<f64>>,
    pub in_slots: bool,
}

impl Int4 {
    pub fn random(rng: &mut Rng, sizes: Sizes) -> Int4 {
        if sizes.in_slots {
            return Int4::pool(rng, sizes);
        }
        let Sizes { batch, kv_heads, dims, block, most, in_tiles, .. } = sizes;
        let has_table = !rng.one_in(4);
        let page = match has_table {
            true => rng.pick(&[block, 2 * block, 4 * block, block / 2, block / 4, 16]),
            false => most.next_multiple_of(block) - rng.pick(&[0, 0, 3]),
        };
        let is_odd = block % page != 0 && page % block != 0 || in_tiles.is_some() && page % 16 != 0;
        let page = if has_table && is_odd { block } else { page };
        let max_pages = most.div_ceil(page);
        let (pages, table) = paged(rng, has_table, batch, max_pages);
        let tokens = [pages, page, kv_heads];
        let codes = dims.map(|dim| Array::from_fn(&[pages, page, kv_heads, dim], |_| rng.int(0..=15)));
        let scales = [(); 2].map(|()| Array::from_fn(&tokens, |_| F8E4M3.round(0.05 + 0.3 * rng.unit())));
        let rotated = codes.each_ref().map(rotated_codes);
        let lens = (0..batch).map(|_| match rng.size(0..=7) {
            0 => 0,
            1 => -3,
            2 => most as i64 + 500,
            _ => rng.int(0..=most as i64),
        });
        let lens = lens.collect();
        let has_mean_table = !rng.one_in(3);
        let blocks = most.div_ceil(block);
        let rows = if has_mean_table { rng.pick(&[1, 2, 3, 8]) } else { blocks };
        let (mean_pages, mean_table) = paged(rng, has_mean_table, batch, blocks.div_ceil(rows));
        let mean_type = in_tiles.unwrap_or_else(|| rng.pick(&[F32, F16, BF16]));
        let weights = rng.one_in(2).then(|| weights(rng, kv_heads, dims[0]));
        Int4 {
            block,
            exact: block * rng.pick(&[0, 1, 1, 2]),
            codes,
            scales,
            rotated,
            table,
            lens,
            means: rng.normals(&[mean_pages, rows, kv_heads, dims[0]]).map(|&x| mean_type.round(x)),
            mean_type,
            mean_table,
            weights,
            in_slots: false,
        }
    }

    /// A page for each block and KV head, and some that are of no block.
    fn pool(rng: &mut Rng, sizes: Sizes) -> Int4 {
        let Sizes { batch, kv_heads, dims, block, most, in_tiles, .. } = sizes;
        let pages = batch * kv_heads * most.div_ceil(block) + rng.size(1..=3);
        let codes = dims.map(|dim| Array::from_fn(&[pages, block, 1, dim], |_| rng.int(0..=15)));
        let scales = [(); 2].map(|()| Array::from_fn(&[pages, block, 1], |_| F8E4M3.round(0.05 + 0.3 * rng.unit())));
        let mean_type = in_tiles.unwrap_or_else(|| rng.pick(&[F32, F16, BF16]));
        Int4 {
            block,
            exact: 0,
            rotated: codes.each_ref().map(rotated_codes),
            codes,
            scales,
            table: None,
            lens: vec![],
            means: rng.normals(&[pages, 1, 1, dims[0]]).map(|&x| mean_type.round(x)),
            mean_type,
            mean_table: None,
            weights: rng.one_in(2).then(|| weights(rng, kv_heads, dims[0])),
            in_slots: true,
        }
    }

    /// The tokens of sequence `i`, which has `len`, that are coded.
    pub fn coded(&self, i: usize, len: usize) -> Range<usize> {
        let (page, pages) = (self.codes[0].shape[1], self.table.as_ref().map_or(1, |table| table.shape[1]));
        let end = self.lens[i].clamp(0, len.min(page * pages) as i64) as usize;
        self.exact..end / self.block * self.block
    }

    /// (page, row, head) of a coded token.
    pub fn place(&self, i: usize, g: usize, t: usize) -> Option<[usize; 3]> {
        let [page, row] = find(self.table.as_ref(), &self.codes[0].shape, i, t)?;
        Some([page, row, g])
    }

    /// The mean of the block of token `t`.
    fn mean(&self, i: usize, g: usize, t: usize, d: usize) -> f64 {
        let place = find(self.mean_table.as_ref(), &self.means.shape, i, t / self.block);
        place.map_or(0.0, |[page, row]| self.means[[page, row, g, d]])
    }

    pub fn weight(&self, g: usize, d: usize) -> f64 {
        let weight = self.weights.as_ref().map_or(1.0, |weights| weights[[g, d]]);
        if weight > 0.0 && weight.is_finite() { weight } else { 1.0 }
    }

    /// Key and value of coded token `t`: none where no page holds it.
    pub fn token(&self, i: usize, g: usize, t: usize) -> Option<[Vec<f64>; 2]> {
        Some(self.token_at(self.place(i, g, t)?, g, |d| self.mean(i, g, t, d)))
    }

    /// Those of a row of a slot's page.
    pub fn token_in_slot(&self, [page, row]: [usize; 2], g: usize) -> [Vec<f64>; 2] {
        self.token_at([page, row, 0], g, |d| self.means[[page, 0, 0, d]])
    }

    fn token_at(&self, at: [usize; 3], g: usize, mean: impl Fn(usize) -> f64) -> [Vec<f64>; 2] {
        let [keys, values] = [0, 1].map(|n| self.rotated[n].row(at).iter().map(move |y| y * self.scales[n][at]));
        let key = keys.enumerate().map(|(d, y)| mean(d) + self.weight(g, d) * y);
        [key.collect(), values.collect()]
    }

    /// Makes NaN the scales of tokens that are not used, [pages, P, Hk].
    pub fn poison(&mut self, used: &Array<bool>) {
        for (n, _) in used.data.iter().enumerate().filter(|(_, used)| !**used) {
            self.scales.iter_mut().for_each(|scales| scales.data[n] = f64::NAN);
        }
    }
}

/// Pages of a tensor, in order or through a table of which some entries name no page.
fn paged(rng: &mut Rng, has_table: bool, batch: usize, max_pages: usize) -> (usize, Option<Array<i64>>) {
    if !has_table {
        return (batch + rng.size(0..=1), None);
    }
    let pages = batch * max_pages + 2;
    let mut order: Vec<i64> = (0..pages as i64).collect();
    rng.shuffle(&mut order);
    let table = Array::from_fn(&[batch, max_pages], |at| match rng.one_in(12) {
        true => rng.pick(&[-1, i32::MIN as i64, i32::MAX as i64, pages as i64]),
        false => order[at[0] * max_pages + at[1]],
    });
    (pages, Some(table))
}

/// Page and row of thing `n` of sequence `i`, in a tensor of this shape [pages, rows, ..].
fn find(table: Option<&Array<i64>>, shape: &[usize], i: usize, n: usize) -> Option<[usize; 2]> {
    let (p, row) = (n / shape[1], n % shape[1]);
    let page = match table {
        None => Some(i as i64).filter(|_| p == 0),
        Some(table) => table.row([i]).get(p).copied(),
    };
    page.filter(|page| (0..shape[0] as i64).contains(page)).map(|page| [page as usize, row])
}

/// (code − 7.5)·H of every row, by the fast transform; of the first row as `rotated` has it, too.
fn rotated_codes(codes: &Array<i64>) -> Array<f64> {
    let mut all = codes.map(|&code| code as f64 - 7.5);
    let dim = codes.shape[3];
    let n = 1usize << dim.trailing_zeros();
    let first = rotated(&all.data[..dim]);
    for part in all.data.chunks_mut(n) {
        let mut half = 1;
        while half < n {
            for pair in part.chunks_mut(2 * half) {
                let (left, right) = pair.split_at_mut(half);
                for k in 0..half {
                    (left[k], right[k]) = (left[k] + right[k], left[k] - right[k]);
                }
            }
            half *= 2;
        }
        let length = (n as f64).sqrt();
        part.iter_mut().for_each(|x| *x /= length);
    }
    assert!(first.iter().zip(&all.data).all(|(x, y)| (x - y).abs() < 1e-9), "the fast transform is wrong");
    all
}

/// Some of them count as 1.
fn weights(rng: &mut Rng, heads: usize, dim: usize) -> Array<f64> {
    Array::from_fn(&[heads, dim], |_| match rng.one_in(20) {
        true => rng.pick(&[0.0, -1.0, f64::NAN, f64::INFINITY]),
        false => F32.round(0.4 + rng.unit()),
    })
}

/// Codes of a tensor, two in a byte.
fn packed(codes: &Array<i64>) -> Array<i64> {
    let mut shape = codes.shape.clone();
    shape[3] /= 2;
    Array::new(&shape, codes.data.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect())
}

/// The tensors of [`Int4`].
pub struct PlacedInt4<'b> {
    block: usize,
    exact: usize,
    pub codes: [Tensor<'b>; 2],
    pub scales: [Tensor<'b>; 2],
    table: Option<Tensor<'b>>,
    pub lens: Tensor<'b>,
    pub means: Tensor<'b>,
    mean_table: Option<Tensor<'b>>,
    weights: Option<Tensor<'b>>,
    in_slots: bool,
}

impl<'b> PlacedInt4<'b> {
    /// `aligned`: rows of codes are whole and begin on 16 bytes.
    pub fn new(backend: &'b Backend, rng: &mut Rng, model: &Int4, aligned: bool) -> PlacedInt4<'b> {
        let layout = |rng: &mut Rng, rank| match aligned {
            true => Layout::random_aligned(rng, rank),
            false if rng.one_in(4) => Layout::random(rng, rank),
            false => Layout::random_rows(rng, rank),
        };
        let codes = model.codes.each_ref().map(|codes| Tensor::ints(backend, U8, &packed(codes), &layout(rng, 4)));
        let any = |rng: &mut Rng, rank| if aligned { Layout::default() } else { Layout::random(rng, rank) };
        let scales = model.scales.each_ref().map(|scales| Tensor::floats(backend, F8E4M3, scales, &any(rng, 3)));
        let lens = Array::new(&[model.lens.len()], model.lens.clone());
        let table = |rng: &mut Rng, table: &Option<Array<i64>>| {
            table.as_ref().map(|table| Tensor::ints(backend, I32, table, &any(rng, 2)))
        };
        PlacedInt4 {
            block: model.block,
            exact: model.exact,
            codes,
            scales,
            table: table(rng, &model.table),
            lens: Tensor::ints(backend, I32, &lens, &any(rng, 1)),
            means: Tensor::floats(backend, model.mean_type, &model.means, &layout(rng, 4)),
            mean_table: table(rng, &model.mean_table),
            weights: model.weights.as_ref().map(|weights| Tensor::floats(backend, F32, weights, &any(rng, 2))),
            in_slots: model.in_slots,
        }
    }

    pub fn c(&self) -> vwd_int4_kv {
        let c = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        vwd_int4_kv {
            block_size: self.block as u32,
            exact_tokens: self.exact as u32,
            k: self.codes[0].c(),
            v: self.codes[1].c(),
            k_scale: self.scales[0].c(),
            v_scale: self.scales[1].c(),
            page_table: c(&self.table),
            coded_lens: if self.in_slots { absent() } else { self.lens.c() },
            means: self.means.c(),
            mean_table: c(&self.mean_table),
            weights: c(&self.weights),
            ..args()
        }
    }

    /// Kept for good.
    pub fn pointer(&self) -> *const vwd_int4_kv {
        kept(self.c())
    }
}

/// Which tokens are at these places, [pages, P, Hk].
pub fn used(int4: &Int4, places: impl Iterator<Item = [usize; 3]>) -> Array<bool> {
    let mut used = Array::filled(&int4.scales[0].shape, false);
    places.for_each(|at| used[at] = true);
    used
}
