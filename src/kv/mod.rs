//! The tiered KV cache: the host tier has the keys and values of all blocks, the device tier has slots for the newest blocks and
//! for the blocks that attention reads.
//!
//! A run is the memory of one block of one KV head of one layer: keys, values, scales. The host tier has a run for every whole
//! block, [layer, block, KV head]; the pool of a layer has slots of one run each. The newest blocks of a sequence lie in reserved
//! slots, the sequence's tail, where tokens are appended; a block that is full is written back to its host run. Sequences may share
//! whole blocks, which never change. A cache may code blocks in INT4 as they become whole: then runs hold codes, all but those of tails, and
//! the first block of a sequence stays in a slot of its tail. Or slots hold what the codes stand for, decoded as a run arrives.

mod append;
mod compact;
mod cpu;
mod cuda;
#[cfg(test)]
mod failures;
mod options;
mod pinned;
mod resolve;
mod sequences;
mod share;
mod store;

pub use append::AppendRequest;
pub use compact::CompactRequest;
pub use cuda::Kernels;
pub use options::Options;
pub use resolve::ResolveRequest;
pub use share::share_slots;

use crate::abi::{
    vwd_kv_cache_layer, vwd_kv_cache_options, vwd_kv_cache_sizes, vwd_kv_cache_stats, vwd_stream, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor, strided};
use crate::ops::attention::FarPages;
use crate::ops::contents;
use crate::runtime::Session;
use crate::runtime::cuda::Family;
use cuda::{Bookkeeping, Tables};
use options::{CacheOptions, Part};
use parking_lot::Mutex;
use sequences::{Before, Opened, Sequences};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use store::{Changed, Counters, Store, admit};

pub struct KvCache {
    session: Arc<Session>,
    /// The options of the layer with the fewest slots.
    options: Options,
    all: CacheOptions,
    sizes: vwd_kv_cache_sizes,
    state: Mutex<State>,
    /// The most entries of a resolve of the decoders on the cache.
    longest: AtomicUsize,
}

struct State {
    sequences: Sequences,
    store: Box<dyn Store>,
}

/// Every family of this folder that has kernels.
pub const FAMILIES: &[Family] = &[Family::of::<Kernels>()];

/// The memory that a cache of these options takes.
///
/// # Safety
/// `layer_slots` is NULL or has `layers` numbers, and `weights` is NULL or has [layers, Hk, D].
pub unsafe fn capacity(c: &vwd_kv_cache_options) -> Result<vwd_kv_cache_sizes> {
    // SAFETY: says the caller.
    sizes(&unsafe { CacheOptions::from_c(c)? })
}

/// The bytes that a cache takes on the host and on the device.
fn sizes(all: &CacheOptions) -> Result<vwd_kv_cache_sizes> {
    let options = &all.fewest;
    let product =
        |factors: &[u64]| factors.iter().try_fold(1u64, |n, &x| n.checked_mul(x)).filter(|&n| n <= i64::MAX as u64);
    let (run, tail_run) = (options.run().bytes as u64, options.tail_run().bytes as u64);
    let (layers, heads) = (options.layers as u64, options.kv_heads as u64);
    let host = product(&[layers, options.host_blocks as u64, heads, run]);
    let of_kind = |(layer, count): (Options, usize)| {
        // This product is checked because pool_bytes, below, multiplies without checks.
        product(&[layer.total_slots() as u64, run.max(tail_run), 2])?;
        product(&[count as u64, layer.pool_bytes().checked_add(Bookkeeping::of(&layer).bytes)?])
    };
    let device = all.kinds().try_fold(Tables::of(options).bytes, |sum, kind| sum.checked_add(of_kind(kind)?));
    let (Some(host_bytes), Some(device_bytes)) = (host, device) else {
        return Err(Error::argument("options", "more than 2^63 bytes", "sizes that fit in memory"));
    };
    Ok(vwd_kv_cache_sizes {
        struct_size: size_of::<vwd_kv_cache_sizes>() as u32,
        flags: 0,
        run_bytes: run,
        host_bytes,
        device_bytes,
        total_slots: options.total_slots() as u64,
        largest_selection: options.largest_selection() as u64,
        slot_bytes: options.slot_run().bytes as u64,
    })
}

impl KvCache {
    /// # Safety
    /// `progress` of the options is NULL or keeps its contract, `layer_slots` is NULL or has `layers` numbers, and `weights` is NULL or has
    /// [layers, Hk, D].
    pub unsafe fn create(session: &Arc<Session>, c: &vwd_kv_cache_options) -> Result<KvCache> {
        // SAFETY: says the caller.
        let all = unsafe { CacheOptions::from_c(c)?.with_weights(c.weights)? };
        let (options, sizes) = (all.fewest, sizes(&all)?);
        let progress = |done: u64| {
            if let Some(call) = c.progress {
                // SAFETY: the caller says that `progress` keeps its contract.
                unsafe { call(c.progress_context, done, sizes.host_bytes + sizes.device_bytes) }
            }
        };
        progress(0);
        let sequences =
            Sequences::new(options.block_size, options.max_sequences, options.max_blocks, options.host_blocks)?;
        let report_layers = |layers: usize| {
            let share = |bytes: u64| (bytes as u128 * layers as u128 / options.layers as u128) as u64;
            progress(share(sizes.host_bytes) + share(sizes.device_bytes));
        };
        let store: Box<dyn Store> = match session.cuda() {
            None => Box::new(cpu::Layers::create(session, &all, report_layers)?),
            Some(_) => Box::new(cuda::Layers::create(session, &all, report_layers)?),
        };
        let (session, state) = (session.clone(), Mutex::new(State { sequences, store }));
        Ok(KvCache { session, options, all, sizes, state, longest: AtomicUsize::new(0) })
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The options of the layer with the fewest slots.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// A decoder on the cache will resolve up to so many entries at once, by [`ResolveRequest::of_step`].
    pub fn expect_lists(&self, entries: usize) {
        self.longest.fetch_max(entries, Relaxed);
    }

    fn layer(&self, layer: u32) -> Result<usize> {
        if (layer as usize) < self.options.layers {
            return Ok(layer as usize);
        }
        Err(Error::argument("layer", layer, format!("0 … {}", self.options.layers - 1)))
    }

    /// Checks a tensor of sequence numbers; it has at most max_sequences.
    fn check_sequences<'a>(&self, t: &'a vwd_tensor) -> Result<Tensor<'a>> {
        let numbers = self.session.checks().input("sequences", t, &[DType::I32], &[("B", ANY)])?;
        let (found, most) = (numbers.dim(0), self.options.max_sequences);
        if found <= most {
            return Ok(numbers);
        }
        Err(Error::argument("sequences", format!("{found} of them"), format!("at most max_sequences, {most}")))
    }

    // --- sequences -----------------------------------------------------------------------------------------------

    pub fn add(&self, stream: vwd_stream) -> Result<u32> {
        let State { sequences, store } = &mut *self.state.lock();
        let on = admit(&**store, &self.session, stream)?;
        let sequence = sequences.add()?;
        let done = store.add(&on, sequence as usize);
        sequences.settle(done, Before::nothing(sequence))?;
        Ok(sequence)
    }

    pub fn extend(&self, sequence: u32, tokens: u64, stream: vwd_stream) -> Result<()> {
        let State { sequences, store } = &mut *self.state.lock();
        let on = admit(&**store, &self.session, stream)?;
        let before = sequences.before(sequence, usize::MAX)?;
        let whole = sequences.extend(sequence, tokens)?;
        let kept = [whole * self.options.block_size, whole];
        let done = store.extend(&on, &changed(sequences, sequence, kept, None));
        sequences.settle(done, before)
    }

    pub fn fork(&self, parent: u32, tokens: u64, stream: vwd_stream) -> Result<u32> {
        let State { sequences, store } = &mut *self.state.lock();
        let on = admit(&**store, &self.session, stream)?;
        let (child, opened) = sequences.fork(parent, tokens)?;
        let done = store.fork(&on, parent as usize, &changed(sequences, child, self.kept(tokens), opened));
        sequences.settle(done, Before::nothing(child))?;
        Ok(child)
    }

    /// So many tokens, and the whole blocks among them.
    fn kept(&self, tokens: u64) -> [usize; 2] {
        [tokens as usize, tokens as usize / self.options.block_size]
    }

    pub fn truncate(&self, sequence: u32, tokens: u64, stream: vwd_stream) -> Result<()> {
        let State { sequences, store } = &mut *self.state.lock();
        let on = admit(&**store, &self.session, stream)?;
        let kept = self.kept(tokens);
        let before = sequences.before(sequence, kept[1])?;
        let truncated = sequences.truncate(sequence, tokens)?;
        let done = store.truncate(&on, &changed(sequences, sequence, kept, truncated.opened));
        let done = done.and_then(|()| store.drop_blocks(&on, &truncated.dropped));
        sequences.settle(done, before)
    }

    pub fn free(&self, sequence: u32, stream: vwd_stream) -> Result<()> {
        let State { sequences, store } = &mut *self.state.lock();
        let on = admit(&**store, &self.session, stream)?;
        let before = sequences.before(sequence, 0)?;
        let dropped = sequences.free(sequence)?;
        let done = store.free(&on, sequence as usize).and_then(|()| store.drop_blocks(&on, &dropped));
        sequences.settle(done, before)
    }

    // --- calls ---------------------------------------------------------------------------------------------------

    pub fn append(&self, request: &AppendRequest, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || request.contents(&self.options))?;
        let State { sequences, store } = &mut *self.state.lock();
        // SAFETY: the call's contract keeps the tensors valid.
        unsafe { store.append(&on, sequences, request) }
    }

    pub fn compact(&self, request: &CompactRequest, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || request.contents(&self.options))?;
        let State { sequences, store } = &mut *self.state.lock();
        // SAFETY: the call's contract keeps the tensors valid.
        unsafe { store.compact(&on, sequences, request) }
    }

    pub fn resolve(&self, request: &ResolveRequest, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || request.contents(&self.options))?;
        let State { sequences, store } = &mut *self.state.lock();
        // SAFETY: the call's contract keeps the tensors valid.
        unsafe { store.resolve(&on, sequences, request) }
    }

    /// Waits for a fetch that was begun, and finds the slots of the blocks of a list; the entry of a block that is not resident names a page of
    /// [`KvCache::far_pages`]. `give_far` has to follow.
    ///
    /// # Safety
    /// `missed_again` of [`FarRuns`] stays valid until the stream has passed.
    pub unsafe fn find_far(&self, request: &ResolveRequest, missed_again: *mut i32, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || request.contents(&self.options))?;
        let far = FarRuns { missed_again, ..self.far_runs(request) };
        let store = &mut self.state.lock().store;
        store.join_fetch(&on, request.layer)?;
        // SAFETY: the call's contract keeps the tensors valid; the caller vouches for the counts.
        unsafe { store.find_far(&on, request, &far) }
    }

    /// Gives slots to the blocks that `find_far` found in host memory, for the next fetch to fill. What reads the entries may run meanwhile.
    pub fn give_far(&self, request: &ResolveRequest, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        // SAFETY: the call's contract keeps the tensors valid.
        unsafe { self.state.lock().store.give_far(&on, request, &self.far_runs(request)) }
    }

    fn far_runs(&self, request: &ResolveRequest) -> FarRuns {
        FarRuns { first: self.all.layer(request.layer).total_slots() as u32, missed_again: std::ptr::null_mut() }
    }

    /// The runs of a layer in host memory as pages after those of its slots; `None` where slots hold something else, and on a CPU session, which
    /// copies in the call.
    pub fn far_pages(&self, layer: u32) -> Result<Option<FarPages>> {
        let layer = self.layer(layer)?;
        let (options, state) = (self.all.layer(layer), self.state.lock());
        let (first, count) = (options.total_slots(), options.host_runs());
        if self.session.cuda().is_none() || options.is_coded || first + count > i32::MAX as usize {
            return Ok(None);
        }
        let end = state.store.pool(layer) as i64 + (first * options.run().bytes) as i64;
        let bytes = state.store.host(layer) as i64 - end;
        Ok(Some(FarPages { count: count as u32, bytes }))
    }

    /// Writes the tables of the rows of a step: what a decoder reads summaries and tails by.
    ///
    /// # Safety
    /// The request's memory stays valid until the stream has passed.
    pub unsafe fn row_tables(&self, request: &RowTables, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        let State { sequences, store } = &mut *self.state.lock();
        // SAFETY: says the caller.
        unsafe { store.row_tables(&on, sequences, request) }
    }

    /// Brings host memory up to date with what the tails of these sequences, [B] int32, have of a layer. On a CPU session, where blocks are not
    /// coded.
    ///
    /// # Safety
    /// The tensor is valid.
    pub unsafe fn store_tails(&self, layer: u32, numbers: &Tensor, stream: vwd_stream) -> Result<()> {
        let (on, layer) = (self.session.on(stream)?, self.layer(layer)?);
        let State { sequences, store } = &mut *self.state.lock();
        // SAFETY: says the caller.
        unsafe { store.store_tails(&on, sequences, layer, numbers) }
    }

    pub fn fetch(&self, layer: u32, stream: vwd_stream) -> Result<()> {
        let (on, layer) = (self.session.on(stream)?, self.layer(layer)?);
        self.state.lock().store.fetch(&on, layer)
    }

    pub fn wait(&self, layer: u32, stream: vwd_stream) -> Result<()> {
        let (on, layer) = (self.session.on(stream)?, self.layer(layer)?);
        self.state.lock().store.wait(&on, layer)
    }

    /// `fetch` and `wait` of what was just resolved, by a stream that has nothing else to do meanwhile.
    pub fn bring(&self, layer: u32, stream: vwd_stream) -> Result<()> {
        let (on, layer) = (self.session.on(stream)?, self.layer(layer)?);
        self.state.lock().store.bring(&on, layer)
    }

    // --- information ---------------------------------------------------------------------------------------------

    pub fn view(&self, layer: u32) -> Result<vwd_kv_cache_layer> {
        let (layer, state, device) = (self.layer(layer)?, self.state.lock(), self.session.device());
        let pool = state.store.pool(layer);
        let options = self.all.layer(layer);
        let Options { max_sequences, max_blocks, kv_heads, .. } = options;
        let pages = options.tail_slots() / kv_heads;
        let exact_slots = if options.has_coded_slots() { options.tail_slots() } else { options.total_slots() };
        let [k, v, k_scale, v_scale] = self.parts(pool, exact_slots, 1);
        let [tail_k, tail_v, tail_k_scale, tail_v_scale] = self.parts(pool, pages, kv_heads);
        let first_slot = pool.wrapping_add(options.first_slot_at() as usize);
        let coded_slots = if options.has_coded_slots() { first_slot } else { std::ptr::null_mut() };
        let [int4_k, int4_v, int4_k_scale, int4_v_scale, int4_means] = self.codes(coded_slots, options.slots, 1);
        let (weights, dim) = (state.store.weights(layer), options.dims[0]);
        let weights = if self.all.weights(layer).is_some() { weights } else { std::ptr::null_mut() };
        Ok(vwd_kv_cache_layer {
            struct_size: size_of::<vwd_kv_cache_layer>() as u32,
            flags: 0,
            k,
            v,
            k_scale,
            v_scale,
            tail_k,
            tail_v,
            tail_k_scale,
            tail_v_scale,
            tail_table: strided(
                device,
                state.store.tail_table().cast(),
                DType::I32,
                &[max_sequences, max_blocks],
                &[max_blocks, 1],
            ),
            int4_k,
            int4_v,
            int4_k_scale,
            int4_v_scale,
            int4_means,
            weights: strided(device, weights.cast(), DType::F32, &[kv_heads, dim], &[dim, 1]),
        })
    }

    /// The runs of a layer in host memory, as pages of one block each: keys and values [host_blocks, S, Hk, channels], and the scales of both,
    /// [host_blocks, S, Hk]. A CUDA device reads them where they lie. Blocks in a sequence's tail may not be there yet. Of a cache whose
    /// blocks are not coded; `stored_codes` are those of one whose blocks are.
    pub fn stored(&self, layer: u32) -> Result<[vwd_tensor; 4]> {
        let host = self.state.lock().store.host(self.layer(layer)?);
        Ok(self.parts(host, self.options.host_blocks, self.options.kv_heads))
    }

    /// The same of a cache whose blocks are coded: the codes of keys and values, the scales of both, and the means, [host_blocks, 1, Hk, D]. A
    /// sequence's first block is not there.
    pub fn stored_codes(&self, layer: u32) -> Result<[vwd_tensor; 5]> {
        let host = self.state.lock().store.host(self.layer(layer)?);
        Ok(self.codes(host, self.options.host_blocks, self.options.kv_heads))
    }

    /// The codes of `count` times `heads` runs from `base` on, their scales, and the means; absent where `base` is NULL.
    fn codes(&self, base: *mut u8, count: usize, heads: usize) -> [vwd_tensor; 5] {
        let (Options { block_size, dtype, dims, .. }, run) = (self.options, self.options.run());
        let absent_or = |at: usize| if base.is_null() { base } else { base.wrapping_add(at) };
        let device = self.session.device();
        let [keys, values, key_scales, value_scales] = run.parts;
        let codes = |part: Part| {
            let (shape, page) = ([count, block_size, heads, part.token], heads * run.bytes);
            strided(device, absent_or(part.begin), DType::U8, &shape, &[page, part.token, run.bytes, 1])
        };
        let scales = |part: Part| {
            let (shape, page) = ([count, block_size, heads], heads * run.bytes);
            strided(device, absent_or(part.begin), DType::F8E4M3, &shape, &[page, 1, run.bytes])
        };
        let (mean, element) = (absent_or(run.mean), dtype.bytes());
        let strides = [heads * run.bytes / element, dims[0], run.bytes / element, 1];
        [
            codes(keys),
            codes(values),
            scales(key_scales),
            scales(value_scales),
            strided(device, mean, dtype, &[count, 1, heads, dims[0]], &strides),
        ]
    }

    /// The parts of `count` times `heads` runs from `base` on, as they lie in tails: keys, values, and the scales of both, which may be absent.
    fn parts(&self, base: *mut u8, count: usize, heads: usize) -> [vwd_tensor; 4] {
        let Options { block_size, dtype, dims, .. } = self.options;
        let run = self.options.tail_run();
        let part = |part: Part, dtype: DType, channels: Option<usize>| {
            let element = dtype.bytes();
            let shape: Vec<usize> = [count, block_size, heads].into_iter().chain(channels).collect();
            let (run, token) = (run.bytes / element, part.token / element);
            let strides = [heads * run, token, run, 1];
            let data = if part.token == 0 { std::ptr::null_mut() } else { base.wrapping_add(part.begin) };
            strided(self.session.device(), data, dtype, &shape, &strides[..shape.len()])
        };
        let [keys, values, key_scales, value_scales] = run.parts;
        [
            part(keys, dtype, Some(dims[0])),
            part(values, dtype, Some(dims[1])),
            part(key_scales, DType::F32, None),
            part(value_scales, DType::F32, None),
        ]
    }

    /// The counters of a layer, or of all of them together.
    pub fn stats(&self, layer: Option<u32>) -> Result<vwd_kv_cache_stats> {
        let vwd_kv_cache_sizes { mut host_bytes, mut device_bytes, .. } = self.sizes;
        let mut layers = 0..self.options.layers;
        if let Some(layer) = layer {
            let layer = self.layer(layer)?;
            layers = layer..layer + 1;
            let options = self.all.layer(layer);
            (host_bytes, device_bytes) = (options.host_bytes(), options.pool_bytes() + Bookkeeping::of(&options).bytes);
        }
        let state = self.state.lock();
        let Counters { hits, misses, bytes_fetched, bytes_written_back, evictions, unused, waits, dropped_tokens } =
            state.store.counters(layers)?.into_iter().fold(Counters::default(), Counters::plus);
        Ok(vwd_kv_cache_stats {
            struct_size: size_of::<vwd_kv_cache_stats>() as u32,
            flags: 0,
            sequences: state.sequences.count() as u32,
            blocks_in_use: state.sequences.blocks_in_use() as u32,
            blocks_free: state.sequences.free_blocks() as u32,
            host_bytes,
            device_bytes,
            hits,
            misses,
            bytes_fetched,
            bytes_written_back,
            evictions,
            unused,
            waits,
            dropped_tokens,
        })
    }
}

/// `kept` are the leading tokens and whole blocks that have not changed.
fn changed(sequences: &Sequences, sequence: u32, kept: [usize; 2], opened: Option<Opened>) -> Changed<'_> {
    let (blocks, [tokens, whole]) = (sequences.blocks(sequence as usize).expect("a sequence that was changed"), kept);
    Changed { sequence: sequence as usize, blocks, tokens, whole, opened }
}

/// Where the blocks of each row of a step lie: tables whose row i is that of a sequence, of which there are at most max_sequences.
pub struct RowTables<'a> {
    /// [B]; a number that no sequence has gives a row of −1.
    pub sequences: Tensor<'a>,
    /// [B, max_blocks] each, packed: the host block of each block of the sequence, and the page of its tail in which the block lies
    /// while it is one of the newest. −1 past the last block.
    pub blocks: *mut i32,
    pub tails: *mut i32,
    /// [B]: the first token of the blocks that the tail has in every layer; a later token is at least the next one that may be appended.
    pub floors: *mut i32,
}

/// How a resolve names runs that are not resident: run n of host memory as slot `first` + n.
pub struct FarRuns {
    pub first: u32,
    /// Where missed_counts go once more, with the same strides, or null.
    pub missed_again: *mut i32,
}
