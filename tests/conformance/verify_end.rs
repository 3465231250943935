//! vwd_verify and vwd_verify_pack where stop tokens and lengths cut what is committed, and vwd_verify of drafts that lie one after the other:
//! against a loop over single tokens.

use crate::Case;
use crate::support::oracle::End;
use crate::support::*;
use crate::verify::{Pair, check_packed, verify_pack};
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    verify_cuts_at_stops_and_lengths,
    verify_cuts_every_row_length_and_batch_size,
    verify_cuts_at_every_place,
    verify_compares_stop_tokens_whole,
    verify_takes_drafts_one_after_the_other,
    verify_takes_any_ends_of_drafts,
    verify_by_each_variant_cuts_alike,
    verify_pack_packs_what_is_committed,
    verify_pack_packs_what_is_committed_of_plain_tensors,
];

/// Where the draft of a request lies.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Rows,
    Flat,
}

/// The contents of one call.
struct Scene {
    form: Form,
    /// [B, γ] and [B, γ+1], or [N] each.
    draft: Array<i64>,
    target: Array<i64>,
    /// [B], of rows.
    lens: Option<Vec<i64>>,
    /// [B] each, of drafts that lie one after the other.
    ends: Vec<i64>,
    bonus: Vec<i64>,
    /// Tokens of a row of committed.
    places: usize,
    /// [S] or [B, S]
    stop: Option<Array<i64>>,
    ignore_stop: Option<Vec<i64>>,
    remaining: Option<Vec<i64>>,
    min_remaining: Option<Vec<i64>>,
}

/// What a call writes, by request.
#[derive(Default)]
struct Results {
    accepted: Vec<i64>,
    next_token: Vec<i64>,
    mismatch: Vec<i64>,
    committed: Vec<i64>,
    committed_len: Vec<i64>,
    finish: Vec<i64>,
}

/// One of few tokens, so that drafts, targets and stop tokens meet; some are negative.
fn token(rng: &mut Rng) -> i64 {
    if rng.one_in(60) { -rng.int(1..=2) } else { rng.int(0..=6) }
}

fn guess(rng: &mut Rng, target: i64, acceptance: f64) -> i64 {
    if rng.unit() < acceptance { target } else { token(rng) }
}

impl Scene {
    /// What ends each request, at random, hostile now and then.
    fn with_end(mut self, rng: &mut Rng, gamma: usize) -> Scene {
        let batch = self.batch();
        // Every row stops early where many tokens are stop tokens.
        let stops = rng.pick(&[0, 1, 1, 2, 5]);
        let shape = if rng.one_in(2) { vec![stops] } else { vec![batch, stops] };
        let rare = if rng.one_in(2) { 6 } else { 40 };
        let most = rng.pick(&[1, 3, gamma as i64 + 2]);
        self.stop = rng.one_in(2).then(|| Array::from_fn(&shape, |_| rng.int(-1..=rare)));
        self.ignore_stop = rng.one_in(3).then(|| (0..batch).map(|_| rng.int(0..=2)).collect());
        let counts = |rng: &mut Rng, most| -> Option<Vec<i64>> {
            let any = |rng: &mut Rng| {
                if rng.one_in(20) { rng.pick(&[i32::MIN, -1, i32::MAX]) as i64 } else { rng.int(0..=most) }
            };
            rng.one_in(2).then(|| (0..batch).map(|_| any(rng)).collect())
        };
        self.remaining = counts(rng, most);
        self.min_remaining = counts(rng, 3);
        self
    }

    fn rows(rng: &mut Rng, batch: usize, gamma: usize) -> Scene {
        let acceptance = rng.pick(&[0.3, 0.8, 0.97, 1.0]);
        let target = Array::from_fn(&[batch, gamma + 1], |_| token(rng));
        let draft = Array::from_fn(&[batch, gamma], |at| guess(rng, target[[at[0], at[1]]], acceptance));
        let lens = rng.one_in(2).then(|| (0..batch).map(|_| rng.int(-2..=gamma as i64 + 2)).collect());
        let (ends, bonus, places) = (vec![], vec![], gamma + 1);
        let (stop, ignore_stop, remaining, min_remaining) = (None, None, None, None);
        let form = Form::Rows;
        Scene { form, draft, target, lens, ends, bonus, places, stop, ignore_stop, remaining, min_remaining }
    }

    fn flat(rng: &mut Rng, batch: usize, longest: usize, places: usize) -> Scene {
        let mut tokens = 0;
        let ends: Vec<i64> = (0..batch)
            .map(|_| {
                tokens += if rng.one_in(4) { 0 } else { rng.size(0..=longest) };
                tokens as i64
            })
            .collect();
        let target = Array::from_fn(&[tokens], |_| token(rng));
        let acceptance = rng.pick(&[0.3, 0.8, 0.97, 1.0]);
        let draft = Array::from_fn(&[tokens], |at| guess(rng, target[[at[0]]], acceptance));
        let bonus = (0..batch).map(|_| token(rng)).collect();
        Scene { form: Form::Flat, draft, target, lens: None, ends, bonus, places, ..Scene::rows(rng, 0, 0) }
    }

    fn batch(&self) -> usize {
        if self.form == Form::Flat { self.ends.len() } else { self.draft.shape[0] }
    }

    /// The draft of request i, and the target's tokens for it.
    fn request(&self, i: usize) -> (&[i64], Vec<i64>) {
        if self.form == Form::Rows {
            let gamma = self.draft.shape[1];
            let len = self.lens.as_ref().map_or(gamma, |lens| lens[i].clamp(0, gamma as i64) as usize);
            return (&self.draft.row([i])[..len], self.target.row([i]).to_vec());
        }
        let end = |i: usize| self.ends[i].clamp(0, self.draft.shape[0] as i64) as usize;
        let begin = if i > 0 { end(i - 1) } else { 0 };
        let tokens = begin..end(i).max(begin);
        let target = [&self.target.data[tokens.clone()], &[self.bonus[i]]].concat();
        (&self.draft.data[tokens.start..tokens.end.min(tokens.start + self.places - 1)], target)
    }

    fn end(&self, i: usize) -> End {
        let of = |values: &Option<Vec<i64>>| values.as_ref().map(|values| values[i]);
        let stop = match &self.stop {
            Some(stop) if of(&self.ignore_stop).unwrap_or(0) == 0 => match stop.shape.len() {
                1 => stop.data.clone(),
                _ => stop.row([i]).to_vec(),
            },
            _ => vec![],
        };
        End { stop, remaining: of(&self.remaining), min_remaining: of(&self.min_remaining).unwrap_or(0) }
    }

    fn expected(&self) -> Results {
        let mut results = Results::default();
        for i in 0..self.batch() {
            let (draft, target) = self.request(i);
            let refused = (0..draft.len()).find(|&j| draft[j] != target[j] || draft[j] < 0);
            let k = refused.unwrap_or(draft.len());
            let (n, finish) = self.end(i).cut(&target[..=k]);
            results.accepted.push(k.min(n) as i64);
            results.next_token.push(if n > k { target[k] } else { -1 });
            results.mismatch.push((refused.is_some() && n > k) as i64);
            results.committed_len.push(n as i64);
            results.finish.push(finish);
            results.committed.extend((0..self.places).map(|j| if j < n { target[j] } else { -1 }));
        }
        results
    }
}

/// The tensors of one call, by name.
struct Placed<'b> {
    inputs: Vec<(&'static str, Tensor<'b>)>,
    outputs: Vec<(&'static str, Tensor<'b>)>,
}

/// Some of the outputs that need not be given.
fn some_outputs(rng: &mut Rng) -> Vec<&'static str> {
    ["mismatch", "committed", "committed_len", "finish"].into_iter().filter(|_| rng.one_in(2)).collect()
}

type AnyLayout = fn(&mut Rng, usize) -> Layout;

fn plain(_: &mut Rng, _: usize) -> Layout {
    Layout::default()
}

impl<'b> Placed<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, scene: &Scene, layout: AnyLayout, optional: &[&str]) -> Placed<'b> {
        // int32 or int64, where all fit in int32.
        let fitting = |rng: &mut Rng, values: &[i64]| match values.iter().all(|&x| i32::try_from(x).is_ok()) {
            true => rng.pick(&[I32, I64]),
            false => I64,
        };
        let (dtype, batch) = (fitting(rng, &[&scene.draft.data[..], &scene.target.data[..]].concat()), scene.batch());
        let mut inputs = vec![];
        let mut input = |rng: &mut Rng, name, dtype, values: &Array<i64>| {
            inputs.push((name, Tensor::ints(backend, dtype, values, &layout(rng, values.shape.len()))));
        };
        let column = |values: &[i64]| Array::new(&[values.len()], values.to_vec());
        input(rng, "draft", dtype, &scene.draft);
        input(rng, "target", dtype, &scene.target);
        if scene.form == Form::Flat {
            input(rng, "draft_ends", I32, &column(&scene.ends));
            input(rng, "bonus", dtype, &column(&scene.bonus));
        }
        if let Some(stop) = &scene.stop {
            let stop_dtype = fitting(rng, &stop.data);
            input(rng, "stop", stop_dtype, stop);
        }
        let flag = rng.pick(&[U8, BOOL]);
        let columns = [
            ("draft_lens", I32, &scene.lens),
            ("ignore_stop", flag, &scene.ignore_stop),
            ("remaining", I32, &scene.remaining),
            ("min_remaining", I32, &scene.min_remaining),
        ];
        for (name, dtype, values) in columns {
            values.iter().for_each(|values| input(rng, name, dtype, &column(values)));
        }
        let mismatch = rng.pick(&[I32, U8, BOOL]);
        let outputs = [
            ("accepted", I32, vec![batch]),
            ("next_token", dtype, vec![batch]),
            ("mismatch", mismatch, vec![batch]),
            ("committed_len", I32, vec![batch]),
            ("finish", U8, vec![batch]),
            ("committed", dtype, vec![batch, scene.places]),
        ];
        let is_given = |name: &str| ["accepted", "next_token"].contains(&name) || optional.contains(&name);
        let place = |(name, dtype, shape): (&'static str, DType, Vec<usize>)| {
            (name, Tensor::poisoned(backend, dtype, &shape, &layout(rng, shape.len())))
        };
        let outputs = outputs.into_iter().filter(|output| is_given(output.0)).map(place).collect();
        Placed { inputs, outputs }
    }

    fn c(&self, name: &str) -> vwd_tensor {
        let mut all = self.inputs.iter().chain(&self.outputs);
        all.find(|field| field.0 == name).map_or(absent(), |field| field.1.c())
    }

    fn args(&self) -> vwd_verify_args {
        vwd_verify_args {
            draft: self.c("draft"),
            target: self.c("target"),
            draft_lens: self.c("draft_lens"),
            accepted: self.c("accepted"),
            next_token: self.c("next_token"),
            mismatch: self.c("mismatch"),
            committed: self.c("committed"),
            stop: self.c("stop"),
            ignore_stop: self.c("ignore_stop"),
            remaining: self.c("remaining"),
            min_remaining: self.c("min_remaining"),
            committed_len: self.c("committed_len"),
            finish: self.c("finish"),
            draft_ends: self.c("draft_ends"),
            bonus: self.c("bonus"),
            ..args()
        }
    }

    fn check(&self, expected: &Results) {
        for (name, tensor) in &self.outputs {
            let values = match *name {
                "accepted" => &expected.accepted,
                "next_token" => &expected.next_token,
                "mismatch" => &expected.mismatch,
                "committed" => &expected.committed,
                "committed_len" => &expected.committed_len,
                _ => &expected.finish,
            };
            assert_eq!(&tensor.read_ints().data, values, "{name}");
            tensor.assert_written(name, |_| true);
        }
        self.inputs.iter().for_each(|(name, tensor)| tensor.assert_untouched(name));
    }
}

fn check(backend: &Backend, rng: &mut Rng, scene: &Scene, layout: AnyLayout) {
    let mut optional = some_outputs(rng);
    if scene.form == Form::Flat {
        // It says how much of a draft is looked at.
        optional.push("committed");
    }
    check_with(backend, rng, scene, layout, &optional);
}

fn check_with(backend: &Backend, rng: &mut Rng, scene: &Scene, layout: AnyLayout, optional: &[&str]) {
    let call = Placed::new(backend, rng, scene, layout, optional);
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_verify(backend.session(), &call.args(), backend.stream()) });
    call.check(&scene.expected());
}

/// Tokens and stop tokens of either type, some of which differ in one half alone.
fn verify_compares_stop_tokens_whole(backend: &Backend) {
    const WIDE: [i64; 5] = [7, 7 + (1 << 32), u32::MAX as i64, -1, 5];
    rounds(backend.times(100) as u64, |rng| {
        let (batch, gamma) = (rng.size(1..=9), rng.pick(&[1, 6, 40, 140]));
        let mut scene = Scene::rows(rng, batch, gamma);
        let among = if rng.one_in(2) { &WIDE[..] } else { &[7, -1, 5] };
        scene.target = Array::from_fn(&[batch, gamma + 1], |_| if rng.one_in(9) { rng.pick(among) } else { 3 });
        scene.draft = Array::from_fn(&[batch, gamma], |at| scene.target[[at[0], at[1]]]);
        let among = if rng.one_in(2) { &WIDE[1..4] } else { &[7, -1, 5] };
        scene.stop = Some(Array::from_fn(&[rng.size(1..=6)], |_| rng.pick(among)));
        let layout = layout_of(rng);
        check(backend, rng, &scene, layout);
    });
}

fn layout_of(rng: &mut Rng) -> AnyLayout {
    if rng.one_in(2) { plain } else { Layout::random }
}

fn verify_cuts_at_stops_and_lengths(backend: &Backend) {
    rounds(backend.times(300) as u64, |rng| {
        let (batch, gamma) = (rng.size(0..=40), rng.size(0..=20));
        let scene = Scene::rows(rng, batch, gamma).with_end(rng, gamma);
        let layout = layout_of(rng);
        check(backend, rng, &scene, layout);
    });
}

fn verify_cuts_every_row_length_and_batch_size(backend: &Backend) {
    rounds(1, |rng| {
        for gamma in [1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 300] {
            for batch in [1, 33, 1025 / (1 + gamma / 8)] {
                let scene = Scene::rows(rng, batch, gamma).with_end(rng, gamma);
                check(backend, rng, &scene, plain);
            }
        }
    });
}

/// Every accepted length × stop × remaining × min_remaining of drafts of 4, in one call.
fn verify_cuts_at_every_place(backend: &Backend) {
    const GAMMA: i64 = 4;
    rounds(1, |rng| {
        let mut cases = vec![];
        for k in 0..=GAMMA {
            for stop in -1..=GAMMA {
                for remaining in -1..=GAMMA + 2 {
                    cases.extend((-1..=GAMMA + 1).map(|least| [k, stop, remaining, least]));
                }
            }
        }
        let batch = cases.len();
        let of = |n: usize| -> Vec<i64> { cases.iter().map(|case| case[n]).collect() };
        let target = Array::from_fn(&[batch, GAMMA as usize + 1], |at| 100 + at[1] as i64);
        let draft = Array::from_fn(&[batch, GAMMA as usize], |at| {
            100 + at[1] as i64 + (at[1] as i64 >= cases[at[0]][0]) as i64
        });
        // −1 stops nowhere.
        let stop = Array::new(&[batch, 1], of(1).into_iter().map(|r| if r < 0 { -1 } else { 100 + r }).collect());
        let scene = Scene {
            draft,
            target,
            lens: None,
            places: GAMMA as usize + 1,
            stop: Some(stop),
            remaining: Some(of(2)),
            min_remaining: Some(of(3)),
            ..Scene::rows(rng, 0, 0)
        };
        for layout in [plain, Layout::random] {
            check(backend, rng, &scene, layout);
        }
    });
}

fn verify_takes_drafts_one_after_the_other(backend: &Backend) {
    rounds(backend.times(200) as u64, |rng| {
        let (batch, longest) = (rng.pick(&[0, 1, 7, 40]), rng.pick(&[0, 1, 5, 20, 200]));
        let places = rng.pick(&[longest + 1, longest + 4, longest / 2 + 1]);
        let mut scene = Scene::flat(rng, batch, longest, places);
        if rng.one_in(2) {
            scene = scene.with_end(rng, longest);
        }
        let layout = layout_of(rng);
        check(backend, rng, &scene, layout);
    });
    rounds(1, |rng| {
        // Without committed nothing limits a draft but its end.
        let scene = Scene::flat(rng, 1025, 9, 10);
        check_with(backend, rng, &scene, plain, &["mismatch"]);
    });
}

/// Ends that descend, are negative or lie past the tokens.
fn verify_takes_any_ends_of_drafts(backend: &Backend) {
    rounds(backend.times(60) as u64, |rng| {
        let batch = rng.size(1..=20);
        let mut scene = Scene::flat(rng, batch, 6, 12).with_end(rng, 6);
        let tokens = scene.draft.shape[0] as i64;
        for end in &mut scene.ends {
            if rng.one_in(2) {
                let near = rng.int(-3..=tokens + 3);
                *end = rng.pick(&[near, near, i32::MIN as i64, i32::MAX as i64]);
            }
        }
        check(backend, rng, &scene, Layout::random);
    });
}

fn verify_by_each_variant_cuts_alike(backend: &Backend) {
    for (variant, has_end) in [("common", true), ("rows", true), ("rows", false), ("general", false), ("long", false)] {
        let forced = format!("verify={variant}");
        let backend = backend.forcing(&forced, 80..=999).expect("every device takes them");
        rounds(10, |rng| {
            let (batch, gamma) = (rng.size(1..=40), rng.pick(&[0, 1, 7, 32, 128]));
            let scene = Scene::rows(rng, batch, gamma);
            if has_end {
                let scene = scene.with_end(rng, gamma);
                check_with(&backend, rng, &scene, plain, &["mismatch", "committed", "committed_len", "finish"]);
            } else {
                check_with(&backend, rng, &scene, plain, &["mismatch", "committed"]);
            }
        });
        backend.assert_ran(&forced);
    }
}

// --- verify_pack -----------------------------------------------------------------------------------------------------

fn check_pack(backend: &Backend, rng: &mut Rng, scene: &Scene, layout: AnyLayout, pairs: &[Pair]) {
    let optional = some_outputs(rng);
    let call = Placed::new(backend, rng, scene, layout, &optional);
    let offsets = verify_pack(backend, rng, &call.args(), layout, pairs);
    let expected = scene.expected();
    call.check(&expected);
    check_packed(&offsets, &expected.accepted, scene.draft.shape[1], pairs);
}

fn verify_pack_packs_what_is_committed(backend: &Backend) {
    rounds(backend.times(60) as u64, |rng| {
        let (batch, gamma) = (rng.size(0..=40), rng.size(0..=12));
        let scene = Scene::rows(rng, batch, gamma).with_end(rng, gamma);
        let cap = rng.pick(&[batch * gamma, batch * gamma / 3]);
        let pairs: Vec<Pair> =
            (0..rng.size(1..=3)).map(|_| Pair::random(backend, rng, [batch, gamma, cap], &[3])).collect();
        check_pack(backend, rng, &scene, Layout::random, &pairs);
    });
}

/// Tensors as engines have them: one launch or two, alone or in clusters, short rows and long.
fn verify_pack_packs_what_is_committed_of_plain_tensors(backend: &Backend) {
    const MOST_TOKENS: usize = 6_000;
    rounds(20, |rng| {
        let gamma = rng.pick(&[1, 2, 8, 17, 32, 33, 64, 128, 129]);
        let batch = rng.pick(&[1, 2, 16, 17, 100, 129, 512, 1024, 1025]).min(MOST_TOKENS / gamma);
        let scene = Scene::rows(rng, batch, gamma).with_end(rng, gamma);
        let cap = rng.pick(&[batch * gamma, batch * gamma / 3 + 1]);
        let pairs: Vec<Pair> = (0..rng.pick(&[1, 2]))
            .map(|_| {
                let width = 8 * rng.pick(&[1, 3, 16]);
                let bytes = rng.bytes(batch * gamma * width * 2);
                let rows = Tensor::raw(backend, BF16, &[batch, gamma, width], &bytes, &Layout::default());
                Pair { rows, packed: Tensor::poisoned(backend, BF16, &[cap, width], &Layout::default()) }
            })
            .collect();
        check_pack(backend, rng, &scene, plain, &pairs);
    });
}
