//! A dense array of plain values: what tensors are filled from, read into, and what the oracle computes on.

use std::ops::{Index, IndexMut};

#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    pub shape: Vec<usize>,
    /// Row major.
    pub data: Vec<T>,
}

impl<T: Clone> Array<T> {
    pub fn new(shape: &[usize], data: Vec<T>) -> Array<T> {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "{shape:?}");
        Array { shape: shape.to_vec(), data }
    }

    pub fn filled(shape: &[usize], value: T) -> Array<T> {
        Array::new(shape, vec![value; shape.iter().product()])
    }

    pub fn from_fn(shape: &[usize], mut value: impl FnMut(&[usize]) -> T) -> Array<T> {
        let data = indices(shape).map(|index| value(&index)).collect();
        Array::new(shape, data)
    }

    /// The values at this leading index: `row([i, j])` of a [B, T, D] array has D values.
    pub fn row<const N: usize>(&self, index: [usize; N]) -> &[T] {
        let length = self.shape[N..].iter().product::<usize>();
        let row = index.iter().zip(&self.shape).fold(0, |at, (&i, &n)| {
            assert!(i < n, "index {index:?} of an array of shape {:?}", self.shape);
            at * n + i
        });
        &self.data[row * length..(row + 1) * length]
    }

    pub fn map<U: Clone>(&self, f: impl FnMut(&T) -> U) -> Array<U> {
        Array::new(&self.shape, self.data.iter().map(f).collect())
    }
}

impl<T, const N: usize> Index<[usize; N]> for Array<T> {
    type Output = T;
    fn index(&self, index: [usize; N]) -> &T {
        &self.data[flat(&self.shape, index)]
    }
}

impl<T, const N: usize> IndexMut<[usize; N]> for Array<T> {
    fn index_mut(&mut self, index: [usize; N]) -> &mut T {
        &mut self.data[flat(&self.shape, index)]
    }
}

fn flat<const N: usize>(shape: &[usize], index: [usize; N]) -> usize {
    assert_eq!(shape.len(), N);
    index.iter().zip(shape).fold(0, |at, (&i, &n)| {
        assert!(i < n, "index {index:?} of an array of shape {shape:?}");
        at * n + i
    })
}

/// Every index of a shape, in row-major order.
pub fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let shape = shape.to_vec();
    (0..shape.iter().product::<usize>()).map(move |flat| {
        let mut rest = flat;
        let mut index = vec![0; shape.len()];
        for d in (0..shape.len()).rev() {
            index[d] = rest % shape[d];
            rest /= shape[d];
        }
        index
    })
}
