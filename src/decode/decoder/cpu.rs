//! The decoder's own work on the CPU.

use super::memory::Kind;
use super::options::NEWEST;
use super::rows::{
    Append, Complete, Distribute, Drafts, KEPT, Modes, Observe, Past, Take, acceptance, seen_blocks, steps,
};
use crate::abi::{VWD_DECODER_DENSE, VWD_DECODER_SPARSE};
use crate::core::tensor::Tensor;
use crate::runtime::cpu::Cpu;

/// An entry of a [B] int32 tensor.
///
/// # Safety
/// The call's caller keeps the tensor valid, and there is a row `i`.
unsafe fn entry(t: &Tensor, i: usize) -> i32 {
    // SAFETY: says the caller.
    unsafe { t.get::<i32, 1>([i]) }
}

pub fn distribute(_: &Cpu, r: &Distribute) {
    for i in 0..r.batch() {
        // SAFETY: i is a row; the decoder's memory has room for all rows of all classes.
        unsafe {
            let mode = match &r.modes {
                Modes::All(mode) => *mode as i32,
                Modes::Each(modes) => entry(modes, i),
            };
            let tokens = entry(&r.seq_lens, i).max(0);
            let given = r.q_lens.as_ref().map_or(r.positions as i32, |lens| entry(lens, i));
            let is_taken = mode == VWD_DECODER_SPARSE as i32 || mode == VWD_DECODER_DENSE as i32;
            let count = if is_taken { given.clamp(0, r.positions as i32) } else { 0 };
            let first = (tokens - count).max(0);
            let begin = r.begin.as_ref().map_or(first, |begin| entry(begin, i).clamp(0, first));
            *r.rows.add(i) = count;
            let from = r.tiers.map_or(begin, |tiers| begin.max(*tiers.floors.add(i)).min(first));
            *r.from.add(i) = if is_taken { from - from % r.page_size as i32 } else { tokens };
            if !r.places.is_null() {
                *r.places.add(i) = first;
            }
            if let Some(tiers) = r.tiers {
                let blocks = if is_taken { (tokens as usize).div_ceil(r.page_size).min(tiers.table_blocks) } else { 0 };
                let stored = blocks.saturating_sub(NEWEST);
                *tiers.stored.add(i) = stored as i32;
                *tiers.newest_counts.add(i) = (blocks - stored) as i32;
                (0..NEWEST).for_each(|n| *tiers.newest_ids.add(i * NEWEST + n) = (stored + n) as i32);
                for w in 0..tiers.window_count {
                    let row = w * r.max_rows + i;
                    let seen = seen_blocks(stored, r.page_size, first as usize, *tiers.windows.add(w) as usize);
                    *tiers.seen_counts.add(row) = seen.len().min(tiers.seen_cap) as i32;
                    for (n, block) in seen.take(tiers.seen_cap).enumerate() {
                        *tiers.seen_ids.add(row * tiers.seen_cap + n) = block as i32;
                    }
                }
            }
            if let Some(counted) = &r.counted {
                let sequence = counted.sequences.as_ref().map_or(i as i32, |sequences| entry(sequences, i));
                let is_known = is_taken && (0..counted.count as i32).contains(&sequence);
                let len = first.saturating_sub(counted.drafts as i32).max(0);
                *counted.rows.add(i) = if is_known { sequence } else { -1 };
                *counted.lens.add(i) = len;
                *counted.begin.add(i) = begin.min(len);
            }
            for class in 0..r.classes {
                let threshold = *r.thresholds.add(class);
                let is_short = tokens <= threshold && r.shortest as i64 <= threshold as i64;
                let is_dense = mode == VWD_DECODER_DENSE as i32 || is_short;
                let sparse = if is_dense { 0 } else { count };
                let set = |kind, n: i32| *r.lens.add(r.place(class, kind, i)) = n;
                set(Kind::Sparse, sparse);
                set(Kind::Dense, count - sparse);
                set(Kind::Known, if begin < first { 0 } else { sparse });
                set(Kind::New, if begin < first { sparse } else { 0 });
                set(Kind::Tokens, if sparse > 0 { tokens } else { 0 });
            }
        }
    }
}

/// One row of channels, wherever its elements lie.
///
/// # Safety
/// Both have `count` elements of `element` bytes, `from_step` and `to_step` bytes apart.
unsafe fn copy(from: *const u8, from_step: i64, to: *mut u8, to_step: i64, count: usize, element: usize) {
    // SAFETY: says the caller.
    unsafe {
        if from_step == element as i64 && to_step == element as i64 {
            return to.copy_from_nonoverlapping(from, count * element);
        }
        for c in 0..count as isize {
            let (from, to) = (from.offset(c * from_step as isize), to.offset(c * to_step as isize));
            to.copy_from_nonoverlapping(from, element);
        }
    }
}

fn offset(steps: [i64; 4], at: [usize; 3]) -> isize {
    at.iter().zip(steps).map(|(&n, step)| n as isize * step as isize).sum()
}

pub fn append(cpu: &Cpu, r: &Append) {
    let heads = r.parts[0].0.dim(r.parts[0].0.rank() - 2);
    let bytes: usize = r.parts.iter().map(|(new, _)| heads * new.dim(new.rank() - 1) * new.dtype.bytes()).sum();
    cpu.parallel(r.pages.batch(), bytes * r.positions, |i| {
        // SAFETY: i is a row. Places of tokens are checked; sequences that write a token share no page, says the contract.
        unsafe {
            let (tokens, count) = (entry(&r.pages.seq_lens, i) as i64, *r.rows.add(i));
            for n in 0..count {
                let token = tokens - count as i64 + n as i64;
                let Ok(token) = usize::try_from(token) else { continue };
                if token >= r.pages.capacity() {
                    break;
                }
                let (page, row) = (token / r.pages.size, token % r.pages.size);
                let page = r.pages.table.as_ref().map_or(i as i32, |table| table.get::<i32, 2>([i, page]));
                if page < 0 || page as usize >= r.pages.count {
                    continue;
                }
                for (new, pages) in &r.parts {
                    let (from, to) = (steps(new), steps(pages));
                    for g in 0..heads {
                        copy(
                            new.data().offset(offset(from, [i, n as usize, g])),
                            from[3],
                            pages.data().offset(offset(to, [page as usize, row, g])),
                            to[3],
                            new.dim(new.rank() - 1),
                            new.dtype.bytes(),
                        );
                    }
                }
            }
        }
    });
}

pub fn take(cpu: &Cpu, r: &Take) {
    let (from, to, rank) = (steps(&r.from), steps(&r.to), r.to.rank());
    let (heads, dim, element) = (r.to.dim(rank - 2), r.to.dim(rank - 1), r.to.dtype.bytes());
    cpu.parallel(r.to.dim(0), heads * dim * element, |i| {
        // SAFETY: i is a row, and the plan gives it no more positions than there are.
        unsafe {
            for n in 0..*r.lens.add(i) as usize {
                for h in 0..heads {
                    let (source, target) = (offset(from, [i, n, h]), offset(to, [i, n, h]));
                    copy(r.from.data().offset(source), from[3], r.to.data().offset(target), to[3], dim, element);
                }
            }
        }
    });
}

pub fn complete(r: &Complete) {
    for list in 0..r.batch * r.heads {
        // SAFETY: the decoder's memory has all lists, each with room for one block more than a selection.
        unsafe {
            let (i, ids, count) = (list / r.heads, r.ids.add(list * r.capacity), r.counts.add(list));
            let (block, n) = (*r.places.add(i) / r.block_size as i32, *count as usize);
            if *r.lens.add(i) > 0 && n < r.capacity && (n == 0 || *ids.add(n - 1) < block) {
                *ids.add(n) = block;
                *count += 1;
            }
        }
    }
}

/// The sequence of a row, if there is such a number.
///
/// # Safety
/// There is a row `i`, and the call's caller keeps the tensor valid.
unsafe fn sequence(r: &Past, i: usize) -> Option<usize> {
    // SAFETY: says the caller.
    let number = r.sequences.as_ref().map_or(i as i32, |sequences| unsafe { entry(sequences, i) });
    usize::try_from(number).ok().filter(|&sequence| sequence < r.count)
}

/// Keeps the lists of rows for the next step of their sequences; empties those lists where there are no rows of lists.
pub fn remember(r: &Past) {
    for list in 0..r.rows * r.heads {
        // SAFETY: the decoder's memory has all lists of rows and of sequences.
        unsafe {
            let i = list / r.heads;
            let Some(sequence) = sequence(r, i).filter(|_| r.lens.is_null() || *r.lens.add(i) > 0) else { continue };
            let past = sequence * r.heads + list % r.heads;
            let count = match r.lens.is_null() {
                true => 0,
                false => (*r.counts.add(list)).max(0).min(r.capacity.min(r.past_capacity) as i32),
            };
            let (from, to) = (r.ids.add(list * r.capacity), r.past_ids.add(past * r.past_capacity));
            if count > 0 {
                to.copy_from_nonoverlapping(from, count as usize);
            }
            *r.past_counts.add(past) = count;
        }
    }
}

/// The lists that sequences had at the step before, and the block of each row's new token. A sequence without a past has its first
/// blocks and that one.
pub fn recall(r: &Past) {
    for list in 0..r.rows * r.heads {
        // SAFETY: the decoder's memory has all lists of rows and of sequences.
        unsafe {
            let i = list / r.heads;
            if *r.lens.add(i) <= 0 {
                *r.counts.add(list) = 0;
                continue;
            }
            let (ids, block) = (r.ids.add(list * r.capacity), *r.places.add(i) / r.block_size as i32);
            let past = sequence(r, i).map(|sequence| sequence * r.heads + list % r.heads);
            let most = r.past_capacity.min(r.capacity - 1) as i32;
            let known = past.map_or(0, |past| (*r.past_counts.add(past)).clamp(0, most));
            let kept = match past {
                Some(past) if known > 0 => {
                    let from = r.past_ids.add(past * r.past_capacity);
                    // Ids ascend, so those before the new token's block come first.
                    let kept = (0..known as usize).take_while(|&n| *from.add(n) < block).count();
                    ids.copy_from_nonoverlapping(from, kept);
                    kept
                }
                _ => {
                    let first = (r.init as usize).min(block as usize).min(r.capacity - 1);
                    (0..first).for_each(|n| *ids.add(n) = n as i32);
                    first
                }
            };
            *ids.add(kept) = block;
            *r.counts.add(list) = kept as i32 + 1;
        }
    }
}

impl Drafts {
    /// # Safety
    /// The memory is the host's, and there is such a sequence.
    unsafe fn set(&self, sequence: usize, hits: f32, trials: f32) {
        let acceptance = acceptance(hits, trials);
        // SAFETY: says the caller.
        unsafe {
            *self.hits.add(sequence) = hits;
            *self.trials.add(sequence) = trials;
            *self.acceptance.add(sequence) = acceptance;
            *self.draft_lens.add(sequence) = self.recommended(acceptance);
        }
    }
}

pub fn observe(r: &Observe) {
    for i in 0..r.rows {
        // SAFETY: i is a row, and the sequence is checked.
        unsafe {
            let sequence = r.sequences.as_ref().map_or(i as i32, |sequences| entry(sequences, i));
            let Ok(sequence) = usize::try_from(sequence) else { continue };
            if sequence >= r.drafts.count {
                continue;
            }
            let d = &r.drafts;
            let Some(accepted) = &r.accepted else {
                *d.drafted.add(sequence) = 0;
                *d.accepted.add(sequence) = 0;
                d.set(sequence, 0.0, 0.0);
                continue;
            };
            let most = r.gamma as i32;
            let drafted = r.draft_lens.as_ref().map_or(most, |lens| entry(lens, i).clamp(0, most));
            let accepted = entry(accepted, i);
            *d.drafted.add(sequence) = (*d.drafted.add(sequence)).saturating_add(drafted);
            *d.accepted.add(sequence) = (*d.accepted.add(sequence)).saturating_add(accepted);
            let hits = KEPT * *d.hits.add(sequence) + accepted as f32;
            let trials = KEPT * *d.trials.add(sequence) + drafted.min(accepted + 1) as f32;
            d.set(sequence, hits, trials);
        }
    }
}
