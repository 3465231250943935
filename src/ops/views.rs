//! Checked views of the structs that several calls share: paged keys and values, block lists, attention states.

use crate::abi::{vwd_block_list, vwd_paged_kv, vwd_tensor};
use crate::core::dtype::{DType, Element};
use crate::core::status::{Error, Result};
use crate::core::tensor::{Checks, MAX_RANK, Name, Tensor};
use crate::runtime::require_no_flags;
use std::mem::MaybeUninit;

/// Heads of one call: Hq query heads share Hk KV heads, G = Hq / Hk each, of D channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
}

impl Heads {
    /// From q [.., Hq, D] and a tensor with Hk heads.
    pub fn new(q: &Tensor, kv_heads: usize) -> Result<Heads> {
        let heads = Heads { q: q.dim(1), kv: kv_heads, dim: q.dim(2) };
        if heads.kv == 0 || heads.q == 0 || !heads.q.is_multiple_of(heads.kv) {
            let expected = format!("a positive multiple of the {} KV heads", heads.kv);
            return Err(Error::argument(&q.name.to_string(), format!("{} query heads", heads.q), expected));
        }
        check_head_dim(q, heads.dim)?;
        Ok(heads)
    }

    pub fn group(&self) -> usize {
        self.q / self.kv
    }
}

/// The largest D.
pub const MAX_DIM: usize = 256;

/// D is a multiple of 8 from 16 to 256.
pub fn check_head_dim(t: &Tensor, dim: usize) -> Result<()> {
    if (16..=MAX_DIM).contains(&dim) && dim.is_multiple_of(8) {
        return Ok(());
    }
    let expected = "a multiple of 8 from 16 to 256";
    Err(Error::argument(&t.name.to_string(), format!("head dimension {dim}"), expected))
}

/// Room for a row whose elements lie apart.
pub type Spare<T> = [MaybeUninit<T>; MAX_DIM];

pub const fn spare<T>() -> Spare<T> {
    [const { MaybeUninit::uninit() }; MAX_DIM]
}

/// The last dimension of `t` at `index` as adjacent elements: where they lie, or copied to `spare`.
///
/// # Safety
/// The caller of the op keeps `t` valid, `T` is its dtype, `index` names all dimensions but the last, of at most MAX_DIM.
#[inline(always)]
pub unsafe fn adjacent<T: Element, const N: usize>(t: &Tensor, index: [usize; N], spare: &mut Spare<T>) -> *const T {
    let (row, stride) = (t.at::<T, N>(index), t.stride(N));
    if stride == 1 {
        return row;
    }
    for (c, place) in spare[..t.dim(N)].iter_mut().enumerate() {
        // SAFETY: forwarded to the caller.
        place.write(unsafe { row.wrapping_offset(c as isize * stride).read() });
    }
    spare.as_ptr().cast()
}

/// The scale of q·k: 0 stands for 1/√D.
pub fn scale_or_default(scale: f32, dim: usize) -> Result<f32> {
    if !scale.is_finite() {
        return Err(Error::argument("scale", scale, "a finite number"));
    }
    Ok(if scale == 0.0 { (1.0 / (dim as f64).sqrt()) as f32 } else { scale })
}

/// Where the tokens of each sequence lie: pages of P tokens, found through a table.
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub table: Option<Tensor<'a>>,
    pub seq_lens: Tensor<'a>,
    /// Pages in the tensor, and tokens of a page.
    pub count: usize,
    pub size: usize,
}

impl<'a> Pages<'a> {
    /// `paged` is [pages, P, …]; there are as many sequences as lengths.
    pub fn new(
        checks: &Checks,
        paged: &Tensor,
        names: [&'static str; 2],
        table: &'a vwd_tensor,
        lens: &'a vwd_tensor,
    ) -> Result<Pages<'a>> {
        let table = checks.optional(names[0], table)?;
        let seq_lens = checks.required(names[1], lens)?.of(DType::I32)?.of_rank(1)?;
        let batch = seq_lens.dim(0);
        let table = match table {
            None if paged.dim(0) < batch => {
                let found = format!("{} pages for {batch} sequences without a page table", paged.dim(0));
                return Err(Error::argument(&paged.name.to_string(), found, "one page a sequence"));
            }
            None => None,
            Some(t) => {
                let t = t.of(DType::I32)?.of_rank(2)?;
                Some(t.of_shape(&[("B", batch), ("max_pages", t.dim(1))])?)
            }
        };
        Ok(Pages { table, seq_lens, count: paged.dim(0), size: paged.dim(1) })
    }

    pub fn batch(&self) -> usize {
        self.seq_lens.dim(0)
    }

    /// Most tokens that any sequence can have.
    pub fn capacity(&self) -> usize {
        self.size * self.table.map_or(1, |t| t.dim(1))
    }

    /// A block holds whole pages or a page whole blocks. `name` is that of the argument.
    pub fn check_block_size(&self, name: &str, block_size: usize) -> Result<()> {
        let p = self.size;
        if block_size == 0 {
            return Err(Error::argument(name, 0, "at least 1"));
        }
        if self.table.is_some() && p != 0 && !p.is_multiple_of(block_size) && !block_size.is_multiple_of(p) {
            let expected = format!("a divisor or a multiple of the page size {p}");
            return Err(Error::argument(name, block_size, expected));
        }
        Ok(())
    }

    /// Tokens of sequence `i`, clamped to what its pages can hold.
    ///
    /// # Safety
    /// The op's caller keeps seq_lens valid, and the session computes on the CPU.
    pub unsafe fn len(&self, i: usize) -> usize {
        // SAFETY: forwarded to the caller.
        let len = unsafe { self.seq_lens.get::<i32, 1>([i]) };
        (len.max(0) as usize).min(self.capacity())
    }

    /// The page that holds page `p` of sequence `i`, or `None` where the table names no page.
    ///
    /// # Safety
    /// As for [`Pages::len`].
    #[inline]
    pub unsafe fn page(&self, i: usize, p: usize) -> Option<usize> {
        match &self.table {
            None => (p == 0).then_some(i),
            Some(table) if p < table.dim(1) => {
                // SAFETY: forwarded to the caller; p is inside the table.
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
}

impl<'a> PagedKv<'a> {
    pub fn from_c(checks: &Checks, c: &'a vwd_paged_kv) -> Result<PagedKv<'a>> {
        require_no_flags("kv.flags", c.flags)?;
        let k = checks.required("kv.k", &c.k)?.of_any(DType::FLOATS)?.of_rank(4)?;
        let v = checks.required("kv.v", &c.v)?.of(k.dtype)?;
        let v = v.of_shape(&[("pages", k.dim(0)), ("P", k.dim(1)), ("Hk", k.dim(2)), ("D", k.dim(3))])?;
        let pages = Pages::new(checks, &k, ["kv.page_table", "kv.seq_lens"], &c.page_table, &c.seq_lens)?;
        Ok(PagedKv { k, v, pages })
    }
}

/// A block list, as input or output: ids [B, Hk, cap] and counts [B, Hk].
#[derive(Clone, Copy)]
pub struct BlockList<'a> {
    pub ids: Tensor<'a>,
    pub counts: Tensor<'a>,
}

impl<'a> BlockList<'a> {
    /// `names` are those of ids and counts.
    pub fn from_c(
        checks: &Checks,
        c: &'a vwd_block_list,
        names: [&'static str; 2],
        batch: usize,
        kv_heads: usize,
    ) -> Result<BlockList<'a>> {
        let ids = checks.required(names[0], &c.ids)?.of(DType::I32)?.of_rank(3)?;
        let ids = ids.of_shape(&[("B", batch), ("Hk", kv_heads), ("cap", ids.dim(2))])?;
        let counts = checks.required(names[1], &c.counts)?.of(DType::I32)?;
        let counts = counts.of_shape(&[("B", batch), ("Hk", kv_heads)])?;
        Ok(BlockList { ids, counts })
    }

    /// Absent when neither tensor is given; half a list is an error.
    pub fn optional_from_c(
        checks: &Checks,
        c: &'a vwd_block_list,
        names: [&'static str; 2],
        batch: usize,
        kv_heads: usize,
    ) -> Result<Option<BlockList<'a>>> {
        if c.ids.data.is_null() && c.counts.data.is_null() {
            return Ok(None);
        }
        BlockList::from_c(checks, c, names, batch, kv_heads).map(Some)
    }

    pub fn writable(self) -> Result<BlockList<'a>> {
        Ok(BlockList { ids: self.ids.writable()?, counts: self.counts.writable()? })
    }

    pub fn cap(&self) -> usize {
        self.ids.dim(2)
    }

    /// Entries of the list of (sequence, KV head), clamped to the capacity.
    ///
    /// # Safety
    /// The op's caller keeps the list valid, and the session computes on the CPU.
    pub unsafe fn count(&self, i: usize, g: usize) -> usize {
        // SAFETY: forwarded to the caller.
        let count = unsafe { self.counts.get::<i32, 2>([i, g]) };
        (count.max(0) as usize).min(self.cap())
    }

    /// Entry `j` of the list as written; may be out of range or repeated.
    ///
    /// # Safety
    /// As for [`BlockList::count`], and `j` is below the capacity.
    #[inline]
    pub unsafe fn id(&self, i: usize, g: usize, j: usize) -> i32 {
        // SAFETY: forwarded to the caller.
        unsafe { self.ids.get::<i32, 3>([i, g, j]) }
    }
}

/// Attention states: acc [B, Hq, D], m and l [B, Hq]; or one per group of list entries: acc [B, Hq, groups, D], m and l
/// [B, Hq, groups]. All float32.
#[derive(Clone, Copy)]
pub struct State<'a> {
    pub acc: Tensor<'a>,
    pub m: Tensor<'a>,
    pub l: Tensor<'a>,
}

impl<'a> State<'a> {
    /// `c` and `names` are acc, m and l; `lead` is the shape of m and l.
    pub fn from_c(
        checks: &Checks,
        c: [&'a vwd_tensor; 3],
        names: [Name; 3],
        lead: &[(&str, usize)],
        dim: usize,
    ) -> Result<State<'a>> {
        let one = |n: usize| checks.required(names[n], c[n])?.of(DType::F32);
        let mut full = [("D", dim); MAX_RANK];
        full[..lead.len()].copy_from_slice(lead);
        let acc = one(0)?.of_shape(&full[..=lead.len()])?;
        Ok(State { acc, m: one(1)?.of_shape(lead)?, l: one(2)?.of_shape(lead)? })
    }

    /// Absent when no tensor is given; part of a state is an error.
    pub fn optional_from_c(
        checks: &Checks,
        c: [&'a vwd_tensor; 3],
        names: [&'static str; 3],
        lead: &[(&str, usize)],
        dim: usize,
    ) -> Result<Option<State<'a>>> {
        if c.iter().all(|t| t.data.is_null()) {
            return Ok(None);
        }
        State::from_c(checks, c, names.map(Name::from), lead, dim).map(Some)
    }

    pub fn writable(self) -> Result<State<'a>> {
        Ok(State { acc: self.acc.writable()?, m: self.m.writable()?, l: self.l.writable()? })
    }

    pub fn tensors(&self) -> [&Tensor<'a>; 3] {
        [&self.acc, &self.m, &self.l]
    }
}
