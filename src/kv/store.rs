//! The interface of a cache's backend, which has the runs and the slots. `sequences` decides which blocks a sequence has.

use super::sequences::{Opened, Sequences};
use super::{AppendRequest, CompactRequest, FarRuns, ResolveRequest, RowTables};
use crate::abi::vwd_stream;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::{On, Session};
use std::ops::Range;

/// A sequence that a call has changed.
pub struct Changed<'s> {
    pub sequence: usize,
    /// All blocks of the sequence after the change.
    pub blocks: &'s [i32],
    /// The number of leading tokens, and of whole leading blocks, that have not changed.
    pub tokens: usize,
    pub whole: usize,
    /// The partial block after them, if there is one.
    pub opened: Option<Opened>,
}

pub trait Store: Send {
    /// Refuses a stream on which calls that change sequences cannot be enqueued.
    fn admit(&self, on: &On) -> Result<()>;

    fn add(&mut self, on: &On, sequence: usize) -> Result<()>;

    fn extend(&mut self, on: &On, extended: &Changed) -> Result<()>;

    /// Begins `child`, which shares its whole blocks with `parent`.
    fn fork(&mut self, on: &On, parent: usize, child: &Changed) -> Result<()>;

    fn truncate(&mut self, on: &On, truncated: &Changed) -> Result<()>;

    fn free(&mut self, on: &On, sequence: usize) -> Result<()>;

    /// Forgets the content of blocks that no sequence holds any more, or whose content is out of date.
    fn drop_blocks(&mut self, on: &On, blocks: &[u32]) -> Result<()>;

    /// # Safety
    /// The request's tensors are valid for as long as the call's contract says.
    unsafe fn append(&mut self, on: &On, sequences: &Sequences, request: &AppendRequest) -> Result<()>;

    /// # Safety
    /// The request's tensors are valid for as long as the call's contract says.
    unsafe fn compact(&mut self, on: &On, sequences: &Sequences, request: &CompactRequest) -> Result<()>;

    /// # Safety
    /// The request's tensors are valid for as long as the call's contract says.
    unsafe fn resolve(&mut self, on: &On, sequences: &Sequences, request: &ResolveRequest) -> Result<()>;

    /// What the stream holds from now on begins after the layer's fetch, if one was begun since the resolve before, by the same capture or outside of any.
    fn join_fetch(&mut self, _: &On, _layer: usize) -> Result<()> {
        Ok(())
    }

    /// The first half of a resolve: finds where the blocks of lists lie, those that are not resident in host memory. Only where
    /// [`KvCache::far_pages`](super::KvCache::far_pages) has pages.
    ///
    /// # Safety
    /// The request's tensors and `far` are valid for as long as the call's contract says.
    unsafe fn find_far(&mut self, _: &On, _: &ResolveRequest, _far: &FarRuns) -> Result<()> {
        Err(Error::unsupported("lists that name blocks in host memory"))
    }

    /// The second half, which gives those that have none slots; entries stay what they are. No other resolve of the layer runs between the two.
    ///
    /// # Safety
    /// As for `find_far`.
    unsafe fn give_far(&mut self, on: &On, request: &ResolveRequest, far: &FarRuns) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.find_far(on, request, far) }
    }

    /// # Safety
    /// The request's memory is valid for as long as the call's contract says.
    unsafe fn row_tables(&mut self, on: &On, sequences: &Sequences, request: &RowTables) -> Result<()>;

    /// Writes the blocks of tails to host memory, full or not, so that host memory has all tokens of these sequences. On the CPU alone.
    ///
    /// # Safety
    /// The tensor is valid.
    unsafe fn store_tails(&mut self, _: &On, _: &Sequences, _layer: usize, _sequences: &Tensor) -> Result<()> {
        Err(Error::unsupported("tails in host memory"))
    }

    fn fetch(&mut self, on: &On, layer: usize) -> Result<()>;

    fn wait(&mut self, on: &On, layer: usize) -> Result<()>;

    /// Brings what the layer's last resolve has asked for, between what the stream holds and what it holds from now on. No other resolve of the layer
    /// runs meanwhile.
    fn bring(&mut self, on: &On, layer: usize) -> Result<()> {
        self.fetch(on, layer)?;
        self.wait(on, layer)
    }

    /// The address of the first slot of a layer.
    fn pool(&self, layer: usize) -> *mut u8;

    /// The weights of a layer's key channels, [Hk, D], where blocks are coded; may be NULL: 1.
    fn weights(&self, layer: usize) -> *mut f32;

    /// The address of the first run of a layer in host memory, as the backend reads it.
    fn host(&self, layer: usize) -> *mut u8;

    /// [max_sequences, max_blocks]: the tail page of each block. It never changes.
    fn tail_table(&self) -> *mut i32;

    /// The counters of each of these layers.
    fn counters(&self, layers: Range<usize>) -> Result<Vec<Counters>>;
}

/// Counters since the cache was created; see `vwd_kv_cache_stats`.
#[derive(Clone, Copy, Default)]
pub struct Counters {
    pub hits: u64,
    pub misses: u64,
    pub bytes_fetched: u64,
    pub bytes_written_back: u64,
    pub evictions: u64,
    pub unused: u64,
    pub waits: u64,
    pub dropped_tokens: u64,
}

impl Counters {
    pub fn plus(self, other: Counters) -> Counters {
        Counters {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            bytes_fetched: self.bytes_fetched + other.bytes_fetched,
            bytes_written_back: self.bytes_written_back + other.bytes_written_back,
            evictions: self.evictions + other.evictions,
            unused: self.unused + other.unused,
            waits: self.waits + other.waits,
            dropped_tokens: self.dropped_tokens + other.dropped_tokens,
        }
    }
}

/// Picks the backend of a call that changes sequences.
pub fn admit<'s>(store: &dyn Store, session: &'s Session, stream: vwd_stream) -> Result<On<'s>> {
    let on = session.on(stream)?;
    store.admit(&on)?;
    Ok(on)
}
