// Selection by the INT4 labels of the tokens of candidate blocks, where a list's products fit in the shared memory of a cluster.
//
// Runs where a list has one query position, up to 16 heads and up to 2048 candidates, 32, 64 or 128 channels are kept in rows of 16-byte units,
// and the device has clusters. It computes what labels_general.cuh computes, but products never leave the chip:
//
//   load queries, channels, candidates, lengths ─ load labels ─ products ─ partials to all CTAs ─ weights, scores, bins ─ bins to all CTAs
//   ─ threshold ─ ids
//
// Split: a cluster of CTAs for each list, neighbouring candidate tokens for each CTA. A warp takes 64 of them, four lanes a token, and multiplies
// them with four heads at a time on the tensor cores, in integers. Codes are integers; a head's query is scaled by a power of two to
// integers of 22 bits and a sign, of three digits of eight bits. Relative to the largest channel, the rounding is as small as float32's.
// Scales and minima are applied in float32:
//
//   Σ_c q_c·(min + scale·code_c) = scale·Σ_c q_c·code_c + min·Σ_c q_c
//
// Each 64 tokens and head have a partial, the largest product and the sum of 2^(product − largest), which goes to all CTAs of the cluster. A
// partial is always of 64 tokens, so that sums depend neither on the cluster nor on the batch. Scores stay in the CTA that makes them, and all
// CTAs find the threshold together (cluster_threshold.cuh).
//
// CTAs send words together with their arrival (st.async): a cluster barrier that orders memory would wait for all earlier writes. A relaxed
// cluster barrier makes sure that all CTAs have started before anything is sent. No thread returns early, and each CTA awaits all that is
// sent to it before it ends. Instructions cost as much as bytes, as 16 warps share the issue slots.
//
// Bytes: the labels of the candidates, once: 2.4 MB for 8192 tokens of 64 channels and 8 heads, .6 µs. The rest is latency.
//
// On entry: one query position for each list; up to MOST_HEADS heads; rows of codes are single runs aligned to 16 bytes; up to SHARED_CANDIDATES
// candidates; `unit` is a multiple of 64, and of the tokens of a block where blocks are selected.
#pragma once

#include "common/cluster_threshold.cuh"
#include "select/candidates.cuh"
#include "select/tiles.cuh"

constexpr uint32 THREADS = 512, WARPS = THREADS / WARP;
constexpr uint32 TOKENS = 64, TILES = TOKENS / 16;    // tokens of a warp at a time; their tiles of 16 for the tensor cores
constexpr uint32 ROWS = TOKENS / 8;                   // tokens of which a lane has channels
constexpr uint32 HEADS = 4, MOST_HEADS = 16;          // heads of a tile, most heads of a list
constexpr uint32 MOST_CTAS = 8;
constexpr uint32 SHARED_CANDIDATES = 2048, IDS = SHARED_CANDIDATES / THREADS;
constexpr float LOG2_E = 1.44269504f;
static_assert(MOST_HEADS == WARPS, "a warp has a head");

// Loads WORDS words that are aligned to their size. It does not use __ldg, as a dependent kernel starts before what it reads is written.
template <uint32 WORDS> __device__ inline void load_words(const char *from, uint32 (&to)[WORDS]) {
    if constexpr (WORDS == 1) {
        to[0] = as<uint32>(from);
    } else if constexpr (WORDS == 2) {
        const uint2 x = as<uint2>(from);
        to[0] = x.x, to[1] = x.y;
    } else {
        const uint4 x = as<uint4>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

constexpr uint32 FLOAT16_NAN = 0x7e00;

struct LabelClusterShared {
    ClusterThresholdShared<THREADS> cut;
    int64 codes[WARPS][TOKENS];  // offsets of the codes of a warp's tokens; then their scales and minima
    int32 block[SHARED_CANDIDATES];
    float2 of_query[MOST_HEADS];  // the sum of the kept channels' integers, and what makes products exponents of 2
    float2 head_weight[MOST_HEADS];   // the largest product, and the reciprocal of the sum
    alignas(16) uint32 channel[32 * 4];
    alignas(16) uint8 is_nan[WARPS];  // whether a head's query holds a NaN
    uint32 saw[MOST_CTAS * WARPS];    // in the first CTA: status bits of each warp of the cluster
    int32 per_warp[WARPS], also_per_warp[WARPS];
    Barrier weighed;  // arrival of partials
};

// Addresses of a list's inputs, computed while the kernel before still runs. The inputs are prefetched, so that addresses stay in registers.
struct Addresses {
    const char *ids, *before, *channels, *query;         // this thread's id and the one before it; the warp's query, from its lane on
    const char *counts, *lens, *query_lens, *budgets;    // budgets and query_lens may be null
    const char *codes, *scales, *minima;                 // of the KV head; of the sequence's page where there is no table

    __device__ Addresses(const LabelParams &p, uint32 seq, uint32 head, uint32 list) {
        const List &given = p.candidates;
        const SelectParams &s = p.select;
        const uint32 thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, page = s.place.table ? 0 : seq;
        ids = given.ids + seq * given.ids_seq + list * given.ids_pos + head * given.ids_head + thread * given.ids_entry;
        counts = given.counts + seq * given.counts_seq + list * given.counts_pos + head * given.counts_head;
        lens = s.seq_lens + seq * s.seq_lens_seq, channels = p.channels + head * p.channels_head + thread * p.channels_channel;
        query_lens = s.q_lens ? s.q_lens + seq * s.q_lens_seq : nullptr, budgets = s.budgets ? s.budgets + seq * s.budgets_seq : nullptr;
        query = s.q + seq * s.q_seq + list * s.q_pos + (head * s.group + warp) * s.q_head + lane * s.q_channel;
        codes = p.codes.at(page, 0, head), scales = p.scales.at(page, 0, head), minima = p.minima.at(page, 0, head);
        if (thread < p.candidates_capacity) prefetch(ids);
        if (thread < p.kept) prefetch(channels);
        if (warp < s.group && lane < s.dim) prefetch(query);
        prefetch(counts), prefetch(lens);
        if (s.place.pages > 0 && s.place.rows > 0) prefetch(codes), prefetch(scales), prefetch(minima);
        before = ids - given.ids_entry;
    }
    // Pins in registers the addresses of what labels depend on.
    __device__ void hold() {
        ids = pin_in_register(ids), before = pin_in_register(before), counts = pin_in_register(counts), lens = pin_in_register(lens);
        query_lens = pin_in_register(query_lens), budgets = pin_in_register(budgets), channels = pin_in_register(channels);
    }
};

// What is loaded first. Nothing of it is used before all of it is loaded.
struct EarlyLoads {
    static constexpr uint32 AT_ONCE = 4;
    int32 budget, tokens, queries, count, id[IDS], before[IDS];  // count: candidates that are given; id, before: this thread's candidates, and the one before each
    uint32 channel;                                              // the kept channel of this thread
    uint32 bits[AT_ONCE];                                        // channels of the warp's query, from its lane on, WARP apart

    __device__ EarlyLoads(const LabelParams &p, const Addresses &places) {
        const SelectParams &s = p.select;
        const uint32 thread = threadIdx.x, lane = thread % WARP;
        const int64 step = p.candidates.ids_entry;
        // What labels depend on is loaded first, and in this order.
#pragma unroll
        for (uint32 n = 0; n < IDS; n++) id[n] = before[n] = -1;
        if (thread < p.candidates_capacity) id[0] = request_bits<4>(places.ids);
        if (thread < p.candidates_capacity && thread > 0) before[0] = request_bits<4>(places.before);
        count = request_bits<4>(places.counts), tokens = 0, queries = s.positions, budget = s.k;
        if (lane == 0) tokens = request_bits<4>(places.lens);
        if (lane == 0 && places.query_lens) queries = request_bits<4>(places.query_lens);
        if (places.budgets) budget = request_bits<4>(places.budgets);
        channel = s.dim;  // reads as 0
        if (thread < p.kept) channel = request_bits<4>(places.channels);
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) bits[n] = 0;
        if (thread / WARP < s.group) {
            const bool is_wide = s.q_type == FLOAT32;
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const char *at = places.query + n * WARP * s.q_channel;
                if (lane + n * WARP < s.dim && is_wide) bits[n] = as<uint32>(at);
                if (lane + n * WARP < s.dim && !is_wide) bits[n] = as<uint16>(at);
            }
        }
        if (p.candidates_capacity > THREADS) {
            asm volatile("" ::: "memory");  // there are mostly no more: a branch is shorter than what it skips
#pragma unroll
            for (uint32 n = 1; n < IDS; n++) {
                if (thread + n * THREADS >= p.candidates_capacity) break;
                id[n] = request_bits<4>(places.ids + n * THREADS * step), before[n] = request_bits<4>(places.before + n * THREADS * step);
            }
        }
        // One lane loads them: if all lanes did, the compiler would move arithmetic before the branches, which would wait before the rest is loaded.
        tokens = __shfl_sync(FULL_WARP, tokens, 0), queries = __shfl_sync(FULL_WARP, queries, 0);
    }
};

// A lane has WORDS words of a token, of eight channels each.
template <uint32 WORDS, bool OF_BLOCKS> struct LabelCluster {
    const LabelClusterParams &params;
    const LabelParams &p;
    const SelectParams &s;
    LabelClusterShared &shared;
    const uint32 thread, warp, lane, slice, heads;
    uint32 limit;         // tokens that the list sees and for which the index has room
    uint32 first, count;  // this CTA's candidate tokens
    uint32 known;         // candidate tokens below the limit: the first ones
    bool is_sound;        // the query holds no NaN
    bool clamped;
    uint32 k;
    uint32 begin, end, wanted, init, local;  // `wanted` of candidates begin … end−1 (tokens or blocks) are selected; init, local: first and last ones, which are forced
    Row row;
    Candidates candidates;

    __device__ LabelCluster(const LabelClusterParams &params, LabelClusterShared &shared)
        : params(params), p(params.labels), s(params.labels.select), shared(shared), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          slice(cluster_rank()), heads(params.labels.select.group) {}

    // Dynamic shared memory: scores and products of this CTA's tokens or blocks, partials of the whole list, queries.
    __device__ float *scores() const { return row_scores; }
    __device__ float *products() const { return row_scores + params.products / 4; }
    __device__ float2 *partials() const { return reinterpret_cast<float2 *>(row_scores + params.partials / 4); }
    __device__ float2 *ranges() const { return reinterpret_cast<float2 *>(shared.codes[warp]); }
    __device__ uint2 *queries() const { return reinterpret_cast<uint2 *>(row_scores + params.queries / 4); }
    __device__ uint32 parts() const { return (known + TOKENS - 1) / TOKENS; }

    // Each warp keeps a head's query in float32 where scores lie later.
    __device__ void keep_queries(const EarlyLoads &request, const Addresses &places) const {
        constexpr uint32 AT_ONCE = EarlyLoads::AT_ONCE;
        bool is_nan = false;
        float x[AT_ONCE];
        widen_queries(request.bits, s.q_type, x);
#pragma unroll 1
        for (uint32 c = lane; warp < heads; ) {
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                is_nan |= x[n] != x[n];
                if (c + n * WARP < s.dim) scores()[warp * s.dim + c + n * WARP] = x[n];
            }
            c += AT_ONCE * WARP;
            if (c - lane >= s.dim) break;
            const uint32 left = (s.dim + WARP - 1 - min(c, s.dim)) / WARP;
            ::load_queries(places.query + (c - lane) * s.q_channel, WARP * s.q_channel, left, s.q_type, x);
        }
        is_nan = __any_sync(FULL_WARP, is_nan);
        if (lane == 0) shared.is_nan[warp] = is_nan;
    }
    // Each warp makes integers of a head's kept channels, and lays out their digits as lanes read them: [tiles, words, two digits of each head or
    // twice the third, lanes]. A lane has four channels of a word, even or odd ones. Heads that do not exist weigh 0.
    __device__ void stage_queries() const {
        if (warp >= heads) {
            if (lane == 0) shared.of_query[warp] = make_float2(0.0f, 0.0f);
            return;
        }
        const uint32 *channels = shared.channel + lane / 2 * 8 + lane % 2;
        float x[4] = {};
        uint32 most = 0;
#pragma unroll
        for (uint32 i = 0; i < 4; i++) {
            if (lane >= 8 * WORDS) continue;
            const uint32 channel = channels[2 * i];
            if (channel < s.dim) x[i] = scores()[warp * s.dim + channel];
            const uint32 size = __float_as_uint(x[i]) & 0x7fffffff;
            if (size < 0x7f800000) most = max(most, size);
        }
        // 2^exponent is above the largest channel; a float32 holds 2^±(22 − exponent).
        const uint32 biased = max(__reduce_max_sync(FULL_WARP, most) >> 23, 22u);
        const float up = __uint_as_float((275 - biased) << 23), down = __uint_as_float((biased - 21) << 23);
        float sum = 0.0f;
        uint32 digits[3] = {};
#pragma unroll
        for (uint32 i = 0; i < 4; i++) {
            const float scaled = x[i] * up;
            sum += scaled;
            int32 rest = fabsf(scaled) < -minus_infinity() ? __float2int_rn(scaled) : 0;
#pragma unroll
            for (uint32 n = 0; n < 3; n++) {
                const int32 digit = int32(uint32(rest) << 24) >> 24;
                digits[2 - n] |= (uint32(digit) & 0xff) << 8 * i, rest = rest - digit >> 8;
            }
        }
        const uint32 at = lane / 2 / WORDS, word = lane / 2 % WORDS, column = warp % HEADS * 2;
        uint32 *to = reinterpret_cast<uint32 *>(queries() + (warp / HEADS * WORDS + word) * 2 * WARP + column * 4 + at) + lane % 2;
        if (lane < 8 * WORDS) to[0] = digits[0], to[8] = digits[1], to[2 * WARP] = to[2 * WARP + 8] = digits[2];
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        if (lane == 0) shared.of_query[warp] = make_float2(sum, down * (s.scale * LOG2_E));
    }

    // Drops candidates that begin past the list's tokens or do not exceed all candidates before them; mostly there are none. All CTAs do so.
    __device__ void find_candidates(const EarlyLoads &request) {
        const uint32 entries = min(uint32(max(request.count, 0)), p.candidates_capacity);
        bool is_clean = true;
#pragma unroll
        for (uint32 n = 0; n < IDS; n++) {
            const uint32 i = thread + n * THREADS;
            if (i >= entries) continue;
            shared.block[i] = request.id[n];
            is_clean &= request.id[n] > request.before[n] && uint32(request.id[n]) < row.n;
        }
        const int32 budget = __shfl_sync(FULL_WARP, request.budget, 0);  // awaited here: later, the wait would include the labels
        k = min(uint32(max(budget, 0)), s.capacity);
        clamped = row.clamped || request.count != int32(entries) || budget != int32(k) || (OF_BLOCKS && s.scores && row.n > s.max_blocks);
        uint32 count = entries;
        if (!__syncthreads_and(is_clean)) {
            const auto id_of = [&](uint32 base) { return shared.block[base + thread]; };
            count = keep_ascending<THREADS>(entries, row.n, id_of, shared.block, shared.per_warp, shared.also_per_warp);
        }
        candidates = {shared.block, count, s.block_size, row.tokens, s.by_block};
        limit = min(row.tokens, s.place.capacity);
        const uint32 most = min(count * s.block_size, limit);  // bound of `known`
        const uint32 share = copy_addresses(most) * params.unit;
        first = min(slice * share, most), this->count = min(share, most - first);
    }
    // Units that a CTA has, at most.
    __device__ uint32 copy_addresses(uint32 tokens) const { return params.by_units.divide(tokens + params.by_units.value - 1); }
    // Counts the candidate tokens below the limit, while labels are in flight.
    __device__ void count_known() {
        known = candidates.tokens_below(limit);
        first = min(first, known), count = min(count, known - first);
    }

    // Loads the labels of the CTA's tokens from `from` on: channels of eight tokens, and scale and minimum of two tokens. Returns which of the two
    // exist. `misses`: one does not exist that should.
    __device__ uint32 request_labels(const Addresses &places, uint32 from, uint32 (&codes)[ROWS][WORDS], uint32 (&range)[2][2],
                                     bool &misses) const {
        const uint32 last = max(first + count, 1u) - 1;
        uint32 n[2], exist = 0;
#pragma unroll
        for (uint32 t = 0; t < 2; t++) {
            const uint32 at = from + t * WARP + lane;
            const uint32 token = candidates.token(min(first + at, last));  // without a branch, so that both are looked up at once
            n[t] = at < count ? token : limit;
            exist |= uint32(n[t] < limit) << t;
        }
        const uint32 due = exist;
        int64 at_codes[2] = {}, at_scales[2] = {}, at_minima[2] = {};
        if (s.place.table) {
            uint32 page[2];
#pragma unroll
            for (uint32 t = 0; t < 2; t++) {
                const uint32 number = n[t] / s.place.rows;
                n[t] -= number * s.place.rows, page[t] = s.place.pages;
                if (exist >> t & 1) page[t] = as<uint32>(s.place.table + row.seq * s.place.table_seq + number * s.place.table_page);
            }
#pragma unroll
            for (uint32 t = 0; t < 2; t++) {
                if (page[t] >= s.place.pages) exist &= ~(1u << t);
                at_codes[t] = page[t] * p.codes.page, at_scales[t] = page[t] * p.scales.page, at_minima[t] = page[t] * p.minima.page;
            }
        }
        misses = exist != due;
        __syncwarp();  // all lanes have read the warp's ranges
#pragma unroll
        for (uint32 t = 0; t < 2; t++) {
            const bool exists = exist >> t & 1;
            const char *scale = places.scales + at_scales[t] + n[t] * p.scales.row;
            const char *least = places.minima + at_minima[t] + n[t] * p.minima.row;
            range[t][0] = 0, range[t][1] = FLOAT16_NAN;  // makes the product NaN, which becomes −inf
            if (exists) range[t][0] = as<uint16>(scale);
            if (exists) range[t][1] = as<uint16>(least);
            shared.codes[warp][t * WARP + lane] = exists ? at_codes[t] + n[t] * p.codes.row : 0;  // tokens that do not exist read other codes
        }
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++)
#pragma unroll
            for (uint32 word = 0; word < WORDS; word++) codes[j][word] = 0;
        if (!__any_sync(FULL_WARP, exist)) return exist;
        __syncwarp();  // all offsets of codes are written
        const char *own = places.codes + lane % 4 * 4 * WORDS;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) load_words(own + shared.codes[warp][8 * j + lane / 4], codes[j]);
        return exist;
    }
    // Computes Σ q·code of the warp's tokens and a tile of heads. Lane l gets head l % 4, and tokens l / 4, l / 4 + 8, ….
    __device__ void multiply(uint32 tile, const uint32 (&codes)[ROWS][WORDS], float (&products)[ROWS]) const {
        // Sums of digits, less than 2^22, are added to the bits of ZERO, so that they are floats without a conversion.
        constexpr float ZERO = 12582912.0f;
        const uint2 *q = queries() + tile * WORDS * 2 * WARP + lane;
#pragma unroll
        for (uint32 m = 0; m < TILES; m++) {
            int32 sums[2][4];
#pragma unroll
            for (uint32 i = 0; i < 4; i++) sums[0][i] = sums[1][i] = __float_as_int(ZERO);
#pragma unroll
            for (uint32 word = 0; word < WORDS; word++) {
                // Even channels come first, then odd ones.
                const uint32 a[4] = {codes[2 * m][word] & 0x0f0f0f0f, codes[2 * m + 1][word] & 0x0f0f0f0f,
                                     codes[2 * m][word] >> 4 & 0x0f0f0f0f, codes[2 * m + 1][word] >> 4 & 0x0f0f0f0f};
                multiply_add(sums[0], a, q[word * 2 * WARP]), multiply_add(sums[1], a, q[(word * 2 + 1) * WARP]);
            }
#pragma unroll
            for (uint32 row = 0; row < 2; row++) {
                const auto sum = [&](uint32 digit) { return __int_as_float(sums[digit / 2][2 * row + digit % 2]); };
                const float upper = fmaf(sum(0), 256.0f, -257.0f * ZERO) + sum(1);
                products[2 * m + row] = fmaf(upper, 256.0f, -ZERO) + sum(2);
            }
        }
    }
    // The partial of a head: its largest product, and the sum. Lanes that are four apart get the same partial.
    __device__ void reduce(const float (&products)[ROWS], float &most, float &sum) const {
        most = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) most = fmaxf(most, products[j]);
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
        const float from_most = most > minus_infinity() ? most : 0.0f;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) sum += exp2_fast(products[j] - from_most);
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
    }
    // Makes −inf of products that are not finite or whose token does not exist. Returns SAW_NAN if the product of an existing token is NaN.
    __device__ uint32 mask_products(uint32 h, uint32 exist, float (&products)[ROWS]) const {
        const uint32 there[2] = {__ballot_sync(FULL_WARP, exist & 1), __ballot_sync(FULL_WARP, exist & 2)};
        uint32 saw = 0;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) {
            const bool exists = there[j / 4] >> 8 * (j % 4) + lane / 4 & 1;
            if (exists && h < heads && is_sound && products[j] != products[j]) saw = SAW_NAN;
            if (!exists || !(fabsf(products[j]) < -minus_infinity())) products[j] = minus_infinity();
        }
        return saw;
    }
    // Stores the products of the CTA's tokens from `from` on with a head. The partial goes to all CTAs, those of two heads together.
    __device__ uint32 finish_tile(uint32 tile, uint32 from, uint32 exist, float (&products)[ROWS]) const {
        const uint32 h = tile * HEADS + lane % 4;
        const float2 of_query = shared.of_query[h];
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) {
            const float2 range = ranges()[8 * j + lane / 4];
            products[j] = fmaf(range.x, products[j], range.y * of_query.x) * of_query.y;
        }
        float most, sum;
        uint32 saw = 0;
        reduce(products, most, sum);
        // A product that is not finite shows in the sum or in the largest.
        if (__any_sync(FULL_WARP, sum != sum || !(fabsf(most) < -minus_infinity()))) {
            saw = mask_products(h, exist, products);
            reduce(products, most, sum);
        }
        const uint32 own[2] = {__float_as_uint(most), __float_as_uint(sum)};
        const uint4 both = make_uint4(own[0], own[1], __shfl_down_sync(FULL_WARP, own[0], 1), __shfl_down_sync(FULL_WARP, own[1], 1));
        const uint32 number = (first + from) / TOKENS;
        if (lane / 4 < s.slices && lane % 2 == 0 && h < heads)
            send_four(lane / 4, partials() + number * params.pitch + h, both, shared.weighed);
        float *to = this->products() + (from + lane / 4) * params.pitch + h;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++, to += 8 * params.pitch) *to = products[j];
        return saw;
    }
    // Each CTA expects the partials, and the first CTA also the status bits of all warps.
    __device__ void expect_partials() const {
        const uint32 of_warps = slice == 0 ? s.slices * WARPS * 4 : 0;
        shared.weighed.expect(parts() * ((heads + 1) / 2) * 16 + of_warps);
    }

    // Each warp joins a head's partials. Weights of heads that do not exist are 0.
    __device__ void weigh_heads() const {
        if (warp >= params.pitch) return;
        const float2 *of = partials() + warp;
        const uint32 parts = warp < heads ? this->parts() : 0;
        // Read once: these are mostly all.
        constexpr uint32 AT_ONCE = 4;
        float2 some[AT_ONCE];
        float most = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            some[i] = make_float2(minus_infinity(), 0.0f);
            if (lane + i * WARP < parts) some[i] = of[(lane + i * WARP) * params.pitch];
        }
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) most = fmaxf(most, some[i].x);
#pragma unroll 4
        for (uint32 n = lane + AT_ONCE * WARP; n < parts; n += WARP) most = fmaxf(most, of[n * params.pitch].x);
        most = score_of(__reduce_max_sync(FULL_WARP, sort_key(most)));
        const float from_most = most > minus_infinity() ? most : 0.0f;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) sum = fmaf(some[i].y, exp2_fast(some[i].x - from_most), sum);
#pragma unroll 4
        for (uint32 n = lane + AT_ONCE * WARP; n < parts; n += WARP)
            sum = fmaf(of[n * params.pitch].y, exp2_fast(of[n * params.pitch].x - from_most), sum);
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        if (!OF_BLOCKS) sum *= float(heads);
        if (lane == 0) shared.head_weight[warp] = make_float2(from_most, sum > 0.0f && is_sound ? __fdividef(1.0f, sum) : 0.0f);
    }
    // The softmax mass of the CTA's tokens n and m, added over the heads. Two tokens at a time hide each other's latency.
    __device__ float2 masses(uint32 n, uint32 m) const {
        const float4 *of = reinterpret_cast<const float4 *>(products() + n * params.pitch);
        const float4 *also = reinterpret_cast<const float4 *>(products() + m * params.pitch);
        const float2 *by = shared.head_weight;
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (uint32 h = 0; h < params.pitch; h += 4, of++, also++, by += 4) {
            const float x[4] = {of->x, of->y, of->z, of->w}, y[4] = {also->x, also->y, also->z, also->w};
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                sum.x = fmaf(exp2_fast(x[i] - by[i].x), by[i].y, sum.x);
                sum.y = fmaf(exp2_fast(y[i] - by[i].x), by[i].y, sum.y);
            }
        }
        return sum;
    }
    // A few lanes add up the mass of each candidate block of this CTA.
    __device__ void score_blocks(const ClusterThreshold<THREADS> &cut) const {
        const uint32 lanes = params.lanes, log_lanes = __ffs(lanes) - 1, within = lane & (lanes - 1), step = THREADS >> log_lanes;
        const uint32 per_warp = WARP >> log_lanes;
        const uint32 rounded = (cut.end - cut.begin + per_warp - 1) & ~(per_warp - 1);  // all lanes of a warp take part in shuffles
        for (uint32 n = thread >> log_lanes; n < rounded; n += step) {
            const uint32 entry = cut.begin + n;
            float sum = 0.0f;
            const uint32 from = entry * s.block_size, to = entry < cut.end ? min(from + s.block_size, known) : 0;
#pragma unroll 1
            for (uint32 at = from + within; at < to; at += 2 * lanes) {
                const float2 both = masses(at - first, min(at + lanes, to - 1) - first);
                sum += both.x;
                if (at + lanes < to) sum += both.y;
            }
            for (uint32 bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (within > 0 || entry >= cut.end) continue;
            cut.put(entry, sum);
            write_score(candidates.block[entry], is_sound ? sum : minus_infinity());
        }
        for (uint32 j = slice * THREADS + thread; s.scores && j < min(row.n, s.max_blocks); j += s.slices * THREADS)
            if (candidates.entry_of(j) == candidates.count) write_score(j, minus_infinity());
    }
    // Writes a score at a place of the caller's scores.
    __device__ void write_score(uint32 place, float score) const {
        if (!s.scores || (OF_BLOCKS && place >= s.max_blocks)) return;
        as<float>(s.scores + row.seq * s.scores_seq + row.list * s.scores_pos + row.head * s.scores_head + place * s.scores_block) = score;
    }

    __device__ void write_id(uint32 place, uint32 id) const {
        const List &to = s.selected;
        as<int32>(to.ids + row.seq * to.ids_seq + row.list * to.ids_pos + row.head * to.ids_head + place * to.ids_entry) = id;
    }
    // Where scores add up to at most 2^log_all, the wanted-th largest is at most 2 to the returned power, except for rounding.
    __device__ static int32 log_most(int32 log_all, uint32 wanted) { return log_all - (31 - __clz(max(wanted, 1u))); }
    // Each CTA scores its own tokens and lists those that are selected; the first CTA lists the rest.
    __device__ void list_tokens() const {
        const uint32 weighed = min(end, known), from = min(begin, weighed), taken = min(wanted, weighed - from), forced = init + local;
        ClusterThreshold<THREADS> cut(shared.cut, scores(), slice, s.slices, first, first + count, from, weighed, log_most(0, taken));
#pragma unroll 1
        for (uint32 i = cut.first + lane; i < cut.last; i += 2 * WARP) {
            const float2 both = masses(i - first, min(i + WARP, cut.last - 1) - first);
            cut.put(i, both.x);
            if (i + WARP < cut.last) cut.put(i + WARP, both.y);
        }
        cut.find(taken);
        cut.take([&](uint32 place, uint32 i) {
            write_id(init + place, candidates.token(i));
            write_score(init + place, cut.score(i));
        });
        // Tokens without a weight rank behind all others.
        for (uint32 i = taken + thread; slice == 0 && i < wanted; i += THREADS) {
            write_id(init + i, candidates.token(max(begin, weighed) + i - taken));
            write_score(init + i, 0.0f);
        }
        for (uint32 i = thread; i < forced; i += THREADS) {
            const uint32 token = i < init ? i : row.tokens - forced + i, place = i < init ? i : wanted + i;
            if (slice == 0) write_id(place, token);
            if (!s.scores) continue;
            const uint32 entry = candidates.entry_of(token / s.block_size);
            const uint32 at = entry < candidates.count ? entry * s.block_size + token % s.block_size : known;
            if (cut.begin <= at && at < cut.end)
                write_score(place, cut.score(at));
            else if (slice == 0 && at >= known)
                write_score(place, 0.0f);
        }
    }
    __device__ void list_blocks() const {
        // The last CTA also has the blocks for which the index has no room: they weigh nothing.
        const uint32 blocks = copy_addresses(min(candidates.count * s.block_size, limit)) * params.unit_blocks;
        const uint32 own = min(slice * blocks, candidates.count);
        const uint32 own_end = slice + 1 == s.slices ? candidates.count : min(own + blocks, candidates.count);
        ClusterThreshold<THREADS> cut(shared.cut, scores(), slice, s.slices, own, own_end, begin, end, log_most(32 - __clz(heads - 1), wanted));
        score_blocks(cut);
        const uint32 taken = min(wanted, end - begin), others = wanted - taken, forced = init + local;
        // Other blocks are selected only if all candidates are. So many of them lie before entry i.
        const auto others_before = [&](uint32 i) { return candidates.block[begin + i] - init - i; };
        cut.find(taken);
        cut.take([&](uint32 place, uint32 i) {
            write_id(init + place + (others > 0 ? min(others_before(i - begin), others) : 0), candidates.block[i]);
        });
        if (slice > 0) return;
        for (uint32 i = thread; i < others; i += THREADS) {
            uint32 low = 0, high = end - begin;
            while (low < high) {
                const uint32 middle = (low + high) / 2;
                if (others_before(middle) <= i)
                    low = middle + 1;
                else
                    high = middle;
            }
            write_id(init + i + low, init + i + low);
        }
        for (uint32 i = thread; i < forced; i += THREADS) write_id(i < init ? i : wanted + i, i < init ? i : row.n - forced + i);
    }
    // Called by all CTAs; the first one, which received the status bits of all warps, writes count and status.
    __device__ void report() const {
        if (slice > 0 || warp < WARPS - 1) return;
        uint32 seen = 0;
        for (uint32 i = lane; i < s.slices * WARPS; i += WARP) seen |= shared.saw[i];
        seen = __reduce_or_sync(FULL_WARP, seen);
        if (lane > 0) return;
        const List &to = s.selected;
        as<int32>(to.counts + row.seq * to.counts_seq + row.list * to.counts_pos + row.head * to.counts_head) = init + local + wanted;
        if (s.status) as<uint32>(s.status + row.seq * s.status_seq + row.list * s.status_pos + row.head * s.status_head) = seen;
    }

    // Finds what is forced, and how many of which candidates are selected besides.
    __device__ void find_quota() {
        const uint32 n = OF_BLOCKS ? row.n : row.tokens;
        init = min(s.init, n), local = min(s.local, n - init);
        const auto before = [&](uint32 i) { return OF_BLOCKS ? candidates.entries_before(min(uint64(i) * s.block_size, uint64(row.tokens))) : candidates.tokens_below(i); };
        begin = before(init), end = max(before(n - local), begin);
        if (OF_BLOCKS && !is_sound) begin = end = 0;  // all candidates score alike
        const uint32 rest = OF_BLOCKS ? n - init - local : end - begin;
        wanted = min(k > init + local ? k - init - local : 0, rest);
    }

    __device__ void run() {
        shared.cut.open();
        if (thread == 0) shared.weighed.open(1);
        __syncwarp();
        cluster_start();
        const uint32 number = s.by_slices.divide(blockIdx.x), of_heads = s.by_heads.divide(number), seq = s.by_lists.divide(of_heads);
        Addresses places(p, seq, number - of_heads * s.kv_heads, of_heads - seq * s.lists);
        places.hold();
        wait_for_previous_kernel();
        const EarlyLoads request(p, places);
        row = Row(s, number, Lengths(request.tokens, request.queries));
        keep_queries(request, places);
        if (thread < p.kept) shared.channel[thread] = request.channel;
        find_candidates(request);

        uint32 codes[ROWS][WORDS], range[2][2], from = warp * TOKENS;
        bool misses;
        uint32 exist = request_labels(places, from, codes, range, misses);
        // Labels are in flight meanwhile.
        const bool is_there = row.first < row.last;
        const uint4 are_nan = *reinterpret_cast<const uint4 *>(shared.is_nan);
        is_sound = !is_there || (are_nan.x | are_nan.y | are_nan.z | are_nan.w) == 0;
        stage_queries();
        count_known();
        uint32 saw = (is_sound ? 0 : SAW_NAN) | (clamped ? CLAMPED : 0);
        if (limit < row.tokens && candidates.tokens_below(row.tokens) > known) saw |= NO_SUMMARY;
        if (thread == 0) expect_partials();
        __syncthreads();
        cluster_started();
#pragma unroll 1
        for (; from < count; from += WARPS * TOKENS) {
            if (from > warp * TOKENS) exist = request_labels(places, from, codes, range, misses);
            if (misses) saw |= NO_SUMMARY;
            __syncwarp();  // all lanes have read the offsets of codes
#pragma unroll
            for (uint32 t = 0; t < 2; t++) ranges()[t * WARP + lane] = make_float2(widen_float16(range[t][0]), widen_float16(range[t][1]));
            __syncwarp();
#pragma unroll 1
            for (uint32 tile = 0; tile < params.tiles; tile++) {
                float products[ROWS];
                multiply(tile, codes, products);
                saw |= finish_tile(tile, from, exist, products);
            }
        }
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0) send_word(0, &shared.saw[slice * WARPS + warp], saw, shared.weighed);
        find_quota();  // while other CTAs' partials arrive
        shared.weighed.wait(0);
        weigh_heads();
        report();
        __syncthreads();
        if (OF_BLOCKS)
            list_blocks();
        else
            list_tokens();
    }
};

template <uint32 WORDS, bool OF_BLOCKS> __device__ inline void select_labels(const LabelClusterParams &p) {
    __shared__ LabelClusterShared shared;
    allow_next_kernel();
    LabelCluster<WORDS, OF_BLOCKS>(p, shared).run();
}
