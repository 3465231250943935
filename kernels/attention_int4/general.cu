// Attention to keys and values of which some are coded in INT4, of every type and stride beside them, in float32 (variant general).
//
// It is slow, as general.cu, from which it differs in where tokens lie and how they are read: a coded row is turned by the warp that reads it.
//
// targets: compute_80, compute_90

#include "attention/general.cuh"
#include "attention_int4/params.cuh"
#include "attention_tree/reach.cuh"

// The channels of a row that is coded, whose lanes lie side by side along them.
constexpr uint32 CODED_CHANNELS = 256 / WARP;

// Multiplies rows of `dim` channels by H.
__device__ inline void turn(float (&row)[LANE_CHANNELS], uint32 dim) {
    const uint32 lane = threadIdx.x % WARP, together = dim & (0 - dim);
#pragma unroll
    for (uint32 step = 1; step < WARP; step *= 2) {
        if (step >= together) break;
#pragma unroll
        for (uint32 i = 0; i < CODED_CHANNELS; i++) {
            const float other = __shfl_xor_sync(FULL_WARP, row[i], step);
            row[i] = lane & step ? other - row[i] : row[i] + other;
        }
    }
#pragma unroll
    for (uint32 step = 1; step < CODED_CHANNELS; step *= 2) {
        if (step * WARP >= together) break;
#pragma unroll
        for (uint32 i = 0; i < CODED_CHANNELS; i++) {
            if (i & step) continue;
            const float a = row[i], b = row[i + step];
            row[i] = a + b;
            row[i + step] = a - b;
        }
    }
    const float factor = 1.0f / sqrtf(together);
#pragma unroll
    for (uint32 i = 0; i < CODED_CHANNELS; i++) row[i] *= factor;
}

// What rows see and which tokens are coded; Rows is Reach, for a chain of rows, or TreeReach.
template <typename Rows>
struct Int4Reach : Rows {
    const Int4Params &int4;
    int32 end_of_coded;

    // A place counts pages of codes after the others, as slots do.
    __device__ bool is_coded(const Place &place) const { return uint32(place.page) >= int4.to.pages; }
};

template <typename Rows>
__device__ inline Place find_granule(const AttentionParams &p, const Int4Reach<Rows> &reach, const WorkItem &item, uint32 entries, const Tiles &tiles, uint32 tile) {
    const uint32 x = tiles.token(p, tile);
    if (x == Tiles::NOWHERE) return {-1, 0, 0};
    int32 position = (reach.begin & ~int32(TILE - 1)) + int32(x), slot = 0;
    if (p.ids.data) {
        const Listed entry = listed(p, item, x);
        slot = entry.slot;
        const uint32 e = p.block.divide(x);
        if (e >= entries || entry.id < 0 || entry.id == entry.previous || int64(entry.id) * p.block.value >= reach.end) return {-1, 0, 0};
        position = entry.id * int32(p.block.value) + int32(x - e * p.block.value);
    }
    if (position >= reach.end || position + (1 << p.log_granule) <= reach.begin) return {-1, 0, 0};
    const bool in_slots = p.slots.data, is_coded = in_slots ? uint32(slot) >= p.pages : ::is_coded(reach.int4, position, reach.end_of_coded);
    const View<2> &table = is_coded ? reach.int4.table : p.table;
    const Divisor &size = is_coded ? reach.int4.page : p.page;
    const uint32 number = in_slots || table.data ? size.divide(position) : 0, coded_from = is_coded ? p.pages : 0;
    const uint32 page = in_slots ? slot - coded_from : table.data ? as<int32>(table.at(item.seq, number)) : item.seq;
    if (page >= (is_coded ? reach.int4.pages : p.pages)) return {-1, 0, 0};
    return {position, int32(coded_from + page), position - int32(number * size.value)};
}

template <typename Rows>
__device__ inline void read_token(const AttentionParams &p, const Int4Reach<Rows> &reach, const WorkItem &item, bool is_value, const Place &token,
                                  float (&row)[LANE_CHANNELS]) {
    if (!reach.is_coded(token)) return read_token(p, static_cast<const Reach &>(reach), item, is_value, token, row);
    const Int4Params &int4 = reach.int4;
    const uint32 lane = threadIdx.x % WARP, dim = is_value ? p.value_dim : p.dim;
    const View<4> &codes = is_value ? int4.v : int4.k;
    const uint32 coded_page = token.page - p.pages;
    const char *const from = codes.at(coded_page, token.row, item.head);
    const float scale = widen_float8(as<uint8>((is_value ? int4.v_scale : int4.k_scale).at(coded_page, token.row, item.head)), true);
#pragma unroll
    for (uint32 i = 0; i < CODED_CHANNELS; i++) {
        const uint32 channel = lane + i * WARP;
        row[i] = channel < dim ? (float(as<uint8>(from + channel / 2 * codes.step[3]) >> channel % 2 * 4 & 15) - 7.5f) * scale : 0.0f;
    }
    turn(row, dim);
    if (is_value) return;
    const uint32 block = int4.block.divide(token.position), number = int4.mean_table.data ? int4.mean_rows.divide(block) : 0;
    const uint32 mean_row = p.slots.data ? 0 : block - number * int4.mean_rows.value;
    int32 page = p.slots.data ? int32(coded_page) : -1;
    if (!p.slots.data && number < int4.most_mean_pages && mean_row < int4.mean_rows.value) page = int4.mean_table.data ? as<int32>(int4.mean_table.at(item.seq, number)) : item.seq;
    const bool has_mean = uint32(page) < int4.mean_pages;
    const char *const mean = int4.means.at(has_mean ? page : 0, mean_row, item.head);
#pragma unroll
    for (uint32 i = 0; i < CODED_CHANNELS; i++) {
        const uint32 channel = lane + i * WARP;
        if (channel >= dim) break;
        row[i] *= weight_of_channel(int4, item.head, channel);
        if (has_mean) row[i] += load_element(mean + channel * int4.means.step[3], int4.mean_type);
    }
}

struct Int4GeneralCompute : GeneralCompute {
    using GeneralCompute::GeneralCompute;

    template <typename Close>
    __device__ void run(const CtaShare &cta_share, const WorkItem &item, const Reach &reach, Close close_unit) {
        const Int4Params &int4 = reinterpret_cast<const Int4Params &>(p);
        const int32 end = coded_end(int4, as<int32>(int4.coded_lens.at(item.seq)), reach.length);
        if (!int4.tree.data) return run_with(cta_share, item, Int4Reach<Reach>{{reach}, int4, end}, close_unit);
        run_with(cta_share, item, Int4Reach<TreeReach>{{p, item, reach, int4.tree}, int4, end}, close_unit);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_int4_general(const __grid_constant__ Int4Params p) {
    attention<Int4GeneralCompute>(p.to);
}
