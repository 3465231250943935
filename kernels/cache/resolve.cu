// Resolve: wanted blocks to slots.
//
//   find   a CTA for each list: blocks that have a slot are named, of the others each is claimed once
//   give   one CTA, or a cluster: a slot for each claimed block, and for its other entries
//
// The search for slots is a clock: the hand goes over slots, gives away those that nobody has named since it last came by, and takes that
// chance from the others. What the last `hold` resolves have named stays in any case; a call names at most slots / hold, so two rounds of
// the hand find enough.
//
// Warps of all CTAs take turns at the slots from the hand on, so that the slots given are spread over the cluster wherever they lie:
//
//   look at own slots ─ tell each CTA how many may go ─ barrier ─ rank them ─ give those of a rank below the claims ─ barrier ─ hand on
//
// Time: dependent accesses, no memory to speak of: three to find a block; for one that needs a slot one to list it, one to see which slots
// may go, one to give it one.
//
// On entry: the sequences are fewer than max_sequences, all entries together (`entries`) at most slots / hold.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"
#include "common/cluster.cuh"

#include "cache/layout.cuh"

constexpr uint32 FIND_THREADS = 128, FIND_WARPS = FIND_THREADS / WARP;
constexpr uint32 MOST_THREADS = 1024, MOST_CTAS = 8;           // of `give`
constexpr uint32 SIDE_BY_SIDE = 4, TURN = SIDE_BY_SIDE * WARP;  // slots of a lane, and of a warp

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
__device__ inline Sequence sequence_of(const ResolveParams &p, uint32 number) {
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
__device__ inline Found find(const ResolveParams &p, const Sequence &sequence, uint32 head, int32 id, int32 block, uint32 now) {
    Found found;
    if (id < 0 || id >= sequence.blocks) return found;
    if (holds(sequence.tail, id)) {
        found.slot = p.cache.tail_page(sequence.number, id) * p.cache.heads.value + head, found.is_there = true;
        return found;
    }
    found.key = block * p.cache.heads.value + head;
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

extern "C" __global__ void __launch_bounds__(FIND_THREADS, 8) cache_find(const __grid_constant__ ResolveParams p) {
    __shared__ uint32 there_of[FIND_WARPS];
    wait_for_previous_kernel();
    allow_next_kernel();
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const Place at = place_of(p, blockIdx.x);
    const char *ids = ids_at(p.wanted, at);
    char *slots = slots_at(p.wanted, at);
    // What does not depend on each other is asked for at once, whether it counts or not.
    const uint32 number = as<uint32>(p.sequences + at.i * p.sequences_seq), now = p.layer.clock->now + 1;
    const int32 given = as<int32>(counts_at(p.wanted, at));
    int32 next = threadIdx.x < p.cap.value ? as<int32>(ids + threadIdx.x * p.wanted.ids_entry) : -1;
    __syncwarp();  // so that none of them is put off
    const Sequence sequence = sequence_of(p, number);
    const uint32 count = min(uint32(max(given, 0)), p.cap.value);
    uint32 there = 0, missed = 0;  // of the list, and of the lane's entries
    for (uint32 first = 0; first < count; first += FIND_THREADS) {
        const uint32 j = first + threadIdx.x, after = j + FIND_THREADS;
        const int32 id = j < count ? next : -1;
        const int32 block = uint32(id) < p.cache.max_blocks ? sequence.row[id] : 0;
        next = after < count ? as<int32>(ids + after * p.wanted.ids_entry) : -1;
        const Found found = find(p, sequence, at.head, id, block, now);
        const uint32 claiming = __ballot_sync(FULL_WARP, found.claims), others = __ballot_sync(FULL_WARP, found.waits && !found.claims);
        if (claiming | others) {
            uint32 begin = 0;
            if (lane == 0 && claiming) begin = atomicAdd(&p.layer.clock->claimed, uint32(__popc(claiming)));
            if (lane == 1 && others) begin = atomicAdd(&p.layer.clock->waiting, uint32(__popc(others)));
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

__device__ inline void set_slot(const ResolveParams &p, uint32 entry, uint32 slot) {
    const Place at = place_of(p, p.cap.divide(entry));
    const uint32 j = entry - at.list * p.cap.value;
    as<int32>(slots_at(p.wanted, at) + j * p.wanted.slots_entry) = p.cache.first_slot + slot;
}

// Slots of a lane, as they are.
struct Seen {
    uint32 slot[SIDE_BY_SIDE], named[SIDE_BY_SIDE], held[SIDE_BY_SIDE], asked[SIDE_BY_SIDE];
};
// Of the `span` slots from the hand on those from `first` on, WARP apart.
__device__ inline void look(const ResolveParams &p, uint32 hand, uint32 first, uint32 span, uint32 now, Seen &seen) {
#pragma unroll
    for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
        const uint32 n = first + k * WARP;
        const uint32 s = seen.slot[k] = hand + n - (hand + n >= p.cache.slots ? p.cache.slots : 0);
        // Past the span: one that stays.
        seen.named[k] = named_at(now), seen.held[k] = NOBODY, seen.asked[k] = 0;
        if (n < span) seen.named[k] = __ldcg(p.layer.named + s), seen.held[k] = __ldcg(p.layer.holds + s), seen.asked[k] = __ldcg(p.layer.asked + s);
    }
}

__device__ inline Missed claim_of(const Layer &layer, uint32 n) {
    const uint2 claim = __ldcg(reinterpret_cast<const uint2 *>(layer.claims + n));
    return {claim.x, claim.y};
}

// What the slots of a call come to in one CTA.
struct Given {
    uint32 evictions, unused;
    uint32 end;  // where the hand stops, if it does so here
};

// Words that the CTAs of a cluster, or one that is alone, send to each other in rounds. Nothing is fenced: a word and the news of its
// arrival travel together (st.async). open() ─ join() ─ [ send() ─ receive() ─ sync_all() ] …
struct Exchange {
    Barrier arrived;  // of the bytes still to come in a round

    // Early: between this and join() the CTAs of the cluster start.
    __device__ void open() {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() == 1) return;
        if (threadIdx.x == 0) arrived.open(1);
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }
    __device__ void join() const {
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() == 1) return;
        __syncwarp();
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
    // A warp's word to each CTA, to where p lies there; so many warps send one.
    __device__ void send(uint32 *p, uint32 x, uint32 warps) const {
        const uint32 lane = threadIdx.x % WARP;
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() > 1) {
            if (threadIdx.x == 0) arrived.expect(warps * sizeof(uint32));
            if (lane < cluster_ctas())
                asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(lane, p)), "r"(x),
                             "r"(address_in(lane, &arrived)) : "memory");
            return;
        }
#endif
        if (lane == 0) *p = x;
    }
    // By all threads, which also see what their CTA wrote before.
    __device__ void receive(uint32 round) const {
        __syncthreads();
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() > 1) arrived.wait(round);
#endif
    }
};

// How many claims are loaded before anybody knows how many there are.
constexpr uint32 KEPT = 2;  // by a thread

// All writes of a cluster, or of a CTA that is alone, are there for all its threads.
__device__ inline void sync_all(uint32 ctas) {
    if (ctas == 1) {
        __syncthreads();
    } else {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) cache_give(const __grid_constant__ ResolveParams p) {
    __shared__ Missed kept[KEPT * MOST_THREADS];
    __shared__ uint32 taken[MOST_THREADS * SIDE_BY_SIDE];       // slots that a warp gives, in turn
    __shared__ uint32 counts[MOST_CTAS * MOST_THREADS / WARP];  // of each warp: how many may go; above 16 bits, whether one is asked for already
    __shared__ Given given;
    __shared__ Exchange exchange;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const uint32 ctas = cluster_ctas(), cta = cluster_rank(), warps = ctas * (blockDim.x / WARP), turn = warp * ctas + cta;
    exchange.open();
    Clock &clock = *p.layer.clock;
    const Layer &layer = p.layer;
    // `find` leaves these alone, and all before it has ended.
    const uint32 now = clock.now + 1, slots = p.cache.slots, ring_size = 2 * slots, span = min(slots, warps * TURN);
    const uint64 pushed = clock.pushed;
    const uint32 ring_end = pushed % ring_size;
    const auto ring_place = [=](uint32 n) { return n - (n >= ring_size ? ring_size : 0); };
    uint32 hand = clock.hand;
    if (threadIdx.x == 0) given = {0, 0, 0};
    wait_for_previous_kernel();
    allow_next_kernel();
    // claimed, waiting, hits, misses
    const uint4 found = __ldcg(reinterpret_cast<const uint4 *>(&clock.claimed));
    Missed early[KEPT];
#pragma unroll
    for (uint32 k = 0; k < KEPT; ++k) {
        const uint32 n = threadIdx.x + k * blockDim.x;
        if (n < p.entries) early[k] = claim_of(layer, n);
    }
    const uint32 first = turn * TURN + lane;
    Seen seen;
    look(p, hand, first, span, now, seen);
#pragma unroll
    for (uint32 k = 0; k < KEPT; ++k) kept[threadIdx.x + k * blockDim.x] = early[k];
    exchange.join();
    const uint32 claimed = found.x, waiting = found.y;
    // Places in the ring follow the ranks, but if one of the slots is asked for already: then a copy that begins meanwhile may take it off
    // the ring, and from this rank on places are drawn one by one.
    bool is_drawn = false;
    uint32 in_turn = 0;
    for (uint32 done = 0, round = 0; done < claimed; ++round) {
        uint32 may_go[SIDE_BY_SIDE], spared = 0, count = 0;  // bits
        bool is_asked = false;
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            const bool is_old = age(now, seen.named[k]) >= p.cache.hold, had_chance = !(seen.named[k] & CHANCE);
            may_go[k] = __ballot_sync(FULL_WARP, is_old && had_chance);
            spared |= uint32(is_old && !had_chance) << k;
            is_asked |= is_old && had_chance && seen.asked[k];
            count += __popc(may_go[k]);
        }
        is_asked = __ballot_sync(FULL_WARP, is_asked);
        exchange.send(counts + turn, count | uint32(is_asked) << 16, warps);
        exchange.receive(round);
        uint32 all = 0, before = 0;
        for (uint32 w = lane; w < warps; w += WARP) {
            all += counts[w];
            if (w < turn) before += counts[w];
        }
        all = __reduce_add_sync(FULL_WARP, all), before = __reduce_add_sync(FULL_WARP, before) & 0xffff;
        if (all >> 16 && !is_drawn) is_drawn = true, in_turn = done;
        const uint32 left_over = claimed - done, mine = before < left_over ? min(count, left_over - before) : 0, rank = done + before;
        uint32 *slots_taken = taken + warp * TURN, n = 0, is_leaving = 0;
        uint64 left[SIDE_BY_SIDE];
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k) {
            const uint32 s = seen.slot[k], at = n + __popc(may_go[k] & below);
            n += __popc(may_go[k]);
            left[k] = NO_HOME;
            if (before + at >= left_over) continue;
            if (spared >> k & 1) layer.named[s] = seen.named[k] & ~CHANCE;
            if (!(may_go[k] >> lane & 1)) continue;
            slots_taken[at] = s;
            if (before + at + 1 == left_over) given.end = first + k * WARP + 1;
            if (seen.held[k] == NOBODY) continue;
            left[k] = atomicExch(layer.homes + seen.held[k], NO_HOME);
            is_leaving |= 1u << k;
        }
        __syncwarp();
#pragma unroll 1
        for (uint32 v = lane; v < mine; v += WARP) {
            const uint32 s = slots_taken[v];
            const Missed to = rank + v < KEPT * blockDim.x ? kept[rank + v] : claim_of(layer, rank + v);
            set_slot(p, to.entry, s);
            layer.named[s] = named_at(now) | CHANCE;
            layer.holds[s] = to.key;
            *static_cast<volatile uint64 *>(layer.homes + to.key) = pack({s, now << 1});
            if (is_drawn) continue;
            layer.asked[s] = 1;
            layer.ring[ring_place(ring_end + rank + v)] = s;
        }
        if (is_drawn) {
            // Copies that begin meanwhile see the block before the slot is asked for anew.
            __threadfence();
#pragma unroll 1
            for (uint32 v = lane; v < mine; v += WARP)
                if (atomicExch(layer.asked + slots_taken[v], 1u) == 0)
                    layer.ring[ring_place(ring_end + in_turn + atomicAdd(&clock.drawn, 1u))] = slots_taken[v];
        }
        uint32 leaving = 0;  // blocks, and in the upper half those that were fetched for nothing
#pragma unroll
        for (uint32 k = 0; k < SIDE_BY_SIDE; ++k)
            if (is_leaving >> k & 1) leaving += 1 | uint32(unpack(left[k]).is_there() && !(seen.named[k] & IN_USE)) << 16;
        leaving = __reduce_add_sync(FULL_WARP, leaving);
        if (lane == 0 && leaving) {
            atomicAdd(&given.evictions, leaving & 0xffff);
            if (leaving >> 16) atomicAdd(&given.unused, leaving >> 16);
        }
        sync_all(ctas);
        done += min(all & 0xffff, left_over);
        if (done == claimed) break;
        hand += span;
        if (hand >= slots) hand -= slots;
        look(p, hand, first, span, now, seen);
    }
    for (uint32 n = cta * blockDim.x + threadIdx.x; n < waiting; n += ctas * blockDim.x) {
        const Missed other = layer.others[n];
        set_slot(p, other.entry, unpack(__ldcg(layer.homes + other.key)).slot);
    }
    if (threadIdx.x) return;
    // Where the hand stops, or at the first if it does not move.
    if (claimed > 0 ? given.end > 0 : cta == 0) {
        const uint32 more = is_drawn ? in_turn + __ldcg(&clock.drawn) : claimed;
        __threadfence();
        *static_cast<volatile uint64 *>(&clock.pushed) = pushed + more;
        hand += given.end;
        clock.hand = hand - (hand >= slots ? slots : 0), clock.now = now;
        clock.claimed = clock.waiting = clock.hits = clock.misses = clock.drawn = 0;
        atomicAdd(&clock.totals.hits, uint64(found.z)), atomicAdd(&clock.totals.misses, uint64(found.w));
    }
    if (given.evictions) atomicAdd(&clock.totals.evictions, uint64(given.evictions));
    if (given.unused) atomicAdd(&clock.totals.unused, uint64(given.unused));
}
