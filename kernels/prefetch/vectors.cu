// Gather of blocks of any form by plain loads and stores: target[to] = source[from] for each pair.
//
// Bytes: each block is read once and written once. From host memory the bus is the floor, and few CTAs with four units of each thread in
// flight keep it busy.
//
// Work split: blocks are split into tiles of four units per lane, which are dealt to all groups of lanes of the grid. A small block takes
// fewer lanes than a warp, so that a warp copies several blocks.
//
// Variants: gather_vectors for lists on the device, gather_vectors_given for entries that the host looked up. bulk.cu takes blocks that
// are one run of bytes in both tensors, on compute capability 9.0 and later.
//
// On entry: pairs · tiles < 2^31; every address and stride is a multiple of the unit.
//
// targets: compute_80

#include "prefetch/params.cuh"

#include "prefetch/layout.cuh"

constexpr uint32 SLOTS = 4;

// The offsets of unit u of a block in source and target.
template <bool IS_RUN, typename Unit>
__device__ inline Offsets place(const VectorParams &p, uint32 u) {
    if (IS_RUN) return {int64(u) * int64(sizeof(Unit)), int64(u) * int64(sizeof(Unit))};
    uint32 rest = p.run.divide(u);
    const int64 in_run = (u - rest * p.run.value) * uint32(sizeof(Unit));
    Offsets at = {in_run, in_run};
    for (uint32 d = 0; d < p.dims; ++d) {
        const Nested &dim = p.dim[d];
        const uint32 outer = dim.extent.divide(rest), i = rest - outer * dim.extent.value;
        at.from += i * dim.source, at.to += i * dim.target;
        rest = outer;
    }
    return at;
}

template <bool IS_RUN, typename Unit, typename Pairs>
__device__ void copy_tiles(const VectorParams &p, const Pairs &pairs) {
    const uint32 thread = blockIdx.x * blockDim.x + threadIdx.x, groups = gridDim.x * blockDim.x >> p.log_lanes;
    const uint32 lane = thread & ((1u << p.log_lanes) - 1), end = pairs.end() * p.tiles.value;
    for (uint32 item = thread >> p.log_lanes; item < end; item += groups) {
        const uint32 entry = p.tiles.divide(item), tile = item - entry * p.tiles.value;
        int64 from, to;
        if (!pairs.find(entry, from, to)) continue;
        const char *source = p.source + from;
        char *target = p.target + to;
        const uint32 first = (tile * SLOTS << p.log_lanes) + lane;
        Offsets at[SLOTS];
        Unit units[SLOTS];
#pragma unroll
        for (uint32 s = 0; s < SLOTS; ++s) {
            const uint32 u = first + (s << p.log_lanes);
            if (u >= p.units) continue;
            at[s] = place<IS_RUN, Unit>(p, u);
            units[s] = __ldcs(&as<Unit>(source + at[s].from));
        }
#pragma unroll
        for (uint32 s = 0; s < SLOTS; ++s)
            if (first + (s << p.log_lanes) < p.units) as<Unit>(target + at[s].to) = units[s];
    }
}

template <typename Unit, typename Pairs>
__device__ void copy_units(const VectorParams &p, const Pairs &pairs) {
    if (p.dims == 0)
        copy_tiles<true, Unit>(p, pairs);
    else
        copy_tiles<false, Unit>(p, pairs);
}

template <typename Pairs>
__device__ void copy_vectors(const VectorParams &p, const Pairs &pairs) {
    switch (p.log_unit) {
        case 4: return copy_units<uint4>(p, pairs);
        case 3: return copy_units<uint2>(p, pairs);
        case 2: return copy_units<uint32>(p, pairs);
        case 1: return copy_units<uint16>(p, pairs);
        default: return copy_units<uint8>(p, pairs);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(512)

KERNEL gather_vectors(const __grid_constant__ VectorParams p, const __grid_constant__ Lists pairs) { copy_vectors(p, pairs); }
KERNEL gather_vectors_given(const __grid_constant__ VectorParams p, const __grid_constant__ Given pairs) { copy_vectors(p, pairs); }
