//! Attention of a sequence's query positions over blocks, tokens or everything, and joining of attention states.
//!
//! out_h = Σ_t softmax_t(scale·q_h·k_t) v_t over the listed tokens t that the position sees. A state (acc, m, l) is that
//! sum unfinished; states over disjoint tokens join to the state over all of them.

mod cpu;
mod cuda;
pub mod device;
pub mod engine;
mod term;

use super::contents::{self, Rule, Tokens};
use super::int4::Int4Kv;
use super::views::{BlockList, Heads, Lists, PagedKv, Positions, State, check_head_dim, scale_or_default};
use crate::abi::{
    VWD_ATTENTION_KEEP_ROWS, vwd_attention_args, vwd_attention_partials, vwd_attention_state, vwd_block_list,
    vwd_merge_states_args, vwd_paged_kv, vwd_stream, vwd_tensor,
};
use crate::core::array::array;
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Name, Tensor, given};
use crate::runtime::{On, Session, require_flags, require_no_flags};
use std::mem::MaybeUninit;
use std::ops::Range;
pub use term::Term;

/// Tokens that are attended together where the contract leaves it open: without a list, and for lists of single tokens.
const TOKENS: usize = 64;
/// Most states that one call joins.
const MOST_INPUTS: usize = 16;

/// What attention and repair are about, apart from lists.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    pub positions: Positions<'a>,
    pub kv: PagedKv<'a>,
    pub heads: Heads,
    pub scale: f32,
    /// Scores s become soft_cap · tanh(s / soft_cap).
    pub soft_cap: Option<f32>,
    /// Tokens that a position sees, itself included.
    pub window: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// The draft tree whose nodes the rows are; absent where they are a chain.
    pub tree: Option<Tree<'a>>,
    /// The tokens that are coded in INT4, if any are.
    pub int4: Option<&'a Int4Kv<'a>>,
}

/// The numbers among the arguments.
#[derive(Clone, Copy)]
pub struct Numbers {
    pub block_size: u32,
    pub scale: f32,
    pub soft_cap: f32,
    pub window: u32,
}

impl<'a> Problem<'a> {
    /// Checks all arguments but `block_size`. Keys and values lie in the pages of the sequences, or in those that the slots of `list` name.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        [q, q_lens, tree]: [&'a vwd_tensor; 3],
        kv: &'a vwd_paged_kv,
        numbers: Numbers,
        (list, name_of_ids): (&vwd_block_list, &'static str),
    ) -> Result<Problem<'a>> {
        let positions = Positions::from_c(checks, q, q_lens)?;
        let (batch, dim) = (positions.batch(), positions.q.dim(positions.q.rank() - 1));
        let in_slots = given(&list.slots).is_some();
        let kv = PagedKv::from_c(checks, kv, batch, dim, in_slots)?;
        // Pages that slots name hold one head; how many there are, the list says.
        let kv_heads = if in_slots { BlockList::kv_heads(checks, list, name_of_ids)? } else { kv.k.dim(2) };
        let heads = Heads::new(&positions.q, kv_heads)?;
        let Numbers { block_size, scale, soft_cap, window } = numbers;
        if scale == 0.0 && dim != kv.value_dim() {
            let expected = format!("the scale of q·k, since D={dim} and Dv={} differ", kv.value_dim());
            return Err(Error::argument("scale", scale, expected));
        }
        if !(soft_cap.is_finite() && soft_cap >= 0.0) {
            return Err(Error::argument("soft_cap", soft_cap, "a finite number above 0, or 0 for none"));
        }
        Ok(Problem {
            positions,
            kv,
            heads,
            scale: scale_or_default(scale, dim)?,
            soft_cap: (soft_cap > 0.0).then_some(soft_cap),
            window: if window == 0 { usize::MAX } else { window as usize },
            block_size: block_size as usize,
            tree: Tree::from_c(checks, tree, &positions)?,
            int4: None,
        })
    }

    /// The same problem with tokens that are coded in INT4. Their blocks have to be those of the call's lists.
    #[inline(always)]
    pub fn with_int4<'b>(self, int4: Option<&'b Int4Kv<'b>>, has_lists: bool) -> Result<Problem<'b>>
    where
        'a: 'b,
    {
        let Some(coded) = int4 else { return Ok(self) };
        if has_lists && coded.block_size != self.block_size {
            let expected = format!("the block size {} of the lists", self.block_size);
            return Err(Error::argument("kv.int4.block_size", coded.block_size, expected));
        }
        if let Some(weights) = coded.weights.filter(|weights| weights.dim(0) != self.heads.kv) {
            let expected = format!("[Hk, D], of the {} KV heads of the lists", self.heads.kv);
            return Err(Error::argument("kv.int4.weights", format!("shape {:?}", weights.shape()), expected));
        }
        Ok(Problem { int4, ..self })
    }

    /// How many lists there may be.
    #[inline(always)]
    pub fn lists(&self) -> Lists {
        let positions = &self.positions;
        Lists { batch: positions.batch(), positions: positions.dimension(), kv_heads: self.heads.kv }
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 9] {
        let PagedKv { k, v, pages, k_scale, v_scale } = &self.kv;
        let scales = [k_scale, v_scale].map(|scale| scale.as_ref().map(|scale| &scale.0));
        let [k_scale, v_scale] = scales;
        let lens = self.positions.lens.as_ref();
        let tree = self.tree.as_ref().map(|tree| &tree.0);
        let (table, seq_lens) = (pages.table.as_ref(), Some(&pages.seq_lens));
        [Some(&self.positions.q), lens, Some(k), Some(v), table, seq_lens, k_scale, v_scale, tree]
    }

    /// Refuses outputs that share memory with what is coded.
    #[inline(always)]
    pub fn reject_overlap_with_int4<const N: usize>(&self, outputs: &[Option<&Tensor>; N]) -> Result<()> {
        self.int4.map_or(Ok(()), |int4| overlap::reject(outputs, &int4.inputs()))
    }

    /// What a session that checks contents reads: lengths, pages and scales.
    pub fn contents(&self) -> Vec<Rule<'a>> {
        let PagedKv { pages, k_scale, v_scale, .. } = &self.kv;
        let mut rules: Vec<Rule> = contents::q_lens(&self.positions).into_iter().collect();
        rules.push(contents::seq_lens(pages));
        rules.extend(contents::page_table(pages, None));
        rules.extend([k_scale, v_scale].into_iter().filter_map(contents::scale));
        rules.extend(self.int4.iter().flat_map(|int4| int4.contents(pages.seq_lens)));
        rules
    }

    /// What a session that checks contents reads of a list, whose slots name so many pages beside those of keys and values.
    pub fn contents_of(&self, list: &BlockList<'a>, far_pages: usize) -> Vec<Rule<'a>> {
        let pages = &self.kv.pages;
        let tokens = Tokens { seq_lens: pages.seq_lens, positions: &self.positions, block_size: self.block_size };
        contents::list(list, &tokens, pages.count + far_pages + self.int4.map_or(0, |int4| int4.pages.count))
    }

    /// The tokens that position `r` of sequence `i` sees.
    ///
    /// # Safety
    /// The op's caller keeps the tensors valid, the session computes on the CPU, and there is such a sequence.
    pub unsafe fn seen(&self, i: usize, r: usize) -> Seen<'_> {
        // SAFETY: there is such a sequence; a position that sees a token is one of its rows.
        unsafe {
            let tokens = self.kv.pages.len(i);
            let end = self.positions.seen(i, r, tokens);
            let Some(tree) = self.tree.as_ref().filter(|_| end > 0) else {
                return Seen { first: end.saturating_sub(self.window), end, node: None };
            };
            let root = tokens as isize - self.positions.len(i) as isize;
            let node = Node { tree, sequence: i, row: r, root, depth: tree.depth(i, r), window: self.window };
            let after = root.saturating_add_unsigned(node.depth + 1).max(0) as usize;
            Seen { first: after.saturating_sub(self.window).min(end), end, node: Some(node) }
        }
    }

    /// Block `j` of a list, or `None` where it begins past what the list is for or repeats the one before it.
    ///
    /// # Safety
    /// The op's caller keeps the tensors valid, the session computes on the CPU, and `j` is below the list's capacity.
    pub unsafe fn block(&self, list: &BlockList, at: [usize; 3], j: usize) -> Option<usize> {
        // SAFETY: j is below the capacity, and j − 1 where j is not 0.
        unsafe {
            let id = usize::try_from(list.id(at, j)).ok()?;
            let tokens = self.kv.pages.len(at[0]);
            let end = if list.is_own() { self.positions.seen(at[0], at[1], tokens) } else { tokens };
            let inside = id.checked_mul(self.block_size).is_some_and(|begin| begin < end);
            (inside && (j == 0 || list.id(at, j - 1) != id as i32)).then_some(id)
        }
    }
}

/// A draft tree whose nodes are the rows of a sequence: bit j of row r, of [B, Q, ⌈Q/32⌉] words, says whether r sees row j ≤ r. The
/// depth of a row is the number of rows that it sees, less one.
#[derive(Clone, Copy)]
pub struct Tree<'a>(pub Tensor<'a>);

impl<'a> Tree<'a> {
    #[inline(always)]
    fn from_c(checks: &Checks, t: &'a vwd_tensor, positions: &Positions) -> Result<Option<Tree<'a>>> {
        let Some(t) = given(t) else { return Ok(None) };
        let Some(rows) = positions.dimension() else {
            return Err(Error::argument("tree", "given for q of rank 3", "q [B, Q, Hq, D]"));
        };
        let shape = [("B", positions.batch()), ("Q", rows), ("⌈Q/32⌉", rows.div_ceil(32))];
        Ok(Some(Tree(checks.input("tree", t, &[DType::U32], &shape)?)))
    }

    /// # Safety
    /// The op's caller keeps the tensor valid, the session computes on the CPU, and there are such a sequence and row.
    unsafe fn depth(&self, i: usize, r: usize) -> usize {
        // SAFETY: bits up to r lie in words up to r / 32.
        let word = |n: usize| unsafe { self.0.get::<u32, 3>([i, r, n]) };
        let below: u32 = (0..r / 32).map(|n| word(n).count_ones()).sum();
        let nodes = below + (word(r / 32) & (u32::MAX >> (31 - r % 32))).count_ones();
        (nodes as usize).saturating_sub(1)
    }

    /// # Safety
    /// As for [`Tree::depth`], and `j` is a row.
    unsafe fn has(&self, i: usize, r: usize, j: usize) -> bool {
        // SAFETY: j is below Q.
        unsafe { self.0.get::<u32, 3>([i, r, j / 32]) >> (j % 32) & 1 == 1 }
    }
}

/// The tokens that a row sees.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// The row sees no token outside of `first` … `end` − 1.
    first: usize,
    end: usize,
    /// Among the tokens of a draft tree it sees only those that this node sees.
    node: Option<Node<'a>>,
}

/// A row of a draft tree.
#[derive(Clone, Copy)]
struct Node<'a> {
    tree: &'a Tree<'a>,
    sequence: usize,
    row: usize,
    /// The token position of row 0, which is negative where the sequence has fewer tokens than rows.
    root: isize,
    depth: usize,
    window: usize,
}

impl Seen<'_> {
    pub const NOTHING: Seen<'static> = Seen { first: 0, end: 0, node: None };

    #[inline(always)]
    pub fn range(&self) -> Range<usize> {
        self.first..self.end
    }

    /// The row, where it matters which of its tree's tokens before `end` it sees.
    #[inline(always)]
    pub fn row_among(&self, end: usize) -> Option<usize> {
        self.node.filter(|node| end as isize > node.root).map(|node| node.row)
    }

    /// Whether the row sees a token of its range.
    ///
    /// # Safety
    /// The op's caller keeps the tensors valid, and the session computes on the CPU.
    pub unsafe fn has(&self, token: usize) -> bool {
        let Some(node) = &self.node else { return true };
        let Ok(other) = usize::try_from(token as isize - node.root) else { return true };
        let Node { tree, sequence, row, depth, window, .. } = *node;
        // SAFETY: the range ends with the row's own token, so that the other row is not above it.
        unsafe {
            tree.has(sequence, row, other)
                && (window == usize::MAX || tree.depth(sequence, other).saturating_add(window) > depth)
        }
    }
}

/// Where results go, and what enters `out` alone.
#[derive(Clone, Copy)]
pub struct Outputs<'a> {
    /// [B, (Q,) Hq, Dv]
    pub out: Option<Tensor<'a>>,
    /// [B, (Q,) Hq]
    pub lse: Option<Tensor<'a>>,
    pub state: Option<State<'a>>,
    /// [Hq]
    pub sinks: Option<Tensor<'a>>,
    /// q_lens, where the results of rows from there on are to stay as they are.
    pub kept_past: Option<Tensor<'a>>,
}

/// The extents that outputs and states have in common.
#[derive(Clone, Copy)]
pub struct Extents {
    pub batch: usize,
    /// Q, where tensors have a dimension for it.
    pub positions: Option<usize>,
    pub heads: usize,
    /// Dv
    pub dim: usize,
}

impl Extents {
    #[inline(always)]
    pub fn of(problem: &Problem) -> Extents {
        let positions = &problem.positions;
        Extents {
            batch: positions.batch(),
            positions: positions.dimension(),
            heads: problem.heads.q,
            dim: problem.kv.value_dim(),
        }
    }

    /// A state with these names, absent when no tensor is given; part of a state is an error.
    #[inline(always)]
    pub fn state<'a>(
        &self,
        checks: &Checks,
        c: &'a vwd_attention_state,
        names: [Name; 3],
    ) -> Result<Option<State<'a>>> {
        let c = [&c.acc, &c.m, &c.l];
        if State::is_absent(c) { Ok(None) } else { self.required_state(checks, c, names).map(Some) }
    }

    #[inline(always)]
    fn required_state<'a>(&self, checks: &Checks, c: [&'a vwd_tensor; 3], names: [Name; 3]) -> Result<State<'a>> {
        let (batch, heads, dim) = (("B", self.batch), ("Hq", self.heads), ("Dv", self.dim));
        match self.positions.map(|q| ("Q", q)) {
            None => State::from_c(checks, c, names, &[batch, heads], &[batch, heads, dim]),
            Some(q) => State::from_c(checks, c, names, &[batch, q, heads], &[batch, q, heads, dim]),
        }
    }

    /// The same with a state for each group of `partial_blocks` list entries.
    #[inline(always)]
    pub fn partials<'a>(
        &self,
        checks: &Checks,
        c: &'a vwd_attention_partials,
        names: [Name; 3],
        groups: usize,
    ) -> Result<Option<State<'a>>> {
        let c = [&c.acc, &c.m, &c.l];
        if State::is_absent(c) {
            return Ok(None);
        }
        let (batch, heads, dim) = (("B", self.batch), ("Hq", self.heads), ("Dv", self.dim));
        let groups = ("⌈cap/partial_blocks⌉", groups);
        Ok(Some(match self.positions.map(|q| ("Q", q)) {
            None => State::from_c(checks, c, names, &[batch, heads, groups], &[batch, heads, groups, dim])?,
            Some(q) => State::from_c(checks, c, names, &[batch, q, heads, groups], &[batch, q, heads, groups, dim])?,
        }))
    }
}

impl<'a> Outputs<'a> {
    /// `out_dtypes` are those that out may have.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        [out, lse, sinks]: [&'a vwd_tensor; 3],
        state: &'a vwd_attention_state,
        (out_dtypes, out_required): (&[DType], bool),
        extents: &Extents,
    ) -> Result<Outputs<'a>> {
        let (batch, heads, dim) = (("B", extents.batch), ("Hq", extents.heads), ("Dv", extents.dim));
        let out = match (out_required || !out.data.is_null(), extents.positions) {
            (false, _) => None,
            (true, None) => Some(checks.output("out", out, out_dtypes, &[batch, heads, dim])?),
            (true, Some(q)) => Some(checks.output("out", out, out_dtypes, &[batch, ("Q", q), heads, dim])?),
        };
        let lse = match extents.positions {
            None => checks.optional_output("lse", lse, &[DType::F32], &[batch, heads])?,
            Some(q) => checks.optional_output("lse", lse, &[DType::F32], &[batch, ("Q", q), heads])?,
        };
        let state = extents.state(checks, state, STATE)?.map(State::writable).transpose()?;
        let sinks = checks.optional_input("sinks", sinks, &[DType::F32], &[heads])?;
        Ok(Outputs { out, lse, state, sinks, kept_past: None })
    }

    /// The outputs of attention and repair with these flags.
    pub fn with_flags(self, flags: u32, positions: &Positions<'a>) -> Outputs<'a> {
        let kept_past = if flags & VWD_ATTENTION_KEEP_ROWS != 0 { positions.lens } else { None };
        Outputs { kept_past, ..self }
    }

    /// What a session that checks contents reads.
    pub fn contents(&self) -> Option<Rule<'a>> {
        self.sinks.map(Rule::not_nan)
    }

    pub fn tensors(&self) -> [Option<&Tensor<'a>>; 5] {
        let [acc, m, l] = tensors(self.state.as_ref());
        [self.out.as_ref(), self.lse.as_ref(), acc, m, l]
    }
}

/// Names of an argument's acc, m and l.
pub const fn names([acc, m, l]: [&'static str; 3]) -> [Name; 3] {
    [Name::new(acc), Name::new(m), Name::new(l)]
}

const STATE: [Name; 3] = names(["state.acc", "state.m", "state.l"]);
const PARTIALS: [Name; 3] = names(["partials.acc", "partials.m", "partials.l"]);

/// The tensors of a state that may be absent.
pub fn tensors<'s, 'a>(state: Option<&'s State<'a>>) -> [Option<&'s Tensor<'a>>; 3] {
    match state {
        Some(state) => state.tensors().map(Some),
        None => [None; 3],
    }
}

/// Partials of a list of `capacity` entries.
pub fn partial_count(capacity: usize, partial_blocks: u32) -> usize {
    capacity.div_ceil((partial_blocks as usize).max(1))
}

/// Entries of a list of `capacity` entries that are attended to as one: those that share a partial, or as many single tokens as
/// are worth it. All entries share one partial where `partial_blocks` is more.
pub fn entries_per_partial(block_size: usize, partial_blocks: u32, has_partials: bool, capacity: usize) -> usize {
    let entries = (partial_blocks as usize).max(1);
    let entries = if has_partials || entries > 1 || block_size >= 8 { entries } else { TOKENS / block_size };
    entries.min(capacity.max(1))
}

/// Checked arguments of `vwd_attention`. The parts stay where they were made: they are large, and the checks are short.
#[derive(Clone, Copy)]
pub struct Request<'r> {
    pub problem: &'r Problem<'r>,
    pub list: Option<&'r BlockList<'r>>,
    pub entries_per_partial: usize,
    pub outputs: &'r Outputs<'r>,
    pub partials: Option<&'r State<'r>>,
    pub term: Option<&'r Term<'r>>,
    /// Whether keys and values lie in host memory, as a decoder on a tiered cache knows. It picks kernels alone.
    pub is_far: bool,
    pub far_pages: Option<FarPages>,
}

/// Pages of keys and values that lie in other memory. Slots of a list name them by the numbers that follow those of the pages of `k` and `v`.
#[derive(Clone, Copy)]
pub struct FarPages {
    pub count: u32,
    /// How far each lies from where the strides of `k` and `v` would have it.
    pub bytes: i64,
}

impl Request<'_> {
    /// Checks the arguments and hands them to `then`.
    #[inline(always)]
    pub fn with<R>(
        session: &Session,
        c: &vwd_attention_args,
        kv: &vwd_paged_kv,
        then: impl FnOnce(&Request) -> Result<R>,
    ) -> Result<R> {
        require_flags("flags", c.flags, VWD_ATTENTION_KEEP_ROWS)?;
        let checks = &session.checks();
        let numbers = Numbers { block_size: c.block_size, scale: c.scale, soft_cap: c.soft_cap, window: c.window };
        let list = (&c.list, "list.ids");
        let mut problem = Problem::from_c(checks, [&c.q, &c.q_lens, &c.tree], kv, numbers, list)?;
        let list = if BlockList::is_absent(&c.list) {
            if c.block_size != 0 {
                return Err(Error::argument("block_size", c.block_size, "0 without a list"));
            }
            if !State::is_absent([&c.partials.acc, &c.partials.m, &c.partials.l]) {
                return Err(Error::argument("partials", "given without a list", "a list, which partials need"));
            }
            problem.block_size = TOKENS;
            None
        } else {
            problem.kv.pages.check_block_size("block_size", problem.block_size)?;
            let names = ["list.ids", "list.counts", "list.slots"];
            Some(BlockList::with_slots_from_c(checks, &c.list, names, problem.lists())?)
        };
        let mut room = MaybeUninit::uninit();
        let int4 = Int4Kv::from_c(checks, kv.int4, &problem.kv, &mut room)?;
        let problem = problem.with_int4(int4.as_ref(), list.is_some())?;
        let extents = Extents::of(&problem);
        let dtypes = &[problem.positions.q.dtype, DType::F32];
        let outputs = Outputs::from_c(checks, [&c.out, &c.lse, &c.sinks], &c.state, (dtypes, true), &extents)?;
        let outputs = outputs.with_flags(c.flags, &problem.positions);
        let groups = list.as_ref().map_or(0, |list| partial_count(list.cap(), c.partial_blocks));
        let partials = extents.partials(checks, &c.partials, PARTIALS, groups)?;
        let partials = partials.map(State::writable).transpose()?;
        let capacity = list.as_ref().map_or(usize::MAX, BlockList::cap);
        let entries_per_partial =
            entries_per_partial(problem.block_size, c.partial_blocks, partials.is_some(), capacity);
        let mut room = MaybeUninit::uninit();
        let term = Term::from_c(checks, c, (&problem.positions, problem.heads, extents.dim), &mut room)?;
        let (list, partials, term) = (list.as_ref(), partials.as_ref(), term.as_ref());
        let request = Request {
            problem: &problem,
            list,
            entries_per_partial,
            outputs: &outputs,
            partials,
            term,
            is_far: false,
            far_pages: None,
        };
        request.reject_overlap()?;
        then(&request)
    }

    #[inline(always)]
    fn reject_overlap(&self) -> Result<()> {
        let [out, lse, acc, m, l] = self.outputs.tensors();
        let [part_acc, part_m, part_l] = tensors(self.partials);
        let [q, q_lens, k, v, table, lens, k_scale, v_scale, tree] = self.problem.inputs();
        let [ids, counts, slots] = self.list.map_or([None; 3], BlockList::tensors);
        let sinks = self.outputs.sinks.as_ref();
        overlap::reject(
            &[out, lse, acc, m, l, part_acc, part_m, part_l],
            &[q, q_lens, k, v, table, lens, k_scale, v_scale, tree, ids, counts, slots, sinks],
        )?;
        self.term.map_or(Ok(()), |term| overlap::reject(&[out, lse, acc, m, l], &term.inputs()))?;
        self.problem.reject_overlap_with_int4(&[out, lse, acc, m, l, part_acc, part_m, part_l])
    }
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || {
        let mut rules = request.problem.contents();
        let far = request.far_pages.map_or(0, |far| far.count as usize);
        rules.extend(request.list.iter().flat_map(|list| request.problem.contents_of(list, far)));
        rules.extend(request.outputs.contents());
        rules.extend(request.term.and_then(|term| term.remainder.contents()));
        rules
    })?;
    match on {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}

/// Bytes of scratch that `run` takes from its stream's arena.
pub fn scratch(session: &Session, request: &Request) -> Result<u64> {
    session.scratch_bytes(|cuda| cuda::scratch(cuda, request))
}

/// Whether some variant that the session may run takes the call.
pub fn is_taken(session: &Session, request: &Request) -> bool {
    session.cuda().is_none_or(|cuda| cuda::scratch(cuda, request).is_ok())
}

/// States [B, (Q,) Hq, ..] that are joined.
pub struct States<'a> {
    inputs: [Option<State<'a>>; MOST_INPUTS],
    pub extents: Extents,
}

impl<'a> States<'a> {
    pub fn iter(&self) -> impl Iterator<Item = &State<'a>> {
        self.inputs.iter().flatten()
    }
}

/// Checked arguments of `vwd_merge_states`.
pub struct MergeRequest<'a> {
    pub states: States<'a>,
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
        // SAFETY: the caller states its length.
        let given = unsafe { array("inputs", c.inputs, count, "states")? };
        let extents = extents_of(checks, &given[0].acc)?;
        let outputs = Outputs::from_c(checks, [&c.out, &c.lse, &c.sinks], &c.state, (DType::FLOATS, false), &extents)?;
        if outputs.tensors().iter().all(Option::is_none) {
            return Err(Error::argument("out", "no output is given", "out, lse or state"));
        }
        overlap::reject(&outputs.tensors(), &[outputs.sinks.as_ref()])?;
        let mut inputs = [None; MOST_INPUTS];
        for (n, (input, given)) in inputs.iter_mut().zip(given).enumerate() {
            let names = ["inputs[].acc", "inputs[].m", "inputs[].l"].map(|text| Name::member(text, n));
            let state = extents.required_state(checks, [&given.acc, &given.m, &given.l], names)?;
            overlap::reject(&outputs.tensors(), &state.tensors().map(Some))?;
            *input = Some(state);
        }
        Ok(MergeRequest { states: States { inputs, extents }, outputs })
    }
}

/// The extents of the first state, from its acc [B, (Q,) Hq, Dv].
fn extents_of(checks: &Checks, acc: &vwd_tensor) -> Result<Extents> {
    let (batch, heads, dim) = (("B", ANY), ("Hq", ANY), ("Dv", ANY));
    let name = Name::member("inputs[].acc", 0);
    let acc = match acc.ndim {
        4 => checks.input(name, acc, &[DType::F32], &[batch, ("Q", ANY), heads, dim])?,
        _ => checks.input(name, acc, &[DType::F32], &[batch, heads, dim])?,
    };
    // Every query head stands for itself here.
    let heads = Heads::new(&acc, 1)?;
    check_head_dim(&acc, heads.dim)?;
    let positions = (acc.rank() == 4).then(|| acc.dim(1));
    Ok(Extents { batch: acc.dim(0), positions, heads: heads.q, dim: heads.dim })
}

pub fn merge(session: &Session, request: &MergeRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || {
        let mut rules: Vec<Rule> = request.states.iter().map(|state| Rule::factor(state.l)).collect();
        rules.extend(request.outputs.contents());
        rules
    })?;
    match on {
        On::Cpu(cpu) => cpu::merge(cpu, request),
        On::Cuda(enqueue) => cuda::merge(&enqueue, request),
    }
}
