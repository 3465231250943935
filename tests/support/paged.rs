//! Paged keys and values of random sequences: shuffled page tables with garbage past the end, partial last pages, lengths
//! that have to be clamped, every layout.

use super::args;
use super::array::Array;
use super::backend::Backend;
use super::oracle::Pages;
use super::rng::Rng;
use super::tensor::{BF16, DType, F16, F32, I32, Layout, Tensor, absent};
use vanward::abi::*;
use vanward::capi::*;

pub struct Shape {
    pub batch: usize,
    pub kv_heads: usize,
    pub dim: usize,
    /// Tokens of a page, and pages of a sequence.
    pub page: usize,
    pub max_pages: usize,
    pub dtype: DType,
    pub paged: bool,
}

impl Shape {
    pub fn random(rng: &mut Rng) -> Shape {
        let paged = !rng.one_in(4);
        Shape {
            batch: rng.size(1..=4),
            kv_heads: rng.size(1..=3),
            dim: rng.pick(&[16, 24, 40, 64, 72, 128, 256, 576]),
            page: if paged { rng.pick(&[4, 8, 16, 32]) } else { rng.size(1..=150) },
            max_pages: if paged { rng.size(1..=8) } else { 1 },
            dtype: rng.pick(&[F32, F16, BF16]),
            paged,
        }
    }

    pub fn capacity(&self) -> usize {
        self.page * self.max_pages
    }
}

pub struct Paged<'b> {
    pub k: Tensor<'b>,
    pub v: Tensor<'b>,
    pub table: Option<Tensor<'b>>,
    pub lens: Tensor<'b>,
    /// [pages, P, Hk, D], as the tensors hold them.
    pub keys: Array<f64>,
    pub values: Array<f64>,
    pub table_values: Option<Array<i64>>,
    pub len_values: Array<i64>,
}

impl<'b> Paged<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng, shape: &Shape) -> Paged<'b> {
        let keys = |rng: &mut Rng, shape: &[usize]| rng.normals(shape);
        Paged::with_keys(backend, rng, shape, keys)
    }

    /// Keys from this function of the shape; values are normal.
    pub fn with_keys(
        backend: &'b Backend,
        rng: &mut Rng,
        shape: &Shape,
        keys: impl Fn(&mut Rng, &[usize]) -> Array<f64>,
    ) -> Paged<'b> {
        let table_values = shape.paged.then(|| random_table(rng, shape.batch, shape.max_pages));
        let pages = match &table_values {
            Some(table) => table.data.iter().max().map_or(0, |&most| most as usize + 1),
            None => shape.batch + rng.size(0..=1),
        };
        let extents = [pages, shape.page, shape.kv_heads, shape.dim];
        let dtype = shape.dtype;
        let (keys, values) = (keys(rng, &extents), rng.normals(&extents));
        let (keys, values) = (keys.map(|&x| dtype.round(x)), values.map(|&x| dtype.round(x)));
        let len_values = random_lens(rng, shape.batch, shape.capacity());
        // Entries past a sequence's last page are never read: garbage.
        let mut given = table_values.clone();
        if let Some(given) = &mut given {
            for i in 0..shape.batch {
                let used = len_values[[i]].clamp(0, shape.capacity() as i64) as usize;
                for p in used.div_ceil(shape.page)..shape.max_pages {
                    given[[i, p]] = rng.pick(&[-1, i32::MAX as i64, i32::MIN as i64, 0]);
                }
            }
        }
        let layout = |rng: &mut Rng| match rng.size(0..=3) {
            0 => Layout::default(),
            1 => Layout::ordered(&[0, 2, 1, 3]), // HND
            _ => Layout::random(rng, 4),
        };
        Paged {
            k: Tensor::floats(backend, dtype, &keys, &layout(rng)),
            v: Tensor::floats(backend, dtype, &values, &layout(rng)),
            table: given.as_ref().map(|given| Tensor::ints(backend, I32, given, &Layout::random(rng, 2))),
            lens: Tensor::ints(backend, I32, &len_values, &Layout::random(rng, 1)),
            keys,
            values,
            table_values: given,
            len_values,
        }
    }

    pub fn pages(&self) -> Pages<'_> {
        Pages { table: self.table_values.as_ref(), pages: self.keys.shape[0], size: self.keys.shape[1] }
    }

    pub fn len(&self, i: usize) -> usize {
        self.pages().clamp_len(self.len_values[[i]])
    }

    /// Keys of these tokens of sequence `i` and KV head `g`; a token that no page holds has none.
    pub fn keys_of(&self, i: usize, g: usize, tokens: &[usize]) -> Vec<&[f64]> {
        self.rows(&self.keys, i, g, tokens)
    }

    pub fn values_of(&self, i: usize, g: usize, tokens: &[usize]) -> Vec<&[f64]> {
        self.rows(&self.values, i, g, tokens)
    }

    fn rows<'a>(&'a self, of: &'a Array<f64>, i: usize, g: usize, tokens: &[usize]) -> Vec<&'a [f64]> {
        tokens.iter().filter_map(|&t| self.pages().find(i, t)).map(|(page, slot)| of.row([page, slot, g])).collect()
    }

    pub fn table_c(&self) -> vwd_tensor {
        self.table.as_ref().map_or(absent(), Tensor::c)
    }

    pub fn c(&self) -> vwd_paged_kv {
        vwd_paged_kv { k: self.k.c(), v: self.v.c(), page_table: self.table_c(), seq_lens: self.lens.c(), ..args() }
    }

    pub fn assert_untouched(&self) {
        self.k.assert_untouched("k");
        self.v.assert_untouched("v");
        self.lens.assert_untouched("seq_lens");
        if let Some(table) = &self.table {
            table.assert_untouched("page_table");
        }
    }
}

/// Distinct pages in random order, some of the pool unused.
pub fn random_table(rng: &mut Rng, batch: usize, max_pages: usize) -> Array<i64> {
    let mut pool: Vec<i64> = (0..(batch * max_pages + rng.size(0..=3)) as i64).collect();
    rng.shuffle(&mut pool);
    pool.truncate(batch * max_pages);
    Array::new(&[batch, max_pages], pool)
}

/// Lengths from empty to full, and some that have to be clamped.
pub fn random_lens(rng: &mut Rng, batch: usize, capacity: usize) -> Array<i64> {
    let capacity = capacity as i64;
    Array::from_fn(&[batch], |_| match rng.size(0..=9) {
        0 => 0,
        1 => capacity,
        2 => capacity + rng.int(1..=1000),
        3 => -rng.int(1..=5),
        _ => rng.int(0..=capacity),
    })
}
