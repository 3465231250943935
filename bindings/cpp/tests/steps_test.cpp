// Caches, decoders, and what predicts for them: every call once through the header, on numbers that can be checked by hand.
#include "sequence.hpp"

#include <algorithm>
#include <string>

static void tiered_cache(const vw::Session &session) {
  auto options = vw::make<vwd_kv_cache_options>();
  options.layers = options.kv_heads = 1;
  options.block_size = 2;
  options.key_dim = options.value_dim = 16;
  options.dtype_code = 2;
  options.dtype_bits = 32;
  options.max_sequences = 2;
  options.max_blocks = options.host_blocks = 4;
  options.slots = 4;
  const auto cache = vw::KvCache::create(session, options);
  const std::uint32_t sequence = cache.add();
  cache.extend(sequence, 8);
  Floats rows(8 * 16);
  for (std::size_t n = 0; n < rows.size(); ++n) rows[n] = static_cast<float>(n / 16);
  Ints sequences = {static_cast<std::int32_t>(sequence)}, begin = {0};
  auto append = vw::make<vwd_kv_cache_append_args>();
  append.sequences = vw::tensor(sequences);
  append.begin = vw::tensor(begin);
  append.k = append.v = vw::tensor(rows, {1, 8, 1, 16});
  cache.append(append);

  Ints ids = {0, 3}, counts = {2}, slots(2), missed(1);
  auto resolve = vw::make<vwd_kv_cache_resolve_args>();
  resolve.sequences = vw::tensor(sequences);
  resolve.wanted = list(ids, counts);
  resolve.wanted.slots = vw::tensor(slots, {1, 1, 2});
  resolve.missed_counts = vw::tensor(missed, {1, 1});
  cache.resolve(resolve);
  CHECK(missed[0] == 1);  // the last block is in the tail
  cache.fetch(0);
  cache.wait(0);
  const vwd_kv_cache_layer view = cache.view(0);
  const auto *keys = static_cast<const float *>(view.k.data);
  CHECK(keys[slots[0] * view.k.strides[0]] == 0 && keys[slots[1] * view.k.strides[0]] == 6);

  const std::uint32_t fork = cache.fork(sequence, 6);
  cache.truncate(sequence, 2);
  CHECK(cache.info().sequences == 2 && cache.info().blocks_in_use == 3 && cache.info().misses == 1);
  CHECK(cache.info().host_bytes == vw::KvCache::capacity(options).host_bytes);
  cache.free(fork);

  CHECK(cache.layer_info(0).misses == 1);
  const std::uint32_t slots_of[] = {100, 100};
  const std::uint64_t misses[] = {399, 99};
  std::uint32_t shares[2] = {};
  auto share = vw::make<vwd_kv_cache_share_args>();
  share.layers = 2;
  share.least = 1;
  share.total = 300;
  share.slots = slots_of;
  share.misses = misses;
  share.shares = shares;
  vw::KvCache::share_slots(share);
  CHECK(shares[0] == 200 && shares[1] == 100);
  options.layers = 2;
  options.slots = 0;
  options.layer_slots = shares;
  const auto shared = vw::KvCache::create(session, options);
  CHECK(shared.view(0).k.shape[0] == shared.view(1).k.shape[0] + 100);

  options.layers = 1;
  options.slots = 4;
  options.layer_slots = nullptr;
  options.block_size = 16;
  options.key_dim = options.value_dim = 64;
  options.coding = VWD_CODING_INT4;
  const auto in_int4 = vw::KvCache::create(session, options);
  const vwd_kv_cache_layer coded = in_int4.view(0);
  CHECK(coded.int4_k.shape[0] == 4 && coded.int4_k.shape[3] == 32 && coded.weights.data == nullptr);
  CHECK(coded.k.shape[0] == 4 * std::int64_t(options.max_sequences * options.kv_heads));
  options.slot_coding = VWD_SLOTS_DECODED;
  const auto in_decoded_slots = vw::KvCache::create(session, options);
  const vwd_kv_cache_layer decoded = in_decoded_slots.view(0);
  CHECK(decoded.int4_k.data == nullptr && decoded.k.shape[0] == coded.k.shape[0] + 4);
  CHECK(vw::KvCache::capacity(options).slot_bytes > vw::KvCache::capacity(options).run_bytes);
}

static void decoder_on_a_cache(const vw::Session &session) {
  constexpr std::int32_t tokens = 40;
  for (const std::uint32_t strategy : {VWD_STRATEGY_SERIAL, VWD_STRATEGY_VANWARD}) {
    auto sizes = vw::make<vwd_kv_cache_options>();
    sizes.layers = sizes.kv_heads = 1;
    sizes.max_sequences = 2;
    sizes.block_size = 8;
    sizes.key_dim = sizes.value_dim = 16;
    sizes.dtype_code = 2;
    sizes.dtype_bits = 32;
    sizes.max_blocks = sizes.host_blocks = 5;
    sizes.slots = 14;
    const auto cache = vw::KvCache::create(session, sizes);
    auto options = vw::make<vwd_decoder_options>();
    options.layers = options.max_rows = options.query_heads = options.kv_heads = 1;
    options.block_size = 8;
    options.key_dim = options.value_dim = 16;
    options.dtype_code = 2;
    options.dtype_bits = 32;
    options.policy.method = VWD_SELECT_MINMAX;
    options.policy.k = 5;
    options.policy.strategy = strategy;
    const auto decoder = vw::Decoder::create(session, options, cache);
    const std::uint32_t sequence = cache.add();
    cache.extend(sequence, tokens);
    Ints sequences = {static_cast<std::int32_t>(sequence)};
    std::int32_t fetched = 0;
    for (std::int32_t t = 0; t < tokens; ++t) {
      // A fork takes the whole blocks out of the tail.
      if (t == 16) cache.free(cache.fork(sequence, 16));
      Ints lens = {t + 1};
      Floats zeros(16), value(16, static_cast<float>(t)), out(16, -1);
      auto step = vw::make<vwd_decoder_step>();
      step.seq_lens = vw::tensor(lens);
      step.sequences = vw::tensor(sequences);
      decoder.begin(step);
      auto attend = vw::make<vwd_decoder_attend_args>();
      attend.new_k = attend.q = vw::tensor(zeros, {1, 1, 16});
      attend.new_v = vw::tensor(value, {1, 1, 16});
      attend.out = vw::tensor(out, {1, 1, 16});
      decoder.attend(attend);
      // Every block is in the list, and every score alike: the mean of the values.
      CHECK(near(out[0], static_cast<float>(t) / 2, 1e-4f));
      fetched += *static_cast<const std::int32_t *>(decoder.info().fetched.data);
    }
    CHECK(fetched > 0);
  }
}

// Keys grow with the token, and values are its number. The list that is made ahead has the block of the new token, the one before it, and the newest or
// the oldest of the others, as the query says that selects; a query of zeros gives the mean of their tokens.
static void decoder_foresees_accepts_and_resets(const vw::Session &session) {
  constexpr std::size_t tokens = 16, dim = 16;
  Floats k(tokens * dim), v(tokens * dim), zeros(dim), ahead(dim), new_k(dim), new_v(dim), out(dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    k[t * dim] = static_cast<float>(t);
    std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(t * dim), dim, static_cast<float>(t));
  }
  auto options = vw::make<vwd_decoder_options>();
  options.layers = options.max_rows = options.query_heads = options.kv_heads = 1;
  options.max_positions = 3;
  options.max_sequences = 2;
  options.key_dim = options.value_dim = dim;
  options.dtype_code = 2;
  options.dtype_bits = 32;
  options.page_size = options.block_size = options.pages = 4;
  options.policy.method = VWD_SELECT_MINMAX;
  options.policy.k = 2;
  options.policy.ratio = 1;
  options.policy.strategy = VWD_STRATEGY_FORESEEN;
  const auto decoder = vw::Decoder::create(session, options);
  Ints lens(1), table = {0, 1, 2, 3}, begin = {0};
  auto step = vw::make<vwd_decoder_step>();
  step.seq_lens = vw::tensor(lens);
  step.page_table = vw::tensor(table, {1, 4});
  auto attend = vw::make<vwd_decoder_attend_args>();
  attend.k = vw::tensor(k, {4, 4, 1, dim});
  attend.v = vw::tensor(v, {4, 4, 1, dim});
  attend.new_k = vw::tensor(new_k, {1, 1, dim});
  attend.new_v = vw::tensor(new_v, {1, 1, dim});
  attend.q = vw::tensor(zeros, {1, 1, dim});
  attend.out = vw::tensor(out, {1, 1, dim});
  auto foresee = vw::make<vwd_decoder_foresee_args>();
  foresee.q = vw::tensor(ahead, {1, 1, dim});
  // The prompt, of which the decoder writes the last token; then the token of a new block, twice.
  const struct {
    std::int32_t tokens;
    float towards, mean;
  } steps[] = {{12, 0, 0},
               {13, 1, (4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12) / 9.0f},
               {13, -1, (0 + 1 + 2 + 3 + 8 + 9 + 10 + 11 + 12) / 9.0f}};
  for (const auto &[length, towards, mean] : steps) {
    lens[0] = length;
    step.begin = towards == 0 ? vw::tensor(begin) : vwd_tensor{};
    ahead[0] = towards;
    new_k[0] = static_cast<float>(length - 1);
    std::fill(new_v.begin(), new_v.end(), new_k[0]);
    decoder.begin(step);
    decoder.foresee(foresee);
    decoder.attend(attend);
    if (towards == 0) continue;
    CHECK(all_near(out, mean, 1e-5));
    CHECK(*static_cast<const std::int32_t *>(decoder.info().predicted.data) == 3);
  }

  const Ints draft = {5, 6}, target = {5, 7, 8}, sequence = {1};
  Ints accepted(1), next(1), committed(3);
  auto accept = vw::make<vwd_decoder_accept_args>();
  accept.draft = vw::tensor(draft, {1, 2});
  accept.target = vw::tensor(target, {1, 3});
  accept.sequences = vw::tensor(sequence);
  accept.accepted = vw::tensor(accepted);
  accept.next_token = vw::tensor(next);
  accept.committed = vw::tensor(committed, {1, 3});
  decoder.accept(accept);
  CHECK(accepted[0] == 1 && next[0] == 7 && (committed == Ints{5, 7, -1}));
  const auto *drafted = static_cast<const std::int32_t *>(decoder.info().drafted.data);
  CHECK(drafted[0] == 0 && drafted[1] == 2);
  CHECK(static_cast<const std::int32_t *>(decoder.info().accepted.data)[1] == 1);
  auto reset = vw::make<vwd_decoder_reset_args>();
  reset.sequences = vw::tensor(sequence);
  decoder.reset(reset);
  CHECK(drafted[1] == 0);
}

static void predict_update_calibrate(const vw::Session &session) {
  Floats level(3, 9), trend(3, 9), scores = {3, 1, 2};
  Ints lens = {6}, ids(2), count(1);
  const vwd_predictor_state state = {vw::tensor(level, {1, 1, 3}), vw::tensor(trend, {1, 1, 3})};
  auto reset = vw::make<vwd_predictor_reset_args>();
  reset.state = state;
  session.predictor_reset(reset);
  CHECK(level[0] == -INFINITY && trend[0] == 0);

  auto update = vw::make<vwd_predictor_update_args>();
  update.block_size = 2;
  update.holt = {1, 0, 0};
  update.state = state;
  update.seq_lens = vw::tensor(lens);
  update.scores = vw::tensor(scores, {1, 1, 3});
  session.predictor_update(update);
  CHECK((level == Floats{3, 1, 2}));

  auto predict = vw::make<vwd_predictor_predict_args>();
  predict.block_size = 2;
  predict.k = 2;
  predict.state = state;
  predict.seq_lens = vw::tensor(lens);
  predict.predicted = list(ids, count);
  session.predictor_predict(predict);
  CHECK(count[0] == 2 && (ids == Ints{0, 2}));

  // The same scores at each of three steps: what was best stays best.
  Floats history = {3, 1, 2, 3, 1, 2, 3, 1, 2};
  Ints block_counts = {3, 3, 3};
  auto calibrate = vw::make<vwd_predictor_calibrate_args>();
  calibrate.k = 2;
  calibrate.scores = vw::tensor(history, {1, 3, 1, 3});
  calibrate.block_counts = vw::tensor(block_counts, {1, 3});
  const vw::Calibration best = session.predictor_calibrate(calibrate);
  CHECK(near(best.hit_rate, 1, 1e-6) && best.holt.alpha > 0);
}

static void forecast(const vw::Session &session) {
  // x_i is the i-th unit vector and q_i is i + 1 throughout; a linear map fits that up to the ridge of one in a
  // thousand.
  constexpr int n = 16;
  Floats x(n * n), q(n * n), found(n * n);
  for (int i = 0; i < n; ++i) {
    x[i * n + i] = 1;
    std::fill_n(q.begin() + i * n, n, static_cast<float>(i + 1));
  }
  auto options = vw::make<vwd_forecast_options>();
  options.layers = 1;
  options.input_dim = n;
  options.q_heads = 1;
  options.head_dim = n;
  auto fitted = vw::Forecast::create(session, options);
  auto sums = vw::make<vwd_forecast_accumulate_args>();
  sums.x = vw::tensor(x, {n, n});
  sums.q = vw::tensor(q, {n, 1, n});
  fitted.accumulate(sums);
  fitted.solve();
  CHECK(fitted.info().solved == 1 && fitted.info().input_dim == n);
  const std::string path = "steps_test.safetensors";
  fitted.save(path);
  const auto loaded = vw::Forecast::load(session, path);
  std::remove(path.c_str());

  Ints positions(n);
  auto project = vw::make<vwd_forecast_project_args>();
  project.x = vw::tensor(x, {n, n});
  project.positions = vw::tensor(positions);  // position 0 does not rotate
  project.q = vw::tensor(found, {n, 1, n});
  for (const vw::Forecast *maps : {static_cast<const vw::Forecast *>(&fitted), &loaded}) {
    found.assign(n * n, 0);
    maps->project(project);
    for (int i = 0; i < n * n; ++i) CHECK(near(found[i], q[i], 0.02));  // 1e-3 of 16, and rounding
  }
}

static void budget(const vw::Session &session) {
  auto options = vw::make<vwd_budget_options>();
  options.query_heads = 2;
  options.kv_heads = 1;
  options.key_dim = 16;
  options.value_dim = 16;
  options.dtype_code = 2;  // float32
  options.dtype_bits = 32;
  options.page_size = 4;
  options.block_size = 4;
  options.method = VWD_SELECT_MINMAX;
  options.k = 2;
  options.max_draft = 2;
  options.contexts[0] = 8;
  options.contexts[1] = 32;
  options.batches[0] = 1;
  options.samples = 1;
  options.limit_bytes = 1 << 18;
  const auto measured = vw::Budget::profile(session, options);
  const std::string path = "steps_test_budget.safetensors";
  measured.save(path);
  const auto loaded = vw::Budget::load(session, options, path);
  std::remove(path.c_str());
  auto question = vw::make<vwd_budget_question>();
  question.context = 20;
  question.acceptance = 0.9f;
  const vwd_budget_answer a = measured.ask(question), b = loaded.ask(question);
  CHECK(a.dense_us > 0 && a.self_gain > 0 && a.extrapolated == 0);
  CHECK(near(a.dense_us, b.dense_us, 0) && near(a.self_gain, b.self_gain, 0));

  auto layers = vw::make<vwd_decoder_options>();
  layers.layers = 2;
  layers.max_rows = layers.kv_heads = 1;
  layers.query_heads = 2;
  layers.key_dim = layers.value_dim = 16;
  layers.dtype_code = 2;
  layers.dtype_bits = 32;
  layers.page_size = layers.block_size = layers.pages = 4;
  layers.policy.method = VWD_SELECT_MINMAX;
  layers.policy.k = 2;
  layers.policy.strategy = VWD_STRATEGY_FORESEEN;
  layers.budget = loaded.get();
  const auto decoder = vw::Decoder::create(session, layers);
  std::vector<std::int32_t> length = {4};
  auto step = vw::make<vwd_decoder_step>();
  step.seq_lens = vw::tensor(length);
  step.longest = 4;
  decoder.begin(step);
  CHECK(decoder.info().fallback_layers <= 2 && decoder.info().fallbacks == decoder.info().fallback_layers);
}

int main() {
  return run({
      tiered_cache,
      decoder_on_a_cache,
      decoder_foresees_accepts_and_resets,
      predict_update_calibrate,
      forecast,
      budget,
  });
}
