//! Repair: attention over predicted blocks becomes attention over the selected ones, for the price of those missed.
//!
//! SUPERSET folds the missed blocks, selected ∖ predicted, into the state that was kept. EXACT joins, in the order of the
//! selected list, the partials of predicted ∩ selected with the missed blocks.

mod cpu;
mod cuda;

use super::attention::{Extents, Numbers, Outputs, Problem, entries_per_partial, names, partial_count, tensors};
use super::contents;
use super::int4::Int4Kv;
use super::views::{BlockList, State};
use crate::abi::{
    VWD_ATTENTION_KEEP_ROWS, VWD_REPAIR_EXACT, VWD_REPAIR_SUPERSET, vwd_paged_kv, vwd_repair_args, vwd_stream,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Name, Tensor};
use crate::runtime::{On, Session, require_flags};
use std::mem::MaybeUninit;

const STATE: [Name; 3] = names(["predicted_state.acc", "predicted_state.m", "predicted_state.l"]);
const PARTIALS: [Name; 3] = names(["predicted_partials.acc", "predicted_partials.m", "predicted_partials.l"]);

/// What the speculative pass has kept.
#[derive(Clone, Copy)]
pub enum Kept<'a> {
    /// The result covers predicted ∪ selected.
    Superset(State<'a>),
    /// The result covers selected.
    Exact(State<'a>),
}

/// Checked arguments of `vwd_repair`. The parts stay where they were made: they are large, and the checks are short.
#[derive(Clone, Copy)]
pub struct Request<'r> {
    pub problem: &'r Problem<'r>,
    pub predicted: &'r BlockList<'r>,
    pub selected: &'r BlockList<'r>,
    /// Entries that share a partial state.
    pub entries_per_partial: usize,
    pub kept: &'r Kept<'r>,
    pub outputs: &'r Outputs<'r>,
    /// As the counts of the lists.
    pub missed_counts: Option<&'r Tensor<'r>>,
    /// [B, Hk], packed: 0 where it is known that nothing was missed. A variant may leave the results there, which are those of attention to the
    /// predicted list.
    pub known_misses: Option<&'r Tensor<'r>>,
}

impl Request<'_> {
    /// Checks the arguments and hands them to `then`.
    #[inline(always)]
    pub fn with<R>(
        session: &Session,
        c: &vwd_repair_args,
        kv: &vwd_paged_kv,
        then: impl FnOnce(&Request) -> Result<R>,
    ) -> Result<R> {
        require_flags("flags", c.flags, VWD_ATTENTION_KEEP_ROWS)?;
        let checks = &session.checks();
        let numbers = Numbers { block_size: c.block_size, scale: c.scale, soft_cap: c.soft_cap, window: c.window };
        let list = (&c.selected, "selected.ids");
        let problem = Problem::from_c(checks, [&c.q, &c.q_lens, &c.tree], kv, numbers, list)?;
        let mut room = MaybeUninit::uninit();
        let int4 = Int4Kv::from_c(checks, kv.int4, &problem.kv, &mut room)?;
        let problem = problem.with_int4(int4.as_ref(), true)?;
        problem.kv.pages.check_block_size("block_size", problem.block_size)?;
        let names = ["selected.ids", "selected.counts", "selected.slots"];
        let selected = BlockList::with_slots_from_c(checks, &c.selected, names, problem.lists())?;
        let names = ["predicted.ids", "predicted.counts", "predicted.slots"];
        let predicted = BlockList::from_c(checks, &c.predicted, names, problem.lists())?;
        if predicted.is_own() != selected.is_own() {
            let found = format!("shape {:?}", predicted.ids.shape());
            return Err(Error::argument("predicted.ids", found, "the rank of selected.ids"));
        }
        let extents = Extents::of(&problem);
        let kept = Kept::from_c(checks, c, &predicted, &extents)?;
        let dtypes = &[problem.positions.q.dtype, DType::F32];
        let outputs = Outputs::from_c(checks, [&c.out, &c.lse, &c.sinks], &c.state, (dtypes, true), &extents)?;
        let outputs = outputs.with_flags(c.flags, &problem.positions);
        let (i32, batch, heads) = (&[DType::I32], ("B", extents.batch), ("Hk", problem.heads.kv));
        let missed_counts = match extents.positions.filter(|_| selected.is_own()) {
            None => checks.optional_output("missed_counts", &c.missed_counts, i32, &[batch, heads])?,
            Some(q) => checks.optional_output("missed_counts", &c.missed_counts, i32, &[batch, ("Q", q), heads])?,
        };
        let is_exact = matches!(kept, Kept::Exact(_));
        let capacity = predicted.cap().max(selected.cap());
        let request = Request {
            problem: &problem,
            predicted: &predicted,
            selected: &selected,
            entries_per_partial: entries_per_partial(problem.block_size, c.partial_blocks, is_exact, capacity),
            kept: &kept,
            outputs: &outputs,
            missed_counts: missed_counts.as_ref(),
            known_misses: None,
        };
        request.reject_overlap()?;
        then(&request)
    }

    #[inline(always)]
    fn reject_overlap(&self) -> Result<()> {
        let [out, lse, acc, m, l] = self.outputs.tensors();
        let [q, q_lens, k, v, table, lens, k_scale, v_scale, tree] = self.problem.inputs();
        let [predicted, predicted_counts, _] = self.predicted.tensors();
        let [selected, selected_counts, slots] = self.selected.tensors();
        let (state, partials) = match self.kept {
            Kept::Superset(state) => (Some(state), None),
            Kept::Exact(partials) => (None, Some(partials)),
        };
        let [part_acc, part_m, part_l] = tensors(partials);
        let outputs = [out, lse, acc, m, l, self.missed_counts];
        let lists = [predicted, predicted_counts, selected, selected_counts, slots];
        let [a, b, c, d, e] = lists;
        let sinks = self.outputs.sinks.as_ref();
        overlap::reject(
            &outputs,
            &[q, q_lens, k, v, table, lens, k_scale, v_scale, tree, a, b, c, d, e, part_acc, part_m, part_l, sinks],
        )?;
        self.problem.reject_overlap_with_int4(&outputs)?;
        if state.is_some() { reject_all_but_in_place(outputs, tensors(state)) } else { Ok(()) }
    }
}

impl<'a> Kept<'a> {
    #[inline(always)]
    fn from_c(checks: &Checks, c: &'a vwd_repair_args, predicted: &BlockList, extents: &Extents) -> Result<Kept<'a>> {
        let state = extents.state(checks, &c.predicted_state, STATE)?;
        let groups = partial_count(predicted.cap(), c.partial_blocks);
        let partials = extents.partials(checks, &c.predicted_partials, PARTIALS, groups)?;
        let misplaced = |name, found, expected| Err(Error::argument(name, found, expected));
        match (c.mode, state, partials) {
            (VWD_REPAIR_SUPERSET, Some(state), None) => Ok(Kept::Superset(state)),
            (VWD_REPAIR_EXACT, None, Some(partials)) => Ok(Kept::Exact(partials)),
            (VWD_REPAIR_SUPERSET, None, _) => {
                misplaced("predicted_state", "absent", "the state of attention over predicted, which SUPERSET adds to")
            }
            (VWD_REPAIR_SUPERSET, ..) => misplaced("predicted_partials", "given", "none for SUPERSET"),
            (VWD_REPAIR_EXACT, Some(_), _) => misplaced("predicted_state", "given", "none for EXACT"),
            (VWD_REPAIR_EXACT, ..) => {
                misplaced("predicted_partials", "absent", "the partials of attention over predicted, which EXACT joins")
            }
            (mode, ..) => misplaced("mode", &mode.to_string(), "a VWD_REPAIR_* value (1 or 2)"),
        }
    }
}

/// The state may be updated in place: each head is read before it is written, by the same task.
fn reject_all_but_in_place(outputs: [Option<&Tensor>; 6], state: [Option<&Tensor>; 3]) -> Result<()> {
    let in_place = |out: Option<&Tensor>, kept: Option<&Tensor>| match (out, kept) {
        (Some(out), Some(kept)) => out.data() == kept.data() && out.strides() == kept.strides(),
        _ => false,
    };
    for (n, kept) in state.into_iter().enumerate() {
        for (m, out) in outputs.into_iter().enumerate() {
            if !(m == n + 2 && in_place(out, kept)) {
                overlap::reject(&[out], &[kept])?;
            }
        }
    }
    Ok(())
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || {
        let mut rules = request.problem.contents();
        for list in [request.predicted, request.selected] {
            rules.extend(request.problem.contents_of(list, 0));
        }
        rules.extend(request.outputs.contents());
        rules
    })?;
    match on {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}

/// Bytes of scratch that `run` takes from its stream's arena.
pub fn scratch(session: &Session, request: &Request) -> Result<u64> {
    session.scratch_bytes(|cuda| cuda::scratch(cuda, request))
}
