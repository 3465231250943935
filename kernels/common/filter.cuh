// The filters of a row, by a CTA of DRAW_THREADS threads: src/ops/draw/filter.rs defines them and computes them on the CPU.
//
// A group is 256 neighbouring tokens, a strip for each lane of a warp. The largest number of each is known, so that a warp reads just the
// groups that matter: those with a number at or above a bound. Few tokens stay of most rows. A guess below the bound, from the groups' largest
// numbers for top-k and from the mass for top-p, collects candidates; if they have what the filter wants, the bound is one of them, whatever
// the guess was. Otherwise the bound is found over the whole row, digit by digit of its key.
//
//   [min-p] ── top-k: collect ── [digits] ── top-p: [mass ── collect] ── [digits] ── sums of segments
//
// A pass over the row costs a warp some thousand cycles for each group that it reads, one after the other: it does little with a candidate but keep it.
// What follows from candidates is computed by a thread for each of them, or for each of their strips. All passes are made at one place of the code.
#pragma once

#include "common/draw.cuh"

constexpr uint32 GROUP = WARP * STRIP, GROUPS = SEGMENT / GROUP, MOST_GROUPS = MOST_SEGMENTS * GROUPS;
constexpr uint32 MOST_CANDIDATES = 1024, MOST_STRIPS = DRAW_THREADS, DIGITS = 2048;
constexpr uint32 FEW_GROUPS = 8;  // that a warp asks the L1 cache for

struct Candidates {
    uint32 key[MOST_CANDIDATES];
    uint64 mass[MOST_CANDIDATES];
    // The strips that they lie in: the first token of each, and the numbers of each, MOST_STRIPS apart.
    uint32 first[MOST_STRIPS];
    float number[STRIP][MOST_STRIPS];
};

struct FilterShared {
    uint32 group[MOST_GROUPS];  // keys of the groups' largest numbers
    union {
        Candidates candidate;
        uint32 count[2][DIGITS];  // low and high words
    };
    uint32 candidate_count, strip_count;
    uint64 counts[2][DRAW_WARPS];
    SegmentSum segment[MOST_SEGMENTS];
};

// The filters of one row. A Source has row, scale, kept, top_k(), top_p() and clean(first, x), which makes what cannot be drawn `none`.
template <typename Source> struct Filter {
    // What a pass does with the numbers that it reads.
    enum Pass : uint32 { FIND_LARGEST, COLLECT, SUM_MASS, COUNT_DIGITS, SUM_SEGMENTS };
    // What is done before a pass, or instead of one.
    enum Step : uint32 {
        MIN_P, TOP_K, TOP_K_COLLECTED, TOP_P, TOP_P_SUMMED, TOP_P_COLLECTED, TOP_P_WEIGHED, BOUND, DIGIT, DIGIT_COUNTED, SEGMENTS, STRIPS, DONE
    };

    DrawShared &draw;
    FilterShared &shared;
    Source &source;
    Kept &kept;
    float none;
    uint32 groups;
    uint32 least;      // key of the smallest number that can be drawn, or more
    uint32 from;       // the key from which on the pass reads groups
    bool wants_mass;   // the bound is wanted for a mass, and not for a number of tokens
    bool is_complete;  // every token that stays is a candidate
    uint64 wanted;     // tokens or mass that stay
    uint64 mass;       // what the pass has summed
    uint32 key, known, place;  // digits of the bound's key, which of its bits are known, and the next digit

    __device__ Filter(DrawShared &draw, FilterShared &shared, Source &source)
        : draw(draw), shared(shared), source(source), kept(source.kept), none(source.scale.none()), groups((source.row.tokens + GROUP - 1) / GROUP),
          least(key_of(none) + 1), from(least), wants_mass(false), is_complete(false), wanted(0), mass(0), key(0), known(0), place(0) {}

    // --- one pass over the row -------------------------------------------------------------------------------------------------------

    // Asks the L1 cache for a group, so that the latencies of several overlap.
    __device__ void prefetch_group(uint32 group) const {
        const Row &row = source.row;
        if (!row.is_adjacent) return;
        const uint32 bytes = row.type == FLOAT32 ? 4 : 2, end = min(group * GROUP + GROUP, row.tokens);
#pragma unroll 1
        for (uint32 token = group * GROUP; token < end; token += 128 / bytes)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(row.data + uint64(token) * bytes));
    }
    // Hands each strip of the groups that have a key from `from` on to visit(), without what is dropped by now.
    __device__ void scan(Pass pass) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
        for (uint32 base = warp; base < groups; base += WARP * DRAW_WARPS) {
            const uint32 mine = base + lane * DRAW_WARPS;
            uint32 open = __ballot_sync(FULL_WARP, mine < groups && shared.group[mine] >= from), group = MOST_GROUPS;
            if (open >> lane & 1 && __popc(open) <= FEW_GROUPS) prefetch_group(mine);
            AnyStrip strip = {};
            // The next group loads while this one is visited.
#pragma unroll 1
            while (open || group < MOST_GROUPS) {
                const AnyStrip loaded = strip;
                const uint32 now = group;
                group = open ? base + (__ffs(open) - 1) * DRAW_WARPS : MOST_GROUPS;
                open &= open - 1;
                if (group < MOST_GROUPS) strip.load(source.row, group * GROUP + lane * STRIP, source.scale.is_weights);
                if (now == MOST_GROUPS) continue;
                float x[STRIP];
                loaded.widen(source.row.type, x);
                source.clean(now * GROUP + lane * STRIP, x);
                kept.apply(x, none);
                visit(pass, now, x);
            }
        }
    }
    __device__ uint64 mass_of(float x) const { return __float2ull_rz(__fmul_rn(kept.scale.weight(x, kept.largest), ONE)); }
    // Keeps a strip that has candidates.
    __device__ void collect(uint32 group, const float (&x)[STRIP]) {
        uint32 mine = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) mine += key_of(x[e]) >= from;
        uint32 at = atomicAdd(&shared.candidate_count, mine);
        const uint32 strip = atomicAdd(&shared.strip_count, 1);
        if (strip < MOST_STRIPS) {
            shared.candidate.first[strip] = group * GROUP + threadIdx.x % WARP * STRIP;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) shared.candidate.number[e][strip] = x[e];
        }
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e)
            if (key_of(x[e]) >= from && at < MOST_CANDIDATES) shared.candidate.key[at++] = key_of(x[e]);
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
        if (best < from) return;
        if (pass == COLLECT) return collect(group, x);
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) {
            const uint32 number = key_of(x[e]);
            if (number < from) continue;
            const uint64 has = wants_mass ? mass_of(x[e]) : 1;
            if (pass == SUM_MASS) {
                mass += has;
            } else if ((number & known) == key) {
                const uint32 digit = number >> shift() & digits(), low = uint32(has);
                const uint32 high = uint32(has >> 32) + (atomicAdd(&shared.count[0][digit], low) + low < low);
                if (high) atomicAdd(&shared.count[1][digit], high);
            }
        }
    }

    // --- keys ------------------------------------------------------------------------------------------------------------------------

    // The largest key from low to high, whose bits below `last` count as 0, that has as much as is wanted. Low has it. `count(key)` gives a lane's
    // part of what a key has: each warp asks about one of eight keys, so that a barrier is for three bits.
    template <typename Count> __device__ uint32 bisect(uint32 low, uint32 high, uint32 last, const Count &count) const {
        static_assert(DRAW_WARPS == 8);
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, bits = 32 - __clz(low ^ high);
        uint32 found = bits < 32 ? high >> bits << bits : 0;
#pragma unroll 1
        for (uint32 bit = bits, turn = 0; bit > last; ++turn) {
            const uint32 digits = min(bit - last, 3u);
            bit -= digits;
            const uint64 sum = warp_sum(warp >> digits ? 0 : count(found | warp << bit));
            if (lane == 0) shared.counts[turn % 2][warp] = sum;
            __syncthreads();
            uint32 digit = 0;
#pragma unroll
            for (uint32 w = 1; w < DRAW_WARPS; ++w)
                if (!(w >> digits) && shared.counts[turn % 2][w] >= wanted) digit = w;
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
#pragma unroll 4
        for (uint32 n = threadIdx.x % WARP; n < shared.candidate_count; n += WARP) sum += had_by(n, key);
        return sum;
    }
    __device__ uint64 had_by(uint32 n, uint32 key) const {
        const uint64 has = wants_mass ? shared.candidate.mass[n] : 1;
        return shared.candidate.key[n] >= key ? has : 0;
    }
    // The bound among the candidates, of which those from `bound` on have what is wanted.
    __device__ float bound_among_candidates(uint32 bound) const {
        if (shared.candidate_count > DRAW_THREADS)
            return bound_of(bisect(from, key_of(kept.largest), last_bit(), [&](uint32 key) { return had_from(max(key, bound)); }));
        uint32 mine = 0;
        if (threadIdx.x < shared.candidate_count) {
            mine = shared.candidate.key[threadIdx.x];
            uint64 sum = 0;
#pragma unroll 4
            for (uint32 n = 0; n < shared.candidate_count; ++n) sum += had_by(n, mine);
            if (sum < wanted) mine = 0;
        }
        return number_of(~cta_min(draw, ~mine));
    }
    __device__ void weigh_candidates() {
        for (uint32 n = threadIdx.x; n < shared.candidate_count; n += DRAW_THREADS)
            shared.candidate.mass[n] = mass_of(number_of(shared.candidate.key[n]));
    }
    __device__ bool has_all_candidates() const { return shared.candidate_count <= MOST_CANDIDATES; }

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
            uint32 sum = 0;
#pragma unroll 8
            for (uint32 n = threadIdx.x % WARP; n < groups; n += WARP) sum += shared.group[n] >= key;
            return uint64(sum);
        };
        return max(bisect(0, 0xffffffffu, 16, count), least);
    }
    // What has less than this has in all less than may be dropped. NaN where it is not known.
    __device__ float guess_for_top_p(uint64 all) const {
        const float share = float(all - wanted) / (ONE * source.row.tokens);
        return kept.scale.is_weights ? kept.largest * share : kept.largest + __log2f(share) / kept.scale.c - 1e-3f;
    }
    // Where the next digit of a key is, and its bits.
    __device__ uint32 shift() const { return place == 0 ? 21 : place == 1 ? 10 : 0; }
    __device__ uint32 digits() const { return place < 2 ? DIGITS - 1 : 1023; }
    // Takes the next digit of the bound's key; true where the bound is found.
    __device__ bool take_digit() {
        // A thread has eight digits; thread 0 has the largest.
        const auto count = [&](uint32 digit) { return uint64(shared.count[1][digit]) << 32 | shared.count[0][digit]; };
        uint64 mine = 0, total;
        const uint32 top = DIGITS - 1 - threadIdx.x * 8;
#pragma unroll
        for (uint32 n = 0; n < 8; ++n) mine += count(top - n);
        uint64 before = cta_sum_before(draw, mine, total);
        if (total < wanted) return true;  // fewer than top-k: all stay
        if (before < wanted && wanted <= before + mine) {
            uint32 digit = top;
            while (count(digit) < wanted - before) before += count(digit--);
            draw.token = digit;
            draw.target = wanted - before;
        }
        __syncthreads();
        key |= draw.token << shift();
        known |= digits() << shift();
        wanted = draw.target;
        if (++place < 3 && (place < 2 || !last_bit())) return false;
        kept.bound = place < 3 ? number_of(key >> 31 ? key : key | 0x3ff) : number_of(key);
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
        if (threadIdx.x >= shared.strip_count) return;
        float x[STRIP];
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) x[e] = shared.candidate.number[e][threadIdx.x];
        kept.apply(x, none);
        SegmentSum &segment = shared.segment[shared.candidate.first[threadIdx.x] / SEGMENT];
        if (segment.largest > none) atomicAdd(&segment.sum, source.scale.sum(x, segment.largest));
    }

    // Sets the bound of what stays, from the largest number of the row and of its groups, and sums the segments of what stays: thread s gets
    // segment s.
    __device__ SegmentSum run(const uint32 *group_keys) {
        for (uint32 n = threadIdx.x; n < groups; n += DRAW_THREADS) shared.group[n] = group_keys[n];
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
                if (threadIdx.x == 0) shared.candidate_count = shared.strip_count = 0;
                pass = COLLECT, step = k ? TOP_K_COLLECTED : TOP_P;
                break;
            case TOP_K_COLLECTED:
                reads = false;
                is_complete = has_all_candidates() && (shared.candidate_count >= k || from == least);
                step = !is_complete ? DIGIT : shared.candidate_count >= k ? BOUND : TOP_P;
                break;
            case TOP_P:
                from = bound_key(), mass = 0, wants_mass = true;
                reads = p < 1.0f && !is_complete;
                if (p < 1.0f && is_complete) weigh_candidates();
                pass = SUM_MASS, step = p < 1.0f ? TOP_P_SUMMED : SEGMENTS;
                break;
            case TOP_P_SUMMED: {
                uint64 all;
                if (is_complete) all = warp_sum(had_from(from));
                else cta_sum_before(draw, mass, all);
                wanted = min(max(__double2ull_rz(ceil(__dmul_rn(double(fmaxf(p, 0.0f)), double(all)))), uint64(1)), all);
                const float guess = guess_for_top_p(all);
                reads = !is_complete && guess == guess;
                if (reads) from = max(key_of(guess), from);
                if (reads && threadIdx.x == 0) shared.candidate_count = shared.strip_count = 0;
                pass = COLLECT, step = is_complete ? TOP_P_WEIGHED : reads ? TOP_P_COLLECTED : DIGIT;
                break;
            }
            case TOP_P_COLLECTED:
                reads = false;
                is_complete = has_all_candidates();
                if (is_complete) weigh_candidates();
                step = is_complete ? TOP_P_WEIGHED : DIGIT;
                break;
            case TOP_P_WEIGHED:
                reads = false;
                is_complete = warp_sum(had_from(from)) >= wanted;
                step = is_complete ? BOUND : DIGIT;
                break;
            case BOUND:
                reads = false;
                kept.bound = bound_among_candidates(bound_key());
                step = wants_mass ? SEGMENTS : TOP_P;
                break;
            case DIGIT:
                if (place == 0) from = bound_key();
                for (uint32 n = threadIdx.x; n < DIGITS; n += DRAW_THREADS) shared.count[0][n] = shared.count[1][n] = 0;
                pass = COUNT_DIGITS, step = DIGIT_COUNTED;
                break;
            case DIGIT_COUNTED:
                reads = false;
                step = !take_digit() ? DIGIT : wants_mass ? SEGMENTS : TOP_P;
                if (step != DIGIT) key = known = place = 0;
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
