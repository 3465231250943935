//! A cache beside a model of it: sequences as lists of tokens, each of which is told by its number. On the CPU and on CUDA.

#[path = "arena.rs"]
mod arena;

pub use arena::{Arena, Placed};

use crate::support::*;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use vanward::abi::*;
use vanward::capi::*;

pub struct Shape {
    pub layers: usize,
    pub heads: usize,
    pub block: usize,
    pub dims: [usize; 2],
    pub dtype: DType,
    pub scales: bool,
    pub sequences: usize,
    /// Of host memory.
    pub blocks: usize,
    /// Of each layer, or of all.
    pub slots: &'static [u32],
}

pub const SHAPES: [Shape; 4] = [
    Shape {
        layers: 2,
        heads: 2,
        block: 4,
        dims: [16, 16],
        dtype: BF16,
        scales: false,
        sequences: 6,
        blocks: 40,
        slots: &[32],
    },
    Shape {
        layers: 1,
        heads: 3,
        block: 1,
        dims: [16, 24],
        dtype: F32,
        scales: false,
        sequences: 5,
        blocks: 60,
        slots: &[40],
    },
    Shape {
        layers: 3,
        heads: 1,
        block: 5,
        dims: [24, 16],
        dtype: F8E4M3,
        scales: true,
        sequences: 9,
        blocks: 30,
        slots: &[8, 24, 16],
    },
    Shape {
        layers: 1,
        heads: 1,
        block: 16,
        dims: [16, 16],
        dtype: F8E5M2,
        scales: false,
        sequences: 20,
        blocks: 64,
        slots: &[8],
    },
];

/// Most blocks of a sequence.
pub const MOST_BLOCKS: usize = 12;
const HOLD: usize = 2;

impl Shape {
    pub fn options(&self) -> vwd_kv_cache_options {
        vwd_kv_cache_options {
            layers: self.layers as u32,
            kv_heads: self.heads as u32,
            block_size: self.block as u32,
            key_dim: self.dims[0] as u32,
            value_dim: self.dims[1] as u32,
            dtype_code: self.dtype.code as u32,
            dtype_bits: self.dtype.bits as u32,
            token_scales: self.scales as u32,
            max_sequences: self.sequences as u32,
            max_blocks: MOST_BLOCKS as u32,
            host_blocks: self.blocks as u32,
            slots: if self.slots.len() == 1 { self.slots[0] } else { 0 },
            layer_slots: if self.slots.len() == 1 { std::ptr::null() } else { self.slots.as_ptr() },
            hold: HOLD as u32,
            ..args()
        }
    }

    fn slots(&self, layer: usize) -> usize {
        self.slots[layer.min(self.slots.len() - 1)] as usize
    }

    /// Bytes of a token's key, value and scales.
    fn parts(&self) -> [usize; 4] {
        let [key, value] = self.dims.map(|dim| dim * self.dtype.bytes());
        let scale = if self.scales { 4 } else { 0 };
        [key, value, scale, scale]
    }
}

/// A cache that releases itself.
pub struct Cache {
    pub raw: *mut vwd_kv_cache,
    stream: vwd_stream,
}

impl Cache {
    pub fn on(backend: &Backend, options: &vwd_kv_cache_options) -> Cache {
        let mut raw = std::ptr::null_mut();
        // SAFETY: everything is valid.
        assert_ok(unsafe { vwd_kv_cache_create(backend.session(), options, &mut raw) });
        Cache { raw, stream: backend.stream() }
    }

    pub fn stats(&self) -> vwd_kv_cache_stats {
        let mut stats = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_info(self.raw, &mut stats) });
        stats
    }

    pub fn view(&self, layer: usize) -> vwd_kv_cache_layer {
        let mut view = args();
        // SAFETY: both are valid.
        assert_ok(unsafe { vwd_kv_cache_view(self.raw, layer as u32, &mut view) });
        view
    }

    pub fn add(&self) -> Result<u32, vwd_status> {
        let mut sequence = u32::MAX;
        // SAFETY: both are valid.
        let status = unsafe { vwd_kv_cache_add(self.raw, &mut sequence, self.stream) };
        if status == VWD_OK { Ok(sequence) } else { Err(status) }
    }

    pub fn extend(&self, sequence: u32, tokens: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_extend(self.raw, sequence, tokens as u64, self.stream) }
    }

    pub fn fork(&self, sequence: u32, tokens: usize) -> Result<u32, vwd_status> {
        let mut fork = u32::MAX;
        // SAFETY: both are valid.
        let status = unsafe { vwd_kv_cache_fork(self.raw, sequence, tokens as u64, &mut fork, self.stream) };
        if status == VWD_OK { Ok(fork) } else { Err(status) }
    }

    pub fn truncate(&self, sequence: u32, tokens: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_truncate(self.raw, sequence, tokens as u64, self.stream) }
    }

    pub fn free(&self, sequence: u32) {
        // SAFETY: the cache lives.
        assert_ok(unsafe { vwd_kv_cache_free(self.raw, sequence, self.stream) });
    }

    pub fn append(&self, call: &vwd_kv_cache_append_args) -> vwd_status {
        // SAFETY: the callers' tensors are valid until the stream has passed.
        unsafe { vwd_kv_cache_append(self.raw, call, self.stream) }
    }

    pub fn resolve(&self, call: &vwd_kv_cache_resolve_args) -> vwd_status {
        // SAFETY: the callers' tensors are valid until the stream has passed.
        unsafe { vwd_kv_cache_resolve(self.raw, call, self.stream) }
    }

    pub fn fetch(&self, layer: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_fetch(self.raw, layer as u32, self.stream) }
    }

    pub fn wait(&self, layer: usize) -> vwd_status {
        // SAFETY: the cache lives.
        unsafe { vwd_kv_cache_wait(self.raw, layer as u32, self.stream) }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: created above, released once.
        unsafe { vwd_kv_cache_release(self.raw) }
    }
}

/// What many operations have met.
pub fn assert_met(stats: &vwd_kv_cache_stats) {
    let vwd_kv_cache_stats { hits, misses, evictions, unused, .. } = *stats;
    assert!(hits > 0 && misses > 0 && evictions > 0 && unused > 0, "{hits} {misses} {evictions} {unused}");
}

#[allow(dead_code, reason = "of the tests of the CPU alone")]
pub const NO_STREAM: vwd_stream = std::ptr::null_mut();

/// Packed, in host memory.
pub fn tensor<T>(data: &[T], dtype: DType, shape: &[usize]) -> vwd_tensor {
    assert_eq!(size_of_val(data), (shape.iter().product::<usize>() * dtype.bytes()).next_multiple_of(size_of::<T>()));
    let mut t = vwd_tensor { device_type: 1, dtype_code: dtype.code, dtype_bits: dtype.bits, lanes: 1, ..absent() };
    let mut stride = 1;
    for d in (0..shape.len()).rev() {
        (t.shape[d], t.strides[d]) = (shape[d] as i64, stride);
        stride *= shape[d] as i64;
    }
    (t.ndim, t.data) = (shape.len() as i32, data.as_ptr().cast_mut().cast::<c_void>());
    t
}

/// The bytes of one part of a token.
fn content(token: u64, layer: usize, head: usize, part: usize, bytes: usize) -> impl Iterator<Item = u8> {
    let mut x = token << 16 ^ (layer << 8 | head << 4 | part) as u64;
    let mut next = move || {
        // SplitMix64
        x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let y = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (y ^ y >> 27).to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(move |_| next()).take(bytes)
}

#[derive(Default)]
struct Sequence {
    /// Its number in the cache.
    number: u32,
    tokens: Vec<u64>,
    /// Each by a number of its own, which those that share it have in common.
    blocks: Vec<u64>,
}

/// A cache, and what must be in it.
pub struct Checked<'s> {
    shape: &'s Shape,
    backend: &'s Backend,
    // Before its tensors' memory: it waits for what is under way.
    cache: Cache,
    arena: Arena<'s>,
    /// The slots of a layer, as they were when they were last looked at.
    pool: RefCell<Vec<u8>>,
    views: Vec<vwd_kv_cache_layer>,
    sequences: Vec<Sequence>,
    /// Sequences that hold each block.
    holders: HashMap<u64, usize>,
    /// Tokens that the cache has to drop.
    dropped: u64,
    /// Tokens and blocks so far.
    tokens: u64,
    blocks: u64,
}

impl<'s> Checked<'s> {
    pub fn new(shape: &'s Shape, backend: &'s Backend) -> Checked<'s> {
        let cache = Cache::on(backend, &shape.options());
        Checked {
            shape,
            backend,
            views: (0..shape.layers).map(|layer| cache.view(layer)).collect(),
            cache,
            arena: Arena::new(backend),
            pool: RefCell::default(),
            sequences: vec![],
            holders: HashMap::new(),
            dropped: 0,
            tokens: 0,
            blocks: 0,
        }
    }

    /// One operation, with what follows from it.
    pub fn step(&mut self, rng: &mut Rng) {
        match rng.size(0..=19) {
            0 => self.add(),
            1 => self.free(rng),
            2 => self.fork(rng),
            3 => self.truncate(rng),
            4..=9 => self.append(rng),
            _ => self.read(rng),
        }
        if rng.one_in(64) {
            self.compare_counts();
        }
    }

    fn compare_counts(&self) {
        self.backend.finish(VWD_OK);
        let stats = self.cache.stats();
        let (blocks, all) = (self.holders.len(), self.shape.blocks);
        let found = (stats.sequences as usize, stats.blocks_in_use as usize, stats.blocks_free as usize);
        assert_eq!(found, (self.sequences.len(), blocks, all - blocks));
        assert_eq!(stats.dropped_tokens, self.dropped);
    }

    /// Frees everything: no block is lost. Returns what was counted.
    pub fn finish(mut self) -> vwd_kv_cache_stats {
        while let Some(sequence) = self.sequences.pop() {
            self.cache.free(sequence.number);
        }
        self.backend.finish(VWD_OK);
        let stats = self.cache.stats();
        assert_eq!((stats.sequences, stats.blocks_in_use, stats.blocks_free as usize), (0, 0, self.shape.blocks));
        stats
    }

    fn free_blocks(&self) -> usize {
        self.shape.blocks - self.holders.len()
    }

    fn new_block(&mut self) -> u64 {
        self.blocks += 1;
        self.holders.insert(self.blocks, 1);
        self.blocks
    }

    fn give_up(&mut self, block: u64) {
        let holders = self.holders.get_mut(&block).expect("a block");
        *holders -= 1;
        if *holders == 0 {
            self.holders.remove(&block);
        }
    }

    fn pick(&self, rng: &mut Rng) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| rng.size(0..=self.sequences.len() - 1))
    }

    fn add(&mut self) {
        match self.cache.add() {
            Ok(number) => self.sequences.push(Sequence { number, ..Sequence::default() }),
            Err(status) => {
                assert_eq!((status, self.sequences.len()), (VWD_ERROR_OUT_OF_MEMORY, self.shape.sequences));
            }
        }
    }

    fn free(&mut self, rng: &mut Rng) {
        let Some(at) = self.pick(rng) else { return };
        let sequence = self.sequences.swap_remove(at);
        self.cache.free(sequence.number);
        sequence.blocks.into_iter().for_each(|block| self.give_up(block));
    }

    fn fork(&mut self, rng: &mut Rng) {
        let Some(at) = self.pick(rng) else { return };
        let tokens = rng.size(0..=self.sequences[at].tokens.len());
        let (whole, rest) = (tokens / self.shape.block, tokens % self.shape.block);
        let fits = self.free_blocks() >= (rest > 0) as usize && self.sequences.len() < self.shape.sequences;
        match self.cache.fork(self.sequences[at].number, tokens) {
            Ok(number) => {
                assert!(fits);
                let mut blocks = self.sequences[at].blocks[..whole].to_vec();
                blocks.iter().for_each(|block| *self.holders.get_mut(block).expect("a block") += 1);
                if rest > 0 {
                    blocks.push(self.new_block());
                }
                let tokens = self.sequences[at].tokens[..tokens].to_vec();
                self.sequences.push(Sequence { number, tokens, blocks });
            }
            Err(status) => assert_eq!((status, fits), (VWD_ERROR_OUT_OF_MEMORY, false)),
        }
    }

    fn truncate(&mut self, rng: &mut Rng) {
        let Some(at) = self.pick(rng) else { return };
        let sequence = &self.sequences[at];
        let tokens = rng.size(0..=sequence.tokens.len());
        let (whole, rest) = (tokens / self.shape.block, tokens % self.shape.block);
        let cut = sequence.blocks[whole + (rest > 0) as usize..].to_vec();
        let is_shared = rest > 0 && self.holders[&sequence.blocks[whole]] > 1;
        let freed = cut.iter().filter(|block| self.holders[block] == 1).count();
        let fits = !is_shared || self.free_blocks() + freed > 0;
        let status = self.cache.truncate(sequence.number, tokens);
        assert_eq!(status, if fits { VWD_OK } else { VWD_ERROR_OUT_OF_MEMORY });
        if !fits {
            return;
        }
        self.sequences[at].tokens.truncate(tokens);
        self.sequences[at].blocks.truncate(whole + (rest > 0) as usize);
        cut.into_iter().for_each(|block| self.give_up(block));
        if is_shared {
            let block = self.new_block();
            let shared = std::mem::replace(&mut self.sequences[at].blocks[whole], block);
            self.give_up(shared);
        }
    }

    /// Chunks of a prefill or drafts, of some sequences at once; the last of the drafts are rejected.
    fn append(&mut self, rng: &mut Rng) {
        let mut rows: Vec<usize> = (0..self.sequences.len()).collect();
        rng.shuffle(&mut rows);
        rows.truncate(rng.size(1..=3));
        let is_prefill = rng.one_in(6);
        let most = match is_prefill {
            true => 4 * self.shape.block,
            // Drafts over the edges of several blocks.
            false if rng.one_in(3) => self.most_drafts(),
            false => self.shape.block.min(4),
        };
        let mut lens = vec![0; rows.len()];
        for (&row, len) in rows.iter().zip(&mut lens) {
            *len = rng.size(0..=most);
            if !self.extend(row, *len) {
                *len = 0;
            }
        }
        let begin: Vec<i32> = rows.iter().map(|&row| self.sequences[row].tokens.len() as i32).collect();
        let first = self.tokens + 1;
        self.tokens += (rows.len() * most) as u64;
        let token = |i: usize, t: usize| first + (i * most + t) as u64;
        for layer in 0..self.shape.layers {
            self.append_to(layer, &rows, &begin, &lens, most, token);
        }
        if rng.one_in(4) {
            self.append_after_a_gap(&rows, &begin, &lens);
        }
        for (i, &row) in rows.iter().enumerate() {
            let kept =
                if is_prefill { lens[i] } else { rng.size(self.fewest_kept(begin[i] as usize, lens[i])..=lens[i]) };
            self.sequences[row].tokens.extend((0..kept).map(|t| token(i, t)));
        }
    }

    fn most_drafts(&self) -> usize {
        (2 * self.shape.block + 2).max(4)
    }

    /// How many of the tokens of an append stay at least, so that the next append begins in the last two blocks.
    fn fewest_kept(&self, begin: usize, len: usize) -> usize {
        let newest = (begin + len).div_ceil(self.shape.block).max(2) - 1;
        ((newest - 1) * self.shape.block).saturating_sub(begin).min(len)
    }

    /// Tokens before which one is missing, in the newest block or past it: all are dropped. A row that has got no token may have rejected
    /// ones after those that the model has.
    fn append_after_a_gap(&mut self, rows: &[usize], begin: &[i32], lens: &[usize]) {
        let rejected = self.most_drafts() as i32;
        let gap = |len: usize| if len > 0 { 1 } else { rejected + 1 };
        let past: Vec<i32> = begin.iter().zip(lens).map(|(&begin, &len)| begin + len as i32 + gap(len)).collect();
        let (most, first) = (2, self.tokens + 1);
        self.tokens += (rows.len() * most) as u64;
        for layer in 0..self.shape.layers {
            self.append_to(layer, rows, &past, &vec![most; rows.len()], most, |i, t| first + (i * most + t) as u64);
        }
        self.dropped += (self.shape.layers * rows.len() * most) as u64;
    }

    /// Makes room for more tokens if there is any.
    fn extend(&mut self, row: usize, more: usize) -> bool {
        let sequence = &self.sequences[row];
        let tokens = sequence.tokens.len() + more;
        let needed = tokens.div_ceil(self.shape.block);
        let missing = needed.saturating_sub(sequence.blocks.len());
        let expected = match () {
            _ if needed > MOST_BLOCKS => VWD_ERROR_INVALID_ARGUMENT,
            _ if missing > self.free_blocks() => VWD_ERROR_OUT_OF_MEMORY,
            _ => VWD_OK,
        };
        let status = self.cache.extend(sequence.number, tokens);
        assert_eq!(status, expected);
        if status == VWD_OK {
            for _ in 0..missing {
                let block = self.new_block();
                self.sequences[row].blocks.push(block);
            }
        }
        status == VWD_OK
    }

    fn append_to(
        &self,
        layer: usize,
        rows: &[usize],
        begin: &[i32],
        lens: &[usize],
        most: usize,
        token: impl Fn(usize, usize) -> u64,
    ) {
        let Shape { heads, dims, dtype, scales, .. } = *self.shape;
        let numbers: Vec<i32> = rows.iter().map(|&row| self.sequences[row].number as i32).collect();
        let lens: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
        let batch = rows.len();
        // Words, so that they are aligned.
        let words = |part: usize| -> Vec<u64> {
            let size = self.shape.parts()[part];
            let places = (0..batch).flat_map(|i| (0..most).flat_map(move |t| (0..heads).map(move |g| (i, t, g))));
            let bytes: Vec<u8> = places.flat_map(|(i, t, g)| content(token(i, t), layer, g, part, size)).collect();
            let word = |chunk: &[u8]| u64::from_le_bytes(std::array::from_fn(|n| chunk.get(n).copied().unwrap_or(0)));
            bytes.chunks(8).map(word).collect()
        };
        self.arena.clear();
        let parts: Vec<Placed<u64>> = (0..4).map(|part| self.arena.place(&words(part))).collect();
        let ints = |values: &[i32]| self.arena.place(values).tensor(I32, &[batch]);
        let scale = |part: usize| if scales { parts[part].tensor(F32, &[batch, most, heads]) } else { absent() };
        let call = vwd_kv_cache_append_args {
            layer: layer as u32,
            sequences: ints(&numbers),
            begin: ints(begin),
            lens: ints(&lens),
            k: parts[0].tensor(dtype, &[batch, most, heads, dims[0]]),
            v: parts[1].tensor(dtype, &[batch, most, heads, dims[1]]),
            k_scale: scale(2),
            v_scale: scale(3),
            ..args()
        };
        self.backend.finish(self.cache.append(&call));
    }

    /// Resolves random lists. What is resident is there at once, and everything after a fetch, if there is one.
    fn read(&mut self, rng: &mut Rng) {
        let Shape { heads, layers, .. } = *self.shape;
        let layer = rng.size(0..=layers - 1);
        let batch = rng.size(1..=2);
        let most = self.shape.slots(layer) / HOLD / (batch * heads);
        if most == 0 || self.sequences.is_empty() {
            return;
        }
        let (cap, lists) = (rng.size(1..=most.min(6)), batch * heads);
        let rows: Vec<usize> = (0..batch).map(|_| rng.size(0..=self.sequences.len() - 1)).collect();
        let numbers: Vec<i32> = rows.iter().map(|&row| self.sequences[row].number as i32).collect();
        let id = |rng: &mut Rng, list: usize| {
            let blocks = self.sequences[rows[list / heads]].tokens.len().div_ceil(self.shape.block) as i64;
            let range = if rng.one_in(10) { -1..=MOST_BLOCKS as i64 } else { 0..=(blocks - 1).max(0) };
            rng.int(range) as i32
        };
        let ids: Vec<i32> = (0..lists * cap).map(|n| id(rng, n / cap)).collect();
        let counts: Vec<i32> = (0..lists).map(|_| rng.int(-1..=cap as i64 + 1) as i32).collect();
        let (shape, lead) = ([batch, heads, cap], [batch, heads]);
        self.arena.clear();
        let untouched = |len: usize| self.arena.place(&vec![-7i32; len]);
        let [wanted, resident_ids, resident_slots] = [(); 3].map(|()| untouched(lists * cap));
        let [resident_counts, missed] = [(); 2].map(|()| untouched(lists));
        let call = vwd_kv_cache_resolve_args {
            layer: layer as u32,
            sequences: self.arena.place(&numbers).tensor(I32, &[batch]),
            wanted: vwd_block_list {
                ids: self.arena.place(&ids).tensor(I32, &shape),
                counts: self.arena.place(&counts).tensor(I32, &lead),
                slots: wanted.tensor(I32, &shape),
            },
            resident: vwd_block_list {
                ids: resident_ids.tensor(I32, &shape),
                counts: resident_counts.tensor(I32, &lead),
                slots: resident_slots.tensor(I32, &shape),
            },
            missed_counts: missed.tensor(I32, &lead),
            ..args()
        };
        self.backend.finish(self.cache.resolve(&call));
        let [wanted, resident_ids, resident_slots, resident_counts, missed] =
            [wanted, resident_ids, resident_slots, resident_counts, missed].map(|placed| placed.read());
        let is_fetched = !rng.one_in(4);
        self.look_at(layer);
        for list in 0..lists {
            let (row, head, count) = (rows[list / heads], list % heads, counts[list].clamp(0, cap as i32) as usize);
            let there = resident_counts[list] as usize;
            let mut resident =
                (0..there).map(|j| (resident_ids[list * cap + j], resident_slots[list * cap + j])).peekable();
            let mut nowhere = 0;
            for j in 0..count {
                let (id, slot) = (ids[list * cap + j], wanted[list * cap + j]);
                self.compare_place(row, id, slot);
                if resident.next_if_eq(&(id, slot)).is_some() {
                    self.compare(layer, row, head, id, slot);
                } else {
                    nowhere += (slot < 0) as usize;
                }
            }
            assert_eq!(resident.next(), None, "resident entries are wanted ones, in order");
            assert_eq!(there + nowhere + missed[list] as usize, count);
            assert!(wanted[list * cap + count..(list + 1) * cap].iter().all(|&slot| slot == -7), "past the count");
        }
        // Copies may still be under way when the next calls are made.
        if rng.one_in(2) {
            assert_ok(self.cache.fetch(layer));
        }
        if !is_fetched {
            return;
        }
        self.backend.finish(self.cache.wait(layer));
        self.look_at(layer);
        for list in 0..lists {
            for j in 0..counts[list].clamp(0, cap as i32) as usize {
                let at = list * cap + j;
                self.compare(layer, rows[list / heads], list % heads, ids[at], wanted[at]);
            }
        }
    }

    /// Blocks with tokens have a slot, those that the sequence lacks have none.
    fn compare_place(&self, row: usize, id: i32, slot: i32) {
        let sequence = &self.sequences[row];
        let with_tokens = sequence.tokens.len().div_ceil(self.shape.block);
        if (0..with_tokens as i32).contains(&id) {
            assert!(slot >= 0, "block {id} of {with_tokens} has no slot");
        } else if !(0..sequence.blocks.len() as i32).contains(&id) {
            assert_eq!(slot, -1, "block {id} of {}", sequence.blocks.len());
        }
    }

    /// Takes the slots of a layer as they are now.
    fn look_at(&self, layer: usize) {
        let Shape { sequences, heads, .. } = *self.shape;
        let slots = self.shape.slots(layer);
        let k = &self.views[layer].k;
        let run = k.strides[0] as usize * (k.dtype_bits as usize / 8);
        let mut pool = self.pool.borrow_mut();
        pool.resize((sequences * 3 * heads + slots) * run, 0);
        self.backend.read(k.data as usize, &mut pool);
    }

    /// Every byte of a block's tokens in its slot.
    fn compare(&self, layer: usize, row: usize, head: usize, id: i32, slot: i32) {
        let sequence = &self.sequences[row];
        let begin = id.max(0) as usize * self.shape.block;
        if id < 0 || slot < 0 || begin >= sequence.tokens.len() {
            return;
        }
        let (view, pool) = (&self.views[layer], self.pool.borrow());
        let tensors = [&view.k, &view.v, &view.k_scale, &view.v_scale];
        let end = sequence.tokens.len().min(begin + self.shape.block);
        for (n, &token) in sequence.tokens[begin..end].iter().enumerate() {
            for (part, (t, size)) in
                tensors.into_iter().zip(self.shape.parts()).enumerate().filter(|(_, (_, size))| *size > 0)
            {
                let width = t.dtype_bits as i64 / 8;
                assert!((slot as i64) < t.shape[0]);
                let at = (slot as i64 * t.strides[0] + n as i64 * t.strides[1]) * width;
                let found = &pool[t.data as usize - view.k.data as usize + at as usize..][..size];
                let same = content(token, layer, head, part, size).eq(found.iter().copied());
                assert!(
                    same,
                    "part {part} of token {} of block {id}, layer {layer}, KV head {head}, slot {slot}",
                    begin + n
                );
            }
        }
    }
}
