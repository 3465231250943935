// Copies on a side stream: cache_fetch copies missed runs from host memory to their slots, cache_write_back copies full tail pages to host
// memory.
//
// Bytes: each run crosses the bus once, which is the floor. Few CTAs keep the bus busy, so that kernels on other streams have the rest of
// the device.
//
// Phases of cache_fetch: the first CTA to begin searches the slots that the clock's hand has passed for slots whose run has not been copied
// yet, and publishes the list ─ runs are dealt to all warps: each lane looks up one run, the warp copies the runs one after the other ─ when
// all runs of a warp have arrived, it marks them as resident, unless their slots were given away meanwhile ─ the last CTA to end records
// where the next search begins.
//
// A resolve may give slots away at the same time, and its writes may be seen in any order. The content of a slot is one word, so a search
// sees it before or after the resolve, and the run is copied once in either case. A search may see the hand where that resolve leaves it but
// not yet the slots that the resolve gives. So the next search begins at the position that the hand had before that resolve: earlier resolves
// have ended, and all their writes are seen.
//
// On entry: fetches of a layer follow each other, and so do its write-backs; `pool` and `host` are multiples of 64 bytes.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"
#include "cache/units.cuh"
#include "prefetch/ring.cuh"

#include "cache/layout.cuh"

constexpr uint32 FETCH_THREADS = 128, FETCH_WARPS = FETCH_THREADS / WARP;
constexpr uint32 WRITE_THREADS = 256, WRITE_WARPS = WRITE_THREADS / WARP;

__device__ inline ToCopy load(const ToCopy *at) { return {__ldcg(&at->slot), __ldcg(&at->host_run), __ldcg(&at->since)}; }

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

// Writes the slots whose run has not been copied yet to `to_copy`; returns their number. All threads of a CTA call it.
__device__ inline uint32 search(const FetchParams &p) {
    constexpr uint32 AT_ONCE = 16;
    __shared__ uint64 begin, end;
    __shared__ uint32 found;
    const Layer &layer = p.layer;
    Clock &clock = *layer.clock;
    const uint32 lane = threadIdx.x % WARP, below = (1u << lane) - 1, slots = p.layer.slots;
    if (threadIdx.x == 0) {
        const uint64 before = load_volatile(&clock.before);
        begin = load_volatile(&clock.searched), end = load_volatile(&clock.passed), found = 0;
        clock.searching = min(before, end);
        __threadfence();  // after this, all writes of the resolves up to `before` are seen
    }
    __syncthreads();
    const uint32 span = min(end - begin, uint64(slots)), hand = begin % slots;
    const auto slot_at = [&](uint32 n) { return hand + n - (hand + n >= slots ? slots : 0); };
    for (uint32 first = threadIdx.x; first < span + lane; first += AT_ONCE * FETCH_THREADS) {
        uint64 holds[AT_ONCE];
        uint32 due[AT_ONCE], count = 0, at = 0;  // due: the lanes whose slot is due
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            const uint32 n = first + k * FETCH_THREADS;
            holds[k] = n < span ? load_volatile(layer.holds + slot_at(n)) : NO_HOME;
        }
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            due[k] = __ballot_sync(FULL_WARP, !unpack(holds[k]).is_resident());
            count += __popc(due[k]);
        }
        if (count == 0) continue;
        if (lane == 0) at = atomicAdd(&found, count);
        at = __shfl_sync(FULL_WARP, at, 0);
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            const auto [host_run, since] = unpack(holds[k]);
            if (due[k] >> lane & 1) layer.to_copy[at + __popc(due[k] & below)] = {slot_at(first + k * FETCH_THREADS), host_run, since};
            at += __popc(due[k]);
        }
    }
    __syncthreads();
    return found;
}

// The number of runs to copy, in `to_copy`, the same for all CTAs of this launch. All threads of a CTA call it.
__device__ inline uint32 find_due(const FetchParams &p) {
    __shared__ uint32 due, is_first;
    Clock &clock = *p.layer.clock;
    if (threadIdx.x == 0) is_first = atomicAdd(&clock.tickets, 1u) == 0;
    __syncthreads();
    if (is_first) {
        const uint32 found = search(p);
        if (threadIdx.x == 0) {
            clock.due = found;
            __threadfence();
            atomicExch(&clock.is_set, 1u);
        }
        return found;
    }
    if (threadIdx.x == 0) {
        while (!load_volatile(&clock.is_set)) {}
        __threadfence();
        due = load_volatile(&clock.due);
    }
    __syncthreads();
    return due;
}

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
    Clock &clock = *layer.clock;
    const uint32 due = find_due(p);
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
            const ToCopy copy = load(layer.to_copy + n);
            const uint64 home = pack({copy.slot, copy.since}), content = pack({copy.host_run, copy.since});
            // A resolve that gives the slot at the same time may not have written the home yet: then the next fetch finds the slot again.
            if (atomicCAS(layer.homes + copy.host_run, home, home | RESIDENT) == home) atomicCAS(layer.holds + copy.slot, content, content | RESIDENT);
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.left, 1u) + 1 < gridDim.x) return;
    __threadfence();  // after what the other CTAs did
    clock.totals.fetched += due * p.cache.run;
    clock.totals.waits += p.is_wait && due;
    clock.searched = load_volatile(&clock.searching);
    clock.tickets = clock.is_set = clock.left = 0;
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
