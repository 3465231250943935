//! vwd_attention: agreement with the formula over every layout and size, and the bits that are promised to be equal.

pub mod repair;

use crate::Case;
use crate::support::oracle::{List, Pages};
use crate::support::*;
use std::collections::BTreeSet;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    attention_over_blocks_agrees_with_the_formula,
    attention_over_tokens_agrees_with_the_formula,
    attention_over_any_number_of_lists_agrees_with_the_formula,
    attention_without_a_list_covers_every_token,
    attention_without_a_page_table_reads_one_page_per_sequence,
    attention_rows_may_share_pages_through_an_expanded_page_table,
    attention_survives_hostile_lists_lengths_and_pages,
    attention_to_nan_keys_spoils_their_own_heads_alone,
    attention_gives_the_same_bits_wherever_in_the_batch,
];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![attention_bits_do_not_depend_on_threads_or_on_the_batch];

/// Error of a result computed in f32: scores of a few units carry some 2⁻²⁰ each, and weights as much, relative to values
/// of a few units. A result of 16 bits adds half its spacing.
const TOLERANCE: f64 = 4e-5;

/// What a GPU adds to the error of acc, relative to l: its weights may have the keys' type, of 16 bits, and values are a few
/// units.
fn weight_rounding(backend: &Backend, layer: &Layer) -> f64 {
    let kv_type = layer.shape.kv_type;
    if backend.is_cuda() && kv_type != F32 { 4.0 * kv_type.rounding(1.0) } else { 0.0 }
}

// --- a layer's keys, values and queries ------------------------------------------------------------------------------

#[derive(Clone, Debug)]
struct Shape {
    batch: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    /// Tokens of a page, of a block, and the most a sequence may have.
    page: usize,
    block: usize,
    most: usize,
    q_type: DType,
    kv_type: DType,
}

impl Shape {
    fn random(rng: &mut Rng) -> Shape {
        let kv_type = rng.pick(&[F32, F16, BF16]);
        let (page, block) = rng.pick(&[(16, 16), (64, 16), (16, 64), (8, 8), (64, 64), (128, 32), (32, 128), (24, 8)]);
        Shape {
            batch: rng.size(1..=3),
            kv_heads: rng.size(1..=3),
            group: rng.pick(&[1, 3, 4, 8, 16]),
            dim: rng.pick(&[16, 24, 64, 80, 128, 256]),
            page,
            block,
            most: rng.pick(&[40, 300, 1200]),
            // Queries mostly have the type of the keys.
            q_type: if rng.one_in(3) { rng.pick(&[F32, F16, BF16]) } else { kv_type },
            kv_type,
        }
    }
}

/// Values as the library sees them, already rounded to their types.
struct Layer {
    shape: Shape,
    q: Array<f64>,
    k: Array<f64>,
    v: Array<f64>,
    table: Array<i64>,
    lens: Vec<i64>,
    scale: f64,
}

impl Layer {
    fn random(rng: &mut Rng, shape: Shape) -> Layer {
        let max_pages = shape.most.div_ceil(shape.page);
        let pages = shape.batch * max_pages + 1;
        let mut order: Vec<i64> = (0..pages as i64).collect();
        rng.shuffle(&mut order);
        let table = Array::from_fn(&[shape.batch, max_pages], |at| order[at[0] * max_pages + at[1]]);
        let lens = (0..shape.batch).map(|_| rng.int(0..=shape.most as i64)).collect();
        let kv = [pages, shape.page, shape.kv_heads, shape.dim];
        let rounded = |values: Array<f64>, dtype: DType| values.map(|&x| dtype.round(x));
        // Kernels on tensor cores round queries of float32 to the type of the keys.
        let is_rounded = shape.q_type == F32 && shape.kv_type.bits == 16;
        let query_type = if is_rounded { shape.kv_type } else { shape.q_type };
        Layer {
            q: rounded(rng.normals(&[shape.batch, shape.kv_heads * shape.group, shape.dim]), query_type),
            k: rounded(rng.normals(&kv), shape.kv_type),
            v: rounded(rng.normals(&kv), shape.kv_type),
            table,
            lens,
            scale: 1.0 / (shape.dim as f64).sqrt(),
            shape,
        }
    }

    fn pages(&self) -> Pages<'_> {
        Pages { table: Some(&self.table), pages: self.k.shape[0], size: self.shape.page }
    }

    fn len(&self, i: usize) -> usize {
        self.pages().clamp_len(self.lens[i])
    }

    fn blocks(&self, i: usize) -> usize {
        self.len(i).div_ceil(self.shape.block)
    }

    /// A list that names `share` of each sequence's blocks, with room to spare.
    fn list(&self, rng: &mut Rng, share: f64) -> List {
        let cap = self.shape.most.div_ceil(self.shape.block) + 3;
        let shape = [self.shape.batch, self.shape.kv_heads];
        let mut list = List { ids: Array::filled(&[shape[0], shape[1], cap], -7), counts: Array::filled(&shape, 0) };
        for at in array::indices(&shape) {
            let n = self.blocks(at[0]);
            let chosen = rng.subset(n, (share * n as f64).round() as usize);
            list.counts[[at[0], at[1]]] = chosen.len() as i64;
            for (j, id) in chosen.into_iter().enumerate() {
                list.ids[[at[0], at[1], j]] = id as i64;
            }
        }
        list
    }

    fn listed(&self, list: &List, i: usize, g: usize) -> BTreeSet<usize> {
        list.blocks(i, g, self.blocks(i))
    }

    /// The formula, for one query head over the tokens of some blocks.
    fn expected(&self, i: usize, h: usize, blocks: &BTreeSet<usize>) -> oracle::State {
        let g = h / self.shape.group;
        let tokens = oracle::tokens(blocks, self.shape.block, self.len(i));
        let rows: Vec<_> = tokens.iter().filter_map(|&t| self.pages().find(i, t)).collect();
        let keys: Vec<&[f64]> = rows.iter().map(|&(page, row)| self.k.row([page, row, g])).collect();
        let values: Vec<&[f64]> = rows.iter().map(|&(page, row)| self.v.row([page, row, g])).collect();
        oracle::attention(self.q.row([i, h]), &keys, &values, self.scale)
    }
}

/// A layer in memory.
struct Placed<'b> {
    q: Tensor<'b>,
    k: Tensor<'b>,
    v: Tensor<'b>,
    table: Tensor<'b>,
    lens: Tensor<'b>,
}

/// What the queries, keys and values look like in memory.
#[derive(Clone, Default)]
struct Layouts {
    q: Layout,
    kv: Layout,
    table: Layout,
}

impl Layouts {
    fn random(rng: &mut Rng) -> Layouts {
        if rng.one_in(2) {
            return Layouts::default();
        }
        let kv = if rng.one_in(4) { Layout::random(rng, 4) } else { Layout::random_rows(rng, 4) };
        Layouts { q: Layout::random(rng, 3), kv, table: Layout::random(rng, 2) }
    }
}

impl<'b> Placed<'b> {
    fn new(backend: &'b Backend, layer: &Layer, layouts: &Layouts) -> Placed<'b> {
        let lens = Array::new(&[layer.lens.len()], layer.lens.clone());
        Placed {
            q: Tensor::floats(backend, layer.shape.q_type, &layer.q, &layouts.q),
            k: Tensor::floats(backend, layer.shape.kv_type, &layer.k, &layouts.kv),
            v: Tensor::floats(backend, layer.shape.kv_type, &layer.v, &layouts.kv),
            table: Tensor::ints(backend, I32, &layer.table, &layouts.table),
            lens: Tensor::ints(backend, I32, &lens, &Layout::default()),
        }
    }

    fn kv(&self) -> vwd_paged_kv {
        vwd_paged_kv { k: self.k.c(), v: self.v.c(), page_table: self.table.c(), seq_lens: self.lens.c(), ..args() }
    }
}

struct PlacedList<'b> {
    ids: Tensor<'b>,
    counts: Tensor<'b>,
}

impl<'b> PlacedList<'b> {
    fn new(backend: &'b Backend, list: &List, rng: &mut Rng) -> PlacedList<'b> {
        PlacedList {
            ids: Tensor::ints(backend, I32, &list.ids, &Layout::random(rng, 3)),
            counts: Tensor::ints(backend, I32, &list.counts, &Layout::random(rng, 2)),
        }
    }

    fn c(&self) -> vwd_block_list {
        vwd_block_list { ids: self.ids.c(), counts: self.counts.c(), slots: absent() }
    }
}

/// Outputs of a call, poisoned before it.
struct Results<'b> {
    out: Tensor<'b>,
    lse: Tensor<'b>,
    state: [Tensor<'b>; 3],
    weight_rounding: f64,
}

impl<'b> Results<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, layer: &Layer, out_type: DType) -> Results<'b> {
        let Shape { batch, dim, .. } = layer.shape;
        let heads = layer.q.shape[1];
        let mut output =
            |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &Layout::random(rng, shape.len()));
        Results {
            out: output(out_type, &[batch, heads, dim]),
            lse: output(F32, &[batch, heads]),
            state: [output(F32, &[batch, heads, dim]), output(F32, &[batch, heads]), output(F32, &[batch, heads])],
            weight_rounding: weight_rounding(backend, layer),
        }
    }

    fn state(&self) -> vwd_attention_state {
        state_of(&self.state)
    }

    /// Everything written, as bytes.
    fn bits(&self) -> Vec<Array<Bytes>> {
        [&self.out, &self.lse].into_iter().chain(&self.state).map(Tensor::read_raw).collect()
    }

    /// Each head equals the formula over its blocks.
    fn check(&self, layer: &Layer, blocks: impl Fn(usize, usize) -> BTreeSet<usize>) {
        let (out, lse) = (self.out.read_floats(), self.lse.read_floats());
        let [acc, m, l] = self.state.each_ref().map(Tensor::read_floats);
        let of_acc = TOLERANCE + self.weight_rounding;
        for i in 0..layer.shape.batch {
            for h in 0..layer.q.shape[1] {
                let expected = layer.expected(i, h, &blocks(i, h / layer.shape.group));
                let place = format!("[{i}, {h}] of {:?}, lens {:?}", layer.shape, layer.lens);
                let rounding = |x| self.out.dtype.rounding(x);
                for (d, want) in expected.out().into_iter().enumerate() {
                    close(out[[i, h, d]], want, of_acc + rounding(want), &format!("out[{d}] at {place}"));
                }
                close(lse[[i, h]], expected.lse(), TOLERANCE, &format!("lse at {place}"));
                close(m[[i, h]], expected.m, TOLERANCE, &format!("m at {place}"));
                close(l[[i, h]], expected.l, TOLERANCE * expected.l, &format!("l at {place}"));
                for (d, want) in expected.acc.iter().enumerate() {
                    close(acc[[i, h, d]], *want, of_acc * expected.l, &format!("acc[{d}] at {place}"));
                }
            }
        }
        self.out.assert_written("out", |_| true);
        self.lse.assert_written("lse", |_| true);
    }
}

fn state_of(t: &[Tensor; 3]) -> vwd_attention_state {
    vwd_attention_state { acc: t[0].c(), m: t[1].c(), l: t[2].c() }
}

#[track_caller]
fn close(found: f64, expected: f64, tolerance: f64, what: &str) {
    let equal = found == expected || (found - expected).abs() <= tolerance;
    assert!(equal, "{what}: {found}, expected {expected} ± {tolerance}");
}

fn attention_args(layer: &Layer, placed: &Placed, results: &Results) -> vwd_attention_args {
    vwd_attention_args {
        block_size: layer.shape.block as u32,
        q: placed.q.c(),
        kv: kept(placed.kv()),
        out: results.out.c(),
        lse: results.lse.c(),
        state: results.state(),
        ..args()
    }
}

fn attend(backend: &Backend, call: &vwd_attention_args) {
    // SAFETY: the tensors of the call are alive.
    backend.finish(unsafe { vwd_attention(backend.session(), call, backend.stream()) });
}

fn repair(backend: &Backend, call: &vwd_repair_args) {
    // SAFETY: as above.
    backend.finish(unsafe { vwd_repair(backend.session(), call, backend.stream()) });
}

fn out_type(rng: &mut Rng, layer: &Layer) -> DType {
    rng.pick(&[layer.shape.q_type, F32])
}

// --- attention -------------------------------------------------------------------------------------------------------

fn attention_over_blocks_agrees_with_the_formula(backend: &Backend) {
    rounds(30, |rng| {
        let shape = Shape::random(rng);
        let layer = Layer::random(rng, shape);
        let placed = Placed::new(backend, &layer, &Layouts::random(rng));
        let share = rng.pick(&[0.0, 0.2, 0.7, 1.0]);
        let list = layer.list(rng, share);
        let listed = PlacedList::new(backend, &list, rng);
        let dtype = out_type(rng, &layer);
        let results = Results::new(backend, rng, &layer, dtype);
        attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) });
        results.check(&layer, |i, g| layer.listed(&list, i, g));
    });
}

fn attention_over_tokens_agrees_with_the_formula(backend: &Backend) {
    rounds(30, |rng| {
        let shape = Shape { block: rng.pick(&[1, 1, 2, 4]), ..Shape::random(rng) };
        let layer = Layer::random(rng, shape);
        let placed = Placed::new(backend, &layer, &Layouts::random(rng));
        let list = layer.list(rng, 0.3);
        let listed = PlacedList::new(backend, &list, rng);
        let dtype = out_type(rng, &layer);
        let results = Results::new(backend, rng, &layer, dtype);
        attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) });
        results.check(&layer, |i, g| layer.listed(&list, i, g));
    });
}

/// There are so few or so many lists that a device divides each among many of its multiprocessors, or gives it one.
fn attention_over_any_number_of_lists_agrees_with_the_formula(backend: &Backend) {
    rounds(2, |rng| {
        for (batch, kv_heads, most) in
            [(1, 1, 3000), (1, 8, 3000), (3, 5, 2000), (5, 4, 700), (9, 7, 300), (17, 8, 200)]
        {
            let kv_type = rng.pick(&[F16, BF16]);
            let (page, block) = rng.pick(&[(64, 64), (16, 16), (64, 16), (16, 64)]);
            let group = rng.pick(&[1, 3, 4, 8, 16]);
            let layer = Layer::random(
                rng,
                Shape { batch, kv_heads, group, dim: 128, page, block, most, q_type: kv_type, kv_type },
            );
            let placed = Placed::new(backend, &layer, &Layouts::default());
            let list = layer.list(rng, 0.6);
            let listed = PlacedList::new(backend, &list, rng);
            let results = Results::new(backend, rng, &layer, kv_type);
            attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) });
            results.check(&layer, |i, g| layer.listed(&list, i, g));
        }
    });
}

fn attention_without_a_list_covers_every_token(backend: &Backend) {
    rounds(30, |rng| {
        let shape = Shape::random(rng);
        let layer = Layer::random(rng, shape);
        let placed = Placed::new(backend, &layer, &Layouts::random(rng));
        let dtype = out_type(rng, &layer);
        let results = Results::new(backend, rng, &layer, dtype);
        attend(backend, &vwd_attention_args { block_size: 0, ..attention_args(&layer, &placed, &results) });
        results.check(&layer, |i, _| (0..layer.blocks(i)).collect());
    });
}

fn attention_without_a_page_table_reads_one_page_per_sequence(backend: &Backend) {
    rounds(10, |rng| {
        let shape = Shape { batch: 3, page: 203, most: 203, block: 32, ..Shape::random(rng) };
        let mut layer = Layer::random(rng, shape);
        layer.table = Array::from_fn(&[3, 1], |at| at[0] as i64);
        let placed = Placed::new(backend, &layer, &Layouts::random(rng));
        let list = layer.list(rng, 0.5);
        let listed = PlacedList::new(backend, &list, rng);
        let results = Results::new(backend, rng, &layer, F32);
        let mut call = vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) };
        call.kv = kept(vwd_paged_kv { page_table: absent(), ..placed.kv() });
        attend(backend, &call);
        results.check(&layer, |i, g| layer.listed(&list, i, g));
    });
}

/// Several positions of one sequence are rows that share its pages and differ in length.
fn attention_rows_may_share_pages_through_an_expanded_page_table(backend: &Backend) {
    rounds(10, |rng| {
        let shape = Shape { batch: 7, ..Shape::random(rng) };
        let mut layer = Layer::random(rng, shape);
        let first = layer.table.row([0]).to_vec();
        layer.table = Array::from_fn(&layer.table.shape, |at| first[at[1]]);
        layer.lens = (0..7).map(|i| layer.shape.most as i64 - 7 + i).collect();
        let layouts = Layouts { table: Layout { expanded: vec![0], ..Layout::default() }, ..Layouts::random(rng) };
        let placed = Placed::new(backend, &layer, &layouts);
        let results = Results::new(backend, rng, &layer, F32);
        attend(backend, &vwd_attention_args { block_size: 0, ..attention_args(&layer, &placed, &results) });
        results.check(&layer, |i, _| (0..layer.blocks(i)).collect());
    });
}

fn attention_survives_hostile_lists_lengths_and_pages(backend: &Backend) {
    rounds(40, |rng| {
        let shape = Shape::random(rng);
        let mut layer = Layer::random(rng, shape);
        for page in &mut layer.table.data {
            if rng.one_in(5) {
                *page = rng.pick(&[-1, i32::MIN as i64, i32::MAX as i64, layer.k.shape[0] as i64]);
            }
        }
        for len in &mut layer.lens {
            *len = rng.pick(&[*len, *len, -5, i32::MIN as i64, i32::MAX as i64, 1]);
        }
        let mut list = layer.list(rng, 0.6);
        for id in &mut list.ids.data {
            *id = rng.pick(&[*id, *id, *id, *id, 0, -1, i32::MIN as i64, i32::MAX as i64, 1_000_000]);
        }
        for row in list.ids.data.chunks_mut(list.ids.shape[2]) {
            row.sort_unstable();
        }
        for count in &mut list.counts.data {
            *count = rng.pick(&[*count, -3, i32::MIN as i64, i32::MAX as i64]);
        }
        let placed = Placed::new(backend, &layer, &Layouts::random(rng));
        let listed = PlacedList::new(backend, &list, rng);
        let results = Results::new(backend, rng, &layer, F32);
        attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) });
        results.check(&layer, |i, g| layer.listed(&list, i, g));
    });
}

/// Channels of NaN or infinity spoil the heads that read them and nothing else.
fn attention_to_nan_keys_spoils_their_own_heads_alone(backend: &Backend) {
    let mut rng = Rng::new(1);
    let shape =
        Shape { batch: 2, kv_heads: 2, group: 4, dim: 64, page: 16, block: 16, most: 200, q_type: F32, kv_type: F32 };
    let mut layer = Layer::random(&mut rng, shape);
    layer.lens = vec![200, 150];
    let (page, row) = layer.pages().find(0, 77).unwrap();
    layer.k[[page, row, 1, 3]] = f64::NAN;
    layer.k[[page, row, 1, 4]] = f64::INFINITY;
    let placed = Placed::new(backend, &layer, &Layouts::default());
    let results = Results::new(backend, &mut rng, &layer, F32);
    attend(backend, &vwd_attention_args { block_size: 0, ..attention_args(&layer, &placed, &results) });
    let out = results.out.read_floats();
    for at in array::indices(&[2, 8]) {
        let spoiled = at[0] == 0 && at[1] >= 4;
        let want = layer.expected(at[0], at[1], &(0..layer.blocks(at[0])).collect()).out();
        for (d, want) in want.into_iter().enumerate() {
            let found = out[[at[0], at[1], d]];
            if spoiled { assert!(found.is_nan()) } else { close(found, want, TOLERANCE, &format!("out{at:?}[{d}]")) }
        }
    }
}

// --- what may not change a bit ---------------------------------------------------------------------------------------

fn attention_gives_the_same_bits_wherever_in_the_batch(backend: &Backend) {
    rounds(4, |rng| {
        for dim in [64, 128, 256] {
            // The last sequence is the first once more.
            let shape = Shape { batch: 3, dim, ..Shape::random(rng) };
            let mut layer = Layer::random(rng, shape);
            let from = |i: usize| if i == 2 { 0 } else { i };
            layer.lens[2] = layer.lens[0];
            layer.q = Array::from_fn(&layer.q.shape, |at| layer.q[[from(at[0]), at[1], at[2]]]);
            layer.table = Array::from_fn(&layer.table.shape, |at| layer.table[[from(at[0]), at[1]]]);
            let list = layer.list(rng, 0.6);
            let list = List {
                ids: Array::from_fn(&list.ids.shape, |at| list.ids[[from(at[0]), at[1], at[2]]]),
                counts: Array::from_fn(&list.counts.shape, |at| list.counts[[from(at[0]), at[1]]]),
            };
            let placed = Placed::new(backend, &layer, &Layouts::default());
            let listed = PlacedList::new(backend, &list, rng);
            let results = Results::new(backend, rng, &layer, F32);
            attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) });
            for (n, bits) in results.bits().iter().enumerate() {
                assert!(bits.row([0]) == bits.row([2]), "output {n} of {:?}", layer.shape);
            }
        }
    });
}

fn attention_bits_do_not_depend_on_threads_or_on_the_batch(_: &Backend) {
    let backends = [1, 2, 5].map(Backend::cpu);
    rounds(12, |rng| {
        let shape = Shape { batch: 3, ..Shape::random(rng) };
        let layer = Layer::random(rng, shape);
        let list = layer.list(rng, 0.6);
        let seed = rng.int(0..=i64::MAX) as u64;
        let on = |backend: &Backend, layer: &Layer, list: &List| {
            let rng = &mut Rng::new(seed);
            let placed = Placed::new(backend, layer, &Layouts::default());
            let listed = PlacedList::new(backend, list, rng);
            let results = Results::new(backend, rng, layer, F32);
            attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(layer, &placed, &results) });
            results.bits()
        };
        let bits = on(&backends[0], &layer, &list);
        assert_eq!(bits, on(&backends[1], &layer, &list), "2 threads");
        assert_eq!(bits, on(&backends[2], &layer, &list), "5 threads");
        for i in 0..3 {
            let take = |a: &Array<f64>| Array::new(&[&[1], &a.shape[1..]].concat(), a.row([i]).to_vec());
            let take_ints = |a: &Array<i64>| Array::new(&[&[1], &a.shape[1..]].concat(), a.row([i]).to_vec());
            let single = Layer {
                shape: Shape { batch: 1, ..layer.shape.clone() },
                q: take(&layer.q),
                k: layer.k.clone(),
                v: layer.v.clone(),
                table: take_ints(&layer.table),
                lens: vec![layer.lens[i]],
                scale: layer.scale,
            };
            let list = List { ids: take_ints(&list.ids), counts: take_ints(&list.counts) };
            for (alone, together) in on(&backends[1], &single, &list).iter().zip(&bits) {
                assert_eq!(alone.data, together.row([i]), "sequence {i} alone");
            }
        }
    });
}
