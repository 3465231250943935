//! LABEL_MASS and token selection: softmax over the tokens of candidate blocks, by their INT4 labels.
//!
//! q̃·k̃ = min·Σ_c q̃_c + scale·Σ_c q̃_c·code_c on the kept channels, so codes are never turned into keys.

use super::{CHUNK, List, Quad, Request, Softmax, Wide, finish, set_status, weighable};
use crate::abi::{VWD_SELECT_NAN, VWD_SELECT_NO_SUMMARY};
use crate::core::status::Result;
use crate::ops::index::Labels;
use crate::ops::simd::{self, Kernel, LANES, Lanes};
use crate::ops::topk::{Cut, Run};
use crate::ops::views::{BlockList, MAX_DIM, adjacent, spare};
use crate::runtime::cpu::{Cpu, Rows, Scratch};
use half::f16;
use std::ops::Range;

/// Tokens whose codes are unpacked together.
const STEP: usize = 8;

pub fn blocks(cpu: &Cpu, r: &Request, labels: &Labels) -> Result<()> {
    let block_size = r.queries.block_size;
    let scratch = cpu.scratch();
    let wide = Wide::new(cpu, &scratch, &r.queries)?;
    let weighed = Weighed::new(cpu, &scratch, r, labels, &wide)?;
    let most = weighed.candidates.most;
    let scores = Rows::new(scratch.slice(r.lists() * most, f32::NEG_INFINITY)?, most);
    let none = Run { score: f32::NEG_INFINITY, count: 0 };
    let runs = Rows::new(scratch.slice(r.lists() * (2 * most + 1), none)?, 2 * most + 1);
    cpu.parallel(r.lists(), weighed.bytes(), |n| {
        // SAFETY: each task has rows and results of its own, and the caller keeps the tensors valid.
        unsafe {
            let list = r.list(n);
            let chosen = weighed.candidates.of(n, &list);
            let scores = scores.row(n);
            for (position, _) in wide.sound(&list) {
                let sees = r.queries.positions.seen(list.at[0], position, r.queries.len(list.at[0]));
                let mass = weighed.softmax(n, &list, position);
                // Blocks that begin past the position stay −inf.
                let begun = chosen.blocks.partition_point(|&block| (block as usize) * block_size < sees);
                for (at, score) in scores[..begun].iter_mut().enumerate() {
                    let tokens = at * block_size..((at + 1) * block_size).min(mass.len());
                    let sum = mass.get(tokens).map_or(0.0, |mass| mass.iter().sum());
                    *score = score.max(sum);
                }
            }
            let count = spread(chosen.blocks, scores, list.tokens.div_ceil(block_size), runs.row(n));
            finish(r, &list, &[], &runs.row(n)[..count], wide.seen(&list) | weighed.seen(n, &chosen));
        }
    });
    Ok(())
}

/// The scores of some of `blocks` blocks, with −inf between them; returns how many runs there are.
fn spread(some: &[i32], scores: &[f32], blocks: usize, runs: &mut [Run]) -> usize {
    let (mut count, mut next) = (0, 0);
    for (&block, &score) in some.iter().zip(scores) {
        runs[count] = Run { score: f32::NEG_INFINITY, count: block as usize - next };
        runs[count + 1] = Run { score, count: 1 };
        (count, next) = (count + 2, block as usize + 1);
    }
    runs[count] = Run { score: f32::NEG_INFINITY, count: blocks - next };
    count + 1
}

pub fn tokens(cpu: &Cpu, r: &Request, labels: &Labels) -> Result<()> {
    let group = r.queries.heads.group() as f32;
    let scratch = cpu.scratch();
    let wide = Wide::new(cpu, &scratch, &r.queries)?;
    let weighed = Weighed::new(cpu, &scratch, r, labels, &wide)?;
    let alphas = Rows::new(scratch.slice(r.lists() * weighed.row_len(), 0f32)?, weighed.row_len());
    cpu.parallel(r.lists(), weighed.bytes(), |n| {
        // SAFETY: each task has rows and results of its own, and the caller keeps the tensors valid.
        unsafe {
            let list = r.list(n);
            let chosen = weighed.candidates.of(n, &list);
            let alpha = &mut alphas.row(n)[..weighed.candidates.known(&chosen)];
            for (position, _) in wide.sound(&list) {
                let mass = weighed.softmax(n, &list, position);
                alpha.iter_mut().zip(mass).for_each(|(alpha, mass)| *alpha = alpha.max(*mass / group));
            }
            select_tokens(r, &list, &chosen, alpha, wide.seen(&list) | weighed.seen(n, &chosen));
        }
    });
    Ok(())
}

/// Selects among the candidate tokens of one list and writes the results. The first ones weigh `alpha`, the others
/// nothing. `seen` are bits of the status.
///
/// # Safety
/// The tensors are valid, and no other task writes the results of this list.
unsafe fn select_tokens(r: &Request, list: &List, chosen: &Chosen, alpha: &[f32], seen: u32) {
    let [i, position, g] = list.at;
    // SAFETY: i is below the batch size.
    let (budget, clamped) = unsafe { r.quota.of(i) };
    let len = list.tokens;
    let init = budget.init.min(len);
    let local = budget.local.min(len - init);
    // Candidates that are not forced are adjacent, for both are ascending.
    let free = chosen.tokens_below(init)..chosen.tokens_below(len - local);
    let wanted = budget.k.saturating_sub(init + local).min(free.len());
    let weigh = |at: usize| alpha.get(at).copied().unwrap_or(0.0);
    let mut place = 0;
    let mut select = |token: usize, score: f32| {
        // SAFETY: at most cap tokens are selected.
        unsafe {
            r.selected.set_id(list.at, place, token as i32);
            match &r.scores {
                Some(scores) if r.selected.is_own() => scores.set([i, position, g, place], score),
                Some(scores) => scores.set([i, g, place], score),
                None => {}
            }
        }
        place += 1;
    };
    let forced = |tokens: Range<usize>, mut at: usize, select: &mut dyn FnMut(usize, f32)| {
        for token in tokens {
            let is_candidate = at < chosen.tokens() && chosen.token(at) == token;
            select(token, if is_candidate { weigh(at) } else { 0.0 });
            at += is_candidate as usize;
        }
    };
    forced(0..init, 0, &mut select);
    // The best of the candidates that have a weight come first. Those without one all rank behind, and fill what is left of `wanted`.
    let weighed = free.start.min(alpha.len())..free.end.min(alpha.len());
    let taken = wanted.min(weighed.len());
    let ones = alpha[weighed.clone()].iter().map(|&alpha| (alpha, 1));
    let mut cut = Cut::of_best(ones, weighed.len(), taken);
    for at in weighed.clone() {
        if cut.takes(alpha[at]) {
            select(chosen.token(at), alpha[at]);
        }
    }
    let others = free.start.max(weighed.end)..free.end;
    others.take(wanted - taken).for_each(|at| select(chosen.token(at), 0.0));
    forced(len - local..len, free.end, &mut select);
    // SAFETY: the list is this task's, and place at most its capacity.
    unsafe {
        r.selected.set_count(list.at, place);
        set_status(r, list, seen, clamped);
    }
}

/// The candidate blocks of one list: ascending, each once, none past what its positions see.
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

/// The candidates of all lists.
struct Candidates<'s> {
    block_size: usize,
    /// Tokens for which the index has room.
    capacity: usize,
    /// [lists][most] and their counts.
    blocks: &'s [i32],
    most: usize,
    counts: &'s [usize],
}

impl<'s> Candidates<'s> {
    fn new(cpu: &Cpu, scratch: &'s Scratch, r: &Request) -> Result<Candidates<'s>> {
        let (block_size, index) = (&r.queries.block_size, &r.queries.index);
        let given = r.candidates.as_ref().expect("an index of labels has candidates");
        // SAFETY: the list exists, and the caller keeps the tensors valid.
        let list = |n| unsafe { r.list(n) };
        let all = |list: &List| list.tokens.div_ceil(*block_size);
        let most = (0..r.lists()).map(|n| all(&list(n))).max().unwrap_or(0).min(given.cap());
        let blocks = scratch.slice(r.lists() * most, 0i32)?;
        let counts = scratch.slice(r.lists(), 0usize)?;
        {
            let (blocks, counts) = (Rows::new(blocks, most), Rows::new(counts, 1));
            cpu.parallel(r.lists(), given.cap() * size_of::<i32>(), |n| {
                // SAFETY: as above, and each task has rows of its own.
                unsafe { counts.row(n)[0] = ascending(given, &list(n), all(&list(n)), blocks.row(n)) };
            });
        }
        Ok(Candidates { block_size: *block_size, capacity: index.capacity(), blocks, most, counts })
    }

    fn of(&self, n: usize, list: &List) -> Chosen<'s> {
        let blocks = &self.blocks[n * self.most..][..self.counts[n]];
        Chosen { blocks, block_size: self.block_size, len: list.tokens }
    }

    /// How many of them the index has room for: the first ones.
    fn known(&self, chosen: &Chosen) -> usize {
        chosen.tokens_below(self.capacity)
    }
}

/// Products of queries and the labels of all candidates for which the index has room.
struct Weighed<'s> {
    candidates: Candidates<'s>,
    group: usize,
    sharing: usize,
    /// [lists][sharing][chunks][quads][CHUNK]
    products: Rows<'s, Quad>,
    /// [lists][chunks · CHUNK]
    masses: Rows<'s, f32>,
    /// [lists][chunks]
    seen: &'s [u32],
    chunks: usize,
}

impl<'s> Weighed<'s> {
    fn new(cpu: &Cpu, scratch: &'s Scratch, r: &Request, labels: &Labels, wide: &Wide) -> Result<Weighed<'s>> {
        let heads = r.queries.heads;
        let quads = heads.group().div_ceil(4);
        let candidates = Candidates::new(cpu, scratch, r)?;
        let kept = Kept::new(cpu, scratch, r, labels, wide)?;
        // SAFETY: the list exists, and the caller keeps the tensors valid.
        let list = |n| unsafe { r.list(n) };
        let known = |n| candidates.known(&candidates.of(n, &list(n)));
        let chunks = (0..r.lists()).map(known).max().unwrap_or(0).div_ceil(CHUNK);
        let sharing = if r.selected.is_own() { 1 } else { r.queries.positions.count() };
        let products = scratch.slice(r.lists() * sharing * chunks * quads * CHUNK, [f32::NEG_INFINITY; 4])?;
        let seen = scratch.slice(r.lists() * chunks, 0u32)?;
        let cells = Cells { products: Rows::new(products, quads * CHUNK), sharing, chunks };
        let bytes = sharing * CHUNK * heads.group() * row_len(labels);
        cpu.parallel_chunks(seen, 1, bytes, |task, seen| {
            let (n, chunk) = (task / chunks, task % chunks);
            let list = list(n);
            let chosen = candidates.of(n, &list);
            let tokens = chunk * CHUNK..known(n).min((chunk + 1) * CHUNK);
            let (cells, kept, seen) = (&cells, &kept, &mut seen[0]);
            simd::dispatch(Products { r, labels, wide, kept, cells, n, list, chosen, tokens, seen });
        });
        let products = Rows::new(products, chunks * quads * CHUNK);
        let masses = Rows::new(scratch.slice(r.lists() * chunks * CHUNK, 0f32)?, chunks * CHUNK);
        Ok(Weighed { candidates, group: heads.group(), sharing, products, masses, seen, chunks })
    }

    /// Places for the tokens of a list.
    fn row_len(&self) -> usize {
        self.chunks * CHUNK
    }

    fn bytes(&self) -> usize {
        self.sharing * self.row_len() * self.group * size_of::<f32>()
    }

    /// The softmax mass of each candidate token of a list for one of its positions.
    ///
    /// # Safety
    /// No other task asks for this list's, and what was there for another position is not used again.
    #[allow(clippy::mut_from_ref)] // as Rows
    unsafe fn softmax(&self, n: usize, list: &List, position: usize) -> &[f32] {
        let known = self.candidates.known(&self.candidates.of(n, list));
        // SAFETY: row n of the masses and those of its products are this list's, which this task alone asks for.
        let (products, mass) =
            unsafe { (self.products.row(n * self.sharing + position % self.sharing), self.masses.row(n)) };
        simd::dispatch(Softmax { products, group: self.group, mass });
        &mass[..known]
    }

    /// What a list's labels add to its status.
    fn seen(&self, n: usize, chosen: &Chosen) -> u32 {
        let seen = self.seen[n * self.chunks..][..self.chunks].iter().fold(0, |bits, seen| bits | seen);
        if chosen.tokens() > self.candidates.known(chosen) { seen | VWD_SELECT_NO_SUMMARY } else { seen }
    }
}

/// Products of each list's positions, a chunk at a time.
struct Cells<'a> {
    products: Rows<'a, Quad>,
    /// Positions that share a list.
    sharing: usize,
    chunks: usize,
}

/// Copies a list of candidates without what is past the sequence or not above all before it; returns how many remain.
///
/// # Safety
/// The list is one of these candidates, which are valid.
unsafe fn ascending(candidates: &BlockList, list: &List, blocks: usize, out: &mut [i32]) -> usize {
    let (mut count, mut last) = (0, -1);
    // SAFETY: count clamps to the capacity, and at most as many entries are kept.
    unsafe {
        for entry in 0..candidates.count(list.at) {
            let id = candidates.id(list.at, entry);
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

/// The kept channels of each row of queries, in the order of unpacked codes, and their sums.
struct Kept<'s> {
    /// [rows][quads · 4][row_len]
    values: &'s [f32],
    /// [rows][quads]
    sums: &'s [Quad],
    quads: usize,
}

impl<'s> Kept<'s> {
    fn new(cpu: &Cpu, scratch: &'s Scratch, r: &Request, labels: &Labels, wide: &Wide) -> Result<Kept<'s>> {
        let heads = r.queries.heads;
        let (rows, quads, len) = (wide.nan.len(), heads.group().div_ceil(4), row_len(labels));
        let values = scratch.slice(rows * quads * 4 * len, 0f32)?;
        let sums = scratch.slice(rows * quads, [0f32; 4])?;
        {
            let sums = Rows::new(sums, quads);
            cpu.parallel_chunks(values, quads * 4 * len, quads * 4 * len * size_of::<f32>(), |n, values| {
                // SAFETY: the op's caller keeps the channels valid; each task has sums of its own.
                let (channels, sums) = unsafe { (labels.channels_of(n % heads.kv, heads.dim), sums.row(n)) };
                let queries = wide.row(n).chunks_exact(heads.dim);
                for (h, (q, row)) in queries.zip(values.chunks_exact_mut(len)).enumerate() {
                    for (n, channel) in channels[..labels.kept()].iter().enumerate() {
                        row[n % 2 * (len / 2) + n / 2] = channel.map_or(0.0, |c| q[c as usize]);
                    }
                    sums[h / 4][h % 4] = row.iter().sum();
                }
            });
        }
        Ok(Kept { values, sums, quads })
    }
}

/// Products of some candidate tokens of one list with the heads of its positions.
struct Products<'a> {
    r: &'a Request<'a>,
    labels: &'a Labels<'a>,
    wide: &'a Wide<'a>,
    kept: &'a Kept<'a>,
    cells: &'a Cells<'a>,
    n: usize,
    list: List,
    chosen: Chosen<'a>,
    tokens: Range<usize>,
    seen: &'a mut u32,
}

/// The unpacked labels of some tokens.
struct Unpacked {
    codes: [[f32; MAX_DIM]; STEP],
    scales: [f32; STEP],
    minima: [f32; STEP],
    /// Which tokens they are, ascending, and where in the chunk their products belong.
    tokens: [usize; STEP],
    places: [usize; STEP],
    count: usize,
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let mut labels = Unpacked {
            codes: [[0.0; MAX_DIM]; STEP],
            scales: [0.0; STEP],
            minima: [0.0; STEP],
            tokens: [0; STEP],
            places: [0; STEP],
            count: 0,
        };
        // SAFETY: the caller keeps the lengths valid.
        let len = unsafe { self.r.queries.len(self.list.at[0]) };
        for first in self.tokens.clone().step_by(STEP) {
            self.unpack(first..self.tokens.end.min(first + STEP), &mut labels);
            for (position, row) in self.wide.sound(&self.list) {
                // SAFETY: as above.
                let sees = unsafe { self.r.queries.positions.seen(self.list.at[0], position, len) };
                if self.multiply::<L>(&labels, position, row, sees) {
                    *self.seen |= VWD_SELECT_NAN;
                }
            }
        }
    }
}

impl Products<'_> {
    /// Unpacks the labels of the candidate tokens at these places; one without a summary is left out.
    #[inline(always)]
    fn unpack(&mut self, places: Range<usize>, to: &mut Unpacked) {
        let [i, _, g] = self.list.at;
        let labels = self.labels;
        to.count = 0;
        for at in places {
            let (n, token) = (to.count, self.chosen.token(at));
            // SAFETY: the caller keeps the tensors valid; the row is inside them.
            unsafe {
                let Some([page, row]) = self.r.queries.index.row(i, token) else {
                    *self.seen |= VWD_SELECT_NO_SUMMARY;
                    continue;
                };
                to.scales[n] = labels.scale.get::<f16, 3>([page, row, g]).to_f32();
                to.minima[n] = labels.min.get::<f16, 3>([page, row, g]).to_f32();
                let mut spare = spare();
                let packed = adjacent::<u8, 3>(&labels.codes, [page, row, g], &mut spare);
                let packed = std::slice::from_raw_parts(packed, labels.kept() / 2);
                let (even, odd) = to.codes[n].split_at_mut(half_row(labels));
                for ((even, odd), &pair) in even.iter_mut().zip(odd).zip(packed) {
                    *even = (pair & 15) as i32 as f32;
                    *odd = (pair >> 4) as i32 as f32;
                }
            }
            (to.tokens[n], to.places[n]) = (token, at % CHUNK);
            to.count += 1;
        }
    }

    /// Products of those labels that a position sees with its heads. Says whether one was NaN.
    #[inline(always)]
    fn multiply<L: Lanes>(&self, labels: &Unpacked, position: usize, row: usize, sees: usize) -> bool {
        let Kept { values, sums, quads } = *self.kept;
        let len = row_len(self.labels);
        let count = labels.tokens[..labels.count].partition_point(|&token| token < sees);
        let codes: [*const f32; STEP] = std::array::from_fn(|n| labels.codes[n].as_ptr());
        let Cells { products, sharing, chunks } = self.cells;
        // SAFETY: this chunk of the list belongs to this task.
        let cell =
            unsafe { products.row((self.n * sharing + position % sharing) * chunks + self.tokens.start / CHUNK) };
        let mut is_nan = false;
        let queries = values[row * quads * 4 * len..].chunks_exact(4 * len);
        for (quad, (queries, sums)) in queries.zip(&sums[row * quads..][..quads]).enumerate() {
            let mut products = [[0.0; 4]; STEP];
            // SAFETY: the rows hold `len` codes.
            unsafe { simd::dot_four::<L, f32>(&codes[..count], queries, &mut products[..count]) };
            let heads = (self.r.queries.heads.group() - 4 * quad).min(4);
            for (n, product) in products[..count].iter().enumerate() {
                let (scale, min) = (labels.scales[n], labels.minima[n]);
                let product: Quad = std::array::from_fn(|h| min * sums[h] + scale * product[h]);
                is_nan |= product[..heads].iter().fold(false, |nan, x| nan | x.is_nan());
                cell[quad * CHUNK + labels.places[n]] = product.map(weighable);
            }
        }
        is_nan
    }
}
