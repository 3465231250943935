//! What may not change a bit: the number of a session's threads, whose threads they are, other calls on the same session at
//! the same time, and the caller's floating-point environment.

mod support;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use support::paged::{Paged, Shape};
use support::*;
use vanward::abi::*;
use vanward::capi::*;

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let expected = Step::run(&Backend::cpu(1), 1);
    for threads in [2, 3, 7] {
        assert_same(&Step::run(&Backend::cpu(threads), 1), &expected);
    }
}

#[test]
fn threads_that_share_a_session_get_what_each_would_get_alone() {
    share(&Backend::cpu(3));
}

/// Calls from four threads at once give what each would give alone.
fn share(backend: &Backend) {
    let expected: Vec<Outputs> = (0..3).map(|seed| Step::run(&Backend::cpu(1), seed)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let expected = &expected;
            scope.spawn(move || {
                for round in 0..3 {
                    let seed = (thread + round) % 3;
                    assert_same(&Step::run(backend, seed as u64), &expected[seed]);
                }
            });
        }
    });
}

// --- an engine's own threads -----------------------------------------------------------------------------------------

/// An engine's threads, as C knows them: tasks are dealt out to so many threads, which flush subnormals to zero, and so many
/// of each call are left out.
struct Engine {
    threads: u64,
    forgets: u64,
    tasks: AtomicU64,
}

impl Engine {
    fn new(threads: u64) -> Engine {
        Engine { threads, forgets: 0, tasks: AtomicU64::new(0) }
    }

    fn options(&self) -> vwd_session_options {
        let parallel_context = (&raw const *self).cast_mut().cast();
        vwd_session_options { device: VWD_DEVICE_CPU, parallel_for: Some(parallel_for), parallel_context, ..args() }
    }

    fn backend(&self) -> Backend {
        Backend::of(Session::create(&self.options()).unwrap_or_else(|(_, text)| panic!("{text}")))
    }
}

unsafe extern "C" fn parallel_for(context: *mut c_void, tasks: u64, task: vwd_task, work: *mut c_void) {
    // SAFETY: the options name an engine that outlives the session.
    let (engine, task, work) = (unsafe { &*context.cast::<Engine>() }, task.expect("a function"), work as usize);
    engine.tasks.fetch_add(tasks, Relaxed);
    let tasks = tasks - engine.forgets.min(tasks);
    std::thread::scope(|scope| {
        for thread in 0..engine.threads {
            // The last tasks first: the order is the engine's.
            let mine = (0..tasks).rev().filter(move |index| index % engine.threads == thread);
            // SAFETY: each task once, before this returns.
            let run = move |index| with_control(Some(FLUSHING), || unsafe { task(work as *mut c_void, index) });
            scope.spawn(move || mine.for_each(run));
        }
    });
}

#[test]
fn results_do_not_depend_on_whose_threads_they_are() {
    let expected = Step::run(&Backend::cpu(1), 1);
    for threads in [1, 3] {
        let engine = Engine::new(threads);
        assert_same(&Step::run(&engine.backend(), 1), &expected);
        assert!(engine.tasks.into_inner() > 100, "the engine's threads did the work");
    }
}

#[test]
fn engine_lends_its_threads_to_several_calls_at_once() {
    share(&Engine::new(3).backend());
}

#[test]
fn session_with_the_callers_threads_has_none_of_its_own() {
    let engine = Engine::new(2);
    let session = Session::create(&engine.options()).unwrap();
    assert_eq!(session.details().threads, 0);
    let refused = |options: vwd_session_options, words: &str| {
        let (status, text) = Session::create(&options).err().expect("refused");
        assert_eq!(status, VWD_ERROR_INVALID_ARGUMENT);
        assert!(text.starts_with(words), "{text}");
    };
    refused(
        vwd_session_options { threads: 1, ..engine.options() },
        "options.threads: 1; expected 0 beside parallel_for",
    );
    refused(vwd_session_options { parallel_for: None, ..engine.options() }, "options.parallel_context: ");
}

#[test]
fn tasks_that_an_engine_forgets_are_an_error() {
    let engine = Engine { forgets: 2, ..Engine::new(2) };
    let backend = engine.backend();
    const ROWS: usize = 20_000;
    let tokens = |width| Tensor::ints(&backend, I32, &Array::filled(&[ROWS, width], 7), &Layout::default());
    let result = || Tensor::poisoned(&backend, I32, &[ROWS], &Layout::default());
    let (draft, target, accepted, next_token) = (tokens(4), tokens(5), result(), result());
    let arguments = vwd_verify_args {
        draft: draft.c(),
        target: target.c(),
        accepted: accepted.c(),
        next_token: next_token.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    let status = unsafe { vwd_verify(backend.session(), &arguments, std::ptr::null_mut()) };
    assert_fails(status, VWD_ERROR_INTERNAL, &["options.parallel_for returned when ", " tasks had run"]);
}

// --- the caller's floating-point environment -------------------------------------------------------------------------

/// Runs a call with MXCSR set so, and checks that the call leaves it so.
#[cfg(target_arch = "x86_64")]
fn with_control<R>(control: Option<u32>, call: impl FnOnce() -> R) -> R {
    use std::arch::asm;
    const STICKY: u32 = 0x3f;
    let Some(control) = control else { return call() };
    let (mut before, mut after) = (0u32, 0u32);
    // SAFETY: the register is as before when this returns.
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut before);
        asm!("ldmxcsr [{}]", in(reg) &raw const control);
        let result = call();
        asm!("stmxcsr [{}]", in(reg) &raw mut after);
        asm!("ldmxcsr [{}]", in(reg) &raw const before);
        assert_eq!(after & !STICKY, control & !STICKY, "the call changed the caller's environment");
        result
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn with_control<R>(_: Option<u32>, call: impl FnOnce() -> R) -> R {
    call()
}

/// Subnormals are zero, in and out.
const FLUSHING: u32 = 0x1f80 | 0x8040;
/// And rounding down, up, towards zero; a trap on every exception, inexact results included.
const CONTROLS: [u32; 5] = [FLUSHING, 0x1f80 | 0x2000, 0x1f80 | 0x4000, 0x1f80 | 0x6000, 0];

#[test]
fn results_do_not_depend_on_the_callers_floating_point_environment() {
    let engine = Engine::new(2);
    for backend in [Backend::cpu(1), Backend::cpu(3), engine.backend()] {
        let expected = Step::run(&backend, 1);
        for control in CONTROLS {
            assert_same(&Step::run_with(&backend, 1, Some(control)), &expected);
        }
    }
}

/// Threads inherit the environment of the thread that starts them.
#[test]
fn results_do_not_depend_on_the_environment_in_which_the_session_was_created() {
    let expected = Step::run(&Backend::cpu(1), 1);
    for control in CONTROLS {
        let session = with_control(Some(control), || Session::cpu(3));
        assert_same(&Step::run(&Backend::of(session), 1), &expected);
    }
}

type Outputs = Vec<(&'static str, Vec<u8>)>;

fn assert_same(a: &Outputs, b: &Outputs) {
    for ((name, a), (_, b)) in a.iter().zip(b) {
        assert!(a == b, "{name} differ");
    }
    assert_eq!(a.len(), b.len());
}

const KV_HEADS: usize = 2;
const HEADS: usize = 8;
const DIM: usize = 64;
/// Tokens of a block and of a page.
const BLOCK: usize = 16;
const BLOCKS: usize = 40;
const BATCH: usize = 3;
const K: usize = 12;

/// One layer's decode step that makes every call once, on tensors large enough for the work to be shared.
struct Step<'b> {
    backend: &'b Backend,
    rng: Rng,
    /// MXCSR during each call.
    control: Option<u32>,
    outputs: Vec<(&'static str, Tensor<'b>)>,
}

impl<'b> Step<'b> {
    fn run(backend: &'b Backend, seed: u64) -> Outputs {
        Step::run_with(backend, seed, None)
    }

    fn run_with(backend: &'b Backend, seed: u64, control: Option<u32>) -> Outputs {
        let mut step = Step { backend, rng: Rng::new(seed), control, outputs: vec![] };
        step.verify_and_pack();
        step.attend();
        step.forecast();
        step.keep_in_slots();
        step.decode();
        step.outputs.iter().map(|(name, tensor)| (*name, tensor.read_memory())).collect()
    }

    fn output(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> vwd_tensor {
        let tensor = Tensor::poisoned(self.backend, dtype, shape, &Layout::default());
        let c = tensor.c();
        self.outputs.push((name, tensor));
        c
    }

    fn list(&mut self, name: &'static str) -> vwd_block_list {
        vwd_block_list {
            ids: self.output(name, I32, &[BATCH, KV_HEADS, K]),
            counts: self.output(name, I32, &[BATCH, KV_HEADS]),
            slots: absent(),
        }
    }

    fn state(&mut self, name: &'static str) -> vwd_attention_state {
        vwd_attention_state {
            acc: self.output(name, F32, &[BATCH, HEADS, DIM]),
            m: self.output(name, F32, &[BATCH, HEADS]),
            l: self.output(name, F32, &[BATCH, HEADS]),
        }
    }

    fn floats(&mut self, dtype: DType, shape: &[usize]) -> Tensor<'b> {
        Tensor::floats(self.backend, dtype, &self.rng.normals(shape), &Layout::default())
    }

    /// Makes a call of this step.
    #[track_caller]
    fn call<T>(
        &self,
        call: unsafe extern "C" fn(*const vanward::capi::vwd_session, *const T, vwd_stream) -> vwd_status,
        args: T,
    ) {
        // SAFETY: the tensors live until the step has been read.
        let call = || unsafe { call(self.backend.session(), &args, self.backend.stream()) };
        self.backend.finish(with_control(self.control, call));
    }

    fn verify_and_pack(&mut self) {
        let (batch, gamma) = (200, 8);
        let target = Array::from_fn(&[batch, gamma + 1], |_| self.rng.int(0..=3));
        let draft = Array::from_fn(&[batch, gamma], |at| target[[at[0], at[1]]] + self.rng.int(0..=9) / 9);
        let (draft, target) = [draft, target].map(|t| Tensor::ints(self.backend, I32, &t, &Layout::default())).into();
        let rows = self.floats(F16, &[batch, gamma, 256]);
        let packed = self.output("packed", F16, &[batch * gamma, 256]);
        let accepted = self.output("accepted", I32, &[batch]);
        let args = vwd_verify_pack_args {
            tensor_count: 1,
            rows: &rows.c(),
            packed: &packed,
            draft: draft.c(),
            target: target.c(),
            accepted,
            next_token: self.output("next_token", I32, &[batch]),
            offsets: self.output("offsets", I64, &[batch + 1]),
            ..args()
        };
        self.call(vwd_verify_pack, args);
    }

    fn attend(&mut self) {
        let shape = Shape {
            batch: BATCH,
            kv_heads: KV_HEADS,
            dim: DIM,
            page: BLOCK,
            max_pages: BLOCKS,
            dtype: BF16,
            paged: true,
        };
        let mut paged = Paged::random(self.backend, &mut self.rng, &shape);
        let lens = Array::new(&[BATCH], vec![640, 333, 2]);
        paged.lens = Tensor::ints(self.backend, I32, &lens, &Layout::default());
        let lens = paged.lens.c();
        let table = Array::from_fn(&[BATCH, BLOCKS], |at| (at[0] * BLOCKS + at[1]) as i64);
        let table = Tensor::ints(self.backend, I32, &table, &Layout::default());
        let q = self.floats(BF16, &[BATCH, HEADS, DIM]);
        let kv = vwd_paged_kv { page_table: table.c(), ..paged.c() };

        let channels = self.output("channels", I32, &[KV_HEADS, DIM / 2]);
        let sample = self.floats(BF16, &[100, KV_HEADS, DIM]);
        let importance = self.output("importance", F32, &[KV_HEADS, DIM]);
        let call = vwd_channel_importance_args { q: q.c(), k: sample.c(), channels, importance, ..args() };
        self.call(vwd_channel_importance, call);
        // Products of these keys are subnormal.
        let faint = self.rng.normals(&[100, KV_HEADS, DIM]).map(|x| x * 1e-40);
        let faint = Tensor::floats(self.backend, F32, &faint, &Layout::default());
        let plain = self.floats(F32, &[BATCH, HEADS, DIM]);
        let importance = self.output("importance of faint keys", F32, &[KV_HEADS, DIM]);
        let ranked = self.output("channels of faint keys", I32, &[KV_HEADS, DIM / 2]);
        let call = vwd_channel_importance_args { q: plain.c(), k: faint.c(), channels: ranked, importance, ..args() };
        self.call(vwd_channel_importance, call);

        // Rows of each index: blocks, windows, tokens; sequence i is page i.
        let tokens = [BATCH, BLOCK * BLOCKS, KV_HEADS];
        let minmax = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: BLOCK as u32,
            key_max: self.output("key_max", BF16, &[BATCH, BLOCKS, KV_HEADS, DIM]),
            key_min: self.output("key_min", BF16, &[BATCH, BLOCKS, KV_HEADS, DIM]),
            ..args()
        };
        let mean = vwd_index {
            kind: VWD_INDEX_MEAN,
            means: self.output("means", BF16, &[BATCH, BLOCKS, KV_HEADS, DIM]),
            ..args()
        };
        let label = vwd_index {
            kind: VWD_INDEX_LABEL,
            labels: self.output("labels", U8, &[tokens[0], tokens[1], tokens[2], DIM / 4]),
            label_scale: self.output("label_scale", F16, &tokens),
            label_min: self.output("label_min", F16, &tokens),
            channels,
            ..args()
        };
        for index in [minmax, mean, label] {
            let (k, page_table) = (kv.k, kv.page_table);
            self.call(
                vwd_index_update,
                vwd_index_update_args { k, page_table, seq_lens: lens, index: kept(index), ..args() },
            );
        }

        let select = vwd_select_blocks_args {
            block_size: BLOCK as u32,
            k: K as u32,
            init_blocks: 1,
            local_blocks: 2,
            q: q.c(),
            seq_lens: lens,
            ..args()
        };
        let forecast = self.floats(BF16, &[BATCH, KV_HEADS, DIM]);
        let quest = self.list("selected by MINMAX");
        let scores = self.output("scores", F32, &[BATCH, KV_HEADS, BLOCKS]);
        let (means, dots, mass) = (self.list("MEAN_SOFTMAX"), self.list("MEAN_DOT"), self.list("LABEL_MASS"));
        for call in [
            vwd_select_blocks_args {
                method: VWD_SELECT_MINMAX,
                index: kept(minmax),
                selected: quest,
                scores,
                ..select
            },
            vwd_select_blocks_args { method: VWD_SELECT_MEAN_SOFTMAX, index: kept(mean), selected: means, ..select },
            vwd_select_blocks_args {
                method: VWD_SELECT_MEAN_DOT,
                index: kept(mean),
                selected: dots,
                q: forecast.c(),
                ..select
            },
            vwd_select_blocks_args {
                method: VWD_SELECT_LABEL_MASS,
                index: kept(label),
                selected: mass,
                candidates: quest,
                ..select
            },
        ] {
            self.call(vwd_select_blocks, call);
        }
        let selected = self.list("selected tokens");
        let tokens = vwd_select_tokens_args {
            block_size: BLOCK as u32,
            k: K as u32,
            q: q.c(),
            index: kept(label),
            seq_lens: lens,
            candidates: quest,
            selected,
            ..args()
        };
        self.call(vwd_select_tokens, tokens);

        let out = |step: &mut Self, name| step.output(name, F32, &[BATCH, HEADS, DIM]);
        let partials = [BATCH, HEADS, K, DIM];
        let partials = vwd_attention_partials {
            acc: self.output("partials", F32, &partials),
            m: self.output("partials", F32, &partials[..3]),
            l: self.output("partials", F32, &partials[..3]),
        };
        let attention = vwd_attention_args { q: q.c(), kv: kept(kv), out: out(self, "attention"), ..args() };
        self.call(vwd_attention, attention);
        let state = self.state("state over MEAN_SOFTMAX");
        let (block_size, out_of_list) = (BLOCK as u32, out(self, "attention over a list"));
        let over_list = vwd_attention_args { block_size, list: means, out: out_of_list, state, partials, ..attention };
        self.call(vwd_attention, over_list);
        let out_of_tokens = out(self, "attention over tokens");
        self.call(vwd_attention, vwd_attention_args { block_size: 1, list: selected, out: out_of_tokens, ..attention });

        let repair =
            vwd_repair_args { block_size, q: q.c(), kv: kept(kv), predicted: means, selected: quest, ..args() };
        let (superset, repaired) = (out(self, "superset repair"), self.state("repaired"));
        let predicted_state = state;
        let mode = VWD_REPAIR_SUPERSET;
        self.call(vwd_repair, vwd_repair_args { mode, predicted_state, out: superset, state: repaired, ..repair });
        let (mode, exact, predicted_partials) = (VWD_REPAIR_EXACT, out(self, "exact repair"), partials);
        self.call(vwd_repair, vwd_repair_args { mode, predicted_partials, out: exact, ..repair });
        let merged = out(self, "merged");
        let inputs = [state, repaired];
        let merge = vwd_merge_states_args { input_count: 2, inputs: inputs.as_ptr(), out: merged, ..args() };
        self.call(vwd_merge_states, merge);

        let gathered = self.output("gathered", BF16, &[BATCH * BLOCKS, BLOCK, KV_HEADS, DIM]);
        let mut source_ids = paged.table_values.clone().expect("paged");
        source_ids.shape = vec![BATCH * BLOCKS];
        let source_ids = Tensor::ints(self.backend, I32, &source_ids, &Layout::default());
        let gather = vwd_gather_blocks_args { source: kv.k, target: gathered, source_ids: source_ids.c(), ..args() };
        self.call(vwd_gather_blocks, gather);

        let state = vwd_predictor_state {
            level: self.output("level", F32, &[BATCH, KV_HEADS, BLOCKS]),
            trend: self.output("trend", F32, &[BATCH, KV_HEADS, BLOCKS]),
        };
        let holt = vwd_holt { alpha: 0.7, beta: 0.3, gamma: 0.6 };
        let block_size = BLOCK as u32;
        self.call(vwd_predictor_reset, vwd_predictor_reset_args { state, ..args() });
        let update = vwd_predictor_update_args { block_size, holt, state, seq_lens: lens, scores, ..args() };
        self.call(vwd_predictor_update, update);
        let predicted = self.list("predicted");
        let (k, seq_lens) = (K as u32, lens);
        let predict = vwd_predictor_predict_args { block_size, k, holt, state, seq_lens, predicted, ..args() };
        self.call(vwd_predictor_predict, predict);
    }

    fn forecast(&mut self) {
        let options = vwd_forecast_options { layers: 1, input_dim: 48, q_heads: 8, head_dim: 16, ..args() };
        let (x, q) = (self.floats(F32, &[300, 48]), self.floats(F32, &[300, 8, 16]));
        let positions = Tensor::ints(self.backend, I32, &Array::filled(&[300], 77), &Layout::default());
        let text = vwd_forecast_accumulate_args { x: x.c(), q: q.c(), ..args() };
        let forecasts = self.output("forecasts", F32, &[300, 8, 16]);
        let project = vwd_forecast_project_args { x: x.c(), positions: positions.c(), q: forecasts, ..args() };
        let mut forecast = std::ptr::null_mut();
        // SAFETY: the tensors outlive the calls; created here, released here.
        unsafe {
            assert_ok(vwd_forecast_create(self.backend.session(), &options, &mut forecast));
            assert_ok(with_control(self.control, || vwd_forecast_accumulate(forecast, &text)));
            assert_ok(with_control(self.control, || vwd_forecast_solve(forecast, 16)));
            let stream = self.backend.stream();
            self.backend.finish(with_control(self.control, || vwd_forecast_project(forecast, &project, stream)));
            vwd_forecast_release(forecast);
        }
    }

    /// A cache whose blocks are coded and decoded: by appends, by a cut inside a coded block, and on their way to a slot.
    fn keep_in_slots(&mut self) {
        const HEADS: usize = KV_HEADS * DIM;
        let (tokens, control, stream) = (6 * BLOCK, self.control, self.backend.stream());
        // One weight is no number that is normal.
        let weights: Vec<f32> = (0..HEADS).map(|n| if n == 5 { 1e-40 } else { 0.5 + self.rng.unit() as f32 }).collect();
        let options = vwd_kv_cache_options {
            layers: 1,
            kv_heads: KV_HEADS as u32,
            block_size: BLOCK as u32,
            key_dim: DIM as u32,
            value_dim: DIM as u32,
            dtype_code: F32.code as u32,
            dtype_bits: F32.bits as u32,
            max_sequences: 2,
            max_blocks: 8,
            host_blocks: 16,
            slots: 8,
            coding: VWD_CODING_INT4,
            slot_coding: VWD_SLOTS_DECODED,
            weights: weights.as_ptr(),
            ..args()
        };
        let rows = [0; 2].map(|_| self.floats(F32, &[1, tokens, KV_HEADS, DIM]));
        let (mut sequence, mut fork) = (0u32, 0u32);
        let ints = |backend, value: i64, shape: &[usize]| {
            Tensor::ints(backend, I32, &Array::filled(shape, value), &Layout::default())
        };
        let (sequences, begin) = (ints(self.backend, 0, &[1]), ints(self.backend, 0, &[1]));
        let (ids, counts) = (ints(self.backend, 1, &[1, KV_HEADS, 1]), ints(self.backend, 1, &[1, KV_HEADS]));
        let wanted =
            vwd_block_list { ids: ids.c(), counts: counts.c(), slots: self.output("slots", I32, &[1, KV_HEADS, 1]) };
        let append = vwd_kv_cache_append_args {
            sequences: sequences.c(),
            begin: begin.c(),
            k: rows[0].c(),
            v: rows[1].c(),
            ..args()
        };
        let resolve = vwd_kv_cache_resolve_args { sequences: sequences.c(), wanted, ..args() };
        let (mut cache, mut view) = (std::ptr::null_mut(), args::<vwd_kv_cache_layer>());
        // SAFETY: the tensors outlive the calls; created here, released here.
        unsafe {
            let made = with_control(control, || vwd_kv_cache_create(self.backend.session(), &options, &mut cache));
            assert_ok(made);
            assert_ok(vwd_kv_cache_add(cache, &mut sequence, stream));
            assert_ok(vwd_kv_cache_extend(cache, sequence, tokens as u64, stream));
            assert_ok(with_control(control, || vwd_kv_cache_append(cache, &append, stream)));
            assert_ok(with_control(control, || vwd_kv_cache_resolve(cache, &resolve, stream)));
            assert_ok(with_control(control, || vwd_kv_cache_fetch(cache, 0, stream)));
            assert_ok(with_control(control, || vwd_kv_cache_wait(cache, 0, stream)));
            let cut = 2 * BLOCK as u64 + 5;
            assert_ok(with_control(control, || vwd_kv_cache_fork(cache, sequence, cut, &mut fork, stream)));
            assert_ok(with_control(control, || vwd_kv_cache_truncate(cache, sequence, cut, stream)));
            assert_ok(vwd_kv_cache_view(cache, 0, &mut view));
        }
        // SAFETY: the first of the slots that were written above.
        let slot = unsafe { *wanted.slots.data.cast::<i32>() };
        let page = |tail: i64| [view.tail_k, view.tail_v].map(|t| rows_of(&t, tail));
        // The third block of the fork, and of the sequence, each cut; and the fetched block.
        let decoded = [page(4 + 2), page(2), [view.k, view.v].map(|t| rows_of(&t, slot as i64))].concat().concat();
        let copied = self.output("decoded", F32, &[decoded.len()]);
        // SAFETY: as many numbers as the output has; the cache is released once.
        unsafe {
            copied.data.cast::<f32>().copy_from_nonoverlapping(decoded.as_ptr(), decoded.len());
            vwd_kv_cache_release(cache);
        }
        let (slots, misses, shares) = ([70u32, 30, 11], [3u64, 50, 7], self.output("shares", I32, &[3]));
        let (slots, misses, shares) = ((&raw const slots).cast(), (&raw const misses).cast(), shares.data.cast());
        let share = vwd_kv_cache_share_args { layers: 3, least: 1, total: 1000, slots, misses, shares, ..args() };
        // SAFETY: three numbers of each.
        assert_ok(with_control(control, || unsafe { vwd_kv_cache_share_slots(&share) }));
    }

    /// A step of a decoder whose scale is the default.
    fn decode(&mut self) {
        let options = vwd_decoder_options {
            layers: 1,
            max_rows: 1,
            query_heads: HEADS as u32,
            kv_heads: KV_HEADS as u32,
            key_dim: 80,
            value_dim: 80,
            dtype_code: F32.code as u32,
            dtype_bits: F32.bits as u32,
            page_size: BLOCK as u32,
            pages: 1,
            block_size: BLOCK as u32,
            max_positions: 5,
            ..args()
        };
        let [k, v] = [0; 2].map(|_| self.floats(F32, &[1, BLOCK, KV_HEADS, 80]));
        let q = self.floats(F32, &[1, HEADS, 80]);
        let lens = Tensor::ints(self.backend, I32, &Array::filled(&[1], BLOCK as i64), &Layout::default());
        let out = self.output("out of a decoder", F32, &[1, HEADS, 80]);
        let step = vwd_decoder_step { seq_lens: lens.c(), ..args() };
        let attend = vwd_decoder_attend_args { k: k.c(), v: v.c(), q: q.c(), out, ..args() };
        let (control, stream, mut decoder) = (self.control, self.backend.stream(), std::ptr::null_mut());
        // SAFETY: the tensors outlive the calls; created here, released here.
        unsafe {
            assert_ok(with_control(control, || vwd_decoder_create(self.backend.session(), &options, &mut decoder)));
            assert_ok(with_control(control, || vwd_decoder_begin(decoder, &step, stream)));
            assert_ok(with_control(control, || vwd_decoder_attend(decoder, &attend, stream)));
            vwd_decoder_release(decoder);
        }
    }
}

/// All numbers at an index of the first dimension.
fn rows_of(t: &vwd_tensor, at: i64) -> Vec<f32> {
    let mut numbers = Vec::new();
    for token in 0..t.shape[1] {
        for head in 0..t.shape[2] {
            let offset = at * t.strides[0] + token * t.strides[1] + head * t.strides[2];
            // SAFETY: an element of a view that the test has of host memory.
            numbers.extend((0..t.shape[3]).map(|c| unsafe { *t.data.cast::<f32>().offset((offset + c) as isize) }));
        }
    }
    numbers
}
