//! Where what the device knows of a cache lies: the bookkeeping of a layer, and what all layers share.

use super::super::options::{Options, TAIL_BLOCKS};
use super::params::{Clock, Full, Layer, Missed, Tail, Travel};

/// Alignment of each array.
const ALIGNMENT: u64 = 256;

/// Arrays one after the other.
struct Arrays {
    end: u64,
}

impl Arrays {
    /// Where the next array begins.
    fn of<T>(&mut self, count: usize) -> u64 {
        let begin = self.end;
        self.end = (begin + (count * size_of::<T>()) as u64).next_multiple_of(ALIGNMENT);
        begin
    }
}

/// Of a layer, in bytes from its beginning. See Layer of kernels/cache/params.cuh.
pub struct Bookkeeping {
    pub clock: u64,
    pub tails: u64,
    pub named: u64,
    pub travels: u64,
    pub claims: u64,
    pub others: u64,
    pub full: u64,
    pub arrived: u64,
    /// From here on all bits are set at first, before it none is.
    pub homes: u64,
    pub holds: u64,
    pub bytes: u64,
}

impl Bookkeeping {
    pub fn of(options: &Options) -> Bookkeeping {
        let Options { max_sequences, slots, .. } = *options;
        let (entries, mut arrays) = (options.largest_selection(), Arrays { end: 0 });
        let mut plan = Bookkeeping {
            clock: arrays.of::<Clock>(1),
            tails: arrays.of::<Tail>(max_sequences),
            named: arrays.of::<u32>(slots),
            travels: arrays.of::<Travel>(slots),
            claims: arrays.of::<Missed>(entries),
            others: arrays.of::<Missed>(entries),
            full: arrays.of::<Full>(TAIL_BLOCKS * max_sequences),
            arrived: arrays.of::<u32>(max_sequences),
            homes: arrays.of::<u64>(options.host_runs()),
            holds: arrays.of::<u64>(slots),
            bytes: 0,
        };
        plan.bytes = arrays.end;
        plan
    }
}

/// Of all layers.
pub struct Tables {
    pub layers: u64,
    pub tail_table: u64,
    /// From here on all bits are set at first.
    pub table: u64,
    pub lens: u64,
    pub bytes: u64,
}

impl Tables {
    pub fn of(options: &Options) -> Tables {
        let (blocks, mut arrays) = (options.max_sequences * options.max_blocks, Arrays { end: 0 });
        let mut plan = Tables {
            layers: arrays.of::<Layer>(options.layers),
            tail_table: arrays.of::<i32>(blocks),
            table: arrays.of::<i32>(blocks),
            lens: arrays.of::<i32>(options.max_sequences),
            bytes: 0,
        };
        plan.bytes = arrays.end;
        plan
    }
}
