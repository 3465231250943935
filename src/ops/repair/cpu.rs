//! Repair on the CPU: attention over the selected list (see `attention::cpu`) in which an entry that was predicted costs
//! nothing (SUPERSET) or a read of its partial (EXACT).

use super::{Kept, Request};
use crate::core::status::Result;
use crate::ops::attention::cpu::{Entry, Job, Plan, run_job};
use crate::ops::views::BlockList;
use crate::runtime::cpu::Cpu;

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    let (start, kept) = match r.kept {
        Kept::Superset(state) => (Some(state), None),
        Kept::Exact(partials) => (None, Some(partials)),
    };
    let plan = Repair { r, exact: kept.is_some() };
    let job =
        Job { problem: &r.problem, plan: &plan, group: r.group, start, kept, partials: None, outputs: &r.outputs };
    run_job(cpu, &job)?;
    if let Some(counts) = &r.missed_counts {
        let heads = r.problem.heads.kv;
        let bytes = r.selected.cap() * size_of::<i32>();
        cpu.parallel(r.problem.batch() * heads, bytes, |pair| {
            let (i, g) = (pair / heads, pair % heads);
            // SAFETY: the op's caller vouches for the tensors; each pair is one task's.
            unsafe { counts.set([i, g], plan.missed(i, g) as i32) };
        });
    }
    Ok(())
}

struct Repair<'a> {
    r: &'a Request<'a>,
    exact: bool,
}

impl Plan for Repair<'_> {
    unsafe fn count(&self, i: usize, g: usize) -> usize {
        // SAFETY: forwarded to the caller.
        unsafe { self.r.selected.count([i, 0, g]) }
    }

    unsafe fn explain(&self, i: usize, g: usize, first: usize, entries: &mut [Entry]) {
        let Request { problem, predicted, selected, .. } = self.r;
        let mut walk = None;
        let mut last_group = (usize::MAX, false);
        for (j, entry) in (first..).zip(entries) {
            // SAFETY: forwarded to the caller; entries are below the count.
            unsafe {
                let Some(block) = problem.block(selected, i, g, j) else {
                    *entry = Entry::Nothing;
                    continue;
                };
                let walk = walk.get_or_insert_with(|| Walk::to(predicted, i, g, block));
                *entry = match walk.find(block) {
                    None => Entry::Block(block),
                    Some(_) if !self.exact => Entry::Nothing,
                    Some(position) => {
                        let group = position / self.r.group;
                        if last_group.0 != group {
                            last_group = (group, self.is_selected(i, g, group));
                        }
                        match last_group.1 {
                            false => Entry::Block(block),
                            // Its first block stands for the group.
                            true if self.members(i, g, group).next() == Some(block) => Entry::Kept(group),
                            true => Entry::Nothing,
                        }
                    }
                };
            }
        }
    }
}

impl Repair<'_> {
    /// Blocks of a predicted group.
    ///
    /// # Safety
    /// As for [`Plan::count`].
    unsafe fn members(&self, i: usize, g: usize, group: usize) -> impl Iterator<Item = usize> {
        let Request { problem, predicted, group: size, .. } = self.r;
        // SAFETY: forwarded to the caller.
        let count = unsafe { predicted.count([i, 0, g]) };
        let entries = group * size..count.min((group + 1) * size);
        // SAFETY: as above; entries are below the count.
        entries.filter_map(move |j| unsafe { problem.block(predicted, i, g, j) })
    }

    /// Are all blocks of a predicted group, one of which is, selected?
    ///
    /// # Safety
    /// As for [`Plan::count`].
    unsafe fn is_selected(&self, i: usize, g: usize, group: usize) -> bool {
        let selected = &self.r.selected;
        // SAFETY: forwarded to the caller.
        unsafe {
            self.r.group == 1
                || self.members(i, g, group).all(|block| Walk::to(selected, i, g, block).find(block).is_some())
        }
    }

    /// Size of selected ∖ predicted.
    ///
    /// # Safety
    /// As for [`Plan::count`].
    unsafe fn missed(&self, i: usize, g: usize) -> usize {
        let Request { problem, predicted, selected, .. } = self.r;
        // SAFETY: forwarded to the caller; j is below the count.
        unsafe {
            let mut walk = Walk::to(predicted, i, g, 0);
            let blocks = (0..selected.count([i, 0, g])).filter_map(|j| problem.block(selected, i, g, j));
            blocks.filter(|&block| walk.find(block).is_none()).count()
        }
    }
}

/// A position in an ascending list that moves forward.
struct Walk<'a> {
    list: &'a BlockList<'a>,
    i: usize,
    g: usize,
    position: usize,
    count: usize,
}

impl<'a> Walk<'a> {
    /// Starts at the first entry that is not below `block`.
    ///
    /// # Safety
    /// The list is valid, `i` and `g` inside it.
    unsafe fn to(list: &'a BlockList, i: usize, g: usize, block: usize) -> Walk<'a> {
        // SAFETY: forwarded to the caller; positions are below the count.
        unsafe {
            let count = list.count([i, 0, g]);
            let (mut position, mut end) = (0, count);
            while position < end {
                let middle = position + (end - position) / 2;
                if (list.id([i, 0, g], middle) as i64) < block as i64 { position = middle + 1 } else { end = middle }
            }
            Walk { list, i, g, position, count }
        }
    }

    /// Position of `block`, at or above those asked for before.
    ///
    /// # Safety
    /// As for [`Walk::to`].
    unsafe fn find(&mut self, block: usize) -> Option<usize> {
        while self.position < self.count {
            // SAFETY: forwarded to the caller; the position is below the count.
            let id = unsafe { self.list.id([self.i, 0, self.g], self.position) } as i64;
            if id >= block as i64 {
                return (id == block as i64).then_some(self.position);
            }
            self.position += 1;
        }
        None
    }
}
