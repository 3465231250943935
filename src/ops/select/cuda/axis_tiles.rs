//! What axis_cluster and axis_two_launches share (kernels/select/axis_tiles.cuh): the forms of a call that they have kernels for.

use super::params::{MOST_TOKENS, SelectParams, THREADS, sharing};
use crate::core::status::Result;
use crate::ops::index::Axes;
use crate::ops::select::Request;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::views::{Summary, has_aligned_rows};
use crate::runtime::cuda::{Kernel, Modules};

/// A kernel for each form of kernels/select/axis_tiles.cuh.
pub struct TileKernels {
    /// For D = 128 and up to 4, 8 and 16 heads.
    pub common: [Kernel; 3],
    /// For every D, up to 4 and 16 heads.
    others: [Kernel; 2],
}

impl TileKernels {
    /// `common` and `others` are their names. `declared`: what they declare of shared memory, at most.
    pub fn find(
        modules: &Modules,
        source: &str,
        [common, others]: [&[&'static str]; 2],
        declared: u32,
    ) -> Result<TileKernels> {
        let kernel = |name| TileKernels::kernel(modules, source, name, declared);
        Ok(TileKernels {
            common: [kernel(common[0])?, kernel(common[1])?, kernel(common[2])?],
            others: [kernel(others[0])?, kernel(others[1])?],
        })
    }

    pub fn kernel(modules: &Modules, source: &str, name: &'static str, declared: u32) -> Result<Kernel> {
        let kernel = modules.kernel(source, name)?;
        kernel.allow_shared(modules.facts().shared_bytes - declared)?;
        kernel.allow_large_clusters()?;
        Ok(kernel)
    }

    pub fn all(&self) -> impl Iterator<Item = &Kernel> {
        self.common.iter().chain(&self.others)
    }

    pub fn of(&self, form: &AxisForm) -> &Kernel {
        match form.is_common {
            true => &self.common[form.quartets.ilog2() as usize],
            false => &self.others[(form.quartets > 1) as usize],
        }
    }
}

/// What a CTA can have of a multiprocessor.
pub struct CtaShare {
    /// Dynamic shared memory.
    pub bytes: usize,
    /// Clusters of 1, 2, … CTAs that run at once.
    pub clusters: [usize; MOST_CTAS],
}

impl CtaShare {
    /// Where two CTAs of the first kernel share a multiprocessor, and where each of the second has its own.
    pub fn both(modules: &Modules, kernels: [&Kernel; 2], declared: u32) -> [CtaShare; 2] {
        let most = modules.facts().shared_bytes;
        let share = |kernel: &Kernel, bytes: u32| {
            let active = |n| kernel.sharing(bytes).active_clusters(n as u32 + 1, THREADS) as usize;
            CtaShare { bytes: bytes as usize, clusters: std::array::from_fn(active) }
        };
        let half = (most + RESERVED) / 2 - RESERVED - declared;
        [share(kernels[0], half), share(kernels[1], most - declared)]
    }
}

kernel_struct! {
    /// Mirrors AxisTileParams of kernels/select/params.cuh.
    pub struct AxisTileParams {
        pub select: SelectParams,
        pub axes: Summary,
        pub range: Summary,
        pub stages: u32,
        pub most_tiles: u32,
        pub products: u32,
        pub partials: u32,
        pub queries: u32,
        pub keys: u32,
    }
}

/// Shared memory that the driver takes for each CTA.
pub const RESERVED: u32 = 1 << 10;
/// D of the common form.
pub const COMMON_DIM: usize = 128;
/// MOST_HEADS and MOST_STAGES of kernels/select/axis_tiles.cuh, MOST_CTAS of kernels/select/axis_cluster.cuh.
const MOST_HEADS: usize = 16;
pub const MOST_STAGES: usize = 3;
pub const MOST_CTAS: usize = 16;
/// BLOCKS of kernels/select/tiles.cuh: of a tile.
pub const BLOCKS: usize = 16;
pub const WARPS: usize = THREADS as usize / 32;
/// Shared memory of the top k of the keys, at most: it takes the place of products.
pub const TOP_SHARED: usize = 9 << 10;
/// Bytes between the rows of a tile, except for D = 128.
const GAP: usize = 16;

/// What kernels/select/axis_tiles.cuh makes of a request.
pub struct AxisForm {
    /// D = 128.
    pub is_common: bool,
    /// Query heads of a list by the four: QUARTETS of the kernel.
    pub quartets: usize,
    /// Blocks of a list for which the index has room, and their tiles.
    pub stored: usize,
    pub most_tiles: usize,
    /// Shared memory of a stage of a CTA's tiles, one tile for each warp, and of queries.
    pub stage_bytes: usize,
    pub query_bytes: usize,
    /// Masses are kept beside products.
    pub has_masses: bool,
}

impl AxisForm {
    /// Fails with the reason for a form that the kernels do not have.
    pub fn new(r: &Request, axes: &Axes) -> std::result::Result<AxisForm, &'static str> {
        let (Some(range), heads) = (axes.range.as_ref(), r.queries.heads) else { return Err("the index is not INT4") };
        if !heads.dim.is_multiple_of(64) || heads.dim > 256 {
            return Err("D is none of 64, 128, 192 and 256");
        }
        if heads.group() > MOST_HEADS {
            return Err("a KV head has more than 16 query heads");
        }
        if sharing(r) != 1 {
            return Err("several query positions share a list");
        }
        if ![&axes.axes, range].into_iter().all(|t| has_aligned_rows(t, 16)) {
            return Err("rows of the index are no runs of 16-byte units");
        }
        let is_common = heads.dim == COMMON_DIM;
        let quartets = match heads.group() {
            ..=4 => 1,
            ..=8 if is_common => 2,
            _ => 4,
        };
        // COLUMNS of the kernel.
        let columns = quartets + usize::div_ceil(quartets, 2);
        let gap = if is_common { 0 } else { GAP };
        let stored = r.queries.index.capacity().min(MOST_TOKENS.div_ceil(r.queries.block_size));
        Ok(AxisForm {
            is_common,
            quartets,
            stored,
            most_tiles: stored.div_ceil(BLOCKS),
            stage_bytes: WARPS * BLOCKS * (heads.dim + heads.dim / 4 + 2 * gap),
            query_bytes: heads.dim / 32 * columns * 32 * 8,
            has_masses: false,
        })
    }
}

impl AxisTileParams {
    /// `ctas` of each list, `stages` of each warp's ring of tiles. Queries follow the ring in shared memory.
    pub fn new(r: &Request, axes: &Axes, form: &AxisForm, ctas: usize, stages: usize) -> AxisTileParams {
        let mut select = SelectParams::new(r);
        (select.place.capacity, select.slices) = (form.stored as u32, ctas as u32);
        select.by_slices = Divisor::new(ctas as u32);
        AxisTileParams {
            select,
            axes: Summary::new(Some(&axes.axes)),
            range: Summary::new(axes.range.as_ref()),
            stages: stages as u32,
            most_tiles: form.most_tiles as u32,
            products: 0,
            partials: 0,
            queries: (stages * form.stage_bytes) as u32,
            keys: 0,
        }
    }
}
