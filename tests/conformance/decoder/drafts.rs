//! Drafts: verified densely they give the text of dense attention, and what was accepted is counted.

use super::acceptance::{self, COST, Known};
use super::*;

pub const CASES: &[Case] = cases![
    decoder_gives_the_text_of_dense_attention_from_verified_drafts,
    decoder_counts_what_was_accepted_and_recommends_a_draft_length,
];

/// A model of two layers whose weights are random: each token's text depends on all tokens before it.
pub struct Model {
    pub shape: Shape,
    /// [vocabulary, width]
    embedding: Array<f64>,
    /// [layers, width, out]: of queries, keys, values, and back.
    queries: Array<f64>,
    keys: Array<f64>,
    values: Array<f64>,
    back: Array<f64>,
}

const LAYERS: usize = 2;
const WIDTH: usize = 16;
pub const VOCABULARY: usize = 24;

fn times(x: &[f64], weights: &Array<f64>, layer: usize, out: usize) -> Vec<f64> {
    let mut sums = vec![0.0; out];
    for (x, row) in x.iter().zip(weights.row([layer]).chunks(out)) {
        sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += x * weight);
    }
    sums
}

impl Model {
    pub fn new(rng: &mut Rng, shape: Shape) -> Model {
        let map = |rng: &mut Rng, from: usize, to: usize, gain: f64| {
            rng.normals(&[LAYERS, from, to]).map(|&x| x * gain / (from as f64).sqrt())
        };
        let (q, k, v) = (shape.heads[0] * shape.dim, shape.heads[1] * shape.dim, shape.heads[1] * shape.value_dim);
        Model {
            shape,
            embedding: rng.normals(&[VOCABULARY, WIDTH]),
            queries: map(rng, WIDTH, q, 1.5),
            keys: map(rng, WIDTH, k, 1.5),
            values: map(rng, WIDTH, v, 1.0),
            back: map(rng, shape.heads[0] * shape.value_dim, WIDTH, 2.0),
        }
    }
}

/// Sequences that decode side by side, with a decoder of their own.
pub struct Decoding<'b, 'm> {
    backend: &'b Backend,
    model: &'m Model,
    pub decoder: Decoder,
    pub caches: Vec<[Tensor<'b>; 2]>,
    pub table: Tensor<'b>,
}

/// The tokens of each row in a step, which follow the first `begin` of its sequence.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub modes: &'a [u32],
    pub begin: &'a [usize],
    pub tokens: &'a [Vec<usize>],
    /// Where rows are trees: the nodes from the root to each node, both included.
    pub paths: Option<&'a [Vec<Vec<usize>>]>,
    /// The first tokens that are new to the summaries.
    pub since: Option<&'a [i64]>,
}

/// Masks of trees, [rows, positions, 1]; of nodes that a row has not, any.
fn words<'b>(backend: &'b Backend, paths: &[Vec<Vec<usize>>], positions: usize) -> Tensor<'b> {
    assert!(positions <= 32, "a word a node");
    let word = |path: &Vec<usize>| path.iter().fold(0u32, |word, node| word | 1 << node);
    let of_row = |i: usize| (0..positions).map(move |r| paths[i].get(r).map_or(0xaaaa_aaaa, word));
    let bytes: Vec<u8> = (0..paths.len()).flat_map(of_row).flat_map(u32::to_le_bytes).collect();
    Tensor::raw(backend, U32, &[paths.len(), positions, 1], &bytes, &Layout::default())
}

impl<'b, 'm> Decoding<'b, 'm> {
    pub fn new(backend: &'b Backend, model: &'m Model) -> Decoding<'b, 'm> {
        let shape = &model.shape;
        let policy = vwd_decoder_policy { k: 3, ..POLICY };
        // Scores are a few units whatever the width.
        let scale = 4.0 / shape.dim as f32;
        let options = vwd_decoder_options { layers: LAYERS as u32, scale, ..shape.options(policy) };
        let cache = |dim| {
            let zeros = Array::filled(&[shape.pages, shape.page, shape.heads[1], dim], 0.0);
            Tensor::floats(backend, shape.dtype, &zeros, &Layout::default())
        };
        let table = Array::from_fn(&[shape.rows, shape.max_pages], |at| (at[1] * shape.rows + at[0]) as i64);
        Decoding {
            backend,
            model,
            decoder: Decoder::create(backend, &options),
            caches: (0..LAYERS).map(|_| [cache(shape.dim), cache(shape.value_dim)]).collect(),
            table: Tensor::ints(backend, I32, &table, &Layout::default()),
        }
    }

    /// Writes prompts, each row its own, and gives the token after each.
    pub fn prefill(&self, prompts: &[Vec<usize>]) -> Vec<usize> {
        let (at_once, longest) = (self.model.shape.positions, prompts.iter().map(Vec::len).max().unwrap());
        let mut next = vec![0; prompts.len()];
        for at in (0..longest).step_by(at_once) {
            let part = |p: &Vec<usize>| p[at.min(p.len())..(at + at_once).min(p.len())].to_vec();
            let tokens: Vec<_> = prompts.iter().map(part).collect();
            let begin: Vec<_> = prompts.iter().map(|p| at.min(p.len())).collect();
            let found = self.run(&vec![VWD_DECODER_DENSE; prompts.len()], &begin, &tokens);
            for (next, found) in next.iter_mut().zip(&found) {
                *next = *found.last().unwrap_or(next);
            }
        }
        next
    }

    /// Writes prompts and decodes `count` tokens and one, a token a step, densely.
    pub fn dense_texts(&self, prompts: &[Vec<usize>], count: usize) -> Vec<Vec<usize>> {
        let mut texts: Vec<Vec<usize>> = self.prefill(prompts).into_iter().map(|t| vec![t]).collect();
        for n in 0..count {
            let begin: Vec<_> = prompts.iter().map(|p| p.len() + n).collect();
            let last: Vec<_> = texts.iter().map(|text| vec![*text.last().unwrap()]).collect();
            let next = self.run(&vec![VWD_DECODER_DENSE; prompts.len()], &begin, &last);
            texts.iter_mut().zip(next).for_each(|(text, next)| text.push(next[0]));
        }
        texts
    }

    /// The next token after each of these tokens, which follow the first `begin` of each sequence.
    pub fn run(&self, modes: &[u32], begin: &[usize], tokens: &[Vec<usize>]) -> Vec<Vec<usize>> {
        self.step(&Part { modes, begin, tokens, paths: None, since: None })
    }

    /// The next token after each token of the step.
    pub fn step(&self, part: &Part) -> Vec<Vec<usize>> {
        self.following(&self.hidden(part), part)
    }

    /// The next token after each token of a step that left these vectors.
    pub fn following(&self, hidden: &[Vec<Vec<f64>>], part: &Part) -> Vec<Vec<usize>> {
        let next = |h: &[f64]| {
            let logits = self.logits(h);
            (0..VOCABULARY).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
        };
        hidden.iter().zip(part.tokens).map(|(h, tokens)| (0..tokens.len()).map(|r| next(&h[r])).collect()).collect()
    }

    pub fn logits(&self, hidden: &[f64]) -> Vec<f64> {
        (0..VOCABULARY).map(|t| oracle::dot(self.model.embedding.row([t]), hidden)).collect()
    }

    /// What the layers make of each position of the step.
    pub fn hidden(&self, part: &Part) -> Vec<Vec<Vec<f64>>> {
        self.pass(part).0
    }

    /// The same, and the attention of each layer.
    pub fn pass(&self, part: &Part) -> (Vec<Vec<Vec<f64>>>, Vec<Array<f64>>) {
        let &Part { modes, begin, tokens, paths, since } = part;
        let (backend, model, shape) = (self.backend, self.model, &self.model.shape);
        let (rows, positions) = (tokens.len(), tokens.iter().map(Vec::len).max().unwrap().max(1));
        let lens: Vec<i64> = (0..rows).map(|i| (begin[i] + tokens[i].len()) as i64).collect();
        let counts: Vec<i64> = tokens.iter().map(|tokens| tokens.len() as i64).collect();
        let [lens, counts, modes] = [
            ints(backend, &lens),
            ints(backend, &counts),
            ints(backend, &modes.iter().map(|&m| m as i64).collect::<Vec<_>>()),
        ];
        let masks = paths.map(|paths| words(backend, paths, positions));
        let since = since.map(|since| ints(backend, since));
        let step = vwd_decoder_step {
            positions: positions as u32,
            page_table: self.table.c(),
            seq_lens: lens.c(),
            q_lens: counts.c(),
            begin: since.as_ref().map_or(absent(), Tensor::c),
            modes: modes.c(),
            tree: masks.as_ref().map_or(absent(), Tensor::c),
            ..args()
        };
        let depth = |i: usize, r: usize| match paths {
            Some(paths) => paths[i].get(r).map_or(0, |path| path.len() - 1),
            None => r,
        };
        self.decoder.begin(backend, &step);
        let token = |i: usize, r: usize| tokens[i].get(r).copied();
        let mut hidden: Vec<Vec<Vec<f64>>> = (0..rows)
            .map(|i| {
                let of = |r| token(i, r).map_or(vec![0.0; WIDTH], |t| model.embedding.row([t]).to_vec());
                (0..positions).map(of).collect()
            })
            .collect();
        let mut outs = vec![];
        for layer in 0..LAYERS {
            let place = |weights: &Array<f64>, heads: usize, dim: usize| {
                let values = (0..rows * positions)
                    .flat_map(|n| {
                        let h = &hidden[n / positions][n % positions];
                        // The position enters as a phase, so that no two tokens are alike.
                        let t = (begin[n / positions] + depth(n / positions, n % positions)) as f64;
                        let turned: Vec<f64> =
                            h.iter().enumerate().map(|(c, x)| x + (t * 0.3 + c as f64).sin()).collect();
                        times(&turned, weights, layer, heads * dim)
                    })
                    .map(|x| shape.dtype.round(x))
                    .collect();
                Tensor::floats(
                    backend,
                    shape.dtype,
                    &Array::new(&[rows, positions, heads, dim], values),
                    &Layout::default(),
                )
            };
            let q = place(&model.queries, shape.heads[0], shape.dim);
            let new_k = place(&model.keys, shape.heads[1], shape.dim);
            let new_v = place(&model.values, shape.heads[1], shape.value_dim);
            let extents = [rows, positions, shape.heads[0], shape.value_dim];
            let out = Tensor::poisoned(backend, F32, &extents, &Layout::default());
            let [k, v] = &self.caches[layer];
            let attend = vwd_decoder_attend_args {
                layer: layer as u32,
                k: k.c(),
                v: v.c(),
                new_k: new_k.c(),
                new_v: new_v.c(),
                q: q.c(),
                out: out.c(),
                ..args()
            };
            self.decoder.attend(backend, &attend);
            let out = out.read_floats();
            for (i, row) in hidden.iter_mut().enumerate() {
                for (r, h) in row.iter_mut().enumerate() {
                    let back = times(out.row([i, r]), &model.back, layer, WIDTH);
                    h.iter_mut().zip(back).for_each(|(h, b)| *h += b);
                }
            }
            outs.push(out);
        }
        (hidden, outs)
    }

    /// Another sequence takes the place of a row's.
    pub fn reset(&self, row: usize) {
        let sequences = ints(self.backend, &[row as i64]);
        let reset = vwd_decoder_reset_args { sequences: sequences.c(), ..args() };
        // SAFETY: the arguments are valid.
        self.backend.finish(unsafe { vwd_decoder_reset(self.decoder.0, &reset, self.backend.stream()) });
    }

    /// Verifies drafts, of which row i has some if `is_taken`; the tokens that are committed.
    pub fn accept(&self, drafts: &[Vec<usize>], target: &[Vec<usize>], is_taken: &[bool]) -> Vec<Vec<usize>> {
        let (backend, rows, most) = (self.backend, drafts.len(), self.model.shape.positions - 1);
        let at = |rows: &[Vec<usize>], i: usize, n: usize| rows[i].get(n).map_or(-1, |&t| t as i64);
        let draft = Array::from_fn(&[rows, most], |x| at(drafts, x[0], x[1]));
        let target = Array::from_fn(&[rows, most + 1], |x| at(target, x[0], x[1]));
        let layout = Layout::default();
        let [draft, target] = [draft, target].map(|tokens| Tensor::ints(backend, I32, &tokens, &layout));
        let lens = ints(backend, &drafts.iter().map(|d| d.len() as i64).collect::<Vec<_>>());
        let sequences = (0..rows).map(|i| if is_taken[i] { i as i64 } else { -1 });
        let sequences = ints(backend, &sequences.collect::<Vec<_>>());
        let [accepted, next] = [0; 2].map(|_| Tensor::poisoned(backend, I32, &[rows], &layout));
        let committed = Tensor::poisoned(backend, I32, &[rows, most + 1], &layout);
        let accept = vwd_decoder_accept_args {
            draft: draft.c(),
            target: target.c(),
            draft_lens: lens.c(),
            sequences: sequences.c(),
            accepted: accepted.c(),
            next_token: next.c(),
            committed: committed.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_accept(self.decoder.0, &accept, backend.stream()) });
        let (accepted, committed) = (accepted.read_ints(), committed.read_ints());
        let count = |i: usize| if is_taken[i] { accepted[[i]] as usize + 1 } else { 0 };
        (0..rows).map(|i| (0..count(i)).map(|n| committed[[i, n]] as usize).collect()).collect()
    }
}

/// A sequence: its prompt, and the tokens that were decoded after it.
struct Sequence {
    prompt: Vec<usize>,
    text: Vec<usize>,
    /// Drafts come from its sparse steps; else from elsewhere, and are mostly wrong.
    is_own: bool,
}

impl Sequence {
    fn new(rng: &mut Rng, len: usize, is_own: bool) -> Sequence {
        Sequence { prompt: (0..len).map(|_| rng.size(0..=VOCABULARY - 1)).collect(), text: vec![], is_own }
    }

    fn last(&self) -> usize {
        *self.text.last().or(self.prompt.last()).expect("a token")
    }
}

/// Row 0 decodes one text. The sequence of row 1 leaves, and another one joins in its place; that of row 2 leaves, and after steps without a sequence
/// the row has a fork of row 0's, on whose pages it goes on from another token.
fn decoder_gives_the_text_of_dense_attention_from_verified_drafts(backend: &Backend) {
    verify_texts(backend, (F32, 16, [4, 2], backend.times(300).max(12)));
    // On CUDA a token may be the other one of two that are as good as equal: own_drafts.rs.
    if !backend.is_cuda() {
        verify_texts(&Backend::cpu(1), (F16, 32, [2, 1], 300));
        verify_texts(&Backend::cpu(1), (BF16, 32, [2, 1], 100));
        [F16, BF16].into_iter().for_each(|dtype| verify_texts(backend, (dtype, 128, [8, 1], 16)));
    }
}

fn verify_texts(backend: &Backend, (dtype, dim, heads, wanted): (DType, usize, [usize; 2], usize)) {
    const GAMMA: usize = 4;
    rounds(1, |rng| {
        let shape = Shape {
            heads,
            dim,
            value_dim: dim,
            dtype,
            page: 8,
            block: 8,
            pages: 3 * 64,
            max_pages: 64,
            rows: 3,
            positions: GAMMA + 1,
        };
        let model = Model::new(rng, shape);
        let own = Decoding::new(backend, &model);
        // Lengths differ; sparse rows begin to choose past 24 tokens.
        let mut rows = [(5, true), (25, true), (45, false)].map(|(len, is_own)| Some(Sequence::new(rng, len, is_own)));
        let mut ended = vec![];
        let prompts: Vec<Vec<usize>> = rows.iter().flatten().map(|row| row.prompt.clone()).collect();
        for (row, first) in rows.iter_mut().flatten().zip(own.prefill(&prompts)) {
            row.text.push(first);
        }
        let (mut has_joined, mut has_forked) = (false, false);
        while rows.iter().any(Option::is_some) {
            let decoded = rows[0].as_ref().map_or(wanted, |row| row.text.len());
            if !has_joined && decoded > wanted / 3 {
                ended.extend(rows[1].take());
                let mut new = Sequence::new(rng, 40, true);
                let prompts = [vec![], new.prompt.clone(), vec![]];
                new.text.push(own.prefill(&prompts)[1]);
                own.reset(1);
                (rows[1], has_joined) = (Some(new), true);
                // Row 2 has none for a while.
                ended.extend(rows[2].take());
            }
            if !has_forked && decoded > wanted / 2 {
                rows[2] = rows[0].as_ref().map(|parent| fork(&own, parent));
                has_forked = true;
            }
            let has = |i: usize| rows[i].is_some();
            let recommended = own.decoder.read(backend, own.decoder.details().draft_lens);
            let gamma = [0, 1, 2].map(|i| if has(i) { recommended[i] as usize } else { 0 });
            let is_own = [0, 1, 2].map(|i| rows[i].as_ref().is_some_and(|row| row.is_own));
            let begin: Vec<usize> =
                rows.iter().map(|row| row.as_ref().map_or(0, |row| row.prompt.len() + row.text.len() - 1)).collect();
            let elsewhere = |i: usize| if is_own[i] { 0 } else { gamma[i] };
            let mut drafts: Vec<Vec<usize>> =
                (0..3).map(|i| (0..elsewhere(i)).map(|_| rng.size(0..=VOCABULARY - 1)).collect()).collect();
            for n in 0..(0..3).filter(|&i| is_own[i]).map(|i| gamma[i]).max().unwrap_or(0) {
                let drafting = |i: usize| is_own[i] && n < gamma[i];
                let modes: Vec<u32> =
                    (0..3).map(|i| if drafting(i) { VWD_DECODER_SPARSE } else { VWD_DECODER_SKIP }).collect();
                let last = |i: usize| *drafts[i].last().unwrap_or(&rows[i].as_ref().expect("a row").last());
                let tokens: Vec<_> = (0..3).map(|i| if drafting(i) { vec![last(i)] } else { vec![] }).collect();
                let at: Vec<_> = begin.iter().map(|begin| begin + n).collect();
                let next = own.run(&modes, &at, &tokens);
                (0..3).filter(|&i| drafting(i)).for_each(|i| drafts[i].push(next[i][0]));
            }
            let modes = [0, 1, 2].map(|i| if has(i) { VWD_DECODER_DENSE } else { VWD_DECODER_SKIP });
            let tokens: Vec<Vec<usize>> = (0..3)
                .map(|i| rows[i].as_ref().map_or(vec![], |row| [&[row.last()], &drafts[i][..]].concat()))
                .collect();
            let target = own.run(&modes, &begin, &tokens);
            let committed = own.accept(&drafts, &target, &[0, 1, 2].map(has));
            for (row, committed) in rows.iter_mut().zip(committed) {
                if let Some(of_row) = row {
                    of_row.text.extend(committed);
                    ended.extend(row.take_if(|row| row.text.len() >= wanted));
                }
            }
        }
        assert_eq!(ended.len(), 5, "sequences");
        let accepted = own.decoder.read(backend, own.decoder.details().accepted);
        assert!(accepted[0] > 0, "no draft was accepted, so that nothing was tested: {accepted:?}");
        let dense = Decoding::new(backend, &model);
        for some in [&ended[..3], &ended[2..]] {
            let prompts: Vec<Vec<usize>> = some.iter().map(|sequence| sequence.prompt.clone()).collect();
            let longest = some.iter().map(|sequence| sequence.text.len()).max().unwrap();
            for (sequence, expected) in some.iter().zip(dense.dense_texts(&prompts, longest)) {
                let Sequence { prompt, text, .. } = sequence;
                assert_eq!(text[..], expected[..text.len()], "{dtype:?}, a prompt of {} tokens", prompt.len());
            }
        }
    });
}

/// Shares the whole pages of row 0 with row 2, copies the last one, and goes on from another token than row 0 did. Its prompt is what it has
/// by then.
fn fork(own: &Decoding, parent: &Sequence) -> Sequence {
    let shape = &own.model.shape;
    let tokens = [&parent.prompt[..], &parent.text[..]].concat();
    // Keys and values of the last token come with the next step.
    let whole = (tokens.len() - 1) / shape.page;
    let mut table = own.table.read_ints();
    for cache in own.caches.iter().flatten() {
        cache.copy_within(table[[0, whole]] as usize, table[[2, whole]] as usize);
    }
    (0..whole).for_each(|p| table[[2, p]] = table[[0, p]]);
    own.table.refill_ints(&table);
    own.reset(2);
    let other = (parent.last() + 1) % VOCABULARY;
    Sequence { prompt: [&tokens[..tokens.len() - 1], &[other]].concat(), text: vec![], is_own: true }
}

fn decoder_counts_what_was_accepted_and_recommends_a_draft_length(backend: &Backend) {
    let shape = Shape {
        heads: [1, 1],
        dim: 16,
        value_dim: 16,
        dtype: F32,
        page: 8,
        block: 8,
        pages: 1,
        max_pages: 1,
        rows: 2,
        positions: 5,
    };
    let options = vwd_decoder_options { max_sequences: 3, draft_cost: COST as f32, ..shape.options(POLICY) };
    let decoder = Decoder::create(backend, &options);
    let mut known = [Known::default(); 3];
    acceptance::check(backend, &decoder, &known, 4);
    let layout = Layout::default();
    for n in 0..12i64 {
        // Row 0 is always right, row 1 always wrong, and in the end drafts nothing.
        let draft = Array::from_fn(&[2, 4], |at| at[1] as i64 + 10 * at[0] as i64);
        let target = Array::from_fn(&[2, 5], |at| at[1] as i64);
        let drafted = [4, if n < 6 { 3 } else { 0 }];
        let (draft, target) =
            (Tensor::ints(backend, I64, &draft, &layout), Tensor::ints(backend, I64, &target, &layout));
        let (lens, sequences) = (ints(backend, &drafted), ints(backend, &[2, 0]));
        let (accepted, next) = (ints(backend, &[9, 9]), Tensor::poisoned(backend, I64, &[2], &layout));
        let accept = vwd_decoder_accept_args {
            draft: draft.c(),
            target: target.c(),
            draft_lens: lens.c(),
            sequences: sequences.c(),
            accepted: accepted.c(),
            next_token: next.c(),
            ..args()
        };
        // SAFETY: the arguments are valid.
        backend.finish(unsafe { vwd_decoder_accept(decoder.0, &accept, backend.stream()) });
        assert_eq!(accepted.read_ints().data, [4, 0]);
        for (sequence, drafted, accepted) in [(2, 4, 4), (0, drafted[1], 0)] {
            known[sequence].observe(drafted as usize, accepted);
        }
        acceptance::check(backend, &decoder, &known, 4);
    }
    let sequences = ints(backend, &[2, -1, 7]);
    let reset = vwd_decoder_reset_args { sequences: sequences.c(), ..args() };
    // SAFETY: the arguments are valid.
    backend.finish(unsafe { vwd_decoder_reset(decoder.0, &reset, backend.stream()) });
    known[2] = Known::default();
    acceptance::check(backend, &decoder, &known, 4);
}
