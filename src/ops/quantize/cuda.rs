//! Launches of the kernels of kernels/quantize.

use super::block::rotation_factor;
use super::{Layer, MOST_LAYERS, Request, WeightsRequest, rows};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::int4::{Int4Kv, MAX_BLOCK, MAX_CODED};
use crate::ops::views::MAX_DIM;
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{View, address, element_code, has_aligned_rows, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

pub struct Kernels {
    quantize: Kernel,
    /// For rows of 64 and of 128 channels of 16 bits.
    rows: [Kernel; 2],
    weights: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("quantize/quantize", compute_80), source!("quantize/rows", compute_80)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("quantize/quantize", name);
        let of_rows = |name| {
            let kernel = modules.kernel("quantize/rows", name)?;
            kernel.allow_shared(rows::most_shared(modules.facts()))?;
            Ok(kernel)
        };
        Ok(Kernels {
            quantize: kernel("kv_quantize")?,
            rows: [of_rows("kv_quantize_64")?, of_rows("kv_quantize_128")?],
            weights: kernel("kv_weights")?,
        })
    }
}

kernel_struct! {
    /// Mirrors LayerData of kernels/quantize/params.cuh.
    #[derive(Clone, Copy)]
    struct LayerData {
        k: *mut u8,
        v: *mut u8,
        codes_k: *mut u8,
        codes_v: *mut u8,
        k_scale: *mut u8,
        v_scale: *mut u8,
        means: *mut u8,
        weights: *mut u8,
    }
}

kernel_struct! {
    /// Mirrors QuantizeParams of kernels/quantize/params.cuh.
    struct QuantizeParams {
        table: View<2>,
        coded_table: View<2>,
        mean_table: View<2>,
        seq_lens: View<1>,
        begin: View<1>,
        coded_lens: View<1>,
        k: [i64; 4],
        v: [i64; 4],
        codes_k: [i64; 4],
        codes_v: [i64; 4],
        k_scale: [i64; 3],
        v_scale: [i64; 3],
        means: [i64; 4],
        weights: [i64; 2],
        pages: u32,
        page_size: u32,
        coded_pages: u32,
        coded_page_size: u32,
        mean_pages: u32,
        mean_rows: u32,
        mean_columns: u32,
        capacity: u32,
        batch: u32,
        heads: u32,
        dim: u32,
        value_dim: u32,
        block: u32,
        exact: u32,
        dtype: u32,
        mean_type: u32,
        slices: u32,
        factor: f32,
        value_factor: f32,
        unused: u32,
        layer: [LayerData; MOST_LAYERS],
    }
}

kernel_struct! {
    /// Mirrors Sample of kernels/quantize/params.cuh.
    struct Sample {
        data: *const u8,
        step: [i64; 3],
    }
}

kernel_struct! {
    /// Mirrors WeightsParams of kernels/quantize/params.cuh.
    struct WeightsParams {
        q: Sample,
        k: Sample,
        weights: *mut u8,
        weights_step: [i64; 2],
        q_tokens: u32,
        k_tokens: u32,
        group: u32,
        dim: u32,
        block: u32,
        dtype: u32,
        asked: f32,
        tokens: f32,
    }
}

kernel_constants! {
    const CHANNELS: usize = MAX_CODED => "MOST_CHANNELS";
    const WEIGHTS: usize = MAX_DIM => "MOST_WEIGHTS";
    const TOKENS: usize = MAX_BLOCK => "MOST_TOKENS";
    const LAYERS: usize = MOST_LAYERS => "MOST_LAYERS";
}

const THREADS: u32 = 128;
/// CTAs that a multiprocessor runs at a time.
const RESIDENT: usize = 8;

/// Whether kernels/quantize/rows.cu can read and write the layer's rows.
fn has_rows_of_16_bytes(layer: &Layer) -> bool {
    let Layer { kv, int4 } = layer;
    [&kv.k, &kv.v, &int4.k, &int4.v].into_iter().all(|t| has_aligned_rows(t, 16))
}

impl LayerData {
    const NONE: LayerData = {
        let null = std::ptr::null_mut();
        LayerData {
            k: null,
            v: null,
            codes_k: null,
            codes_v: null,
            k_scale: null,
            v_scale: null,
            means: null,
            weights: null,
        }
    };

    fn new(layer: &Layer) -> LayerData {
        let Int4Kv { k, v, k_scale, v_scale, means, weights, .. } = &layer.int4;
        LayerData {
            k: layer.kv.k.data(),
            v: layer.kv.v.data(),
            codes_k: k.data(),
            codes_v: v.data(),
            k_scale: k_scale.data(),
            v_scale: v_scale.data(),
            means: means.data(),
            weights: address(weights.as_ref()),
        }
    }
}

fn steps<const N: usize>(t: &Tensor) -> [i64; N] {
    std::array::from_fn(|d| t.byte_stride(d))
}

pub fn run(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let Layer { kv, int4 } = &r.first;
    let (batch, layers) = (kv.pages.batch(), r.layers());
    // Tensors without an element may have any number of heads.
    let heads = if kv.k.is_empty() || int4.k.is_empty() { 1 } else { kv.k.dim(2) };
    if batch == 0 {
        return Ok(());
    }
    let capacity = kv.pages.capacity().min(int4.pages.capacity());
    let blocks = capacity / int4.block_size;
    let lists = layers.saturating_mul(batch).saturating_mul(heads);
    let kernels: &Kernels = enqueue.kernels();
    let (mut data, mut has_rows) = ([LayerData::NONE; MOST_LAYERS], true);
    for (n, data) in data.iter_mut().enumerate().take(layers) {
        let is_aligned;
        // SAFETY: the caller of the op keeps the structs valid.
        (*data, is_aligned) = unsafe { r.with_layer(n, |layer| (LayerData::new(layer), has_rows_of_16_bytes(layer)))? };
        has_rows &= is_aligned;
    }
    let (dims, dtype) = ([kv.k.dim(3), kv.v.dim(3)], element_code(kv.k.dtype));
    let (kernel, threads, resident, parts) = match rows::find(enqueue.facts(), dims, dtype, int4.block_size) {
        Some(l) if has_rows => (kernels.rows[l.number].sharing(l.shared), l.threads, l.resident, 2),
        _ => (kernels.quantize, THREADS, RESIDENT, 1),
    };
    // No CTA waits for another to end: the last ones would take as long as all.
    let slices =
        (resident * enqueue.facts().multiprocessors as usize / lists.saturating_mul(parts).max(1)).min(blocks).max(1);
    let Some(ctas) = lists.saturating_mul(parts).checked_mul(slices).and_then(|n| i32::try_from(n).ok()) else {
        return Err(Error::unsupported(format!(
            "seq_lens: {batch} sequences of {heads} KV heads in {layers} layers; CUDA takes up to 2^31 − 1 together"
        )));
    };
    let table = |t: &Option<Tensor>| View::optional(t, |t| View::new(t, [0, 1]));
    let params = QuantizeParams {
        table: table(&kv.pages.table),
        coded_table: table(&int4.pages.table),
        mean_table: table(&int4.mean_table),
        seq_lens: View::new(&kv.pages.seq_lens, [0]),
        begin: View::optional(&r.begin, |t| View::new(t, [0])),
        coded_lens: View::new(&int4.pages.seq_lens, [0]),
        k: steps(&kv.k),
        v: steps(&kv.v),
        codes_k: steps(&int4.k),
        codes_v: steps(&int4.v),
        k_scale: steps(&int4.k_scale),
        v_scale: steps(&int4.v_scale),
        means: steps(&int4.means),
        weights: int4.weights.as_ref().map_or([0; 2], steps),
        pages: saturated(kv.pages.count),
        page_size: saturated(kv.pages.size).max(1),
        coded_pages: saturated(int4.pages.count),
        coded_page_size: saturated(int4.pages.size).max(1),
        mean_pages: saturated(int4.means.dim(0)),
        mean_rows: saturated(int4.means.dim(1)),
        mean_columns: int4.mean_table.map_or(1, |table| saturated(table.dim(1))),
        capacity: saturated(capacity),
        batch: batch as u32,
        heads: heads as u32,
        dim: kv.k.dim(3) as u32,
        value_dim: kv.v.dim(3) as u32,
        block: int4.block_size as u32,
        exact: saturated(int4.exact_tokens),
        dtype,
        mean_type: element_code(int4.means.dtype),
        slices: slices as u32,
        factor: rotation_factor(kv.k.dim(3)),
        value_factor: rotation_factor(kv.v.dim(3)),
        unused: 0,
        layer: data,
    };
    debug_assert!(int4.block_size <= TOKENS && kv.k.dim(3).max(kv.v.dim(3)) <= CHANNELS && layers <= LAYERS);
    let grid = Grid { ctas: ctas as u32, threads, kind: Kind::Plain };
    // SAFETY: QuantizeParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(&kernel, grid, [(&raw const params).cast()]) }
}

pub fn weights(enqueue: &Enqueue, r: &WeightsRequest) -> Result<()> {
    if r.q.dim(0).max(r.k.dim(0)) > i32::MAX as usize {
        return Err(Error::unsupported("q, k: CUDA takes up to 2^31 − 1 tokens"));
    }
    debug_assert!(r.heads.dim <= WEIGHTS);
    let sample = |t: &Tensor| Sample { data: t.data(), step: steps(t) };
    let params = WeightsParams {
        q: sample(&r.q),
        k: sample(&r.k),
        weights: r.weights.data(),
        weights_step: steps(&r.weights),
        q_tokens: r.q.dim(0) as u32,
        k_tokens: r.k.dim(0) as u32,
        // A sample without tokens may have any number of heads.
        group: if r.q.dim(0) == 0 { 0 } else { r.heads.group() as u32 },
        dim: r.heads.dim as u32,
        block: saturated(r.block_size),
        dtype: element_code(r.q.dtype),
        asked: (r.q.dim(0) * r.heads.group()) as f32,
        tokens: r.k.dim(0) as f32,
    };
    let kernels: &Kernels = enqueue.kernels();
    let grid = Grid { ctas: r.heads.kv as u32, threads: THREADS, kind: Kind::Plain };
    // SAFETY: WeightsParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(&kernels.weights, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::dtype::Float;
    use crate::core::float8::F8E4M3;
    use crate::core::random::Random;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            LayerData::layout("LayerData"),
            QuantizeParams::layout("QuantizeParams"),
            Sample::layout("Sample"),
            WeightsParams::layout("WeightsParams"),
            kernel_constants(),
        ];
        layout::check("quantize", file!(), &structs);
    }

    /// The floor of a quotient by a scale as kernels/quantize/rows.cuh finds it, for every scale and all numbers near the edges of a code.
    #[test]
    fn products_have_the_floor_of_the_quotient() {
        for scale in (1..0x7f).map(|bits| F8E4M3(bits).to_f32()) {
            let nearest = 1.0 / scale;
            let is_above = (-nearest).mul_add(scale, 1.0) < 0.0;
            let reciprocal = f32::from_bits(nearest.to_bits() - is_above as u32);
            let rest = (-reciprocal).mul_add(scale, 1.0) * reciprocal;
            let edges = (1..=8).map(|n| (n as f32 * scale).to_bits()).flat_map(|edge| edge - 40..edge + 40);
            let subnormal = (1..2000).chain((2000..f32::MIN_POSITIVE.to_bits()).step_by(9999));
            for y in edges.chain(subnormal).map(f32::from_bits).flat_map(|y| [y, -y]) {
                let product = y.mul_add(reciprocal, y * rest);
                assert_eq!(product.floor(), (y / scale).floor(), "{y:e} over {scale}");
            }
        }
    }

    /// The quotient of moderate numbers as kernels/quantize/rows.cuh finds it, for divisors of every kind and numbers near the edges of rounding.
    #[test]
    fn corrected_products_by_a_reciprocal_are_the_quotient() {
        let mut random = Random::new(1);
        for n in 0..400_000u32 {
            let exponent = 97 + random.next_u32() % 61; // from 2^-30 to 2^30
            let mantissa = [random.next_u32() & 0x7fffff, 0x7fffff - n % 64, n % 64, 1 << (n % 23)][n as usize % 4];
            let by = f32::from_bits(exponent << 23 | mantissa);
            // A number whose quotient is near one that is halfway between two.
            let half =
                f64::from(f32::from_bits(0x3f800000 | random.next_u32() & 0x7fffff)) + f64::from(f32::EPSILON) / 2.0;
            let near = (half * f64::from(by)) as f32 * [1.0, 2f32.powi(-50), 2f32.powi(30)][n as usize % 3];
            for x in [near, f32::from_bits(near.to_bits() + 1), f32::from_bits(near.to_bits() - 1), -near] {
                let reciprocal = 1.0 / by;
                let mut q = x * reciprocal;
                for _ in 0..2 {
                    q = (-q).mul_add(by, x).mul_add(reciprocal, q);
                }
                assert_eq!(q, x / by, "{x:e} over {by:e}");
            }
        }
    }
}
