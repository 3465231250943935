//! Attention where peers have gone wrong: sinks without tokens, windows of one, caps of any size, what is not seen, what lies
//! past 2³¹ bytes, MLA's two views of one memory.

use crate::Case;
use crate::attention_model::*;
use crate::attention_rows::agrees;
use crate::support::*;
use half::f16;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    a_sink_without_tokens_gives_zero,
    a_sink_above_all_scores_takes_all_weight,
    a_sink_changes_neither_lse_nor_state,
    a_window_counts_the_row_itself,
    a_list_outside_the_window_leaves_the_row_empty,
    caps_of_any_size_agree_with_the_formula,
    a_draft_that_is_nan_spoils_no_earlier_position,
    runs_of_keys_that_are_nan_spoil_the_rows_that_see_them,
    fp8_gives_what_the_dequantised_cache_gives,
    mla_reads_values_that_are_a_view_of_the_keys,
    mla_of_one_position_agrees_with_the_formula,
    mla_of_many_heads_agrees_with_the_formula,
    rows_past_q_lens_are_empty,
];

/// What needs memory that is there in name only, or threads of its own.
pub const ON_THE_CPU: &[Case] = cases![
    pages_may_lie_more_than_two_gigabytes_apart,
    calls_need_less_than_48_kib_of_the_callers_stack,
    bits_of_rows_do_not_depend_on_threads,
];

/// Attends without a list.
fn attend<'b>(backend: &'b Backend, rng: &mut Rng, model: &Model) -> Results<'b> {
    let placed = Placed::new(backend, rng, model);
    let results = Results::new(backend, rng, &model.spec);
    placed.attend(&placed.attention(None, &results));
    results
}

fn check_everything(model: &Model, results: &Results) {
    let all = model.everything();
    results.check(model, |i, r, g| model.list(&all, i, r, g).to_vec());
}

fn dense() -> Spec {
    Spec { lists: Lists::Absent, q_type: F32, kv_type: F32, poisoned: false, ..Spec::default() }
}

// --- sinks -----------------------------------------------------------------------------------------------------------

fn a_sink_without_tokens_gives_zero(backend: &Backend) {
    let rng = &mut Rng::new(0);
    let mut model = Model::random(rng, Spec { positions: Some(2), ..dense() }.with_sinks());
    model.lens = vec![0, -3];
    let results = attend(backend, rng, &model);
    assert!(results.out.read_floats().data.iter().all(|&x| x == 0.0));
    assert!(results.lse.read_floats().data.iter().all(|&x| x == f64::NEG_INFINITY));
}

fn a_sink_above_all_scores_takes_all_weight(backend: &Backend) {
    let rng = &mut Rng::new(1);
    let mut model = Model::random(rng, dense().with_sinks());
    model.lens = vec![300, 40];
    for (sink, most) in [(1e4, 0.0), (f64::INFINITY, 0.0), (60.0, 1e-20)] {
        model.sinks.fill(sink);
        let results = attend(backend, rng, &model);
        assert!(results.out.read_floats().data.iter().all(|x| x.abs() <= most), "sink {sink}");
        check_everything(&model, &results);
    }
}

fn a_sink_changes_neither_lse_nor_state(backend: &Backend) {
    let model = Model::random(&mut Rng::new(2), dense().with_sinks());
    let without = Model { spec: dense(), ..Model::random(&mut Rng::new(2), dense().with_sinks()) };
    let [with, without] = [model, without].map(|model| attend(backend, &mut Rng::new(3), &model).bits());
    assert_ne!(with[0], without[0], "out");
    assert_eq!(with[1..], without[1..], "lse and state");
}

// --- windows and caps ------------------------------------------------------------------------------------------------

/// Through a window of w a row sees itself and the w − 1 tokens before it.
fn a_window_counts_the_row_itself(backend: &Backend) {
    let rng = &mut Rng::new(4);
    for window in [1, 2, 15, 16, 17, 128, 129, 299, 300, 301, u32::MAX as usize] {
        let mut model = Model::random(rng, Spec { positions: Some(4), window, ..dense() });
        model.lens = vec![300, 3];
        let results = attend(backend, rng, &model);
        check_everything(&model, &results);
        if window == 1 {
            // Its own token has all the weight: lse is its score, l is 1.
            assert!(results.state[2].read_floats().row([0]).iter().all(|&l| l == 1.0));
        }
    }
}

fn a_list_outside_the_window_leaves_the_row_empty(backend: &Backend) {
    let rng = &mut Rng::new(5);
    let spec = Spec { lists: Lists::Shared, positions: Some(4), window: 20, ..dense() };
    let mut model = Model::random(rng, spec);
    model.lens = vec![300, 200];
    let ids = Array::filled(&[2, 1, 2], vec![0, 3, 7]);
    let placed = Placed::new(backend, rng, &model);
    let results = Results::new(backend, rng, &model.spec);
    placed.attend(&placed.attention(Some(&PlacedList::new(backend, rng, &model, &ids)), &results));
    assert!(results.out.read_floats().data.iter().all(|&x| x == 0.0));
    assert!(results.lse.read_floats().data.iter().all(|&x| x == f64::NEG_INFINITY));
}

fn caps_of_any_size_agree_with_the_formula(backend: &Backend) {
    let rng = &mut Rng::new(6);
    for cap in [1e-3, 0.1, 1.0, 30.0, 50.0, 1e4] {
        let mut model = Model::random(rng, Spec { cap: Some(cap), scale: Some(1.0), ..dense() });
        model.q = model.q.map(|x| x / 8.0);
        model.lens = vec![300, 151];
        let results = attend(backend, rng, &model);
        check_everything(&model, &results);
    }
}

// --- what is not seen ------------------------------------------------------------------------------------------------

/// Positions 2 and 3 see a token whose key and value are NaN; 0 and 1, which share the read, do not.
fn a_draft_that_is_nan_spoils_no_earlier_position(backend: &Backend) {
    for group in [1, 3, 4, 16] {
        let rng = &mut Rng::new(7);
        let mut model = Model::random(rng, Spec { batch: 1, positions: Some(4), group, ..dense() });
        model.lens = vec![222];
        let Some([page, row, _]) = model.place(0, 0, 222 - 2) else { panic!("another seed, please") };
        model.k[[page, row, 0, 5]] = f64::NAN;
        model.v[[page, row, 1, 6]] = f64::NAN;
        let results = attend(backend, rng, &model);
        let out = Array::new(&[4, 2 * group, 64], results.out.read_floats().data);
        for at in array::indices(&out.shape) {
            let [r, h, d] = [at[0], at[1], at[2]];
            let spoiled = r >= 2 && (h < group || d == 6);
            assert_eq!(out[[r, h, d]].is_nan(), spoiled, "out{at:?}");
        }
    }
}

/// Keys of whole tiles, of which a task or a warp may have no others.
fn runs_of_keys_that_are_nan_spoil_the_rows_that_see_them(backend: &Backend) {
    rounds(10, |rng| {
        let spec = Spec::random(rng);
        agrees(backend, rng, Spec { nan_keys: true, slots: false, most: 300, ..spec });
    });
}

fn rows_past_q_lens_are_empty(backend: &Backend) {
    let rng = &mut Rng::new(8);
    let spec = Spec { batch: 6, positions: Some(4), q_lens: true, group: 3, ..dense() };
    let mut model = Model::random(rng, spec);
    (model.q_lens, model.lens) = (vec![0, 1, 2, 3, 4, -9], vec![300; 6]);
    let results = attend(backend, rng, &model);
    check_everything(&model, &results);
    let lse = Array::new(&[6, 4, 6], results.lse.read_floats().data);
    for at in array::indices(&lse.shape) {
        let lives = at[1] < model.q_lens[at[0]].max(0) as usize;
        assert_eq!(lse[[at[0], at[1], at[2]]].is_finite(), lives, "lse{at:?}");
    }
}

// --- values ----------------------------------------------------------------------------------------------------------

fn fp8_gives_what_the_dequantised_cache_gives(backend: &Backend) {
    rounds(10, |rng| {
        let spec = Spec { positions: Some(3), ..Spec::plain(rng).with_fp8(rng) };
        let model = Model::random(rng, Spec { lists: Lists::Absent, poisoned: false, ..spec });
        let results = attend(backend, rng, &model);
        let wide = |of: &Array<f64>, scale: &Array<f64>| {
            Array::from_fn(&of.shape, |at| F32.round(of[[at[0], at[1], at[2], at[3]]] * scale[[at[0], at[1], at[2]]]))
        };
        let rounding = model.weight_rounding(backend.is_cuda());
        let spec = Spec { kv_type: F32, scales: [Scales::Absent; 2], ..model.spec.clone() };
        let dequantised = Model {
            k: wide(&model.k, &model.scales[0]),
            v: wide(&model.v, &model.scales[1]),
            scales: model.scales.each_ref().map(|scale| scale.map(|_| 1.0)),
            spec,
            ..model
        };
        let want = attend(backend, rng, &dequantised);
        for (a, b) in results.out.read_floats().data.iter().zip(&want.out.read_floats().data) {
            close(*a, *b, TOLERANCE + rounding + 2.0 * dequantised.spec.q_type.rounding(*b), "out");
        }
    });
}

/// k [pages, P, 1, 576] holds a latent of 512 channels and 64 more; v is a view of the latent. States are 512 wide.
fn mla_reads_values_that_are_a_view_of_the_keys(backend: &Backend) {
    for (page, group) in [(1, 16), (32, 16), (64, 128)] {
        let rng = &mut Rng::new(9);
        let mut spec = Spec { kv_heads: 1, group, page, dim: 576, value_dim: 512, block: 1, batch: 1, ..dense() };
        spec = Spec { scale: Some(0.07), most: 150, positions: Some(2), kv_type: BF16, q_type: BF16, ..spec };
        let mut model = Model::random(rng, Spec { lists: Lists::Shared, ..spec });
        model.lens = vec![150];
        let ids = model.ids(rng, 0.5);
        check_latents(backend, rng, model, &ids);
    }
}

/// Values are a view of the keys. `ids` are of no list where the call has none.
fn check_latents(backend: &Backend, rng: &mut Rng, mut model: Model, ids: &Ids) {
    model.v = Array::from_fn(&model.v.shape, |at| model.k[[at[0], at[1], at[2], at[3]]]);
    let placed = Placed::new(backend, rng, &model);
    let results = Results::new(backend, rng, &model.spec);
    let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, ids));
    let mut call = placed.attention(list.as_ref(), &results);
    let mut kv = placed.kv();
    kv.v = kv.k;
    kv.v.shape[3] = model.spec.value_dim as i64;
    call.kv = kept(kv);
    placed.attend(&call);
    results.check(&model, |i, r, g| model.list(ids, i, r, g).to_vec());
}

/// Blocks and pages of any size, rows of any number, lists that are cut among many CTAs or few.
fn mla_of_one_position_agrees_with_the_formula(backend: &Backend) {
    rounds(20, |rng| {
        let (batch, group) = rng.pick(&[(1, 16), (1, 5), (2, 20), (3, 16), (9, 1), (40, 3), (1, 40)]);
        let most = if batch > 3 { 100 } else { 700 };
        check_one_position(backend, rng, batch, group, most);
    });
}

/// Lists name all tokens or none, and whole tiles or parts of them.
fn mla_of_many_heads_agrees_with_the_formula(backend: &Backend) {
    rounds(16, |rng| {
        let (batch, group) = rng.pick(&[(1, 64), (3, 64), (1, 128), (3, 72), (1, 33), (2, 128)]);
        let most = rng.pick(&[1, 40, 64, 130, 700, 2100]);
        check_one_position(backend, rng, batch, group, most);
    });
}

fn check_one_position(backend: &Backend, rng: &mut Rng, batch: usize, group: usize, most: usize) {
    let (dim, value_dim) = rng.pick(&[(576, 512), (576, 512), (512, 512), (320, 256), (264, 16)]);
    let (page, block) = rng.pick(&[(64, 64), (64, 16), (16, 48), (64, 1), (1, 1), (61, 61), (8, 24)]);
    let q_type = rng.pick(&[F16, BF16]);
    let lists = rng.pick(&[Lists::Absent, Lists::Shared, Lists::Shared]);
    let spec = Spec { batch, kv_heads: 1, group, dim, value_dim, page, block, most, lists, ..Spec::default() };
    let spec = Spec { scale: Some(0.05), kv_type: q_type, q_type, sinks: rng.one_in(3), ..spec };
    let spec = if rng.one_in(4) { spec.with_slots(rng) } else { spec };
    let mut model = Model::random(rng, spec);
    let share = rng.pick(&[0.0, 0.1, 0.5, 1.0]);
    let ids = if model.spec.lists == Lists::Absent { model.everything() } else { model.ids(rng, share) };
    model.poison(&[&ids]);
    check_latents(backend, rng, model, &ids);
}

// --- memory, stack, threads ------------------------------------------------------------------------------------------

/// Pages of one layer, 2³¹ + 64 elements apart, in memory of which only what is touched exists.
fn pages_may_lie_more_than_two_gigabytes_apart(backend: &Backend) {
    let rng = &mut Rng::new(10);
    let mut model = Model::random(rng, Spec { batch: 1, kv_heads: 1, most: 32, kv_type: F16, ..dense() });
    model.lens = vec![32];
    let placed = Placed::new(backend, rng, &model);
    let apart = (1usize << 31) + 64;
    let (pages, row) = (model.k.shape[0], model.spec.page * model.spec.dim);
    let memory = [&model.k, &model.v].map(|values| {
        let memory = Mapping::new(pages * apart * size_of::<f16>());
        for (n, &x) in values.data.iter().enumerate() {
            let place = n / row * apart + n % row;
            // SAFETY: inside the mapping.
            unsafe { memory.start.cast::<f16>().add(place).write(f16::from_f64(x)) };
        }
        memory
    });
    let mut kv = placed.kv();
    for (t, memory) in [&mut kv.k, &mut kv.v].into_iter().zip(&memory) {
        t.data = memory.start;
        t.strides = [apart as i64, model.spec.dim as i64, model.spec.dim as i64, 1, 0];
    }
    let results = Results::new(backend, rng, &model.spec);
    placed.attend(&vwd_attention_args { kv: &kv, ..placed.attention(None, &results) });
    check_everything(&model, &results);
}

/// The largest heads and every feature, on a session whose work the caller does.
fn calls_need_less_than_48_kib_of_the_callers_stack(_: &Backend) {
    let backend = Backend::cpu(1);
    let wide = Spec { dim: 576, value_dim: 576, positions: Some(4), window: 100, cap: Some(30.0), ..Spec::default() };
    let wide = Spec { group: 16, most: 100, scale: Some(0.04), poisoned: false, ..wide }.with_sinks();
    for kv_type in [F32, F16, BF16, F8E4M3] {
        for lists in [Lists::Absent, Lists::Shared, Lists::Own] {
            let rng = &mut Rng::new(12);
            let model = Model::random(rng, Spec { kv_type, lists, ..wide.clone() });
            let ids = model.ids(rng, 0.6);
            let list = (lists != Lists::Absent).then(|| PlacedList::new(&backend, rng, &model, &ids));
            let placed = Placed::new(&backend, rng, &model);
            let results = Results::new(&backend, rng, &model.spec);
            let used = stack_of(|| placed.attend(&placed.attention(list.as_ref(), &results)));
            assert!(used < STACK, "vwd_attention used {used} bytes: {:?}", model.spec);
            let Some(list) = list else { continue };
            let mut call = placed.repair(VWD_REPAIR_SUPERSET, [&list, &list], &results);
            call.predicted_state = call.state;
            let used = stack_of(|| placed.call_repair(&call));
            assert!(used < STACK, "vwd_repair used {used} bytes: {:?}", model.spec);
            let inputs = [state_of(&results.state); 2];
            let merged = Results::new(&backend, rng, &model.spec);
            let call = vwd_merge_states_args { input_count: 2, inputs: inputs.as_ptr(), out: merged.out.c(), ..args() };
            // SAFETY: the tensors and the array are alive.
            let used =
                stack_of(|| assert_ok(unsafe { vwd_merge_states(backend.session(), &call, std::ptr::null_mut()) }));
            assert!(used < STACK, "vwd_merge_states used {used} bytes");
        }
    }
}

fn bits_of_rows_do_not_depend_on_threads(_: &Backend) {
    let backends = [1, 2, 5].map(Backend::cpu);
    rounds(10, |rng| {
        let spec = Spec { poisoned: false, ..Spec::random(rng) };
        let model = Model::random(rng, spec);
        let ids = model.ids(rng, 0.6);
        let seed = rng.int(0..=i64::MAX) as u64;
        let bits = backends.each_ref().map(|backend| {
            let rng = &mut Rng::new(seed);
            let placed = Placed::new(backend, rng, &model);
            let list = (model.spec.lists != Lists::Absent).then(|| PlacedList::new(backend, rng, &model, &ids));
            let results = Results::new(backend, rng, &model.spec);
            placed.attend(&placed.attention(list.as_ref(), &results));
            results.bits()
        });
        assert_eq!(bits[0], bits[1], "2 threads: {:?}", model.spec);
        assert_eq!(bits[0], bits[2], "5 threads: {:?}", model.spec);
    });
}
