// Where the fields of src/ops/compact/cuda.rs lie: `make kernels` writes this, a test compares it.
#pragma once

#include "common/layout.cuh"

VWD_SIZE(Cache, 96)
VWD_FIELD(Cache, data, 0, 8)
VWD_FIELD(Cache, page, 8, 8)
VWD_FIELD(Cache, row, 16, 8)
VWD_FIELD(Cache, steps, 24, 24)
VWD_FIELD(Cache, run, 48, 12)
VWD_FIELD(Cache, inner, 60, 12)
VWD_FIELD(Cache, middle, 72, 12)
VWD_FIELD(Cache, units, 84, 4)
VWD_FIELD(Cache, log_unit, 88, 4)
VWD_FIELD(Cache, unused, 92, 4)

VWD_SIZE(Tile, 8)
VWD_FIELD(Tile, cache, 0, 4)
VWD_FIELD(Tile, first, 4, 4)

VWD_SIZE(CompactParams, 144)
VWD_FIELD(CompactParams, caches, 0, 8)
VWD_FIELD(CompactParams, tiles, 8, 8)
VWD_FIELD(CompactParams, page_table, 16, 24)
VWD_FIELD(CompactParams, bases, 40, 16)
VWD_FIELD(CompactParams, path, 56, 24)
VWD_FIELD(CompactParams, accepted, 80, 16)
VWD_FIELD(CompactParams, tile_count, 96, 4)
VWD_FIELD(CompactParams, base_bytes, 100, 4)
VWD_FIELD(CompactParams, places, 104, 4)
VWD_FIELD(CompactParams, pages, 108, 4)
VWD_FIELD(CompactParams, rows, 112, 12)
VWD_FIELD(CompactParams, capacity, 124, 4)
VWD_FIELD(CompactParams, ctas, 128, 12)
VWD_FIELD(CompactParams, unused, 140, 4)

VWD_CONSTANT(WARPS, 4)
VWD_CONSTANT(TILE_UNITS, 64)
