//! Attention of one query position per sequence over blocks, tokens or everything, and joining of attention states.
//!
//! out_h = Σ_t softmax_t(scale·q_h·k_t) v_t over the listed tokens t below the sequence's length. A state (acc, m, l) is
//! that sum unfinished; states over disjoint tokens join to the state over all of them.

pub mod cpu;
mod partial;

use super::views::{BlockList, Heads, Lists, PagedKv, State, scale_or_default};
use crate::abi::{
    vwd_attention_args, vwd_attention_partials, vwd_attention_state, vwd_merge_states_args, vwd_paged_kv, vwd_stream,
    vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Name, Tensor};
use crate::runtime::{On, Session, require_no_flags};

/// Tokens that are attended together where the contract leaves it open: without a list, and for lists of single tokens.
const TOKENS: usize = 64;
/// Most states that one call joins.
const MOST_INPUTS: usize = 16;

/// What attention and repair are asked about.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    /// [B, Hq, D]
    pub q: Tensor<'a>,
    pub kv: PagedKv<'a>,
    pub heads: Heads,
    pub scale: f32,
    /// Tokens of a block.
    pub block_size: usize,
}

impl<'a> Problem<'a> {
    /// `block_size` is checked by the caller.
    pub fn from_c(
        checks: &Checks,
        q: &'a vwd_tensor,
        kv: &'a vwd_paged_kv,
        scale: f32,
        block_size: u32,
    ) -> Result<Problem<'a>> {
        let q = checks.required("q", q)?.of_any(DType::FLOATS)?.of_rank(3)?;
        let kv = PagedKv::from_c(checks, kv, false)?;
        let heads = Heads::new(&q, kv.k.dim(2))?;
        let k = &kv.k;
        k.of_shape(&[("pages", k.dim(0)), ("P", k.dim(1)), ("Hk", heads.kv), ("D", heads.dim)])?;
        kv.pages.seq_lens.of_shape(&[("B", q.dim(0))])?;
        Ok(Problem { q, kv, heads, scale: scale_or_default(scale, heads.dim)?, block_size: block_size as usize })
    }

    pub fn batch(&self) -> usize {
        self.q.dim(0)
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 5] {
        let pages = &self.kv.pages;
        [Some(&self.q), Some(&self.kv.k), Some(&self.kv.v), Some(&pages.seq_lens), pages.table.as_ref()]
    }

    /// Block `j` of a list, or `None` where the entry lies past the sequence or repeats the one before it.
    ///
    /// # Safety
    /// The op's caller keeps the tensors valid, the session computes on the CPU, and `j` is below the list's capacity.
    pub unsafe fn block(&self, list: &BlockList, i: usize, g: usize, j: usize) -> Option<usize> {
        // SAFETY: forwarded to the caller.
        unsafe {
            let id = list.id([i, 0, g], j);
            let inside = id >= 0 && id as usize * self.block_size < self.kv.pages.len(i);
            (inside && (j == 0 || list.id([i, 0, g], j - 1) != id)).then_some(id as usize)
        }
    }
}

/// Where results go.
#[derive(Clone, Copy)]
pub struct Outputs<'a> {
    /// [B, Hq, D]
    pub out: Option<Tensor<'a>>,
    /// [B, Hq]
    pub lse: Option<Tensor<'a>>,
    pub state: Option<State<'a>>,
}

impl<'a> Outputs<'a> {
    pub fn from_c(
        checks: &Checks,
        [out, lse]: [&'a vwd_tensor; 2],
        state: &'a vwd_attention_state,
        dtypes: &[DType],
        batch: usize,
        heads: &Heads,
    ) -> Result<Outputs<'a>> {
        let (b, h) = (("B", batch), ("Hq", heads.q));
        let out = match checks.optional("out", out)? {
            Some(out) => Some(out.of_any(dtypes)?.of_shape(&[b, h, ("D", heads.dim)])?.writable()?),
            None => None,
        };
        let lse = match checks.optional("lse", lse)? {
            Some(lse) => Some(lse.of(DType::F32)?.of_shape(&[b, h])?.writable()?),
            None => None,
        };
        let (c, names) = ([&state.acc, &state.m, &state.l], ["state.acc", "state.m", "state.l"]);
        let state = State::optional_from_c(checks, c, names, &[b, h], heads.dim)?;
        let state = state.map(State::writable).transpose()?;
        Ok(Outputs { out, lse, state })
    }

    /// For the calls whose out is not optional.
    pub fn with_out(self, checks: &Checks, out: &'a vwd_tensor) -> Result<Outputs<'a>> {
        checks.required("out", out).map(|_| self)
    }

    pub fn tensors(&self) -> [Option<&Tensor<'a>>; 5] {
        let [acc, m, l] = tensors(&self.state);
        [self.out.as_ref(), self.lse.as_ref(), acc, m, l]
    }
}

/// Those of a state that may be absent.
pub fn tensors<'s, 'a>(state: &'s Option<State<'a>>) -> [Option<&'s Tensor<'a>>; 3] {
    match state {
        Some(state) => state.tensors().map(Some),
        None => [None; 3],
    }
}

/// One state per group of list entries; absent when no tensor is given. `names` are those of acc, m and l.
pub fn partials_from_c<'a>(
    checks: &Checks,
    c: &'a vwd_attention_partials,
    names: [&'static str; 3],
    batch: usize,
    heads: &Heads,
    groups: usize,
) -> Result<Option<State<'a>>> {
    let lead = [("B", batch), ("Hq", heads.q), ("⌈cap/partial_blocks⌉", groups)];
    State::optional_from_c(checks, [&c.acc, &c.m, &c.l], names, &lead, heads.dim)
}

/// Entries of a list that are attended as one: those that share a partial, or as many single tokens as are worth it.
pub fn group(block_size: usize, partial_blocks: u32, partials_kept: bool) -> usize {
    let asked = (partial_blocks as usize).max(1);
    if partials_kept || asked > 1 || block_size >= 8 { asked } else { TOKENS / block_size }
}

/// Checked arguments of `vwd_attention`.
pub struct Request<'a> {
    pub problem: Problem<'a>,
    pub list: Option<BlockList<'a>>,
    /// Entries that share a partial state.
    pub group: usize,
    pub outputs: Outputs<'a>,
    pub partials: Option<State<'a>>,
}

impl<'a> Request<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_attention_args, kv: &'a vwd_paged_kv) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = &session.checks();
        let mut problem = Problem::from_c(checks, &c.q, kv, c.scale, c.block_size)?;
        let (batch, heads) = (problem.batch(), problem.heads);
        let lists = Lists { batch, positions: None, kv_heads: heads.kv };
        let list = BlockList::optional_from_c(checks, &c.list, ["list.ids", "list.counts", "list.slots"], lists)?;
        match list {
            Some(_) => problem.kv.pages.check_block_size("block_size", problem.block_size)?,
            None if c.block_size != 0 => return Err(Error::argument("block_size", c.block_size, "0 without a list")),
            None => problem.block_size = TOKENS,
        }
        let dtypes = [problem.q.dtype, DType::F32];
        let outputs = Outputs::from_c(checks, [&c.out, &c.lse], &c.state, &dtypes, batch, &heads)?;
        let outputs = outputs.with_out(checks, &c.out)?;
        let groups = list.map_or(0, |list| list.cap().div_ceil((c.partial_blocks as usize).max(1)));
        let names = ["partials.acc", "partials.m", "partials.l"];
        let partials = partials_from_c(checks, &c.partials, names, batch, &heads, groups)?;
        let partials = partials.map(State::writable).transpose()?;
        if partials.is_some() && list.is_none() {
            return Err(Error::argument("partials.acc", "given without a list", "a list, or no partials"));
        }
        let [out, lse, acc, m, l] = outputs.tensors();
        let [part_acc, part_m, part_l] = tensors(&partials);
        let [q, k, v, lens, table] = problem.inputs();
        let (ids, counts) = (list.as_ref().map(|list| &list.ids), list.as_ref().map(|list| &list.counts));
        overlap::reject(&[out, lse, acc, m, l, part_acc, part_m, part_l], &[q, k, v, lens, table, ids, counts])?;
        let group = group(problem.block_size, c.partial_blocks, partials.is_some());
        Ok(Request { problem, list, group, outputs, partials })
    }
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(_) => Err(Error::unsupported("vwd_attention has no CUDA kernel in this build")),
    }
}

/// Checked arguments of `vwd_merge_states`.
pub struct MergeRequest<'a> {
    inputs: [Option<State<'a>>; MOST_INPUTS],
    pub batch: usize,
    pub heads: Heads,
    pub outputs: Outputs<'a>,
}

impl<'a> MergeRequest<'a> {
    /// # Safety
    /// `inputs` is NULL or holds `input_count` states.
    pub unsafe fn from_c(session: &Session, c: &'a vwd_merge_states_args) -> Result<MergeRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = &session.checks();
        let count = c.input_count as usize;
        if !(1..=MOST_INPUTS).contains(&count) {
            return Err(Error::argument("input_count", count, format!("1 to {MOST_INPUTS}")));
        }
        if c.inputs.is_null() || !c.inputs.is_aligned() {
            return Err(Error::argument("inputs", format!("{:p}", c.inputs), format!("an array of {count} states")));
        }
        // SAFETY: not NULL; the caller states its length.
        let given = unsafe { std::slice::from_raw_parts(c.inputs, count) };
        let first = checks.required(Name::member("inputs.acc", 0), &given[0].acc)?.of_rank(3)?;
        // Every query head stands for itself here.
        let (batch, heads) = (first.dim(0), Heads::new(&first, 1)?);
        let outputs = Outputs::from_c(checks, [&c.out, &c.lse], &c.state, DType::FLOATS, batch, &heads)?;
        if outputs.tensors().iter().all(Option::is_none) {
            return Err(Error::argument("out", "no output is given", "out, lse or state"));
        }
        overlap::reject(&outputs.tensors(), &[])?;
        let mut inputs = [None; MOST_INPUTS];
        for (n, (input, given)) in inputs.iter_mut().zip(given).enumerate() {
            let names = ["inputs.acc", "inputs.m", "inputs.l"].map(|text| Name::member(text, n));
            let lead = [("B", batch), ("Hq", heads.q)];
            let state = State::from_c(checks, [&given.acc, &given.m, &given.l], names, &lead, heads.dim)?;
            overlap::reject(&outputs.tensors(), &state.tensors().map(Some))?;
            *input = Some(state);
        }
        Ok(MergeRequest { inputs, batch, heads, outputs })
    }

    pub fn inputs(&self) -> impl Iterator<Item = &State<'a>> {
        self.inputs.iter().flatten()
    }
}

pub fn merge(session: &Session, request: &MergeRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => {
            cpu::merge(cpu, request);
            Ok(())
        }
        On::Cuda(_) => Err(Error::unsupported("vwd_merge_states has no CUDA kernel in this build")),
    }
}
