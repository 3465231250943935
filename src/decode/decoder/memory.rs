//! The memory of a decoder: one allocation where its session computes, and what lies where in it.

use super::options::{Method, Options, Strategy};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::ops::index::GROUP;
use crate::runtime::Session;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

const ALIGNMENT: usize = 256;

/// Offsets in bytes.
pub struct Plan {
    /// The thresholds that layers have, each once, and which of them a layer has.
    pub thresholds: Vec<i32>,
    pub class_of: Vec<usize>,
    pub thresholds_at: usize,
    /// [classes, Kind::COUNT, max_rows] int32; see `Kind`.
    pub lens: usize,
    /// [max_rows] int32: the positions of each row that takes part in the step.
    pub rows: usize,
    /// [max_rows] int32: the first token whose block is summarised anew.
    pub from: usize,
    /// [max_rows, Hk, cap] int32: the selected lists of the layer at work.
    pub ids: usize,
    /// [layers, max_rows, Hk] int32 each: the counts of selected and of predicted lists, and of missed blocks.
    pub counts: usize,
    pub predicted_counts: usize,
    pub missed: usize,
    /// [max_rows, Hk, cap] int32 of each layer whose strategy makes lists ahead.
    pub predicted: Vec<usize>,
    /// [max_rows] int32: the position of each row's token, and [max_rows, Hq, D]: foreseen queries.
    pub places: usize,
    pub queries: usize,
    /// [max_rows, Hq, cap, Dv] and twice [max_rows, Hq, cap] float32: partials of the predicted list of the layer at work.
    pub partials: [usize; 3],
    /// [max_rows, Hk, max_blocks] float32: the scores of the layer at work.
    pub scores: usize,
    /// [max_sequences, Hk, max_blocks] float32, level and trend of each layer whose scores are remembered.
    pub holt: Vec<[usize; 2]>,
    /// [max_sequences]: the decaying numbers of accepted tokens and of trials, float32 both, then the details of
    /// `vwd_decoder_info`.
    pub hits: usize,
    pub trials: usize,
    pub acceptance: usize,
    pub draft_lens: usize,
    pub drafted: usize,
    pub accepted: usize,
    /// The two tensors of each layer's summaries.
    pub summaries: Vec<[usize; 2]>,
    pub bytes: usize,
}

/// What `lens` has of each row, for each class of layers. A row that does not take part has 0.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Positions that attend a selection.
    Sparse,
    /// Positions that attend all tokens.
    Dense,
    /// Sparse positions of rows whose earlier tokens are all summarised.
    Known,
    /// Sparse positions of the other rows: what is foreseen of them would be of summaries that are not there yet.
    New,
    /// Tokens, if the row is sparse.
    Tokens,
}

impl Kind {
    pub const COUNT: usize = 5;
}

/// The dtype of MINMAX's summaries.
pub fn extremes(dtype: DType) -> DType {
    if dtype.is_float8() { DType::F16 } else { dtype }
}

/// The numbers of channels of a block's two summaries, and their dtypes.
pub fn summary_rows(options: &Options, method: Method) -> [(usize, DType); 2] {
    let dim = options.dims[0];
    match method {
        Method::Dense => [(0, DType::U8); 2],
        Method::MinMax => [(dim, extremes(options.dtype)); 2],
        Method::Axis => [(dim, DType::U8), (4 * dim.div_ceil(GROUP), DType::F16)],
    }
}

impl Plan {
    pub fn of(options: &Options) -> Result<Plan> {
        let mut thresholds: Vec<i32> = options.layers.iter().map(|policy| policy.threshold).collect();
        thresholds.sort_unstable();
        thresholds.dedup();
        let class = |threshold: i32| thresholds.iter().position(|&t| t == threshold).expect("a layer's threshold");
        let class_of = options.layers.iter().map(|policy| class(policy.threshold)).collect();
        let mut end = Some(0usize);
        let mut take = |factors: &[usize]| {
            let begin = end.unwrap_or(0);
            let bytes = factors.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
            end = end.zip(bytes).and_then(|(end, bytes)| end.checked_add(bytes)?.checked_next_multiple_of(ALIGNMENT));
            begin
        };
        const WORD: usize = 4;
        let Options { max_rows, max_sequences, query_heads, kv_heads, dims, pages, max_blocks, .. } = *options;
        let (sequences, layers) = ([max_sequences, WORD], options.layers.len());
        let some = |uses: fn(Strategy) -> bool| options.layers.iter().any(|policy| uses(policy.strategy)) as usize;
        let [foresees, repairs, remembers] =
            [some(Strategy::foresees), some(Strategy::repairs), some(Strategy::remembers)];
        let partials = repairs * options.predicted_capacity();
        let mut plan = Plan {
            thresholds_at: take(&[thresholds.len(), WORD]),
            lens: take(&[thresholds.len(), Kind::COUNT, max_rows, WORD]),
            rows: take(&[max_rows, WORD]),
            from: take(&[max_rows, WORD]),
            ids: take(&[max_rows, kv_heads, options.capacity(), WORD]),
            counts: take(&[layers, max_rows, kv_heads, WORD]),
            predicted_counts: take(&[layers, max_rows, kv_heads, WORD]),
            missed: take(&[layers, max_rows, kv_heads, WORD]),
            predicted: Vec::new(),
            places: take(&[foresees, max_rows, WORD]),
            queries: take(&[foresees, max_rows, query_heads, dims[0], WORD]),
            partials: [dims[1], 1, 1].map(|channels| take(&[max_rows, query_heads, partials, channels, WORD])),
            scores: take(&[remembers, max_rows, kv_heads, max_blocks, WORD]),
            holt: Vec::new(),
            hits: take(&sequences),
            trials: take(&sequences),
            acceptance: take(&sequences),
            draft_lens: take(&sequences),
            drafted: take(&sequences),
            accepted: take(&sequences),
            summaries: Vec::new(),
            bytes: 0,
            thresholds,
            class_of,
        };
        for policy in &options.layers {
            let capacity = if policy.strategy == Strategy::Serial { 0 } else { policy.predicted_capacity() };
            plan.predicted.push(take(&[max_rows, kv_heads, capacity, WORD]));
            let remembered = policy.strategy.remembers() as usize;
            plan.holt.push([0; 2].map(|_| take(&[remembered, max_sequences, kv_heads, max_blocks, WORD])));
            let rows = summary_rows(options, policy.method);
            let per_page = options.blocks_per_page();
            plan.summaries
                .push(rows.map(|(channels, dtype)| take(&[pages, per_page, kv_heads, channels, dtype.bytes()])));
        }
        match end {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(Plan { bytes, ..plan }),
            _ => Err(Error::argument("options", "more than 2^63 bytes", "sizes that fit in memory")),
        }
    }
}

/// Zeros at first; given back on drop.
pub struct Memory {
    session: Arc<Session>,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: an allocation that the decoder alone uses; its calls are ordered by the caller.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn alloc(session: &Arc<Session>, plan: &Plan) -> Result<Memory> {
        let bytes = plan.bytes;
        let data = match session.cuda() {
            None => {
                // SAFETY: a plan has bytes.
                let data = unsafe { alloc_zeroed(Memory::layout(bytes)) };
                if data.is_null() {
                    return Err(Error::out_of_memory(bytes, "a decoder"));
                }
                data
            }
            Some(cuda) => cuda.alloc(bytes)? as *mut u8,
        };
        let memory = Memory { session: session.clone(), data, bytes };
        if let Some(cuda) = session.cuda() {
            // SAFETY: the memory was allocated above.
            cuda.with_copy_stream(|stream| unsafe { stream.fill(data as u64, 0, bytes) })?;
        }
        memory.write(plan.thresholds_at, &plan.thresholds)?;
        Ok(memory)
    }

    /// Sets bytes where the plan has room for them; nothing else uses the memory meanwhile.
    pub fn fill(&self, offset: usize, byte: u8, bytes: usize) -> Result<()> {
        assert!(offset + bytes <= self.bytes, "bytes inside the plan");
        match self.session.cuda() {
            None => {
                // SAFETY: inside the memory, which nothing else uses.
                unsafe { self.at::<u8>(offset).write_bytes(byte, bytes) };
                Ok(())
            }
            Some(cuda) => cuda.with_copy_stream(|stream| {
                // SAFETY: as above.
                unsafe { stream.fill(self.at::<u8>(offset) as u64, byte, bytes) }
            }),
        }
    }

    /// Writes values where the plan has room for them; nothing else uses the memory meanwhile.
    pub fn write<T: Copy>(&self, offset: usize, values: &[T]) -> Result<()> {
        assert!(offset + size_of_val(values) <= self.bytes, "values inside the plan");
        match self.session.cuda() {
            None => {
                // SAFETY: inside the memory, which nothing else uses.
                unsafe { self.at::<T>(offset).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
                Ok(())
            }
            // SAFETY: as above.
            Some(cuda) => cuda.with_copy_stream(|stream| unsafe { stream.write(self.at::<T>(offset) as u64, values) }),
        }
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, ALIGNMENT).expect("a plan's size")
    }

    pub fn at<T>(&self, offset: usize) -> *mut T {
        self.data.wrapping_add(offset).cast()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.session.cuda() {
            // SAFETY: allocated with this layout.
            None => unsafe { dealloc(self.data, Memory::layout(self.bytes)) },
            Some(cuda) => cuda.free(self.data as u64),
        }
    }
}
