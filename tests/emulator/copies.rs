//! Copies that go on while their thread does. Until it waits for them nothing, or everything, has happened: as the launch chooses.

use crate::instruction::Access;
use crate::machine::{Cluster, Launch, Pending};
use crate::memory::Fault;
use crate::races::Kind;
use crate::values::Class;
use crate::warp::{Warp, lanes};
use std::collections::VecDeque;

#[derive(Default)]
pub struct LaneCopies {
    copies: Groups,
    bulk: Groups,
}

/// Copies in groups that end in order.
#[derive(Default)]
struct Groups {
    queue: VecDeque<(u32, Copy)>,
    /// The group that is open.
    open: u32,
}

struct Copy {
    to: u64,
    from: u64,
    /// Read, and written: the rest is zeros.
    bytes: (u32, u32),
    /// How the target and the source are accessed.
    accesses: (Access, Access),
}

impl Groups {
    /// The oldest copy that is not among the groups that ended last; `None`: of all, the open one included.
    fn take(&mut self, most: Option<u32>) -> Option<Copy> {
        let (group, _) = self.queue.front()?;
        let is_due = most.is_none_or(|most| group + most < self.open);
        is_due.then(|| self.queue.pop_front().expect("there is one").1)
    }
}

impl Groups {
    /// How many groups are over after such a wait.
    fn done(&self, most: Option<u32>) -> u32 {
        most.map_or(self.open + 1, |most| self.open.saturating_sub(most))
    }
}

impl LaneCopies {
    pub fn end_group(&mut self) {
        self.copies.open += 1;
    }
    pub fn end_bulk(&mut self) {
        self.bulk.open += 1;
    }
}

impl Warp {
    pub fn tell_races(
        &self,
        lane: usize,
        (rank, offset): (usize, usize),
        bytes: u32,
        kind: Kind,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        if offset + bytes as usize > cluster.shared.get(rank).map_or(0, Vec::len) {
            return Err(format!("{bytes} bytes at {offset} of shared memory are past its end"));
        }
        cluster.races.as_mut().map_or(Ok(()), |races| races.touch(self.index, lane, rank, offset, bytes as usize, kind))
    }

    fn perform(&mut self, copy: Copy, launch: &Launch, cluster: &mut Cluster) -> Result<(), Fault> {
        let (read, written) = copy.bytes;
        let (to_space, from_space) = (copy.accesses.0.space, copy.accesses.1.space);
        let to = self.pointer(launch, cluster, copy.to, to_space, written as u64, (0, Kind::Known))?;
        // SAFETY: so many bytes are there; one side is shared memory, and the other is not.
        unsafe {
            if read > 0 {
                let from = self.pointer(launch, cluster, copy.from, from_space, read as u64, (0, Kind::Known))?;
                to.copy_from_nonoverlapping(from, read as usize);
            }
            to.add(read as usize).write_bytes(0, (written - read) as usize);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub fn copy(
        &mut self,
        to: &Access,
        from: &Access,
        bytes: u32,
        sized: bool,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let (targets, sources) = (self.addresses(r[0], to), self.addresses(r[1], from));
        for lane in lanes(active) {
            let read = if sized { self.registers.words[r[2] as usize][lane].min(bytes) } else { bytes };
            let copy = Copy { to: targets[lane], from: sources[lane], bytes: (read, bytes), accesses: (*to, *from) };
            let kind = Kind::CopyWrites(self.copies[lane].copies.open);
            self.tell_races(lane, self.shared_place(targets[lane], to.space)?, bytes, kind, cluster)?;
            if read > 0 {
                self.pointer(launch, cluster, sources[lane], from.space, read as u64, (lane, Kind::Read(!0)))?;
            }
            if cluster.choices.eager {
                self.perform(copy, launch, cluster)?;
            } else {
                let groups = &mut self.copies[lane].copies;
                groups.queue.push_back((groups.open, copy));
            }
        }
        Ok(())
    }

    pub fn wait_copies(
        &mut self,
        lane: usize,
        most: Option<u32>,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        while let Some(copy) = self.copies[lane].copies.take(most) {
            self.perform(copy, launch, cluster)?;
        }
        if let Some(races) = &mut cluster.races {
            races.waited_for_copies(self.index, self.copies[lane].copies.done(most));
        }
        Ok(())
    }

    /// Does the lane's copies for somebody else, who waits for them; returns how many groups that are.
    pub fn finish_lane(&mut self, lane: usize, launch: &Launch, cluster: &mut Cluster) -> Result<u32, Fault> {
        while let Some(copy) = self.copies[lane].copies.take(None) {
            self.perform(copy, launch, cluster)?;
        }
        Ok(self.copies[lane].copies.done(None))
    }

    pub fn wait_bulk(
        &mut self,
        lane: usize,
        most: Option<u32>,
        has_written: bool,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        while let Some(copy) = self.copies[lane].bulk.take(most) {
            self.perform(copy, launch, cluster)?;
        }
        if let Some(races) = &mut cluster.races {
            races.waited_for_bulk(self.index, self.copies[lane].bulk.done(most), has_written);
        }
        Ok(())
    }

    /// Finishes the copies of lanes that end.
    pub fn finish_copies(&mut self, ended: u32, launch: &Launch, cluster: &mut Cluster) -> Result<(), Fault> {
        for lane in lanes(ended) {
            self.wait_copies(lane, None, launch, cluster)?;
            self.wait_bulk(lane, None, true, launch, cluster)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub fn bulk_load(
        &mut self,
        to: &Access,
        from: &Access,
        barrier: &Access,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let (targets, sources, barriers) =
            (self.addresses(r[0], to), self.addresses(r[1], from), self.addresses(r[3], barrier));
        for lane in lanes(active) {
            let bytes = self.registers.words[r[2] as usize][lane];
            if !bytes.is_multiple_of(16) || targets[lane] % 16 != 0 || sources[lane] % 16 != 0 {
                return Err(format!("a bulk copy of {bytes} bytes from {:#x} to {:#x}", sources[lane], targets[lane]));
            }
            let (rank, offset) = self.shared_place(targets[lane], to.space)?;
            let barrier = self.shared_place(barriers[lane], barrier.space)?;
            let from =
                self.pointer(launch, cluster, sources[lane], from.space, bytes as u64, (lane, Kind::Read(!0)))?;
            // SAFETY: so many bytes are there.
            let bytes = unsafe { std::slice::from_raw_parts(from, bytes as usize) }.to_vec();
            self.tell_races(lane, (rank, offset), bytes.len() as u32, Kind::WritesFor(barrier), cluster)?;
            cluster.send(Pending { rank, offset, bytes, barrier })?;
        }
        Ok(())
    }

    pub fn bulk_store(
        &mut self,
        to: &Access,
        from: &Access,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let (targets, sources) = (self.addresses(r[0], to), self.addresses(r[1], from));
        for lane in lanes(active) {
            let bytes = self.registers.words[r[2] as usize][lane];
            if !bytes.is_multiple_of(16) || targets[lane] % 16 != 0 || sources[lane] % 16 != 0 {
                return Err(format!("a bulk copy of {bytes} bytes from {:#x} to {:#x}", sources[lane], targets[lane]));
            }
            let copy = Copy { to: targets[lane], from: sources[lane], bytes: (bytes, bytes), accesses: (*to, *from) };
            let kind = Kind::BulkReads(self.copies[lane].bulk.open);
            self.tell_races(lane, self.shared_place(sources[lane], from.space)?, bytes, kind, cluster)?;
            let kind = Kind::BulkWrites(self.copies[lane].bulk.open);
            self.pointer(launch, cluster, targets[lane], to.space, bytes as u64, (lane, kind))?;
            if cluster.choices.eager {
                self.perform(copy, launch, cluster)?;
            } else {
                let groups = &mut self.copies[lane].bulk;
                groups.queue.push_back((groups.open, copy));
            }
        }
        Ok(())
    }

    pub fn store_async(
        &mut self,
        to: &Access,
        barrier: &Access,
        r: &[u32],
        active: u32,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let count = to.count as usize;
        let (targets, barriers) = (self.addresses(r[0], to), self.addresses(r[1 + count], barrier));
        for lane in lanes(active) {
            let mut bytes = vec![];
            for &from in &r[1..1 + count] {
                match to.class {
                    Class::Double => bytes.extend(self.registers.doubles[from as usize][lane].to_ne_bytes()),
                    _ => bytes.extend(&self.registers.words[from as usize][lane].to_ne_bytes()[..to.bytes as usize]),
                }
            }
            if targets[lane] % bytes.len() as u64 != 0 {
                return Err(format!("{} bytes at {:#x}", bytes.len(), targets[lane]));
            }
            let (rank, offset) = self.shared_place(targets[lane], to.space)?;
            let barrier = self.shared_place(barriers[lane], barrier.space)?;
            self.tell_races(lane, (rank, offset), bytes.len() as u32, Kind::WritesFor(barrier), cluster)?;
            if let Some(races) = &mut cluster.races {
                races.sends_to_word(self.index, barrier);
            }
            cluster.send(Pending { rank, offset, bytes, barrier })?;
        }
        Ok(())
    }
}
