// How the CTAs of an update share the summaries of a sequence and head.
#pragma once

#include "index/params.cuh"

constexpr uint32 THREADS = 256;

// The summaries of a sequence that its new tokens change: begin … end−1, and the sequence's length.
struct Stale {
    uint32 len, begin, end;
};

// The blocks that a sequence's new tokens change.
__device__ inline Stale stale_blocks(const UpdateParams &p, const int2 &lengths) {
    Stale stale;
    stale.len = p.keys.length(lengths, stale.begin);
    const bool none = stale.begin == stale.len;
    stale.begin = p.size_of.divide(stale.begin), stale.end = none ? stale.begin : p.size_of.divide(stale.len - 1) + 1;
    return stale;
}

// A CTA's share: every `slices`-th summary, or group of summaries, of a layer's sequence and head.
struct CtaShare : Owner {
    uint32 slice, slices;
    const LayerShift &shift;

    __device__ CtaShare(const UpdateParams &p, const Layers &layers) : CtaShare(p, layers, p.slices_of.divide(p.heads_of.divide(blockIdx.x))) {}

private:
    // n: the number of the sequence, counted over all layers.
    __device__ CtaShare(const UpdateParams &p, const Layers &layers, uint32 n) : slices(p.slices), shift(layers.shift[p.batch_of.divide(n)]) {
        const uint32 of_heads = p.heads_of.divide(blockIdx.x);
        seq = n - p.batch_of.divide(n) * p.batch, slice = of_heads - n * slices, head = blockIdx.x - of_heads * p.keys.kv_heads;
        keys = shift.keys + head * p.keys.head, scale = shift.scale + head * p.keys.scale_head;
    }
};

// A summary, and the page and row where it is stored.
struct Target {
    uint32 j, page, row;
    bool exists;

    Target() = default;
    __device__ Target(const UpdateParams &p, const CtaShare &cta, const Stale &stale, uint32 j) : j(j) {
        exists = j < stale.end && p.place.find(cta.seq, j, page, row);
    }
};

// Where a summary goes in one of the index's tensors.
__device__ inline char *summary_at(const Summary &of, int64 shift, const CtaShare &cta, const Target &to) {
    return of.at(to.page, to.row, cta.head) + shift;
}

// A barrier of `count` threads, in whole warps; barrier 0 is that of __syncthreads().
__device__ inline void sync_threads(uint32 number, uint32 count) { asm volatile("barrier.sync %0, %1;" ::"r"(number), "r"(count) : "memory"); }

// x, but 0 for negative numbers and NaN.
__device__ inline float positive(float x) { return x > 0.0f ? x : 0.0f; }

// Quantises to INT4: value ≈ min + scale · code. Where no value is a number, low exceeds high and the minimum is NaN.
struct Range {
    uint16 scale_bits, min_bits;
    float least, scale, share;

    __device__ Range(float low, float high) {
        constexpr float MOST = 65504.0f;  // the largest float16
        min_bits = low <= high ? narrow_float16(fminf(fmaxf(low, -MOST), MOST)) : 0x7e00;
        scale_bits = narrow_float16(fminf(positive(divide(high - low, 15.0f, 1.0f / 15.0f, MOST)), MOST));
        least = widen_float16(min_bits), scale = widen_float16(scale_bits), share = 1.0f / scale;
    }
    __device__ uint32 code(float x) const {
        // Adding 2^23 rounds to a whole number, ties to even, and leaves it in the low bits.
        return scale == 0.0f ? 0u : __float_as_uint(fminf(positive(divide(x - least, scale, share, 16.0f)), 15.0f) + 8388608.0f) & 15;
    }

private:
    // x / y, correctly rounded, from the rounded 1 / y: a product, and a correction by its remainder. A quotient above `most` gives some value
    // above `most`; a tiny x gives some tiny value.
    __device__ static float divide(float x, float y, float share, float most) {
        const float near = fminf(__fmul_rn(x, share), most);
        return fmaf(fmaf(-near, y, x), share, near);
    }
};
