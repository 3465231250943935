//! The oracle of sampling: exact distributions in double precision, and a walk over rows token by token.
//!
//! A random number that lies within MARGIN of where a decision changes leaves the request unsure, and the request is not compared.

use crate::support::*;

/// What probabilities of the library may be off by, and more.
const MARGIN: f64 = 2e-6;

/// What follows is within the margin.
#[derive(Debug)]
pub struct Unsure;

/// Philox4x32-10 (Salmon et al. 2011) as the header names it: u of a seed, a position, a purpose and an index.
pub fn uniform(seed: i64, position: i64, purpose: u32, index: u32) -> f64 {
    let mut c = [position as u32, (position >> 32) as u32, purpose, index];
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
    draw_within(p, u, MARGIN)
}

fn draw_within(p: &[f64], u: f64, margin: f64) -> Result<usize, Unsure> {
    let mut sum = 0.0;
    for (j, &p) in p.iter().enumerate().filter(|(_, p)| **p > 0.0) {
        sum += p;
        if (u - sum).abs() < margin && sum < 1.0 - margin {
            return Err(Unsure);
        }
        if u < sum {
            return Ok(j);
        }
    }
    Err(Unsure)
}

/// Draft tokens of one position that are tried in turn.
#[derive(Clone)]
pub struct Turns {
    /// What the token is distributed as, given that the tokens so far were refused.
    pub r: Vec<f64>,
    /// What the next token was drawn from; absent: each token was certain.
    pub q: Option<Vec<f64>>,
    without_replacement: bool,
    /// What is left of p in r.
    mass: f64,
}

/// Divides by the sum, which it returns.
fn normalise(weights: &mut [f64]) -> f64 {
    let total: f64 = weights.iter().sum();
    weights.iter_mut().filter(|_| total > 0.0).for_each(|w| *w /= total);
    total
}

impl Turns {
    pub fn new(p: &[f64], q: Option<&[f64]>, without_replacement: bool) -> Turns {
        Turns { r: p.to_vec(), q: q.map(<[f64]>::to_vec), without_replacement, mass: 1.0 }
    }

    /// q(c).
    pub fn of_draft(&self, c: usize) -> f64 {
        self.q.as_ref().map_or(1.0, |q| q[c])
    }

    /// How often c is accepted, of a token that was drawn.
    pub fn acceptance(&self, c: usize) -> f64 {
        if self.r[c] >= self.of_draft(c) { 1.0 } else { self.r[c] / self.of_draft(c) }
    }

    /// r becomes norm(max(r − q, 0)); without replacement q becomes norm(q without c).
    pub fn refuse(&mut self, c: usize) {
        for (x, r) in self.r.iter_mut().enumerate() {
            let q = self.q.as_ref().map_or((x == c) as u8 as f64, |q| q[x]);
            *r = (*r - q).max(0.0);
        }
        self.mass *= normalise(&mut self.r);
        if let Some(q) = self.q.as_mut().filter(|_| self.without_replacement) {
            q[c] = 0.0;
            normalise(q);
        }
    }

    fn margin(&self) -> Result<f64, Unsure> {
        if self.mass < 0.01 { Err(Unsure) } else { Ok(MARGIN / self.mass) }
    }

    /// Whether c is accepted with this u.
    pub fn accepts(&self, c: usize, u: f64) -> Result<bool, Unsure> {
        let (q, r) = (u * self.of_draft(c), self.r[c]);
        if r > 0.0 && (q - r).abs() < self.margin()? * r.max(q) { Err(Unsure) } else { Ok(q < r) }
    }

    /// The token where none was accepted.
    pub fn draw(&self, u: f64) -> Result<usize, Unsure> {
        draw_within(&self.r, u, self.margin()?)
    }
}

/// q of a draft's row whose columns stand for the tokens of `map`, of a vocabulary of so many; and whether it holds what is no number.
pub fn drafted(
    row: &[f64],
    map: &[i64],
    tokens: usize,
    are_weights: bool,
    settings: &Settings,
) -> Result<(Vec<f64>, bool), Unsure> {
    let (row, saw) = clean(row, are_weights);
    let of_columns = distribution(&row, are_weights, if are_weights { &PLAIN } else { settings })?;
    let mut q = vec![0.0; tokens];
    for (&token, q_of) in map.iter().zip(of_columns.unwrap_or(vec![0.0; row.len()])) {
        if (0..tokens as i64).contains(&token) {
            q[token as usize] = q_of;
        }
    }
    Ok((q, saw))
}

fn none(are_weights: bool) -> f64 {
    if are_weights { 0.0 } else { f64::NEG_INFINITY }
}

/// A row without what is no number, and whether there was something.
pub fn clean(row: &[f64], are_weights: bool) -> (Vec<f64>, bool) {
    let is_number = |x: f64| if are_weights { x >= 0.0 } else { !x.is_nan() };
    let cleaned = row.iter().map(|&x| if is_number(x) { x } else { none(are_weights) }).collect();
    (cleaned, row.iter().any(|&x| !is_number(x)))
}

/// Drops tokens from a row.
pub fn forbid(row: &mut [f64], tokens: &[i64], are_weights: bool) {
    for &token in tokens {
        if let Some(x) = usize::try_from(token).ok().and_then(|token| row.get_mut(token)) {
            *x = none(are_weights);
        }
    }
}

/// The lowest token of the largest number.
pub fn likeliest(row: &[f64]) -> usize {
    let most = row.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
    row.iter().position(|&x| x == most).expect("it is one of them")
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
    /// The rows of the drafter. `map` says for which tokens of the target their columns stand.
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
            let (mut row, saw) = clean(row, self.target_is_weights);
            out.status |= saw as i64;
            if (r as i64) < self.min_remaining {
                forbid(&mut row, &self.stop, self.target_is_weights);
            }
            let Some(plain) = distribution(&row, self.target_is_weights, &PLAIN)? else {
                out.status |= 2;
                break;
            };
            let tokens = 0..row.len() as i64;
            let draft = self.draft.get(r).copied().filter(|x| tokens.contains(x));
            let u = |purpose| uniform(self.seed, self.position + r as i64, purpose, 0);
            let token = if self.settings.is_greedy() {
                likeliest(&row)
            } else {
                let p = distribution(&row, self.target_is_weights, &self.settings)?.expect("there is something");
                match draft {
                    Some(x) if self.rejects => self.reject(r, x as usize, &p, u, &mut out)?,
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
    ) -> Result<usize, Unsure> {
        let q = match &self.draft_rows {
            Some(rows) => {
                let (q, saw) = drafted(&rows[r], &self.map, p.len(), self.draft_is_weights, &self.settings)?;
                out.status |= saw as i64;
                Some(q)
            }
            None => None,
        };
        let mut turns = Turns::new(p, q.as_deref(), false);
        if turns.accepts(x, u(0))? {
            return Ok(x);
        }
        turns.refuse(x);
        turns.draw(u(1))
    }
}

/// Logits whose likeliest tokens differ by row.
pub fn logits(rng: &mut Rng, shape: &[usize], dtype: DType) -> Array<f64> {
    let spread = rng.pick(&[0.5, 2.0, 6.0]);
    Array::from_fn(shape, |_| dtype.round(rng.normal() * spread))
}

/// Some tokens of a vocabulary, ascending: its ends, both sides of the first segment's end, and any others.
pub fn few_tokens(rng: &mut Rng, vocabulary: usize) -> Vec<usize> {
    let mut few: Vec<usize> = (0..12).map(|_| rng.size(0..=vocabulary - 1)).collect();
    few.extend([0, 4095, 4096, vocabulary - 1].into_iter().filter(|&token| token < vocabulary));
    few.sort();
    few.dedup();
    few
}

/// Rows of which these columns have all mass, so that hardly a decision is within the margin: the others together have e^−60 of it at
/// temperatures up to [`WARMEST`].
pub fn steep(rng: &mut Rng, shape: &[usize], columns: &[usize], are_weights: bool, dtype: DType) -> Array<f64> {
    let mut rows = Array::filled(shape, if are_weights { 0.0 } else { -200.0 });
    for row in rows.data.chunks_mut(shape[2]) {
        for &column in columns {
            let x = rng.normal();
            row[column] = dtype.round(if are_weights { x.exp() } else { 2.0 * x });
        }
    }
    rows
}

/// See [`steep`].
pub const WARMEST: f64 = 2.5;

/// Rows of drafts of any dtype, logits or weights of these, a third of them with numbers that no row should have: NaN, infinite ones, negative
/// weights, and rows of which nothing can be drawn.
pub fn any_draft_rows(rng: &mut Rng, shape: &[usize], are_weights: bool) -> (DType, Array<f64>) {
    let dtype = rng.pick(&[F32, F16, BF16]);
    let mut rows = logits(rng, shape, dtype);
    if are_weights {
        rows = rows.map(|&x| dtype.round((x / 2.0).exp()));
    }
    if rng.one_in(3) {
        let strange = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0];
        rows.data.iter_mut().for_each(|x| *x = if rng.one_in(9) { rng.pick(&strange) } else { *x });
        let width = shape[shape.len() - 1];
        rows.data.chunks_mut(width).for_each(|row| {
            if rng.one_in(9) {
                row.fill(rng.pick(&[f64::NAN, f64::NEG_INFINITY]));
            }
        });
    }
    (dtype, rows)
}

/// The target's tokens for so many columns, ascending; now and then some are no tokens, at either end.
pub fn any_map(rng: &mut Rng, vocabulary: usize, columns: usize) -> Vec<i64> {
    let mut map: Vec<i64> = rng.subset(vocabulary, columns).iter().map(|&token| token as i64).collect();
    if rng.one_in(3) {
        let [below, above] = [(); 2].map(|()| rng.size(0..=columns.min(2)));
        (0..below).for_each(|n| map[n] = [i32::MIN as i64, -1][n]);
        (0..above.min(columns - below)).for_each(|n| map[columns - 1 - n] = [i32::MAX as i64, vocabulary as i64][n]);
    }
    map
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
    let (mut square, mut bins) = (0.0, 0.0f64);
    let mut add = |count: f64, expected: f64| {
        square += (count - expected).powi(2) / expected;
        bins += 1.0;
    };
    // Rare tokens share a bin with the next ones, up to 8 draws. What is left of them in the end is none.
    let (mut rare, mut rare_p) = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(p) {
        if p * draws >= 8.0 {
            add(count as f64, p * draws);
        } else {
            assert!(p > 0.0 || count == 0, "{what}: a token without probability was drawn");
            (rare, rare_p) = (rare + count as f64, rare_p + p);
        }
        if rare_p * draws >= 8.0 {
            add(rare, rare_p * draws);
            (rare, rare_p) = (0.0, 0.0);
        }
    }
    if bins < 2.0 {
        return;
    }
    let spread = 2.0 / (9.0 * (bins - 1.0));
    let z = ((square / (bins - 1.0)).cbrt() - (1.0 - spread)) / spread.sqrt();
    assert!(z < 3.72, "{what}: χ² {square:.1} of {bins} bins, {draws} draws");
}
