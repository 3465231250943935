//! Seeded randomness. A failing round names its seed; `VANWARD_SEED=<seed>` runs that one alone, and
//! `VANWARD_ROUNDS=<n>` runs n times as many, 20 or .5 times.

use super::array::Array;
use std::ops::RangeInclusive;

pub struct Rng(fastrand::Rng);

/// Runs a case once per seed 0, 1, …; prints the seed of the round that panics.
pub fn rounds(count: u64, mut case: impl FnMut(&mut Rng)) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<f64>().expect(name));
    let seeds = match number("VANWARD_SEED") {
        Some(seed) => seed as u64..seed as u64 + 1,
        None => 0..(count as f64 * number("VANWARD_ROUNDS").unwrap_or(1.0)).ceil() as u64,
    };
    for seed in seeds {
        let _print = PrintOnPanic(seed);
        case(&mut Rng::new(seed));
    }
}

struct PrintOnPanic(u64);

impl Drop for PrintOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with VANWARD_SEED={}", self.0);
        }
    }
}

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(fastrand::Rng::with_seed(seed))
    }

    pub fn size(&mut self, range: RangeInclusive<usize>) -> usize {
        self.0.usize(range)
    }

    pub fn int(&mut self, range: RangeInclusive<i64>) -> i64 {
        self.0.i64(range)
    }

    /// True once in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.0.usize(0..n) == 0
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.0.usize(0..of.len())].clone()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        self.0.shuffle(items);
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.fill(&mut bytes);
        bytes
    }

    /// Uniform in 0 … 1.
    pub fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.0.f64()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.0.f64()).cos()
    }

    pub fn normals(&mut self, shape: &[usize]) -> Array<f64> {
        Array::new(shape, (0..shape.iter().product()).map(|_| self.normal()).collect())
    }

    /// Small whole numbers: their sums of products are exact in every float type used, so results can be compared bit for
    /// bit and ties are frequent.
    pub fn whole(&mut self, shape: &[usize], most: i64) -> Array<f64> {
        Array::new(shape, (0..shape.iter().product()).map(|_| self.int(-most..=most) as f64).collect())
    }

    /// `count` distinct numbers below `n`, ascending.
    pub fn subset(&mut self, n: usize, count: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        self.shuffle(&mut all);
        all.truncate(count);
        all.sort_unstable();
        all
    }
}
