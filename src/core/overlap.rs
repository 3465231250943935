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

/// Whether two views, neither empty, share a byte. The answer is exact but for views of such unrelated strides that it would take
/// too long to find: they count as sharing.
///
/// Byte x of `a` is byte y of `b` where Σ sᵢ·xᵢ + Σ tⱼ·(mⱼ − yⱼ) is the distance from a's first byte to b's last one, over the strides s, t of
/// both, with 0 ≤ xᵢ ≤ nᵢ and 0 ≤ yⱼ ≤ mⱼ: a sum of bounded multiples of positive strides.
fn share_bytes(a: &Tensor, b: &Tensor) -> bool {
    let mut sum = Sum { terms: [(0, 0); MOST_TERMS], count: 0, steps: MOST_STEPS };
    let (first, _) = sum.add(a);
    let (_, last) = sum.add(b);
    sum.terms[..sum.count].sort_unstable_by_key(|term| std::cmp::Reverse(term.0));
    sum.reaches(0, last - first)
}

/// Strides of two tensors, and their bytes.
const MOST_TERMS: usize = 2 * MAX_RANK + 1;
/// Multiples that are tried before the answer is taken to be yes.
const MOST_STEPS: u32 = 1 << 14;

/// Positive strides and up to how many times each is taken, in descending order.
struct Sum {
    terms: [(i64, i64); MOST_TERMS],
    count: usize,
    steps: u32,
}

impl Sum {
    /// Adds the strides of a tensor; its first byte and its last.
    fn add(&mut self, t: &Tensor) -> (i64, i64) {
        let element = t.dtype.bytes() as i64;
        let (mut first, mut last) = (t.data() as i64, t.data() as i64 + element - 1);
        self.take(1, element - 1);
        // The stride of a dimension of one may be any number.
        for (&n, &s) in t.shape().iter().zip(t.strides()).filter(|(n, _)| **n > 1) {
            let reach = (n - 1) * s * element;
            *(if s < 0 { &mut first } else { &mut last }) += reach;
            self.take(s.abs() * element, n - 1);
        }
        (first, last)
    }

    fn take(&mut self, stride: i64, times: i64) {
        if stride == 0 || times == 0 {
            return;
        }
        match self.terms[..self.count].iter_mut().find(|term| term.0 == stride) {
            Some(term) => term.1 += times,
            None => {
                self.terms[self.count] = (stride, times);
                self.count += 1;
            }
        }
    }

    /// Whether multiples of the terms from `at` on have this sum, or whether there are too many to try.
    fn reaches(&mut self, at: usize, sum: i64) -> bool {
        let Some((&(stride, times), rest)) = self.terms[at..self.count].split_first() else { return sum == 0 };
        let after: i64 = rest.iter().map(|(stride, times)| stride * times).sum();
        let least = (sum - after + stride - 1).div_euclid(stride).max(0);
        for n in least..=times.min(sum.div_euclid(stride)) {
            if self.steps == 0 || self.reaches(at + 1, sum - n * stride) {
                return true;
            }
            self.steps = self.steps.saturating_sub(1);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum_of(terms: &[(i64, i64)], steps: u32) -> Sum {
        let mut sum = Sum { terms: [(0, 0); MOST_TERMS], count: 0, steps };
        terms.iter().for_each(|&(stride, times)| sum.take(stride, times));
        sum.terms[..sum.count].sort_unstable_by_key(|term| std::cmp::Reverse(term.0));
        sum
    }

    proptest! {
        #[test]
        fn sums_are_reached_that_some_multiples_have(
            terms in prop::collection::vec((1i64..12, 0i64..5), 0..6),
            wanted in -3i64..120,
        ) {
            let mut reached = vec![0];
            for &(stride, times) in &terms {
                reached = reached.iter().flat_map(|&at| (0..=times).map(move |n| at + n * stride)).collect();
            }
            prop_assert_eq!(sum_of(&terms, u32::MAX).reaches(0, wanted), reached.contains(&wanted));
        }
    }

    #[test]
    fn what_takes_too_long_to_find_counts_as_shared() {
        // Even multiples of large unrelated strides, and an odd sum.
        let terms: Vec<_> = (0..10).map(|n| (2 * (1_000_003 + 7919 * n), 1 << 20)).collect();
        assert!(sum_of(&terms, MOST_STEPS).reaches(0, 20_000_000_000_001));
    }
}
