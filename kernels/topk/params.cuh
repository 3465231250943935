// Parameters of the top-k kernels. R: rows; n: scores of a row.
#pragma once

#include "common/types.cuh"

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
