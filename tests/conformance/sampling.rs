//! The oracle of sampling: exact distributions in double precision, and a walk over rows token by token.
//!
//! A random number that lies within MARGIN of where a decision changes leaves the request unsure, and the request is not compared.

use crate::support::*;

/// What probabilities of the library may be off by, and more.
const MARGIN: f64 = 2e-6;

/// What follows is within the margin.
#[derive(Debug)]
pub struct Unsure;

/// Philox4x32-10 (Salmon et al. 2011) as the header names it: u of a seed, a position and a purpose.
pub fn uniform(seed: i64, position: i64, purpose: u32) -> f64 {
    let mut c = [position as u32, (position >> 32) as u32, purpose, 0];
    let mut k = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let (a, b) = (c[0] as u64 * 0xD2511F53, c[2] as u64 * 0xCD9E8D57);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E3779B9), k[1].wrapping_add(0xBB67AE85)];
    }
    (((c[1] as u64) << 32 | c[0] as u64) >> 11) as f64 / 9007199254740992.0
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub temperature: f64,
    pub top_k: i64,
    pub top_p: f64,
    pub min_p: f64,
    pub temperature_last: bool,
}

pub const PLAIN: Settings = Settings { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, temperature_last: false };

impl Settings {
    pub fn is_greedy(&self) -> bool {
        self.temperature.is_nan() || (self.temperature as f32) < 1e-5
    }
}

/// Weights in proportion to probability, of logits or probabilities, none of which is NaN; `None` if there is nothing to draw.
fn weights(row: &[f64], are_weights: bool, temperature: f64) -> Option<Vec<f64>> {
    let most = row.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
    let weight = |x: f64| match are_weights {
        _ if most == f64::INFINITY => (x == most) as u8 as f64,
        true => x / most,
        false => ((x - most) / temperature).exp(),
    };
    let has_some = if are_weights { most > 0.0 } else { most > f64::NEG_INFINITY };
    has_some.then(|| row.iter().map(|&x| weight(x)).collect())
}

/// p of a row from which a token can be drawn.
pub fn distribution(row: &[f64], are_weights: bool, settings: &Settings) -> Result<Option<Vec<f64>>, Unsure> {
    let Some(of_filters) =
        weights(row, are_weights, if settings.temperature_last { 1.0 } else { settings.temperature })
    else {
        return Ok(None);
    };
    if settings.min_p > 0.0 && of_filters.iter().any(|w| (w - settings.min_p).abs() < MARGIN) {
        return Err(Unsure);
    }
    let mut kept: Vec<bool> = of_filters.iter().map(|&w| w >= settings.min_p.min(1.0)).collect();
    let descending = |kept: &[bool]| {
        let mut order: Vec<usize> = (0..row.len()).filter(|&j| kept[j]).collect();
        order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).expect("no NaN"));
        order
    };
    let order = descending(&kept);
    if settings.top_k > 0 && (settings.top_k as usize) < order.len() {
        let bound = row[order[settings.top_k as usize - 1]];
        (0..row.len()).for_each(|j| kept[j] &= row[j] >= bound);
    }
    if settings.top_p < 1.0 {
        let order = descending(&kept);
        let total: f64 = order.iter().map(|&j| of_filters[j]).sum();
        let (mut sum, mut bound) = (0.0, row[*order.last().expect("one stays")]);
        for (n, &j) in order.iter().enumerate() {
            sum += of_filters[j];
            // What matters is the sum over all tokens of a value.
            let is_last_of_value = order.get(n + 1).is_none_or(|&next| row[next] < row[j]);
            if is_last_of_value && n + 1 < order.len() && (sum - settings.top_p * total).abs() < MARGIN * total {
                return Err(Unsure);
            }
            if sum >= settings.top_p * total {
                bound = row[j];
                break;
            }
        }
        (0..row.len()).for_each(|j| kept[j] &= row[j] >= bound);
    }
    let mut p = weights(row, are_weights, settings.temperature).expect("there is something");
    (0..p.len()).for_each(|j| p[j] *= kept[j] as u8 as f64);
    let total: f64 = p.iter().sum();
    Ok(Some(p.iter().map(|w| w / total).collect()))
}

/// The token that u draws.
pub fn draw(p: &[f64], u: f64) -> Result<usize, Unsure> {
    let mut sum = 0.0;
    for (j, &p) in p.iter().enumerate().filter(|(_, p)| **p > 0.0) {
        sum += p;
        if (u - sum).abs() < MARGIN && sum < 1.0 - MARGIN {
            return Err(Unsure);
        }
        if u < sum {
            return Ok(j);
        }
    }
    Err(Unsure)
}

/// One request, in plain numbers.
pub struct Walk<'a> {
    pub rejects: bool,
    pub target_is_weights: bool,
    pub draft_is_weights: bool,
    pub settings: Settings,
    pub seed: i64,
    pub position: i64,
    /// As many as the draft has.
    pub draft: &'a [i64],
    /// `None`: there is no such row.
    pub rows: Vec<Option<&'a [f64]>>,
    /// Of the target's tokens.
    pub draft_rows: Option<Vec<Vec<f64>>>,
    /// What each column of a draft's row stands for.
    pub map: Vec<i64>,
    pub stop: Vec<i64>,
    pub remaining: i64,
    pub min_remaining: i64,
}

#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub accepted: i64,
    pub committed: Vec<i64>,
    pub finish: i64,
    pub status: i64,
    /// ln p of each committed token.
    pub logprobs: Vec<f64>,
}

impl Outcome {
    pub fn next_token(&self) -> i64 {
        self.committed.get(self.accepted as usize).copied().unwrap_or(-1)
    }
}

impl Walk<'_> {
    /// Token by token, as the contract tells it.
    pub fn run(&self) -> Result<Outcome, Unsure> {
        let mut out = Outcome { accepted: 0, committed: vec![], finish: 0, status: 0, logprobs: vec![] };
        while (out.committed.len() as i64) < self.remaining {
            let r = out.committed.len();
            let Some(row) = self.rows[r] else {
                out.status |= 8;
                break;
            };
            let is_number = |x: f64, are_weights: bool| if are_weights { x >= 0.0 } else { !x.is_nan() };
            let none = |are_weights: bool| if are_weights { 0.0 } else { f64::NEG_INFINITY };
            let clean = |row: &[f64], are_weights: bool, status: &mut i64| -> Vec<f64> {
                *status |= row.iter().any(|&x| !is_number(x, are_weights)) as i64;
                row.iter().map(|&x| if is_number(x, are_weights) { x } else { none(are_weights) }).collect()
            };
            let mut row = clean(row, self.target_is_weights, &mut out.status);
            if (r as i64) < self.min_remaining {
                let tokens = 0..row.len() as i64;
                let forbidden = self.stop.iter().filter(|stop| tokens.contains(stop));
                forbidden.for_each(|&stop| row[stop as usize] = none(self.target_is_weights));
            }
            let Some(plain) = distribution(&row, self.target_is_weights, &PLAIN)? else {
                out.status |= 2;
                break;
            };
            let tokens = 0..row.len() as i64;
            let draft = self.draft.get(r).copied().filter(|x| tokens.contains(x));
            let u = |purpose| uniform(self.seed, self.position + r as i64, purpose);
            let token = if self.settings.is_greedy() {
                let most = row.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
                row.iter().position(|&x| x == most).expect("it is one of them")
            } else {
                let p = distribution(&row, self.target_is_weights, &self.settings)?.expect("there is something");
                match draft {
                    Some(x) if self.rejects => self.reject(r, x as usize, &p, u, &mut out, clean)?,
                    _ => draw(&p, u(1))?,
                }
            };
            let accepts = draft == Some(token as i64);
            out.committed.push(token as i64);
            out.logprobs.push(plain[token].ln());
            out.accepted += accepts as i64;
            if self.stop.contains(&(token as i64)) && r as i64 >= self.min_remaining {
                out.finish = 1;
            } else if out.committed.len() as i64 == self.remaining {
                out.finish = 2;
            }
            if !accepts || out.finish != 0 {
                break;
            }
        }
        Ok(out)
    }

    fn reject(
        &self,
        r: usize,
        x: usize,
        p: &[f64],
        u: impl Fn(u32) -> f64,
        out: &mut Outcome,
        clean: impl Fn(&[f64], bool, &mut i64) -> Vec<f64>,
    ) -> Result<usize, Unsure> {
        let mut q = vec![0.0; p.len()];
        match &self.draft_rows {
            Some(rows) => {
                let row = clean(&rows[r], self.draft_is_weights, &mut out.status);
                let settings = if self.draft_is_weights { PLAIN } else { self.settings };
                let of_columns = distribution(&row, self.draft_is_weights, &settings)?.unwrap_or(vec![0.0; row.len()]);
                for (&token, q_of) in self.map.iter().zip(of_columns) {
                    if (0..p.len() as i64).contains(&token) {
                        q[token as usize] = q_of;
                    }
                }
            }
            None => q[x] = 1.0,
        }
        if (u(0) * q[x] - p[x]).abs() < MARGIN * p[x] {
            return Err(Unsure);
        }
        if u(0) * q[x] < p[x] {
            return Ok(x);
        }
        let left: Vec<f64> = p.iter().zip(&q).map(|(p, q)| (p - q).max(0.0)).collect();
        let total: f64 = left.iter().sum();
        if total < 1e-3 {
            return Err(Unsure);
        }
        let y = draw(&left.iter().map(|w| w / total).collect::<Vec<_>>(), u(1))?;
        if y == x { Err(Unsure) } else { Ok(y) }
    }
}

/// Logits whose likeliest tokens differ by row.
pub fn logits(rng: &mut Rng, shape: &[usize], dtype: DType) -> Array<f64> {
    let spread = rng.pick(&[0.5, 2.0, 6.0]);
    Array::from_fn(shape, |_| dtype.round(rng.normal() * spread))
}

pub fn any_settings(rng: &mut Rng, temperature_last: bool) -> Settings {
    Settings {
        temperature: F32.round(rng.pick(&[1.0, 1.0, 0.7, 2.5, 0.0, -1.0, 1e-6, 1e4])),
        top_k: rng.pick(&[0, 0, -1, 1, 3, 40, 1 << 30]),
        top_p: F32.round(rng.pick(&[1.0, 1.0, 0.9, 0.3, 0.0])),
        min_p: F32.round(rng.pick(&[0.0, 0.0, 0.05, 0.6])),
        temperature_last,
    }
}

/// Whether counts are those of draws from p, at a level of 10^−4: Pearson's χ² by Wilson and Hilferty.
#[track_caller]
pub fn assert_drawn_from(counts: &[u64], p: &[f64], what: &str) {
    let draws = counts.iter().sum::<u64>() as f64;
    // Rare tokens are one bin.
    let (mut rare, mut rare_p, mut square, mut bins) = (0.0, 0.0, 0.0, 0.0f64);
    let mut add = |count: f64, expected: f64| {
        square += (count - expected).powi(2) / expected;
        bins += 1.0;
    };
    for (&count, &p) in counts.iter().zip(p) {
        if p * draws >= 8.0 {
            add(count as f64, p * draws);
        } else {
            assert!(p > 0.0 || count == 0, "{what}: a token without probability was drawn");
            (rare, rare_p) = (rare + count as f64, rare_p + p);
        }
    }
    if rare_p * draws >= 8.0 {
        add(rare, rare_p * draws);
    }
    if bins < 2.0 {
        return;
    }
    let spread = 2.0 / (9.0 * (bins - 1.0));
    let z = ((square / (bins - 1.0)).cbrt() - (1.0 - spread)) / spread.sqrt();
    assert!(z < 3.72, "{what}: χ² {square:.1} of {bins} bins, {draws} draws");
}
