//! The fit: sums over activations, and the solution of the normal equations.
//!
//! Sums and solution are in double precision. Every matrix is column major, and a task computes a panel of columns, whose
//! values do not depend on the number of tasks.

use super::inputs::write_queries;
use super::map::{Map, Matrix};
use super::{AccumulateRequest, Shape};
use crate::core::allocate::zeros;
use crate::core::dtype::Float;
use crate::core::status::{Code, Error, Result};
use crate::core::tensor::{Device, Tensor};
use crate::runtime::cpu::Cpu;
use crate::runtime::{On, Options, Session};
use crate::with_float;
use faer::diag::DiagMut;
use faer::dyn_stack::{MemBuffer, MemStack, StackReq};
use faer::linalg::cholesky::llt::factor::{LltError, cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::evd::{ComputeEigenvectors, self_adjoint_evd, self_adjoint_evd_scratch};
use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::{solve_lower_triangular_in_place, solve_upper_triangular_in_place};
use faer::prelude::ReborrowMut;
use faer::{Accum, MatMut, MatRef, Par};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of columns of one task.
const PANEL: usize = 64;
/// The number of tokens that are added at once.
const CHUNK: usize = 256;

/// The sums over tokens for one map.
pub struct Sums {
    /// X̂ᵀX̂ [inputs, inputs]; only the lower triangle is kept.
    gram: Vec<f64>,
    /// X̂ᵀQ [inputs, outputs]
    cross: Vec<f64>,
}

impl Sums {
    fn empty(shape: &Shape) -> Result<Sums> {
        let (n, m) = (shape.inputs(), shape.outputs());
        Ok(Sums { gram: zeros(n * n, "X̂ᵀX̂")?, cross: zeros(n * m, "X̂ᵀQ")? })
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&*self.gram) + size_of_val(&*self.cross)
    }
}

/// Runs a fit on the session's threads, or on threads of its own if the session computes on a device.
pub fn on_host<R>(session: &Session, work: impl FnOnce(&Cpu) -> Result<R>) -> Result<R> {
    if session.device() == Device::Cpu
        && let On::Cpu(cpu) = session.on(std::ptr::null_mut())?
    {
        return work(cpu);
    }
    work(&Cpu::start(&Options::default())?)
}

pub fn accumulate(cpu: &Cpu, shape: &Shape, sums: &mut Option<Sums>, r: &AccumulateRequest) -> Result<()> {
    let (tokens, n, m) = (r.inputs.count(), shape.inputs(), shape.outputs());
    if tokens == 0 {
        return Ok(());
    }
    for t in [Some(&r.inputs.x), r.inputs.previous.as_ref(), Some(&r.q)].into_iter().flatten() {
        // SAFETY: the op's caller keeps the tensors valid.
        unsafe { with_float!(t.dtype, T => check_finite::<T>(cpu, t))? };
    }
    let mut x: Vec<f64> = zeros(tokens.min(CHUNK) * n, "a chunk of X̂")?;
    let mut q: Vec<f64> = zeros(tokens.min(CHUNK) * m, "a chunk of Q")?;
    let sums = match sums {
        Some(sums) => sums,
        none => none.insert(Sums::empty(shape)?),
    };
    for first in (0..tokens).step_by(CHUNK) {
        let count = CHUNK.min(tokens - first);
        cpu.parallel_chunks(&mut x[..count * n], n, n * 8, |i, row| {
            // SAFETY: first + i is below N; the op's caller keeps the tensors valid.
            unsafe { r.inputs.write(first + i, row, |value| value) }
        });
        cpu.parallel_chunks(&mut q[..count * m], m, m * 8, |i, row| {
            // SAFETY: first + i is below N.
            unsafe { with_float!(r.q.dtype, T => write_queries::<T, f64>(&r.q, first + i, row, |value| value)) }
        });
        let x = MatRef::from_row_major_slice(&x[..count * n], count, n);
        let q = MatRef::from_row_major_slice(&q[..count * m], count, m);
        let work = count * n * PANEL;
        cpu.parallel_chunks(&mut sums.gram, n * PANEL, work, |task, panel| {
            let (from, width) = (task * PANEL, panel.len() / n);
            let panel = MatMut::from_column_major_slice_mut(panel, n, width).subrows_mut(from, n - from);
            matmul(panel, Accum::Add, x.subcols(from, n - from).transpose(), x.subcols(from, width), 1.0, Par::Seq);
        });
        cpu.parallel_chunks(&mut sums.cross, n * PANEL, work, |task, panel| {
            let (from, width) = (task * PANEL, panel.len() / n);
            let panel = MatMut::from_column_major_slice_mut(panel, n, width);
            matmul(panel, Accum::Add, x.transpose(), q.subcols(from, width), 1.0, Par::Seq);
        });
    }
    Ok(())
}

/// # Safety
/// The tensor is valid and of dtype `T`.
unsafe fn check_finite<T: Float>(cpu: &Cpu, t: &Tensor) -> Result<()> {
    let bad = AtomicUsize::new(usize::MAX);
    cpu.parallel(t.dim(0), t.dim(1) * t.dim(2) * size_of::<T>(), |i| {
        // SAFETY: every index is below its extent, which is 1 past the rank.
        let finite = |h, c| unsafe { t.get::<T, 3>([i, h, c]) }.to_f32().is_finite();
        if !(0..t.dim(1)).all(|h| (0..t.dim(2)).all(|c| finite(h, c))) {
            bad.fetch_min(i, Ordering::Relaxed);
        }
    });
    match bad.into_inner() {
        usize::MAX => Ok(()),
        row => Err(Error::argument(&t.name().to_string(), format!("row {row} is not finite"), "finite values")),
    }
}

/// Solves the maps of all layers that have sums.
pub fn solve(cpu: &Cpu, shape: &Shape, sums: &[Option<Sums>], ridge: f32, rank: usize) -> Result<Vec<(usize, Map)>> {
    /// The bytes of memory that layers solved at the same time may use together. A layer takes about three times its sums; one
    /// layer at a time is always solved.
    const WORKSPACE: usize = 256 << 20;
    let waiting = || sums.iter().enumerate().filter_map(|(layer, sums)| Some((layer, sums.as_ref()?)));
    let mut maps: Vec<_> = waiting().map(|(layer, sums)| (layer, sums, None)).collect();
    let together = waiting().next().map_or(1, |(_, sums)| WORKSPACE / (3 * sums.bytes())).max(1);
    for group in maps.chunks_mut(together) {
        cpu.parallel_chunks(group, 1, usize::MAX, |_, place| {
            let (layer, sums, map) = &mut place[0];
            *map = Some(solve_layer(cpu, shape, *layer, sums, ridge, rank));
        });
    }
    maps.into_iter().map(|(layer, _, map)| Ok((layer, map.expect("solved above")?))).collect()
}

/// The map that fits the sums of a layer best, of full rank (`rank` 0) or of low rank.
fn solve_layer(cpu: &Cpu, shape: &Shape, layer: usize, sums: &Sums, ridge: f32, rank: usize) -> Result<Map> {
    let (n, m) = (shape.inputs(), shape.outputs());
    let mut system = copy(&sums.gram)?;
    add_ridge(&mut system, shape, ridge as f64);
    if let Some(pivot) = factor(&mut system, n)? {
        let found = format!("{ridge} leaves the system of layer {layer} singular (pivot {pivot} of {n})");
        return Err(Error::argument("options.ridge", found, "a larger one, or more tokens"));
    }
    let mut weights = copy(&sums.cross)?;
    let lower = MatRef::from_column_major_slice(&system, n, n);
    cpu.parallel_chunks(&mut weights, n * PANEL, n * n * PANEL, |_, panel| {
        let width = panel.len() / n;
        let mut panel = MatMut::from_column_major_slice_mut(panel, n, width);
        solve_lower_triangular_in_place(lower, panel.rb_mut(), Par::Seq);
        solve_upper_triangular_in_place(lower.transpose(), panel, Par::Seq);
    });
    if rank == 0 {
        return Ok(Map::FullRank(rows(layer, &weights, n)?));
    }

    // The best approximation of X̂W of rank r is X̂W·VᵣVᵣᵀ, where Vᵣ holds its first r right singular vectors: the
    // eigenvectors of (X̂W)ᵀX̂W = Wᵀ(X̂ᵀX̂)W with the largest eigenvalues.
    let mut gram = system;
    for j in 0..n {
        for i in j..n {
            (gram[j * n + i], gram[i * n + j]) = (sums.gram[j * n + i], sums.gram[j * n + i]);
        }
    }
    let whole = MatRef::from_column_major_slice(&weights, n, m);
    let gram_weights = product(cpu, MatRef::from_column_major_slice(&gram, n, n), whole)?;
    drop(gram);
    let outputs = product(cpu, whole.transpose(), MatRef::from_column_major_slice(&gram_weights, n, m))?;
    drop(gram_weights);
    let vectors = eigenvectors(&outputs, m)?;
    // Eigenvalues ascend, so the last vectors belong to the largest ones.
    let leading = MatRef::from_column_major_slice(&vectors, m, m).subcols(m - rank, rank).reverse_cols();
    let down = rows(layer, &product(cpu, whole, leading)?, n)?;
    let mut up = Matrix::zeros(m, rank)?;
    for i in 0..m {
        up.row_mut(i).iter_mut().enumerate().for_each(|(j, value)| *value = leading[(i, j)] as f32);
    }
    Ok(Map::LowRank { down, up })
}

/// Adds λ times the mean of the diagonal, with one mean for the queries at the token before and one for all other inputs:
/// queries are of any scale and x̂ is of scale 1, so one ridge for both would shrink the smaller kind too much and the larger
/// too little.
fn add_ridge(system: &mut [f64], shape: &Shape, ridge: f64) {
    let (n, remembered) = (shape.inputs(), shape.remembered());
    let (mut past, mut present) = (0.0, 0.0);
    for i in 0..n {
        *if remembered.contains(&i) { &mut past } else { &mut present } += system[i * n + i];
    }
    present /= (n - remembered.len()) as f64;
    // If no token has a token before it, the scale of earlier queries is unknown.
    past = if past > 0.0 { past / remembered.len() as f64 } else { present };
    for i in 0..n {
        system[i * n + i] += ridge * if remembered.contains(&i) { past } else { present };
    }
}

/// Overwrites A's lower triangle by L with A = LLᵀ. Returns the first pivot that is not positive, if there is one.
fn factor(a: &mut [f64], n: usize) -> Result<Option<usize>> {
    let mut memory = memory(cholesky_in_place_scratch::<f64>(n, Par::Seq, Default::default()))?;
    let (a, stack) = (MatMut::from_column_major_slice_mut(a, n, n), MemStack::new(&mut memory));
    match cholesky_in_place(a, Default::default(), Par::Seq, stack, Default::default()) {
        Ok(_) => Ok(None),
        Err(LltError::NonPositivePivot { index }) => Ok(Some(index)),
    }
}

/// Eigenvectors of a symmetric matrix, in ascending order of the eigenvalues.
fn eigenvectors(a: &[f64], n: usize) -> Result<Vec<f64>> {
    let mut vectors = zeros(n * n, "eigenvectors")?;
    let mut values = zeros(n, "eigenvalues")?;
    let scratch = self_adjoint_evd_scratch::<f64>(n, ComputeEigenvectors::Yes, Par::Seq, Default::default());
    let mut memory = memory(scratch)?;
    self_adjoint_evd(
        MatRef::from_column_major_slice(a, n, n),
        DiagMut::from_slice_mut(&mut values),
        Some(MatMut::from_column_major_slice_mut(&mut vectors, n, n)),
        Par::Seq,
        MemStack::new(&mut memory),
        Default::default(),
    )
    .map_err(|_| Error::new(Code::Internal, "the eigenvalues of the fitted outputs did not converge"))?;
    Ok(vectors)
}

/// a·b
fn product(cpu: &Cpu, a: MatRef<f64>, b: MatRef<f64>) -> Result<Vec<f64>> {
    let n = a.nrows();
    let mut result = zeros(n * b.ncols(), "a product of a fit")?;
    cpu.parallel_chunks(&mut result, n * PANEL, n * a.ncols() * PANEL, |task, panel| {
        let (from, width) = (task * PANEL, panel.len() / n);
        let panel = MatMut::from_column_major_slice_mut(panel, n, width);
        matmul(panel, Accum::Replace, a, b.subcols(from, width), 1.0, Par::Seq);
    });
    Ok(result)
}

/// The columns of a matrix, each of `length`, as rows in single precision.
fn rows(layer: usize, columns: &[f64], length: usize) -> Result<Matrix> {
    let mut matrix = Matrix::zeros(columns.len() / length, length)?;
    for (i, column) in columns.chunks(length).enumerate() {
        matrix.row_mut(i).iter_mut().zip(column).for_each(|(value, &wide)| *value = wide as f32);
    }
    if matrix.is_finite() {
        return Ok(matrix);
    }
    let found = format!("the map of layer {layer} exceeds float32");
    Err(Error::argument("q", found, "accumulated queries of a smaller scale"))
}

fn copy(values: &[f64]) -> Result<Vec<f64>> {
    let mut copy = zeros(values.len(), "the system of a fit")?;
    copy.copy_from_slice(values);
    Ok(copy)
}

fn memory(need: StackReq) -> Result<MemBuffer> {
    MemBuffer::try_new(need).map_err(|_| Error::out_of_memory(need.unaligned_bytes_required(), "a factorisation"))
}
