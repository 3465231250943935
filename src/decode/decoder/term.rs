//! The term for what lists leave out: means and covariance of each sequence, and the weight that selection gives for them.
//!
//! They lie by sequence number, and are extended beside the summaries, in every layer whose rows may be sparse:
//!
//!   append ─ summarise ─ extend the sums ─ select, with log_mass ─ attention over the list, joined by the term
//!
//! The sums are of whole blocks before the step, but never of the newest `max_draft` tokens. So a draft that is rejected was in no sum. Where a sequence
//! is cut further back, its sums are made anew.
//!
//! On a tiered cache a block is read in the tail, where it is exact and on the device. Each is counted before it leaves: a block that ends at token e is
//! counted by the first step that begins at e + max_draft or later. The step before began earlier, and wrote fewer than
//! e + max_draft + max_positions − 1 ≤ e + S tokens, so that the block after this one is the newest, and the tail has two. What no tail has any more is passed over.

use super::attend::Attend;
use super::layer::Layer;
use super::rows::Past;
use super::{Decoder, Options};
use crate::abi::{
    vwd_attention_args, vwd_attention_state, vwd_paged_kv, vwd_remainder, vwd_remainder_update_args, vwd_stream,
    vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::core::versioned::zeroed;
use crate::ops::remainder;
use crate::runtime::On;

/// Empties the sums of sequences of a layer.
pub fn forget(decoder: &Decoder, layer: usize, sequences: Option<Tensor>, rows: usize, on: &On) -> Result<()> {
    let Decoder { options, plan, memory, .. } = decoder;
    if !options.has_term_in(&options.layers[layer]) {
        return Ok(());
    }
    let [tokens, ..] = plan.term.sums[layer];
    // The kernel that empties remembered lists does it: tokens, too, are one count for each KV head of a sequence.
    Past::emptied(options, sequences, rows, memory.at(tokens)).remember(on)
}

impl Layer<'_> {
    pub fn has_term(&self) -> bool {
        self.decoder.options.has_term_in(self.policy)
    }

    /// The sums of the step's rows; without the term nothing.
    pub fn remainder(&self) -> vwd_remainder {
        let Decoder { options: Options { max_sequences, kv_heads, dims, .. }, plan, .. } = self.decoder;
        let (n, heads, [dim, value_dim]) = (*max_sequences, *kv_heads, *dims);
        if !self.has_term() {
            return zeroed();
        }
        let [tokens, mean_k, mean_v, covariance] = plan.term.sums[self.number];
        let packed = |at, dtype, extents: &[usize]| self.decoder.packed(at, dtype, extents);
        vwd_remainder {
            rows: self.of_rows(plan.term.rows),
            tokens: packed(tokens, DType::I32, &[n, heads]),
            mean_k: packed(mean_k, DType::F32, &[n, heads, dim]),
            mean_v: packed(mean_v, DType::F32, &[n, heads, value_dim]),
            covariance: packed(covariance, DType::F32, &[n, heads, dim, value_dim]),
            ..zeroed()
        }
    }

    /// The weight of what the layer's list leaves out, for queries of so many dimensions.
    pub fn log_mass(&self, rank: i32) -> vwd_tensor {
        let extents = [self.step.batch, self.step.positions, self.decoder.options.query_heads];
        let t = self.decoder.packed(self.decoder.plan.term.log_mass[self.number], DType::F32, &extents);
        without_positions(t, rank - 1)
    }

    fn of_rows(&self, offset: usize) -> vwd_tensor {
        self.decoder.tensor(offset, DType::I32, &[self.step.batch], &[1])
    }
}

impl Attend<'_> {
    /// Checks the call that extends the sums, and hands it to `then`. Nothing without the term.
    pub fn with_sums(&self, then: impl FnOnce(&remainder::Request) -> Result<()>) -> Result<()> {
        let layer = &self.layer;
        if !layer.has_term() {
            return Ok(());
        }
        let Decoder { session, options, plan, .. } = layer.decoder;
        let (seq_lens, begin) = (layer.of_rows(plan.term.counted), layer.of_rows(plan.term.begin));
        let kv = match &layer.decoder.tiered {
            None => vwd_paged_kv { seq_lens, ..self.kv() },
            Some(tiered) => self.tails(tiered, seq_lens),
        };
        let args = vwd_remainder_update_args { block_size: options.block_size as u32, begin, ..zeroed() };
        let request = remainder::Request::from_c(session, &args, &kv, &self.remainder)?;
        let floors = layer.of_rows(plan.tiered.floors);
        let floors = layer.decoder.tiered.as_ref().map(|_| session.checks().required("floors", &floors)).transpose()?;
        then(&remainder::Request { floors, ..request })
    }

    /// Extends the sums by the blocks that became whole.
    pub fn extend_sums(&self, stream: vwd_stream) -> Result<()> {
        self.with_sums(|request| remainder::update(&self.layer.decoder.session, request, stream))
    }

    /// Attention over a list, joined by the term if there is one.
    pub fn joined(&self, args: vwd_attention_args) -> vwd_attention_args {
        if !self.layer.has_term() {
            return args;
        }
        let (remainder, log_mass) = (&raw const self.remainder, self.layer.log_mass(args.q.ndim));
        vwd_attention_args { remainder, log_mass, state: self.joined_state(), ..args }
    }

    fn joined_state(&self) -> vwd_attention_state {
        let Layer { decoder, step, .. } = &self.layer;
        let Options { query_heads, dims, .. } = &decoder.options;
        let [acc, m, l] = std::array::from_fn(|n| {
            let (extents, rank) = ([step.batch, step.positions, *query_heads, dims[1]], if n == 0 { 4 } else { 3 });
            let t = decoder.packed(decoder.plan.term.state[n], DType::F32, &extents[..rank]);
            without_positions(t, rank as i32 - 4 + self.args.q.ndim)
        });
        vwd_attention_state { acc, m, l }
    }
}

/// A tensor [B, Q, …] with so many dimensions: where these are fewer, one of one position as [B, …].
pub fn without_positions(mut t: vwd_tensor, rank: i32) -> vwd_tensor {
    if t.ndim > rank {
        t.shape.copy_within(2..5, 1);
        t.strides.copy_within(2..5, 1);
        t.ndim = rank;
    }
    t
}
