//! The request of `vwd_kv_cache_resolve`: lists of blocks, for which slots are found.

use super::KvCache;
use super::options::Options;
use crate::abi::{vwd_block_list, vwd_kv_cache_resolve_args};
use crate::core::dtype::DType;
use crate::core::overlap;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::contents::{Number, Rule};
use crate::ops::views::{BlockList, ListAt, Lists};
use crate::runtime::require_no_flags;
use std::sync::atomic::Ordering::Relaxed;

/// Checked arguments of `vwd_kv_cache_resolve`.
pub struct ResolveRequest<'a> {
    pub layer: usize,
    /// [B]
    pub(super) sequences: Tensor<'a>,
    /// The wanted list. Its slots are written.
    pub(super) wanted: BlockList<'a>,
    pub(super) resident: Option<BlockList<'a>>,
    pub(super) missed_counts: Option<Tensor<'a>>,
    /// A block keeps its slot if this resolve names it, or one of the `hold` − 1 resolves before it did.
    pub(super) hold: usize,
}

const WANTED: [&str; 3] = ["wanted.ids", "wanted.counts", "wanted.slots"];
const RESIDENT: [&str; 3] = ["resident.ids", "resident.counts", "resident.slots"];

impl<'a> ResolveRequest<'a> {
    pub fn from_c(cache: &KvCache, c: &'a vwd_kv_cache_resolve_args) -> Result<ResolveRequest<'a>> {
        let request = ResolveRequest::new(cache, c, cache.options.hold)?;
        request.check_size(cache)?;
        Ok(request)
    }

    /// The lists of a decoder's step, which enqueues the resolves of a layer itself. `beside`: the number of entries that the resolve just before
    /// named, if its lists are still read when this one runs. Lists of earlier resolves no longer are.
    pub fn of_step(
        cache: &KvCache,
        c: &'a vwd_kv_cache_resolve_args,
        beside: Option<usize>,
    ) -> Result<ResolveRequest<'a>> {
        let request = ResolveRequest::new(cache, c, 1 + beside.is_some() as usize)?;
        let (entries, slots) = (request.most_entries() + beside.unwrap_or(0), cache.all.layer(request.layer).slots);
        if entries > slots {
            return Err(Error::argument(WANTED[0], format!("{entries} entries"), format!("at most the {slots} slots")));
        }
        Ok(request)
    }

    fn new(cache: &KvCache, c: &'a vwd_kv_cache_resolve_args, hold: usize) -> Result<ResolveRequest<'a>> {
        require_no_flags("flags", c.flags)?;
        let (checks, layer) = (cache.session.checks(), cache.layer(c.layer)?);
        let sequences = cache.check_sequences(&c.sequences)?;
        let kv_heads = cache.options.kv_heads;
        let lists = |positions| Lists { batch: sequences.dim(0), positions, kv_heads };
        let slots = |list: BlockList<'a>, name| match list.slots {
            Some(slots) => slots.writable(),
            None => Err(Error::argument(name, "data is NULL", "a tensor")),
        };
        let wanted = BlockList::with_slots_from_c(&checks, &c.wanted, WANTED, lists(positions(&c.wanted)))?;
        let wanted_slots = slots(wanted, WANTED[2])?;
        let positions = wanted.is_own().then(|| wanted.per_head());
        let resident = match BlockList::is_absent(&c.resident) {
            true => None,
            false => {
                let lists = lists(positions);
                let resident = BlockList::with_slots_from_c(&checks, &c.resident, RESIDENT, lists)?.writable()?;
                slots(resident, RESIDENT[2])?;
                if resident.ids.shape() != wanted.ids.shape() {
                    let found = format!("shape {:?}", resident.ids.shape());
                    return Err(Error::argument(
                        RESIDENT[0],
                        found,
                        format!("{:?}, as wanted.ids", wanted.ids.shape()),
                    ));
                }
                Some(resident)
            }
        };
        let missed_counts = checks.optional("missed_counts", &c.missed_counts)?;
        if let Some(missed) = &missed_counts {
            missed.of(DType::I32)?.writable()?;
            if missed.shape() != wanted.counts.shape() {
                let found = format!("shape {:?}", missed.shape());
                return Err(Error::argument(
                    "missed_counts",
                    found,
                    format!("{:?}, as wanted.counts", wanted.counts.shape()),
                ));
            }
        }
        let [ids, counts, at] = resident.as_ref().map_or([None; 3], |list| list.tensors());
        overlap::reject(
            &[Some(&wanted_slots), ids, counts, at, missed_counts.as_ref()],
            &[Some(&sequences), Some(&wanted.ids), Some(&wanted.counts)],
        )?;
        Ok(ResolveRequest { layer, sequences, wanted, resident, missed_counts, hold })
    }

    /// What a session that checks contents reads. Entries may have any order here. The lists of a row whose sequence is −1 may hold
    /// anything.
    pub(super) fn contents(&self, options: &Options) -> Vec<Rule<'a>> {
        let BlockList { ids, counts, .. } = self.wanted;
        let of_sequence = |rule: Rule<'a>| rule.where_positive(Number::of(self.sequences).plus(1));
        let count = Number::of(counts).at_most(self.wanted.cap());
        let entries = |rule| of_sequence(rule).between(ids.rank() - 1, Number::constant(0), count);
        vec![
            Rule::within(self.sequences, -1, Number::constant(options.max_sequences)),
            of_sequence(Rule::up_to(counts, self.wanted.cap())),
            entries(Rule::within(ids, 0, Number::constant(options.max_blocks))),
        ]
    }

    /// Checks that the cache has a slot for every block that the lists may name.
    fn check_size(&self, cache: &KvCache) -> Result<()> {
        let (entries, options, longest) =
            (self.most_entries(), cache.all.layer(self.layer), cache.longest.load(Relaxed));
        let Options { slots, hold, .. } = options;
        let most = options.largest_selection();
        // Lists of a decoder may be longer, and keep their slots during this call.
        let beside_lists = slots.saturating_sub((hold - 1).saturating_mul(longest));
        if entries <= most.min(beside_lists) {
            return Ok(());
        }
        let expected = if entries > most {
            format!("at most {most} (slots {slots} of layer {} / options.hold {hold})", self.layer)
        } else {
            format!(
                "at most {beside_lists} in layer {}: lists of a decoder on the cache keep {longest} slots",
                self.layer
            )
        };
        Err(Error::argument(WANTED[0], format!("{entries} entries"), expected))
    }

    /// All elements of `wanted.ids`.
    pub(super) fn most_entries(&self) -> usize {
        let ids = &self.wanted.ids;
        if ids.is_empty() { 0 } else { ids.count() }
    }

    /// Whether there is nothing to find and nothing to write, however large the other extents are.
    pub(super) fn is_empty(&self) -> bool {
        let writes_counts = self.resident.is_some() || self.missed_counts.is_some();
        self.wanted.counts.is_empty() || (self.wanted.ids.is_empty() && !writes_counts)
    }

    pub(super) fn lists(&self) -> impl Iterator<Item = ListAt> + use<> {
        let (batch, positions) = (self.sequences.dim(0), self.wanted.per_head());
        let heads = self.wanted.ids.dim(self.wanted.ids.rank() - 2);
        (0..batch * positions * heads).map(move |n| [n / heads / positions, n / heads % positions, n % heads])
    }

    /// The entries of a list, as (index in the list, sequence, id).
    ///
    /// # Safety
    /// The call's caller keeps the tensors valid, and they lie in host memory.
    pub(super) unsafe fn entries(&self, at: ListAt) -> impl Iterator<Item = (usize, usize, i32)> {
        // SAFETY: the caller keeps the tensors valid, in host memory, and the list is one of them.
        let (sequence, count) = unsafe { (self.sequences.get::<i32, 1>([at[0]]), self.wanted.count(at)) };
        let sequence = usize::try_from(sequence).unwrap_or(usize::MAX);
        // SAFETY: as above.
        (0..count).map(move |j| (j, sequence, unsafe { self.wanted.id(at, j) }))
    }
}

impl ResolveRequest<'_> {
    /// Writes the numbers of resident and missed entries of a list.
    ///
    /// # Safety
    /// The conditions of [`ResolveRequest::entries`] hold.
    pub(super) unsafe fn set_counts(&self, at: ListAt, resident_count: usize, missed: usize) {
        // SAFETY: the caller keeps the tensors valid, in host memory; the counts have the shape of wanted.counts.
        unsafe {
            if let Some(resident) = &self.resident {
                resident.set_count(at, resident_count);
            }
            if let Some(counts) = &self.missed_counts {
                let place = if self.wanted.is_own() { at } else { [at[0], at[2], 0] };
                counts.at::<i32, 3>(place).write(missed as i32);
            }
        }
    }
}

/// Q if each query position has its own list, from the shape of ids.
fn positions(list: &vwd_block_list) -> Option<usize> {
    (list.ids.ndim == 4).then(|| list.ids.shape[1].max(0) as usize)
}
