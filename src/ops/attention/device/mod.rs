//! What attention and repair have in common on CUDA: the kernels of kernels/attention/, which of them a call takes (`choose`),
//! how the call is split among CTAs (a plan of each variant), and their launch.

mod boxes;
mod choose;
mod chunks;
mod decode128;
mod int4_128;
mod mla16;
mod mla64;
mod mma;
mod params;
mod plan;
mod term;
mod tree;
mod verify128;

pub use choose::{Options, RepairSizes, RepairVariant, Variant, fit_repair};
pub use mma::{WorkItems, work_items};
pub use params::{MAX_INPUTS, MergeParams, Params, RepairParams, StateView};
pub use plan::{
    Element, Entry, Job, Plan, Sizes, THREADS, TILE, TOKEN_INFO_BYTES, WARP_ROWS, WARPS, Width, describe,
    is_copied_by_16, lists, results, type_of_out,
};
pub use term::launch as join_term;
pub use verify128::{
    SHARED as VERIFY128_SHARED, THREADS as VERIFY128_THREADS, describe as describe_verify128,
    split_items as verify128_items,
};

use super::{Problem, Term};
use crate::core::status::{Error, Result};
use crate::runtime::cuda::tensor_map;
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::{self, Enqueue, Facts, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};
use boxes::Boxes;
use choose::Device;
use mla16::Clusters;
use plan::Rows;

/// CTAs of a cluster that repairs in one launch.
const CLUSTER_SIZES: [u32; 4] = [1, 2, 4, LARGEST_CLUSTER];

/// Every kernel that attends: which it is, its source, its name.
#[rustfmt::skip]
const ATTENTION: [(Entry, &str, &str); 77] = {
    use Element::{Bf16, F16, Fp8};
    use Entry::{Decode64, Decode128, Decode128Term, Decode256, General, GeneralTree, Int4_128, Int4General, Int4Mma, Int4Verify128, Int4Verify128Tree, Mla16, Mla64, Mma, Verify64, Verify64Short, Verify64ShortTree, Verify64Tree, Verify256, Verify256Tree, Verify128, Verify128Tree, VerifyShort, VerifyShortTree};
    use Rows::{UpTo4, UpTo8, UpTo16};
    use Width::{W128, W256, W576};
    [
        (Decode128(F16, UpTo4), "attention/decode128_f16", "attention_decode128_f16_4"),
        (Decode128(F16, UpTo8), "attention/decode128_f16", "attention_decode128_f16_8"),
        (Decode128(F16, UpTo16), "attention/decode128_f16", "attention_decode128_f16_16"),
        (Decode128(Bf16, UpTo4), "attention/decode128_bf16", "attention_decode128_bf16_4"),
        (Decode128(Bf16, UpTo8), "attention/decode128_bf16", "attention_decode128_bf16_8"),
        (Decode128(Bf16, UpTo16), "attention/decode128_bf16", "attention_decode128_bf16_16"),
        (Decode128(Fp8, UpTo4), "attention/decode128_fp8", "attention_decode128_fp8_4"),
        (Decode128(Fp8, UpTo8), "attention/decode128_fp8", "attention_decode128_fp8_8"),
        (Decode128(Fp8, UpTo16), "attention/decode128_fp8", "attention_decode128_fp8_16"),
        (Decode64(F16, UpTo4), "attention/decode64", "attention_decode64_f16_4"),
        (Decode64(F16, UpTo8), "attention/decode64", "attention_decode64_f16_8"),
        (Decode64(Bf16, UpTo4), "attention/decode64", "attention_decode64_bf16_4"),
        (Decode64(Bf16, UpTo8), "attention/decode64", "attention_decode64_bf16_8"),
        (Decode64(Fp8, UpTo4), "attention/decode64", "attention_decode64_fp8_4"),
        (Decode64(Fp8, UpTo8), "attention/decode64", "attention_decode64_fp8_8"),
        (Decode256(F16, UpTo4), "attention/decode256", "attention_decode256_f16_4"),
        (Decode256(F16, UpTo8), "attention/decode256", "attention_decode256_f16_8"),
        (Decode256(Bf16, UpTo4), "attention/decode256", "attention_decode256_bf16_4"),
        (Decode256(Bf16, UpTo8), "attention/decode256", "attention_decode256_bf16_8"),
        (Decode128Term(F16, UpTo4), "attention_remainder/decode128", "attention_decode128_term_f16_4"),
        (Decode128Term(F16, UpTo8), "attention_remainder/decode128", "attention_decode128_term_f16_8"),
        (Decode128Term(F16, UpTo16), "attention_remainder/decode128", "attention_decode128_term_f16_16"),
        (Decode128Term(Bf16, UpTo4), "attention_remainder/decode128", "attention_decode128_term_bf16_4"),
        (Decode128Term(Bf16, UpTo8), "attention_remainder/decode128", "attention_decode128_term_bf16_8"),
        (Decode128Term(Bf16, UpTo16), "attention_remainder/decode128", "attention_decode128_term_bf16_16"),
        (Verify128(F16), "attention/verify128", "attention_verify128_f16"),
        (Verify128(Bf16), "attention/verify128", "attention_verify128_bf16"),
        (Verify128Tree(F16), "attention_tree/verify128", "attention_verify128_tree_f16"),
        (Verify128Tree(Bf16), "attention_tree/verify128", "attention_verify128_tree_bf16"),
        (VerifyShort(F16), "attention/verify128_short", "attention_verify128_short_f16"),
        (VerifyShort(Bf16), "attention/verify128_short", "attention_verify128_short_bf16"),
        (VerifyShortTree(F16), "attention_tree/verify128_short", "attention_verify128_short_tree_f16"),
        (VerifyShortTree(Bf16), "attention_tree/verify128_short", "attention_verify128_short_tree_bf16"),
        (Verify64(F16), "attention/verify64", "attention_verify64_f16"),
        (Verify64(Bf16), "attention/verify64", "attention_verify64_bf16"),
        (Verify64Tree(F16), "attention_tree/verify64", "attention_verify64_tree_f16"),
        (Verify64Tree(Bf16), "attention_tree/verify64", "attention_verify64_tree_bf16"),
        (Verify64Short(F16), "attention/verify64_short", "attention_verify64_short_f16"),
        (Verify64Short(Bf16), "attention/verify64_short", "attention_verify64_short_bf16"),
        (Verify64ShortTree(F16), "attention_tree/verify64_short", "attention_verify64_short_tree_f16"),
        (Verify64ShortTree(Bf16), "attention_tree/verify64_short", "attention_verify64_short_tree_bf16"),
        (Verify256(F16), "attention/verify256", "attention_verify256_f16"),
        (Verify256(Bf16), "attention/verify256", "attention_verify256_bf16"),
        (Verify256Tree(F16), "attention_tree/verify256", "attention_verify256_tree_f16"),
        (Verify256Tree(Bf16), "attention_tree/verify256", "attention_verify256_tree_bf16"),
        (Int4_128(F16, UpTo4), "attention_int4/decode128_f16", "attention_int4_128_f16_4"),
        (Int4_128(F16, UpTo8), "attention_int4/decode128_f16", "attention_int4_128_f16_8"),
        (Int4_128(F16, UpTo16), "attention_int4/decode128_f16", "attention_int4_128_f16_16"),
        (Int4_128(Bf16, UpTo4), "attention_int4/decode128_bf16", "attention_int4_128_bf16_4"),
        (Int4_128(Bf16, UpTo8), "attention_int4/decode128_bf16", "attention_int4_128_bf16_8"),
        (Int4_128(Bf16, UpTo16), "attention_int4/decode128_bf16", "attention_int4_128_bf16_16"),
        (Int4Verify128(F16), "attention_int4/verify128", "attention_int4_verify128_f16"),
        (Int4Verify128(Bf16), "attention_int4/verify128", "attention_int4_verify128_bf16"),
        (Int4Verify128Tree(F16), "attention_int4/verify128_tree", "attention_int4_verify128_tree_f16"),
        (Int4Verify128Tree(Bf16), "attention_int4/verify128_tree", "attention_int4_verify128_tree_bf16"),
        (Int4Mma(F16, 64), "attention_int4/mma_f16", "attention_int4_mma_f16_64"),
        (Int4Mma(F16, 128), "attention_int4/mma_f16", "attention_int4_mma_f16_128"),
        (Int4Mma(F16, 256), "attention_int4/mma_f16", "attention_int4_mma_f16_256"),
        (Int4Mma(Bf16, 64), "attention_int4/mma_bf16", "attention_int4_mma_bf16_64"),
        (Int4Mma(Bf16, 128), "attention_int4/mma_bf16", "attention_int4_mma_bf16_128"),
        (Int4Mma(Bf16, 256), "attention_int4/mma_bf16", "attention_int4_mma_bf16_256"),
        (Mla64(F16), "attention/mla64", "attention_mla64_f16"),
        (Mla64(Bf16), "attention/mla64", "attention_mla64_bf16"),
        (Mla16(F16), "attention/mla16", "attention_mla16_f16"),
        (Mla16(Bf16), "attention/mla16", "attention_mla16_bf16"),
        (Mma(F16, W128), "attention/mma_f16", "attention_mma_f16_128"),
        (Mma(F16, W256), "attention/mma_f16", "attention_mma_f16_256"),
        (Mma(F16, W576), "attention/mma_f16", "attention_mma_f16_576"),
        (Mma(Bf16, W128), "attention/mma_bf16", "attention_mma_bf16_128"),
        (Mma(Bf16, W256), "attention/mma_bf16", "attention_mma_bf16_256"),
        (Mma(Bf16, W576), "attention/mma_bf16", "attention_mma_bf16_576"),
        (Mma(Fp8, W128), "attention/mma_fp8", "attention_mma_fp8_128"),
        (Mma(Fp8, W256), "attention/mma_fp8", "attention_mma_fp8_256"),
        (Mma(Fp8, W576), "attention/mma_fp8", "attention_mma_fp8_576"),
        (General, "attention/general", "attention_general"),
        (GeneralTree, "attention_tree/general", "attention_general_tree"),
        (Int4General, "attention_int4/general", "attention_int4_general"),
    ]
};

/// Kernels that repair in one launch: variant, what keys are made of, source, name.
const REPAIR: [(RepairVariant, Element, &str, &str); 8] = [
    (RepairVariant::Decode128, Element::F16, "attention/repair_decode128", "repair_decode128_f16"),
    (RepairVariant::Decode128, Element::Bf16, "attention/repair_decode128", "repair_decode128_bf16"),
    (RepairVariant::Decode128, Element::Fp8, "attention/repair_decode128", "repair_decode128_fp8"),
    (RepairVariant::Verify128, Element::F16, "attention/repair_verify128", "repair_verify128_f16"),
    (RepairVariant::Verify128, Element::Bf16, "attention/repair_verify128", "repair_verify128_bf16"),
    (RepairVariant::OneLaunch, Element::F16, "attention/repair_one_launch", "repair_one_launch_f16_128"),
    (RepairVariant::OneLaunch, Element::Bf16, "attention/repair_one_launch", "repair_one_launch_bf16_128"),
    (RepairVariant::OneLaunch, Element::Fp8, "attention/repair_one_launch", "repair_one_launch_fp8_128"),
];

pub struct Kernels {
    /// As in [`Sizes`].
    pub invariant_batch: u32,
    /// Those of [`ATTENTION`] that run on the device.
    attention: Vec<(Entry, Kernel)>,
    device: Device,
    /// Clusters that mla16 forms, where it runs.
    clusters: Option<Clusters>,
    /// Clusters that verify128 forms, in attention and in repair, where it runs.
    pub verify_clusters: Option<verify128::Clusters>,
    /// Those that verify128_short forms.
    short_clusters: Option<verify128::Clusters>,
    join_mla64: Option<Kernel>,
    split: Kernel,
    /// Those of [`REPAIR`] that run on the device.
    repair: Vec<(RepairVariant, Element, Kernel)>,
    pub find_missed: Kernel,
    /// CTAs of the clusters that kernels of [`REPAIR`] can form, ascending; none where they do not run.
    pub cluster_sizes: Vec<u32>,
    /// Entry n: how many clusters of n + 1 CTAs repair's decode128 has running at a time.
    pub active_clusters: [u32; LARGEST_CLUSTER as usize],
    pub merge: Kernel,
    /// Joins what a list leaves out.
    term: term::TermKernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("attention/mma_f16", compute_80, compute_90),
        source!("attention/mma_bf16", compute_80, compute_90),
        source!("attention/mma_fp8", compute_80, compute_90),
        source!("attention/decode128_f16", compute_90),
        source!("attention/decode128_bf16", compute_90),
        source!("attention/decode128_fp8", compute_90),
        source!("attention/decode64", compute_90),
        source!("attention/decode256", compute_90),
        source!("attention/verify128", compute_90a),
        source!("attention/verify128_short", compute_90a),
        source!("attention/verify64", compute_90a),
        source!("attention/verify64_short", compute_90a),
        source!("attention/verify256", compute_90a),
        source!("attention_int4/decode128_f16", compute_90),
        source!("attention_int4/decode128_bf16", compute_90),
        source!("attention_int4/verify128", compute_90a),
        source!("attention_int4/verify128_tree", compute_90a),
        source!("attention_int4/mma_f16", compute_80, compute_90),
        source!("attention_int4/mma_bf16", compute_80, compute_90),
        source!("attention/mla16", compute_90),
        source!("attention/mla64", compute_90a),
        source!("attention/general", compute_80, compute_90),
        source!("attention_tree/verify128", compute_90a),
        source!("attention_tree/verify128_short", compute_90a),
        source!("attention_tree/verify64", compute_90a),
        source!("attention_tree/verify64_short", compute_90a),
        source!("attention_tree/verify256", compute_90a),
        source!("attention_tree/general", compute_80, compute_90),
        source!("attention_int4/general", compute_80, compute_90),
        source!("attention/split", compute_80, compute_90),
        source!("attention/repair_two_launches", compute_80, compute_90),
        source!("attention/repair_one_launch", compute_90),
        source!("attention/repair_decode128", compute_90),
        source!("attention/repair_verify128", compute_90a),
        source!("attention/merge", compute_80),
        source!("attention_remainder/decode128", compute_90),
        source!("attention_remainder/term", compute_80, compute_90),
    ];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>(), VariantList::of::<RepairVariant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let facts = modules.facts();
        tensor_map::find();
        let sharing = |source: &str, name, most| -> Result<Kernel> {
            let kernel = modules.kernel(source, name)?;
            kernel.allow_shared(most)?;
            Ok(kernel)
        };
        let mut attention = Vec::with_capacity(ATTENTION.len());
        for (entry, source, name) in ATTENTION.into_iter().filter(|(_, source, _)| modules.has(source)) {
            let most = match entry {
                entry if entry.is_decode() => decode128::most_shared(facts.shared_bytes),
                entry if entry.is_verify256() => verify128::shared(verify128::BROAD_CHANNELS),
                entry if entry.is_verify128() || entry.is_verify_short() => verify128::SHARED,
                Entry::Int4_128(_, rows) => int4_128::shared(rows),
                _ => most_shared(facts),
            };
            let kernel = sharing(source, name, most)?;
            if entry.is_verify128() || entry.is_verify_short() {
                kernel.allow_large_clusters()?;
            }
            attention.push((entry, kernel));
        }
        let mut repair = Vec::with_capacity(REPAIR.len());
        for (variant, element, source, name) in REPAIR.into_iter().filter(|(_, _, source, _)| modules.has(source)) {
            repair.push((variant, element, sharing(source, name, most_shared(facts))?));
        }
        let of =
            |entry| attention.iter().find(|(known, _)| *known == entry).map(|(_, kernel): &(Entry, Kernel)| kernel);
        let clusters = of(Entry::Mla16(Element::F16)).map(Clusters::of).filter(Clusters::exist);
        let verify_clusters =
            of(Entry::Verify128(Element::F16)).map(verify128::Clusters::of).filter(verify128::Clusters::exist);
        let short_clusters =
            of(Entry::VerifyShort(Element::F16)).map(verify128::Clusters::of_short).filter(verify128::Clusters::exist);
        let device = Device {
            multiprocessors: facts.multiprocessors,
            shared_bytes: facts.shared_bytes,
            runs_decode128: of(Entry::Decode128(Element::F16, Rows::UpTo4)).is_some(),
            runs_verify128: verify_clusters.is_some(),
            runs_verify_short: short_clusters.is_some(),
            runs_mla16: clusters.is_some(),
            runs_mla64: of(Entry::Mla64(Element::F16)).is_some(),
            runs_int4_128: of(Entry::Int4_128(Element::F16, Rows::UpTo4)).is_some(),
            runs_int4_verify128: verify_clusters.is_some() && of(Entry::Int4Verify128(Element::F16)).is_some(),
        };
        let join_mla64 = if device.runs_mla64 { Some(modules.kernel("attention/mla64", "join_mla64")?) } else { None };

        let active = |kernel: &Kernel, size| kernel.sharing(most_shared(facts)).active_clusters(size, THREADS);
        let decode128 = || repair.iter().filter(|(variant, ..)| *variant == RepairVariant::Decode128);
        let fewest = |size| decode128().map(|(_, _, kernel)| active(kernel, size)).min().unwrap_or(0);
        let active_clusters = std::array::from_fn(|n| fewest(n as u32 + 1));
        let can_form = |&size: &u32| size == 1 || repair.iter().all(|(_, _, kernel)| active(kernel, size) > 0);
        let sizes = if repair.is_empty() { &[] } else { &CLUSTER_SIZES[..] };
        Ok(Kernels {
            invariant_batch: facts.invariant_batch,
            device,
            clusters,
            verify_clusters,
            short_clusters,
            join_mla64,
            split: modules.kernel("attention/split", "attention_split")?,
            find_missed: sharing("attention/repair_two_launches", "repair_find_missed", most_shared(facts))?,
            cluster_sizes: sizes.iter().copied().filter(can_form).collect(),
            active_clusters,
            merge: modules.kernel("attention/merge", "merge_states")?,
            term: term::TermKernel::find(modules)?,
            attention,
            repair,
        })
    }
}

/// The table has what plans name: `choose` takes a variant only where its kernels are loaded.
const PLANNED: &str = "only kernels that are loaded are planned";

impl Kernels {
    fn of(&self, entry: Entry) -> &Kernel {
        &self.attention.iter().find(|(known, _)| *known == entry).expect(PLANNED).1
    }

    /// The kernel that repairs in one launch by this variant.
    pub fn repair_of(&self, variant: RepairVariant, element: Element) -> &Kernel {
        let found = self.repair.iter().find(|(known, of, _)| (*known, *of) == (variant, element));
        &found.expect(PLANNED).2
    }
}

/// The variant that does a call, and its plan. `None` where there is nothing to do.
pub fn plan(kernels: &Kernels, forced: Option<Variant>, job: &Job) -> Result<Option<(Variant, Plan)>> {
    let Some(params) = describe(job)? else { return Ok(None) };
    let device = &kernels.device;
    let (sizes, options) = (Sizes::of(job, &params, kernels.invariant_batch), Options::of(job, &params));
    let variant = variants::choose(forced, |variant| choose::fit(variant, device, &sizes, &options))?;
    let (multiprocessors, shared_bytes) = (device.multiprocessors, device.shared_bytes);
    let of_general = match (options.int4, options.tree) {
        (Some(_), _) => Entry::Int4General,
        (None, true) => Entry::GeneralTree,
        (None, false) => Entry::General,
    };
    let evenly = |entry| mma::plan(multiprocessors, shared_bytes, &params, &sizes, entry);
    let mut plan = match variant {
        Variant::Decode128 | Variant::Decode64 | Variant::Decode256 => {
            let of = |shared_bytes| decode128::plan(multiprocessors, shared_bytes, &params, &sizes);
            let plan = of(shared_bytes).expect(PLANNED);
            match job.term {
                Some(term) => term::with_term(plan, term, |taken| of(shared_bytes.saturating_sub(taken))),
                None => plan,
            }
        }
        Variant::Verify128 | Variant::Verify64 | Variant::Verify256 | Variant::Int4Verify128 => {
            let (clusters, element) = (kernels.verify_clusters.as_ref().expect(PLANNED), sizes.element.expect(PLANNED));
            let entry = match (variant, options.tree) {
                (Variant::Int4Verify128, true) => Entry::Int4Verify128Tree(element),
                (Variant::Int4Verify128, false) => Entry::Int4Verify128(element),
                (Variant::Verify64, true) => Entry::Verify64Tree(element),
                (Variant::Verify64, false) => Entry::Verify64(element),
                (Variant::Verify256, true) => Entry::Verify256Tree(element),
                (Variant::Verify256, false) => Entry::Verify256(element),
                (_, true) => Entry::Verify128Tree(element),
                (_, false) => Entry::Verify128(element),
            };
            verify128::plan(clusters, &params, &sizes, entry)?
        }
        Variant::Verify128Short | Variant::Verify64Short => {
            let (clusters, element) = (kernels.short_clusters.as_ref().expect(PLANNED), sizes.element.expect(PLANNED));
            let entry = match (variant, options.tree) {
                (Variant::Verify64Short, true) => Entry::Verify64ShortTree(element),
                (Variant::Verify64Short, false) => Entry::Verify64Short(element),
                (_, true) => Entry::VerifyShortTree(element),
                (_, false) => Entry::VerifyShort(element),
            };
            verify128::plan_short(clusters, multiprocessors, &params, &sizes, entry)
        }
        Variant::Int4_128 => {
            let int4 = job.problem.int4.expect(PLANNED);
            int4_128::plan(multiprocessors, &params, &sizes, int4).expect(PLANNED)
        }
        Variant::Mla64 => mla64::plan(multiprocessors, &params, &sizes).expect(PLANNED),
        Variant::Mla16 => {
            let clusters = kernels.clusters.as_ref().expect(PLANNED);
            mla16::plan(clusters, &params, &sizes).expect(PLANNED)
        }
        Variant::Int4Mma => evenly(mma::int4_entry(&sizes).expect(PLANNED))?,
        Variant::Mma => evenly(mma::entry(&sizes).expect(PLANNED))?,
        Variant::General => evenly(of_general)?,
    };
    // Tiles that lie side by side; those in host memory are read by the lanes themselves.
    plan.in_boxes = plan.entry.takes_boxes() && !job.is_far && 1 << params.log_granule == TILE;
    // Otherwise lists that are split are few.
    if sizes.is_invariant() && plan.counters() > Enqueue::COUNTERS {
        let (batch, most) = (job.problem.positions.batch(), Enqueue::COUNTERS);
        let text = format!(
            "{batch} sequences need {} counters in a session of invariant_batch {}; a stream has {most}",
            plan.counters(),
            sizes.invariant_batch
        );
        return Err(Error::unsupported(text));
    }
    Ok(Some((variant, plan)))
}

/// The grid of a kernel that waits for the previous one itself, where the device lets it start early.
pub fn grid(enqueue: &Enqueue, ctas: u32) -> Grid {
    Grid { ctas, threads: THREADS, kind: enqueue.dependent_kind() }
}

/// Launches a plan that has its scratch. `term` is given where the plan was made for one.
///
/// # Safety
/// The op's caller keeps the tensors of the plan, which is one of the problem, valid until the stream has passed.
pub unsafe fn launch(enqueue: &Enqueue, plan: &Plan, problem: &Problem, term: Option<&Term>) -> Result<()> {
    let kernels: &Kernels = enqueue.kernels();
    let params = &raw const plan.params;
    let tree = problem.tree.as_ref().map(|tree| tree::Params::new(&plan.params, tree));
    let int4 = problem.int4.map(|int4| int4_128::Params::new(&plan.params, int4, &problem.tree));
    let of_list = term.filter(|_| plan.has_term()).map(|term| term::ListTermParams::new(plan, term));
    // Each of these structs begins with the parameters that the kernels of other variants take.
    let attending = match (&of_list, &tree, &int4) {
        (Some(of_list), ..) => (&raw const *of_list).cast(),
        (None, _, Some(int4)) => (&raw const *int4).cast(),
        (None, Some(tree), None) => (&raw const *tree).cast(),
        (None, None, None) => params.cast(),
    };
    // SAFETY: Params is the kernels' struct, the rest are of the kernels' types, and the plan's addresses are those of valid
    // tensors.
    unsafe {
        if plan.is_split_first {
            // A cluster has a share together.
            let (shares, count) = (&raw const plan.params.cta_shares, plan.ctas / plan.cluster.unwrap_or(1));
            let count = &raw const count;
            enqueue.launch(&kernels.split, grid(enqueue, 1), [params.cast(), shares.cast(), count.cast()])?;
        }
        let kernel = kernels.of(plan.entry).sharing(plan.shared);
        let grid = match plan.cluster {
            None => Grid { threads: plan.threads, ..grid(enqueue, plan.ctas) },
            Some(size) => Grid { ctas: plan.ctas, threads: plan.threads, kind: Kind::DependentClusters(size) },
        };
        if plan.entry.takes_boxes() {
            let boxes = Boxes::of(plan, &problem.kv.k, &problem.kv.v);
            enqueue.launch(&kernel, grid, [attending, (&raw const boxes).cast()])?;
        } else {
            enqueue.launch(&kernel, grid, [attending])?;
        }
        if let (1.., Some(join)) = (plan.joining, &kernels.join_mla64) {
            let threads = mla64::joining_threads(plan.params.ctas.value);
            let grid = Grid { threads, ..self::grid(enqueue, plan.joining) };
            enqueue.launch(join, grid, [params.cast()])?;
        }
        Ok(())
    }
}

/// The grid of a kernel that starts once the previous one has ended.
pub fn ordered_grid(ctas: u32) -> Grid {
    Grid { ctas, threads: THREADS, kind: Kind::Plain }
}

/// Dynamic shared memory that mma, general and the kernels of repair can have.
pub fn most_shared(facts: &Facts) -> u32 {
    mma::most_shared(facts.shared_bytes)
}
