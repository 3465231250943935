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

/// The bytes from the first to the last of one of many tensors.
#[derive(Clone, Copy)]
pub struct Range {
    start: i64,
    end: i64,
    /// The tensor's, and that of one that differs from it in nothing but the address.
    number: u32,
    form: u32,
}

impl Range {
    #[inline(always)]
    pub fn new((start, end): ByteRange, number: usize, form: usize) -> Range {
        Range { start, end, number: number as u32, form: form as u32 }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn meets(&self, (start, end): ByteRange) -> bool {
        self.start < end && start < self.end
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

/// `reject` for many outputs and inputs, with their hulls, beside a few; `tensor` finds one by its number.
pub fn reject_many<'t>(
    (outputs, written): (&mut [Range], &Hull),
    (inputs, read): (&[Range], &Hull),
    few_outputs: &[Range],
    few_inputs: &[Range],
    tensor: impl Fn(u32) -> Tensor<'t>,
) -> Result<()> {
    // Two forms at a distance that was found to keep them apart, as K and V of each layer may be.
    let mut apart = None;
    let mut require_apart = |output: &Range, other: &Range| {
        let geometry = (output.form, other.form, other.start.wrapping_sub(output.start));
        if apart != Some(geometry) && !output.is_empty() && !other.is_empty() {
            let (output, other) = (tensor(output.number), tensor(other.number));
            if share_bytes(&output, &other) {
                return Err(collision(&output, &other));
            }
            apart = Some(geometry);
        }
        Ok(())
    };
    // Most come in the order of their addresses.
    if !written.ascends {
        sort(outputs, &mut require_apart)?;
    }
    // Most inputs lie elsewhere altogether.
    if written.meets((read.start, read.end)) {
        reject_sorted(outputs, inputs, &mut require_apart)?;
    }
    for few in [few_inputs, few_outputs] {
        if few.iter().any(|other| written.meets((other.start, other.end))) {
            reject_sorted(outputs, few, &mut require_apart)?;
        }
    }
    for (i, output) in few_outputs.iter().enumerate().filter(|(_, output)| !output.is_empty()) {
        let many = if read.meets((output.start, output.end)) { inputs } else { &[] };
        for others in [&few_outputs[i + 1..], few_inputs, many] {
            for other in others.iter().filter(|other| other.meets((output.start, output.end))) {
                require_apart(output, other)?;
            }
        }
    }
    Ok(())
}

type Check<'c> = &'c mut dyn FnMut(&Range, &Range) -> Result<()>;

/// Sorts by address, and checks those that follow each other. Then `end` is where all up to a range end, so that ends
/// ascend, too.
#[inline(never)]
fn sort(ranges: &mut [Range], require_apart: Check) -> Result<()> {
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut reach, mut later) = (i64::MIN, ranges);
    while let Some((one, rest)) = later.split_first_mut() {
        for other in rest.iter().take_while(|other| other.start < one.end) {
            let (first, second) = if one.number < other.number { (&*one, other) } else { (other, &*one) };
            require_apart(first, second)?;
        }
        reach = reach.max(one.end);
        (one.end, later) = (reach, rest);
    }
    Ok(())
}

/// Looks for each of the others among sorted outputs.
#[inline(never)]
fn reject_sorted(outputs: &[Range], others: &[Range], require_apart: Check) -> Result<()> {
    let mut at = 0;
    for other in others {
        // The first output that ends past where the other starts: mostly the one found last or the next.
        let is_past = |at: usize| outputs.get(at).is_none_or(|output| output.end > other.start);
        at += !is_past(at) as usize;
        if !is_past(at) || (at > 0 && is_past(at - 1)) {
            at = outputs.partition_point(|output| output.end <= other.start);
        }
        for output in outputs[at..].iter().take_while(|output| output.start < other.end) {
            require_apart(output, other)?;
        }
    }
    Ok(())
}

fn collision(out: &Tensor, other: &Tensor) -> Error {
    Error::argument(&out.name.to_string(), format!("overlaps {}", other.name), "memory of its own")
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
        let mut span = Span { start: t.data as i64, element, dims: [(1, 0); MAX_RANK], rank: 0 };
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
        stride *= n;
        packed
    })
}
