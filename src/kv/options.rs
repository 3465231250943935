//! The options of a cache, and the layout of its runs.

use crate::abi::{VWD_CODING_EXACT, VWD_CODING_INT4, VWD_SLOTS_AS_STORED, VWD_SLOTS_DECODED, vwd_kv_cache_options};
use crate::core::allocate::collected;
use crate::core::array::array;
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::ops::int4;
use crate::ops::option_checks::{key_dims, key_dtype, require_counts};
use crate::runtime::require_no_flags;

/// The number of blocks that a sequence's tail has slots for: the two newest, which lists may name, and one that the next tokens
/// may begin meanwhile.
pub const TAIL_BLOCKS: usize = 3;

/// The alignment in bytes of a run and of its parts.
const ALIGNMENT: usize = 64;

/// The options of a cache: those of its layers, which differ in their slots and weights alone.
pub struct CacheOptions {
    /// The options of the layer with the fewest slots.
    pub fewest: Options,
    /// The slots of each layer; none if all layers have as many.
    slots: Vec<usize>,
    /// The weights of key channels, [layers, Hk, D], finite numbers above 0; none if all are 1.
    weights: Vec<f32>,
}

impl CacheOptions {
    /// # Safety
    /// `layer_slots` is NULL or has `layers` numbers.
    pub unsafe fn from_c(c: &vwd_kv_cache_options) -> Result<CacheOptions> {
        require_counts(&[("options.layers", c.layers)])?;
        const PURPOSE: &str = "the slots of a KV cache's layers";
        if c.layer_slots.is_null() {
            let fewest = Options::from_c(c, c.slots, "options.slots")?;
            return Ok(CacheOptions { fewest, slots: vec![], weights: vec![] });
        }
        if c.slots != 0 {
            return Err(Error::argument("options.slots", c.slots, "0 with options.layer_slots"));
        }
        // SAFETY: says the caller.
        let given = unsafe { array("options.layer_slots", c.layer_slots, c.layers as usize, "numbers")? };
        let mut fewest: Option<Options> = None;
        for (n, &slots) in given.iter().enumerate() {
            let options = Options::from_c(c, slots, &format!("options.layer_slots[{n}]"))?;
            if fewest.is_none_or(|fewest| options.slots < fewest.slots) {
                fewest = Some(options);
            }
        }
        let fewest = fewest.expect("at least one layer");
        let slots = collected(given.iter().map(|&slots| slots as usize), PURPOSE)?;
        Ok(CacheOptions { fewest, slots, weights: vec![] })
    }

    /// Takes the weights of key channels.
    ///
    /// # Safety
    /// `weights` is NULL or has [layers, Hk, D] numbers.
    pub unsafe fn with_weights(self, weights: *const f32) -> Result<CacheOptions> {
        if weights.is_null() {
            return Ok(self);
        }
        let count = self.fewest.layers * self.weights_of_layer();
        // SAFETY: says the caller.
        let given = unsafe { array("options.weights", weights, count, "weights")? };
        let weights = collected(given.iter().map(|&w| int4::valid_weight(w)), "the weights of a KV cache")?;
        Ok(CacheOptions { weights, ..self })
    }

    fn weights_of_layer(&self) -> usize {
        self.fewest.kv_heads * self.fewest.dims[0]
    }

    /// The weights of a layer, [Hk, D], if it has any.
    pub fn weights(&self, layer: usize) -> Option<&[f32]> {
        let count = self.weights_of_layer();
        (!self.weights.is_empty()).then(|| &self.weights[layer * count..][..count])
    }

    pub fn layer(&self, layer: usize) -> Options {
        Options { slots: self.slots.get(layer).copied().unwrap_or(self.fewest.slots), ..self.fewest }
    }

    pub fn layers(&self) -> impl ExactSizeIterator<Item = Options> {
        (0..self.fewest.layers).map(|layer| self.layer(layer))
    }

    /// Layers that are alike: the options and the number of each kind.
    pub fn kinds(&self) -> impl Iterator<Item = (Options, usize)> {
        let kinds = self.slots.len().max(1);
        (0..kinds).map(move |layer| (self.layer(layer), self.fewest.layers / kinds))
    }
}

#[derive(Clone, Copy)]
pub struct Options {
    pub layers: usize,
    pub kv_heads: usize,
    /// S, the number of tokens of a block.
    pub block_size: usize,
    /// D and Dv, the numbers of channels of a key and of a value.
    pub dims: [usize; 2],
    pub dtype: DType,
    pub token_scales: bool,
    /// Whether blocks are coded in INT4 once they are whole.
    pub is_coded: bool,
    /// Whether slots hold what codes stand for.
    pub is_decoded: bool,
    pub max_sequences: usize,
    pub max_blocks: usize,
    pub host_blocks: usize,
    /// The number of slots of the layer that blocks are fetched into.
    pub slots: usize,
    pub hold: usize,
}

impl Options {
    /// The options of a layer with so many slots, which the option of that name gives.
    fn from_c(c: &vwd_kv_cache_options, slots: u32, name: &str) -> Result<Options> {
        require_no_flags("options.flags", c.flags)?;
        require_no_flags("options.reserved", c.reserved)?;
        let counts = [
            ("options.layers", c.layers),
            ("options.kv_heads", c.kv_heads),
            ("options.block_size", c.block_size),
            ("options.max_sequences", c.max_sequences),
            ("options.max_blocks", c.max_blocks),
            ("options.host_blocks", c.host_blocks),
            (name, slots),
        ];
        require_counts(&counts)?;
        let dims = key_dims(c.key_dim, c.value_dim)?;
        let dtype = key_dtype(c.dtype_code, c.dtype_bits)?;
        let token_scales = match c.token_scales {
            0 => false,
            1 if dtype.is_float8() => true,
            1 => return Err(Error::argument("options.token_scales", format!("1 for {dtype}"), "0 but for FP8")),
            other => return Err(Error::argument("options.token_scales", other, "0 or 1")),
        };
        let is_coded = coding(c, dtype)?;
        let is_decoded = match c.slot_coding {
            VWD_SLOTS_AS_STORED => false,
            VWD_SLOTS_DECODED if is_coded => true,
            VWD_SLOTS_DECODED => {
                let found = "VWD_SLOTS_DECODED with VWD_CODING_EXACT";
                return Err(Error::argument(
                    "options.slot_coding",
                    found,
                    "VWD_CODING_INT4 beside it: nothing else is decoded",
                ));
            }
            other => {
                return Err(Error::argument("options.slot_coding", other, "VWD_SLOTS_AS_STORED or VWD_SLOTS_DECODED"));
            }
        };
        let options = Options {
            layers: c.layers as usize,
            kv_heads: c.kv_heads as usize,
            block_size: c.block_size as usize,
            dims,
            dtype,
            token_scales,
            is_coded,
            is_decoded,
            max_sequences: c.max_sequences as usize,
            max_blocks: c.max_blocks as usize,
            host_blocks: c.host_blocks as usize,
            slots: slots as usize,
            hold: if c.hold == 0 { 2 } else { c.hold as usize },
        };
        if options.hold > options.slots {
            let expected = format!("at most the {slots} of {name}, of which each resolve may name slots / hold");
            return Err(Error::argument("options.hold", options.hold, expected));
        }
        options.check_counts(name)?;
        Ok(options)
    }

    /// Checks that the numbers of slots and tokens fit in 32 bits.
    fn check_counts(&self, slots: &str) -> Result<()> {
        let fits = |a: usize, b: usize| a.checked_mul(b).is_some_and(|n| n <= i32::MAX as usize);
        let small = |name: &str, found: String| Err(Error::argument(name, found, "at most 2^31 − 1 together"));
        if !fits(self.host_blocks, self.kv_heads) {
            return small("options.host_blocks", format!("{} of {} KV heads", self.host_blocks, self.kv_heads));
        }
        if !fits(self.max_blocks, self.block_size) {
            return small("options.max_blocks", format!("{} of {} tokens", self.max_blocks, self.block_size));
        }
        let tails = self.max_sequences.saturating_mul(self.tail_pages()).saturating_mul(self.kv_heads);
        if !fits(tails.saturating_add(self.slots), 1) {
            return small(slots, format!("{} and {tails} for the tails", self.slots));
        }
        if !fits(self.max_sequences, self.max_blocks) {
            return small("options.max_sequences", format!("{} of {} blocks", self.max_sequences, self.max_blocks));
        }
        Ok(())
    }

    /// The number of a sequence's tail pages: where blocks are coded, the first block of a sequence has one of its own for good.
    pub fn tail_pages(&self) -> usize {
        TAIL_BLOCKS + self.is_coded as usize
    }

    /// The number of slots of the tails, which precede the slots that blocks are fetched into.
    pub fn tail_slots(&self) -> usize {
        self.max_sequences * self.tail_pages() * self.kv_heads
    }

    /// The number of runs of codes of the blocks in tails: those that are made when a block becomes whole.
    fn coded_tail_runs(&self) -> usize {
        if self.is_coded { self.max_sequences * TAIL_BLOCKS * self.kv_heads } else { 0 }
    }

    pub fn total_slots(&self) -> usize {
        self.tail_slots() + self.slots
    }

    /// The tail page of block `n` of a sequence while the block is one of the newest: a slot for each KV head.
    pub fn tail_page(&self, sequence: usize, n: usize) -> usize {
        let page = if self.is_first(n as i64) { TAIL_BLOCKS } else { n % TAIL_BLOCKS };
        sequence * self.tail_pages() + page
    }

    /// Whether a block is never coded and keeps its tail page.
    pub fn is_first(&self, n: i64) -> bool {
        self.is_coded && n == 0
    }

    /// The run of codes of block `n` of a sequence, of a KV head, while the block is one of the newest.
    pub fn coded_tail_run(&self, sequence: usize, n: usize, head: usize) -> usize {
        (sequence * TAIL_BLOCKS + n % TAIL_BLOCKS) * self.kv_heads + head
    }

    /// The number of a layer's runs in host memory.
    pub fn host_runs(&self) -> usize {
        self.host_blocks * self.kv_heads
    }

    /// The bytes of a layer's runs in host memory.
    pub fn host_bytes(&self) -> u64 {
        self.host_runs() as u64 * self.run().bytes as u64
    }

    /// Where the slots begin that blocks are fetched into, in a layer's pool: those of the tails lie before them.
    pub fn first_slot_at(&self) -> u64 {
        self.tail_slots() as u64 * self.tail_run().bytes as u64
    }

    /// Where the codes of the blocks in tails begin.
    pub fn coded_tails_at(&self) -> u64 {
        self.first_slot_at() + self.slots as u64 * self.slot_run().bytes as u64
    }

    /// The bytes of a layer's pool.
    pub fn pool_bytes(&self) -> u64 {
        self.coded_tails_at() + self.coded_tail_runs() as u64 * self.run().bytes as u64
    }

    /// [max_sequences, max_blocks]: the tail page of each block.
    pub fn tail_table(&self) -> Result<Vec<i32>> {
        let pages = (0..self.max_sequences * self.max_blocks)
            .map(|n| self.tail_page(n / self.max_blocks, n % self.max_blocks) as i32);
        collected(pages, "the pages of a KV cache's tails")
    }

    /// The number of a layer's weights, [Hk, D]; 0 where blocks are not coded.
    pub fn weights(&self) -> usize {
        if self.is_coded { self.kv_heads * self.dims[0] } else { 0 }
    }

    /// How a block lies on the host.
    pub fn run(&self) -> Run {
        if self.is_coded { Run::coded(self) } else { Run::exact(self) }
    }

    /// How a block lies in the slots that it is fetched into.
    pub fn slot_run(&self) -> Run {
        if self.is_decoded { Run::exact(self) } else { self.run() }
    }

    /// Whether the slots that blocks are fetched into hold codes.
    pub fn has_coded_slots(&self) -> bool {
        self.is_coded && !self.is_decoded
    }

    /// How a block lies in a tail.
    pub fn tail_run(&self) -> Run {
        Run::exact(self)
    }

    /// The largest number of entries of a resolve of the caller's: `hold` resolves one after the other find a slot for each of theirs.
    pub fn largest_selection(&self) -> usize {
        self.slots / self.hold
    }
}

/// The layout of a run, the memory of one block of one KV head: its keys, values and scales, one after the other, or their codes and the
/// mean key.
#[derive(Clone, Copy)]
pub struct Run {
    /// The keys, values, key scales and value scales.
    pub parts: [Part; 4],
    /// The offset of the mean key in bytes.
    pub mean: usize,
    pub bytes: usize,
}

/// The bytes of a code's scale.
const SCALE: usize = 1;

#[derive(Clone, Copy, Default)]
pub struct Part {
    /// The offset in bytes from the beginning of the run.
    pub begin: usize,
    /// The bytes of a token; 0 if the run has no such part.
    pub token: usize,
}

impl Run {
    fn exact(options: &Options) -> Run {
        let [key, value] = options.dims.map(|dim| dim * options.dtype.bytes());
        let scale = if options.token_scales { size_of::<f32>() } else { 0 };
        Run::of_parts([key, value, scale, scale], options.block_size, 0)
    }

    fn coded(options: &Options) -> Run {
        let [key, value] = options.dims.map(|dim| dim / 2);
        Run::of_parts([key, value, SCALE, SCALE], options.block_size, options.dims[0] * options.dtype.bytes())
    }

    /// Parts of so many bytes a token, and a mean.
    fn of_parts(tokens: [usize; 4], block_size: usize, mean_bytes: usize) -> Run {
        let (mut parts, mut end) = ([Part::default(); 4], 0);
        for (part, token) in parts.iter_mut().zip(tokens) {
            *part = Part { begin: end, token };
            end = (end + token * block_size).next_multiple_of(ALIGNMENT);
        }
        Run { parts, mean: end, bytes: (end + mean_bytes).next_multiple_of(ALIGNMENT) }
    }
}

/// Whether blocks are coded, and whether they may be.
fn coding(c: &vwd_kv_cache_options, dtype: DType) -> Result<bool> {
    match c.coding {
        VWD_CODING_EXACT if c.weights.is_null() => return Ok(false),
        VWD_CODING_EXACT => {
            return Err(Error::argument("options.weights", "given", "NULL but for VWD_CODING_INT4"));
        }
        VWD_CODING_INT4 => {}
        other => return Err(Error::argument("options.coding", other, "VWD_CODING_EXACT or VWD_CODING_INT4")),
    }
    int4::check_sizes("options.", c.block_size as usize, [c.key_dim, c.value_dim].map(|dim| dim as usize), dtype)?;
    Ok(true)
}
