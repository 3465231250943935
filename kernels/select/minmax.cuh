// Selection of blocks by the bound that the largest and smallest keys of a block put on q·k (Quest).
//
//   s[j] = max over the query positions of Σ_h Σ_c max(q_hc, 0)·key_max[j, c] + min(q_hc, 0)·key_min[j, c] · the exact top k of s, ascending
//
// The sum over heads commutes with the sum over channels, so the G heads are added first and a block costs one dot product of length 2D.
//
// Bytes: both summaries of every block, once: 4·D a block and KV head at 16 bits. A context of 128K tokens in blocks of 64 with 8 heads of 128
// channels has 8.4 MB, 2 µs; the rest is latency.
//
// Which kernel runs when: select_minmax_decode takes 16-bit summaries, one query position and D up to 128, with channels side by side;
// select_minmax_16 and select_minmax_32 take everything else, by the width of the summaries' elements.
//
// Split: a cluster of CTAs for each row (sequence and KV head, or also position), and a slice of the row's blocks for each CTA. The lanes of
// a half-warp (fewer where D is small) have eight channels each of a block's maxima, and as many other lanes its minima. The first CTA
// selects from the scores.
//
//   load length, queries and blocks ─ add up the heads ─ products ─ scores to the first CTA ─ threshold ─ ids
//
// On entry: D is a multiple of 8, MinMaxParams.adjacent only where channels lie side by side and rows are aligned to 16 bytes;
// positions · D ≤ MOST_FOLDED; lanes · 4 ≥ D or lanes = 32.
#pragma once

#include "common/parameters.cuh"
#include "select/lanes.cuh"
#include "select/rows.cuh"

constexpr uint32 CHUNK = 4 * TOPK_WARPS;  // blocks that are worth a CTA
constexpr uint32 MOST_FOLDED = 8 * 576;  // positions · D

// Adds up heads: to[2D·position + c] gets the positive parts of channel c, to[2D·position + D + c] the negative parts. Bit p of *nan: position
// p holds a NaN.
__device__ inline void fold_heads(const SelectParams &p, uint32 seq, uint32 head, uint32 first, uint32 positions, float *to, uint32 *nan) {
    const uint32 count = positions * p.dim;
    for (uint32 t = threadIdx.x; t < count; t += TOPK_THREADS) {
        const uint32 n = positions == 1 ? 0 : t / p.dim, c = t - n * p.dim;
        const char *q = p.q + seq * p.q_seq + (first + n) * p.q_pos + head * p.group * p.q_head + c * p.q_channel;
        float positive = 0.0f, negative = 0.0f;
        bool is_nan = false;
        constexpr uint32 AT_ONCE = 4;
#pragma unroll 1
        for (uint32 h = 0; h < p.group; h += AT_ONCE) {
            float x[AT_ONCE];
            load_queries(q + h * p.q_head, p.q_head, p.group - h, p.q_type, x);
#pragma unroll
            for (uint32 m = 0; m < AT_ONCE; m++) positive += fmaxf(x[m], 0.0f), negative += fminf(x[m], 0.0f), is_nan |= x[m] != x[m];
        }
        to[2 * n * p.dim + c] = positive, to[(2 * n + 1) * p.dim + c] = negative;
        if (is_nan) atomicOr(nan, 1u << n);
    }
}

template <uint32 BYTES, uint32 COUNT>
__device__ inline void score_slice(const MinMaxParams &p, const RowSink &sink, const Row &row, const Quota &quota, uint32 begin, uint32 end, float *folded, uint32 *nan) {
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, lanes = p.lanes, step = WARP / lanes;
    const uint32 within = lane & (lanes - 1), half = lanes / 2, channel = (within & (half - 1)) * 8;
    const bool is_min = within >= half;
    const Summary &summary = is_min ? p.min : p.max;
    // A warp has neighbouring blocks.
    const uint32 share = (end - begin + TOPK_WARPS - 1) / TOPK_WARPS;
    const uint32 first = begin + threadIdx.x / WARP * share + lane / lanes, last = min(begin + (threadIdx.x / WARP + 1) * share, end);

    Summaries<BYTES, COUNT> blocks;
    const auto load = [&](uint32 j, uint32 c) { blocks.load(s.place, summary, row.seq, row.head, j, step, last, c, s.dim); };
    load(first, channel);
    fold_heads(s, row.seq, row.head, row.first, row.last - row.first, folded, nan);
    __syncthreads();
    sink.join(quota);
    char *scores = s.scores + row.seq * s.scores_seq + row.list * s.scores_pos + row.head * s.scores_head;
    uint32 saw = *nan ? SAW_NAN : 0;
    for (uint32 base = first; base - lane / lanes < last; base += COUNT * step) {
        if (base > first) load(base, channel);
        const uint32 own = own_of<COUNT>(lane), j = base + own * step;
        const bool exists = blocks.exist >> own & 1;
        float score = minus_infinity();
        for (uint32 query = row.first; query < row.last; query++) {
            float x[COUNT];
#pragma unroll
            for (uint32 n = 0; n < COUNT; n++) x[n] = 0.0f;
            for (uint32 c = channel; c < s.dim; c += half * 8) {
                // The first channels are in registers, unless others were loaded since.
                if (c > channel || (query > row.first && s.dim > half * 8)) load(base, c);
                float wide[COUNT][8];
                blocks.widen(p.dtype, wide);
                blocks.multiply(wide, reinterpret_cast<const float4 *>(folded + (2 * (query - row.first) + is_min) * s.dim + c), x);
            }
            const float sum = add_lanes(x, lanes);
            const bool sees = s.lists > 1 || int64(j) * s.block_size <= row.position(query);
            if (!exists || !sees || *nan >> (query - row.first) & 1) continue;
            if (sum != sum)
                saw |= SAW_NAN;
            else
                score = fmaxf(score, sum);
        }
        if (within < COUNT && j < last) {
            sink.put(quota, j, score);
            if (s.scores && j < s.max_blocks) as<float>(scores + j * s.scores_block) = score;
            if (!exists) saw |= NO_SUMMARY;
        }
    }
    if (row.n > quota.stored) saw |= NO_SUMMARY;
    sink.report(saw);
}

template <uint32 BYTES> __device__ inline void select_minmax(const MinMaxParams &p) {
    __shared__ float4 folded[MOST_FOLDED / 2];
    __shared__ TopKShared top;
    __shared__ SinkShared shared;
    __shared__ uint32 nan;
    allow_next_kernel();
    const SelectParams &s = p.select;
    const RowSink sink(s, shared);
    sink.open();
    if (threadIdx.x == 0) nan = 0;
    __syncthreads();
    wait_for_previous_kernel();
    const Row row(s, sink.number);
    const Quota quota(s, row, budget_of(s, row.seq));
    const uint32 share = max((quota.stored + s.slices - 1) / s.slices, CHUNK), begin = min(sink.slice * share, quota.stored);
    const uint32 end = min(begin + share, quota.stored);
    float *to = reinterpret_cast<float *>(folded);
    if (p.adjacent)
        score_slice<BYTES, 8 / BYTES>(p, sink, row, quota, begin, end, to, &nan);
    else
        score_slice<BYTES, 1>(p, sink, row, quota, begin, end, to, &nan);
    sink.finish(row, quota, top);
}

// Loads eight channels of four neighbouring blocks. `data` is the lane's part of summary [0, 0], of the sequence's own where there is no table.
// Returns a bit for each block that exists.
__device__ inline uint32 load_four(const Place &place, const Summary &s, const char *data, uint32 seq, uint32 j, bool reads, Eight<2> (&to)[4]) {
    uint32 page[4], row[4], exist = 0;
    if (place.table) {
        uint32 n = j / place.rows, r = j - n * place.rows;
#pragma unroll
        for (uint32 m = 0; m < 4; m++, r++) {
            if (r == place.rows) n++, r = 0;
            row[m] = r, page[m] = place.pages;
            if (j + m < place.capacity) page[m] = as<uint32>(place.table + seq * place.table_seq + n * place.table_page);
        }
    } else {
#pragma unroll
        for (uint32 m = 0; m < 4; m++) row[m] = j + m, page[m] = j + m < place.capacity ? 0 : place.pages;
    }
#pragma unroll
    for (uint32 m = 0; m < 4; m++) {
        if (page[m] >= place.pages) continue;
        exist |= 1 << m;
        if (reads) to[m].load(data + page[m] * s.page + row[m] * s.row);
    }
    return exist;
}

// The kernel for decoding: 16 bits, one query position, D up to 128, channels side by side. Chunks of blocks go round the slices, so that the
// first blocks are loaded before the length is known. A warp loads a block of the next turn once it has multiplied one of this turn, and
// brings those of later turns to the L2 cache. What is small and needed first is loaded before the warps' blocks, as it would wait behind
// them. Two CTAs fit in a multiprocessor, so that the next kernel's CTAs can start while this kernel's end.
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 2) select_minmax_decode(const __grid_constant__ MinMaxParams p) {
    constexpr uint32 HEADS = 4, AHEAD = 3, LINE_LANES = 4;  // heads at a time; turns in the L2 cache; lanes that read 64 bytes
    __shared__ alignas(16) float folded[256];
    __shared__ TopKShared top;
    __shared__ SinkShared sink_shared;
    __shared__ uint32 nan, words[WARP];
    __shared__ Row row;  // in shared memory, as registers hold blocks
    __shared__ Quota quota;
    allow_next_kernel();
    const SelectParams &s = p.select;
    request_parameters(p, words);
    const RowSink sink(s, sink_shared);
    sink.open();
    const uint32 seq = s.by_heads.divide(sink.number), head = sink.number - seq * s.kv_heads;
    const uint32 lane = threadIdx.x % WARP, channel = lane % 16 * 8, step = s.slices * CHUNK;
    const Summary &summary = lane < 16 ? p.max : p.min;
    const char *const data = pin_in_register(summary.data + head * summary.head + channel * 2 + (s.place.table ? 0 : seq * summary.page));
    const int64 row_bytes = pin_in_register(summary.row);
    const bool reads = channel < s.dim, folds = threadIdx.x < s.dim;
    const char *const tokens_at = pin_in_register(s.seq_lens + seq * s.seq_lens_seq);
    const char *const queries_at = pin_in_register(s.q_lens ? s.q_lens + seq * s.q_lens_seq : nullptr);
    const char *const budget_at = pin_in_register(s.budgets ? s.budgets + seq * s.budgets_seq : nullptr);
    const char *const query = pin_in_register(s.q + seq * s.q_seq + head * s.group * s.q_head + threadIdx.x * s.q_channel);
    if (threadIdx.x == 0) nan = 0;
    uint32 j = sink.slice * CHUNK + threadIdx.x / WARP * 4;
    // Each of the lanes that read a line prefetches it for another block.
    static_assert(LINE_LANES == 4);
    const uint32 of_line = lane % LINE_LANES;
    const bool announces = channel - of_line * 8 < s.dim && !s.place.table;
    const char *const line = pin_in_register(data - of_line * 16 + of_line * row_bytes);
    const auto prefetch_tiles = [&](uint32 j, uint32 end) {
        if (j + of_line < end && announces) prefetch(line + j * row_bytes);
    };
    // The length is read while the kernel before may still write it, so it decides only what is prefetched.
    const int32 expected = load_hint(tokens_at);
    const uint32 expected_blocks = expected <= 0 ? 0 : min(s.by_block.divide(expected - 1) + 1, s.place.capacity);
#pragma unroll 1
    for (uint32 stage = 0; stage < AHEAD; stage++) prefetch_tiles(j + stage * step, expected_blocks);
    const char *const first = pin_in_register(data + j * row_bytes);
    const int64 head_bytes = pin_in_register(s.q_head);
    const bool is_far = s.place.table || j + 4 > s.place.capacity;
    const uint32 heads = pin_in_register(s.group), type = pin_in_register(s.q_type);
    if (folds && lane % LINE_LANES == 0)
        for (uint32 h = 0; h < heads; h++) prefetch(query + h * head_bytes);
    __syncthreads();
    sink.start();
    wait_for_previous_kernel();

    // All of this is loaded before the first result is used.
    Lengths lengths(int32(request_bits<4>(tokens_at)), s.positions);
    if (queries_at) lengths.queries = request_bits<4>(queries_at);
    const int32 budget = budget_at ? request_bits<4>(budget_at) : s.k;
    uint32 bits[HEADS];
#pragma unroll
    for (uint32 n = 0; n < HEADS; n++) bits[n] = 0;
    if (folds) {
        const char *at = query;
        if (type == FLOAT32) {
#pragma unroll
            for (uint32 n = 0; n < HEADS; n++, at += head_bytes)
                if (n < heads) bits[n] = request_bits<4>(at);
        } else {
#pragma unroll
            for (uint32 n = 0; n < HEADS; n++, at += head_bytes)
                if (n < heads) bits[n] = request_bits<2>(at);
        }
    }
    __syncthreads();
    Eight<2> eight[4];
    uint32 exist = 15;
    if (is_far) {
        exist = load_four(s.place, summary, data, seq, j, reads, eight);
    } else {
#pragma unroll
        for (uint32 n = 0; n < 4; n++)
            if (reads) eight[n].request(first + n * row_bytes);
    }
    if (folds) {
        float positive = 0.0f, negative = 0.0f;
        bool is_nan = false;
#pragma unroll 1
        for (uint32 h = 0; h < s.group; h += HEADS) {
            if (h > 0) load_query_bits(query + h * s.q_head, s.q_head, s.group - h, s.q_type, bits);
            float x[HEADS];
            widen_queries(bits, s.q_type, x);
#pragma unroll
            for (uint32 m = 0; m < HEADS; m++) positive += fmaxf(x[m], 0.0f), negative += fminf(x[m], 0.0f), is_nan |= x[m] != x[m];
        }
        folded[threadIdx.x] = positive, folded[s.dim + threadIdx.x] = negative;
        if (is_nan) atomicOr(&nan, 1u);
    }
    // A thread of the last warp computes them, which has no channels to add up.
    if (threadIdx.x == TOPK_THREADS - WARP) row = Row(s, sink.number, lengths), quota = Quota(s, row, budget);
    __syncthreads();
    sink.expect(quota);
    const float4 *q = reinterpret_cast<const float4 *>(folded + (lane < 16 ? 0 : s.dim) + (reads ? channel : 0));
    const uint32 stored = quota.stored, own = own_of<4>(lane);
    const bool query_is_nan = nan && row.first < row.last;
    uint32 saw = (query_is_nan ? SAW_NAN : 0) | (row.n > stored ? NO_SUMMARY : 0);
    const bool is_bfloat16 = pin_in_register(uint32(p.dtype == BFLOAT16));
#pragma unroll 1
    for (; j < stored; j += step) {
        const float4 low = q[0], high = q[1];
        const float of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const uint32 exists = exist >> own & 1, next = j + step;
        const bool is_next_far = s.place.table || next + 4 > s.place.capacity, asks = reads && next < stored && !is_next_far;
        float x[4];
        const auto multiply = [&](uint32 type) {
            const char *at = data + next * row_bytes;
#pragma unroll
            for (uint32 n = 0; n < 4; n++, at += row_bytes) {
                float k[8];
                eight[n].widen(k, type);
                x[n] = 0.0f;
#pragma unroll
                for (uint32 i = 0; i < 8; i++) x[n] = fmaf(k[i], of[i], x[n]);
                x[n] = reads ? x[n] : 0.0f;
                if (asks) eight[n].request(at);
            }
        };
        if (is_bfloat16)
            multiply(BFLOAT16);
        else
            multiply(FLOAT16);
        if (next < stored && is_next_far) exist = load_four(s.place, summary, data, seq, next, reads, eight);
        prefetch_tiles(j + AHEAD * step, stored);
        const float sum = add_lanes(x, WARP);
        if (lane >= 4 || j + own >= stored) continue;
        const bool is_number = sum == sum && !query_is_nan && exists;
        const float score = is_number ? sum : minus_infinity();
        if (!is_number) saw |= exists ? SAW_NAN : NO_SUMMARY;
        sink.put(quota, j + own, score);
        if (s.scores && j + own < s.max_blocks) as<float>(s.scores + seq * s.scores_seq + head * s.scores_head + (j + own) * s.scores_block) = score;
    }
    sink.report(saw);
    sink.finish(row, quota, top);
}
