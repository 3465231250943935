// The bound of top-p in a row of logits that has no other filter, by a CTA of DRAW_THREADS threads: what filter.cuh finds, with one pass over the row.
//
// A part of the row, or the groups' largest numbers, tell where the bound is likely to be. The pass over the row lists the strips that have a number from a key
// below that on, and adds up the row's mass. What follows goes through the list, which mostly has a few thousand strips:
//
//   [guess a key below the bound] ── row: [list strips, mass] ── list: [gather keys] ── keys: [digits of the bound] ── list: [sums of segments]
//
// The mass of top-p is that of each token rounded down, which takes a third more time than sums of strips. Of rows of 16 bits, of which many tokens have the same
// number, strips are added up, which tells the mass but for a part in four million. If more than one bound is possible by that, the row is read again.
//
// The guess need not hold. Where the list lacks the bound or has no room, the row is read for its exact mass and the first digit, for others, and for the sums.
#pragma once

#include "common/barrier.cuh"
#include "common/copies.cuh"
#include "common/filter.cuh"

constexpr uint32 MOST_LISTED = 1024;  // strips of a warp, and keys of these
constexpr uint32 STAGE_BYTES = 4096;  // of a warp: what it has on its way
constexpr uint32 SAMPLED = 4;         // strips of a thread that tell where the bound is
// What the tokens below the guess have in the part of a row that is looked at, in parts of what may be dropped. Each has less than one of LITTLE parts of that.
constexpr float MARGIN = 0.7f, LITTLE = 200.0f;
// What a number that is looked at counts for at most, in parts of the groups' largest numbers of that part of the row, unless it is one of these: a large one stands
// for some fifteen, so that the guess would be too high by chance in one row of 600.
constexpr float MOST_OF_GROUPS = 1.0f / 64;
constexpr float FILLED = 0.85f;   // of the lists, at most, by that part of the row
constexpr uint32 MASS_BITS = 22;  // of a sum of strips that are right: for each three sums of floats are rounded to 24 bits

struct TopPShared {
    union {
        uint32 group[MOST_GROUPS];  // keys of the groups' largest numbers, for the guess
        alignas(16) char stages[DRAW_WARPS][STAGE_BYTES];
    };
    uint32 keys[DRAW_WARPS][MOST_LISTED];
    uint16 strips[DRAW_WARPS][MOST_LISTED];  // of each warp: the group's number among the warp's, and the lane
    uint32 key_count[DRAW_WARPS], strip_count[DRAW_WARPS];
    DigitSums digit_sums;
    WideSums<MOST_SEGMENTS> segment_sums;
    float largest[MOST_SEGMENTS];
    float p;

    __device__ SegmentSum segment(uint32 s) const { return {largest[s], segment_sums.at(s)}; }
};

// A Source is that of a Filter. Rows have adjacent numbers and begin on 16 bytes; no tokens are forbidden in them.
template <typename Source> struct TopP {
    DrawShared &draw;
    TopPShared &shared;
    const Source &source;
    Kept &kept;
    const uint32 *group_keys;  // in memory
    bool is_listed;            // what may stay of the row is listed
    uint32 low;                // the key from which on numbers count
    Digits digits;             // of the bound's key

    __device__ TopP(DrawShared &draw, TopPShared &shared, Source &source, const uint32 *group_keys)
        : draw(draw), shared(shared), source(source), kept(source.kept), group_keys(group_keys), is_listed(false), low(0), digits{} {}

    // Sets the bound, and leaves sums of the segments of what stays in `shared`.
    __device__ void run() {
        if (threadIdx.x == 0) shared.p = source.top_p();
        for (uint32 n = threadIdx.x; n < groups(); n += DRAW_THREADS) shared.group[n] = group_keys[n];
        __syncthreads();
        uint32 safe;
        low = guess(safe);
        // What stays has a mass that is at least the first, and at most the second.
        uint64 wanted = 0, wanted_at_most = 0;
        Step step = MASS;
        __syncthreads();
        if (low && kept.scale.has_powers(kept.largest)) {
            const uint64 mass = sum_of_threads(read_row());
            const uint64 error = source.row.type == FLOAT32 ? 0 : min((mass >> MASS_BITS) + source.row.tokens, mass);
            wanted = wanted_of(mass - error), wanted_at_most = wanted_of(mass + error);
            is_listed = !cta_or(draw, shared.strip_count[threadIdx.x / WARP] > MOST_LISTED);
            if (is_listed) step = GATHER;
        }
        // All later passes are made at one place of the code.
        for (;;) {
            if (step == SUMS) begin_segments();
            if (step == MASS && !is_listed) low = safe, begin_digits();
            __syncthreads();
            const uint64 mass = step == DIGIT && is_listed ? count_keys() : scan(step);
            __syncthreads();
            if (step == SUMS) return;
            if (step == GATHER) {
                is_listed = !cta_or(draw, shared.key_count[threadIdx.x / WARP] > MOST_LISTED);
                step = is_listed ? DIGIT : MASS;
                if (is_listed) begin_digits();
                continue;
            }
            if (step == MASS) {
                wanted = wanted_at_most = wanted_of(sum_of_threads(mass));
                step = DIGIT;
                if (is_listed) {
                    begin_digits();
                    continue;
                }
            }
            const uint64 more = wanted_at_most - wanted;
            if (!digits.take(draw, shared.digit_sums, wanted)) {
                // The guess was too high. Where numbers change during the call, all may stay.
                if (is_listed) step = MASS;
                else if (low == LEAST) step = SUMS;
                else low = LEAST, begin_digits();
                is_listed = false;
                continue;
            }
            wanted_at_most = wanted + more;
            if (digits.place > last_bit()) {
                digits.next(shared.digit_sums);
            } else if (more && digits.taken(shared.digit_sums) < wanted_at_most) {
                // The bound is a lower one if all that may be wanted is.
                step = MASS;
            } else {
                kept.bound = number_of(digits.key >> 31 ? digits.key : digits.key | ((1u << last_bit()) - 1));
                step = SUMS;
            }
        }
    }

private:
    // What a pass finds. Where there is no list, MASS finds the first digit, too.
    enum Step : uint32 { GATHER, MASS, DIGIT, SUMS };
    static constexpr uint32 LEAST = 0x00800000;  // key of the smallest number that can be drawn

    __device__ uint32 groups() const { return (source.row.tokens + GROUP - 1) / GROUP; }
    __device__ uint32 number_bytes() const { return source.row.type == FLOAT32 ? 4 : 2; }
    __device__ static uint64 mass_of_weight(float w) { return __float2ull_rz(__fmul_rn(w, ONE)); }
    __device__ uint64 mass_of(float x) const { return mass_of_weight(kept.scale.weight(x, kept.largest)); }
    // What stays of the row has at least so much.
    __device__ uint64 wanted_of(uint64 mass) const {
        return min(max(__double2ull_rz(ceil(__dmul_rn(double(fmaxf(shared.p, 0.0f)), double(mass)))), uint64(1)), mass);
    }
    __device__ uint64 sum_of_threads(uint64 mass) const {
        uint64 all;
        cta_sum_before(draw, mass, all);
        return all;
    }
    // Rows of 16 bits have the same last digits: those of a number.
    __device__ uint32 last_bit() const { return source.row.type == FLOAT32 ? 0 : source.row.type == FLOAT16 ? 13 : 16; }

    // --- the guess -------------------------------------------------------------------------------------------------------------------

    // A key that is likely to be below the bound's, and from which on there are not too many numbers; 0 if there is none. `safe` is a lower one that is below the
    // bound's unless floats are rounded badly.
    __device__ uint32 guess(uint32 &safe) {
        uint64 mass = 0;
        for (uint32 n = threadIdx.x; n < groups(); n += DRAW_THREADS) mass += mass_of(number_of(shared.group[n]));
        const float of_groups = float(cta_sum(draw, mass)), may_drop = 1.0f - fmaxf(shared.p, 0.0f);
        // All tokens below this number have in all less than may be dropped. Where few lie above, there is no need to know more.
        safe = key_below(may_drop * of_groups / (ONE * source.row.tokens));
        uint32 open = 0;
        for (uint32 n = threadIdx.x; n < groups(); n += DRAW_THREADS) open += shared.group[n] >= safe;
        const float few = groups() * (1.0f - __expf(-float(MOST_CANDIDATES) / groups()));
        if (float(uint32(cta_sum(draw, open))) <= few) return safe;
        return guess_by_part(of_groups, may_drop, safe);
    }
    // A key just below that of the number with this weight.
    __device__ uint32 key_below(float weight) const {
        const float x = kept.largest + __log2f(weight) / kept.scale.c - 1e-3f;
        return x == x ? max(key_of(x), LEAST) : LEAST;
    }
    // The same, by strips of the row that are evenly spaced. The row's mass is that of the groups' largest numbers, which vary most and are known, and what
    // the other tokens seem to have. The row has thousands of tokens, as more groups than few are open.
    __device__ uint32 guess_by_part(float of_groups, float may_drop, uint32 safe) {
        constexpr uint32 COUNT = SAMPLED * DRAW_THREADS;
        const Row &row = source.row;
        const float part = float(COUNT * STRIP) / row.tokens;
        AnyStrip strips[SAMPLED];
        uint32 first[SAMPLED];
#pragma unroll
        for (uint32 h = 0; h < SAMPLED; ++h) {
            first[h] = row.tokens / STRIP * (h * DRAW_THREADS + threadIdx.x) / COUNT * STRIP;
            const char *const from = row.data + uint64(first[h]) * number_bytes();
            const uint4 low_half = as<uint4>(from), high_half = row.type == FLOAT32 ? as<uint4>(from + 16) : uint4{};
            strips[h].strip = {{low_half.x, low_half.y, low_half.z, low_half.w, high_half.x, high_half.y, high_half.z, high_half.w}};
        }
        low = safe, begin_digits();
        __syncthreads();
        const uint64 most = __float2ull_rz(of_groups * part * MOST_OF_GROUPS);
        uint64 all = 0, others = 0;
        visit_part(strips, first, [&](uint32 group, float number) {
            const uint64 has = mass_of(number);
            all += has;
            if (key_of(number) < group) others += min(has, most);
            if (is_counted(key_of(number))) digits.count(shared.digit_sums, key_of(number), has);
        });
        all = cta_sum(draw, all), others = cta_sum(draw, others);
        const float dropped = may_drop * MARGIN * (of_groups * part + float(others));
        const uint64 below = __float2ull_rz(dropped);
        uint64 wanted = all > below ? all - below : 1;
        const uint32 made = digits.take(draw, shared.digit_sums, wanted) ? max(min(digits.key, key_below(dropped / (part * ONE * LITTLE))), safe) : safe;
        uint32 from = 0;
        visit_part(strips, first, [&](uint32, float number) { from += key_of(number) >= made; });
        return float(uint32(cta_sum(draw, from))) <= DRAW_WARPS * MOST_LISTED * FILLED * part ? made : 0;
    }
    // Hands the key of the group's largest number and each number of some strips to look_at(). What is no number is none that can be drawn.
    template <typename LookAt> __device__ void visit_part(const AnyStrip (&strips)[SAMPLED], const uint32 (&first)[SAMPLED], const LookAt &look_at) const {
#pragma unroll
        for (uint32 h = 0; h < SAMPLED; ++h) {
            float x[STRIP];
            strips[h].widen(source.row.type, x);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) look_at(shared.group[first[h] / GROUP], x[e] == x[e] ? x[e] : minus_infinity());
        }
    }

    // --- the row ---------------------------------------------------------------------------------------------------------------------

    // Copies 16 bytes of the row to shared memory; zeros past its end.
    __device__ void copy(uint32 to, uint64 at) const {
        const uint64 end = uint64(source.row.tokens) * number_bytes();
        const uint32 bytes = at < end ? uint32(min(end - at, uint64(16))) : 0;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(source.row.data + (bytes ? at : 0)), "r"(bytes) : "memory");
    }
    __device__ uint64 read_row() {
        if (source.row.type == FLOAT32) return read_row<FLOAT32>();
        return source.row.type == FLOAT16 ? read_row<FLOAT16>() : read_row<BFLOAT16>();
    }
    // Lists the strips that have a number from `low` on, or one that is none; the thread's part of the row's mass, by strips of rows of 16 bits. Groups are dealt to
    // the warps in turn. Each warp lists strips of its own groups, of which a lane has one each.
    //
    //   for each group of the warp: wait ─ largest number of the strip ─ [list] ─ request the group after those on their way ─ weights ─ mass
    template <uint32 TYPE> __device__ uint64 read_row() {
        using Numbers = Strip<TYPE>;
        constexpr uint32 STAGE = GROUP * Numbers::BYTES, COUNT = STAGE_BYTES / STAGE, EACH = STAGE / WARP;
        const Row &row = source.row;
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, whole = row.tokens / GROUP;
        const uint32 begin = shared_address(shared.stages[warp]), end = begin + STAGE_BYTES;
        const float from = number_of(low), largest = kept.largest;
        const Scale scale = {false, kept.scale.c};
        uint64 mass = 0;
        uint32 count = 0;
        const auto request = [&](uint32 group, uint32 stage) {
            const uint64 at = uint64(group) * STAGE + lane * 16;
#pragma unroll
            for (uint32 n = 0; n < STAGE; n += WARP * 16) {
                if (group < whole) copy_16(stage + lane * 16 + n, row.data + at + n);
                else copy(stage + lane * 16 + n, at + n);
            }
            end_copies();
        };
#pragma unroll
        for (uint32 n = 0; n < COUNT; ++n) request(warp + n * DRAW_WARPS, begin + n * STAGE);
        uint32 stage = begin;
#pragma unroll 1
        for (uint32 group = warp; group < groups(); group += DRAW_WARPS) {
            Numbers strip;
            wait_copies<COUNT - 1>();
            __syncwarp();
            strip.load_shared(stage + lane * EACH);
            if (group == whole) {
#pragma unroll
                for (uint32 e = 0; e < STRIP; ++e)
                    if (group * GROUP + lane * STRIP + e >= row.tokens) strip.set(e, none_bits<TYPE>(false));
            }
            const bool is_listed = !(strip.largest() < from);
            const uint32 listed = __ballot_sync(FULL_WARP, is_listed), at = count + __popc(listed & ((1u << lane) - 1));
            if (is_listed && at < MOST_LISTED) shared.strips[warp][at] = group / DRAW_WARPS * WARP + lane;
            count += __popc(listed);
            // All lanes have loaded their strips.
            __syncwarp();
            request(group + COUNT * DRAW_WARPS, stage);
            stage = stage + STAGE == end ? begin : stage + STAGE;
            float x[STRIP];
            strip.widen(x);
            if (TYPE == FLOAT32) {
                scale.weigh_powers(x, largest, minus_infinity());
                mass += mass_of_strip(x);
            } else {
                mass += scale.sum_powers(x, largest);
            }
        }
        wait_copies<0>();
        if (lane == 0) shared.strip_count[warp] = count;
        __syncwarp();
        // What was read first is not in the cache any more where many rows are read at once.
        for (uint32 n = lane; n < min(count, MOST_LISTED); n += WARP) prefetch(row.data + uint64(first_of(shared.strips[warp][n])) * Numbers::BYTES);
        return mass;
    }
    __device__ static uint64 mass_of_strip(const float (&w)[STRIP]) {
        uint64 mass = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) mass += mass_of_weight(w[e]);
        return mass;
    }
    // Number e of a strip, which lies in registers.
    __device__ static float number_in(const float (&x)[STRIP], uint32 e) {
        const float low = e & 2 ? e & 1 ? x[3] : x[2] : e & 1 ? x[1] : x[0], high = e & 2 ? e & 1 ? x[7] : x[6] : e & 1 ? x[5] : x[4];
        return e & 4 ? high : low;
    }
    // The first token of a strip of this warp: the group's number among the warp's, and the lane.
    __device__ static uint32 first_of(uint32 strip) { return (strip / WARP * DRAW_WARPS + threadIdx.x / WARP) * GROUP + strip % WARP * STRIP; }

    // --- later passes ----------------------------------------------------------------------------------------------------------------

    // Takes the strips of the warp's list, or all of its groups where there is none or for the row's mass. Returns the thread's part of that.
    __device__ uint64 scan(Step step) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const bool by_list = is_listed && step != MASS;
        const uint32 count = by_list ? min(shared.strip_count[warp], MOST_LISTED) : (groups() + DRAW_WARPS - 1 - warp) / DRAW_WARPS * WARP;
        constexpr uint32 STAGE = GROUP * 4, COUNT = STAGE_BYTES / STAGE;
        // Each lane copies its own strips.
        const uint32 begin = shared_address(shared.stages[warp]) + lane * STRIP * 4, end = begin + STAGE_BYTES;
        const auto first = [&](uint32 n) { return n >= count ? source.row.tokens : first_of(by_list ? shared.strips[warp][n] : n); };
        const auto request = [&](uint32 n, uint32 stage) {
            const uint64 at = uint64(first(n)) * number_bytes();
            copy(stage, at);
            if (source.row.type == FLOAT32) copy(stage + 16, at + 16);
            end_copies();
        };
#pragma unroll
        for (uint32 n = 0; n < COUNT; ++n) request(n * WARP + lane, begin + n * STAGE);
        uint64 mass = 0;
        uint32 stage = begin, key_count = 0;
#pragma unroll 1
        for (uint32 n = lane; n < count + lane; n += WARP) {
            AnyStrip strip;
            float x[STRIP];
            wait_copies<COUNT - 1>();
            strip.strip.load_shared(stage);
            strip.widen(source.row.type, x);
            request(n + COUNT * WARP, stage);
            stage = stage + STAGE == end ? begin : stage + STAGE;
            const uint32 token = first(n);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (token + e >= source.row.tokens || x[e] != x[e]) x[e] = minus_infinity();
            if (step == SUMS) add_to_segment(min(token, source.row.tokens - 1) / SEGMENT, x);
            else if (step == GATHER) list_keys(x, key_count);
            else if (step == DIGIT) count_numbers(x);
            else mass += weigh_and_count(x);
        }
        wait_copies<0>();
        if (step == GATHER && lane == 0) shared.key_count[warp] = key_count;
        return mass;
    }
    // Begins with the first digit of the numbers from `low` on.
    __device__ void begin_digits() {
        digits.begin(low, key_of(kept.largest));
        digits.next(shared.digit_sums);
    }
    __device__ bool is_counted(uint32 number) const { return number >= low && digits.has(number); }
    // Adds the keys of a lane's numbers from `low` on to the warp's, which are `count` by now.
    __device__ void list_keys(const float (&x)[STRIP], uint32 &count) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const float from = number_of(low);
        uint32 some = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) some |= uint32(x[e] >= from) << e;
#pragma unroll 1
        while (const uint32 open = __ballot_sync(FULL_WARP, some)) {
            const uint32 at = count + __popc(open & ((1u << lane) - 1));
            if (some && at < MOST_LISTED) shared.keys[warp][at] = key_of(number_in(x, __ffs(some) - 1));
            some &= some - 1;
            count += __popc(open);
        }
    }
    // The exact mass of a lane's strip. Where there is no list, its numbers are counted by their digit.
    __device__ uint64 weigh_and_count(const float (&x)[STRIP]) {
        float w[STRIP];
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) w[e] = x[e];
        kept.scale.weigh(w, kept.largest);
        if (!is_listed) {
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                if (is_counted(key_of(x[e]))) digits.count(shared.digit_sums, key_of(x[e]), mass_of_weight(w[e]));
        }
        return mass_of_strip(w);
    }
    __device__ void count_numbers(const float (&x)[STRIP]) {
        uint32 some = 0;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) some |= uint32(is_counted(key_of(x[e]))) << e;
#pragma unroll 1
        for (; some; some &= some - 1) {
            const float number = number_in(x, __ffs(some) - 1);
            digits.count(shared.digit_sums, key_of(number), mass_of(number));
        }
    }
    __device__ uint64 count_keys() {
        const uint32 warp = threadIdx.x / WARP;
#pragma unroll 1
        for (uint32 n = threadIdx.x % WARP; n < min(shared.key_count[warp], MOST_LISTED); n += WARP)
            if (const uint32 number = shared.keys[warp][n]; is_counted(number)) digits.count(shared.digit_sums, number, mass_of(number_of(number)));
        return 0;
    }
    // The largest numbers of the segments of what stays.
    __device__ void begin_segments() {
        const uint32 bound = max(key_of(kept.bound), LEAST), s = threadIdx.x;
        uint32 best = 0;
#pragma unroll
        for (uint32 n = 0; n < GROUPS; ++n)
            if (const uint32 group = s * GROUPS + n; group < groups()) best = max(best, group_keys[group]);
        shared.largest[s] = best >= bound ? number_of(best) : minus_infinity();
        shared.segment_sums.clear(s);
    }
    // Adds the sum of what stays of the lanes' strips to those of their segments, which are few: lanes that add to the same word would wait for each other.
    __device__ void add_to_segment(uint32 s, float (&x)[STRIP]) {
        const float largest = shared.largest[s];
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) x[e] = x[e] < kept.bound ? minus_infinity() : x[e];
        const uint64 sum = largest > minus_infinity() ? source.scale.sum(x, largest) : 0;
#pragma unroll 1
        for (uint32 left = FULL_WARP; left;) {
            const uint32 owner = __ffs(left) - 1, now = __shfl_sync(FULL_WARP, s, owner);
            const uint64 all = warp_sum(s == now ? sum : 0);
            if (threadIdx.x % WARP == owner) shared.segment_sums.add(now, all);
            left &= ~__ballot_sync(FULL_WARP, s == now);
        }
    }
};
