// Selection of blocks by AXIS in INT4, in one launch.
//
//   x[h, j] = scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j)) · s[j] = Σ_h softmax_j(x[h, j]) · the exact top k of s
//
// Bytes: the summaries, once: 1.25·D of a block and KV head, .6 µs for 128K tokens of 8 heads. The rest is latency.
//
// Cut: a cluster of CTAs for each list, neighbouring blocks for each CTA. A warp copies 16 blocks at a time to shared memory, those after
// them meanwhile, and multiplies them with up to 16 heads on the tensor cores. A code c stands there as 16 + c, exact in bfloat16, a query
// as a sum of one or three such numbers; scales and minima follow in float32, 32 channels at a time:
//
//   Σ_c q_c·(min + scale·code_c) = scale·Σ_c q_c·(16 + code_c) + (min − 16·scale)·Σ_c q_c
//
// Products stay in shared memory. Of each 16 blocks and head the largest, and the sum of 2^(product − largest), go to all CTAs of the cluster:
// always of 16, so sums depend neither on the cluster nor on the batch. Scores go to the first CTA as keys, and how many have which first
// digit. It finds the digits of the k-th largest key, and then who is above it; warps take neighbouring keys, so that ids come out ascending.
//
//   queries ─ products ─ largest and sums ─ cluster ─ weights, keys, first digits ─ cluster ─ cut ─ ids
//
// On entry: one query position for each list; up to 8 · TILES heads; D a multiple of 64, at most 256; rows of summaries are single runs of
// 16-byte units; slices is a power of two.
//
// targets: compute_90

#include "common/cluster.cuh"
#include "select/codes.cuh"
#include "select/rows.cuh"

constexpr uint32 THREADS = 512, WARPS = THREADS / WARP;
constexpr uint32 BLOCKS = 16;                  // of a warp, at a time
constexpr uint32 GROUP = 32, MOST_GROUPS = 8;  // channels that share a scale; such groups of a part
constexpr uint32 HEADS = 8;                    // of a tile
constexpr uint32 MOST_TURNS = 2, MOST_CTAS = 16;
constexpr uint32 DIGIT = 11, DIGITS = 1 << DIGIT, FIRST_SHIFT = 20;
constexpr float LOG2_E = 1.44269504f;
static_assert(DIGITS == 4 * THREADS, "a thread owns four");

__device__ inline void copy_16(uint32 to, const char *from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All copies but the `COUNT` that ended last are here.
template <uint32 COUNT> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }

// From shared memory, by addresses of 32 bits.
__device__ inline uint32 load_word(uint32 at) {
    uint32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline uint2 load_two(uint32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
    return x;
}

__device__ inline float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What lies in dynamic shared memory: blocks on their way, and when these are read the row's keys (in the first CTA); then products, partial
// sums of the whole row, and queries.
extern __shared__ uint4 axes_room[];

struct AxesShared {
    alignas(16) uint32 digit[DIGITS];             // of this CTA's keys
    alignas(16) uint32 first_digit[DIGITS];       // in the first CTA: of all keys
    alignas(8) float sum[MOST_GROUPS][2 * HEADS];  // of a query's channels
    float2 of_head[2 * HEADS];                    // the largest product, and what weights are multiplied by
    uint32 exist[WARPS][MOST_TURNS];              // blocks on their way that are there
    uint32 saw[MOST_CTAS * WARPS];                // in the first CTA: each warp of the cluster
    uint32 of_warp[WARPS], also_of_warp[WARPS];
    uint32 nan, chosen, rank, count;
};

// A list, and how many blocks are selected for it.
struct Selection {
    uint32 seq, head, list;
    uint32 n, stored;            // blocks, and the first of them, which have a summary
    uint32 init, local, wanted;  // first and last ones, which are forced; others
    uint32 end, of_stored;       // `of_stored` of the wanted are among blocks init … end−1, the rest follow them
    bool is_there, clamped;      // is_there: the query position

    __device__ Selection(const AxesParams &p) {
        const SelectParams &s = p.select;
        const uint32 number = blockIdx.x >> __ffs(s.slices) - 1, of_heads = s.by_heads.divide(number);
        head = number - of_heads * s.kv_heads, seq = s.by_lists.divide(of_heads), list = of_heads - seq * s.lists;
    }
    __device__ void read_lengths(const AxesParams &p) {
        const SelectParams &s = p.select;
        const Lengths given(s, seq);
        int32 budget = s.k;
        if (s.budgets) budget = as<int32>(s.budgets + seq * s.budgets_seq);
        const int32 queries = min(max(given.queries, 0), int32(s.positions)), last = min(int32(list) + 1, queries);
        is_there = int32(list) < last;
        const int32 tokens = is_there ? max(max(given.tokens, 0) - queries + last, 0) : 0;
        n = tokens == 0 ? 0 : s.by_block.divide(tokens - 1) + 1, stored = min(n, s.place.capacity);
        const uint32 k = min(uint32(max(budget, 0)), s.cap);
        init = min(s.init, n), local = min(s.local, n - init);
        const uint32 forced = init + local;
        wanted = min(k > forced ? k - forced : 0, n - forced);
        end = max(min(n - local, stored), init), of_stored = min(wanted, end - init);
        clamped = given.tokens < 0 || given.queries != queries || budget != int32(k) || (s.scores && n > s.max_blocks);
    }
    // 0 for a forced block; otherwise it sorts as the score does, which is −inf or not negative.
    __device__ uint32 key(uint32 j, float score) const {
        if (j < init || j >= end) return 0;
        return score < 0.0f ? 1 : __float_as_uint(score) + 2;
    }
};

template <uint32 TILES, uint32 TERMS> struct Axes {
    const AxesParams &p;
    const SelectParams &s;
    AxesShared &shared;
    char *const room;
    const uint32 thread, warp, lane, heads, groups, slice;
    const uint32 row_bytes, range_bytes, turn_bytes;  // of blocks on their way: rows apart by four banks
    Selection list;
    uint32 first, count;  // this CTA's blocks

    __device__ Axes(const AxesParams &p, AxesShared &shared)
        : p(p), s(p.select), shared(shared), room(reinterpret_cast<char *>(axes_room)), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          heads(p.select.group), groups(p.select.dim / GROUP), slice(blockIdx.x & p.select.slices - 1), row_bytes(p.select.dim + 16),
          range_bytes(p.select.dim / 4 + 16), turn_bytes(BLOCKS * (row_bytes + range_bytes)), list(p), first(0), count(0) {}

    // Eight channels of a query for each thread that has some: of [groups, tiles, lanes].
    __device__ bool has_queries() const { return thread < groups * TILES * WARP; }
    __device__ uint32 query_head() const { return thread / WARP % TILES * HEADS + lane / 4; }
    __device__ void load_queries(float (&x)[8]) const {
        const uint32 group = thread / (TILES * WARP), h = query_head();
        const char *at =
            s.q + list.seq * s.q_seq + list.list * s.q_pos + (list.head * heads + h) * s.q_head + (group * GROUP + lane % 4 * 8) * s.q_channel;
#pragma unroll
        for (uint32 i = 0; i < 8; i++) x[i] = has_queries() && h < heads ? load_query(at + i * s.q_channel, s.q_type) : 0.0f;
    }
    // Splits them into numbers of bfloat16, laid out as lanes read them: [groups, steps, tiles, terms, lanes].
    __device__ void stage_queries(float (&x)[8]) const {
        const uint32 group = thread / (TILES * WARP), tile = thread / WARP % TILES;
        uint2 *to = reinterpret_cast<uint2 *>(room + p.queries) + (group * 2 * TILES + tile) * TERMS * WARP + lane;
        if (!has_queries()) return;
        float sum = 0.0f;
        bool is_nan = false;
#pragma unroll
        for (uint32 i = 0; i < 8; i++) sum += x[i], is_nan |= x[i] != x[i];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (lane % 4 == 0) shared.sum[group][query_head()] = sum;
        if (is_nan) shared.nan = 1;
#pragma unroll
        for (uint32 term = 0; term < TERMS; term++) {
            uint32 of[8];
#pragma unroll
            for (uint32 i = 0; i < 8; i++) {
                of[i] = narrow_bfloat16(x[i]);
                const float rest = x[i] - widen_bfloat16(of[i]);
                x[i] = rest == rest ? rest : 0.0f;  // of infinity nothing is left
            }
            to[term * WARP] = make_uint2(of[0] | of[4] << 16, of[1] | of[5] << 16);
            to[(TILES * TERMS + term) * WARP] = make_uint2(of[2] | of[6] << 16, of[3] | of[7] << 16);
        }
    }

    __device__ uint32 turn_of(uint32 turn) const { return shared_address(room) + (warp * p.turns + turn) * turn_bytes; }

    // Begins to copy the CTA's blocks `begin` … begin + 15. Two lanes have a block.
    __device__ void copy(uint32 turn, uint32 begin) const {
        const uint32 n = begin + lane / 2, half = lane % 2 * 16;
        uint32 page, row;
        const bool exists = n < count && s.place.find(list.seq, first + n, page, row);
        const uint32 mask = __ballot_sync(FULL_WARP, exists);
        if (lane == 0) shared.exist[warp][turn] = mask;
        if (exists) {
            const char *axes = p.axes.at(page, row, list.head) + half, *range = p.range.at(page, row, list.head) + half;
            uint32 to = turn_of(turn) + lane / 2 * row_bytes + half;
#pragma unroll 4
            for (uint32 m = 0; m < s.dim; m += 32) copy_16(to + m, axes + m);
            to = turn_of(turn) + BLOCKS * row_bytes + lane / 2 * range_bytes + half;
            for (uint32 m = 0; m + half < s.dim / 4; m += 32) copy_16(to + m, range + m);
        }
        end_copies();
    }

    // Products of 16 blocks with the heads: lane l has blocks l/4 and l/4 + 8, of each tile heads 2·(l%4) and the one after.
    __device__ void multiply(uint32 turn, float (&x)[2][2][2 * TILES]) const {
        const uint32 begin = turn_of(turn), part_bytes = s.dim / 2, range_part = s.dim / 8;
        uint32 codes = begin + lane / 4 * row_bytes + lane % 4 * 4, range = begin + BLOCKS * row_bytes + lane / 4 * range_bytes;
        uint32 q = shared_address(room) + p.queries + lane * 8, of_q = shared_address(shared.sum) + lane % 4 * 8;
#pragma unroll 2
        for (uint32 group = 0; group < groups; group++) {
            uint32 word[2][2];  // [part][block]
            float sums[2][TILES][4] = {}, sum[2 * TILES];
#pragma unroll
            for (uint32 part = 0; part < 2; part++)
#pragma unroll
                for (uint32 block = 0; block < 2; block++) word[part][block] = load_word(codes + block * 8 * row_bytes + part * part_bytes);
#pragma unroll
            for (uint32 step = 0; step < 2; step++) {
                uint32 a[2][4];
#pragma unroll
                for (uint32 part = 0; part < 2; part++)
#pragma unroll
                    for (uint32 i = 0; i < 4; i++) a[part][i] = widen_codes(word[part][i % 2], 2 * step + i / 2);
#pragma unroll
                for (uint32 tile = 0; tile < TILES; tile++)
#pragma unroll
                    for (uint32 term = 0; term < TERMS; term++) {
                        const uint2 b = load_two(q + ((step * TILES + tile) * TERMS + term) * WARP * 8);
                        multiply_add(sums[0][tile], a[0], b), multiply_add(sums[1][tile], a[1], b);
                    }
            }
#pragma unroll
            for (uint32 tile = 0; tile < TILES; tile++) {
                const uint2 both = load_two(of_q + tile * HEADS * 4);
                sum[2 * tile] = __uint_as_float(both.x), sum[2 * tile + 1] = __uint_as_float(both.y);
            }
#pragma unroll
            for (uint32 part = 0; part < 2; part++)
#pragma unroll
                for (uint32 block = 0; block < 2; block++) {
                    const uint32 both = load_word(range + block * 8 * range_bytes + part * range_part);
                    const float scale = widen_float16(both & 0xffff), least = fmaf(-16.0f, scale, widen_float16(both >> 16));
#pragma unroll
                    for (uint32 n = 0; n < 2 * TILES; n++)
                        x[part][block][n] = fmaf(scale, sums[part][n / 2][2 * block + n % 2], fmaf(least, sum[n], x[part][block][n]));
                }
            codes += 16, range += 4, q += 2 * TILES * TERMS * WARP * 8, of_q += 2 * HEADS * 4;
        }
    }
    // Keeps the products of the CTA's blocks `begin` … begin + 15.
    __device__ uint32 keep(uint32 turn, uint32 begin, const float (&x)[2][2][2 * TILES]) const {
        const uint32 mask = shared.exist[warp][turn];
        const float scale = s.scale * LOG2_E;
        uint32 saw = 0;
#pragma unroll
        for (uint32 m = 0; m < 2 * TILES; m++) {
            const uint32 h = m / 2 * HEADS + lane % 4 * 2 + m % 2;
            float product[2];
#pragma unroll
            for (uint32 block = 0; block < 2; block++) {
                const uint32 n = begin + block * 8 + lane / 4;
                const bool exists = mask >> (lane / 4 + block * 8) * 2 & 1, counts = n < count && h < heads;
                const float along = fabsf(scale * x[1][block][m]);
                product[block] = fmaf(scale, x[0][block][m], along + log2_of(1.0f + exp2_fast(-2.0f * along)));
                if (counts) saw |= !exists ? NO_SUMMARY : product[block] != product[block] ? SAW_NAN : 0;
                if (!exists || !(fabsf(product[block]) < -minus_infinity())) product[block] = minus_infinity();
                if (counts) reinterpret_cast<float *>(room + p.products)[n * p.pitch + h] = product[block];
            }
            share_sum(h, (first + begin) / BLOCKS, product);
        }
        return saw;
    }
    // The largest of a head's products with 16 blocks, and the sum, to all CTAs. Lanes apart by four have the same head.
    __device__ void share_sum(uint32 h, uint32 number, const float (&product)[2]) const {
        float most = fmaxf(product[0], product[1]), sum = 0.0f;
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
        if (most > minus_infinity()) sum = exp2_fast(product[0] - most) + exp2_fast(product[1] - most);
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        uint32 *to = reinterpret_cast<uint32 *>(room + p.partials) + (h * p.parts + number) * 2;
        for (uint32 cta = lane / 4; cta < s.slices && h < heads; cta += WARP / 4) store_two_to(cta, to, make_uint2(__float_as_uint(most), __float_as_uint(sum)));
    }
    static constexpr uint32 STEP = WARPS * BLOCKS;  // blocks of the CTA's warps

    __device__ void begin_copies() const {
        for (uint32 n = 0; n + 1 < p.turns; n++) copy(n, warp * BLOCKS + n * STEP);
    }
    __device__ uint32 multiply_all() const {
        uint32 saw = 0, turn = 0;
#pragma unroll 1
        for (uint32 begin = warp * BLOCKS; begin < count; begin += STEP) {
            __syncwarp();  // what the next copies overwrite is read
            const uint32 ahead = p.turns - 1;
            copy(turn ^ ahead, begin + ahead * STEP);
            if (ahead > 0)
                wait_for_copies<1>();
            else
                wait_for_copies<0>();
            __syncwarp();
            float x[2][2][2 * TILES] = {};  // [part][block][head]
            multiply(turn, x);
            saw |= keep(turn, begin, x);
            turn ^= ahead;
        }
        return saw;
    }

    __device__ void weigh_heads() const {
        const uint32 parts = (list.stored + BLOCKS - 1) / BLOCKS;
        for (uint32 h = warp; h < heads; h += WARPS) {
            const float2 *of = reinterpret_cast<const float2 *>(room + p.partials) + h * p.parts;
            float most = minus_infinity(), sum = 0.0f;
#pragma unroll 4
            for (uint32 n = lane; n < parts; n += WARP) most = fmaxf(most, of[n].x);
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
#pragma unroll 4
            for (uint32 n = lane; n < parts && most > minus_infinity(); n += WARP) sum = fmaf(of[n].y, exp2_fast(of[n].x - most), sum);
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (lane == 0) shared.of_head[h] = sum > 0.0f ? make_float2(most, 1.0f / sum) : make_float2(0.0f, 0.0f);
        }
    }
    // The score of the CTA's n-th block.
    __device__ float mass(uint32 n) const {
        const float *products = reinterpret_cast<const float *>(room + p.products) + n * p.pitch;
        float sum = 0.0f;
        bool counts = !shared.nan;
#pragma unroll 4
        for (uint32 h = 0; h < heads; h++) {
            const float product = products[h];
            counts &= product > minus_infinity();
            sum = fmaf(exp2_fast(product - shared.of_head[h].x), shared.of_head[h].y, sum);
        }
        return counts ? sum : minus_infinity();
    }
    __device__ uint32 *keys() const { return reinterpret_cast<uint32 *>(room); }
    __device__ char *scores() const { return s.scores + list.seq * s.scores_seq + list.list * s.scores_pos + list.head * s.scores_head; }

    // Sends the keys, and how many have which first digit.
    __device__ void send_keys() const {
        for (uint32 n = thread; n < count; n += THREADS) {
            const float score = mass(n);
            const uint32 j = first + n, key = list.key(j, score);
            store_word_to(0, keys() + j, key);
            if (key != 0) atomicAdd(&shared.digit[key >> FIRST_SHIFT], 1u);
            if (s.scores && j < s.max_blocks) as<float>(scores() + j * s.scores_block) = score;
        }
        if (slice == 0 && thread < -list.stored % 4) keys()[list.stored + thread] = 0;
        __syncthreads();
        const uint4 four = reinterpret_cast<const uint4 *>(shared.digit)[thread];
        const uint32 of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32 i = 0; i < 4; i++)
            if (of[i] != 0) add_word_in(0, &shared.first_digit[4 * thread + i], of[i]);
    }

    // The digit of the wanted-th largest of the keys that were counted: `chosen`. It is the rank-th largest of the `count` that have it.
    __device__ void choose_digit(const uint32 *digit, uint32 wanted) const {
        const uint32 last = THREADS - 1 - thread;  // from the top
        const uint4 four = reinterpret_cast<const uint4 *>(digit)[last];
        const uint32 sum = four.x + four.y + four.z + four.w, through = sum_lanes(sum);
        if (lane == WARP - 1) shared.of_warp[warp] = through;
        __syncthreads();
        uint32 above = __reduce_add_sync(FULL_WARP, lane < warp ? shared.of_warp[lane % WARPS] : 0) + through - sum;
        if (above < wanted && wanted <= above + sum) {
            uint32 chosen = 4 * last + 3, here = four.w;
            if (above + here < wanted) above += here, chosen--, here = four.z;
            if (above + here < wanted) above += here, chosen--, here = four.y;
            if (above + here < wanted) above += here, chosen--, here = four.x;
            shared.chosen = chosen, shared.rank = wanted - above, shared.count = here;
        }
        __syncthreads();
    }
    __device__ void count_digit(uint32 prefix, uint32 shift, uint32 low) const {
        reinterpret_cast<uint4 *>(shared.digit)[thread] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        const uint32 mask = (1u << shift - low) - 1;
#pragma unroll 2
        for (uint32 i = 4 * thread; i < list.stored; i += 4 * THREADS) {
            const uint4 four = *reinterpret_cast<const uint4 *>(keys() + i);
            const uint32 key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (uint32 n = 0; n < 4; n++)
                if (key[n] != 0 && key[n] >> shift == prefix) atomicAdd(&shared.digit[key[n] >> low & mask], 1u);
        }
        __syncthreads();
    }
    // Emits those whose upper bits are above prefix, and the first `ties` of those that equal it.
    __device__ void take(uint32 prefix, uint32 shift, uint32 ties, char *ids) const {
        constexpr uint32 FOURS = 4 * WARP;
        const uint32 span = (list.stored + FOURS * WARPS - 1) / (FOURS * WARPS) * FOURS, begin = warp * span, last = min(begin + span, list.stored);
        const auto classify = [&](uint32 key) { return key == 0 ? 0 : (key >> shift > prefix) + (uint32(key >> shift == prefix) << 16); };
        const auto load = [&](uint32 i, uint32 (&of)[4]) {
            uint4 four = make_uint4(0, 0, 0, 0);
            if (i < last) four = *reinterpret_cast<const uint4 *>(keys() + i);
            of[0] = classify(four.x), of[1] = classify(four.y), of[2] = classify(four.z), of[3] = classify(four.w);
            return of[0] + of[1] + of[2] + of[3];
        };
        uint32 of[4], both = 0;  // above in the low half, equal in the high one
#pragma unroll 2
        for (uint32 i = begin + 4 * lane; i < last; i += FOURS) both += load(i, of);
        uint32 above = __reduce_add_sync(FULL_WARP, both & 0xffff), equal = __reduce_add_sync(FULL_WARP, both >> 16);
        if (lane == 0) shared.of_warp[warp] = above, shared.also_of_warp[warp] = equal;
        __syncthreads();
        above = __reduce_add_sync(FULL_WARP, lane < warp ? shared.of_warp[lane % WARPS] : 0);
        equal = __reduce_add_sync(FULL_WARP, lane < warp ? shared.also_of_warp[lane % WARPS] : 0);
#pragma unroll 1
        for (uint32 chunk = begin; chunk < last; chunk += FOURS) {
            const uint32 i = chunk + 4 * lane, sum = load(i, of);
            if (!__any_sync(FULL_WARP, sum)) continue;
            const uint32 through = sum_lanes(sum);
            uint32 above_before = above + (through - sum & 0xffff), equal_before = equal + (through - sum >> 16);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const bool is_above = of[n] & 1, is_equal = of[n] >> 16;
                if (is_above || (is_equal && equal_before < ties))
                    as<int32>(ids + (list.init + above_before + min(equal_before, ties)) * s.selected.ids_entry) = i + n;
                above_before += is_above, equal_before += is_equal;
            }
            const uint32 all = __shfl_sync(FULL_WARP, through, WARP - 1);
            above += all & 0xffff, equal += all >> 16;
        }
    }
    __device__ void choose(char *ids) const {
        uint32 prefix = 0, shift = FIRST_SHIFT, ties = list.of_stored;
        const uint32 *digit = shared.first_digit;
#pragma unroll 1
        for (;;) {
            choose_digit(digit, ties);
            prefix += shared.chosen, ties = shared.rank;
            if (shared.count == ties || shift == 0) break;
            const uint32 low = shift > DIGIT ? shift - DIGIT : 0;
            count_digit(prefix, shift, low);
            digit = shared.digit, prefix <<= shift - low, shift = low;
        }
        take(prefix, shift, ties, ids);
    }
    // By the first CTA: the list and its status.
    __device__ void finish() const {
        const List &to = s.selected;
        char *ids = to.ids + list.seq * to.ids_seq + list.list * to.ids_pos + list.head * to.ids_head;
        const auto emit = [&](uint32 place, uint32 j) { as<int32>(ids + place * to.ids_entry) = j; };
        const uint32 init = list.init, n = list.n, wanted = list.wanted, of_stored = list.of_stored;
        if (of_stored > 0) choose(ids);
        for (uint32 j = thread; j < init; j += THREADS) emit(j, j);
        for (uint32 j = thread; j < wanted - of_stored; j += THREADS) emit(init + of_stored + j, list.end + j);
        for (uint32 j = thread; j < list.local; j += THREADS) emit(init + wanted + j, n - list.local + j);
        for (uint32 j = list.stored + thread; s.scores && j < min(n, s.max_blocks); j += THREADS) as<float>(scores() + j * s.scores_block) = minus_infinity();
        if (warp > 0) return;
        uint32 seen = 0;
        for (uint32 i = lane; i < s.slices * WARPS; i += WARP) seen |= shared.saw[i];
        seen = __reduce_or_sync(FULL_WARP, seen) | (list.clamped ? CLAMPED : 0);
        if (lane > 0) return;
        as<int32>(to.counts + list.seq * to.counts_seq + list.list * to.counts_pos + list.head * to.counts_head) = init + list.local + wanted;
        if (s.status) as<uint32>(s.status + list.seq * s.status_seq + list.list * s.status_pos + list.head * s.status_head) = seen;
    }

    __device__ void run() {
        reinterpret_cast<uint4 *>(shared.digit)[thread] = make_uint4(0, 0, 0, 0);
        reinterpret_cast<uint4 *>(shared.first_digit)[thread] = make_uint4(0, 0, 0, 0);
        if (thread == 0) shared.nan = 0;
        cluster_arrive();
        wait_for_previous_kernel();
        float x[8];
        load_queries(x);
        list.read_lengths(p);
        const uint32 parts = (list.stored + BLOCKS - 1) / BLOCKS, share = (parts + s.slices - 1 >> __ffs(s.slices) - 1) * BLOCKS;
        first = min(slice * share, list.stored), count = min(share, list.stored - first);
        begin_copies();
        __syncthreads();
        stage_queries(x);
        cluster_wait();  // all have started
        __syncthreads();
        uint32 saw = multiply_all();
        if (list.n > list.stored) saw |= NO_SUMMARY;
        if (shared.nan && list.is_there) saw |= SAW_NAN;
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0) store_word_to(0, &shared.saw[slice * WARPS + warp], saw);
        synchronise();
        weigh_heads();
        __syncthreads();
        send_keys();
        synchronise();
        if (slice == 0) finish();
    }
    // What was written to any shared memory of the cluster, all see.
    __device__ void synchronise() const {
        if (s.slices == 1) {
            __syncthreads();
        } else {
            cluster_arrive();
            cluster_wait();
        }
    }
};

template <uint32 TILES, uint32 TERMS> __device__ inline void select_axes(const AxesParams &p) {
    __shared__ AxesShared shared;
    allow_next_kernel();
    Axes<TILES, TERMS>(p, shared).run();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axes_8_bf16(const __grid_constant__ AxesParams p) { select_axes<1, 1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axes_16_bf16(const __grid_constant__ AxesParams p) { select_axes<2, 1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axes_8(const __grid_constant__ AxesParams p) { select_axes<1, 3>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axes_16(const __grid_constant__ AxesParams p) { select_axes<2, 3>(p); }
