//! Maps of keys and values, by which verify128 and verify128_short copy whole tiles as boxes of tensors.

use super::plan::{Plan, TILE};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::tensor_map::{Boxed, TensorMap};
use crate::runtime::cuda::views::View;

/// Channels of a slab of shared memory.
const SLAB_ELEMENTS: u32 = 64;
/// Bytes of [`Boxes`].
const BOXES_BYTES: usize = 384;

/// Mirrors Boxes of kernels/attention/verify128_boxes.cuh.
#[repr(C, align(128))]
pub struct Boxes {
    keys: TensorMap,
    values: TensorMap,
    /// 1: there are maps.
    exist: u32,
}

const _: () = assert!(size_of::<Boxes>() == BOXES_BYTES && std::mem::offset_of!(Boxes, exist) == 256);

impl Boxes {
    const NONE: Boxes = Boxes { keys: TensorMap::NONE, values: TensorMap::NONE, exist: 0 };

    /// The maps of a plan whose keys and values these are.
    pub fn of(plan: &Plan, k: &Tensor, v: &Tensor) -> Boxes {
        let params = &plan.params;
        if !plan.in_boxes {
            return Boxes::NONE;
        }
        match (map(&params.k, k), map(&params.v, v)) {
            (Some(keys), Some(values)) => Boxes { keys, values, exist: 1 },
            _ => Boxes::NONE,
        }
    }
}

/// The map of a tensor [pages, P, Hk, D].
fn map(view: &View<4>, t: &Tensor) -> Option<TensorMap> {
    let [page, row, head, _] = view.step;
    let [pages, rows, heads, channels] = [0, 1, 2, 3].map(|d| t.dim(d));
    TensorMap::new(&Boxed {
        data: view.data,
        dims: [channels, rows, heads, pages],
        steps: [row, head, page],
        lengths: [SLAB_ELEMENTS, TILE, 1, 1],
    })
}
