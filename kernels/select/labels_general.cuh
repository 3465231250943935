// Selection by the INT4 labels of the tokens of candidate blocks, in one launch.
//
//   p[h, t] = softmax over all candidate tokens t of scale·q̃_h·k̃_t,   q̃·k̃ = min·Σ_c q̃_c + scale·Σ_c q̃_c·code_c on the kept channels
//   tokens: α[t] = mean_h p[h, t]                   · the exact top k of α, ascending
//   blocks (LABEL_MASS): s[j] = Σ_h Σ_{t in j} p[h, t] · the exact top k of s; a block that is no candidate is worth −inf
//   Where query positions share a list, α[t] and s[j] are the largest over these positions.
//
// Runs where labels_cluster.cuh does not take the call: positions that share a list, more than 16 heads, a number of kept channels other than
// 32, 64 and 128, more than 2048 candidates, lists that do not fit in a cluster, devices without clusters.
//
// Bytes: the labels of the candidates, once: r/2 + 4 a token and KV head. 8192 tokens of 64 channels and 8 heads have 2.4 MB, .6 µs; the rest is
// latency. Products are written and read in the L2 cache, 4 bytes a token and query head.
//
// Split: a cluster of CTAs for each list. A warp takes 64 neighbouring candidate tokens, two a lane, and multiplies them with four heads at a
// time, which lie in shared memory. Each such chunk and head has a partial: the largest product and the sum of e^(product − largest). Chunks
// have one size, so that sums do not depend on the cluster.
//
//   queries, candidates ─ products, partials ─ cluster ─ weights ─ (blocks: sums ─ cluster) ─ threshold ─ places ─ ids
//
// On entry: D a multiple of 8; heads ≤ MOST_HEADS; LabelParams.adjacent only where r/2 is a multiple of 16 and rows of codes are aligned to that;
// candidate_tokens ≥ the candidate tokens of any list for which the index has room.
#pragma once

#include "common/cluster_topk.cuh"
#include "select/candidates.cuh"

constexpr uint32 THREADS = TOPK_THREADS, WARPS = THREADS / WARP;
constexpr uint32 TOKENS = 2, TOKEN_CHUNK = TOKENS * WARP;  // tokens of a lane, of a warp
constexpr uint32 HEADS = 4;                                // heads at a time
constexpr uint32 STAGED = 4096, STAGED_HEADS = 64;         // most channels and heads in shared memory at a time
constexpr uint32 MOST_HEADS = 1024;                        // most query heads of a list, of all its positions
constexpr uint32 SHARED_CANDIDATES = 2048;               // most candidates that shared memory holds

struct Staged {
    float4 q[STAGED / 4];  // [heads, kept channels]
    float sum[STAGED_HEADS];
};

struct LabelShared {
    union {
        TopKShared top;
        ClusterTopKShared<THREADS> cluster_top;
        Staged staged;
    };
    float2 head_weight[MOST_HEADS];  // the largest product, and the reciprocal of the sum
    int32 block[SHARED_CANDIDATES];
    int32 per_warp[WARPS], also_per_warp[WARPS];
    uint32 nan, seen;
};

// What is loaded before the lengths are known.
struct Early {
    static constexpr uint32 IDS = 2, CHANNELS = 2;
    int32 count, id[IDS];      // how many candidates are given, and this thread's first ones
    uint32 channel[CHANNELS];  // the first kept channels that this lane stages

    __device__ Early(const LabelParams &p) {
        const SelectParams &s = p.select;
        const uint32 number = s.by_slices.divide(blockIdx.x), heads = s.by_heads.divide(number), head = number - heads * s.kv_heads;
        const uint32 seq = s.by_lists.divide(heads), list = heads - seq * s.lists;
        const List &given = p.candidates;
        count = as<int32>(given.counts + seq * given.counts_seq + list * given.counts_pos + head * given.counts_head);
        const char *ids = given.ids + seq * given.ids_seq + list * given.ids_pos + head * given.ids_head;
#pragma unroll
        for (uint32 n = 0; n < IDS; n++) {
            const uint32 i = threadIdx.x + n * THREADS;
            id[n] = i < p.candidates_capacity ? as<int32>(ids + i * given.ids_entry) : -1;
        }
#pragma unroll
        for (uint32 n = 0; n < CHANNELS; n++) {
            const uint32 i = threadIdx.x % WARP + n * WARP;
            channel[n] = s.dim;  // reads as 0
            if (i < p.kept) channel[n] = as<uint32>(p.channels + head * p.channels_head + i * p.channels_channel);
        }
    }
};

struct Labels {
    const LabelParams &p;
    const SelectParams &s;
    LabelShared &shared;
    const Early early;
    const Row row;
    const uint32 thread, warp, lane, ctas, cta, heads;
    Candidates candidates;
    uint32 known;  // how many candidate tokens the index has room for: the first ones

    __device__ Labels(const LabelParams &p, LabelShared &shared)
        : p(p), s(p.select), shared(shared), early(p), row(p.select, p.select.by_slices.divide(blockIdx.x)), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          ctas(cluster_ctas()), cta(cluster_rank()), heads((row.last - row.first) * p.select.group) {}

    __device__ const char *query(uint32 h, uint32 channel) const {
        const uint32 position = row.first + h / s.group, head = row.head * s.group + h % s.group;
        return s.q + row.seq * s.q_seq + position * s.q_pos + head * s.q_head + channel * s.q_channel;
    }
    __device__ void find_nan() {
        constexpr uint32 AT_ONCE = 4;
        for (uint32 h = warp; h < heads; h += WARPS) {
#pragma unroll 1
            for (uint32 c = lane; c < s.dim; c += AT_ONCE * WARP) {
                float x[AT_ONCE];
                load_queries(query(h, c), WARP * s.q_channel, (s.dim - c + WARP - 1) / WARP, s.q_type, x);
#pragma unroll
                for (uint32 n = 0; n < AT_ONCE; n++)
                    if (x[n] != x[n]) atomicOr(&shared.nan, 1u << h / s.group);
            }
        }
    }

    // Drops candidates that begin past the list's tokens or do not exceed all candidates before them. All CTAs of the list do so.
    __device__ void find_candidates() {
        int32 *to = p.blocks ? p.blocks + uint64(blockIdx.x) * p.candidates_capacity : shared.block;
        const List &list = p.candidates;
        const char *ids = list.ids + row.seq * list.ids_seq + row.list * list.ids_pos + row.head * list.ids_head;
        const uint32 entries = min(uint32(max(early.count, 0)), p.candidates_capacity);
        const auto id_of = [&](uint32 base) {
            return base == 0 ? early.id[0] : base < Early::IDS * THREADS ? early.id[1] : as<int32>(ids + (base + thread) * list.ids_entry);
        };
        const uint32 count = keep_ascending<THREADS>(entries, row.n, id_of, to, shared.per_warp, shared.also_per_warp);
        candidates = {to, count, s.block_size, row.tokens, s.by_block};
        known = candidates.tokens_below(min(row.tokens, s.place.capacity));
        if (thread == 0 && candidates.tokens_below(row.tokens) > known) atomicOr(&shared.seen, NO_SUMMARY);
    }

    // Stages the kept channels of heads first … first + count − 1, rounded up to a multiple of HEADS, and the sums of these channels.
    __device__ void stage(uint32 first, uint32 count, uint32 row_len) {
        float *to = reinterpret_cast<float *>(shared.staged.q);
        const uint32 rounded = (count + HEADS - 1) / HEADS * HEADS;
        for (uint32 h = warp; h < rounded; h += WARPS) {
            float sum = 0.0f;
#pragma unroll 1
            for (uint32 base = lane; base < row_len; base += Early::CHANNELS * WARP) {
                const char *from[Early::CHANNELS];
                bool reads[Early::CHANNELS];
                float x[Early::CHANNELS];
#pragma unroll
                for (uint32 m = 0; m < Early::CHANNELS; m++) {
                    const uint32 n = base + m * WARP;
                    uint32 channel = base < WARP ? early.channel[m] : s.dim;
                    if (base >= WARP && n < p.kept) channel = as<uint32>(p.channels + row.head * p.channels_head + n * p.channels_channel);
                    reads[m] = h < count && channel < s.dim, from[m] = query(first + h, reads[m] ? channel : 0);
                }
                load_queries(from, reads, s.q_type, x);
#pragma unroll
                for (uint32 m = 0; m < Early::CHANNELS; m++) {
                    if (base + m * WARP >= row_len) break;
                    to[h * row_len + base + m * WARP] = x[m] * s.scale, sum += x[m] * s.scale;
                }
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (lane == 0) shared.staged.sum[h] = sum;
        }
    }

    // Adds the products of eight codes of each token with the heads.
    __device__ void multiply(const float4 *q, uint32 row_len, const uint32 (&codes)[TOKENS], float (&x)[TOKENS][HEADS]) const {
        float code[TOKENS][8];
#pragma unroll
        for (uint32 t = 0; t < TOKENS; t++) {
#pragma unroll
            for (uint32 i = 0; i < 8; i++) code[t][i] = __uint_as_float(0x4b000000 | codes[t] >> 4 * i & 15) - 8388608.0f;
        }
#pragma unroll
        for (uint32 h = 0; h < HEADS; h++) {
            const float4 low = q[h * row_len / 4], high = q[h * row_len / 4 + 1];
            const float of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (uint32 t = 0; t < TOKENS; t++) {
#pragma unroll
                for (uint32 i = 0; i < 8; i++) x[t][h] = fmaf(code[t][i], of[i], x[t][h]);
            }
        }
    }
    __device__ void multiply_all(const float4 *q, uint32 row_len, const char *const (&codes)[TOKENS], const bool (&exists)[TOKENS], float (&x)[TOKENS][HEADS]) const {
        if (p.adjacent) {
#pragma unroll 2
            for (uint32 c = 0; c < row_len; c += 32) {
                uint4 four[TOKENS];
#pragma unroll
                for (uint32 t = 0; t < TOKENS; t++) four[t] = exists[t] ? as<uint4>(codes[t] + c / 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (uint32 n = 0; n < 4; n++) {
                    uint32 word[TOKENS];
#pragma unroll
                    for (uint32 t = 0; t < TOKENS; t++) word[t] = n == 0 ? four[t].x : n == 1 ? four[t].y : n == 2 ? four[t].z : four[t].w;
                    multiply(q + c / 4 + 2 * n, row_len, word, x);
                }
            }
        } else {
#pragma unroll 1
            for (uint32 c = 0; c < row_len; c += 8) {
                uint32 word[TOKENS] = {};
#pragma unroll
                for (uint32 t = 0; t < TOKENS; t++) {
                    for (uint32 b = 0; b < 4 && c / 2 + b < p.kept / 2 && exists[t]; b++)
                        word[t] |= uint32(as<uint8>(codes[t] + (c / 2 + b) * p.codes.channel)) << 8 * b;
                }
                multiply(q + c / 4, row_len, word, x);
            }
        }
    }

    // Writes the products of a warp's tokens with the staged heads, and each head's partial.
    __device__ uint32 score_chunk(uint32 chunk, uint32 first_head, uint32 count, uint32 row_len) const {
        const char *codes[TOKENS];
        bool exists[TOKENS];
        float scale[TOKENS], least[TOKENS];
        uint32 token[TOKENS], saw = 0;
        uint32 page[TOKENS], n[TOKENS];
#pragma unroll
        for (uint32 t = 0; t < TOKENS; t++) {
            const uint32 at = chunk * TOKEN_CHUNK + t * WARP + lane;
            token[t] = at < known ? candidates.token(at) : 0;
            page[t] = row.seq, n[t] = token[t];
        }
        if (s.place.table) {
#pragma unroll
            for (uint32 t = 0; t < TOKENS; t++) {
                const uint32 number = token[t] / s.place.rows;
                n[t] -= number * s.place.rows, page[t] = as<uint32>(s.place.table + row.seq * s.place.table_seq + number * s.place.table_page);
            }
        }
#pragma unroll
        for (uint32 t = 0; t < TOKENS; t++) {
            const bool is_known = chunk * TOKEN_CHUNK + t * WARP + lane < known;
            exists[t] = is_known && (!s.place.table || page[t] < s.place.pages);
            if (is_known && !exists[t]) saw |= NO_SUMMARY;
            if (!exists[t]) page[t] = n[t] = 0;
            codes[t] = p.codes.at(page[t], n[t], row.head);
            scale[t] = exists[t] ? widen_float16(as<uint16>(p.scales.at(page[t], n[t], row.head))) : 0.0f;
            least[t] = exists[t] ? widen_float16(as<uint16>(p.minima.at(page[t], n[t], row.head))) : 0.0f;
        }
        for (uint32 h = 0; h < count; h += HEADS) {
            float x[TOKENS][HEADS] = {};
            multiply_all(shared.staged.q + h * row_len / 4, row_len, codes, exists, x);
#pragma unroll
            for (uint32 n = 0; n < HEADS; n++) {
                if (h + n >= count) break;
                const uint32 head = first_head + h + n;
                const int32 sees = row.position(row.first + head / s.group) + 1;
                const bool is_sound = !(shared.nan >> head / s.group & 1);
                float *products = p.products + (uint64(row.number) * p.heads + head) * p.candidate_tokens;
                float most = minus_infinity();
#pragma unroll
                for (uint32 t = 0; t < TOKENS; t++) {
                    const uint32 at = chunk * TOKEN_CHUNK + t * WARP + lane;
                    float product = fmaf(scale[t], x[t][n], least[t] * shared.staged.sum[h + n]);
                    const bool counts = exists[t] && is_sound && int32(token[t]) < sees;
                    if (counts && product != product) saw |= SAW_NAN;
                    if (!counts || !(fabsf(product) < -minus_infinity())) product = minus_infinity();
                    x[t][n] = product, most = fmaxf(most, product);
                    if (at < known) products[at] = product;
                }
#pragma unroll
                for (uint32 bit = 1; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
                float sum = 0.0f;
#pragma unroll
                for (uint32 t = 0; t < TOKENS; t++) sum += most == minus_infinity() ? 0.0f : __expf(x[t][n] - most);
#pragma unroll
                for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
                if (lane == 0) p.partials[(uint64(row.number) * p.heads + head) * p.chunks + chunk] = make_float2(most, sum);
            }
        }
        return saw;
    }
    __device__ void score() {
        const uint32 row_len = (p.kept + 7) / 8 * 8, at_once = min(STAGED / row_len, STAGED_HEADS) / HEADS * HEADS;
        uint32 saw = 0;
        for (uint32 first = 0; first < heads; first += at_once) {
            const uint32 count = min(at_once, heads - first);
            __syncthreads();
            stage(first, count, row_len);
            __syncthreads();
            for (uint32 chunk = cta * WARPS + warp; chunk * TOKEN_CHUNK < known; chunk += ctas * WARPS) saw |= score_chunk(chunk, first, count, row_len);
        }
        if (saw) atomicOr(&shared.seen, saw);
        __syncthreads();
        if (thread == 0) p.seen[blockIdx.x] = shared.seen | (shared.nan ? SAW_NAN : 0);
        synchronise();
    }
    // After this all CTAs of the cluster see what each of them wrote.
    __device__ void synchronise() const {
        if (ctas == 1) {
            __syncthreads();
        } else {
            cluster_arrive();
            cluster_wait();
        }
    }
    __device__ void weigh_heads() {
        for (uint32 h = warp; h < heads; h += WARPS) {
            const float2 *from = p.partials + (uint64(row.number) * p.heads + h) * p.chunks;
            float most = minus_infinity(), sum = 0.0f;
            for (uint32 chunk = lane; chunk * TOKEN_CHUNK < known; chunk += WARP) most = fmaxf(most, __ldcg(&from[chunk]).x);
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
            for (uint32 chunk = lane; chunk * TOKEN_CHUNK < known && most > minus_infinity(); chunk += WARP) {
                const float2 part = __ldcg(&from[chunk]);
                sum += part.y * __expf(part.x - most);
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (lane == 0) shared.head_weight[h] = sum > 0.0f ? make_float2(most, 1.0f / sum) : make_float2(0.0f, 0.0f);
        }
        __syncthreads();
    }

    // The softmax mass of a known candidate token, added over the heads of a position.
    __device__ float mass(uint32 at, uint32 position) const {
        const uint32 first = position * s.group;
        const float *products = p.products + (uint64(row.number) * p.heads + first) * p.candidate_tokens + at;
        float sum = 0.0f;
#pragma unroll 4
        for (uint32 h = 0; h < s.group; h++) sum += __expf(__ldcg(products + uint64(h) * p.candidate_tokens) - shared.head_weight[first + h].x) * shared.head_weight[first + h].y;
        return sum;
    }
    __device__ float alpha(uint32 at) const {
        float best = 0.0f;
        for (uint32 position = 0; position < row.last - row.first && at < known; position++)
            if (!(shared.nan >> position & 1)) best = fmaxf(best, mass(at, position) / float(s.group));
        return best;
    }

    __device__ float *scratch_scores() const { return s.scratch_scores + uint64(row.number) * s.scored_blocks; }
    __device__ char *ids() const {
        return s.selected.ids + row.seq * s.selected.ids_seq + row.list * s.selected.ids_pos + row.head * s.selected.ids_head;
    }
    __device__ char *scores() const { return s.scores + row.seq * s.scores_seq + row.list * s.scores_pos + row.head * s.scores_head; }
    __device__ void finish(uint32 count, bool clamped) const {
        if (cta != 0 || thread != 0) return;
        as<int32>(s.selected.counts + row.seq * s.selected.counts_seq + row.list * s.selected.counts_pos + row.head * s.selected.counts_head) = count;
        if (!s.status) return;
        uint32 seen = 0;
        for (uint32 c = 0; c < ctas; c++) seen |= __ldcg(&p.seen[blockIdx.x + c]);
        clamped |= row.clamped || early.count < 0 || uint32(early.count) > p.candidates_capacity;
        as<uint32>(s.status + row.seq * s.status_seq + row.list * s.status_pos + row.head * s.status_head) = seen | (clamped ? CLAMPED : 0);
    }

    // The list's budget within its bounds. `clamped`: the given budget is out of bounds.
    __device__ uint32 budget(bool &clamped) const {
        int32 given = s.k;
        if (s.budgets) given = as<int32>(s.budgets + row.seq * s.budgets_seq);
        const uint32 k = min(uint32(max(given, 0)), s.capacity);
        clamped = given != int32(k);
        return k;
    }

    // Selects the best `wanted` of the `count` scores in scratch from `begin` on, and calls emit(place, i). The first CTA alone does so.
    template <typename Emit> __device__ void select_by_one_cta(uint32 begin, uint32 count, uint32 wanted, const Emit &emit) const {
        if (wanted == 0 || cta > 0) return;
        const float *scratch_scores = this->scratch_scores() + begin;
        const auto make = [&](uint32 i) { return __ldcg(scratch_scores + i); };
        const ComputedScores<decltype(make)> scores(row_scores, p.shared_scores, count, make);
        TopK<ComputedScores<decltype(make)>> top(shared.top, scores, count);
        top.take(top.find_threshold(wanted), emit);
    }
    // Selects as select_by_one_cta does, by all CTAs of the cluster; scores from `limit` on are 0.
    template <typename Emit> __device__ void select_by_cluster(uint32 begin, uint32 count, uint32 limit, uint32 wanted, const Emit &emit) const {
        if (wanted == 0) return;
        ::open(shared.cluster_top);
        const float *scratch_scores = this->scratch_scores() + begin;
        limit = max(limit, begin) - begin;
        const auto quads = [&](uint32 i, uint32 end, uint32 (&x)[QUADS][4]) {
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) {
#pragma unroll
                for (uint32 m = 0; m < 4; m++) {
                    const uint32 j = i + n * STEP + m;
                    const float score = j < min(end, limit) ? __ldcg(scratch_scores + j) : 0.0f;
                    x[n][m] = j < end ? sort_key(score) : 0;
                }
            }
        };
        ClusterTopK<THREADS, decltype(quads)> top(shared.cluster_top, nullptr, 0, count, quads);
        top.find_threshold(wanted, DIGITS);
        if (ctas > 1) cluster_arrive();
        top.take(emit);
        if (ctas > 1) cluster_wait();  // other CTAs may still read this CTA's counts
    }

    __device__ void select_tokens() const {
        const uint32 len = row.tokens, init = min(s.init, len), local = min(s.local, len - init), forced = init + local;
        const uint32 begin = candidates.tokens_below(init), end = max(candidates.tokens_below(len - local), begin);
        bool clamped;
        const uint32 k = budget(clamped), wanted = min(k > forced ? k - forced : 0, end - begin);
        char *to = ids();
        const auto write = [&](uint32 place, uint32 token, float score) {
            as<int32>(to + place * s.selected.ids_entry) = token;
            if (s.scores) as<float>(scores() + place * s.scores_block) = score;
        };
        // The tokens whose scores this CTA reads in select_by_cluster().
        const uint32 share = span_of(end - begin, ctas * WARPS) * WARPS, first = begin + cta * share, last = min(min(first + share, end), known);
        for (uint32 at = first + thread; at < last; at += THREADS) scratch_scores()[at] = alpha(at);
        __syncthreads();
        select_by_cluster(begin, end - begin, known, wanted, [&](uint32 place, uint32 i) {
            write(init + place, candidates.token(begin + i), s.scores && begin + i < known ? __ldcg(scratch_scores() + begin + i) : 0.0f);
        });
        for (uint32 i = cta * THREADS + thread; i < forced; i += ctas * THREADS) {
            const uint32 token = i < init ? i : len - forced + i, entry = s.scores ? candidates.entry_of(token / s.block_size) : candidates.count;
            write(i < init ? i : wanted + i, token, entry < candidates.count ? alpha(entry * s.block_size + token % s.block_size) : 0.0f);
        }
        finish(forced + wanted, clamped);
    }

    // A few lanes add up the mass of each candidate block.
    __device__ void sum_blocks() const {
        uint32 lanes = 1;
        while (lanes < min(s.block_size, WARP)) lanes *= 2;
        const uint32 within = lane & (lanes - 1), step = ctas * THREADS / lanes;
        float *scratch_scores = this->scratch_scores();
        const uint32 rounded = (candidates.count + WARP / lanes - 1) / (WARP / lanes) * (WARP / lanes);  // all lanes of a warp take part in shuffles
        for (uint32 entry = (cta * THREADS + thread) / lanes; entry < rounded; entry += step) {
            float best = minus_infinity();
            for (uint32 position = 0; position < row.last - row.first; position++) {
                float sum = 0.0f;
                const uint32 end = entry < candidates.count ? min((entry + 1) * s.block_size, known) : 0;
                for (uint32 at = entry * s.block_size + within; at < end; at += lanes) sum += mass(at, position);
                for (uint32 bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
                const bool begins = entry < candidates.count && int64(candidates.block[entry]) * s.block_size <= row.position(row.first + position);
                if (begins && !(shared.nan >> position & 1)) best = fmaxf(best, sum);
            }
            if (within == 0 && entry < candidates.count) scratch_scores[entry] = best;
        }
        synchronise();
    }
    __device__ void select_blocks() const {
        sum_blocks();
        const uint32 n = row.n, init = min(s.init, n), local = min(s.local, n - init), forced = init + local;
        bool clamped;
        const uint32 k = budget(clamped), wanted = min(k > forced ? k - forced : 0, n - forced);
        // Candidates with a score that are not forced adjoin: only the last candidates can have no score.
        uint32 sees = 0;
        for (uint32 position = 0; position < row.last - row.first; position++)
            if (!(shared.nan >> position & 1)) sees = max(row.position(row.first + position) + 1, 0);
        const uint32 scored = candidates.entries_before(sees);
        const uint32 begin = min(candidates.entries_before(min(uint64(init) * s.block_size, uint64(row.tokens))), scored);
        const uint32 end = max(min(candidates.entries_before(min(uint64(n - local) * s.block_size, uint64(row.tokens))), scored), begin);
        const uint32 of_scored = min(wanted, end - begin), others = wanted - of_scored;
        char *to = ids();
        const auto write = [&](uint32 place, uint32 j) { as<int32>(to + place * s.selected.ids_entry) = j; };
        // Blocks without a score are selected only if all blocks with a score are. So many of them lie before entry i.
        const auto others_before = [&](uint32 i) { return candidates.block[begin + i] - init - i; };
        select_by_one_cta(begin, end - begin, of_scored, [&](uint32 place, uint32 i) {
            write(init + place + (others > 0 ? min(others_before(i), others) : 0), candidates.block[begin + i]);
        });
        for (uint32 i = cta * THREADS + thread; i < others; i += ctas * THREADS) {
            uint32 low = 0, high = end - begin;
            while (low < high) {
                const uint32 middle = (low + high) / 2;
                if (others_before(middle) <= i)
                    low = middle + 1;
                else
                    high = middle;
            }
            write(init + i + low, init + i + low);
        }
        for (uint32 i = cta * THREADS + thread; i < forced; i += ctas * THREADS) write(i < init ? i : wanted + i, i < init ? i : n - forced + i);
        for (uint32 j = cta * THREADS + thread; s.scores && j < min(n, s.max_blocks); j += ctas * THREADS) {
            const uint32 entry = candidates.entry_of(j);
            as<float>(scores() + j * s.scores_block) = entry < candidates.count ? __ldcg(scratch_scores() + entry) : minus_infinity();
        }
        finish(forced + wanted, clamped || (s.scores && n > s.max_blocks));
    }

    __device__ void run() {
        if (thread == 0) shared.nan = shared.seen = 0;
        __syncthreads();
        find_nan();
        find_candidates();
        score();
        weigh_heads();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_general_tokens(const __grid_constant__ LabelParams p) {
    __shared__ LabelShared shared;
    allow_next_kernel();
    wait_for_previous_kernel();
    Labels labels(p, shared);
    labels.run();
    labels.select_tokens();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_labels_general_blocks(const __grid_constant__ LabelParams p) {
    __shared__ LabelShared shared;
    allow_next_kernel();
    wait_for_previous_kernel();
    Labels labels(p, shared);
    labels.run();
    labels.select_blocks();
}
