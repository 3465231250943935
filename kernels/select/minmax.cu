// Selection of blocks by the bound that the largest and smallest keys of a block put on q·k (Quest).
//
//   s[j] = max over the query positions of Σ_h Σ_c max(q_hc, 0)·key_max[j, c] + min(q_hc, 0)·key_min[j, c] · the exact top k of s, ascending
//
// The sum over heads commutes with the sum over channels, so the G heads are added first and a block costs one dot product of length 2D.
//
// Bytes: both summaries of every block, once: 4·D a block and KV head at 16 bits. A context of 128K tokens in blocks of 64 with 8 heads of 128
// channels has 8.4 MB, 2 µs; the rest is latency.
//
// Cut: `slices` CTAs for each row (sequence, KV head; or position, too), and a slice of its live blocks for each. A half-warp's lanes (fewer
// where D is small) hold eight channels each of a block's maxima, as many others of its minima. The CTA that arrives last at the row's counter
// selects from the scores, which are in the L2 cache.
//
//   request blocks and length ─ add up the heads ─ products ─ scores ─ last of the row? ─ keys to shared memory ─ cut ─ ids
//
// The common form is one launch (select_minmax_common). Others take two: score_minmax_*, and select_top.
//
// On entry: D is a multiple of 8, MinMaxParams.adjacent only where channels lie side by side and rows are aligned to 16 bytes;
// positions · D ≤ MOST_FOLDED; lanes · 4 ≥ D or lanes = 32.
//
// targets: compute_80, compute_90

#include "select/lanes.cuh"
#include "select/rows.cuh"

constexpr uint32 CHUNK = 4 * TOPK_WARPS;  // blocks that are worth a CTA
constexpr uint32 MOST_FOLDED = 8 * 576;  // positions · D

// Adds up heads: to[2D·position + c] the positive parts of channel c, D further the negative ones; and says which positions hold a NaN.
__device__ inline void fold_heads(const SelectParams &p, uint32 seq, uint32 head, uint32 first, uint32 positions, float *to, uint32 *nan) {
    const uint32 count = positions * p.dim;
    for (uint32 t = threadIdx.x; t < count; t += TOPK_THREADS) {
        const uint32 n = t / p.dim, c = t - n * p.dim;
        const char *q = p.q + seq * p.q_seq + (first + n) * p.q_pos + head * p.group * p.q_head + c * p.q_channel;
        float positive = 0.0f, negative = 0.0f;
        bool is_nan = false;
#pragma unroll 4
        for (uint32 h = 0; h < p.group; h++) {
            const float x = load_query(q + h * p.q_head, p.q_type);
            positive += fmaxf(x, 0.0f), negative += fminf(x, 0.0f), is_nan |= x != x;
        }
        to[2 * n * p.dim + c] = positive, to[(2 * n + 1) * p.dim + c] = negative;
        if (is_nan) atomicOr(nan, 1u << n);
    }
}

template <uint32 BYTES, uint32 COUNT>
__device__ inline void score_slice(const MinMaxParams &p, const Row &row, uint32 begin, uint32 end, float *folded, uint32 *nan, uint32 *seen) {
    const SelectParams &s = p.select;
    const uint32 lane = threadIdx.x % WARP, lanes = p.lanes, step = WARP / lanes;
    const uint32 within = lane & (lanes - 1), half = lanes / 2, channel = (within & (half - 1)) * 8;
    const bool is_min = within >= half;
    const Summary &summary = is_min ? p.min : p.max;
    // A warp's blocks are neighbours.
    const uint32 share = (end - begin + TOPK_WARPS - 1) / TOPK_WARPS;
    const uint32 first = begin + threadIdx.x / WARP * share + lane / lanes, last = min(begin + (threadIdx.x / WARP + 1) * share, end);

    Summaries<BYTES, COUNT> blocks;
    const auto load = [&](uint32 j, uint32 c) { blocks.load(s.place, summary, row.seq, row.head, j, step, last, c, s.dim); };
    load(first, channel);
    fold_heads(s, row.seq, row.head, row.first, row.last - row.first, folded, nan);
    __syncthreads();
    float *held = s.held + uint64(row.number) * s.held_row;
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
                // The first channels are here, unless others were asked for since.
                if (c > channel || (query > row.first && s.dim > half * 8)) load(base, c);
                blocks.multiply(reinterpret_cast<const float4 *>(folded + (2 * (query - row.first) + is_min) * s.dim + c), p.dtype, x);
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
            held[j] = score;
            if (s.scores && j < s.max_blocks) as<float>(scores + j * s.scores_block) = score;
            if (!exists) saw |= NO_SUMMARY;
        }
    }
    if (saw) atomicOr(seen, saw);
}

template <uint32 BYTES> __device__ inline void score_general(const MinMaxParams &p) {
    __shared__ float4 folded[MOST_FOLDED / 2];
    __shared__ uint32 nan, seen;
    allow_next_kernel();
    wait_for_previous_kernel();
    const Row row(p.select, blockIdx.x / p.select.slices);
    const uint32 slice = blockIdx.x % p.select.slices, stored = min(row.n, p.select.place.capacity);
    const uint32 share = max((stored + p.select.slices - 1) / p.select.slices, CHUNK), begin = min(slice * share, stored);
    if (threadIdx.x == 0) nan = seen = 0;
    __syncthreads();
    if (slice == 0 || begin < stored) {
        const uint32 end = min(begin + share, stored);
        float *to = reinterpret_cast<float *>(folded);
        if (p.adjacent)
            score_slice<BYTES, 8 / BYTES>(p, row, begin, end, to, &nan, &seen);
        else
            score_slice<BYTES, 1>(p, row, begin, end, to, &nan, &seen);
    }
    __syncthreads();
    if (threadIdx.x == 0) p.select.arrived[blockIdx.x] = seen;
}

// Four neighbouring blocks, of which each lane has eight channels; `data` is its part of summary [0, 0].
__device__ inline void load_four(const Place &place, const Summary &s, const char *data, uint32 seq, uint32 j, bool reads, Eight<2> (&to)[4],
                                 uint32 &exist) {
    uint32 page = seq, n = j / place.rows, row = place.table ? j - n * place.rows : j;
    exist = 0;
#pragma unroll
    for (uint32 m = 0; m < 4; m++, row++) {
        if (j + m >= place.capacity) break;
        if (place.table) {
            if (row == place.rows) n++, row = 0;
            page = as<uint32>(place.table + seq * place.table_seq + n * place.table_page);
            if (page >= place.pages) continue;
        }
        exist |= 1 << m;
        if (reads) to[m].load(data + page * s.page + row * s.row);
    }
}

// The common form: 16 bits, one query position, D up to 128, channels side by side. Chunks of blocks go round the slices, so that the first
// are asked for before the length is known; each warp has DEPTH chunks' blocks on their way.
constexpr uint32 DEPTH = 3;

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) select_minmax_common(const __grid_constant__ MinMaxParams p) {
    __shared__ union {
        alignas(16) float folded[256];
        TopKShared top;
    } shared;
    __shared__ uint32 nan, seen;
    allow_next_kernel();
    const SelectParams &s = p.select;
    const uint32 number = blockIdx.x / s.slices, slice = blockIdx.x - number * s.slices, seq = number / s.kv_heads, head = number - seq * s.kv_heads;
    const uint32 lane = threadIdx.x % WARP, channel = lane % 16 * 8, warp_blocks = threadIdx.x / WARP * 4, step = s.slices * CHUNK;
    const Summary &summary = lane < 16 ? p.max : p.min;
    const char *data = summary.data + head * summary.head + channel * 2;
    const bool reads = channel < s.dim;
    if (threadIdx.x == 0) nan = seen = 0;
    wait_for_previous_kernel();

    // All that is asked for before the first answer is looked at.
    const Lengths lengths(s, seq);
    Eight<2> eight[DEPTH][4];
    uint32 exist[DEPTH];
    uint32 j = slice * CHUNK + warp_blocks;
    const auto load = [&](uint32 turn, uint32 j) { load_four(s.place, summary, data, seq, j, reads, eight[turn], exist[turn]); };
    load(0, j);
    __syncthreads();
    fold_heads(s, seq, head, 0, 1, shared.folded, &nan);
    const Row row(s, number, lengths);
    const uint32 stored = min(row.n, s.place.capacity), active = max(min((stored + CHUNK - 1) / CHUNK, s.slices), 1u);
    if (slice >= active) return;
#pragma unroll
    for (uint32 turn = 1; turn < DEPTH; turn++)
        if (j + turn * step < stored) load(turn, j + turn * step);
    __syncthreads();
    const float4 *q = reinterpret_cast<const float4 *>(shared.folded + (lane < 16 ? 0 : s.dim) + (reads ? channel : 0));
    const float4 low = q[0], high = q[1];
    const float of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const bool query_is_nan = nan && row.first < row.last;
    uint32 saw = query_is_nan ? SAW_NAN : 0;
    float *held = s.held + uint64(number) * s.held_row;
    char *scores = s.scores + seq * s.scores_seq + head * s.scores_head;
    while (j < stored) {
#pragma unroll
        for (uint32 turn = 0; turn < DEPTH; turn++) {
            float x[4];
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                float k[8];
                eight[turn][n].widen(k, p.dtype);
                x[n] = 0.0f;
#pragma unroll
                for (uint32 i = 0; i < 8; i++) x[n] = fmaf(k[i], of[i], x[n]);
                x[n] = reads ? x[n] : 0.0f;
            }
            const uint32 own = own_of<4>(lane), exists = exist[turn] >> own & 1;
            if (j + DEPTH * step < stored) load(turn, j + DEPTH * step);
            const float sum = add_lanes(x, WARP);
            if (lane < 4 && j + own < stored) {
                const bool is_number = sum == sum && !query_is_nan && exists;
                const float score = is_number ? sum : minus_infinity();
                if (!is_number) saw |= exists ? SAW_NAN : NO_SUMMARY;
                held[j + own] = score;
                if (s.scores && j + own < s.max_blocks) as<float>(scores + (j + own) * s.scores_block) = score;
            }
            j += step;
            if (j >= stored) break;
        }
    }
    if (saw) atomicOr(&seen, saw);
    if (!is_last(s, number, active, seen)) return;
    finish(s, row, stored, seen | (row.n > stored ? NO_SUMMARY : 0), shared.top, [&](uint32 j) { return __ldcg(held + j); });
}

extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) score_minmax_16(const __grid_constant__ MinMaxParams p) { score_general<2>(p); }
extern "C" __global__ void __launch_bounds__(TOPK_THREADS, 1) score_minmax_32(const __grid_constant__ MinMaxParams p) { score_general<4>(p); }
