//! Launch of the kernels of kernels/pack.cu and kernels/verify_pack.cu: how rows are cut into tiles, and which kernel
//! suits which sizes.

use super::{Pair, Request, VerifiedRequest};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::ops::verify;
use crate::ops::verify::cuda::{Params as VerifyParams, log2_ceil, stride};
use crate::runtime::cuda::{Enqueue, Kernel};
use std::mem::MaybeUninit;

const MAX_TENSORS: usize = 256;
const MAX_LAYOUTS: usize = 8;
/// Sequences whose counts a warp adds up by itself.
const MAX_SUMMED_BATCH: usize = 1024;
const OFFSETS_PER_CTA: usize = 1024;
const LOG_LANES: u32 = 5;
const PACK_THREADS: u32 = 256;

/// Where one choice becomes faster than the other, as measured on an H200 (benches/results).
mod tuning {
    /// Whether every CTA verifies the whole batch itself (one launch) instead of waiting for a launch that does it once.
    /// That wait is short where the second launch starts beside the first.
    pub fn is_fused(token_bytes: usize, row_bytes: usize, launches_dependents: bool) -> bool {
        if launches_dependents { token_bytes <= 2 << 10 && row_bytes <= 2 << 20 } else { token_bytes <= 32 << 10 }
    }
    /// Row bytes up to which a lane holds two units at once rather than four: more warps, each done sooner.
    pub const TWO_SLOT_BYTES: usize = 1 << 20;
    /// Row bytes from which tiles are taken sequence by sequence.
    pub const BY_SEQUENCE_BYTES: usize = 12 << 20;
    /// Threads of a multiprocessor that request rows before they know what was accepted.
    pub const EARLY_THREADS: u32 = 256;
    /// Threads of a CTA of the fused kernel, by its token tiles.
    pub fn fused_threads(token_tiles: u32) -> u32 {
        match token_tiles {
            0..=8 => 128,
            9..=16 => 256,
            _ => 512,
        }
    }
    /// Threads of a multiprocessor that copy in the fused kernel.
    pub const RESIDENT_THREADS: u32 = 1024;
}

/// n / value by a multiplication, for n < 2^31. Mirrors Divisor of kernels/pack.cuh.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct Divisor {
    value: u32,
    magic: u32,
    shift: u32,
}

impl Divisor {
    const NONE: Divisor = Divisor { value: 0, magic: 0, shift: 0 };

    fn new(value: u32) -> Divisor {
        let shift = 31 + log2_ceil(value);
        Divisor { value, magic: (1u64 << shift).div_ceil(value as u64) as u32, shift }
    }
}

/// Mirrors RowLayout of kernels/pack.cuh. Strides are in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
struct RowLayout {
    tiles: u32,
    units: u32,
    log_unit: u32,
    log_lanes: u32,
    log_lane_pos: u32,
    log_slots: u32,
    col_tiles: Divisor,
    inner_tiles: Divisor,
    tensors: Divisor,
    src_seq: i64,
    src_pos: i64,
    src_slot: i64,
    dst_row: i64,
    dst_slot: i64,
    run: Divisor,
    inner: Divisor,
    src_outer: i64,
    src_inner: i64,
    dst_outer: i64,
    dst_inner: i64,
}

impl RowLayout {
    const EMPTY: RowLayout = RowLayout {
        tiles: 0,
        units: 0,
        log_unit: 0,
        log_lanes: 0,
        log_lane_pos: 0,
        log_slots: 0,
        col_tiles: Divisor::NONE,
        inner_tiles: Divisor::NONE,
        tensors: Divisor::NONE,
        src_seq: 0,
        src_pos: 0,
        src_slot: 0,
        dst_row: 0,
        dst_slot: 0,
        run: Divisor::NONE,
        inner: Divisor::NONE,
        src_outer: 0,
        src_inner: 0,
        dst_outer: 0,
        dst_inner: 0,
    };
}

/// Mirrors PackParams of kernels/pack.cuh.
#[repr(C)]
struct PackParams {
    batch: u32,
    gamma: u32,
    cap: u32,
    layouts: u32,
    offsets_bytes: u32,
    by_sequence: u32,
    early_ctas: u32,
    accepted: *const u8,
    accepted_seq: i64,
    offsets: *mut u8,
    offsets_seq: i64,
    layout: [RowLayout; MAX_LAYOUTS],
    /// Those of layout 0, then those of layout 1, …; the kernels read no others.
    tensor: [MaybeUninit<Ends>; MAX_TENSORS],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ends {
    src: *const u8,
    dst: *mut u8,
}

impl Ends {
    /// Set in either address.
    fn bits(&self) -> usize {
        self.src as usize | self.dst as usize
    }
}

/// Mirrors VerifyPackParams of kernels/verify_pack.cu.
#[repr(C)]
struct VerifyPackParams {
    /// Set for the fused kernel alone.
    verify: MaybeUninit<VerifyParams>,
    pack: PackParams,
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.batch() == 0 {
        return write_empty_offsets(enqueue, r);
    }
    check_sizes(r)?;
    let mut pieces = Pieces::new(r)?;
    let mut launch = Launch::new(r);
    launch.fill(&mut pieces)?;
    pack(enqueue, &mut launch, pieces, false)
}

pub fn run_verified(enqueue: &Enqueue, r: &VerifiedRequest) -> Result<()> {
    if r.pack.batch() == 0 {
        return write_empty_offsets(enqueue, &r.pack);
    }
    check_sizes(&r.pack)?;
    let mut pieces = Pieces::new(&r.pack)?;
    let mut launch = Launch::new(&r.pack);
    launch.fill(&mut pieces)?;
    let token_bytes = r.verify.batch() * r.verify.gamma() * r.verify.draft.dtype.bytes();
    let launches_dependents = enqueue.facts().launches_dependents();
    let is_small =
        r.pack.batch() <= MAX_SUMMED_BATCH && tuning::is_fused(token_bytes, pieces.bytes, launches_dependents);
    if is_small && pieces.is_empty() && launch.tiles > 0 {
        return fused(enqueue, &r.verify, &mut launch);
    }
    verify::cuda::run(enqueue, &r.verify)?;
    pack(enqueue, &mut launch, pieces, true)
}

fn check_sizes(r: &Request) -> Result<()> {
    const MOST_ROWS: usize = (1 << 31) - 1;
    if r.batch().saturating_mul(r.gamma) <= MOST_ROWS {
        return Ok(());
    }
    Err(Error::unsupported(format!("rows: {} × {} rows; CUDA takes up to 2^31 − 1", r.batch(), r.gamma)))
}

/// No sequence: the total is 0.
fn write_empty_offsets(enqueue: &Enqueue, r: &Request) -> Result<()> {
    // SAFETY: offsets has one element, which the op's caller keeps valid until the stream has passed.
    unsafe { enqueue.fill_zero(r.offsets.data, r.offsets.dtype.bytes()) }
}

fn fused(enqueue: &Enqueue, r: &verify::Request, launch: &mut Launch) -> Result<()> {
    let verify = VerifyParams::new(r)?;
    let threads = tuning::fused_threads(verify.tiles);
    let most = enqueue.facts().multiprocessors * (tuning::RESIDENT_THREADS / threads);
    let ctas = launch.tiles.div_ceil(threads / 32).min(most);
    launch.params.verify.write(verify);
    let kernels = enqueue.kernels();
    let kernel = if r.draft.dtype == DType::I64 { &kernels.verify_pack_i64 } else { &kernels.verify_pack_i32 };
    // SAFETY: the parameters are the kernels' struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(kernel, ctas + 1, threads, &launch.params) }
}

/// As many launches as the tensors need; offsets are written by the first. `follows`: this call has launched before.
fn pack(enqueue: &Enqueue, launch: &mut Launch, mut pieces: Pieces, mut follows: bool) -> Result<()> {
    let kernels = enqueue.kernels();
    let batch = pieces.request.batch();
    let mut put = |kernel: &Kernel, ctas: u32, params: &PackParams| {
        // SAFETY: the parameters are the kernels' struct; the op's caller keeps the tensors valid until the stream has
        // passed. Before it waits, a kernel reads rows alone, which no kernel of this call writes.
        let launched = unsafe {
            if follows {
                enqueue.launch_dependent(kernel, ctas, PACK_THREADS, params)
            } else {
                enqueue.launch(kernel, ctas, PACK_THREADS, params)
            }
        };
        follows = true;
        launched
    };
    let mut is_first = true;
    loop {
        // A CTA for each of its warps' tiles: the device deals them out as they come free.
        let ctas = launch.tiles.div_ceil(PACK_THREADS / 32);
        let params = &mut launch.params.pack;
        params.early_ctas = enqueue.facts().multiprocessors * (tuning::EARLY_THREADS / PACK_THREADS);
        if batch <= MAX_SUMMED_BATCH {
            put(&kernels.pack, ctas + 1, params)?;
        } else {
            if is_first {
                put(&kernels.pack_offsets, batch.div_ceil(OFFSETS_PER_CTA) as u32, params)?;
            }
            if ctas > 0 {
                put(&kernels.pack_large, ctas, params)?;
            }
        }
        if pieces.is_empty() {
            return Ok(());
        }
        is_first = false;
        *launch = Launch::new(pieces.request);
        launch.fill(&mut pieces)?;
    }
}

/// What to copy, tensor by tensor, in the kernels' terms: a layout, and where its rows begin. A tensor whose rows are
/// strided in three dimensions is several of two.
struct Pieces<'a> {
    request: &'a Request<'a>,
    /// The tensor that `current` is of.
    n: usize,
    current: Option<Piece>,
    /// Row bytes of all tensors.
    bytes: usize,
}

#[derive(Clone, Copy)]
struct Piece {
    /// Its tensors and tiles are not known yet.
    layout: RowLayout,
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
    fn new(request: &'a Request<'a>) -> Result<Pieces<'a>> {
        let bytes = request.pairs.row_bytes * request.batch() * request.gamma;
        let mut pieces = Pieces { request, n: 0, current: None, bytes };
        pieces.find_tensor()?;
        Ok(pieces)
    }

    fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    fn advance(&mut self) -> Result<()> {
        match &mut self.current {
            Some(piece) if piece.rest > 0 => {
                piece.rest -= 1;
                piece.ends.src = piece.ends.src.wrapping_offset(piece.step[0]);
                piece.ends.dst = piece.ends.dst.wrapping_offset(piece.step[1]);
                Ok(())
            }
            _ => {
                self.n += 1;
                self.find_tensor()
            }
        }
    }

    /// The first piece of tensor `n`, or of the next that has anything to copy.
    fn find_tensor(&mut self) -> Result<()> {
        let log_slots = if self.bytes <= tuning::TWO_SLOT_BYTES { 1 } else { 2 };
        self.current = None;
        while self.n < self.request.pairs.len() {
            let pair = self.request.pairs.get(self.n);
            if pair.rows.count() > 0 && pair.packed.count() > 0 {
                self.current = Some(Piece::new(&pair, log_slots, self.request)?);
                return Ok(());
            }
            self.n += 1;
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
            let (n, src, dst) = (rows.dim(d) as i64, stride(rows, d), stride(packed, d - 1));
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
        let ends = Ends { src: rows.data, dst: packed.data };
        let rows_steps = stride(rows, 0) | stride(rows, 1) | stride(packed, 0) | run;
        let steps = rows_steps | inner.1 | inner.2 | outer.1 | outer.2 | rest.1 | rest.2;
        let widest = steps.trailing_zeros().min(4);
        let log_unit = widest.min(ends.bits().trailing_zeros());
        let units = (run >> log_unit) * inner.0 * outer.0;
        if units >= 1 << 31 {
            let text = format!("{}: rows of {units} pieces; CUDA takes fewer than 2^31", rows.name);
            return Err(Error::unsupported(text));
        }
        let log_lanes = log2_ceil(units as u32).min(LOG_LANES);
        let log_lane_pos = log2_ceil(r.gamma as u32).saturating_sub(log_slots).min(LOG_LANES - log_lanes);
        let layout = RowLayout {
            units: units as u32,
            log_unit,
            log_lanes,
            log_lane_pos,
            log_slots,
            col_tiles: Divisor::new((units as u32).div_ceil(1 << log_lanes)),
            src_seq: stride(rows, 0),
            src_pos: stride(rows, 1),
            src_slot: stride(rows, 1) << log_lane_pos,
            dst_row: stride(packed, 0),
            dst_slot: stride(packed, 0) << log_lane_pos,
            run: Divisor::new((run >> log_unit) as u32),
            inner: Divisor::new(inner.0 as u32),
            src_outer: outer.1,
            src_inner: inner.1,
            dst_outer: outer.2,
            dst_inner: inner.2,
            ..RowLayout::EMPTY
        };
        let cap = packed.dim(0).min(r.batch() * r.gamma) as u32;
        let step = [rest.1 as isize, rest.2 as isize];
        Ok(Piece { layout, ends, cap, rest: rest.0 as usize - 1, step, is_whole: rest.0 == 1, widest })
    }
}

/// One launch in the making.
struct Launch {
    params: VerifyPackParams,
    /// Tensors so far; the layout of each, and how many each layout has.
    tensors: usize,
    layout_of: [u8; MAX_TENSORS],
    counts: [u32; MAX_LAYOUTS],
    /// Of all layouts; fewer than 2^31.
    tiles: u32,
}

// Some six kilobytes: made where they stay, and passed by reference.
impl Launch {
    #[inline(always)]
    fn new(r: &Request) -> Launch {
        let pack = PackParams {
            batch: r.batch() as u32,
            gamma: r.gamma as u32,
            cap: 0,
            layouts: 0,
            offsets_bytes: r.offsets.dtype.bytes() as u32,
            by_sequence: 0,
            early_ctas: 0,
            accepted: r.accepted.data,
            accepted_seq: stride(&r.accepted, 0),
            offsets: r.offsets.data,
            offsets_seq: stride(&r.offsets, 0),
            layout: [RowLayout::EMPTY; MAX_LAYOUTS],
            tensor: [const { MaybeUninit::uninit() }; MAX_TENSORS],
        };
        let params = VerifyPackParams { verify: MaybeUninit::uninit(), pack };
        Launch { params, tensors: 0, layout_of: [0; MAX_TENSORS], counts: [0; MAX_LAYOUTS], tiles: 0 }
    }

    /// Takes the pieces that go in one launch: of one capacity, few layouts, and no more than it has room for.
    fn fill(&mut self, pieces: &mut Pieces) -> Result<()> {
        while let Some(piece) = &pieces.current {
            let Some(layout) = self.add(piece) else { break };
            if piece.is_whole {
                pieces.n += self.add_alike(layout, piece, pieces.request.pairs.repeats(pieces.n + 1));
            }
            pieces.advance()?;
        }
        if self.params.pack.layouts > 1 {
            self.sort_tensors();
        }
        self.params.pack.by_sequence = (pieces.bytes >= tuning::BY_SEQUENCE_BYTES) as u32;
        self.cut(pieces.request)
    }

    /// Returns its layout's number, `None` when the piece belongs in another launch.
    fn add(&mut self, piece: &Piece) -> Option<usize> {
        let pack = &mut self.params.pack;
        if self.tensors == MAX_TENSORS || (self.tensors > 0 && piece.cap != pack.cap) {
            return None;
        }
        let layouts = pack.layouts as usize;
        let at = match pack.layout[..layouts].iter().position(|layout| *layout == piece.layout) {
            Some(at) => at,
            None if layouts == MAX_LAYOUTS => return None,
            None => {
                pack.layout[layouts] = piece.layout;
                pack.layouts += 1;
                layouts
            }
        };
        pack.cap = piece.cap;
        self.add_to(at, piece.ends);
        Some(at)
    }

    fn add_to(&mut self, layout: usize, ends: Ends) {
        self.params.pack.tensor[self.tensors].write(ends);
        self.layout_of[self.tensors] = layout as u8;
        self.counts[layout] += 1;
        self.tensors += 1;
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
        for (place, (src, dst)) in self.params.pack.tensor[self.tensors..].iter_mut().zip(tensors) {
            let ends = Ends { src, dst };
            if misaligned(&ends) != misaligned(&piece.ends) {
                break;
            }
            place.write(ends);
            added += 1;
        }
        self.layout_of[self.tensors..][..added].fill(layout as u8);
        self.counts[layout] += added as u32;
        self.tensors += added;
        added
    }

    /// Puts the tensors of each layout side by side.
    fn sort_tensors(&mut self) {
        let mut next = [0; MAX_LAYOUTS];
        for at in 1..MAX_LAYOUTS {
            next[at] = next[at - 1] + self.counts[at - 1] as usize;
        }
        let unsorted = self.params.pack.tensor;
        for (ends, &layout) in unsorted.iter().zip(&self.layout_of[..self.tensors]) {
            self.params.pack.tensor[next[layout as usize]] = *ends;
            next[layout as usize] += 1;
        }
    }

    /// Counts the tiles, now that the tensors of each layout are known.
    fn cut(&mut self, r: &Request) -> Result<()> {
        let pack = &mut self.params.pack;
        for (layout, &tensors) in pack.layout[..pack.layouts as usize].iter_mut().zip(&self.counts) {
            let positions = (r.gamma as u32).div_ceil(1 << (layout.log_slots + layout.log_lane_pos));
            let sequences = (r.batch() as u32).div_ceil(1 << (LOG_LANES - layout.log_lanes - layout.log_lane_pos));
            layout.inner_tiles = Divisor::new(if pack.by_sequence == 1 { positions } else { sequences });
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
