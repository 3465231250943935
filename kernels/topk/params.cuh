// Parameters of the top-k kernels. R: rows; n: scores of a row.
#pragma once

#include "common/cta_topk.cuh"

constexpr uint32 SHORT = 512, LONG = 1024, PREFILTER_THREADS = 512;  // threads of the kernels for short and long rows and of the prefilter
constexpr uint32 SAMPLE = 8192;          // scores of a row that the prefilter samples
constexpr uint32 MOST_EXPECTED = 12288;  // the most entries that the prefilter may expect to keep
// What the prefilter keeps of a row: up to MOST_KEPT entries for each slice, each a key and its index.
constexpr uint32 MOST_KEPT = 6144, MOST_SLICES = 512;

// Strides are in bytes.
struct TopKParams {
    const char *scores, *lens, *budgets;
    char *ids, *counts, *values;
    char *kept_entries, *kept_counts;  // prefilter: [R, slices, MOST_KEPT] entries that are kept, [R, slices] how many
    int64 scores_row, scores_entry, lens_row, budgets_row;
    int64 ids_row, ids_entry, counts_row, values_row, values_entry;
    uint32 n, k, capacity, dtype;
    uint32 adjacent;  // a row's scores lie side by side, and groups of four are aligned
    uint32 chunks;    // chunks of keys for which a CTA's shared memory has room
    uint32 slices;    // slices of a row that the prefilter took; 0: it did not run
    uint32 one_cta;   // one CTA selects where its registers hold the row or what the prefilter kept
};

#include "topk/layout.cuh"
