// The exact top k of one row of keys, found by the CTAs of a cluster, or by one CTA alone.
//
// The order is that of topk.cuh. The wanted-th largest key is found digit by digit: 11, 11 and 10 bits from the top. A warp takes neighbouring
// keys. Rows of up to 16 keys a lane stay in registers. Keys of longer rows stay in shared memory as far as there is room, and beyond that
// are made again for each pass. After each digit the CTAs exchange how many keys each group of bins holds, and look into one group. Each CTA
// then knows the digit, and how many selected keys lie before its own keys, so that ids come out ascending without a sort.
//
// Counting costs most, so keys that cannot be selected are not counted: each CTA first finds a digit that `wanted` of its largest keys
// reach, with one key for each quad or for each lane.
#pragma once

#include "common/cluster.cuh"
#include "common/topk.cuh"

constexpr uint32 LOG_BINS = 11, BINS = 1 << LOG_BINS;
constexpr uint32 DIGITS = 3, LARGEST_CLUSTER = 8;

template <uint32 THREADS> struct ClusterTopKShared {
    static constexpr uint32 WARPS = THREADS / WARP;
    // One array for each digit: other CTAs may still read one while the next is counted.
    alignas(16) uint32 bin[DIGITS][BINS];
    uint32 group[DIGITS][LARGEST_CLUSTER][WARPS];  // [digit][CTA][warp]: sums of a warp's bins
    uint32 per_warp[WARPS], also_per_warp[WARPS];
    uint32 chosen, rank, count, equal_before, above_before;
};

// Sets the bins to 0. Called first, by all threads of the CTA.
template <uint32 THREADS> __device__ void open(ClusterTopKShared<THREADS> &shared) {
    uint4 *bins = reinterpret_cast<uint4 *>(shared.bin);
    for (uint32 i = threadIdx.x; i < DIGITS * BINS / 4; i += THREADS) bins[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) shared.equal_before = shared.above_before = 0;
    __syncthreads();
}

constexpr uint32 QUADS = 4, STEP = 4 * WARP, CHUNK = QUADS * STEP;  // quads of a lane; keys between its quads; keys of a warp

// Neighbouring keys that each of `warps` warps takes.
__device__ inline uint32 span_of(uint32 count, uint32 warps) { return ((count + warps - 1) / warps + STEP - 1) / STEP * STEP; }

// Selects from keys 0 … count−1. quads(i, end, x) makes the quads of keys that begin at i + n · STEP, i a multiple of four; keys from `end` on
// are 0. `room` holds `chunks` chunks of CHUNK keys for each warp. All threads of the cluster take part.
template <uint32 THREADS, typename Quads> struct ClusterTopK {
    using Shared = ClusterTopKShared<THREADS>;
    static constexpr uint32 WARPS = Shared::WARPS, GROUP = BINS / WARPS, OWN_BINS = GROUP / WARP, AT_ONCE = 4;
    static_assert(WARPS <= WARP && OWN_BINS % 2 == 0);
    Shared &shared;
    const Quads &quads;
    uint4 *const room;
    const uint32 chunks, count, ctas, cta, span, begin, end;  // begin … end−1 are this warp's keys
    uint32 x[QUADS][4];                                                   // keys of the current chunk
    uint32 prefix, shift, ties;  // keys whose upper bits exceed prefix are selected, and the first `ties` of those whose bits equal it

    __device__ ClusterTopK(Shared &shared, uint4 *room, uint32 chunks, uint32 count, const Quads &quads)
        : shared(shared), quads(quads), room(room), chunks(chunks), count(count), ctas(cluster_ctas()), cta(cluster_rank()),
          span(span_of(count, ctas * WARPS)), begin(min((cta * WARPS + threadIdx.x / WARP) * span, count)), end(min(begin + span, count)), prefix(0), shift(0), ties(0) {}

    __device__ bool is_one_chunk() const { return span <= CHUNK; }

    __device__ void load(uint32 chunk, bool is_first) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (!is_first && is_one_chunk()) return;
        const uint32 number = (chunk - begin) / CHUNK;
        uint4 *kept_keys = room + (number * WARPS + warp) * QUADS * WARP + lane;
        if (is_first || number >= chunks) quads(chunk + 4 * lane, end, x);
        if (is_one_chunk() || number >= chunks) return;
#pragma unroll
        for (uint32 n = 0; n < QUADS; n++) {
            if (is_first) {
                kept_keys[n * WARP] = make_uint4(x[n][0], x[n][1], x[n][2], x[n][3]);
            } else {
                const uint4 keys = kept_keys[n * WARP];
                x[n][0] = keys.x, x[n][1] = keys.y, x[n][2] = keys.z, x[n][3] = keys.w;
            }
        }
    }

    // Finds the bin of array `n` that holds the wanted-th largest key: of this CTA's keys (is_alone), or of the cluster's. Each warp has a group
    // of bins.
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
    // Called by one warp. Lane 0 has the group's last bins.
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

    // A first digit that the wanted-th largest key reaches for sure, from the keys in registers; 0 where they do not tell or counting is cheaper.
    __device__ uint32 lower_bound(uint32 wanted) {
        // At least so many keys are in registers, as warps fill up one after the other.
        const uint32 own = min(count - min(cta * WARPS * span, count), WARPS * span), present = is_one_chunk() ? own : own / span * CHUNK;
        const bool by_lane = 2 * wanted <= present / min(span / WARP, 16u);
        if (span <= 2 * STEP || (!by_lane && 2 * wanted > present / 4)) return 0;
        uint32 most = 0, *bins = shared.bin[DIGITS - 1];  // the last digit's bins are not needed yet
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
    // Counts the digit of those keys whose bits above it are `prefix`.
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

    // Finds the threshold of the `wanted` best keys, at least one. Keys of 16-bit scores have two digits.
    __device__ void find_threshold(uint32 wanted, uint32 digits) {
        if (ctas > 1) cluster_arrive();
        if (wanted >= count) {
            for (uint32 chunk = begin; chunk == begin || chunk < end; chunk += CHUNK) load(chunk, true);
            if (threadIdx.x == 0) shared.above_before = min(cta * WARPS * span, count);
            if (ctas > 1) cluster_wait();
            return;
        }
        count_first_digit(wanted);
        if (ctas > 1) cluster_wait();  // all CTAs of the cluster have started
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

    // 1 for a key above the threshold, 1 << 16 for a key at it.
    __device__ uint32 classify(uint32 key) const { return key == 0 ? 0 : (key >> shift > prefix) + (uint32(key >> shift == prefix) << 16); }

    // Calls emit(place, j), ascending, for each selected key.
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
                // A lane's selected keys have neighbouring places.
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
