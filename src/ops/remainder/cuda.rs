//! Launches of the kernels of kernels/remainder/remainder.cu.

use super::{Remainder, Request};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::views::Scale;
use crate::runtime::cuda::layout::{Divisor, kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{NO_DIM, View, element_code, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, Modules, Source, source};

pub struct Kernels {
    covariance: Kernel,
    means: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("remainder/remainder", compute_80)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("remainder/remainder", name);
        Ok(Kernels { covariance: kernel("remainder_covariance")?, means: kernel("remainder_means")? })
    }
}

kernel_struct! {
    /// Mirrors RemainderParams of kernels/remainder/remainder.cu.
    struct RemainderParams {
        table: View<2>,
        tokens: View<2>,
        seq_lens: View<1>,
        begin: View<1>,
        rows: View<1>,
        k_scale: View<3>,
        v_scale: View<3>,
        mean_k: View<3>,
        mean_v: View<3>,
        k: *mut u8,
        v: *mut u8,
        covariance: *mut u8,
        k_step: [i64; 4],
        v_step: [i64; 4],
        covariance_step: [i64; 4],
        page: Divisor,
        pages: u32,
        capacity: u32,
        heads: u32,
        dim: u32,
        value_dim: u32,
        block: u32,
        count: u32,
        dtype: u32,
        key_tiles: u32,
        value_tiles: u32,
        inverse: f32,
    }
}

kernel_constants! {
    const THREADS: u32 = 256;
    /// Channels of a CTA's tile.
    const KEYS: usize = 32;
    const VALUES: usize = 64;
}

fn steps(t: &Tensor) -> [i64; 4] {
    std::array::from_fn(|d| t.byte_stride(d))
}

/// [1], [Hk] or [pages, P, Hk].
fn scale_view(scale: &Option<Scale>) -> View<3> {
    scale.as_ref().map_or(View::ABSENT, |Scale(t)| match t.rank() {
        3 => View::new(t, [0, 1, 2]),
        _ => View::new(t, [NO_DIM, NO_DIM, 0]),
    })
}

pub fn update(enqueue: &Enqueue, r: &Request) -> Result<()> {
    let (kv, Remainder { rows, tokens, mean_k, mean_v, covariance }) = (&r.kv, &r.remainder);
    let (batch, heads) = (kv.pages.batch(), kv.k.dim(2));
    // Tensors without an element may have any number of heads.
    if batch == 0 || kv.k.is_empty() {
        return Ok(());
    }
    let (dim, value_dim) = (kv.k.dim(3), kv.value_dim());
    let (key_tiles, value_tiles) = (dim.div_ceil(KEYS), value_dim.div_ceil(VALUES));
    let lists = batch.saturating_mul(heads);
    let tiles = lists.checked_mul(key_tiles * value_tiles).and_then(|n| i32::try_from(n).ok());
    let Some(tiles) = tiles else {
        let found = format!("seq_lens: {batch} sequences of {heads} KV heads");
        return Err(Error::unsupported(format!("{found}; CUDA takes up to 2^31 − 1 tiles of a covariance")));
    };
    let params = RemainderParams {
        table: View::optional(&kv.pages.table, |t| View::new(t, [0, 1])),
        tokens: View::new(tokens, [0, 1]),
        seq_lens: View::new(&kv.pages.seq_lens, [0]),
        begin: View::optional(&r.begin, |t| View::new(t, [0])),
        rows: View::optional(rows, |t| View::new(t, [0])),
        k_scale: scale_view(&kv.k_scale),
        v_scale: scale_view(&kv.v_scale),
        mean_k: View::new(mean_k, [0, 1, 2]),
        mean_v: View::new(mean_v, [0, 1, 2]),
        k: kv.k.data(),
        v: kv.v.data(),
        covariance: covariance.data(),
        k_step: steps(&kv.k),
        v_step: steps(&kv.v),
        covariance_step: steps(covariance),
        page: Divisor::new(saturated(kv.pages.size).max(1)),
        pages: saturated(kv.pages.count),
        capacity: saturated(kv.pages.capacity()),
        heads: heads as u32,
        dim: dim as u32,
        value_dim: value_dim as u32,
        block: r.block_size as u32,
        count: saturated(tokens.dim(0)),
        dtype: element_code(kv.k.dtype),
        key_tiles: key_tiles as u32,
        value_tiles: value_tiles as u32,
        inverse: 1.0 / r.block_size as f32,
    };
    let kernels: &Kernels = enqueue.kernels();
    let grid = |ctas: usize| Grid { ctas: ctas as u32, threads: THREADS, kind: Kind::Plain };
    // SAFETY: RemainderParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe {
        enqueue.launch(&kernels.covariance, grid(tiles as usize), [(&raw const params).cast()])?;
        enqueue.launch(&kernels.means, grid(lists), [(&raw const params).cast()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("remainder", file!(), &[RemainderParams::layout("RemainderParams"), kernel_constants()]);
    }
}
