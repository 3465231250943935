//! Requests of vwd_verify_sample, and what they come to by the formulas.

use crate::draws::Again;
use crate::sampling::{Outcome, PLAIN, Settings, Unsure, Walk};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

/// Arguments of a call, as values.
#[derive(Clone)]
pub struct Scene {
    pub rule: u32,
    pub flags: u32,
    pub dtype: DType,
    /// [B, γ]
    pub draft: Array<i64>,
    pub lens: Option<Vec<i64>>,
    /// [B, γ+1, V], of numbers of the dtype
    pub target: Array<f64>,
    /// Unused numbers after each of its rows, where layouts are not random.
    pub target_gap: usize,
    pub wants_logprobs: bool,
    /// Row 0 of each request in [N, V], whose rows are those of target one after the other.
    pub begin: Option<Vec<i64>>,
    /// [B, γ, Vd], of numbers of draft_dtype
    pub draft_rows: Option<Array<f64>>,
    pub draft_dtype: DType,
    pub map: Option<Vec<i64>>,
    pub settings: Vec<Settings>,
    pub seeds: Vec<i64>,
    pub positions: Vec<i64>,
    /// [B, S]
    pub stop: Option<Array<i64>>,
    pub ignore_stop: Option<Vec<i64>>,
    pub remaining: Option<Vec<i64>>,
    pub min_remaining: Option<Vec<i64>>,
}

#[derive(Debug, PartialEq, Clone)]
pub struct Results {
    pub next_token: Vec<i64>,
    pub accepted: Vec<i64>,
    pub committed: Array<i64>,
    pub committed_len: Vec<i64>,
    pub finish: Vec<i64>,
    pub status: Vec<i64>,
    pub logprobs: Array<f64>,
}

impl Results {
    /// All but logarithms to the bit.
    pub fn assert_same(self, other: Results) {
        for (a, b) in self.logprobs.data.iter().zip(&other.logprobs.data) {
            assert!(a == b || (a - b).abs() <= 1e-6 * (1.0 + b.abs()), "ln p {a} {b}");
        }
        assert_eq!(Results { logprobs: other.logprobs.clone(), ..self }, other);
    }
}

pub fn column(values: &[i64]) -> Array<i64> {
    Array::new(&[values.len()], values.to_vec())
}

impl Scene {
    /// Plain sampling of these rows, [B, V].
    pub fn plain(dtype: DType, rows: Array<f64>) -> Scene {
        let [batch, tokens] = rows.shape[..] else { panic!("rows of one each") };
        Scene {
            rule: VWD_ACCEPT_AUTO,
            flags: 0,
            dtype,
            draft: Array::new(&[batch, 0], vec![]),
            lens: None,
            target: Array::new(&[batch, 1, tokens], rows.data),
            target_gap: 0,
            wants_logprobs: true,
            begin: None,
            draft_rows: None,
            draft_dtype: F32,
            map: None,
            settings: vec![PLAIN; batch],
            seeds: (0..batch as i64).map(|i| i * 77 + 5).collect(),
            positions: vec![100; batch],
            stop: None,
            ignore_stop: None,
            remaining: None,
            min_remaining: None,
        }
    }

    pub fn batch(&self) -> usize {
        self.draft.shape[0]
    }

    pub fn gamma(&self) -> usize {
        self.draft.shape[1]
    }

    pub fn tokens(&self) -> usize {
        self.target.shape[2]
    }

    /// Runs it, in random layouts if there is an `rng`.
    pub fn run(&self, backend: &Backend, rng: Option<&mut Rng>) -> Results {
        let placed = self.place(backend, rng);
        placed.run();
        placed.results()
    }

    /// Its arguments in memory, in random layouts if there is an `rng`. Rows of one request alone are those of all.
    pub fn place<'b>(&self, backend: &'b Backend, mut rng: Option<&mut Rng>) -> Placed<'b> {
        let target_layout = rng.is_none().then(|| Layout { gap: self.target_gap, ..Layout::default() });
        let mut layout = |rank: usize| rng.as_deref_mut().map_or(Layout::default(), |rng| Layout::random(rng, rank));
        let (batch, gamma, tokens) = (self.batch(), self.gamma(), self.tokens());
        let token = if batch % 2 == 0 { I32 } else { I64 };
        let draft = Tensor::ints(backend, token, &self.draft, &layout(2));
        let target = match self.begin {
            Some(_) => {
                let flat = Array::new(&[batch * (gamma + 1), tokens], self.target.data.clone());
                Tensor::floats(backend, self.dtype, &flat, &target_layout.unwrap_or_else(|| layout(2)))
            }
            None => Tensor::floats(backend, self.dtype, &self.target, &target_layout.unwrap_or_else(|| layout(3)))
                .shared_by(batch),
        };
        let rows = self
            .draft_rows
            .as_ref()
            .map(|rows| Tensor::floats(backend, self.draft_dtype, rows, &layout(3)).shared_by(batch));
        let mut ints = |values: &Option<Vec<i64>>, dtype| {
            values.as_ref().map(|values| Tensor::ints(backend, dtype, &column(values), &layout(1)))
        };
        let is_narrow = |&row: &i64| i32::try_from(row).is_ok();
        let begin = self.begin.as_ref().is_some_and(|begin| batch % 2 == 1 && begin.iter().all(is_narrow));
        let begin = ints(&self.begin, if begin { I32 } else { I64 });
        let (lens, map) = (ints(&self.lens, I32), ints(&self.map, I32));
        let (remaining, least, ignored) =
            (ints(&self.remaining, I32), ints(&self.min_remaining, I32), ints(&self.ignore_stop, U8));
        // Seeds and status may be unsigned or not.
        let (of_seeds, of_status) = if batch % 4 < 2 { (U64, I32) } else { (I64, U32) };
        let seeds = Tensor::ints(backend, of_seeds, &column(&self.seeds), &layout(1));
        let positions = Tensor::ints(backend, token, &column(&self.positions), &layout(1));
        // Filters that are off for all requests are not given.
        let has = |differs: fn(&Settings) -> bool| self.settings.iter().any(differs);
        let top_k = has(|s| s.top_k != 0).then(|| self.settings.iter().map(|s| s.top_k).collect::<Vec<_>>());
        let top_k = top_k.map(|values| Tensor::ints(backend, I32, &column(&values), &layout(1)));
        let mut floats = |of: fn(&Settings) -> f64| {
            let values = Array::new(&[batch], self.settings.iter().map(of).collect());
            Tensor::floats(backend, F32, &values, &layout(1))
        };
        let temperature = floats(|s| s.temperature);
        let top_p = has(|s| s.top_p != 1.0).then(|| floats(|s| s.top_p));
        let min_p = has(|s| s.min_p != 0.0).then(|| floats(|s| s.min_p));
        let stop = self.stop.as_ref().map(|stop| Tensor::ints(backend, token, stop, &layout(2)));
        let mut poisoned = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &layout(shape.len()));
        let next_token = poisoned(token, &[batch]);
        let [accepted, committed_len] = [(); 2].map(|()| poisoned(I32, &[batch]));
        let status = poisoned(of_status, &[batch]);
        let (finish, committed) = (poisoned(U8, &[batch]), poisoned(token, &[batch, gamma + 1]));
        let logprobs = self.wants_logprobs.then(|| poisoned(F32, &[batch, gamma + 1]));
        let given = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        let temperature_last = self.settings.first().is_some_and(|s| s.temperature_last);
        let args = vwd_verify_sample_args {
            rule: self.rule,
            flags: self.flags | if temperature_last { VWD_SAMPLE_TEMPERATURE_LAST } else { 0 },
            draft: draft.c(),
            draft_lens: given(&lens),
            target: target.c(),
            target_begin: given(&begin),
            draft_rows: given(&rows),
            draft_map: given(&map),
            temperature: temperature.c(),
            top_k: given(&top_k),
            top_p: given(&top_p),
            min_p: given(&min_p),
            seeds: seeds.c(),
            positions: positions.c(),
            stop: given(&stop),
            ignore_stop: given(&ignored),
            remaining: given(&remaining),
            min_remaining: given(&least),
            next_token: next_token.c(),
            accepted: accepted.c(),
            committed: committed.c(),
            committed_len: committed_len.c(),
            finish: finish.c(),
            status: status.c(),
            logprobs: given(&logprobs),
            ..args()
        };
        let optional = [
            ("draft_lens", lens),
            ("target_begin", begin),
            ("draft_rows", rows),
            ("draft_map", map),
            ("top_k", top_k),
            ("top_p", top_p),
            ("min_p", min_p),
            ("stop", stop),
            ("ignore_stop", ignored),
            ("remaining", remaining),
            ("min_remaining", least),
        ];
        let inputs = [("target", Some(target)), ("temperature", Some(temperature))].into_iter().chain(optional);
        let inputs = inputs.filter_map(|(name, t)| Some((name, t?))).collect();
        Placed {
            backend,
            args,
            draft,
            seeds,
            positions,
            inputs,
            next_token,
            accepted,
            committed,
            committed_len,
            finish,
            status,
            logprobs,
        }
    }

    /// What request `i` commits by the formulas.
    fn expected(&self, i: usize) -> Result<Outcome, Unsure> {
        let (gamma, columns) = (self.gamma(), self.draft_rows.as_ref().map_or(0, |rows| rows.shape[2]));
        let len = self.lens.as_ref().map_or(gamma, |lens| lens[i].clamp(0, gamma as i64) as usize);
        let flat = self.target.shape[0] * (gamma + 1);
        let row = |r: usize| match &self.begin {
            Some(begin) => {
                let at = begin[i].checked_add(r as i64).filter(|at| (0..flat as i64).contains(at))? as usize;
                Some(self.target.row([at / (gamma + 1), at % (gamma + 1)]))
            }
            None => Some(self.target.row([i, r])),
        };
        let ignores = self.ignore_stop.as_ref().is_some_and(|ignored| ignored[i] != 0);
        let stop = self.stop.as_ref().filter(|_| !ignores).map_or(vec![], |stop| stop.row([i]).to_vec());
        let settings = Settings {
            temperature: if self.rule == VWD_ACCEPT_GREEDY { 0.0 } else { self.settings[i].temperature },
            ..self.settings[i]
        };
        let rejects = self.rule == VWD_ACCEPT_REJECTION || self.rule == VWD_ACCEPT_AUTO && self.draft_rows.is_some();
        let of = |values: &Option<Vec<i64>>, absent| values.as_ref().map_or(absent, |values| values[i].max(0));
        let draft_rows = self.draft_rows.as_ref().map(|rows| (0..gamma).map(|r| rows.row([i, r]).to_vec()).collect());
        Walk {
            rejects,
            target_is_weights: self.flags & VWD_SAMPLE_TARGET_PROBABILITIES != 0,
            draft_is_weights: self.flags & VWD_SAMPLE_DRAFT_PROBABILITIES != 0,
            settings,
            seed: self.seeds[i],
            position: self.positions[i],
            draft: &self.draft.row([i])[..len],
            rows: (0..=gamma).map(row).collect(),
            draft_rows,
            map: self.map.clone().unwrap_or((0..columns as i64).collect()),
            stop,
            remaining: of(&self.remaining, i64::MAX),
            min_remaining: of(&self.min_remaining, 0),
        }
        .run()
    }

    /// Runs it and compares each request of which the formulas are sure. Returns how many those are.
    pub fn check(&self, backend: &Backend, rng: Option<&mut Rng>) -> usize {
        let found = self.run(backend, rng);
        let mut sure = 0;
        for i in 0..self.batch() {
            let Ok(expected) = self.expected(i) else { continue };
            sure += 1;
            let n = expected.committed.len();
            let mut committed = expected.committed.clone();
            committed.resize(self.gamma() + 1, -1);
            let what = format!("request {i}, rule {}, {:?}", self.rule, self.settings[i]);
            assert_eq!(found.committed.row([i]), committed, "{what}");
            assert_eq!((found.accepted[i], found.next_token[i]), (expected.accepted, expected.next_token()), "{what}");
            assert_eq!((found.committed_len[i], found.finish[i]), (n as i64, expected.finish), "{what}");
            assert_eq!(found.status[i], expected.status, "status, {what}");
            for (r, &ln) in found.logprobs.row([i]).iter().enumerate() {
                let expected = expected.logprobs.get(r).copied().unwrap_or(0.0);
                // The contract's bound, and the rounding of float32.
                assert!(
                    ln == expected || (ln - expected).abs() <= 1.2e-6 * (1.0 + expected.abs()),
                    "{what}: ln p {ln} {expected}"
                );
            }
        }
        sure
    }
}

/// A call's arguments in memory.
pub struct Placed<'b> {
    backend: &'b Backend,
    args: vwd_verify_sample_args,
    draft: Tensor<'b>,
    seeds: Tensor<'b>,
    positions: Tensor<'b>,
    /// The other inputs, with their names.
    inputs: Vec<(&'static str, Tensor<'b>)>,
    next_token: Tensor<'b>,
    accepted: Tensor<'b>,
    committed: Tensor<'b>,
    committed_len: Tensor<'b>,
    finish: Tensor<'b>,
    status: Tensor<'b>,
    logprobs: Option<Tensor<'b>>,
}

impl Again for Placed<'_> {
    fn run(&self) {
        // SAFETY: the tensors outlive the call.
        self.backend.finish(unsafe { vwd_verify_sample(self.backend.session(), &self.args, self.backend.stream()) });
    }

    fn draft(&self) -> &Tensor<'_> {
        &self.draft
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
        let given = [("draft", &self.draft), ("seeds", &self.seeds), ("positions", &self.positions)];
        given.iter().for_each(|(name, t)| t.assert_untouched(name));
        self.inputs.iter().for_each(|(name, t)| t.assert_untouched(name));
        let outputs =
            [&self.next_token, &self.accepted, &self.committed, &self.committed_len, &self.finish, &self.status];
        outputs.into_iter().chain(&self.logprobs).for_each(|t| t.assert_written("an output", |_| true));
        let none = || Array::filled(&self.committed.shape, 0.0);
        Results {
            next_token: self.next_token.read_ints().data,
            accepted: self.accepted.read_ints().data,
            committed: self.committed.read_ints(),
            committed_len: self.committed_len.read_ints().data,
            finish: self.finish.read_ints().data,
            status: self.status.read_ints().data,
            logprobs: self.logprobs.as_ref().map_or_else(none, Tensor::read_floats),
        }
    }
}
