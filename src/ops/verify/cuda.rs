//! Launch of the kernels of kernels/verify/verify.cu.

use super::choose::{self, Shape, TILE_TOKENS, Variant};
use super::{End, Flat, Request};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{is_near, kernel_struct, log2_ceil};
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{NO_DIM, View, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

/// The kernels of each [`Variant`].
pub struct Kernels {
    common: ByToken,
    general: ByToken,
    long: ByToken,
    /// `common` with an end.
    end: ByToken,
    rows: ByToken,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("verify/verify", compute_80, compute_90)];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let of = |names| ByToken::find(modules, "verify/verify", names);
        Ok(Kernels {
            common: of(["verify_i32", "verify_i64"])?,
            general: of(["verify_general_i32", "verify_general_i64"])?,
            long: of(["verify_long_i32", "verify_long_i64"])?,
            end: of(["verify_end_i32", "verify_end_i64"])?,
            rows: of(["verify_rows_i32", "verify_rows_i64"])?,
        })
    }
}

/// A kernel for each type of token.
pub struct ByToken {
    i32: Kernel,
    i64: Kernel,
}

impl ByToken {
    /// `names`: for int32, for int64.
    pub fn find(modules: &Modules, source: &str, names: [&'static str; 2]) -> Result<ByToken> {
        Ok(ByToken { i32: modules.kernel(source, names[0])?, i64: modules.kernel(source, names[1])? })
    }

    pub fn of(&self, token: DType) -> &Kernel {
        if token == DType::I64 { &self.i64 } else { &self.i32 }
    }

    pub fn all(&self) -> [&Kernel; 2] {
        [&self.i32, &self.i64]
    }
}

kernel_struct! {
    /// Mirrors VerifyParams of kernels/verify/verify.cuh: `Stride` is i32 for tensors of the common form, else i64.
    /// Strides are in bytes.
    #[derive(Clone, Copy)]
    pub struct Params<Stride> {
        draft: *const u8,
        target: *const u8,
        draft_seq: Stride,
        target_seq: Stride,
        draft_pos: Stride,
        target_pos: Stride,
        batch: u32,
        gamma: u32,
        log_lanes: u32,
        /// Rows that a CTA of a cluster looks at; the fused kernel alone reads it.
        pub share: u32,
        draft_lens: *const u8,
        accepted: *mut u8,
        next_token: *mut u8,
        mismatch: *mut u8,
        committed: *mut u8,
        draft_lens_seq: Stride,
        accepted_seq: Stride,
        next_token_seq: Stride,
        mismatch_seq: Stride,
        committed_seq: Stride,
        committed_pos: Stride,
        mismatch_bytes: u32,
    }
}

kernel_struct! {
    /// Mirrors EndParams of kernels/verify/end.cuh.
    pub struct EndParams {
        stop: View<2>,
        ignore_stop: View<1>,
        remaining: View<1>,
        min_remaining: View<1>,
        committed_len: View<1>,
        finish: View<1>,
        stops: u32,
        stop_bytes: u32,
    }
}

impl EndParams {
    pub fn new(end: Option<&End>) -> EndParams {
        let column = |t: Option<&Tensor>| t.map_or(View::ABSENT, |t| View::new(t, [0]));
        let [stop, ignore_stop, remaining, min_remaining] = end.map_or([None; 4], End::inputs);
        let [committed_len, finish] = end.map_or([None; 2], End::outputs);
        let stops = stop.map_or(0, |t| t.dim(t.rank() - 1));
        EndParams {
            // Stop tokens of all requests are one row.
            stop: stop.map_or(View::ABSENT, |t| View::new(t, if t.rank() == 2 { [0, 1] } else { [NO_DIM, 0] })),
            ignore_stop: column(ignore_stop),
            remaining: column(remaining),
            min_remaining: column(min_remaining),
            committed_len: column(committed_len),
            finish: column(finish),
            stops: saturated(stops),
            stop_bytes: stop.map_or(0, |t| t.dtype.bytes() as u32),
        }
    }
}

kernel_struct! {
    /// Mirrors FlatParams of kernels/verify/verify.cuh.
    struct FlatParams {
        ends: View<1>,
        bonus: View<1>,
        tokens: u32,
        unused: u32,
    }
}

impl FlatParams {
    fn new(r: &Request) -> FlatParams {
        let column = |of: fn(&Flat) -> View<1>| r.flat.as_ref().map_or(View::ABSENT, of);
        let ends = column(|flat| View::new(&flat.ends, [0]));
        let bonus = column(|flat| View::new(&flat.bonus, [0]));
        FlatParams { ends, bonus, tokens: r.draft.dim(0) as u32, unused: 0 }
    }
}

const LOG_LANES: u32 = 5;
/// TOKEN_SLOTS of kernels/verify/verify.cuh: tokens of a lane.
const _: () = assert!(TILE_TOKENS == 4 << LOG_LANES);
const THREADS: u32 = 128;
const LONG_THREADS: u32 = 256;

/// Token tiles of so many rows.
pub fn tiles(rows: usize, gamma: usize) -> u32 {
    let tile_rows = 1 << (LOG_LANES - log_lanes(gamma));
    rows.div_ceil(tile_rows) as u32
}

/// Two lanes at least, so that a tile has at most 16 rows.
fn log_lanes(gamma: usize) -> u32 {
    log2_ceil(gamma as u32).clamp(1, LOG_LANES)
}

fn check_sizes(r: &Request) -> Result<()> {
    const MOST_ROWS: usize = 1 << 29;
    const MOST_TOKENS: usize = (1 << 31) - 1;
    let (batch, gamma) = (r.batch(), r.gamma());
    // Drafts that lie one after the other have as many tokens as an int32 can count.
    if batch < MOST_ROWS && (r.flat.is_some() || batch.saturating_mul(gamma) <= MOST_TOKENS) {
        return Ok(());
    }
    Err(Error::unsupported(format!("draft: {batch} rows of {gamma} tokens; CUDA takes up to 2^31 − 1")))
}

impl Params<i32> {
    /// Parameters of the common form, and whether the tensors have it: tokens are adjacent and strides fit in 32 bits, as Common of
    /// kernels/common/types.cuh says.
    #[inline(always)]
    pub fn common(r: &Request) -> (Params<i32>, bool) {
        let mut is_common = r.flat.is_none() && r.draft.stride(1) == 1 && r.target.stride(1) == 1;
        let params = Params::new(r, |stride| {
            is_common &= is_near(stride);
            stride as i32
        });
        (params, is_common)
    }
}

impl<Stride> Params<Stride> {
    /// `narrow` turns a stride into its type.
    #[inline(always)]
    fn new(r: &Request, mut narrow: impl FnMut(i64) -> Stride) -> Params<Stride> {
        let address = |t: &Option<Tensor>| t.as_ref().map_or(std::ptr::null_mut(), |t| t.data());
        let mut step = |t: Option<&Tensor>, d| narrow(t.map_or(0, |t| t.byte_stride(d)));
        // Drafts that lie one after the other have no rows.
        let pos = r.draft.rank() - 1;
        Params {
            draft: r.draft.data(),
            target: r.target.data(),
            draft_seq: step(Some(&r.draft), 0),
            target_seq: step(Some(&r.target), 0),
            draft_pos: step(Some(&r.draft), pos),
            target_pos: step(Some(&r.target), pos),
            batch: r.batch() as u32,
            gamma: r.gamma() as u32,
            log_lanes: log_lanes(r.gamma()),
            share: 0,
            draft_lens: address(&r.draft_lens),
            accepted: r.accepted.data(),
            next_token: r.next_token.data(),
            mismatch: address(&r.mismatch),
            committed: address(&r.committed),
            draft_lens_seq: step(r.draft_lens.as_ref(), 0),
            accepted_seq: step(Some(&r.accepted), 0),
            next_token_seq: step(Some(&r.next_token), 0),
            mismatch_seq: step(r.mismatch.as_ref(), 0),
            committed_seq: step(r.committed.as_ref(), 0),
            committed_pos: step(r.committed.as_ref(), 1),
            mismatch_bytes: r.mismatch.as_ref().map_or(0, |t| t.dtype.bytes() as u32),
        }
    }
}

/// Enqueues the call alone: it may start while the kernel before it runs, of whatever call that is.
pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    launch(enqueue, r, enqueue.dependent_kind())
}

/// Enqueues the call ahead of a kernel that starts early and reads what was ready when this one began: it begins when all before it has ended.
pub fn run_before(enqueue: &Enqueue, r: &Request) -> Result<()> {
    launch(enqueue, r, Kind::Plain)
}

fn launch(enqueue: &Enqueue, r: &Request, kind: Kind) -> Result<()> {
    if r.batch() == 0 {
        return Ok(());
    }
    check_sizes(r)?;
    let kernels: &Kernels = enqueue.kernels();
    let grid = |ctas, threads| Grid { ctas, threads, kind };
    let by_tile = grid(tiles(r.batch(), r.gamma()).div_ceil(THREADS / 32), THREADS);
    let token = r.draft.dtype;
    let (common, is_common) = Params::common(r);
    let shape = Shape { gamma: r.gamma(), is_common, is_flat: r.flat.is_some(), has_end: r.end.is_some() };
    let variant = variants::choose(enqueue.forced(), |variant| choose::fit(variant, shape))?;
    enqueue.ran(variant);
    // SAFETY: Params is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. Before they wait, the kernels
    // only bring what they will read into the cache.
    unsafe {
        if variant == Variant::Common {
            let common = (&raw const common).cast();
            let Some(end) = &r.end else { return enqueue.launch(kernels.common.of(token), by_tile, [common]) };
            let end = EndParams::new(Some(end));
            return enqueue.launch(kernels.end.of(token), by_tile, [common, (&raw const end).cast()]);
        }
        let params = Params::new(r, |s| s);
        let params = (&raw const params).cast();
        match variant {
            Variant::Rows => {
                let (flat, end) = (FlatParams::new(r), EndParams::new(r.end.as_ref()));
                let by_row = grid((r.batch() as u32).div_ceil(THREADS / 32), THREADS);
                let params = [params, (&raw const flat).cast(), (&raw const end).cast()];
                enqueue.launch(kernels.rows.of(token), by_row, params)
            }
            Variant::Long => enqueue.launch(kernels.long.of(token), grid(r.batch() as u32, LONG_THREADS), [params]),
            _ => enqueue.launch(kernels.general.of(token), by_tile, [params]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            EndParams::layout("EndParams"),
            FlatParams::layout("FlatParams"),
            Params::<i32>::layout("VerifyParams<Common>"),
            Params::<i64>::layout("VerifyParams<General>"),
        ];
        layout::check("verify", file!(), &structs);
    }
}
