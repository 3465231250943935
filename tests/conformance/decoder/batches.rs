//! What a sequence is given does not depend on the batch: alone, and in steps with other sequences, of other lengths, in other rows and pages, it has the
//! same bits by every strategy. On the CPU in every session, on CUDA in batch-invariant ones.

use super::strategies::{FORESEEN, PRR, PRR_FORESEEN};
use super::*;

pub const CASES: &[Case] = cases![decoder_gives_a_sequence_the_same_bits_alone_and_beside_others];

const SEQUENCES: usize = 4;
/// The most positions of a step.
const POSITIONS: usize = 4;
const SPARSE_LAYER: usize = 0;
const DENSE_LAYER: usize = 5;

fn policies() -> [vwd_decoder_policy; 6] {
    let by_axes = |policy| vwd_decoder_policy { method: VWD_SELECT_AXIS, ..policy };
    let policies = [POLICY, by_axes(POLICY), PRR, by_axes(PRR_FORESEEN), by_axes(FORESEEN), POLICY];
    let mut policies = policies.map(|policy| vwd_decoder_policy { k: 3, ..policy });
    (policies[DENSE_LAYER].method, policies[DENSE_LAYER].k) = (0, 0);
    policies
}

/// What a tensor holds of a token.
#[derive(Clone, Copy)]
enum Of {
    Keys,
    Values,
    Queries,
    Foreseen,
}

/// A sequence by itself: the contents of its tokens follow from its number.
struct Sequence {
    number: usize,
    prompt: usize,
    turns: Vec<Turn>,
}

impl Sequence {
    fn of(&self, what: Of, token: usize, extents: [usize; 2]) -> Array<f64> {
        Rng::new(((self.number as u64) << 40) + ((what as u64) << 32) + token as u64).normals(&extents)
    }
}

/// What a sequence does in a step, and what each layer gives its positions there.
struct Turn {
    mode: u32,
    positions: usize,
    count: usize,
    is_foreseen: bool,
    outs: Vec<Vec<f64>>,
}

/// Some of the sequences with a decoder, and pages of their own.
struct World<'b> {
    backend: &'b Backend,
    shape: Shape,
    decoder: Decoder,
    k: Tensor<'b>,
    v: Tensor<'b>,
    /// The pages of each sequence, and how many tokens it has.
    pages: Vec<Vec<usize>>,
    lens: Vec<usize>,
    is_new: Vec<bool>,
}

impl<'b> World<'b> {
    /// With the prompts in their pages, which are in an order of the world's own.
    fn new(backend: &'b Backend, rng: &mut Rng, shape: Shape, sequences: &[&Sequence]) -> World<'b> {
        let count = sequences.len();
        let mut order: Vec<usize> = (0..count * shape.max_pages).collect();
        rng.shuffle(&mut order);
        let pages: Vec<Vec<usize>> = order.chunks(shape.max_pages).map(<[usize]>::to_vec).collect();
        let [keys, values] = [(Of::Keys, shape.dim), (Of::Values, shape.value_dim)].map(|(what, dim)| {
            let mut cache = Array::filled(&[count * shape.max_pages, shape.page, shape.heads[1], dim], f64::NAN);
            for (sequence, pages) in sequences.iter().zip(&pages) {
                for t in 0..sequence.prompt {
                    let row = sequence.of(what, t, [shape.heads[1], dim]);
                    let size = row.data.len();
                    let at = (pages[t / shape.page] * shape.page + t % shape.page) * size;
                    cache.data[at..at + size].copy_from_slice(&row.data);
                }
            }
            Tensor::floats(backend, shape.dtype, &cache, &Layout::default())
        });
        let policies = policies();
        let options = vwd_decoder_options {
            layers: policies.len() as u32,
            max_rows: count as u32,
            max_sequences: count as u32,
            max_tokens: (shape.max_pages * shape.page) as u32,
            pages: (count * shape.max_pages) as u32,
            policy_count: policies.len() as u32,
            policies: policies.as_ptr(),
            ..shape.options(POLICY)
        };
        World {
            backend,
            shape,
            decoder: Decoder::create(backend, &options),
            k: keys,
            v: values,
            pages,
            lens: sequences.iter().map(|sequence| sequence.prompt).collect(),
            is_new: vec![true; count],
        }
    }

    /// A step of these sequences, each with a turn of the same number of positions. What each layer gives each row's positions.
    fn step(&mut self, rows: &[(usize, &Sequence)], turns: &[&Turn], positions: usize) -> Vec<Vec<Vec<f64>>> {
        let (backend, shape, batch) = (self.backend, self.shape, rows.len());
        let of = |what, heads: usize, dim: usize, positions: usize, dtype: DType| {
            let mut all = Array::filled(&[batch, positions, heads, dim], 0.5);
            for (i, &(slot, sequence)) in rows.iter().enumerate() {
                for r in 0..positions.min(turns[i].count) {
                    let row = sequence.of(what, self.lens[slot] + r, [heads, dim]);
                    let at = (i * positions + r) * heads * dim;
                    all.data[at..at + heads * dim].copy_from_slice(&row.data);
                }
            }
            Tensor::floats(backend, dtype, &all, &Layout::default())
        };
        let [heads, kv_heads] = shape.heads;
        let q = of(Of::Queries, heads, shape.dim, positions, shape.dtype);
        let guess = of(Of::Foreseen, heads, shape.dim, 1, shape.dtype);
        let new_k = of(Of::Keys, kv_heads, shape.dim, positions, shape.dtype);
        let new_v = of(Of::Values, kv_heads, shape.value_dim, positions, shape.dtype);
        let list = |of: &dyn Fn(usize) -> i64| ints(backend, &(0..batch).map(of).collect::<Vec<_>>());
        let lens = list(&|i| (self.lens[rows[i].0] + turns[i].count) as i64);
        let counts = list(&|i| turns[i].count as i64);
        let begin = list(&|i| if self.is_new[rows[i].0] { 0 } else { i32::MAX as i64 });
        let modes = list(&|i| turns[i].mode as i64);
        let numbers = list(&|i| rows[i].0 as i64);
        let table = Array::from_fn(&[batch, shape.max_pages], |at| self.pages[rows[at[0]].0][at[1]] as i64);
        let table = Tensor::ints(backend, I32, &table, &Layout::default());
        let has_begin = rows.iter().any(|&(slot, _)| self.is_new[slot]);
        let step = vwd_decoder_step {
            positions: positions as u32,
            page_table: table.c(),
            seq_lens: lens.c(),
            q_lens: counts.c(),
            begin: if has_begin { begin.c() } else { absent() },
            modes: modes.c(),
            sequences: numbers.c(),
            ..args()
        };
        self.decoder.begin(backend, &step);
        let mut outs = vec![vec![]; batch];
        for layer in 0..policies().len() as u32 {
            if turns[0].is_foreseen {
                let args = vwd_decoder_foresee_args { layer, q: strategies::without_positions(&guess), ..args() };
                self.decoder.foresee(backend, std::ptr::null(), &args);
            }
            let extents = [batch, positions, heads, shape.value_dim];
            let out = Tensor::poisoned(backend, F32, &extents, &Layout::default());
            let attend = vwd_decoder_attend_args {
                layer,
                k: self.k.c(),
                v: self.v.c(),
                new_k: new_k.c(),
                new_v: new_v.c(),
                q: q.c(),
                out: out.c(),
                ..args()
            };
            self.decoder.attend(backend, &attend);
            let out = out.read_floats();
            for (i, outs) in outs.iter_mut().enumerate() {
                outs.push((0..turns[i].count).flat_map(|r| out.row([i, r]).to_vec()).collect());
            }
        }
        for (&(slot, _), turn) in rows.iter().zip(turns) {
            self.lens[slot] += turn.count;
            self.is_new[slot] = false;
        }
        outs
    }
}

fn shape(rng: &mut Rng) -> Shape {
    let shape = strategies::shape(rng);
    if rng.one_in(3) {
        return shape;
    }
    Shape {
        heads: rng.pick(&[[4, 2], [8, 1]]),
        dim: 128,
        value_dim: 128,
        dtype: rng.pick(&[F16, BF16]),
        page: 16,
        block: 16,
        ..shape
    }
}

fn decoder_gives_a_sequence_the_same_bits_alone_and_beside_others(backend: &Backend) {
    let is_whole = backend.times(100) == 100;
    // Lists that a GPU's kernels share out among CTAs.
    let longest = if backend.is_cuda() && is_whole { 2600 } else { 250 };
    let steps = backend.times(24);
    rounds(3, |rng| {
        let made_for = rng.pick(&[1, SEQUENCES as u64, 64]);
        let (together, alone) = (backend.invariant(made_for), backend.invariant(made_for));
        let shape = shape(rng);
        let max_pages = (longest + steps * POSITIONS).div_ceil(shape.page.max(shape.block))
            * shape.page.max(shape.block)
            / shape.page;
        let shape = Shape { rows: SEQUENCES, positions: POSITIONS, pages: 0, max_pages, ..shape };
        let mut sequences: Vec<Sequence> = (0..SEQUENCES)
            .map(|number| Sequence { number: number + 1, prompt: rng.size(longest / 4..=longest), turns: vec![] })
            .collect();
        let mut world = World::new(&together, rng, shape, &sequences.iter().collect::<Vec<_>>());
        for n in 0..steps {
            let mut rows: Vec<usize> = (0..SEQUENCES).collect();
            rng.shuffle(&mut rows);
            rows.truncate(rng.size(2..=SEQUENCES));
            let positions = if n % 4 == 3 { rng.size(2..=POSITIONS) } else { 1 };
            let is_foreseen = !rng.one_in(5);
            let mode = |rng: &mut Rng| if rng.one_in(4) { VWD_DECODER_DENSE } else { VWD_DECODER_SPARSE };
            let turn = |rng: &mut Rng| Turn {
                mode: mode(rng),
                positions,
                count: rng.size(1..=positions),
                is_foreseen,
                outs: vec![],
            };
            let turns: Vec<Turn> = rows.iter().map(|_| turn(rng)).collect();
            let of_rows: Vec<_> = rows.iter().map(|&i| (i, &sequences[i])).collect();
            let outs = world.step(&of_rows, &turns.iter().collect::<Vec<_>>(), positions);
            for ((i, turn), outs) in rows.into_iter().zip(turns).zip(outs) {
                sequences[i].turns.push(Turn { outs, ..turn });
            }
        }
        let mut differ = 0;
        for (i, sequence) in sequences.iter().enumerate() {
            let mut world = World::new(&alone, rng, shape, &[sequence]);
            for (n, turn) in sequence.turns.iter().enumerate() {
                // Steps of several positions are SERIAL in every layer. On CUDA bits may depend on how many there are.
                let positions = match turn.positions {
                    1 => 1,
                    _ if backend.is_cuda() => turn.positions,
                    _ => turn.count.max(2),
                };
                let found = world.step(&[(0, sequence)], &[turn], positions).remove(0);
                for (layer, (found, expected)) in found.iter().zip(&turn.outs).enumerate() {
                    let Turn { mode, count, is_foreseen, .. } = turn;
                    let about = format!("{shape:?}, made for {made_for}: sequence {i}, turn {n}, layer {layer}");
                    let of = format!("mode {mode}, {count} of {positions} positions, foreseen {is_foreseen}");
                    let at = found.iter().zip(expected).position(|(x, y)| x != y);
                    assert!(at.is_none() && found.len() == expected.len(), "{about}, {of}: element {at:?} differs");
                }
                differ += (found[SPARSE_LAYER] != found[DENSE_LAYER]) as usize;
            }
        }
        assert!(differ > 0, "lists had all blocks");
    });
}
