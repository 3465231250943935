//! Launch of the kernels of kernels/topk.

use super::Request;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::index;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};

pub struct Kernels {
    ascending: ByWidth,
    best_first: ByWidth,
    /// Clusters of 2, 4 and 8 CTAs that run at once.
    clusters: [usize; 3],
    /// Chunks of keys for which shared memory has room.
    chunks: usize,
}

/// A kernel for each width of a score.
struct ByWidth {
    b16: Kernel,
    b32: Kernel,
}

impl ByWidth {
    fn find(modules: &Modules, [b16, b32]: [&'static str; 2], bytes: usize) -> Result<ByWidth> {
        let kernel = |name| {
            let kernel = modules.kernel("topk/topk", name)?;
            kernel.allow_shared(bytes as u32)?;
            Ok(kernel)
        };
        Ok(ByWidth { b16: kernel(b16)?, b32: kernel(b32)? })
    }
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("topk/topk", compute_80, compute_90)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let facts = modules.facts();
        let chunks = ((facts.shared_bytes as usize - STATIC_BYTES) / CHUNK_BYTES).min(MOST_CHUNKS);
        let bytes = chunks * CHUNK_BYTES;
        let ascending = ByWidth::find(modules, ["topk_ascending_16", "topk_ascending_32"], bytes)?;
        let best_first = ByWidth::find(modules, ["topk_best_first_16", "topk_best_first_32"], bytes)?;
        let active = |size: u32| match facts.launches_dependents() {
            true => ascending.b32.active_clusters(size, THREADS) as usize,
            false => 0,
        };
        let clusters = [2, 4, LARGEST_CLUSTER].map(active);
        Ok(Kernels { ascending, best_first, clusters, chunks })
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
        cap: u32,
        dtype: u32,
        adjacent: u32,
        chunks: u32,
    }
}

/// THREADS and MOST_SORTED of kernels/topk/topk.cu, and how many keys a thread has in registers.
const THREADS: u32 = 1024;
const MOST_SORTED: usize = 4096;
const THREAD_KEYS: usize = 16;
/// Keys of a CTA, in its registers or a chunk of shared memory.
const CHUNK: usize = THREADS as usize * THREAD_KEYS;
const CHUNK_BYTES: usize = CHUNK * size_of::<u32>();
/// More would not fit in the largest shared memory beside what the kernels declare.
const MOST_CHUNKS: usize = 3;
const STATIC_BYTES: usize = 33 << 10;

/// CTAs of a row: enough to have it in registers, as long as all rows run at once.
fn cluster(kernels: &Kernels, rows: usize, n: usize) -> usize {
    let mut ctas = 1;
    for active in kernels.clusters {
        if n <= ctas * CHUNK || rows > active {
            break;
        }
        ctas *= 2;
    }
    ctas
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
    if rows > i32::MAX as usize / LARGEST_CLUSTER as usize {
        return Err(Error::unsupported(format!("scores: {rows} rows; CUDA takes up to 2^28 − 1")));
    }
    if r.best_first && r.most() > MOST_SORTED {
        let text = format!("VWD_TOPK_BEST_FIRST of {}; CUDA puts up to {MOST_SORTED} in order", r.most());
        return Err(Error::unsupported(text));
    }
    let (n, kernels): (_, &Kernels) = (r.scores.dim(1), enqueue.kernels());
    let ctas = cluster(kernels, rows, n);
    let chunks = if n <= ctas * CHUNK { 0 } else { n.div_ceil(ctas * CHUNK).min(kernels.chunks) };
    let (lens, budgets, values) = (r.lens.as_ref(), r.budgets.as_ref(), r.values.as_ref());
    let params = TopKParams {
        scores: r.scores.data(),
        lens: index::address(lens),
        budgets: index::address(budgets),
        ids: r.ids.data(),
        counts: r.counts.data(),
        values: index::address(values),
        scores_row: r.scores.byte_stride(0),
        scores_entry: r.scores.byte_stride(1),
        lens_row: index::step(lens, 0),
        budgets_row: index::step(budgets, 0),
        ids_row: r.ids.byte_stride(0),
        ids_entry: r.ids.byte_stride(1),
        counts_row: r.counts.byte_stride(0),
        values_row: index::step(values, 0),
        values_entry: index::step(values, 1),
        n: n as u32,
        k: r.k as u32,
        cap: index::saturated(r.cap()),
        dtype: index::element_type(r.scores.dtype),
        adjacent: has_adjacent_fours(&r.scores) as u32,
        chunks: chunks as u32,
    };
    let order = if r.best_first { &kernels.best_first } else { &kernels.ascending };
    let kernel = if r.scores.dtype.bits == 16 { &order.b16 } else { &order.b32 };
    let kind = match ctas {
        1 => index::kind(enqueue),
        ctas => Kind::DependentClusters(ctas as u32),
    };
    let grid = Grid { ctas: (rows * ctas) as u32, threads: THREADS, kind };
    // SAFETY: TopKParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything.
    unsafe { enqueue.launch(&kernel.sharing((chunks * CHUNK_BYTES) as u32), grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("topk", file!(), &[TopKParams::layout("TopKParams")]);
    }
}
