// Holt's smoothing of block scores, and the selection that it predicts.
//
//   predictor_reset     L = −inf, T = 0
//   predictor_update    L' = α·s + (1−α)·L, T' = β·(L'−L) + (1−β)·T
//   predictor_predict_* the exact top k of ŝ = L + γ·T, ascending
//
// Bytes: 20 per block to update, 8 to predict; both calls take a launch and a round trip to memory. Products and sums are rounded one by
// one, as on the CPU.
//
// Work split: update has `slices` CTAs for each sequence and KV head. predict_short has one CTA for each, for up to 8192 blocks, whose keys
// stay in registers. predict_long, for more blocks, has a cluster of 1, 2, 4 or 8 CTAs for each; blocks that do not fit in registers are
// read once per pass.
//
// Phases of predict_short: guess the length ─ prefetch ─ wait for the previous kernel ─ load blocks, length and budget ─ select ─ write.
// A sequence's length changes the number of blocks rarely. So the length that memory holds before the wait decides which blocks are
// prefetched and loaded together with the true length; only if the number of blocks differs are they loaded again.
//
// targets: compute_80, compute_90

#include "predictor/params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) predictor_reset(const __grid_constant__ ResetParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const State &s = p.state;
    for (uint64 task = blockIdx.x; task < p.listed * s.kv_heads; task += gridDim.x) {
        const uint64 n = task / s.kv_heads;
        const uint32 head = task - n * s.kv_heads;
        const uint32 seq = p.rows ? as<uint32>(p.rows + n * p.rows_entry) : uint32(n);
        if (seq >= s.sequences) continue;
        for (uint32 j = threadIdx.x; j < s.max_blocks; j += THREADS) s.level.at(seq, head, j) = minus_infinity(), s.trend.at(seq, head, j) = 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) predictor_update(const __grid_constant__ UpdateParams p) {
    allow_next_kernel();
    const State &s = p.state;
    const uint32 row = blockIdx.x / p.slices, seq = row / s.kv_heads, head = row - seq * s.kv_heads;
    const float keep = __fsub_rn(1.0f, p.alpha), follow = __fsub_rn(1.0f, p.beta);
    wait_for_previous_kernel();
    const uint32 n = p.blocks.of(seq, s), step = p.slices * THREADS, at = p.blocks.sequence(seq);
    if (at >= s.sequences) return;
#pragma unroll 4
    for (uint32 j = (blockIdx.x - row * p.slices) * THREADS + threadIdx.x; j < n; j += step) {
        float level = s.level.at(at, head, j), trend = s.trend.at(at, head, j);
        smooth(level, trend, p.scores.at(seq, head, j), p.alpha, keep, p.beta, follow);
        s.level.at(at, head, j) = level, s.trend.at(at, head, j) = trend;
    }
}

// The blocks of a row of the call and a KV head. Blocks before `init` and from `end` on are forced; the others are candidates. Key i is the
// key of block first + i.
struct Row {
    const PredictParams &p;
    const uint32 seq, head;
    uint32 at;  // the sequence of the state
    uint32 n, init, end, first;

    __device__ Row(const PredictParams &p, uint32 number) : p(p), seq(number / p.state.kv_heads), head(number - seq * p.state.kv_heads), at(seq) {}

    // Finds the sequence, after the wait for the previous kernel, where it has a number. Where the state has none of that number, another
    // one's scores are read and none of its blocks is taken.
    __device__ void locate() {
        if (p.blocks.sequences) at = is_known() ? p.blocks.sequence(seq) : 0;
    }
    __device__ bool is_known() const { return p.blocks.sequence(seq) < p.state.sequences; }
    __device__ const char *level() const { return p.state.level.row(at, head); }
    __device__ const char *trend() const { return p.state.trend.row(at, head); }

    // Sets the number of blocks.
    __device__ void set(uint32 blocks) { n = blocks, init = min(p.init, n), end = n - min(p.local, n - init), first = init & ~3u; }
    __device__ uint32 count() const { return end - first; }
    __device__ uint32 forced() const { return n - (end - init); }
    __device__ const char *budget() const { return p.budgets + seq * p.budgets_seq; }
    // The number of candidates to select; `budget` is the sequence's, if there are budgets.
    __device__ uint32 wanted(int32 budget) const {
        uint32 k = p.k;
        if (p.budgets) k = min(__double2uint_ru(p.ratio * max(budget, 0) * (1.0 - 1e-6)), p.cap);  // the conversion saturates at 2^32 − 1
        if (p.blocks.sequences && !is_known()) return 0;
        return min(k - min(k, forced()), end - init);
    }
    __device__ float score(float level, float trend) const { return forecast(level, trend, p.gamma); }
    __device__ float score_of(uint32 j) const {
        return score(as<float>(level() + j * p.state.level.block), as<float>(trend() + j * p.state.trend.block));
    }

    // The values of blocks j … j + 3, of which at least one is before `end`; values of blocks from `end` on are undefined.
    __device__ float4 four(const char *row, int64 step, uint32 j) const {
        if (p.adjacent) return as<float4>(row + 4 * j);
        const auto one = [&](uint32 j) { return as<float>(row + min(j, end - 1) * step); };
        return make_float4(one(j), one(j + 1), one(j + 2), one(j + 3));
    }
    // Loads four keys from each i + q · STEP on, for i a multiple of four; keys from `last` on, and of forced blocks, are 0.
    __device__ void load(uint32 i, uint32 last, uint32 (&x)[QUADS][4]) const {
        float4 levels[QUADS], trends[QUADS];
#pragma unroll
        for (uint32 q = 0; q < QUADS; q++) {
            const uint32 j = first + i + q * STEP;
            if (i + q * STEP < last) levels[q] = four(level(), p.state.level.block, j), trends[q] = four(trend(), p.state.trend.block, j);
        }
        const uint32 before = init - first;
#pragma unroll
        for (uint32 q = 0; q < QUADS; q++) {
            const float4 &a = levels[q], &b = trends[q];
            const float scores[4] = {score(a.x, b.x), score(a.y, b.y), score(a.z, b.z), score(a.w, b.w)};
#pragma unroll
            for (uint32 m = 0; m < 4; m++) x[q][m] = i + q * STEP + m - before < last - before ? sort_key(scores[m]) : 0;
        }
    }
    // Prefetches the blocks that load() reads.
    __device__ void announce(uint32 i) const {
#pragma unroll
        for (uint32 q = 0; q < QUADS; q++)
            if (p.adjacent && i + q * STEP < count()) prefetch(level() + 4 * (first + i + q * STEP)), prefetch(trend() + 4 * (first + i + q * STEP));
    }
    __device__ void emit(uint32 place, uint32 j) const { as<int32>(p.ids + seq * p.ids_seq + head * p.ids_head + place * p.ids_entry) = j; }
    // Writes the outputs that do not depend on the selection: forced blocks, the count, the scores. Called by each of `threads` threads.
    __device__ void write_rest(uint32 thread, uint32 threads, uint32 wanted) const {
        for (uint32 j = thread; j < init; j += threads) emit(j, j);
        for (uint32 j = thread; j < n - end; j += threads) emit(init + wanted + j, end + j);
        if (thread == 0) as<int32>(p.counts + seq * p.counts_seq + head * p.counts_head) = forced() + wanted;
        if (p.scores.data)
            for (uint32 j = thread; j < n; j += threads) p.scores.at(seq, head, j) = is_known() ? score_of(j) : minus_infinity();
    }
};

// The number of CTAs per multiprocessor: on compute capability 8.9 two CTAs would leave too few registers for each.
#if __CUDA_ARCH__ >= 900
constexpr uint32 SHORT_CTAS = 2;
#else
constexpr uint32 SHORT_CTAS = 1;
#endif

extern "C" __global__ void __launch_bounds__(PREDICT_THREADS, SHORT_CTAS) predictor_predict_short(const __grid_constant__ PredictParams p) {
    __shared__ CtaTopKShared<PREDICT_THREADS> shared;
    allow_next_kernel();
    open(shared);
    Row row(p, blockIdx.x);
    const char *const len = p.blocks.len_of(row.seq), *const len_or_budget = threadIdx.x % 2 && p.budgets ? row.budget() : len;
    row.set(p.blocks.in(load_hint(len), p.state));
    if (!p.blocks.sequences) row.announce(CtaTopK<PREDICT_THREADS>(shared, row.count()).first);
    wait_for_previous_kernel();
    row.locate();
    const int32 given = request_bits<4>(len_or_budget);
#pragma unroll 1
    for (;;) {
        CtaTopK<PREDICT_THREADS> top(shared, row.count());
        row.load(top.first, top.end(), top.x);
        const uint32 n = p.blocks.in(__shfl_sync(FULL_WARP, given, 0), p.state), wanted = row.wanted(__shfl_sync(FULL_WARP, given, 1));
        if (n != row.n) {
            row.set(n);
            continue;
        }
        if (wanted > 0) {
            top.find_threshold(wanted, row.end - row.init);
            top.take([&](uint32 place, uint32 i, uint32) { row.emit(row.init + place, row.first + i); });
        }
        row.write_rest(threadIdx.x, PREDICT_THREADS, wanted);
        break;
    }
}

extern "C" __global__ void __launch_bounds__(PREDICT_THREADS, 1) predictor_predict_long(const __grid_constant__ PredictParams p) {
    __shared__ ClusterTopKShared<PREDICT_THREADS> shared;
    allow_next_kernel();
    open(shared);
    const uint32 ctas = cluster_ctas(), cta = cluster_rank();
    Row row(p, blockIdx.x / ctas);
    wait_for_previous_kernel();
    row.locate();
    row.set(p.blocks.of(row.seq, p.state));
    const uint32 wanted = row.wanted(p.budgets ? as<int32>(row.budget()) : 0);
    row.write_rest(cta * PREDICT_THREADS + threadIdx.x, ctas * PREDICT_THREADS, wanted);
    if (wanted == 0) return;
    const auto quads = [&](uint32 i, uint32 last, uint32 (&x)[QUADS][4]) { row.load(i, last, x); };
    ClusterTopK<PREDICT_THREADS, decltype(quads)> top(shared, nullptr, 0, row.count(), quads);
    top.find_threshold(wanted, DIGITS);
    if (ctas > 1) cluster_arrive();
    top.take([&](uint32 place, uint32 i) { row.emit(row.init + place, row.first + i); });
    if (ctas > 1) cluster_wait();  // the other CTAs may still read this CTA's counts
}
