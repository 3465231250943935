// The form of decode128.cuh for up to eight rows: tokens are the 16 rows of the tensor cores' products, query rows their 8 columns (mma.cuh).
//
// Each warp copies the queries to shared memory of its own. A stage's keys and values are copies of two groups, so that a warp multiplies
// keys while values are on their way.
#pragma once

#include "attention/decode128_partials.cuh"

// How the warps of a CTA join, then the CTAs of a work item. Each warp joins one slice of the channels, of all rows: 16 of them, or of 256 channels 32; of 64
// the last four warps have none. A word is two rows of one channel; a lane has WORDS of them.
template <uint32 ROWS, uint32 RING, uint32 CHANNELS = 128>
struct Rows8Join {
    static constexpr bool BY_ROW = false;  // a lane's channels are 32 apart
    static constexpr uint32 LANE_CHANNELS = CHANNELS / WARP;
    static constexpr uint32 SLICE = CHANNELS > 128 ? 32 : 16, SLICES = CHANNELS / SLICE, ROW_PAIRS = ROWS / 2, WORDS = SLICE * ROW_PAIRS / WARP;
    static constexpr uint32 STATES = 8;                           // states that are joined at once: of warps, or of CTAs
    static constexpr uint32 LANE_WEIGHTS = ROWS * STATES / WARP;  // (state, row) whose weight one lane computes
    static_assert(STATES == WARPS && SLICES <= WARPS && CHANNELS * ROWS * sizeof(float) <= RING && RING % 16 == 0);
    // Weights of the states that are being joined, by which a warp's lanes tell each other.
    struct Weights {
        float take[ROWS][STATES], l[ROWS][STATES], keep[ROWS];
    };
    struct alignas(16) Shared {
        float m[ROWS][WARPS], l[ROWS][WARPS];
        Weights weights[WARPS];
    };
    // One CTA's slice in scratch, [work items][SLICES][ctas].
    struct Stored {
        float2 acc[SLICE][ROW_PAIRS];
        float m[ROWS], l[ROWS];
    };
    static constexpr uint32 M = SLICE * ROW_PAIRS * sizeof(float2), L = M + ROWS * sizeof(float);

    const AttentionParams &p;
    Shared &shared;
    float2 *acc;        // [channels][ROW_PAIRS] of each warp, in the place of its ring
    uint32 ctas, rank;  // CTAs of the work item, and this one's place among them
    uint32 lane, warp, row_pair;
    char *stored, *mine;  // this slice of all CTAs; the lane's words of it in this CTA's slice
    uint32 *counter;      // CTAs that have stored the slice
    float2 word[WORDS], l;
    float m[LANE_WEIGHTS];  // of the rows whose weights the lane computes
    // What the lane writes in the end, computed early because its address takes long.
    bool has_row;
    uint32 row;  // among the rows that read the list
    RowPlace row_place;
    char *out;

    __device__ Rows8Join(const AttentionParams &p, const WorkItem &item, Shared &shared, char *tiles, uint32 ctas, uint32 rank, uint32 number)
        : p(p), shared(shared), acc(reinterpret_cast<float2 *>(tiles)), ctas(ctas), rank(rank), lane(threadIdx.x % WARP),
          warp(threadIdx.x / WARP), row_pair(lane % ROW_PAIRS) {
        const uint32 slice = number * SLICES + warp;
        stored = pin_in_register(p.scratch + uint64(slice * ctas) * uint32(sizeof(Stored)));
        mine = pin_in_register(stored + rank * uint32(sizeof(Stored)) + lane * uint32(sizeof(float2)));
        counter = pin_in_register(p.counters + slice);
        has_row = pin_in_register(uint32(written_row() < rows_of(p, item)));
        row = first_row(p, item) + (has_row ? written_row() : 0);
        const auto [position, head] = place_of_row(p, item, row);
        row_place = {pin_in_register(position), pin_in_register(head)};
        out = pin_in_register(p.out.at(item.seq, position, head, channel(0)));
    }

    // The row that the lane writes.
    __device__ uint32 written_row() const { return row_pair * 2 + (lane & ROW_PAIRS ? 1 : 0); }
    // The channel of word n within the slice.
    __device__ uint32 channel_of(uint32 n) const { return (n * WARP + lane) / ROW_PAIRS; }
    // The first channel of the two that the lane writes together, of words of two neighbouring lanes.
    __device__ uint32 channel(uint32 n) const { return warp * SLICE + (channel_of(n) & ~1u); }
    // The state and the rows whose weights this lane computes.
    __device__ uint32 lane_state() const { return lane % STATES; }
    __device__ uint32 lane_row(uint32 i) const { return i * (WARP / STATES) + lane / STATES; }

    // Leaves the warp's state in the place of its own ring: no other warp has to be waited for. The weights are computed by the warps that join.
    template <typename Compute>
    __device__ void store_in_shared(const Compute &compute) {
        static_assert(Compute::ROW_BLOCKS == 1);
        if (compute.row(0) >= ROWS) return;
        if (compute.writes_sums()) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                shared.m[compute.row(i)][warp] = compute.m[0][i];
                shared.l[compute.row(i)][warp] = compute.l[0][i];
            }
        }
        const uint32 first = compute.channel(0, 0);
        float2 *const to = acc + place(warp, first, lane % 4);
#pragma unroll
        for (uint32 n = 0; n < Compute::CHANNELS / 8; n++) {
            const float *const two_rows = &compute.acc[0][n / 2][n % 2 * 2];
            to[(compute.channel(n / 2, n % 2) - first) * ROW_PAIRS] = {two_rows[0], two_rows[1]};
        }
    }
    // Joins the warps of the CTA, then in the same way the CTAs of the work item. True in the warp that ends last in its slice, which then has
    // all of it. It calls meanwhile() while the slices of other CTAs are on their way.
    template <typename Compute, typename Meanwhile>
    __device__ bool join(const Compute &compute, const Meanwhile &meanwhile) {
        store_in_shared(compute);
        __syncthreads();
        if (SLICES < WARPS && warp >= SLICES) return false;
        Weights &weights = shared.weights[warp];
        clear();
#pragma unroll 1
        for (uint32 begin = ~0u;;) {  // ~0: the warps are joined; else the CTAs from this one on
            float2 states[STATES][WORDS];
            float state_m[LANE_WEIGHTS];
            const float *all_l = weights.l[0];
            if (begin == ~0u) {
#pragma unroll
                for (uint32 i = 0; i < LANE_WEIGHTS; i++) state_m[i] = shared.m[lane_row(i)][lane_state()];
                all_l = shared.l[0];
                // Words of a slice lie in the order of lanes.
                const float2 *const from = acc + pin_in_register(warp * (WORDS * WARP) + lane);
#pragma unroll
                for (uint32 w = 0; w < WARPS; w++) {
#pragma unroll
                    for (uint32 n = 0; n < WORDS; n++) states[w][n] = from[place(w, 0, n * WARP)];
                }
            } else {
                const char *const from = stored + begin * uint32(sizeof(Stored));
                const char *const words = pin_in_register(from + lane * uint32(sizeof(float2)));
                const char *const sums = pin_in_register(from + (lane_state() * uint32(sizeof(Stored)) + M + lane_row(0) * uint32(sizeof(float))));
                const bool exists = begin + lane_state() < ctas;
                float state_l[LANE_WEIGHTS];
#pragma unroll
                for (uint32 i = 0; i < LANE_WEIGHTS; i++) {
                    state_m[i] = minus_infinity();
                    state_l[i] = 0.0f;
                    const float *const row_sums = reinterpret_cast<const float *>(sums) + (lane_row(i) - lane_row(0));
                    if (exists) state_m[i] = __ldcg(row_sums);
                    if (exists) state_l[i] = __ldcg(row_sums + ROWS);
                }
#pragma unroll
                for (uint32 i = 0; i < STATES; i++) {
#pragma unroll
                    for (uint32 n = 0; n < WORDS; n++) {
                        states[i][n] = {0.0f, 0.0f};
                        if (begin + i < ctas) states[i][n] = __ldcg(reinterpret_cast<const float2 *>(words + i * sizeof(Stored)) + n * WARP);
                    }
                }
                if (begin == 0) meanwhile();
#pragma unroll
                for (uint32 i = 0; i < LANE_WEIGHTS; i++) weights.l[lane_row(i)][lane_state()] = state_l[i];
            }
            add(weights, state_m, all_l, states);
            if (begin == ~0u) {
                if (ctas == 1) return true;
                if (!store()) return false;
                clear();
                begin = 0;
            } else {
                begin += STATES;
                if (begin >= ctas) return true;
            }
        }
    }
    __device__ void clear() {
        l = {0.0f, 0.0f};
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) word[n] = {0.0f, 0.0f};
#pragma unroll
        for (uint32 i = 0; i < LANE_WEIGHTS; i++) m[i] = minus_infinity();
    }
    // Joins STATES states to those joined before. Each lane computes the weight of one state in one row; all lanes read the weights of their rows.
    __device__ void add(Weights &weights, const float (&state_m)[LANE_WEIGHTS], const float *all_l, const float2 (&states)[STATES][WORDS]) {
#pragma unroll
        for (uint32 i = 0; i < LANE_WEIGHTS; i++) {
            float top = fmaxf(m[i], state_m[i]);
#pragma unroll
            for (uint32 step = 1; step < STATES; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
            // Where nothing is seen yet, −∞ − 0 and not −∞ + ∞.
            const float shift = top == minus_infinity() ? 0.0f : top;
            weights.take[lane_row(i)][lane_state()] = exp2_fast(state_m[i] - shift);
            const float keep = exp2_fast(m[i] - shift);
            if (lane_state() == 0) weights.keep[lane_row(i)] = keep;
            m[i] = top;
        }
        __syncwarp();
        float take[2][STATES], state_l[2][STATES];
        load_two_rows(weights.take[0], take);
        load_two_rows(all_l, state_l);
        const float2 keep = *reinterpret_cast<const float2 *>(&weights.keep[row_pair * 2]);
        l = {l.x * keep.x, l.y * keep.y};
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) word[n] = {word[n].x * keep.x, word[n].y * keep.y};
#pragma unroll
        for (uint32 i = 0; i < STATES; i++) {
            l = {fmaf(state_l[0][i], take[0][i], l.x), fmaf(state_l[1][i], take[1][i], l.y)};
#pragma unroll
            for (uint32 n = 0; n < WORDS; n++)
                word[n] = {fmaf(states[i][n].x, take[0][i], word[n].x), fmaf(states[i][n].y, take[1][i], word[n].y)};
        }
        // Every lane has read the weights before they change.
        __syncwarp();
    }
    // Loads what all states have of the lane's two rows.
    __device__ void load_two_rows(const float *from, float (&x)[2][STATES]) const {
        from += row_pair * 2 * STATES;
#pragma unroll
        for (uint32 n = 0; n < 2 * STATES; n += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(from + n);
            float *const to = &x[n / STATES][n % STATES];
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
    }
    // Stores this CTA's slice; true where all CTAs have stored theirs.
    __device__ bool store() const {
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) __stcg(reinterpret_cast<float2 *>(mine) + n * WARP, word[n]);
        char *const sums = mine + M - lane * uint32(sizeof(float2));
#pragma unroll
        for (uint32 i = 0; i < LANE_WEIGHTS; i++)
            if (lane_state() == 0) __stcg(reinterpret_cast<float *>(sums) + lane_row(i), m[i]);
        if (lane < ROW_PAIRS) __stcg(reinterpret_cast<float2 *>(mine + L), l);
        __syncwarp();
        uint32 before = 0;
        if (lane == 0) {
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
            if (before == ctas - 1) *counter = 0;
        }
        if (__shfl_sync(FULL_WARP, before, 0) != ctas - 1) return false;
        __syncwarp();
        return true;
    }
    // What warp w has left in shared memory; of acc the channel lane + 32 · n.
    __device__ float m_of(uint32 w, uint32 row) const { return shared.m[row][w]; }
    __device__ float l_of(uint32 w, uint32 row) const { return shared.l[row][w]; }
    __device__ float acc_of(uint32 w, uint32 row, uint32 n) const {
        return reinterpret_cast<const float *>(acc + place(w, lane + n * WARP, row / 2))[row % 2];
    }
    __device__ static uint32 place(uint32 warp, uint32 channel, uint32 rows_pair) {
        return warp * (RING / sizeof(float2)) + channel * ROW_PAIRS + rows_pair;
    }
    // The last phase: results are written by the warp that ends last in a slice; partials of shared units by every warp, while it waits for slices.
    template <typename Compute>
    __device__ void join_and_write(const Compute &compute, const WorkItem &item, bool writes_units, uint32 log_share, uint32 units) {
        const auto write_units = [&] {
            // Pinned copies: nothing of how partials are written is computed before.
            Rows8Join late = *this;
            late.lane = pin_in_register(lane);
            late.warp = pin_in_register(warp);
            write_unit(p, pinned(item), late, pin_in_register(log_share), units);
        };
        const bool has_all = join(compute, [&] {
            if (writes_units) write_units();
        });
        if (has_all) write(item);
        if (writes_units && (!has_all || ctas == 1)) write_units();
    }
    // Writes the results of the slice. Two lanes exchange words so that each has two neighbouring channels of one row.
    __device__ void write(const WorkItem &item) const {
        const bool is_odd = lane & ROW_PAIRS;
        float own_m = 0.0f, norm = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < LANE_WEIGHTS; i++) {
            const float state_m = __shfl_sync(FULL_WARP, m[i], written_row() * STATES % WARP);
            if (written_row() / (WARP / STATES) == i) own_m = state_m;
        }
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) {
            const float other = __shfl_xor_sync(FULL_WARP, is_odd ? word[n].x : word[n].y, ROW_PAIRS);
            if (!has_row || !is_written(p, item, row_place.position)) continue;
            Joined joined;
            joined.acc = is_odd ? float2{other, word[n].y} : float2{word[n].x, other};
            joined.m = own_m;
            joined.l = is_odd ? l.y : l.x;
            if (p.start.acc.data) join_start(p, item, row, channel(n), joined);
            joined.acc = unless_empty(joined.acc, joined.l);
            if (p.out.data) {
                if (n == 0) norm = norm_of(p, row_place.head, joined.m, joined.l);
                write_out(p, out + (channel(n) - channel(0)) * p.out.step[3], joined.acc, norm);
            }
            write_state(p, item, row_place, channel(n), joined.acc, joined.m, joined.l);
        }
    }
};

// The queries of one warp.
template <typename Compute, uint32 ROWS>
struct Rows8Queries : Compute::template WarpQueries<ROWS> {
    using Copies = typename Compute::template WarpQueries<ROWS>;
    static constexpr bool SHARED_BY_WARPS = false;
    const AttentionParams &p;
    uint32 lane;
    char *memory;

    __device__ static void open() {}
    __device__ Rows8Queries(const AttentionParams &p, const WorkItem &item, uint32 lane, char *memory)
        : Copies(p, item, lane), p(p), lane(lane), memory(memory) {}
    __device__ void prefetch(uint32 warp) const {
        if (warp == 0) Copies::prefetch_first_reads(lane);
    }
    __device__ void request() const { Copies::request(p, shared_address(memory), lane); }
    __device__ void to_registers(Compute &compute) const { compute.template queries_to_registers<ROWS>(shared_address(memory)); }
};

// Stages of fewer bytes are more of them.
template <typename Type, uint32 ROW_COUNT, uint32 CHANNELS = 128>
struct Rows8Form {
    using Compute = MmaCompute<Type, CHANNELS, CHANNELS>;
    using Queries = Rows8Queries<Compute, ROW_COUNT>;
    static constexpr bool KEYS_ARE_A_GROUP = true;
    static constexpr uint32 LEAST_STAGES = 512 / (CHANNELS * Type::BYTES), MOST_STAGES = LEAST_STAGES, STAGE = sizeof(TokenInfo) + 2 * TILE * Compute::PITCH;
    using Join = Rows8Join<ROW_COUNT, LEAST_STAGES * STAGE, CHANNELS>;

    // Shared memory of one warp: queries; once those are in registers, the sum of the states of its units.
    __device__ static char *warp_memory(const AttentionParams &p, char *shared, uint32 warp) {
        return shared + pin_in_register(p.q_offset + warp * p.q_pitch);
    }
    __device__ static char *queries_memory(const AttentionParams &, char *, char *warp_memory) { return warp_memory; }
    __device__ static WorkItem late(const WorkItem &item) { return pinned(item); }
    // Keys of the oldest stage are there; values are waited for once the keys are multiplied.
    __device__ static void wait_for_keys(uint32) { wait_copies<2 * LEAST_STAGES - 1>(); }
    __device__ static void attend(Compute &compute, const char *tile, bool is_fully_seen, bool is_first) {
        compute.attend(tile, is_fully_seen, is_first, [] {
            wait_copies<2 * LEAST_STAGES - 2>();
            __syncwarp();
        });
    }
};
