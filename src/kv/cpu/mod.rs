//! The cache on the CPU: the reference. Copies that run on a side stream on a device are done here when a call returns.

mod coded;
mod memory;
mod residents;

use coded::Coder;
use memory::Pool;

use super::options::{CacheOptions, Options, Run, TAIL_BLOCKS};
use super::pinned::Pinned;
use super::sequences::{NONE, Opened, Sequences};
use super::store::{Changed, Counters, Store};
use super::{AppendRequest, CompactRequest, ResolveRequest, RowTables};
use crate::core::allocate::{collected, filled, reserved};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;
use crate::runtime::{On, Session};
use residents::{Evicted, Residents};
use std::ops::Range;
use std::sync::Arc;

pub struct Layers {
    layers: Vec<Layer>,
    tail_table: Vec<i32>,
}

impl Layers {
    /// Calls `progress` with the number of layers created so far.
    pub fn create(session: &Arc<Session>, all: &CacheOptions, progress: impl Fn(usize)) -> Result<Layers> {
        let mut layers = reserved(all.fewest.layers, "the layers of a KV cache")?;
        for (n, options) in all.layers().enumerate() {
            layers.push(Layer::create(session, &options, all.weights(n))?);
            progress(n + 1);
        }
        Ok(Layers { layers, tail_table: all.fewest.tail_table()? })
    }
}

/// The CPU backend of a session that computes on the CPU.
fn cpu<'o>(on: &'o On) -> &'o Cpu {
    let On::Cpu(cpu) = on else { unreachable!("a cache of a CPU session") };
    cpu
}

impl Store for Layers {
    fn admit(&self, _: &On) -> Result<()> {
        Ok(())
    }

    fn add(&mut self, _: &On, sequence: usize) -> Result<()> {
        self.layers.iter_mut().for_each(|layer| layer.tails[sequence] = Tail::EMPTY);
        Ok(())
    }

    fn extend(&mut self, _: &On, _: &Changed) -> Result<()> {
        Ok(())
    }

    fn fork(&mut self, _: &On, parent: usize, child: &Changed) -> Result<()> {
        for layer in &mut self.layers {
            layer.fork(parent, child);
        }
        Ok(())
    }

    fn truncate(&mut self, _: &On, truncated: &Changed) -> Result<()> {
        for layer in &mut self.layers {
            layer.truncate(truncated);
        }
        Ok(())
    }

    fn free(&mut self, _: &On, _: usize) -> Result<()> {
        Ok(())
    }

    fn drop_blocks(&mut self, _: &On, blocks: &[u32]) -> Result<()> {
        self.layers.iter_mut().for_each(|layer| layer.drop_blocks(blocks));
        Ok(())
    }

    unsafe fn append(&mut self, on: &On, sequences: &Sequences, request: &AppendRequest) -> Result<()> {
        // SAFETY: the caller vouches for the tensors.
        unsafe { self.layers[request.layer].append(cpu(on), sequences, request) };
        Ok(())
    }

    unsafe fn compact(&mut self, on: &On, sequences: &Sequences, request: &CompactRequest) -> Result<()> {
        // SAFETY: the caller vouches for the tensors.
        self.layers.iter_mut().for_each(|layer| unsafe { layer.compact(cpu(on), sequences, request) });
        Ok(())
    }

    unsafe fn resolve(&mut self, _: &On, sequences: &Sequences, request: &ResolveRequest) -> Result<()> {
        // SAFETY: the caller vouches for the tensors.
        unsafe { self.layers[request.layer].resolve(sequences, request) };
        Ok(())
    }

    unsafe fn row_tables(&mut self, _: &On, sequences: &Sequences, r: &RowTables) -> Result<()> {
        let max_blocks = self.layers[0].options.max_blocks;
        for i in 0..r.sequences.dim(0) {
            // SAFETY: the caller vouches for the tensor, of which i is a row.
            let sequence = usize::try_from(unsafe { r.sequences.get::<i32, 1>([i]) }).ok();
            let blocks = sequence.and_then(|sequence| sequences.blocks(sequence)).unwrap_or_default();
            let of_layer = |layer: &Layer| layer.tails.get(sequence?).map(Tail::begin);
            let floor =
                self.layers.iter().filter_map(of_layer).max().unwrap_or(0) * self.layers[0].options.block_size as i64;
            // SAFETY: the caller has memory for a floor of each row.
            unsafe { *r.floors.add(i) = floor.min(i32::MAX as i64) as i32 };
            for n in 0..max_blocks {
                let block = blocks.get(n).copied();
                let at = i * max_blocks + n;
                let tail = block.zip(sequence).map(|(_, sequence)| self.tail_table[sequence * max_blocks + n]);
                // SAFETY: the caller has memory for max_blocks entries of each row.
                unsafe {
                    *r.blocks.add(at) = block.unwrap_or(NONE);
                    *r.tails.add(at) = tail.unwrap_or(NONE);
                }
            }
        }
        Ok(())
    }

    unsafe fn store_tails(&mut self, on: &On, of: &Sequences, layer: usize, sequences: &Tensor) -> Result<()> {
        // SAFETY: the caller vouches for the tensor.
        unsafe { self.layers[layer].store_tails(cpu(on), of, sequences) };
        Ok(())
    }

    fn fetch(&mut self, on: &On, layer: usize) -> Result<()> {
        self.layers[layer].fetch(cpu(on));
        Ok(())
    }

    fn wait(&mut self, on: &On, layer: usize) -> Result<()> {
        let copies = self.layers[layer].fetch(cpu(on));
        self.layers[layer].counters.waits += (copies > 0) as u64;
        Ok(())
    }

    fn pool(&self, layer: usize) -> *mut u8 {
        self.layers[layer].pool.data()
    }

    fn weights(&self, layer: usize) -> *mut f32 {
        self.layers[layer].coder.as_ref().map_or(std::ptr::null_mut(), Coder::weights)
    }

    fn host(&self, layer: usize) -> *mut u8 {
        self.layers[layer].host.data()
    }

    fn tail_table(&self) -> *mut i32 {
        self.tail_table.as_ptr().cast_mut()
    }

    fn counters(&self, layers: Range<usize>) -> Result<Vec<Counters>> {
        collected(self.layers[layers].iter().map(|layer| layer.counters), "the counters of a KV cache")
    }
}

struct Layer {
    /// Slots of the tails, slots that blocks are fetched into, and where blocks are coded the codes of those in tails.
    pool: Pool,
    /// [host_blocks, Hk] runs.
    host: Pinned,
    options: Options,
    /// How a block lies on the host, in the slots that it is fetched into, and in a tail.
    run: Run,
    slot_run: Run,
    tail_run: Run,
    coder: Option<Coder>,
    /// The tail of each sequence.
    tails: Vec<Tail>,
    residents: Residents,
    counters: Counters,
}

// SAFETY: a layer owns the memory that it points to, and the cache locks it.
unsafe impl Send for Layer {}
// SAFETY: as above; tasks that share a layer write disjoint places.
unsafe impl Sync for Layer {}

/// The newest blocks of a sequence, which lie in the slots of its tail: `first` … `newest`, at most the last two of them.
#[derive(Clone, Copy, Debug)]
struct Tail {
    newest: i64,
    first: i64,
    /// The number of tokens of the sequence: where its last append ended.
    tokens: i64,
}

impl Tail {
    const EMPTY: Tail = Tail { newest: -1, first: 0, tokens: 0 };

    /// The first block that it has, or the one that the next token begins.
    fn begin(&self) -> i64 {
        self.first.max(self.newest - 1)
    }

    fn holds(&self, block: i64) -> bool {
        (self.begin()..=self.newest).contains(&block)
    }

    /// Walks over the blocks that the given tokens are written to. Calls `each` with the block's number, the tokens' places in
    /// the block, and the number of the first of the given tokens. Returns the number of tokens that have no place.
    fn walk(
        &mut self,
        size: usize,
        blocks: usize,
        tokens: Range<i64>,
        mut each: impl FnMut(usize, Range<usize>, usize),
    ) -> u64 {
        let capacity = (size * blocks) as i64;
        let mut at = tokens.start.max(0).min(tokens.end);
        let past = tokens.end.min(capacity).max(at);
        if at > self.tokens {
            // Tokens before the given ones are missing.
            return (tokens.end - tokens.start) as u64;
        }
        let mut dropped = ((at - tokens.start) + (tokens.end - past)) as u64;
        while at < past {
            let (number, within) = (at / size as i64, at % size as i64);
            let end = past.min((number + 1) * size as i64);
            if self.holds(number) || (within == 0 && number == self.newest + 1) {
                self.newest = self.newest.max(number);
                self.tokens = end;
                let within = within as usize;
                each(number as usize, within..within + (end - at) as usize, (at - tokens.start) as usize);
            } else {
                dropped += (end - at) as u64;
            }
            at = end;
        }
        dropped
    }
}

impl Layer {
    fn create(session: &Arc<Session>, options: &Options, weights: Option<&[f32]>) -> Result<Layer> {
        Ok(Layer {
            pool: Pool::alloc(options.pool_bytes() as usize)?,
            host: Pinned::alloc(session, options.host_bytes())?,
            options: *options,
            run: options.run(),
            slot_run: options.slot_run(),
            tail_run: options.tail_run(),
            coder: options.is_coded.then(|| Coder::new(options, weights)).transpose()?,
            tails: filled(Tail::EMPTY, options.max_sequences, "the tails of a KV cache")?,
            residents: Residents::new(options.host_runs(), options.slots, options.hold)?,
            counters: Counters::default(),
        })
    }

    /// A slot that blocks are fetched into.
    fn slot(&self, slot: usize) -> *mut u8 {
        self.pool.data().wrapping_add(self.options.first_slot_at() as usize + slot * self.slot_run.bytes)
    }

    /// The slot of a block in a tail.
    fn tail(&self, sequence: usize, number: usize, head: usize) -> *mut u8 {
        self.pool.data().wrapping_add(self.tail_slot(sequence, number, head) * self.tail_run.bytes)
    }

    /// A whole block in a tail as it lies on the host.
    fn whole_tail(&self, sequence: usize, number: usize, head: usize) -> *mut u8 {
        if self.coder.is_none() {
            return self.tail(sequence, number, head);
        }
        let run = self.options.coded_tail_run(sequence, number, head);
        self.pool.data().wrapping_add(self.options.coded_tails_at() as usize + run * self.run.bytes)
    }

    fn host(&self, block: usize, head: usize) -> *mut u8 {
        self.host.data().wrapping_add((block * self.options.kv_heads + head) * self.run.bytes)
    }

    fn tail_slot(&self, sequence: usize, number: usize, head: usize) -> usize {
        self.options.tail_page(sequence, number) * self.options.kv_heads + head
    }

    /// Copies the page of a block in the tail of a sequence to that of another one.
    fn copy_tail(&self, from: usize, to: usize, number: usize) {
        for head in 0..self.options.kv_heads {
            let [from, to] = [from, to].map(|sequence| self.tail(sequence, number, head));
            // SAFETY: two slots of the pool.
            unsafe { std::ptr::copy_nonoverlapping(from, to, self.tail_run.bytes) }
        }
    }

    /// Whether a block lies in the tail of a sequence, or in the page of its own that the first block has.
    fn is_in_tail(&self, tail: &Tail, number: i64) -> bool {
        tail.holds(number) || (self.options.is_first(number) && tail.newest >= 0)
    }

    // --- sequences -----------------------------------------------------------------------------------------------

    /// Begins `child` with the first whole blocks of `parent`, and with the partial block after them.
    pub fn fork(&mut self, parent: usize, child: &Changed) {
        let shared = child.whole as i64;
        let from = self.tails[parent];
        // The parent does not write to shared blocks any more.
        self.tails[parent].first = from.first.max(shared);
        let tokens = from.tokens.min(child.tokens as i64);
        self.tails[child.sequence] = Tail { newest: from.newest.min(shared - 1), first: shared, tokens };
        if let Some(opened) = child.opened.filter(|_| shared <= from.newest) {
            self.open(child.sequence, opened, self.is_in_tail(&from, shared).then_some(parent));
        }
        if shared > 0 && self.options.is_first(0) {
            self.copy_tail(parent, child.sequence, 0);
        }
    }

    /// Ends a sequence after its whole blocks, or with the partial block after them.
    pub fn truncate(&mut self, truncated: &Changed) {
        let &Changed { sequence, tokens, whole, opened, .. } = truncated;
        let (tail, end) = (self.tails[sequence], whole as i64);
        let tokens = tail.tokens.min(tokens as i64);
        self.tails[sequence].tokens = tokens;
        if tail.newest < end {
            return;
        }
        self.tails[sequence] = Tail { newest: end - 1, first: end, tokens };
        if let Some(opened) = opened {
            self.open(sequence, opened, self.is_in_tail(&tail, end).then_some(sequence));
        }
    }

    /// Makes a partial block the newest of a sequence. Its tokens are in the tail of sequence `from`, or in host memory.
    fn open(&mut self, sequence: usize, Opened { number, content }: Opened, from: Option<usize>) {
        self.tails[sequence].newest = number as i64;
        match from {
            Some(from) if from == sequence => {}
            Some(from) => self.copy_tail(from, sequence, number),
            None => {
                for head in 0..self.options.kv_heads {
                    let [from, to] = [self.host(content as usize, head), self.tail(sequence, number, head)];
                    // SAFETY: a run of host memory and a slot of the pool.
                    unsafe {
                        match &self.coder {
                            Some(coder) => coder.decode(head, from, to),
                            None => std::ptr::copy_nonoverlapping(from, to, self.run.bytes),
                        }
                    }
                }
            }
        }
    }

    pub fn drop_blocks(&mut self, blocks: &[u32]) {
        for &block in blocks {
            for head in 0..self.options.kv_heads {
                self.residents.drop_run(block as usize * self.options.kv_heads + head);
            }
        }
    }

    // --- calls ---------------------------------------------------------------------------------------------------

    /// # Safety
    /// The request's tensors are valid.
    pub unsafe fn append(&mut self, cpu: &Cpu, sequences: &Sequences, r: &AppendRequest) {
        if r.is_empty() {
            return;
        }
        let heads = self.options.kv_heads;
        let this = &*self;
        let row = |i: usize| {
            // SAFETY: the caller vouches for the tensors.
            let (sequence, tokens) = unsafe { (r.sequence(i), r.tokens(i)) };
            let blocks = sequences.blocks(sequence)?;
            Some((sequence, blocks, tokens))
        };
        let token_bytes: usize = this.tail_run.parts.iter().map(|part| part.token).sum();
        cpu.parallel(r.batch() * heads, r.most_tokens() * token_bytes, |task| {
            let (i, head) = (task / heads, task % heads);
            let Some((sequence, blocks, tokens)) = row(i) else { return };
            let mut tail = this.tails[sequence];
            tail.walk(this.options.block_size, blocks.len(), tokens, |number, within, first| {
                let slot = this.tail(sequence, number, head);
                for (n, token) in within.clone().enumerate() {
                    // SAFETY: the token is one of those given, and has its place in the slot, which is this task's.
                    unsafe { this.write_token(r, [i, first + n, head], slot, token) };
                }
                if within.end == this.options.block_size {
                    this.write_back(sequence, number, blocks, head);
                }
            });
        });
        for i in 0..r.batch() {
            match row(i) {
                Some((sequence, blocks, tokens)) => {
                    let (size, mut full) = (self.options.block_size, 0);
                    let (tail, options) = (&mut self.tails[sequence], self.options);
                    let before = tail.newest;
                    self.counters.dropped_tokens += tail.walk(size, blocks.len(), tokens, |number, within, _| {
                        full += (within.end == size && !options.is_first(number as i64)) as u64
                    });
                    self.counters.bytes_written_back += full * (heads * self.run.bytes) as u64;
                    // The three newest blocks have their pages; those before the block that leaves the tail have lost theirs.
                    let leaving = tail.newest - 2;
                    if tail.newest > before && leaving >= tail.first && !options.is_first(leaving) {
                        self.settle(sequence, leaving as usize, blocks[leaving as usize] as usize);
                    }
                }
                None => {
                    // SAFETY: as above.
                    let tokens = unsafe { r.tokens(i) };
                    self.counters.dropped_tokens += (tokens.end - tokens.start) as u64;
                }
            }
        }
    }

    /// Writes a whole block of a tail to host memory, which no other sequence has; not a first block that stays in its tail.
    fn write_back(&self, sequence: usize, number: usize, blocks: &[i32], head: usize) {
        if self.options.is_first(number as i64) {
            return;
        }
        let (whole, host) = (self.whole_tail(sequence, number, head), self.host(blocks[number] as usize, head));
        // SAFETY: all are runs, which are this task's.
        unsafe {
            if let Some(coder) = &self.coder {
                coder.code(head, self.tail(sequence, number, head), whole);
            }
            std::ptr::copy_nonoverlapping(whole, host, self.run.bytes);
        }
    }

    /// Copies the tails of sequences to host memory. Their blocks there are no other sequence's, and nothing has them resident.
    ///
    /// # Safety
    /// The tensor, [B] int32, is valid; blocks are not coded.
    unsafe fn store_tails(&self, cpu: &Cpu, of: &Sequences, sequences: &Tensor) {
        let heads = self.options.kv_heads;
        cpu.parallel(sequences.dim(0) * heads, 2 * self.run.bytes, |task| {
            // SAFETY: the caller vouches for the tensor, of which this is a row.
            let sequence = unsafe { sequences.get::<i32, 1>([task / heads]) };
            let Some(sequence) = usize::try_from(sequence).ok() else { return };
            let Some(blocks) = of.blocks(sequence) else { return };
            let tail = self.tails[sequence];
            (tail.begin()..=tail.newest).for_each(|n| self.write_back(sequence, n as usize, blocks, task % heads));
        });
    }

    /// Moves the tokens of accepted nodes.
    ///
    /// # Safety
    /// The request's tensors are valid.
    pub unsafe fn compact(&mut self, cpu: &Cpu, sequences: &Sequences, r: &CompactRequest) {
        let (heads, size) = (self.options.kv_heads, self.options.block_size);
        let this = &*self;
        let row = |layer: &Layer, i: usize| {
            // SAFETY: the caller vouches for the tensors.
            let sequence = unsafe { r.sequence(i) };
            let (blocks, tail) = (sequences.blocks(sequence)?, layer.tails[sequence]);
            // SAFETY: as above.
            let moves = unsafe { r.moves(i, tail.begin() * size as i64..tail.tokens)? };
            Some((sequence, blocks, moves))
        };
        let token_bytes: usize = this.tail_run.parts.iter().map(|part| part.token).sum();
        cpu.parallel(r.batch() * heads, r.places().min(2 * size) * token_bytes, |task| {
            let (i, head) = (task / heads, task % heads);
            let Some((sequence, blocks, moves)) = row(this, i) else { return };
            for j in moves.moved..moves.len {
                // SAFETY: the path has a place j; both tokens lie in the tail, whose KV head is this task's.
                unsafe { this.move_token(sequence, head, moves.base + r.node(i, j) as usize, moves.base + j) };
            }
            moves.whole_blocks(size).for_each(|number| this.write_back(sequence, number, blocks, head));
        });
        for i in 0..r.batch() {
            let Some((sequence, _, moves)) = row(self, i) else { continue };
            self.tails[sequence].tokens = (moves.base + moves.len) as i64;
            let written = moves.whole_blocks(size).filter(|&number| !self.options.is_first(number as i64)).count();
            self.counters.bytes_written_back += (written * heads * self.run.bytes) as u64;
        }
    }

    /// # Safety
    /// Both are different tokens in the tail, which no other task touches of this KV head.
    unsafe fn move_token(&self, sequence: usize, head: usize, from: usize, to: usize) {
        let size = self.options.block_size;
        let [from, to] = [from, to].map(|token| (self.tail(sequence, token / size, head), token % size));
        for part in &self.tail_run.parts {
            let place = |(slot, token): (*mut u8, usize)| slot.wrapping_add(part.begin + token * part.token);
            // SAFETY: the part has room for each token's channels; places of different tokens are apart.
            unsafe { std::ptr::copy_nonoverlapping(place(from), place(to), part.token) };
        }
    }

    /// Copies a block that leaves the tail of a sequence to slots, if there are any for it.
    fn settle(&mut self, sequence: usize, number: usize, block: usize) {
        for head in 0..self.options.kv_heads {
            let settled = self.residents.settle(block * self.options.kv_heads + head);
            let Some((slot, evicted)) = settled else { return };
            self.counters.count(evicted);
            // SAFETY: a run as it lies on the host, and a slot, of the pool.
            unsafe { self.bring(head, self.whole_tail(sequence, number, head), slot) };
        }
    }

    /// Copies a run as it lies on the host to a slot, where it may be decoded.
    ///
    /// # Safety
    /// `from` is a run of KV head `head`, and nobody else uses the slot.
    unsafe fn bring(&self, head: usize, from: *const u8, slot: usize) {
        let to = self.slot(slot);
        // SAFETY: a slot has room for the run, or for what its codes stand for.
        unsafe {
            match self.coder.as_ref().filter(|_| self.options.is_decoded) {
                Some(coder) => coder.decode(head, from, to),
                None => std::ptr::copy_nonoverlapping(from, to, self.run.bytes),
            }
        }
    }

    /// # Safety
    /// The tensors are valid, the index is inside them, and no other task touches the token's place in the slot.
    unsafe fn write_token(&self, r: &AppendRequest, index: [usize; 3], slot: *mut u8, token: usize) {
        for (part, tensor) in self.tail_run.parts.iter().zip(r.parts()) {
            let Some(tensor) = tensor else { continue };
            let to = slot.wrapping_add(part.begin + token * part.token);
            // SAFETY: the index is inside the tensor, and the part has room for the token's channels.
            unsafe { copy_row(tensor, index, to) };
        }
    }

    /// # Safety
    /// The request's tensors are valid.
    pub unsafe fn resolve(&mut self, sequences: &Sequences, r: &ResolveRequest) {
        if r.is_empty() {
            return;
        }
        self.residents.begin(r.hold);
        // Blocks that have a slot are named first, so that none of them loses it to a missed block.
        for at in r.lists() {
            // SAFETY: the caller vouches for the tensors.
            for (_, sequence, id) in unsafe { r.entries(at) } {
                if let Place::Stored { host_run } = self.place(sequences, sequence, at[2], id) {
                    self.residents.name(host_run);
                }
            }
        }
        for at in r.lists() {
            let (mut resident_count, mut missed) = (0, 0);
            // SAFETY: as above.
            for (j, sequence, id) in unsafe { r.entries(at) } {
                let (slot, is_resident) = match self.place(sequences, sequence, at[2], id) {
                    Place::Nowhere => (NO_SLOT, false),
                    Place::Tail { slot } => (slot as i32, true),
                    Place::Stored { host_run } => self.stored(host_run),
                };
                missed += (slot != NO_SLOT && !is_resident) as usize;
                // SAFETY: as above; a list has no more resident entries than entries.
                unsafe {
                    r.wanted.set_slot(at, j, slot);
                    if let Some(resident) = r.resident.as_ref().filter(|_| is_resident) {
                        resident.set_id(at, resident_count, id);
                        resident.set_slot(at, resident_count, slot);
                    }
                }
                resident_count += is_resident as usize;
            }
            self.counters.hits += resident_count as u64;
            self.counters.misses += missed as u64;
            // SAFETY: as above.
            unsafe { r.set_counts(at, resident_count, missed) };
        }
    }

    /// The slot of a block that is not in a tail, and whether the block is resident.
    fn stored(&mut self, host_run: usize) -> (i32, bool) {
        let first = self.options.tail_slots();
        if let Some(slot) = self.residents.name(host_run) {
            return ((first + slot) as i32, self.residents.use_if_resident(slot));
        }
        let (slot, evicted) = self.residents.give_slot(host_run);
        self.counters.count(evicted);
        ((first + slot) as i32, false)
    }

    /// The place of block `id` of a sequence.
    fn place(&self, sequences: &Sequences, sequence: usize, head: usize, id: i32) -> Place {
        let Some(blocks) = sequences.blocks(sequence) else { return Place::Nowhere };
        let tail = &self.tails[sequence];
        let number = id as usize;
        if id < 0 || number >= blocks.len() || id as i64 > tail.newest {
            return Place::Nowhere;
        }
        if self.is_in_tail(tail, id as i64) {
            return Place::Tail { slot: self.tail_slot(sequence, number, head) };
        }
        Place::Stored { host_run: blocks[number] as usize * self.options.kv_heads + head }
    }

    /// Makes the copies that resolves have asked for. Returns their number.
    pub fn fetch(&mut self, cpu: &Cpu) -> usize {
        let (heads, copies) = (self.options.kv_heads, self.residents.copies());
        let this = &*self;
        cpu.parallel(copies, self.slot_run.bytes, |n| {
            let Some((slot, host_run)) = this.residents.copy(n) else { return };
            // SAFETY: a run of host memory and a run of the pool; every copy has its own slot.
            unsafe { this.bring(host_run % heads, this.host(host_run / heads, host_run % heads), slot) };
        });
        self.counters.bytes_fetched += (self.residents.finish_copies() * self.run.bytes) as u64;
        copies
    }
}

impl Counters {
    fn count(&mut self, evicted: Evicted) {
        self.evictions += (evicted != Evicted::Nothing) as u64;
        self.unused += (evicted == Evicted::Unused) as u64;
    }
}

/// The slot of an entry whose block the sequence does not have.
const NO_SLOT: i32 = -1;

enum Place {
    Nowhere,
    Tail {
        slot: usize,
    },
    /// In host memory; block · Hk + KV head is the number of the run.
    Stored {
        host_run: usize,
    },
}

/// Copies the channels of one token and KV head, or its scale.
///
/// # Safety
/// The tensor is valid, the index is inside it, and the row fits at `to`.
unsafe fn copy_row(tensor: &Tensor, [i, t, g]: [usize; 3], to: *mut u8) {
    let size = tensor.dtype.bytes();
    let at = [i, t, g].iter().enumerate().fold(0i64, |sum, (d, &n)| sum.wrapping_add(n as i64 * tensor.byte_stride(d)));
    let (from, channels, step) = (tensor.data().wrapping_offset(at as isize), tensor.dim(3), tensor.byte_stride(3));
    // SAFETY: the row is inside a valid tensor, and its channels fit at `to`.
    unsafe {
        if channels == 1 || step == size as i64 {
            return std::ptr::copy_nonoverlapping(from, to, channels * size);
        }
        for c in 0..channels {
            let from = from.wrapping_offset((c as i64 * step) as isize);
            std::ptr::copy_nonoverlapping(from, to.add(c * size), size);
        }
    }
}

const _: () = assert!(TAIL_BLOCKS == 3, "two blocks that lists may name, and one that tokens begin meanwhile");
