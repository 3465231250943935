//! Calls over the keys of sequences: their summaries, selections, attention.

use crate::calls::{FLOATS, forced, list};
use crate::case::{Case, Place, Role, of};
use crate::content::Content;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

// --- what they share -------------------------------------------------------------------------------------------------

/// Sizes of a call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: i64,
    /// Q, where q has a dimension for positions.
    positions: Option<i64>,
    kv_heads: i64,
    heads: i64,
    dim: i64,
}

impl Sizes {
    fn draw(case: &mut Case) -> Sizes {
        let (batch, kv_heads) = (case.extent(1..=3), case.extent(1..=3));
        let positions = if case.rng.one_in(4) { Some(case.extent(1..=3)) } else { None };
        let group = case.rng.pick(&[1, 1, 2, 3, 8]);
        let dim =
            if case.rng.one_in(12) { case.rng.pick(&[256, 512, 576]) } else { case.rng.pick(&[16, 24, 32, 64, 128]) };
        Sizes { batch, positions, kv_heads, heads: kv_heads.saturating_mul(group), dim }
    }

    /// [B, rest] or [B, Q, rest].
    fn rows(&self, rest: &[i64]) -> Vec<i64> {
        [self.batch].into_iter().chain(self.positions).chain(rest.iter().copied()).collect()
    }

    /// The shape of lists of `cap` entries: shared by the positions, or each its own.
    fn lists(&self, is_own: bool, cap: i64) -> Vec<i64> {
        if is_own { self.rows(&[self.kv_heads, cap]) } else { vec![self.batch, self.kv_heads, cap] }
    }

    fn queries(&self, case: &mut Case, q: Place, q_lens: Place, heads: i64) -> DType {
        let dtype = case.rng.pick(&FLOATS);
        case.input(q, dtype, &self.rows(&[heads, self.dim]), Content::Floats);
        let lens = case.input(q_lens, I32, &[self.batch], Content::Counts(self.positions.unwrap_or(1)));
        let is_given = self.positions.is_some() && case.rng.one_in(2);
        case.optional(is_given, lens);
        dtype
    }

    /// A draft tree of the rows, where q has a dimension for them.
    fn tree(&self, case: &mut Case, place: Place) {
        let rows = self.positions.unwrap_or(1);
        let words = rows / 32 + (rows % 32 > 0) as i64;
        let tree = case.input(place, U32, &[self.batch, rows, words], Content::Bytes);
        let is_given = self.positions.is_some() && case.rng.one_in(3);
        case.optional(is_given, tree);
    }

    fn draws_own_lists(&self, case: &mut Case) -> bool {
        self.positions.is_some() && case.rng.one_in(2)
    }
}

/// Pages of keys.
#[derive(Clone, Copy)]
struct Pages {
    count: i64,
    size: i64,
    /// Pages of a sequence, where there is a table.
    most: Option<i64>,
}

impl Pages {
    fn draw(case: &mut Case, batch: i64) -> Pages {
        if case.rng.one_in(3) {
            let size = case.rng.pick(&[1, 7, 16, 40, 64, 130]);
            let spare = case.extent(0..=1);
            return Pages { count: batch.saturating_add(spare), size: case.extent(size..=size), most: None };
        }
        let size = case.rng.pick(&[1, 2, 8, 16, 16, 32, 64]);
        let (count, size) = (case.extent(1..=7), case.extent(size..=size));
        Pages { count, size, most: Some(case.extent(1..=5)) }
    }

    fn tokens(&self) -> i64 {
        self.size.saturating_mul(self.most.unwrap_or(1))
    }

    /// A size of blocks that fits the pages.
    fn block_size(&self, case: &mut Case) -> u32 {
        let size = self.size.clamp(1, 1 << 20) as u32;
        match self.most {
            None => case.rng.pick(&[1, 3, 8, 16, size]),
            Some(_) => {
                case.rng.pick(&[size, size, size * 2, size * 3, if size.is_multiple_of(2) { size / 2 } else { 1 }, 1])
            }
        }
    }

    fn table(&self, case: &mut Case, page_table: Place, batch: i64) {
        let table = case.input(page_table, I32, &[batch, self.most.unwrap_or(1)], Content::Indices(self.count));
        case.optional(self.most.is_some(), table);
    }
}

/// The scale of keys or values of FP8, in one of its shapes.
fn scale(case: &mut Case, place: Place, of: DType, pages: Pages, heads: i64) {
    let shape = case.rng.pick(&[vec![1], vec![heads], vec![pages.count, pages.size, heads]]);
    let field = case.input(place, F32, &shape, Content::Floats);
    let is_given = matches!(of, F8E4M3 | F8E5M2) && !case.rng.one_in(3);
    case.optional(is_given, field);
}

fn key_dtype(case: &mut Case) -> DType {
    case.rng.pick(&[F32, F32, F16, F16, BF16, BF16, F8E4M3, F8E5M2])
}

// --- index -----------------------------------------------------------------------------------------------------------

/// Summaries of sequences: what a selection reads, or an update writes.
struct Summaries {
    kind: u32,
    block_size: u32,
    batch: i64,
    kv_heads: i64,
    dim: i64,
    role: Role,
}

impl Summaries {
    fn describe(&self, case: &mut Case, home: Place, dtype: DType) {
        let index = case.nested::<vwd_index>(home);
        case.number(of!(index, vwd_index, kind), self.kind);
        let rows = case.rng.pick(&[24, 24, 200]);
        let (rows, most) = (case.extent(1..=rows), case.rng.one_in(2).then(|| case.extent(1..=4)));
        let spare = case.extent(1..=4);
        let pages = match most {
            None => self.batch.saturating_add(spare / 2),
            // Sequences may share what is read, and not what is written.
            Some(most) if self.role == Role::Out => self.batch.saturating_mul(most),
            Some(_) => spare,
        };
        let table = of!(index, vwd_index, table);
        let named = if self.role == Role::In { Content::Indices(pages) } else { Content::Distinct(pages) };
        let table = case.input(table, I32, &[self.batch, most.unwrap_or(1)], named);
        case.optional(most.is_some(), table);
        let (shape, kept) = ([pages, rows, self.kv_heads, self.dim], case.rng.pick(&[2, 4, 10, 16]));
        let few = case.rng.pick(&[(8, 4), (4, 4), (4, 2), (5, 3), (3, 7), (2, 1), (1, 1)]);
        let (window, stride) = case.rng.pick(&[few, few, few, few, few, few, (0, 0), (1 << 20, 1)]);
        case.number(of!(index, vwd_index, block_size), self.block_size);
        case.number(of!(index, vwd_index, window), window);
        case.number(of!(index, vwd_index, stride), stride);
        let codes = [pages, rows, self.kv_heads, kept / 2];
        let is_int4 = case.rng.one_in(2);
        let mut summary = |kind, place, dtype, shape: &[i64]| {
            let field = case.tensor(place, self.role, dtype, shape, Content::Floats);
            case.optional(kind == self.kind, field);
        };
        summary(VWD_INDEX_MINMAX, of!(index, vwd_index, key_max), dtype, &shape);
        summary(VWD_INDEX_MINMAX, of!(index, vwd_index, key_min), dtype, &shape);
        summary(VWD_INDEX_MEAN, of!(index, vwd_index, means), dtype, &shape);
        summary(VWD_INDEX_LABEL, of!(index, vwd_index, labels), U8, &codes);
        summary(VWD_INDEX_LABEL, of!(index, vwd_index, label_scale), F16, &shape[..3]);
        summary(VWD_INDEX_LABEL, of!(index, vwd_index, label_min), F16, &shape[..3]);
        let range = [pages, rows, self.kv_heads, 4 * ((self.dim + 31) / 32)];
        let both = [pages, rows, self.kv_heads, 2 * self.dim];
        let axes = of!(index, vwd_index, axes);
        if is_int4 {
            summary(VWD_INDEX_AXIS, axes, U8, &shape)
        } else {
            summary(VWD_INDEX_AXIS, axes, dtype, &both)
        }
        let stored = if is_int4 { VWD_INDEX_AXIS } else { u32::MAX };
        summary(stored, of!(index, vwd_index, axis_range), F16, &range);
        for place in [of!(index, vwd_index, axis_weights), of!(index, vwd_index, axis_centre)] {
            let field = case.input(place, F32, &[self.kv_heads, self.dim], Content::Floats);
            let is_given = self.kind == VWD_INDEX_AXIS && case.rng.one_in(2);
            case.optional(is_given, field);
        }
        let channels = of!(index, vwd_index, channels);
        let channels = case.input(channels, I32, &[self.kv_heads, kept], Content::Indices(self.dim));
        case.optional(self.kind == VWD_INDEX_LABEL, channels);
    }
}

pub fn index_update(case: &mut Case, kind: u32) {
    let args = case.call::<vwd_index_update_args>(vwd_index_update);
    update(case, args, kind);
}

pub fn index_update_layers(case: &mut Case) {
    let count = case.rng.size(1..=2);
    let updates = case.call_with_array::<*const vwd_index_update_args>("updates", count, move |session, updates| {
        let count = count as u32;
        // SAFETY: the array is what the case describes, in memory that is there.
        (unsafe { vwd_index_update_layers(session.raw(), updates.cast(), count, std::ptr::null_mut()) }, vec![])
    });
    for home in updates {
        let kind = case.rng.pick(&[VWD_INDEX_MINMAX, VWD_INDEX_MEAN, VWD_INDEX_LABEL, VWD_INDEX_AXIS]);
        let (args, first) = (case.nested::<vwd_index_update_args>(home), case.fields.len());
        update(case, args, kind);
        // What one update writes and another reads is not compared.
        for (one, other) in (0..first).flat_map(|one| (first..case.fields.len()).map(move |other| (one, other))) {
            if case.fields[one].role == Role::In || case.fields[other].role == Role::In {
                case.may_overlap.extend([[one, other], [other, one]]);
            }
        }
    }
}

fn update(case: &mut Case, args: Place, kind: u32) {
    type Args = vwd_index_update_args;
    let sizes = Sizes::draw(case);
    let pages = Pages::draw(case, sizes.batch);
    let dtype = key_dtype(case);
    let keys = [pages.count, pages.size, sizes.kv_heads, sizes.dim];
    case.input(of!(args, Args, k), dtype, &keys, Content::Floats);
    scale(case, of!(args, Args, k_scale), dtype, pages, sizes.kv_heads);
    pages.table(case, of!(args, Args, page_table), sizes.batch);
    let tokens = pages.tokens();
    case.input(of!(args, Args, seq_lens), I32, &[sizes.batch], Content::Counts(tokens));
    case.maybe_input(of!(args, Args, begin), I32, &[sizes.batch], Content::Counts(tokens / 4));
    let block_size = pages.block_size(case);
    let any = case.rng.pick(&FLOATS);
    let stored = if kind == VWD_INDEX_MINMAX && FLOATS.contains(&dtype) { dtype } else { any };
    let Sizes { batch, kv_heads, dim, .. } = sizes;
    let summaries = Summaries { kind, block_size, batch, kv_heads, dim, role: Role::Out };
    summaries.describe(case, of!(args, Args, index), stored);
}

pub fn channel_importance(case: &mut Case) {
    type Args = vwd_channel_importance_args;
    let args = case.call::<Args>(vwd_channel_importance);
    let Sizes { kv_heads, heads, dim, .. } = Sizes::draw(case);
    let (dtype, queries, keys) = (case.rng.pick(&FLOATS), case.extent(1..=9), case.extent(1..=9));
    case.input(of!(args, Args, q), dtype, &[queries, heads, dim], Content::Floats);
    case.input(of!(args, Args, k), dtype, &[keys, kv_heads, dim], Content::Floats);
    let kept = case.rng.pick(&[2, 8, 16]);
    case.maybe_output(of!(args, Args, channels), I32, &[kv_heads, kept]);
    for place in [of!(args, Args, importance), of!(args, Args, weights), of!(args, Args, centre)] {
        case.maybe_output(place, F32, &[kv_heads, dim]);
    }
}

// --- select ----------------------------------------------------------------------------------------------------------

pub fn select_blocks(case: &mut Case, method: u32) {
    type Args = vwd_select_blocks_args;
    let args = case.call_with_scratch::<Args>(vwd_select_blocks, vwd_select_blocks_scratch);
    let sizes = Sizes::draw(case);
    case.number(of!(args, Args, method), method);
    let block_size = case.rng.pick(&[1, 4, 8, 16, 16, 64]);
    case.number(of!(args, Args, block_size), block_size);
    let (kind, heads) = match method {
        VWD_SELECT_MINMAX => (VWD_INDEX_MINMAX, sizes.heads),
        VWD_SELECT_LABEL_MASS => (VWD_INDEX_LABEL, sizes.heads),
        VWD_SELECT_AXIS => (VWD_INDEX_AXIS, sizes.heads),
        VWD_SELECT_MEAN_DOT => (VWD_INDEX_MEAN, sizes.kv_heads),
        _ => (VWD_INDEX_MEAN, sizes.heads),
    };
    sizes.queries(case, of!(args, Args, q), of!(args, Args, q_lens), heads);
    let tokens = case.rng.pick(&[40, 200, 800]);
    let Sizes { batch, kv_heads, dim, .. } = sizes;
    let stored = case.rng.pick(&FLOATS);
    let summaries = Summaries { kind, block_size, batch, kv_heads, dim, role: Role::In };
    summaries.describe(case, of!(args, Args, index), stored);
    let scale = case.rng.pick(&[0.0, 0.125, 1.0]);
    case.real(of!(args, Args, scale), scale);
    let blocks = tokens / block_size as i64 + 1;
    let is_own = sizes.draws_own_lists(case);
    let lists = sizes.lists(is_own, 1);
    let candidates = case.extent(1..=8);
    let first = case.fields.len();
    list(case, of!(args, Args, candidates), Role::In, &sizes.lists(is_own, candidates), blocks);
    if method != VWD_SELECT_LABEL_MASS {
        (first..case.fields.len()).for_each(|field| case.optional(false, field));
    }
    let places = [of!(args, Args, k), of!(args, Args, init_blocks), of!(args, Args, local_blocks)];
    let cap = quota(case, places, of!(args, Args, seq_lens), of!(args, Args, budgets), batch, tokens);
    list(case, of!(args, Args, selected), Role::Out, &sizes.lists(is_own, cap), blocks);
    let most = case.extent(1..=40);
    case.maybe_output(of!(args, Args, scores), F32, &sizes.lists(is_own, most));
    case.maybe_output(of!(args, Args, status), U32, &lists[..lists.len() - 1]);
    if method == VWD_SELECT_AXIS {
        case.maybe_output(of!(args, Args, log_mass), F32, &sizes.rows(&[heads]));
    }
}

pub fn select_tokens(case: &mut Case) {
    type Args = vwd_select_tokens_args;
    let args = case.call_with_scratch::<Args>(vwd_select_tokens, vwd_select_tokens_scratch);
    let sizes = Sizes::draw(case);
    let block_size = case.rng.pick(&[1, 4, 8, 16, 16]);
    case.number(of!(args, Args, block_size), block_size);
    sizes.queries(case, of!(args, Args, q), of!(args, Args, q_lens), sizes.heads);
    let tokens = case.rng.pick(&[20, 60, 200]);
    let Sizes { batch, kv_heads, dim, .. } = sizes;
    let summaries = Summaries { kind: VWD_INDEX_LABEL, block_size, batch, kv_heads, dim, role: Role::In };
    summaries.describe(case, of!(args, Args, index), F16);
    let scale = case.rng.pick(&[0.0, 0.125, 1.0]);
    case.real(of!(args, Args, scale), scale);
    let is_own = sizes.draws_own_lists(case);
    let candidates = case.extent(1..=8);
    let blocks = tokens / block_size as i64 + 1;
    list(case, of!(args, Args, candidates), Role::In, &sizes.lists(is_own, candidates), blocks);
    let places = [of!(args, Args, k), of!(args, Args, init_tokens), of!(args, Args, local_tokens)];
    let cap = quota(case, places, of!(args, Args, seq_lens), of!(args, Args, budgets), batch, tokens);
    let lists = sizes.lists(is_own, cap);
    list(case, of!(args, Args, selected), Role::Out, &lists, tokens);
    case.maybe_output(of!(args, Args, scores), F32, &lists);
    case.maybe_output(of!(args, Args, status), U32, &lists[..lists.len() - 1]);
}

/// How many are selected, of which lengths: the lists' places.
fn quota(
    case: &mut Case,
    [k, init, local]: [Place; 3],
    seq_lens: Place,
    budgets: Place,
    batch: i64,
    tokens: i64,
) -> i64 {
    let cap = case.extent(1..=12);
    let budget = case.rng.size(0..=cap.clamp(0, 12) as usize);
    case.number(k, budget as u32);
    forced(case, [init, local], cap);
    case.input(seq_lens, I32, &[batch], Content::Counts(tokens));
    case.maybe_input(budgets, I32, &[batch], Content::Counts(cap));
    cap
}

// --- attention -------------------------------------------------------------------------------------------------------

/// Keys and values, and what attention asks of them.
struct Attention {
    sizes: Sizes,
    /// Dv, the channels of a value.
    value_dim: i64,
    pages: Pages,
    /// The pages are a pool whose pages are named by the slots of a list.
    is_pool: bool,
    block_size: u32,
    partial_blocks: u32,
}

/// Where a call has them.
struct AttentionPlaces {
    kv: Place,
    q: Place,
    q_lens: Place,
    /// scale, soft_cap, window.
    numbers: [Place; 3],
    sinks: Place,
    out: Place,
    lse: Place,
    state: Place,
}

impl Attention {
    fn describe(case: &mut Case, may_be_pool: bool, at: AttentionPlaces) -> Attention {
        let sizes = Sizes::draw(case);
        let Sizes { batch, kv_heads, heads, dim, .. } = sizes;
        let is_pool = may_be_pool && case.rng.one_in(6);
        let pages = Pages::draw(case, batch);
        let value_dim = if case.rng.one_in(6) { case.rng.pick(&[16, 24, 64, 512]) } else { dim };
        let block_size = match is_pool {
            true => case.rng.pick(&[1, pages.size.clamp(1, 1 << 20) as u32]),
            false => pages.block_size(case),
        };
        let partial_blocks = case.rng.pick(&[0, 1, 2, 3]);

        let kv = case.nested::<vwd_paged_kv>(at.kv);
        let (dtype, stored_heads) = (key_dtype(case), if is_pool { 1 } else { kv_heads });
        let lead = [pages.count, pages.size, stored_heads];
        let k = case.input(of!(kv, vwd_paged_kv, k), dtype, &[&lead[..], &[dim]].concat(), Content::Floats);
        let v = case.input(of!(kv, vwd_paged_kv, v), dtype, &[&lead[..], &[value_dim]].concat(), Content::Floats);
        if value_dim <= dim && case.rng.one_in(6) {
            case.fields[v].tensor.strides = case.fields[k].tensor.strides;
            case.fields[v].shares = Some((k, true));
        }
        pages.table(case, of!(kv, vwd_paged_kv, page_table), batch);
        if is_pool {
            case.optional(false, case.fields.len() - 1);
        }
        let tokens = if is_pool { 1000 } else { pages.tokens() };
        case.input(of!(kv, vwd_paged_kv, seq_lens), I32, &[batch], Content::Counts(tokens));
        scale(case, of!(kv, vwd_paged_kv, k_scale), dtype, pages, stored_heads);
        scale(case, of!(kv, vwd_paged_kv, v_scale), dtype, pages, stored_heads);

        let dtype = sizes.queries(case, at.q, at.q_lens, heads);
        let scale = if value_dim == dim { case.rng.pick(&[0.0, 0.125, 1.0]) } else { 0.25 };
        let soft_cap = case.rng.pick(&[0.0, 0.0, 0.0, 30.0, 0.5]);
        let window = case.rng.pick(&[0, 0, 0, 1, 7, 100]);
        let [scale_at, soft_cap_at, window_at] = at.numbers;
        case.real(scale_at, scale);
        case.real(soft_cap_at, soft_cap);
        case.number(window_at, window);
        let sinks = case.input(at.sinks, F32, &[heads], Content::Floats);
        let has_sinks = case.rng.one_in(4);
        case.optional(has_sinks, sinks);
        let dtype = case.rng.pick(&[dtype, F32]);
        case.output(at.out, dtype, &sizes.rows(&[heads, value_dim]));
        case.maybe_output(at.lse, F32, &sizes.rows(&[heads]));
        let is_given = case.rng.one_in(2);
        state(case, at.state, Role::Out, &sizes.rows(&[heads]), value_dim, is_given);
        Attention { sizes, value_dim, pages, is_pool, block_size, partial_blocks }
    }

    /// Blocks that lists may name.
    fn blocks(&self) -> i64 {
        let tokens = if self.is_pool { 1000 } else { self.pages.tokens() };
        tokens.saturating_add(self.block_size as i64 - 1) / self.block_size as i64
    }

    /// A list of the call; with slots, where it says in which pages blocks lie.
    fn list(&self, case: &mut Case, place: Place, is_own: bool, cap: i64, names_slots: bool) {
        list(case, place, Role::In, &self.sizes.lists(is_own, cap), self.blocks());
        if names_slots && self.is_pool {
            let slots = case.fields.last_mut().expect("slots come last");
            (slots.is_given, slots.content) = (true, Content::Indices(self.pages.count));
        }
    }

    fn partials(&self, case: &mut Case, place: Place, role: Role, cap: i64, is_given: bool) {
        let groups = cap.saturating_add(self.partial_blocks.max(1) as i64 - 1) / self.partial_blocks.max(1) as i64;
        state(case, place, role, &self.sizes.rows(&[self.sizes.heads, groups]), self.value_dim, is_given);
    }
}

/// A state, or partials: their structs are alike. The first of its fields.
fn state(case: &mut Case, place: Place, role: Role, lead: &[i64], dim: i64, is_given: bool) -> usize {
    let acc = [lead, &[dim]].concat();
    let first = case.tensor(of!(place, vwd_attention_state, acc), role, F32, &acc, Content::Floats);
    case.tensor(of!(place, vwd_attention_state, m), role, F32, lead, Content::Floats);
    case.tensor(of!(place, vwd_attention_state, l), role, F32, lead, Content::Floats);
    (first..first + 3).for_each(|field| case.optional(is_given, field));
    first
}

pub fn attention(case: &mut Case, has_list: bool) {
    type Args = vwd_attention_args;
    let args = case.call_with_scratch::<Args>(vwd_attention, vwd_attention_scratch);
    let attention = Attention::describe(
        case,
        has_list,
        AttentionPlaces {
            kv: of!(args, Args, kv),
            q: of!(args, Args, q),
            q_lens: of!(args, Args, q_lens),
            numbers: [of!(args, Args, scale), of!(args, Args, soft_cap), of!(args, Args, window)],
            sinks: of!(args, Args, sinks),
            out: of!(args, Args, out),
            lse: of!(args, Args, lse),
            state: of!(args, Args, state),
        },
    );
    case.number(of!(args, Args, block_size), if has_list { attention.block_size } else { 0 });
    case.number(of!(args, Args, partial_blocks), attention.partial_blocks);
    let (cap, is_own) = (case.extent(0..=9), attention.sizes.draws_own_lists(case));
    let first = case.fields.len();
    attention.list(case, of!(args, Args, list), is_own, cap, true);
    if !has_list {
        (first..case.fields.len()).for_each(|field| case.optional(false, field));
    }
    let keeps_partials = has_list && case.rng.one_in(2);
    attention.partials(case, of!(args, Args, partials), Role::Out, cap, keeps_partials);
    attention.sizes.tree(case, of!(args, Args, tree));
}

pub fn merge_states(case: &mut Case) {
    type Args = vwd_merge_states_args;
    let args = case.call::<Args>(vwd_merge_states);
    let sizes = Sizes::draw(case);
    let Sizes { heads, dim, .. } = sizes;
    let count = case.rng.size(1..=4);
    case.length(of!(args, Args, input_count), count, 16);
    for input in case.array::<vwd_attention_state>(of!(args, Args, inputs), count) {
        state(case, input, Role::In, &sizes.rows(&[heads]), dim, true);
    }
    let sinks = case.input(of!(args, Args, sinks), F32, &[heads], Content::Floats);
    let has_sinks = case.rng.one_in(4);
    case.optional(has_sinks, sinks);
    let dtype = case.rng.pick(&FLOATS);
    case.maybe_output(of!(args, Args, out), dtype, &sizes.rows(&[heads, dim]));
    case.maybe_output(of!(args, Args, lse), F32, &sizes.rows(&[heads]));
    let is_given = !case.rng.one_in(3);
    state(case, of!(args, Args, state), Role::Out, &sizes.rows(&[heads]), dim, is_given);
}

pub fn repair(case: &mut Case, mode: u32) {
    type Args = vwd_repair_args;
    let args = case.call_with_scratch::<Args>(vwd_repair, vwd_repair_scratch);
    case.number(of!(args, Args, mode), mode);
    let attention = Attention::describe(
        case,
        true,
        AttentionPlaces {
            kv: of!(args, Args, kv),
            q: of!(args, Args, q),
            q_lens: of!(args, Args, q_lens),
            numbers: [of!(args, Args, scale), of!(args, Args, soft_cap), of!(args, Args, window)],
            sinks: of!(args, Args, sinks),
            out: of!(args, Args, out),
            lse: of!(args, Args, lse),
            state: of!(args, Args, state),
        },
    );
    let state_at = case.fields.len() - 3;
    case.number(of!(args, Args, block_size), attention.block_size);
    case.number(of!(args, Args, partial_blocks), attention.partial_blocks);
    let Sizes { heads, .. } = attention.sizes;
    let is_own = attention.sizes.draws_own_lists(case);
    let (predicted, selected) = (case.extent(0..=9), case.extent(0..=9));
    attention.list(case, of!(args, Args, predicted), is_own, predicted, false);
    attention.list(case, of!(args, Args, selected), is_own, selected, true);
    let (is_superset, lead) = (mode == VWD_REPAIR_SUPERSET, attention.sizes.rows(&[heads]));
    let in_place = is_superset && case.rng.one_in(3);
    let role = if in_place { Role::InOut } else { Role::In };
    let value_dim = attention.value_dim;
    let kept = state(case, of!(args, Args, predicted_state), role, &lead, value_dim, is_superset);
    for n in 0..3 {
        case.may_overlap.push([state_at + n, kept + n]);
        if in_place {
            case.fields[state_at + n].tensor = case.fields[kept + n].tensor;
            case.fields[state_at + n].shares = Some((kept + n, true));
        }
    }
    attention.partials(case, of!(args, Args, predicted_partials), Role::In, predicted, !is_superset);
    let lists = attention.sizes.lists(is_own, 1);
    case.maybe_output(of!(args, Args, missed_counts), I32, &lists[..lists.len() - 1]);
    attention.sizes.tree(case, of!(args, Args, tree));
}
