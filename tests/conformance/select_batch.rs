//! Every way to select over one ragged batch, of one query position and of several: the same bits for each sequence
//! wherever it stands in the batch, and nothing worse than skipped entries when tables, channels and lists name nothing.

use crate::Case;
use crate::support::selection::{Lists, Scene, Steps};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    select_survives_hostile_tables_channels_and_lists,
    select_bits_do_not_depend_on_the_batch,
    select_follows_sequences_that_grow_and_shrink,
];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] =
    cases![select_bits_do_not_depend_on_threads, index_and_select_need_less_than_48_kib_of_the_callers_stack,];

fn select_bits_do_not_depend_on_the_batch(backend: &Backend) {
    for lists in Lists::ALL {
        rounds(3, |rng| {
            let (dtype, dim) = rng.pick(&[(F32, 32), (BF16, 64), (F16, 128)]);
            let scene = Scene::random(rng, lists, dtype, dim, 700);
            let together = scene.select(backend);
            for order in [&[0][..], &[1], &[2], &[2, 0, 1], &[1, 1, 1]] {
                let others = scene.take(order).select(backend);
                for (way, (other, together)) in others.iter().zip(&together).enumerate() {
                    for (other, together) in other.iter().zip(together) {
                        for (place, &i) in order.iter().enumerate() {
                            let what = format!("{lists:?}, way {way}, sequence {i} at {place} of {order:?}");
                            assert_eq!(other.row([place]), together.row([i]), "{what}");
                        }
                    }
                }
            }
        });
    }
}

fn select_follows_sequences_that_grow_and_shrink(backend: &Backend) {
    for lists in Lists::ALL {
        rounds(2, |rng| {
            let (dtype, dim) = rng.pick(&[(F32, 40), (BF16, 64), (F16, 128)]);
            let mut steps = Steps::new(backend, rng, lists, dtype, dim);
            for _ in 0..backend.times(25) {
                steps.step(rng, |steps| steps.enqueue());
            }
        });
    }
}

fn select_bits_do_not_depend_on_threads(_: &Backend) {
    let backends = [1, 2, 5].map(Backend::cpu);
    for lists in Lists::ALL {
        rounds(3, |rng| {
            let scene = Scene::random(rng, lists, F32, 32, 700);
            let together = scene.select(&backends[0]);
            assert!(together == scene.select(&backends[1]), "{lists:?}, 2 threads");
            assert!(together == scene.select(&backends[2]), "{lists:?}, 5 threads");
        });
    }
}

fn select_survives_hostile_tables_channels_and_lists(backend: &Backend) {
    for lists in Lists::ALL {
        rounds(6, |rng| {
            let (dtype, dim) = rng.pick(&[(F32, 32), (BF16, 64)]);
            let mut scene = Scene::random(rng, lists, dtype, dim, 700);
            let wrong = [-1, 42, 10_000, i32::MAX as i64, i32::MIN as i64];
            let mut spoil = |a: &mut Array<i64>| *a = a.map(|&x| if rng.one_in(3) { rng.pick(&wrong) } else { x });
            spoil(&mut scene.table);
            spoil(&mut scene.channels);
            spoil(&mut scene.lens);
            spoil(&mut scene.rows);
            // Not even ascending any more.
            spoil(&mut scene.candidates.ids);
            spoil(&mut scene.candidates.counts);
            scene.select(backend);
        });
    }
}

/// The largest heads, on a session whose work the caller does.
fn index_and_select_need_less_than_48_kib_of_the_callers_stack(_: &Backend) {
    let backend = Backend::cpu(1);
    let measured = |call: &mut dyn FnMut()| {
        let used = stack_of(call);
        assert!(used < STACK, "a call used {used} bytes");
    };
    for lists in Lists::ALL {
        Scene::random(&mut Rng::new(13), lists, F32, 576, 700).select_within(&backend, measured);
    }
    let sample = |heads| Tensor::poisoned(&backend, BF16, &[4, heads, 576], &Layout::default());
    let (q, k) = (sample(6), sample(2));
    let channels = Tensor::poisoned(&backend, I32, &[2, 16], &Layout::default());
    let call = vwd_channel_importance_args { q: q.c(), k: k.c(), channels: channels.c(), ..args() };
    // SAFETY: the tensors are valid.
    measured(&mut || backend.finish(unsafe { vwd_channel_importance(backend.session(), &call, backend.stream()) }));

    let tensor = |shape: &[usize]| Tensor::poisoned(&backend, BF16, shape, &Layout::default());
    let lens = Tensor::ints(&backend, I32, &Array::new(&[1], vec![100]), &Layout::default());
    let (k, axes) = (tensor(&[1, 100, 2, 576]), [(); 2].map(|()| tensor(&[1, 2, 2, 1152])));
    let layers = axes.each_ref().map(|axes| {
        let index = vwd_index { kind: VWD_INDEX_AXIS, block_size: 64, axes: axes.c(), ..args() };
        vwd_index_update_args { index: kept(index), k: k.c(), seq_lens: lens.c(), ..args() }
    });
    let updates = layers.each_ref().map(|update| &raw const *update);
    // SAFETY: as above.
    measured(&mut || {
        backend.finish(unsafe { vwd_index_update_layers(backend.session(), updates.as_ptr(), 2, backend.stream()) })
    });
}
