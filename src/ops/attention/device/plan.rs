//! How attention is cut for a device, from sizes alone: which kernel, how its shared memory is laid out, how many CTAs, and
//! what scratch they need.

use super::params::{Params, StateView};
use super::plain::Rows;
use super::{Kernels, latent, latent_many, plain};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::ops::attention::{Outputs, Problem};
use crate::ops::views::{BlockList, Scale, State};
use crate::runtime::cuda::Facts;
use crate::runtime::cuda::layout::Divisor;
use crate::runtime::cuda::views::{NO_DIM, View, element_code};

pub const THREADS: u32 = 256;
pub const WARPS: u32 = 8;
pub const WARP_ROWS: u32 = 8;
pub const TILE: u32 = 16;
/// What is known of a tile's tokens.
pub const FACTS_BYTES: u32 = 192;
const MOST_STAGES: u32 = 8;
/// Tiles of a chunk: one for each warp.
const LEAST_TILES: u32 = 8;
/// Pairs among which every warp finds its CTA's part alone.
const FEW_PAIRS: u32 = 32;
/// An Item of kernels/attention/attention.cuh.
const ITEM_BYTES: usize = 48;
/// Shared memory that the kernels declare, rounded up.
pub const STATIC_SHARED: u32 = 2304;
/// Numbers of units and of tokens along a list stay below.
const MOST: u64 = 1 << 31;

/// What attends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Engine {
    /// On tensor cores: element type of keys and queries, and the largest D and Dv.
    Mma(Element, Width),
    /// The common case of it, for so many rows.
    Plain(Element, Rows),
    /// Where values are the first of many channels of keys.
    Latent(Element),
    /// The same, for many rows.
    LatentMany(Element),
    General,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Element {
    F16,
    Bf16,
    Fp8,
}

impl Element {
    /// Of a key's or value's channel.
    pub fn bytes(self) -> u32 {
        if self == Element::Fp8 { 1 } else { 2 }
    }
}

/// D and Dv up to 128, up to 256, or up to 576 and 512.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Width {
    W128,
    W256,
    W576,
}

impl Width {
    fn channels(self) -> u32 {
        match self {
            Width::W128 => 128,
            Width::W256 => 256,
            Width::W576 => 576,
        }
    }
}

/// What is attended to, and where results go.
#[derive(Clone, Copy)]
pub struct Job<'j, 'a> {
    pub problem: &'j Problem<'a>,
    pub list: Option<&'j BlockList<'a>>,
    /// Entries that share a partial.
    pub bundle: usize,
    pub partials: Option<&'j State<'a>>,
    pub outputs: &'j Outputs<'a>,
}

pub struct Plan {
    /// Scratch and counters are to come.
    pub params: Params,
    pub engine: Engine,
    pub ctas: u32,
    /// Of a CTA.
    pub threads: u32,
    /// CTAs of a cluster, where there are clusters.
    pub cluster: Option<u32>,
    /// CTAs of a kernel that joins states; 0 where none does.
    pub joining: u32,
    /// Dynamic shared memory.
    pub shared: u32,
    /// Whether a kernel cuts the pairs first.
    pub is_cut_apart: bool,
    pub scratch: Scratch,
}

#[derive(Clone, Copy, Default)]
pub struct Scratch {
    items: usize,
    states: usize,
}

impl Scratch {
    pub fn of_states(states: usize) -> Scratch {
        Scratch { items: 0, states }
    }
}

/// Lists of a call; own ones are of a position each.
pub fn lists(job: &Job) -> usize {
    let per_head = job.list.map_or(1, |list| list.per_head());
    job.problem.positions.batch() * per_head * job.problem.heads.kv
}

/// The pairs of a call, and what a CTA needs for one of them.
pub struct Pairs {
    pub params: Params,
    pub engine: Engine,
    /// Rows of a CTA.
    pub rows: u32,
    /// Dynamic shared memory.
    pub shared: u32,
}

/// With rings of at most so many stages. `None` where there is nothing to do.
pub fn pairs(facts: &Facts, job: &Job, most_stages: u32) -> Result<Option<Pairs>> {
    let engine = engine(job);
    let Some(mut params) = describe(job)? else { return Ok(None) };
    let shared = share(&mut params, engine, super::most_shared(facts), most_stages)?;
    let rows_of_cta = WARP_ROWS << params.log_members;
    let row_blocks = params.rows.div_ceil(rows_of_cta);
    let pairs = lists(job) as u64 * row_blocks as u64;
    let units = longest(job, params.unit_tokens);
    if pairs.saturating_mul(units.max(1)) >= MOST {
        let text = format!("{pairs} lists of up to {units} tiles are more than the CUDA kernels count");
        return Err(Error::unsupported(text));
    }
    params.work_items = pairs as u32;
    params.row_blocks = Divisor::new(row_blocks);
    Ok(Some(Pairs { rows: params.rows.min(rows_of_cta), params, engine, shared }))
}

/// By kernels of the common case where they take the tensors. `None` where there is nothing to do.
pub fn fastest(kernels: &Kernels, facts: &Facts, job: &Job) -> Result<Option<Plan>> {
    if let Engine::Mma(element, width) = engine(job) {
        let Some(params) = describe(job)? else { return Ok(None) };
        let (lists, tokens) = (lists(job), longest(job, 1));
        let plan = match (width, kernels.clusters()) {
            (Width::W128, _) if kernels.has_plain() => {
                plain::plan(facts, &params, element, lists, tokens, longest(job, params.unit_tokens))
            }
            (Width::W576, Some(clusters)) => {
                let many = kernels.has_latent_many().then(|| latent_many::plan(facts, &params, element, lists, tokens));
                many.flatten().or_else(|| latent::plan(clusters, &params, element, lists, tokens))
            }
            _ => None,
        };
        if plan.is_some() {
            return Ok(plan);
        }
    }
    plan(facts, job)
}

/// In CTAs of their own. `None` where there is nothing to do.
pub fn plan(facts: &Facts, job: &Job) -> Result<Option<Plan>> {
    let Some(Pairs { mut params, engine, rows, shared }) = pairs(facts, job, MOST_STAGES)? else { return Ok(None) };
    let few = params.work_items <= FEW_PAIRS;
    let cut = facts.multiprocessors.saturating_sub(params.work_items).max(facts.multiprocessors / 2).max(1);
    params.target_chunks = Divisor::new(cut);
    let units = longest(job, params.unit_tokens) as u32;
    let most_chunks = units.div_ceil(params.least_units).max(1);
    let ctas = (params.work_items + cut).min(params.work_items.saturating_mul(most_chunks));
    let slots = if few { ctas } else { 2 * cut };
    let state_bytes = rows as usize * (params.value_dim as usize + 2) * size_of::<f32>();
    let items = if few { 0 } else { ctas as usize * ITEM_BYTES };
    let scratch = Scratch { items: items.next_multiple_of(256), states: slots as usize * state_bytes };
    let (cluster, joining) = (None, 0);
    Ok(Some(Plan { params, engine, ctas, threads: THREADS, cluster, joining, shared, is_cut_apart: !few, scratch }))
}

impl Plan {
    pub fn scratch(&self) -> usize {
        self.scratch.items + self.scratch.states
    }

    /// With scratch that begins there, and counters.
    pub fn place(&mut self, scratch: *mut u8, counters: *mut u8) {
        self.params.cta_shares = if self.is_cut_apart { scratch } else { std::ptr::null_mut() };
        self.params.scratch = scratch.wrapping_add(self.scratch.items);
        self.params.counters = counters;
    }
}

/// Units of the longest list that the sizes allow.
fn longest(job: &Job, unit_tokens: u32) -> u64 {
    let tokens = match job.list {
        Some(list) => (list.cap() as u64).saturating_mul(job.problem.block_size as u64),
        None => job.problem.kv.pages.capacity() as u64,
    };
    tokens.div_ceil(unit_tokens as u64)
}

/// Everything that does not depend on the device.
fn describe(job: &Job) -> Result<Option<Params>> {
    let Problem { positions, kv, heads, scale, cap, window, block_size } = *job.problem;
    let Job { list, outputs, .. } = *job;
    if lists(job) == 0 || positions.count() == 0 {
        return Ok(None);
    }
    let block = list.map_or(1, |_| block_size);
    let entries = list.map_or(0, |list| list.cap());
    let most = MOST as usize - 1;
    if block > most / 2 || entries.saturating_mul(block) > most || kv.pages.count > most || positions.count() > most {
        let text = format!("lists of {entries} blocks of {block} tokens are more than the CUDA kernels count");
        return Err(Error::unsupported(text));
    }
    let own_lists = list.is_some_and(|list| list.is_own());
    let unit_tokens = if job.partials.is_some() { (job.bundle * block) as u32 } else { TILE };
    let unit_tiles = unit_tokens.div_ceil(TILE);
    let pages_matter = kv.pages.table.is_some() || kv.pages.in_slots;
    let together = block_or_tile(list.is_some(), block) | if pages_matter { kv.pages.size } else { 0 };
    let scale_of = |scale: &Option<Scale>| scale.as_ref().map_or(View::ABSENT, |Scale(t)| scale_view(t));
    let per_token = |scale: &Option<Scale>| scale.as_ref().is_some_and(|Scale(t)| t.rank() == 3);
    let list_view = |t: &Tensor| View::<4>::by_position(t);
    let ids = list.map_or(View::ABSENT, |list| {
        let ids = list_view(&list.ids);
        // An empty list is not no list.
        if ids.data.is_null() { View { data: list.counts.data(), ..ids } } else { ids }
    });
    Ok(Some(Params {
        kv_heads: Divisor::new(heads.kv as u32),
        list_positions: Divisor::new(if own_lists { positions.count() as u32 } else { 1 }),
        group: Divisor::new(heads.group() as u32),
        positions: positions.count() as u32,
        rows: (heads.group() * if own_lists { 1 } else { positions.count() }) as u32,
        own_lists: own_lists as u32,
        window: if window < most { window as u32 } else { 0 },
        token_capacity: kv.pages.capacity().min(most - block) as u32,
        list_capacity: entries as u32,
        pages: kv.pages.count as u32,
        block: Divisor::new(block as u32),
        page: Divisor::new(kv.pages.size.max(1) as u32),
        log_granule: (together as u32 | TILE).trailing_zeros(),
        unit_tokens,
        least_units: (LEAST_TILES / unit_tiles).max(1),
        unit_tiles: Divisor::new(unit_tiles),
        unit_entries: Divisor::new(job.bundle as u32),
        half_value: Divisor::new(kv.value_dim() as u32 / 2),
        dim: heads.dim as u32,
        value_dim: kv.value_dim() as u32,
        scale,
        soft_cap: cap.unwrap_or(0.0),
        out_type: super::type_of_out(outputs),
        q_type: element_code(positions.q.dtype),
        kv_type: element_code(kv.k.dtype),
        scales_per_token: (per_token(&kv.k_scale) || per_token(&kv.v_scale)) as u32,
        seq_lens: View::new(&kv.pages.seq_lens, [0]),
        q_lens: View::optional(&positions.lens, |t| View::new(t, [0])),
        counts: list.map_or(View::ABSENT, |list| View::by_position(&list.counts)),
        ids,
        table: View::optional(&kv.pages.table, |t| View::new(t, [0, 1])),
        q: View::by_position(&positions.q),
        k: View::new(&kv.k, [0, 1, 2, 3]),
        v: View::new(&kv.v, [0, 1, 2, 3]),
        partials: job.partials.map_or(StateView::ABSENT, StateView::of_partials),
        slots: list.and_then(|list| list.slots).map_or(View::ABSENT, |t| list_view(&t)),
        k_scale: scale_of(&kv.k_scale),
        v_scale: scale_of(&kv.v_scale),
        ..results(outputs)
    }))
}

/// Where results go, and nothing else.
pub fn results(outputs: &Outputs) -> Params {
    Params {
        out: View::optional(&outputs.out, View::by_position),
        lse: View::optional(&outputs.lse, View::by_position),
        sinks: View::optional(&outputs.sinks, |t| View::new(t, [0])),
        state: StateView::optional(&outputs.state, StateView::of_state),
        ..Params::none()
    }
}

/// Tokens that a list or its absence leaves side by side, as far as powers of two go.
fn block_or_tile(has_list: bool, block: usize) -> usize {
    if has_list { block } else { TILE as usize }
}

/// [1], [Hk] or [pages, P, Hk].
fn scale_view(t: &Tensor) -> View<3> {
    match t.rank() {
        3 => View::new(t, [0, 1, 2]),
        _ => View::new(t, [NO_DIM, NO_DIM, 0]),
    }
}

/// The fastest that takes these tensors.
fn engine(job: &Job) -> Engine {
    let Problem { positions, kv, heads, .. } = *job.problem;
    let (q, k, v) = (&positions.q, &kv.k, &kv.v);
    let element = match (k.dtype, q.dtype) {
        (DType::F16, DType::F16) => Element::F16,
        (DType::BF16, DType::BF16) => Element::Bf16,
        (k, DType::F16 | DType::BF16) if k.is_float8() => Element::Fp8,
        _ => return Engine::General,
    };
    let width = match (heads.dim, kv.value_dim()) {
        (d, dv) if d.max(dv) <= 128 => Width::W128,
        (d, dv) if d.max(dv) <= 256 => Width::W256,
        (d, dv) if d <= 576 && dv <= 512 => Width::W576,
        _ => return Engine::General,
    };
    if [q, k, v].into_iter().all(is_copied_by_16) { Engine::Mma(element, width) } else { Engine::General }
}

/// Rows of adjacent elements begin and end on 16 bytes.
pub fn is_copied_by_16(t: &Tensor) -> bool {
    let last = t.rank() - 1;
    let on_16 = |d: usize| t.dim(d) <= 1 || t.byte_stride(d) % 16 == 0;
    t.stride(last) == 1
        && (t.dim(last) * t.dtype.bytes()).is_multiple_of(16)
        && (t.data() as usize).is_multiple_of(16)
        && (0..last).all(on_16)
}

/// Lays shared memory out, and says how much it takes.
fn share(params: &mut Params, engine: Engine, most: u32, most_stages: u32) -> Result<u32> {
    params.warp_rows = params.rows.min(WARP_ROWS);
    let warp_acc = params.warp_rows * (params.value_dim + 4) * size_of::<f32>() as u32;
    // Where units are kept apart: the state of one, and that of all, of every warp.
    let totals = if params.partials.acc.data.is_null() { 0 } else { 2 * WARPS * warp_acc };
    // The general engine shares nothing: a warp's rows are enough for a CTA.
    let members = if engine == Engine::General { 1 } else { params.rows.div_ceil(WARP_ROWS).min(WARPS) };
    for log_members in members.next_power_of_two().ilog2()..=WARPS.ilog2() {
        let members = 1 << log_members;
        let (stages, stage_bytes, q_pitch, sums) = if let Engine::Mma(element, width) = engine {
            let tile = TILE * (width.channels() * element.bytes() + 16);
            params.v_offset = if values_are_keys(params) { 0 } else { tile };
            let q_pitch = width.channels() * 2 + 16;
            let rest = members * WARP_ROWS * q_pitch + totals;
            let of_team = most.saturating_sub(rest) / (WARPS / members);
            let mut stage = FACTS_BYTES + tile + params.v_offset;
            // What a team has attended to takes the place of its tiles.
            let stages = (of_team / stage).min(most_stages);
            stage = stage.max((members * warp_acc).div_ceil(stages.max(1)).next_multiple_of(16));
            ((of_team / stage).min(stages), stage, q_pitch, 0)
        } else {
            // A stage holds acc of a team; m and l of each warp's rows lie behind the queries.
            (1, members * warp_acc, (params.dim + 4) * 4, 2 * WARPS * WARP_ROWS * 4)
        };
        let tiles = (WARPS / members * stages * stage_bytes).next_multiple_of(16);
        params.log_members = log_members;
        (params.stages, params.stage_bytes, params.q_pitch, params.q_offset) = (stages, stage_bytes, q_pitch, tiles);
        params.totals_offset = (tiles + members * WARP_ROWS * q_pitch + sums).next_multiple_of(16);
        let shared = params.totals_offset + totals;
        if stages > 0 && stages * stage_bytes >= members * warp_acc && shared <= most {
            return Ok(shared);
        }
    }
    let what = if totals > 0 { " with partials" } else { "" };
    let (dim, value_dim) = (params.dim, params.value_dim);
    let text = format!(
        "attention{what} of heads of D={dim}, Dv={value_dim} needs more shared memory than the device's {most} bytes"
    );
    Err(Error::unsupported(text))
}

/// MLA: the values are the first channels of the keys.
pub fn values_are_keys(params: &Params) -> bool {
    params.k.data == params.v.data && params.k.step == params.v.step && params.value_dim <= params.dim
}
