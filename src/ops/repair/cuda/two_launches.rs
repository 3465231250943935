//! Repair in two launches: one kernel finds what was missed and joins what was kept, the next attends to what was missed and
//! joins that to it.

use super::{Request, describe_repair, job};
use crate::core::status::{Error, Result};
use crate::ops::attention::device::{self, Kernels, Plan, RepairParams, StateView};
use crate::runtime::cuda::views::View;
use crate::runtime::cuda::{Enqueue, Facts};

/// A plan, and what the first kernel leaves for the second behind the plan's own scratch.
pub struct TwoLaunches {
    plan: Plan,
    lists: usize,
    /// Floats of the states to start from: acc, then m, then l.
    acc: usize,
    rows: usize,
}

impl TwoLaunches {
    pub fn new(facts: &Facts, kernels: &Kernels, r: &Request) -> Result<Option<TwoLaunches>> {
        let (problem, job) = (r.problem, job(r));
        let Some((_, plan)) = device::plan(kernels, None, &job)? else { return Ok(None) };
        let repair = TwoLaunches {
            lists: device::lists(&job),
            rows: problem.positions.batch() * problem.positions.count() * problem.heads.q,
            acc: problem.positions.batch() * problem.positions.count() * problem.heads.q * problem.kv.value_dim(),
            plan,
        };
        let most = device::most_shared(facts);
        if repair.shared(r) > most as usize {
            let entries = r.predicted.cap().max(r.selected.cap());
            let text = format!("lists of {entries} entries do not fit the {most} bytes of the device's shared memory");
            return Err(Error::unsupported(text));
        }
        Ok(Some(repair))
    }

    /// Shared memory of the first kernel: both lists and the partials that serve, then a row of each warp.
    fn shared(&self, r: &Request) -> usize {
        let entries = r.selected.cap().saturating_mul(2).saturating_add(r.predicted.cap());
        let lists = entries.saturating_mul(size_of::<i32>());
        lists.max(8 * r.problem.kv.value_dim() * size_of::<f32>())
    }

    fn ids(&self, r: &Request) -> usize {
        self.lists * r.selected.cap()
    }

    /// Numbers of 32 bits behind the plan's scratch.
    fn words(&self, r: &Request) -> usize {
        let slots = if r.selected.slots.is_some() { self.ids(r) } else { 0 };
        self.acc + 2 * self.rows + self.ids(r) + slots + self.lists
    }

    pub fn scratch(&self, r: &Request) -> usize {
        self.plan.scratch().next_multiple_of(256) + self.words(r) * size_of::<u32>()
    }
}

pub fn run(enqueue: &Enqueue, r: &Request, mut repair: TwoLaunches) -> Result<()> {
    let base = enqueue.scratch(repair.scratch(r))? as *mut u8;
    repair.plan.place(base, enqueue.counters()? as *mut u8);
    let words = base.wrapping_add(repair.plan.scratch().next_multiple_of(256));
    let at = |word: usize| words.wrapping_add(word * size_of::<u32>());
    let (m, l) = (repair.acc, repair.acc + repair.rows);
    let ids = l + repair.rows;
    let counts = ids + repair.ids(r);
    let slots = counts + repair.lists;

    let positions = r.problem.positions.count();
    let (heads, dim) = (r.problem.heads.q as i64, r.problem.kv.value_dim() as i64);
    let sums = [positions as i64 * heads * 4, heads * 4, 4, 0];
    let start = StateView {
        acc: View { data: at(0), step: [sums[0] * dim, sums[1] * dim, sums[2] * dim, 0, 4] },
        m: View { data: at(m), step: sums },
        l: View { data: at(l), step: sums },
    };
    repair.plan.params.start = start;
    let (ids, counts, slots) = (at(ids), at(counts), at(slots));
    let mut params = RepairParams { to: repair.plan.params, ids, slots, counts, ..RepairParams::none() };
    describe_repair(r, &mut params);

    // The second kernel's list is what the first one writes: the missed blocks.
    let to = &mut repair.plan.params;
    let (cap, kv_heads) = (r.selected.cap() as i64, r.problem.heads.kv as i64);
    let of_position = if r.selected.is_own() { kv_heads } else { 0 };
    let of_sequence = r.selected.per_head() as i64 * kv_heads;
    to.counts = View { data: counts, step: [of_sequence * 4, of_position * 4, 4] };
    let list = |data| View { data, step: [of_sequence * cap * 4, of_position * cap * 4, cap * 4, 4] };
    to.ids = list(ids);
    if r.selected.slots.is_some() {
        to.slots = list(slots);
    }

    let kernels: &Kernels = enqueue.kernels();
    let kernel = kernels.find_missed.sharing(repair.shared(r) as u32);
    let ctas = repair.lists as u32 * params.to.rows;
    // SAFETY: RepairParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe {
        enqueue.launch(&kernel, device::grid(enqueue, ctas), [(&raw const params).cast()])?;
        device::launch(enqueue, &repair.plan, r.problem, None)
    }
}
