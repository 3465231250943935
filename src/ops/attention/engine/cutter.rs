//! Cuts the entries of a chunk into tiles.

use super::coded::Coded;
use super::tile::Tile;
use super::{Entry, Job, Unit};
use crate::ops::attention::Problem;
use crate::ops::simd::Row;
use std::ops::Range;

/// Entries that a plan explains at a time.
const BATCH: usize = 64;

pub struct Cutter<'a> {
    job: &'a Job<'a>,
    unit: Unit,
    /// Entries to come.
    entries: Range<usize>,
    /// Those explained last, and what they are.
    known: Range<usize>,
    explained: [Entry; BATCH],
    /// Tokens of the sequence that any row of the unit sees.
    seen: Range<usize>,
    /// Those of the current entry that are to come.
    tokens: Range<usize>,
    /// The place in its entry group that token 0 of the sequence would have, were it part of the current entry.
    origin: isize,
    /// The page in which the current entry lies, where a list has slots.
    slot: Option<usize>,
    /// The entry group that the current entry ends.
    ends: Option<usize>,
    /// Has the current entry group rows in an earlier tile?
    open: bool,
    /// The sequence's coded tokens.
    coded: Option<Coded<'a>>,
}

impl<'a> Cutter<'a> {
    /// # Safety
    /// The op's caller vouches for its tensors.
    pub unsafe fn new(job: &'a Job, unit: Unit, seen: Range<usize>, entries: Range<usize>) -> Cutter<'a> {
        let Problem { kv, int4, .. } = job.problem;
        let coded = int4.map(|int4| {
            // SAFETY: the unit's sequence is one of the problem's.
            let Range { start, end } = unsafe { int4.coded(unit.sequence, kv.pages.len(unit.sequence)) };
            Coded { int4, sequence: unit.sequence, head: unit.kv_head, first: start, end, slot: None }
        });
        Cutter {
            coded,
            job,
            unit,
            entries,
            known: 0..0,
            explained: [Entry::Nothing; BATCH],
            seen,
            tokens: 0..0,
            origin: 0,
            slot: None,
            ends: None,
            open: false,
        }
    }

    /// Fills the next tile; false when there is none.
    ///
    /// # Safety
    /// The op's caller vouches for its tensors; the entries are below the count.
    #[inline(always)]
    pub unsafe fn cut<T: Row>(&mut self, tile: &mut Tile<T>) -> bool {
        tile.clear();
        loop {
            while !self.tokens.is_empty() {
                let (number, room) = self.place(tile.size());
                if tile.len() > 0 && (tile.number != number || tile.is_coded != self.is_next_coded()) {
                    self.open = true;
                    return true;
                }
                tile.number = number;
                // SAFETY: Pages keeps pages and rows inside k and v.
                unsafe { self.push_run(tile, room) };
            }
            if let Some(entry_group) = self.ends.take()
                && (self.open || tile.len() > 0 || tile.kept.is_some() || self.job.partials.is_some())
            {
                tile.closes = Some(entry_group);
                self.open = false;
                return true;
            }
            if tile.kept.is_some() {
                self.open |= tile.len() > 0;
                return true;
            }
            let Some(j) = self.entries.next() else { return false };
            // SAFETY: the entry is below the count.
            match unsafe { self.explain(j) } {
                Entry::Nothing => {}
                Entry::Kept(n) => tile.kept = Some(n),
                // SAFETY: as above.
                Entry::Block(block) => unsafe { self.start(j, block) },
            }
            if (j + 1).is_multiple_of(self.job.entries_per_partial) || self.entries.is_empty() {
                self.ends = Some(j / self.job.entries_per_partial);
            }
        }
    }

    /// Sets out for the tokens of a block, entry `j`.
    ///
    /// # Safety
    /// As for [`Cutter::cut`].
    unsafe fn start(&mut self, j: usize, block: usize) {
        let Problem { kv, block_size, .. } = self.job.problem;
        let begin = block * block_size;
        self.tokens = begin.max(self.seen.start)..(begin + block_size).min(self.seen.end);
        self.origin = (j % self.job.entries_per_partial * block_size) as isize - begin as isize;
        if let Some(list) = self.job.slots {
            // SAFETY: the entry is below the count.
            let slot = unsafe { list.slot(self.unit.list(), j) };
            let slot = slot.and_then(|slot| usize::try_from(slot).ok());
            self.slot = slot.filter(|&slot| slot < kv.pages.count);
            let mut is_coded = false;
            if let Some(coded) = &mut self.coded {
                // Pages of codes are counted after the others.
                let page = slot.and_then(|slot| slot.checked_sub(kv.pages.count));
                coded.slot = page.filter(|&page| page < coded.int4.pages.count);
                is_coded = coded.slot.is_some();
                (coded.first, coded.end) = (0, if is_coded { usize::MAX } else { 0 });
            }
            if self.slot.is_none() && !is_coded {
                self.tokens = 0..0;
            }
        }
    }

    /// The tile of the entry group to which the next token belongs, and the tokens that follow it there, itself included.
    #[inline(always)]
    fn place(&self, size: usize) -> (usize, usize) {
        let place = (self.tokens.start as isize + self.origin) as usize;
        (place / size, size - place % size)
    }

    /// Whether the next token is coded.
    #[inline(always)]
    fn is_next_coded(&self) -> bool {
        self.coded.as_ref().is_some_and(|coded| coded.tokens().contains(&self.tokens.start))
    }

    /// Adds to the tile what there is room for of the tokens to come, up to the end of a page. A missing page has none.
    ///
    /// # Safety
    /// As for [`Cutter::cut`]; there are tokens to come.
    #[inline(always)]
    unsafe fn push_run<T: Row>(&mut self, tile: &mut Tile<T>, room: usize) {
        let first = self.tokens.start;
        let mut count = self.tokens.len().min(room);
        if let Some(coded) = &self.coded {
            if self.is_next_coded() {
                // SAFETY: as for this function.
                self.tokens.start += unsafe { push_coded(tile, coded, first, count) };
                return;
            }
            if first < coded.first {
                count = count.min(coded.first - first);
            }
        }
        let kv = &self.job.problem.kv;
        let size = kv.pages.size;
        let (p, row) = (first / size, first % size);
        let count = count.min(size - row);
        // SAFETY: the page exists, and the rows are inside it; a slot holds whole blocks.
        unsafe {
            let (page, head) = match self.job.slots {
                None => (kv.pages.page(self.unit.sequence, p), self.unit.kv_head),
                Some(_) => (self.slot, 0),
            };
            if let Some(page) = page {
                tile.push(kv, first, count, [page, row, head]);
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
            // SAFETY: the entries are below the count.
            unsafe { self.job.plan.explain(self.unit.list(), j, explained) };
        }
        self.explained[j - self.known.start]
    }
}

/// Adds at most `count` of the coded tokens from `first` on, up to the end of a page; returns how many. A missing page has none.
///
/// # Safety
/// As for [`Cutter::cut`]; `first` is a coded token, and there is room.
#[inline(never)]
unsafe fn push_coded<T: Row>(tile: &mut Tile<T>, coded: &Coded, first: usize, count: usize) -> usize {
    let Coded { int4, sequence, end, slot, .. } = *coded;
    let size = int4.pages.size;
    let (p, row) = (first / size, first % size);
    let left_of_block = int4.block_size - first % int4.block_size;
    let count = count.min(size - row).min(end - first).min(left_of_block);
    // SAFETY: the page exists, and the rows are inside it.
    unsafe {
        if let Some(page) = slot.or_else(|| int4.pages.page(sequence, p)) {
            tile.push_coded(coded, first, count, [page, row]);
        }
    }
    count
}
