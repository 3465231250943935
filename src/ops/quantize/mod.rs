//! Coding of keys and values in INT4, and the weights of key channels.
//!
//! A block's mean is taken from its keys; a row is rotated, its scale is its largest number over 7.5, and its codes count scales from
//! there. `int4` says what codes stand for. Operations and their order are fixed, so that every backend gives the same bits.

pub mod block;
mod cpu;
mod cuda;
pub(crate) mod rows;

pub(crate) use cuda::Kernels;

use super::contents::{self, Number, Rule};
use super::int4::Int4Kv;
use super::views::{Heads, PagedKv};
use crate::abi::{vwd_int4_kv, vwd_kv_quantize_args, vwd_kv_weights_args, vwd_paged_kv, vwd_stream, vwd_tensor};
use crate::core::array::array;
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Checks, Tensor};
use crate::core::versioned::versioned;
use crate::runtime::{On, Session, require_no_flags};
use std::mem::MaybeUninit;

/// The most layers of a call.
pub const MOST_LAYERS: usize = 48;

/// Where one layer's tokens lie, exact and coded.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    pub kv: PagedKv<'a>,
    pub int4: Int4Kv<'a>,
}

impl<'a> Layer<'a> {
    fn checked(checks: &Checks, c: &'a vwd_paged_kv, room: &'a mut MaybeUninit<vwd_int4_kv>) -> Result<Layer<'a>> {
        let kv = PagedKv::from_c(checks, c, ANY, ANY, false)?;
        let int4 = Int4Kv::from_c(checks, c.int4, &kv, room)?;
        let Some(int4) = int4 else { return Err(Error::argument("kv.int4", "NULL", "where the codes go")) };
        let outputs = int4.outputs();
        for out in outputs {
            out.writable()?;
        }
        let [source, coded] = [&kv.pages, &int4.pages];
        let inputs = [
            Some(&kv.k),
            Some(&kv.v),
            source.table.as_ref(),
            Some(&source.seq_lens),
            coded.table.as_ref(),
            int4.mean_table.as_ref(),
            int4.weights.as_ref(),
        ];
        overlap::reject(&outputs.map(Some), &inputs)?;
        Ok(Layer { kv, int4 })
    }

    /// How many tokens of sequence `i` both caches have room for.
    ///
    /// # Safety
    /// There is such a sequence, the op's caller keeps the tensors valid, and the session computes on the CPU.
    pub unsafe fn tokens(&self, i: usize) -> usize {
        // SAFETY: says the caller.
        unsafe { self.kv.pages.len(i) }.min(self.int4.pages.capacity())
    }
}

/// Checked arguments of `vwd_kv_quantize`.
pub struct Request<'a> {
    checks: Checks,
    layers: &'a [*const vwd_paged_kv],
    pub first: Layer<'a>,
    /// [B]
    pub begin: Option<Tensor<'a>>,
}

// SAFETY: the structs of the layers do not change during the call.
unsafe impl Sync for Request<'_> {}

impl Request<'_> {
    /// Checks the arguments and hands them to `then`.
    ///
    /// # Safety
    /// The array of layers is NULL, or has as many pointers as `layer_count` says, each NULL or to a struct.
    pub unsafe fn with<R>(
        session: &Session,
        c: &vwd_kv_quantize_args,
        then: impl FnOnce(&Request) -> Result<R>,
    ) -> Result<R> {
        require_no_flags("flags", c.flags)?;
        let (checks, count) = (session.checks(), c.layer_count as usize);
        if !(1..=MOST_LAYERS).contains(&count) {
            return Err(Error::argument("layer_count", count, format!("1 to {MOST_LAYERS}")));
        }
        // SAFETY: the caller states the length.
        let layers = unsafe { array("layers", c.layers, count, "pointers")? };
        let mut rooms = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: says the caller.
        let kv = in_layer(0, unsafe { versioned(layers[0], "kv", &mut rooms.0) })?;
        let first = in_layer(0, Layer::checked(&checks, kv, &mut rooms.1))?;
        let begin = checks.optional_input("begin", &c.begin, &[DType::I32], &[("B", first.kv.pages.batch())])?;
        in_layer(0, overlap::reject(&first.int4.outputs().map(Some), &[begin.as_ref()]))?;
        let request = Request { checks, layers, first, begin };
        for n in 1..count {
            // SAFETY: says the caller.
            unsafe { request.with_layer(n, |layer| in_layer(n, request.first.require_alike(layer)))? }?;
        }
        then(&request)
    }

    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Hands a layer to `then`; the checks fail in `with` or never.
    ///
    /// # Safety
    /// The structs are as in [`Request::with`].
    pub unsafe fn with_layer<R>(&self, n: usize, then: impl FnOnce(&Layer) -> R) -> Result<R> {
        let (mut room, mut int4_room) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: says the caller.
        let kv = in_layer(n, unsafe { versioned(self.layers[n], "kv", &mut room) })?;
        Ok(then(&in_layer(n, Layer::checked(&self.checks, kv, &mut int4_room))?))
    }

    /// The first block of sequence `i` that may be coded.
    ///
    /// # Safety
    /// There is such a sequence, the op's caller keeps the tensors valid, and the session computes on the CPU.
    pub unsafe fn first_block(&self, i: usize) -> usize {
        // SAFETY: says the caller.
        let begin = self.begin.map_or(0, |begin| unsafe { begin.get::<i32, 1>([i]) }.max(0) as usize);
        begin.max(self.first.int4.exact_tokens).div_ceil(self.first.int4.block_size)
    }

    /// What a session that checks contents reads: lengths, and pages of the tokens from `begin` on.
    fn contents(&self) -> Vec<Rule<'_>> {
        let (pages, coded) = (&self.first.kv.pages, &self.first.int4.pages);
        let tokens = Number::of(pages.seq_lens);
        let mut rules = vec![contents::seq_lens(pages)];
        rules.extend(self.begin.map(|begin| Rule::within(begin, 0, tokens.plus(1))));
        rules.extend(contents::page_table(pages, self.begin));
        rules.extend(coded.table.filter(|_| coded.size > 0).map(|table| {
            let from = self.begin.map_or(Number::constant(0), |begin| Number::of(begin).over(coded.size));
            Rule::within(table, -1, Number::constant(coded.count)).between(1, from, tokens.over_up(coded.size))
        }));
        rules
    }
}

/// A layer's error names the layer.
fn in_layer<T>(n: usize, result: Result<T>) -> Result<T> {
    result.map_err(|error| match error.message.strip_prefix("kv") {
        Some(rest) => Error::new(error.code, format!("layers[{n}]{rest}")),
        None => error,
    })
}

impl<'a> Layer<'a> {
    /// The tensors that each layer has of its own.
    fn of_the_layer(&self) -> [Option<Tensor<'a>>; 8] {
        let Int4Kv { k, v, k_scale, v_scale, means, weights, .. } = self.int4;
        [Some(self.kv.k), Some(self.kv.v), Some(k), Some(v), Some(k_scale), Some(v_scale), Some(means), weights]
    }

    /// The tensors that all layers share.
    fn of_all_layers(&self) -> [Option<Tensor<'a>>; 5] {
        let (pages, coded) = (&self.kv.pages, &self.int4.pages);
        [pages.table, Some(pages.seq_lens), coded.table, Some(coded.seq_lens), self.int4.mean_table]
    }

    /// Whether `other` differs in addresses alone, and in none of those that all layers share.
    fn require_alike(&self, other: &Layer) -> Result<()> {
        let (mine, its) = (&self.int4, &other.int4);
        if (mine.block_size, mine.exact_tokens) != (its.block_size, its.exact_tokens) {
            let found = format!("blocks of {}, {} exact tokens", its.block_size, its.exact_tokens);
            let expected = format!("{} and {}, as the first layer has", mine.block_size, mine.exact_tokens);
            return Err(Error::argument("kv.int4", found, expected));
        }
        const NAMES: [&str; 8] =
            ["k", "v", "int4.k", "int4.v", "int4.k_scale", "int4.v_scale", "int4.means", "int4.weights"];
        const SHARED: [&str; 5] = ["page_table", "seq_lens", "int4.page_table", "int4.coded_lens", "int4.mean_table"];
        for ((name, first), other) in NAMES.into_iter().zip(self.of_the_layer()).zip(other.of_the_layer()) {
            require_same(name, first, other, false)?;
        }
        for ((name, first), other) in SHARED.into_iter().zip(self.of_all_layers()).zip(other.of_all_layers()) {
            require_same(name, first, other, true)?;
        }
        Ok(())
    }
}

/// Both are absent, or of one dtype, shape and strides, and where `shared` at one address.
fn require_same(name: &str, first: Option<Tensor>, other: Option<Tensor>, shared: bool) -> Result<()> {
    let describe = |t: &Tensor| format!("{} {:?} with strides {:?}", t.dtype, t.shape(), t.strides());
    let is_same = match (&first, &other) {
        (None, None) => true,
        (Some(a), Some(b)) => {
            let alike = a.dtype == b.dtype && a.shape() == b.shape() && a.strides() == b.strides();
            alike && (!shared || a.data() == b.data())
        }
        _ => false,
    };
    if is_same {
        return Ok(());
    }
    let found = other.as_ref().map_or("absent".to_owned(), describe);
    let expected = match (&first, shared) {
        (None, _) => "none, as in the first layer".to_owned(),
        (Some(first), false) => format!("{}, as in the first layer", describe(first)),
        (Some(first), true) => format!("the first layer's own, {} at {:p}", describe(first), first.data()),
    };
    Err(Error::argument(&format!("kv.{name}"), found, expected))
}

pub fn run(session: &Session, request: &Request, stream: vwd_stream) -> Result<()> {
    let on = session.on(stream)?;
    in_layer(0, contents::check(session, &on, || request.contents()))?;
    match on {
        On::Cpu(cpu) => cpu::run(cpu, request),
        On::Cuda(enqueue) => cuda::run(&enqueue, request),
    }
}

/// Checked arguments of `vwd_kv_weights`.
pub struct WeightsRequest<'a> {
    /// [Tq, Hq, D]
    pub q: Tensor<'a>,
    /// [Tk, Hk, D]
    pub k: Tensor<'a>,
    pub heads: Heads,
    pub block_size: usize,
    /// [Hk, D]
    pub weights: Tensor<'a>,
}

impl<'a> WeightsRequest<'a> {
    pub fn from_c(session: &Session, c: &'a vwd_kv_weights_args) -> Result<WeightsRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        if c.block_size == 0 {
            return Err(Error::argument("block_size", 0, "at least 1"));
        }
        let checks = session.checks();
        let tensor = |name, t: &'a vwd_tensor, dtypes: &[DType], shape| checks.input(name, t, dtypes, shape);
        let q = tensor("q", &c.q, DType::FLOATS, &[("Tq", ANY), ("Hq", ANY), ("D", ANY)])?;
        let k = tensor("k", &c.k, &[q.dtype], &[("Tk", ANY), ("Hk", ANY), ("D", q.dim(2))])?;
        let heads = Heads::new(&q, k.dim(1))?;
        let weights = checks.output("weights", &c.weights, &[DType::F32], &[("Hk", heads.kv), ("D", heads.dim)])?;
        overlap::reject(&[Some(&weights)], &[Some(&q), Some(&k)])?;
        Ok(WeightsRequest { q, k, heads, block_size: c.block_size as usize, weights })
    }
}

pub fn weights(session: &Session, request: &WeightsRequest, stream: vwd_stream) -> Result<()> {
    match session.on(stream)? {
        On::Cpu(cpu) => {
            cpu::weights(cpu, request);
            Ok(())
        }
        On::Cuda(enqueue) => cuda::weights(&enqueue, request),
    }
}
