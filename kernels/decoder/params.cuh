// Parameters of the decoder's kernels. Strides are in bytes.
#pragma once

#include "common/types.cuh"

constexpr uint32 THREADS = 128;

// What `lens` has of each row: positions that attend a selection, and all tokens; of the former those of rows whose earlier tokens are all
// summarised, and of the others; tokens, if the row is sparse.
enum Kind : uint32 { Sparse, Dense, Known, New, Tokens, KINDS };

// An int32 for each row, or null.
struct Entries {
    const char *data;
    int64 step;

    __device__ int32 at(uint32 i) const { return as<int32>(data + i * step); }
    __device__ int32 at_or(uint32 i, int32 other) const { return data ? at(i) : other; }
};

struct DistributeParams {
    Entries modes, seq_lens, q_lens, begin;  // [B]; modes, q_lens and begin may be null
    const int32 *thresholds;                 // [classes]
    int32 *lens;                             // [classes, KINDS, max_rows]
    int32 *rows, *from, *places;             // [max_rows]; places may be null
    // With a tiered cache, whose pages are blocks, else null: how many leading blocks dense rows read in host memory [max_rows], and ids
    // [max_rows, newest] and number [max_rows] of the blocks after them.
    int32 *stored, *newest_ids, *newest_counts;
    // [window_count]; of the blocks read in host memory, ids [window_count, max_rows, seen_cap] and number [window_count, max_rows] of those that a
    // row's positions see through each window.
    const int32 *windows;
    int32 *seen_ids, *seen_counts;
    const int32 *floors;  // with a tiered cache: the first token that `begin` may have summarised anew [max_rows]
    int32 mode, positions, page_size;
    uint32 batch, classes, max_rows, shortest;
    uint32 table_blocks, newest;  // the most blocks that a row has; the most that come after stored ones
    uint32 window_count, seen_cap, unused;
    // With the term for what lists leave out, else null: the sequence of a row that takes part, or −1; the number of tokens that its sums are of;
    // the first one that is new or was replaced [max_rows].
    Entries sequences;  // [B], or null
    int32 *counted_rows, *counted_lens, *counted_begin;
    uint32 sequence_count;
    int32 drafts;  // the newest tokens before the step, which may yet be rejected
};

// Rows of channels that are copied: [B or pages, Q or P, heads, channels] on both sides.
struct Copied {
    const char *from;
    char *to;
    int64 from_steps[4], to_steps[4];
    uint32 bytes, log_unit;  // of a row of channels; of the unit that a lane copies
};

struct AppendParams {
    Copied parts[2];
    Entries seq_lens;
    const char *table;  // [B, max_pages] int32, or null: sequence i has page i
    int64 table_seq, table_page;
    const int32 *rows;  // [B]
    uint64 capacity;    // tokens that the pages of a sequence have room for
    uint32 batch, positions, heads, pages, page_size;
};

struct TakeParams {
    Copied part;
    const int32 *lens;  // [B]
    uint32 batch, positions, heads;
};

struct CompleteParams {
    const int32 *lens, *places;  // [lists / heads]
    int32 *ids, *counts;         // [lists, capacity] and [lists]
    uint32 lists, heads, capacity, block_size;
};

// Lists of a step's rows, and those that their sequences had at the step before.
struct PastParams {
    Entries sequences;           // [B] or null
    const int32 *lens, *places;  // [B]; lens null: the lists of the sequences are emptied
    int32 *ids, *counts;         // [B, heads, capacity] and [B, heads]
    int32 *past_ids, *past_counts;  // [count, heads, past_capacity] and [count, heads]
    uint32 lists, heads, capacity, past_capacity, block_size, init, count;
};

struct ObserveParams {
    Entries sequences, accepted, draft_lens;  // [B]; sequences and draft_lens may be null; accepted null: the sequences are reset
    float *hits, *trials, *acceptance;        // [count]
    int32 *recommended, *total_drafted, *total_accepted;
    float cost;
    int32 most, gamma;
    uint32 count, rows;
};

#include "decoder/layout.cuh"
