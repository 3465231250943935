//! What attention and repair have in common on the CPU: Flash-Decoding over fixed chunks of each list.
//!
//! What reads one list is a unit: a sequence's KV head, for all positions that share the list or for one that has its own.
//! The entries of its list are cut into chunks of a fixed number, and these into entry groups, which share a partial; a [`Plan`] says what each entry
//! is. A task takes one chunk for up to 64 query rows and reads its tokens once: it attends over the tiles of an entry group,
//! and joins the entry groups, in the order of the list, to the chunk's state. Then the chunks are joined in order. Cuts and
//! orders follow from sizes alone, and a row's bits from the tokens that it sees, so that neither batch nor threads nor
//! other positions change a bit; a long list keeps every thread busy even when the batch is 1.

mod attend_coded;
mod coded;
mod cutter;
mod join;
mod partial;
mod scores;
mod span;
mod term;
mod tile;
mod weigh;

pub use join::join_states;
pub use term::join_term;

use super::{Outputs, Problem, Seen};
use crate::core::dtype::Float;
use crate::core::status::Result;
use crate::ops::simd::codes::padded;
use crate::ops::simd::{Kernel, Lanes, Row, dispatch, widen};
use crate::ops::views::{BlockList, ListAt, State};
use crate::runtime::cpu::{Cpu, Rows};
use crate::with_float;
use coded::CodedQueries;
use cutter::Cutter;
use partial::{Partial, Queries, Room};
use span::{HEADS, Span};
use std::ops::Range;
use tile::{Ahead, Tile};

/// Tokens of a chunk, where one block has fewer.
const CHUNK_TOKENS: usize = 512;
/// Spans that one task attends to, eight rows each.
const SPANS: usize = 8;

/// What an entry of the list adds to the result.
#[derive(Clone, Copy)]
pub enum Entry {
    Nothing,
    /// The tokens of this block.
    Block(usize),
    /// This one of the partials that were kept.
    Kept(usize),
}

/// What to join for each list.
///
/// # Safety
/// Both functions: the tensors of the op are valid, and there is such a list.
pub trait Plan: Sync {
    /// The entries that matter: those before add nothing.
    unsafe fn entries(&self, at: ListAt) -> Range<usize>;

    /// Explains the entries from `first` on, as many as `entries` takes; none lies past the last.
    unsafe fn explain(&self, at: ListAt, first: usize, entries: &mut [Entry]);
}

/// A plan, what it refers to, and where results go.
pub struct Job<'a> {
    pub problem: &'a Problem<'a>,
    pub plan: &'a dyn Plan,
    /// Whether each position has a list of its own.
    pub own_lists: bool,
    /// The list that says in which page each entry lies.
    pub slots: Option<&'a BlockList<'a>>,
    /// Entries that share a partial state.
    pub entries_per_partial: usize,
    /// Joined before everything else.
    pub start: Option<&'a State<'a>>,
    /// What `Entry::Kept` names.
    pub kept: Option<&'a State<'a>>,
    /// Where the state of each entry group goes.
    pub partials: Option<&'a State<'a>>,
    pub outputs: &'a Outputs<'a>,
}

/// What reads one list.
#[derive(Clone, Copy)]
pub struct Unit {
    pub sequence: usize,
    pub kv_head: usize,
    /// The first position, and how many there are.
    pub position: usize,
    pub positions: usize,
}

impl Unit {
    pub fn list(&self) -> ListAt {
        [self.sequence, self.position, self.kv_head]
    }
}

/// How a job is cut.
struct Cut {
    units: usize,
    /// Spans of a unit: eight of its query rows each.
    spans: usize,
    /// Entries of a chunk.
    chunk: usize,
    /// Channels of a value, and floats of a partial.
    value_dim: usize,
    floats: usize,
}

impl Cut {
    fn of(job: &Job) -> Cut {
        let Problem { positions, heads, kv, block_size, .. } = job.problem;
        let (lists, shared) = if job.own_lists { (positions.count(), 1) } else { (1, positions.count()) };
        let rows = shared * heads.group();
        Cut {
            units: positions.batch() * lists * heads.kv,
            spans: rows.div_ceil(HEADS),
            chunk: (CHUNK_TOKENS / block_size).max(1).next_multiple_of(job.entries_per_partial),
            value_dim: kv.value_dim(),
            floats: Partial::floats(rows.min(HEADS), kv.value_dim()),
        }
    }
}

impl Job<'_> {
    fn unit(&self, n: usize) -> Unit {
        let (kv_heads, count) = (self.problem.heads.kv, self.problem.positions.count());
        let (rest, kv_head) = (n / kv_heads, n % kv_heads);
        match self.own_lists {
            true => Unit { sequence: rest / count, kv_head, position: rest % count, positions: 1 },
            false => Unit { sequence: rest, kv_head, position: 0, positions: count },
        }
    }

    fn span(&self, unit: Unit, n: usize) -> Span {
        let group = self.problem.heads.group();
        Span {
            sequence: unit.sequence,
            position: unit.position,
            head: unit.kv_head * group,
            group,
            first: n * HEADS,
            heads: (unit.positions * group - n * HEADS).min(HEADS),
            ranked: self.problem.positions.dimension().is_some(),
        }
    }

    /// The chunks of a unit: those before are known to add nothing.
    ///
    /// # Safety
    /// The op's caller vouches for the tensors; there is such a unit.
    unsafe fn chunks(&self, cut: &Cut, unit: Unit) -> Range<usize> {
        // SAFETY: the unit's list is one of the plan's.
        let entries = unsafe { self.plan.entries(unit.list()) };
        entries.start / cut.chunk..entries.end.div_ceil(cut.chunk)
    }
}

/// Attends to what the plan names and joins it.
pub fn run_job(cpu: &Cpu, job: &Job) -> Result<()> {
    let Problem { heads, block_size, kv, .. } = job.problem;
    let cut = &Cut::of(job);
    let scratch = cpu.scratch();
    // The chunks of unit n are first_chunk[n] … first_chunk[n + 1].
    let first_chunk = scratch.slice(cut.units + 1, 0usize)?;
    let mut tokens = 0usize;
    for n in 0..cut.units {
        // SAFETY: the op's caller vouches for the tensors.
        let (chunks, entries) = unsafe { (job.chunks(cut, job.unit(n)), job.plan.entries(job.unit(n).list())) };
        first_chunk[n + 1] = first_chunk[n] + chunks.len();
        tokens = tokens.saturating_add(entries.len().saturating_mul(*block_size));
    }
    let first_chunk = &*first_chunk;
    let chunks = first_chunk[cut.units];
    let states = scratch.slice(chunks * cut.spans * cut.floats, 0f32)?;

    let sets = cut.spans.div_ceil(SPANS);
    let of_codes = |floats: usize| if job.problem.int4.is_some() { floats } else { 0 };
    let memory = Memory {
        spans: cut.spans.min(SPANS),
        dim: heads.dim,
        cut,
        copies: Tile::<f32>::floats(job.problem),
        means: Tile::<f32>::floats_of_means(job.problem),
        coded_queries: of_codes(CodedQueries::floats(heads.dim)),
        sums: of_codes(HEADS * padded(cut.value_dim)),
    };
    {
        let states = Rows::new(states, cut.floats);
        let chunk_bytes = (tokens / chunks.max(1)).saturating_mul((heads.dim + cut.value_dim) * kv.k.dtype.bytes());
        cpu.in_shares(&scratch, chunks * sets, memory.floats(), chunk_bytes, |task, room| {
            let (c, set) = (task / sets, task % sets);
            let n = first_chunk.partition_point(|&first| first <= c) - 1;
            let unit = job.unit(n);
            let spans = set * SPANS..cut.spans.min((set + 1) * SPANS);
            // SAFETY: as above; the states of this chunk's spans are this task's.
            unsafe {
                let first = (job.chunks(cut, unit).start + c - first_chunk[n]) * cut.chunk;
                let entries = first..job.plan.entries(unit.list()).end.min(first.saturating_add(cut.chunk));
                let parts = std::array::from_fn(|p| {
                    let span = spans.clone().nth(p)?;
                    Some((job.span(unit, span), states.row(c * cut.spans + span)))
                });
                with_float!(tile::element(job.problem), T => {
                    attend_chunk::<T>(job, unit, entries, parts, &memory, room)
                })
            }
        })?;
    }
    join::join_chunks(cpu, &scratch, job, cut, first_chunk, states)
}

/// What a task needs beside the states that it makes.
struct Memory<'c> {
    spans: usize,
    dim: usize,
    cut: &'c Cut,
    /// Floats that a copy of a tile takes, and the means of its blocks.
    copies: usize,
    means: usize,
    /// Floats that queries take as they are multiplied with codes, and sums of codes.
    coded_queries: usize,
    sums: usize,
}

impl Memory<'_> {
    fn floats(&self) -> usize {
        let of_span = HEADS * self.dim + self.coded_queries + self.cut.floats;
        self.spans * of_span + self.cut.floats + 2 * (self.copies + self.means) + self.sums
    }
}

/// The first floats of what is left.
fn take<'w>(memory: &mut &'w mut [f32], count: usize) -> &'w mut [f32] {
    let (taken, rest) = std::mem::take(memory).split_at_mut(count);
    *memory = rest;
    taken
}

/// A span's part of a chunk.
struct Share<'w> {
    span: Span,
    queries: Queries<'w>,
    /// The state of the entry group that is being attended to, and of all groups before.
    entry_group: Partial<'w>,
    total: Partial<'w>,
}

/// Attends to a chunk. `parts` are spans, each with memory for its result.
///
/// Everything lies in variables of this function: a struct of them would be some six kilobytes, copied for each chunk.
///
/// # Safety
/// The op's caller vouches for the tensors; the entries are below the count.
unsafe fn attend_chunk<'a, T: Row>(
    job: &'a Job<'a>,
    unit: Unit,
    entries: Range<usize>,
    parts: [Option<(Span, &'a mut [f32])>; SPANS],
    memory: &Memory,
    mut room: &'a mut [f32],
) {
    let (problem, value_dim) = (job.problem, memory.cut.value_dim);
    let mut seen = tile::NOWHERE;
    let mut shares = [const { None::<Share> }; SPANS];
    let mut last = 0;
    for (n, (share, part)) in shares.iter_mut().zip(parts).enumerate() {
        let Some((span, total)) = part else { break };
        let queries = Queries {
            values: take(&mut room, HEADS * memory.dim),
            seen: std::array::from_fn(|n| match n < span.heads {
                // SAFETY: the span's rows are the problem's.
                true => unsafe { problem.seen(unit.sequence, span.row(n).0) },
                false => Seen::NOTHING,
            }),
            cap: problem.soft_cap,
            value_dim,
            coded: problem.int4.map(|_| CodedQueries::new(take(&mut room, memory.coded_queries))),
        };
        for range in queries.seen[..span.heads].iter().map(Seen::range).filter(|range| !range.is_empty()) {
            seen = seen.start.min(range.start)..seen.end.max(range.end);
        }
        let entry_group = Partial::empty(take(&mut room, memory.cut.floats));
        let share = share.insert(Share { span, queries, entry_group, total: Partial::empty(total) });
        // SAFETY: the op's caller vouches for its tensors, and the span is inside them.
        unsafe { read_queries(problem, &share.span, &mut share.queries) };
        last = n;
    }
    let mut one = Partial::empty(take(&mut room, memory.cut.floats));
    let mut tile = || Tile::<T>::new(take(&mut room, memory.copies), take(&mut room, memory.means));
    let (tile, next) = (&mut tile(), &mut tile());
    let (mut tile, mut next) = (tile, next);
    let mut room = Room::new(take(&mut room, memory.sums));
    // SAFETY: as the caller says.
    unsafe {
        let mut cutter = Cutter::new(job, unit, seen, entries);
        // While one tile is attended, the rows of the next are on their way.
        let mut found = cutter.cut(tile);
        while found {
            found = cutter.cut(next);
            for (n, share) in shares.iter_mut().flatten().enumerate() {
                let ahead = if n == last { next.keys_ahead(problem.heads.dim) } else { Ahead::nothing() };
                share.add(job, tile, (n == 0, ahead), (&mut one, &mut room), value_dim);
            }
            std::mem::swap(&mut tile, &mut next);
        }
    }
}

impl<'w> Share<'w> {
    /// Adds a tile, and what ends with it.
    ///
    /// # Safety
    /// The op's caller vouches for its tensors; the tile is of this chunk.
    unsafe fn add<T: Row>(
        &mut self,
        job: &Job,
        tile: &Tile<T>,
        fetch: (bool, Ahead<T>),
        (one, room): (&mut Partial<'w>, &mut Room),
        value_dim: usize,
    ) {
        let Share { span, queries, entry_group, total } = self;
        // SAFETY: the rows of a tile, a partial that a plan names and the span are inside their tensors.
        unsafe {
            if tile.len() > 0 {
                let first = entry_group.is_empty(span);
                let target = if first { &mut *entry_group } else { &mut *one };
                target.attend(queries, span, tile, fetch, room);
                if !first {
                    entry_group.fold(one, span, value_dim);
                }
            }
            if let (Some(n), Some(kept)) = (tile.kept, job.kept) {
                one.read(kept, Some(n), span, value_dim);
                total.fold(one, span, value_dim);
            }
            if let Some(n) = tile.closes {
                if let Some(partials) = job.partials {
                    entry_group.write(partials, Some(n), span, value_dim);
                }
                total.fold(entry_group, span, value_dim);
                entry_group.clear();
            }
        }
    }
}

/// Query heads of a span, in f32 and times the scale, zeros after them.
///
/// # Safety
/// The op's caller vouches for q, and the span is inside it.
unsafe fn read_queries(problem: &Problem, span: &Span, Queries { values: queries, coded, .. }: &mut Queries) {
    let Problem { positions, heads, scale, int4, .. } = problem;
    let channel = positions.q.rank() - 1;
    // SAFETY: the span's rows are those of one KV head.
    let weights = int4.map(|int4| unsafe { int4.weights_of(span.head / heads.group()) });
    queries[span.heads * heads.dim..].fill(0.0);
    for (n, query) in queries.chunks_exact_mut(heads.dim).take(span.heads).enumerate() {
        let (r, h) = span.row(n);
        with_float!(positions.q.dtype, T => {
            let row = positions.q.along::<T, 3>(channel, positions.place(span.sequence, r, h));
            // SAFETY: the row has D elements, as a query of `queries`.
            unsafe {
                match row.packed() {
                    Some(row) => dispatch(Widen { row, scale: *scale, query }),
                    None => query.iter_mut().enumerate().for_each(|(d, x)| *x = row.get(d).to_f32() * scale),
                }
            }
        });
        if let (Some(coded), Some(weights)) = (&mut *coded, &weights) {
            coded.set(n, query, weights);
        }
    }
}

/// A query of adjacent elements in f32, times the scale.
struct Widen<'q, T> {
    row: *const T,
    scale: f32,
    query: &'q mut [f32],
}

impl<T: Row> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // SAFETY: read_queries makes it of a row that is as long as the query.
        unsafe { widen::<L, T>(self.row, self.scale, self.query) }
    }
}
