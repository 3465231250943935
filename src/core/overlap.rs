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

/// The range from the lowest to the highest byte of an array of tensors.
#[derive(Clone, Copy)]
pub struct Hull {
    start: i64,
    end: i64,
    /// Every tensor begins past the end of the tensor before it.
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

    /// Adds tensors that [`Template::count_alike`] found alike.
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

/// Whether the hulls alone prove that an array of outputs is apart from itself and from all other tensors, and an array of
/// inputs from the single outputs. In most calls they do.
#[inline(always)]
pub fn are_apart<const O: usize, const I: usize>(
    outputs: &Hull,
    inputs: &Hull,
    single_outputs: &[Option<&Tensor>; O],
    single_inputs: &[Option<&Tensor>; I],
) -> bool {
    let meets = |hull: &Hull, singles: &[Option<&Tensor>]| singles.iter().flatten().any(|t| hull.meets(t.bytes()));
    outputs.ascends
        && !outputs.meets((inputs.start, inputs.end))
        && !meets(outputs, single_outputs)
        && !meets(outputs, single_inputs)
        && !meets(inputs, single_outputs)
}

/// [`reject`] for an array of outputs, an array of inputs, and single tensors: compares them pair by pair. `tensor` finds a
/// member of the outputs (true) or of the inputs by its number.
#[cold]
pub fn reject_arrays<'t>(
    outputs: &[ByteRange],
    inputs: &[ByteRange],
    single_outputs: &[Option<&Tensor>],
    single_inputs: &[Option<&Tensor>],
    tensor: impl Fn(bool, usize) -> Tensor<'t>,
) -> Result<()> {
    // An empty tensor overlaps nothing.
    let meet = |a: &ByteRange, b: &ByteRange| a.0.max(b.0) < a.1.min(b.1);
    for (n, output) in outputs.iter().enumerate() {
        let later = outputs.iter().enumerate().skip(n + 1).map(|(m, other)| (true, m, other));
        let read = inputs.iter().enumerate().map(|(m, other)| (false, m, other));
        for (written, m, _) in later.chain(read).filter(|(.., other)| meet(output, other)) {
            require_apart(Some(&tensor(true, n)), &[Some(&tensor(written, m))])?;
        }
    }
    for single in single_outputs.iter().chain(single_inputs).flatten() {
        for (n, _) in outputs.iter().enumerate().filter(|(_, output)| meet(output, &single.bytes())) {
            require_apart(Some(&tensor(true, n)), &[Some(single)])?;
        }
    }
    for single in single_outputs.iter().flatten() {
        for (n, _) in inputs.iter().enumerate().filter(|(_, input)| meet(input, &single.bytes())) {
            require_apart(Some(single), &[Some(&tensor(false, n))])?;
        }
    }
    Ok(())
}

fn collision(out: &Tensor, other: &Tensor) -> Error {
    Error::argument(&out.name().to_string(), format!("overlaps {}", other.name()), "memory of its own")
}

/// True unless the two views, neither empty, provably share no byte. The answer is exact for views whose outer strides
/// agree, such as slices of one interleaved buffer; for other views it compares byte ranges and may say true too often.
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

    /// The number of bytes from the first to the last, over the dimensions from `level` on.
    fn reach(&self, level: usize) -> i64 {
        self.dims[..self.rank].iter().skip(level).map(|(n, s)| (n - 1) * s).sum::<i64>() + self.element
    }
}

/// Whether the dimensions of `a` and `b` from `level` on, placed at these addresses, share a byte.
fn meet(a: &Span, at_a: i64, b: &Span, at_b: i64, level: usize) -> bool {
    if at_a + a.reach(level) <= at_b || at_b + b.reach(level) <= at_a {
        return false;
    }
    if level >= a.rank || level >= b.rank {
        return true;
    }
    // If both repeat with one period and no row reaches into the next, it suffices to compare a single period: a row of b
    // can meet the row of a in the same period or, if it starts late, the row in the next period.
    let period = a.dims[level].1;
    if b.dims[level].1 != period || a.reach(level + 1) > period || b.reach(level + 1) > period {
        return true;
    }
    let shift = (at_b - at_a).rem_euclid(period);
    meet(a, 0, b, shift, level + 1) || meet(a, 0, b, shift - period, level + 1)
}
