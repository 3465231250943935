//! Reads contents in host memory.

use super::{At, Finding, Is, MOST_DIMS, Number, Rule, Span};
use crate::core::tensor::Tensor;
use std::collections::HashMap;

/// The first element that breaks the rule.
///
/// # Safety
/// The op's caller keeps the rule's tensors valid, and they lie in host memory.
pub unsafe fn find(rule: &Rule) -> Option<Finding> {
    let shape = rule.shape();
    let mut seen = HashMap::new();
    let mut at: At = [0; MOST_DIMS];
    let mut is_inside = !shape.contains(&0);
    while is_inside {
        // SAFETY: `at` is inside the shape; the rest the caller says.
        let is_past = |span: &Span| unsafe {
            let along = at[span.along] as i64;
            along >= number(&span.to, at) || (rule.repeats(span.along) && along > number(&span.from, at))
        };
        if let Some(span) = rule.span.as_ref().filter(|span| is_past(span)) {
            is_inside = advance(&mut at, &shape, span.along);
            continue;
        }
        let element = at.iter().zip(shape).fold(0, |element, (&i, n)| element * n + i);
        // SAFETY: as above.
        if let Some((value, other)) = unsafe { broken(rule, at, element, &mut seen) } {
            return Some(Finding { element, value, other });
        }
        is_inside = advance(&mut at, &shape, MOST_DIMS);
    }
    None
}

/// Goes to the next index whose first `dims` coordinates differ; false if there is none.
fn advance(at: &mut At, shape: &At, dims: usize) -> bool {
    at[dims..].fill(0);
    for d in (0..dims).rev() {
        at[d] += 1;
        if at[d] < shape[d] {
            return true;
        }
        at[d] = 0;
    }
    false
}

/// The element's value, and what it was compared with, where it breaks the rule. `seen` has the element of each earlier value
/// of a rule of distinct elements.
///
/// # Safety
/// The conditions of [`find`] hold, and `at` is an index before the end of the rule's span.
unsafe fn broken(rule: &Rule, at: At, element: usize, seen: &mut HashMap<i32, usize>) -> Option<(i64, i64)> {
    // SAFETY: the caller says that all tensors are valid, and that `at` is inside the shape.
    unsafe {
        let is_before = |span: &Span| (at[span.along] as i64) < number(&span.from, at);
        if rule.span.as_ref().is_some_and(is_before) || rule.applies.iter().any(|n| number(n, at) <= 0) {
            return None;
        }
        let integer = |at: At| rule.tensor.get::<i32, MOST_DIMS>(at);
        let float = || rule.tensor.get::<f32, MOST_DIMS>(at);
        let unless = |holds: bool, x: f32| (!holds).then_some((x.to_bits() as i64, 0));
        match rule.is {
            Is::Within { least, below } => {
                let (value, below) = (integer(at) as i64, number(&below, at));
                (value < least || value >= below).then_some((value, below))
            }
            Is::Ascending { by } => {
                let last = rule.last();
                let is_first = |span: &Span| last == span.along && at[last] as i64 == number(&span.from, at);
                if at[last] == 0 || rule.span.as_ref().is_some_and(is_first) {
                    return None;
                }
                let mut before = at;
                before[last] -= 1;
                let (value, before) = (integer(at) as i64, integer(before) as i64);
                (value < before + by).then_some((value, before))
            }
            Is::Distinct => {
                let value = integer(at);
                let earlier = if value < 0 { None } else { seen.insert(value, element) };
                earlier.map(|earlier| (value as i64, earlier as i64))
            }
            Is::Factor => unless(float().is_finite() && float() >= 0.0, float()),
            Is::Finite => unless(float().is_finite(), float()),
            Is::Number => unless(!float().is_nan(), float()),
        }
    }
}

/// # Safety
/// The conditions of [`broken`] hold.
unsafe fn number(n: &Number, at: At) -> i64 {
    let read = |t: &Tensor| {
        let place: At = std::array::from_fn(|d| if t.dim(d) > 1 { at[d] } else { 0 });
        // SAFETY: the leading extents are those of the element's tensor, or 1.
        unsafe { t.get::<i32, MOST_DIMS>(place) as i64 }
    };
    let [of, less] = [&n.of, &n.less].map(|t| t.as_ref().map_or(0, read));
    let sum = of - less + n.per_position * at[1] as i64 + n.plus;
    if sum < 0 { 0 } else { (sum / n.divisor * n.times).min(n.most) }
}
