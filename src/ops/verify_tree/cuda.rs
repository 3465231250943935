//! Launches of the kernels of kernels/verify_tree/.

use super::choose::{self, Variant};
use super::{Choice, Request, Target};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::draw::SEGMENT;
use crate::ops::draw::device::{Cut, Last, Launched, Leaves, SamplingParams, Segments, THREADS, reads_weights};
use crate::ops::draw::request::Sampling;
use crate::ops::tree::MOST_NODES;
use crate::ops::verify::{ByToken, EndParams};
use crate::runtime::cuda::layout::{Divisor, kernel_constants, kernel_struct, log2_ceil};
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{View, element_code, has_aligned_rows};
use crate::runtime::cuda::{self, Cuda, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

pub struct Kernels {
    cta: ByToken,
    /// `cta` with an end, as for `warp`.
    cta_end: ByToken,
    warp: ByToken,
    warp_end: ByToken,
    largest: Kernel,
    segments: Kernel,
    /// Takes weights.
    segments_any: Kernel,
    rows: Kernel,
    walk: Kernel,
    /// Clusters of [`CLUSTERS`] that walk at once; none on devices without clusters.
    walks_at_once: [u32; CLUSTERS.len()],
    /// On devices with clusters.
    path: Option<PathKernel>,
}

/// The kernel that sums the rows of the path alone.
struct PathKernel {
    kernel: Kernel,
    at_once: PathsAtOnce,
}

/// Clusters of [`CLUSTERS`] whose CTAs have n + 1 segments that walk at once.
type PathsAtOnce = [[u32; MOST_CTA_PATH_SEGMENTS]; CLUSTERS.len()];

/// Shared memory for the weights of so many segments of two rows: those of two fit in registers, and more are taken by pairs.
fn path_bytes(segments: usize) -> u32 {
    if segments > 2 { (segments.next_multiple_of(2) * 2 * SEGMENT * size_of::<f32>()) as u32 } else { 0 }
}

impl PathKernel {
    /// The context is current.
    fn new(kernel: Kernel) -> Result<PathKernel> {
        kernel.allow_shared(path_bytes(MOST_CTA_PATH_SEGMENTS))?;
        kernel.allow_large_clusters()?;
        let at_once =
            |ctas: usize, segments| kernel.sharing(path_bytes(segments)).active_clusters(ctas as u32, PATH_THREADS);
        Ok(PathKernel { kernel, at_once: CLUSTERS.map(|ctas| std::array::from_fn(|n| at_once(ctas, n + 1))) })
    }
}

/// CTAs that walk a request's tree by [`PathKernel`], and segments of each of them: as many as let all requests walk at once, and otherwise as few as have
/// room for all segments. None is without a segment. `None` where clusters have no room for so many segments, or trees that cannot walk at once have few
/// nodes in all.
fn path_cut(at_once: &PathsAtOnce, requests: usize, nodes: usize, segments: usize) -> Option<(usize, usize)> {
    if segments == 1 {
        return Some((1, 1));
    }
    if segments > MOST_PATH_SEGMENTS {
        return None;
    }
    let mut cuts = CLUSTERS.iter().zip(at_once).filter_map(|(&ctas, at_once)| {
        let each = segments.div_ceil(ctas);
        let n = *at_once.get(each - 1)?;
        (n > 0 && ctas <= segments).then_some((ctas, each, n as usize))
    });
    let all_at_once = cuts.clone().find(|&(_, _, n)| requests <= n);
    let takes_turns = requests * nodes >= LEAST_PATH_ROWS;
    all_at_once.or(cuts.next_back().filter(|_| takes_turns)).map(|(ctas, each, _)| (ctas, each))
}

/// Nodes of all requests from which on rows of several segments are summed on the path alone though not all trees walk at once.
const LEAST_PATH_ROWS: usize = 64;
/// CTAs of a cluster that walks a tree.
const CLUSTERS: [usize; 4] = [MOST_PATH_CTAS, 8, 4, 2];

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("verify_tree/verify_tree", compute_80, compute_90),
        source!("verify_tree/sampled", compute_80, compute_90),
        source!("verify_tree/path", compute_90),
    ];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let greedy = |names| ByToken::find(modules, "verify_tree/verify_tree", names);
        let sampled = |name| modules.kernel("verify_tree/sampled", name);
        let walk = sampled("verify_tree_walk")?;
        let mut walks_at_once = [0; CLUSTERS.len()];
        if modules.facts().launches_dependents() {
            walk.allow_large_clusters()?;
            walks_at_once = CLUSTERS.map(|ctas| walk.active_clusters(ctas as u32, THREADS));
        }
        let path = match modules.has("verify_tree/path") {
            true => Some(PathKernel::new(modules.kernel("verify_tree/path", "verify_tree_path")?)?),
            false => None,
        };
        Ok(Kernels {
            cta: greedy(["verify_tree_i32", "verify_tree_i64"])?,
            cta_end: greedy(["verify_tree_end_i32", "verify_tree_end_i64"])?,
            warp: greedy(["verify_tree_warp_i32", "verify_tree_warp_i64"])?,
            warp_end: greedy(["verify_tree_warp_end_i32", "verify_tree_warp_end_i64"])?,
            largest: modules.kernel("verify_tree/verify_tree", "verify_tree_largest")?,
            segments: sampled("verify_tree_segments")?,
            segments_any: sampled("verify_tree_segments_any")?,
            rows: sampled("verify_tree_rows")?,
            walk,
            walks_at_once,
            path,
        })
    }
}

impl Kernels {
    /// CTAs that walk a request's tree: as many as let all requests walk at once, and otherwise eight. None is without a segment.
    fn walk_ctas(&self, cut: &Cut) -> usize {
        const WITHOUT_ROOM: usize = 8;
        let useful = || CLUSTERS.iter().zip(self.walks_at_once).filter(|&(&ctas, n)| n > 0 && ctas <= cut.per_row());
        let (ctas, _) =
            useful().find(|&(&ctas, n)| ctas <= WITHOUT_ROOM || cut.requests() <= n as usize).unwrap_or((&1, 0));
        *ctas
    }
}

kernel_struct! {
    /// Mirrors VerifyTreeParams of kernels/verify_tree/params.cuh.
    struct Params {
        tokens: View<2>,
        parents: View<2>,
        target: View<2>,
        node_counts: View<1>,
        accepted: View<1>,
        path: View<2>,
        next_token: View<1>,
        committed: View<2>,
        status: View<1>,
        nodes: u32,
        places: u32,
        largest: *mut u64,
        slices: u32,
        log_slices: u32,
    }
}

kernel_struct! {
    /// Mirrors LargestParams of kernels/verify_tree/params.cuh.
    struct LargestParams {
        logits: View<3>,
        parents: View<2>,
        node_counts: View<1>,
        largest: *mut u64,
        nodes: Divisor,
        slices: Divisor,
        tokens: u32,
        slice: u32,
        dtype: u32,
        is_adjacent: u32,
        end: EndParams,
    }
}

kernel_struct! {
    /// Mirrors SampledTreeParams of kernels/verify_tree/params.cuh.
    struct SampledTreeParams {
        sampling: SamplingParams,
        tokens: View<2>,
        parents: View<2>,
        node_counts: View<1>,
        accepted: View<1>,
        path: View<2>,
        next_token: View<1>,
        committed: View<2>,
        status: View<1>,
        nodes: u32,
        places: u32,
        rule: u32,
        token_bytes: u32,
        end: EndParams,
        has_end: u32,
        unused: u32,
    }
}

kernel_constants! {
    const NODES: usize = MOST_NODES => "MOST_NODES";
    /// Segments of a row whose rows are summed on the path alone, of those the ones that a CTA has, such CTAs, and their threads.
    const MOST_PATH_SEGMENTS: usize = 64;
    const MOST_CTA_PATH_SEGMENTS: usize = 4;
    const MOST_PATH_CTAS: usize = 16;
    const PATH_THREADS: u32 = 512;
}

const MOST_THREADS: usize = 256;

/// Whether there is something to do.
fn has_work(r: &Request) -> Result<bool> {
    if r.batch() > i32::MAX as usize {
        return Err(Error::unsupported(format!("{} sequences; CUDA takes up to 2^31 − 1", r.batch())));
    }
    Ok(r.batch() > 0)
}

/// Bytes of scratch that `run` takes from its stream's arena.
pub fn scratch(cuda: &Cuda, r: &Request) -> Result<usize> {
    if !has_work(r)? {
        return Ok(0);
    }
    match &r.target {
        Target::Tokens(_) => Ok(0),
        Target::Logits(logits) => Ok(Slices::of(cuda.facts().multiprocessors, r, logits)?.bytes()),
        Target::Sampled(logits, _, sampling) => Ok(cut(r, logits, sampling)?.map_or(0, |cut| cut.scratch())),
    }
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if !has_work(r)? {
        return Ok(());
    }
    debug_assert!(r.nodes() <= NODES);
    if let Target::Sampled(logits, choice, sampling) = &r.target {
        return sample(enqueue, r, logits, *choice, sampling);
    }
    let has_logits = matches!(r.target, Target::Logits(_));
    let variant = variants::choose(enqueue.forced(), |variant| choose::fit(variant, r.nodes(), has_logits))?;
    enqueue.ran(variant);
    let (target, largest, slices) = match &r.target {
        Target::Logits(logits) => {
            let (largest, slices) = find_largest(enqueue, r, logits)?;
            (View::ABSENT, largest, slices)
        }
        tokens => (View::new(tokens.tensor(), [0, 1]), std::ptr::null_mut(), 1),
    };
    let params = Params {
        tokens: View::new(&r.tokens, [0, 1]),
        parents: View::new(&r.parents, [0, 1]),
        target,
        node_counts: View::optional(&r.node_counts, |t| View::new(t, [0])),
        accepted: View::new(&r.accepted, [0]),
        path: View::new(&r.path, [0, 1]),
        next_token: View::new(&r.next_token, [0]),
        committed: View::optional(&r.committed, |t| View::new(t, [0, 1])),
        status: View::optional(&r.status, |t| View::new(t, [0])),
        nodes: r.nodes() as u32,
        places: r.places() as u32,
        largest,
        slices,
        log_slices: log2_ceil(slices),
    };
    let kernels: &Kernels = enqueue.kernels();
    let (kernel, with_end, threads) = match variant {
        Variant::Warp => (&kernels.warp, &kernels.warp_end, 32),
        Variant::Cta if has_logits => (&kernels.cta, &kernels.cta_end, MOST_THREADS),
        Variant::Cta => (&kernels.cta, &kernels.cta_end, r.nodes().next_multiple_of(32).min(MOST_THREADS)),
    };
    let grid = Grid { ctas: r.batch() as u32, threads: threads as u32, kind: enqueue.dependent_kind() };
    // SAFETY: Params is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The kernels wait before they
    // touch anything.
    unsafe {
        let Some(end) = &r.end else {
            return enqueue.launch(kernel.of(r.tokens.dtype), grid, [(&raw const params).cast()]);
        };
        let end = EndParams::new(Some(end));
        enqueue.launch(with_end.of(r.tokens.dtype), grid, [(&raw const params).cast(), (&raw const end).cast()])
    }
}

fn cut(r: &Request, logits: &Tensor, sampling: &Sampling) -> Result<Option<Cut>> {
    let per_request = r.nodes() * if sampling.draft_rows.is_some() { 2 } else { 1 };
    Cut::of("logits", r.batch(), per_request, logits.dim(2).max(sampling.draft_tokens()), sampling, Leaves::default())
}

/// Whether rows may be of more than logits without filters: of weights, of rows that tokens are forbidden in, or of a draft with a map.
fn takes_any(r: &Request, cut: &Cut, s: &Sampling) -> bool {
    let forbids = r.end.as_ref().is_some_and(|end| end.stop.is_some() && end.min_remaining.is_some());
    reads_weights(s) || cut.has_filters() || s.draft_map.is_some() || forbids
}

fn sample(enqueue: &Enqueue, r: &Request, logits: &Tensor, choice: Choice, sampling: &Sampling) -> Result<()> {
    let Some(cut) = cut(r, logits, sampling)? else { return Ok(()) };
    let mut params = SampledTreeParams {
        sampling: cut.params(enqueue, sampling, logits, View::new(logits, [0, 1, 2]), 1)?,
        tokens: View::new(&r.tokens, [0, 1]),
        parents: View::new(&r.parents, [0, 1]),
        node_counts: View::optional(&r.node_counts, |t| View::new(t, [0])),
        accepted: View::new(&r.accepted, [0]),
        path: View::new(&r.path, [0, 1]),
        next_token: View::new(&r.next_token, [0]),
        committed: View::optional(&r.committed, |t| View::new(t, [0, 1])),
        status: View::optional(&r.status, |t| View::new(t, [0])),
        nodes: r.nodes() as u32,
        places: r.places() as u32,
        rule: match choice {
            Choice::Coupled => 0,
            Choice::Independent => 1,
            Choice::Distinct => 2,
        },
        token_bytes: r.tokens.dtype.bytes() as u32,
        end: EndParams::new(r.end.as_ref()),
        has_end: r.end.is_some() as u32,
        unused: 0,
    };
    let kernels: &Kernels = enqueue.kernels();
    if choice != Choice::Coupled && !takes_any(r, &cut, sampling) {
        let cut = |path: &PathKernel| path_cut(&path.at_once, r.batch(), r.nodes(), cut.per_row());
        let cuts = kernels.path.as_ref().and_then(|path| Some((path, cut(path)?)));
        if let Some((path, (ctas, segments))) = cuts {
            let kernel = path.kernel.sharing(path_bytes(segments));
            let kind = if ctas > 1 { Kind::DependentClusters(ctas as u32) } else { enqueue.dependent_kind() };
            let grid = Grid { ctas: (r.batch() * ctas) as u32, threads: PATH_THREADS, kind };
            // SAFETY: as below.
            return unsafe { enqueue.launch(&kernel, grid, [(&raw const params).cast()]) };
        }
    }
    let ctas = kernels.walk_ctas(&cut);
    let walk = Last { kernel: &kernels.walk, ctas, is_cluster: ctas > 1 };
    let last = (choice != Choice::Coupled).then_some(walk);
    let segments = if reads_weights(sampling) { &kernels.segments_any } else { &kernels.segments };
    let launched = Launched { segments: Segments::Loaded(segments), rows: Some(&kernels.rows), last };
    // SAFETY: SampledTreeParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The
    // kernels wait before they touch anything.
    unsafe { cut.launch(enqueue, launched, &mut params, |params| &mut params.sampling) }
}

/// Tokens of a slice at least, and slices of a row at most.
const LEAST_SLICE: usize = 2048;
const MOST_SLICES: usize = 32;
/// The kernel's threads, and how many CTAs of them keep a multiprocessor busy.
const LARGEST_THREADS: u32 = 256;
const CTAS_OF_A_MULTIPROCESSOR: usize = 4;

/// How the search for the largest logits is cut.
struct Slices {
    of_row: usize,
    of_all: usize,
}

impl Slices {
    /// So many that a device of these multiprocessors is busy.
    fn of(multiprocessors: u32, r: &Request, logits: &Tensor) -> Result<Slices> {
        let rows = r.batch().saturating_mul(r.nodes());
        let wanted = (CTAS_OF_A_MULTIPROCESSOR * multiprocessors as usize).div_ceil(rows);
        let of_row = wanted.min(logits.dim(2).div_ceil(LEAST_SLICE)).clamp(1, MOST_SLICES);
        let of_all = rows.saturating_mul(of_row);
        if of_all > i32::MAX as usize {
            return Err(Error::unsupported(format!("{rows} nodes; CUDA takes up to 2^31 − 1")));
        }
        Ok(Slices { of_row, of_all })
    }

    /// Bytes of what is found: 8 a slice.
    fn bytes(&self) -> usize {
        self.of_all * size_of::<u64>()
    }
}

/// Enqueues the search for the largest logit of each slice of each node's row; where the results will be, and the slices of a row.
fn find_largest(enqueue: &Enqueue, r: &Request, logits: &Tensor) -> Result<(*mut u64, u32)> {
    let (tokens, cut) = (logits.dim(2), Slices::of(enqueue.facts().multiprocessors, r, logits)?);
    let (slices, ctas) = (cut.of_row, cut.of_all);
    let largest = enqueue.scratch(cut.bytes())? as *mut u64;
    // A slice begins on 16 bytes where its row does.
    let slice = tokens.div_ceil(slices).next_multiple_of(8);
    let params = LargestParams {
        logits: View::new(logits, [0, 1, 2]),
        parents: View::new(&r.parents, [0, 1]),
        node_counts: View::optional(&r.node_counts, |t| View::new(t, [0])),
        largest,
        nodes: Divisor::new(r.nodes() as u32),
        slices: Divisor::new(slices as u32),
        tokens: tokens as u32,
        slice: slice as u32,
        dtype: element_code(logits.dtype),
        is_adjacent: has_aligned_rows(logits, 16) as u32,
        end: EndParams::new(r.end.as_ref()),
    };
    let grid = Grid { ctas: ctas as u32, threads: LARGEST_THREADS, kind: enqueue.dependent_kind() };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: LargestParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed. The kernel waits before
    // it touches anything.
    unsafe { enqueue.launch(&kernels.largest, grid, [(&raw const params).cast()])? };
    Ok((largest, slices as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn clusters_take_the_path_alone_where_rows_are_many_and_have_room() {
        // As on an H200.
        let at_once = [[7, 7, 7, 7], [15, 15, 15, 15], [32, 32, 32, 32], [66, 66, 66, 66]];
        let of = |requests, nodes, segments| path_cut(&at_once, requests, nodes, segments);
        assert_eq!([1, 7, 8, 15, 16].map(|n| of(n, 64, 32)), [16, 16, 8, 8, 8].map(|ctas| Some((ctas, 32 / ctas))));
        assert_eq!([of(1, 1, 32), of(15, 1, 32), of(16, 3, 32)], [Some((16, 2)), Some((8, 4)), None]);
        assert_eq!([of(16, 4, 32), of(66, 1, 2), of(67, 0, 2)], [Some((8, 4)), Some((2, 1)), None]);
        assert_eq!([of(1, 1, 1), of(2, 32, 2), of(70, 1, 5)], [Some((1, 1)), Some((2, 1)), Some((2, 3))]);
        assert_eq!([of(1, 64, 64), of(9, 64, 64), of(1, 64, 65)], [Some((16, 4)), Some((16, 4)), None]);
        assert_eq!(path_cut(&[[0; 4]; 4], 1, 64, 32), None);
    }

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            SamplingParams::layout("SamplingParams"),
            Params::layout("VerifyTreeParams"),
            LargestParams::layout("LargestParams"),
            SampledTreeParams::layout("SampledTreeParams"),
            kernel_constants(),
            choose::kernel_constants(),
        ];
        layout::check("verify_tree", file!(), &structs);
    }
}
