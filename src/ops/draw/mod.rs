//! Draws from rows of logits: what every sampling call shares. kernels/common/draw.cuh computes the same bits.
//!
//! **Row.** V numbers x_j: logits, whose NaN count as −inf, or weights, whose NaN and negative numbers count as 0. A filter
//! (see `filter.rs`) turns the logits of the tokens that it drops to −inf, and their weights to 0.
//!
//! **Weight.** w(x, m) is 2^((x − m)·c) with c = log2 e / temperature for logits, by float32 operations that are given below,
//! and x / m for weights. It is 0 where the exponent is below −100. If m is +inf it is 1 for +inf and 0 for all else.
//!
//! **Sums.** A row is cut in segments of 4096 tokens, and a segment in strips of 8; both depend on V alone. m_s is a segment's
//! largest number and M the row's. The sum of a strip is ((w0+w1)+(w2+w3)) + ((w4+w5)+(w6+w7)) in float32, with w = w(x_j, m_s).
//! In it an exponent counts as −100 at least, which saves a comparison and adds next to nothing. It is rounded down to a multiple of
//! 2^−40. From there on sums are integers, so their order does not matter: n_s is the sum of a segment's strips, and its share of the
//! row is N_s = ⌊n_s · w(m_s, M)⌋ with a product in float64.
//!
//! **Draw.** u is a multiple of 2^−53 below 1 (see [`uniform`]), and t = ⌊u·ΣN_s⌋. The segment is the first with t below the
//! running sum of N_s; t less what precedes is divided by w(m_s, M) in float64 and rounded down to t' < n_s. The strip is the first
//! with t' below the running sum of the strips. In the strip the token is the first with ⌊(w0+…+wk)·2^40⌋ above what is left of
//! t', in float32 from the left, or the last that has weight.
//!
//! **Probability.** p(j) = w(x_j, m_s) · w(m_s, M) · 2^40 / ΣN_s, in float64 from the left.
//!
//! So a draw is a function of the row, the settings and u; no thread count, batch or device has a part in it. Against exact arithmetic
//! a probability is off by a factor of up to 1 ± 5·10^−7, and by up to 2^−40 of the largest.

pub mod device;
mod filter;
pub mod rejection;
pub mod request;

use super::simd::{self, Kernel, LANES, Lanes};

/// Tokens of a segment.
pub const SEGMENT: usize = 4096;
/// The most tokens of a vocabulary.
pub const MOST_TOKENS: usize = 1 << 20;
const MOST_SEGMENTS: usize = MOST_TOKENS / SEGMENT;
/// One, in the integers that weights are summed in.
const ONE: f32 = (1u64 << 40) as f32;

/// What a random number is for. A number is used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Whether a draft token is accepted.
    Accept = 0,
    /// Which token is drawn: by plain sampling, as a bonus, or after a refusal.
    Draw = 1,
}

/// A random number below 2^53, uniformly distributed; u is this number / 2^53.
///
/// Philox4x32-10 (Salmon et al. 2011): the key is the seed, low word first; the counter is (position low, position high, purpose,
/// index). Of the four words x0 … x3 of the result the number is (x1·2^32 + x0) >> 11.
pub fn uniform(seed: u64, position: i64, purpose: Purpose, index: u32) -> u64 {
    let [x0, x1, ..] = philox([position as u32, (position >> 32) as u32, purpose as u32, index], seed);
    ((x1 as u64) << 32 | x0 as u64) >> 11
}

fn philox(mut counter: [u32; 4], key: u64) -> [u32; 4] {
    let mut key = [key as u32, (key >> 32) as u32];
    for _ in 0..10 {
        let [a, b] = [counter[0] as u64 * 0xd251_1f53, counter[2] as u64 * 0xcd9e_8d57];
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

/// u of a number of [`uniform`].
pub fn unit(number: u64) -> f64 {
    number as f64 / (1u64 << 53) as f64
}

/// What the numbers of a row are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Logits,
    /// Probabilities, or any multiple of them.
    Weights,
}

impl Form {
    /// The number of a token that cannot be drawn.
    pub fn none(self) -> f32 {
        match self {
            Form::Logits => f32::NEG_INFINITY,
            Form::Weights => 0.0,
        }
    }

    /// `x` without what is no number; whether it was one. A negative weight is none.
    #[inline(always)]
    pub fn clean(self, x: f32) -> (f32, bool) {
        let is_number = match self {
            Form::Logits => !x.is_nan(),
            Form::Weights => x >= 0.0,
        };
        if is_number { (x, true) } else { (self.none(), false) }
    }
}

/// How tokens of a request are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub temperature: f32,
    /// 0 or below: off.
    pub top_k: i32,
    /// 1 or above, or NaN: off.
    pub top_p: f32,
    /// 0 or below, or NaN: off.
    pub min_p: f32,
    /// Filters are computed at temperature 1.
    pub temperature_last: bool,
}

impl Settings {
    /// The row's own distribution.
    pub const PLAIN: Settings =
        Settings { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, temperature_last: false };

    /// Temperatures below 10^−5 take the largest logit and no random number.
    pub fn is_greedy(&self) -> bool {
        const LEAST: f32 = 1e-5;
        // A temperature that is no number is greedy, too.
        !matches!(self.temperature.partial_cmp(&LEAST), Some(std::cmp::Ordering::Greater | std::cmp::Ordering::Equal))
    }
}

/// How numbers of a row become weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    form: Form,
    /// log2 e / temperature.
    c: f32,
}

impl Scale {
    /// `temperature` is that of logits; weights have had theirs.
    pub fn new(form: Form, temperature: f32) -> Scale {
        Scale { form, c: (std::f32::consts::LOG2_E / temperature).max(f32::MIN_POSITIVE) }
    }

    /// w(x, m) in each lane; m is no NaN, and the row has a number that is above [`Form::none`].
    #[inline(always)]
    fn weights<L: Lanes>(self, x: L, m: f32) -> L {
        self.weigh(x, m, |d| power(d).zero_below(d, LEAST))
    }

    /// w(x, m) as a strip's sum has it.
    #[inline(always)]
    fn summands<L: Lanes>(self, x: L, m: f32) -> L {
        self.weigh(x, m, |d| power(d.max(L::splat(LEAST))))
    }

    /// `of` gives the weight of a logit, from the exponent of 2.
    #[inline(always)]
    fn weigh<L: Lanes>(self, x: L, m: f32, of: impl Fn(L) -> L) -> L {
        if m == f32::INFINITY {
            return L::splat(1.0).zero_below(x, f32::INFINITY);
        }
        match self.form {
            Form::Weights => x.div(L::splat(m)),
            Form::Logits => of(x.sub(L::splat(m)).mul(L::splat(self.c))),
        }
    }

    /// w(x, m).
    fn weight(self, x: f32, m: f32) -> f32 {
        simd::dispatch(Weights { scale: self, x: [x; LANES], m })[0]
    }
}

/// Exponents below it give no weight.
const LEAST: f32 = -100.0;

/// 2^d for −126 … 0 within 1.1·10^−7, and exactly 1 at 0.
#[inline(always)]
fn power<L: Lanes>(d: L) -> L {
    let n = d.round();
    let f = d.sub(n);
    let mut p = L::splat(f32::from_bits(0x3aad_dd0b));
    for bits in [0x3c1e_7544, 0x3d63_5ba9, 0x3e75_fcde, 0x3f31_7215, 0x3f80_0000] {
        p = p.fused(f, L::splat(f32::from_bits(bits)));
    }
    p.mul(n.exp2_whole())
}

/// The numbers of strip `r` of a row, which is filled up with `none`.
#[inline(always)]
fn strip(row: &[f32], r: usize, none: f32) -> [f32; LANES] {
    let rest = &row[r * LANES..];
    match rest.first_chunk() {
        Some(full) => *full,
        None => std::array::from_fn(|i| rest.get(i).copied().unwrap_or(none)),
    }
}

/// The largest number of a row; −inf if it has none.
pub fn largest(row: &[f32]) -> f32 {
    struct Largest<'a>(&'a [f32]);
    impl Kernel for Largest<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<L: Lanes>(self) -> f32 {
            let mut best = L::splat(f32::NEG_INFINITY);
            for r in 0..self.0.len().div_ceil(LANES) {
                best = L::from_array(&strip(self.0, r, f32::NEG_INFINITY)).max(best);
            }
            best.to_array().into_iter().fold(f32::NEG_INFINITY, f32::max)
        }
    }
    simd::dispatch(Largest(row))
}

/// Drops tokens from a row; those that are none of its tokens are passed over.
pub fn forbid(row: &mut [f32], form: Form, tokens: impl Iterator<Item = i64>) {
    for token in tokens {
        if let Some(x) = usize::try_from(token).ok().and_then(|token| row.get_mut(token)) {
            *x = form.none();
        }
    }
}

/// The lowest token of the largest number, if a token can be drawn.
pub fn first_largest(row: &[f32], form: Form) -> Option<usize> {
    let best = largest(row);
    if best > form.none() { row.iter().position(|&x| x == best) } else { None }
}

/// w(x, m) of the eight numbers of a strip.
struct Weights {
    scale: Scale,
    x: [f32; LANES],
    m: f32,
}

impl Kernel for Weights {
    type Output = [f32; LANES];
    #[inline(always)]
    fn run<L: Lanes>(self) -> [f32; LANES] {
        self.scale.weights(L::from_array(&self.x), self.m).to_array()
    }
}

/// The strips of a segment up to the one whose sum is above `target`: its number and what precedes it, or, where there is none, the
/// number of strips and the sum of all.
struct Strips<'a> {
    scale: Scale,
    segment: &'a [f32],
    m: f32,
    target: u64,
}

impl Kernel for Strips<'_> {
    type Output = (usize, u64);
    #[inline(always)]
    fn run<L: Lanes>(self) -> (usize, u64) {
        let none = self.scale.form.none();
        let count = self.segment.len().div_ceil(LANES);
        let mut before = 0;
        for first in (0..count).step_by(4) {
            let weights = |r| match r < count {
                true => self.scale.summands(L::from_array(&strip(self.segment, r, none)), self.m),
                false => L::splat(0.0),
            };
            let sums = L::sums([weights(first), weights(first + 1), weights(first + 2), weights(first + 3)]);
            for (r, sum) in sums.into_iter().enumerate() {
                let sum = (sum * ONE) as u64;
                if before + sum > self.target {
                    return (first + r, before);
                }
                before += sum;
            }
        }
        (count, before)
    }
}

#[derive(Clone, Copy, Default)]
struct Segment {
    /// m_s
    largest: f32,
    /// n_s
    sum: u64,
    /// w(m_s, M)
    scale: f32,
    /// N_s
    share: u64,
}

/// What tokens are drawn with from one row.
pub struct Distribution<'a> {
    row: &'a [f32],
    scale: Scale,
    /// M
    largest: f32,
    /// ΣN_s; 0 if no token can be drawn.
    total: u64,
    segments: [Segment; MOST_SEGMENTS],
}

impl<'a> Distribution<'a> {
    /// The row is clean (see [`Form::clean`]) and has at most [`MOST_TOKENS`] numbers.
    pub fn new(row: &'a [f32], scale: Scale) -> Distribution<'a> {
        let mut made =
            Distribution { row, scale, largest: 0.0, total: 0, segments: [Segment::default(); MOST_SEGMENTS] };
        for (segment, numbers) in made.segments.iter_mut().zip(row.chunks(SEGMENT)) {
            segment.largest = largest(numbers);
            if segment.largest > scale.form.none() {
                let strips = Strips { scale, segment: numbers, m: segment.largest, target: u64::MAX };
                segment.sum = simd::dispatch(strips).1;
            }
        }
        let used = &mut made.segments[..row.len().div_ceil(SEGMENT)];
        made.largest = used.iter().fold(f32::NEG_INFINITY, |best, s| best.max(s.largest));
        for segment in used.iter_mut().filter(|s| s.sum > 0) {
            segment.scale = scale.weight(segment.largest, made.largest);
            segment.share = (segment.sum as f64 * segment.scale as f64) as u64;
            made.total += segment.share;
        }
        made
    }

    fn size(&self) -> Size {
        Size { largest: self.largest, total: self.total }
    }

    /// Whether no token can be drawn.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// The token for a number of [`uniform`]; the distribution is not empty.
    pub fn draw(&self, number: u64) -> usize {
        let mut left = ((number as u128 * self.total as u128) >> 53) as u64;
        let mut s = 0;
        while left >= self.segments[s].share {
            left -= self.segments[s].share;
            s += 1;
        }
        let Segment { largest: m, sum, scale, .. } = self.segments[s];
        let target = ((left as f64 / scale as f64) as u64).min(sum - 1);
        let segment = &self.row[s * SEGMENT..self.row.len().min((s + 1) * SEGMENT)];
        let (r, before) = simd::dispatch(Strips { scale: self.scale, segment, m, target });
        let x = strip(segment, r, self.scale.form.none());
        let weights = simd::dispatch(Weights { scale: self.scale, x, m });
        let (mut sum, mut last) = (0.0, 0);
        for (i, w) in weights.into_iter().enumerate().filter(|&(_, w)| w > 0.0) {
            (sum, last) = (sum + w, i);
            if (sum * ONE) as u64 > target - before {
                break;
            }
        }
        s * SEGMENT + r * LANES + last
    }

    /// What the weights of a segment are multiplied by to be probabilities.
    fn factor(&self, s: usize) -> f64 {
        self.segments[s].scale as f64 * ONE as f64 / self.total as f64
    }

    /// p(token); 0 for what is no token of the row, and for all if the distribution is empty.
    pub fn probability(&self, token: usize) -> f64 {
        let Some(&x) = self.row.get(token).filter(|_| !self.is_empty()) else { return 0.0 };
        let Segment { largest: m, scale, sum, .. } = self.segments[token / SEGMENT];
        if sum == 0 {
            return 0.0;
        }
        self.scale.weight(x, m) as f64 * scale as f64 * ONE as f64 / self.total as f64
    }

    /// ln p, as a function of a token's number.
    pub fn logarithm(&self) -> Logarithm {
        Logarithm { scale: self.scale, largest: self.largest, ln_total: (self.total as f64 / ONE as f64).ln() }
    }

    /// Hands (token, p(token)) of every token that has weight to `take`, as float32: w(x, m_s) times the factor of the segment,
    /// which is rounded before.
    pub fn probabilities(&self, mut take: impl FnMut(usize, f32)) {
        for (s, segment) in self.row.chunks(SEGMENT).enumerate().filter(|&(s, _)| self.segments[s].sum > 0) {
            let (m, factor) = (self.segments[s].largest, self.factor(s) as f32);
            for r in 0..segment.len().div_ceil(LANES) {
                let x = strip(segment, r, self.scale.form.none());
                let weights = simd::dispatch(Weights { scale: self.scale, x, m });
                for (i, w) in weights.into_iter().enumerate().filter(|&(_, w)| w > 0.0) {
                    take(s * SEGMENT + r * LANES + i, w * factor);
                }
            }
        }
    }

    /// Turns `q`, probabilities of the tokens of this row, to weights of the residual distribution: max(p − q, 0).
    pub fn residual(&self, q: &mut [f32]) {
        let mut next = 0;
        self.probabilities(|token, p| {
            q[next..token].fill(0.0);
            q[token] = (p - q[token]).max(0.0);
            next = token + 1;
        });
        q[next..].fill(0.0);
    }
}

/// How much a row has.
#[derive(Clone, Copy)]
struct Size {
    /// M
    largest: f32,
    /// ΣN_s
    total: u64,
}

impl Size {
    /// The sum of a row of weights.
    fn mass(self) -> f64 {
        self.largest as f64 * (self.total as f64 / ONE as f64)
    }

    /// What part of another row of the scale this one is.
    fn part_of(self, whole: Size, scale: Scale) -> f64 {
        if self.total == 0 {
            return 0.0;
        }
        self.total as f64 * scale.weight(self.largest, whole.largest) as f64 / whole.total as f64
    }
}

/// ln p of a distribution, in float64 from M and the sum.
#[derive(Clone, Copy)]
pub struct Logarithm {
    scale: Scale,
    largest: f32,
    ln_total: f64,
}

impl Logarithm {
    /// ln p of a token whose number is `x`.
    pub fn of(&self, x: f32) -> f64 {
        let (x, largest) = (x as f64, self.largest as f64);
        let ln_weight = match self.scale.form {
            _ if largest == f64::INFINITY => {
                if x == largest {
                    0.0
                } else {
                    f64::NEG_INFINITY
                }
            }
            // c is log2 e / temperature.
            Form::Logits => (x - largest) * (self.scale.c as f64 * std::f64::consts::LN_2),
            Form::Weights => (x / largest).ln(),
        };
        ln_weight - self.ln_total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_words_are_those_of_the_published_generator() {
        assert_eq!(philox([0; 4], 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(pi, 0x299f_31d0_a409_3822), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn random_numbers_differ_by_position_purpose_index_and_seed() {
        let all = [
            uniform(1, 2, Purpose::Draw, 0),
            uniform(1, 2, Purpose::Accept, 0),
            uniform(1, 2, Purpose::Draw, 1),
            uniform(1, 2 + (1 << 32), Purpose::Draw, 0),
            uniform(1 + (1 << 32), 2, Purpose::Draw, 0),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(*a < 1 << 53 && !all[..i].contains(a));
        }
    }

    fn row(n: usize, seed: u64) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..n).map(|_| (rng.f32() + rng.f32() + rng.f32() - 1.5) * 8.0).collect()
    }

    /// The formula in scalars, with IEEE 754's operations.
    fn weight(x: f32, m: f32, c: f32) -> f32 {
        let d = (x - m) * c;
        if d < -100.0 {
            return 0.0;
        }
        let n = d.round_ties_even();
        let coefficients = [0x3aaddd0b, 0x3c1e7544, 0x3d635ba9, 0x3e75fcde, 0x3f317215, 0x3f800000].map(f32::from_bits);
        coefficients.into_iter().reduce(|p, c| p.mul_add(d - n, c)).expect("some") * 2f32.powi(n as i32)
    }

    #[test]
    fn weights_are_powers_of_two_to_the_last_bits_and_the_same_bits_on_every_machine() {
        for temperature in [1.0, 0.3, 7.0] {
            let scale = Scale::new(Form::Logits, temperature);
            for i in 0..200_000 {
                let x = 3.0 - i as f32 * 4e-4;
                let w = scale.weight(x, 3.0);
                assert_eq!(w.to_bits(), weight(x, 3.0, scale.c).to_bits(), "{x}");
                let exact = ((x - 3.0) as f64 * scale.c as f64).exp2();
                assert!(
                    w == 0.0 && exact < 2f64.powi(-99) || (w as f64 / exact - 1.0).abs() < 1e-5,
                    "{x}: {w} {exact}"
                );
            }
            assert_eq!(scale.weight(3.0, 3.0), 1.0);
            assert_eq!(scale.weight(f32::NEG_INFINITY, 3.0), 0.0);
        }
        let infinite = Scale::new(Form::Logits, f32::INFINITY);
        assert_eq!([-1e30, 3.0, f32::NEG_INFINITY].map(|x| infinite.weight(x, 3.0)), [1.0, 1.0, 0.0]);
    }

    /// Evenly spaced numbers draw each token as often as its probability says, to one.
    #[test]
    fn draws_divide_the_unit_interval_by_probability() {
        const DRAWS: u64 = 20_000;
        for (n, temperature) in [(2, 1.0), (9, 0.7), (4097, 1.0), (9000, 2.0)] {
            let row = row(n, n as u64);
            let p = Distribution::new(&row, Scale::new(Form::Logits, temperature));
            let mut counts = vec![0u64; n];
            let mut last = 0;
            for i in 0..DRAWS {
                let token = p.draw(i * ((1 << 53) / DRAWS));
                assert!(token >= last, "tokens ascend with u");
                last = token;
                counts[token] += 1;
            }
            let largest = row.iter().fold(f64::MIN, |m, &x| m.max(x as f64));
            let weights: Vec<f64> = row.iter().map(|&x| ((x as f64 - largest) / temperature as f64).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (token, count) in counts.iter().enumerate() {
                let exact = weights[token] / total;
                assert!((p.probability(token) / exact - 1.0).abs() < 1e-5, "{n}: {token}");
                assert!((p.logarithm().of(row[token]) - exact.ln()).abs() < 1e-5, "{n}: {token}");
                assert!((*count as f64 - exact * DRAWS as f64).abs() <= 1.01, "{n}: {token} {count} {exact}");
            }
        }
    }

    #[test]
    fn the_first_and_the_last_number_draw_tokens_that_have_weight() {
        let mut row = vec![f32::NEG_INFINITY; 10_000];
        for token in [5000, 5001, 9998] {
            row[token] = 1.0;
        }
        let p = Distribution::new(&row, Scale::new(Form::Logits, 1.0));
        assert_eq!((p.draw(0), p.draw((1 << 53) - 1)), (5000, 9998));
        assert_eq!(first_largest(&row, Form::Logits), Some(5000));
        assert_eq!(first_largest(&row[..5000], Form::Logits), None);
        row[7] = f32::INFINITY;
        row[8] = f32::INFINITY;
        let p = Distribution::new(&row, Scale::new(Form::Logits, 1.0));
        assert_eq!((p.draw(0), p.draw((1 << 53) - 1)), (7, 8));
        assert!(
            (p.logarithm().of(f32::INFINITY) + 2f64.ln()).abs() < 1e-9 && p.logarithm().of(1.0) == f64::NEG_INFINITY
        );
        assert!(Distribution::new(&[f32::NEG_INFINITY; 9], Scale::new(Form::Logits, 1.0)).is_empty());
        assert!(Distribution::new(&[0.0; 9], Scale::new(Form::Weights, 1.0)).is_empty());
    }

    #[test]
    fn weights_are_drawn_in_proportion_whatever_their_size() {
        for size in [1.0, 1e-30, 1e30] {
            let row = [1.0, 0.0, 2.0, 5.0].map(|w: f32| w * size);
            let p = Distribution::new(&row, Scale::new(Form::Weights, 9.0));
            for (token, exact) in [0.125, 0.0, 0.25, 0.625].into_iter().enumerate() {
                assert!((p.probability(token) - exact).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn residual_is_what_the_target_has_more_than_the_draft() {
        let (target, draft) = (row(5000, 1), row(5000, 2));
        let p = Distribution::new(&target, Scale::new(Form::Logits, 1.0));
        let q = Distribution::new(&draft, Scale::new(Form::Logits, 0.5));
        let mut residual = vec![0.0; 5000];
        q.probabilities(|token, q| residual[token] = q);
        p.residual(&mut residual);
        for (token, &more) in residual.iter().enumerate() {
            let exact = (p.probability(token) - q.probability(token)).max(0.0);
            assert!((more as f64 - exact).abs() < 1e-6 * p.probability(token) + 1e-12);
        }
        let mut same = vec![0.0; 5000];
        p.probabilities(|token, p| same[token] = p);
        p.residual(&mut same);
        assert!(same.iter().all(|&w| w == 0.0));
    }
}
