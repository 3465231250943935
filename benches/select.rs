//! Selection of 128 of 2048 blocks of 64 tokens by their largest and smallest keys (32/8 heads, D 128, float16) beside a
//! plain read of the same bytes by as many threads. The calls take several sequences in turn, which together are far
//! larger than the caches. The last line gives the bandwidth of scoring and top-k together as a share of the read's.

use criterion::{Criterion, Throughput};
use half::f16;
use rayon::prelude::*;
use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};
use vanward::abi::*;
use vanward::capi::*;

#[path = "../tests/support/mod.rs"]
mod support;
use support::{Rng, absent, args, packed};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 64;
const BLOCKS: usize = 2048;
const SELECTED: usize = 128;
/// Sequences that the calls take in turn.
const TURNS: usize = 16;
/// Elements of one side of the summaries of a sequence.
const SIDE: usize = BLOCKS * KV_HEADS * DIM;

/// Reads some memory, and does no more with it than it must.
fn read(data: &[f16]) -> u64 {
    let sums = |part: &[f16]| {
        // SAFETY: any 64 bytes are eight u64; unaligned ends are left out.
        let (_, words, _) = unsafe { part.align_to::<[u64; 8]>() };
        let sums = words.iter().fold([0u64; 8], |sums, w| std::array::from_fn(|i| sums[i] ^ w[i]));
        sums.iter().fold(0, |a, b| a ^ b)
    };
    data.par_chunks(128 << 10).map(sums).reduce(|| 0, |a, b| a ^ b)
}

/// The summaries that a turn reads.
fn part(side: &[f16], turn: usize) -> &[f16] {
    &side[turn % TURNS * SIDE..][..SIDE]
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let session = support::Session::cpu(0);
    let threads = session.details().threads as usize;
    let readers = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");

    let mut rng = Rng::new(0);
    let mut side = || -> Vec<f16> { (0..TURNS * SIDE).map(|_| f16::from_f64(rng.unit() * 2.0 - 1.0)).collect() };
    let (max, min) = (side(), side());
    let q: Vec<f16> = (0..HEADS * DIM).map(|n| f16::from_f64((n as f64).sin())).collect();
    let lens = [(BLOCKS * BLOCK) as i32];
    let (ids, counts) = (vec![0i32; KV_HEADS * SELECTED], vec![0i32; KV_HEADS]);
    let select = |turn: usize| {
        let summaries = |side: &[f16]| packed(part(side, turn), 2, &[1, BLOCKS, KV_HEADS, DIM]);
        let index = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: BLOCK as u32,
            key_max: summaries(&max),
            key_min: summaries(&min),
            ..args()
        };
        let call = vwd_select_blocks_args {
            method: VWD_SELECT_MINMAX,
            block_size: BLOCK as u32,
            k: SELECTED as u32,
            init_blocks: 1,
            local_blocks: 2,
            q: packed(&q, 2, &[1, HEADS, DIM]),
            index: &index,
            seq_lens: packed(&lens, 0, &[1]),
            selected: vwd_block_list {
                ids: packed(&ids, 0, &[1, KV_HEADS, SELECTED]),
                counts: packed(&counts, 0, &[1, KV_HEADS]),
                slots: absent(),
            },
            ..args()
        };
        // SAFETY: the tensors live as long as main.
        support::assert_ok(unsafe { vwd_select_blocks(session.raw(), &call, std::ptr::null_mut()) });
    };

    let mut group = criterion.benchmark_group("select_128_of_2048_blocks");
    group.throughput(Throughput::Bytes((2 * SIDE * size_of::<f16>()) as u64));
    let turn = Cell::new(0);
    // The best mean of a sample, so that other programs on the machine disturb the ratio least.
    let mut measure = |name: &str, work: &dyn Fn(usize)| {
        let best = Cell::new(f64::INFINITY);
        group.bench_function(name, |b| {
            b.iter_custom(|count| {
                let start = Instant::now();
                for _ in 0..count {
                    work(turn.replace(turn.get() + 1));
                }
                let time = start.elapsed();
                best.set(best.get().min(time.as_secs_f64() / count as f64));
                time
            })
        });
        best.get()
    };
    let plain = measure("read", &|turn| {
        black_box(readers.install(|| read(part(&max, turn)) ^ read(part(&min, turn))));
    });
    let selected = measure("select", &select);
    group.finish();
    println!(
        "read {:?}, select {:?}: {:.0} % of the read's bandwidth",
        Duration::from_secs_f64(plain),
        Duration::from_secs_f64(selected),
        100.0 * plain / selected
    );
}
