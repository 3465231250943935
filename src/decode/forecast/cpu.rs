//! Projection on the CPU. Reading the map bounds its time: every row of the map is read once for the whole batch.

use super::map::{Map, Matrix};
use super::{ProjectRequest, Rope};
use crate::core::dtype::Rounded;
use crate::core::status::Result;
use crate::ops::simd::{Kernel, LANES, Lanes, dispatch};
use crate::runtime::cpu::{Cpu, Scratch};
use crate::with_float;

pub fn project(cpu: &Cpu, r: &ProjectRequest) -> Result<()> {
    let scratch = cpu.scratch();
    let batch = r.inputs.count();
    let width = r.shape.inputs().next_multiple_of(LANES);
    let x = scratch.slice(batch * width, 0.0f32)?;
    cpu.parallel_chunks(x, width, width * 16, |b, row| {
        // SAFETY: b is below B; the op's caller keeps the tensors valid.
        unsafe { r.inputs.write(b, row, |value| value as f32) }
    });
    let q = match &*r.solved.map {
        Map::FullRank(weight) => multiply(cpu, &scratch, weight, x)?,
        Map::LowRank { down, up } => {
            let inner = multiply(cpu, &scratch, down, x)?;
            let rows = scratch.slice(batch * up.stride, 0.0f32)?;
            for (b, row) in rows.chunks_mut(up.stride).enumerate() {
                row.iter_mut().zip(inner.iter().skip(b).step_by(batch)).for_each(|(to, &from)| *to = from);
            }
            multiply(cpu, &scratch, up, rows)?
        }
    };
    let turns = scratch.slice(batch * r.rope.dim, 0.0f32)?;
    let pairs = r.rope.dim / 2;
    if pairs > 0 {
        cpu.parallel_chunks(turns, 2 * pairs, pairs * 256, |b, row| {
            // SAFETY: b is below B.
            unsafe { turn(r, b, row) }
        });
    }
    cpu.parallel(batch * r.shape.q_heads, r.shape.head_dim * 16, |task| {
        let (b, h) = (task / r.shape.q_heads, task % r.shape.q_heads);
        let turns = &turns[b * 2 * pairs..(b + 1) * 2 * pairs];
        // SAFETY: b and h are below B and q_heads, and no other task writes this head.
        unsafe { with_float!(r.q.dtype, T => write_head::<T>(r, b, h, q, turns)) }
    });
    Ok(())
}

/// Writes cos and sin of every channel pair's angle at the position of row `b`, times the factor on rotated channels.
///
/// # Safety
/// `b` is below B; the tensors are valid.
unsafe fn turn(r: &ProjectRequest, b: usize, row: &mut [f32]) {
    let Rope { dim, theta, scale, inv_freq, .. } = &r.rope;
    // SAFETY: b is below B, and c below rotary_dim / 2, the length of inv_freq.
    unsafe {
        let position = r.positions.get::<i32, 1>([b]) as f64;
        for (c, turn) in row.chunks_exact_mut(2).enumerate() {
            let frequency = match inv_freq {
                Some(t) => t.get::<f32, 1>([c]) as f64,
                None => theta.powf(-2.0 * c as f64 / *dim as f64),
            };
            let (sin, cos) = (position * frequency).sin_cos();
            (turn[0], turn[1]) = ((cos * scale) as f32, (sin * scale) as f32);
        }
    }
}

/// Rotates head `h` of row `b` and writes it. `q` is [outputs, B].
///
/// # Safety
/// `b` and `h` are inside q's shape; q is valid and of dtype `T`, and nobody else writes this head.
unsafe fn write_head<T: Rounded>(r: &ProjectRequest, b: usize, h: usize, q: &[f32], turns: &[f32]) {
    let (batch, dim) = (r.inputs.count(), r.shape.head_dim);
    let value = |c: usize| q[(h * dim + c) * batch + b];
    // SAFETY: b and h are inside q, whose last extent is head_dim; every c below is less than that.
    let write = |c: usize, value: f32| unsafe { r.q.set([b, h, c], T::from_f32(value)) };
    for (c, turn) in turns.chunks_exact(2).enumerate() {
        let (first, second) = r.rope.pair(c);
        let (x, y) = (value(first), value(second));
        write(first, x * turn[0] - y * turn[1]);
        write(second, x * turn[1] + y * turn[0]);
    }
    (r.rope.dim..dim).for_each(|c| write(c, value(c)));
}

/// The products [rows, B] of a matrix's rows and the B rows of `x`, which have the matrix's padded length.
fn multiply<'s>(cpu: &Cpu, scratch: &'s Scratch, matrix: &Matrix, x: &[f32]) -> Result<&'s [f32]> {
    /// The bytes of the matrix that a task reads.
    const TASK: usize = 128 << 10;
    let batch = x.len() / matrix.stride;
    let result = scratch.slice(matrix.rows * batch, 0.0f32)?;
    let rows = (TASK / (matrix.stride * 4)).next_multiple_of(ROWS).max(ROWS);
    if batch > 0 {
        cpu.parallel_chunks(result, rows * batch, rows * matrix.stride * 4, |task, result| {
            let count = result.len() / batch;
            let rows = matrix.padded(task * rows..task * rows + count);
            dispatch(Multiply { rows, x, stride: matrix.stride, result });
        });
    }
    Ok(result)
}

/// The number of the matrix's rows that are multiplied at a time.
const ROWS: usize = 4;

/// result[i, b] = rows[i] · x[b], each summed in the order of [`crate::ops::simd::dot`], however rows are grouped.
struct Multiply<'a> {
    rows: &'a [f32],
    x: &'a [f32],
    stride: usize,
    result: &'a mut [f32],
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let batch = self.x.len() / self.stride;
        for (rows, result) in self.rows.chunks(ROWS * self.stride).zip(self.result.chunks_mut(ROWS * batch)) {
            // A group of fewer rows repeats its last row.
            let last = rows.len() / self.stride - 1;
            let rows = std::array::from_fn(|i| &rows[i.min(last) * self.stride..][..self.stride]);
            for (b, pair) in self.x.chunks(2 * self.stride).enumerate() {
                let (first, second) = pair.split_at(self.stride);
                let mut write = |b: usize, sums: [f32; ROWS]| {
                    result.iter_mut().skip(b).step_by(batch).zip(sums).for_each(|(to, sum)| *to = sum);
                };
                if second.is_empty() {
                    let [sums] = products::<L, 1>(rows, [first]);
                    write(2 * b, sums);
                } else {
                    let [sums, others] = products::<L, 2>(rows, [first, second]);
                    write(2 * b, sums);
                    write(2 * b + 1, others);
                }
            }
        }
    }
}

/// sums[b][i] = rows[i] · x[b]; all rows have the same length, a whole number of vectors.
#[inline(always)]
fn products<L: Lanes, const B: usize>(rows: [&[f32]; ROWS], x: [&[f32]; B]) -> [[f32; ROWS]; B] {
    let mut sums = [[L::splat(0.0); ROWS]; B];
    for at in (0..x[0].len()).step_by(LANES) {
        // SAFETY: a whole vector is left at `at` of every row.
        let values: [L; ROWS] = std::array::from_fn(|i| unsafe { L::load(rows[i].as_ptr().add(at)) });
        for (sums, x) in sums.iter_mut().zip(x) {
            // SAFETY: as above.
            let x = unsafe { L::load(x.as_ptr().add(at)) };
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = value.mul_add(x, *sum);
            }
        }
    }
    sums.map(L::sums)
}
