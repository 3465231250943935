//! What a decoder computes itself, row by row: who attends how, tokens to their pages, outputs together, and what was accepted.

use super::memory::Kind;
use super::options::Options;
use crate::core::tensor::Tensor;
use crate::ops::views::Pages;
use std::ops::Range;

/// The part of past numbers that remains after a verification.
pub const KEPT: f32 = 0.9;
/// Before anything is known: trials, and how many of them would have been accepted.
const PRIOR_TRIALS: f32 = 2.0;
const PRIOR_HITS: f32 = 1.6;

/// The probability that a draft is accepted, from the decaying numbers of accepted drafts and of trials.
pub fn acceptance(hits: f32, trials: f32) -> f32 {
    (hits + PRIOR_HITS) / (trials + PRIOR_TRIALS)
}

/// The strides in bytes of a sequence, position, head and channel of [B, (Q,) heads, channels].
pub fn steps(t: &Tensor) -> [i64; 4] {
    let position = if t.rank() == 4 { t.byte_stride(1) } else { 0 };
    [t.byte_stride(0), position, t.byte_stride(t.rank() - 2), t.byte_stride(t.rank() - 1)]
}

/// The mode that all rows of a step have, or a tensor of each row's mode.
#[derive(Clone, Copy)]
pub enum Modes<'a> {
    All(u32),
    /// [B]
    Each(Tensor<'a>),
}

/// Distributes the rows of a step: for each threshold, which attend a selection and which attend all tokens.
pub struct Distribute<'a> {
    pub modes: Modes<'a>,
    /// [B]
    pub seq_lens: Tensor<'a>,
    pub q_lens: Option<Tensor<'a>>,
    pub begin: Option<Tensor<'a>>,
    pub positions: usize,
    pub page_size: usize,
    /// The caller states that no row has fewer tokens; 0 where it states nothing.
    pub shortest: u32,
    pub classes: usize,
    /// Rows that `lens` has room for.
    pub max_rows: usize,
    pub thresholds: *const i32,
    pub lens: *mut i32,
    pub rows: *mut i32,
    pub from: *mut i32,
    /// Null where nothing is foreseen.
    pub places: *mut i32,
    /// On a tiered cache: what dense rows read from where.
    pub tiers: Option<Tiers>,
    /// Where rows have the term for what lists leave out: the tokens that it is of.
    pub counted: Option<Counted<'a>>,
}

/// The tokens of each row that means and covariance are of: those before the step, without the newest `drafts` of them, which may yet
/// be rejected.
#[derive(Clone, Copy)]
pub struct Counted<'a> {
    /// [B]; absent: row i is of sequence i.
    pub sequences: Option<Tensor<'a>>,
    /// Number of sequences.
    pub count: usize,
    pub drafts: usize,
    /// [max_rows] each: the sequence of a row that takes part, or −1; the number of tokens; the first one that is new or was replaced.
    pub rows: *mut i32,
    pub lens: *mut i32,
    pub begin: *mut i32,
}

/// The blocks of each row, which on a tiered cache are pages of one block: those that are read in host memory, and the newest ones.
#[derive(Clone, Copy)]
pub struct Tiers {
    /// The most blocks that a row has.
    pub table_blocks: usize,
    /// [max_rows]: the first token of the blocks that the cache has exact, which `begin` may have summarised anew.
    pub floors: *const i32,
    /// [max_rows]: the number of leading blocks that are read in host memory.
    pub stored: *mut i32,
    /// [windows]; and [windows, max_rows, seen_cap] and [windows, max_rows]: of these blocks, the ids and the number of those that a row's positions
    /// see through each window.
    pub windows: *const i32,
    pub window_count: usize,
    pub seen_cap: usize,
    pub seen_ids: *mut i32,
    pub seen_counts: *mut i32,
    /// [max_rows, NEWEST] and [max_rows]: ids and number of the blocks after them.
    pub newest_ids: *mut i32,
    pub newest_counts: *mut i32,
}

/// The blocks among the first `stored` ones with tokens that some position from `first` on sees through a window.
pub fn seen_blocks(stored: usize, block_size: usize, first: usize, window: usize) -> Range<usize> {
    stored.min((first + 1).saturating_sub(window) / block_size)..stored
}

impl Tiers {
    /// A decoder without a cache has none of this.
    pub const NONE: Tiers = Tiers {
        table_blocks: 0,
        floors: std::ptr::null(),
        stored: std::ptr::null_mut(),
        windows: std::ptr::null(),
        window_count: 0,
        seen_cap: 0,
        seen_ids: std::ptr::null_mut(),
        seen_counts: std::ptr::null_mut(),
        newest_ids: std::ptr::null_mut(),
        newest_counts: std::ptr::null_mut(),
    };
}

impl Distribute<'_> {
    pub fn batch(&self) -> usize {
        self.seq_lens.dim(0)
    }

    /// Where `lens` has a number of row `i`.
    pub fn place(&self, class: usize, kind: Kind, i: usize) -> usize {
        (class * Kind::COUNT + kind as usize) * self.max_rows + i
    }
}

/// Writes the keys and values of new tokens to their pages.
pub struct Append<'a> {
    pub pages: Pages<'a>,
    pub positions: usize,
    /// [B]: how many positions of each row are written.
    pub rows: *const i32,
    /// The new rows [B, (Q,) Hk, channels] and the pages [pages, P, Hk, channels], of keys and of values.
    pub parts: [(Tensor<'a>, Tensor<'a>); 2],
}

// SAFETY: addresses of the decoder's memory, which tasks only read.
unsafe impl Sync for Append<'_> {}

/// Copies the outputs of some rows.
pub struct Take<'a> {
    /// Both [B, (Q,) Hq, Dv].
    pub from: Tensor<'a>,
    pub to: Tensor<'a>,
    /// [B]: how many positions of each row are copied.
    pub lens: *const i32,
}

// SAFETY: addresses of the decoder's memory, which tasks only read.
unsafe impl Sync for Take<'_> {}

/// Adds the block of each row's new token to its lists, where they end before it.
pub struct Complete {
    /// [B]: the rows that have a list have 1 here, and the position of their token there.
    pub lens: *const i32,
    pub places: *const i32,
    /// [B, heads, capacity] and [B, heads].
    pub ids: *mut i32,
    pub counts: *mut i32,
    pub batch: usize,
    pub heads: usize,
    pub capacity: usize,
    pub block_size: usize,
}

/// Lists of a step's rows, and those that their sequences had at the step before.
pub struct Past<'a> {
    /// [B]; absent: row i is of sequence i.
    pub sequences: Option<Tensor<'a>>,
    pub rows: usize,
    /// [B]: the rows that have a list; null where lists of sequences are emptied.
    pub lens: *const i32,
    /// [B]: the position of each row's new token.
    pub places: *const i32,
    /// [B, heads, capacity] and [B, heads].
    pub ids: *mut i32,
    pub counts: *mut i32,
    /// [count, heads, past_capacity] and [count, heads]; past_capacity is less than the capacity of what is recalled.
    pub past_ids: *mut i32,
    pub past_counts: *mut i32,
    pub heads: usize,
    pub capacity: usize,
    pub past_capacity: usize,
    pub block_size: usize,
    /// First blocks that a list has without a past.
    pub init: u32,
    /// Number of sequences.
    pub count: usize,
}

impl<'a> Past<'a> {
    /// Empties the lists of these sequences. `past_counts`: [max_sequences, heads].
    pub fn emptied(options: &Options, sequences: Option<Tensor<'a>>, rows: usize, past_counts: *mut i32) -> Past<'a> {
        Past {
            sequences,
            rows,
            lens: std::ptr::null(),
            places: std::ptr::null(),
            ids: std::ptr::null_mut(),
            counts: std::ptr::null_mut(),
            past_ids: std::ptr::null_mut(),
            past_counts,
            heads: options.kv_heads,
            capacity: 0,
            past_capacity: 0,
            block_size: options.block_size,
            init: 0,
            count: options.max_sequences,
        }
    }
}

/// What is known of the drafts of each sequence, [max_sequences] each.
#[derive(Clone, Copy)]
pub struct Drafts {
    pub count: usize,
    pub most: usize,
    /// The time of a drafting step as a part of that of a verifying one.
    pub cost: f32,
    pub hits: *mut f32,
    pub trials: *mut f32,
    pub acceptance: *mut f32,
    pub draft_lens: *mut i32,
    pub drafted: *mut i32,
    pub accepted: *mut i32,
}

impl Drafts {
    /// The γ that gives most tokens in the time: γ drafts give Σ_{j ≤ γ} p^j tokens in 1 + γ·cost. Ties go to fewer drafts.
    pub fn recommended(&self, p: f32) -> i32 {
        let (mut tokens, mut power, mut best, mut rate) = (1.0f32, 1.0f32, 0, 1.0f32);
        for gamma in 1..=self.most {
            power *= p;
            tokens += power;
            let found = tokens / (1.0 + gamma as f32 * self.cost);
            if found > rate {
                (best, rate) = (gamma as i32, found);
            }
        }
        best
    }
}

/// Adds what a verification accepted, or forgets what is known.
pub struct Observe<'a> {
    pub drafts: Drafts,
    /// [B]; absent: row i is of sequence i.
    pub sequences: Option<Tensor<'a>>,
    pub rows: usize,
    /// [B]: the tokens accepted, and drafted; absent: the sequences are reset, or γ were drafted.
    pub accepted: Option<Tensor<'a>>,
    pub draft_lens: Option<Tensor<'a>>,
    pub gamma: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_no_position_sees_are_not_read() {
        // 1,000 tokens in blocks of 16, four of them new: position 996 sees tokens 947 … 996 through a window of 50.
        assert_eq!(seen_blocks(61, 16, 996, 50), 59..61);
        assert_eq!(seen_blocks(61, 16, 996, 1), 61..61);
        assert_eq!(seen_blocks(61, 16, 996, 997), 0..61);
        assert_eq!(seen_blocks(61, 16, 996, 2000), 0..61);
        assert_eq!(seen_blocks(0, 16, 0, 50), 0..0);
    }
}
