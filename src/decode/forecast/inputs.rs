//! The inputs of a map: x̂, the queries at the token before if the forecast has memory, and a constant 1.

use super::Shape;
use crate::abi::vwd_tensor;
use crate::core::dtype::{DType, Float};
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::with_float;

pub struct Inputs<'a> {
    /// [N, input_dim]
    pub x: Tensor<'a>,
    /// [N, q_heads, head_dim]; given if the forecast has memory.
    pub previous: Option<Tensor<'a>>,
}

impl<'a> Inputs<'a> {
    /// `rows` is the symbol that the contract gives the number of rows.
    pub fn from_c(
        checks: &Checks,
        shape: &Shape,
        x: &'a vwd_tensor,
        previous: &'a vwd_tensor,
        rows: &'static str,
    ) -> Result<Inputs<'a>> {
        let x = checks.input("x", x, DType::FLOATS, &[(rows, ANY), ("input_dim", shape.input_dim)])?;
        let previous = match given(previous) {
            Some(_) if !shape.has_memory() => {
                return Err(Error::argument(
                    "previous",
                    "a tensor",
                    "none: the forecast is without VWD_FORECAST_MEMORY",
                ));
            }
            None if !shape.has_memory() => None,
            _ => Some(checks.input("previous", previous, DType::FLOATS, &shape.queries((rows, x.dim(0))))?),
        };
        Ok(Inputs { x, previous })
    }

    pub fn count(&self) -> usize {
        self.x.dim(0)
    }

    /// Writes the inputs of token `i`, and zeros after the constant.
    ///
    /// # Safety
    /// `i` is below [`Inputs::count`]; the caller of the op keeps the tensors valid.
    pub unsafe fn write<W: Copy>(&self, i: usize, row: &mut [W], round: impl Fn(f64) -> W) {
        let (x_hat, rest) = row.split_at_mut(self.x.dim(1));
        // SAFETY: i is a row of both tensors; each is read by its dtype.
        unsafe {
            with_float!(self.x.dtype, T => write_normalised::<T, W>(&self.x, i, x_hat, &round));
            let rest = match &self.previous {
                Some(q) => {
                    let (past, rest) = rest.split_at_mut(q.dim(1) * q.dim(2));
                    with_float!(q.dtype, T => write_queries::<T, W>(q, i, past, &round));
                    rest
                }
                None => rest,
            };
            rest.fill(round(0.0));
            rest[0] = round(1.0);
        }
    }
}

/// Writes x / rms(x) of a row; zeros for a row of zeros.
///
/// # Safety
/// `i` is a row of x, which is valid and of dtype `T`.
unsafe fn write_normalised<T: Float, W>(x: &Tensor, i: usize, row: &mut [W], round: impl Fn(f64) -> W) {
    // SAFETY: the caller vouches for the row and the dtype; c is below input_dim.
    let value = |c: usize| unsafe { x.get::<T, 2>([i, c]) }.to_f32() as f64;
    let mean = (0..row.len()).map(|c| value(c).powi(2)).sum::<f64>() / row.len() as f64;
    let scale = if mean == 0.0 { 0.0 } else { 1.0 / mean.sqrt() };
    row.iter_mut().enumerate().for_each(|(c, place)| *place = round(value(c) * scale));
}

/// Writes a row of queries unscaled.
///
/// # Safety
/// `i` is a row of q, which is valid and of dtype `T`; `row` has q_heads·head_dim places.
pub unsafe fn write_queries<T: Float, W>(q: &Tensor, i: usize, row: &mut [W], round: impl Fn(f64) -> W) {
    for (h, head) in row.chunks_mut(q.dim(2)).enumerate() {
        for (c, place) in head.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the row and the dtype; h and c are below q_heads and head_dim.
            *place = round(unsafe { q.get::<T, 3>([i, h, c]) }.to_f32() as f64);
        }
    }
}
