//! A solved map: the matrix, or two matrices, by which a projection multiplies.

use crate::core::allocate::zeros;
use crate::core::status::Result;
use crate::ops::simd::LANES;

/// W, or W approximated by two factors of low rank: q̂ = up·(down·x̂).
pub enum Map {
    /// [outputs, inputs]
    FullRank(Matrix),
    /// [rank, inputs] and [outputs, rank]
    LowRank { down: Matrix, up: Matrix },
}

impl Map {
    /// The rank of a map of low rank; 0 for a map of full rank.
    pub fn rank(&self) -> usize {
        match self {
            Map::FullRank(_) => 0,
            Map::LowRank { down, .. } => down.rows,
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Map::FullRank(weight) => size_of_val(&*weight.values),
            Map::LowRank { down, up } => size_of_val(&*down.values) + size_of_val(&*up.values),
        }
    }
}

/// Rows of f32, each padded with zeros to whole vectors. One row gives one output, so that a product reads the rows in order.
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

    /// A range of rows with their padding.
    pub fn padded(&self, rows: std::ops::Range<usize>) -> &[f32] {
        &self.values[rows.start * self.stride..rows.end * self.stride]
    }

    pub fn is_finite(&self) -> bool {
        self.values.iter().all(|value| value.is_finite())
    }
}
