//! What ends requests, and keeps them from ending.

use super::scene::Scene;
use crate::sampling::likeliest;
use crate::support::oracle::End;
use crate::support::*;

/// Arguments of a call, as values.
#[derive(Clone, Default)]
pub struct Ends {
    /// [S] or [B, S]
    pub stop: Option<Array<i64>>,
    /// [B] each.
    pub ignore_stop: Option<Vec<i64>>,
    pub remaining: Option<Vec<i64>>,
    pub min_remaining: Option<Vec<i64>>,
}

/// The same as tensors.
pub struct Placed<'b> {
    pub stop: Option<Tensor<'b>>,
    pub ignore_stop: Option<Tensor<'b>>,
    pub remaining: Option<Tensor<'b>>,
    pub min_remaining: Option<Tensor<'b>>,
}

impl Ends {
    /// Stop tokens are mostly what a node holds or what its row finds likeliest.
    pub fn random(rng: &mut Rng, scene: &Scene) -> Ends {
        let (batch, nodes) = (scene.batch(), scene.nodes());
        let stops = rng.size(0..=4);
        let shape = if rng.one_in(2) { vec![stops] } else { vec![batch, stops] };
        let stop = Array::from_fn(&shape, |at| {
            let i = if at.len() == 2 { at[0] } else { rng.size(0..=batch.max(1) - 1) };
            let v = rng.size(0..=nodes - 1);
            match rng.size(0..=3) {
                _ if batch == 0 => 0,
                0 => rng.int(-1..=scene.vocabulary() as i64),
                1 => scene.tokens[[i, v]],
                _ => likeliest(scene.target.row([i, v])) as i64,
            }
        });
        let mut counts = |others: usize, of: fn(&mut Rng) -> i64| {
            (!rng.one_in(others)).then(|| (0..batch).map(|_| of(rng)).collect::<Vec<i64>>())
        };
        Ends {
            min_remaining: counts(5, |rng| rng.pick(&[-1, 0, 1, 1, 2, 3, 4, i32::MAX as i64])),
            ignore_stop: counts(3, |rng| rng.pick(&[0, 0, 0, 1, 255])),
            remaining: counts(2, |rng| rng.pick(&[-1, 0, 1, 2, 3, 4, 6, 100])),
            stop: Some(stop).filter(|_| !rng.one_in(8)),
        }
    }

    /// Stop tokens are what is committed without them: where they are forbidden, something else is.
    pub fn on_the_way(rng: &mut Rng, scene: &Scene, backend: &Backend) -> Ends {
        let free = Scene { ends: None, ..scene.clone() }.run(backend, None);
        let mut ends = Ends::random(rng, scene);
        ends.stop = Some(free.committed);
        ends.ignore_stop = ends.ignore_stop.filter(|_| rng.one_in(3));
        ends.min_remaining = Some((0..scene.batch()).map(|_| rng.pick(&[0, 1, 2, 3, i32::MAX as i64])).collect());
        ends
    }

    pub fn of(&self, i: usize) -> End {
        let of = |values: &Option<Vec<i64>>| values.as_ref().map(|values| values[i]);
        let stop = match &self.stop {
            Some(stop) if of(&self.ignore_stop).unwrap_or(0) == 0 => match stop.shape.len() {
                1 => stop.data.clone(),
                _ => stop.row([i]).to_vec(),
            },
            _ => vec![],
        };
        End { stop, remaining: of(&self.remaining), min_remaining: of(&self.min_remaining).unwrap_or(0) }
    }

    /// Those of these requests, one after the other.
    pub fn select(&self, requests: &[usize]) -> Ends {
        let of = |values: &Option<Vec<i64>>| {
            values.as_ref().map(|values| requests.iter().map(|&i| values[i]).collect::<Vec<i64>>())
        };
        let stop = self.stop.as_ref().map(|stop| match stop.shape[..] {
            [batch, stops] if batch > 0 => {
                Array::new(&[requests.len(), stops], requests.iter().flat_map(|&i| stop.row([i]).to_vec()).collect())
            }
            _ => stop.clone(),
        });
        Ends {
            stop,
            ignore_stop: of(&self.ignore_stop),
            remaining: of(&self.remaining),
            min_remaining: of(&self.min_remaining),
        }
    }

    pub fn place<'b>(&self, backend: &'b Backend, mut layout: impl FnMut(usize) -> Layout) -> Placed<'b> {
        let stop = self.stop.as_ref().map(|stop| {
            let dtype = if stop.data.len() % 2 == 0 { I32 } else { I64 };
            Tensor::ints(backend, dtype, stop, &layout(stop.shape.len()))
        });
        let mut column = |values: &Option<Vec<i64>>, dtype| {
            let values = values.as_ref().map(|values| Array::new(&[values.len()], values.clone()));
            values.map(|values| Tensor::ints(backend, dtype, &values, &layout(1)))
        };
        Placed {
            stop,
            ignore_stop: column(&self.ignore_stop, U8),
            remaining: column(&self.remaining, I32),
            min_remaining: column(&self.min_remaining, I32),
        }
    }
}
