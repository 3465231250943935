//! Checked views of the arguments that several calls share: query positions, paged keys and values, block lists, attention
//! states.

use crate::abi::{vwd_block_list, vwd_paged_kv, vwd_tensor};
use crate::core::dtype::{DType, Element};
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Name, Tensor, given};
use crate::runtime::require_no_flags;
use std::mem::MaybeUninit;

/// The heads of one call: G = Hq / Hk query heads share each of Hk KV heads; a head has D channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
}

impl Heads {
    /// Takes Hq and D from q [.., Hq, D] and Hk from another tensor.
    #[inline(always)]
    pub fn new(q: &Tensor, kv_heads: usize) -> Result<Heads> {
        let heads = Heads { q: q.dim(q.rank() - 2), kv: kv_heads, dim: q.dim(q.rank() - 1) };
        if heads.kv == 0 || heads.q == 0 || !heads.q.is_multiple_of(heads.kv) {
            let expected = format!("a positive multiple of the {} KV heads", heads.kv);
            return Err(Error::argument(&q.name().to_string(), format!("{} query heads", heads.q), expected));
        }
        check_head_dim(q, heads.dim)?;
        Ok(heads)
    }

    pub fn group(&self) -> usize {
        self.q / self.kv
    }
}

/// The largest D.
pub const MAX_DIM: usize = 576;

/// D is a multiple of 8 from 16 to 576.
#[inline(always)]
pub fn check_head_dim(t: &Tensor, dim: usize) -> Result<()> {
    if (16..=MAX_DIM).contains(&dim) && dim.is_multiple_of(8) {
        return Ok(());
    }
    let expected = "a multiple of 8 from 16 to 576";
    Err(Error::argument(&t.name().to_string(), format!("head dimension {dim}"), expected))
}

/// Query positions: q [B, Hq, D] with one row per sequence, or q [B, Q, Hq, D], of which a sequence uses the first q_lens
/// rows.
///
/// Row r of sequence i is at token position seq_lens − q_lens + r and sees the keys up to that position.
#[derive(Clone, Copy)]
pub struct Positions<'a> {
    pub q: Tensor<'a>,
    /// [B]; absent: every sequence has Q rows.
    pub lens: Option<Tensor<'a>>,
}

impl<'a> Positions<'a> {
    #[inline(always)]
    pub fn from_c(checks: &Checks, q: &'a vwd_tensor, lens: &'a vwd_tensor) -> Result<Positions<'a>> {
        let (batch, heads, dim) = (("B", ANY), ("Hq", ANY), ("D", ANY));
        let q = match q.ndim {
            4 => checks.input("q", q, DType::FLOATS, &[batch, ("Q", ANY), heads, dim])?,
            _ => checks.input("q", q, DType::FLOATS, &[batch, heads, dim])?,
        };
        let lens = checks.optional_input("q_lens", lens, &[DType::I32], &[("B", q.dim(0))])?;
        Ok(Positions { q, lens })
    }

    pub fn batch(&self) -> usize {
        self.q.dim(0)
    }

    /// Q if q has rank 4; tensors of the call then have a dimension for query positions.
    pub fn dimension(&self) -> Option<usize> {
        (self.q.rank() == 4).then(|| self.q.dim(1))
    }

    /// Q; 1 if q has rank 3.
    pub fn count(&self) -> usize {
        self.dimension().unwrap_or(1)
    }

    /// The number of rows of sequence `i`, clamped to Q.
    ///
    /// # Safety
    /// There is a sequence `i`, the op's caller keeps q_lens valid, and the session computes on the CPU.
    pub unsafe fn len(&self, i: usize) -> usize {
        // SAFETY: q_lens has an entry for each sequence, of which i is one.
        let len = self.lens.map(|lens| unsafe { lens.get::<i32, 1>([i]) });
        len.map_or(self.count(), |len| (len.max(0) as usize).min(self.count()))
    }

    /// How many of the sequence's `tokens` row `r` of sequence `i` sees; 0 for a row past the sequence's rows.
    ///
    /// # Safety
    /// The conditions of [`Positions::len`] hold.
    pub unsafe fn seen(&self, i: usize, r: usize, tokens: usize) -> usize {
        // SAFETY: i is a sequence.
        let len = unsafe { self.len(i) };
        if r < len { (tokens + r + 1).saturating_sub(len) } else { 0 }
    }

    /// The index of row `r` of sequence `i`, head `h` in q and in outputs of the rank of q. Coordinates past the rank are 0.
    #[inline(always)]
    pub fn place(&self, i: usize, r: usize, h: usize) -> [usize; 3] {
        if self.q.rank() == 4 { [i, r, h] } else { [i, h, 0] }
    }
}

/// A buffer for a row whose elements are not adjacent in memory.
pub type Spare<T> = [MaybeUninit<T>; MAX_DIM];

pub const fn spare<T>() -> Spare<T> {
    [const { MaybeUninit::uninit() }; MAX_DIM]
}

/// The last dimension of `t` at `index` as adjacent elements: in place if they are adjacent, else copied to `spare`.
///
/// # Safety
/// The caller of the op keeps `t` valid, `T` is its dtype, `index` names all dimensions but the last, of at most MAX_DIM.
#[inline(always)]
pub unsafe fn adjacent<T: Element, const N: usize>(t: &Tensor, index: [usize; N], spare: &mut Spare<T>) -> *const T {
    let row = t.row::<T, N>(index);
    if let Some(first) = row.packed() {
        return first;
    }
    for (c, place) in spare[..t.dim(N)].iter_mut().enumerate() {
        // SAFETY: c is inside the last dimension of a tensor that the caller keeps valid.
        place.write(unsafe { row.get(c) });
    }
    spare.as_ptr().cast()
}

/// The scale of q·k: 0 stands for 1/√D.
#[inline(always)]
pub fn scale_or_default(scale: f32, dim: usize) -> Result<f32> {
    if !(scale.is_finite() && scale >= 0.0) {
        return Err(Error::argument("scale", scale, "a finite number above 0, or 0 for 1/√D"));
    }
    Ok(if scale == 0.0 { (1.0 / (dim as f64).sqrt()) as f32 } else { scale })
}

/// The factors of stored FP8 keys or values: [1], [Hk], or [pages, P, Hk].
#[derive(Clone, Copy)]
pub struct Scale<'a>(pub Tensor<'a>);

impl<'a> Scale<'a> {
    /// `scaled` [pages, P, Hk, ..] is the tensor of keys or values.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        name: &'static str,
        t: &'a vwd_tensor,
        scaled: &Tensor<'a>,
    ) -> Result<Option<Scale<'a>>> {
        let Some(t) = given(t) else { return Ok(None) };
        if !scaled.dtype.is_float8() {
            return Err(Error::argument(
                name,
                format!("given for {} of dtype {}", scaled.name(), scaled.dtype),
                "none but for FP8",
            ));
        }
        let heads = ("Hk", scaled.dim(2));
        let scale = match (t.ndim, t.shape[0]) {
            (3, _) => checks.input(name, t, &[DType::F32], &[("pages", scaled.dim(0)), ("P", scaled.dim(1)), heads]),
            (1, 1) => checks.input(name, t, &[DType::F32], &[("1", 1)]),
            _ => checks.input(name, t, &[DType::F32], &[heads]),
        };
        scale.map(|scale| Some(Scale(scale)))
    }

    /// The factor of a token at (page, row, KV head).
    ///
    /// # Safety
    /// The op's caller keeps the tensor valid, the session computes on the CPU, and the token is inside the keys.
    #[inline(always)]
    pub unsafe fn of(&self, token: [usize; 3]) -> f32 {
        // SAFETY: from_c gave the tensor one of these shapes, in which the token has its place.
        unsafe {
            match self.0.rank() {
                3 => self.0.get(token),
                _ => self.0.get([if self.0.dim(0) == 1 { 0 } else { token[2] }]),
            }
        }
    }
}

/// The pages in which the tokens of each sequence lie. A page has P tokens and is found through a table.
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub table: Option<Tensor<'a>>,
    pub seq_lens: Tensor<'a>,
    /// The number of pages in the tensor.
    pub count: usize,
    /// P, the number of tokens of a page.
    pub size: usize,
    /// Whether the slots of a list name the pages.
    pub in_slots: bool,
}

impl<'a> Pages<'a> {
    /// `paged` is [pages, P, …]; `lens` has the length `batch`, a named extent.
    #[inline(always)]
    pub fn new(
        checks: &Checks,
        paged: &Tensor,
        names: [&'static str; 2],
        table: &'a vwd_tensor,
        lens: &'a vwd_tensor,
        batch: (&str, usize),
    ) -> Result<Pages<'a>> {
        let seq_lens = checks.input(names[1], lens, &[DType::I32], &[batch])?;
        let batch = seq_lens.dim(0);
        let shape = [("B of seq_lens", batch), ("max_pages", ANY)];
        let table = checks.optional_input(names[0], table, &[DType::I32], &shape)?;
        if table.is_none() && paged.dim(0) < batch {
            let found = format!("{} pages for {batch} sequences without a page table", paged.dim(0));
            return Err(Error::argument(&paged.name().to_string(), found, "one page a sequence"));
        }
        Ok(Pages { table, seq_lens, count: paged.dim(0), size: paged.dim(1), in_slots: false })
    }

    /// The pages of a pool, which the slots of a list name.
    pub fn of_slots(
        checks: &Checks,
        pool: &Tensor,
        names: [&'static str; 2],
        table: &vwd_tensor,
        lens: &'a vwd_tensor,
        batch: (&str, usize),
    ) -> Result<Pages<'a>> {
        if given(table).is_some() {
            return Err(Error::argument(names[0], "given beside the slots of a list", "one of the two"));
        }
        if pool.dim(2) != 1 {
            let found = format!("{} KV heads in the pages that slots name", pool.dim(2));
            return Err(Error::argument(&pool.name().to_string(), found, "one: [slots, P, 1, D]"));
        }
        let seq_lens = checks.input(names[1], lens, &[DType::I32], &[batch])?;
        Ok(Pages { table: None, seq_lens, count: pool.dim(0), size: pool.dim(1), in_slots: true })
    }

    pub fn batch(&self) -> usize {
        self.seq_lens.dim(0)
    }

    /// The largest number of tokens that a sequence can have.
    pub fn capacity(&self) -> usize {
        let pages = if self.in_slots { usize::MAX } else { self.table.map_or(1, |t| t.dim(1)) };
        self.size.saturating_mul(pages)
    }

    /// Checks that a block is a whole number of pages or a page a whole number of blocks, and a slot a whole number of blocks.
    /// `name` is the argument's name.
    pub fn check_block_size(&self, name: &str, block_size: usize) -> Result<()> {
        let p = self.size;
        if block_size == 0 {
            return Err(Error::argument(name, 0, "at least 1"));
        }
        if self.table.is_some() && p != 0 && !p.is_multiple_of(block_size) && !block_size.is_multiple_of(p) {
            let expected = format!("a divisor or a multiple of the page size {p}");
            return Err(Error::argument(name, block_size, expected));
        }
        if self.in_slots && !p.is_multiple_of(block_size) {
            return Err(Error::argument(name, block_size, format!("a divisor of the {p} tokens of a slot")));
        }
        Ok(())
    }

    /// The number of tokens of sequence `i`, clamped to the capacity of its pages.
    ///
    /// # Safety
    /// There is a sequence `i`, the op's caller keeps the tensors valid, and the session computes on the CPU.
    pub unsafe fn len(&self, i: usize) -> usize {
        // SAFETY: seq_lens has an entry for each sequence, of which i is one.
        let len = unsafe { self.seq_lens.get::<i32, 1>([i]) };
        (len.max(0) as usize).min(self.capacity())
    }

    /// The tensor's page that is page `p` of sequence `i`, or `None` if the table names no page.
    ///
    /// # Safety
    /// The conditions of [`Pages::len`] hold.
    #[inline]
    pub unsafe fn page(&self, i: usize, p: usize) -> Option<usize> {
        match &self.table {
            None => (p == 0).then_some(i),
            Some(table) if p < table.dim(1) => {
                // SAFETY: table has a row for each sequence, and p is inside it.
                let page = unsafe { table.get::<i32, 2>([i, p]) };
                (page >= 0 && (page as usize) < self.count).then_some(page as usize)
            }
            Some(_) => None,
        }
    }
}

/// Paged keys and values of one layer.
#[derive(Clone, Copy)]
pub struct PagedKv<'a> {
    pub k: Tensor<'a>,
    pub v: Tensor<'a>,
    pub pages: Pages<'a>,
    pub k_scale: Option<Scale<'a>>,
    pub v_scale: Option<Scale<'a>>,
}

impl<'a> PagedKv<'a> {
    /// Checks the keys and values of `batch` sequences, with `dim` channels of a key. `in_slots`: the slots of a list name the
    /// pages.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        c: &'a vwd_paged_kv,
        batch: usize,
        dim: usize,
        in_slots: bool,
    ) -> Result<PagedKv<'a>> {
        require_no_flags("kv.flags", c.flags)?;
        let batch = ("B of q", batch);
        let k = checks.input("kv.k", &c.k, DType::KEYS, &[("pages", ANY), ("P", ANY), ("Hk", ANY), ("D", dim)])?;
        let shape = [("pages", k.dim(0)), ("P", k.dim(1)), ("Hk", k.dim(2)), ("Dv", ANY)];
        let v = checks.input("kv.v", &c.v, &[k.dtype], &shape)?;
        check_head_dim(&v, v.dim(3))?;
        let names = ["kv.page_table", "kv.seq_lens"];
        let pages = match in_slots {
            true => Pages::of_slots(checks, &k, names, &c.page_table, &c.seq_lens, batch)?,
            false => Pages::new(checks, &k, names, &c.page_table, &c.seq_lens, batch)?,
        };
        let k_scale = Scale::from_c(checks, "kv.k_scale", &c.k_scale, &k)?;
        let v_scale = Scale::from_c(checks, "kv.v_scale", &c.v_scale, &v)?;
        Ok(PagedKv { k, v, pages, k_scale, v_scale })
    }

    /// Dv, the number of channels of a value.
    pub fn value_dim(&self) -> usize {
        self.v.dim(3)
    }
}

/// How many lists a call has: one for each sequence and KV head, or one for each sequence, query position and KV head.
#[derive(Clone, Copy)]
pub struct Lists {
    pub batch: usize,
    /// Q if each query position may have its own list.
    pub positions: Option<usize>,
    pub kv_heads: usize,
}

/// Lists of blocks: ids [B, Hk, cap] and counts [B, Hk], which the query positions of a sequence share, or ids
/// [B, Q, Hk, cap] and counts [B, Q, Hk], a list for each query position.
#[derive(Clone, Copy)]
pub struct BlockList<'a> {
    pub ids: Tensor<'a>,
    pub counts: Tensor<'a>,
    /// The page in which each entry lies, in the shape of ids.
    pub slots: Option<Tensor<'a>>,
}

/// The index of a list: sequence, query position and KV head.
pub type ListAt = [usize; 3];

impl<'a> BlockList<'a> {
    /// Checks a list without slots. `names` are the names of ids, counts and slots.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        c: &'a vwd_block_list,
        names: [&'static str; 3],
        lists: Lists,
    ) -> Result<BlockList<'a>> {
        if given(&c.slots).is_some() {
            return Err(Error::argument(names[2], "given", "no slots in this list"));
        }
        BlockList::with_slots_from_c(checks, c, names, lists)
    }

    /// Checks a list with or without slots.
    #[inline(always)]
    pub fn with_slots_from_c(
        checks: &Checks,
        c: &'a vwd_block_list,
        names: [&'static str; 3],
        lists: Lists,
    ) -> Result<BlockList<'a>> {
        let positions = lists.positions.filter(|_| c.ids.ndim == 4);
        let (i32, batch) = (&[DType::I32], ("B", lists.batch));
        let (heads, any) = (("Hk", lists.kv_heads), ("cap", ANY));
        let ids = match positions {
            Some(q) => checks.input(names[0], &c.ids, i32, &[batch, ("Q", q), heads, any])?,
            None => checks.input(names[0], &c.ids, i32, &[batch, heads, any])?,
        };
        let cap = ("cap", ids.dim(ids.rank() - 1));
        let counts = match positions {
            Some(q) => checks.input(names[1], &c.counts, i32, &[batch, ("Q", q), heads])?,
            None => checks.input(names[1], &c.counts, i32, &[batch, heads])?,
        };
        let slots = match positions {
            Some(q) => checks.optional_input(names[2], &c.slots, i32, &[batch, ("Q", q), heads, cap])?,
            None => checks.optional_input(names[2], &c.slots, i32, &[batch, heads, cap])?,
        };
        Ok(BlockList { ids, counts, slots })
    }

    /// Hk, from the shape of a list's ids.
    pub fn kv_heads(checks: &Checks, c: &vwd_block_list, name: &'static str) -> Result<usize> {
        let ids = checks.required(name, &c.ids)?;
        let ids = if ids.rank() == 4 { ids } else { ids.of_rank(3)? };
        Ok(ids.dim(ids.rank() - 2))
    }

    /// Whether no tensor of a list is given.
    #[inline(always)]
    pub fn is_absent(c: &vwd_block_list) -> bool {
        [&c.ids, &c.counts, &c.slots].iter().all(|t| t.data.is_null())
    }

    pub fn writable(self) -> Result<BlockList<'a>> {
        let slots = self.slots.map(Tensor::writable).transpose()?;
        Ok(BlockList { ids: self.ids.writable()?, counts: self.counts.writable()?, slots })
    }

    pub fn tensors(&self) -> [Option<&Tensor<'a>>; 3] {
        [Some(&self.ids), Some(&self.counts), self.slots.as_ref()]
    }

    /// Whether each query position has its own list; otherwise the query positions of a sequence share a list.
    pub fn is_own(&self) -> bool {
        self.ids.rank() == 4
    }

    /// The number of lists of a sequence and KV head: 1, or Q.
    pub fn per_head(&self) -> usize {
        if self.is_own() { self.ids.dim(1) } else { 1 }
    }

    pub fn cap(&self) -> usize {
        self.ids.dim(self.ids.rank() - 1)
    }

    /// The number of a list's entries, clamped to the capacity.
    ///
    /// # Safety
    /// There is such a list, the op's caller keeps the tensors valid, and the session computes on the CPU.
    pub unsafe fn count(&self, at: ListAt) -> usize {
        // SAFETY: counts has a place for each list, of which `at` is one.
        let count = unsafe { self.counts.at::<i32, 3>(self.place(at)).read() };
        (count.max(0) as usize).min(self.cap())
    }

    /// Entry `j` of a list as the caller wrote it; it may be out of range or repeated.
    ///
    /// # Safety
    /// The conditions of [`BlockList::count`] hold, and `j` is below the capacity.
    #[inline]
    pub unsafe fn id(&self, at: ListAt, j: usize) -> i32 {
        // SAFETY: ids have cap places for each list, of which `at` is one, and j is below cap.
        unsafe { self.entry(&self.ids, at, j).read() }
    }

    /// The slot of entry `j` of a list; `None` if the list has no slots.
    ///
    /// # Safety
    /// The conditions of [`BlockList::id`] hold.
    #[inline]
    pub unsafe fn slot(&self, at: ListAt, j: usize) -> Option<i32> {
        // SAFETY: as for id: slots have the shape of ids.
        self.slots.map(|slots| unsafe { self.entry(&slots, at, j).read() })
    }

    /// Writes entry `j` of a list.
    ///
    /// # Safety
    /// The conditions of [`BlockList::id`] hold, and no other task touches the list.
    #[inline]
    pub unsafe fn set_id(&self, at: ListAt, j: usize, id: i32) {
        // SAFETY: as for id, and the list is this task's.
        unsafe { self.entry(&self.ids, at, j).write(id) }
    }

    /// Writes the slot of entry `j` of a list that has slots.
    ///
    /// # Safety
    /// The conditions of [`BlockList::set_id`] hold.
    #[inline]
    pub unsafe fn set_slot(&self, at: ListAt, j: usize, slot: i32) {
        let slots = self.slots.as_ref().expect("a list with slots");
        // SAFETY: forwarded to the caller; slots have the shape of ids.
        unsafe { self.entry(slots, at, j).write(slot) }
    }

    /// Writes the number of a list's entries.
    ///
    /// # Safety
    /// The conditions of [`BlockList::set_id`] hold.
    pub unsafe fn set_count(&self, at: ListAt, count: usize) {
        // SAFETY: counts has a place for each list, and this one is the task's.
        unsafe { self.counts.at::<i32, 3>(self.place(at)).write(count as i32) }
    }

    /// The index of a list in counts. Coordinates past the rank are 0.
    #[inline(always)]
    fn place(&self, [i, r, g]: ListAt) -> [usize; 3] {
        if self.is_own() { [i, r, g] } else { [i, g, 0] }
    }

    #[inline(always)]
    fn entry(&self, t: &Tensor, at: ListAt, j: usize) -> *mut i32 {
        let [a, b, c] = self.place(at);
        if self.is_own() { t.at([a, b, c, j]) } else { t.at([a, b, j]) }
    }
}

/// Attention states: acc [B, Hq, Dv], m and l [B, Hq]; or partials, a state per group of list entries: acc
/// [B, Hq, groups, Dv], m and l [B, Hq, groups]. If q has a dimension for query positions, so have these, after B. All are
/// float32.
#[derive(Clone, Copy)]
pub struct State<'a> {
    pub acc: Tensor<'a>,
    pub m: Tensor<'a>,
    pub l: Tensor<'a>,
}

impl<'a> State<'a> {
    /// `c` and `names` are those of acc, m and l. `acc` is the shape of acc; `lead`, the same without the last dimension, is
    /// the shape of m and l.
    #[inline(always)]
    pub fn from_c<const LEAD: usize, const ACC: usize>(
        checks: &Checks,
        c: [&'a vwd_tensor; 3],
        names: [Name; 3],
        lead: &[(&str, usize); LEAD],
        acc: &[(&str, usize); ACC],
    ) -> Result<State<'a>> {
        Ok(State {
            acc: checks.input(names[0], c[0], &[DType::F32], acc)?,
            m: checks.input(names[1], c[1], &[DType::F32], lead)?,
            l: checks.input(names[2], c[2], &[DType::F32], lead)?,
        })
    }

    /// Whether no tensor of a state is given.
    #[inline(always)]
    pub fn is_absent(c: [&vwd_tensor; 3]) -> bool {
        c.iter().all(|t| t.data.is_null())
    }

    pub fn writable(self) -> Result<State<'a>> {
        Ok(State { acc: self.acc.writable()?, m: self.m.writable()?, l: self.l.writable()? })
    }

    pub fn tensors(&self) -> [&Tensor<'a>; 3] {
        [&self.acc, &self.m, &self.l]
    }
}
