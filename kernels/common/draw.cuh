// Draws from rows of logits, by a CTA of DRAW_THREADS threads. src/ops/draw/mod.rs defines a draw and computes it on the CPU: both compute
// the same bits, so every operation on floats that a draw follows from is written out, rounded to nearest.
//
// A thread has two strips of eight neighbouring tokens of a segment: strip threadIdx.x, and strip threadIdx.x + DRAW_THREADS.
#pragma once

#include "common/elements.cuh"

constexpr uint32 SEGMENT = 4096, MOST_SEGMENTS = 256, DRAW_THREADS = 256, DRAW_WARPS = DRAW_THREADS / WARP;
constexpr uint32 STRIP = 8, STRIPS = SEGMENT / STRIP / DRAW_THREADS;
constexpr float ONE = 1099511627776.0f;  // 2^40: one, in the integers that weights are summed in

enum Purpose : uint32 { ACCEPT, DRAW };

// A random number below 2^53: Philox4x32-10 of (position, purpose, index), keyed by the seed.
__device__ inline uint64 uniform(uint64 seed, int64 position, Purpose purpose, uint32 index) {
    uint32 c0 = uint32(position), c1 = uint32(position >> 32), c2 = purpose, c3 = index, k0 = uint32(seed), k1 = uint32(seed >> 32);
#pragma unroll
    for (uint32 round = 0; round < 10; ++round) {
        const uint32 a = c0 * 0xd2511f53u, a_high = __umulhi(c0, 0xd2511f53u), b = c2 * 0xcd9e8d57u, b_high = __umulhi(c2, 0xcd9e8d57u);
        c0 = b_high ^ c1 ^ k0, c1 = b, c2 = a_high ^ c3 ^ k1, c3 = a;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return (uint64(c1) << 32 | c0) >> 11;
}
__device__ inline double unit(uint64 number) { return __dmul_rn(double(number), 1.0 / (1ull << 53)); }

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }
__device__ inline float larger_or_nan(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}

// How numbers of a row become weights.
struct Scale {
    bool is_weights;
    float c;  // log2 e / temperature

    __device__ static Scale of(bool is_weights, float temperature) {
        return {is_weights, fmaxf(__fdiv_rn(1.44269504f, temperature), 1.17549435e-38f)};
    }
    // The number of a token that cannot be drawn.
    __device__ float none() const { return is_weights ? 0.0f : minus_infinity(); }
    __device__ bool is_number(float x) const { return is_weights ? x >= 0.0f : x == x; }

    // w(x, m).
    __device__ float weight(float x, float m) const {
        if (m == infinity()) return x == m ? 1.0f : 0.0f;
        if (is_weights) return __fdiv_rn(x, m);
        const float d = exponent(x, m);
        return d < -100.0f ? 0.0f : power(d);
    }
    // Turns the numbers of a strip into their weights.
    __device__ void weigh(float (&x)[8], float m) const {
        if (m == infinity()) {
#pragma unroll
            for (uint32 e = 0; e < 8; ++e) x[e] = x[e] == m ? 1.0f : 0.0f;
        } else if (is_weights) {
            divide(x, m);
        } else {
#pragma unroll
            for (uint32 e = 0; e < 8; ++e) {
                const float d = exponent(x[e], m);
                x[e] = d < -100.0f ? 0.0f : power(d);
            }
        }
    }
    // Whether weights are powers of two.
    __device__ bool has_powers(float m) const { return !is_weights && m != infinity(); }
    // The same of powers, with 0 for numbers below a bound and for NaN.
    __device__ void weigh_powers(float (&x)[8], float m, float bound) const {
#pragma unroll
        for (uint32 e = 0; e < 8; ++e) {
            const float d = exponent(x[e], m), w = power(d);  // outside the condition, so that no thread branches
            x[e] = d >= -100.0f && x[e] >= bound ? w : 0.0f;
        }
    }
    // The sum of the weights of a strip, in 2^-40.
    __device__ uint64 sum(const float (&x)[8], float m) const {
        if (has_powers(m)) return sum_powers(x, m);
        float w[8];
#pragma unroll
        for (uint32 e = 0; e < 8; ++e) w[e] = x[e];
        weigh(w, m);
        return in_integers(w);
    }
    // The same where weights are powers. Exponents count as -100 at least.
    __device__ uint64 sum_powers(const float (&x)[8], float m) const {
        float w[8];
#pragma unroll
        for (uint32 e = 0; e < 8; ++e) w[e] = power(fmaxf(exponent(x[e], m), -100.0f));
        return in_integers(w);
    }
    // The same, and makes the numbers weights. `some` has a bit for each that counts where a token is picked.
    __device__ uint64 sum_and_weigh(float (&x)[8], float m, uint32 &some) const {
        some = 0;
        if (has_powers(m)) {
#pragma unroll
            for (uint32 e = 0; e < 8; ++e) {
                const float d = exponent(x[e], m);
                some |= uint32(!(d < -100.0f)) << e;
                x[e] = power(fmaxf(d, -100.0f));
            }
        } else {
            weigh(x, m);
#pragma unroll
            for (uint32 e = 0; e < 8; ++e) some |= uint32(x[e] > 0.0f) << e;
        }
        return in_integers(x);
    }

    // The sum of a strip's weights.
    __device__ static uint64 in_integers(const float (&w)[8]) {
        const float low = __fadd_rn(__fadd_rn(w[0], w[1]), __fadd_rn(w[2], w[3])), high = __fadd_rn(__fadd_rn(w[4], w[5]), __fadd_rn(w[6], w[7]));
        return __float2ull_rz(__fmul_rn(__fadd_rn(low, high), ONE));
    }

private:
    __device__ float exponent(float x, float m) const { return __fmul_rn(__fsub_rn(x, m), c); }
    // x / m of numbers from 0 to m, rounded to nearest: with the rounded reciprocal of m a remainder that is exact corrects a quotient to
    // its last bit (Markstein 1990). __fdiv_rn finds a reciprocal for each number, and takes many more steps where a number is 0, as half
    // of a residual's are.
    __device__ static void divide(float (&x)[8], float m) {
        uint32 least = 0xffffffffu;  // of the bits of what is above 0, less 1
#pragma unroll
        for (uint32 e = 0; e < 8; ++e) least = min(least, __float_as_uint(x[e]) - 1);
        // 2^-100, 2^-60 and 2^60: remainders are exact in between.
        if (least < 0x0d7fffffu || m < 0x1p-60f || m > 0x1p60f) {
#pragma unroll
            for (uint32 e = 0; e < 8; ++e) x[e] = __fdiv_rn(x[e], m);
            return;
        }
        const float y = __frcp_rn(m);
#pragma unroll
        for (uint32 e = 0; e < 8; ++e) {
            float q = __fmul_rn(x[e], y);
            q = __fmaf_rn(__fmaf_rn(-m, q, x[e]), y, q);
            x[e] = __fmaf_rn(__fmaf_rn(-m, q, x[e]), y, q);
        }
    }
    // 2^d. Adding 1.5 · 2^23 rounds to a whole number, which is then in the low bits of the sum.
    __device__ static float power(float d) {
        const float whole = __fadd_rn(d, 12582912.0f), f = __fsub_rn(d, __fsub_rn(whole, 12582912.0f));
        float p = __uint_as_float(0x3aaddd0b);
        p = __fmaf_rn(p, f, __uint_as_float(0x3c1e7544));
        p = __fmaf_rn(p, f, __uint_as_float(0x3d635ba9));
        p = __fmaf_rn(p, f, __uint_as_float(0x3e75fcde));
        p = __fmaf_rn(p, f, __uint_as_float(0x3f317215));
        p = __fmaf_rn(p, f, 1.0f);
        return __uint_as_float(__float_as_uint(p) + (__float_as_uint(whole) << 23));
    }
};

// Keys ascend as numbers do; −0 has the key of +0.
__device__ inline uint32 key_of(float x) {
    const uint32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float number_of(uint32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// A row of a tensor.
struct Row {
    const char *data;
    int64 step;  // bytes
    uint32 tokens, type;
    bool is_adjacent;  // eight neighbouring tokens that begin at a multiple of eight can be loaded at once

    __device__ float at(uint32 token) const { return load_query(data + token * step, type); }
};

// The number of a token that cannot be drawn, in a row's type.
template <uint32 TYPE> __device__ inline uint32 none_bits(bool is_weights) {
    return is_weights ? 0 : TYPE == FLOAT32 ? 0xff800000 : TYPE == FLOAT16 ? 0xfc00 : 0xff80;
}

// The larger numbers of two words; NaN where one of them is.
template <uint32 TYPE> __device__ inline uint32 larger(uint32 a, uint32 b) {
    if (TYPE == FLOAT32) asm("max.NaN.f32 %0, %0, %1;" : "+r"(a) : "r"(b));
    else if (TYPE == FLOAT16) asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    else asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
// The largest number of some words; NaN if there is one.
template <uint32 TYPE, uint32 WORDS> __device__ inline float largest_of(const uint32 (&words)[WORDS]) {
    uint32 best = words[0];
#pragma unroll
    for (uint32 n = 1; n < WORDS; ++n) best = larger<TYPE>(best, words[n]);
    if (TYPE == FLOAT32) return __uint_as_float(best);
    return TYPE == FLOAT16 ? larger_or_nan(widen_float16(best & 0xffff), widen_float16(best >> 16))
                           : larger_or_nan(__uint_as_float(best << 16), __uint_as_float(best & 0xffff0000));
}

// Eight neighbouring numbers as they lie in memory.
template <uint32 TYPE> struct Strip {
    static constexpr uint32 BYTES = TYPE == FLOAT32 ? 4 : 2, WORDS = STRIP * BYTES / 4;
    uint32 words[WORDS];

    // Past the row's end numbers are `none`.
    __device__ void load(const Row &row, uint32 first, uint32 none) {
        if (row.is_adjacent && first + STRIP <= row.tokens) {
            const char *from = row.data + uint64(first) * BYTES;
#pragma unroll
            for (uint32 n = 0; n < WORDS; n += 4) {
                const uint4 four = as<uint4>(from + n * 4);
                words[n] = four.x, words[n + 1] = four.y, words[n + 2] = four.z, words[n + 3] = four.w;
            }
            return;
        }
        constexpr uint32 EACH = STRIP / WORDS;
#pragma unroll
        for (uint32 n = 0; n < WORDS; ++n) {
            words[n] = 0;
#pragma unroll
            for (uint32 e = 0; e < EACH; ++e) {
                const uint32 token = first + n * EACH + e;
                const char *from = row.data + token * row.step;
                words[n] |= (token >= row.tokens ? none : BYTES == 4 ? as<uint32>(from) : as<uint16>(from)) << e * 16;
            }
        }
    }
    // Loads what a bulk copy brought.
    __device__ void load_shared(uint32 from) {
#pragma unroll
        for (uint32 n = 0; n < WORDS; n += 4)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[n]), "=r"(words[n + 1]), "=r"(words[n + 2]), "=r"(words[n + 3]) : "r"(from + n * 4) : "memory");
    }
    __device__ void store_shared(uint32 to) const {
#pragma unroll
        for (uint32 n = 0; n < WORDS; n += 4)
            asm volatile("st.shared.v4.u32 [%4], {%0, %1, %2, %3};"
                         ::"r"(words[n]), "r"(words[n + 1]), "r"(words[n + 2]), "r"(words[n + 3]), "r"(to + n * 4) : "memory");
    }
    // Makes each number the larger of two; NaN stays.
    __device__ void raise(const Strip &other) {
#pragma unroll
        for (uint32 n = 0; n < WORDS; ++n) words[n] = larger<TYPE>(words[n], other.words[n]);
    }
    __device__ float at(uint32 e) const {
        if (TYPE == FLOAT32) return __uint_as_float(words[e]);
        const uint32 word = words[e / 2];
        if (TYPE == FLOAT16) return widen_float16(e % 2 ? word >> 16 : word & 0xffff);
        return __uint_as_float(e % 2 ? word & 0xffff0000 : word << 16);
    }
    __device__ void set(uint32 e, uint32 bits) {
        if (TYPE == FLOAT32) words[e] = bits;
        else words[e / 2] = e % 2 ? (words[e / 2] & 0xffff) | bits << 16 : (words[e / 2] & 0xffff0000) | bits;
    }
    __device__ void widen(float (&x)[STRIP]) const {
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) x[e] = at(e);
    }
    // NaN if there is one.
    __device__ float largest() const { return largest_of<TYPE>(words); }
};

// Loads a strip of any type and makes it float32, in two steps so that several are in flight together.
struct AnyStrip {
    Strip<FLOAT32> strip;

    __device__ void load(const Row &row, uint32 first, bool is_weights) {
        if (row.type == FLOAT32) return strip.load(row, first, none_bits<FLOAT32>(is_weights));
        Strip<BFLOAT16> half;
        half.load(row, first, row.type == FLOAT16 ? none_bits<FLOAT16>(is_weights) : none_bits<BFLOAT16>(is_weights));
#pragma unroll
        for (uint32 n = 0; n < half.WORDS; ++n) strip.words[n] = half.words[n];
    }
    __device__ void widen(uint32 type, float (&x)[STRIP]) const {
        if (type == FLOAT32) return strip.widen(x);
        if (type == FLOAT16) return half<FLOAT16>().widen(x);
        half<BFLOAT16>().widen(x);
    }

private:
    template <uint32 TYPE> __device__ Strip<TYPE> half() const {
        Strip<TYPE> made;
#pragma unroll
        for (uint32 n = 0; n < made.WORDS; ++n) made.words[n] = strip.words[n];
        return made;
    }
};

// The token of a strip of weights, from 0, for what is left of the target: the first whose weight takes the sum beyond it, or the last that has a weight.
// `some` has a bit for each that has one; others count as 0.
__device__ inline uint32 pick_weight(const float (&w)[STRIP], uint32 some, uint64 left) {
    float sum = 0.0f;
    uint32 beyond = 0;
#pragma unroll
    for (uint32 e = 0; e < STRIP; ++e) {
        if (some >> e & 1) sum = __fadd_rn(sum, w[e]);
        beyond |= uint32(__float2ull_rz(__fmul_rn(sum, ONE)) > left) << e;
    }
    const uint32 found = some & beyond;
    return found ? __ffs(found) - 1 : some ? 31 - __clz(some) : 0;
}
// The same of a strip's numbers, which become weights.
__device__ inline uint32 pick_token(float (&x)[STRIP], const Scale &scale, float m, uint64 left) {
    scale.weigh(x, m);
    uint32 some = 0;
#pragma unroll
    for (uint32 e = 0; e < STRIP; ++e) some |= uint32(x[e] > 0.0f) << e;
    return pick_weight(x, some, left);
}

// A thread's numbers of a segment, as they lie in memory.
struct StoredNumbers {
    AnyStrip strips[STRIPS];

    // The first token of a thread's strip, in its segment.
    __device__ static uint32 place(uint32 h) { return (h * DRAW_THREADS + threadIdx.x) * STRIP; }

    __device__ void load(const Row &row, uint32 s, bool is_weights) {
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) strips[h].load(row, s * SEGMENT + place(h), is_weights);
    }
    __device__ void widen(uint32 type, float (&x)[STRIPS][STRIP]) const {
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) strips[h].widen(type, x[h]);
    }
};

// A thread's numbers of a segment.
struct Numbers {
    float x[STRIPS][STRIP];

    __device__ static uint32 place(uint32 h) { return StoredNumbers::place(h); }

    // Loads segment s of a row; past its end numbers are `none`.
    __device__ void load(const Row &row, uint32 s, bool is_weights) {
        StoredNumbers stored;
        stored.load(row, s, is_weights);
        stored.widen(row.type, x);
    }

    // Sets the number of a token, given by its place in the segment, if this thread has it.
    __device__ void set(uint32 at, float value) {
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (at == place(h) + e) x[h][e] = value;
    }
    __device__ float largest() const {
        float best = minus_infinity();
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) best = fmaxf(best, x[h][e]);
        return best;
    }
    // The sum of strip h.
    __device__ uint64 sum(uint32 h, const Scale &scale, float m) const { return scale.sum(x[h], m); }
};

// --- reductions of a CTA: each begins with a barrier, after which what it uses is its own ----------------------------------------

struct DrawShared {
    alignas(16) uint64 wide[DRAW_WARPS];
    uint64 strips[STRIPS][DRAW_WARPS];
    uint32 word[DRAW_WARPS];
    uint32 segment, token;
    uint64 target;
    bool is_last;
};

// Loops over what warps have left would load one after the other: a lane loads what one of them has.
__device__ inline uint32 cta_max(DrawShared &shared, uint32 value) {
    value = __reduce_max_sync(FULL_WARP, value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared.word[threadIdx.x / WARP] = value;
    __syncthreads();
    return __reduce_max_sync(FULL_WARP, shared.word[threadIdx.x % DRAW_WARPS]);
}
__device__ inline float cta_largest(DrawShared &shared, float value) { return number_of(cta_max(shared, key_of(value))); }
__device__ inline uint32 cta_min(DrawShared &shared, uint32 value) { return ~cta_max(shared, ~value); }
__device__ inline uint32 cta_or(DrawShared &shared, uint32 value) {
    value = __reduce_or_sync(FULL_WARP, value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared.word[threadIdx.x / WARP] = value;
    __syncthreads();
    return __reduce_or_sync(FULL_WARP, shared.word[threadIdx.x % DRAW_WARPS]);
}
// The sum over a warp, below 2^56.
__device__ inline uint64 warp_sum(uint64 value) {
    const uint32 low = uint32(value) & 0xffffffu, high = uint32(value >> 24);
    return (uint64(__reduce_add_sync(FULL_WARP, high)) << 24) + __reduce_add_sync(FULL_WARP, low);
}
// The sum over the CTA, below 2^56.
__device__ inline uint64 cta_sum(DrawShared &shared, uint64 value) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared.wide[threadIdx.x / WARP] = value;
    __syncthreads();
    return warp_sum(threadIdx.x % WARP < DRAW_WARPS ? shared.wide[threadIdx.x % WARP] : 0);
}
// The sum over the lanes up to and including this one.
__device__ inline uint64 warp_sum_through(uint64 value) {
    const uint32 lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) {
        const uint64 other = __shfl_up_sync(FULL_WARP, value, step);
        if (lane >= step) value += other;
    }
    return value;
}
// The sum over the threads before this one, and over all.
__device__ inline uint64 cta_sum_before(DrawShared &shared, uint64 value, uint64 &total) {
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint64 sum = warp_sum_through(value);
    __syncthreads();
    if (lane == WARP - 1) shared.wide[warp] = sum;
    __syncthreads();
    total = 0;
    uint64 before = sum - value;
#pragma unroll
    for (uint32 w = 0; w < DRAW_WARPS; w += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2 *>(shared.wide + w);
        before += (w < warp ? two.x : 0) + (w + 1 < warp ? two.y : 0);
        total += two.x + two.y;
    }
    return before;
}

// --- a row, from what is known of its segments -----------------------------------------------------------------------------------

// A segment's largest number and its sum; a sum of 0 stands for a segment from which no token can be drawn.
struct alignas(16) SegmentSum {
    float largest;
    uint64 sum;
};

// A row: its largest number, and the sum of its segments' shares.
struct RowSum {
    float largest;
    uint64 total;
};

// The share of a segment in its row.
__device__ inline uint64 share_of(const SegmentSum &segment, const Scale &scale, float largest) {
    if (segment.sum == 0) return 0;
    return __double2ull_rz(__dmul_rn(double(segment.sum), double(scale.weight(segment.largest, largest))));
}
// What the weights of a segment are multiplied by to be probabilities, twice as a double.
__device__ inline double factor_of(const SegmentSum &segment, const Scale &scale, const RowSum &row) {
    return __ddiv_rn(__dmul_rn(double(scale.weight(segment.largest, row.largest)), double(ONE)), double(row.total));
}
// p of a token whose number is x.
__device__ inline double probability_of(float x, const SegmentSum &segment, const Scale &scale, const RowSum &row) {
    if (row.total == 0 || segment.sum == 0) return 0.0;
    const double w = __dmul_rn(double(scale.weight(x, segment.largest)), double(scale.weight(segment.largest, row.largest)));
    return __ddiv_rn(__dmul_rn(w, double(ONE)), double(row.total));
}

// The row's sum; thread s has segment s, and gets its share and what precedes it.
__device__ inline RowSum sum_of_row(DrawShared &shared, const SegmentSum &segment, const Scale &scale, uint64 &before, uint64 &share) {
    RowSum row;
    row.largest = cta_largest(shared, segment.sum ? segment.largest : minus_infinity());
    share = share_of(segment, scale, row.largest);
    before = cta_sum_before(shared, share, row.total);
    return row;
}

// What a random number below 2^53 is among so many.
__device__ inline uint64 target_of(uint64 number, uint64 total) { return __umul64hi(number, total) << 11 | number * total >> 53; }
// The target in a segment, of `past` in the row beyond what precedes the segment.
__device__ inline uint64 target_inside(const SegmentSum &segment, const Scale &scale, float largest, uint64 past) {
    const double inside = __ddiv_rn(double(past), double(scale.weight(segment.largest, largest)));
    return min(__double2ull_rz(inside), segment.sum - 1);
}
// The token of segment s for a target below the segment's sum; m is the segment's largest number. `source.load(s, numbers)` loads it. It is a token of
// the segment, though not one that is drawn, where its numbers change during the call.
template <typename Source>
__device__ inline uint32 draw_inside(DrawShared &shared, const Source &source, const Scale &scale, uint32 s, float m, uint64 target) {
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Numbers numbers;
    source.load(s, numbers);
    uint64 sum[STRIPS], through[STRIPS];
#pragma unroll
    for (uint32 h = 0; h < STRIPS; ++h) sum[h] = numbers.sum(h, scale, m), through[h] = warp_sum_through(sum[h]);
    __syncthreads();
    if (threadIdx.x == 0) shared.token = s * SEGMENT;
    if (lane == WARP - 1) {
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) shared.strips[h][warp] = through[h];
    }
    __syncthreads();
    static_assert(STRIPS * DRAW_WARPS <= WARP);
    const uint64 mine = lane < STRIPS * DRAW_WARPS ? shared.strips[lane / DRAW_WARPS][lane % DRAW_WARPS] : 0;
    uint32 holder = STRIPS;
    uint64 left = 0;
    float x[STRIP] = {};
#pragma unroll
    for (uint32 h = 0; h < STRIPS; ++h) {
        const uint64 before = warp_sum(lane < h * DRAW_WARPS + warp ? mine : 0) + through[h] - sum[h];
        if (target < before || before + sum[h] <= target) continue;
        holder = h, left = target - before;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) x[e] = numbers.x[h][e];
    }
    if (holder < STRIPS) shared.token = s * SEGMENT + Numbers::place(holder) + pick_token(x, scale, m, left);
    __syncthreads();
    return shared.token;
}

// Leaves in `shared` what a random number below 2^53 draws: the segment, its largest number in word[0], and the target in it. Thread s has
// segment s, its share of the row, and what precedes that.
__device__ inline void draw_segment(DrawShared &shared, const SegmentSum &segment, const Scale &scale, const RowSum &row, uint64 before, uint64 share,
                                    uint64 number) {
    const uint64 at = target_of(number, row.total);
    __syncthreads();
    if (threadIdx.x == 0) shared.segment = 0;
    __syncthreads();
    if (before <= at && at < before + share) {
        shared.segment = threadIdx.x;
        shared.target = target_inside(segment, scale, row.largest, at - before);
        shared.word[0] = __float_as_uint(segment.largest);
    }
    __syncthreads();
}
// The token for a random number below 2^53. Thread s has segment s.
template <typename Source>
__device__ inline uint32 draw(DrawShared &shared, const Source &source, const SegmentSum &segment, const Scale &scale, uint64 number) {
    uint64 before, share;
    const RowSum row = sum_of_row(shared, segment, scale, before, share);
    draw_segment(shared, segment, scale, row, before, share, number);
    return draw_inside(shared, source, scale, shared.segment, __uint_as_float(shared.word[0]), shared.target);
}

// --- filters ---------------------------------------------------------------------------------------------------------------------

// What the filters of a request keep of a row: w(x, M) ≥ min_p, and x ≥ bound.
struct Kept {
    Scale scale;  // of the filters
    float largest, min_p, bound;

    __device__ bool drops(float x) const { return x < bound || (min_p > 0.0f && scale.weight(x, largest) < fminf(min_p, 1.0f)); }
    __device__ void apply(float (&x)[STRIP], float none) const {
        if (!(min_p > 0.0f) && bound == minus_infinity()) return;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e)
            if (drops(x[e])) x[e] = none;
    }
    __device__ void apply(Numbers &numbers, float none) const {
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) apply(numbers.x[h], none);
    }
};
