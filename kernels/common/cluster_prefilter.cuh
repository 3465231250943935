// The exact top k of keys that lie in the shared memory of a cluster's CTAs, neighbouring keys in each CTA.
//
// A key of 0 is never selected; larger keys come first, equal keys by their number. The keys of a few lanes are a group. Each group's largest
// key goes to all CTAs. The wanted-th largest of these is a lower bound of the wanted-th of all keys, as that many groups have a key which
// reaches it, and few other keys reach it. The keys that do go to the first CTA, which compares all of them with each other. Where they are
// too many, or more are wanted than groups can tell of, all keys go to the first CTA, which counts them (cta_topk.cuh).
//
// CTAs send words together with their arrival (st.async). Each CTA awaits all that is sent to it before it ends.
#pragma once

#include "common/cta_topk.cuh"

// Adds 1 to n if is_counted. Float additions do not wait for the comparisons, as integer additions would.
__device__ inline void count_if(bool is_counted, float &n) {
    asm("{\n\t.reg .pred p;\n\t"
        "setp.ne.u32 p, %1, 0;\n\t"
        "@p add.rn.f32 %0, %0, 0f3F800000;\n\t}" : "+f"(n) : "r"(uint32(is_counted)));
}

template <uint32 THREADS> struct ClusterPrefilterShared {
    static constexpr uint32 MOST_CTAS = 8;
    alignas(16) uint32 largest[THREADS];            // the largest key of each group of the cluster
    alignas(16) uint32 key[THREADS];                // in the first CTA: the keys that reach the bound, ascending by their number
    uint32 number[THREADS], per_warp[THREADS / WARP];
    uint32 count[MOST_CTAS];                        // in the first CTA: how many keys of each CTA reach the bound
    uint32 bound, sum;
    Barrier groups, counts, candidates, verdict, keys;     // bytes still to arrive
};

// The cluster has 2, 4 or 8 CTAs. Calls: open() ─ cluster_started() ─ divide() ─ put() of each() key ─ take()
template <uint32 THREADS> struct ClusterPrefilter {
    static constexpr uint32 WARPS = THREADS / WARP;
    static constexpr uint32 GROUPS = THREADS, MOST_COMPARED = THREADS;  // MOST_COMPARED: most keys that the first CTA compares
    static constexpr uint32 MOST_WANTED = GROUPS / 2;         // for more, groups would leave more than MOST_COMPARED keys
    ClusterPrefilterShared<THREADS> &shared;
    CtaTopKShared<THREADS> &top;
    uint32 *const cta_keys;   // this CTA's keys
    uint32 *const inbox;  // what arrives at the first CTA: two words for each of MOST_COMPARED keys of each CTA, or all keys
    const uint32 ctas, cta, log_ctas, thread, warp, lane;
    uint32 all, first, count;  // keys of the cluster; this CTA has keys first … first + count − 1
    uint32 largest;            // the largest key of this thread

    __device__ ClusterPrefilter(ClusterPrefilterShared<THREADS> &shared, CtaTopKShared<THREADS> &top, uint32 *cta_keys, uint32 *inbox)
        : shared(shared), top(top), cta_keys(cta_keys), inbox(inbox), ctas(cluster_ctas()), cta(cluster_rank()), log_ctas(log2_of(ctas)),
          thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP), all(0), first(0), count(0), largest(0) {}

    // Called by all threads, as all that follows. The CTAs of the cluster start between this and cluster_started().
    __device__ void open() const {
        if (thread == 0) {
            shared.groups.open(1), shared.counts.open(1), shared.candidates.open(1), shared.verdict.open(1), shared.keys.open(1);
            shared.groups.expect(GROUPS * sizeof(uint32));
            if (cta == 0) shared.counts.expect(ctas * sizeof(uint32));
            if (cta > 0) shared.verdict.expect(sizeof(uint32));
        }
        __syncwarp();
        cluster_start();
    }
    // Finds the CTA's share of `keys` keys, a multiple of four.
    __device__ void divide(uint32 keys) {
        const uint32 share = (((keys + ctas - 1) >> log_ctas) + WARP - 1) / WARP * WARP;
        all = keys, first = min(cta * share, keys), count = min(share, keys - first);
    }
    // How many neighbouring keys a warp has.
    __device__ uint32 span() const { return (count + THREADS - 1) / THREADS * WARP; }
    __device__ uint32 end() const { return min((warp + 1) * span(), count); }
    // Calls use(i) for each of the CTA's keys that this thread has.
    template <typename Use> __device__ void each(const Use &use) const {
        const uint32 end = this->end();
#pragma unroll 1  // fetching a second copy of the body takes longer than running the first again
        for (uint32 i = warp * span() + lane; i < end; i += WARP) use(i);
    }
    __device__ void put(uint32 i, uint32 key) { cta_keys[i] = key, largest = max(largest, key); }

    // Finds the `wanted` best of `present` keys, at least one; keys adjoin except for gaps inside quads. The first CTA calls emit(place, number),
    // ascending. Each CTA calls meanwhile() once it has sent its candidates. What the caller kept in `inbox` is not read after put().
    template <typename Emit, typename Meanwhile> __device__ void take(uint32 wanted, uint32 present, const Emit &emit, const Meanwhile &meanwhile) {
        send_groups();
        if (warp == 0) {
            shared.groups.wait(0);
            const uint32 bound = wanted <= MOST_WANTED ? find_bound(wanted) : 0;
            if (lane == 0) shared.bound = bound;
        }
        __syncthreads();
        const uint32 bound = shared.bound;
        if (bound > 0) send_candidates(bound);
        meanwhile();
        if (bound > 0) {
            const Arrived arrived = receive();
            if (arrived.sum <= MOST_COMPARED) {
                if (cta == 0) compare(wanted, arrived, emit);
                return;
            }
        }
        for (uint32 i = 4 * thread; i < count; i += 4 * THREADS)
            send_four<false>(0, inbox + first + i, *reinterpret_cast<const uint4 *>(cta_keys + i), shared.keys);
        if (cta > 0) return;
        if (thread == 0) shared.keys.expect(all * sizeof(uint32));
        ::open(top);
        __syncthreads();
        shared.keys.wait(0);
        CtaTopK<THREADS, 0> counting(top, all, inbox);
        counting.find_threshold(wanted, present);
        counting.take([&](uint32 place, uint32 number, uint32) { emit(place, number); });
    }

  private:
    // A group has as many lanes as the cluster has CTAs. A lane sends the largest keys of four groups to one CTA.
    __device__ void send_groups() const {
        uint32 most = largest;
#pragma unroll
        for (uint32 bit = 1; bit < ClusterPrefilterShared<THREADS>::MOST_CTAS; bit *= 2) {
            const uint32 other = __shfl_xor_sync(FULL_WARP, most, bit);
            if (bit < ctas) most = max(most, other);
        }
        constexpr uint32 SENDING = 8;
        const uint32 part = lane % SENDING >> log_ctas;
        uint32 four[4];
#pragma unroll
        for (uint32 i = 0; i < 4; i++) four[i] = __shfl_sync(FULL_WARP, most, 4 * part + i << log_ctas);
        uint4 *to = reinterpret_cast<uint4 *>(shared.largest) + (((cta * WARPS + warp) * SENDING >> log_ctas) + part);
        if (lane < SENDING) send_four<false>(lane & (ctas - 1), to, make_uint4(four[0], four[1], four[2], four[3]), shared.groups);
    }
    // Called by one warp: a bound that at least `wanted` groups reach, and few more.
    __device__ uint32 find_bound(uint32 wanted) const {
        constexpr uint32 QUADS_OF_LANE = GROUPS / STEP, MORE = 8, FIELD = 10;  // FIELD: bits of a count of groups
        static_assert(GROUPS < 1 << FIELD);
        uint4 x[QUADS_OF_LANE];
        uint32 least = ~0u, most = 0;
#pragma unroll
        for (uint32 n = 0; n < QUADS_OF_LANE; n++) {
            x[n] = reinterpret_cast<const uint4 *>(shared.largest)[n * WARP + lane];
            least = min(least, min(min(x[n].x, x[n].y), min(x[n].z, x[n].w)));
            most = max(most, max(max(x[n].x, x[n].y), max(x[n].z, x[n].w)));
        }
        const auto reaching = [&](uint32 bound) {
            float n = 0.0f;
#pragma unroll
            for (uint32 i = 0; i < QUADS_OF_LANE; i++) {
                count_if(x[i].x >= bound, n), count_if(x[i].y >= bound, n);
                count_if(x[i].z >= bound, n), count_if(x[i].w >= bound, n);
            }
            return uint32(n);
        };
        most = __reduce_max_sync(FULL_WARP, most), least = __reduce_min_sync(FULL_WARP, least);
        if (least == 0 && __reduce_add_sync(FULL_WARP, reaching(1)) < wanted) return 1;
        // Enough groups reach `bound`, too few reach `end`. Three values between them are tried at once.
        uint32 bound = max(least, 1u), end = most + 1, reach = GROUPS;
#pragma unroll 1
        while (reach > wanted + wanted / 8 + MORE && end - bound >= 4) {
            const uint32 step = (end - bound) / 4;
            const uint32 counts = reaching(bound + step) | reaching(bound + 2 * step) << FIELD | reaching(bound + 3 * step) << 2 * FIELD;
            const uint32 all = __reduce_add_sync(FULL_WARP, counts);
            const uint32 low = all % (1 << FIELD), middle = (all >> FIELD) % (1 << FIELD), high = all >> 2 * FIELD;
            const uint32 steps = (low >= wanted) + (middle >= wanted) + (high >= wanted);
            if (steps > 0) reach = steps == 1 ? low : steps == 2 ? middle : high;
            bound += steps * step;
            if (steps < 3) end = bound + step;
        }
        return bound;
    }
    // Sends the first CTA how many keys of this CTA reach the bound, and which, if they are at most MOST_COMPARED.
    __device__ void send_candidates(uint32 bound) const {
        constexpr uint32 TOGETHER = 4;
        const uint32 begin = warp * span() + lane, end = this->end();
        uint32 key[TOGETHER], reaching[TOGETHER], n = 0;  // reaching: lanes whose key reaches the bound
        const auto look = [&](uint32 i) {
#pragma unroll
            for (uint32 m = 0; m < TOGETHER; m++) key[m] = i + m * WARP < end ? cta_keys[i + m * WARP] : 0;
#pragma unroll
            for (uint32 m = 0; m < TOGETHER; m++) reaching[m] = __ballot_sync(FULL_WARP, key[m] >= bound);
        };
#pragma unroll 1
        for (uint32 i = begin; i - lane < end; i += TOGETHER * WARP) {
            look(i);
#pragma unroll
            for (uint32 m = 0; m < TOGETHER; m++) n += __popc(reaching[m]);
        }
        if (lane == 0) shared.per_warp[warp] = n;
        __syncthreads();
        const uint32 per_warp = lane < WARPS ? shared.per_warp[lane] : 0, reach = __reduce_add_sync(FULL_WARP, per_warp);
        if (thread == 0) send_word<false>(0, &shared.count[cta], reach, shared.counts);
        if (n == 0 || reach > MOST_COMPARED) return;
        uint32 place = cta * MOST_COMPARED + __reduce_add_sync(FULL_WARP, lane < warp ? per_warp : 0);
#pragma unroll 1
        for (uint32 i = begin; i - lane < end; i += TOGETHER * WARP) {
            if (span() > TOGETHER * WARP) look(i);  // otherwise the keys are still in registers
#pragma unroll
            for (uint32 m = 0; m < TOGETHER; m++) {
                const uint32 before = __popc(reaching[m] & ((1u << lane) - 1));
                if (reaching[m] >> lane & 1) send_two<false>(0, inbox + 2 * (place + before), make_uint2(key[m], first + i + m * WARP), shared.candidates);
                place += __popc(reaching[m]);
            }
        }
    }
    // How many keys have arrived at the first CTA: from CTA number `lane`, and from all. The other CTAs learn only the sum; where it exceeds
    // MOST_COMPARED, nothing is in flight any more.
    struct Arrived {
        uint32 from_cta, sum;
    };
    __device__ Arrived receive() const {
        if (cta > 0) {
            shared.verdict.wait(0);
            return {0, shared.sum};
        }
        shared.counts.wait(0);
        const uint32 from_cta = lane < ctas ? shared.count[lane] : 0;
        const uint32 sum = __reduce_add_sync(FULL_WARP, from_cta), sent = __reduce_add_sync(FULL_WARP, from_cta <= MOST_COMPARED ? from_cta : 0);
        if (thread == 0) shared.candidates.expect(sent * sizeof(uint2));
        shared.candidates.wait(0);
        if (thread > 0 && thread < ctas) send_word<false>(thread, &shared.sum, sum, shared.verdict);
        return {from_cta, sum};
    }
    static constexpr uint32 QUADS_AT_ONCE = 4, MOST_PARTS = 4;
    // Counts the compared keys for which counts(key, index) holds. The 2^log_parts threads of a key look at a part of them each.
    template <typename Counts> __device__ uint32 tally(uint32 keys, uint32 log_parts, const Counts &counts) const {
        const uint32 parts = 1 << log_parts;
        float n[4] = {};
#pragma unroll 1
        for (uint32 quad = thread & (parts - 1); 4 * quad < keys;) {
#pragma unroll
            for (uint32 m = 0; m < QUADS_AT_ONCE; m++, quad += parts) {
                const uint4 x = reinterpret_cast<const uint4 *>(shared.key)[quad];
                count_if(counts(x.x, 4 * quad), n[0]), count_if(counts(x.y, 4 * quad + 1), n[1]);
                count_if(counts(x.z, 4 * quad + 2), n[2]), count_if(counts(x.w, 4 * quad + 3), n[3]);
            }
        }
        uint32 all = n[0] + n[1] + (n[2] + n[3]);
        for (uint32 bit = 1; bit < parts; bit *= 2) all += __shfl_xor_sync(FULL_WARP, all, bit);
        return all;
    }
    // Called by the first CTA: a key is selected if fewer than `wanted` keys come before it. One, two or four threads count for a key. Equal
    // keys are told apart only where the threshold falls among them.
    template <typename Emit> __device__ void compare(uint32 wanted, const Arrived &arrived, const Emit &emit) const {
        static_assert(MOST_COMPARED % (4 * QUADS_AT_ONCE * MOST_PARTS) == 0 && THREADS / ClusterPrefilterShared<THREADS>::MOST_CTAS % WARP == 0);
        // Neighbouring warps copy the keys of one CTA.
        const uint32 sum = arrived.sum, log_parts = (sum <= THREADS / 2) + (sum <= THREADS / 4), pad = 4 * QUADS_AT_ONCE << log_parts;
        const uint32 padded = (sum + pad - 1) & ~(pad - 1), log_threads = log2_of(THREADS) - log_ctas, c = thread >> log_threads;
        const uint32 from_this = __shfl_sync(FULL_WARP, arrived.from_cta, c), begin = __reduce_add_sync(FULL_WARP, lane < c ? arrived.from_cta : 0);
#pragma unroll 1
        for (uint32 i = thread & ((1u << log_threads) - 1); i < from_this; i += 1u << log_threads) {
            const uint2 x = reinterpret_cast<const uint2 *>(inbox)[c * MOST_COMPARED + i];
            shared.key[begin + i] = x.x, shared.number[begin + i] = x.y;
        }
        if (sum + thread < padded) shared.key[sum + thread] = 0;
        __syncthreads();
        const uint32 i = thread >> log_parts;
        const uint32 key = i < sum ? shared.key[i] : 0;
        const bool has_keys = warp * WARP >> log_parts < sum;  // whether the warp has keys
        uint32 before = has_keys ? tally(padded, log_parts, [&](uint32 x, uint32) { return x > key; }) : 0, mask, per_warp;
        bool is_in;
        const auto choose = [&] {
            is_in = i < sum && i << log_parts == thread && before < wanted, mask = __ballot_sync(FULL_WARP, is_in);
            if (lane == 0) shared.per_warp[warp] = __popc(mask);
            __syncthreads();
            per_warp = lane < WARPS ? shared.per_warp[lane] : 0;
        };
        choose();
        if (__reduce_add_sync(FULL_WARP, per_warp) > wanted) {
            if (has_keys) before += tally(padded, log_parts, [&](uint32 x, uint32 j) { return j < i && x == key; });
            __syncthreads();
            choose();
        }
        const uint32 place = __reduce_add_sync(FULL_WARP, lane < warp ? per_warp : 0) + __popc(mask & ((1u << lane) - 1));
        if (is_in) emit(place, shared.number[i]);
    }
};
