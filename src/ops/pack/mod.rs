//! Packing of the accepted rows of every sequence into one contiguous run.
//!
//! offsets[i] = Σ_{j<i} accepted[j]; row t < accepted[i] of sequence i becomes row offsets[i] + t of packed.

mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents::{self, Rule};
use super::verify;
use crate::abi::{vwd_pack_args, vwd_stream, vwd_tensor, vwd_verify_pack_args};
use crate::core::array::array;
use crate::core::dtype::DType;
use crate::core::overlap::{self, Hull};
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Name, Template, Tensor};
use crate::runtime::{On, Session, require_no_flags};
use std::mem::MaybeUninit;

/// The tensors to pack, each with its target. They are checked once and read from the caller's arrays when they are needed,
/// so that a call with any number of tensors allocates nothing.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    rows: &'a [vwd_tensor],
    packed: &'a [vwd_tensor],
    /// A bit for each pair that differs from the pair before it in more than addresses.
    fresh: [u64; MOST_TENSORS / 64],
    /// The sum over the tensors of the bytes of a row.
    pub row_bytes: usize,
}

#[derive(Clone, Copy)]
pub struct Pair<'a> {
    /// [B, γ, …]
    pub rows: Tensor<'a>,
    /// [cap, …]
    pub packed: Tensor<'a>,
}

/// The largest number of tensors of one call: K and V of 128 layers.
pub const MOST_TENSORS: usize = 256;

/// Checked arguments; shapes as in `vwd_pack`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub pairs: Pairs<'a>,
    /// [B]
    pub accepted: Tensor<'a>,
    /// [B+1]
    pub offsets: Tensor<'a>,
    pub gamma: usize,
}

/// Checked arguments of `vwd_verify_pack`.
pub struct VerifiedRequest<'a> {
    pub verify: verify::Request<'a>,
    pub pack: Request<'a>,
}

impl<'a> Pairs<'a> {
    /// The pairs before [`Pairs::check_all`] has checked them.
    ///
    /// # Safety
    /// `rows` and `packed` are NULL or hold `count` tensors that live as long as the result.
    #[inline(always)]
    unsafe fn unchecked(count: u32, rows: *const vwd_tensor, packed: *const vwd_tensor) -> Result<Pairs<'a>> {
        if count == 0 || count as usize > MOST_TENSORS {
            return Err(Error::argument("tensor_count", count, format!("1 to {MOST_TENSORS}")));
        }
        // SAFETY: the caller states their length.
        let (rows, packed) = unsafe {
            let count = count as usize;
            (array("rows", rows, count, "tensors")?, array("packed", packed, count, "tensors")?)
        };
        Ok(Pairs { rows, packed, fresh: [0; MOST_TENSORS / 64], row_bytes: 0 })
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    #[inline(always)]
    pub fn get(&self, n: usize) -> Pair<'a> {
        // SAFETY: from_c has checked all of them.
        unsafe {
            Pair {
                rows: Tensor::unchecked(Name::member("rows", n), &self.rows[n]),
                packed: Tensor::unchecked(Name::member("packed", n), &self.packed[n]),
            }
        }
    }

    /// The first pair from `n` on that differs from the pair before it in more than addresses; the number of pairs if there is
    /// none.
    #[inline(always)]
    fn next_fresh(&self, n: usize) -> usize {
        let fresh_of = |word: usize| self.fresh[word] & if word == n / 64 { !0 << (n % 64) } else { !0 };
        let word = (n / 64..self.len().div_ceil(64)).find(|&word| fresh_of(word) != 0);
        word.map_or(self.len(), |word| word * 64 + fresh_of(word).trailing_zeros() as usize)
    }

    /// The addresses of rows and packed of the pairs from `n` on, up to the first pair that differs from the pair before it in
    /// more than addresses.
    #[inline(always)]
    pub fn repeats(&self, n: usize) -> impl Iterator<Item = (*const u8, *mut u8)> {
        let end = self.next_fresh(n);
        let pairs = self.rows[n..end].iter().zip(&self.packed[n..end]);
        pairs.map(|(rows, packed)| (rows.data.cast_const().cast(), packed.data.cast()))
    }

    fn check(&self, checks: &Checks, n: usize, batch: usize, gamma: Option<usize>) -> Result<Pair<'a>> {
        let rows = checks.required(Name::member("rows", n), &self.rows[n])?;
        let packed = checks.required(Name::member("packed", n), &self.packed[n])?;
        let gamma = gamma.unwrap_or(rows.dim(1));
        if rows.rank() < 2 || rows.dim(0) != batch || rows.dim(1) != gamma {
            let found = format!("shape {:?}", rows.shape());
            return Err(Error::argument(&rows.name().to_string(), found, format!("[B={batch}, γ={gamma}, …]")));
        }
        let packed = packed.of(rows.dtype)?.writable()?;
        if packed.rank() == 0 || packed.shape()[1..] != rows.shape()[2..] {
            let found = format!("shape {:?}", packed.shape());
            let expected = format!("[cap] and then {:?}, as in {}", &rows.shape()[2..], rows.name());
            return Err(Error::argument(&packed.name().to_string(), found, expected));
        }
        Ok(Pair { rows, packed })
    }

    /// Checks every pair, and all tensors of the call for overlap. Returns γ.
    fn check_all<const O: usize, const I: usize>(
        &mut self,
        checks: &Checks,
        batch: usize,
        gamma: Option<usize>,
        outputs: &[Option<&Tensor<'a>>; O],
        inputs: &[Option<&Tensor<'a>>; I],
    ) -> Result<usize> {
        let (mut written, mut read) = (Hull::NONE, Hull::NONE);
        let mut gamma = gamma;
        let mut first = 0;
        while first < self.len() {
            let pair = self.check(checks, first, batch, gamma)?;
            gamma = Some(pair.rows.dim(1));
            let rows = Template::new(&self.rows[first], &pair.rows);
            let packed = Template::new(&self.packed[first], &pair.packed);
            let alike = rows.count_alike(&self.rows[first + 1..]);
            let alike = packed.count_alike(&self.packed[first + 1..][..alike]);
            let end = first + 1 + alike;
            written.add_alike(&packed, &self.packed[first..end]);
            read.add_alike(&rows, &self.rows[first..end]);
            self.fresh[first / 64] |= 1 << (first % 64);
            self.row_bytes = self.row_bytes.saturating_add(row_bytes(&pair.rows).saturating_mul(1 + alike));
            first = end;
        }
        overlap::reject(outputs, inputs)?;
        if !overlap::are_apart(&written, &read, outputs, inputs) {
            self.reject_overlap(outputs, inputs)?;
        }
        Ok(gamma.expect("there is at least one pair"))
    }

    /// Compares all tensors of the call pair by pair. It takes some eight kilobytes of stack, and few calls need it.
    #[inline(never)]
    fn reject_overlap(&self, outputs: &[Option<&Tensor<'a>>], inputs: &[Option<&Tensor<'a>>]) -> Result<()> {
        let (mut packed, mut rows) = ([(0, 0); MOST_TENSORS], [(0, 0); MOST_TENSORS]);
        for n in 0..self.len() {
            let pair = self.get(n);
            (packed[n], rows[n]) = (pair.packed.bytes(), pair.rows.bytes());
        }
        let tensor = |is_output, n| if is_output { self.get(n).packed } else { self.get(n).rows };
        overlap::reject_arrays(&packed[..self.len()], &rows[..self.len()], outputs, inputs, tensor)
    }
}

#[inline(always)]
fn check_offsets<'a>(checks: &Checks, c: &'a vwd_tensor, batch: usize) -> Result<Tensor<'a>> {
    checks.output("offsets", c, DType::TOKENS, &[("B+1", batch + 1)])
}

impl<'a> Request<'a> {
    /// # Safety
    /// The arrays rows and packed hold tensor_count tensors.
    #[inline(always)]
    pub unsafe fn from_c(session: &Session, c: &'a vwd_pack_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let accepted = checks.input("accepted", &c.accepted, &[DType::I32], &[("B", ANY)])?;
        let batch = accepted.dim(0);
        let offsets = check_offsets(&checks, &c.offsets, batch)?;
        // SAFETY: the caller says the same of the arrays.
        let mut pairs = unsafe { Pairs::unchecked(c.tensor_count, c.rows, c.packed) }?;
        let gamma = pairs.check_all(&checks, batch, None, &[Some(&offsets)], &[Some(&accepted)])?;
        Ok(Request { pairs, accepted, offsets, gamma })
    }

    pub fn batch(&self) -> usize {
        self.accepted.dim(0)
    }
}

impl<'a> VerifiedRequest<'a> {
    /// Builds the request in `place`, where it stays: the checks take the addresses of its views.
    ///
    /// # Safety
    /// The arrays rows and packed hold tensor_count tensors.
    #[inline(always)]
    pub unsafe fn from_c<'p>(
        session: &Session,
        c: &'a vwd_verify_pack_args,
        place: &'p mut MaybeUninit<VerifiedRequest<'a>>,
    ) -> Result<&'p VerifiedRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let verify = verify::Request::unchecked_overlap(&checks, &verify::Given::from(c))?;
        let (batch, gamma, accepted) = (verify.batch(), verify.gamma(), verify.accepted);
        let offsets = check_offsets(&checks, &c.offsets, batch)?;
        // SAFETY: the caller says the same of the arrays.
        let pairs = unsafe { Pairs::unchecked(c.tensor_count, c.rows, c.packed) }?;
        let VerifiedRequest { verify, pack } =
            place.write(VerifiedRequest { verify, pack: Request { pairs, accepted, offsets, gamma } });
        let ([accepted, next_token, mismatch, committed], offsets) = (verify.outputs(), Some(&pack.offsets));
        let (inputs, gamma) = (verify.inputs(), Some(gamma));
        match &verify.end {
            None => {
                let outputs = [accepted, next_token, mismatch, committed, offsets];
                pack.pairs.check_all(&checks, batch, gamma, &outputs, &inputs)?
            }
            Some(end) => {
                let ([committed_len, finish], [draft, target, draft_lens]) = (end.outputs(), inputs);
                let [stop, ignore_stop, remaining, min_remaining] = end.inputs();
                let outputs = [accepted, next_token, mismatch, committed, offsets, committed_len, finish];
                let inputs = [draft, target, draft_lens, stop, ignore_stop, remaining, min_remaining];
                pack.pairs.check_all(&checks, batch, gamma, &outputs, &inputs)?
            }
        };
        // SAFETY: written above.
        Ok(unsafe { place.assume_init_ref() })
    }
}

/// The bytes of one row's elements.
fn row_bytes(rows: &Tensor) -> usize {
    rows.shape()[2..].iter().fold(rows.dtype.bytes(), |bytes, &n| bytes.saturating_mul(n as usize))
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || vec![Rule::up_to(request.accepted, request.gamma)])?;
    match on {
        On::Cpu(cpu) => {
            cpu::run(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}

pub fn run_verified(session: &Session, request: &VerifiedRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.verify.contents())?;
    match on {
        On::Cpu(cpu) => {
            verify::on_cpu(cpu, &request.verify);
            cpu::run(cpu, &request.pack);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::run_verified(&enqueue, request),
    }
}
