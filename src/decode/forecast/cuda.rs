//! Maps on a device, and launch of the kernels of kernels/forecast.

use super::map::{Map, Matrix};
use super::{ProjectRequest, Shape};
use crate::core::allocate::zeros;
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::index::{address, element_type, has_aligned_rows, kind, saturated, step};
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Modules, Source, source};
use crate::runtime::{Placed, Session};
use std::sync::Arc;

pub struct Kernels {
    /// For 16 rows of the batch at a time, and for 32.
    inputs_16: Kernel,
    inputs_32: Kernel,
    outputs: Kernel,
    turn: Kernel,
    pack: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("forecast/project", compute_80, compute_90)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("forecast/project", name);
        Ok(Kernels {
            inputs_16: kernel("forecast_inputs_16")?,
            inputs_32: kernel("forecast_inputs_32")?,
            outputs: kernel("forecast_outputs")?,
            turn: kernel("forecast_turn")?,
            pack: kernel("forecast_pack")?,
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
    }
}

const THREADS: u32 = 256;
/// OUTPUT_WARPS of kernels/forecast/project.cu in threads, and units that such a CTA takes.
const OUTPUT_THREADS: u32 = 128;
const OUTPUT_UNITS: usize = 32;
/// CHUNK of kernels/forecast/project.cu.
const CHUNK: usize = 32;
/// Rows of a map that a CTA takes.
const ROWS: usize = 8;

/// How the inputs of one kind are cut: into slices of `share`, zeros after the last.
#[derive(Clone, Copy)]
struct Slices {
    share: usize,
    count: usize,
}

impl Slices {
    /// By the map's shape alone, so that sums do not depend on the batch: a few CTAs for each multiprocessor, of 1024 inputs
    /// or more each.
    fn of(inputs: usize, rows: usize) -> Slices {
        const CTAS: usize = 512;
        const MOST: usize = 8;
        const LEAST: usize = 1024;
        /// A chunk for each warp.
        const ALIGNMENT: usize = 256;
        let most = (CTAS / rows.div_ceil(ROWS)).clamp(1, MOST);
        let share = inputs.div_ceil(most).max(LEAST).min(inputs).next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        Slices { share, count: inputs.div_ceil(share) }
    }

    fn columns(self) -> usize {
        self.share * self.count
    }
}

/// A map as the kernels read it: `first` [rows, columns], `bias` [rows] and, where it is cut, `second` [outputs, second_row].
/// Matrices are padded with zeros.
pub struct PlacedMap {
    memory: Placed,
    x: Slices,
    previous: Slices,
    rows: usize,
    /// 0 where it is whole.
    rank: usize,
}

impl PlacedMap {
    /// None on a CPU session.
    pub fn new(session: &Arc<Session>, shape: &Shape, map: &Map) -> Result<Option<PlacedMap>> {
        if !session.has_device_memory() {
            return Ok(None);
        }
        let (first, second) = match map {
            Map::Whole(weight) => (weight, None),
            Map::Cut { down, up } => (down, Some(up)),
        };
        let remembered = shape.remembered();
        let (x, previous) = (Slices::of(shape.input_dim, first.rows), Slices::of(remembered.len(), first.rows));
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
            row: step(t, 0),
            head: if last == 1 { 0 } else { step(t, 1) },
            channel: step(t, last),
            dim: Divisor::new(t.map_or(1, |t| t.dim(last)) as u32),
            count: t.map_or(0, |t| (1..t.rank()).map(|d| t.dim(d)).product::<usize>()) as u32,
            dtype: t.map_or(0, |t| element_type(t.dtype)),
            share: slices.share as u32,
            slices: slices.count as u32,
        }
    }

    /// The same inputs once they are packed at `to`.
    fn packed(self, to: *mut u8) -> InputParams {
        let width = packed_width(self.count as usize);
        let (row, dim, dtype) =
            ((width * size_of::<f32>()) as i64, Divisor::new(width as u32), element_type(DType::F32));
        InputParams { data: to, row, head: 0, channel: size_of::<f32>() as i64, dim, dtype, ..self }
    }
}

/// Inputs that a lane takes at once.
const LANE_INPUTS: usize = 8;

fn packed_width(inputs: usize) -> usize {
    inputs.next_multiple_of(LANE_INPUTS)
}

/// Whether eight inputs from a multiple of eight on lie side by side, at a multiple of 16 bytes.
fn lies_packed(t: &Tensor) -> bool {
    has_aligned_rows(t, 16) && t.dim(t.rank() - 1).is_multiple_of(LANE_INPUTS)
}

/// How the work is cut, and where the parts of scratch begin.
struct Plan {
    /// CTAs that multiply with the inputs; the other CTAs of that launch take a row each.
    multiplying: usize,
    finishing: usize,
    products: usize,
    factors: usize,
    scales: usize,
    turns: usize,
    /// Of the inputs that have to be packed: x, and the queries at the token before.
    packed: [Option<usize>; 2],
    bytes: usize,
}

/// Rows of the batch that a CTA of the first kernel takes.
fn together(batch: usize) -> usize {
    if batch <= 16 { 16 } else { 32 }
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

impl Plan {
    fn new(r: &ProjectRequest, map: &PlacedMap) -> Result<Plan> {
        let (batch, units) = (r.inputs.count(), r.shape.q_heads * units(r));
        let tiles = map.slices() * (map.rows / ROWS);
        let multiplying = batch.div_ceil(together(batch)).saturating_mul(tiles);
        let finishing = match map.rank {
            0 => batch.saturating_mul(units.div_ceil(THREADS as usize)),
            _ => batch.div_ceil(16).saturating_mul(units.div_ceil(OUTPUT_UNITS)),
        };
        let most =
            multiplying.saturating_add(batch).max(finishing).max(batch.saturating_mul(packing(r.shape.inputs())));
        if most > i32::MAX as usize {
            return Err(Error::unsupported(format!("x: {batch} rows; CUDA takes fewer through a map of this size")));
        }
        let mut scratch = cuda::Parts::default();
        let products = scratch.take(&[map.slices(), batch, map.rows, size_of::<f32>()]);
        let factors = scratch.take(&[map.slices(), batch, size_of::<f32>()]);
        let scales = scratch.take(&[batch, size_of::<f64>()]);
        let turns = scratch.take(&[batch, r.rope.dim, size_of::<f32>()]);
        let packed = [(Some(&r.inputs.x), r.shape.input_dim), (r.inputs.previous.as_ref(), r.shape.outputs())];
        let packed = packed.map(|(t, inputs)| {
            let packs = t.is_some_and(|t| !lies_packed(t));
            packs.then(|| scratch.take(&[batch, packed_width(inputs), size_of::<f32>()]))
        });
        Ok(Plan { multiplying, finishing, products, factors, scales, turns, packed, bytes: scratch.bytes })
    }
}

impl ProjectParams {
    /// `inputs` are x, and the queries at the token before; `base` is where scratch begins.
    fn new(r: &ProjectRequest, map: &PlacedMap, plan: &Plan, [x, previous]: [InputParams; 2], base: usize) -> Self {
        let at = |part: usize| (base + part) as *mut u8;
        let first = map.memory.address();
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
            positions: address(positions),
            inv_freq: address(inv_freq),
            q: r.q.data(),
            positions_row: step(positions, 0),
            inv_freq_pair: step(inv_freq, 0),
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
            q_type: element_type(r.q.dtype),
            pairs: (r.rope.dim / 2) as u32,
            interleaved: r.rope.interleaved as u32,
            units: Divisor::new(units(r) as u32),
            multiplying: plan.multiplying as u32,
        }
    }
}

pub fn project(enqueue: &Enqueue, r: &ProjectRequest, map: &PlacedMap) -> Result<()> {
    let (batch, kernels): (_, &Kernels) = (r.inputs.count(), enqueue.kernels());
    if batch == 0 {
        return Ok(());
    }
    let plan = Plan::new(r, map)?;
    let base = enqueue.scratch(plan.bytes)? as usize;
    let kind = kind(enqueue);
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
    let multiply = if together(batch) == 16 { &kernels.inputs_16 } else { &kernels.inputs_32 };
    // SAFETY: ProjectParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed, and
    // the forecast keeps the map. That was ready before any call could name it, and the kernels wait before they touch
    // anything else.
    unsafe {
        enqueue.launch(multiply, grid(plan.multiplying + batch, THREADS), params)?;
        match map.rank {
            0 => enqueue.launch(&kernels.turn, grid(plan.finishing, THREADS), params),
            _ => enqueue.launch(&kernels.outputs, grid(plan.finishing, OUTPUT_THREADS), params),
        }
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
                let slices = Slices::of(inputs, rows);
                assert!(slices.columns() >= inputs && slices.share.is_multiple_of(256) && slices.count <= 8);
                assert!(
                    slices.count == 0 || slices.share * (slices.count - 1) < inputs,
                    "{inputs} of {rows}: an empty slice"
                );
            }
        }
    }
}
