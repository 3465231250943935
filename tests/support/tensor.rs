//! Tensors of any type and layout in memory of their own, on any backend.
//!
//! Memory is poisoned before it is filled: whatever lies between the elements of an input is garbage, and what a call
//! wrote into an output can be told from what it left alone.

use super::array::{Array, indices};
use super::backend::{Backend, Memory, Place};
use super::rng::Rng;
use half::{bf16, f16};
use std::ffi::c_void;
use std::sync::Arc;
use vanward::abi::*;
use vanward::capi::*;

/// DLPack's type code and bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DType {
    pub code: u8,
    pub bits: u8,
}

pub const F32: DType = DType { code: 2, bits: 32 };
pub const F16: DType = DType { code: 2, bits: 16 };
pub const BF16: DType = DType { code: 4, bits: 16 };
pub const I32: DType = DType { code: 0, bits: 32 };
pub const I64: DType = DType { code: 0, bits: 64 };
pub const U8: DType = DType { code: 1, bits: 8 };
pub const U32: DType = DType { code: 1, bits: 32 };
pub const U64: DType = DType { code: 1, bits: 64 };
pub const BOOL: DType = DType { code: 6, bits: 8 };
pub const F8E4M3: DType = DType { code: 10, bits: 8 };
pub const F8E5M2: DType = DType { code: 12, bits: 8 };

impl DType {
    pub fn bytes(self) -> usize {
        self.bits as usize / 8
    }

    /// Relative spacing of normal numbers.
    pub fn epsilon(self) -> f64 {
        match self {
            F32 => 2f64.powi(-23),
            F16 => 2f64.powi(-10),
            BF16 => 2f64.powi(-7),
            F8E4M3 => 2f64.powi(-3),
            F8E5M2 => 2f64.powi(-2),
            other => panic!("{other:?} is no float"),
        }
    }

    /// Largest error of rounding a number near `x` to this type; float16 has no finer steps than 2^-24.
    pub fn rounding(self, x: f64) -> f64 {
        let finest = if self == F16 { 2f64.powi(-25) } else { 0.0 };
        (self.epsilon() / 2.0 * x.abs()).max(finest)
    }

    /// `x` rounded to this float type.
    pub fn round(self, x: f64) -> f64 {
        let mut bytes = [0; 4];
        self.encode_float(x, &mut bytes[..self.bytes()]);
        self.decode_float(&bytes[..self.bytes()])
    }

    pub fn encode_float(self, x: f64, to: &mut [u8]) {
        match self {
            F32 => to.copy_from_slice(&(x as f32).to_le_bytes()),
            // Not from_f64, which drops the low bits before it rounds: a float32 just past a tie would go the wrong way.
            F16 => to.copy_from_slice(&f16::from_f32(x as f32).to_le_bytes()),
            BF16 => to.copy_from_slice(&bf16::from_f32(x as f32).to_le_bytes()),
            F8E4M3 | F8E5M2 => to[0] = self.nearest_code(x),
            other => panic!("{other:?} is no float"),
        }
    }

    pub fn decode_float(self, bytes: &[u8]) -> f64 {
        match self {
            F32 => f32::from_le_bytes(bytes.try_into().unwrap()) as f64,
            F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
            BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
            F8E4M3 => float8(bytes[0], 3, 7, 0x7f),
            F8E5M2 => float8(bytes[0], 2, 15, 0x7d),
            other => panic!("{other:?} is no float"),
        }
    }

    /// The 8-bit float next to `x`; NaN for NaN.
    fn nearest_code(self, x: f64) -> u8 {
        if x.is_nan() {
            return 0x7f;
        }
        // Codes of one sign ascend with their values.
        let value = |code: u8| self.decode_float(&[code]);
        let (mut low, mut high) = (0u8, if self == F8E4M3 { 0x7e } else { 0x7b });
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if value(middle) <= x.abs() { low = middle } else { high = middle }
        }
        let nearest = if x.abs() - value(low) <= value(high) - x.abs() { low } else { high };
        nearest | if x < 0.0 { 0x80 } else { 0 }
    }

    fn encode_int(self, x: i64, to: &mut [u8]) {
        to.copy_from_slice(&x.to_le_bytes()[..self.bytes()]);
    }

    fn decode_int(self, bytes: &[u8]) -> i64 {
        match self {
            I32 => i32::from_le_bytes(bytes.try_into().unwrap()) as i64,
            I64 => i64::from_le_bytes(bytes.try_into().unwrap()),
            U32 => u32::from_le_bytes(bytes.try_into().unwrap()) as i64,
            _ => bytes[0] as i64,
        }
    }
}

/// Value of an 8-bit float: NaN from a code on; of e5m2 0x7c is infinity.
fn float8(code: u8, mantissa_bits: i32, bias: i32, nan: u8) -> f64 {
    let (size, sign) = (code & 0x7f, if code & 0x80 == 0 { 1.0 } else { -1.0 });
    let (exponent, mantissa) = ((size >> mantissa_bits) as i32, (size & ((1 << mantissa_bits) - 1)) as f64);
    let fraction = mantissa * power_of_two(-mantissa_bits);
    sign * match exponent {
        _ if size >= nan => f64::NAN,
        31 => f64::INFINITY,
        0 => fraction * power_of_two(1 - bias),
        _ => (1.0 + fraction) * power_of_two(exponent - bias),
    }
}

/// From its bits, since powi multiplies in a loop.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// The bytes of an element, which take no memory from the heap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes {
    bytes: [u8; 16],
    width: usize,
}

impl Bytes {
    fn of(element: &[u8]) -> Bytes {
        let mut bytes = [0; 16];
        bytes[..element.len()].copy_from_slice(element);
        Bytes { bytes, width: element.len() }
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.width]
    }
}

impl std::borrow::Borrow<[u8]> for Bytes {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl<const N: usize> PartialEq<[u8; N]> for Bytes {
    fn eq(&self, other: &[u8; N]) -> bool {
        **self == *other
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, to: &mut std::fmt::Formatter) -> std::fmt::Result {
        (**self).fmt(to)
    }
}

/// As float a huge negative number, as integer a negative one: a call that reads it gives itself away.
const POISON: u8 = 0xfb;

/// How a shape lies in memory. The default is row major without gaps.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Dimensions from outermost to innermost; empty: as they come. [0, 2, 1, 3] of [pages, P, Hk, D] is HND.
    pub order: Vec<usize>,
    /// Unused elements after each run of a dimension.
    pub gap: usize,
    /// Unused elements before all others.
    pub lead: usize,
    /// Dimensions with a negative stride.
    pub reversed: Vec<usize>,
    /// Dimensions with stride 0.
    pub expanded: Vec<usize>,
}

impl Layout {
    pub fn ordered(order: &[usize]) -> Layout {
        Layout { order: order.to_vec(), ..Layout::default() }
    }

    /// Any layout in which elements are distinct; often the plain one.
    pub fn random(rng: &mut Rng, rank: usize) -> Layout {
        if rng.one_in(3) {
            return Layout::default();
        }
        let mut order: Vec<usize> = (0..rank).collect();
        if rng.one_in(2) {
            rng.shuffle(&mut order);
        }
        let reversed = (0..rank).filter(|_| rng.one_in(6)).collect();
        Layout { order, gap: rng.pick(&[0, 0, 1, 3]), lead: rng.pick(&[0, 1, 5, 8]), reversed, expanded: vec![] }
    }

    /// Any layout whose last dimension is contiguous.
    pub fn random_rows(rng: &mut Rng, rank: usize) -> Layout {
        let mut order: Vec<usize> = (0..rank).collect();
        if rng.one_in(2) {
            rng.shuffle(&mut order[..rank - 1]);
        }
        Layout { order, gap: rng.pick(&[0, 0, 1, 8]), lead: rng.pick(&[0, 0, 3]), ..Layout::default() }
    }

    /// Any layout whose rows, of a multiple of 16 bytes, are contiguous and begin on 16 bytes.
    pub fn random_aligned(rng: &mut Rng, rank: usize) -> Layout {
        let mut order: Vec<usize> = (0..rank).collect();
        if rng.one_in(2) {
            rng.shuffle(&mut order[..rank - 1]);
        }
        Layout { order, gap: rng.pick(&[0, 16]), lead: rng.pick(&[0, 16]), ..Layout::default() }
    }

    /// Strides, and elements before element 0 and in all.
    pub fn place(&self, shape: &[usize]) -> (Vec<i64>, usize, usize) {
        let natural: Vec<usize> = (0..shape.len()).collect();
        let order = if self.order.is_empty() { &natural } else { &self.order };
        let mut strides = vec![0; shape.len()];
        let (mut base, mut extent) = (self.lead, 1);
        for &d in order.iter().rev() {
            if self.expanded.contains(&d) {
                continue;
            }
            strides[d] = extent as i64;
            if self.reversed.contains(&d) && shape[d] > 0 {
                base += (shape[d] - 1) * extent;
                strides[d] = -strides[d];
            }
            extent = extent * shape[d].max(1) + self.gap;
        }
        (strides, base, self.lead + extent)
    }
}

pub struct Tensor<'b> {
    backend: &'b Backend,
    place: Place,
    memory: Arc<Memory<'b>>,
    /// The bytes before any call.
    before: Arc<Vec<u8>>,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub strides: Vec<i64>,
    base: usize,
}

/// A tensor that is not given.
pub fn absent() -> vwd_tensor {
    // SAFETY: plain data, valid when zero.
    unsafe { std::mem::zeroed() }
}

/// A tensor of the caller's memory on the CPU, with the code of its elements' type; its strides are in elements.
pub fn strided<T>(data: &[T], code: u8, shape: &[usize], strides: &[usize]) -> vwd_tensor {
    let wide = |of: &[usize]| std::array::from_fn(|d| of.get(d).map_or(0, |&n| n as i64));
    vwd_tensor {
        data: data.as_ptr().cast_mut().cast(),
        device_type: 1,
        device_id: 0,
        dtype_code: code,
        dtype_bits: 8 * size_of::<T>() as u8,
        lanes: 1,
        ndim: shape.len() as i32,
        shape: wide(shape),
        strides: wide(strides),
    }
}

/// The same, packed in C order.
pub fn packed<T>(data: &[T], code: u8, shape: &[usize]) -> vwd_tensor {
    let strides: Vec<usize> = (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect();
    strided(data, code, shape, &strides)
}

/// A tensor without an element, of extents that would take years to walk.
pub fn boundless(dtype: DType, shape: &[i64]) -> vwd_tensor {
    let mut t = vwd_tensor { device_type: 1, dtype_code: dtype.code, dtype_bits: dtype.bits, ..absent() };
    t.ndim = shape.len() as i32;
    t.shape[..shape.len()].copy_from_slice(shape);
    t.data = std::ptr::dangling_mut::<u64>().cast();
    t
}

impl<'b> Tensor<'b> {
    /// A poisoned tensor: an output.
    pub fn poisoned(backend: &'b Backend, dtype: DType, shape: &[usize], layout: &Layout) -> Tensor<'b> {
        let (strides, base, extent) = layout.place(shape);
        Tensor::of_bytes(backend, dtype, shape, strides, base, vec![POISON; extent * dtype.bytes()])
    }

    pub fn floats(backend: &'b Backend, dtype: DType, values: &Array<f64>, layout: &Layout) -> Tensor<'b> {
        Tensor::filled_by(backend, dtype, &values.shape, layout, |at, to| dtype.encode_float(values.data[at], to))
    }

    pub fn ints(backend: &'b Backend, dtype: DType, values: &Array<i64>, layout: &Layout) -> Tensor<'b> {
        Tensor::filled_by(backend, dtype, &values.shape, layout, |at, to| dtype.encode_int(values.data[at], to))
    }

    /// Elements of any width, from their bytes one after the other.
    pub fn raw(backend: &'b Backend, dtype: DType, shape: &[usize], bytes: &[u8], layout: &Layout) -> Tensor<'b> {
        let width = dtype.bytes();
        Tensor::filled_by(backend, dtype, shape, layout, |at, to| to.copy_from_slice(&bytes[at * width..][..width]))
    }

    fn filled_by(
        backend: &'b Backend,
        dtype: DType,
        shape: &[usize],
        layout: &Layout,
        write: impl Fn(usize, &mut [u8]),
    ) -> Tensor<'b> {
        let (strides, base, extent) = layout.place(shape);
        let width = dtype.bytes();
        let mut bytes = vec![POISON; extent * width];
        for (at, offset) in offsets(shape, &strides, base).enumerate() {
            write(at, &mut bytes[offset * width..][..width]);
        }
        Tensor::of_bytes(backend, dtype, shape, strides, base, bytes)
    }

    fn of_bytes(
        backend: &'b Backend,
        dtype: DType,
        shape: &[usize],
        strides: Vec<i64>,
        base: usize,
        bytes: Vec<u8>,
    ) -> Tensor<'b> {
        let memory = Arc::new(backend.place(&bytes));
        let (place, shape) = (Place::Session, shape.to_vec());
        Tensor { backend, place, memory, before: Arc::new(bytes), dtype, shape, strides, base }
    }

    /// The same in memory of that kind.
    pub fn moved_to(self, place: Place) -> Tensor<'b> {
        let memory = Arc::new(self.backend.place_in(place, &self.before));
        Tensor { place, memory, ..self }
    }

    /// The same, where its first dimension is 1, as that of so many that share the memory.
    pub fn shared_by(self, count: usize) -> Tensor<'b> {
        if self.shape[0] != 1 || count == 1 {
            return self;
        }
        let (mut shape, mut strides) = (self.shape.clone(), self.strides.clone());
        (shape[0], strides[0]) = (count, 0);
        Tensor { shape, strides, ..self }
    }

    /// The part at `index` of dimension `d`, in the same memory: K of a buffer that holds K and V side by side.
    pub fn part(&self, d: usize, index: usize) -> Tensor<'b> {
        let (mut shape, mut strides) = (self.shape.clone(), self.strides.clone());
        shape.remove(d);
        let base = self.base as i64 + strides.remove(d) * index as i64;
        let (memory, before) = (self.memory.clone(), self.before.clone());
        Tensor { memory, before, shape, strides, base: base as usize, ..*self }
    }

    /// The same view of the same memory.
    pub fn alias(&self) -> Tensor<'b> {
        let (memory, before) = (self.memory.clone(), self.before.clone());
        Tensor { memory, before, shape: self.shape.clone(), strides: self.strides.clone(), ..*self }
    }

    pub fn c(&self) -> vwd_tensor {
        let (device_type, device_id) = self.place.device(self.backend);
        let mut shape = [0; 5];
        let mut strides = [0; 5];
        for d in 0..self.shape.len() {
            (shape[d], strides[d]) = (self.shape[d] as i64, self.strides[d]);
        }
        let data = self.memory.address() + self.base * self.dtype.bytes();
        vwd_tensor {
            data: data as *mut c_void,
            device_type,
            device_id,
            dtype_code: self.dtype.code,
            dtype_bits: self.dtype.bits,
            lanes: 1,
            ndim: self.shape.len() as i32,
            shape,
            strides,
        }
    }

    /// Gives a contiguous tensor other contents, between calls.
    pub fn refill_ints(&self, values: &Array<i64>) {
        assert_eq!(values.shape, self.shape);
        self.refill(|at, to| self.dtype.encode_int(values.data[at], to));
    }

    /// As [`Tensor::refill_ints`].
    pub fn refill_floats(&self, values: &Array<f64>) {
        assert_eq!(values.shape, self.shape);
        self.refill(|at, to| self.dtype.encode_float(values.data[at], to));
    }

    /// The bytes of so many integers one after the other, for [`Tensor::write`].
    pub fn encode(&self, values: &[i64]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * self.dtype.bytes()];
        bytes.chunks_exact_mut(self.dtype.bytes()).zip(values).for_each(|(to, &x)| self.dtype.encode_int(x, to));
        bytes
    }

    /// The integers of bytes that [`Tensor::read_memory`] gave of a contiguous tensor.
    pub fn decode(&self, bytes: &[u8]) -> Vec<i64> {
        bytes.chunks_exact(self.dtype.bytes()).map(|bytes| self.dtype.decode_int(bytes)).collect()
    }

    /// Replaces the first bytes of its memory.
    pub fn write(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.memory.write(bytes);
        }
    }

    fn refill(&self, write: impl Fn(usize, &mut [u8])) {
        let width = self.dtype.bytes();
        let mut bytes = vec![0; self.shape.iter().product::<usize>() * width];
        bytes.chunks_exact_mut(width).enumerate().for_each(|(at, to)| write(at, to));
        assert_eq!(bytes.len() + self.base * width, self.before.len(), "gaps");
        self.memory.write(&bytes);
    }

    /// Copies the bytes of a tensor that lies in memory as this one does.
    pub fn copy_from(&self, other: &Tensor) {
        self.memory.write(&other.memory.read());
    }

    /// Copies index `from` of the first dimension of a contiguous tensor to index `to`, such as a page.
    pub fn copy_within(&self, from: usize, to: usize) {
        let mut bytes = self.memory.read();
        let size = bytes.len() / self.shape[0];
        bytes.copy_within(from * size..(from + 1) * size, to * size);
        self.memory.write(&bytes);
    }

    /// Makes it as it was before any call.
    pub fn repoison(&self) {
        self.memory.write(&self.before);
    }

    // --- reading back --------------------------------------------------------------------------------------------

    fn elements<T: Clone>(&self, decode: impl Fn(&[u8]) -> T) -> Array<T> {
        let (bytes, width) = (self.memory.read(), self.dtype.bytes());
        let data = offsets(&self.shape, &self.strides, self.base).map(|o| decode(&bytes[o * width..][..width]));
        Array::new(&self.shape, data.collect())
    }

    pub fn read_floats(&self) -> Array<f64> {
        self.elements(|bytes| self.dtype.decode_float(bytes))
    }

    pub fn read_ints(&self) -> Array<i64> {
        self.elements(|bytes| self.dtype.decode_int(bytes))
    }

    pub fn read_raw(&self) -> Array<Bytes> {
        self.elements(Bytes::of)
    }

    /// The bytes of the whole allocation, gaps included.
    pub fn read_memory(&self) -> Vec<u8> {
        self.memory.read()
    }

    /// Not one byte of the memory was written.
    #[track_caller]
    pub fn assert_untouched(&self, name: &str) {
        self.assert_written(name, |_| false);
    }

    /// Nothing but the elements at which `promised` holds was written.
    #[track_caller]
    pub fn assert_written(&self, name: &str, promised: impl Fn(&[usize]) -> bool) {
        let (mut now, width) = (self.memory.read(), self.dtype.bytes());
        for (index, offset) in indices(&self.shape).zip(offsets(&self.shape, &self.strides, self.base)) {
            let element = offset * width..(offset + 1) * width;
            if promised(&index) {
                now[element.clone()].copy_from_slice(&self.before[element]);
            } else {
                assert_eq!(now[element.clone()], self.before[element], "{name}{index:?} was written");
            }
        }
        assert!(now == *self.before, "{name}: memory between its elements was written");
    }
}

/// Offset of every element, in row-major order.
fn offsets<'a>(shape: &'a [usize], strides: &'a [i64], base: usize) -> impl Iterator<Item = usize> + use<'a> {
    let mut index = vec![0; shape.len()];
    let mut offset = base as i64;
    (0..shape.iter().product::<usize>()).map(move |_| {
        let here = offset as usize;
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            offset += strides[d];
            if index[d] < shape[d] {
                break;
            }
            offset -= strides[d] * shape[d] as i64;
            index[d] = 0;
        }
        here
    })
}
