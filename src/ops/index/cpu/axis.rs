//! AXIS on the CPU: the mean key of a block and the axis along which its keys spread.
//!
//! With x_t = k_t − μ and W = weights², three steps of u_t = x_t·z, b = Σ_t u_t·x_t, z = W∘b / |u| begin at the token that
//! is farthest from the mean; they never need the Gram matrix, only the keys again. Tokens are taken eight at a time, each a
//! lane: lane t mod 8 adds up its tokens in their order, and the lanes are added at last. The product of a token is a sum
//! for each eight channels, folded in halves. CUDA has the same order, so the same bits.

use super::{Key, Keys, Range4, extent, write};
use crate::core::dtype::Rounded;
use crate::core::tensor::Tensor;
use crate::ops::index::{Axes, GROUP};
use crate::ops::simd::{LANES, Lanes, Row};
use crate::ops::views::{MAX_DIM, adjacent, spare};
use crate::with_float;
use half::f16;

/// Steps towards the principal direction.
const STEPS: usize = 3;
/// How far the axis reaches: so much of the tokens' spread along it, and so much of the way to the farthest of them, which a
/// query may look for alone. Measured, see docs/index-select.md.
const OF_SPREAD: f32 = 1.15;
const OF_FARTHEST: f32 = 0.6;

/// A number for each channel.
type Channels = [f32; MAX_DIM];
/// For each channel, eight tokens or what they add up to.
type Tile = [[f32; LANES]];
/// Floats of two tiles: too many for a caller's stack.
pub const ROOM: usize = 2 * MAX_DIM * LANES;

/// # Safety
/// As for `minmax`: the tensors are valid, k of dtype `T`, and `at` is a row of the summaries that no other task touches.
#[inline(always)]
pub unsafe fn summarise<L: Lanes, T: Row>(keys: &Keys, room: &mut [f32], j: usize, axes: &Axes, at: [usize; 3]) {
    let dim = keys.r.k.dim(3);
    let begin = j * axes.block_size;
    // SAFETY: forwarded to the caller.
    let tokens = axes.block_size.min(unsafe { keys.r.pages.len(keys.i) } - begin);
    let (tile, sums) = room.as_chunks_mut().0.split_at_mut(MAX_DIM);
    let mut block = Block { keys, begin, tokens, dim, mean: [0.0; MAX_DIM], tile };
    // SAFETY: forwarded to the caller.
    unsafe {
        let axis = block.axis::<L, T>(sums, &per_channel(axes.weights.as_ref(), at[2], dim, 1.0));
        let centre = per_channel(axes.centre.as_ref(), at[2], dim, 0.0);
        block.mean[..dim].iter_mut().zip(&centre).for_each(|(mean, centre)| *mean -= centre);
        for (part, values) in [&block.mean, &axis].into_iter().enumerate() {
            match &axes.range {
                Some(range) => store_int4::<L>(axes, range, at, part, &values[..dim]),
                None => with_float!(axes.axes.dtype, M => {
                    for (c, &x) in values[..dim].iter().enumerate() {
                        write(&axes.axes, at, part * dim + c, M::from_f32(x));
                    }
                }),
            }
        }
    }
}

/// What head `g` has for each channel, or `default`.
///
/// # Safety
/// The tensor is valid, [Hk, dim] in float32, and has the head.
#[inline(always)]
unsafe fn per_channel(t: Option<&Tensor>, g: usize, dim: usize, default: f32) -> Channels {
    let mut values = [default; MAX_DIM];
    if let Some(t) = t {
        // SAFETY: forwarded to the caller.
        values[..dim].iter_mut().enumerate().for_each(|(c, x)| *x = unsafe { t.get::<f32, 2>([g, c]) });
    }
    values
}

/// The keys of a block's tokens.
struct Block<'a> {
    keys: &'a Keys<'a>,
    begin: usize,
    tokens: usize,
    dim: usize,
    mean: Channels,
    /// Eight tokens less the mean; 0 past the last.
    tile: &'a mut Tile,
}

impl Block<'_> {
    /// Finds the mean, and then the axis.
    ///
    /// # Safety
    /// The keys are valid and of dtype `T`.
    #[inline(always)]
    unsafe fn axis<L: Lanes, T: Row>(&mut self, sums: &mut Tile, weights: &Channels) -> Channels {
        let dim = self.dim;
        let mut axis = [0.0; MAX_DIM];
        sums[..dim].fill([0.0; LANES]);
        // SAFETY: forwarded to the caller.
        unsafe {
            for first in (0..self.tokens).step_by(LANES) {
                self.load::<L, T>(first);
                for (sum, x) in sums[..dim].iter_mut().zip(&*self.tile) {
                    *sum = L::from_array(sum).add(L::from_array(x)).to_array();
                }
            }
            let share = 1.0 / self.tokens as f32;
            join::<L>(&sums[..dim], &mut axis);
            axis[..dim].iter_mut().for_each(|x| *x *= share);
            self.mean = axis;
            let squares: Channels = std::array::from_fn(|c| weights[c] * weights[c]);
            let mut towards = self.farthest::<L, T>(&squares);
            for step in 0..STEPS {
                let (size, most) = self.step::<L, T>(&towards, sums);
                join::<L>(&sums[..dim], &mut axis);
                // Keys that are all the same have no axis.
                let shrink = if size == 0.0 { 0.0 } else { 1.0 / size.sqrt() };
                let reach = (OF_SPREAD / (self.tokens as f32).sqrt()).max(OF_FARTHEST * most * shrink);
                let last = if step + 1 == STEPS { reach } else { 1.0 };
                for c in 0..dim {
                    axis[c] *= shrink;
                    (towards[c], axis[c]) = (axis[c] * squares[c], axis[c] * last);
                }
            }
        }
        axis
    }

    /// W∘x of the token with the largest Σ_c W_c·x_c², the first of several.
    ///
    /// # Safety
    /// As for [`Block::axis`].
    #[inline(always)]
    unsafe fn farthest<L: Lanes, T: Row>(&mut self, squares: &Channels) -> Channels {
        let (mut largest, mut best) = (f32::NEG_INFINITY, [0.0; MAX_DIM]);
        for first in (0..self.tokens).step_by(LANES) {
            // SAFETY: forwarded to the caller.
            unsafe { self.load::<L, T>(first) };
            let weigh = |c: usize| L::from_array(&self.tile[c]).mul(L::splat(squares[c]));
            let sizes = self.product(|c| (weigh(c), L::from_array(&self.tile[c]))).to_array();
            for (lane, &size) in sizes[..LANES.min(self.tokens - first)].iter().enumerate() {
                // Where none is a number, the first.
                if size > largest || first + lane == 0 {
                    largest = if size.is_nan() { f32::NEG_INFINITY } else { size };
                    best = std::array::from_fn(|c| self.tile[c][lane] * squares[c]);
                }
            }
        }
        best
    }

    /// Σ_t u_t·x_t for each channel and lane; returns Σ_t u_t² and the largest |u_t| of all.
    ///
    /// # Safety
    /// As for [`Block::axis`].
    #[inline(always)]
    unsafe fn step<L: Lanes, T: Row>(&mut self, towards: &Channels, sums: &mut Tile) -> (f32, f32) {
        sums[..self.dim].fill([0.0; LANES]);
        let (mut sizes, mut most) = (L::splat(0.0), 0f32);
        for first in (0..self.tokens).step_by(LANES) {
            // SAFETY: forwarded to the caller.
            unsafe { self.load::<L, T>(first) };
            let u = self.product(|c| (L::from_array(&self.tile[c]), L::splat(towards[c])));
            sizes = u.fused(u, sizes);
            most = u.to_array().iter().fold(most, |most, u| most.max(u.abs()));
            for (sum, x) in sums[..self.dim].iter_mut().zip(&*self.tile) {
                *sum = L::from_array(x).fused(u, L::from_array(sum)).to_array();
            }
        }
        (sizes.sum(), most)
    }

    /// Σ_c of the products of these pairs, in each lane: in order over eight channels, these sums folded in halves.
    #[inline(always)]
    fn product<L: Lanes>(&self, pair: impl Fn(usize) -> (L, L)) -> L {
        const MOST: usize = (MAX_DIM / LANES).next_power_of_two();
        let mut sums = [L::splat(0.0); MOST];
        for (sum, first) in sums.iter_mut().zip((0..self.dim).step_by(LANES)) {
            for c in first..first + LANES {
                let (a, b) = pair(c);
                *sum = a.fused(b, *sum);
            }
        }
        let mut count = (self.dim / LANES).next_power_of_two();
        while count > 1 {
            count /= 2;
            for i in 0..count {
                sums[i] = sums[i].add(sums[i + count]);
            }
        }
        sums[0]
    }

    /// Takes eight tokens of the block from `first` on. One without a page is NaN.
    ///
    /// # Safety
    /// As for [`Block::axis`].
    #[inline(always)]
    unsafe fn load<L: Lanes, T: Row>(&mut self, first: usize) {
        let Keys { r, i, g } = *self.keys;
        let mut spare = spare::<T>();
        let count = LANES.min(self.tokens - first);
        self.tile[..self.dim].fill([0.0; LANES]);
        for lane in 0..count {
            let t = self.begin + first + lane;
            // SAFETY: page() gives pages of the tensor, t mod P is a row of one, and the key has dim channels.
            unsafe {
                let key = r.pages.page(i, t / r.pages.size).map(|page| {
                    let at = [page, t % r.pages.size, g];
                    let scale = r.k_scale.as_ref().map_or(1.0, |scale| scale.of(at));
                    Key { row: adjacent(&r.k, at, &mut spare), scale }
                });
                for c in (0..self.dim).step_by(LANES) {
                    let mean = L::load(self.mean.as_ptr().add(c));
                    let x = key.map_or([f32::NAN; LANES], |key| key.load::<L>(c).sub(mean).to_array());
                    self.tile[c..c + LANES].iter_mut().zip(x).for_each(|(lanes, x)| lanes[lane] = x);
                }
            }
        }
    }
}

/// Adds up the lanes of each channel.
#[inline(always)]
fn join<L: Lanes>(sums: &[[f32; LANES]], to: &mut Channels) {
    for (four, to) in sums.as_chunks::<4>().0.iter().zip(to.as_chunks_mut::<4>().0) {
        *to = L::sums(four.each_ref().map(L::from_array));
    }
}

/// Codes, scale and minimum of each group of the mean (part 0) or the axis (part 1).
///
/// # Safety
/// `at` is a row of both tensors that no other task touches.
#[inline(always)]
unsafe fn store_int4<L: Lanes>(axes: &Axes, range: &Tensor, at: [usize; 3], part: usize, values: &[f32]) {
    let groups = values.len().div_ceil(GROUP);
    for (n, group) in values.chunks(GROUP).enumerate() {
        let (low, high) = extent::<L>(group);
        let of_numbers = group.iter().all(|x| x.is_finite());
        let stored = if of_numbers { Range4::new(low, high) } else { Range4 { scale: f16::ZERO, min: f16::NAN } };
        let mut codes = [0; GROUP];
        stored.encode(group, &mut codes);
        // SAFETY: forwarded to the caller.
        unsafe {
            write(range, at, 2 * (part * groups + n), stored.scale);
            write(range, at, 2 * (part * groups + n) + 1, stored.min);
            for (pair, byte) in
                codes.as_chunks::<2>().0[..group.len() / 2].iter().zip((part * values.len() + n * GROUP) / 2..)
            {
                write(&axes.axes, at, byte, pair[0] | pair[1] << 4);
            }
        }
    }
}
