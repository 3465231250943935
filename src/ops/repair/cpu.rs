//! Repair on the CPU: attention over the selected list (see `attention::engine`) in which an entry that was predicted costs
//! nothing (SUPERSET) or a read of its partial (EXACT).

use super::{Kept, Request};
use crate::core::status::Result;
use crate::ops::attention::engine::{Entry, Job, Plan, run_job};
use crate::ops::views::{BlockList, ListAt};
use crate::runtime::cpu::Cpu;
use std::ops::Range;

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    let (start, kept) = match r.kept {
        Kept::Superset(state) => (Some(state), None),
        Kept::Exact(partials) => (None, Some(partials)),
    };
    let plan = Repair { r, exact: kept.is_some() };
    let job = Job {
        problem: r.problem,
        plan: &plan,
        own_lists: r.selected.is_own(),
        slots: r.selected.slots.is_some().then_some(r.selected),
        entries_per_partial: r.entries_per_partial,
        start,
        kept,
        partials: None,
        outputs: r.outputs,
    };
    run_job(cpu, &job)?;
    if let Some(counts) = r.missed_counts {
        let (heads, lists) = (r.problem.heads.kv, r.selected.per_head());
        let bytes = r.selected.cap().saturating_mul(size_of::<i32>());
        cpu.parallel(r.problem.positions.batch() * lists * heads, bytes, |n| {
            let at = [n / heads / lists, n / heads % lists, n % heads];
            let place = if r.selected.is_own() { at } else { [at[0], at[2], 0] };
            // SAFETY: the op's caller vouches for the tensors; missed_counts has a place for each list, one task's.
            unsafe { counts.set(place, plan.missed(at) as i32) };
        });
    }
    Ok(())
}

struct Repair<'a> {
    r: &'a Request<'a>,
    exact: bool,
}

impl Plan for Repair<'_> {
    unsafe fn entries(&self, at: ListAt) -> Range<usize> {
        // SAFETY: there is such a list.
        0..unsafe { self.r.selected.count(at) }
    }

    unsafe fn explain(&self, at: ListAt, first: usize, entries: &mut [Entry]) {
        let Request { problem, predicted, selected, .. } = self.r;
        let mut walk = None;
        let mut last_group = (usize::MAX, false);
        for (j, entry) in (first..).zip(entries) {
            // SAFETY: j is an entry below the count, so both lists have what is looked at.
            unsafe {
                let Some(block) = problem.block(selected, at, j) else {
                    *entry = Entry::Nothing;
                    continue;
                };
                let walk = walk.get_or_insert_with(|| Walk::to(predicted, at, block));
                *entry = match walk.find(block) {
                    None => Entry::Block(block),
                    Some(_) if !self.exact => Entry::Nothing,
                    Some(position) => {
                        let entry_group = position / self.r.entries_per_partial;
                        if last_group.0 != entry_group {
                            last_group = (entry_group, self.is_selected(at, entry_group));
                        }
                        match last_group.1 {
                            false => Entry::Block(block),
                            // Its first block stands for the entry group.
                            true if self.members(at, entry_group).next() == Some(block) => Entry::Kept(entry_group),
                            true => Entry::Nothing,
                        }
                    }
                };
            }
        }
    }
}

impl Repair<'_> {
    /// Blocks of a predicted entry group.
    ///
    /// # Safety
    /// As for [`Plan::entries`].
    unsafe fn members(&self, at: ListAt, entry_group: usize) -> impl Iterator<Item = usize> {
        let Request { problem, predicted, entries_per_partial: size, .. } = self.r;
        // SAFETY: `at` names a list of either, for they have the same shape but for cap.
        let count = unsafe { predicted.count(at) };
        let entries = entry_group * size..count.min((entry_group + 1) * size);
        // SAFETY: as above; entries are below the count.
        entries.filter_map(move |j| unsafe { problem.block(predicted, at, j) })
    }

    /// Are all blocks of a predicted entry group, one of which is, selected?
    ///
    /// # Safety
    /// As for [`Plan::entries`].
    unsafe fn is_selected(&self, at: ListAt, entry_group: usize) -> bool {
        let selected = self.r.selected;
        // SAFETY: `at` names a list of either, whose members are entries below the count.
        unsafe {
            self.r.entries_per_partial == 1
                || self.members(at, entry_group).all(|block| Walk::to(selected, at, block).find(block).is_some())
        }
    }

    /// Size of selected ∖ predicted.
    ///
    /// # Safety
    /// As for [`Plan::entries`].
    unsafe fn missed(&self, at: ListAt) -> usize {
        let Request { problem, predicted, selected, .. } = self.r;
        // SAFETY: `at` names a list of both; j is below the count.
        unsafe {
            let mut walk = Walk::to(predicted, at, 0);
            let blocks = (0..selected.count(at)).filter_map(|j| problem.block(selected, at, j));
            blocks.filter(|&block| walk.find(block).is_none()).count()
        }
    }
}

/// A position in an ascending list that moves forward.
struct Walk<'a> {
    list: &'a BlockList<'a>,
    at: ListAt,
    position: usize,
    count: usize,
}

impl<'a> Walk<'a> {
    /// Starts at the first entry that is not below `block`.
    ///
    /// # Safety
    /// The list is valid, `i` and `g` inside it.
    unsafe fn to(list: &'a BlockList, at: ListAt, block: usize) -> Walk<'a> {
        // SAFETY: `at` is a list of these; positions stay below its count.
        unsafe {
            let count = list.count(at);
            let (mut position, mut end) = (0, count);
            while position < end {
                let middle = position + (end - position) / 2;
                if (list.id(at, middle) as i64) < block as i64 { position = middle + 1 } else { end = middle }
            }
            Walk { list, at, position, count }
        }
    }

    /// Position of `block`, at or above those asked for before.
    ///
    /// # Safety
    /// As for [`Walk::to`].
    unsafe fn find(&mut self, block: usize) -> Option<usize> {
        while self.position < self.count {
            // SAFETY: the position is below the count of the list that this began with.
            let id = unsafe { self.list.id(self.at, self.position) } as i64;
            if id >= block as i64 {
                return (id == block as i64).then_some(self.position);
            }
            self.position += 1;
        }
        None
    }
}
