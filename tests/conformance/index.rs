//! vwd_index_update and vwd_channel_importance.

use crate::Case;
use crate::support::paged::{Shape, random_table};
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    index_minmax_agrees_with_the_formula,
    index_means_agree_with_the_formula,
    index_labels_are_the_nearest_codes,
    index_labels_of_equal_channels_are_zero,
    index_grown_in_steps_has_the_bits_of_one_built_at_once,
    index_ignores_nan_channels,
    index_survives_hostile_tables,
    channel_importance_agrees_with_the_formula,
    channel_importance_gives_ties_to_the_lower_channel,
];

/// Summaries in memory: [pages, rows, Hk, …], with or without a table of their own, and with room for `capacity` of each
/// sequence.
pub struct Place<'b> {
    pub table: Option<Tensor<'b>>,
    table_values: Option<Array<i64>>,
    pub pages: usize,
    pub rows: usize,
}

impl<'b> Place<'b> {
    pub fn random(backend: &'b Backend, rng: &mut Rng, batch: usize, capacity: usize) -> Place<'b> {
        if rng.one_in(3) {
            return Place { table: None, table_values: None, pages: batch + rng.size(0..=1), rows: capacity };
        }
        let rows = rng.size(1..=capacity.max(1));
        let values = random_table(rng, batch, capacity.div_ceil(rows).max(1));
        let pages = values.data.iter().max().map_or(1, |&most| most as usize + 1);
        let table = Tensor::ints(backend, I32, &values, &Layout::random(rng, 2));
        Place { table: Some(table), table_values: Some(values), pages, rows }
    }

    pub fn find(&self, i: usize, j: usize) -> Option<(usize, usize)> {
        if self.rows == 0 {
            return None;
        }
        let pages = oracle::Pages { table: self.table_values.as_ref(), pages: self.pages, size: self.rows };
        pages.find(i, j)
    }

    /// Summaries that each sequence has room for.
    pub fn capacity(&self) -> usize {
        self.rows * self.table_values.as_ref().map_or(1, |table| table.shape[1])
    }

    pub fn table_c(&self) -> vwd_tensor {
        self.table.as_ref().map_or(absent(), Tensor::c)
    }
}

fn update(backend: &Backend, paged: &Paged, begin: Option<&Tensor>, index: vwd_index) {
    let args = vwd_index_update_args {
        k: paged.k.c(),
        page_table: paged.table_c(),
        seq_lens: paged.lens.c(),
        begin: begin.map_or(absent(), Tensor::c),
        index: kept(index),
        ..args()
    };
    // SAFETY: the tensors outlive the call.
    backend.finish(unsafe { vwd_index_update(backend.session(), &args, backend.stream()) });
}

/// Where each sequence's range begins: absent (0), or anything from below 0 to past its end.
fn random_begin<'b>(backend: &'b Backend, rng: &mut Rng, paged: &Paged) -> (Option<Tensor<'b>>, Vec<usize>) {
    let batch = paged.len_values.data.len();
    if rng.one_in(3) {
        return (None, vec![0; batch]);
    }
    let values = Array::from_fn(&[batch], |at| rng.int(-3..=paged.len(at[0]) as i64 + 3));
    let clamped = (0..batch).map(|i| values[[i]].clamp(0, paged.len(i) as i64) as usize).collect();
    (Some(Tensor::ints(backend, I32, &values, &Layout::random(rng, 1))), clamped)
}

/// (page, row) → (sequence, summary) of all that a range touches.
fn stored(place: &Place, touched: impl Iterator<Item = (usize, usize)>) -> Vec<([usize; 2], usize, usize)> {
    touched.filter_map(|(i, j)| place.find(i, j).map(|(page, row)| ([page, row], i, j))).collect()
}

fn written_rows(stored: &[([usize; 2], usize, usize)]) -> impl Fn(&[usize]) -> bool + '_ {
    |at| stored.iter().any(|(row, ..)| row[..] == at[..2])
}

fn index_minmax_agrees_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let shape = Shape::random(rng);
        let paged = Paged::random(backend, rng, &shape);
        let size = if shape.paged { rng.pick(&[shape.page, shape.page * 2, shape.page / 2]) } else { rng.size(1..=40) };
        let capacity = shape.capacity().div_ceil(size).saturating_sub(rng.pick(&[0, 0, 1]));
        let place = Place::random(backend, rng, shape.batch, capacity);
        let extents = [place.pages, place.rows, shape.kv_heads, shape.dim];
        let [max, min] = [0, 1].map(|_| Tensor::poisoned(backend, shape.dtype, &extents, &Layout::random(rng, 4)));
        let (begin, from) = random_begin(backend, rng, &paged);
        let index = vwd_index {
            kind: VWD_INDEX_MINMAX,
            block_size: size as u32,
            table: place.table_c(),
            key_max: max.c(),
            key_min: min.c(),
            ..args()
        };
        update(backend, &paged, begin.as_ref(), index);
        let touched = (0..shape.batch).flat_map(|i| {
            let blocks = if from[i] < paged.len(i) { from[i] / size..paged.len(i).div_ceil(size) } else { 0..0 };
            blocks.map(move |j| (i, j))
        });
        let stored = stored(&place, touched);
        let (got_max, got_min) = (max.read_floats(), min.read_floats());
        for &([page, row], i, j) in &stored {
            let tokens: Vec<usize> = (j * size..((j + 1) * size).min(paged.len(i))).collect();
            for g in 0..shape.kv_heads {
                let (want_max, want_min) = oracle::minmax(&paged.keys_of(i, g, &tokens));
                assert_eq!(got_max.row([page, row, g]), want_max, "maxima of block {j} of sequence {i}");
                assert_eq!(got_min.row([page, row, g]), want_min, "minima of block {j} of sequence {i}");
            }
        }
        max.assert_written("key_max", written_rows(&stored));
        min.assert_written("key_min", written_rows(&stored));
        paged.assert_untouched();
    });
}

fn index_means_agree_with_the_formula(backend: &Backend) {
    rounds(60, |rng| {
        let shape = Shape::random(rng);
        let paged = Paged::random(backend, rng, &shape);
        // (0, 0) stands for windows of 32 every 16.
        let (given_window, given_stride) = rng.pick(&[(0, 0), (32, 16), (16, 16), (8, 4), (5, 3), (4, 7), (1, 1)]);
        let window = if given_window == 0 { 32 } else { given_window };
        let stride = if given_stride == 0 { 16 } else { given_stride };
        let capacity = oracle::windows(shape.capacity(), window, stride).saturating_sub(rng.pick(&[0, 0, 1]));
        let place = Place::random(backend, rng, shape.batch, capacity);
        let dtype = rng.pick(&[F32, F16, BF16]);
        let extents = [place.pages, place.rows, shape.kv_heads, shape.dim];
        let means = Tensor::poisoned(backend, dtype, &extents, &Layout::random(rng, 4));
        let (begin, from) = random_begin(backend, rng, &paged);
        let index = vwd_index {
            kind: VWD_INDEX_MEAN,
            window: given_window as u32,
            stride: given_stride as u32,
            table: place.table_c(),
            means: means.c(),
            ..args()
        };
        update(backend, &paged, begin.as_ref(), index);
        let touched = (0..shape.batch).flat_map(|i| {
            let (from, len) = (from[i], paged.len(i));
            let ends_inside = move |w: &usize| from < w * stride + window;
            (0..oracle::windows(len, window, stride)).filter(ends_inside).map(move |w| (i, w))
        });
        let stored = stored(&place, touched);
        let got = means.read_floats();
        for &([page, row], i, w) in &stored {
            let tokens: Vec<usize> = (w * stride..w * stride + window).collect();
            for g in 0..shape.kv_heads {
                let keys = paged.keys_of(i, g, &tokens);
                let want = oracle::mean(&keys);
                for c in 0..shape.dim {
                    // A sum of `window` float32 terms in any order, then one rounding to the dtype.
                    let magnitude = keys.iter().map(|k| k[c].abs()).sum::<f64>() / window as f64;
                    let tolerance = (window + 2) as f64 * F32.epsilon() * magnitude + 2.0 * dtype.rounding(want[c]);
                    let got = got[[page, row, g, c]];
                    assert!((got - want[c]).abs() <= tolerance, "window {w} of sequence {i}: {got}, {}", want[c]);
                }
            }
        }
        means.assert_written("means", written_rows(&stored));
        paged.assert_untouched();
    });
}

/// LABEL summaries of r channels.
struct Labels<'b> {
    place: Place<'b>,
    codes: Tensor<'b>,
    scale: Tensor<'b>,
    min: Tensor<'b>,
    channels: Tensor<'b>,
    channel_values: Array<i64>,
}

impl<'b> Labels<'b> {
    fn random(backend: &'b Backend, rng: &mut Rng, shape: &Shape, capacity: usize) -> Labels<'b> {
        let kept = rng.pick(&[2, 8, 10, shape.dim / 2, shape.dim]);
        let place = Place::random(backend, rng, shape.batch, capacity);
        let chosen = (0..shape.kv_heads).flat_map(|_| rng.subset(shape.dim, kept)).map(|c| c as i64).collect();
        let channel_values = Array::new(&[shape.kv_heads, kept], chosen);
        let rows = [place.pages, place.rows, shape.kv_heads];
        let codes = [rows[0], rows[1], rows[2], kept / 2];
        Labels {
            codes: Tensor::poisoned(backend, U8, &codes, &Layout::random(rng, 4)),
            scale: Tensor::poisoned(backend, F16, &rows, &Layout::random(rng, 3)),
            min: Tensor::poisoned(backend, F16, &rows, &Layout::random(rng, 3)),
            channels: Tensor::ints(backend, I32, &channel_values, &Layout::random(rng, 2)),
            channel_values,
            place,
        }
    }

    fn c(&self) -> vwd_index {
        vwd_index {
            kind: VWD_INDEX_LABEL,
            table: self.place.table_c(),
            labels: self.codes.c(),
            label_scale: self.scale.c(),
            label_min: self.min.c(),
            channels: self.channels.c(),
            ..args()
        }
    }
}

fn index_labels_are_the_nearest_codes(backend: &Backend) {
    rounds(60, |rng| {
        let shape = Shape::random(rng);
        let paged = Paged::random(backend, rng, &shape);
        let capacity = shape.capacity().saturating_sub(rng.pick(&[0, 0, 3]));
        let labels = Labels::random(backend, rng, &shape, capacity);
        let (begin, from) = random_begin(backend, rng, &paged);
        update(backend, &paged, begin.as_ref(), labels.c());
        let touched = (0..shape.batch).flat_map(|i| (from[i]..paged.len(i)).map(move |t| (i, t)));
        let stored = stored(&labels.place, touched);
        let (codes, scale, min) = (labels.codes.read_ints(), labels.scale.read_floats(), labels.min.read_floats());
        for &([page, row], i, t) in &stored {
            for g in 0..shape.kv_heads {
                let key = paged.keys_of(i, g, &[t])[0];
                let chosen: Vec<f64> = labels.channel_values.row([g]).iter().map(|&c| key[c as usize]).collect();
                let (want_scale, want_min) = oracle::label_range(&chosen);
                let (scale, min) = (scale[[page, row, g]], min[[page, row, g]]);
                // The scale passes through float32 before float16 and may end one step off.
                assert!((scale - want_scale).abs() <= 2.0 * F16.rounding(want_scale), "scale {scale}, {want_scale}");
                assert_eq!(min, F16.round(want_min), "minimum of token {t} of sequence {i}");
                for (n, &x) in chosen.iter().enumerate() {
                    let code = codes[[page, row, g, n / 2]] >> (4 * (n % 2)) & 15;
                    let exact = if scale == 0.0 { 0.0 } else { ((x - min) / scale).clamp(0.0, 15.0) };
                    // Half a step from the exact place, and the division's rounding.
                    assert!((code as f64 - exact).abs() <= 0.5 + 1e-5, "code {code} of token {t}: exact {exact}");
                }
            }
        }
        labels.codes.assert_written("labels", written_rows(&stored));
        labels.scale.assert_written("label_scale", written_rows(&stored));
        labels.min.assert_written("label_min", written_rows(&stored));
        labels.channels.assert_untouched("channels");
        paged.assert_untouched();
    });
}

/// max = min: there is nothing to divide by.
fn index_labels_of_equal_channels_are_zero(backend: &Backend) {
    rounds(4, |rng| {
        let value = rng.pick(&[0.0, 1.5, -3.0]);
        let mut shape = Shape::random(rng);
        shape.paged = true;
        let paged = Paged::with_keys(backend, rng, &shape, |_, extents| Array::filled(extents, value));
        let labels = Labels::random(backend, rng, &shape, shape.capacity());
        update(backend, &paged, None, labels.c());
        let (codes, scale, min) = (labels.codes.read_ints(), labels.scale.read_floats(), labels.min.read_floats());
        for i in 0..shape.batch {
            for (page, row) in (0..paged.len(i)).map(|t| labels.place.find(i, t).unwrap()) {
                for g in 0..shape.kv_heads {
                    assert!(codes.row([page, row, g]).iter().all(|&byte| byte == 0), "codes");
                    assert_eq!((scale[[page, row, g]], min[[page, row, g]]), (0.0, value));
                }
            }
        }
    });
}

/// Token by token, in leaps, and after tokens were taken back and replaced.
fn index_grown_in_steps_has_the_bits_of_one_built_at_once(backend: &Backend) {
    rounds(12, |rng| {
        let mut shape = Shape::random(rng);
        shape.paged = true;
        let mut paged = Paged::random(backend, rng, &shape);
        let page = shape.page;
        let labels = [0, 1].map(|_| Labels::random(backend, &mut Rng::new(1), &shape, shape.capacity()));
        let place = Place::random(backend, rng, shape.batch, shape.capacity());
        let extents = [place.pages, place.rows, shape.kv_heads, shape.dim];
        let plain = Layout::default();
        let summaries = [0, 1].map(|_| [0, 1, 2].map(|_| Tensor::poisoned(backend, shape.dtype, &extents, &plain)));
        let indices = |n: usize| {
            let [max, min, means] = &summaries[n];
            let minmax = vwd_index {
                kind: VWD_INDEX_MINMAX,
                block_size: page as u32,
                table: place.table_c(),
                key_max: max.c(),
                key_min: min.c(),
                ..args()
            };
            let mean = vwd_index {
                kind: VWD_INDEX_MEAN,
                window: 5,
                stride: 2,
                table: place.table_c(),
                means: means.c(),
                ..args()
            };
            [minmax, mean, labels[n].c()]
        };
        // At once.
        let lens: Vec<usize> = (0..shape.batch).map(|i| paged.len(i)).collect();
        indices(0).into_iter().for_each(|index| update(backend, &paged, None, index));
        // In steps. Drafted tokens are other keys; they are taken back before the true ones come.
        let drafted = rng.normals(&paged.keys.shape);
        let drafted = Tensor::floats(backend, shape.dtype, &drafted, &plain);
        let mut done = vec![0; shape.batch];
        while done != lens {
            let ints = |values: &[usize]| {
                let values = values.iter().map(|&x| x as i64).collect();
                Tensor::ints(backend, I32, &Array::new(&[shape.batch], values), &plain)
            };
            let step = rng.pick(&[1, 1, 2, 9]);
            let next: Vec<usize> = (0..shape.batch).map(|i| lens[i].min(done[i] + step)).collect();
            let ahead: Vec<usize> = (0..shape.batch).map(|i| lens[i].min(done[i] + 4)).collect();
            let begin = ints(&done);
            if rng.one_in(3) {
                let true_keys = std::mem::replace(&mut paged.k, drafted.alias());
                paged.lens = ints(&ahead);
                indices(1).into_iter().for_each(|index| update(backend, &paged, Some(&begin), index));
                paged.k = true_keys;
            }
            paged.lens = ints(&next);
            indices(1).into_iter().for_each(|index| update(backend, &paged, Some(&begin), index));
            done = next;
        }
        let same = |a: &Tensor, b: &Tensor, name: &str| assert!(a.read_memory() == b.read_memory(), "{name} differ");
        for (n, name) in ["maxima", "minima", "means"].into_iter().enumerate() {
            same(&summaries[0][n], &summaries[1][n], name);
        }
        same(&labels[0].codes, &labels[1].codes, "labels");
        same(&labels[0].scale, &labels[1].scale, "scales");
        same(&labels[0].min, &labels[1].min, "label minima");
    });
}

fn index_ignores_nan_channels(backend: &Backend) {
    rounds(5, |rng| {
        let mut shape = Shape::random(rng);
        (shape.paged, shape.batch, shape.page, shape.max_pages) = (false, 1, 8, 1);
        let nans = |rng: &mut Rng, extents: &[usize]| {
            let mut keys = rng.normals(extents);
            (0..40).for_each(|_| {
                // Never the last token of a channel, so that every maximum is a number.
                let at = [rng.size(0..=extents[0] - 1), rng.size(0..=6), 0, rng.size(0..=extents[3] - 1)];
                keys[at] = f64::NAN;
            });
            keys
        };
        let mut paged = Paged::with_keys(backend, rng, &shape, nans);
        paged.len_values = Array::new(&[1], vec![8]);
        paged.lens = Tensor::ints(backend, I32, &paged.len_values, &Layout::default());
        let extents = [1, 1, shape.kv_heads, shape.dim];
        let [max, min] = [0, 1].map(|_| Tensor::poisoned(backend, shape.dtype, &extents, &Layout::default()));
        let index = vwd_index { kind: VWD_INDEX_MINMAX, block_size: 8, key_max: max.c(), key_min: min.c(), ..args() };
        update(backend, &paged, None, index);
        let labels = Labels::random(backend, rng, &shape, 8);
        update(backend, &paged, None, labels.c());
        let tokens: Vec<usize> = (0..8).collect();
        let (want_max, want_min) = oracle::minmax(&paged.keys_of(0, 0, &tokens));
        assert_eq!(max.read_floats().row([0, 0, 0]), want_max);
        assert_eq!(min.read_floats().row([0, 0, 0]), want_min);
        let (codes, min) = (labels.codes.read_ints(), labels.min.read_floats());
        for t in tokens {
            let (page, row) = labels.place.find(0, t).unwrap();
            let key = paged.keys_of(0, 0, &[t])[0];
            let chosen: Vec<f64> = labels.channel_values.row([0]).iter().map(|&c| key[c as usize]).collect();
            if chosen.iter().any(|x| x.is_finite()) {
                assert_eq!(min[[page, row, 0]], F16.round(oracle::label_range(&chosen).1), "token {t}");
            }
            for (n, _) in chosen.iter().enumerate().filter(|(_, x)| x.is_nan()) {
                assert_eq!(codes[[page, row, 0, n / 2]] >> (4 * (n % 2)) & 15, 0, "a NaN channel has code 0");
            }
        }
    });
}

/// Pages out of range in both tables, channels out of range, lengths of all kinds: nothing crashes, nothing outside the
/// tensors is touched.
fn index_survives_hostile_tables(backend: &Backend) {
    rounds(20, |rng| {
        let mut shape = Shape::random(rng);
        shape.paged = true;
        let mut paged = Paged::random(backend, rng, &shape);
        let ids = [-1, i32::MIN as i64, i32::MAX as i64, 0, 1, 1000];
        let table = Array::from_fn(&[shape.batch, shape.max_pages], |_| rng.pick(&ids));
        paged.table = Some(Tensor::ints(backend, I32, &table, &Layout::default()));
        let mut labels = Labels::random(backend, rng, &shape, shape.capacity());
        labels.channels =
            Tensor::ints(backend, I32, &labels.channel_values.map(|_| rng.pick(&ids)), &Layout::default());
        let table = Array::from_fn(&[shape.batch, 3], |_| rng.pick(&ids));
        labels.place.table = Some(Tensor::ints(backend, I32, &table, &Layout::default()));
        let values = Array::from_fn(&[shape.batch], |_| rng.pick(&ids));
        let begin = Tensor::ints(backend, I32, &values, &Layout::default());
        update(backend, &paged, Some(&begin), labels.c());
        paged.assert_untouched();
    });
}

// --- channel importance ----------------------------------------------------------------------------------------------

fn channel_importance_agrees_with_the_formula(backend: &Backend) {
    rounds(30, |rng| {
        let (heads, group, dim) = (rng.size(1..=3), rng.size(1..=7), rng.pick(&[16, 24, 64, 256]));
        let (tq, tk, kept) = (rng.size(1..=20), rng.size(1..=20), rng.pick(&[2, dim / 2, dim]));
        let dtype = rng.pick(&[F32, F16, BF16]);
        let q = rng.normals(&[tq, heads * group, dim]);
        let k = rng.normals(&[tk, heads, dim]);
        let (got, channels) = channel_importance(backend, rng, dtype, &q, &k, kept);
        let want = oracle::channel_importance(&q.map(|&x| dtype.round(x)), &k.map(|&x| dtype.round(x)));
        for g in 0..heads {
            for c in 0..dim {
                // G additions, a division and a product in float32.
                let tolerance = (group + 3) as f64 * F32.epsilon() * want[[g, c]];
                assert!((got[[g, c]] - want[[g, c]]).abs() <= tolerance, "{} {}", got[[g, c]], want[[g, c]]);
            }
            // Exact with respect to the importance that the call itself found.
            let chosen: Vec<i64> = oracle::top_k(got.row([g]), kept, 0, 0).iter().map(|&c| c as i64).collect();
            assert_eq!(channels.row([g]), chosen);
        }
    });
}

/// Whole numbers and a power of two for G: importance is exact, and ties are many.
fn channel_importance_gives_ties_to_the_lower_channel(backend: &Backend) {
    rounds(20, |rng| {
        let (heads, group, dim) = (2, rng.pick(&[1, 2, 4]), rng.pick(&[16, 64]));
        let (q, k) = (rng.whole(&[2, heads * group, dim], 2), rng.whole(&[2, heads, dim], 2));
        let kept = rng.pick(&[2, 4, 8, 16]);
        let dtype = rng.pick(&[F32, F16, BF16]);
        let (got, channels) = channel_importance(backend, rng, dtype, &q, &k, kept);
        let want = oracle::channel_importance(&q, &k);
        assert_eq!(got, want);
        for g in 0..heads {
            let chosen: Vec<i64> = oracle::top_k(want.row([g]), kept, 0, 0).iter().map(|&c| c as i64).collect();
            assert_eq!(channels.row([g]), chosen);
        }
    });
}

/// (importance, channels)
fn channel_importance(
    backend: &Backend,
    rng: &mut Rng,
    dtype: DType,
    q: &Array<f64>,
    k: &Array<f64>,
    kept: usize,
) -> (Array<f64>, Array<i64>) {
    let (heads, dim) = (k.shape[1], k.shape[2]);
    let q = Tensor::floats(backend, dtype, q, &Layout::random(rng, 3));
    let k = Tensor::floats(backend, dtype, k, &Layout::random(rng, 3));
    let channels = Tensor::poisoned(backend, I32, &[heads, kept], &Layout::random(rng, 2));
    let importance = Tensor::poisoned(backend, F32, &[heads, dim], &Layout::random(rng, 2));
    let mut args = vwd_channel_importance_args { q: q.c(), k: k.c(), channels: channels.c(), ..args() };
    // SAFETY: the tensors outlive the call.
    let run = |args: &_| backend.finish(unsafe { vwd_channel_importance(backend.session(), args, backend.stream()) });
    run(&args);
    let alone = channels.read_ints();
    importance.assert_untouched("importance that was not given");
    args.importance = importance.c();
    run(&args);
    assert_eq!(alone, channels.read_ints(), "the same channels, whether importance is asked for or not");
    channels.assert_written("channels", |_| true);
    importance.assert_written("importance", |_| true);
    (importance.read_floats(), channels.read_ints())
}
