// Resolve: finds a slot for each wanted block.
//
//   cache_find   a CTA for each list: names the runs that have a slot, and claims each run that has none once
//   cache_give   one CTA, or a cluster: gives a slot to each claimed run, and writes it to all entries of the run
//
// Where p.first_far is given, entries whose runs are not resident name these in host memory, where attention reads them, instead of the slots that the
// runs get. So cache_give may run beside that attention, and the runs may be copied later.
//
// Slots are given away by the clock algorithm: a hand goes over the slots, gives away those that no resolve has named since it last passed,
// and takes that chance from the others. A run that one of the last `hold` resolves has named keeps its slot in any case. A call names no
// more runs than the `hold` − 1 resolves before it leave slots, so two rounds of the hand find enough slots.
//
// The warps of all CTAs take turns at the slots from the hand on, a slot per lane and turn, so that the slots to give are spread over the
// cluster however few they are. Phases of a round of cache_give:
//
//   look at the warp's slots ─ send each CTA the number of slots that may go ─ barrier ─ rank these slots ─ give those of a rank below the
//   number of claims
//
// There are no fences: copies that run at the same time as a resolve may see its writes in any order (copies.cu).
//
// Time: dependent accesses, hardly any bytes. To find a run takes three accesses; a run without a slot takes one more to list it, one to see
// which slots may go, and one to give it a slot. Parameters, and memory that the previous kernel does not write, are prefetched before that
// kernel ends.
//
// On entry: at most max_sequences sequences; the capacity of all lists together (`entries`) is at most what `hold` − 1 calls as large leave of the slots.
//
// targets: compute_80, compute_90

#include "cache/params.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"

#include "cache/layout.cuh"

constexpr uint32 FIND_THREADS = 128, FIND_WARPS = FIND_THREADS / WARP;
constexpr uint32 MOST_THREADS = 1024, MOST_CTAS = 8;           // of cache_give
constexpr uint32 TURNS = 4;  // turns of a warp in a round, interleaved

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

// Stores a Missed as one access.
__device__ inline void store(Missed *at, const Missed &missed) {
    const uint64 cell = reinterpret_cast<uint64>(missed.cell);
    *reinterpret_cast<uint4 *>(at) = {uint32(cell), uint32(cell >> 32), missed.host_run, 0};
}
__device__ inline Missed load(const Missed *at) {
    const uint4 bits = __ldcg(reinterpret_cast<const uint4 *>(at));
    return {reinterpret_cast<int32 *>(uint64(bits.y) << 32 | bits.x), bits.z};
}

// The sequence of a list.
struct Sequence {
    int32 blocks;
    uint32 number;
    Tail tail;
};

// The slot of an entry's block. It is −1 if the sequence does not have the block, or if the entry waits for `host_run` to get a slot.
struct Found {
    int32 slot = -1;
    bool is_resident = false, waits = false, claims = false;
    uint32 host_run = 0;
};
__device__ inline Found find(const ResolveParams &p, const Sequence &sequence, uint32 head, int32 id, int32 block, uint32 now) {
    Found found;
    if (id < 0 || id >= sequence.blocks) return found;
    if (is_in_tail(p.cache, sequence.tail, id)) {
        found.slot = p.cache.tail_page(sequence.number, id) * p.cache.heads.value + head, found.is_resident = true;
        return found;
    }
    found.host_run = block * p.cache.heads.value + head;
    // Most runs have a slot, so a load for all and an atomic for the others takes less time than an atomic for all.
    // Both accesses are volatile, since other CTAs may do the same to the run meanwhile.
    uint64 bits = *static_cast<const volatile uint64 *>(p.layer.homes + found.host_run);
    if (bits == NO_HOME) bits = atomicCAS(p.layer.homes + found.host_run, NO_HOME, CLAIMED_HOME);
    const Home home = unpack(bits);
    const bool has_slot = home.slot < CLAIMED;
    found.claims = bits == NO_HOME, found.waits = !has_slot && !p.first_far, found.is_resident = has_slot && home.is_resident();
    if (has_slot) static_cast<volatile uint32 *>(p.layer.named)[home.slot] = named_at(now) | CHANCE | (found.is_resident ? IN_USE : 0);
    if (p.first_far && !found.is_resident) {
        found.slot = p.first_far + found.host_run;
    } else if (has_slot) {
        found.slot = p.cache.first_slot + home.slot;
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(FIND_THREADS, 8) cache_find(const __grid_constant__ ResolveParams p) {
    __shared__ uint32 counts[FIND_WARPS];  // of each warp: the resident entries in the lower 16 bits, the missed entries in the upper
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const Place at = place_of(p, blockIdx.x);
    const char *ids = ids_at(p.wanted, at), *first_id = ids + threadIdx.x * p.wanted.ids_entry;
    const char *number_of = p.sequences + at.i * p.sequences_seq, *count_of = counts_at(p.wanted, at);
    char *slots = slots_at(p.wanted, at);
    // Prefetched before the previous kernel ends. The guess is that row i of the batch is sequence i.
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
    // Independent loads are issued together, whether or not their values are used.
    const uint32 number = as<uint32>(number_of), now = p.layer.clock->now + 1;
    const int32 given = as<int32>(count_of);
    int32 next = threadIdx.x < p.cap.value ? as<int32>(first_id) : -1;
    __syncwarp();  // keeps the compiler from moving the loads below
    const bool exists = number < p.cache.max_sequences;
    const uint32 known = exists ? number : 0;
    const int32 *row = p.cache.table + uint64(known) * p.cache.max_blocks;
    const int32 len = p.cache.lens[known];
    const int2 tail = *reinterpret_cast<const int2 *>(p.layer.tails + known);
    int32 block = uint32(next) < p.cache.max_blocks ? row[next] : 0;
    __syncwarp();
    const Sequence sequence = {exists ? min(len, tail.x + 1) : 0, known, {tail.x, tail.y, 0, 0}};
    const uint32 count = min(uint32(max(given, 0)), p.cap.value);
    uint32 resident_count = 0, missed = 0;
    for (uint32 first = 0; first < count; first += FIND_THREADS) {
        const uint32 j = first + threadIdx.x, after = j + FIND_THREADS;
        const int32 id = j < count ? next : -1;
        next = after < count ? as<int32>(ids + after * p.wanted.ids_entry) : -1;
        const Found found = find(p, sequence, at.head, id, block, now);
        const uint32 claiming = __ballot_sync(FULL_WARP, found.claims), others = __ballot_sync(FULL_WARP, found.waits && !found.claims);
        // Lane 0 adds to `claimed`, lane 1 to `waiting`, the field after it.
        const uint32 listed = __popc(lane == 0 ? claiming : lane == 1 ? others : 0);
        uint32 begin = 0;
        if (listed) begin = atomicAdd(&p.layer.clock->claimed + lane, listed);
        block = uint32(next) < p.cache.max_blocks ? row[next] : 0;
        // These stores do not wait for `begin`.
        int32 *cell = &as<int32>(slots + j * p.wanted.slots_entry);
        if (j < count && !found.waits) *cell = found.slot;
        const uint32 present = __ballot_sync(FULL_WARP, found.is_resident);
        const uint32 absent = __ballot_sync(FULL_WARP, found.waits || (found.slot >= 0 && !found.is_resident));
        if (lane == 0) counts[warp] = __popc(present) | __popc(absent) << 16;
        __syncthreads();
        uint32 to = resident_count + __popc(present & below);
        for (uint32 w = 0; w < FIND_WARPS; ++w) {
            resident_count += counts[w] & 0xffff, missed += counts[w] >> 16;
            if (w < warp) to += counts[w] & 0xffff;
        }
        if (found.is_resident && p.resident.ids) {
            as<int32>(ids_at(p.resident, at) + to * p.resident.ids_entry) = id;
            as<int32>(slots_at(p.resident, at) + to * p.resident.slots_entry) = found.slot;
        }
        if (claiming | others) {
            const uint32 claims_at = __shfl_sync(FULL_WARP, begin, 0) + __popc(claiming & below);
            const uint32 waits_at = __shfl_sync(FULL_WARP, begin, 1) + __popc(others & below);
            if (found.claims || found.waits) store(found.claims ? p.layer.claims + claims_at : p.layer.others + waits_at, {cell, found.host_run});
        }
        if (first + FIND_THREADS < count) __syncthreads();
    }
    if (threadIdx.x) return;
    if (p.resident.ids) as<int32>(counts_at(p.resident, at)) = resident_count;
    const int64 count_at = at.i * p.missed_seq + at.position * p.missed_position + at.head * p.missed_head;
    if (p.missed) as<int32>(p.missed + count_at) = missed;
    if (p.missed_again) as<int32>(p.missed_again + count_at) = missed;
    // One atomic adds to hits and misses: neither sum overflows 32 bits.
    if (resident_count | missed) atomicAdd(reinterpret_cast<uint64 *>(&p.layer.clock->hits), uint64(missed) << 32 | resident_count);
}

// The slots of a lane in a round: their numbers, when they were named, and what they hold.
struct Seen {
    uint32 slot[TURNS], named[TURNS];
    uint64 holds[TURNS];
};
// Loads what a lane's slots hold: of the `span` slots from the hand on, the slots from `first` on, `step` apart. cache_find does not write
// these words; copies may begin and end meanwhile.
__device__ inline void look_ahead(const ResolveParams &p, uint32 hand, uint32 first, uint32 step, uint32 span, Seen &seen) {
#pragma unroll
    for (uint32 k = 0; k < TURNS; ++k) {
        const uint32 n = first + k * step;
        const uint32 s = seen.slot[k] = hand + n - (hand + n >= p.layer.slots ? p.layer.slots : 0);
        seen.holds[k] = NO_HOME;
        if (n >= span) continue;
        seen.holds[k] = __ldcg(p.layer.holds + s);
        prefetch(p.layer.named + s);
    }
}
// Loads when a lane's slots were named.
__device__ inline void look(const ResolveParams &p, uint32 first, uint32 step, uint32 span, uint32 now, Seen &seen) {
#pragma unroll
    for (uint32 k = 0; k < TURNS; ++k) {
        // A slot past the span counts as just named, so it stays.
        seen.named[k] = named_at(now);
        if (first + k * step < span) seen.named[k] = __ldcg(p.layer.named + seen.slot[k]);
    }
}

// The number of slots that may go, and the number of those before each turn of this warp. `counts` has a word for every warp, with a byte
// for each of its turns.
struct Ranks {
    uint32 all, before[TURNS];
};
constexpr uint32 MOST_WARPS = MOST_CTAS * MOST_THREADS / WARP, OF_LANE = MOST_WARPS / WARP;
__device__ inline Ranks rank(const uint32 *counts, uint32 turn) {
    const uint32 lane = threadIdx.x % WARP;
    uint32 sums[2] = {}, earlier[2] = {};  // [0]: turns 0 and 2 in 16 bits each, [1]: turns 1 and 3
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

// Words that the CTAs of a cluster, or of a launch without clusters, send to each other in rounds. There are no fences: a word and the
// notice of its arrival copy together (st.async). open() ─ join() ─ [ send() ─ receive() ─ sync_all() ] …
struct Exchange {
    Barrier arrived;  // counts the bytes still to arrive in a round

    // Called early: the CTAs of the cluster start between open() and join().
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
    // Sends a warp's word to each CTA, to the address that p has there. `warps` warps of the cluster send a word in this round.
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
    // Waits for the words of a round. All threads call it; they also see what their CTA wrote before.
    __device__ void receive(uint32 round) const {
        __syncthreads();
#if __CUDA_ARCH__ >= 900
        if (cluster_ctas() > 1) arrived.wait(round);
#endif
    }
};

// The number of claims that a CTA copies to shared memory, and the number that a thread copies, the first before the number of claims is
// known.
constexpr uint32 SHARED_CLAIMS = 2 * MOST_THREADS, CLAIMS_PER_THREAD = 4;

// Makes all writes of a cluster, or of a CTA without a cluster, visible to all its threads.
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
    __shared__ Missed shared_claims[SHARED_CLAIMS];
    __shared__ alignas(16) uint32 counts[MOST_WARPS];  // see Ranks
    __shared__ Exchange exchange;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = (1u << lane) - 1;
    const uint32 ctas = cluster_ctas(), cta = cluster_rank(), warps = ctas * (blockDim.x / WARP), turn = warp * ctas + cta;
    exchange.open();
    Clock &clock = *p.layer.clock;
    const Layer &layer = p.layer;
    // cache_find does not write these words, and the kernels before it have ended: it allows this kernel to start after its own wait.
    const uint32 now = clock.now + 1, slots = p.layer.slots, step = warps * WARP, span = min(slots, TURNS * step);
    const uint64 passed = clock.passed;
    uint32 hand = clock.hand;
    const uint32 first = turn * WARP + lane;
    // No warp sends these words.
    for (uint32 w = warps + threadIdx.x; w < MOST_WARPS; w += blockDim.x) counts[w] = 0;
    Seen seen;
    look_ahead(p, hand, first, step, span, seen);
    exchange.join();
    wait_for_previous_kernel();
    allow_next_kernel();
    // claimed, waiting, hits, misses
    const uint4 found = __ldcg(reinterpret_cast<const uint4 *>(&clock.claimed));
    look(p, first, step, span, now, seen);
    __syncwarp();  // keeps the compiler from moving the loads below
    const auto copy_claim = [&](uint32 k, uint32 count) {
        const uint32 n = threadIdx.x + k * blockDim.x;
        if (n < count) copy_16(shared_address(shared_claims + n), reinterpret_cast<const char *>(layer.claims + n));
    };
    copy_claim(0, p.entries);
    const uint32 claimed = found.x, waiting = found.y, shared_count = min(claimed, min(SHARED_CLAIMS, CLAIMS_PER_THREAD * blockDim.x));
    // Writes the clock: the hand stops `end` slots after the slots of `rounds` earlier rounds. One thread calls it, when all threads have
    // read the words that it writes.
    const auto write_clock = [&](uint32 end, uint32 rounds) {
        const uint32 to = hand + end;
        store_volatile(&clock.passed, passed + uint64(rounds) * span + end), store_volatile(&clock.before, passed);
        clock.hand = to - (to >= slots ? slots : 0), clock.now = now;
        *reinterpret_cast<uint4 *>(&clock.claimed) = {0, 0, 0, 0};
        atomicAdd(&clock.totals.hits, uint64(found.z)), atomicAdd(&clock.totals.misses, uint64(found.w));
    };
    if (claimed == 0) {
        if (cta == 0 && threadIdx.x == 0) write_clock(0, 0);
        end_copies(), wait_copies<0>();
        return;
    }
#pragma unroll
    for (uint32 k = 1; k < CLAIMS_PER_THREAD; ++k) copy_claim(k, shared_count);
    end_copies();
    for (uint32 done = 0, round = 0;; ++round) {
        uint32 may_go[TURNS], spared = 0, count = 0;  // may_go: a bit per lane; spared: a bit per turn; count: a byte per turn
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
        uint32 end = 0, leaving = 0;  // leaving: evicted runs, and in the upper half those that were never used
#pragma unroll
        for (uint32 k = 0; k < TURNS; ++k) {
            // Each warp decides for itself, because most warps give no slot.
            if (ranks.before[k] >= left_over) break;
            const uint32 s = seen.slot[k], at = ranks.before[k] + __popc(may_go[k] & below);
            if (at >= left_over) continue;
            if (spared >> k & 1) layer.named[s] = seen.named[k] & ~CHANCE;
            if (!(may_go[k] >> lane & 1)) continue;
            const Home evicted = unpack(seen.holds[k]);
            if (evicted.slot < CLAIMED) {
                // No entry waits for the evicted run: a copy that ends meanwhile finds another home and leaves it, or has marked it before.
                store_volatile(layer.homes + evicted.slot, NO_HOME);
                leaving += 1 | uint32(evicted.is_resident() && !(seen.named[k] & IN_USE)) << 16;
            }
            const uint32 number = done + at;
            const Missed claim = number < shared_count ? shared_claims[number] : load(layer.claims + number);
            store_volatile(layer.homes + claim.host_run, pack({s, now << 1})), store_volatile(layer.holds + s, pack({claim.host_run, now << 1}));
            layer.named[s] = named_at(now) | CHANCE;
            if (!p.first_far) *claim.cell = p.cache.first_slot + s;
            if (at + 1 == left_over) end = first + k * step + 1;
        }
        if (ranks.before[0] < left_over) {
            __syncwarp();
            if (end) write_clock(end, round);
            leaving = __reduce_add_sync(FULL_WARP, leaving);
            if (lane == 0 && leaving) {
                atomicAdd(&clock.totals.evictions, uint64(leaving & 0xffff));
                if (leaving >> 16) atomicAdd(&clock.totals.unused, uint64(leaving >> 16));
            }
        }
        // The next round, and the entries that wait, read what other CTAs have written.
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
        *other.cell = p.cache.first_slot + unpack(__ldcg(layer.homes + other.host_run)).slot;
    }
}
