//! Rejection sampling of draft tokens for one position.
//!
//! Tokens c_0, c_1, … were drawn from q: independently, or without replacement, each from what those before it left. In their order, c_j is
//! accepted iff u_j·q(c_j) < r(c_j). r is p at first, and norm(max(r − q, 0)) after each refusal; without replacement q is then
//! norm(q without c_j). If none is accepted, a token is drawn from r. Without q each token was certain: q is 1 at that token. What is
//! accepted or drawn is distributed as p (Leviathan et al. 2023 for one token, Miao et al. 2024 and Jeon et al. 2024 for several).
//!
//! r is max(p − b·q, 0) / Z without the tokens that were refused, so that no r is kept in memory:
//!
//! - at first b = 0, Z = 1;
//! - after a refusal b is (b + Z)·ρ and Z = Σ max(p − b·q, 0). ρ is the part of q that is left without c_j, 1 for independent tokens. Without q
//!   b stays 0.
//!
//! p and q enter r(c_j) as float64 (see [`Distribution::probability`]), and max(p − b·q, 0) as float32 (see [`Distribution::probabilities`]).

use super::request::Sampling;
use super::{Distribution, Form, Purpose, Scale, unit};
use crate::core::along::Along;
use crate::ops::simd::{self, Kernel, LANES, Lanes, Row};
use crate::with_float;

/// A row that draft tokens were drawn from.
pub struct DraftRow<'m> {
    /// Clean numbers, one for each column.
    numbers: &'m mut [f32],
    scale: Scale,
    columns: Columns,
}

impl<'m> DraftRow<'m> {
    /// Reads row `row` of request `i` into `numbers`, filtered as the request has it; whether all were numbers. `None` where draft
    /// rows are not given.
    ///
    /// # Safety
    /// The tensors are valid as long as the result is used, and there is such a row.
    pub unsafe fn read(s: &Sampling, [i, row]: [usize; 2], numbers: &'m mut [f32]) -> Option<(DraftRow<'m>, bool)> {
        let rows = s.draft_rows?;
        // SAFETY: forwarded to the caller; there is a number for each column.
        let (all, settings) = unsafe {
            let all = with_float!(rows.dtype, T => read(rows.row::<T, 2>([i, row]), s.draft_form, &mut *numbers));
            (all, s.settings(i))
        };
        let scale = Scale::new(s.draft_form, settings.temperature);
        if s.draft_form == Form::Logits {
            settings.filter(numbers, scale);
        }
        let map = s.draft_map.map(|map| Along::new(map.data().cast(), map.stride(0)));
        let columns = Columns { count: numbers.len(), map };
        Some((DraftRow { numbers, scale, columns }, all))
    }
}

/// What token each column of a draft row stands for.
#[derive(Clone, Copy)]
struct Columns {
    /// Vd
    count: usize,
    /// Ascends; absent: the same number.
    map: Option<Along<i32>>,
}

impl Columns {
    fn token(self, column: usize) -> Option<usize> {
        // SAFETY: the map has a number for each column.
        self.map.map_or(Some(column), |map| usize::try_from(unsafe { map.get(column) }).ok())
    }

    fn of(self, token: usize) -> Option<usize> {
        let Some(map) = self.map else { return Some(token).filter(|&column| column < self.count) };
        // SAFETY: as above.
        let at = |column: usize| unsafe { map.get(column) } as i64;
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = (low + high) / 2;
            (low, high) = if at(middle) < token as i64 { (middle + 1, high) } else { (low, middle) };
        }
        (low < self.count && at(low) == token as i64).then_some(low)
    }
}

/// What the tokens come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// This one, counted from 0.
    Accepted(usize),
    Drawn(usize),
    /// From p, as what is left has no mass.
    DrawnWithoutResidual(usize),
}

/// Tries tokens of the row in turn. Each has its index among the random numbers, of which `number` gives those of the position.
/// `residual` has room for V numbers.
pub fn try_in_turn(
    p: &Distribution,
    q: Option<DraftRow>,
    without_replacement: bool,
    tokens: impl Iterator<Item = (u32, usize)> + Clone,
    number: impl Fn(Purpose, u32) -> u64,
    residual: &mut [f32],
) -> Outcome {
    let (numbers, scale, columns) = match q {
        Some(q) => (q.numbers, q.scale, Some(q.columns)),
        None => (&mut [][..], p.scale, None),
    };
    let mut q = columns.map(|_| Distribution::new(numbers, scale));
    let (mut b, mut mass, mut left) = (0f64, 1f64, None::<Distribution>);
    for (n, (index, token)) in tokens.clone().enumerate() {
        let refused = tokens.clone().take(n).map(|(_, token)| token);
        let column = columns.and_then(|columns| columns.of(token));
        let of_draft = q.as_ref().map_or(1.0, |q| column.map_or(0.0, |column| q.probability(column)));
        let of_target = (p.probability(token) - b * of_draft).max(0.0) / mass;
        let is_refused = refused.clone().any(|other| other == token);
        if !is_refused && unit(number(Purpose::Accept, index)) * of_draft < of_target {
            return Outcome::Accepted(n);
        }
        residual.fill(0.0);
        if let (Some(columns), Some(before)) = (columns, q.as_ref().map(Distribution::size)) {
            b += mass;
            if let Some(column) = column.filter(|_| without_replacement) {
                numbers[column] = scale.form.none();
                let remaining = Distribution::new(numbers, scale);
                b *= remaining.size().part_of(before, scale);
                q = Some(remaining);
            }
            q.as_ref().expect("draft rows are given").probabilities(|column, w| {
                if let Some(place) = columns.token(column).and_then(|token| residual.get_mut(token)) {
                    *place = b as f32 * w;
                }
            });
        }
        for token in refused.chain([token]) {
            residual[token] = f32::INFINITY;
        }
        p.residual(residual);
        let found = Distribution::new(residual, Scale::new(Form::Weights, 1.0));
        if found.is_empty() {
            return Outcome::DrawnWithoutResidual(p.draw(number(Purpose::Draw, 0)));
        }
        mass = found.size().mass();
        left = Some(found);
    }
    Outcome::Drawn(left.as_ref().unwrap_or(p).draw(number(Purpose::Draw, 0)))
}

/// Reads a row as clean numbers (see [`Form::clean`]), and says whether all were.
///
/// # Safety
/// The row is valid and has as many elements as `numbers`.
pub unsafe fn read<T: Row>(row: Along<T>, form: Form, numbers: &mut [f32]) -> bool {
    match row.packed() {
        Some(first) => simd::dispatch(Widen { first, numbers: &mut *numbers }),
        // SAFETY: forwarded to the caller.
        None => numbers.iter_mut().enumerate().for_each(|(j, x)| *x = unsafe { row.get(j) }.to_f32()),
    }
    let mut all = true;
    for x in numbers {
        let (clean, is_number) = form.clean(*x);
        *x = clean;
        all &= is_number;
    }
    all
}

/// Converts adjacent elements.
struct Widen<'a, T> {
    first: *const T,
    numbers: &'a mut [f32],
}

impl<T: Row> Kernel for Widen<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let whole = self.numbers.len() / LANES * LANES;
        // SAFETY: `read` gives as many elements as numbers.
        unsafe {
            simd::widen::<L, T>(self.first, 1.0, &mut self.numbers[..whole]);
            (whole..self.numbers.len()).for_each(|j| self.numbers[j] = self.first.add(j).read().to_f32());
        }
    }
}
