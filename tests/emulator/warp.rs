//! A warp: groups of lanes that stand at the same instruction. The group that is furthest behind goes on first, so that lanes that took
//! different ways meet again; a group that has to wait lets others pass.

use crate::access::changed;
use crate::copies::LaneCopies;
use crate::instruction::{Instruction, Kernel, Op, Shuffle, Special, Vote};
use crate::machine::{Cluster, Launch, Word};
use crate::memory::Fault;
use crate::races::Kind;
use crate::values::{ALL, LANES, Registers, Value};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The device's clock, in nanoseconds. It goes on by some when it is read, so that who waits for it is soon done and the same in every run.
static CLOCK: AtomicU32 = AtomicU32::new(0);
const READING: u32 = 1000;

pub struct Warp {
    pub registers: Registers,
    groups: Vec<Group>,
    /// Lanes that have not ended.
    pub live: u32,
    pub cta: u32,
    /// The CTA's rank in its cluster.
    pub rank: usize,
    pub number: u32,
    /// The warp's number in the cluster.
    pub index: usize,
    pub copies: Vec<LaneCopies>,
    /// The generation of the cluster's barrier at the last arrival.
    arrival: u32,
    /// The piece of memory that was touched last.
    pub recent: (u64, u64),
    /// Registers of each of its threads.
    taken: u32,
}

struct Group {
    at: u32,
    mask: u32,
    wait: Wait,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Wait {
    No,
    /// Until these lanes come to the same instruction.
    Lanes(u32),
    /// Until the generation of a barrier has passed.
    Barrier {
        number: usize,
        generation: u32,
        joins: Option<(bool, u32)>,
    },
    Cluster(u32),
    /// Until others have done something: the lanes ask again in the warp's next turn.
    Spins,
}

/// What an instruction does to the order of execution.
enum Next {
    Follows,
    Jumps(u32),
    /// These lanes jump, the others do not.
    Parts(u32, u32),
    Ends(u32),
    /// The instruction is to be executed again.
    Again(Wait),
    /// The instruction is done once the wait is over.
    Waits(Wait),
    /// Done, but others should go on first.
    Spins,
}

pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        (rest != 0).then(|| {
            let lane = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            lane
        })
    })
}

impl Warp {
    pub fn new(cta: u32, rank: usize, number: u32, launch: &Launch, registers: Registers) -> Warp {
        let threads = (launch.threads - number * LANES as u32).min(LANES as u32);
        let live = (ALL as u64 >> (LANES as u32 - threads)) as u32;
        let copies = (0..LANES).map(|_| LaneCopies::default()).collect();
        let groups = vec![Group { at: 0, mask: live, wait: Wait::No }];
        let index = rank * launch.threads.div_ceil(LANES as u32) as usize + number as usize;
        Warp {
            registers,
            groups,
            live,
            cta,
            rank,
            number,
            index,
            copies,
            arrival: 0,
            recent: (0, 0),
            taken: launch.kernel.registers,
        }
    }

    /// Where its lanes are, for a report.
    pub fn places(&self, kernel: &Kernel) -> String {
        let place = |group: &Group| {
            let line = kernel.code[group.at as usize].line;
            format!("lanes {:08x} at line {line} ({:?})", group.mask, group.wait)
        };
        format!(
            "CTA {} warp {}: {}",
            self.cta,
            self.number,
            self.groups.iter().map(place).collect::<Vec<_>>().join(", ")
        )
    }

    /// Groups that stand at the same instruction become one.
    fn meet(&mut self) {
        let mut n = 0;
        while n + 1 < self.groups.len() {
            let at = self.groups[n].at;
            let meets = |group: &Group| group.at == at && matches!(group.wait, Wait::No | Wait::Lanes(_) | Wait::Spins);
            let other = self.groups[n + 1..].iter().position(meets).filter(|_| meets(&self.groups[n]));
            match other {
                Some(m) => {
                    let other = self.groups.swap_remove(n + 1 + m);
                    let own = &mut self.groups[n];
                    own.mask |= other.mask;
                    own.wait =
                        if own.wait == Wait::Spins && other.wait == Wait::Spins { Wait::Spins } else { Wait::No };
                }
                None => n += 1,
            }
        }
    }

    /// Ends waits that are over; returns the group to go on with.
    fn choose(&mut self, cluster: &mut Cluster) -> Option<usize> {
        self.meet();
        let live = self.live;
        for group in &mut self.groups {
            match group.wait {
                Wait::Lanes(needed) if needed & live & !group.mask == 0 => group.wait = Wait::No,
                Wait::Barrier { number, generation, joins } => {
                    let barrier = &cluster.barriers[self.rank][number];
                    if barrier.generation != generation {
                        if let Some((all, to)) = joins {
                            let (every, some) = barrier.result;
                            bool::set(&mut self.registers, to, [if all { every } else { some }; LANES], group.mask);
                        }
                        if let Some(races) = &mut cluster.races {
                            races.passes(self.index, (self.rank, number));
                        }
                        (group.wait, group.at) = (Wait::No, group.at + 1);
                    }
                }
                Wait::Cluster(generation) if cluster.generation != generation => {
                    if let Some(races) = &mut cluster.races {
                        races.passes_cluster(self.index);
                    }
                    (group.wait, group.at) = (Wait::No, group.at + 1);
                }
                _ => (),
            }
        }
        let ready = self.groups.iter().enumerate().filter(|(_, group)| group.wait == Wait::No);
        ready.min_by_key(|(_, group)| group.at).map(|(n, _)| n)
    }

    pub fn run(&mut self, launch: &Launch, cluster: &mut Cluster, turn: u64, executed: &mut u64) -> Result<(), Fault> {
        let until = *executed + turn;
        self.groups.iter_mut().filter(|group| group.wait == Wait::Spins).for_each(|group| group.wait = Wait::No);
        while *executed < until {
            let Some(n) = self.choose(cluster) else { break };
            let ran = self.run_group(n, launch, cluster, until, executed);
            ran.map_err(|(at, fault)| {
                let line = launch.kernel.code[at as usize].line;
                format!("line {line}: {fault} (CTA {}, warp {})", self.cta, self.number)
            })?;
        }
        Ok(())
    }

    fn run_group(
        &mut self,
        n: usize,
        launch: &Launch,
        cluster: &mut Cluster,
        until: u64,
        executed: &mut u64,
    ) -> Result<(), (u32, Fault)> {
        let code = &launch.kernel.code[..];
        let Group { mut at, mut mask, .. } = self.groups[n];
        loop {
            let instruction = &code[at as usize];
            let active = match instruction.guard {
                None => mask,
                Some((predicate, wanted)) => {
                    let bits = self.registers.predicates[predicate as usize];
                    mask & if wanted { bits } else { !bits }
                }
            };
            *executed += 1;
            if let Op::Compute(compute) = instruction.op {
                compute(&mut self.registers, &instruction.r, active);
                at += 1;
            } else if active == 0 {
                at += 1;
            } else {
                match self.execute(instruction, active, mask, launch, cluster).map_err(|fault| (at, fault))? {
                    Next::Follows => at += 1,
                    Next::Jumps(to) => at = to,
                    Next::Parts(jump, to) => {
                        self.groups.push(Group { at: to, mask: jump, wait: Wait::No });
                        mask &= !jump;
                        at += 1;
                    }
                    Next::Ends(ended) => {
                        self.live &= !ended;
                        mask &= !ended;
                        cluster.live[self.rank] -= ended.count_ones();
                        if mask == 0 {
                            self.groups.swap_remove(n);
                            let (taken, all) = (cluster.registers[self.rank], launch.registers());
                            if cluster.live[self.rank] == 0 && taken > all {
                                let text =
                                    format!("warps take {taken} registers of a thread together; the CTA has {all}");
                                return Err((at, text));
                            }
                            if cluster.live[self.rank] == 0
                                && cluster.pending.values().flatten().any(|pending| pending.rank == self.rank)
                            {
                                return Err((at, "the CTA ends before what is on its way to its shared memory".into()));
                            }
                            return Ok(());
                        }
                        at += 1;
                    }
                    Next::Again(wait) | Next::Waits(wait) => {
                        self.groups[n] = Group { at, mask, wait };
                        return Ok(());
                    }
                    Next::Spins => {
                        self.groups[n] = Group { at: at + 1, mask, wait: Wait::Spins };
                        return Ok(());
                    }
                }
            }
            if self.groups.len() > 1 {
                // Those that stand here go on together; who is further behind goes first.
                self.groups[n] = Group { at, mask, wait: Wait::No };
                let comes_first =
                    |(m, group): (usize, &Group)| m != n && (group.at == at || group.wait == Wait::No && group.at < at);
                if self.groups.iter().enumerate().any(comes_first) {
                    return Ok(());
                }
            }
            if *executed >= until {
                self.groups[n] = Group { at, mask, wait: Wait::No };
                return Ok(());
            }
        }
    }

    fn words(&self, at: u32) -> [u32; LANES] {
        self.registers.words[at as usize]
    }

    /// All lanes of the mask have to take part; else the others are waited for.
    fn needs(&self, needed: u32, mask: u32) -> Option<Next> {
        let needed = needed & self.live;
        (needed & !mask != 0).then_some(Next::Again(Wait::Lanes(needed)))
    }

    fn execute(
        &mut self,
        instruction: &Instruction,
        active: u32,
        mask: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<Next, Fault> {
        let r = &instruction.r[..];
        if let Some(races) = &mut cluster.races {
            races.at_line(self.index, instruction.line);
        }
        if let (Some(races), Op::Shuffle(_) | Op::Vote(_) | Op::Reduce(..) | Op::Multiply(_)) =
            (&mut cluster.races, instruction.op)
        {
            races.exchange(self.index);
        }
        match instruction.op {
            Op::Compute(_) | Op::Nothing => (),
            Op::TakeRegisters(count) => {
                cluster.registers[self.rank] += count;
                cluster.registers[self.rank] -= std::mem::replace(&mut self.taken, count);
            }
            Op::Branch(to) if active == mask => return Ok(Next::Jumps(to)),
            Op::Branch(to) => return Ok(Next::Parts(active, to)),
            Op::Exit => {
                self.finish_copies(active, launch, cluster)?;
                return Ok(Next::Ends(active));
            }
            Op::Fence { is_narrow } => {
                if let Some(races) = &mut cluster.races {
                    races.fences(self.index);
                    if let Some((_, current)) = launch.global.filter(|_| !is_narrow) {
                        races.fences_globally(self.index, current);
                    }
                }
            }
            Op::WaitLaunches => {
                if let Some(races) = &mut cluster.races {
                    races.waits_for_launches(self.index);
                }
            }
            Op::Trap => return Err("trap".into()),
            Op::Special(special) => {
                let first = self.number * LANES as u32;
                let now = if special == Special::Time { CLOCK.fetch_add(READING, Relaxed) } else { 0 };
                let row: [u32; LANES] = std::array::from_fn(|lane| match special {
                    Special::Thread => first + lane as u32,
                    Special::Threads => launch.threads,
                    Special::Cta => self.cta,
                    Special::Ctas => launch.ctas,
                    Special::ClusterRank => self.rank as u32,
                    Special::ClusterCtas => launch.cluster,
                    Special::Lane => lane as u32,
                    Special::Time => now,
                });
                u32::set(&mut self.registers, r[0], row, active);
            }
            Op::Load(access) => self.load(&access, r, active, launch, cluster)?,
            Op::Store(access) => self.store(&access, r, active, launch, cluster)?,
            Op::Atomic(access, change, returns) => self.atomic(&access, change, returns, r, active, launch, cluster)?,
            Op::WarpBarrier => {
                let needed = lanes(active).fold(0, |all, lane| all | self.words(r[0])[lane]);
                if let Some(wait) = self.needs(needed, mask) {
                    return Ok(wait);
                }
                if let Some(races) = &mut cluster.races {
                    races.meet(self.index);
                }
            }
            Op::Barrier { counted, aligned, joins } => {
                if aligned && let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                let (number, predicate) = if joins.is_some() { (r[1], Some(r[2])) } else { (r[0], None) };
                let first = active.trailing_zeros() as usize;
                let number = self.words(number)[first] as usize;
                let live = cluster.live[self.rank];
                if let Some(races) = &mut cluster.races {
                    races.arrives(self.index, (self.rank, number));
                }
                let barrier = cluster.barriers[self.rank].get_mut(number).ok_or("there are 16 barriers")?;
                // A warp arrives as a whole at a barrier that counts, and with the lanes that have not ended at one for all threads.
                barrier.arrived += if counted && aligned { LANES as u32 } else { active.count_ones() };
                barrier.expected = if counted { self.registers.words[r[1] as usize][first] } else { 0 };
                if barrier.arrived > if counted { barrier.expected } else { live } {
                    return Err(format!("more threads arrive at barrier {number} than it is for"));
                }
                if let Some(predicate) = predicate {
                    let bits = self.registers.predicates[predicate as usize];
                    barrier.all &= bits & active == active;
                    barrier.any |= bits & active != 0;
                }
                let wait =
                    Wait::Barrier { number, generation: barrier.generation, joins: joins.map(|all| (all, r[0])) };
                cluster.settle();
                return Ok(Next::Waits(wait));
            }
            Op::ClusterArrive { is_relaxed } => {
                if let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                self.arrival = cluster.generation;
                if let Some(races) = &mut cluster.races {
                    races.arrives_at_cluster(self.index, is_relaxed);
                }
                cluster.arrived += active.count_ones();
                cluster.settle();
            }
            Op::ClusterWait => {
                if let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                return Ok(Next::Waits(Wait::Cluster(self.arrival)));
            }
            Op::Shuffle(shuffle) => {
                if let Some(wait) = self.needs(lanes(active).fold(0, |all, lane| all | self.words(r[5])[lane]), mask) {
                    return Ok(wait);
                }
                self.shuffle(shuffle, r, active)?;
            }
            Op::Vote(vote) => {
                let members = self.words(r[2]);
                if let Some(wait) = self.needs(lanes(active).fold(0, |all, lane| all | members[lane]), mask) {
                    return Ok(wait);
                }
                let bits = self.registers.predicates[r[1] as usize];
                let result = |lane: usize| {
                    let among = members[lane] & active;
                    match vote {
                        Vote::Ballot => bits & among,
                        Vote::Any => (bits & among != 0) as u32,
                        Vote::All => (bits & among == among) as u32,
                    }
                };
                let row: [u32; LANES] = std::array::from_fn(result);
                match vote {
                    Vote::Ballot => u32::set(&mut self.registers, r[0], row, active),
                    _ => bool::set(&mut self.registers, r[0], row.map(|x| x != 0), active),
                }
            }
            Op::Elect => {
                let members = lanes(active).fold(0, |all, lane| all | self.words(r[2])[lane]);
                if let Some(wait) = self.needs(members, mask) {
                    return Ok(wait);
                }
                if members & !active != 0 {
                    return Err("a lane that may be elected takes no part".into());
                }
                let elected = lanes(active).nth(cluster.choices.below(active.count_ones() as usize)).expect("a lane");
                u32::set(&mut self.registers, r[0], [elected as u32; LANES], active);
                bool::set(&mut self.registers, r[1], std::array::from_fn(|lane| lane == elected), active);
            }
            Op::Reduce(change, is_signed) => {
                let members = self.words(r[2]);
                if let Some(wait) = self.needs(lanes(active).fold(0, |all, lane| all | members[lane]), mask) {
                    return Ok(wait);
                }
                let values = self.words(r[1]);
                let mut row = [0; LANES];
                let mut rest = active;
                while rest != 0 {
                    let among = members[rest.trailing_zeros() as usize] & active;
                    let all = lanes(among)
                        .map(|lane| values[lane] as u64)
                        .reduce(|a, b| changed(change, is_signed, 4, a, b))
                        .unwrap_or(0);
                    lanes(among).for_each(|lane| row[lane] = all as u32);
                    if among & rest == 0 {
                        return Err("a lane is not among those that it names".into());
                    }
                    rest &= !among;
                }
                u32::set(&mut self.registers, r[0], row, active);
            }
            Op::OpenBarrier(access) => {
                let (addresses, counts) = (self.addresses(r[0], &access), self.words(r[1]));
                for lane in lanes(active) {
                    let at = self.shared_place(addresses[lane], access.space)?;
                    let to = self.pointer(launch, cluster, addresses[lane], access.space, 8, (lane, Kind::Write))?;
                    if let Some(races) = &mut cluster.races {
                        races.opens_word(at);
                    }
                    let count = counts[lane] as u64;
                    let word = Word { expected: count, awaited: count as i64, bytes: 0, phase: false };
                    // SAFETY: 8 bytes of shared memory.
                    unsafe { to.cast::<u64>().write_unaligned(word.pack()) };
                    cluster.word(at)?;
                }
            }
            Op::ExpectBytes(access) => {
                let (addresses, bytes) = (self.addresses(r[0], &access), self.words(r[1]));
                for lane in lanes(active) {
                    let at = self.shared_place(addresses[lane], access.space)?;
                    let mut word = cluster.word(at)?;
                    word.bytes += bytes[lane] as i64;
                    self.arrive(word, at, None, cluster)?;
                }
            }
            Op::AwaitBytes(access) => {
                let (addresses, bytes) = (self.addresses(r[0], &access), self.words(r[1]));
                for lane in lanes(active) {
                    let at = self.shared_place(addresses[lane], access.space)?;
                    let mut word = cluster.word(at)?;
                    word.bytes += bytes[lane] as i64;
                    cluster.set_word(at, word)?;
                }
            }
            Op::CompleteBytes(access) => {
                let (addresses, bytes) = (self.addresses(r[0], &access), self.words(r[1]));
                for lane in lanes(active) {
                    let at = self.shared_place(addresses[lane], access.space)?;
                    let mut word = cluster.word(at)?;
                    word.bytes -= bytes[lane] as i64;
                    if let Some(races) = &mut cluster.races {
                        races.completes_word(self.index, at);
                    }
                    cluster.set_word(at, word)?;
                }
            }
            Op::ArriveAfterCopies { barrier, is_counted } => {
                let addresses = self.addresses(r[0], &barrier);
                for lane in lanes(active) {
                    let groups = self.finish_lane(lane, launch, cluster)?;
                    let at = self.shared_place(addresses[lane], barrier.space)?;
                    let mut word = cluster.word(at)?;
                    word.awaited += !is_counted as i64;
                    self.arrive(word, at, Some(groups), cluster)?;
                }
            }
            Op::TryWait(access) => {
                let (addresses, parities) = (self.addresses(r[1], &access), self.words(r[2]));
                let mut done = 0;
                for lane in lanes(active) {
                    let at = self.shared_place(addresses[lane], access.space)?;
                    let is_over =
                        |cluster: &Cluster| Ok::<bool, Fault>(cluster.word(at)?.phase != (parities[lane] & 1 != 0));
                    let mut over = is_over(cluster)?;
                    while !over && cluster.deliver(at)? {
                        over = is_over(cluster)?;
                    }
                    done |= (over as u32) << lane;
                    if let Some(races) = cluster.races.as_mut().filter(|_| over) {
                        races.passes_word(self.index, at);
                    }
                }
                let to = &mut self.registers.predicates[r[0] as usize];
                *to = *to & !active | done & active;
                if done & active != active {
                    return Ok(Next::Spins);
                }
            }
            Op::Copy { to, from, bytes, sized } => self.copy(&to, &from, bytes, sized, r, active, launch, cluster)?,
            Op::EndCopies => lanes(active).for_each(|lane| self.copies[lane].end_group()),
            Op::WaitCopies(most) => {
                for lane in lanes(active) {
                    self.wait_copies(lane, most, launch, cluster)?;
                }
            }
            Op::BulkLoad { to, from, barrier } => self.bulk_load(&to, &from, &barrier, r, active, launch, cluster)?,
            Op::TensorLoad { to, from, barrier } => {
                self.tensor_load(&to, &from, &barrier, r, active, launch, cluster)?
            }
            Op::BulkStore { to, from } => self.bulk_store(&to, &from, r, active, launch, cluster)?,
            Op::EndBulk => lanes(active).for_each(|lane| self.copies[lane].end_bulk()),
            Op::WaitBulk { most, has_written } => {
                for lane in lanes(active) {
                    self.wait_bulk(lane, Some(most), has_written, launch, cluster)?;
                }
            }
            Op::StoreAsync { to, barrier } => self.store_async(&to, &barrier, r, active, cluster)?,
            Op::Map => {
                let (addresses, ranks) = (self.words(r[1]), self.words(r[2]));
                let row = std::array::from_fn(|lane| {
                    addresses[lane] & ((1 << crate::memory::RANK_SHIFT) - 1)
                        | (ranks[lane] + 1) << crate::memory::RANK_SHIFT
                });
                u32::set(&mut self.registers, r[0], row, active);
            }
            Op::Multiply(product) => {
                if let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                self.multiply(product, r);
            }
            Op::LoadMatrices { from, transposed } => {
                if let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                self.load_matrices(&from, transposed, r, launch, cluster)?;
                if let Some(races) = &mut cluster.races {
                    races.exchange(self.index);
                }
            }
            Op::TransposeMatrix => {
                if let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                self.transpose_matrix(r);
            }
            Op::GroupMultiply { columns, product, a_in_registers, transposes } => {
                if let Some(wait) = self.needs(self.live, mask) {
                    return Ok(wait);
                }
                self.group_multiply(columns, product, a_in_registers, transposes, r, cluster)?;
            }
        }
        Ok(Next::Follows)
    }

    /// An arrival at a barrier in shared memory.
    fn arrive(
        &self,
        mut word: Word,
        at: (usize, usize),
        copies: Option<u32>,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        if let Some(races) = &mut cluster.races {
            races.arrives_at_word(self.index, at, copies);
        }
        word.awaited -= 1;
        if word.awaited < 0 {
            return Err("more arrivals at a barrier than it was opened for".into());
        }
        cluster.set_word(at, word)
    }

    fn shuffle(&mut self, shuffle: Shuffle, r: &[u32], active: u32) -> Result<(), Fault> {
        let (values, by, control) = (self.words(r[2]), self.words(r[3]), self.words(r[4]));
        let (mut row, mut there) = ([0; LANES], [false; LANES]);
        for lane in lanes(active) {
            let (clamp, segment) = (control[lane] & 31, control[lane] >> 8 & 31);
            let (own, by) = (lane as u32, by[lane] & 31);
            let most = own & segment | clamp & !segment;
            let least = own & segment;
            let (from, is_there) = match shuffle {
                Shuffle::Up => (own.wrapping_sub(by) as i32, own as i32 - by as i32 >= most as i32),
                Shuffle::Down => ((own + by) as i32, own + by <= most),
                Shuffle::Butterfly => ((own ^ by) as i32, own ^ by <= most),
                Shuffle::Index => ((least | by & !segment) as i32, least | by & !segment <= most),
            };
            let from = if is_there { from as usize } else { lane };
            if active >> from & 1 == 0 {
                return Err(format!("lane {lane} reads lane {from}, which takes no part"));
            }
            (row[lane], there[lane]) = (values[from], is_there);
        }
        u32::set(&mut self.registers, r[0], row, active);
        bool::set(&mut self.registers, r[1], there, active);
        Ok(())
    }
}
