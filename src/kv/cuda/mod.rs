//! The cache on CUDA: slots and bookkeeping on the device, whole blocks in mapped host memory.
//!
//! The host decides which blocks a sequence has (`add` … `free`: calls between steps) and enqueues that on the caller's stream.
//! All that a step decides is decided on the device, from tensors that lie there, so that a step can be captured and replayed:
//!
//! | decided                                         | where it is kept                                             |
//! |---|---|
//! | blocks of a sequence                            | `table`, `lens`: by host calls                               |
//! | where a tail ends, which of its pages are full  | `tails`, `full`: by append; the end also by compaction       |
//! | which slot a block is in, and since when        | `homes`, `holds`, `named`: by resolve, and by append for the |
//! |                                                 | block that leaves a tail                                     |
//! | where copies are to be looked for               | `passed`, `before`: by resolve; `searched`: by fetch         |
//! | what is there                                   | `homes`, `holds`: by fetch, when its copies have landed      |
//!
//! Calls of one layer follow each other on the device; so do the host's calls, which are about every layer. Copies run at the same
//! time: write-backs on one side stream of the cache, fetches of even and of odd layers on one each. A decoder that waits at once for what it has
//! resolved fetches on its own stream, where nothing else of the layer runs meanwhile; a launch that finds nothing to copy ends there at once.
//! Where attention reads missed blocks in host memory, these get their slots on a side stream, too, which the layer's next call waits for.
//! Copies meet nobody who uses the same memory, because:
//!
//! - A fetch begins after what the caller's stream held: whoever reads a slot that a resolve gave away comes before the copy.
//!   Fetches of a layer follow each other, so that a copy for a slot's earlier block ends before that of the later one begins.
//! - A fetch copies what a slot holds when it finds it, once, and marks it as there by comparing the resolve that gave it
//!   (`Home::since`): a copy that comes late finds another resolve, or none.
//! - A fetch sees the writes of a resolve that runs at the same time in any order. It copies a slot that it sees as given; if it does
//!   not see the slot's home yet, it does not mark the slot, and the next fetch finds it again. The next fetch searches all slots that may have been
//!   given by a resolve of which this one could not be certain that it had ended: those that the clock's hand went over since the resolve before
//!   the last one that was seen.
//! - An append takes a slot only if its content is resident, or if it never had any: then every copy to it has ended, and a fetch
//!   changes none of its words. A slot whose block was dropped before its copy landed waits for the next resolve (`DROPPED`).
//! - A write-back begins after its append, and ends before the layer's next append and before a compaction, a fork or a truncation: before any
//!   resolve that may name its blocks as stored, since they are in the tail until then. (An append of more than S tokens
//!   waits for its own, and a compaction writes back on the stream.) So a fetch may run late and copy what was asked for after it was called.
//!
//! In a capture the copies are nodes that branch off the stream (runtime/cuda/side_stream.rs). A graph cannot wait for what was begun
//! outside of it: its stream waits, by `vwd_kv_cache_wait`, before the graph is launched.

mod memory;
mod params;
mod plan;
mod tuning;

use plan::check_size;
pub use plan::{Bookkeeping, Tables};

use super::options::{CacheOptions, Options};
use super::pinned::Pinned;
use super::sequences::Sequences;
use super::store::{Changed, Counters, Store};
use super::{AppendRequest, CompactRequest, FarRuns, ResolveRequest, RowTables};
use crate::core::allocate::{collected, filled, reserved};
use crate::core::status::{Error, Result};
use crate::ops::quantize::rows;
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};
use crate::runtime::{On, Session};
use memory::{Memory, Streams, cuda};
use params::{
    AppendParams, Blocks, Cache, Clock, CodeParams, Coding, CompactPathsParams, DecodeParams, FetchParams, ForkParams,
    Layer, MOST_BLOCKS, OpenParams, ResolveParams, RowParams, TableParams, Tail, Totals,
};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

pub struct Kernels {
    find: Kernel,
    give: Kernel,
    /// CTAs of the largest cluster in which the device runs `give`.
    most_give: u32,
    append: Kernel,
    append_decoded: Kernel,
    spill: Kernel,
    fetch: Kernel,
    fetch_grid: Grid,
    fetch_decoded: Kernel,
    decoded_grid: Grid,
    write_back: Kernel,
    table: Kernel,
    open: Kernel,
    fork: Kernel,
    truncate: Kernel,
    drop: Kernel,
    rows: Kernel,
    code: Kernel,
    /// For rows of 64 and of 128 channels of 16 bits.
    code_rows: [Kernel; 2],
    reopen: Kernel,
    compact: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("cache/resolve", compute_80, compute_90),
        source!("cache/append", compute_80, compute_90),
        source!("cache/copies", compute_80, compute_90),
        source!("cache/sequences", compute_80),
        source!("cache/coded", compute_80),
        source!("cache/code_rows", compute_80),
        source!("cache/compact", compute_80),
    ];

    fn find(modules: &Modules) -> Result<Kernels> {
        let (resolve, sequences) = ("cache/resolve", "cache/sequences");
        let mut fetch = modules.kernel("cache/copies", "cache_fetch")?;
        let mut fetch_grid = plain(tuning::PLAIN_CTAS, tuning::FETCH_THREADS);
        if modules.facts().capability >= 90 {
            fetch.allow_shared(tuning::FETCH_ROOM)?;
            fetch = fetch.sharing(tuning::FETCH_ROOM);
            fetch_grid = Grid { ctas: tuning::BULK_CTAS, kind: fetch.in_pairs(tuning::FETCH_THREADS), ..fetch_grid };
        }
        let fetch_decoded = modules.kernel("cache/coded", "cache_fetch_decoded")?;
        fetch_decoded.allow_shared(tuning::MOST_STAGES)?;
        let mut decoded_grid = plain(tuning::DECODE_CTAS, tuning::DECODE_THREADS);
        if modules.facts().capability >= 90 {
            decoded_grid.kind = fetch_decoded.sharing(tuning::MOST_STAGES).in_pairs(tuning::DECODE_THREADS);
        }
        let code_rows =
            [modules.kernel("cache/code_rows", "cache_code_64")?, modules.kernel("cache/code_rows", "cache_code_128")?];
        for kernel in &code_rows {
            kernel.allow_shared(rows::most_shared(modules.facts()))?;
        }
        let give = modules.kernel(resolve, "cache_give")?;
        let sizes = if modules.facts().capability >= 90 { &[LARGEST_CLUSTER, 4, 2][..] } else { &[] };
        let formed = |&&size: &&u32| give.active_clusters(size, tuning::MOST_GIVE_THREADS) > 0;
        Ok(Kernels {
            find: modules.kernel(resolve, "cache_find")?,
            give,
            most_give: sizes.iter().find(formed).copied().unwrap_or(1),
            append: modules.kernel("cache/append", "cache_append")?,
            append_decoded: modules.kernel("cache/append", "cache_append_decoded")?,
            spill: modules.kernel("cache/append", "cache_spill")?,
            fetch,
            fetch_grid,
            fetch_decoded,
            decoded_grid,
            write_back: modules.kernel("cache/copies", "cache_write_back")?,
            table: modules.kernel(sequences, "cache_table")?,
            open: modules.kernel(sequences, "cache_open")?,
            fork: modules.kernel(sequences, "cache_fork")?,
            truncate: modules.kernel(sequences, "cache_truncate")?,
            drop: modules.kernel(sequences, "cache_drop")?,
            rows: modules.kernel(sequences, "cache_rows")?,
            code: modules.kernel("cache/coded", "cache_code")?,
            code_rows,
            reopen: modules.kernel("cache/coded", "cache_reopen")?,
            compact: modules.kernel("cache/compact", "cache_compact")?,
        })
    }
}

/// All layers, with what the device knows of them.
pub struct Layers {
    session: Arc<Session>,
    // Before the memory that its kernels use: it waits for them.
    streams: Streams,
    cache: Cache,
    /// How blocks are coded, if they are.
    coding: Option<Coding>,
    layers: Vec<OneLayer>,
    tail_table: *mut i32,
    _tables: Memory,
}

// SAFETY: addresses of its own memory, which only the device reads.
unsafe impl Send for Layers {}

struct OneLayer {
    params: Layer,
    fetched: Fetched,
    is_captured: bool,
    /// How often the host waited and found copies under way.
    waits: u64,
    _pool: Memory,
    _bookkeeping: Memory,
    _host: Pinned,
}

/// Where the last fetch was called, if nothing was resolved since.
#[derive(Clone, Copy, PartialEq)]
enum Fetched {
    No,
    /// In a capture of that identity, or in none.
    In(Option<u64>),
}

impl OneLayer {
    fn create(session: &Arc<Session>, options: &Options, weights: Option<&[f32]>) -> Result<OneLayer> {
        let plan = Bookkeeping::of(options);
        let host = Pinned::alloc(session, options.host_bytes())?;
        let pool = Memory::alloc(session, options.pool_bytes())?;
        let bookkeeping = Memory::alloc(session, plan.bytes)?;
        let base = bookkeeping.address();
        let tails = filled(Tail::EMPTY, options.max_sequences, "the tails of a KV cache")?;
        let ones = filled(1.0, if weights.is_some() { 0 } else { options.weights() }, "the weights of a KV cache")?;
        cuda(session).with_copy_stream(|stream| {
            // SAFETY: all of it lies in the bookkeeping, which nobody uses yet.
            unsafe {
                stream.fill(base, 0, plan.homes as usize)?;
                stream.fill(base + plan.homes, 0xff, (plan.bytes - plan.homes) as usize)?;
                stream.write(base + plan.clock, &[Clock::new(options.hold)])?;
                stream.write(base + plan.weights, weights.unwrap_or(&ones[..]))?;
                stream.write(base + plan.tails, &tails)
            }
        })?;
        Ok(OneLayer {
            params: plan.layer(options, pool.at(0), host.data(), base),
            fetched: Fetched::No,
            is_captured: false,
            waits: 0,
            _pool: pool,
            _bookkeeping: bookkeeping,
            _host: host,
        })
    }
}

/// The call's place on the caller's stream.
fn enqueue<'o, 's>(on: &'o On<'s>) -> &'o Enqueue<'s> {
    let On::Cuda(enqueue) = on else { unreachable!("a cache of a CUDA session") };
    enqueue
}

fn param<T>(params: &T) -> *const c_void {
    (&raw const *params).cast()
}

fn plain(ctas: usize, threads: u32) -> Grid {
    Grid { ctas: ctas as u32, threads, kind: Kind::Plain }
}

impl Layers {
    /// Tells `progress` how many layers there are so far.
    pub fn create(session: &Arc<Session>, all: &CacheOptions, progress: impl Fn(usize)) -> Result<Layers> {
        all.kinds().try_for_each(|(options, _)| check_size(&options))?;
        let options = &all.fewest;
        let mut layers = reserved(options.layers, "the layers of a KV cache")?;
        for (n, options) in all.layers().enumerate() {
            layers.push(OneLayer::create(session, &options, all.weights(n))?);
            progress(n + 1);
        }
        let streams = Streams::create(session, options.layers)?;
        let plan = Tables::of(options);
        let tables = Memory::alloc(session, plan.bytes)?;
        let (base, tail_table) = (tables.address(), options.tail_table()?);
        let params = collected(layers.iter().map(|layer| layer.params), "the layers of a KV cache")?;
        cuda(session).with_copy_stream(|stream| {
            // SAFETY: all of it lies in the tables, which nobody uses yet.
            unsafe {
                stream.write(base + plan.layers, &params)?;
                stream.write(base + plan.tail_table, &tail_table)?;
                stream.fill(base + plan.table, 0xff, (plan.bytes - plan.table) as usize)
            }
        })?;
        Ok(Layers {
            session: session.clone(),
            streams,
            cache: plan.cache(options, base),
            coding: options.is_coded.then(|| Coding::new(options)),
            layers,
            tail_table: tables.at(plan.tail_table),
            _tables: tables,
        })
    }

    /// Writes the blocks of a sequence from number `first` on, and how many it has then, in as many launches as that takes.
    fn write_table(
        &self,
        enqueue: &Enqueue,
        sequence: usize,
        first: usize,
        blocks: &[i32],
        begins: bool,
    ) -> Result<()> {
        let (kernels, mut at): (&Kernels, _) = (enqueue.kernels(), first);
        loop {
            let end = blocks.len().min(at + MOST_BLOCKS);
            let given = Blocks::new(blocks[at..end].iter().map(|&block| block as u32));
            let params = TableParams {
                cache: self.cache,
                sequence: sequence as u32,
                first: at as u32,
                len: blocks.len() as i32,
                begins: begins as u32,
            };
            // SAFETY: the kernel's structs; the sequence has a row, which has places for its blocks.
            unsafe {
                let grid = plain(1, tuning::SEQUENCE_THREADS);
                enqueue.launch(&kernels.table, grid, [param(&params), param(&given)])?;
            }
            at = end;
            if at == blocks.len() {
                return Ok(());
            }
        }
    }

    fn fork_params(&self, from: usize, changed: &Changed) -> ForkParams {
        ForkParams {
            cache: self.cache,
            from: from as u32,
            to: changed.sequence as u32,
            whole: changed.whole as u32,
            is_opened: changed.opened.is_some() as u32,
            content: changed.opened.map_or(0, |opened| opened.content),
            tokens: changed.tokens as u32,
        }
    }

    /// Copies the tokens of the block that a sequence goes on with, if there is one, to its tail: from the tail of sequence `from`, or from host
    /// memory. It waits for write-backs first, so that host memory has what they write.
    fn open(&self, enqueue: &Enqueue, from: usize, changed: &Changed) -> Result<()> {
        for layer in 0..self.layers.len() {
            self.streams.write.join(enqueue, layer)?;
        }
        let (kernels, params): (&Kernels, _) = (enqueue.kernels(), self.fork_params(from, changed));
        let ctas = self.layers.len() * self.cache.kv_heads();
        if let Some(coding) = self.coding {
            // After a fork there is the first block to copy, too.
            if changed.opened.is_none() && (from == changed.sequence || changed.whole == 0) {
                return Ok(());
            }
            let params = OpenParams { fork: params, coding };
            // SAFETY: as below.
            return unsafe { enqueue.launch(&kernels.reopen, plain(ctas, tuning::CODE_THREADS), [param(&params)]) };
        }
        if changed.opened.is_none() {
            return Ok(());
        }
        // SAFETY: the kernel's struct; the sequences and their blocks exist.
        unsafe { enqueue.launch(&kernels.open, plain(ctas, tuning::SEQUENCE_THREADS), [param(&params)]) }
    }

    /// The CTAs that append a row; `tokens` counts those of each KV head. Each KV head has one at least, which copies the run of a block that leaves
    /// the tail.
    fn per_row(&self, enqueue: &Enqueue, r: &AppendRequest, tokens: usize) -> usize {
        let resident = enqueue.facts().multiprocessors as usize * tuning::RESIDENT_CTAS;
        tokens.div_ceil(tuning::APPEND_WARPS).max(self.cache.kv_heads()).min(resident.div_ceil(r.batch()))
    }

    /// Appends where blocks are coded. Up to S tokens end at most one block that had no place before them, which is coded beside the stream. More
    /// tokens are appended block by block on the stream, since the codes of each have to be there before its page is written again.
    ///
    /// # Safety
    /// The request's tensors are valid until the stream has passed.
    unsafe fn append_coded(&mut self, enqueue: &Enqueue, r: &AppendRequest, coding: Coding) -> Result<()> {
        let kernels: &Kernels = enqueue.kernels();
        let (heads, size, most) = (self.cache.kv_heads(), self.cache.block_size(), r.most_tokens());
        let layer = self.layers[r.layer].params;
        let append = if self.cache.is_decoded() { &kernels.append_decoded } else { &kernels.append };
        let per_row = self.per_row(enqueue, r, most.min(size) * heads);
        let grid = Grid { kind: enqueue.dependent_kind(), ..plain(r.batch() * per_row, tuning::APPEND_THREADS) };
        let mut params = AppendParams::new(&layer, &self.cache, self.coding, r, per_row as u32);
        let code = CodeParams { layer, cache: self.cache, coding };
        let (coder, to_code) = self.coder(kernels, enqueue.facts(), &coding);
        // This append may write the pages that the last one listed, once they have been read and their codes made.
        self.streams.write.join(enqueue, r.layer)?;
        self.streams.give.join(enqueue, r.layer)?;
        // SAFETY: the kernels' structs; the caller keeps the tensors valid until the stream has passed, and the cache its memory.
        unsafe {
            if most <= size {
                enqueue.launch(append, grid, [param(&params)])?;
                return self.streams.write.launch(enqueue, r.layer, &coder, to_code, [param(&code)]);
            }
            for window in 0..(most - 1).div_ceil(size) + 1 {
                params.window = window as u32;
                enqueue.launch(append, grid, [param(&params)])?;
                enqueue.launch(&coder, to_code, [param(&code)])?;
            }
        }
        Ok(())
    }

    /// The kernel that codes whole blocks, and its grid.
    fn coder(&self, kernels: &Kernels, facts: &cuda::Facts, coding: &Coding) -> (Kernel, Grid) {
        match rows::find_cache(
            facts,
            [coding.dim, coding.value_dim].map(|dim| dim as usize),
            coding.dtype,
            self.cache.block_size(),
        ) {
            Some((n, shared)) => (kernels.code_rows[n].sharing(shared), plain(tuning::CODE_CTAS, rows::CACHE_THREADS)),
            None => (kernels.code, plain(tuning::CODE_CTAS, tuning::CODE_THREADS)),
        }
    }

    fn find(&self, enqueue: &Enqueue, layer: usize, lists: usize, params: &ResolveParams) -> Result<()> {
        let kernels: &Kernels = enqueue.kernels();
        self.streams.give.join(enqueue, layer)?;
        let grid = Grid { kind: enqueue.dependent_kind(), ..plain(lists, tuning::FIND_THREADS) };
        // SAFETY: the kernel's struct; the caller keeps the tensors valid until the stream has passed, and the cache its memory.
        unsafe { enqueue.launch(&kernels.find, grid, [param(params)]) }
    }

    /// Follows `find`, on the same stream or beside it. On the same one both kernels wait before they write. What `give` reads before it waits was ready
    /// before `find` let it begin, since `find` waits first. Beside the stream it ends before anything else that looks at the layer's slots, but for
    /// attention and for fetches that were begun before.
    fn give(&mut self, enqueue: &Enqueue, layer: usize, params: &ResolveParams, is_beside: bool) -> Result<()> {
        let kernels: &Kernels = enqueue.kernels();
        let (ctas, threads) = tuning::give(params.slots(), params.entries as usize, kernels.most_give);
        let kind = match (ctas, is_beside) {
            (1, false) => enqueue.dependent_kind(),
            (1, true) => Kind::Plain,
            (_, false) => Kind::DependentClusters(ctas),
            (_, true) => Kind::Clusters(ctas),
        };
        let (grid, params) = (Grid { ctas, threads, kind }, [param(params)]);
        // SAFETY: as in `find`.
        unsafe {
            match is_beside {
                true => self.streams.give.launch(enqueue, layer, &kernels.give, grid, params)?,
                false => enqueue.launch(&kernels.give, grid, params)?,
            }
        }
        let layer = &mut self.layers[layer];
        layer.fetched = Fetched::No;
        layer.is_captured |= enqueue.is_capturing()?;
        Ok(())
    }

    fn copies(&mut self, enqueue: &Enqueue, layer: usize, is_wait: bool) -> Result<()> {
        self.streams.give.join(enqueue, layer)?;
        let kernels: &Kernels = enqueue.kernels();
        let (stream, of_layer) = (self.streams.fetch(layer), self.layers[layer].params);
        let fetch = FetchParams { layer: of_layer, cache: self.cache, is_wait: is_wait as u32, is_in_order: 0 };
        // SAFETY: the kernels' structs; the layer's memory lives until the stream has passed.
        unsafe {
            let Some(coding) = self.coding.filter(|_| self.cache.is_decoded()) else {
                return stream.launch(enqueue, layer, &kernels.fetch, kernels.fetch_grid, [param(&fetch)]);
            };
            let kernel = kernels.fetch_decoded.sharing(2 * self.cache.run as u32);
            let params = DecodeParams { fetch, coding };
            stream.launch(enqueue, layer, &kernel, kernels.decoded_grid, [param(&params)])
        }
    }

    /// As `copies`, on the caller's stream. Where there is nothing to copy each CTA sees that at once.
    fn copies_in_order(&self, enqueue: &Enqueue, layer: usize) -> Result<()> {
        let (kernels, of_layer): (&Kernels, _) = (enqueue.kernels(), self.layers[layer].params);
        let fetch = FetchParams { layer: of_layer, cache: self.cache, is_wait: 1, is_in_order: 1 };
        // SAFETY: as in `copies`.
        unsafe {
            let Some(coding) = self.coding.filter(|_| self.cache.is_decoded()) else {
                let kind = match kernels.fetch_grid.kind {
                    Kind::Clusters(size) => Kind::DependentClusters(size),
                    _ => enqueue.dependent_kind(),
                };
                return enqueue.launch(&kernels.fetch, Grid { kind, ..kernels.fetch_grid }, [param(&fetch)]);
            };
            let kernel = kernels.fetch_decoded.sharing(2 * self.cache.run as u32);
            enqueue.launch(&kernel, kernels.decoded_grid, [param(&DecodeParams { fetch, coding })])
        }
    }
}

impl Store for Layers {
    fn admit(&self, on: &On) -> Result<()> {
        match enqueue(on).is_capturing()? {
            true => {
                Err(Error::argument("stream", "a stream that is capturing", "one that is not: the call is the host's"))
            }
            false => Ok(()),
        }
    }

    fn add(&mut self, on: &On, sequence: usize) -> Result<()> {
        self.write_table(enqueue(on), sequence, 0, &[], true)
    }

    fn extend(&mut self, on: &On, extended: &Changed) -> Result<()> {
        self.write_table(enqueue(on), extended.sequence, extended.whole, extended.blocks, false)
    }

    fn fork(&mut self, on: &On, parent: usize, child: &Changed) -> Result<()> {
        let (enqueue, params) = (enqueue(on), self.fork_params(parent, child));
        let kernels: &Kernels = enqueue.kernels();
        self.open(enqueue, parent, child)?;
        // SAFETY: the kernel's struct; both sequences have rows.
        unsafe { enqueue.launch(&kernels.fork, plain(1, tuning::SEQUENCE_THREADS), [param(&params)])? };
        self.write_table(enqueue, child.sequence, child.whole, child.blocks, false)
    }

    fn truncate(&mut self, on: &On, truncated: &Changed) -> Result<()> {
        let (enqueue, params) = (enqueue(on), self.fork_params(truncated.sequence, truncated));
        let kernels: &Kernels = enqueue.kernels();
        self.open(enqueue, truncated.sequence, truncated)?;
        // SAFETY: the kernel's struct; the sequence has tails.
        unsafe { enqueue.launch(&kernels.truncate, plain(1, tuning::SEQUENCE_THREADS), [param(&params)])? };
        self.write_table(enqueue, truncated.sequence, truncated.whole, truncated.blocks, false)
    }

    fn free(&mut self, on: &On, sequence: usize) -> Result<()> {
        let (enqueue, none) = (enqueue(on), Blocks::new([].into_iter()));
        let kernels: &Kernels = enqueue.kernels();
        let params = TableParams { cache: self.cache, sequence: sequence as u32, first: 0, len: -1, begins: 0 };
        // SAFETY: the kernel's structs; the sequence has a row.
        unsafe { enqueue.launch(&kernels.table, plain(1, tuning::SEQUENCE_THREADS), [param(&params), param(&none)]) }
    }

    fn drop_blocks(&mut self, on: &On, blocks: &[u32]) -> Result<()> {
        let enqueue = enqueue(on);
        let kernels: &Kernels = enqueue.kernels();
        self.streams.give.join_all(enqueue)?;
        for some in blocks.chunks(MOST_BLOCKS) {
            let given = Blocks::new(some.iter().copied());
            let each = some.len() * self.layers.len() * self.cache.kv_heads();
            let ctas = each.div_ceil(tuning::SEQUENCE_THREADS as usize).min(tuning::DROP_CTAS);
            // SAFETY: the kernel's structs; the blocks are the cache's.
            unsafe {
                let grid = plain(ctas, tuning::SEQUENCE_THREADS);
                enqueue.launch(&kernels.drop, grid, [param(&self.cache), param(&given)])?;
            }
        }
        Ok(())
    }

    unsafe fn append(&mut self, on: &On, _: &Sequences, r: &AppendRequest) -> Result<()> {
        if r.is_empty() {
            return Ok(());
        }
        let enqueue = enqueue(on);
        let kernels: &Kernels = enqueue.kernels();
        let (heads, layer) = (self.cache.kv_heads(), self.layers[r.layer].params);
        let tokens = r.most_tokens().saturating_mul(heads);
        if tokens >= 1 << 30 {
            let text =
                format!("k: {} tokens of {heads} KV heads; CUDA takes fewer than 2^30 together", r.most_tokens());
            return Err(Error::unsupported(text));
        }
        if let Some(coding) = self.coding {
            // SAFETY: says the caller.
            return unsafe { self.append_coded(enqueue, r, coding) };
        }
        // The pages that the last append listed, and may be written now, have been read.
        self.streams.write.join(enqueue, r.layer)?;
        self.streams.give.join(enqueue, r.layer)?;
        let per_row = self.per_row(enqueue, r, tokens);
        let params = AppendParams::new(&layer, &self.cache, None, r, per_row as u32);
        // SAFETY: the kernels' structs; the caller keeps the tensors valid until the stream has passed, and the cache its memory.
        unsafe {
            if self.cache.may_spill(r.most_tokens()) {
                enqueue.launch(&kernels.spill, plain(r.batch() * heads, tuning::APPEND_THREADS), [param(&params)])?;
            }
            let grid = Grid { kind: enqueue.dependent_kind(), ..plain(r.batch() * per_row, tuning::APPEND_THREADS) };
            enqueue.launch(&kernels.append, grid, [param(&params)])?;
            let params = FetchParams { layer, cache: self.cache, is_wait: 0, is_in_order: 0 };
            let grid = plain(tuning::WRITE_CTAS as usize, tuning::WRITE_THREADS);
            self.streams.write.launch(enqueue, r.layer, &kernels.write_back, grid, [param(&params)])?;
        }
        // Some of its blocks are in no tail any more.
        if r.most_tokens() > self.cache.block_size() {
            self.streams.write.join(enqueue, r.layer)?;
        }
        Ok(())
    }

    unsafe fn compact(&mut self, on: &On, _: &Sequences, r: &CompactRequest) -> Result<()> {
        let (enqueue, of_row) = (enqueue(on), self.layers.len() * self.cache.kv_heads());
        if r.batch() == 0 || r.places() == 0 {
            return Ok(());
        }
        let ctas = r.batch().saturating_mul(of_row);
        if ctas > i32::MAX as usize {
            let text =
                format!("sequences: {} rows of {of_row} layers and KV heads; CUDA takes up to 2^31 − 1", r.batch());
            return Err(Error::unsupported(text));
        }
        // The pages whose tokens move have been read.
        self.streams.write.join_all(enqueue)?;
        let (kernels, params): (&Kernels, _) =
            (enqueue.kernels(), CompactPathsParams::new(&self.cache, self.coding, r));
        // SAFETY: the kernel's struct; the caller keeps the tensors valid until the stream has passed, and the cache its memory.
        unsafe { enqueue.launch(&kernels.compact, plain(ctas, tuning::CODE_THREADS), [param(&params)]) }
    }

    unsafe fn resolve(&mut self, on: &On, _: &Sequences, r: &ResolveRequest) -> Result<()> {
        let lists = r.lists().count();
        if r.is_empty() || lists == 0 {
            return Ok(());
        }
        if lists > i32::MAX as usize {
            return Err(Error::unsupported(format!("wanted.counts: {lists} lists; CUDA takes up to 2^31 − 1")));
        }
        let params = ResolveParams::new(&self.layers[r.layer].params, &self.cache, r);
        self.find(enqueue(on), r.layer, lists, &params)?;
        self.give(enqueue(on), r.layer, &params, false)
    }

    unsafe fn find_far(&mut self, on: &On, r: &ResolveRequest, far: &FarRuns) -> Result<()> {
        let lists = r.lists().count();
        if r.is_empty() || lists == 0 {
            return Ok(());
        }
        let params = ResolveParams::of_far(&self.layers[r.layer].params, &self.cache, r, far);
        self.find(enqueue(on), r.layer, lists, &params)
    }

    unsafe fn give_far(&mut self, on: &On, r: &ResolveRequest, far: &FarRuns) -> Result<()> {
        if r.is_empty() || r.lists().count() == 0 {
            return Ok(());
        }
        let params = ResolveParams::of_far(&self.layers[r.layer].params, &self.cache, r, far);
        self.give(enqueue(on), r.layer, &params, true)
    }

    unsafe fn row_tables(&mut self, on: &On, _: &Sequences, r: &RowTables) -> Result<()> {
        let (enqueue, batch) = (enqueue(on), r.sequences.dim(0));
        let kernels: &Kernels = enqueue.kernels();
        if batch == 0 {
            return Ok(());
        }
        let params = RowParams::new(&self.cache, r);
        // SAFETY: the kernel's struct; the caller keeps the memory valid until the stream has passed.
        unsafe { enqueue.launch(&kernels.rows, plain(batch, tuning::SEQUENCE_THREADS), [param(&params)]) }
    }

    fn fetch(&mut self, on: &On, layer: usize) -> Result<()> {
        let enqueue = enqueue(on);
        self.copies(enqueue, layer, false)?;
        self.layers[layer].fetched = Fetched::In(enqueue.capture()?);
        Ok(())
    }

    fn join_fetch(&mut self, on: &On, layer: usize) -> Result<()> {
        let enqueue = enqueue(on);
        match self.layers[layer].fetched == Fetched::In(enqueue.capture()?) {
            true => self.streams.fetch(layer).join(enqueue, layer),
            false => Ok(()),
        }
    }

    fn wait(&mut self, on: &On, layer: usize) -> Result<()> {
        let enqueue = enqueue(on);
        let capture = enqueue.capture()?;
        let OneLayer { fetched, is_captured, .. } = self.layers[layer];
        // A graph may have been replayed that asks for more; one that is being captured has no such graph inside.
        let is_begun = fetched == Fetched::In(capture) && (capture.is_some() || !is_captured);
        if !is_begun {
            self.copies(enqueue, layer, true)?;
            self.layers[layer].fetched = Fetched::In(capture);
        } else if capture.is_none() {
            self.layers[layer].waits += self.streams.fetch(layer).is_busy(layer) as u64;
        }
        self.streams.write.join(enqueue, layer)?;
        self.streams.give.join(enqueue, layer)?;
        self.streams.fetch(layer).join(enqueue, layer)
    }

    fn bring(&mut self, on: &On, layer: usize) -> Result<()> {
        let enqueue = enqueue(on);
        // Fetches of a layer follow each other. A write-back is waited for where its pages are written again.
        self.streams.fetch(layer).join(enqueue, layer)?;
        self.copies_in_order(enqueue, layer)?;
        self.layers[layer].fetched = Fetched::In(enqueue.capture()?);
        Ok(())
    }

    fn pool(&self, layer: usize) -> *mut u8 {
        self.layers[layer].params.pool
    }

    fn weights(&self, layer: usize) -> *mut f32 {
        self.layers[layer].params.weights
    }

    fn host(&self, layer: usize) -> *mut u8 {
        self.layers[layer].params.host
    }

    fn tail_table(&self) -> *mut i32 {
        self.tail_table
    }

    fn counters(&self, layers: Range<usize>) -> Result<Vec<Counters>> {
        let mut counters = reserved(layers.len(), "the counters of a KV cache")?;
        cuda(&self.session).with_copy_stream(|stream| {
            for layer in &self.layers[layers] {
                let mut totals = [Totals::default()];
                // SAFETY: the layer's totals, which are plain numbers.
                unsafe { stream.read(layer.params.totals(), &mut totals)? };
                let [of] = totals;
                counters.push(Counters {
                    hits: of.hits,
                    misses: of.misses,
                    bytes_fetched: of.fetched,
                    bytes_written_back: of.written,
                    evictions: of.evictions,
                    unused: of.unused,
                    waits: layer.waits + of.waits,
                    dropped_tokens: of.dropped,
                });
            }
            Ok(())
        })?;
        Ok(counters)
    }
}
