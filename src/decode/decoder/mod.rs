//! The decoder: the attention of decode steps on the engine's own paged keys and values.
//!
//! `begin` distributes the rows of a step: some attend a selection of their blocks, some all their tokens, some take no part.
//! `attend` then composes, for one layer, what the library has: the new tokens go to their pages, the blocks that they touch are
//! summarised, blocks are selected, and attention reads them, as the layer's strategy says. `foresee` selects for a layer before its
//! queries are there. Each of these calls is for some of the rows: its q_lens give the other rows no positions.
//!
//! On a tiered cache the keys and values are the cache's (`tiered`): its blocks are the pages, its table is the page table, and lists are
//! read by the slots in which their blocks lie.
//!
//! Summaries lie by page of the engine's cache. So a sequence that joins, leaves, moves to another row or shares the pages of a
//! prefix needs no call here. What is remembered of scores and of drafts lies by the sequence's number.

mod attend;
mod attend_tiered;
mod begin;
mod cpu;
mod cuda;
mod fallback;
mod foresee;
mod layer;
mod memory;
mod options;
mod rows;
mod side;
mod term;
mod tiered;
mod trial;

pub(crate) use cuda::Kernels;
pub use options::takes_prr;

use crate::abi::{
    vwd_decoder_accept_args, vwd_decoder_attend_args, vwd_decoder_details, vwd_decoder_options, vwd_decoder_reset_args,
    vwd_predictor_reset_args, vwd_predictor_state, vwd_stream, vwd_tensor, vwd_verify_args,
};
use crate::core::allocate::{collected, filled, reserved};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::{ANY, MAX_RANK, Tensor, strided};
use crate::core::versioned::zeroed;
use crate::decode::budget::costs::Costs;
use crate::decode::predictor;
use crate::kv::KvCache;
use crate::ops::contents::{self, Number, Rule};
use crate::ops::verify;
use crate::runtime::{Memory, On, Session, require_no_flags};
use attend::Attend;
use fallback::Fallback;
use memory::Plan;
use options::{Options, Strategy};
use parking_lot::Mutex;
use rows::{Append, Complete, Distribute, Drafts, Observe, Past, Take, acceptance};
use side::Side;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use tiered::Tiered;

pub struct Decoder {
    session: Arc<Session>,
    options: Options,
    plan: Plan,
    step: Mutex<Option<Step>>,
    /// Steps begun so far; and for each layer the last step in which it was foreseen.
    steps: AtomicU64,
    foreseen: Vec<AtomicU64>,
    /// Where projections and selections run that are made ahead: a use for each layer, and one more for projections.
    foresight: Side,
    /// The last use of a layer that may not have been joined.
    last_foresight: Mutex<Option<usize>>,
    /// Whether a projection may still read the caller's tensors.
    is_projecting: AtomicBool,
    /// What runs beside a layer's calls on the caller's stream: attention over predicted lists, or summaries and the selection.
    speculation: Side,
    /// The foreseen layers whose lists are fetched once the layer that is attended next has its own blocks.
    to_fetch: Mutex<Vec<usize>>,
    /// The cache that has the keys and values, if not the engine's pages.
    tiered: Option<Tiered>,
    /// Which strategies give way to SERIAL, where a budget decides that.
    fallback: Option<Fallback>,
    // The last field, so that it is freed after the branches have ended.
    memory: Memory,
}

/// The one use of the branch that runs beside a layer's calls.
const SPECULATION: usize = 0;

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
    /// Whether rows may have tokens that the decoder has not summarised.
    has_begin: bool,
    /// [B] or absent: row i is sequence i.
    sequences: vwd_tensor,
    /// [B, Q, ⌈Q/32⌉] or absent: rows are chains.
    tree: vwd_tensor,
    /// How many steps were begun, this one included.
    number: u64,
    /// The layers up to the last one that was attended.
    attended: usize,
}

impl Decoder {
    /// # Safety
    /// The arrays of the options have the lengths that these state.
    pub unsafe fn create(
        session: &Arc<Session>,
        c: &vwd_decoder_options,
        cache: Option<&Arc<KvCache>>,
        budget: Option<&Arc<Costs>>,
    ) -> Result<Decoder> {
        if cache.is_some_and(|cache| !Arc::ptr_eq(cache.session(), session)) {
            return Err(Error::argument("cache", "a cache of another session", "one of the decoder's session"));
        }
        // SAFETY: says the caller.
        let options = unsafe { Options::from_c(&session.checks(), c, cache.map(|cache| cache.options()))? };
        let device = session.description();
        let fallback = budget.map(|costs| Fallback::new(costs, &options, c.policy_count > 0, &device)).transpose()?;
        let tiered = cache.map(|cache| Tiered::new(cache, options.longest_lists())).transpose()?;
        let plan = Plan::of(&options)?;
        let memory = Memory::alloc(session, plan.bytes, "a decoder")?;
        memory.write(plan.thresholds_at, &plan.thresholds)?;
        let uses = |uses: fn(Strategy) -> bool| options.layers.iter().any(|policy| uses(policy.strategy));
        let layers = options.layers.len();
        let foresight = Side::create(session, if uses(Strategy::foresees) { layers + 1 } else { 0 })?;
        let speculation = Side::create(session, uses(Strategy::branches) as usize)?;
        let decoder = Decoder {
            session: session.clone(),
            step: Mutex::new(None),
            steps: AtomicU64::new(0),
            foreseen: collected((0..layers).map(|_| AtomicU64::new(0)), "the layers of a decoder")?,
            foresight,
            last_foresight: Mutex::new(None),
            is_projecting: AtomicBool::new(false),
            speculation,
            to_fetch: Mutex::new(reserved(layers, "the layers of a decoder")?),
            tiered,
            fallback,
            options,
            plan,
            memory,
        };
        let (count, drafts, expected) = (decoder.options.max_sequences, decoder.drafts(), acceptance(0.0, 0.0));
        const PURPOSE: &str = "what a decoder recommends";
        decoder.memory.write(decoder.plan.acceptance, &filled(expected, count, PURPOSE)?)?;
        decoder.memory.write(decoder.plan.draft_lens, &filled(drafts.recommended(expected), count, PURPOSE)?)?;
        decoder.forget_scores()?;
        if decoder.tiered.is_some() {
            let numbers = collected(0..decoder.options.max_rows as i32, "the sequences of a decoder")?;
            decoder.memory.write(decoder.plan.tiered.numbers, &numbers)?;
            let blocks = collected(0..decoder.options.table_blocks as i32, "the blocks of a sequence")?;
            decoder.memory.write(decoder.plan.tiered.every_block, &blocks)?;
            decoder.memory.write(decoder.plan.tiered.windows_at, &decoder.plan.windows)?;
        }
        Ok(decoder)
    }

    pub fn details(&self) -> vwd_decoder_details {
        let (plan, count) = (&self.plan, self.options.max_sequences);
        let of_sequences = |at: usize, dtype: DType| self.tensor(at, dtype, &[count], &[1]);
        let Options { layers, max_rows, kv_heads, .. } = &self.options;
        let [fallback_layers, fallbacks] = self.fallback.as_ref().map_or([0; 2], Fallback::counts);
        let of_lists = |at: usize| self.packed(at, DType::I32, &[layers.len(), *max_rows, *kv_heads]);
        vwd_decoder_details {
            struct_size: size_of::<vwd_decoder_details>() as u32,
            flags: 0,
            bytes: self.memory.bytes() as u64,
            draft_lens: of_sequences(plan.draft_lens, DType::I32),
            acceptance: of_sequences(plan.acceptance, DType::F32),
            drafted: of_sequences(plan.drafted, DType::I32),
            accepted: of_sequences(plan.accepted, DType::I32),
            selected: of_lists(plan.counts),
            predicted: of_lists(plan.predicted_counts),
            missed: of_lists(plan.missed),
            fetched: match self.tiered {
                Some(_) => of_lists(plan.tiered.fetched),
                None => strided(self.session.device(), std::ptr::null_mut(), DType::I32, &[], &[]),
            },
            fallback_layers,
            fallbacks,
        }
    }

    // --- a step --------------------------------------------------------------------------------------------------

    pub fn attend(&self, c: &vwd_decoder_attend_args, stream: vwd_stream) -> Result<()> {
        self.attend_layer(c, stream).inspect_err(|_| self.join_after_failure(stream))
    }

    fn attend_layer(&self, c: &vwd_decoder_attend_args, stream: vwd_stream) -> Result<()> {
        let attend = Attend::new(self, c)?;
        // The layer fetches by itself what was foreseen of it.
        self.to_fetch.lock().retain(|&layer| layer != c.layer as usize);
        attend.run(stream)?;
        // Not before: the projection for a layer to come has the time of this one.
        self.join_projection(stream)?;
        if let Some(step) = &mut *self.step.lock() {
            step.attended = c.layer as usize + 1;
        }
        self.fetch_foreseen(stream)
    }

    /// As [`Attend::scratch`].
    pub fn attend_scratch(&self, c: &vwd_decoder_attend_args) -> Result<u64> {
        Attend::new(self, c)?.scratch()
    }

    // --- what is remembered of sequences --------------------------------------------------------------------------------------------------

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
        Observe { drafts, sequences, rows, accepted: None, draft_lens: None, gamma: 0 }.run(&on)?;
        drop(on);
        for layer in self.remembered() {
            let state = self.holt(layer, self.options.max_sequences);
            let args = vwd_predictor_reset_args { state, rows: c.sequences, ..zeroed() };
            predictor::reset(&self.session, &predictor::ResetRequest::from_c(&self.session, &args)?, stream)?;
        }
        let on = self.session.on(stream)?;
        let layers = self.options.layers.iter().enumerate().filter(|(_, policy)| policy.strategy.remembers_lists());
        for (layer, _) in layers {
            tiered::forget(self, layer, sequences, rows).remember(&on)?;
        }
        (0..self.options.layers.len()).try_for_each(|layer| term::forget(self, layer, sequences, rows, &on))
    }

    /// The layers whose scores are remembered.
    fn remembered(&self) -> impl Iterator<Item = usize> + '_ {
        let layers = self.options.layers.iter().enumerate();
        layers.filter(|(_, policy)| policy.strategy.remembers()).map(|(n, _)| n)
    }

    /// Level and trend of a layer's scores, of the first `sequences`.
    fn holt(&self, layer: usize, sequences: usize) -> vwd_predictor_state {
        let Options { kv_heads, max_blocks, .. } = self.options;
        let [level, trend] =
            self.plan.holt[layer].map(|at| self.packed(at, DType::F32, &[sequences, kv_heads, max_blocks]));
        vwd_predictor_state { level, trend }
    }

    /// Sets all levels to NaN, which means that a block has had no score.
    fn forget_scores(&self) -> Result<()> {
        let Options { max_sequences, kv_heads, max_blocks, .. } = self.options;
        let bytes = max_sequences * kv_heads * max_blocks * size_of::<f32>();
        self.remembered().try_for_each(|layer| self.memory.fill(self.plan.holt[layer][0], 0xff, bytes))
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
        let mut steps = [1; MAX_RANK];
        for d in (1..extents.len()).rev() {
            steps[d - 1] = steps[d] * extents[d];
        }
        self.tensor(offset, dtype, extents, &steps)
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

impl Complete {
    fn run(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(_) => {
                cpu::complete(self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::complete(enqueue, self),
        }
    }
}

impl Past<'_> {
    /// Keeps the lists of rows for the next step of their sequences.
    fn remember(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(_) => {
                cpu::remember(self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::remember(enqueue, self),
        }
    }

    /// Gives rows the lists of the step before.
    fn recall(&self, on: &On) -> Result<()> {
        match on {
            On::Cpu(_) => {
                cpu::recall(self);
                Ok(())
            }
            On::Cuda(enqueue) => cuda::recall(enqueue, self),
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
