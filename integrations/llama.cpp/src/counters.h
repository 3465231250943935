// What happened, for logs and tests.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#define VANWARD_GGML_COUNTERS(X)                                                                                               \
    X(sparse, "attentions over selected blocks")                                                                               \
    X(dense, "attentions over every visible token")                                                                            \
    X(selected_beside, "selections on a GPU that were enqueued as soon as the queries were, beside the layer's keys and values") \
    X(writes, "writes of keys or values")                                                                                      \
    X(passed, "attentions passed to ggml because of what the mask holds, or after an error")                                   \
    X(errors, "calls into Vanward that failed")                                                                                \
    X(declined_rows, "attentions left to ggml: more rows than a decode step has")                                              \
    X(declined_short, "attentions left to ggml: the cache is below the threshold, or on a GPU all sequences are")              \
    X(declined_threads, "attentions left to ggml: several threads, and they are not OpenMP's")                                 \
    X(declined_type, "attentions left to ggml: another type of cache, shape or bias")                                          \
    X(declined_trained, "attentions left to ggml: the model selects by itself")                                                \
    X(declined_early, "attentions left to ggml: the cache was not written yet")                                                \
    X(stale, "tokens whose summaries were made anew, since their keys had changed outside of graphs")                         \
    X(shifts, "shifts of keys")                                                                                                \
    X(sequences, "sequences of visible tokens that were begun")                                                                \
    X(summarised, "tokens that were summarised")                                                                               \
    X(captured, "steps captured in a new CUDA graph")                                                                          \
    X(updated, "steps captured in a CUDA graph that was brought up to date")                                                   \
    X(replayed, "steps launched as the CUDA graph of the step before")                                                         \
    X(eager, "steps on a GPU whose kernels were enqueued one by one")                                                          \
    X(looked_through, "graphs on a GPU whose nodes were looked at; others have a number of ggml's that says they are those of the graph before") \
    X(kept_inputs, "masks and numbers of rows on a GPU that were known from what the host wrote there")                        \
    X(read_inputs, "masks and numbers of rows that were read back from a GPU")                                                 \
    X(read_ns, "ns in which steps on a GPU waited for the step before, and for masks and numbers of rows")                     \
    X(plan_ns, "ns in which the host found the sequences of steps on a GPU, and laid out arrays for them")                     \
    X(launch_ns, "ns in which the host launched or enqueued steps on a GPU")                                                   \
    X(checked, "attentions that were checked")                                                                                 \
    X(wrong_inputs, "checked masks and numbers of rows that were known, and differ from what the GPU has")                     \
    X(wrong_summaries, "checked blocks whose summary differs")                                                                 \
    X(wrong_tokens, "checked rows that would see other tokens than the mask says")                                             \
    X(wrong_outputs, "checked rows whose result differs from a plain loop over their tokens")

namespace vanward {

struct Counters {
#define X(name, meaning) std::atomic<uint64_t> name{0};
    VANWARD_GGML_COUNTERS(X)
#undef X
};

extern Counters counters;

/** Adds the time in which it lives to a counter. */
class Timed {
  public:
    explicit Timed(std::atomic<uint64_t> &ns) : ns_(ns) {}
    ~Timed() { ns_ += static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count()); }
    Timed(const Timed &) = delete;
    Timed &operator=(const Timed &) = delete;

  private:
    std::atomic<uint64_t> &ns_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace vanward
