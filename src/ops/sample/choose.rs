//! Which kernel records the segments of rows, from their number and how they lie.

use crate::ops::draw::device::STREAM_WARPS;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that record segments.
    pub enum Variant: "sample" {
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
    /// Warps of a CTA that streams them, if the device has bulk copies and these can bring them.
    pub stream_warps: Option<u32>,
    pub multiprocessors: u32,
}

/// Segments of a warp from which on it pays to stream them, where all rows have 16 bits and where some have 32.
const STREAMED_SEGMENTS: usize = 1;
const STREAMED_SEGMENTS_32: usize = 3;

pub fn fit(variant: Variant, s: Shape) -> Fit {
    let Some(warps) = s.stream_warps else {
        return match variant {
            Variant::Streamed => {
                Fit::Cannot("rows do not lie side by side from 16 bytes on, or the device has no bulk copies")
            }
            Variant::Loaded => Fit::Takes,
        };
    };
    let least = if warps == STREAM_WARPS { STREAMED_SEGMENTS } else { STREAMED_SEGMENTS_32 };
    let are_many = s.segments >= least * warps as usize * s.multiprocessors as usize;
    match variant {
        Variant::Streamed if !are_many => Fit::Slower,
        _ => Fit::Takes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{self, VariantList, choose};

    #[test]
    fn many_segments_are_streamed_where_bulk_copies_bring_them() {
        let chosen = |segments, stream_warps| {
            choose(None, |variant| fit(variant, Shape { segments, stream_warps, multiprocessors: 132 })).unwrap()
        };
        let rows = |rows: usize| rows * 32;
        assert_eq!([64, 96].map(|few| chosen(rows(few), Some(STREAM_WARPS / 2))), [Variant::Loaded, Variant::Streamed]);
        assert_eq!([1, 8].map(|batch| chosen(rows(batch * 6), Some(STREAM_WARPS))), [Variant::Loaded; 2]);
        assert_eq!(chosen(rows(128 * 6), Some(STREAM_WARPS)), Variant::Streamed);
        assert_eq!(chosen(rows(128 * 6), None), Variant::Loaded);
    }

    #[test]
    fn docs_list_the_variants() {
        variants::check_docs("verify-sample", VariantList::of::<Variant>());
    }
}
