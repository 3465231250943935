//! The tiered cache of a decoder: the calls on it, and the lists whose blocks lie in its slots. The strategies on a cache are in `attend_tiered`.
//!
//! The cache's blocks are the decoder's pages: summaries lie by host block, and a row's page table is the row of its sequence in the
//! cache's table. New tokens go to tails, where their blocks are summarised.

use super::Decoder;
use super::layer::Layer;
use super::memory::Kind;
use super::options::NEWEST;
use super::rows::Past;
use crate::abi::{
    vwd_block_list, vwd_int4_kv, vwd_kv_cache_append_args, vwd_kv_cache_layer, vwd_kv_cache_resolve_args, vwd_stream,
    vwd_tensor,
};
use crate::core::allocate::reserved;
use crate::core::dtype::DType;
use crate::core::status::Result;
use crate::core::tensor::{Tensor, given};
use crate::core::versioned::zeroed;
use crate::kv::{self, AppendRequest, KvCache, ResolveRequest, RowTables};
use crate::ops::attention::FarPages;
use std::sync::Arc;

/// The cache that has the keys and values, and views of each layer's slots.
pub struct Tiered {
    pub cache: Arc<KvCache>,
    views: Vec<vwd_kv_cache_layer>,
    /// Keys, values and scales of each layer in host memory; none where blocks are coded.
    pub stored: Vec<[vwd_tensor; 4]>,
    /// The runs of each layer in host memory, as pages behind those of its slots, where attention may read them so.
    pub far_pages: Vec<Option<FarPages>>,
    /// The codes in the slots of each layer; empty where slots hold keys and values.
    coded: Vec<vwd_int4_kv>,
    /// The codes of each layer in host memory; empty where blocks are not coded. The first block of a sequence is never coded. The page table of a
    /// step says which codes a row has.
    pub stored_codes: Vec<vwd_int4_kv>,
}

/// What a resolve does beside giving slots.
#[derive(Default)]
pub struct Further {
    /// Where it writes which blocks were resident, and how many were not.
    pub resident: Option<vwd_block_list>,
    pub missed_counts: Option<vwd_tensor>,
    /// The list of the layer that was resolved just before, if its slots may still be read.
    pub read: Option<vwd_block_list>,
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
    pub fn resolve(
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
    pub fn resolve_beside(&self, layer: &Layer, attend: impl FnOnce() -> Result<()>, stream: vwd_stream) -> Result<()> {
        let Layer { decoder: Decoder { plan, .. }, step, number, .. } = layer;
        let [missed_counts, again] = [plan.tiered.fetched, plan.missed].map(|at| layer.counts(at));
        let (sequences, wanted) = (step.sequences, layer.selected_in_slots());
        let args = vwd_kv_cache_resolve_args { layer: *number as u32, sequences, wanted, missed_counts, ..zeroed() };
        let request = ResolveRequest::of_step(&self.cache, &args, None)?;
        // SAFETY: the counts are of the decoder's memory.
        unsafe { self.cache.find_far(&request, again.data.cast(), stream)? };
        self.cache.give_far(&request, stream)?;
        attend()
    }

    pub fn fetch(&self, layer: &Layer, stream: vwd_stream) -> Result<()> {
        self.begin_fetch(layer.number, stream)
    }

    pub fn wait(&self, layer: &Layer, stream: vwd_stream) -> Result<()> {
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
    pub fn resident(&self) -> vwd_block_list {
        let Decoder { options, plan, .. } = self.decoder;
        let ([ids, slots, counts], rows) = (plan.tiered.resident, [self.step.batch, options.kv_heads]);
        let counts = self.decoder.packed(counts, DType::I32, &rows);
        vwd_block_list {
            slots: self.entries(slots, options.capacity()),
            ..self.list_at(ids, options.capacity(), counts)
        }
    }

    /// On a CPU session, for a strategy that would repair.
    pub fn count_fetched_as_missed(&self) {
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
    pub fn stored_blocks(&self) -> vwd_block_list {
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
    pub fn newest_blocks(&self) -> vwd_block_list {
        let [ids, counts] = self.decoder.plan.tiered.newest;
        let slots = self.entries(self.decoder.plan.tiered.newest_slots, NEWEST);
        vwd_block_list { slots, ..self.own_blocks(ids, NEWEST, [NEWEST, 0, 1], counts) }
    }

    /// An empty list for each row. The first entry of `every_block`, 0, is its count.
    pub fn no_blocks(&self) -> vwd_block_list {
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

    pub fn fetched(&self) -> Option<vwd_tensor> {
        Some(self.counts(self.decoder.plan.tiered.fetched))
    }

    /// The lists of the rows of a kind, `list` here and those of the step before.
    pub fn past<'t>(&self, list: &vwd_block_list, kind: Kind, sequences: Tensor<'t>) -> Past<'t> {
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
