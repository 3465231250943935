//! Summaries of keys, from which blocks and tokens are selected, and the choice of the channels that labels keep.
//!
//! MINMAX: per block and channel the largest and smallest key. MEAN: per window the mean key. LABEL: per token the chosen
//! channels as code = rne((x − min) / scale) in 0 … 15. AXIS: per block the mean key μ and an axis a along which its keys
//! spread, r·Xᵀu with X = K − μ, u near the principal direction of the tokens and a reach r.

mod choose;
mod cpu;
mod cuda;

pub(crate) use cuda::Kernels;

use super::contents::{self, Number, Rule};
use super::views::{Heads, MAX_DIM, Pages, Scale, check_head_dim};
use crate::abi::{
    VWD_INDEX_AXIS, VWD_INDEX_LABEL, VWD_INDEX_MEAN, VWD_INDEX_MINMAX, vwd_channel_importance_args, vwd_index,
    vwd_index_update_args, vwd_stream,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, ByteRange, Checks, Tensor};
use crate::runtime::cuda::views::Place;
use crate::runtime::{On, Session, require_no_flags};

/// Summaries of one layer: what they are and where they lie. Shapes as in `vwd_index`.
#[derive(Clone, Copy)]
pub struct Index<'a> {
    pub kind: Kind<'a>,
    /// [B, max_index_pages]
    pub table: Option<Tensor<'a>>,
    /// Pages in the tensors, and summaries of a page.
    pages: usize,
    rows: usize,
}

#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant)] // lives on the stack of one call
pub enum Kind<'a> {
    /// Both [pages, rows, Hk, D], of one dtype.
    MinMax {
        block_size: usize,
        max: Tensor<'a>,
        min: Tensor<'a>,
    },
    /// [pages, rows, Hk, D]
    Mean {
        windows: Windows,
        means: Tensor<'a>,
    },
    Label(Labels<'a>),
    Axis(Axes<'a>),
}

impl<'a> Kind<'a> {
    /// Tokens of a block, of the kinds that summarise blocks.
    fn block_size(&self) -> Option<usize> {
        match self {
            Kind::MinMax { block_size, .. } | Kind::Axis(Axes { block_size, .. }) => Some(*block_size),
            Kind::Mean { .. } | Kind::Label(_) => None,
        }
    }

    /// One of the summaries, [pages, rows, Hk, ..].
    fn first(&self) -> &Tensor<'a> {
        match self {
            Kind::MinMax { max: t, .. } | Kind::Mean { means: t, .. } | Kind::Label(Labels { codes: t, .. }) => t,
            Kind::Axis(Axes { axes: t, .. }) => t,
        }
    }
}

/// Windows of `size` tokens every `stride` tokens.
#[derive(Clone, Copy)]
pub struct Windows {
    pub size: usize,
    pub stride: usize,
}

/// INT4 labels of tokens: key ≈ min + scale·code on r channels.
#[derive(Clone, Copy)]
pub struct Labels<'a> {
    /// [pages, rows, Hk, r/2]
    pub codes: Tensor<'a>,
    /// [pages, rows, Hk]
    pub scale: Tensor<'a>,
    /// [pages, rows, Hk]
    pub min: Tensor<'a>,
    /// [Hk, r]
    pub channels: Tensor<'a>,
}

/// Mean key and axis of each block, side by side.
#[derive(Clone, Copy)]
pub struct Axes<'a> {
    pub block_size: usize,
    /// [pages, rows, Hk, 2·D]; in INT4 [pages, rows, Hk, D].
    pub axes: Tensor<'a>,
    /// In INT4: [pages, rows, Hk, 4·⌈D/32⌉], of each group scale and minimum.
    pub range: Option<Tensor<'a>>,
    /// [Hk, D]
    pub weights: Option<Tensor<'a>>,
    /// [Hk, D]
    pub centre: Option<Tensor<'a>>,
}

/// Channels of a group that share a scale and a minimum.
pub const GROUP: usize = 32;

/// The numbers of channels of a block's two summaries and their dtypes: those of key_max and key_min for VWD_INDEX_MINMAX, of axes in
/// INT4 and axis_range for VWD_INDEX_AXIS.
pub fn block_summaries(kind: u32, dim: usize, keys: DType) -> [(usize, DType); 2] {
    match kind {
        VWD_INDEX_AXIS => [(dim, DType::U8), (4 * dim.div_ceil(GROUP), DType::F16)],
        _ => [(dim, if keys.is_float8() { DType::F16 } else { keys }); 2],
    }
}

impl Windows {
    /// Windows that are full once there are `len` tokens.
    pub fn full(&self, len: usize) -> usize {
        if len < self.size { 0 } else { (len - self.size) / self.stride + 1 }
    }

    /// The windows that overlap the tokens `begin` … `end`−1, whether full or not.
    pub fn overlapping(&self, begin: usize, end: usize) -> std::ops::Range<usize> {
        let first = if begin < self.size { 0 } else { (begin - self.size) / self.stride + 1 };
        first..end.div_ceil(self.stride)
    }
}

impl<'a> Labels<'a> {
    /// r, the channels kept.
    pub fn kept(&self) -> usize {
        self.channels.dim(1)
    }

    /// The channels that KV head `g` keeps, in the first `kept` places; `None` for one outside 0 … dim−1, which stands
    /// for a channel of zeros.
    ///
    /// # Safety
    /// There is such a head, the op's caller keeps the tensor valid, and the session computes on the CPU.
    pub unsafe fn channels_of(&self, g: usize, dim: usize) -> [Option<u16>; MAX_DIM] {
        std::array::from_fn(|n| {
            // SAFETY: g is a head, and n below r, the places of its row.
            let channel = (n < self.kept()).then(|| unsafe { self.channels.get::<i32, 2>([g, n]) })?;
            (0..dim as i32).contains(&channel).then_some(channel as u16)
        })
    }
}

impl<'a> Index<'a> {
    /// Where CUDA kernels find the summaries of each sequence.
    pub fn place(&self) -> Place {
        Place::new(self.table.as_ref(), self.pages, self.rows, self.capacity())
    }

    /// `dim` is the extent D of keys or queries, named, and `batch` the number of sequences.
    #[inline(always)]
    pub fn from_c(checks: &Checks, c: &'a vwd_index, batch: usize, dim: (&str, usize)) -> Result<Index<'a>> {
        require_no_flags("index.flags", c.flags)?;
        let float = |name, t| {
            let shape = [("pages", ANY), ("rows", ANY), ("Hk", ANY), dim];
            checks.input(name, t, DType::FLOATS, &shape)
        };
        let kind = match c.kind {
            VWD_INDEX_MINMAX => {
                if c.block_size == 0 {
                    return Err(Error::argument("index.block_size", 0, "at least 1"));
                }
                let max = float("index.key_max", &c.key_max)?;
                let min = checks.input("index.key_min", &c.key_min, &[max.dtype], &summaries(&max, dim))?;
                Kind::MinMax { block_size: c.block_size as usize, max, min }
            }
            VWD_INDEX_MEAN => {
                let or = |given: u32, default| if given == 0 { default } else { given as usize };
                let windows = Windows { size: or(c.window, 32), stride: or(c.stride, 16) };
                Kind::Mean { windows, means: float("index.means", &c.means)? }
            }
            VWD_INDEX_LABEL => Kind::Label(Labels::from_c(checks, c, dim.1)?),
            VWD_INDEX_AXIS => Kind::Axis(Axes::from_c(checks, c, dim)?),
            other => return Err(Error::argument("index.kind", other, "a VWD_INDEX_* value (1 to 4)")),
        };
        let entries = [("B", batch), ("max_index_pages", ANY)];
        let table = checks.optional_input("index.table", &c.table, &[DType::I32], &entries)?;
        let shape = kind.first();
        let (pages, rows) = (shape.dim(0), shape.dim(1));
        if table.is_none() && pages < batch {
            let found = format!("{pages} pages for {batch} sequences without index.table");
            return Err(Error::argument(&shape.name().to_string(), found, "one page a sequence"));
        }
        Ok(Index { kind, table, pages, rows })
    }

    /// What a session that checks contents reads: the pages of the summaries of `seq_lens` tokens, with `begin` of those that tokens
    /// from there on change, and the channels of labels, below `dim`.
    pub fn contents(&self, seq_lens: Tensor<'a>, begin: Option<Tensor<'a>>, dim: usize) -> Vec<Rule<'a>> {
        // Summary j is of the tokens up to j·step + size; a block exists from its first token on.
        let (size, step) = match &self.kind {
            Kind::MinMax { block_size, .. } => (1, *block_size),
            Kind::Axis(axes) => (1, axes.block_size),
            Kind::Mean { windows, .. } => (windows.size, windows.stride),
            Kind::Label(_) => (1, 1),
        };
        let tokens = Number::of(seq_lens);
        let pages = |tokens: Number<'a>| tokens.over(step.saturating_mul(self.rows));
        // ⌊(tokens − size) / step⌋ + 1 summaries, in pages of `rows`.
        let end = pages(tokens.minus(size).plus(step.saturating_mul(self.rows)));
        let page = |table: Tensor<'a>| Rule::within(table, -1, Number::constant(self.pages));
        let table = self.table.filter(|_| self.rows > 0).map(|table| match begin {
            None => page(table).between(1, Number::constant(0), end),
            Some(begin) => {
                // The first window that ends past `begin`; the block or token that has it.
                let first = if size > 1 { Number::of(begin).minus(size).plus(step) } else { Number::of(begin) };
                page(table).between(1, pages(first), end).where_positive(tokens.less(begin))
            }
        });
        let channels = self.channels().map(|channels| Rule::within(*channels, 0, Number::constant(dim)));
        table.into_iter().chain(channels).collect()
    }

    pub fn kv_heads(&self) -> usize {
        self.kind.first().dim(2)
    }

    /// The tensors that `vwd_index_update` writes.
    pub fn summaries(&self) -> [Option<&Tensor<'a>>; 3] {
        match &self.kind {
            Kind::MinMax { max, min, .. } => [Some(max), Some(min), None],
            Kind::Mean { means, .. } => [Some(means), None, None],
            Kind::Label(l) => [Some(&l.codes), Some(&l.scale), Some(&l.min)],
            Kind::Axis(a) => [Some(&a.axes), a.range.as_ref(), None],
        }
    }

    pub fn channels(&self) -> Option<&Tensor<'a>> {
        match &self.kind {
            Kind::Label(l) => Some(&l.channels),
            _ => None,
        }
    }

    /// What `vwd_index_update` alone reads: weights and centre.
    pub fn learned(&self) -> [Option<&Tensor<'a>>; 2] {
        match &self.kind {
            Kind::Axis(a) => [a.weights.as_ref(), a.centre.as_ref()],
            _ => [None; 2],
        }
    }

    /// Summaries that a sequence has room for.
    pub fn capacity(&self) -> usize {
        let pages = if self.pages == 0 { 0 } else { self.table.map_or(1, |t| t.dim(1)) };
        self.rows.saturating_mul(pages)
    }

    /// Page and row of summary `j` of sequence `i`, or `None` where it has none.
    ///
    /// # Safety
    /// The op's caller keeps the table valid, and the session computes on the CPU.
    #[inline]
    pub unsafe fn row(&self, i: usize, j: usize) -> Option<[usize; 2]> {
        if j >= self.capacity() {
            return None;
        }
        let Some(table) = &self.table else { return Some([i, j]) };
        // SAFETY: j / rows is inside the table.
        let page = unsafe { table.get::<i32, 2>([i, j / self.rows]) };
        (page >= 0 && (page as usize) < self.pages).then_some([page as usize, j % self.rows])
    }
}

impl<'a> Labels<'a> {
    fn from_c(checks: &Checks, c: &'a vwd_index, dim: usize) -> Result<Labels<'a>> {
        let channels = checks.input("index.channels", &c.channels, &[DType::I32], &[("Hk", ANY), ("r", ANY)])?;
        check_kept(&channels, dim)?;
        let shape = [("pages", ANY), ("rows", ANY), ("Hk", channels.dim(0)), ("r/2", channels.dim(1) / 2)];
        let codes = checks.input("index.labels", &c.labels, &[DType::U8], &shape)?;
        let [pages, rows, heads, _] = summaries(&codes, ("", 0));
        let per_token = |name, t| checks.input(name, t, &[DType::F16], &[pages, rows, heads]);
        let scale = per_token("index.label_scale", &c.label_scale)?;
        let min = per_token("index.label_min", &c.label_min)?;
        Ok(Labels { codes, scale, min, channels })
    }
}

impl<'a> Axes<'a> {
    fn from_c(checks: &Checks, c: &'a vwd_index, of_dim: (&str, usize)) -> Result<Axes<'a>> {
        let dim = of_dim.1;
        if c.block_size == 0 {
            return Err(Error::argument("index.block_size", 0, "at least 1"));
        }
        let types = [DType::U8, DType::F32, DType::F16, DType::BF16];
        let is_int4 = (c.axes.dtype_code, c.axes.dtype_bits) == (DType::U8.code, DType::U8.bits);
        let last = if is_int4 { of_dim } else { ("2·D", 2 * dim) };
        let shape = [("pages", ANY), ("rows", ANY), ("Hk", ANY), last];
        let axes = checks.input("index.axes", &c.axes, &types, &shape)?;
        let groups = summaries(&axes, ("4·⌈D/32⌉", 4 * dim.div_ceil(GROUP)));
        let range = match is_int4 {
            true => Some(checks.input("index.axis_range", &c.axis_range, &[DType::F16], &groups)?),
            false if c.axis_range.data.is_null() => None,
            false => return Err(Error::argument("index.axis_range", "given", "absent: axes are not in INT4")),
        };
        let per_channel = [("Hk", axes.dim(2)), of_dim];
        let weights = checks.optional_input("index.axis_weights", &c.axis_weights, &[DType::F32], &per_channel)?;
        let centre = checks.optional_input("index.axis_centre", &c.axis_centre, &[DType::F32], &per_channel)?;
        Ok(Axes { block_size: c.block_size as usize, axes, range, weights, centre })
    }
}

/// [pages, rows, Hk, last], as `t` has it.
fn summaries<'a>(t: &Tensor, last: (&'a str, usize)) -> [(&'a str, usize); 4] {
    [("pages", t.dim(0)), ("rows", t.dim(1)), ("Hk", t.dim(2)), last]
}

/// r is even, from 2 to D.
fn check_kept(channels: &Tensor, dim: usize) -> Result<()> {
    let r = channels.dim(1);
    if r >= 2 && r <= dim && r.is_multiple_of(2) {
        return Ok(());
    }
    let expected = format!("an even number of channels from 2 to D={dim}");
    Err(Error::argument(&channels.name().to_string(), format!("r = {r}"), expected))
}

/// Checked arguments; shapes as in `vwd_index_update`.
#[derive(Clone, Copy)]
pub struct UpdateRequest<'a> {
    /// [pages, P, Hk, D]
    pub k: Tensor<'a>,
    /// Scales of FP8 keys; absent: 1.
    pub k_scale: Option<Scale<'a>>,
    pub pages: Pages<'a>,
    /// [B]
    pub begin: Option<Tensor<'a>>,
    pub index: Index<'a>,
}

impl<'a> UpdateRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_index_update_args, index: &'a vwd_index) -> Result<UpdateRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let k = checks.input("k", &c.k, DType::KEYS, &[("pages", ANY), ("P", ANY), ("Hk", ANY), ("D", ANY)])?;
        check_head_dim(&k, k.dim(3))?;
        let k_scale = Scale::from_c(&checks, "k_scale", &c.k_scale, &k)?;
        let pages = Pages::new(&checks, &k, ["page_table", "seq_lens"], &c.page_table, &c.seq_lens, ("B", ANY))?;
        let begin = checks.optional_input("begin", &c.begin, &[DType::I32], &[("B", pages.batch())])?;
        let index = Index::from_c(&checks, index, pages.batch(), ("D of k", k.dim(3)))?;
        if let Some(block_size) = index.kind.block_size() {
            pages.check_block_size("index.block_size", block_size)?;
        }
        // Extremes of 16 or 32 bits are stored as they are.
        if let Kind::MinMax { max, .. } = &index.kind
            && !k.dtype.is_float8()
        {
            max.of(k.dtype)?;
        }
        let outputs = index.summaries();
        for out in outputs.into_iter().flatten() {
            out.writable()?;
            if out.dim(2) != k.dim(2) {
                let expected = format!("the {} of k, [pages, P, Hk, D] = {:?}", k.dim(2), k.shape());
                return Err(Error::argument(&out.name().to_string(), format!("{} KV heads", out.dim(2)), expected));
            }
        }
        let [weights, centre] = index.learned();
        let inputs = [
            Some(&k),
            k_scale.as_ref().map(|scale| &scale.0),
            pages.table.as_ref(),
            Some(&pages.seq_lens),
            begin.as_ref(),
            index.table.as_ref(),
            index.channels(),
            weights,
            centre,
        ];
        overlap::reject(&outputs, &inputs)?;
        Ok(UpdateRequest { k, k_scale, pages, begin, index })
    }
}

impl<'a> UpdateRequest<'a> {
    /// What a session that checks contents reads.
    fn contents(&self) -> Vec<Rule<'a>> {
        let UpdateRequest { k_scale, pages, begin, index, .. } = self;
        let mut rules = vec![contents::seq_lens(pages)];
        rules.extend(begin.map(|begin| Rule::within(begin, 0, Number::of(pages.seq_lens).plus(1))));
        rules.extend(contents::page_table(pages, *begin));
        let block_size = index.kind.block_size();
        rules.extend(
            begin.zip(block_size).and_then(|(begin, size)| contents::pages_of_begun_blocks(pages, begin, size)),
        );
        rules.extend(contents::scale(k_scale));
        rules.extend(index.contents(pages.seq_lens, *begin, self.k.dim(3)));
        rules.extend(index.learned().into_iter().flatten().map(|t| Rule::finite(*t)));
        rules
    }
}

pub fn update(session: &Session, request: &UpdateRequest, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    contents::check(session, &on, || request.contents())?;
    match on {
        On::Cpu(cpu) => cpu::update(cpu, request),
        On::Cuda(enqueue) => {
            let mut updates = cuda::Updates::new(&enqueue);
            updates.add(request)?;
            updates.launch()
        }
    }
}

/// Updates of one call of `vwd_index_update_layers`.
pub const MOST_UPDATES: usize = 256;

/// The updates of several layers. `read` checks the n-th one and hands it on, as often as it is asked for.
pub fn update_layers(
    session: &Session,
    count: usize,
    read: impl Fn(usize, &mut dyn FnMut(&UpdateRequest) -> Result<()>) -> Result<()>,
    stream: vwd_stream,
) -> Result<()> {
    let on = session.on(stream)?;
    let mut written = [[(0, 0); 3]; MOST_UPDATES];
    for (n, written) in written[..count].iter_mut().enumerate() {
        read(n, &mut |request| {
            *written = request.index.summaries().map(|summary| summary.map_or((0, 0), Tensor::bytes));
            match &on {
                On::Cpu(_) => Ok(()),
                On::Cuda(enqueue) => cuda::check(enqueue, request),
            }
        })?;
    }
    reject_shared(&written[..count], &read)?;
    if session.checks_contents() {
        (0..count).try_for_each(|n| read(n, &mut |request| contents::check(session, &on, || request.contents())))?;
    }
    match &on {
        On::Cpu(cpu) => (0..count).try_for_each(|n| read(n, &mut |request| cpu::update(cpu, request))),
        On::Cuda(enqueue) => {
            let mut updates = cuda::Updates::new(enqueue);
            (0..count).try_for_each(|n| read(n, &mut |request| updates.add(request)))?;
            updates.launch()
        }
    }
}

/// Fails where two updates write the same bytes. `written`: from the first to the last byte of each one's summaries.
fn reject_shared(
    written: &[[ByteRange; 3]],
    read: &impl Fn(usize, &mut dyn FnMut(&UpdateRequest) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let meet = |a: &ByteRange, b: &ByteRange| a.0.max(b.0) < a.1.min(b.1);
    for (n, own) in written.iter().enumerate() {
        for (m, other) in written.iter().enumerate().skip(n + 1) {
            if own.iter().any(|a| other.iter().any(|b| meet(a, b))) {
                let mut is_shared = false;
                read(n, &mut |first| {
                    read(m, &mut |second| {
                        let others = second.index.summaries();
                        is_shared =
                            first.index.summaries().iter().any(|&one| overlap::reject(&[one], &others).is_err());
                        Ok(())
                    })
                })?;
                if is_shared {
                    let found = format!("its summaries overlap those of updates[{n}].index");
                    return Err(Error::argument(&format!("updates[{m}].index"), found, "memory of its own"));
                }
            }
        }
    }
    Ok(())
}

/// Checked arguments; shapes as in `vwd_channel_importance`.
#[derive(Clone, Copy)]
pub struct ImportanceRequest<'a> {
    /// [Tq, Hq, D]
    pub q: Tensor<'a>,
    /// [Tk, Hk, D]
    pub k: Tensor<'a>,
    pub heads: Heads,
    /// [Hk, r]
    pub channels: Option<Tensor<'a>>,
    /// These three are [Hk, D].
    pub importance: Option<Tensor<'a>>,
    pub weights: Option<Tensor<'a>>,
    pub centre: Option<Tensor<'a>>,
}

impl<'a> ImportanceRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_channel_importance_args) -> Result<ImportanceRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let checks = session.checks();
        let q = checks.input("q", &c.q, DType::FLOATS, &[("Tq", ANY), ("Hq", ANY), ("D", ANY)])?;
        let k = checks.input("k", &c.k, &[q.dtype], &[("Tk", ANY), ("Hk", ANY), ("D", q.dim(2))])?;
        let heads = Heads::new(&q, k.dim(1))?;
        let kept = [("Hk", heads.kv), ("r", ANY)];
        let channels = checks.optional_output("channels", &c.channels, &[DType::I32], &kept)?;
        if let Some(channels) = &channels {
            check_kept(channels, heads.dim)?;
        }
        let per_channel =
            |name, t| checks.optional_output(name, t, &[DType::F32], &[("Hk", heads.kv), ("D", heads.dim)]);
        let importance = per_channel("importance", &c.importance)?;
        let (weights, centre) = (per_channel("weights", &c.weights)?, per_channel("centre", &c.centre)?);
        let outputs = [channels.as_ref(), importance.as_ref(), weights.as_ref(), centre.as_ref()];
        overlap::reject(&outputs, &[Some(&q), Some(&k)])?;
        Ok(ImportanceRequest { q, k, heads, channels, importance, weights, centre })
    }
}

pub fn importance(session: &Session, request: &ImportanceRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => {
            cpu::importance(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::importance(&enqueue, request),
    }
}
