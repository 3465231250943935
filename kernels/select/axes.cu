// Selection of blocks by AXIS in INT4, in one launch.
//
//   x[h, j] = scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j)) · s[j] = Σ_h softmax_j(x[h, j]) · the exact top k of s
//
// Cut: a cluster of CTAs for each list; tiles of 16 blocks go round its CTAs, and in a CTA round its warps: that takes no length, so the
// first tiles come while lengths and queries are on their way; lengths that may be old say how many. A warp multiplies a tile with up to 16
// heads on the tensor cores, in whole numbers: codes are some, and a head's query is scaled by a power of two to numbers of 22 bits and a
// sign (32 channels · 15 · 2^22 < 2^31), of three digits of eight bits. What they lack is as small, beside the largest channel, as what
// float32 lacks. Scales and minima follow in float32, 32 channels at a time:
//
//   Σ_c q_c·(min + scale·code_c) = scale·Σ_c q_c·code_c + min·Σ_c q_c
//
// Products stay in shared memory. Of each tile and head the largest, and the sum of 2^(product − largest), go to all CTAs of the cluster:
// always of 16 blocks, so sums depend neither on the cluster nor on the batch. Scores go to the first CTA as keys; what goes from CTA to
// CTA tells a barrier there of its bytes, so nothing is fenced. The first CTA finds the cut and who is above it; warps take neighbouring
// keys, so that ids come out ascending.
//
// The cut: first a bound that so many threads' largest keys reach. Keys that reach it are counted, 64 bins for each doubling of a score;
// the keys of the bin that holds the cut are compared with each other, or counted again in finer bins while they are many.
// On entry: one query position for each list; up to 4 · QUARTETS heads; D a multiple of 64, at most 256, and 128 where GROUPS is 4; rows of
// summaries are single runs of 16-byte units.
//
// targets: compute_90

#include "common/cluster.cuh"
#include "common/cta_topk.cuh"
#include "select/selection.cuh"

constexpr uint32 THREADS = 512, WARPS = THREADS / WARP;
constexpr uint32 GROUP = 32, MOST_GROUPS = 8;  // channels that share a scale; such groups of a part
constexpr uint32 MOST_HEADS = 16;
constexpr uint32 MOST_TURNS = 3, MOST_CTAS = 16;
constexpr uint32 TILES_AT_ONCE = 256, MOST_RUNS = 32;  // tiles whose sums a warp joins; such runs of a list
// Keys of scores from 2^−27 up to 32, more than 16 heads can have: a bin takes 2^BIN_SHIFT of them, the first one also all that are less.
constexpr uint32 BIN_SHIFT = 17, LEAST_KEY = 0x42000000 - (BINS << BIN_SHIFT);
constexpr float LOG2_E = 1.44269504f;

// What lies in dynamic shared memory: tiles on their way, and when these are read the row's keys (in the first CTA); then products, partial
// sums of the whole row, and queries.
extern __shared__ uint4 axes_room[];

struct AxesShared {
    CtaTopKShared<THREADS> top;
    alignas(16) uint32 candidate[CANDIDATES];
    alignas(16) float sum[MOST_GROUPS][MOST_HEADS];  // of a query's channels, as multiples of its unit
    float unit[MOST_HEADS];                          // of a query's whole numbers, and what makes its products exponents of 2
    float2 of_run[MOST_RUNS][MOST_HEADS];            // the largest product, and the sum
    float2 of_head[MOST_HEADS];                      // the largest product, and what weights are multiplied by
    uint4 is_done;                                   // from the first CTA, when it has read all of its tiles
    uint32 exist[WARPS][MOST_TURNS];                 // blocks on their way that are there
    uint32 saw[MOST_CTAS * WARPS];                   // in the first CTA: each warp of the cluster
    Barrier sums, keys;                              // bytes that come
    uint32 of_warp[WARPS], expected[WARPS];
    uint32 nan, found, cut, ties;
    Selection list;
};

template <uint32 QUARTETS, uint32 GROUPS> struct Axes {
    static constexpr uint32 UNITS = GROUPS ? (GROUPS * 8 + WARP - 1) / WARP : MOST_GROUPS * 8 / WARP;  // of a lane, of four channels
    static constexpr uint32 COLUMNS = QUARTETS + (QUARTETS + 1) / 2;  // eights of them: two digits of four heads, then the third of eight
    // Rows of tiles are apart by four banks; of D = 128 units of 16 bytes change places instead, after their row.
    static constexpr uint32 GAP = GROUPS == 4 ? 0 : 16;
    static constexpr uint32 PITCH = 4 * QUARTETS;  // of a block's products
    const AxesParams &p;
    const SelectParams &s;
    AxesShared &shared;
    char *const room;
    const uint32 thread, warp, lane, slice;
    const uint32 row_bytes, range_bytes, turn_bytes;  // of a tile on its way
    const Selection &list;  // once all threads have met

    __device__ Axes(const AxesParams &p, AxesShared &shared)
        : p(p), s(p.select), shared(shared), room(reinterpret_cast<char *>(axes_room)), thread(threadIdx.x), warp(thread / WARP),
          lane(thread % WARP), slice(blockIdx.x - s.by_slices.divide(blockIdx.x) * s.slices), row_bytes(dim() + GAP),
          range_bytes(dim() / 4 + GAP), turn_bytes(BLOCKS * (row_bytes + range_bytes)), list(shared.list) {}

    __device__ ListNumber list_number() const {
        const uint32 number = s.by_slices.divide(blockIdx.x), of_heads = s.by_heads.divide(number), seq = s.by_lists.divide(of_heads);
        return {seq, of_heads - seq * s.lists, number - of_heads * s.kv_heads};
    }

    __device__ uint32 dim() const { return GROUPS ? GROUPS * GROUP : p.select.dim; }
    __device__ uint32 groups() const { return GROUPS ? GROUPS : p.select.dim / GROUP; }
    __device__ uint32 heads() const { return s.group; }
    // Of the CTA's n-th tile.
    __device__ uint32 tile(uint32 n) const { return n * s.slices + slice; }
    // The CTA's tiles.
    __device__ uint32 own_tiles() const { return s.by_slices.divide(list.tiles + s.slices - 1 - slice); }

    // A warp has a head. A lane has four channels of a group apart by two, and four more from D = 128 on.
    __device__ int64 query_of(const ListNumber &at) const {
        const uint32 channel = lane / 8 * GROUP + lane / 2 % 4 * 8 + lane % 2;
        return at.seq * s.q_seq + at.position * s.q_pos + (at.head * heads() + warp) * s.q_head + channel * s.q_channel;
    }
    __device__ void load_queries(int64 from, uint32 (&x)[4 * UNITS]) const {
#pragma unroll
        for (uint32 n = 0; n < 4 * UNITS; n++) x[n] = 0;
        if (warp >= heads()) return;
        const bool is_wide = s.q_type == FLOAT32;
        const int64 step = 2 * s.q_channel;
#pragma unroll
        for (uint32 n = 0; n < 4 * UNITS; n++) {
            if (lane + n / 4 * WARP >= groups() * 8) continue;
            const char *at = s.q + from + (n / 4 * WARP / 8 * GROUP / 2 + n % 4) * step;
            x[n] = is_wide ? as<uint32>(at) : as<uint16>(at);
        }
    }
    // Makes whole numbers of them, and lays out their digits as lanes read them: [groups, eights of columns, lanes].
    __device__ void stage_queries(const uint32 (&bits)[4 * UNITS]) const {
        if (warp >= heads()) return;
        float x[4 * UNITS];
        widen_queries(bits, s.q_type, x);
        uint32 most = 0;
        bool is_nan = false;
#pragma unroll
        for (uint32 n = 0; n < 4 * UNITS; n++) {
            const uint32 size = __float_as_uint(x[n]) & 0x7fffffff;
            is_nan |= x[n] != x[n];
            if (size < 0x7f800000) most = max(most, size);
        }
        // 2^exponent is above the largest; a float32 holds 2^±(QUERY_BITS − exponent).
        const uint32 biased = max(__reduce_max_sync(FULL_WARP, most) >> 23, 22u);
        const float up = __uint_as_float((275 - biased) << 23), down = __uint_as_float((biased - 21) << 23);
        if (is_nan) shared.nan = 1;
        if (lane == 0) shared.unit[warp] = down * (s.scale * LOG2_E);
        const uint32 quartet = warp / 4, column = warp % 4 * 2;
#pragma unroll
        for (uint32 m = 0; m < UNITS; m++) {
            const uint32 unit = lane + m * WARP, group = unit / 8;
            float sum = 0.0f;
            uint32 digits[3] = {};
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                const float scaled = x[4 * m + i] * up;
                sum += scaled;
                int32 rest = fabsf(scaled) < -minus_infinity() ? __float2int_rn(scaled) : 0;
#pragma unroll
                for (uint32 n = 0; n < 3; n++) {
                    const int32 digit = int32(uint32(rest) << 24) >> 24;
                    digits[2 - n] |= (uint32(digit) & 0xff) << 8 * i, rest = rest - digit >> 8;
                }
            }
#pragma unroll
            for (uint32 bit = 1; bit < 8; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (group >= groups()) continue;
            if (lane % 8 == 0) shared.sum[group][warp] = sum;
            uint32 *to = reinterpret_cast<uint32 *>(room + p.queries) + group * COLUMNS * 2 * WARP + unit % 8;
            to[(quartet * WARP + column * 4) * 2] = digits[0];
            to[(quartet * WARP + column * 4 + 4) * 2] = digits[1];
            to[((QUARTETS + quartet / 2) * WARP + (column + quartet % 2) * 4) * 2] = digits[2];
        }
    }

    __device__ uint32 turn_of(uint32 turn) const { return shared_address(room) + (warp * p.turns + turn) * turn_bytes; }

    // Where a lane's units of codes and of ranges lie, of a tile of D = 128 that is not looked up, and where they go: eight lanes have a
    // block, for whole lines.
    struct Units {
        const char *codes, *range;
        uint32 to[2], of_range;  // of even and odd fours of blocks

        __device__ Units known() const { return {held(codes), held(range), {held(to[0]), held(to[1])}, held(of_range)}; }
        __device__ void step(const AxesParams &p, uint32 blocks, uint32 bytes) {
            codes += blocks * p.axes.row, range += blocks * p.range.row, to[0] += bytes, to[1] += bytes, of_range += bytes;
        }
    };
    __device__ bool is_direct() const { return GROUPS == 4 && !s.place.table; }
    __device__ Units units_of(const ListNumber &at, uint32 turn, uint32 first) const {
        const uint32 row = lane / 8, begin = turn_of(turn), to = begin + row * row_bytes, swap = (lane % 8 ^ row) * 16;
        const uint32 of_range = begin + BLOCKS * row_bytes + lane / 2 * range_bytes + (lane % 2 ^ row % 2) * 16;
        return {p.axes.at(at.seq, first + row, at.head) + lane % 8 * 16, p.range.at(at.seq, first + lane / 2, at.head) + lane % 2 * 16,
                {to + swap, to + 4 * row_bytes + (swap ^ 64)}, of_range};
    }
    __device__ void copy_units(uint32 turn, uint32 first, const Units &of) const {
        const bool is_whole = first + BLOCKS <= s.place.capacity;
#pragma unroll
        for (uint32 i = 0; i < BLOCKS; i += 4)
            if (is_whole || first + lane / 8 + i < s.place.capacity)
                copy_16(of.to[i / 4 % 2] + i / 8 * 8 * row_bytes, of.codes + i * p.axes.row);
        if (is_whole || first + lane / 2 < s.place.capacity) copy_16(of.of_range, of.range);
        if (lane == 0) shared.exist[warp][turn] = 0xffff;
    }
    // Begins to copy the CTA's n-th tile.
    __device__ void copy(const ListNumber &at, uint32 turn, uint32 n) const {
        const uint32 first = tile(n) * BLOCKS;
        if (is_direct()) return copy_units(turn, first, units_of(at, turn, first));
        const uint32 begin = turn_of(turn), ranges = begin + BLOCKS * row_bytes;
        const uint32 row = lane / 8, to = begin + row * row_bytes, of_range = ranges + lane / 2 * range_bytes + (lane % 2 ^ lane / 8 % 2) * 16;
        uint32 page, within;
        const bool exists = s.place.find(at.seq, first + lane % BLOCKS, page, within);
        const uint32 mask = __ballot_sync(FULL_WARP, exists) & 0xffff;
        if (lane == 0) shared.exist[warp][turn] = mask;
        const char *codes = exists ? p.axes.at(page, within, at.head) : nullptr;
        const char *range = exists ? p.range.at(page, within, at.head) : nullptr;
        if constexpr (GROUPS == 4) {
#pragma unroll
            for (uint32 i = 0; i < BLOCKS; i += 4) {
                const char *from = shuffle(codes, row + i);
                if (mask >> row + i & 1) copy_16(to + i * row_bytes + (lane % 8 ^ (row + i) % 8) * 16, from + lane % 8 * 16);
            }
            const char *from = shuffle(range, lane / 2);
            if (mask >> lane / 2 & 1) copy_16(of_range, from + lane % 2 * 16);
        } else {
            const uint32 half = lane / BLOCKS * 16, block = lane % BLOCKS;
            for (uint32 m = half; m < dim() && exists; m += 32) copy_16(begin + block * row_bytes + m, codes + m);
            for (uint32 m = half; m < dim() / 4 && exists; m += 32) copy_16(ranges + block * range_bytes + m, range + m);
        }
    }
    __device__ static const char *shuffle(const char *p, uint32 from) {
        return reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, reinterpret_cast<uint64>(p), from));
    }

    // Blocks to expect: the length is read while the kernel before may still write it, so it decides nothing but what is asked for early.
    __device__ uint32 expected_blocks(const ListNumber &at) const {
        const int32 tokens = __shfl_sync(FULL_WARP, load_hint(s.seq_lens + at.seq * s.seq_lens_seq), 0);
        return tokens <= 0 ? 0 : min(s.by_block.divide(tokens - 1) + 1, s.place.capacity);
    }
    // Has a warp's first tiles brought to the L2 cache where their addresses are known.
    __device__ void announce(const ListNumber &at, uint32 expected) const {
        if (s.place.table) return;
        const Summary &of = lane < BLOCKS ? p.axes : p.range;
#pragma unroll 1
        for (uint32 turn = 0; turn < p.turns; turn++) {
            const uint32 j = tile(warp + turn * WARPS) * BLOCKS + lane % BLOCKS;
            if (j >= expected) break;
            const char *summary = of.at(at.seq, j, at.head);
            prefetch(summary);
            if (dim() > 128 && lane < BLOCKS) prefetch(summary + 128);
        }
    }
    // Begins to copy those that are expected. There is room for them in the index, whether the list has them or not.
    __device__ void begin_copies(const ListNumber &at, uint32 expected, Units of) const {
        if (lane == 0) shared.expected[warp] = expected;
#pragma unroll 1
        for (uint32 turn = 0; turn < p.turns; turn++) {
            const uint32 n = warp + turn * WARPS, first = tile(n) * BLOCKS;
            if (first < expected && !is_direct()) copy(at, turn, n);
            if (first < expected && is_direct()) copy_units(turn, first, of);
            of.step(p, WARPS * s.slices * BLOCKS, turn_bytes);
            end_copies();
        }
    }
    // Copies those that were not.
    __device__ void catch_up(uint32 own) const {
        const uint32 expected = shared.expected[warp], last = warp + (p.turns - 1) * WARPS;
        if (warp >= own || tile(min(last, own - 1)) * BLOCKS < expected) return;
#pragma unroll 1
        for (uint32 turn = 0; turn < p.turns; turn++) {
            const uint32 n = warp + turn * WARPS;
            if (n < own && tile(n) * BLOCKS >= expected) copy(list.at, turn, n);
        }
        end_copies();
        wait_copies<0>();
    }

    // Where in a row of codes, and of ranges, a part's group and a part lie, of this lane's rows.
    __device__ uint32 place_of_codes(uint32 part, uint32 group) const {
        return GROUPS == 4 ? (part * 4 + group ^ lane % 8) * 16 : part * (dim() / 2) + group * 16;
    }
    __device__ uint32 place_of_range(uint32 part) const { return GROUPS == 4 ? (part ^ lane / 16) * 16 : part * (dim() / 8); }

    // Products of a tile with the heads, in units: lane l has blocks l/4 and l/4 + 8, and of each four heads l % 4.
    __device__ void multiply(uint32 turn, float (&x)[2][2][QUARTETS]) const {
        const uint32 begin = turn_of(turn);
        const uint32 codes = begin + lane % BLOCKS * row_bytes, range = begin + BLOCKS * row_bytes + lane / 4 * range_bytes;
        uint32 q = shared_address(room) + p.queries + lane * 8, of_q = shared_address(shared.sum) + lane % 4 * 4;
#pragma unroll 2
        for (uint32 group = 0; group < (GROUPS ? GROUPS : MOST_GROUPS); group++) {
            if (!GROUPS && group >= groups()) break;
            uint32 word[4];  // [part][block]
            load_rows(codes + place_of_codes(lane / BLOCKS, group), word);
            uint2 b[COLUMNS];
            float sum[QUARTETS];
#pragma unroll
            for (uint32 n = 0; n < COLUMNS; n++) b[n] = load_two(q + n * WARP * 8);
#pragma unroll
            for (uint32 n = 0; n < QUARTETS; n++) sum[n] = __uint_as_float(load_word(of_q + n * 16));
#pragma unroll
            for (uint32 part = 0; part < 2; part++) {
                // Even channels, then odd ones.
                uint32 a[4];
                int32 sums[COLUMNS][4] = {};
#pragma unroll
                for (uint32 block = 0; block < 2; block++) {
                    const uint32 both = word[2 * part + block];
                    a[block] = both & 0x0f0f0f0f, a[block + 2] = both >> 4 & 0x0f0f0f0f;
                }
#pragma unroll
                for (uint32 n = 0; n < COLUMNS; n++) multiply_add(sums[n], a, b[n]);
#pragma unroll
                for (uint32 block = 0; block < 2; block++) {
                    const uint32 both = load_word(range + block * 8 * range_bytes + place_of_range(part) + group * 4);
                    const float scale = widen_float16(both & 0xffff), least = widen_float16(both >> 16);
#pragma unroll
                    for (uint32 n = 0; n < QUARTETS; n++) {
                        const uint32 upper = (uint32(sums[n][2 * block]) << 8) + uint32(sums[n][2 * block + 1]);
                        const float of_codes = float(int32((upper << 8) + uint32(sums[QUARTETS + n / 2][2 * block + n % 2])));
                        x[part][block][n] = fmaf(scale, of_codes, fmaf(least, sum[n], x[part][block][n]));
                    }
                }
            }
            q += COLUMNS * WARP * 8, of_q += MOST_HEADS * 4;
        }
    }
    // Keeps the products of the CTA's n-th tile.
    __device__ uint32 keep(uint32 turn, uint32 n, const float (&x)[2][2][QUARTETS]) const {
        const uint32 mask = shared.exist[warp][turn], first = tile(n) * BLOCKS;
        float *products = reinterpret_cast<float *>(room + p.products) + n * BLOCKS * PITCH;
        uint32 saw = 0;
#pragma unroll
        for (uint32 m = 0; m < QUARTETS; m++) {
            const uint32 h = m * 4 + lane % 4;
            const float unit = shared.unit[h];
            float product[2];
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 block = lane / 4 + i * 8;
                const bool exists = mask >> block & 1, counts = first + block < list.stored;
                const float along = fabsf(unit * x[1][i][m]);
                product[i] = fmaf(unit, x[0][i][m], along + log2_of(1.0f + exp2_fast(-2.0f * along)));
                if (counts && h < heads()) saw |= !exists ? NO_SUMMARY : product[i] != product[i] ? SAW_NAN : 0;
                if (!exists || !counts || !(fabsf(product[i]) < -minus_infinity())) product[i] = minus_infinity();
                products[block * PITCH + h] = product[i];
            }
            share_sum(m, tile(n), product);
        }
        return saw;
    }
    // The largest of a head's products with a tile, and the sum, to all CTAs. Lanes apart by four have the same head.
    __device__ void share_sum(uint32 quartet, uint32 number, const float (&product)[2]) const {
        float most = fmaxf(product[0], product[1]), sum = 0.0f;
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
        if (most > minus_infinity()) sum = exp2_fast(product[0] - most) + exp2_fast(product[1] - most);
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        // Those of two heads together: even lanes send to even CTAs.
        const float other_most = __shfl_xor_sync(FULL_WARP, most, 1), other_sum = __shfl_xor_sync(FULL_WARP, sum, 1);
        const bool is_odd = lane & 1;
        const uint32 cta = lane / 4 * 2 + is_odd, pair = quartet * 2 + lane % 4 / 2;
        const uint4 both = make_uint4(__float_as_uint(is_odd ? other_most : most), __float_as_uint(is_odd ? other_sum : sum),
                                      __float_as_uint(is_odd ? most : other_most), __float_as_uint(is_odd ? sum : other_sum));
        if (cta < s.slices) send(cta, partials() + pair * p.parts + number, shared.sums, both);
    }
    // Of each tile: [pairs of heads, tiles].
    __device__ uint4 *partials() const { return reinterpret_cast<uint4 *>(room + p.partials); }

    __device__ bool is_alone() const { return s.slices == 1; }
    __device__ void send(uint32 cta, uint4 *to, const Barrier &barrier, const uint4 &x) const {
        if (is_alone())
            *to = x;
        else
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                             address_in(cta, to)),
                         "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(address_in(cta, &barrier)) : "memory");
    }
    __device__ void send(uint32 cta, uint32 *to, const Barrier &barrier, uint32 x) const {
        if (is_alone())
            *to = x;
        else
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(cta, to)),
                         "r"(x), "r"(address_in(cta, &barrier)) : "memory");
    }
    __device__ void receive(const Barrier &barrier) const {
        if (is_alone())
            __syncthreads();
        else
            barrier.wait(0);
    }

    __device__ void wait_for_turn() const {
        if (p.turns == 1)
            wait_copies<0>();
        else if (p.turns == 2)
            wait_copies<1>();
        else
            wait_copies<MOST_TURNS - 1>();
        __syncwarp();
    }
    __device__ uint32 multiply_all() const {
        const uint32 own = own_tiles();
        uint32 saw = 0, turn = 0;
        catch_up(own);
#pragma unroll 1
        for (uint32 n = warp; n < own; n += WARPS) {
            wait_for_turn();
            float x[2][2][QUARTETS] = {};  // [part][block][quartet]
            multiply(turn, x);
            saw |= keep(turn, n, x);
            __syncwarp();  // what the next copies overwrite is read
            const uint32 next = n + p.turns * WARPS;
            if (next < own) copy(list.at, turn, next);
            end_copies();
            turn = turn + 1 == p.turns ? 0 : turn + 1;
        }
        wait_copies<0>();
        return saw;
    }

    // Joins the sums of the tiles, TILES_AT_ONCE of two heads by a warp, in an order that follows from the tiles' number alone.
    __device__ void weigh_heads() const {
        const uint32 runs = (list.tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE, pairs = (heads() + 1) / 2;
#pragma unroll 1
        for (uint32 task = warp; task < runs * pairs; task += WARPS) {
            const uint32 run = task / pairs, pair = task - run * pairs;
            const uint32 begin = run * TILES_AT_ONCE, end = min(begin + TILES_AT_ONCE, list.tiles);
            const float4 *of = reinterpret_cast<const float4 *>(partials()) + pair * p.parts;
            float2 most = make_float2(minus_infinity(), minus_infinity()), sum = make_float2(0.0f, 0.0f);
#pragma unroll 2
            for (uint32 n = begin + lane; n < end; n += WARP) {
                const float4 x = of[n];
                most.x = fmaxf(most.x, x.x), most.y = fmaxf(most.y, x.z);
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) {
                most.x = fmaxf(most.x, __shfl_xor_sync(FULL_WARP, most.x, bit));
                most.y = fmaxf(most.y, __shfl_xor_sync(FULL_WARP, most.y, bit));
            }
            // A head without a product has no weight; −inf − −inf would be NaN.
            const float2 from = make_float2(fmaxf(most.x, LOWEST), fmaxf(most.y, LOWEST));
#pragma unroll 2
            for (uint32 n = begin + lane; n < end; n += WARP) {
                const float4 x = of[n];
                sum.x = fmaf(x.y, exp2_fast(x.x - from.x), sum.x), sum.y = fmaf(x.w, exp2_fast(x.z - from.y), sum.y);
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2)
                sum.x += __shfl_xor_sync(FULL_WARP, sum.x, bit), sum.y += __shfl_xor_sync(FULL_WARP, sum.y, bit);
            if (lane > 0) continue;
            float2 *to = runs > 1 ? shared.of_run[run] : shared.of_head;
            to[2 * pair] = make_float2(from.x, runs > 1 ? sum.x : weight(sum.x));
            to[2 * pair + 1] = make_float2(from.y, runs > 1 ? sum.y : weight(sum.y));
        }
        __syncthreads();
        if (runs == 1) return;
        if (thread < heads()) {
            float most = LOWEST, sum = 0.0f;
#pragma unroll 1
            for (uint32 run = 0; run < runs; run++) most = fmaxf(most, shared.of_run[run][thread].x);
#pragma unroll 1
            for (uint32 run = 0; run < runs; run++) {
                const float2 of = shared.of_run[run][thread];
                sum = fmaf(of.y, exp2_fast(of.x - most), sum);
            }
            shared.of_head[thread] = make_float2(most, weight(sum));
        }
        __syncthreads();
    }
    static constexpr float LOWEST = -3.402823466e38f;
    __device__ static float weight(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }

    __device__ uint32 *keys() const { return reinterpret_cast<uint32 *>(room); }
    __device__ char *scores() const {
        return s.scores + list.at.seq * s.scores_seq + list.at.position * s.scores_pos + list.at.head * s.scores_head;
    }

    // Sends the keys to the first CTA, those of four blocks together.
    __device__ void send_keys() const {
        const uint32 own = own_tiles() * BLOCKS;
        const bool is_sound = !shared.nan;
#pragma unroll 1
        for (uint32 n = 4 * thread; n < own; n += 4 * THREADS) {
            const uint32 j = tile(n / BLOCKS) * BLOCKS + n % BLOCKS;
            const float4 *products = reinterpret_cast<const float4 *>(room + p.products) + n * QUARTETS;
            float score[4] = {};
            bool counts[4] = {is_sound, is_sound, is_sound, is_sound};
#pragma unroll
            for (uint32 m = 0; m < QUARTETS; m++) {
#pragma unroll
                for (uint32 i = 0; i < 4; i++) {
                    const float4 four = products[i * QUARTETS + m];
                    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (uint32 h = 0; h < 4; h++) {
                        if (4 * m + h >= heads()) break;
                        const float2 of_head = shared.of_head[4 * m + h];
                        counts[i] &= x[h] > minus_infinity();
                        score[i] = fmaf(exp2_fast(x[h] - of_head.x), of_head.y, score[i]);
                    }
                }
            }
            uint32 key[4];
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                if (!counts[i]) score[i] = minus_infinity();
                key[i] = list.key(j + i, score[i]);
                if (s.scores && j + i < min(list.stored, s.max_blocks)) as<float>(scores() + (j + i) * s.scores_block) = score[i];
            }
            send(0, reinterpret_cast<uint4 *>(keys() + j), shared.keys, make_uint4(key[0], key[1], key[2], key[3]));
        }
    }

    // Use(key) of a warp's neighbouring keys, four at a time.
    template <typename Use> __device__ void each_four(const Use &use) const {
        const uint32 count = list.tiles * BLOCKS, span = span_of(count, WARPS), end = min((warp + 1) * span, count);
#pragma unroll 1
        for (uint32 i = warp * span + 4 * lane; i < end; i += ::STEP) use(*reinterpret_cast<const uint4 *>(keys() + i));
    }
    template <typename Use> __device__ void each(const Use &use) const {
        each_four([&](const uint4 &four) { use(four.x), use(four.y), use(four.z), use(four.w); });
    }
    __device__ static uint32 first_bin(uint32 key) { return key < LEAST_KEY ? 0 : min(key - LEAST_KEY >> BIN_SHIFT, BINS - 1); }

    // Keys from `base` on are in; where those that share the upper bits of base, from `shift` on, are too many, the first `ties` of them.
    struct Cut {
        uint32 base, shift, ties;
        bool has_ties;
    };
    __device__ Cut find_cut() const {
        uint32 wanted = list.of_stored;
        if (wanted >= list.end - list.init) return {1, 0, 0, false};
        KeyBins<THREADS> bins(shared.top);
        uint32 bound = 0;
        if (span_of(list.tiles * BLOCKS, WARPS) > ::STEP && 2 * wanted <= THREADS) {
            uint32 most = 0;
            each([&](uint32 key) { most = max(most, key); });
            if (most != 0) atomicAdd(&shared.top.bin[first_bin(most)], 1u);
            bins.choose(wanted);
            bound = shared.top.chosen;  // 0 where too few threads have keys
        }
        each([&](uint32 key) {
            const uint32 bin = first_bin(key);
            if (key != 0 && bin >= bound) atomicAdd(&shared.top.bin[bin], 1u);
        });
        bins.choose(wanted);
        bins.base = LEAST_KEY, bins.shift = BIN_SHIFT;
        uint32 limit = ~0u;
        if (shared.top.chosen == 0) {
            // The first bin holds all that is small.
            limit = LEAST_KEY + (1 << BIN_SHIFT), wanted = shared.top.rank;
            bins.spread(1, limit - 1);
            each([&](uint32 key) {
                if (key < limit) bins.count(key);
            });
            bins.choose(wanted);
        }
#pragma unroll 1
        for (;;) {
            const uint32 base = bins.base + (shared.top.chosen << bins.shift), count = shared.top.count, shift = bins.shift;
            wanted = shared.top.rank;
            if (count == wanted) return {base, shift, 0, false};
            if (shift == 0) return {base, 0, wanted, true};
            if (count <= CANDIDATES) return compare(base, shift, count, wanted);
            bins.narrow();
            each([&](uint32 key) { bins.count(key); });
            bins.choose(wanted);
        }
    }
    // By comparing the `count` keys of a bin with each other.
    __device__ Cut compare(uint32 base, uint32 shift, uint32 count, uint32 wanted) const {
        each([&](uint32 key) {
            if (key >= base && key - base >> shift == 0) shared.candidate[atomicAdd(&shared.found, 1u)] = key;
        });
        __syncthreads();
        if (thread < count) {
            const uint32 key = shared.candidate[thread];
            uint32 above = 0, equal = 0;
#pragma unroll 4
            for (uint32 n = 0; n < count; n++) above += shared.candidate[n] > key, equal += shared.candidate[n] == key;
            // Those that are equal write the same.
            if (above < wanted && wanted <= above + equal) shared.cut = key, shared.ties = wanted - above == equal ? 0 : wanted - above;
        }
        __syncthreads();
        return {shared.cut, 0, shared.ties, shared.ties != 0};
    }

    __device__ void emit(uint32 place, uint32 j) const {
        const List &to = s.selected;
        char *ids = to.ids + list.at.seq * to.ids_seq + list.at.position * to.ids_pos + list.at.head * to.ids_head;
        as<int32>(ids + place * to.ids_entry) = j;
    }
    // Emits them. A place is the number of those in before it.
    __device__ void take(const Cut &cut) const {
        const uint32 count = list.tiles * BLOCKS, span = span_of(count, WARPS), begin = warp * span, end = min(begin + span, count);
        // Those at the cut count by 1 << 16.
        const auto classify = [&](uint32 key) -> uint32 {
            return key < cut.base ? 0 : cut.has_ties && key - cut.base >> cut.shift == 0 ? 1 << 16 : 1;
        };
        uint32 both = 0;
        each([&](uint32 key) { both += classify(key); });
        both = __reduce_add_sync(FULL_WARP, both);
        if (lane == 0) shared.of_warp[warp] = both;
        __syncthreads();
        if (both == 0) return;
        uint32 before = __reduce_add_sync(FULL_WARP, lane < warp ? shared.of_warp[lane % WARPS] : 0);
        const uint32 earlier = (1u << lane) - 1;
#pragma unroll 1
        for (uint32 i = begin; i < end; i += ::STEP) {
            uint4 four = make_uint4(0, 0, 0, 0);
            const uint32 j = i + 4 * lane;
            if (j < end) four = *reinterpret_cast<const uint4 *>(keys() + j);
            const uint32 of[4] = {classify(four.x), classify(four.y), classify(four.z), classify(four.w)};
            if (!__any_sync(FULL_WARP, of[0] + of[1] + of[2] + of[3])) continue;
            uint32 place = before, all = 0;
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const uint32 above = __ballot_sync(FULL_WARP, of[n] & 1), equal = cut.has_ties ? __ballot_sync(FULL_WARP, of[n] >> 16) : 0;
                place += __popc(above & earlier) + (__popc(equal & earlier) << 16), all += __popc(above) + (__popc(equal) << 16);
            }
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const uint32 equal = place >> 16;
                if (of[n] == 1 || (of[n] != 0 && equal < cut.ties)) emit(list.init + (place & 0xffff) + min(equal, cut.ties), j + n);
                place += of[n];
            }
            before += all;
        }
    }

    // By the first CTA: what follows from lengths alone.
    __device__ void write_forced() const {
        const List &to = s.selected;
        const uint32 init = list.init, n = list.n, wanted = list.wanted, of_stored = list.of_stored;
#pragma unroll 1
        for (uint32 j = thread; j < init; j += THREADS) emit(j, j);
#pragma unroll 1
        for (uint32 j = thread; j < wanted - of_stored; j += THREADS) emit(init + of_stored + j, list.end + j);
#pragma unroll 1
        for (uint32 j = thread; j < list.local; j += THREADS) emit(init + wanted + j, n - list.local + j);
#pragma unroll 1
        for (uint32 j = list.stored + thread; s.scores && j < min(n, s.max_blocks); j += THREADS)
            as<float>(scores() + j * s.scores_block) = minus_infinity();
        if (thread > 0) return;
        char *count = to.counts + list.at.seq * to.counts_seq + list.at.position * to.counts_pos + list.at.head * to.counts_head;
        as<int32>(count) = init + list.local + wanted;
    }
    __device__ void write_status() const {
        if (warp > 0 || !s.status) return;
        uint32 seen = 0;
#pragma unroll 1
        for (uint32 i = lane; i < s.slices * WARPS; i += WARP) seen |= shared.saw[i];
        seen = __reduce_or_sync(FULL_WARP, seen) | (list.clamped ? CLAMPED : 0);
        char *status = s.status + list.at.seq * s.status_seq + list.at.position * s.status_pos + list.at.head * s.status_head;
        if (lane == 0) as<uint32>(status) = seen;
    }

    __device__ void run() {
        if (thread == 0) {
            shared.nan = shared.found = shared.top.chosen = 0;
            shared.sums.open(1), shared.keys.open(1);
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        open(shared.top);
        const ListNumber at = list_number();
        const uint32 expected = expected_blocks(at);
        announce(at, expected);
        // What is asked for after the wait has its address by then.
        const int64 query = held(query_of(at));
        Units units = {};
        if (is_direct()) units = units_of(at, 0, tile(warp) * BLOCKS).known();
        __syncwarp();
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all have started
        wait_for_previous_kernel();
        Lengths given;
        int32 budget;
        if (warp == WARPS - 1) given = Lengths(s, at.seq), budget = budget_of(s, at.seq);
        uint32 bits[4 * UNITS];
        load_queries(query, bits);
        begin_copies(at, expected, units);
        if (thread == THREADS - 1) {
            shared.list.cut(s, at, given, budget);
            if (!is_alone()) shared.sums.expect((list.tiles * 2 * QUARTETS + 1) * sizeof(uint4));
            if (!is_alone() && slice == 0) shared.keys.expect((list.tiles * BLOCKS + s.slices * WARPS) * sizeof(uint32));
        }
        stage_queries(bits);
        __syncthreads();
        uint32 saw = multiply_all();
        if (list.n > list.stored) saw |= NO_SUMMARY;
        if (shared.nan && list.is_there) saw |= SAW_NAN;
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0) send(0, &shared.saw[slice * WARPS + warp], shared.keys, saw);
        if (slice == 0) {
            // Keys come to where its tiles were.
            __syncthreads();
            if (thread < s.slices) send(thread, &shared.is_done, shared.sums, make_uint4(0, 0, 0, 0));
            write_forced();
        }
        receive(shared.sums);
        weigh_heads();
        send_keys();
        if (slice > 0) return;
        receive(shared.keys);
        if (list.of_stored > 0) take(find_cut());
        write_status();
    }
};

template <uint32 QUARTETS, uint32 GROUPS> __device__ inline void select_axes(const AxesParams &p) {
    __shared__ AxesShared shared;
    allow_next_kernel();
    Axes<QUARTETS, GROUPS>(p, shared).run();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axes_4_128(const __grid_constant__ AxesParams p) { select_axes<1, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axes_8_128(const __grid_constant__ AxesParams p) { select_axes<2, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axes_16_128(const __grid_constant__ AxesParams p) { select_axes<4, 4>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_axes_4(const __grid_constant__ AxesParams p) { select_axes<1, 0>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_axes_16(const __grid_constant__ AxesParams p) { select_axes<4, 0>(p); }
