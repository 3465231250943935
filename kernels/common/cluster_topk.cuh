// The exact top k of one row of keys, by the CTAs of a cluster, or by one alone.
//
// Order is that of topk.cuh. The wanted-th largest key is found digit by digit, 11, 11 and 10 bits from the top. A warp takes neighbouring
// keys: 16 a lane stay in registers; those of a longer row in shared memory, as far as there is room, and are made again for each pass beyond
// it. After each digit the CTAs tell each other how many keys are in each group of bins, and look into one group. From that each knows the
// digit, and how many of the chosen lie before its own: ids come out ascending, without a sort.
//
// Counting costs most. So keys that cannot be among the wanted are not counted: each CTA first looks for the digit that so many of its largest
// keys reach, a key for each quad or lane.
#pragma once

#include "common/cluster.cuh"
#include "common/topk.cuh"

constexpr uint32 LOG_BINS = 11, BINS = 1 << LOG_BINS;
constexpr uint32 DIGITS = 3, LARGEST_CLUSTER = 8;

template <uint32 THREADS> struct ClusterTopKShared {
    static constexpr uint32 WARPS = THREADS / WARP;
    // Of each digit, for others of the cluster still read one while the next is counted.
    alignas(16) uint32 bin[DIGITS][BINS];
    uint32 group[DIGITS][LARGEST_CLUSTER][WARPS];  // of each CTA: sums of neighbouring bins
    uint32 per_warp[WARPS], also_per_warp[WARPS];
    uint32 chosen, rank, count, equal_before, above_before;
};

// Before all else.
template <uint32 THREADS> __device__ void open(ClusterTopKShared<THREADS> &shared) {
    uint4 *bins = reinterpret_cast<uint4 *>(shared.bin);
    for (uint32 i = threadIdx.x; i < DIGITS * BINS / 4; i += THREADS) bins[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) shared.equal_before = shared.above_before = 0;
    __syncthreads();
}

constexpr uint32 QUADS = 4, STEP = 4 * WARP, CHUNK = QUADS * STEP;  // of a lane; keys from one of its quads to the next; keys of a warp

// Neighbouring keys of each of so many warps, and so of a CTA.
__device__ inline uint32 span_of(uint32 count, uint32 warps) { return ((count + warps - 1) / warps + STEP - 1) / STEP * STEP; }

// Of 0 … count−1; quads(i, end, x) makes four keys from each of i + n · STEP on, i a multiple of four: 0 from `end` on. `room` has places for
// `chunks` times CHUNK keys a warp. All threads of the cluster take part.
template <uint32 THREADS, typename Quads> struct ClusterTopK {
    using Shared = ClusterTopKShared<THREADS>;
    static constexpr uint32 WARPS = Shared::WARPS, GROUP = BINS / WARPS, OWN_BINS = GROUP / WARP, AT_ONCE = 4;
    static_assert(WARPS <= WARP && OWN_BINS % 2 == 0);
    Shared &shared;
    const Quads &quads;
    uint4 *const room;
    const uint32 chunks, count, ctas, cta, span, begin, end;  // begin … end−1 are this warp's
    uint32 x[QUADS][4];                                                   // of the chunk at hand
    uint32 prefix, shift, ties;  // keys whose upper bits are above prefix are in, and the first `ties` of those that equal it

    __device__ ClusterTopK(Shared &shared, uint4 *room, uint32 chunks, uint32 count, const Quads &quads)
        : shared(shared), quads(quads), room(room), chunks(chunks), count(count), ctas(cluster_ctas()), cta(cluster_rank()),
          span(span_of(count, ctas * WARPS)), begin(min((cta * WARPS + threadIdx.x / WARP) * span, count)), end(min(begin + span, count)), prefix(0), shift(0), ties(0) {}

    __device__ bool is_one_chunk() const { return span <= CHUNK; }

    __device__ void load(uint32 chunk, bool is_first) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (!is_first && is_one_chunk()) return;
        const uint32 number = (chunk - begin) / CHUNK;
        uint4 *held = room + (number * WARPS + warp) * QUADS * WARP + lane;
        if (is_first || number >= chunks) quads(chunk + 4 * lane, end, x);
        if (is_one_chunk() || number >= chunks) return;
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            if (is_first) {
                held[n * WARP] = make_uint4(x[n][0], x[n][1], x[n][2], x[n][3]);
            } else {
                const uint4 keys = held[n * WARP];
                x[n][0] = keys.x, x[n][1] = keys.y, x[n][2] = keys.z, x[n][3] = keys.w;
            }
        }
    }

    // The bin of array `n` in which the wanted-th largest lies: of this CTA's keys, or of all. A warp has a group of bins.
    __device__ void choose_bin(uint32 n, uint32 wanted, bool is_alone) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        __syncthreads();
        const uint32 first = warp * GROUP + (WARP - 1 - lane) * OWN_BINS, peers = is_alone ? 1 : ctas, self = is_alone ? 0 : cta;
        uint32 own[OWN_BINS], sum = 0;
#pragma unroll
        for (uint32 i = 0; i < OWN_BINS; i++) own[i] = shared.bin[n][first + i], sum += own[i];
        sum = __reduce_add_sync(FULL_WARP, sum);
        if (is_alone) {
            if (lane == 0) shared.group[n][0][warp] = sum;
            __syncthreads();
        } else {
            if (lane < ctas) store_word_to(lane, &shared.group[n][cta][warp], sum);
            cluster_arrive();
            cluster_wait();
        }
        uint32 of_group = 0, of_earlier = 0;
#pragma unroll
        for (uint32 c = 0; c < LARGEST_CLUSTER; c++) {
            const uint32 of = lane < WARPS && c < peers ? shared.group[n][c][lane] : 0;
            of_group += of, of_earlier += c < self ? of : 0;
        }
        const uint32 above = __reduce_add_sync(FULL_WARP, lane > warp ? of_group : 0), here = __shfl_sync(FULL_WARP, of_group, warp);
        if (above < wanted && wanted <= above + here) {
            of_earlier = __reduce_add_sync(FULL_WARP, lane > warp ? of_earlier : 0);
            if (lane == 0) shared.above_before += of_earlier;
            choose_in_group(n, first, own, wanted - above, peers, self);
        }
        __syncthreads();
    }
    // By one warp. From the top: lane 0 has the last bins.
    __device__ void choose_in_group(uint32 n, uint32 first, const uint32 (&own)[OWN_BINS], uint32 wanted, uint32 peers, uint32 self) {
        const uint32 lane = threadIdx.x % WARP;
        uint32 total[OWN_BINS], earlier[OWN_BINS], sum = 0, before = 0;
#pragma unroll
        for (uint32 i = 0; i < OWN_BINS; i++) total[i] = peers == 1 ? own[i] : 0, earlier[i] = 0;
#pragma unroll 1
        for (uint32 c = 0; c < peers && peers > 1; c += AT_ONCE) {
            uint2 of[AT_ONCE][OWN_BINS / 2];
#pragma unroll
            for (uint32 m = 0; m < AT_ONCE; m++) {
#pragma unroll
                for (uint32 i = 0; i < OWN_BINS / 2; i++) of[m][i] = load_two_from(min(c + m, peers - 1), &shared.bin[n][first + 2 * i]);
            }
#pragma unroll
            for (uint32 m = 0; m < AT_ONCE; m++) {
#pragma unroll
                for (uint32 i = 0; i < OWN_BINS; i++) {
                    const uint32 x = i % 2 ? of[m][i / 2].y : of[m][i / 2].x;
                    total[i] += c + m < peers ? x : 0, earlier[i] += c + m < self ? x : 0;
                }
            }
        }
#pragma unroll
        for (uint32 i = 0; i < OWN_BINS; i++) sum += total[i];
        const uint32 through = warp_inclusive_sum(sum);
        bool is_past = through - sum >= wanted;
        uint32 rank = wanted - (through - sum);
#pragma unroll
        for (uint32 i = OWN_BINS; i-- > 0;) {
            if (!is_past && rank <= total[i]) {
                shared.chosen = first + i, shared.rank = rank, shared.count = total[i], shared.equal_before = earlier[i];
                is_past = true;
            }
            before += is_past ? 0 : earlier[i];
            rank -= total[i];
        }
        before = __reduce_add_sync(FULL_WARP, before);
        if (lane == 0) shared.above_before += before;
    }

    // A first digit that the wanted-th largest reaches, by the keys at hand; 0 where they do not tell or it is not worth it.
    __device__ uint32 lower_bound(uint32 wanted) {
        // Keys at hand, at least; warps fill up one after the other.
        const uint32 own = min(count - min(cta * WARPS * span, count), WARPS * span), present = is_one_chunk() ? own : own / span * CHUNK;
        const bool by_lane = 2 * wanted <= present / min(span / WARP, 16u);
        if (span <= 2 * STEP || (!by_lane && 2 * wanted > present / 4)) return 0;
        uint32 most = 0, *bins = shared.bin[DIGITS - 1];  // not needed yet
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            const uint32 of_quad = max(max(x[n][0], x[n][1]), max(x[n][2], x[n][3]));
            if (!by_lane && of_quad != 0) atomicAdd(&bins[of_quad >> 32 - LOG_BINS], 1u);
            most = max(most, of_quad);
        }
        if (by_lane && most != 0) atomicAdd(&bins[most >> 32 - LOG_BINS], 1u);
        choose_bin(DIGITS - 1, wanted, true);
        for (uint32 i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        return shared.chosen;
    }
    __device__ void count_first_digit(uint32 wanted) {
        load(begin, true);
        const uint32 least = lower_bound(wanted) << 32 - LOG_BINS;
#pragma unroll 1
        for (uint32 chunk = begin; chunk < end; chunk += CHUNK) {
            if (chunk > begin) load(chunk, true);
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) {
                if (n * STEP >= span) break;
#pragma unroll
                for (uint32 i = 0; i < 4; i++)
                    if (x[n][i] != 0 && x[n][i] >= least) atomicAdd(&shared.bin[0][x[n][i] >> 32 - LOG_BINS], 1u);
            }
        }
    }
    // Of those keys whose bits above the digit are `prefix`.
    __device__ void count_digit(uint32 digit, uint32 low, uint32 mask) {
#pragma unroll 1
        for (uint32 chunk = begin; chunk < end; chunk += CHUNK) {
            load(chunk, false);
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) {
                if (n * STEP >= span) break;
#pragma unroll
                for (uint32 i = 0; i < 4; i++)
                    if (x[n][i] >> shift == prefix) atomicAdd(&shared.bin[digit][x[n][i] >> low & mask], 1u);
            }
        }
    }

    // Finds the cut below the `wanted` best, of which there is one at least. Types of 16 bits have two digits.
    __device__ void find_threshold(uint32 wanted, uint32 digits) {
        if (ctas > 1) cluster_arrive();
        if (wanted >= count) {
            for (uint32 chunk = begin; chunk == begin || chunk < end; chunk += CHUNK) load(chunk, true);
            if (threadIdx.x == 0) shared.above_before = min(cta * WARPS * span, count);
            if (ctas > 1) cluster_wait();
            return;
        }
        count_first_digit(wanted);
        if (ctas > 1) cluster_wait();  // all have started
        choose_bin(0, wanted, ctas == 1);
        prefix = shared.chosen, shift = 32 - LOG_BINS, ties = shared.rank;
#pragma unroll 1
        for (uint32 digit = 1; digit < digits && shared.count != ties; digit++) {
            const uint32 bits = min(shift, LOG_BINS), low = shift - bits;
            count_digit(digit, low, (1u << bits) - 1);
            choose_bin(digit, ties, ctas == 1);
            prefix = prefix << bits | shared.chosen, shift = low, ties = shared.rank;
        }
    }

    // Of a key: 1 where it is above the cut, 1 << 16 where it is at it.
    __device__ uint32 classify(uint32 key) const { return key == 0 ? 0 : (key >> shift > prefix) + (uint32(key >> shift == prefix) << 16); }

    // emit(place, j), ascending, for each that is in.
    template <typename Emit> __device__ void take(const Emit &emit) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        uint32 above = 0, equal = 0;
#pragma unroll 1
        for (uint32 chunk = begin; chunk < end; chunk += CHUNK) {
            load(chunk, false);
            uint32 both = 0;
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) {
                if (n * STEP >= span) break;
#pragma unroll
                for (uint32 i = 0; i < 4; i++) both += classify(x[n][i]);
            }
            above += both & 0xffff, equal += both >> 16;
        }
        above = __reduce_add_sync(FULL_WARP, above), equal = __reduce_add_sync(FULL_WARP, equal);
        if (lane == 0) shared.per_warp[warp] = above, shared.also_per_warp[warp] = equal;
        __syncthreads();
        if (above + equal == 0) return;
        above = __reduce_add_sync(FULL_WARP, lane < warp ? shared.per_warp[lane % WARPS] : 0) + shared.above_before;
        equal = __reduce_add_sync(FULL_WARP, lane < warp ? shared.also_per_warp[lane % WARPS] : 0) + shared.equal_before;
#pragma unroll 1
        for (uint32 chunk = begin; chunk < end; chunk += CHUNK) {
            load(chunk, false);
#pragma unroll
            for (uint32 n = 0; n < QUADS; n++) {
                if (n * STEP >= span) break;
                uint32 of[4], sum = 0;
#pragma unroll
                for (uint32 i = 0; i < 4; i++) of[i] = classify(x[n][i]), sum += of[i];
                if (!__any_sync(FULL_WARP, sum)) continue;
                const uint32 through = warp_inclusive_sum(sum);
                // Those that are in have neighbouring places.
                uint32 in = 0, earlier = equal + (through - sum >> 16), place = above + (through - sum & 0xffff) + min(earlier, ties);
#pragma unroll
                for (uint32 i = 0; i < 4; i++) {
                    in |= uint32(of[i] == 1 || (of[i] > 1 && earlier < ties)) << i;
                    earlier += of[i] >> 16;
                }
                for (; in != 0; in &= in - 1, place++) emit(place, chunk + n * STEP + 4 * lane + __ffs(in) - 1);
                const uint32 all = __shfl_sync(FULL_WARP, through, WARP - 1);
                above += all & 0xffff, equal += all >> 16;
            }
        }
    }
};
