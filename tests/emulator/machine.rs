//! A launch: its CTAs, in clusters, and who runs when.

use crate::instruction::{Constant, Kernel};
use crate::memory::{Fault, Pieces};
use crate::races::{Current, Global, Races};
use crate::values::{LANES, Registers};
use crate::warp::Warp;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};

pub struct Launch<'k> {
    pub kernel: &'k Kernel,
    pub ctas: u32,
    pub threads: u32,
    /// CTAs of a cluster.
    pub cluster: u32,
    /// Dynamic shared memory.
    pub shared: u64,
    pub parameters: &'k [u8],
    pub pieces: &'k Pieces,
    pub choices: Choices,
    pub finds_races: bool,
    /// Where races in global memory are looked for: what was done to it, and what this launch comes after.
    pub global: Option<(&'k RefCell<Global>, &'k Current<'k>)>,
}

impl Launch<'_> {
    /// Registers of a thread, summed over the warps of a CTA that begins.
    pub fn registers(&self) -> u32 {
        self.threads.div_ceil(LANES as u32) * self.kernel.registers
    }
}

/// The choices that a device leaves open. Another seed is another order, and with it another answer to what a kernel must not depend on.
#[derive(Clone, Copy)]
pub struct Choices {
    state: u64,
    /// Copies that a kernel does not wait for at once are done at once; else as late as they may be.
    pub eager: bool,
}

impl Choices {
    /// Seed 0 keeps everything in order.
    pub fn new(seed: u64) -> Choices {
        Choices { state: seed, eager: seed.count_ones() % 2 == 1 }
    }
    pub fn below(&mut self, count: usize) -> usize {
        if self.state == 0 {
            return 0;
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 33) as usize % count.max(1)
    }
}

/// What the warps of a cluster share.
pub struct Cluster {
    pub first_cta: u32,
    pub shared: Vec<Vec<u8>>,
    pub barriers: Vec<[Barrier; 16]>,
    /// Threads of each CTA that have not ended.
    pub live: Vec<u32>,
    /// Registers of a thread in each CTA, summed over its warps.
    pub registers: Vec<u32>,
    /// Arrivals at the cluster's barrier.
    pub arrived: u32,
    pub generation: u32,
    /// By the barrier that is told.
    pub pending: HashMap<(usize, usize), VecDeque<Pending>>,
    pub choices: Choices,
    /// `None` where races are not looked for.
    pub races: Option<Races>,
}

/// A barrier of a CTA.
#[derive(Clone, Copy, Default)]
pub struct Barrier {
    pub arrived: u32,
    pub expected: u32,
    pub generation: u32,
    pub all: bool,
    pub any: bool,
    /// The joined predicates of the generation before.
    pub result: (bool, bool),
}

/// A write to shared memory that is on its way, and the barrier there that is told.
pub struct Pending {
    pub rank: usize,
    pub offset: usize,
    pub bytes: Vec<u8>,
    pub barrier: (usize, usize),
}

impl Cluster {
    fn start(launch: &Launch, number: u32, warps: &mut Vec<Warp>) -> Cluster {
        let (ctas, kernel) = (launch.cluster as usize, launch.kernel);
        let bytes = (kernel.static_shared + launch.shared) as usize;
        for rank in 0..ctas {
            let first_cta = number * launch.cluster;
            let count = launch.threads.div_ceil(LANES as u32);
            warps.extend(
                (0..count).map(|warp| Warp::new(first_cta + rank as u32, rank, warp, launch, registers(launch))),
            );
        }
        Cluster {
            first_cta: number * launch.cluster,
            // A launch finds no particular bytes in shared memory.
            shared: vec![vec![crate::device::GARBAGE; bytes]; ctas],
            barriers: vec![[Barrier { all: true, ..Barrier::default() }; 16]; ctas],
            live: vec![launch.threads; ctas],
            registers: vec![launch.registers(); ctas],
            arrived: 0,
            generation: 0,
            pending: HashMap::new(),
            choices: launch.choices,
            races: launch.finds_races.then(|| {
                let work = launch.global.map_or(0, |(_, current)| current.work);
                Races::new(ctas, warps.len(), bytes, work, number as usize)
            }),
        }
    }

    /// Lets barriers go on whose last thread has come, or has ended.
    pub fn settle(&mut self) {
        for (rank, (barriers, &live)) in self.barriers.iter_mut().zip(&self.live).enumerate() {
            for (number, barrier) in barriers.iter_mut().enumerate().filter(|(_, barrier)| barrier.arrived > 0) {
                let expected = if barrier.expected == 0 { live } else { barrier.expected };
                if barrier.arrived >= expected {
                    if let Some(races) = &mut self.races {
                        races.is_over((rank, number));
                    }
                    barrier.result = (barrier.all, barrier.any);
                    *barrier = Barrier {
                        generation: barrier.generation + 1,
                        all: true,
                        result: barrier.result,
                        ..Barrier::default()
                    };
                }
            }
        }
        if self.arrived > 0 && self.arrived >= self.live.iter().sum() {
            self.arrived = 0;
            self.generation += 1;
            if let Some(races) = &mut self.races {
                races.cluster_is_over();
            }
        }
    }

    /// Does what is on its way to a barrier; whether there was something.
    pub fn deliver(&mut self, barrier: (usize, usize)) -> Result<bool, Fault> {
        let Some(queue) = self.pending.get_mut(&barrier) else { return Ok(false) };
        let first = queue.pop_front();
        if queue.is_empty() {
            self.pending.remove(&barrier);
        }
        first.map_or(Ok(false), |pending| self.arrive(pending).map(|()| true))
    }

    pub fn send(&mut self, pending: Pending) -> Result<(), Fault> {
        if self.live.get(pending.rank).is_none_or(|&live| live == 0) {
            return Err(format!("a write to shared memory of CTA {} of the cluster, which has ended", pending.rank));
        }
        if self.choices.eager {
            return self.arrive(pending);
        }
        self.pending.entry(pending.barrier).or_default().push_back(pending);
        Ok(())
    }

    fn arrive(&mut self, pending: Pending) -> Result<(), Fault> {
        let to = self.shared[pending.rank].get_mut(pending.offset..pending.offset + pending.bytes.len());
        to.ok_or("a write past the end of shared memory")?.copy_from_slice(&pending.bytes);
        let mut word = self.word(pending.barrier)?;
        word.bytes -= pending.bytes.len() as i64;
        self.set_word(pending.barrier, word)
    }

    /// A barrier in shared memory.
    pub fn word(&self, (rank, offset): (usize, usize)) -> Result<Word, Fault> {
        let bytes = self.shared.get(rank).and_then(|shared| shared.get(offset..offset + 8)).filter(|_| offset % 8 == 0);
        let bits =
            u64::from_ne_bytes(bytes.ok_or("a barrier that is not in shared memory")?.try_into().expect("8 bytes"));
        Word::unpack(bits).ok_or_else(|| "a barrier that was not opened".into())
    }

    pub fn set_word(&mut self, (rank, offset): (usize, usize), mut word: Word) -> Result<(), Fault> {
        if word.settle()
            && let Some(races) = &mut self.races
        {
            races.word_is_over((rank, offset));
        }
        self.shared[rank][offset..offset + 8].copy_from_slice(&word.pack().to_ne_bytes());
        Ok(())
    }
}

/// A barrier in shared memory: arrivals and bytes.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    pub expected: u64,
    pub awaited: i64,
    pub bytes: i64,
    pub phase: bool,
}

impl Word {
    const MARK: u64 = 0b101;

    /// Whether a phase is over.
    fn settle(&mut self) -> bool {
        let is_over = self.awaited == 0 && self.bytes == 0;
        if is_over {
            self.phase = !self.phase;
            self.awaited = self.expected as i64;
        }
        is_over
    }
    pub fn pack(self) -> u64 {
        // Arrivals 12 and 12 bits, bytes 36.
        Word::MARK << 61
            | (self.phase as u64) << 60
            | self.expected << 48
            | (self.awaited as u64 & 0xfff) << 36
            | (self.bytes as u64 & ((1 << 36) - 1))
    }
    fn unpack(bits: u64) -> Option<Word> {
        let signed = |bits: u64, count: u32| ((bits << (64 - count)) as i64) >> (64 - count);
        (bits >> 61 == Word::MARK).then(|| Word {
            expected: bits >> 48 & 0xfff,
            awaited: signed(bits >> 36, 12),
            bytes: signed(bits, 36),
            phase: bits >> 60 & 1 != 0,
        })
    }
}

fn registers(launch: &Launch) -> Registers {
    let [predicates, words, doubles] = launch.kernel.counts;
    let mut registers = Registers {
        predicates: vec![0; predicates],
        words: vec![[0; LANES]; words],
        doubles: vec![[0; LANES]; doubles],
    };
    for &(constant, at) in &launch.kernel.constants {
        let at = at as usize;
        match constant {
            Constant::Predicate(value) => registers.predicates[at] = if value { !0 } else { 0 },
            Constant::Word(value) => registers.words[at] = [value; LANES],
            Constant::Double(value) => registers.doubles[at] = [value; LANES],
            Constant::Parameter(offset) => registers.doubles[at] = [launch.parameters.as_ptr() as u64 + offset; LANES],
        }
    }
    registers
}

struct Resident {
    cluster: Cluster,
    warps: Vec<Warp>,
}

/// Instructions that a warp, and a cluster, may go on for while others could.
const WARP_TURN: u64 = 20_000;
const CLUSTER_TURN: u64 = 20_000_000;
/// Clusters that run side by side, where they wait for each other.
const MOST_RESIDENT: usize = 160;
/// Instructions of a loop that waits. A cluster none of whose warps does more, time and again, waits for others.
const SPIN: u64 = 16;
const IDLE_ROUNDS: u32 = 50;
/// Instructions that the warps of a launch may execute.
const LONGEST: u64 = 20_000_000_000;

enum State {
    Ended,
    Waits,
    Runs,
}

/// Runs a launch to its end; returns the instructions that its warps executed.
pub fn run(launch: &Launch) -> Result<u64, Fault> {
    let count = launch.ctas / launch.cluster;
    let (mut next, mut resident) = (0, VecDeque::<Resident>::new());
    let (mut executed, mut waited) = (0, 0);
    loop {
        let all_wait = waited >= resident.len();
        if (resident.is_empty() || all_wait && resident.len() < MOST_RESIDENT) && next < count {
            let mut warps = vec![];
            let cluster = Cluster::start(launch, next, &mut warps);
            next += 1;
            waited = 0;
            resident.push_front(Resident { cluster, warps });
        } else if all_wait && waited > resident.len() * 50 {
            let Some(first) = resident.front() else { return Ok(executed) };
            let places: Vec<String> = first.warps.iter().take(4).map(|warp| warp.places(launch.kernel)).collect();
            return Err(format!(
                "no warp can go on: cluster of CTA {}: {}",
                first.cluster.first_cta,
                places.join("; ")
            ));
        }
        let Some(mut one) = resident.pop_front() else { return Ok(executed) };
        match one.turn(launch, &mut executed)? {
            State::Ended => waited = 0,
            State::Waits => {
                waited += 1;
                resident.push_back(one);
            }
            State::Runs => {
                waited = 0;
                resident.push_back(one);
            }
        }
        if executed > LONGEST {
            return Err(format!("{LONGEST} instructions were executed, and the end is not reached"));
        }
    }
}

impl Resident {
    fn turn(&mut self, launch: &Launch, executed: &mut u64) -> Result<State, Fault> {
        let (until, mut idle) = (*executed + CLUSTER_TURN, 0);
        while *executed < until {
            let mut goes_on = false;
            let first = self.cluster.choices.below(self.warps.len());
            for n in 0..self.warps.len() {
                let at = (n + first) % self.warps.len();
                let warp = &mut self.warps[at];
                if warp.live == 0 {
                    continue;
                }
                let turn = if self.cluster.choices.below(4) == 3 { 1 + WARP_TURN / 1000 } else { WARP_TURN };
                let before = *executed;
                warp.run(launch, &mut self.cluster, turn, executed)?;
                goes_on |= *executed - before > SPIN;
                self.cluster.settle();
            }
            if self.warps.iter().all(|warp| warp.live == 0) {
                if !self.cluster.pending.is_empty() {
                    return Err("a CTA has ended before what was on its way to its shared memory".into());
                }
                return Ok(State::Ended);
            }
            idle = if goes_on { 0 } else { idle + 1 };
            if idle == IDLE_ROUNDS {
                return Ok(State::Waits);
            }
        }
        Ok(State::Runs)
    }
}
