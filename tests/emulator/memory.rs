//! Addresses: what lies where, and whether a kernel may touch it.

use crate::instruction::Space;

/// Shared memory as a generic address has it.
pub const SHARED_WINDOW: u64 = 1 << 60;
/// Where the CTA's rank plus one stands in an address of a cluster's shared memory; 0 is the CTA itself.
pub const RANK_SHIFT: u32 = 24;

/// Why a kernel cannot go on.
pub type Fault = String;

/// The pieces of the device's memory that a kernel may touch, ascending.
pub struct Pieces(pub Vec<(u64, u64)>);

impl Pieces {
    /// The piece that holds these bytes.
    pub fn find(&self, address: u64, bytes: u64) -> Option<(u64, u64)> {
        let at = self.0.partition_point(|piece| piece.0 <= address).checked_sub(1)?;
        let piece = self.0[at];
        (address.checked_add(bytes)? <= piece.1).then_some(piece)
    }
}

/// A byte of some memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    Device(u64),
    Shared { rank: usize, offset: usize },
}

/// Tells spaces apart; whether the place exists is asked later.
pub fn place(address: u64, space: Space, own_rank: usize) -> Place {
    let in_shared = |address: u64| {
        let (rank, offset) = (address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1));
        Place::Shared { rank: if rank == 0 { own_rank } else { rank as usize - 1 }, offset: offset as usize }
    };
    match space {
        Space::Shared | Space::Cluster => in_shared(address & 0xffff_ffff),
        Space::Generic if address & SHARED_WINDOW != 0 => in_shared(address & !SHARED_WINDOW),
        _ => Place::Device(address),
    }
}
