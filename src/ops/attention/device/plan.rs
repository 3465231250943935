//! What the plans of all variants have in common: what a call is about, its sizes, and what the kernels are told of it.

use super::params::{Params, StateView};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::attention::{FarPages, Outputs, Problem, Term};
use crate::ops::views::{BlockList, Scale, State};
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::views::{NO_DIM, View, element_code};

pub const THREADS: u32 = 256;
pub const WARPS: u32 = 8;
pub const WARP_ROWS: u32 = 8;
pub const TILE: u32 = 16;
/// A TokenInfo of kernels/attention/mma.cuh.
pub const TOKEN_INFO_BYTES: u32 = 192;
/// Tiles of a chunk: one for each warp.
const LEAST_TILES: u32 = 8;
/// Numbers of tokens along a list stay below this.
const MOST: u64 = 1 << 31;

/// A kernel that attends: its variant, and which of the variant's kernels it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    Decode128(Element, Rows),
    /// For keys of 64 channels, and of 256.
    Decode64(Element, Rows),
    Decode256(Element, Rows),
    /// With the term of what lists leave out.
    Decode128Term(Element, Rows),
    Verify128(Element),
    Verify128Tree(Element),
    VerifyShort(Element),
    VerifyShortTree(Element),
    /// For keys of 64 channels, and of 256.
    Verify64(Element),
    Verify64Tree(Element),
    Verify64Short(Element),
    Verify64ShortTree(Element),
    Verify256(Element),
    Verify256Tree(Element),
    Int4_128(Element, Rows),
    Int4Verify128(Element),
    Int4Verify128Tree(Element),
    /// The largest D and Dv that it takes.
    Int4Mma(Element, u32),
    Mla64(Element),
    Mla16(Element),
    Mma(Element, Width),
    General,
    GeneralTree,
    Int4General,
}

impl Entry {
    /// Whether it is one of decode128, decode64 and decode256, whose plans they have in common.
    pub fn is_decode(self) -> bool {
        use Entry::{Decode64, Decode128, Decode128Term, Decode256};
        matches!(self, Decode128(..) | Decode64(..) | Decode256(..) | Decode128Term(..))
    }

    /// Whether it is one of verify256, whose shared memory is its own.
    pub fn is_verify256(self) -> bool {
        matches!(self, Entry::Verify256(_) | Entry::Verify256Tree(_))
    }

    /// Whether it is one of verify128, verify64 or verify256, whose clusters they have in common.
    pub fn is_verify128(self) -> bool {
        use Entry::{Int4Verify128, Int4Verify128Tree, Verify64, Verify64Tree, Verify128, Verify128Tree};
        let is_narrow = matches!(self, Verify64(_) | Verify64Tree(_));
        is_narrow
            || self.is_verify256()
            || matches!(self, Verify128(_) | Verify128Tree(_) | Int4Verify128(_) | Int4Verify128Tree(_))
    }

    /// Whether it is one of verify128_short or of verify64_short.
    pub fn is_verify_short(self) -> bool {
        use Entry::{Verify64Short, Verify64ShortTree, VerifyShort, VerifyShortTree};
        matches!(self, VerifyShort(_) | VerifyShortTree(_) | Verify64Short(_) | Verify64ShortTree(_))
    }

    /// Whether it copies whole tiles as boxes of tensors.
    pub fn takes_boxes(self) -> bool {
        self.is_verify_short() || self.is_verify128() && !self.is_int4()
    }

    /// Whether it attends to tokens in INT4.
    pub fn is_int4(self) -> bool {
        use Entry::{Int4_128, Int4General, Int4Mma, Int4Verify128, Int4Verify128Tree};
        matches!(self, Int4_128(..) | Int4General | Int4Mma(..) | Int4Verify128(_) | Int4Verify128Tree(_))
    }
}

/// What keys and values are made of, where 16-bit queries of the same type, or with FP8 of either, meet them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Element {
    F16,
    Bf16,
    Fp8,
}

impl Element {
    /// Queries of float32 beside keys of 16 bits are rounded to the keys' type by the kernels that take them.
    fn of(k: DType, q: DType) -> Option<Element> {
        match (k, q) {
            (DType::F16, DType::F16 | DType::F32) => Some(Element::F16),
            (DType::BF16, DType::BF16 | DType::F32) => Some(Element::Bf16),
            (k, DType::F16 | DType::BF16) if k.is_float8() => Some(Element::Fp8),
            _ => None,
        }
    }

    /// Bytes of a key's or value's channel.
    pub fn bytes(self) -> u32 {
        if self == Element::Fp8 { 1 } else { 2 }
    }
}

/// The largest D and Dv that a kernel takes: 128, 256, or 576 and 512.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Width {
    W128,
    W256,
    W576,
}

impl Width {
    pub fn of(dim: u32, value_dim: u32) -> Option<Width> {
        match (dim, value_dim) {
            (d, dv) if d.max(dv) <= 128 => Some(Width::W128),
            (d, dv) if d.max(dv) <= 256 => Some(Width::W256),
            (d, dv) if d <= 576 && dv <= 512 => Some(Width::W576),
            _ => None,
        }
    }

    pub fn channels(self) -> u32 {
        match self {
            Width::W128 => 128,
            Width::W256 => 256,
            Width::W576 => 576,
        }
    }
}

/// Rows of a list that a kernel of decode128 is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    UpTo4,
    UpTo8,
    UpTo16,
}

impl Rows {
    pub fn of(rows: u32) -> Option<Rows> {
        match rows {
            0..=4 => Some(Rows::UpTo4),
            5..=8 => Some(Rows::UpTo8),
            9..=16 => Some(Rows::UpTo16),
            _ => None,
        }
    }

    pub const fn count(self) -> u32 {
        4 << self as u32
    }
}

/// What is attended to, and where results go.
#[derive(Clone, Copy)]
pub struct Job<'j, 'a> {
    pub problem: &'j Problem<'a>,
    pub list: Option<&'j BlockList<'a>>,
    pub entries_per_partial: usize,
    pub partials: Option<&'j State<'a>>,
    pub outputs: &'j Outputs<'a>,
    pub term: Option<&'j Term<'a>>,
    /// Whether the result starts from a state: repair's second launch.
    pub has_start: bool,
    /// Whether keys and values lie in host memory.
    pub is_far: bool,
    pub far_pages: Option<FarPages>,
}

/// The sizes of a call, from which variants and their plans follow.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// `None` where tensor cores do not multiply these types.
    pub element: Option<Element>,
    pub dim: u32,
    pub value_dim: u32,
    pub kv_heads: u32,
    /// Rows that read one list.
    pub rows: u32,
    /// Lists, or sequences and KV heads without a list.
    pub lists: u64,
    /// The lists of one sequence.
    pub sequence_lists: u64,
    /// In a batch-invariant session, the number of sequences for which kernels and splits are chosen; otherwise 0.
    pub invariant_batch: u32,
    /// Tokens of a full list.
    pub list_tokens: u64,
    /// Tokens of a sequence that a window leaves, and `u64::MAX` without one.
    pub window_tokens: u64,
    /// Units of a full list, and tiles of a unit.
    pub units: u64,
    pub unit_tiles: u32,
}

impl Sizes {
    pub fn of(job: &Job, params: &Params, invariant_batch: u32) -> Sizes {
        let Problem { positions, kv, .. } = job.problem;
        let list_tokens = match job.list {
            Some(list) => (list.cap() as u64).saturating_mul(params.block.value as u64),
            None => kv.pages.capacity() as u64,
        };
        Sizes {
            element: Element::of(kv.k.dtype, positions.q.dtype),
            dim: params.dim,
            value_dim: params.value_dim,
            kv_heads: params.kv_heads.value,
            rows: params.rows,
            lists: lists(job) as u64,
            sequence_lists: sequence_lists(job) as u64,
            invariant_batch,
            list_tokens,
            window_tokens: match params.window {
                0 => u64::MAX,
                window => u64::from(window) + u64::from(params.positions),
            },
            units: list_tokens.div_ceil(params.unit_tokens as u64),
            unit_tiles: params.unit_tiles.value,
        }
    }

    /// Lists by whose number kernels are chosen and lists are split: all, or in a batch-invariant session those of as many sequences as
    /// it is made for.
    pub fn split_lists(&self) -> u64 {
        if self.is_invariant() { self.sequence_lists.saturating_mul(self.invariant_batch.into()) } else { self.lists }
    }

    /// Whether a sequence has the same bits in every batch.
    pub fn is_invariant(&self) -> bool {
        self.invariant_batch > 0
    }
}

/// How a call runs. The same for every variant.
pub struct Plan {
    /// Scratch and counters are filled in by [`Plan::place`].
    pub params: Params,
    pub entry: Entry,
    pub ctas: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs of a cluster, where there are clusters.
    pub cluster: Option<u32>,
    /// CTAs of the kernel that joins states; 0 where none does.
    pub joining: u32,
    /// Dynamic shared memory.
    pub shared: u32,
    /// Whether attention_split runs first, and writes what each CTA does.
    pub is_split_first: bool,
    /// Whether whole tiles are copied as boxes of tensors, where keys and values can be mapped.
    pub in_boxes: bool,
    pub scratch: Scratch,
}

#[derive(Clone, Copy, Default)]
pub struct Scratch {
    /// Bytes of the CTAs' shares, and of states.
    pub shares: usize,
    pub states: usize,
}

impl Scratch {
    pub fn of_states(states: usize) -> Scratch {
        Scratch { shares: 0, states }
    }
}

impl Plan {
    /// Whether the term of what lists leave out is joined in the same launch.
    pub fn has_term(&self) -> bool {
        matches!(self.entry, Entry::Decode128Term(..))
    }

    pub fn scratch(&self) -> usize {
        self.scratch.shares + self.scratch.states
    }

    /// The most counters that its kernels count with.
    pub fn counters(&self) -> usize {
        let items = self.params.work_items as usize;
        match self.entry {
            entry if entry.is_decode() || matches!(entry, Entry::Int4_128(..)) => items * WARPS as usize,
            Entry::Mla64(_) => 0,
            entry if entry.is_verify_short() => 0,
            // And one at which all CTAs arrive.
            _ => items * self.cluster.unwrap_or(1) as usize + 1,
        }
    }

    /// Places the plan in scratch that begins there, with counters.
    pub fn place(&mut self, scratch: *mut u8, counters: *mut u8) {
        self.params.cta_shares = if self.is_split_first { scratch } else { std::ptr::null_mut() };
        self.params.scratch = scratch.wrapping_add(self.scratch.shares);
        self.params.counters = counters;
    }
}

/// Lists of a call; own lists are of a query position each.
pub fn lists(job: &Job) -> usize {
    job.problem.positions.batch() * sequence_lists(job)
}

fn sequence_lists(job: &Job) -> usize {
    job.list.map_or(1, |list| list.per_head()) * job.problem.heads.kv
}

/// What the kernels of every variant are told. `None` where there is nothing to do.
pub fn describe(job: &Job) -> Result<Option<Params>> {
    let Problem { positions, kv, heads, scale, soft_cap, window, block_size, tree: _, int4 } = *job.problem;
    let Job { list, outputs, .. } = *job;
    if lists(job) == 0 || positions.count() == 0 {
        return Ok(None);
    }
    // No token lies past the capacity, so that a larger block means the same.
    let longest = kv.pages.capacity().min(MOST as usize).next_multiple_of(TILE as usize);
    let block = list.map_or(1, |_| block_size.min(longest.max(1)));
    let entries = list.map_or(0, |list| list.cap());
    let most = MOST as usize - 1;
    if block > most / 2 || entries.saturating_mul(block) > most || kv.pages.count > most || positions.count() > most {
        let text = format!("lists of {entries} blocks of {block} tokens are more than the CUDA kernels count");
        return Err(Error::unsupported(text));
    }
    let own_lists = list.is_some_and(|list| list.is_own());
    let unit_tokens = if job.partials.is_some() { (job.entries_per_partial * block) as u32 } else { TILE };
    let unit_tiles = unit_tokens.div_ceil(TILE);
    let pages_matter = kv.pages.table.is_some() || kv.pages.in_slots;
    let together = block_or_tile(list.is_some(), block) | if pages_matter { kv.pages.size } else { 0 };
    let together = together
        | int4.filter(|int4| int4.pages.table.is_some() || int4.pages.in_slots).map_or(0, |int4| int4.pages.size);
    let scale_of = |scale: &Option<Scale>| scale.as_ref().map_or(View::ABSENT, |Scale(t)| scale_view(t));
    let per_token = |scale: &Option<Scale>| scale.as_ref().is_some_and(|Scale(t)| t.rank() == 3);
    let list_view = |t: &Tensor| View::<4>::by_position(t);
    let ids = list.map_or(View::ABSENT, |list| {
        let ids = list_view(&list.ids);
        // An empty list is not no list.
        if ids.data.is_null() { View { data: list.counts.data(), ..ids } } else { ids }
    });
    Ok(Some(Params {
        kv_heads: Divisor::new(heads.kv as u32),
        list_positions: Divisor::new(if own_lists { positions.count() as u32 } else { 1 }),
        group: Divisor::new(heads.group() as u32),
        positions: positions.count() as u32,
        rows: (heads.group() * if own_lists { 1 } else { positions.count() }) as u32,
        own_lists: own_lists as u32,
        window: if window < most { window as u32 } else { 0 },
        token_capacity: kv.pages.capacity().min(most - block) as u32,
        list_capacity: entries as u32,
        pages: kv.pages.count as u32 + job.far_pages.map_or(0, |far| far.count),
        near_pages: kv.pages.count as u32,
        far: job.far_pages.map_or(0, |far| far.bytes),
        block: Divisor::new(block as u32),
        page: Divisor::new(kv.pages.size.max(1) as u32),
        log_granule: (together as u32 | TILE).trailing_zeros(),
        unit_tokens,
        least_units: (LEAST_TILES / unit_tiles).max(1),
        unit_tiles: Divisor::new(unit_tiles),
        unit_entries: Divisor::new(job.entries_per_partial as u32),
        half_value: Divisor::new(kv.value_dim() as u32 / 2),
        dim: heads.dim as u32,
        value_dim: kv.value_dim() as u32,
        scale,
        soft_cap: soft_cap.unwrap_or(0.0),
        out_type: type_of_out(outputs),
        q_type: element_code(positions.q.dtype),
        kv_type: element_code(kv.k.dtype),
        scales_per_token: (per_token(&kv.k_scale) || per_token(&kv.v_scale)) as u32,
        seq_lens: View::new(&kv.pages.seq_lens, [0]),
        q_lens: View::optional(&positions.lens, |t| View::new(t, [0])),
        counts: list.map_or(View::ABSENT, |list| View::by_position(&list.counts)),
        ids,
        table: View::optional(&kv.pages.table, |t| View::new(t, [0, 1])),
        q: View::by_position(&positions.q),
        k: View::new(&kv.k, [0, 1, 2, 3]),
        v: View::new(&kv.v, [0, 1, 2, 3]),
        partials: job.partials.map_or(StateView::ABSENT, StateView::of_partials),
        slots: list.and_then(|list| list.slots).map_or(View::ABSENT, |t| list_view(&t)),
        k_scale: scale_of(&kv.k_scale),
        v_scale: scale_of(&kv.v_scale),
        ..results(outputs)
    }))
}

/// Where results go, and nothing else.
pub fn results(outputs: &Outputs) -> Params {
    Params {
        out: View::optional(&outputs.out, View::by_position),
        lse: View::optional(&outputs.lse, View::by_position),
        sinks: View::optional(&outputs.sinks, |t| View::new(t, [0])),
        state: StateView::optional(&outputs.state, StateView::of_state),
        kept_past: View::optional(&outputs.kept_past, |t| View::new(t, [0])),
        ..Params::none()
    }
}

/// Tokens that surely lie side by side in a list's block, or without a list.
fn block_or_tile(has_list: bool, block: usize) -> usize {
    if has_list { block } else { TILE as usize }
}

/// A view of scales, which are [1], [Hk] or [pages, P, Hk].
fn scale_view(t: &Tensor) -> View<3> {
    match t.rank() {
        3 => View::new(t, [0, 1, 2]),
        _ => View::new(t, [NO_DIM, NO_DIM, 0]),
    }
}

/// The code of the type of `out`; 0 without.
pub fn type_of_out(outputs: &Outputs) -> u32 {
    outputs.out.as_ref().map_or(0, |out| element_code(out.dtype))
}

/// Rows of adjacent elements begin and end on 16 bytes.
pub fn is_copied_by_16(t: &Tensor) -> bool {
    is_copied_by(16, t)
}

/// Rows of adjacent elements begin and end on so many bytes.
pub fn is_copied_by(bytes: usize, t: &Tensor) -> bool {
    let last = t.rank() - 1;
    let is_whole = |d: usize| t.dim(d) <= 1 || t.byte_stride(d) % bytes as i64 == 0;
    t.stride(last) == 1
        && (t.dim(last) * t.dtype.bytes()).is_multiple_of(bytes)
        && (t.data() as usize).is_multiple_of(bytes)
        && (0..last).all(is_whole)
}

/// MLA: the values are the first channels of the keys.
pub fn values_are_keys(params: &Params) -> bool {
    params.k.data == params.v.data && params.k.step == params.v.step && params.value_dim <= params.dim
}
