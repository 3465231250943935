//! Do tensors share memory? Outputs must not overlap inputs, each other or themselves; interleaved views of one buffer
//! (K and V side by side in each row) are allowed.

use super::status::{Error, Result};
use super::tensor::{ByteRange, MAX_RANK, Tensor};

/// Fails when an output shares bytes with an input or with another output.
#[inline]
pub fn reject<const O: usize, const I: usize>(
    outputs: &[Option<&Tensor>; O],
    inputs: &[Option<&Tensor>; I],
) -> Result<()> {
    let bytes = |t: &Option<&Tensor>| t.map_or((0, 0), Tensor::bytes);
    let (written, read) = (outputs.each_ref().map(bytes), inputs.each_ref().map(bytes));
    let meet = |a: ByteRange, b: ByteRange| a.0.max(b.0) < a.1.min(b.1);
    for (i, &out) in written.iter().enumerate() {
        for (j, &other) in written.iter().enumerate().skip(i + 1) {
            if meet(out, other) {
                require_apart(outputs[i], outputs[j])?;
            }
        }
        for (j, &input) in read.iter().enumerate() {
            if meet(out, input) {
                require_apart(outputs[i], inputs[j])?;
            }
        }
    }
    Ok(())
}

#[cold]
fn require_apart(out: Option<&Tensor>, other: Option<&Tensor>) -> Result<()> {
    match out.zip(other) {
        Some((out, other)) if share_bytes(out, other) => Err(collision(out, other)),
        _ => Ok(()),
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

/// `reject` for many outputs and inputs, beside a few that have been through it; `tensor` finds one by its number.
pub fn reject_many<'t>(
    outputs: &mut [Range],
    inputs: &[Range],
    few_outputs: &[Range],
    few_inputs: &[Range],
    tensor: impl Fn(u32) -> Tensor<'t>,
) -> Result<()> {
    // Two forms at a distance that was found to keep them apart, as K and V of each layer may be.
    let mut apart = None;
    let mut require_apart = |output: &Range, other: &Range| {
        let geometry = (output.form, other.form, other.start - output.start);
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
    if !outputs.is_sorted_by(|one, next| one.end <= next.start) {
        outputs.sort_unstable_by_key(|output| output.start);
        let mut reach = i64::MIN;
        for i in 0..outputs.len() {
            let (one, later) = (outputs[i], &outputs[i + 1..]);
            for other in later.iter().take_while(|other| other.start < one.end) {
                let (first, second) = if one.number < other.number { (&one, other) } else { (other, &one) };
                require_apart(first, second)?;
            }
            // From here on where all up to this one end, so that ends ascend, too.
            reach = reach.max(one.end);
            outputs[i].end = reach;
        }
    }
    let (Some(first), Some(last)) = (outputs.first(), outputs.last()) else { return Ok(()) };
    let hull = (first.start, last.end);
    let mut at = 0;
    for other in inputs.iter().chain(few_inputs).chain(few_outputs).filter(|other| other.meets(hull)) {
        // The first output that ends past where the other starts: mostly the one found last or the next.
        let is_past = |at: usize| at == outputs.len() || outputs[at].end > other.start;
        at += !is_past(at) as usize;
        if !is_past(at) || (at > 0 && is_past(at - 1)) {
            at = outputs.partition_point(|output| output.end <= other.start);
        }
        for output in outputs[at..].iter().take_while(|output| output.start < other.end) {
            require_apart(output, other)?;
        }
    }
    let few_outputs = || few_outputs.iter().filter(|output| !output.is_empty());
    let hull =
        few_outputs().fold((i64::MAX, i64::MIN), |hull, output| (hull.0.min(output.start), hull.1.max(output.end)));
    for input in inputs.iter().filter(|input| input.meets(hull)) {
        for output in few_outputs().filter(|output| input.meets((output.start, output.end))) {
            require_apart(output, input)?;
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
pub fn is_injective(t: &Tensor) -> bool {
    if is_packed(t) || t.count() == 0 {
        return true;
    }
    let mut dims = [(0i64, 1i64); MAX_RANK];
    for (dim, (&n, &s)) in dims.iter_mut().zip(t.shape().iter().zip(t.strides())) {
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
fn is_packed(t: &Tensor) -> bool {
    let mut stride = 1;
    t.shape().iter().zip(t.strides()).rev().all(|(&n, &s)| {
        let packed = s == stride;
        stride *= n;
        packed
    })
}
