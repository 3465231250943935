// Resolve: wanted blocks to slots.
//
//   find   a CTA for each list: blocks that have a slot are named, of the others each is claimed once
//   give   one CTA: a slot for each claimed block, and the slots of the entries that wait for one
//
// The search for slots is a clock: the hand goes over slots, gives away those that nobody has named since it last came by, and takes that
// chance from the others. What the last `hold` resolves have named stays in any case; a call names at most slots / hold, so two rounds of
// the hand find enough.
//
// Time: four dependent reads to find a block, two to give it a slot; no memory to speak of.
//
// On entry: the sequences are fewer than max_sequences, all entries together at most slots / hold.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"

#include "cache/layout.cuh"

constexpr uint32 FIND_THREADS = 128, FIND_WARPS = FIND_THREADS / WARP;
constexpr uint32 GIVE_THREADS = 1024, GIVE_WARPS = GIVE_THREADS / WARP, SIDE_BY_SIDE = 4;

struct Place {
    uint32 list, i, position, head;
};
__device__ inline Place place_of(const ResolveParams &p, uint32 list) {
    const uint32 row = p.heads.divide(list), i = p.positions.divide(row);
    return {list, i, row - i * p.positions.value, list - row * p.heads.value};
}
__device__ inline char *counts_at(const ListRows &rows, const Place &at) {
    return rows.counts + at.i * rows.counts_seq + at.position * rows.counts_position + at.head * rows.counts_head;
}
__device__ inline char *ids_at(const ListRows &rows, const Place &at) {
    return rows.ids + at.i * rows.ids_seq + at.position * rows.ids_position + at.head * rows.ids_head;
}
__device__ inline char *slots_at(const ListRows &rows, const Place &at) {
    return rows.slots + at.i * rows.slots_seq + at.position * rows.slots_position + at.head * rows.slots_head;
}

// Of the sequence of a list.
struct Sequence {
    const int32 *row;
    int32 blocks;
    uint32 number;
    Tail tail;
};
__device__ inline Sequence sequence_of(const ResolveParams &p, uint32 i) {
    const uint32 number = as<uint32>(p.sequences + i * p.sequences_seq);
    if (number >= p.cache.max_sequences) return {p.cache.table, 0, 0, {-1, 0}};
    const Tail tail = p.layer.tails[number];
    return {p.cache.table + uint64(number) * p.cache.max_blocks, min(p.cache.lens[number], tail.newest + 1), number, tail};
}

// Where an entry's block is. `slot` −1: nowhere, or nowhere yet, and then the entry waits for `key`.
struct Found {
    int32 slot = -1;
    bool is_there = false, waits = false, claims = false;
    uint32 key = 0;
};
__device__ inline Found find(const ResolveParams &p, const Sequence &sequence, uint32 head, int32 id, uint32 now) {
    Found found;
    if (id < 0 || id >= sequence.blocks) return found;
    if (holds(sequence.tail, id)) {
        found.slot = p.cache.tail_page(sequence.number, id) * p.cache.heads.value + head, found.is_there = true;
        return found;
    }
    found.key = sequence.row[id] * p.cache.heads.value + head;
    const uint64 bits = __ldcg(p.layer.homes + found.key);
    const Home home = unpack(bits);
    if (home.slot >= CLAIMED) {
        found.waits = true;
        found.claims = bits == NO_HOME && atomicCAS(p.layer.homes + found.key, NO_HOME, CLAIMED_HOME) == NO_HOME;
        return found;
    }
    found.slot = p.cache.first_slot + home.slot, found.is_there = home.is_there();
    p.layer.named[home.slot] = named_at(now) | CHANCE | (found.is_there ? IN_USE : 0);
    return found;
}

extern "C" __global__ void __launch_bounds__(FIND_THREADS) cache_find(const __grid_constant__ ResolveParams p) {
    __shared__ uint32 there_of[FIND_WARPS];
    wait_for_previous_kernel();
    allow_next_kernel();
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const Place at = place_of(p, blockIdx.x);
    const Sequence sequence = sequence_of(p, at.i);
    const uint32 count = min(uint32(max(as<int32>(counts_at(p.wanted, at)), 0)), p.cap.value), now = p.layer.clock->now + 1;
    const char *ids = ids_at(p.wanted, at);
    char *slots = slots_at(p.wanted, at);
    uint32 there = 0, missed = 0;  // of the list, and of the lane's entries
    for (uint32 first = 0; first < count; first += FIND_THREADS) {
        const uint32 j = first + threadIdx.x;
        const int32 id = j < count ? as<int32>(ids + j * p.wanted.ids_entry) : -1;
        const Found found = find(p, sequence, at.head, id, now);
        const uint32 waiting = __ballot_sync(FULL_WARP, found.waits), claiming = __ballot_sync(FULL_WARP, found.claims);
        if (waiting) {
            // Room for those that wait, and for those that claim.
            uint32 begin = 0;
            if (lane < 2) begin = atomicAdd(lane == 0 ? &p.layer.clock->missed : &p.layer.clock->distinct, uint32(__popc(lane == 0 ? waiting : claiming)));
            const uint32 waits_at = __shfl_sync(FULL_WARP, begin, 0) + __popc(waiting & below);
            const uint32 claims_at = __shfl_sync(FULL_WARP, begin, 1) + __popc(claiming & below);
            if (found.waits) p.layer.missed[waits_at] = {at.list * p.cap.value + j, found.key};
            if (found.claims) p.layer.distinct[claims_at] = found.key;
        }
        if (j < count && !found.waits) as<int32>(slots + j * p.wanted.slots_entry) = found.slot;
        missed += found.waits || (found.slot >= 0 && !found.is_there);
        const uint32 present = __ballot_sync(FULL_WARP, found.is_there);
        if (lane == 0) there_of[warp] = __popc(present);
        __syncthreads();
        uint32 to = there + __popc(present & below);
        for (uint32 w = 0; w < FIND_WARPS; ++w) {
            there += there_of[w];
            if (w < warp) to += there_of[w];
        }
        if (found.is_there && p.resident.ids) {
            as<int32>(ids_at(p.resident, at) + to * p.resident.ids_entry) = id;
            as<int32>(slots_at(p.resident, at) + to * p.resident.slots_entry) = found.slot;
        }
        __syncthreads();
    }
    missed = __reduce_add_sync(FULL_WARP, missed);
    if (lane == 0) there_of[warp] = missed;
    __syncthreads();
    if (threadIdx.x) return;
    missed = 0;
    for (uint32 w = 0; w < FIND_WARPS; ++w) missed += there_of[w];
    if (p.resident.ids) as<int32>(counts_at(p.resident, at)) = there;
    if (p.missed) as<int32>(p.missed + at.i * p.missed_seq + at.position * p.missed_position + at.head * p.missed_head) = missed;
    if (there) atomicAdd(&p.layer.clock->hits, there);
    if (missed) atomicAdd(&p.layer.clock->misses, missed);
}

// Sum over the threads before this one, and over all.
__device__ inline uint32 sum_before(uint32 mine, uint32 *sums, uint32 &all) {
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint32 upto = mine;
    for (uint32 d = 1; d < WARP; d *= 2) {
        const uint32 other = __shfl_up_sync(FULL_WARP, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == WARP - 1) sums[warp] = upto;
    __syncthreads();
    const uint32 of_lane = lane < GIVE_WARPS ? sums[lane] : 0;
    uint32 scanned = of_lane;
    for (uint32 d = 1; d < WARP; d *= 2) {
        const uint32 other = __shfl_up_sync(FULL_WARP, scanned, d);
        if (lane >= d) scanned += other;
    }
    all = __shfl_sync(FULL_WARP, scanned, WARP - 1);
    const uint32 before = __shfl_sync(FULL_WARP, scanned - of_lane, warp);
    return before + upto - mine;
}

struct Given {
    uint32 asked, evictions, unused;
};

// Slot s is block `key`'s from now on.
__device__ inline void give(const Layer &layer, uint32 s, uint32 named, uint32 key, uint32 now, uint32 ring_end, uint32 ring_size, Given *given) {
    const uint32 old = layer.holds[s];
    if (old != NOBODY) {
        const Home home = unpack(atomicExch(layer.homes + old, NO_HOME));
        atomicAdd(&given->evictions, 1u);
        if (home.is_there() && !(named & IN_USE)) atomicAdd(&given->unused, 1u);
    }
    layer.holds[s] = key;
    layer.named[s] = named_at(now) | CHANCE;
    atomicExch(layer.homes + key, pack({s, now << 1}));
    // Copies that begin meanwhile see the block before the slot is asked for anew.
    __threadfence();
    if (atomicExch(layer.asked + s, 1u)) return;
    const uint32 at = ring_end + atomicAdd(&given->asked, 1u);
    layer.ring[at - (at >= ring_size ? ring_size : 0)] = s;
}

extern "C" __global__ void __launch_bounds__(GIVE_THREADS) cache_give(const __grid_constant__ ResolveParams p) {
    __shared__ uint32 sums[GIVE_WARPS], end;
    __shared__ Given given;
    wait_for_previous_kernel();
    allow_next_kernel();
    Clock &clock = *p.layer.clock;
    const Layer &layer = p.layer;
    const uint32 now = clock.now + 1, distinct = clock.distinct, missed = clock.missed, slots = p.cache.slots;
    const uint32 span = min(slots, GIVE_THREADS * SIDE_BY_SIDE);
    const uint64 pushed = clock.pushed;
    const uint32 ring_end = pushed % (2 * slots);
    uint32 hand = clock.hand;
    if (threadIdx.x == 0) given = {0, 0, 0};
    __syncthreads();
    for (uint32 done = 0; done < distinct;) {
        uint32 named[SIDE_BY_SIDE], victims = 0, spared = 0;  // bits
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            const uint32 n = threadIdx.x * SIDE_BY_SIDE + k, s = hand + n - (hand + n >= slots ? slots : 0);
            if (n >= span) continue;
            named[k] = layer.named[s];
            const bool may_go = age(now, named[k]) >= p.cache.hold;
            victims |= uint32(may_go && !(named[k] & CHANCE)) << k;
            spared |= uint32(may_go && (named[k] & CHANCE)) << k;
        }
        if (threadIdx.x == 0) end = span;
        uint32 all, rank = done + sum_before(__popc(victims), sums, all);
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            const uint32 n = threadIdx.x * SIDE_BY_SIDE + k, s = hand + n - (hand + n >= slots ? slots : 0);
            if (!(victims >> k & 1)) continue;
            if (rank < distinct) give(layer, s, named[k], layer.distinct[rank], now, ring_end, 2 * slots, &given);
            if (rank + 1 == distinct) end = n + 1;
            ++rank;
        }
        __syncthreads();
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            const uint32 n = threadIdx.x * SIDE_BY_SIDE + k, s = hand + n - (hand + n >= slots ? slots : 0);
            if ((spared >> k & 1) && n < end) layer.named[s] = named[k] & ~CHANCE;
        }
        done += all;
        hand += end;
        if (hand >= slots) hand -= slots;
        __syncthreads();
    }
    for (uint32 n = threadIdx.x; n < missed; n += GIVE_THREADS) {
        const Missed miss = layer.missed[n];
        const Place at = place_of(p, p.cap.divide(miss.entry));
        const uint32 j = miss.entry - at.list * p.cap.value;
        const int32 slot = p.cache.first_slot + unpack(__ldcg(layer.homes + miss.key)).slot;
        as<int32>(slots_at(p.wanted, at) + j * p.wanted.slots_entry) = slot;
    }
    __syncthreads();
    if (threadIdx.x) return;
    clock.totals.hits += clock.hits, clock.totals.misses += clock.misses;
    clock.totals.evictions += given.evictions, clock.totals.unused += given.unused;
    clock.hits = clock.misses = clock.missed = clock.distinct = 0;
    clock.now = now, clock.hand = hand;
    __threadfence();
    *reinterpret_cast<volatile uint64 *>(&clock.pushed) = pushed + given.asked;
}
