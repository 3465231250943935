//! Gather on CUDA: few CTAs that read the host's memory (the kernels of kernels/prefetch), or the copy engine.

mod choose;
mod engines;
mod form;
mod params;

use super::{Engine, GatherRequest};
use crate::core::status::{Error, Result};
use crate::runtime::cuda::layout::log2_ceil;
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, MOST_COPIES, Modules, Source, source};
use choose::{Gather, Variant, fit};
use engines::Engines;
use form::Form;
use params::{BulkParams, Given, Lists, MOST_GIVEN, Offsets, VectorParams};
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// SLOTS of kernels/prefetch/vectors.cu: units of a lane.
const SLOTS: u32 = 4;
const LOG_WARP: u32 = 5;

/// The kernels of [`Variant`], each for lists that the device reads, and for entries that the host looked up.
pub struct Kernels {
    vectors: Kernel,
    vectors_given: Kernel,
    bulk: Option<Bulk>,
    engines: &'static Engines,
}

struct Bulk {
    lists: Kernel,
    given: Kernel,
    /// The kind of a launch of as many CTAs as there may be.
    kind: Kind,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("prefetch/vectors", compute_80), source!("prefetch/bulk", compute_90)];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let vectors = |name| modules.kernel("prefetch/vectors", name);
        Ok(Kernels {
            vectors: vectors("gather_vectors")?,
            vectors_given: vectors("gather_vectors_given")?,
            bulk: modules.has("prefetch/bulk").then(|| Bulk::find(modules)).transpose()?,
            engines: Engines::of(modules.facts().name()),
        })
    }
}

/// Every device that runs the kernels (compute capability 9.0 and later) has that much.
const _: () = assert!(tuning::ROOM <= 96 << 10);
/// MOST_STAGES of kernels/prefetch/bulk.cu.
const _: () = assert!(tuning::ROOM as u64 / tuning::SMALLEST_BULK <= 64);

impl Bulk {
    fn find(modules: &Modules) -> Result<Bulk> {
        let kernel = |name| {
            let kernel = modules.kernel("prefetch/bulk", name)?;
            kernel.allow_shared(tuning::ROOM)?;
            Ok(kernel.sharing(tuning::ROOM))
        };
        let lists = kernel("gather_bulk")?;
        let kind = match lists.in_pairs(tuning::WARPS * 32) {
            Kind::Clusters(size) => Kind::DependentClusters(size),
            _ => Kind::Dependent,
        };
        Ok(Bulk { lists, given: kernel("gather_bulk_given")?, kind })
    }
}

/// As measured on an H200 (benches/results).
mod tuning {
    /// Bytes of pieces under way in a CTA, and warps that move them.
    pub const ROOM: u32 = 64 << 10;
    pub const WARPS: u32 = 4;
    const LARGEST_PIECE: u64 = 4 << 10;
    /// Blocks that are smaller are not worth a bulk copy each.
    pub const SMALLEST_BULK: u64 = 1 << 10;
    /// CTAs that keep the bus busy by bulk copies, and by plain loads.
    pub const BULK_CTAS: u32 = 4;
    pub const VECTOR_CTAS: u32 = 8;
    pub const VECTOR_THREADS: u32 = 512;
    /// Threads of a multiprocessor that copy inside the device.
    pub const DEVICE_THREADS: u32 = 2048;

    /// Bytes of a piece, for blocks of so many.
    pub fn piece(block: u64) -> u32 {
        block.next_power_of_two().min(LARGEST_PIECE) as u32
    }
}

pub fn gather(enqueue: &Enqueue, r: &GatherRequest) -> Result<()> {
    if r.is_empty() {
        return Ok(());
    }
    let form = Form::of(r);
    let is_open = r.lists_on_host && r.engine == Engine::Auto;
    let gather = Gather {
        engine: r.engine,
        lists_on_host: r.lists_on_host,
        from_host: r.from_host,
        copy_engine_is_faster: is_open && suits_copy_engine(enqueue, r, &form) && enqueue.copies_are_batched()?,
        device_has_bulk: enqueue.kernels::<Kernels>().bulk.is_some(),
        run: form.run,
        is_one_run: form.used == 0,
        unit: form.unit,
    };
    let variant = variants::choose(enqueue.forced(), |variant| fit(variant, gather))?;
    enqueue.ran(variant);
    if variant == Variant::CopyEngine {
        return copy(enqueue, r, &form, enqueue.copies_are_batched()?);
    }
    if r.lists_on_host {
        return launch_given(enqueue, r, &form, variant);
    }
    let entries = r.pairs.entries();
    let launch = Launch::new(enqueue, r, &form, entries, variant)?;
    let lists = Lists::new(r);
    // SAFETY: the op's caller keeps the lists valid until the stream has passed.
    unsafe { launch.enqueue(enqueue, 0, entries, (&raw const lists).cast()) }
}

fn suits_copy_engine(enqueue: &Enqueue, r: &GatherRequest, form: &Form) -> bool {
    let kernels: &Kernels = enqueue.kernels();
    let lists = (0..r.pairs.batch()).flat_map(|i| (0..r.pairs.heads()).map(move |g| (i, g)));
    // SAFETY: the lists lie in host memory, which the op's caller keeps valid.
    let entries = lists.fold(0u64, |sum, (i, g)| sum.saturating_add(unsafe { r.pairs.count(i, g) } as u64));
    r.from_host && kernels.engines.take_copies(form.run, entries.saturating_mul(form.runs()))
}

/// How the kernels copy blocks of one form.
struct Launch {
    params: Params,
    /// For lists, and for entries that the host looked up.
    kernels: [Kernel; 2],
    /// Pieces or tiles of a block, and how many a CTA takes at once.
    per_block: u64,
    per_cta: u64,
    most_ctas: u64,
    threads: u32,
    /// The kind of a launch of `most_ctas` CTAs; a launch of fewer is plain.
    kind: Kind,
}

enum Params {
    Bulk(BulkParams),
    Vectors(VectorParams),
}

/// What the kernels count, in 32 bits with room to add.
const MOST_ITEMS: u64 = 1 << 30;

impl Launch {
    /// A launch of one of the kernels, for up to so many entries.
    fn new(enqueue: &Enqueue, r: &GatherRequest, form: &Form, entries: usize, variant: Variant) -> Result<Launch> {
        let kernels: &Kernels = enqueue.kernels();
        let launch = match &kernels.bulk {
            Some(bulk) if variant == Variant::Bulk => Launch::bulk(bulk, r, form),
            _ => Launch::vectors(kernels, r, form, enqueue.facts().multiprocessors)?,
        };
        if (entries as u64).saturating_mul(launch.per_block) < MOST_ITEMS {
            return Ok(launch);
        }
        let found = format!("{entries} blocks of {} bytes", form.bytes());
        Err(Error::unsupported(format!("source_ids: {found}; CUDA takes fewer than 2^30 pieces of them in a call")))
    }

    fn bulk(bulk: &Bulk, r: &GatherRequest, form: &Form) -> Launch {
        let piece = tuning::piece(form.run);
        // At least four; the smallest piece fills what the kernel has stages for.
        let stages = tuning::ROOM / tuning::WARPS / piece;
        Launch {
            params: Params::Bulk(BulkParams::new(r, form.run, piece, stages)),
            kernels: [bulk.lists, bulk.given],
            per_block: form.run.div_ceil(piece as u64),
            per_cta: 1,
            most_ctas: tuning::BULK_CTAS as u64,
            threads: tuning::WARPS * 32,
            kind: bulk.kind,
        }
    }

    fn vectors(kernels: &Kernels, r: &GatherRequest, form: &Form, multiprocessors: u32) -> Result<Launch> {
        let units = form.bytes() / form.unit;
        if units >= MOST_ITEMS {
            let text = format!("source: blocks of {units} pieces of {} bytes; CUDA takes fewer than 2^30", form.unit);
            return Err(Error::unsupported(text));
        }
        let log_lanes = log2_ceil((units as u32).div_ceil(SLOTS)).min(LOG_WARP);
        let tiles = units.div_ceil((SLOTS << log_lanes) as u64);
        let device_ctas = multiprocessors * (tuning::DEVICE_THREADS / tuning::VECTOR_THREADS);
        Ok(Launch {
            params: Params::Vectors(VectorParams::new(r, form, tiles as u32, log_lanes)),
            kernels: [kernels.vectors, kernels.vectors_given],
            per_block: tiles,
            per_cta: (tuning::VECTOR_THREADS >> log_lanes) as u64,
            most_ctas: if r.from_host { tuning::VECTOR_CTAS } else { device_ctas } as u64,
            threads: tuning::VECTOR_THREADS,
            kind: Kind::Plain,
        })
    }

    /// `which` of the kernels, for so many entries.
    ///
    /// # Safety
    /// `pairs` points to its second parameter, whose entries name valid blocks or, in lists that are valid until the stream has
    /// passed, any.
    unsafe fn enqueue(&self, enqueue: &Enqueue, which: usize, entries: usize, pairs: *const c_void) -> Result<()> {
        let params: *const c_void = match &self.params {
            Params::Bulk(params) => (&raw const *params).cast(),
            Params::Vectors(params) => (&raw const *params).cast(),
        };
        let ctas = (entries as u64 * self.per_block).div_ceil(self.per_cta).min(self.most_ctas);
        let kind = if ctas == self.most_ctas { self.kind } else { Kind::Plain };
        let grid = Grid { ctas: ctas as u32, threads: self.threads, kind };
        // SAFETY: the parameters are the kernels' structs, as the caller says of the second; the op's caller keeps source and
        // target valid until the stream has passed.
        unsafe { enqueue.launch(&self.kernels[which], grid, [params, pairs]) }
    }
}

/// Calls `each` with the offsets of every block that the host's lists copy.
fn for_each_pair(r: &GatherRequest, mut each: impl FnMut([i64; 2]) -> Result<()>) -> Result<()> {
    for i in 0..r.pairs.batch() {
        for g in 0..r.pairs.heads() {
            // SAFETY: the lists lie in host memory, which the op's caller keeps valid.
            let count = unsafe { r.pairs.count(i, g) };
            for j in 0..count {
                // SAFETY: as above; the entry is below its list's count.
                if let Some(offsets) = unsafe { r.offsets([i, g, j]) } {
                    each(offsets)?;
                }
            }
        }
    }
    Ok(())
}

/// The kernels, on entries that the host looks up: so many in each launch.
fn launch_given(enqueue: &Enqueue, r: &GatherRequest, form: &Form, variant: Variant) -> Result<()> {
    let launch = Launch::new(enqueue, r, form, r.pairs.entries().min(MOST_GIVEN), variant)?;
    let mut given = Given { of: [const { MaybeUninit::uninit() }; MOST_GIVEN], entries: 0 };
    let flush = |given: &Given| {
        // SAFETY: every entry names blocks inside source and target.
        unsafe { launch.enqueue(enqueue, 1, given.entries as usize, (&raw const *given).cast()) }
    };
    for_each_pair(r, |[from, to]| {
        if given.entries as usize == MOST_GIVEN {
            flush(&given)?;
            given.entries = 0;
        }
        given.of[given.entries as usize].write(Offsets { from, to });
        given.entries += 1;
        Ok(())
    })?;
    if given.entries > 0 { flush(&given) } else { Ok(()) }
}

/// The copy engine: a copy for each run of each block.
fn copy(enqueue: &Enqueue, r: &GatherRequest, form: &Form, batched: bool) -> Result<()> {
    let (mut sources, mut targets, mut count) = ([0; MOST_COPIES], [0; MOST_COPIES], 0);
    let flush = |sources: &[u64], targets: &[u64]| {
        // SAFETY: runs of blocks inside source and target, which the op's caller keeps valid until the stream has passed.
        unsafe { enqueue.copy(targets, sources, form.run as usize, batched) }
    };
    for_each_pair(r, |[from, to]| {
        for run in 0..form.runs() {
            let [source, target] = form.offsets(run);
            sources[count] = (r.source.data() as u64).wrapping_add_signed(from + source);
            targets[count] = (r.target.data() as u64).wrapping_add_signed(to + target);
            count += 1;
            if count == MOST_COPIES {
                flush(&sources, &targets)?;
                count = 0;
            }
        }
        Ok(())
    })?;
    flush(&sources[..count], &targets[..count])
}
