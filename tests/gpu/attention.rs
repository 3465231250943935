//! Attention and repair in graphs, with lists and lengths that change between replays.

use crate::Case;
use crate::graph::{Graph, Written, check};
use crate::support::*;
use cudarc::driver::result::stream::{StreamKind, create, destroy, synchronize};
use cudarc::driver::sys;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("attention_replays_a_graph_with_changed_lists_and_lengths", attention_replays_a_graph_with_changed_lists),
    ("repair_replays_a_graph_with_changed_lists_and_lengths", repair_replays_a_graph_with_changed_lists),
    ("attention_follows_what_the_kernel_ahead_writes", attention_follows_what_the_kernel_ahead_writes),
    ("attention_ends_though_its_contents_change", attention_ends_though_its_contents_change),
];

pub const REPLAYS: usize = 500;
pub const PAGE: usize = 16;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub batch: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub dim: usize,
    pub blocks: usize,
    pub block: usize,
}

/// Keys, values and queries, and a list whose contents change.
pub struct Layer<'b> {
    shape: Shape,
    pub q: Tensor<'b>,
    k: Tensor<'b>,
    v: Tensor<'b>,
    pub table: Tensor<'b>,
    pub lens: Tensor<'b>,
}

/// A list with room for a third of the blocks.
pub struct List<'b> {
    ids: Tensor<'b>,
    counts: Tensor<'b>,
}

impl List<'_> {
    pub fn c(&self) -> vwd_block_list {
        vwd_block_list { ids: self.ids.c(), counts: self.counts.c(), slots: absent() }
    }
}

impl<'b> Layer<'b> {
    pub fn new(backend: &'b Backend, rng: &mut Rng, shape: Shape) -> Layer<'b> {
        let Shape { batch, kv_heads, group, dim, blocks, block } = shape;
        let of_sequence = (blocks * block).div_ceil(PAGE);
        let mut pages: Vec<i64> = (0..(batch * of_sequence) as i64).collect();
        rng.shuffle(&mut pages);
        let plain = Layout::default();
        let mut floats = |shape: &[usize]| Tensor::floats(backend, BF16, &rng.normals(shape), &plain);
        let kv = [pages.len(), PAGE, kv_heads, dim];
        Layer {
            shape,
            q: floats(&[batch, kv_heads * group, dim]),
            k: floats(&kv),
            v: floats(&kv),
            table: Tensor::ints(backend, I32, &Array::new(&[batch, of_sequence], pages), &plain),
            lens: Tensor::ints(backend, I32, &Array::filled(&[batch], 0), &plain),
        }
    }

    pub fn list(&self, backend: &'b Backend) -> List<'b> {
        let (of_lists, plain) = ([self.shape.batch, self.shape.kv_heads], Layout::default());
        List {
            ids: Tensor::ints(backend, I32, &Array::filled(&[of_lists[0], of_lists[1], self.cap()], 0), &plain),
            counts: Tensor::ints(backend, I32, &Array::filled(&of_lists, 0), &plain),
        }
    }

    fn cap(&self) -> usize {
        self.shape.blocks / 3
    }

    pub fn outputs(&self, backend: &'b Backend) -> Tensor<'b> {
        let Shape { batch, kv_heads, group, dim, .. } = self.shape;
        Tensor::poisoned(backend, BF16, &[batch, kv_heads * group, dim], &Layout::default())
    }

    /// Lengths from none to all.
    pub fn refill_lens(&self, rng: &mut Rng) {
        let most = (self.shape.blocks * self.shape.block) as i64;
        self.lens
            .refill_ints(&Array::from_fn(&[self.shape.batch], |_| if rng.one_in(9) { 0 } else { rng.int(1..=most) }));
    }

    /// Lists from empty to full, some of whose blocks lie past the end.
    pub fn refill(&self, rng: &mut Rng, list: &List) {
        let Shape { batch, kv_heads, blocks, .. } = self.shape;
        let mut ids = Array::filled(&[batch, kv_heads, self.cap()], -7);
        let counts = Array::from_fn(&[batch, kv_heads], |at| {
            let count = rng.size(0..=self.cap());
            for (j, id) in rng.subset(blocks, count).into_iter().enumerate() {
                ids[[at[0], at[1], j]] = id as i64;
            }
            count as i64
        });
        list.ids.refill_ints(&ids);
        list.counts.refill_ints(&counts);
    }

    pub fn kv(&self) -> vwd_paged_kv {
        vwd_paged_kv { k: self.k.c(), v: self.v.c(), page_table: self.table.c(), seq_lens: self.lens.c(), ..args() }
    }

    fn attention(&self, list: &List, out: &Tensor) -> vwd_attention_args {
        let block_size = self.shape.block as u32;
        vwd_attention_args { block_size, q: self.q.c(), kv: kept(self.kv()), list: list.c(), out: out.c(), ..args() }
    }
}

/// One for each way through the device: lists of few CTAs and of many, more lists than multiprocessors, and heads for which
/// a kernel cuts all lists first.
const SHAPES: [Shape; 4] = [
    Shape { batch: 1, kv_heads: 8, group: 4, dim: 128, blocks: 96, block: 64 },
    Shape { batch: 5, kv_heads: 3, group: 16, dim: 128, blocks: 60, block: 16 },
    Shape { batch: 20, kv_heads: 8, group: 1, dim: 128, blocks: 24, block: 32 },
    Shape { batch: 17, kv_heads: 2, group: 5, dim: 64, blocks: 60, block: 8 },
];

pub fn attend(backend: &Backend, call: &vwd_attention_args) {
    // SAFETY: the tensors of the call outlive it, and the graph that has it.
    assert_ok(unsafe { vwd_attention(backend.session(), call, backend.stream()) });
}

/// A replay gives the bits of a call with the same contents.
fn attention_replays_a_graph_with_changed_lists(backend: &Backend) {
    for shape in SHAPES {
        rounds(1, |rng| {
            let layer = Layer::new(backend, rng, shape);
            let list = layer.list(backend);
            let [out, want] = [0; 2].map(|_| layer.outputs(backend));
            let (replayed, called) = (layer.attention(&list, &out), layer.attention(&list, &want));
            attend(backend, &called);
            let graph = Graph::capture(backend.stream().cast(), || attend(backend, &replayed));
            for replay in 0..backend.times(REPLAYS) {
                layer.refill(rng, &list);
                layer.refill_lens(rng);
                out.repoison();
                want.repoison();
                attend(backend, &called);
                graph.replay();
                assert!(
                    out.read_memory() == want.read_memory(),
                    "replay {replay} of {} lists",
                    shape.batch * shape.kv_heads
                );
            }
        });
    }
}

/// Speculative attention and exact repair in one graph give attention to what was selected: within the rounding of the
/// weights and of the result, which are bfloat16, relative to values of a few units.
fn repair_replays_a_graph_with_changed_lists(backend: &Backend) {
    for shape in SHAPES {
        rounds(1, |rng| {
            let layer = Layer::new(backend, rng, shape);
            let [predicted, selected] = [0; 2].map(|_| layer.list(backend));
            let [first, out, want] = [0; 3].map(|_| layer.outputs(backend));
            let Shape { batch, kv_heads, group, dim, .. } = shape;
            let new = |rest: &[usize]| {
                let shape = [&[batch, kv_heads * group, layer.cap()], rest].concat();
                Tensor::poisoned(backend, F32, &shape, &Layout::default())
            };
            let (acc, m, l) = (new(&[dim]), new(&[]), new(&[]));
            let partials = vwd_attention_partials { acc: acc.c(), m: m.c(), l: l.c() };
            let speculation = vwd_attention_args { partials, ..layer.attention(&predicted, &first) };
            let repair = vwd_repair_args {
                mode: VWD_REPAIR_EXACT,
                block_size: shape.block as u32,
                kv: kept(layer.kv()),
                q: layer.q.c(),
                predicted: predicted.c(),
                selected: selected.c(),
                predicted_partials: partials,
                out: out.c(),
                ..args()
            };
            let enqueue = || {
                attend(backend, &speculation);
                // SAFETY: the tensors outlive the graph.
                assert_ok(unsafe { vwd_repair(backend.session(), &repair, backend.stream()) });
            };
            enqueue();
            let graph = Graph::capture(backend.stream().cast(), enqueue);
            let direct = layer.attention(&selected, &want);
            for replay in 0..backend.times(REPLAYS) {
                for list in [&predicted, &selected] {
                    layer.refill(rng, list);
                }
                layer.refill_lens(rng);
                out.repoison();
                want.repoison();
                attend(backend, &direct);
                graph.replay();
                let (found, want) = (out.read_floats(), want.read_floats());
                for (n, (x, y)) in found.data.iter().zip(&want.data).enumerate() {
                    assert!((x - y).abs() <= 0.03 + 0.01 * y.abs(), "element {n}: {x}, not {y}, replay {replay}");
                }
            }
        });
    }
}

/// Lengths and pages change in the kernel just ahead of attention, and of repair: what is guessed before it ends is wrong. The results have
/// the bits of calls for which all was there.
fn attention_follows_what_the_kernel_ahead_writes(backend: &Backend) {
    for shape in SHAPES {
        rounds(1, |rng| {
            let layer = Layer::new(backend, rng, shape);
            let [predicted, selected] = [0; 2].map(|_| layer.list(backend));
            let Shape { batch, kv_heads, group, dim, blocks, block } = shape;
            let new = |rest: &[usize]| {
                let shape = [&[batch, kv_heads * group, layer.cap()], rest].concat();
                Tensor::poisoned(backend, F32, &shape, &Layout::default())
            };
            let (acc, m, l) = (new(&[dim]), new(&[]), new(&[]));
            let partials = vwd_attention_partials { acc: acc.c(), m: m.c(), l: l.c() };
            let enqueue = |[first, second]: &[Tensor; 2], ahead: &[Written]| {
                ahead.iter().for_each(Written::enqueue);
                attend(backend, &vwd_attention_args { partials, ..layer.attention(&predicted, first) });
                ahead.iter().for_each(Written::enqueue);
                let repair = vwd_repair_args {
                    mode: VWD_REPAIR_EXACT,
                    block_size: block as u32,
                    kv: kept(layer.kv()),
                    q: layer.q.c(),
                    predicted: predicted.c(),
                    selected: selected.c(),
                    predicted_partials: partials,
                    out: second.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the graph.
                assert_ok(unsafe { vwd_repair(backend.session(), &repair, backend.stream()) });
            };
            let [replayed, called] = [0; 2].map(|_| [0; 2].map(|_| layer.outputs(backend)));
            let ahead = [&layer.lens, &layer.table].map(|of| Written::new(backend, of));
            enqueue(&called, &[]);
            let graph = Graph::capture(backend.stream().cast(), || enqueue(&replayed, &ahead));
            let of_sequence = (blocks * block).div_ceil(PAGE);
            let mut pages: Vec<i64> = (0..(batch * of_sequence) as i64).collect();
            for replay in 0..backend.times(100) {
                for list in [&predicted, &selected] {
                    layer.refill(rng, list);
                }
                rng.shuffle(&mut pages);
                let lens: Vec<i64> = (0..batch).map(|_| rng.int(0..=(blocks * block) as i64)).collect();
                for (written, numbers) in ahead.iter().zip([&lens, &pages]) {
                    written.set(numbers);
                }
                replayed.iter().chain(&called).for_each(Tensor::repoison);
                graph.replay();
                enqueue(&called, &[]);
                backend.finish(0);
                for (a, b) in replayed.iter().zip(&called) {
                    assert!(a.read_memory() == b.read_memory(), "replay {replay} of {} lists", batch * kv_heads);
                }
            }
        });
    }
}

/// Lengths, counts and lists change while attention of one to nine query positions runs, over lists and over all tokens: a caller's mistake,
/// which may cost these calls their results. They end, read what is theirs, and leave calls that come later their bits.
fn attention_ends_though_its_contents_change(backend: &Backend) {
    let shapes = [Shape { batch: 2, blocks: 512, ..SHAPES[0] }, Shape { batch: 9, ..SHAPES[0] }];
    for shape in SHAPES.into_iter().chain(shapes) {
        rounds(1, |rng| {
            let layer = Layer::new(backend, rng, shape);
            let list = layer.list(backend);
            for positions in [1, 2, 9] {
                let q_shape = [shape.batch, positions, shape.kv_heads * shape.group, shape.dim];
                let q = Tensor::floats(backend, BF16, &rng.normals(&q_shape), &Layout::default());
                let outs = [0; 2].map(|_| Tensor::poisoned(backend, BF16, &q_shape, &Layout::default()));
                // A list of rank 3 is shared by the query positions.
                let over_list = layer.attention(&list, &outs[1]);
                let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
                let dense = vwd_attention_args { block_size: 0, list: none, out: outs[0].c(), ..over_list };
                let calls = [over_list, dense].map(|call| vwd_attention_args { q: q.c(), ..call });
                let attend_both = || calls.iter().for_each(|call| attend(backend, call));
                layer.refill(rng, &list);
                layer.refill_lens(rng);
                attend_both();
                backend.finish(0);
                let before = outs.each_ref().map(Tensor::read_memory);
                let contents = [&layer.lens, &list.counts, &list.ids];
                let right = contents.map(Tensor::read_ints);
                let refill = |rng: &mut Rng| {
                    layer.refill(rng, &list);
                    layer.refill_lens(rng);
                };
                disturb(backend, rng, &contents, refill, attend_both);
                for (of, numbers) in contents.into_iter().zip(&right) {
                    of.refill_ints(numbers);
                }
                outs.iter().for_each(Tensor::repoison);
                attend_both();
                backend.finish(0);
                for (out, before) in outs.iter().zip(&before) {
                    let lists = shape.batch * shape.kv_heads;
                    assert!(out.read_memory() == *before, "{positions} positions, {lists} lists");
                }
            }
        });
    }
}

/// Runs `enqueue` often while another stream writes one of several contents to each tensor, again and again.
pub fn disturb(backend: &Backend, rng: &mut Rng, tensors: &[&Tensor], refill: impl Fn(&mut Rng), enqueue: impl Fn()) {
    let kept: Vec<Vec<_>> = (0..4)
        .map(|_| {
            refill(rng);
            tensors.iter().map(|of| backend.place(&of.read_memory())).collect()
        })
        .collect();
    let bytes: Vec<usize> = tensors.iter().map(|of| of.read_memory().len()).collect();
    let other = create(StreamKind::NonBlocking).unwrap();
    for round in 0..backend.times(300) {
        for (n, of) in tensors.iter().enumerate() {
            for contents in [&kept[round % 4], &kept[(round + 1 + n) % 4]] {
                let (to, from) = (of.c().data as u64, contents[n].address() as u64);
                // SAFETY: both hold as many bytes, and live until the stream has passed.
                check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes[n], other) });
            }
        }
        enqueue();
    }
    backend.finish(0);
    // SAFETY: the stream is this function's.
    unsafe {
        synchronize(other).unwrap();
        destroy(other).unwrap();
    }
}
