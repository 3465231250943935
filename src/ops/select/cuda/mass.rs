//! Launches of the kernels of kernels/select/mass.cuh: the mass of the blocks that AXIS leaves out.

use super::means::{CHUNK_WINDOWS, MeanParams, Summaries};
use super::params::{MOST_TOKENS, SelectParams, check_sharing, grid, scratch, sharing, strides};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::index::Axes;
use crate::ops::select::Request;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::views::{address, byte_stride, saturated};
use crate::runtime::cuda::{self, Enqueue, Facts, Kernel, Modules};

pub struct MassKernels {
    of_4: Kernel,
    of_16: Kernel,
    of_32: Kernel,
    join: Kernel,
}

impl MassKernels {
    pub fn find(modules: &Modules) -> Result<MassKernels> {
        let kernel = |name| modules.kernel("select/means", name);
        Ok(MassKernels {
            of_4: kernel("select_mass_4")?,
            of_16: kernel("select_mass_16")?,
            of_32: kernel("select_mass_32")?,
            join: kernel("select_mass_join")?,
        })
    }
}

kernel_struct! {
    /// Mirrors MassParams of kernels/select/params.cuh.
    pub struct MassParams {
        means: MeanParams,
        centre: *const u8,
        centre_head: i64,
        centre_channel: i64,
        log_mass: *mut u8,
        mass_seq: i64,
        mass_pos: i64,
        mass_head: i64,
        query_heads: u32,
        warps: u32,
    }
}

/// Warps of a CTA of select_mass_join.
const WARPS: usize = super::params::THREADS as usize / 32;

/// The split of the work, and where its parts of scratch begin.
pub struct MassPlan {
    heads: usize,
    stored: usize,
    chunks: usize,
    scoring: usize,
    /// B · Q · Hq
    warps: usize,
    partials: usize,
    seen: usize,
    pub bytes: usize,
}

impl MassPlan {
    pub fn new(facts: &Facts, r: &Request) -> Result<MassPlan> {
        check_sharing(r)?;
        let (rows, heads) = (r.lists(), sharing(r) * r.queries.heads.group());
        let stored = r.queries.index.capacity().min(MOST_TOKENS / r.queries.block_size);
        let chunks = stored.div_ceil(CHUNK_WINDOWS);
        let scoring = (facts.multiprocessors as usize / rows).min(chunks).max(1);
        let warps = r.queries.batch().saturating_mul(r.queries.positions.count()).saturating_mul(r.queries.heads.q);
        let most = i32::MAX as usize;
        if warps > most || rows > most / scoring {
            return Err(Error::unsupported(format!("log_mass: {warps} numbers; CUDA takes up to 2^31 − 1")));
        }
        let mut scratch = cuda::Parts::default();
        let partials = scratch.take(&[rows, heads, chunks, 2 * size_of::<f32>()]);
        let seen = scratch.take(&[rows, size_of::<u32>()]);
        Ok(MassPlan { heads, stored, chunks, scoring, warps, partials, seen, bytes: scratch.bytes })
    }
}

/// Writes the masses of what the lists of the call leave out, once these are there.
pub fn write(
    enqueue: &Enqueue,
    kernels: &MassKernels,
    r: &Request,
    plan: &MassPlan,
    axes: &Axes,
    out: &Tensor,
) -> Result<()> {
    let base = scratch(enqueue, plan.bytes)?;
    let summaries = Summaries::of_axes(r, axes);
    let mut select = SelectParams::new(r);
    select.place.capacity = plan.stored as u32;
    let block = saturated(axes.block_size);
    let means = MeanParams {
        partials: (base + plan.partials) as *mut u8,
        seen: (base + plan.seen) as *mut u8,
        heads: plan.heads as u32,
        chunks: plan.chunks as u32,
        scoring: plan.scoring as u32,
        size: block,
        stride: block,
        ..MeanParams::of(select, &summaries)
    };
    let [mass_seq, mass_pos, mass_head, _] = strides(Some(out), r.queries.positions.dimension().is_some());
    let centre = axes.centre.as_ref();
    let params = MassParams {
        means,
        centre: address(centre),
        centre_head: byte_stride(centre, 0),
        centre_channel: byte_stride(centre, 1),
        log_mass: out.data(),
        mass_seq,
        mass_pos,
        mass_head,
        query_heads: r.queries.heads.q as u32,
        warps: plan.warps as u32,
    };
    let kernel = match (axes.range.is_some(), axes.axes.dtype.bits) {
        (true, _) => &kernels.of_4,
        (false, 16) => &kernels.of_16,
        (false, _) => &kernels.of_32,
    };
    let address = (&raw const params).cast();
    // SAFETY: the parameters are the kernels' struct; the op's caller keeps the tensors valid until the stream has passed, and
    // scratch is this call's. The kernels wait before they touch anything.
    unsafe {
        enqueue.launch(kernel, grid(enqueue, r.lists() * plan.scoring), [address])?;
        enqueue.launch(&kernels.join, grid(enqueue, plan.warps.div_ceil(WARPS)), [address])
    }
}
