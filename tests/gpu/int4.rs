//! Attention over tokens in INT4: in graphs, as ever more are coded, and of long sequences.

use crate::Case;
use crate::attention::{Layer, List, PAGE, REPLAYS, Shape, attend};
use crate::graph::{Graph, Written};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = &[
    ("attention_over_int4_replays_a_graph_as_codes_grow", attention_over_int4_replays_a_graph_as_codes_grow),
    (
        "attention_over_int4_follows_what_the_kernel_ahead_writes",
        attention_over_int4_follows_what_the_kernel_ahead_writes,
    ),
    ("attention_over_int4_of_many_tokens_agrees_with_the_cpu", attention_over_int4_of_many_tokens_agrees_with_the_cpu),
];

/// One for each kernel: up to four, eight and sixteen rows, and any. The first has more lists than an H200 has multiprocessors.
const SHAPES: [Shape; 4] = [
    Shape { batch: 17, kv_heads: 8, group: 4, dim: 128, blocks: 9, block: 64 },
    Shape { batch: 1, kv_heads: 2, group: 7, dim: 128, blocks: 60, block: 64 },
    Shape { batch: 5, kv_heads: 3, group: 16, dim: 128, blocks: 60, block: 16 },
    Shape { batch: 3, kv_heads: 2, group: 5, dim: 64, blocks: 24, block: 32 },
];
/// Blocks of a page of codes, and of a page of means.
const OF_PAGE: usize = 2;
const OF_MEAN_PAGE: usize = 3;

/// Codes of all tokens of a layer, and how many of them count.
struct Coded<'b> {
    shape: Shape,
    codes: [Tensor<'b>; 2],
    scales: [Tensor<'b>; 2],
    means: Tensor<'b>,
    weights: Tensor<'b>,
    lens: Tensor<'b>,
    /// The page tables of codes and of means.
    tables: [Tensor<'b>; 2],
}

impl<'b> Coded<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, shape: Shape) -> Coded<'b> {
        let (Shape { batch, kv_heads, dim, block, .. }, plain) = (shape, Layout::default());
        let [pages, mean_pages] = Self::pages(shape);
        let tokens = [batch * pages, OF_PAGE * block, kv_heads];
        let codes = [(); 2].map(|()| {
            let bytes = Array::from_fn(&[&tokens[..], &[dim / 2]].concat(), |_| rng.int(0..=255));
            Tensor::ints(backend, U8, &bytes, &plain)
        });
        let scales = [(); 2].map(|()| {
            let scales = Array::from_fn(&tokens, |_| F8E4M3.round(0.05 + 0.3 * rng.unit()));
            Tensor::floats(backend, F8E4M3, &scales, &plain)
        });
        let means = rng.normals(&[batch * mean_pages, OF_MEAN_PAGE, kv_heads, dim]);
        let weights = Array::from_fn(&[kv_heads, dim], |_| 0.5 + rng.unit());
        let table = |pages: usize| {
            let pages = Array::new(&[batch, pages], (0..(batch * pages) as i64).collect());
            Tensor::ints(backend, I32, &pages, &plain)
        };
        Coded {
            shape,
            codes,
            scales,
            means: Tensor::floats(backend, BF16, &means, &plain),
            weights: Tensor::floats(backend, F32, &weights, &plain),
            lens: Tensor::ints(backend, I32, &Array::filled(&[batch], 0), &plain),
            tables: [table(pages), table(mean_pages)],
        }
    }

    /// Pages of a sequence: of codes and of means.
    fn pages(shape: Shape) -> [usize; 2] {
        [OF_PAGE, OF_MEAN_PAGE].map(|blocks| shape.blocks.div_ceil(blocks))
    }

    /// Pages in another order.
    fn orders(&self, rng: &mut Rng) -> [Vec<i64>; 2] {
        Self::pages(self.shape).map(|pages| {
            let mut order: Vec<i64> = (0..(self.shape.batch * pages) as i64).collect();
            rng.shuffle(&mut order);
            order
        })
    }

    fn c(&self) -> vwd_int4_kv {
        vwd_int4_kv {
            block_size: self.shape.block as u32,
            exact_tokens: self.shape.block as u32,
            k: self.codes[0].c(),
            v: self.codes[1].c(),
            k_scale: self.scales[0].c(),
            v_scale: self.scales[1].c(),
            page_table: self.tables[0].c(),
            coded_lens: self.lens.c(),
            means: self.means.c(),
            mean_table: self.tables[1].c(),
            weights: self.weights.c(),
            ..args()
        }
    }

    /// Over a list, or over all tokens.
    fn attention(&self, layer: &Layer, list: Option<&List>, out: &Tensor) -> vwd_attention_args {
        let kv = vwd_paged_kv { int4: kept(self.c()), ..layer.kv() };
        let none = vwd_block_list { ids: absent(), counts: absent(), slots: absent() };
        vwd_attention_args {
            block_size: if list.is_some() { self.shape.block as u32 } else { 0 },
            q: layer.q.c(),
            kv: kept(kv),
            list: list.map_or(none, List::c),
            out: out.c(),
            ..args()
        }
    }
}

/// A replay gives the bits of a call with the same contents: lists, lengths and tables change at times, and in between codes alone grow,
/// which changes the result.
fn attention_over_int4_replays_a_graph_as_codes_grow(backend: &Backend) {
    for shape in SHAPES {
        rounds(1, |rng| {
            let layer = Layer::new(backend, rng, shape);
            let (coded, list) = (Coded::new(backend, rng, shape), layer.list(backend));
            let [replayed, called] = [0; 2].map(|_| [0; 2].map(|_| layer.outputs(backend)));
            let calls = |[listed, dense]: &[Tensor; 2]| {
                [coded.attention(&layer, Some(&list), listed), coded.attention(&layer, None, dense)]
            };
            let (in_graph, eager) = (calls(&replayed), calls(&called));
            let attend_both = |calls: &[vwd_attention_args; 2]| calls.iter().for_each(|call| attend(backend, call));
            attend_both(&eager);
            let graph = Graph::capture(backend.stream().cast(), || attend_both(&in_graph));
            let (mut lens, mut before) = (vec![0; shape.batch], [vec![], vec![]]);
            let mut grown_and_changed = [0; 2];
            for replay in 0..backend.times(REPLAYS) {
                let grows = replay % 4 != 0;
                if grows {
                    lens.iter_mut().for_each(|len| *len += rng.int(1..=(shape.block * shape.blocks / 2) as i64));
                } else {
                    lens.fill(-3);
                    layer.refill(rng, &list);
                    // The first sequence has all tokens.
                    let all = (shape.blocks * shape.block) as i64;
                    layer.lens.refill_ints(&Array::from_fn(&[shape.batch], |at| {
                        if at[0] == 0 { all } else { rng.int(0..=all) }
                    }));
                    for (table, order) in coded.tables.iter().zip(coded.orders(rng)) {
                        table.refill_ints(&Array::new(&[shape.batch, order.len() / shape.batch], order));
                    }
                }
                coded.lens.refill_ints(&Array::new(&[shape.batch], lens.clone()));
                replayed.iter().chain(&called).for_each(Tensor::repoison);
                attend_both(&eager);
                graph.replay();
                for n in 0..2 {
                    let found = replayed[n].read_memory();
                    assert!(found == called[n].read_memory(), "replay {replay} of {shape:?}");
                    grown_and_changed[n] += (grows && found != before[n]) as usize;
                    before[n] = found;
                }
            }
            assert!(grown_and_changed.iter().all(|&count| count > 0), "codes are not read: {shape:?}");
        });
    }
}

/// Lengths and pages, of tokens and of codes, change in the kernel just ahead: what is guessed before it ends is wrong. The results have the
/// bits of calls for which all was there.
fn attention_over_int4_follows_what_the_kernel_ahead_writes(backend: &Backend) {
    for shape in SHAPES {
        rounds(1, |rng| {
            let layer = Layer::new(backend, rng, shape);
            let (coded, list) = (Coded::new(backend, rng, shape), layer.list(backend));
            let Shape { batch, blocks, block, .. } = shape;
            let written = [&layer.lens, &layer.table, &coded.lens, &coded.tables[0], &coded.tables[1]];
            let ahead = written.map(|of| Written::new(backend, of));
            let [replayed, called] = [0; 2].map(|_| [0; 2].map(|_| layer.outputs(backend)));
            let enqueue = |[listed, dense]: &[Tensor; 2], ahead: &[Written]| {
                for (list, out) in [(Some(&list), listed), (None, dense)] {
                    ahead.iter().for_each(Written::enqueue);
                    attend(backend, &coded.attention(&layer, list, out));
                }
            };
            enqueue(&called, &[]);
            let graph = Graph::capture(backend.stream().cast(), || enqueue(&replayed, &ahead));
            let mut pages: Vec<i64> = (0..(batch * (blocks * block).div_ceil(PAGE)) as i64).collect();
            for replay in 0..backend.times(100) {
                layer.refill(rng, &list);
                rng.shuffle(&mut pages);
                let [lens, coded_lens] =
                    [0; 2].map(|_| (0..batch).map(|_| rng.int(0..=(blocks * block) as i64)).collect::<Vec<i64>>());
                let [of_codes, of_means] = coded.orders(rng);
                for (written, numbers) in ahead.iter().zip([&lens, &pages, &coded_lens, &of_codes, &of_means]) {
                    written.set(numbers);
                }
                replayed.iter().chain(&called).for_each(Tensor::repoison);
                graph.replay();
                enqueue(&called, &[]);
                backend.finish(0);
                for (a, b) in replayed.iter().zip(&called) {
                    assert!(a.read_memory() == b.read_memory(), "replay {replay} of {shape:?}");
                }
            }
        });
    }
}

/// A long sequence. The first block and the last 128 tokens are exact; the cache has no other pages.
struct Long<'b> {
    coded: Coded<'b>,
    k: Tensor<'b>,
    v: Tensor<'b>,
    table: Tensor<'b>,
    lens: Tensor<'b>,
}

impl<'b> Long<'b> {
    const HEADS: [usize; 2] = [2, 4];
    const DIM: usize = 128;
    const BLOCK: usize = 64;

    fn new(backend: &'b Backend, tokens: usize) -> Long<'b> {
        let (rng, plain, [kv_heads, group]) = (&mut Rng::new(tokens as u64), Layout::default(), Self::HEADS);
        let blocks = tokens / Self::BLOCK;
        let shape = Shape { batch: 1, kv_heads, group, dim: Self::DIM, blocks, block: Self::BLOCK };
        let [pages, mean_pages] = Coded::pages(shape);
        let of_page = [pages, OF_PAGE * Self::BLOCK, kv_heads];
        let codes = [(); 2].map(|()| {
            let bytes = rng.bytes(of_page.iter().product::<usize>() * Self::DIM / 2);
            Tensor::raw(backend, U8, &[&of_page[..], &[Self::DIM / 2]].concat(), &bytes, &plain)
        });
        let scales = [(); 2].map(|()| {
            // From .06 to .34.
            let bytes = rng.bytes(of_page.iter().product()).into_iter().map(|byte| 0x18 + byte % 20);
            Tensor::raw(backend, F8E4M3, &of_page, &bytes.collect::<Vec<u8>>(), &plain)
        });
        let means = rng.normals(&[mean_pages, OF_MEAN_PAGE, kv_heads, Self::DIM]);
        let weights = Array::from_fn(&[kv_heads, Self::DIM], |_| 0.5 + rng.unit());
        let column = |number: usize| Tensor::ints(backend, I32, &Array::filled(&[1], number as i64), &plain);
        let tables = [pages, mean_pages].map(|pages| {
            let mut order: Vec<i64> = (0..pages as i64).collect();
            rng.shuffle(&mut order);
            Tensor::ints(backend, I32, &Array::new(&[1, pages], order), &plain)
        });
        let coded = Coded {
            shape,
            codes,
            scales,
            means: Tensor::floats(backend, BF16, &means, &plain),
            weights: Tensor::floats(backend, F32, &weights, &plain),
            // Blocks are coded as a whole.
            lens: column(tokens - 2 * Self::BLOCK + 40),
            tables,
        };
        let mut floats = || Tensor::floats(backend, BF16, &rng.normals(&[4, Self::BLOCK, kv_heads, Self::DIM]), &plain);
        let page = |at: &[usize]| match at[1] {
            0 => 2,
            n if n + 2 >= blocks => (n + 2 - blocks) as i64,
            _ => -1,
        };
        Long {
            coded,
            k: floats(),
            v: floats(),
            table: Tensor::ints(backend, I32, &Array::from_fn(&[1, blocks], page), &plain),
            lens: column(tokens),
        }
    }

    /// out and lse of these queries, [1, positions, Hq, D].
    fn attend(&self, backend: &Backend, q: &Array<f64>, scale: f32) -> [Array<f64>; 2] {
        let plain = Layout::default();
        let q_tensor = Tensor::floats(backend, BF16, q, &plain);
        let out = Tensor::poisoned(backend, BF16, &q.shape, &plain);
        let lse = Tensor::poisoned(backend, F32, &q.shape[..3], &plain);
        let kv = vwd_paged_kv {
            k: self.k.c(),
            v: self.v.c(),
            page_table: self.table.c(),
            seq_lens: self.lens.c(),
            int4: kept(self.coded.c()),
            ..args()
        };
        let call = vwd_attention_args { scale, q: q_tensor.c(), kv: kept(kv), out: out.c(), lse: lse.c(), ..args() };
        attend(backend, &call);
        backend.finish(VWD_OK);
        [out.read_floats(), lse.read_floats()]
    }
}

/// All tokens of a sequence for one position, and for nine, as a verification of eight drafts has them. At the larger scale few tokens have most of
/// a row's weight, each row its own ones; at the smaller one all have some, and lse tells of any that are left out.
fn attention_over_int4_of_many_tokens_agrees_with_the_cpu(backend: &Backend) {
    let is_emulated = backend.times(1000) < 1000;
    let tokens = if is_emulated { 8192 } else { 131_072 };
    let threads = std::thread::available_parallelism().map_or(2, |threads| threads.get() as u32);
    let cpu = Backend::cpu(threads);
    let there = Long::new(&cpu, tokens);
    let variants = [("int4_128", 90..=u32::MAX, 1), ("int4_verify128", 90..=90, 9), ("int4_mma", 0..=u32::MAX, 9)];
    for (variant, capabilities, positions) in variants {
        let forced = format!("attention={variant}");
        let Some(backend) = backend.forcing(&forced, capabilities) else { continue };
        let here = Long::new(&backend, tokens);
        let heads: usize = Long::HEADS.iter().product();
        let q = Rng::new(positions as u64).normals(&[1, positions, heads, Long::DIM]).map(|&x| BF16.round(x));
        for scale in [0.09, 0.35] {
            let [[out, lse], [want_out, want_lse]] = [here.attend(&backend, &q, scale), there.attend(&cpu, &q, scale)];
            // What a score is off by, the root of the squares' sum: the turned query is rounded to float16, weights are below 1.5,
            // scales below .35 and codes up to 7.5. A query of 128 channels is shorter than 15.
            let of_score = f64::from(scale) * 15.0 * 1.5 * 0.35 * 7.5 * F16.rounding(1.0);
            let check = |name: &str, found: &Array<f64>, want: &Array<f64>, tolerance: f64| {
                for (n, (&x, &y)) in found.data.iter().zip(&want.data).enumerate() {
                    let is_close = (x - y).abs() <= tolerance + 2.0 * BF16.rounding(y);
                    assert!(is_close, "{name}[{n}] of {positions} positions, scale {scale}: {x}, on the CPU {y}");
                }
            };
            // Values are a few units.
            check("out", &out, &want_out, 4.0 * of_score);
            check("lse", &lse, &want_lse, of_score);
        }
        backend.assert_ran(&forced);
    }
}
