//! What a selection leaves out: log_mass of vwd_select_blocks, the means and covariances that vwd_remainder_update keeps, and the
//! term that vwd_attention makes of them.

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
    log_mass_of_extreme_products_does_not_overflow,
    remainder_update_agrees_with_the_formula,
    remainder_update_of_scaled_fp8_agrees_with_the_formula,
    remainder_update_has_the_same_bits_however_it_is_cut,
    remainder_update_of_hostile_numbers_has_the_bits_of_the_cpu,
    attention_with_a_remainder_agrees_with_the_formula,
    attention_with_a_remainder_of_nothing_changes_no_bit,
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

// --- attention -------------------------------------------------------------------------------------------------------

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

impl<'b> Attended<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, mass: impl Fn(&mut Rng) -> f64) -> Attended<'b> {
        let mut shape = Shape { page: 16, paged: true, max_pages: rng.size(1..=6), ..Shape::random(rng) };
        if rng.one_in(3) {
            shape.dim = 128;
        }
        let (group, block) = (rng.pick(&[1, 3, 4, 8, 9]), rng.pick(&[4, 16, 32]));
        let paged = Paged::random(backend, rng, &shape);
        let positions = rng.one_in(2).then(|| rng.size(1..=4));
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
        let layout = |rng: &mut Rng, rank| Layout::random(rng, rank);
        rows.tokens = Tensor::ints(backend, I32, &tokens, &layout(rng, 2));
        rows.means[1] = Tensor::floats(backend, F32, &mean_v, &layout(rng, 3));
        rows.covariance = Tensor::floats(backend, F32, &covariance, &layout(rng, 4));
        let q = Tensor::floats(backend, dtype, &given, &Layout::random(rng, given.shape.len()));
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

fn attention_with_a_remainder_agrees_with_the_formula(backend: &Backend) {
    rounds(40, |rng| {
        let scene = Attended::random(backend, rng, |rng| match rng.size(0..=7) {
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

fn attention_with_a_remainder_of_nothing_changes_no_bit(backend: &Backend) {
    rounds(10, |rng| {
        let scene = Attended::random(backend, rng, |_| f64::NEG_INFINITY);
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
