//! Which kernels take the rows of a call, from what it asks for, their number and how they lie.

use crate::ops::draw::device::{RowClusters, STREAM_WARPS};
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that record segments, or do all.
    pub enum Variant: "sample" {
        /// One launch, in which a cluster of CTAs has a row in its shared memory.
        Cluster = "cluster",
        /// The same by clusters of half as many CTAs, each of which has twice as much of the row: more of them run at once.
        HalfCluster = "half_cluster",
        /// Warps that copy ahead, on a CTA of each multiprocessor, go through the segments of all rows.
        Streamed = "streamed",
        /// CTAs of each row, all of whose warps take a segment together.
        Loaded = "loaded",
    }
}

/// What the choice depends on.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Segments of all rows.
    pub segments: usize,
    /// Segments that a warp has at once where it streams them, if the device has bulk copies and these can bring them.
    pub streamed_at_once: Option<usize>,
    /// How clusters take the rows, if these ask for nothing else and the device can form them.
    pub clusters: Option<RowClusters>,
    pub half_clusters: Option<RowClusters>,
    pub multiprocessors: u32,
}

/// Segments of a multiprocessor from which on it pays to stream them, where all rows have 16 bits and where some have 32.
const STREAMED_SEGMENTS: usize = STREAM_WARPS as usize;
const STREAMED_SEGMENTS_32: usize = 5 * STREAM_WARPS as usize / 2;

pub fn fit(variant: Variant, s: Shape) -> Fit {
    let by_clusters = |clusters: Option<RowClusters>| match clusters {
        Some(clusters) if clusters.are_few => Fit::Takes,
        Some(_) => Fit::Slower,
        None => Fit::Cannot(
            "rows are not of logits, have log-probabilities or draft rows, are tried by rejection, do not lie side by side \
             from 16 bytes on or are too long, or the device has no such clusters",
        ),
    };
    match variant {
        Variant::Cluster => by_clusters(s.clusters),
        Variant::HalfCluster => by_clusters(s.half_clusters),
        Variant::Streamed => match s.streamed_at_once {
            Some(at_once) if s.segments >= least_streamed(s, at_once) * s.multiprocessors as usize => Fit::Takes,
            Some(_) => Fit::Slower,
            None => Fit::Cannot("rows do not lie side by side from 16 bytes on, or the device has no bulk copies"),
        },
        Variant::Loaded => Fit::Takes,
    }
}

/// Segments of a multiprocessor from which on it pays to stream them. Rows of 16 bits that clusters could take, were they fewer, are always enough: with up
/// to 31 drafts and without filters one launch streams and decides them.
fn least_streamed(s: Shape, at_once: usize) -> usize {
    match (at_once, s.clusters) {
        (1, _) => STREAMED_SEGMENTS_32,
        (_, Some(clusters)) if !clusters.are_few => 0,
        _ => STREAMED_SEGMENTS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn many_segments_are_streamed_where_bulk_copies_bring_them() {
        let chosen = |segments, streamed_at_once| {
            let shape = Shape { segments, streamed_at_once, clusters: None, half_clusters: None, multiprocessors: 132 };
            choose(None, |variant| fit(variant, shape)).unwrap()
        };
        let rows = |rows: usize| rows * 32;
        assert_eq!([96, 128].map(|few| chosen(rows(few), Some(1))), [Variant::Loaded, Variant::Streamed]);
        assert_eq!([1, 8].map(|batch| chosen(rows(batch * 6), Some(2))), [Variant::Loaded; 2]);
        assert_eq!(chosen(rows(128 * 6), Some(2)), Variant::Streamed);
        assert_eq!(chosen(rows(128 * 6), None), Variant::Loaded);
    }

    #[test]
    fn clusters_take_few_rows_and_rows_of_16_bits_are_streamed_from_there_on() {
        let chosen = |segments, are_few, streamed_at_once| {
            let clusters = Some(RowClusters { ctas: 10, segments: 4, are_few });
            let shape = Shape { segments, streamed_at_once, clusters, half_clusters: None, multiprocessors: 132 };
            choose(None, |variant| fit(variant, shape)).unwrap()
        };
        // 39 and 40 rows of 38 segments.
        assert_eq!([None, Some(1), Some(2)].map(|at_once| chosen(1482, true, at_once)), [Variant::Cluster; 3]);
        let many = [None, Some(1), Some(2)].map(|at_once| chosen(1520, false, at_once));
        assert_eq!(many, [Variant::Loaded, Variant::Loaded, Variant::Streamed]);
    }

    #[test]
    fn half_clusters_take_rows_that_are_few_for_them_alone() {
        let chosen = |few, half_few| {
            let of = |ctas, segments, are_few| Some(RowClusters { ctas, segments, are_few });
            let (clusters, half_clusters) = (of(8, 4, few), of(4, 8, half_few));
            let shape =
                Shape { segments: 1536, streamed_at_once: Some(2), clusters, half_clusters, multiprocessors: 132 };
            choose(None, |variant| fit(variant, shape)).unwrap()
        };
        assert_eq!([true, false].map(|half_few| chosen(true, half_few)), [Variant::Cluster; 2]);
        assert_eq!(chosen(false, true), Variant::HalfCluster);
        assert_eq!(chosen(false, false), Variant::Streamed);
    }

    #[test]
    fn docs_list_the_variants() {
        variants::check_docs("verify-sample", VariantList::of::<Variant>());
    }
}
