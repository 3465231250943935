//! The caches as the kernel of kernels/compact/compact.cu finds them, and its launch.

use super::{Compactor, Request};
use crate::core::allocate::reserved;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{Divisor, kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{View, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Modules, Source, source};
use crate::runtime::{Placed, Session};
use std::sync::Arc;

pub struct Kernels {
    compact: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("compact/compact", compute_80, compute_90)];

    fn find(modules: &Modules) -> Result<Kernels> {
        Ok(Kernels { compact: modules.kernel("compact/compact", "compact")? })
    }
}

kernel_struct! {
    /// A cache. Mirrors Cache of kernels/compact/compact.cu.
    #[derive(Clone, Copy)]
    struct Cache {
        data: *mut u8,
        page: i64,
        row: i64,
        steps: [i64; 3],
        run: Divisor,
        inner: Divisor,
        middle: Divisor,
        units: u32,
        log_unit: u32,
        unused: u32,
    }
}

kernel_struct! {
    /// What a warp moves of each row at a time: the units of a cache's row from one on. Mirrors Tile of kernels/compact/compact.cu.
    #[derive(Clone, Copy)]
    struct Tile {
        cache: u32,
        first: u32,
    }
}

kernel_struct! {
    /// Mirrors CompactParams of kernels/compact/compact.cu.
    struct Params {
        caches: *const Cache,
        tiles: *const Tile,
        page_table: View<2>,
        bases: View<1>,
        path: View<2>,
        accepted: View<1>,
        tile_count: u32,
        base_bytes: u32,
        places: u32,
        pages: u32,
        rows: Divisor,
        capacity: u32,
        ctas: Divisor,
        unused: u32,
    }
}

kernel_constants! {
    /// Warps of a CTA.
    const WARPS: u32 = 4;
    /// Units of a tile: two for each lane.
    const TILE_UNITS: u32 = 64;
}

/// CTAs that a multiprocessor has registers for.
const CTAS_OF_A_MULTIPROCESSOR: u32 = 4;

/// What a compactor keeps on its device.
pub struct Plan {
    caches: Placed,
    tiles: Placed,
    tile_count: u32,
}

impl Plan {
    pub fn new<'t>(session: &Arc<Session>, views: impl ExactSizeIterator<Item = Tensor<'t>>) -> Result<Plan> {
        const PURPOSE: &str = "the plan of a compactor";
        let mut caches = reserved(views.len(), PURPOSE)?;
        let mut tiles = Vec::new();
        for (n, view) in views.enumerate() {
            let cache = Cache::new(&view)?;
            let count = cache.units.div_ceil(TILE_UNITS);
            let needed = count as usize;
            tiles.try_reserve(needed).map_err(|_| Error::out_of_memory(needed * size_of::<Tile>(), PURPOSE))?;
            tiles.extend((0..count).map(|tile| Tile { cache: n as u32, first: tile * TILE_UNITS }));
            caches.push(cache);
        }
        if tiles.len() > i32::MAX as usize {
            return Err(Error::unsupported(format!("{} tiles of a row; CUDA takes up to 2^31 − 1", tiles.len())));
        }
        let place = "a CUDA session";
        let tile_count = tiles.len() as u32;
        // One more, so that there is an address to pass where there are no tiles.
        tiles.push(Tile { cache: 0, first: 0 });
        let (caches, tiles) = (session.place(&caches)?.expect(place), session.place(&tiles)?.expect(place));
        Ok(Plan { caches, tiles, tile_count })
    }
}

impl Cache {
    fn new(t: &Tensor) -> Result<Cache> {
        // The dimensions of a row, from the outermost to the innermost, of which those that follow each other without gaps are one.
        let mut dims: Vec<(usize, i64)> = Vec::new();
        let element = t.dtype.bytes() as i64;
        for d in (2..t.rank()).filter(|&d| t.dim(d) != 1) {
            let (n, step) = (t.dim(d), t.byte_stride(d));
            match dims.last_mut() {
                Some(outer) if outer.1 == step.wrapping_mul(n as i64) => *outer = (outer.0.saturating_mul(n), step),
                _ => dims.push((n, step)),
            }
        }
        let run_bytes = match dims.last() {
            Some(&(n, step)) if step == element => {
                dims.pop();
                n.saturating_mul(element as usize)
            }
            _ => element as usize,
        };
        while dims.len() < 3 {
            dims.insert(0, (1, 0));
        }
        // The strides of single pages and rows are never taken, and may be anything.
        let stride = |d: usize| if t.dim(d) > 1 { t.byte_stride(d) } else { 0 };
        let (page, row) = (stride(0), stride(1));
        let bits = [t.data() as i64, page, row, run_bytes as i64].into_iter().chain(dims.iter().map(|dim| dim.1));
        let log_unit = bits.fold(16, |bits, x| bits | x).trailing_zeros();
        let runs = dims.iter().fold(1, |runs: usize, dim| runs.saturating_mul(dim.0));
        let units = if t.is_empty() { 0 } else { runs.saturating_mul(run_bytes >> log_unit) };
        if units > i32::MAX as usize {
            let text = format!("{}: a row of {units} units; CUDA takes up to 2^31 − 1", t.name());
            return Err(Error::unsupported(text));
        }
        let divisor = |n: usize| Divisor::new(n.clamp(1, i32::MAX as usize) as u32);
        Ok(Cache {
            data: t.data(),
            page,
            row,
            steps: [dims[0].1, dims[1].1, dims[2].1],
            run: divisor(run_bytes >> log_unit),
            inner: divisor(dims[2].0),
            middle: divisor(dims[1].0),
            units: units as u32,
            log_unit,
            unused: 0,
        })
    }
}

pub fn run(enqueue: &Enqueue, compactor: &Compactor, r: &Request) -> Result<()> {
    let plan = compactor.plan.as_ref().expect("a plan of a CUDA session");
    if r.batch() == 0 || plan.tile_count == 0 || r.path.dim(1) == 0 {
        return Ok(());
    }
    // A warp takes more tiles than one where there are more than run at once.
    let at_once = (CTAS_OF_A_MULTIPROCESSOR * enqueue.facts().multiprocessors) as usize;
    let ctas = plan.tile_count.div_ceil(WARPS).min(at_once.div_ceil(r.batch()) as u32);
    let all = r.batch().saturating_mul(ctas as usize);
    if all > i32::MAX as usize {
        return Err(Error::unsupported(format!(
            "{} sequences of {ctas} CTAs; CUDA takes up to 2^31 − 1 CTAs",
            r.batch()
        )));
    }
    let pages = r.page_table.map_or(1, |table| table.dim(1));
    let params = Params {
        caches: plan.caches.address(),
        tiles: plan.tiles.address(),
        page_table: View::optional(&r.page_table, |t| View::new(t, [0, 1])),
        bases: View::new(&r.bases, [0]),
        path: View::new(&r.path, [0, 1]),
        accepted: View::optional(&r.accepted, |t| View::new(t, [0])),
        tile_count: plan.tile_count,
        base_bytes: r.bases.dtype.bytes() as u32,
        places: saturated(r.path.dim(1)),
        pages: saturated(compactor.pages),
        rows: Divisor::new(saturated(compactor.rows).max(1)),
        capacity: saturated(compactor.rows.saturating_mul(pages)),
        ctas: Divisor::new(ctas),
        unused: 0,
    };
    let kernels: &Kernels = enqueue.kernels();
    let grid = Grid { ctas: all as u32, threads: WARPS * 32, kind: enqueue.dependent_kind() };
    // SAFETY: Params is the kernel's struct; the op's caller keeps the tensors and caches valid until the stream has passed. Before it waits
    // the kernel reads nothing but the plan.
    unsafe { enqueue.launch(&kernels.compact, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs =
            [Cache::layout("Cache"), Tile::layout("Tile"), Params::layout("CompactParams"), kernel_constants()];
        layout::check("compact", file!(), &structs);
    }
}
