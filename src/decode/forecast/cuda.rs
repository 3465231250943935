//! Maps on a device, and launch of the kernels of kernels/forecast.

use super::choose::{self, BATCH_ROWS, Projection, Variant};
use super::map::{Map, Matrix};
use super::{ProjectRequest, Shape};
use crate::core::allocate::zeros;
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{address, byte_stride, element_code, has_aligned_rows, saturated};
use crate::runtime::cuda::{self, Cuda, Enqueue, Grid, Kernel, Kind, Modules, Source, source};
use crate::runtime::{Placed, Session};
use std::sync::Arc;

pub struct Kernels {
    pack: Kernel,
    /// For maps of low rank: inputs of 16 bits alone, and of any width.
    inner_16: Kernel,
    inner_32: Kernel,
    sums: Kernel,
    /// In place of inner, for up to BATCH_ROWS rows: clusters add slices up. And whether clusters of 1, 2, 4, 8 and 16 CTAs can run.
    joined_16: Kernel,
    joined_32: Kernel,
    runs_clusters: [bool; 5],
    /// For 32 channels a CTA, slices added up before or not; and for 64.
    outputs_32: Kernel,
    outputs_adding: Kernel,
    outputs_64: Kernel,
    /// For maps of full rank: 16 rows of the batch at a time, and 32.
    inputs_16: Kernel,
    inputs_32: Kernel,
    turn: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] =
        &[source!("forecast/full_rank", compute_80, compute_90), source!("forecast/low_rank", compute_80, compute_90)];
    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let full_rank = |name| modules.kernel("forecast/full_rank", name);
        let low_rank = |name| modules.kernel("forecast/low_rank", name);
        let (joined_16, joined_32) = (low_rank("forecast_joined_16")?, low_rank("forecast_joined_32")?);
        let has_clusters = modules.facts().launches_dependents();
        if has_clusters {
            joined_16.allow_large_clusters()?;
            joined_32.allow_large_clusters()?;
        }
        let runs = |size| [&joined_16, &joined_32].iter().all(|kernel| kernel.active_clusters(size, THREADS) > 0);
        let runs_clusters = [1, 2, 4, 8, 16].map(|size| size == 1 || has_clusters && runs(size));
        Ok(Kernels {
            pack: full_rank("forecast_pack")?,
            inner_16: low_rank("forecast_inner_16")?,
            inner_32: low_rank("forecast_inner_32")?,
            sums: low_rank("forecast_sums")?,
            joined_16,
            joined_32,
            runs_clusters,
            outputs_32: low_rank("forecast_outputs_32")?,
            outputs_adding: low_rank("forecast_outputs_adding")?,
            outputs_64: low_rank("forecast_outputs_64")?,
            inputs_16: full_rank("forecast_inputs_16")?,
            inputs_32: full_rank("forecast_inputs_32")?,
            turn: full_rank("forecast_turn")?,
        })
    }
}

kernel_struct! {
    /// Mirrors Inputs of kernels/forecast/params.cuh. Strides are in bytes.
    #[derive(Clone, Copy)]
    struct InputParams {
        data: *const u8,
        row: i64,
        head: i64,
        channel: i64,
        dim: Divisor,
        count: u32,
        dtype: u32,
        share: u32,
        slices: u32,
    }
}

kernel_struct! {
    /// Mirrors PackParams of kernels/forecast/params.cuh.
    struct PackParams {
        from: InputParams,
        to: *mut u8,
        width: u32,
    }
}

kernel_struct! {
    /// Mirrors ProjectParams of kernels/forecast/params.cuh.
    struct ProjectParams {
        x: InputParams,
        previous: InputParams,
        first: *const f32,
        bias: *const f32,
        second: *const f32,
        products: *mut u8,
        factors: *mut u8,
        scales: *mut u8,
        turns: *mut u8,
        sums: *mut u8,
        positions: *const u8,
        inv_freq: *const u8,
        q: *mut u8,
        positions_row: i64,
        inv_freq_pair: i64,
        q_row: i64,
        q_head: i64,
        q_channel: i64,
        log2_theta: f64,
        attention_factor: f64,
        batch: u32,
        rows: u32,
        columns: u32,
        rank: u32,
        second_row: u32,
        q_heads: u32,
        head_dim: u32,
        q_type: u32,
        pairs: u32,
        interleaved: u32,
        units: Divisor,
        multiplying: u32,
        inner_groups: u32,
        output_groups: u32,
        root_count: f32,
    }
}

const THREADS: u32 = 256;
/// CHUNK of kernels/forecast/products.cuh.
const CHUNK: usize = 32;
/// Rows of a map that a CTA takes.
const ROWS: usize = 8;
/// Columns of a row that a thread of forecast_sums takes.
const SUM_COLUMNS: usize = 4;

/// How the inputs of one kind are split: into slices of `share` inputs, with zeros after the last input.
#[derive(Clone, Copy)]
struct Slices {
    share: usize,
    count: usize,
}

/// MOST_SLICES of kernels/forecast/low_rank.cu.
const MOST_SLICES: usize = 8;

/// Slices follow from the map's shape alone, so that sums do not depend on the batch.
impl Slices {
    /// Slices for a map of full rank: a few CTAs for each multiprocessor, of 1024 inputs or more each.
    fn of_full_rank(inputs: usize, rows: usize) -> Slices {
        const CTAS: usize = 512;
        const LEAST: usize = 1024;
        /// A chunk for each warp.
        const ALIGNMENT: usize = 256;
        let most = (CTAS / rows.div_ceil(ROWS)).clamp(1, MOST_SLICES);
        let share = inputs.div_ceil(most).max(LEAST).min(inputs).next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        Slices { share, count: inputs.div_ceil(share) }
    }

    /// Slices for a map of low rank: whole steps of all warps of a CTA, of STEP inputs each in kernels/forecast/low_rank.cu.
    fn of_low_rank(inputs: usize) -> Slices {
        const STEP: usize = 512;
        let share = inputs.div_ceil(MOST_SLICES).next_multiple_of(STEP).max(STEP);
        Slices { share, count: inputs.div_ceil(share) }
    }

    fn columns(self) -> usize {
        self.share * self.count
    }
}

/// A map as the kernels read it: `first` [rows, columns], `bias` [rows] and, where its rank is low, `second` [outputs, second_row].
/// Matrices are padded with zeros.
pub struct PlacedMap {
    memory: Placed,
    x: Slices,
    previous: Slices,
    rows: usize,
    /// 0 where it is of full rank.
    rank: usize,
}

impl PlacedMap {
    /// None on a CPU session.
    pub fn new(session: &Arc<Session>, shape: &Shape, map: &Map) -> Result<Option<PlacedMap>> {
        if !session.has_device_memory() {
            return Ok(None);
        }
        let (first, second) = match map {
            Map::FullRank(weight) => (weight, None),
            Map::LowRank { down, up } => (down, Some(up)),
        };
        let remembered = shape.remembered();
        let slices = |inputs| match second {
            Some(_) => Slices::of_low_rank(inputs),
            None => Slices::of_full_rank(inputs, first.rows),
        };
        let (x, previous) = (slices(shape.input_dim), slices(remembered.len()));
        let (rows, columns) = (first.rows.next_multiple_of(ROWS), x.columns() + previous.columns());
        let second_row = first.rows.next_multiple_of(CHUNK);
        let second_values = second.map_or(0, |up| up.rows.saturating_mul(second_row));
        let size = rows.saturating_mul(columns + 1).saturating_add(second_values);
        let mut values: Vec<f32> = zeros(size, "a forecast's map on its way to the device")?;
        let (weights, rest) = values.split_at_mut(rows * columns);
        let (bias, second_rows) = rest.split_at_mut(rows);
        for (i, row) in weights.chunks_mut(columns).take(first.rows).enumerate() {
            let from = first.row(i);
            row[..shape.input_dim].copy_from_slice(&from[..shape.input_dim]);
            row[x.columns()..][..remembered.len()].copy_from_slice(&from[remembered.clone()]);
            bias[i] = from[remembered.end];
        }
        if let Some(up) = second {
            copy_rows(up, second_rows, second_row);
        }
        let rank = second.map_or(0, |_| first.rows);
        Ok(session.place(&values)?.map(|memory| PlacedMap { memory, x, previous, rows, rank }))
    }

    fn columns(&self) -> usize {
        self.x.columns() + self.previous.columns()
    }

    fn slices(&self) -> usize {
        self.x.count + self.previous.count
    }
}

fn copy_rows(from: &Matrix, to: &mut [f32], stride: usize) {
    for (i, row) in to.chunks_mut(stride).enumerate() {
        row[..from.columns].copy_from_slice(from.row(i));
    }
}

impl InputParams {
    /// x, or the queries at the token before, if there are any.
    fn new(t: Option<&Tensor>, slices: Slices) -> InputParams {
        let last = t.map_or(1, |t| t.rank() - 1);
        InputParams {
            data: address(t),
            row: byte_stride(t, 0),
            head: if last == 1 { 0 } else { byte_stride(t, 1) },
            channel: byte_stride(t, last),
            dim: Divisor::new(t.map_or(1, |t| t.dim(last)) as u32),
            count: t.map_or(0, |t| (1..t.rank()).map(|d| t.dim(d)).product::<usize>()) as u32,
            dtype: t.map_or(0, |t| element_code(t.dtype)),
            share: slices.share as u32,
            slices: slices.count as u32,
        }
    }

    /// The same inputs once they are packed at `to`.
    fn packed(self, to: *mut u8) -> InputParams {
        let width = packed_width(self.count as usize);
        let (row, dim, dtype) =
            ((width * size_of::<f32>()) as i64, Divisor::new(width as u32), element_code(DType::F32));
        InputParams { data: to, row, head: 0, channel: size_of::<f32>() as i64, dim, dtype, ..self }
    }
}

/// Inputs that a lane takes at once.
const LANE_INPUTS: usize = 8;

fn packed_width(inputs: usize) -> usize {
    inputs.next_multiple_of(LANE_INPUTS)
}

/// Whether any eight inputs from a multiple of eight on are adjacent and begin at a multiple of 16 bytes.
fn lies_packed(t: &Tensor) -> bool {
    has_aligned_rows(t, 16) && t.dim(t.rank() - 1).is_multiple_of(LANE_INPUTS)
}

/// How the work is split, and where the parts of scratch begin.
struct Plan {
    variant: Variant,
    /// CTAs that multiply with the inputs, and the others of that launch, which prepare rows.
    multiplying: usize,
    preparing: usize,
    /// CTAs of a cluster that adds slices up, or of a launch of its own; 0 where there is none.
    cluster: usize,
    adding: usize,
    finishing: usize,
    inner_groups: usize,
    output_groups: usize,
    products: usize,
    factors: usize,
    scales: usize,
    turns: usize,
    sums: usize,
    /// Where the inputs that have to be packed are packed: x, and the queries at the token before.
    packed: [Option<usize>; 2],
    bytes: usize,
}

/// Rows of the batch that a CTA takes which multiplies with the inputs of a map of full rank.
fn together(batch: usize) -> usize {
    if batch <= BATCH_ROWS { BATCH_ROWS } else { 2 * BATCH_ROWS }
}

/// Pairs of a head's channels that rotate, and the channels after them, two by two.
fn units(r: &ProjectRequest) -> usize {
    let pairs = r.rope.dim / 2;
    pairs + (r.shape.head_dim - 2 * pairs).div_ceil(2)
}

/// CTAs that pack a row of inputs.
fn packing(inputs: usize) -> usize {
    packed_width(inputs).div_ceil(THREADS as usize)
}

/// CTAs of each kind, by the name of their part in [`Plan`].
#[derive(Debug, PartialEq)]
struct Ctas {
    multiplying: usize,
    preparing: usize,
    cluster: usize,
    adding: usize,
    finishing: usize,
    inner_groups: usize,
    output_groups: usize,
}

impl Ctas {
    /// CTAs for a map of low rank. `units` are all pairs of channels of a row, `pairs` the pairs of a head that rotate.
    fn of_low_rank(variant: Variant, batch: usize, slices: usize, rows: usize, units: usize, pairs: usize) -> Ctas {
        /// Two for each of some 128 multiprocessors; what groups are left, they take one after the other.
        const AT_ONCE: usize = 256;
        let groups = batch.div_ceil(BATCH_ROWS);
        let cluster = if variant == Variant::Cluster { choose::cluster(slices) } else { 0 };
        let tiles = (rows / ROWS).saturating_mul(if cluster > 0 { cluster } else { slices });
        let finishers = units.div_ceil(if groups > 1 { 32 } else { 16 });
        let at_once = |ctas: usize| (AT_ONCE / ctas).clamp(1, groups);
        let (inner_groups, output_groups) = (at_once(tiles), at_once(finishers));
        // Slices of one group are read by every CTA, as fast as it can. More are added up first, and read by half as many.
        let sums = if variant == Variant::Sums { batch.saturating_mul(rows / SUM_COLUMNS) } else { 0 };
        // CTAs of a cluster turn pairs while its first one waits.
        let turned = if cluster > 0 { 0 } else { batch.saturating_mul(pairs) };
        Ctas {
            multiplying: tiles.saturating_mul(inner_groups),
            preparing: turned.div_ceil(THREADS as usize),
            cluster,
            adding: sums.div_ceil(THREADS as usize),
            finishing: finishers.saturating_mul(output_groups),
            inner_groups,
            output_groups,
        }
    }

    fn of_full_rank(batch: usize, tiles: usize, units: usize) -> Ctas {
        Ctas {
            multiplying: batch.div_ceil(together(batch)).saturating_mul(tiles),
            preparing: batch,
            cluster: 0,
            adding: 0,
            finishing: batch.saturating_mul(units.div_ceil(THREADS as usize)),
            inner_groups: 0,
            output_groups: 0,
        }
    }
}

impl Plan {
    fn new(r: &ProjectRequest, map: &PlacedMap, variant: Variant) -> Result<Plan> {
        let (batch, pairs, units) = (r.inputs.count(), r.rope.dim / 2, r.shape.q_heads * units(r));
        let ctas = match variant {
            Variant::FullRank => Ctas::of_full_rank(batch, map.slices() * (map.rows / ROWS), units),
            _ => Ctas::of_low_rank(variant, batch, map.slices(), map.rows, units, pairs),
        };
        let Ctas { multiplying, preparing, cluster, adding, finishing, inner_groups, output_groups } = ctas;
        let packing = batch.saturating_mul(packing(r.shape.inputs()));
        let most = multiplying.saturating_add(preparing).max(adding).max(finishing).max(packing);
        let most = most.max(batch.saturating_mul(pairs));
        if most > i32::MAX as usize {
            return Err(Error::unsupported(format!("x: {batch} rows; CUDA takes fewer through a map of this size")));
        }
        let mut scratch = cuda::Parts::default();
        let slices = if cluster > 0 { 0 } else { map.slices() };
        let products = scratch.take(&[slices, batch, map.rows, size_of::<f32>()]);
        let factors = scratch.take(&[slices, batch, size_of::<[f32; 2]>()]);
        let scales = scratch.take(&[batch, size_of::<f64>()]);
        let turns = scratch.take(&[batch, r.rope.dim, size_of::<f32>()]);
        let sums = scratch.take(&[if map.rank > 0 { batch } else { 0 }, map.rows, size_of::<f32>()]);
        let packed = [(Some(&r.inputs.x), r.shape.input_dim), (r.inputs.previous.as_ref(), r.shape.outputs())];
        let packed = packed.map(|(t, inputs)| {
            let packs = t.is_some_and(|t| !lies_packed(t));
            packs.then(|| scratch.take(&[batch, packed_width(inputs), size_of::<f32>()]))
        });
        Ok(Plan {
            variant,
            multiplying,
            preparing,
            cluster,
            adding,
            finishing,
            inner_groups,
            output_groups,
            products,
            factors,
            scales,
            turns,
            sums,
            packed,
            bytes: scratch.bytes,
        })
    }
}

impl ProjectParams {
    /// `inputs` are x, and the queries at the token before; `base` is where scratch begins.
    fn new(r: &ProjectRequest, map: &PlacedMap, plan: &Plan, [x, previous]: [InputParams; 2], base: usize) -> Self {
        let at = |part: usize| (base + part) as *mut u8;
        let first: *const f32 = map.memory.address();
        let bias = first.wrapping_add(map.rows * map.columns());
        let (positions, inv_freq) = (Some(&r.positions), r.rope.inv_freq.as_ref());
        ProjectParams {
            x,
            previous,
            first,
            bias,
            second: bias.wrapping_add(map.rows),
            products: at(plan.products),
            factors: at(plan.factors),
            scales: at(plan.scales),
            turns: at(plan.turns),
            sums: at(plan.sums),
            positions: address(positions),
            inv_freq: address(inv_freq),
            q: r.q.data(),
            positions_row: byte_stride(positions, 0),
            inv_freq_pair: byte_stride(inv_freq, 0),
            q_row: r.q.byte_stride(0),
            q_head: r.q.byte_stride(1),
            q_channel: r.q.byte_stride(2),
            log2_theta: r.rope.theta.log2(),
            attention_factor: r.rope.scale,
            batch: saturated(r.inputs.count()),
            rows: map.rows as u32,
            columns: map.columns() as u32,
            rank: map.rank as u32,
            second_row: map.rank.next_multiple_of(CHUNK) as u32,
            q_heads: r.shape.q_heads as u32,
            head_dim: r.shape.head_dim as u32,
            q_type: element_code(r.q.dtype),
            pairs: (r.rope.dim / 2) as u32,
            interleaved: r.rope.interleaved as u32,
            units: Divisor::new(units(r) as u32),
            multiplying: plan.multiplying as u32,
            inner_groups: plan.inner_groups as u32,
            output_groups: plan.output_groups as u32,
            root_count: (r.shape.input_dim as f64).sqrt() as f32,
        }
    }
}

fn variant(kernels: &Kernels, forced: Option<Variant>, r: &ProjectRequest, map: &PlacedMap) -> Result<Variant> {
    let projection = Projection {
        is_full_rank: map.rank == 0,
        batch: r.inputs.count(),
        slices: map.slices(),
        runs_clusters: kernels.runs_clusters,
    };
    variants::choose(forced, |variant| choose::fit(variant, projection))
}

/// Bytes of scratch that a projection takes.
pub fn scratch(cuda: &Cuda, r: &ProjectRequest, map: &PlacedMap) -> Result<usize> {
    if r.inputs.count() == 0 {
        return Ok(0);
    }
    Ok(Plan::new(r, map, variant(cuda.kernels(), cuda.forced(), r, map)?)?.bytes)
}

pub fn project(enqueue: &Enqueue, r: &ProjectRequest, map: &PlacedMap) -> Result<()> {
    let (batch, kernels): (_, &Kernels) = (r.inputs.count(), enqueue.kernels());
    if batch == 0 {
        return Ok(());
    }
    let variant = variant(kernels, enqueue.forced(), r, map)?;
    enqueue.ran(variant);
    let plan = Plan::new(r, map, variant)?;
    let base = enqueue.scratch(plan.bytes)? as usize;
    let kind = enqueue.dependent_kind();
    let grid = |ctas: usize, threads| Grid { ctas: ctas as u32, threads, kind };
    let mut inputs =
        [InputParams::new(Some(&r.inputs.x), map.x), InputParams::new(r.inputs.previous.as_ref(), map.previous)];
    for (inputs, part) in inputs.iter_mut().zip(plan.packed) {
        let Some(part) = part else { continue };
        let (to, count) = ((base + part) as *mut u8, inputs.count as usize);
        let params = PackParams { from: *inputs, to, width: packed_width(count) as u32 };
        // SAFETY: PackParams is the kernel's struct; otherwise as below.
        unsafe { enqueue.launch(&kernels.pack, grid(batch * packing(count), THREADS), [(&raw const params).cast()])? };
        *inputs = inputs.packed(to);
    }
    let params = ProjectParams::new(r, map, &plan, inputs, base);
    let params = [(&raw const params).cast()];
    let multiply = grid(plan.multiplying + plan.preparing, THREADS);
    // SAFETY: ProjectParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed, and
    // the forecast keeps the map. That was ready before any call could name it, and the kernels wait before they touch
    // anything else.
    unsafe {
        if plan.variant == Variant::FullRank {
            let kernel = if together(batch) == BATCH_ROWS { &kernels.inputs_16 } else { &kernels.inputs_32 };
            enqueue.launch(kernel, multiply, params)?;
            return enqueue.launch(&kernels.turn, grid(plan.finishing, THREADS), params);
        }
        let is_wide = inputs.iter().any(|inputs| inputs.slices > 0 && inputs.dtype == element_code(DType::F32));
        if plan.variant == Variant::Cluster {
            let kind = if plan.cluster == 1 { kind } else { Kind::DependentClusters(plan.cluster as u32) };
            let kernel = if is_wide { &kernels.joined_32 } else { &kernels.joined_16 };
            enqueue.launch(kernel, Grid { kind, ..multiply }, params)?;
        } else {
            enqueue.launch(if is_wide { &kernels.inner_32 } else { &kernels.inner_16 }, multiply, params)?;
        }
        if plan.adding > 0 {
            enqueue.launch(&kernels.sums, grid(plan.adding, THREADS), params)?;
        }
        let kernel = match plan.variant {
            Variant::Slices => &kernels.outputs_adding,
            Variant::Sums => &kernels.outputs_64,
            Variant::Cluster | Variant::FullRank => &kernels.outputs_32,
        };
        enqueue.launch(kernel, grid(plan.finishing, THREADS), params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs =
            [InputParams::layout("Inputs"), PackParams::layout("PackParams"), ProjectParams::layout("ProjectParams")];
        layout::check("forecast", file!(), &structs);
    }

    #[test]
    fn slices_hold_all_inputs_and_have_a_chunk_for_each_warp() {
        for inputs in [0, 1, 63, 256, 1023, 4096, 5000, 1 << 20] {
            for rows in [1, 8, 128, 4096, 1 << 20] {
                for (slices, step) in [(Slices::of_full_rank(inputs, rows), 256), (Slices::of_low_rank(inputs), 512)] {
                    assert!(
                        slices.columns() >= inputs && slices.share.is_multiple_of(step) && slices.count <= MOST_SLICES
                    );
                    assert!(
                        slices.count == 0 || slices.share * (slices.count - 1) < inputs,
                        "{inputs} of {rows}: an empty slice"
                    );
                }
            }
        }
    }

    #[test]
    fn ctas_take_every_row_of_a_batch_through_a_map_of_low_rank() {
        // 4096 → 4096 of rank 128, RoPE on all of 32 heads of 128 channels: 8 slices of 16 tiles, 2048 pairs.
        for (batch, multiplying, preparing, cluster, adding, finishing) in
            [(1, 128, 0, 8, 0, 128), (16, 128, 0, 8, 0, 128), (17, 256, 5, 0, 3, 128), (256, 256, 64, 0, 32, 256)]
        {
            let variant = if batch > BATCH_ROWS { Variant::Sums } else { Variant::Cluster };
            let ctas = Ctas::of_low_rank(variant, batch, 8, 128, 2048, 64);
            let groups = (ctas.inner_groups, ctas.output_groups);
            assert_eq!((ctas.multiplying, ctas.cluster), (multiplying, cluster), "{batch}: {groups:?}");
            assert_eq!(ctas.preparing, preparing, "{batch}: {groups:?}");
            assert_eq!((ctas.adding, ctas.finishing), (adding, finishing), "{batch}: {groups:?}");
        }
        let many = Ctas::of_low_rank(Variant::Sums, 40, 8, 4096, 100, 0);
        assert_eq!((many.inner_groups, many.preparing, many.adding), (1, 0, 160));
        let [five, without] =
            [Variant::Cluster, Variant::Slices].map(|variant| Ctas::of_low_rank(variant, 1, 5, 128, 2048, 64));
        assert_eq!((five.multiplying, five.cluster, five.adding), (128, 8, 0));
        assert_eq!((without.multiplying, without.preparing, without.cluster, without.adding), (80, 1, 0, 0));
    }
}
