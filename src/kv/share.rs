//! How slots are shared out to layers.
//!
//! Misses of a layer are taken to fall as 1 / slots: m(s) = w² / s with w² = (m + 1) · slots, where m were counted with `slots` slots. The
//! sum over the layers of w² / s is least, for a given sum of s, where w² / s² is equal in all layers: s = λ · w. Layers of which that is less than
//! `least` have `least`.

use crate::abi::vwd_kv_cache_share_args;
use crate::core::allocate::{collected, filled};
use crate::core::array::{array, require_array};
use crate::core::status::{Error, Result};
use crate::ops::option_checks::require_counts;
use crate::runtime::require_no_flags;

const PURPOSE: &str = "the shares of a KV cache's layers";

/// # Safety
/// Pointers of the arguments are NULL, or to as many numbers as there are layers.
pub unsafe fn share_slots(c: &vwd_kv_cache_share_args) -> Result<()> {
    require_no_flags("flags", c.flags)?;
    require_counts(&[("layers", c.layers), ("least", c.least)])?;
    let [least, layers] = [c.least, c.layers].map(u64::from);
    let Some(total) = u32::try_from(c.total).ok().filter(|_| c.total >= least * layers) else {
        let expected = format!("{} (least {least} for each of {layers} layers) … 2^32 − 1", least * layers);
        return Err(Error::argument("total", c.total, expected));
    };
    let (count, numbers) = (c.layers as usize, "numbers");
    // SAFETY: the caller says that there are as many numbers as layers.
    let (slots, misses) =
        unsafe { (array("slots", c.slots, count, numbers)?, array("misses", c.misses, count, numbers)?) };
    require_array("shares", c.shares, count, numbers)?;
    if let Some(n) = slots.iter().position(|&slots| slots == 0) {
        return Err(Error::argument(&format!("slots[{n}]"), 0, "at least 1"));
    }
    let shares = shares(&weights(slots, misses)?, total, c.least)?;
    // SAFETY: not NULL; nothing is read any more where it overlaps `slots`.
    unsafe { c.shares.copy_from(shares.as_ptr(), shares.len()) };
    Ok(())
}

/// The part of all slots that each layer should have: w, relative to the sum, but not less than half of the part that it had.
fn weights(slots: &[u32], misses: &[u64]) -> Result<Vec<f64>> {
    let marginal = |(&slots, &misses): (&u32, &u64)| ((misses as f64 + 1.0) * slots as f64).sqrt();
    let mut weights = collected(slots.iter().zip(misses).map(marginal), PURPOSE)?;
    let (sum, all) = (weights.iter().sum::<f64>(), slots.iter().map(|&n| n as f64).sum::<f64>());
    for (weight, &slots) in weights.iter_mut().zip(slots) {
        *weight = (*weight / sum).max(slots as f64 / all / 2.0);
    }
    Ok(weights)
}

/// `total` slots by weight, `least` for each layer at least.
fn shares(weights: &[f64], total: u32, least: u32) -> Result<Vec<u32>> {
    let mut shares = filled(least, weights.len(), PURPOSE)?;
    let mut is_least = filled(false, weights.len(), PURPOSE)?;
    // Each round finds further layers that have `least`; what is left for the others gets less with each.
    loop {
        let others = || (0..weights.len()).filter(|&n| !is_least[n]);
        let left = total as f64 - least as f64 * (weights.len() - others().count()) as f64;
        let level = left / others().map(|n| weights[n]).sum::<f64>();
        for n in others() {
            shares[n] = ((weights[n] * level) as u32).max(least);
        }
        let falls: Option<usize> = others().find(|&n| weights[n] * level < least as f64);
        match falls {
            Some(_) => (0..weights.len()).for_each(|n| is_least[n] |= weights[n] * level < least as f64),
            None => break,
        }
    }
    // Rounding has left fewer slots than there are layers.
    let saved = |n: usize, share: u32| weights[n] * weights[n] / (share as f64 * (share as f64 + 1.0));
    for _ in shares.iter().map(|&share| share as u64).sum::<u64>()..total as u64 {
        let most = (0..weights.len()).rev().max_by(|&a, &b| saved(a, shares[a]).total_cmp(&saved(b, shares[b])));
        shares[most.expect("at least one layer")] += 1;
    }
    Ok(shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(slots: &[u32], misses: &[u64], total: u32, least: u32) -> Vec<u32> {
        let shares = shares(&weights(slots, misses).unwrap(), total, least).unwrap();
        assert_eq!(shares.iter().sum::<u32>(), total);
        shares
    }

    #[test]
    fn shares_are_in_proportion_to_the_root_of_misses_times_slots() {
        assert_eq!(share(&[100, 100], &[399, 99], 300, 1), [200, 100]);
        assert_eq!(share(&[100, 100, 100], &[15, 8, 3], 300, 1), [133, 100, 67]);
    }

    #[test]
    fn shares_stay_where_misses_per_slot_are_equal() {
        assert_eq!(share(&[200, 100, 50], &[19999, 9999, 4999], 350, 1), [200, 100, 50]);
    }

    #[test]
    fn layer_has_the_least_and_a_third_of_what_it_had() {
        assert_eq!(share(&[100; 2], &[1_000_000, 0], 200, 1), [160, 40], "the second counts at a quarter");
        assert_eq!(share(&[100; 3], &[1_000_000, 0, 0], 300, 90), [120, 90, 90]);
        assert_eq!(share(&[100; 3], &[7, 7, 7], 12, 4), [4, 4, 4]);
    }

    #[test]
    fn what_rounding_leaves_goes_where_it_saves_most() {
        assert_eq!(share(&[10, 10, 10], &[0, 0, 0], 11, 1), [4, 4, 3]);
    }
}
