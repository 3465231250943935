//! Parameters of the kernels of kernels/prefetch.

use super::super::GatherRequest;
use super::form::{Dim, Form, MOST_DIMS};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{Divisor, kernel_struct};
use std::mem::MaybeUninit;

kernel_struct! {
    /// Mirrors Lists of kernels/prefetch/pairs.cuh. Strides are in bytes.
    pub struct Lists {
        source_ids: *const u8,
        target_ids: *const u8,
        counts: *const u8,
        source_seq: i64,
        source_head: i64,
        source_entry: i64,
        target_seq: i64,
        target_head: i64,
        target_entry: i64,
        count_seq: i64,
        count_head: i64,
        source_block: i64,
        source_block_head: i64,
        target_block: i64,
        cap: Divisor,
        heads: Divisor,
        entries: u32,
        sources: u32,
        targets: u32,
    }
}

impl Lists {
    /// The lists of a request, which have fewer than 2^31 entries.
    pub fn new(r: &GatherRequest) -> Lists {
        let pairs = &r.pairs;
        let per_head = r.per_head();
        let step = |t: Option<&Tensor>, d: usize| t.map_or(0, |t| t.byte_stride(d));
        let strides = |t: Option<&Tensor>| if per_head { [0, 1, 2].map(|d| step(t, d)) } else { [0, 0, step(t, 0)] };
        let [source_seq, source_head, source_entry] = strides(Some(&pairs.source_ids));
        let [target_seq, target_head, target_entry] = strides(pairs.target_ids.as_ref());
        let address = |t: &Option<Tensor>| t.as_ref().map_or(std::ptr::null_mut(), |t| t.data()).cast_const();
        // Ids are below 2^31.
        let rows = |t: &Tensor| t.dim(0).min(1 << 31) as u32;
        Lists {
            source_ids: pairs.source_ids.data(),
            target_ids: address(&pairs.target_ids),
            counts: address(&pairs.counts),
            source_seq,
            source_head,
            source_entry,
            target_seq,
            target_head,
            target_entry,
            count_seq: if per_head { step(pairs.counts.as_ref(), 0) } else { 0 },
            count_head: if per_head { step(pairs.counts.as_ref(), 1) } else { 0 },
            source_block: r.source.byte_stride(0),
            source_block_head: if per_head { r.source.byte_stride(1) } else { 0 },
            target_block: r.target.byte_stride(0),
            cap: Divisor::new(pairs.cap() as u32),
            heads: Divisor::new(pairs.heads() as u32),
            entries: pairs.entries() as u32,
            sources: rows(&r.source),
            targets: rows(&r.target),
        }
    }
}

kernel_struct! {
    /// Mirrors Offsets of kernels/prefetch/pairs.cuh.
    #[derive(Clone, Copy)]
    pub struct Offsets {
        pub from: i64,
        pub to: i64,
    }
}

/// Entries of a launch that the host looked up.
pub const MOST_GIVEN: usize = 1000;

kernel_struct! {
    /// Mirrors Given of kernels/prefetch/pairs.cuh. The kernels read no more than `entries` of them.
    pub struct Given {
        pub of: [MaybeUninit<Offsets>; MOST_GIVEN],
        pub entries: u32,
    }
}

kernel_struct! {
    /// Mirrors BulkParams of kernels/prefetch/params.cuh.
    pub struct BulkParams {
        source: *const u8,
        target: *mut u8,
        pieces: Divisor,
        piece: u32,
        last: u32,
        stages: u32,
    }
}

impl BulkParams {
    /// Blocks of `bytes` in pieces of `piece`; there are fewer than 2^31 of these.
    pub fn new(r: &GatherRequest, bytes: u64, piece: u32, stages: u32) -> BulkParams {
        let pieces = bytes.div_ceil(piece as u64);
        BulkParams {
            source: r.source.data(),
            target: r.target.data(),
            pieces: Divisor::new(pieces as u32),
            piece,
            last: (bytes - (pieces - 1) * piece as u64) as u32,
            stages,
        }
    }
}

kernel_struct! {
    /// Mirrors Nested of kernels/prefetch/params.cuh.
    #[derive(Clone, Copy)]
    struct Nested {
        extent: Divisor,
        source: i64,
        target: i64,
    }
}

kernel_struct! {
    /// Mirrors VectorParams of kernels/prefetch/params.cuh.
    pub struct VectorParams {
        source: *const u8,
        target: *mut u8,
        tiles: Divisor,
        units: u32,
        log_unit: u32,
        log_lanes: u32,
        dims: u32,
        run: Divisor,
        dim: [Nested; MOST_DIMS],
    }
}

impl VectorParams {
    /// Blocks of fewer than 2^31 units, in `tiles` tiles of so many lanes.
    pub fn new(r: &GatherRequest, form: &Form, tiles: u32, log_lanes: u32) -> VectorParams {
        let nested =
            |dim: Dim| Nested { extent: Divisor::new(dim.extent as u32), source: dim.source, target: dim.target };
        VectorParams {
            source: r.source.data(),
            target: r.target.data(),
            tiles: Divisor::new(tiles),
            units: (form.bytes() / form.unit) as u32,
            log_unit: form.unit.trailing_zeros(),
            log_lanes,
            dims: form.used as u32,
            run: Divisor::new((form.run / form.unit) as u32),
            dim: form.dims.map(nested),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            Offsets::layout("Offsets"),
            Lists::layout("Lists"),
            Given::layout("Given"),
            BulkParams::layout("BulkParams"),
            Nested::layout("Nested"),
            VectorParams::layout("VectorParams"),
        ];
        layout::check("prefetch", file!(), &structs);
    }
}
