// Tiles of keys and values as boxes of tensors, for verify128 and verify128_short.
#pragma once

#include "attention/attention.cuh"
#include "common/tensor_map.cuh"
#include "common/warpgroup.cuh"

// A box is a tile's part of a slab: 16 tokens of a KV head, 64 channels. Dimensions of the tensors, the innermost first: channel, row of a page, KV head, page.
// The second parameter of kernels that take boxes. Mirrored in src/ops/attention/device/boxes.rs.
struct Boxes {
    TensorMap keys, values;
    uint32 exist;  // 1: there are maps, and granules are tiles

    // Called by one thread, early.
    __device__ void prefetch() const {
        if (!exist) return;
        keys.prefetch();
        values.prefetch();
    }
};
constexpr uint32 BOX_BYTES = TILE * SLAB_WIDTH;
constexpr uint32 BOXES_BYTES = 384;
VWD_SIZE(Boxes, BOXES_BYTES)
VWD_FIELD(Boxes, exist, 256, 4)
