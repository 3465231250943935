//! Attention in one layer of a step on a tiered cache. Lists are resolved before they are attended:
//!
//!   SERIAL     summarise ─ select ─ resolve, fetch, wait ─ attention
//!   ASYNC_TLS  recall the step before's list ┬─ resolve, fetch, wait ─────────┬─ attention ──────┬─ out
//!                                            └─ summarise ─ select ─ remember ┴─ resolve, fetch ─┘    travels until the next step
//!   SPARDA     (a layer ahead: foresee ─ resolve, fetch)  ┬─ resolve, fetch, wait ─ attention over the foreseen list ─┬─ out
//!                                                         └─ summarise ───────────────────────────────────────────────┘
//!   VANWARD    (ahead: foresee, or predict ─ resolve, fetch)  summarise ─ select ─ resolve ┬─ fetch ────────────────────────────┬─ wait ─ repair
//!                                                                                          └─ attention over what is resident ─┘
//!     one row  (ahead: foresee, or predict ─ resolve, fetch)  summarise ─ select ─ find ┬─ give slots, for the next fetch to fill ──────────────┬─ out
//!                                                                                       └─ attention, to what is not resident in host memory ─┘
//!
//! What was foreseen of a layer is fetched once the layer that is attended before it has its own blocks: the bus is slower than all else, and what a
//! layer waits for goes first. VANWARD does not attend what was predicted before its selection is there, as PRR does: on an H200 the selection
//! took so much longer beside attention that nothing was gained, and copies hide attention as well. Where slots hold codes it attends once all have
//! arrived. A single row misses so little that to read it where it lies takes less time than to copy it first.
//!
//! Dense rows attend the blocks in host memory where they lie: the device reads each once, which a copy would do, too, and no slot is
//! taken from what sparse steps read. The newest two blocks, which host memory may not have yet, come from slots. Repair adds these to the state
//! of the others:
//!
//!   DENSE      attention over stored blocks, in host memory ─ resolve, fetch, wait ─ repair over the newest blocks ─ out
//!
//! A CPU session, whose slots are host memory, too, first copies the newest blocks to where the others lie. Dense rows then attend all their tokens
//! in one pass, and have the bits that they have on pages.
//!
//! Where blocks are coded in INT4, every list with slots names blocks of both kinds, unless slots hold what codes stand for. Dense rows then read the
//! first block in its tail and codes in host memory, and repair adds the newest blocks as these lie in slots.
//!
//! The lower line of a diagram runs on a branch, or on a side stream of the cache. `resolve, fetch, wait` in a row are launches on one stream, each of
//! which begins while the one before it ends; where nothing was missed the last two see that and end at once.
//!
//! While ASYNC_TLS resolves the selected list, attention still reads the recalled one, which was resolved just before: both lists keep their slots.
//! Any other resolve may take the slots of all lists before it, since nothing reads these any more.

use super::attend::Attend;
use super::layer::Layer;
use super::memory::Kind;
use super::options::Options;
use super::term::without_positions;
use super::tiered::{Further, Tiered};
use crate::abi::{
    VWD_ATTENTION_KEEP_ROWS, VWD_REPAIR_SUPERSET, vwd_attention_args, vwd_attention_state, vwd_block_list, vwd_holt,
    vwd_int4_kv, vwd_kv_cache_append_args, vwd_kv_cache_layer, vwd_paged_kv, vwd_repair_args, vwd_stream, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::status::Result;
use crate::core::tensor::given;
use crate::core::versioned::zeroed;
use crate::ops::{attention, repair};

/// The most rows of a step for which VANWARD reads missed blocks where they lie, in host memory. Such a block crosses the bus once more, with the
/// next step's foreseen blocks; with more rows the bus has as much to do as the rest of the device.
const FEW_ROWS: usize = 1;

impl Attend<'_> {
    /// The new tokens of a step as the cache takes them; `None` without new tokens.
    pub fn append_args(&self) -> Option<vwd_kv_cache_append_args> {
        let Attend { layer, args, .. } = self;
        let (decoder, step) = (layer.decoder, &layer.step);
        given(&args.new_k)?;
        let rows = |offset| decoder.tensor(offset, DType::I32, &[step.batch], &[1]);
        let mut append = vwd_kv_cache_append_args {
            layer: layer.number as u32,
            sequences: step.sequences,
            begin: rows(decoder.plan.places),
            lens: rows(decoder.plan.rows),
            k: with_positions(args.new_k, 3),
            v: with_positions(args.new_v, 3),
            ..zeroed()
        };
        if self.has_token_scales() {
            (append.k_scale, append.v_scale) = (with_positions(args.k_scale, 2), with_positions(args.v_scale, 2));
        }
        Some(append)
    }

    /// The keys and values of the rows' tails.
    pub fn tails(&self, tiered: &Tiered, seq_lens: vwd_tensor) -> vwd_paged_kv {
        let view = tiered.view(self.layer.number);
        let [k_scale, v_scale] = match self.has_token_scales() {
            true => [view.tail_k_scale, view.tail_v_scale],
            false => [self.args.k_scale, self.args.v_scale],
        };
        let (k, v, page_table) = (view.tail_k, view.tail_v, self.layer.tail_table());
        vwd_paged_kv { k, v, page_table, seq_lens, k_scale, v_scale, ..zeroed() }
    }

    pub fn has_token_scales(&self) -> bool {
        self.layer.decoder.tiered.as_ref().is_some_and(Tiered::token_scales)
    }

    /// Waits until the blocks of a selected list, or of one made ahead, are in their slots. Nothing without a cache.
    pub fn bring(&self, list: vwd_block_list, is_counted: bool, stream: vwd_stream) -> Result<()> {
        let layer = &self.layer;
        let Some(tiered) = &layer.decoder.tiered else { return Ok(()) };
        let missed_counts = layer.fetched().filter(|_| is_counted);
        tiered.resolve(layer, list, Further { missed_counts, ..Further::default() }, stream)?;
        tiered.cache.bring(layer.number as u32, stream)
    }

    /// Keeps the selected lists of rows for the next step of their sequences, where the strategy attends them then.
    pub fn remember(&self, stream: vwd_stream) -> Result<()> {
        let layer = &self.layer;
        if !layer.policy.strategy.remembers_lists() {
            return Ok(());
        }
        let session = &layer.decoder.session;
        let sequences = session.checks().required("sequences", &layer.step.sequences)?;
        layer.past(&layer.list(), Kind::Sparse, sequences).remember(&session.on(stream)?)
    }

    /// ASYNC_TLS: attention over the list of the step before, while this step's list is selected and fetched for the next one.
    pub fn attend_past(&self, tiered: &Tiered, stream: vwd_stream) -> Result<()> {
        let layer = &self.layer;
        let session = &layer.decoder.session;
        let sequences = session.checks().required("sequences", &layer.step.sequences)?;
        // First, since `select` then keeps this step's list where the recalled one was.
        layer.past(&layer.predicted(), Kind::Known, sequences).recall(&session.on(stream)?)?;
        let on_branch = |branch| {
            self.summarise(branch)?;
            self.select(Kind::Sparse, false, branch)?;
            self.bring(layer.predicted_in_slots(), false, stream)?;
            // The resolves of a layer have to follow each other: the branch waits for the one that `bring` enqueued.
            self.follow(stream)?;
            let further =
                Further { missed_counts: layer.fetched(), read: Some(layer.predicted()), ..Further::default() };
            tiered.resolve(layer, layer.selected_in_slots(), further, branch)?;
            tiered.fetch(layer, branch)
        };
        self.beside(stream, on_branch, || self.attention(&self.over_foreseen(), stream))?;
        if !layer.step.has_begin {
            return Ok(());
        }
        // Rows that begin have no list of a step before.
        tiered.wait(layer, stream)?;
        let flags = VWD_ATTENTION_KEEP_ROWS;
        self.attention(&vwd_attention_args { flags, ..self.over_selected(Kind::New) }, stream)
    }

    /// VANWARD, whose blocks were fetched ahead: attention over what is resident of the selection while the rest travels, and repair. A CPU session
    /// makes copies in the call, and then attends the selection in one pass. So does CUDA where slots hold codes, since attention and repair of
    /// codes took longer together.
    pub fn attend_resident(&self, with_scores: bool, tiered: &Tiered, stream: vwd_stream) -> Result<()> {
        let (layer, session) = (&self.layer, &self.layer.decoder.session);
        self.summarise(stream)?;
        self.select(Kind::Sparse, with_scores, stream)?;
        if !tiered.coded(layer.number).is_null() {
            self.bring(layer.selected_in_slots(), true, stream)?;
            return self.attention(&self.over_selected(Kind::Sparse), stream);
        }
        if layer.step.batch <= FEW_ROWS
            && self.with_far_pages(tiered, |r| Ok(attention::is_taken(session, r)))?.unwrap_or(false)
        {
            let attend = || self.with_far_pages(tiered, |r| attention::run(session, r, stream)).map(|_| ());
            return tiered.resolve_beside(layer, attend, stream);
        }
        let further =
            Further { resident: Some(layer.resident()), missed_counts: layer.fetched(), ..Further::default() };
        tiered.resolve(layer, layer.selected_in_slots(), further, stream)?;
        tiered.fetch(layer, stream)?;
        if session.cuda().is_none() {
            tiered.wait(layer, stream)?;
            layer.count_fetched_as_missed();
            return self.attention(&self.over_selected(Kind::Sparse), stream);
        }
        self.attention(&self.over_resident(), stream)?;
        tiered.wait(layer, stream)?;
        let fetched = layer.counts(layer.decoder.plan.tiered.fetched);
        let fetched = session.checks().required("fetched", &fetched)?;
        // Sinks are left to repair: without them attention's results are final where nothing is late.
        let known_misses = Some(&fetched).filter(|_| given(&self.args.sinks).is_none());
        let late = |r: &repair::Request| repair::run(session, &repair::Request { known_misses, ..*r }, stream);
        repair::Request::with(session, &self.over_late(), &self.kv(), late)
    }

    /// Scratch of the calls of `attend_resident`, without the selection's.
    pub fn resident_scratch(&self, tiered: &Tiered) -> Result<u64> {
        let session = &self.layer.decoder.session;
        let resident = self.attention_scratch(&self.over_resident())?;
        let far = self.with_far_pages(tiered, |r| match attention::is_taken(session, r) {
            true => attention::scratch(session, r),
            false => Ok(0),
        })?;
        let late = repair::Request::with(session, &self.over_late(), &self.kv(), |r| repair::scratch(session, r))?;
        Ok(resident.max(late).max(far.unwrap_or(0)))
    }

    /// Attention over the selection where its blocks lie, checked; `None` where the layer has no far pages.
    fn with_far_pages<R>(
        &self,
        tiered: &Tiered,
        then: impl FnOnce(&attention::Request) -> Result<R>,
    ) -> Result<Option<R>> {
        let far_pages = tiered.far_pages[self.layer.number];
        if far_pages.is_none() {
            return Ok(None);
        }
        let session = &self.layer.decoder.session;
        let far = |r: &attention::Request| then(&attention::Request { far_pages, ..*r });
        attention::Request::with(session, &self.over_selected(Kind::Sparse), &self.kv(), far).map(Some)
    }

    /// Attention over what is resident of the selection. It keeps its state; repair replaces what it writes to `out`, and adds the sinks, which enter a
    /// result once.
    fn over_resident(&self) -> vwd_attention_args {
        let selected = self.over_selected(Kind::Sparse);
        vwd_attention_args {
            list: self.layer.resident(),
            state: self.state(),
            sinks: absent(selected.sinks),
            ..selected
        }
    }

    /// Repair that adds what has arrived since to the state of what was resident.
    fn over_late(&self) -> vwd_repair_args {
        let vwd_attention_args { sinks, list, .. } = self.over_selected(Kind::Sparse);
        vwd_repair_args {
            predicted: self.layer.without_slots(self.layer.resident()),
            selected: list,
            sinks,
            missed_counts: self.layer.counts(self.layer.decoder.plan.missed),
            ..repair_of(&self.over_resident())
        }
    }

    /// Attention of dense rows: over the stored blocks, then with the newest ones. On a CPU session over all of them, unless they are coded.
    pub fn attend_stored(&self, tiered: &Tiered, stream: vwd_stream) -> Result<()> {
        let session = &self.layer.decoder.session;
        if session.cuda().is_none()
            && let Some(kv) = self.stored_kv(tiered)
        {
            let sequences = session.checks().required("sequences", &self.layer.step.sequences)?;
            // SAFETY: the step's contract keeps the tensor valid.
            unsafe { tiered.cache.store_tails(self.layer.number as u32, &sequences, stream)? };
            return attention::Request::with(session, &self.over_all(), &kv, |r| attention::run(session, r, stream));
        }
        self.with_stored(tiered, |r| attention::run(session, r, stream))?;
        self.bring(self.layer.newest_blocks(), false, stream)?;
        repair::Request::with(session, &self.over_newest(), &self.kv(), |r| repair::run(session, r, stream))
    }

    pub fn stored_scratch(&self, tiered: &Tiered) -> Result<u64> {
        let session = &self.layer.decoder.session;
        let stored = self.with_stored(tiered, |r| attention::scratch(session, r))?;
        let newest = repair::Request::with(session, &self.over_newest(), &self.kv(), |r| repair::scratch(session, r))?;
        Ok(stored.max(newest))
    }

    pub fn check_stored(&self, tiered: &Tiered) -> Result<()> {
        let session = &self.layer.decoder.session;
        self.with_stored(tiered, |_| Ok(()))?;
        repair::Request::with(session, &self.over_newest(), &self.kv(), |_| Ok(()))
    }

    /// The rows' blocks in host memory, unless they are coded.
    fn stored_kv(&self, tiered: &Tiered) -> Option<vwd_paged_kv> {
        let &[k, v, key_scales, value_scales] = tiered.stored.get(self.layer.number)?;
        let (kv, page_table) = (self.kv(), self.layer.step.page_table);
        let has_token_scales = self.has_token_scales();
        let [k_scale, v_scale] = if has_token_scales { [key_scales, value_scales] } else { [kv.k_scale, kv.v_scale] };
        Some(vwd_paged_kv { k, v, k_scale, v_scale, page_table, ..kv })
    }

    /// Attention over the stored blocks, checked.
    fn with_stored<R>(&self, tiered: &Tiered, then: impl FnOnce(&attention::Request) -> Result<R>) -> Result<R> {
        let (session, page_table) = (&self.layer.decoder.session, self.layer.step.page_table);
        let coded;
        let stored = match self.stored_kv(tiered) {
            Some(kv) => kv,
            None => {
                let (kv, codes) = (self.kv(), &tiered.stored_codes[self.layer.number]);
                coded = vwd_int4_kv { page_table, coded_lens: kv.seq_lens, mean_table: page_table, ..*codes };
                let vwd_kv_cache_layer { tail_k, tail_v, .. } = *tiered.view(self.layer.number);
                vwd_paged_kv { k: tail_k, v: tail_v, page_table: self.layer.tail_table(), int4: &raw const coded, ..kv }
            }
        };
        let far = |r: &attention::Request| then(&attention::Request { is_far: true, ..*r });
        attention::Request::with(session, &self.over_stored(), &stored, far)
    }

    /// Attention of dense rows over the stored blocks. It keeps its state; repair replaces what it writes to `out`.
    fn over_stored(&self) -> vwd_attention_args {
        let (list, state, all) = (self.layer.stored_blocks(), self.state(), self.over_all());
        let block_size = self.layer.decoder.options.block_size as u32;
        // Sinks enter the result once, in the end. A step has no more rows than a block tokens, so that all nodes of a tree lie in the newest
        // blocks, and only a window depends on how the rows see each other.
        let tree = if all.window == 0 { absent(all.tree) } else { all.tree };
        vwd_attention_args { block_size, list, state, sinks: absent(all.sinks), tree, ..all }
    }

    /// Repair that adds the newest blocks to the state of the stored ones, as blocks of which none was predicted.
    fn over_newest(&self) -> vwd_repair_args {
        vwd_repair_args {
            predicted: self.layer.no_blocks(),
            selected: self.layer.newest_blocks(),
            tree: self.layer.step.tree,
            sinks: self.args.sinks,
            ..repair_of(&self.over_stored())
        }
    }

    /// The state of attention over the stored blocks, or over what is resident.
    fn state(&self) -> vwd_attention_state {
        let Layer { decoder, step, .. } = &self.layer;
        let Options { query_heads, dims, .. } = &decoder.options;
        let [acc, m, l] = std::array::from_fn(|n| {
            let extents = [step.batch, step.positions, *query_heads, dims[1]];
            let t = decoder.packed(decoder.plan.tiered.state[n], DType::F32, &extents[..if n == 0 { 4 } else { 3 }]);
            without_positions(t, self.args.q.ndim - (n > 0) as i32)
        });
        vwd_attention_state { acc, m, l }
    }

    /// Begins to fetch what is predicted for the layer's next step.
    pub fn prefetch_next(&self, holt: vwd_holt, tiered: &Tiered, stream: vwd_stream) -> Result<()> {
        self.predict(self.layer.predicted(), holt, stream)?;
        tiered.resolve(&self.layer, self.layer.predicted_in_slots(), Further::default(), stream)?;
        tiered.fetch(&self.layer, stream)
    }
}

fn absent(t: vwd_tensor) -> vwd_tensor {
    vwd_tensor { data: std::ptr::null_mut(), ..t }
}

/// A repair that goes on from the state that attention keeps, and has lists yet to be given.
fn repair_of(of: &vwd_attention_args) -> vwd_repair_args {
    let &vwd_attention_args { flags, block_size, scale, soft_cap, window, q, q_lens, out, state, .. } = of;
    let mode = VWD_REPAIR_SUPERSET;
    vwd_repair_args {
        flags,
        mode,
        block_size,
        scale,
        soft_cap,
        window,
        q,
        q_lens,
        predicted_state: state,
        out,
        ..zeroed()
    }
}

/// A tensor [B, …] of `rank` dimensions as one [B, 1, …] of one position; one with positions as it is.
fn with_positions(mut t: vwd_tensor, rank: i32) -> vwd_tensor {
    if t.ndim == rank && !t.data.is_null() {
        t.shape.copy_within(1..4, 2);
        t.strides.copy_within(1..4, 2);
        (t.shape[1], t.strides[1], t.ndim) = (1, 0, rank + 1);
    }
    t
}
