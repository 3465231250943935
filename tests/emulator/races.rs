//! Races: two accesses to the same bytes, one of them a write, that nothing orders. Those in shared memory stand here, those in global memory in
//! `races/global.rs`.
//!
//! Happens-before by vector clocks. A component of a clock is what a warp does to the shared memory of its CTA; what it does to that of
//! others; what its copies write, which the warp itself knows of only once it has waited; what its bulk copies read; or what is written
//! on behalf of a barrier in shared memory, which those know that waited for its phase. Barriers of every kind, what is sent to them
//! (`st.async`), and fences around atomics pass clocks on. Within a warp, what a lane wrote is there for others after `bar.warp.sync` and
//! barriers alone: shuffles, votes and products exchange registers. But what a lane has read before one of these may be overwritten after.
//!
//! Left out, so that it may miss a race: which lanes of a warp arrived or waited.

mod global;

use crate::memory::Fault;
pub use global::{Current, Global, Order};
use std::collections::HashMap;

/// How far each component is known to have come.
#[derive(Clone, Default)]
struct Clock {
    own: Vec<u32>,
    /// Components of other clusters and other launches.
    others: global::Others,
    /// `griddepcontrol.wait` came before.
    has_waited: bool,
}

impl Clock {
    fn get(&self, component: usize) -> u32 {
        self.own.get(component).copied().unwrap_or(0)
    }
    fn raise(&mut self, component: usize, to: u32) {
        if self.own.len() <= component {
            self.own.resize(component + 1, 0);
        }
        self.own[component] = self.own[component].max(to);
    }
    fn join(&mut self, other: &Clock) {
        if self.own.len() < other.own.len() {
            self.own.resize(other.own.len(), 0);
        }
        self.own.iter_mut().zip(&other.own).for_each(|(own, other)| *own = (*own).max(*other));
        global::join_others(&mut self.others, &other.others);
        self.has_waited |= other.has_waited;
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A read that makes use of these of its bytes.
    Read(u32),
    Write,
    /// A volatile read, or one that acquires.
    StrongRead(Order),
    StrongWrite(Order),
    Atomic(Order),
    /// A copy of this group of the lane writes shared memory.
    CopyWrites(u32),
    /// A bulk copy of this group of the lane reads shared memory.
    BulkReads(u32),
    /// A bulk copy of this group of the lane writes global memory.
    BulkWrites(u32),
    /// A write that completes bytes at this barrier in shared memory.
    WritesFor((usize, usize)),
    /// The access was looked at before.
    Known,
}

impl Kind {
    fn reads(self) -> bool {
        matches!(self, Kind::Read(_) | Kind::StrongRead(_) | Kind::BulkReads(_) | Kind::Atomic(_))
    }
    fn writes(self) -> bool {
        !matches!(self, Kind::Read(_) | Kind::StrongRead(_) | Kind::BulkReads(_))
    }
}

/// An access to a word of shared memory.
#[derive(Clone, Copy)]
struct Touch {
    component: u32,
    epoch: u32,
    warp: u16,
    /// Bytes of the word.
    bytes: u8,
    is_atomic: bool,
    lanes: u32,
    /// How many times the warp's lanes had met by then; for reads, in any instruction.
    turn: u32,
    is_read: bool,
    line: u32,
}

#[derive(Clone, Copy, Default)]
struct Word {
    write: Option<Touch>,
    read: Option<Touch>,
    /// There are more reads, of other warps.
    has_more: bool,
}

#[derive(Default)]
struct WarpClocks {
    clock: Clock,
    /// Groups of its copies, of its bulk copies that have read, and of those that have written, that it has waited for.
    waited: [u32; 3],
    turn: u32,
    exchanges: u32,
    line: u32,
    /// The clock at the warp's last fence, and what atomics since have told it.
    fenced: Clock,
    told: Clock,
    /// The same of atomics in global memory, and of fences whose scope is the device.
    fenced_globally: global::Others,
    told_globally: global::Others,
}

/// A point where clocks meet: what arrived, and what the last phase had when it was over.
#[derive(Default)]
struct Meeting {
    arrived: Clock,
    released: Clock,
}

struct BarrierWord {
    meeting: Meeting,
    component: usize,
    phase: u32,
}

pub struct Races {
    warps: Vec<WarpClocks>,
    words: Vec<Vec<Word>>,
    more: HashMap<(usize, usize), Vec<Touch>>,
    barriers: HashMap<(usize, usize), Meeting>,
    barrier_words: HashMap<(usize, usize), BarrierWord>,
    components: usize,
    cluster: Meeting,
    atomics: HashMap<(usize, usize), Clock>,
    /// The launch's number, and the cluster's in the launch.
    work: u32,
    cluster_number: usize,
}

const COPIES: usize = 0;
const BULK_READS: usize = 1;
const BULK_WRITES: usize = 2;

/// Components come in blocks of one for each warp: what it does to the shared memory of its CTA; its copies; its bulk copies' reads; what it
/// does elsewhere; its bulk copies' writes. What is written for barriers in shared memory follows.
const BLOCKS: usize = 5;
/// The blocks of `COPIES`, `BULK_READS` and `BULK_WRITES`.
const BLOCKS_OF_COPIES: [usize; 3] = [1, 2, 4];

impl Races {
    pub fn new(ctas: usize, warps: usize, bytes: usize, work: u32, cluster_number: usize) -> Races {
        let warp_clocks = |warp: usize| {
            let mut one = WarpClocks::default();
            one.clock.raise(warp, 1);
            one.clock.raise(warps * 3 + warp, 1);
            one
        };
        Races {
            warps: (0..warps).map(warp_clocks).collect(),
            words: vec![vec![Word::default(); bytes.div_ceil(4)]; ctas],
            more: HashMap::new(),
            barriers: HashMap::new(),
            barrier_words: HashMap::new(),
            components: warps * BLOCKS,
            cluster: Meeting::default(),
            atomics: HashMap::new(),
            work,
            cluster_number,
        }
    }

    pub fn at_line(&mut self, warp: usize, line: u32) {
        self.warps[warp].line = line;
    }

    /// The lanes of a warp have met.
    pub fn meet(&mut self, warp: usize) {
        let count = self.warps.len();
        let one = &mut self.warps[warp];
        one.turn += 1;
        one.exchanges += 1;
        for (block, waited) in BLOCKS_OF_COPIES.into_iter().zip(one.waited) {
            one.clock.raise(count * block + warp, waited);
        }
    }

    /// The lanes of a warp exchange registers.
    pub fn exchange(&mut self, warp: usize) {
        self.warps[warp].exchanges += 1;
    }

    /// Begins a new epoch of the warp, and returns its clock for others to join.
    fn release(&mut self, warp: usize) -> Clock {
        self.meet(warp);
        let clock = self.warps[warp].clock.clone();
        for component in [warp, self.elsewhere(warp)] {
            self.warps[warp].clock.raise(component, clock.get(component) + 1);
        }
        clock
    }

    pub fn arrives(&mut self, warp: usize, barrier: (usize, usize)) {
        let clock = self.release(warp);
        self.barriers.entry(barrier).or_default().arrived.join(&clock);
    }
    pub fn is_over(&mut self, barrier: (usize, usize)) {
        let meeting = self.barriers.entry(barrier).or_default();
        meeting.released = std::mem::take(&mut meeting.arrived);
    }
    pub fn passes(&mut self, warp: usize, barrier: (usize, usize)) {
        self.meet(warp);
        self.warps[warp].clock.join(&self.barriers.entry(barrier).or_default().released);
    }

    /// A relaxed arrival promises nothing of memory. What a warp has done to the shared memory of its own CTA is taken to be over all the same:
    /// it goes there in order.
    pub fn arrives_at_cluster(&mut self, warp: usize, is_relaxed: bool) {
        let known = self.warps[warp].clock.get(self.elsewhere(warp));
        let mut clock = self.release(warp);
        if is_relaxed {
            let elsewhere = self.elsewhere(warp);
            clock.own[elsewhere] = known.saturating_sub(1);
        }
        self.cluster.arrived.join(&clock);
    }
    pub fn cluster_is_over(&mut self) {
        self.cluster.released = std::mem::take(&mut self.cluster.arrived);
    }
    pub fn passes_cluster(&mut self, warp: usize) {
        self.meet(warp);
        self.warps[warp].clock.join(&self.cluster.released);
    }
    /// The component of what a warp does to the shared memory of other CTAs.
    fn elsewhere(&self, warp: usize) -> usize {
        self.warps.len() * 3 + warp
    }

    pub fn opens_word(&mut self, at: (usize, usize)) {
        self.components += 1;
        let word = BarrierWord { meeting: Meeting::default(), component: self.components - 1, phase: 0 };
        self.barrier_words.insert(at, word);
    }
    /// `copies`: the groups that a warp's copies are complete of when the arrival counts, without its own waiting.
    pub fn arrives_at_word(&mut self, warp: usize, at: (usize, usize), copies: Option<u32>) {
        let count = self.warps.len();
        let mut clock = self.release(warp);
        if let Some(copies) = copies {
            clock.raise(count + warp, copies);
        }
        if let Some(word) = self.barrier_words.get_mut(&at) {
            word.meeting.arrived.join(&clock);
        }
    }
    /// Something is sent there, and with it the news of what was before.
    pub fn sends_to_word(&mut self, warp: usize, at: (usize, usize)) {
        let clock = self.release(warp);
        if let Some(word) = self.barrier_words.get_mut(&at) {
            word.meeting.arrived.join(&clock);
        }
    }
    /// Bytes are said to be there, by a warp whose last fence this passes on.
    pub fn completes_word(&mut self, warp: usize, at: (usize, usize)) {
        if let Some(word) = self.barrier_words.get_mut(&at) {
            word.meeting.arrived.join(&self.warps[warp].fenced);
        }
    }
    pub fn word_is_over(&mut self, at: (usize, usize)) {
        if let Some(word) = self.barrier_words.get_mut(&at) {
            word.phase += 1;
            word.meeting.released = std::mem::take(&mut word.meeting.arrived);
            word.meeting.released.raise(word.component, word.phase);
        }
    }
    pub fn passes_word(&mut self, warp: usize, at: (usize, usize)) {
        if let Some(word) = self.barrier_words.get(&at) {
            self.warps[warp].clock.join(&word.meeting.released);
        }
    }

    pub fn waited_for_copies(&mut self, warp: usize, groups: u32) {
        let waited = &mut self.warps[warp].waited[COPIES];
        *waited = (*waited).max(groups);
    }
    /// Bulk copies have read, and written where that was waited for, too.
    pub fn waited_for_bulk(&mut self, warp: usize, groups: u32, has_written: bool) {
        let waited = &mut self.warps[warp].waited;
        for kind in if has_written { BULK_READS..=BULK_WRITES } else { BULK_READS..=BULK_READS } {
            waited[kind] = waited[kind].max(groups);
        }
    }

    pub fn fences(&mut self, warp: usize) {
        let told = std::mem::take(&mut self.warps[warp].told);
        self.warps[warp].clock.join(&told);
        self.warps[warp].fenced = self.release(warp);
    }
    fn exchanges(&mut self, warp: usize, at: (usize, usize)) {
        let clock = self.atomics.entry(at).or_default();
        let one = &mut self.warps[warp];
        one.told.join(clock);
        clock.join(&one.fenced);
    }

    /// Whether a touch happened before what the lane does now.
    fn is_before(&self, touch: &Touch, warp: usize, lane: usize) -> bool {
        let by = (touch.warp as usize, touch.lanes, touch.turn, touch.is_read);
        self.knows(touch.component as usize, touch.epoch, by, warp, lane)
    }

    /// Whether what some lanes of a warp of the cluster did happened before what the lane does now.
    fn knows(
        &self,
        component: usize,
        epoch: u32,
        (by, lanes, turn, is_read): (usize, u32, u32, bool),
        warp: usize,
        lane: usize,
    ) -> bool {
        let (one, count) = (&self.warps[warp], self.warps.len());
        if component == warp || component == self.elsewhere(warp) {
            let met = if is_read { one.exchanges } else { one.turn };
            return lanes & !(1 << lane) == 0 || turn < met;
        }
        let knows = one.clock.get(component) >= epoch;
        let copies = BLOCKS_OF_COPIES.iter().position(|block| component == count * block + warp);
        if by == warp
            && let Some(copies) = copies
        {
            return knows || one.waited[copies] >= epoch && lanes == 1 << lane;
        }
        knows
    }

    /// A lane touches bytes of a CTA's shared memory.
    pub fn touch(
        &mut self,
        warp: usize,
        lane: usize,
        rank: usize,
        offset: usize,
        bytes: usize,
        kind: Kind,
    ) -> Result<(), Fault> {
        let is_atomic = matches!(kind, Kind::Atomic(_));
        if is_atomic {
            self.exchanges(warp, (rank, offset));
        }
        let count = self.warps.len();
        let one = &self.warps[warp];
        let (component, epoch) = match kind {
            Kind::Read(_) | Kind::StrongRead(_) | Kind::Write | Kind::StrongWrite(_) | Kind::Atomic(_) => {
                let is_own = warp / (count / self.words.len()) == rank;
                let component = if is_own { warp } else { self.elsewhere(warp) };
                (component, one.clock.get(component))
            }
            Kind::CopyWrites(group) => (count + warp, group + 1),
            Kind::BulkReads(group) => (count * 2 + warp, group + 1),
            Kind::WritesFor(barrier) => {
                let Some(word) = self.barrier_words.get(&barrier) else { return Ok(()) };
                (word.component, word.phase + 1)
            }
            Kind::Known | Kind::BulkWrites(_) => return Ok(()),
        };
        let is_read = !kind.writes();
        let turn = if is_read { one.exchanges } else { one.turn };
        let line = one.line;
        for n in offset / 4..(offset + bytes).div_ceil(4) {
            let begin = offset.max(n * 4) - n * 4;
            let end = (offset + bytes).min(n * 4 + 4) - n * 4;
            let mut mask = ((1u32 << end) - (1 << begin)) as u8;
            if let Kind::Read(used) = kind {
                mask &= (((used as u64) << 4 >> (n * 4 + 4 - offset)) & 15) as u8;
                if mask == 0 {
                    continue;
                }
            }
            let new = Touch {
                component: component as u32,
                epoch,
                warp: warp as u16,
                bytes: mask,
                is_atomic,
                lanes: 1 << lane,
                turn,
                is_read,
                line,
            };
            let word = self.words[rank][n];
            let conflicts = |touch: &&Touch| {
                // Lanes of one instruction may write the same word, and leave there what one of them wrote.
                let together = touch.component == new.component
                    && touch.line == line
                    && touch.turn == turn
                    && touch.epoch == epoch
                    && !is_read;
                let is_fine = together || touch.is_atomic && is_atomic || self.is_before(touch, warp, lane);
                touch.bytes & mask != 0 && !is_fine
            };
            let more =
                if word.has_more && !is_read { self.more.get(&(rank, n)).map_or(&[][..], |more| more) } else { &[] };
            let reads = word.read.iter().chain(more).filter(|_| !is_read);
            let written = word.write.iter().find(conflicts).map(|touch| (touch, "writes"));
            if let Some((touch, does)) =
                written.or_else(|| reads.into_iter().find(conflicts).map(|touch| (touch, "reads")))
            {
                let (own, byte) = (if is_read { "reads" } else { "writes" }, n * 4 + begin);
                let Touch { warp: other, lanes, line, .. } = touch;
                return Err(format!(
                    "race: lane {lane} {own} byte {byte} of CTA {rank}'s shared memory, which warp {other} of the cluster (lanes {lanes:x}) {does} at line {line}"
                ));
            }
            let to = &mut self.words[rank][n];
            if is_read {
                match &mut to.read {
                    Some(read) if read.component == new.component && read.turn == turn && read.epoch == epoch => {
                        read.lanes |= new.lanes;
                        read.bytes |= mask;
                    }
                    Some(read) => {
                        let old = *read;
                        *read = new;
                        if old.component != new.component {
                            to.has_more = true;
                            let more = self.more.entry((rank, n)).or_default();
                            more.retain(|one| one.component != old.component);
                            more.push(old);
                        }
                    }
                    None => to.read = Some(new),
                }
            } else {
                let merged = to.write.filter(|old| {
                    old.component == new.component && old.line == line && old.turn == turn && old.epoch == epoch
                });
                let lanes = merged.map_or(0, |old| old.lanes);
                *to = Word { write: Some(Touch { lanes: lanes | new.lanes, ..new }), read: None, has_more: false };
                if word.has_more {
                    self.more.remove(&(rank, n));
                }
            }
        }
        Ok(())
    }
}
