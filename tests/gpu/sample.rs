//! Sampling from more logits than 32 bits count.

use crate::Case;
use crate::graph::check;
use crate::support::*;
use cudarc::driver::{result, sys};
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = &[("sample_reads_rows_that_lie_beyond_32_bits", sample_reads_rows_that_lie_beyond_32_bits)];

/// Rows of a request.
const ROWS: usize = 8;
/// Requests that are compared.
const COMPARED: usize = 4;

/// Device memory that no copy on the host fills.
struct Large(sys::CUdeviceptr);

impl Large {
    /// All bytes are alike; `None` where less memory is free, with a gigabyte for all else.
    fn new(bytes: usize) -> Option<Large> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current: the backend made it so.
        unsafe {
            check(sys::cuMemGetInfo_v2(&mut free, &mut total));
            if free < bytes + (1 << 30) {
                println!("sample_reads_rows_that_lie_beyond_32_bits: not run, {free} bytes of device memory are free");
                return None;
            }
            let large = Large(result::malloc_sync(bytes).expect("device memory"));
            result::memset_d8_sync(large.0, 0x3c, bytes).expect("filled");
            Some(large)
        }
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        // SAFETY: allocated once; the calls that read it have passed.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// What a call has for each request beside its logits.
struct Requests<'b> {
    draft: Tensor<'b>,
    temperature: Tensor<'b>,
    top_p: Tensor<'b>,
    seeds: Tensor<'b>,
    positions: Tensor<'b>,
    next_token: Tensor<'b>,
    committed: Tensor<'b>,
}

impl<'b> Requests<'b> {
    /// The first request is number `first`.
    fn new(backend: &'b Backend, first: usize, batch: usize, tokens: usize) -> Requests<'b> {
        let plain = Layout::default();
        let ints = |shape: &[usize], of: &dyn Fn(usize, usize) -> usize| {
            let values = Array::from_fn(shape, |at| of(first + at[0], at.get(1).copied().unwrap_or(0)) as i64);
            Tensor::ints(backend, I64, &values, &plain)
        };
        let floats = |of: &dyn Fn(usize) -> f64| {
            Tensor::floats(backend, F32, &Array::from_fn(&[batch], |at| F32.round(of(first + at[0]))), &plain)
        };
        Requests {
            draft: ints(&[batch, ROWS - 1], &|i, r| likely(i, r, tokens)),
            temperature: floats(&|i| [1.0, 0.0, 0.7, 1.3][i % 4]),
            top_p: floats(&|i| [0.9, 1.0, 0.5][i % 3]),
            seeds: ints(&[batch], &|i, _| i * 77 + 5),
            positions: ints(&[batch], &|i, _| i * 3),
            next_token: Tensor::poisoned(backend, I64, &[batch], &plain),
            committed: Tensor::poisoned(backend, I64, &[batch, ROWS], &plain),
        }
    }

    fn sample(&self, backend: &Backend, target: vwd_tensor, rule: u32, filters: bool) -> Array<i64> {
        self.committed.repoison();
        let args = vwd_verify_sample_args {
            rule,
            draft: self.draft.c(),
            target,
            temperature: self.temperature.c(),
            top_p: if filters { self.top_p.c() } else { absent() },
            seeds: self.seeds.c(),
            positions: self.positions.c(),
            next_token: self.next_token.c(),
            committed: self.committed.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify_sample(backend.session(), &args, backend.stream()) });
        self.committed.read_ints()
    }
}

/// The token that row `r` of request `i` prefers.
fn likely(i: usize, r: usize, tokens: usize) -> usize {
    (i * 7919 + r * 104_729) % tokens
}

/// The last requests of all commit what they commit alone: by rows that are drawn from as they are, that are filtered, and by rejection. An
/// emulated device takes fewer, which do not lie so far.
fn sample_reads_rows_that_lie_beyond_32_bits(backend: &Backend) {
    let is_emulated = backend.times(1000) < 1000;
    let (batch, tokens): (usize, usize) = if is_emulated { (9, 4104) } else { (4096 + COMPARED, 131_072) };
    assert!(is_emulated || batch * ROWS * tokens > 1 << 32);
    let (of_request, first) = (ROWS * tokens, batch - COMPARED);
    let Some(large) = Large::new(batch * of_request * 2) else { return };
    let mut rng = Rng::new(1);
    let logits = Array::from_fn(&[COMPARED, ROWS, tokens], |at| {
        let is_likely = at[2] == likely(first + at[0], at[1], tokens);
        BF16.round(if is_likely { 10.0 } else { 2.0 * rng.unit() })
    });
    let few = Tensor::floats(backend, BF16, &logits, &Layout::default());
    let bytes = few.read_memory();
    assert_eq!(bytes.len(), COMPARED * of_request * 2);
    // SAFETY: the last requests are of so many bytes.
    unsafe { result::memcpy_htod_sync(large.0 + (first * of_request * 2) as u64, &bytes) }.expect("upload");
    let [_, rows, numbers, ..] = few.c().shape;
    let all = vwd_tensor { data: large.0 as *mut _, shape: [batch as i64, rows, numbers, 0, 0], ..few.c() };
    let [of_all, alone] = [(0, batch), (first, COMPARED)].map(|(first, n)| Requests::new(backend, first, n, tokens));
    for (rule, filters) in [
        (VWD_ACCEPT_COUPLED, false),
        (VWD_ACCEPT_COUPLED, true),
        (VWD_ACCEPT_REJECTION, false),
        (VWD_ACCEPT_REJECTION, true),
    ] {
        let found = of_all.sample(backend, all, rule, filters);
        let want = alone.sample(backend, few.c(), rule, filters);
        for n in 0..COMPARED {
            assert_eq!(
                found.row([first + n]),
                want.row([n]),
                "request {} by rule {rule}, filters {filters}",
                first + n
            );
        }
        assert!(want.data.iter().filter(|&&token| token >= 0).count() > COMPARED, "no draft is accepted");
    }
}
