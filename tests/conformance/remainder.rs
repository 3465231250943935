//! What a selection leaves out: log_mass of vwd_select_blocks, and the means and covariances that vwd_remainder_update keeps.

pub mod attention;
pub mod coded;
pub mod contents;
pub mod quality;

use crate::Case;
use crate::axis::Axes;
use crate::select::{Choice, ListTensors, Scene};
use crate::support::paged::Shape;
use crate::support::*;
use std::collections::BTreeSet;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    log_mass_agrees_with_the_formula,
    log_mass_of_many_blocks_agrees_with_the_formula,
    log_mass_of_equal_blocks_agrees_with_the_formula,
    log_mass_of_many_lists_agrees_with_the_formula,
    log_mass_of_long_lists_agrees_with_the_formula,
    log_mass_of_extreme_products_does_not_overflow,
    remainder_update_agrees_with_the_formula,
    remainder_update_of_scaled_fp8_agrees_with_the_formula,
    remainder_update_has_the_same_bits_however_it_is_cut,
    remainder_update_of_hostile_numbers_has_the_bits_of_the_cpu,
];

// --- log_mass --------------------------------------------------------------------------------------------------------

/// Runs the call with log_mass and without, and checks the masses by the lists that it wrote.
fn check_mass(backend: &Backend, rng: &mut Rng, scene: &Scene, choice: &Choice, axes: &Axes) {
    let centre = rng.one_in(2).then(|| {
        let values = rng.normals(&[scene.kv_heads, scene.dim]).map(|&x| F32.round(x));
        let tensor = Tensor::floats(backend, F32, &values, &Layout::random(rng, 2));
        (values, tensor)
    });
    let heads = scene.kv_heads * scene.group;
    let shape = match scene.positions {
        None => vec![scene.batch, heads],
        Some(count) => vec![scene.batch, count, heads],
    };
    let masses = Tensor::poisoned(backend, F32, &shape, &Layout::random(rng, shape.len()));
    let lists = [(); 2].map(|()| ListTensors::poisoned(backend, rng, scene, choice.cap));
    let args = axes.args(scene);
    // SAFETY: the test keeps the index for good.
    let index = vwd_index { axis_centre: centre.as_ref().map_or(absent(), |(_, t)| t.c()), ..unsafe { *args.index } };
    for (n, log_mass) in [masses.c(), absent()].into_iter().enumerate() {
        let args = vwd_select_blocks_args {
            block_size: scene.block as u32,
            k: choice.k as u32,
            init_blocks: choice.init as u32,
            local_blocks: choice.local as u32,
            scale: scene.scale,
            index: kept(index),
            q: scene.q.c(),
            q_lens: scene.q_lens_c(),
            seq_lens: scene.lens.c(),
            budgets: choice.budgets_c(),
            selected: lists[n].c(),
            log_mass,
            ..args
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_select_blocks(backend.session(), &args, backend.stream()) });
    }
    let [ids, counts] = [&lists[0].ids, &lists[0].counts].map(|t| scene.read(t.read_ints()));
    let twin = [&lists[1].ids, &lists[1].counts].map(|t| scene.read(t.read_ints()));
    let found = masses.read_floats();
    let count = scene.positions.unwrap_or(1);
    for at in indices(&[scene.batch, count, heads]) {
        let (i, r, h) = (at[0], at[1], at[2]);
        let (g, l) = (h / scene.group, if scene.own { r } else { 0 });
        let chosen = counts[[i, l, g]] as usize;
        assert_eq!(twin[1][[i, l, g]] as usize, chosen, "count of list {at:?} without log_mass");
        assert_eq!(twin[0].row([i, l, g])[..chosen], ids.row([i, l, g])[..chosen], "list {at:?} without log_mass");
        let listed: BTreeSet<i64> = ids.row([i, l, g])[..chosen].iter().copied().collect();
        let whole = scene.sees(i, r) / scene.block;
        let left: Vec<(&[f64], &[f64])> =
            (0..whole).filter(|&j| !listed.contains(&(j as i64))).filter_map(|j| axes.block(scene, i, j, g)).collect();
        let query = scene.queries_of(i, r, g)[h % scene.group];
        let want = match scene.is_nan(i, r, g) || left.is_empty() {
            true => f64::NEG_INFINITY,
            false => {
                let common = centre.as_ref().map_or(0.0, |(c, _)| scene.scale() * oracle::dot(query, c.row([g])));
                oracle::log_mass(query, &left, scene.block, scene.scale()) + common
            }
        };
        let found = if scene.positions.is_some() { found[[i, r, h]] } else { found[[i, h]] };
        // Products of up to some tens, of 2·D terms in float32.
        let close = found == want || (found - want).abs() <= 1e-4 + 2e-5 * want.abs();
        assert!(close, "log_mass at {at:?} of {} blocks: {found}, expected {want}", left.len());
    }
    masses.assert_written("log_mass", |_| true);
}

fn log_mass_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let scene = Scene::random(backend, rng);
        let choice = Choice::random(backend, rng, scene.batch, 12);
        let axes = Axes::random(backend, rng, &scene);
        check_mass(backend, rng, &scene, &choice, &axes);
    });
}

/// Forms that engines have, of more chunks than one, whichever kernel selects.
fn log_mass_of_many_blocks_agrees_with_the_formula(backend: &Backend) {
    let mut groups = [1, 4, 7, 8, 12].into_iter().cycle();
    rounds(20, |rng| {
        let group = groups.next().expect("a cycle");
        let (block, blocks) = (rng.pick(&[16, 64]), rng.pick(&[127, 128, 129, 700, 2100]));
        let sizes = [rng.size(1..=2), 2, group, rng.pick(&[64, 128, 128])];
        let positions = rng.one_in(3).then(|| rng.size(1..=3));
        let scene = Scene::with_positions(backend, rng, sizes, block, block * blocks, positions);
        let choice = Choice::random(backend, rng, sizes[0], 200);
        let is_int4 = !rng.one_in(3);
        let axes = Axes::new(backend, rng, &scene, is_int4, [Layout::default(), Layout::default()]);
        check_mass(backend, rng, &scene, &choice, &axes);
    });
}

/// A scene of 128 channels in INT4: sequences, KV heads, query heads of each, blocks, and kinds of blocks.
fn check_mass_of_kinds(backend: &Backend, rng: &mut Rng, [batch, kv_heads, group, blocks, kinds]: [usize; 5]) {
    let scene = Scene::with_positions(backend, rng, [batch, kv_heads, group, 128], 16, 16 * blocks, None);
    let choice = Choice::random(backend, rng, batch, 200);
    let axes = Axes::int4(backend, rng, &scene, kinds, [Layout::default(), Layout::default()]);
    check_mass(backend, rng, &scene, &choice, &axes);
}

/// Most scores are equal, and blocks that are selected have the scores of others that are not.
fn log_mass_of_equal_blocks_agrees_with_the_formula(backend: &Backend) {
    rounds(12, |rng| {
        let (group, blocks) = (rng.pick(&[1, 4, 8, 12]), rng.pick(&[40, 300, 1500]));
        let sizes = [rng.size(1..=2), 2, group, blocks, rng.size(1..=4)];
        check_mass_of_kinds(backend, rng, sizes);
    });
}

/// Each list has one CTA or two.
fn log_mass_of_many_lists_agrees_with_the_formula(backend: &Backend) {
    let mut batches = [35, 16].into_iter().cycle();
    rounds(4, |rng| {
        let batch = batches.next().expect("a cycle");
        check_mass_of_kinds(backend, rng, [batch, 4, 2, 150, usize::MAX]);
    });
}

/// The first CTA of a list has more keys than registers for them, and of the longest no room beside its tiles.
fn log_mass_of_long_lists_agrees_with_the_formula(backend: &Backend) {
    let forced = backend.forcing("select_blocks=axis_cluster", 90..=u32::MAX);
    let backend = forced.as_ref().unwrap_or(backend);
    let mut forms = [(3, 8200), (12, 7000), (3, 14_000)].into_iter().cycle();
    rounds(6, |rng| {
        let (group, blocks) = forms.next().expect("a cycle");
        check_mass_of_kinds(backend, rng, [1, 1, group, blocks, 50]);
    });
}

/// Sums that are far above and far below what float32 has, and blocks that weigh nothing.
fn log_mass_of_extreme_products_does_not_overflow(backend: &Backend) {
    rounds(8, |rng| {
        let (block, blocks) = (8, rng.size(3..=300));
        let factor = rng.pick(&[40.0, 1e-3]);
        let scene = Scene::with_positions(backend, rng, [2, 2, 3, 64], block, block * blocks, None);
        let queries = rng.normals(&scene.queries.shape).map(|&x| F32.round(factor * x));
        let scene = scene.with_queries(backend, rng, F32, queries).with_lens(backend, (block * blocks) as i64);
        let choice = Choice::plain(2);
        let axes = Axes::with_special(backend, rng, &scene);
        check_mass(backend, rng, &scene, &choice, &axes);
    });
}

// --- remainder -------------------------------------------------------------------------------------------------------

/// Rows of means and covariances in memory.
struct Rows<'b> {
    rows: Option<(Array<i64>, Tensor<'b>)>,
    count: usize,
    tokens: Tensor<'b>,
    means: [Tensor<'b>; 2],
    covariance: Tensor<'b>,
}

impl<'b> Rows<'b> {
    /// New rows: no tokens, and the rest poisoned.
    fn new(backend: &'b Backend, rng: &mut Rng, batch: usize, [heads, dim, value_dim]: [usize; 3]) -> Rows<'b> {
        let count = batch + rng.size(0..=2);
        let rows = rng.one_in(2).then(|| {
            let mut order: Vec<i64> = (0..count as i64).collect();
            rng.shuffle(&mut order);
            let none = [-1, count as i64, i32::MIN as i64];
            let rows = Array::from_fn(&[batch], |at| if rng.one_in(6) { rng.pick(&none) } else { order[at[0]] });
            let tensor = Tensor::ints(backend, I32, &rows, &Layout::random(rng, 1));
            (rows, tensor)
        });
        Rows::filled(backend, rng, count, rows, [heads, dim, value_dim])
    }

    fn filled(
        backend: &'b Backend,
        rng: &mut Rng,
        count: usize,
        rows: Option<(Array<i64>, Tensor<'b>)>,
        [heads, dim, value_dim]: [usize; 3],
    ) -> Rows<'b> {
        let mut make = |shape: &[usize]| Tensor::poisoned(backend, F32, shape, &Layout::random(rng, shape.len()));
        let means = [make(&[count, heads, dim]), make(&[count, heads, value_dim])];
        let covariance = make(&[count, heads, dim, value_dim]);
        let tokens = Tensor::ints(backend, I32, &Array::filled(&[count, heads], 0), &Layout::random(rng, 2));
        Rows { rows, count, tokens, means, covariance }
    }

    /// Rows of the same sequences in memory of their own.
    fn twin(&self, backend: &'b Backend, rng: &mut Rng) -> Rows<'b> {
        let rows = self
            .rows
            .as_ref()
            .map(|(values, _)| (values.clone(), Tensor::ints(backend, I32, values, &Layout::default())));
        let [_, heads, dim, value_dim] = self.covariance.shape[..] else { unreachable!() };
        Rows::filled(backend, rng, self.count, rows, [heads, dim, value_dim])
    }

    fn row(&self, i: usize) -> Option<usize> {
        let row = self.rows.as_ref().map_or(i as i64, |(rows, _)| rows[[i]]);
        (0..self.count as i64).contains(&row).then_some(row as usize)
    }

    fn c(&self) -> vwd_remainder {
        vwd_remainder {
            rows: self.rows.as_ref().map_or(absent(), |(_, t)| t.c()),
            tokens: self.tokens.c(),
            mean_k: self.means[0].c(),
            mean_v: self.means[1].c(),
            covariance: self.covariance.c(),
            ..args()
        }
    }

    fn update(&self, backend: &Backend, block: usize, kv: vwd_paged_kv, begin: Option<&Tensor>) {
        let args = vwd_remainder_update_args {
            block_size: block as u32,
            kv: kept(kv),
            begin: begin.map_or(absent(), Tensor::c),
            remainder: kept(self.c()),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_remainder_update(backend.session(), &args, backend.stream()) });
    }

    /// All that is stored of rows with tokens, as bits: one NaN is as good as another.
    fn bits(&self) -> Vec<u32> {
        let tokens = self.tokens.read_ints();
        let mut bits: Vec<u32> = tokens.data.iter().map(|&n| n as u32).collect();
        for t in self.means.iter().chain([&self.covariance]) {
            let values = t.read_floats();
            for at in indices(&values.shape).filter(|at| tokens[[at[0], at[1]]] > 0) {
                let x = values.data[indices_of(&values.shape, &at)] as f32;
                bits.push(if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() });
            }
        }
        bits
    }
}

fn indices_of(shape: &[usize], at: &[usize]) -> usize {
    shape.iter().zip(at).fold(0, |n, (extent, x)| n * extent + x)
}

/// Keys and values whose means are not 0 and which depend on each other.
fn random_pages<'b>(backend: &'b Backend, rng: &mut Rng, dtypes: &[DType]) -> (usize, Shape, Paged<'b>) {
    let (dim, dtype) = (rng.pick(&[16, 24, 40, 64, 128]), rng.pick(dtypes));
    let mut shape = Shape { dim, dtype, ..Shape::random(rng) };
    // Blocks that shared memory does not hold at once.
    let is_long = !shape.paged && rng.one_in(2);
    if is_long {
        shape.page = rng.size(140..=400);
    }
    let block = match shape.paged {
        _ if is_long => rng.pick(&[65, 70, 128, 130]),
        true => rng.pick(&[shape.page, 2 * shape.page, 4 * shape.page, shape.page / 2, shape.page / 4]),
        false => rng.pick(&[1, 3, 16, 32, 66, 70]),
    };
    if rng.one_in(12) {
        (shape.dim, shape.kv_heads) = (rng.pick(&[256, 576]), 1);
    }
    let paged = Paged::with_keys(backend, rng, &shape, |rng, extents| {
        let shift = rng.normals(&[extents[3]]);
        let keys = rng.normals(extents);
        Array::from_fn(extents, |at| keys[[at[0], at[1], at[2], at[3]]] + 3.0 * shift[[at[3]]])
    });
    (block, shape, paged)
}

/// How many of the sequence's whole blocks follow each other with a page for every token.
fn whole_blocks(paged: &Paged, i: usize, len: usize, block: usize) -> usize {
    let whole = |j: &usize| (j * block..(j + 1) * block).all(|t| paged.pages().find(i, t).is_some());
    (1..len / block).take_while(whole).count()
}

fn remainder_update_agrees_with_the_formula(backend: &Backend) {
    rounds(30, |rng| {
        let (block, shape, paged) = random_pages(backend, rng, &[F32, F16, BF16]);
        let rows = Rows::new(backend, rng, shape.batch, [shape.kv_heads, shape.dim, shape.dim]);
        rows.update(backend, block, paged.c(), None);
        check_moments(&rows, block, &shape, &paged, |_, _, _| [1.0; 2]);
        paged.assert_untouched();
    });
}

/// With a scale of each token's keys and values, or of each head's.
fn remainder_update_of_scaled_fp8_agrees_with_the_formula(backend: &Backend) {
    rounds(10, |rng| {
        let (block, shape, paged) = random_pages(backend, rng, &[F8E4M3, F8E5M2]);
        let [pages, page, heads, _] = paged.keys.shape[..] else { unreachable!() };
        let is_of_tokens = rng.one_in(2);
        let extents = if is_of_tokens { vec![pages, page, heads] } else { vec![heads] };
        let scales = [(); 2].map(|()| Array::from_fn(&extents, |_| F32.round(0.5 + rng.unit())));
        let given = scales.each_ref().map(|s| Tensor::floats(backend, F32, s, &Layout::random(rng, extents.len())));
        let kv = vwd_paged_kv { k_scale: given[0].c(), v_scale: given[1].c(), ..paged.c() };
        let rows = Rows::new(backend, rng, shape.batch, [shape.kv_heads, shape.dim, shape.dim]);
        rows.update(backend, block, kv, None);
        check_moments(&rows, block, &shape, &paged, |i, t, g| {
            let (page, slot) = paged.pages().find(i, t).expect("a page");
            let of_token = |s: &Array<f64>| if is_of_tokens { s[[page, slot, g]] } else { s[[g]] };
            scales.each_ref().map(of_token)
        });
        check_on_the_cpu(backend, rng, block, &shape, &paged, &rows, Some(&scales));
    });
}

/// Means and covariances of all whole blocks, where token t of sequence i and KV head g has these scales of its key and value.
fn check_moments(
    rows: &Rows,
    block: usize,
    shape: &Shape,
    paged: &Paged,
    scales: impl Fn(usize, usize, usize) -> [f64; 2],
) {
    let tokens = rows.tokens.read_ints();
    let [mean_k, mean_v] = rows.means.each_ref().map(Tensor::read_floats);
    let covariance = rows.covariance.read_floats();
    for (i, g) in (0..shape.batch).flat_map(|i| (0..shape.kv_heads).map(move |g| (i, g))) {
        let Some(row) = rows.row(i) else { continue };
        let counted = whole_blocks(paged, i, paged.len(i), block) * block;
        assert_eq!(tokens[[row, g]], counted as i64, "tokens of sequence {i}");
        if counted == 0 {
            continue;
        }
        let those: Vec<usize> = (block..block + counted).collect();
        let scaled = |of: Vec<&[f64]>, n: usize| -> Vec<Vec<f64>> {
            let rows = of.into_iter().zip(&those);
            rows.map(|(x, &t)| x.iter().map(|x| x * scales(i, t, g)[n]).collect()).collect()
        };
        let [keys, values] = [scaled(paged.keys_of(i, g, &those), 0), scaled(paged.values_of(i, g, &those), 1)];
        let [keys, values] = [&keys, &values].map(|rows| rows.iter().map(Vec::as_slice).collect::<Vec<&[f64]>>());
        let want = oracle::moments(&keys, &values);
        // Keys are of a few units, and rounded sums of some hundreds of them lose a few bits.
        let close = |found: f64, want: f64, what: &str| {
            assert!((found - want).abs() <= 2e-5 * want.abs().max(4.0), "{what} of {i}, {g}: {found}, not {want}");
        };
        (0..shape.dim).for_each(|c| close(mean_k[[row, g, c]], want.0[c], "mean_k"));
        (0..shape.dim).for_each(|d| close(mean_v[[row, g, d]], want.1[d], "mean_v"));
        for at in indices(&[shape.dim, shape.dim]) {
            close(covariance[[row, g, at[0], at[1]]], want.2[at[0]][at[1]], "covariance");
        }
    }
}

/// In many calls, with tokens taken back and replaced, and on the CPU: the bits of one call.
fn remainder_update_has_the_same_bits_however_it_is_cut(backend: &Backend) {
    rounds(20, |rng| {
        let (block, shape, paged) = random_pages(backend, rng, &[F32, F16, BF16]);
        let sizes = [shape.kv_heads, shape.dim, shape.dim];
        let rows = Rows::new(backend, rng, shape.batch, sizes);
        let once = rows.twin(backend, rng);
        once.update(backend, block, paged.c(), None);
        let ints = |values: &[i64]| {
            Tensor::ints(backend, I32, &Array::new(&[values.len()], values.to_vec()), &Layout::default())
        };
        let ends: Vec<i64> = (0..shape.batch).map(|i| paged.len(i) as i64).collect();
        let mut lens = vec![0i64; shape.batch];
        let mut wrong = paged.values.clone();
        wrong.data.iter_mut().for_each(|x| *x = shape.dtype.round(*x + 1.0));
        while lens != ends {
            let before = lens.clone();
            for (len, &end) in lens.iter_mut().zip(&ends) {
                let some = rng.int(0..=3 * block as i64);
                *len = end.min(*len + rng.pick(&[1, 1, block as i64, some, end]));
            }
            // Other values first, which are then taken back.
            let is_draft = rng.one_in(3);
            let begin = ints(&before);
            let given = ints(&lens);
            let values = Tensor::floats(backend, shape.dtype, &wrong, &Layout::default());
            if is_draft {
                let kv = vwd_paged_kv { v: values.c(), seq_lens: given.c(), ..paged.c() };
                rows.update(backend, block, kv, Some(&begin));
            }
            let begin = if is_draft || rng.one_in(2) { Some(&begin) } else { None };
            rows.update(backend, block, vwd_paged_kv { seq_lens: given.c(), ..paged.c() }, begin);
        }
        assert_eq!(rows.bits(), once.bits(), "{} tokens a block, lens {ends:?}", block);
        check_on_the_cpu(backend, rng, block, &shape, &paged, &once, None);
    });
}

/// What the CPU gives for these keys and values is in `found`, to the bit.
fn check_on_the_cpu(
    backend: &Backend,
    rng: &mut Rng,
    block: usize,
    shape: &Shape,
    paged: &Paged,
    found: &Rows,
    scales: Option<&[Array<f64>; 2]>,
) {
    if !backend.is_cuda() {
        return;
    }
    let cpu = Backend::cpu(1);
    let floats = |values: &Array<f64>| Tensor::floats(&cpu, shape.dtype, values, &Layout::default());
    let ints = |values: &Array<i64>| Tensor::ints(&cpu, I32, values, &Layout::default());
    let (k, v, lens) = (floats(&paged.keys), floats(&paged.values), ints(&paged.len_values));
    let table = paged.table_values.as_ref().map(ints);
    let rows = found.rows.as_ref().map(|(values, _)| (values.clone(), ints(values)));
    let twin = Rows::filled(&cpu, rng, found.count, rows, [shape.kv_heads, shape.dim, shape.dim]);
    let table = table.as_ref().map_or(absent(), Tensor::c);
    let scales = scales.map(|scales| scales.each_ref().map(|s| Tensor::floats(&cpu, F32, s, &Layout::default())));
    let [k_scale, v_scale] = scales.as_ref().map_or([absent(); 2], |scales| scales.each_ref().map(Tensor::c));
    let kv = vwd_paged_kv { k: k.c(), v: v.c(), k_scale, v_scale, page_table: table, seq_lens: lens.c(), ..args() };
    twin.update(&cpu, block, kv, None);
    assert_eq!(found.bits(), twin.bits());
}

fn remainder_update_of_hostile_numbers_has_the_bits_of_the_cpu(backend: &Backend) {
    rounds(10, |rng| {
        let shape = Shape { dim: rng.pick(&[16, 64]), dtype: F32, ..Shape::random(rng) };
        let block = if shape.paged { shape.page } else { 4 };
        let special = [f64::NAN, f64::INFINITY, 1e30, 1e-40, 0.0, -0.0];
        let paged = Paged::with_keys(backend, rng, &shape, |rng, extents| {
            let often = rng.pick(&[50, 5000]);
            Array::from_fn(extents, |_| if rng.one_in(often) { rng.pick(&special) } else { rng.normal() })
        });
        let rows = Rows::new(backend, rng, shape.batch, [shape.kv_heads, shape.dim, shape.dim]);
        rows.update(backend, block, paged.c(), None);
        for (i, g) in (0..shape.batch).flat_map(|i| (0..shape.kv_heads).map(move |g| (i, g))) {
            let Some(row) = rows.row(i) else { continue };
            let counted = whole_blocks(&paged, i, paged.len(i), block) * block;
            assert_eq!(rows.tokens.read_ints()[[row, g]], counted as i64);
            // What is not finite stays in its channel.
            let those: Vec<usize> = (block..block + counted).collect();
            let keys = paged.keys_of(i, g, &those);
            for c in (0..shape.dim).filter(|&c| counted > 0 && keys.iter().all(|key| key[c].abs() < 1e9)) {
                assert!(rows.means[0].read_floats()[[row, g, c]].is_finite(), "mean of channel {c} of {i}, {g}");
            }
        }
        check_on_the_cpu(backend, rng, block, &shape, &paged, &rows, None);
    });
}
