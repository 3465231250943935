//! Coding of one block of a KV head, and what its codes stand for: operations and their order, for whoever keeps blocks.

use crate::core::dtype::Rounded;
use crate::ops::int4::MAX_CODED;
use crate::ops::simd::rotate;

/// Keys and values are the parts of a token.
pub const KEY: usize = 0;
pub const VALUE: usize = 1;

/// A block's tokens, the channels of their parts, and the weights of key channels.
pub struct Shape<'s> {
    pub tokens: usize,
    pub dims: [usize; 2],
    pub weights: &'s [f32],
}

/// Codes a block. `read` gives a part of a token; `store_mean` gets the sums of the keys and makes them the mean as it is stored; `store`
/// gets a part that is rotated, to encode it.
#[inline(always)]
pub fn code(
    shape: &Shape,
    read: impl Fn(usize, usize, &mut [f32]),
    store_mean: impl FnOnce(&mut [f32]),
    store: impl Fn(usize, usize, &[f32]),
) {
    let [mut mean, mut row] = [[0.0; MAX_CODED]; 2];
    let mean = &mut mean[..shape.dims[KEY]];
    for t in 0..shape.tokens {
        let key = &mut row[..mean.len()];
        read(t, KEY, key);
        mean.iter_mut().zip(key).for_each(|(sum, x)| *sum += *x);
    }
    store_mean(mean);
    for t in 0..shape.tokens {
        for part in [KEY, VALUE] {
            let y = &mut row[..shape.dims[part]];
            read(t, part, y);
            if part == KEY {
                for ((y, mean), weight) in y.iter_mut().zip(&*mean).zip(shape.weights) {
                    *y = (*y - mean) / weight;
                }
            }
            rotate(y);
            store(t, part, y);
        }
    }
}

/// The mean of `tokens` keys from their sum, in a channel.
#[inline(always)]
pub fn mean_of<T: Rounded>(sum: f32, tokens: usize) -> T {
    let mean = sum / tokens as f32;
    // There is one NaN on every machine.
    T::from_f32(if mean.is_nan() { f32::NAN } else { mean })
}

/// Turns a row of c − 7.5 times the scale into the numbers that it stands for; `mean` and `weights` are those of a key.
#[inline(always)]
pub fn decode(row: &mut [f32], key: Option<(&[f32], &[f32])>) {
    rotate(row);
    if let Some((mean, weights)) = key {
        for ((x, mean), weight) in row.iter_mut().zip(mean).zip(weights) {
            *x = *x * weight + mean;
        }
    }
    row.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::NAN);
}

/// The factor of a rotated row of `dim` channels.
pub fn rotation_factor(dim: usize) -> f32 {
    1.0 / ((1u32 << dim.trailing_zeros()) as f32).sqrt()
}
