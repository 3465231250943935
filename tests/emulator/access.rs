//! Loads, stores and atomics: where they go, whether they may, and what they do there.

use crate::instruction::{Access, Change, Space};
use crate::machine::{Cluster, Launch};
use crate::memory::{Fault, Place, SHARED_WINDOW, place};
use crate::races::Kind;
use crate::values::{Class, LANES, Value};
use crate::warp::{Warp, lanes};

impl Access {
    fn reads(&self) -> Kind {
        if self.order.is_strong { Kind::StrongRead(self.order) } else { Kind::Read(self.used) }
    }
    fn writes(&self) -> Kind {
        if self.order.is_strong { Kind::StrongWrite(self.order) } else { Kind::Write }
    }
}

impl Warp {
    /// Addresses of an access in each lane.
    pub fn addresses(&self, register: u32, access: &Access) -> [u64; LANES] {
        if access.is_wide {
            let base = &self.registers.doubles[register as usize];
            std::array::from_fn(|lane| base[lane].wrapping_add(access.offset as u64))
        } else {
            let base = &self.registers.words[register as usize];
            std::array::from_fn(|lane| base[lane].wrapping_add(access.offset as u32) as u64)
        }
    }

    /// A pointer to bytes that the kernel may touch; what for is told for the sake of races.
    #[inline(always)]
    pub fn pointer(
        &mut self,
        launch: &Launch,
        cluster: &mut Cluster,
        address: u64,
        space: Space,
        bytes: u64,
        what_for: (usize, Kind),
    ) -> Result<*mut u8, Fault> {
        // Mostly it lies in the piece of the device's memory that was touched last, or in the CTA's own shared memory.
        if cluster.races.is_none() && address & (bytes.next_power_of_two().min(16) - 1) == 0 {
            let is_device = space == Space::Global || space == Space::Generic && address & SHARED_WINDOW == 0;
            if is_device && address >= self.recent.0 && address.saturating_add(bytes) <= self.recent.1 {
                return Ok(address as *mut u8);
            }
            if space == Space::Shared
                && let Some(shared) = cluster.shared[self.rank].get_mut(address as usize..(address + bytes) as usize)
            {
                return Ok(shared.as_mut_ptr());
            }
        }
        self.find_pointer(launch, cluster, address, space, bytes, what_for)
    }

    fn find_pointer(
        &mut self,
        launch: &Launch,
        cluster: &mut Cluster,
        address: u64,
        space: Space,
        bytes: u64,
        (lane, kind): (usize, Kind),
    ) -> Result<*mut u8, Fault> {
        if address & (bytes.next_power_of_two().min(16) - 1) != 0 {
            return Err(format!("address {address:#x} is not a multiple of {bytes}"));
        }
        match place(address, space, self.rank) {
            Place::Device(address) => {
                if address < self.recent.0 || address.saturating_add(bytes) > self.recent.1 {
                    let parameters = launch.parameters.as_ptr_range();
                    let (begin, end) = (parameters.start as u64, parameters.end as u64);
                    self.recent = match launch.pieces.find(address, bytes) {
                        Some(piece) => piece,
                        None if space != Space::Global && address >= begin && address + bytes <= end => (begin, end),
                        None => return Err(format!("{bytes} bytes at {address:#x} are not the device's ({space:?})")),
                    };
                }
                if let (Some(races), Some((global, current))) = (&mut cluster.races, launch.global)
                    && self.recent.0 != launch.parameters.as_ptr() as u64
                {
                    races.touch_global(self.index, lane, (address, bytes), kind, &mut global.borrow_mut(), current)?;
                }
                Ok(address as *mut u8)
            }
            Place::Shared { rank, offset } => {
                if rank != self.rank && cluster.live.get(rank).is_none_or(|&live| live == 0) {
                    return Err(format!("shared memory of CTA {rank} of the cluster, which has ended"));
                }
                let shared = cluster.shared[rank].get_mut(offset..offset + bytes as usize);
                let shared =
                    shared.ok_or_else(|| format!("{bytes} bytes at {offset} of shared memory are past its end"))?;
                if let Some(races) = &mut cluster.races {
                    races.touch(self.index, lane, rank, offset, bytes as usize, kind)?;
                }
                Ok(shared.as_mut_ptr())
            }
        }
    }

    pub fn shared_place(&self, address: u64, space: Space) -> Result<(usize, usize), Fault> {
        match place(address, space, self.rank) {
            Place::Shared { rank, offset } => Ok((rank, offset)),
            Place::Device(_) => Err("an address that is not in shared memory".into()),
        }
    }

    pub fn load(
        &mut self,
        access: &Access,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let count = access.count as usize;
        let addresses = self.addresses(r[count], access);
        let mut pointers = [std::ptr::null_mut(); LANES];
        let first = addresses[active.trailing_zeros() as usize];
        if access.bytes >= 4 && !access.is_signed && addresses == [first; LANES] {
            // Parameters, mostly.
            let bytes = (access.bytes * access.count) as u64;
            let mut from = std::ptr::null_mut();
            for lane in lanes(if cluster.races.is_some() { active } else { 1 }) {
                from = self.pointer(launch, cluster, first, access.space, bytes, (lane, access.reads()))?;
            }
            for (n, &to) in r[..count].iter().enumerate() {
                // SAFETY: checked just now.
                let bits = unsafe { read(from.add(n * access.bytes as usize), access.bytes, false) };
                match access.class {
                    Class::Double => u64::set(&mut self.registers, to, [bits; LANES], active),
                    _ => u32::set(&mut self.registers, to, [bits as u32; LANES], active),
                }
            }
            return Ok(());
        }
        for lane in lanes(active) {
            pointers[lane] = self.pointer(
                launch,
                cluster,
                addresses[lane],
                access.space,
                (access.bytes * access.count) as u64,
                (lane, access.reads()),
            )?;
        }
        for (n, &to) in r[..count].iter().enumerate() {
            for lane in lanes(active) {
                // SAFETY: checked above.
                let bits =
                    unsafe { read(pointers[lane].add(n * access.bytes as usize), access.bytes, access.is_signed) };
                match access.class {
                    Class::Double => self.registers.doubles[to as usize][lane] = bits,
                    _ => self.registers.words[to as usize][lane] = bits as u32,
                }
            }
        }
        Ok(())
    }

    pub fn store(
        &mut self,
        access: &Access,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let addresses = self.addresses(r[0], access);
        for lane in lanes(active) {
            let to = self.pointer(
                launch,
                cluster,
                addresses[lane],
                access.space,
                (access.bytes * access.count) as u64,
                (lane, access.writes()),
            )?;
            for (n, &from) in r[1..].iter().enumerate() {
                let bits = match access.class {
                    Class::Double => self.registers.doubles[from as usize][lane],
                    _ => self.registers.words[from as usize][lane] as u64,
                };
                // SAFETY: checked above.
                unsafe { write(to.add(n * access.bytes as usize), access.bytes, bits) };
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub fn atomic(
        &mut self,
        access: &Access,
        change: Change,
        returns: bool,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let first = returns as usize;
        let addresses = self.addresses(r[first], access);
        let value = |warp: &Warp, at: u32, lane: usize| match access.class {
            Class::Double => warp.registers.doubles[at as usize][lane],
            _ => warp.registers.words[at as usize][lane] as u64,
        };
        for lane in lanes(active) {
            let at = self.pointer(
                launch,
                cluster,
                addresses[lane],
                access.space,
                access.bytes as u64,
                (lane, Kind::Atomic(access.order)),
            )?;
            // SAFETY: checked above.
            let old = unsafe { read(at, access.bytes, false) };
            let operand = value(self, r[first + 1], lane);
            let new = match change {
                Change::Compare if old == operand => value(self, r[first + 2], lane),
                Change::Compare => old,
                _ => changed(change, access.is_signed, access.bytes, old, operand),
            };
            // SAFETY: as above.
            unsafe { write(at, access.bytes, new) };
            if returns {
                match access.class {
                    Class::Double => self.registers.doubles[r[0] as usize][lane] = old,
                    _ => self.registers.words[r[0] as usize][lane] = old as u32,
                }
            }
        }
        Ok(())
    }
}

/// What an atomic leaves in memory, or two lanes' values make in a reduction.
pub fn changed(change: Change, is_signed: bool, bytes: u32, a: u64, b: u64) -> u64 {
    let signed = |x: u64| if bytes == 8 { x as i64 } else { x as u32 as i32 as i64 };
    match change {
        Change::Add if bytes == 8 => a.wrapping_add(b),
        Change::Add => (a as u32).wrapping_add(b as u32) as u64,
        Change::Or => a | b,
        Change::And => a & b,
        Change::Min if is_signed => signed(a).min(signed(b)) as u64,
        Change::Max if is_signed => signed(a).max(signed(b)) as u64,
        Change::Min => a.min(b),
        Change::Max => a.max(b),
        Change::Exchange | Change::Compare => b,
    }
}

/// # Safety
/// So many bytes are there.
unsafe fn read(from: *const u8, bytes: u32, is_signed: bool) -> u64 {
    // SAFETY: the caller's.
    unsafe {
        match (bytes, is_signed) {
            (1, false) => from.read() as u64,
            (1, true) => from.read() as i8 as i64 as u64,
            (2, false) => from.cast::<u16>().read_unaligned() as u64,
            (2, true) => from.cast::<i16>().read_unaligned() as i64 as u64,
            (4, false) => from.cast::<u32>().read_unaligned() as u64,
            (4, true) => from.cast::<i32>().read_unaligned() as i64 as u64,
            _ => from.cast::<u64>().read_unaligned(),
        }
    }
}

/// # Safety
/// So many bytes are there.
unsafe fn write(to: *mut u8, bytes: u32, bits: u64) {
    // SAFETY: the caller's.
    unsafe {
        match bytes {
            1 => to.write(bits as u8),
            2 => to.cast::<u16>().write_unaligned(bits as u16),
            4 => to.cast::<u32>().write_unaligned(bits as u32),
            _ => to.cast::<u64>().write_unaligned(bits),
        }
    }
}
