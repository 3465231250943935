//! What a budget's profile needs of a decoder beside its calls: its size, lists of the profile's choice, and the end of what runs beside the
//! caller's stream.

use super::Decoder;
use super::layer::Layer;
use super::memory::{Kind, Plan};
use super::options::Options;
use crate::abi::{vwd_decoder_options, vwd_stream};
use crate::core::allocate::{filled, zeros};
use crate::core::status::Result;
use crate::runtime::{On, Session};

const PURPOSE: &str = "the lists of a budget's profile";

impl Decoder {
    /// Bytes of the decoder that these options make, without a cache.
    ///
    /// # Safety
    /// As for `create`.
    pub unsafe fn bytes_of(session: &Session, c: &vwd_decoder_options) -> Result<usize> {
        // SAFETY: says the caller.
        Ok(Plan::of(&unsafe { Options::from_c(&session.checks(), c, None)? })?.bytes)
    }

    /// The stream waits for all that was foreseen so far.
    pub fn settle(&self, stream: vwd_stream) -> Result<()> {
        self.join_last_foresight(&self.session.on(stream)?)
    }

    /// The layer counts as foreseen in this step, by what the branch was given last: the list of an earlier step, or one that was set.
    pub fn keep_foreseen(&self, layer: u32, stream: vwd_stream) -> Result<()> {
        let layer = Layer::new(self, layer)?;
        if let (On::Cuda(enqueue), Some(branch)) = (self.session.on(stream)?, self.foresight.branch()) {
            branch.fork(&enqueue)?;
            branch.end(&enqueue, layer.number)?;
        }
        layer.set_foreseen();
        Ok(())
    }

    /// Whether the layer attends a list that was made ahead where its attention is enqueued next.
    pub fn finds_foreseen(&self, layer: u32, stream: vwd_stream) -> Result<bool> {
        let layer = Layer::new(self, layer)?;
        Ok(layer.join_foresight(&self.session.on(stream)?)? && layer.is_foreseen())
    }

    /// The ids that the last selection chose, for each row and KV head; none for rows that were dense. All streams have passed it.
    pub fn selected(&self, layer: u32) -> Result<Vec<Vec<i32>>> {
        let layer = Layer::new(self, layer)?;
        let (capacity, lists) = (self.options.capacity(), layer.step.batch * self.options.kv_heads);
        let mut counts: Vec<i32> = zeros(lists, PURPOSE)?;
        let mut lens: Vec<i32> = zeros(layer.step.batch, PURPOSE)?;
        let mut ids: Vec<i32> = zeros(lists * capacity, PURPOSE)?;
        self.memory.read(self.offset(layer.counts(self.plan.counts).data), &mut counts)?;
        self.memory.read(self.offset(layer.lens(Kind::Sparse).cast_mut().cast()), &mut lens)?;
        self.memory.read(self.plan.ids, &mut ids)?;
        let of = |list: usize| {
            let is_sparse = lens[list / self.options.kv_heads] > 0;
            let count = if is_sparse { counts[list] as usize } else { 0 };
            ids[list * capacity..][..count].to_vec()
        };
        Ok((0..lists).map(of).collect())
    }

    /// Gives the layer a list made ahead for each row and KV head.
    pub fn set_predicted(&self, layer: u32, lists: &[Vec<i32>]) -> Result<()> {
        let layer = Layer::new(self, layer)?;
        let capacity = layer.policy.predicted_capacity();
        let mut ids: Vec<i32> = zeros(lists.len() * capacity, PURPOSE)?;
        for (n, list) in lists.iter().enumerate() {
            ids[n * capacity..][..list.len()].copy_from_slice(list);
        }
        let counts: Vec<i32> = lists.iter().map(|list| list.len() as i32).collect();
        self.memory.write(self.plan.predicted[layer.number], &ids)?;
        self.memory.write(self.offset(layer.counts(self.plan.predicted_counts).data), &counts)
    }

    /// Gives the layer past scores of which the best blocks are these, for each row and KV head.
    pub fn set_scores(&self, layer: u32, lists: &[Vec<i32>]) -> Result<()> {
        let (layer, blocks) = (Layer::new(self, layer)?, self.options.max_blocks);
        let mut levels = filled(0.0f32, lists.len() * blocks, PURPOSE)?;
        for (n, list) in lists.iter().enumerate() {
            list.iter().for_each(|&id| levels[n * blocks + id as usize] = 1.0);
        }
        self.memory.write(self.plan.holt[layer.number][0], &levels)
    }

    /// Where a view of the decoder's memory begins.
    fn offset(&self, data: *mut std::ffi::c_void) -> usize {
        data as usize - self.memory.at::<u8>(0) as usize
    }
}
