//! Which block of which KV head each slot holds: the least recently named makes room for the next.

/// No block, or no slot.
const NOBODY: u32 = u32::MAX;

pub struct Residents {
    /// By block and KV head.
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
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
    /// Blocks that it was given so far: a copy for an earlier one does not land.
    generation: u32,
    named_at: u64,
    is_there: bool,
    /// Named since it was fetched.
    is_used: bool,
    before: u32,
    after: u32,
}

/// A slot as it was given to a block.
#[derive(Clone, Copy)]
pub struct Given {
    pub slot: usize,
    pub generation: u32,
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
    pub fn new(keys: usize, slots: usize, hold: usize) -> Residents {
        let slot = |n: usize| Slot {
            holds: NOBODY,
            generation: 0,
            named_at: 0,
            is_there: false,
            is_used: false,
            before: if n == 0 { NOBODY } else { n as u32 - 1 },
            after: if n + 1 == slots { NOBODY } else { n as u32 + 1 },
        };
        Residents {
            slot_of: vec![NOBODY; keys],
            slots: (0..slots).map(slot).collect(),
            oldest: 0,
            newest: slots as u32 - 1,
            now: hold as u64,
            hold: hold as u64,
        }
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

    /// Gives a block that has no slot the oldest one.
    pub fn give(&mut self, key: usize) -> (Given, Evicted) {
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
        slot.generation = slot.generation.wrapping_add(1);
        (slot.is_there, slot.is_used) = (false, false);
        self.slot_of[key] = at;
        let given = Given { slot: at as usize, generation: slot.generation };
        self.name(key);
        (given, evicted)
    }

    /// Whether a copy may still land; then it has.
    pub fn land(&mut self, given: Given) -> bool {
        let slot = &mut self.slots[given.slot];
        let is_current = slot.holds != NOBODY && slot.generation == given.generation;
        slot.is_there |= is_current;
        is_current
    }

    /// The block is no more: its slot is the first to be given away.
    pub fn drop_block(&mut self, key: usize) {
        let at = std::mem::replace(&mut self.slot_of[key], NOBODY);
        if at == NOBODY {
            return;
        }
        let slot = &mut self.slots[at as usize];
        slot.holds = NOBODY;
        slot.generation = slot.generation.wrapping_add(1);
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
