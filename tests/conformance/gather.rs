//! vwd_gather_blocks: which blocks are copied where, and that no others are touched.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![gather_copies_listed_blocks_and_skips_ids_outside_their_tensor];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![gather_ends_at_once_where_there_is_nothing_to_copy];

fn gather_copies_listed_blocks_and_skips_ids_outside_their_tensor(backend: &Backend) {
    rounds(40, |rng| {
        let (n, m, listed) = (rng.size(1..=20), rng.size(1..=30), rng.size(0..=20).min(30));
        let inner: Vec<usize> = (0..rng.size(0..=4)).map(|_| rng.size(1..=9)).collect();
        let dtype = rng.pick(&[F16, F32, U8, I64]);
        let shape = |n: usize| [&[n], inner.as_slice()].concat();
        let bytes = rng.bytes(shape(n).iter().product::<usize>() * dtype.bytes());
        let source = Tensor::raw(backend, dtype, &shape(n), &bytes, &Layout::random(rng, inner.len() + 1));
        let target = Tensor::poisoned(backend, dtype, &shape(m), &Layout::random(rng, inner.len() + 1));
        let ids = Array::from_fn(&[listed], |_| rng.int(-1..=n as i64));
        let mut places: Vec<i64> = (0..m as i64).collect();
        rng.shuffle(&mut places);
        places.resize(listed.max(m), -1);
        let places = rng.one_in(2).then(|| Array::new(&[listed], places[..listed].to_vec()));
        let count = rng.one_in(2).then(|| rng.int(-2..=listed as i64 + 2));
        let source_ids = Tensor::ints(backend, I32, &ids, &Layout::random(rng, 1));
        let target_ids = places.as_ref().map(|ids| Tensor::ints(backend, I32, ids, &Layout::random(rng, 1)));
        let counted = count.map(|c| Tensor::ints(backend, I32, &Array::new(&[1], vec![c]), &Layout::default()));
        let call = vwd_gather_blocks_args {
            engine: rng.pick(&[VWD_GATHER_AUTO, VWD_GATHER_KERNEL, VWD_GATHER_COPY_ENGINE]),
            source: source.c(),
            target: target.c(),
            source_ids: source_ids.c(),
            target_ids: target_ids.as_ref().map_or(absent(), Tensor::c),
            count: counted.as_ref().map_or(absent(), Tensor::c),
            ..args()
        };
        // SAFETY: the tensors are alive.
        backend.finish(unsafe { vwd_gather_blocks(backend.session(), &call, backend.stream()) });
        let pairs = oracle::gather(&ids.data, places.as_ref().map(|p| p.data.as_slice()), count, n, m);
        let (from, to) = (source.read_raw(), target.read_raw());
        for &(s, t) in &pairs {
            assert_eq!(from.row([s]), to.row([t]), "block {s} → {t}");
        }
        target.assert_written("target", |at| pairs.iter().any(|&(_, t)| t == at[0]));
    });
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
