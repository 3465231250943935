//! A model in memory: its tensors and lists, the calls on them, and the comparison of what these write with the model's formulas.

use super::{Ids, Model, Scales, Spec, TOLERANCE};
use crate::support::int4::PlacedInt4;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

/// A model in memory.
pub struct Placed<'b> {
    backend: &'b Backend,
    pub spec: Spec,
    pub q: Tensor<'b>,
    pub k: Tensor<'b>,
    pub v: Tensor<'b>,
    scales: [Option<Tensor<'b>>; 2],
    table: Tensor<'b>,
    lens: Tensor<'b>,
    q_lens: Option<Tensor<'b>>,
    sinks: Option<Tensor<'b>>,
    pub tree: Option<Tensor<'b>>,
    int4: Option<PlacedInt4<'b>>,
}

impl<'b> Placed<'b> {
    pub fn new(backend: &'b Backend, rng: &mut Rng, model: &Model) -> Placed<'b> {
        let spec = &model.spec;
        let place = |dtype, shape: &[usize], data: &[f64], layout: &Layout| {
            Tensor::floats(backend, dtype, &Array::new(shape, data.to_vec()), layout)
        };
        let ints = |rng: &mut Rng, data: &[i64]| {
            Tensor::ints(backend, I32, &Array::new(&[data.len()], data.to_vec()), &Layout::random(rng, 1))
        };
        let (of_k, of_v) = (spec.kv_layout(rng, 4), spec.kv_layout(rng, 4));
        let scales = std::array::from_fn(|n| {
            let (all, heads) = (&model.scales[n], model.scales[n].shape[2]);
            let layout = Layout::random(rng, if spec.scales[n] == Scales::PerToken { 3 } else { 1 });
            match spec.scales[n] {
                Scales::Absent => None,
                Scales::One => Some(place(F32, &[1], &all.data[..1], &layout)),
                Scales::PerHead => Some(place(F32, &[heads], &all.data[..heads], &layout)),
                Scales::PerToken => Some(place(F32, &all.shape, &all.data, &layout)),
            }
        });
        let q = spec.shape(&[spec.heads(), spec.dim]);
        Placed {
            backend,
            q: place(spec.q_type, &q, &model.q.data, &spec.layout(rng, q.len())),
            k: Tensor::floats(backend, spec.kv_type, &model.k, &of_k),
            v: Tensor::floats(backend, spec.kv_type, &model.v, &of_v),
            scales,
            table: Tensor::ints(backend, I32, &model.table, &Layout::random(rng, 2)),
            lens: ints(rng, &model.lens),
            q_lens: spec.q_lens.then(|| ints(rng, &model.q_lens)),
            sinks: spec.sinks.then(|| place(F32, &[spec.heads()], &model.sinks, &Layout::random(rng, 1))),
            tree: spec.tree.then(|| model.masks.place(backend, rng)),
            int4: model.int4.as_ref().map(|int4| PlacedInt4::new(backend, rng, int4, spec.aligned)),
            spec: spec.clone(),
        }
    }

    pub fn kv(&self) -> vwd_paged_kv {
        let c = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        let mut v = self.v.c();
        if self.spec.latent {
            v = self.k.c();
            v.shape[3] = self.spec.value_dim as i64;
        }
        vwd_paged_kv {
            k: self.k.c(),
            v,
            page_table: if self.spec.slots { absent() } else { self.table.c() },
            seq_lens: self.lens.c(),
            k_scale: c(&self.scales[0]),
            v_scale: c(&self.scales[1]),
            int4: self.int4.as_ref().map_or(std::ptr::null(), PlacedInt4::pointer),
            ..args()
        }
    }

    pub fn attention(&self, list: Option<&PlacedList>, results: &Results) -> vwd_attention_args {
        let c = |t: &Option<Tensor>| t.as_ref().map_or(absent(), Tensor::c);
        let list = list.map(PlacedList::c);
        vwd_attention_args {
            flags: if self.spec.keep_rows { VWD_ATTENTION_KEEP_ROWS } else { 0 },
            block_size: if list.is_some() { self.spec.block as u32 } else { 0 },
            scale: self.spec.scale.unwrap_or(0.0) as f32,
            soft_cap: self.spec.cap.unwrap_or(0.0) as f32,
            window: self.spec.window as u32,
            kv: kept(self.kv()),
            q: self.q.c(),
            q_lens: c(&self.q_lens),
            list: list.unwrap_or(vwd_block_list { ids: absent(), counts: absent(), slots: absent() }),
            sinks: c(&self.sinks),
            out: results.out.c(),
            lse: results.lse.c(),
            state: state_of(&results.state),
            tree: c(&self.tree),
            ..args()
        }
    }

    pub fn repair(&self, mode: u32, lists: [&PlacedList; 2], results: &Results) -> vwd_repair_args {
        let call = self.attention(Some(lists[1]), results);
        let mut predicted = lists[0].c();
        predicted.slots = absent();
        vwd_repair_args {
            flags: call.flags,
            mode,
            block_size: call.block_size,
            scale: call.scale,
            soft_cap: call.soft_cap,
            window: call.window,
            kv: call.kv,
            q: call.q,
            q_lens: call.q_lens,
            predicted,
            selected: call.list,
            sinks: call.sinks,
            out: call.out,
            lse: call.lse,
            state: call.state,
            tree: call.tree,
            ..args()
        }
    }

    pub fn attend(&self, call: &vwd_attention_args) {
        // SAFETY: the tensors of the call are alive.
        self.backend.finish(unsafe { vwd_attention(self.backend.session(), call, self.backend.stream()) });
    }

    pub fn call_repair(&self, call: &vwd_repair_args) {
        // SAFETY: as above.
        self.backend.finish(unsafe { vwd_repair(self.backend.session(), call, self.backend.stream()) });
    }
}

pub struct PlacedList<'b> {
    ids: Tensor<'b>,
    counts: Tensor<'b>,
    slots: Option<Tensor<'b>>,
    pub cap: usize,
}

impl<'b> PlacedList<'b> {
    pub fn new(backend: &'b Backend, rng: &mut Rng, model: &Model, ids: &Ids) -> PlacedList<'b> {
        let spec = &model.spec;
        let cap = ids.data.iter().map(Vec::len).max().unwrap_or(0) + rng.size(0..=3);
        let (mut all, mut slots) = (vec![], vec![]);
        for at in array::indices(&ids.shape) {
            let list = &ids[[at[0], at[1], at[2]]];
            for j in 0..cap {
                let id = list.get(j).copied();
                // A list may know where a block lies even if it is past the sequence.
                let run = id.filter(|&id| id >= 0).map(|id| id as usize * spec.block / spec.page);
                let slot = run.and_then(|run| model.slots.row([at[0], at[2]]).get(run).copied());
                all.push(id.unwrap_or(-7));
                slots.push(slot.unwrap_or(-1));
            }
        }
        let shape = spec.list_shape(&[cap]);
        let counts = Array::new(&spec.list_shape(&[]), ids.data.iter().map(|list| list.len() as i64).collect());
        let layout = |rng: &mut Rng, rank| Layout::random(rng, rank);
        PlacedList {
            ids: Tensor::ints(backend, I32, &Array::new(&shape, all), &layout(rng, shape.len())),
            counts: Tensor::ints(backend, I32, &counts, &layout(rng, shape.len() - 1)),
            slots: spec
                .slots
                .then(|| Tensor::ints(backend, I32, &Array::new(&shape, slots), &layout(rng, shape.len()))),
            cap,
        }
    }

    pub fn c(&self) -> vwd_block_list {
        let slots = self.slots.as_ref().map_or(absent(), Tensor::c);
        vwd_block_list { ids: self.ids.c(), counts: self.counts.c(), slots }
    }
}

/// Outputs of a call, poisoned before it.
pub struct Results<'b> {
    pub out: Tensor<'b>,
    pub lse: Tensor<'b>,
    pub state: [Tensor<'b>; 3],
    is_cuda: bool,
}

pub fn state_of(t: &[Tensor; 3]) -> vwd_attention_state {
    vwd_attention_state { acc: t[0].c(), m: t[1].c(), l: t[2].c() }
}

pub fn partials_of(t: &[Tensor; 3]) -> vwd_attention_partials {
    vwd_attention_partials { acc: t[0].c(), m: t[1].c(), l: t[2].c() }
}

/// A state for each group of entries.
pub fn partials<'b>(backend: &'b Backend, rng: &mut Rng, spec: &Spec, groups: usize) -> [Tensor<'b>; 3] {
    let (acc, m) = (spec.shape(&[spec.heads(), groups, spec.value_dim]), spec.shape(&[spec.heads(), groups]));
    [&acc, &m, &m].map(|shape| Tensor::poisoned(backend, F32, shape, &spec.layout(rng, shape.len())))
}

impl<'b> Results<'b> {
    pub fn new(backend: &'b Backend, rng: &mut Rng, spec: &Spec) -> Results<'b> {
        let (acc, m) = (spec.shape(&[spec.heads(), spec.value_dim]), spec.shape(&[spec.heads()]));
        let mut output =
            |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &spec.layout(rng, shape.len()));
        let out = output(spec.q_type, &acc);
        let state = [output(F32, &acc), output(F32, &m), output(F32, &m)];
        Results { out, lse: output(F32, &m), state, is_cuda: backend.is_cuda() }
    }

    /// Everything written, as bytes.
    pub fn bits(&self) -> Vec<Array<Bytes>> {
        [&self.out, &self.lse].into_iter().chain(&self.state).map(Tensor::read_raw).collect()
    }

    /// Every number is the other's but for rounding.
    pub fn assert_close(&self, other: &Results, spec: &Spec) {
        let all =
            |of: &Results| [&of.out, &of.lse].into_iter().chain(&of.state).map(Tensor::read_floats).collect::<Vec<_>>();
        let mut all = all(self).into_iter().zip(all(other)).zip([&spec.q_type, &F32, &F32, &F32, &F32]);
        assert!(
            all.all(|((a, b), dtype)| {
                let rounding = |x: f64| TOLERANCE * x.abs().max(1.0) + 2.0 * dtype.rounding(x);
                a.data.iter().zip(&b.data).all(|(&a, &b)| a == b || (a - b).abs() <= rounding(b))
            }),
            "{spec:?}"
        );
    }

    /// Each row and head equals the formula over the blocks that (i, r, g) names.
    pub fn check(&self, model: &Model, blocks: impl Fn(usize, usize, usize) -> Vec<i64>) {
        self.check_states(model, |i, r, h| model.expected(i, r, h, &blocks(i, r, h / model.spec.group)));
    }

    /// Each row and head (i, r, h) has this state.
    pub fn check_states(&self, model: &Model, mut state: impl FnMut(usize, usize, usize) -> oracle::State) {
        let spec = &model.spec;
        let full = [spec.batch, spec.rows(), spec.heads()];
        let rows = |t: &Tensor| Array::new(&[&full[..], &[spec.value_dim]].concat(), t.read_floats().data);
        let numbers = |t: &Tensor| Array::new(&full, t.read_floats().data);
        let (out, lse) = (rows(&self.out), numbers(&self.lse));
        let (acc, m, l) = (rows(&self.state[0]), numbers(&self.state[1]), numbers(&self.state[2]));
        let score = model.score_rounding(self.is_cuda);
        let tolerance = model.tolerance();
        let of_score = tolerance + score;
        // Values are a few units.
        let of_acc = tolerance + 4.0 * score + model.weight_rounding(self.is_cuda);
        for at in array::indices(&full) {
            let at = [at[0], at[1], at[2]];
            let [i, r, h] = at;
            if model.keeps(i, r) {
                continue;
            }
            let want = state(i, r, h);
            let place = format!("{at:?} of {spec:?}, lens {:?}, q_lens {:?}", model.lens, model.q_lens);
            if want.l.is_nan() {
                let is_spoiled = lse[at].is_nan() && l[at].is_nan() && out.row(at).iter().all(|x| x.is_nan());
                assert!(is_spoiled || spec.sinks && model.sinks[h] == f64::INFINITY, "no NaN at {place}");
                continue;
            }
            let rows = if spec.sinks { want.out_beside(model.sinks[h]) } else { want.out() };
            for (d, (&found, want)) in out.row(at).iter().zip(rows).enumerate() {
                close(found, want, of_acc + spec.q_type.rounding(want), &format!("out[{d}] at {place}"));
            }
            close(lse[at], want.lse(), of_score, &format!("lse at {place}"));
            close(m[at], want.m, of_score, &format!("m at {place}"));
            close(l[at], want.l, (tolerance + 2.0 * score) * want.l, &format!("l at {place}"));
            for (d, (&found, &want_acc)) in acc.row(at).iter().zip(&want.acc).enumerate() {
                close(found, want_acc, of_acc * want.l, &format!("acc[{d}] at {place}"));
            }
        }
        let is_written = |at: &[usize]| !model.keeps(at[0], if spec.positions.is_some() { at[1] } else { 0 });
        self.out.assert_written("out", is_written);
        self.lse.assert_written("lse", is_written);
        for (of, name) in self.state.iter().zip(["state.acc", "state.m", "state.l"]) {
            of.assert_written(name, is_written);
        }
    }
}

#[track_caller]
pub fn close(found: f64, expected: f64, tolerance: f64, what: &str) {
    let equal = found == expected || (found - expected).abs() <= tolerance;
    assert!(equal, "{what}: {found}, expected {expected} ± {tolerance}");
}
