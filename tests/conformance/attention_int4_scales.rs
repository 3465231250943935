//! Attention to tokens in INT4 whose scales are at the ends of what e4m3 holds: 0, 2⁻⁹, 448 and NaN.

use crate::Case;
use crate::attention_int4::{in_slots, with_options};
use crate::attention_model::*;
use crate::attention_variants::{
    ANY, HOPPER, HOPPER_AND_LATER, in_int4, in_int4_of_any_width, in_int4_slots, int4_drafts,
};
use crate::support::*;
use std::ops::RangeInclusive;

pub const CASES: &[Case] = cases![
    attention_over_int4_of_any_scale_agrees_with_the_formula,
    attention_over_slots_of_any_scale_agrees_with_the_formula,
];
pub const VARIANTS: &[Case] = cases![
    attention_by_int4_128_takes_any_scale,
    attention_by_int4_verify128_takes_any_scale,
    attention_of_a_tree_by_int4_verify128_takes_any_scale,
    attention_by_int4_mma_takes_any_scale,
    attention_by_general_over_int4_takes_any_scale,
];

const LEAST: f64 = 1.0 / 512.0;
const MOST: f64 = 448.0;

/// What the scales of all keys or of all values are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Usual,
    Zero,
    Least,
    Most,
    Mixed,
}

impl Kind {
    fn random(rng: &mut Rng) -> Kind {
        rng.pick(&[Kind::Usual, Kind::Zero, Kind::Least, Kind::Most, Kind::Mixed])
    }

    fn scale(self, rng: &mut Rng, usual: f64) -> f64 {
        match self {
            Kind::Usual => usual,
            Kind::Zero => 0.0,
            Kind::Least => LEAST,
            Kind::Most => MOST,
            Kind::Mixed => rng.pick(&[usual, 0.0, LEAST, MOST]),
        }
    }
}

/// A model whose keys and values have scales of these kinds. Where scores are wide, any error of theirs decides which token has all weight.
fn model(rng: &mut Rng, spec: Spec) -> Model {
    let kinds = [(); 2].map(|()| Kind::random(rng));
    let is_wide = matches!(kinds[0], Kind::Most | Kind::Mixed);
    let scale = Some(if is_wide && !rng.one_in(4) { 1e-4 } else { 0.09 });
    let mut model = Model::random(rng, Spec { scale, int4: true, ..spec });
    let int4 = model.int4.as_mut().expect("tokens in INT4");
    for (scales, kind) in int4.scales.iter_mut().zip(kinds) {
        scales.data.iter_mut().for_each(|scale| *scale = kind.scale(rng, *scale));
    }
    // Drafts are coded, too, where a block ends with them.
    if rng.one_in(2) {
        int4.lens.fill(i32::MAX as i64);
        model.lens.fill((model.spec.most / model.spec.block * model.spec.block) as i64);
    }
    model.sinks.iter_mut().for_each(|sink| *sink = sink.clamp(-90.0, 90.0));
    model
}

/// Makes NaN the scales of keys or of values, of a token or of some that follow each other; at times of those that some rows alone see.
fn spoil(rng: &mut Rng, model: &mut Model) {
    for _ in 0..rng.size(0..=3) {
        let (i, g) = (rng.size(0..=model.spec.batch - 1), rng.size(0..=model.spec.kv_heads - 1));
        let len = model.len(i);
        let last = len.saturating_sub(rng.size(0..=model.spec.rows()));
        // Whole tiles are all that a warp attends to.
        let (any, block) = (rng.size(0..=len), model.spec.block);
        let tiles = (any / block * block, rng.pick(&[block, 64, 128, len]));
        let (begin, count) = rng.pick(&[(last, 1), (any, 1), (any, 20), tiles, tiles]);
        let of = rng.size(0..=1);
        for t in begin..(begin + count).min(len) {
            if let Some(Some(at)) = model.coded_place(i, g, t) {
                model.int4.as_mut().expect("tokens in INT4").scales[of][at] = f64::NAN;
            }
        }
    }
}

/// What a row of a head should give.
#[derive(Clone)]
struct Wanted {
    state: oracle::State,
    /// Largest component of the values, weighted as these are.
    magnitude: f64,
    /// Largest score.
    score: f64,
}

impl Wanted {
    fn of(model: &Model, i: usize, r: usize, h: usize, blocks: &[i64]) -> Wanted {
        let (spec, g) = (&model.spec, h / model.spec.group);
        let tokens: Vec<_> = model.tokens(i, r, blocks).iter().filter_map(|&t| model.token(i, g, t)).collect();
        let largest = |x: &[f64]| x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        // Behind the value: its largest component.
        let values: Vec<Vec<f64>> = tokens.iter().map(|[_, v]| [&v[..], &[largest(v)]].concat()).collect();
        let keys: Vec<&[f64]> = tokens.iter().map(|[k, _]| k.as_slice()).collect();
        let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
        let (q, scale) = (model.q.row([i, r, h]), spec.scale.expect("given"));
        let mut state = oracle::capped_attention(q, &keys, &values, spec.value_dim + 1, scale, spec.cap);
        let magnitude = state.acc.pop().expect("one") / if state.l > 0.0 { state.l } else { 1.0 };
        let scores = keys.iter().map(|k| (scale * oracle::dot(q, k)).abs());
        Wanted { state, magnitude, score: scores.fold(0.0, f64::max) }
    }

    fn has_nan_key(&self) -> bool {
        self.state.l.is_nan()
    }

    fn has_nan_value(&self) -> bool {
        !self.has_nan_key() && self.state.acc.iter().any(|x| x.is_nan())
    }
}

/// Rows that see a NaN are NaN, and others are what the formula gives.
fn check(backend: &Backend, model: &Model, ids: &Ids, results: &Results) {
    let spec = &model.spec;
    let full = [spec.batch, spec.rows(), spec.heads()];
    let rows = |t: &Tensor| Array::new(&[&full[..], &[spec.value_dim]].concat(), t.read_floats().data);
    let numbers = |t: &Tensor| Array::new(&full, t.read_floats().data);
    let (out, lse) = (rows(&results.out), numbers(&results.lse));
    let (acc, m, l) = (rows(&results.state[0]), numbers(&results.state[1]), numbers(&results.state[2]));
    let wanted = Array::from_fn(&full, |at| {
        let [i, r, h] = [at[0], at[1], at[2]];
        Wanted::of(model, i, r, h, model.list(ids, i, r, h / spec.group))
    });
    // On the CPU a query is rounded to 16 bits of its largest number, and on CUDA each channel to 11 of its own.
    let of_score = model.score_rounding(true) / if backend.is_cuda() { 1.0 } else { 8.0 };
    let of_weight = model.weight_rounding(backend.is_cuda());
    for at in array::indices(&full) {
        let at = [at[0], at[1], at[2]];
        let [i, r, h] = at;
        if model.keeps(i, r) {
            continue;
        }
        let Wanted { state: want, magnitude, score } = &wanted[at];
        let place = format!("{at:?} of {spec:?}, lens {:?}, q_lens {:?}", model.lens, model.q_lens);
        let all = || out.row(at).iter().chain(acc.row(at));
        if wanted[at].has_nan_key() {
            assert!(lse[at].is_nan() && l[at].is_nan(), "lse {}, l {} at {place}", lse[at], l[at]);
            assert!(all().all(|x| x.is_nan()), "numbers at {place}");
            continue;
        }
        let of_score = of_score + TOLERANCE * (1.0 + score);
        close(lse[at], want.lse(), 2.0 * of_score, &format!("lse at {place}"));
        close(m[at], want.m, of_score, &format!("m at {place}"));
        close(l[at], want.l, (2.0 * of_score).exp_m1() * want.l, &format!("l at {place}"));
        if wanted[at].has_nan_value() {
            assert!(all().all(|x| x.is_nan()), "numbers at {place}");
            continue;
        }
        // Tensor cores multiply the values of other rows of the list by a weight of zero.
        let is_reached = |r: usize| wanted[[i, r, h]].has_nan_value() || wanted[[i, r, h]].has_nan_key();
        let shares = backend.is_cuda() && spec.lists != Lists::Own && want.l > 0.0;
        if shares && (0..spec.rows()).any(is_reached) && all().all(|x| x.is_nan()) {
            continue;
        }
        let of_acc = magnitude * ((4.0 * of_score).exp_m1() + of_weight) + 1e-6;
        let rows = if spec.sinks { want.out_beside(model.sinks[h]) } else { want.out() };
        for (d, (&found, want)) in out.row(at).iter().zip(rows).enumerate() {
            close(found, want, of_acc + spec.q_type.rounding(want), &format!("out[{d}] at {place}"));
        }
        for (d, (&found, &want_acc)) in acc.row(at).iter().zip(&want.acc).enumerate() {
            close(found, want_acc, of_acc * want.l, &format!("acc[{d}] at {place}"));
        }
    }
}

fn agrees(backend: &Backend, rng: &mut Rng, spec: Spec) {
    let mut model = model(rng, spec);
    spoil(rng, &mut model);
    let share = rng.pick(&[0.3, 0.8, 1.0]);
    let ids = if model.spec.lists == Lists::Absent { model.everything() } else { model.ids(rng, share) };
    if model.spec.poisoned {
        model.poison(&[&ids]);
    }
    let placed = Placed::new(backend, rng, &model);
    let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, &ids));
    let results = Results::new(backend, rng, &model.spec);
    placed.attend(&placed.attention(list.as_ref(), &results));
    check(backend, &model, &ids, &results);
}

fn attention_over_int4_of_any_scale_agrees_with_the_formula(backend: &Backend) {
    rounds(40, |rng| {
        let spec = with_options(rng);
        agrees(backend, rng, Spec { most: spec.most.min(300), ..spec });
    });
}

fn attention_over_slots_of_any_scale_agrees_with_the_formula(backend: &Backend) {
    rounds(30, |rng| {
        let spec = with_options(rng);
        agrees(backend, rng, in_slots(Spec { most: spec.most.min(300), ..spec }));
    });
}

/// By a variant, over specs that it takes.
fn agrees_by(
    backend: &Backend,
    variant: &str,
    capabilities: RangeInclusive<u32>,
    count: u64,
    spec: impl Fn(&mut Rng) -> Spec,
) {
    let Some(backend) = backend.forcing(&format!("attention={variant}"), capabilities) else { return };
    rounds(count, |rng| {
        let spec = spec(rng);
        let (batch, kv_heads) = (spec.batch.min(2), spec.kv_heads.min(2));
        agrees(&backend, rng, Spec { aligned: true, batch, kv_heads, most: spec.most.min(500), ..spec });
    });
    backend.assert_ran(&format!("attention={variant}"));
}

fn drafts(rng: &mut Rng, tree: bool) -> Spec {
    Spec { tree, positions: Some(rng.pick(&[5, 9, 17, 40])), group: rng.pick(&[1, 4]), ..int4_drafts(rng) }
}

fn attention_by_int4_128_takes_any_scale(backend: &Backend) {
    let any = |rng: &mut Rng| if rng.one_in(3) { in_int4_slots(rng) } else { in_int4(rng) };
    agrees_by(backend, "int4_128", HOPPER_AND_LATER, 24, any);
}

fn attention_by_int4_verify128_takes_any_scale(backend: &Backend) {
    agrees_by(backend, "int4_verify128", HOPPER, 12, |rng| drafts(rng, false));
}

fn attention_of_a_tree_by_int4_verify128_takes_any_scale(backend: &Backend) {
    agrees_by(backend, "int4_verify128", HOPPER, 12, |rng| drafts(rng, true));
}

fn attention_by_int4_mma_takes_any_scale(backend: &Backend) {
    agrees_by(backend, "int4_mma", ANY, 24, in_int4_of_any_width);
}

fn attention_by_general_over_int4_takes_any_scale(backend: &Backend) {
    agrees_by(backend, "general", ANY, 16, |rng| {
        let tree = rng.one_in(3);
        Spec { most: 80, ..drafts(rng, tree) }
    });
}
