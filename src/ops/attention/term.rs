//! What a list leaves out, as one more term: its checks, and what it does not go with.

use crate::abi::{vwd_attention_args, vwd_remainder};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Tensor, given};
use crate::core::versioned::versioned;
use crate::ops::remainder::Remainder;
use crate::ops::views::{BlockList, Heads, Positions, State};
use std::mem::MaybeUninit;

/// The state m = log_mass, l = 1, acc = mean_v + ½·scale·covarianceᵀ·q of each row.
#[derive(Clone, Copy)]
pub struct Term<'a> {
    pub remainder: Remainder<'a>,
    /// [B, (Q,) Hq]
    pub log_mass: Tensor<'a>,
}

impl<'a> Term<'a> {
    /// Checks the term of a call, if it has one. `queries`: their positions, their heads, and the channels of a value. `room` is for the struct of an
    /// earlier version.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        c: &'a vwd_attention_args,
        queries: (&Positions, Heads, usize),
        room: &'a mut MaybeUninit<vwd_remainder>,
    ) -> Result<Option<Term<'a>>> {
        match (c.remainder.is_null(), given(&c.log_mass)) {
            (true, None) => Ok(None),
            (true, Some(_)) => {
                Err(Error::argument("remainder", "NULL beside log_mass", "means and covariance, or neither"))
            }
            (false, None) => Err(Error::argument("log_mass", "absent beside remainder", "a tensor")),
            (false, Some(_)) => Term::checked(checks, c, queries, room).map(Some),
        }
    }

    #[inline(never)]
    fn checked(
        checks: &Checks,
        c: &'a vwd_attention_args,
        (positions, heads, value_dim): (&Positions, Heads, usize),
        room: &'a mut MaybeUninit<vwd_remainder>,
    ) -> Result<Term<'a>> {
        if BlockList::is_absent(&c.list) {
            return Err(Error::argument("remainder", "given without a list", "a list, which leaves something out"));
        }
        if State::is_absent([&c.state.acc, &c.state.m, &c.state.l]) {
            return Err(Error::argument("state", "absent", "a state, to which remainder is joined"));
        }
        let has_partials = !State::is_absent([&c.partials.acc, &c.partials.m, &c.partials.l]);
        let others = [
            ("partials", has_partials),
            ("soft_cap", c.soft_cap != 0.0),
            ("window", c.window != 0),
            ("tree", given(&c.tree).is_some()),
        ];
        if let Some((name, _)) = others.iter().find(|(_, is_given)| *is_given) {
            return Err(Error::argument(name, "given beside remainder", "one of the two"));
        }
        // SAFETY: the C contract of a pointer that is given.
        let remainder = unsafe { versioned(c.remainder, "remainder", room)? };
        let (batch, of_heads) = (("B", positions.batch()), ("Hq", heads.q));
        let floats = &[DType::F32];
        let log_mass = match positions.dimension() {
            None => checks.input("log_mass", &c.log_mass, floats, &[batch, of_heads])?,
            Some(q) => checks.input("log_mass", &c.log_mass, floats, &[batch, ("Q", q), of_heads])?,
        };
        let sizes = [heads.kv, heads.dim, value_dim];
        Ok(Term { remainder: Remainder::from_c(checks, remainder, batch.1, sizes)?, log_mass })
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 6] {
        let [rows, tokens, mean_k, mean_v, covariance] = self.remainder.tensors();
        [rows, tokens, mean_k, mean_v, covariance, Some(&self.log_mass)]
    }
}
