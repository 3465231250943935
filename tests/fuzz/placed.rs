//! A case in memory: every tensor and struct in a slot of its own, with garbage around its elements.

use crate::case::{Block, Case, Field, Pointer, Role};
use crate::content::Content;
use crate::memory::{Memory, Piece, ROOM, View};
use crate::support::*;
use std::ffi::c_void;
use vanward::abi::*;

/// Bytes around a tensor that are compared with it.
const MARGIN: usize = 64;
/// Garbage before a call, in two ways: as numbers huge and negative, or small and positive.
const GARBAGE: [u8; 2] = [0xfb, 0x04];
/// Elements of an input, where that decides how much work there is.
const MOST: i128 = 1 << 18;

pub struct Placed {
    pub args: *const c_void,
    pub tensors: Vec<PlacedTensor>,
    /// An output shares an address with something that it must not share one with.
    pub must_be_refused: bool,
}

pub struct PlacedTensor {
    pub name: String,
    pub role: Role,
    /// With its surroundings.
    pub piece: Piece,
    /// The bytes of the piece before a call, with either garbage.
    pub before: [Vec<u8>; 2],
    /// Which of them belong to elements.
    pub is_element: Vec<bool>,
    address: usize,
    bytes: std::ops::Range<usize>,
}

impl Placed {
    pub fn new(case: &mut Case, memory: &mut Memory) -> Placed {
        memory.clear();
        tame(case);
        let mut placed = Placed { args: std::ptr::null(), tensors: vec![], must_be_refused: false };
        // Those that lie where others do come last.
        let (sharers, owners): (Vec<usize>, Vec<usize>) =
            (0..case.fields.len()).partition(|&n| case.fields[n].shares.is_some());
        let mut at: Vec<Option<usize>> = vec![None; case.fields.len()];
        for n in owners.into_iter().chain(sharers) {
            let data = placed.shared(case, n, &at).unwrap_or_else(|| {
                at[n] = placed.own(case, n, memory);
                at[n].map_or_else(|| memory.guard(), |t| placed.tensors[t].address)
            });
            write_tensor(case, n, data);
        }
        for number in &case.numbers {
            write(&mut case.blocks[number.place.block], number.place.offset, &number.value.to_le_bytes());
        }
        // What is pointed to stands after what points to it.
        for n in (0..case.blocks.len()).rev() {
            let piece = memory.take(case.blocks[n].bytes.len(), 8, !case.rng.one_in(4));
            memory.write(&piece, &case.blocks[n].bytes);
            let address = faulty(memory.address(&piece, View::ReadOnly), case.blocks[n].pointer, true);
            match case.blocks[n].home.clone() {
                Some(home) => write(&mut case.blocks[home.block], home.offset, &address.to_le_bytes()),
                None => placed.args = address as *const c_void,
            }
        }
        placed
    }

    /// Where field `n` lies if that is where another one does. `at` tells which of the tensors is a field's.
    fn shared(&mut self, case: &Case, n: usize, at: &[Option<usize>]) -> Option<usize> {
        let (field, (other, is_allowed)) = (&case.fields[n], case.fields[n].shares?);
        let is_read = |field: &Field| {
            let block = &case.blocks[field.place.block];
            let is_there = field.is_given && !field.is_spare && field.pointer == Pointer::Sound;
            is_there && block.pointer == Pointer::Sound
        };
        let partner = &self.tensors[at[other].filter(|_| is_read(&case.fields[other]))?];
        let (low, high) = field.reach();
        if !is_read(field) || field.count() == 0 {
            return None;
        }
        if !is_allowed {
            self.must_be_refused = true;
            return Some(partner.address);
        }
        let width = field.width() as i128;
        let (start, end) = (partner.address as i128 + low * width, partner.address as i128 + (high + 1) * width);
        let is_inside = partner.bytes.start as i128 <= start && end <= partner.bytes.end as i128;
        is_inside.then_some(partner.address)
    }

    /// Gives field `n` memory of its own, if it has elements that can be there.
    fn own(&mut self, case: &mut Case, n: usize, memory: &mut Memory) -> Option<usize> {
        let Case { fields, rng, .. } = case;
        let field = &fields[n];
        let ((low, high), width) = (field.reach(), field.width());
        if !field.is_given || field.count() == 0 || is_beyond(field) {
            return None;
        }
        let alignment = 1 << width.trailing_zeros().min(3);
        let length = (high - low + 1) as usize * width;
        let bytes = memory.take(length, alignment, !rng.one_in(3));
        let piece = bytes.widened(MARGIN);
        let margin = bytes.range.start - piece.range.start;
        let view = if field.role == Role::In { View::ReadOnly } else { View::Writable };
        let first = memory.address(&bytes, view);
        let mut tensor = PlacedTensor {
            name: field.place.name.clone(),
            role: field.role,
            before: GARBAGE.map(|garbage| vec![garbage; piece.range.len()]),
            is_element: vec![false; piece.range.len()],
            piece,
            address: (first as i128 - low * width as i128) as usize,
            bytes: first..first + length,
        };
        tensor.fill(field, rng, margin);
        self.tensors.push(tensor);
        Some(self.tensors.len() - 1)
    }
}

impl PlacedTensor {
    /// Gives the elements their contents; that of the lowest address lies `margin` bytes from the begin of the piece.
    fn fill(&mut self, field: &Field, rng: &mut Rng, margin: usize) {
        let width = field.width();
        let runs = Runs::of(field, self.bytes.len() / width);
        let row = field.shape().last().map_or(1, |&n| n as usize);
        let dtype = DType { code: field.tensor.dtype_code, bits: field.tensor.dtype_bits };
        let contents = match (field.role, field.content) {
            // What an output holds before is garbage, too.
            (Role::Out, _) => None,
            // None are alike: so there is none where one element stands for several.
            (_, Content::Distinct(_)) if !runs.are_apart() => Some(vec![0xff; runs.elements() * width]),
            _ => Some(field.content.bytes(rng, dtype, width, runs.elements(), row)),
        };
        let (low, run) = (field.reach().0 as i64, runs.length * width);
        for (n, start) in runs.starts.into_iter().enumerate() {
            let place = margin + (start - low) as usize * width;
            self.is_element[place..place + run].fill(true);
            if let Some(contents) = &contents {
                let contents = &contents[n * run..][..run];
                self.before.iter_mut().for_each(|bytes| bytes[place..place + run].copy_from_slice(contents));
            }
        }
    }
}

/// Whether the offsets of a tensor exceed 63 bits, so that it must be refused.
fn is_beyond(field: &Field) -> bool {
    let ((low, high), width) = (field.reach(), field.width() as i128);
    let most = 1i128 << 63;
    low.saturating_mul(width) < -most
        || high.saturating_mul(width) >= most
        || field.count().saturating_mul(width) >= most
}

/// Makes tensors fit into memory that would not, and work small. A call whose outputs have no elements has no work,
/// however much it is given.
fn tame(case: &mut Case) {
    let outputs = || case.fields.iter().filter(|field| field.is_given && field.role != Role::In);
    let has_work = outputs().any(|field| field.count() > 0) || outputs().count() == 0;
    for field in case.fields.iter_mut().filter(|field| field.is_given && field.count() > 0) {
        let most = if has_work { MOST } else { i128::MAX };
        let length = |field: &Field| {
            let (low, high) = field.reach();
            (high.saturating_sub(low) + 1).saturating_mul(field.width() as i128)
        };
        if is_beyond(field) || (length(field) <= ROOM as i128 && field.count() <= most) {
            continue;
        }
        for d in 0..field.rank() {
            let (n, s) = (field.tensor.shape[d] as i128, field.tensor.strides[d] as i128);
            if (n - 1) * s.abs() * field.width() as i128 > ROOM as i128 / 16 {
                match field.role {
                    Role::In => field.tensor.strides[d] = 0,
                    _ => field.tensor.shape[d] = 1,
                }
            }
        }
        while field.count() > most {
            let longest = (0..field.rank()).max_by_key(|&d| field.tensor.shape[d]).unwrap();
            field.tensor.shape[longest] = 2;
        }
    }
}

fn faulty(address: usize, pointer: Pointer, is_aligned: bool) -> usize {
    match pointer {
        Pointer::Null => 0,
        Pointer::Misaligned if is_aligned => address + 1,
        Pointer::Top => i64::MAX as usize / 8 * 8,
        _ => address,
    }
}

fn write_tensor(case: &mut Case, n: usize, data: usize) {
    let field = &case.fields[n];
    let mut tensor = if field.is_given { field.tensor } else { absent() };
    if field.is_given {
        // An element of eight bytes or more at the top reaches past it.
        let reaches_past = field.count() > 0 && field.reach().1.saturating_add(1) > 8 / field.width() as i128;
        let pointer = if field.pointer == Pointer::Top && !reaches_past { Pointer::Sound } else { field.pointer };
        tensor.data = faulty(data, pointer, field.width().is_multiple_of(2)) as *mut c_void;
    }
    // SAFETY: plain data, of which the padding, if there were any, is not compared.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const tensor).cast::<u8>(), size_of::<vwd_tensor>()) };
    write(&mut case.blocks[field.place.block], field.place.offset, bytes);
}

/// Writes a field, as far as the struct reaches.
fn write(block: &mut Block, offset: usize, bytes: &[u8]) {
    if let Some(place) = block.bytes.get_mut(offset..offset + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Adjacent elements of a tensor, in row-major order.
struct Runs {
    /// Offsets.
    starts: Vec<i64>,
    length: usize,
}

impl Runs {
    fn elements(&self) -> usize {
        self.starts.len() * self.length
    }

    /// Whether each element has a place of its own.
    fn are_apart(&self) -> bool {
        let mut starts = self.starts.clone();
        starts.sort_unstable();
        starts.windows(2).all(|two| two[1] - two[0] >= self.length as i64)
    }

    /// The runs of a tensor that lies in `places` elements of memory.
    fn of(field: &Field, places: usize) -> Runs {
        // Where there are more elements than memory, most lie in the same places: together they are all of it.
        if field.count() > MOST {
            return Runs { starts: vec![field.reach().0 as i64], length: places };
        }
        match (field.shape().split_last(), field.strides().split_last()) {
            (Some((&n, shape)), Some((&1, strides))) => Runs { starts: offsets(shape, strides), length: n as usize },
            _ => Runs { starts: offsets(field.shape(), field.strides()), length: 1 },
        }
    }
}

/// The offset of every element, in row-major order.
fn offsets(shape: &[i64], strides: &[i64]) -> Vec<i64> {
    let mut offsets = vec![0i64];
    for (&n, &s) in shape.iter().zip(strides) {
        // The stride of a single element may be anything.
        offsets =
            offsets.iter().flat_map(|&offset| (0..n).map(move |i| offset.wrapping_add(i.wrapping_mul(s)))).collect();
    }
    offsets
}
