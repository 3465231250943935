//! LABEL_MASS and token selection: softmax over the tokens of candidate blocks, by their INT4 labels.
//!
//! q̃·k̃ = min·Σ_c q̃_c + scale·Σ_c q̃_c·code_c on the kept channels, so codes are never turned into keys.

use super::{BlocksRequest, CHUNK, Quad, Softmax, finish, weighable, widen_queries};
use crate::core::status::Result;
use crate::ops::index::Labels;
use crate::ops::select::{Queries, TokensRequest};
use crate::ops::simd::{self, Kernel, LANES, Lanes};
use crate::ops::topk::Cut;
use crate::ops::views::{BlockList, MAX_DIM, adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows, Scratch};
use half::f16;
use std::ops::Range;

/// Tokens whose codes are unpacked together.
const STEP: usize = 8;

pub fn blocks(cpu: &Cpu, r: &BlocksRequest, labels: &Labels, candidates: &BlockList) -> Result<()> {
    let queries = &r.queries;
    let (batch, heads) = (queries.batch(), queries.heads);
    let scratch = cpu.scratch();
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let blocks = |i| unsafe { r.blocks(i) };
    let weighed = weigh(cpu, &scratch, queries, labels, candidates, blocks)?;
    let most_blocks = (0..batch).map(blocks).max().unwrap_or(0);
    let scores = Rows::new(scratch.slice(batch * heads.kv * most_blocks, f32::NEG_INFINITY)?, most_blocks);
    cpu.parallel(batch * heads.kv, weighed.bytes(), |task| {
        let (i, g) = (task / heads.kv, task % heads.kv);
        // SAFETY: each task has rows and results of its own.
        unsafe {
            let (chosen, mass) = weighed.softmax(task, queries.len(i));
            let scores = &mut scores.row(task)[..blocks(i)];
            for (&block, mass) in chosen.blocks.iter().zip(mass.chunks(queries.block_size)) {
                scores[block as usize] = mass.iter().sum();
            }
            finish(r, i, g, scores);
        }
    });
    Ok(())
}

pub fn tokens(cpu: &Cpu, r: &TokensRequest) -> Result<()> {
    let queries = &r.queries;
    let heads = queries.heads;
    let scratch = cpu.scratch();
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let blocks = |i| unsafe { queries.len(i) }.div_ceil(queries.block_size);
    let weighed = weigh(cpu, &scratch, queries, &r.labels, &r.candidates, blocks)?;
    cpu.parallel(queries.batch() * heads.kv, weighed.bytes(), |task| {
        let (i, g) = (task / heads.kv, task % heads.kv);
        // SAFETY: each task has rows and results of its own.
        unsafe {
            let (chosen, mass) = weighed.softmax(task, queries.len(i));
            mass.iter_mut().for_each(|mass| *mass /= heads.group() as f32);
            select_tokens(r, i, g, &chosen, mass);
        }
    });
    Ok(())
}

/// Selects among the candidate tokens of one sequence and KV head, whose weights are `alpha`, and writes the results.
///
/// # Safety
/// The tensors are valid, and no other task writes the results of (i, g).
unsafe fn select_tokens(r: &TokensRequest, i: usize, g: usize, chosen: &Chosen, alpha: &[f32]) {
    // SAFETY: i is below the batch size.
    let (len, budget) = unsafe { (r.queries.len(i), r.quota.of(i)) };
    let init = budget.init.min(len);
    let local = budget.local.min(len - init);
    // Candidates that are not forced are adjacent, for both are ascending.
    let first = chosen.tokens_below(init);
    let end = chosen.tokens_below(len - local);
    let wanted = budget.k.saturating_sub(init + local).min(end - first);
    let mut place = 0;
    let mut select = |token: usize, score: f32| {
        // SAFETY: at most cap tokens are selected.
        unsafe {
            r.selected.ids.set([i, g, place], token as i32);
            if let Some(scores) = &r.scores {
                scores.set([i, g, place], score);
            }
        }
        place += 1;
    };
    let forced = |tokens: Range<usize>, mut at: usize, select: &mut dyn FnMut(usize, f32)| {
        for token in tokens {
            let candidate = at < alpha.len() && chosen.token(at) == token;
            select(token, if candidate { alpha[at] } else { 0.0 });
            at += candidate as usize;
        }
    };
    forced(0..init, 0, &mut select);
    let mut cut = Cut::of_best(&alpha[first..end], wanted);
    for (at, &alpha) in alpha.iter().enumerate().take(end).skip(first) {
        if cut.takes(alpha) {
            select(chosen.token(at), alpha);
        }
    }
    forced(len - local..len, end, &mut select);
    // SAFETY: i and g are inside the shape.
    unsafe { r.selected.counts.set([i, g], place as i32) };
}

/// The candidate blocks of one sequence and KV head: ascending, each once, none past the sequence.
struct Chosen<'a> {
    blocks: &'a [i32],
    block_size: usize,
    len: usize,
}

impl Chosen<'_> {
    /// Candidate tokens. Only the last block can be partial.
    fn tokens(&self) -> usize {
        self.blocks.last().map_or(0, |&last| {
            let size = self.block_size.min(self.len - last as usize * self.block_size);
            (self.blocks.len() - 1) * self.block_size + size
        })
    }

    /// The token at a place among the candidate tokens.
    #[inline(always)]
    fn token(&self, at: usize) -> usize {
        self.blocks[at / self.block_size] as usize * self.block_size + at % self.block_size
    }

    /// Candidate tokens before token `end`.
    fn tokens_below(&self, end: usize) -> usize {
        let blocks = self.blocks.partition_point(|&block| (block as usize + 1) * self.block_size <= end);
        let part = self.blocks.get(blocks).map_or(0, |&block| end.saturating_sub(block as usize * self.block_size));
        (blocks * self.block_size + part).min(self.tokens())
    }
}

/// Products of queries and the labels of all candidates.
struct Weighed<'a> {
    block_size: usize,
    group: usize,
    /// [B·Hk][most_blocks] and their counts.
    lists: &'a [i32],
    most_blocks: usize,
    counts: &'a [usize],
    /// [B·Hk][chunks][quads][CHUNK]
    products: Rows<'a, Quad>,
    /// [B·Hk][chunks · CHUNK]
    masses: Rows<'a, f32>,
    chunks: usize,
}

impl Weighed<'_> {
    fn bytes(&self) -> usize {
        self.chunks * CHUNK * self.group * size_of::<f32>()
    }

    fn chosen(&self, task: usize, len: usize) -> Chosen<'_> {
        let blocks = &self.lists[task * self.most_blocks..][..self.counts[task]];
        Chosen { blocks, block_size: self.block_size, len }
    }

    /// The candidates of (sequence, KV head) `task`, and the softmax mass of each of their tokens.
    ///
    /// # Safety
    /// No other task asks for these.
    #[allow(clippy::mut_from_ref)] // as Rows
    unsafe fn softmax(&self, task: usize, len: usize) -> (Chosen<'_>, &mut [f32]) {
        let chosen = self.chosen(task, len);
        // SAFETY: forwarded to the caller.
        let (products, mass) = unsafe { (self.products.row(task), self.masses.row(task)) };
        simd::dispatch(Softmax { products, group: self.group, mass });
        let tokens = chosen.tokens();
        (chosen, &mut mass[..tokens])
    }
}

fn weigh<'s>(
    cpu: &Cpu,
    scratch: &'s Scratch,
    queries: &Queries,
    labels: &Labels,
    candidates: &BlockList,
    blocks: impl Fn(usize) -> usize + Sync + Send,
) -> Result<Weighed<'s>> {
    let (batch, heads, block_size) = (queries.batch(), queries.heads, queries.block_size);
    let rows = batch * heads.kv;
    let most_blocks = (0..batch).map(&blocks).max().unwrap_or(0).min(candidates.cap());
    let lists = scratch.slice(rows * most_blocks, 0i32)?;
    let counts = scratch.slice(rows, 0usize)?;
    {
        let (lists, counts) = (Rows::new(lists, most_blocks), Rows::new(counts, 1));
        cpu.parallel(rows, candidates.cap() * size_of::<i32>(), |task| {
            let (i, g) = (task / heads.kv, task % heads.kv);
            // SAFETY: each task has rows of its own; i, g and the entries are inside the list.
            unsafe { counts.row(task)[0] = ascending(candidates, i, g, blocks(i), lists.row(task)) }
        });
    }
    let (lists, counts) = (&*lists, &*counts);
    let chosen = |task: usize| {
        // SAFETY: the sequence is below the batch size.
        let len = unsafe { queries.len(task / heads.kv) };
        Chosen { blocks: &lists[task * most_blocks..][..counts[task]], block_size, len }
    };
    let chunks = (0..rows).map(|task| chosen(task).tokens()).max().unwrap_or(0).div_ceil(CHUNK);

    let wide = scratch.slice(batch * heads.q * heads.dim, 0f32)?;
    widen_queries(cpu, queries, wide);
    let quads = heads.group().div_ceil(4);
    let kept = scratch.slice(rows * quads * 4 * row_len(labels), 0f32)?;
    let sums = scratch.slice(rows * quads, [0f32; 4])?;
    for task in 0..rows {
        let wide = &wide[task * heads.group() * heads.dim..][..heads.group() * heads.dim];
        let kept = &mut kept[task * quads * 4 * row_len(labels)..][..quads * 4 * row_len(labels)];
        keep_channels(labels, task % heads.kv, wide, heads.dim, kept, &mut sums[task * quads..][..quads]);
    }

    let products = scratch.slice(rows * chunks * quads * CHUNK, [f32::NEG_INFINITY; 4])?;
    let bytes = CHUNK * heads.group() * row_len(labels);
    cpu.parallel_chunks(products, quads * CHUNK, bytes, |task, cell| {
        let (row, chunk) = (task / chunks, task % chunks);
        let chosen = chosen(row);
        let tokens = chunk * CHUNK..chosen.tokens().min((chunk + 1) * CHUNK);
        simd::dispatch(Products {
            queries,
            labels,
            at: (row / heads.kv, row % heads.kv),
            chosen,
            tokens,
            kept: &kept[row * quads * 4 * row_len(labels)..][..quads * 4 * row_len(labels)],
            sums: &sums[row * quads..][..quads],
            cell,
        });
    });
    Ok(Weighed {
        block_size,
        group: heads.group(),
        lists,
        most_blocks,
        counts,
        products: Rows::new(products, chunks * quads * CHUNK),
        masses: Rows::new(scratch.slice(rows * chunks * CHUNK, 0f32)?, chunks * CHUNK),
        chunks,
    })
}

/// Copies the list of (i, g) without what is past the sequence or not above all before it; returns how many remain.
///
/// # Safety
/// `i` and `g` are inside the list, which is valid.
unsafe fn ascending(list: &BlockList, i: usize, g: usize, blocks: usize, out: &mut [i32]) -> usize {
    let (mut count, mut last) = (0, -1);
    // SAFETY: forwarded to the caller; count clamps to the capacity.
    unsafe {
        for entry in 0..list.count([i, 0, g]) {
            let id = list.id([i, 0, g], entry);
            if id > last && (id as usize) < blocks {
                out[count] = id;
                count += 1;
                last = id;
            }
        }
    }
    count
}

/// Half of a row of unpacked codes: even channels, then odd ones, each padded to whole vectors.
fn half_row(labels: &Labels) -> usize {
    (labels.kept() / 2).next_multiple_of(LANES)
}

fn row_len(labels: &Labels) -> usize {
    2 * half_row(labels)
}

/// Picks the kept channels of a group's queries [G][D] into rows in the order of unpacked codes, and adds them up.
fn keep_channels(labels: &Labels, g: usize, wide: &[f32], dim: usize, kept: &mut [f32], sums: &mut [Quad]) {
    // SAFETY: the op's caller keeps the channels valid.
    let channels = unsafe { labels.channels_of(g, dim) };
    for (h, (q, row)) in wide.chunks_exact(dim).zip(kept.chunks_exact_mut(row_len(labels))).enumerate() {
        for (n, channel) in channels[..labels.kept()].iter().enumerate() {
            row[n % 2 * half_row(labels) + n / 2] = channel.map_or(0.0, |c| q[c as usize]);
        }
        sums[h / 4][h % 4] = row.iter().sum();
    }
}

/// Products of some candidate tokens with the heads of one group.
struct Products<'a> {
    queries: &'a Queries<'a>,
    labels: &'a Labels<'a>,
    at: (usize, usize),
    chosen: Chosen<'a>,
    tokens: Range<usize>,
    kept: &'a [f32],
    sums: &'a [Quad],
    cell: &'a mut [Quad],
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Products { queries, labels, at: (i, g), chosen, tokens, kept, sums, cell } = self;
        let (half, len) = (half_row(labels), row_len(labels));
        let mut codes = [[0f32; MAX_DIM]; STEP];
        for first in tokens.clone().step_by(STEP) {
            let mut rows = [std::ptr::null(); STEP];
            let mut places = [(0, 0.0, 0.0); STEP];
            let mut found = 0;
            for at in first..tokens.end.min(first + STEP) {
                // SAFETY: the caller keeps the tensors valid; the row is inside them.
                unsafe {
                    let Some([page, row]) = queries.index.row(i, chosen.token(at)) else { continue };
                    let (scale, min) = (labels.scale.get::<f16, 3>([page, row, g]), labels.min.get([page, row, g]));
                    places[found] = (at % CHUNK, scale.to_f32(), f16::to_f32(min));
                    let mut spare = spare();
                    let packed = adjacent::<u8, 3>(&labels.codes, [page, row, g], &mut spare);
                    let packed = std::slice::from_raw_parts(packed, labels.kept() / 2);
                    let (even, odd) = codes[found].split_at_mut(half);
                    for ((even, odd), &pair) in even.iter_mut().zip(odd).zip(packed) {
                        *even = (pair & 15) as i32 as f32;
                        *odd = (pair >> 4) as i32 as f32;
                    }
                }
                rows[found] = codes[found].as_ptr();
                found += 1;
            }
            for (quad, (queries, sums)) in kept.chunks_exact(4 * len).zip(sums).enumerate() {
                let mut products = [[0.0; 4]; STEP];
                // SAFETY: the rows hold `len` codes.
                unsafe { simd::dot_four::<L, f32>(&rows[..found], queries, &mut products[..found]) };
                for (&(place, scale, min), product) in places[..found].iter().zip(products) {
                    cell[quad * CHUNK + place] = std::array::from_fn(|h| weighable(min * sums[h] + scale * product[h]));
                }
            }
        }
    }
}
