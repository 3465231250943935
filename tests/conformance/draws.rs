//! How often calls commit which tokens: thousands of requests a call, which share their rows and differ in seeds, positions and drafts.
//!
//! Where VANWARD_DRAWS asks for many draws, threads make the drafts and count, and calls of a CUDA session take turns.

use crate::support::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How often each distribution is drawn from: VANWARD_DRAWS times where that is given, as `make draws` does.
pub fn draws(backend: &Backend, usually: usize, emulated: usize) -> usize {
    let is_emulated = backend.times(1000) < 1000;
    asked().unwrap_or(if is_emulated { emulated } else { usually })
}

/// VANWARD_DRAWS.
pub fn asked() -> Option<usize> {
    std::env::var("VANWARD_DRAWS").ok().map(|text| text.parse().expect("VANWARD_DRAWS"))
}

/// A call in memory, which is made again with other drafts and random numbers.
pub trait Again {
    fn run(&self);
    /// The draft tokens that a request has.
    fn draft(&self) -> &Tensor<'_>;
    /// Seeds and positions.
    fn numbers(&self) -> [&Tensor<'_>; 2];
    fn committed(&self) -> &Tensor<'_>;
}

/// What is counted, and of whom.
pub struct Count<'a> {
    pub draws: usize,
    /// Positions that a request may use.
    pub positions: usize,
    /// The seed of the drafts.
    pub seed: u64,
    /// Appends the draft tokens of a request.
    pub draft: &'a (dyn Fn(&mut Rng, &mut Vec<i64>) + Sync),
    pub bins: usize,
    /// Counts the committed tokens of a request.
    pub tally: &'a (dyn Fn(&[i64], &mut [u64]) + Sync),
}

impl Count<'_> {
    /// Counts of `draws` requests or a few more, so many at once as `place` is told to place. Every other call has one seed at all positions, the
    /// others have a seed for each request.
    pub fn of(
        &self,
        backend: &Backend,
        place: &(dyn for<'b> Fn(&'b Backend, usize) -> Box<dyn Again + 'b> + Sync),
    ) -> Vec<u64> {
        let at_once = if backend.is_cuda() && asked().is_some() { 8000 } else { 1000 };
        let at_once = self.draws.min(at_once);
        let calls = self.draws.div_ceil(at_once);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = if asked().is_some() { threads.min(calls) } else { 1 };
        let (next, turn) = (AtomicUsize::new(0), Mutex::new(()));
        let work = |own: &Backend| {
            let placed = place(own, at_once);
            let mut counts = vec![0; self.bins];
            loop {
                let call = next.fetch_add(1, Ordering::Relaxed);
                if call >= calls {
                    return counts;
                }
                let committed = self.committed(own, &*placed, call, at_once, &turn);
                let width = committed.len() / at_once;
                committed.chunks_exact(width).for_each(|tokens| (self.tally)(tokens, &mut counts));
            }
        };
        let work = &work;
        let shares = std::thread::scope(|scope| {
            let thread = |n: usize| {
                scope.spawn(move || match backend.is_cuda() || n == 0 {
                    true => work(backend),
                    false => work(&Backend::cpu(1)),
                })
            };
            let threads: Vec<_> = (0..threads).map(thread).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
        });
        (0..self.bins).map(|bin| shares.iter().map(|counts| counts[bin]).sum()).collect()
    }

    fn committed(
        &self,
        backend: &Backend,
        placed: &dyn Again,
        call: usize,
        at_once: usize,
        turn: &Mutex<()>,
    ) -> Vec<i64> {
        let mut rng = Rng::new(self.seed.wrapping_mul(1_000_003).wrapping_add(call as u64));
        let mut drafts = vec![];
        (0..at_once).for_each(|_| (self.draft)(&mut rng, &mut drafts));
        let first = (call * at_once) as i64;
        let requests = first..first + at_once as i64;
        let (seeds, positions): (Vec<i64>, Vec<i64>) = match call % 2 {
            0 => requests.map(|i| (42, i * self.positions as i64)).unzip(),
            _ => requests.map(|i| (i, 7)).unzip(),
        };
        let [of_seeds, of_positions] = placed.numbers();
        let given = [(placed.draft(), &drafts), (of_seeds, &seeds), (of_positions, &positions)];
        let given = given.map(|(t, values)| (t, t.encode(values)));
        let bytes = {
            // The threads share a stream.
            let _turn = backend.is_cuda().then(|| turn.lock().unwrap());
            given.iter().for_each(|(t, bytes)| t.write(bytes));
            placed.run();
            placed.committed().read_memory()
        };
        placed.committed().decode(&bytes)
    }
}

/// Draws tokens from q, with whatever it adds up to.
pub fn drawer(q: &[f64]) -> impl Fn(&mut Rng) -> i64 + Sync + use<> {
    let sums: Vec<f64> = q
        .iter()
        .scan(0.0, |sum, q| {
            *sum += q;
            Some(*sum)
        })
        .collect();
    let total = sums[sums.len() - 1];
    let last = q.iter().rposition(|&q| q > 0.0).expect("something can be drawn");
    move |rng| {
        let u = rng.unit() * total;
        sums.partition_point(|&sum| sum <= u).min(last) as i64
    }
}
