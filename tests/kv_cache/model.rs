//! A cache beside a model of it: sequences as lists of tokens, each of which is told by its number. On the CPU and on CUDA.

#[path = "arena.rs"]
mod arena;
#[path = "codes.rs"]
mod codes;
#[path = "handle.rs"]
mod handle;

pub use arena::{Arena, Placed};
pub use handle::Cache;

use crate::support::*;
use codes::{Codes, Tail};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use vanward::abi::*;

pub struct Shape {
    pub layers: usize,
    pub heads: usize,
    pub block: usize,
    pub dims: [usize; 2],
    pub dtype: DType,
    pub scales: bool,
    /// In INT4 once they are whole.
    pub coded: bool,
    /// Slots hold what the codes stand for.
    pub decoded: bool,
    pub sequences: usize,
    /// Blocks of host memory.
    pub blocks: usize,
    /// The slots of each layer; one number stands for all layers.
    pub slots: &'static [u32],
}

pub const SHAPES: [Shape; 9] = [
    Shape {
        layers: 2,
        heads: 2,
        block: 4,
        dims: [16, 16],
        dtype: BF16,
        scales: false,
        coded: false,
        decoded: false,
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
        coded: false,
        decoded: false,
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
        coded: false,
        decoded: false,
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
        coded: false,
        decoded: false,
        sequences: 20,
        blocks: 64,
        slots: &[8],
    },
    Shape {
        layers: 2,
        heads: 2,
        block: 16,
        dims: [64, 64],
        dtype: BF16,
        scales: false,
        coded: true,
        decoded: false,
        sequences: 6,
        blocks: 40,
        slots: &[32, 12],
    },
    Shape {
        layers: 1,
        heads: 1,
        block: 32,
        dims: [96, 64],
        dtype: F32,
        scales: false,
        coded: true,
        decoded: false,
        sequences: 4,
        blocks: 30,
        slots: &[10],
    },
    Shape {
        layers: 2,
        heads: 2,
        block: 16,
        dims: [128, 128],
        dtype: BF16,
        scales: false,
        coded: true,
        decoded: true,
        sequences: 6,
        blocks: 40,
        slots: &[32, 12],
    },
    Shape {
        layers: 1,
        heads: 1,
        block: 48,
        dims: [256, 128],
        dtype: F16,
        scales: false,
        coded: true,
        decoded: true,
        sequences: 4,
        blocks: 30,
        slots: &[10],
    },
    Shape {
        layers: 1,
        heads: 1,
        block: 16,
        dims: [96, 224],
        dtype: F32,
        scales: false,
        coded: true,
        decoded: true,
        sequences: 4,
        blocks: 30,
        slots: &[10],
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
            coding: if self.coded { VWD_CODING_INT4 } else { VWD_CODING_EXACT },
            slot_coding: if self.decoded { VWD_SLOTS_DECODED } else { VWD_SLOTS_AS_STORED },
            ..args()
        }
    }

    fn slots(&self, layer: usize) -> usize {
        self.slots[layer.min(self.slots.len() - 1)] as usize
    }

    /// The slots of the tails. Behind them lie those that blocks are fetched into.
    fn tail_slots(&self) -> usize {
        self.sequences * self.heads * if self.coded { 4 } else { 3 }
    }

    /// Bytes of a token's key, value and scales.
    fn parts(&self) -> [usize; 4] {
        let [key, value] = self.dims.map(|dim| dim * self.dtype.bytes());
        let scale = if self.scales { 4 } else { 0 };
        [key, value, scale, scale]
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

/// The bytes of one part of a token: any bytes, or where they are coded numbers.
fn content(shape: &Shape, token: u64, layer: usize, head: usize, part: usize) -> Vec<u8> {
    let mut x = token << 16 ^ (layer << 8 | head << 4 | part) as u64;
    let mut next = move || {
        // SplitMix64
        x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let y = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        y ^ y >> 27
    };
    if shape.coded {
        return codes::row(shape, part, next);
    }
    let bytes = shape.parts()[part];
    (0..bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(bytes).collect()
}

#[derive(Default)]
struct Sequence {
    /// Its number in the cache.
    number: u32,
    tokens: Vec<u64>,
    /// Each by a number of its own, which those that share it have in common.
    blocks: Vec<u64>,
    tail: Tail,
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
    codes: Codes,
    /// Parts of tokens that were decoded, by token, layer, KV head and part.
    decoded: HashMap<[u64; 4], Vec<u8>>,
}

impl<'s> Checked<'s> {
    pub fn new(shape: &'s Shape, backend: &'s Backend) -> Checked<'s> {
        let all = codes::all_weights(shape);
        let weights = if shape.coded { all.as_ptr() } else { std::ptr::null() };
        let cache = Cache::on(backend, &vwd_kv_cache_options { weights, ..shape.options() });
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
            codes: Codes::new(),
            decoded: HashMap::new(),
        }
    }

    fn content(&self, token: u64, layer: usize, head: usize, part: usize) -> Vec<u8> {
        let decoded = self.decoded.get(&[token, layer as u64, head as u64, part as u64]);
        decoded.cloned().unwrap_or_else(|| content(self.shape, token, layer, head, part))
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
                let parent = &mut self.sequences[at];
                let all = parent.tokens.clone();
                let (tail, end) = (parent.tail, whole as i64);
                parent.tail.first = tail.first.max(end);
                let newest = if rest > 0 { end } else { tail.newest.min(end - 1) };
                let tail_of_child = Tail { newest, first: end };
                self.sequences.push(Sequence { number, tokens: all[..tokens].to_vec(), blocks, tail: tail_of_child });
                self.reopen(self.sequences.len() - 1, tail, &all);
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
        let (tail, all) = (self.sequences[at].tail, self.sequences[at].tokens.clone());
        if tail.newest >= whole as i64 {
            self.sequences[at].tail = Tail { newest: whole as i64 - (rest == 0) as i64, first: whole as i64 };
        }
        self.sequences[at].tokens.truncate(tokens);
        self.reopen(at, tail, &all);
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
            let end = (begin[i] as usize + lens[i]) as i64;
            let tail = &mut self.sequences[row].tail;
            tail.newest = tail.newest.max(if lens[i] > 0 { (end - 1) / self.shape.block as i64 } else { -1 });
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
            let places = (0..batch).flat_map(|i| (0..most).flat_map(move |t| (0..heads).map(move |g| (i, t, g))));
            let given =
                |(i, t, g)| if part < 2 || scales { content(self.shape, token(i, t), layer, g, part) } else { vec![] };
            let bytes: Vec<u8> = places.flat_map(given).collect();
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
        if self.shape.coded && slot >= 0 {
            let is_exact = id == 0 || sequence.tail.holds(id as usize);
            assert_eq!((slot as usize) < self.shape.tail_slots(), is_exact, "block {id} in slot {slot}");
        }
    }

    /// Takes the slots of a layer as they are now.
    fn look_at(&self, layer: usize) {
        let vwd_kv_cache_layer { k, int4_k, .. } = &self.views[layer];
        let end = |t: &vwd_tensor| t.data as usize + (t.shape[0] * t.strides[0] * t.dtype_bits as i64 / 8) as usize;
        let (tails, slots) = (self.shape.tail_slots(), self.shape.slots(layer));
        let has_codes = self.shape.coded && !self.shape.decoded;
        let expected = if has_codes { [tails, slots] } else { [tails + slots, 0] };
        assert_eq!([k.shape[0], int4_k.shape[0]], expected.map(|n| n as i64));
        let mut pool = self.pool.borrow_mut();
        pool.resize(end(if has_codes { int4_k } else { k }) - k.data as usize, 0);
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
        let coded = (self.shape.coded && slot as usize >= self.shape.tail_slots())
            .then(|| self.coded(layer, head, &sequence.tokens[begin..begin + self.shape.block]));
        if let Some(coded) = coded.as_ref().filter(|_| !self.shape.decoded) {
            return self.compare_codes([layer, head, slot as usize - self.shape.tail_slots()], coded, &pool);
        }
        for (n, &token) in sequence.tokens[begin..end].iter().enumerate() {
            for (part, (t, size)) in
                tensors.into_iter().zip(self.shape.parts()).enumerate().filter(|(_, (_, size))| *size > 0)
            {
                let width = t.dtype_bits as i64 / 8;
                assert!((slot as i64) < t.shape[0]);
                let at = (slot as i64 * t.strides[0] + n as i64 * t.strides[1]) * width;
                let found = &pool[t.data as usize - view.k.data as usize + at as usize..][..size];
                let expected = match &coded {
                    Some(coded) => self.codes.in_slot(self.shape, coded, [layer, head, n, part]),
                    None => self.content(token, layer, head, part),
                };
                assert!(
                    expected == found,
                    "part {part} of token {} of block {id}, layer {layer}, KV head {head}, slot {slot}",
                    begin + n
                );
            }
        }
    }
}
