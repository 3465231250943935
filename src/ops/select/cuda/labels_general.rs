//! Launch of the kernels of kernels/select/labels_general.cuh: LABEL_MASS and selection of tokens.

use super::params::{ListParams, MOST_HEADS, MOST_TOKENS, SelectParams, THREADS, check_sharing, grid, sharing};
use super::rows::{most_scores, score_bytes};
use crate::core::status::{Error, Result};
use crate::ops::index::Labels;
use crate::ops::select::Request;
use crate::ops::views::BlockList;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{Summary, has_aligned_rows, saturated};
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Parts};

pub struct LabelKernels {
    blocks: Kernel,
    tokens: Kernel,
    /// Clusters of 2, 4 and 8 CTAs that run at once.
    clusters: [usize; 3],
    /// Scores of blocks for which a CTA has room.
    room: usize,
}

impl LabelKernels {
    pub fn find(modules: &Modules) -> Result<LabelKernels> {
        let kernel = |name| modules.kernel("select/labels_general", name);
        let (blocks, tokens) = (kernel("select_labels_general_blocks")?, kernel("select_labels_general_tokens")?);
        let room = most_scores(modules.facts(), DECLARED);
        blocks.allow_shared(score_bytes(room))?;
        let active = |size: u32| match modules.facts().launches_dependents() {
            true => tokens.active_clusters(size, THREADS) as usize,
            false => 0,
        };
        Ok(LabelKernels { blocks, tokens, clusters: [2, 4, LARGEST_CLUSTER].map(active), room })
    }

    /// CTAs of a list: enough for its tokens, as long as all lists are made at once.
    fn cluster(&self, lists: usize, places: usize) -> usize {
        let mut ctas = 1;
        for active in self.clusters {
            if places <= ctas * CTA_TOKENS || lists > active {
                break;
            }
            ctas *= 2;
        }
        ctas
    }
}

kernel_struct! {
    /// Mirrors LabelParams of kernels/select/params.cuh. Strides are in bytes.
    #[derive(Clone, Copy)]
    pub struct LabelParams {
        select: SelectParams,
        codes: Summary,
        scales: Summary,
        minima: Summary,
        candidates: ListParams,
        channels: *const u8,
        channels_head: i64,
        channels_channel: i64,
        products: *mut u8,
        partials: *mut u8,
        seen: *mut u8,
        blocks: *mut u8,
        candidates_capacity: u32,
        candidate_tokens: u32,
        chunks: u32,
        heads: u32,
        kept: u32,
        adjacent: u32,
        shared_scores: u32,
    }
}

impl LabelParams {
    /// Without scratch.
    pub fn new(select: SelectParams, r: &Request, labels: &Labels) -> LabelParams {
        let none = std::ptr::null_mut();
        LabelParams {
            select,
            codes: Summary::new(Some(&labels.codes)),
            scales: Summary::new(Some(&labels.scale)),
            minima: Summary::new(Some(&labels.min)),
            candidates: ListParams::new(given(r)),
            channels: labels.channels.data(),
            channels_head: labels.channels.byte_stride(0),
            channels_channel: labels.channels.byte_stride(1),
            products: none,
            partials: none,
            seen: none,
            blocks: none,
            candidates_capacity: saturated(given(r).cap()),
            candidate_tokens: 0,
            chunks: 0,
            heads: 0,
            kept: labels.kept() as u32,
            adjacent: 0,
            shared_scores: 0,
        }
    }
}

/// Shared memory that the kernels declare, or more.
const DECLARED: usize = 43 << 10;
/// TOKEN_CHUNK of kernels/select/labels_general.cuh: tokens of a warp.
const CHUNK: usize = 64;
/// Tokens that are worth a CTA.
const CTA_TOKENS: usize = CHUNK * THREADS as usize / 32;
/// SHARED_CANDIDATES of kernels/select/labels_general.cuh: candidates that fit in shared memory.
const SHARED_CANDIDATES: usize = 2048;

/// The split of a call's work, and where its parts of scratch begin.
pub struct LabelPlan {
    of_blocks: bool,
    heads: usize,
    /// Candidate tokens of a list that the index has room for.
    places: usize,
    chunks: usize,
    /// Scores, of blocks or of tokens.
    kept_scores: usize,
    scored_blocks: usize,
    products: usize,
    partials: usize,
    seen: usize,
    /// Candidates, where they do not fit in shared memory.
    blocks: Option<usize>,
    pub bytes: usize,
}

impl LabelPlan {
    /// The plan of a call that selects blocks, or tokens.
    pub fn new(r: &Request, of_blocks: bool) -> Result<LabelPlan> {
        check_sharing(r)?;
        let (lists, heads) = (r.lists(), sharing(r) * r.queries.heads.group());
        if heads > MOST_HEADS {
            let text = format!("q: {heads} query heads for a list; CUDA takes up to {MOST_HEADS}");
            return Err(Error::unsupported(text));
        }
        let most_ctas = LARGEST_CLUSTER as usize;
        if lists > i32::MAX as usize / most_ctas {
            return Err(Error::unsupported(format!("selected: {lists} lists; CUDA takes up to 2^28 − 1")));
        }
        let (cap, places) = (given(r).cap(), places(r));
        let chunks = places.div_ceil(CHUNK);
        let mut scratch = Parts::default();
        let scored_blocks = if of_blocks { cap } else { places };
        let kept_scores = scratch.take(&[lists, scored_blocks, size_of::<f32>()]);
        let products = scratch.take(&[lists, heads, places, size_of::<f32>()]);
        let partials = scratch.take(&[lists, heads, chunks, 2 * size_of::<f32>()]);
        let seen = scratch.take(&[lists, most_ctas, size_of::<u32>()]);
        let blocks = (cap > SHARED_CANDIDATES).then(|| scratch.take(&[lists, most_ctas, cap, size_of::<i32>()]));
        Ok(LabelPlan {
            of_blocks,
            heads,
            places,
            chunks,
            kept_scores,
            scored_blocks,
            products,
            partials,
            seen,
            blocks,
            bytes: scratch.bytes,
        })
    }
}

/// Candidate tokens of a list that the index has room for.
pub fn places(r: &Request) -> usize {
    given(r).cap().saturating_mul(r.queries.block_size).min(r.queries.index.capacity()).min(MOST_TOKENS)
}

/// The candidates.
pub fn given<'r, 'a>(r: &'r Request<'a>) -> &'r BlockList<'a> {
    r.candidates.as_ref().expect("an index of labels has candidates")
}

pub fn select(enqueue: &Enqueue, kernels: &LabelKernels, r: &Request, labels: &Labels, plan: &LabelPlan) -> Result<()> {
    let (lists, of_blocks) = (r.lists(), plan.of_blocks);
    let base = enqueue.scratch(plan.bytes)? as usize;
    let at = |part: usize| (base + part) as *mut u8;
    let ctas = kernels.cluster(lists, plan.places);
    let room = if of_blocks && plan.scored_blocks <= kernels.room { plan.scored_blocks } else { 0 };
    let mut select = SelectParams::new(r);
    (select.slices, select.by_slices) = (ctas as u32, Divisor::new(ctas as u32));
    (select.scratch_scores, select.scored_blocks) = (at(plan.kept_scores), saturated(plan.scored_blocks));
    let params = LabelParams {
        products: at(plan.products),
        partials: at(plan.partials),
        seen: at(plan.seen),
        blocks: plan.blocks.map_or(std::ptr::null_mut(), at),
        candidate_tokens: plan.places as u32,
        chunks: plan.chunks as u32,
        heads: plan.heads as u32,
        adjacent: (labels.kept().is_multiple_of(32) && has_aligned_rows(&labels.codes, 16)) as u32,
        shared_scores: room as u32,
        ..LabelParams::new(select, r, labels)
    };
    let all = match ctas {
        1 => grid(enqueue, lists),
        _ => Grid { kind: Kind::DependentClusters(ctas as u32), ..grid(enqueue, lists * ctas) },
    };
    let kernel = if of_blocks { &kernels.blocks } else { &kernels.tokens };
    // SAFETY: LabelParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed, and
    // scratch is this call's. The kernels wait before they touch anything.
    unsafe { enqueue.launch(&kernel.sharing(score_bytes(room)), all, [(&raw const params).cast()]) }
}
