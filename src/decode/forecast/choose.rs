//! Which kernels project, from the map and the batch.

use crate::runtime::cuda::variants::{Fit, variants};

/// Rows of the batch that a CTA takes at a time: M of a product of matrices on tensor cores.
pub const BATCH_ROWS: usize = 16;

variants! {
    /// Ways to add up the slices of the inputs that the CTAs multiply.
    pub enum Variant: "forecast" {
        /// Low rank, one group of rows: clusters of CTAs add the slices up. Two launches.
        Cluster = "cluster",
        /// Low rank, one group of rows: the second launch adds the slices up. Two launches.
        Slices = "slices",
        /// Low rank, several groups of rows: a launch of its own adds the slices up. Three launches.
        Sums = "sums",
        /// Full rank: the second launch, which has no product, adds the slices up. Two launches.
        FullRank = "full_rank",
    }
}

/// What the choice depends on.
#[derive(Clone, Copy)]
pub struct Projection {
    /// The map is one matrix, and not two factors of low rank.
    pub is_full_rank: bool,
    pub batch: usize,
    /// Slices of the inputs.
    pub slices: usize,
    /// Whether clusters of 1, 2, 4, 8 and 16 CTAs can run.
    pub runs_clusters: [bool; 5],
}

pub fn fit(variant: Variant, p: Projection) -> Fit {
    let is_one_group = p.batch <= BATCH_ROWS;
    let low_rank = Fit::Takes.unless(p.is_full_rank, "the map is of full rank");
    match variant {
        Variant::Cluster => low_rank
            .unless(
                !p.runs_clusters[cluster(p.slices).trailing_zeros() as usize],
                "the device cannot run such clusters",
            )
            .unless(!is_one_group, "there are more than 16 rows"),
        Variant::Slices => low_rank.unless(!is_one_group, "there are more than 16 rows"),
        Variant::Sums => low_rank.unless(is_one_group, "there are up to 16 rows"),
        Variant::FullRank => Fit::Takes.unless(!p.is_full_rank, "the map is of low rank"),
    }
}

/// CTAs of a cluster that adds up so many slices.
pub fn cluster(slices: usize) -> usize {
    slices.next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn slices_are_added_up_by_clusters_where_the_rows_are_few_and_the_device_runs_them() {
        let decode = Projection { is_full_rank: false, batch: 1, slices: 5, runs_clusters: [true; 5] };
        let chosen = |p| choose(None, |variant| fit(variant, p)).unwrap();
        assert_eq!([1, 16].map(|batch| chosen(Projection { batch, ..decode })), [Variant::Cluster; 2]);
        assert_eq!([17, 256].map(|batch| chosen(Projection { batch, ..decode })), [Variant::Sums; 2]);
        let small = Projection { runs_clusters: [true, true, true, false, false], ..decode };
        assert_eq!(chosen(small), Variant::Slices, "five slices take a cluster of eight");
        assert_eq!(chosen(Projection { slices: 4, ..small }), Variant::Cluster);
        for batch in [1, 17] {
            assert_eq!(chosen(Projection { is_full_rank: true, batch, ..decode }), Variant::FullRank);
        }
    }

    #[test]
    fn docs_name_the_variants() {
        variants::check_docs("forecast", VariantList::of::<Variant>());
    }
}
