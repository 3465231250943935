//! The order of launches, fills and copies among each other: by streams, events, graphs and the host's waiting. The search for races in global
//! memory asks for it.
//!
//! The emulated device does all work when it is enqueued, one after the other; here stands which of it a device might do at once.

use std::collections::HashMap;

/// Works, by number.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Set(Vec<u64>);

impl Set {
    pub fn has(&self, work: u32) -> bool {
        self.0.get(work as usize / 64).is_some_and(|bits| bits >> (work % 64) & 1 != 0)
    }
    fn add(&mut self, work: u32) {
        if self.0.len() <= work as usize / 64 {
            self.0.resize(work as usize / 64 + 1, 0);
        }
        self.0[work as usize / 64] |= 1 << (work % 64);
    }
    fn join(&mut self, other: &Set) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| *own |= other);
    }
}

/// The works that are over when a work begins, and those that are over once a thread of it has waited for the launch in front
/// (`griddepcontrol.wait`).
#[derive(Clone, Default)]
pub struct Interval {
    pub begun: Set,
    pub waited: Set,
}

/// The works that came before on a stream.
#[derive(Clone, Default)]
struct Stream {
    done: Set,
    /// The last launch, if nothing came after it: a dependent launch may begin before it ends.
    last: Option<u32>,
    /// Does not wait for the legacy default stream, nor the other way round.
    is_non_blocking: bool,
}

/// Every work that was enqueued, and what orders it.
#[derive(Default)]
pub struct Works {
    names: Vec<String>,
    intervals: Vec<Interval>,
    streams: HashMap<usize, Stream>,
    events: HashMap<usize, Set>,
    /// The works that the host has waited for.
    host: Set,
}

/// Handles of the legacy default stream.
const LEGACY: [usize; 2] = [0, 1];

impl Works {
    pub fn name(&self, work: u32) -> &str {
        &self.names[work as usize]
    }
    pub fn interval(&self, work: u32) -> &Interval {
        &self.intervals[work as usize]
    }
    fn new_work(&mut self, name: &str, interval: Interval) -> u32 {
        self.names.push(name.to_owned());
        self.intervals.push(interval);
        self.names.len() as u32 - 1
    }

    pub fn creates(&mut self, stream: usize, is_non_blocking: bool) {
        self.streams.insert(stream, Stream { is_non_blocking, ..Stream::default() });
    }

    /// All that a work on the stream comes after now.
    fn before(&self, stream: usize) -> Set {
        let mut done = self.host.clone();
        let own = self.streams.get(&stream);
        own.into_iter().for_each(|own| done.join(&own.done));
        let is_legacy = LEGACY.contains(&stream);
        for (other, one) in self.streams.iter().filter(|(_, one)| !one.is_non_blocking) {
            if is_legacy || LEGACY.contains(other) && !own.is_some_and(|own| own.is_non_blocking) {
                done.join(&one.done);
            }
        }
        done
    }

    /// Enqueues a work; returns its number. `depends`: it may begin before the launch in front of it has ended.
    pub fn enqueue(&mut self, stream: usize, name: &str, depends: bool) -> u32 {
        let waited = self.before(stream);
        let last = self.streams.entry(stream).or_default().last.filter(|_| depends);
        let mut begun = last.map_or_else(|| waited.clone(), |last| self.intervals[last as usize].begun.clone());
        // What the host has waited for is over before it enqueues anything.
        begun.join(&self.host);
        self.new_work(name, Interval { begun, waited })
    }

    /// A work of a stream has ended.
    pub fn ends(&mut self, stream: usize, work: u32, is_launch: bool) {
        let before = self.before(stream);
        let own = self.streams.entry(stream).or_default();
        own.done.join(&before);
        own.done.add(work);
        own.last = is_launch.then_some(work);
    }

    /// Enqueues a graph's node after some of its others; one without any comes after what the stream holds.
    pub fn enqueue_node(&mut self, stream: usize, name: &str, before: &[u32], depends: bool) -> u32 {
        let mut waited = self.before(stream);
        for &one in before {
            waited.join(&self.intervals[one as usize].waited);
            waited.add(one);
        }
        let begun = match before {
            &[one] if depends => self.intervals[one as usize].begun.clone(),
            _ => waited.clone(),
        };
        self.new_work(name, Interval { begun, waited })
    }

    pub fn ends_graph(&mut self, stream: usize, nodes: &[u32]) {
        let before = self.before(stream);
        let own = self.streams.entry(stream).or_default();
        own.done.join(&before);
        nodes.iter().for_each(|&node| own.done.add(node));
        own.last = None;
    }

    pub fn records(&mut self, event: usize, stream: usize) {
        let done = self.before(stream);
        self.events.insert(event, done);
    }
    pub fn waits(&mut self, stream: usize, event: usize) {
        if let Some(done) = self.events.get(&event).cloned() {
            let own = self.streams.entry(stream).or_default();
            own.done.join(&done);
            own.last = None;
        }
    }
    /// The host has waited for a stream, or has seen that it is empty.
    pub fn host_waits(&mut self, stream: usize) {
        self.host = self.before(stream);
    }
    pub fn host_waits_for_event(&mut self, event: usize) {
        if let Some(done) = self.events.get(&event).cloned() {
            self.host.join(&done);
        }
    }
    pub fn host_waits_for_all(&mut self) {
        self.streams.values().for_each(|stream| self.host.join(&stream.done));
    }
}
