// What the header itself does: ownership, both ways to report errors, tensor views. Compiled as C++17 and C++20, with
// exceptions and without.
#include "vanward.hpp"

#include "check.hpp"

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif

namespace vw = vanward;

static vwd_session_options on_cpu() {
  auto options = vw::make<vwd_session_options>();
  options.device = VWD_DEVICE_CPU;
  options.threads = 2;
  return options;
}

static void handles_move_and_do_not_copy() {
  using Session = vw::nothrow::Session;
  static_assert(std::is_nothrow_move_constructible_v<Session> && std::is_nothrow_move_assignable_v<Session>);
  static_assert(!std::is_copy_constructible_v<Session> && !std::is_copy_assignable_v<Session>);
  static_assert(sizeof(Session) == sizeof(void *));
  auto created = Session::create(on_cpu());
  CHECK(created.has_value());
  Session first = *std::move(created);
  vwd_session *handle = first.get();
  Session second = std::move(first);
  CHECK(!first && second && second.get() == handle);
  second = Session();
  CHECK(!second);
}

static void an_empty_session_fails_and_does_not_crash() {
  vw::nothrow::Session session;
  auto done = session.verify(vw::make<vwd_verify_args>());
  CHECK(!done && done.status() == vw::Status::invalid_argument);
  CHECK(done.error().message().find("session") != std::string::npos);
  CHECK(session.info().status() == vw::Status::invalid_argument);
  CHECK(session.stream(VWD_STREAM_SELECT).status() == vw::Status::invalid_argument);
}

static void made_arguments_are_zero_but_for_their_size() {
  auto args = vw::make<vwd_repair_args>();
  CHECK(args.struct_size == sizeof(vwd_repair_args));
  args.struct_size = 0;
  const vwd_repair_args zero{};
  CHECK(std::memcmp(&args, &zero, sizeof args) == 0);
}

static void memory_that_ends_with_the_expression_is_refused() {
  using vw::detail::outlives_the_expression;
  static_assert(outlives_the_expression<std::vector<float> &> && outlives_the_expression<const std::vector<float> &>);
  static_assert(outlives_the_expression<vw::Span<float>> && outlives_the_expression<vw::Span<const float>>);
  static_assert(!outlives_the_expression<std::vector<float>> && !outlives_the_expression<std::array<int, 2>>);
#if __cplusplus >= 202002L
  static_assert(outlives_the_expression<std::span<float>>);
#endif
}

static void views_carry_dtype_shape_strides_and_device() {
  std::vector<float> floats(12);
  const vwd_tensor t = vw::tensor(floats, {3, 4});
  CHECK(t.data == floats.data() && t.device_type == 1 && t.ndim == 2);
  CHECK(t.dtype_code == 2 && t.dtype_bits == 32 && t.lanes == 1);
  CHECK(t.shape[0] == 3 && t.shape[1] == 4 && t.strides[0] == 4 && t.strides[1] == 1);

  const vwd_tensor column = vw::tensor(floats, {3}, {4});
  CHECK(column.ndim == 1 && column.strides[0] == 4);
  const vwd_tensor all = vw::tensor(floats);
  CHECK(all.ndim == 1 && all.shape[0] == 12);

  vw::Half *half = nullptr;
  const vwd_tensor device = vw::tensor(half, {2, 2}, vw::cuda(3));
  CHECK(device.device_type == 2 && device.device_id == 3 && device.dtype_code == 2 && device.dtype_bits == 16);
  const vw::BFloat16 *bf16 = nullptr;
  CHECK(vw::tensor(bf16, {8, 1}, {1, 8}, vw::pinned).dtype_code == 4);
  const std::vector<vw::Float8E4M3> e4m3(4);
  const std::vector<vw::Float8E5M2> e5m2(4);
  CHECK(vw::tensor(e4m3).dtype_code == 10 && vw::tensor(e4m3).dtype_bits == 8);
  CHECK(vw::tensor(e5m2).dtype_code == 12 && vw::tensor(e5m2).dtype_bits == 8);

  const std::array<std::int64_t, 2> longs{};
  CHECK(vw::tensor(longs).dtype_code == 0 && vw::tensor(longs).dtype_bits == 64);
  std::uint8_t bytes[4];
  CHECK(vw::tensor(bytes, {4}).dtype_code == 1 && vw::tensor(vw::Span<std::uint8_t>(bytes, 4)).shape[0] == 4);
  bool flags[2];
  CHECK(vw::tensor(flags, {2}).dtype_code == 6);
  const std::vector<std::size_t> extents{2, 6};
  CHECK(vw::tensor(floats, extents).shape[1] == 6);
  CHECK(vw::tensor(floats, {floats.size() / 4, 4}).shape[0] == 3);  // integers of several types
#if __cplusplus >= 202002L
  CHECK(vw::tensor(std::span<float>(floats), {2, 6}).strides[0] == 6);
  CHECK(vw::tensor(std::span<const float>(floats).subspan(4)).shape[0] == 8);
#endif
}

static void a_view_that_its_memory_cannot_hold_is_refused_by_the_call() {
  auto session = *vw::nothrow::Session::create(on_cpu());
  std::vector<std::int32_t> small(7), target(10), out(2);
  auto args = vw::make<vwd_verify_args>();
  args.target = vw::tensor(target, {2, 5});
  args.accepted = vw::tensor(out);
  args.next_token = vw::tensor(out);
  const vwd_tensor bad[] = {
      vw::tensor(small, {2, 4}),                    // eight elements of seven
      vw::tensor(small, {2, 4}, {4, 1}),            // likewise
      vw::tensor(small, {2, 4}, {0, 3}),            // ends at element 9
      vw::tensor(small, {2, 4}, {INT64_MAX, 1}),    // ends beyond 64 bits
      vw::tensor(small, {2, 2}, {-2, 1}),           // begins before the memory
      vw::tensor(small, {2, 4}, {1}),               // one stride for two extents
      vw::tensor(small, {1, 1, 1, 1, 1, 1}),        // six dimensions
      vw::tensor(small, {INT64_MAX, INT64_MAX}),    // more than the address space
      vw::tensor(small, {2, -4}),                   // negative
  };
  for (const vwd_tensor &draft : bad) {
    args.draft = draft;
    auto done = session.verify(args);
    CHECK(done.status() == vw::Status::invalid_argument);
    CHECK(!done && done.error().message().rfind("vwd_verify: draft: ", 0) == 0);
  }
  args.draft = bad[0];
  CHECK(session.verify(args).error().message() ==
        "vwd_verify: draft: a container that is too small; expected every element of the view inside it");
  args.draft = bad[5];
  CHECK(session.verify(args).error().message() ==
        "vwd_verify: draft: strides of another rank than the shape; expected as many as extents");
  CHECK(vw::tensor(small, {0, 100}).ndim == 2 && vw::tensor(small, {7}, {1}).ndim == 1);
  CHECK(vw::tensor(small, {4, 7}, {0, 1}).ndim == 2);
}

static void pinned_memory_comes_as_a_span_and_goes_back() {
  auto session = *vw::nothrow::Session::create(on_cpu());
  const auto memory = session.pinned_alloc<double>(1000);
  CHECK(memory && memory->size() == 1000 && reinterpret_cast<std::uintptr_t>(memory->data()) % 4096 == 0);
  for (double &x : *memory) x = 1;
  CHECK(session.info()->pinned_in_use >= 8000);
  CHECK(session.pinned_free(*memory).has_value());
  CHECK(session.info()->pinned_in_use == 0);
  CHECK(session.pinned_free(vw::Span<double>()).has_value());
  CHECK(!session.pinned_alloc<double>(0));
  CHECK(!session.pinned_alloc<double>(SIZE_MAX / 2));
}

static void a_session_can_work_on_threads_of_the_program() {
  std::uint64_t ran = 0;
  auto pool = [&ran](std::uint64_t tasks, vw::Task task) {
    for (std::uint64_t index = tasks; index-- > 0; ++ran) task(index);
  };
  auto options = vw::make<vwd_session_options>();
  options.device = VWD_DEVICE_CPU;
  vw::use_threads(options, pool);
  auto session = *vw::nothrow::Session::create(options);
  constexpr int rows = 4096;
  std::vector<float> data(rows * 256, 1), packed(rows * 256);
  const std::vector<std::int32_t> all(rows / 16, 16);
  std::vector<std::int64_t> offsets(rows / 16 + 1);
  const vwd_tensor from = vw::tensor(data, {rows / 16, 16, 256}), to = vw::tensor(packed, {rows, 256});
  auto args = vw::make<vwd_pack_args>();
  args.tensor_count = 1;
  args.rows = &from;
  args.packed = &to;
  args.accepted = vw::tensor(all);
  args.offsets = vw::tensor(offsets);
  CHECK(session.pack(args).has_value());
  CHECK(packed == data && ran > 1);
  CHECK(session.info()->threads == 0);
}

static void a_session_logs_to_the_program() {
  std::vector<std::string> lines;
  auto log = [&lines](std::uint32_t level, std::string_view text) {
    CHECK(level == VWD_LOG_INFO);
    lines.emplace_back(text);
  };
  auto options = on_cpu();
  options.check = VWD_CHECK_NOTHING;
  vw::use_log(options, log, VWD_LOG_INFO);
  CHECK(vw::nothrow::Session::create(options).has_value());
  CHECK(lines.size() == 1 && lines[0].rfind("session on the CPU", 0) == 0);
  vw::use_log(options, log, VWD_LOG_WARNING);
  CHECK(vw::nothrow::Session::create(options).has_value() && lines.size() == 1);
  options.variants = "predictor=unknown";
  const auto refused = vw::nothrow::Session::create(options);
  CHECK(!refused && refused.error().message().rfind("vwd_session_create: options.variants: ", 0) == 0);
}

static void a_session_that_checks_contents_names_the_element() {
  auto options = on_cpu();
  options.check = VWD_CHECK_CONTENTS;
  auto session = *vw::nothrow::Session::create(options);
  std::vector<float> scores(6);
  std::vector<std::int32_t> lens{3, 4}, ids(4), counts(2);
  auto args = vw::make<vwd_topk_args>();
  args.k = 2;
  args.scores = vw::tensor(scores, {2, 3});
  args.lens = vw::tensor(lens);
  args.ids = vw::tensor(ids, {2, 2});
  args.counts = vw::tensor(counts);
  const auto refused = session.topk(args);
  CHECK(!refused && refused.error().message() == "vwd_topk: lens[1]: 4; expected 0 to 3");
  lens[1] = 1;
  CHECK(session.topk(args).has_value() && counts[1] == 1);
}

static void scratch_is_asked_for_without_a_call() {
  auto session = *vw::nothrow::Session::create(on_cpu());
  CHECK(session.attention_scratch(vw::make<vwd_attention_args>()).error().message().rfind("vwd_attention_scratch: kv: ", 0) == 0);
  CHECK(session.repair_scratch(vw::make<vwd_repair_args>()).status() == vw::Status::invalid_argument);
  CHECK(session.select_blocks_scratch(vw::make<vwd_select_blocks_args>()).status() == vw::Status::invalid_argument);
  CHECK(session.select_tokens_scratch(vw::make<vwd_select_tokens_args>()).status() == vw::Status::invalid_argument);
  CHECK(session.forget_stream(nullptr).has_value());
}

static void each_thread_gets_its_own_message() {
  const auto session = *vw::nothrow::Session::create(on_cpu());
  std::array<int, 8> wrong{};
  std::vector<std::thread> threads;
  for (int n = 0; n < 8; ++n) {
    threads.emplace_back([&session, &wrong, n] {
      std::vector<std::int32_t> draft(8), target(16), accepted(1), next(1);
      auto args = vw::make<vwd_verify_args>();
      args.draft = vw::tensor(draft, {1, n});
      args.target = vw::tensor(target, {1, n + 3});
      args.accepted = vw::tensor(accepted);
      args.next_token = vw::tensor(next);
      for (int round = 0; round < 200; ++round) {
        auto done = session.verify(args);
        wrong[n] += done || done.error().message().find("[1, " + std::to_string(n + 3) + "]") == std::string::npos;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (int count : wrong) CHECK(count == 0);
}

#if defined(__cpp_exceptions)
static void a_throwing_session_throws_status_and_message() {
  auto session = vw::Session::create(on_cpu());
  try {
    session.verify(vw::make<vwd_verify_args>());
    CHECK(!"no exception");
  } catch (const vw::Error &error) {
    CHECK(error.status() == vw::Status::invalid_argument);
    CHECK(error.message() == error.what() && error.message().rfind("vwd_verify: draft: ", 0) == 0);
  }
  auto options = on_cpu();
  options.device = 99;
  try {
    vw::Session::create(options);
    CHECK(!"no exception");
  } catch (const std::exception &error) {
    CHECK(std::strstr(error.what(), "options.device") != nullptr);
  }
  CHECK(session.info().device == VWD_DEVICE_CPU && session.info().threads == 2);
  CHECK(session.stream(VWD_STREAM_PREFETCH) == nullptr);
}
#endif

static void structs_are_made_whether_they_grow_or_not() {
  CHECK(vw::make<vwd_attention_args>().struct_size == sizeof(vwd_attention_args));
  CHECK(vw::make<vwd_kv_cache_layer>().struct_size == sizeof(vwd_kv_cache_layer));
  CHECK(vw::make<vwd_block_list>().ids.data == nullptr);
  CHECK(vw::make<vwd_attention_state>().acc.ndim == 0);
  CHECK(vw::make<vwd_attention_partials>().m.data == nullptr);
  CHECK(vw::make<vwd_predictor_state>().level.data == nullptr);
  CHECK(vw::make<vwd_holt>().alpha == 0.0F);
  CHECK(vw::make<vwd_tensor>().ndim == 0);
}

int main() {
  structs_are_made_whether_they_grow_or_not();
  CHECK(vw::abi_version() == VWD_ABI_VERSION && std::strlen(vw::version()) > 0);
  handles_move_and_do_not_copy();
  an_empty_session_fails_and_does_not_crash();
  made_arguments_are_zero_but_for_their_size();
  memory_that_ends_with_the_expression_is_refused();
  views_carry_dtype_shape_strides_and_device();
  a_view_that_its_memory_cannot_hold_is_refused_by_the_call();
  pinned_memory_comes_as_a_span_and_goes_back();
  a_session_can_work_on_threads_of_the_program();
  a_session_logs_to_the_program();
  a_session_that_checks_contents_names_the_element();
  scratch_is_asked_for_without_a_call();
  each_thread_gets_its_own_message();
#if defined(__cpp_exceptions)
  a_throwing_session_throws_status_and_message();
#endif
  return failures;
}
