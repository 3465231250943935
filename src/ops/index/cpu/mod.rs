//! Summaries on the CPU, eight channels at a time and in the order of the tokens.

mod axis;

use super::{ImportanceRequest, Kind, Labels, UpdateRequest, Windows};
use crate::core::dtype::{Element, Rounded};
use crate::core::status::Result;
use crate::core::tensor::Tensor;
use crate::ops::simd::{self, Kernel, LANES, Lanes, Row};
use crate::ops::topk::{Budget, select_top};
use crate::ops::views::{MAX_DIM, Spare, adjacent, spare};
use crate::runtime::cpu::Cpu;
use crate::{with_float, with_key};
use half::f16;
use std::marker::PhantomData;
use std::ops::Range;

pub fn update(cpu: &Cpu, r: &UpdateRequest) -> Result<()> {
    // Without heads, or room, there is nothing to summarise, however many sequences and tokens there are.
    let batch = if r.k.dim(2) == 0 || r.index.capacity() == 0 { 0 } else { r.pages.batch() };
    // Summaries of one task: about a block's worth of tokens.
    let chunk = match &r.index.kind {
        Kind::MinMax { .. } | Kind::Axis(_) => 1,
        Kind::Mean { .. } => 4,
        Kind::Label(_) => 64,
    };
    // SAFETY: i is below the batch size, and the caller keeps the tensors valid.
    let most = (0..batch).map(|i| unsafe { stale(r, i) }.len()).max().unwrap_or(0);
    let chunks = most.div_ceil(chunk);
    let bytes = 64 * r.k.dim(2) * r.k.dim(3) * r.k.dtype.bytes();
    let some = |task: usize| {
        let i = task / chunks;
        // SAFETY: as above.
        let all = unsafe { stale(r, i) };
        let first = all.end.min(all.start + task % chunks * chunk);
        (i, first..all.end.min(first + chunk))
    };
    with_key!(r.k.dtype, T => {
        let run = |task, room: &mut [f32]| {
            let (i, summaries) = some(task);
            simd::dispatch(Update::<T> { r, i, summaries, room, element: PhantomData });
        };
        match &r.index.kind {
            Kind::Axis(_) => cpu.in_shares(&cpu.scratch(), batch * chunks, axis::ROOM, bytes, run),
            _ => {
                cpu.parallel(batch * chunks, bytes, |task| run(task, &mut []));
                Ok(())
            }
        }
    })
}

/// The summaries of sequence `i` that the tokens of the range change or complete, as far as the index has room.
///
/// # Safety
/// `i` is below the batch size, and the tensors are valid.
unsafe fn stale(r: &UpdateRequest, i: usize) -> Range<usize> {
    // SAFETY: i is a sequence, of which seq_lens and begin have an entry each.
    let (len, begin) = unsafe { (r.pages.len(i), r.begin.map_or(0, |b| b.get::<i32, 1>([i]))) };
    let begin = (begin.max(0) as usize).min(len);
    if begin == len {
        return 0..0;
    }
    let touched = match &r.index.kind {
        Kind::MinMax { block_size, .. } => begin / block_size..len.div_ceil(*block_size),
        Kind::Mean { windows, .. } => windows.full(begin)..windows.full(len),
        Kind::Label(_) => begin..len,
        Kind::Axis(axes) => begin / axes.block_size..len.div_ceil(axes.block_size),
    };
    touched.start..touched.end.min(r.index.capacity())
}

/// Some summaries of one sequence, for all KV heads.
struct Update<'a, T> {
    r: &'a UpdateRequest<'a>,
    i: usize,
    summaries: Range<usize>,
    /// axis::ROOM floats for axes, else none.
    room: &'a mut [f32],
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Update<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Update { r, i, summaries, room, .. } = self;
        // One buffer for all KV heads, because it is large.
        let found = &mut Found::<T>::new();
        for g in 0..r.k.dim(2) {
            let keys = Keys { r, i, g };
            // SAFETY: the caller keeps the table valid.
            let row = |j| unsafe { r.index.row(i, j) }.map(|[page, row]| [page, row, g]);
            // SAFETY: shapes were checked, and no other task has these summaries.
            unsafe {
                match &r.index.kind {
                    Kind::MinMax { block_size, max, min } => {
                        for j in summaries.clone() {
                            if let Some(at) = row(j) {
                                with_float!(max.dtype, M => {
                                    minmax::<L, T, M>(&keys, found, j * block_size, *block_size, max, min, at);
                                });
                            }
                        }
                    }
                    Kind::Mean { windows, means } => {
                        for j in summaries.clone() {
                            if let Some(at) = row(j) {
                                with_float!(means.dtype, M => mean::<L, T, M>(&keys, found, j, windows, means, at));
                            }
                        }
                    }
                    Kind::Label(labels) => {
                        let channels = labels.channels_of(g, r.k.dim(3));
                        for j in summaries.clone() {
                            if let Some(at) = row(j) {
                                label::<L, T>(&keys, found, j, labels, &channels[..labels.kept()], at);
                            }
                        }
                    }
                    Kind::Axis(axes) => {
                        for j in summaries.clone() {
                            if let Some(at) = row(j) {
                                axis::summarise::<L, T>(&keys, room, j, axes, at);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The keys of one sequence and KV head.
struct Keys<'a> {
    r: &'a UpdateRequest<'a>,
    i: usize,
    g: usize,
}

/// Rows that are looked up together.
const STEP: usize = 8;

/// Addresses of some keys, what to multiply them by, and room for those whose channels lie apart.
struct Found<T> {
    rows: [*const T; STEP],
    scales: [f32; STEP],
    count: usize,
    spares: [Spare<T>; STEP],
}

impl<T: Row> Found<T> {
    #[inline(always)]
    fn new() -> Found<T> {
        let rows = [std::ptr::null(); STEP];
        Found { rows, scales: [1.0; STEP], count: 0, spares: [const { spare() }; STEP] }
    }

    #[inline(always)]
    fn keys(&self) -> impl Iterator<Item = Key<T>> {
        (0..self.count).map(|n| Key { row: self.rows[n], scale: self.scales[n] })
    }
}

/// One key: value = stored · scale. Types other than FP8 have no scale.
#[derive(Clone, Copy)]
struct Key<T> {
    row: *const T,
    scale: f32,
}

impl<T: Row> Key<T> {
    /// Channels c … c+7.
    ///
    /// # Safety
    /// They are inside the key, which is valid.
    #[inline(always)]
    unsafe fn load<L: Lanes>(self, c: usize) -> L {
        // SAFETY: c … c+7 are channels of the key, which begins at row.
        let stored = unsafe { T::load::<L>(self.row.add(c)) };
        if T::DTYPE.is_float8() { stored.mul(L::splat(self.scale)) } else { stored }
    }
}

impl Keys<'_> {
    /// Finds the keys of at most STEP tokens; those that have no page are left out.
    ///
    /// # Safety
    /// The tensors are valid, and k is of dtype `T`.
    #[inline(always)]
    unsafe fn find<T: Row>(&self, tokens: Range<usize>, found: &mut Found<T>) {
        let Keys { r, i, g } = *self;
        found.count = 0;
        for t in tokens {
            // SAFETY: page() gives pages of the tensor; t mod P is a row of one, and g a head.
            unsafe {
                let Some(page) = r.pages.page(i, t / r.pages.size) else { continue };
                let at = [page, t % r.pages.size, g];
                found.rows[found.count] = adjacent(&r.k, at, &mut found.spares[found.count]);
                if let Some(scale) = &r.k_scale {
                    found.scales[found.count] = scale.of(at);
                }
            }
            found.count += 1;
        }
    }
}

/// Largest and smallest key of the block that starts at token `begin`.
///
/// # Safety
/// The tensors are valid, k of dtype `T`, the summaries of dtype `M`, and `at` is a row of theirs that no other task
/// touches.
#[inline(always)]
unsafe fn minmax<L: Lanes, T: Row, M: Rounded>(
    keys: &Keys,
    found: &mut Found<T>,
    begin: usize,
    size: usize,
    max: &Tensor,
    min: &Tensor,
    at: [usize; 3],
) {
    let dim = max.dim(3);
    let mut largest = [f32::NEG_INFINITY; MAX_DIM];
    let mut smallest = [f32::INFINITY; MAX_DIM];
    // SAFETY: the tokens are below the length, the row is this task's; `largest` and `smallest` have room for D.
    unsafe {
        let end = keys.r.pages.len(keys.i).min(begin + size);
        for first in (begin..end).step_by(STEP) {
            keys.find(first..end.min(first + STEP), found);
            for c in (0..dim).step_by(LANES) {
                let (up, down) = (largest.as_mut_ptr().add(c), smallest.as_mut_ptr().add(c));
                let (mut largest, mut smallest) = (L::load(up), L::load(down));
                for key in found.keys() {
                    // In this order NaN is ignored.
                    let key = key.load::<L>(c);
                    largest = key.max(largest);
                    smallest = key.min(smallest);
                }
                largest.store(up);
                smallest.store(down);
            }
        }
        // Adding 0 makes every zero +0, whichever came first.
        for c in 0..dim {
            write(max, at, c, M::from_f32(largest[c] + 0.0));
            write(min, at, c, M::from_f32(smallest[c] + 0.0));
        }
    }
}

/// Mean key of a window: the sum in the order of the tokens, times 1/size.
///
/// # Safety
/// As for [`minmax`]; `means` is of dtype `M`.
#[inline(always)]
unsafe fn mean<L: Lanes, T: Row, M: Rounded>(
    keys: &Keys,
    found: &mut Found<T>,
    j: usize,
    windows: &Windows,
    means: &Tensor,
    at: [usize; 3],
) {
    let dim = means.dim(3);
    let mut sums = [0.0; MAX_DIM];
    let (begin, end) = (j * windows.stride, j * windows.stride + windows.size);
    // SAFETY: a full window ends below the length, the row is this task's, and `sums` has room for D.
    unsafe {
        for first in (begin..end).step_by(STEP) {
            let tokens = first..end.min(first + STEP);
            keys.find(tokens.clone(), found);
            if found.count < tokens.len() {
                sums = [f32::NAN; MAX_DIM];
            }
            for c in (0..dim).step_by(LANES) {
                let place = sums.as_mut_ptr().add(c);
                let mut sum = L::load(place);
                for key in found.keys() {
                    sum = sum.add(key.load(c));
                }
                sum.store(place);
            }
        }
        let share = 1.0 / windows.size as f32;
        for (c, sum) in sums[..dim].iter().enumerate() {
            write(means, at, c, M::from_f32(sum * share));
        }
    }
}

/// INT4 codes of the chosen channels of token `t`.
///
/// # Safety
/// As for [`minmax`].
#[inline(always)]
unsafe fn label<L: Lanes, T: Row>(
    keys: &Keys,
    found: &mut Found<T>,
    t: usize,
    labels: &Labels,
    channels: &[Option<u16>],
    at: [usize; 3],
) {
    let dim = keys.r.k.dim(3);
    // SAFETY: t is a token of the sequence.
    unsafe { keys.find(t..t + 1, found) };
    // The last one stands for a channel outside the key.
    let mut key = [0.0; MAX_DIM + 1];
    // NaN past the end: ignored.
    let mut values = [f32::NAN; MAX_DIM];
    if let Some(Key { row, scale }) = found.keys().next() {
        // SAFETY: a key that was found has D channels.
        unsafe { simd::widen::<L, T>(row, scale, &mut key[..dim]) };
        for (value, channel) in values.iter_mut().zip(channels) {
            *value = key[channel.map_or(MAX_DIM, usize::from)];
        }
    }
    let (low, high) = extent::<L>(&values[..channels.len().next_multiple_of(LANES)]);
    let range = Range4::new(low, high);
    let mut codes = [0u8; MAX_DIM];
    range.encode(&values[..channels.len()], &mut codes);
    // SAFETY: forwarded to the caller.
    unsafe {
        labels.min.set(at, range.min);
        labels.scale.set(at, range.scale);
        for (n, pair) in codes[..channels.len()].as_chunks::<2>().0.iter().enumerate() {
            write(&labels.codes, at, n, pair[0] | pair[1] << 4);
        }
    }
}

/// The smallest and the largest of whole vectors, NaN ignored; a zero is +0.
#[inline(always)]
fn extent<L: Lanes>(values: &[f32]) -> (f32, f32) {
    let (mut low, mut high) = (L::splat(f32::INFINITY), L::splat(f32::NEG_INFINITY));
    for eight in values.as_chunks().0 {
        let x = L::from_array(eight);
        low = x.min(low);
        high = x.max(high);
    }
    let low = low.to_array().into_iter().fold(f32::INFINITY, |a, b| if b < a { b } else { a }) + 0.0;
    (low, high.to_array().into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a }))
}

/// What codes of four bits stand for: value ≈ min + scale·code.
struct Range4 {
    scale: f16,
    min: f16,
}

impl Range4 {
    /// Without a number, low above high: a minimum that says so, and that select gives no weight.
    #[inline(always)]
    fn new(low: f32, high: f32) -> Range4 {
        let min = if low <= high { f16::from_f32(low.clamp(-MOST, MOST)) } else { f16::NAN };
        Range4 { scale: f16::from_f32(positive((high - low) / 15.0).min(MOST)), min }
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], codes: &mut [u8]) {
        if self.scale == f16::ZERO {
            return codes[..values.len()].fill(0);
        }
        let (min, scale) = (self.min.to_f32(), self.scale.to_f32());
        for (code, x) in codes.iter_mut().zip(values) {
            // Adding 2^23 rounds to a whole number, ties to even, and leaves it in the low bits.
            const WHOLE: f32 = (1 << 23) as f32;
            *code = (positive((x - min) / scale).min(15.0) + WHOLE).to_bits() as u8 & 15;
        }
    }
}

/// The largest float16.
const MOST: f32 = 65504.0;

/// 0 for what is negative, and for NaN.
#[inline(always)]
fn positive(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// # Safety
/// `at` and `c` are inside `t`, which is of dtype `T`, and no other task touches the element.
#[inline(always)]
unsafe fn write<T: Element>(t: &Tensor, at: [usize; 3], c: usize, value: T) {
    // SAFETY: at and c name an element of t, which is this task's.
    unsafe { t.set([at[0], at[1], at[2], c], value) }
}

pub fn importance(cpu: &Cpu, r: &ImportanceRequest) {
    let heads = r.heads;
    let tokens = heads.group().saturating_mul(r.q.dim(0)).saturating_add(r.k.dim(0));
    let bytes = tokens.saturating_mul(heads.dim * r.q.dtype.bytes());
    // Without sampled queries their heads, however many, add nothing.
    let sampled = if r.q.dim(0) == 0 { 0 } else { heads.group() };
    with_float!(r.q.dtype, T => cpu.parallel(heads.kv, bytes, |g| {
        // SAFETY: each task has results of its own.
        unsafe { average::<T>(r, g, sampled) };
        let peak = |x, head| simd::dispatch(Peak::<T> { x, head, element: PhantomData });
        let mut row = [0.0; MAX_DIM];
        for h in g * heads.group()..g * heads.group() + sampled {
            row.iter_mut().zip(peak(&r.q, h)).for_each(|(sum, peak)| *sum += peak);
        }
        row.iter_mut().zip(peak(&r.k, g)).for_each(|(x, peak)| *x = *x / heads.group() as f32 * peak);
        // SAFETY: each task has results of its own.
        unsafe { choose(r, g, &row[..heads.dim]) };
    }));
}

/// Writes the channels of KV head `g`, whose importance this is.
///
/// # Safety
/// The tensors are valid, `g` is below Hk, and no other task writes its results.
unsafe fn choose(r: &ImportanceRequest, g: usize, row: &[f32]) {
    if let Some(channels) = &r.channels {
        let mut place = 0;
        select_top(row, Budget { k: channels.dim(1), init: 0, local: 0 }, |c| {
            // SAFETY: r channels are chosen, as many as a row of channels has places.
            unsafe { channels.set([g, place], c as i32) };
            place += 1;
        });
    }
    if let Some(out) = &r.importance {
        for (c, &importance) in row.iter().enumerate() {
            // SAFETY: the row has D values, as one of importance has places.
            unsafe { out.set([g, c], importance) };
        }
    }
}

/// Writes the weights and the centre of KV head `g`, of whose query heads so many are sampled.
///
/// # Safety
/// As for [`choose`], and the samples are of dtype `T`.
unsafe fn average<T: Row>(r: &ImportanceRequest, g: usize, sampled: usize) {
    let first = g * r.heads.group();
    let of = |out: &Option<Tensor>, x: &Tensor, heads: Range<usize>, absolute| {
        let Some(out) = out else { return };
        let (mut sums, count) = ([0.0; MAX_DIM], heads.len() * x.dim(0));
        for head in heads {
            simd::dispatch(Sum::<T> { x, head, absolute, sums: &mut sums, element: PhantomData });
        }
        for (c, sum) in sums[..x.dim(2)].iter().enumerate() {
            // SAFETY: forwarded to the caller; the channel is inside the row.
            unsafe { out.set([g, c], if count == 0 { 0.0 } else { sum / count as f32 }) };
        }
    };
    of(&r.weights, &r.q, first..first + sampled, true);
    of(&r.centre, &r.k, g..g + 1, false);
}

/// Σ_t x[t, head, c] of each channel, or of |x|, in the order of the tokens; NaN is 0.
struct Sum<'a, T> {
    x: &'a Tensor<'a>,
    head: usize,
    absolute: bool,
    sums: &'a mut [f32; MAX_DIM],
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Sum<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (dim, mut row, mut spare) = (self.x.dim(2), [0.0; MAX_DIM], spare());
        for t in 0..self.x.dim(0) {
            // SAFETY: t and head are inside the shape, whose last extent is dim.
            unsafe {
                simd::widen::<L, T>(adjacent(self.x, [t, self.head], &mut spare), 1.0, &mut row[..dim]);
            }
            for (sum, &x) in self.sums.iter_mut().zip(&row[..dim]) {
                let x = if self.absolute { x.abs() } else { x };
                *sum += if x.is_nan() { 0.0 } else { x };
            }
        }
    }
}

/// max_t |x[t, head, c]| of each channel, NaN ignored.
struct Peak<'a, T> {
    x: &'a Tensor<'a>,
    head: usize,
    element: PhantomData<T>,
}

impl<T: Row> Kernel for Peak<'_, T> {
    type Output = [f32; MAX_DIM];

    #[inline(always)]
    fn run<L: Lanes>(self) -> [f32; MAX_DIM] {
        let (mut peak, mut row) = ([0.0; MAX_DIM], [0.0; MAX_DIM]);
        let mut spare = spare();
        let dim = self.x.dim(2);
        for t in 0..self.x.dim(0) {
            // SAFETY: t and head are inside the shape, whose last extent is dim.
            unsafe {
                simd::widen::<L, T>(adjacent(self.x, [t, self.head], &mut spare), 1.0, &mut row[..dim]);
            }
            for (peak, x) in peak[..dim].iter_mut().zip(&row) {
                *peak = if x.abs() > *peak { x.abs() } else { *peak };
            }
        }
        peak
    }
}
