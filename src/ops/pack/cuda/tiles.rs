//! How rows are cut into the tiles that warps copy: the parameters of kernels/pack/pack.cu.

use super::tuning;
use crate::core::status::{Error, Result};
use crate::core::tensor::Name;
use crate::ops::pack::{Pair, Request};
use crate::runtime::cuda::layout::{Divisor, is_near, kernel_struct, log2_ceil};
use std::mem::MaybeUninit;

const MAX_TENSORS: usize = 256;
const MAX_LAYOUTS: usize = 8;
const LOG_LANES: u32 = 5;

kernel_struct! {
    /// Mirrors RowLayout of kernels/pack/pack.cuh: `Stride` is i32 for rows of the common form, else i64. Strides are in bytes.
    #[derive(Clone, Copy, PartialEq)]
    struct RowLayout<Stride> {
        tiles: u32,
        units: u32,
        log_lanes: u32,
        log_lane_pos: u32,
        log_slots: u32,
        col_tiles: Divisor,
        inner_tiles: Divisor,
        tensors: Divisor,
        src_seq: Stride,
        src_pos: Stride,
        dst_row: Stride,
        log_unit: u32,
        run: Divisor,
        inner: Divisor,
        src_outer: Stride,
        src_inner: Stride,
        dst_outer: Stride,
        dst_inner: Stride,
    }
}

/// The type of a stride in a kernel's parameters.
pub trait Narrow: Copy {
    /// Where it must be an i32, it is known to fit.
    fn narrow(stride: i64) -> Self;
}

impl Narrow for i32 {
    fn narrow(stride: i64) -> i32 {
        stride as i32
    }
}

impl Narrow for i64 {
    fn narrow(stride: i64) -> i64 {
        stride
    }
}

impl RowLayout<i64> {
    /// Units of 16 bytes in one run, strides that fit in 32 bits: Common of kernels/common/types.cuh.
    fn is_common(&self) -> bool {
        self.log_unit == 4
            && self.run.value == self.units
            && [self.src_seq, self.src_pos, self.dst_row].into_iter().all(is_near)
    }

    #[inline(always)]
    fn narrowed<Stride: Narrow>(&self) -> RowLayout<Stride> {
        RowLayout {
            tiles: self.tiles,
            units: self.units,
            log_lanes: self.log_lanes,
            log_lane_pos: self.log_lane_pos,
            log_slots: self.log_slots,
            col_tiles: self.col_tiles,
            inner_tiles: self.inner_tiles,
            tensors: self.tensors,
            src_seq: Stride::narrow(self.src_seq),
            src_pos: Stride::narrow(self.src_pos),
            dst_row: Stride::narrow(self.dst_row),
            log_unit: self.log_unit,
            run: self.run,
            inner: self.inner,
            src_outer: Stride::narrow(self.src_outer),
            src_inner: Stride::narrow(self.src_inner),
            dst_outer: Stride::narrow(self.dst_outer),
            dst_inner: Stride::narrow(self.dst_inner),
        }
    }
}

kernel_struct! {
    /// Mirrors PackParams of kernels/pack/pack.cuh.
    pub struct PackParams<Stride> {
        batch: u32,
        gamma: u32,
        cap: u32,
        layouts: u32,
        by_sequence: u32,
        early_ctas: u32,
        accepted: *const u8,
        offsets: *mut u8,
        accepted_seq: Stride,
        offsets_seq: Stride,
        offsets_bytes: u32,
        /// The kernels read no more than `layouts` of them.
        layout: [MaybeUninit<RowLayout<Stride>>; MAX_LAYOUTS],
    }
}

kernel_struct! {
    /// Mirrors Tensors of kernels/pack/pack.cuh. The kernels read no more than the layouts have.
    pub struct Tensors {
        of: [MaybeUninit<Ends>; MAX_TENSORS],
    }
}

kernel_struct! {
    #[derive(Clone, Copy)]
    struct Ends {
        src: *const u8,
        dst: *mut u8,
    }
}

impl Ends {
    /// Set in either address.
    fn bits(&self) -> usize {
        self.src as usize | self.dst as usize
    }
}

/// What to copy, tensor by tensor, in the kernels' terms: a layout, and where its rows begin. A tensor whose rows are
/// strided in three dimensions is several of two.
#[derive(Clone)]
pub struct Pieces<'a> {
    pub request: &'a Request<'a>,
    /// The tensor that `current` is of.
    n: usize,
    current: Option<Piece>,
    /// Row bytes of all tensors.
    pub bytes: usize,
}

#[derive(Clone, Copy)]
struct Piece {
    /// Its tensors and tiles are not known yet.
    layout: RowLayout<i64>,
    ends: Ends,
    cap: u32,
    /// Further pieces of the tensor, and how far apart they are.
    rest: usize,
    step: [isize; 2],
    /// It is all of its tensor.
    is_whole: bool,
    /// The widest unit that the tensor's strides allow; its addresses may not.
    widest: u32,
}

impl<'a> Pieces<'a> {
    pub fn new(request: &'a Request<'a>) -> Pieces<'a> {
        let bytes = request.pairs.row_bytes.saturating_mul(request.batch()).saturating_mul(request.gamma);
        Pieces { request, n: 0, current: None, bytes }
    }

    /// Known of pieces that a launch was filled from.
    pub fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    fn advance(&mut self) {
        match &mut self.current {
            Some(piece) if piece.rest > 0 => {
                piece.rest -= 1;
                piece.ends.src = piece.ends.src.wrapping_offset(piece.step[0]);
                piece.ends.dst = piece.ends.dst.wrapping_offset(piece.step[1]);
            }
            _ => self.skip(1),
        }
    }

    /// Goes to the first piece of a later tensor.
    fn skip(&mut self, tensors: usize) {
        self.n += tensors;
        self.current = None;
    }

    /// Where there is no current piece: the first of tensor `n`, or of the next that has anything to copy.
    #[inline(never)] // or the fields of the piece are moved one by one
    fn seek(&mut self) -> Result<()> {
        let log_slots = if self.bytes <= tuning::TWO_SLOT_BYTES { 1 } else { 2 };
        while self.current.is_none() && self.n < self.request.pairs.len() {
            let pair = self.request.pairs.get(self.n);
            if pair.rows.count() > 0 && pair.packed.count() > 0 {
                self.current = Some(Piece::new(&pair, log_slots, self.request)?);
            } else {
                self.n += 1;
            }
        }
        Ok(())
    }
}

impl Piece {
    fn new(pair: &Pair, log_slots: u32, r: &Request) -> Result<Piece> {
        let Pair { rows, packed } = pair;
        // A row's own dimensions, innermost first: a run of bytes, then those that do not fold into it or each other.
        let mut run = rows.dtype.bytes() as i64;
        let mut dims = [(1i64, 0i64, 0i64); 3];
        let mut used = 0;
        for d in (2..rows.rank()).rev() {
            let (n, src, dst) = (rows.dim(d) as i64, rows.byte_stride(d), packed.byte_stride(d - 1));
            let last = dims[used.max(1) - 1];
            if n == 1 {
            } else if used == 0 && src == run && dst == run {
                run *= n;
            } else if used > 0 && src == last.0 * last.1 && dst == last.0 * last.2 {
                dims[used - 1].0 *= n;
            } else {
                dims[used] = (n, src, dst);
                used += 1;
            }
        }
        let [inner, outer, rest] = dims;
        let ends = Ends { src: rows.data(), dst: packed.data() };
        let rows_steps = rows.byte_stride(0) | rows.byte_stride(1) | packed.byte_stride(0) | run;
        let steps = rows_steps | inner.1 | inner.2 | outer.1 | outer.2 | rest.1 | rest.2;
        let widest = steps.trailing_zeros().min(4);
        let log_unit = widest.min(ends.bits().trailing_zeros());
        let units = (run >> log_unit) * inner.0 * outer.0;
        if units >= 1 << 31 {
            return Err(too_many_units(rows.name(), units));
        }
        let log_lanes = log2_ceil(units as u32).min(LOG_LANES);
        let log_lane_pos = log2_ceil(r.gamma as u32).saturating_sub(log_slots).min(LOG_LANES - log_lanes);
        let layout = RowLayout {
            tiles: 0,
            units: units as u32,
            log_unit,
            log_lanes,
            log_lane_pos,
            log_slots,
            col_tiles: Divisor::new((units as u32).div_ceil(1 << log_lanes)),
            inner_tiles: Divisor::NONE,
            tensors: Divisor::NONE,
            src_seq: rows.byte_stride(0),
            src_pos: rows.byte_stride(1),
            dst_row: packed.byte_stride(0),
            run: Divisor::new((run >> log_unit) as u32),
            inner: Divisor::new(inner.0 as u32),
            src_outer: outer.1,
            src_inner: inner.1,
            dst_outer: outer.2,
            dst_inner: inner.2,
        };
        let cap = packed.dim(0).min(r.batch() * r.gamma) as u32;
        let step = [rest.1 as isize, rest.2 as isize];
        Ok(Piece { layout, ends, cap, rest: rest.0 as usize - 1, step, is_whole: rest.0 == 1, widest })
    }
}

#[cold]
fn too_many_units(rows: Name, units: i64) -> Error {
    Error::unsupported(format!("{rows}: rows of {units} pieces; CUDA takes fewer than 2^31"))
}

/// One launch in the making.
pub struct Launch {
    tensors: Tensors,
    layout: [MaybeUninit<RowLayout<i64>>; MAX_LAYOUTS],
    layouts: usize,
    /// Tensors so far; the layout of each, and how many each layout has.
    count: usize,
    layout_of: [MaybeUninit<u8>; MAX_TENSORS],
    counts: [u32; MAX_LAYOUTS],
    cap: u32,
    by_sequence: bool,
    /// The number of tiles of all layouts; fewer than 2^31.
    pub tiles: u32,
}

// Some six kilobytes, of which few are written: made where they stay, and passed by reference.
impl Launch {
    #[inline(always)]
    pub fn new() -> Launch {
        Launch {
            tensors: Tensors { of: [const { MaybeUninit::uninit() }; MAX_TENSORS] },
            layout: [const { MaybeUninit::uninit() }; MAX_LAYOUTS],
            layouts: 0,
            count: 0,
            layout_of: [const { MaybeUninit::uninit() }; MAX_TENSORS],
            counts: [0; MAX_LAYOUTS],
            cap: 0,
            by_sequence: false,
            tiles: 0,
        }
    }

    fn layouts(&self) -> &[RowLayout<i64>] {
        // SAFETY: so many were written.
        unsafe { std::slice::from_raw_parts(self.layout.as_ptr().cast(), self.layouts) }
    }

    pub fn tensors(&self) -> *const Tensors {
        &raw const self.tensors
    }

    /// A kernel for rows of the common form can run it.
    pub fn is_common(&self, r: &Request) -> bool {
        self.layouts().iter().all(RowLayout::is_common)
            && is_near(r.accepted.byte_stride(0))
            && is_near(r.offsets.byte_stride(0))
    }

    /// Written where they stay: most layouts are none, and not to be moved.
    pub fn write_params<'p, Stride: Narrow>(
        &self,
        r: &Request,
        early_ctas: u32,
        place: &'p mut MaybeUninit<PackParams<Stride>>,
    ) -> &'p PackParams<Stride> {
        let params = place.write(PackParams {
            batch: r.batch() as u32,
            gamma: r.gamma as u32,
            cap: self.cap,
            layouts: self.layouts as u32,
            by_sequence: self.by_sequence as u32,
            early_ctas,
            accepted: r.accepted.data(),
            offsets: r.offsets.data(),
            accepted_seq: Stride::narrow(r.accepted.byte_stride(0)),
            offsets_seq: Stride::narrow(r.offsets.byte_stride(0)),
            offsets_bytes: r.offsets.dtype.bytes() as u32,
            layout: [const { MaybeUninit::uninit() }; MAX_LAYOUTS],
        });
        for (to, from) in params.layout.iter_mut().zip(self.layouts()) {
            to.write(from.narrowed());
        }
        params
    }

    /// Takes the pieces that go in one launch: of one capacity, few layouts, and no more than it has room for.
    pub fn fill(&mut self, pieces: &mut Pieces) -> Result<()> {
        loop {
            pieces.seek()?;
            let Some(piece) = &pieces.current else { break };
            let Some(layout) = self.add(piece) else { break };
            if piece.is_whole {
                let alike = self.add_alike(layout, piece, pieces.request.pairs.repeats(pieces.n + 1));
                pieces.skip(1 + alike);
            } else {
                pieces.advance();
            }
        }
        if self.layouts > 1 {
            self.sort_tensors();
        }
        self.by_sequence = pieces.bytes >= tuning::BY_SEQUENCE_BYTES;
        self.cut(pieces.request)
    }

    /// Returns its layout's number, `None` when the piece belongs in another launch.
    fn add(&mut self, piece: &Piece) -> Option<usize> {
        if self.count == MAX_TENSORS || (self.count > 0 && piece.cap != self.cap) {
            return None;
        }
        let at = match self.layouts().iter().position(|layout| *layout == piece.layout) {
            Some(at) => at,
            None if self.layouts == MAX_LAYOUTS => return None,
            None => {
                self.layout[self.layouts].write(piece.layout);
                self.layouts += 1;
                self.layouts - 1
            }
        };
        self.cap = piece.cap;
        self.add_to(at, piece.ends);
        Some(at)
    }

    fn add_to(&mut self, layout: usize, ends: Ends) {
        self.tensors.of[self.count].write(ends);
        self.layout_of[self.count].write(layout as u8);
        self.counts[layout] += 1;
        self.count += 1;
    }

    /// Adds those of the tensors that, as `piece`, are all of one layout, up to the first that is not. Returns their
    /// number.
    #[inline(always)]
    fn add_alike(
        &mut self,
        layout: usize,
        piece: &Piece,
        tensors: impl Iterator<Item = (*const u8, *mut u8)>,
    ) -> usize {
        let misaligned = |ends: &Ends| ends.bits() & ((1 << piece.widest) - 1);
        let mut added = 0;
        for (place, (src, dst)) in self.tensors.of[self.count..].iter_mut().zip(tensors) {
            let ends = Ends { src, dst };
            if misaligned(&ends) != misaligned(&piece.ends) {
                break;
            }
            place.write(ends);
            added += 1;
        }
        self.layout_of[self.count..][..added].fill(MaybeUninit::new(layout as u8));
        self.counts[layout] += added as u32;
        self.count += added;
        added
    }

    /// Puts the tensors of each layout side by side.
    #[inline(never)] // few calls need it, and its copy of them all
    fn sort_tensors(&mut self) {
        let mut next = [0; MAX_LAYOUTS];
        for at in 1..MAX_LAYOUTS {
            next[at] = next[at - 1] + self.counts[at - 1] as usize;
        }
        let unsorted = self.tensors.of;
        // SAFETY: so many were written.
        let layout_of = unsafe { std::slice::from_raw_parts(self.layout_of.as_ptr().cast::<u8>(), self.count) };
        for (ends, &layout) in unsorted.iter().zip(layout_of) {
            self.tensors.of[next[layout as usize]] = *ends;
            next[layout as usize] += 1;
        }
    }

    /// Counts the tiles, now that the tensors of each layout are known.
    fn cut(&mut self, r: &Request) -> Result<()> {
        // SAFETY: so many were written.
        let layouts: &mut [RowLayout<i64>] =
            unsafe { std::slice::from_raw_parts_mut(self.layout.as_mut_ptr().cast(), self.layouts) };
        for (layout, &tensors) in layouts.iter_mut().zip(&self.counts) {
            let positions = (r.gamma as u32).div_ceil(1 << (layout.log_slots + layout.log_lane_pos));
            let sequences = (r.batch() as u32).div_ceil(1 << (LOG_LANES - layout.log_lanes - layout.log_lane_pos));
            layout.inner_tiles = Divisor::new(if self.by_sequence { positions } else { sequences });
            layout.tensors = Divisor::new(tensors);
            let side = layout.col_tiles.value as u64 * tensors as u64;
            let tiles = side.saturating_mul(positions as u64 * sequences as u64);
            self.tiles = self.tiles.saturating_add(u32::try_from(tiles).unwrap_or(u32::MAX));
            if self.tiles >= 1 << 31 {
                return Err(Error::unsupported("rows: 2^31 tiles or more in one call; CUDA takes fewer"));
            }
            layout.tiles = tiles as u32;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            Divisor::layout("Divisor"),
            RowLayout::<i32>::layout("RowLayout<Common>"),
            RowLayout::<i64>::layout("RowLayout<General>"),
            PackParams::<i32>::layout("PackParams<Common>"),
            PackParams::<i64>::layout("PackParams<General>"),
            Ends::layout("Ends"),
            Tensors::layout("Tensors"),
        ];
        layout::check("pack", file!(), &structs);
    }
}
