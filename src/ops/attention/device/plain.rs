//! The plan of kernels/attention/plain.cuh: a cluster of CTAs for each list, whose size follows from how many lists there are.

use super::params::Params;
use super::plan::{Element, Engine, FACTS_BYTES, Plan, Scratch, TILE, WARP_ROWS};
use crate::runtime::cuda::{Kernel, LARGEST_CLUSTER};

const CHANNELS: u32 = 128;
/// Lists longer than this keep a whole device busy where the general kernel cuts them.
const MOST_TOKENS: u64 = 12 << 10;
const WARP: u32 = 32;

/// Rows of a list that a kernel is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    UpTo4,
    UpTo8,
    UpTo16,
}

impl Rows {
    fn of(rows: u32, element: Element) -> Option<Rows> {
        match rows {
            0..=4 if element != Element::Fp8 => Some(Rows::UpTo4),
            0..=8 => Some(Rows::UpTo8),
            9..=16 => Some(Rows::UpTo16),
            _ => None,
        }
    }

    fn count(self) -> u32 {
        4 << self as u32
    }
}

/// How many clusters of 2, 4, 8 and 16 CTAs that fill a multiprocessor each run at once.
#[derive(Clone, Copy)]
pub struct Clusters([u32; 4]);

impl Clusters {
    /// The context is current.
    pub fn of(kernel: &Kernel) -> Clusters {
        const SHARED: u32 = 160 << 10;
        let kernel = kernel.sharing(SHARED);
        Clusters([2, 4, LARGEST_CLUSTER, 2 * LARGEST_CLUSTER].map(|ctas| kernel.active_clusters(ctas, 8 * WARP)))
    }

    /// Not all devices have a cluster of 16.
    pub fn exist(&self) -> bool {
        self.0[..3].iter().all(|&clusters| clusters > 0)
    }

    /// CTAs of the largest that there are as many of as pairs, all at once.
    pub fn of_pairs(&self, pairs: u32) -> u32 {
        let fits = self.0.iter().rposition(|&clusters| pairs <= clusters);
        fits.map_or(1, |n| 2 << n)
    }
}

/// CTAs of a cluster, their warps, and what each warp has in flight.
pub struct Cut {
    rows: Rows,
    pairs: u32,
    ctas: u32,
    warps: u32,
    stages: u32,
    element: Element,
    has_partials: bool,
}

/// `None` where the kernel does not take these tensors, or would not be the faster. `tokens` is the length of a full list.
pub fn cut(
    clusters: &Clusters,
    params: &Params,
    element: Element,
    lists: usize,
    tokens: u64,
    most: u32,
) -> Option<Cut> {
    let rows = Rows::of(params.rows, element)?;
    let has_list = !params.ids.data.is_null();
    let is_taken = params.dim == CHANNELS
        && params.value_dim == CHANNELS
        && 1 << params.log_granule == TILE
        && params.scales_per_token == 0
        && [params.k, params.v].iter().all(|kv| has_short_steps(&kv.step[..2]))
        && has_short_steps(&params.table.step);
    let Clusters([of_2, of_4, of_8, _]) = *clusters;
    let pairs = u32::try_from(lists).ok().filter(|&pairs| pairs < 1 << 20)?;
    // Sequences without lists differ in length, so that many of them are better cut by what there is to do.
    if !is_taken || tokens > MOST_TOKENS || (!has_list && pairs > of_8) {
        return None;
    }
    let has_partials = !params.partials.acc.data.is_null();
    let is_fp8 = element == Element::Fp8;
    let (ctas, warps, stages) = match pairs {
        _ if pairs <= of_8 && is_fp8 => (8, 8, 3),
        _ if pairs <= of_8 && !has_partials => (8, 4, 3),
        _ if pairs <= of_8 => (8, 8, 2),
        _ if pairs <= of_4 => (4, 8, 2),
        _ if pairs <= of_2 => (2, 8, if is_fp8 { 4 } else { 2 }),
        _ => (2, 4, if is_fp8 { 3 } else { 2 }),
    };
    // The widest that fits.
    let cuts = [(warps, stages), (warps, 2), (4, 2)];
    let cuts = cuts.map(|(warps, stages)| Cut { rows, pairs, ctas, warps, stages, element, has_partials });
    cuts.into_iter().find(|cut| cut.shared() <= most)
}

fn has_short_steps(steps: &[i64]) -> bool {
    steps.iter().all(|&step| i32::try_from(step).is_ok())
}

impl Cut {
    fn tile_bytes(&self) -> u32 {
        let bytes = if self.element == Element::Fp8 { 1 } else { 2 };
        TILE * (CHANNELS * bytes + 16)
    }

    fn stage_bytes(&self) -> u32 {
        FACTS_BYTES + 2 * self.tile_bytes()
    }

    fn ring_bytes(&self) -> u32 {
        self.warps * self.stages * self.stage_bytes()
    }

    /// Channels that a CTA joins, by eights.
    fn log_octets(&self) -> u32 {
        (CHANNELS / 8 / self.ctas).ilog2()
    }

    /// What every warp of the cluster sends to a CTA.
    fn received_bytes(&self) -> u32 {
        let floats = ((8 << self.log_octets()) + 2) * self.rows.count();
        self.ctas * self.warps * floats * size_of::<f32>() as u32
    }

    /// A state of each warp.
    fn totals_bytes(&self) -> u32 {
        let rows = self.rows.count().next_multiple_of(WARP_ROWS);
        if self.has_partials { self.warps * rows * CHANNELS * size_of::<f32>() as u32 } else { 0 }
    }

    fn shared(&self) -> u32 {
        self.ring_bytes() + self.received_bytes() + self.totals_bytes()
    }

    /// `units` is the number of those of a full list.
    pub fn plan(&self, params: Params, element: Element, units: u32) -> Plan {
        let params = Params {
            pairs: self.pairs,
            most_units: units,
            log_members: (self.rows == Rows::UpTo16) as u32,
            kept_rows: self.rows.count(),
            stages: self.stages,
            log_octets: self.log_octets(),
            v_offset: self.tile_bytes(),
            stage_bytes: self.stage_bytes(),
            q_offset: self.ring_bytes(),
            totals_offset: self.ring_bytes() + self.received_bytes(),
            ..params
        };
        Plan {
            params,
            engine: Engine::Plain(element, self.rows),
            ctas: self.pairs * self.ctas,
            threads: self.warps * WARP,
            cluster: Some(self.ctas),
            shared: self.shared(),
            is_cut_apart: false,
            scratch: Scratch::default(),
        }
    }
}
