//! A solved map: what a projection multiplies with.

use crate::core::allocate::zeros;
use crate::core::status::Result;
use crate::ops::simd::LANES;

/// W, or W cut to two factors: q̂ = up·(down·x̂).
pub enum Map {
    /// [outputs, inputs]
    Whole(Matrix),
    /// [rank, inputs] and [outputs, rank]
    Cut { down: Matrix, up: Matrix },
}

impl Map {
    /// 0 where it is whole.
    pub fn rank(&self) -> usize {
        match self {
            Map::Whole(_) => 0,
            Map::Cut { down, .. } => down.rows,
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Map::Whole(weight) => size_of_val(&*weight.values),
            Map::Cut { down, up } => size_of_val(&*down.values) + size_of_val(&*up.values),
        }
    }
}

/// Rows of f32, each padded with zeros to whole vectors: one row makes one output, so that a product reads them in order.
pub struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub stride: usize,
    values: Vec<f32>,
}

impl Matrix {
    pub fn zeros(rows: usize, columns: usize) -> Result<Matrix> {
        let stride = columns.next_multiple_of(LANES);
        let values = zeros(rows.saturating_mul(stride), "a forecast's map")?;
        Ok(Matrix { rows, columns, stride, values })
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.stride..][..self.columns]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.values[i * self.stride..][..self.columns]
    }

    /// Some rows with their padding.
    pub fn padded(&self, rows: std::ops::Range<usize>) -> &[f32] {
        &self.values[rows.start * self.stride..rows.end * self.stride]
    }

    pub fn is_finite(&self) -> bool {
        self.values.iter().all(|value| value.is_finite())
    }
}
