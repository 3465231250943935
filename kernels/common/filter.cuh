// The filters of a row, by a CTA of DRAW_THREADS threads: src/ops/draw/filter.rs defines them and computes them on the CPU.
//
// A group is 256 neighbouring tokens, a strip for each lane of a warp. The largest number of each is known, so that a warp reads just the
// groups that matter: those with a number at or above a bound. Few tokens stay of most rows. For top-k a guess below the bound, from the groups' largest
// numbers, collects candidates; if they are as many as are wanted, the bound is one of them, whatever the guess was. Otherwise the bound is found
// among all numbers from the guess on, digit by digit of its key. For top-p the pass that adds up the mass finds the first digit, too, among numbers
// from a guess on that the groups' largest numbers give. Then candidates are collected: all that have that digit or a larger one if they seem to be few,
// or else those that have it.
//
//   [min-p] ── top-k: collect ── [digits] ── top-p: [mass and a digit ── collect] ── [digits] ── sums of segments
//
// A row has few warps, and each waits for one step after the other: what reads much does little, loads go before what they are for, and what follows
// from candidates is computed by some lanes for each of them, or a thread for each of their strips. All passes are made at one place of the code.
#pragma once

#include "common/digits.cuh"

constexpr uint32 GROUP = WARP * STRIP, GROUPS = SEGMENT / GROUP, MOST_GROUPS = MOST_SEGMENTS * GROUPS;
constexpr uint32 MOST_CANDIDATES = 1024, MOST_STRIPS = DRAW_THREADS;
constexpr uint32 AHEAD = 3;  // groups that a warp loads before it visits one
constexpr uint32 FOURS = 6;  // loads of 16 bytes that a lane has in flight when it looks for candidates

struct Candidates {
    alignas(16) uint32 key[MOST_CANDIDATES];
    alignas(16) uint64 mass[MOST_CANDIDATES];  // once the bound is known, the first ones are sums of strips
    uint32 strip[MOST_CANDIDATES];             // the first token of each strip that may have some
    float number[STRIP][MOST_STRIPS];          // of the first strips, without what is dropped
};

struct FilterShared {
    alignas(16) uint32 group[MOST_GROUPS];  // keys of the groups' largest numbers
    union {
        Candidates candidate;
        DigitSums sums;
    };
    uint32 candidate_count, strip_count, open_count;
    uint64 stays;  // the mass that top-p wants
    uint64 counts[2][DRAW_WARPS];
    SegmentSum segment[MOST_SEGMENTS];
};

// The filters of one row. A Source has row, scale, kept, top_k(), top_p() and clean(first, x), which makes what cannot be drawn `none`.
template <typename Source> struct Filter {
    // What a pass does with the numbers that it reads.
    enum Pass : uint32 { FIND_LARGEST, COLLECT, COLLECT_DIGIT, SUM_MASS, COUNT_DIGITS, SUM_SEGMENTS };
    // What is done before a pass, or instead of one.
    enum Step : uint32 {
        MIN_P, TOP_K, TOP_K_COLLECTED, TOP_P, TOP_P_SUMMED, TOP_P_COLLECTED, TOP_P_WEIGHED, BOUND, DIGIT, DIGIT_COUNTED, DIGIT_COLLECTED, SEGMENTS,
        STRIPS, DONE
    };

    DrawShared &draw;
    FilterShared &shared;
    Source &source;
    Kept &kept;
    float none;
    uint32 groups, group_words;  // groups, and their keys with those past the last one, which are 0
    uint32 least;      // key of the smallest number that can be drawn, or more
    uint32 from;       // the key from which on the pass reads groups
    uint32 counted;    // the key from which on digits are counted
    bool wants_mass;   // the bound is wanted for a mass, and not for a number of tokens
    bool is_complete;  // every token that stays is a candidate
    uint64 wanted;     // tokens or mass that stay, of those that have the digits which are known
    uint64 mass;       // what the pass has summed
    Digits digits;     // of the bound's key

    __device__ Filter(DrawShared &draw, FilterShared &shared, Source &source)
        : draw(draw), shared(shared), source(source), kept(source.kept), none(source.scale.none()), groups((source.row.tokens + GROUP - 1) / GROUP),
          group_words((groups + DRAW_THREADS - 1) / DRAW_THREADS * DRAW_THREADS),
          least(key_of(none) + 1), from(least), counted(least), wants_mass(false), is_complete(false), wanted(0), mass(0), digits{} {}

    // --- one pass over the row -------------------------------------------------------------------------------------------------------

    // Hands each strip of the groups that have a key from `from` on to visit(), without what is dropped by now.
    __device__ void scan(Pass pass) {
        if (pass == COLLECT) return collect();
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
        for (uint32 base = warp; base < groups; base += WARP * DRAW_WARPS) {
            const uint32 mine = base + lane * DRAW_WARPS;
            uint32 open = __ballot_sync(FULL_WARP, mine < groups && shared.group[mine] >= from);
            // The next groups load while one is visited. Each has registers of its own: to move what is still loading would wait for it.
            AnyStrip ahead[AHEAD] = {};
            uint32 group[AHEAD];
            const auto load = [&](uint32 n) {
                group[n] = open ? base + (__ffs(open) - 1) * DRAW_WARPS : MOST_GROUPS;
                open &= open - 1;
                if (group[n] < MOST_GROUPS) ahead[n].load(source.row, group[n] * GROUP + lane * STRIP, source.scale.is_weights);
            };
#pragma unroll
            for (uint32 n = 0; n < AHEAD; ++n) load(n);
#pragma unroll 1
            while (group[0] < MOST_GROUPS) {
#pragma unroll
                for (uint32 n = 0; n < AHEAD; ++n) {
                    if (group[n] == MOST_GROUPS) continue;
                    float x[STRIP];
                    ahead[n].widen(source.row.type, x);
                    const uint32 now = group[n];
                    load(n);
                    source.clean(now * GROUP + lane * STRIP, x);
                    kept.apply(x, none);
                    visit(pass, now, x);
                }
            }
        }
    }
    __device__ static uint64 mass_of_weight(float w) { return __float2ull_rz(__fmul_rn(w, ONE)); }
    __device__ uint64 mass_of(float x) const { return mass_of_weight(kept.scale.weight(x, kept.largest)); }
    // The key of the largest of 16 bytes of numbers, of what can be drawn or not.
    __device__ uint32 key_of_four(const uint4 &four) const {
        const uint32 words[] = {four.x, four.y, four.z, four.w};
        if (source.row.type == FLOAT16) return key_of(largest_of<FLOAT16>(words));
        return key_of(source.row.type == FLOAT32 ? largest_of<FLOAT32>(words) : largest_of<BFLOAT16>(words));
    }
    __device__ void note_strip(uint32 first) {
        const uint32 at = atomicAdd(&shared.strip_count, 1);
        if (at < MOST_CANDIDATES) shared.candidate.strip[at] = first;
    }
    // Notes the strips that have a number from `from` on, of what can be drawn or not, and one that the row's end cuts.
    __device__ void find_strips() {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const Row &row = source.row;
        const bool is_wide = row.type == FLOAT32;
        // The groups that have one, in any order, so that warps have as many of them each.
        uint32 *const open = reinterpret_cast<uint32 *>(shared.candidate.mass);
        for (uint32 n = threadIdx.x; n < group_words; n += DRAW_THREADS) {
            if (shared.group[n] < from) continue;
            const uint32 at = atomicAdd(&shared.open_count, 1);
            if (at < MOST_CANDIDATES) open[at] = n;
        }
        __syncthreads();
        const uint32 count = shared.open_count;
        if (count > MOST_CANDIDATES) {
            if (threadIdx.x == 0) shared.strip_count = MOST_CANDIDATES + 1;
            return;
        }
        // The lane's strip of an open group; past the last one the row has nothing.
        const auto strip_of = [&](uint32 n) { return n < count ? open[n] * GROUP + lane * STRIP : row.tokens; };
#pragma unroll 1
        for (uint32 n = warp; n < count && !row.is_adjacent; n += DRAW_WARPS) {
            const uint32 first = strip_of(n);
            AnyStrip strip;
            float x[STRIP];
            strip.load(row, first, source.scale.is_weights);
            strip.widen(row.type, x);
            float largest = x[0];
#pragma unroll
            for (uint32 e = 1; e < STRIP; ++e) largest = larger_or_nan(largest, x[e]);
            if (first < row.tokens && key_of(largest) >= from) note_strip(first);
        }
        // A strip is one load of 16 bytes or two.
        const uint32 at_once = is_wide ? FOURS / 2 : FOURS;
#pragma unroll 1
        for (uint32 begin = warp; begin < count && row.is_adjacent; begin += at_once * DRAW_WARPS) {
            uint4 four[FOURS];
            uint32 first[FOURS];
#pragma unroll
            for (uint32 n = 0; n < FOURS; ++n) {
                first[n] = strip_of(begin + (is_wide ? n / 2 : n) * DRAW_WARPS);
                four[n] = {};
                if (first[n] + STRIP <= row.tokens)
                    four[n] = as<uint4>(row.data + (is_wide ? uint64(first[n]) * 4 + n % 2 * 16 : uint64(first[n]) * 2));
            }
#pragma unroll
            for (uint32 n = 0; n < FOURS; ++n) {
                if (is_wide && n % 2) continue;
                uint32 key = key_of_four(four[n]);
                if (is_wide) key = max(key, key_of_four(four[n | 1]));
                if (first[n] < row.tokens && (key >= from || first[n] + STRIP > row.tokens)) note_strip(first[n]);
            }
        }
    }
    // Keeps the candidates of the strips that were found: a lane has one number.
    __device__ void take_candidates() {
        const uint32 strips = shared.strip_count, e = threadIdx.x % STRIP;
        if (strips > MOST_CANDIDATES && threadIdx.x == 0) shared.candidate_count = MOST_CANDIDATES + 1;
#pragma unroll 1
        for (uint32 n = threadIdx.x / STRIP; n < strips && strips <= MOST_CANDIDATES; n += DRAW_THREADS / STRIP) {
            const uint32 token = shared.candidate.strip[n] + e;
            float x = token < source.row.tokens ? source.number(token) : none;
            if (kept.drops(x)) x = none;
            if (n < MOST_STRIPS) shared.candidate.number[e][n] = x;
            if (key_of(x) < from) continue;
            const uint32 at = atomicAdd(&shared.candidate_count, 1);
            if (at < MOST_CANDIDATES) shared.candidate.key[at] = key_of(x);
        }
    }
    __device__ void collect() {
        find_strips();
        __syncthreads();
        take_candidates();
    }
    __device__ void visit(Pass pass, uint32 group, const float (&x)[STRIP]) {
        if (pass == SUM_SEGMENTS) {
            SegmentSum &segment = shared.segment[group / GROUPS];
            const uint64 sum = warp_sum(source.scale.sum(x, segment.largest));
            if (threadIdx.x % WARP == 0) atomicAdd(&segment.sum, sum);
            return;
        }
        uint32 best = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) best = max(best, key_of(x[e]));
        if (pass == FIND_LARGEST) {
            best = __reduce_max_sync(FULL_WARP, best);
            if (threadIdx.x % WARP == 0) shared.group[group] = best;
            return;
        }
        if (pass == COLLECT_DIGIT) {
            if (best < from) return;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) {
                const uint32 number = key_of(x[e]);
                if (number < from || !digits.has(number)) continue;
                const uint32 at = atomicAdd(&shared.candidate_count, 1);
                if (at < MOST_CANDIDATES) shared.candidate.key[at] = number;
            }
            return;
        }
        if (best < counted && pass != SUM_MASS) return;
        float w[STRIP];
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) w[e] = x[e];
        if (wants_mass) kept.scale.weigh(w, kept.largest);
        // What is dropped weighs nothing.
#pragma unroll
        for (uint32 e = 0; e < STRIP && pass == SUM_MASS; ++e) mass += mass_of_weight(w[e]);
        if (shared.group[group] < counted) return;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) {
            const uint32 number = key_of(x[e]);
            if (number < counted || !digits.has(number)) continue;
            digits.count(shared.sums, number, wants_mass ? mass_of_weight(w[e]) : 1);
        }
    }

    // --- keys ------------------------------------------------------------------------------------------------------------------------

    // The largest key from low to high, whose bits below `last` count as 0, that has as much as is wanted, or a lower one that has no more than
    // `enough`. Low has what is wanted. `count(key)` gives a lane's part of what a key has: each warp asks about one of eight keys, so that a
    // barrier is for three bits.
    template <typename Count> __device__ uint32 bisect(uint32 low, uint32 high, uint32 last, uint64 enough, const Count &count) const {
        static_assert(DRAW_WARPS == 8);
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, bits = 32 - __clz(low ^ high);
        uint32 found = bits < 32 ? high >> bits << bits : 0;
        uint64 has = ~uint64(0);
#pragma unroll 1
        for (uint32 bit = bits, turn = 0; bit > last && has > enough; ++turn) {
            const uint32 digits = min(bit - last, 3u);
            bit -= digits;
            const uint64 sum = warp_sum(warp >> digits ? 0 : count(found | warp << bit));
            if (lane == 0) shared.counts[turn % 2][warp] = sum;
            __syncthreads();
            // What a key has falls from digit to digit.
            const uint64 had = lane && !(lane >> digits) ? shared.counts[turn % 2][lane] : 0;
            const uint32 digit = __popc(__ballot_sync(FULL_WARP, had >= wanted));
            if (digit) has = __shfl_sync(FULL_WARP, had, digit);
            found |= digit << bit;
        }
        __syncthreads();
        return found;
    }
    // Rows of 16 bits have the same last digits: those of a number.
    __device__ uint32 last_bit() const { return source.row.type == FLOAT32 ? 0 : source.row.type == FLOAT16 ? 13 : 16; }
    __device__ float bound_of(uint32 key) const { return number_of(key >> 31 ? key : key | ((1u << last_bit()) - 1)); }
    __device__ uint32 bound_key() const { return max(key_of(kept.bound), least); }
    // A lane's part of what the candidates from a key on have.
    __device__ uint64 had_from(uint32 key) const {
        uint64 sum = 0;
#pragma unroll 1
        for (uint32 n = threadIdx.x % WARP * 4; n < shared.candidate_count; n += 4 * WARP) sum += had_by_four(n, key);
        return sum;
    }
    __device__ static uint4 fours(const uint32 *words, uint32 n) { return *reinterpret_cast<const uint4 *>(words + n); }
    // What four candidates from n on have.
    __device__ uint64 had_by_four(uint32 n, uint32 key) const {
        const uint4 keys = fours(shared.candidate.key, n);
        ulonglong2 low = {1, 1}, high = {1, 1};
        if (wants_mass) {
            low = *reinterpret_cast<const ulonglong2 *>(shared.candidate.mass + n);
            high = *reinterpret_cast<const ulonglong2 *>(shared.candidate.mass + n + 2);
        }
        return (keys.x >= key ? low.x : 0) + (keys.y >= key ? low.y : 0) + (keys.z >= key ? high.x : 0) + (keys.w >= key ? high.y : 0);
    }
    // The bound among the candidates, of which those from `bound` on have what is wanted.
    __device__ float bound_among_candidates(uint32 bound) const {
        const uint32 count = shared.candidate_count;
        if (count > DRAW_THREADS)
            return bound_of(bisect(from, key_of(kept.largest), last_bit(), 0, [&](uint32 key) { return had_from(max(key, bound)); }));
        // Some lanes for each candidate.
        uint32 lanes = 1;
        while (lanes < WARP && count * lanes * 2 <= DRAW_THREADS) lanes *= 2;
        const uint32 own = threadIdx.x / lanes;
        uint32 mine = own < count ? shared.candidate.key[own] : 0;
        uint64 sum = 0;
#pragma unroll 1
        for (uint32 n = (threadIdx.x & (lanes - 1)) * 4; n < count; n += 4 * lanes) sum += had_by_four(n, mine);
#pragma unroll 1
        for (uint32 step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        if (sum < wanted) mine = 0;
        return number_of(~cta_min(draw, ~mine));
    }
    __device__ void weigh_candidates() {
        for (uint32 n = threadIdx.x; n < shared.candidate_count; n += DRAW_THREADS)
            shared.candidate.mass[n] = mass_of(number_of(shared.candidate.key[n]));
    }
    __device__ void forget_candidates() {
        if (threadIdx.x == 0) shared.candidate_count = shared.strip_count = shared.open_count = 0;
    }
    // Whether all candidates are here. Those past the last one then have nothing, so that loops go through several at a time.
    __device__ bool close_candidates() const {
        const uint32 count = shared.candidate_count, n = threadIdx.x;
        if (count > MOST_CANDIDATES) return false;
        if (n < DRAW_THREADS - count % DRAW_THREADS && count + n < MOST_CANDIDATES) shared.candidate.key[count + n] = 0;
        return true;
    }

    // --- steps: each says which pass it needs, and leaves the step that follows ------------------------------------------------------

    // Groups without what min-p drops.
    __device__ void min_p() {
        // Weights are off by less than 10^-5, so that nothing stays of a group whose largest number is that far below.
        for (uint32 n = threadIdx.x; n < groups; n += DRAW_THREADS)
            if (kept.scale.weight(number_of(shared.group[n]), kept.largest) < fminf(kept.min_p, 1.0f) * 0.999f) shared.group[n] = least - 1;
    }
    // As many groups as there are tokens wanted have a number from here on.
    __device__ uint32 guess_for_top_k() const {
        const auto count = [&](uint32 key) {
            uint4 sum = {};
#pragma unroll 1
            for (uint32 n = threadIdx.x % WARP * 4; n < group_words; n += 2 * 4 * WARP) {
                const uint4 a = fours(shared.group, n), b = fours(shared.group, n + 4 * WARP);
                sum.x += (a.x >= key) + (b.x >= key), sum.y += (a.y >= key) + (b.y >= key);
                sum.z += (a.z >= key) + (b.z >= key), sum.w += (a.w >= key) + (b.w >= key);
            }
            return uint64(sum.x + sum.y + sum.z + sum.w);
        };
        return max(bisect(0, 0xffffffffu, 16, wanted + wanted / 4 + 8, count), least);
    }
    // A key such that the tokens below it have in all less than may be dropped: the mass is at least that of the groups' largest numbers.
    __device__ uint32 guess_for_top_p(float p) {
        uint64 least_mass = 0;
        for (uint32 n = threadIdx.x; n < groups; n += DRAW_THREADS)
            if (shared.group[n] >= from) least_mass += mass_of(number_of(shared.group[n]));
        const float share = (1.0f - fmaxf(p, 0.0f)) * float(cta_sum(draw, least_mass)) / (ONE * source.row.tokens);
        const float guess = kept.scale.is_weights ? kept.largest * share * 0.999f : kept.largest + __log2f(share) / kept.scale.c - 1e-3f;
        return guess == guess ? max(key_of(guess), from) : from;
    }
    // Whether the tokens of the known digits and above are likely to be few enough for candidates, if they lie anywhere.
    __device__ bool seems_few() const {
        uint32 open = 0;
        for (uint32 n = threadIdx.x; n < groups; n += DRAW_THREADS) open += shared.group[n] >= digits.key;
        return float(uint32(cta_sum(draw, open))) <= groups * (1.0f - __expf(-float(MOST_CANDIDATES) / groups));
    }
    __device__ void begin_digit() {
        if (!digits.bits) digits.begin(counted, key_of(kept.largest));
        digits.next(shared.sums);
    }
    // Takes the next digit of the bound's key; true where the bound is found. There is no digit where the guess was too high.
    __device__ bool take_digit() {
        if (!digits.take(draw, shared.sums, wanted)) {
            // Fewer than top-k: all stay. Otherwise the guess was too high.
            if (counted == bound_key()) return true;
            counted = bound_key(), digits.bits = 0;
            return false;
        }
        if (digits.place > last_bit()) return false;
        kept.bound = bound_of(digits.key);
        return true;
    }
    // The largest numbers of the segments of what stays.
    __device__ void begin_segments() {
        const uint32 s = threadIdx.x, segments = source.segments();
        uint32 best = 0;
        if (s < segments) {
            for (uint32 n = 0; n < GROUPS; ++n)
                if (const uint32 group = s * GROUPS + n; group * GROUP < source.row.tokens) best = max(best, shared.group[group]);
        }
        shared.segment[s] = {best >= from ? number_of(best) : none, 0};
    }
    __device__ void sum_strips() {
        const uint32 n = threadIdx.x;
        if (n >= shared.strip_count) return;
        float x[STRIP];
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) x[e] = shared.candidate.number[e][n];
        kept.apply(x, none);
        SegmentSum &segment = shared.segment[shared.candidate.strip[n] / SEGMENT];
        const uint64 sum = segment.largest > none ? source.scale.sum(x, segment.largest) : 0;
        shared.candidate.mass[n] = sum;
        if (sum) atomicAdd(&segment.sum, sum);
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) shared.candidate.number[e][n] = x[e];
    }

    // --- after run() -----------------------------------------------------------------------------------------------------------------

    // Whether all that stays lies in strips that are at hand.
    __device__ bool has_strips() const { return is_complete && shared.strip_count <= MOST_STRIPS; }
    // The token of a segment for a target below the segment's sum, as draw_inside gives it.
    __device__ uint32 draw_from_strips(uint32 s, float m, uint64 target) const {
        const uint32 n = threadIdx.x, first = n < shared.strip_count ? shared.candidate.strip[n] : 0xffffffff;
        const bool is_in = first / SEGMENT == s;
        if (n == 0) draw.token = s * SEGMENT, shared.candidate_count = 0;
        __syncthreads();
        // The segment's strips, in any order. None is out of bounds, whatever changes during the call.
        if (is_in) {
            const uint32 at = atomicAdd(&shared.candidate_count, 1);
            if (at < MOST_STRIPS) shared.candidate.key[at] = n;
        }
        __syncthreads();
        if (is_in) {
            uint64 before = 0;
#pragma unroll 1
            for (uint32 k = 0; k < min(shared.candidate_count, MOST_STRIPS); ++k) {
                const uint32 other = min(shared.candidate.key[k], MOST_STRIPS - 1);
                if (shared.candidate.strip[other] < first) before += shared.candidate.mass[other];
            }
            if (before <= target && target < before + shared.candidate.mass[n]) {
                float x[STRIP];
#pragma unroll
                for (uint32 e = 0; e < STRIP; ++e) x[e] = shared.candidate.number[e][n];
                draw.token = first + pick_token(x, source.scale, m, target - before);
            }
        }
        __syncthreads();
        return draw.token;
    }

    // Sets the bound of what stays, from the largest number of the row and of its groups, and sums the segments of what stays: thread s gets
    // segment s.
    __device__ SegmentSum run(const uint32 *group_keys) {
        for (uint32 n = threadIdx.x; n < group_words; n += DRAW_THREADS) shared.group[n] = n < groups ? group_keys[n] : 0;
        const float p = source.top_p();
        const uint32 k = source.top_k();
        Pass pass = COLLECT;
#pragma unroll 1
        for (Step step = kept.min_p > 0.0f ? MIN_P : TOP_K; step != DONE;) {
            __syncthreads();
            bool reads = true;
            switch (step) {
            case MIN_P:
                min_p();
                pass = FIND_LARGEST, step = TOP_K;
                break;
            case TOP_K:
                wanted = k;
                reads = k > 0;
                if (reads) from = guess_for_top_k();
                forget_candidates();
                pass = COLLECT, step = k ? TOP_K_COLLECTED : TOP_P;
                break;
            case TOP_K_COLLECTED:
                reads = false;
                is_complete = close_candidates() && (shared.candidate_count >= k || from == least);
                step = !is_complete ? DIGIT : shared.candidate_count >= k ? BOUND : TOP_P;
                break;
            case TOP_P:
                from = bound_key(), mass = 0, wants_mass = true;
                reads = p < 1.0f && !is_complete;
                if (p < 1.0f && is_complete) weigh_candidates();
                if (reads) counted = guess_for_top_p(p), begin_digit();
                pass = SUM_MASS, step = p < 1.0f ? TOP_P_SUMMED : SEGMENTS;
                break;
            case TOP_P_SUMMED: {
                uint64 all;
                if (is_complete) all = warp_sum(had_from(from));
                else cta_sum_before(draw, mass, all);
                wanted = min(max(__double2ull_rz(ceil(__dmul_rn(double(fmaxf(p, 0.0f)), double(all)))), uint64(1)), all);
                if (threadIdx.x == 0) shared.stays = wanted;
                reads = false;
                step = is_complete ? BOUND : DIGIT_COUNTED;
                break;
            }
            case TOP_P_COLLECTED:
                is_complete = close_candidates();
                reads = !is_complete;
                if (is_complete) weigh_candidates(), wanted = shared.stays;
                else __syncthreads(), forget_candidates();
                pass = COLLECT_DIGIT, step = is_complete ? BOUND : DIGIT_COLLECTED;
                break;
            case BOUND:
                reads = false;
                kept.bound = bound_among_candidates(bound_key());
                step = wants_mass ? SEGMENTS : TOP_P;
                break;
            case DIGIT:
                from = counted;
                begin_digit();
                pass = COUNT_DIGITS, step = DIGIT_COUNTED;
                break;
            case DIGIT_COUNTED: {
                const bool is_found = take_digit();
                reads = !is_found && wants_mass && digits.bits;
                if (is_found) digits.bits = 0;
                step = is_found ? wants_mass ? SEGMENTS : TOP_P : DIGIT;
                if (!reads) break;
                from = counted = digits.key;
                forget_candidates();
                pass = seems_few() ? COLLECT : COLLECT_DIGIT, step = pass == COLLECT ? TOP_P_COLLECTED : DIGIT_COLLECTED;
                break;
            }
            case DIGIT_COLLECTED:
                reads = false;
                step = DIGIT;
                if (!close_candidates()) break;
                weigh_candidates();
                __syncthreads();
                kept.bound = bound_among_candidates(bound_key());
                step = SEGMENTS;
                break;
            case SEGMENTS:
                from = bound_key();
                begin_segments();
                reads = !is_complete || shared.strip_count > MOST_STRIPS;
                pass = SUM_SEGMENTS, step = reads ? DONE : STRIPS;
                break;
            default:
                reads = false;
                sum_strips();
                step = DONE;
            }
            __syncthreads();
            if (reads) scan(pass);
        }
        __syncthreads();
        return shared.segment[threadIdx.x];
    }
};
