//! Gather: lists that an engine cannot read, and captured calls.

use crate::Case;
use crate::graph::Graph;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[
    ("gather_refuses_lists_that_an_engine_cannot_read", gather_refuses_lists_that_an_engine_cannot_read),
    ("gather_replays_a_graph_with_changed_ids", gather_replays_a_graph_with_changed_ids),
    ("captured_gather_keeps_the_lists_of_the_host", captured_gather_keeps_the_lists_of_the_host),
    ("gather_on_the_default_stream_takes_the_copy_engine", gather_on_the_default_stream_takes_the_copy_engine),
];

const PLAIN: fn() -> Layout = Layout::default;

fn ids(backend: &Backend, place: Place, values: Vec<i64>) -> Tensor<'_> {
    Tensor::ints(backend, I32, &Array::new(&[values.len()], values), &PLAIN()).moved_to(place)
}

fn gather_refuses_lists_that_an_engine_cannot_read(backend: &Backend) {
    let source = Tensor::floats(backend, F32, &Array::filled(&[3, 2], 1.0), &PLAIN());
    let target = Tensor::poisoned(backend, F32, &[3, 2], &PLAIN());
    let refused = |engine, places: [Place; 3], pieces: &[&str]| {
        let [source_ids, target_ids, count] = places.map(|place| ids(backend, place, vec![0]));
        let call = vwd_gather_blocks_args {
            engine,
            source: source.c(),
            target: target.c(),
            source_ids: source_ids.c(),
            target_ids: target_ids.c(),
            count: count.c(),
            ..args()
        };
        // SAFETY: the tensors are alive.
        let status = unsafe { vwd_gather_blocks(backend.session(), &call, backend.stream()) };
        assert_fails(status, VWD_ERROR_INVALID_ARGUMENT, pieces);
    };
    let (here, host, pinned) = (Place::Session, Place::Host, Place::Pinned);
    refused(VWD_GATHER_COPY_ENGINE, [here; 3], &["source_ids", "host memory"]);
    refused(VWD_GATHER_AUTO, [here, host, here], &["target_ids", "device memory"]);
    refused(VWD_GATHER_AUTO, [here, here, pinned], &["count", "device memory"]);
    refused(VWD_GATHER_KERNEL, [host, here, host], &["target_ids", "host memory"]);
    refused(VWD_GATHER_COPY_ENGINE, [pinned, host, here], &["count", "host memory"]);
    backend.finish(VWD_OK);
    target.assert_untouched("target");
}

/// A pinned pool of blocks, and where they go.
struct Pool<'b> {
    backend: &'b Backend,
    source: Tensor<'b>,
    target: Tensor<'b>,
}

impl<'b> Pool<'b> {
    fn new(backend: &'b Backend, rng: &mut Rng, blocks: [usize; 2], words: usize) -> Pool<'b> {
        let [sources, targets] = blocks;
        let bytes = rng.bytes(sources * words * 8);
        let source = Tensor::raw(backend, I64, &[sources, words], &bytes, &PLAIN()).moved_to(Place::Pinned);
        Pool { backend, source, target: Tensor::poisoned(backend, I64, &[targets, words], &PLAIN()) }
    }

    fn call(&self, engine: u32, lists: [&Tensor; 2], count: Option<&Tensor>) -> vwd_gather_blocks_args {
        vwd_gather_blocks_args {
            engine,
            source: self.source.c(),
            target: self.target.c(),
            source_ids: lists[0].c(),
            target_ids: lists[1].c(),
            count: count.map_or(absent(), Tensor::c),
            ..args()
        }
    }

    fn enqueue(&self, call: &vwd_gather_blocks_args) {
        // SAFETY: the tensors outlive the call and what replays it.
        assert_ok(unsafe { vwd_gather_blocks(self.backend.session(), call, self.backend.stream()) });
    }

    fn assert_copied(&self, pairs: &[(usize, usize)]) {
        let (from, to) = (self.source.read_ints(), self.target.read_ints());
        for &(s, t) in pairs {
            assert!(from.row([s]) == to.row([t]), "block {s} → {t}");
        }
        self.target.assert_written("target", |at| pairs.iter().any(|&(_, t)| t == at[0]));
    }
}

/// Blocks for bulk copies, and for plain loads.
fn gather_replays_a_graph_with_changed_ids(backend: &Backend) {
    const LISTED: usize = 60;
    rounds(2, |rng| {
        for words in [2, 509, 512, 4096] {
            let pool = Pool::new(backend, rng, [40, 50], words);
            let lists = [0, 1].map(|_| ids(backend, Place::Session, vec![-1; LISTED]));
            let count = ids(backend, Place::Session, vec![0]);
            let call = pool.call(VWD_GATHER_AUTO, [&lists[0], &lists[1]], Some(&count));
            let graph = Graph::capture(backend.stream().cast(), || pool.enqueue(&call));
            for _ in 0..10 {
                let from = Array::from_fn(&[LISTED], |_| rng.int(-1..=40));
                let mut to: Vec<i64> = (0..LISTED as i64).collect();
                rng.shuffle(&mut to);
                let counted = rng.int(-1..=LISTED as i64);
                let pairs = oracle::gather(&from.data, Some(&to), Some(counted), 40, 50);
                lists[0].refill_ints(&from);
                lists[1].refill_ints(&Array::new(&[LISTED], to));
                count.refill_ints(&Array::filled(&[1], counted));
                pool.target.repoison();
                graph.replay();
                pool.assert_copied(&pairs);
            }
        }
    });
}

/// What the host's lists held at the capture is copied, by the engine that was asked for, whatever they hold later.
fn captured_gather_keeps_the_lists_of_the_host(backend: &Backend) {
    rounds(1, |rng| {
        for engine in [VWD_GATHER_AUTO, VWD_GATHER_KERNEL, VWD_GATHER_COPY_ENGINE] {
            let pool = Pool::new(backend, rng, [9, 9], 16 << 10);
            let lists = [vec![3, -1, 7], vec![8, 2, 0]].map(|of| ids(backend, Place::Host, of));
            let call = pool.call(engine, [&lists[0], &lists[1]], None);
            let graph = Graph::capture(backend.stream().cast(), || pool.enqueue(&call));
            lists[0].refill_ints(&Array::new(&[3], vec![1, 1, 1]));
            graph.replay();
            pool.assert_copied(&[(3, 8), (7, 0)]);
        }
    });
}

/// It takes no batches of copies.
fn gather_on_the_default_stream_takes_the_copy_engine(backend: &Backend) {
    rounds(1, |rng| {
        let pool = Pool::new(backend, rng, [9, 9], 16 << 10);
        let lists = [vec![3, 5], vec![8, 2]].map(|of| ids(backend, Place::Pinned, of));
        let call = pool.call(VWD_GATHER_COPY_ENGINE, [&lists[0], &lists[1]], None);
        // SAFETY: the tensors outlive the call.
        assert_ok(unsafe { vwd_gather_blocks(backend.session(), &call, std::ptr::null_mut()) });
        backend.finish(VWD_OK);
        pool.assert_copied(&[(3, 8), (5, 2)]);
    });
}
