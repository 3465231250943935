//! What lies where in the memory of a decoder.

use super::options::{Method, NEWEST, Options, Policy, Strategy};
use crate::abi::{VWD_INDEX_AXIS, VWD_INDEX_MINMAX};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::ops::index::block_summaries;
use crate::runtime::Memory;

/// Offsets in bytes.
pub struct Plan {
    /// The thresholds that layers have, each once. Layers with the same one are a class, whose number is its place here.
    pub thresholds: Vec<i32>,
    /// The class of each layer: by its strategy, and where that gives way to SERIAL.
    pub class_of: Vec<[usize; 2]>,
    pub thresholds_at: usize,
    /// The windows of the layers of a decoder on a cache, each once.
    pub windows: Vec<i32>,
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
    pub tiered: TieredPlan,
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
    pub term: TermPlan,
    pub bytes: usize,
}

/// What a decoder keeps for the term of what lists leave out; of no size without it.
pub struct TermPlan {
    /// [max_rows] int32 each: the sums of which sequence a row has, the tokens that they are of, and the first one that is new.
    pub rows: usize,
    pub counted: usize,
    pub begin: usize,
    /// [max_sequences, Hk, 1, D, Dv or D·Dv], int32 and thrice float32, of each layer: tokens, means of keys and of values, covariance.
    pub sums: Vec<[usize; 4]>,
    /// [max_rows, max_positions, Hq] float32 of each layer: the weight of what its list leaves out.
    pub log_mass: Vec<usize>,
    /// [max_rows, max_positions, Hq, Dv] and twice [max_rows, max_positions, Hq] float32: the state that the term joins.
    pub state: [usize; 3],
}

/// What a decoder on a cache keeps beside that; of no size without a cache.
pub struct TieredPlan {
    /// [max_rows] int32: 0, 1, 2 …, the sequences of a step that names none.
    pub numbers: usize,
    /// [max_rows, max_blocks] int32 each, as `kv::RowTables`.
    pub blocks: usize,
    pub tails: usize,
    /// [max_rows] int32: the first token of each row that may be summarised anew, as `kv::RowTables`.
    pub floors: usize,
    /// [max_rows, Hk, cap] int32: slots of the selected lists, and of those made ahead, of the layer at work.
    pub slots: usize,
    pub predicted_slots: usize,
    /// [max_rows, Hk, cap] int32: the slots of what is fetched for a layer to come.
    pub foreseen_slots: usize,
    /// [max_rows, Hk, cap] int32, and [max_rows, Hk]: ids, slots and counts of what is resident of the selected list.
    pub resident: [usize; 3],
    /// [layers, max_rows, Hk] int32: blocks that were not resident.
    pub fetched: usize,
    /// [max_blocks] int32: 0, 1, 2 …, the ids of a list of all blocks; and [max_rows] int32: how many of them a row reads in host memory.
    pub every_block: usize,
    pub stored: usize,
    /// [windows] int32, the windows that layers have, each once; [windows, max_rows, seen_cap] and [windows, max_rows] int32: of these blocks, the
    /// ids and counts of those in the windows of a row's positions.
    pub windows_at: usize,
    pub seen: [usize; 2],
    pub seen_cap: usize,
    /// [max_rows, NEWEST] and [max_rows] int32: ids and counts of the blocks after these; and [max_rows, Hk, NEWEST]: their slots.
    pub newest: [usize; 2],
    pub newest_slots: usize,
    /// [max_rows, max_positions, Hq, Dv] and twice [max_rows, max_positions, Hq] float32: the state of attention over stored blocks.
    pub state: [usize; 3],
    /// [max_sequences, Hk, cap] and [max_sequences, Hk] int32 of each layer that remembers lists.
    pub past: Vec<[usize; 2]>,
}

/// What a number of `lens` counts; it has one for each class of layers, kind and row. A row that does not take part has 0.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Positions that attend a selection.
    Sparse,
    /// Positions that attend all tokens.
    Dense,
    /// Sparse positions of rows whose earlier tokens are all summarised.
    Known,
    /// Sparse positions of the other rows, for which nothing is foreseen: some of their blocks have no summaries yet.
    New,
    /// All tokens of the row, if it is sparse.
    Tokens,
}

impl Kind {
    pub const COUNT: usize = 5;
}

/// The numbers of channels of a block's two summaries, and their dtypes.
pub fn summary_rows(options: &Options, method: Method) -> [(usize, DType); 2] {
    let of_kind = |kind| block_summaries(kind, options.dims[0], options.dtype);
    match method {
        Method::Dense => [(0, DType::U8); 2],
        Method::MinMax => of_kind(VWD_INDEX_MINMAX),
        Method::Axis => of_kind(VWD_INDEX_AXIS),
    }
}

/// The windows through which layers of a decoder on a cache see less than a whole sequence, each once.
fn windows_of(options: &Options) -> Vec<i32> {
    let most = (options.table_blocks * options.block_size).min(i32::MAX as usize);
    let of_layers = options.layers.iter().map(|policy| policy.window as usize);
    let mut windows: Vec<i32> =
        of_layers.filter(|window| (1..most).contains(window)).map(|window| window as i32).collect();
    windows.sort_unstable();
    windows.dedup();
    windows
}

impl Plan {
    pub fn of(options: &Options) -> Result<Plan> {
        let both = |policy: &Policy| [policy.threshold, policy.serial_threshold];
        let mut thresholds: Vec<i32> = options.layers.iter().flat_map(both).collect();
        thresholds.sort_unstable();
        thresholds.dedup();
        let windows = windows_of(options);
        let class = |threshold: i32| thresholds.iter().position(|&t| t == threshold).expect("a layer's threshold");
        let class_of = options.layers.iter().map(|policy| both(policy).map(class)).collect();
        let mut room = Room { end: Some(0) };
        let mut take = |factors: &[usize]| room.take(factors);
        let Options { max_rows, max_positions, max_sequences, query_heads, kv_heads, dims, max_blocks, .. } = *options;
        let (sequences, layers) = ([max_sequences, WORD], options.layers.len());
        let some = |uses: fn(Strategy) -> bool| options.layers.iter().any(|policy| uses(policy.strategy)) as usize;
        let [foresees, repairs, remembers] =
            [some(Strategy::foresees), some(Strategy::repairs), some(Strategy::remembers)];
        let (tiered, ahead) = ((options.table_blocks > 0) as usize, options.predicted_capacity());
        let partials = (1 - tiered) * repairs * ahead;
        let places = foresees.max(tiered);
        let term = options.has_term as usize;
        let widest = windows.iter().max().map_or(0, |&window| window as usize);
        let seen_cap = options.most_seen_blocks(widest);
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
            tiered: TieredPlan {
                numbers: take(&[tiered, max_rows, WORD]),
                blocks: take(&[max_rows, options.table_blocks, WORD]),
                tails: take(&[max_rows, options.table_blocks, WORD]),
                floors: take(&[tiered, max_rows, WORD]),
                slots: take(&[tiered, max_rows, kv_heads, options.capacity(), WORD]),
                predicted_slots: take(&[tiered, max_rows, kv_heads, ahead, WORD]),
                foreseen_slots: take(&[tiered * foresees, max_rows, kv_heads, ahead, WORD]),
                resident: [options.capacity(), options.capacity(), 1]
                    .map(|cap| take(&[tiered * repairs, max_rows, kv_heads, cap, WORD])),
                fetched: take(&[tiered, layers, max_rows, kv_heads, WORD]),
                every_block: take(&[options.table_blocks, WORD]),
                stored: take(&[tiered, max_rows, WORD]),
                windows_at: take(&[windows.len(), WORD]),
                seen: [seen_cap, 1].map(|n| take(&[windows.len(), max_rows, n, WORD])),
                seen_cap,
                newest: [NEWEST, 1].map(|n| take(&[tiered, max_rows, n, WORD])),
                newest_slots: take(&[tiered, max_rows, kv_heads, NEWEST, WORD]),
                state: [dims[1], 1, 1].map(|n| take(&[tiered, max_rows, max_positions, query_heads, n, WORD])),
                past: Vec::new(),
            },
            places: take(&[places, max_rows, WORD]),
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
            term: TermPlan {
                rows: take(&[term, max_rows, WORD]),
                counted: take(&[term, max_rows, WORD]),
                begin: take(&[term, max_rows, WORD]),
                sums: Vec::new(),
                log_mass: Vec::new(),
                state: [dims[1], 1, 1].map(|n| take(&[term, max_rows, max_positions, query_heads, n, WORD])),
            },
            bytes: 0,
            thresholds,
            windows,
            class_of,
        };
        for policy in &options.layers {
            plan.add_layer(&mut room, options, policy);
        }
        match room.end {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(Plan { bytes, ..plan }),
            _ => Err(Error::argument("options", "more than 2^63 bytes", "sizes that fit in memory")),
        }
    }

    /// What one layer keeps.
    fn add_layer(&mut self, room: &mut Room, options: &Options, policy: &Policy) {
        let Options { max_rows, max_positions, max_sequences, query_heads, kv_heads, dims, pages, max_blocks, .. } =
            *options;
        let capacity = if policy.strategy == Strategy::Serial { 0 } else { policy.predicted_capacity() };
        self.predicted.push(room.take(&[max_rows, kv_heads, capacity, WORD]));
        let (listed, cap) = (policy.strategy.remembers_lists() as usize, policy.selected_capacity());
        self.tiered.past.push([cap, 1].map(|cap| room.take(&[listed, max_sequences, kv_heads, cap, WORD])));
        let remembered = policy.strategy.remembers() as usize;
        self.holt.push([0; 2].map(|_| room.take(&[remembered, max_sequences, kv_heads, max_blocks, WORD])));
        let term = options.has_term_in(policy) as usize;
        let sums = [1, dims[0], dims[1], dims[0] * dims[1]];
        self.term.sums.push(sums.map(|n| room.take(&[term, max_sequences, kv_heads, n, WORD])));
        self.term.log_mass.push(room.take(&[term, max_rows, max_positions, query_heads, WORD]));
        let per_page = options.blocks_per_page();
        self.summaries.push(
            summary_rows(options, policy.method)
                .map(|(channels, dtype)| room.take(&[pages, per_page, kv_heads, channels, dtype.bytes()])),
        );
    }
}

/// Bytes of an int32, and of a float32.
const WORD: usize = 4;

/// Memory that is given out from its beginning, in pieces that are aligned.
struct Room {
    /// Where the next piece begins; `None`: beyond what a number counts.
    end: Option<usize>,
}

impl Room {
    /// The offset of a piece of as many bytes as the product of `factors`.
    fn take(&mut self, factors: &[usize]) -> usize {
        let begin = self.end.unwrap_or(0);
        let bytes = factors.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
        let end = self.end.zip(bytes).and_then(|(end, bytes)| end.checked_add(bytes));
        self.end = end.and_then(|end| end.checked_next_multiple_of(Memory::ALIGNMENT));
        begin
    }
}
