//! Races in global memory: two accesses to the same bytes, one of them a write, that nothing orders.
//!
//! What orders accesses of one launch: barriers of a CTA and of a cluster, barriers in shared memory, and a release that another thread's
//! acquire reads. A release is an atomic or a volatile store after a fence whose scope is the device, or an atomic that releases itself; an
//! acquire is the mirror of it. The clocks of [`super::Clock`] carry this on. What orders launches: streams, events and graphs
//! (`crate::streams`), and `griddepcontrol.wait` where a launch may begin before the one in front of it has ended.
//!
//! Accesses that are atomic or volatile do not race with each other. The shadow memory has a word for each four bytes: the last write, and the last read of
//! each of a few warps.

use super::{Clock, Kind, Races};
use crate::memory::Fault;
use crate::streams::{Interval, Works};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The order that an access gives to others, beside its own bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Order {
    /// Atomic or volatile: does not race with others that are.
    pub is_strong: bool,
    pub acquires: bool,
    pub releases: bool,
    /// Threads of the same CTA, or the same cluster, alone are meant.
    pub is_narrow: bool,
}

/// How far components of other clusters and other launches are known to have come; ascending.
pub type Others = Arc<Vec<(Component, u32)>>;

/// The accesses of a warp of a launch, or the writes of its bulk copies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Component {
    work: u32,
    /// The warp's number in the launch.
    warp: u32,
    is_bulk: bool,
}

pub fn join_others(own: &mut Others, other: &Others) {
    if other.is_empty() || Arc::ptr_eq(own, other) {
        return;
    }
    if own.is_empty() {
        *own = other.clone();
        return;
    }
    let (mut merged, mut rest) = (Vec::with_capacity(own.len().max(other.len())), other.iter().peekable());
    for &(component, epoch) in own.iter() {
        while let Some(&&one) = rest.peek().filter(|one| one.0 < component) {
            merged.push(one);
            rest.next();
        }
        let same = rest.next_if(|one| one.0 == component);
        merged.push((component, same.map_or(epoch, |one| one.1.max(epoch))));
    }
    merged.extend(rest);
    *own = Arc::new(merged);
}

/// An access to a word.
#[derive(Clone, Copy)]
struct Access {
    component: Component,
    epoch: u32,
    lanes: u32,
    /// How many times the lanes of the warp had met by then; for reads, in any instruction.
    turn: u32,
    line: u32,
    /// Bytes of the word.
    bytes: u8,
    is_strong: bool,
    is_read: bool,
}

#[derive(Clone, Default)]
struct Word {
    write: Option<Access>,
    reads: Vec<Access>,
}

/// Reads of a word that are remembered.
const MOST_READS: usize = 6;
const PAGE: u64 = 4096;
type Page = [Word; PAGE as usize / 4];

/// The device's shadow memory.
#[derive(Default)]
pub struct Global {
    pages: HashMap<u64, Box<Page>>,
    /// The clocks that releases at a word have passed on.
    published: HashMap<u64, Others>,
    /// Reports a race and goes on, instead of ending.
    pub goes_on: bool,
    reported: HashSet<(u32, u32, String)>,
}

/// A launch, a fill or a copy that is under way.
pub struct Current<'w> {
    pub work: u32,
    pub interval: Interval,
    pub works: &'w Works,
}

impl Current<'_> {
    /// Whether all of another launch happened before what a thread does that waited, or did not, for the launch in front.
    fn follows(&self, work: u32, has_waited: bool, others: &[(Component, u32)]) -> bool {
        let own = if has_waited { &self.interval.waited } else { &self.interval.begun };
        own.has(work)
            || others.iter().any(|(one, _)| one.work != self.work && self.works.interval(one.work).waited.has(work))
    }
}

impl Global {
    /// Forgets what was done to bytes that are given back.
    pub fn forget(&mut self, begin: u64, bytes: u64) {
        let end = begin + bytes;
        for page in begin / PAGE..end.div_ceil(PAGE) {
            if let Some(words) = self.pages.get_mut(&page) {
                for (n, word) in words.iter_mut().enumerate() {
                    if (begin..end).contains(&(page * PAGE + n as u64 * 4)) {
                        *word = Word::default();
                    }
                }
            }
        }
        self.published.retain(|address, _| !(begin..end).contains(address));
    }

    fn word(&mut self, address: u64) -> &mut Word {
        let new = || {
            vec![Word::default(); PAGE as usize / 4].into_boxed_slice().try_into().unwrap_or_else(|_| unreachable!())
        };
        &mut self.pages.entry(address / PAGE).or_insert_with(new)[(address % PAGE / 4) as usize]
    }

    /// A fill or a copy accesses bytes.
    pub fn touch_range(&mut self, begin: u64, bytes: u64, is_read: bool, current: &Current) -> Result<(), Fault> {
        let component = Component { work: current.work, warp: 0, is_bulk: false };
        let mut new = Access { component, epoch: 1, lanes: 1, turn: 0, line: 0, bytes: 0, is_strong: false, is_read };
        for address in (begin & !3..begin + bytes).step_by(4) {
            new.bytes = byte_mask(address, begin, bytes);
            let before = |old: &Access| old.component == component || current.follows(old.component.work, true, &[]);
            self.access(address, new, before, &|| format!("{} at {address:#x}", does(is_read)), current)?;
        }
        Ok(())
    }

    /// Looks for an access to the word that is not before the new one, and writes the new one down.
    fn access(
        &mut self,
        address: u64,
        new: Access,
        is_before: impl Fn(&Access) -> bool,
        what: &dyn Fn() -> String,
        current: &Current,
    ) -> Result<(), Fault> {
        let word = self.word(address);
        let races = |old: &Access| {
            // Lanes of one instruction may write the same word, and leave there what one of them wrote.
            let together = old.component == new.component
                && old.line == new.line
                && old.turn == new.turn
                && old.epoch == new.epoch
                && !new.is_read
                && !old.is_read;
            // A volatile read of what another launch may be writing is a guess that is checked later.
            let is_guess = |one: &Access| one.is_strong && one.is_read;
            let guesses = old.component.work != new.component.work && (is_guess(old) || is_guess(&new));
            let is_fine = together || guesses || old.is_strong && new.is_strong || is_before(old);
            old.bytes & new.bytes != 0 && !is_fine
        };
        let reads = word.reads.iter().filter(|_| !new.is_read);
        let found = word.write.iter().chain(reads).find(|old| races(old)).copied();
        if new.is_read {
            // A read that is before this one is before whatever is after this one.
            let same = |old: &Access| {
                old.component == new.component
                    && old.turn == new.turn
                    && old.epoch == new.epoch
                    && old.is_strong == new.is_strong
            };
            match word.reads.iter_mut().find(|old| same(old)) {
                Some(old) => {
                    old.lanes |= new.lanes;
                    old.bytes |= new.bytes;
                }
                None => {
                    word.reads.retain(|old| old.bytes & !new.bytes != 0 || !is_before(old));
                    if word.reads.len() == MOST_READS {
                        word.reads.remove(0);
                    }
                    word.reads.push(new);
                }
            }
        } else {
            let merged = word.write.filter(|old| {
                old.component == new.component && old.line == new.line && old.turn == new.turn && old.epoch == new.epoch
            });
            let (lanes, bytes) = merged.map_or((0, 0), |old| (old.lanes, old.bytes));
            word.write = Some(Access { lanes: lanes | new.lanes, bytes: bytes | new.bytes, ..new });
            word.reads.clear();
        }
        found.map_or(Ok(()), |old| self.report(old, new, what, current))
    }

    fn report(&mut self, old: Access, new: Access, what: &dyn Fn() -> String, current: &Current) -> Result<(), Fault> {
        let Component { work, warp, is_bulk } = old.component;
        let (does, name) = (does(old.is_read), current.works.name(work));
        let by = if is_bulk { "bulk copies of warp" } else { "warp" };
        let fault = format!(
            "race for global memory: {}, which {name} {does} at line {} ({by} {warp} of launch {work}, lanes {:x}; this is launch {})",
            what(),
            old.line,
            old.lanes,
            current.work
        );
        if !self.goes_on {
            return Err(fault);
        }
        if self.reported.insert((old.line, new.line, format!("{name} {}", current.works.name(current.work)))) {
            eprintln!("emulated device: {}, line {}: {fault}", current.works.name(current.work), new.line);
        }
        Ok(())
    }
}

fn does(is_read: bool) -> &'static str {
    if is_read { "reads" } else { "writes" }
}

/// Which bytes of the word at `address` an access touches.
fn byte_mask(address: u64, begin: u64, bytes: u64) -> u8 {
    let from = begin.max(address) - address;
    let to = (begin + bytes).min(address + 4) - address;
    ((1u32 << to) - (1 << from)) as u8
}

impl Races {
    fn component(&self, warp: usize, is_bulk: bool) -> Component {
        Component { work: self.work, warp: (self.cluster_number * self.warps.len() + warp) as u32, is_bulk }
    }

    /// A clock as other clusters may read it.
    fn for_others(&self, clock: &Clock, current: &Current) -> Others {
        let count = self.warps.len();
        let (known, has_waited) = (&clock.others, clock.has_waited);
        let own = (0..count).flat_map(|warp| {
            let did = (self.component(warp, false), clock.get(self.elsewhere(warp)));
            [did, (self.component(warp, true), clock.get(count * 4 + warp))]
        });
        let mut others: Vec<_> = own.filter(|one| one.1 > 0).collect();
        others.extend(known.iter().filter(|(one, _)| !current.follows(one.work, has_waited, &[])));
        others.sort_unstable();
        Arc::new(others)
    }

    /// Clocks of its own cluster go to their places; what is known of works anyway is left out.
    fn learn(&self, others: &Others, clock: &mut Clock, current: &Current) {
        let (count, first) = (self.warps.len(), self.component(0, false).warp);
        let mut rest = vec![];
        for &(component, epoch) in others.iter() {
            let own = component.warp.wrapping_sub(first) as usize;
            if component.work == self.work && own < count {
                clock.raise(if component.is_bulk { count * 4 + own } else { self.elsewhere(own) }, epoch);
            } else if !current.follows(component.work, clock.has_waited, &[]) {
                rest.push((component, epoch));
            }
        }
        join_others(&mut clock.others, &Arc::new(rest));
    }

    /// A fence whose scope is the device.
    pub fn fences_globally(&mut self, warp: usize, current: &Current) {
        let told = std::mem::take(&mut self.warps[warp].told_globally);
        let mut clock = std::mem::take(&mut self.warps[warp].clock);
        self.learn(&told, &mut clock, current);
        self.warps[warp].clock = clock;
        let clock = self.release(warp);
        self.warps[warp].fenced_globally = self.for_others(&clock, current);
    }

    /// An atomic, or a volatile access, of a word through which threads may order what they do.
    fn synchronizes(
        &mut self,
        warp: usize,
        address: u64,
        order: Order,
        kind: Kind,
        global: &mut Global,
        current: &Current,
    ) {
        if order.is_narrow {
            return;
        }
        let (reads, writes) = (kind.reads(), kind.writes());
        if reads && let Some(told) = global.published.get(&address) {
            if order.acquires {
                let mut clock = std::mem::take(&mut self.warps[warp].clock);
                self.learn(told, &mut clock, current);
                self.warps[warp].clock = clock;
            } else {
                join_others(&mut self.warps[warp].told_globally, told);
            }
        }
        if writes {
            let passed = if order.releases {
                let clock = self.release(warp);
                self.for_others(&clock, current)
            } else {
                self.warps[warp].fenced_globally.clone()
            };
            let published = global.published.entry(address).or_default();
            if !reads {
                *published = Others::default();
            }
            join_others(published, &passed);
            // Whoever reads this knows what the launch knew when it began.
            if !passed.is_empty()
                && published.iter().any(|(one, _)| one.work != self.work && current.interval.begun.has(one.work))
            {
                let rest = published.iter().filter(|(one, _)| !current.interval.begun.has(one.work));
                *published = Arc::new(rest.copied().collect());
            }
        }
    }

    /// A lane touches bytes of global memory.
    pub fn touch_global(
        &mut self,
        warp: usize,
        lane: usize,
        (address, bytes): (u64, u64),
        kind: Kind,
        global: &mut Global,
        current: &Current,
    ) -> Result<(), Fault> {
        let order = match kind {
            Kind::Known => return Ok(()),
            Kind::Atomic(order) | Kind::StrongRead(order) | Kind::StrongWrite(order) => order,
            _ => Order::default(),
        };
        let (one, count) = (&self.warps[warp], self.warps.len());
        let (is_read, is_bulk) = (!kind.writes(), matches!(kind, Kind::BulkWrites(_)));
        let epoch = match kind {
            Kind::BulkWrites(group) => group + 1,
            _ => one.clock.get(self.elsewhere(warp)),
        };
        let mut new = Access {
            component: self.component(warp, is_bulk),
            epoch,
            lanes: 1 << lane,
            turn: if is_read { one.exchanges } else { one.turn },
            line: one.line,
            bytes: 0,
            is_strong: order.is_strong,
            is_read,
        };
        let first = self.component(0, false).warp;
        let before = |old: &Access| {
            let Component { work, warp: number, is_bulk } = old.component;
            let own = number.wrapping_sub(first) as usize;
            if work == self.work && own < count {
                let component = if is_bulk { count * 4 + own } else { self.elsewhere(own) };
                return self.knows(component, old.epoch, (own, old.lanes, old.turn, old.is_read), warp, lane);
            }
            let others = &one.clock.others;
            let known =
                others.binary_search_by_key(&old.component, |one| one.0).is_ok_and(|at| others[at].1 >= old.epoch);
            known || work != self.work && current.follows(work, one.clock.has_waited, others)
        };
        for at in (address & !3..address + bytes).step_by(4) {
            new.bytes = byte_mask(at, address, bytes);
            if let Kind::Read(used) = kind {
                // The bytes that the compiler has a use for.
                new.bytes &= (((used as u64) << 4 >> (at + 4 - address)) & 15) as u8;
                if new.bytes == 0 {
                    continue;
                }
            }
            let what = || format!("lane {lane} {} at {at:#x}", does(is_read));
            global.access(at, new, before, &what, current)?;
        }
        if order.is_strong {
            self.synchronizes(warp, address, order, kind, global, current);
        }
        Ok(())
    }

    /// The launches in front are over for this warp.
    pub fn waits_for_launches(&mut self, warp: usize) {
        self.warps[warp].clock.has_waited = true;
    }
}
