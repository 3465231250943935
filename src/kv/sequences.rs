//! Sequences and their blocks: the host block of each block of a sequence, and the number of sequences that share a host block.
//! Every backend uses this bookkeeping.
//!
//! Sequences may share whole blocks, which never change. The block that a sequence may still write to is not shared; it lies in
//! the sequence's tail, and is written to its host block when it is full.

use crate::core::allocate::{collected, filled, reserved};
use crate::core::status::{Code, Error, Result};

/// An entry of a table that names no block.
pub const NONE: i32 = -1;

const DROPPED: &str = "the blocks that a sequence of a KV cache gives back";

pub struct Sequences {
    block_size: usize,
    max_blocks: usize,
    /// The number of blocks of each sequence; `None` for a number without a sequence.
    lens: Vec<Option<usize>>,
    /// [max_sequences, max_blocks]
    table: Vec<i32>,
    /// The number of sequences that hold each block.
    holders: Vec<u32>,
    free: Vec<u32>,
}

/// A partial block that a sequence may write to after a fork or truncation, and the block that has its first tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Opened {
    /// The number of the block in the sequence.
    pub number: usize,
    /// The host block that has its first tokens, unless a tail has them.
    pub content: u32,
}

/// What it takes to undo a change of a sequence, if the device could not be told of it.
pub struct Before {
    sequence: u32,
    /// The number of its blocks; `None` if there was no such sequence.
    len: Option<usize>,
    /// The last of these blocks, which the change may have given up.
    last: Vec<i32>,
}

impl Before {
    /// There was no such sequence.
    pub fn nothing(sequence: u32) -> Before {
        Before { sequence, len: None, last: Vec::new() }
    }
}

/// The changes that a truncation made.
pub struct Truncated {
    pub opened: Option<Opened>,
    /// Blocks that no sequence holds any more, or whose content is out of date.
    pub dropped: Vec<u32>,
}

impl Sequences {
    pub fn new(block_size: usize, max_sequences: usize, max_blocks: usize, blocks: usize) -> Result<Sequences> {
        const PURPOSE: &str = "the sequences and blocks of a KV cache";
        Ok(Sequences {
            block_size,
            max_blocks,
            lens: filled(None, max_sequences, PURPOSE)?,
            table: filled(NONE, max_sequences * max_blocks, PURPOSE)?,
            holders: filled(0, blocks, PURPOSE)?,
            // The list ends with the lowest block, which is taken first.
            free: collected((0..blocks as u32).rev(), PURPOSE)?,
        })
    }

    pub fn count(&self) -> usize {
        self.lens.iter().flatten().count()
    }

    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    pub fn blocks_in_use(&self) -> usize {
        self.holders.len() - self.free.len()
    }

    /// The blocks of a sequence; `None` if no sequence has that number.
    pub fn blocks(&self, sequence: usize) -> Option<&[i32]> {
        let len = (*self.lens.get(sequence)?)?;
        Some(&self.table[sequence * self.max_blocks..][..len])
    }

    /// What it takes to undo a change that keeps the first `kept` blocks of a sequence.
    pub fn before(&self, sequence: u32, kept: usize) -> Result<Before> {
        let len = self.len("sequence", sequence)?;
        let blocks = &self.table[sequence as usize * self.max_blocks..][kept.min(len)..len];
        Ok(Before { sequence, len: Some(len), last: collected(blocks.iter().copied(), DROPPED)? })
    }

    /// Undoes the last change, which was of this sequence, if it could not be done on the device.
    pub fn settle(&mut self, done: Result<()>, before: Before) -> Result<()> {
        done.inspect_err(|_| self.take_back(before))
    }

    fn take_back(&mut self, Before { sequence, len, last }: Before) {
        let (sequence, kept) = (sequence as usize, len.unwrap_or(0) - last.len());
        let row = &mut self.table[sequence * self.max_blocks..][..self.max_blocks];
        for entry in row[kept..].iter_mut().take_while(|entry| **entry != NONE) {
            self.holders[std::mem::replace(entry, NONE) as usize] -= 1;
        }
        for (entry, &block) in row[kept..].iter_mut().zip(&last) {
            *entry = block;
            self.holders[block as usize] += 1;
        }
        self.lens[sequence] = len;
        let free = (0..self.holders.len()).rev().filter(|&block| self.holders[block] == 0);
        self.free.clear();
        self.free.extend(free.map(|block| block as u32));
    }

    fn len(&self, name: &str, sequence: u32) -> Result<usize> {
        let len = self.lens.get(sequence as usize).copied().flatten();
        len.ok_or_else(|| Error::argument(name, sequence, "a sequence of this cache"))
    }

    fn require_free(&self, blocks: usize) -> Result<()> {
        if blocks <= self.free.len() {
            return Ok(());
        }
        let free = self.free.len();
        let text = format!(
            "host pool: {blocks} more blocks are needed and {free} are free; options.host_blocks says how many there are"
        );
        Err(Error::new(Code::OutOfMemory, text))
    }

    /// Takes a free block. The caller has checked that there is one.
    fn take(&mut self) -> u32 {
        let block = self.free.pop().expect("checked by the caller");
        self.holders[block as usize] = 1;
        block
    }

    /// Removes one holder of a block; pushes the block to `dropped` if that was the last holder.
    fn give_up(&mut self, block: i32, dropped: &mut Vec<u32>) {
        let holders = &mut self.holders[block as usize];
        *holders -= 1;
        if *holders == 0 {
            self.free.push(block as u32);
            dropped.push(block as u32);
        }
    }

    pub fn add(&mut self) -> Result<u32> {
        let Some(sequence) = self.lens.iter().position(Option::is_none) else {
            let text = format!("all {} sequences of the cache are in use", self.lens.len());
            return Err(Error::new(Code::OutOfMemory, text));
        };
        self.lens[sequence] = Some(0);
        Ok(sequence as u32)
    }

    /// Reserves blocks for `tokens` tokens in all. Returns the number of blocks that the sequence had before.
    pub fn extend(&mut self, sequence: u32, tokens: u64) -> Result<usize> {
        let len = self.len("sequence", sequence)?;
        let blocks = tokens.div_ceil(self.block_size as u64);
        if blocks > self.max_blocks as u64 {
            let expected = format!("at most {} blocks of {} tokens", self.max_blocks, self.block_size);
            return Err(Error::argument("tokens", tokens, expected));
        }
        let blocks = (blocks as usize).max(len);
        self.require_free(blocks - len)?;
        for n in len..blocks {
            let block = self.take();
            self.table[sequence as usize * self.max_blocks + n] = block as i32;
        }
        self.lens[sequence as usize] = Some(blocks);
        Ok(len)
    }

    fn check_tokens(&self, len: usize, tokens: u64) -> Result<()> {
        let most = (len * self.block_size) as u64;
        if tokens <= most {
            return Ok(());
        }
        Err(Error::argument("tokens", tokens, format!("at most {most}, what the sequence has room for")))
    }

    /// Begins a sequence that shares the whole blocks among the first tokens of `parent`, and has a new block for the tokens
    /// after them.
    pub fn fork(&mut self, parent: u32, tokens: u64) -> Result<(u32, Option<Opened>)> {
        let len = self.len("sequence", parent)?;
        self.check_tokens(len, tokens)?;
        let (whole, rest) = (tokens as usize / self.block_size, tokens as usize % self.block_size);
        self.require_free((rest > 0) as usize)?;
        let child = self.add()?;
        let (from, to) = (parent as usize * self.max_blocks, child as usize * self.max_blocks);
        for n in 0..whole {
            let block = self.table[from + n];
            self.table[to + n] = block;
            self.holders[block as usize] += 1;
        }
        let opened = (rest > 0).then(|| {
            self.table[to + whole] = self.take() as i32;
            Opened { number: whole, content: self.table[from + whole] as u32 }
        });
        self.lens[child as usize] = Some(whole + opened.iter().len());
        Ok((child, opened))
    }

    pub fn truncate(&mut self, sequence: u32, tokens: u64) -> Result<Truncated> {
        let len = self.len("sequence", sequence)?;
        self.check_tokens(len, tokens)?;
        let (whole, rest) = (tokens as usize / self.block_size, tokens as usize % self.block_size);
        let row = sequence as usize * self.max_blocks;
        let last = self.table[row + whole.min(self.max_blocks - 1)];
        let is_shared = rest > 0 && self.holders[last as usize] > 1;
        // The blocks after the kept ones are freed first, and one of them may serve.
        let kept = whole + (rest > 0) as usize;
        let is_enough = (kept..len).any(|n| self.holders[self.table[row + n] as usize] == 1);
        if is_shared && !is_enough {
            self.require_free(1)?;
        }
        let mut dropped = reserved(len - kept + 1, DROPPED)?;
        for n in kept..len {
            let block = std::mem::replace(&mut self.table[row + n], NONE);
            self.give_up(block, &mut dropped);
        }
        self.lens[sequence as usize] = Some(kept);
        let opened = (rest > 0).then(|| {
            if is_shared {
                self.give_up(last, &mut dropped);
                self.table[row + whole] = self.take() as i32;
            } else {
                dropped.push(last as u32);
            }
            Opened { number: whole, content: last as u32 }
        });
        Ok(Truncated { opened, dropped })
    }

    /// Ends a sequence; returns the blocks that no sequence holds any more.
    pub fn free(&mut self, sequence: u32) -> Result<Vec<u32>> {
        let len = self.len("sequence", sequence)?;
        let (row, mut dropped) = (sequence as usize * self.max_blocks, reserved(len, DROPPED)?);
        for n in 0..len {
            let block = std::mem::replace(&mut self.table[row + n], NONE);
            self.give_up(block, &mut dropped);
        }
        self.lens[sequence as usize] = None;
        Ok(dropped)
    }
}
