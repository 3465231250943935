//! Filters: min-p, then top-k, then top-p. Each drops the tokens below a bound, so that ties at the bound stay.
//!
//! min-p keeps w(x, M) ≥ min_p. top-k keeps x ≥ the k-th largest number of the row. top-p keeps x ≥ the largest number v such that
//! the tokens ≥ v have at least top_p of the mass that is left, where a token's mass is ⌊w(x, M)·2^40⌋ and the bound is
//! ⌈top_p·Σ⌉, a product in float64, at least 1 and at most Σ. At least one token stays.

use super::{ONE, Scale, Settings, largest, strip};
use crate::ops::simd::{self, Kernel, LANES, Lanes};

impl Settings {
    /// Whether a filter may drop a token of a row of so many.
    pub fn filters(&self, tokens: usize) -> bool {
        self.has_top_k(tokens) || self.top_p < 1.0 || self.min_p > 0.0
    }

    fn has_top_k(&self, tokens: usize) -> bool {
        self.top_k > 0 && (self.top_k as usize) < tokens
    }

    /// Drops what the filters drop from a clean row.
    pub fn filter(&self, row: &mut [f32], scale: Scale) {
        let none = scale.form.none();
        let scale = if self.temperature_last { Scale::new(scale.form, 1.0) } else { scale };
        let m = largest(row);
        if !self.filters(row.len()) || m <= none {
            return;
        }
        if self.min_p > 0.0 {
            let strips = row.len().div_ceil(LANES);
            for r in 0..strips {
                let weights = simd::dispatch(super::Weights { scale, x: strip(row, r, none), m });
                let least = self.min_p.min(1.0);
                row[r * LANES..].iter_mut().zip(weights).filter(|&(_, w)| w < least).for_each(|(x, _)| *x = none);
            }
        }
        if self.has_top_k(row.len()) {
            let bound = reaching(row, None, |_| self.top_k as u64);
            drop_below(row, bound, none);
        }
        if self.top_p < 1.0 {
            let need = |total: u64| ((self.top_p.max(0.0) as f64 * total as f64).ceil() as u64).clamp(1, total);
            let bound = reaching(row, Some((scale, m)), need);
            drop_below(row, bound, none);
        }
    }
}

fn drop_below(row: &mut [f32], bound: f32, none: f32) {
    row.iter_mut().filter(|x| **x < bound).for_each(|x| *x = none);
}

/// The largest number v such that the tokens ≥ v have as much as `need` gives of the sum over the row. Each counts 1, or its mass by
/// the scale and M.
fn reaching(row: &[f32], mass: Option<(Scale, f32)>, need: impl Fn(u64) -> u64) -> f32 {
    // The key of v, digit by digit from the top.
    let (mut key, mut known, mut left) = (0u32, 0u32, None);
    for (shift, bits) in DIGITS {
        let mut counts = [0u64; MOST_DIGITS];
        let digits = (1u32 << bits) - 1;
        simd::dispatch(Count { row, mass, key, known, shift, digits, counts: &mut counts });
        let mut wanted = left.unwrap_or_else(|| need(counts.iter().sum()));
        let mut digit = digits as usize;
        while counts[digit] < wanted && digit > 0 {
            wanted -= counts[digit];
            digit -= 1;
        }
        left = Some(wanted);
        key |= (digit as u32) << shift;
        known |= digits << shift;
    }
    number(key)
}

/// Shift and width of the digits of a key.
const DIGITS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];
const MOST_DIGITS: usize = 1 << 11;

/// Keys ascend as numbers do; −0 has the key of +0.
#[inline(always)]
fn key_of(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// The number of a key.
fn number(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// Sums, for each value of a digit, the counts or masses of the numbers whose known digits are those of `key`.
struct Count<'a> {
    row: &'a [f32],
    mass: Option<(Scale, f32)>,
    key: u32,
    known: u32,
    shift: u32,
    /// The digit's bits, shifted down.
    digits: u32,
    counts: &'a mut [u64; MOST_DIGITS],
}

impl Kernel for Count<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        for r in 0..self.row.len().div_ceil(LANES) {
            let x = strip(self.row, r, f32::NEG_INFINITY);
            let keys = x.map(key_of);
            if keys.iter().all(|key| key & self.known != self.key) {
                continue;
            }
            let masses = match self.mass {
                Some((scale, m)) => scale.weights(L::from_array(&x), m).to_array().map(|w| (w.max(0.0) * ONE) as u64),
                None => [1; LANES],
            };
            for (key, mass) in keys.into_iter().zip(masses).take(self.row.len() - r * LANES) {
                if key & self.known == self.key {
                    self.counts[(key >> self.shift & self.digits) as usize] += mass;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Distribution, Form};
    use super::*;

    /// The tokens that stay, by sorting.
    fn by_sorting(row: &[f32], settings: &Settings, temperature: f64) -> Vec<bool> {
        let m = row.iter().fold(f64::MIN, |m, &x| m.max(x as f64));
        let weight = |x: f32| ((x as f64 - m) / temperature).exp();
        let mut order: Vec<f32> = row.iter().copied().filter(|&x| weight(x) >= settings.min_p as f64).collect();
        order.sort_by(|a, b| b.partial_cmp(a).expect("no NaN"));
        let mut bound = *order.last().expect("the largest stays");
        if settings.top_k > 0 && (settings.top_k as usize) < order.len() {
            bound = order[settings.top_k as usize - 1];
        }
        order.retain(|&x| x >= bound);
        let total: f64 = order.iter().map(|&x| weight(x)).sum();
        let mut sum = 0.0;
        let last = order.iter().position(|&x| {
            sum += weight(x);
            sum >= settings.top_p as f64 * total
        });
        bound = bound.max(last.map_or(bound, |last| order[last]));
        row.iter().map(|&x| weight(x) >= settings.min_p as f64 && x >= bound).collect()
    }

    #[test]
    fn filters_keep_what_sorting_keeps() {
        let mut rng = fastrand::Rng::with_seed(7);
        for round in 0..600 {
            let n = [2, 7, 8, 100, 5000][round % 5];
            // Whole numbers have ties everywhere.
            let whole = rng.bool();
            let row: Vec<f32> =
                (0..n).map(|_| (rng.f32() - 0.5) * 12.0).map(|x| if whole { x.round() } else { x }).collect();
            let settings = Settings {
                temperature: [0.5, 1.0, 3.0][rng.usize(0..3)],
                top_k: [0, 1, 3, 50, n as i32, -4][rng.usize(0..6)],
                top_p: [1.0, 0.9, 0.5, 0.013, 0.0][rng.usize(0..5)],
                min_p: [0.0, 0.07, 0.9, 2.0 / 3.0][rng.usize(0..4)],
                temperature_last: rng.bool(),
            };
            let temperature = if settings.temperature_last { 1.0 } else { settings.temperature as f64 };
            let kept = by_sorting(&row, &settings, temperature);
            let mut filtered = row.clone();
            settings.filter(&mut filtered, Scale::new(Form::Logits, settings.temperature));
            for token in 0..n {
                let expected = if kept[token] { row[token] } else { f32::NEG_INFINITY };
                assert_eq!(filtered[token], expected, "round {round}, token {token} of {n}, {settings:?}");
            }
            // Probabilities of the same temperature are filtered alike.
            let p = Distribution::new(&row, Scale::new(Form::Logits, temperature as f32));
            let mut weights = vec![0.0; n];
            p.probabilities(|token, p| weights[token] = p);
            if !whole {
                settings.filter(&mut weights, Scale::new(Form::Weights, 1.0));
                assert!((0..n).all(|token| (weights[token] > 0.0) == kept[token]), "round {round}");
            }
        }
    }

    #[test]
    fn filters_of_a_row_without_tokens_or_of_infinite_ones_leave_it() {
        let settings = Settings { top_k: 2, top_p: 0.5, min_p: 0.1, ..Settings::PLAIN };
        let mut empty = [f32::NEG_INFINITY; 20];
        settings.filter(&mut empty, Scale::new(Form::Logits, 1.0));
        assert_eq!(empty, [f32::NEG_INFINITY; 20]);
        let mut infinite = [1.0, f32::INFINITY, 2.0, f32::INFINITY];
        settings.filter(&mut infinite, Scale::new(Form::Logits, 1.0));
        assert_eq!(infinite, [f32::NEG_INFINITY, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY]);
    }
}
