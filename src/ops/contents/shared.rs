//! The rules of arguments that several calls share.

use super::{Number, Rule};
use crate::core::tensor::Tensor;
use crate::ops::views::{BlockList, Pages, Positions, Scale};

/// Rows of each sequence.
pub fn q_lens<'a>(positions: &Positions<'a>) -> Option<Rule<'a>> {
    positions.lens.map(|lens| Rule::up_to(lens, positions.count()))
}

/// Lengths that the pages have room for.
pub fn seq_lens<'a>(pages: &Pages<'a>) -> Rule<'a> {
    Rule::up_to(pages.seq_lens, pages.capacity())
}

/// The pages that the lengths cover; with `begin`, from its page on, and only of sequences that have tokens after it.
pub fn page_table<'a>(pages: &Pages<'a>, begin: Option<Tensor<'a>>) -> Option<Rule<'a>> {
    let rule = Rule::within(pages.table?, -1, Number::constant(pages.count));
    let tokens = Number::of(pages.seq_lens);
    let end = tokens.over_up(pages.size);
    Some(match begin {
        None => rule.between(1, Number::constant(0), end),
        Some(begin) => rule.between(1, Number::of(begin).over(pages.size), end).where_positive(tokens.less(begin)),
    })
}

/// The pages before `begin` of the block of `block_size` tokens that `begin` lies in: its summary is of all its tokens. Blocks do not
/// cross pages, or are whole pages.
pub fn pages_of_begun_blocks<'a>(pages: &Pages<'a>, begin: Tensor<'a>, block_size: usize) -> Option<Rule<'a>> {
    let pages_of_block = block_size.checked_div(pages.size)?;
    let first = Number::of(begin).over(block_size).times(pages_of_block);
    let rule = Rule::within(pages.table?, 0, Number::constant(pages.count)).between(
        1,
        first,
        Number::of(begin).over_up(pages.size),
    );
    (pages_of_block > 1).then(|| rule.where_positive(Number::of(pages.seq_lens).less(begin)))
}

/// Factors of all tokens, or of the tokens of a KV head. Tokens that no row sees may have any: factors of single tokens have no
/// rule.
pub fn scale<'a>(scale: &Option<Scale<'a>>) -> Option<Rule<'a>> {
    scale.as_ref().filter(|scale| scale.0.rank() == 1).map(|scale| Rule::factor(scale.0))
}

/// The tokens that lists name.
pub struct Tokens<'a, 'p> {
    pub seq_lens: Tensor<'a>,
    pub positions: &'p Positions<'a>,
    /// Tokens of a block.
    pub block_size: usize,
}

impl<'a> Tokens<'a, '_> {
    /// How many tokens the rows of a list see.
    fn seen(&self, is_own: bool) -> Number<'a> {
        let tokens = Number::of(self.seq_lens);
        match self.positions.lens {
            _ if !is_own => tokens,
            Some(lens) => tokens.less(lens).per_position(1).plus(1),
            None => tokens.per_position(1).plus(1).minus(self.positions.count()),
        }
    }

    /// How many rows a list has, its own row included.
    fn rows(&self, is_own: bool) -> Number<'a> {
        match self.positions.lens {
            Some(lens) => Number::of(lens).per_position(if is_own { -1 } else { 0 }),
            None => Number::constant(1),
        }
    }
}

/// A list of blocks that a call reads: counts, then ids below the sequence's end, ascending, then slots of a pool of `pages`
/// pages. A list that no row reads, or of a sequence without tokens, may hold anything.
pub fn list<'a>(list: &BlockList<'a>, tokens: &Tokens<'a, '_>, pages: usize) -> Vec<Rule<'a>> {
    let (seen, rows) = (tokens.seen(list.is_own()), tokens.rows(list.is_own()));
    let read = |rule: Rule<'a>| rule.where_positive(seen).where_positive(rows);
    let last = list.ids.rank() - 1;
    let count = Number::of(list.counts).at_most(list.cap());
    let entries = |rule| read(rule).between(last, Number::constant(0), count);
    let mut rules = vec![
        read(Rule::up_to(list.counts, list.cap())),
        entries(Rule::within(list.ids, 0, seen.over_up(tokens.block_size))),
        entries(Rule::ascending(list.ids)),
    ];
    rules.extend(list.slots.map(|slots| entries(Rule::within(slots, -1, Number::constant(pages)))));
    rules
}
