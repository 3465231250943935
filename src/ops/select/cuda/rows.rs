//! How the CTAs of a row of scores are launched, and how its scores reach the selection: RowSink of kernels/select/rows.cuh.

use super::params::SelectParams;
use crate::core::status::{Error, Result};
use crate::ops::select::choose::{self, RowDevice, RowShape, TOP_CTAS, TopVariant};
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::variants;
use crate::runtime::cuda::{self, Enqueue, Facts, Grid, Kernel, Kind, Modules};
use std::ffi::c_void;

/// Chunks of a CTA that are soonest done on a multiprocessor of its own: more of them wait for bytes, better two CTAs at a time.
const FEW_CHUNKS: usize = 4;
/// Clusters that a row's CTAs can be.
const CLUSTERS: [usize; 6] = [2, 3, 4, 6, 8, 16];
const SCORE: usize = size_of::<f32>();
/// TOPK_THREADS of kernels/common/topk.cuh.
pub const THREADS: u32 = 512;

/// Scores for which a CTA has room that declares so many bytes of shared memory.
pub fn most_scores(facts: &Facts, declared: usize) -> usize {
    scores_in(facts.shared_bytes as usize, declared)
}

/// Scores that leave its multiprocessor room for a second such CTA; 1 KiB of each is the driver's.
fn few_scores(facts: &Facts, declared: usize) -> usize {
    const OF_DRIVER: usize = 1 << 10;
    scores_in((facts.shared_bytes as usize + OF_DRIVER) / 2 - OF_DRIVER, declared)
}

fn scores_in(bytes: usize, declared: usize) -> usize {
    bytes.saturating_sub(declared) / (4 * SCORE) * 4
}

/// Shared memory of so many scores, which are read four at a time.
pub fn score_bytes(scores: usize) -> u32 {
    (scores.next_multiple_of(4) * SCORE) as u32
}

/// A kernel that scores rows and selects from them.
pub struct RowKernel {
    kernel: Kernel,
    clusters: Clusters,
}

impl RowKernel {
    /// `declared`: bytes of shared memory that the kernel declares. `is_alone`: its CTAs are soonest done with a multiprocessor each.
    pub fn find(
        modules: &Modules,
        source: &str,
        name: &'static str,
        declared: usize,
        is_alone: bool,
    ) -> Result<RowKernel> {
        let (kernel, facts) = (modules.kernel(source, name)?, modules.facts());
        let (few_scores, most) = (few_scores(facts, declared), most_scores(facts, declared));
        kernel.allow_shared(score_bytes(most))?;
        let mut active = [[0; CLUSTERS.len()]; 2];
        if facts.launches_dependents() {
            kernel.allow_large_clusters()?;
            active = [few_scores, most].map(|scores| {
                let kernel = kernel.sharing(score_bytes(scores));
                CLUSTERS.map(|ctas| kernel.active_clusters(ctas as u32, THREADS) as usize)
            });
        }
        Ok(RowKernel { kernel, clusters: Clusters { few_scores, is_alone, active } })
    }
}

/// Clusters of a kernel's CTAs on a device.
struct Clusters {
    few_scores: usize,
    is_alone: bool,
    /// Clusters of each size that run at once: first of CTAs with few scores, then of CTAs that have a multiprocessor each.
    active: [[usize; CLUSTERS.len()]; 2],
}

impl Clusters {
    /// CTAs of a row: those that leave each the fewest of its `most` chunks, as long as all rows are made at once, and no more than that
    /// takes; where those are few, and it makes them sooner, with a multiprocessor each.
    fn of_row(&self, rows: usize, scores: usize, most: usize) -> usize {
        let chunks = |ctas: usize| most.div_ceil(ctas);
        let best = |active: &[usize; CLUSTERS.len()]| {
            let at_once = CLUSTERS.iter().zip(active).filter(|&(_, &active)| rows <= active).map(|(&ctas, _)| ctas);
            at_once.min_by_key(|&ctas| (chunks(ctas), ctas)).filter(|&ctas| chunks(ctas) < most).unwrap_or(1)
        };
        let [shared, own] = [&self.active[(scores > self.few_scores) as usize], &self.active[1]].map(best);
        if self.is_alone && chunks(shared) <= FEW_CHUNKS { own } else { shared }
    }

    /// Dynamic shared memory of so many CTAs of a row. Where all can have a multiprocessor each, and are sooner done so, none shares one.
    fn shared_bytes(&self, rows: usize, ctas: usize, scores: usize) -> u32 {
        /// More than kernels declare less than is reckoned with.
        const SLACK: u32 = 4 << 10;
        let has_own = CLUSTERS.iter().zip(self.active[1]).any(|(&n, active)| n == ctas && rows <= active);
        let least = if self.is_alone && has_own { score_bytes(self.few_scores) + SLACK } else { 0 };
        score_bytes(scores).max(least)
    }
}

/// What selects from scores that another kernel has left.
pub struct TopKernels {
    /// A CTA makes a row.
    top: Kernel,
    /// A cluster does. None where there are no such clusters.
    cluster: Option<Kernel>,
}

impl TopKernels {
    pub fn find(modules: &Modules) -> Result<TopKernels> {
        let top = modules.kernel("select/top_cta", "select_top_cta")?;
        if !modules.has("select/top_cluster") {
            return Ok(TopKernels { top, cluster: None });
        }
        let (kernel, most) =
            (modules.kernel("select/top_cluster", "select_top_cluster")?, modules.facts().shared_bytes);
        kernel.allow_shared(most - TOP_CLUSTER_SHARED)?;
        let has_clusters = kernel.sharing(most - TOP_CLUSTER_SHARED).active_clusters(TOP_CTAS as u32, THREADS) > 0;
        Ok(TopKernels { top, cluster: has_clusters.then_some(kernel) })
    }
}

/// Shared memory that select_top_cluster declares, or more.
const TOP_CLUSTER_SHARED: u32 = 16 << 10;

/// top_cluster for rows of one length: its kernel, and 32-bit words of the shared memory of its CTAs.
pub struct ClusterTop {
    kernel: Kernel,
    /// Words of a CTA's share, which lie before what comes to the first CTA.
    own: usize,
    all: usize,
}

impl ClusterTop {
    fn of(kernel: Kernel, stored: usize) -> ClusterTop {
        // The sizes are those of kernels/common/cluster_prefilter.cuh: a CTA's share by divide(), and room for the keys that reach the first CTA.
        let own = stored.div_ceil(TOP_CTAS).next_multiple_of(32);
        ClusterTop { kernel, own, all: own + (TOP_CTAS * THREADS as usize * 2).max(stored.next_multiple_of(4)) }
    }

    fn bytes(&self) -> usize {
        self.all * size_of::<u32>()
    }
}

/// Where the kernel that follows finds the scores.
struct InScratch {
    /// CTAs of a row.
    slices: usize,
    scores: usize,
    seen: usize,
    cluster: Option<ClusterTop>,
}

/// How the scores of rows reach the selection.
pub struct RowPlan {
    rows: usize,
    /// Blocks of a row that have a score.
    stored: usize,
    /// CTAs that are worth it for a row.
    most_ctas: usize,
    top: TopVariant,
    /// `None` where scores are in shared memory.
    in_scratch: Option<InScratch>,
}

impl RowPlan {
    /// `declared`: shared memory that the scoring kernel declares. `forced`: the variant that the session's options force.
    pub fn new(
        facts: &Facts,
        kernels: &TopKernels,
        forced: Option<TopVariant>,
        declared: usize,
        row: RowShape,
        scratch: &mut cuda::Parts,
    ) -> Result<RowPlan> {
        let &RowShape { rows, stored, most_ctas, .. } = &row;
        if rows > i32::MAX as usize / CLUSTERS[CLUSTERS.len() - 1] {
            return Err(Error::unsupported(format!("selected: {rows} lists; CUDA takes up to 2^27 − 1")));
        }
        let multiprocessors = facts.multiprocessors as usize;
        let cluster = kernels.cluster.map(|kernel| ClusterTop::of(kernel, stored));
        let cluster_bytes = (facts.shared_bytes as usize).saturating_sub(TOP_CLUSTER_SHARED as usize);
        let device = RowDevice {
            multiprocessors,
            has_clusters: facts.launches_dependents(),
            most_scores: most_scores(facts, declared),
            top_cluster_fits: cluster.as_ref().is_some_and(|cluster| cluster.bytes() <= cluster_bytes),
        };
        let top = variants::choose(forced, |variant| choose::top(variant, &row, &device))?;
        let cluster = cluster.filter(|_| top == TopVariant::TopCluster);
        let in_scratch = (top != TopVariant::FirstCta).then(|| {
            // Kernels that score long rows wait for bytes alone, so two of their CTAs share a multiprocessor.
            let at_once = multiprocessors * if cluster.is_some() { 2 } else { 1 };
            let slices = (at_once / rows).min(most_ctas).max(1);
            let scores = scratch.take(&[rows, stored, size_of::<f32>()]);
            InScratch { slices, scores, seen: scratch.take(&[rows, slices, size_of::<u32>()]), cluster }
        });
        Ok(RowPlan { rows, stored, most_ctas, top, in_scratch })
    }

    /// What selects from the scores.
    pub fn top(&self) -> TopVariant {
        self.top
    }

    /// CTAs of a row.
    fn slices(&self, kernel: &RowKernel) -> usize {
        self.in_scratch
            .as_ref()
            .map_or_else(|| kernel.clusters.of_row(self.rows, self.stored, self.most_ctas), |scratch| scratch.slices)
    }

    /// Says in a call's parameters what the kernel does with scores; `base` is where scratch begins.
    pub fn fill(&self, select: &mut SelectParams, kernel: &RowKernel, base: usize) {
        let slices = self.slices(kernel) as u32;
        (select.scored_blocks, select.slices, select.by_slices) = (self.stored as u32, slices, Divisor::new(slices));
        if let Some(scratch) = &self.in_scratch {
            (select.scratch_scores, select.cta_status) =
                ((base + scratch.scores) as *mut u8, (base + scratch.seen) as *mut u8);
        }
    }

    /// Launches the kernel, and the one that follows where there is one.
    ///
    /// # Safety
    /// As for [`Enqueue::launch`]; `select` begins the parameters of both kernels, and is filled for this one.
    pub unsafe fn launch(
        &self,
        enqueue: &Enqueue,
        kernel: &RowKernel,
        kernels: &TopKernels,
        select: &SelectParams,
        params: *const c_void,
    ) -> Result<()> {
        let slices = select.slices as usize;
        let grid = |ctas| Grid { ctas: ctas as u32, threads: THREADS, kind: enqueue.dependent_kind() };
        let all = match &self.in_scratch {
            None if slices > 1 => Grid { kind: Kind::DependentClusters(slices as u32), ..grid(self.rows * slices) },
            _ => grid(self.rows * slices),
        };
        let shared =
            if self.in_scratch.is_none() { kernel.clusters.shared_bytes(self.rows, slices, self.stored) } else { 0 };
        // SAFETY: the caller's.
        unsafe {
            enqueue.launch(&kernel.kernel.sharing(shared), all, [params])?;
            let Some(scratch) = &self.in_scratch else { return Ok(()) };
            let select = (&raw const *select).cast();
            let Some(cluster) = &scratch.cluster else {
                return enqueue.launch(&kernels.top, grid(self.rows), [select]);
            };
            let all = Grid { kind: Kind::DependentClusters(TOP_CTAS as u32), ..grid(self.rows * TOP_CTAS) };
            let room = cluster.own as u32;
            enqueue.launch(&cluster.kernel.sharing(cluster.bytes() as u32), all, [select, (&raw const room).cast()])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clusters of an H200.
    fn clusters(is_alone: bool) -> Clusters {
        Clusters { few_scores: 20_000, is_alone, active: [[132, 79, 62, 34, 30, 14], [66, 44, 30, 17, 15, 7]] }
    }

    #[test]
    fn few_rows_have_ctas_of_their_own_while_these_have_few_chunks() {
        for (rows, chunks, ctas) in [(8, 1, 1), (8, 8, 8), (8, 32, 8), (8, 128, 16), (64, 32, 3), (1000, 32, 1)] {
            assert_eq!(clusters(true).of_row(rows, chunks * 64, chunks), ctas, "{rows} rows of {chunks} chunks");
        }
        assert_eq!(clusters(false).of_row(8, 2048, 32), 16, "they may share multiprocessors");
        assert_eq!(clusters(false).of_row(8, 40_000, 625), 8, "long ones cannot");
    }

    #[test]
    fn ctas_that_have_a_multiprocessor_have_more_than_half_of_its_memory() {
        let few = score_bytes(20_000);
        assert!(clusters(true).shared_bytes(8, 8, 2048) > few);
        assert_eq!(clusters(true).shared_bytes(64, 3, 2048), score_bytes(2048), "too many rows");
        assert_eq!(clusters(false).shared_bytes(8, 8, 2048), score_bytes(2048));
        assert_eq!(clusters(true).shared_bytes(8, 8, 30_000), score_bytes(30_000));
    }
}
