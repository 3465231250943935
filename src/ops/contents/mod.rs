//! Contents: what calls state of the numbers in their tensors, such as lengths, page tables, ids and counts.
//!
//! A family describes its statements as [`Rule`]s, next to the checks of its arguments. A session that was created to do so
//! reads the tensors by these rules before each call, and refuses the call at the first element that breaks one. Elements
//! that the call does not read, and −1 where it stands for "none", break no rule.

mod cpu;
mod cuda;
mod shared;

pub(super) use cuda::Kernels;
pub use shared::{Tokens, list, page_table, pages_of_begun_blocks, q_lens, scale, seq_lens};

use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::{On, Session};

/// Dimensions of the tensors that have rules.
pub const MOST_DIMS: usize = 4;

/// The index of an element; coordinates past the rank are 0.
type At = [usize; MOST_DIMS];

/// What must hold for the elements of one tensor.
#[derive(Clone, Copy)]
pub struct Rule<'a> {
    tensor: Tensor<'a>,
    is: Is<'a>,
    /// The rule is about those elements alone for which both numbers are above 0,
    applies: [Number<'a>; 2],
    /// and that lie in this part of a row.
    span: Option<Span<'a>>,
    /// Whether the tensor lies in host memory, whatever the session's device.
    on_host: bool,
}

/// The elements with a coordinate from `from` to below `to` in dimension `along`. Neither number depends on that coordinate, or on
/// later ones.
#[derive(Clone, Copy)]
struct Span<'a> {
    along: usize,
    from: Number<'a>,
    to: Number<'a>,
}

/// What an element is.
#[derive(Clone, Copy)]
enum Is<'a> {
    /// An integer that is at least `least` and below `below`.
    Within { least: i64, below: Number<'a> },
    /// At least so much more than the element before it in the last dimension, if the rule is about that, too.
    Ascending { by: i64 },
    /// Negative, or different from the elements before it.
    Distinct,
    /// A finite float, not below 0.
    Factor,
    /// A finite float.
    Finite,
    /// A float that is not NaN.
    Number,
}

/// A number for each element: times·⌊(of − less + per_position·r + plus) / divisor⌋, at least 0 and at most `most`. `of` and `less` are
/// int32 tensors at the leading coordinates of the element, whose dimensions of extent 1 stand for any; absent ones are 0. r is
/// the element's coordinate in dimension 1.
#[derive(Clone, Copy)]
pub struct Number<'a> {
    of: Option<Tensor<'a>>,
    less: Option<Tensor<'a>>,
    per_position: i64,
    plus: i64,
    divisor: i64,
    times: i64,
    most: i64,
}

/// Sums of these numbers and of int32 stay below 2^63.
const LARGEST: usize = 1 << 60;

fn bounded(n: usize) -> i64 {
    n.min(LARGEST) as i64
}

impl<'a> Number<'a> {
    pub fn constant(n: usize) -> Number<'a> {
        Number { of: None, less: None, per_position: 0, plus: bounded(n), divisor: 1, times: 1, most: i64::MAX }
    }

    pub fn of(t: Tensor<'a>) -> Number<'a> {
        Number { of: Some(t), ..Number::constant(0) }
    }

    /// `self − t`, before any division.
    pub fn less(self, t: Tensor<'a>) -> Number<'a> {
        Number { less: Some(t), ..self }
    }

    /// `self + factor·r`, before any division.
    pub fn per_position(self, factor: i64) -> Number<'a> {
        Number { per_position: factor, ..self }
    }

    pub fn plus(self, n: usize) -> Number<'a> {
        Number { plus: self.plus + bounded(n), ..self }
    }

    pub fn minus(self, n: usize) -> Number<'a> {
        Number { plus: self.plus - bounded(n), ..self }
    }

    /// ⌊self / n⌋; a divisor of 0 counts as 1.
    pub fn over(self, n: usize) -> Number<'a> {
        Number { divisor: bounded(n.max(1)), ..self }
    }

    /// ⌈self / n⌉; as [`Number::over`].
    pub fn over_up(self, n: usize) -> Number<'a> {
        self.plus(n.max(1) - 1).over(n)
    }

    /// `self · n`, after any division.
    pub fn times(self, n: usize) -> Number<'a> {
        Number { times: n as i64, ..self }
    }

    pub fn at_most(self, n: usize) -> Number<'a> {
        Number { most: bounded(n), ..self }
    }

    /// Whether the coordinate in dimension `d` matters.
    fn varies(&self, d: usize) -> bool {
        let [of, less] = [&self.of, &self.less].map(|t| t.is_some_and(|t| t.dim(d) > 1 && t.stride(d) != 0));
        of || less || (d == 1 && self.per_position != 0)
    }
}

impl<'a> Rule<'a> {
    fn new(tensor: Tensor<'a>, is: Is<'a>) -> Rule<'a> {
        debug_assert!(tensor.rank() <= MOST_DIMS);
        Rule { tensor, is, applies: [Number::constant(1); 2], span: None, on_host: false }
    }

    /// int32 from `least`, 0 or −1, up to but without `below`.
    pub fn within(tensor: Tensor<'a>, least: i64, below: Number<'a>) -> Rule<'a> {
        debug_assert!(tensor.dtype == DType::I32);
        Rule::new(tensor, Is::Within { least, below })
    }

    /// int32 from 0 to `most`.
    pub fn up_to(tensor: Tensor<'a>, most: usize) -> Rule<'a> {
        Rule::within(tensor, 0, Number::constant(most.saturating_add(1)))
    }

    /// int32, ascending without repetition in each row of the last dimension.
    pub fn ascending(tensor: Tensor<'a>) -> Rule<'a> {
        Rule::new(tensor, Is::Ascending { by: 1 })
    }

    /// int32 of which none is below the one before it in its row of the last dimension.
    pub fn not_descending(tensor: Tensor<'a>) -> Rule<'a> {
        Rule::new(tensor, Is::Ascending { by: 0 })
    }

    /// int32 of which those that are not negative differ.
    pub fn distinct(tensor: Tensor<'a>) -> Rule<'a> {
        Rule::new(tensor, Is::Distinct)
    }

    /// float32, finite and not below 0.
    pub fn factor(tensor: Tensor<'a>) -> Rule<'a> {
        Rule::new(tensor, Is::Factor)
    }

    /// float32, finite.
    pub fn finite(tensor: Tensor<'a>) -> Rule<'a> {
        Rule::new(tensor, Is::Finite)
    }

    /// float32, not NaN.
    pub fn not_nan(tensor: Tensor<'a>) -> Rule<'a> {
        Rule::new(tensor, Is::Number)
    }

    /// The rule for those elements alone whose coordinate in dimension `along` is at least `from` and below `to`.
    pub fn between(self, along: usize, from: Number<'a>, to: Number<'a>) -> Rule<'a> {
        Rule { span: Some(Span { along, from, to }), ..self }
    }

    /// The rule for those elements alone for which this number is above 0. Two such conditions may be given.
    pub fn where_positive(self, number: Number<'a>) -> Rule<'a> {
        Rule { applies: [self.applies[1], number], ..self }
    }

    pub fn on_host(self, on_host: bool) -> Rule<'a> {
        Rule { on_host, ..self }
    }

    /// The extents of the dimensions, 1 past the rank and 1 where one element is as good as all.
    fn shape(&self) -> At {
        std::array::from_fn(|d| match self.tensor.dim(d) {
            n if n > 1 && self.repeats(d) && self.span.is_none_or(|span| span.along != d) => 1,
            n => n,
        })
    }

    /// Whether the elements along a dimension are one in memory, and the same must hold for all: there may be 2^60 of them.
    fn repeats(&self, d: usize) -> bool {
        let [first, second] = self.applies;
        let (may, below) = match self.is {
            Is::Within { below, .. } => (true, below),
            Is::Ascending { .. } => (d != self.last(), first),
            Is::Distinct => (false, first),
            _ => (true, first),
        };
        let (from, to) = self.span.map_or((first, first), |span| (span.from, span.to));
        may && self.tensor.stride(d) == 0 && ![first, second, below, from, to].iter().any(|n| n.varies(d))
    }

    fn last(&self) -> usize {
        self.tensor.rank().saturating_sub(1)
    }
}

/// The first element that breaks a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Finding {
    /// Its number in the order of the indices.
    element: usize,
    /// The integer, or the bits of the float.
    value: i64,
    /// What it is compared with: `below`; the element before it; the number of the element that has the same value.
    other: i64,
}

impl Finding {
    #[cold]
    fn error(&self, rule: &Rule) -> Error {
        let name = format!("{}{}", rule.tensor.name(), place(rule, self.element));
        let float = f32::from_bits(self.value as u32);
        match rule.is {
            Is::Within { least, .. } => Error::argument(&name, signed(self.value), range(least, self.other)),
            Is::Ascending { by } => {
                let than = if by > 0 { "more than" } else { "no less than" };
                let expected = format!("{than} the {} before it", signed(self.other));
                Error::argument(&name, signed(self.value), expected)
            }
            Is::Distinct => {
                let expected = format!("a number that {} does not have, too", place(rule, self.other as usize));
                Error::argument(&name, signed(self.value), expected)
            }
            Is::Factor => Error::argument(&name, float, "a finite number, 0 or above"),
            Is::Finite => Error::argument(&name, float, "a finite number"),
            Is::Number => Error::argument(&name, float, "a number"),
        }
    }
}

/// The index of an element, "[2, 1]".
fn place(rule: &Rule, element: usize) -> String {
    let (mut rest, mut at, shape) = (element, vec![0; rule.tensor.rank()], rule.shape());
    for d in (0..at.len()).rev() {
        at[d] = rest % shape[d];
        rest /= shape[d];
    }
    format!("{at:?}")
}

/// As messages write numbers: with a minus sign.
fn signed(n: i64) -> String {
    if n < 0 { format!("−{}", n.unsigned_abs()) } else { n.to_string() }
}

fn range(least: i64, below: i64) -> String {
    let none = if least < 0 { "−1 or " } else { "" };
    match below {
        ..=0 if least < 0 => "−1".to_owned(),
        ..=0 => "none: there is nothing to name".to_owned(),
        1 => format!("{none}0"),
        _ if below > i32::MAX as i64 => format!("{none}0 or above"),
        _ => format!("{none}0 to {}", below - 1),
    }
}

/// Reads contents by the rules that `rules` gives, in a session that does so, and fails at the first element that breaks the
/// first broken rule. On CUDA this waits for the stream.
#[inline]
pub fn check<'a>(session: &Session, on: &On, rules: impl FnOnce() -> Vec<Rule<'a>>) -> Result<()> {
    if session.checks_contents() { check_all(on, &rules()) } else { Ok(()) }
}

#[cold]
#[inline(never)]
fn check_all(on: &On, rules: &[Rule]) -> Result<()> {
    let findings = match on {
        // SAFETY: the op's caller keeps the tensors valid, and they lie in host memory.
        On::Cpu(_) => rules.iter().map(|rule| unsafe { cpu::find(rule) }).collect(),
        On::Cuda(enqueue) => cuda::find(enqueue, rules)?,
    };
    match findings.iter().zip(rules).find_map(|(finding, rule)| Some((finding.as_ref()?, rule))) {
        Some((finding, rule)) => Err(finding.error(rule)),
        None => Ok(()),
    }
}
