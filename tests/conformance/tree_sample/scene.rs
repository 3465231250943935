//! Requests of walks through draft trees whose tokens come from logits, and what they come to by the formulas.

use super::ends::Ends;
use crate::draws::Again;
use crate::sampling::{
    self, PLAIN, Settings, Turns, Unsure, any_draft_rows, any_map, any_settings, clean, distribution, drafted, forbid,
    likeliest, logits, uniform,
};
use crate::support::trees::*;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

/// Rules that sample.
pub const RULES: [u32; 3] = [VWD_WALK_COUPLED, VWD_WALK_INDEPENDENT, VWD_WALK_DISTINCT];

/// Arguments of a call, as values.
#[derive(Clone)]
pub struct Scene {
    pub rule: u32,
    pub flags: u32,
    pub dtype: DType,
    /// [B, N] each.
    pub tokens: Array<i64>,
    pub parents: Array<i64>,
    pub counts: Option<Vec<i64>>,
    pub places: usize,
    /// [B, N, V], of numbers of the dtype.
    pub target: Array<f64>,
    /// [B, N, Vd], of numbers of draft_dtype.
    pub draft_rows: Option<Array<f64>>,
    pub draft_dtype: DType,
    pub map: Option<Vec<i64>>,
    pub settings: Vec<Settings>,
    pub seeds: Vec<i64>,
    pub positions: Vec<i64>,
    pub ends: Option<Ends>,
}

#[derive(Debug, PartialEq, Clone)]
pub struct Results {
    pub accepted: Vec<i64>,
    pub path: Array<i64>,
    pub next_token: Vec<i64>,
    pub committed: Array<i64>,
    pub status: Vec<i64>,
    /// Nothing where the call has no ends.
    pub committed_len: Vec<i64>,
    pub finish: Vec<i64>,
}

/// What a walk comes to by the formulas, before anything is cut.
#[derive(Debug)]
pub struct Outcome {
    pub path: Vec<usize>,
    /// A token for each node of the path, but for a last one that has none.
    pub committed: Vec<i64>,
    pub status: u32,
}

impl Scene {
    pub fn batch(&self) -> usize {
        self.tokens.shape[0]
    }

    pub fn nodes(&self) -> usize {
        self.tokens.shape[1]
    }

    pub fn vocabulary(&self) -> usize {
        self.target.shape[2]
    }

    /// Plain settings, for trees of these parents.
    pub fn plain(rule: u32, parents: &[i64], target: Array<f64>) -> Scene {
        let [batch, nodes, _] = target.shape[..] else { panic!("[B, N, V]") };
        Scene {
            rule,
            flags: 0,
            dtype: F32,
            tokens: Array::filled(&[batch, nodes], 0),
            parents: Array::new(&[batch, nodes], (0..batch).flat_map(|_| parents.to_vec()).collect()),
            counts: None,
            places: nodes,
            target,
            draft_rows: None,
            draft_dtype: F32,
            map: None,
            settings: vec![PLAIN; batch],
            seeds: (0..batch as i64).collect(),
            positions: vec![100; batch],
            ends: None,
        }
    }

    /// Runs it, in random layouts if there is an `rng`.
    pub fn run(&self, backend: &Backend, rng: Option<&mut Rng>) -> Results {
        let placed = self.place(backend, rng);
        placed.run();
        placed.results()
    }

    /// Its arguments in memory, in random layouts if there is an `rng`. Rows of one request alone are those of all.
    pub fn place<'b>(&self, backend: &'b Backend, mut rng: Option<&mut Rng>) -> Placed<'b> {
        let mut layout = |rank: usize| rng.as_deref_mut().map_or(Layout::default(), |rng| Layout::random(rng, rank));
        let (batch, places) = (self.batch(), self.places);
        let token = if batch % 2 == 0 { I32 } else { I64 };
        let (tokens, parents) = (
            Tensor::ints(backend, token, &self.tokens, &layout(2)),
            Tensor::ints(backend, I32, &self.parents, &layout(2)),
        );
        let target = Tensor::floats(backend, self.dtype, &self.target, &layout(3)).shared_by(batch);
        let rows = self.draft_rows.as_ref();
        let rows = rows.map(|rows| Tensor::floats(backend, self.draft_dtype, rows, &layout(3)).shared_by(batch));
        let mut ints = |values: Option<Vec<i64>>, dtype| {
            values.map(|values| Tensor::ints(backend, dtype, &Array::new(&[values.len()], values), &layout(1)))
        };
        let (counts, map) = (ints(self.counts.clone(), I32), ints(self.map.clone(), I32));
        let of_seeds = if batch % 4 < 2 { U64 } else { I64 };
        let mut always = |values: &[i64], dtype| ints(Some(values.to_vec()), dtype).expect("it is given");
        let (seeds, positions) = (always(&self.seeds, of_seeds), always(&self.positions, token));
        // Filters that are off for all requests are not given.
        let has = |differs: fn(&Settings) -> bool| self.settings.iter().any(differs);
        let top_k = ints(has(|s| s.top_k != 0).then(|| self.settings.iter().map(|s| s.top_k).collect()), I32);
        let mut floats = |of: fn(&Settings) -> f64| {
            let values = Array::new(&[batch], self.settings.iter().map(of).collect());
            Tensor::floats(backend, F32, &values, &layout(1))
        };
        let temperature = floats(|s| s.temperature);
        let top_p = has(|s| s.top_p != 1.0).then(|| floats(|s| s.top_p));
        let min_p = has(|s| s.min_p != 0.0).then(|| floats(|s| s.min_p));
        let mut poisoned = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &layout(shape.len()));
        let (accepted, path) = (poisoned(I32, &[batch]), poisoned(I32, &[batch, places]));
        let (next_token, committed) = (poisoned(token, &[batch]), poisoned(token, &[batch, places]));
        let status = poisoned(U32, &[batch]);
        let cut = self.ends.as_ref().map(|_| (poisoned(I32, &[batch]), poisoned(U8, &[batch])));
        let ends = self.ends.clone().unwrap_or_default().place(backend, layout);
        let given = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        let temperature_last = self.settings.first().is_some_and(|s| s.temperature_last);
        let samples = self.rule != VWD_WALK_GREEDY;
        let args = vwd_verify_tree_args {
            walk: self.rule,
            flags: self.flags | if samples && temperature_last { VWD_SAMPLE_TEMPERATURE_LAST } else { 0 },
            tokens: tokens.c(),
            parents: parents.c(),
            node_counts: given(&counts),
            logits: target.c(),
            accepted: accepted.c(),
            path: path.c(),
            next_token: next_token.c(),
            committed: committed.c(),
            status: status.c(),
            draft_rows: given(&rows),
            draft_map: given(&map),
            temperature: temperature.c(),
            top_k: given(&top_k),
            top_p: given(&top_p),
            min_p: given(&min_p),
            seeds: seeds.c(),
            positions: positions.c(),
            stop: given(&ends.stop),
            ignore_stop: given(&ends.ignore_stop),
            remaining: given(&ends.remaining),
            min_remaining: given(&ends.min_remaining),
            committed_len: cut.as_ref().map_or(absent(), |(len, _)| len.c()),
            finish: cut.as_ref().map_or(absent(), |(_, finish)| finish.c()),
            ..args()
        };
        let settings = [top_k, top_p, min_p];
        let optional = [rows, counts, map, ends.stop, ends.ignore_stop, ends.remaining, ends.min_remaining];
        let inputs = [parents, target, temperature].into_iter().map(Some).chain(optional).chain(settings);
        Placed {
            backend,
            args,
            tokens,
            seeds,
            positions,
            inputs: inputs.flatten().collect(),
            accepted,
            path,
            next_token,
            committed,
            status,
            cut,
        }
    }

    /// Node by node, as the contract tells it.
    pub fn expected(&self, i: usize) -> Result<Outcome, Unsure> {
        let (n, vocabulary, settings) = (self.nodes(), self.vocabulary(), &self.settings[i]);
        let [of_target, of_draft] =
            [VWD_SAMPLE_TARGET_PROBABILITIES, VWD_SAMPLE_DRAFT_PROBABILITIES].map(|flag| self.flags & flag != 0);
        let given = self.counts.as_ref().map_or(n as i64, |counts| counts[i]);
        let parents = &self.parents.row([i])[..given.clamp(0, n as i64) as usize];
        let end = self.ends.as_ref().map(|ends| ends.of(i));
        let is_greedy = self.rule == VWD_WALK_GREEDY || settings.is_greedy();
        let mut out = Outcome { path: vec![], committed: vec![], status: 0 };
        out.status |= if given > n as i64 { VWD_TREE_CLAMPED } else { 0 };
        out.status |= if is_broken(parents) { VWD_TREE_BROKEN_LINK } else { 0 };
        let mut node = Some(0).filter(|_| !parents.is_empty());
        while let Some(v) = node.take() {
            let depth = out.path.len();
            out.path.push(v);
            let (mut row, saw) = clean(self.target.row([i, v]), of_target);
            out.status |= if saw && self.rule != VWD_WALK_GREEDY { VWD_SAMPLE_NAN } else { 0 };
            if let Some(end) = end.as_ref().filter(|end| (depth as i64) < end.min_remaining) {
                forbid(&mut row, &end.stop, of_target);
            }
            let Some(p) = distribution(&row, of_target, if is_greedy { &PLAIN } else { settings })? else {
                out.status |= VWD_TREE_NO_TOKEN;
                break;
            };
            let children: Vec<usize> =
                (v + 1..parents.len()).filter(|&c| depth + 1 < self.places && parents[c] == v as i64).collect();
            let u = |purpose, index| uniform(self.seeds[i], self.positions[i] + depth as i64, purpose, index);
            let token = if is_greedy || self.rule == VWD_WALK_COUPLED {
                let token = if is_greedy { likeliest(&row) } else { sampling::draw(&p, u(1, 0))? };
                node = children.into_iter().find(|&c| self.tokens[[i, c]] == token as i64);
                token
            } else {
                let tried: Vec<(usize, usize)> = children
                    .into_iter()
                    .enumerate()
                    .filter(|&(_, c)| (0..vocabulary as i64).contains(&self.tokens[[i, c]]))
                    .collect();
                let q = match &self.draft_rows {
                    Some(rows) if !tried.is_empty() => {
                        let all: Vec<i64> = (0..rows.shape[2] as i64).collect();
                        let map = self.map.as_deref().unwrap_or(&all);
                        let (q, saw) = drafted(rows.row([i, v]), map, vocabulary, of_draft, settings)?;
                        out.status |= if saw { VWD_SAMPLE_NAN } else { 0 };
                        Some(q)
                    }
                    _ => None,
                };
                let mut turns = Turns::new(&p, q.as_deref(), self.rule == VWD_WALK_DISTINCT);
                let mut taken = None;
                for (rank, c) in tried {
                    let token = self.tokens[[i, c]] as usize;
                    if turns.accepts(token, u(0, rank as u32))? {
                        taken = Some((c, token));
                        break;
                    }
                    turns.refuse(token);
                }
                node = taken.map(|(c, _)| c);
                taken.map_or_else(|| turns.draw(u(1, 0)), |(_, token)| Ok(token))?
            };
            out.committed.push(token as i64);
        }
        Ok(out)
    }

    /// Runs it and compares each request of which the formulas are sure. Returns how many those are.
    pub fn check(&self, backend: &Backend, rng: Option<&mut Rng>) -> usize {
        let found = self.run(backend, rng);
        let mut sure = 0;
        for i in 0..self.batch() {
            let Ok(expected) = self.expected(i) else { continue };
            sure += 1;
            let what = format!("request {i}, rule {}, {:?}", self.rule, self.settings[i]);
            let mut path: Vec<i64> = expected.path.iter().map(|&node| node as i64).collect();
            let mut committed = expected.committed.clone();
            let walked = path.len().max(1) - 1;
            if let Some(end) = self.ends.as_ref().map(|ends| ends.of(i)) {
                let (n, finish) = end.cut(&committed);
                committed.truncate(n);
                path.truncate(if end.remaining.is_none_or(|most| most > 0) { walked.min(n) + 1 } else { 0 });
                assert_eq!((found.committed_len[i], found.finish[i]), (n as i64, finish), "end of {what}");
            }
            let (accepted, next) = (walked.min(committed.len()), committed.get(walked).copied().unwrap_or(-1));
            path.resize(self.places, -1);
            committed.resize(self.places, -1);
            assert_eq!(found.path.row([i]), path, "path of {what}");
            assert_eq!(found.committed.row([i]), committed, "committed of {what}");
            assert_eq!((found.accepted[i], found.next_token[i]), (accepted as i64, next), "{what}");
            assert_eq!(found.status[i], expected.status as i64, "status of {what}");
        }
        sure
    }

    /// The same of trees that are chains, by `vwd_verify_sample`.
    pub fn run_as_chain(&self, backend: &Backend) -> Results {
        let (batch, nodes) = (self.batch(), self.nodes());
        let plain = Layout::default();
        let draft = Array::from_fn(&[batch, nodes - 1], |at| self.tokens[[at[0], at[1] + 1]]);
        let place =
            |dtype, values: &[i64]| Tensor::ints(backend, dtype, &Array::new(&[values.len()], values.to_vec()), &plain);
        let floats = |of: fn(&Settings) -> f64| {
            let values = Array::new(&[batch], self.settings.iter().map(of).collect());
            Tensor::floats(backend, F32, &values, &plain)
        };
        let (temperature, top_p, min_p) = (floats(|s| s.temperature), floats(|s| s.top_p), floats(|s| s.min_p));
        let top_k = place(I32, &self.settings.iter().map(|s| s.top_k).collect::<Vec<_>>());
        // The root is no draft.
        let lens = self.counts.as_ref().map(|counts| counts.iter().map(|n| n - 1).collect::<Vec<_>>());
        let lens = lens.map(|lens| place(I32, &lens));
        let draft = Tensor::ints(backend, I32, &draft, &plain);
        let target = Tensor::floats(backend, self.dtype, &self.target, &plain);
        let rows = self.draft_rows.as_ref().map(|rows| {
            let columns = rows.shape[2];
            let values = Array::from_fn(&[batch, nodes - 1, columns], |at| rows[[at[0], at[1], at[2]]]);
            Tensor::floats(backend, self.draft_dtype, &values, &plain)
        });
        let map = self.map.as_ref().map(|map| place(I32, map));
        let (seeds, positions) = (place(I64, &self.seeds), place(I64, &self.positions));
        let ends = self.ends.clone().unwrap_or_default().place(backend, |_| Layout::default());
        let out = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &plain);
        let [next_token, accepted, committed_len, status] = [(); 4].map(|()| out(I32, &[batch]));
        let (committed, finish) = (out(I32, &[batch, nodes]), out(U8, &[batch]));
        let given = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        let temperature_last = self.settings[0].temperature_last;
        let args = vwd_verify_sample_args {
            rule: match self.rule {
                VWD_WALK_GREEDY => VWD_ACCEPT_GREEDY,
                VWD_WALK_COUPLED => VWD_ACCEPT_COUPLED,
                _ => VWD_ACCEPT_REJECTION,
            },
            flags: self.flags | if temperature_last { VWD_SAMPLE_TEMPERATURE_LAST } else { 0 },
            draft: draft.c(),
            draft_lens: given(&lens),
            target: target.c(),
            draft_rows: given(&rows),
            draft_map: given(&map),
            temperature: temperature.c(),
            top_k: top_k.c(),
            top_p: top_p.c(),
            min_p: min_p.c(),
            seeds: seeds.c(),
            positions: positions.c(),
            stop: given(&ends.stop),
            ignore_stop: given(&ends.ignore_stop),
            remaining: given(&ends.remaining),
            min_remaining: given(&ends.min_remaining),
            next_token: next_token.c(),
            accepted: accepted.c(),
            committed: committed.c(),
            committed_len: committed_len.c(),
            finish: finish.c(),
            status: status.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify_sample(backend.session(), &args, backend.stream()) });
        let accepted = accepted.read_ints().data;
        let is_over = |i: usize| self.ends.as_ref().is_some_and(|ends| ends.of(i).remaining.is_some_and(|n| n <= 0));
        let bits = |status: i64| match status & VWD_SAMPLE_NO_TOKEN as i64 {
            0 => status,
            bit => status - bit + VWD_TREE_NO_TOKEN as i64,
        };
        Results {
            path: Array::from_fn(&[batch, nodes], |at| {
                if at[1] as i64 <= accepted[at[0]] && !is_over(at[0]) { at[1] as i64 } else { -1 }
            }),
            accepted,
            next_token: next_token.read_ints().data,
            committed: committed.read_ints(),
            status: status.read_ints().data.into_iter().map(bits).collect(),
            committed_len: committed_len.read_ints().data,
            finish: finish.read_ints().data,
        }
    }

    /// Draws each child from its parent's row by `rng`, as the rule would have it; by COUPLED as one likes.
    pub fn draft(&mut self, rng: &mut Rng) {
        for i in 0..self.batch() {
            let rows = self.drafted(i);
            self.draw(i, &rows, rng).into_iter().for_each(|(c, token)| self.tokens[[i, c]] = token);
        }
    }

    /// What gives the tokens of requests like the first, drawn in the same way.
    pub fn drafter(&self) -> impl Fn(&mut Rng) -> Vec<i64> + Sync {
        let rows = self.drafted(0);
        move |rng| {
            let mut tokens = self.tokens.row([0]).to_vec();
            self.draw(0, &rows, rng).into_iter().for_each(|(c, token)| tokens[c] = token);
            tokens
        }
    }

    /// q of each node of request `i`, where there are rows of drafts.
    fn drafted(&self, i: usize) -> Vec<Option<Vec<f64>>> {
        let all: Vec<i64> = (0..self.vocabulary() as i64).collect();
        let of_draft = self.flags & VWD_SAMPLE_DRAFT_PROBABILITIES != 0;
        let of_node = |v: usize| {
            let map = self.map.as_deref().unwrap_or(&all);
            let settings = Some(&self.settings[i]).filter(|settings| !settings.is_greedy());
            let row = self.draft_rows.as_ref()?.row([i, v]);
            Some(drafted(row, map, self.vocabulary(), of_draft, settings.unwrap_or(&PLAIN)).ok()?.0)
        };
        (0..self.nodes()).map(of_node).collect()
    }

    /// Children of request `i` with tokens that are drawn from these q of its nodes.
    fn draw(&self, i: usize, rows: &[Option<Vec<f64>>], rng: &mut Rng) -> Vec<(usize, i64)> {
        let (mut drawn, parents) = (vec![], self.parents.row([i]));
        for (v, q) in rows.iter().enumerate() {
            let Some(q) = q else { continue };
            let mut taken: Vec<usize> = vec![];
            for c in (v + 1..parents.len()).filter(|&c| parents[c] == v as i64) {
                let of = |token: usize| if taken.contains(&token) { 0.0 } else { q[token] };
                let total: f64 = (0..q.len()).map(of).sum();
                let mut left = rng.unit() * total;
                let token = (0..q.len()).position(|token| {
                    left -= of(token);
                    left < 0.0
                });
                drawn.push((c, token.map_or(-1, |token| token as i64)));
                taken.extend(token.filter(|_| self.rule == VWD_WALK_DISTINCT));
            }
        }
        drawn
    }

    /// Request `i` alone.
    pub fn alone(&self, i: usize) -> Scene {
        let row = |t: &Array<i64>| Array::new(&[1, self.nodes()], t.row([i]).to_vec());
        let rows = |t: &Array<f64>| Array::new(&[&[1], &t.shape[1..]].concat(), t.row([i]).to_vec());
        Scene {
            tokens: row(&self.tokens),
            parents: row(&self.parents),
            counts: self.counts.as_ref().map(|counts| vec![counts[i]]),
            target: rows(&self.target),
            draft_rows: self.draft_rows.as_ref().map(rows),
            settings: vec![self.settings[i]],
            seeds: vec![self.seeds[i]],
            positions: vec![self.positions[i]],
            ends: self.ends.as_ref().map(|ends| ends.select(&[i])),
            ..self.clone()
        }
    }

    /// So many requests that share the rows of request 0.
    pub fn repeated(&self, batch: usize) -> Scene {
        let row = |t: &Array<i64>| Array::new(&[batch, self.nodes()], t.row([0]).repeat(batch));
        Scene {
            tokens: row(&self.tokens),
            parents: row(&self.parents),
            counts: self.counts.as_ref().map(|counts| vec![counts[0]; batch]),
            settings: vec![self.settings[0]; batch],
            seeds: vec![0; batch],
            positions: vec![0; batch],
            ends: self.ends.as_ref().map(|ends| ends.select(&vec![0; batch])),
            ..self.clone()
        }
    }
}

/// A call's arguments in memory.
pub struct Placed<'b> {
    backend: &'b Backend,
    args: vwd_verify_tree_args,
    tokens: Tensor<'b>,
    seeds: Tensor<'b>,
    positions: Tensor<'b>,
    /// The other inputs.
    inputs: Vec<Tensor<'b>>,
    accepted: Tensor<'b>,
    path: Tensor<'b>,
    next_token: Tensor<'b>,
    committed: Tensor<'b>,
    status: Tensor<'b>,
    cut: Option<(Tensor<'b>, Tensor<'b>)>,
}

impl Again for Placed<'_> {
    fn run(&self) {
        // SAFETY: the tensors outlive the call.
        self.backend.finish(unsafe { vwd_verify_tree(self.backend.session(), &self.args, self.backend.stream()) });
    }

    fn draft(&self) -> &Tensor<'_> {
        &self.tokens
    }

    fn numbers(&self) -> [&Tensor<'_>; 2] {
        [&self.seeds, &self.positions]
    }

    fn committed(&self) -> &Tensor<'_> {
        &self.committed
    }
}

impl Placed<'_> {
    /// What the call wrote, and nothing else.
    fn results(&self) -> Results {
        let inputs = [&self.tokens, &self.seeds, &self.positions];
        inputs.into_iter().chain(&self.inputs).for_each(|t| t.assert_untouched("an input"));
        let cuts = self.cut.iter().flat_map(|(len, finish)| [len, finish]);
        let outputs = [&self.accepted, &self.path, &self.next_token, &self.committed, &self.status];
        outputs.into_iter().chain(cuts).for_each(|t| t.assert_written("an output", |_| true));
        let word = |bytes: &Bytes| u32::from_le_bytes(bytes[..].try_into().unwrap()) as i64;
        let cut = self.cut.as_ref();
        let (committed_len, finish) =
            cut.map(|(len, finish)| (len.read_ints().data, finish.read_ints().data)).unwrap_or_default();
        Results {
            accepted: self.accepted.read_ints().data,
            path: self.path.read_ints(),
            next_token: self.next_token.read_ints().data,
            committed: self.committed.read_ints(),
            status: self.status.read_raw().data.iter().map(word).collect(),
            committed_len,
            finish,
        }
    }
}

/// Everything at random. Children are mostly drawn as the rule takes them to be, now and then from anything.
pub fn random(rng: &mut Rng, batch: usize, nodes: usize, vocabulary: usize) -> Scene {
    let dtype = rng.pick(&[F32, F16, BF16]);
    let temperature_last = rng.one_in(4);
    let columns = if rng.one_in(2) { vocabulary } else { rng.size(1..=vocabulary) };
    let has_rows = rng.one_in(2);
    // Logits without filters and without a map, of which CUDA sums those of the path alone.
    let is_plain = rng.one_in(3);
    let map = (has_rows && !is_plain && rng.one_in(2)).then(|| any_map(rng, vocabulary, columns));
    let rule = rng.pick(&[RULES[0], RULES[1], RULES[2], VWD_WALK_GREEDY]);
    let is_weights = [rng.one_in(4), rng.one_in(3)].map(|is| is && rule != VWD_WALK_GREEDY && !is_plain);
    let parents = (0..batch).flat_map(|_| {
        let mut parents = random_parents(rng, nodes);
        if rng.one_in(3) {
            break_some(rng, &mut parents);
        }
        parents
    });
    let parents = Array::new(&[batch, nodes], parents.collect());
    let (draft_dtype, draft_rows) = any_draft_rows(rng, &[batch, nodes, columns], is_weights[1]);
    let target = logits(rng, &[batch, nodes, vocabulary], dtype);
    let target = if is_weights[0] { target.map(|&x| dtype.round((x / 2.0).exp())) } else { target };
    let settings =
        |s: Settings| if is_plain { Settings { temperature: s.temperature, temperature_last, ..PLAIN } } else { s };
    let mut scene = Scene {
        rule,
        flags: is_weights[0] as u32 * VWD_SAMPLE_TARGET_PROBABILITIES
            + is_weights[1] as u32 * VWD_SAMPLE_DRAFT_PROBABILITIES,
        dtype,
        tokens: Array::from_fn(&[batch, nodes], |_| rng.int(-1..=vocabulary as i64)),
        parents,
        counts: rng.one_in(2).then(|| (0..batch).map(|_| rng.int(-1..=nodes as i64 + 2)).collect()),
        places: if rng.one_in(3) { rng.size(1..=nodes) } else { nodes },
        target,
        draft_rows: has_rows.then_some(draft_rows),
        draft_dtype,
        map,
        settings: (0..batch).map(|_| any_settings(rng, temperature_last)).map(settings).collect(),
        seeds: (0..batch).map(|_| rng.int(i64::MIN..=i64::MAX)).collect(),
        positions: (0..batch).map(|_| rng.int(0..=1 << 20)).collect(),
        ends: None,
    };
    if !rng.one_in(4) {
        scene.draft(rng);
    }
    scene.ends = rng.one_in(2).then(|| Ends::random(rng, &scene));
    scene
}
