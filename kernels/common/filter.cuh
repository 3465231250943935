// The filters of a row, by a CTA of DRAW_THREADS threads: src/ops/draw/filter.rs defines them and computes them on the CPU.
//
// A group is 256 neighbouring tokens, a strip for each lane of a warp. The largest number of each is known, so that a warp reads just the
// groups that matter: those with a number at or above a bound. Few tokens stay of most rows. A guess below the bound, from the groups' largest
// numbers for top-k and from the mass for top-p, collects candidates; if they have what the filter wants, the bound is one of them, whatever
// the guess was. Otherwise the bound is found over the whole row, digit by digit of its key.
#pragma once

#include "common/draw.cuh"

constexpr uint32 GROUP = WARP * STRIP, GROUPS = SEGMENT / GROUP, MOST_GROUPS = MOST_SEGMENTS * GROUPS;
constexpr uint32 MOST_CANDIDATES = 1024, DIGITS = 2048;

struct Candidates {
    uint32 key[MOST_CANDIDATES];
    uint64 mass[MOST_CANDIDATES];
};

struct FilterShared {
    uint32 group[MOST_GROUPS];  // keys of the groups' largest numbers
    union {
        Candidates candidate;
        uint32 count[2][DIGITS];  // low and high words
    };
    uint32 candidate_count;
    uint64 totals[2][DRAW_WARPS];
    SegmentSum segment[MOST_SEGMENTS];
};

// The filters of one row. A Source has row, scale, kept, top_k(), top_p() and clean(first, x), which makes what cannot be drawn `none`.
template <typename Source> struct Filter {
    DrawShared &draw;
    FilterShared &shared;
    Source &source;
    Kept &kept;
    float none;
    uint32 least;     // key of the smallest number that can be drawn, or more
    uint32 largest;   // the row's, as a key
    bool is_complete; // every token that stays is a candidate

    __device__ Filter(DrawShared &draw, FilterShared &shared, Source &source)
        : draw(draw), shared(shared), source(source), kept(source.kept), none(source.scale.none()), least(key_of(none) + 1),
          largest(key_of(source.kept.largest)), is_complete(false) {}

    // Hands each strip of the groups that have a key from `from` on to visit(group, x), without what is dropped by now.
    template <typename Visit> __device__ void scan(uint32 from, const Visit &visit) const {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = (source.row.tokens + GROUP - 1) / GROUP;
        for (uint32 base = warp; base < groups; base += WARP * DRAW_WARPS) {
            const uint32 mine = base + lane * DRAW_WARPS;
            uint32 open = __ballot_sync(FULL_WARP, mine < groups && shared.group[mine] >= from), group = MOST_GROUPS;
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
                visit(now, x);
            }
        }
    }
    __device__ uint64 mass(float x) const { return __float2ull_rz(__fmul_rn(kept.scale.weight(x, kept.largest), ONE)); }

    // The sum over the CTA of numbers below 2^49, in which a second call follows without a barrier.
    __device__ uint64 total(uint64 value, uint32 parity) const {
        value = warp_sum(value);
        if (threadIdx.x % WARP == 0) shared.totals[parity][threadIdx.x / WARP] = value;
        __syncthreads();
        uint64 sum = 0;
#pragma unroll
        for (uint32 w = 0; w < DRAW_WARPS; ++w) sum += shared.totals[parity][w];
        return sum;
    }
    // The largest key from low to high, whose bits below `last` count as 0, that `count` says has `wanted`. Low has it.
    template <typename Count> __device__ uint32 bisect(uint32 low, uint32 high, uint32 last, uint64 wanted, const Count &count) const {
        const uint32 bits = 32 - __clz(low ^ high);
        uint32 key = bits < 32 ? high >> bits << bits : 0;
        for (uint32 bit = bits; bit-- > last;) {
            const uint32 middle = key | 1u << bit;
            if (total(count(middle), bit % 2) >= wanted) key = middle;
        }
        __syncthreads();
        return key;
    }
    // Rows of 16 bits have the same last digits: those of a number.
    __device__ uint32 last_bit() const { return source.row.type == FLOAT32 ? 0 : source.row.type == FLOAT16 ? 13 : 16; }
    __device__ float bound_of(uint32 key) const { return number_of(key >> 31 ? key : key | ((1u << last_bit()) - 1)); }

    // Collects what has a key from `from` on; false if that is too much.
    __device__ bool collect(uint32 from, bool by_mass) {
        __syncthreads();
        if (threadIdx.x == 0) shared.candidate_count = 0;
        __syncthreads();
        scan(from, [&](uint32, const float (&x)[STRIP]) {
            uint32 mine = 0;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) mine += key_of(x[e]) >= from;
            if (!mine) return;
            uint32 at = atomicAdd(&shared.candidate_count, mine);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) {
                if (key_of(x[e]) < from || at >= MOST_CANDIDATES) continue;
                shared.candidate.key[at] = key_of(x[e]);
                if (by_mass) shared.candidate.mass[at] = mass(x[e]);
                ++at;
            }
        });
        __syncthreads();
        return shared.candidate_count <= MOST_CANDIDATES;
    }
    __device__ uint64 count_from(uint32 key) const {
        uint64 sum = 0;
        for (uint32 n = threadIdx.x; n < shared.candidate_count; n += DRAW_THREADS) sum += shared.candidate.key[n] >= key;
        return sum;
    }
    __device__ uint64 mass_from(uint32 key) const {
        uint64 sum = 0;
        for (uint32 n = threadIdx.x; n < shared.candidate_count; n += DRAW_THREADS) sum += shared.candidate.key[n] >= key ? shared.candidate.mass[n] : 0;
        return sum;
    }

    // The bound over the whole row: the key, digit by digit.
    template <bool BY_MASS> __device__ float by_digits(uint64 wanted) {
        uint32 key = 0, known = 0;
        for (uint32 place = 0; place < 3; ++place) {
            const uint32 shift = place == 0 ? 21 : place == 1 ? 10 : 0, digits = shift ? DIGITS - 1 : 1023;
            if (shift == 0 && last_bit()) return number_of(key >> 31 ? key : key | 0x3ff);
            __syncthreads();
            for (uint32 n = threadIdx.x; n < DIGITS; n += DRAW_THREADS) shared.count[0][n] = shared.count[1][n] = 0;
            __syncthreads();
            scan(key_of(kept.bound), [&](uint32, const float (&x)[STRIP]) {
#pragma unroll
                for (uint32 e = 0; e < STRIP; ++e) {
                    const uint32 other = key_of(x[e]), digit = other >> shift & digits;
                    if ((other & known) != key || other < least) continue;
                    const uint64 more = BY_MASS ? mass(x[e]) : 1;
                    const uint32 low = uint32(more), high = uint32(more >> 32) + (atomicAdd(&shared.count[0][digit], low) + low < low);
                    if (high) atomicAdd(&shared.count[1][digit], high);
                }
            });
            __syncthreads();
            // A thread has eight digits; thread 0 has the largest.
            const auto count = [&](uint32 digit) { return uint64(shared.count[1][digit]) << 32 | shared.count[0][digit]; };
            uint64 mine = 0, total;
            const uint32 top = DIGITS - 1 - threadIdx.x * 8;
#pragma unroll
            for (uint32 n = 0; n < 8; ++n) mine += count(top - n);
            uint64 before = cta_sum_before(draw, mine, total);
            if (total < wanted) return kept.bound;  // fewer than top-k: all stay
            if (before < wanted && wanted <= before + mine) {
                uint32 digit = top;
                while (count(digit) < wanted - before) before += count(digit--);
                draw.token = digit;
                draw.target = wanted - before;
            }
            __syncthreads();
            key |= draw.token << shift;
            known |= digits << shift;
            wanted = draw.target;
        }
        return number_of(key);
    }

    // Groups without what min-p drops.
    __device__ void min_p() {
        const uint32 groups = (source.row.tokens + GROUP - 1) / GROUP;
        // Weights are off by less than 10^-5, so that nothing stays of a group whose largest number is that far below.
        for (uint32 n = threadIdx.x; n < groups; n += DRAW_THREADS)
            if (kept.scale.weight(number_of(shared.group[n]), kept.largest) < fminf(kept.min_p, 1.0f) * 0.999f) shared.group[n] = least - 1;
        __syncthreads();
        scan(least, [&](uint32 group, const float (&x)[STRIP]) {
            uint32 best = 0;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) best = max(best, key_of(x[e]));
            best = __reduce_max_sync(FULL_WARP, best);
            if (threadIdx.x % WARP == 0) shared.group[group] = best;
        });
        __syncthreads();
    }
    __device__ void top_k(uint32 k, bool by_mass) {
        const uint32 groups = (source.row.tokens + GROUP - 1) / GROUP;
        const auto count = [&](uint32 key) {
            uint64 sum = 0;
            for (uint32 n = threadIdx.x; n < groups; n += DRAW_THREADS) sum += shared.group[n] >= key;
            return sum;
        };
        // As many groups as there are tokens wanted have a number from here on.
        const uint32 guess = max(bisect(0, 0xffffffffu, 16, k, count), least);
        if (collect(guess, by_mass)) {
            if (shared.candidate_count >= k) {
                kept.bound = bound_of(bisect(guess, largest, last_bit(), k, [&](uint32 key) { return count_from(key); }));
                is_complete = true;
            } else if (guess == least) {
                is_complete = true;  // all that can be drawn stay
            }
            if (is_complete) return;
        }
        kept.bound = by_digits<false>(k);
    }
    __device__ void top_p(float top_p) {
        const uint32 bound = max(key_of(kept.bound), least);
        uint64 sum = 0;
        if (is_complete) {
            sum = mass_from(bound);
        } else {
            scan(bound, [&](uint32, const float (&x)[STRIP]) {
#pragma unroll
                for (uint32 e = 0; e < STRIP; ++e) sum += mass(x[e]);
            });
        }
        uint64 all;
        cta_sum_before(draw, sum, all);
        const double part = ceil(__dmul_rn(double(fmaxf(top_p, 0.0f)), double(all)));
        const uint64 wanted = min(max(__double2ull_rz(part), uint64(1)), all);
        uint32 guess = bound;
        if (!is_complete) {
            // What has less than this has in all less than may be dropped.
            const float share = float(all - wanted) / (ONE * source.row.tokens);
            const float number = kept.scale.is_weights ? kept.largest * share : kept.largest + __log2f(share) / kept.scale.c - 1e-3f;
            guess = max(key_of(number), bound);
            is_complete = number == number && collect(guess, true) && total(mass_from(guess), 0) >= wanted;
            __syncthreads();
        }
        if (!is_complete) kept.bound = by_digits<true>(wanted);
        else kept.bound = bound_of(bisect(guess, largest, last_bit(), wanted, [&](uint32 key) { return mass_from(max(key, bound)); }));
    }

    // Sums the segments of what stays; thread s gets segment s.
    __device__ SegmentSum sum_segments() {
        const uint32 s = threadIdx.x, segments = source.segments(), from = max(key_of(kept.bound), least);
        uint32 best = 0;
        if (s < segments)
            for (uint32 n = 0; n < GROUPS; ++n)
                if (const uint32 group = s * GROUPS + n; group * GROUP < source.row.tokens) best = max(best, shared.group[group]);
        shared.segment[s] = {best >= from ? number_of(best) : none, 0};
        __syncthreads();
        scan(from, [&](uint32 group, const float (&x)[STRIP]) {
            SegmentSum &segment = shared.segment[group / GROUPS];
            const uint64 sum = warp_sum(source.scale.sum(x, segment.largest));
            if (threadIdx.x % WARP == 0) atomicAdd(&segment.sum, sum);
        });
        __syncthreads();
        return shared.segment[s];
    }

    // Sets the bound of what stays, from the largest number of the row and of its groups.
    __device__ SegmentSum run(const uint32 *groups) {
        for (uint32 n = threadIdx.x; n < (source.row.tokens + GROUP - 1) / GROUP; n += DRAW_THREADS) shared.group[n] = groups[n];
        __syncthreads();
        if (kept.min_p > 0.0f) min_p();
        const float p = source.top_p();
        if (const uint32 k = source.top_k()) top_k(k, p < 1.0f);
        if (p < 1.0f) top_p(p);
        return sum_segments();
    }
};
