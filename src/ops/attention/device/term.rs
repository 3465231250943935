//! Launch of kernels/attention_remainder/term.cu, which joins what a list leaves out.

use super::Kernels;
use super::params::{Params, StateView};
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
        m: View<3>,
        l: View<3>,
        lse: View<3>,
        count: u32,
        fours: u32,
        strips: u32,
        scale: f32,
        units: u32,
        unused: u32,
    }
}

kernel_constants! {
    /// Query heads of a CTA.
    const HEADS: u32 = 4;
    const MOST_DIM: usize = crate::ops::views::MAX_DIM;
    /// Channels of values of a CTA.
    const STRIP: u32 = 32;
}

/// Joins the terms to the states that a launch of these parameters has written.
///
/// # Safety
/// The op's caller keeps the tensors valid until the stream has passed.
pub unsafe fn launch(enqueue: &Enqueue, of: &Params, batch: usize, term: &Term) -> Result<()> {
    debug_assert!(of.dim as usize <= MOST_DIM);
    let Term { remainder: Remainder { rows, tokens, mean_v, covariance, .. }, log_mass } = term;
    let (fours, strips) = (of.group.value.div_ceil(HEADS), of.value_dim.div_ceil(STRIP));
    let units = batch.saturating_mul(of.positions as usize).saturating_mul(of.kv_heads.value as usize);
    let most = units.checked_mul((fours * strips).max(of.group.value) as usize).filter(|&n| n <= i32::MAX as usize);
    if most.is_none() {
        let text = format!("q: {units} positions and KV heads; CUDA takes up to 2^31 − 1 with remainder");
        return Err(Error::unsupported(text));
    }
    // What the first kernel reads of states the second one writes.
    let StateView { acc, m, l } = of.state;
    let without_sums = StateView { acc, m: View::ABSENT, l: View::ABSENT };
    let of_rows = |view: View<4>| View { data: view.data, step: [view.step[0], view.step[1], view.step[2]] };
    let params = TermParams {
        to: Params { own_lists: 1, lse: View::ABSENT, state: without_sums, ..*of },
        rows: View::optional(rows, |t| View::new(t, [0])),
        tokens: View::new(tokens, [0, 1]),
        mean_v: View::new(mean_v, [0, 1, 2]),
        covariance: View::new(covariance, [0, 1, 2, 3]),
        log_mass: View::by_position(log_mass),
        m: of_rows(m),
        l: of_rows(l),
        lse: of.lse,
        count: saturated(tokens.dim(0)),
        fours,
        strips,
        scale: 0.5 * of.scale,
        units: units as u32,
        unused: 0,
    };
    let kernels: &Kernels = enqueue.kernels();
    let grid = |ctas: usize| Grid { ctas: ctas as u32, threads: THREADS, kind: Kind::Plain };
    let rows = units * of.group.value as usize;
    // SAFETY: TermParams is the kernels' struct; says the caller.
    unsafe {
        enqueue.launch(&kernels.term, grid(units * (fours * strips) as usize), [(&raw const params).cast()])?;
        enqueue.launch(&kernels.term_sums, grid(rows.div_ceil(THREADS as usize)), [(&raw const params).cast()])
    }
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
