//! A layer in a step: what its calls have in common, and views of what the decoder keeps for it.

use super::memory::{Kind, summary_rows};
use super::options::{Method, Options, Policy, Strategy};
use super::{Decoder, Step};
use crate::abi::{
    VWD_DECODER_DENSE, VWD_DECODER_SPARSE, VWD_INDEX_AXIS, VWD_INDEX_MINMAX, VWD_SELECT_AXIS, VWD_SELECT_MINMAX,
    vwd_block_list, vwd_index, vwd_predictor_state, vwd_select_blocks_args, vwd_stream, vwd_tensor,
};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::strided;
use crate::core::versioned::zeroed;
use crate::ops::select;
use std::sync::atomic::Ordering::Relaxed;

pub struct Layer<'a> {
    pub decoder: &'a Decoder,
    pub step: Step,
    pub number: usize,
    pub policy: &'a Policy,
    /// Whether the layer is SERIAL in this step because its strategy does not pay.
    falls_back: bool,
}

impl<'a> Layer<'a> {
    pub fn new(decoder: &'a Decoder, layer: u32) -> Result<Layer<'a>> {
        let layers = &decoder.options.layers;
        let number = layer as usize;
        let Some(policy) = layers.get(number) else {
            return Err(Error::argument("layer", layer, format!("0 … {}", layers.len() - 1)));
        };
        let Some(step) = *decoder.step.lock() else {
            return Err(Error::argument("decoder", "no step", "vwd_decoder_begin first"));
        };
        let fallback = decoder.fallback.as_ref().filter(|_| step.positions == 1);
        let falls_back = fallback.is_some_and(|fallback| fallback.of(number));
        Ok(Layer { decoder, step, number, policy, falls_back })
    }

    /// Whether some row may attend a selection; and whether some row may attend all tokens.
    pub fn has_sparse(&self) -> bool {
        self.policy.method != Method::Dense && self.step.mode != Some(VWD_DECODER_DENSE)
    }

    pub fn has_dense(&self) -> bool {
        let threshold = if self.falls_back { self.policy.serial_threshold } else { self.policy.threshold };
        self.step.mode != Some(VWD_DECODER_SPARSE) || self.step.shortest as i64 <= threshold as i64
    }

    /// The policy's strategy, where the step is one for it and it pays.
    pub fn strategy(&self) -> Strategy {
        if self.step.positions == 1 && !self.falls_back { self.policy.strategy } else { Strategy::Serial }
    }

    /// The layer as it is where its strategy pays.
    pub fn without_fallback(&self) -> Layer<'a> {
        Layer { falls_back: false, ..*self }
    }

    /// Whether a list was foreseen in this step.
    pub fn is_foreseen(&self) -> bool {
        self.decoder.foreseen[self.number].load(Relaxed) == self.step.number
    }

    pub fn set_foreseen(&self) {
        self.decoder.foreseen[self.number].store(self.step.number, Relaxed);
    }

    // --- what the decoder keeps ----------------------------------------------------------------------------------

    pub fn index(&self) -> vwd_index {
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

    /// The selected list of the layer at work.
    pub fn list(&self) -> vwd_block_list {
        let plan = &self.decoder.plan;
        self.list_at(plan.ids, self.decoder.options.capacity(), self.counts(plan.counts))
    }

    /// The list that the layer's strategy made ahead.
    pub fn predicted(&self) -> vwd_block_list {
        let (plan, capacity) = (&self.decoder.plan, self.policy.predicted_capacity());
        self.list_at(plan.predicted[self.number], capacity, self.counts(plan.predicted_counts))
    }

    pub fn list_at(&self, ids: usize, capacity: usize, counts: vwd_tensor) -> vwd_block_list {
        vwd_block_list {
            ids: self.entries(ids, capacity),
            counts,
            slots: strided(self.decoder.session.device(), std::ptr::null_mut(), DType::I32, &[], &[]),
        }
    }

    /// A word for each entry of a list of each row and KV head.
    pub fn entries(&self, offset: usize, capacity: usize) -> vwd_tensor {
        self.decoder.packed(offset, DType::I32, &[self.step.batch, self.decoder.options.kv_heads, capacity])
    }

    /// The layer's part of [layers, max_rows, Hk].
    pub fn counts(&self, offset: usize) -> vwd_tensor {
        let Options { max_rows, kv_heads, .. } = self.decoder.options;
        let offset = offset + self.number * max_rows * kv_heads * size_of::<i32>();
        self.decoder.packed(offset, DType::I32, &[self.step.batch, kv_heads])
    }

    /// Where the numbers of a kind begin, one for each row.
    pub fn lens(&self, kind: Kind) -> *const i32 {
        self.decoder.memory.at(self.lens_at(kind))
    }

    fn lens_at(&self, kind: Kind) -> usize {
        let plan = &self.decoder.plan;
        let row = plan.class_of[self.number][self.falls_back as usize] * Kind::COUNT + kind as usize;
        plan.lens + row * self.decoder.options.max_rows * size_of::<i32>()
    }

    pub fn q_lens(&self, kind: Kind) -> vwd_tensor {
        self.decoder.tensor(self.lens_at(kind), DType::I32, &[self.step.batch], &[1])
    }

    /// The scores of the layer at work.
    pub fn scores(&self) -> vwd_tensor {
        let Options { kv_heads, max_blocks, .. } = self.decoder.options;
        self.decoder.packed(self.decoder.plan.scores, DType::F32, &[self.step.batch, kv_heads, max_blocks])
    }

    /// Level and trend of the layer's scores: of all sequences, or where the step does not name them of so many as it has rows.
    pub fn holt(&self) -> vwd_predictor_state {
        let has_numbers = !self.step.sequences.data.is_null();
        self.decoder.holt(self.number, if has_numbers { self.decoder.options.max_sequences } else { self.step.batch })
    }

    // --- selection -----------------------------------------------------------------------------------------------

    /// The selection of the policy, for the rows that have positions of a kind.
    pub fn select_args(&self, q: vwd_tensor, kind: Kind) -> vwd_select_blocks_args {
        let Layer { decoder, step, policy, .. } = self;
        let vwd_select_blocks_args { log_mass: absent, .. } = zeroed();
        vwd_select_blocks_args {
            method: if policy.method == Method::Axis { VWD_SELECT_AXIS } else { VWD_SELECT_MINMAX },
            block_size: decoder.options.block_size as u32,
            k: policy.k,
            init_blocks: policy.init,
            local_blocks: policy.local,
            scale: decoder.options.scale,
            q,
            q_lens: self.q_lens(kind),
            seq_lens: step.seq_lens,
            selected: self.list(),
            log_mass: if self.has_term() { self.log_mass(q.ndim) } else { absent },
            ..zeroed()
        }
    }

    pub fn select(&self, args: &vwd_select_blocks_args, stream: vwd_stream) -> Result<()> {
        let (session, index) = (&self.decoder.session, self.index());
        select::blocks(session, &select::Request::of_blocks(session, args, &index)?, stream)
    }

    pub fn select_scratch(&self, args: &vwd_select_blocks_args) -> Result<u64> {
        let (session, index) = (&self.decoder.session, self.index());
        select::blocks_scratch(session, &select::Request::of_blocks(session, args, &index)?)
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
