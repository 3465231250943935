//! The term for what lists leave out, of a decoder on a tiered cache: the calls of coded.rs with log_mass, and with sums that are made here, in double
//! precision, of what the tails hold when a block is counted. Blocks are exact, coded, or coded with slots that hold what codes stand for.

use super::coded::{Kinds, LAYERS, MAX_BLOCKS, NUMBERS, World, random_kinds};
use super::*;

pub const CASES: &[Case] = cases![decoder_on_a_cache_joins_the_term_for_what_lists_leave_out,];

/// The newest tokens that the decoder counts never.
pub const DRAFTS: usize = 1;

/// Means and covariance of one layer, sequence and KV head.
#[derive(Clone, Default)]
struct Head {
    tokens: usize,
    mean_k: Vec<f64>,
    mean_v: Vec<f64>,
    covariance: Vec<f64>,
}

impl Head {
    /// Merges block `j` of S keys and values.
    fn merge(&mut self, j: usize, keys: &[Vec<f64>], values: &[Vec<f64>]) {
        let size = keys.len();
        let share = size as f64 / (self.tokens + size) as f64;
        if self.tokens == 0 {
            let (dim, value_dim) = (keys[0].len(), values[0].len());
            (self.mean_k, self.mean_v, self.covariance) =
                (vec![0.0; dim], vec![0.0; value_dim], vec![0.0; dim * value_dim]);
        }
        let mean = |rows: &[Vec<f64>], c: usize| rows.iter().map(|row| row[c]).sum::<f64>() / size as f64;
        let delta: Vec<f64> = (0..self.mean_k.len()).map(|c| mean(keys, c) - self.mean_k[c]).collect();
        let epsilon: Vec<f64> = (0..self.mean_v.len()).map(|d| mean(values, d) - self.mean_v[d]).collect();
        for (n, x) in self.covariance.iter_mut().enumerate() {
            let (c, d) = (n / epsilon.len(), n % epsilon.len());
            let products = keys.iter().zip(values).map(|(k, v)| (k[c] - self.mean_k[c]) * (v[d] - self.mean_v[d]));
            *x += share * (products.sum::<f64>() / size as f64 - *x) - share * share * delta[c] * epsilon[d];
        }
        self.mean_k.iter_mut().zip(delta).for_each(|(mean, delta)| *mean += share * delta);
        self.mean_v.iter_mut().zip(epsilon).for_each(|(mean, epsilon)| *mean += share * epsilon);
        self.tokens = j * size;
    }
}

/// What is known of the sums of each layer, sequence number and KV head.
#[derive(Default)]
pub struct Sums {
    heads: Vec<Head>,
    /// How often sums began with a block that is not the second one, and blocks that were passed over.
    pub late: usize,
    pub passed: usize,
    /// Rows of query heads that a term joined.
    pub joined: usize,
}

impl<'b> World<'b> {
    fn head(&mut self, layer: usize, number: usize, head: usize) -> &mut Head {
        let heads = self.kinds.heads[1];
        if self.sums.heads.is_empty() {
            self.sums.heads = vec![Head::default(); LAYERS * NUMBERS * heads];
        }
        &mut self.sums.heads[(layer * NUMBERS + number) * heads + head]
    }

    pub fn forget_sums(&mut self, number: usize) {
        for layer in 0..LAYERS {
            (0..self.kinds.heads[1]).for_each(|head| *self.head(layer, number, head) = Head::default());
        }
    }

    /// Rows of S tokens of a tail's page.
    fn tail_rows(&self, t: &vwd_tensor, page: i64, head: usize) -> Vec<Vec<f64>> {
        let (dtype, channels) = (self.kinds.dtype, t.shape[3] as usize);
        let row = |token: i64| {
            let at = (page * t.strides[0] + token * t.strides[1] + head as i64 * t.strides[2]) * dtype.bytes() as i64;
            let mut bytes = vec![0; channels * dtype.bytes()];
            self.backend.read(t.data as usize + at as usize, &mut bytes);
            bytes.chunks(dtype.bytes()).map(|x| dtype.decode_float(x)).collect()
        };
        (0..self.kinds.block as i64).map(row).collect()
    }

    /// Counts what became whole of a sequence whose step begins at `first`, whose tail had blocks from `floor` on, and in which `begin` was replaced.
    pub fn count(&mut self, number: usize, [first, floor, begin]: [usize; 3]) {
        let size = self.kinds.block;
        let len = first.saturating_sub(DRAFTS);
        let whole = len / size;
        let heads = self.kinds.heads[1];
        for (layer, g) in (0..LAYERS).flat_map(|layer| (0..heads).map(move |g| (layer, g))) {
            let view = self.views[layer];
            let mut sums = self.head(layer, number, g).clone();
            let next = sums.tokens / size + 1;
            if next > whole.max(1) || next * size > begin.min(len) {
                sums.tokens = 0;
            }
            let next = (sums.tokens / size + 1).max(floor);
            if sums.tokens > 0 && next < whole {
                self.sums.passed += next - 1 - sums.tokens / size;
                sums.tokens = (next - 1) * size;
            }
            for j in next..whole {
                self.sums.late += (sums.tokens == 0 && j > 1) as usize;
                let page = self.tail_table[[number, j]];
                let (keys, values) = (self.tail_rows(&view.tail_k, page, g), self.tail_rows(&view.tail_v, page, g));
                sums.merge(j, &keys, &values);
            }
            *self.head(layer, number, g) = sums;
        }
    }

    /// Tokens, means of keys and of values, and covariance of a layer, a row for each sequence of a step.
    pub fn sums_of(&mut self, layer: usize, numbers: &[i64]) -> [Tensor<'b>; 4] {
        let (heads, [dim, value_dim]) = (self.kinds.heads[1], self.kinds.dims);
        let mut all: Vec<Head> = vec![];
        for &number in numbers {
            all.extend((0..heads).map(|g| self.head(layer, number as usize, g).clone()));
        }
        let floats = |of: &dyn Fn(&Head) -> &Vec<f64>, shape: &[usize]| {
            let n: usize = shape.iter().product();
            let of = |head: &Head| if head.tokens == 0 { vec![0.0; n] } else { of(head).clone() };
            let shape = [&[numbers.len(), heads], shape].concat();
            Tensor::floats(
                self.backend,
                F32,
                &Array::new(&shape, all.iter().flat_map(of).collect()),
                &Layout::default(),
            )
        };
        let tokens = all.iter().map(|head| head.tokens as i64).collect();
        [
            Tensor::ints(self.backend, I32, &Array::new(&[numbers.len(), heads], tokens), &Layout::default()),
            floats(&|head| &head.mean_k, &[dim]),
            floats(&|head| &head.mean_v, &[value_dim]),
            floats(&|head| &head.covariance, &[dim, value_dim]),
        ]
    }
}

impl World<'_> {
    /// A fork that shares two blocks or more is read on until blocks of its own are whole, and attends.
    fn read_on(&mut self, rng: &mut Rng) {
        let block = self.kinds.block;
        while self.sequences[0].len < 3 * block {
            self.step(rng, &[0], block, false);
        }
        let kept = rng.size(2 * block..=self.sequences[0].len).min((MAX_BLOCKS - 5) * block);
        self.fork_at(0, kept);
        let row = self.sequences.len() - 1;
        (0..3).for_each(|_| self.step(rng, &[row], block, false));
        (0..2).for_each(|_| self.step(rng, &[row], 1, true));
    }
}

fn decoder_on_a_cache_joins_the_term_for_what_lists_leave_out(backend: &Backend) {
    let (mut late, mut passed, mut joined) = (0, 0, 0);
    let operations = backend.times(60).max(12);
    rounds(backend.times(9).max(4) as u64, |rng| {
        let (is_exact, kinds) = (rng.one_in(3), random_kinds(rng));
        let decoded = kinds.decoded && !is_exact;
        let dims = if is_exact { rng.pick(&[[16, 24], [64, 64]]) } else { kinds.dims };
        let kinds = Kinds {
            method: VWD_SELECT_AXIS,
            window: 0,
            soft_cap: 0.0,
            has_term: true,
            is_exact,
            decoded,
            dims,
            ..kinds
        };
        let mut world = World::new(backend, rng, kinds);
        world.join(rng);
        world.read_on(rng);
        world.run(rng, operations);
        (late, passed, joined) = (late + world.sums.late, passed + world.sums.passed, joined + world.sums.joined);
    });
    assert!(
        late > 0 && joined > 0,
        "sums began late {late} times, {passed} blocks were passed over, {joined} rows were joined"
    );
}
