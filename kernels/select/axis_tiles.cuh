// What axis_cluster and axis_two_launches share: products of INT4 summaries of AXIS with queries, a tile at a time; the weights of heads;
// scores; and what is written of a list.
//
//   x[h, j] = scale·q_h·mean_j + ln(2·cosh(scale·q_h·axis_j)) · s[j] = Σ_h softmax_j(x[h, j])
//
// Tiles of 16 blocks go round the CTAs of a list, and within a CTA round its warps. This needs no length, so a warp copies its first tiles
// while lengths and queries are in flight; how many it copies follows from lengths that may be old. A warp multiplies a tile with up to 16
// heads on the tensor cores, in integers. Codes are integers; a head's query is scaled by a power of two to integers of 22 bits and a sign
// (32 channels · 15 · 2^22 < 2^31), of three digits of eight bits. Relative to the largest channel, the rounding is as small as float32's.
// Scales and minima are applied in float32, 32 channels at a time:
//
//   Σ_c q_c·(min + scale·code_c) = scale·Σ_c q_c·code_c + min·Σ_c q_c
//
// Each tile and head has a partial: the largest product, and the sum of 2^(product − largest). A partial is always of 16 blocks, so that sums
// depend neither on the split nor on the batch.
//
// On entry: one query position for each list; up to 4 · QUARTETS heads; D a multiple of 64, at most 256, and 128 where GROUPS is 4; rows of
// summaries are single runs of 16-byte units.
#pragma once

#include "common/cluster.cuh"
#include "select/selection.cuh"

constexpr uint32 THREADS = 512, WARPS = THREADS / WARP;
constexpr uint32 GROUP = 32, MOST_GROUPS = 8;  // channels that share a scale; most groups of channels of a mean or an axis
constexpr uint32 MOST_HEADS = 16;
constexpr uint32 MOST_STAGES = 3;
constexpr uint32 TILES_AT_ONCE = 256;  // tiles of a run, whose partials a warp joins; a list has at most WARP runs
constexpr float LOG2_E = 1.44269504f;
constexpr float MASS_LENGTH = 0.7f;  // an axis is shortened to this where masses are added up

// Dynamic shared memory. It begins at a line of 128 bytes: where it did not, 64 sequences took a tenth longer.
extern __shared__ __align__(128) uint4 axis_shared[];

// A list that is made, and what is written of it.
struct AxisList {
    const SelectParams &s;
    const Selection &list;  // valid after the CTA's first barrier
    char *const room;
    const uint32 thread, warp, lane;

    __device__ AxisList(const SelectParams &s, const Selection &list)
        : s(s), list(list), room(reinterpret_cast<char *>(axis_shared)), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP) {}

    __device__ ListNumber list_number(uint32 number) const {
        const uint32 of_heads = s.by_heads.divide(number), seq = s.by_lists.divide(of_heads);
        return {seq, of_heads - seq * s.lists, number - of_heads * s.kv_heads};
    }
    __device__ uint32 heads() const { return s.group; }
    // The blocks to expect. The length is read while the kernel before may still write it, so it decides only what is loaded early.
    __device__ uint32 expected_blocks(const ListNumber &at) const {
        const int32 tokens = __shfl_sync(FULL_WARP, load_hint(s.seq_lens + at.seq * s.seq_lens_seq), 0);
        return tokens <= 0 ? 0 : min(s.by_block.divide(tokens - 1) + 1, s.place.capacity);
    }

    __device__ char *scores() const {
        return s.scores + list.at.seq * s.scores_seq + list.at.position * s.scores_pos + list.at.head * s.scores_head;
    }
    // Writes a score where the caller wants scores.
    __device__ void write_score(uint32 j, float score) const {
        if (s.scores && j < min(list.stored, s.max_blocks)) as<float>(scores() + j * s.scores_block) = score;
    }
    __device__ char *ids() const {
        const List &to = s.selected;
        return to.ids + list.at.seq * to.ids_seq + list.at.position * to.ids_pos + list.at.head * to.ids_head;
    }
    __device__ void emit(char *ids, uint32 place, uint32 j) const { as<int32>(ids + place * s.selected.ids_entry) = j; }

    // Called by one CTA: writes what follows from lengths alone, and all blocks where all are selected.
    __device__ void write_forced() const {
        const List &to = s.selected;
        char *const ids = this->ids();
        // Fields are read four at a time: compute-sanitizer takes a read of one of them for a misaligned access.
        const uint4 *const fields = reinterpret_cast<const uint4 *>(&list), middle = fields[1], last = fields[2];
        const uint32 n = list.n, stored = middle.x, init = middle.z, local = middle.w, wanted = last.x, end = last.y, of_stored = last.z;
#pragma unroll 1
        for (uint32 j = thread; j < (of_stored == end - init ? end : init); j += THREADS) emit(ids, j, j);
#pragma unroll 1
        for (uint32 j = thread; j < wanted - of_stored; j += THREADS) emit(ids, init + of_stored + j, end + j);
#pragma unroll 1
        for (uint32 j = thread; j < local; j += THREADS) emit(ids, init + wanted + j, n - local + j);
#pragma unroll 1
        for (uint32 j = stored + thread; s.scores && j < min(n, s.max_blocks); j += THREADS)
            as<float>(scores() + j * s.scores_block) = minus_infinity();
        if (thread > 0) return;
        char *count = to.counts + list.at.seq * to.counts_seq + list.at.position * to.counts_pos + list.at.head * to.counts_head;
        as<int32>(count) = init + local + wanted;
    }
    __device__ void write_status(uint32 seen) const {
        char *status = s.status + list.at.seq * s.status_seq + list.at.position * s.status_pos + list.at.head * s.status_head;
        as<uint32>(status) = seen | (list.clamped ? CLAMPED : 0);
    }
};

struct TilesShared {
    alignas(16) float sum[MOST_GROUPS][MOST_HEADS];  // sums of a query's channels, as multiples of its unit
    float unit[MOST_HEADS];                          // the unit of a query's integers, times what makes its products exponents of 2
    uint32 exist[WARPS][MOST_STAGES];                 // bit b: block b of the stage's tile exists
    uint32 expected[WARPS];
    uint32 nan;
    alignas(16) Selection list;
};

// The CTA's ring of tiles and the queries' digits lie in dynamic shared memory. Phases: look_ahead() ─ wait_for_previous_kernel() ─
// load_inputs() ─ multiply_tiles(). OWNS_MULTIPROCESSOR: a CTA is alone on its multiprocessor, and has twice the registers.
template <uint32 QUARTETS, uint32 GROUPS, bool OWNS_MULTIPROCESSOR = false> struct AxisTiles : AxisList {
    static constexpr uint32 UNITS = GROUPS ? (GROUPS * 8 + WARP - 1) / WARP : MOST_GROUPS * 8 / WARP;  // units of four channels that a lane has
    static constexpr uint32 COLUMNS = QUARTETS + (QUARTETS + 1) / 2;  // tiles of eight columns: two digits of four heads each, then the third digit of eight heads each
    // Rows of a tile lie four banks apart. For D = 128 the 16-byte units of a row are permuted by the row's number instead.
    static constexpr uint32 GAP = GROUPS == 4 ? 0 : 16;
    static constexpr uint32 PITCH = 4 * QUARTETS;  // products of a block
    static constexpr bool HAS_MASS = false;
    const AxisTileParams &p;
    TilesShared &shared;
    const uint32 slice, row_bytes, range_bytes, stage_bytes;  // slice: this CTA's number among the list's CTAs

    __device__ AxisTiles(const AxisTileParams &p, TilesShared &shared)
        : AxisList(p.select, shared.list), p(p), shared(shared), slice(blockIdx.x - s.by_slices.divide(blockIdx.x) * s.slices),
          row_bytes(dim() + GAP), range_bytes(dim() / 4 + GAP), stage_bytes(BLOCKS * (row_bytes + range_bytes)) {}

    __device__ uint32 dim() const { return GROUPS ? GROUPS * GROUP : p.select.dim; }
    __device__ uint32 groups() const { return GROUPS ? GROUPS : p.select.dim / GROUP; }
    // The number of the CTA's n-th tile.
    __device__ uint32 tile(uint32 n) const { return n * s.slices + slice; }
    // How many tiles the CTA has.
    __device__ uint32 own_tiles() const { return s.by_slices.divide(list.tiles + s.slices - 1 - slice); }

    // The head whose query a warp loads. Few heads go to the warps before the last one: these have no tile of a short list, and the last warp
    // loads the lengths.
    __device__ uint32 own_head() const { return (2 * WARPS - 2 - warp) % WARPS; }
    // A lane has four channels of a group, two channels apart, and four more of a later group where D exceeds 128.
    __device__ int64 query_of(const ListNumber &at) const {
        const uint32 channel = lane / 8 * GROUP + lane / 2 % 4 * 8 + lane % 2;
        return at.seq * s.q_seq + at.position * s.q_pos + (at.head * heads() + own_head()) * s.q_head + channel * s.q_channel;
    }
    __device__ void load_queries(int64 from, uint32 (&x)[4 * UNITS]) const {
#pragma unroll
        for (uint32 n = 0; n < 4 * UNITS; n++) x[n] = 0;
        if (own_head() >= heads()) return;
        const bool is_wide = s.q_type == FLOAT32;
        const int64 step = 2 * s.q_channel;
#pragma unroll
        for (uint32 n = 0; n < 4 * UNITS; n++) {
            if (lane + n / 4 * WARP >= groups() * 8) continue;
            const char *at = s.q + from + (n / 4 * WARP / 8 * GROUP / 2 + n % 4) * step;
            x[n] = is_wide ? as<uint32>(at) : as<uint16>(at);
        }
    }
    // Makes integers of the query's channels, and lays out their digits as lanes read them: [groups, COLUMNS, lanes].
    __device__ void stage_queries(const uint32 (&bits)[4 * UNITS]) const {
        const uint32 head = own_head();
        if (head >= heads()) return;
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
        // 2^exponent is above the largest channel; a float32 holds 2^±(22 − exponent).
        const uint32 biased = max(__reduce_max_sync(FULL_WARP, most) >> 23, 22u);
        const float up = __uint_as_float((275 - biased) << 23), down = __uint_as_float((biased - 21) << 23);
        if (is_nan) shared.nan = 1;
        if (lane == 0) shared.unit[head] = down * (s.scale * LOG2_E);
        const uint32 quartet = head / 4, column = head % 4 * 2;
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
            if (lane % 8 == 0) shared.sum[group][head] = sum;
            uint32 *to = reinterpret_cast<uint32 *>(room + p.queries) + group * COLUMNS * 2 * WARP + unit % 8;
            to[(quartet * WARP + column * 4) * 2] = digits[0];
            to[(quartet * WARP + column * 4 + 4) * 2] = digits[1];
            to[((QUARTETS + quartet / 2) * WARP + (column + quartet % 2) * 4) * 2] = digits[2];
        }
    }

    __device__ uint32 stage_address(uint32 stage) const { return shared_address(room) + (warp * p.stages + stage) * stage_bytes; }

    // Source and destination of a lane's copies of a tile, where D = 128 and no table is looked up. Eight lanes copy a block, in whole lines.
    struct CopyAddresses {
        const char *codes, *range;
        int64 apart;             // bytes from a block to the fourth one after it
        uint32 to[2], of_range;  // to: for even and odd groups of four blocks

        __device__ CopyAddresses known() const { return {pin_in_register(codes), pin_in_register(range), pin_in_register(apart), {pin_in_register(to[0]), pin_in_register(to[1])}, pin_in_register(of_range)}; }
        __device__ void step(const AxisTileParams &p, uint32 blocks, uint32 bytes) {
            codes += blocks * p.axes.row, range += blocks * p.range.row, to[0] += bytes, to[1] += bytes, of_range += bytes;
        }
    };
    __device__ bool has_known_addresses() const { return GROUPS == 4 && !s.place.table; }
    __device__ CopyAddresses copy_addresses(const ListNumber &at, uint32 stage, uint32 first) const {
        const uint32 row = lane / 8, begin = stage_address(stage), to = begin + row * row_bytes, swap = (lane % 8 ^ row) * 16;
        const uint32 of_range = begin + BLOCKS * row_bytes + lane / 2 * range_bytes + (lane % 2 ^ row % 2) * 16;
        return {p.axes.at(at.seq, first + row, at.head) + lane % 8 * 16, p.range.at(at.seq, first + lane / 2, at.head) + lane % 2 * 16,
                4 * p.axes.row, {to + swap, to + 4 * row_bytes + (swap ^ 64)}, of_range};
    }
    __device__ void copy_addressed(uint32 stage, uint32 first, const CopyAddresses &of) const {
        const bool is_whole = first + BLOCKS <= s.place.capacity;
#pragma unroll
        for (uint32 i = 0; i < BLOCKS; i += 4)
            if (is_whole || first + lane / 8 + i < s.place.capacity)
                copy_16(of.to[i / 4 % 2] + i / 8 * 8 * row_bytes, of.codes + i / 4 * of.apart);
        if (is_whole || first + lane / 2 < s.place.capacity) copy_16(of.of_range, of.range);
        if (lane == 0) shared.exist[warp][stage] = 0xffff;
    }
    // Begins to copy the CTA's n-th tile.
    __device__ void copy(const ListNumber &at, uint32 stage, uint32 n) const {
        const uint32 first = tile(n) * BLOCKS;
        if (has_known_addresses()) return copy_addressed(stage, first, copy_addresses(at, stage, first));
        const uint32 begin = stage_address(stage), ranges = begin + BLOCKS * row_bytes;
        const uint32 row = lane / 8, to = begin + row * row_bytes, of_range = ranges + lane / 2 * range_bytes + (lane % 2 ^ lane / 8 % 2) * 16;
        uint32 page, within;
        const bool exists = s.place.find(at.seq, first + lane % BLOCKS, page, within);
        const uint32 mask = __ballot_sync(FULL_WARP, exists) & 0xffff;
        if (lane == 0) shared.exist[warp][stage] = mask;
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

    // Brings a warp's first tiles to the L2 cache where their addresses are known, more tiles than the ring has stages.
    __device__ void prefetch_tiles(const ListNumber &at, uint32 expected) const {
        if (s.place.table) return;
        const Summary &of = lane < BLOCKS ? p.axes : p.range;
#pragma unroll 1
        for (uint32 stage = 0; stage < MOST_STAGES; stage++) {
            const uint32 j = tile(warp + stage * WARPS) * BLOCKS + lane % BLOCKS;
            if (j >= expected) break;
            const char *summary = of.at(at.seq, j, at.head);
            prefetch(summary);
            if (dim() > 128 && lane < BLOCKS) prefetch(summary + 128);
        }
    }
    // Begins to copy the tiles that are expected. The index has room for them, whether the list has them or not.
    __device__ void copy_expected(const ListNumber &at, uint32 expected, CopyAddresses of) const {
        if (lane == 0) shared.expected[warp] = expected;
#pragma unroll 1
        for (uint32 stage = 0; stage < p.stages; stage++) {
            const uint32 n = warp + stage * WARPS, first = tile(n) * BLOCKS;
            if (first < expected && !has_known_addresses()) copy(at, stage, n);
            if (first < expected && has_known_addresses()) copy_addressed(stage, first, of);
            of.step(p, WARPS * s.slices * BLOCKS, stage_bytes);
            end_copies();
        }
    }
    // Copies the tiles that were not expected.
    __device__ void copy_unexpected(uint32 own) const {
        const uint32 expected = shared.expected[warp], last = warp + (p.stages - 1) * WARPS;
        if (warp >= own || tile(min(last, own - 1)) * BLOCKS < expected) return;
#pragma unroll 1
        for (uint32 stage = 0; stage < p.stages; stage++) {
            const uint32 n = warp + stage * WARPS;
            if (n < own && tile(n) * BLOCKS >= expected) copy(list.at, stage, n);
        }
        end_copies();
        wait_copies<0>();
    }

    // A lane's words of a group of a tile, [mean or axis][block], and their scales and minima.
    struct Group {
        uint32 word[4], range[4];
    };
    // Adds the products of group `number` with the heads, as multiples of units. digits, of_q: the addresses of this lane's digits, and of its
    // first head's sum.
    __device__ static void add_group(const Group &group, uint32 number, uint32 digits, uint32 of_q, float (&x)[2][2][QUARTETS]) {
        uint2 b[COLUMNS];
        float sum[QUARTETS];
#pragma unroll
        for (uint32 n = 0; n < COLUMNS; n++) b[n] = load_two(digits + (number * COLUMNS + n) * WARP * 8);
#pragma unroll
        for (uint32 n = 0; n < QUARTETS; n++) sum[n] = __uint_as_float(load_word(of_q + number * MOST_HEADS * 4 + n * 16));
#pragma unroll
        for (uint32 part = 0; part < 2; part++) {
            // Even channels come first, then odd ones.
            uint32 a[4];
            int32 sums[COLUMNS][4] = {};
#pragma unroll
            for (uint32 block = 0; block < 2; block++) {
                const uint32 both = group.word[2 * part + block];
                a[block] = both & 0x0f0f0f0f, a[block + 2] = both >> 4 & 0x0f0f0f0f;
            }
#pragma unroll
            for (uint32 n = 0; n < COLUMNS; n++) multiply_add(sums[n], a, b[n]);
#pragma unroll
            for (uint32 block = 0; block < 2; block++) {
                const uint32 both = group.range[2 * part + block];
                const float scale = widen_float16(both & 0xffff), least = widen_float16(both >> 16);
#pragma unroll
                for (uint32 n = 0; n < QUARTETS; n++) {
                    const uint32 upper = (uint32(sums[n][2 * block]) << 8) + uint32(sums[n][2 * block + 1]);
                    const float of_codes = float(int32((upper << 8) + uint32(sums[QUARTETS + n / 2][2 * block + n % 2])));
                    x[part][block][n] = fmaf(scale, of_codes, fmaf(least, sum[n], x[part][block][n]));
                }
            }
        }
    }
    // Products of a tile with the heads. Lane l gets blocks l / 4 and l / 4 + 8, and head l % 4 of each four.
    __device__ void multiply(uint32 stage, float (&x)[2][2][QUARTETS]) const {
        const uint32 begin = stage_address(stage), codes = begin + lane % BLOCKS * row_bytes;
        const uint32 range = begin + BLOCKS * row_bytes + lane / 4 * range_bytes;
        const uint32 digits = shared_address(room) + p.queries + lane * 8, of_q = shared_address(shared.sum) + lane % 4 * 4;
        if constexpr (GROUPS == 4) {
            // Two groups at a time: all four would take more registers than there are.
#pragma unroll(OWNS_MULTIPROCESSOR ? 2 : 1)
            for (uint32 pair = 0; pair < 4; pair += 2) {
                Group group[2];
#pragma unroll
                for (uint32 n = 0; n < 2; n++) load_rows(codes + ((lane / BLOCKS * 4 ^ lane % 8) * 16 ^ (pair + n) * 16), group[n].word);
#pragma unroll
                for (uint32 m = 0; m < 4; m++) {
                    const uint2 of = load_two(range + m % 2 * 8 * range_bytes + (m / 2 ^ lane / 16) * 16 + pair * 4);
                    group[0].range[m] = of.x, group[1].range[m] = of.y;
                }
#pragma unroll
                for (uint32 n = 0; n < 2; n++) add_group(group[n], pair + n, digits, of_q, x);
            }
        } else {
#pragma unroll 2
            for (uint32 n = 0; n < MOST_GROUPS; n++) {
                if (n >= groups()) break;
                Group group;
                load_rows(codes + lane / BLOCKS * (dim() / 2) + n * 16, group.word);
#pragma unroll
                for (uint32 m = 0; m < 4; m++) group.range[m] = load_word(range + m % 2 * 8 * range_bytes + m / 2 * (dim() / 8) + n * 4);
                add_group(group, n, digits, of_q, x);
            }
        }
    }

    // Addresses that are computed before the wait, of what is loaded after it.
    struct Early {
        ListNumber at;
        uint32 expected;
        int64 query;
        CopyAddresses units;
    };
    __device__ Early look_ahead() const {
        Early early = {};
        early.at = list_number(s.by_slices.divide(blockIdx.x));
        early.expected = expected_blocks(early.at);
        prefetch_tiles(early.at, early.expected);
        early.query = pin_in_register(query_of(early.at));
        if (has_known_addresses()) early.units = copy_addresses(early.at, 0, tile(warp) * BLOCKS).known();
        return early;
    }
    // The thread that knows the list calls expect(). shared.nan was set to 0 before.
    template <typename Expect> __device__ void load_inputs(const Early &early, const Expect &expect) const {
        Lengths given;
        int32 budget;
        if (warp == WARPS - 1) given = Lengths(s, early.at.seq), budget = budget_of(s, early.at.seq);
        uint32 bits[4 * UNITS];
        load_queries(early.query, bits);
        copy_expected(early.at, early.expected, early.units);
        if (thread == THREADS - 1) shared.list.compute(s, early.at, given, budget), expect();
        stage_queries(bits);
        __syncthreads();
    }

    // Hands the products of the CTA's n-th tile to sink.put(n, block, head, product), and the partial of each head to
    // sink.put_sums(tile, quartet, most, sum); a lane has that of head lane % 4 of the quartet. A sink that HAS_MASS also gets
    // put_mass(n, block, head, mass), with shorter axes.
    template <typename Sink> __device__ uint32 finish_tile(uint32 mask, uint32 n, const float (&x)[2][2][QUARTETS], const Sink &sink) const {
        const uint32 first = tile(n) * BLOCKS;
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
                if (h >= heads()) product[i] = 0.0f;  // the head has weight 0
                sink.put(n, block, h, product[i]);
                if constexpr (Sink::HAS_MASS) {
                    const float shorter = MASS_LENGTH * along;
                    const float mass = fmaf(unit, x[0][i][m], shorter + log2_of(1.0f + exp2_fast(-2.0f * shorter)));
                    sink.put_mass(n, block, h, exists && counts && fabsf(mass) < -minus_infinity() ? mass : minus_infinity());
                }
            }
            reduce_tile(m, tile(n), product, sink);
        }
        return saw;
    }
    // Lanes that are four apart have the same head.
    template <typename Sink> __device__ void reduce_tile(uint32 quartet, uint32 number, const float (&product)[2], const Sink &sink) const {
        float most = fmaxf(product[0], product[1]), sum = 0.0f;
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
        if (most > minus_infinity()) sum = exp2_fast(product[0] - most) + exp2_fast(product[1] - most);
#pragma unroll
        for (uint32 bit = 4; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        sink.put_sums(number, quartet, most, sum);
    }

    __device__ void wait_for_stage() const {
        if (p.stages == 1)
            wait_copies<0>();
        else if (p.stages == 2)
            wait_copies<1>();
        else
            wait_copies<MOST_STAGES - 1>();
        __syncwarp();
    }
    // Multiplies the CTA's tiles and hands all products to the sink. Returns the status bits that the warp saw.
    template <typename Sink> __device__ uint32 multiply_tiles(const Sink &sink) const {
        const uint32 own = own_tiles();
        uint32 saw = 0, stage = 0;
        copy_unexpected(own);
#pragma unroll 1
        for (uint32 n = warp; n < own; n += WARPS) {
            wait_for_stage();
            float x[2][2][QUARTETS] = {};  // [part][block][quartet]
            const uint32 exist = shared.exist[warp][stage];
            multiply(stage, x);
            __syncwarp();  // all lanes have read the stage that the next copies overwrite
            const uint32 next = n + p.stages * WARPS;
            if (next < own) copy(list.at, stage, next);
            end_copies();
            saw |= finish_tile(exist, n, x, sink);
            stage = stage + 1 == p.stages ? 0 : stage + 1;
        }
        wait_copies<0>();
        if (list.n > list.stored) saw |= NO_SUMMARY;
        if (shared.nan && list.is_there) saw |= SAW_NAN;
        return __reduce_or_sync(FULL_WARP, saw);
    }
};

// The weights of heads, from the partials of their tiles: [heads / TOGETHER, tiles, TOGETHER heads], where groups of heads lie `pitch` tiles
// apart. run_sums: [runs of tiles, heads]
template <uint32 QUARTETS, uint32 TOGETHER> struct HeadWeights {
    static constexpr uint32 PITCH = 4 * QUARTETS, OWN = TILES_AT_ONCE / WARP;
    float2 *const head_weight;  // in shared memory: the largest product, and the reciprocal of the sum
    float2 *const run_sums;   // in shared memory
    const float2 *const partials;
    const uint32 pitch, heads, warp, lane;

    __device__ HeadWeights(float2 *head_weight, float2 *run_sums, const float2 *partials, uint32 pitch, uint32 heads)
        : head_weight(head_weight), run_sums(run_sums), partials(partials), pitch(pitch), heads(heads), warp(threadIdx.x / WARP), lane(threadIdx.x % WARP) {}

    // Called early.
    __device__ void open() const {
        for (uint32 h = heads + threadIdx.x; h < PITCH; h += THREADS) head_weight[h] = make_float2(0.0f, 0.0f);
    }
    // A lane's first partial of a run of tiles and a head, and the number of tiles from there to the end.
    struct Task {
        uint32 first, left;
    };
    __device__ Task task(uint32 number, uint32 tiles) const {
        const uint32 h = number % PITCH, begin = number / PITCH * TILES_AT_ONCE + lane;
        return {TOGETHER * (h / TOGETHER * pitch + begin) + h % TOGETHER, h < heads && begin < tiles ? tiles - begin : 0};
    }
    // COUNT: OWN, or the most partials that a lane has.
    template <uint32 COUNT> __device__ void load(const Task &task, float2 (&x)[COUNT]) const {
        const float2 *const of = partials + task.first;
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) {
            x[n] = make_float2(minus_infinity(), 0.0f);
            if (n * WARP < task.left) x[n] = of[TOGETHER * n * WARP];
        }
    }
    // Joins the partials, a run of a head by each warp, in an order that follows from the number of tiles alone. x: the partials of task `warp`
    template <uint32 COUNT> __device__ void join(uint32 tiles, float2 (&x)[COUNT]) const {
        join_tiles(tiles, x);
        __syncthreads();
        join_runs(tiles);
    }
    // Each warp joins runs by itself; a barrier follows.
    template <uint32 COUNT> __device__ void join_tiles(uint32 tiles, float2 (&x)[COUNT]) const {
        const uint32 runs = runs_of(tiles);
#pragma unroll 1
        for (uint32 number = warp; number < runs * PITCH;) {
            const uint32 h = number % PITCH;
            if (h < heads) {
                const auto [most, sum] = join_lanes(x);
                if (lane == 0) runs > 1 ? run_sums[number] = make_float2(most, sum) : head_weight[h] = make_float2(most, weight(sum));
            }
            number += WARPS;
            if (number < runs * PITCH) load(task(number, tiles), x);
        }
    }
    // The largest product and the sum of all partials of the warp's lanes; the first lane has the sum.
    template <uint32 COUNT> __device__ float2 join_lanes(const float2 (&x)[COUNT]) const {
        float most = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) most = fmaxf(most, x[n].x);
        most = largest_of_warp(most);
#pragma unroll
        for (uint32 n = 0; n < COUNT; n++) sum = fmaf(x[n].y, exp2_fast(x[n].x - most), sum);
        return make_float2(most, sum_of_lanes(sum, WARP));
    }
    // Those of task `number`, a head's of tiles that are one run.
    template <uint32 COUNT> __device__ float2 join_run(uint32 number, uint32 tiles) const {
        float2 x[COUNT];
        load(task(number, tiles), x);
        return join_lanes(x);
    }
    __device__ void join_runs(uint32 tiles) const {
        const uint32 runs = runs_of(tiles);
        if (runs <= 1) return;
        if (warp < heads) {
            const float2 x = lane < runs ? run_sums[lane * PITCH + warp] : make_float2(minus_infinity(), 0.0f);
            const float most = largest_of_warp(x.x), sum = sum_of_lanes(__fmul_rn(x.y, exp2_fast(x.x - most)), runs);
            if (lane == 0) head_weight[warp] = make_float2(most, weight(sum));
        }
        __syncthreads();
    }
    __device__ static uint32 runs_of(uint32 tiles) { return (tiles + TILES_AT_ONCE - 1) / TILES_AT_ONCE; }
    // The largest of numbers or −inf, but at least LOWEST: −inf − −inf would be NaN.
    __device__ static float largest_of_warp(float x) {
        // A key that sorts as x does. The function is its own inverse.
        const auto key = [](int32 bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
        return fmaxf(__int_as_float(key(__reduce_max_sync(FULL_WARP, key(__float_as_int(x))))), LOWEST);
    }
    // The first lane gets the sum of all lanes; lanes from `lanes` on have 0.
    __device__ static float sum_of_lanes(float x, uint32 lanes) {
        for (uint32 bit = 1; bit < lanes; bit *= 2) x += __shfl_xor_sync(FULL_WARP, x, bit);
        return x;
    }
    static constexpr float LOWEST = -3.402823466e38f;
    __device__ static float weight(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }
    // The score of a block, from its products with the heads. A NaN in a query reaches all products with it, each of which became −inf.
    __device__ float score(const float4 *products) const {
        float score = 0.0f, least = 0.0f;
#pragma unroll
        for (uint32 m = 0; m < QUARTETS; m++) {
            const float4 four = products[m];
            const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (uint32 h = 0; h < 4; h++) {
                const float2 of = head_weight[4 * m + h];
                least = fminf(least, x[h]), score = fmaf(exp2_fast(x[h] - of.x), of.y, score);
            }
        }
        return least > minus_infinity() ? score : minus_infinity();
    }
};
