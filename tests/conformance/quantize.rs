//! vwd_kv_quantize and vwd_kv_weights against formulas in double precision, and to the bit where CUDA is compared with the CPU.

use crate::Case;
use crate::support::int4::rotated;
use crate::support::*;
use vanward::abi::*;
use vanward::capi::*;

pub const CASES: &[Case] = cases![
    quantize_codes_whole_blocks_as_the_formula_says,
    quantize_of_hostile_numbers_follows_the_contract,
    quantize_of_constant_and_empty_blocks_is_exact,
    quantize_divides_by_weights_of_any_size,
    quantize_in_any_order_gives_the_same_bits,
    quantize_of_many_layers_is_quantize_of_each,
    weights_are_roots_of_spread_over_query_size,
    weights_of_samples_without_numbers_are_one,
];

#[derive(Clone, Debug)]
struct Spec {
    batch: usize,
    kv_heads: usize,
    dims: [usize; 2],
    block: usize,
    exact: usize,
    /// Tokens of a page, and pages of a sequence: exact, coded, and blocks and pages of means. No table where there is one page.
    page: usize,
    pages: usize,
    coded_page: usize,
    coded_pages: usize,
    mean_rows: usize,
    mean_pages: usize,
    dtype: DType,
    mean_type: DType,
    has_weights: bool,
    has_begin: bool,
    layers: usize,
    /// Rows of 64 or 128 channels of 16 bits, side by side in memory: a kernel of their own on CUDA.
    has_rows: bool,
    layout_seed: u64,
}

impl Spec {
    fn random(rng: &mut Rng) -> Spec {
        let block: usize = rng.pick(&[16, 32, 48, 64, 128]);
        let size = |rng: &mut Rng| rng.pick(&[block, 2 * block, 16, block / 2]);
        let [page, coded_page] = [(); 2].map(|()| {
            let page: usize = size(rng);
            if page.is_multiple_of(block) || block.is_multiple_of(page) { page } else { block }
        });
        let most = block * rng.size(1..=5);
        let (mean_rows, blocks) = (rng.pick(&[1, 2, 8]), most / block);
        let has_rows = rng.one_in(2);
        let dim = rng.pick(&[64, 128]);
        Spec {
            batch: rng.size(1..=3),
            kv_heads: rng.size(1..=3),
            dims: [(); 2].map(|()| if has_rows { dim } else { rng.pick(&[64, 80, 96, 128, 144, 192, 256]) }),
            block,
            exact: block * rng.pick(&[0, 0, 1, 2]),
            page,
            pages: most.div_ceil(page),
            coded_page,
            coded_pages: most.div_ceil(coded_page) - if rng.one_in(6) { 1 } else { 0 },
            mean_rows,
            mean_pages: blocks.div_ceil(mean_rows),
            dtype: if has_rows { rng.pick(&[F16, BF16]) } else { rng.pick(&[F32, F16, BF16]) },
            mean_type: rng.pick(&[F32, F16, BF16]),
            has_weights: rng.one_in(2),
            has_begin: rng.one_in(2),
            layers: 1,
            has_rows,
            layout_seed: rng.int(0..=i64::MAX) as u64,
        }
    }
}

/// What the layers hold and share.
struct Model {
    spec: Spec,
    /// Keys and values [pages, P, Hk, D] of each layer, and weights.
    layers: Vec<[Array<f64>; 3]>,
    table: Array<i64>,
    coded_table: Array<i64>,
    mean_table: Array<i64>,
    lens: Vec<i64>,
    begin: Vec<i64>,
}

/// Distinct pages; some entries name none where `gaps`.
fn table(rng: &mut Rng, batch: usize, pages: usize, gaps: bool) -> Array<i64> {
    let mut order: Vec<i64> = (0..(batch * pages) as i64 + 2).collect();
    rng.shuffle(&mut order);
    Array::from_fn(&[batch, pages], |at| match gaps && rng.one_in(10) {
        true => rng.pick(&[-1, i32::MIN as i64, order.len() as i64]),
        false => order[at[0] * pages + at[1]],
    })
}

impl Model {
    fn random(rng: &mut Rng, spec: Spec, number: impl Fn(&mut Rng) -> f64) -> Model {
        let pages = spec.batch * spec.pages + 2;
        let layers = (0..spec.layers)
            .map(|_| {
                let rows = |rng: &mut Rng, dim| {
                    Array::from_fn(&[pages, spec.page, spec.kv_heads, dim], |_| spec.dtype.round(number(rng)))
                };
                let weight = |rng: &mut Rng| match rng.one_in(20) {
                    true => rng.pick(&[0.0, -2.0, f64::NAN, f64::INFINITY]),
                    false => F32.round(0.3 + rng.unit()),
                };
                let weights = Array::from_fn(&[spec.kv_heads, spec.dims[0]], |_| weight(rng));
                [rows(rng, spec.dims[0]), rows(rng, spec.dims[1]), weights]
            })
            .collect();
        let most = (spec.page * spec.pages) as i64;
        let some = |rng: &mut Rng, edges: &[i64]| if rng.one_in(3) { rng.pick(edges) } else { rng.int(0..=most) };
        Model {
            layers,
            table: table(rng, spec.batch, spec.pages, true),
            coded_table: table(rng, spec.batch, spec.coded_pages, true),
            mean_table: table(rng, spec.batch, spec.mean_pages, true),
            lens: (0..spec.batch).map(|_| some(rng, &[0, -1, most, most + 9])).collect(),
            begin: (0..spec.batch).map(|_| some(rng, &[0, -5, most + 100])).collect(),
            spec,
        }
    }

    fn tokens(&self, i: usize) -> usize {
        let Spec { page, pages, coded_page, coded_pages, .. } = self.spec;
        self.lens[i].clamp(0, (page * pages).min(coded_page * coded_pages) as i64) as usize
    }

    fn find(table: &Array<i64>, size: usize, i: usize, n: usize, pages: usize) -> Option<[usize; 2]> {
        let page = *table.row([i]).get(n / size)?;
        (0..pages as i64).contains(&page).then_some([page as usize, n % size])
    }

    /// Where token `t` lies, exact and coded.
    fn places(&self, i: usize, t: usize) -> Option<[[usize; 2]; 2]> {
        let spec = &self.spec;
        let pages = |pages| spec.batch * pages + 2;
        let exact = Model::find(&self.table, spec.page, i, t, pages(spec.pages))?;
        let coded = Model::find(&self.coded_table, spec.coded_page, i, t, pages(spec.coded_pages))?;
        Some([exact, coded])
    }

    fn mean_place(&self, i: usize, j: usize) -> Option<[usize; 2]> {
        Model::find(&self.mean_table, self.spec.mean_rows, i, j, self.spec.batch * self.spec.mean_pages + 2)
    }

    /// The blocks of sequence `i` that are coded.
    fn blocks(&self, i: usize) -> Vec<usize> {
        let Spec { block, exact, has_begin, .. } = self.spec;
        let begin = if has_begin { self.begin[i].max(0) as usize } else { 0 }.max(exact);
        let whole = |j: &usize| (j * block..(j + 1) * block).all(|t| self.places(i, t).is_some());
        (0..self.tokens(i) / block).filter(|j| j * block >= begin).filter(whole).collect()
    }

    fn weight(&self, layer: usize, g: usize, d: usize) -> f64 {
        let weight = if self.spec.has_weights { self.layers[layer][2][[g, d]] } else { 1.0 };
        if weight > 0.0 && weight.is_finite() { weight } else { 1.0 }
    }
}

/// A layer's tensors.
struct Placed<'b> {
    exact: [Tensor<'b>; 2],
    codes: [Tensor<'b>; 2],
    scales: [Tensor<'b>; 2],
    means: Tensor<'b>,
    weights: Tensor<'b>,
}

/// All tensors of a call.
struct Call<'b> {
    backend: &'b Backend,
    spec: Spec,
    layers: Vec<Placed<'b>>,
    table: Tensor<'b>,
    coded_table: Tensor<'b>,
    mean_table: Tensor<'b>,
    lens: Tensor<'b>,
    begin: Tensor<'b>,
    coded_lens: Tensor<'b>,
}

impl<'b> Call<'b> {
    fn new(backend: &'b Backend, model: &Model) -> Call<'b> {
        let spec = &model.spec;
        let rng = &mut Rng::new(spec.layout_seed);
        let ints = |rng: &mut Rng, values: &Array<i64>| {
            Tensor::ints(backend, I32, values, &Layout::random(rng, values.shape.len()))
        };
        let of_batch = |values: &[i64]| Array::new(&[values.len()], values.to_vec());
        // All layers have one layout.
        let mut layouts: Vec<Layout> = [4, 4, 4, 4, 3, 3, 4, 2].map(|rank| Layout::random(rng, rank)).to_vec();
        if spec.has_rows {
            layouts[..4].fill(Layout::default());
        }
        let coded = [spec.batch * spec.coded_pages + 2, spec.coded_page, spec.kv_heads];
        let layers = model.layers.iter().map(|[k, v, weights]| {
            let codes = |dim: usize, layout| Tensor::poisoned(backend, U8, &[&coded[..], &[dim / 2]].concat(), layout);
            let means = [spec.batch * spec.mean_pages + 2, spec.mean_rows, spec.kv_heads, spec.dims[0]];
            Placed {
                exact: [
                    Tensor::floats(backend, spec.dtype, k, &layouts[0]),
                    Tensor::floats(backend, spec.dtype, v, &layouts[1]),
                ],
                codes: [codes(spec.dims[0], &layouts[2]), codes(spec.dims[1], &layouts[3])],
                scales: [4, 5].map(|n| Tensor::poisoned(backend, F8E4M3, &coded, &layouts[n])),
                means: Tensor::poisoned(backend, spec.mean_type, &means, &layouts[6]),
                weights: Tensor::floats(backend, F32, weights, &layouts[7]),
            }
        });
        Call {
            layers: layers.collect(),
            table: ints(rng, &model.table),
            coded_table: ints(rng, &model.coded_table),
            mean_table: ints(rng, &model.mean_table),
            lens: ints(rng, &of_batch(&model.lens)),
            begin: ints(rng, &of_batch(&model.begin)),
            coded_lens: Tensor::poisoned(backend, I32, &[spec.batch], &Layout::random(rng, 1)),
            spec: spec.clone(),
            backend,
        }
    }

    fn layer(&self, n: usize) -> *const vwd_paged_kv {
        let (spec, layer) = (&self.spec, &self.layers[n]);
        let int4 = vwd_int4_kv {
            block_size: spec.block as u32,
            exact_tokens: spec.exact as u32,
            k: layer.codes[0].c(),
            v: layer.codes[1].c(),
            k_scale: layer.scales[0].c(),
            v_scale: layer.scales[1].c(),
            page_table: self.coded_table.c(),
            coded_lens: self.coded_lens.c(),
            means: layer.means.c(),
            mean_table: self.mean_table.c(),
            weights: if spec.has_weights { layer.weights.c() } else { absent() },
            ..args()
        };
        kept(vwd_paged_kv {
            k: layer.exact[0].c(),
            v: layer.exact[1].c(),
            page_table: self.table.c(),
            seq_lens: self.lens.c(),
            int4: kept(int4),
            ..args()
        })
    }

    /// Codes some layers.
    fn quantize(&self, layers: std::ops::Range<usize>, begin: Option<&Tensor>) {
        let layers: Vec<*const vwd_paged_kv> = layers.map(|n| self.layer(n)).collect();
        let call = vwd_kv_quantize_args {
            layer_count: layers.len() as u32,
            layers: layers.as_ptr(),
            begin: begin.map_or(absent(), Tensor::c),
            ..args()
        };
        // SAFETY: the tensors of the call are alive.
        self.backend.finish(unsafe { vwd_kv_quantize(self.backend.session(), &call, self.backend.stream()) });
    }

    fn run(&self) {
        self.quantize(0..self.spec.layers, self.spec.has_begin.then_some(&self.begin));
    }

    /// All that is written, gaps included.
    fn bits(&self) -> Vec<Vec<u8>> {
        let of_layers =
            self.layers.iter().flat_map(|layer| layer.codes.iter().chain(&layer.scales).chain([&layer.means]));
        of_layers.chain([&self.coded_lens]).map(Tensor::read_memory).collect()
    }

    /// To the bit what the CPU writes.
    fn assert_is_what_the_cpu_writes(&self, model: &Model) {
        if self.backend.is_cuda() {
            let cpu = Backend::cpu(1);
            let call = Call::new(&cpu, model);
            call.run();
            assert!(self.bits() == call.bits(), "CUDA and the CPU differ: {:?}", model.spec);
        }
    }

    /// Checks layer `n` against the formula.
    fn check(&self, model: &Model, n: usize) {
        let (spec, layer) = (&model.spec, &self.layers[n]);
        let codes = layer.codes.each_ref().map(Tensor::read_ints);
        let scales = layer.scales.each_ref().map(Tensor::read_floats);
        let means = layer.means.read_floats();
        let (mut coded, mut of_means) = (vec![], vec![]);
        for i in 0..spec.batch {
            for j in model.blocks(i) {
                let places: Vec<_> =
                    (j * spec.block..(j + 1) * spec.block).map(|t| model.places(i, t).unwrap()).collect();
                for g in 0..spec.kv_heads {
                    let key = |[page, at]: [usize; 2], d| model.layers[n][0][[page, at, g, d]];
                    let mean_place = model.mean_place(i, j);
                    let mean: Vec<f64> = (0..spec.dims[0])
                        .map(|d| {
                            let Some([page, row]) = mean_place else { return 0.0 };
                            let found = means[[page, row, g, d]];
                            let keys = places.iter().map(|place| key(place[0], d));
                            let (want, size) = keys.fold((0.0, 0.0), |(sum, size), k| (sum + k, size + k.abs()));
                            let want = want / spec.block as f64;
                            // Each of the additions may be off by half an ulp of what is summed.
                            let rounding = size * F32.epsilon() + spec.mean_type.rounding(want);
                            let same = found == want || found.is_nan() && want.is_nan();
                            assert!(same || (found - want).abs() <= rounding, "mean {found}, not {want}: {spec:?}");
                            found
                        })
                        .collect();
                    of_means.extend(mean_place.map(|[page, row]| [page, row, g]));
                    for [exact, [page, at]] in &places {
                        let (exact, at) = ([exact[0], exact[1], g], [*page, *at, g]);
                        let weighted = |d| (key([exact[0], exact[1]], d) - mean[d]) / model.weight(n, g, d);
                        let y = rotated(&(0..spec.dims[0]).map(weighted).collect::<Vec<f64>>());
                        check_row(&y, scales[0][at], &unpacked(codes[0].row(at)), spec);
                        let y = rotated(model.layers[n][1].row(exact));
                        check_row(&y, scales[1][at], &unpacked(codes[1].row(at)), spec);
                        coded.push(at);
                    }
                }
            }
            let want = model.tokens(i) / spec.block * spec.block;
            assert_eq!(self.coded_lens.read_ints()[[i]], want as i64, "coded_lens[{i}] of {spec:?}");
        }
        for t in layer.codes.iter().chain(&layer.scales) {
            t.assert_written("codes", |at| coded.contains(&[at[0], at[1], at[2]]));
        }
        layer.means.assert_written("means", |at| of_means.contains(&[at[0], at[1], at[2]]));
        layer.exact.iter().for_each(|t| t.assert_untouched("exact"));
    }
}

fn unpacked(bytes: &[i64]) -> Vec<i64> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
}

/// A row of codes is that of `y`, but where float32 may round to either side.
fn check_row(y: &[f64], scale: f64, codes: &[i64], spec: &Spec) {
    let most = y.iter().fold(0.0, |most: f64, y| if y.is_finite() { most.max(y.abs()) } else { f64::INFINITY });
    // Float32 adds up D numbers of the size of the largest, in at most nine steps.
    let off = 16.0 * F32.epsilon() * most * (spec.dims[0] as f64).sqrt();
    if !(most + off).is_finite() {
        assert!(scale.is_nan() && codes.iter().all(|&code| code == 0), "scale {scale} of a row that is not finite");
        return;
    }
    let of = |most: f64| F8E4M3.round(most / 7.5).max(if most > 0.0 { 2f64.powi(-9) } else { 0.0 });
    let [low, high] = [of((most - off).max(0.0)), of(most + off)];
    assert!(low <= scale && scale <= high, "scale {scale} of {most}, not {low} … {high}: {spec:?}");
    for (&y, &code) in y.iter().zip(codes) {
        let at = |y: f64| if scale == 0.0 { 8 } else { (y / scale).floor().clamp(-8.0, 7.0) as i64 + 8 };
        let slack = off + 2.0 * F32.epsilon() * y.abs();
        assert!((at(y - slack)..=at(y + slack)).contains(&code), "code {code} of {y} at scale {scale}: {spec:?}");
    }
}

fn agrees(backend: &Backend, model: &Model) {
    let call = Call::new(backend, model);
    call.run();
    (0..model.spec.layers).for_each(|n| call.check(model, n));
    call.assert_is_what_the_cpu_writes(model);
}

fn quantize_codes_whole_blocks_as_the_formula_says(backend: &Backend) {
    rounds(20, |rng| {
        let spec = Spec::random(rng);
        agrees(backend, &Model::random(rng, spec, Rng::normal));
    });
}

/// One large channel, numbers of all sizes, and some that are no numbers.
fn quantize_of_hostile_numbers_follows_the_contract(backend: &Backend) {
    rounds(20, |rng| {
        let spec = Spec::random(rng);
        let (rare, largest) = (rng.pick(&[30, 2000]), rng.pick(&[1e3, 6e4]));
        let number = |rng: &mut Rng| match rng.one_in(rare) {
            true => rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, largest, -largest, 0.0, 1e-30]),
            false => rng.normal() * rng.pick(&[1.0, 1e-4, 100.0]),
        };
        agrees(backend, &Model::random(rng, spec, number));
        let spec = Spec::random(rng);
        let mut model = Model::random(rng, spec, |rng| 1e-3 * rng.normal());
        for row in model.layers[0][0].data.chunks_mut(model.spec.dims[0]) {
            row[5] = model.spec.dtype.round(largest);
        }
        agrees(backend, &model);
    });
}

/// Weights and keys so small or so large that their reciprocals, or what is left of a quotient, are no normal numbers.
fn quantize_divides_by_weights_of_any_size(backend: &Backend) {
    rounds(20, |rng| {
        let (dims, mean_type) = ([rng.pick(&[64, 128]); 2], rng.pick(&[F32, BF16]));
        let spec =
            Spec { has_weights: true, has_rows: true, dims, dtype: BF16, mean_type, exact: 0, ..Spec::random(rng) };
        let [of_keys, of_weights] =
            rng.pick(&[[1e-38, 1e-38], [1e-38, 1e-40], [1e-30, 1e-32], [1.0, 1e-30], [1e30, 1e35], [1e36, 1e38]]);
        let mut model = Model::random(rng, spec, |rng| of_keys * rng.normal());
        let rare = rng.pick(&[1, 100]);
        for weight in &mut model.layers[0][2].data {
            *weight = F32.round(if rng.one_in(rare) { of_weights * (0.3 + rng.unit()) } else { 0.3 + rng.unit() });
        }
        match of_keys < 1e-37 {
            // Means of so small keys have few bits, for which the formula's tolerance is too small.
            true => {
                let call = Call::new(backend, &model);
                call.run();
                call.assert_is_what_the_cpu_writes(&model);
            }
            false => agrees(backend, &model),
        }
    });
}

/// Zeros and constant keys have residuals of 0, whose scale is 0.
fn quantize_of_constant_and_empty_blocks_is_exact(backend: &Backend) {
    let rng = &mut Rng::new(3);
    for value in [0.0, 1.5, -0.25] {
        let mut checked = 0;
        for _ in 0..2 {
            let spec = Spec { has_weights: false, exact: 0, has_begin: false, ..Spec::random(rng) };
            let model = Model::random(rng, Spec { dtype: F32, mean_type: F32, ..spec }, |_| value);
            let call = Call::new(backend, &model);
            call.run();
            call.check(&model, 0);
            let scales = call.layers[0].scales[0].read_floats();
            for (i, j) in (0..model.spec.batch).flat_map(|i| model.blocks(i).into_iter().map(move |j| (i, j))) {
                let tokens = j * model.spec.block..(j + 1) * model.spec.block;
                if model.mean_place(i, j).is_none() {
                    continue;
                }
                for ([_, [page, at]], g) in tokens
                    .map(|t| model.places(i, t).expect("a coded token"))
                    .flat_map(|places| (0..model.spec.kv_heads).map(move |g| (places, g)))
                {
                    assert_eq!(scales[[page, at, g]], 0.0, "of keys of {value}, head {g}");
                }
                checked += (model.spec.kv_heads > 1) as usize;
            }
        }
        assert!(checked > 0, "no block of keys of {value} and of several heads was coded");
    }
}

/// Block after block, in calls with a begin, and all at once.
fn quantize_in_any_order_gives_the_same_bits(backend: &Backend) {
    rounds(10, |rng| {
        let spec = Spec { has_begin: false, ..Spec::random(rng) };
        let model = Model::random(rng, spec, Rng::normal);
        let at_once = Call::new(backend, &model);
        at_once.run();
        let stepwise = Call::new(backend, &model);
        let most = model.lens.iter().copied().max().unwrap_or(0).max(0);
        for step in (0..=most / model.spec.block as i64).rev() {
            let begin = Array::filled(&[model.spec.batch], step * model.spec.block as i64 - 3);
            stepwise.quantize(0..1, Some(&Tensor::ints(backend, I32, &begin, &Layout::default())));
        }
        assert!(at_once.bits() == stepwise.bits(), "{:?}", model.spec);
    });
}

fn quantize_of_many_layers_is_quantize_of_each(backend: &Backend) {
    rounds(6, |rng| {
        let layers = rng.pick(&[2, 3, 40, 48]);
        let spec = Spec { layers, batch: 1, kv_heads: 1, ..Spec::random(rng) };
        let model = Model::random(rng, spec, Rng::normal);
        let together = Call::new(backend, &model);
        together.run();
        let alone = Call::new(backend, &model);
        (0..layers).for_each(|n| alone.quantize(n..n + 1, model.spec.has_begin.then_some(&alone.begin)));
        assert!(together.bits() == alone.bits(), "{:?}", model.spec);
        together.assert_is_what_the_cpu_writes(&model);
    });
}

// --- weights ---------------------------------------------------------------------------------------------------------

/// weights [Hk, D] of q [Tq, Hq, D] and k [Tk, Hk, D].
fn weights_of(q: &Array<f64>, k: &Array<f64>, block: usize) -> Array<f64> {
    let (heads, dim, group) = (k.shape[1], k.shape[2], q.shape[1] / k.shape[1]);
    let root = |g: usize, d: usize| {
        let keys: Vec<f64> = (0..k.shape[0]).map(|t| k[[t, g, d]]).collect();
        let square = keys.chunks(block).map(|keys| {
            let mean = keys.iter().sum::<f64>() / keys.len() as f64;
            keys.iter().map(|k| (k - mean).powi(2)).sum::<f64>()
        });
        let spread = (square.sum::<f64>() / keys.len() as f64).sqrt();
        let queries = (0..q.shape[0]).flat_map(|t| (0..group).map(move |h| (t, h)));
        let size = queries.map(|(t, h)| q[[t, g * group + h, d]].abs()).sum::<f64>() / (q.shape[0] * group) as f64;
        Some((spread / size).sqrt()).filter(|weight| *weight > 0.0 && weight.is_finite())
    };
    let mut weights = Array::filled(&[heads, dim], 1.0);
    for g in 0..heads {
        let roots: Vec<_> = (0..dim).map(|d| root(g, d)).collect();
        let mean = roots.iter().flatten().sum::<f64>() / roots.iter().flatten().count() as f64;
        (0..dim).for_each(|d| weights[[g, d]] = roots[d].map_or(1.0, |root| root / mean));
    }
    weights
}

/// Calls it, and on CUDA compares the bits with the CPU's.
fn call_weights(backend: &Backend, rng: &mut Rng, dtype: DType, [q, k]: [&Array<f64>; 2], block: usize) -> Array<f64> {
    let seed = rng.int(0..=i64::MAX) as u64;
    let call = |backend: &Backend| {
        let rng = &mut Rng::new(seed);
        let place =
            |rng: &mut Rng, values: &Array<f64>| Tensor::floats(backend, dtype, values, &Layout::random(rng, 3));
        let (q, k) = (place(rng, q), place(rng, k));
        let weights = Tensor::poisoned(backend, F32, &k.shape[1..], &Layout::random(rng, 2));
        let call = vwd_kv_weights_args { block_size: block as u32, q: q.c(), k: k.c(), weights: weights.c(), ..args() };
        // SAFETY: the tensors of the call are alive.
        backend.finish(unsafe { vwd_kv_weights(backend.session(), &call, backend.stream()) });
        weights.assert_written("weights", |_| true);
        (weights.read_floats(), weights.read_memory())
    };
    let (weights, bits) = call(backend);
    if backend.is_cuda() {
        assert!(bits == call(&Backend::cpu(1)).1, "CUDA and the CPU differ");
    }
    weights
}

fn weights_are_roots_of_spread_over_query_size(backend: &Backend) {
    rounds(20, |rng| {
        let (dtype, block) = (rng.pick(&[F32, F16, BF16]), rng.pick(&[1, 2, 16, 64, 1000]));
        let (heads, group, dim) = (rng.size(1..=3), rng.size(1..=4), rng.pick(&[16, 24, 64, 128, 256, 576]));
        let mut samples = |heads: usize| {
            let sizes: Vec<f64> = (0..dim).map(|_| rng.pick(&[0.1, 1.0, 1.0, 8.0])).collect();
            let shape = [rng.size(3..=200), heads, dim];
            Array::from_fn(&shape, |at| dtype.round(sizes[at[2]] * rng.normal()))
        };
        let (q, mut k) = (samples(heads * group), samples(heads));
        // A channel without spread has weight 1.
        (0..k.shape[0]).for_each(|t| k[[t, 0, 3]] = 0.0);
        let found = call_weights(backend, rng, dtype, [&q, &k], block);
        for (found, want) in found.data.iter().zip(weights_of(&q, &k, block).data) {
            // Some hundred additions of float32 numbers of one sign, and where blocks are small differences.
            assert!((found - want).abs() <= 1e-4 * want.abs(), "{found}, not {want}: {dtype:?}, blocks of {block}");
        }
    });
}

fn weights_of_samples_without_numbers_are_one(backend: &Backend) {
    let rng = &mut Rng::new(1);
    for (queries, keys) in [(0, 5), (5, 0), (0, 0), (5, 5)] {
        let bad = |value: f64| move |_: &[usize]| value;
        let q = Array::from_fn(&[queries, 4, 64], bad(f64::NAN));
        let k = Array::from_fn(&[keys, 2, 64], bad(f64::INFINITY));
        let found = call_weights(backend, rng, F32, [&q, &k], 16);
        assert!(found.data.iter().all(|&weight| weight == 1.0), "{queries} queries, {keys} keys");
    }
}
