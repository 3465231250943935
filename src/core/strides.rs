//! What shapes and strides say by themselves, in elements.

/// The most dimensions that a tensor has.
pub const MAX_RANK: usize = 5;

/// True when distinct indices address distinct bytes: each stride clears everything the smaller strides reach.
#[inline]
pub fn is_injective(shape: &[i64], strides: &[i64]) -> bool {
    is_packed(shape, strides) || shape.contains(&0) || clears(shape, strides)
}

fn clears(shape: &[i64], strides: &[i64]) -> bool {
    let mut dims = [(0i64, 1i64); MAX_RANK];
    for (dim, (&n, &s)) in dims.iter_mut().zip(shape.iter().zip(strides)) {
        if n > 1 {
            *dim = (s.abs(), n);
        }
    }
    dims.sort_unstable();
    let mut reach = 0;
    dims.into_iter().filter(|&(_, n)| n > 1).all(|(stride, n)| {
        let clear = stride > reach;
        reach += stride * (n - 1);
        clear
    })
}

/// Whether the strides are those of C order without gaps, as those of most tensors are.
#[inline]
fn is_packed(shape: &[i64], strides: &[i64]) -> bool {
    let mut stride = 1;
    shape.iter().zip(strides).rev().all(|(&n, &s)| {
        let packed = s == stride;
        // The product overflows only for a tensor without elements, for which either answer is right.
        stride = stride.wrapping_mul(n);
        packed
    })
}
