//! Which kernels select the top k of rows, from the sizes of a call and what the device has room for.

use crate::runtime::cuda::Parts;
use crate::runtime::cuda::layout::kernel_constants;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that select the top k of rows.
    pub enum Variant: "topk" {
        /// A CTA has a row of up to 8192 scores in half of its multiprocessor's registers.
        Short = "short",
        /// A first launch keeps what can be among the best of long rows; of that a CTA selects.
        Prefilter = "prefilter",
        /// A cluster of 1, 2, 4 or 8 CTAs takes a row.
        Cluster = "cluster",
    }
}

/// What a device has room for.
#[derive(Clone, Copy)]
pub struct Room {
    pub multiprocessors: usize,
    /// Shared memory beside what the kernels declare.
    pub bytes: usize,
}

kernel_constants! {
    /// Threads of the kernels for long rows.
    pub const THREADS: u32 = 1024 => "LONG";
    /// Threads of the kernels for short rows.
    pub const SHORT_THREADS: u32 = 512 => "SHORT";
    pub const PREFILTER_THREADS: u32 = 512;
    /// Keys of a CTA, in its registers or a chunk of shared memory.
    pub const CHUNK: usize = THREADS as usize * THREAD_KEYS => "CtaTopK<LONG>::MOST";
    /// Scores of the longest short row.
    pub const SHORT: usize = SHORT_THREADS as usize * THREAD_KEYS => "CtaTopK<SHORT>::MOST";
    /// Entries that a CTA of the prefilter keeps of its slice of a row, and slices of a row.
    pub const MOST_KEPT: usize = 6144;
    pub const MOST_SLICES: usize = 512;
    /// Scores of a row that the prefilter samples.
    pub const SAMPLE: usize = 8192;
    /// The most entries that the prefilter may expect to keep: more are not expected to fit in the registers of a CTA.
    pub const MOST_EXPECTED: f64 = 12288.0;
}

/// Keys of a thread, in its registers.
pub const THREAD_KEYS: usize = 16;
pub const CHUNK_BYTES: usize = CHUNK * size_of::<u32>();
/// Results that one CTA puts in order.
pub const MOST_SORTED: usize = 4096;
/// Chunks of a CTA: more would not fit in the largest shared memory beside what the kernels declare.
pub const MOST_CHUNKS: usize = 3;
pub const STATIC_BYTES: usize = 33 << 10;
/// Bytes of an entry that is selected or kept: a key and an index.
pub const ITEM_BYTES: usize = 8;
/// Scratch that the prefilter takes at most; a session's own arenas have as much.
pub const MOST_SCRATCH: usize = 16 << 20;

/// What a call asks for.
#[derive(Clone, Copy)]
pub struct Shape {
    pub rows: usize,
    /// Scores of a row.
    pub n: usize,
    /// The most that a row selects.
    pub most: usize,
    pub best_first: bool,
}

pub fn fit(variant: Variant, shape: &Shape, room: Room) -> Fit {
    let &Shape { rows, n, most, best_first } = shape;
    match variant {
        Variant::Short => Fit::Takes
            .unless(n > SHORT, "rows have more than 8192 scores")
            .unless(item_bytes(most, best_first) > room.bytes, "what a row selects does not fit in shared memory"),
        Variant::Prefilter => Fit::Takes.unless(
            slices(room, rows, n, most, best_first) == 0,
            "rows are short, or too much of them is wanted or expected to be left",
        ),
        Variant::Cluster => Fit::Takes,
    }
}

/// Bytes of shared memory for what a row selects.
pub fn item_bytes(most: usize, best_first: bool) -> usize {
    let places = if best_first { most.next_power_of_two().max(2) } else { most };
    places.saturating_mul(ITEM_BYTES)
}

/// Slices of each row, if it is worth a prefilter: a CTA for each, so many that all run at once. 0: it is not.
pub fn slices(room: Room, rows: usize, n: usize, most: usize, best_first: bool) -> usize {
    let count = (2 * room.multiprocessors / rows).clamp(1, n.div_ceil(SHORT).clamp(1, MOST_SLICES));
    // The kernel computes the same number of entries that are expected to be kept.
    let share = SAMPLE as f64 / n as f64;
    let expected = most as f64 * share;
    let kept = (expected + 8.0 * expected.sqrt() + 8.0) / share;
    let fits = kept <= MOST_EXPECTED.min((count * MOST_KEPT) as f64)
        && CHUNK_BYTES + item_bytes(most, best_first) <= room.bytes
        && scratch(rows, count).0.bytes <= MOST_SCRATCH;
    if n > CHUNK && most > 0 && most <= n / 16 && fits { count } else { 0 }
}

/// Scratch of the prefilter, and where in it the counts begin.
pub fn scratch(rows: usize, slices: usize) -> (Parts, usize) {
    let mut parts = Parts::default();
    parts.take(&[rows, slices, MOST_KEPT, ITEM_BYTES]);
    let kept_counts = parts.take(&[rows, slices, size_of::<u32>()]);
    (parts, kept_counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::variants::{VariantList, check_docs, choose};

    #[test]
    fn docs_name_the_variants() {
        check_docs("index-select", VariantList::of::<Variant>());
    }

    #[test]
    fn rows_that_fit_in_one_cta_take_no_cluster() {
        let chosen = |n, most| {
            choose(None, |variant| fit(variant, &Shape { rows: 8, n, most, best_first: false }, H200)).unwrap()
        };
        assert_eq!([chosen(1, 1), chosen(SHORT, SHORT)], [Variant::Short; 2]);
        assert_eq!([chosen(SHORT + 1, 128), chosen(CHUNK, 128)], [Variant::Cluster; 2]);
        assert_eq!([chosen(CHUNK + 1, 1), chosen(1 << 17, 2048)], [Variant::Prefilter; 2]);
        assert_eq!(chosen(1 << 17, (1 << 13) + 1), Variant::Cluster);
    }

    const H200: Room = Room { multiprocessors: 132, bytes: (227 << 10) - STATIC_BYTES };

    #[test]
    fn long_rows_are_prefiltered_by_as_many_ctas_as_run_at_once() {
        let ascending = |rows, n, k| slices(H200, rows, n, k, false);
        assert_eq!(ascending(1, 1 << 20, 2048), 128, "each has the scores of its registers");
        assert_eq!(
            (ascending(8, 1 << 20, 2048), ascending(64, 1 << 17, 128), ascending(300, 1 << 17, 2048)),
            (33, 4, 1)
        );
        assert_eq!(ascending(1, 1 << 22, 128), 264);
    }

    #[test]
    fn rows_are_not_prefiltered_where_too_much_would_be_left() {
        let ascending = |rows, n, k| slices(H200, rows, n, k, false);
        assert_eq!((ascending(1, CHUNK, 1), ascending(1, CHUNK + 1, 0), ascending(1, CHUNK + 1, 1)), (0, 0, 3));
        assert_eq!((ascending(1, 1 << 17, 1 << 13), ascending(1, 1 << 17, (1 << 13) + 1)), (16, 0));
        assert_eq!((ascending(200, 1 << 17, 4096), ascending(400, 1 << 17, 128), ascending(1, 1 << 24, 1)), (0, 0, 0));
        let small = Room { bytes: CHUNK_BYTES, ..H200 };
        assert_eq!(slices(small, 1, 1 << 17, 128, false), 0);
    }

    #[test]
    fn scratch_of_the_prefilter_is_what_an_arena_has() {
        for rows in [1, 7, 64, 131, 132, 264, 300] {
            let count = slices(H200, rows, 1 << 20, 128, true);
            assert!(count > 0 && scratch(rows, count).0.bytes <= MOST_SCRATCH, "{rows}");
        }
    }
}
