//! Exact selection of the best scores.
//!
//! Order: larger first; equal scores (−0 and +0 are equal) by the lower index; NaN ranks as −inf. The k-th largest is
//! found by counting digits of sortable keys (radix select): at most three passes over the scores, no memory but a
//! histogram on the stack, and the same answer whatever the order of the counting. Results come out ascending by index.
//! The k best count those that are forced.

use crate::core::status::{Error, Result};
use std::fmt::Display;

/// How many are selected of n: min(n, max(k, forced)), where the first `init` and the last `local` are forced.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub k: usize,
    pub init: usize,
    pub local: usize,
}

impl Budget {
    /// Refuses what selects nothing, most likely a forgotten k. A list without places says itself that nothing is wanted.
    pub fn require_some(&self, has_budgets: bool, cap: usize, expected: impl Display) -> Result<()> {
        match self.k + self.init + self.local {
            0 if cap > 0 && !has_budgets => {
                Err(Error::argument("k", 0, format!("at least 1 where there are {expected}")))
            }
            _ => Ok(()),
        }
    }
}

/// Adjacent indices of one score.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub score: f32,
    pub count: usize,
}

/// Hands the indices selected from `scores` to `emit`, ascending, and returns how many there are.
pub fn select_top(scores: &[f32], budget: Budget, emit: impl FnMut(usize)) -> usize {
    select_top_of(scores, &[], budget, emit)
}

/// The same where runs follow the scores: what has no summary, however much it is, takes no memory.
pub fn select_top_of(scores: &[f32], runs: &[Run], budget: Budget, mut emit: impl FnMut(usize)) -> usize {
    let n = scores.len() + runs.iter().map(|run| run.count).sum::<usize>();
    let init = budget.init.min(n);
    let end = n - budget.local.min(n - init);
    let wanted = budget.k.saturating_sub(init + n - end).min(end - init);
    (0..init).for_each(&mut emit);
    let single = &scores[init.min(scores.len())..end.min(scores.len())];
    let mut at = scores.len();
    let runs = runs.iter().map(move |run| {
        let first = at;
        at += run.count;
        (run.score, first.max(init)..at.min(end))
    });
    let free = single.iter().map(|&score| (score, 1)).chain(runs.clone().map(|(score, run)| (score, run.len())));
    let mut cut = Cut::of_best(free, end - init, wanted);
    for (i, &score) in single.iter().enumerate() {
        if cut.takes(score) {
            emit(init + i);
        }
    }
    for (score, run) in runs {
        let taken = cut.take(score, run.len());
        run.take(taken).for_each(&mut emit);
    }
    (end..n).for_each(&mut emit);
    init + wanted + (n - end)
}

/// The boundary below the best k scores. Asked about each score once, in ascending order of index, it takes those k.
pub struct Cut {
    /// Scores above this key are in.
    key: u32,
    /// How many of the scores that equal it are selected.
    ties: usize,
}

impl Cut {
    /// The boundary below the best k of n scores, fewer than 2^32. Scores come as runs: a score and how often it is there.
    pub fn of_best(runs: impl Iterator<Item = (f32, usize)> + Clone, n: usize, k: usize) -> Cut {
        if k == 0 {
            return Cut { key: u32::MAX, ties: 0 };
        }
        if k >= n {
            return Cut { key: 0, ties: 0 };
        }
        // The k-th largest key, digit by digit from the top: `key` holds the digits known so far (under `known`), and
        // the key sought is the `rank`-th largest, from 1, of those that share them.
        let (mut key, mut known, mut rank) = (0u32, 0u32, k);
        for (shift, bits) in [(21, 11), (10, 11), (0, 10)] {
            let digits = (1u32 << bits) - 1;
            let mut counts = [0u32; 1 << 11];
            runs.clone().for_each(|(score, count)| {
                let other = sort_key(score);
                if other & known == key {
                    counts[(other >> shift & digits) as usize] += count as u32;
                }
            });
            let mut digit = digits as usize;
            while (counts[digit] as usize) < rank {
                rank -= counts[digit] as usize;
                digit -= 1;
            }
            key |= (digit as u32) << shift;
            known |= digits << shift;
            if counts[digit] as usize == rank {
                // All that share these digits are in; their keys are `key` and above.
                return Cut { key: key - 1, ties: 0 };
            }
        }
        Cut { key, ties: rank }
    }

    #[inline(always)]
    pub fn takes(&mut self, score: f32) -> bool {
        self.take(score, 1) == 1
    }

    /// How many of a run it takes: its first ones.
    #[inline(always)]
    pub fn take(&mut self, score: f32, count: usize) -> usize {
        let key = sort_key(score);
        if key == self.key && self.ties > 0 {
            let taken = count.min(self.ties);
            self.ties -= taken;
            return taken;
        }
        if key > self.key { count } else { 0 }
    }
}

/// Orders as scores do: NaN with −inf, −0 with +0. No score has key 0 or `u32::MAX`.
#[inline(always)]
fn sort_key(score: f32) -> u32 {
    let score = if score.is_nan() { f32::NEG_INFINITY } else { score };
    let bits = (score + 0.0).to_bits(); // −0 + 0 is +0
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sorts by the definition.
    fn by_sorting(scores: &[f32], budget: Budget) -> Vec<usize> {
        let n = scores.len();
        let forced = |i: usize| i < budget.init || i + budget.local >= n;
        let mut order: Vec<usize> = (0..n).collect();
        let value = |i: usize| if scores[i].is_nan() { f32::NEG_INFINITY } else { scores[i] };
        order.sort_by(|&a, &b| {
            forced(b).cmp(&forced(a)).then(value(b).partial_cmp(&value(a)).expect("no NaN")).then(a.cmp(&b))
        });
        order.truncate(budget.k.max((0..n).filter(|&i| forced(i)).count()));
        order.sort_unstable();
        order
    }

    fn score() -> impl Strategy<Value = f32> {
        let special =
            [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-45, -1e-45, f32::MAX, f32::MIN];
        prop_oneof![
            2 => any::<u32>().prop_map(f32::from_bits),
            2 => prop::sample::select(special.to_vec()),
            3 => (-3i32..3).prop_map(|x| x as f32),
            3 => -1.0f32..1.0,
        ]
    }

    proptest! {
        #[test]
        fn selects_what_sorting_selects(
            scores in prop::collection::vec(score(), 0..400),
            k in 0usize..500, init in 0usize..20, local in 0usize..20,
        ) {
            let budget = Budget { k, init, local };
            let mut ids = Vec::new();
            let count = select_top(&scores, budget, |i| ids.push(i));
            prop_assert_eq!(count, ids.len());
            prop_assert_eq!(ids, by_sorting(&scores, budget));
        }
    }

    proptest! {
        #[test]
        fn selects_from_runs_what_it_selects_from_their_scores(
            scores in prop::collection::vec(score(), 0..40),
            runs in prop::collection::vec((score(), 0usize..30), 0..20),
            k in 0usize..500, init in 0usize..60, local in 0usize..60,
        ) {
            let runs: Vec<Run> = runs.into_iter().map(|(score, count)| Run { score, count }).collect();
            let repeated = runs.iter().flat_map(|run| std::iter::repeat_n(run.score, run.count));
            let all: Vec<f32> = scores.iter().copied().chain(repeated).collect();
            let budget = Budget { k, init, local };
            let mut ids = Vec::new();
            let count = select_top_of(&scores, &runs, budget, |i| ids.push(i));
            prop_assert_eq!(count, ids.len());
            prop_assert_eq!(ids, by_sorting(&all, budget));
        }
    }

    #[test]
    fn takes_the_lowest_indices_of_equal_scores() {
        let mut ids = Vec::new();
        select_top(&[7.0; 5000], Budget { k: 3, init: 0, local: 1 }, |i| ids.push(i));
        assert_eq!(ids, [0, 1, 4999]);
    }
}
