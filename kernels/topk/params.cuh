// Parameters of the kernels of topk.
#pragma once

#include "common/types.cuh"

// Strides are in bytes.
struct TopKParams {
    const char *scores, *lens, *budgets;
    char *ids, *counts, *values;
    char *kept_entries, *kept_counts;  // entries that each slice of a row has kept, MOST_KEPT places each, and how many
    int64 scores_row, scores_entry, lens_row, budgets_row;
    int64 ids_row, ids_entry, counts_row, values_row, values_entry;
    uint32 n, k, capacity, dtype;
    uint32 adjacent;  // entries of a row lie side by side, and four of them are aligned
    uint32 chunks;    // of keys that shared memory has room for
    uint32 slices;    // of a row, that were kept_entries; 0: none
    uint32 one_cta;     // one CTA selects where its registers hold what there is
};

#include "topk/layout.cuh"
