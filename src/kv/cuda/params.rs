//! Parameters of the kernels of kernels/cache.

use super::super::{AppendRequest, CompactRequest, FarRuns, ResolveRequest, RowTables};
use crate::core::tensor::Tensor;
use crate::kv::options::Options;
use crate::ops::quantize::block::rotation_factor;
use crate::ops::views::BlockList;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{address, byte_stride, element_code, saturated};

kernel_struct! {
    /// Mirrors Tail of kernels/cache/params.cuh.
    #[derive(Clone, Copy)]
    pub struct Tail {
        newest: i32,
        first: i32,
        tokens: i32,
        unused: i32,
    }
}

impl Tail {
    pub const EMPTY: Tail = Tail { newest: -1, first: 0, tokens: 0, unused: 0 };
}

kernel_struct! {
    /// Mirrors Totals of kernels/cache/params.cuh.
    #[derive(Clone, Copy, Default)]
    pub struct Totals {
        pub hits: u64,
        pub misses: u64,
        pub fetched: u64,
        pub written: u64,
        pub evictions: u64,
        pub unused: u64,
        pub waits: u64,
        pub dropped: u64,
    }
}

kernel_struct! {
    /// Mirrors Clock of kernels/cache/params.cuh.
    #[derive(Clone, Copy, Default)]
    pub struct Clock {
        passed: u64,
        before: u64,
        searched: u64,
        searching: u64,
        claimed: u32,
        waiting: u32,
        hits: u32,
        misses: u32,
        now: u32,
        hand: u32,
        due: u32,
        tickets: u32,
        is_set: u32,
        left: u32,
        full: u32,
        written: u32,
        pub totals: Totals,
    }
}

impl Clock {
    /// Slots that nobody has named yet may be given away at once.
    pub fn new(hold: usize) -> Clock {
        Clock { now: hold as u32, ..Clock::default() }
    }
}

kernel_struct! {
    /// Mirrors Missed of kernels/cache/params.cuh.
    pub struct Missed {
        cell: *mut i32,
        host_run: u32,
    }
}

kernel_struct! {
    /// Mirrors Full of kernels/cache/params.cuh.
    pub struct Full {
        page: u32,
        block: u32,
    }
}

kernel_struct! {
    /// Mirrors ToCopy of kernels/cache/params.cuh.
    pub struct ToCopy {
        slot: u32,
        host_run: u32,
        since: u32,
    }
}

kernel_struct! {
    /// Mirrors Layer of kernels/cache/params.cuh.
    #[derive(Clone, Copy)]
    pub struct Layer {
        pub pool: *mut u8,
        pub slots_at: *mut u8,
        pub coded_tails: *mut u8,
        pub weights: *mut f32,
        pub host: *mut u8,
        pub clock: *mut Clock,
        pub tails: *mut Tail,
        pub homes: *mut u64,
        pub holds: *mut u64,
        pub named: *mut u32,
        pub to_copy: *mut ToCopy,
        pub claims: *mut Missed,
        pub others: *mut Missed,
        pub full: *mut Full,
        pub arrived: *mut u32,
        pub slots: u32,
        pub unused: u32,
    }
}

impl Layer {
    /// The address of the layer's totals: the rest of the clock is written by kernels that nobody waits for.
    pub fn totals(&self) -> u64 {
        self.clock as u64 + std::mem::offset_of!(Clock, totals) as u64
    }
}

kernel_struct! {
    /// Mirrors Cache of kernels/cache/params.cuh.
    #[derive(Clone, Copy)]
    pub struct Cache {
        pub layers: *mut Layer,
        pub table: *mut i32,
        pub lens: *mut i32,
        pub run: u64,
        pub tail_run: u64,
        pub slot_run: u64,
        pub parts: [u32; 4],
        pub token: [u32; 4],
        pub size: Divisor,
        pub heads: Divisor,
        pub layer_count: u32,
        pub max_sequences: u32,
        pub max_blocks: u32,
        pub first_slot: u32,
        pub hold: u32,
        pub is_coded: u32,
    }
}

impl Cache {
    /// Whether slots hold what codes stand for.
    pub fn is_decoded(&self) -> bool {
        self.slot_run != self.run
    }

    pub fn block_size(&self) -> usize {
        self.size.value as usize
    }

    pub fn kv_heads(&self) -> usize {
        self.heads.value as usize
    }

    /// Whether so many tokens may need a page again that holds tokens from before: they end four blocks on at least.
    pub fn may_spill(&self, tokens: usize) -> bool {
        tokens as u64 > 2 * self.size.value as u64 + 1
    }
}

kernel_struct! {
    /// Mirrors PartRows of kernels/cache/params.cuh.
    #[derive(Clone, Copy)]
    struct PartRows {
        data: *const u8,
        seq: i64,
        token: i64,
        head: i64,
        channel: i64,
    }
}

impl PartRows {
    fn new(t: Option<&Tensor>) -> PartRows {
        PartRows {
            data: address(t),
            seq: byte_stride(t, 0),
            token: byte_stride(t, 1),
            head: byte_stride(t, 2),
            channel: t.filter(|t| t.rank() == 4).map_or(0, |t| t.byte_stride(3)),
        }
    }

    /// Bytes, as a power of two, that a lane copies at once.
    fn log_unit(&self, t: Option<&Tensor>, part: u32, token: u32) -> u32 {
        const WIDEST: i64 = 16;
        let Some(t) = t else { return 0 };
        let element = t.dtype.bytes();
        let is_packed = t.rank() == 4 && t.stride(3) == 1;
        let starts = [self.data as i64, self.seq, self.token, self.head, part as i64, token as i64];
        if is_packed && starts.into_iter().all(|start| start % WIDEST == 0) {
            return WIDEST.trailing_zeros();
        }
        element.trailing_zeros()
    }
}

kernel_struct! {
    /// Mirrors AppendParams of kernels/cache/params.cuh.
    pub struct AppendParams {
        layer: Layer,
        cache: Cache,
        sequences: *const u8,
        begin: *const u8,
        lens: *const u8,
        sequences_seq: i64,
        begin_seq: i64,
        lens_seq: i64,
        rows: [PartRows; 4],
        most: u32,
        per_row: u32,
        pub window: u32,
        unused: u32,
        log_unit: [u32; 4],
        coding: Coding,
    }
}

impl AppendParams {
    /// No window: all tokens of each row.
    pub const ALL: u32 = u32::MAX;

    /// `coding` is read where blocks are coded.
    pub fn new(layer: &Layer, cache: &Cache, coding: Option<Coding>, r: &AppendRequest, per_row: u32) -> AppendParams {
        let (parts, lens) = (r.parts(), r.lens.as_ref());
        let rows = parts.map(PartRows::new);
        let unit = |n: usize| rows[n].log_unit(parts[n], cache.parts[n], cache.token[n]);
        AppendParams {
            layer: *layer,
            cache: *cache,
            sequences: r.sequences.data(),
            begin: r.begin.data(),
            lens: address(lens),
            sequences_seq: r.sequences.byte_stride(0),
            begin_seq: r.begin.byte_stride(0),
            lens_seq: byte_stride(lens, 0),
            rows,
            most: r.most_tokens() as u32,
            per_row,
            window: AppendParams::ALL,
            unused: 0,
            log_unit: [unit(0), unit(1), unit(2), unit(3)],
            coding: coding.unwrap_or_default(),
        }
    }
}

kernel_struct! {
    /// Mirrors ListRows of kernels/cache/params.cuh.
    #[derive(Clone, Copy)]
    struct ListRows {
        ids: *mut u8,
        counts: *mut u8,
        slots: *mut u8,
        ids_seq: i64,
        ids_position: i64,
        ids_head: i64,
        ids_entry: i64,
        counts_seq: i64,
        counts_position: i64,
        counts_head: i64,
        slots_seq: i64,
        slots_position: i64,
        slots_head: i64,
        slots_entry: i64,
    }
}

/// Strides of sequence, position and head; that of positions is 0 where they share a list.
fn list_steps(t: Option<&Tensor>, is_own: bool) -> [i64; 3] {
    if is_own { [0, 1, 2].map(|d| byte_stride(t, d)) } else { [byte_stride(t, 0), 0, byte_stride(t, 1)] }
}

impl ListRows {
    fn new(list: Option<&BlockList>) -> ListRows {
        let is_own = list.is_some_and(BlockList::is_own);
        let [ids, counts, slots] = list.map_or([None; 3], BlockList::tensors);
        let entry = |t: Option<&Tensor>| t.map_or(0, |t| t.byte_stride(t.rank() - 1));
        let [ids_seq, ids_position, ids_head] = list_steps(ids, is_own);
        let [counts_seq, counts_position, counts_head] = list_steps(counts, is_own);
        let [slots_seq, slots_position, slots_head] = list_steps(slots, is_own);
        ListRows {
            ids: address(ids),
            counts: address(counts),
            slots: address(slots),
            ids_seq,
            ids_position,
            ids_head,
            ids_entry: entry(ids),
            counts_seq,
            counts_position,
            counts_head,
            slots_seq,
            slots_position,
            slots_head,
            slots_entry: entry(slots),
        }
    }
}

kernel_struct! {
    /// Mirrors ResolveParams of kernels/cache/params.cuh.
    pub struct ResolveParams {
        layer: Layer,
        cache: Cache,
        sequences: *const u8,
        sequences_seq: i64,
        wanted: ListRows,
        resident: ListRows,
        missed: *mut u8,
        missed_seq: i64,
        missed_position: i64,
        missed_head: i64,
        heads: Divisor,
        positions: Divisor,
        cap: Divisor,
        pub entries: u32,
        first_far: u32,
        missed_again: *mut u8,
    }
}

impl ResolveParams {
    pub fn slots(&self) -> usize {
        self.layer.slots as usize
    }

    /// The request has at least one list; entries whose runs are not resident name these in host memory.
    pub fn of_far(layer: &Layer, cache: &Cache, r: &ResolveRequest, far: &FarRuns) -> ResolveParams {
        let FarRuns { first, missed_again } = *far;
        ResolveParams { first_far: first, missed_again: missed_again.cast(), ..ResolveParams::new(layer, cache, r) }
    }

    /// The request has at least one list.
    pub fn new(layer: &Layer, cache: &Cache, r: &ResolveRequest) -> ResolveParams {
        let missed = r.missed_counts.as_ref();
        let [missed_seq, missed_position, missed_head] = list_steps(missed, r.wanted.is_own());
        ResolveParams {
            layer: *layer,
            cache: Cache { hold: r.hold as u32, ..*cache },
            sequences: r.sequences.data(),
            sequences_seq: r.sequences.byte_stride(0),
            wanted: ListRows::new(Some(&r.wanted)),
            resident: ListRows::new(r.resident.as_ref()),
            missed: address(missed),
            missed_seq,
            missed_position,
            missed_head,
            heads: cache.heads,
            positions: Divisor::new(r.wanted.per_head() as u32),
            // No entry is divided where there is none.
            cap: if r.wanted.cap() == 0 { Divisor::NONE } else { Divisor::new(r.wanted.cap() as u32) },
            entries: if r.wanted.ids.is_empty() { 0 } else { r.wanted.ids.count() as u32 },
            first_far: 0,
            missed_again: std::ptr::null_mut(),
        }
    }
}

kernel_struct! {
    /// Mirrors FetchParams of kernels/cache/params.cuh.
    pub struct FetchParams {
        pub layer: Layer,
        pub cache: Cache,
        pub is_wait: u32,
        pub is_in_order: u32,
    }
}

kernel_struct! {
    /// Mirrors DecodeParams of kernels/cache/params.cuh.
    pub struct DecodeParams {
        pub fetch: FetchParams,
        pub coding: Coding,
    }
}

/// Blocks of a launch.
pub const MOST_BLOCKS: usize = 900;

kernel_struct! {
    /// Mirrors Blocks of kernels/cache/params.cuh.
    pub struct Blocks {
        of: [u32; MOST_BLOCKS],
        count: u32,
    }
}

impl Blocks {
    /// No more than there is room for.
    pub fn new(blocks: impl ExactSizeIterator<Item = u32>) -> Blocks {
        let mut given = Blocks { of: [0; MOST_BLOCKS], count: blocks.len() as u32 };
        given.of.iter_mut().zip(blocks).for_each(|(to, block)| *to = block);
        given
    }
}

kernel_struct! {
    /// Mirrors TableParams of kernels/cache/params.cuh.
    pub struct TableParams {
        pub cache: Cache,
        pub sequence: u32,
        pub first: u32,
        pub len: i32,
        pub begins: u32,
    }
}

kernel_struct! {
    /// Mirrors RowParams of kernels/cache/params.cuh.
    pub struct RowParams {
        cache: Cache,
        sequences: *const u8,
        sequences_seq: i64,
        blocks: *mut i32,
        tails: *mut i32,
        floors: *mut i32,
    }
}

impl RowParams {
    pub fn new(cache: &Cache, r: &RowTables) -> RowParams {
        RowParams {
            cache: *cache,
            sequences: r.sequences.data(),
            sequences_seq: byte_stride(Some(&r.sequences), 0),
            blocks: r.blocks,
            tails: r.tails,
            floors: r.floors,
        }
    }
}

kernel_struct! {
    /// Mirrors ForkParams of kernels/cache/params.cuh.
    pub struct ForkParams {
        pub cache: Cache,
        pub from: u32,
        pub to: u32,
        pub whole: u32,
        pub is_opened: u32,
        pub content: u32,
        pub tokens: u32,
    }
}

kernel_struct! {
    /// Mirrors Coding of kernels/cache/params.cuh.
    #[derive(Clone, Copy, Default)]
    pub struct Coding {
        parts: [u32; 4],
        mean: u32,
        pub dim: u32,
        pub value_dim: u32,
        pub dtype: u32,
        factor: f32,
        value_factor: f32,
    }
}

impl Coding {
    /// How a cache codes that has INT4.
    pub fn new(options: &Options) -> Coding {
        let (run, [dim, value_dim]) = (options.run(), options.dims);
        Coding {
            parts: run.parts.map(|part| part.begin as u32),
            mean: run.mean as u32,
            dim: dim as u32,
            value_dim: value_dim as u32,
            dtype: element_code(options.dtype),
            factor: rotation_factor(dim),
            value_factor: rotation_factor(value_dim),
        }
    }
}

kernel_struct! {
    /// Mirrors CodeParams of kernels/cache/params.cuh.
    pub struct CodeParams {
        pub layer: Layer,
        pub cache: Cache,
        pub coding: Coding,
    }
}

kernel_struct! {
    /// Mirrors OpenParams of kernels/cache/params.cuh.
    pub struct OpenParams {
        pub fork: ForkParams,
        pub coding: Coding,
    }
}

kernel_struct! {
    /// Mirrors CompactPathsParams of kernels/cache/params.cuh.
    pub struct CompactPathsParams {
        cache: Cache,
        coding: Coding,
        sequences: *const u8,
        bases: *const u8,
        path: *const u8,
        accepted: *const u8,
        sequences_seq: i64,
        bases_seq: i64,
        path_seq: i64,
        path_place: i64,
        accepted_seq: i64,
        batch: Divisor,
        places: u32,
        base_bytes: u32,
        unused: u32,
    }
}

impl CompactPathsParams {
    /// The request has at least one row.
    pub fn new(cache: &Cache, coding: Option<Coding>, r: &CompactRequest) -> CompactPathsParams {
        CompactPathsParams {
            cache: *cache,
            coding: coding.unwrap_or_default(),
            sequences: r.sequences.data(),
            bases: r.bases.data(),
            path: r.path.data(),
            accepted: address(r.accepted.as_ref()),
            sequences_seq: byte_stride(Some(&r.sequences), 0),
            bases_seq: byte_stride(Some(&r.bases), 0),
            path_seq: byte_stride(Some(&r.path), 0),
            path_place: byte_stride(Some(&r.path), 1),
            accepted_seq: byte_stride(r.accepted.as_ref(), 0),
            batch: Divisor::new(r.batch() as u32),
            places: saturated(r.places()),
            base_bytes: r.bases.dtype.bytes() as u32,
            unused: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            Tail::layout("Tail"),
            Totals::layout("Totals"),
            Clock::layout("Clock"),
            Missed::layout("Missed"),
            Full::layout("Full"),
            ToCopy::layout("ToCopy"),
            Layer::layout("Layer"),
            Cache::layout("Cache"),
        ];
        let of_calls = [
            PartRows::layout("PartRows"),
            AppendParams::layout("AppendParams"),
            ListRows::layout("ListRows"),
            ResolveParams::layout("ResolveParams"),
            FetchParams::layout("FetchParams"),
            DecodeParams::layout("DecodeParams"),
            Blocks::layout("Blocks"),
            TableParams::layout("TableParams"),
            RowParams::layout("RowParams"),
            ForkParams::layout("ForkParams"),
            Coding::layout("Coding"),
            CodeParams::layout("CodeParams"),
            OpenParams::layout("OpenParams"),
            CompactPathsParams::layout("CompactPathsParams"),
        ];
        layout::check("cache", file!(), &[&structs[..], &of_calls].concat());
    }
}
