// The session and the sequence that the tests of calls share.
#ifndef VANWARD_TESTS_SEQUENCE_HPP
#define VANWARD_TESTS_SEQUENCE_HPP

#include "vanward.hpp"

#include "check.hpp"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace vw = vanward;
using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;

inline vw::Session cpu_session() {
  auto options = vw::make<vwd_session_options>();
  options.device = VWD_DEVICE_CPU;
  options.threads = 2;
  return vw::Session::create(options);
}

inline bool all_near(const Floats &found, double expected, double tolerance) {
  return std::all_of(found.begin(), found.end(), [&](float x) { return near(x, expected, tolerance); });
}

// One sequence of 6 tokens in 3 blocks of 2, one KV head of 16 channels under two query heads. Channel 0 of key t is t,
// every channel of value t is t: scores and averages are sums of small integers.
struct Sequence {
  static constexpr int tokens = 6, block = 2, blocks = 3, channels = 16, heads = 2;

  Floats k = Floats(tokens * channels), v = Floats(tokens * channels), q = Floats(heads * channels);
  Ints lens = {tokens};
  Floats key_max = Floats(blocks * channels), key_min = Floats(blocks * channels);

  Sequence() {
    for (int t = 0; t < tokens; ++t) {
      k[t * channels] = static_cast<float>(t);
      std::fill_n(v.begin() + t * channels, channels, static_cast<float>(t));
    }
  }

  vwd_tensor queries() { return vw::tensor(q, {1, heads, channels}); }
  vwd_paged_kv kv() {
    auto kv = vw::make<vwd_paged_kv>();
    kv.k = vw::tensor(k, {1, tokens, 1, channels});
    kv.v = vw::tensor(v, {1, tokens, 1, channels});
    kv.seq_lens = vw::tensor(lens);
    return kv;
  }
  vwd_index minmax() {
    auto index = vw::make<vwd_index>();
    index.kind = VWD_INDEX_MINMAX;
    index.block_size = block;
    index.key_max = vw::tensor(key_max, {1, blocks, 1, channels});
    index.key_min = vw::tensor(key_min, {1, blocks, 1, channels});
    return index;
  }
};

/// A list with room for `ids.size()` entries of one sequence and one KV head.
inline vwd_block_list list(Ints &ids, Ints &count) {
  return {vw::tensor(ids, {1, 1, ids.size()}), vw::tensor(count, {1, 1}), {}};
}

/// Runs each test on a session on the CPU; returns the number of checks that failed and of errors.
inline int run(std::initializer_list<void (*)(const vw::Session &)> tests) {
  const auto session = cpu_session();
  for (auto test : tests) {
    try {
      test(session);
    } catch (const vw::Error &error) {
      std::fprintf(stderr, "%s\n", error.what());
      ++failures;
    }
  }
  return failures;
}

#endif
