// Means and covariance of the keys and values of each sequence and KV head, extended by the blocks that became whole.
//
//   k̄_b = Σ_t k_t / S · v̄_b likewise · C_b = Σ_t (k_t − k̄_b)(v_t − v̄_b)ᵀ / S · w = S / (c + S) · δ = k̄_b − mean_k · ε = v̄_b − mean_v
//   covariance += w·(C_b − covariance) + w·(1 − w)·δ·εᵀ · mean_k += w·δ · mean_v += w·ε · c += S
//
// Bytes: the new blocks' keys once for each tile of values and their values once for each tile of keys, and both once more for the means; the
// covariance of a head that has a new block is read and written once.
//
// Two launches. remainder_covariance: a CTA has a tile of 32 key channels by 64 value channels of one head, and keeps it in registers while it
// goes through the blocks, of which the next is on its way. It reads means and tokens as they were. remainder_means: a CTA has a head, a thread its channels; it writes means
// and, last, tokens.
//
// Every float32 operation is rounded on its own and in the order of src/ops/remainder/cpu.rs, whose bits these are.
//
// On entry: D and Dv are multiples of 8.
//
// targets: compute_80

#include "common/elements.cuh"
#include "common/view.cuh"

constexpr uint32 THREADS = 256, KEYS = 32, VALUES = 64, TOKENS = 64;

struct RemainderParams {
    View<2> table, tokens;           // [B, pages of a sequence] or null: sequence i has page i; [N, Hk]
    View<1> seq_lens, begin, rows;   // [B]; begin and rows may be null
    View<3> k_scale, v_scale;        // [pages, P, Hk], or null
    View<3> mean_k, mean_v;          // [N, Hk, D], [N, Hk, Dv]
    char *k, *v, *covariance;
    int64 k_step[4], v_step[4];      // [pages, P, Hk, D or Dv], in bytes
    int64 covariance_step[4];        // [N, Hk, D, Dv]
    Divisor page;                    // P
    uint32 pages, capacity;
    uint32 heads, dim, value_dim, block, count, dtype;  // count: N
    uint32 key_tiles, value_tiles;
    float inverse;  // 1 / S
};
#include "remainder/layout.cuh"

// What is new of one sequence and head.
struct Work {
    uint32 seq, head;
    int32 row, before;      // the row of the sequence, −1: none; its tokens as they are stored
    uint32 counted, whole;  // tokens that stay counted; whole blocks of the sequence

    __device__ Work(const RemainderParams &p, uint32 seq, uint32 head) : seq(seq), head(head) {
        row = p.rows ? as<int32>(p.rows.at(seq)) : int32(seq);
        if (row < 0 || uint32(row) >= p.count) row = -1;
        before = row < 0 ? 0 : as<int32>(p.tokens.at(row, head));
        whole = min(uint32(max(as<int32>(p.seq_lens.at(seq)), 0)), p.capacity) / p.block;
        counted = max(before, 0);
        const uint64 begin = p.begin ? uint64(max(as<int32>(p.begin.at(seq)), 0)) : ~0ull;
        if (counted % p.block > 0 || counted / p.block >= max(whole, 1u) || uint64(counted) + p.block > begin) counted = 0;
    }
};

// The page of the tensor that is page n of a sequence; below 0 where there is none.
__device__ inline int32 find_page(const RemainderParams &p, uint32 seq, uint32 n) {
    if (!p.table) return n == 0 && seq < p.pages ? int32(seq) : -1;
    const int32 page = as<int32>(p.table.at(seq, n));
    return page >= 0 && uint32(page) < p.pages ? page : -1;
}
// Whether all tokens of a block have pages. All threads of the CTA call it.
__device__ inline bool has_pages(const RemainderParams &p, uint32 seq, uint32 j) {
    bool all = true;
    for (uint32 n = threadIdx.x; n < p.block; n += THREADS) all &= find_page(p, seq, p.page.divide(j * p.block + n)) >= 0;
    return __syncthreads_and(all);
}
// A channel of the keys or values of a head, with their scales.
struct Rows {
    const char *data, *scale;
    int64 page, token, scale_page, scale_token;

    __device__ Rows(const char *data, const int64 (&step)[4], const View<3> &scales, uint32 head, uint32 c)
        : data(data + head * step[2] + c * step[3]), scale(scales ? scales.data + head * scales.step[2] : nullptr), page(step[0]), token(step[1]),
          scale_page(scales.step[0]), scale_token(scales.step[1]) {}
    // That of token t; 0 where it has no page.
    __device__ float load(const RemainderParams &p, uint32 seq, uint32 t) const {
        const uint32 n = p.page.divide(t), at = t - n * p.page.value;
        const int32 number = find_page(p, seq, n);
        return number < 0 ? 0.0f : at_place(p, number, at);
    }
    // That of a token of a page.
    __device__ float at_place(const RemainderParams &p, int64 number, uint32 at) const {
        const float x = load_element(data + number * page + at * token, p.dtype);
        return scale ? __fmul_rn(x, as<float>(scale + number * scale_page + at * scale_token)) : x;
    }
};
// S / (counted + S), rounded to nearest: a division of numbers from 1 to 2^31 needs no call for what is very large or small.
__device__ inline float share_of(const RemainderParams &p, uint32 counted) {
    const float of = float(p.block), all = float(counted + p.block);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(all));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-all, inverse, 1.0f), inverse);
    float share = __fmul_rn(of, inverse);
    share = __fmaf_rn(__fmaf_rn(-all, share, of), inverse, share);
    return __fmaf_rn(__fmaf_rn(-all, share, of), inverse, share);
}

struct Shared {
    float keys[TOKENS][KEYS], values[TOKENS][VALUES];
    float mean[KEYS + VALUES];    // of the block
    float before[KEYS + VALUES];  // of the blocks before
};

// Up to TOKENS tokens of a tile, on their way to shared memory: each thread has one channel of keys and one of values.
struct Stage {
    static constexpr uint32 KEY_STEP = THREADS / KEYS, VALUE_STEP = THREADS / VALUES;
    const RemainderParams &p;
    const Work &work;
    const Rows key_rows, value_rows;
    const uint32 c, d;  // channels in the tile
    const bool has_key, has_value;
    float keys[TOKENS / KEY_STEP], values[TOKENS / VALUE_STEP];
    uint32 count;

    __device__ Stage(const RemainderParams &p, const Work &work, uint32 key, uint32 value)
        : p(p), work(work), key_rows(p.k, p.k_step, p.k_scale, work.head, key + threadIdx.x % KEYS),
          value_rows(p.v, p.v_step, p.v_scale, work.head, value + threadIdx.x % VALUES), c(threadIdx.x % KEYS), d(threadIdx.x % VALUES),
          has_key(key + c < p.dim), has_value(value + d < p.value_dim) {}
    // Requests the tokens from `first` on. Channels past D or Dv are 0.
    __device__ void load(uint32 first, uint32 tokens) {
        count = tokens;
#pragma unroll
        for (uint32 n = 0; n < TOKENS / KEY_STEP; n++) {
            const uint32 t = threadIdx.x / KEYS + n * KEY_STEP;
            keys[n] = has_key && t < count ? key_rows.load(p, work.seq, first + t) : 0.0f;
        }
#pragma unroll
        for (uint32 n = 0; n < TOKENS / VALUE_STEP; n++) {
            const uint32 t = threadIdx.x / VALUES + n * VALUE_STEP;
            values[n] = has_value && t < count ? value_rows.load(p, work.seq, first + t) : 0.0f;
        }
    }
    __device__ void store(Shared &s) const {
        __syncthreads();
#pragma unroll
        for (uint32 n = 0; n < TOKENS / KEY_STEP; n++) s.keys[threadIdx.x / KEYS + n * KEY_STEP][c] = keys[n];
#pragma unroll
        for (uint32 n = 0; n < TOKENS / VALUE_STEP; n++) s.values[threadIdx.x / VALUES + n * VALUE_STEP][d] = values[n];
        __syncthreads();
    }
};

// Takes the means from what is staged.
__device__ inline void centre(Shared &s) {
    const float key = s.mean[threadIdx.x % KEYS], value = s.mean[KEYS + threadIdx.x % VALUES];
#pragma unroll
    for (uint32 n = threadIdx.x; n < TOKENS * KEYS; n += THREADS) s.keys[n / KEYS][n % KEYS] = __fsub_rn(s.keys[n / KEYS][n % KEYS], key);
#pragma unroll
    for (uint32 n = threadIdx.x; n < TOKENS * VALUES; n += THREADS) s.values[n / VALUES][n % VALUES] = __fsub_rn(s.values[n / VALUES][n % VALUES], value);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) remainder_covariance(const __grid_constant__ RemainderParams p) {
    constexpr uint32 ROWS = 2, COLUMNS = 4;
    __shared__ Shared s;
    uint32 rest = blockIdx.x;
    const uint32 value = rest % p.value_tiles * VALUES;
    rest /= p.value_tiles;
    const uint32 key = rest % p.key_tiles * KEYS;
    rest /= p.key_tiles;
    const Work work(p, rest / p.heads, rest % p.heads);
    if (work.row < 0 || 1 + work.counted / p.block >= work.whole) return;
    const uint32 r = threadIdx.x / (VALUES / COLUMNS) * ROWS, c = threadIdx.x % (VALUES / COLUMNS) * COLUMNS;
    const bool is_key = threadIdx.x < KEYS;
    const uint32 own = is_key ? key + threadIdx.x : value + threadIdx.x - KEYS;  // the channel whose mean this thread has
    const bool has_mean = threadIdx.x < KEYS + VALUES && own < (is_key ? p.dim : p.value_dim);
    const auto place = [&](uint32 i, uint32 n) {
        return p.covariance + work.row * p.covariance_step[0] + work.head * p.covariance_step[1] + (key + r + i) * p.covariance_step[2] +
               (value + c + n) * p.covariance_step[3];
    };
    const auto exists = [&](uint32 i, uint32 n) { return key + r + i < p.dim && value + c + n < p.value_dim; };
    float covariance[ROWS][COLUMNS];
#pragma unroll
    for (uint32 i = 0; i < ROWS; i++)
#pragma unroll
        for (uint32 n = 0; n < COLUMNS; n++) covariance[i][n] = work.counted > 0 && exists(i, n) ? as<float>(place(i, n)) : 0.0f;
    float before = 0.0f;
    if (has_mean && work.counted > 0) before = as<float>((is_key ? p.mean_k : p.mean_v).at(work.row, work.head, own));
    uint32 counted = work.counted;
    Stage stage(p, work, key, value);
    // A block that fits is staged once, and the next one is on its way while it is worked on.
    const bool is_staged_once = p.block <= TOKENS;
    if (is_staged_once) stage.load((1 + counted / p.block) * p.block, p.block);
    for (uint32 j = 1 + counted / p.block; j < work.whole && has_pages(p, work.seq, j); j++, counted += p.block) {
        const uint32 first = j * p.block;
        float mean = 0.0f;
        for (uint32 done = 0; done < p.block; done += TOKENS) {
            const uint32 count = min(TOKENS, p.block - done);
            if (!is_staged_once) stage.load(first + done, count);
            stage.store(s);
            if (is_staged_once && j + 1 < work.whole) stage.load(first + p.block, p.block);
            if (threadIdx.x < KEYS + VALUES)
                for (uint32 t = 0; t < count; t++) mean = __fadd_rn(mean, is_key ? s.keys[t][threadIdx.x] : s.values[t][threadIdx.x - KEYS]);
        }
        const float share = share_of(p, counted);
        if (threadIdx.x < KEYS + VALUES) {
            mean = __fmul_rn(mean, p.inverse);
            if (counted == 0) before = mean;
            s.mean[threadIdx.x] = mean, s.before[threadIdx.x] = before;
            before = __fmaf_rn(__fsub_rn(mean, before), share, before);
        }
        float sum[ROWS][COLUMNS] = {};
        for (uint32 done = 0; done < p.block; done += TOKENS) {
            const uint32 count = min(TOKENS, p.block - done);
            if (!is_staged_once) {
                stage.load(first + done, count);
                stage.store(s);
            } else {
                __syncthreads();
            }
            centre(s);
            for (uint32 t = 0; t < count; t++) {
                float keys[ROWS], values[COLUMNS];
#pragma unroll
                for (uint32 i = 0; i < ROWS; i++) keys[i] = s.keys[t][r + i];
#pragma unroll
                for (uint32 n = 0; n < COLUMNS; n++) values[n] = s.values[t][c + n];
#pragma unroll
                for (uint32 i = 0; i < ROWS; i++)
#pragma unroll
                    for (uint32 n = 0; n < COLUMNS; n++) sum[i][n] = __fmaf_rn(keys[i], values[n], sum[i][n]);
            }
        }
        const float between = __fmul_rn(share, __fsub_rn(1.0f, share));
#pragma unroll
        for (uint32 i = 0; i < ROWS; i++) {
            const float factor = __fmul_rn(between, __fsub_rn(s.mean[r + i], s.before[r + i]));
#pragma unroll
            for (uint32 n = 0; n < COLUMNS; n++) {
                const float step = __fsub_rn(s.mean[KEYS + c + n], s.before[KEYS + c + n]);
                const float kept = __fmaf_rn(__fsub_rn(__fmul_rn(sum[i][n], p.inverse), covariance[i][n]), share, covariance[i][n]);
                covariance[i][n] = __fmaf_rn(step, factor, kept);
            }
        }
        __syncthreads();
    }
    if (counted == work.counted) return;
#pragma unroll
    for (uint32 i = 0; i < ROWS; i++)
#pragma unroll
        for (uint32 n = 0; n < COLUMNS; n++)
            if (exists(i, n)) as<float>(place(i, n)) = covariance[i][n];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) remainder_means(const __grid_constant__ RemainderParams p) {
    constexpr uint32 AHEAD = 16;  // elements that a thread has under way
    __shared__ int32 pages[TOKENS];
    __shared__ uint32 places[TOKENS];
    const Work work(p, blockIdx.x / p.heads, blockIdx.x % p.heads);
    if (work.row < 0) return;
    uint32 counted = work.counted;
    const uint32 channels = p.dim + p.value_dim;
    for (uint32 j = 1 + counted / p.block; j < work.whole && has_pages(p, work.seq, j); j++, counted += p.block) {
        const float share = share_of(p, counted);
        for (uint32 first = 0; first < channels; first += THREADS) {
            const uint32 n = min(first + threadIdx.x, channels - 1);
            const bool exists = first + threadIdx.x < channels, is_key = n < p.dim;
            const uint32 c = is_key ? n : n - p.dim;
            const Rows rows = is_key ? Rows(p.k, p.k_step, p.k_scale, work.head, c) : Rows(p.v, p.v_step, p.v_scale, work.head, c);
            float mean = 0.0f;
            for (uint32 done = 0; done < p.block; done += TOKENS) {
                const uint32 count = min(TOKENS, p.block - done), t = j * p.block + done + threadIdx.x;
                __syncthreads();
                if (threadIdx.x < count) {
                    const uint32 page = p.page.divide(t);
                    pages[threadIdx.x] = find_page(p, work.seq, page), places[threadIdx.x] = t - page * p.page.value;
                }
                __syncthreads();
                for (uint32 begin = 0; begin < count; begin += AHEAD) {
                    float x[AHEAD];
#pragma unroll
                    for (uint32 i = 0; i < AHEAD; i++) x[i] = begin + i < count ? rows.at_place(p, pages[begin + i], places[begin + i]) : 0.0f;
#pragma unroll
                    for (uint32 i = 0; i < AHEAD; i++)
                        if (begin + i < count) mean = __fadd_rn(mean, x[i]);
                }
            }
            if (!exists) continue;
            mean = __fmul_rn(mean, p.inverse);
            float &to = as<float>((is_key ? p.mean_k : p.mean_v).at(work.row, work.head, c));
            const float before = counted > 0 ? to : mean;
            to = __fmaf_rn(__fsub_rn(mean, before), share, before);
        }
    }
    // Every thread has read them.
    __syncthreads();
    if (threadIdx.x == 0 && int32(counted) != work.before) as<int32>(p.tokens.at(work.row, work.head)) = int32(counted);
}
