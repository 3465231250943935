//! Attention of a span to the coded tokens of a tile; `coded` says how.

use super::coded::{CodedQueries, CodedRows, nearest, unit_of};
use super::scores::{Scores, Softmax, score_rows};
use super::span::HEADS;
use super::tile::{Ahead, TILE};
use crate::ops::simd::codes::{dot_codes, padded, sum_codes};
use crate::ops::simd::{Kernel, Lanes, dispatch, dispatch_wide, rotate};
use std::ops::Range;

/// The queries of a span.
pub struct Asked<'q> {
    /// The queries times the scale, query h from h·D on.
    pub values: &'q [f32],
    pub coded: &'q CodedQueries<'q>,
    /// The soft cap of scores, where there is one.
    pub cap: Option<f32>,
    pub value_dim: usize,
}

/// Where the results of some rows go.
pub struct Target<'t> {
    pub m: &'t mut [f32],
    pub l: &'t mut [f32],
    /// Row r from r·Dv on.
    pub acc: &'t mut [f32],
}

/// Some rows attend over coded tokens; meanwhile the rows `ahead` are fetched. `room` is for Dv sums, padded, of each row.
///
/// # Safety
/// There are 1 … 64 tokens, whose codes are D/2 and Dv/2 readable bytes, and means of D numbers.
pub unsafe fn attend<T>(
    asked: &Asked,
    rows: Range<usize>,
    tokens: &CodedRows,
    Scores(scores): &mut Scores,
    target: Target,
    room: &mut [i32],
    mut ahead: Ahead<T>,
) {
    const SHARE: usize = TILE / 4;
    let Asked { values, coded, cap, value_dim } = *asked;
    let (dim, len) = (values.len() / HEADS, tokens.keys.len());
    let mut of_means = Scores([[0.0; TILE]; HEADS]);
    let (of_means, scores) = (&mut of_means.0[..rows.len()], &mut scores[..rows.len()]);
    let (mut dots, mut weights) = ([[0; TILE]; HEADS], [[0; TILE]; HEADS]);
    let (dots, weights) = (&mut dots[..rows.len()], &mut weights[..rows.len()]);
    // SAFETY: as the caller says; there are as many queries as rows.
    unsafe {
        ahead.fetch(SHARE);
        score_rows(&values[rows.start * dim..], dim, tokens.means, of_means, Ahead::nothing());
        dot_codes(&coded.numbers[rows.start * padded(dim)..], tokens.keys, dim / 2, dots);
        ahead.fetch(SHARE);
    }
    for (r, (scores, dots)) in scores.iter_mut().zip(&*dots).enumerate() {
        let (half, sum) = (coded.halves[rows.start + r], coded.sums[rows.start + r]);
        dispatch(ToScores { dots, of_means: &of_means[r], tokens, half, sum, scores: &mut scores[..len] });
    }
    let Target { m, l, acc } = target;
    dispatch_wide(Softmax { scores: &mut *scores, len, cap, m, l });
    ahead.fetch(SHARE);
    let mut units = [(0.0, 0); HEADS];
    for ((weights, scores), unit) in weights.iter_mut().zip(&mut *scores).zip(&mut units) {
        *unit = dispatch(ToWeights { scores: &mut scores[..len], scales: tokens.scales[1], weights });
    }
    // SAFETY: as the caller says.
    unsafe { sum_codes(tokens.values, value_dim / 2, weights, room) };
    ahead.fetch(SHARE);
    let sums = room.chunks_exact(padded(value_dim));
    for ((acc, sums), (unit, sum)) in acc.chunks_exact_mut(value_dim).zip(sums).zip(units) {
        dispatch(ToValues { sums, sum, half: 0.5 * unit, acc: &mut *acc });
        rotate(acc);
    }
}

/// Scores from products with codes: q·μ + s·unit·(dot − 7.5·sum).
struct ToScores<'r> {
    dots: &'r [i32; TILE],
    of_means: &'r [f32; TILE],
    tokens: &'r CodedRows<'r>,
    half: f32,
    /// 15·sum
    sum: i32,
    scores: &'r mut [f32],
}

impl Kernel for ToScores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let ToScores { dots, of_means, tokens, half, sum, scores } = self;
        for ((score, dot), scale) in scores.iter_mut().zip(dots).zip(tokens.scales[0]) {
            *score = (2 * dot).wrapping_sub(sum) as f32 * half * scale;
        }
        if tokens.means.len() == 1 {
            scores.iter_mut().for_each(|score| *score += of_means[0]);
        } else {
            scores.iter_mut().zip(tokens.mean_of).for_each(|(score, &mean)| *score += of_means[mean as usize]);
        }
    }
}

/// Weights of 16 bits from weights times scales; gives what 1 stands for, and 15 times the sum.
struct ToWeights<'r> {
    scores: &'r mut [f32],
    scales: &'r [f32],
    weights: &'r mut [i16; TILE],
}

impl Kernel for ToWeights<'_> {
    type Output = (f32, i32);

    #[inline(always)]
    fn run<L: Lanes>(self) -> (f32, i32) {
        let ToWeights { scores, scales, weights } = self;
        scores.iter_mut().zip(scales).for_each(|(weight, scale)| *weight *= scale);
        let unit = unit_of(scores);
        let factor = 1.0 / unit;
        let mut sum = 0;
        for (weight, x) in weights.iter_mut().zip(&*scores) {
            let number = nearest(x * factor) as i16;
            *weight = number;
            sum += i32::from(number);
        }
        (unit, 15 * sum)
    }
}

/// Rotated values from sums of codes: unit·(sums − 7.5·sum).
struct ToValues<'r> {
    sums: &'r [i32],
    sum: i32,
    half: f32,
    acc: &'r mut [f32],
}

impl Kernel for ToValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let ToValues { sums, sum, half, acc } = self;
        acc.iter_mut().zip(sums).for_each(|(acc, sums)| *acc = (2 * sums - sum) as f32 * half);
    }
}
