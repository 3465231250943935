//! A captured call, replayed with other contents.

use crate::Case;
use crate::attention::disturb;
use crate::support::*;
use cudarc::driver::sys::{self, CUresult, CUstream};
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("verify_pack_replays_a_graph_with_changed_contents", verify_pack_replays_a_graph_with_changed_contents),
    (
        "verify_with_an_end_replays_a_graph_with_changed_contents",
        verify_with_an_end_replays_a_graph_with_changed_contents,
    ),
    ("verify_follows_what_the_kernel_ahead_writes", verify_follows_what_the_kernel_ahead_writes),
    ("pack_of_a_large_batch_replays_a_graph", pack_of_a_large_batch_replays_a_graph),
    ("sample_replays_a_graph_with_changing_seeds", sample_replays_a_graph_with_changing_seeds),
    ("sample_ends_though_its_contents_change", sample_ends_though_its_contents_change),
];

pub fn check(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// A graph of what `enqueue` puts on the stream, launched on it by `replay`.
pub struct Graph {
    exec: sys::CUgraphExec,
    stream: CUstream,
    /// What was enqueued: launches and copies.
    pub nodes: usize,
}

impl Graph {
    pub fn capture(stream: CUstream, enqueue: impl FnOnce()) -> Graph {
        let (mut graph, mut exec, mut nodes) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: the stream is idle, and its context is current: the backend made it so.
        unsafe {
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL;
            check(sys::cuStreamBeginCapture_v2(stream, mode));
            enqueue();
            check(sys::cuStreamEndCapture(stream, &mut graph));
            check(sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes));
            check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            check(sys::cuGraphDestroy(graph));
        }
        Graph { exec, stream, nodes }
    }

    pub fn replay(&self) {
        // SAFETY: the graph is instantiated; the stream lives as long as the backend.
        unsafe {
            check(sys::cuGraphLaunch(self.exec, self.stream));
            check(sys::cuStreamSynchronize(self.stream));
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once; its launches have passed.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// Numbers that kernels write just ahead of the one that reads them: what a kernel finds before it waits for the one ahead is that of the
/// step before. Verification writes them, as the next tokens of drafts that are all refused.
pub struct Written<'b> {
    backend: &'b Backend,
    draft: Tensor<'b>,
    accepted: Tensor<'b>,
    /// As targets: of the step before, of this one.
    steps: [Tensor<'b>; 2],
    to: vwd_tensor,
}

impl<'b> Written<'b> {
    /// To int32s that lie side by side.
    pub fn new(backend: &'b Backend, to: &Tensor) -> Written<'b> {
        let (plain, to) = (Layout::default(), to.c());
        let count: usize = to.shape[..to.ndim as usize].iter().map(|&n| n as usize).product();
        let targets = || Tensor::ints(backend, I32, &Array::filled(&[count, 2], 0), &plain);
        Written {
            backend,
            draft: Tensor::ints(backend, I32, &Array::filled(&[count, 1], -1), &plain),
            accepted: Tensor::poisoned(backend, I32, &[count], &plain),
            steps: [targets(), targets()],
            to: vwd_tensor { ndim: 1, shape: [count as i64, 0, 0, 0, 0], strides: [1, 0, 0, 0, 0], ..to },
        }
    }
    pub fn set(&self, numbers: &[i64]) {
        let [before, now] = &self.steps;
        before.refill_ints(&now.read_ints());
        now.refill_ints(&Array::from_fn(&[numbers.len(), 2], |at| numbers[at[0]]));
    }
    /// First those of the step before.
    pub fn enqueue(&self) {
        for step in &self.steps {
            let args = vwd_verify_args {
                draft: self.draft.c(),
                target: step.c(),
                accepted: self.accepted.c(),
                next_token: self.to,
                ..args()
            };
            // SAFETY: the tensors outlive the graph.
            assert_ok(unsafe { vwd_verify(self.backend.session(), &args, self.backend.stream()) });
        }
    }
}

/// Tokens of one replay: from none to all accepted.
struct Contents {
    draft: Array<i64>,
    target: Array<i64>,
    lens: Array<i64>,
}

impl Contents {
    fn random(rng: &mut Rng, batch: usize, gamma: usize) -> Contents {
        let acceptance = rng.pick(&[0.0, 0.5, 0.9, 1.0]);
        let target = Array::from_fn(&[batch, gamma + 1], |_| rng.int(0..=50_000));
        let draft = Array::from_fn(&[batch, gamma], |at| {
            target[[at[0], at[1]]] + (rng.unit() >= acceptance) as i64 * rng.int(1..=9)
        });
        let lens = Array::from_fn(&[batch], |_| rng.int(-1..=gamma as i64 + 1));
        Contents { draft, target, lens }
    }
}

/// Sizes for one launch, for one whose CTAs share the work in clusters, and for two.
fn verify_pack_replays_a_graph_with_changed_contents(backend: &Backend) {
    replay_with_changed_contents(backend, [32, 16, 128], 1000);
    replay_with_changed_contents(backend, [600, 8, 32], 250);
    replay_with_changed_contents(backend, [32, 16, 129], 250);
}

fn replay_with_changed_contents(backend: &Backend, [batch, gamma, width]: [usize; 3], replays: usize) {
    rounds(1, |rng| {
        let contents = Contents::random(rng, batch, gamma);
        let plain = Layout::default();
        let ints = |dtype, values| Tensor::ints(backend, dtype, values, &plain);
        let (draft, target, lens) =
            (ints(I32, &contents.draft), ints(I32, &contents.target), ints(I32, &contents.lens));
        let values = Array::from_fn(&[batch, gamma, width], |_| rng.int(0..=255));
        let rows = Tensor::ints(backend, U8, &values, &plain);
        let poisoned = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &plain);
        let (accepted, next_token) = (poisoned(I32, &[batch]), poisoned(I32, &[batch]));
        let committed = poisoned(I32, &[batch, gamma + 1]);
        let (packed, offsets) = (poisoned(U8, &[batch * gamma, width]), poisoned(I64, &[batch + 1]));
        let (from, to) = ([rows.c()], [packed.c()]);
        let arguments = vwd_verify_pack_args {
            tensor_count: 1,
            rows: from.as_ptr(),
            packed: to.as_ptr(),
            draft: draft.c(),
            target: target.c(),
            draft_lens: lens.c(),
            accepted: accepted.c(),
            next_token: next_token.c(),
            offsets: offsets.c(),
            committed: committed.c(),
            ..args()
        };
        let graph = Graph::capture(backend.stream().cast(), || {
            // SAFETY: the tensors outlive the graph.
            assert_ok(unsafe { vwd_verify_pack(backend.session(), &arguments, backend.stream()) });
        });
        for replay in 0..replays {
            let contents = Contents::random(rng, batch, gamma);
            draft.refill_ints(&contents.draft);
            target.refill_ints(&contents.target);
            lens.refill_ints(&contents.lens);
            packed.repoison();
            graph.replay();

            let verified = oracle::verify(&contents.draft, &contents.target, Some(&contents.lens.data));
            assert_eq!(accepted.read_ints().data, verified.accepted, "accepted, replay {replay}");
            assert_eq!(next_token.read_ints().data, verified.next_token, "next_token, replay {replay}");
            assert_eq!(committed.read_ints(), verified.committed, "committed, replay {replay}");
            check_packed(&values, &verified.accepted, &packed, &offsets);
        }
    });
}

/// Stop tokens, lengths and the ends of drafts change as tokens do: a call that cuts rows, and one of drafts one after the other.
fn verify_with_an_end_replays_a_graph_with_changed_contents(backend: &Backend) {
    const RESULTS: [&str; 5] = ["accepted", "next_token", "committed_len", "finish", "committed"];
    let (batch, gamma) = (40, 6);
    rounds(1, |rng| {
        let plain = Layout::default();
        let ints = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
        let (draft, target, stop) = (ints(&[batch, gamma]), ints(&[batch, gamma + 1]), ints(&[batch, 2]));
        let [remaining, least, ends, bonus] = [(); 4].map(|()| ints(&[batch]));
        let [flat_draft, flat_target] = [(); 2].map(|()| ints(&[batch * gamma]));
        let poisoned = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, &plain);
        let results = [(); 2].map(|()| {
            let [accepted, next_token, committed_len] = [(); 3].map(|()| poisoned(I32, &[batch]));
            [accepted, next_token, committed_len, poisoned(U8, &[batch]), poisoned(I32, &[batch, gamma + 1])]
        });
        let [rows, flat] = results.each_ref().map(|results| {
            let [accepted, next_token, committed_len, finish, committed] = results.each_ref().map(Tensor::c);
            let [stop, remaining, min_remaining] = [&stop, &remaining, &least].map(Tensor::c);
            let end = vwd_verify_args { stop, remaining, min_remaining, committed_len, finish, ..args() };
            vwd_verify_args { accepted, next_token, committed, ..end }
        });
        let rows = vwd_verify_args { draft: draft.c(), target: target.c(), ..rows };
        let flat = vwd_verify_args { draft: flat_draft.c(), target: flat_target.c(), ..flat };
        let flat = vwd_verify_args { draft_ends: ends.c(), bonus: bonus.c(), ..flat };
        let graph = Graph::capture(backend.stream().cast(), || {
            for call in [&rows, &flat] {
                // SAFETY: the tensors outlive the graph.
                assert_ok(unsafe { vwd_verify(backend.session(), call, backend.stream()) });
            }
        });
        for replay in 0..250 {
            let of_target = Array::from_fn(&[batch, gamma + 1], |_| rng.int(0..=3));
            let guess = |rng: &mut Rng, token| if rng.one_in(5) { rng.int(0..=3) } else { token };
            let of_draft = Array::from_fn(&[batch, gamma], |at| guess(rng, of_target[[at[0], at[1]]]));
            let stops = Array::from_fn(&[batch, 2], |_| rng.int(-1..=9));
            let [most, fewest] = [gamma as i64 + 2, 3].map(|most| Array::from_fn(&[batch], |_| rng.int(0..=most)));
            let lens: Vec<usize> = (0..batch).map(|_| rng.size(0..=gamma)).collect();
            let (mut last, mut flat_tokens) = (0, [vec![], vec![]]);
            let mut expected = [(); 2].map(|()| [(); 5].map(|()| vec![]));
            for (i, &len) in lens.iter().enumerate() {
                let (draft, target) = (of_draft.row([i]), of_target.row([i]));
                flat_tokens[0].extend_from_slice(&draft[..len]);
                flat_tokens[1].extend_from_slice(&target[..len]);
                let end = oracle::End {
                    stop: stops.row([i]).to_vec(),
                    remaining: Some(most[[i]]),
                    min_remaining: fewest[[i]],
                };
                for (len, [accepted, next, lens, finishes, committed]) in [gamma, len].into_iter().zip(&mut expected) {
                    let k = (0..len).find(|&j| draft[j] != target[j]).unwrap_or(len);
                    let (n, finish) = end.cut(&target[..=k]);
                    accepted.push(k.min(n) as i64);
                    next.push(if n > k { target[k] } else { -1 });
                    lens.push(n as i64);
                    finishes.push(finish);
                    committed.extend((0..=gamma).map(|j| if j < n { target[j] } else { -1 }));
                }
            }
            draft.refill_ints(&of_draft);
            target.refill_ints(&of_target);
            stop.refill_ints(&stops);
            remaining.refill_ints(&most);
            least.refill_ints(&fewest);
            ends.refill_ints(&Array::from_fn(&[batch], |at| {
                last += lens[at[0]] as i64;
                last
            }));
            // What the target says after a whole draft.
            bonus.refill_ints(&Array::from_fn(&[batch], |at| of_target[[at[0], lens[at[0]]]]));
            for (tensor, mut tokens) in [&flat_draft, &flat_target].into_iter().zip(flat_tokens) {
                tokens.resize(batch * gamma, -1);
                tensor.refill_ints(&Array::new(&[batch * gamma], tokens));
            }
            graph.replay();
            for (results, expected) in results.iter().zip(&expected) {
                for ((name, result), expected) in RESULTS.iter().zip(results).zip(expected) {
                    assert_eq!(&result.read_ints().data, expected, "{name}, replay {replay}");
                }
            }
        }
    });
}

/// Offsets are the running sum, rows follow each other in order, and nothing else was written.
fn check_packed(rows: &Array<i64>, accepted: &[i64], packed: &Tensor, offsets: &Tensor) {
    let (gamma, width) = (rows.shape[1], rows.shape[2]);
    let (found, found_offsets) = (packed.read_ints(), offsets.read_ints());
    let mut row = 0;
    for (i, &count) in accepted.iter().enumerate() {
        assert_eq!(found_offsets.data[i], row as i64, "offsets[{i}]");
        for t in 0..count as usize {
            let expected = &rows.data[(i * gamma + t) * width..][..width];
            assert_eq!(&found.data[row * width..][..width], expected, "row {t} of sequence {i}");
            row += 1;
        }
    }
    assert_eq!(found_offsets.data[accepted.len()], row as i64);
    packed.assert_written("packed", |at| at[0] < row);
}

/// Drafts, targets and lengths change in the kernel just ahead. The results are those of a call for which all was there.
fn verify_follows_what_the_kernel_ahead_writes(backend: &Backend) {
    const BATCH: usize = 6;
    for gamma in [8, 100, 200] {
        rounds(1, |rng| {
            let plain = Layout::default();
            let ints = |shape: &[usize]| Tensor::ints(backend, I32, &Array::filled(shape, 0), &plain);
            let given = [ints(&[BATCH, gamma]), ints(&[BATCH, gamma + 1]), ints(&[BATCH]), ints(&[BATCH])];
            let [draft, target, lens, remaining] = &given;
            let ahead: Vec<Written> = given.iter().map(|of| Written::new(backend, of)).collect();
            let results = [(); 2].map(|_| (ints(&[BATCH]), ints(&[BATCH]), ints(&[BATCH, gamma + 1])));
            let verify = |(accepted, next_token, committed): &(Tensor, Tensor, Tensor), ahead: &[Written]| {
                ahead.iter().for_each(Written::enqueue);
                let args = vwd_verify_args {
                    draft: draft.c(),
                    target: target.c(),
                    draft_lens: lens.c(),
                    remaining: remaining.c(),
                    accepted: accepted.c(),
                    next_token: next_token.c(),
                    committed: committed.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the graph.
                assert_ok(unsafe { vwd_verify(backend.session(), &args, backend.stream()) });
            };
            let [replayed, called] = &results;
            let graph = Graph::capture(backend.stream().cast(), || verify(replayed, &ahead));
            for step in 0..backend.times(300) {
                let Contents { draft, target, lens } = Contents::random(rng, BATCH, gamma);
                let remaining = (0..BATCH).map(|_| rng.int(0..=2 * gamma as i64)).collect();
                for (written, numbers) in ahead.iter().zip([draft.data, target.data, lens.data, remaining]) {
                    written.set(&numbers);
                }
                graph.replay();
                verify(called, &[]);
                backend.finish(0);
                for (a, b) in [(&replayed.0, &called.0), (&replayed.1, &called.1), (&replayed.2, &called.2)] {
                    assert_eq!(a.read_ints(), b.read_ints(), "step {step} of {gamma} draft tokens");
                }
            }
        });
    }
}

fn pack_of_a_large_batch_replays_a_graph(backend: &Backend) {
    let (batch, gamma, width) = (5000, 3, 5);
    rounds(1, |rng| {
        let plain = Layout::default();
        let values = Array::from_fn(&[batch, gamma, width], |_| rng.int(0..=255));
        let rows = Tensor::ints(backend, U8, &values, &plain);
        let counts = Array::from_fn(&[batch], |_| rng.int(0..=gamma as i64));
        let accepted = Tensor::ints(backend, I32, &counts, &plain);
        let packed = Tensor::poisoned(backend, U8, &[batch * gamma, width], &plain);
        let offsets = Tensor::poisoned(backend, I32, &[batch + 1], &plain);
        let (from, to) = ([rows.c()], [packed.c()]);
        let arguments = vwd_pack_args {
            tensor_count: 1,
            rows: from.as_ptr(),
            packed: to.as_ptr(),
            accepted: accepted.c(),
            offsets: offsets.c(),
            ..args()
        };
        let graph = Graph::capture(backend.stream().cast(), || {
            // SAFETY: the tensors outlive the graph.
            assert_ok(unsafe { vwd_pack(backend.session(), &arguments, backend.stream()) });
        });
        for _ in 0..50 {
            let counts = Array::from_fn(&[batch], |_| rng.int(0..=gamma as i64));
            accepted.refill_ints(&counts);
            packed.repoison();
            graph.replay();
            check_packed(&values, &counts.data, &packed, &offsets);
        }
    });
}

/// What a graph's call is, and the variant that is forced to run it.
#[derive(Clone, Copy, Debug)]
struct Replayed {
    variant: Option<&'static str>,
    rule: u32,
    filters: bool,
    logprobs: bool,
    tokens: usize,
}

/// Seeds, positions, drafts, settings and ends of each replay; the CPU tells every output. By each variant a thousand times, without filters and with them, and
/// where the variant has others for log-probabilities and rejection, these too. Rows of 4104 numbers begin on 16 bytes, those of 500 do not.
fn sample_replays_a_graph_with_changing_seeds(backend: &Backend) {
    let (coupled, rejection) = (VWD_ACCEPT_COUPLED, VWD_ACCEPT_REJECTION);
    let of = |(variant, rule, filters, logprobs, tokens)| Replayed { variant, rule, filters, logprobs, tokens };
    let by_variant =
        [("sample=cluster", 90), ("sample=half_cluster", 90), ("sample=streamed", 90), ("sample=loaded", 80)];
    for (variant, least) in by_variant {
        let Some(forced) = backend.forcing(variant, least..=u32::MAX) else { continue };
        let mut calls = vec![(coupled, false, false), (coupled, true, false)];
        // Which clusters do not take.
        if !variant.ends_with("cluster") {
            calls.extend([(coupled, true, true), (rejection, false, true), (rejection, true, false)]);
        }
        let replays = 1000_usize.div_ceil(calls.len());
        for (rule, filters, logprobs) in calls {
            replay_with_changing_seeds(&forced, of((Some(variant), rule, filters, logprobs, 4104)), replays);
        }
        forced.assert_ran(variant);
    }
    for (rule, filters, logprobs, tokens) in
        [(VWD_ACCEPT_AUTO, true, true, 500), (rejection, false, false, 500), (rejection, true, true, 4104)]
    {
        replay_with_changing_seeds(backend, of((None, rule, filters, logprobs, tokens)), 334);
    }
}

fn replay_with_changing_seeds(backend: &Backend, replayed: Replayed, replays: usize) {
    let Replayed { rule, filters, logprobs: wants_logprobs, tokens, .. } = replayed;
    let by = replayed.variant.unwrap_or("sample=any");
    let (batch, gamma, plain) = (3, 2, Layout::default());
    let cpu = Backend::cpu(1);
    // An emulated device takes half of what it does elsewhere.
    let replays = if backend.times(1000) < 1000 { backend.times(1000) / 2 } else { replays };
    rounds(1, |rng| {
        let mut logits = rng.normals(&[batch, gamma + 1, tokens]).map(|&x| BF16.round(3.0 * x));
        logits[[0, 1, 7]] = f64::NAN;
        // Rows of drafts are like those of target, so that some drafts are accepted.
        let noise = rng.normals(&[batch, gamma, tokens]);
        let drafted =
            Array::from_fn(&noise.shape, |at| F32.round(logits[[at[0], at[1], at[2]]] + noise[[at[0], at[1], at[2]]]));
        let scene = |backend| {
            let has_rows = rule == VWD_ACCEPT_REJECTION;
            let draft_rows = has_rows.then(|| Tensor::floats(backend, F32, &drafted, &plain));
            Sampling { rule, filters, draft_rows, wants_logprobs, ..Sampling::new(backend, &logits, &plain) }
        };
        let (here, there) = (scene(backend), scene(&cpu));
        // A stream's first call makes its scratch, which it cannot do while it captures.
        here.enqueue(backend);
        backend.finish(VWD_OK);
        let graph = Graph::capture(backend.stream().cast(), || here.enqueue(backend));
        let (mut accepted, mut finishes) = (0, [0; 3]);
        for replay in 0..replays {
            let ints = |rng: &mut Rng, shape: &[usize], most: i64| Array::from_fn(shape, |_| rng.int(0..=most));
            // What a greedy request takes, or what is likely.
            let likely = |rng: &mut Rng, i: usize, r: usize| {
                let row = logits.row([i, r]);
                let few = if rng.one_in(2) { tokens } else { 20 };
                let tokens = (0..few).map(|token| if few == tokens { token } else { rng.size(0..=tokens - 1) });
                tokens.filter(|&token| !row[token].is_nan()).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("some")
                    as i64
            };
            let draft = Array::from_fn(&[batch, gamma], |at| likely(rng, at[0], at[1]));
            let stop = Array::from_fn(&[batch, 2], |at| if rng.one_in(3) { draft[[at[0], at[1]]] } else { -1 });
            let most = gamma as i64 + 2;
            let [lens, remaining, least] = [(); 3].map(|()| Array::from_fn(&[batch], |_| rng.int(0..=most)));
            let (seeds, positions) = (ints(rng, &[batch], i64::MAX), ints(rng, &[batch], 1 << 40));
            let floats = |rng: &mut Rng, of: &[f64]| Array::from_fn(&[batch], |_| F32.round(rng.pick(of)));
            let temperature = floats(rng, &[0.0, 0.7, 1.0]);
            let (top_p, min_p) = (floats(rng, &[1.0, 0.9]), floats(rng, &[0.0, 0.05]));
            let top_k = Array::from_fn(&[batch], |_| rng.pick(&[0, 5, 40]));
            for scene in [&here, &there] {
                for (tensor, contents) in [
                    (&scene.draft, &draft),
                    (&scene.draft_lens, &lens),
                    (&scene.top_k, &top_k),
                    (&scene.seeds, &seeds),
                    (&scene.positions, &positions),
                    (&scene.stop, &stop),
                    (&scene.remaining, &remaining),
                    (&scene.min_remaining, &least),
                ] {
                    tensor.refill_ints(contents);
                }
                scene.temperature.refill_floats(&temperature);
                scene.top_p.refill_floats(&top_p);
                scene.min_p.refill_floats(&min_p);
            }
            here.outputs().iter().for_each(|(_, output)| output.repoison());
            here.logprobs.repoison();
            graph.replay();
            there.enqueue(&cpu);
            let what = format!("replay {replay} by {by}: {replayed:?}");
            for ((name, found), (_, expected)) in here.outputs().into_iter().zip(there.outputs()) {
                assert_eq!(found.read_ints(), expected.read_ints(), "{name}, {what}");
            }
            if wants_logprobs {
                for (found, expected) in here.logprobs.read_floats().data.iter().zip(there.logprobs.read_floats().data)
                {
                    // The bound of the contract.
                    assert!((found - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{found} {expected}, {what}");
                }
            }
            accepted += here.accepted.read_ints().data.iter().sum::<i64>();
            here.finish.read_ints().data.iter().for_each(|&finish| finishes[finish as usize] += 1);
        }
        if replays == 1000 || rule == VWD_ACCEPT_REJECTION {
            assert!(accepted > 0, "no draft is accepted, {replayed:?}");
        }
        assert!(replays < 1000 || finishes.iter().all(|&n| n > 0), "{finishes:?} requests ended as VWD_FINISH_* say");
    });
}

/// Temperatures, filters, lengths, drafts and logits change while calls run: a caller's mistake, which may cost these calls their results. They end,
/// read what is theirs, and leave calls that come later their bits.
fn sample_ends_though_its_contents_change(backend: &Backend) {
    let (batch, gamma, tokens, plain) = (16, 3, 20_000, Layout::default());
    let own = [(VWD_ACCEPT_COUPLED, true), (VWD_ACCEPT_COUPLED, false), (VWD_ACCEPT_REJECTION, true)];
    let forced = [("sample=streamed", own[1]), ("sample=half_cluster", own[0])];
    let forced = forced.map(|(variant, call)| (backend.forcing(variant, 90..=u32::MAX), call));
    let by_forced = forced.iter().filter_map(|(forced, call)| Some((forced.as_ref()?, *call)));
    let calls = own.into_iter().map(|call| (backend, call)).chain(by_forced);
    for (backend, (rule, filters)) in calls {
        rounds(1, |rng| {
            let logits = rng.normals(&[batch, gamma + 1, tokens]).map(|&x| BF16.round(3.0 * x));
            let scene = Sampling { rule, filters, ..Sampling::new(backend, &logits, &plain) };
            let refill = |rng: &mut Rng| {
                let column = |rng: &mut Rng, of: &[f64]| Array::from_fn(&[batch], |_| F32.round(rng.pick(of)));
                scene.draft.refill_ints(&Array::from_fn(&[batch, gamma], |_| rng.int(-1..=tokens as i64)));
                scene.temperature.refill_floats(&column(rng, &[0.0, 0.1, 1.0, 30.0]));
                scene.top_p.refill_floats(&column(rng, &[1.0, 0.9, 0.2]));
                scene.remaining.refill_ints(&Array::from_fn(&[batch], |_| rng.int(0..=1 + gamma as i64)));
                scene.target.refill_floats(&rng.normals(&[batch, gamma + 1, tokens]).map(|&x| BF16.round(5.0 * x)));
            };
            refill(rng);
            let (draft, target) = (scene.draft.read_ints(), scene.target.read_floats());
            let remaining = scene.remaining.read_ints();
            let columns = [&scene.temperature, &scene.top_p];
            let right = columns.map(Tensor::read_floats);
            scene.enqueue(backend);
            backend.finish(VWD_OK);
            let before = scene.committed.read_ints();
            let contents = [&scene.draft, &scene.temperature, &scene.top_p, &scene.remaining, &scene.target];
            disturb(backend, rng, &contents, refill, || scene.enqueue(backend));
            scene.draft.refill_ints(&draft);
            scene.remaining.refill_ints(&remaining);
            scene.target.refill_floats(&target);
            columns.iter().zip(&right).for_each(|(of, numbers)| of.refill_floats(numbers));
            scene.enqueue(backend);
            backend.finish(VWD_OK);
            assert_eq!(scene.committed.read_ints(), before, "rule {rule}, filters {filters}");
        });
    }
}

struct Sampling<'b> {
    rule: u32,
    filters: bool,
    wants_logprobs: bool,
    draft: Tensor<'b>,
    draft_lens: Tensor<'b>,
    draft_rows: Option<Tensor<'b>>,
    target: Tensor<'b>,
    temperature: Tensor<'b>,
    top_k: Tensor<'b>,
    top_p: Tensor<'b>,
    min_p: Tensor<'b>,
    seeds: Tensor<'b>,
    positions: Tensor<'b>,
    stop: Tensor<'b>,
    remaining: Tensor<'b>,
    min_remaining: Tensor<'b>,
    next_token: Tensor<'b>,
    accepted: Tensor<'b>,
    committed: Tensor<'b>,
    committed_len: Tensor<'b>,
    finish: Tensor<'b>,
    status: Tensor<'b>,
    logprobs: Tensor<'b>,
}

impl<'b> Sampling<'b> {
    fn new(backend: &'b Backend, logits: &Array<f64>, layout: &Layout) -> Sampling<'b> {
        let [batch, rows, _] = logits.shape[..] else { panic!("[B, γ+1, V]") };
        let ints = |shape: &[usize]| Tensor::ints(backend, I64, &Array::filled(shape, 0), layout);
        let counts = |of: usize| Tensor::ints(backend, I32, &Array::filled(&[batch], of as i64), layout);
        let floats = |of: f64| Tensor::floats(backend, F32, &Array::filled(&[batch], of), layout);
        let poisoned = |dtype, shape: &[usize]| Tensor::poisoned(backend, dtype, shape, layout);
        Sampling {
            rule: VWD_ACCEPT_AUTO,
            filters: true,
            wants_logprobs: false,
            draft: ints(&[batch, rows - 1]),
            draft_lens: counts(rows - 1),
            draft_rows: None,
            target: Tensor::floats(backend, BF16, logits, layout),
            temperature: floats(1.0),
            top_k: counts(0),
            top_p: floats(1.0),
            min_p: floats(0.0),
            seeds: ints(&[batch]),
            positions: ints(&[batch]),
            stop: Tensor::ints(backend, I64, &Array::filled(&[batch, 2], -1), layout),
            remaining: counts(rows),
            min_remaining: counts(0),
            next_token: poisoned(I64, &[batch]),
            accepted: poisoned(I32, &[batch]),
            committed: poisoned(I64, &[batch, rows]),
            committed_len: poisoned(I32, &[batch]),
            finish: poisoned(U8, &[batch]),
            status: poisoned(I32, &[batch]),
            logprobs: poisoned(F32, &[batch, rows]),
        }
    }

    /// All but log-probabilities.
    fn outputs(&self) -> [(&'static str, &Tensor<'b>); 6] {
        [
            ("next_token", &self.next_token),
            ("accepted", &self.accepted),
            ("committed", &self.committed),
            ("committed_len", &self.committed_len),
            ("finish", &self.finish),
            ("status", &self.status),
        ]
    }

    fn enqueue(&self, backend: &Backend) {
        let given = |tensor: &Tensor, is: bool| if is { tensor.c() } else { absent() };
        let args = vwd_verify_sample_args {
            rule: self.rule,
            draft: self.draft.c(),
            draft_lens: self.draft_lens.c(),
            draft_rows: self.draft_rows.as_ref().map_or(absent(), Tensor::c),
            target: self.target.c(),
            temperature: self.temperature.c(),
            top_k: given(&self.top_k, self.filters),
            top_p: given(&self.top_p, self.filters),
            min_p: given(&self.min_p, self.filters),
            seeds: self.seeds.c(),
            positions: self.positions.c(),
            stop: self.stop.c(),
            remaining: self.remaining.c(),
            min_remaining: self.min_remaining.c(),
            next_token: self.next_token.c(),
            accepted: self.accepted.c(),
            committed: self.committed.c(),
            committed_len: self.committed_len.c(),
            finish: self.finish.c(),
            status: self.status.c(),
            logprobs: given(&self.logprobs, self.wants_logprobs),
            ..args()
        };
        // SAFETY: the tensors outlive the call, and the graph.
        assert_ok(unsafe { vwd_verify_sample(backend.session(), &args, backend.stream()) });
    }
}
