//! Launches of the kernels of kernels/remainder/remainder.cu.

use super::{Remainder, Request};
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::views::Scale;
use crate::runtime::cuda::layout::{Divisor, kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{NO_DIM, View, element_code, has_aligned_rows, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules, Source, source};

pub struct Kernels {
    /// By the bytes of an element: 1, 2 and 4.
    covariance: [Kernel; 3],
    means: [Kernel; 3],
    /// The largest cluster that the device can form of CTAs of the means; 1 where it forms none.
    cluster: u32,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[source!("remainder/remainder", compute_80, compute_90)];

    fn find(modules: &Modules) -> Result<Kernels> {
        let kernel = |name| modules.kernel("remainder/remainder", name);
        let means = [kernel("remainder_means_1")?, kernel("remainder_means_2")?, kernel("remainder_means_4")?];
        let covariance =
            [kernel("remainder_covariance_1")?, kernel("remainder_covariance_2")?, kernel("remainder_covariance_4")?];
        let can_form = |&size: &u32| means.iter().all(|kernel| kernel.active_clusters(size, THREADS) > 0);
        let largest = if modules.facts().launches_dependents() { LARGEST_CLUSTER } else { 1 };
        let cluster = (2..=largest).rfind(can_form).unwrap_or(1);
        Ok(Kernels { covariance, means, cluster })
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
        floors: View<1>,
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
        size: Divisor,
        pages: u32,
        capacity: u32,
        heads: u32,
        dim: u32,
        value_dim: u32,
        count: u32,
        dtype: u32,
        key_strips: u32,
        value_strips: u32,
        k_adjacent: u32,
        v_adjacent: u32,
        inverse: f32,
    }
}

kernel_constants! {
    const THREADS: u32 = 256;
    /// Channels of keys, and of values, of a CTA's tile.
    const STRIP: usize = 32;
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
    let (key_strips, value_strips) = (dim.div_ceil(STRIP), value_dim.div_ceil(STRIP));
    let kernels: &Kernels = enqueue.kernels();
    let cluster = kernels.cluster.min((key_strips + value_strips) as u32);
    let lists = batch.saturating_mul(heads);
    let most_ctas = (key_strips * value_strips).max(cluster as usize);
    if lists.checked_mul(most_ctas).is_none_or(|n| n > i32::MAX as usize) {
        let found = format!("seq_lens: {batch} sequences of {heads} KV heads");
        return Err(Error::unsupported(format!("{found}; CUDA takes up to 2^31 − 1 tiles of a covariance")));
    }
    let bytes = kv.k.dtype.bytes();
    let is_adjacent = |t: &Tensor| has_aligned_rows(t, if bytes == 1 { 8 } else { 16 }) as u32;
    let params = RemainderParams {
        table: View::optional(&kv.pages.table, |t| View::new(t, [0, 1])),
        tokens: View::new(tokens, [0, 1]),
        seq_lens: View::new(&kv.pages.seq_lens, [0]),
        begin: View::optional(&r.begin, |t| View::new(t, [0])),
        rows: View::optional(rows, |t| View::new(t, [0])),
        floors: View::optional(&r.floors, |t| View::new(t, [0])),
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
        size: Divisor::new(r.block_size as u32),
        pages: saturated(kv.pages.count),
        capacity: saturated(kv.pages.capacity()),
        heads: heads as u32,
        dim: dim as u32,
        value_dim: value_dim as u32,
        count: saturated(tokens.dim(0)),
        dtype: element_code(kv.k.dtype),
        key_strips: key_strips as u32,
        value_strips: value_strips as u32,
        k_adjacent: is_adjacent(&kv.k),
        v_adjacent: is_adjacent(&kv.v),
        inverse: 1.0 / r.block_size as f32,
    };
    let width = bytes.ilog2() as usize;
    let tiles = lists * key_strips * value_strips;
    let of_tiles = Grid { ctas: tiles as u32, threads: THREADS, kind: enqueue.dependent_kind() };
    let of_heads = Grid {
        ctas: lists as u32 * cluster,
        threads: THREADS,
        kind: if cluster > 1 { Kind::DependentClusters(cluster) } else { enqueue.dependent_kind() },
    };
    // SAFETY: RemainderParams is the kernels' struct; the op's caller keeps the tensors valid until the stream has passed. The first
    // kernel waits before it touches anything and before it lets the second one start.
    unsafe {
        enqueue.launch(&kernels.covariance[width], of_tiles, [(&raw const params).cast()])?;
        enqueue.launch(&kernels.means[width], of_heads, [(&raw const params).cast()])
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
