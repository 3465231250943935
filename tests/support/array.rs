//! A dense array of plain values: what tensors are filled from, read into, and what the oracle computes on.

use std::ops::{Deref, Index, IndexMut};

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
        let mut data = Vec::with_capacity(shape.iter().product());
        for index in indices(shape) {
            data.push(value(&index));
        }
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

/// An index, whose numbers take no memory from the heap: most time of many cases would go there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    numbers: [usize; 6],
    rank: usize,
}

impl Deref for At {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.numbers[..self.rank]
    }
}

impl std::fmt::Debug for At {
    fn fmt(&self, to: &mut std::fmt::Formatter) -> std::fmt::Result {
        (**self).fmt(to)
    }
}

/// Every index of a shape, in row-major order.
pub fn indices(shape: &[usize]) -> Indices {
    let mut sizes = At { numbers: [0; 6], rank: shape.len() };
    sizes.numbers[..shape.len()].copy_from_slice(shape);
    Indices { sizes, next: At { numbers: [0; 6], rank: shape.len() }, left: shape.iter().product() }
}

pub struct Indices {
    sizes: At,
    next: At,
    left: usize,
}

impl Iterator for Indices {
    type Item = At;

    fn next(&mut self) -> Option<At> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let here = self.next;
        let mut d = here.rank;
        while d > 0 {
            d -= 1;
            self.next.numbers[d] += 1;
            if self.next.numbers[d] < self.sizes.numbers[d] {
                break;
            }
            self.next.numbers[d] = 0;
        }
        Some(here)
    }
}
