//! How the CTAs of a row of scores are launched, and how its scores reach the selection: RowSink of kernels/select/rows.cuh.

use super::SelectParams;
use crate::core::status::{Error, Result};
use crate::ops::index;
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::{self, Enqueue, Facts, Grid, Kernel, Kind, Modules};
use std::ffi::c_void;

/// Clusters that a row's CTAs can be.
const CLUSTERS: [u32; 4] = [2, 4, 8, 16];
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
    few_scores: usize,
    /// Clusters of each size that run at once: of CTAs with few scores, and with as many as there is room for.
    active: [[usize; CLUSTERS.len()]; 2],
}

impl RowKernel {
    /// Of one that declares so many bytes of shared memory.
    pub fn find(modules: &Modules, source: &str, name: &'static str, declared: usize) -> Result<RowKernel> {
        let (kernel, facts) = (modules.kernel(source, name)?, modules.facts());
        let (few_scores, most) = (few_scores(facts, declared), most_scores(facts, declared));
        kernel.allow_shared(score_bytes(most))?;
        let mut active = [[0; CLUSTERS.len()]; 2];
        if facts.launches_dependents() {
            kernel.allow_large_clusters()?;
            active = [few_scores, most].map(|scores| {
                let kernel = kernel.sharing(score_bytes(scores));
                CLUSTERS.map(|ctas| kernel.active_clusters(ctas, THREADS) as usize)
            });
        }
        Ok(RowKernel { kernel, few_scores, active })
    }

    /// CTAs of a row: at most so many, as long as all rows are made at once.
    fn cluster(&self, rows: usize, scores: usize, most: usize) -> usize {
        let active = self.active[(scores > self.few_scores) as usize];
        let fit = CLUSTERS.iter().zip(active).take_while(|&(&ctas, _)| (ctas as usize) < 2 * most);
        fit.filter(|&(_, active)| rows <= active).map(|(&ctas, _)| ctas as usize).last().unwrap_or(1)
    }
}

/// Where scores are left for the kernel that follows.
struct Held {
    /// CTAs of a row.
    slices: usize,
    scores: usize,
    seen: usize,
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
    pub fn new(
        facts: &Facts,
        declared: usize,
        [rows, stored, most]: [usize; 3],
        scratch: &mut cuda::Parts,
    ) -> Result<RowPlan> {
        if rows > i32::MAX as usize / CLUSTERS[CLUSTERS.len() - 1] as usize {
            return Err(Error::unsupported(format!("selected: {rows} lists; CUDA takes up to 2^27 − 1")));
        }
        // Without clusters, a CTA for each row must fill the device.
        let multiprocessors = facts.multiprocessors as usize;
        let is_alone = !facts.launches_dependents() && rows < multiprocessors && most > 1;
        let held = (is_alone || stored > most_scores(facts, declared)).then(|| {
            let slices = (multiprocessors / rows).min(most).max(1);
            let scores = scratch.take(&[rows, stored, size_of::<f32>()]);
            Held { slices, scores, seen: scratch.take(&[rows, slices, size_of::<u32>()]) }
        });
        Ok(RowPlan { rows, stored, most, held })
    }

    /// CTAs of a row.
    fn slices(&self, kernel: &RowKernel) -> usize {
        self.held.as_ref().map_or_else(|| kernel.cluster(self.rows, self.stored, self.most), |held| held.slices)
    }

    /// Says in a call's parameters what the kernel does with scores; `base` is where scratch begins.
    pub fn fill(&self, select: &mut SelectParams, kernel: &RowKernel, base: usize) {
        let slices = self.slices(kernel) as u32;
        (select.held_row, select.slices, select.by_slices) = (self.stored as u32, slices, Divisor::new(slices));
        if let Some(held) = &self.held {
            (select.held, select.arrived) = ((base + held.scores) as *mut u8, (base + held.seen) as *mut u8);
        }
    }

    /// Launches the kernel, and the one that follows where there is one: `top`.
    ///
    /// # Safety
    /// As for [`Enqueue::launch`]; `select` begins the parameters of both kernels, and is filled for this one.
    pub unsafe fn launch(
        &self,
        enqueue: &Enqueue,
        kernel: &RowKernel,
        top: &Kernel,
        select: &SelectParams,
        params: *const c_void,
    ) -> Result<()> {
        let slices = select.slices as usize;
        let scores = if self.held.is_none() { self.stored } else { 0 };
        let grid = |ctas| Grid { ctas: ctas as u32, threads: THREADS, kind: index::kind(enqueue) };
        let all = match &self.held {
            None if slices > 1 => Grid { kind: Kind::DependentClusters(slices as u32), ..grid(self.rows * slices) },
            _ => grid(self.rows * slices),
        };
        // SAFETY: the caller's.
        unsafe {
            enqueue.launch(&kernel.kernel.sharing(score_bytes(scores)), all, [params])?;
            match &self.held {
                Some(_) => enqueue.launch(top, grid(self.rows), [(&raw const *select).cast()]),
                None => Ok(()),
            }
        }
    }
}
