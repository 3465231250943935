//! Compaction: the rows of accepted tree nodes move to where a sequence's tokens follow each other.
//!
//! row(bases[i] + path[i, j]) → row(bases[i] + j) for j = 0, 1, …, as long as 0 ≤ path[i, 0] < path[i, 1] < …
//!
//! path[j] ≥ j, so that every row is read before it is written where j ascends. It also may be written as soon as the rows before it, and
//! some after it, are read.

mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents::{self, Rule};
use crate::abi::{vwd_compact_args, vwd_compactor_options, vwd_stream, vwd_tensor};
use crate::core::allocate::collected;
use crate::core::array::array;
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, ByteRange, Name, Tensor};
use crate::runtime::{On, Session, require_no_flags};
use std::sync::Arc;

/// The most caches of a compactor: four tensors of each of a thousand layers.
const MOST_CACHES: usize = 4096;

/// The caches, checked once.
pub struct Compactor {
    session: Arc<Session>,
    caches: Vec<vwd_tensor>,
    /// The addresses of each cache.
    bytes: Vec<ByteRange>,
    pages: usize,
    /// P, the rows of a page.
    rows: usize,
    plan: Option<cuda::Plan>,
}

/// Checked arguments; shapes as in `vwd_compact`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// [B, max_pages]
    pub page_table: Option<Tensor<'a>>,
    /// [B]
    pub bases: Tensor<'a>,
    /// [B, M]
    pub path: Tensor<'a>,
    /// [B]
    pub accepted: Option<Tensor<'a>>,
}

fn name(n: usize) -> Name {
    Name::member("options.caches", n)
}

impl Compactor {
    /// # Safety
    /// The array of caches is NULL, or has as many tensors as the options say.
    pub unsafe fn create(session: &Arc<Session>, c: &vwd_compactor_options) -> Result<Compactor> {
        require_no_flags("options.flags", c.flags)?;
        let count = c.cache_count as usize;
        if !(1..=MOST_CACHES).contains(&count) {
            return Err(Error::argument("options.cache_count", count, format!("1 to {MOST_CACHES}")));
        }
        // SAFETY: the caller states the length.
        let given = unsafe { array("options.caches", c.caches, count, "tensors")? };
        let caches = collected(given.iter().copied(), "the descriptions of caches")?;
        let (checks, mut bytes, mut first) = (session.checks(), Vec::new(), None);
        for (n, cache) in caches.iter().enumerate() {
            let cache = checks.required(name(n), cache)?.writable()?;
            let found = || format!("shape {:?}", cache.shape());
            if cache.rank() < 2 {
                return Err(Error::argument(&cache.name().to_string(), found(), "[pages, P, …]"));
            }
            let [pages, rows] = *first.get_or_insert([cache.dim(0), cache.dim(1)]);
            if [cache.dim(0), cache.dim(1)] != [pages, rows] {
                let expected = format!("[pages={pages}, P={rows}, …], as options.caches[0] has");
                return Err(Error::argument(&cache.name().to_string(), found(), expected));
            }
            bytes.push(cache.bytes());
        }
        let [pages, rows] = first.expect("one cache at least");
        // SAFETY: checked above.
        let view = |n: usize| unsafe { Tensor::unchecked(name(n), &caches[n]) };
        overlap::reject_arrays(&bytes, &[], &[], &[], |_, n| view(n))?;
        let views = (0..count).map(view);
        let plan = if session.has_device_memory() { Some(cuda::Plan::new(session, views)?) } else { None };
        Ok(Compactor { session: session.clone(), caches, bytes, pages, rows, plan })
    }

    fn count(&self) -> usize {
        self.caches.len()
    }

    fn cache(&self, n: usize) -> Tensor<'_> {
        // SAFETY: create has checked it.
        unsafe { Tensor::unchecked(name(n), &self.caches[n]) }
    }

    /// Fails when one of these tensors shares bytes with a cache.
    fn reject_overlap(&self, inputs: &[Option<&Tensor>; 4]) -> Result<()> {
        for (n, &(start, end)) in self.bytes.iter().enumerate() {
            let meets = |t: &Tensor| t.bytes().0 < end && start < t.bytes().1;
            for t in inputs.iter().flatten().filter(|t| meets(t)) {
                let cache = self.cache(n);
                if overlap::reject(&[Some(&cache)], &[Some(t)]).is_err() {
                    let found = format!("overlaps {}", cache.name());
                    return Err(Error::argument(&t.name().to_string(), found, "memory of its own"));
                }
            }
        }
        Ok(())
    }

    pub fn run(&self, request: &Request, stream: vwd_stream) -> Result<()> {
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || request.contents())?;
        match on {
            On::Cpu(cpu) => {
                cpu::run(cpu, self, request);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::run(&enqueue, self, request),
        }
    }
}

impl<'a> Request<'a> {
    pub fn from_c(compactor: &Compactor, c: &'a vwd_compact_args) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let (checks, number) = (compactor.session.checks(), &[DType::I32]);
        let path = checks.input("path", &c.path, number, &[("B", ANY), ("M", ANY)])?;
        let batch = ("B", path.dim(0));
        let bases = checks.input("bases", &c.bases, DType::TOKENS, &[batch])?;
        let accepted = checks.optional_input("accepted", &c.accepted, number, &[batch])?;
        let page_table = checks.optional_input("page_table", &c.page_table, number, &[batch, ("max_pages", ANY)])?;
        if page_table.is_none() && compactor.pages < path.dim(0) {
            let found = format!("absent for {} sequences and {} pages", path.dim(0), compactor.pages);
            return Err(Error::argument("page_table", found, "a table, or one page a sequence"));
        }
        compactor.reject_overlap(&[Some(&path), Some(&bases), accepted.as_ref(), page_table.as_ref()])?;
        Ok(Request { page_table, bases, path, accepted })
    }

    pub fn batch(&self) -> usize {
        self.path.dim(0)
    }

    /// What a session that checks contents reads. Which pages are read depends on path, and they have no rule.
    fn contents(&self) -> Vec<Rule<'a>> {
        self.accepted.map(|t| Rule::up_to(t, self.path.dim(1).saturating_sub(1))).into_iter().collect()
    }
}
