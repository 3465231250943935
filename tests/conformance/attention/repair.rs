//! Partials, vwd_merge_states and vwd_repair: agreement with the formulas over every layout and size.

use super::*;

pub const CASES: &[Case] = cases![
    attention_partials_are_the_states_of_their_groups,
    attention_partials_of_any_number_of_blocks_are_their_states,
    repair_superset_covers_predicted_and_selected_blocks,
    repair_exact_covers_the_selected_blocks_alone,
    repair_exact_attends_again_groups_with_a_block_predicted_in_vain,
    repair_of_any_share_missed_agrees_with_the_formula,
    repair_repeated_gives_the_same_bits,
    repair_gives_the_same_bits_wherever_in_the_batch,
    merge_of_disjoint_lists_is_the_state_of_their_union,
    merge_agrees_with_the_formula,
];

/// One state per group of entries.
fn partials<'b>(backend: &'b Backend, rng: &mut Rng, layer: &Layer, cap: usize, group: usize) -> [Tensor<'b>; 3] {
    let (batch, heads, n) = (layer.shape.batch, layer.q.shape[1], cap.div_ceil(group));
    let mut output = |shape: &[usize]| Tensor::poisoned(backend, F32, shape, &Layout::random(rng, shape.len()));
    [output(&[batch, heads, n, layer.shape.dim]), output(&[batch, heads, n]), output(&[batch, heads, n])]
}

fn partials_of(t: &[Tensor; 3]) -> vwd_attention_partials {
    vwd_attention_partials { acc: t[0].c(), m: t[1].c(), l: t[2].c() }
}

fn attention_partials_are_the_states_of_their_groups(backend: &Backend) {
    rounds(30, |rng| {
        let group = rng.pick(&[1, 1, 2, 3, 5]);
        let shape = Shape::random(rng);
        let block = rng.pick(&[shape.block, shape.block, 1]);
        let layer = Layer::random(rng, Shape { block, ..shape });
        let layouts = Layouts::random(rng);
        check_partials(backend, rng, &layer, &layouts, group);
    });
}

fn attention_partials_of_any_number_of_blocks_are_their_states(backend: &Backend) {
    rounds(10, |rng| {
        let (block, blocks) = (rng.pick(&[16, 32, 64, 128]), rng.pick(&[2, 8, 40, 300]));
        let (kv_heads, group, kv_type) = (rng.pick(&[1, 3]), rng.pick(&[1, 4, 8, 12]), rng.pick(&[F16, BF16]));
        let (page, most) = (rng.pick(&[16, 64]), (blocks * block).min(5000));
        let layer = Layer::random(
            rng,
            Shape { batch: 1, kv_heads, group, dim: 128, page, block, most, q_type: kv_type, kv_type },
        );
        let entries = rng.pick(&[1, 1, 3]);
        check_partials(backend, rng, &layer, &Layouts::default(), entries);
    });
}

/// Checks the states of a list of half of the blocks, `group` of which share one.
fn check_partials(backend: &Backend, rng: &mut Rng, layer: &Layer, layouts: &Layouts, group: usize) {
    let placed = Placed::new(backend, layer, layouts);
    let list = layer.list(rng, 0.5);
    let listed = PlacedList::new(backend, &list, rng);
    let results = Results::new(backend, rng, layer, F32);
    let kept = partials(backend, rng, layer, list.ids.shape[2], group);
    attend(
        backend,
        &vwd_attention_args {
            list: listed.c(),
            partial_blocks: group as u32,
            partials: partials_of(&kept),
            ..attention_args(layer, &placed, &results)
        },
    );
    results.check(layer, |i, g| layer.listed(&list, i, g));
    let [acc, m, l] = kept.each_ref().map(Tensor::read_floats);
    let groups = |i: usize, h: usize| (list.counts[[i, h / layer.shape.group]] as usize).div_ceil(group);
    for at in array::indices(&m.shape) {
        let [i, h, n] = [at[0], at[1], at[2]];
        let ids = list.ids.row([i, h / layer.shape.group]);
        let count = list.counts[[i, h / layer.shape.group]] as usize;
        if n < groups(i, h) {
            let members = ids[n * group..count.min((n + 1) * group)].iter().map(|&id| id as usize).collect();
            let want = layer.expected(i, h, &members);
            close(m[[i, h, n]], want.m, TOLERANCE, "m");
            close(l[[i, h, n]], want.l, TOLERANCE * want.l, "l");
            close(acc[[i, h, n, 0]], want.acc[0], (TOLERANCE + results.weight_rounding) * want.l, "acc");
        }
    }
    for t in &kept {
        t.assert_written("partials", |at| at[2] < groups(at[0], at[1]));
    }
}

/// A list as long as another, or a share of that, which has `overlap` of its blocks from there.
fn alike(rng: &mut Rng, layer: &Layer, list: &List, length: f64, overlap: f64) -> List {
    let mut other = list.clone();
    for at in array::indices(&list.counts.shape) {
        let (i, g) = (at[0], at[1]);
        let (n, all) = (layer.blocks(i), list.counts[[i, g]] as usize);
        let count = (length * all as f64).round() as usize;
        let from = layer.listed(list, i, g).into_iter().collect::<Vec<_>>();
        let rest: Vec<usize> = (0..n).filter(|b| !from.contains(b)).collect();
        let keep = (overlap * count as f64).round() as usize;
        let mut blocks: Vec<usize> = rng.subset(all, keep).into_iter().map(|j| from[j]).collect();
        blocks.extend(rng.subset(rest.len(), (count - keep).min(rest.len())).into_iter().map(|j| rest[j]));
        blocks.sort_unstable();
        other.counts[[i, g]] = blocks.len() as i64;
        for (j, block) in blocks.into_iter().enumerate() {
            other.ids[[i, g, j]] = block as i64;
        }
    }
    other
}

struct Prediction<'b> {
    layer: Layer,
    placed: Placed<'b>,
    predicted: List,
    selected: List,
    lists: [PlacedList<'b>; 2],
    missed: Tensor<'b>,
}

impl<'b> Prediction<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, block: Option<usize>) -> Prediction<'b> {
        let shape = Shape::random(rng);
        let layer = Layer::random(rng, Shape { block: block.unwrap_or(shape.block), ..shape });
        let layouts = Layouts::random(rng);
        let (share, overlap) = (rng.pick(&[0.0, 0.3, 0.5, 0.9]), rng.pick(&[0.0, 0.3, 0.7, 0.95, 1.0]));
        let predicted = layer.list(rng, share);
        let length = rng.pick(&[1.0, 1.0, 0.7]);
        let selected = alike(rng, &layer, &predicted, length, overlap);
        Prediction::new(backend, rng, layer, &layouts, [predicted, selected])
    }

    fn new(
        backend: &'b Backend,
        rng: &mut Rng,
        layer: Layer,
        layouts: &Layouts,
        [predicted, selected]: [List; 2],
    ) -> Prediction<'b> {
        let placed = Placed::new(backend, &layer, layouts);
        let lists = [PlacedList::new(backend, &predicted, rng), PlacedList::new(backend, &selected, rng)];
        let missed =
            Tensor::poisoned(backend, I32, &[layer.shape.batch, layer.shape.kv_heads], &Layout::random(rng, 2));
        Prediction { layer, placed, predicted, selected, lists, missed }
    }

    fn attention(&self, list: usize, results: &Results) -> vwd_attention_args {
        vwd_attention_args { list: self.lists[list].c(), ..attention_args(&self.layer, &self.placed, results) }
    }

    fn repair(&self, mode: u32, results: &Results) -> vwd_repair_args {
        vwd_repair_args {
            mode,
            block_size: self.layer.shape.block as u32,
            q: self.placed.q.c(),
            kv: kept(self.placed.kv()),
            predicted: self.lists[0].c(),
            selected: self.lists[1].c(),
            out: results.out.c(),
            lse: results.lse.c(),
            state: results.state(),
            missed_counts: self.missed.c(),
            ..args()
        }
    }

    fn covered(&self, exact: bool) -> impl Fn(usize, usize) -> (BTreeSet<usize>, usize) + '_ {
        move |i, g| {
            let [predicted, selected] = [&self.predicted, &self.selected].map(|list| self.layer.listed(list, i, g));
            oracle::repair(&predicted, &selected, exact)
        }
    }

    fn check(&self, exact: bool, results: &Results) {
        let covered = self.covered(exact);
        results.check(&self.layer, |i, g| covered(i, g).0);
        for at in array::indices(&self.missed.shape) {
            assert_eq!(self.missed.read_ints()[[at[0], at[1]]], covered(at[0], at[1]).1 as i64, "missed_counts{at:?}");
        }
    }
}

fn repair_superset_covers_predicted_and_selected_blocks(backend: &Backend) {
    rounds(25, |rng| {
        let block = rng.pick(&[None, None, Some(1)]);
        let case = Prediction::random(backend, rng, block);
        let first = Results::new(backend, rng, &case.layer, F32);
        attend(backend, &case.attention(0, &first));
        // Into a state of its own, or in place.
        let in_place = rng.one_in(2);
        let mut results = Results::new(backend, rng, &case.layer, F32);
        let mut call = case.repair(VWD_REPAIR_SUPERSET, &results);
        call.predicted_state = first.state();
        if in_place {
            call.state = first.state();
        }
        repair(backend, &call);
        if in_place {
            results.state = first.state;
        }
        case.check(false, &results);
    });
}

fn repair_exact_covers_the_selected_blocks_alone(backend: &Backend) {
    rounds(30, |rng| {
        let case = Prediction::random(backend, rng, None);
        let dtype = out_type(rng, &case.layer);
        let first = Results::new(backend, rng, &case.layer, dtype);
        let kept = partials(backend, rng, &case.layer, case.predicted.ids.shape[2], 1);
        attend(backend, &vwd_attention_args { partials: partials_of(&kept), ..case.attention(0, &first) });
        let repaired = Results::new(backend, rng, &case.layer, dtype);
        let call = case.repair(VWD_REPAIR_EXACT, &repaired);
        repair(backend, &vwd_repair_args { predicted_partials: partials_of(&kept), ..call });
        case.check(true, &repaired);
        // Bit for bit on the CPU only.
        if !backend.is_cuda() {
            let direct = Results::new(backend, rng, &case.layer, dtype);
            attend(backend, &case.attention(1, &direct));
            assert_eq!(repaired.bits(), direct.bits());
        }
    });
}

fn repair_exact_attends_again_groups_with_a_block_predicted_in_vain(backend: &Backend) {
    rounds(25, |rng| {
        let (block, group) = rng.pick(&[(None, 2), (None, 3), (None, 100), (Some(1), 1), (Some(1), 4), (Some(1), 64)]);
        let case = Prediction::random(backend, rng, block);
        let first = Results::new(backend, rng, &case.layer, F32);
        let kept = partials(backend, rng, &case.layer, case.predicted.ids.shape[2], group);
        let partial_blocks = group as u32;
        let call = case.attention(0, &first);
        attend(backend, &vwd_attention_args { partial_blocks, partials: partials_of(&kept), ..call });
        let results = Results::new(backend, rng, &case.layer, F32);
        let call = case.repair(VWD_REPAIR_EXACT, &results);
        repair(backend, &vwd_repair_args { partial_blocks, predicted_partials: partials_of(&kept), ..call });
        case.check(true, &results);
    });
}

/// Blocks of a sequence: lists of as many, with room to spare, are just short enough for the kernel of the common case, and too long for it.
const MANY_BLOCKS: [usize; 2] = [250, 256];

/// Two sequences of up to so many blocks, half of which are predicted.
fn of_many_blocks(rng: &mut Rng, kv_type: DType, blocks: usize) -> (Layer, List) {
    let (page, block) = rng.pick(&[(64, 16), (16, 16), (8, 16), (8, 8)]);
    let most = blocks * block;
    // On an H200 clusters of 8 CTAs for 4 lists, of fewer for 8.
    let (batch, kv_heads, group, dim) = (2, rng.pick(&[2, 4]), 4, 128);
    let mut layer =
        Layer::random(rng, Shape { batch, kv_heads, group, dim, page, block, most, q_type: kv_type, kv_type });
    layer.lens = vec![most as i64, rng.int(1..=most as i64)];
    let predicted = layer.list(rng, 0.5);
    (layer, predicted)
}

/// What a speculative pass keeps, in tensors whose elements follow each other.
struct Speculated<'b> {
    state: [Tensor<'b>; 3],
    partials: [Tensor<'b>; 3],
}

impl<'b> Speculated<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, case: &Prediction<'b>) -> Speculated<'b> {
        let Shape { batch, dim, .. } = case.layer.shape;
        let (heads, cap) = (case.layer.q.shape[1], case.predicted.ids.shape[2]);
        let plain =
            |rest: &[usize]| Tensor::poisoned(backend, F32, &[&[batch, heads], rest].concat(), &Layout::default());
        let kept = Speculated {
            state: [plain(&[dim]), plain(&[]), plain(&[])],
            partials: [plain(&[cap, dim]), plain(&[cap]), plain(&[cap])],
        };
        let results = Results::new(backend, rng, &case.layer, F32);
        let (state, partials) = (state_of(&kept.state), partials_of(&kept.partials));
        attend(backend, &vwd_attention_args { state, partials, ..case.attention(0, &results) });
        kept
    }

    fn repair(&self, backend: &'b Backend, rng: &mut Rng, case: &Prediction, exact: bool) -> Results<'b> {
        let results = Results::new(backend, rng, &case.layer, case.layer.shape.q_type);
        let call = match exact {
            true => vwd_repair_args {
                predicted_partials: partials_of(&self.partials),
                ..case.repair(VWD_REPAIR_EXACT, &results)
            },
            false => {
                vwd_repair_args { predicted_state: state_of(&self.state), ..case.repair(VWD_REPAIR_SUPERSET, &results) }
            }
        };
        repair(backend, &call);
        results
    }
}

fn repair_of_any_share_missed_agrees_with_the_formula(backend: &Backend) {
    rounds(1, |rng| {
        // A list of some length relative to the predicted, and how much of it that has: with a length below 1 blocks were
        // predicted in vain.
        for blocks in MANY_BLOCKS {
            for (length, overlap) in [(1.0, 1.0), (1.0, 0.98), (1.0, 0.7), (1.0, 0.0), (0.6, 0.9), (0.0, 0.0)] {
                let kv_type = rng.pick(&[F16, BF16]);
                let (layer, predicted) = of_many_blocks(rng, kv_type, blocks);
                let selected = alike(rng, &layer, &predicted, length, overlap);
                let case = Prediction::new(backend, rng, layer, &Layouts::default(), [predicted, selected]);
                let kept = Speculated::new(backend, rng, &case);
                for exact in [true, false] {
                    let results = kept.repair(backend, rng, &case, exact);
                    case.check(exact, &results);
                }
            }
        }
    });
}

fn repair_repeated_gives_the_same_bits(backend: &Backend) {
    let repeats = if backend.is_cuda() { backend.times(500) } else { 3 };
    rounds(3, |rng| {
        let blocks = rng.pick(&MANY_BLOCKS);
        let (layer, predicted) = of_many_blocks(rng, BF16, blocks);
        let selected = alike(rng, &layer, &predicted, 1.0, 0.7);
        let case = Prediction::new(backend, rng, layer, &Layouts::default(), [predicted, selected]);
        let kept = Speculated::new(backend, rng, &case);
        for exact in [true, false] {
            let first = kept.repair(backend, rng, &case, exact).bits();
            for n in 0..repeats {
                assert!(kept.repair(backend, rng, &case, exact).bits() == first, "repeat {n}, exact {exact}");
            }
        }
    });
}

fn repair_gives_the_same_bits_wherever_in_the_batch(backend: &Backend) {
    rounds(3, |rng| {
        // The second sequence is the first once more.
        let blocks = rng.pick(&MANY_BLOCKS);
        let (mut layer, mut predicted) = of_many_blocks(rng, F16, blocks);
        let heads = layer.q.shape[1];
        layer.lens[1] = layer.lens[0];
        layer.q = Array::from_fn(&layer.q.shape.clone(), |at| layer.q[[0, at[1], at[2]]]);
        layer.table = Array::from_fn(&layer.table.shape.clone(), |at| layer.table[[0, at[1]]]);
        let twice = |list: &List| List {
            ids: Array::from_fn(&list.ids.shape, |at| list.ids[[0, at[1], at[2]]]),
            counts: Array::from_fn(&list.counts.shape, |at| list.counts[[0, at[1]]]),
        };
        predicted = twice(&predicted);
        let selected = twice(&alike(rng, &layer, &predicted, 1.0, 0.8));
        let case = Prediction::new(backend, rng, layer, &Layouts::default(), [predicted, selected]);
        let kept = Speculated::new(backend, rng, &case);
        for exact in [true, false] {
            for (n, bits) in kept.repair(backend, rng, &case, exact).bits().iter().enumerate() {
                let (first, second) = bits.data.split_at(bits.data.len() / 2);
                assert!(first == second, "output {n} of {heads} heads, exact {exact}");
            }
        }
    });
}

fn merge_of_disjoint_lists_is_the_state_of_their_union(backend: &Backend) {
    rounds(20, |rng| {
        let shape = Shape::random(rng);
        let layer = Layer::random(rng, shape);
        let placed = Placed::new(backend, &layer, &Layouts::random(rng));
        let count = rng.size(1..=16);
        let all = layer.list(rng, 0.8);
        let mut states = vec![];
        for n in 0..count {
            let mut list = all.clone();
            for id in &mut list.ids.data {
                *id = if *id >= 0 && *id as usize % count == n { *id } else { -1 };
            }
            let listed = PlacedList::new(backend, &list, rng);
            let results = Results::new(backend, rng, &layer, F32);
            attend(backend, &vwd_attention_args { list: listed.c(), ..attention_args(&layer, &placed, &results) });
            states.push(results);
        }
        let inputs: Vec<_> = states.iter().map(Results::state).collect();
        let dtype = rng.pick(&[F32, F16, BF16]);
        let merged = Results::new(backend, rng, &layer, dtype);
        let call = vwd_merge_states_args {
            input_count: count as u32,
            inputs: inputs.as_ptr(),
            out: merged.out.c(),
            lse: merged.lse.c(),
            state: merged.state(),
            ..args()
        };
        // SAFETY: the tensors and the array are alive.
        backend.finish(unsafe { vwd_merge_states(backend.session(), &call, backend.stream()) });
        merged.check(&layer, |i, g| layer.listed(&all, i, g));
    });
}

/// Any states: some empty, and maxima so far apart that the lesser vanish.
fn merge_agrees_with_the_formula(backend: &Backend) {
    rounds(20, |rng| {
        let (batch, heads, dim) = (rng.size(0..=3), rng.size(1..=9), rng.pick(&[16, 72, 256]));
        let count = rng.size(1..=16);
        let states: Vec<[Tensor; 3]> = (0..count)
            .map(|_| {
                let empty = Array::from_fn(&[batch, heads], |_| rng.one_in(4));
                let m =
                    empty.map(|&e| if e { f64::NEG_INFINITY } else { rng.pick(&[1.0, 90.0, -300.0]) + rng.normal() });
                let l = empty.map(|&e| if e { 0.0 } else { 1.0 + 50.0 * rng.unit() });
                let acc = Array::from_fn(&[batch, heads, dim], |at| {
                    if empty[[at[0], at[1]]] { 0.0 } else { l[[at[0], at[1]]] * rng.normal() }
                });
                [&acc, &m, &l].map(|t| Tensor::floats(backend, F32, t, &Layout::random(rng, t.shape.len())))
            })
            .collect();
        let inputs: Vec<_> = states.iter().map(state_of).collect();
        let out = Tensor::poisoned(backend, F32, &[batch, heads, dim], &Layout::random(rng, 3));
        let lse = Tensor::poisoned(backend, F32, &[batch, heads], &Layout::random(rng, 2));
        let call = vwd_merge_states_args {
            input_count: count as u32,
            inputs: inputs.as_ptr(),
            out: out.c(),
            lse: lse.c(),
            ..args()
        };
        // SAFETY: the tensors and the array are alive.
        backend.finish(unsafe { vwd_merge_states(backend.session(), &call, backend.stream()) });
        let read: Vec<[Array<f64>; 3]> = states.iter().map(|s| s.each_ref().map(Tensor::read_floats)).collect();
        let (out, lse) = (out.read_floats(), lse.read_floats());
        for at in array::indices(&[batch, heads]) {
            let at = [at[0], at[1]];
            let state = |[acc, m, l]: &[Array<f64>; 3]| oracle::State { acc: acc.row(at).to_vec(), m: m[at], l: l[at] };
            let want = oracle::merge(&read.iter().map(state).collect::<Vec<_>>());
            // A float32 of 300 is 3·10⁻⁵ from the next.
            close(lse[at], want.lse(), 5e-5, "lse");
            want.out().iter().zip(out.row(at)).for_each(|(&want, &got)| close(got, want, TOLERANCE, "out"));
        }
    });
}
