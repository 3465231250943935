//! Which kernels attend and repair, from sizes, options and facts of the device alone.
//!
//! [`Options`] has everything that a call may ask for beside its sizes. Each variant takes it apart without `..`: an option that
//! is added there does not compile until every variant says whether it takes it.

use super::params::Params;
use super::plan::{Element, Job, Rows, Sizes, TILE, WARP_ROWS, Width, is_copied_by, is_copied_by_16, values_are_keys};
use super::{decode128, int4_128, mla16, mla64, mma, verify128};
use crate::core::dtype::DType;
use crate::ops::int4::Int4Kv;
use crate::runtime::cuda::layout::is_near;
use crate::runtime::cuda::variants::{Fit, variants};

variants! {
    /// Kernels that attend.
    pub enum Variant: "attention" {
        /// Heads of 128 channels, tokens in whole tiles, up to 16 rows a list.
        Decode128 = "decode128",
        /// Heads of 64 channels, tokens in whole tiles, up to 8 rows a list.
        Decode64 = "decode64",
        /// The same of 256 channels in 16 bits.
        Decode256 = "decode256",
        /// Heads of 128 channels in 16 bits, up to 64 rows at a time: drafts that are verified, over few short lists.
        Verify128Short = "verify128_short",
        /// The same, over any.
        Verify128 = "verify128",
        /// Both for heads of 64 channels.
        Verify64Short = "verify64_short",
        Verify64 = "verify64",
        /// Heads of 256 channels in 16 bits, up to 64 rows at a time, over any lists.
        Verify256 = "verify256",
        /// Heads of 128 channels, some of whose tokens are coded in INT4, up to 16 rows at a time.
        Int4_128 = "int4_128",
        /// The same, up to 64 rows at a time: drafts that are verified.
        Int4Verify128 = "int4_verify128",
        /// Tensor cores, tokens coded in INT4, heads of up to 256 channels and rows of any number.
        Int4Mma = "int4_mma",
        /// MLA, 64 rows at a time.
        Mla64 = "mla64",
        /// MLA, 16 rows at a time.
        Mla16 = "mla16",
        /// Tensor cores, heads and rows of any number.
        Mma = "mma",
        /// Every type and stride, in float32.
        General = "general",
    }
}

variants! {
    /// Ways to repair.
    pub enum RepairVariant: "repair" {
        /// One launch for what attention's decode128 takes, 8 rows at a time.
        Decode128 = "decode128",
        /// One launch for what attention's verify128 takes, up to 64 rows at a time: drafts that are verified.
        Verify128 = "verify128",
        /// One launch on tensor cores.
        OneLaunch = "one_launch",
        /// A launch that finds what was missed, and attention to it.
        TwoLaunches = "two_launches",
    }
}

/// What the device has.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub multiprocessors: u32,
    /// Shared memory that a CTA can have.
    pub shared_bytes: u32,
    /// Whether the kernels of each variant run on it.
    pub runs_decode128: bool,
    pub runs_verify128: bool,
    pub runs_verify_short: bool,
    pub runs_mla16: bool,
    pub runs_mla64: bool,
    pub runs_int4_128: bool,
    pub runs_int4_verify128: bool,
}

/// What a call may ask for. An option that every variant takes is named by all and read by none.
#[allow(dead_code)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Several query positions a sequence.
    pub positions: bool,
    pub q_lens: bool,
    pub lists: bool,
    /// A list for each query position.
    pub own_lists: bool,
    pub slots: bool,
    pub window: bool,
    pub soft_cap: bool,
    pub sinks: bool,
    pub partials: bool,
    /// A state that the result starts from: repair's second launch.
    pub start: bool,
    /// FP8 with a scale for each token.
    pub scales_per_token: bool,
    /// MLA: the values are the first channels of the keys.
    pub values_are_keys: bool,
    /// Queries of float32 beside keys of 16 bits.
    pub wide_queries: bool,
    /// Keys and values lie in host memory, whose bus wants few and long reads.
    pub is_far: bool,
    /// Slots of the list name pages in other memory, too.
    pub far_pages: bool,
    /// Rows of q, k and v begin and end on 16 bytes.
    pub rows_of_16_bytes: bool,
    /// Strides from token to token and from page to page fit in 32 bits.
    pub near_strides: bool,
    /// 16 tokens always lie side by side.
    pub whole_tiles: bool,
    /// 16 tokens follow each other in a sequence, and lie where a page table says.
    pub paged_tiles: bool,
    /// The rows are those of a draft tree.
    pub tree: bool,
    /// Some tokens are coded in INT4.
    pub int4: Option<Int4>,
}

/// What matters of tokens in INT4.
#[derive(Clone, Copy, Debug)]
pub struct Int4 {
    /// Rows of codes and of means begin and end on 16 bytes.
    pub rows_of_16_bytes: bool,
    /// Those of means do, and those of codes on 8.
    pub codes_of_8_bytes: bool,
    /// Means have the type of keys that are not coded.
    pub means_are_as_keys: bool,
    /// Strides from row to row and from page to page fit in 32 bits.
    pub near_strides: bool,
}

impl Int4 {
    fn of(int4: &Int4Kv, keys: DType) -> Int4 {
        Int4 {
            rows_of_16_bytes: [&int4.k, &int4.v, &int4.means].into_iter().all(is_copied_by_16),
            codes_of_8_bytes: is_copied_by_16(&int4.means)
                && [&int4.k, &int4.v].iter().all(|codes| is_copied_by(8, codes)),
            means_are_as_keys: int4.means.dtype == keys,
            near_strides: [&int4.k, &int4.v, &int4.k_scale, &int4.v_scale, &int4.means]
                .iter()
                .all(|t| (0..2).all(|d| is_near(t.byte_stride(d)))),
        }
    }
}

impl Options {
    pub fn of(job: &Job, params: &Params) -> Options {
        let problem = job.problem;
        let (q, k, v) = (&problem.positions.q, &problem.kv.k, &problem.kv.v);
        let steps = [&params.k.step[..2], &params.v.step[..2], &params.table.step[..]];
        Options {
            positions: params.positions != 1,
            q_lens: !params.q_lens.data.is_null(),
            lists: job.list.is_some(),
            own_lists: params.own_lists != 0,
            slots: !params.slots.data.is_null(),
            window: params.window != 0,
            soft_cap: params.soft_cap != 0.0,
            sinks: !params.sinks.data.is_null(),
            partials: !params.partials.acc.data.is_null(),
            start: job.has_start,
            scales_per_token: params.scales_per_token != 0,
            values_are_keys: values_are_keys(params),
            wide_queries: q.dtype == DType::F32 && k.dtype.bits == 16,
            is_far: job.is_far,
            far_pages: job.far_pages.is_some(),
            rows_of_16_bytes: [q, k, v].into_iter().all(is_copied_by_16),
            near_strides: steps.iter().all(|steps| steps.iter().all(|&step| is_near(step))),
            whole_tiles: 1 << params.log_granule == TILE,
            paged_tiles: has_paged_tiles(job, params),
            tree: problem.tree.is_some(),
            int4: problem.int4.map(|int4| Int4::of(int4, k.dtype)),
        }
    }
}

fn has_paged_tiles(job: &Job, params: &Params) -> bool {
    let block = params.block.value;
    params.slots.data.is_null()
        && !params.table.data.is_null()
        && (job.list.is_none() || block.is_multiple_of(TILE))
        && params.unit_tokens.is_multiple_of(TILE)
}

const NO_INT4: &str = "it takes no tokens in INT4";
const NO_FAR_PAGES: &str = "its slots name no pages in other memory";
const NO_WIDE_QUERIES: &str = "it takes no queries of float32";
const OF_64_CHANNELS: &str = "it takes heads of 64 channels";
const OF_128_CHANNELS: &str = "it takes heads of 128 channels";
const OF_256_CHANNELS: &str = "it takes heads of 256 channels";

/// How a variant of attention suits a call.
pub fn fit(variant: Variant, device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    match variant {
        Variant::Decode128 => fit_decode128(device, sizes, options),
        Variant::Decode64 => fit_other_decode(device, sizes, options, decode128::NARROW_CHANNELS, OF_64_CHANNELS),
        Variant::Decode256 => fit_other_decode(device, sizes, options, decode128::BROAD_CHANNELS, OF_256_CHANNELS),
        Variant::Verify128Short => {
            of_width(sizes, verify128::CHANNELS, OF_128_CHANNELS, || fit_verify_short(device, sizes, options))
        }
        Variant::Verify128 => {
            of_width(sizes, verify128::CHANNELS, OF_128_CHANNELS, || fit_verify(device, sizes, options))
        }
        Variant::Verify64Short => {
            of_width(sizes, verify128::NARROW_CHANNELS, OF_64_CHANNELS, || fit_verify_short(device, sizes, options))
        }
        Variant::Verify64 => {
            of_width(sizes, verify128::NARROW_CHANNELS, OF_64_CHANNELS, || fit_verify(device, sizes, options))
        }
        Variant::Verify256 => {
            of_width(sizes, verify128::BROAD_CHANNELS, OF_256_CHANNELS, || fit_verify(device, sizes, options))
        }
        Variant::Int4_128 => fit_int4_128(device, sizes, options),
        Variant::Int4Verify128 => fit_int4_verify128(device, sizes, options),
        Variant::Int4Mma => fit_int4_mma(device, sizes, options),
        Variant::Mla64 => fit_mla64(device, sizes, options),
        Variant::Mla16 => fit_mla16(device, sizes, options),
        Variant::Mma => fit_mma(sizes, options),
        Variant::General => fit_general(options),
    }
}

/// `fit` of heads of so many channels. Most calls have heads of another width: nothing more is asked of them.
fn of_width(sizes: &Sizes, channels: u32, reason: &'static str, fit: impl FnOnce() -> Fit) -> Fit {
    if (sizes.dim, sizes.value_dim) == (channels, channels) { fit() } else { Fit::Cannot(reason) }
}

fn fit_decode128(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let is_wide = (sizes.dim, sizes.value_dim) != (decode128::CHANNELS, decode128::CHANNELS);
    takes_decode(device, sizes, options).unless(is_wide, OF_128_CHANNELS)
}

/// decode64 or decode256. `reason`: what it says of heads of another width.
fn fit_other_decode(device: &Device, sizes: &Sizes, options: &Options, channels: u32, reason: &'static str) -> Fit {
    of_width(sizes, channels, reason, || {
        takes_decode(device, sizes, options)
            .unless(
                channels == decode128::BROAD_CHANNELS && sizes.element == Some(Element::Fp8),
                "it takes keys of 16 bits",
            )
            .unless(sizes.rows > WARP_ROWS, "it takes up to 8 rows a list")
    })
}

/// What decode128, decode64 and decode256 take.
fn takes_decode(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let Options {
        positions: _,
        q_lens: _,
        lists,
        own_lists: _,
        slots: _,
        window: _,
        soft_cap: _,
        sinks: _,
        partials,
        start,
        scales_per_token,
        values_are_keys: _,
        wide_queries: _,
        is_far: _,
        far_pages: _,
        rows_of_16_bytes,
        near_strides,
        whole_tiles,
        paged_tiles,
        tree,
        int4,
    } = *options;
    let Some(form) = decode128::Form::of(sizes) else {
        return Fit::Cannot(
            "it takes keys of 16 bits with queries of theirs or of float32, FP8 with 16-bit queries, and up to 16 rows a list",
        );
    };
    let is_uneven = decode128::is_uneven(device.multiprocessors, sizes, lists);
    // Whole sequences of several, more than 8 rows each, where it has a cluster for each of them.
    let is_shorts = !lists
        && sizes.rows >= verify128::FEWEST_ROWS
        && verify128::are_many(sizes, device.multiprocessors)
        && matches!(fit_verify_short(device, sizes, options), Fit::Takes);
    let shape = decode128::shape(device.multiprocessors, sizes, form.rows(), partials);
    let stages = form.stages(device.shared_bytes, shape.adds_up_units());
    let is_verify128s =
        suits_verify128(device, sizes, options) && matches!(fit_verify(device, sizes, options), Fit::Takes);
    let fit = if is_uneven || start || is_verify128s || is_shorts { Fit::Slower } else { Fit::Takes };
    fit.unless(int4.is_some(), NO_INT4)
        .unless(tree, "it takes no draft tree")
        .unless(!device.runs_decode128, "it needs compute capability 9.0")
        .unless(!rows_of_16_bytes, "rows of q, k and v have to begin and end on 16 bytes")
        .unless(
            !whole_tiles && !paged_tiles,
            "blocks have to be whole tiles of 16 tokens, pages, too, where slots name them",
        )
        .unless(scales_per_token, "it takes no scale per token")
        .unless(!near_strides, "strides of tokens and pages have to fit in 32 bits")
        .unless(sizes.lists >= decode128::MOST_LISTS, "it takes fewer than 2^20 lists")
        .unless(stages.is_none(), "it needs more shared memory than the device has")
}

/// Whether verify128 takes any number of rows: where it is the fastest, and in a batch-invariant session for all tokens of a sequence, so that
/// a draft's row has the bits when it is verified that it would have alone. Of heads of other widths that is so in such a session alone:
/// decode64 and decode256 were faster wherever they were measured.
fn suits_verify128(device: &Device, sizes: &Sizes, options: &Options) -> bool {
    let is_128 = sizes.dim == verify128::CHANNELS;
    is_128 && (options.is_far || reads_most(device, sizes, options)) || is_alike(sizes, options)
}

fn is_alike(sizes: &Sizes, options: &Options) -> bool {
    sizes.is_invariant() && !options.lists
}

/// Whether so many tokens are read that verify128 reads them fastest whatever the number of rows. decode128 is faster to lists of blocks, and to all
/// tokens of several sequences, where none can be much longer than the others. Where pages end within tiles, mma was faster for four rows and
/// slower for sixteen; one of its warps attends for up to eight.
fn reads_most(device: &Device, sizes: &Sizes, options: &Options) -> bool {
    let (lists, list_tokens) = (sizes.split_lists(), sizes.list_tokens);
    let are_many =
        lists.saturating_mul(list_tokens) >= verify128::DENSE_TOKENS && list_tokens >= verify128::LONG_TOKENS;
    let is_mmas = !options.whole_tiles && sizes.rows <= WARP_ROWS;
    let is_decode128s = (options.lists || lists > sizes.kv_heads as u64)
        && !decode128::is_uneven(device.multiprocessors, sizes, options.lists);
    !options.window && are_many && !is_mmas && !is_decode128s
}

/// verify128, verify64 or verify256, whichever takes heads of the call's width.
fn fit_verify(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let Options {
        positions: _,
        q_lens: _,
        lists: _,
        own_lists: _,
        slots: _,
        window: _,
        soft_cap: _,
        sinks: _,
        partials,
        start: _,
        // There is no FP8.
        scales_per_token: _,
        values_are_keys: _,
        wide_queries: _,
        is_far,
        far_pages,
        rows_of_16_bytes,
        near_strides: _,
        whole_tiles,
        paged_tiles: _,
        tree,
        int4,
    } = *options;
    // It is the one fast variant for draft trees. mma takes heads of 64 channels in room for 128.
    let is_mmas = !(is_far || tree || whole_tiles && sizes.dim == verify128::NARROW_CHANNELS);
    let are_few = sizes.rows < verify128::FEWEST_ROWS && is_mmas && !suits_verify128(device, sizes, options);
    let fit = if are_few { Fit::Slower } else { Fit::Takes };
    let fit = fit.unless(int4.is_some(), NO_INT4);
    takes_drafts(
        fit,
        device.runs_verify128,
        sizes,
        &[verify128::CHANNELS, verify128::NARROW_CHANNELS, verify128::BROAD_CHANNELS],
    )
    .unless(far_pages, NO_FAR_PAGES)
    .unless(!rows_of_16_bytes, "rows of q, k and v have to begin and end on 16 bytes")
    .unless(partials, "it keeps no partials")
}

/// verify128_short or verify64_short.
fn fit_verify_short(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let pays = verify128::short_pays(sizes, device.multiprocessors, options.lists, options.tree);
    match fit_verify(device, sizes, options) {
        Fit::Takes if !pays || options.is_far || is_alike(sizes, options) => Fit::Slower,
        fit => fit,
    }
    .unless(!device.runs_verify_short, "it needs clusters of compute capability 9.0 itself")
}

/// What verify128 takes in attention and in repair, with heads of one of these widths.
fn takes_drafts(fit: Fit, runs_verify128: bool, sizes: &Sizes, widths: &[u32]) -> Fit {
    let is_16_bit = matches!(sizes.element, Some(Element::F16 | Element::Bf16));
    let is_other = sizes.value_dim != sizes.dim || !widths.contains(&sizes.dim);
    let items = sizes.lists.saturating_mul(sizes.rows.div_ceil(verify128::ROWS) as u64);
    fit.unless(!runs_verify128, "it needs clusters of compute capability 9.0 itself")
        .unless(!is_16_bit, "it takes keys of 16 bits, and queries of their type or of float32")
        .unless(is_other, OF_128_CHANNELS)
        .unless(items.saturating_mul(sizes.units.max(1)) >= 1 << 31, "it takes fewer than 2^31 tiles")
}

fn fit_mla64(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let fit = if sizes.rows < mla64::FEWEST_ROWS { Fit::Slower } else { Fit::Takes };
    let tiles = sizes.lists * sizes.rows.div_ceil(mla64::ROWS) as u64 * sizes.list_tokens.max(1).div_ceil(64);
    let fit = takes_latents(fit, sizes, options);
    fit.unless(!device.runs_mla64, "it needs compute capability 9.0 itself")
        .unless(tiles >= 1 << 24, "it takes fewer than 2^24 tiles")
}

fn fit_mla16(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let tiles = sizes.lists * sizes.rows.div_ceil(mla16::ROWS) as u64 * sizes.list_tokens.max(1).div_ceil(16);
    let fit = takes_latents(Fit::Takes, sizes, options);
    fit.unless(!device.runs_mla16, "it needs clusters of 8 CTAs, from compute capability 9.0")
        .unless(tiles >= 1 << 27, "it takes fewer than 2^27 tiles")
}

/// What both kernels of MLA take.
fn takes_latents(fit: Fit, sizes: &Sizes, options: &Options) -> Fit {
    let Options {
        positions,
        q_lens,
        lists: _,
        own_lists: _,
        slots: _,
        window,
        soft_cap,
        sinks: _,
        partials,
        start,
        // There is no FP8.
        scales_per_token: _,
        values_are_keys,
        wide_queries,
        is_far: _,
        far_pages,
        rows_of_16_bytes,
        near_strides: _,
        whole_tiles: _,
        paged_tiles: _,
        tree,
        int4,
    } = *options;
    let is_16_bit = matches!(sizes.element, Some(Element::F16 | Element::Bf16));
    fit.unless(tree, "it takes no draft tree")
        .unless(far_pages, NO_FAR_PAGES)
        .unless(int4.is_some(), NO_INT4)
        .unless(wide_queries, NO_WIDE_QUERIES)
        .unless(!is_16_bit, "it takes queries and keys of one 16-bit type")
        .unless(Width::of(sizes.dim, sizes.value_dim) != Some(Width::W576), "it takes keys of 264 to 576 channels")
        .unless(!values_are_keys, "values have to be the first channels of the keys")
        .unless(!rows_of_16_bytes, "rows of q, k and v have to begin and end on 16 bytes")
        .unless(positions || q_lens, "it takes one query position a sequence, without q_lens")
        .unless(window || soft_cap, "it takes neither window nor soft cap")
        .unless(partials || start, "it takes neither partials nor a state to start from")
}

fn fit_mma(sizes: &Sizes, options: &Options) -> Fit {
    let Options {
        positions: _,
        q_lens: _,
        lists: _,
        own_lists: _,
        slots: _,
        window: _,
        soft_cap: _,
        sinks: _,
        partials: _,
        start: _,
        scales_per_token: _,
        values_are_keys: _,
        wide_queries: _,
        is_far: _,
        far_pages,
        rows_of_16_bytes,
        near_strides: _,
        whole_tiles: _,
        paged_tiles: _,
        tree,
        int4,
    } = *options;
    let width = Width::of(sizes.dim, sizes.value_dim);
    Fit::Takes
        .unless(tree, "it takes no draft tree")
        .unless(far_pages, NO_FAR_PAGES)
        .unless(int4.is_some(), NO_INT4)
        .unless(
            sizes.element.is_none(),
            "it takes keys of 16 bits with queries of their type or of float32, and FP8 with 16-bit queries",
        )
        .unless(width.is_none(), "it takes D up to 576 and Dv up to 512")
        .unless(!rows_of_16_bytes, "rows of q, k and v have to begin and end on 16 bytes")
}

fn fit_general(options: &Options) -> Fit {
    let Options {
        positions: _,
        q_lens: _,
        lists: _,
        own_lists: _,
        slots: _,
        window: _,
        soft_cap: _,
        sinks: _,
        partials: _,
        start: _,
        scales_per_token: _,
        values_are_keys: _,
        wide_queries: _,
        is_far: _,
        far_pages,
        rows_of_16_bytes: _,
        near_strides: _,
        whole_tiles: _,
        paged_tiles: _,
        tree: _,
        int4: _,
    } = *options;
    Fit::Takes.unless(far_pages, NO_FAR_PAGES)
}

fn fit_int4_128(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let items = sizes.lists.saturating_mul(int4_128::row_blocks(sizes) as u64);
    let is_verify128s = matches!(fit_int4_verify128(device, sizes, options), Fit::Takes);
    let fit = if is_verify128s { Fit::Slower } else { Fit::Takes };
    takes_int4(fit, sizes, options)
        .unless(!device.runs_int4_128, "it needs compute capability 9.0")
        .unless(options.wide_queries, NO_WIDE_QUERIES)
        .unless(options.tree, "it takes no draft tree")
        .unless(!has_near_int4(options), "strides of tokens and pages have to fit in 32 bits")
        .unless(items >= decode128::MOST_LISTS, "it takes fewer than 2^20 lists of 16 rows")
        .unless(
            int4_128::shared(Rows::UpTo16) > decode128::most_shared(device.shared_bytes),
            "it needs more shared memory than the device has",
        )
}

fn fit_int4_verify128(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    let are_few = sizes.rows <= Rows::UpTo16.count() || int4_128::is_short(sizes);
    let is_int4_128s = are_few && !options.wide_queries && !options.tree && has_near_int4(options);
    let fit = if is_int4_128s { Fit::Slower } else { Fit::Takes };
    takes_drafts(takes_int4(fit, sizes, options), device.runs_int4_verify128, sizes, &[verify128::CHANNELS])
}

fn has_near_int4(options: &Options) -> bool {
    options.near_strides && options.int4.is_some_and(|int4| int4.near_strides)
}

fn fit_int4_mma(device: &Device, sizes: &Sizes, options: &Options) -> Fit {
    multiplies_int4(Fit::Takes, sizes, options)
        .unless(options.tree, "it takes no draft tree")
        .unless(mma::int4_entry(sizes).is_none(), "it takes D and Dv up to 256")
        .unless(
            !mma::int4_fits(device.shared_bytes, sizes, options.partials),
            "it needs more shared memory than the device has",
        )
        .unless(!options.rows_of_16_bytes, "rows of q, k and v have to begin and end on 16 bytes")
        .unless(
            !options.int4.is_some_and(|int4| int4.codes_of_8_bytes),
            "rows of means have to begin and end on 16 bytes, of codes on 8",
        )
}

/// What int4_128 and int4_verify128 take.
fn takes_int4(fit: Fit, sizes: &Sizes, options: &Options) -> Fit {
    let is_wide = (sizes.dim, sizes.value_dim) != (decode128::CHANNELS, decode128::CHANNELS);
    let rows_of_16_bytes = options.rows_of_16_bytes && options.int4.is_some_and(|int4| int4.rows_of_16_bytes);
    multiplies_int4(fit, sizes, options)
        .unless(is_wide, "it takes heads of 128 channels")
        .unless(options.partials, "it keeps no partials")
        .unless(!rows_of_16_bytes, "rows of q, k, v, codes and means have to begin and end on 16 bytes")
}

/// What all kernels of INT4 on tensor cores take.
fn multiplies_int4(fit: Fit, sizes: &Sizes, options: &Options) -> Fit {
    let Options {
        positions: _,
        q_lens: _,
        lists: _,
        own_lists: _,
        slots: _,
        window: _,
        soft_cap: _,
        sinks: _,
        partials: _,
        start: _,
        // Keys that are not coded have no scale.
        scales_per_token: _,
        values_are_keys: _,
        wide_queries: _,
        is_far: _,
        far_pages,
        rows_of_16_bytes: _,
        near_strides: _,
        whole_tiles,
        paged_tiles: _,
        tree: _,
        int4,
    } = *options;
    let Some(int4) = int4 else { return Fit::Cannot("it takes calls with tokens in INT4") };
    let is_16_bit = matches!(sizes.element, Some(Element::F16 | Element::Bf16));
    fit.unless(!is_16_bit, "it takes queries and keys of one 16-bit type")
        .unless(far_pages, NO_FAR_PAGES)
        .unless(!int4.means_are_as_keys, "means have to be of the keys' type")
        .unless(!whole_tiles, "blocks and pages have to be whole tiles of 16 tokens")
}

/// What a repair has beside an attention to the selected blocks.
#[derive(Clone, Copy, Debug)]
pub struct RepairSizes {
    /// Entries that the longer of both lists can have.
    pub list_entries: usize,
    pub entries_per_partial: usize,
    /// Blocks that a sequence can have.
    pub blocks: u32,
    /// Rows of kept states are whole 16-byte units, and their strides fit in 32 bits.
    pub near_states: bool,
    /// Whether the device forms clusters for kernels that repair in one launch.
    pub has_clusters: bool,
    /// Whether verify128's kernels run on the device.
    pub runs_verify128: bool,
    /// Whether a state of each row and partial is read, or one of each row.
    pub exact: bool,
    pub multiprocessors: u32,
    /// Work items of decode128: each list, and each 8 rows of it.
    pub decode128_items: u64,
    /// Whether shared memory has room: for decode128, for verify128, and for one launch.
    pub decode128_fits: bool,
    pub verify128_fits: bool,
    pub one_launch_fits: bool,
}

/// How a variant of repair suits a call whose attention to the selected blocks has these sizes and options.
pub fn fit_repair(variant: RepairVariant, sizes: &Sizes, options: &Options, repair: &RepairSizes) -> Fit {
    let Options {
        positions: _,
        q_lens: _,
        lists: _,
        own_lists: _,
        slots: _,
        window: _,
        soft_cap: _,
        sinks: _,
        // Repair writes none.
        partials: _,
        start: _,
        scales_per_token,
        values_are_keys: _,
        wide_queries,
        is_far: _,
        // A repair's lists name none.
        far_pages: _,
        rows_of_16_bytes,
        near_strides,
        whole_tiles,
        paged_tiles: _,
        tree,
        int4,
    } = *options;
    let is_multiplied = sizes.element.is_some() && rows_of_16_bytes;
    let is_128 = Width::of(sizes.dim, sizes.value_dim) == Some(Width::W128);
    let one_launch = Fit::Takes
        .unless(tree, "it takes no draft tree")
        .unless(int4.is_some(), NO_INT4)
        .unless(!repair.has_clusters, "it needs clusters, from compute capability 9.0")
        .unless(!is_multiplied, "it takes 16-bit queries, keys of the same type or of FP8, and rows on 16 bytes")
        .unless(!is_128, "it takes heads of up to 128 channels")
        .unless(!repair.near_states, "rows of kept states have to begin and end on 16 bytes");
    // More rows read the missed blocks anew, 8 at a time, from the L2 cache. That pays while all of them run at once, and for one state of each row
    // while each has several CTAs.
    let items = repair.decode128_items.saturating_mul(if repair.exact { 1 } else { 2 });
    let are_at_once = items <= repair.multiprocessors.into() && sizes.element != Some(Element::Fp8);
    let unless_slower = |fit, is_slower| if is_slower && fit == Fit::Takes { Fit::Slower } else { fit };
    match variant {
        RepairVariant::Decode128 => unless_slower(one_launch, sizes.rows > 8 && !are_at_once)
            .unless((sizes.dim, sizes.value_dim) != (128, 128), "it takes heads of 128 channels")
            .unless(wide_queries, NO_WIDE_QUERIES)
            .unless(!whole_tiles, "blocks and pages have to be whole tiles of 16 tokens")
            .unless(scales_per_token, "it takes no scale per token")
            .unless(repair.entries_per_partial != 1, "it takes a partial for each block")
            .unless(repair.list_entries > 256, "it takes lists of up to 256 entries")
            .unless(repair.blocks > 8192, "it takes sequences of up to 8192 blocks")
            .unless(!near_strides, "strides of tokens and pages have to fit in 32 bits")
            .unless(!repair.decode128_fits, "it needs more shared memory than the device has"),
        RepairVariant::Verify128 => {
            let one_launch = unless_slower(one_launch, sizes.rows < verify128::FEWEST_ROWS);
            takes_drafts(one_launch, repair.runs_verify128, sizes, &[verify128::CHANNELS])
                .unless(!repair.verify128_fits, "the lists do not fit in the device's shared memory")
        }
        RepairVariant::OneLaunch => one_launch
            .unless(wide_queries, NO_WIDE_QUERIES)
            .unless(!repair.one_launch_fits, "the lists do not fit in the device's shared memory"),
        // Attention takes what is missed, or refuses it.
        RepairVariant::TwoLaunches => Fit::Takes,
    }
}

#[cfg(test)]
pub(super) mod tests;
