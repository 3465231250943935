//! Threads of the kernels' CTAs, as their sources have them, and how many CTAs there are.

pub const FIND_THREADS: u32 = 128;
/// Slots that a warp of `give` looks at in a round.
pub const TURN: usize = 128;
/// Warps that a CTA of `give` has, unless its cluster would have to be larger than it can be.
pub const GIVE_WARPS: usize = 16;
pub const MOST_GIVE_THREADS: u32 = 1024;
pub const APPEND_THREADS: u32 = 128;
pub const APPEND_WARPS: usize = 4;
pub const FETCH_THREADS: u32 = 128;
/// Bulk copies under way in a CTA: four warps, four stages, 4 KiB.
pub const FETCH_ROOM: u32 = 64 << 10;
/// CTAs that keep the bus busy by bulk copies, by plain loads, and by stores to host memory.
pub const BULK_CTAS: u32 = 4;
pub const PLAIN_CTAS: usize = 32;
/// CTAs that decode what they fetch: half as many as the instructions of a run would need to keep up with the bus. Not measured.
pub const DECODE_CTAS: usize = 16;
pub const DECODE_THREADS: u32 = 256;
/// Two stages of the largest run of codes: 128 tokens of 256 channels, their scales, and a mean of float32.
pub const MOST_STAGES: u32 = 2 * (128 * (256 + 2) + 1024);
pub const WRITE_CTAS: u32 = 4;
pub const WRITE_THREADS: u32 = 256;
/// CTAs that code blocks: more than copies take, since a block's numbers take longer than its bytes.
pub const CODE_CTAS: usize = 16;
pub const CODE_THREADS: u32 = 128;
pub const SEQUENCE_THREADS: u32 = 256;
pub const DROP_CTAS: usize = 64;
/// CTAs of a multiprocessor that wait for memory side by side.
pub const RESIDENT_CTAS: usize = 7;

/// CTAs of `give`, one cluster of up to so many, and threads of each, for so many entries: the more of a warp's slots are
/// looked at in one round, the fewer rounds there are.
pub fn give(slots: usize, entries: usize, most_ctas: u32) -> (u32, u32) {
    /// Slots to look at for one that is given.
    const LOOKED_AT: usize = 4;
    let warps = slots.min(entries.saturating_mul(LOOKED_AT)).div_ceil(TURN).max(1);
    let ctas = warps.div_ceil(GIVE_WARPS).next_power_of_two().min(most_ctas as usize);
    let threads = 32 * warps.div_ceil(ctas).min(MOST_GIVE_THREADS as usize / 32);
    (ctas as u32, threads as u32)
}

#[cfg(test)]
mod tests {
    use super::give;

    #[test]
    fn give_looks_at_as_many_slots_in_a_round_as_it_may_need() {
        assert_eq!(give(8, 4, 8), (1, 32));
        assert_eq!(give(2048, 1024, 8), (1, 512));
        assert_eq!(give(16384, 8192, 8), (8, 512));
        assert_eq!(give(16384, 8192, 1), (1, 1024), "no clusters");
        assert_eq!(give(32768, 16384, 8), (8, 1024));
        assert_eq!(give(1 << 30, 1 << 29, 8), (8, 1024));
        assert_eq!(give(1 << 30, 64, 8), (1, 64), "few entries");
        assert_eq!(give(64, 0, 8), (1, 32), "no entries");
    }
}
