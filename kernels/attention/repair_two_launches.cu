// The first launch of repair in two (repair variant two_launches): repair_find_missed.
//
// Runs where no kernel repairs in one launch; src/ops/attention/device/choose.rs. For each work item it finds the selected blocks that have to be
// attended to (repair_lists.cuh), as the list that the second launch, attention, reads. It joins the kept states to the state from which
// attention starts.
//
// Bytes: both lists, and a state of Dv + 2 floats for each partial that serves. A CTA takes one row, a query position and head, of a list; its
// warps take turns at the partials.
//
// targets: compute_80, compute_90

#include "attention/join.cuh"
#include "attention/repair_lists.cuh"

constexpr uint32 MAX_CHANNELS = 576, LANE_CHANNELS = MAX_CHANNELS / WARP;
constexpr uint32 AT_ONCE = 4;  // states that a warp asks for before it joins them

extern "C" __global__ void __launch_bounds__(THREADS) repair_find_missed(const __grid_constant__ RepairParams p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float warp_m[WARPS], warp_l[WARPS];
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, number = blockIdx.x / p.to.rows, row = blockIdx.x - number * p.to.rows;
    // Numbered without blocks of rows.
    const uint32 by_head = p.to.kv_heads.divide(number), seq = p.to.list_positions.divide(by_head);
    const WorkItem item{seq, by_head - seq * p.to.list_positions.value, number - by_head * p.to.kv_heads.value, 0};
    __shared__ WorkItemLengths lengths;
    if (threadIdx.x == 0) lengths = WorkItemLengths::load(p, item);
    __syncthreads();
    const Reach reach = lengths.reach(p, item);
    int32 *const predicted = reinterpret_cast<int32 *>(shared), *const selected = predicted + p.predicted_capacity, *const partials = selected + p.to.list_capacity;
    const Lists lists{predicted, selected, lengths.predicted, lengths.selected, blocks_of(p.to, reach)};
    const uint32 longest = max(lists.count, lists.predicted_count);
    for (uint32 j = threadIdx.x; j < longest; j += THREADS) {
        if (j < lists.predicted_count) predicted[j] = as<int32>(p.predicted.at(item.seq, item.position, item.head, j));
        if (j < lists.count) selected[j] = as<int32>(p.to.ids.at(item.seq, item.position, item.head, j));
    }
    __syncthreads();
    const uint32 list = number * p.to.list_capacity;
    const Found found = find_parts(
        p, lists, [](uint32) { return 0; },
        [&](uint32 j, uint32 at, int32) {
            if (row) return;
            p.ids[list + at] = selected[j];
            if (p.to.slots.data) p.slots[list + at] = as<int32>(p.to.slots.at(item.seq, item.position, item.head, j));
        },
        [&](int32 partial, uint32 at) { partials[at] = partial; });
    if (row == 0 && threadIdx.x == 0) {
        p.counts[number] = found.attended;
        if (p.missed.data) as<int32>(p.missed.at(item.seq, item.position, item.head)) = found.missed;
    }

    // The row's state. A row that sees nothing starts from nothing, whatever was kept.
    const auto [position, head] = place_of_row(p.to, item, row);
    int32 first;
    uint32 seen;
    reach.row(p.to, position, first, seen);
    const uint32 states = seen == 0 ? 0 : p.exact ? found.joined : 1;
    float acc[LANE_CHANNELS] = {}, m = minus_infinity(), l = 0.0f;
#pragma unroll 1
    for (uint32 n = warp; n < states; n += WARPS * AT_ONCE) {
        float one[AT_ONCE][LANE_CHANNELS], one_m[AT_ONCE], one_l[AT_ONCE], top = m;
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; k++) {
            one_m[k] = minus_infinity();
            one_l[k] = 0.0f;
            if (n + k * WARPS >= states) continue;
            const uint32 partial = p.exact ? partials[n + k * WARPS] : 0;
            const char *const from = p.kept.acc.at(item.seq, position, head, partial);
#pragma unroll
            for (uint32 i = 0; i < LANE_CHANNELS; i++) {
                if (i * WARP >= p.to.value_dim) break;
                if (lane + i * WARP < p.to.value_dim) one[k][i] = as<float>(from + (lane + i * WARP) * p.kept.acc.step[4]);
            }
            one_l[k] = as<float>(p.kept.l.at(item.seq, position, head, partial));
            one_m[k] = as<float>(p.kept.m.at(item.seq, position, head, partial)) * LOG2_E;
        }
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; k++)
            if (one_l[k] != 0.0f) top = fmaxf(top, one_m[k]);
        const float keep = weight(m, top);
        m = top;
        l *= keep;
#pragma unroll
        for (uint32 i = 0; i < LANE_CHANNELS; i++) acc[i] *= keep;
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; k++) {
            if (one_l[k] == 0.0f) continue;
            const float take = weight(one_m[k], top);
            l += one_l[k] * take;
#pragma unroll
            for (uint32 i = 0; i < LANE_CHANNELS; i++) {
                if (i * WARP >= p.to.value_dim) break;
                acc[i] += one[k][i] * take;
            }
        }
    }
    if (lane == 0) {
        warp_m[warp] = m;
        warp_l[warp] = l;
    }
    __syncthreads();
    float top = minus_infinity(), sum = 0.0f;
    for (uint32 w = 0; w < WARPS; w++) top = fmaxf(top, warp_m[w]);
    for (uint32 w = 0; w < WARPS; w++) sum += weight(warp_m[w], top) * warp_l[w];
    // The lists are used up; their memory has room for a row of each warp.
    float *const rows = reinterpret_cast<float *>(shared);
    const float weighs = weight(m, top);
#pragma unroll
    for (uint32 i = 0; i < LANE_CHANNELS; i++)
        if (lane + i * WARP < p.to.value_dim) rows[warp * p.to.value_dim + lane + i * WARP] = acc[i] * weighs;
    __syncthreads();
    for (uint32 d = threadIdx.x; d < p.to.value_dim; d += THREADS) {
        float x = 0.0f;
        for (uint32 w = 0; w < WARPS; w++) x += rows[w * p.to.value_dim + d];
        as<float>(p.to.start.acc.at(item.seq, position, head, 0, d)) = x;
    }
    if (threadIdx.x == 0) {
        as<float>(p.to.start.m.at(item.seq, position, head)) = top * LN_2;
        as<float>(p.to.start.l.at(item.seq, position, head)) = sum;
    }
}
