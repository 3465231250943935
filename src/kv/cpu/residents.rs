//! The host run that each slot holds, and the slots that are still to be filled. A run without a slot gets the slot that was named
//! least recently. A run's number is block · Hk + KV head.

use crate::core::allocate::{collected, filled, reserved};
use crate::core::status::Result;

/// The number of no run and of no slot.
const NONE: u32 = u32::MAX;

pub struct Residents {
    /// The slot of each host run.
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
    /// The slots given to another run since the last copies, each once.
    to_copy: Vec<u32>,
    /// The ends of the linked list of slots in the order in which they were named.
    oldest: u32,
    newest: u32,
    /// The number of resolves so far.
    now: u64,
    /// The number of resolves during which a named slot keeps its run.
    hold: u64,
    /// The same, in the resolve that has begun.
    hold_now: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    host_run: u32,
    named_at: u64,
    is_to_copy: bool,
    is_resident: bool,
    /// Whether a resolve has named the run since it was copied.
    is_used: bool,
    before: u32,
    after: u32,
}

/// The content of a slot before it was given to another run.
#[derive(Clone, Copy, PartialEq)]
pub enum Evicted {
    Nothing,
    Used,
    /// A run that was copied and not named afterwards.
    Unused,
}

impl Residents {
    pub fn new(host_runs: usize, slots: usize, hold: usize) -> Result<Residents> {
        const PURPOSE: &str = "the slots' bookkeeping of a KV cache";
        let slot = |n: usize| Slot {
            host_run: NONE,
            named_at: 0,
            is_to_copy: false,
            is_resident: false,
            is_used: false,
            before: if n == 0 { NONE } else { n as u32 - 1 },
            after: if n + 1 == slots { NONE } else { n as u32 + 1 },
        };
        Ok(Residents {
            slot_of: filled(NONE, host_runs, PURPOSE)?,
            slots: collected((0..slots).map(slot), PURPOSE)?,
            to_copy: reserved(slots, PURPOSE)?,
            oldest: 0,
            newest: slots as u32 - 1,
            now: hold as u64,
            hold: hold as u64,
            hold_now: hold as u64,
        })
    }

    /// Begins a resolve that leaves their slots to the runs that it, and the `hold` − 1 resolves before it, name.
    pub fn begin(&mut self, hold: usize) {
        self.now += 1;
        self.hold_now = hold as u64;
    }

    /// Names a run that has a slot, so that it keeps the slot for `hold` resolves.
    pub fn name(&mut self, host_run: usize) -> Option<usize> {
        let slot = self.slot_of[host_run];
        if slot == NONE {
            return None;
        }
        self.slots[slot as usize].named_at = self.now;
        self.unlink(slot);
        self.link_newest(slot);
        Some(slot as usize)
    }

    /// Whether the slot's run has been copied. If so, marks it as used.
    pub fn use_if_resident(&mut self, slot: usize) -> bool {
        let slot = &mut self.slots[slot];
        slot.is_used |= slot.is_resident;
        slot.is_resident
    }

    /// Gives the oldest slot to a run that has none, and asks for its copy.
    pub fn give_slot(&mut self, host_run: usize) -> (usize, Evicted) {
        let at = self.first_free(self.hold_now, |_| true).expect("more slots are named than the cache has");
        let evicted = self.replace(at, host_run);
        let slot = &mut self.slots[at as usize];
        (slot.is_resident, slot.is_used) = (false, false);
        if !std::mem::replace(&mut slot.is_to_copy, true) {
            self.to_copy.push(at);
        }
        self.name(host_run);
        (at as usize, evicted)
    }

    /// Gives a slot to a run that leaves a tail and is copied to the slot at once; `None` if every slot is named or waits for a
    /// copy. The next resolve may give the slot away, so that it finds as many as it is promised.
    pub fn settle(&mut self, host_run: usize) -> Option<(usize, Evicted)> {
        let at = self.first_free(self.hold, |slot| !slot.is_to_copy)?;
        let evicted = self.replace(at, host_run);
        let slot = &mut self.slots[at as usize];
        (slot.is_resident, slot.is_used) = (true, true);
        slot.named_at = self.now - self.hold;
        self.unlink(at);
        self.link_newest(at);
        Some((at as usize, evicted))
    }

    /// The oldest slot that none of the last `hold` resolves has named, of those that are `suitable`.
    fn first_free(&self, hold: u64, suitable: impl Fn(&Slot) -> bool) -> Option<u32> {
        let mut at = self.oldest;
        while at != NONE {
            let slot = &self.slots[at as usize];
            if slot.named_at + hold <= self.now && suitable(slot) {
                return Some(at);
            }
            at = slot.after;
        }
        None
    }

    /// Takes a slot from its run, if it has one, and gives it to another run.
    fn replace(&mut self, at: u32, host_run: usize) -> Evicted {
        let slot = &mut self.slots[at as usize];
        let evicted = match slot {
            Slot { host_run: NONE, .. } => Evicted::Nothing,
            Slot { is_resident: true, is_used: false, .. } => Evicted::Unused,
            _ => Evicted::Used,
        };
        if slot.host_run != NONE {
            self.slot_of[slot.host_run as usize] = NONE;
        }
        slot.host_run = host_run as u32;
        self.slot_of[host_run] = at;
        evicted
    }

    /// The number of copies that [`Residents::copy`] has.
    pub fn copies(&self) -> usize {
        self.to_copy.len()
    }

    /// The slot and the host run of copy `n`; `None` if the run's block was dropped.
    pub fn copy(&self, n: usize) -> Option<(usize, usize)> {
        let at = self.to_copy[n] as usize;
        let host_run = self.slots[at].host_run;
        (host_run != NONE).then_some((at, host_run as usize))
    }

    /// Marks the runs of all copies as resident. Returns their number.
    pub fn finish_copies(&mut self) -> usize {
        let mut finished = 0;
        for &at in &self.to_copy {
            let slot = &mut self.slots[at as usize];
            (slot.is_to_copy, slot.is_resident) = (false, slot.host_run != NONE);
            finished += slot.is_resident as usize;
        }
        self.to_copy.clear();
        finished
    }

    /// Takes the slot from a run whose block is dropped. The slot is the next to be given away.
    pub fn drop_run(&mut self, host_run: usize) {
        let at = std::mem::replace(&mut self.slot_of[host_run], NONE);
        if at == NONE {
            return;
        }
        let slot = &mut self.slots[at as usize];
        slot.host_run = NONE;
        // A list that named the slot may still be read, so the slot waits for `hold` resolves.
        if slot.named_at + self.hold <= self.now {
            self.unlink(at);
            self.link_oldest(at);
        }
    }

    fn unlink(&mut self, at: u32) {
        let Slot { before, after, .. } = self.slots[at as usize];
        match before {
            NONE => self.oldest = after,
            before => self.slots[before as usize].after = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.slots[after as usize].before = before,
        }
    }

    fn link_newest(&mut self, at: u32) {
        let newest = std::mem::replace(&mut self.newest, at);
        (self.slots[at as usize].before, self.slots[at as usize].after) = (newest, NONE);
        match newest {
            NONE => self.oldest = at,
            newest => self.slots[newest as usize].after = at,
        }
    }

    fn link_oldest(&mut self, at: u32) {
        let oldest = std::mem::replace(&mut self.oldest, at);
        (self.slots[at as usize].before, self.slots[at as usize].after) = (NONE, oldest);
        match oldest {
            NONE => self.newest = at,
            oldest => self.slots[oldest as usize].before = at,
        }
    }
}
