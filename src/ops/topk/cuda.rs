//! Launch of the kernels of kernels/topk.

use super::Request;
use super::choose::{
    self, CHUNK, CHUNK_BYTES, MOST_CHUNKS, MOST_SORTED, PREFILTER_THREADS, Room, SHORT_THREADS, STATIC_BYTES, Shape,
    THREAD_KEYS, THREADS, Variant, item_bytes, scratch,
};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{address, byte_stride, element_code, saturated};
use crate::runtime::cuda::{self, Enqueue, Facts, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};

pub struct Kernels {
    ascending: Order,
    best_first: Order,
    prefilter: ByWidth,
    clusters: Clusters,
    room: Room,
}

/// The kernels for one order of results.
struct Order {
    short: ByWidth,
    long: ByWidth,
}

/// A kernel for each width of a score.
struct ByWidth {
    b16: Kernel,
    b32: Kernel,
}

impl ByWidth {
    fn of(&self, dtype: DType) -> &Kernel {
        if dtype.bits == 16 { &self.b16 } else { &self.b32 }
    }
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] =
        &[source!("topk/topk", compute_80, compute_90), source!("topk/prefilter", compute_80, compute_90)];

    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let facts = modules.facts();
        let bytes = facts.shared_bytes as usize - STATIC_BYTES;
        let selecting = |[b16, b32]: [&'static str; 2]| {
            let kernel = |name| {
                let kernel = modules.kernel("topk/topk", name)?;
                kernel.allow_shared(bytes as u32)?;
                Ok(kernel)
            };
            Ok(ByWidth { b16: kernel(b16)?, b32: kernel(b32)? })
        };
        let ascending = Order {
            short: selecting(["topk_short_ascending_16", "topk_short_ascending_32"])?,
            long: selecting(["topk_long_ascending_16", "topk_long_ascending_32"])?,
        };
        let best_first = Order {
            short: selecting(["topk_short_best_first_16", "topk_short_best_first_32"])?,
            long: selecting(["topk_long_best_first_16", "topk_long_best_first_32"])?,
        };
        let prefilter = |name| modules.kernel("topk/prefilter", name);
        let prefilter = ByWidth { b16: prefilter("topk_prefilter_16")?, b32: prefilter("topk_prefilter_32")? };
        let clusters = Clusters::new(&ascending.long.b32, facts, THREADS);
        let room = Room { multiprocessors: facts.multiprocessors as usize, bytes };
        Ok(Kernels { ascending, best_first, prefilter, clusters, room })
    }
}

kernel_struct! {
    /// Mirrors TopKParams of kernels/topk/params.cuh. Strides are in bytes.
    struct TopKParams {
        scores: *const u8,
        lens: *const u8,
        budgets: *const u8,
        ids: *mut u8,
        counts: *mut u8,
        values: *mut u8,
        kept_entries: *mut u8,
        kept_counts: *mut u8,
        scores_row: i64,
        scores_entry: i64,
        lens_row: i64,
        budgets_row: i64,
        ids_row: i64,
        ids_entry: i64,
        counts_row: i64,
        values_row: i64,
        values_entry: i64,
        n: u32,
        k: u32,
        capacity: u32,
        dtype: u32,
        adjacent: u32,
        chunks: u32,
        slices: u32,
        one_cta: u32,
    }
}

/// Clusters of 2, 4 and 8 CTAs, of a kernel that selects by ClusterTopK, that run at once.
pub struct Clusters {
    active: [usize; 3],
    /// Keys that the registers of a CTA hold.
    keys: usize,
}

impl Clusters {
    pub fn new(kernel: &Kernel, facts: &Facts, threads: u32) -> Clusters {
        let active = |size: u32| match facts.launches_dependents() {
            true => kernel.active_clusters(size, threads) as usize,
            false => 0,
        };
        Clusters { active: [2, 4, LARGEST_CLUSTER].map(active), keys: threads as usize * THREAD_KEYS }
    }

    /// CTAs of a row: enough to have it in registers, as long as all rows run at once.
    pub fn ctas(&self, rows: usize, n: usize) -> usize {
        let mut ctas = 1;
        for active in self.active {
            if n <= ctas * self.keys || rows > active {
                break;
            }
            ctas *= 2;
        }
        ctas
    }
}

/// Whether four neighbouring scores of any row can be loaded together.
fn has_adjacent_fours(t: &Tensor) -> bool {
    let bytes = 4 * t.dtype.bytes() as i64;
    t.stride(1) == 1 && (t.dim(0) == 1 || t.byte_stride(0) % bytes == 0) && t.data() as i64 % bytes == 0
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let rows = r.rows();
    if rows == 0 {
        return Ok(());
    }
    check_limits(r)?;
    let kernels: &Kernels = enqueue.kernels();
    let plan = plan(enqueue, kernels, r)?;
    let params = params(r, &plan);
    let (dtype, params) = (r.scores.dtype, [(&raw const params).cast()]);
    if plan.slices > 0 {
        let ctas = (rows * plan.slices) as u32;
        let grid = Grid { ctas, threads: PREFILTER_THREADS, kind: enqueue.dependent_kind() };
        // SAFETY: as below; scratch is this call's.
        unsafe { enqueue.launch(kernels.prefilter.of(dtype), grid, params)? };
    }
    let order = if r.best_first { &kernels.best_first } else { &kernels.ascending };
    let is_short = plan.variant == Variant::Short;
    let (kernel, threads) = if is_short { (&order.short, SHORT_THREADS) } else { (&order.long, THREADS) };
    let kind = match plan.ctas {
        1 => enqueue.dependent_kind(),
        ctas => Kind::DependentClusters(ctas as u32),
    };
    let grid = Grid { ctas: (rows * plan.ctas) as u32, threads, kind };
    // SAFETY: TopKParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything.
    unsafe { enqueue.launch(&kernel.of(dtype).sharing(plan.shared_bytes as u32), grid, params)? };
    enqueue.ran(plan.variant);
    Ok(())
}

fn check_limits(r: &Request) -> Result<()> {
    let rows = r.rows();
    if rows > i32::MAX as usize / LARGEST_CLUSTER as usize {
        return Err(Error::unsupported(format!("scores: {rows} rows; CUDA takes up to 2^28 − 1")));
    }
    if r.best_first && r.most() > MOST_SORTED {
        let text = format!("VWD_TOPK_BEST_FIRST of {}; CUDA puts up to {MOST_SORTED} in order", r.most());
        return Err(Error::unsupported(text));
    }
    Ok(())
}

/// How a call is cut among CTAs.
struct Plan {
    variant: Variant,
    /// CTAs of a row that prefilter it in a first launch; 0: there is none.
    slices: usize,
    /// Scratch for the entries that a prefilter keeps, and for their counts; null without one.
    kept_entries: *mut u8,
    kept_counts: *mut u8,
    /// CTAs of a row in the launch that selects.
    ctas: usize,
    /// Chunks of keys for which a CTA's shared memory has room.
    chunks: usize,
    /// Whether one CTA selects where its registers hold the row, or what the prefilter kept.
    one_cta: bool,
    shared_bytes: usize,
}

fn plan(enqueue: &Enqueue, kernels: &Kernels, r: &Request) -> Result<Plan> {
    let (rows, n, most) = (r.rows(), r.scores.dim(1), r.most());
    let shape = Shape { rows, n, most, best_first: r.best_first };
    let forced = enqueue.forced();
    let mut variant = variants::choose(forced, |variant| choose::fit(variant, &shape, kernels.room))?;
    let mut slices = match variant {
        Variant::Prefilter => choose::slices(kernels.room, rows, n, most, r.best_first),
        _ => 0,
    };
    let (parts, kept_counts_at) = scratch(rows, slices);
    let (mut kept_entries, mut kept_counts) = (std::ptr::null_mut(), std::ptr::null_mut());
    if slices > 0 {
        // Without it, as where a graph is captured on a stream that has none, a cluster takes the row.
        match enqueue.scratch(parts.bytes) {
            Ok(base) => (kept_entries, kept_counts) = (base as *mut u8, (base + kept_counts_at as u64) as *mut u8),
            Err(error) if forced.is_some() => return Err(error),
            Err(_) => (slices, variant) = (0, Variant::Cluster),
        }
    }
    let ctas = if variant == Variant::Short { 1 } else { kernels.clusters.ctas(rows, n) };
    let most_chunks = (kernels.room.bytes / CHUNK_BYTES).min(MOST_CHUNKS);
    let chunks = if n <= ctas * CHUNK { 0 } else { n.div_ceil(ctas * CHUNK).min(most_chunks) };
    let one_cta_bytes = item_bytes(most, r.best_first) + if slices > 0 { CHUNK_BYTES } else { 0 };
    let one_cta = one_cta_bytes <= kernels.room.bytes;
    let shared_bytes = (chunks * CHUNK_BYTES).max(if one_cta || r.best_first { one_cta_bytes } else { 0 });
    Ok(Plan { variant, slices, kept_entries, kept_counts, ctas, chunks, one_cta, shared_bytes })
}

fn params(r: &Request, plan: &Plan) -> TopKParams {
    let (lens, budgets, values) = (r.lens.as_ref(), r.budgets.as_ref(), r.values.as_ref());
    TopKParams {
        scores: r.scores.data(),
        lens: address(lens),
        budgets: address(budgets),
        ids: r.ids.data(),
        counts: r.counts.data(),
        values: address(values),
        kept_entries: plan.kept_entries,
        kept_counts: plan.kept_counts,
        scores_row: r.scores.byte_stride(0),
        scores_entry: r.scores.byte_stride(1),
        lens_row: byte_stride(lens, 0),
        budgets_row: byte_stride(budgets, 0),
        ids_row: r.ids.byte_stride(0),
        ids_entry: r.ids.byte_stride(1),
        counts_row: r.counts.byte_stride(0),
        values_row: byte_stride(values, 0),
        values_entry: byte_stride(values, 1),
        n: r.scores.dim(1) as u32,
        k: r.k as u32,
        capacity: saturated(r.cap()),
        dtype: element_code(r.scores.dtype),
        adjacent: has_adjacent_fours(&r.scores) as u32,
        chunks: plan.chunks as u32,
        slices: plan.slices as u32,
        one_cta: plan.one_cta as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("topk", file!(), &[choose::kernel_constants(), TopKParams::layout("TopKParams")]);
    }
}
