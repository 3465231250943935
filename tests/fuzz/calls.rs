//! Calls over tensors of tokens, rows, scores and blocks, described so that they are accepted; `case` has the words.

use crate::case::{Case, Place, Role, of};
use crate::content::Content;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const FLOATS: [DType; 3] = [F32, F16, BF16];

// --- verify and pack -------------------------------------------------------------------------------------------------

/// What ends a request.
macro_rules! end {
    ($case:ident, $args:ident, $Args:ty, $batch:expr, $gamma:expr) => {
        let (stops, dtype) = ($case.extent(0..=3), $case.rng.pick(&[I32, I64]));
        $case.maybe_input(of!($args, $Args, stop), dtype, &[stops], Content::Tokens);
        $case.maybe_input(of!($args, $Args, ignore_stop), U8, &[$batch], Content::Bytes);
        $case.maybe_input(of!($args, $Args, remaining), I32, &[$batch], Content::Counts($gamma.saturating_add(2)));
        $case.maybe_input(of!($args, $Args, min_remaining), I32, &[$batch], Content::Counts($gamma));
        $case.maybe_output(of!($args, $Args, committed_len), I32, &[$batch]);
        $case.maybe_output(of!($args, $Args, finish), U8, &[$batch]);
    };
}

pub fn verify(case: &mut Case) {
    type Args = vwd_verify_args;
    let args = case.call::<Args>(vwd_verify);
    let fields = [of!(args, Args, draft), of!(args, Args, target), of!(args, Args, draft_lens)];
    let results = [of!(args, Args, next_token), of!(args, Args, mismatch), of!(args, Args, committed)];
    let (batch, gamma) = tokens(case, fields, results);
    case.output(of!(args, Args, accepted), I32, &[batch]);
    end!(case, args, Args, batch, gamma);
}

/// Drafts one after the other.
pub fn verify_flat(case: &mut Case) {
    type Args = vwd_verify_args;
    let args = case.call::<Args>(vwd_verify);
    let (batch, tokens, places) = (case.extent(1..=9), case.extent(0..=30), case.rng.size(1..=6) as i64);
    let (dtype, flag) = (case.rng.pick(&[I32, I64]), case.rng.pick(&[I32, U8, BOOL]));
    case.input(of!(args, Args, draft), dtype, &[tokens], Content::Tokens);
    case.input(of!(args, Args, target), dtype, &[tokens], Content::Tokens);
    case.input(of!(args, Args, draft_ends), I32, &[batch], Content::Counts(tokens));
    case.input(of!(args, Args, bonus), dtype, &[batch], Content::Tokens);
    case.output(of!(args, Args, accepted), I32, &[batch]);
    case.output(of!(args, Args, next_token), dtype, &[batch]);
    case.maybe_output(of!(args, Args, mismatch), flag, &[batch]);
    case.maybe_output(of!(args, Args, committed), dtype, &[batch, places]);
    end!(case, args, Args, batch, places - 1);
}

/// What verification reads and, but for accepted, writes: B and γ.
fn tokens(case: &mut Case, fields: [Place; 3], results: [Place; 3]) -> (i64, i64) {
    let most = case.rng.pick(&[4, 4, 4, 300]);
    let (batch, gamma) = (case.extent(1..=most), case.extent(0..=8));
    let (dtype, after) = (case.rng.pick(&[I32, I64]), gamma.saturating_add(1));
    let [draft, target, draft_lens] = fields;
    case.input(draft, dtype, &[batch, gamma], Content::Tokens);
    case.input(target, dtype, &[batch, after], Content::Tokens);
    case.maybe_input(draft_lens, I32, &[batch], Content::Counts(gamma));
    let [next_token, mismatch, committed] = results;
    case.output(next_token, dtype, &[batch]);
    let flag = case.rng.pick(&[I32, U8, BOOL]);
    case.maybe_output(mismatch, flag, &[batch]);
    case.maybe_output(committed, dtype, &[batch, after]);
    (batch, gamma)
}

pub fn pack(case: &mut Case) {
    type Args = vwd_pack_args;
    let args = case.call::<Args>(vwd_pack);
    let (batch, gamma) = (case.extent(1..=5), case.extent(0..=6));
    let arrays = [of!(args, Args, tensor_count), of!(args, Args, rows), of!(args, Args, packed)];
    rows(case, arrays, of!(args, Args, offsets), batch, gamma);
    case.input(of!(args, Args, accepted), I32, &[batch], Content::Counts(gamma));
}

/// The pairs of rows and packed, and the offsets.
fn rows(case: &mut Case, [count, rows, packed]: [Place; 3], offsets: Place, batch: i64, gamma: i64) {
    let pairs = case.rng.size(1..=4);
    case.length(count, pairs, 256);
    let rows = case.array::<vwd_tensor>(rows, pairs);
    let packed = case.array::<vwd_tensor>(packed, pairs);
    for (rows, packed) in rows.into_iter().zip(packed) {
        let (code, bits) = case.rng.pick(&[(2, 16), (2, 32), (1, 8), (0, 64), (4, 16), (10, 8), (2, 24), (5, 128)]);
        let dtype = DType { code, bits };
        let longest = case.rng.pick(&[3, 3, 40]);
        let inner: Vec<i64> = (0..case.rng.size(0..=3)).map(|_| case.extent(1..=longest)).collect();
        case.input(rows, dtype, &[&[batch, gamma], &inner[..]].concat(), Content::Bytes);
        let cap = case.extent(0..=24);
        case.output(packed, dtype, &[&[cap], &inner[..]].concat());
    }
    let dtype = case.rng.pick(&[I32, I64]);
    case.output(offsets, dtype, &[batch.saturating_add(1)]);
}

pub fn verify_pack(case: &mut Case) {
    type Args = vwd_verify_pack_args;
    let args = case.call::<Args>(vwd_verify_pack);
    let fields = [of!(args, Args, draft), of!(args, Args, target), of!(args, Args, draft_lens)];
    let results = [of!(args, Args, next_token), of!(args, Args, mismatch), of!(args, Args, committed)];
    let (batch, gamma) = tokens(case, fields, results);
    case.output(of!(args, Args, accepted), I32, &[batch]);
    end!(case, args, Args, batch, gamma);
    let arrays = [of!(args, Args, tensor_count), of!(args, Args, rows), of!(args, Args, packed)];
    rows(case, arrays, of!(args, Args, offsets), batch, gamma);
}

pub fn verify_sample(case: &mut Case) {
    type Args = vwd_verify_sample_args;
    let args = case.call_with_scratch::<Args>(vwd_verify_sample, vwd_verify_sample_scratch);
    let (batch, gamma) = (case.extent(1..=4), case.rng.size(0..=5) as i64);
    let tokens = case.rng.pick(&[1, 9, 70, 4200]);
    let dtype = case.rng.pick(&[I32, I64]);
    let rule = case.rng.size(0..=3) as u32;
    case.number(of!(args, Args, rule), rule);
    let flags = case.rng.size(0..=7) as u32;
    case.number(of!(args, Args, flags), flags);
    case.input(of!(args, Args, draft), dtype, &[batch, gamma], Content::Tokens);
    case.maybe_input(of!(args, Args, draft_lens), I32, &[batch], Content::Counts(gamma));
    let logits = case.rng.pick(&FLOATS);
    if case.rng.one_in(3) {
        let rows = batch.saturating_mul(gamma + 1);
        case.input(of!(args, Args, target), logits, &[rows, tokens], Content::Floats);
        case.input(of!(args, Args, target_begin), dtype, &[batch], Content::Indices(rows));
    } else {
        case.input(of!(args, Args, target), logits, &[batch, gamma + 1, tokens], Content::Floats);
    }
    sampling_rows(case, of!(args, Args, draft_rows), of!(args, Args, draft_map), [batch, gamma, tokens]);
    for field in [of!(args, Args, temperature), of!(args, Args, top_p), of!(args, Args, min_p)] {
        case.maybe_input(field, F32, &[batch], Content::Floats);
    }
    case.maybe_input(of!(args, Args, top_k), I32, &[batch], Content::Counts(tokens));
    case.input(of!(args, Args, seeds), I64, &[batch], Content::Bytes);
    case.input(of!(args, Args, positions), dtype, &[batch], Content::Counts(1 << 20));
    end!(case, args, Args, batch, gamma);
    case.output(of!(args, Args, next_token), dtype, &[batch]);
    case.maybe_output(of!(args, Args, accepted), I32, &[batch]);
    case.maybe_output(of!(args, Args, committed), dtype, &[batch, gamma + 1]);
    case.maybe_output(of!(args, Args, status), I32, &[batch]);
    case.maybe_output(of!(args, Args, logprobs), F32, &[batch, gamma + 1]);
}

/// Optional rows that drafts were drawn from, [batch, count, Vd], and a map of their columns.
fn sampling_rows(case: &mut Case, rows: Place, map: Place, [batch, count, tokens]: [i64; 3]) {
    let (draft, columns) = (case.rng.pick(&FLOATS), case.rng.size(1..=tokens as usize) as i64);
    let rows = case.input(rows, draft, &[batch, count, columns], Content::Floats);
    let map = case.input(map, I32, &[columns], Content::Ascending(tokens));
    let (has_rows, has_map) = (case.rng.one_in(2), case.rng.one_in(2));
    case.optional(has_rows, rows);
    case.optional(has_rows && has_map, map);
}

// --- draft trees ---------------------------------------------------------------------------------------------------------

pub fn tree_prepare(case: &mut Case, has_parents: bool) {
    type Args = vwd_tree_prepare_args;
    let args = case.call::<Args>(vwd_tree_prepare);
    let most = case.rng.pick(&[6, 6, 80]);
    let (batch, nodes) = (case.extent(1..=4), case.rng.size(1..=most) as i64);
    let (row, content) = ([batch, nodes], Content::Indices(nodes));
    let link = case.rng.pick(&[I32, I64]);
    let parents = case.input(of!(args, Args, parents), I32, &row, content);
    case.optional(has_parents, parents);
    for place in [of!(args, Args, first_child), of!(args, Args, next_sibling)] {
        let chain = case.input(place, link, &row, content);
        case.optional(!has_parents, chain);
    }
    case.maybe_input(of!(args, Args, node_counts), I32, &[batch], Content::Counts(nodes));
    let position = case.rng.pick(&[I32, I64]);
    let has_positions = case.rng.one_in(2);
    let bases = case.input(of!(args, Args, bases), position, &[batch], Content::Counts(1 << 20));
    case.optional(has_positions, bases);
    let positions = case.output(of!(args, Args, positions), position, &row);
    case.optional(has_positions, positions);
    case.output(of!(args, Args, depths), I32, &row);
    case.maybe_output(of!(args, Args, tree_parents), I32, &row);
    case.maybe_output(of!(args, Args, ranks), I32, &row);
    case.maybe_output(of!(args, Args, mask), U32, &[batch, nodes, (nodes + 31) / 32]);
    case.maybe_output(of!(args, Args, status), U32, &[batch]);
}

pub fn verify_tree(case: &mut Case, has_logits: bool) {
    type Args = vwd_verify_tree_args;
    let args = case.call_with_scratch::<Args>(vwd_verify_tree, vwd_verify_tree_scratch);
    let most = case.rng.pick(&[6, 6, 80]);
    let (batch, nodes) = (case.extent(1..=4), case.rng.size(1..=most) as i64);
    let (row, places) = ([batch, nodes], case.rng.size(1..=9) as i64);
    let token = case.rng.pick(&[I32, I64]);
    case.input(of!(args, Args, tokens), token, &row, Content::Tokens);
    case.input(of!(args, Args, parents), I32, &row, Content::Indices(nodes));
    case.maybe_input(of!(args, Args, node_counts), I32, &[batch], Content::Counts(nodes));
    let target = case.input(of!(args, Args, target), token, &row, Content::Tokens);
    case.optional(!has_logits, target);
    let (dtype, tokens) = (case.rng.pick(&FLOATS), case.rng.size(1..=20) as i64);
    let logits = case.input(of!(args, Args, logits), dtype, &[batch, nodes, tokens], Content::Floats);
    case.optional(has_logits, logits);
    case.output(of!(args, Args, accepted), I32, &[batch]);
    case.output(of!(args, Args, path), I32, &[batch, places]);
    case.output(of!(args, Args, next_token), token, &[batch]);
    case.maybe_output(of!(args, Args, committed), token, &[batch, places]);
    case.maybe_output(of!(args, Args, status), U32, &[batch]);
    end!(case, args, Args, batch, places);
}

pub fn sampled_tree(case: &mut Case) {
    type Args = vwd_verify_tree_args;
    let args = case.call_with_scratch::<Args>(vwd_verify_tree, vwd_verify_tree_scratch);
    let most = case.rng.pick(&[6, 6, 40]);
    let (batch, nodes) = (case.extent(1..=4), case.rng.size(1..=most) as i64);
    let (row, places) = ([batch, nodes], case.rng.size(1..=9) as i64);
    let (token, tokens) = (case.rng.pick(&[I32, I64]), case.rng.pick(&[1, 9, 70, 4200]));
    let walk = case.rng.size(1..=3) as u32;
    case.number(of!(args, Args, walk), walk);
    let flags = case.rng.size(0..=7) as u32;
    case.number(of!(args, Args, flags), flags);
    case.input(of!(args, Args, tokens), token, &row, Content::Tokens);
    case.input(of!(args, Args, parents), I32, &row, Content::Indices(nodes));
    case.maybe_input(of!(args, Args, node_counts), I32, &[batch], Content::Counts(nodes));
    let dtype = case.rng.pick(&FLOATS);
    case.input(of!(args, Args, logits), dtype, &[batch, nodes, tokens], Content::Floats);
    sampling_rows(case, of!(args, Args, draft_rows), of!(args, Args, draft_map), [batch, nodes, tokens]);
    for field in [of!(args, Args, temperature), of!(args, Args, top_p), of!(args, Args, min_p)] {
        case.maybe_input(field, F32, &[batch], Content::Floats);
    }
    case.maybe_input(of!(args, Args, top_k), I32, &[batch], Content::Counts(tokens));
    case.input(of!(args, Args, seeds), I64, &[batch], Content::Bytes);
    case.input(of!(args, Args, positions), token, &[batch], Content::Counts(1 << 20));
    case.output(of!(args, Args, accepted), I32, &[batch]);
    case.output(of!(args, Args, path), I32, &[batch, places]);
    case.output(of!(args, Args, next_token), token, &[batch]);
    case.maybe_output(of!(args, Args, committed), token, &[batch, places]);
    case.maybe_output(of!(args, Args, status), U32, &[batch]);
}

/// Rows of two caches, whose bytes are the answer.
pub fn compact(case: &mut Case) {
    type Args = vwd_compact_args;
    const PAGES: usize = 6;
    const ROWS: usize = 4;
    let args = case.call_with::<Args>(|session, args| {
        let mut memory: Vec<u16> = (0..2 * PAGES * ROWS * 3).map(|n| n as u16).collect();
        let (rows, columns) = (ROWS as i64, 3);
        let cache = vwd_tensor {
            data: memory.as_mut_ptr().cast(),
            device_type: 1,
            dtype_code: 1,
            dtype_bits: 16,
            ndim: 3,
            shape: [PAGES as i64, rows, columns, 0, 0],
            strides: [2 * rows * columns, columns, 1, 0, 0],
            ..absent()
        };
        let other = vwd_tensor { data: cache.data.wrapping_byte_add(2 * ROWS * 3), ..cache };
        let caches = [cache, other];
        let options = vwd_compactor_options { cache_count: 2, caches: caches.as_ptr(), ..crate::support::args() };
        let mut compactor = std::ptr::null_mut();
        // SAFETY: the caches outlive the compactor; the arguments are what the case describes.
        let status = unsafe {
            assert_ok(vwd_compactor_create(session.raw(), &options, &mut compactor));
            let status = vwd_compact(compactor, args.cast(), std::ptr::null_mut());
            vwd_compactor_release(compactor);
            status
        };
        (status, memory.iter().flat_map(|x| x.to_le_bytes()).collect())
    });
    // Without an output nothing bounds a batch whose sequences are one in memory.
    let (batch, places) = (case.rng.size(1..=4) as i64, case.extent(1..=9));
    case.input(of!(args, Args, path), I32, &[batch, places], Content::Ascending(14));
    let position = case.rng.pick(&[I32, I64]);
    case.input(of!(args, Args, bases), position, &[batch], Content::Counts((PAGES * ROWS) as i64));
    case.maybe_input(of!(args, Args, accepted), I32, &[batch], Content::Counts(places.saturating_sub(1)));
    let max_pages = case.extent(1..=5);
    let table = case.input(of!(args, Args, page_table), I32, &[batch, max_pages], Content::Indices(PAGES as i64));
    let is_given = batch > PAGES as i64 || !case.rng.one_in(4);
    case.optional(is_given, table);
}

// --- top-k ------------------------------------------------------------------------------------------------------------

pub fn topk(case: &mut Case) {
    type Args = vwd_topk_args;
    let args = case.call::<Args>(vwd_topk);
    let longest = case.rng.pick(&[20, 20, 600]);
    let (rows, n, cap) = (case.extent(1..=6), case.extent(0..=longest), case.extent(0..=30));
    let k = case.rng.size(0..=cap.clamp(0, 30) as usize);
    case.number(of!(args, Args, k), k as u32);
    let order = case.rng.pick(&[VWD_TOPK_ASCENDING, VWD_TOPK_BEST_FIRST]);
    case.number(of!(args, Args, order), order);
    let dtype = case.rng.pick(&FLOATS);
    case.input(of!(args, Args, scores), dtype, &[rows, n], Content::Floats);
    case.maybe_input(of!(args, Args, lens), I32, &[rows], Content::Counts(n));
    case.maybe_input(of!(args, Args, budgets), I32, &[rows], Content::Counts(cap));
    case.output(of!(args, Args, ids), I32, &[rows, cap]);
    case.output(of!(args, Args, counts), I32, &[rows]);
    case.maybe_output(of!(args, Args, values), dtype, &[rows, cap]);
}

// --- gather ----------------------------------------------------------------------------------------------------------

pub fn gather_blocks(case: &mut Case) {
    type Args = vwd_gather_blocks_args;
    let args = case.call::<Args>(vwd_gather_blocks);
    let engine = case.rng.pick(&[VWD_GATHER_AUTO, VWD_GATHER_KERNEL, VWD_GATHER_COPY_ENGINE]);
    case.number(of!(args, Args, engine), engine);
    let (code, bits) = case.rng.pick(&[(2, 16), (2, 32), (1, 8), (0, 64), (10, 8), (2, 24), (5, 128)]);
    let (dtype, sources, targets, listed) =
        (DType { code, bits }, case.extent(1..=9), case.extent(1..=9), case.extent(0..=8));
    let longest = case.rng.pick(&[4, 4, 60]);
    let inner: Vec<i64> = (0..case.rng.size(0..=3)).map(|_| case.extent(1..=longest)).collect();
    // One list, or one for each sequence and KV head.
    let (heads, lists) = match case.rng.one_in(2) {
        true => (vec![], vec![]),
        false => (vec![case.extent(1..=3)], vec![case.extent(1..=3)]),
    };
    let lists = [lists, heads.clone()].concat();
    let counts = if lists.is_empty() { &[1][..] } else { &lists };
    let ids = [&lists, &[listed][..]].concat();
    case.input(of!(args, Args, source), dtype, &[&[sources], &heads[..], &inner[..]].concat(), Content::Bytes);
    case.output(of!(args, Args, target), dtype, &[&[targets], &inner[..]].concat());
    case.input(of!(args, Args, source_ids), I32, &ids, Content::Indices(sources));
    case.maybe_input(of!(args, Args, target_ids), I32, &ids, Content::Distinct(targets));
    case.maybe_input(of!(args, Args, count), I32, counts, Content::Counts(listed));
}

// --- predictor -------------------------------------------------------------------------------------------------------

/// The state, and its shape.
fn predictor_state(case: &mut Case, place: Place, role: Role) -> [i64; 3] {
    let most = case.rng.pick(&[12, 12, 400]);
    let shape = [case.extent(1..=4), case.extent(1..=3), case.extent(1..=most)];
    case.tensor(of!(place, vwd_predictor_state, level), role, F32, &shape, Content::Floats);
    case.tensor(of!(place, vwd_predictor_state, trend), role, F32, &shape, Content::Floats);
    shape
}

fn holt(case: &mut Case) -> vwd_holt {
    let mut factor = || case.rng.pick(&[0.0, 0.25, 0.5, 1.0, 1e-30]);
    vwd_holt { alpha: factor(), beta: factor(), gamma: factor() * 2.0 - 1.0 }
}

fn write_holt(case: &mut Case, place: &Place, holt: &vwd_holt) {
    case.real(of!(place, vwd_holt, alpha), holt.alpha);
    case.real(of!(place, vwd_holt, beta), holt.beta);
    case.real(of!(place, vwd_holt, gamma), holt.gamma);
}

pub fn predictor_reset(case: &mut Case) {
    type Args = vwd_predictor_reset_args;
    let args = case.call::<Args>(vwd_predictor_reset);
    let [batch, ..] = predictor_state(case, of!(args, Args, state), Role::InOut);
    let listed = case.extent(0..=6);
    case.maybe_input(of!(args, Args, rows), I32, &[listed], Content::Indices(batch));
}

pub fn predictor_predict(case: &mut Case) {
    type Args = vwd_predictor_predict_args;
    let args = case.call::<Args>(vwd_predictor_predict);
    let [batch, heads, blocks] = predictor_state(case, of!(args, Args, state), Role::In);
    let (cap, size) = (case.extent(3..=12), case.rng.size(1..=16) as u32);
    let ratio: f32 = case.rng.pick(&[0.0, 1.0, 1.25, 1.5]);
    case.number(of!(args, Args, block_size), size);
    let places = cap.clamp(0, 40) as f32 / ratio.max(1.0);
    let k = case.rng.size(0..=places as usize) as u32;
    case.number(of!(args, Args, k), k);
    forced(case, [of!(args, Args, init_blocks), of!(args, Args, local_blocks)], cap);
    case.real(of!(args, Args, ratio), ratio);
    let factors = holt(case);
    write_holt(case, &of!(args, Args, holt), &factors);
    let tokens = blocks.saturating_mul(size as i64);
    case.input(of!(args, Args, seq_lens), I32, &[batch], Content::Counts(tokens));
    case.maybe_input(of!(args, Args, budgets), I32, &[batch], Content::Counts(cap));
    if batch > 0 {
        case.maybe_input(of!(args, Args, sequences), I32, &[batch], Content::Indices(batch));
    }
    list(case, of!(args, Args, predicted), Role::Out, &[batch, heads, cap], blocks);
    case.maybe_output(of!(args, Args, scores), F32, &[batch, heads, blocks]);
}

pub fn predictor_update(case: &mut Case) {
    type Args = vwd_predictor_update_args;
    let args = case.call::<Args>(vwd_predictor_update);
    let shape = predictor_state(case, of!(args, Args, state), Role::InOut);
    let size = case.rng.size(1..=16) as u32;
    case.number(of!(args, Args, block_size), size);
    let factors = holt(case);
    write_holt(case, &of!(args, Args, holt), &factors);
    let tokens = shape[2].saturating_mul(size as i64);
    case.input(of!(args, Args, seq_lens), I32, &shape[..1], Content::Counts(tokens));
    if shape[0] > 0 {
        case.maybe_input(of!(args, Args, sequences), I32, &shape[..1], Content::Distinct(shape[0]));
    }
    case.input(of!(args, Args, scores), F32, &shape, Content::Floats);
}

pub fn predictor_calibrate(case: &mut Case) {
    type Args = vwd_predictor_calibrate_args;
    let args = case.call_with::<Args>(|session, args| {
        let (mut best, mut rate) = (vwd_holt { alpha: -7.0, beta: -7.0, gamma: -7.0 }, -7.0f64);
        // SAFETY: the arguments are what the case describes, and both results have a place.
        let status = unsafe { vwd_predictor_calibrate(session.raw(), args.cast(), &mut best, &mut rate) };
        assert!(status != VWD_OK || (0.0..=1.0).contains(&rate), "hit rate {rate}");
        assert!(status == VWD_OK || (best.alpha, rate) == (-7.0, -7.0), "written in spite of an error");
        let mut results: Vec<u8> = [best.alpha, best.beta, best.gamma].iter().flat_map(|x| x.to_le_bytes()).collect();
        results.extend(rate.to_le_bytes());
        (status, if status == VWD_OK { results } else { vec![] })
    });
    let k = case.rng.size(0..=8) as u32;
    case.number(of!(args, Args, k), k);
    forced(case, [of!(args, Args, init_blocks), of!(args, Args, local_blocks)], 8);
    let ratio = case.rng.pick(&[0.0, 1.0, 1.25, 3.5]);
    case.real(of!(args, Args, ratio), ratio);
    if case.rng.one_in(2) {
        let points = case.rng.size(1..=9);
        case.length(of!(args, Args, grid_count), points, u32::MAX);
        for place in case.array::<vwd_holt>(of!(args, Args, grid), points) {
            let factors = holt(case);
            write_holt(case, &place, &factors);
        }
    }
    let shape = [case.extent(1..=3), case.extent(1..=6), case.extent(1..=3), case.extent(1..=20)];
    case.input(of!(args, Args, scores), F32, &shape, Content::Floats);
    case.input(of!(args, Args, block_counts), I32, &shape[..2], Content::Counts(shape[3]));
}

// --- what several calls take -----------------------------------------------------------------------------------------

/// A block list of this shape, of ids below `n`; without slots.
pub fn list(case: &mut Case, place: Place, role: Role, shape: &[i64], n: i64) {
    let (cap, lists) = shape.split_last().expect("lists have places");
    case.tensor(of!(place, vwd_block_list, ids), role, I32, shape, Content::Ascending(n));
    case.tensor(of!(place, vwd_block_list, counts), role, I32, lists, Content::Counts(*cap));
    let slots = case.tensor(of!(place, vwd_block_list, slots), role, I32, shape, Content::Indices(n));
    case.optional(false, slots);
}

/// How many of the first and of the last are selected in any case; together they fit in `cap`.
pub fn forced(case: &mut Case, [init, local]: [Place; 2], cap: i64) {
    let most = cap.clamp(0, 6) as usize;
    let first = case.rng.size(0..=most) / 2;
    let last = case.rng.size(0..=most - first) / 2;
    case.number(init, first as u32);
    case.number(local, last as u32);
}
