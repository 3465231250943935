//! AXIS: the summaries that vwd_index_update makes, what vwd_channel_importance finds for them, and the blocks that
//! vwd_select_blocks selects by them.

use crate::Case;
use crate::index::Place;
use crate::index_bits::{assert_same, check_rollback, label};
use crate::keys_to_blocks::{Sequences, Summaries};
use crate::select::{Choice, Scene, Scored, check_blocks};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    axis_agrees_with_the_gram_matrix,
    axis_has_the_bits_of_its_contract,
    axis_of_float8_keys_is_that_of_their_scaled_values,
    axis_of_equal_keys_is_zero,
    axis_extended_after_rollback_has_the_bits_of_one_built_at_once,
    channel_weights_and_centre_are_means,
    select_axis_agrees_with_the_formula,
    select_axis_takes_many_blocks,
    select_axis_takes_int4_in_rows_of_whole_units,
    select_axis_takes_int4_of_long_lists,
    select_axis_ranks_what_is_not_finite_last,
];

// --- index -----------------------------------------------------------------------------------------------------------

const GROUP: usize = 32;

/// Each stored block: its sequence, head and number; its keys, which are absent where they have no page.
fn blocks<'s>(
    s: &'s Sequences,
    index: &'s Summaries,
) -> impl Iterator<Item = ([usize; 3], Vec<Option<&'s [f64]>>)> + 's {
    indices(&[s.batch(), s.kv_heads]).flat_map(move |at| {
        (0..index.count(s.len(at[0]))).map(move |j| {
            let end = s.len(at[0]).min((j + 1) * index.block_size);
            ([at[0], at[1], j], (j * index.block_size..end).map(|t| s.key(at[0], t, at[1])).collect())
        })
    })
}

/// Row g of weights (0) or centre (1).
fn learned(index: &Summaries, which: usize, g: usize, dim: usize) -> Vec<f64> {
    let default = if which == 0 { 1.0 } else { 0.0 };
    index.learned.as_ref().map_or(vec![default; dim], |of| of[which].0.row([g]).to_vec())
}

/// What is stored of block [i, g, j], as numbers.
fn stored(index: &Summaries, [i, g, j]: [usize; 3], read: &[Array<f64>]) -> Vec<f64> {
    let (page, row) = index.find(i, j);
    let axes = read[0].row([page, row, g]);
    let Some(range) = read.get(1) else { return axes.to_vec() };
    let dim = axes.len();
    let codes = axes.iter().flat_map(|&b| [b as u8 & 15, b as u8 >> 4]);
    let value = |(n, code): (usize, u8)| {
        let group = n / dim * dim.div_ceil(GROUP) + n % dim / GROUP;
        let range = &range.row([page, row, g])[2 * group..];
        range[1] + range[0] * code as f64
    };
    codes.enumerate().map(value).collect()
}

fn read(index: &Summaries) -> Vec<Array<f64>> {
    let number = |t: &Tensor| if t.dtype == U8 { t.read_ints().map(|&b| b as f64) } else { t.read_floats() };
    index.tensors.iter().map(number).collect()
}

fn axis_agrees_with_the_gram_matrix(backend: &Backend) {
    rounds(25, |rng| {
        let s = Sequences::random(backend, rng);
        let index = Summaries::room(rng, &s, VWD_INDEX_AXIS);
        s.update(rng, &s.lens, None, &index);
        let read = read(&index);
        for (at, keys) in blocks(&s, &index) {
            let found = stored(&index, at, &read);
            if keys.iter().any(|key| key.is_none()) {
                assert!(found.iter().all(|x| x.is_nan()), "a token of block {at:?} has no page: {found:?}");
                continue;
            }
            let keys: Vec<&[f64]> = keys.into_iter().flatten().collect();
            let (mean, mut axis) = oracle::axis(&keys, &learned(&index, 0, at[1], s.dim));
            // Its sign is that of the token farthest from the mean, which of two at the same distance rounding decides: two tokens always are.
            let along: f64 = axis.iter().zip(&found[s.dim..]).map(|(wanted, found)| wanted * found).sum();
            if keys.len() == 2 && along < 0.0 {
                axis.iter_mut().for_each(|x| *x = -*x);
            }
            let centre = learned(&index, 1, at[1], s.dim);
            let wanted = mean.iter().zip(&centre).map(|(m, c)| m - c).chain(axis).collect::<Vec<f64>>();
            let dtype = index.tensors[0].dtype;
            for part in [0..s.dim, s.dim..2 * s.dim] {
                let largest = wanted[part.clone()].iter().fold(0f64, |most, x| most.max(x.abs()));
                // Two steps of float32 sums over up to 150 tokens of 576 channels, then the rounding of what is stored: of
                // INT4 half a step of the range, and the rounding of scale and minimum.
                let rounding = if dtype == U8 { largest / 15.0 * 1.1 } else { 2.0 * dtype.rounding(largest) };
                for c in part {
                    let (found, wanted) = (found[c], wanted[c]);
                    let near = (found - wanted).abs() <= 2e-4 * largest.max(1.0) + rounding;
                    assert!(near, "block {at:?}, value {c}: {found}, expected {wanted}");
                }
            }
        }
    });
}

/// The contract in single precision, in its order: (mean less centre, axis).
fn in_order(keys: &[Option<&[f64]>], dim: usize, weights: &[f64], centre: &[f64]) -> Vec<f32> {
    let n = keys.len();
    let key = |t: usize, c: usize| keys[t].map_or(f32::NAN, |key| key[c] as f32);
    let tree = |x: [f32; 8]| ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    // Token t adds to sum t mod 8.
    let over_tokens = |add: &dyn Fn(usize, f32) -> f32| {
        let mut sums = [0f32; 8];
        (0..n).for_each(|t| sums[t % 8] = add(t, sums[t % 8]));
        tree(sums)
    };
    let over_channels = |a: &dyn Fn(usize) -> f32, b: &dyn Fn(usize) -> f32| {
        let mut sums: Vec<f32> =
            (0..dim / 8).map(|n| (8 * n..8 * n + 8).fold(0.0, |sum, c| a(c).mul_add(b(c), sum))).collect();
        sums.resize((dim / 8).next_power_of_two(), 0.0);
        while sums.len() > 1 {
            let upper = sums.split_off(sums.len() / 2);
            sums.iter_mut().zip(upper).for_each(|(a, b)| *a += b);
        }
        sums[0]
    };
    let share = 1.0 / n as f32;
    let mean: Vec<f32> = (0..dim).map(|c| over_tokens(&|t, sum| sum + key(t, c)) * share).collect();
    let x: Vec<Vec<f32>> = (0..n).map(|t| (0..dim).map(|c| key(t, c) - mean[c]).collect()).collect();
    let squares: Vec<f32> = weights.iter().map(|&w| w as f32 * w as f32).collect();
    let (mut farthest, mut largest) = (0, f32::NEG_INFINITY);
    for (t, x) in x.iter().enumerate() {
        let size = over_channels(&|c| x[c] * squares[c], &|c| x[c]);
        if size > largest {
            (farthest, largest) = (t, size);
        }
    }
    let mut towards: Vec<f32> = (0..dim).map(|c| x[farthest][c] * squares[c]).collect();
    let mut axis = vec![0f32; dim];
    for step in 0..3 {
        let u: Vec<f32> = x.iter().map(|x| over_channels(&|c| x[c], &|c| towards[c])).collect();
        let size = over_tokens(&|t, sum| u[t].mul_add(u[t], sum));
        let shrink = if size == 0.0 { 0.0 } else { 1.0 / size.sqrt() };
        axis = (0..dim).map(|c| over_tokens(&|t, sum| x[t][c].mul_add(u[t], sum)) * shrink).collect();
        towards = (0..dim).map(|c| axis[c] * squares[c]).collect();
        if step == 2 {
            let most = u.iter().fold(0f32, |most, u| most.max(u.abs()));
            let reach = (1.15 / (n as f32).sqrt()).max(0.6 * most * shrink);
            axis.iter_mut().for_each(|a| *a *= reach);
        }
    }
    let mean = mean.iter().zip(centre).map(|(mean, &centre)| mean - centre as f32);
    mean.chain(axis).collect()
}

fn axis_has_the_bits_of_its_contract(backend: &Backend) {
    rounds(25, |rng| {
        let mut s = Sequences::random(backend, rng);
        let hard = rng.pick(&[1e-6, 1.0, 1.0, 1e3]);
        let special = [f64::NAN, f64::INFINITY, 0.0, 1e30];
        let dtype = s.dtype;
        s.keys = s.keys.map(|&x| dtype.round(if rng.one_in(2000) { rng.pick(&special) } else { x * hard }));
        check_bits(rng, &s);
    });
}

fn axis_of_float8_keys_is_that_of_their_scaled_values(backend: &Backend) {
    rounds(15, |rng| {
        let s = Sequences::quantised(backend, rng);
        check_bits(rng, &s);
    });
}

fn check_bits(rng: &mut Rng, s: &Sequences) {
    let index = Summaries::room(rng, s, VWD_INDEX_AXIS);
    check_bits_of(rng, s, &index);
}

/// Updates the index, and compares what it then holds with the contract.
pub fn check_bits_of(rng: &mut Rng, s: &Sequences, index: &Summaries) {
    s.update(rng, &s.lens, None, index);
    let read = read(index);
    for (at @ [i, g, j], keys) in blocks(s, index) {
        let wanted = in_order(&keys, s.dim, &learned(index, 0, g, s.dim), &learned(index, 1, g, s.dim));
        let (page, row) = index.find(i, j);
        let axes = read[0].row([page, row, g]);
        let what = format!("block {at:?} of {} tokens", keys.len());
        let Some(range) = read.get(1) else {
            let rounded: Vec<f64> = wanted.iter().map(|&x| s.dtype.round(x as f64)).collect();
            assert_same(axes, &rounded, &what);
            continue;
        };
        let (mut codes, mut ranges) = (vec![], vec![]);
        for group in wanted.chunks(s.dim).flat_map(|part| part.chunks(GROUP)) {
            let (of_group, scale, min) = label(group);
            let is_number = group.iter().all(|x| x.is_finite());
            codes.extend(of_group.iter().map(|&code| if is_number { code } else { 0 }));
            ranges.extend(if is_number { [scale as f64, min as f64] } else { [0.0, f64::NAN] });
        }
        let packed: Vec<f64> = codes.chunks(2).map(|pair| (pair[0] | pair[1] << 4) as f64).collect();
        assert_same(range.row([page, row, g]), &ranges, &what);
        assert_same(axes, &packed, &what);
    }
}

fn axis_extended_after_rollback_has_the_bits_of_one_built_at_once(backend: &Backend) {
    check_rollback(backend, &[VWD_INDEX_AXIS]);
}

fn axis_of_equal_keys_is_zero(backend: &Backend) {
    rounds(5, |rng| {
        let mut s = Sequences::random(backend, rng);
        s.keys = s.keys.map(|_| 1.0);
        let index = Summaries::room(rng, &s, VWD_INDEX_AXIS);
        s.update(rng, &s.lens, None, &index);
        let read = read(&index);
        for (at, keys) in blocks(&s, &index).filter(|(_, keys)| keys.iter().all(|key| key.is_some())) {
            // A mean of ones is one but for the rounding of 1/n: what remains has no size in float32.
            let largest = stored(&index, at, &read)[s.dim..].iter().fold(0f64, |most, x| most.max(x.abs()));
            assert!(largest <= 1e-6, "{largest} of {} tokens", keys.len());
        }
    });
}

fn channel_weights_and_centre_are_means(backend: &Backend) {
    rounds(30, |rng| {
        let (heads, group, dim) = (rng.size(1..=3), rng.size(1..=7), rng.pick(&[16, 24, 64, 256]));
        let (tq, tk) = (rng.size(0..=40), rng.size(0..=40));
        let dtype = rng.pick(&[F32, F16, BF16]);
        let sample = |rng: &mut Rng, shape: &[usize]| {
            rng.normals(shape).map(|&x| if rng.one_in(50) { f64::NAN } else { dtype.round(x) })
        };
        let (q, k) = (sample(rng, &[tq, heads * group, dim]), sample(rng, &[tk, heads, dim]));
        let given = [&q, &k].map(|x| Tensor::floats(backend, dtype, x, &Layout::random(rng, 3)));
        let out = [0, 1].map(|_| Tensor::poisoned(backend, F32, &[heads, dim], &Layout::random(rng, 2)));
        let args = vwd_channel_importance_args {
            q: given[0].c(),
            k: given[1].c(),
            weights: out[0].c(),
            centre: out[1].c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_channel_importance(backend.session(), &args, backend.stream()) });
        let number = |x: f64| if x.is_nan() { 0.0 } else { x };
        let mean = |x: &Array<f64>, heads: std::ops::Range<usize>, c: usize, f: fn(f64) -> f64| {
            let count = x.shape[0] * heads.len();
            let sum: f64 = heads.map(|h| (0..x.shape[0]).map(|t| f(number(x[[t, h, c]]))).sum::<f64>()).sum();
            if count == 0 { 0.0 } else { sum / count as f64 }
        };
        let (weights, centre) = (out[0].read_floats(), out[1].read_floats());
        for at in indices(&[heads, dim]) {
            let (g, c) = (at[0], at[1]);
            let want = [mean(&q, g * group..(g + 1) * group, c, f64::abs), mean(&k, g..g + 1, c, |x| x)];
            for (found, want) in [weights[[g, c]], centre[[g, c]]].into_iter().zip(want) {
                // A float32 sum of up to 280 numbers near 1.
                assert!((found - want).abs() <= 1e-4, "{found}, expected {want}");
            }
        }
        out[0].assert_written("weights", |_| true);
        out[1].assert_written("centre", |_| true);
    });
}

// --- select ----------------------------------------------------------------------------------------------------------

/// Means and axes that the test makes itself.
pub struct Axes<'b> {
    place: Place<'b>,
    axes: Tensor<'b>,
    range: Option<Tensor<'b>>,
    /// [pages, rows, Hk, 2·D]
    values: Array<f64>,
}

impl<'b> Axes<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng, scene: &Scene) -> Axes<'b> {
        let layouts = [Layout::random(rng, 4), Layout::random(rng, 4)];
        let is_int4 = !rng.one_in(3);
        Axes::new(backend, rng, scene, is_int4, layouts)
    }

    pub fn new(backend: &'b Backend, rng: &mut Rng, scene: &Scene, is_int4: bool, layouts: [Layout; 2]) -> Axes<'b> {
        if is_int4 {
            return Axes::int4(backend, rng, scene, usize::MAX, layouts);
        }
        let place = Place::random(backend, rng, scene.batch, scene.capacity.div_ceil(scene.block));
        let dtype = rng.pick(&[F32, F16, BF16]);
        let values = rng.normals(&[place.pages, place.rows, scene.kv_heads, 2 * scene.dim]).map(|&x| dtype.round(x));
        let axes = Tensor::floats(backend, dtype, &values, &layouts[0]);
        Axes { place, axes, range: None, values }
    }

    /// Float32, of which now and then one is not finite.
    pub fn with_special(backend: &'b Backend, rng: &mut Rng, scene: &Scene) -> Axes<'b> {
        let place = Place::random(backend, rng, scene.batch, scene.capacity.div_ceil(scene.block));
        let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        let often = rng.pick(&[200, 5000]);
        let shape = [place.pages, place.rows, scene.kv_heads, 2 * scene.dim];
        let values =
            Array::from_fn(&shape, |_| F32.round(if rng.one_in(often) { rng.pick(&special) } else { rng.normal() }));
        let axes = Tensor::floats(backend, F32, &values, &Layout::random(rng, 4));
        Axes { place, axes, range: None, values }
    }

    /// Axes in INT4. There are so many kinds of blocks, or each block is of its own.
    pub fn int4(backend: &'b Backend, rng: &mut Rng, scene: &Scene, kinds: usize, layouts: [Layout; 2]) -> Axes<'b> {
        let place = Place::random(backend, rng, scene.batch, scene.capacity.div_ceil(scene.block));
        let shape = |last: usize| [place.pages, place.rows, scene.kv_heads, last];
        let groups = scene.dim.div_ceil(GROUP);
        let bytes = Array::from_fn(&shape(scene.dim), |_| rng.int(0..=255));
        let range = Array::from_fn(&shape(4 * groups), |at| {
            F16.round(if at[3] % 2 == 0 { 0.2 * rng.unit() } else { 2.0 * rng.unit() - 2.5 })
        });
        let of_kind = |at: &[usize]| match kinds < place.rows {
            true => [0, (at[0] + at[1]) % kinds, at[2], at[3]],
            false => [at[0], at[1], at[2], at[3]],
        };
        let bytes = Array::from_fn(&bytes.shape, |at| bytes[of_kind(at)]);
        let range = Array::from_fn(&range.shape, |at| range[of_kind(at)]);
        let values = Array::from_fn(&shape(2 * scene.dim), |at| {
            let (part, c) = (at[3] / scene.dim, at[3] % scene.dim);
            let code = bytes[[at[0], at[1], at[2], at[3] / 2]] >> (4 * (at[3] % 2)) & 15;
            let range = &range.row([at[0], at[1], at[2]])[2 * (part * groups + c / GROUP)..];
            range[1] + range[0] * code as f64
        });
        let axes = Tensor::ints(backend, U8, &bytes, &layouts[0]);
        let range = Tensor::floats(backend, F16, &range, &layouts[1]);
        Axes { place, axes, range: Some(range), values }
    }

    /// The mean, less the centre, and the axis of block `j`.
    pub fn block(&self, scene: &Scene, i: usize, j: usize, g: usize) -> Option<(&[f64], &[f64])> {
        let (page, row) = self.place.find(i, j)?;
        Some(self.values.row([page, row, g]).split_at(scene.dim))
    }

    pub fn args(&self, scene: &Scene) -> vwd_select_blocks_args {
        let index = vwd_index {
            kind: VWD_INDEX_AXIS,
            block_size: scene.block as u32,
            table: self.place.table_c(),
            axes: self.axes.c(),
            axis_range: self.range.as_ref().map_or(absent(), Tensor::c),
            ..args()
        };
        vwd_select_blocks_args { method: VWD_SELECT_AXIS, index: kept(index), ..args() }
    }

    pub fn scores(&self, scene: &Scene) -> impl Fn(usize, usize, usize) -> Scored {
        move |i, r, g| {
            let all = scene.sees(i, r).div_ceil(scene.block);
            let places: Vec<(usize, (usize, usize))> =
                (0..all).filter_map(|j| self.place.find(i, j).map(|at| (j, at))).collect();
            let rows =
                |&(_, (page, row)): &(usize, (usize, usize))| self.values.row([page, row, g]).split_at(scene.dim);
            let found: Vec<(&[f64], &[f64])> = places.iter().map(rows).collect();
            let mut blocks = vec![(f64::NEG_INFINITY, 0.0); all];
            let masses = oracle::axis_mass(&scene.queries_of(i, r, g), &found, scene.scale());
            for (&(j, _), mass) in places.iter().zip(masses) {
                // A logit of size 10 has an error near 1e−5 after 2·D products in float32, and e^x doubles as its relative
                // error.
                blocks[j] = (mass, 3e-4 * mass + 1e-7);
            }
            Scored { blocks, missing: places.len() < all }
        }
    }
}

fn select_axis_agrees_with_the_formula(backend: &Backend) {
    rounds(80, |rng| {
        let scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 20);
        let axes = Axes::random(backend, rng, &scene);
        check_blocks(backend, rng, &scene, &choice, axes.args(&scene), axes.scores(&scene), |_| 0);
    });
}

/// Enough blocks that the work is shared, in the form that engines have.
fn select_axis_takes_many_blocks(backend: &Backend) {
    rounds(6, |rng| {
        let (block, blocks) = (16, rng.pick(&[700, 2048, 4096, 9000]));
        let sizes = [rng.size(1..=2), 2, rng.pick(&[1, 3, 4, 8]), rng.pick(&[64, 128])];
        let scene = Scene::with_positions(backend, rng, sizes, block, block * blocks, None);
        let choice = Choice::random(backend, rng, sizes[0], 512);
        let is_int4 = !rng.one_in(3);
        let axes = Axes::new(backend, rng, &scene, is_int4, [Layout::default(), Layout::default()]);
        check_blocks(backend, rng, &scene, &choice, axes.args(&scene), axes.scores(&scene), |_| 0);
    });
}

/// As engines have them: one query position, or a list for each, and channels by the 64.
fn select_axis_takes_int4_in_rows_of_whole_units(backend: &Backend) {
    rounds(60, |rng| {
        let block = rng.pick(&[1, 16, 64]);
        let most = rng.pick(&[1, 40, 700]);
        let blocks = rng.size(1..=most);
        let sizes = [rng.size(1..=3), rng.size(1..=3), rng.pick(&[1, 3, 4, 8, 9, 16]), rng.pick(&[64, 128, 192, 256])];
        let positions = rng.one_in(3).then(|| rng.size(1..=3));
        let scene = Scene::with_positions(backend, rng, sizes, block, block * blocks, positions);
        let choice = Choice::random(backend, rng, sizes[0], 40);
        let axes = Axes::new(backend, rng, &scene, true, [Layout::default(), Layout::default()]);
        check_blocks(backend, rng, &scene, &choice, axes.args(&scene), axes.scores(&scene), |_| 0);
    });
}

/// More blocks than one CTA is to select from, wanted in any number, many or all of them alike.
fn select_axis_takes_int4_of_long_lists(backend: &Backend) {
    rounds(12, |rng| {
        let (block, blocks) = (rng.pick(&[1, 16]), rng.pick(&[5000, 8192, 8200]));
        let sizes = [rng.size(1..=2), rng.size(1..=2), rng.pick(&[1, 4, 7, 16]), rng.pick(&[64, 128, 128])];
        let positions = rng.one_in(3).then(|| rng.size(1..=2));
        let scene = Scene::with_positions(backend, rng, sizes, block, block * blocks, positions);
        let most = rng.pick(&[2, 150, 150, 300, blocks]);
        let choice = Choice::random(backend, rng, sizes[0], most);
        let kinds = rng.pick(&[1, 3, usize::MAX, usize::MAX]);
        let axes = Axes::int4(backend, rng, &scene, kinds, [Layout::default(), Layout::default()]);
        check_blocks(backend, rng, &scene, &choice, axes.args(&scene), axes.scores(&scene), |_| 0);
    });
}

/// A NaN, as in a block with a token without a page, and infinity.
fn select_axis_ranks_what_is_not_finite_last(backend: &Backend) {
    rounds(5, |rng| {
        let (block, blocks) = (8, 40);
        let scene = Scene::with_positions(backend, rng, [1, 1, 2, 64], block, block * blocks, None);
        let queries = rng.normals(&scene.queries.shape).map(|&x| F16.round(x));
        let scene = scene.with_queries(backend, rng, F16, queries).with_lens(backend, (block * blocks) as i64);
        let bad: Vec<usize> = rng.subset(blocks, 7);
        let values = rng.normals(&[1, blocks, 1, 128]);
        let values = Array::from_fn(&values.shape, |at| match bad.iter().position(|&j| j == at[1]) {
            Some(n) if n % 2 == 0 && at[3] == n => f64::NAN,
            Some(n) if n % 2 == 1 && at[3] == n => f64::INFINITY,
            _ => F32.round(values[[at[0], at[1], at[2], at[3]]]),
        });
        let axes = Tensor::floats(backend, F32, &values, &Layout::random(rng, 4));
        let scores = scene.output(backend, rng, F32, &[blocks]);
        let status = scene.output(backend, rng, U32, &[]);
        let lists = crate::select::ListTensors::poisoned(backend, rng, &scene, blocks);
        let index = vwd_index { kind: VWD_INDEX_AXIS, block_size: block as u32, axes: axes.c(), ..args() };
        let args = vwd_select_blocks_args {
            method: VWD_SELECT_AXIS,
            block_size: block as u32,
            k: (blocks - 7) as u32,
            index: kept(index),
            q: scene.q.c(),
            seq_lens: scene.lens.c(),
            selected: lists.c(),
            scores: scores.c(),
            status: status.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
        let found = scores.read_floats();
        for j in 0..blocks {
            assert_eq!(found[[0, 0, j]] == f64::NEG_INFINITY, bad.contains(&j), "block {j}: {}", found[[0, 0, j]]);
        }
        lists.check(&scene, |_| (0..blocks).filter(|j| !bad.contains(j)).collect());
        assert_eq!(status.read_ints().data, [VWD_SELECT_NAN as i64]);
    });
}
