//! Repair: attention over predicted blocks becomes attention over the selected ones, for the price of those missed.
//!
//! SUPERSET folds the missed blocks, selected ∖ predicted, into the state that was kept. EXACT joins, in the order of the
//! selected list, the partials of predicted ∩ selected with the missed blocks.

mod cpu;

use super::attention::{Outputs, Problem, group, partials_from_c, tensors};
use super::views::{BlockList, Lists, State};
use crate::abi::{VWD_REPAIR_EXACT, VWD_REPAIR_SUPERSET, vwd_paged_kv, vwd_repair_args, vwd_stream};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::{On, Session, require_no_flags};

/// What the speculative pass has kept.
#[derive(Clone, Copy)]
pub enum Kept<'a> {
    /// The result covers predicted ∪ selected.
    Superset(State<'a>),
    /// The result covers selected.
    Exact(State<'a>),
}

/// Checked arguments of `vwd_repair`.
pub struct Request<'a> {
    pub problem: Problem<'a>,
    pub predicted: BlockList<'a>,
    pub selected: BlockList<'a>,
    /// Entries that share a partial state.
    pub group: usize,
    pub kept: Kept<'a>,
    pub outputs: Outputs<'a>,
    /// [B, Hk]
    pub missed_counts: Option<Tensor<'a>>,
}

impl<'a> Request<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_repair_args, kv: &'a vwd_paged_kv) -> Result<Request<'a>> {
        let checks = &session.checks();
        require_no_flags("flags", c.flags)?;
        let problem = Problem::from_c(checks, &c.q, kv, c.scale, c.block_size)?;
        problem.kv.pages.check_block_size("block_size", problem.block_size)?;
        let (batch, heads) = (problem.batch(), problem.heads);
        let lists = Lists { batch, positions: None, kv_heads: heads.kv };
        let names = ["predicted.ids", "predicted.counts", "predicted.slots"];
        let predicted = BlockList::from_c(checks, &c.predicted, names, lists)?;
        let names = ["selected.ids", "selected.counts", "selected.slots"];
        let selected = BlockList::from_c(checks, &c.selected, names, lists)?;

        let names = ["predicted_state.acc", "predicted_state.m", "predicted_state.l"];
        let lead = [("B", batch), ("Hq", heads.q)];
        let kept = &c.predicted_state;
        let state = State::optional_from_c(checks, [&kept.acc, &kept.m, &kept.l], names, &lead, heads.dim)?;
        let names = ["predicted_partials.acc", "predicted_partials.m", "predicted_partials.l"];
        let groups = predicted.cap().div_ceil((c.partial_blocks as usize).max(1));
        let partials = partials_from_c(checks, &c.predicted_partials, names, batch, &heads, groups)?;
        let kept = match (c.mode, state, partials) {
            (VWD_REPAIR_SUPERSET, Some(state), None) => Kept::Superset(state),
            (VWD_REPAIR_EXACT, None, Some(partials)) => Kept::Exact(partials),
            (VWD_REPAIR_SUPERSET, None, _) => return Err(misplaced("predicted_state", "absent", "a state")),
            (VWD_REPAIR_SUPERSET, ..) => return Err(misplaced("predicted_partials", "given", "none for SUPERSET")),
            (VWD_REPAIR_EXACT, Some(_), _) => return Err(misplaced("predicted_state", "given", "none for EXACT")),
            (VWD_REPAIR_EXACT, ..) => return Err(misplaced("predicted_partials", "absent", "partials")),
            (mode, ..) => return Err(misplaced("mode", &mode.to_string(), "a VWD_REPAIR_* value (1 or 2)")),
        };
        let dtypes = [problem.q.dtype, DType::F32];
        let outputs = Outputs::from_c(checks, [&c.out, &c.lse], &c.state, &dtypes, batch, &heads)?;
        let outputs = outputs.with_out(checks, &c.out)?;
        let missed_counts = match checks.optional("missed_counts", &c.missed_counts)? {
            Some(t) => Some(t.of(DType::I32)?.of_shape(&[("B", batch), ("Hk", heads.kv)])?.writable()?),
            None => None,
        };
        let group = group(problem.block_size, c.partial_blocks, partials.is_some());
        let request = Request { problem, predicted, selected, group, kept, outputs, missed_counts };
        request.reject_overlap()?;
        Ok(request)
    }

    fn reject_overlap(&self) -> Result<()> {
        let [out, lse, acc, m, l] = self.outputs.tensors();
        let [q, k, v, lens, table] = self.problem.inputs();
        let lists = [&self.predicted.ids, &self.predicted.counts, &self.selected.ids, &self.selected.counts].map(Some);
        let (state, partials) = match self.kept {
            Kept::Superset(state) => (Some(state), None),
            Kept::Exact(partials) => (None, Some(partials)),
        };
        let outputs = [out, lse, acc, m, l, self.missed_counts.as_ref()];
        overlap::reject(&outputs, &[q, k, v, lens, table])?;
        overlap::reject(&outputs, &lists)?;
        overlap::reject(&outputs, &tensors(&partials))?;
        // The state may be updated in place: each head is read before it is written, by the same task.
        let in_place = |out: Option<&Tensor>, kept: Option<&Tensor>| match (out, kept) {
            (Some(out), Some(kept)) => out.data == kept.data && out.strides() == kept.strides(),
            _ => false,
        };
        for (n, kept) in tensors(&state).into_iter().enumerate() {
            for (m, out) in outputs.into_iter().enumerate() {
                if !(m == n + 2 && in_place(out, kept)) {
                    overlap::reject(&[out], &[kept])?;
                }
            }
        }
        Ok(())
    }
}

fn misplaced(name: &str, found: &str, expected: &str) -> Error {
    Error::argument(name, found, expected)
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(_) => Err(Error::unsupported("vwd_repair has no CUDA kernel in this build")),
    }
}
