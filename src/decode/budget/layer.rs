//! A layer of the shape that is measured: its memory, filled at random, and the calls on it.

use super::options::{Options, Shape};
use crate::abi::{
    VWD_INDEX_AXIS, VWD_INDEX_MINMAX, VWD_REPAIR_EXACT, VWD_SELECT_AXIS, vwd_attention_args, vwd_attention_partials,
    vwd_attention_state, vwd_block_list, vwd_index, vwd_index_update_args, vwd_paged_kv, vwd_repair_args,
    vwd_select_blocks_args, vwd_stream, vwd_tensor,
};
use crate::core::allocate::{collected, filled, zeros};
use crate::core::dtype::{DType, Rounded};
use crate::core::random::Random;
use crate::core::status::{Error, Result};
use crate::core::tensor::{MAX_RANK, strided};
use crate::core::versioned::zeroed;
use crate::ops::attention::{self, partial_count};
use crate::ops::index::{self, block_summaries};
use crate::ops::{repair, select};
use crate::runtime::cuda::Parts;
use crate::runtime::{Memory, Session};
use crate::with_float;
use std::sync::Arc;

/// Bytes that are read before a timed call, so that caches hold nothing of its inputs: more than they have.
const FLUSH_ON_CPU: usize = 64 << 20;
const FLUSH_ON_CUDA: usize = 256 << 20;

pub struct Layer {
    session: Arc<Session>,
    pub stream: vwd_stream,
    pub shape: Shape,
    memory: Memory,
    plan: Plan,
}

/// Offsets in bytes, and sizes.
struct Plan {
    /// Groups of the sequences that are measured; those of the flush follow them.
    groups: usize,
    flush_groups: usize,
    k: usize,
    v: usize,
    /// The two tensors of the summaries.
    summaries: [usize; 2],
    q: usize,
    out: usize,
    page_table: usize,
    index_table: usize,
    lens: usize,
    zeros: usize,
    flush_table: usize,
    flush_lens: usize,
    /// Ids and counts of the guesses, of what was selected, and of what selection writes.
    lists: [[usize; 2]; 3],
    acc: usize,
    m: usize,
    l: usize,
    bytes: usize,
}

/// Lists of a layer.
#[derive(Clone, Copy)]
pub enum List {
    Guessed,
    Selected,
    /// The output of selection.
    Chosen,
}

/// Sequences of one length.
#[derive(Clone, Copy)]
pub struct Point {
    pub context: usize,
    pub batch: usize,
}

/// As many as the longest sequences have.
fn groups(options: &Options) -> usize {
    let Options { shape, grid, .. } = options;
    let largest = |axis: &[f32]| *axis.last().expect("a value") as usize;
    largest(&grid.contexts).div_ceil(shape.group_tokens()).saturating_mul(largest(&grid.batches))
}

/// The number of pages that sequences have.
pub fn pages(options: &Options) -> usize {
    groups(options).saturating_mul(options.shape.pages_of_group())
}

impl Plan {
    fn of(options: &Options, flush_groups: usize) -> Plan {
        let Options { shape, grid, .. } = options;
        let largest = |axis: &[f32]| *axis.last().expect("a value") as usize;
        let (batch, positions) = (largest(&grid.batches), grid.max_draft + 1);
        let groups = groups(options);
        let tokens = groups.saturating_add(flush_groups).saturating_mul(shape.group_tokens());
        let (heads, element) = (shape.kv_heads, shape.dtype.bytes());
        let capacity = shape.guesses(*grid.ratios.last().expect("a ratio"));
        let partials = shape.partials(capacity);
        let (pages, blocks) = (shape.pages_of_group(), shape.blocks_of_group());
        let summaries = block_summaries(shape.index_kind(), shape.dims[0], shape.dtype);
        const WORD: usize = 4;
        let mut parts = Parts::default();
        let mut take = |size: &[usize]| parts.take(size);
        let plan = Plan {
            groups,
            flush_groups,
            k: take(&[tokens, heads, shape.dims[0], element]),
            v: take(&[tokens, heads, shape.dims[1], element]),
            summaries: summaries.map(|(channels, dtype)| take(&[groups, blocks, heads, channels, dtype.bytes()])),
            q: take(&[batch, positions, shape.query_heads, shape.dims[0], WORD]),
            out: take(&[batch, positions, shape.query_heads, shape.dims[1], WORD]),
            page_table: take(&[groups, pages, WORD]),
            index_table: take(&[groups, WORD]),
            lens: take(&[batch, WORD]),
            zeros: take(&[batch, WORD]),
            flush_table: take(&[flush_groups.max(1), pages, WORD]),
            flush_lens: take(&[WORD]),
            lists: [capacity, shape.k, shape.k]
                .map(|capacity| [take(&[batch, heads, capacity, WORD]), take(&[batch, heads, WORD])]),
            acc: take(&[batch, shape.query_heads, partials, shape.dims[1], WORD]),
            m: take(&[batch, shape.query_heads, partials, WORD]),
            l: take(&[batch, shape.query_heads, partials, WORD]),
            bytes: 0,
        };
        Plan { bytes: parts.bytes, ..plan }
    }
}

impl Shape {
    fn index_kind(&self) -> u32 {
        if self.method == VWD_SELECT_AXIS { VWD_INDEX_AXIS } else { VWD_INDEX_MINMAX }
    }

    fn pages_of_group(&self) -> usize {
        self.group_tokens() / self.page_size
    }

    fn blocks_of_group(&self) -> usize {
        self.group_tokens() / self.block_size
    }

    /// The number of states that repair needs of guesses: one, or one for each group of entries.
    fn partials(&self, capacity: usize) -> usize {
        if self.repair_mode == VWD_REPAIR_EXACT { partial_count(capacity, self.partial_blocks as u32) } else { 1 }
    }
}

impl Layer {
    /// `beside`: bytes that the profile takes beside the layer, or why it cannot.
    pub fn new(session: &Arc<Session>, stream: vwd_stream, options: &Options, beside: Result<usize>) -> Result<Layer> {
        let needed = match (Plan::of(options, 0).bytes, beside) {
            (own, Ok(beside)) => own.saturating_add(beside),
            (own, Err(_)) if own > options.limit_bytes => own,
            (_, Err(error)) => return Err(error),
        };
        if needed > options.limit_bytes {
            let (context, batch) = (options.grid.contexts.last(), options.grid.batches.last());
            let of = format!("{} sequences of {} tokens", batch.unwrap_or(&0.0), context.unwrap_or(&0.0));
            return Err(Error::argument(
                "options.limit_bytes",
                options.limit_bytes,
                format!("at least {needed}, for {of}"),
            ));
        }
        let shape = options.shape;
        // Keys, values and a page table.
        let row = shape.kv_heads * (shape.dims[0] + shape.dims[1]) * shape.dtype.bytes();
        let group = shape.group_tokens() * row + shape.pages_of_group() * size_of::<i32>();
        let most = if session.cuda().is_some() { FLUSH_ON_CUDA } else { FLUSH_ON_CPU };
        // Parts are aligned: some bytes of the limit stay for that.
        let free = (options.limit_bytes - needed).saturating_sub(8 * Memory::ALIGNMENT);
        let plan = Plan::of(options, free.min(most) / group);
        let memory = Memory::alloc(session, plan.bytes, "a budget's profile")?;
        let layer = Layer { session: session.clone(), stream, shape, memory, plan };
        layer.fill(options)?;
        Ok(layer)
    }

    /// Writes what stays for all points: keys, values and queries at random, and the pages that are read before each call.
    fn fill(&self, options: &Options) -> Result<()> {
        let Layer { shape, plan, memory, .. } = self;
        let mut random = Random::new(1);
        let tokens = (plan.groups + plan.flush_groups) * shape.group_tokens();
        for (offset, dim) in [(plan.k, shape.dims[0]), (plan.v, shape.dims[1])] {
            fill(&mut random, memory, offset, shape.dtype, tokens * shape.kv_heads * dim)?;
        }
        let batch = options.grid.batches.last().map_or(1, |&batch| batch as usize);
        let queries = batch * (options.grid.max_draft + 1) * shape.query_heads * shape.dims[0];
        fill(&mut random, memory, plan.q, shape.query_dtype(), queries)?;
        let pages = shape.pages_of_group();
        let flushed = plan.groups * pages..(plan.groups + plan.flush_groups) * pages;
        let flushed = collected(flushed.map(|n| n as i32), "the pages that a budget's profile reads between calls")?;
        memory.write(plan.flush_table, &flushed)?;
        memory.write(plan.flush_lens, &[(plan.flush_groups * shape.group_tokens()) as i32])
    }

    /// Lays out the sequences of a point, in pages that do not follow each other, and summarises their blocks.
    pub fn lay_out(&self, at: Point) -> Result<()> {
        let Layer { session, shape, plan, memory, .. } = self;
        let (pages, count) = (shape.pages_of_group(), at.batch * self.groups_of(at.context));
        const PURPOSE: &str = "the page table of a budget's profile";
        let mut order: Vec<i32> = collected((0..plan.groups).map(|n| n as i32), PURPOSE)?;
        let mut random = Random::new(2);
        for n in (1..order.len()).rev() {
            order.swap(n, random.below(n + 1));
        }
        order.truncate(count);
        let page_of = |n: usize| order[n / pages] * pages as i32 + (n % pages) as i32;
        let table = collected((0..count * pages).map(page_of), PURPOSE)?;
        memory.write(plan.page_table, &table)?;
        memory.write(plan.index_table, &order)?;
        memory.write(plan.lens, &filled(at.context as i32, at.batch, PURPOSE)?)?;
        let kv = self.kv(at);
        let update = vwd_index_update_args { k: kv.k, page_table: kv.page_table, seq_lens: kv.seq_lens, ..zeroed() };
        let index = self.index(at);
        index::update(session, &index::UpdateRequest::from_c(session, &update, &index)?, self.stream)
    }

    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The number of pages that sequences have, the first ones.
    pub fn pages(&self) -> usize {
        self.plan.groups * self.shape.pages_of_group()
    }

    /// [B] zeros.
    pub fn zeros(&self, at: Point) -> vwd_tensor {
        self.packed(self.plan.zeros, DType::I32, &[at.batch])
    }

    fn groups_of(&self, context: usize) -> usize {
        context.div_ceil(self.shape.group_tokens())
    }

    /// The number of blocks of a sequence.
    pub fn blocks_of(&self, context: usize) -> usize {
        context.div_ceil(self.shape.block_size)
    }

    /// Writes the ids of a list, the same number for each sequence and KV head; the list has memory for `capacity` of them.
    pub fn write_list(&self, at: Point, list: List, capacity: usize, ids: impl Fn(usize) -> Vec<i32>) -> Result<()> {
        let rows = at.batch * self.shape.kv_heads;
        const PURPOSE: &str = "the lists of a budget's profile";
        let (mut all, mut counts): (Vec<i32>, Vec<i32>) = (zeros(rows * capacity, PURPOSE)?, zeros(rows, PURPOSE)?);
        for (row, count) in counts.iter_mut().enumerate() {
            let ids = ids(row);
            all[row * capacity..][..ids.len()].copy_from_slice(&ids);
            *count = ids.len() as i32;
        }
        let [at_ids, at_counts] = self.plan.lists[list as usize];
        self.memory.write(at_ids, &all)?;
        self.memory.write(at_counts, &counts)
    }

    // --- the calls -----------------------------------------------------------------------------------------------

    /// Reads other keys and values, all of them.
    pub fn flush(&self, stream: vwd_stream) -> Result<()> {
        let Layer { plan, shape, .. } = self;
        if plan.flush_groups == 0 {
            return Ok(());
        }
        let (page_table, seq_lens) = (
            self.packed(plan.flush_table, DType::I32, &[1, plan.flush_groups * shape.pages_of_group()]),
            self.packed(plan.flush_lens, DType::I32, &[1]),
        );
        let kv = vwd_paged_kv { page_table, seq_lens, ..self.kv(Point { context: 1, batch: 1 }) };
        let args = self.attention(Point { context: 1, batch: 1 }, 1);
        attention::Request::with(&self.session, &args, &kv, |r| attention::run(&self.session, r, stream))
    }

    /// Whether there is anything to read.
    pub fn flushes(&self) -> bool {
        self.plan.flush_groups > 0
    }

    pub fn flush_scratch(&self) -> Result<u64> {
        if self.plan.flush_groups == 0 {
            return Ok(0);
        }
        let at = Point { context: 1, batch: 1 };
        let pages = self.plan.flush_groups * self.shape.pages_of_group();
        let page_table = self.packed(self.plan.flush_table, DType::I32, &[1, pages]);
        let kv = vwd_paged_kv { page_table, ..self.kv(at) };
        attention::Request::with(&self.session, &self.attention(at, 1), &kv, |r| attention::scratch(&self.session, r))
    }

    fn select_args(&self, at: Point) -> vwd_select_blocks_args {
        vwd_select_blocks_args {
            method: self.shape.method,
            block_size: self.shape.block_size as u32,
            k: self.shape.k as u32,
            init_blocks: self.shape.init_blocks as u32,
            local_blocks: self.shape.local_blocks as u32,
            q: self.q(at, 1),
            seq_lens: self.kv(at).seq_lens,
            selected: self.list(at, List::Chosen, self.shape.k),
            ..zeroed()
        }
    }

    /// Selection; `scratch` tells what it takes instead.
    pub fn select(&self, at: Point, work: Work) -> Result<u64> {
        let (session, args, index) = (&self.session, self.select_args(at), self.index(at));
        let request = select::Request::of_blocks(session, &args, &index)?;
        match work {
            Work::Run => select::blocks(session, &request, self.stream).map(|()| 0),
            Work::TellScratch => select::blocks_scratch(session, &request),
        }
    }

    /// Attention over a list; of guesses, with what repair needs.
    pub fn attend(&self, at: Point, list: List, capacity: usize, work: Work) -> Result<u64> {
        let mut args = vwd_attention_args {
            block_size: self.shape.block_size as u32,
            list: self.list(at, list, capacity),
            ..self.attention(at, 1)
        };
        if let List::Guessed = list {
            args.partial_blocks = self.shape.partial_blocks as u32;
            if self.shape.repair_mode == VWD_REPAIR_EXACT {
                args.partials = self.partials(at, capacity);
            } else {
                args.state = self.state(at);
            }
        }
        self.run_attention(&args, &self.kv(at), work)
    }

    /// Dense attention of so many positions.
    pub fn dense(&self, at: Point, positions: usize, work: Work) -> Result<u64> {
        self.run_attention(&self.attention(at, positions), &self.kv(at), work)
    }

    fn run_attention(&self, args: &vwd_attention_args, kv: &vwd_paged_kv, work: Work) -> Result<u64> {
        let session = &self.session;
        attention::Request::with(session, args, kv, |request| match work {
            Work::Run => attention::run(session, request, self.stream).map(|()| 0),
            Work::TellScratch => attention::scratch(session, request),
        })
    }

    /// Repair of guesses, whose list has this capacity.
    pub fn repair(&self, at: Point, capacity: usize, work: Work) -> Result<u64> {
        let mut args = vwd_repair_args {
            mode: self.shape.repair_mode,
            block_size: self.shape.block_size as u32,
            partial_blocks: self.shape.partial_blocks as u32,
            scale: self.shape.scale(),
            q: self.q(at, 1),
            predicted: self.list(at, List::Guessed, capacity),
            selected: self.list(at, List::Selected, self.shape.k),
            out: self.out(at, 1),
            ..zeroed()
        };
        if self.shape.repair_mode == VWD_REPAIR_EXACT {
            args.predicted_partials = self.partials(at, capacity);
        } else {
            args.predicted_state = self.state(at);
        }
        let session = &self.session;
        repair::Request::with(session, &args, &self.kv(at), |request| match work {
            Work::Run => repair::run(session, request, self.stream).map(|()| 0),
            Work::TellScratch => repair::scratch(session, request),
        })
    }

    // --- views ---------------------------------------------------------------------------------------------------

    /// A tensor in the layer's memory, in C order.
    pub fn packed(&self, offset: usize, dtype: DType, extents: &[usize]) -> vwd_tensor {
        let mut steps = [1; MAX_RANK];
        for d in (1..extents.len()).rev() {
            steps[d - 1] = steps[d] * extents[d];
        }
        strided(self.session.device(), self.memory.at(offset), dtype, extents, &steps)
    }

    pub fn kv(&self, at: Point) -> vwd_paged_kv {
        let Layer { shape, plan, .. } = self;
        let pages = (plan.groups + plan.flush_groups) * shape.pages_of_group();
        let rows = |dim| [pages, shape.page_size, shape.kv_heads, dim];
        let of_sequence = self.groups_of(at.context) * shape.pages_of_group();
        vwd_paged_kv {
            k: self.packed(plan.k, shape.dtype, &rows(shape.dims[0])),
            v: self.packed(plan.v, shape.dtype, &rows(shape.dims[1])),
            page_table: self.packed(plan.page_table, DType::I32, &[at.batch, of_sequence]),
            seq_lens: self.packed(plan.lens, DType::I32, &[at.batch]),
            ..zeroed()
        }
    }

    fn index(&self, at: Point) -> vwd_index {
        let Layer { shape, plan, .. } = self;
        let kinds = block_summaries(shape.index_kind(), shape.dims[0], shape.dtype);
        let [first, second] = std::array::from_fn(|n| {
            let (channels, dtype) = kinds[n];
            self.packed(plan.summaries[n], dtype, &[plan.groups, shape.blocks_of_group(), shape.kv_heads, channels])
        });
        let table = self.packed(plan.index_table, DType::I32, &[at.batch, self.groups_of(at.context)]);
        let (kind, block_size) = (shape.index_kind(), shape.block_size as u32);
        let index = vwd_index { kind, block_size, table, ..zeroed() };
        match kind {
            VWD_INDEX_AXIS => vwd_index { axes: first, axis_range: second, ..index },
            _ => vwd_index { key_max: first, key_min: second, ..index },
        }
    }

    /// [B, heads, channels], or with positions after B if there are several.
    fn rows(&self, offset: usize, dtype: DType, at: Point, positions: usize, channels: usize) -> vwd_tensor {
        let heads = self.shape.query_heads;
        match positions {
            1 => self.packed(offset, dtype, &[at.batch, heads, channels]),
            _ => self.packed(offset, dtype, &[at.batch, positions, heads, channels]),
        }
    }

    pub fn q(&self, at: Point, positions: usize) -> vwd_tensor {
        self.rows(self.plan.q, self.shape.query_dtype(), at, positions, self.shape.dims[0])
    }

    pub fn out(&self, at: Point, positions: usize) -> vwd_tensor {
        self.rows(self.plan.out, self.shape.query_dtype(), at, positions, self.shape.dims[1])
    }

    fn attention(&self, at: Point, positions: usize) -> vwd_attention_args {
        let (scale, q, out) = (self.shape.scale(), self.q(at, positions), self.out(at, positions));
        vwd_attention_args { scale, q, out, ..zeroed() }
    }

    fn list(&self, at: Point, list: List, capacity: usize) -> vwd_block_list {
        let ([ids, counts], heads) = (self.plan.lists[list as usize], self.shape.kv_heads);
        vwd_block_list {
            ids: self.packed(ids, DType::I32, &[at.batch, heads, capacity]),
            counts: self.packed(counts, DType::I32, &[at.batch, heads]),
            slots: strided(self.session.device(), std::ptr::null_mut(), DType::I32, &[], &[]),
        }
    }

    fn state(&self, at: Point) -> vwd_attention_state {
        let Layer { shape, plan, .. } = self;
        vwd_attention_state {
            acc: self.packed(plan.acc, DType::F32, &[at.batch, shape.query_heads, shape.dims[1]]),
            m: self.packed(plan.m, DType::F32, &[at.batch, shape.query_heads]),
            l: self.packed(plan.l, DType::F32, &[at.batch, shape.query_heads]),
        }
    }

    fn partials(&self, at: Point, capacity: usize) -> vwd_attention_partials {
        let Layer { shape, plan, .. } = self;
        let count = shape.partials(capacity);
        vwd_attention_partials {
            acc: self.packed(plan.acc, DType::F32, &[at.batch, shape.query_heads, count, shape.dims[1]]),
            m: self.packed(plan.m, DType::F32, &[at.batch, shape.query_heads, count]),
            l: self.packed(plan.l, DType::F32, &[at.batch, shape.query_heads, count]),
        }
    }
}

/// What a call of the layer does.
#[derive(Clone, Copy)]
pub enum Work {
    Run,
    /// Tells the bytes of scratch that it takes.
    TellScratch,
}

/// Writes random values of −1 … 1; FP8 of below 2.
fn fill(random: &mut Random, memory: &Memory, offset: usize, dtype: DType, count: usize) -> Result<()> {
    if dtype.is_float8() {
        // Without the highest bit of the exponent a code is below 2, and no NaN.
        let code = |random: &mut Random| (random.next_u32() >> 24) as u8 & 0xbf;
        return pieces(random, count, code, |at, codes| memory.write(offset + at, codes));
    }
    with_float!(dtype, T => {
        let value = |random: &mut Random| T::from_f32(random.uniform());
        pieces(random, count, value, |at, values| memory.write(offset + at * size_of::<T>(), values))
    })
}

/// Gives `count` random values piece by piece, each with the number of values before it. They are pieces of a pool, each from elsewhere in it:
/// to make every value would take longer than all that is timed.
fn pieces<T>(
    random: &mut Random,
    count: usize,
    make: impl Fn(&mut Random) -> T,
    mut give: impl FnMut(usize, &[T]) -> Result<()>,
) -> Result<()> {
    let made = (0..count.min(POOL)).map(|_| make(random));
    let pool: Vec<T> = collected(made, "the random values of a budget's profile")?;
    for begin in (0..count).step_by(PIECE) {
        let length = PIECE.min(count - begin);
        let from = if count > POOL { random.below(POOL - PIECE) } else { begin };
        give(begin, &pool[from..][..length])?;
    }
    Ok(())
}

/// How many values the pool of random values has, and a piece of it.
const POOL: usize = 1 << 22;
const PIECE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_are_as_many_as_asked_for_and_no_piece_is_that_before_it() {
        for count in [5, PIECE + 3, POOL, POOL + PIECE / 2] {
            let mut values: Vec<u32> = vec![];
            let give = |at: usize, piece: &[u32]| {
                assert_eq!(at, values.len());
                values.extend(piece);
                Ok(())
            };
            pieces(&mut Random::new(1), count, Random::next_u32, give).expect("values");
            assert_eq!(values.len(), count);
            let pieces: Vec<&[u32]> = values.chunks(PIECE).collect();
            assert!(pieces.windows(2).all(|two| two[0][..two[1].len()] != *two[1]), "{count} values");
        }
    }
}
