//! How the CTAs of a row of scores are launched, and how its scores reach the selection: RowSink of kernels/select/rows.cuh.

use super::SelectParams;
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::Divisor;
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
    /// Of one that declares so many bytes of shared memory. `is_alone`: its CTAs are soonest done with a multiprocessor each.
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
    /// Those of each size that run at once: of CTAs with few scores, and of those that have a multiprocessor each.
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
    long: Option<Kernel>,
}

impl TopKernels {
    pub fn find(modules: &Modules) -> Result<TopKernels> {
        let top = modules.kernel("select/top_cta", "select_top_cta")?;
        if !modules.has("select/top_cluster") {
            return Ok(TopKernels { top, long: None });
        }
        let (kernel, most) =
            (modules.kernel("select/top_cluster", "select_top_cluster")?, modules.facts().shared_bytes);
        kernel.allow_shared(most - LONG_TOP)?;
        let has_clusters = kernel.sharing(most - LONG_TOP).active_clusters(SIEVING as u32, THREADS) > 0;
        Ok(TopKernels { top, long: has_clusters.then_some(kernel) })
    }

    /// Where rows are long, and so few that each has many CTAs, and few of a row are wanted: what sieves them, if there is room.
    pub fn sieve(&self, facts: &Facts, rows: usize, stored: usize, wanted: usize) -> Option<Sieve> {
        let is_worth_it =
            stored >= LONG_ROW && rows * SIEVING <= facts.multiprocessors as usize && wanted <= MOST_SIEVED;
        let sieve = Sieve::of(self.long?, stored);
        (is_worth_it && sieve.bytes() <= (facts.shared_bytes - LONG_TOP) as usize).then_some(sieve)
    }
}

/// Shared memory that select_long_top declares, or more.
const LONG_TOP: u32 = 16 << 10;
/// CTAs of a cluster that sieves a row.
const SIEVING: usize = 8;
/// Scores of which the first CTA of a cluster would find the best later than a kernel that follows.
const LONG_ROW: usize = 8192;
/// MOST_WANTED of kernels/common/cluster_prefilter.cuh: of more, all scores would go to the first CTA.
const MOST_SIEVED: usize = 256;

/// A kernel for rows of one length, and 32-bit words of the shared memory of its CTAs.
pub struct Sieve {
    kernel: Kernel,
    /// Of a CTA's share, before what comes to the first one.
    own: usize,
    all: usize,
}

impl Sieve {
    fn of(kernel: Kernel, stored: usize) -> Sieve {
        // Sieve of kernels/common/cluster_prefilter.cuh: its divide(), and the few or all keys that come.
        let own = stored.div_ceil(SIEVING).next_multiple_of(32);
        Sieve { kernel, own, all: own + (SIEVING * THREADS as usize * 2).max(stored.next_multiple_of(4)) }
    }

    fn bytes(&self) -> usize {
        self.all * size_of::<u32>()
    }
}

/// Where scores are left for the kernel that follows.
struct Held {
    /// CTAs of a row.
    slices: usize,
    scores: usize,
    seen: usize,
    sieve: Option<Sieve>,
}

/// How the scores of rows reach the selection.
pub struct RowPlan {
    rows: usize,
    /// Blocks of a row that have a score.
    stored: usize,
    /// CTAs that are worth it for a row.
    most: usize,
    /// None where they are in shared memory.
    held: Option<Held>,
}

impl RowPlan {
    /// `sieve`: what selects from the rows where a launch of its own pays ([`TopKernels::sieve`]).
    pub fn new(
        facts: &Facts,
        declared: usize,
        sieve: Option<Sieve>,
        [rows, stored, most]: [usize; 3],
        scratch: &mut cuda::Parts,
    ) -> Result<RowPlan> {
        if rows > i32::MAX as usize / CLUSTERS[CLUSTERS.len() - 1] {
            return Err(Error::unsupported(format!("selected: {rows} lists; CUDA takes up to 2^27 − 1")));
        }
        // Without clusters, a CTA for each row must fill the device.
        let multiprocessors = facts.multiprocessors as usize;
        let is_alone = !facts.launches_dependents() && rows < multiprocessors && most > 1;
        let held = (is_alone || sieve.is_some() || stored > most_scores(facts, declared)).then(|| {
            // Those that score long rows wait for bytes alone, so two share a multiprocessor.
            let at_once = multiprocessors * if sieve.is_some() { 2 } else { 1 };
            let slices = (at_once / rows).min(most).max(1);
            let scores = scratch.take(&[rows, stored, size_of::<f32>()]);
            Held { slices, scores, seen: scratch.take(&[rows, slices, size_of::<u32>()]), sieve }
        });
        Ok(RowPlan { rows, stored, most, held })
    }

    /// CTAs of a row.
    fn slices(&self, kernel: &RowKernel) -> usize {
        self.held.as_ref().map_or_else(|| kernel.clusters.of_row(self.rows, self.stored, self.most), |held| held.slices)
    }

    /// Says in a call's parameters what the kernel does with scores; `base` is where scratch begins.
    pub fn fill(&self, select: &mut SelectParams, kernel: &RowKernel, base: usize) {
        let slices = self.slices(kernel) as u32;
        (select.scored_blocks, select.slices, select.by_slices) = (self.stored as u32, slices, Divisor::new(slices));
        if let Some(held) = &self.held {
            (select.scratch_scores, select.cta_status) =
                ((base + held.scores) as *mut u8, (base + held.seen) as *mut u8);
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
        let all = match &self.held {
            None if slices > 1 => Grid { kind: Kind::DependentClusters(slices as u32), ..grid(self.rows * slices) },
            _ => grid(self.rows * slices),
        };
        let shared = if self.held.is_none() { kernel.clusters.shared_bytes(self.rows, slices, self.stored) } else { 0 };
        // SAFETY: the caller's.
        unsafe {
            enqueue.launch(&kernel.kernel.sharing(shared), all, [params])?;
            let Some(held) = &self.held else { return Ok(()) };
            let select = (&raw const *select).cast();
            let Some(sieve) = &held.sieve else { return enqueue.launch(&kernels.top, grid(self.rows), [select]) };
            let all = Grid { kind: Kind::DependentClusters(SIEVING as u32), ..grid(self.rows * SIEVING) };
            let room = sieve.own as u32;
            enqueue.launch(&sieve.kernel.sharing(sieve.bytes() as u32), all, [select, (&raw const room).cast()])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an H200.
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
