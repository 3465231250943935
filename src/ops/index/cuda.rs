//! Launch of the kernels of kernels/index.

use super::choose::{self, Variant};
use super::{ImportanceRequest, Kind, UpdateRequest};
use crate::core::dtype::DType;
use crate::core::status::{Error, Result};
use crate::core::tensor::Tensor;
use crate::runtime::cuda::layout::{Divisor, kernel_constants, kernel_struct};
use crate::runtime::cuda::variants::{self, VariantList};
use crate::runtime::cuda::views::{Place, Summary, address, byte_stride, element_code, has_aligned_rows, saturated};
use crate::runtime::cuda::{self, Enqueue, Grid, Kernel, Kind as LaunchKind, Modules, Source, source};

pub struct Kernels {
    minmax: ByWidth,
    means: ByWidth,
    labels: Kernel,
    axes: ByWidth,
    /// Kernels for blocks or keys that do not stay in registers.
    wide_axes: ByWidth,
    importance: Kernel,
}

impl cuda::Kernels for Kernels {
    const SOURCES: &[Source] = &[
        source!("index/update", compute_80, compute_90),
        source!("index/axis", compute_80, compute_90),
        source!("index/importance", compute_80),
    ];

    const VARIANTS: &[VariantList] = &[VariantList::of::<Variant>()];

    fn find(modules: &Modules) -> Result<Kernels> {
        let widths = |source, [b8, b16, b32]: [&'static str; 3]| {
            let kernel = |name| modules.kernel(source, name);
            Ok(ByWidth { b8: kernel(b8)?, b16: kernel(b16)?, b32: kernel(b32)? })
        };
        Ok(Kernels {
            minmax: widths("index/update", ["index_minmax_8", "index_minmax_16", "index_minmax_32"])?,
            means: widths("index/update", ["index_means_8", "index_means_16", "index_means_32"])?,
            labels: modules.kernel("index/update", "index_labels")?,
            axes: widths("index/axis", ["index_axis_8", "index_axis_16", "index_axis_32"])?,
            wide_axes: widths("index/axis", ["index_axis_wide_8", "index_axis_wide_16", "index_axis_wide_32"])?,
            importance: modules.kernel("index/importance", "index_importance")?,
        })
    }
}

/// A kernel for each width of a key's elements.
struct ByWidth {
    b8: Kernel,
    b16: Kernel,
    b32: Kernel,
}

impl ByWidth {
    fn of(&self, dtype: DType) -> &Kernel {
        match dtype.bits {
            8 => &self.b8,
            16 => &self.b16,
            _ => &self.b32,
        }
    }
}

kernel_struct! {
    /// Mirrors Keys of kernels/index/keys.cuh. Strides are in bytes.
    #[derive(Clone, Copy, PartialEq)]
    struct Keys {
        data: *const u8,
        scale: *const u8,
        table: *const u8,
        seq_lens: *const u8,
        begin: *const u8,
        page: i64,
        token: i64,
        head: i64,
        channel: i64,
        scale_page: i64,
        scale_token: i64,
        scale_head: i64,
        table_seq: i64,
        table_page: i64,
        seq_lens_seq: i64,
        begin_seq: i64,
        pages: u32,
        page_size: u32,
        capacity: u32,
        kv_heads: u32,
        dim: u32,
        dtype: u32,
        adjacent: u32,
        page_of: Divisor,
    }
}

kernel_struct! {
    /// Mirrors UpdateParams of kernels/index/params.cuh.
    #[derive(Clone, Copy, PartialEq)]
    struct UpdateParams {
        keys: Keys,
        place: Place,
        first: Summary,
        second: Summary,
        third: Summary,
        channels: *const u8,
        channels_head: i64,
        channels_channel: i64,
        dtype: u32,
        size: u32,
        stride: u32,
        kept: u32,
        lanes: u32,
        split: u32,
        slices: u32,
        batch: u32,
        size_of: Divisor,
        stride_of: Divisor,
        heads_of: Divisor,
        slices_of: Divisor,
        batch_of: Divisor,
    }
}

kernel_struct! {
    /// Mirrors AxisParams of kernels/index/params.cuh.
    #[derive(Clone, Copy, PartialEq)]
    struct AxisParams {
        update: UpdateParams,
        weights: *const u8,
        centre: *const u8,
        weights_head: i64,
        weights_channel: i64,
        centre_head: i64,
        centre_channel: i64,
    }
}

kernel_struct! {
    /// Mirrors LayerShift of kernels/index/keys.cuh, in bytes.
    #[derive(Clone, Copy)]
    struct LayerShift {
        keys: i64,
        scale: i64,
        first: i64,
        second: i64,
        third: i64,
        channels: i64,
        weights: i64,
        centre: i64,
    }
}

kernel_constants! {
    /// Layers that may share a launch.
    const MOST_LAYERS: u32 = 32;
}

kernel_struct! {
    /// Mirrors Layers of kernels/index/params.cuh.
    struct Layers {
        shift: [LayerShift; MOST_LAYERS as usize],
    }
}

kernel_struct! {
    /// Mirrors Sample of kernels/index/params.cuh: a tensor [tokens, heads, D]. Strides are in bytes.
    struct Sample {
        data: *const u8,
        token: i64,
        head: i64,
        channel: i64,
        tokens: u32,
    }
}

kernel_struct! {
    /// Mirrors ImportanceParams of kernels/index/params.cuh.
    struct ImportanceParams {
        q: Sample,
        k: Sample,
        channels: *mut u8,
        importance: *mut u8,
        weights: *mut u8,
        centre: *mut u8,
        channels_head: i64,
        channels_place: i64,
        importance_head: i64,
        importance_channel: i64,
        weights_head: i64,
        weights_channel: i64,
        centre_head: i64,
        centre_channel: i64,
        group: u32,
        dim: u32,
        dtype: u32,
        kept: u32,
    }
}

const THREADS: u32 = 256;
/// Threads of a CTA that chooses channels.
const IMPORTANCE_THREADS: u32 = 512;
/// Channels of a lane.
const LANE_CHANNELS: usize = 8;
/// Tokens that a lane of MINMAX asks for at once.
const LANE_TOKENS: usize = 4;
/// SLOTS of kernels/index/axis.cuh: they share a block's tokens.
const TOKEN_SLOTS: usize = 8;

impl Keys {
    fn new(r: &UpdateRequest) -> Keys {
        let (k, table, scale) = (&r.k, r.pages.table.as_ref(), r.k_scale.map(|scale| scale.0));
        // [1], [Hk] or [pages, P, Hk]
        let [scale_page, scale_token, scale_head] = match &scale {
            Some(t) if t.rank() == 3 => [0, 1, 2].map(|d| t.byte_stride(d)),
            Some(t) if t.dim(0) > 1 => [0, 0, t.byte_stride(0)],
            _ => [0; 3],
        };
        Keys {
            data: k.data(),
            scale: address(scale.as_ref()),
            table: address(table),
            seq_lens: r.pages.seq_lens.data(),
            begin: address(r.begin.as_ref()),
            page: k.byte_stride(0),
            token: k.byte_stride(1),
            head: k.byte_stride(2),
            channel: k.byte_stride(3),
            scale_page,
            scale_token,
            scale_head,
            table_seq: byte_stride(table, 0),
            table_page: byte_stride(table, 1),
            seq_lens_seq: r.pages.seq_lens.byte_stride(0),
            begin_seq: byte_stride(r.begin.as_ref(), 0),
            pages: saturated(r.pages.count),
            page_size: saturated(r.pages.size),
            capacity: saturated(r.pages.capacity()),
            kv_heads: k.dim(2) as u32,
            dim: k.dim(3) as u32,
            dtype: element_code(k.dtype),
            adjacent: has_aligned_rows(k, if k.dtype.bits == 8 { 8 } else { 16 }) as u32,
            page_of: Divisor::new(saturated(r.pages.size).max(1)),
        }
    }
}

impl AxisParams {
    /// Where the layer's tensors lie, in the order of LayerShift.
    fn addresses(&mut self) -> [&mut *const u8; 8] {
        let AxisParams { update: u, weights, centre, .. } = self;
        let [first, second, third] = [&mut u.first, &mut u.second, &mut u.third].map(|summary| &mut summary.data);
        [&mut u.keys.data, &mut u.keys.scale, first, second, third, &mut u.channels, weights, centre]
    }

    /// How far past those of `other` this layer's tensors lie, if in all else the two are alike.
    fn shift_from(mut self, mut other: AxisParams) -> Option<LayerShift> {
        let mut shifts = [0; 8];
        for ((shift, own), other) in shifts.iter_mut().zip(self.addresses()).zip(other.addresses()) {
            if own.is_null() == other.is_null() {
                *shift = (*own as i64).wrapping_sub(*other as i64);
                *own = *other;
            }
        }
        let [keys, scale, first, second, third, channels, weights, centre] = shifts;
        (self == other).then_some(LayerShift { keys, scale, first, second, third, channels, weights, centre })
    }
}

/// What updates the summaries of one layer.
#[derive(Clone, Copy)]
struct Prepared<'e> {
    kernel: &'e Kernel,
    /// Without `slices`, which depends on how many layers share the launch.
    params: AxisParams,
    variant: Option<Variant>,
    /// CTAs that the device has room for, and how many of them share the summaries of a sequence and head at most.
    resident: usize,
    most_slices: usize,
}

/// `None` where there is nothing to summarise.
fn prepare<'e>(enqueue: &'e Enqueue, r: &UpdateRequest) -> Result<Option<Prepared<'e>>> {
    let (batch, kv_heads, dim) = (r.pages.batch(), r.k.dim(2), r.k.dim(3));
    let keys = Keys::new(r);
    if batch == 0 || kv_heads == 0 || keys.capacity == 0 {
        return Ok(None);
    }
    if batch.saturating_mul(kv_heads) > i32::MAX as usize {
        return Err(Error::unsupported(format!(
            "seq_lens: {batch} sequences of {kv_heads} KV heads; CUDA takes up to 2^31 − 1 together"
        )));
    }
    let mut lanes = dim.div_ceil(LANE_CHANNELS).next_power_of_two().min(32);
    let [weights, centre] = r.index.learned();
    let (tokens, kernels): (_, &Kernels) = (keys.capacity as usize, enqueue.kernels());
    let mut axis_variant = None;
    let (mut size, mut stride, mut split, mut dtype) = (1, 1, 1, DType::F16);
    // Beside the kernel: summaries, how many of them a CTA takes at once, and CTAs that fit a multiprocessor.
    let (kernel, summaries, at_once, resident) = match &r.index.kind {
        Kind::MinMax { block_size, max, .. } => {
            (size, dtype) = (*block_size, max.dtype);
            split = size.div_ceil(LANE_TOKENS).next_power_of_two().min(THREADS as usize / lanes);
            (kernels.minmax.of(r.k.dtype), tokens.div_ceil(size), THREADS as usize / (lanes * split), 3)
        }
        Kind::Mean { windows, means } => {
            (size, stride, dtype) = (windows.size, windows.stride, means.dtype);
            (kernels.means.of(r.k.dtype), windows.full(tokens), THREADS as usize / lanes, 2)
        }
        Kind::Label(_) => (&kernels.labels, tokens, THREADS as usize / 32, 4),
        Kind::Axis(axes) => {
            (size, dtype) = (axes.block_size, if axes.range.is_some() { DType::F16 } else { axes.axes.dtype });
            let variant = variants::choose(enqueue.forced(), |variant| choose::axis(variant, size, dim))?;
            let wide = variant == Variant::Wide;
            axis_variant = Some(variant);
            // A block's threads are two warps or more.
            lanes = lanes.max(8);
            let kernels = if wide { &kernels.wide_axes } else { &kernels.axes };
            (
                kernels.of(r.k.dtype),
                tokens.div_ceil(size),
                THREADS as usize / (TOKEN_SLOTS * lanes),
                if wide || r.k.dtype.bits == 32 { 1 } else { 2 },
            )
        }
    };
    // With `begin` few summaries are new, and the launch waits for CTAs that have none: two CTAs a multiprocessor then do, which take long
    // chunks nearly as fast.
    let resident =
        if r.begin.is_some() { resident.min(2) } else { resident } * enqueue.facts().multiprocessors as usize;
    let [first, second, third] = r.index.summaries().map(Summary::new);
    let channels = r.index.channels();
    let update = UpdateParams {
        keys,
        place: r.index.place(),
        first,
        second,
        third,
        channels: address(channels),
        channels_head: byte_stride(channels, 0),
        channels_channel: byte_stride(channels, 1),
        dtype: element_code(dtype),
        size: saturated(size),
        stride: saturated(stride),
        kept: channels.map_or(0, |t| t.dim(1)) as u32,
        lanes: lanes as u32,
        split: split as u32,
        slices: 0,
        batch: batch as u32,
        size_of: Divisor::new(saturated(size)),
        stride_of: Divisor::new(saturated(stride).max(1)),
        heads_of: Divisor::new(kv_heads as u32),
        slices_of: Divisor::NONE,
        batch_of: Divisor::new(batch as u32),
    };
    let params = AxisParams {
        update,
        weights: address(weights),
        centre: address(centre),
        weights_head: byte_stride(weights, 0),
        weights_channel: byte_stride(weights, 1),
        centre_head: byte_stride(centre, 0),
        centre_channel: byte_stride(centre, 1),
    };
    Ok(Some(Prepared { kernel, params, variant: axis_variant, resident, most_slices: summaries.div_ceil(at_once) }))
}

/// Fails where a launch would.
pub fn check(enqueue: &Enqueue, r: &UpdateRequest) -> Result<()> {
    prepare(enqueue, r).map(|_| ())
}

/// Updates of layers, one after the other: those that are alike but for addresses share a launch.
pub struct Updates<'e> {
    enqueue: &'e Enqueue<'e>,
    first: Option<Prepared<'e>>,
    layers: Layers,
    count: usize,
}

impl<'e> Updates<'e> {
    pub fn new(enqueue: &'e Enqueue<'e>) -> Updates<'e> {
        // SAFETY: shifts are integers.
        Updates { enqueue, first: None, layers: unsafe { std::mem::zeroed() }, count: 0 }
    }

    /// Adds a layer. The tensors of `r` are used by the next launch, after this returns.
    pub fn add(&mut self, r: &UpdateRequest) -> Result<()> {
        let Some(layer) = prepare(self.enqueue, r)? else { return Ok(()) };
        let of_layer = layer.params.update.batch as usize * layer.params.update.keys.kv_heads as usize;
        let has_room = self.count < MOST_LAYERS as usize && of_layer * (self.count + 1) <= i32::MAX as usize;
        let shift = self.first.filter(|first| has_room && std::ptr::eq(first.kernel, layer.kernel));
        match shift.and_then(|first| layer.params.shift_from(first.params)) {
            Some(shift) => self.layers.shift[self.count] = shift,
            None => {
                self.launch()?;
                self.first = Some(layer);
            }
        }
        self.count += 1;
        Ok(())
    }

    /// Launches the layers added since the last launch.
    pub fn launch(&mut self) -> Result<()> {
        let Some(Prepared { kernel, mut params, variant, resident, most_slices }) = self.first.take() else {
            return Ok(());
        };
        let shares =
            params.update.batch as usize * params.update.keys.kv_heads as usize * std::mem::take(&mut self.count);
        let slices = (resident / shares).min(most_slices).max(1);
        params.update.slices = slices as u32;
        params.update.slices_of = Divisor::new(slices as u32);
        let grid = Grid { ctas: (slices * shares) as u32, threads: THREADS, kind: self.enqueue.dependent_kind() };
        // SAFETY: AxisParams, or UpdateParams with which it begins, and Layers are the kernels' structs; the op's caller keeps the
        // tensors valid until the stream has passed. The kernels wait before they touch anything.
        unsafe { self.enqueue.launch(kernel, grid, [(&raw const params).cast(), (&raw const self.layers).cast()])? };
        if let Some(variant) = variant {
            self.enqueue.ran(variant);
        }
        Ok(())
    }
}

impl Sample {
    fn new(t: &Tensor) -> Sample {
        let [token, head, channel] = [0, 1, 2].map(|d| t.byte_stride(d));
        Sample { data: t.data(), token, head, channel, tokens: saturated(t.dim(0)) }
    }
}

pub fn importance(enqueue: &Enqueue, r: &ImportanceRequest) -> Result<()> {
    let (heads, importance, kernels): (_, _, &Kernels) = (r.heads, r.importance.as_ref(), enqueue.kernels());
    if r.q.dim(0).max(r.k.dim(0)) > i32::MAX as usize {
        return Err(Error::unsupported("q, k: CUDA takes up to 2^31 − 1 tokens".to_string()));
    }
    let params = ImportanceParams {
        q: Sample::new(&r.q),
        k: Sample::new(&r.k),
        channels: address(r.channels.as_ref()),
        importance: address(importance),
        weights: address(r.weights.as_ref()),
        centre: address(r.centre.as_ref()),
        channels_head: byte_stride(r.channels.as_ref(), 0),
        channels_place: byte_stride(r.channels.as_ref(), 1),
        importance_head: byte_stride(importance, 0),
        importance_channel: byte_stride(importance, 1),
        weights_head: byte_stride(r.weights.as_ref(), 0),
        weights_channel: byte_stride(r.weights.as_ref(), 1),
        centre_head: byte_stride(r.centre.as_ref(), 0),
        centre_channel: byte_stride(r.centre.as_ref(), 1),
        // A sample without tokens may have any number of heads, 0 among them.
        group: if r.q.dim(0) == 0 { 1 } else { heads.group() as u32 },
        dim: heads.dim as u32,
        dtype: element_code(r.q.dtype),
        kept: r.channels.map_or(0, |t| t.dim(1)) as u32,
    };
    let grid = Grid { ctas: heads.kv as u32, threads: IMPORTANCE_THREADS, kind: LaunchKind::Plain };
    // SAFETY: ImportanceParams is the kernel's struct; the op's caller keeps the tensors valid until the stream has passed.
    unsafe { enqueue.launch(&kernels.importance, grid, [(&raw const params).cast()]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        let structs = [
            Divisor::layout("Divisor"),
            Place::layout("Place"),
            Summary::layout("Summary"),
            Keys::layout("Keys"),
            UpdateParams::layout("UpdateParams"),
            AxisParams::layout("AxisParams"),
            LayerShift::layout("LayerShift"),
            Layers::layout("Layers"),
            kernel_constants(),
            Sample::layout("Sample"),
            ImportanceParams::layout("ImportanceParams"),
        ];
        layout::check("index", file!(), &structs);
    }
}
