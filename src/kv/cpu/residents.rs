//! Which block of which KV head each slot holds, and which of them are still to be copied: the least recently named makes room for
//! the next.

use crate::core::allocate::{collected, filled, reserved};
use crate::core::status::Result;

/// No block, or no slot.
const NOBODY: u32 = u32::MAX;

pub struct Residents {
    /// By block and KV head.
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
    /// Slots given away since the last copies, each once.
    asked: Vec<u32>,
    /// Ends of the list of slots in the order in which they were named.
    oldest: u32,
    newest: u32,
    /// Resolves so far, and those within which a slot that was named stays.
    now: u64,
    hold: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    holds: u32,
    named_at: u64,
    is_asked: bool,
    is_there: bool,
    /// Named since it was fetched.
    is_used: bool,
    before: u32,
    after: u32,
}

/// What a slot held before it was given to another block.
#[derive(Clone, Copy, PartialEq)]
pub enum Evicted {
    Nothing,
    Used,
    /// Fetched, and not named since.
    Unused,
}

impl Residents {
    pub fn new(keys: usize, slots: usize, hold: usize) -> Result<Residents> {
        const PURPOSE: &str = "the slots' bookkeeping of a KV cache";
        let slot = |n: usize| Slot {
            holds: NOBODY,
            named_at: 0,
            is_asked: false,
            is_there: false,
            is_used: false,
            before: if n == 0 { NOBODY } else { n as u32 - 1 },
            after: if n + 1 == slots { NOBODY } else { n as u32 + 1 },
        };
        Ok(Residents {
            slot_of: filled(NOBODY, keys, PURPOSE)?,
            slots: collected((0..slots).map(slot), PURPOSE)?,
            asked: reserved(slots, PURPOSE)?,
            oldest: 0,
            newest: slots as u32 - 1,
            now: hold as u64,
            hold: hold as u64,
        })
    }

    /// A resolve begins.
    pub fn begin(&mut self) {
        self.now += 1;
    }

    /// Names a block if it has a slot: it stays for now.
    pub fn name(&mut self, key: usize) -> Option<usize> {
        let slot = self.slot_of[key];
        if slot == NOBODY {
            return None;
        }
        self.slots[slot as usize].named_at = self.now;
        self.unlink(slot);
        self.link_newest(slot);
        Some(slot as usize)
    }

    /// Whether the slot's block has landed; it is then in use.
    pub fn is_there(&mut self, slot: usize) -> bool {
        let slot = &mut self.slots[slot];
        slot.is_used |= slot.is_there;
        slot.is_there
    }

    /// Gives a block that has no slot the oldest one, and asks for its copy.
    pub fn give(&mut self, key: usize) -> (usize, Evicted) {
        let at = self.oldest;
        let slot = &mut self.slots[at as usize];
        assert!(slot.named_at + self.hold <= self.now, "more slots are named than the cache has");
        let evicted = match slot {
            Slot { holds: NOBODY, .. } => Evicted::Nothing,
            Slot { is_there: true, is_used: false, .. } => Evicted::Unused,
            _ => Evicted::Used,
        };
        if slot.holds != NOBODY {
            self.slot_of[slot.holds as usize] = NOBODY;
        }
        slot.holds = key as u32;
        (slot.is_there, slot.is_used) = (false, false);
        if !std::mem::replace(&mut slot.is_asked, true) {
            self.asked.push(at);
        }
        self.slot_of[key] = at;
        self.name(key);
        (at as usize, evicted)
    }

    /// Slots that were given away since the last copies.
    pub fn asked(&self) -> usize {
        self.asked.len()
    }

    /// The `n`-th of them and its block; `None` where that is no more.
    pub fn copy(&self, n: usize) -> Option<(usize, usize)> {
        let at = self.asked[n] as usize;
        let key = self.slots[at].holds;
        (key != NOBODY).then_some((at, key as usize))
    }

    /// The copies are made. Returns how many there were.
    pub fn land(&mut self) -> usize {
        let mut landed = 0;
        for &at in &self.asked {
            let slot = &mut self.slots[at as usize];
            (slot.is_asked, slot.is_there) = (false, slot.holds != NOBODY);
            landed += slot.is_there as usize;
        }
        self.asked.clear();
        landed
    }

    /// The block is no more: its slot is the first to be given away.
    pub fn drop_block(&mut self, key: usize) {
        let at = std::mem::replace(&mut self.slot_of[key], NOBODY);
        if at == NOBODY {
            return;
        }
        let slot = &mut self.slots[at as usize];
        slot.holds = NOBODY;
        // A list that named it may still be read: it waits as others do.
        if slot.named_at + self.hold <= self.now {
            self.unlink(at);
            self.link_oldest(at);
        }
    }

    fn unlink(&mut self, at: u32) {
        let Slot { before, after, .. } = self.slots[at as usize];
        match before {
            NOBODY => self.oldest = after,
            before => self.slots[before as usize].after = after,
        }
        match after {
            NOBODY => self.newest = before,
            after => self.slots[after as usize].before = before,
        }
    }

    fn link_newest(&mut self, at: u32) {
        let newest = std::mem::replace(&mut self.newest, at);
        (self.slots[at as usize].before, self.slots[at as usize].after) = (newest, NOBODY);
        match newest {
            NOBODY => self.oldest = at,
            newest => self.slots[newest as usize].after = at,
        }
    }

    fn link_oldest(&mut self, at: u32) {
        let oldest = std::mem::replace(&mut self.oldest, at);
        (self.slots[at as usize].before, self.slots[at as usize].after) = (NOBODY, oldest);
        match oldest {
            NOBODY => self.newest = at,
            oldest => self.slots[oldest as usize].before = at,
        }
    }
}
