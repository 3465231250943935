//! Tensors as kernels read them: an address and strides in bytes. What every family of kernels takes is here, so that a
//! tensor, an element type and a count reach all kernels in one form.

use super::layout::kernel_struct;
use crate::core::dtype::DType;
use crate::core::tensor::Tensor;

/// The code of an element type in the kernels: kernels/common/elements.cuh numbers them in this order.
pub fn element_code(dtype: DType) -> u32 {
    const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
    TYPES.iter().position(|&t| t == dtype).expect("a floating-point type") as u32
}

/// A count of the contract as kernels take it. A larger count than kernels can reach means the same as the largest.
pub fn saturated(n: usize) -> u32 {
    n.min(i32::MAX as usize) as u32
}

/// Address of an optional tensor: NULL where there is none.
pub fn address(t: Option<&Tensor>) -> *mut u8 {
    t.map_or(std::ptr::null_mut(), |t| t.data())
}

/// Stride of an optional tensor's dimension in bytes: 0 where there is no tensor.
pub fn byte_stride(t: Option<&Tensor>, d: usize) -> i64 {
    t.map_or(0, |t| t.byte_stride(d))
}

/// Whether the elements of the last dimension are adjacent, in rows that begin at multiples of `alignment` bytes.
pub fn has_aligned_rows(t: &Tensor, alignment: i64) -> bool {
    let last = t.rank() - 1;
    let starts = (0..last).map(|d| t.byte_stride(d)).chain([t.data() as i64]);
    t.stride(last) == 1 && starts.into_iter().all(|start| start % alignment == 0)
}

/// Stands for a dimension that a tensor lacks: the kernels' index there is always 0.
pub const NO_DIM: usize = usize::MAX;

/// A tensor with its strides in bytes. Mirrors View of kernels/attention/attention.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct View<const N: usize> {
    pub data: *mut u8,
    pub step: [i64; N],
}

impl<const N: usize> View<N> {
    pub const ABSENT: View<N> = View { data: std::ptr::null_mut(), step: [0; N] };

    /// `dims` names the tensor's dimension that each dimension of the view stands for.
    pub fn new(t: &Tensor, dims: [usize; N]) -> View<N> {
        // The stride of a dimension with one element may be anything.
        let step = |d: usize| if d != NO_DIM && t.dim(d) > 1 { t.byte_stride(d) } else { 0 };
        View { data: t.data(), step: dims.map(step) }
    }

    /// A tensor [B, Q, …] of N dimensions, or [B, …] of one less: the index of the query position is then always 0.
    pub fn by_position(t: &Tensor) -> View<N> {
        let has_positions = t.rank() == N;
        View::new(
            t,
            std::array::from_fn(|d| match d {
                0 => 0,
                1 if !has_positions => NO_DIM,
                _ => d - !has_positions as usize,
            }),
        )
    }

    pub fn optional(t: &Option<Tensor>, view: impl Fn(&Tensor) -> View<N>) -> View<N> {
        t.as_ref().map_or(View::ABSENT, view)
    }
}

kernel_struct! {
    /// Where an index keeps the summaries of each sequence. Mirrors Place of kernels/common/place.cuh. Strides are in bytes.
    #[derive(Clone, Copy, PartialEq)]
    pub struct Place {
        table: *const u8,
        table_seq: i64,
        table_page: i64,
        pages: u32,
        rows: u32,
        pub capacity: u32,
    }
}

impl Place {
    /// `table` maps a sequence's pages to `pages` pages of `rows` summaries each; a sequence has up to `capacity` summaries.
    pub fn new(table: Option<&Tensor>, pages: usize, rows: usize, capacity: usize) -> Place {
        Place {
            table: address(table),
            table_seq: byte_stride(table, 0),
            table_page: byte_stride(table, 1),
            pages: saturated(pages),
            // Kernels divide by it. Pages without rows hold no summary, whatever the divisor is.
            rows: saturated(rows).max(1),
            capacity: saturated(capacity),
        }
    }
}

kernel_struct! {
    /// Mirrors Summary of kernels/common/place.cuh: a tensor [pages, rows, Hk, …]. Strides are in bytes.
    #[derive(Clone, Copy, PartialEq)]
    pub struct Summary {
        pub data: *const u8,
        page: i64,
        row: i64,
        head: i64,
        channel: i64,
    }
}

impl Summary {
    pub fn new(t: Option<&Tensor>) -> Summary {
        let [page, row, head, channel] = [0, 1, 2, 3].map(|d| byte_stride(t, d));
        Summary { data: address(t), page, row, head, channel }
    }
}
