//! A decoder on a tiered cache.
//!
//! The cache's blocks are the decoder's pages: summaries lie by host block, and a row's page table is the row of its sequence in the
//! cache's table. New tokens go to tails, where their blocks are summarised. Lists are resolved before they are attended:
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

use super::Decoder;
use super::attend::Attend;
use super::layer::Layer;
use super::memory::Kind;
use super::options::{NEWEST, Options};
use super::rows::Past;
use super::term::without_positions;
use crate::abi::{
    VWD_ATTENTION_KEEP_ROWS, VWD_REPAIR_SUPERSET, vwd_attention_args, vwd_attention_state, vwd_block_list, vwd_holt,
    vwd_int4_kv, vwd_kv_cache_append_args, vwd_kv_cache_layer, vwd_kv_cache_resolve_args, vwd_paged_kv,
    vwd_repair_args, vwd_stream, vwd_tensor,
};
use crate::core::allocate::reserved;
use crate::core::dtype::DType;
use crate::core::status::Result;
use crate::core::tensor::{Tensor, given};
use crate::core::versioned::zeroed;
use crate::kv::{self, AppendRequest, KvCache, ResolveRequest, RowTables};
use crate::ops::attention::{self, FarPages};
use crate::ops::repair;
use std::sync::Arc;

/// The cache that has the keys and values, and views of each layer's slots.
pub struct Tiered {
    cache: Arc<KvCache>,
    views: Vec<vwd_kv_cache_layer>,
    /// Keys, values and scales of each layer in host memory; none where blocks are coded.
    stored: Vec<[vwd_tensor; 4]>,
    /// The runs of each layer in host memory, as pages behind those of its slots, where attention may read them so.
    far_pages: Vec<Option<FarPages>>,
    /// The codes in the slots of each layer; empty where slots hold keys and values.
    coded: Vec<vwd_int4_kv>,
    /// The codes of each layer in host memory; empty where blocks are not coded. The first block of a sequence is never coded. The page table of a
    /// step says which codes a row has.
    stored_codes: Vec<vwd_int4_kv>,
}

/// The most rows of a step for which VANWARD reads missed blocks where they lie, in host memory. Such a block crosses the bus once more, with the
/// next step's foreseen blocks; with more rows the bus has as much to do as the rest of the device.
const FEW_ROWS: usize = 1;

/// What a resolve does beside giving slots.
#[derive(Default)]
struct Further {
    /// Where it writes which blocks were resident, and how many were not.
    resident: Option<vwd_block_list>,
    missed_counts: Option<vwd_tensor>,
    /// The list of the layer that was resolved just before, if its slots may still be read.
    read: Option<vwd_block_list>,
}

/// Codes, their scales and the means, of blocks with these key weights.
fn codes([k, v, k_scale, v_scale, means]: [vwd_tensor; 5], block_size: usize, weights: vwd_tensor) -> vwd_int4_kv {
    vwd_int4_kv { block_size: block_size as u32, k, v, k_scale, v_scale, means, weights, ..zeroed() }
}

impl Tiered {
    /// `entries`: the most that a step resolves at once.
    pub fn new(cache: &Arc<KvCache>, entries: usize) -> Result<Tiered> {
        const PURPOSE: &str = "the layers of a decoder";
        let options = *cache.options();
        let kv::Options { layers, block_size, is_coded, .. } = options;
        let if_so = |has: bool| if has { layers } else { 0 };
        let (mut views, mut stored) = (reserved(layers, PURPOSE)?, reserved(if_so(!is_coded), PURPOSE)?);
        let mut far_pages = reserved(layers, PURPOSE)?;
        let mut stored_codes = reserved(if_so(is_coded), PURPOSE)?;
        let mut coded = reserved(if_so(options.has_coded_slots()), PURPOSE)?;
        for layer in 0..layers as u32 {
            let view = cache.view(layer)?;
            views.push(view);
            far_pages.push(cache.far_pages(layer)?);
            if !is_coded {
                stored.push(cache.stored(layer)?);
                continue;
            }
            let vwd_kv_cache_layer { int4_k, int4_v, int4_k_scale, int4_v_scale, int4_means, weights, .. } = view;
            if options.has_coded_slots() {
                coded.push(codes([int4_k, int4_v, int4_k_scale, int4_v_scale, int4_means], block_size, weights));
            }
            let exact_tokens = block_size as u32;
            let of_host = codes(cache.stored_codes(layer)?, block_size, weights);
            stored_codes.push(vwd_int4_kv { exact_tokens, ..of_host });
        }
        cache.expect_lists(entries);
        Ok(Tiered { cache: cache.clone(), views, stored, far_pages, coded, stored_codes })
    }

    /// The codes in the slots of a layer; NULL where slots hold keys and values.
    pub fn coded(&self, layer: usize) -> *const vwd_int4_kv {
        self.coded.get(layer).map_or(std::ptr::null(), std::ptr::from_ref)
    }

    pub fn view(&self, layer: usize) -> &vwd_kv_cache_layer {
        &self.views[layer]
    }

    pub fn token_scales(&self) -> bool {
        self.cache.options().token_scales
    }

    /// Writes the tables of a step's rows. Returns the table of their blocks, and the tensor of their sequences.
    pub fn begin(
        &self,
        decoder: &Decoder,
        batch: usize,
        sequences: &vwd_tensor,
        stream: vwd_stream,
    ) -> Result<(vwd_tensor, vwd_tensor)> {
        let (plan, memory) = (&decoder.plan.tiered, &decoder.memory);
        let numbers = decoder.tensor(plan.numbers, DType::I32, &[batch], &[1]);
        let sequences = *given(sequences).unwrap_or(&numbers);
        let tables = RowTables {
            sequences: decoder.session.checks().required("sequences", &sequences)?,
            blocks: memory.at(plan.blocks),
            tails: memory.at(plan.tails),
            floors: memory.at(plan.floors),
        };
        // SAFETY: the decoder's memory has room for the tables of all rows, and the step's contract keeps the tensor valid.
        unsafe { self.cache.row_tables(&tables, stream)? };
        Ok((decoder.packed(plan.blocks, DType::I32, &[batch, decoder.options.table_blocks]), sequences))
    }

    /// Gives the blocks of a list slots and asks for those that are not there.
    fn resolve(
        &self,
        layer: &Layer,
        wanted: vwd_block_list,
        Further { resident, missed_counts, read }: Further,
        stream: vwd_stream,
    ) -> Result<()> {
        let (number, sequences) = (layer.number as u32, layer.step.sequences);
        let mut args = vwd_kv_cache_resolve_args { layer: number, sequences, wanted, ..zeroed() };
        args.resident = resident.unwrap_or(args.resident);
        args.missed_counts = missed_counts.unwrap_or(args.missed_counts);
        let beside = read.map(|list| list.ids.shape[..3].iter().product::<i64>() as usize);
        self.cache.resolve(&ResolveRequest::of_step(&self.cache, &args, beside)?, stream)
    }

    /// Resolves the selected list while its blocks are attended: `attend` reads those that are not resident in host memory.
    fn resolve_beside(&self, of: &Attend, attend: impl FnOnce() -> Result<()>, stream: vwd_stream) -> Result<()> {
        let Layer { decoder: Decoder { plan, .. }, step, number, .. } = &of.layer;
        let [missed_counts, again] = [plan.tiered.fetched, plan.missed].map(|at| of.layer.counts(at));
        let (sequences, wanted) = (step.sequences, of.layer.selected_in_slots());
        let args = vwd_kv_cache_resolve_args { layer: *number as u32, sequences, wanted, missed_counts, ..zeroed() };
        let request = ResolveRequest::of_step(&self.cache, &args, None)?;
        // SAFETY: the counts are of the decoder's memory.
        unsafe { self.cache.find_far(&request, again.data.cast(), stream)? };
        self.cache.give_far(&request, stream)?;
        attend()
    }

    fn fetch(&self, layer: &Layer, stream: vwd_stream) -> Result<()> {
        self.begin_fetch(layer.number, stream)
    }

    fn wait(&self, layer: &Layer, stream: vwd_stream) -> Result<()> {
        self.cache.wait(layer.number as u32, stream)
    }

    pub fn append(&self, args: &vwd_kv_cache_append_args, stream: vwd_stream) -> Result<()> {
        self.cache.append(&AppendRequest::from_c(&self.cache, args)?, stream)
    }

    pub fn check_append(&self, args: &vwd_kv_cache_append_args) -> Result<()> {
        AppendRequest::from_c(&self.cache, args).map(|_| ())
    }

    /// Asks for the blocks of a foreseen list.
    pub fn resolve_foreseen(&self, layer: &Layer, stream: vwd_stream) -> Result<()> {
        let slots = layer.entries(layer.decoder.plan.tiered.foreseen_slots, layer.policy.predicted_capacity());
        self.resolve(layer, vwd_block_list { slots, ..layer.predicted() }, Further::default(), stream)
    }

    /// Begins to fetch what a layer has asked for.
    pub fn begin_fetch(&self, layer: usize, stream: vwd_stream) -> Result<()> {
        self.cache.fetch(layer as u32, stream)
    }
}

/// The lists that sequences of a layer had are forgotten.
pub fn forget<'a>(decoder: &Decoder, layer: usize, sequences: Option<Tensor<'a>>, rows: usize) -> Past<'a> {
    let (options, memory, [past_ids, past_counts]) =
        (&decoder.options, &decoder.memory, decoder.plan.tiered.past[layer]);
    let policy = &options.layers[layer];
    Past {
        past_ids: memory.at(past_ids),
        past_capacity: policy.selected_capacity(),
        init: policy.init,
        ..Past::emptied(options, sequences, rows, memory.at(past_counts))
    }
}

impl Layer<'_> {
    /// The selected list with the slots of its blocks.
    pub fn selected_in_slots(&self) -> vwd_block_list {
        vwd_block_list {
            slots: self.entries(self.decoder.plan.tiered.slots, self.decoder.options.capacity()),
            ..self.list()
        }
    }

    /// The list made ahead with the slots of its blocks.
    pub fn predicted_in_slots(&self) -> vwd_block_list {
        let slots = self.entries(self.decoder.plan.tiered.predicted_slots, self.policy.predicted_capacity());
        vwd_block_list { slots, ..self.predicted() }
    }

    /// What is resident of the selected list.
    fn resident(&self) -> vwd_block_list {
        let Decoder { options, plan, .. } = self.decoder;
        let ([ids, slots, counts], rows) = (plan.tiered.resident, [self.step.batch, options.kv_heads]);
        let counts = self.decoder.packed(counts, DType::I32, &rows);
        vwd_block_list {
            slots: self.entries(slots, options.capacity()),
            ..self.list_at(ids, options.capacity(), counts)
        }
    }

    /// On a CPU session, for a strategy that would repair.
    fn count_fetched_as_missed(&self) {
        let Decoder { options, plan, .. } = self.decoder;
        let [from, to] = [plan.tiered.fetched, plan.missed].map(|at| self.counts(at).data.cast::<i32>());
        // SAFETY: both are of the decoder's memory, which the host has, one number for each row and KV head.
        unsafe { to.copy_from_nonoverlapping(from, self.step.batch * options.kv_heads) };
    }

    pub fn without_slots(&self, list: vwd_block_list) -> vwd_block_list {
        vwd_block_list { slots: self.list().slots, ..list }
    }

    /// The pages of the rows' tails.
    pub fn tail_table(&self) -> vwd_tensor {
        let blocks = self.decoder.options.table_blocks;
        self.decoder.packed(self.decoder.plan.tiered.tails, DType::I32, &[self.step.batch, blocks])
    }

    /// The blocks of each row that are read in host memory: the first ones, without those before the layer's window.
    fn stored_blocks(&self) -> vwd_block_list {
        let Decoder { options, plan, .. } = self.decoder;
        if let Some(n) = plan.windows.iter().position(|&window| window as u32 == self.policy.window) {
            let ([ids, counts], cap) = (plan.tiered.seen, plan.tiered.seen_cap);
            let [ids, counts] =
                [(ids, cap), (counts, 1)].map(|(at, row)| at + n * options.max_rows * row * size_of::<i32>());
            return self.own_blocks(ids, cap, [cap, 0, 1], counts);
        }
        self.own_blocks(plan.tiered.every_block, options.table_blocks, [0, 0, 1], plan.tiered.stored)
    }

    /// The blocks of each row after these, with their slots.
    fn newest_blocks(&self) -> vwd_block_list {
        let [ids, counts] = self.decoder.plan.tiered.newest;
        let slots = self.entries(self.decoder.plan.tiered.newest_slots, NEWEST);
        vwd_block_list { slots, ..self.own_blocks(ids, NEWEST, [NEWEST, 0, 1], counts) }
    }

    /// An empty list for each row. The first entry of `every_block`, 0, is its count.
    fn no_blocks(&self) -> vwd_block_list {
        let (decoder, rows) = (self.decoder, [self.step.batch, self.decoder.options.kv_heads]);
        let zero = decoder.plan.tiered.every_block;
        self.list_at(zero, 0, decoder.tensor(zero, DType::I32, &rows, &[0, 0]))
    }

    /// A list that the KV heads of a row share.
    fn own_blocks(&self, ids: usize, capacity: usize, steps: [usize; 3], counts: usize) -> vwd_block_list {
        let (decoder, rows) = (self.decoder, [self.step.batch, self.decoder.options.kv_heads]);
        vwd_block_list {
            ids: decoder.tensor(ids, DType::I32, &[rows[0], rows[1], capacity], &steps),
            counts: decoder.tensor(counts, DType::I32, &rows, &[1, 0]),
            slots: self.list().slots,
        }
    }

    fn fetched(&self) -> Option<vwd_tensor> {
        Some(self.counts(self.decoder.plan.tiered.fetched))
    }

    /// The lists of the rows of a kind, `list` here and those of the step before.
    fn past<'t>(&self, list: &vwd_block_list, kind: Kind, sequences: Tensor<'t>) -> Past<'t> {
        Past {
            rows: self.step.batch,
            lens: self.lens(kind),
            places: self.decoder.memory.at(self.decoder.plan.places),
            ids: list.ids.data.cast(),
            counts: list.counts.data.cast(),
            capacity: list.ids.shape[2] as usize,
            ..forget(self.decoder, self.number, Some(sequences), self.step.batch)
        }
    }
}

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
            return tiered.resolve_beside(self, attend, stream);
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
