//! Launch of the kernels of kernels/select/minmax.cuh.

use super::params::{MOST_TOKENS, SelectParams, check_sharing, scratch, sharing};
use super::rows::{RowKernel, RowPlan, TopKernels};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::select::Request;
use crate::ops::select::choose::{self, BlocksVariant, MinMaxShape, RowShape, TopVariant};
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::variants;
use crate::runtime::cuda::views::{Summary, element_code, has_aligned_rows};
use crate::runtime::cuda::{self, Enqueue, Facts, Modules};

pub struct MinMaxKernels {
    decode: RowKernel,
    general_16: RowKernel,
    general_32: RowKernel,
}

impl MinMaxKernels {
    pub fn find(modules: &Modules) -> Result<MinMaxKernels> {
        let kernel = |name, declared| RowKernel::find(modules, "select/minmax", name, declared, true);
        Ok(MinMaxKernels {
            decode: kernel("select_minmax_decode", DECODE_SHARED)?,
            general_16: kernel("select_minmax_16", GENERAL_SHARED)?,
            general_32: kernel("select_minmax_32", GENERAL_SHARED)?,
        })
    }

    fn of(&self, variant: BlocksVariant, bits: usize) -> &RowKernel {
        match (variant, bits) {
            (BlocksVariant::MinMaxDecode, _) => &self.decode,
            (_, 16) => &self.general_16,
            (_, _) => &self.general_32,
        }
    }
}

kernel_struct! {
    /// Mirrors MinMaxParams of kernels/select/params.cuh.
    pub struct MinMaxParams {
        select: SelectParams,
        max: Summary,
        min: Summary,
        dtype: u32,
        lanes: u32,
        adjacent: u32,
    }
}

/// CHUNK of kernels/select/minmax.cuh: blocks that are worth a CTA.
const CHUNK: usize = 64;
/// Shared memory that the kernels declare, or more.
const DECODE_SHARED: usize = 13 << 10;
const GENERAL_SHARED: usize = 48 << 10;
/// MOST_FOLDED of kernels/select/minmax.cuh: positions · D of a shared list.
const MOST_FOLDED: usize = 8 * 576;
/// Channels of a lane.
const LANE_CHANNELS: usize = 8;

/// The split of a call's work.
pub struct MinMaxPlan {
    pub variant: BlocksVariant,
    adjacent: bool,
    stored: usize,
    pub rows: RowPlan,
    pub bytes: usize,
}

impl MinMaxPlan {
    /// `forced`: variants that the session's options force.
    pub fn new(
        facts: &Facts,
        kernels: &TopKernels,
        forced: (Option<BlocksVariant>, Option<TopVariant>),
        r: &Request,
        [max, min]: [&Tensor; 2],
    ) -> Result<MinMaxPlan> {
        let dim = r.queries.heads.dim;
        check_sharing(r)?;
        if sharing(r) * dim > MOST_FOLDED {
            let found = format!("q: {} positions of {dim} channels share a list", sharing(r));
            return Err(Error::unsupported(format!("{found}; CUDA takes up to {MOST_FOLDED} channels of all")));
        }
        let adjacent = [max, min].into_iter().all(|t| has_aligned_rows(t, 16));
        let positions = r.queries.positions.count();
        let shape = MinMaxShape { dim, positions, bits: max.dtype.bits as usize, adjacent };
        let variant = variants::choose(forced.0, |variant| choose::minmax(variant, &shape))?;
        let stored = r.queries.index.capacity().min(MOST_TOKENS.div_ceil(r.queries.block_size));
        let declared = if variant == BlocksVariant::MinMaxDecode { DECODE_SHARED } else { GENERAL_SHARED };
        let mut scratch = cuda::Parts::default();
        let wanted = if r.quota.budgets.is_some() { r.quota.cap } else { r.quota.budget.k };
        let most_ctas = stored.div_ceil(CHUNK);
        let row = RowShape { rows: r.lists(), stored, wanted, most_ctas, waits_for_bytes: true };
        let rows = RowPlan::new(facts, kernels, forced.1, declared, row, &mut scratch)?;
        Ok(MinMaxPlan { variant, adjacent, stored, rows, bytes: scratch.bytes })
    }
}

pub fn select(
    enqueue: &Enqueue,
    kernels: &MinMaxKernels,
    top: &TopKernels,
    r: &Request,
    plan: &MinMaxPlan,
    [max, min]: [&Tensor; 2],
) -> Result<()> {
    let kernel = kernels.of(plan.variant, max.dtype.bits as usize);
    let mut select = SelectParams::new(r);
    select.place.capacity = plan.stored as u32;
    plan.rows.fill(&mut select, kernel, scratch(enqueue, plan.bytes)?);
    let params = MinMaxParams {
        select,
        max: Summary::new(Some(max)),
        min: Summary::new(Some(min)),
        dtype: element_code(max.dtype),
        // A half of the lanes for each summary.
        lanes: 2 * (r.queries.heads.dim / LANE_CHANNELS).next_power_of_two().clamp(4, 16) as u32,
        adjacent: plan.adjacent as u32,
    };
    // SAFETY: the parameters are the kernels' structs; the op's caller keeps the tensors valid until the stream has passed,
    // and scratch is this call's. The kernels wait before they touch anything.
    unsafe { plan.rows.launch(enqueue, kernel, top, &params.select, (&raw const params).cast()) }
}
