// Summaries of keys.
//
//   MINMAX  max[j, c], min[j, c] over the tokens of block j · MEAN  Σ_t k[t, c] / window over the tokens of window j, in their order
//   LABEL   code[t, n] = rne((x[n] − min) / scale) in 0 … 15, of the chosen channels x of token t; min and scale float16
//
// Bytes: the keys of the range, once (MEAN: window/stride times, from the L1 cache but for the first); summaries are a small part of that.
// A token of a decoding step costs one memory round trip where its block or window was guessed, and else two or three.
//
// Which kernel runs when: index_minmax_*, index_means_* and index_labels by the kind of the index; the number is the bits of a key's element.
//
// Split: `slices` CTAs for each sequence and head take turns at the summaries that its new tokens change. Lengths lie on the device, so that the
// grid cannot depend on how many these are. A slot is the lanes of a key, eight channels each.
//   MINMAX: a warp takes a block where many change; where few change, `split` slots share a block's tokens and join in shared memory.
//   MEAN: a slot takes neighbouring windows, so that a token in two windows is read once; where few windows change, a thread takes a channel.
//   LABEL: a warp takes a token.
//
// On entry: lanes and split are powers of two, lanes ≤ 32, lanes · split ≤ 256; D is a multiple of 8.
#pragma once

#include "index/cta_share.cuh"

__device__ inline void extend(float (&largest)[8], float (&smallest)[8], const float (&x)[8]) {
#pragma unroll
    for (uint32 i = 0; i < 8; i++) largest[i] = fmaxf(largest[i], x[i]), smallest[i] = fminf(smallest[i], x[i]);  // NaN is ignored
}

__device__ inline void clear(float (&largest)[8], float (&smallest)[8]) {
#pragma unroll
    for (uint32 i = 0; i < 8; i++) largest[i] = minus_infinity(), smallest[i] = -minus_infinity();
}

// Extends the extremes by every `slots`-th token of block j from token `slot` on, COUNT tokens at a time.
template <uint32 BYTES, uint32 COUNT>
__device__ inline void extremes(const UpdateParams &p, const CtaShare &cta, const Stale &stale, uint32 j, uint32 slot, uint32 slots, uint32 c,
                                float (&largest)[8], float (&smallest)[8]) {
    const uint32 begin = j * p.size, end = min(p.size, stale.len - begin) + begin;
    for (uint32 t = begin + slot; t < end; t += COUNT * slots) {
        Fetched<BYTES, COUNT> keys;
        float x[8];
        if (keys.load(p.keys, cta, c, t, slots, end)) {
            if (!keys.exist) continue;
#pragma unroll
            for (uint32 n = 0; n < COUNT; n++) {
                if (t + n * slots >= end) break;
                keys.widen(p.keys, n, x);
                extend(largest, smallest, x);
            }
        } else {
#pragma unroll 1
            for (uint32 u = t; u < min(t + COUNT * slots, end); u += slots)
                if (fetch_one<BYTES>(p.keys, cta, c, u, x)) extend(largest, smallest, x);
        }
    }
}

// Zeros are stored as +0, whichever sign came first.
__device__ inline void store_extremes(const UpdateParams &p, const CtaShare &cta, const Target &target, const Summary &to, int64 shift, uint32 c,
                                      float (&x)[8]) {
#pragma unroll
    for (uint32 i = 0; i < 8; i++) x[i] += 0.0f;
    store_eight(summary_at(to, shift, cta, target) + c * to.channel, to.channel, p.dtype, x);
}

// Each warp takes a block, and waits for no other warp.
template <uint32 BYTES> __device__ inline void minmax_by_warps(const UpdateParams &p, const CtaShare &cta, const Stale &stale) {
    constexpr uint32 COUNT = BYTES == 2 ? 6 : 4, WARPS = THREADS / WARP;
    const uint32 log_lanes = log2_of(p.lanes), lane = threadIdx.x & (p.lanes - 1), slots = WARP >> log_lanes, slot = threadIdx.x % WARP >> log_lanes;
    for (uint32 j = stale.begin + cta.slice * WARPS + threadIdx.x / WARP; j < stale.end; j += cta.slices * WARPS) {
        const Target target(p, cta, stale, j);
        if (!target.exists) continue;
        for (uint32 first = 0; first < p.keys.dim; first += p.lanes * 8) {
            const uint32 c = first + lane * 8;
            float largest[8], smallest[8];
            clear(largest, smallest);
            if (c < p.keys.dim) extremes<BYTES, COUNT>(p, cta, stale, j, slot, slots, c, largest, smallest);
            for (uint32 bit = p.lanes; bit < WARP; bit *= 2) {
#pragma unroll
                for (uint32 i = 0; i < 8; i++) {
                    largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], bit));
                    smallest[i] = fminf(smallest[i], __shfl_xor_sync(FULL_WARP, smallest[i], bit));
                }
            }
            if (c >= p.keys.dim) continue;
            if (slot == 0) store_extremes(p, cta, target, p.first, cta.shift.first, c, largest);
            if (slot == slots - 1) store_extremes(p, cta, target, p.second, cta.shift.second, c, smallest);
        }
    }
}

// For few blocks: `split` slots share the tokens of a block, and the CTA takes `together` blocks at a time.
template <uint32 BYTES> struct Joint {
    static constexpr uint32 ROW = THREADS + 4;  // rows lie four banks apart
    static constexpr uint32 COUNT = 4;
    const UpdateParams &p;
    const CtaShare &cta;
    float *const part;  // [16][ROW]
    const uint32 log_lanes, log_split, log_together, together, slot, within, c;

    __device__ Joint(const UpdateParams &p, const CtaShare &cta, float *part)
        : p(p), cta(cta), part(part), log_lanes(log2_of(p.lanes)), log_split(log2_of(p.split)), log_together(log2_of(THREADS) - log_lanes - log_split),
          together(1u << log_together), slot(threadIdx.x >> log_lanes), within(slot & (p.split - 1)), c((threadIdx.x & (p.lanes - 1)) * 8) {}

    // Joins and stores the extremes of blocks from j on and channels from `first` on, of which each thread has found its part.
    __device__ void store(const Stale &stale, uint32 j, uint32 first, const float (&largest)[8], const float (&smallest)[8]) const {
#pragma unroll
        for (uint32 i = 0; i < 8; i++) part[i * ROW + threadIdx.x] = largest[i], part[(8 + i) * ROW + threadIdx.x] = smallest[i];
        __syncthreads();
        // Threads go from channel to channel, maxima first.
        for (uint32 out = threadIdx.x; out < together << log_lanes + 4; out += THREADS) {
            const uint32 channel = out & (8 << log_lanes) - 1, n = out >> log_lanes + 3, which = n >> log_together, block = n & (together - 1);
            const float *joined = part + (which * 8 + channel % 8) * ROW + (block << log_split + log_lanes) + channel / 8;
            const Target of(p, cta, stale, j + block);
            float x = joined[0];
            for (uint32 begin = 0; begin < p.split; begin += 8) {
                float other[8];
#pragma unroll
                for (uint32 i = 0; i < 8; i++) other[i] = joined[min(begin + i, p.split - 1) << log_lanes];
#pragma unroll
                for (uint32 i = 0; i < 8; i++) x = which ? fminf(x, other[i]) : fmaxf(x, other[i]);
            }
            const Summary &to = which ? p.second : p.first;
            // Zeros are stored as +0, whichever sign came first.
            if (of.exists && first + channel < p.keys.dim)
                store_element(summary_at(to, which ? cta.shift.second : cta.shift.first, cta, of) + (first + channel) * to.channel, p.dtype, x + 0.0f);
        }
        __syncthreads();
    }

    // Waits for the kernel before, and loads the lengths. Returns true where the guessed block was all that changed, and is stored.
    __device__ bool take_guessed(Stale &stale) const {
        const bool fits = cta.slice == 0 && p.size <= COUNT * p.split && p.keys.dim <= 8 << log_lanes;
        const uint32 likely = fits ? stale_blocks(p, p.keys.likely_lengths(cta.seq)).begin : 0;
        const Guess guess(p.keys, cta, likely * p.size, fits ? p.size : ~0u);
        const bool asks = guess.key && slot < p.split && c < p.keys.dim;
        wait_for_previous_kernel();
        const int2 lengths = p.keys.lengths(cta.seq);
        const uint32 page = guess.page_now();
        Eight<BYTES> eight[COUNT];
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) {
            eight[n].clear();
            if (asks && within + n * p.split < p.size) eight[n].request(guess.key + (within + n * p.split) * p.keys.token + c * BYTES);
        }
        stale = stale_blocks(p, lengths);
        // Threads may have read different guesses.
        if (!__syncthreads_and(guess.key && guess.page == page && stale.begin == likely && stale.end == likely + 1)) return false;
        float largest[8], smallest[8], x[8];
        clear(largest, smallest);
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) {
            if (!asks || within + n * p.split >= stale.len - likely * p.size) break;
            eight[n].widen(x, p.keys.dtype);
            extend(largest, smallest, x);
        }
        store(stale, likely, 0, largest, smallest);
        return true;
    }
    __device__ void take(const Stale &stale) const {
        for (uint32 j = stale.begin + cta.slice * together; j < stale.end; j += cta.slices * together) {
            const Target target(p, cta, stale, j + (slot >> log_split));
            for (uint32 first = 0; first < p.keys.dim; first += 8 << log_lanes) {
                float largest[8], smallest[8];
                clear(largest, smallest);
                if (target.exists && first + c < p.keys.dim) extremes<BYTES, COUNT>(p, cta, stale, target.j, within, p.split, first + c, largest, smallest);
                store(stale, j, first, largest, smallest);
            }
        }
    }
};

template <uint32 BYTES> __device__ inline void update_minmax(const UpdateParams &p, const Layers &layers) {
    __shared__ float part[16 * Joint<BYTES>::ROW];
    allow_next_kernel();
    const CtaShare cta(p, layers);
    const Joint<BYTES> joint(p, cta, part);
    Stale stale;
    if (joint.take_guessed(stale)) return;
    if (stale.end - stale.begin >= cta.slices * (THREADS / WARP)) return minmax_by_warps<BYTES>(p, cta, stale);
    joint.take(stale);
}

__device__ inline void add(float (&sum)[8], const float (&x)[8]) {
#pragma unroll
    for (uint32 i = 0; i < 8; i++) sum[i] = __fadd_rn(sum[i], x[i]);
}
__device__ inline void spoil(float (&sum)[8]) {
#pragma unroll
    for (uint32 i = 0; i < 8; i++) sum[i] = __uint_as_float(0x7fc00000);
}

__device__ inline void store_mean(const UpdateParams &p, const CtaShare &cta, const Stale &stale, uint32 j, uint32 c, float (&sum)[8]) {
    const Target target(p, cta, stale, j);
    if (!target.exists) return;
    const float share = 1.0f / float(p.size);
#pragma unroll
    for (uint32 i = 0; i < 8; i++) sum[i] = __fmul_rn(sum[i], share);
    store_eight(summary_at(p.first, cta.shift.first, cta, target) + c * p.first.channel, p.first.channel, p.dtype, sum);
}

// Adds up `count` windows from `first` on, step by step. A token of step j lies in window j, and in window j − 1 up to its end. Where windows
// are longer than two steps, `count` is 1 and a step is the window.
template <uint32 BYTES>
__device__ inline void add_windows(const UpdateParams &p, const CtaShare &cta, const Stale &stale, uint32 first, uint32 count, uint32 c) {
    constexpr uint32 COUNT = BYTES == 2 ? 16 : 8;
    const uint32 step = count > 1 ? min(p.stride, p.size) : p.size, overlap = p.size - step;
    float now[8] = {}, before[8];
    for (uint32 j = first; j <= first + count; j++) {
        const bool opens = j < first + count;
        const uint32 begin = j * p.stride, end = begin + (opens ? step : overlap), until = j > first ? begin + overlap : begin;
#pragma unroll
        for (uint32 i = 0; i < 8; i++) before[i] = now[i], now[i] = 0.0f;
        for (uint32 t = begin; t < end; t += COUNT) {
            Fetched<BYTES, COUNT> keys;
            float x[8];
            if (keys.load(p.keys, cta, c, t, 1, end)) {
                if (!keys.exist) {
                    spoil(now);
                    if (t < until) spoil(before);
                }
#pragma unroll
                for (uint32 n = 0; n < COUNT; n++) {
                    if (t + n >= end || !keys.exist) break;
                    keys.widen(p.keys, n, x);
                    add(now, x);
                    if (t + n < until) add(before, x);
                }
            } else {
#pragma unroll 1
                for (uint32 u = t; u < min(t + COUNT, end); u++) {
                    const bool exists = fetch_one<BYTES>(p.keys, cta, c, u, x);
                    exists ? add(now, x) : spoil(now);
                    if (u < until) exists ? add(before, x) : spoil(before);
                }
            }
        }
        if (j > first) store_mean(p, cta, stale, j - 1, c, before);
    }
}

// One channel of neighbouring tokens, which are in flight together.
template <uint32 BYTES> struct Channel {
    static constexpr uint32 COUNT = 32;
    uint32 bits[COUNT];
    float factor[BYTES == 1 ? COUNT : 1];

    __device__ void request(const Keys &k, const char *key, const char *scale, uint32 count) {
#pragma unroll
        for (uint32 m = 0; m < COUNT; m++, key += k.token, scale += k.scale_token) {
            if (m >= count) break;
            bits[m] = request_bits<BYTES>(key);
            if (BYTES == 1) factor[m] = k.scale ? as<float>(scale) : 1.0f;
        }
    }
    __device__ float add_to(float sum, const Keys &k, uint32 count) const {
#pragma unroll
        for (uint32 m = 0; m < COUNT; m++) {
            if (m >= count) break;
            const float x = BYTES == 4   ? __uint_as_float(bits[m])
                            : BYTES == 1 ? widen_float8(bits[m], k.dtype == FLOAT8_E4M3)
                            : k.dtype == BFLOAT16 ? widen_bfloat16(bits[m])
                                                  : widen_float16(bits[m]);
            sum = __fadd_rn(sum, BYTES == 1 ? k.value(x, factor[BYTES == 1 ? m : 0]) : x);
        }
        return sum;
    }
};

__device__ inline void store_channel(const UpdateParams &p, const CtaShare &cta, const Stale &stale, uint32 j, uint32 c, float sum) {
    const Target target(p, cta, stale, j);
    if (!target.exists) return;
    store_element(summary_at(p.first, cta.shift.first, cta, target) + c * p.first.channel, p.dtype, __fmul_rn(sum, 1.0f / float(p.size)));
}

// Adds up one channel of a window, with the bits of add_windows.
template <uint32 BYTES> __device__ inline void add_channel(const UpdateParams &p, const CtaShare &cta, const Stale &stale, uint32 j, uint32 c) {
    constexpr uint32 COUNT = Channel<BYTES>::COUNT;
    const Keys &k = p.keys;
    const uint32 begin = j * p.stride, end = begin + p.size;
    float sum = 0.0f;
#pragma unroll 1
    for (uint32 t = begin; t < end; t += COUNT) {
        const uint32 count = min(COUNT, end - t);
        uint32 at = cta.seq, n = t;
        if (k.table) {
            const uint32 q = k.page_of.divide(t);
            at = as<uint32>(k.table + cta.seq * k.table_seq + q * k.table_page), n = t - q * k.page_size;
            if (n + count > k.page_size) {
#pragma unroll 1
                for (uint32 u = t; u < t + count; u++) {
                    float factor;
                    const char *key = k.find(cta, u, factor);
                    sum = key ? __fadd_rn(sum, k.value(load_element(key + c * k.channel, k.dtype), factor)) : __uint_as_float(0x7fc00000);
                }
                continue;
            }
        }
        if (at >= k.pages) {
            sum = __uint_as_float(0x7fc00000);
            continue;
        }
        Channel<BYTES> channel;
        channel.request(k, k.key(cta, at, n) + c * k.channel, k.scale_of(cta, at, n), count);
        sum = channel.add_to(sum, k, count);
    }
    store_channel(p, cta, stale, j, c, sum);
}

// The number of windows that are full once there are `len` tokens.
__device__ inline uint32 full_windows(const UpdateParams &p, uint32 len) { return len < p.size ? 0 : p.stride_of.divide(len - p.size) + 1; }

__device__ inline Stale stale_windows(const UpdateParams &p, const int2 &lengths) {
    Stale stale;
    stale.len = p.keys.length(lengths, stale.begin);
    stale.begin = full_windows(p, stale.begin), stale.end = full_windows(p, stale.len);
    return stale;
}

// Waits for the kernel before, and loads the lengths. Returns true where the guessed window was all that changed, and is stored.
template <uint32 BYTES> __device__ inline bool take_guessed_window(const UpdateParams &p, const CtaShare &cta, Stale &stale) {
    const bool fits = cta.slice == 0 && p.size <= Channel<BYTES>::COUNT && p.keys.dim <= THREADS;
    const uint32 likely = fits ? stale_windows(p, p.keys.likely_lengths(cta.seq)).begin : 0, c = threadIdx.x;
    const Guess guess(p.keys, cta, likely * p.stride, fits ? p.size : ~0u);
    wait_for_previous_kernel();
    const int2 lengths = p.keys.lengths(cta.seq);
    const uint32 page = guess.page_now();
    Channel<BYTES> channel;
    if (guess.key && c < p.keys.dim) channel.request(p.keys, guess.key + c * p.keys.channel, nullptr, p.size);
    stale = stale_windows(p, lengths);
    if (!guess.key || guess.page != page || stale.begin != likely || stale.end != likely + 1) return false;
    if (c < p.keys.dim) store_channel(p, cta, stale, likely, c, channel.add_to(0.0f, p.keys, p.size));
    return true;
}

template <uint32 BYTES> __device__ inline void update_means(const UpdateParams &p, const Layers &layers) {
    constexpr uint32 MOST_TOGETHER = 8;
    allow_next_kernel();
    const CtaShare cta(p, layers);
    Stale stale;
    if (take_guessed_window<BYTES>(p, cta, stale)) return;
    const uint32 log_lanes = log2_of(p.lanes), slots = THREADS >> log_lanes, all = cta.slices * slots, windows = stale.end - stale.begin;
    // For few windows, a CTA takes a window and a thread a channel.
    if (windows <= cta.slices) {
        if (cta.slice < windows)
            for (uint32 c = threadIdx.x; c < p.keys.dim; c += THREADS) add_channel<BYTES>(p, cta, stale, stale.begin + cta.slice, c);
        return;
    }
    // A slot takes a few neighbouring windows, if all slots have some then.
    const uint32 count = p.size > 2 * p.stride || windows < 2 * all ? 1 : min(windows / all, MOST_TOGETHER);
    for (uint32 j = stale.begin + (cta.slice * slots + (threadIdx.x >> log_lanes)) * count; j < stale.end; j += all * count)
        for (uint32 c = (threadIdx.x & (p.lanes - 1)) * 8; c < p.keys.dim; c += p.lanes * 8)
            add_windows<BYTES>(p, cta, stale, j, min(count, stale.end - j), c);
}

// A warp writes the label of one token and head. value(n) is the value of chosen channel n; `own` holds the lane's first two.
template <typename Value> __device__ inline void write_label(const UpdateParams &p, const CtaShare &cta, const Target &target, const float2 &own, const Value &value) {
    const uint32 lane = threadIdx.x % WARP, pairs = p.kept / 2;
    const auto pair = [&](uint32 n) { return n == lane ? own : make_float2(value(2 * n), value(2 * n + 1)); };
    float low = -minus_infinity(), high = minus_infinity();
    for (uint32 n = lane; n < pairs; n += WARP) {
        const float2 x = pair(n);
        low = fminf(low, fminf(x.x, x.y)), high = fmaxf(high, fmaxf(x.x, x.y));  // NaN is ignored
    }
#pragma unroll
    for (uint32 bit = 1; bit < WARP; bit *= 2)
        low = fminf(low, __shfl_xor_sync(FULL_WARP, low, bit)), high = fmaxf(high, __shfl_xor_sync(FULL_WARP, high, bit));
    low += 0.0f;
    const Range range(low, high);
    for (uint32 n = lane; n < pairs; n += WARP) {
        const float2 x = pair(n);
        as<uint8>(summary_at(p.first, cta.shift.first, cta, target) + n * p.first.channel) = range.code(x.x) | range.code(x.y) << 4;
    }
    if (lane == 0) {
        as<uint16>(summary_at(p.second, cta.shift.second, cta, target)) = range.scale_bits;
        as<uint16>(summary_at(p.third, cta.shift.third, cta, target)) = range.min_bits;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) index_labels(const __grid_constant__ UpdateParams p, const __grid_constant__ Layers layers) {
    constexpr uint32 TOKENS_AT_ONCE = 2;  // tokens that a warp looks up together
    allow_next_kernel();
    wait_for_previous_kernel();
    const CtaShare cta(p, layers);
    const uint32 lane = threadIdx.x % WARP, warps = THREADS / WARP, step = cta.slices * warps;
    Stale stale;
    stale.len = stale.end = p.keys.length(cta.seq, stale.begin);
    const auto channel = [&](uint32 n) {
        return n < p.kept ? as<uint32>(p.channels + cta.shift.channels + cta.head * p.channels_head + n * p.channels_channel) : 0;
    };
    const uint32 low = channel(2 * lane), high = channel(2 * lane + 1);
    for (uint32 t = stale.begin + cta.slice * warps + threadIdx.x / WARP; t < stale.end; t += TOKENS_AT_ONCE * step) {
        const char *key[TOKENS_AT_ONCE] = {};
        float factor[TOKENS_AT_ONCE] = {};
        float2 own[TOKENS_AT_ONCE];
        // A channel outside the key reads as 0; a key that does not exist reads as NaN.
        const auto value = [&](uint32 m, uint32 c) {
            if (!key[m]) return __uint_as_float(0x7fc00000);
            return c < p.keys.dim ? p.keys.value(load_element(key[m] + c * p.keys.channel, p.keys.dtype), factor[m]) : 0.0f;
        };
#pragma unroll
        for (uint32 m = 0; m < TOKENS_AT_ONCE; m++) key[m] = t + m * step < stale.end ? p.keys.find(cta, t + m * step, factor[m]) : nullptr;
#pragma unroll
        for (uint32 m = 0; m < TOKENS_AT_ONCE; m++) own[m] = make_float2(value(m, low), value(m, high));
#pragma unroll
        for (uint32 m = 0; m < TOKENS_AT_ONCE; m++) {
            const Target target(p, cta, stale, t + m * step);
            if (target.exists) write_label(p, cta, target, own[m], [&](uint32 n) { return value(m, channel(n)); });
        }
    }
}
