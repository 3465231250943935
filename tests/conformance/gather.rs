//! vwd_gather_blocks: which blocks are copied where, and that no others are touched.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    gather_copies_listed_blocks_and_skips_ids_outside_their_tensor,
    gather_copies_blocks_of_every_size,
    gather_copies_the_head_of_each_list,
    gather_copies_more_blocks_than_one_launch_takes,
];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![gather_ends_at_once_where_there_is_nothing_to_copy];

/// What blocks are like, and how many there are in source and target.
struct Blocks {
    dtype: DType,
    inner: Vec<usize>,
    sources: usize,
    targets: usize,
    /// Every tensor in C order.
    plain: bool,
}

/// B, Hk and cap of lists; a single one has neither B nor Hk.
enum Lists {
    One(usize),
    PerHead([usize; 3]),
}

fn gather_copies_listed_blocks_and_skips_ids_outside_their_tensor(backend: &Backend) {
    rounds(60, |rng| {
        let inner = (0..rng.size(0..=4)).map(|_| rng.size(1..=9)).collect();
        let (sources, targets) = (rng.size(1..=20), rng.size(1..=30));
        let blocks = Blocks { dtype: rng.pick(&[F16, F32, U8, I64]), inner, sources, targets, plain: false };
        let lists = Lists::One(rng.size(0..=20));
        check(backend, rng, &blocks, &lists);
    });
}

/// From less than a vector to more than a copy is worth to the copy engine, and a little beside each of them.
fn gather_copies_blocks_of_every_size(backend: &Backend) {
    rounds(40, |rng| {
        let size = rng.pick(&[16, 64, 512, 1 << 10, 4 << 10, 10_000, 16 << 10, 64 << 10, 100_000]);
        let bytes = size + rng.pick(&[0, 0, 0, 1, 4, 16, 48]);
        let (sources, targets) = (rng.size(1..=9), rng.size(1..=12));
        let blocks = Blocks { dtype: U8, inner: vec![bytes], sources, targets, plain: rng.one_in(2) };
        let lists = Lists::One(rng.size(0..=12));
        check(backend, rng, &blocks, &lists);
    });
}

fn gather_copies_the_head_of_each_list(backend: &Backend) {
    rounds(40, |rng| {
        let inner = match rng.one_in(2) {
            true => vec![rng.size(1..=70) * 16],
            false => (0..rng.size(0..=3)).map(|_| rng.size(1..=9)).collect(),
        };
        let (sources, targets) = (rng.size(1..=20), rng.size(1..=200));
        let blocks = Blocks { dtype: rng.pick(&[F16, U8]), inner, sources, targets, plain: rng.one_in(2) };
        let lists = Lists::PerHead([rng.size(1..=4), rng.size(1..=5), rng.size(0..=12)]);
        check(backend, rng, &blocks, &lists);
    });
}

fn gather_copies_more_blocks_than_one_launch_takes(backend: &Backend) {
    rounds(3, |rng| {
        let inner = vec![rng.pick(&[10, 128])];
        let blocks = Blocks { dtype: I64, inner, sources: 300, targets: 2600, plain: true };
        check(backend, rng, &blocks, &Lists::One(2500));
    });
}

/// A call with random lists, in random memory, by a random engine.
fn check(backend: &Backend, rng: &mut Rng, blocks: &Blocks, lists: &Lists) {
    let Blocks { dtype, inner, sources: n, targets: m, plain } = blocks;
    let (heads, listed, shape, counted): (usize, usize, Vec<usize>, Vec<usize>) = match *lists {
        Lists::One(cap) => (1, 1, vec![cap], vec![1]),
        Lists::PerHead([batch, heads, cap]) => (heads, batch * heads, vec![batch, heads, cap], vec![batch, heads]),
    };
    let per_head = shape.len() == 3;
    let (cap, entries) = (shape[shape.len() - 1], shape.iter().product::<usize>());
    let layout = |rng: &mut Rng, rank| if *plain { Layout::default() } else { Layout::random(rng, rank) };
    let lead = if per_head { vec![*n, heads] } else { vec![*n] };
    let from_shape = [&lead, inner.as_slice()].concat();
    let bytes = rng.bytes(from_shape.iter().product::<usize>() * dtype.bytes());
    let source = Tensor::raw(backend, *dtype, &from_shape, &bytes, &layout(rng, from_shape.len()));
    let source = source.moved_to(rng.pick(&[Place::Session, Place::Pinned, Place::Pinned]));
    let to_shape = [&[*m], inner.as_slice()].concat();
    let target = Tensor::poisoned(backend, *dtype, &to_shape, &layout(rng, to_shape.len()));

    let ids = Array::from_fn(&shape, |_| rng.int(-1..=*n as i64));
    let mut places: Vec<i64> = (0..*m as i64).collect();
    rng.shuffle(&mut places);
    places.resize(entries.max(*m), -1);
    let places = rng.one_in(2).then(|| Array::new(&shape, places[..entries].to_vec()));
    let counts = rng.one_in(2).then(|| Array::from_fn(&counted, |_| rng.int(-2..=cap as i64 + 2)));
    // Each from its place in the session's memory or the host's.
    let of_lists = rng.pick(&[[Place::Session; 2], [Place::Host, Place::Pinned]]);
    let ints = |rng: &mut Rng, values: &Array<i64>| {
        let layout = Layout::random(rng, values.shape.len());
        Tensor::ints(backend, I32, values, &layout).moved_to(rng.pick(&of_lists))
    };
    let source_ids = ints(rng, &ids);
    let target_ids = places.as_ref().map(|places| ints(rng, places));
    let count = counts.as_ref().map(|counts| ints(rng, counts));
    let by_host = !backend.is_cuda() || of_lists[0] != Place::Session;
    let engines = [VWD_GATHER_AUTO, VWD_GATHER_KERNEL, VWD_GATHER_COPY_ENGINE];
    let call = vwd_gather_blocks_args {
        engine: rng.pick(&engines[..if by_host { 3 } else { 2 }]),
        source: source.c(),
        target: target.c(),
        source_ids: source_ids.c(),
        target_ids: target_ids.as_ref().map_or(absent(), Tensor::c),
        count: count.as_ref().map_or(absent(), Tensor::c),
        ..args()
    };
    // SAFETY: the tensors are alive.
    backend.finish(unsafe { vwd_gather_blocks(backend.session(), &call, backend.stream()) });

    let (from, to) = (source.read_raw(), target.read_raw());
    let mut written = vec![false; *m];
    for list in 0..listed {
        let entries = list * cap..(list + 1) * cap;
        let all: Vec<i64> = (0..(listed * cap) as i64).collect();
        let places = places.as_ref().map_or(&all, |places| &places.data);
        let count = counts.as_ref().map(|counts| counts.data[list]);
        for (s, t) in oracle::gather(&ids.data[entries.clone()], Some(&places[entries]), count, *n, *m) {
            let block = if per_head { from.row([s, list % heads]) } else { from.row([s]) };
            assert!(block == to.row([t]), "block {s} of list {list} → {t}");
            written[t] = true;
        }
    }
    target.assert_written("target", |at| written[at[0]]);
}

fn gather_ends_at_once_where_there_is_nothing_to_copy(backend: &Backend) {
    let blocks = Tensor::floats(backend, F32, &Array::filled(&[3, 2], 1.0), &Layout::default());
    let ids = Tensor::ints(backend, I32, &Array::filled(&[1], 0), &Layout::default());
    let mut source_ids = ids.c();
    (source_ids.shape[0], source_ids.strides[0]) = (1 << 60, 0);
    let gather = |source, target| {
        let args = vwd_gather_blocks_args { source, target, source_ids, ..args() };
        // SAFETY: everything is alive during the call; what claims 2^60 elements has one, or none.
        assert_ok(unsafe { vwd_gather_blocks(backend.session(), &args, backend.stream()) });
    };
    gather(blocks.c(), boundless(F32, &[0, 2]));
    gather(boundless(F32, &[0, 2]), blocks.c());
    gather(boundless(F32, &[0, 1 << 60, 1 << 60]), boundless(F32, &[0, 1 << 60, 1 << 60]));
    blocks.assert_untouched("blocks");
}
