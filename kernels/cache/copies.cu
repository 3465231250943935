// Copies beside the caller's stream: what resolves have asked for, from host memory to slots, and pages that are full, back to host memory.
//
// Bytes: each run crosses the bus once, which is the floor. Few CTAs keep the bus busy, so that kernels beside them keep the device.
//
// Fetch: the first CTA to begin tells the others where the ring of slots that were asked for ends now. Runs over all warps; a lane looks up
// one run each, the warp copies them in turn. When all of a warp's have come it marks them as there, unless their slots were given away
// meanwhile. The last CTA to end passes the place in the ring on.
//
// On entry: fetches of a layer follow each other, as its write-backs do; `pool` and `host` are multiples of 64 bytes.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"
#include "prefetch/ring.cuh"

#include "cache/layout.cuh"

constexpr uint32 FETCH_THREADS = 128, FETCH_WARPS = FETCH_THREADS / WARP;
constexpr uint32 WRITE_THREADS = 256, WRITE_WARPS = WRITE_THREADS / WARP;

template <typename T> __device__ inline T fresh(const T *at) { return *static_cast<const volatile T *>(at); }

// The slot of the ring's entry at `place`, as soon as it is there, and all that was written before it: the resolve that announced it may
// still be writing.
__device__ inline uint32 slot_at(const uint64 *at, uint64 place) {
    uint64 entry;
    do
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(entry) : "l"(at) : "memory");
    while (!is_entry_at(entry, place));
    return entry;
}

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

// Where in the ring this launch's copies begin and end: the same for all its CTAs.
__device__ inline void agree(Clock &clock, uint64 &begin, uint64 &end) {
    if (atomicAdd(&clock.tickets, 1u) == 0) {
        clock.taking = fresh(&clock.pushed);
        __threadfence();
        atomicExch(&clock.is_set, 1u);
    } else {
        while (!fresh(&clock.is_set)) {}
    }
    __threadfence();
    begin = fresh(&clock.taken), end = fresh(&clock.taking);
}

// What a slot that was asked for is to hold, if nobody has it already and the block still exists.
struct Travel {
    uint32 key, since;
};
constexpr uint64 NO_TRAVEL = 0xffffffffffffffffull;

__device__ inline bool look_up(const Layer &layer, uint32 slot, Travel &travel) {
    // Whoever gives the slot away from here on asks for it anew.
    atomicExch(layer.asked + slot, 0u);
    __threadfence();
    travel.key = fresh(layer.holds + slot);
    if (travel.key == NOBODY) return false;
    const Home home = unpack(fresh(layer.homes + travel.key));
    travel.since = home.since;
    return home.slot == slot && !home.is_there();
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
    __shared__ uint64 begin, end;
    __shared__ uint32 made;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Layer &layer = p.layer;
    Clock &clock = *layer.clock;
    if (threadIdx.x == 0) made = 0, agree(clock, begin, end);
    __syncthreads();
    const uint32 ring_size = 2 * p.cache.slots, asked = end - begin, ring_begin = begin % ring_size;
    // CTA after CTA, so that few runs keep all of them busy.
    const uint32 all = gridDim.x * FETCH_WARPS, first = warp * gridDim.x + blockIdx.x;
    if (first < asked) {
        Copier copier(room, arrived, landing, warp, lane);
        uint32 copies = 0;
        for (uint32 batch = first; batch < asked; batch += WARP * all) {
            const uint32 n = batch + lane * all;
            uint32 slot = 0, at = ring_begin + n;
            at -= at >= ring_size ? ring_size : 0;
            Travel travel = {NOBODY, NOBODY};
            bool exists = false;
            if (n < asked) {
                slot = slot_at(layer.ring + at, begin + n);
                exists = look_up(layer, slot, travel);
                layer.travels[at] = exists ? uint64(travel.since) << 32 | travel.key : NO_TRAVEL;
            }
            const char *source = layer.host + travel.key * p.cache.run;
            char *target = layer.pool + uint64(p.cache.first_slot + slot) * p.cache.run;
            for (uint32 left = __ballot_sync(FULL_WARP, exists); left; left &= left - 1) {
                const uint32 from = __ffs(left) - 1;
                const auto source_of = __shfl_sync(FULL_WARP, reinterpret_cast<uint64>(source), from);
                const auto target_of = __shfl_sync(FULL_WARP, reinterpret_cast<uint64>(target), from);
                copier.copy(reinterpret_cast<const char *>(source_of), reinterpret_cast<char *>(target_of), p.cache.run);
                __syncwarp();
                ++copies;
            }
        }
        copier.finish();
        __threadfence();
        for (uint32 n = first + lane * all; n < asked; n += WARP * all) {
            uint32 at = ring_begin + n;
            at -= at >= ring_size ? ring_size : 0;
            const uint64 travel = layer.travels[at];
            if (travel == NO_TRAVEL) continue;
            const Home before = {uint32(layer.ring[at]), uint32(travel >> 32)}, after = {before.slot, before.since | 1};
            atomicCAS(layer.homes + uint32(travel), pack(before), pack(after));
        }
        if (lane == 0) atomicAdd(&made, copies);
    }
    __syncthreads();
    if (threadIdx.x) return;
    if (made) atomicAdd(&clock.totals.fetched, made * p.cache.run);
    __threadfence();
    if (atomicAdd(&clock.left, 1u) + 1 < gridDim.x) return;
    clock.totals.waits += p.is_wait && asked;
    clock.taken = end;
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
