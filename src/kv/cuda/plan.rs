//! The memory on the device that tells of a cache: the bookkeeping of each layer, and the tables that all layers share.

use super::params::{Cache, Clock, Full, Layer, Missed, Tail, ToCopy};
use crate::core::status::{Error, Result};
use crate::kv::options::{Options, TAIL_BLOCKS};
use crate::runtime::cuda::layout::Divisor;

/// The alignment of each array in bytes.
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

/// Where the arrays of a layer lie, in bytes from the beginning of its bookkeeping. Layer of kernels/cache/params.cuh says what
/// each is.
pub struct Bookkeeping {
    pub clock: u64,
    pub tails: u64,
    pub named: u64,
    pub to_copy: u64,
    pub claims: u64,
    pub others: u64,
    pub full: u64,
    pub arrived: u64,
    pub weights: u64,
    /// From here on all bits are set at first; all bits before are clear.
    pub homes: u64,
    pub holds: u64,
    pub bytes: u64,
}

impl Bookkeeping {
    pub fn of(options: &Options) -> Bookkeeping {
        let Options { max_sequences, slots, .. } = *options;
        let mut arrays = Arrays { end: 0 };
        let mut plan = Bookkeeping {
            clock: arrays.of::<Clock>(1),
            tails: arrays.of::<Tail>(max_sequences),
            named: arrays.of::<u32>(slots),
            to_copy: arrays.of::<ToCopy>(slots),
            claims: arrays.of::<Missed>(slots),
            others: arrays.of::<Missed>(slots),
            full: arrays.of::<Full>(TAIL_BLOCKS * max_sequences),
            arrived: arrays.of::<u32>(max_sequences),
            weights: arrays.of::<f32>(options.weights()),
            homes: arrays.of::<u64>(options.host_runs()),
            holds: arrays.of::<u64>(slots),
            bytes: 0,
        };
        plan.bytes = arrays.end;
        plan
    }

    /// A layer whose bookkeeping begins at `base`.
    pub fn layer(&self, options: &Options, pool: *mut u8, host: *mut u8, base: u64) -> Layer {
        Layer {
            pool,
            slots_at: pool.wrapping_add(options.first_slot_at() as usize),
            coded_tails: pool.wrapping_add(options.coded_tails_at() as usize),
            weights: (base + self.weights) as *mut _,
            host,
            clock: (base + self.clock) as *mut _,
            tails: (base + self.tails) as *mut _,
            homes: (base + self.homes) as *mut _,
            holds: (base + self.holds) as *mut _,
            named: (base + self.named) as *mut _,
            to_copy: (base + self.to_copy) as *mut _,
            claims: (base + self.claims) as *mut _,
            others: (base + self.others) as *mut _,
            full: (base + self.full) as *mut _,
            arrived: (base + self.arrived) as *mut _,
            slots: options.slots as u32,
            unused: 0,
        }
    }
}

/// Where the tables that all layers share lie, in bytes from their beginning.
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

    /// A cache whose tables begin at `base`, of options whose parts of a run begin below 2^32.
    pub fn cache(&self, options: &Options, base: u64) -> Cache {
        let tail_run = options.tail_run();
        Cache {
            layers: (base + self.layers) as *mut _,
            table: (base + self.table) as *mut _,
            lens: (base + self.lens) as *mut _,
            run: options.run().bytes as u64,
            tail_run: tail_run.bytes as u64,
            slot_run: options.slot_run().bytes as u64,
            parts: tail_run.parts.map(|part| part.begin as u32),
            token: tail_run.parts.map(|part| part.token as u32),
            size: Divisor::new(options.block_size as u32),
            heads: Divisor::new(options.kv_heads as u32),
            layer_count: options.layers as u32,
            max_sequences: options.max_sequences as u32,
            max_blocks: options.max_blocks as u32,
            first_slot: options.tail_slots() as u32,
            hold: options.hold as u32,
            is_coded: options.is_coded as u32,
        }
    }
}

/// What the kernels count in 32 bits.
pub fn check_size(options: &Options) -> Result<()> {
    let run = options.run();
    let (run, entries) = (run.bytes as u64, options.kv_heads as u64);
    if run > u32::MAX as u64 {
        return Err(Error::unsupported(format!("options.block_size: runs of {run} bytes; CUDA takes fewer than 2^32")));
    }
    if options.slots > 1 << 30 || options.layers as u64 * entries > i32::MAX as u64 {
        let found = format!("{} slots, {} layers of {entries} KV heads", options.slots, options.layers);
        return Err(Error::unsupported(format!("options: {found}; CUDA takes up to 2^30 slots, and 2^31 KV heads")));
    }
    Ok(())
}
