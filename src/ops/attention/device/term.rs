//! Launch of kernels/attention_remainder/term.cu, which joins what a list leaves out.

use super::Kernels;
use super::params::Params;
use super::plan::THREADS;
use crate::core::status::{Error, Result};
use crate::ops::attention::term::Term;
use crate::ops::remainder::Remainder;
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{View, saturated};
use crate::runtime::cuda::{Enqueue, Grid, Kind};

kernel_struct! {
    /// Mirrors TermParams.
    struct TermParams {
        to: Params,
        rows: View<1>,
        tokens: View<2>,
        mean_v: View<3>,
        covariance: View<4>,
        log_mass: View<3>,
        count: u32,
        fours: u32,
        scale: f32,
        unused: u32,
    }
}

kernel_constants! {
    /// Query heads of a CTA.
    const HEADS: u32 = 4;
    const MOST_DIM: usize = crate::ops::views::MAX_DIM;
}

/// Joins the terms to the states that a launch of these parameters has written.
///
/// # Safety
/// The op's caller keeps the tensors valid until the stream has passed.
pub unsafe fn launch(enqueue: &Enqueue, of: &Params, batch: usize, term: &Term) -> Result<()> {
    debug_assert!(of.dim as usize <= MOST_DIM);
    let Term { remainder: Remainder { rows, tokens, mean_v, covariance, .. }, log_mass } = term;
    let fours = of.group.value.div_ceil(HEADS);
    let units = batch.saturating_mul(of.positions as usize).saturating_mul(of.kv_heads.value as usize);
    let Some(ctas) = units.checked_mul(fours as usize).and_then(|n| i32::try_from(n).ok()) else {
        return Err(Error::unsupported(format!(
            "q: {units} positions and KV heads; CUDA takes up to 2^31 − 1 with remainder"
        )));
    };
    let params = TermParams {
        to: Params { own_lists: 1, ..*of },
        rows: View::optional(rows, |t| View::new(t, [0])),
        tokens: View::new(tokens, [0, 1]),
        mean_v: View::new(mean_v, [0, 1, 2]),
        covariance: View::new(covariance, [0, 1, 2, 3]),
        log_mass: View::by_position(log_mass),
        count: saturated(tokens.dim(0)),
        fours,
        scale: 0.5 * of.scale,
        unused: 0,
    };
    let grid = Grid { ctas: ctas as u32, threads: THREADS, kind: Kind::Plain };
    let kernels: &Kernels = enqueue.kernels();
    // SAFETY: TermParams is the kernel's struct; says the caller.
    unsafe { enqueue.launch(&kernels.term, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [TermParams::layout("TermParams"), kernel_constants()];
        layout::check("attention_remainder", file!(), &structs);
    }
}
