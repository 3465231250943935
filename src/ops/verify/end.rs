//! What ends a request: stop tokens and the number of tokens that it may still have.
//!
//! The committed tokens t_0 … t_{n−1} of a call are cut to n' = min(n, remaining, r + 1), where r is the first that is a stop token, not
//! before min_remaining. The cut is a STOP where t_{n'−1} is that stop token, else a LENGTH where n' = remaining.

use crate::abi::{VWD_FINISH_LENGTH, VWD_FINISH_NONE, VWD_FINISH_STOP, vwd_tensor};
use crate::abi::{vwd_verify_args, vwd_verify_pack_args, vwd_verify_sample_args, vwd_verify_tree_args};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};

/// Checked arguments.
#[derive(Clone, Copy)]
pub struct End<'a> {
    /// [S] or [B, S]
    pub stop: Option<Tensor<'a>>,
    /// [B] each.
    pub ignore_stop: Option<Tensor<'a>>,
    pub remaining: Option<Tensor<'a>>,
    pub min_remaining: Option<Tensor<'a>>,
    pub committed_len: Option<Tensor<'a>>,
    pub finish: Option<Tensor<'a>>,
}

/// The arguments of a call that are about the end.
pub struct GivenEnd<'a> {
    stop: &'a vwd_tensor,
    ignore_stop: &'a vwd_tensor,
    remaining: &'a vwd_tensor,
    min_remaining: &'a vwd_tensor,
    committed_len: &'a vwd_tensor,
    finish: &'a vwd_tensor,
}

macro_rules! given_by {
    ($($args:ty),*) => {$(
        impl<'a> From<&'a $args> for GivenEnd<'a> {
            #[inline(always)]
            fn from(c: &'a $args) -> GivenEnd<'a> {
                GivenEnd {
                    stop: &c.stop,
                    ignore_stop: &c.ignore_stop,
                    remaining: &c.remaining,
                    min_remaining: &c.min_remaining,
                    committed_len: &c.committed_len,
                    finish: &c.finish,
                }
            }
        }
    )*};
}
given_by!(vwd_verify_args, vwd_verify_pack_args, vwd_verify_sample_args, vwd_verify_tree_args);

impl<'a> End<'a> {
    /// `None` where the call gives none of the arguments.
    #[inline(always)]
    pub fn check_given(checks: &Checks, batch: usize, c: &GivenEnd<'a>) -> Result<Option<End<'a>>> {
        let all = [c.stop, c.ignore_stop, c.remaining, c.min_remaining, c.committed_len, c.finish];
        match all.into_iter().any(|t| given(t).is_some()) {
            true => Ok(Some(End::check(checks, batch, c)?)),
            false => Ok(None),
        }
    }

    #[inline(never)]
    pub fn check(checks: &Checks, batch: usize, c: &GivenEnd<'a>) -> Result<End<'a>> {
        let column = [("B", batch)];
        let (count, flag) = (&[DType::I32], &[DType::U8, DType::BOOL]);
        let stop = match c.stop.ndim {
            2 => checks.optional_input("stop", c.stop, DType::TOKENS, &[("B", batch), ("S", ANY)])?,
            0 | 3..=5 if given(c.stop).is_some() => {
                let shape = checks.required("stop", c.stop)?.shape();
                return Err(Error::argument("stop", format!("shape {shape:?}"), format!("[S] or [B={batch}, S]")));
            }
            _ => checks.optional_input("stop", c.stop, DType::TOKENS, &[("S", ANY)])?,
        };
        Ok(End {
            stop,
            ignore_stop: checks.optional_input("ignore_stop", c.ignore_stop, flag, &column)?,
            remaining: checks.optional_input("remaining", c.remaining, count, &column)?,
            min_remaining: checks.optional_input("min_remaining", c.min_remaining, count, &column)?,
            committed_len: checks.optional_output("committed_len", c.committed_len, count, &column)?,
            finish: checks.optional_output("finish", c.finish, &[DType::U8], &column)?,
        })
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 4] {
        [self.stop.as_ref(), self.ignore_stop.as_ref(), self.remaining.as_ref(), self.min_remaining.as_ref()]
    }

    pub fn outputs(&self) -> [Option<&Tensor<'a>>; 2] {
        [self.committed_len.as_ref(), self.finish.as_ref()]
    }

    /// The most tokens that request `i` commits.
    ///
    /// # Safety
    /// The tensors are valid, and `i` is below the batch size; so for all that follows.
    pub unsafe fn remaining(&self, i: usize) -> usize {
        // SAFETY: forwarded to the caller.
        self.remaining.map_or(usize::MAX, |t| unsafe { t.get::<i32, 1>([i]) }.max(0) as usize)
    }

    /// So many rows of request `i` cannot commit a stop token.
    ///
    /// # Safety
    /// As for [`End::remaining`].
    pub unsafe fn min_remaining(&self, i: usize) -> usize {
        // SAFETY: forwarded to the caller.
        self.min_remaining.map_or(0, |t| unsafe { t.get::<i32, 1>([i]) }.max(0) as usize)
    }

    /// The stop tokens of request `i`.
    ///
    /// # Safety
    /// As for [`End::remaining`].
    pub unsafe fn stops(&self, i: usize) -> impl Iterator<Item = i64> {
        // uint8 and bool are both one byte.
        // SAFETY: forwarded to the caller.
        let ignored = self.ignore_stop.is_some_and(|t| unsafe { *t.data().offset(i as isize * t.stride(0)) } != 0);
        self.stop.filter(|_| !ignored).into_iter().flat_map(move |stop| {
            let by_request = stop.rank() == 2;
            (0..stop.dim(stop.rank() - 1)).map(move |s| {
                let at = if by_request { [i, s] } else { [s, 0] };
                // SAFETY: forwarded to the caller. Past the rank the index is 0.
                unsafe { integer(&stop, at) }
            })
        })
    }

    /// The stop tokens that row `row` of request `i` cannot give.
    ///
    /// # Safety
    /// As for [`End::remaining`].
    pub unsafe fn forbidden(&self, i: usize, row: usize) -> impl Iterator<Item = i64> {
        // SAFETY: forwarded to the caller.
        let is_early = row < unsafe { self.min_remaining(i) };
        // SAFETY: as above.
        is_early.then(|| unsafe { self.stops(i) }).into_iter().flatten()
    }

    /// How many of `n` tokens are committed, and why no more.
    ///
    /// # Safety
    /// As for [`End::remaining`].
    pub unsafe fn cut(&self, i: usize, n: usize, token: impl Fn(usize) -> i64) -> (usize, u8) {
        // SAFETY: forwarded to the caller.
        let (remaining, least) = unsafe { (self.remaining(i), self.min_remaining(i)) };
        let n = n.min(remaining);
        // SAFETY: as above.
        let is_stop = |&r: &usize| token(r) >= 0 && unsafe { self.stops(i) }.any(|stop| stop == token(r));
        match (least..n).find(is_stop) {
            Some(r) => (r + 1, VWD_FINISH_STOP),
            None if n == remaining && n > 0 => (n, VWD_FINISH_LENGTH),
            None => (n, VWD_FINISH_NONE),
        }
    }

    /// # Safety
    /// As for [`End::remaining`], and no other task writes what request `i` has.
    pub unsafe fn write(&self, i: usize, committed: usize, finish: u8) {
        // SAFETY: forwarded to the caller.
        unsafe {
            if let Some(len) = self.committed_len {
                len.set([i], committed as i32);
            }
            if let Some(t) = self.finish {
                t.set([i], finish);
            }
        }
    }
}

/// An int32 or int64.
///
/// # Safety
/// The tensor is valid and of one of these types, and `at` is inside its shape.
pub unsafe fn integer<const N: usize>(t: &Tensor, at: [usize; N]) -> i64 {
    // SAFETY: forwarded to the caller.
    unsafe {
        match t.dtype {
            DType::I32 => t.get::<i32, N>(at) as i64,
            _ => t.get::<i64, N>(at),
        }
    }
}
