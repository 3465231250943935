//! Attention on the CPU: the engine over a list, or over everything.

use super::engine::{Entry, Job, Plan, join_states, join_term, run_job};
use super::{MergeRequest, Problem, Request};
use crate::core::status::Result;
use crate::ops::views::{BlockList, ListAt};
use crate::runtime::cpu::Cpu;
use std::ops::Range;

pub fn run(cpu: &Cpu, r: &Request) -> Result<()> {
    let job = |plan| Job {
        problem: r.problem,
        plan,
        own_lists: r.list.is_some_and(BlockList::is_own),
        slots: r.list.filter(|list| list.slots.is_some()),
        entries_per_partial: r.entries_per_partial,
        start: None,
        kept: None,
        partials: r.partials,
        outputs: r.outputs,
    };
    match r.list {
        Some(list) => run_job(cpu, &job(&Listed { problem: r.problem, list })),
        None => run_job(cpu, &job(&Everything { problem: r.problem })),
    }?;
    r.term.map_or(Ok(()), |term| join_term(cpu, r.problem, term, r.outputs))
}

pub fn merge(cpu: &Cpu, r: &MergeRequest) -> Result<()> {
    join_states(cpu, &r.states, &r.outputs)
}

struct Listed<'a> {
    problem: &'a Problem<'a>,
    list: &'a BlockList<'a>,
}

impl Plan for Listed<'_> {
    unsafe fn entries(&self, at: ListAt) -> Range<usize> {
        // SAFETY: there is such a list.
        0..unsafe { self.list.count(at) }
    }

    unsafe fn explain(&self, at: ListAt, first: usize, entries: &mut [Entry]) {
        for (j, entry) in (first..).zip(entries) {
            // SAFETY: the entries are below the count.
            let block = unsafe { self.problem.block(self.list, at, j) };
            *entry = block.map_or(Entry::Nothing, Entry::Block);
        }
    }
}

struct Everything<'a> {
    problem: &'a Problem<'a>,
}

impl Plan for Everything<'_> {
    unsafe fn entries(&self, [i, ..]: ListAt) -> Range<usize> {
        let size = self.problem.block_size;
        // SAFETY: there is such a sequence.
        let (rows, first, end) = unsafe {
            (self.problem.positions.len(i), self.problem.seen(i, 0).range().start, self.problem.kv.pages.len(i))
        };
        let has_pages = self.problem.kv.pages.count > 0 || self.problem.int4.is_some();
        if rows == 0 || !has_pages { 0..0 } else { first / size..end.div_ceil(size) }
    }

    unsafe fn explain(&self, _: ListAt, first: usize, entries: &mut [Entry]) {
        for (block, entry) in (first..).zip(entries) {
            *entry = Entry::Block(block);
        }
    }
}
