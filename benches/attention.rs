//! Attention over 8192 selected tokens (32/8 heads, D 128, float16, blocks of 64) beside a plain read of the same bytes by
//! as many threads, and repair of a prediction that missed 3 of each head's 128 blocks. Every call selects other blocks of
//! a pool far larger than the caches. The last lines give the fastest calls, and the bandwidth of attention as a share of
//! the read's.

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
use support::{Rng, absent, args, packed, strided};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 64;
/// Blocks of the pool, and blocks that each KV head reads.
const POOL: usize = 1024;
const SELECTED: usize = 128;
/// How many of these a prediction misses.
const MISSED: usize = 3;
/// Selections that the calls take in turn.
const TURNS: usize = 16;

/// Keys or values [blocks, KV heads, tokens, channels]: one block of one head is one run of 16 KiB.
struct Pool {
    k: Vec<f16>,
    v: Vec<f16>,
    /// [turns][KV heads][selected]
    ids: Vec<i32>,
    predicted: Vec<i32>,
}

impl Pool {
    fn new() -> Pool {
        let mut rng = Rng::new(0);
        let mut values = || -> Vec<f16> {
            (0..POOL * KV_HEADS * BLOCK * DIM).map(|_| f16::from_f64(rng.unit() * 2.0 - 1.0)).collect()
        };
        let (k, v) = (values(), values());
        let (mut ids, mut predicted) = (vec![], vec![]);
        for _ in 0..TURNS * KV_HEADS {
            let mut blocks = rng.subset(POOL, SELECTED + MISSED);
            rng.shuffle(&mut blocks);
            for (list, part) in [(&mut ids, &mut blocks.clone()[MISSED..]), (&mut predicted, &mut blocks[..SELECTED])] {
                part.sort_unstable();
                list.extend(part.iter().map(|&id| id as i32));
            }
        }
        Pool { k, v, ids, predicted }
    }

    /// Reads what a call selects, and does no more with it than it must.
    fn read(&self, turn: usize) -> u64 {
        let ids = of_turn(&self.ids, turn);
        let sum = |pool: &[f16], run: usize| {
            let run = &pool[run * BLOCK * DIM..(run + 1) * BLOCK * DIM];
            // SAFETY: any eight bytes are a u64; unaligned ends are left out.
            let (_, words, _) = unsafe { run.align_to::<[u64; 8]>() };
            let sums = words.iter().fold([0u64; 8], |sums, w| std::array::from_fn(|i| sums[i] ^ w[i]));
            sums.iter().fold(0, |a, b| a ^ b)
        };
        let runs = (0..ids.len()).into_par_iter().map(|n| ids[n] as usize * KV_HEADS + n / SELECTED);
        runs.map(|run| sum(&self.k, run) ^ sum(&self.v, run)).reduce(|| 0, |a, b| a ^ b)
    }
}

/// The lists of one call, [KV heads][selected].
fn of_turn(lists: &[i32], turn: usize) -> &[i32] {
    &lists[turn % TURNS * KV_HEADS * SELECTED..][..KV_HEADS * SELECTED]
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let pool = Pool::new();
    let session = support::Session::cpu(0);
    let threads = session.details().threads as usize;
    let readers = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");

    let kv = [POOL, BLOCK, KV_HEADS, DIM];
    let strides = [KV_HEADS * BLOCK * DIM, DIM, BLOCK * DIM, 1];
    let q: Vec<f16> = (0..HEADS * DIM).map(|n| f16::from_f64((n as f64).sin())).collect();
    let out = vec![f16::ZERO; HEADS * DIM];
    let table: Vec<i32> = (0..POOL as i32).collect();
    let (lens, counts) = (vec![(POOL * BLOCK) as i32], vec![SELECTED as i32; KV_HEADS]);
    let rows = |data: &[f16]| packed(data, 2, &[1, HEADS, DIM]);
    let kv = vwd_paged_kv {
        k: strided(&pool.k, 2, &kv, &strides),
        v: strided(&pool.v, 2, &kv, &strides),
        page_table: packed(&table, 0, &[1, POOL]),
        seq_lens: packed(&lens, 0, &[1]),
        ..args()
    };
    let list = |lists, turn| vwd_block_list {
        ids: packed(of_turn(lists, turn), 0, &[1, KV_HEADS, SELECTED]),
        counts: packed(&counts, 0, &[1, KV_HEADS]),
        slots: absent(),
    };
    let (acc, m) = (vec![0f32; HEADS * SELECTED * DIM], [vec![0f32; HEADS * SELECTED], vec![0f32; HEADS * SELECTED]]);
    let per_head = |m| packed::<f32>(m, 2, &[1, HEADS, SELECTED]);
    let strides = [HEADS * SELECTED * DIM, SELECTED * DIM, DIM, 1];
    let partials = vwd_attention_partials {
        acc: strided(&acc, 2, &[1, HEADS, SELECTED, DIM], &strides),
        m: per_head(&m[0]),
        l: per_head(&m[1]),
    };
    let attend = |list: vwd_block_list, partials: Option<vwd_attention_partials>| {
        let mut call =
            vwd_attention_args { block_size: BLOCK as u32, kv: &kv, q: rows(&q), list, out: rows(&out), ..args() };
        call.partials = partials.unwrap_or(call.partials);
        // SAFETY: the tensors live as long as main.
        support::assert_ok(unsafe { vwd_attention(session.raw(), &call, std::ptr::null_mut()) });
    };
    let repair = |turn: usize| {
        let call = vwd_repair_args {
            mode: VWD_REPAIR_EXACT,
            block_size: BLOCK as u32,
            kv: &kv,
            q: rows(&q),
            predicted: list(&pool.predicted, turn),
            selected: list(&pool.ids, turn),
            predicted_partials: partials,
            out: rows(&out),
            ..args()
        };
        // SAFETY: as above.
        support::assert_ok(unsafe { vwd_repair(session.raw(), &call, std::ptr::null_mut()) });
    };

    let turn = Cell::new(0);
    // Tells the time of the fastest call too, which other programs on the machine have disturbed least.
    let mut measure = |name: &str, bytes: Option<usize>, work: &dyn Fn(usize)| {
        let fastest = Cell::new(Duration::MAX);
        let mut group = criterion.benchmark_group("attention_8192_tokens");
        if let Some(bytes) = bytes {
            group.throughput(Throughput::Bytes(bytes as u64));
        }
        group.bench_function(name, |b| {
            b.iter_custom(|count| {
                let mut total = Duration::ZERO;
                for _ in 0..count {
                    let start = Instant::now();
                    work(turn.replace(turn.get() + 1));
                    let time = start.elapsed();
                    fastest.set(fastest.get().min(time));
                    total += time;
                }
                total
            })
        });
        group.finish();
        fastest.get()
    };
    let bytes = Some(2 * KV_HEADS * SELECTED * BLOCK * DIM * size_of::<f16>());
    let read = measure("read", bytes, &|turn| {
        black_box(readers.install(|| pool.read(turn)));
    });
    let attended = measure("attend", bytes, &|turn| attend(list(&pool.ids, turn), None));
    let kept = measure("attend_and_keep_partials", bytes, &|turn| attend(list(&pool.predicted, turn), Some(partials)));
    let repaired = measure("repair_exact", None, &repair);
    println!("fastest: read {read:?}, attend {attended:?}, keeping partials {kept:?}, repair {repaired:?}");
    println!("attention reaches {:.0} % of the read's bandwidth", 100.0 * read.as_secs_f64() / attended.as_secs_f64());
}
