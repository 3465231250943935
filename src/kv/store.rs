//! What a backend does for a cache: it holds the runs, and knows where each is. Which blocks a sequence has is decided before.

use super::sequences::{Opened, Sequences};
use super::{AppendRequest, ResolveRequest};
use crate::abi::vwd_stream;
use crate::core::status::Result;
use crate::runtime::{On, Session};

/// A sequence as far as a call has changed it.
pub struct Changed<'s> {
    pub sequence: usize,
    /// All its blocks.
    pub blocks: &'s [i32],
    /// Blocks that are as before: those after them are new, or cut.
    pub whole: usize,
    /// Of the first block after them.
    pub opened: Option<Opened>,
}

pub trait Store: Send {
    /// Refuses what the host's calls about sequences cannot be enqueued on.
    fn admit(&self, on: &On) -> Result<()>;

    fn add(&mut self, on: &On, sequence: usize) -> Result<()>;

    fn extend(&mut self, on: &On, extended: &Changed) -> Result<()>;

    /// `child` shares its whole blocks with `parent`.
    fn fork(&mut self, on: &On, parent: usize, child: &Changed) -> Result<()>;

    fn truncate(&mut self, on: &On, cut: &Changed) -> Result<()>;

    fn free(&mut self, on: &On, sequence: usize) -> Result<()>;

    /// Nobody has these blocks any more, or their content is not to be kept.
    fn drop_blocks(&mut self, on: &On, blocks: &[u32]) -> Result<()>;

    /// # Safety
    /// The request's tensors are valid as long as the call's contract says.
    unsafe fn append(&mut self, on: &On, sequences: &Sequences, request: &AppendRequest) -> Result<()>;

    /// # Safety
    /// As for `append`.
    unsafe fn resolve(&mut self, on: &On, sequences: &Sequences, request: &ResolveRequest) -> Result<()>;

    fn fetch(&mut self, on: &On, layer: usize) -> Result<()>;

    fn wait(&mut self, on: &On, layer: usize) -> Result<()>;

    /// Where the slots of a layer begin.
    fn pool(&self, layer: usize) -> *mut u8;

    /// [max_sequences, max_blocks]: where the newest blocks lie. It never changes.
    fn tail_table(&self) -> *mut i32;

    fn counters(&self) -> Result<Counters>;
}

/// Since the cache was created; see vwd_kv_cache_stats.
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

/// Picks the backend of one call, where the host's work for a sequence may be enqueued.
pub fn admit<'s>(store: &dyn Store, session: &'s Session, stream: vwd_stream) -> Result<On<'s>> {
    let on = session.on(stream)?;
    store.admit(&on)?;
    Ok(on)
}
