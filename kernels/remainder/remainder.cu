// Means and covariance of the keys and values of each sequence and KV head, extended by the blocks that became whole.
//
//   x_t = k_t − mean_k · y_t = v_t − mean_v · w = S / (c + S) · δ = Σ_t x_t / S · ε = Σ_t y_t / S
//   covariance += w·(Σ_t x_t·y_tᵀ / S − covariance) − w²·δ·εᵀ · mean_k += w·δ · mean_v += w·ε · c += S
//
// For the first block of all, mean_k and mean_v are its first token and then, once more, what that gives. A sum over t is
// ((Σ₀ + Σ₁) + (Σ₂ + Σ₃)), with Σ_n over the tokens whose number in the block is n modulo 4. Every float32 operation is rounded on its own and in
// the order of src/ops/remainder/cpu.rs, whose bits these are.
//
// Bytes: the new blocks' keys once for each strip of values and their values once for each strip of keys, mostly from the L2 cache, and both
// once more for the means; the covariance of a head that has a new block is read and written once. Floor: D·Dv products a token and head.
//
// Two launches. remainder_covariance_*: a CTA has a tile of 32 key channels by 32 value channels of one head. It goes through the blocks
// in pieces of 64 tokens. remainder_means_*: a cluster has a head, and its CTAs take strips of 32 channels; it starts beside the first
// launch, which reads means and tokens as they were, and writes means and, last, tokens once that has ended. The number is the bytes of an element.
//
//   global ─ two pieces on their way in registers ─▶ less means, in shared memory ─▶ sums of a channel: four lanes, of tokens n modulo 4
//                                                                                 └▶ products: four lanes have 4 by 4 channels
//                                                                    end of a block: lanes join, each has 1 by 4 of the covariance
//
// On entry: D and Dv are multiples of 8.
//
// targets: compute_80, compute_90

#include "common/cluster.cuh"
#include "common/eight.cuh"
#include "common/view.cuh"

constexpr uint32 THREADS = 256, STRIP = 32, PIECE = 64;
constexpr uint32 PARTS = 4;             // sums of a block that are joined at its end
constexpr uint32 AHEAD = 2;             // pieces that are on their way
constexpr uint32 EIGHTS = STRIP / 8;    // threads that have a token of a strip
constexpr uint32 OF_PART = WARP / PARTS;

struct RemainderParams {
    View<2> table, tokens;           // [B, pages of a sequence] or null: sequence i has page i; [N, Hk]
    View<1> seq_lens, begin, rows;   // [B]; begin and rows may be null
    View<1> floors;                  // [B] or null: blocks before this token are not there, and are passed over
    View<3> k_scale, v_scale;        // [pages, P, Hk], or null
    View<3> mean_k, mean_v;          // [N, Hk, D], [N, Hk, Dv]
    char *k, *v, *covariance;
    int64 k_step[4], v_step[4];      // [pages, P, Hk, D or Dv], in bytes
    int64 covariance_step[4];        // [N, Hk, D, Dv]
    Divisor page, size;              // P, S
    uint32 pages, capacity;
    uint32 heads, dim, value_dim, count, dtype;  // count: N
    uint32 key_strips, value_strips;
    uint32 k_adjacent, v_adjacent;   // channels lie side by side, rows are aligned for eight of them
    float inverse;                   // 1 / S
};
#include "remainder/layout.cuh"

// What is new of one sequence and head.
struct Work {
    uint32 seq, head;
    int32 row, before;      // the row of the sequence, −1: none; its tokens as they are stored
    uint32 counted, whole;  // tokens that stay counted; whole blocks of the sequence
    uint32 first;           // the first block that is new

    __device__ Work(const RemainderParams &p, uint32 seq, uint32 head) : seq(seq), head(head) {
        row = p.rows ? as<int32>(p.rows.at(seq)) : int32(seq);
        const int32 len = as<int32>(p.seq_lens.at(seq));
        const uint64 begin = p.begin ? uint64(max(as<int32>(p.begin.at(seq)), 0)) : ~0ull;
        if (row < 0 || uint32(row) >= p.count) row = -1;
        before = row < 0 ? 0 : as<int32>(p.tokens.at(row, head));
        whole = p.size.divide(min(uint32(max(len, 0)), p.capacity));
        counted = max(before, 0);
        first = p.size.divide(counted);
        if (counted > first * p.size.value || first >= max(whole, 1u) || uint64(counted) + p.size.value > begin) counted = first = 0;
        first = max(first + 1, p.floors ? p.size.divide(max(as<int32>(p.floors.at(seq)), 0) + p.size.value - 1) : 0);
        // With the blocks that are passed over.
        if (counted > 0 && first < whole) counted = (first - 1) * p.size.value;
    }
    __device__ bool has_new() const { return row >= 0 && first < whole; }
};

// The page of the tensor that is page n of a sequence; below 0 where there is none.
__device__ inline int32 find_page(const RemainderParams &p, uint32 seq, uint32 n) {
    if (!p.table) return n == 0 && seq < p.pages ? int32(seq) : -1;
    const int32 page = as<int32>(p.table.at(seq, n));
    return page >= 0 && uint32(page) < p.pages ? page : -1;
}
// S / (counted + S), rounded to nearest: a division of numbers from 1 to 2^31 needs no call for what is very large or small.
__device__ inline float share_of(const RemainderParams &p, uint32 counted) {
    const float of = float(p.size.value), all = float(counted + p.size.value);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(all));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-all, inverse, 1.0f), inverse);
    float share = __fmul_rn(of, inverse);
    share = __fmaf_rn(__fmaf_rn(-all, share, of), inverse, share);
    return __fmaf_rn(__fmaf_rn(-all, share, of), inverse, share);
}

// A piece of the new blocks, which follow each other. The first block of a sequence comes twice: for its means, and with them.
struct Piece {
    uint32 block, part;  // the block, and the piece's number in it
    bool for_means;

    __device__ explicit Piece(const Work &work) : block(work.first), part(0), for_means(work.counted == 0) {}
    __device__ void advance(const RemainderParams &p) {
        if (!ends_block(p)) {
            part++;
            return;
        }
        part = 0;
        if (!for_means) block++;
        for_means = false;
    }
    __device__ bool ends_block(const RemainderParams &p) const { return (part + 1) * PIECE >= p.size.value; }
    __device__ uint32 tokens(const RemainderParams &p) const { return min(PIECE, p.size.value - part * PIECE); }
    // The token of this thread.
    __device__ static uint32 at() { return threadIdx.x / EIGHTS; }
};

// Where a thread's token of a piece lies.
struct Source {
    static constexpr int32 MISSING = -1, NONE = -2;
    int32 number;  // of the page; MISSING: the token has none; NONE: the piece has no such token
    uint32 at;     // in the page

    __device__ void find(const RemainderParams &p, const Work &work, const Piece &piece) {
        const bool is_token = piece.block < work.whole && piece.at() < piece.tokens(p);
        const uint32 t = is_token ? piece.block * p.size.value + piece.part * PIECE + piece.at() : 0, n = p.page.divide(t);
        at = t - n * p.page.value;
        number = is_token ? find_page(p, work.seq, n) : NONE;
    }
};

// Eight channels of a token.
template <uint32 BYTES> struct Channels {
    Eight<BYTES> x;
    float factor;
};

// 32 channels of the keys or values of a head: a thread has eight of them of a token.
template <uint32 BYTES> struct Strip {
    const RemainderParams &p;
    const bool is_key;
    const uint32 begin;
    const char *const data, *const scales;

    __device__ Strip(const RemainderParams &p, bool is_key, uint32 head, uint32 begin)
        : p(p), is_key(is_key), begin(begin), data((is_key ? p.k : p.v) + head * step(2)), scales(scale().data + head * scale().step[2]) {}
    __device__ int64 step(uint32 d) const { return is_key ? p.k_step[d] : p.v_step[d]; }
    __device__ const View<3> &scale() const { return is_key ? p.k_scale : p.v_scale; }
    __device__ uint32 dim() const { return is_key ? p.dim : p.value_dim; }
    __device__ uint32 own() const { return begin + threadIdx.x % EIGHTS * 8; }
    // Requests the channels of a token. What does not exist is 0.
    __device__ void load(const Source &from, Channels<BYTES> &to) const {
        to.factor = 1.0f;
        if (from.number < 0 || own() >= dim()) return to.x.clear();
        const char *const at = data + from.number * step(0) + from.at * step(1) + own() * step(3);
        if (is_key ? p.k_adjacent : p.v_adjacent) to.x.load(at);
        else to.x.gather(at, step(3));
        if (scale()) to.factor = as<float>(scales + from.number * scale().step[0] + from.at * scale().step[1]);
    }
    // A channel of a token; 0 where it has no page.
    __device__ float load_one(uint32 seq, uint32 t, uint32 c) const {
        const uint32 n = p.page.divide(t), at = t - n * p.page.value;
        const int32 number = find_page(p, seq, n);
        if (number < 0) return 0.0f;
        const float x = load_element(data + number * step(0) + at * step(1) + c * step(3), p.dtype);
        return scale() ? __fmul_rn(x, as<float>(scales + number * scale().step[0] + at * scale().step[1])) : x;
    }
};

// A piece of a strip, less the means, in shared memory. Rows lie PITCH words apart, so that lanes that read four of them use all banks.
template <uint32 PITCH> struct Centred {
    float4 rows[PIECE][PITCH / 4];
    float4 mean[STRIP / 4];  // of the blocks before
    float delta[STRIP];      // the mean of the last block, less that

    __device__ float *means() { return reinterpret_cast<float *>(mean); }
    template <uint32 BYTES> __device__ void store(const Strip<BYTES> &strip, const Channels<BYTES> &from, const Source &source) {
        const uint32 t = threadIdx.x / EIGHTS, quad = threadIdx.x % EIGHTS * 2;
        float x[8];
        from.x.widen(x, strip.p.dtype);
        if (strip.scale()) {
#pragma unroll
            for (uint32 i = 0; i < 8; i++) x[i] = __fmul_rn(x[i], from.factor);
        }
        if (source.number == Source::NONE) return;
        const float4 low = mean[quad], high = mean[quad + 1];
        const float4 first{__fsub_rn(x[0], low.x), __fsub_rn(x[1], low.y), __fsub_rn(x[2], low.z), __fsub_rn(x[3], low.w)};
        const float4 second{__fsub_rn(x[4], high.x), __fsub_rn(x[5], high.y), __fsub_rn(x[6], high.z), __fsub_rn(x[7], high.w)};
        // Neighbouring tokens in turns, for the banks.
        const uint32 turn = t & 1;
        rows[t][quad + turn] = turn ? second : first;
        rows[t][quad + 1 - turn] = turn ? first : second;
    }
    // Adds every fourth token, from `part` on, of a channel.
    __device__ void add(uint32 c, uint32 part, uint32 tokens, float &sum) const {
        const float *const from = reinterpret_cast<const float *>(rows) + c;
        if (tokens == PIECE) {
#pragma unroll
            for (uint32 n = 0; n < PIECE / PARTS; n++) sum = __fadd_rn(sum, from[(n * PARTS + part) * PITCH]);
        } else {
            for (uint32 t = part; t < tokens; t += PARTS) sum = __fadd_rn(sum, from[t * PITCH]);
        }
    }
    // Joins the sums of a channel, which four lanes have, and moves its mean.
    __device__ void move_mean(uint32 c, uint32 part, float sum, float inverse, float share) {
        sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, OF_PART));
        sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 2 * OF_PART));
        if (part > 0) return;
        const float of_block = __fmul_rn(sum, inverse);
        delta[c] = of_block, means()[c] = __fmaf_rn(of_block, share, means()[c]);
    }
    // Starts from stored means, or from the first token that is new.
    template <uint32 BYTES> __device__ void start(const Work &work, const Strip<BYTES> &strip, const View<3> &stored, uint32 c) {
        float x = 0.0f;
        if (strip.begin + c < strip.dim())
            x = work.counted > 0 ? as<float>(stored.at(work.row, work.head, strip.begin + c))
                                 : strip.load_one(work.seq, work.first * strip.p.size.value, strip.begin + c);
        means()[c] = x;
    }
};

// Products of 4 by 4 channels over every fourth token; at the end of a block four lanes join theirs.
struct Products {
    float sum[4][4];

    __device__ void clear() {
#pragma unroll
        for (uint32 i = 0; i < 4; i++)
#pragma unroll
            for (uint32 n = 0; n < 4; n++) sum[i][n] = 0.0f;
    }
    __device__ void add_token(const float4 &key, const float4 &value) {
        const float x[4] = {key.x, key.y, key.z, key.w}, y[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (uint32 i = 0; i < 4; i++)
#pragma unroll
            for (uint32 n = 0; n < 4; n++) sum[i][n] = __fmaf_rn(x[i], y[n], sum[i][n]);
    }
    template <uint32 K, uint32 V>
    __device__ void add(const Centred<K> &keys, const Centred<V> &values, uint32 key_quad, uint32 value_quad, uint32 part, uint32 tokens) {
        if (tokens == PIECE) {
#pragma unroll 4
            for (uint32 n = 0; n < PIECE / PARTS; n++) add_token(keys.rows[n * PARTS + part][key_quad], values.rows[n * PARTS + part][value_quad]);
        } else {
            for (uint32 t = part; t < tokens; t += PARTS) add_token(keys.rows[t][key_quad], values.rows[t][value_quad]);
        }
    }
    // The sums over all tokens of the products of key channel `part`.
    __device__ void join(uint32 part, float (&row)[4]) const {
        float half[2][4];
#pragma unroll
        for (uint32 i = 0; i < 2; i++)
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const float even = sum[2 * i][n], odd = sum[2 * i + 1][n];
                const float other = __shfl_xor_sync(FULL_WARP, part & 1 ? even : odd, OF_PART);
                half[i][n] = __fadd_rn(part & 1 ? odd : even, other);
            }
#pragma unroll
        for (uint32 n = 0; n < 4; n++) {
            const float other = __shfl_xor_sync(FULL_WARP, part & 2 ? half[0][n] : half[1][n], 2 * OF_PART);
            row[n] = __fadd_rn(part & 2 ? half[1][n] : half[0][n], other);
        }
    }
};

template <uint32 BYTES> __device__ inline void extend_covariance(const RemainderParams &p) {
    __shared__ Centred<STRIP + 8> keys;
    __shared__ Centred<STRIP + 16> values;
    wait_for_previous_kernel();
    allow_next_kernel();
    uint32 rest = blockIdx.x;
    const uint32 value_begin = rest % p.value_strips * STRIP;
    rest /= p.value_strips;
    const uint32 key_begin = rest % p.key_strips * STRIP;
    rest /= p.key_strips;
    const Work work(p, rest / p.heads, rest % p.heads);
    if (!work.has_new()) return;
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = lane / OF_PART;
    const Strip<BYTES> key(p, true, work.head, key_begin), value(p, false, work.head, value_begin);
    // What is on its way.
    Channels<BYTES> loaded[AHEAD][2];
    Source source[AHEAD], next[AHEAD];
    Piece later(work);
#pragma unroll
    for (uint32 i = 0; i < AHEAD; i++) source[i].find(p, work, later), later.advance(p);
#pragma unroll
    for (uint32 i = 0; i < AHEAD; i++) next[i].find(p, work, later), later.advance(p);
#pragma unroll
    for (uint32 i = 0; i < AHEAD; i++) key.load(source[i], loaded[i][0]), value.load(source[i], loaded[i][1]);
    // A thread's row of the covariance: a channel of keys and four of values.
    const uint32 key_quad = warp / 2 * 2 + (lane >> 1 & 1), value_quad = warp % 2 * 4 + (lane >> 2 & 1) * 2 + (lane & 1);
    const uint32 row = key_quad * 4 + part, column = value_quad * 4;
    const bool exists = key_begin + row < p.dim && value_begin + column < p.value_dim;
    char *const place = p.covariance + work.row * p.covariance_step[0] + work.head * p.covariance_step[1] +
                        int64(key_begin + row) * p.covariance_step[2] + int64(value_begin + column) * p.covariance_step[3];
    float covariance[4];
#pragma unroll
    for (uint32 n = 0; n < 4; n++) covariance[n] = work.counted > 0 && exists ? as<float>(place + n * p.covariance_step[3]) : 0.0f;
    if (threadIdx.x < STRIP) keys.start(work, key, p.mean_k, threadIdx.x);
    else if (threadIdx.x < 2 * STRIP) values.start(work, value, p.mean_v, threadIdx.x - STRIP);
    __syncthreads();
    // The channel that this thread adds up.
    const uint32 channel = warp * OF_PART + lane % OF_PART;
    uint32 counted = work.counted;
    Products products;
    products.clear();
    float sum = 0.0f, delta_sums[4];
    bool goes_on = true;
    for (Piece piece(work); goes_on && piece.block < work.whole;) {
#pragma unroll
        for (uint32 i = 0; i < AHEAD; i++) {
            if (piece.block >= work.whole) break;
            keys.store(key, loaded[i][0], source[i]);
            values.store(value, loaded[i][1], source[i]);
            const bool is_missing = source[i].number == Source::MISSING;
            source[i] = next[i];
            key.load(source[i], loaded[i][0]), value.load(source[i], loaded[i][1]);
            next[i].find(p, work, later), later.advance(p);
            // A block that has not all of its pages is the end.
            goes_on = !__syncthreads_or(is_missing);
            if (!goes_on) break;
            const float share = share_of(p, counted);
            products.add(keys, values, key_quad, value_quad, part, piece.tokens(p));
            if (channel < STRIP) keys.add(channel, part, piece.tokens(p), sum);
            else values.add(channel - STRIP, part, piece.tokens(p), sum);
            if (piece.ends_block(p)) {
                products.join(part, delta_sums);
                if (channel < STRIP) keys.move_mean(channel, part, sum, p.inverse, share);
                else values.move_mean(channel - STRIP, part, sum, p.inverse, share);
                products.clear();
                sum = 0.0f;
            }
            __syncthreads();
            if (piece.ends_block(p) && !piece.for_means) {
                const float factor = __fmul_rn(-__fmul_rn(share, share), keys.delta[row]);
#pragma unroll
                for (uint32 n = 0; n < 4; n++) {
                    const float kept = __fmaf_rn(__fsub_rn(__fmul_rn(delta_sums[n], p.inverse), covariance[n]), share, covariance[n]);
                    covariance[n] = __fmaf_rn(values.delta[column + n], factor, kept);
                }
                counted = piece.block * p.size.value;
            }
            piece.advance(p);
        }
    }
    if (counted == work.counted || !exists) return;
#pragma unroll
    for (uint32 n = 0; n < 4; n++) as<float>(place + n * p.covariance_step[3]) = covariance[n];
}

// The tokens that are counted once the strip's new blocks are.
template <uint32 BYTES> __device__ inline uint32 extend_strip(const RemainderParams &p, const Work &work, uint32 number) {
    __shared__ Centred<STRIP + 8> rows;
    const bool is_key = number < p.key_strips;
    const uint32 lane = threadIdx.x % WARP, part = lane / OF_PART, channel = threadIdx.x / WARP * OF_PART + lane % OF_PART;
    const Strip<BYTES> strip(p, is_key, work.head, (is_key ? number : number - p.key_strips) * STRIP);
    const View<3> &stored = is_key ? p.mean_k : p.mean_v;
    Channels<BYTES> loaded[AHEAD];
    Source source[AHEAD], next[AHEAD];
    Piece later(work);
#pragma unroll
    for (uint32 i = 0; i < AHEAD; i++) source[i].find(p, work, later), later.advance(p);
#pragma unroll
    for (uint32 i = 0; i < AHEAD; i++) next[i].find(p, work, later), later.advance(p);
#pragma unroll
    for (uint32 i = 0; i < AHEAD; i++) strip.load(source[i], loaded[i]);
    if (threadIdx.x < STRIP) rows.start(work, strip, stored, threadIdx.x);
    __syncthreads();
    uint32 counted = work.counted;
    float sum = 0.0f, mean = 0.0f;
    bool goes_on = true;
    for (Piece piece(work); goes_on && piece.block < work.whole;) {
#pragma unroll
        for (uint32 i = 0; i < AHEAD; i++) {
            if (piece.block >= work.whole) break;
            rows.store(strip, loaded[i], source[i]);
            const bool is_missing = source[i].number == Source::MISSING;
            source[i] = next[i];
            strip.load(source[i], loaded[i]);
            next[i].find(p, work, later), later.advance(p);
            goes_on = !__syncthreads_or(is_missing);
            if (!goes_on) break;
            if (channel < STRIP) {
                rows.add(channel, part, piece.tokens(p), sum);
                if (piece.ends_block(p)) {
                    rows.move_mean(channel, part, sum, p.inverse, share_of(p, counted));
                    sum = 0.0f;
                }
            }
            __syncthreads();
            if (piece.ends_block(p) && !piece.for_means) {
                counted = piece.block * p.size.value;
                // Means that a block without all of its pages would move are not stored.
                if (threadIdx.x < STRIP) mean = rows.means()[threadIdx.x];
            }
            piece.advance(p);
        }
    }
    wait_for_previous_kernel();
    if (counted > work.counted && threadIdx.x < STRIP && strip.begin + threadIdx.x < strip.dim())
        as<float>(stored.at(work.row, work.head, strip.begin + threadIdx.x)) = mean;
    // The next strip has the same shared memory.
    __syncthreads();
    return counted;
}

template <uint32 BYTES> __device__ inline void extend_means(const RemainderParams &p) {
    allow_next_kernel();
    const uint32 ctas = cluster_ctas(), number = blockIdx.x / ctas, rank = cluster_rank();
    const Work work(p, number / p.heads, number % p.heads);
    // All CTAs of a head have read its tokens before one writes them.
    cluster_arrive();
    uint32 counted = work.counted;
    if (work.has_new())
        for (uint32 strip = rank; strip < p.key_strips + p.value_strips; strip += ctas) counted = extend_strip<BYTES>(p, work, strip);
    cluster_wait();
    wait_for_previous_kernel();
    // The first CTA has a strip at least.
    if (work.row >= 0 && rank == 0 && threadIdx.x == 0 && int32(counted) != work.before) as<int32>(p.tokens.at(work.row, work.head)) = int32(counted);
}

#define KERNELS(BYTES)                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) remainder_covariance_##BYTES(const __grid_constant__ RemainderParams p) {      \
        extend_covariance<BYTES>(p);                                                                                                        \
    }                                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) remainder_means_##BYTES(const __grid_constant__ RemainderParams p) {           \
        extend_means<BYTES>(p);                                                                                                             \
    }
KERNELS(1)
KERNELS(2)
KERNELS(4)
