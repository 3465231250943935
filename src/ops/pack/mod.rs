//! Packing of the accepted rows of every sequence into one contiguous run.
//!
//! offsets[i] = Σ_{j<i} accepted[j]; row t < accepted[i] of sequence i becomes row offsets[i] + t of packed.

mod cpu;
mod cuda;

use super::verify;
use crate::capi::types::{vwd_stream, vwd_tensor};
use crate::capi::verify::{vwd_pack_args, vwd_verify_args, vwd_verify_pack_args};
use crate::core::dtype::DType;
use crate::core::overlap::{self, Range};
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Name, Tensor};
use crate::runtime::{On, Session};

/// The tensors to pack and where to: checked, and read from the caller's arrays again when needed, so that a call of any
/// length allocates nothing.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    checks: Checks,
    rows: &'a [vwd_tensor],
    packed: &'a [vwd_tensor],
}

#[derive(Clone, Copy)]
pub struct Pair {
    /// [B, γ, …]
    pub rows: Tensor,
    /// [cap, …]
    pub packed: Tensor,
}

/// Tensors of one call: K and V of 128 layers.
pub const MOST_TENSORS: usize = 256;
/// Tensors of a call with few to pack, and most tensors of a call beside those to pack.
const FEW_RANGES: usize = 24;

/// Checked arguments; shapes as in `vwd_pack`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub pairs: Pairs<'a>,
    /// [B]
    pub accepted: Tensor,
    /// [B+1]
    pub offsets: Tensor,
    pub gamma: usize,
}

/// Checked arguments of `vwd_verify_pack`.
pub struct VerifiedRequest<'a> {
    pub verify: verify::Request,
    pub pack: Request<'a>,
}

impl<'a> Pairs<'a> {
    /// # Safety
    /// `rows` and `packed` are NULL or hold `count` tensors that live as long as the result.
    unsafe fn from_c(
        checks: Checks,
        count: u32,
        rows: *const vwd_tensor,
        packed: *const vwd_tensor,
    ) -> Result<Pairs<'a>> {
        if count == 0 || count as usize > MOST_TENSORS {
            return Err(Error::argument("tensor_count", count, format!("1 to {MOST_TENSORS}")));
        }
        for (name, array) in [("rows", rows), ("packed", packed)] {
            if array.is_null() || !array.is_aligned() {
                return Err(Error::argument(name, format!("{array:p}"), format!("an array of {count} tensors")));
            }
        }
        // SAFETY: neither is NULL; the caller states their length.
        let (rows, packed) = unsafe {
            (std::slice::from_raw_parts(rows, count as usize), std::slice::from_raw_parts(packed, count as usize))
        };
        Ok(Pairs { checks, rows, packed })
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    fn check(&self, n: usize, batch: usize, gamma: Option<usize>) -> Result<Pair> {
        let rows = self.checks.required(Name::member("rows", n), &self.rows[n])?;
        let packed = self.checks.required(Name::member("packed", n), &self.packed[n])?;
        let gamma = gamma.unwrap_or(rows.dim(1));
        if rows.rank() < 2 || rows.dim(0) != batch || rows.dim(1) != gamma {
            let found = format!("shape {:?}", rows.shape());
            return Err(Error::argument(&rows.name.to_string(), found, format!("[B={batch}, γ={gamma}, …]")));
        }
        let packed = packed.of(rows.dtype)?.writable()?;
        if packed.rank() == 0 || packed.shape()[1..] != rows.shape()[2..] {
            let found = format!("shape {:?}", packed.shape());
            let expected = format!("[cap] and then {:?}, as in {}", &rows.shape()[2..], rows.name);
            return Err(Error::argument(&packed.name.to_string(), found, expected));
        }
        Ok(Pair { rows, packed })
    }

    #[inline]
    pub fn get(&self, n: usize) -> Pair {
        Pair {
            rows: Tensor::trusted(Name::member("rows", n), &self.rows[n]),
            packed: Tensor::trusted(Name::member("packed", n), &self.packed[n]),
        }
    }

    /// Checks every pair, and all tensors of the call for overlap. Returns γ.
    fn check_all(
        &self,
        batch: usize,
        gamma: Option<usize>,
        outputs: &[Option<&Tensor>],
        inputs: &[Option<&Tensor>],
    ) -> Result<usize> {
        // Numbered: packed, the call's other outputs, rows, its other inputs.
        let (count, first_rows) = (self.len(), self.len() + outputs.len());
        let total = 2 * count + outputs.len() + inputs.len();
        let (mut few, mut many);
        let ranges: &mut [Range] = if total <= FEW_RANGES {
            few = [Range::default(); FEW_RANGES];
            &mut few[..total]
        } else {
            many = [Range::default(); 2 * MOST_TENSORS + FEW_RANGES];
            &mut many[..total]
        };
        let mut gamma = gamma;
        for n in 0..count {
            let pair = self.check(n, batch, gamma)?;
            gamma = Some(pair.rows.dim(1));
            ranges[n] = Range::of(&pair.packed, n);
            ranges[first_rows + n] = Range::of(&pair.rows, first_rows + n);
        }
        for (at, other) in (count..).zip(outputs).chain((first_rows + count..).zip(inputs)) {
            ranges[at] = other.map_or(Range::default(), |t| Range::of(t, at));
        }
        overlap::reject_many(first_rows, ranges, |number| match number {
            n if n < count => self.get(n).packed,
            n if n < first_rows => *outputs[n - count].expect("absent tensors have no bytes"),
            n if n < first_rows + count => self.get(n - first_rows).rows,
            n => *inputs[n - first_rows - count].expect("absent tensors have no bytes"),
        })?;
        Ok(gamma.expect("there is at least one pair"))
    }
}

fn check_offsets(checks: &Checks, c: &vwd_tensor, batch: usize) -> Result<Tensor> {
    checks.required("offsets", c)?.of_any(DType::TOKENS)?.of_shape(&[("B+1", batch + 1)])?.writable()
}

impl<'a> Request<'a> {
    /// # Safety
    /// The arrays rows and packed hold tensor_count tensors.
    pub unsafe fn from_c(session: &Session, c: &'a vwd_pack_args) -> Result<Request<'a>> {
        let checks = session.checks();
        let accepted = checks.required("accepted", &c.accepted)?.of(DType::I32)?.of_rank(1)?;
        let offsets = check_offsets(&checks, &c.offsets, accepted.dim(0))?;
        // SAFETY: forwarded to the caller.
        let pairs = unsafe { Pairs::from_c(checks, c.tensor_count, c.rows, c.packed) }?;
        let gamma = pairs.check_all(accepted.dim(0), None, &[Some(&offsets)], &[Some(&accepted)])?;
        Ok(Request { pairs, accepted, offsets, gamma })
    }

    pub fn batch(&self) -> usize {
        self.accepted.dim(0)
    }
}

impl<'a> VerifiedRequest<'a> {
    /// # Safety
    /// The arrays rows and packed hold tensor_count tensors.
    pub unsafe fn from_c(session: &Session, c: &'a vwd_verify_pack_args) -> Result<VerifiedRequest<'a>> {
        let checks = session.checks();
        let verify_args = vwd_verify_args {
            struct_size: size_of::<vwd_verify_args>() as u32,
            flags: 0,
            draft: c.draft,
            target: c.target,
            draft_lens: c.draft_lens,
            accepted: c.accepted,
            next_token: c.next_token,
            mismatch: c.mismatch,
            committed: c.committed,
        };
        let verify = verify::Request::unchecked_overlap(&checks, &verify_args)?;
        let offsets = check_offsets(&checks, &c.offsets, verify.batch())?;
        let [accepted, next_token, mismatch, committed] = verify.outputs();
        let outputs = [accepted, next_token, mismatch, committed, Some(&offsets)];
        // SAFETY: forwarded to the caller.
        let pairs = unsafe { Pairs::from_c(checks, c.tensor_count, c.rows, c.packed) }?;
        let gamma = pairs.check_all(verify.batch(), Some(verify.gamma()), &outputs, &verify.inputs())?;
        let pack = Request { pairs, accepted: verify.accepted, offsets, gamma };
        Ok(VerifiedRequest { verify, pack })
    }
}

/// Bytes of one row's elements.
fn row_bytes(rows: &Tensor) -> usize {
    rows.shape()[2..].iter().product::<i64>() as usize * rows.dtype.bytes()
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => {
            cpu::run(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}

pub fn run_verified(session: &Session, request: &VerifiedRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => {
            verify::cpu::run(cpu, &request.verify);
            cpu::run(cpu, &request.pack);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::run_verified(&enqueue, request),
    }
}
