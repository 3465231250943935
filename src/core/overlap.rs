//! Do tensors share memory? Outputs must not overlap inputs, each other or themselves; interleaved views of one buffer
//! (K and V side by side in each row) are allowed.

use super::status::{Error, Result};
use super::tensor::{MAX_RANK, Tensor};

/// Fails when an output shares bytes with an input or with another output.
pub fn reject(outputs: &[Option<&Tensor>], inputs: &[Option<&Tensor>]) -> Result<()> {
    let outputs_given = || outputs.iter().flatten();
    for (i, out) in outputs_given().enumerate() {
        for other in outputs_given().skip(i + 1).chain(inputs.iter().flatten()) {
            if overlaps(out, other) {
                return Err(collision(out, other));
            }
        }
    }
    Ok(())
}

/// `reject` for many tensors, of which those numbered below `outputs` are outputs: sorts their byte ranges, so that only
/// neighbours are compared.
pub fn reject_many(outputs: usize, ranges: &mut [Range], tensor: impl Fn(usize) -> Tensor) -> Result<()> {
    ranges.sort_unstable();
    for (i, one) in ranges.iter().enumerate() {
        for other in ranges[i + 1..].iter().take_while(|other| other.start < one.end) {
            let (first, second) = (one.index.min(other.index) as usize, one.index.max(other.index) as usize);
            if first < outputs && other.start < other.end && share_bytes(&tensor(first), &tensor(second)) {
                return Err(collision(&tensor(first), &tensor(second)));
            }
        }
    }
    Ok(())
}

/// The bytes from the first to the last of one tensor, and the tensor's number.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    start: i64,
    end: i64,
    index: u32,
}

impl Range {
    pub fn of(t: &Tensor, index: usize) -> Range {
        let (start, end) = t.bytes();
        Range { start, end, index: index as u32 }
    }
}

fn collision(out: &Tensor, other: &Tensor) -> Error {
    Error::argument(&out.name.to_string(), format!("overlaps {}", other.name), "memory of its own")
}

/// True unless the two views provably share no byte. Exact for views whose outer strides agree, such as slices of one
/// interleaved buffer; conservative (byte ranges) otherwise.
fn overlaps(a: &Tensor, b: &Tensor) -> bool {
    let ((a_start, a_end), (b_start, b_end)) = (a.bytes(), b.bytes());
    if a_end <= b_start || b_end <= a_start || a_start == a_end || b_start == b_end {
        return false;
    }
    share_bytes(a, b)
}

/// `overlaps` for views whose byte ranges do.
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
    if t.count() == 0 || is_packed(t) {
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
