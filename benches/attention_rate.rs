//! What one thread reaches in dense attention: GFLOP/s and GB/s by CPU time, for each dtype, D, G and number of positions.
//! Keys and values lie in memory, 64 MiB that a call reads once, or in the second-level cache, 256 KiB that calls read again
//! and again. A plain read of the same bytes stands beside them. A line is
//! `case median_µs GFLOP/s GB/s`; arguments choose the cases whose names hold all of them. `benches/paired.py` compares two
//! builds of this program.
//!
//! Attention does 4·Hq·D operations for a token and position, and reads 2·Hk·D elements for a token.

use half::{bf16, f16};
use std::hint::black_box;
use std::ptr::null_mut;
use vanward::abi::*;
use vanward::capi::*;

#[path = "../tests/support/mod.rs"]
mod support;
use support::{Rng, args, packed, strided};

const MEMORY: usize = 64 << 20;
const CACHE: usize = 256 << 10;
/// Tokens of a page.
const PAGE: usize = 64;
const SAMPLES: usize = 9;
/// CPU time of a sample, in nanoseconds, at least.
const SAMPLE: u64 = 10_000_000;

/// CPU time of this thread in nanoseconds: other programs on the machine do not add to it.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Median nanoseconds of a call.
fn measure(mut call: impl FnMut()) -> f64 {
    let mut sample = |calls: u64| {
        let start = now();
        (0..calls).for_each(|_| call());
        (now() - start) as f64 / calls as f64
    };
    let calls = (SAMPLE as f64 / sample(1).min(sample(1))).ceil() as u64;
    let mut samples: Vec<f64> = (0..SAMPLES).map(|_| sample(calls)).collect();
    samples.sort_by(f64::total_cmp);
    samples[SAMPLES / 2]
}

/// Numbers in −1 … 1.
fn values<T>(count: usize, from: impl Fn(f32) -> T) -> Vec<T> {
    let mut rng = Rng::new(1);
    (0..count).map(|_| from(2.0 * rng.unit() as f32 - 1.0)).collect()
}

/// A dtype: its name, its code in a tensor, and how it is made of f32.
struct Element<T>(&'static str, u8, fn(f32) -> T);

struct Shape {
    dim: usize,
    group: usize,
    rows: usize,
    /// Bytes of keys and values.
    bytes: usize,
}

fn report(name: &str, wanted: &[String], flops: f64, bytes: f64, call: &mut dyn FnMut()) {
    if wanted.iter().all(|part| name.contains(part)) {
        let time = measure(call);
        println!("{name:34} {:9.2} {:6.1} {:6.1}", time / 1e3, flops / time, bytes / time);
    }
}

impl<T> Element<T> {
    fn attend(&self, session: &support::Session, wanted: &[String], Shape { dim, group, rows, bytes }: Shape) {
        let Element(dtype, code, from) = self;
        let place = if bytes == MEMORY { "memory" } else { "cache" };
        let name = format!("{dtype} D={dim} G={group} Q={rows} {place}");
        if !wanted.iter().all(|part| name.contains(part)) {
            return;
        }
        let kv_heads = if bytes == MEMORY { 8 } else { 1 };
        let tokens = bytes / (2 * kv_heads * dim * size_of::<T>());
        let (pages, heads) = (tokens / PAGE, kv_heads * group);
        let kv: [Vec<T>; 2] = std::array::from_fn(|_| values(tokens * kv_heads * dim, from));
        let (q, out) = (values(rows * heads * dim, from), values(rows * heads * dim, from));
        let (table, lens): (Vec<i32>, _) = ((0..pages as i32).collect(), [tokens as i32]);
        let pool = |data: &[T]| {
            let strides = [kv_heads * PAGE * dim, dim, PAGE * dim, 1];
            strided(data, *code, &[pages, PAGE, kv_heads, dim], &strides)
        };
        let of_rows = |data: &[T]| packed(data, *code, &[1, rows, heads, dim]);
        let kv = vwd_paged_kv {
            k: pool(&kv[0]),
            v: pool(&kv[1]),
            page_table: packed(&table, 0, &[1, pages]),
            seq_lens: packed(&lens, 0, &[1]),
            ..args()
        };
        let call = vwd_attention_args { kv: &kv, q: of_rows(&q), out: of_rows(&out), ..args() };
        let flops = 4.0 * (tokens * rows * heads * dim) as f64;
        report(&name, wanted, flops, bytes as f64, &mut || {
            // SAFETY: the tensors live as long as this function.
            support::assert_ok(unsafe { vwd_attention(session.raw(), &call, null_mut()) });
        });
    }

    fn attend_all(&self, session: &support::Session, wanted: &[String], groups: &[usize], rows: &[usize]) {
        for bytes in [CACHE, MEMORY] {
            for (dim, &rows, &group) in
                [64, 128].into_iter().flat_map(|d| rows.iter().flat_map(move |r| groups.iter().map(move |g| (d, r, g))))
            {
                self.attend(session, wanted, Shape { dim, group, rows, bytes });
            }
        }
    }
}

/// As many tokens as float16 has in so many bytes, all coded in INT4 in blocks of [`PAGE`] tokens.
fn attend_int4(session: &support::Session, wanted: &[String], Shape { dim, group, rows, bytes }: Shape) {
    let place = if bytes == MEMORY { "memory" } else { "cache" };
    let name = format!("int4 D={dim} G={group} Q={rows} {place}");
    if !wanted.iter().all(|part| name.contains(part)) {
        return;
    }
    let kv_heads = if bytes == MEMORY { 8 } else { 1 };
    let tokens = bytes / (2 * kv_heads * dim * size_of::<f16>());
    let (pages, heads) = (tokens / PAGE, kv_heads * group);
    let codes: [Vec<u8>; 2] = std::array::from_fn(|_| values(tokens * kv_heads * dim / 2, |x| (x * 128.0) as i8 as u8));
    // The codes of 0.1 … 0.4.
    let scales: [Vec<u8>; 2] = std::array::from_fn(|_| values(tokens * kv_heads, |x| (0x24 as f32 + 8.0 * x) as u8));
    let means = values(pages * kv_heads * dim, f16::from_f32);
    let (q, out) = (values(rows * heads * dim, f16::from_f32), values(rows * heads * dim, f16::from_f32));
    let (table, lens): (Vec<i32>, _) = ((0..pages as i32).collect(), [tokens as i32]);
    let (exact, absent) = (vec![f16::ZERO; PAGE * kv_heads * dim], vec![-1; pages]);
    let pool = |data: &[u8]| {
        let strides = [kv_heads * PAGE * dim / 2, dim / 2, PAGE * dim / 2, 1];
        strided(data, 1, &[pages, PAGE, kv_heads, dim / 2], &strides)
    };
    let of_tokens = |data: &[u8]| strided(data, 10, &[pages, PAGE, kv_heads], &[kv_heads * PAGE, 1, PAGE]);
    let of_rows = |data: &[f16]| packed(data, 2, &[1, rows, heads, dim]);
    let table = packed(&table, 0, &[1, pages]);
    let int4 = vwd_int4_kv {
        block_size: PAGE as u32,
        k: pool(&codes[0]),
        v: pool(&codes[1]),
        k_scale: of_tokens(&scales[0]),
        v_scale: of_tokens(&scales[1]),
        page_table: table,
        coded_lens: packed(&lens, 0, &[1]),
        means: strided(&means, 2, &[pages, 1, kv_heads, dim], &[kv_heads * dim, kv_heads * dim, dim, 1]),
        mean_table: table,
        ..args()
    };
    let exact = strided(&exact, 2, &[1, PAGE, kv_heads, dim], &[kv_heads * PAGE * dim, dim, PAGE * dim, 1]);
    let kv = vwd_paged_kv {
        k: exact,
        v: exact,
        page_table: packed(&absent, 0, &[1, pages]),
        seq_lens: packed(&lens, 0, &[1]),
        int4: &int4,
        ..args()
    };
    let call = vwd_attention_args { kv: &kv, q: of_rows(&q), out: of_rows(&out), ..args() };
    let flops = 4.0 * (tokens * rows * heads * dim) as f64;
    let read = tokens * kv_heads * (dim + 2) + 2 * means.len();
    report(&name, wanted, flops, read as f64, &mut || {
        // SAFETY: the tensors live as long as this function.
        support::assert_ok(unsafe { vwd_attention(session.raw(), &call, null_mut()) });
    });
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let session = support::Session::cpu(1);
    for (place, bytes) in [("cache", CACHE), ("memory", MEMORY)] {
        let data = values(bytes / 4, f32::to_bits);
        report(&format!("read {place}"), &wanted, 0.0, bytes as f64, &mut || {
            let sums = data.chunks_exact(64).fold([0u32; 64], |sums, w| std::array::from_fn(|i| sums[i] ^ w[i]));
            black_box(sums);
        });
    }
    Element("f16", 2, f16::from_f32).attend_all(&session, &wanted, &[1, 3, 4, 7, 8], &[1, 4, 9]);
    for (bytes, dim) in [CACHE, MEMORY].into_iter().flat_map(|bytes| [64, 128].map(|dim| (bytes, dim))) {
        for (rows, group) in [(1, 1), (1, 4), (1, 8), (4, 4)] {
            attend_int4(&session, &wanted, Shape { dim, group, rows, bytes });
        }
    }
    Element("bf16", 4, bf16::from_f32).attend_all(&session, &wanted, &[1, 4], &[1]);
    Element("f32", 2, |x| x).attend_all(&session, &wanted, &[1, 4], &[1]);
}
