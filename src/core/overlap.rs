//! Do tensors share memory? Outputs must not overlap inputs, each other or themselves; interleaved views of one buffer
//! (K and V side by side in each row) are allowed.

use super::status::{Error, Result};
use super::tensor::{ByteRange, MAX_RANK, Template, Tensor};
use crate::abi::vwd_tensor;

/// Fails when an output shares bytes with an input or with another output.
#[inline]
pub fn reject<const O: usize, const I: usize>(
    outputs: &[Option<&Tensor>; O],
    inputs: &[Option<&Tensor>; I],
) -> Result<()> {
    let bytes = |t: Option<&Tensor>| t.map_or((0, 0), Tensor::bytes);
    let written: [ByteRange; O] = std::array::from_fn(|i| bytes(outputs[i]));
    let read: [ByteRange; I] = std::array::from_fn(|i| bytes(inputs[i]));
    for (i, &(start, end)) in written.iter().enumerate().filter(|(_, bytes)| bytes.0 < bytes.1) {
        let meets = |other: &ByteRange| other.0 < end && start < other.1;
        if written[i + 1..].iter().any(meets) || read.iter().any(meets) {
            require_apart(outputs[i], &outputs[i + 1..])?;
            require_apart(outputs[i], inputs)?;
        }
    }
    Ok(())
}

#[cold]
fn require_apart(output: Option<&Tensor>, others: &[Option<&Tensor>]) -> Result<()> {
    let Some(output) = output else { return Ok(()) };
    match others.iter().flatten().find(|other| other.count() > 0 && share_bytes(output, other)) {
        Some(other) => Err(collision(output, other)),
        None => Ok(()),
    }
}

/// The bytes from the first to the last of many tensors.
#[derive(Clone, Copy)]
pub struct Hull {
    start: i64,
    end: i64,
    /// Each begins past the end of the one before.
    ascends: bool,
}

impl Hull {
    pub const NONE: Hull = Hull { start: i64::MAX, end: i64::MIN, ascends: true };

    #[inline(always)]
    fn add(&mut self, (start, end): ByteRange) {
        self.ascends &= self.end <= start;
        self.start = self.start.min(start);
        self.end = self.end.max(end);
    }

    /// Adds tensors that are alike.
    #[inline(always)]
    pub fn add_alike(&mut self, template: &Template, tensors: &[vwd_tensor]) {
        match tensors {
            [first, .., last] if template.ascend(tensors) => {
                self.add(template.bytes(first));
                self.add(template.bytes(last));
            }
            _ => tensors.iter().for_each(|t| self.add(template.bytes(t))),
        }
    }

    #[inline(always)]
    fn meets(&self, (start, end): ByteRange) -> bool {
        self.start < end && start < self.end
    }
}

/// Whether many outputs lie apart from each other and from all else, and many inputs from the few outputs: seen from their
/// hulls alone. So most do.
#[inline(always)]
pub fn are_apart<const O: usize, const I: usize>(
    outputs: &Hull,
    inputs: &Hull,
    few_outputs: &[Option<&Tensor>; O],
    few_inputs: &[Option<&Tensor>; I],
) -> bool {
    let meets = |hull: &Hull, few: &[Option<&Tensor>]| few.iter().flatten().any(|t| hull.meets(t.bytes()));
    outputs.ascends
        && !outputs.meets((inputs.start, inputs.end))
        && !meets(outputs, few_outputs)
        && !meets(outputs, few_inputs)
        && !meets(inputs, few_outputs)
}

/// `reject` for many outputs and inputs beside a few, pair by pair. `tensor` finds an output (true) or an input by its number.
#[cold]
pub fn reject_many<'t>(
    outputs: &[ByteRange],
    inputs: &[ByteRange],
    few_outputs: &[Option<&Tensor>],
    few_inputs: &[Option<&Tensor>],
    tensor: impl Fn(bool, usize) -> Tensor<'t>,
) -> Result<()> {
    // An empty tensor meets nothing.
    let meet = |a: &ByteRange, b: &ByteRange| a.0.max(b.0) < a.1.min(b.1);
    for (n, output) in outputs.iter().enumerate() {
        let later = outputs.iter().enumerate().skip(n + 1).map(|(m, other)| (true, m, other));
        let read = inputs.iter().enumerate().map(|(m, other)| (false, m, other));
        for (written, m, _) in later.chain(read).filter(|(.., other)| meet(output, other)) {
            require_apart(Some(&tensor(true, n)), &[Some(&tensor(written, m))])?;
        }
    }
    for few in few_outputs.iter().chain(few_inputs).flatten() {
        for (n, _) in outputs.iter().enumerate().filter(|(_, output)| meet(output, &few.bytes())) {
            require_apart(Some(&tensor(true, n)), &[Some(few)])?;
        }
    }
    for few in few_outputs.iter().flatten() {
        for (n, _) in inputs.iter().enumerate().filter(|(_, input)| meet(input, &few.bytes())) {
            require_apart(Some(few), &[Some(&tensor(false, n))])?;
        }
    }
    Ok(())
}

fn collision(out: &Tensor, other: &Tensor) -> Error {
    Error::argument(&out.name().to_string(), format!("overlaps {}", other.name()), "memory of its own")
}

/// True unless the two views, neither empty, provably share no byte. Exact for views whose outer strides agree, such as
/// slices of one interleaved buffer; conservative (byte ranges) otherwise.
fn share_bytes(a: &Tensor, b: &Tensor) -> bool {
    let (a, b) = (Span::of(a), Span::of(b));
    meet(&a, a.start, &b, b.start, 0)
}

/// A strided set of bytes: start address, and (extent, byte stride) per dimension in descending stride.
struct Span {
    start: i64,
    element: i64,
    dims: [(i64, i64); MAX_RANK],
    rank: usize,
}

impl Span {
    fn of(t: &Tensor) -> Span {
        let element = t.dtype.bytes() as i64;
        let mut span = Span { start: t.data() as i64, element, dims: [(1, 0); MAX_RANK], rank: 0 };
        for (&n, &s) in t.shape().iter().zip(t.strides()) {
            if s < 0 {
                span.start += (n - 1) * s * element;
            }
            if n > 1 && s != 0 {
                span.dims[span.rank] = (n, s.abs() * element);
                span.rank += 1;
            }
        }
        span.dims[..span.rank].sort_unstable_by_key(|d| std::cmp::Reverse(d.1));
        span
    }

    /// Bytes from the first to the last, over the dimensions from `level` on.
    fn reach(&self, level: usize) -> i64 {
        self.dims[..self.rank].iter().skip(level).map(|(n, s)| (n - 1) * s).sum::<i64>() + self.element
    }
}

/// Do the parts of `a` and `b` below `level`, placed at these addresses, meet?
fn meet(a: &Span, at_a: i64, b: &Span, at_b: i64, level: usize) -> bool {
    if at_a + a.reach(level) <= at_b || at_b + b.reach(level) <= at_a {
        return false;
    }
    if level >= a.rank || level >= b.rank {
        return true;
    }
    // Where both repeat with one period and no row spills into the next, compare a single period: b's row can meet a's
    // row of the same period or, having started late, of the next one.
    let period = a.dims[level].1;
    if b.dims[level].1 != period || a.reach(level + 1) > period || b.reach(level + 1) > period {
        return true;
    }
    let shift = (at_b - at_a).rem_euclid(period);
    meet(a, 0, b, shift, level + 1) || meet(a, 0, b, shift - period, level + 1)
}

/// True when distinct indices address distinct bytes: each stride clears everything the smaller strides reach.
#[inline]
pub fn is_injective(shape: &[i64], strides: &[i64]) -> bool {
    is_packed(shape, strides) || shape.contains(&0) || clears(shape, strides)
}

fn clears(shape: &[i64], strides: &[i64]) -> bool {
    let mut dims = [(0i64, 1i64); MAX_RANK];
    for (dim, (&n, &s)) in dims.iter_mut().zip(shape.iter().zip(strides)) {
        if n > 1 {
            *dim = (s.abs(), n);
        }
    }
    dims.sort_unstable();
    let mut reach = 0;
    dims.into_iter().filter(|&(_, n)| n > 1).all(|(stride, n)| {
        let clear = stride > reach;
        reach += stride * (n - 1);
        clear
    })
}

/// Row major without gaps, as most are.
#[inline]
fn is_packed(shape: &[i64], strides: &[i64]) -> bool {
    let mut stride = 1;
    shape.iter().zip(strides).rev().all(|(&n, &s)| {
        let packed = s == stride;
        // Overflows only where there are no elements, of which any answer is true.
        stride = stride.wrapping_mul(n);
        packed
    })
}
