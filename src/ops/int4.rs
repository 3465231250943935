//! Keys and values in INT4: a checked view of `vwd_int4_kv`, and what its codes stand for.
//!
//! A token's D channels are a row of 4-bit codes with one scale. The row is coded after a rotation by the Hadamard matrix H, which
//! spreads large channels over all; keys are coded less the mean of their block and divided by weights w:
//! key = mean + w∘(H·(s·(c − 7.5))), value = H·(s·(c − 7.5)).

use super::contents::{self, Number, Rule};
use super::simd::{Kernel, Lanes, Row, dispatch, widen};
use super::views::{PagedKv, Pages};
use crate::abi::vwd_int4_kv;
use crate::core::dtype::{DType, Float};
use crate::core::float8::F8E4M3;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor, given};
use crate::core::versioned::versioned;
use crate::runtime::require_no_flags;
use crate::with_float;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The most channels of a row, and the fewest.
pub const MAX_CODED: usize = 256;
const MIN_CODED: usize = 64;
/// Block sizes are multiples of this, up to the other.
const BLOCK_UNIT: usize = 16;
pub const MAX_BLOCK: usize = 128;

/// Keys and values in INT4. Shapes as in `vwd_int4_kv`.
#[derive(Clone, Copy)]
pub struct Int4Kv<'a> {
    pub block_size: usize,
    pub exact_tokens: usize,
    /// [pages, P, Hk, D/2]
    pub k: Tensor<'a>,
    /// [pages, P, Hk, Dv/2]
    pub v: Tensor<'a>,
    /// Both [pages, P, Hk], as the bytes of e4m3.
    pub k_scale: Tensor<'a>,
    pub v_scale: Tensor<'a>,
    /// The pages of k and v; its lengths are those of the coded tokens. In slots: a page is one block, whose mean has the same page.
    pub pages: Pages<'a>,
    /// [mean_pages, rows, Hk, D]
    pub means: Tensor<'a>,
    pub mean_table: Option<Tensor<'a>>,
    /// [Hk, D]
    pub weights: Option<Tensor<'a>>,
}

impl<'a> Int4Kv<'a> {
    /// Checks what is coded of `kv`, if anything is; `room` is for the struct of an earlier version.
    #[inline(always)]
    pub fn from_c(
        checks: &Checks,
        c: *const vwd_int4_kv,
        kv: &PagedKv<'a>,
        room: &'a mut MaybeUninit<vwd_int4_kv>,
    ) -> Result<Option<Int4Kv<'a>>> {
        if c.is_null() {
            return Ok(None);
        }
        // SAFETY: the C contract of a pointer that is given.
        let c = unsafe { versioned(c, "kv.int4", room)? };
        Int4Kv::checked(checks, c, kv).map(Some)
    }

    #[inline(never)]
    fn checked(checks: &Checks, c: &'a vwd_int4_kv, kv: &PagedKv<'a>) -> Result<Int4Kv<'a>> {
        require_no_flags("kv.int4.flags", c.flags)?;
        if kv.k.dtype.is_float8() {
            let found = format!("given for kv.k of dtype {}", kv.k.dtype);
            return Err(Error::argument("kv.int4", found, "float32, float16 or bfloat16 beside it"));
        }
        let block_size = c.block_size as usize;
        if !is_block_size(block_size) {
            return Err(Error::argument("kv.int4.block_size", block_size, "a multiple of 16 from 16 to 128"));
        }
        let exact_tokens = c.exact_tokens as usize;
        if !exact_tokens.is_multiple_of(block_size) {
            let expected = format!("a multiple of the block size {block_size}");
            return Err(Error::argument("kv.int4.exact_tokens", exact_tokens, expected));
        }
        let (heads, dim, value_dim) = (("Hk", kv.k.dim(2)), kv.k.dim(3), kv.v.dim(3));
        for (t, dim) in [(&kv.k, dim), (&kv.v, value_dim)] {
            if !is_dim(dim) {
                let found = format!("head dimension {dim} with int4");
                return Err(Error::argument(&t.name().to_string(), found, "a multiple of 16 from 64 to 256"));
            }
        }
        let bytes = &[DType::U8];
        let k = checks.input("kv.int4.k", &c.k, bytes, &[("pages", ANY), ("P", ANY), heads, ("D/2", dim / 2)])?;
        let rows = [("pages", k.dim(0)), ("P", k.dim(1)), heads];
        let v = checks.input("kv.int4.v", &c.v, bytes, &[rows[0], rows[1], heads, ("Dv/2", value_dim / 2)])?;
        let scale = &[DType::F8E4M3];
        let k_scale = checks.input("kv.int4.k_scale", &c.k_scale, scale, &rows)?;
        let v_scale = checks.input("kv.int4.v_scale", &c.v_scale, scale, &rows)?;
        let batch = ("B of q", kv.pages.batch());
        let names = ["kv.int4.page_table", "kv.int4.coded_lens"];
        let in_slots = kv.pages.in_slots;
        let pages = match in_slots {
            true => Pages { table: None, seq_lens: kv.pages.seq_lens, count: k.dim(0), size: k.dim(1), in_slots },
            false => Pages::new(checks, &k, names, &c.page_table, &c.coded_lens, batch)?,
        };
        if in_slots {
            require_none_beside_slots(c)?;
            if pages.size != block_size {
                return Err(Error::argument(
                    "kv.int4.k",
                    format!("slots of {} tokens", pages.size),
                    "block_size of them",
                ));
            }
        }
        if pages.table.is_some()
            && !pages.size.is_multiple_of(block_size)
            && !block_size.is_multiple_of(pages.size.max(1))
        {
            let expected = format!("a divisor or a multiple of the page size {}", pages.size);
            return Err(Error::argument("kv.int4.block_size", block_size, expected));
        }
        let [mean_pages, rows] = match in_slots {
            true => [("pages of kv.int4.k", pages.count), ("one row", 1)],
            false => [("mean_pages", ANY), ("rows", ANY)],
        };
        let means = checks.input("kv.int4.means", &c.means, DType::FLOATS, &[mean_pages, rows, heads, ("D", dim)])?;
        let shape = [batch, ("max_mean_pages", ANY)];
        let mean_table = checks.optional_input("kv.int4.mean_table", &c.mean_table, &[DType::I32], &shape)?;
        if !in_slots && mean_table.is_none() && means.dim(0) < kv.pages.batch() {
            let found = format!("{} pages for {} sequences without a table", means.dim(0), kv.pages.batch());
            return Err(Error::argument("kv.int4.means", found, "one page a sequence"));
        }
        // How many KV heads there are, only the lists say where slots name the pages.
        let heads = if in_slots { ("Hk", ANY) } else { heads };
        let weights = given(&c.weights)
            .map(|t| checks.input("kv.int4.weights", t, &[DType::F32], &[heads, ("D", dim)]))
            .transpose()?;
        Ok(Int4Kv { block_size, exact_tokens, k, v, k_scale, v_scale, pages, means, mean_table, weights })
    }

    /// What a session that checks contents reads: coded lengths, which pages have room for and `seq_lens` cover, pages and weights.
    pub fn contents(&self, seq_lens: Tensor<'a>) -> Vec<Rule<'a>> {
        if self.pages.in_slots {
            return self.weights.map(Rule::factor).into_iter().collect();
        }
        let coded = Number::of(self.pages.seq_lens);
        let mut rules =
            vec![contents::seq_lens(&self.pages), Rule::within(self.pages.seq_lens, 0, Number::of(seq_lens).plus(1))];
        rules.extend(contents::page_table(&self.pages, None));
        let rows = self.means.dim(1);
        rules.extend(self.mean_table.filter(|_| rows > 0).map(|table| {
            let pages = coded.over_up(self.block_size.saturating_mul(rows));
            Rule::within(table, -1, Number::constant(self.means.dim(0))).between(1, Number::constant(0), pages)
        }));
        rules.extend(self.weights.map(Rule::factor));
        rules
    }

    pub fn inputs(&self) -> [Option<&Tensor<'a>>; 9] {
        let Int4Kv { k, v, k_scale, v_scale, pages, means, mean_table, weights, .. } = self;
        let table = pages.table.as_ref();
        [
            Some(k),
            Some(v),
            Some(k_scale),
            Some(v_scale),
            table,
            Some(&pages.seq_lens),
            Some(means),
            mean_table.as_ref(),
            weights.as_ref(),
        ]
    }

    /// What `vwd_kv_quantize` writes.
    pub fn outputs(&self) -> [&Tensor<'a>; 6] {
        [&self.k, &self.v, &self.k_scale, &self.v_scale, &self.means, &self.pages.seq_lens]
    }

    /// The tokens of sequence `i`, which has `tokens`, that are coded.
    ///
    /// # Safety
    /// There is a sequence `i`, the op's caller keeps the tensors valid, and the session computes on the CPU.
    #[inline]
    pub unsafe fn coded(&self, i: usize, tokens: usize) -> Range<usize> {
        // SAFETY: as the caller says.
        let end = unsafe { self.pages.len(i) }.min(tokens);
        self.exact_tokens..end - end % self.block_size
    }

    /// The place of block `j`'s mean among the means: page and row.
    ///
    /// # Safety
    /// As for [`Int4Kv::coded`].
    pub unsafe fn mean_place(&self, i: usize, j: usize) -> Option<[usize; 2]> {
        let rows = self.means.dim(1);
        if rows == 0 {
            return None;
        }
        let (p, row) = (j / rows, j % rows);
        let page = match &self.mean_table {
            None => (p == 0).then_some(i),
            // SAFETY: the table has a row for each sequence, and p is inside it.
            Some(table) => (p < table.dim(1))
                .then(|| unsafe { table.get::<i32, 2>([i, p]) })
                .and_then(|page| usize::try_from(page).ok()),
        };
        page.filter(|&page| page < self.means.dim(0)).map(|page| [page, row])
    }

    /// The mean at a place that [`Int4Kv::mean_place`] gave, or of a slot's page, of KV head `head`; zeros where there is none.
    ///
    /// # Safety
    /// As for [`Int4Kv::coded`]; the place is inside the means, and `mean` has D elements.
    pub unsafe fn read_mean(&self, place: Option<[usize; 2]>, head: usize, mean: &mut [f32]) {
        let Some([page, row]) = place else { return mean.fill(0.0) };
        // SAFETY: as the caller says.
        unsafe {
            with_float!(self.means.dtype, T => {
                let from = self.means.row::<T, 3>([page, row, head]);
                match from.packed() {
                    Some(row) => dispatch(Widen { row, to: mean }),
                    None => mean.iter_mut().enumerate().for_each(|(d, x)| *x = from.get(d).to_f32()),
                }
            })
        }
    }

    /// The weights of KV head `head`.
    ///
    /// # Safety
    /// As for [`Int4Kv::coded`]; there is such a head.
    pub unsafe fn weights_of(&self, head: usize) -> [f32; MAX_CODED] {
        let mut weights = [1.0; MAX_CODED];
        // SAFETY: as the caller says; d is a channel.
        weights.iter_mut().take(self.means.dim(3)).enumerate().for_each(|(d, w)| *w = unsafe { self.weight(head, d) });
        weights
    }

    /// The weight of channel `d` of KV head `head`.
    ///
    /// # Safety
    /// As for [`Int4Kv::coded`]; there are such a head and channel.
    unsafe fn weight(&self, head: usize, d: usize) -> f32 {
        // SAFETY: as the caller says.
        valid_weight(self.weights.map_or(1.0, |weights| unsafe { weights.get::<f32, 2>([head, d]) }))
    }
}

/// What is not a finite number above 0 counts as 1.
pub fn valid_weight(weight: f32) -> f32 {
    if weight > 0.0 && weight.is_finite() { weight } else { 1.0 }
}

/// Checks sizes and dtype that options of that prefix give for blocks that are coded.
pub fn check_sizes(prefix: &str, block_size: usize, [key, value]: [usize; 2], dtype: DType) -> Result<()> {
    let error = |name: &str, found: String, expected| Err(Error::argument(&format!("{prefix}{name}"), found, expected));
    if dtype.is_float8() {
        return error("dtype_code", format!("{dtype} with INT4"), "float32, float16 or bfloat16");
    }
    if !is_block_size(block_size) {
        return error("block_size", format!("{block_size} with INT4"), "a multiple of 16 from 16 to 128");
    }
    for (name, dim) in [("key_dim", key), ("value_dim", value)] {
        if !is_dim(dim) {
            return error(name, format!("{dim} with INT4"), "a multiple of 16 from 64 to 256");
        }
    }
    Ok(())
}

fn is_block_size(block_size: usize) -> bool {
    (BLOCK_UNIT..=MAX_BLOCK).contains(&block_size) && block_size.is_multiple_of(BLOCK_UNIT)
}

fn is_dim(dim: usize) -> bool {
    (MIN_CODED..=MAX_CODED).contains(&dim) && dim.is_multiple_of(16)
}

/// Refuses what says where coded tokens lie, which the slots of a list do.
fn require_none_beside_slots(c: &vwd_int4_kv) -> Result<()> {
    let tensors = [("page_table", &c.page_table), ("coded_lens", &c.coded_lens), ("mean_table", &c.mean_table)];
    if let Some((name, _)) = tensors.into_iter().find(|(_, t)| given(t).is_some()) {
        let name = format!("kv.int4.{name}");
        return Err(Error::argument(&name, "given beside the slots of a list", "none: slots say what is coded"));
    }
    match c.exact_tokens {
        0 => Ok(()),
        n => Err(Error::argument("kv.int4.exact_tokens", n, "0 beside the slots of a list, which say what is coded")),
    }
}

/// A row of adjacent numbers in float32.
struct Widen<'r, T> {
    row: *const T,
    to: &'r mut [f32],
}

impl<T: Row> Kernel for Widen<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        // SAFETY: read_mean makes it of a row that is as long as its place.
        unsafe { widen::<L, T>(self.row, 1.0, self.to) }
    }
}

/// Codes a rotated row: the scale, and `store` gets the codes of two channels at a time. A row with a number that is not finite
/// has the scale NaN and codes 0.
#[inline(always)]
pub fn encode(y: &[f32], mut store: impl FnMut(usize, u8)) -> F8E4M3 {
    let most = y.iter().fold(0.0f32, |most, y| if y.is_finite() { most.max(y.abs()) } else { f32::INFINITY });
    let scale = if most.is_finite() { scale_of(most) } else { F8E4M3::NAN };
    let s = scale.to_f32();
    for (n, pair) in y.chunks_exact(2).enumerate() {
        let [low, high] = [pair[0], pair[1]].map(|y| code(y, s));
        store(n, low | high << 4);
    }
    scale
}

/// The scale of a row whose largest number is `most`.
fn scale_of(most: f32) -> F8E4M3 {
    let scale = F8E4M3::nearest(most / 7.5);
    if scale.0 == 0 && most > 0.0 { F8E4M3(1) } else { scale }
}

fn code(y: f32, scale: f32) -> u8 {
    match scale {
        _ if scale.is_nan() => 0,
        0.0 => 8,
        _ => ((y / scale).floor().clamp(-8.0, 7.0) + 8.0) as u8,
    }
}
