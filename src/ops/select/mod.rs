//! Selection of blocks by their summaries, and of tokens inside them by their labels.
//!
//! Everything that can be selected gets a score; the exact top k of the scores, and what is forced, come out ascending.

mod cpu;

use super::index::{Index, Kind, Labels, Windows};
use super::topk::Budget;
use super::views::{BlockList, Heads, Lists, check_head_dim, scale_or_default};
use crate::abi::*;
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, Tensor};
use crate::runtime::{On, Session, require_no_flags};

/// What both calls read of each sequence.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// [B, Hq, D]
    pub q: Tensor<'a>,
    pub heads: Heads,
    /// Of q·k.
    pub scale: f32,
    pub index: Index<'a>,
    /// [B]
    pub seq_lens: Tensor<'a>,
    /// Tokens of a block.
    pub block_size: usize,
}

impl<'a> Queries<'a> {
    fn from_c(checks: &Checks, q: &'a vwd_tensor, index: &'a vwd_index, lens: &'a vwd_tensor) -> Result<Queries<'a>> {
        let q = checks.required("q", q)?.of_any(DType::FLOATS)?.of_rank(3)?;
        check_head_dim(&q, q.dim(2))?;
        let index = Index::from_c(checks, index, q.dim(0), q.dim(2))?;
        let heads = Heads::new(&q, index.kv_heads())?;
        let seq_lens = checks.required("seq_lens", lens)?.of(DType::I32)?.of_shape(&[("B", q.dim(0))])?;
        Ok(Queries { q, heads, scale: 1.0, index, seq_lens, block_size: 1 })
    }

    pub fn batch(&self) -> usize {
        self.q.dim(0)
    }

    /// Tokens of sequence `i`, clamped to what the index holds.
    ///
    /// # Safety
    /// The op's caller keeps seq_lens valid, and the session computes on the CPU.
    pub unsafe fn len(&self, i: usize) -> usize {
        // SAFETY: forwarded to the caller.
        let len = unsafe { self.seq_lens.get::<i32, 1>([i]) };
        (len.max(0) as usize).min(self.index.token_capacity())
    }

    fn inputs(&self) -> [Option<&Tensor<'a>>; 7] {
        let [a, b, c] = self.index.summaries();
        [Some(&self.q), a, b, c, self.index.table.as_ref(), self.index.channels(), Some(&self.seq_lens)]
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
        let budgets = match checks.optional("budgets", budgets)? {
            Some(budgets) => Some(budgets.of(DType::I32)?.of_shape(&[("B", selected.ids.dim(0))])?),
            None => None,
        };
        Ok(Quota { budget: Budget { k: k as usize, init, local }, budgets, cap })
    }

    /// # Safety
    /// `i` is below the batch size; the op's caller keeps budgets valid, and the session computes on the CPU.
    pub unsafe fn of(&self, i: usize) -> Budget {
        // SAFETY: forwarded to the caller.
        let given = self.budgets.map(|budgets| unsafe { budgets.get::<i32, 1>([i]) });
        Budget { k: given.map_or(self.budget.k, |k| (k.max(0) as usize).min(self.cap)), ..self.budget }
    }
}

/// How blocks are scored, and what that reads.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant)] // lives on the stack of one call
pub enum Method<'a> {
    MinMax { max: Tensor<'a>, min: Tensor<'a> },
    Mean { windows: Windows, means: Tensor<'a>, softmax: bool },
    LabelMass { labels: Labels<'a>, candidates: BlockList<'a> },
}

/// Checked arguments; shapes as in `vwd_select_blocks`.
#[derive(Clone, Copy)]
pub struct BlocksRequest<'a> {
    pub queries: Queries<'a>,
    pub method: Method<'a>,
    pub quota: Quota<'a>,
    pub selected: BlockList<'a>,
    /// [B, Hk, max_blocks]
    pub scores: Option<Tensor<'a>>,
    /// usize::MAX without scores.
    max_blocks: usize,
}

impl<'a> BlocksRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_select_blocks_args, index: &'a vwd_index) -> Result<BlocksRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        match c.method {
            VWD_SELECT_MINMAX => check_kind(index, VWD_INDEX_MINMAX, "VWD_INDEX_MINMAX"),
            VWD_SELECT_MEAN_SOFTMAX | VWD_SELECT_MEAN_DOT => check_kind(index, VWD_INDEX_MEAN, "VWD_INDEX_MEAN"),
            VWD_SELECT_LABEL_MASS => check_kind(index, VWD_INDEX_LABEL, "VWD_INDEX_LABEL"),
            other => Err(Error::argument("method", other, "a VWD_SELECT_* value (1 to 4)")),
        }?;
        let checks = session.checks();
        let mut queries = Queries::from_c(&checks, &c.q, index, &c.seq_lens)?;
        queries.block_size = check_block_size(c.block_size)?;
        let (batch, heads) = (queries.batch(), queries.heads);
        let names = ["candidates.ids", "candidates.counts", "candidates.slots"];
        let lists = Lists { batch, positions: None, kv_heads: heads.kv };
        let candidates = BlockList::optional_from_c(&checks, &c.candidates, names, lists)?;
        let method = match (c.method, queries.index.kind) {
            (VWD_SELECT_MINMAX, Kind::MinMax { block_size, max, min }) => {
                if block_size != queries.block_size {
                    return Err(Error::argument("block_size", c.block_size, format!("index.block_size {block_size}")));
                }
                Method::MinMax { max, min }
            }
            (VWD_SELECT_MEAN_SOFTMAX, Kind::Mean { windows, means }) => Method::Mean { windows, means, softmax: true },
            (VWD_SELECT_MEAN_DOT, Kind::Mean { windows, means }) => {
                if heads.q != heads.kv {
                    let expected = format!("one Forecast vector for each of the {} KV heads", heads.kv);
                    return Err(Error::argument("q", format!("{} heads", heads.q), expected));
                }
                Method::Mean { windows, means, softmax: false }
            }
            (VWD_SELECT_LABEL_MASS, Kind::Label(labels)) => {
                // Not optional here: this says what is missing.
                let candidates = BlockList::from_c(&checks, &c.candidates, names, lists)?;
                Method::LabelMass { labels, candidates }
            }
            _ => unreachable!("the kind fits the method"),
        };
        if !matches!(method, Method::LabelMass { .. }) && candidates.is_some() {
            return Err(Error::argument("candidates", "given", "absent: only VWD_SELECT_LABEL_MASS reads them"));
        }
        if matches!(method, Method::Mean { softmax: true, .. } | Method::LabelMass { .. }) {
            queries.scale = scale_or_default(c.scale, heads.dim)?;
        }
        let selected = selected_from_c(&checks, &c.selected, &queries)?;
        let forced = [("init_blocks", c.init_blocks), ("local_blocks", c.local_blocks)];
        let quota = Quota::from_c(&checks, c.k, forced, &c.budgets, &selected)?;
        let scores = match checks.optional("scores", &c.scores)? {
            Some(t) => {
                let t = t.of(DType::F32)?.of_rank(3)?;
                Some(t.of_shape(&[("B", batch), ("Hk", heads.kv), ("max_blocks", t.dim(2))])?.writable()?)
            }
            None => None,
        };
        let max_blocks = scores.map_or(usize::MAX, |t| t.dim(2));
        let request = BlocksRequest { queries, method, quota, selected, scores, max_blocks };
        reject_overlaps(&queries, &quota, candidates.as_ref(), &selected, scores.as_ref())?;
        Ok(request)
    }

    /// Blocks of sequence `i`.
    ///
    /// # Safety
    /// As for [`Queries::len`].
    pub unsafe fn blocks(&self, i: usize) -> usize {
        // SAFETY: forwarded to the caller.
        let n = unsafe { self.queries.len(i) }.div_ceil(self.queries.block_size);
        n.min(self.max_blocks)
    }
}

/// Checked arguments; shapes as in `vwd_select_tokens`.
#[derive(Clone, Copy)]
pub struct TokensRequest<'a> {
    pub queries: Queries<'a>,
    pub labels: Labels<'a>,
    pub quota: Quota<'a>,
    pub candidates: BlockList<'a>,
    pub selected: BlockList<'a>,
    /// [B, Hk, cap]
    pub scores: Option<Tensor<'a>>,
}

impl<'a> TokensRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_select_tokens_args, index: &'a vwd_index) -> Result<TokensRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        check_kind(index, VWD_INDEX_LABEL, "VWD_INDEX_LABEL")?;
        let checks = session.checks();
        let mut queries = Queries::from_c(&checks, &c.q, index, &c.seq_lens)?;
        queries.block_size = check_block_size(c.block_size)?;
        queries.scale = scale_or_default(c.scale, queries.heads.dim)?;
        let (batch, kv) = (queries.batch(), queries.heads.kv);
        let Kind::Label(labels) = queries.index.kind else { unreachable!("the kind was checked") };
        let names = ["candidates.ids", "candidates.counts", "candidates.slots"];
        let lists = Lists { batch, positions: None, kv_heads: kv };
        let candidates = BlockList::from_c(&checks, &c.candidates, names, lists)?;
        let selected = selected_from_c(&checks, &c.selected, &queries)?;
        let forced = [("init_tokens", c.init_tokens), ("local_tokens", c.local_tokens)];
        let quota = Quota::from_c(&checks, c.k, forced, &c.budgets, &selected)?;
        let scores = match checks.optional("scores", &c.scores)? {
            Some(t) => {
                let shape = [("B", batch), ("Hk", kv), ("cap", selected.cap())];
                Some(t.of(DType::F32)?.of_shape(&shape)?.writable()?)
            }
            None => None,
        };
        reject_overlaps(&queries, &quota, Some(&candidates), &selected, scores.as_ref())?;
        Ok(TokensRequest { queries, labels, quota, candidates, selected, scores })
    }
}

/// Before the index's tensors, of which those of another kind are missing.
fn check_kind(index: &vwd_index, wanted: u32, name: &str) -> Result<()> {
    if index.kind == wanted {
        Ok(())
    } else {
        Err(Error::argument("index.kind", index.kind, format!("{name} ({wanted})")))
    }
}

fn check_block_size(block_size: u32) -> Result<usize> {
    if block_size == 0 {
        return Err(Error::argument("block_size", 0, "at least 1"));
    }
    Ok(block_size as usize)
}

fn selected_from_c<'a>(checks: &Checks, c: &'a vwd_block_list, queries: &Queries) -> Result<BlockList<'a>> {
    let names = ["selected.ids", "selected.counts", "selected.slots"];
    let lists = Lists { batch: queries.batch(), positions: None, kv_heads: queries.heads.kv };
    BlockList::from_c(checks, c, names, lists)?.writable()
}

fn reject_overlaps(
    queries: &Queries,
    quota: &Quota,
    candidates: Option<&BlockList>,
    selected: &BlockList,
    scores: Option<&Tensor>,
) -> Result<()> {
    let outputs = [Some(&selected.ids), Some(&selected.counts), scores];
    overlap::reject(&outputs, &queries.inputs())?;
    overlap::reject(&outputs, &[quota.budgets.as_ref(), candidates.map(|c| &c.ids), candidates.map(|c| &c.counts)])
}

pub fn blocks(session: &Session, request: &BlocksRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => cpu::blocks(cpu, request),
        On::Cuda(_) => Err(Error::unsupported("vwd_select_blocks has no CUDA kernel in this build")),
    }
}

/// Bytes of scratch that `blocks` takes from its stream's arena.
pub fn blocks_scratch(session: &Session, _request: &BlocksRequest) -> Result<u64> {
    session.scratch_bytes(|_| Err(Error::unsupported("vwd_select_blocks has no CUDA kernel in this build")))
}

pub fn tokens(session: &Session, request: &TokensRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => cpu::tokens(cpu, request),
        On::Cuda(_) => Err(Error::unsupported("vwd_select_tokens has no CUDA kernel in this build")),
    }
}

/// Bytes of scratch that `tokens` takes from its stream's arena.
pub fn tokens_scratch(session: &Session, _request: &TokensRequest) -> Result<u64> {
    session.scratch_bytes(|_| Err(Error::unsupported("vwd_select_tokens has no CUDA kernel in this build")))
}
