//! Gather of listed blocks: target[target_ids[j]] = source[source_ids[j]]; with a list for each sequence i and KV head g:
//! target[target_ids[i, g, j]] = source[source_ids[i, g, j], g].

mod cpu;
mod cuda;

pub use cuda::Kernels;

use super::contents::{self, Number, Rule};
use crate::abi::{
    VWD_GATHER_AUTO, VWD_GATHER_COPY_ENGINE, VWD_GATHER_KERNEL, vwd_gather_blocks_args, vwd_stream, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Device, Tensor, device_type};
use crate::runtime::{On, Session, require_no_flags};

#[derive(Clone, Copy, PartialEq)]
pub enum Engine {
    Auto,
    Kernel,
    Copy,
}

impl Engine {
    fn from_c(engine: u32) -> Result<Engine> {
        match engine {
            VWD_GATHER_AUTO => Ok(Engine::Auto),
            VWD_GATHER_KERNEL => Ok(Engine::Kernel),
            VWD_GATHER_COPY_ENGINE => Ok(Engine::Copy),
            other => Err(Error::argument("engine", other, "a VWD_GATHER_* value (0 to 2)")),
        }
    }
}

/// Checked arguments of `vwd_gather_blocks`.
pub struct GatherRequest<'a> {
    pub engine: Engine,
    /// [N, …], or [N, Hk, …] if each KV head has its lists.
    pub source: Tensor<'a>,
    /// [M, …]
    pub target: Tensor<'a>,
    pub pairs: Pairs<'a>,
    /// Whether the source lies in pinned host memory, not on the session's device.
    pub from_host: bool,
    /// Whether the lists are in host memory and so are read during the call.
    pub lists_on_host: bool,
}

/// The lists of source and target blocks: one list, or one for each sequence and KV head.
pub struct Pairs<'a> {
    /// [n], or [B, Hk, cap].
    pub source_ids: Tensor<'a>,
    /// The shape of source_ids.
    pub target_ids: Option<Tensor<'a>>,
    /// [1], or [B, Hk].
    pub counts: Option<Tensor<'a>>,
}

impl<'a> GatherRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_gather_blocks_args) -> Result<GatherRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let engine = Engine::from_c(c.engine)?;
        let source = or_in(PINNED, &checks, &c.source).required("source", &c.source)?;
        let per_head = match or_in(HOST, &checks, &c.source_ids).required("source_ids", &c.source_ids)?.rank() {
            1 => false,
            3 => true,
            rank => return Err(Error::argument("source_ids", format!("rank {rank}"), "[n] or [B, Hk, cap]")),
        };
        let lead = if per_head { 2 } else { 1 };
        if source.rank() < lead {
            let expected = if per_head { "[N, Hk, …]" } else { "[N, …]" };
            return Err(Error::argument("source", format!("rank {}", source.rank()), expected));
        }
        let target = checks.required("target", &c.target)?.of(source.dtype)?.writable()?;
        let inner = &source.shape()[lead..];
        if target.rank() == 0 || &target.shape()[1..] != inner {
            let found = format!("shape {:?}", target.shape());
            return Err(Error::argument("target", found, format!("[M] and then {inner:?}, as in source")));
        }
        let pairs = Pairs::from_c(&checks, c, per_head.then(|| source.dim(1)))?;
        if checks.device != Device::Cpu {
            pairs.check_places(c, engine)?;
        }
        let Pairs { source_ids, target_ids, counts } = &pairs;
        overlap::reject(&[Some(&target)], &[Some(&source), Some(source_ids), target_ids.as_ref(), counts.as_ref()])?;
        let from_host = HOST.contains(&c.source.device_type);
        let lists_on_host = HOST.contains(&c.source_ids.device_type);
        Ok(GatherRequest { engine, source, target, pairs, from_host, lists_on_host })
    }

    /// What a session that checks contents reads: ids inside their tensors or −1, and distinct targets of the entries that copy.
    fn contents(&self) -> Vec<Rule<'a>> {
        if self.is_empty() {
            return vec![];
        }
        let Pairs { source_ids, target_ids, counts } = &self.pairs;
        let count = counts.map_or(Number::constant(self.pairs.cap()), Number::of);
        let entries = |rule: Rule<'a>| rule.between(source_ids.rank() - 1, Number::constant(0), count);
        let copied = |rule: Rule<'a>| entries(rule).where_positive(Number::of(*source_ids).plus(1));
        let rules = [
            counts.map(|counts| Rule::up_to(counts, self.pairs.cap())),
            Some(entries(Rule::within(*source_ids, -1, Number::constant(self.source.dim(0))))),
            target_ids.map(|ids| entries(Rule::within(ids, -1, Number::constant(self.target.dim(0))))),
            target_ids.map(|ids| copied(Rule::distinct(ids))),
        ];
        rules.into_iter().flatten().map(|rule| rule.on_host(self.lists_on_host)).collect()
    }

    fn per_head(&self) -> bool {
        self.pairs.per_head()
    }

    /// Whether there is nothing to copy, however long the lists are. The offsets of empty tensors may overflow.
    fn is_empty(&self) -> bool {
        self.source.is_empty() || self.target.is_empty() || self.pairs.source_ids.is_empty()
    }

    /// The dimensions of a block: those of the target after the first.
    fn block_dims(&self) -> usize {
        self.target.rank() - 1
    }

    /// The strides in bytes of dimension `d` of a block, in source and target.
    fn block_strides(&self, d: usize) -> [i64; 2] {
        [self.source.byte_stride(d + if self.per_head() { 2 } else { 1 }), self.target.byte_stride(d + 1)]
    }

    /// The offsets in bytes of an entry's blocks in source and target; `None` if the entry copies nothing.
    ///
    /// # Safety
    /// The op's caller keeps the lists valid, they lie in host memory, and the entry is inside them.
    unsafe fn offsets(&self, [i, g, j]: [usize; 3]) -> Option<[i64; 2]> {
        let row = |id: i32, blocks: usize| usize::try_from(id).ok().filter(|&row| row < blocks);
        // SAFETY: the caller keeps the lists valid, in host memory, and the entry inside them.
        let from = row(unsafe { self.pairs.id(&self.pairs.source_ids, [i, g, j]) }, self.source.dim(0))?;
        let to = match &self.pairs.target_ids {
            // SAFETY: as above.
            Some(ids) => row(unsafe { self.pairs.id(ids, [i, g, j]) }, self.target.dim(0))?,
            None => Some((i * self.pairs.heads() + g) * self.pairs.cap() + j).filter(|&at| at < self.target.dim(0))?,
        };
        let head = if self.per_head() { g as i64 * self.source.byte_stride(1) } else { 0 };
        Some([from as i64 * self.source.byte_stride(0) + head, to as i64 * self.target.byte_stride(0)])
    }
}

impl<'a> Pairs<'a> {
    /// `heads` is the number of KV heads of the source if each KV head has its lists.
    fn from_c(checks: &Checks, c: &'a vwd_gather_blocks_args, heads: Option<usize>) -> Result<Pairs<'a>> {
        let i32 = &[DType::I32];
        let listed = |t| or_in(HOST, checks, t);
        let source_ids = &c.source_ids;
        let (source_ids, target_ids, counts) = match heads {
            None => {
                let source_ids = listed(source_ids).input("source_ids", source_ids, i32, &[("n", ANY)])?;
                let n = ("n", source_ids.dim(0));
                let target_ids = listed(&c.target_ids).optional_input("target_ids", &c.target_ids, i32, &[n])?;
                (source_ids, target_ids, listed(&c.count).optional_input("count", &c.count, i32, &[("1", 1)])?)
            }
            Some(heads) => {
                let shape = [("B", ANY), ("Hk", heads), ("cap", ANY)];
                let source_ids = listed(source_ids).input("source_ids", source_ids, i32, &shape)?;
                let (batch, heads, cap) = (("B", source_ids.dim(0)), ("Hk", heads), ("cap", source_ids.dim(2)));
                let shape = [batch, heads, cap];
                let target_ids = listed(&c.target_ids).optional_input("target_ids", &c.target_ids, i32, &shape)?;
                (source_ids, target_ids, listed(&c.count).optional_input("count", &c.count, i32, &[batch, heads])?)
            }
        };
        Ok(Pairs { source_ids, target_ids, counts })
    }

    /// On CUDA, all lists lie in host memory or all on the device, and the copy engine needs them in host memory.
    fn check_places(&self, c: &vwd_gather_blocks_args, engine: Engine) -> Result<()> {
        let is_on_host = |t: &vwd_tensor| HOST.contains(&t.device_type);
        let host = is_on_host(&c.source_ids);
        if engine == Engine::Copy && !host {
            let found = format!("device_type {}", c.source_ids.device_type);
            return Err(Error::argument("source_ids", found, "host memory (1 or 3) for VWD_GATHER_COPY_ENGINE"));
        }
        for (name, t, given) in [("target_ids", &c.target_ids, &self.target_ids), ("count", &c.count, &self.counts)] {
            if given.is_some() && is_on_host(t) != host {
                let expected = if host { "host memory, as source_ids" } else { "device memory, as source_ids" };
                return Err(Error::argument(name, format!("device_type {}", t.device_type), expected));
            }
        }
        Ok(())
    }

    fn per_head(&self) -> bool {
        self.source_ids.rank() == 3
    }

    /// B, or 1 for a single list.
    fn batch(&self) -> usize {
        if self.per_head() { self.source_ids.dim(0) } else { 1 }
    }

    /// Hk, or 1 for a single list.
    fn heads(&self) -> usize {
        if self.per_head() { self.source_ids.dim(1) } else { 1 }
    }

    /// The capacity of a list.
    fn cap(&self) -> usize {
        self.source_ids.dim(self.source_ids.rank() - 1)
    }

    fn entries(&self) -> usize {
        self.source_ids.count()
    }

    /// The number of a list's entries, at most its capacity.
    ///
    /// # Safety
    /// The op's caller keeps the lists valid, and they lie in host memory.
    unsafe fn count(&self, i: usize, g: usize) -> usize {
        let Some(counts) = &self.counts else { return self.cap() };
        let at = if self.per_head() { [i, g] } else { [0, 0] };
        // SAFETY: the caller keeps the counts valid, in host memory; past the rank a coordinate is 0.
        let count = unsafe { counts.at::<i32, 2>(at).read() };
        (count.max(0) as usize).min(self.cap())
    }

    /// # Safety
    /// The conditions of [`Pairs::count`] hold, and the entry is inside the lists.
    unsafe fn id(&self, ids: &Tensor, [i, g, j]: [usize; 3]) -> i32 {
        let at = if self.per_head() { [i, g, j] } else { [j, 0, 0] };
        // SAFETY: the caller keeps the ids valid, in host memory, and the entry inside; past the rank a coordinate is 0.
        unsafe { ids.at::<i32, 3>(at).read() }
    }
}

const PINNED: &[i32] = &[device_type::CUDA_HOST];
const HOST: &[i32] = &[device_type::CPU, device_type::CUDA_HOST];

/// Checks a tensor that may also lie in host memory of these kinds, whatever the session's device.
fn or_in(kinds: &[i32], checks: &Checks, t: &vwd_tensor) -> Checks {
    if kinds.contains(&t.device_type) { Checks { device: Device::Cpu } } else { *checks }
}

pub fn gather(session: &Session, request: &GatherRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => {
            cpu::gather(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::gather(&enqueue, request),
    }
}
