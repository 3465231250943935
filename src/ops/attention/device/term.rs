//! What a list leaves out: launch of the kernel of kernels/attention_remainder/term.cu, which joins it to what attention has written, and
//! parameters of those of decode128.cu, which attend beside it.

use super::Kernels;
use super::decode128;
use super::params::{Params, StateView};
use super::plan::{Element, Entry, Plan, WARPS, is_copied_by_16};
use crate::core::status::{Error, Result};
use crate::ops::attention::term::Term;
use crate::ops::remainder::Remainder;
use crate::runtime::cuda::layout::{kernel_constants, kernel_struct};
use crate::runtime::cuda::views::{View, has_aligned_rows, saturated};
use crate::runtime::cuda::{Enqueue, Grid, Kernel, Kind, LARGEST_CLUSTER, Modules};

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
        adjacent: u32,
        unused: u32,
    }
}

kernel_struct! {
    /// Mirrors ListTermParams.
    pub struct ListTermParams {
        to: Params,
        rows: View<1>,
        tokens: View<2>,
        mean_v: View<3>,
        covariance: View<4>,
        log_mass: View<3>,
        count: u32,
        keys: u32,
        offset: u32,
        scale: f32,
    }
}

kernel_constants! {
    const TERM_THREADS: u32 = 128;
    /// Query heads of a cluster.
    const HEADS: u32 = 4;
    /// Channels of values that a CTA has at a time.
    const STRIP: u32 = 64;
    /// Bytes of a covariance's row of 128 channels, or of such a mean.
    const TERM_ROW_BYTES: u32 = 512;
}

/// Key channels of the covariance that each warp of a list has, whose CTAs are so many.
fn keys_of_a_warp(ctas: u32) -> u32 {
    decode128::CHANNELS.div_ceil(ctas * WARPS)
}

/// Shared memory of a CTA's rows of the covariance, those of a warp together, and of a mean.
fn shared(ctas: u32) -> u32 {
    (WARPS * keys_of_a_warp(ctas) + 1) * TERM_ROW_BYTES
}

/// The plan of decode128 with the term in the same launch, where that is possible. `beside` plans a call beside so many bytes of shared
/// memory.
pub fn with_term(plan: Plan, term: &Term, beside: impl Fn(u32) -> Option<Plan>) -> Plan {
    let Remainder { mean_v, covariance, .. } = &term.remainder;
    let Entry::Decode128(element @ (Element::F16 | Element::Bf16), rows) = plan.entry else { return plan };
    if ![mean_v, covariance].into_iter().all(is_copied_by_16) {
        return plan;
    }
    let of_term = shared(plan.params.ctas.value);
    // Copies are of 16 bytes.
    let Some(smaller) = beside(of_term + 16) else { return plan };
    let shared = smaller.shared.next_multiple_of(16) + of_term;
    Plan { entry: Entry::Decode128Term(element, rows), shared, ..smaller }
}

impl ListTermParams {
    /// The parameters of a plan that [`with_term`] made.
    pub fn new(plan: &Plan, term: &Term) -> ListTermParams {
        let Term { remainder: Remainder { rows, tokens, mean_v, covariance, .. }, log_mass } = term;
        let ctas = plan.params.ctas.value;
        ListTermParams {
            to: plan.params,
            rows: View::optional(rows, |t| View::new(t, [0])),
            tokens: View::new(tokens, [0, 1]),
            mean_v: View::new(mean_v, [0, 1, 2]),
            covariance: View::new(covariance, [0, 1, 2, 3]),
            log_mass: View::by_position(log_mass),
            count: saturated(tokens.dim(0)),
            keys: keys_of_a_warp(ctas),
            offset: plan.shared - shared(ctas),
            scale: 0.5 * plan.params.scale,
        }
    }
}

/// The kernel, and the CTAs of the largest clusters that the device forms of it; 1 where it forms none.
pub struct TermKernel {
    kernel: Kernel,
    cluster: u32,
}

impl TermKernel {
    pub fn find(modules: &Modules) -> Result<TermKernel> {
        let kernel = modules.kernel("attention_remainder/term", "attention_term")?;
        let largest = if modules.facts().launches_dependents() { LARGEST_CLUSTER } else { 1 };
        let cluster = (2..=largest).rfind(|&size| kernel.active_clusters(size, TERM_THREADS) > 0).unwrap_or(1);
        Ok(TermKernel { kernel, cluster })
    }
}

/// Joins the terms to the states that a launch of these parameters has written.
///
/// # Safety
/// The op's caller keeps the tensors valid until the stream has passed.
pub unsafe fn launch(enqueue: &Enqueue, of: &Params, batch: usize, term: &Term) -> Result<()> {
    let Term { remainder: Remainder { rows, tokens, mean_v, covariance, .. }, log_mass } = term;
    let (fours, strips) = (of.group.value.div_ceil(HEADS), of.value_dim.div_ceil(STRIP));
    let units = batch.saturating_mul(of.positions as usize).saturating_mul(of.kv_heads.value as usize);
    let TermKernel { kernel, cluster } = &enqueue.kernels::<Kernels>().term;
    let cluster = strips.min(*cluster);
    let ctas = units.checked_mul((fours * cluster) as usize).and_then(|n| i32::try_from(n).ok());
    let Some(ctas) = ctas else {
        let text = format!("q: {units} positions and KV heads; CUDA takes up to 2^31 − 1 with remainder");
        return Err(Error::unsupported(text));
    };
    // The kernel writes sums and lse itself, last.
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
        adjacent: has_aligned_rows(covariance, 16) as u32,
        unused: 0,
    };
    let kind = if cluster > 1 { Kind::DependentClusters(cluster) } else { enqueue.dependent_kind() };
    let grid = Grid { ctas: ctas as u32, threads: TERM_THREADS, kind };
    // SAFETY: TermParams is the kernel's struct; says the caller. What the kernel
    // reads before it waits it reads again.
    unsafe { enqueue.launch(kernel, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn the_warps_of_a_list_have_all_key_channels() {
        for ctas in 1..=16 {
            let keys = keys_of_a_warp(ctas);
            assert!(ctas * WARPS * keys >= decode128::CHANNELS, "{ctas} CTAs");
            assert!(ctas * WARPS * (keys - 1) < decode128::CHANNELS, "{ctas} CTAs");
        }
    }

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [TermParams::layout("TermParams"), ListTermParams::layout("ListTermParams"), kernel_constants()];
        layout::check("attention_remainder", file!(), &structs);
    }
}
