//! Measured times, and what they are between the points of their grid.

/// The most ratios, shares and numbers of drafts of a grid.
pub const MOST_RATIOS: usize = 8;
pub const MOST_SHARES: usize = 8;
pub const MOST_DRAFT: usize = 31;

/// The shortest time, in microseconds: what clocks that are too coarse to see a call give.
pub const LEAST: f64 = 1e-3;

/// The axes of a table, each ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    /// Tokens of a sequence.
    pub contexts: Vec<f32>,
    /// Numbers of sequences.
    pub batches: Vec<f32>,
    /// Guessed blocks, as multiples of the selected ones; the first is 1.
    pub ratios: Vec<f32>,
    /// Shares of the selected blocks that were missed; the first is 0 and the last 1.
    pub shares: Vec<f32>,
    /// Drafts that are verified: 0 … max_draft.
    pub max_draft: usize,
}

impl Grid {
    /// The numbers of contexts and of batches, which are the first two dimensions of each kind's times.
    pub fn points(&self) -> [usize; 2] {
        [self.contexts.len(), self.batches.len()]
    }

    /// How many times of a kind a point has.
    pub fn inner(&self, kind: Kind) -> Vec<usize> {
        match kind {
            Kind::Select | Kind::Attend | Kind::Serial => vec![],
            Kind::Guess | Kind::Foreseen => vec![self.ratios.len()],
            Kind::Repair | Kind::Prr | Kind::PrrForeseen => vec![self.ratios.len(), self.shares.len()],
            Kind::Dense => vec![self.max_draft + 1],
        }
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Selection.
    Select,
    /// Attention over the selected blocks.
    Attend,
    /// Attention over guesses of each ratio.
    Guess,
    /// Repair, for each ratio and each share of missed blocks.
    Repair,
    /// Dense attention of γ + 1 positions.
    Dense,
    /// A layer of a decoder's step by SERIAL.
    Serial,
    /// The same by PRR, for each ratio and each share of missed blocks, where scores predict the list; and where it is foreseen.
    Prr,
    PrrForeseen,
    /// The same by FORESEEN, for each ratio.
    Foreseen,
}

impl Kind {
    pub const COUNT: usize = 9;
    pub const ALL: [Kind; Kind::COUNT] = [
        Kind::Select,
        Kind::Attend,
        Kind::Guess,
        Kind::Repair,
        Kind::Dense,
        Kind::Serial,
        Kind::Prr,
        Kind::PrrForeseen,
        Kind::Foreseen,
    ];

    /// As files name it.
    pub fn name(self) -> &'static str {
        ["select", "attend", "guess", "repair", "dense", "serial", "prr", "prr_foreseen", "foreseen"][self as usize]
    }

    /// Whether a shape may have no such time: not every decoder takes PRR. Its times are infinite then.
    pub fn may_be_infinite(self) -> bool {
        matches!(self, Kind::Prr | Kind::PrrForeseen)
    }
}

/// Microseconds, all above 0, and infinite where a decoder of the shape has not the strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    pub grid: Grid,
    /// By kind: [contexts, batches, …], in C order.
    pub times: [Vec<f32>; Kind::COUNT],
}

/// The times at one context and batch.
pub struct Times {
    pub select: f64,
    pub attend: f64,
    pub guess: [f64; MOST_RATIOS],
    pub repair: Repairs,
    pub dense: [f64; MOST_DRAFT + 1],
    pub serial: f64,
    pub prr: Repairs,
    pub prr_foreseen: Repairs,
    pub foreseen: [f64; MOST_RATIOS],
}

/// By ratio, then by share of missed blocks.
pub type Repairs = [[f64; MOST_SHARES]; MOST_RATIOS];

impl Grid {
    /// A time by ratio at any ratio.
    pub fn at_ratio(&self, times: &[f64; MOST_RATIOS], ratio: f64) -> f64 {
        Place::of(&self.ratios, ratio).between(|r| times[r])
    }

    /// A time by ratio and share at any of them.
    pub fn at_share(&self, times: &Repairs, ratio: f64, missed: f64) -> f64 {
        let share = Place::of(&self.shares, missed);
        Place::of(&self.ratios, ratio).between(|r| share.between(|x| times[r][x]))
    }
}

impl Table {
    /// The times at a context and batch, and whether the grid had to be left for them.
    pub fn at(&self, context: f64, batch: f64) -> (Times, bool) {
        let Grid { contexts, batches, ratios, shares, max_draft } = &self.grid;
        let (by_context, by_batch) = (Place::of(contexts, context), Place::of(batches, batch));
        let time = |kind: Kind, inner: usize, count: usize| {
            let times = &self.times[kind as usize];
            let measured = |c: usize, b: usize| times[(c * batches.len() + b) * count + inner] as f64;
            by_batch.between(|b| by_context.between(|c| measured(c, b)))
        };
        let (of_ratio, of_share) = (ratios.len(), ratios.len() * shares.len());
        let mut times = Times {
            select: time(Kind::Select, 0, 1),
            attend: time(Kind::Attend, 0, 1),
            guess: [0.0; MOST_RATIOS],
            repair: [[0.0; MOST_SHARES]; MOST_RATIOS],
            dense: [0.0; MOST_DRAFT + 1],
            serial: time(Kind::Serial, 0, 1),
            prr: [[0.0; MOST_SHARES]; MOST_RATIOS],
            prr_foreseen: [[0.0; MOST_SHARES]; MOST_RATIOS],
            foreseen: [0.0; MOST_RATIOS],
        };
        for r in 0..ratios.len() {
            times.guess[r] = time(Kind::Guess, r, of_ratio);
            times.foreseen[r] = time(Kind::Foreseen, r, of_ratio);
            for x in 0..shares.len() {
                let inner = r * shares.len() + x;
                times.repair[r][x] = time(Kind::Repair, inner, of_share);
                times.prr[r][x] = time(Kind::Prr, inner, of_share);
                times.prr_foreseen[r][x] = time(Kind::PrrForeseen, inner, of_share);
            }
        }
        for draft in 0..=*max_draft {
            times.dense[draft] = time(Kind::Dense, draft, max_draft + 1);
        }
        (times, by_context.is_outside || by_batch.is_outside)
    }
}

/// Where a value lies on an axis.
#[derive(Debug, PartialEq)]
pub struct Place {
    low: usize,
    high: usize,
    /// 0 at `low`, 1 at `high`, more past the last value.
    weight: f64,
    /// The factor on the time at the only value of an axis, for larger ones.
    factor: f64,
    pub is_outside: bool,
}

impl Place {
    pub fn of(axis: &[f32], x: f64) -> Place {
        let last = axis.len() - 1;
        let (first_value, last_value) = (axis[0] as f64, axis[last] as f64);
        let is_outside = x < first_value || x > last_value;
        if x <= first_value || last == 0 {
            let factor = (x / first_value).max(1.0);
            return Place { low: 0, high: 0, weight: 0.0, factor, is_outside };
        }
        let high = axis.iter().position(|&value| x <= value as f64).unwrap_or(last);
        let [a, b] = [high - 1, high].map(|n| axis[n] as f64);
        Place { low: high - 1, high, weight: (x - a) / (b - a), factor: 1.0, is_outside }
    }

    /// The value between those of the axis. Past the last one it goes on along the line of the last two, and never down; before the
    /// first one it stays.
    pub fn between(&self, value: impl Fn(usize) -> f64) -> f64 {
        let (low, high) = (value(self.low), value(self.high));
        // Infinite ones among them.
        if low == high {
            return low * self.factor;
        }
        let y = low + (high - low) * self.weight;
        (if self.weight > 1.0 { y.max(high) } else { y }) * self.factor
    }
}

/// The largest x up to which y, linear between points and constant past the last one, does not exceed a limit; `None` if it does at
/// the first point.
pub fn last_below(points: impl Iterator<Item = (f64, f64)>, limit: f64) -> Option<f64> {
    let mut before: Option<(f64, f64)> = None;
    for (x, y) in points {
        if y > limit {
            let (a, at_a) = before?;
            return Some(a + (x - a) * (limit - at_a) / (y - at_a));
        }
        before = Some((x, y));
    }
    before.map(|(x, _)| x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(axis: &[f32], values: &[f64], x: f64) -> (f64, bool) {
        let place = Place::of(axis, x);
        (place.between(|n| values[n]), place.is_outside)
    }

    #[test]
    fn times_are_linear_between_the_points_of_an_axis() {
        let (axis, values) = ([1000.0, 2000.0, 4000.0], [10.0, 30.0, 40.0]);
        assert_eq!(at(&axis, &values, 1000.0), (10.0, false));
        assert_eq!(at(&axis, &values, 1500.0), (20.0, false));
        assert_eq!(at(&axis, &values, 2000.0), (30.0, false));
        assert_eq!(at(&axis, &values, 3000.0), (35.0, false));
        assert_eq!(at(&axis, &values, 4000.0), (40.0, false));
    }

    #[test]
    fn times_past_an_axis_go_on_upwards_and_before_it_stay() {
        let axis = [1000.0, 2000.0, 4000.0];
        assert_eq!(at(&axis, &[10.0, 30.0, 40.0], 6000.0), (50.0, true));
        assert_eq!(at(&axis, &[10.0, 30.0, 20.0], 6000.0), (20.0, true), "a time that fell by chance falls no further");
        assert_eq!(at(&axis, &[10.0, 30.0, 40.0], 1.0), (10.0, true));
    }

    #[test]
    fn times_of_an_axis_with_one_point_grow_with_the_value() {
        assert_eq!(at(&[4.0], &[10.0], 4.0), (10.0, false));
        assert_eq!(at(&[4.0], &[10.0], 8.0), (20.0, true));
        assert_eq!(at(&[4.0], &[10.0], 1.0), (10.0, true));
    }

    #[test]
    fn every_kind_of_time_is_found_at_its_place() {
        let grid = Grid {
            contexts: vec![100.0, 200.0],
            batches: vec![1.0, 3.0],
            ratios: vec![1.0, 2.0],
            shares: vec![0.0, 0.5, 1.0],
            max_draft: 1,
        };
        // A time tells its kind and its indices in decimal digits: kind, context, batch, the rest.
        let of_kind = |kind: Kind| -> Vec<f32> {
            let count: usize = grid.inner(kind).iter().product();
            let digits = |n: usize| (kind as usize + 1) * 1000 + n / (2 * count) * 100 + n / count % 2 * 10 + n % count;
            (0..4 * count).map(|n| digits(n) as f32).collect()
        };
        let table = Table { times: Kind::ALL.map(of_kind), grid: grid.clone() };
        let (times, is_outside) = table.at(150.0, 2.0);
        // Half a context and half a batch further: 50 and 5.
        assert!(!is_outside);
        assert_eq!([times.select, times.attend], [1055.0, 2055.0]);
        assert_eq!(times.guess[..2], [3055.0, 3056.0]);
        assert_eq!(times.repair[0][..3], [4055.0, 4056.0, 4057.0]);
        assert_eq!(times.repair[1][..3], [4058.0, 4059.0, 4060.0]);
        assert_eq!(times.dense[..2], [5055.0, 5056.0]);
        assert_eq!(times.serial, 6055.0);
        assert_eq!(times.prr[1][..3], [7058.0, 7059.0, 7060.0]);
        assert_eq!(times.prr_foreseen[1][..3], [8058.0, 8059.0, 8060.0]);
        assert_eq!(times.foreseen[..2], [9055.0, 9056.0]);
        assert!(table.at(150.0, 4.0).1 && table.at(201.0, 1.0).1);
    }

    #[test]
    fn last_value_below_a_limit_is_that_of_the_first_crossing() {
        let points = [(1.0, 10.0), (1.5, 20.0), (2.0, 15.0), (3.0, 25.0)];
        let last = |limit| last_below(points.into_iter(), limit);
        assert_eq!(last(9.0), None);
        assert_eq!(last(10.0), Some(1.0));
        assert_eq!(last(15.0), Some(1.25));
        assert_eq!(last(20.0), Some(2.5));
        assert_eq!(last(25.0), Some(3.0));
        assert_eq!(last(99.0), Some(3.0));
    }
}
