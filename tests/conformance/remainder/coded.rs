//! The term over keys and values in INT4, with exact tokens at both ends, and over slots of both kinds.

use super::Rows;
use crate::Case;
use crate::attention_int4::in_slots;
use crate::attention_model::*;
use crate::attention_variants::{HOPPER_AND_LATER, in_int4};
use crate::support::*;
use vanward::abi::*;

pub const CASES: &[Case] = cases![
    attention_over_int4_with_a_remainder_agrees_with_the_formula,
    attention_over_slots_with_a_remainder_agrees_with_the_formula,
];
pub const VARIANTS: &[Case] = cases![attention_by_int4_128_with_a_remainder_agrees_with_the_formula];

/// What rows and masses hold.
struct Terms<'b> {
    rows: Rows<'b>,
    tokens: Array<i64>,
    mean_v: Array<f64>,
    covariance: Array<f64>,
    /// [B, Q, Hq]
    log_mass: (Array<f64>, Tensor<'b>),
}

impl<'b> Terms<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, spec: &Spec) -> Terms<'b> {
        let sizes @ [heads, dim, value_dim] = [spec.kv_heads, spec.dim, spec.value_dim];
        let mut rows = Rows::new(backend, rng, spec.batch, sizes);
        let count = rows.count;
        let tokens = Array::from_fn(&[count, heads], |_| rng.pick(&[0, -1, 64, 64, 64, 1 << 20]));
        let numbers = |rng: &mut Rng, shape: &[usize], size: f64| rng.normals(shape).map(|&x| F32.round(size * x));
        let mean_v = numbers(rng, &[count, heads, value_dim], 1.0);
        let covariance = numbers(rng, &[count, heads, dim, value_dim], 0.5);
        rows.tokens = Tensor::ints(backend, I32, &tokens, &Layout::random(rng, 2));
        rows.means[1] = Tensor::floats(backend, F32, &mean_v, &Layout::random(rng, 3));
        rows.covariance = Tensor::floats(backend, F32, &covariance, &Layout::random(rng, 4));
        // Scores are a few units, and a term has more or less weight than a list, or all, or none.
        let masses = Array::from_fn(&[spec.batch, spec.rows(), spec.heads()], |_| match rng.size(0..=7) {
            0 => f64::NEG_INFINITY,
            1 => rng.pick(&[f64::NAN, f64::INFINITY, 100.0, -100.0]),
            _ => F32.round(3.0 + 3.0 * rng.normal()),
        });
        let shape = spec.shape(&[spec.heads()]);
        let given = Array::new(&shape, masses.data.clone());
        let log_mass = (masses, Tensor::floats(backend, F32, &given, &Layout::random(rng, shape.len())));
        Terms { rows, tokens, mean_v, covariance, log_mass }
    }

    /// The state of a row's term.
    fn state(&self, model: &Model, i: usize, r: usize, h: usize) -> oracle::State {
        let (spec, g, log_mass) = (&model.spec, h / model.spec.group, self.log_mass.0[[i, r, h]]);
        let row = self.rows.row(i).filter(|&row| self.tokens[[row, g]] > 0 && log_mass.is_finite());
        let Some(row) = row.filter(|_| r < model.rows(i)) else { return oracle::State::empty(spec.value_dim) };
        let (query, scale) = (model.q.row([i, r, h]), spec.scale.expect("given"));
        let value = |d: usize| {
            let along: f64 = (0..spec.dim).map(|c| self.covariance[[row, g, c, d]] * query[c]).sum();
            self.mean_v[[row, g, d]] + 0.5 * scale * along
        };
        oracle::State { acc: (0..spec.value_dim).map(value).collect(), m: log_mass, l: 1.0 }
    }
}

/// Rows that a term joined, to lists with a coded token and with none.
#[derive(Default)]
struct Joined {
    coded: usize,
    exact: usize,
}

fn agrees(backend: &Backend, rng: &mut Rng, spec: Spec, joined: &mut Joined) {
    let lists = if spec.lists == Lists::Absent { Lists::Shared } else { spec.lists };
    // The call refuses these beside a remainder.
    let mut model = Model::random(rng, Spec { lists, cap: None, window: 0, tree: false, ..spec });
    let share = rng.pick(&[0.0, 0.3, 0.8, 1.0]);
    let ids = model.ids(rng, share);
    if model.spec.poisoned {
        model.poison(&[&ids]);
    }
    let placed = Placed::new(backend, rng, &model);
    let list = PlacedList::new(backend, rng, &model, &ids);
    let results = Results::new(backend, rng, &model.spec);
    let terms = Terms::random(backend, rng, &model.spec);
    placed.attend(&vwd_attention_args {
        remainder: kept(terms.rows.c()),
        log_mass: terms.log_mass.1.c(),
        ..placed.attention(Some(&list), &results)
    });
    results.check_states(&model, |i, r, h| {
        let (g, term) = (h / model.spec.group, terms.state(&model, i, r, h));
        let blocks = model.list(&ids, i, r, g);
        if term.l > 0.0 {
            let is_coded =
                model.tokens(i, r, blocks).iter().any(|&t| matches!(model.coded_place(i, g, t), Some(Some(_))));
            *(if is_coded { &mut joined.coded } else { &mut joined.exact }) += 1;
        }
        oracle::merge(&[model.expected(i, r, h, blocks), term])
    });
}

/// Any sizes, few tokens.
fn any(rng: &mut Rng) -> Spec {
    let spec = crate::attention_int4::plain(rng);
    let spec = if rng.one_in(2) { spec.with_positions(rng) } else { spec };
    let spec = if rng.one_in(3) { spec.with_sinks() } else { spec };
    Spec { most: spec.most.min(300), batch: spec.batch.min(2), ..spec }
}

fn attention_over_int4_with_a_remainder_agrees_with_the_formula(backend: &Backend) {
    let joined = std::sync::Mutex::new(Joined::default());
    rounds(20, |rng| {
        let spec = any(rng);
        agrees(backend, rng, spec, &mut joined.lock().unwrap());
    });
    let joined = joined.into_inner().unwrap();
    assert!(joined.coded > 0 && joined.exact > 0, "lists with coded tokens and without that terms joined");
}

fn attention_over_slots_with_a_remainder_agrees_with_the_formula(backend: &Backend) {
    let joined = std::sync::Mutex::new(Joined::default());
    rounds(20, |rng| {
        let spec = any(rng);
        // Slots name exact pages alone where there are no codes.
        let int4 = !rng.one_in(4);
        agrees(backend, rng, Spec { int4, ..in_slots(spec) }, &mut joined.lock().unwrap());
    });
    let joined = joined.into_inner().unwrap();
    assert!(joined.coded > 0 && joined.exact > 0, "lists with coded tokens and without that terms joined");
}

fn attention_by_int4_128_with_a_remainder_agrees_with_the_formula(backend: &Backend) {
    let Some(backend) = backend.forcing("attention=int4_128", HOPPER_AND_LATER) else { return };
    let joined = std::sync::Mutex::new(Joined::default());
    rounds(12, |rng| {
        let spec = in_int4(rng);
        let spec = if rng.one_in(2) { in_slots(spec) } else { spec };
        let spec = Spec { aligned: true, batch: spec.batch.min(2), most: spec.most.min(300), ..spec };
        agrees(&backend, rng, spec, &mut joined.lock().unwrap());
    });
    backend.assert_ran("attention=int4_128");
    assert!(joined.into_inner().unwrap().coded > 0, "lists with coded tokens that terms joined");
}
