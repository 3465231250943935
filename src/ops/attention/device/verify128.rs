//! The plans of verify128, in kernels/attention/ and kernels/attention_int4/: units of all lists are split evenly among clusters of CTAs; and of
//! verify128_short: each list has a cluster.

use super::chunks::{Chunks, Cut, FixedChunks};
use super::params::Params;
use super::plan::{Entry, Plan, Scratch, Sizes};
use crate::core::status::Result;
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::{Kernel, LARGEST_CLUSTER};

/// Rows of a work item.
pub const ROWS: u32 = 64;
/// Fewer rows are taken as fast by mma where decode128 does not take them.
pub const FEWEST_ROWS: u32 = 9;
/// Tokens of all lists of dense attention, and of each, from which on it is the fastest for fewer rows, too.
pub const DENSE_TOKENS: u64 = 1 << 19;
pub const LONG_TOKENS: u64 = 4 << 10;
pub const CHANNELS: u32 = 128;
/// Those of verify64 and verify64_short, and of verify256, which have the same clusters.
pub const NARROW_CHANNELS: u32 = 64;
pub const BROAD_CHANNELS: u32 = 256;
pub const THREADS: u32 = 384;
/// Codes are read and widened by two warpgroups, keys and values of 16 bits copied by one.
const INT4_THREADS: u32 = 512;
/// Units, of a tile each, of a stage, and of one of 256 channels.
const STAGE_UNITS: u32 = 4;
const BROAD_STAGE_UNITS: u32 = 2;
/// CTAs of a cluster at most: more than every device is sure to form.
const MOST_CTAS: usize = 16;
/// Rows whose states a CTA receives, where the rows of a work item are shared out to up to 16 CTAs.
const RECEIVED_ROWS: u32 = 75;
/// The same with 256 channels, where the CTAs of a cluster are a power of two and share all rows out evenly.
const BROAD_RECEIVED_ROWS: u32 = 64;
/// Stages of 64 tokens with keys and values, twice as many of 64 channels (in INT4: fewer, and what is read into them).
const RING_BYTES: u32 = 5 * 2 * 64 * CHANNELS * 2;
/// Stages of 32 tokens of 256 channels.
const BROAD_RING_BYTES: u32 = 4 * 2 * 32 * BROAD_CHANNELS * 2;
pub const SHARED: u32 = shared(CHANNELS);
/// Threads of a CTA of verify128_short, whose shared memory is that of verify128, and its halves, which take stages by themselves.
const SHORT_THREADS: u32 = 512;
const HALVES: u32 = 2;
/// CTAs of its clusters where lists are few, up to ALONE_TOKENS long and longer, and where they are many.
const FEW_LISTS_CTAS: usize = 8;
const FEW_LONG_LISTS_CTAS: usize = 9;
const MANY_LISTS_CTAS: usize = 2;
/// Shorter lists are sooner done by larger clusters, whose CTAs join sooner.
const SHORT_TOKENS: u64 = 8 << 10;
/// Lists of so many tokens at most are soonest done by a cluster for each, as large as so many can be.
const ALONE_TOKENS: u64 = 4 << 10;

/// Shared memory for heads of so many channels: the ring; queries; the states of rows that a cluster sends, padded.
pub const fn shared(channels: u32) -> u32 {
    let (ring, received) = match channels {
        BROAD_CHANNELS => (BROAD_RING_BYTES, BROAD_RECEIVED_ROWS),
        _ => (RING_BYTES, RECEIVED_ROWS),
    };
    ring + ROWS * channels * 2 + received * (channels + 4) * size_of::<f32>() as u32
}

/// How many clusters run at once, of one CTA, of two, and so on; each CTA has a multiprocessor.
#[derive(Clone, Copy, Debug)]
pub struct Clusters([u32; MOST_CTAS]);

impl Clusters {
    /// The context is current.
    pub fn of(kernel: &Kernel) -> Clusters {
        Clusters::at_once(kernel, THREADS)
    }

    /// Those of verify128_short.
    pub fn of_short(kernel: &Kernel) -> Clusters {
        Clusters::at_once(kernel, SHORT_THREADS)
    }

    fn at_once(kernel: &Kernel, threads: u32) -> Clusters {
        let kernel = kernel.sharing(SHARED);
        Clusters(std::array::from_fn(|n| kernel.active_clusters(n as u32 + 1, threads)))
    }

    pub fn exist(&self) -> bool {
        self.0[..4].iter().all(|&clusters| clusters > 0)
    }

    /// CTAs of a cluster, and how many chunks to make of all lists beside one for each work item. Where every work item has a cluster alone,
    /// nothing goes through scratch; otherwise a cluster of two halves the number of states that do.
    fn choose(&self, items: u32, list_tokens: u64) -> (u32, u32) {
        let [single, pairs, _, fours, ..] = self.0;
        if list_tokens <= ALONE_TOKENS && items <= pairs {
            return (self.largest(items.into(), MOST_CTAS), 0);
        }
        let (ctas, at_once) = if items > pairs {
            (1, single)
        } else if list_tokens <= SHORT_TOKENS && items.saturating_mul(3) <= fours {
            (4, fours)
        } else {
            (2, pairs)
        };
        (ctas, at_once.saturating_sub(items).max(at_once / 2).max(1))
    }

    /// CTAs of repair's clusters, of which each work item has one. With more than these SUPERSET took longer.
    pub fn of_repair(&self, items: u64) -> u32 {
        self.largest(items, LARGEST_CLUSTER as usize)
    }

    /// CTAs of the largest clusters, of at most so many, of which one for each work item runs at once.
    fn largest(&self, items: u64, most: usize) -> u32 {
        self.0[..most].iter().rposition(|&clusters| u64::from(clusters) >= items).unwrap_or(0) as u32 + 1
    }
}

/// Work items of a call, each a list and up to 64 of its rows.
pub fn work_items(sizes: &Sizes) -> u32 {
    sizes.lists as u32 * sizes.rows.div_ceil(ROWS)
}

/// Those by whose number splits are chosen.
pub fn split_items(sizes: &Sizes) -> u64 {
    sizes.split_lists().saturating_mul(sizes.rows.div_ceil(ROWS).into())
}

/// What the kernels are told of work items and of clusters of `ctas`.
pub fn describe(params: &Params, sizes: &Sizes, ctas: u32) -> Params {
    Params {
        work_items: work_items(sizes),
        row_blocks: Divisor::new(sizes.rows.div_ceil(ROWS)),
        log_members: (ROWS / 8).ilog2(),
        ctas: Divisor::new(ctas),
        ..*params
    }
}

/// The plan of a call that fits, by the kernel `entry`.
pub fn plan(clusters: &Clusters, params: &Params, sizes: &Sizes, entry: Entry) -> Result<Plan> {
    let [single, pairs, ..] = clusters.0;
    let is_broad = sizes.dim == BROAD_CHANNELS;
    let (ctas, cut) = if sizes.is_invariant() {
        // Whatever the number of rows, which have the bits then that each has alone.
        let (ctas, at_once) = if sizes.split_lists() > pairs.into() { (1, single) } else { (2, pairs) };
        (ctas, Cut::At(FixedChunks::new(sizes, at_once)))
    } else {
        let (ctas, more) = clusters.choose(work_items(sizes), sizes.list_tokens);
        (if is_broad { 1 << ctas.ilog2() } else { ctas }, Cut::Evenly(more))
    };
    let mut params = describe(params, sizes, ctas);
    let stage_units = if is_broad { BROAD_STAGE_UNITS } else { STAGE_UNITS };
    // A list that is to be one chunk has no more than the least units of one.
    params.least_units = (stage_units * ctas).max(if matches!(cut, Cut::Evenly(0)) { sizes.units as u32 } else { 0 });
    let chunks = Chunks::plan(&mut params, sizes, ctas, cut)?;
    let state_bytes = params.rows.next_multiple_of(2).min(ROWS) * (params.dim + 2) * size_of::<f32>() as u32;
    Ok(Plan {
        params,
        entry,
        ctas: chunks.count * ctas,
        threads: if entry.is_int4() { INT4_THREADS } else { THREADS },
        cluster: Some(ctas),
        joining: 0,
        shared: shared(params.dim),
        is_split_first: chunks.is_split_first,
        in_boxes: false,
        scratch: Scratch { shares: chunks.share_bytes(), states: chunks.states as usize * state_bytes as usize },
    })
}

/// Whether lists are so few that CTAs of verify128_short, as many as have work, leave half of the multiprocessors free.
fn are_few(items: u64, multiprocessors: u32) -> bool {
    items.saturating_mul(2 * FEW_LISTS_CTAS as u64) <= multiprocessors.into()
}

/// Whether lists are so many that CTAs of verify128_short, two a list, leave hardly any multiprocessor free, and none has a second one.
pub fn are_many(sizes: &Sizes, multiprocessors: u32) -> bool {
    let items = split_items(sizes);
    items.saturating_mul(2 * MANY_LISTS_CTAS as u64) > multiprocessors.into() && items <= multiprocessors.into()
}

/// Whether verify128_short takes a call sooner than verify128. Between few and many lists its clusters would leave multiprocessors idle.
pub fn short_pays(sizes: &Sizes, multiprocessors: u32, has_lists: bool, is_tree: bool) -> bool {
    let tokens = match (are_few(split_items(sizes), multiprocessors), is_tree) {
        (true, false) => 0..=if has_lists && sizes.dim == CHANNELS { 16 << 10 } else { 8 << 10 },
        (true, true) => 0..=8 << 10,
        (false, false) if are_many(sizes, multiprocessors) => 0..=4 << 10,
        _ => return false,
    };
    tokens.contains(&sizes.list_tokens)
}

/// The plan of a call by the kernel `entry` of verify128_short. No CTA of a cluster is without a stage.
pub fn plan_short(clusters: &Clusters, multiprocessors: u32, params: &Params, sizes: &Sizes, entry: Entry) -> Plan {
    let items = split_items(sizes);
    let most = match are_few(items, multiprocessors) {
        true if sizes.list_tokens > ALONE_TOKENS => FEW_LONG_LISTS_CTAS,
        true => FEW_LISTS_CTAS,
        false => MANY_LISTS_CTAS,
    };
    let stages = sizes.units.div_ceil(u64::from(STAGE_UNITS)).min(most as u64) as u32;
    // A CTA that is alone could send itself nothing.
    let ctas = clusters.largest(items, most).min(stages).max(2);
    Plan {
        params: describe(params, sizes, HALVES * ctas),
        entry,
        ctas: work_items(sizes) * ctas,
        threads: SHORT_THREADS,
        cluster: Some(ctas),
        joining: 0,
        shared: shared(params.dim),
        is_split_first: false,
        in_boxes: false,
        scratch: Scratch::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::device::choose::tests::SIZES;

    /// What an H100 runs at once.
    const H100: [u32; MOST_CTAS] = [132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7];

    #[test]
    fn clusters_are_of_the_size_that_was_fastest_where_measured() {
        let clusters = Clusters(H100);
        for (items, tokens, ctas) in [
            (7, 4096, 16),
            (8, 4096, 9),
            (24, 4096, 4),
            (8, 8192, 4),
            (8, 1 << 15, 2),
            (8, 1 << 17, 2),
            (64, 4096, 2),
            (64, 1 << 17, 2),
            (128, 1 << 15, 1),
        ] {
            assert_eq!(clusters.choose(items, tokens).0, ctas, "{items} lists of {tokens} tokens");
        }
    }

    #[test]
    fn short_lists_that_are_few_or_many_take_kernels_of_their_own_on_an_h200() {
        let pays = |lists, tokens, has_lists, is_tree| {
            let sizes = Sizes { rows: 36, lists, list_tokens: tokens, ..SIZES };
            short_pays(&sizes, 132, has_lists, is_tree)
        };
        for (lists, tokens) in [(1, 0), (8, 1024), (8, 16 << 10), (34, 4096), (132, 4096)] {
            assert!(pays(lists, tokens, true, false), "{lists} lists of {tokens} tokens");
        }
        for (lists, tokens) in [(8, (16 << 10) + 1), (9, 4096), (33, 4096), (34, 4097), (133, 1024), (u64::MAX, 1)] {
            assert!(!pays(lists, tokens, true, false), "{lists} lists of {tokens} tokens");
        }
        assert_eq!([8 << 10, 9 << 10].map(|tokens| pays(8, tokens, false, false)), [true, false]);
        let narrow = |tokens| Sizes { rows: 36, list_tokens: tokens, dim: 64, value_dim: 64, ..SIZES };
        assert_eq!([8 << 10, 9 << 10].map(|tokens| short_pays(&narrow(tokens), 132, true, false)), [true, false]);
        assert_eq!([1 << 10, 8 << 10, 9 << 10].map(|tokens| pays(8, tokens, true, true)), [true, true, false]);
    }

    #[test]
    fn repair_has_the_largest_clusters_that_all_run_at_once() {
        for (items, ctas) in [(7, 8), (8, 8), (15, 8), (16, 6), (30, 4), (64, 2), (67, 1), (1000, 1)] {
            assert_eq!(Clusters(H100).of_repair(items), ctas, "{items} lists");
        }
        assert_eq!(Clusters(std::array::from_fn(|n| if n < 4 { H100[n] } else { 0 })).of_repair(8), 4);
    }
}
