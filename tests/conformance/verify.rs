//! vwd_verify, vwd_pack and vwd_verify_pack.

use crate::Case;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    verify_agrees_with_the_formula,
    verify_handles_every_batch_size,
    verify_handles_long_drafts,
    verify_counts_no_match_for_negative_draft_tokens,
    verify_compares_all_64_bits,
    verify_reads_a_shared_row,
    verify_reads_what_the_call_before_it_wrote,
    pack_agrees_with_the_formula,
    pack_handles_every_batch_size,
    pack_writes_no_row_at_or_past_cap,
    pack_takes_the_keys_and_values_of_32_layers,
    pack_splits_interleaved_keys_and_values,
    pack_takes_many_tensors_of_one_form,
    verify_pack_is_verify_then_pack,
    verify_pack_handles_every_batch_size,
    verify_pack_handles_large_rows,
    verify_pack_handles_plain_tensors_of_every_size,
    verify_pack_packs_what_the_call_before_it_wrote,
];

/// What is promised on the CPU alone.
pub const ON_THE_CPU: &[Case] = cases![pack_looks_for_no_row_in_tensors_without_elements];

const BATCHES: [usize; 9] = [0, 1, 31, 32, 33, 1023, 1024, 1025, 4096];

// --- verify ----------------------------------------------------------------------------------------------------------

/// Drafts that mostly agree with the target, with the odd negative token on either side.
struct Tokens {
    draft: Array<i64>,
    target: Array<i64>,
    lens: Option<Array<i64>>,
}

impl Tokens {
    fn random(rng: &mut Rng, batch: usize, gamma: usize) -> Tokens {
        let acceptance = rng.pick(&[0.0, 0.3, 0.6, 0.9, 0.99, 1.0]);
        let target = Array::from_fn(&[batch, gamma + 1], |_| rng.int(0..=50_000));
        let draft = Array::from_fn(&[batch, gamma], |at| match target[[at[0], at[1]]] {
            _ if rng.one_in(200) => -rng.int(1..=3),
            token if rng.unit() < acceptance => token,
            token => token + rng.int(-1..=1),
        });
        let lens = rng.one_in(2).then(|| Array::from_fn(&[batch], |_| rng.int(-2..=gamma as i64 + 3)));
        Tokens { draft, target, lens }
    }

    fn expected(&self) -> oracle::Verified {
        oracle::verify(&self.draft, &self.target, self.lens.as_ref().map(|lens| lens.data.as_slice()))
    }
}

/// The tensors of one call of vwd_verify; optional outputs at random.
struct Verify<'b> {
    draft: Tensor<'b>,
    target: Tensor<'b>,
    lens: Option<Tensor<'b>>,
    accepted: Tensor<'b>,
    next_token: Tensor<'b>,
    mismatch: Option<Tensor<'b>>,
    committed: Option<Tensor<'b>>,
}

/// Gives a tensor of some rank a layout.
type AnyLayout = fn(&mut Rng, usize) -> Layout;

fn plain(_: &mut Rng, _: usize) -> Layout {
    Layout::default()
}

impl<'b> Verify<'b> {
    fn place(backend: &'b Backend, rng: &mut Rng, tokens: &Tokens, layout: AnyLayout) -> Verify<'b> {
        let dtype = rng.pick(&[I32, I64]);
        let (batch, gamma) = (tokens.draft.shape[0], tokens.draft.shape[1]);
        Verify {
            draft: Tensor::ints(backend, dtype, &tokens.draft, &layout(rng, 2)),
            target: Tensor::ints(backend, dtype, &tokens.target, &layout(rng, 2)),
            lens: tokens.lens.as_ref().map(|lens| Tensor::ints(backend, I32, lens, &layout(rng, 1))),
            accepted: Tensor::poisoned(backend, I32, &[batch], &layout(rng, 1)),
            next_token: Tensor::poisoned(backend, dtype, &[batch], &layout(rng, 1)),
            mismatch: rng
                .one_in(2)
                .then(|| Tensor::poisoned(backend, rng.pick(&[I32, U8, BOOL]), &[batch], &layout(rng, 1))),
            committed: rng.one_in(2).then(|| Tensor::poisoned(backend, dtype, &[batch, gamma + 1], &layout(rng, 2))),
        }
    }

    fn args(&self) -> vwd_verify_args {
        vwd_verify_args {
            draft: self.draft.c(),
            target: self.target.c(),
            draft_lens: given(&self.lens),
            accepted: self.accepted.c(),
            next_token: self.next_token.c(),
            mismatch: given(&self.mismatch),
            committed: given(&self.committed),
            ..args()
        }
    }

    fn check(&self, expected: &oracle::Verified) {
        assert_eq!(self.accepted.read_ints().data, expected.accepted, "accepted");
        assert_eq!(self.next_token.read_ints().data, expected.next_token, "next_token");
        self.accepted.assert_written("accepted", |_| true);
        self.next_token.assert_written("next_token", |_| true);
        if let Some(mismatch) = &self.mismatch {
            assert_eq!(mismatch.read_ints().data, expected.mismatch, "mismatch");
            mismatch.assert_written("mismatch", |_| true);
        }
        if let Some(committed) = &self.committed {
            assert_eq!(committed.read_ints(), expected.committed, "committed");
            committed.assert_written("committed", |_| true);
        }
        self.draft.assert_untouched("draft");
        self.target.assert_untouched("target");
    }
}

fn given(tensor: &Option<Tensor>) -> vwd_tensor {
    tensor.as_ref().map_or(absent(), Tensor::c)
}

fn check_verify(backend: &Backend, rng: &mut Rng, tokens: &Tokens) {
    let call = Verify::place(backend, rng, tokens, Layout::random);
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_verify(backend.session(), &call.args(), backend.stream()) });
    call.check(&tokens.expected());
}

fn verify_agrees_with_the_formula(backend: &Backend) {
    rounds(200, |rng| {
        let (batch, gamma) = (rng.size(0..=40), rng.size(0..=20));
        let tokens = Tokens::random(rng, batch, gamma);
        check_verify(backend, rng, &tokens);
    });
}

fn verify_handles_every_batch_size(backend: &Backend) {
    rounds(1, |rng| {
        for batch in BATCHES {
            for gamma in [0, 1, 8, 33] {
                let tokens = Tokens::random(rng, batch, gamma);
                check_verify(backend, rng, &tokens);
            }
        }
    });
}

fn verify_handles_long_drafts(backend: &Backend) {
    rounds(6, |rng| {
        let (batch, gamma) = (rng.size(1..=70), rng.pick(&[127, 128, 129, 255, 1023, 1024]));
        let mut tokens = Tokens::random(rng, batch, gamma);
        // One row that agrees to its end.
        for j in 0..gamma {
            tokens.draft[[0, j]] = tokens.target[[0, j]];
        }
        check_verify(backend, rng, &tokens);
    });
}

fn verify_counts_no_match_for_negative_draft_tokens(backend: &Backend) {
    rounds(10, |rng| {
        let (batch, gamma) = (rng.size(1..=5), rng.size(1..=40));
        let mut tokens = Tokens::random(rng, batch, gamma);
        for i in 0..batch {
            let at = rng.size(0..=gamma - 1);
            tokens.draft[[i, at]] = rng.pick(&[-1, -2, i32::MIN as i64]);
            tokens.target[[i, at]] = tokens.draft[[i, at]];
        }
        check_verify(backend, rng, &tokens);
    });
}

fn verify_compares_all_64_bits(backend: &Backend) {
    let target = Array::new(&[1, 3], vec![5 << 32 | 7, i64::MAX, 9]);
    let draft = Array::new(&[1, 2], vec![5 << 32 | 7, i64::MAX - (1 << 32)]);
    let (draft, target) = (plain_ints(backend, I64, &draft), plain_ints(backend, I64, &target));
    let accepted = Tensor::poisoned(backend, I32, &[1], &Layout::default());
    let next_token = Tensor::poisoned(backend, I64, &[1], &Layout::default());
    let args = vwd_verify_args {
        draft: draft.c(),
        target: target.c(),
        accepted: accepted.c(),
        next_token: next_token.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_verify(backend.session(), &args, backend.stream()) });
    assert_eq!(accepted.read_ints().data, [1]);
    assert_eq!(next_token.read_ints().data, [i64::MAX]);
}

/// One target row for every sequence: stride 0.
fn verify_reads_a_shared_row(backend: &Backend) {
    rounds(5, |rng| {
        let mut tokens = Tokens::random(rng, 50, 9);
        for i in 0..50 {
            for j in 0..10 {
                tokens.target[[i, j]] = tokens.target[[0, j]];
            }
            tokens.draft[[i, 0]] = tokens.target[[0, 0]];
        }
        let mut call = Verify::place(backend, rng, &tokens, Layout::random);
        let shared = Layout { expanded: vec![0], ..Layout::default() };
        call.target = Tensor::ints(backend, call.draft.dtype, &tokens.target, &shared);
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_verify(backend.session(), &call.args(), backend.stream()) });
        call.check(&tokens.expected());
    });
}

fn plain_ints<'b>(backend: &'b Backend, dtype: DType, values: &Array<i64>) -> Tensor<'b> {
    Tensor::ints(backend, dtype, values, &Layout::default())
}

/// What one call accepts are the draft lengths of the next, with nothing that waits between them.
fn verify_reads_what_the_call_before_it_wrote(backend: &Backend) {
    for variant in ["common", "general", "long", "rows"] {
        let backend = backend.forcing(&format!("verify={variant}"), 80..=999).expect("every device takes them");
        rounds(1, |rng| {
            let (batch, gamma, plain) = (300, 8, Layout::default());
            let tokens = Tokens { lens: None, ..Tokens::random(rng, batch, gamma) };
            let place = |values: &Array<i64>| Tensor::ints(&backend, I32, values, &plain);
            let (draft, target) = (place(&tokens.draft), place(&tokens.target));
            let out = || Tensor::poisoned(&backend, I32, &[batch], &plain);
            let results = [0, 1].map(|_| (out(), out(), out()));
            let mut lens = absent();
            for (accepted, next_token, mismatch) in &results {
                let args = vwd_verify_args {
                    draft: draft.c(),
                    target: target.c(),
                    draft_lens: lens,
                    accepted: accepted.c(),
                    next_token: next_token.c(),
                    mismatch: mismatch.c(),
                    ..args()
                };
                // SAFETY: the tensors outlive the calls.
                assert_ok(unsafe { vwd_verify(backend.session(), &args, backend.stream()) });
                lens = accepted.c();
            }
            backend.finish(0);
            let accepted = results[0].0.read_ints();
            assert_eq!(accepted.data, tokens.expected().accepted);
            assert_eq!(results[1].0.read_ints(), accepted);
            assert_eq!(results[1].2.read_ints(), Array::filled(&[batch], 0), "nothing is refused within these lengths");
        });
    }
}

// --- pack ------------------------------------------------------------------------------------------------------------

/// A tensor to pack and where to.
pub struct Pair<'b> {
    pub rows: Tensor<'b>,
    pub packed: Tensor<'b>,
}

impl<'b> Pair<'b> {
    /// Random contents, dtype and layout; `tail` is what a row holds.
    pub fn random(backend: &'b Backend, rng: &mut Rng, [batch, gamma, cap]: [usize; 3], tail: &[usize]) -> Pair<'b> {
        let bits = rng.pick(&[8, 8, 16, 16, 32, 64, 24, 128]);
        let dtype = DType { code: rng.pick(&[0, 1, 2]), bits };
        let shape = [&[batch, gamma], tail].concat();
        let bytes = rng.bytes(shape.iter().product::<usize>() * dtype.bytes());
        let (from, to) = (Layout::random(rng, shape.len()), Layout::random(rng, shape.len() - 1));
        let rows = Tensor::raw(backend, dtype, &shape, &bytes, &from);
        Pair { rows, packed: Tensor::poisoned(backend, dtype, &[&[cap], tail].concat(), &to) }
    }

    pub fn check(&self, origin: &[(usize, usize)]) {
        let (rows, packed) = (self.rows.read_raw(), self.packed.read_raw());
        for (r, &(i, t)) in origin.iter().enumerate().take(packed.shape[0]) {
            assert!(packed.row([r]) == rows.row([i, t]), "packed row {r} is row {t} of sequence {i}");
        }
        self.packed.assert_written("packed", |at| at[0] < origin.len());
        self.rows.assert_untouched("rows");
    }
}

fn check_pack(backend: &Backend, rng: &mut Rng, pairs: &[Pair], accepted: &Array<i64>) {
    let (batch, gamma) = (pairs[0].rows.shape[0], pairs[0].rows.shape[1]);
    let offsets = Tensor::poisoned(backend, rng.pick(&[I32, I64]), &[batch + 1], &Layout::random(rng, 1));
    let counts = Tensor::ints(backend, I32, accepted, &Layout::random(rng, 1));
    let rows: Vec<vwd_tensor> = pairs.iter().map(|pair| pair.rows.c()).collect();
    let packed: Vec<vwd_tensor> = pairs.iter().map(|pair| pair.packed.c()).collect();
    let args = vwd_pack_args {
        tensor_count: pairs.len() as u32,
        rows: rows.as_ptr(),
        packed: packed.as_ptr(),
        accepted: counts.c(),
        offsets: offsets.c(),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_pack(backend.session(), &args, backend.stream()) });
    let (expected, origin) = oracle::pack(&accepted.data, gamma);
    assert_eq!(offsets.read_ints().data, expected, "offsets");
    offsets.assert_written("offsets", |_| true);
    counts.assert_untouched("accepted");
    pairs.iter().for_each(|pair| pair.check(&origin));
}

fn random_counts(rng: &mut Rng, batch: usize, gamma: usize) -> Array<i64> {
    Array::from_fn(&[batch], |_| rng.int(-1..=gamma as i64 + 1))
}

fn random_tail(rng: &mut Rng) -> Vec<usize> {
    (0..rng.size(0..=3)).map(|_| rng.pick(&[1, 1, 2, 3, 5, 8, 16])).collect()
}

fn pack_agrees_with_the_formula(backend: &Backend) {
    rounds(150, |rng| {
        let (batch, gamma) = (rng.size(0..=20), rng.size(0..=9));
        let counts = random_counts(rng, batch, gamma);
        let total = oracle::pack(&counts.data, gamma).1.len();
        let cap = rng.pick(&[total, batch * gamma, total + 3, total / 2]);
        let pairs: Vec<Pair> = (0..rng.size(1..=4))
            .map(|_| {
                let tail = random_tail(rng);
                Pair::random(backend, rng, [batch, gamma, cap], &tail)
            })
            .collect();
        check_pack(backend, rng, &pairs, &counts);
    });
}

fn pack_handles_every_batch_size(backend: &Backend) {
    rounds(1, |rng| {
        for batch in BATCHES {
            let gamma = rng.size(1..=5);
            let counts = random_counts(rng, batch, gamma);
            let pairs = [Pair::random(backend, rng, [batch, gamma, batch * gamma], &[7])];
            check_pack(backend, rng, &pairs, &counts);
        }
    });
}

fn pack_writes_no_row_at_or_past_cap(backend: &Backend) {
    rounds(5, |rng| {
        let counts = Array::filled(&[40], 6);
        let pairs = [0, 1, 100].map(|cap| Pair::random(backend, rng, [40, 6, cap], &[2, 8]));
        check_pack(backend, rng, &pairs, &counts);
    });
}

fn pack_takes_the_keys_and_values_of_32_layers(backend: &Backend) {
    rounds(2, |rng| {
        let (batch, gamma) = (3, 9);
        let counts = random_counts(rng, batch, gamma);
        let pairs: Vec<Pair> =
            (0..64).map(|_| Pair::random(backend, rng, [batch, gamma, batch * gamma], &[2, 16])).collect();
        check_pack(backend, rng, &pairs, &counts);
    });
}

fn pack_looks_for_no_row_in_tensors_without_elements(backend: &Backend) {
    let accepted = plain_ints(backend, I32, &Array::filled(&[3], 2));
    let offsets = Tensor::poisoned(backend, I32, &[4], &Layout::default());
    let element = accepted.c().data;
    // Rows without elements; rows of one element that stands for all, of which none is kept.
    for (rows, packed) in [([3, 2, 0], [4, 0]), ([3, 2, 1 << 56], [0, 1 << 56])] {
        let mut rows = vwd_tensor { data: element, ..boundless(F32, &rows) };
        let mut packed = boundless(F32, &packed);
        // Where there is nothing, not even an address could be computed.
        if rows.shape[2] == 0 {
            rows.strides[0] = 1 << 61;
        }
        packed.strides[0] = 1 << 61;
        let args = vwd_pack_args {
            tensor_count: 1,
            rows: &rows,
            packed: &packed,
            accepted: accepted.c(),
            offsets: offsets.c(),
            ..args()
        };
        // SAFETY: everything is alive during the call.
        assert_ok(unsafe { vwd_pack(backend.session(), &args, backend.stream()) });
        assert_eq!(offsets.read_ints().data, [0, 2, 4, 6]);
    }
}

/// K and V are halves of each row of one buffer, on both sides.
fn pack_splits_interleaved_keys_and_values(backend: &Backend) {
    rounds(5, |rng| {
        let (batch, gamma, dim) = (rng.size(1..=9), rng.size(1..=9), rng.pick(&[8, 24, 64]));
        let counts = random_counts(rng, batch, gamma);
        let bytes = rng.bytes(batch * gamma * 2 * dim * 2);
        let rows = Tensor::raw(backend, F16, &[batch, gamma, 2, dim], &bytes, &Layout::default());
        let packed = Tensor::poisoned(backend, F16, &[batch * gamma, 2, dim], &Layout::default());
        let origin = oracle::pack(&counts.data, gamma).1;
        let pairs = [0, 1].map(|half| Pair { rows: rows.part(2, half), packed: packed.part(1, half) });
        let offsets = Tensor::poisoned(backend, I32, &[batch + 1], &Layout::default());
        let accepted = plain_ints(backend, I32, &counts);
        let args = vwd_pack_args {
            tensor_count: 2,
            rows: [pairs[0].rows.c(), pairs[1].rows.c()].as_ptr(),
            packed: [pairs[0].packed.c(), pairs[1].packed.c()].as_ptr(),
            accepted: accepted.c(),
            offsets: offsets.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_pack(backend.session(), &args, backend.stream()) });
        Pair { rows, packed }.check(&origin);
    });
}

/// Columns of one buffer, in any order: tensors that differ in nothing but their addresses, which are aligned differently.
fn pack_takes_many_tensors_of_one_form(backend: &Backend) {
    rounds(10, |rng| {
        let (batch, gamma) = (rng.size(1..=9), rng.size(1..=9));
        let counts = random_counts(rng, batch, gamma);
        let (expected, origin) = oracle::pack(&counts.data, gamma);
        let cap = rng.pick(&[batch * gamma, batch * gamma / 2]);
        let wholes = [rng.size(1..=60), 1, rng.size(1..=120)].map(|columns| {
            let dim = rng.pick(&[1, 2, 3, 4, 8]);
            let bytes = rng.bytes(batch * gamma * columns * dim * 2);
            let rows = Tensor::raw(backend, F16, &[batch, gamma, columns, dim], &bytes, &Layout::default());
            Pair { rows, packed: Tensor::poisoned(backend, F16, &[cap, columns, dim], &Layout::default()) }
        });
        let (mut rows, mut packed) = (vec![], vec![]);
        for whole in &wholes {
            let mut columns: Vec<usize> = (0..whole.rows.shape[2]).collect();
            rng.shuffle(&mut columns);
            rows.extend(columns.iter().map(|&n| whole.rows.part(2, n).c()));
            packed.extend(columns.iter().map(|&n| whole.packed.part(1, n).c()));
        }
        let offsets = Tensor::poisoned(backend, I32, &[batch + 1], &Layout::default());
        let accepted = plain_ints(backend, I32, &counts);
        let args = vwd_pack_args {
            tensor_count: rows.len() as u32,
            rows: rows.as_ptr(),
            packed: packed.as_ptr(),
            accepted: accepted.c(),
            offsets: offsets.c(),
            ..args()
        };
        // SAFETY: the tensors outlive the call.
        backend.finish(unsafe { vwd_pack(backend.session(), &args, backend.stream()) });
        assert_eq!(offsets.read_ints().data, expected, "offsets");
        wholes.iter().for_each(|whole| whole.check(&origin));
    });
}

// --- both ------------------------------------------------------------------------------------------------------------

fn check_verify_pack(backend: &Backend, rng: &mut Rng, tokens: &Tokens, layout: AnyLayout, pairs: &[Pair]) {
    let call = Verify::place(backend, rng, tokens, layout);
    let offsets = verify_pack(backend, rng, &call.args(), layout, pairs);
    let verified = tokens.expected();
    call.check(&verified);
    check_packed(&offsets, &verified.accepted, tokens.draft.shape[1], pairs);
}

/// Calls vwd_verify_pack with the tensors of a verification and of its end; returns the offsets.
pub fn verify_pack<'b>(
    backend: &'b Backend,
    rng: &mut Rng,
    verify: &vwd_verify_args,
    layout: AnyLayout,
    pairs: &[Pair],
) -> Tensor<'b> {
    let batch = verify.accepted.shape[0] as usize;
    let offsets = Tensor::poisoned(backend, rng.pick(&[I32, I64]), &[batch + 1], &layout(rng, 1));
    let rows: Vec<vwd_tensor> = pairs.iter().map(|pair| pair.rows.c()).collect();
    let packed: Vec<vwd_tensor> = pairs.iter().map(|pair| pair.packed.c()).collect();
    let args = vwd_verify_pack_args {
        tensor_count: pairs.len() as u32,
        rows: rows.as_ptr(),
        packed: packed.as_ptr(),
        draft: verify.draft,
        target: verify.target,
        draft_lens: verify.draft_lens,
        accepted: verify.accepted,
        next_token: verify.next_token,
        offsets: offsets.c(),
        mismatch: verify.mismatch,
        committed: verify.committed,
        stop: verify.stop,
        ignore_stop: verify.ignore_stop,
        remaining: verify.remaining,
        min_remaining: verify.min_remaining,
        committed_len: verify.committed_len,
        finish: verify.finish,
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_verify_pack(backend.session(), &args, backend.stream()) });
    offsets
}

/// The offsets, and the packed rows of each pair, follow from how many tokens of each draft were accepted.
pub fn check_packed(offsets: &Tensor, accepted: &[i64], gamma: usize, pairs: &[Pair]) {
    let (expected, origin) = oracle::pack(accepted, gamma);
    assert_eq!(offsets.read_ints().data, expected, "offsets");
    offsets.assert_written("offsets", |_| true);
    pairs.iter().for_each(|pair| pair.check(&origin));
}

fn verify_pack_is_verify_then_pack(backend: &Backend) {
    rounds(100, |rng| {
        let (batch, gamma) = (rng.size(0..=40), rng.size(0..=12));
        let tokens = Tokens::random(rng, batch, gamma);
        let cap = rng.pick(&[batch * gamma, batch * gamma / 3]);
        let pairs: Vec<Pair> = (0..rng.size(1..=4))
            .map(|_| {
                let tail = random_tail(rng);
                Pair::random(backend, rng, [batch, gamma, cap], &tail)
            })
            .collect();
        check_verify_pack(backend, rng, &tokens, Layout::random, &pairs);
    });
}

fn verify_pack_handles_every_batch_size(backend: &Backend) {
    rounds(1, |rng| {
        for batch in BATCHES {
            let gamma = rng.size(1..=5);
            let tokens = Tokens::random(rng, batch, gamma);
            let pairs = [Pair::random(backend, rng, [batch, gamma, batch * gamma], &[3])];
            check_verify_pack(backend, rng, &tokens, Layout::random, &pairs);
        }
    });
}

/// Enough bytes that the copy is shared by many threads, and by many multiprocessors.
fn verify_pack_handles_large_rows(backend: &Backend) {
    rounds(2, |rng| {
        let (batch, gamma, width) = (rng.size(4..=9), rng.size(20..=40), 2048);
        let tokens = Tokens::random(rng, batch, gamma);
        let bytes = rng.bytes(batch * gamma * width * 2);
        let pair = Pair {
            rows: Tensor::raw(backend, BF16, &[batch, gamma, width], &bytes, &Layout::default()),
            packed: Tensor::poisoned(backend, BF16, &[batch * gamma, width], &Layout::default()),
        };
        check_verify_pack(backend, rng, &tokens, Layout::random, &[pair]);
    });
}

/// Contiguous tensors of 16-byte units, as engines have them: kernels of their own, and every way to share the work.
fn verify_pack_handles_plain_tensors_of_every_size(backend: &Backend) {
    const MOST_TOKENS: usize = 40_000;
    // Sizes choose among kernels; on the CPU there is one way.
    rounds(if backend.is_cuda() { 60 } else { 20 }, |rng| {
        let gamma = rng.pick(&[1, 2, 3, 8, 16, 17, 31, 32, 33, 64, 96, 127, 128, 129]);
        let batches = [1, 2, 15, 16, 17, 32, 33, 100, 128, 129, 257, 512, 1000, 1023, 1024, 1025];
        let batch = rng.pick(&batches).min(MOST_TOKENS / gamma);
        let tokens = Tokens::random(rng, batch, gamma);
        let cap = rng.pick(&[batch * gamma, batch * gamma, batch * gamma / 3 + 1]);
        let pairs: Vec<Pair> = (0..rng.pick(&[1, 1, 2, 3]))
            .map(|_| {
                let width = 8 * rng.pick(&[1, 2, 3, 16, 16, 33]);
                let bytes = rng.bytes(batch * gamma * width * 2);
                let rows = Tensor::raw(backend, BF16, &[batch, gamma, width], &bytes, &Layout::default());
                Pair { rows, packed: Tensor::poisoned(backend, BF16, &[cap, width], &Layout::default()) }
            })
            .collect();
        check_verify_pack(backend, rng, &tokens, plain, &pairs);
    });
}

/// Rows are packed by one call and verified and packed by the next, with nothing that waits between them: kernels that start early ask for rows.
fn verify_pack_packs_what_the_call_before_it_wrote(backend: &Backend) {
    for variant in ["fused", "two_launches"] {
        let backend = backend.forcing(&format!("verify_pack={variant}"), 80..=999).expect("every device takes them");
        rounds(1, |rng| {
            let (batch, gamma, width, plain) = (5, 8, 4, Layout::default());
            let tokens = Tokens { lens: None, ..Tokens::random(rng, batch, gamma) };
            let place = |values: &Array<i64>| Tensor::ints(&backend, I32, values, &plain);
            let out = |shape: &[usize]| Tensor::poisoned(&backend, I32, shape, &plain);
            let rows = Array::from_fn(&[batch, gamma, width], |_| rng.int(0..=1 << 20));
            let (draft, target, all) =
                (place(&tokens.draft), place(&tokens.target), Array::filled(&[batch], gamma as i64));
            let (first, all, offsets) = (place(&rows), place(&all), [out(&[batch + 1]), out(&[batch + 1])]);
            let (between, last) = (out(&[batch * gamma, width]), out(&[batch * gamma, width]));
            let (accepted, next_token) = (out(&[batch]), out(&[batch]));
            let as_rows = vwd_tensor {
                ndim: 3,
                shape: [batch as i64, gamma as i64, width as i64, 0, 0],
                strides: [(gamma * width) as i64, width as i64, 1, 0, 0],
                ..between.c()
            };
            let pack = vwd_pack_args {
                tensor_count: 1,
                rows: &first.c(),
                packed: &between.c(),
                accepted: all.c(),
                offsets: offsets[0].c(),
                ..args()
            };
            let verify = vwd_verify_pack_args {
                tensor_count: 1,
                rows: &as_rows,
                packed: &last.c(),
                draft: draft.c(),
                target: target.c(),
                accepted: accepted.c(),
                next_token: next_token.c(),
                offsets: offsets[1].c(),
                ..args()
            };
            // SAFETY: the tensors outlive the calls.
            unsafe {
                assert_ok(vwd_pack(backend.session(), &pack, backend.stream()));
                backend.finish(vwd_verify_pack(backend.session(), &verify, backend.stream()));
            }
            let (_, origin) = oracle::pack(&tokens.expected().accepted, gamma);
            let packed = last.read_ints();
            for (r, &(i, t)) in origin.iter().enumerate() {
                assert_eq!(packed.row([r]), rows.row([i, t]), "packed row {r} is row {t} of sequence {i}");
            }
        });
    }
}
