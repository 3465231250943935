//! The decoder: the attention of decode steps on the engine's own paged keys and values.
//!
//! `begin` distributes the rows of a step: some attend a selection of their blocks, some all their tokens, some take no part.
//! `attend` then composes, for one layer, what the library has: the new tokens go to their pages, the blocks that they touch are
//! summarised, blocks are selected, and attention reads them. Who attends how is in q_lens of the calls: a row has no positions
//! in the call that is not for it.
//!
//! Summaries lie by page of the engine's cache. So a sequence that joins, leaves, moves to another row or shares the pages of a
//! prefix needs no call here.

mod cpu;
mod cuda;
mod memory;
mod options;
mod rows;

pub(crate) use cuda::Kernels;

use crate::abi::{
    VWD_DECODER_DENSE, VWD_DECODER_SPARSE, VWD_INDEX_AXIS, VWD_INDEX_MINMAX, VWD_SELECT_AXIS, VWD_SELECT_MINMAX,
    Versioned, vwd_attention_args, vwd_block_list, vwd_decoder_accept_args, vwd_decoder_attend_args,
    vwd_decoder_details, vwd_decoder_options, vwd_decoder_reset_args, vwd_decoder_step, vwd_index,
    vwd_index_update_args, vwd_paged_kv, vwd_select_blocks_args, vwd_stream, vwd_tensor, vwd_verify_args,
};
use crate::core::allocate::filled;
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor, given, strided};
use crate::ops::contents::{self, Number, Rule};
use crate::ops::views::Pages;
use crate::ops::{attention, index, select, verify};
use crate::runtime::{On, Session, require_no_flags};
use memory::{Memory, Plan, summary_rows};
use options::{Method, Options, Policy};
use parking_lot::Mutex;
use rows::{Append, Distribute, Drafts, Modes, Observe, Take, acceptance};
use std::sync::Arc;

pub struct Decoder {
    session: Arc<Session>,
    options: Options,
    plan: Plan,
    memory: Memory,
    step: Mutex<Option<Step>>,
}

/// What the layers of a step have in common.
#[derive(Clone, Copy)]
struct Step {
    page_table: vwd_tensor,
    seq_lens: vwd_tensor,
    batch: usize,
    /// Q
    positions: usize,
    /// The mode of all rows, if they have one.
    mode: Option<u32>,
    shortest: u32,
}

/// An argument struct with its size set and all else zero.
fn zeroed<T: Versioned>() -> T {
    // SAFETY: all-zero bytes are a valid `Versioned` struct, which starts with its `u32` size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<u32>().write(size_of::<T>() as u32);
        value
    }
}

impl Decoder {
    /// # Safety
    /// The arrays of the options have the lengths that these state.
    pub unsafe fn create(session: &Arc<Session>, c: &vwd_decoder_options) -> Result<Decoder> {
        // SAFETY: says the caller.
        let options = unsafe { Options::from_c(&session.checks(), c)? };
        let plan = Plan::of(&options)?;
        let memory = Memory::alloc(session, &plan)?;
        let decoder = Decoder { session: session.clone(), options, plan, memory, step: Mutex::new(None) };
        let (count, drafts, expected) = (decoder.options.max_sequences, decoder.drafts(), acceptance(0.0, 0.0));
        const PURPOSE: &str = "what a decoder recommends";
        decoder.memory.write(decoder.plan.acceptance, &filled(expected, count, PURPOSE)?)?;
        decoder.memory.write(decoder.plan.draft_lens, &filled(drafts.recommended(expected), count, PURPOSE)?)?;
        Ok(decoder)
    }

    pub fn details(&self) -> vwd_decoder_details {
        let (plan, count) = (&self.plan, self.options.max_sequences);
        let of_sequences = |at: usize, dtype: DType| self.tensor(at, dtype, &[count], &[1]);
        vwd_decoder_details {
            struct_size: size_of::<vwd_decoder_details>() as u32,
            flags: 0,
            bytes: self.memory.bytes() as u64,
            draft_lens: of_sequences(plan.draft_lens, DType::I32),
            acceptance: of_sequences(plan.acceptance, DType::F32),
            drafted: of_sequences(plan.drafted, DType::I32),
            accepted: of_sequences(plan.accepted, DType::I32),
        }
    }

    // --- a step --------------------------------------------------------------------------------------------------

    pub fn begin(&self, c: &vwd_decoder_step, stream: vwd_stream) -> Result<()> {
        require_no_flags("flags", c.flags)?;
        let (checks, i32, options) = (self.session.checks(), &[DType::I32], &self.options);
        let positions = c.positions.max(1) as usize;
        if positions > options.max_positions {
            let expected = format!("at most max_positions, {}", options.max_positions);
            return Err(Error::argument("positions", positions, expected));
        }
        let seq_lens = checks.input("seq_lens", &c.seq_lens, i32, &[("B", ANY)])?;
        if seq_lens.dim(0) > options.max_rows {
            let expected = format!("at most max_rows, {}", options.max_rows);
            return Err(Error::argument("seq_lens", format!("{} rows", seq_lens.dim(0)), expected));
        }
        let batch = ("B", seq_lens.dim(0));
        let table = checks.optional_input("page_table", &c.page_table, i32, &[batch, ("max_pages", ANY)])?;
        let q_lens = checks.optional_input("q_lens", &c.q_lens, i32, &[batch])?;
        let begin = checks.optional_input("begin", &c.begin, i32, &[batch])?;
        let each = checks.optional_input("modes", &c.modes, i32, &[batch])?;
        let mode = match (c.mode, each) {
            (0, Some(_)) => None,
            (0, None) => Some(VWD_DECODER_SPARSE),
            (VWD_DECODER_SPARSE | VWD_DECODER_DENSE, None) => Some(c.mode),
            (VWD_DECODER_SPARSE | VWD_DECODER_DENSE, Some(_)) => {
                return Err(Error::argument("mode", c.mode, "0 beside modes"));
            }
            (other, _) => return Err(Error::argument("mode", other, "a VWD_DECODER_* value (0 to 2)")),
        };
        let room = options.page_size.saturating_mul(table.map_or(1, |table| table.dim(1)));
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || {
            let modes = each.map(|modes| Rule::within(modes, 0, Number::constant(3)));
            let q_lens = q_lens.map(|lens| Rule::up_to(lens, positions));
            let begin = begin.map(|begin| Rule::up_to(begin, i32::MAX as usize));
            let lens = Rule::up_to(seq_lens, room.min(i32::MAX as usize));
            [Some(lens), modes, q_lens, begin].into_iter().flatten().collect()
        })?;
        let (plan, memory) = (&self.plan, &self.memory);
        let distribute = Distribute {
            modes: each.map_or(Modes::All(mode.unwrap_or(0)), Modes::Each),
            seq_lens,
            q_lens,
            begin,
            positions,
            page_size: options.page_size,
            shortest: c.shortest,
            classes: plan.thresholds.len(),
            max_rows: options.max_rows,
            thresholds: memory.at(plan.thresholds_at),
            lens: memory.at(plan.lens),
            rows: memory.at(plan.rows),
            from: memory.at(plan.from),
        };
        distribute.run(&on)?;
        *self.step.lock() = Some(Step {
            page_table: c.page_table,
            seq_lens: c.seq_lens,
            batch: batch.1,
            positions,
            mode,
            shortest: c.shortest,
        });
        Ok(())
    }

    pub fn attend(&self, c: &vwd_decoder_attend_args, stream: vwd_stream) -> Result<()> {
        let layer = Layer::new(self, c)?;
        layer.check()?;
        let on = self.session.on(stream)?;
        if let Some(append) = layer.append()? {
            contents::check(&self.session, &on, || {
                let pages = &append.pages;
                [contents::seq_lens(pages)].into_iter().chain(contents::page_table(pages, None)).collect()
            })?;
            append.run(&on)?;
        }
        drop(on);
        layer.summarise(stream)?;
        if given(&c.q).is_none() {
            return Ok(());
        }
        if layer.has_sparse() {
            layer.select(stream)?;
            let (args, kv) = (layer.sparse(), layer.kv());
            attention::Request::with(&self.session, &args, &kv, |r| attention::run(&self.session, r, stream))?;
        }
        if layer.has_dense() {
            let (args, kv) = (layer.dense(), layer.kv());
            attention::Request::with(&self.session, &args, &kv, |r| attention::run(&self.session, r, stream))?;
        }
        if layer.has_sparse() && layer.has_dense() {
            let (checks, scratch) = (self.session.checks(), layer.dense().out);
            let (from, to) = (checks.required("dense", &scratch)?, checks.required("out", &c.out)?);
            Take { from, to, lens: layer.lens(1) }.run(&self.session.on(stream)?)?;
        }
        Ok(())
    }

    /// Bytes of scratch that `attend` takes from its stream's arena.
    pub fn attend_scratch(&self, c: &vwd_decoder_attend_args) -> Result<u64> {
        let (layer, session) = (Layer::new(self, c)?, &*self.session);
        layer.check()?;
        let mut most = 0;
        if given(&c.q).is_none() {
            return Ok(most);
        }
        let kv = layer.kv();
        if layer.has_sparse() {
            let (select, index) = (layer.select_args(), layer.index());
            let of_select = select::blocks_scratch(session, &select::Request::of_blocks(session, &select, &index)?)?;
            let of_sparse =
                attention::Request::with(session, &layer.sparse(), &kv, |r| attention::scratch(session, r))?;
            most = most.max(of_select).max(of_sparse);
        }
        if layer.has_dense() {
            let of_dense = attention::Request::with(session, &layer.dense(), &kv, |r| attention::scratch(session, r))?;
            most = most.max(of_dense);
        }
        Ok(most)
    }

    // --- drafts --------------------------------------------------------------------------------------------------

    pub fn accept(&self, c: &vwd_decoder_accept_args, stream: vwd_stream) -> Result<()> {
        require_no_flags("flags", c.flags)?;
        let args = vwd_verify_args {
            draft: c.draft,
            target: c.target,
            draft_lens: c.draft_lens,
            accepted: c.accepted,
            next_token: c.next_token,
            committed: c.committed,
            ..zeroed()
        };
        let request = verify::Request::from_c(&self.session, &args)?;
        let checks = self.session.checks();
        let sequences = checks.optional_input("sequences", &c.sequences, &[DType::I32], &[("B", request.batch())])?;
        let [accepted, next, _, committed] = request.outputs();
        overlap::reject(&[accepted, next, committed], &[sequences.as_ref()])?;
        if sequences.is_none() && request.batch() > self.options.max_sequences {
            let expected = format!("at most max_sequences, {}", self.options.max_sequences);
            return Err(Error::argument("draft", format!("{} rows without sequences", request.batch()), expected));
        }
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || self.rules(sequences))?;
        drop(on);
        verify::run(&self.session, &request, stream)?;
        let observe = Observe {
            drafts: self.drafts(),
            sequences,
            rows: request.batch(),
            accepted: Some(request.accepted),
            draft_lens: request.draft_lens,
            gamma: request.gamma(),
        };
        observe.run(&self.session.on(stream)?)
    }

    pub fn reset(&self, c: &vwd_decoder_reset_args, stream: vwd_stream) -> Result<()> {
        require_no_flags("flags", c.flags)?;
        let checks = self.session.checks();
        let sequences = checks.optional_input("sequences", &c.sequences, &[DType::I32], &[("n", ANY)])?;
        let rows = sequences.map_or(self.options.max_sequences, |sequences| sequences.dim(0));
        let on = self.session.on(stream)?;
        contents::check(&self.session, &on, || self.rules(sequences))?;
        let drafts = self.drafts();
        Observe { drafts, sequences, rows, accepted: None, draft_lens: None, gamma: 0 }.run(&on)
    }

    fn rules<'a>(&self, sequences: Option<Tensor<'a>>) -> Vec<Rule<'a>> {
        let most = Number::constant(self.options.max_sequences);
        sequences.map_or(Vec::new(), |t| vec![Rule::within(t, -1, most), Rule::distinct(t)])
    }

    fn drafts(&self) -> Drafts {
        let (plan, memory) = (&self.plan, &self.memory);
        Drafts {
            count: self.options.max_sequences,
            most: self.options.max_draft,
            cost: self.options.draft_cost,
            hits: memory.at(plan.hits),
            trials: memory.at(plan.trials),
            acceptance: memory.at(plan.acceptance),
            draft_lens: memory.at(plan.draft_lens),
            drafted: memory.at(plan.drafted),
            accepted: memory.at(plan.accepted),
        }
    }

    /// A view of the decoder's memory; steps are in elements.
    fn tensor(&self, offset: usize, dtype: DType, extents: &[usize], steps: &[usize]) -> vwd_tensor {
        strided(self.session.device(), self.memory.at(offset), dtype, extents, steps)
    }

    /// The same, packed in C order.
    fn packed(&self, offset: usize, dtype: DType, extents: &[usize]) -> vwd_tensor {
        let mut steps = [1; 4];
        for d in (1..extents.len()).rev() {
            steps[d - 1] = steps[d] * extents[d];
        }
        self.tensor(offset, dtype, extents, &steps)
    }
}

/// The calls of one layer in a step.
struct Layer<'a> {
    decoder: &'a Decoder,
    args: &'a vwd_decoder_attend_args,
    step: Step,
    number: usize,
    policy: &'a Policy,
}

impl<'a> Layer<'a> {
    fn new(decoder: &'a Decoder, args: &'a vwd_decoder_attend_args) -> Result<Layer<'a>> {
        require_no_flags("flags", args.flags)?;
        let layers = &decoder.options.layers;
        let number = args.layer as usize;
        let Some(policy) = layers.get(number) else {
            return Err(Error::argument("layer", args.layer, format!("0 … {}", layers.len() - 1)));
        };
        let Some(step) = *decoder.step.lock() else {
            return Err(Error::argument("decoder", "no step", "vwd_decoder_begin first"));
        };
        Ok(Layer { decoder, args, step, number, policy })
    }

    /// Whether some row may attend a selection; and whether some row may attend all tokens.
    fn has_sparse(&self) -> bool {
        self.policy.method != Method::Dense && self.step.mode != Some(VWD_DECODER_DENSE)
    }

    fn has_dense(&self) -> bool {
        self.step.mode != Some(VWD_DECODER_SPARSE) || self.step.shortest as i64 <= self.policy.threshold as i64
    }

    /// Makes all checks of the layer's calls before the first of them runs.
    fn check(&self) -> Result<()> {
        let Layer { decoder: Decoder { session, options, .. }, args, .. } = self;
        let checks = session.checks();
        let [dim, value_dim] = options.dims;
        let pages = [("pages", options.pages), ("P", options.page_size), ("Hk", options.kv_heads)];
        let with = |last: (&'static str, usize)| [pages[0], pages[1], pages[2], last];
        let (k, v) = (("D", dim), ("Dv", value_dim));
        let dtype = &[options.dtype];
        let keys = checks.input("k", &args.k, dtype, &with(k))?;
        let values = checks.input("v", &args.v, dtype, &with(v))?;
        let update = self.update_args();
        if self.policy.method != Method::Dense {
            index::UpdateRequest::from_c(session, &update, &self.index())?;
        }
        if let Some(append) = self.append()? {
            let [(new_k, _), (new_v, _)] = &append.parts;
            overlap::reject(&[Some(&keys)], &[Some(new_k), Some(new_v)])?;
            overlap::reject(&[Some(&values)], &[Some(new_k), Some(new_v)])?;
        }
        if given(&args.q).is_none() {
            return Ok(());
        }
        let heads = ("Hq", options.query_heads);
        let rank = args.q.ndim;
        self.rows("q", &args.q, DType::FLOATS, heads, k)?;
        self.rows("out", &args.out, DType::FLOATS, heads, v)?;
        if args.out.ndim != rank {
            return Err(Error::argument("out", format!("rank {}", args.out.ndim), format!("rank {rank}, as q")));
        }
        let kv = self.kv();
        if self.has_sparse() {
            select::Request::of_blocks(session, &self.select_args(), &self.index())?;
            attention::Request::with(session, &self.sparse(), &kv, |_| Ok(()))?;
        }
        if self.has_dense() {
            // Into the caller's tensor: what is wrong with it is found here.
            let args = vwd_attention_args { out: args.out, ..self.dense() };
            attention::Request::with(session, &args, &kv, |_| Ok(()))?;
        }
        Ok(())
    }

    /// Rows of the step: [B, heads, channels], or with Q after B.
    fn rows<'t>(
        &self,
        name: &'static str,
        t: &'t vwd_tensor,
        dtypes: &[DType],
        heads: (&'static str, usize),
        channels: (&'static str, usize),
    ) -> Result<Tensor<'t>> {
        let (checks, batch) = (self.decoder.session.checks(), ("B", self.step.batch));
        if t.ndim == 3 && self.step.positions == 1 {
            return checks.input(name, t, dtypes, &[batch, heads, channels]);
        }
        checks.input(name, t, dtypes, &[batch, ("Q", self.step.positions), heads, channels])
    }

    // --- the arguments of the calls ------------------------------------------------------------------------------

    fn append(&self) -> Result<Option<Append<'_>>> {
        let Layer { decoder: Decoder { session, options, plan, memory, .. }, args, step, .. } = self;
        match (given(&args.new_k).is_some(), given(&args.new_v).is_some()) {
            (false, false) => return Ok(None),
            (true, true) => {}
            (false, true) => return Err(Error::argument("new_k", "data is NULL", "a tensor beside new_v")),
            (true, false) => return Err(Error::argument("new_v", "data is NULL", "a tensor beside new_k")),
        }
        let (checks, heads, dtype) = (session.checks(), ("Hk", options.kv_heads), &[options.dtype]);
        let new_k = self.rows("new_k", &args.new_k, dtype, heads, ("D", options.dims[0]))?;
        let new_v = self.rows("new_v", &args.new_v, dtype, heads, ("Dv", options.dims[1]))?;
        let k = checks.required("k", &args.k)?.of_rank(4)?.writable()?;
        let v = checks.required("v", &args.v)?.of_rank(4)?.writable()?;
        let pages = Pages::new(&checks, &k, ["page_table", "seq_lens"], &step.page_table, &step.seq_lens, ("B", ANY))?;
        let rows = memory.at(plan.rows);
        Ok(Some(Append { pages, positions: step.positions, rows, parts: [(new_k, k), (new_v, v)] }))
    }

    fn index(&self) -> vwd_index {
        let (decoder, step) = (self.decoder, &self.step);
        let Options { pages, kv_heads, dims, block_size, learned, .. } = &decoder.options;
        let offsets = decoder.plan.summaries[self.number];
        let kinds = summary_rows(&decoder.options, self.policy.method);
        let [first, second] = std::array::from_fn(|n| {
            let (channels, dtype) = kinds[n];
            let extents = [*pages, decoder.options.blocks_per_page(), *kv_heads, channels];
            decoder.packed(offsets[n], dtype, &extents)
        });
        let mut index = vwd_index { block_size: *block_size as u32, table: step.page_table, ..zeroed() };
        // A block of several pages has its summary in the first of them.
        let several = decoder.options.pages_per_block() as i64;
        index.table.shape[1] = (index.table.shape[1] + several - 1) / several;
        index.table.strides[1] *= several;
        match self.policy.method {
            Method::Dense => {}
            Method::MinMax => {
                (index.kind, index.key_max, index.key_min) = (VWD_INDEX_MINMAX, first, second);
            }
            Method::Axis => {
                (index.kind, index.axes, index.axis_range) = (VWD_INDEX_AXIS, first, second);
                [index.axis_weights, index.axis_centre] = learned.map(|t| of_layer(t, self.number, *kv_heads, dims[0]));
            }
        }
        index
    }

    fn update_args(&self) -> vwd_index_update_args {
        let Layer { decoder, args, step, .. } = self;
        let begin = decoder.tensor(decoder.plan.from, DType::I32, &[step.batch], &[1]);
        let (k, k_scale, page_table, seq_lens) = (args.k, args.k_scale, step.page_table, step.seq_lens);
        vwd_index_update_args { k, k_scale, page_table, seq_lens, begin, ..zeroed() }
    }

    fn summarise(&self, stream: vwd_stream) -> Result<()> {
        if self.policy.method == Method::Dense {
            return Ok(());
        }
        let (session, args, index) = (&self.decoder.session, self.update_args(), self.index());
        index::update(session, &index::UpdateRequest::from_c(session, &args, &index)?, stream)
    }

    fn list(&self) -> vwd_block_list {
        let (decoder, batch) = (self.decoder, self.step.batch);
        let (heads, cap) = (decoder.options.kv_heads, decoder.options.capacity());
        vwd_block_list {
            ids: decoder.packed(decoder.plan.ids, DType::I32, &[batch, heads, cap]),
            counts: decoder.packed(decoder.plan.counts, DType::I32, &[batch, heads]),
            slots: strided(decoder.session.device(), std::ptr::null_mut(), DType::I32, &[], &[]),
        }
    }

    /// The positions of each row that attend a selection (0) or all tokens (1).
    fn lens(&self, kind: usize) -> *const i32 {
        self.decoder.memory.at(self.lens_at(kind))
    }

    fn lens_at(&self, kind: usize) -> usize {
        let plan = &self.decoder.plan;
        let row = plan.class_of[self.number] * 2 + kind;
        plan.lens + row * self.decoder.options.max_rows * size_of::<i32>()
    }

    fn q_lens(&self, kind: usize) -> vwd_tensor {
        self.decoder.tensor(self.lens_at(kind), DType::I32, &[self.step.batch], &[1])
    }

    fn select_args(&self) -> vwd_select_blocks_args {
        let Layer { decoder, args, step, policy, .. } = self;
        vwd_select_blocks_args {
            method: if policy.method == Method::Axis { VWD_SELECT_AXIS } else { VWD_SELECT_MINMAX },
            block_size: decoder.options.block_size as u32,
            k: policy.k,
            init_blocks: policy.init,
            local_blocks: policy.local,
            scale: decoder.options.scale,
            q: args.q,
            q_lens: self.q_lens(0),
            seq_lens: step.seq_lens,
            selected: self.list(),
            ..zeroed()
        }
    }

    fn select(&self, stream: vwd_stream) -> Result<()> {
        let (session, args, index) = (&self.decoder.session, self.select_args(), self.index());
        select::blocks(session, &select::Request::of_blocks(session, &args, &index)?, stream)
    }

    fn kv(&self) -> vwd_paged_kv {
        let vwd_decoder_attend_args { k, v, k_scale, v_scale, .. } = *self.args;
        let Step { page_table, seq_lens, .. } = self.step;
        vwd_paged_kv { k, v, page_table, seq_lens, k_scale, v_scale, ..zeroed() }
    }

    fn attention(&self) -> vwd_attention_args {
        let (options, args) = (&self.decoder.options, self.args);
        vwd_attention_args {
            scale: options.scale,
            soft_cap: options.soft_cap,
            window: self.policy.window,
            q: args.q,
            sinks: args.sinks,
            ..zeroed()
        }
    }

    fn sparse(&self) -> vwd_attention_args {
        vwd_attention_args {
            block_size: self.decoder.options.block_size as u32,
            q_lens: self.q_lens(0),
            list: self.list(),
            out: self.args.out,
            ..self.attention()
        }
    }

    /// Into the decoder's memory if there are sparse rows, too: attention clears the rows that it does not take.
    fn dense(&self) -> vwd_attention_args {
        let Layer { decoder, args, step, .. } = self;
        let mut out = args.out;
        if self.has_sparse() {
            let (heads, dim) = (decoder.options.query_heads, decoder.options.dims[1]);
            let dtype = DType { code: out.dtype_code, bits: out.dtype_bits };
            out = match out.ndim {
                4 => decoder.packed(decoder.plan.dense, dtype, &[step.batch, step.positions, heads, dim]),
                _ => decoder.packed(decoder.plan.dense, dtype, &[step.batch, heads, dim]),
            };
        }
        vwd_attention_args { q_lens: self.q_lens(1), out, ..self.attention() }
    }
}

// Which backend computes what the decoder computes itself.

impl Distribute<'_> {
    fn run(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(cpu) => {
                cpu::distribute(cpu, self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::distribute(enqueue, self),
        }
    }
}

impl Append<'_> {
    fn run(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(cpu) => {
                cpu::append(cpu, self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::append(enqueue, self),
        }
    }
}

impl Take<'_> {
    fn run(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(cpu) => {
                cpu::take(cpu, self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::take(enqueue, self),
        }
    }
}

impl Observe<'_> {
    fn run(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(_) => {
                cpu::observe(self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::observe(enqueue, self),
        }
    }
}

/// A layer of [layers, Hk, D]; absent if it is.
fn of_layer(t: vwd_tensor, layer: usize, heads: usize, dim: usize) -> vwd_tensor {
    if t.data.is_null() {
        return t;
    }
    let offset = layer as i64 * t.strides[0] * size_of::<f32>() as i64;
    let (mut shape, mut strides) = ([0; 5], [0; 5]);
    (shape[0], shape[1]) = (heads as i64, dim as i64);
    (strides[0], strides[1]) = (t.strides[1], t.strides[2]);
    vwd_tensor { data: t.data.cast::<u8>().wrapping_offset(offset as isize).cast(), ndim: 2, shape, strides, ..t }
}
