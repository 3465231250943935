// Every call once through the header, on numbers that can be checked by hand; steps_test.cpp has those of caches, decoders, and what predicts for
// them.
#include "sequence.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

static void verify_and_pack(const vw::Session &session) {
  Ints draft = {5, 6, 7, 1, 9, 3}, target = {5, 6, 7, 8, 1, 2, 3, 4};
  Ints accepted(2), next(2), committed(8), offsets(3);
  std::vector<std::uint8_t> mismatch(2);
  auto verify = vw::make<vwd_verify_args>();
  verify.draft = vw::tensor(draft, {2, 3});
  verify.target = vw::tensor(target, {2, 4});
  verify.accepted = vw::tensor(accepted);
  verify.next_token = vw::tensor(next);
  verify.mismatch = vw::tensor(mismatch);
  verify.committed = vw::tensor(committed, {2, 4});
  session.verify(verify);
  CHECK((accepted == Ints{3, 1}) && (next == Ints{8, 2}) && mismatch[0] == 0 && mismatch[1] == 1);
  CHECK((committed == Ints{5, 6, 7, 8, 1, 2, -1, -1}));

  const Floats rows = {10, 11, 12, 20, 21, 22};
  Floats packed(5, -1);
  const vwd_tensor from = vw::tensor(rows, {2, 3}), to = vw::tensor(packed);
  auto pack = vw::make<vwd_pack_args>();
  pack.tensor_count = 1;
  pack.rows = &from;
  pack.packed = &to;
  pack.accepted = vw::tensor(accepted);
  pack.offsets = vw::tensor(offsets);
  session.pack(pack);
  CHECK((packed == Floats{10, 11, 12, 20, -1}) && (offsets == Ints{0, 3, 4}));

  packed.assign(5, -1);
  accepted.assign(2, -1);
  auto both = vw::make<vwd_verify_pack_args>();
  both.tensor_count = 1;
  both.rows = &from;
  both.packed = &to;
  both.draft = verify.draft;
  both.target = verify.target;
  both.accepted = verify.accepted;
  both.next_token = verify.next_token;
  both.offsets = pack.offsets;
  session.verify_pack(both);
  CHECK((packed == Floats{10, 11, 12, 20, -1}) && (accepted == Ints{3, 1}));

  // A stop token ends the first request, its length the second.
  packed.assign(5, -1);
  const Ints stop = {6}, remaining = {9, 1};
  Ints length(2);
  std::vector<std::uint8_t> finish(2);
  both.stop = vw::tensor(stop);
  both.remaining = vw::tensor(remaining);
  both.committed_len = vw::tensor(length);
  both.finish = vw::tensor(finish);
  session.verify_pack(both);
  CHECK((packed == Floats{10, 11, 20, -1, -1}) && (accepted == Ints{2, 1}) && (next == Ints{-1, -1}));
  CHECK((length == Ints{2, 1}) && finish[0] == VWD_FINISH_STOP && finish[1] == VWD_FINISH_LENGTH);

  // Drafts of two tokens and of one, one after the other.
  const Ints flat_draft = {5, 6, 7}, flat_target = {5, 6, 8}, ends = {2, 3}, bonus = {20, 21};
  auto flat = vw::make<vwd_verify_args>();
  flat.draft = vw::tensor(flat_draft);
  flat.target = vw::tensor(flat_target);
  flat.draft_ends = vw::tensor(ends);
  flat.bonus = vw::tensor(bonus);
  flat.accepted = vw::tensor(accepted);
  flat.next_token = vw::tensor(next);
  session.verify(flat);
  CHECK((accepted == Ints{2, 0}) && (next == Ints{20, 8}));
}

static void verify_sampled(const vw::Session &session) {
  // A token of each row has all mass: 2, then 1, then 1.
  const Floats target = {-1000, -1000, 0, -1000, 0, -1000, -1000, 0, -1000};
  Ints draft = {2, 0}, next(1), accepted(1), committed(3);
  std::vector<std::int64_t> seed = {7}, position = {0};
  auto args = vw::make<vwd_verify_sample_args>();
  args.draft = vw::tensor(draft, {1, 2});
  args.target = vw::tensor(target, {1, 3, 3});
  args.seeds = vw::tensor(seed);
  args.positions = vw::tensor(position);
  args.next_token = vw::tensor(next);
  args.accepted = vw::tensor(accepted);
  args.committed = vw::tensor(committed, {1, 3});
  CHECK(session.verify_sample_scratch(args) == 0);
  session.verify_sample(args);
  CHECK((committed == Ints{2, 1, -1}) && accepted[0] == 1 && next[0] == 1);
  args.rule = VWD_ACCEPT_GREEDY;
  draft[1] = 1;
  session.verify_sample(args);
  CHECK((committed == Ints{2, 1, 1}) && accepted[0] == 2);
}

static void trees_are_prepared_verified_and_compacted(const vw::Session &session) {
  // The root has two children, and the second of them a child.
  Ints parents = {-1, 0, 0, 2}, tokens = {9, 5, 6, 7}, target = {6, 1, 7, 8}, bases = {2};
  Ints positions(4), accepted(1), path(4), next(1);
  auto prepare = vw::make<vwd_tree_prepare_args>();
  prepare.parents = vw::tensor(parents, {1, 4});
  prepare.bases = vw::tensor(bases);
  prepare.positions = vw::tensor(positions, {1, 4});
  session.tree_prepare(prepare);
  CHECK((positions == Ints{2, 3, 3, 4}));

  auto verify = vw::make<vwd_verify_tree_args>();
  verify.tokens = vw::tensor(tokens, {1, 4});
  verify.parents = prepare.parents;
  verify.target = vw::tensor(target, {1, 4});
  verify.accepted = vw::tensor(accepted);
  verify.path = vw::tensor(path, {1, 4});
  verify.next_token = vw::tensor(next);
  session.verify_tree(verify);
  CHECK((accepted == Ints{2}) && (path == Ints{0, 2, 3, -1}) && (next == Ints{8}));

  // A token of each row has all mass, so that sampling draws those of target.
  Floats logits(4 * 9, -1000);
  for (std::size_t node = 0; node < 4; node++) logits[9 * node + static_cast<std::size_t>(target[node])] = 0;
  std::vector<std::int64_t> seed = {7}, position = {0};
  verify.target = vwd_tensor VWD_TENSOR_INIT;
  verify.logits = vw::tensor(logits, {1, 4, 9});
  verify.seeds = vw::tensor(seed);
  verify.positions = vw::tensor(position);
  for (const std::uint32_t walk : {VWD_WALK_COUPLED, VWD_WALK_INDEPENDENT, VWD_WALK_DISTINCT}) {
    verify.walk = walk;
    path.assign(4, 0); // in place
    CHECK(session.verify_tree_scratch(verify) == 0);
    session.verify_tree(verify);
    CHECK((accepted == Ints{2}) && (path == Ints{0, 2, 3, -1}) && (next == Ints{8}));
  }

  Ints k = {0, 1, 2, 3, 4, 5}, table = {0, 1, 2};
  const vwd_tensor cache = vw::tensor(k, {3, 2});
  auto options = vw::make<vwd_compactor_options>();
  options.cache_count = 1;
  options.caches = &cache;
  const auto compactor = vw::Compactor::create(session, options);
  auto compact = vw::make<vwd_compact_args>();
  compact.page_table = vw::tensor(table, {1, 3});
  compact.bases = prepare.bases;
  compact.path = verify.path;
  compact.accepted = verify.accepted;
  compactor.compact(compact);
  CHECK((k == Ints{0, 1, 2, 4, 5, 5}));
}

static void summarise_select_attend_repair(const vw::Session &session) {
  Sequence sequence;
  const vwd_paged_kv kv = sequence.kv();
  const vwd_index index = sequence.minmax();
  auto update = vw::make<vwd_index_update_args>();
  update.index = &index;
  update.k = kv.k;
  update.seq_lens = kv.seq_lens;
  session.index_update(update);
  CHECK(sequence.key_max[0] == 1 && sequence.key_max[32] == 5 && sequence.key_min[32] == 4);

  // Two heads that ask for channel 0 score block j at 2·(2j + 1).
  sequence.q[0] = sequence.q[Sequence::channels] = 1;
  Ints ids(2), count(1);
  Floats scores(3);
  auto select = vw::make<vwd_select_blocks_args>();
  select.method = VWD_SELECT_MINMAX;
  select.block_size = Sequence::block;
  select.k = 2;
  select.index = &index;
  select.q = sequence.queries();
  select.seq_lens = kv.seq_lens;
  select.selected = list(ids, count);
  select.scores = vw::tensor(scores, {1, 1, 3});
  session.select_blocks(select);
  CHECK(count[0] == 2 && (ids == Ints{1, 2}) && (scores == Floats{2, 6, 10}));

  // A query of zeros weighs all tokens alike: attention is the mean of the values listed.
  std::fill(sequence.q.begin(), sequence.q.end(), 0.0f);
  Ints guess = {0, 1}, guess_count = {2}, missed(1);
  Floats out(32), lse(2), acc(32), m(2), l(2), block_acc(64), block_m(4), block_l(4);
  auto attention = vw::make<vwd_attention_args>();
  attention.block_size = Sequence::block;
  attention.kv = &kv;
  attention.q = sequence.queries();
  attention.list = list(guess, guess_count);
  attention.out = vw::tensor(out, {1, 2, 16});
  attention.lse = vw::tensor(lse, {1, 2});
  attention.state = {vw::tensor(acc, {1, 2, 16}), vw::tensor(m, {1, 2}), vw::tensor(l, {1, 2})};
  attention.partials = {vw::tensor(block_acc, {1, 2, 2, 16}), vw::tensor(block_m, {1, 2, 2}),
                        vw::tensor(block_l, {1, 2, 2})};
  session.attention(attention);
  CHECK(all_near(out, 1.5, 1e-6) && all_near(lse, std::log(4.0), 1e-6) && all_near(l, 4, 1e-6));

  auto repair = vw::make<vwd_repair_args>();
  repair.mode = VWD_REPAIR_EXACT;
  repair.block_size = Sequence::block;
  repair.kv = &kv;
  repair.q = attention.q;
  repair.predicted = attention.list;
  repair.selected = select.selected;
  repair.predicted_partials = attention.partials;
  repair.out = attention.out;
  repair.missed_counts = vw::tensor(missed, {1, 1});
  session.repair(repair);
  CHECK(all_near(out, 3.5, 1e-6) && missed[0] == 1);

  repair.mode = VWD_REPAIR_SUPERSET;
  repair.predicted_partials = {};
  repair.predicted_state = attention.state;
  session.repair(repair);
  CHECK(all_near(out, 2.5, 1e-6));

  // Merged with itself a state keeps its output and doubles its weight.
  const vwd_attention_state twice[] = {attention.state, attention.state};
  auto merge = vw::make<vwd_merge_states_args>();
  merge.input_count = 2;
  merge.inputs = twice;
  merge.out = attention.out;
  merge.lse = attention.lse;
  session.merge_states(merge);
  CHECK(all_near(out, 1.5, 1e-6) && all_near(lse, std::log(8.0), 1e-6));
}

// A query of zeros weighs the listed tokens 0 … 3 alike, and the others as log_mass says.
static void what_a_list_leaves_out_is_one_term(const vw::Session &session) {
  constexpr int tokens = 12, dim = 16;
  Floats k(tokens * dim), v(tokens * dim), q(dim), mean_k(dim), mean_v(dim), covariance(dim * dim);
  for (int i = 0; i < tokens * dim; ++i) v[i] = static_cast<float>(i / dim);
  const Ints lens = {tokens};
  Ints counted = {0}, ids = {0}, count = {1};
  auto kv = vw::make<vwd_paged_kv>();
  kv.k = vw::tensor(k, {1, tokens, 1, dim});
  kv.v = vw::tensor(v, {1, tokens, 1, dim});
  kv.seq_lens = vw::tensor(lens);
  auto remainder = vw::make<vwd_remainder>();
  remainder.tokens = vw::tensor(counted, {1, 1});
  remainder.mean_k = vw::tensor(mean_k, {1, 1, dim});
  remainder.mean_v = vw::tensor(mean_v, {1, 1, dim});
  remainder.covariance = vw::tensor(covariance, {1, 1, dim, dim});
  auto update = vw::make<vwd_remainder_update_args>();
  update.block_size = 4;
  update.kv = &kv;
  update.remainder = &remainder;
  session.remainder_update(update);
  CHECK(counted[0] == 8 && all_near(mean_v, 7.5, 1e-6));

  const Floats log_mass = {std::log(8.0f)};
  Floats out(dim), acc(dim), m(1), l(1);
  auto attention = vw::make<vwd_attention_args>();
  attention.block_size = 4;
  attention.kv = &kv;
  attention.q = vw::tensor(q, {1, 1, dim});
  attention.list = list(ids, count);
  attention.out = vw::tensor(out, {1, 1, dim});
  attention.state = {vw::tensor(acc, {1, 1, dim}), vw::tensor(m, {1, 1}), vw::tensor(l, {1, 1})};
  attention.remainder = &remainder;
  attention.log_mass = vw::tensor(log_mass, {1, 1});
  session.attention(attention);
  CHECK(all_near(out, 5.5, 1e-5));
}

// Queries of zeros weigh all that they see alike, and a sink of 0 counts as one token of value 0.
static void query_positions_windows_sinks_and_scales(const vw::Session &session) {
  Sequence sequence;
  vwd_paged_kv kv = sequence.kv();
  const Floats q(64), sinks(2);
  const Ints one = {1};
  Floats out(64);
  const auto rows_are = [&](double first, double second) {
    return std::all_of(out.begin(), out.begin() + 32, [&](float x) { return near(x, first, 1e-6); }) &&
           std::all_of(out.begin() + 32, out.end(), [&](float x) { return near(x, second, 1e-6); });
  };
  auto args = vw::make<vwd_attention_args>();
  args.window = 3;
  args.kv = &kv;
  args.q = vw::tensor(q, {1, 2, 2, 16});
  args.sinks = vw::tensor(sinks);
  args.out = vw::tensor(out, {1, 2, 2, 16});
  session.attention(args);
  CHECK(rows_are(9.0 / 4, 12.0 / 4));  // of tokens 2, 3, 4 and of tokens 3, 4, 5

  args.q_lens = vw::tensor(one);
  session.attention(args);
  CHECK(rows_are(12.0 / 4, 0));

  const std::vector<vw::Float8E4M3> ones(Sequence::tokens * 16, {7 << 3});  // exponent 0 in a bias of 7, no mantissa
  const Floats scale = {2.5f};
  kv.k = kv.v = vw::tensor(ones, {1, Sequence::tokens, 1, 16});
  kv.v_scale = vw::tensor(scale);
  args.sinks = {};
  session.attention(args);
  CHECK(rows_are(2.5, 0));
}

static void channels_labels_and_tokens(const vw::Session &session) {
  Sequence sequence;
  std::fill(sequence.q.begin(), sequence.q.end(), 1.0f);
  Ints channels(2);
  Floats importance(16);
  auto choose = vw::make<vwd_channel_importance_args>();
  choose.q = sequence.queries();
  choose.k = vw::tensor(sequence.k, {Sequence::tokens, 1, 16});
  choose.channels = vw::tensor(channels, {1, 2});
  choose.importance = vw::tensor(importance, {1, 16});
  session.channel_importance(choose);
  CHECK((channels == Ints{0, 1}) && importance[0] == 5 && importance[1] == 0);

  std::vector<std::uint8_t> labels(6);
  std::vector<vw::Half> scale(6), minimum(6);
  auto index = vw::make<vwd_index>();
  index.kind = VWD_INDEX_LABEL;
  index.labels = vw::tensor(labels, {1, 6, 1, 1});
  index.label_scale = vw::tensor(scale, {1, 6, 1});
  index.label_min = vw::tensor(minimum, {1, 6, 1});
  index.channels = vw::tensor(channels, {1, 2});
  auto update = vw::make<vwd_index_update_args>();
  update.index = &index;
  update.k = sequence.kv().k;
  update.seq_lens = vw::tensor(sequence.lens);
  session.index_update(update);
  CHECK(labels[5] == 0x0f && minimum[5].bits == 0);  // channel 0, the largest, in the low bits; channel 1, zero, above

  Ints blocks = {0, 2}, block_count = {2}, tokens(3), token_count(1);
  auto select = vw::make<vwd_select_tokens_args>();
  select.block_size = Sequence::block;
  select.k = 3;
  select.index = &index;
  select.q = sequence.queries();
  select.seq_lens = vw::tensor(sequence.lens);
  select.candidates = list(blocks, block_count);
  select.selected = list(tokens, token_count);
  session.select_tokens(select);
  CHECK(token_count[0] == 3 && (tokens == Ints{1, 4, 5}));
}

static void summaries_of_several_layers(const vw::Session &session) {
  std::array<Sequence, 2> layers;
  for (float &x : layers[1].k) x += 10;
  std::array<vwd_index, 2> indexes = {layers[0].minmax(), layers[1].minmax()};
  std::array<vwd_index_update_args, 2> args;
  std::array<const vwd_index_update_args *, 2> updates;
  for (std::size_t n = 0; n < args.size(); ++n) {
    args[n] = vw::make<vwd_index_update_args>();
    args[n].index = &indexes[n];
    args[n].k = layers[n].kv().k;
    args[n].seq_lens = layers[n].kv().seq_lens;
    updates[n] = &args[n];
  }
  session.index_update_layers(updates.data(), 2);
  CHECK(layers[0].key_max[0] == 1 && layers[0].key_max[32] == 5 && layers[0].key_min[32] == 4);
  CHECK(layers[1].key_max[0] == 11 && layers[1].key_max[32] == 15 && layers[1].key_min[32] == 14);
  session.index_update_layers(nullptr, 0);

  args[1].k = {};
  std::string message;
  try {
    session.index_update_layers(updates.data(), 2);
  } catch (const vw::Error &error) {
    message = error.what();
  }
  CHECK(message.find("updates[1].k: ") != std::string::npos);
}

static void topk(const vw::Session &session) {
  const std::vector<float> scores = {1, 5, 2, 5, 4};
  Ints ids(3), counts(1);
  auto args = vw::make<vwd_topk_args>();
  args.k = 3;
  args.scores = vw::tensor(scores, {1, 5});
  args.ids = vw::tensor(ids, {1, 3});
  args.counts = vw::tensor(counts);
  session.topk(args);
  CHECK(counts[0] == 3 && (ids == Ints{1, 3, 4}));
}

static void gather(const vw::Session &session) {
  const Ints source = {0, 1, 2, 3, 4, 5};
  Ints target(4, -1), source_ids = {2, -1, 0}, target_ids = {0, 1, 1};
  auto args = vw::make<vwd_gather_blocks_args>();
  args.source = vw::tensor(source, {3, 2});
  args.target = vw::tensor(target, {2, 2});
  args.source_ids = vw::tensor(source_ids);
  args.target_ids = vw::tensor(target_ids);
  session.gather_blocks(args);
  CHECK((target == Ints{4, 5, 0, 1}));
}

// One sequence of two blocks of 16 tokens, of 64 channels: channel 0 of a key is 10 ± 60, that of a value 60. Their rotations are 7.5 in
// every channel, of either sign, which codes 0 and 15 of scale 1 stand for exactly.
static void tokens_in_int4(const vw::Session &session) {
  constexpr int tokens = 32, block = 16, channels = 64;
  Floats k(tokens * channels), v(tokens * channels), means(tokens / block * channels, -1), weights(channels, -1);
  for (int t = 0; t < tokens; ++t) {
    k[t * channels] = t % 2 != 0 ? 70.f : -50.f;
    v[t * channels] = 60;
  }
  Ints lens = {tokens}, coded = {tokens};
  std::vector<std::uint8_t> k_codes(tokens * channels / 2, 1), v_codes(tokens * channels / 2, 1);
  std::vector<vw::Float8E4M3> k_scale(tokens), v_scale(tokens);
  auto int4 = vw::make<vwd_int4_kv>();
  int4.block_size = block;
  int4.k = vw::tensor(k_codes, {1, tokens, 1, channels / 2});
  int4.v = vw::tensor(v_codes, {1, tokens, 1, channels / 2});
  int4.k_scale = vw::tensor(k_scale, {1, tokens, 1});
  int4.v_scale = vw::tensor(v_scale, {1, tokens, 1});
  int4.coded_lens = vw::tensor(coded);
  int4.means = vw::tensor(means, {1, tokens / block, 1, channels});
  auto kv = vw::make<vwd_paged_kv>();
  kv.k = vw::tensor(k, {1, tokens, 1, channels});
  kv.v = vw::tensor(v, {1, tokens, 1, channels});
  kv.seq_lens = vw::tensor(lens);
  kv.int4 = &int4;
  const vwd_paged_kv *const layers[] = {&kv};
  auto quantize = vw::make<vwd_kv_quantize_args>();
  quantize.layer_count = 1;
  quantize.layers = layers;
  session.kv_quantize(quantize);
  for (int t = 0; t < tokens; ++t) {
    CHECK(k_codes[t * channels / 2] == (t % 2 != 0 ? 0xff : 0) && v_codes[t * channels / 2 + 31] == 0xff);
    CHECK(k_scale[t].bits == 0x38 && v_scale[t].bits == 0x38);  // 1
  }
  CHECK(means[0] == 10 && means[1] == 0 && means[channels] == 10);

  // Attention reads the codes, and not the exact tokens any more. Values are equal, so that their mean is 60 whatever the weights.
  Floats q(channels, 1), out(channels, -1);
  auto attend = vw::make<vwd_attention_args>();
  attend.kv = &kv;
  attend.q = vw::tensor(q, {1, 1, channels});
  attend.out = vw::tensor(out, {1, 1, channels});
  std::fill(k.begin(), k.end(), 0.f), std::fill(v.begin(), v.end(), 0.f);
  session.attention(attend);
  CHECK(near(out[0], 60, 1e-2) && near(out[1], 0, 1e-2));

  // All channels of keys have the spread 1, and half of the channels of queries are four times as large: √1 and √¼, whose mean is ¾.
  Floats keys(tokens * channels), queries(channels);
  for (int n = 0; n < tokens * channels; ++n) keys[n] = n / channels % 2 != 0 ? 3.f : 1.f;
  for (int c = 0; c < channels; ++c) queries[c] = c % 2 != 0 ? -4.f : 1.f;
  auto weigh = vw::make<vwd_kv_weights_args>();
  weigh.block_size = block;
  weigh.q = vw::tensor(queries, {1, 1, channels});
  weigh.k = vw::tensor(keys, {tokens, 1, channels});
  weigh.weights = vw::tensor(weights, {1, channels});
  session.kv_weights(weigh);
  CHECK(near(weights[0], 4. / 3, 1e-6) && near(weights[1], 2. / 3, 1e-6) && near(weights[63], 2. / 3, 1e-6));
}

int main() {
  return run({
      verify_and_pack,
      verify_sampled,
      trees_are_prepared_verified_and_compacted,
      summarise_select_attend_repair,
      what_a_list_leaves_out_is_one_term,
      query_positions_windows_sinks_and_scales,
      channels_labels_and_tokens,
      summaries_of_several_layers,
      topk,
      gather,
      tokens_in_int4,
  });
}
