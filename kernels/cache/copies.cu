// Copies beside the caller's stream: what slots are to hold, from host memory, and pages that are full, back to host memory.
//
// Bytes: each run crosses the bus once, which is the floor. Few CTAs keep the bus busy, so that kernels beside them keep the device.
//
// Fetch: the first CTA to begin searches the slots that the clock's hand went over for those whose block is not there yet, and tells the
// others. Runs over all warps; a lane looks up one run each, the warp copies them in turn. When all of a warp's have come it marks them as
// there, unless their slots were given away meanwhile. The last CTA to end says from where the next search must begin.
//
// A resolve may be giving slots away beside this, and its writes are seen in any order. What a slot holds is one word, so it is seen before
// or after, and copied once in either case. The hand may be seen where that resolve leaves it while its slots are not yet given: so the next
// search begins where the hand was before it. Those before it have ended, and all that they have written is seen.
//
// On entry: fetches of a layer follow each other, as its write-backs do; `pool` and `host` are multiples of 64 bytes.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"
#include "prefetch/ring.cuh"

#include "cache/layout.cuh"

constexpr uint32 FETCH_THREADS = 128, FETCH_WARPS = FETCH_THREADS / WARP;
constexpr uint32 WRITE_THREADS = 256, WRITE_WARPS = WRITE_THREADS / WARP;

__device__ inline Travel load(const Travel *at) { return {__ldcg(&at->slot), __ldcg(&at->key), __ldcg(&at->since)}; }

// A warp's copies: so many 16-byte units by plain loads, eight of a lane under way.
__device__ inline void copy_units(const char *source, char *target, uint64 bytes, uint32 lane) {
    constexpr uint32 AT_ONCE = 8;
    const uint64 units = bytes / 16;
    for (uint64 first = lane; first < units; first += AT_ONCE * WARP) {
        uint4 held[AT_ONCE];
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k)
            if (first + k * WARP < units) held[k] = __ldcs(&as<uint4>(source + (first + k * WARP) * 16));
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k)
            if (first + k * WARP < units) as<uint4>(target + (first + k * WARP) * 16) = held[k];
    }
}

#if __CUDA_ARCH__ >= 900
constexpr uint32 PIECE = 4 << 10, STAGES = 4;  // bulk copies of a warp

// By bulk copies through shared memory, one lane's work.
class Copier {
    Ring ring;
    const uint32 lane;

public:
    __device__ Copier(char *room, uint64 *arrived, Landing *landing, uint32 warp, uint32 lane)
        : ring(shared_address(room) + warp * STAGES * PIECE, PIECE, lane == 0 ? STAGES : 0, arrived + warp * STAGES, landing + warp * STAGES), lane(lane) {}
    __device__ void copy(const char *source, char *target, uint64 bytes) {
        if (lane) return;
        for (uint64 at = 0; at < bytes; at += PIECE) ring.add(source + at, target + at, min(uint64(PIECE), bytes - at));
    }
    __device__ void finish() {
        if (lane == 0) ring.land();
        __syncwarp();
    }
};
#else
class Copier {
    const uint32 lane;

public:
    __device__ Copier(char *, uint64 *, Landing *, uint32, uint32 lane) : lane(lane) {}
    __device__ void copy(const char *source, char *target, uint64 bytes) { copy_units(source, target, bytes, lane); }
    __device__ void finish() { __syncwarp(); }
};
#endif

// Slots whose block is not there yet, to `travels`; returns how many. By all threads of a CTA.
__device__ inline uint32 search(const FetchParams &p) {
    constexpr uint32 AT_ONCE = 16;
    __shared__ uint64 begin, end;
    __shared__ uint32 found;
    const Layer &layer = p.layer;
    Clock &clock = *layer.clock;
    const uint32 lane = threadIdx.x % WARP, below = (1u << lane) - 1, slots = p.cache.slots;
    if (threadIdx.x == 0) {
        const uint64 before = fresh(&clock.before);
        begin = fresh(&clock.searched), end = fresh(&clock.passed), found = 0;
        clock.searching = min(before, end);
        __threadfence();  // from here on all is seen of the resolves up to `before`
    }
    __syncthreads();
    const uint32 span = min(end - begin, uint64(slots)), hand = begin % slots;
    const auto slot_at = [&](uint32 n) { return hand + n - (hand + n >= slots ? slots : 0); };
    for (uint32 first = threadIdx.x; first < span + lane; first += AT_ONCE * FETCH_THREADS) {
        uint64 held[AT_ONCE];
        uint32 due[AT_ONCE], count = 0, at = 0;  // lanes
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            const uint32 n = first + k * FETCH_THREADS;
            held[k] = n < span ? fresh(layer.holds + slot_at(n)) : NO_HOME;
        }
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            due[k] = __ballot_sync(FULL_WARP, !unpack(held[k]).is_there());
            count += __popc(due[k]);
        }
        if (count == 0) continue;
        if (lane == 0) at = atomicAdd(&found, count);
        at = __shfl_sync(FULL_WARP, at, 0);
#pragma unroll
        for (uint32 k = 0; k < AT_ONCE; ++k) {
            const auto [key, since] = unpack(held[k]);
            if (due[k] >> lane & 1) layer.travels[at + __popc(due[k] & below)] = {slot_at(first + k * FETCH_THREADS), key, since};
            at += __popc(due[k]);
        }
    }
    __syncthreads();
    return found;
}

// The runs to copy, in `travels`: the same for all CTAs of this launch. By all threads of a CTA.
__device__ inline uint32 agree(const FetchParams &p) {
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
        while (!fresh(&clock.is_set)) {}
        __threadfence();
        due = fresh(&clock.due);
    }
    __syncthreads();
    return due;
}

extern "C" __global__ void __launch_bounds__(FETCH_THREADS) cache_fetch(const __grid_constant__ FetchParams p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char room[];
    __shared__ __align__(8) uint64 arrived[FETCH_WARPS * STAGES];
    __shared__ Landing landing[FETCH_WARPS * STAGES];
#else
    char *room = nullptr;
    uint64 *arrived = nullptr;
    Landing *landing = nullptr;
#endif
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Layer &layer = p.layer;
    Clock &clock = *layer.clock;
    const uint32 due = agree(p);
    // CTA after CTA, so that few runs keep all of them busy.
    const uint32 all = gridDim.x * FETCH_WARPS, first = warp * gridDim.x + blockIdx.x;
    if (first < due) {
        Copier copier(room, arrived, landing, warp, lane);
        for (uint32 batch = first; batch < due; batch += WARP * all) {
            const uint32 n = batch + lane * all;
            Travel travel = {};
            if (n < due) travel = load(layer.travels + n);
            const char *source = layer.host + travel.key * p.cache.run;
            char *target = layer.pool + uint64(p.cache.first_slot + travel.slot) * p.cache.run;
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
            const Travel travel = load(layer.travels + n);
            const uint64 home = pack({travel.slot, travel.since}), held = pack({travel.key, travel.since});
            // A resolve that gives it beside this may not have written the home yet: then the next fetch finds the slot again.
            if (atomicCAS(layer.homes + travel.key, home, home | THERE) == home) atomicCAS(layer.holds + travel.slot, held, held | THERE);
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.left, 1u) + 1 < gridDim.x) return;
    clock.totals.fetched += due * p.cache.run;
    clock.totals.waits += p.is_wait && due;
    clock.searched = fresh(&clock.searching);
    clock.tickets = clock.is_set = clock.left = 0;
}

// Pages of the tails that are full, to host memory.
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
            copy_units(source + at, target + at, min(uint64(CHUNK), bytes - at), lane);
        }
    }
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence();
    if (atomicAdd(&clock.written, 1u) + 1 < gridDim.x) return;
    clock.full = clock.written = 0;
}
