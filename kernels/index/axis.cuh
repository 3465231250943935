// The mean key of each block and an axis along which its keys spread.
//
//   μ = Σ_t k_t / n · x_t = k_t − μ · z = W∘x of the token with the largest Σ_c W_c·x_c², W = weights²
//   three times u_t = x_t·z, b = Σ_t u_t·x_t, z = W∘b / |u| · stored: μ − centre and b / |u| times the reach, in INT4 or as floats
//
// Bytes: the keys of the range, once; summaries are a hundredth of that. A token of a decoding step costs a block's keys.
//
// Which kernel runs when: index_axis_* where blocks have up to 64 tokens and keys up to 256 channels, and index_axis_wide_* otherwise; the number
// is the bits of a key's element.
//
// Split: as in update.cuh, `slices` CTAs for each sequence and head take turns at blocks. A team of threads, two warps or more, has a block:
// eight slots, which share its tokens (slot t mod 8 has token t), and in each slot the lanes of a key, eight channels each. Up to 64 tokens
// of 256 channels stay in registers; for larger blocks or keys each pass reads the keys again, which are in the caches. Teams run
// independently: while one waits for its keys, which were prefetched during the block before, others of the multiprocessor compute.
//
//   keys to registers ─ sum over slots ─ less the mean ─ farthest token ─ 3 × (product of each token over lanes ─ sum over slots) ─ store
//
// Vectors in shared memory hold the first four channels of all lanes, then the last four, so that no two lanes use the same bank.
//
// Bits are those of the CPU (src/ops/index/cpu/axis.rs): products are fused, a slot adds its tokens in their order and the slots are added
// as a tree; a token's product is a sum over each eight channels, folded in halves. Channels past D are zeros, which change no sum.
//
// On entry: lanes is a power of two from 8 to 32, lanes · 8 ≥ D or lanes = 32; D is a multiple of 8, at most 576.
#pragma once

#include "index/cta_share.cuh"

constexpr uint32 SLOTS = 8, SLOT_TOKENS = 8, BATCH = SLOTS * SLOT_TOKENS, GROUP = 32, STEPS = 3;
constexpr uint32 MOST_CHANNELS = 768;  // channels of three chunks
constexpr uint32 MOST_TEAMS = THREADS / (2 * WARP);

// What a team's threads share: `part` holds the sums of each slot, `vector` is z and at last the axis.
template <uint32 CHANNELS> struct Shared {
    alignas(16) float part[SLOTS * CHANNELS];
    alignas(16) float mean[CHANNELS];
    alignas(16) float vector[CHANNELS];
    alignas(16) float square[CHANNELS];                                // W
    alignas(16) float product[MOST_TEAMS * BATCH];                     // u, by slots
    alignas(16) float size[MOST_TEAMS * SLOTS];                        // Σ u² of each slot
    Target to[MOST_TEAMS];                                            // where the summary goes
    uint32 largest[MOST_TEAMS * BATCH], farthest[MOST_TEAMS * BATCH];  // over the tokens that have the same place in their batches
};

// A thread's eight tokens as they are stored, eight channels each.
template <uint32 BYTES> struct RawTokens {
    Eight<BYTES> eight[SLOT_TOKENS];
    float factor[BYTES == 1 ? SLOT_TOKENS : 1];
    uint32 absent = 0;  // bit i: token i has no page
};

// Eight channels of one token, wherever it lies.
template <uint32 BYTES> struct RawToken {
    Eight<BYTES> eight;
    float factor;
    bool exists;
};
// Not inlined, as it is called seldom and from many places.
template <uint32 BYTES> __device__ __noinline__ RawToken<BYTES> fetch(const Keys &k, uint32 seq, uint32 head, int64 keys, int64 scale, uint32 t, uint32 c) {
    RawToken<BYTES> one;
    one.eight.clear(), one.factor = 1.0f;
    const char *key = k.find(Owner{seq, head, keys, scale}, t, one.factor);
    one.exists = key != nullptr;
    if (!key) return one;
    if (k.adjacent)
        one.eight.load(key + c * BYTES);
    else
        one.eight.gather(key + c * k.channel, k.channel);
    return one;
}

// A team's block. WIDE: keys have more than 256 channels or blocks more than 64 tokens, and do not stay in registers.
template <uint32 BYTES, bool WIDE> struct AxisBlock {
    static constexpr uint32 CHUNKS = WIDE ? 3 : 1;  // chunks of eight channels that a lane has
    using Parts = Shared<WIDE ? MOST_CHANNELS : THREADS>;
    using Tokens = float[SLOT_TOKENS][8];

    const AxisParams &p;
    const CtaShare &cta;
    Parts &shared;
    const uint32 lanes, dim, members, team, member, slot, lane, width;  // width: channels of a team's vectors in shared memory
    uint32 begin = 0, n = 0;                                            // the block's first token, and its number of tokens
    uint32 page;                                                        // the page of the first token of the block that was looked up

    __device__ __forceinline__ AxisBlock(const AxisParams &p, const CtaShare &cta, Parts &shared)
        : p(p), cta(cta), shared(shared), lanes(p.update.lanes), dim(p.update.keys.dim), members(SLOTS * lanes),
          team(threadIdx.x >> log2_of(members)), member(threadIdx.x & (members - 1)), slot(member >> log2_of(lanes)), lane(member & (lanes - 1)),
          width(WIDE && lanes == WARP ? MOST_CHANNELS : lanes * 8) {}

    // A barrier of the team's threads.
    __device__ __forceinline__ void sync() const { sync_threads(1 + team, members); }

    // This lane's first channel of chunk m, and where its first four channels lie in shared memory.
    __device__ __forceinline__ uint32 channel(uint32 m) const { return (m * lanes + lane) * 8; }
    __device__ __forceinline__ uint32 place(uint32 m) const { return m * lanes * 8 + lane * 4; }
    __device__ __forceinline__ uint32 place_of(uint32 c) const {
        const uint32 chunk = c & ~(lanes * 8 - 1), lane = c / 8 & (lanes - 1);
        return chunk + c / 4 % 2 * lanes * 4 + lane * 4 + c % 4;
    }
    __device__ __forceinline__ bool is_past(uint32 m) const { return WIDE && m * lanes * 8 >= dim; }
    __device__ __forceinline__ float *mean() const { return shared.mean + team * width; }
    __device__ __forceinline__ float *vector() const { return shared.vector + team * width; }
    __device__ __forceinline__ float *part(uint32 s) const { return shared.part + (team * SLOTS + s) * width; }

    __device__ __forceinline__ static void read(const float *from, uint32 far, float (&to)[8]) {
        const float4 low = *reinterpret_cast<const float4 *>(from), high = *reinterpret_cast<const float4 *>(from + far);
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w, to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
    __device__ __forceinline__ void read(const float *from, float (&to)[8]) const { read(from, lanes * 4, to); }
    __device__ __forceinline__ void write(const float (&from)[8], float *to) const {
        *reinterpret_cast<float4 *>(to) = make_float4(from[0], from[1], from[2], from[3]);
        *reinterpret_cast<float4 *>(to + lanes * 4) = make_float4(from[4], from[5], from[6], from[7]);
    }

    // Loads the page of block j's first token.
    __device__ __forceinline__ void look_up(uint32 j) {
        const Keys &k = p.update.keys;
        page = k.table ? as<uint32>(k.table + cta.seq * k.table_seq + k.page_of.divide(j * p.update.size) * k.table_page) : cta.seq;
    }
    __device__ __forceinline__ uint32 row_of(uint32 t) const {
        const Keys &k = p.update.keys;
        return k.table ? t - k.page_of.divide(t) * k.page_size : t;
    }
    __device__ __forceinline__ const char *first_key(uint32 row) const {
        return p.update.keys.key(cta, page, row);
    }
    // Prefetches the keys of block j, which was looked up, 128 bytes by each thread.
    __device__ __forceinline__ void prefetch_keys(uint32 j) const {
        const Keys &k = p.update.keys;
        const uint32 t = slot + lane % SLOT_TOKENS * SLOTS, row = row_of(j * p.update.size) + t;
        if (page >= k.pages || t >= p.update.size || row >= k.page_size) return;
        const char *key = first_key(row);
#pragma unroll
        for (uint32 i = 0; i < (BYTES == 4 ? 2 : 1); i++) {
            const uint32 at = (i * lanes + lane) / SLOT_TOKENS * 128;
            if (at < dim * BYTES) prefetch(key + at);
        }
    }

    // Loads this slot's tokens among the first `count` from `key` on.
    __device__ __forceinline__ void request(const char *key, const char *scale, uint32 count, RawTokens<BYTES> &raw) const {
        const Keys &k = p.update.keys;
        if (count >= BATCH) {
#pragma unroll
            for (uint32 i = 0; i < SLOT_TOKENS; i++) raw.eight[i].request(key + i * SLOTS * k.token);
        } else {
#pragma unroll
            for (uint32 i = 0; i < SLOT_TOKENS; i++) {
                raw.eight[i].clear();
                if (slot + i * SLOTS < count) raw.eight[i].request(key + i * SLOTS * k.token);
            }
        }
        if constexpr (BYTES == 1)
#pragma unroll
            for (uint32 i = 0; i < SLOT_TOKENS; i++)
                raw.factor[i] = k.scale && slot + i * SLOTS < count ? as<float>(scale + i * SLOTS * k.scale_token) : 1.0f;
    }
    // Loads the tokens of the guessed block. Tokens past the last are dropped once the length is known.
    __device__ __forceinline__ void request(const Guess &guess, RawTokens<BYTES> &raw) const {
        const bool asks = guess.key && team == 0 && channel(0) < dim;
        request(guess.key + slot * p.update.keys.token + channel(0) * BYTES, nullptr, asks ? p.update.size : 0, raw);
    }
    __device__ __forceinline__ void drop(RawTokens<BYTES> &raw) const {
#pragma unroll
        for (uint32 i = 0; i < SLOT_TOKENS; i++)
            if (slot + i * SLOTS >= n) raw.eight[i].clear();
    }
    // Loads this slot's tokens of a batch.
    __device__ __forceinline__ void request(uint32 batch, uint32 m, RawTokens<BYTES> &raw) const {
        const Keys &k = p.update.keys;
        raw.absent = 0;
        const uint32 c = channel(m), first = WIDE ? batch * BATCH : 0, count = c < dim ? n - first : 0, row = row_of(begin);
        // Most blocks lie in one page.
        if (k.adjacent && page < k.pages && (!k.table || row + n <= k.page_size)) {
            const uint32 own = row + first + slot;
            request(first_key(own) + c * BYTES, k.scale_of(cta, page, own), count, raw);
            return;
        }
#pragma unroll
        for (uint32 i = 0; i < SLOT_TOKENS; i++) {
            raw.eight[i].clear();
            if (BYTES == 1) raw.factor[i] = 1.0f;
            const uint32 t = slot + i * SLOTS;
            if (t >= count) continue;
            const RawToken<BYTES> one = fetch<BYTES>(k, cta.seq, cta.head, cta.keys, cta.scale, begin + first + t, c);
            raw.eight[i] = one.eight;
            if (BYTES == 1) raw.factor[i] = one.factor;
            if (!one.exists) raw.absent |= 1 << i;
        }
    }
    // Widens the tokens: 0 past the last token, NaN where a token has no page.
    __device__ __forceinline__ void widen(const RawTokens<BYTES> &raw, Tokens &x) const {
        const auto all = [&](uint32 type) {
#pragma unroll
            for (uint32 i = 0; i < SLOT_TOKENS; i++) {
                raw.eight[i].widen(x[i], type);
#pragma unroll
                for (uint32 e = 0; e < 8; e++)
                    if (BYTES == 1) x[i][e] = __fmul_rn(x[i][e], raw.factor[i]);
            }
        };
        // Each width but that of float32 has two types.
        constexpr uint32 USUAL = BYTES == 4 ? FLOAT32 : BYTES == 2 ? BFLOAT16 : FLOAT8_E4M3, OTHER = BYTES == 2 ? FLOAT16 : FLOAT8_E5M2;
        if (BYTES == 4 || p.update.keys.dtype == USUAL)
            all(USUAL);
        else
            all(OTHER);
        if (raw.absent == 0) return;
#pragma unroll
        for (uint32 i = 0; i < SLOT_TOKENS; i++)
            if (raw.absent >> i & 1)
#pragma unroll
                for (uint32 e = 0; e < 8; e++) x[i][e] = __uint_as_float(0x7fc00000);
    }
    __device__ __forceinline__ void subtract_mean(uint32 batch, uint32 m, Tokens &x) const {
        float of[8];
        read(mean() + place(m), of);
#pragma unroll
        for (uint32 i = 0; i < SLOT_TOKENS; i++)
            if (batch * BATCH + slot + i * SLOTS < n)
#pragma unroll
                for (uint32 e = 0; e < 8; e++) x[i][e] = __fsub_rn(x[i][e], of[e]);
    }
    __device__ __forceinline__ void load(uint32 batch, uint32 m, Tokens &x) const {
        RawTokens<BYTES> raw;
        request(batch, m, raw), widen(raw, x);
    }
    __device__ __forceinline__ void reload(uint32 batch, uint32 m, Tokens &x) const {
        if (WIDE) load(batch, m, x), subtract_mean(batch, m, x);
    }
    __device__ __forceinline__ uint32 batches() const { return WIDE ? (n + BATCH - 1) / BATCH : 1; }

    // Adds v over lanes. In each step a lane keeps half of the tokens, until it has one: the sum of its slot's token number token_of_lane().
    __device__ __forceinline__ float add_lanes(float (&v)[SLOT_TOKENS]) const {
        uint32 bit = lanes / 2;
#pragma unroll
        for (uint32 half = SLOT_TOKENS / 2; half > 0; half /= 2, bit /= 2) {
            const bool upper = threadIdx.x & bit;
#pragma unroll
            for (uint32 i = 0; i < half; i++) {
                const float given = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
                v[i] = __fadd_rn(kept, __shfl_xor_sync(FULL_WARP, given, bit));
            }
        }
        for (; bit > 0; bit /= 2) v[0] = __fadd_rn(v[0], __shfl_xor_sync(FULL_WARP, v[0], bit));
        return v[0];
    }
    __device__ __forceinline__ uint32 token_of_lane() const { return lane >> log2_of(lanes) - 3; }

    // Σ_c x_c·z_c of each token of a batch, or Σ_c W_c·x_c² (IS_SIZE); each lane gets that of token token_of_lane().
    template <bool IS_SIZE> __device__ __forceinline__ float multiply(uint32 batch, Tokens &x) const {
        float product[SLOT_TOKENS];
        // Chunks are added as the CPU folds halves: the first, the third, the second.
#pragma unroll 1
        for (uint32 n = 0; n < CHUNKS; n++) {
            const uint32 m = n == 0 ? 0 : CHUNKS - n;
            if (is_past(m)) continue;
            reload(batch, m, x);
            float sums[SLOT_TOKENS] = {}, of[8];
            if (IS_SIZE && !p.weights) {
#pragma unroll
                for (uint32 i = 0; i < SLOT_TOKENS; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sums[i] = fmaf(x[i][e], x[i][e], sums[i]);
            } else {
                read((IS_SIZE ? shared.square : vector()) + place(m), of);
#pragma unroll
                for (uint32 i = 0; i < SLOT_TOKENS; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sums[i] = fmaf(IS_SIZE ? __fmul_rn(x[i][e], of[e]) : of[e], x[i][e], sums[i]);
            }
#pragma unroll
            for (uint32 i = 0; i < SLOT_TOKENS; i++) product[i] = n == 0 ? sums[i] : __fadd_rn(product[i], sums[i]);
        }
        return add_lanes(product);
    }

    // The sum of the slots' values, which lie `step` apart, as a tree.
    __device__ __forceinline__ static float tree(const float *of, uint32 step) {
        return __fadd_rn(__fadd_rn(__fadd_rn(of[0], of[step]), __fadd_rn(of[2 * step], of[3 * step])),
                         __fadd_rn(__fadd_rn(of[4 * step], of[5 * step]), __fadd_rn(of[6 * step], of[7 * step])));
    }

    // Finds the mean of the tokens in x, or for WIDE of tokens that it loads.
    __device__ __forceinline__ void find_mean(float share, Tokens &x) const {
#pragma unroll 1
        for (uint32 m = 0; m < CHUNKS; m++) {
            if (is_past(m)) break;
            float sum[8] = {};
#pragma unroll 1
            for (uint32 batch = 0; batch < batches(); batch++) {
                if (WIDE) load(batch, m, x);
#pragma unroll
                for (uint32 i = 0; i < SLOT_TOKENS; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sum[e] = __fadd_rn(sum[e], x[i][e]);
            }
            write(sum, part(slot) + place(m));
        }
        sync();
        for (uint32 m = 0; m < CHUNKS && !is_past(m); m++) {
            const uint32 at = m * members + member;
            mean()[at] = __fmul_rn(tree(part(0) + at, width), share);
        }
        sync();
        if (!WIDE) subtract_mean(0, 0, x);
    }

    // z = W∘x of the farthest token: the first one of equally far tokens, or token 0 where no size is a number.
    __device__ __forceinline__ void find_farthest(Tokens &x) const {
        // NaN comes last. A size is never negative.
        uint32 largest = 0, farthest = token_of_lane() * SLOTS + slot;
#pragma unroll 1
        for (uint32 batch = 0; batch < batches(); batch++) {
            const float size = multiply<true>(batch, x);
            const uint32 t = (batch * SLOT_TOKENS + token_of_lane()) * SLOTS + slot, key = t < n && size >= 0.0f ? __float_as_uint(size) + 1 : 0;
            if (key > largest) largest = key, farthest = t;
        }
        const uint32 own = team * BATCH + token_of_lane() * SLOTS + slot, low = team * BATCH + threadIdx.x % WARP, high = low + WARP;
        shared.largest[own] = largest, shared.farthest[own] = farthest;
        sync();
        largest = __reduce_max_sync(FULL_WARP, max(shared.largest[low], shared.largest[high]));
        const auto token = [&](uint32 at) { return shared.largest[at] == largest ? shared.farthest[at] : ~0u; };
        farthest = __reduce_min_sync(FULL_WARP, min(token(low), token(high)));
        if (slot == farthest % SLOTS) {
#pragma unroll 1
            for (uint32 m = 0; m < CHUNKS; m++) {
                if (is_past(m)) break;
                reload(farthest / BATCH, m, x);
                float of[8];
                read(shared.square + place(m), of);
                // Selected by halves: an index would put all tokens in local memory.
                const uint32 i = farthest % BATCH / SLOTS;
                float z[8];
#pragma unroll
                for (uint32 e = 0; e < 8; e++) {
                    const auto half = [&](uint32 n) { return i & 4 ? x[n + 4][e] : x[n][e]; };
                    const auto quarter = [&](uint32 n) { return i & 2 ? half(n + 2) : half(n); };
                    z[e] = __fmul_rn(i & 1 ? quarter(1) : quarter(0), of[e]);
                }
                write(z, vector() + place(m));
            }
        }
        sync();
    }

    // z = W∘Σ_t u_t·x_t / |u| with u_t = x_t·z. The last step omits W, and gives z the length that is stored.
    __device__ __forceinline__ void step(bool is_last, Tokens &x) const {
        float size = 0.0f, most = 0.0f;
        const uint32 at = team * BATCH;
#pragma unroll 1
        for (uint32 batch = 0; batch < batches(); batch++) {
            const float product = multiply<false>(batch, x);
            most = fmaxf(most, fabsf(product));
            // The lanes of a slot are in one warp.
            float *of_slot = shared.product + at + slot * SLOT_TOKENS, u[SLOT_TOKENS];
            of_slot[token_of_lane()] = product;
            __syncwarp();
            read(of_slot, 4, u);
            if (WIDE) __syncwarp();
#pragma unroll
            for (uint32 i = 0; i < SLOT_TOKENS; i++) size = fmaf(u[i], u[i], size);
#pragma unroll 1
            for (uint32 m = 0; m < CHUNKS; m++) {
                if (is_past(m)) break;
                reload(batch, m, x);
                float sum[8] = {};
                if (WIDE && batch > 0) read(part(slot) + place(m), sum);
#pragma unroll
                for (uint32 i = 0; i < SLOT_TOKENS; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sum[e] = fmaf(x[i][e], u[i], sum[e]);
                write(sum, part(slot) + place(m));
            }
        }
        if (lane == 0) shared.size[team * SLOTS + slot] = size;
        if (is_last) shared.largest[at + token_of_lane() * SLOTS + slot] = __float_as_uint(most);
        sync();
        float of[SLOTS], sums[CHUNKS], squares[CHUNKS];
        read(shared.size + team * SLOTS, 4, of);
#pragma unroll
        for (uint32 m = 0; m < CHUNKS; m++) {
            const uint32 c = m * members + member;
            sums[m] = is_past(m) ? 0.0f : tree(part(0) + c, width), squares[m] = is_past(m) ? 0.0f : shared.square[c];
        }
        size = tree(of, 1);
        // Equal keys have no axis.
        const float shrink = size == 0.0f ? 0.0f : 1.0f / sqrtf(size);
        float reach = 0.0f;
        if (is_last) {
            const uint32 *from = shared.largest + at + threadIdx.x % WARP;
            most = __uint_as_float(__reduce_max_sync(FULL_WARP, max(from[0], from[WARP])));
            reach = fmaxf(1.15f / sqrtf(float(n)), __fmul_rn(__fmul_rn(0.6f, most), shrink));
        }
#pragma unroll
        for (uint32 m = 0; m < CHUNKS; m++)
            if (!is_past(m)) vector()[m * members + member] = __fmul_rn(__fmul_rn(sums[m], shrink), is_last ? reach : squares[m]);
        sync();
    }

    // Stores the mean less the centre, by half of the first 4 · lanes threads, and the axis, by the other half: four channels a thread.
    __device__ __forceinline__ void store() const {
        const UpdateParams &u = p.update;
        if (member >= 4 * lanes) return;
        const Target to = shared.to[team];
        const uint32 which = member >> log2_of(lanes) + 1, four = member & (2 * lanes - 1), field = four % (GROUP / 4);
        for (uint32 m = 0; m < CHUNKS && !is_past(m); m++) {
            const uint32 c = m * lanes * 8 + four * 4, n = which * dim + c;
            const bool is_there = c < dim && to.exists;
            const float *from = which ? vector() : mean();
            const float4 values = *reinterpret_cast<const float4 *>(from + m * lanes * 8 + (four % 2 * lanes + four / 2) * 4);
            float x[4] = {values.x, values.y, values.z, values.w};
            const char *centre = p.centre + cta.shift.centre + cta.head * p.centre_head + c * p.centre_channel;
            if (!which && p.centre && is_there)
#pragma unroll
                for (uint32 i = 0; i < 4; i++) x[i] = __fsub_rn(x[i], as<float>(centre + i * p.centre_channel));
            char *const row = summary_at(u.first, cta.shift.first, cta, to);
            if (!u.second.data) {
#pragma unroll
                for (uint32 i = 0; i < 4; i++)
                    if (is_there) store_element(row + (n + i) * u.first.channel, u.dtype, x[i]);
                continue;
            }
            float low = fminf(fminf(x[0], x[1]), fminf(x[2], x[3])), high = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
            // A value that is not finite makes the group NaN; products with 0 find it.
            const bool of_numbers = fmaf(x[0], 0.0f, fmaf(x[1], 0.0f, fmaf(x[2], 0.0f, x[3] * 0.0f))) == 0.0f;
            low = is_there ? low : -minus_infinity(), high = !is_there ? minus_infinity() : of_numbers ? high : -minus_infinity();
#pragma unroll
            for (uint32 bit = 1; bit < GROUP / 4; bit *= 2)
                low = fminf(low, __shfl_xor_sync(FULL_WARP, low, bit)), high = fmaxf(high, __shfl_xor_sync(FULL_WARP, high, bit));
            if (!is_there) continue;
            const Range range = high < -minus_infinity() ? Range(low + 0.0f, high) : Range(1.0f, 0.0f);
            as<uint8>(row + n / 2 * u.first.channel) = range.code(x[0]) | range.code(x[1]) << 4;
            as<uint8>(row + (n / 2 + 1) * u.first.channel) = range.code(x[2]) | range.code(x[3]) << 4;
            const uint32 group = which * ((dim + GROUP - 1) / GROUP) + c / GROUP;
            char *const ranges = summary_at(u.second, cta.shift.second, cta, to);
            if (field < 2) as<uint16>(ranges + (2 * group + field) * u.second.channel) = field ? range.min_bits : range.scale_bits;
        }
    }
};

template <uint32 BYTES, bool WIDE> __device__ inline void update_axes(const AxisParams &p, const Layers &layers) {
    using AxisBlock = AxisBlock<BYTES, WIDE>;
    __shared__ typename AxisBlock::Parts shared;
    allow_next_kernel();
    const UpdateParams &u = p.update;
    const CtaShare cta(u, layers);
    AxisBlock block(p, cta, shared);
    // The first CTA guesses which block changes.
    const bool fits = !WIDE && cta.slice == 0;
    const uint32 likely = fits ? stale_blocks(u, u.keys.likely_lengths(cta.seq)).begin : 0;
    const Guess guess(u.keys, cta, likely * u.size, fits ? u.size : ~0u);
    wait_for_previous_kernel();
    const int2 lengths = u.keys.lengths(cta.seq);
    const uint32 page = guess.page_now();
    RawTokens<BYTES> raw;
    if (!WIDE) block.request(guess, raw);
    const Stale stale = stale_blocks(u, lengths);
    bool is_right = !WIDE && guess.key && guess.page == page && stale.begin == likely && stale.end == likely + 1;

    const uint32 together = THREADS >> log2_of(block.members), step = cta.slices * together;
    if (stale.begin + cta.slice * together >= stale.end) return;

#pragma unroll 1
    for (uint32 c = threadIdx.x; c < block.width; c += THREADS) {
        const char *weight = p.weights + cta.shift.weights + cta.head * p.weights_head + c * p.weights_channel;
        const float w = c >= block.dim ? 0.0f : p.weights ? as<float>(weight) : 1.0f;
        shared.square[block.place_of(c)] = __fmul_rn(w, w);
    }
    // Threads may have read different guesses.
    is_right = __syncthreads_and(is_right);
    uint32 j = stale.begin + cta.slice * together + block.team;
    if (j >= stale.end) return;
    typename AxisBlock::Tokens x;
    if (is_right)
        block.n = stale.len - j * u.size, block.drop(raw), block.widen(raw, x);
    else
        block.look_up(j);
    for (; j < stale.end; j += step, is_right = false) {
        const bool is_last = j + step >= stale.end;
        block.begin = j * u.size, block.n = min(u.size, stale.len - block.begin);
        const float share = 1.0f / float(block.n);
        if (!WIDE && !is_right) block.load(0, 0, x);
        if (!WIDE && !is_last) block.look_up(j + step);
        const Target to(u, cta, stale, j);
        block.find_mean(share, x);
        if (!WIDE && !is_last) block.prefetch_keys(j + step);
        if (block.member == 0) shared.to[block.team] = to;
        block.find_farthest(x);
#pragma unroll 1
        for (uint32 n = 1; n <= STEPS; n++) block.step(n == STEPS, x);
        block.store();
        if (WIDE && !is_last) block.look_up(j + step);
    }
}
