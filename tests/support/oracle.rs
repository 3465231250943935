//! What every call computes, as formulas in double precision, written from the contracts in `include/vanward.h` alone.
//!
//! Slow and plain on purpose. Nothing here calls the library or shares code with it.

use super::array::Array;
use std::collections::BTreeSet;

// --- verify and pack -------------------------------------------------------------------------------------------------

pub struct Verified {
    pub accepted: Vec<i64>,
    pub next_token: Vec<i64>,
    pub mismatch: Vec<i64>,
    pub committed: Array<i64>,
}

/// draft [B, γ], target [B, γ+1], lens [B].
pub fn verify(draft: &Array<i64>, target: &Array<i64>, lens: Option<&[i64]>) -> Verified {
    let (batch, gamma) = (draft.shape[0], draft.shape[1]);
    let mut result = Verified {
        accepted: vec![],
        next_token: vec![],
        mismatch: vec![],
        committed: Array::filled(&[batch, gamma + 1], -1),
    };
    for i in 0..batch {
        let len = lens.map_or(gamma, |lens| lens[i].clamp(0, gamma as i64) as usize);
        let refused = (0..len).find(|&j| draft[[i, j]] != target[[i, j]] || draft[[i, j]] < 0);
        let k = refused.unwrap_or(len);
        (0..k).for_each(|j| result.committed[[i, j]] = draft[[i, j]]);
        result.committed[[i, k]] = target[[i, k]];
        result.accepted.push(k as i64);
        result.next_token.push(target[[i, k]]);
        result.mismatch.push(refused.is_some() as i64);
    }
    result
}

/// What ends a request: stop tokens, the most tokens that it may still have, and at how many positions stop tokens do not count.
#[derive(Clone, Debug, Default)]
pub struct End {
    pub stop: Vec<i64>,
    pub remaining: Option<i64>,
    pub min_remaining: i64,
}

impl End {
    /// Takes one token after the other: how many are committed, and the value of finish (0: it goes on, 1: stop, 2: length).
    pub fn cut(&self, tokens: &[i64]) -> (usize, i64) {
        let is_full = |n: usize| self.remaining.is_some_and(|most| n as i64 >= most);
        for (n, &token) in tokens.iter().enumerate() {
            if is_full(n) {
                return (n, if n > 0 { 2 } else { 0 });
            }
            if n as i64 >= self.min_remaining && token >= 0 && self.stop.contains(&token) {
                return (n + 1, 1);
            }
        }
        (tokens.len(), if !tokens.is_empty() && is_full(tokens.len()) { 2 } else { 0 })
    }
}

/// Offsets [B+1], and for every packed row the (sequence, row) that it comes from.
pub fn pack(accepted: &[i64], gamma: usize) -> (Vec<i64>, Vec<(usize, usize)>) {
    let mut offsets = vec![0];
    let mut origin = vec![];
    for (i, &count) in accepted.iter().enumerate() {
        origin.extend((0..count.clamp(0, gamma as i64) as usize).map(|t| (i, t)));
        offsets.push(origin.len() as i64);
    }
    (offsets, origin)
}

// --- pages and lists -------------------------------------------------------------------------------------------------

/// Where things lie that are numbered per sequence: `pages` pages of `size` rows, found through `table` [B, max_pages].
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub table: Option<&'a Array<i64>>,
    pub pages: usize,
    pub size: usize,
}

impl Pages<'_> {
    /// Page and row of thing `t` of sequence `i`; none where the table names no page.
    pub fn find(&self, i: usize, t: usize) -> Option<(usize, usize)> {
        let p = t / self.size;
        let page = match self.table {
            Some(table) => *table.row([i]).get(p)?,
            None if p == 0 => i as i64,
            None => return None,
        };
        (0..self.pages as i64).contains(&page).then_some((page as usize, t % self.size))
    }

    pub fn capacity(&self) -> usize {
        self.size * self.table.map_or(1, |table| table.shape[1])
    }

    pub fn clamp_len(&self, len: i64) -> usize {
        len.clamp(0, self.capacity() as i64) as usize
    }
}

/// ids [B, Hk, cap] and counts [B, Hk].
#[derive(Clone)]
pub struct List {
    pub ids: Array<i64>,
    pub counts: Array<i64>,
}

impl List {
    /// Blocks that list (i, g) names among `n` that exist.
    pub fn blocks(&self, i: usize, g: usize, n: usize) -> BTreeSet<usize> {
        let ids = self.ids.row([i, g]);
        let count = self.counts[[i, g]].clamp(0, ids.len() as i64) as usize;
        ids[..count].iter().filter(|&&id| (0..n as i64).contains(&id)).map(|&id| id as usize).collect()
    }
}

/// Tokens of blocks of `size` tokens that are below `len`.
pub fn tokens(blocks: &BTreeSet<usize>, size: usize, len: usize) -> Vec<usize> {
    blocks.iter().flat_map(|&block| block * size..((block + 1) * size).min(len)).collect()
}

// --- attention -------------------------------------------------------------------------------------------------------

/// State of one query head over some tokens.
#[derive(Clone, Debug)]
pub struct State {
    pub acc: Vec<f64>,
    pub m: f64,
    pub l: f64,
}

impl State {
    pub fn empty(dim: usize) -> State {
        State { acc: vec![0.0; dim], m: f64::NEG_INFINITY, l: 0.0 }
    }

    pub fn out(&self) -> Vec<f64> {
        self.acc.iter().map(|a| if self.l == 0.0 { 0.0 } else { a / self.l }).collect()
    }

    /// With a sink, which takes part in the sum alone.
    pub fn out_beside(&self, sink: f64) -> Vec<f64> {
        let total = self.lse().max(sink) + (-(self.lse() - sink).abs()).exp().ln_1p();
        let share = if self.l == 0.0 || sink == f64::INFINITY { 0.0 } else { (self.lse() - total).exp() };
        self.out().iter().map(|x| x * share).collect()
    }

    pub fn lse(&self) -> f64 {
        self.m + self.l.ln()
    }
}

/// q [D]; keys and values: one [D] per token.
pub fn attention(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64) -> State {
    capped_attention(q, keys, values, q.len(), scale, None)
}

/// The same with values [Dv], and scores that become cap·tanh(s / cap) where there is a cap.
pub fn capped_attention(
    q: &[f64],
    keys: &[&[f64]],
    values: &[&[f64]],
    value_dim: usize,
    scale: f64,
    cap: Option<f64>,
) -> State {
    let capped = |s: f64| cap.map_or(s, |cap| cap * (s / cap).tanh());
    let scores: Vec<f64> = keys.iter().map(|k| capped(scale * dot(q, k))).collect();
    let mut state = State::empty(value_dim);
    state.m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for (s, value) in scores.iter().zip(values) {
        let weight = (s - state.m).exp();
        state.l += weight;
        state.acc.iter_mut().zip(*value).for_each(|(acc, v)| *acc += weight * v);
    }
    state
}

/// The tokens that row `row` of `rows` sees of a sequence of `len`, of the last `window` alone unless that is 0.
pub fn seen(len: usize, rows: usize, row: usize, window: usize) -> std::ops::Range<usize> {
    if row >= rows {
        return 0..0;
    }
    let end = (len + row + 1).saturating_sub(rows);
    if window == 0 { 0..end } else { end.saturating_sub(window)..end }
}

pub fn merge(states: &[State]) -> State {
    let mut sum = State::empty(states[0].acc.len());
    sum.m = states.iter().map(|s| s.m).fold(f64::NEG_INFINITY, f64::max);
    for state in states.iter().filter(|s| s.l > 0.0) {
        let weight = (state.m - sum.m).exp();
        sum.l += weight * state.l;
        sum.acc.iter_mut().zip(&state.acc).for_each(|(acc, a)| *acc += weight * a);
    }
    sum
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

pub fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    scores.iter().map(|s| (s - top).exp() / sum).collect()
}

// --- repair and gather -----------------------------------------------------------------------------------------------

/// Blocks that the result of a repair covers, and how many of them were missed.
pub fn repair(predicted: &BTreeSet<usize>, selected: &BTreeSet<usize>, exact: bool) -> (BTreeSet<usize>, usize) {
    let missed = selected.difference(predicted).count();
    (if exact { selected.clone() } else { selected | predicted }, missed)
}

/// (source, target) of every block that is copied.
pub fn gather(sources: &[i64], targets: Option<&[i64]>, count: Option<i64>, n: usize, m: usize) -> Vec<(usize, usize)> {
    let count = count.map_or(sources.len(), |c| c.clamp(0, sources.len() as i64) as usize);
    let pairs = (0..count).map(|j| (sources[j], targets.map_or(j as i64, |targets| targets[j])));
    let exists = |&(s, t): &(i64, i64)| (0..n as i64).contains(&s) && (0..m as i64).contains(&t);
    pairs.filter(exists).map(|(s, t)| (s as usize, t as usize)).collect()
}

// --- index -----------------------------------------------------------------------------------------------------------

/// Largest and smallest key of a block, per channel.
pub fn minmax(keys: &[&[f64]]) -> (Vec<f64>, Vec<f64>) {
    let over = |f: fn(f64, f64) -> f64, start: f64| {
        (0..keys[0].len()).map(|c| keys.iter().map(|k| k[c]).fold(start, f)).collect()
    };
    (over(f64::max, f64::NEG_INFINITY), over(f64::min, f64::INFINITY))
}

/// Mean key of a window.
pub fn mean(keys: &[&[f64]]) -> Vec<f64> {
    (0..keys[0].len()).map(|c| keys.iter().map(|k| k[c]).sum::<f64>() / keys.len() as f64).collect()
}

/// Windows that are full in a sequence of `len` tokens.
pub fn windows(len: usize, window: usize, stride: usize) -> usize {
    if len < window { 0 } else { (len - window) / stride + 1 }
}

/// Scale and minimum of the labels of one token's chosen channels, before they are rounded to float16.
pub fn label_range(chosen: &[f64]) -> (f64, f64) {
    let max = chosen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let min = chosen.iter().copied().fold(f64::INFINITY, f64::min);
    ((max - min) / 15.0, min)
}

/// Mean of a block's keys [n][D] and the axis along which they spread: two steps with the Gram matrix from its column of the
/// largest diagonal element.
pub fn axis(keys: &[&[f64]], weights: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (n, mean) = (keys.len(), mean(keys));
    let x: Vec<Vec<f64>> = keys.iter().map(|k| k.iter().zip(&mean).map(|(k, m)| k - m).collect()).collect();
    let weighted: Vec<Vec<f64>> = x.iter().map(|x| x.iter().zip(weights).map(|(x, w)| x * w).collect()).collect();
    let gram = |s: usize, t: usize| dot(&weighted[s], &weighted[t]);
    let farthest = (0..n).rev().max_by(|&s, &t| gram(s, s).total_cmp(&gram(t, t))).expect("a token");
    let normalised = |u: Vec<f64>| {
        let size = dot(&u, &u).sqrt();
        u.iter().map(|u| if size == 0.0 { 0.0 } else { u / size }).collect::<Vec<f64>>()
    };
    let mut u = normalised((0..n).map(|t| gram(t, farthest)).collect());
    for _ in 0..2 {
        u = normalised((0..n).map(|t| (0..n).map(|s| gram(t, s) * u[s]).sum()).collect());
    }
    let reach = u.iter().fold(1.15 / (n as f64).sqrt(), |reach, u| reach.max(0.6 * u.abs()));
    let along = |c: usize| reach * (0..n).map(|t| x[t][c] * u[t]).sum::<f64>();
    let axis = (0..mean.len()).map(along).collect();
    (mean, axis)
}

/// importance [Hk, D] of q [Tq, Hq, D] and k [Tk, Hk, D].
pub fn channel_importance(q: &Array<f64>, k: &Array<f64>) -> Array<f64> {
    let (heads, dim) = (k.shape[1], k.shape[2]);
    let group = q.shape[1] / heads;
    let largest = |x: &Array<f64>, h: usize, c: usize| (0..x.shape[0]).map(|t| x[[t, h, c]].abs()).fold(0.0, f64::max);
    Array::from_fn(&[heads, dim], |at| {
        let of_queries = (0..group).map(|j| largest(q, at[0] * group + j, at[1])).sum::<f64>() / group as f64;
        of_queries * largest(k, at[0], at[1])
    })
}

// --- select ----------------------------------------------------------------------------------------------------------

/// Quest's upper bound; q: the G query heads, [D] each.
pub fn minmax_score(q: &[&[f64]], key_max: &[f64], key_min: &[f64]) -> f64 {
    q.iter().map(|q| (0..q.len()).map(|c| q[c].max(0.0) * key_max[c] + q[c].min(0.0) * key_min[c]).sum::<f64>()).sum()
}

/// Σ_h softmax_w(scale·q_h·means_w) of every window w.
pub fn mean_softmax(q: &[&[f64]], means: &[&[f64]], scale: f64) -> Vec<f64> {
    let mut sum = vec![0.0; means.len()];
    for q in q {
        let scores: Vec<f64> = means.iter().map(|mean| scale * dot(q, mean)).collect();
        sum.iter_mut().zip(softmax(&scores)).for_each(|(sum, p)| *sum += p);
    }
    sum
}

/// Σ_h softmax_j(scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j))) of every block j.
pub fn axis_mass(q: &[&[f64]], blocks: &[(&[f64], &[f64])], scale: f64) -> Vec<f64> {
    let mut sum = vec![0.0; blocks.len()];
    for q in q {
        let along = |axis: &[f64]| (scale * dot(q, axis)).abs();
        let score =
            |(mean, axis): &(&[f64], &[f64])| scale * dot(q, mean) + along(axis) + (-2.0 * along(axis)).exp().ln_1p();
        let scores: Vec<f64> = blocks.iter().map(score).collect();
        sum.iter_mut().zip(softmax(&scores)).for_each(|(sum, p)| *sum += p);
    }
    sum
}

/// ln Σ_j S·e^(scale·q·mean_j)·cosh(.7·scale·q·axis_j) of the blocks that are left out; −inf without any.
pub fn log_mass(q: &[f64], blocks: &[(&[f64], &[f64])], size: usize, scale: f64) -> f64 {
    let term = |(mean, axis): &(&[f64], &[f64])| {
        let along = 0.7 * (scale * dot(q, axis)).abs();
        (size as f64).ln() + scale * dot(q, mean) + along + (-2.0 * along).exp().ln_1p() - 2f64.ln()
    };
    let terms: Vec<f64> = blocks.iter().map(term).filter(|term| term.is_finite()).collect();
    let top = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    top + terms.iter().map(|term| (term - top).exp()).sum::<f64>().max(f64::MIN_POSITIVE).ln()
}

/// Mean of k [n][D], mean of v [n][Dv], and the mean [D][Dv] of what they differ from their means by, multiplied.
pub fn moments(keys: &[&[f64]], values: &[&[f64]]) -> (Vec<f64>, Vec<f64>, Vec<Vec<f64>>) {
    let (mean_k, mean_v) = (mean(keys), mean(values));
    let entry = |c: usize, d: usize| {
        let product = |(k, v): (&&[f64], &&[f64])| (k[c] - mean_k[c]) * (v[d] - mean_v[d]);
        keys.iter().zip(values).map(product).sum::<f64>() / keys.len() as f64
    };
    let covariance = (0..mean_k.len()).map(|c| (0..mean_v.len()).map(|d| entry(c, d)).collect()).collect();
    (mean_k, mean_v, covariance)
}

/// Each block's largest window score, over the windows that overlap it.
pub fn pool_windows(scores: &[f64], window: usize, stride: usize, block: usize, blocks: usize) -> Vec<f64> {
    let overlaps = |w: usize, j: usize| w * stride < (j + 1) * block && w * stride + window > j * block;
    let best = |j| (0..scores.len()).filter(|&w| overlaps(w, j)).map(|w| scores[w]).fold(f64::NEG_INFINITY, f64::max);
    (0..blocks).map(best).collect()
}

/// Σ_h softmax over all tokens; q and labels on the label's channels.
pub fn label_mass(q: &[&[f64]], labels: &[Vec<f64>], scale: f64) -> Vec<f64> {
    let labels: Vec<&[f64]> = labels.iter().map(Vec::as_slice).collect();
    mean_softmax(q, &labels, scale)
}

/// Forced entries (the first `init` and the last `local` of `n`), then the best, ties to the lower: `count` in all.
pub fn top_k(scores: &[f64], count: usize, init: usize, local: usize) -> Vec<usize> {
    let n = scores.len();
    let forced = |j: usize| j < init || j + local >= n;
    // −0 + 0 is +0
    let rank = |j: usize| if scores[j].is_nan() { f64::NEG_INFINITY } else { scores[j] + 0.0 };
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| forced(b).cmp(&forced(a)).then(rank(b).total_cmp(&rank(a))).then(a.cmp(&b)));
    let mut chosen = order[..count].to_vec();
    chosen.sort_unstable();
    chosen
}

/// How many of `n` blocks a selection holds.
pub fn selection_size(n: usize, budget: usize, init: usize, local: usize) -> usize {
    let forced = if init + local >= n { n } else { init + local };
    n.min(budget.max(forced))
}

// --- predict ---------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
pub struct Holt {
    pub alpha: f64,
    pub beta: f64,
    pub gamma: f64,
}

/// (level, trend) after a step with this score.
pub fn holt_update(holt: Holt, (level, trend): (f64, f64), score: f64) -> (f64, f64) {
    if !level.is_finite() || !score.is_finite() {
        return (score, 0.0);
    }
    let next = holt.alpha * score + (1.0 - holt.alpha) * level;
    (next, holt.beta * (next - level) + (1.0 - holt.beta) * trend)
}

/// ŝ of a block.
pub fn holt_predict(holt: Holt, (level, trend): (f64, f64)) -> f64 {
    if level.is_finite() { level + holt.gamma * trend } else { f64::NEG_INFINITY }
}

/// ⌈ratio·k⌉, forgiving one part in a million.
pub fn predicted_size(ratio: f64, k: usize) -> usize {
    (ratio * k as f64 * (1.0 - 1e-6)).ceil() as usize
}
