//! Maps on a device, and launch of the kernels of kernels/forecast.

use super::map::{Map, Matrix, zeros};
use super::{ProjectRequest, Shape};
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
        batch: u32,
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

pub fn project(enqueue: &Enqueue, r: &ProjectRequest, map: &PlacedMap) -> Result<()> {
    let (batch, kernels): (_, &Kernels) = (r.inputs.count(), enqueue.kernels());
    if batch == 0 {
        return Ok(());
    }
    let (heads, dim, pairs) = (r.shape.q_heads, r.shape.head_dim, r.rope.dim / 2);
    let units = (dim - 2 * pairs).div_ceil(2) + pairs;
    // Rows of the batch that a CTA of the first kernel takes.
    let (inputs, together) = if batch <= 16 { (&kernels.inputs_16, 16) } else { (&kernels.inputs_32, 32) };
    let multiplying = batch.div_ceil(together).saturating_mul(map.slices()).saturating_mul(map.rows / ROWS);
    let finishing = match map.rank {
        0 => batch.saturating_mul((heads * units).div_ceil(THREADS as usize)),
        _ => batch.div_ceil(16).saturating_mul((heads * units).div_ceil(OUTPUT_UNITS)),
    };
    let widest = packed_width(r.shape.inputs()).div_ceil(THREADS as usize);
    if multiplying.saturating_add(batch).max(finishing).max(batch.saturating_mul(widest)) > i32::MAX as usize {
        return Err(Error::unsupported(format!("x: {batch} rows; CUDA takes fewer through a map of this size")));
    }

    let mut scratch = Scratch::default();
    let products = scratch.take(&[map.slices(), batch, map.rows, size_of::<f32>()]);
    let factors = scratch.take(&[map.slices(), batch, size_of::<f32>()]);
    let scales = scratch.take(&[batch, size_of::<f64>()]);
    let turns = scratch.take(&[batch, pairs, 2 * size_of::<f32>()]);
    let given = [(Some(&r.inputs.x), map.x), (r.inputs.previous.as_ref(), map.previous)];
    let given = given.map(|(t, slices)| (InputParams::new(t, slices), t.is_some_and(|t| !lies_packed(t))));
    let packed = given.map(|(inputs, packs)| {
        let width = if packs { packed_width(inputs.count as usize) } else { 0 };
        scratch.take(&[batch, width, size_of::<f32>()])
    });
    let base = enqueue.scratch(scratch.bytes)? as usize;
    let at = |part: usize| (base + part) as *mut u8;
    let kind = kind(enqueue);
    let grid = |ctas: usize, threads| Grid { ctas: ctas as u32, threads, kind };
    let mut inputs_of = [given[0].0, given[1].0];
    for ((inputs, (from, packs)), part) in inputs_of.iter_mut().zip(given).zip(packed) {
        if packs {
            let width = packed_width(from.count as usize);
            let params = PackParams { from, to: at(part), batch: saturated(batch), width: width as u32 };
            let grid = grid(batch * width.div_ceil(THREADS as usize), THREADS);
            // SAFETY: as below.
            unsafe { enqueue.launch(&kernels.pack, grid, [(&raw const params).cast()])? };
            *inputs = from.packed(at(part));
        }
    }
    let first = map.memory.address();
    let bias = first.wrapping_add(map.rows * map.columns());
    let (positions, inv_freq) = (Some(&r.positions), r.rope.inv_freq.as_ref());
    let params = ProjectParams {
        x: inputs_of[0],
        previous: inputs_of[1],
        first,
        bias,
        second: bias.wrapping_add(map.rows),
        products: at(products),
        factors: at(factors),
        scales: at(scales),
        turns: at(turns),
        positions: address(positions),
        inv_freq: address(inv_freq),
        q: r.q.data,
        positions_row: step(positions, 0),
        inv_freq_pair: step(inv_freq, 0),
        q_row: r.q.byte_stride(0),
        q_head: r.q.byte_stride(1),
        q_channel: r.q.byte_stride(2),
        log2_theta: r.rope.theta.log2(),
        attention_factor: r.rope.scale,
        batch: saturated(batch),
        rows: map.rows as u32,
        columns: map.columns() as u32,
        rank: map.rank as u32,
        second_row: map.rank.next_multiple_of(CHUNK) as u32,
        q_heads: heads as u32,
        head_dim: dim as u32,
        q_type: element_type(r.q.dtype),
        pairs: pairs as u32,
        interleaved: r.rope.interleaved as u32,
        units: Divisor::new(units as u32),
        multiplying: multiplying as u32,
    };
    let params = [(&raw const params).cast()];
    // SAFETY: ProjectParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed, and
    // the forecast keeps the map. That was ready before any call could name it, and the kernels wait before they touch
    // anything else.
    unsafe {
        enqueue.launch(inputs, grid(multiplying + batch, THREADS), params)?;
        match map.rank {
            0 => enqueue.launch(&kernels.turn, grid(finishing, THREADS), params),
            _ => enqueue.launch(&kernels.outputs, grid(finishing, OUTPUT_THREADS), params),
        }
    }
}

/// Parts of a call's scratch, one after the other.
#[derive(Default)]
struct Scratch {
    bytes: usize,
}

impl Scratch {
    /// Where a part begins whose size is a product.
    fn take(&mut self, size: &[usize]) -> usize {
        const ALIGNMENT: usize = 256;
        let begin = self.bytes;
        let bytes = size.iter().fold(1usize, |bytes, &n| bytes.saturating_mul(n));
        // More than there is stays more than there is.
        self.bytes = begin.saturating_add(bytes).min(isize::MAX as usize).next_multiple_of(ALIGNMENT);
        begin
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
