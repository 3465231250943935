// Attention to keys and values of which some are coded in INT4, of every type and stride beside them, in float32 (variant general).
//
// It is slow, as general.cu, from which it differs in where tokens lie and how they are read: a coded row is turned by the warp that reads it.
//
// targets: compute_80, compute_90

#include "attention/general.cuh"
#include "attention_int4/tokens.cuh"
#include "attention_tree/reach.cuh"

// The channels of a row that is coded, whose lanes lie side by side along them.
constexpr uint32 CODED_CHANNELS = 256 / WARP;

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
    turn<CODED_CHANNELS>(row, dim);
    if (is_value) return;
    const char *const mean = mean_of_token(p, int4, item, token.position, coded_page);
#pragma unroll
    for (uint32 i = 0; i < CODED_CHANNELS; i++) {
        const uint32 channel = lane + i * WARP;
        if (channel >= dim) break;
        row[i] *= weight_of_channel(int4, item.head, channel);
        if (mean) row[i] += load_element(mean + channel * int4.means.step[3], int4.mean_type);
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
