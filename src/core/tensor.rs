//! Tensor views: a checked `vwd_tensor`, and the vocabulary of checks that every op uses on its arguments.

use super::dtype::{DType, Element};
use super::overlap;
use super::status::{Error, Result};
use crate::capi::types::vwd_tensor;
use std::fmt;

pub const MAX_RANK: usize = 5;

/// DLPack's `DLDeviceType`, as far as Vanward names them.
pub mod device_type {
    pub const CPU: i32 = 1;
    pub const CUDA: i32 = 2;
    pub const CUDA_HOST: i32 = 3;
    pub const CUDA_MANAGED: i32 = 13;
}

/// Where a session computes, and so where its tensors must live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda(i32),
}

impl Device {
    fn accepts(self, device_type: i32, device_id: i32) -> bool {
        match self {
            Device::Cpu => matches!(device_type, device_type::CPU | device_type::CUDA_HOST),
            Device::Cuda(id) => device_type == device_type::CUDA && device_id == id,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("a CPU tensor (device_type 1)"),
            Device::Cuda(id) => write!(f, "a CUDA tensor of device {id} (device_type 2)"),
        }
    }
}

/// A borrowed, strided view of the caller's memory. Checked: rank, dtype, device, alignment, and that every element's
/// byte offset fits in 63 bits. Strides are in elements and may be zero or negative.
#[derive(Clone, Copy)]
pub struct Tensor {
    pub name: Name,
    pub data: *mut u8,
    pub dtype: DType,
    rank: usize,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    /// Lowest and one-past-highest byte offset of any element from `data`.
    extent: (i64, i64),
}

// SAFETY: a view is an address and numbers. The C contract makes the caller keep the memory alive and unshared while an
// op runs; inside an op, tasks write disjoint elements.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

/// The parameter's name for messages: `kv.k`, or `rows[3]` for a member of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    text: &'static str,
    index: Option<u32>,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            None => f.write_str(self.text),
            Some(i) => write!(f, "{}[{i}]", self.text),
        }
    }
}

impl From<&'static str> for Name {
    fn from(text: &'static str) -> Name {
        Name { text, index: None }
    }
}

impl Name {
    pub fn member(text: &'static str, index: usize) -> Name {
        Name { text, index: Some(index as u32) }
    }
}

/// Turns `vwd_tensor`s into views for one device.
#[derive(Clone, Copy)]
pub struct Checks {
    pub device: Device,
}

impl Checks {
    /// A tensor that must be given. `data` may be NULL only when the tensor has no elements.
    #[inline(always)]
    pub fn required(&self, name: impl Into<Name>, t: &vwd_tensor) -> Result<Tensor> {
        let name = name.into();
        let missing = || Err(Error::argument(&name.to_string(), "data is NULL", "a tensor"));
        if t.data.is_null() && t.ndim == 0 {
            return missing();
        }
        let view = Tensor::new(name, t, self.device)?;
        if t.data.is_null() && view.count() != 0 {
            return missing();
        }
        Ok(view)
    }

    /// A tensor that is absent when its `data` is NULL.
    #[inline(always)]
    pub fn optional(&self, name: impl Into<Name>, t: &vwd_tensor) -> Result<Option<Tensor>> {
        if t.data.is_null() { Ok(None) } else { self.required(name, t).map(Some) }
    }
}

impl Tensor {
    /// A view of what was checked before; its extent is left out.
    #[inline]
    pub fn trusted(name: Name, t: &vwd_tensor) -> Tensor {
        let (dtype, rank) = (DType { code: t.dtype_code, bits: t.dtype_bits }, t.ndim as usize);
        let shape = std::array::from_fn(|d| if d < rank { t.shape[d] } else { 1 });
        let strides = std::array::from_fn(|d| if d < rank { t.strides[d] } else { 0 });
        Tensor { name, data: t.data.cast(), dtype, rank, shape, strides, extent: (0, 0) }
    }

    fn new(name: Name, t: &vwd_tensor, device: Device) -> Result<Tensor> {
        let fail = |found: String, expected: &str| Err(Error::argument(&name.to_string(), found, expected));
        if t.ndim < 0 || t.ndim as usize > MAX_RANK {
            return fail(format!("ndim {}", t.ndim), "0 to 5");
        }
        let rank = t.ndim as usize;
        if t.lanes > 1 || t.dtype_bits == 0 || !t.dtype_bits.is_multiple_of(8) {
            return fail(format!("{} bits, {} lanes", t.dtype_bits, t.lanes), "whole bytes and one lane");
        }
        if t.shape[..rank].iter().any(|&n| n < 0) {
            return fail(format!("shape {:?}", &t.shape[..rank]), "no negative extent");
        }
        let mut view = Tensor::trusted(name, t);
        match view.find_extent() {
            Some(extent) => view.extent = extent,
            None => {
                let found = format!("shape {:?} with strides {:?}", view.shape(), view.strides());
                return fail(found, "byte offsets within 63 bits");
            }
        }
        if t.data.is_null() {
            return Ok(view);
        }
        if !device.accepts(t.device_type, t.device_id) {
            let found = format!("device_type {}, device_id {}", t.device_type, t.device_id);
            return fail(found, &device.to_string());
        }
        // As C aligns it: to the largest power of two in the size (1 for three bytes), at most 8.
        if !(t.data as usize).is_multiple_of(1 << view.dtype.bytes().trailing_zeros().min(3)) {
            return fail(format!("data {:p} is misaligned", t.data), "alignment to the element size");
        }
        Ok(view)
    }

    /// A view of the library's own memory, packed, in C order.
    pub fn contiguous(name: &'static str, data: *mut u8, dtype: DType, shape: &[usize]) -> Tensor {
        let (mut extents, mut strides) = ([1; MAX_RANK], [0; MAX_RANK]);
        let mut stride = 1;
        for (d, &n) in shape.iter().enumerate().rev() {
            (extents[d], strides[d]) = (n as i64, stride);
            stride *= n as i64;
        }
        let extent = (0, stride * dtype.bytes() as i64);
        Tensor { name: name.into(), data, dtype, rank: shape.len(), shape: extents, strides, extent }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.rank]
    }

    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    /// Extent of dimension `d`; 1 past the rank.
    pub fn dim(&self, d: usize) -> usize {
        self.shape[d] as usize
    }

    /// Stride of dimension `d` in elements; 0 past the rank.
    pub fn stride(&self, d: usize) -> isize {
        self.strides[d] as isize
    }

    pub fn count(&self) -> usize {
        self.shape().iter().map(|&n| n as usize).product()
    }

    /// Addresses of the first byte and of the one past the last; equal without elements.
    pub fn bytes(&self) -> (i64, i64) {
        (self.data as i64 + self.extent.0, self.data as i64 + self.extent.1)
    }

    /// `None` where offsets do not fit.
    fn find_extent(&self) -> Option<(i64, i64)> {
        let mut count: i64 = 1;
        let (mut low, mut high) = (0i64, 0i64);
        for (&n, &s) in self.shape().iter().zip(self.strides()) {
            count = count.checked_mul(n)?;
            let reach = n.saturating_sub(1).checked_mul(s)?;
            if reach < 0 { low = low.checked_add(reach)? } else { high = high.checked_add(reach)? }
        }
        let size = self.dtype.bytes() as i64;
        count.checked_mul(size)?;
        if count == 0 {
            return Some((0, 0));
        }
        let (low, end) = (low.checked_mul(size)?, high.checked_add(1)?.checked_mul(size)?);
        // An address plus any offset must not wrap either, and the distance downwards has to exist.
        (self.data as i64).checked_add(end)?;
        (self.data as i64).checked_add(low)?;
        low.checked_neg()?;
        Some((low, end))
    }

    // --- checks: each returns the view, so that they chain -------------------------------------------------------

    #[inline(always)]
    pub fn of(self, dtype: DType) -> Result<Tensor> {
        self.of_any(&[dtype])
    }

    #[inline(always)]
    pub fn of_any(self, allowed: &[DType]) -> Result<Tensor> {
        if allowed.contains(&self.dtype) { Ok(self) } else { Err(self.wrong_dtype(allowed)) }
    }

    #[inline(always)]
    pub fn of_rank(self, rank: usize) -> Result<Tensor> {
        if self.rank == rank { Ok(self) } else { Err(self.wrong_rank(rank)) }
    }

    /// The exact shape, each extent with the symbol that the contract gives it: `&[("B", 4), ("γ+1", 9)]`.
    #[inline(always)]
    pub fn of_shape(self, expected: &[(&str, usize)]) -> Result<Tensor> {
        let same = self.rank == expected.len() && expected.iter().zip(self.shape()).all(|(e, &n)| e.1 as i64 == n);
        if same { Ok(self) } else { Err(self.wrong_shape(expected)) }
    }

    /// For a tensor the op writes: no element may share bytes with another.
    #[inline(always)]
    pub fn writable(self) -> Result<Tensor> {
        if overlap::is_injective(&self) { Ok(self) } else { Err(self.overlapping()) }
    }

    // What the checks say when they fail, out of the way of those that pass.

    #[cold]
    fn wrong_dtype(&self, allowed: &[DType]) -> Error {
        let names: Vec<String> = allowed.iter().map(DType::to_string).collect();
        Error::argument(&self.name.to_string(), format!("dtype {}", self.dtype), names.join(" or "))
    }

    #[cold]
    fn wrong_rank(&self, rank: usize) -> Error {
        let found = format!("rank {} (shape {:?})", self.rank, self.shape());
        Error::argument(&self.name.to_string(), found, format!("rank {rank}"))
    }

    #[cold]
    fn wrong_shape(&self, expected: &[(&str, usize)]) -> Error {
        let want: Vec<String> = expected.iter().map(|(s, n)| format!("{s}={n}")).collect();
        let found = format!("shape {:?}", self.shape());
        Error::argument(&self.name.to_string(), found, format!("[{}]", want.join(", ")))
    }

    #[cold]
    fn overlapping(&self) -> Error {
        let found = format!("shape {:?} with strides {:?} overlaps itself", self.shape(), self.strides());
        Error::argument(&self.name.to_string(), found, "an output whose elements are distinct")
    }

    // --- access --------------------------------------------------------------------------------------------------

    /// Address of the element at `index`, one coordinate per leading dimension (the rest are 0).
    #[inline(always)]
    pub fn at<T: Element, const N: usize>(&self, index: [usize; N]) -> *mut T {
        debug_assert_eq!(self.dtype, T::DTYPE);
        let mut offset = 0isize;
        for (d, &i) in index.iter().enumerate() {
            debug_assert!(i < self.dim(d), "{}: index {i} of dimension {d} with {}", self.name, self.dim(d));
            offset += i as isize * self.stride(d);
        }
        self.data.cast::<T>().wrapping_offset(offset)
    }

    /// Reads one element.
    ///
    /// # Safety
    /// The caller of the op keeps the memory valid; `T` is the dtype and `index` is inside the shape.
    #[inline(always)]
    pub unsafe fn get<T: Element, const N: usize>(&self, index: [usize; N]) -> T {
        // SAFETY: forwarded to the caller.
        unsafe { self.at::<T, N>(index).read() }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// As for [`Tensor::get`], and no other task touches this element.
    #[inline(always)]
    pub unsafe fn set<T: Element, const N: usize>(&self, index: [usize; N], value: T) {
        // SAFETY: forwarded to the caller.
        unsafe { self.at::<T, N>(index).write(value) }
    }
}
