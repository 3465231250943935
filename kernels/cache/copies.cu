// Copies on a side stream: cache_fetch copies missed runs from host memory to their slots, cache_write_back copies full tail pages to host
// memory.
//
// Bytes: each run crosses the bus once, which is the floor. Few CTAs keep the bus busy, so that kernels on other streams have the rest of
// the device.
//
// Phases of cache_fetch: find the runs that are due (cache/due.cuh) ─ runs are dealt to all warps: each lane looks up one run, the warp copies
// the runs one after the other ─ when all runs of a warp have arrived, it marks them as resident, unless their slots were given away meanwhile.
//
// On entry: fetches of a layer follow each other, and so do its write-backs; `pool` and `host` are multiples of 64 bytes.
//
// targets: compute_80, compute_90

#include "cache/due.cuh"
#include "cache/params.cuh"
#include "cache/units.cuh"
#include "prefetch/ring.cuh"

#include "cache/layout.cuh"

constexpr uint32 FETCH_THREADS = 128, FETCH_WARPS = FETCH_THREADS / WARP;
constexpr uint32 WRITE_THREADS = 256, WRITE_WARPS = WRITE_THREADS / WARP;

#if __CUDA_ARCH__ >= 900
constexpr uint32 PIECE = 4 << 10, STAGES = 4;  // bytes of a bulk copy, and stages of a warp

// Copies by bulk copies through shared memory, which one lane requests.
class Copier {
    Ring ring;
    const uint32 lane;

public:
    __device__ Copier(char *stages, uint64 *arrived, Destination *destinations, uint32 warp, uint32 lane)
        : ring(shared_address(stages) + warp * STAGES * PIECE, PIECE, lane == 0 ? STAGES : 0, arrived + warp * STAGES, destinations + warp * STAGES), lane(lane) {}
    __device__ void copy(const char *source, char *target, uint64 bytes) {
        if (lane) return;
        for (uint64 at = 0; at < bytes; at += PIECE) ring.add(source + at, target + at, min(uint64(PIECE), bytes - at));
    }
    __device__ void finish() {
        if (lane == 0) ring.finish();
        __syncwarp();
    }
};
#else
class Copier {
    const uint32 lane;

public:
    __device__ Copier(char *, uint64 *, Destination *, uint32, uint32 lane) : lane(lane) {}
    __device__ void copy(const char *source, char *target, uint64 bytes) { copy_units<WARP>(source, target, bytes, lane); }
    __device__ void finish() { __syncwarp(); }
};
#endif

extern "C" __global__ void __launch_bounds__(FETCH_THREADS) cache_fetch(const __grid_constant__ FetchParams p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char stages[];
    __shared__ __align__(8) uint64 arrived[FETCH_WARPS * STAGES];
    __shared__ Destination destinations[FETCH_WARPS * STAGES];
#else
    char *stages = nullptr;
    uint64 *arrived = nullptr;
    Destination *destinations = nullptr;
#endif
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Layer &layer = p.layer;
    if (!may_be_due(p)) return;
    const uint32 due = find_due<FETCH_THREADS>(p);
    // Consecutive runs go to consecutive CTAs, so that few runs keep all CTAs busy.
    const uint32 all = gridDim.x * FETCH_WARPS, first = warp * gridDim.x + blockIdx.x;
    if (first < due) {
        Copier copier(stages, arrived, destinations, warp, lane);
        for (uint32 batch = first; batch < due; batch += WARP * all) {
            const uint32 n = batch + lane * all;
            ToCopy copy = {};
            if (n < due) copy = load(layer.to_copy + n);
            const char *source = layer.host + copy.host_run * p.cache.run;
            char *target = p.cache.slot(layer, copy.slot);
            for (uint32 left = __ballot_sync(FULL_WARP, n < due); left; left &= left - 1) {
                const uint32 from = __ffs(left) - 1;
                const auto source_of = __shfl_sync(FULL_WARP, reinterpret_cast<uint64>(source), from);
                const auto target_of = __shfl_sync(FULL_WARP, reinterpret_cast<uint64>(target), from);
                copier.copy(reinterpret_cast<const char *>(source_of), reinterpret_cast<char *>(target_of), p.cache.run);
                __syncwarp();
            }
        }
        copier.finish();
        __threadfence();
        for (uint32 n = first + lane * all; n < due; n += WARP * all) {
            mark(layer, load(layer.to_copy + n));
        }
    }
    end_fetch(p, due);
}

// Copies the full pages of the tails to their host runs.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) cache_write_back(const __grid_constant__ FetchParams p) {
    constexpr uint32 CHUNK = 8 << 10;
    Clock &clock = *p.layer.clock;
    const uint32 count = clock.full, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint64 bytes = p.cache.run * p.cache.heads.value;
    const uint32 chunks = (bytes + CHUNK - 1) / CHUNK;
    for (uint32 n = 0; n < count; ++n) {
        const Full full = p.layer.full[n];
        const char *source = p.layer.pool + full.page * bytes;
        char *target = p.layer.host + full.block * bytes;
        for (uint32 c = blockIdx.x * WRITE_WARPS + warp; c < chunks; c += gridDim.x * WRITE_WARPS) {
            const uint64 at = uint64(c) * CHUNK;
            copy_units<WARP>(source + at, target + at, min(uint64(CHUNK), bytes - at), lane);
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.written, 1u) + 1 < gridDim.x) return;
    clock.full = clock.written = 0;
}
