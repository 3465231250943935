// Resolve: wanted blocks to slots.
//
//   find   a CTA for each list: blocks that have a slot are named, of the others each is claimed once
//   give   one CTA, or a cluster: a slot for each claimed block, and for its other entries
//
// The search for slots is a clock: the hand goes over slots, gives away those that nobody has named since it last came by, and takes that
// chance from the others. What the last `hold` resolves have named stays in any case; a call names at most slots / hold, so two rounds of
// the hand find enough.
//
// Warps of all CTAs take turns at the slots from the hand on, a lane one slot in each turn, so that the slots given are spread over the
// cluster however few they are:
//
//   look at own slots ─ tell each CTA how many may go ─ barrier ─ rank them ─ give those of a rank below the claims
//
// Nothing is fenced: copies that run beside a resolve may see its writes in any order (copies.cu).
//
// Time: dependent accesses, no memory to speak of: three to find a block; for one that needs a slot one to list it, one to see which slots
// may go, one to give it one. What they need of parameters and of memory that is not new is there before the kernel before ends.
//
// On entry: the sequences are fewer than max_sequences, all entries together (`entries`) at most slots / hold.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"

#include "cache/layout.cuh"

constexpr uint32 FIND_THREADS = 128, FIND_WARPS = FIND_THREADS / WARP;
constexpr uint32 MOST_THREADS = 1024, MOST_CTAS = 8;           // of `give`
constexpr uint32 TURNS = 4;  // of a warp, side by side

struct Place {
    uint32 i, position, head;
};
__device__ inline Place place_of(const ResolveParams &p, uint32 list) {
    const uint32 row = p.heads.divide(list), i = p.positions.divide(row);
    return {i, row - i * p.positions.value, list - row * p.heads.value};
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

// As one access.
__device__ inline void store(Missed *at, const Missed &missed) {
    const uint64 cell = reinterpret_cast<uint64>(missed.cell);
    *reinterpret_cast<uint4 *>(at) = {uint32(cell), uint32(cell >> 32), missed.key, 0};
}
__device__ inline Missed load(const Missed *at) {
    const uint4 bits = __ldcg(reinterpret_cast<const uint4 *>(at));
    return {reinterpret_cast<int32 *>(uint64(bits.y) << 32 | bits.x), bits.z};
}

// Of the sequence of a list.
struct Sequence {
    int32 blocks;
    uint32 number;
    Tail tail;
};

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
    // Most have a home: an atomic for each of them would take longer than one more access takes the others.
    uint64 bits = __ldcg(p.layer.homes + found.key);
    if (bits == NO_HOME) bits = atomicCAS(p.layer.homes + found.key, NO_HOME, CLAIMED_HOME);
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
    __shared__ uint32 counts[FIND_WARPS];  // of each warp: entries that are there; above 16 bits, those that are missed
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const Place at = place_of(p, blockIdx.x);
    const char *ids = ids_at(p.wanted, at), *first_id = ids + threadIdx.x * p.wanted.ids_entry;
    const char *number_of = p.sequences + at.i * p.sequences_seq, *count_of = counts_at(p.wanted, at);
    char *slots = slots_at(p.wanted, at);
    // On the way already when the kernel before ends. Sequences of a batch are often the first, in order.
    if (threadIdx.x < p.cap.value) prefetch(first_id);
    prefetch(threadIdx.x == 0 ? number_of : count_of);
    if (threadIdx.x == 0) prefetch(p.layer.clock);
    if (at.i < p.cache.max_sequences) {
        constexpr uint32 LINE = 128 / sizeof(int32);
        prefetch(threadIdx.x == 0 ? static_cast<const void *>(p.cache.lens + at.i) : p.layer.tails + at.i);
        if (threadIdx.x * LINE < p.cache.max_blocks) prefetch(p.cache.table + uint64(at.i) * p.cache.max_blocks + threadIdx.x * LINE);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    // What does not depend on each other is asked for at once, whether it counts or not.
    const uint32 number = as<uint32>(number_of), now = p.layer.clock->now + 1;
    const int32 given = as<int32>(count_of);
    int32 next = threadIdx.x < p.cap.value ? as<int32>(first_id) : -1;
    __syncwarp();  // so that none of them is put off
    const bool exists = number < p.cache.max_sequences;
    const uint32 known = exists ? number : 0;
    const int32 *row = p.cache.table + uint64(known) * p.cache.max_blocks;
    const int32 len = p.cache.lens[known];
    const int2 tail = *reinterpret_cast<const int2 *>(p.layer.tails + known);
    int32 block = uint32(next) < p.cache.max_blocks ? row[next] : 0;
    __syncwarp();
    const Sequence sequence = {exists ? min(len, tail.x + 1) : 0, known, {tail.x, tail.y}};
    const uint32 count = min(uint32(max(given, 0)), p.cap.value);
    uint32 there = 0, missed = 0;
    for (uint32 first = 0; first < count; first += FIND_THREADS) {
        const uint32 j = first + threadIdx.x, after = j + FIND_THREADS;
        const int32 id = j < count ? next : -1;
        next = after < count ? as<int32>(ids + after * p.wanted.ids_entry) : -1;
        const Found found = find(p, sequence, at.head, id, block, now);
        const uint32 claiming = __ballot_sync(FULL_WARP, found.claims), others = __ballot_sync(FULL_WARP, found.waits && !found.claims);
        // Of the first lane `claimed`, of the second `waiting`, which follows it.
        const uint32 listed = __popc(lane == 0 ? claiming : lane == 1 ? others : 0);
        uint32 begin = 0;
        if (listed) begin = atomicAdd(&p.layer.clock->claimed + lane, listed);
        block = uint32(next) < p.cache.max_blocks ? row[next] : 0;
        // Before `begin` is there.
        int32 *cell = &as<int32>(slots + j * p.wanted.slots_entry);
        if (j < count && !found.waits) *cell = found.slot;
        const uint32 present = __ballot_sync(FULL_WARP, found.is_there);
        const uint32 absent = __ballot_sync(FULL_WARP, found.waits || (found.slot >= 0 && !found.is_there));
        if (lane == 0) counts[warp] = __popc(present) | __popc(absent) << 16;
        __syncthreads();
        uint32 to = there + __popc(present & below);
        for (uint32 w = 0; w < FIND_WARPS; ++w) {
            there += counts[w] & 0xffff, missed += counts[w] >> 16;
            if (w < warp) to += counts[w] & 0xffff;
        }
        if (found.is_there && p.resident.ids) {
            as<int32>(ids_at(p.resident, at) + to * p.resident.ids_entry) = id;
            as<int32>(slots_at(p.resident, at) + to * p.resident.slots_entry) = found.slot;
        }
        if (claiming | others) {
            const uint32 claims_at = __shfl_sync(FULL_WARP, begin, 0) + __popc(claiming & below);
            const uint32 waits_at = __shfl_sync(FULL_WARP, begin, 1) + __popc(others & below);
            if (found.waits) store(found.claims ? p.layer.claims + claims_at : p.layer.others + waits_at, {cell, found.key});
        }
        if (first + FIND_THREADS < count) __syncthreads();
    }
    if (threadIdx.x) return;
    if (p.resident.ids) as<int32>(counts_at(p.resident, at)) = there;
    if (p.missed) as<int32>(p.missed + at.i * p.missed_seq + at.position * p.missed_position + at.head * p.missed_head) = missed;
    // Both at once: neither sum passes 32 bits.
    if (there | missed) atomicAdd(reinterpret_cast<uint64 *>(&p.layer.clock->hits), uint64(missed) << 32 | there);
}

// Slots of a lane, as they are.
struct Seen {
    uint32 slot[TURNS], named[TURNS];
    uint64 held[TURNS];
};
// Of the `span` slots from the hand on those from `first` on, `step` apart: what `find` leaves alone. Copies may begin and end meanwhile.
__device__ inline void look_ahead(const ResolveParams &p, uint32 hand, uint32 first, uint32 step, uint32 span, Seen &seen) {
#pragma unroll
    for (uint32 k = 0; k < TURNS; ++k) {
        const uint32 n = first + k * step;
        const uint32 s = seen.slot[k] = hand + n - (hand + n >= p.cache.slots ? p.cache.slots : 0);
        seen.held[k] = NO_HOME;
        if (n >= span) continue;
        seen.held[k] = __ldcg(p.layer.holds + s);
        prefetch(p.layer.named + s);
    }
}
// And when they were named.
__device__ inline void look(const ResolveParams &p, uint32 first, uint32 step, uint32 span, uint32 now, Seen &seen) {
#pragma unroll
    for (uint32 k = 0; k < TURNS; ++k) {
        // Past the span: one that stays.
        seen.named[k] = named_at(now);
        if (first + k * step < span) seen.named[k] = __ldcg(p.layer.named + seen.slot[k]);
    }
}

// Slots that may go: all, and of these those before each turn of this warp. Of every warp it is told how many in each of its turns, a byte.
struct Ranks {
    uint32 all, before[TURNS];
};
constexpr uint32 MOST_WARPS = MOST_CTAS * MOST_THREADS / WARP, OF_LANE = MOST_WARPS / WARP;
__device__ inline Ranks rank(const uint32 *counts, uint32 turn) {
    const uint32 lane = threadIdx.x % WARP;
    uint32 sums[2] = {}, earlier[2] = {};  // of turns 0 and 2, and of 1 and 3
#pragma unroll
    for (uint32 n = 0; n < OF_LANE; n += 4) {
        const uint4 four = *reinterpret_cast<const uint4 *>(counts + lane * OF_LANE + n);
        const uint32 count[] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32 m = 0; m < 4; ++m) {
#pragma unroll
            for (uint32 odd = 0; odd < 2; ++odd) {
                const uint32 of_two = count[m] >> 8 * odd & 0x00ff00ff;
                sums[odd] += of_two;
                if (lane * OF_LANE + n + m < turn) earlier[odd] += of_two;
            }
        }
    }
    Ranks ranks = {};
#pragma unroll
    for (uint32 odd = 0; odd < 2; ++odd) {
        sums[odd] = __reduce_add_sync(FULL_WARP, sums[odd]);
        earlier[odd] = __reduce_add_sync(FULL_WARP, earlier[odd]);
    }
#pragma unroll
    for (uint32 k = 0; k < TURNS; ++k) {
        ranks.before[k] = ranks.all + (earlier[k % 2] >> 16 * (k / 2) & 0xffff);
        ranks.all += sums[k % 2] >> 16 * (k / 2) & 0xffff;
    }
    return ranks;
}

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

// How many claims a CTA keeps, and how many of these a thread brings; the first before anybody knows how many there are.
constexpr uint32 KEPT = 2 * MOST_THREADS, KEPT_EACH = 4;

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
    __shared__ Missed kept[KEPT];
    __shared__ alignas(16) uint32 counts[MOST_WARPS];  // see Ranks
    __shared__ Exchange exchange;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const uint32 ctas = cluster_ctas(), cta = cluster_rank(), warps = ctas * (blockDim.x / WARP), turn = warp * ctas + cta;
    exchange.open();
    Clock &clock = *p.layer.clock;
    const Layer &layer = p.layer;
    // `find` leaves these alone, and all before it has ended: it lets this begin when it has waited.
    const uint32 now = clock.now + 1, slots = p.cache.slots, step = warps * WARP, span = min(slots, TURNS * step);
    const uint64 passed = clock.passed;
    uint32 hand = clock.hand;
    const uint32 first = turn * WARP + lane;
    // Nobody sends these.
    for (uint32 w = warps + threadIdx.x; w < MOST_WARPS; w += blockDim.x) counts[w] = 0;
    Seen seen;
    look_ahead(p, hand, first, step, span, seen);
    exchange.join();
    wait_for_previous_kernel();
    allow_next_kernel();
    // claimed, waiting, hits, misses
    const uint4 found = __ldcg(reinterpret_cast<const uint4 *>(&clock.claimed));
    look(p, first, step, span, now, seen);
    __syncwarp();  // so that none of them is put off
    const auto bring = [&](uint32 k, uint32 count) {
        const uint32 n = threadIdx.x + k * blockDim.x;
        if (n < count) copy_16(shared_address(kept + n), reinterpret_cast<const char *>(layer.claims + n));
    };
    bring(0, p.entries);
    const uint32 claimed = found.x, waiting = found.y, kept_count = min(claimed, min(KEPT, KEPT_EACH * blockDim.x));
    // Where the hand stops, so many slots after those of earlier rounds. By one thread, when all have read what it writes.
    const auto leave = [&](uint32 end, uint32 rounds) {
        const uint32 to = hand + end;
        tell(&clock.passed, passed + uint64(rounds) * span + end), tell(&clock.before, passed);
        clock.hand = to - (to >= slots ? slots : 0), clock.now = now;
        *reinterpret_cast<uint4 *>(&clock.claimed) = {0, 0, 0, 0};
        atomicAdd(&clock.totals.hits, uint64(found.z)), atomicAdd(&clock.totals.misses, uint64(found.w));
    };
    if (claimed == 0) {
        if (cta == 0 && threadIdx.x == 0) leave(0, 0);
        end_copies(), wait_copies<0>();
        return;
    }
#pragma unroll
    for (uint32 k = 1; k < KEPT_EACH; ++k) bring(k, kept_count);
    end_copies();
    for (uint32 done = 0, round = 0;; ++round) {
        uint32 may_go[TURNS], spared = 0, count = 0;  // lanes; turns
#pragma unroll
        for (uint32 k = 0; k < TURNS; ++k) {
            const bool is_old = age(now, seen.named[k]) >= p.cache.hold, had_chance = !(seen.named[k] & CHANCE);
            may_go[k] = __ballot_sync(FULL_WARP, is_old && had_chance);
            spared |= uint32(is_old && !had_chance) << k;
            count |= __popc(may_go[k]) << 8 * k;
        }
        exchange.send(counts + turn, count, warps);
        wait_copies<0>();
        exchange.receive(round);
        const uint32 left_over = claimed - done;
        const Ranks ranks = rank(counts, turn);
        const bool is_last = ranks.all >= left_over;
        uint32 end = 0, leaving = 0;  // blocks, and in the upper half those that were fetched for nothing
#pragma unroll
        for (uint32 k = 0; k < TURNS; ++k) {
            // Each warp for itself: most give nothing.
            if (ranks.before[k] >= left_over) break;
            const uint32 s = seen.slot[k], at = ranks.before[k] + __popc(may_go[k] & below);
            if (at >= left_over) continue;
            if (spared >> k & 1) layer.named[s] = seen.named[k] & ~CHANCE;
            if (!(may_go[k] >> lane & 1)) continue;
            if (seen.held[k] != NO_HOME) {
                const Home held = unpack(seen.held[k]);
                // Nobody waits for what it was: a copy that ends meanwhile finds another home, or has told it before.
                tell(layer.homes + held.slot, NO_HOME);
                leaving += 1 | uint32(held.is_there() && !(seen.named[k] & IN_USE)) << 16;
            }
            const uint32 number = done + at;
            const Missed claim = number < kept_count ? kept[number] : load(layer.claims + number);
            tell(layer.homes + claim.key, pack({s, now << 1})), tell(layer.holds + s, pack({claim.key, now << 1}));
            layer.named[s] = named_at(now) | CHANCE;
            *claim.cell = p.cache.first_slot + s;
            if (at + 1 == left_over) end = first + k * step + 1;
        }
        if (ranks.before[0] < left_over) {
            __syncwarp();
            if (end) leave(end, round);
            leaving = __reduce_add_sync(FULL_WARP, leaving);
            if (lane == 0 && leaving) {
                atomicAdd(&clock.totals.evictions, uint64(leaving & 0xffff));
                if (leaving >> 16) atomicAdd(&clock.totals.unused, uint64(leaving >> 16));
            }
        }
        // What the others have written is needed by the next round, and by entries that wait.
        if (is_last && !waiting) break;
        sync_all(ctas);
        if (is_last) break;
        done += ranks.all;
        hand += span;
        if (hand >= slots) hand -= slots;
        look_ahead(p, hand, first, step, span, seen);
        look(p, first, step, span, now, seen);
    }
    for (uint32 n = cta * blockDim.x + threadIdx.x; n < waiting; n += ctas * blockDim.x) {
        const Missed other = load(layer.others + n);
        *other.cell = p.cache.first_slot + unpack(__ldcg(layer.homes + other.key)).slot;
    }
}
