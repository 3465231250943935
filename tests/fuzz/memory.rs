//! Memory behind guard pages: whoever reads or writes outside a tensor dies of it.
//!
//! A slot has room for one tensor or struct, between pages that nothing may touch. The slots are mapped three times: for
//! the library to read, for the library to write, and for the harness, which fills and compares them. Inputs are
//! given at the address that can only be read.

use std::ops::Range;

/// Bytes of a slot.
pub const ROOM: usize = 1 << 22;
const GUARD: usize = 1 << 20;
const SLOTS: usize = 64;

#[derive(Clone, Copy, PartialEq)]
pub enum View {
    ReadOnly,
    Writable,
}

pub struct Memory {
    /// All slots one after the other, without guards.
    own: *mut u8,
    /// For the library, with guards: to read, to write.
    views: [*mut u8; 2],
    used: usize,
}

/// Some bytes of a slot.
#[derive(Clone)]
pub struct Piece {
    slot: usize,
    pub range: Range<usize>,
}

impl Memory {
    pub fn map() -> Memory {
        // SAFETY: fresh mappings at addresses that the kernel picks; each part of a view replaces a part of its own
        // reservation.
        unsafe {
            let file = libc::memfd_create(c"fuzz".as_ptr(), 0);
            assert!(file >= 0, "memory for the slots");
            assert_eq!(libc::ftruncate(file, (SLOTS * ROOM) as i64), 0);
            let map = |at: *mut u8, length, protection, flags, file, offset| {
                let address = libc::mmap(at.cast(), length, protection, flags, file, offset);
                assert_ne!(address, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
                address.cast::<u8>()
            };
            let (read, write) = (libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE);
            let views = [read, write].map(|protection| {
                let reserved = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
                let length = GUARD + SLOTS * (ROOM + GUARD);
                let view = map(std::ptr::null_mut(), length, libc::PROT_NONE, reserved, -1, 0);
                for slot in 0..SLOTS {
                    let at = view.add(GUARD + slot * (ROOM + GUARD));
                    map(at, ROOM, protection, libc::MAP_SHARED | libc::MAP_FIXED, file, (slot * ROOM) as i64);
                }
                view
            });
            let own = map(std::ptr::null_mut(), SLOTS * ROOM, write, libc::MAP_SHARED, file, 0);
            libc::close(file);
            Memory { own, views, used: 0 }
        }
    }

    /// Gives all slots back.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// `length` bytes in a slot of their own: up to its end, as near to it as `alignment` lets them, or from its begin.
    pub fn take(&mut self, length: usize, alignment: usize, at_end: bool) -> Piece {
        assert!(length <= ROOM && self.used < SLOTS, "room for {length} bytes in slot {}", self.used);
        let begin = if at_end { (ROOM - length) / alignment * alignment } else { 0 };
        self.used += 1;
        Piece { slot: self.used - 1, range: begin..begin + length }
    }

    /// Where the library finds a piece.
    pub fn address(&self, piece: &Piece, view: View) -> usize {
        self.views[view as usize] as usize + GUARD + piece.slot * (ROOM + GUARD) + piece.range.start
    }

    /// An address that nothing may touch, for tensors without elements.
    pub fn guard(&self) -> usize {
        self.views[0] as usize + 64
    }

    pub fn write(&mut self, piece: &Piece, bytes: &[u8]) {
        assert_eq!(bytes.len(), piece.range.len());
        // SAFETY: the slot is the harness's to write, and the piece lies inside it.
        unsafe {
            self.own.add(piece.slot * ROOM + piece.range.start).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        }
    }

    pub fn read(&self, piece: &Piece) -> &[u8] {
        // SAFETY: as above; no call is running, so nobody writes.
        unsafe { std::slice::from_raw_parts(self.own.add(piece.slot * ROOM + piece.range.start), piece.range.len()) }
    }
}

impl Piece {
    /// With as much as `margin` bytes around it.
    pub fn widened(&self, margin: usize) -> Piece {
        let Range { start, end } = self.range;
        Piece { slot: self.slot, range: start.saturating_sub(margin)..ROOM.min(end + margin) }
    }
}
