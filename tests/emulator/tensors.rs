//! Copies of boxes of a tensor to shared memory (`cp.async.bulk.tensor`), and the map that says where the tensor lies: 128 bytes that
//! `cuTensorMapEncodeTiled` fills in, here in a form of its own.

use crate::instruction::{Access, Space};
use crate::machine::{Cluster, Launch, Pending};
use crate::memory::Fault;
use crate::races::Kind;
use crate::warp::{Warp, lanes};

pub const MOST_DIMENSIONS: usize = 5;
/// The first four bytes of a map.
const MARK: u32 = 0x7ab1_e0f5;

/// A tensor whose innermost dimension, the first, has adjacent elements, and the box of it that a copy takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TensorMap {
    pub rank: usize,
    pub element_bytes: u64,
    /// Whether run n of the eight runs of 16 bytes in each 128 bytes of shared memory lies in place n ^ (address / 128) % 8.
    pub is_swizzled: bool,
    pub address: u64,
    pub dims: [u64; MOST_DIMENSIONS],
    /// In bytes; that of the first dimension is an element.
    pub strides: [u64; MOST_DIMENSIONS],
    pub lengths: [u64; MOST_DIMENSIONS],
}

impl TensorMap {
    /// A map of elements of 16 bits. `None` where CUDA's documentation demands otherwise, or elements are left out.
    ///
    /// # Safety
    /// There are `rank` of each, of strides one less.
    pub unsafe fn new(
        rank: usize,
        is_swizzled: bool,
        address: u64,
        dims: *const u64,
        strides: *const u64,
        lengths: *const u32,
        element_strides: *const u32,
    ) -> Option<TensorMap> {
        const ELEMENT: u64 = 2;
        if !(1..=MOST_DIMENSIONS).contains(&rank) {
            return None;
        }
        let (mut map_dims, mut map_strides, mut map_lengths) = ([1; 5], [ELEMENT; 5], [1; 5]);
        for d in 0..rank {
            // SAFETY: the caller's.
            unsafe {
                map_dims[d] = *dims.add(d);
                map_lengths[d] = *lengths.add(d) as u64;
                if d > 0 {
                    map_strides[d] = *strides.add(d - 1);
                }
                if *element_strides.add(d) != 1 {
                    return None;
                }
            }
        }
        let inner = map_lengths[0] * ELEMENT;
        let is_sound = address.is_multiple_of(16)
            && map_dims.iter().all(|dim| (1..=1 << 32).contains(dim))
            && map_strides[1..rank].iter().all(|step| step.is_multiple_of(16) && *step < 1 << 40)
            && map_lengths.iter().all(|length| (1..=256).contains(length))
            && inner.is_multiple_of(16)
            && (!is_swizzled || inner <= 128);
        is_sound.then_some(TensorMap {
            rank,
            element_bytes: ELEMENT,
            is_swizzled,
            address,
            dims: map_dims,
            strides: map_strides,
            lengths: map_lengths,
        })
    }

    pub fn pack(&self) -> [u64; 16] {
        let kind = self.rank as u64 | self.element_bytes << 8 | (self.is_swizzled as u64) << 16;
        let mut words = [0; 16];
        words[0] = MARK as u64 | kind << 32;
        words[1] = self.address;
        words[2..7].copy_from_slice(&self.dims);
        words[7..11].copy_from_slice(&self.strides[1..]);
        words[11..16].copy_from_slice(&self.lengths);
        words
    }

    fn unpack(words: &[u64; 16]) -> Option<TensorMap> {
        let kind = words[0] >> 32;
        let element_bytes = kind >> 8 & 0xff;
        let mut strides = [element_bytes; MOST_DIMENSIONS];
        strides[1..].copy_from_slice(&words[7..11]);
        (words[0] as u32 == MARK).then(|| TensorMap {
            rank: (kind & 0xff) as usize,
            element_bytes,
            is_swizzled: kind >> 16 & 1 != 0,
            address: words[1],
            dims: words[2..7].try_into().expect("five"),
            strides,
            lengths: words[11..16].try_into().expect("five"),
        })
    }

    fn bytes(&self) -> u64 {
        self.lengths[..self.rank].iter().product::<u64>() * self.element_bytes
    }
}

impl Warp {
    fn map_at(&mut self, address: u64, launch: &Launch, cluster: &mut Cluster) -> Result<TensorMap, Fault> {
        // Parameters lie on no particular address here: their offset counts.
        let begin = launch.parameters.as_ptr() as u64;
        let is_parameter = (begin..begin + launch.parameters.len() as u64).contains(&address);
        if (if is_parameter { address - begin } else { address }) % 64 != 0 {
            return Err(format!("a tensor map at {address:#x}, which is not a multiple of 64"));
        }
        let mut words = [0u64; 16];
        for (n, word) in words.iter_mut().enumerate() {
            let from = self.pointer(launch, cluster, address + n as u64 * 8, Space::Generic, 8, (0, Kind::Read(!0)))?;
            // SAFETY: eight bytes are there.
            *word = unsafe { from.cast::<u64>().read_unaligned() };
        }
        TensorMap::unpack(&words).ok_or_else(|| "a tensor map that the driver has not written".into())
    }

    /// Reads the box whose first element has these coordinates. Elements outside of the tensor are zeros.
    fn read_box(
        &mut self,
        map: &TensorMap,
        first: &[i64],
        lane: usize,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<Vec<u8>, Fault> {
        let (element, inner) = (map.element_bytes, map.lengths[0]);
        let mut bytes = vec![0u8; map.bytes() as usize];
        let inside = |d: usize, n: u64| {
            let at = first[d] + n as i64;
            (at >= 0 && at < map.dims[d] as i64).then_some(at as u64)
        };
        for (row, to) in bytes.chunks_exact_mut((inner * element) as usize).enumerate() {
            let (mut rest, mut address) = (row as u64, Some(map.address));
            for d in 1..map.rank {
                let at = inside(d, rest % map.lengths[d]);
                address = address.zip(at).map(|(address, at)| address + at * map.strides[d]);
                rest /= map.lengths[d];
            }
            let Some(address) = address else { continue };
            let is_whole = inside(0, 0).is_some()
                && inside(0, inner - 1).is_some()
                && (first[0] as u64 * element).is_multiple_of(16);
            let pieces = if is_whole { 1 } else { inner };
            let size = inner / pieces * element;
            for n in 0..pieces {
                let Some(at) = inside(0, n) else { continue };
                let what_for = (lane, Kind::Read(!0));
                let from = self.pointer(launch, cluster, address + at * element, Space::Global, size, what_for)?;
                // SAFETY: so many bytes are there.
                let found = unsafe { std::slice::from_raw_parts(from, size as usize) };
                to[(n * element) as usize..][..size as usize].copy_from_slice(found);
            }
        }
        Ok(bytes)
    }

    /// Operands: target, map, coordinates, barrier.
    #[allow(clippy::too_many_arguments)]
    pub fn tensor_load(
        &mut self,
        to: &Access,
        from: &Access,
        barrier: &Access,
        r: &[u32],
        active: u32,
        launch: &Launch,
        cluster: &mut Cluster,
    ) -> Result<(), Fault> {
        let rank = r.len() - 3;
        let (targets, maps) = (self.addresses(r[0], to), self.addresses(r[1], from));
        let barriers = self.addresses(r[2 + rank], barrier);
        for lane in lanes(active) {
            let map = self.map_at(maps[lane], launch, cluster)?;
            if map.rank != rank {
                return Err(format!("{rank} coordinates in a tensor of {} dimensions", map.rank));
            }
            let (rank, offset) = self.shared_place(targets[lane], to.space)?;
            if offset % 128 != 0 {
                return Err(format!("a box of a tensor goes to {:#x}, which is not a multiple of 128", targets[lane]));
            }
            let word = |at: u32| self.registers.words[at as usize][lane] as i32 as i64;
            let first: Vec<i64> = r[2..r.len() - 1].iter().map(|&at| word(at)).collect();
            let in_order = self.read_box(&map, &first, lane, launch, cluster)?;
            let mut bytes = in_order.clone();
            if map.is_swizzled {
                for (n, run) in in_order.chunks_exact(16).enumerate() {
                    let at = offset + n * 16;
                    bytes[(at ^ (at / 128 % 8 * 16)) - offset..][..16].copy_from_slice(run);
                }
            }
            let barrier = self.shared_place(barriers[lane], barrier.space)?;
            self.tell_races(lane, (rank, offset), bytes.len() as u32, Kind::WritesFor(barrier), cluster)?;
            cluster.send(Pending { rank, offset, bytes, barrier })?;
        }
        Ok(())
    }
}
