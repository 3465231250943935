//! The choice: from times to what pays.

use super::table::{Grid, LEAST, Place, Table, Times, last_below};
use crate::abi::{VWD_BUDGET_PRR, VWD_BUDGET_SELF, VWD_BUDGET_SPARSE, vwd_budget_answer, vwd_budget_question};
use crate::core::status::{Error, Result};
use crate::runtime::require_no_flags;

/// A strategy pays if it is faster than what it is compared with by more than this share.
pub const MARGIN: f64 = 0.02;

/// A checked question, defaults filled in.
#[derive(Clone, Copy)]
pub struct Question {
    context: f64,
    batch: f64,
    /// p; absent if it is not known.
    acceptance: Option<f64>,
    /// The largest number of drafts that is asked for.
    max_draft: usize,
    rest: f64,
    rest_position: f64,
    margin: f64,
    /// Ratios, coverages, and how many there are.
    coverage: ([f32; 8], [f32; 8], usize),
}

impl Question {
    pub fn from_c(c: &vwd_budget_question) -> Result<Question> {
        require_no_flags("question.flags", c.flags)?;
        if c.context == 0 {
            return Err(Error::argument("question.context", 0, "at least 1"));
        }
        if !(0.0..=1.0).contains(&c.acceptance) {
            return Err(Error::argument("question.acceptance", c.acceptance, "0 to 1"));
        }
        let times = [
            ("question.rest_us", c.rest_us),
            ("question.rest_position_us", c.rest_position_us),
            ("question.margin", c.margin),
        ];
        for (name, value) in times {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::argument(name, value, "a finite number, 0 or above"));
            }
        }
        let ratios = &c.coverage_ratios;
        let count = ascending("question.coverage_ratios", ratios, 1.0)?.len();
        for (n, coverage) in c.coverages.iter().enumerate() {
            let most = if n < count { 1.0 } else { 0.0 };
            if !(0.0..=most).contains(coverage) {
                let expected = if n < count { "0 to 1" } else { "0 past the ratios" };
                return Err(Error::argument(&format!("question.coverages[{n}]"), coverage, expected));
            }
        }
        Ok(Question {
            context: c.context as f64,
            batch: c.batch.max(1) as f64,
            acceptance: (c.acceptance > 0.0).then_some(c.acceptance as f64),
            max_draft: if c.max_draft == 0 { usize::MAX } else { c.max_draft as usize },
            rest: c.rest_us as f64,
            rest_position: c.rest_position_us as f64,
            margin: if c.margin == 0.0 { MARGIN } else { c.margin as f64 },
            coverage: (c.coverage_ratios, c.coverages, count),
        })
    }

    /// The share of the selected blocks that guesses of a ratio cover.
    fn covered(&self, ratio: f64) -> f64 {
        let (ratios, coverages, count) = &self.coverage;
        let ratio = ratio.clamp(ratios[0] as f64, ratios[count - 1] as f64);
        Place::of(&ratios[..*count], ratio).between(|n| coverages[n] as f64)
    }
}

/// The values before the first 0: finite, ascending, the first not below `least`. No other value follows the 0.
pub fn ascending<'v>(name: &str, values: &'v [f32], least: f32) -> Result<&'v [f32]> {
    let count = values.iter().position(|&value| value == 0.0).unwrap_or(values.len());
    for (n, &value) in values.iter().enumerate() {
        let refuse = |expected: String| Err(Error::argument(&format!("{name}[{n}]"), value, expected));
        match n {
            _ if n > count && value != 0.0 => return refuse("0 after the 0 that ends the list".to_owned()),
            _ if n >= count => {}
            0 if !(value.is_finite() && value >= least) => return refuse(format!("at least {least}")),
            _ if n > 0 && !(value.is_finite() && value > values[n - 1]) => {
                return refuse(format!("more than {}, the value before it", values[n - 1]));
            }
            _ => {}
        }
    }
    Ok(&values[..count])
}

/// Σ_{j=0…γ} p^j: the tokens that a round of γ drafts gives.
fn tokens(p: f64, gamma: usize) -> f64 {
    (0..=gamma).map(|j| p.powi(j as i32)).sum()
}

/// The times of one context and batch beside the grid that they lie on.
struct Case<'t> {
    grid: &'t Grid,
    times: Times,
    rest: f64,
    rest_position: f64,
}

/// A layer by PRR at one ratio.
#[derive(Clone, Copy)]
struct Prr {
    ratio: f64,
    guess: f64,
    repair: f64,
    /// The microseconds of the whole layer.
    time: f64,
}

impl Case<'_> {
    /// Microseconds of a whole layer.
    fn dense(&self) -> f64 {
        self.rest + self.times.dense[0]
    }

    fn serial(&self) -> f64 {
        self.rest + self.times.select + self.times.attend
    }

    fn prr(&self, ratio: f64, covered: f64) -> Prr {
        let Times { guess, repair, prr, .. } = &self.times;
        let guess = self.grid.at_ratio(guess, ratio);
        let [repair, layer] = [repair, prr].map(|times| self.grid.at_share(times, ratio, 1.0 - covered));
        // Both layers, PRR's and SERIAL's, include the same work beside selection and attention; the difference leaves it out.
        let time = self.rest + (self.times.select + self.times.attend + layer - self.times.serial).max(LEAST);
        Prr { ratio, guess, repair, time }
    }

    fn hidden_ratio(&self) -> Option<f64> {
        let points = self.grid.ratios.iter().zip(self.times.guess).map(|(&ratio, guess)| (ratio as f64, guess));
        last_below(points, self.times.select)
    }

    /// The fastest of the ratios at which something bends: those of the grid, those of the coverage, and the hidden one.
    fn best_prr(&self, question: &Question, hidden: Option<f64>) -> Option<Prr> {
        let (ratios, _, count) = &question.coverage;
        if *count == 0 || self.times.prr[0][0].is_infinite() {
            return None;
        }
        let largest = *self.grid.ratios.last().expect("a ratio");
        let known = ratios[..*count].iter().filter(|&&ratio| ratio <= largest);
        let candidates = self.grid.ratios.iter().chain(known).map(|&ratio| ratio as f64).chain(hidden);
        candidates.map(|ratio| self.prr(ratio, question.covered(ratio))).min_by(|a, b| a.time.total_cmp(&b.time))
    }

    fn break_even_coverage(&self, hidden: Option<f64>) -> f64 {
        let ratio = hidden.unwrap_or(1.0);
        let points = self.grid.shares.iter().map(|&share| (share as f64, self.prr(ratio, 1.0 - share as f64).time));
        last_below(points, self.serial()).map_or(f64::INFINITY, |missed| 1.0 - missed)
    }

    fn verify(&self, gamma: usize) -> f64 {
        self.rest + gamma as f64 * self.rest_position + self.times.dense[gamma]
    }

    /// Tokens in the time of γ drafts, each of which takes `draft`, against dense steps.
    fn self_gain(&self, p: f64, gamma: usize, draft: f64) -> f64 {
        tokens(p, gamma) * self.dense() / (gamma as f64 * draft + self.verify(gamma))
    }

    /// The γ that gives most tokens in the time, and its gain.
    fn best_gamma(&self, p: f64, most: usize, draft: f64) -> (usize, f64) {
        let mut best = (0, 1.0);
        for gamma in 1..=most {
            let gain = self.self_gain(p, gamma, draft);
            if gamma == 1 || gain > best.1 {
                best = (gamma, gain);
            }
        }
        best
    }

    fn break_even_acceptance(&self, most: usize, draft: f64) -> f64 {
        let pays = |p: f64| most > 0 && self.best_gamma(p, most, draft).1 >= 1.0;
        if !pays(1.0) {
            return f64::INFINITY;
        }
        let (mut low, mut high) = (0.0, 1.0);
        // 24 halvings, as fine as a float32 is.
        for _ in 0..24 {
            let middle = (low + high) / 2.0;
            if pays(middle) { high = middle } else { low = middle }
        }
        high
    }
}

pub fn ask(table: &Table, question: &Question) -> vwd_budget_answer {
    let (times, is_outside) = table.at(question.context, question.batch);
    let case = Case { grid: &table.grid, times, rest: question.rest, rest_position: question.rest_position };
    let least = 1.0 + question.margin;
    let mut pays = 0;
    let mut judge = |bit: u32, gain: f64| {
        let does = gain > least;
        pays |= if does { bit } else { 0 };
        does
    };

    let (dense, serial) = (case.dense(), case.serial());
    judge(VWD_BUDGET_SPARSE, dense / serial);

    let hidden = case.hidden_ratio();
    let prr = case.best_prr(question, hidden);
    let prr_gain = prr.map_or(0.0, |prr| serial / prr.time);
    let takes_prr = judge(VWD_BUDGET_PRR, prr_gain);

    let draft = prr.filter(|_| takes_prr).map_or(serial, |prr| prr.time);
    let most = question.max_draft.min(table.grid.max_draft);
    let drafts = question.acceptance.filter(|_| most > 0).map(|p| case.best_gamma(p, most, draft));
    let self_gain = drafts.map_or(0.0, |(_, gain)| gain);
    let takes_self = judge(VWD_BUDGET_SELF, self_gain);

    vwd_budget_answer {
        struct_size: size_of::<vwd_budget_answer>() as u32,
        pays,
        extrapolated: is_outside as u32,
        gamma: drafts.filter(|_| takes_self).map_or(0, |(gamma, _)| gamma as u32),
        hidden_ratio: hidden.unwrap_or(0.0) as f32,
        ratio: prr.filter(|_| takes_prr).map_or(0.0, |prr| prr.ratio) as f32,
        sparse_gain: (dense / serial) as f32,
        prr_gain: prr_gain as f32,
        self_gain: self_gain as f32,
        break_even_coverage: case.break_even_coverage(hidden) as f32,
        break_even_acceptance: case.break_even_acceptance(most, draft) as f32,
        select_us: case.times.select as f32,
        attend_us: case.times.attend as f32,
        guess_us: prr.map_or(0.0, |prr| prr.guess) as f32,
        repair_us: prr.map_or(0.0, |prr| prr.repair) as f32,
        dense_us: case.times.dense[0] as f32,
        verify_us: drafts.map_or(0.0, |(gamma, _)| case.times.dense[gamma]) as f32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::versioned::zeroed;
    use crate::decode::budget::table::Kind;

    /// One point: selection takes 20 µs, attention 10, dense attention 100 and for 3 and 4 positions more. A decoder's layer takes 5
    /// beside that, and hides guesses behind selection.
    fn table() -> Table {
        let grid = Grid {
            contexts: vec![1000.0],
            batches: vec![1.0],
            ratios: vec![1.0, 1.5, 2.0],
            shares: vec![0.0, 0.5, 1.0],
            max_draft: 3,
        };
        let repair = [4.0, 8.0, 12.0].repeat(3);
        let dense = vec![100.0, 100.0, 110.0, 120.0];
        let prr = [25.0, 25.0, 29.0].iter().flat_map(|beside| [4.0, 8.0, 12.0].map(|repair| beside + repair)).collect();
        let prr_foreseen = vec![50.0; 9];
        let times = [
            vec![20.0],
            vec![10.0],
            vec![12.0, 18.0, 24.0],
            repair,
            dense,
            vec![35.0],
            prr,
            prr_foreseen,
            vec![30.0, 34.0, 40.0],
        ];
        Table { grid, times }
    }

    fn with(table: Table, change: impl FnOnce(&mut vwd_budget_question)) -> vwd_budget_answer {
        let mut question = vwd_budget_question { context: 1000, ..zeroed() };
        change(&mut question);
        ask(&table, &Question::from_c(&question).expect("a valid question"))
    }

    #[track_caller]
    fn assert_near(found: f32, expected: f64) {
        assert!((found as f64 - expected).abs() <= expected.abs() * 1e-6, "{found} instead of {expected}");
    }

    #[test]
    fn hidden_ratio_is_the_largest_whose_guesses_are_attended_during_selection() {
        assert_near(with(table(), |_| ()).hidden_ratio, 1.5 + 0.5 * (20.0 - 18.0) / (24.0 - 18.0));
        let slow = |select: f32| {
            let mut table = table();
            table.times[Kind::Select as usize] = vec![select];
            with(table, |_| ()).hidden_ratio
        };
        assert_eq!([slow(11.9), slow(12.0), slow(30.0)], [0.0, 1.0, 2.0]);
    }

    #[test]
    fn prr_takes_the_fastest_ratio_for_the_coverage() {
        // Coverage grows with the ratio, as far as guesses stay hidden: 20 + 4 + 8·(1 − coverage).
        let answer = with(table(), |q| {
            q.coverage_ratios[..2].copy_from_slice(&[1.0, 1.5]);
            q.coverages[..2].copy_from_slice(&[0.5, 0.9]);
        });
        assert_eq!(answer.pays, VWD_BUDGET_SPARSE | VWD_BUDGET_PRR);
        assert_eq!(answer.ratio, 1.5);
        assert_near(answer.prr_gain, 30.0 / 24.8);
        assert_near(answer.guess_us, 18.0);
        assert_near(answer.repair_us, 4.8);
        // All guesses are wrong: repair attends everything.
        let answer = with(table(), |q| q.coverage_ratios[0] = 1.0);
        assert_eq!((answer.pays & VWD_BUDGET_PRR, answer.ratio), (0, 0.0));
        assert_near(answer.prr_gain, 30.0 / 32.0);
    }

    #[test]
    fn break_even_coverage_is_where_repair_takes_what_guessing_saves() {
        // The hidden ratio is a third of the way from 1.5 to 2: 20 + 4 / 3 + 4 + 8·(1 − coverage).
        assert_near(with(table(), |_| ()).break_even_coverage, 1.0 - (30.0 - 24.0 - 4.0 / 3.0) / 8.0);
        let mut slow = table();
        slow.times[Kind::Prr as usize] = vec![36.0; 9];
        assert_eq!(with(slow, |_| ()).break_even_coverage, f32::INFINITY);
        let mut quick = table();
        quick.times[Kind::Prr as usize] = vec![26.0; 9];
        assert_eq!(with(quick, |_| ()).break_even_coverage, 0.0);
    }

    #[test]
    fn prr_is_not_judged_for_a_shape_that_it_cannot_run_on() {
        let mut without = table();
        without.times[Kind::Prr as usize] = vec![f32::INFINITY; 9];
        let answer = with(without, |q| q.coverage_ratios[0] = 1.0);
        assert_eq!((answer.pays, answer.prr_gain, answer.repair_us), (VWD_BUDGET_SPARSE, 0.0, 0.0));
        assert_eq!(answer.break_even_coverage, f32::INFINITY);
    }

    #[test]
    fn self_drafts_as_many_tokens_as_give_most_in_the_time() {
        let drafted = |p: f32| with(table(), |q| q.acceptance = p);
        let often = drafted(0.9);
        assert_eq!((often.pays, often.gamma), (VWD_BUDGET_SPARSE | VWD_BUDGET_SELF, 3));
        assert_near(often.self_gain, (1.0 + 0.9 + 0.81 + 0.729) * 100.0 / (90.0 + 120.0));
        assert_near(often.verify_us, 120.0);
        let half = drafted(0.5);
        assert_eq!(half.gamma, 1);
        assert_near(half.self_gain, 1.5 * 100.0 / 130.0);
        let rarely = drafted(0.2);
        assert_eq!((rarely.pays, rarely.gamma), (VWD_BUDGET_SPARSE, 0));
        assert_near(rarely.self_gain, 1.2 * 100.0 / 130.0);
        for answer in [often, half, rarely] {
            assert_near(answer.break_even_acceptance, 0.3);
        }
    }

    #[test]
    fn self_drafts_no_more_than_it_is_asked_for() {
        let answer = with(table(), |q| (q.acceptance, q.max_draft) = (0.9, 2));
        assert_eq!(answer.gamma, 2);
        let answer = with(table(), |q| (q.acceptance, q.max_draft) = (0.9, 99));
        assert_eq!(answer.gamma, 3);
    }

    #[test]
    fn drafts_take_the_time_of_the_faster_sparse_step() {
        let answer = with(table(), |q| {
            q.acceptance = 0.5;
            (q.coverage_ratios[0], q.coverages[0]) = (1.5, 0.9);
        });
        assert_eq!(answer.pays, VWD_BUDGET_SPARSE | VWD_BUDGET_PRR | VWD_BUDGET_SELF);
        assert_near(answer.self_gain, 1.5 * 100.0 / (24.8 + 100.0));
    }

    #[test]
    fn rest_of_a_layer_takes_part_in_every_step() {
        let answer = with(table(), |q| {
            (q.rest_us, q.rest_position_us, q.acceptance, q.max_draft) = (100.0, 5.0, 0.9, 1);
            (q.coverage_ratios[0], q.coverages[0]) = (1.0, 0.0);
        });
        assert_near(answer.sparse_gain, 200.0 / 130.0);
        assert_near(answer.prr_gain, 130.0 / 132.0);
        assert_near(answer.self_gain, 1.9 * 200.0 / (130.0 + 205.0));
    }

    #[test]
    fn nothing_pays_where_dense_attention_is_the_fastest() {
        let mut short = table();
        short.times[Kind::Dense as usize] = vec![15.0, 15.0, 15.0, 15.0];
        let answer = with(short, |q| {
            q.acceptance = 0.9;
            (q.coverage_ratios[0], q.coverages[0]) = (1.0, 0.0);
        });
        assert_eq!((answer.pays, answer.gamma, answer.ratio), (0, 0, 0.0));
        assert_near(answer.sparse_gain, 0.5);
        assert!(answer.self_gain < 1.0 && answer.prr_gain < 1.0);
    }

    #[test]
    fn gains_within_the_margin_do_not_pay() {
        let mut level = table();
        level.times[Kind::Dense as usize][0] = 30.5;
        assert_eq!(with(level.clone(), |_| ()).pays, 0, "1.7 percent");
        assert_eq!(with(level.clone(), |q| q.margin = 0.01).pays, VWD_BUDGET_SPARSE);
        assert_eq!(with(level, |q| q.margin = 0.03).pays, 0);
    }

    #[test]
    fn answers_outside_the_grid_say_so() {
        assert_eq!(with(table(), |_| ()).extrapolated, 0);
        let longer = with(table(), |q| q.context = 2000);
        assert_eq!(longer.extrapolated, 1);
        assert_near(longer.dense_us, 200.0);
        assert_eq!(with(table(), |q| q.batch = 2).extrapolated, 1);
    }

    #[test]
    fn wrong_questions_name_the_field() {
        let refused = |change: &dyn Fn(&mut vwd_budget_question), expected: &str| {
            let mut question = vwd_budget_question { context: 1000, ..zeroed() };
            change(&mut question);
            let text = Question::from_c(&question).map(|_| ()).unwrap_err().to_string();
            assert_eq!(text, expected);
        };
        refused(&|q| q.context = 0, "question.context: 0; expected at least 1");
        refused(&|q| q.flags = 1, "question.flags: 1; expected 0");
        refused(&|q| q.acceptance = 1.5, "question.acceptance: 1.5; expected 0 to 1");
        refused(&|q| q.acceptance = f32::NAN, "question.acceptance: NaN; expected 0 to 1");
        refused(&|q| q.rest_us = -1.0, "question.rest_us: -1; expected a finite number, 0 or above");
        refused(&|q| q.margin = f32::INFINITY, "question.margin: inf; expected a finite number, 0 or above");
        refused(&|q| q.coverage_ratios[0] = 0.5, "question.coverage_ratios[0]: 0.5; expected at least 1");
        refused(
            &|q| q.coverage_ratios[..2].copy_from_slice(&[1.5, 1.5]),
            "question.coverage_ratios[1]: 1.5; expected more than 1.5, the value before it",
        );
        refused(
            &|q| q.coverage_ratios[1] = 1.5,
            "question.coverage_ratios[1]: 1.5; expected 0 after the 0 that ends the list",
        );
        refused(
            &|q| (q.coverage_ratios[0], q.coverages[0]) = (1.0, 1.1),
            "question.coverages[0]: 1.1; expected 0 to 1",
        );
        refused(&|q| q.coverages[2] = 0.5, "question.coverages[2]: 0.5; expected 0 past the ratios");
    }
}
