//! Coding of a tail's run to a run of codes, and back.

use crate::core::allocate::{collected, filled};
use crate::core::dtype::{DType, Float, Rounded};
use crate::core::float8::F8E4M3;
use crate::core::status::Result;
use crate::kv::options::{Options, Run};
use crate::ops::int4::{MAX_CODED, encode};
use crate::ops::quantize::block::{self, KEY, Shape, VALUE};
use crate::with_float;

pub struct Coder {
    tokens: usize,
    dims: [usize; 2],
    dtype: DType,
    /// How a block lies exact, and coded.
    exact: Run,
    coded: Run,
    /// [Hk, D]
    weights: Vec<f32>,
}

impl Coder {
    /// Codes blocks of a layer, whose weights are 1 if it has none.
    pub fn new(options: &Options, weights: Option<&[f32]>) -> Result<Coder> {
        const PURPOSE: &str = "the weights of a KV cache";
        let weights = match weights {
            Some(weights) => collected(weights.iter().copied(), PURPOSE)?,
            None => filled(1.0, options.kv_heads * options.dims[KEY], PURPOSE)?,
        };
        let &Options { block_size: tokens, dims, dtype, .. } = options;
        Ok(Coder { tokens, dims, dtype, exact: options.tail_run(), coded: options.run(), weights })
    }

    pub fn weights(&self) -> *mut f32 {
        self.weights.as_ptr().cast_mut()
    }

    fn shape(&self, head: usize) -> Shape<'_> {
        let weights = &self.weights[head * self.dims[KEY]..][..self.dims[KEY]];
        Shape { tokens: self.tokens, dims: self.dims, weights }
    }

    /// # Safety
    /// `from` is an exact run and `to` a run of codes that nobody else uses.
    pub unsafe fn code(&self, head: usize, from: *const u8, to: *mut u8) {
        // SAFETY: says the caller.
        with_float!(self.dtype, T => unsafe { self.code_of::<T>(head, from, to) });
    }

    /// # Safety
    /// As for [`Coder::code`], and `T` is the dtype.
    unsafe fn code_of<T: Rounded>(&self, head: usize, from: *const u8, to: *mut u8) {
        let row_of = |run: &Run, part: usize, t: usize| run.parts[part].begin + t * run.parts[part].token;
        let mean: *mut T = to.wrapping_add(self.coded.mean).cast();
        block::code(
            &self.shape(head),
            |t, part, row| {
                let from: *const T = from.wrapping_add(row_of(&self.exact, part, t)).cast();
                // SAFETY: the row of a token's part is inside the run.
                row.iter_mut().enumerate().for_each(|(d, x)| *x = unsafe { from.add(d).read() }.to_f32());
            },
            |sums| {
                for (d, x) in sums.iter_mut().enumerate() {
                    let stored: T = block::mean_of(*x, self.tokens);
                    // SAFETY: the run has room for a mean of D numbers.
                    unsafe { mean.add(d).write(stored) };
                    *x = stored.to_f32();
                }
            },
            |t, part, y| {
                let codes = to.wrapping_add(row_of(&self.coded, part, t));
                // SAFETY: the run has room for the codes and the scale of each token's part.
                unsafe {
                    let scale = encode(y, |n, byte| codes.add(n).write(byte));
                    to.add(row_of(&self.coded, part + 2, t)).write(scale.0);
                }
            },
        );
    }

    /// # Safety
    /// `from` is a run of codes and `to` an exact run that nobody else uses.
    pub unsafe fn decode(&self, head: usize, from: *const u8, to: *mut u8) {
        // SAFETY: says the caller.
        with_float!(self.dtype, T => unsafe { self.decode_of::<T>(head, from, to) });
    }

    /// # Safety
    /// As for [`Coder::decode`], and `T` is the dtype.
    unsafe fn decode_of<T: Rounded>(&self, head: usize, from: *const u8, to: *mut u8) {
        let shape = self.shape(head);
        let [mut mean, mut row] = [[0.0; MAX_CODED]; 2];
        let mean = &mut mean[..self.dims[KEY]];
        let means: *const T = from.wrapping_add(self.coded.mean).cast();
        // SAFETY: the run has a mean of D numbers.
        mean.iter_mut().enumerate().for_each(|(d, x)| *x = unsafe { means.add(d).read() }.to_f32());
        for t in 0..self.tokens {
            for part in [KEY, VALUE] {
                let [codes, scale] = [part, part + 2].map(|n| &self.coded.parts[n]);
                let row = &mut row[..self.dims[part]];
                // SAFETY: the row of a token's part, and its scale, are inside the run.
                unsafe {
                    let scale = F8E4M3(from.add(scale.begin + t * scale.token).read()).to_f32();
                    for (d, x) in row.iter_mut().enumerate() {
                        let byte = from.add(codes.begin + t * codes.token + d / 2).read();
                        *x = (f32::from(byte >> (d % 2 * 4) & 15) - 7.5) * scale;
                    }
                }
                block::decode(row, (part == KEY).then_some((&*mean, shape.weights)));
                let place = &self.exact.parts[part];
                let to: *mut T = to.wrapping_add(place.begin + t * place.token).cast();
                // SAFETY: as above, of the exact run.
                row.iter().enumerate().for_each(|(d, x)| unsafe { to.add(d).write(T::from_f32(*x)) });
            }
        }
    }
}
