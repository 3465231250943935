// Where an index keeps the summaries of each sequence.
#pragma once

#include "common/types.cuh"

// Pages of `rows` summaries. A table [B, pages of a sequence] says which pages a sequence has; without one, sequence i has page i. Strides are
// in bytes.
struct Place {
    const char *table;
    int64 table_seq, table_page;
    uint32 pages, rows, capacity;

    // Page and row of summary j of sequence i; false where it has none.
    __device__ bool find(uint32 i, uint32 j, uint32 &page, uint32 &row) const {
        if (j >= capacity) return false;
        page = i, row = j;
        if (!table) return true;
        const uint32 n = j / rows;
        page = as<uint32>(table + i * table_seq + n * table_page), row = j - n * rows;
        return page < pages;
    }
};

// A tensor [pages, rows, Hk, …]; strides are in bytes.
struct Summary {
    char *data;
    int64 page, row, head, channel;

    __device__ char *at(uint32 p, uint32 r, uint32 g) const { return data + p * page + r * row + g * head; }
};
