// Resolve: wanted blocks to slots.
//
//   find   a CTA for each list: blocks that have a slot are named, of the others each is claimed once
//   give   one CTA: a slot for each claimed block, and for its other entries
//
// The search for slots is a clock: the hand goes over slots, gives away those that nobody has named since it last came by, and takes that
// chance from the others. What the last `hold` resolves have named stays in any case; a call names at most slots / hold, so two rounds of
// the hand find enough.
//
// Time: dependent accesses, no memory to speak of: four to find a block; for one that needs a slot one to list it, one to see which slots
// may go, two to give it one.
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
    // Looks and claims at once.
    const uint64 bits = atomicCAS(p.layer.homes + found.key, NO_HOME, CLAIMED_HOME);
    const Home home = unpack(bits);
    if (home.slot >= CLAIMED) {
        found.waits = true, found.claims = bits == NO_HOME;
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
        const uint32 claiming = __ballot_sync(FULL_WARP, found.claims), others = __ballot_sync(FULL_WARP, found.waits && !found.claims);
        if (claiming | others) {
            uint32 begin = 0;
            if (lane < 2) begin = atomicAdd(lane == 0 ? &p.layer.clock->claimed : &p.layer.clock->waiting, uint32(__popc(lane == 0 ? claiming : others)));
            const uint32 claims_at = __shfl_sync(FULL_WARP, begin, 0) + __popc(claiming & below);
            const uint32 waits_at = __shfl_sync(FULL_WARP, begin, 1) + __popc(others & below);
            const Missed entry = {at.list * p.cap.value + j, found.key};
            if (found.claims)
                p.layer.claims[claims_at] = entry;
            else if (found.waits)
                p.layer.others[waits_at] = entry;
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

// A slot that may be given away, as it was.
struct Victim {
    uint32 slot, named, held;
};
struct Given {
    uint32 asked, evictions, unused;
};

__device__ inline void set_slot(const ResolveParams &p, uint32 entry, uint32 slot) {
    const Place at = place_of(p, p.cap.divide(entry));
    const uint32 j = entry - at.list * p.cap.value;
    as<int32>(slots_at(p.wanted, at) + j * p.wanted.slots_entry) = p.cache.first_slot + slot;
}

// The slot is the block's of an entry from now on.
__device__ inline void give(const ResolveParams &p, const Victim &victim, const Missed &to, uint32 now, uint32 ring_end, Given *given) {
    const Layer &layer = p.layer;
    const uint32 s = victim.slot, ring_size = 2 * p.cache.slots;
    set_slot(p, to.entry, s);
    layer.named[s] = named_at(now) | CHANCE;
    layer.holds[s] = to.key;
    atomicExch(layer.homes + to.key, pack({s, now << 1}));
    const Home before = unpack(victim.held == NOBODY ? NO_HOME : atomicExch(layer.homes + victim.held, NO_HOME));
    // Copies that begin meanwhile see the block before the slot is asked for anew.
    __threadfence();
    const bool is_new = atomicExch(layer.asked + s, 1u) == 0;
    if (victim.held != NOBODY) atomicAdd(&given->evictions, 1u);
    if (victim.held != NOBODY && before.is_there() && !(victim.named & IN_USE)) atomicAdd(&given->unused, 1u);
    if (!is_new) return;
    const uint32 at = ring_end + atomicAdd(&given->asked, 1u);
    layer.ring[at - (at >= ring_size ? ring_size : 0)] = s;
}

extern "C" __global__ void __launch_bounds__(GIVE_THREADS) cache_give(const __grid_constant__ ResolveParams p) {
    __shared__ uint32 sums[GIVE_WARPS], end;
    __shared__ Victim victims[GIVE_THREADS];
    __shared__ Given given;
    Clock &clock = *p.layer.clock;
    const Layer &layer = p.layer;
    // `find` leaves these alone, and all before it has ended.
    const uint32 now = clock.now + 1, slots = p.cache.slots, span = min(slots, GIVE_THREADS * SIDE_BY_SIDE);
    const uint64 pushed = clock.pushed;
    const uint32 ring_end = pushed % (2 * slots);
    uint32 hand = clock.hand;
    if (threadIdx.x == 0) given = {0, 0, 0};
    wait_for_previous_kernel();
    allow_next_kernel();
    const uint32 claimed = __ldcg(&clock.claimed), waiting = __ldcg(&clock.waiting);
    // The first round of claims; the entries past them are of no use, but they exist.
    Missed claim = layer.claims[min(threadIdx.x, claimed - (claimed > 0))];
    for (uint32 done = 0; done < claimed;) {
        uint32 slot[SIDE_BY_SIDE], named[SIDE_BY_SIDE], held[SIDE_BY_SIDE], may_go = 0, spared = 0;  // bits
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            const uint32 n = threadIdx.x * SIDE_BY_SIDE + k;
            slot[k] = hand + n - (hand + n >= slots ? slots : 0);
            if (n >= span) continue;
            named[k] = __ldcg(layer.named + slot[k]), held[k] = __ldcg(layer.holds + slot[k]);
            const bool is_old = age(now, named[k]) >= p.cache.hold;
            may_go |= uint32(is_old && !(named[k] & CHANCE)) << k;
            spared |= uint32(is_old && (named[k] & CHANCE)) << k;
        }
        // No more than there are claims for, or threads to give them.
        const uint32 most = min(claimed - done, GIVE_THREADS);
        if (threadIdx.x == 0) end = span;
        uint32 all, rank = sum_before(__popc(may_go), sums, all);
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            if (!(may_go >> k & 1)) continue;
            if (rank < most) victims[rank] = {slot[k], named[k], held[k]};
            if (rank + 1 == most) end = threadIdx.x * SIDE_BY_SIDE + k + 1;
            ++rank;
        }
        __syncthreads();
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k)
            if ((spared >> k & 1) && threadIdx.x * SIDE_BY_SIDE + k < end) layer.named[slot[k]] = named[k] & ~CHANCE;
        const uint32 found = min(all, most);
        if (done > 0 && threadIdx.x < found) claim = layer.claims[done + threadIdx.x];
        if (threadIdx.x < found) give(p, victims[threadIdx.x], claim, now, ring_end, &given);
        done += found;
        hand += end;
        if (hand >= slots) hand -= slots;
        __syncthreads();
    }
    for (uint32 n = threadIdx.x; n < waiting; n += GIVE_THREADS) {
        const Missed other = layer.others[n];
        set_slot(p, other.entry, unpack(__ldcg(layer.homes + other.key)).slot);
    }
    __syncthreads();
    if (threadIdx.x) return;
    clock.totals.hits += __ldcg(&clock.hits), clock.totals.misses += __ldcg(&clock.misses);
    clock.totals.evictions += given.evictions, clock.totals.unused += given.unused;
    clock.hits = clock.misses = clock.claimed = clock.waiting = 0;
    clock.now = now, clock.hand = hand;
    __threadfence();
    *reinterpret_cast<volatile uint64 *>(&clock.pushed) = pushed + given.asked;
}
