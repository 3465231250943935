//! What a driver that fails leaves of a cache's sequences.

use super::sequences::Sequences;
use super::store::{Changed, Counters, Store};
use super::{AppendRequest, CompactRequest, KvCache, ResolveRequest, RowTables};
use crate::abi::{vwd_kv_cache_options, vwd_stream};
use crate::core::status::{Code, Error, Result};
use crate::core::versioned::zeroed;
use crate::ops;
use crate::runtime::{Choice, On, Options, Session};
use std::ops::Range;
use std::sync::Arc;

/// A backend that refuses changes of sequences; `drops_only`: none but that blocks are dropped.
struct Refusing {
    drops_only: bool,
}

fn refused() -> Result<()> {
    Err(Error::new(Code::Driver, "refused"))
}

impl Refusing {
    fn change(&self) -> Result<()> {
        if self.drops_only { Ok(()) } else { refused() }
    }
}

impl Store for Refusing {
    fn admit(&self, _: &On) -> Result<()> {
        Ok(())
    }

    fn add(&mut self, _: &On, _: usize) -> Result<()> {
        self.change()
    }

    fn extend(&mut self, _: &On, _: &Changed) -> Result<()> {
        self.change()
    }

    fn fork(&mut self, _: &On, _: usize, _: &Changed) -> Result<()> {
        self.change()
    }

    fn truncate(&mut self, _: &On, _: &Changed) -> Result<()> {
        self.change()
    }

    fn free(&mut self, _: &On, _: usize) -> Result<()> {
        self.change()
    }

    fn drop_blocks(&mut self, _: &On, _: &[u32]) -> Result<()> {
        refused()
    }

    unsafe fn append(&mut self, _: &On, _: &Sequences, _: &AppendRequest) -> Result<()> {
        refused()
    }

    unsafe fn compact(&mut self, _: &On, _: &Sequences, _: &CompactRequest) -> Result<()> {
        refused()
    }

    unsafe fn resolve(&mut self, _: &On, _: &Sequences, _: &ResolveRequest) -> Result<()> {
        refused()
    }

    unsafe fn row_tables(&mut self, _: &On, _: &Sequences, _: &RowTables) -> Result<()> {
        refused()
    }

    fn fetch(&mut self, _: &On, _: usize) -> Result<()> {
        refused()
    }

    fn wait(&mut self, _: &On, _: usize) -> Result<()> {
        refused()
    }

    fn pool(&self, _: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn weights(&self, _: usize) -> *mut f32 {
        std::ptr::null_mut()
    }

    fn host(&self, _: usize) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn tail_table(&self) -> *mut i32 {
        std::ptr::null_mut()
    }

    fn counters(&self, _: Range<usize>) -> Result<Vec<Counters>> {
        Ok(vec![])
    }
}

const BLOCK: u64 = 4;
const BLOCKS: u32 = 10;
const SEQUENCES: u32 = 4;

/// Sequence 0 has seven blocks; 1 has the first three of these and one of its own; 2 has no block.
fn begun() -> Result<KvCache> {
    let options = Options { device: Choice::Cpu, threads: 1, ..Options::default() };
    let session = Arc::new(Session::create(&options, ops::FAMILIES)?);
    let c = vwd_kv_cache_options {
        layers: 1,
        kv_heads: 1,
        block_size: BLOCK as u32,
        key_dim: 16,
        value_dim: 16,
        dtype_code: 2,
        dtype_bits: 32,
        max_sequences: SEQUENCES,
        max_blocks: 8,
        host_blocks: BLOCKS,
        slots: 4,
        ..zeroed()
    };
    // SAFETY: there are no arrays.
    let cache = unsafe { KvCache::create(&session, &c)? };
    let stream = std::ptr::null_mut();
    cache.add(stream)?;
    cache.extend(0, 7 * BLOCK, stream)?;
    cache.fork(0, 3 * BLOCK + 1, stream)?;
    cache.add(stream)?;
    Ok(cache)
}

fn blocks(cache: &KvCache) -> (Vec<Option<Vec<i32>>>, usize) {
    let state = cache.state.lock();
    let of_sequence = |n: u32| state.sequences.blocks(n as usize).map(<[i32]>::to_vec);
    ((0..SEQUENCES).map(of_sequence).collect(), state.sequences.free_blocks())
}

#[test]
fn sequences_are_as_they_were_where_the_device_could_not_be_told_of_a_change() {
    let stream = std::ptr::null_mut();
    type Change = fn(&KvCache, vwd_stream) -> Result<()>;
    let changes: &[(&str, Change)] = &[
        ("add", |cache, stream| cache.add(stream).map(|_| ())),
        ("extend", |cache, stream| cache.extend(1, 6 * BLOCK, stream)),
        ("fork of whole blocks", |cache, stream| cache.fork(0, 6 * BLOCK, stream).map(|_| ())),
        ("fork in a block", |cache, stream| cache.fork(0, 5 * BLOCK + 1, stream).map(|_| ())),
        ("truncate", |cache, stream| cache.truncate(0, 4 * BLOCK, stream)),
        ("truncate in an own block", |cache, stream| cache.truncate(0, 4 * BLOCK + 2, stream)),
        ("truncate in a shared block", |cache, stream| cache.truncate(0, BLOCK + 2, stream)),
        ("truncate to nothing", |cache, stream| cache.truncate(1, 0, stream)),
        ("free", |cache, stream| cache.free(0, stream)),
        ("free of a fork", |cache, stream| cache.free(1, stream)),
    ];
    for drops_only in [false, true] {
        let cache = begun().unwrap();
        let before = blocks(&cache);
        for (name, change) in changes {
            let refusing: Box<dyn Store> = Box::new(Refusing { drops_only });
            let working = std::mem::replace(&mut cache.state.lock().store, refusing);
            let refuses = !drops_only || name.starts_with("truncate") || name.starts_with("free");
            if refuses {
                assert_eq!(change(&cache, stream).map_err(|error| error.code), Err(Code::Driver), "{name}");
            }
            cache.state.lock().store = working;
            assert_eq!(blocks(&cache), before, "{name}, {drops_only}");
        }
        // Nothing was lost.
        (0..3).for_each(|n| cache.free(n, stream).unwrap());
        assert_eq!(cache.state.lock().sequences.free_blocks(), BLOCKS as usize);
        cache.add(stream).unwrap();
        cache.extend(0, 8 * BLOCK, stream).unwrap();
    }
}
