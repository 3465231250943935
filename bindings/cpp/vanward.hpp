#ifndef VANWARD_HPP
#define VANWARD_HPP

// Vanward in C++17: one header over vanward.h, nothing of its own to link.
//
//   auto session = vanward::Session::create();               // an error is a vanward::Error, thrown
//   auto args = vanward::make<vwd_verify_args>();
//   args.draft = vanward::tensor(draft, {batch, gamma});      // std::vector, std::span, array or pointer
//   session.verify(args, stream);
//
// The same classes in vanward::nothrow return a Result instead; a build without exceptions has only those. What a call
// does, and what its arguments mean, is documented once, in vanward.h.

#if __cplusplus < 201703L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 201703L)
#  error "vanward.hpp needs C++17"
#endif

#include "vanward.h"

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace vanward {

// --- errors ---------------------------------------------------------------------------------------------------------

enum class Status : vwd_status {
  ok = VWD_OK,
  invalid_argument = VWD_ERROR_INVALID_ARGUMENT,
  unavailable = VWD_ERROR_UNAVAILABLE,
  unsupported = VWD_ERROR_UNSUPPORTED,
  out_of_memory = VWD_ERROR_OUT_OF_MEMORY,
  out_of_scratch = VWD_ERROR_OUT_OF_SCRATCH,
  driver = VWD_ERROR_DRIVER,
  io = VWD_ERROR_IO,
  internal = VWD_ERROR_INTERNAL,
};

namespace detail {
/// Ranks that no tensor has: the call that gets one fails and names the argument, which is not known where the tensor is made.
inline constexpr std::int32_t ranks_differ = -1;
inline constexpr std::int32_t too_small = -2;

/// Says what such a rank stands for.
inline void explain(std::string &message) {
  const auto replace = [&](const char *found, const char *words) {
    const std::size_t at = message.find(found);
    if (at != std::string::npos) message.replace(at, std::string::npos, words);
  };
  replace(": ndim -1;", ": strides of another rank than the shape; expected as many as extents");
  replace(": ndim -2;", ": a container that is too small; expected every element of the view inside it");
}
}  // namespace detail

/// Why a call did nothing.
class Error : public std::exception {
 public:
  Error(Status status, std::string message) : status_(status), message_(std::move(message)) {}

  /// The failure of the call that this thread made last.
  static Error last(vwd_status status) {
    std::string message(vwd_last_error(nullptr, 0), '\0');
    vwd_last_error(message.data(), message.size() + 1);  // the NUL goes where std::string keeps its own
    if (status == VWD_ERROR_INVALID_ARGUMENT) detail::explain(message);
    return Error(static_cast<Status>(status), std::move(message));
  }

  Status status() const noexcept { return status_; }
  const std::string &message() const noexcept { return message_; }
  const char *what() const noexcept override { return message_.c_str(); }

 private:
  Status status_;
  std::string message_;
};

/// A value or an Error, after std::expected of C++23.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }
  Status status() const noexcept { return has_value() ? Status::ok : error().status(); }

  /// The value; there must be one.
  T &operator*() & noexcept { return *get(); }
  T &&operator*() && noexcept { return std::move(*get()); }
  T *operator->() noexcept { return get(); }
  const T &operator*() const & noexcept { return *get(); }
  const T *operator->() const noexcept { return get(); }

  /// The error; there must be one.
  const Error &error() const noexcept {
    assert(!has_value());
    return *std::get_if<1>(&state_);
  }

 private:
  T *get() noexcept {
    assert(has_value());
    return std::get_if<0>(&state_);
  }
  const T *get() const noexcept {
    assert(has_value());
    return std::get_if<0>(&state_);
  }

  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool has_value() const noexcept { return !error_; }
  explicit operator bool() const noexcept { return has_value(); }
  Status status() const noexcept { return error_ ? error_->status() : Status::ok; }
  const Error &error() const noexcept {
    assert(error_);
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

// --- tensors --------------------------------------------------------------------------------------------------------

/// IEEE half precision, bfloat16 and the two 8-bit floats of KV caches, as bits. Specialise `dtype_of` to pass a type of
/// your own.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct Float8E4M3 {  // finite values and NaN only: E4M3FN
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

/// DLPack's code and width of an element.
struct DType {
  std::uint8_t code;
  std::uint8_t bits;
};

namespace detail {
template <class T>
constexpr DType arithmetic_dtype() {
  static_assert(std::is_arithmetic_v<T>, "not an element type; specialise vanward::dtype_of<T>");
  constexpr auto bits = static_cast<std::uint8_t>(8 * sizeof(T));
  if constexpr (std::is_same_v<T, bool>) {
    return {6, bits};
  } else if constexpr (std::is_floating_point_v<T>) {
    return {2, bits};
  } else {
    return {std::is_signed_v<T> ? std::uint8_t{0} : std::uint8_t{1}, bits};
  }
}
}  // namespace detail

template <class T>
inline constexpr DType dtype_of = detail::arithmetic_dtype<T>();
template <>
inline constexpr DType dtype_of<Half> = {2, 16};
template <>
inline constexpr DType dtype_of<BFloat16> = {4, 16};
template <>
inline constexpr DType dtype_of<Float8E4M3> = {10, 8};
template <>
inline constexpr DType dtype_of<Float8E5M2> = {12, 8};

/// Where memory lies, in DLPack's codes.
enum class DeviceType : std::int32_t { cpu = 1, cuda = 2, pinned = 3 };
struct Device {
  DeviceType type;
  std::int32_t id;
};
inline constexpr Device cpu{DeviceType::cpu, 0};
inline constexpr Device pinned{DeviceType::pinned, 0};
constexpr Device cuda(std::int32_t ordinal) { return {DeviceType::cuda, ordinal}; }

/// Extents or strides: {4, 8}, or any container of integers. More than five make a tensor that every call refuses.
class Dims {
 public:
  /// Row-major strides of a shape.
  static Dims contiguous(const Dims &shape) noexcept {
    Dims strides = shape;
    std::uint64_t stride = 1;  // unsigned: a hostile shape wraps here and is refused by the call
    for (std::int32_t d = (shape.rank_ < 5 ? shape.rank_ : 5) - 1; d >= 0; --d) {
      strides.values_[d] = static_cast<std::int64_t>(stride);
      stride *= static_cast<std::uint64_t>(shape.values_[d]);
    }
    return strides;
  }

  template <class... Integers, class = std::enable_if_t<(std::is_integral_v<Integers> && ...)>>
  Dims(Integers... values) noexcept : rank_(sizeof...(values) <= 5 ? static_cast<std::int32_t>(sizeof...(values)) : 6) {
    std::int32_t d = 0;
    ((d < 5 ? void(values_[d++] = static_cast<std::int64_t>(values)) : void()), ...);
  }
  template <class Integers, class = decltype(std::data(std::declval<const Integers &>()))>
  Dims(const Integers &values) : Dims(std::data(values), std::size(values)) {}

  std::int32_t rank() const noexcept { return rank_; }
  std::int64_t operator[](std::int32_t d) const noexcept { return values_[d]; }

 private:
  template <class Integer>
  Dims(const Integer *values, std::size_t count) noexcept : rank_(count <= 5 ? static_cast<std::int32_t>(count) : 6) {
    for (std::size_t d = 0; d < count && d < 5; ++d) values_[d] = static_cast<std::int64_t>(values[d]);
  }

  std::int32_t rank_;
  std::int64_t values_[5] = {};
};

namespace detail {
template <class Container>
using RequireContainer = decltype(std::data(std::declval<Container &>()));

/// Does the memory outlive the container? It does that of a named one, and what a view such as std::span looks at, whose
/// elements are as writable when the view is const.
template <class Container>
inline constexpr bool outlives_the_expression =
    std::is_lvalue_reference_v<Container> ||
    std::is_same_v<RequireContainer<Container>, RequireContainer<const std::remove_reference_t<Container>>>;

/// Does every element lie in `room` elements from data on? Extents that no call accepts are left to the call.
inline bool fits(const vwd_tensor &view, std::size_t room) {
  for (std::int32_t d = 0; d < 5 && d < view.ndim; ++d) {
    if (view.shape[d] <= 0) return true;
  }
  if (room == 0) return false;
  std::uint64_t reach = room - 1;
  for (std::int32_t d = 0; d < 5 && d < view.ndim; ++d) {
    const auto steps = static_cast<std::uint64_t>(view.shape[d] - 1);
    if (steps == 0 || view.strides[d] == 0) continue;
    const auto stride = static_cast<std::uint64_t>(view.strides[d]);
    if (view.strides[d] < 0 || steps > reach / stride) return false;
    reach -= steps * stride;
  }
  return true;
}
}  // namespace detail

/// Views memory: element [0, …, 0] is at `data`, strides are in elements. Nothing is copied or kept. The tensor drops
/// `const`: whether a call writes is the business of the argument it becomes.
template <class T>
vwd_tensor tensor(T *data, const Dims &shape, const Dims &strides, Device device = cpu) {
  constexpr DType dtype = dtype_of<std::remove_cv_t<T>>;
  vwd_tensor view{};
  view.data = const_cast<std::remove_cv_t<T> *>(data);
  view.device_type = static_cast<std::int32_t>(device.type);
  view.device_id = device.id;
  view.dtype_code = dtype.code;
  view.dtype_bits = dtype.bits;
  view.lanes = 1;
  view.ndim = strides.rank() == shape.rank() ? shape.rank() : detail::ranks_differ;
  for (std::int32_t d = 0; d < 5 && d < view.ndim; ++d) {
    view.shape[d] = shape[d];
    view.strides[d] = strides[d];
  }
  return view;
}

/// The same, contiguous.
template <class T>
vwd_tensor tensor(T *data, const Dims &shape, Device device = cpu) {
  return tensor(data, shape, Dims::contiguous(shape), device);
}

/// A pointer and a count, for C++17; whatever takes it also takes std::span.
template <class T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T *data, std::size_t size) : data_(data), size_(size) {}

  constexpr T *data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T *begin() const noexcept { return data_; }
  constexpr T *end() const noexcept { return data_ + size_; }
  constexpr T &operator[](std::size_t i) const noexcept { return data_[i]; }

 private:
  T *data_ = nullptr;
  std::size_t size_ = 0;
};

/// Views a container (std::vector, std::array, std::span, Span). Where it does not hold the shape, the result is a
/// tensor that every call refuses by its argument's name.
template <class Container, class = detail::RequireContainer<Container>>
vwd_tensor tensor(Container &&memory, const Dims &shape, const Dims &strides, Device device = cpu) {
  static_assert(detail::outlives_the_expression<Container>, "the container is gone before the call: give it a name");
  vwd_tensor view = tensor(std::data(memory), shape, strides, device);
  if (view.ndim >= 0 && !detail::fits(view, std::size(memory))) view.ndim = detail::too_small;
  return view;
}

/// The same, contiguous.
template <class Container, class = detail::RequireContainer<Container>>
vwd_tensor tensor(Container &&memory, const Dims &shape, Device device = cpu) {
  return tensor(std::forward<Container>(memory), shape, Dims::contiguous(shape), device);
}

/// The same, in one dimension.
template <class Container, class = detail::RequireContainer<Container>>
vwd_tensor tensor(Container &&memory, Device device = cpu) {
  const Dims shape{std::size(memory)};
  return tensor(std::forward<Container>(memory), shape, device);
}

namespace detail {
template <class Struct>
auto set_size(Struct &made, int) -> decltype(made.struct_size, void()) {
  made.struct_size = sizeof(Struct);
}
template <class Struct>
void set_size(Struct &, long) {}  // a struct that does not grow
}  // namespace detail

/// A struct of the header, ready to be filled: struct_size set where there is one, everything else zero.
template <class Struct>
Struct make() {
  Struct made{};
  detail::set_size(made, 0);
  return made;
}

// --- sessions and forecasts -----------------------------------------------------------------------------------------

inline const char *version() noexcept { return vwd_version(); }
inline std::uint32_t abi_version() noexcept { return vwd_abi_version(); }

/// A share of a call's work: task(0) … task(tasks − 1) are to be run, each once.
class Task {
 public:
  Task(vwd_task run, void *work) noexcept : run_(run), work_(work) {}
  void operator()(std::uint64_t index) const { run_(work_, index); }

 private:
  vwd_task run_;
  void *work_;
};

/// Has a CPU session's work done by threads of the program: `pool(tasks, task)`, with a Task, runs every task, on any
/// threads and in any order, and returns when all have returned. It does not throw, may be called by several threads at
/// once, and outlives the session and all handles that were made with it.
template <class Pool>
void use_threads(vwd_session_options &options, Pool &pool) {
  static_assert(!std::is_const_v<Pool>, "a pool is called");
  options.parallel_context = &pool;
  options.parallel_for = [](void *context, std::uint64_t tasks, vwd_task task, void *work) noexcept {
    (*static_cast<Pool *>(context))(tasks, Task(task, work));
  };
}

/// Has a session log: `log(level, text)` takes one of VWD_LOG_* and a std::string_view that is valid during the call. It does
/// not throw and does not call the library, may be called by several threads at once, and outlives the session and all
/// handles that were made with it. `level` is the most detailed that is logged; 0 means VANWARD_LOG of the environment, or VWD_LOG_INFO.
template <class Log>
void use_log(vwd_session_options &options, Log &log, std::uint32_t level = 0) {
  static_assert(!std::is_const_v<Log>, "a log is called");
  options.log_level = level;
  options.log_context = &log;
  options.log = [](void *context, std::uint32_t level, const char *text) noexcept {
    (*static_cast<Log *>(context))(level, std::string_view(text));
  };
}

/// What `predictor_calibrate` found.
struct Calibration {
  vwd_holt holt;
  double hit_rate;
};

/// How calls report: each policy names its return type and turns a status into it.
struct ByResult {
  template <class T>
  using Return = Result<T>;

  static Result<void> finish(vwd_status status) {
    if (status == VWD_OK) return {};
    return Error::last(status);
  }
  template <class T>
  static Result<T> finish(vwd_status status, T value) {
    if (status == VWD_OK) return Result<T>(std::move(value));
    return Error::last(status);
  }
};

#if defined(__cpp_exceptions)
struct ByException {
  template <class T>
  using Return = T;

  static void finish(vwd_status status) {
    if (status != VWD_OK) throw Error::last(status);
  }
  template <class T>
  static T finish(vwd_status status, T value) {
    finish(status);
    return value;
  }
};
#endif

/// What calls run on. Move-only; an empty one makes calls fail, it does not make them crash. Use from many threads is
/// safe; calls on one stream are ordered by the caller.
template <class Report>
class BasicSession {
  template <class T>
  using Return = typename Report::template Return<T>;

 public:
  BasicSession() = default;

  static Return<BasicSession> create(const vwd_session_options &options = make<vwd_session_options>()) {
    BasicSession session;
    vwd_session *handle = nullptr;
    const vwd_status status = vwd_session_create(&options, &handle);
    session.handle_.reset(handle);
    return Report::finish(status, std::move(session));
  }

  /// For calls of vanward.h itself; stays owned here.
  vwd_session *get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  Return<vwd_session_details> info() const {
    auto details = make<vwd_session_details>();
    const vwd_status status = vwd_session_info(get(), &details);
    return Report::finish(status, details);
  }
  Return<void> reserve(vwd_stream stream, std::uint64_t bytes) const {
    return Report::finish(vwd_session_reserve(get(), stream, bytes));
  }
  Return<void> forget_stream(vwd_stream stream) const { return Report::finish(vwd_session_forget_stream(get(), stream)); }
  /// One of the session's own streams, by VWD_STREAM_*; NULL on a CPU session.
  Return<vwd_stream> stream(std::uint32_t role) const {
    vwd_stream stream = nullptr;
    const vwd_status status = vwd_session_stream(get(), role, &stream);
    return Report::finish(status, stream);
  }

  /// Host memory from the session's pool; give it back with pinned_free, on the stream that used it last.
  template <class T>
  Return<Span<T>> pinned_alloc(std::size_t count) const {
    static_assert(std::is_trivial_v<T>, "pinned memory starts without objects");
    void *memory = nullptr;
    const bool fits = count <= SIZE_MAX / sizeof(T);
    const vwd_status status = vwd_pinned_alloc(get(), fits ? count * sizeof(T) : SIZE_MAX, &memory);
    return Report::finish(status, Span<T>(static_cast<T *>(memory), count));
  }
  template <class T>
  Return<void> pinned_free(Span<T> memory, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_pinned_free(get(), memory.data(), stream));
  }

  Return<void> verify(const vwd_verify_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_verify(get(), &args, stream));
  }
  Return<void> pack(const vwd_pack_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_pack(get(), &args, stream));
  }
  Return<void> verify_pack(const vwd_verify_pack_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_verify_pack(get(), &args, stream));
  }
  Return<void> verify_sample(const vwd_verify_sample_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_verify_sample(get(), &args, stream));
  }
  Return<void> tree_prepare(const vwd_tree_prepare_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_tree_prepare(get(), &args, stream));
  }
  Return<void> verify_tree(const vwd_verify_tree_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_verify_tree(get(), &args, stream));
  }
  Return<void> index_update(const vwd_index_update_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_index_update(get(), &args, stream));
  }
  Return<void> index_update_layers(const vwd_index_update_args *const *updates, std::uint32_t count,
                                   vwd_stream stream = nullptr) const {
    return Report::finish(vwd_index_update_layers(get(), updates, count, stream));
  }
  Return<void> channel_importance(const vwd_channel_importance_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_channel_importance(get(), &args, stream));
  }
  Return<void> select_blocks(const vwd_select_blocks_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_select_blocks(get(), &args, stream));
  }
  Return<void> select_tokens(const vwd_select_tokens_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_select_tokens(get(), &args, stream));
  }
  Return<void> topk(const vwd_topk_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_topk(get(), &args, stream));
  }
  Return<void> kv_quantize(const vwd_kv_quantize_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_quantize(get(), &args, stream));
  }
  Return<void> kv_weights(const vwd_kv_weights_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_weights(get(), &args, stream));
  }
  Return<void> remainder_update(const vwd_remainder_update_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_remainder_update(get(), &args, stream));
  }
  Return<void> attention(const vwd_attention_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_attention(get(), &args, stream));
  }
  /// Bytes of scratch that the call would take on a stream; 0 on a CPU session.
  Return<std::uint64_t> attention_scratch(const vwd_attention_args &args) const {
    return scratch(vwd_attention_scratch, args);
  }
  Return<std::uint64_t> repair_scratch(const vwd_repair_args &args) const { return scratch(vwd_repair_scratch, args); }
  Return<std::uint64_t> verify_sample_scratch(const vwd_verify_sample_args &args) const {
    return scratch(vwd_verify_sample_scratch, args);
  }
  Return<std::uint64_t> verify_tree_scratch(const vwd_verify_tree_args &args) const {
    return scratch(vwd_verify_tree_scratch, args);
  }
  Return<std::uint64_t> select_blocks_scratch(const vwd_select_blocks_args &args) const {
    return scratch(vwd_select_blocks_scratch, args);
  }
  Return<std::uint64_t> select_tokens_scratch(const vwd_select_tokens_args &args) const {
    return scratch(vwd_select_tokens_scratch, args);
  }
  Return<void> merge_states(const vwd_merge_states_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_merge_states(get(), &args, stream));
  }
  Return<void> repair(const vwd_repair_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_repair(get(), &args, stream));
  }
  Return<void> gather_blocks(const vwd_gather_blocks_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_gather_blocks(get(), &args, stream));
  }
  Return<void> predictor_reset(const vwd_predictor_reset_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_predictor_reset(get(), &args, stream));
  }
  Return<void> predictor_predict(const vwd_predictor_predict_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_predictor_predict(get(), &args, stream));
  }
  Return<void> predictor_update(const vwd_predictor_update_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_predictor_update(get(), &args, stream));
  }
  Return<Calibration> predictor_calibrate(const vwd_predictor_calibrate_args &args) const {
    Calibration best{};
    const vwd_status status = vwd_predictor_calibrate(get(), &args, &best.holt, &best.hit_rate);
    return Report::finish(status, best);
  }

 private:
  template <class Args>
  Return<std::uint64_t> scratch(vwd_status (*call)(const vwd_session *, const Args *, std::uint64_t *),
                                const Args &args) const {
    std::uint64_t bytes = 0;
    const vwd_status status = call(get(), &args, &bytes);
    return Report::finish(status, bytes);
  }

  struct Release {
    void operator()(vwd_session *session) const noexcept { vwd_session_release(session); }
  };
  std::unique_ptr<vwd_session, Release> handle_;
};

/// Linear maps that forecast the next layer's queries. Move-only; keeps what it needs of its session alive.
template <class Report>
class BasicForecast {
  template <class T>
  using Return = typename Report::template Return<T>;

 public:
  BasicForecast() = default;

  static Return<BasicForecast> create(const BasicSession<Report> &session, const vwd_forecast_options &options) {
    vwd_forecast *handle = nullptr;
    const vwd_status status = vwd_forecast_create(session.get(), &options, &handle);
    return Report::finish(status, BasicForecast(handle));
  }
  static Return<BasicForecast> load(const BasicSession<Report> &session, const std::string &path) {
    vwd_forecast *handle = nullptr;
    const vwd_status status = vwd_forecast_load(session.get(), path.c_str(), &handle);
    return Report::finish(status, BasicForecast(handle));
  }

  /// For calls of vanward.h itself; stays owned here.
  vwd_forecast *get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  Return<vwd_forecast_details> info() const {
    auto details = make<vwd_forecast_details>();
    const vwd_status status = vwd_forecast_info(get(), &details);
    return Report::finish(status, details);
  }
  Return<void> accumulate(const vwd_forecast_accumulate_args &args) const {
    return Report::finish(vwd_forecast_accumulate(get(), &args));
  }
  /// Rank 0 keeps the maps whole.
  Return<void> solve(std::uint32_t rank = 0) const { return Report::finish(vwd_forecast_solve(get(), rank)); }
  Return<void> save(const std::string &path) const {
    return Report::finish(vwd_forecast_save(get(), path.c_str()));
  }
  Return<void> project(const vwd_forecast_project_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_forecast_project(get(), &args, stream));
  }

 private:
  explicit BasicForecast(vwd_forecast *handle) : handle_(handle) {}

  struct Release {
    void operator()(vwd_forecast *forecast) const noexcept { vwd_forecast_release(forecast); }
  };
  std::unique_ptr<vwd_forecast, Release> handle_;
};

/// The caches of all layers, whose rows of accepted tree nodes move. Move-only; keeps what it needs of its session alive.
template <class Report>
class BasicCompactor {
  template <class T>
  using Return = typename Report::template Return<T>;

 public:
  BasicCompactor() = default;

  static Return<BasicCompactor> create(const BasicSession<Report> &session, const vwd_compactor_options &options) {
    vwd_compactor *handle = nullptr;
    const vwd_status status = vwd_compactor_create(session.get(), &options, &handle);
    return Report::finish(status, BasicCompactor(handle));
  }

  /// For calls of vanward.h itself; stays owned here.
  vwd_compactor *get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  Return<void> compact(const vwd_compact_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_compact(get(), &args, stream));
  }

 private:
  explicit BasicCompactor(vwd_compactor *handle) : handle_(handle) {}

  struct Release {
    void operator()(vwd_compactor *compactor) const noexcept { vwd_compactor_release(compactor); }
  };
  std::unique_ptr<vwd_compactor, Release> handle_;
};

/// A tiered KV cache. Move-only; keeps what it needs of its session alive.
template <class Report>
class BasicKvCache {
  template <class T>
  using Return = typename Report::template Return<T>;

 public:
  BasicKvCache() = default;

  /// What a cache of these options takes; allocates nothing.
  static Return<vwd_kv_cache_sizes> capacity(const vwd_kv_cache_options &options) {
    auto sizes = make<vwd_kv_cache_sizes>();
    const vwd_status status = vwd_kv_cache_capacity(&options, &sizes);
    return Report::finish(status, sizes);
  }
  /// Shares slots out to layers by the misses of each.
  static Return<void> share_slots(const vwd_kv_cache_share_args &args) {
    return Report::finish(vwd_kv_cache_share_slots(&args));
  }
  static Return<BasicKvCache> create(const BasicSession<Report> &session, const vwd_kv_cache_options &options) {
    vwd_kv_cache *handle = nullptr;
    const vwd_status status = vwd_kv_cache_create(session.get(), &options, &handle);
    return Report::finish(status, BasicKvCache(handle));
  }

  /// For calls of vanward.h itself; stays owned here.
  vwd_kv_cache *get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  /// The number of a new sequence.
  Return<std::uint32_t> add(vwd_stream stream = nullptr) const {
    std::uint32_t sequence = 0;
    const vwd_status status = vwd_kv_cache_add(get(), &sequence, stream);
    return Report::finish(status, sequence);
  }
  Return<void> extend(std::uint32_t sequence, std::uint64_t tokens, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_extend(get(), sequence, tokens, stream));
  }
  /// The number of a new sequence that begins with the first tokens of another.
  Return<std::uint32_t> fork(std::uint32_t sequence, std::uint64_t tokens, vwd_stream stream = nullptr) const {
    std::uint32_t made = 0;
    const vwd_status status = vwd_kv_cache_fork(get(), sequence, tokens, &made, stream);
    return Report::finish(status, made);
  }
  Return<void> truncate(std::uint32_t sequence, std::uint64_t tokens, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_truncate(get(), sequence, tokens, stream));
  }
  Return<void> free(std::uint32_t sequence, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_free(get(), sequence, stream));
  }

  Return<void> append(const vwd_kv_cache_append_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_append(get(), &args, stream));
  }
  Return<void> compact(const vwd_kv_cache_compact_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_compact(get(), &args, stream));
  }
  Return<void> resolve(const vwd_kv_cache_resolve_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_resolve(get(), &args, stream));
  }
  Return<void> fetch(std::uint32_t layer, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_fetch(get(), layer, stream));
  }
  Return<void> wait(std::uint32_t layer, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_kv_cache_wait(get(), layer, stream));
  }

  Return<vwd_kv_cache_layer> view(std::uint32_t layer) const {
    auto view = make<vwd_kv_cache_layer>();
    const vwd_status status = vwd_kv_cache_view(get(), layer, &view);
    return Report::finish(status, view);
  }
  Return<vwd_kv_cache_stats> info() const {
    auto stats = make<vwd_kv_cache_stats>();
    const vwd_status status = vwd_kv_cache_info(get(), &stats);
    return Report::finish(status, stats);
  }
  Return<vwd_kv_cache_stats> layer_info(std::uint32_t layer) const {
    auto stats = make<vwd_kv_cache_stats>();
    const vwd_status status = vwd_kv_cache_layer_info(get(), layer, &stats);
    return Report::finish(status, stats);
  }

 private:
  explicit BasicKvCache(vwd_kv_cache *handle) : handle_(handle) {}

  struct Release {
    void operator()(vwd_kv_cache *cache) const noexcept { vwd_kv_cache_release(cache); }
  };
  std::unique_ptr<vwd_kv_cache, Release> handle_;
};

/// The attention of decode steps on the engine's own paged keys and values. Move-only; keeps what it needs of its session alive.
template <class Report>
class BasicDecoder {
  template <class T>
  using Return = typename Report::template Return<T>;

 public:
  BasicDecoder() = default;

  static Return<BasicDecoder> create(const BasicSession<Report> &session, const vwd_decoder_options &options) {
    vwd_decoder *handle = nullptr;
    const vwd_status status = vwd_decoder_create(session.get(), &options, &handle);
    return Report::finish(status, BasicDecoder(handle));
  }
  /// On a tiered cache, which the decoder keeps alive.
  static Return<BasicDecoder> create(const BasicSession<Report> &session, const vwd_decoder_options &options,
                                     const BasicKvCache<Report> &cache) {
    vwd_decoder *handle = nullptr;
    const vwd_status status = vwd_decoder_create_on_cache(session.get(), &options, cache.get(), &handle);
    return Report::finish(status, BasicDecoder(handle));
  }

  /// For calls of vanward.h itself; stays owned here.
  vwd_decoder *get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  Return<void> begin(const vwd_decoder_step &step, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_decoder_begin(get(), &step, stream));
  }
  /// The args hold predicted queries.
  Return<void> foresee(const vwd_decoder_foresee_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_decoder_foresee(get(), nullptr, &args, stream));
  }
  /// The args hold what the forecast reads. Both are kept by the caller, and what is read is not written, until the stream has passed
  /// the next attend, foresee or begin.
  Return<void> foresee(const BasicForecast<Report> &forecast, const vwd_decoder_foresee_args &args,
                       vwd_stream stream = nullptr) const {
    return Report::finish(vwd_decoder_foresee(get(), forecast.get(), &args, stream));
  }
  Return<void> attend(const vwd_decoder_attend_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_decoder_attend(get(), &args, stream));
  }
  /// Bytes of scratch that attend with these arguments takes on a stream; 0 on a CPU session.
  Return<std::uint64_t> attend_scratch(const vwd_decoder_attend_args &args) const {
    std::uint64_t bytes = 0;
    const vwd_status status = vwd_decoder_attend_scratch(get(), &args, &bytes);
    return Report::finish(status, bytes);
  }
  Return<void> accept(const vwd_decoder_accept_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_decoder_accept(get(), &args, stream));
  }
  Return<void> reset(const vwd_decoder_reset_args &args, vwd_stream stream = nullptr) const {
    return Report::finish(vwd_decoder_reset(get(), &args, stream));
  }
  Return<vwd_decoder_details> info() const {
    auto details = make<vwd_decoder_details>();
    const vwd_status status = vwd_decoder_info(get(), &details);
    return Report::finish(status, details);
  }

 private:
  explicit BasicDecoder(vwd_decoder *handle) : handle_(handle) {}

  struct Release {
    void operator()(vwd_decoder *decoder) const noexcept { vwd_decoder_release(decoder); }
  };
  std::unique_ptr<vwd_decoder, Release> handle_;
};

/// Measured times of a shape on a device, and what speculation they pay for. Move-only; does not need its session any more.
template <class Report>
class BasicBudget {
  template <class T>
  using Return = typename Report::template Return<T>;

 public:
  BasicBudget() = default;

  static Return<BasicBudget> profile(const BasicSession<Report> &session, const vwd_budget_options &options,
                                     vwd_stream stream = nullptr) {
    vwd_budget *handle = nullptr;
    const vwd_status status = vwd_budget_profile(session.get(), &options, stream, &handle);
    return Report::finish(status, BasicBudget(handle));
  }
  static Return<BasicBudget> load(const BasicSession<Report> &session, const vwd_budget_options &options,
                                  const std::string &path) {
    vwd_budget *handle = nullptr;
    const vwd_status status = vwd_budget_load(session.get(), &options, path.c_str(), &handle);
    return Report::finish(status, BasicBudget(handle));
  }

  /// For calls of vanward.h itself; stays owned here.
  vwd_budget *get() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

  Return<void> save(const std::string &path) const { return Report::finish(vwd_budget_save(get(), path.c_str())); }
  Return<vwd_budget_answer> ask(const vwd_budget_question &question) const {
    auto answer = make<vwd_budget_answer>();
    const vwd_status status = vwd_budget_ask(get(), &question, &answer);
    return Report::finish(status, answer);
  }

 private:
  explicit BasicBudget(vwd_budget *handle) : handle_(handle) {}

  struct Release {
    void operator()(vwd_budget *budget) const noexcept { vwd_budget_release(budget); }
  };
  std::unique_ptr<vwd_budget, Release> handle_;
};

namespace nothrow {
using Session = BasicSession<ByResult>;
using Forecast = BasicForecast<ByResult>;
using Compactor = BasicCompactor<ByResult>;
using KvCache = BasicKvCache<ByResult>;
using Decoder = BasicDecoder<ByResult>;
using Budget = BasicBudget<ByResult>;
}  // namespace nothrow

#if defined(__cpp_exceptions)
using Session = BasicSession<ByException>;
using Forecast = BasicForecast<ByException>;
using Compactor = BasicCompactor<ByException>;
using KvCache = BasicKvCache<ByException>;
using Decoder = BasicDecoder<ByException>;
using Budget = BasicBudget<ByException>;
#endif

}  // namespace vanward

#endif  // VANWARD_HPP
