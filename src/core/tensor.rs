//! Tensor views: a checked `vwd_tensor`, and the vocabulary of checks that every op uses on its arguments.

use super::along::Along;
use super::dtype::{DType, Element};
use super::status::{Error, Result};
pub use super::strides::MAX_RANK;
use super::strides::is_injective;
use super::text::any_of;
use crate::abi::vwd_tensor;
use std::fmt;
use std::ptr::NonNull;

/// In an expected shape: any extent.
pub const ANY: usize = usize::MAX;

fn fits(extent: i64, expected: usize) -> bool {
    expected == ANY || extent == expected as i64
}

/// The values of DLPack's `DLDeviceType` that Vanward knows.
pub mod device_type {
    pub const CPU: i32 = 1;
    pub const CUDA: i32 = 2;
    pub const CUDA_HOST: i32 = 3;
}

/// The device on which a session computes, and on which its tensors must live.
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

/// A borrowed, strided view of the caller's memory. Its rank, dtype, device and alignment are checked, and every element's
/// byte offset fits in 63 bits. Shape and strides stay in the caller's struct. Strides are in elements and may be zero or
/// negative.
///
/// A call makes a dozen views and passes them by value, so a view is small.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    given: &'a vwd_tensor,
    bytes: ByteRange,
    /// The parts of the view's [`Name`].
    text: NonNull<u8>,
    index: u32,
    length: u16,
    pub dtype: DType,
}

const _: () = assert!(size_of::<Option<Tensor>>() == 40);

/// The addresses of a tensor's first byte and of the byte past its last; equal if it has no elements.
pub type ByteRange = (i64, i64);

// SAFETY: a view is an address and numbers. The C contract makes the caller keep the memory alive and unshared while an
// op runs; inside an op, tasks write disjoint elements.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}

/// The parameter's name for messages: `kv.k`, or `rows[3]` for a member of an array, or `inputs[3].acc` for one of
/// `inputs[].acc`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    text: &'static str,
    /// NO_MEMBER if the parameter is not a member of an array.
    index: u32,
}

const NO_MEMBER: u32 = u32::MAX;

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.index, self.text.split_once("[]")) {
            (NO_MEMBER, _) => f.write_str(self.text),
            (i, Some((array, member))) => write!(f, "{array}[{i}]{member}"),
            (i, None) => write!(f, "{}[{i}]", self.text),
        }
    }
}

impl From<&'static str> for Name {
    fn from(text: &'static str) -> Name {
        Name::new(text)
    }
}

impl Name {
    pub const fn new(text: &'static str) -> Name {
        Name { text, index: NO_MEMBER }
    }

    pub fn member(text: &'static str, index: usize) -> Name {
        Name { text, index: index as u32 }
    }
}

/// Describes memory that the library owns, packed in C order.
pub fn contiguous(data: *mut u8, dtype: DType, extents: &[usize]) -> vwd_tensor {
    let (mut steps, mut step) = ([0; MAX_RANK], 1);
    for (d, &n) in extents.iter().enumerate().rev() {
        steps[d] = step;
        step *= n;
    }
    strided(Device::Cpu, data, dtype, extents, &steps)
}

/// Describes memory that the library owns; steps are in elements. NULL data gives an absent tensor.
pub fn strided(device: Device, data: *mut u8, dtype: DType, extents: &[usize], steps: &[usize]) -> vwd_tensor {
    let (device_type, device_id) = match device {
        Device::Cpu => (device_type::CPU, 0),
        Device::Cuda(ordinal) => (device_type::CUDA, ordinal),
    };
    let (mut shape, mut strides, mut ndim) = ([0; MAX_RANK], [0; MAX_RANK], 0);
    if !data.is_null() {
        ndim = extents.len() as i32;
        for (d, (&n, &step)) in extents.iter().zip(steps).enumerate() {
            (shape[d], strides[d]) = (n as i64, step as i64);
        }
    }
    let (dtype_code, dtype_bits) = (dtype.code, dtype.bits);
    vwd_tensor { data: data.cast(), device_type, device_id, dtype_code, dtype_bits, lanes: 1, ndim, shape, strides }
}

/// Turns `vwd_tensor`s into views for one device.
#[derive(Clone, Copy)]
pub struct Checks {
    pub device: Device,
}

/// An optional tensor: `None` if its `data` is NULL.
#[inline(always)]
pub fn given(t: &vwd_tensor) -> Option<&vwd_tensor> {
    if t.data.is_null() { None } else { Some(t) }
}

/// The fault of a tensor's description, in the order of the checks.
enum Flaw {
    Missing,
    Rank,
    Element,
    Extent,
    Offsets,
    Device,
    Alignment,
}

impl Checks {
    /// A tensor that must be given. `data` may be NULL only when the tensor has no elements.
    #[inline(always)]
    pub fn required<'a>(&self, name: impl Into<Name>, t: &'a vwd_tensor) -> Result<Tensor<'a>> {
        match self.check(t) {
            Ok(bytes) => Ok(Tensor::new(name.into(), t, bytes)),
            Err(flaw) => Err(self.refusal(flaw, name.into(), t)),
        }
    }

    /// A tensor that is absent when its `data` is NULL.
    #[inline(always)]
    pub fn optional<'a>(&self, name: impl Into<Name>, t: &'a vwd_tensor) -> Result<Option<Tensor<'a>>> {
        given(t).map(|t| self.required(name, t)).transpose()
    }

    /// A tensor that must be given, of one of these dtypes and of this shape (see [`Tensor::of_shape`]).
    #[inline(always)]
    pub fn input<'a, const RANK: usize>(
        &self,
        name: impl Into<Name>,
        t: &'a vwd_tensor,
        dtypes: &[DType],
        shape: &[(&str, usize); RANK],
    ) -> Result<Tensor<'a>> {
        let name = name.into();
        let bytes = match self.end_if_usual(t, dtypes, shape) {
            Some(end) => (t.data as i64, end),
            // The shape is copied here, so that it need not lie in memory for usual tensors.
            None => self.input_bytes(name, t, dtypes, &{ *shape })?,
        };
        Ok(Tensor::new(name, t, bytes))
    }

    /// [`Checks::input`] for a tensor that the op writes.
    #[inline(always)]
    pub fn output<'a, const RANK: usize>(
        &self,
        name: impl Into<Name>,
        t: &'a vwd_tensor,
        dtypes: &[DType],
        shape: &[(&str, usize); RANK],
    ) -> Result<Tensor<'a>> {
        let name = name.into();
        let bytes = match self.end_if_usual(t, dtypes, shape) {
            Some(end) => (t.data as i64, end),
            None => self.output_bytes(name, t, dtypes, &{ *shape })?,
        };
        Ok(Tensor::new(name, t, bytes))
    }

    /// [`Checks::input`] for a tensor that is absent if its `data` is NULL.
    #[inline(always)]
    pub fn optional_input<'a, const RANK: usize>(
        &self,
        name: impl Into<Name>,
        t: &'a vwd_tensor,
        dtypes: &[DType],
        shape: &[(&str, usize); RANK],
    ) -> Result<Option<Tensor<'a>>> {
        if t.data.is_null() { Ok(None) } else { Ok(Some(self.input(name, t, dtypes, shape)?)) }
    }

    /// [`Checks::output`] for a tensor that is absent if its `data` is NULL.
    #[inline(always)]
    pub fn optional_output<'a, const RANK: usize>(
        &self,
        name: impl Into<Name>,
        t: &'a vwd_tensor,
        dtypes: &[DType],
        shape: &[(&str, usize); RANK],
    ) -> Result<Option<Tensor<'a>>> {
        if t.data.is_null() { Ok(None) } else { Ok(Some(self.output(name, t, dtypes, shape)?)) }
    }

    /// Fails where a tensor that is given has another dtype than `like`.
    #[inline(always)]
    pub fn same_dtype(&self, name: impl Into<Name>, t: &vwd_tensor, like: &Tensor) -> Result<()> {
        let found = DType { code: t.dtype_code, bits: t.dtype_bits };
        if t.data.is_null() || found == like.dtype { Ok(()) } else { self.other_dtype(name.into(), t, like) }
    }

    #[cold]
    fn other_dtype(&self, name: Name, t: &vwd_tensor, like: &Tensor) -> Result<()> {
        let found = format!("dtype {}", self.required(name, t)?.dtype);
        Err(Error::argument(&name.to_string(), found, format!("{}, the dtype of {}", like.dtype, like.name())))
    }

    /// The bytes of an input that need not be usual. It returns no view, which callers would have to pass through memory.
    #[inline(never)]
    fn input_bytes(&self, name: Name, t: &vwd_tensor, dtypes: &[DType], shape: &[(&str, usize)]) -> Result<ByteRange> {
        Ok(self.required(name, t)?.of_any(dtypes)?.of_shape(shape)?.bytes)
    }

    #[inline(never)]
    fn output_bytes(&self, name: Name, t: &vwd_tensor, dtypes: &[DType], shape: &[(&str, usize)]) -> Result<ByteRange> {
        Ok(self.required(name, t)?.of_any(dtypes)?.of_shape(shape)?.writable()?.bytes)
    }

    /// The address past the last byte of a usual tensor: one that is as expected and in C order without gaps, and so passes
    /// every check. The size of every expected dtype is a power of two.
    #[inline(always)]
    fn end_if_usual<const RANK: usize>(
        &self,
        t: &vwd_tensor,
        dtypes: &[DType],
        shape: &[(&str, usize); RANK],
    ) -> Option<i64> {
        let dtype = DType { code: t.dtype_code, bits: t.dtype_bits };
        let (data, size) = (t.data as i64, t.dtype_bits as i64 / 8);
        let is_expected = t.ndim as usize == RANK
            && t.lanes <= 1
            && dtypes.contains(&dtype)
            && self.device.accepts(t.device_type, t.device_id)
            && data != 0
            && data & (size - 1) == 0;
        if !is_expected {
            return None;
        }
        let mut stride = 1i64;
        for d in (0..RANK).rev() {
            if t.strides[d] != stride || !fits(t.shape[d], shape[d].1) || t.shape[d] < 0 {
                return None;
            }
            stride = stride.checked_mul(t.shape[d])?;
        }
        data.checked_add(stride.checked_mul(size)?)
    }

    fn check(&self, t: &vwd_tensor) -> std::result::Result<ByteRange, Flaw> {
        if t.data.is_null() && t.ndim == 0 {
            return Err(Flaw::Missing);
        }
        let rank = t.ndim as usize;
        if rank > MAX_RANK {
            return Err(Flaw::Rank);
        }
        if t.lanes > 1 || t.dtype_bits == 0 || !t.dtype_bits.is_multiple_of(8) {
            return Err(Flaw::Element);
        }
        let Some((start, end)) = reach(t) else {
            return Err(if t.shape[..rank].iter().any(|&n| n < 0) { Flaw::Extent } else { Flaw::Offsets });
        };
        if t.data.is_null() {
            return if start == end { Ok((start, end)) } else { Err(Flaw::Missing) };
        }
        if !self.device.accepts(t.device_type, t.device_id) {
            return Err(Flaw::Device);
        }
        if t.data as i64 % alignment(t) == 0 { Ok((start, end)) } else { Err(Flaw::Alignment) }
    }

    #[cold]
    fn refusal(&self, flaw: Flaw, name: Name, t: &vwd_tensor) -> Error {
        let rank = (t.ndim as usize).min(MAX_RANK);
        let (shape, strides) = (&t.shape[..rank], &t.strides[..rank]);
        let (found, expected) = match flaw {
            Flaw::Missing => ("data is NULL".into(), "a tensor"),
            Flaw::Rank => (format!("ndim {}", t.ndim), "0 to 5"),
            Flaw::Element => (format!("{} bits, {} lanes", t.dtype_bits, t.lanes), "whole bytes and one lane"),
            Flaw::Extent => (format!("shape {shape:?}"), "no negative extent"),
            Flaw::Offsets => (format!("shape {shape:?} with strides {strides:?}"), "byte offsets within 63 bits"),
            Flaw::Device => {
                let found = format!("device_type {}, device_id {}", t.device_type, t.device_id);
                return Error::argument(&name.to_string(), found, self.device);
            }
            Flaw::Alignment => {
                let expected = format!("a multiple of {} bytes", alignment(t));
                return Error::argument(&name.to_string(), format!("data {:p} is misaligned", t.data), expected);
            }
        };
        Error::argument(&name.to_string(), found, expected)
    }
}

/// The alignment that C gives an element: the largest power of two that divides its size (1 for three bytes), at most 8.
fn alignment(t: &vwd_tensor) -> i64 {
    1 << (t.dtype_bits / 8).trailing_zeros().min(3)
}

/// The bytes of a tensor whose rank is in range; `None` if an extent is negative, or an element's byte offset from `data`
/// or its address does not fit in 63 bits.
#[inline(always)]
fn reach(t: &vwd_tensor) -> Option<ByteRange> {
    let (data, size) = (t.data as i64, t.dtype_bits as i64 / 8);
    if let Some(end) = packed_end(t) {
        return Some((data, end));
    }
    let (mut count, mut low, mut high) = (1i64, 0i64, 0i64);
    for (&n, &s) in t.shape.iter().zip(&t.strides).take(t.ndim as usize) {
        if n < 0 {
            return None;
        }
        count = count.checked_mul(n)?;
        let reach = (n - 1).checked_mul(s)?;
        low = low.checked_add(reach.min(0))?;
        high = high.checked_add(reach.max(0))?;
    }
    if count.checked_mul(size)? == 0 {
        return Some((data, data));
    }
    let (low, end) = (low.checked_mul(size)?, high.checked_add(1)?.checked_mul(size)?);
    // The distance from `data` down to the first byte has to fit, too.
    low.checked_neg()?;
    Some((data.checked_add(low)?, data.checked_add(end)?))
}

/// The address past the last byte of a tensor in C order without gaps; `None` for other tensors, and if [`reach`] gives none.
#[inline(always)]
fn packed_end(t: &vwd_tensor) -> Option<i64> {
    let mut stride = 1i64;
    for d in (0..MAX_RANK.min(t.ndim as usize)).rev() {
        if t.strides[d] != stride || t.shape[d] < 0 {
            return None;
        }
        stride = stride.checked_mul(t.shape[d])?;
    }
    (t.data as i64).checked_add(stride.checked_mul(t.dtype_bits as i64 / 8)?)
}

/// A description that passed its checks. Of tensors that differ from it only in the address, the address alone is checked.
pub struct Template<'a> {
    t: &'a vwd_tensor,
    /// The distances from `data` to the first byte and to the byte past the last.
    extent: ByteRange,
}

impl<'a> Template<'a> {
    pub fn new(t: &'a vwd_tensor, checked: &Tensor) -> Template<'a> {
        let (data, (start, end)) = (t.data as i64, checked.bytes());
        Template { t, extent: (start - data, end - data) }
    }

    /// How many of these tensors, from the first on, are alike: they differ from the template only in a valid address.
    pub fn count_alike(&self, tensors: &[vwd_tensor]) -> usize {
        // The rank is a constant, so that the compiler unrolls the loops over dimensions.
        match self.t.ndim {
            1 => self.count_of_rank::<1>(tensors),
            2 => self.count_of_rank::<2>(tensors),
            3 => self.count_of_rank::<3>(tensors),
            4 => self.count_of_rank::<4>(tensors),
            5 => self.count_of_rank::<5>(tensors),
            _ => 0,
        }
    }

    fn count_of_rank<const RANK: usize>(&self, tensors: &[vwd_tensor]) -> usize {
        // A template without an address has passed fewer checks.
        if tensors.is_empty() || self.t.data.is_null() {
            return 0;
        }
        let (misaligned, last) = (alignment(self.t) - 1, i64::MAX - self.extent.1);
        let is_sound = |data: i64| (1..=last).contains(&data) && data & misaligned == 0;
        let head = |t: &vwd_tensor| {
            let dtype = t.dtype_code as u64 | (t.dtype_bits as u64) << 8 | (t.lanes as u64) << 16;
            (t.device_type as u32 as u64 | (t.device_id as u64) << 32, dtype | (t.ndim as u64) << 32)
        };
        let (known, shape, strides) = (head(self.t), self.t.shape, self.t.strides);
        let is_alike = |t: &vwd_tensor| {
            head(t) == known && (0..RANK).all(|d| t.shape[d] == shape[d] && t.strides[d] == strides[d])
        };
        tensors.iter().take_while(|t| is_sound(t.data as i64) && is_alike(t)).count()
    }

    /// Whether each of these tensors, all alike, begins past the end of the tensor before it.
    #[inline(always)]
    pub fn ascend(&self, tensors: &[vwd_tensor]) -> bool {
        let bytes = self.extent.1 - self.extent.0;
        // The subtraction does not overflow: the address of a tensor that is alike is above 0.
        tensors.is_sorted_by(|t, next| t.data as i64 <= next.data as i64 - bytes)
    }

    /// The bytes of a tensor that is alike.
    #[inline(always)]
    pub fn bytes(&self, t: &vwd_tensor) -> ByteRange {
        (t.data as i64 + self.extent.0, t.data as i64 + self.extent.1)
    }
}

impl<'a> Tensor<'a> {
    #[inline(always)]
    fn new(name: Name, given: &'a vwd_tensor, bytes: ByteRange) -> Tensor<'a> {
        let dtype = DType { code: given.dtype_code, bits: given.dtype_bits };
        let (text, length) = (NonNull::from_ref(name.text).cast(), name.text.len() as u16);
        Tensor { given, bytes, text, index: name.index, length, dtype }
    }

    pub fn name(&self) -> Name {
        // SAFETY: `new` took these parts from a static text; a length that 16 bits cannot hold is cut.
        let text = unsafe { std::slice::from_raw_parts(self.text.as_ptr(), self.length.into()) };
        Name { text: std::str::from_utf8(text).unwrap_or_default(), index: self.index }
    }

    /// The address of element [0, …, 0].
    #[inline(always)]
    pub fn data(&self) -> *mut u8 {
        self.given.data.cast()
    }

    /// A view of a tensor that was checked before, or that [`contiguous`] described.
    ///
    /// # Safety
    /// `t` passed its checks.
    #[inline(always)]
    pub unsafe fn unchecked(name: Name, t: &'a vwd_tensor) -> Tensor<'a> {
        Tensor::new(name, t, reach(t).unwrap_or_default())
    }

    #[inline(always)]
    pub fn rank(&self) -> usize {
        self.given.ndim as usize
    }

    #[inline(always)]
    pub fn shape(&self) -> &'a [i64] {
        &self.given.shape[..self.rank()]
    }

    #[inline(always)]
    pub fn strides(&self) -> &'a [i64] {
        &self.given.strides[..self.rank()]
    }

    /// Extent of dimension `d`; 1 past the rank.
    #[inline(always)]
    pub fn dim(&self, d: usize) -> usize {
        if d < self.rank() { self.given.shape[d] as usize } else { 1 }
    }

    /// Stride of dimension `d` in elements; 0 past the rank.
    #[inline(always)]
    pub fn stride(&self, d: usize) -> isize {
        if d < self.rank() { self.given.strides[d] as isize } else { 0 }
    }

    /// Stride of dimension `d` in bytes; 0 past the rank. The stride of an extent of 1 is never used, may be any number, and
    /// wraps.
    #[inline(always)]
    pub fn byte_stride(&self, d: usize) -> i64 {
        (self.stride(d) as i64).wrapping_mul(self.dtype.bytes() as i64)
    }

    /// Whether the tensor has no element, however large its other extents and strides are.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    pub fn count(&self) -> usize {
        self.shape().iter().map(|&n| n as usize).product()
    }

    #[inline(always)]
    pub fn bytes(&self) -> ByteRange {
        self.bytes
    }

    // --- checks: each returns the view, so that they chain -------------------------------------------------------

    #[inline(always)]
    pub fn of(self, dtype: DType) -> Result<Self> {
        self.of_any(&[dtype])
    }

    #[inline(always)]
    pub fn of_any(self, allowed: &[DType]) -> Result<Self> {
        if allowed.contains(&self.dtype) { Ok(self) } else { Err(wrong_dtype(self.name(), self.dtype, allowed)) }
    }

    #[inline(always)]
    pub fn of_rank(self, rank: usize) -> Result<Self> {
        if self.rank() == rank { Ok(self) } else { Err(wrong_rank(self.name(), self.shape(), rank)) }
    }

    /// The shape, each extent with the symbol that the contract gives it: `&[("B", 4), ("γ+1", 9), ("cap", ANY)]`.
    #[inline(always)]
    pub fn of_shape(self, expected: &[(&str, usize)]) -> Result<Self> {
        let same = self.rank() == expected.len() && expected.iter().zip(self.shape()).all(|(e, &n)| fits(n, e.1));
        if same { Ok(self) } else { Err(wrong_shape(self.name(), self.shape(), expected)) }
    }

    /// For a tensor the op writes: no element may share bytes with another.
    #[inline(always)]
    pub fn writable(self) -> Result<Self> {
        if is_injective(self.shape(), self.strides()) {
            Ok(self)
        } else {
            Err(overlapping(self.name(), self.shape(), self.strides()))
        }
    }

    // --- access --------------------------------------------------------------------------------------------------

    /// Address of the element at `index`, one coordinate per leading dimension (the rest are 0).
    #[inline(always)]
    pub fn at<T: Element, const N: usize>(&self, index: [usize; N]) -> *mut T {
        debug_assert_eq!(self.dtype, T::DTYPE);
        let mut offset = 0isize;
        for (d, &i) in index.iter().enumerate() {
            debug_assert!(i < self.dim(d), "{}: index {i} of dimension {d} with {}", self.name(), self.dim(d));
            // Past the rank i is 0, so the stride there does not matter.
            offset = offset.wrapping_add((i as isize).wrapping_mul(self.given.strides[d] as isize));
        }
        self.data().cast::<T>().wrapping_offset(offset)
    }

    /// The elements along dimension `d` from the one at `index` on.
    #[inline(always)]
    pub fn along<T: Element, const N: usize>(&self, d: usize, index: [usize; N]) -> Along<T> {
        Along::new(self.at(index), self.stride(d))
    }

    /// The row at `index`, which names all dimensions but the last.
    #[inline(always)]
    pub fn row<T: Element, const N: usize>(&self, index: [usize; N]) -> Along<T> {
        self.along(N, index)
    }

    /// Reads one element.
    ///
    /// # Safety
    /// The caller of the op keeps the memory valid; `T` is the dtype and `index` is inside the shape.
    #[inline(always)]
    pub unsafe fn get<T: Element, const N: usize>(&self, index: [usize; N]) -> T {
        // SAFETY: the index is inside a checked shape, whose every element the caller keeps valid.
        unsafe { self.at::<T, N>(index).read() }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// The conditions of [`Tensor::get`] hold, and no other task touches this element.
    #[inline(always)]
    pub unsafe fn set<T: Element, const N: usize>(&self, index: [usize; N], value: T) {
        // SAFETY: as for get, and this element is the caller's alone.
        unsafe { self.at::<T, N>(index).write(value) }
    }
}

// The errors of checks that fail. They are cold functions, and take parts of a view, so that the view can stay in registers.

#[cold]
fn wrong_dtype(name: Name, found: DType, allowed: &[DType]) -> Error {
    Error::argument(&name.to_string(), format!("dtype {found}"), any_of(allowed))
}

#[cold]
fn wrong_rank(name: Name, shape: &[i64], rank: usize) -> Error {
    Error::argument(&name.to_string(), format!("rank {} (shape {shape:?})", shape.len()), format!("rank {rank}"))
}

#[cold]
fn wrong_shape(name: Name, shape: &[i64], expected: &[(&str, usize)]) -> Error {
    let extent = |&(symbol, n): &(&str, usize)| if n == ANY { symbol.into() } else { format!("{symbol}={n}") };
    let want: Vec<String> = expected.iter().map(extent).collect();
    Error::argument(&name.to_string(), format!("shape {shape:?}"), format!("[{}]", want.join(", ")))
}

#[cold]
fn overlapping(name: Name, shape: &[i64], strides: &[i64]) -> Error {
    let found = format!("shape {shape:?} with strides {strides:?} overlaps itself");
    Error::argument(&name.to_string(), found, "an output whose elements are distinct")
}
