//! Attention on the CPU: Flash-Decoding over fixed chunks of each list.
//!
//! The list of one (sequence, KV head) is cut into chunks of a fixed number of entries, and these into groups; a [`Plan`]
//! says what each entry is. A task takes one chunk for up to eight query heads: it attends over the rows of a group, and
//! joins the groups, in the order of the list, to the chunk's state. Then the chunks are joined in order. Cuts and orders
//! follow from sizes alone, so that neither batch nor threads change a bit; a long list keeps every thread busy even when
//! the batch is 1.

use super::partial::{Copies, HEADS, Partial, Span, Tile};
use super::{MergeRequest, Outputs, Problem, Request};
use crate::core::dtype::{DType, Float, Rounded};
use crate::core::status::Result;
use crate::core::tensor::{self, Name, Tensor};
use crate::ops::simd::{Kernel, Lanes, Row, dispatch, widen};
use crate::ops::views::{BlockList, MAX_DIM, PagedKv, State};
use crate::runtime::cpu::{Cpu, Scratch};
use crate::with_float;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Tokens of a chunk, where one block has fewer.
const CHUNK_TOKENS: usize = 512;
/// Entries that a plan explains at a time.
const BATCH: usize = 64;

/// What an entry of the list adds to the result.
#[derive(Clone, Copy)]
pub enum Entry {
    Nothing,
    /// The tokens of this block.
    Block(usize),
    /// This one of the partials that were kept.
    Kept(usize),
}

/// What to join for each (sequence, KV head).
///
/// # Safety
/// Both functions: the tensors of the op are valid, `i` and `g` inside their shapes.
pub trait Plan: Sync {
    /// Number of entries.
    unsafe fn count(&self, i: usize, g: usize) -> usize;

    /// Explains the entries from `first` on, as many as `entries` takes; all are below the count.
    unsafe fn explain(&self, i: usize, g: usize, first: usize, entries: &mut [Entry]);
}

/// A plan, what it refers to, and where results go.
pub struct Job<'a> {
    pub problem: &'a Problem<'a>,
    pub plan: &'a dyn Plan,
    /// Entries that share a partial state.
    pub group: usize,
    /// Joined before everything else.
    pub start: Option<State<'a>>,
    /// What `Entry::Kept` names.
    pub kept: Option<State<'a>>,
    /// Where the state of each group goes.
    pub partials: Option<State<'a>>,
    pub outputs: &'a Outputs<'a>,
}

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    let job = |plan| Job {
        problem: &r.problem,
        plan,
        group: r.group,
        start: None,
        kept: None,
        partials: r.partials,
        outputs: &r.outputs,
    };
    match &r.list {
        Some(list) => run_job(cpu, &job(&Listed { problem: &r.problem, list })),
        None => run_job(cpu, &job(&Everything { problem: &r.problem })),
    }
}

struct Listed<'a> {
    problem: &'a Problem<'a>,
    list: &'a BlockList<'a>,
}

impl Plan for Listed<'_> {
    unsafe fn count(&self, i: usize, g: usize) -> usize {
        // SAFETY: forwarded to the caller.
        unsafe { self.list.count([i, 0, g]) }
    }

    unsafe fn explain(&self, i: usize, g: usize, first: usize, entries: &mut [Entry]) {
        for (j, entry) in (first..).zip(entries) {
            // SAFETY: forwarded to the caller.
            let block = unsafe { self.problem.block(self.list, i, g, j) };
            *entry = block.map_or(Entry::Nothing, Entry::Block);
        }
    }
}

struct Everything<'a> {
    problem: &'a Problem<'a>,
}

impl Plan for Everything<'_> {
    unsafe fn count(&self, i: usize, _: usize) -> usize {
        // SAFETY: forwarded to the caller.
        unsafe { self.problem.kv.pages.len(i) }.div_ceil(self.problem.block_size)
    }

    unsafe fn explain(&self, _: usize, _: usize, first: usize, entries: &mut [Entry]) {
        for (block, entry) in (first..).zip(entries) {
            *entry = Entry::Block(block);
        }
    }
}

/// Attends to what the plan names and joins it.
pub fn run_job(cpu: &Cpu, job: &Job) -> Result<()> {
    let Problem { heads, block_size, kv, .. } = job.problem;
    let (pairs, group) = (job.problem.batch() * heads.kv, heads.group());
    let chunk = (CHUNK_TOKENS / block_size).max(1).next_multiple_of(job.group);
    let scratch = cpu.scratch();
    // The chunks of pair n, a sequence and a KV head, are first_chunk[n] … first_chunk[n + 1].
    let first_chunk = scratch.slice(pairs + 1, 0usize)?;
    let mut tokens = 0usize;
    for n in 0..pairs {
        // SAFETY: the op's caller vouches for the tensors; n is a pair.
        let entries = unsafe { job.plan.count(n / heads.kv, n % heads.kv) };
        first_chunk[n + 1] = first_chunk[n] + entries.div_ceil(chunk);
        tokens = tokens.saturating_add(entries.saturating_mul(*block_size));
    }
    let first_chunk = &*first_chunk;
    let chunks = first_chunk[pairs];
    let chunk_states = chunk_states(&scratch, chunks, group, heads.dim)?;

    // A group of more than eight query heads is shared by several tasks.
    let parts = group.div_ceil(HEADS);
    let span_of = |pair: usize, part: usize| {
        let first = pair % heads.kv * group + part * HEADS;
        Span { row: pair / heads.kv, first, heads: (group - part * HEADS).min(HEADS), dim: heads.dim }
    };
    let slot_of = |chunk: usize, span: Span| Span { row: chunk, first: span.first % group, ..span };

    let chunk_bytes = (tokens / chunks.max(1)).saturating_mul(2 * heads.dim * kv.k.dtype.bytes());
    cpu.parallel(chunks * parts, chunk_bytes, |task| {
        let (c, part) = (task / parts, task % parts);
        let pair = first_chunk.partition_point(|&first| first <= c) - 1;
        let span = span_of(pair, part);
        let first = (c - first_chunk[pair]) * chunk;
        // SAFETY: as above.
        let count = unsafe { job.plan.count(pair / heads.kv, pair % heads.kv) };
        let entries = first..count.min(first.saturating_add(chunk));
        with_float!(kv.k.dtype, T => {
            let mut copies = [const { MaybeUninit::<Copies<T>>::uninit() }; 2];
            dispatch(AttendChunk {
                job,
                span,
                cutter: Cutter::new(job, span.row, pair % heads.kv, entries),
                tiles: copies.each_mut().map(|copies| Tile::new(&kv.k, &kv.v, copies)),
                to: (&chunk_states, slot_of(c, span)),
            });
        })
    });

    let join_bytes = chunks.div_ceil(pairs.max(1)) * HEADS * heads.dim * size_of::<f32>();
    cpu.parallel(pairs * parts, join_bytes, |task| {
        let (pair, part) = (task / parts, task % parts);
        let span = span_of(pair, part);
        let start = job.start.iter().map(|state| (state, span));
        let rest = (first_chunk[pair]..first_chunk[pair + 1]).map(|c| (&chunk_states, slot_of(c, span)));
        dispatch(Join { states: start.chain(rest), outputs: job.outputs, span });
    });
    Ok(())
}

/// One state per chunk, [chunks, G, D] and [chunks, G].
fn chunk_states<'a>(scratch: &'a Scratch, chunks: usize, group: usize, dim: usize) -> Result<State<'a>> {
    let tensor = |name, shape: &[usize]| {
        let values = scratch.slice(shape.iter().product(), 0f32)?;
        let place = scratch.slice(1, tensor::contiguous(values.as_mut_ptr().cast(), DType::F32, shape))?;
        // SAFETY: it describes the slice.
        Ok(unsafe { Tensor::unchecked(Name::from(name), &place[0]) })
    };
    Ok(State {
        acc: tensor("chunk acc", &[chunks, group, dim])?,
        m: tensor("chunk m", &[chunks, group])?,
        l: tensor("chunk l", &[chunks, group])?,
    })
}

/// Cuts the entries of a chunk into tiles.
struct Cutter<'a> {
    job: &'a Job<'a>,
    sequence: usize,
    kv_head: usize,
    /// Entries to come.
    entries: Range<usize>,
    /// Those explained last, and what they are.
    known: Range<usize>,
    explained: [Entry; BATCH],
    /// Tokens of the current block that are to come.
    tokens: Range<usize>,
    /// The group that the current entry ends.
    ends: Option<usize>,
    /// Has the current group rows in an earlier tile?
    open: bool,
}

impl<'a> Cutter<'a> {
    fn new(job: &'a Job, sequence: usize, kv_head: usize, entries: Range<usize>) -> Cutter<'a> {
        let explained = [Entry::Nothing; BATCH];
        Cutter { job, sequence, kv_head, entries, known: 0..0, explained, tokens: 0..0, ends: None, open: false }
    }

    /// Fills the next tile; false when there is none.
    ///
    /// # Safety
    /// The op's caller vouches for its tensors; the entries are below the count.
    unsafe fn cut<T: Row>(&mut self, tile: &mut Tile<T>) -> bool {
        let Problem { kv, block_size, .. } = self.job.problem;
        tile.clear();
        loop {
            while !self.tokens.is_empty() {
                if tile.room() == 0 {
                    self.open = true;
                    return true;
                }
                // SAFETY: forwarded to the caller; Pages keeps pages and rows inside k and v.
                unsafe { self.push_run(tile) };
            }
            if let Some(group) = self.ends.take()
                && (self.open || tile.len() > 0 || tile.kept.is_some() || self.job.partials.is_some())
            {
                tile.closes = Some(group);
                self.open = false;
                return true;
            }
            if tile.kept.is_some() {
                self.open |= tile.len() > 0;
                return true;
            }
            let Some(j) = self.entries.next() else { return false };
            // SAFETY: forwarded to the caller.
            match unsafe { self.explain(j) } {
                Entry::Nothing => {}
                Entry::Kept(n) => tile.kept = Some(n),
                Entry::Block(block) => {
                    // SAFETY: as above.
                    let len = unsafe { kv.pages.len(self.sequence) };
                    self.tokens = block * block_size..len.min((block + 1) * block_size);
                }
            }
            if (j + 1).is_multiple_of(self.job.group) || self.entries.is_empty() {
                self.ends = Some(j / self.job.group);
            }
        }
    }

    /// Adds to the tile what there is room for of the tokens to come, up to the end of a page. A missing page has none.
    ///
    /// # Safety
    /// As for [`Cutter::cut`]; there are tokens to come.
    unsafe fn push_run<T: Row>(&mut self, tile: &mut Tile<T>) {
        let PagedKv { k, v, pages, .. } = &self.job.problem.kv;
        let (p, row) = (self.tokens.start / pages.size, self.tokens.start % pages.size);
        let count = (pages.size - row).min(self.tokens.len()).min(tile.room());
        // SAFETY: forwarded to the caller.
        unsafe {
            if let Some(page) = pages.page(self.sequence, p) {
                (row..row + count).for_each(|row| tile.push(k, v, [page, row, self.kv_head]));
            }
        }
        self.tokens.start += count;
    }

    /// # Safety
    /// As for [`Cutter::cut`]; `j` is the entry after those before.
    unsafe fn explain(&mut self, j: usize) -> Entry {
        if !self.known.contains(&j) {
            self.known = j..self.entries.end.min(j + BATCH);
            let explained = &mut self.explained[..self.known.len()];
            // SAFETY: forwarded to the caller.
            unsafe { self.job.plan.explain(self.sequence, self.kv_head, j, explained) };
        }
        self.explained[j - self.known.start]
    }
}

struct AttendChunk<'a, T> {
    job: &'a Job<'a>,
    span: Span,
    cutter: Cutter<'a>,
    tiles: [Tile<'a, T>; 2],
    /// A place of its own for the result.
    to: (&'a State<'a>, Span),
}

impl<T: Row> Kernel for AttendChunk<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let AttendChunk { job, span, mut cutter, mut tiles, to } = self;
        let (mut total, mut group, mut one) = (Partial::EMPTY, Partial::EMPTY, Partial::EMPTY);
        let mut queries = [0.0; HEADS * MAX_DIM];
        // SAFETY: the op's caller vouches for its tensors, and the span is inside them.
        unsafe {
            read_queries::<L>(job.problem, span, &mut queries);
            // While one tile is attended, the rows of the next are on their way.
            let [mut tile, mut next] = tiles.each_mut();
            let mut found = cutter.cut(tile);
            while found {
                found = cutter.cut(next);
                if tile.len() > 0 {
                    let first = group.is_empty(span);
                    let target = if first { &mut group } else { &mut one };
                    target.attend::<L, T>(&queries, span, tile, next);
                    if !first {
                        group.fold::<L>(&one, span);
                    }
                }
                if let (Some(n), Some(kept)) = (tile.kept, &job.kept) {
                    one.read(kept, Some(n), span);
                    total.fold::<L>(&one, span);
                }
                if let Some(n) = tile.closes {
                    if let Some(partials) = &job.partials {
                        group.write(partials, Some(n), span);
                    }
                    total.fold::<L>(&group, span);
                    group.clear(span);
                }
                std::mem::swap(&mut tile, &mut next);
            }
            total.write(to.0, None, to.1);
        }
    }
}

/// Query heads of a span, in f32 and times the scale, zeros after them.
///
/// # Safety
/// The op's caller vouches for q, and the span is inside it.
#[inline(always)]
unsafe fn read_queries<L: Lanes>(problem: &Problem, span: Span, queries: &mut [f32; HEADS * MAX_DIM]) {
    for (h, query) in queries.chunks_exact_mut(span.dim).take(span.heads).enumerate() {
        with_float!(problem.q.dtype, T => {
            let row = problem.q.at::<T, 2>([span.row, span.first + h]);
            let step = problem.q.stride(2);
            // SAFETY: forwarded to the caller.
            unsafe {
                if step == 1 {
                    widen::<L, T>(row, problem.scale, query);
                } else {
                    for (d, x) in query.iter_mut().enumerate() {
                        *x = row.offset(d as isize * step).read().to_f32() * problem.scale;
                    }
                }
            }
        })
    }
}

/// Joins states in order and writes the results.
struct Join<'a, States> {
    /// Each with the heads to read there.
    states: States,
    outputs: &'a Outputs<'a>,
    span: Span,
}

impl<'a, States: Iterator<Item = (&'a State<'a>, Span)>> Kernel for Join<'a, States> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (mut total, mut one) = (Partial::EMPTY, Partial::EMPTY);
        for (state, place) in self.states {
            // SAFETY: the op's caller vouches for the tensors; the span is inside them.
            unsafe { one.read(state, None, place) };
            total.fold::<L>(&one, self.span);
        }
        // SAFETY: as above, and these heads are this task's.
        unsafe { write_outputs(&total, self.outputs, self.span) };
    }
}

/// # Safety
/// As for [`Partial::write`].
unsafe fn write_outputs(total: &Partial, outputs: &Outputs, span: Span) {
    // SAFETY: forwarded to the caller.
    unsafe {
        if let Some(state) = &outputs.state {
            total.write(state, None, span);
        }
        for h in 0..span.heads {
            let (m, l) = (total.m[h], total.l[h]);
            if let Some(lse) = &outputs.lse {
                lse.set([span.row, span.first + h], m + l.ln());
            }
            if let Some(out) = &outputs.out {
                let norm = if l == 0.0 { 0.0 } else { 1.0 / l };
                with_float!(out.dtype, T => {
                    let row = out.at::<T, 2>([span.row, span.first + h]);
                    for (d, &x) in total.acc[h * span.dim..(h + 1) * span.dim].iter().enumerate() {
                        row.offset(d as isize * out.stride(2)).write(T::from_f32(x * norm));
                    }
                })
            }
        }
    }
}

pub fn merge(cpu: &Cpu, r: &MergeRequest) {
    let parts = r.heads.q.div_ceil(HEADS);
    let bytes = r.inputs().count() * HEADS * r.heads.dim * size_of::<f32>();
    cpu.parallel(r.batch * parts, bytes, |task| {
        let first = task % parts * HEADS;
        let span = Span { row: task / parts, first, heads: (r.heads.q - first).min(HEADS), dim: r.heads.dim };
        dispatch(Join { states: r.inputs().map(|state| (state, span)), outputs: &r.outputs, span });
    });
}
