//! How the kernels that take chunks of lists (mma, general, verify128) split the units of all lists: by what there is to do, or in a
//! batch-invariant session at fixed places.

use super::params::Params;
use super::plan::Sizes;
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::{Divisor, kernel_constants};

/// Work items among which a warp of each CTA can find the CTA's share.
const FEW_ITEMS: u32 = 32;
/// A CtaShare of kernels/attention/attention.cuh.
const CTA_SHARE_BYTES: usize = 48;

kernel_constants! {
    /// Counters that the last CTA of a launch makes zero where CTAs find their shares themselves: one of each CTA, and one that it arrives at.
    const CLEARED_COUNTERS: u32 = 256;
}

/// Where chunks begin.
#[derive(Clone, Copy)]
pub enum Cut {
    /// All lists together are split into about so many chunks beside one for each work item.
    Evenly(u32),
    /// At the same units in every list.
    At(FixedChunks),
}

/// FixedChunks of kernels/attention/attention.cuh, which has the rule: `octave` chunks of the least units, then as many whenever the number of
/// units has doubled.
#[derive(Clone, Copy)]
pub struct FixedChunks {
    least_units: u32,
    octave: u32,
}

impl FixedChunks {
    /// Tokens of the smallest chunks at least, and of a list that has a chunk for each of its places.
    const LEAST_TOKENS: u64 = 512;
    const MOST_TOKENS: u64 = 8192;
    const MOST_OCTAVE: u64 = 8;

    /// `at_once` chunks run at a time. A chunk costs what it takes to begin and to join it, and the longest ones have to be short enough that all
    /// places end together.
    pub fn new(sizes: &Sizes, at_once: u32) -> FixedChunks {
        let (lists, at_once) = (sizes.split_lists().max(1), u64::from(at_once));
        let octave = (at_once / lists / 2).clamp(1, Self::MOST_OCTAVE).ilog2();
        let tokens = (Self::MOST_TOKENS / at_once.div_ceil(lists).max(1)).max(Self::LEAST_TOKENS).ilog2();
        let unit_tokens = sizes.list_tokens.max(1).div_ceil(sizes.units.max(1));
        FixedChunks { least_units: ((1 << tokens) / unit_tokens).max(1) as u32, octave: 1 << octave }
    }

    /// Chunks of a list of so many units, at least one.
    fn count(self, units: u64) -> u64 {
        let (least, octave) = (u64::from(self.least_units), u64::from(self.octave));
        let smallest = units.div_ceil(least);
        if smallest <= octave {
            return smallest.max(1);
        }
        let doublings = ((smallest - 1) / octave).ilog2();
        u64::from(doublings) * octave + units.div_ceil(least << doublings)
    }
}

/// The chunks of a call.
pub struct Chunks {
    pub count: u32,
    /// States that go through scratch.
    pub states: u32,
    /// Whether attention_split runs first. Otherwise each CTA finds its share itself.
    pub is_split_first: bool,
}

impl Chunks {
    /// Tells the kernels how to split work items, of which each has `ctas` CTAs a chunk.
    pub fn plan(params: &mut Params, sizes: &Sizes, ctas: u32, cut: Cut) -> Result<Chunks> {
        let items = u64::from(params.work_items);
        let (count, states_if_many) = match cut {
            Cut::Evenly(more) => {
                params.target_chunks = Divisor::new(more.max(1));
                let most = sizes.units.div_ceil(params.least_units.into()).max(1);
                ((items + u64::from(more)).min(items * most), 2 * u64::from(more))
            }
            Cut::At(fixed) => {
                params.least_units = fixed.least_units.max(params.least_units);
                params.octave_chunks = fixed.octave;
                let count = items * FixedChunks { least_units: params.least_units, ..fixed }.count(sizes.units);
                (count, count)
            }
        };
        if count * u64::from(ctas) >= 1 << 31 {
            let text = format!("{items} lists in {count} chunks are more than the CUDA kernels count");
            return Err(Error::unsupported(text));
        }
        let are_few = params.work_items <= FEW_ITEMS && count * u64::from(ctas) < CLEARED_COUNTERS.into();
        let states = if are_few { count } else { states_if_many };
        Ok(Chunks { count: count as u32, states: states as u32, is_split_first: !are_few && params.octave_chunks == 0 })
    }

    /// Bytes of what attention_split writes.
    pub fn share_bytes(&self) -> usize {
        if self.is_split_first { (self.count as usize * CTA_SHARE_BYTES).next_multiple_of(256) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where chunk `n` begins, by the kernels' rule.
    fn begin(fixed: FixedChunks, n: u64) -> u64 {
        let (least, octave) = (u64::from(fixed.least_units), u64::from(fixed.octave));
        if n < octave { n * least } else { ((octave + n % octave) * least) << (n / octave - 1) }
    }

    #[test]
    fn fixed_chunks_are_as_many_as_begin_before_the_end() {
        for (least_units, octave) in [(1, 1), (32, 1), (32, 2), (32, 8), (5, 4)] {
            let fixed = FixedChunks { least_units, octave };
            for units in (0..3000).chain([8192, 8193, 1 << 20, (1 << 27) - 1]) {
                let count = fixed.count(units);
                assert!(count == 1 || begin(fixed, count - 1) < units, "{units} units");
                assert!(begin(fixed, count) >= units, "{units} units");
            }
        }
        // 131,072 tokens in tiles of 16 are 8192 units.
        assert_eq!([1, 2, 4, 8].map(|octave| FixedChunks { least_units: 32, octave }.count(8192)), [9, 16, 28, 48]);
    }
}
