//! Selection of blocks by their summaries, and of tokens inside them by their labels.
//!
//! Everything that can be selected gets a score; the exact top k of the scores, and what is forced, come out ascending.
//! How many blocks a sequence has, and which of them are forced, follows from its length alone: what the index holds
//! changes nothing but scores.

mod choose;
mod cpu;
mod cuda;

pub(super) use cuda::Kernels;

use super::contents::{self, Rule, Tokens};
use super::index::{Index, Kind};
use super::topk::Budget;
use super::views::{BlockList, Heads, ListAt, Lists, Positions, check_head_dim, scale_or_default};
use crate::abi::*;
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::runtime::{On, Session, require_no_flags};
use std::ops::Range;

/// What both calls read of each sequence.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    pub positions: Positions<'a>,
    pub heads: Heads,
    /// The factor of q·k.
    pub scale: f32,
    pub index: Index<'a>,
    /// [B]
    pub seq_lens: Tensor<'a>,
    /// Tokens of a block.
    pub block_size: usize,
}

impl<'a> Queries<'a> {
    /// `c` are q, q_lens and seq_lens; `scale` is absent where the method has none.
    #[inline(always)]
    fn from_c(
        checks: &Checks,
        c: [&'a vwd_tensor; 3],
        index: &'a vwd_index,
        block_size: u32,
        scale: Option<f32>,
    ) -> Result<Queries<'a>> {
        if block_size == 0 {
            return Err(Error::argument("block_size", 0, "at least 1"));
        }
        let positions = Positions::from_c(checks, c[0], c[1])?;
        let q = &positions.q;
        let dim = q.dim(q.rank() - 1);
        check_head_dim(q, dim)?;
        let index = Index::from_c(checks, index, q.dim(0), ("D of q", dim))?;
        let heads = Heads::new(q, index.kv_heads())?;
        let seq_lens = checks.input("seq_lens", c[2], &[DType::I32], &[("B", q.dim(0))])?;
        let scale = match scale {
            Some(scale) => scale_or_default(scale, heads.dim)?,
            None => 1.0,
        };
        Ok(Queries { positions, heads, scale, index, seq_lens, block_size: block_size as usize })
    }

    pub fn batch(&self) -> usize {
        self.positions.batch()
    }

    fn lists(&self) -> Lists {
        Lists { batch: self.batch(), positions: self.positions.dimension(), kv_heads: self.heads.kv }
    }

    /// Tokens of sequence `i`.
    ///
    /// # Safety
    /// There is a sequence `i`, the op's caller keeps seq_lens valid, and the session computes on the CPU.
    pub unsafe fn len(&self, i: usize) -> usize {
        // SAFETY: seq_lens has an entry for each sequence, of which i is one.
        unsafe { self.seq_lens.get::<i32, 1>([i]).max(0) as usize }
    }

    /// The positions of sequence `i` that see its token `t`.
    ///
    /// # Safety
    /// As for [`Queries::len`], and q_lens is valid.
    pub unsafe fn seeing(&self, i: usize, t: usize) -> Range<usize> {
        // SAFETY: i is a sequence, of which seq_lens and q_lens have an entry each.
        let (len, positions) = unsafe { (self.len(i), self.positions.len(i)) };
        // Position r sees the tokens below len − positions + r + 1.
        (t + positions).saturating_sub(len).min(positions)..positions
    }
}

/// How many are selected of each sequence.
#[derive(Clone, Copy)]
pub struct Quota<'a> {
    budget: Budget,
    /// [B]
    budgets: Option<Tensor<'a>>,
    cap: usize,
}

impl<'a> Quota<'a> {
    /// `forced` are the arguments of the first and last ones that are always selected, with their names.
    #[inline(always)]
    fn from_c(
        checks: &Checks,
        k: u32,
        forced: [(&str, u32); 2],
        budgets: &'a vwd_tensor,
        selected: &BlockList,
    ) -> Result<Quota<'a>> {
        let cap = selected.cap();
        let [(init_name, init), (local_name, local)] = forced.map(|(name, n)| (name, n as usize));
        if k as usize > cap {
            return Err(Error::argument("k", k, format!("at most the {cap} places of selected.ids")));
        }
        if init + local > cap {
            let (name, found) = (format!("{init_name} + {local_name}"), init + local);
            return Err(Error::argument(&name, found, format!("at most the {cap} places of selected.ids")));
        }
        let budgets = checks.optional_input("budgets", budgets, &[DType::I32], &[("B", selected.ids.dim(0))])?;
        let budget = Budget { k: k as usize, init, local };
        budget.require_some(budgets.is_some(), cap, format_args!("no budgets, {init_name} or {local_name}"))?;
        Ok(Quota { budget, budgets, cap })
    }

    /// What sequence `i` may choose, and whether its budget had to be clamped for that.
    ///
    /// # Safety
    /// `i` is below the batch size; the op's caller keeps budgets valid, and the session computes on the CPU.
    pub unsafe fn of(&self, i: usize) -> (Budget, bool) {
        let Some(budgets) = &self.budgets else { return (self.budget, false) };
        // SAFETY: budgets has an entry for each sequence, of which i is one.
        let given = unsafe { budgets.get::<i32, 1>([i]) };
        let k = (given.max(0) as usize).min(self.cap);
        (Budget { k, ..self.budget }, k as i64 != given as i64)
    }
}

/// Checked arguments of either call; shapes as in `vwd_select_blocks` and `vwd_select_tokens`.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub queries: Queries<'a>,
    pub quota: Quota<'a>,
    /// An index of means is scored by MEAN_SOFTMAX, not by MEAN_DOT.
    pub softmax: bool,
    /// The blocks to weigh, where the index has labels.
    pub candidates: Option<BlockList<'a>>,
    pub selected: BlockList<'a>,
    /// As selected's ids, with a place for each block or each selected token.
    pub scores: Option<Tensor<'a>>,
    /// As selected's counts.
    pub status: Option<Tensor<'a>>,
    /// [B, (Q,) Hq]
    pub log_mass: Option<Tensor<'a>>,
}

/// One list to be made.
pub struct List {
    pub at: ListAt,
    /// The query positions that it is for.
    pub positions: Range<usize>,
    /// Tokens that the last of them sees.
    pub tokens: usize,
}

impl<'a> Request<'a> {
    #[inline(always)]
    pub fn of_blocks(session: &Session, c: &'a vwd_select_blocks_args, index: &'a vwd_index) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        match c.method {
            VWD_SELECT_MINMAX => require_kind(index, VWD_INDEX_MINMAX, "VWD_INDEX_MINMAX"),
            VWD_SELECT_MEAN_SOFTMAX | VWD_SELECT_MEAN_DOT => require_kind(index, VWD_INDEX_MEAN, "VWD_INDEX_MEAN"),
            VWD_SELECT_LABEL_MASS => require_kind(index, VWD_INDEX_LABEL, "VWD_INDEX_LABEL"),
            VWD_SELECT_AXIS => require_kind(index, VWD_INDEX_AXIS, "VWD_INDEX_AXIS"),
            other => Err(Error::argument("method", other, "a VWD_SELECT_* value (1 to 5)")),
        }?;
        let checks = session.checks();
        let softmax = c.method == VWD_SELECT_MEAN_SOFTMAX;
        let has_scale = softmax || matches!(c.method, VWD_SELECT_LABEL_MASS | VWD_SELECT_AXIS);
        let scale = has_scale.then_some(c.scale);
        let queries = Queries::from_c(&checks, [&c.q, &c.q_lens, &c.seq_lens], index, c.block_size, scale)?;
        let of_index = match &queries.index.kind {
            Kind::MinMax { block_size, .. } => *block_size,
            Kind::Axis(axes) => axes.block_size,
            _ => queries.block_size,
        };
        if of_index != queries.block_size {
            let expected = format!("index.block_size {}", index.block_size);
            return Err(Error::argument("block_size", c.block_size, expected));
        }
        if c.method == VWD_SELECT_MEAN_DOT && queries.heads.group() != 1 {
            let expected = format!("one Forecast vector for each of the {} KV heads", queries.heads.kv);
            return Err(Error::argument("q", format!("{} heads", queries.heads.q), expected));
        }
        let selected = selected(&checks, &c.selected, &queries)?;
        let candidates = match c.method {
            VWD_SELECT_LABEL_MASS => Some(candidates(&checks, &c.candidates, &queries, &selected)?),
            _ if BlockList::is_absent(&c.candidates) => None,
            _ => return Err(Error::argument("candidates", "given", "absent: only VWD_SELECT_LABEL_MASS reads them")),
        };
        let forced = [("init_blocks", c.init_blocks), ("local_blocks", c.local_blocks)];
        let quota = Quota::from_c(&checks, c.k, forced, &c.budgets, &selected)?;
        let [scores, status] = results(&checks, &selected, &c.scores, ("max_blocks", ANY), &c.status)?;
        let log_mass = match given(&c.log_mass) {
            Some(_) if c.method != VWD_SELECT_AXIS => {
                return Err(Error::argument("log_mass", "given", "absent: only VWD_SELECT_AXIS writes it"));
            }
            Some(t) => Some(log_mass(&checks, t, &queries)?),
            None => None,
        };
        let results = [scores.as_ref(), status.as_ref(), log_mass.as_ref()];
        reject_overlaps(&queries, &quota, candidates.as_ref(), &selected, results)?;
        Ok(Request { queries, quota, softmax, candidates, selected, scores, status, log_mass })
    }

    #[inline(always)]
    pub fn of_tokens(session: &Session, c: &'a vwd_select_tokens_args, index: &'a vwd_index) -> Result<Request<'a>> {
        require_no_flags("flags", c.flags)?;
        require_kind(index, VWD_INDEX_LABEL, "VWD_INDEX_LABEL")?;
        let checks = session.checks();
        let queries = Queries::from_c(&checks, [&c.q, &c.q_lens, &c.seq_lens], index, c.block_size, Some(c.scale))?;
        let selected = selected(&checks, &c.selected, &queries)?;
        let candidates = Some(candidates(&checks, &c.candidates, &queries, &selected)?);
        let forced = [("init_tokens", c.init_tokens), ("local_tokens", c.local_tokens)];
        let quota = Quota::from_c(&checks, c.k, forced, &c.budgets, &selected)?;
        let [scores, status] = results(&checks, &selected, &c.scores, ("cap", selected.cap()), &c.status)?;
        reject_overlaps(&queries, &quota, candidates.as_ref(), &selected, [scores.as_ref(), status.as_ref(), None])?;
        Ok(Request { queries, quota, softmax: false, candidates, selected, scores, status, log_mass: None })
    }

    /// What a session that checks contents reads.
    fn contents(&self) -> Vec<Rule<'a>> {
        let Queries { positions, heads, seq_lens, index, block_size, .. } = self.queries;
        let tokens = Tokens { seq_lens, positions: &positions, block_size };
        let mut rules: Vec<Rule> = contents::q_lens(&positions).into_iter().collect();
        rules.push(Rule::up_to(seq_lens, i32::MAX as usize));
        rules.extend(index.contents(seq_lens, None, heads.dim));
        let centre = self.log_mass.and(index.learned()[1]);
        rules.extend(centre.map(|centre| Rule::finite(*centre)));
        rules.extend(self.quota.budgets.map(|budgets| Rule::up_to(budgets, self.quota.cap)));
        // Candidates have no slots.
        rules.extend(self.candidates.iter().flat_map(|list| contents::list(list, &tokens, 0)));
        rules
    }

    /// How many lists are made.
    pub fn lists(&self) -> usize {
        self.queries.batch() * self.selected.per_head() * self.queries.heads.kv
    }

    /// The list of this number; they are numbered in the order of their counts.
    ///
    /// # Safety
    /// The number is below [`Request::lists`], the op's caller keeps the tensors valid, and the session computes on the
    /// CPU.
    pub unsafe fn list(&self, number: usize) -> List {
        let (kv, per_head) = (self.queries.heads.kv, self.selected.per_head());
        let (i, r, g) = (number / (kv * per_head), number / kv % per_head, number % kv);
        // SAFETY: a number below the count of lists gives i below the batch size.
        let (len, count) = unsafe { (self.queries.len(i), self.queries.positions.len(i)) };
        let positions = if self.selected.is_own() { r.min(count)..(r + 1).min(count) } else { 0..count };
        // The last of them sees all that the others see.
        let tokens = if positions.is_empty() { 0 } else { (len + positions.end).saturating_sub(count) };
        List { at: [i, r, g], positions, tokens }
    }

    /// The number of the list that position `r` of sequence `i` and KV head `g` reads.
    pub fn list_of(&self, i: usize, r: usize, g: usize) -> usize {
        let r = if self.selected.is_own() { r } else { 0 };
        (i * self.selected.per_head() + r) * self.queries.heads.kv + g
    }
}

/// Checks that the method and the kind of index fit. This comes before the checks of the index's tensors, since an index of another kind lacks some.
#[inline(always)]
fn require_kind(index: &vwd_index, wanted: u32, name: &str) -> Result<()> {
    if index.kind == wanted {
        Ok(())
    } else {
        let found = match index.kind {
            VWD_INDEX_MINMAX => "VWD_INDEX_MINMAX",
            VWD_INDEX_MEAN => "VWD_INDEX_MEAN",
            VWD_INDEX_LABEL => "VWD_INDEX_LABEL",
            VWD_INDEX_AXIS => "VWD_INDEX_AXIS",
            other => return Err(Error::argument("index.kind", other, format!("{name} ({wanted})"))),
        };
        Err(Error::argument(
            "index.kind",
            format!("{found} ({})", index.kind),
            format!("{name} ({wanted}) for this method"),
        ))
    }
}

#[inline(always)]
fn selected<'a>(checks: &Checks, c: &'a vwd_block_list, queries: &Queries) -> Result<BlockList<'a>> {
    let names = ["selected.ids", "selected.counts", "selected.slots"];
    let selected = BlockList::from_c(checks, c, names, queries.lists())?;
    selected.ids.writable()?;
    selected.counts.writable()?;
    Ok(selected)
}

/// The candidates that c names, of as many dimensions as `selected`.
fn candidates<'a>(
    checks: &Checks,
    c: &'a vwd_block_list,
    queries: &Queries,
    selected: &BlockList,
) -> Result<BlockList<'a>> {
    let names = ["candidates.ids", "candidates.counts", "candidates.slots"];
    let candidates = BlockList::from_c(checks, c, names, queries.lists())?;
    candidates.ids.of_rank(selected.ids.rank())?;
    Ok(candidates)
}

/// scores [B, Hk, last] and status [B, Hk]; with a dimension for positions where selected has one.
#[inline(always)]
fn results<'a>(
    checks: &Checks,
    selected: &BlockList,
    scores: &'a vwd_tensor,
    last: (&'static str, usize),
    status: &'a vwd_tensor,
) -> Result<[Option<Tensor<'a>>; 2]> {
    let counts = &selected.counts;
    let (batch, positions) = (("B", counts.dim(0)), ("Q", counts.dim(1)));
    let heads = ("Hk", counts.dim(counts.rank() - 1));
    let (score, bits) = (&[DType::F32], &[DType::U32]);
    Ok(if selected.is_own() {
        [
            checks.optional_output("scores", scores, score, &[batch, positions, heads, last])?,
            checks.optional_output("status", status, bits, &[batch, positions, heads])?,
        ]
    } else {
        [
            checks.optional_output("scores", scores, score, &[batch, heads, last])?,
            checks.optional_output("status", status, bits, &[batch, heads])?,
        ]
    })
}

/// A number for each query head.
fn log_mass<'a>(checks: &Checks, t: &'a vwd_tensor, queries: &Queries) -> Result<Tensor<'a>> {
    let (batch, heads, dtypes) = (("B", queries.batch()), ("Hq", queries.heads.q), &[DType::F32]);
    match queries.positions.dimension() {
        None => checks.output("log_mass", t, dtypes, &[batch, heads]),
        Some(q) => checks.output("log_mass", t, dtypes, &[batch, ("Q", q), heads]),
    }
}

/// `results` are scores, status and log_mass.
#[inline(always)]
fn reject_overlaps(
    queries: &Queries,
    quota: &Quota,
    candidates: Option<&BlockList>,
    selected: &BlockList,
    results: [Option<&Tensor>; 3],
) -> Result<()> {
    let Queries { positions, index, seq_lens, .. } = queries;
    let ([a, b, c], [weights, centre]) = (index.summaries(), index.learned());
    overlap::reject(
        &[Some(&selected.ids), Some(&selected.counts), results[0], results[1], results[2]],
        &[
            Some(&positions.q),
            positions.lens.as_ref(),
            Some(seq_lens),
            a,
            b,
            c,
            index.table.as_ref(),
            index.channels(),
            weights,
            centre,
            quota.budgets.as_ref(),
            candidates.map(|list| &list.ids),
            candidates.map(|list| &list.counts),
        ],
    )
}

pub fn blocks(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => cpu::blocks(cpu, request),
        On::Cuda(enqueue) => cuda::blocks(&enqueue, request),
    }
}

/// Bytes of scratch that `blocks` takes from its stream's arena.
pub fn blocks_scratch(session: &Session, request: &Request) -> Result<u64> {
    session.scratch_bytes(|cuda| cuda::blocks_scratch(cuda, request))
}

pub fn tokens(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => cpu::tokens(cpu, request),
        On::Cuda(enqueue) => cuda::tokens(&enqueue, request),
    }
}

/// Bytes of scratch that `tokens` takes from its stream's arena.
pub fn tokens_scratch(session: &Session, request: &Request) -> Result<u64> {
    session.scratch_bytes(|cuda| cuda::tokens_scratch(cuda, request))
}
