//! Attention in one layer of a step, by the layer's strategy.
//!
//!   SERIAL    summaries, selection, attention over what it selected
//!   PRR       attention over the predicted list, on a branch, while the selection runs; exact repair
//!   FORESEEN  attention over the foreseen list, while summaries are made on a branch; SERIAL for rows of which nothing was foreseen
//!
//! On a tiered cache these are SERIAL, VANWARD and SPARDA, and there is ASYNC_TLS; `attend_tiered` has them.
//!
//! Rows that attend all tokens come last; on a tiered cache they read the tokens where these lie. Each call is for some of the rows: its q_lens
//! give the other rows no positions.

use super::layer::Layer;
use super::memory::Kind;
use super::options::{Method, Options, Strategy};
use super::rows::Append;
use super::{Decoder, SPECULATION, Step};
use crate::abi::{
    VWD_ATTENTION_KEEP_ROWS, VWD_REPAIR_EXACT, vwd_attention_args, vwd_attention_partials, vwd_block_list,
    vwd_decoder_attend_args, vwd_holt, vwd_index_update_args, vwd_kv_cache_layer, vwd_paged_kv,
    vwd_predictor_predict_args, vwd_predictor_update_args, vwd_remainder, vwd_repair_args, vwd_select_blocks_args,
    vwd_stream, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, Tensor, given};
use crate::core::versioned::zeroed;
use crate::decode::predictor;
use crate::ops::views::Pages;
use crate::ops::{attention, contents, index, repair, select};
use crate::runtime::cuda::{Branch, Enqueue};
use crate::runtime::{On, require_no_flags};

pub struct Attend<'a> {
    pub(super) layer: Layer<'a>,
    pub(super) args: &'a vwd_decoder_attend_args,
    /// What the term for what lists leave out is made of.
    pub(super) remainder: vwd_remainder,
}

impl<'a> Attend<'a> {
    /// Makes all checks of the layer's calls before the first of them runs.
    pub fn new(decoder: &'a Decoder, args: &'a vwd_decoder_attend_args) -> Result<Attend<'a>> {
        require_no_flags("flags", args.flags)?;
        let attend = Attend::of(Layer::new(decoder, args.layer)?, args);
        attend.check()?;
        Ok(attend)
    }

    fn of(layer: Layer<'a>, args: &'a vwd_decoder_attend_args) -> Attend<'a> {
        let remainder = layer.remainder();
        Attend { layer, args, remainder }
    }

    pub fn run(&self, stream: vwd_stream) -> Result<()> {
        let session = &self.layer.decoder.session;
        let on = session.on(stream)?;
        // Joined whether it was foreseen or not: a call that failed may have left something to join.
        let is_foreseen = self.layer.join_foresight(&on)? && self.layer.is_foreseen();
        if let Some(tiered) = &self.layer.decoder.tiered {
            drop(on);
            if let Some(args) = self.append_args() {
                tiered.append(&args, stream)?;
            }
        } else if let Some(append) = self.append()? {
            contents::check(session, &on, || {
                let pages = &append.pages;
                [contents::seq_lens(pages)].into_iter().chain(contents::page_table(pages, None)).collect()
            })?;
            append.run(&on)?;
            drop(on);
        }
        if given(&self.args.q).is_none() {
            return self.summarise(stream);
        }
        match (self.layer.strategy(), &self.layer.decoder.tiered) {
            _ if !self.layer.has_sparse() => self.summarise(stream)?,
            (Strategy::Foreseen, _) if is_foreseen => self.attend_foreseen(stream)?,
            (Strategy::PrrForeseen, _) if is_foreseen => self.predict_and_repair(None, stream)?,
            (Strategy::PrrByScores { alpha, beta, gamma }, _) => {
                self.predict_and_repair(Some(vwd_holt { alpha, beta, gamma }), stream)?;
            }
            (Strategy::AsyncTls, Some(tiered)) => self.attend_past(tiered, stream)?,
            _ => self.attend_selected(stream)?,
        }
        match &self.layer.decoder.tiered {
            _ if !self.layer.has_dense() => Ok(()),
            Some(tiered) => self.attend_stored(tiered, stream),
            None => self.attention(&self.over_all(), stream),
        }
    }

    /// Bytes of scratch that the calls take from their stream's arena, whether the layer falls back in the step or not. Makes the arenas
    /// of the branches large enough for theirs.
    pub fn scratch(&self) -> Result<u64> {
        let by_strategy = Attend::of(self.layer.without_fallback(), self.args).scratch_of_step()?;
        Ok(by_strategy.max(self.scratch_of_step()?))
    }

    fn scratch_of_step(&self) -> Result<u64> {
        let Layer { decoder, .. } = &self.layer;
        let mut most = 0;
        if given(&self.args.q).is_none() {
            return Ok(most);
        }
        if self.layer.has_sparse() {
            let strategy = self.layer.strategy();
            let select = self.select_args(Kind::Sparse, strategy.remembers());
            most = most.max(self.layer.select_scratch(&select)?);
            most = most.max(self.attention_scratch(&self.over_selected(Kind::Sparse))?);
            if strategy == Strategy::AsyncTls {
                decoder.speculation.reserve(self.layer.select_scratch(&select)?)?;
            }
            if let (true, Some(tiered)) = (strategy.repairs(), &decoder.tiered) {
                most = most.max(self.resident_scratch(tiered)?);
            } else if strategy.repairs() {
                decoder.speculation.reserve(self.attention_scratch(&self.over_predicted())?)?;
                let request = |r: &repair::Request| repair::scratch(&decoder.session, r);
                most = most.max(repair::Request::with(&decoder.session, &self.repair_args(), &self.kv(), request)?);
            }
            if matches!(strategy, Strategy::Foreseen | Strategy::AsyncTls) {
                most = most.max(self.attention_scratch(&self.over_foreseen())?);
            }
            if strategy.foresees() {
                let select = self.layer.foresee_args(self.layer.foreseen_queries(decoder.options.query_heads));
                decoder.foresight.reserve(self.layer.select_scratch(&select)?)?;
            }
        }
        if self.layer.has_dense() {
            most = most.max(match &decoder.tiered {
                Some(tiered) => self.stored_scratch(tiered)?,
                None => self.attention_scratch(&self.over_all())?,
            });
        }
        Ok(most)
    }

    fn check(&self) -> Result<()> {
        let Attend { layer: Layer { decoder, policy, .. }, args, .. } = self;
        let Decoder { session, options, .. } = *decoder;
        let checks = session.checks();
        let [dim, value_dim] = options.dims;
        let pages = [("pages", options.pages), ("P", options.page_size), ("Hk", options.kv_heads)];
        let with = |last: (&'static str, usize)| [pages[0], pages[1], pages[2], last];
        let (k, v) = (("D", dim), ("Dv", value_dim));
        let dtype = &[options.dtype];
        let update = self.update_args();
        if let Some(tiered) = &decoder.tiered {
            for (name, t) in [("k", &args.k), ("v", &args.v)] {
                if given(t).is_some() {
                    return Err(Error::argument(name, "given on a cache", "none: the cache has the keys and values"));
                }
            }
            self.check_new_rows()?;
            if let Some(append) = self.append_args() {
                tiered.check_append(&append)?;
            }
            if policy.method != Method::Dense {
                index::UpdateRequest::from_c(session, &update, &self.layer.index())?;
            }
            self.with_sums(|_| Ok(()))?;
            return self.check_attention();
        }
        let keys = checks.input("k", &args.k, dtype, &with(k))?;
        let values = checks.input("v", &args.v, dtype, &with(v))?;
        if policy.method != Method::Dense {
            index::UpdateRequest::from_c(session, &update, &self.layer.index())?;
        }
        self.with_sums(|_| Ok(()))?;
        if let Some(append) = self.append()? {
            let [(new_k, _), (new_v, _)] = &append.parts;
            overlap::reject(&[Some(&keys)], &[Some(new_k), Some(new_v)])?;
            overlap::reject(&[Some(&values)], &[Some(new_k), Some(new_v)])?;
        }
        self.check_attention()
    }

    fn check_attention(&self) -> Result<()> {
        let Attend { layer: Layer { decoder: Decoder { session, options, .. }, .. }, args, .. } = self;
        let (k, v) = (("D", options.dims[0]), ("Dv", options.dims[1]));
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
        if self.layer.has_sparse() {
            select::Request::of_blocks(session, &self.select_args(Kind::Sparse, false), &self.layer.index())?;
            attention::Request::with(session, &self.over_selected(Kind::Sparse), &kv, |_| Ok(()))?;
        }
        match &self.layer.decoder.tiered {
            _ if !self.layer.has_dense() => Ok(()),
            Some(tiered) => self.check_stored(tiered),
            None => attention::Request::with(session, &self.over_all(), &kv, |_| Ok(())),
        }
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
        let Layer { decoder, step, .. } = &self.layer;
        let (checks, batch) = (decoder.session.checks(), ("B", step.batch));
        if t.ndim == 3 && step.positions == 1 {
            return checks.input(name, t, dtypes, &[batch, heads, channels]);
        }
        checks.input(name, t, dtypes, &[batch, ("Q", step.positions), heads, channels])
    }

    // --- new tokens ----------------------------------------------------------------------------------------------

    fn check_new_rows(&self) -> Result<Option<[Tensor<'_>; 2]>> {
        let Attend { layer: Layer { decoder: Decoder { options, .. }, .. }, args, .. } = self;
        match (given(&args.new_k).is_some(), given(&args.new_v).is_some()) {
            (false, false) => return Ok(None),
            (true, true) => {}
            (false, true) => return Err(Error::argument("new_k", "data is NULL", "a tensor beside new_v")),
            (true, false) => return Err(Error::argument("new_v", "data is NULL", "a tensor beside new_k")),
        }
        let (heads, dtype) = (("Hk", options.kv_heads), &[options.dtype]);
        let new_k = self.rows("new_k", &args.new_k, dtype, heads, ("D", options.dims[0]))?;
        let new_v = self.rows("new_v", &args.new_v, dtype, heads, ("Dv", options.dims[1]))?;
        Ok(Some([new_k, new_v]))
    }

    fn append(&self) -> Result<Option<Append<'_>>> {
        let Attend { layer: Layer { decoder, step, .. }, args, .. } = self;
        let Decoder { session, plan, memory, .. } = decoder;
        let Some([new_k, new_v]) = self.check_new_rows()? else { return Ok(None) };
        let checks = session.checks();
        let k = checks.required("k", &args.k)?.of_rank(4)?.writable()?;
        let v = checks.required("v", &args.v)?.of_rank(4)?.writable()?;
        let pages = Pages::new(&checks, &k, ["page_table", "seq_lens"], &step.page_table, &step.seq_lens, ("B", ANY))?;
        let rows = memory.at(plan.rows);
        Ok(Some(Append { pages, positions: step.positions, rows, parts: [(new_k, k), (new_v, v)] }))
    }

    fn update_args(&self) -> vwd_index_update_args {
        let Attend { layer: Layer { decoder, step, .. }, args, .. } = self;
        let begin = decoder.tensor(decoder.plan.from, DType::I32, &[step.batch], &[1]);
        let seq_lens = step.seq_lens;
        let (k, k_scale, page_table) = match &decoder.tiered {
            None => (args.k, args.k_scale, step.page_table),
            Some(tiered) => {
                let view = tiered.view(self.layer.number);
                let scale = if self.has_token_scales() { view.tail_k_scale } else { args.k_scale };
                (view.tail_k, scale, self.layer.tail_table())
            }
        };
        vwd_index_update_args { k, k_scale, page_table, seq_lens, begin, ..zeroed() }
    }

    pub(super) fn summarise(&self, stream: vwd_stream) -> Result<()> {
        if self.layer.policy.method == Method::Dense {
            return Ok(());
        }
        let (session, args, index) = (&self.layer.decoder.session, self.update_args(), self.layer.index());
        index::update(session, &index::UpdateRequest::from_c(session, &args, &index)?, stream)?;
        self.extend_sums(stream)
    }

    // --- strategies ----------------------------------------------------------------------------------------------

    fn attend_selected(&self, stream: vwd_stream) -> Result<()> {
        self.summarise(stream)?;
        self.select(Kind::Sparse, false, stream)?;
        self.bring(self.layer.selected_in_slots(), true, stream)?;
        self.attention(&self.over_selected(Kind::Sparse), stream)
    }

    fn attend_foreseen(&self, stream: vwd_stream) -> Result<()> {
        let attend = || {
            self.bring(self.layer.predicted_in_slots(), true, stream)?;
            self.attention(&self.over_foreseen(), stream)
        };
        // The term is made of what is counted beside the summaries.
        if !self.layer.step.has_begin && !self.layer.has_term() {
            return self.beside(stream, |branch| self.summarise(branch), attend);
        }
        self.summarise(stream)?;
        attend()?;
        if !self.layer.step.has_begin {
            return Ok(());
        }
        // Nothing could be foreseen for rows that have tokens from elsewhere.
        self.select(Kind::New, false, stream)?;
        self.bring(self.layer.selected_in_slots(), false, stream)?;
        let flags = VWD_ATTENTION_KEEP_ROWS;
        self.attention(&vwd_attention_args { flags, ..self.over_selected(Kind::New) }, stream)
    }

    /// PRR, or VANWARD. `holt`: how scores are smoothed; absent where the list is foreseen.
    fn predict_and_repair(&self, holt: Option<vwd_holt>, stream: vwd_stream) -> Result<()> {
        let tiered = self.layer.decoder.tiered.as_ref();
        match tiered {
            Some(tiered) => self.attend_resident(holt.is_some(), tiered, stream)?,
            None => {
                self.summarise(stream)?;
                let select = || self.select(Kind::Sparse, holt.is_some(), stream);
                self.beside(stream, |branch| self.speculate(holt, branch), select)?;
                self.repair(stream)?;
            }
        }
        let Some(holt) = holt else { return Ok(()) };
        self.remember_scores(holt, stream)?;
        tiered.map_or(Ok(()), |tiered| self.prefetch_next(holt, tiered, stream))
    }

    /// Runs some calls on a branch, and others on the caller's stream meanwhile, which then waits for the branch. On the CPU they follow
    /// each other.
    pub(super) fn beside(
        &self,
        stream: vwd_stream,
        on_branch: impl FnOnce(vwd_stream) -> Result<()>,
        on_stream: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(branch) = self.layer.decoder.speculation.branch() else {
            on_branch(stream)?;
            return on_stream();
        };
        self.follow(stream)?;
        let on_branch = on_branch(branch.stream());
        let on_stream = on_stream();
        // The branch is joined whatever happened: a capture could not end otherwise.
        let joined = self.between(stream, |branch, enqueue| {
            branch.end(enqueue, SPECULATION)?;
            branch.join(enqueue, SPECULATION).map(|_| ())
        });
        on_branch.and(on_stream).and(joined)
    }

    /// What `beside` enqueues on the branch from now on begins after what the caller's stream holds now.
    pub(super) fn follow(&self, stream: vwd_stream) -> Result<()> {
        self.between(stream, |branch, enqueue| branch.fork(enqueue))
    }

    /// Orders the branch and the caller's stream. On the CPU their calls follow each other.
    fn between(&self, stream: vwd_stream, order: impl FnOnce(&Branch, &Enqueue) -> Result<()>) -> Result<()> {
        let Decoder { session, speculation, .. } = self.layer.decoder;
        match (session.on(stream)?, speculation.branch()) {
            (On::Cuda(enqueue), Some(branch)) => order(branch, &enqueue),
            _ => Ok(()),
        }
    }

    /// Predicts, if nothing was foreseen, and attends the predicted list. What it writes to `out` is replaced.
    fn speculate(&self, holt: Option<vwd_holt>, stream: vwd_stream) -> Result<()> {
        if let Some(holt) = holt {
            self.predict(self.layer.predicted(), holt, stream)?;
        }
        self.attention(&self.over_predicted(), stream)
    }

    /// Predicts a list from the scores of past steps.
    pub(super) fn predict(&self, predicted: vwd_block_list, holt: vwd_holt, stream: vwd_stream) -> Result<()> {
        let Layer { decoder, step, policy, .. } = &self.layer;
        let args = vwd_predictor_predict_args {
            block_size: decoder.options.block_size as u32,
            k: policy.predicted,
            init_blocks: policy.init,
            local_blocks: policy.local_ahead(),
            holt,
            state: self.layer.holt(),
            seq_lens: self.layer.q_lens(Kind::Tokens),
            predicted,
            sequences: step.sequences,
            ..zeroed()
        };
        let request = predictor::PredictRequest::from_c(&decoder.session, &args)?;
        predictor::predict(&decoder.session, &request, stream)
    }

    fn repair(&self, stream: vwd_stream) -> Result<()> {
        let session = &self.layer.decoder.session;
        repair::Request::with(session, &self.repair_args(), &self.kv(), |r| repair::run(session, r, stream))
    }

    fn remember_scores(&self, holt: vwd_holt, stream: vwd_stream) -> Result<()> {
        let Layer { decoder: Decoder { session, options, .. }, step, .. } = &self.layer;
        let args = vwd_predictor_update_args {
            block_size: options.block_size as u32,
            holt,
            state: self.layer.holt(),
            seq_lens: self.layer.q_lens(Kind::Tokens),
            scores: self.layer.scores(),
            sequences: step.sequences,
            ..zeroed()
        };
        predictor::update(session, &predictor::UpdateRequest::from_c(session, &args)?, stream)
    }

    // --- the arguments of the calls ------------------------------------------------------------------------------

    fn select_args(&self, kind: Kind, with_scores: bool) -> vwd_select_blocks_args {
        let args = self.layer.select_args(self.args.q, kind);
        if with_scores { vwd_select_blocks_args { scores: self.layer.scores(), ..args } } else { args }
    }

    pub(super) fn select(&self, kind: Kind, with_scores: bool, stream: vwd_stream) -> Result<()> {
        self.layer.select(&self.select_args(kind, with_scores), stream)?;
        self.remember(stream)
    }

    pub(super) fn kv(&self) -> vwd_paged_kv {
        let vwd_decoder_attend_args { k, v, k_scale, v_scale, .. } = *self.args;
        let Step { page_table, seq_lens, .. } = self.layer.step;
        if let Some(tiered) = &self.layer.decoder.tiered {
            let &vwd_kv_cache_layer { k, v, k_scale: keys, v_scale: values, .. } = tiered.view(self.layer.number);
            let [k_scale, v_scale] = if self.has_token_scales() { [keys, values] } else { [k_scale, v_scale] };
            let int4 = tiered.coded(self.layer.number);
            return vwd_paged_kv { k, v, seq_lens, k_scale, v_scale, int4, ..zeroed() };
        }
        vwd_paged_kv { k, v, page_table, seq_lens, k_scale, v_scale, ..zeroed() }
    }

    pub(super) fn attention(&self, args: &vwd_attention_args, stream: vwd_stream) -> Result<()> {
        let session = &self.layer.decoder.session;
        attention::Request::with(session, args, &self.kv(), |r| attention::run(session, r, stream))
    }

    pub(super) fn attention_scratch(&self, args: &vwd_attention_args) -> Result<u64> {
        let session = &self.layer.decoder.session;
        attention::Request::with(session, args, &self.kv(), |r| attention::scratch(session, r))
    }

    pub(super) fn over_selected(&self, kind: Kind) -> vwd_attention_args {
        let block_size = self.layer.decoder.options.block_size as u32;
        let list = if self.is_tiered() { self.layer.selected_in_slots() } else { self.layer.list() };
        self.joined(vwd_attention_args { block_size, list, ..self.attention_args(kind) })
    }

    /// Attention over the list that was made ahead, which nothing repairs.
    pub(super) fn over_foreseen(&self) -> vwd_attention_args {
        let list = if self.is_tiered() { self.layer.predicted_in_slots() } else { self.layer.predicted() };
        vwd_attention_args { list, ..self.over_selected(Kind::Known) }
    }

    fn is_tiered(&self) -> bool {
        self.layer.decoder.tiered.is_some()
    }

    /// Attention over the predicted list, which keeps the partials that repair starts from.
    pub(super) fn over_predicted(&self) -> vwd_attention_args {
        let (list, partials) = (self.layer.predicted(), self.partials());
        vwd_attention_args { list, partials, ..self.over_selected(Kind::Sparse) }
    }

    /// Attention of the dense rows over all tokens, which leaves the results of sparse rows as they are.
    pub(super) fn over_all(&self) -> vwd_attention_args {
        let flags = if self.layer.has_sparse() { VWD_ATTENTION_KEEP_ROWS } else { 0 };
        vwd_attention_args { flags, ..self.attention_args(Kind::Dense) }
    }

    fn attention_args(&self, kind: Kind) -> vwd_attention_args {
        let Attend { layer, args, .. } = self;
        vwd_attention_args {
            scale: layer.decoder.options.scale,
            soft_cap: layer.decoder.options.soft_cap,
            window: layer.policy.window,
            q: args.q,
            q_lens: layer.q_lens(kind),
            sinks: args.sinks,
            out: args.out,
            tree: layer.step.tree,
            ..zeroed()
        }
    }

    fn repair_args(&self) -> vwd_repair_args {
        let vwd_attention_args { block_size, scale, soft_cap, window, q, q_lens, sinks, out, list, partials, .. } =
            self.over_predicted();
        vwd_repair_args {
            mode: VWD_REPAIR_EXACT,
            block_size,
            scale,
            soft_cap,
            window,
            q,
            q_lens,
            predicted: list,
            selected: self.over_selected(Kind::Sparse).list,
            predicted_partials: partials,
            sinks,
            out,
            missed_counts: self.layer.counts(self.layer.decoder.plan.missed),
            ..zeroed()
        }
    }

    /// A partial for each block of the predicted list.
    fn partials(&self) -> vwd_attention_partials {
        let Layer { decoder, step, policy, .. } = &self.layer;
        let (Options { query_heads, dims, .. }, cap) = (&decoder.options, policy.predicted_capacity());
        let part = |n: usize, channels: Option<usize>| -> vwd_tensor {
            let offset = decoder.plan.partials[n];
            let mut extents = [step.batch, *query_heads, cap, channels.unwrap_or(1), 1];
            let mut rank = 3 + channels.is_some() as usize;
            if self.args.q.ndim == 4 {
                extents.copy_within(1..4, 2);
                extents[1] = 1;
                rank += 1;
            }
            decoder.packed(offset, DType::F32, &extents[..rank])
        };
        vwd_attention_partials { acc: part(0, Some(dims[1])), m: part(1, None), l: part(2, None) }
    }
}
