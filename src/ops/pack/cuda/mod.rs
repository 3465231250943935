//! Launch of the kernels of kernels/pack/pack.cu and kernels/pack/verify_pack.cu: which of them suits which sizes.

mod choose;
mod tiles;

use super::{Request, VerifiedRequest};
use crate::core::status::{Error, Result};
use crate::ops::verify;
use crate::ops::verify::{ByToken, EndParams, Params as VerifyParams};
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};
use choose::{Sizes, Variant, fit};
use std::mem::MaybeUninit;
use tiles::{Launch, PackParams, Pieces};

/// The largest batch whose counts a CTA sums by itself.
const MAX_SUMMED_BATCH: usize = 1024;
const OFFSETS_PER_CTA: usize = 1024;
const PACK_THREADS: u32 = 256;
/// Sequences that the CTAs of a cluster send each other at once.
const SHARE_UNIT: usize = 16;

/// The largest number of threads of a CTA of the fused kernel: MAX_THREADS of kernels/pack/verify_pack.cu.
const CLUSTER_THREADS: u32 = 384;

/// The kernels named `general` take rows of every form, the others rows of the common form: see kernels/common/types.cuh.
pub struct Kernels {
    pack: PackKernels,
    general: PackKernels,
    fused: ByToken,
    fused_long: ByToken,
    /// The same with an end.
    fused_end: ByToken,
    fused_end_long: ByToken,
    /// The fused kernels can share their work among the CTAs of a cluster.
    has_clusters: bool,
}

/// The kernels of kernels/pack/pack.cu for rows of one form.
struct PackKernels {
    rows: Kernel,
    offsets: Kernel,
    large: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] =
        &[source!("pack/pack", compute_80, compute_90), source!("pack/verify_pack", compute_80, compute_90)];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let pack = |[rows, offsets, large]: [&'static str; 3]| {
            let kernel = |name| modules.kernel("pack/pack", name);
            Ok(PackKernels { rows: kernel(rows)?, offsets: kernel(offsets)?, large: kernel(large)? })
        };
        let fused = |names| ByToken::find(modules, "pack/verify_pack", names);
        let mut kernels = Kernels {
            pack: pack(["pack", "pack_offsets", "pack_large"])?,
            general: pack(["pack_general", "pack_offsets_general", "pack_large_general"])?,
            fused: fused(["verify_pack_i32", "verify_pack_i64"])?,
            fused_long: fused(["verify_pack_long_i32", "verify_pack_long_i64"])?,
            fused_end: fused(["verify_pack_end_i32", "verify_pack_end_i64"])?,
            fused_end_long: fused(["verify_pack_end_long_i32", "verify_pack_end_long_i64"])?,
            has_clusters: false,
        };
        kernels.has_clusters = modules.facts().launches_dependents() && kernels.can_form_clusters();
        Ok(kernels)
    }
}

impl Kernels {
    /// The context is current.
    fn can_form_clusters(&self) -> bool {
        let kernels = [&self.fused, &self.fused_long, &self.fused_end, &self.fused_end_long].map(ByToken::all);
        kernels.as_flattened().iter().all(|kernel| kernel.active_clusters(LARGEST_CLUSTER, CLUSTER_THREADS) > 0)
    }
}

/// Where one choice becomes faster than the other, as measured on an H200 (benches/results).
pub mod tuning {
    use super::CLUSTER_THREADS;
    use crate::runtime::cuda::LARGEST_CLUSTER;

    /// CTAs of a cluster, by the batch's token tiles.
    pub fn cluster(token_tiles: u32) -> u32 {
        if token_tiles <= 16 { 1 } else { LARGEST_CLUSTER }
    }
    /// Threads of a CTA of the fused kernel, by the token tiles that it looks at.
    pub fn fused_threads(token_tiles: u32) -> u32 {
        if token_tiles <= 8 { 256 } else { CLUSTER_THREADS }
    }
    /// Threads of a multiprocessor that copy in the fused kernel.
    pub const FUSED_RESIDENT_THREADS: u32 = 512;
    /// Row bytes up to which a lane holds two units at once rather than four: more warps, each done sooner.
    pub const TWO_SLOT_BYTES: usize = 1 << 20;
    /// Row bytes from which tiles are taken sequence by sequence.
    pub const BY_SEQUENCE_BYTES: usize = 24 << 20;
    /// Threads of a multiprocessor that request rows before they know what was accepted.
    pub const EARLY_THREADS: u32 = 256;
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    if r.batch() == 0 {
        return write_empty_offsets(enqueue, r);
    }
    check_sizes(r)?;
    let mut pieces = Pieces::new(r);
    let mut launch = Launch::new();
    launch.fill(&mut pieces)?;
    check_rest(&pieces)?;
    pack(enqueue, &mut launch, pieces, false)
}

pub fn run_verified(enqueue: &Enqueue, r: &VerifiedRequest) -> Result<()> {
    if r.pack.batch() == 0 {
        return write_empty_offsets(enqueue, &r.pack);
    }
    check_sizes(&r.pack)?;
    let mut pieces = Pieces::new(&r.pack);
    let mut launch = Launch::new();
    launch.fill(&mut pieces)?;
    let (batch, gamma) = (r.verify.batch(), r.verify.gamma());
    let (mut params, is_common) = VerifyParams::common(&r.verify);
    let sizes = Sizes {
        batch,
        gamma,
        token_tiles: verify::tiles(batch, gamma),
        row_bytes: pieces.bytes,
        has_clusters: enqueue.kernels::<Kernels>().has_clusters,
        is_one_launch: is_common && pieces.is_empty() && launch.tiles > 0 && launch.is_common(&r.pack),
    };
    let variant = variants::choose(enqueue.forced(), |variant| fit(variant, sizes))?;
    enqueue.ran(variant);
    if variant == Variant::Fused {
        return fused(enqueue, r, &mut params, &launch);
    }
    check_rest(&pieces)?;
    verify::run_before(enqueue, &r.verify)?;
    pack(enqueue, &mut launch, pieces, true)
}

fn check_sizes(r: &Request) -> Result<()> {
    const MOST_ROWS: usize = (1 << 31) - 1;
    if r.batch().saturating_mul(r.gamma) <= MOST_ROWS {
        return Ok(());
    }
    Err(Error::unsupported(format!("rows: {} × {} rows; CUDA takes up to 2^31 − 1", r.batch(), r.gamma)))
}

/// What no launch can take is found out before the first.
fn check_rest(pieces: &Pieces) -> Result<()> {
    let mut rest = pieces.clone();
    while !rest.is_empty() {
        Launch::new().fill(&mut rest)?;
    }
    Ok(())
}

/// No sequence: the total is 0.
fn write_empty_offsets(enqueue: &Enqueue, r: &Request) -> Result<()> {
    // SAFETY: offsets has one element, which the op's caller keeps valid until the stream has passed.
    unsafe { enqueue.fill_zero(r.offsets.data(), r.offsets.dtype.bytes()) }
}

fn fused(enqueue: &Enqueue, r: &VerifiedRequest, verify_params: &mut VerifyParams<i32>, launch: &Launch) -> Result<()> {
    let (batch, gamma) = (r.verify.batch(), r.verify.gamma());
    let kernels: &Kernels = enqueue.kernels();
    let cluster = if kernels.has_clusters { tuning::cluster(verify::tiles(batch, gamma)) } else { 1 };
    let share = batch.div_ceil(SHARE_UNIT).div_ceil(cluster as usize) * SHARE_UNIT;
    let threads = tuning::fused_threads(verify::tiles(share.min(batch), gamma));
    let resident = enqueue.facts().multiprocessors * (tuning::FUSED_RESIDENT_THREADS / threads);
    // The last cluster copies nothing.
    let most = (resident / cluster).max(2) - 1;
    let clusters = launch.tiles.div_ceil(threads / 32).div_ceil(cluster).min(most);
    let kind = if cluster > 1 { Kind::Clusters(cluster) } else { Kind::Plain };
    let grid = Grid { ctas: (clusters + 1) * cluster, threads, kind };

    verify_params.share = share as u32;
    let mut place = MaybeUninit::uninit();
    let pack: &PackParams<i32> = launch.write_params(&r.pack, 0, &mut place);
    let [v, p, t] = [(&raw const *verify_params).cast(), (&raw const *pack).cast(), launch.tensors().cast()];
    let (is_short, token) = (gamma <= 32, r.verify.draft.dtype);
    // SAFETY: the parameters are the kernels' structs; the op's caller keeps the tensors valid until the stream has passed.
    unsafe {
        let Some(end) = &r.verify.end else {
            let kernel = if is_short { &kernels.fused } else { &kernels.fused_long };
            return enqueue.launch(kernel.of(token), grid, [v, p, t]);
        };
        let end = EndParams::new(Some(end));
        let kernel = if is_short { &kernels.fused_end } else { &kernels.fused_end_long };
        enqueue.launch(kernel.of(token), grid, [v, p, t, (&raw const end).cast()])
    }
}

/// As many launches as the tensors need; offsets are written by the first. `follows`: this call has launched before.
fn pack(enqueue: &Enqueue, launch: &mut Launch, mut pieces: Pieces, mut follows: bool) -> Result<()> {
    let (kernels, request): (&Kernels, _) = (enqueue.kernels(), pieces.request);
    let early_ctas = enqueue.facts().multiprocessors * (tuning::EARLY_THREADS / PACK_THREADS);
    let mut writes_offsets = true;
    loop {
        if launch.is_common(request) {
            let mut place = MaybeUninit::uninit();
            let params: &PackParams<i32> = launch.write_params(request, early_ctas, &mut place);
            pack_once(enqueue, &kernels.pack, launch, request, params, writes_offsets, follows)?;
        } else {
            let mut place = MaybeUninit::uninit();
            let params: &PackParams<i64> = launch.write_params(request, early_ctas, &mut place);
            pack_once(enqueue, &kernels.general, launch, request, params, writes_offsets, follows)?;
        }
        if pieces.is_empty() {
            return Ok(());
        }
        (writes_offsets, follows) = (false, true);
        *launch = Launch::new();
        launch.fill(&mut pieces)?;
    }
}

fn pack_once<Stride>(
    enqueue: &Enqueue,
    kernels: &PackKernels,
    launch: &Launch,
    r: &Request,
    params: &PackParams<Stride>,
    writes_offsets: bool,
    follows: bool,
) -> Result<()> {
    let kind = |follows| match follows && enqueue.facts().launches_dependents() {
        true => Kind::Dependent,
        false => Kind::Plain,
    };
    let grid = |ctas, follows| Grid { ctas, threads: PACK_THREADS, kind: kind(follows) };
    // A CTA for each of its warps' tiles: the device deals them out as they come free.
    let ctas = launch.tiles.div_ceil(PACK_THREADS / 32);
    let params = (&raw const *params).cast();
    // SAFETY: the parameters are the kernels' structs; the op's caller keeps the tensors valid until the stream has passed.
    // Before it waits, a kernel reads rows alone, which no kernel of this call writes.
    unsafe {
        if r.batch() <= MAX_SUMMED_BATCH {
            return enqueue.launch(&kernels.rows, grid(ctas + 1, follows), [params, launch.tensors().cast()]);
        }
        if writes_offsets {
            let ctas = r.batch().div_ceil(OFFSETS_PER_CTA) as u32;
            enqueue.launch(&kernels.offsets, grid(ctas, follows), [params])?;
        }
        if ctas > 0 {
            enqueue.launch(&kernels.large, grid(ctas, follows || writes_offsets), [params, launch.tensors().cast()])?;
        }
    }
    Ok(())
}
