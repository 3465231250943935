// Attention for up to 64 rows to keys and values in INT4 of 128 channels (variant int4_verify128), by matrix products of warpgroups: what
// attention/verify128.cuh is to decode128.cuh. Codes are read and widened once for all rows.
//
//   copies    two warpgroups, of keys and of values ── codes of a tile a warp, requested three stages ahead ── (c − 7.5)·s / 16 as float16, which is
//             exact ── a stage of the ring
//   products  two warpgroups ── S = T · Kᵀ with turned queries T, and Q · means of the tiles' blocks ── running softmax ── O += P · V
//   join      that of attention/verify128_join.cuh
//
// decode128.cuh says what a code stands for, and what turned queries are. O is turned back once all coded tokens are in it. Then the stages that
// have tokens of 16 bits come by the same ring; in the first round these tokens do not count, in the second one coded tokens do not.
//
//   Bytes of a stage: 8.3 KiB, some 430 cycles of a multiprocessor's share of the memory's bandwidth. Products of a stage: 512 cycles and 16.
//
// A lane widens 64 channels of a token. Of eight codes it takes two at a time that are four apart, so that eight channels lie in the order
// 0 4 1 5 2 6 3 7, in keys, values, turned queries and O.
#pragma once

#include "attention/verify128.cuh"
#include "attention_int4/coded.cuh"

constexpr uint32 COPY_GROUPS = 2, COPY_WARPS = COPY_GROUPS * STAGE_TILES, CODED_THREADS = COMPUTE_THREADS + COPY_GROUPS * GROUP_THREADS;
// Registers of a thread that copies: four warpgroups have 128 a thread to share out.
template <typename Rows> constexpr uint32 CODED_COPY_REGISTERS = (512 - GROUPS * Rows::REGISTERS) / COPY_GROUPS;
constexpr int32 LOG_WEIGHT_UNIT = 15;
constexpr float CODED_UNIT = 16.0f;  // keys and values in shared memory have to be multiplied by it
// Shared memory, in the place of verify128's ring: a ring of stages, each of which has keys, values and means of the blocks of its tiles;
// turned queries; codes of tiles that were requested.
constexpr uint32 CODED_STAGES = 3, REQUESTED = 4;
constexpr uint32 MEANS_OFFSET = STAGE_BYTES, MEANS_BYTES = 8 * SLAB_WIDTH, CODED_STAGE_BYTES = MEANS_OFFSET + SLABS * MEANS_BYTES;
constexpr uint32 TURNED_OFFSET = CODED_STAGES * CODED_STAGE_BYTES, CODES_OFFSET = TURNED_OFFSET + VERIFY_ROWS * VERIFY_CHANNELS * 2;
// Stages whose tokens of 16 bits are noted one by one, or together with their neighbours.
constexpr uint32 NOTED = 512;

// A tile as it lies in memory.
struct alignas(16) RequestedTile {
    static constexpr uint32 PITCH = 64;
    char codes[COPY_GROUPS][TILE * PITCH], mean[VERIFY_CHANNELS * 2];  // codes of keys and of values
    uint32 scale[COPY_GROUPS][TILE], scale_byte[COPY_GROUPS][TILE];    // words that have the token's scale in a byte, and which
    int32 position[TILE];
    uint32 is_whole, unused[11];

    // Where 16 bytes of a token's codes lie: eight tokens hit different banks.
    __device__ static uint32 code_at(uint32 token, uint32 chunk) { return token * PITCH + (chunk ^ token / 2 % 4) * 16; }
};
static_assert(CODES_OFFSET + REQUESTED * STAGE_TILES * sizeof(RequestedTile) <= QUERIES_OFFSET);
static_assert(TURNED_OFFSET % 1024 == 0 && CODED_STAGE_BYTES % 1024 == 0);

enum StageKind : uint32 { NO_STAGE, CODED_STAGE, EXACT_STAGE };

struct CodedShared {
    uint32 kind[CODED_STAGES];
    float unit[VERIFY_ROWS];     // of the row's turned query
    uint32 exact[NOTED / WARP];  // bit n: of the n-th stages, or groups of stages, some have tokens of 16 bits
};

// A warp that copies one tile, 16 tokens, of every stage: its keys, or its values. Each lane finds one of 32 tiles.
template <typename Rows>
struct CodedCopies : VerifyJob {
    const Int4Params &coded;
    CodedShared &c;
    uint32 of_values;  // 1: the warp copies values
    int32 end_of_coded, seen_begin, seen_end;
    uint32 first, count;  // the warp's first tile, and its tiles; the CTA may have one stage more
    uint32 log_noted;     // stages that are noted together
    // The tile that the lane found: where its first token is, −1 for none; its keys or values; where it is coded scales, and the mean of its block or NULL.
    int32 position;
    bool is_coded;
    const char *data, *scale, *mean;
    uint32 step;           // stages of the ring that were filled
    int64 offset_in_tile;  // of the codes that the lane copies first

    __device__ CodedCopies(const VerifyJob &job, const Int4Params &coded, CodedShared &c, uint32 of_values)
        : VerifyJob(job), coded(coded), c(c), of_values(of_values), position(-1), is_coded(false), data(nullptr), scale(nullptr), mean(nullptr), step(0) {
        const bool is_one_of_chain = p.own_lists && Rows::SEEN_BY_ALL, has_rows = p.own_lists || reach.queries == int32(p.positions);
        seen_end = is_one_of_chain ? reach.end : has_rows ? reach.length - reach.queries + Rows::SEEN_BY_ALL : 0;
        seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
        Rows::Seen::find(p, item, reach);
        end_of_coded = coded_end(coded, as<int32>(coded.coded_lens.at(item.seq)), reach.length);
        first = cta_share.begin + rank * STAGE_TILES + warp;
        count = first < cta_share.end ? p.ctas.divide((cta_share.end - first - 1) / STAGE_TILES) + 1 : 0;
        for (log_noted = 0; stages() >> log_noted > NOTED;) log_noted++;
        offset_in_tile = lane / 4 * codes().step[1] + lane % 4 * 16;
    }
    __device__ const View<4> &codes() const { return of_values ? coded.v : coded.k; }
    __device__ const View<3> &scales() const { return of_values ? coded.v_scale : coded.k_scale; }
    __device__ const View<4> &exact() const { return of_values ? p.v : p.k; }

    // The lane finds the tile of stage `stage` + lane.
    __device__ void find(uint32 stage) {
        position = -1;
        is_coded = false;
        const uint32 mine = stage + lane;
        if (mine >= count) return;
        const uint32 x = (first + mine * STAGE_TILES * ctas) * TILE;
        const Listed entry = listed(p, item, x);
        int32 at;
        if (p.ids.data) {
            const uint32 e = p.block.divide(x);
            if (e >= cta_share.entries || entry.id < 0 || entry.id == entry.previous || int64(entry.id) * p.block.value >= reach.end) return;
            at = entry.id * int32(p.block.value) + int32(x - e * p.block.value);
        } else {
            at = (reach.begin & ~int32(TILE - 1)) + int32(x);
        }
        if (at >= reach.end || at + int32(TILE) <= reach.begin) return;
        const bool in_slots = p.slots.data;
        const bool has_codes = in_slots ? uint32(entry.slot) >= p.pages : ::is_coded(coded, at, end_of_coded);
        const View<2> &table = has_codes ? coded.table : p.table;
        int32 page = item.seq, row = at;
        if (in_slots || table.data) {
            const Divisor &size = has_codes ? coded.page : p.page;
            const uint32 number = size.divide(at);
            row = at - number * size.value;
            page = in_slots ? entry.slot - (has_codes ? p.pages : 0) : as<int32>(table.at(item.seq, number));
        }
        if (uint32(page) >= (has_codes ? coded.pages : p.pages)) return;
        position = at;
        is_coded = has_codes;
        data = (has_codes ? codes() : exact()).at(page, row, item.head);
        if (!has_codes) return;
        scale = scales().at(page, row, item.head);
        mean = of_values ? nullptr : find_mean(page, coded.block.divide(at));
    }
    __device__ const char *find_mean(int32 page, uint32 block) const {
        uint32 row = block;
        if (p.slots.data) {
            row = 0;
        } else {
            const uint32 number = coded.mean_table.data ? coded.mean_rows.divide(block) : 0;
            row = block - number * coded.mean_rows.value;
            if (number >= coded.most_mean_pages || row >= coded.mean_rows.value) return nullptr;
            page = coded.mean_table.data ? as<int32>(coded.mean_table.at(item.seq, number)) : item.seq;
        }
        return uint32(page) < coded.mean_pages ? coded.means.at(page, row, item.head) : nullptr;
    }

    __device__ static const char *of_lane(const char *address, uint32 lane) {
        return reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, reinterpret_cast<uint64>(address), lane));
    }
    __device__ bool sees(int32 tile, uint32 token) const {
        return is_reached(reach, tile, token) && Rows::Seen::has(p, tile + int32(token) - (reach.length - reach.queries));
    }
    __device__ bool is_whole(int32 tile) const { return tile >= max(seen_begin, 0) && tile + int32(TILE) <= seen_end; }
    __device__ RequestedTile &requested(uint32 stage) const {
        return reinterpret_cast<RequestedTile *>(shared + CODES_OFFSET)[warp * REQUESTED + stage % REQUESTED];
    }
    // Requests the codes of stage `stage`, and notes whether its tile is of 16 bits; in any case it ends a group of copies.
    __device__ void request(uint32 stage) {
        if (stage < count) {
            if (stage % WARP == 0) find(stage);
            const uint32 from = stage % WARP;
            const int32 at = __shfl_sync(FULL_WARP, position, from);
            const bool has_codes = __shfl_sync(FULL_WARP, is_coded, from);
            if (at >= 0 && !has_codes && lane == 0) atomicOr(&c.exact[(stage >> log_noted) / WARP], 1u << (stage >> log_noted) % WARP);
            request_codes(requested(stage), has_codes ? at : -1, from);
        } else if (stage < stages()) {
            request_codes(requested(stage), -1, 0);
        }
        end_copies();
    }
    __device__ void request_codes(RequestedTile &to, int32 at, uint32 from) {
        const char *const from_codes = of_lane(data, from) + offset_in_tile, *const from_scale = of_lane(scale, from), *const from_mean = of_lane(mean, from);
        if (at >= 0) {
            const uint32 to_codes = shared_address(to.codes[of_values]) + RequestedTile::code_at(lane / 4, lane % 4);
            copy_16(to_codes, from_codes);
            copy_16(to_codes + 8 * RequestedTile::PITCH, from_codes + 8 * codes().step[1]);
        }
        if (lane < TILE) {
            // A token that no row sees has the scale 0, and a tile without a mean the mean 0.
            const bool is_there = sees(at, lane), has_mean = at >= 0 && from_mean;
            const char *const word = at >= 0 ? from_scale + lane * scales().step[1] : p.seq_lens.data;
            const uint32 byte = uint32(uint64(word)) % 4;
            copy_4(shared_address(&to.scale[of_values][lane]), word - byte, is_there);
            to.scale_byte[of_values][lane] = byte;
            if (!of_values) {
                copy_16(shared_address(to.mean) + lane * 16, has_mean ? from_mean + lane * 16 : p.q.data, has_mean);
                to.position[lane] = is_there ? at + int32(lane) : -1;
                to.is_whole = at >= 0 && is_whole(at);
            }
        }
    }

    // The next stage of the ring, once it is free.
    __device__ uint32 take_stage(uint32 kind) {
        const uint32 stage = step % CODED_STAGES, uses = step / CODED_STAGES;
        step++;
        if (uses) s.empty[stage].wait(uses - 1);
        if (!of_values && warp == 0 && lane == 0) c.kind[stage] = kind;
        return stage;
    }
    // Those who wait for it order what is written before their products.
    __device__ void give_stage(uint32 stage) const { arrive(s.full[stage]); }
    // Writes a tile that was requested into a stage of the ring.
    __device__ void widen(const RequestedTile &from, uint32 stage) const {
        const uint32 token = lane % TILE, slab = lane / TILE, row = warp * TILE + token, to = shared_address(shared) + stage * CODED_STAGE_BYTES;
        uint32 scale;
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.rn.f16x2.e4m3x2 %0, low;\n\t}"
            : "=r"(scale) : "r"(from.scale[of_values][token] >> from.scale_byte[of_values][token] * 8));
        // Twice in a word, times 32: codes are divided by 512.
        scale = multiply_halves(__byte_perm(scale, 0, 0x1010), 0x50005000);
        widen_codes_of(from.codes[of_values], token, slab, scale, to + of_values * VALUES_OFFSET + slab * SLAB_BYTES, row);
        if (of_values) return;
        if (lane < TILE) {
            uint32 x[4];
            load_four_words(shared_address(from.mean) + lane * 16, x);
            store_four_words(to + MEANS_OFFSET + lane / 8 * MEANS_BYTES + place_in_slab(warp, lane % 8), x);
            s.position[stage][row] = from.position[lane];
        }
        if (lane == 0) s.is_whole[stage][warp] = from.is_whole;
    }
    __device__ static uint32 multiply_halves(uint32 a, uint32 b) {
        uint32 x;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
        return x;
    }
    __device__ static void store_four_words(uint32 to, const uint32 (&x)[4]) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
    // 64 channels of a token. Codes are subnormal numbers c · code_unit(n): c / 512 − 7.5 / 512 is exact, and so is that times the scale.
    __device__ static void widen_codes_of(const char *from, uint32 token, uint32 slab, uint32 scale, uint32 to, uint32 row) {
#pragma unroll
        for (uint32 half = 0; half < 2; half++) {
            uint32 codes[4];
            load_four_words(shared_address(from) + RequestedTile::code_at(token, slab * 2 + half), codes);
#pragma unroll
            for (uint32 i = 0; i < 4; i++) {
                uint32 x[4];
#pragma unroll
                for (uint32 n = 0; n < 4; n++) {
                    constexpr uint32 OFFSET = 0xa380a380;  // −7.5 / 512
                    const uint32 unit = n % 2 ? 0x68006800 : 0x78007800;  // 2^11 and 2^15: 1 / (512 · code_unit(n))
                    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x[n]) : "r"(::widen_codes(codes[i], n)), "r"(unit), "r"(OFFSET));
                    x[n] = multiply_halves(x[n], scale);
                }
                store_four_words(to + place_in_slab(row, half * 4 + i), x);
            }
        }
    }
    // Copies the tile of a stage if it is of 16 bits.
    __device__ void copy_exact(uint32 tile, uint32 stage) {
        constexpr uint32 CHUNKS = VERIFY_CHANNELS * 2 / 16;
        const uint32 from = tile % WARP, chunk = lane % CHUNKS;
        const bool is_there = tile < count && !__shfl_sync(FULL_WARP, is_coded, from);
        const int32 at = is_there ? __shfl_sync(FULL_WARP, position, from) : -1;
        const char *const from_data = of_lane(data, from) + chunk * 16;
        const uint32 to = shared_address(shared) + stage * CODED_STAGE_BYTES + of_values * VALUES_OFFSET + chunk / 8 * SLAB_BYTES;
        if (!of_values && lane == 0) s.is_whole[stage][warp] = at >= 0 && is_whole(at);
#pragma unroll 4
        for (uint32 n = 0; n < TILE / 2; n++) {
            const uint32 token = n * 2 + lane / CHUNKS, row = warp * TILE + token;
            const bool is_seen = sees(at, token);
            copy_16(to + place_in_slab(row, chunk % 8), is_seen ? from_data + token * exact().step[1] : p.q.data, is_seen);
            if (!of_values && chunk == 0) s.position[stage][row] = is_seen ? at + int32(token) : -1;
        }
    }
    // How many stages there are depends on the share alone, and on what all warps have noted.
    __device__ void run() {
        const uint32 all = stages();
#pragma unroll 1
        for (uint32 n = 0; n + 1 < REQUESTED; n++) request(n);
#pragma unroll 1
        for (uint32 n = 0; n < all; n++) {
            request(n + REQUESTED - 1);
            wait_copies<REQUESTED - 1>();
            __syncwarp();
            const uint32 stage = take_stage(CODED_STAGE);
            widen(requested(n), stage);
            give_stage(stage);
        }
        sync_some(3, COPY_GROUPS * GROUP_THREADS);  // all warps have noted
        uint32 found = ~0u;                         // the 32 stages whose tiles are found
#pragma unroll 1
        for (uint32 n = 0; n < all; n++) {
            const uint32 note = n >> log_noted;
            if (!(c.exact[note / WARP] >> note % WARP & 1)) continue;
            if (found != n / WARP) find(n & ~(WARP - 1));
            found = n / WARP;
            const uint32 stage = take_stage(EXACT_STAGE);
            copy_exact(n, stage);
            end_copies();
            wait_copies<0>();
            give_stage(stage);
        }
#pragma unroll 1
        for (uint32 n = 0; n < GROUPS; n++) give_stage(take_stage(NO_STAGE));
    }
};

// A warpgroup that computes every second stage of the CTA.
template <typename Type, bool IS_BFLOAT16, typename Rows>
struct CodedProducts : VerifyProducts<Type, IS_BFLOAT16, Rows, LOG_WEIGHT_UNIT> {
    using Base = VerifyProducts<Type, IS_BFLOAT16, Rows, LOG_WEIGHT_UNIT>;
    using Base::shared, Base::s, Base::p, Base::item, Base::lane, Base::warp, Base::group, Base::acc;

    __device__ uint32 at(uint32 offset) const { return shared_address(shared) + offset; }

    // Both warpgroups turn the queries, a row a warp, where they have arrived. Rows that do not exist are zeros.
    __device__ void turn_queries(const Int4Params &coded, CodedShared &c) const {
        float w[4];
#pragma unroll
        for (uint32 n = 0; n < 4; n++) w[n] = weight_of_channel(coded, item.head, lane * 4 + n);
        const uint32 rows = rows_of(p, item);
#pragma unroll 1
        for (uint32 row = group * 4 + warp; row < VERIFY_ROWS; row += GROUPS * 4) {
            char *const to = shared + TURNED_OFFSET + lane / 16 * SLAB_BYTES + place_in_slab(row, lane % 16 / 2);
            if (row >= rows) {
                as<uint2>(to + lane % 2 * 8) = uint2{0, 0};
                if (lane == 0) c.unit[row] = 0.0f;
                continue;
            }
            const uint2 words = as<uint2>(shared + QUERIES_OFFSET + lane / 16 * SLAB_BYTES + place_in_slab(row, lane % 16 / 2) + lane % 2 * 8);
            float x[4];
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const uint32 word = n / 2 ? words.y : words.x, bits = n % 2 ? word >> 16 : word & 0xffff;
                x[n] = (IS_BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits)) * w[n];
            }
            TurnedQueries::turn_row(x, lane);
            const float unit = __uint_as_float(__float_as_uint(fmaxf(TurnedQueries::top_of(x), 0x1p-100f)) & 0x7f800000), inverse = 1.0f / unit;
#pragma unroll
            for (uint32 n = 0; n < 4; n++) as<uint16>(to + lane % 2 * 2 + n * 4) = narrow_float16(x[n] * inverse);
            if (lane == 0) c.unit[row] = unit * CODED_UNIT;
        }
        fence_copies();
        sync_some(1, COMPUTE_THREADS);
    }
    // Scores of coded tokens: products of turned queries, and those of queries with the means of the tiles' blocks.
    __device__ void multiply_coded(float (&c)[32], uint32 stage, const float (&unit)[2]) const {
        const uint64 queries = operand(at(QUERIES_OFFSET)), means = operand(at(stage * CODED_STAGE_BYTES + MEANS_OFFSET));
        float mean[4] = {};
        begin_products(mean);
#pragma unroll
        for (uint32 n = 0; n < SLABS; n++) {
#pragma unroll
            for (uint32 k = 0; k < 4; k++)
                multiply<IS_BFLOAT16>(mean, queries + (n * SLAB_BYTES >> 4) + k * ALONG_SLAB, means + (n * MEANS_BYTES >> 4) + k * ALONG_SLAB);
        }
        end_group();
        Base::template multiply_keys<false>(c, at(TURNED_OFFSET), at(stage * CODED_STAGE_BYTES));
        wait_products<0>(mean);
#pragma unroll
        for (uint32 tile = 0; tile < STAGE_TILES; tile++) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const float of_tile = __shfl_sync(FULL_WARP, mean[i * 2 + tile % 2], (lane & ~3) + tile / 2);
#pragma unroll
                for (uint32 n = tile * 8 + i * 2; n < tile * 8 + 8; n += 4) {
                    c[n] = fmaf(c[n], unit[i], of_tile);
                    c[n + 1] = fmaf(c[n + 1], unit[i], of_tile);
                }
            }
        }
    }
    // Turns the sums of coded values back, and into the order of channels of others.
    __device__ void turn_acc() {
        turn_row<0>();
        turn_row<1>();
    }
    template <uint32 I>
    __device__ void turn_row() {
        // Bits of x's index and of the lane: of channels, 6 5 4 3 2 and 1 0; at the end 6 5 4 3 0 and 2 1.
        float x[32];
#pragma unroll
        for (uint32 n = 0; n < 32; n++) x[n] = acc[n / 2 * 4 + I * 2 + n % 2];
#pragma unroll
        for (uint32 step = 1; step < 32; step *= 2) butterflies(x, step);
        exchange<1, 2>(x, lane);
        butterflies(x, 1);
        exchange<1, 1>(x, lane);
        butterflies(x, 1);
#pragma unroll
        for (uint32 n = 0; n < 32; n++) acc[n / 2 * 4 + I * 2 + n % 2] = x[n] * (HADAMARD_128 * CODED_UNIT);
    }
    __device__ void run(const Int4Params &coded, CodedShared &shared_words) {
        this->await_queries();
        turn_queries(coded, shared_words);
        this->clear();
        const float unit[2] = {shared_words.unit[this->row(0)], shared_words.unit[this->row(1)]};
        bool is_turned = true;
        uint32 stage = group, turn = 0;
#pragma unroll 1
        while (true) {
            const uint32 to = at(stage * CODED_STAGE_BYTES);
            s.full[stage].wait(turn);
            fence_copies();
            const uint32 kind = shared_words.kind[stage];
            if (kind != CODED_STAGE && !is_turned) {
                turn_acc();
                is_turned = true;
            }
            if (kind == NO_STAGE) break;
            float c[32];
            const bool is_coded = kind == CODED_STAGE;
            if (is_coded) is_turned = false, multiply_coded(c, stage, unit);
            else Base::template multiply_keys<IS_BFLOAT16>(c, at(QUERIES_OFFSET), to);
            float keep[2];
            if (this->raise_maxima(c, stage, keep)) this->scale_sums(keep);
            this->weigh_scores(c, keep);
            if (is_coded) this->template add_values<Float16, false>(c, to + VALUES_OFFSET);
            else this->template add_values<Type, IS_BFLOAT16>(c, to + VALUES_OFFSET);
            this->arrive(s.empty[stage]);
            stage += GROUPS;
            if (stage >= CODED_STAGES) stage -= CODED_STAGES, turn++;
        }
        this->store_sums();
    }
};

template <typename Type, bool IS_BFLOAT16, typename Rows>
__device__ inline void attention_int4_verify128(const Int4Params &coded) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ VerifyShared s;
    __shared__ CodedShared c;
    __shared__ uint32 words[WARP];
    const AttentionParams &p = coded.to;
    if (threadIdx.x < NOTED / WARP) c.exact[threadIdx.x] = 0;
    const auto [rank, ctas] = begin_verify(coded, p, s, words, COPY_WARPS);
    const CtaShare &cta_share = s.cta_share;
    const WorkItem item = work_item_of(p, cta_share.item);
    const Reach reach = Rows::reach_of(p, item, Reach::of(p, item, cta_share.length, cta_share.queries));
    const VerifyJob job{p, cta_share, item, reach, s, shared, shared + RECEIVED_OFFSET, threadIdx.x % WARP, threadIdx.x / WARP % 4, rank, ctas};
    // Found anew where it is needed, and in no register between.
    const auto group = [] { return pin_in_register(threadIdx.x) / GROUP_THREADS; };
    if (group() >= GROUPS) {
        give_registers<CODED_COPY_REGISTERS<Rows>>();
        CodedCopies<Rows> copies(job, coded, c, group() - GROUPS);
        cluster_started();
        copies.run();
        if (!copies.of_values && job.warp == 0) {
            if (cta_share.chunks > 1) job.chunk_counted();
            clear_counters(p, job.lane == 0 ? arrive_at_end(p) : 0);
        }
    } else {
        take_registers<Rows::REGISTERS>();
        CodedProducts<Type, IS_BFLOAT16, Rows> products{{job, group(), Rows(job)}};
        cluster_started();
        products.request_queries();
        products.run(coded, c);
        VerifyJoin{job, threadIdx.x}.template join<false>();
    }
}
