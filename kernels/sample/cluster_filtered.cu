// Verification of sampled draft tokens, and sampling, in one launch, where rows may have filters (variant cluster, compute capability 9.0). The same bits
// as by sample.cu, which takes what this does not: rows whose tokens are greedy or coupled, and of which nothing else is wanted.
//
// Bytes: each row is read once, into shared memory.
//
// Work split: as in cluster.cu a cluster of CTAs has a row, and every warp tells all CTAs what it has found: here the largest number of each group of 256
// tokens. Each CTA then knows a number that the filters' bounds cannot be below, and lists the strips of its own segments that have such numbers. The first
// CTA loads the lists, finds the bounds among so few candidates (few.cuh), and draws. Where they are not enough, or too many, all CTAs find the bounds digit
// by digit, drop what is below them, and go on as in cluster.cu.
//
//   copy of a segment ─ largest numbers of groups ─ tell ═ guess ─ strips ═ [first CTA: candidates ─ bounds ─ sums ─ segment ─ strip ─ token ─ record]
//                                                                  └ ═ [digits ═ …] ─ drop ─ weights, sum ─ tell ═ as in cluster.cu
//                                                                                   └ last of a request: walk ─ cut ─ results
//
// Rows without filters, of other requests, are taken as in cluster.cu.
//
// On entry: as for cluster.cu.
//
// targets: compute_90

#include "sample/few.cuh"
#include "sample/row_cluster.cuh"

// The row's tokens up to the end of a segment.
__device__ inline uint32 segment_past(const Source &source, uint32 s) { return min(s * SEGMENT + SEGMENT, source.row.tokens); }

// Asks for the segments of this CTA that the row has, as each thread of the first ones sees it.
template <uint32 TYPE> __device__ inline void copy_segments(const RowShared &shared, const char *stages, const Source &source, uint32 teams) {
    constexpr uint32 BYTES = Strip<TYPE>::BYTES;
    if (threadIdx.x >= teams) return;
    const uint32 s = cluster_rank() * teams + threadIdx.x;
    if (s >= source.segments()) return;
    const uint32 bytes = (segment_past(source, s) - s * SEGMENT) * BYTES / 16 * 16;
    const Barrier &copied = shared.copied[threadIdx.x];
    copied.expect(bytes);
    if (bytes) copy_bulk(shared_address(stages) + threadIdx.x * SEGMENT * BYTES, source.row.data + uint64(s) * SEGMENT * BYTES, bytes, copied);
}

// How a row is filtered.
enum Filtering : uint32 { UNFILTERED, FILTERED, BY_MASS_ALONE };

// Settings of filters, which the first CTA gives.
struct alignas(16) Bounds {
    uint32 k;
    float p, min_p;
    uint32 unused;
};

// Loads the settings of a request's filters, all in flight together, for rows of so many tokens.
__device__ inline Bounds load_bounds(const SamplingParams &p, uint32 request, uint32 tokens) {
    const int32 k = p.top_k ? as<int32>(p.top_k.at(request)) : 0;
    const float top_p = p.top_p ? as<float>(p.top_p.at(request)) : 1.0f, min_p = p.min_p ? as<float>(p.min_p.at(request)) : 0.0f;
    return {k > 0 && uint32(k) < tokens ? uint32(k) : 0, top_p < 1.0f ? top_p : 1.0f, min_p > 0.0f ? min_p : 0.0f, 0};
}
__device__ inline Filtering filtering_of(const Bounds &bounds, bool is_greedy) {
    if (is_greedy) return UNFILTERED;
    if (bounds.k || bounds.min_p > 0.0f) return FILTERED;
    return bounds.p < 1.0f ? BY_MASS_ALONE : UNFILTERED;
}

// Tells the cluster what is wanted of the row. Called by the first warp of the first CTA.
__device__ inline void give_order(const SampleParams &p, RowShared &shared, Bounds &to_bounds, const Bounds &bounds, const Source &source, const Turn &turn,
                                  uint32 slot) {
    const uint32 to = threadIdx.x, segments = source.segments();
    const bool draws = segments && !turn.is_greedy();
    const uint64 number = draws ? turn.number(p, slot, DRAW) : 0;
    if (to >= cluster_ctas()) return;
    const Need need = segments ? IS_THERE : turn.needs(p, slot) ? IS_MISSING : NOT_NEEDED;
    const Filtering filtering = filtering_of(bounds, turn.is_greedy());
    send_four(to, &shared.order, uint4{__float_as_uint(source.scale.c), need, turn.is_greedy(), filtering}, shared.told);
    send_four(to, &to_bounds, uint4{bounds.k, __float_as_uint(bounds.p), __float_as_uint(bounds.min_p), 0}, shared.told);
    send_two(to, &shared.number, {uint32(number), uint32(number >> 32)}, shared.told);
}

// The warp's part of the CTA's segments.
template <uint32 TYPE> __device__ inline WarpPart<TYPE> part_of_warp(const Source &source, const char *stages, uint32 team_warps, uint32 s) {
    const uint32 warp = threadIdx.x / WARP, within = warp & (team_warps - 1), tokens = SEGMENT >> log2_of(team_warps);
    return {source, {false, source.scale.c}, shared_address(stages) + warp * tokens * Strip<TYPE>::BYTES, s * SEGMENT + within * tokens,
            SEGMENT / STRIP / WARP >> log2_of(team_warps)};
}

// Leaves in shared.found what a row without filters gives, once all have told, for the first time or the second. Only the CTA that goes on does so; true if it is this one.
template <uint32 TYPE>
__device__ inline bool decide_plain_row(RowShared &shared, Source &source, const WarpPart<TYPE> &part, uint32 teams, uint32 team_warps, uint32 phase) {
    const uint32 warp = threadIdx.x / WARP, rank = cluster_rank(), team = warp >> log2_of(team_warps);
    if (warp == 0) {
        shared.told.wait(phase);
        sum_and_find(shared, source, team_warps);
    }
    __syncthreads();
    if (shared.finisher != rank) return false;
    const Drawn &drawn = shared.drawn;
    if (shared.draws) {
        const uint32 lane = threadIdx.x % WARP, begin = (drawn.segment & (teams - 1)) * team_warps;
        const uint64 before = warp_sum(lane >= begin && lane < warp ? shared.parts[rank * DRAW_WARPS + lane].sum : 0);
        const uint64 inside = drawn.target - before;
        if (team == (drawn.segment & (teams - 1)) && before <= drawn.target && inside < shared.parts[rank * DRAW_WARPS + warp].sum) {
            const uint32 token = part.draw(shared.sum[threadIdx.x], drawn.largest, inside);
            if (threadIdx.x % WARP == 0) shared.draw.token = token;
        }
        __syncthreads();
        if (threadIdx.x == 0) shared.found.token = shared.draw.token;
    }
    return true;
}

// --- rows with filters -----------------------------------------------------------------------------------------------------------

// The strips that a CTA has found, in the order of their tokens.
struct Found {
    uint32 first[FewShared::MOST];  // token
    alignas(16) uint32 of_warp[DRAW_WARPS];
    alignas(8) uint32 count;
    uint32 saw_nan;
};

struct FilteredShared {
    static constexpr uint32 DIGITS = 8;
    Bounds bounds;
    union {
        Found found;
        uint64 had[2][MOST_ROW_CTAS][DIGITS];  // in a search, what the numbers of each CTA have; of two rounds in turn
    };
    Barrier rounds[2];
    uint32 counted[2][DRAW_WARPS];
    uint32 searches;  // the row has to be searched
    bool filters;     // as the first thread sees it
};

// A multiprocessor has room for three CTAs with eight segments of 16 bits each, because arrays of RowShared have several uses in turn. `parts` and `sum` are
// for rows without filters, and for what a search leaves of a row. Before that they hold the few candidates among which bounds are sought, and in a search
// they and `groups` hold its counts.
__device__ inline Few::Words &words_of(RowShared &shared) {
    static_assert(sizeof(Few::Words) <= sizeof(shared.sum));
    return *reinterpret_cast<Few::Words *>(shared.sum);
}
__device__ inline uint64 *has_of(RowShared &shared) {
    static_assert(FewShared::MOST * sizeof(uint64) <= sizeof(shared.parts));
    return reinterpret_cast<uint64 *>(shared.parts);
}
// Where a search counts, for each digit and thread. A CTA of eight segments has room for digits of two bits there, others have room for three bits behind their
// segments.
constexpr uint32 SEARCH_BYTES = 16384;
static_assert(SEARCH_BYTES == FilteredShared::DIGITS * DRAW_THREADS * sizeof(uint64));
__device__ inline uint64 *counts_of(RowShared &shared, char *past_stages, uint32 bits) {
    static_assert(4 * DRAW_THREADS * sizeof(uint64) == sizeof(shared.parts) + sizeof(shared.sum) + sizeof(shared.groups));
    return reinterpret_cast<uint64 *>(bits == 2 ? reinterpret_cast<char *>(shared.parts) : past_stages);
}

__device__ inline uint4 load_four_from(uint32 rank, const void *p) {
    uint4 x;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address_in(rank, p)) : "memory");
    return x;
}
__device__ inline uint32 load_word_from(uint32 rank, const void *p) {
    uint32 x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address_in(rank, p)) : "memory");
    return x;
}

// What a lane knows of its strips.
struct LaneStrips {
    uint32 key;    // of the largest number
    bool saw_nan;  // in the warp
};

// Finds the largest numbers of a warp's groups, and tells the cluster.
template <uint32 TYPE>
__device__ inline LaneStrips take_groups(RowShared &shared, uint32 *warp_groups, const WarpPart<TYPE> &part, const Barrier &copied, bool is_there, uint32 past) {
    const uint32 lane = threadIdx.x % WARP;
    bool found = false;
    float largest = minus_infinity();
    if (is_there) {
        copied.wait(0);
        if (part.token(WARP, 0) > past) part.complete(past);
        largest = part.largest();
        if (part.source.forbidden.count || __any_sync(FULL_WARP, largest != largest)) found = part.clean(), largest = part.largest();
    }
    const LaneStrips mine = {key_of(largest), __any_sync(FULL_WARP, found) != 0};
    // Lanes that have a group together: two, four or eight.
    const uint32 lanes = WARP / part.strips;
    uint32 key = max(mine.key, __shfl_xor_sync(FULL_WARP, mine.key, 1));
    if (lanes >= 4) key = max(key, __shfl_xor_sync(FULL_WARP, key, 2));
    if (lanes == 8) key = max(key, __shfl_xor_sync(FULL_WARP, key, 4));
#pragma unroll 1
    for (uint32 first = 0; first < WARP; first += 4 * lanes) {
        const uint4 keys = {__shfl_sync(FULL_WARP, key, first), __shfl_sync(FULL_WARP, key, first + lanes), __shfl_sync(FULL_WARP, key, first + 2 * lanes),
                            __shfl_sync(FULL_WARP, key, first + 3 * lanes)};
        if (lane < cluster_ctas()) send_four(lane, warp_groups + first / lanes, keys, shared.told);
    }
    return mine;
}

// A key that no bound of the filters can be below, and whether what filters keep is all from there on.
struct Guess {
    uint32 from;
    uint32 low, high;  // keys of the lowest number that can be drawn, and of the largest one
    bool has_all;
};

__device__ inline Guess guess(const RowShared &shared, FilteredShared &filtered, Kept &kept, uint32 k, uint32 words, uint32 last) {
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, none = key_of(minus_infinity());
    uint32 high = 0, low = 0xffffffffu;
#pragma unroll 1
    for (uint32 n = lane * 4; n < words; n += 4 * WARP) {
        const uint4 keys = *reinterpret_cast<const uint4 *>(shared.groups + n);
        high = max(max(max(high, keys.x), max(keys.y, keys.z)), keys.w);
        // What has no number counts as the highest.
        low = min(min(min(low, keys.x - none - 1), min(keys.y - none - 1, keys.z - none - 1)), keys.w - none - 1);
    }
    high = __reduce_max_sync(FULL_WARP, high), low = __reduce_min_sync(FULL_WARP, low) + none + 1;
    kept.largest = number_of(high);
    if (high <= none) return {0xffffffffu, none + 1, high, true};
    uint32 from = none + 1;
    if (k) {
        // Three bits at a time: each warp asks about one of eight keys.
        const uint32 bits = WARP - __clz(low ^ high), enough = k + k / 4 + 8;
        uint32 found = bits < WARP ? high >> bits << bits : 0, has = 0xffffffffu;
#pragma unroll 1
        for (uint32 bit = bits, turn = 0; bit > last && has > enough; ++turn) {
            const uint32 digits = min(bit - last, 3u);
            bit -= digits;
            const uint32 key = found | warp << bit;
            uint32 count = 0;
#pragma unroll 1
            for (uint32 n = lane * 4; n < words; n += 4 * WARP) {
                const uint4 keys = *reinterpret_cast<const uint4 *>(shared.groups + n);
                count += (keys.x >= key) + (keys.y >= key) + (keys.z >= key) + (keys.w >= key);
            }
            count = __reduce_add_sync(FULL_WARP, count);
            if (lane == 0) filtered.counted[turn % 2][warp] = count;
            __syncthreads();
            const uint32 had = lane && !(lane >> digits) ? filtered.counted[turn % 2][lane] : 0;
            const uint32 digit = __popc(__ballot_sync(FULL_WARP, had >= k));
            if (digit) has = __shfl_sync(FULL_WARP, had, digit);
            found |= digit << bit;
        }
        from = max(from, found);
    }
    bool has_all = from == none + 1;
    if (kept.min_p > 0.0f) {
        // Weights are off by less than 10^-5: what is below a number whose weight is lower by more is dropped, too.
        const float least = fminf(kept.min_p, 1.0f), x = kept.largest + __fdiv_rn(__log2f(least * 0.997f), kept.scale.c);
        if (x < kept.largest && kept.scale.weight(x, kept.largest) < least * 0.999f && key_of(x) >= from) from = key_of(x), has_all = true;
    }
    // A bound for a mass alone may be anywhere.
    if (!k && !has_all) from = 0xffffffffu;
    return {from, none + 1, high, has_all};
}

// Lists the strips of this CTA that have a number from a key on.
template <uint32 TYPE> __device__ inline void list_strips(Found &found, const WarpPart<TYPE> &part, const LaneStrips &mine, uint32 from) {
    const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32 has = 0;
    if (mine.key >= from) {
        const uint32 begin = part.turn(lane, 0);
#pragma unroll 1
        for (uint32 n = 0; n < part.strips; ++n) {
            const uint32 at = (begin + n) & (part.strips - 1);
            if (key_of(part.strip(lane, at).largest()) >= from) has |= 1u << at;
        }
    }
    const uint32 through = warp_inclusive_sum(__popc(has));
    if (lane == WARP - 1) found.of_warp[warp] = through << 1 | mine.saw_nan;
    __syncthreads();
    uint32 at = through - __popc(has), count = 0, saw_nan = 0;
#pragma unroll
    for (uint32 w = 0; w < DRAW_WARPS; ++w) {
        const uint32 of_warp = found.of_warp[w];
        at += w < warp ? of_warp >> 1 : 0, count += of_warp >> 1, saw_nan |= of_warp & 1;
    }
#pragma unroll 1
    for (; has && at < FewShared::MOST; has &= has - 1, ++at) found.first[at] = part.token(lane, __ffs(has) - 1);
    if (threadIdx.x == 0) found.count = count, found.saw_nan = saw_nan;
}

// --- rows of which many tokens stay ----------------------------------------------------------------------------------------------

// The search for the bounds of a row of which more tokens stay than candidates have room, digit by digit of the bound's key. In each round a thread adds up what
// its own numbers have by their next digit, and CTAs tell each other.
template <uint32 TYPE> struct RowSearch {
    FilteredShared &filtered;
    const WarpPart<TYPE> &part;
    Kept &kept;
    const LaneStrips mine;
    uint64 *const own;         // [digit][thread]
    const uint32 digit_bits;   // of a round
    uint32 round;
    bool saw_nan;

    static constexpr uint32 LAST = TYPE == FLOAT32 ? 0 : TYPE == FLOAT16 ? 13 : 16;  // lower bits of keys are those of no number

    __device__ uint64 mass_of(float x) const { return __float2ull_rz(__fmul_rn(kept.scale.weight(x, kept.largest), ONE)); }
    __device__ float number_at(uint32 place) const {
        uint32 bits;
        if (TYPE == FLOAT32) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(place) : "memory");
        else asm volatile("{\n\t.reg .u16 half;\n\tld.shared.u16 half, [%1];\n\tcvt.u32.u16 %0, half;\n\t}" : "=r"(bits) : "r"(place) : "memory");
        return TYPE == FLOAT32 ? __uint_as_float(bits) : TYPE == FLOAT16 ? widen_float16(bits) : widen_bfloat16(bits);
    }

    // What the row's numbers have by digit: those from the key `low` on whose bits from `bit` + `digits` on are those of `known`. Lane n gets what digit n % 8 and
    // those above it have.
    __device__ uint64 count(bool wants_mass, uint32 low, uint32 known, uint32 bit, uint32 digits) {
        const uint32 lane = threadIdx.x % WARP, mask = (1u << digits) - 1, above = bit + digits;
        const uint32 same = above < WARP ? 0xffffffffu << above : 0;
        clear();
        const uint32 begin = part.turn(lane, 0);
#pragma unroll 1
        for (uint32 n = 0; n < part.strips && mine.key >= low; ++n) {
            const uint32 at = (begin + n) & (part.strips - 1);
            const Strip<TYPE> strip = part.strip(lane, at);
            if (key_of(strip.largest()) < low) continue;
            float x[STRIP];
            strip.widen(x);
            uint32 wanted = 0;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) {
                const uint32 key = key_of(x[e]);
                wanted |= uint32(key >= low && ((key ^ known) & same) == 0) << e;
            }
#pragma unroll 1
            for (; wanted; wanted &= wanted - 1) {
                const float number = number_at(part.place_of(lane, at) + (__ffs(wanted) - 1) * Strip<TYPE>::BYTES);
                if (!kept.drops(number)) own[(key_of(number) >> bit & mask) * DRAW_THREADS + threadIdx.x] += wants_mass ? mass_of(number) : 1;
            }
        }
        return tell();
    }
    // What the row's numbers from the key `low` on have in all.
    __device__ uint64 sum_mass(uint32 low) {
        const uint32 lane = threadIdx.x % WARP, begin = part.turn(lane, 0);
        uint64 sum = 0;
#pragma unroll 1
        for (uint32 n = 0; n < part.strips && mine.key >= low; ++n) {
            float x[STRIP];
            part.strip(lane, (begin + n) & (part.strips - 1)).widen(x);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) sum += key_of(x[e]) >= low && !kept.drops(x[e]) ? mass_of(x[e]) : 0;
        }
        clear();
        own[threadIdx.x] = sum;
        return __shfl_sync(FULL_WARP, tell(), 0);
    }
    __device__ void clear() const {
#pragma unroll 4
        for (uint32 d = 0; d < 1u << digit_bits; ++d) own[d * DRAW_THREADS + threadIdx.x] = 0;
    }
    // Tells the cluster what the threads of this CTA have by digit. Lane n gets what digit n % 8 and those above it have in the row.
    __device__ uint64 tell() {
        constexpr uint32 DIGITS = FilteredShared::DIGITS;
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const uint32 turn = round % 2, phase = round / 2, ctas = cluster_ctas();
        ++round;
        const Barrier &arrived = filtered.rounds[turn];
        if (threadIdx.x == 0) arrived.expect(ctas * DIGITS * sizeof(uint64));
        __syncthreads();
        static_assert(DIGITS == DRAW_WARPS);
        uint64 sum = 0;
        if (warp < 1u << digit_bits) {
#pragma unroll
            for (uint32 t = 0; t < DRAW_THREADS; t += WARP) sum += own[warp * DRAW_THREADS + t + lane];
        }
        sum = warp_sum(sum) | uint64(mine.saw_nan) << 63;
        if (lane < ctas) send_two(lane, &filtered.had[turn][cluster_rank()][warp], {uint32(sum), uint32(sum >> 32)}, arrived);
        arrived.wait(phase);
        uint64 has = 0;
        bool saw = false;
#pragma unroll
        for (uint32 r = lane / DIGITS; r < MOST_ROW_CTAS; r += WARP / DIGITS) {
            if (r >= ctas) continue;
            const uint64 of_cta = filtered.had[turn][r][lane % DIGITS];
            has += of_cta & ~(uint64(1) << 63), saw |= of_cta >> 63;
        }
        saw_nan |= __any_sync(FULL_WARP, saw);
        has += __shfl_xor_sync(FULL_WARP, has, 8);
        has += __shfl_xor_sync(FULL_WARP, has, 16);
#pragma unroll
        for (uint32 step = 1; step < DIGITS; step *= 2) {
            const uint64 higher = __shfl_down_sync(FULL_WARP, has, step);
            if (lane % DIGITS + step < DIGITS) has += higher;
        }
        return has;
    }
    // The largest key from `low` to `high` that has as much as is wanted; 0 if `low` has less.
    __device__ uint32 find(bool wants_mass, uint32 low, uint32 high, uint64 wanted) {
        const uint32 lane = threadIdx.x % WARP, bits = max(WARP - __clz(low ^ high), LAST + 1);
        uint32 known = bits < WARP ? high >> bits << bits : 0;
#pragma unroll 1
        for (uint32 bit = bits; bit > LAST;) {
            const uint32 digits = min(bit - LAST, digit_bits);
            bit -= digits;
            const uint64 has = count(wants_mass, low, known, bit, digits);
            const uint32 enough = __ballot_sync(FULL_WARP, lane < FilteredShared::DIGITS && has >= wanted);
            if (!enough) return 0;
            const uint32 digit = __popc(enough) - 1;
            const uint64 higher = __shfl_sync(FULL_WARP, has, digit + 1);
            if (digit + 1 < FilteredShared::DIGITS) wanted -= higher;
            known |= digit << bit;
        }
        return known;
    }
    __device__ static float number_from(uint32 key) { return number_of(key >> 31 ? key : key | ((1u << LAST) - 1)); }
    // Sets the bounds of the filters.
    __device__ void run(const Guess &guess, uint32 tokens) {
        const Bounds &bounds = filtered.bounds;
        uint32 low = guess.low;
        uint64 wanted = bounds.k;
        uint32 from = max(low, guess.from);
        // By number and by mass, each of them from a guess on, and from all on if the guess was too high.
        enum Step : uint32 { NUMBER, NUMBER_OF_ALL, MASS, MASS_OF_ALL };
#pragma unroll 1
        for (uint32 step = bounds.k ? NUMBER : MASS; step <= MASS_OF_ALL; ++step) {
            if (step == MASS) {
                if (!(bounds.p < 1.0f)) return;
                const uint64 all = sum_mass(low);
                wanted = min(max(__double2ull_rz(ceil(__dmul_rn(double(fmaxf(bounds.p, 0.0f)), double(all)))), uint64(1)), all);
                // What has less than this has in all less than may be dropped.
                const float share = float(all - wanted) / (ONE * tokens), x = kept.largest + __log2f(share) / kept.scale.c - 1e-3f;
                from = x == x ? max(min(key_of(x), guess.high), low) : low;
            } else if (step & 1) {
                from = low;
            }
            const uint32 found = find(step >= MASS, from, guess.high, wanted);
            if (!found) continue;
            kept.bound = number_from(found), low = max(low, key_of(kept.bound));
            if (step >= MASS) return;
            step = NUMBER_OF_ALL;
        }
    }
    // Drops what the filters drop.
    __device__ void drop() const {
        const uint32 lane = threadIdx.x % WARP;
#pragma unroll 1
        for (uint32 n = 0; n < part.strips; ++n) {
            Strip<TYPE> strip = part.strip(lane, n);
            float x[STRIP];
            strip.widen(x);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (kept.drops(x[e])) strip.set(e, none_bits<TYPE>(false));
            strip.store_shared(part.place_of(lane, n));
        }
    }
};

// Decides the row from the strips that the cluster has found, unless it has to be searched: true if so. Called by the first CTA, which tells the others and lets
// them go on; it has to wait for the cluster yet.
__device__ inline bool decide_filtered_row(RowShared &shared, FilteredShared &filtered, char *stages, uint32 teams, Source &source, const Guess &guessed) {
    const uint32 lane = threadIdx.x % WARP;
    uint2 listed = {0, 0};
    if (lane < cluster_ctas()) listed = lane ? load_two_from(lane, &filtered.found.count) : uint2{filtered.found.count, filtered.found.saw_nan};
    const uint32 through = warp_inclusive_sum(listed.x), total = __shfl_sync(FULL_WARP, through, WARP - 1);
    const bool saw_nan = __any_sync(FULL_WARP, listed.y);
    // The CTA that has the strip with this thread's number.
    uint32 owner = 0;
#pragma unroll
    for (uint32 r = 0; r < MOST_ROW_CTAS; ++r) owner += __shfl_sync(FULL_WARP, through, r) <= threadIdx.x;
    const uint32 at = threadIdx.x - __shfl_sync(FULL_WARP, through - listed.x, owner % MOST_ROW_CTAS);
    const bool is_few = total <= FewShared::MOST, has_strip = is_few && threadIdx.x < total;
    AnyStrip strip = {};
    uint32 first = 0;
    if (has_strip) {
        first = owner ? load_word_from(owner, &filtered.found.first[at]) : filtered.found.first[at];
        const bool is_wide = source.row.type == FLOAT32;
        const char *const from = stages + (first - owner * teams * SEGMENT) * (is_wide ? 4 : 2);
#pragma unroll
        for (uint32 w = 0; w < 8; w += 4) {
            if (w && !is_wide) continue;
            const uint4 four = load_four_from(owner, from + w * 4);
            strip.strip.words[w] = four.x, strip.strip.words[w + 1] = four.y, strip.strip.words[w + 2] = four.z, strip.strip.words[w + 3] = four.w;
        }
    }
    float x[STRIP];
    strip.widen(source.row.type, x);
    const Bounds &bounds = filtered.bounds;
    Few few = {*reinterpret_cast<FewShared *>(stages), words_of(shared), has_of(shared), source.kept, source.scale, bounds.k, bounds.p};
    const uint32 count = few.collect(guessed.from, has_strip, x);
    const bool has_some = shared.order.needs == IS_THERE && source.kept.largest > minus_infinity();
    const bool searches = has_some && (!is_few || !count || count > FewShared::MOST || (count < bounds.k && !guessed.has_all));
    // The first warp has more to do.
    const uint32 to = threadIdx.x - WARP;
    if (to < cluster_ctas()) store_word_to(to, &filtered.searches, searches);
    if (threadIdx.x >= WARP) cluster_arrive();
    if (!searches) {
        RowRecord found = {source.kept.largest, minus_infinity(), 0, saw_nan ? SAW_NAN : 0, 0, 0};
        if (has_some) few.decide(source, shared.records, shared.number[0], count, has_strip, x, first, found);
        else found.status = shared.order.needs == IS_THERE ? found.status | NO_TOKEN : NO_ROW;
        if (threadIdx.x == 0) found.token = min(found.token, source.p.tokens - 1), shared.found = found;
    }
    if (threadIdx.x < WARP) cluster_arrive();
    return searches;
}

// What a CTA does with its segments, by the type of their numbers.
struct CtaRow {
    const SampleParams &p;
    RowShared &shared;
    FilteredShared &filtered;
    char *stages;
    Source &source;
    uint32 n, teams, team_warps, team, s;

    template <uint32 TYPE> __device__ WarpPart<TYPE> part() const { return part_of_warp<TYPE>(source, stages, team_warps, s); }

    template <uint32 TYPE> __device__ void tell(LaneStrips &mine, uint32 *groups, bool is_there, uint32 past) const {
        // All that CTAs go by is the same in all of them, whatever a CTA thinks of the row: what it does not find is 0.
        const uint32 to = threadIdx.x % WARP;
        if (filtered.filters) {
            mine = take_groups<TYPE>(shared, groups, part<TYPE>(), shared.copied[team], is_there, past);
            if (to < cluster_ctas()) send_four(to, &shared.parts[cluster_rank() * DRAW_WARPS + threadIdx.x / WARP], uint4{}, shared.told);
            return;
        }
        take_part<TYPE>(shared, part<TYPE>(), shared.copied[team], is_there, past, shared.is_greedy, team_warps);
        if (to >= cluster_ctas()) return;
#pragma unroll 1
        for (uint32 first = 0; first < GROUPS >> log2_of(team_warps); first += 4) send_four(to, groups + first, uint4{}, shared.told);
    }
    template <uint32 TYPE> __device__ bool decide_plain(uint32 phase) const { return decide_plain_row<TYPE>(shared, source, part<TYPE>(), teams, team_warps, phase); }
    template <uint32 TYPE> __device__ void list(const LaneStrips &mine, uint32 from) const { list_strips<TYPE>(filtered.found, part<TYPE>(), mine, from); }
    // Searches the row for the bounds of its filters, and drops what they drop: what is left is that of a row without filters. Whether there is what is no number.
    template <uint32 TYPE> __device__ bool search(const LaneStrips &mine, const Guess &guessed, bool is_there) const {
        const WarpPart<TYPE> own = part<TYPE>();
        const uint32 digit_bits = teams == MOST_CTA_SEGMENTS ? 2 : 3;
        RowSearch<TYPE> search = {filtered, own, source.kept, mine, counts_of(shared, stages + teams * SEGMENT * Strip<TYPE>::BYTES, digit_bits), digit_bits, 0, false};
        // Other warps may still read the groups, where counts are to lie.
        __syncthreads();
        if (threadIdx.x == 0) shared.told.expect(cluster_ctas() * DRAW_WARPS * sizeof(Part));
        search.run(guessed, source.row.tokens);
        if (is_there) search.drop();
        take_part<TYPE>(shared, own, shared.copied[team], is_there, 0xffffffffu, false, team_warps);
        return search.saw_nan;
    }
};

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 3) sample_cluster_filtered(const __grid_constant__ SampleParams p) {
    extern __shared__ __align__(128) char stages[];
    __shared__ RowShared shared;
    __shared__ FilteredShared filtered;
    const SamplingParams &sampling = p.sampling;
    const uint32 ctas = cluster_ctas(), rank = cluster_rank(), warp = threadIdx.x / WARP;
    const uint32 teams = sampling.segments_at_once, team_warps = DRAW_WARPS >> log2_of(teams), team = warp >> log2_of(team_warps);
    const uint32 warp_groups = GROUPS >> log2_of(team_warps);  // of each warp, a multiple of four
    if (threadIdx.x < teams) shared.copied[threadIdx.x].open(1);
    if (threadIdx.x == 0) {
        shared.told.open(1);
        shared.told.expect(ctas * DRAW_WARPS * (warp_groups * sizeof(uint32) + sizeof(Part)) + sizeof(Order) + sizeof(Bounds) + sizeof(uint64));
        filtered.rounds[0].open(1), filtered.rounds[1].open(1);
    }
    __syncwarp();
    cluster_start();
    words_of(shared).clear();
    wait_for_previous_kernel();
    allow_next_kernel();
    const uint32 n = sampling.per_row_ctas.divide(blockIdx.x), i = sampling.per_request.divide(n), slot = n - i * sampling.per_request.value;
    const Turn turn(p, sampling.first + i);
    bool is_there = turn.needs(p, slot);
    Source source = turn.source(p, is_there ? slot : 0, is_there);
    if (!is_there || !turn.needs(p, slot)) source.row.tokens = 0;
    // The compiler leaves out what others need.
    source.scale.is_weights = source.filters = false;
    const uint32 type = source.row.type;
    if (type == FLOAT32) copy_segments<FLOAT32>(shared, stages, source, teams);
    else copy_segments<BFLOAT16>(shared, stages, source, teams);
    Bounds bounds = {};
    if (warp == 0) bounds = load_bounds(sampling, turn.request, p.sampling.tokens);
    if (threadIdx.x == 0) {
        shared.tokens = source.row.tokens, shared.c = source.scale.c, shared.is_greedy = turn.is_greedy();
        filtered.filters = filtering_of(bounds, turn.is_greedy()) != UNFILTERED;
    }
    cluster_started();
    if (rank == 0 && warp == 0) give_order(p, shared, filtered.bounds, bounds, source, turn, slot);
    __syncthreads();
    source.row.tokens = shared.tokens, source.scale.c = shared.c;
    const uint32 s = rank * teams + team, past = segment_past(source, s);
    is_there = s < source.segments();
    LaneStrips mine = {0, false};
    uint32 *const groups = shared.groups + (rank * DRAW_WARPS + warp) * warp_groups;
    const CtaRow row = {p, shared, filtered, stages, source, n, teams, team_warps, team, s};
    if (type == FLOAT32) row.tell<FLOAT32>(mine, groups, is_there, past);
    else if (type == FLOAT16) row.tell<FLOAT16>(mine, groups, is_there, past);
    else row.tell<BFLOAT16>(mine, groups, is_there, past);
    shared.told.wait(0);
    bool saw_nan = false;
    const bool filters = shared.order.filters != UNFILTERED;
    if (filters) {
        // From here on every CTA goes by what all have been told, and by parameters.
        source.row.tokens = p.sampling.tokens;
        source.scale.c = __uint_as_float(shared.order.c);
        source.kept = {sampling.flags & TEMPERATURE_LAST ? source.plain() : source.scale, 0.0f, filtered.bounds.min_p, minus_infinity()};
        const uint32 last = type == FLOAT32 ? 0 : type == FLOAT16 ? 13 : 16;
        const Guess guessed = guess(shared, filtered, source.kept, filtered.bounds.k, ctas * DRAW_WARPS * warp_groups, last);
        if (shared.order.filters != BY_MASS_ALONE || guessed.high < guessed.low) {
            if (type == FLOAT32) row.list<FLOAT32>(mine, guessed.from);
            else if (type == FLOAT16) row.list<FLOAT16>(mine, guessed.from);
            else row.list<BFLOAT16>(mine, guessed.from);
            cluster_arrive();
            cluster_wait();
            if (rank == 0) {
                const bool searches = decide_filtered_row(shared, filtered, stages, teams, source, guessed);
                if (!searches) end_row(p, shared, stages, n);
                cluster_wait();
                if (!searches) return;
            } else {
                cluster_arrive();
                cluster_wait();
                if (!filtered.searches) return;
            }
        }
        saw_nan = type == FLOAT32 ? row.search<FLOAT32>(mine, guessed, is_there)
                  : type == FLOAT16 ? row.search<FLOAT16>(mine, guessed, is_there)
                                    : row.search<BFLOAT16>(mine, guessed, is_there);
    }
    const bool goes_on = type == FLOAT32 ? row.decide_plain<FLOAT32>(filters) : type == FLOAT16 ? row.decide_plain<FLOAT16>(filters) : row.decide_plain<BFLOAT16>(filters);
    if (!goes_on) return;
    if (threadIdx.x == 0 && saw_nan) shared.found.status |= SAW_NAN;
    end_row(p, shared, stages, n);
}
