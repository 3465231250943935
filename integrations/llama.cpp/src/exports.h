// What the library exports. ggml calls the first; the others are also found by `ggml_backend_reg_get_proc_address`.
#pragma once

#include "ggml-backend.h"

#define VANWARD_EXPORT extern "C" __attribute__((visibility("default")))

/** ggml's entry: the registry, or NULL with a line in ggml's log where this ggml or an option is not understood. */
VANWARD_EXPORT ggml_backend_reg_t ggml_backend_init();

/** How often something happened in this process, by its name in src/counters.h; 0 for an unknown name. Thread-safe. */
VANWARD_EXPORT uint64_t vanward_ggml_counter(const char *name);

/**
 * Reads the options from the environment again, for measurements that change the strategy, the budget, the thresholds or whether anything is
 * taken, under one cache. What contexts have begun with stays: the method, the block size, the devices. Returns NULL, or what is wrong, in which
 * case the options stay as they were. Not while a graph is computed. Found by `ggml_backend_reg_get_proc_address` alone.
 */
extern "C" const char *vanward_ggml_read_options();

/**
 * Forgets every summary; they are made anew when next needed. For programs that write keys of a cache themselves, unseen by ggml.
 * Waits for attentions that are being computed. Thread-safe.
 */
VANWARD_EXPORT void vanward_ggml_forget_summaries();
