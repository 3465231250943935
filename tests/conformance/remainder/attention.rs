//! The term that vwd_attention makes of what a list leaves out.

use super::Rows;
use crate::Case;
use crate::support::paged::{Paged, Shape};
use crate::support::*;
use std::ops::RangeInclusive;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    attention_with_a_remainder_agrees_with_the_formula,
    attention_with_a_remainder_of_128_channels_agrees_with_the_formula,
    attention_with_a_remainder_of_nothing_changes_no_bit,
];

/// A scene's queries over paged keys and values, a list of some blocks, and what rows may hold.
struct Attended<'b> {
    backend: &'b Backend,
    shape: Shape,
    group: usize,
    block: usize,
    scale: f32,
    paged: Paged<'b>,
    q: Tensor<'b>,
    /// [B, Q, Hq, D]
    queries: Array<f64>,
    positions: Option<usize>,
    q_lens: Option<(Array<i64>, Tensor<'b>)>,
    own: bool,
    ids: Array<i64>,
    list: [Tensor<'b>; 2],
    sinks: Option<(Array<f64>, Tensor<'b>)>,
    log_mass: (Array<f64>, Tensor<'b>),
    rows: Rows<'b>,
    /// tokens, mean_v and covariance as numbers.
    tokens: Array<i64>,
    mean_v: Array<f64>,
    covariance: Array<f64>,
    keeps_rows: bool,
}

/// What scenes are about.
#[derive(Clone, PartialEq)]
enum Sizes {
    Any,
    /// Heads of 128 channels in 16 bits, rows on 16 bytes, and so many rows a list and sequences.
    Common {
        dtype: DType,
        rows: RangeInclusive<usize>,
        batch: usize,
    },
}

/// Rows of a list for which there are kernels of their own.
const FEW: RangeInclusive<usize> = 1..=4;
const SEVERAL: RangeInclusive<usize> = 5..=8;
const MANY: RangeInclusive<usize> = 9..=16;

impl<'b> Attended<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, sizes: Sizes, mass: impl Fn(&mut Rng) -> f64) -> Attended<'b> {
        let mut shape = Shape { page: 16, paged: true, max_pages: rng.size(1..=6), ..Shape::random(rng) };
        if rng.one_in(3) {
            shape.dim = 128;
        }
        let (mut group, mut block) = (rng.pick(&[1, 3, 4, 8, 9]), rng.pick(&[4, 16, 32]));
        let mut most = 4;
        if let Sizes::Common { dtype, rows, batch } = &sizes {
            shape = Shape { batch: *batch, dim: 128, dtype: *dtype, ..shape };
            (group, block) = (rng.size(rows.clone()), rng.pick(&[16, 32]));
            most = rows.end() / group;
        }
        let layout = |rng: &mut Rng, rank| match sizes {
            Sizes::Any => Layout::random(rng, rank),
            Sizes::Common { .. } => Layout::random_aligned(rng, rank),
        };
        let mut paged = Paged::random(backend, rng, &shape);
        if sizes != Sizes::Any {
            paged.k = Tensor::floats(backend, shape.dtype, &paged.keys, &layout(rng, 4));
            paged.v = Tensor::floats(backend, shape.dtype, &paged.values, &layout(rng, 4));
        }
        let positions = rng.one_in(2).then(|| rng.size(1..=most));
        let (count, heads) = (positions.unwrap_or(1), shape.kv_heads * group);
        let of_rows = |last: &[usize]| match positions {
            Some(count) => [&[shape.batch, count], last].concat(),
            None => [&[shape.batch], last].concat(),
        };
        let dtype = if rng.one_in(3) { F32 } else { shape.dtype };
        // Kernels on tensor cores round queries to the keys' type.
        let queries = rng.normals(&[shape.batch, count, heads, shape.dim]).map(|&x| shape.dtype.round(x));
        let given = Array::new(&of_rows(&[heads, shape.dim]), queries.data.clone());
        let q_lens = (positions.is_some() && rng.one_in(2)).then(|| {
            let values = Array::from_fn(&[shape.batch], |_| rng.int(0..=count as i64));
            (values.clone(), Tensor::ints(backend, I32, &values, &Layout::random(rng, 1)))
        });
        let own = positions.is_some() && rng.one_in(2);
        let cap = shape.capacity().div_ceil(block);
        let lists = [shape.batch, if own { count } else { 1 }, shape.kv_heads];
        let mut ids = Array::filled(&[lists[0], lists[1], lists[2], cap], -1);
        let mut counts = Array::filled(&lists, 0);
        for at in indices(&lists) {
            let n = paged.len(at[0]).div_ceil(block);
            let most = rng.size(0..=n);
            let chosen = rng.subset(n, most);
            counts[[at[0], at[1], at[2]]] = chosen.len() as i64;
            chosen.iter().enumerate().for_each(|(j, &id)| ids[[at[0], at[1], at[2], j]] = id as i64);
        }
        let of_lists = |shape: &[usize]| if own { shape.to_vec() } else { [&shape[..1], &shape[2..]].concat() };
        let list = [
            Tensor::ints(backend, I32, &Array::new(&of_lists(&ids.shape), ids.data.clone()), &Layout::default()),
            Tensor::ints(backend, I32, &Array::new(&of_lists(&lists), counts.data), &Layout::default()),
        ];
        let sinks = rng.one_in(3).then(|| {
            let values = Array::from_fn(&[heads], |_| F32.round(rng.normal()));
            (values.clone(), Tensor::floats(backend, F32, &values, &Layout::random(rng, 1)))
        });
        let masses = Array::from_fn(&[shape.batch, count, heads], |_| F32.round(mass(rng)));
        let given_masses = Array::new(&of_rows(&[heads]), masses.data.clone());
        let rank = given_masses.shape.len();
        let log_mass = (masses, Tensor::floats(backend, F32, &given_masses, &Layout::random(rng, rank)));
        let mut rows = Rows::new(backend, rng, shape.batch, [shape.kv_heads, shape.dim, shape.dim]);
        let n = rows.count;
        let tokens = Array::from_fn(&[n, shape.kv_heads], |_| rng.pick(&[0, -1, 64, 64, 1 << 20]));
        let numbers = |rng: &mut Rng, shape: &[usize], size: f64| rng.normals(shape).map(|&x| F32.round(size * x));
        let mean_v = numbers(rng, &[n, shape.kv_heads, shape.dim], 1.0);
        let covariance = numbers(rng, &[n, shape.kv_heads, shape.dim, shape.dim], 0.5);
        rows.tokens = Tensor::ints(backend, I32, &tokens, &layout(rng, 2));
        rows.means[1] = Tensor::floats(backend, F32, &mean_v, &layout(rng, 3));
        rows.covariance = Tensor::floats(backend, F32, &covariance, &layout(rng, 4));
        let q = Tensor::floats(backend, dtype, &given, &layout(rng, given.shape.len()));
        let scale = rng.pick(&[0.0, 0.25]);
        let keeps_rows = rng.one_in(3);
        Attended {
            backend,
            shape,
            group,
            block,
            scale,
            paged,
            q,
            queries,
            positions,
            q_lens,
            own,
            ids,
            list,
            sinks,
            log_mass,
            rows,
            tokens,
            mean_v,
            covariance,
            keeps_rows,
        }
    }

    fn outputs(&self, rng: &mut Rng) -> Outputs<'b> {
        let heads = self.queries.shape[2];
        let of_rows = |last: &[usize]| match self.positions {
            Some(count) => [&[self.shape.batch, count], last].concat(),
            None => [&[self.shape.batch], last].concat(),
        };
        let dtype = rng.pick(&[self.q.dtype, F32]);
        let mut make = |dtype, last: &[usize]| {
            let shape = of_rows(last);
            Tensor::poisoned(self.backend, dtype, &shape, &Layout::random(rng, shape.len()))
        };
        let wide = [heads, self.shape.dim];
        Outputs {
            out: make(dtype, &wide),
            lse: make(F32, &[heads]),
            state: [make(F32, &wide), make(F32, &[heads]), make(F32, &[heads])],
        }
    }

    fn attend(&self, to: &Outputs, with_remainder: bool) {
        let args = vwd_attention_args {
            flags: if self.keeps_rows { VWD_ATTENTION_KEEP_ROWS } else { 0 },
            block_size: self.block as u32,
            scale: self.scale,
            kv: kept(self.paged.c()),
            q: self.q.c(),
            q_lens: self.q_lens.as_ref().map_or(absent(), |(_, t)| t.c()),
            list: vwd_block_list { ids: self.list[0].c(), counts: self.list[1].c(), slots: absent() },
            sinks: self.sinks.as_ref().map_or(absent(), |(_, t)| t.c()),
            out: to.out.c(),
            lse: to.lse.c(),
            state: vwd_attention_state { acc: to.state[0].c(), m: to.state[1].c(), l: to.state[2].c() },
            remainder: if with_remainder { kept(self.rows.c()) } else { std::ptr::null() },
            log_mass: if with_remainder { self.log_mass.1.c() } else { absent() },
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        self.backend.finish(unsafe { vwd_attention(self.backend.session(), &args, self.backend.stream()) });
    }

    fn q_len(&self, i: usize) -> usize {
        self.q_lens.as_ref().map_or(self.positions.unwrap_or(1), |(values, _)| values[[i]] as usize)
    }

    fn scale(&self) -> f64 {
        if self.scale == 0.0 { 1.0 / (self.shape.dim as f64).sqrt() } else { self.scale as f64 }
    }

    /// The state of a row over its list.
    fn listed(&self, i: usize, r: usize, h: usize) -> oracle::State {
        let (g, l) = (h / self.group, if self.own { r } else { 0 });
        let seen = oracle::seen(self.paged.len(i), self.q_len(i), r, 0);
        let blocks = self.ids.row([i, l, g]).iter().filter(|&&id| id >= 0).map(|&id| id as usize).collect();
        let tokens = oracle::tokens(&blocks, self.block, seen.end);
        let (keys, values) = (self.paged.keys_of(i, g, &tokens), self.paged.values_of(i, g, &tokens));
        oracle::attention(self.queries.row([i, r, h]), &keys, &values, self.scale())
    }

    /// The state of its term.
    fn term(&self, i: usize, r: usize, h: usize) -> oracle::State {
        let (g, log_mass, dim) = (h / self.group, self.log_mass.0[[i, r, h]], self.shape.dim);
        let row = self.rows.row(i).filter(|&row| self.tokens[[row, g]] > 0 && log_mass.is_finite());
        let Some(row) = row.filter(|_| r < self.q_len(i)) else { return oracle::State::empty(dim) };
        let query = self.queries.row([i, r, h]);
        let value = |d: usize| {
            let along: f64 = (0..dim).map(|c| self.covariance[[row, g, c, d]] * query[c]).sum();
            self.mean_v[[row, g, d]] + 0.5 * self.scale() * along
        };
        oracle::State { acc: (0..dim).map(value).collect(), m: log_mass, l: 1.0 }
    }
}

struct Outputs<'b> {
    out: Tensor<'b>,
    lse: Tensor<'b>,
    state: [Tensor<'b>; 3],
}

impl Outputs<'_> {
    fn bits(&self) -> Vec<Array<Bytes>> {
        [&self.out, &self.lse].into_iter().chain(&self.state).map(Tensor::read_raw).collect()
    }
}

fn agrees_with_the_formula(backend: &Backend, count: u64, sizes: impl Fn(&mut Rng) -> Sizes) {
    rounds(count, |rng| {
        let sizes = sizes(rng);
        let scene = Attended::random(backend, rng, sizes, |rng| match rng.size(0..=7) {
            0 => f64::NEG_INFINITY,
            1 => rng.pick(&[f64::NAN, f64::INFINITY, 3e4, -3e4]),
            _ => 4.0 * rng.normal(),
        });
        let to = scene.outputs(rng);
        scene.attend(&to, true);
        let is_short = backend.is_cuda() && scene.shape.dtype != F32;
        let weights = if is_short { 4.0 * scene.shape.dtype.rounding(1.0) } else { 0.0 };
        let count = scene.positions.unwrap_or(1);
        let read = |t: &Tensor, last: &[usize]| {
            Array::new(&[&[scene.shape.batch, count], last].concat(), t.read_floats().data)
        };
        let (heads, dim) = (scene.queries.shape[2], scene.shape.dim);
        let (out, lse) = (read(&to.out, &[heads, dim]), read(&to.lse, &[heads]));
        let acc = read(&to.state[0], &[heads, dim]);
        let [m, l] = [1, 2].map(|n| read(&to.state[n], &[heads]));
        for at in indices(&[scene.shape.batch, count, heads]) {
            let (i, r, h) = (at[0], at[1], at[2]);
            if scene.keeps_rows && r >= scene.q_len(i) {
                continue;
            }
            let want = oracle::merge(&[scene.listed(i, r, h), scene.term(i, r, h)]);
            let place = format!("{at:?}, log_mass {}", scene.log_mass.0[[i, r, h]]);
            let close = |found: f64, want: f64, tolerance: f64, what: &str| {
                let equal = found == want || (found - want).abs() <= tolerance;
                assert!(equal, "{what} at {place}: {found}, expected {want} ± {tolerance:e}");
            };
            // Scores of some units in float32; what weighs like e^30000 is exact but for its own rounding.
            let size = want.m.abs().max(1.0) * 4e-5;
            close(lse[[i, r, h]], want.lse(), size, "lse");
            close(m[[i, r, h]], want.m, size, "m");
            close(l[[i, r, h]], want.l, 1e-4 * want.l, "l");
            let wanted = match &scene.sinks {
                Some((sinks, _)) => want.out_beside(sinks[[h]]),
                None => want.out(),
            };
            // The term's value is a product of D terms of a unit each.
            let of_acc = 1e-4 + weights + 1e-6 * (dim as f64).sqrt();
            for d in 0..dim {
                let rounding = to.out.dtype.rounding(wanted[d]);
                close(out[[i, r, h, d]], wanted[d], of_acc * wanted[d].abs().max(1.0) + rounding, "out");
                close(acc[[i, r, h, d]], want.acc[d], of_acc * (want.l + want.acc[d].abs()), "acc");
            }
        }
        let kept = |at: &[usize]| {
            let r = if scene.positions.is_some() { at[1] } else { 0 };
            !scene.keeps_rows || scene.q_lens.is_none() || r < scene.q_len(at[0])
        };
        for (t, name) in [(&to.out, "out"), (&to.lse, "lse"), (&to.state[0], "acc"), (&to.state[1], "m")] {
            t.assert_written(name, kept);
        }
        scene.paged.assert_untouched();
    });
}

fn attention_with_a_remainder_agrees_with_the_formula(backend: &Backend) {
    agrees_with_the_formula(backend, 40, |_| Sizes::Any);
}

/// Many sequences leave each list one CTA, and each of its warps many channels of a covariance.
fn attention_with_a_remainder_of_128_channels_agrees_with_the_formula(backend: &Backend) {
    for dtype in [F16, BF16] {
        for rows in [FEW, SEVERAL, MANY] {
            let batch = |rng: &mut Rng| rng.pick(&[1, 1, 2, 5, 12, 24]);
            agrees_with_the_formula(backend, 5, |rng| Sizes::Common { dtype, rows: rows.clone(), batch: batch(rng) });
        }
    }
}

fn attention_with_a_remainder_of_nothing_changes_no_bit(backend: &Backend) {
    rounds(10, |rng| {
        let common = |dtype, batch| Sizes::Common { dtype, rows: 1..=8, batch };
        let sizes = rng.pick(&[Sizes::Any, common(F16, 1), common(BF16, 3)]);
        let scene = Attended::random(backend, rng, sizes, |_| f64::NEG_INFINITY);
        let dtype_rng = &mut Rng::new(rng.int(0..=i64::MAX) as u64);
        let with = scene.outputs(dtype_rng);
        let without = scene.outputs(dtype_rng);
        let without =
            Outputs { out: Tensor::poisoned(backend, with.out.dtype, &with.out.shape, &Layout::default()), ..without };
        scene.attend(&with, true);
        scene.attend(&without, false);
        assert_eq!(with.bits(), without.bits());
    });
}
