// Selection by the INT4 labels of the tokens of candidate blocks, where all that follows from them fits in the shared memory of a cluster.
//
// What is computed is what labels.cu computes, for one query position a list. Products never leave the chip:
//
//   request queries, channels, candidates, lengths ─ request labels ─ products ─ largest and sums ─ cluster ─ weights, scores, first digits
//   ─ cluster ─ cut ─ ids
//
// Cut: a cluster of CTAs for each list, neighbouring candidate tokens for each CTA. A warp takes 64 of them, four lanes a token, and multiplies
// them with eight heads at a time on the tensor cores. A code c stands there as 16 + c, exact in bfloat16, a query as a sum of one or three such
// numbers; scales and minima follow in float32:
//
//   Σ_c q_c·(min + scale·code_c) = scale·(Σ_c q_c·(16 + code_c) − 16·Σ_c q_c) + min·Σ_c q_c
//
// Of each 64 tokens and head the largest product, and the sum of 2^(product − largest), go to all CTAs of the cluster: always of 64, so sums
// depend neither on the cluster nor on the batch. Scores go to the first CTA, and how many have which first digit. It finds the digits of the
// k-th largest, and then which are above it; warps take neighbouring scores, so that ids come out ascending.
//
// Barriers of the cluster are three, and all threads of all its CTAs reach each of them, whatever a list is: nothing returns early.
//
// Bytes: the labels of the candidates, once: 2.4 MB for 8192 tokens of 64 channels and 8 heads, .6 µs. The rest is latency.
//
// On entry: one query position for each list; up to MOST_HEADS heads; rows of codes are single runs aligned to 16 bytes; up to HELD_BLOCKS
// candidates; `unit` is a multiple of 64, and of the tokens of a block where blocks are selected.
//
// targets: compute_90

#include "common/cluster.cuh"
#include "select/candidates.cuh"
#include "select/codes.cuh"

constexpr uint32 THREADS = 512, WARPS = THREADS / WARP;
constexpr uint32 TOKENS = 64, TILES = TOKENS / 16;    // of a warp, at a time; rows of 16 that the tensor cores take
constexpr uint32 ROWS = TOKENS / 8;                   // tokens of which a lane has channels
constexpr uint32 HEADS = 8, MOST_HEADS = 16;          // of a tile, of a list
constexpr uint32 MOST_CTAS = 8;
constexpr uint32 HELD_BLOCKS = 2048, IDS = HELD_BLOCKS / THREADS;
constexpr uint32 DIGIT = 11, DIGITS = 1 << DIGIT, FIRST_SHIFT = 20;
constexpr float LOG2_E = 1.44269504f;
static_assert(DIGITS == 4 * THREADS, "a thread owns four");
static_assert(MOST_HEADS == WARPS, "a warp has a head");

// Side by side, aligned to their size. Not by __ldg: a dependent kernel starts before what it reads is written.
template <uint32 WORDS> __device__ inline void load_words(const char *from, uint32 (&to)[WORDS]) {
    if constexpr (WORDS == 1) {
        to[0] = as<uint32>(from);
    } else if constexpr (WORDS == 2) {
        const uint2 x = as<uint2>(from);
        to[0] = x.x, to[1] = x.y;
    } else {
        const uint4 x = as<uint4>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

constexpr int64 NONE = -1ll << 62;

struct HeldShared {
    alignas(16) uint32 digit[DIGITS];        // of this CTA's scores
    alignas(16) uint32 first_digit[DIGITS];  // in the first CTA: of all scores
    int64 codes[WARPS][TOKENS];              // where those of a warp's tokens begin; NONE where there are none
    int32 block[HELD_BLOCKS];
    float2 of_head[MOST_HEADS];  // the largest product, and what weights are multiplied by
    float sum[MOST_HEADS];       // of a query's kept channels
    uint32 channel[32 * 4];
    uint32 saw[MOST_CTAS * WARPS];  // in the first CTA: each warp of the cluster
    int32 of_warp[WARPS], also_of_warp[WARPS];
    uint32 chosen, rank, count;
};

// What is asked for before anything is known.
struct Request {
    Lengths lengths;
    int32 budget, count, id[IDS], before[IDS];  // candidates that are given, this thread's, and the one before each
    uint32 channel;                             // the kept channel of this thread

    __device__ Request(const LabelParams &p, uint32 seq, uint32 head, uint32 list) : lengths(p.select, seq), budget(budget_of(p.select, seq)) {
        const List &given = p.candidates;
        count = as<int32>(given.counts + seq * given.counts_seq + list * given.counts_pos + head * given.counts_head);
        const char *ids = given.ids + seq * given.ids_seq + list * given.ids_pos + head * given.ids_head;
#pragma unroll
        for (uint32 n = 0; n < IDS; n++) {
            const uint32 i = threadIdx.x + n * THREADS;
            id[n] = before[n] = -1;
            if (i < p.cap) id[n] = as<int32>(ids + i * given.ids_entry);
            if (i < p.cap && i > 0) before[n] = as<int32>(ids + (i - 1) * given.ids_entry);
        }
        channel = p.select.dim;  // of zeros
        if (threadIdx.x < p.kept) channel = as<uint32>(p.channels + head * p.channels_head + threadIdx.x * p.channels_channel);
    }
};

// WORDS of eight channels are a lane's of a token.
template <uint32 WORDS, bool OF_BLOCKS> struct HeldLabels {
    const HeldLabelParams &held;
    const LabelParams &p;
    const SelectParams &s;
    HeldShared &shared;
    const uint32 thread, warp, lane, slice, heads;
    uint32 first, count;  // this CTA's candidate tokens
    uint32 known;         // candidate tokens for which the index has room: the first ones
    bool is_sound;        // the query holds no NaN
    bool clamped;
    uint32 begin, end, wanted, init, local;  // so many of begin … end−1, of candidate tokens or blocks; and first and last ones, which are forced
    Row row;
    Candidates candidates;

    __device__ HeldLabels(const HeldLabelParams &held, HeldShared &shared)
        : held(held), p(held.labels), s(held.labels.select), shared(shared), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          slice(cluster_rank()), heads(held.labels.select.group) {}

    // What was written to any shared memory of the cluster, all see.
    __device__ void synchronise() const {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }

    // Scores of the whole list (in the first CTA), products of this CTA's tokens, partial sums of the whole list, queries.
    __device__ float *scores() const { return row_scores; }
    __device__ float *products() const { return row_scores + held.products / 4; }
    __device__ float2 *partials() const { return reinterpret_cast<float2 *>(row_scores + held.partials / 4); }
    __device__ uint2 *queries() const { return reinterpret_cast<uint2 *>(row_scores + held.queries / 4); }
    // Of a CTA, at most.
    __device__ uint32 units() const { return held.by_units.divide(known + held.by_units.value - 1); }
    __device__ uint32 parts() const { return (known + TOKENS - 1) / TOKENS; }

    // A head's query in float32 for each warp: it lies where scores come later. Says whether it holds a NaN.
    __device__ bool load_queries() const {
        constexpr uint32 AT_ONCE = 4;
        bool is_nan = false;
        if (warp >= heads) return false;
        const char *q = s.q + row.seq * s.q_seq + row.list * s.q_pos + (row.head * heads + warp) * s.q_head;
#pragma unroll 1
        for (uint32 c = lane; c < s.dim; c += AT_ONCE * WARP) {
            float x[AT_ONCE];
            ::load_queries(q + c * s.q_channel, WARP * s.q_channel, (s.dim - c + WARP - 1) / WARP, s.q_type, x);
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                is_nan |= x[n] != x[n];
                if (c + n * WARP < s.dim) scores()[warp * s.dim + c + n * WARP] = x[n];
            }
        }
        return is_nan;
    }
    // Splits the kept channels into numbers of bfloat16, laid out as lanes read them: [words, steps, tiles, terms, lanes].
    __device__ void stage_queries() const {
        const uint32 word = thread / WARP % WORDS, tile = thread / WARP / WORDS, head = tile * HEADS + lane / 4;
        if (tile >= held.tiles) return;
        const uint32 *channels = shared.channel + (lane % 4 * WORDS + word) * 8;
        float x[8];
#pragma unroll
        for (uint32 i = 0; i < 8; i++) {
            const uint32 channel = channels[i];
            x[i] = head < heads && channel < s.dim ? scores()[head * s.dim + channel] : 0.0f;
        }
        uint2 *to = queries() + (word * 2 * held.tiles + tile) * held.terms * WARP + lane;
#pragma unroll 1
        for (uint32 term = 0; term < held.terms; term++) {
            uint32 of[8];
#pragma unroll
            for (uint32 i = 0; i < 8; i++) {
                of[i] = narrow_bfloat16(x[i]);
                const float rest = x[i] - widen_bfloat16(of[i]);
                x[i] = rest == rest ? rest : 0.0f;  // of infinity nothing is left
            }
            to[term * WARP] = make_uint2(of[0] | of[4] << 16, of[1] | of[5] << 16);
            to[(held.tiles * held.terms + term) * WARP] = make_uint2(of[2] | of[6] << 16, of[3] | of[7] << 16);
        }
    }
    // Σ over a head's kept channels, by a warp each; 0 for heads that are not there.
    __device__ void add_queries() const {
        float sum = 0.0f;
#pragma unroll
        for (uint32 n = 0; n < WORDS; n++) {
            const uint32 channel = shared.channel[n * WARP + lane];
            if (warp < heads && channel < s.dim) sum += scores()[warp * s.dim + channel];
        }
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        if (lane == 0) shared.sum[warp] = sum;
    }

    // Leaves out what is past the list's tokens or not above all before it; most often that is nothing. All CTAs of the list do so.
    __device__ void find_candidates(const Request &request) {
        const uint32 entries = min(uint32(max(request.count, 0)), p.cap);
        bool is_clean = true;
#pragma unroll
        for (uint32 n = 0; n < IDS; n++) {
            const uint32 i = thread + n * THREADS;
            if (i >= entries) continue;
            shared.block[i] = request.id[n];
            is_clean &= request.id[n] > request.before[n] && uint32(request.id[n]) < row.n;
        }
        uint32 count = entries;
        if (!__syncthreads_and(is_clean)) {
            const auto id_of = [&](uint32 base) { return shared.block[base + thread]; };
            count = keep_ascending<THREADS>(entries, row.n, id_of, shared.block, shared.of_warp, shared.also_of_warp);
        }
        candidates = {shared.block, count, s.block_size, row.tokens, s.by_block};
        known = candidates.tokens_below(min(row.tokens, s.place.capacity));
        const uint32 share = units() * held.unit;
        first = min(slice * share, known), this->count = min(share, known - first);
    }

    // Asks for the labels of the CTA's tokens from `from` on: eight tokens' channels, and two tokens' scale and minimum, whose presence is told.
    __device__ uint32 request_labels(uint32 from, uint32 (&codes)[ROWS][WORDS], uint32 (&range)[2]) const {
        uint32 page[2], n[2], exist = 0;
#pragma unroll
        for (uint32 t = 0; t < 2; t++) {
            const uint32 at = from + t * WARP + lane;
            const bool is_there = at < count;
            page[t] = row.seq, n[t] = is_there ? candidates.token(first + at) : 0;
            exist |= uint32(is_there) << t;
        }
        if (s.place.table) {
#pragma unroll
            for (uint32 t = 0; t < 2; t++) {
                const uint32 number = n[t] / s.place.rows;
                n[t] -= number * s.place.rows, page[t] = s.place.pages;
                if (exist >> t & 1) page[t] = as<uint32>(s.place.table + row.seq * s.place.table_seq + number * s.place.table_page);
            }
#pragma unroll
            for (uint32 t = 0; t < 2; t++)
                if (page[t] >= s.place.pages) exist &= ~(1u << t);
        }
        __syncwarp();  // what was there is read
#pragma unroll
        for (uint32 t = 0; t < 2; t++) {
            const bool exists = exist >> t & 1;
            shared.codes[warp][t * WARP + lane] = exists ? p.codes.at(page[t], n[t], row.head) - p.codes.data : NONE;
            range[t] = 0;
            if (exists) range[t] = as<uint16>(p.scales.at(page[t], n[t], row.head)) | uint32(as<uint16>(p.minima.at(page[t], n[t], row.head))) << 16;
        }
        __syncwarp();
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) {
            const int64 at = shared.codes[warp][8 * j + lane / 4];
#pragma unroll
            for (uint32 word = 0; word < WORDS; word++) codes[j][word] = 0;
            if (at != NONE) load_words(p.codes.data + at + lane % 4 * 4 * WORDS, codes[j]);
        }
        return exist;
    }
    // Products of these tokens with a tile of heads.
    __device__ void multiply(uint32 tile, const uint32 (&codes)[ROWS][WORDS], float (&sums)[TILES][4]) const {
        const uint2 *q = queries() + tile * held.terms * WARP + lane;
#pragma unroll
        for (uint32 word = 0; word < WORDS; word++)
#pragma unroll
            for (uint32 step = 0; step < 2; step++) {
                uint32 a[TILES][4];
#pragma unroll
                for (uint32 m = 0; m < TILES; m++)
#pragma unroll
                    for (uint32 i = 0; i < 4; i++) a[m][i] = widen_codes(codes[2 * m + i % 2][word], 2 * step + i / 2);
#pragma unroll 1
                for (uint32 term = 0; term < held.terms; term++) {
                    const uint2 b = q[((word * 2 + step) * held.tiles * held.terms + term) * WARP];
#pragma unroll
                    for (uint32 m = 0; m < TILES; m++) multiply_add(sums[m], a[m], b);
                }
            }
    }
    // Keeps the products with a head of the CTA's tokens from `from` on, in two columns at a time; the largest and the sum go to all CTAs. Lanes
    // apart by four have the same heads.
    __device__ uint32 keep(uint32 tile, uint32 from, uint32 exist, const uint32 (&range)[2], float (&sums)[TILES][4]) const {
        const uint32 h = tile * HEADS + lane % 4 * 2;
        const uint32 there[2] = {__ballot_sync(FULL_WARP, exist & 1), __ballot_sync(FULL_WARP, exist & 2)};
        const float scale = s.scale * LOG2_E, of_q[2] = {shared.sum[h], shared.sum[h + 1]};
        float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};
        uint32 saw = 0;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) {
            const uint32 at = 8 * (j % 4) + lane / 4, both = __shfl_sync(FULL_WARP, range[j / 4], at);
            const bool exists = there[j / 4] >> at & 1;
            const float of_code = widen_float16(both & 0xffff), least = widen_float16(both >> 16);
            float *product = &sums[j / 2][j % 2 * 2];
#pragma unroll
            for (uint32 n = 0; n < 2; n++) {
                float x = scale * fmaf(of_code, fmaf(-16.0f, of_q[n], product[n]), least * of_q[n]);
                if (exists && h + n < heads && is_sound && x != x) saw = SAW_NAN;
                if (!exists || !(fabsf(x) < -minus_infinity())) x = minus_infinity();
                product[n] = x, most[n] = fmaxf(most[n], x);
            }
            if (h < held.pitch) *reinterpret_cast<float2 *>(products() + (from + 8 * j + lane / 4) * held.pitch + h) = make_float2(product[0], product[1]);
        }
        const uint32 number = (first + from) / TOKENS;
#pragma unroll
        for (uint32 n = 0; n < 2; n++) {
#pragma unroll
            for (uint32 bit = 4; bit < WARP; bit *= 2) most[n] = fmaxf(most[n], __shfl_xor_sync(FULL_WARP, most[n], bit));
            const float from_most = most[n] > minus_infinity() ? most[n] : 0.0f;
#pragma unroll
            for (uint32 j = 0; j < ROWS; j++) sum[n] += exp2_fast(sums[j / 2][j % 2 * 2 + n] - from_most);
#pragma unroll
            for (uint32 bit = 4; bit < WARP; bit *= 2) sum[n] += __shfl_xor_sync(FULL_WARP, sum[n], bit);
            uint32 *to = reinterpret_cast<uint32 *>(partials() + (h + n) * p.chunks + number);
            if (lane / 4 < s.slices && h + n < heads) store_two_to(lane / 4, to, make_uint2(__float_as_uint(most[n]), __float_as_uint(sum[n])));
        }
        return saw;
    }

    // By a warp for each head; weights of heads that are not there are 0.
    __device__ void weigh_heads() const {
        const float2 *of = partials() + warp * p.chunks;
        const uint32 parts = warp < heads ? this->parts() : 0;
        float most = minus_infinity(), sum = 0.0f;
#pragma unroll 4
        for (uint32 n = lane; n < parts; n += WARP) most = fmaxf(most, of[n].x);
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, bit));
        const float from_most = most > minus_infinity() ? most : 0.0f;
#pragma unroll 4
        for (uint32 n = lane; n < parts; n += WARP) sum = fmaf(of[n].y, exp2_fast(of[n].x - from_most), sum);
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        if (!OF_BLOCKS) sum *= float(heads);
        if (lane == 0) shared.of_head[warp] = make_float2(from_most, sum > 0.0f && is_sound ? 1.0f / sum : 0.0f);
    }
    // Softmax mass of the CTA's token n, over its heads.
    __device__ float mass(uint32 n) const {
        const float4 *of = reinterpret_cast<const float4 *>(products() + n * held.pitch);
        const float2 *by = shared.of_head;
        float sum = 0.0f;
#pragma unroll 1
        for (uint32 h = 0; h < held.pitch; h += 4, of++, by += 4) {
            const float4 four = *of;
            sum = fmaf(exp2_fast(four.x - by[0].x), by[0].y, sum), sum = fmaf(exp2_fast(four.y - by[1].x), by[1].y, sum);
            sum = fmaf(exp2_fast(four.z - by[2].x), by[2].y, sum), sum = fmaf(exp2_fast(four.w - by[3].x), by[3].y, sum);
        }
        return sum;
    }
    // Of candidate token or block i. Scores are not negative: their bits sort as they do.
    __device__ void send(uint32 i, float score) const {
        store_word_to(0, reinterpret_cast<uint32 *>(scores() + i), __float_as_uint(score));
        if (begin <= i && i < end) atomicAdd(&shared.digit[__float_as_uint(score) >> FIRST_SHIFT], 1u);
    }
    __device__ void send_tokens() const {
        for (uint32 n = thread; n < count; n += THREADS) send(first + n, mass(n));
    }
    // The mass of each candidate block, by a few lanes. The last CTA has also those for which the index has no room: they weigh nothing.
    __device__ void send_blocks() const {
        const uint32 lanes = held.lanes, within = lane & (lanes - 1), share = units() * held.unit_blocks;
        const uint32 from = min(slice * share, candidates.count), to = slice + 1 == s.slices ? candidates.count : min(from + share, candidates.count);
        const uint32 step = THREADS / lanes, rounded = (to - from + WARP / lanes - 1) / (WARP / lanes) * (WARP / lanes);  // lanes of a warp go together
        for (uint32 n = thread / lanes; n < rounded; n += step) {
            const uint32 entry = from + n;
            float sum = 0.0f;
            for (uint32 t = within; t < s.block_size; t += lanes) {
                const uint32 at = entry * s.block_size + t;
                if (entry < to && at < known) sum += mass(at - first);
            }
            for (uint32 bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (within > 0 || entry >= to) continue;
            send(entry, sum);
            write_score(candidates.block[entry], is_sound ? sum : minus_infinity());
        }
        for (uint32 j = slice * THREADS + thread; s.scores && j < min(row.n, s.max_blocks); j += s.slices * THREADS)
            if (candidates.entry_of(j) == candidates.count) write_score(j, minus_infinity());
    }
    // At a place of the list of scores.
    __device__ void write_score(uint32 place, float score) const {
        if (!s.scores || (OF_BLOCKS && place >= s.max_blocks)) return;
        as<float>(s.scores + row.seq * s.scores_seq + row.list * s.scores_pos + row.head * s.scores_head + place * s.scores_block) = score;
    }
    // How many scores have which first digit, to the first CTA.
    __device__ void send_digits() const {
        __syncthreads();
        const uint4 four = reinterpret_cast<const uint4 *>(shared.digit)[thread];
        const uint32 of[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32 i = 0; i < 4; i++)
            if (of[i] != 0) add_word_in(0, &shared.first_digit[4 * thread + i], of[i]);
    }

    // The digit of the wanted-th largest of the scores that were counted: `chosen`. It is the rank-th largest of the `count` that have it.
    __device__ void choose_digit(const uint32 *digit, uint32 wanted) const {
        const uint32 last = THREADS - 1 - thread;  // from the top
        const uint4 four = reinterpret_cast<const uint4 *>(digit)[last];
        const uint32 sum = four.x + four.y + four.z + four.w, through = sum_lanes(sum);
        if (lane == WARP - 1) shared.of_warp[warp] = through;
        __syncthreads();
        uint32 above = __reduce_add_sync(FULL_WARP, lane < warp ? shared.of_warp[lane % WARPS] : 0) + through - sum;
        if (above < wanted && wanted <= above + sum) {
            uint32 chosen = 4 * last + 3, here = four.w;
            if (above + here < wanted) above += here, chosen--, here = four.z;
            if (above + here < wanted) above += here, chosen--, here = four.y;
            if (above + here < wanted) above += here, chosen--, here = four.x;
            shared.chosen = chosen, shared.rank = wanted - above, shared.count = here;
        }
        __syncthreads();
    }
    // Of those scores from `from` to `to` whose upper bits are `prefix`.
    __device__ void count_digit(uint32 from, uint32 to, uint32 prefix, uint32 shift, uint32 low) const {
        reinterpret_cast<uint4 *>(shared.digit)[thread] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        const uint32 mask = (1u << shift - low) - 1;
#pragma unroll 2
        for (uint32 i = (from & ~3u) + 4 * thread; i < to; i += 4 * THREADS) {
            const uint4 four = *reinterpret_cast<const uint4 *>(scores() + i);
            const uint32 bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (uint32 n = 0; n < 4; n++)
                if (i + n - from < to - from && bits[n] >> shift == prefix) atomicAdd(&shared.digit[bits[n] >> low & mask], 1u);
        }
        __syncthreads();
    }
    // emit(place, i), ascending, for those whose upper bits are above prefix, and for the first `ties` of those that equal it.
    template <typename Emit> __device__ void take(uint32 from, uint32 to, uint32 prefix, uint32 shift, uint32 ties, const Emit &emit) const {
        constexpr uint32 FOURS = 4 * WARP;
        const uint32 start = from & ~3u, span = (to - start + FOURS * WARPS - 1) / (FOURS * WARPS) * FOURS, mine = start + warp * span, last = min(mine + span, to);
        const auto classify = [&](uint32 i, uint32 bits) { return i - from < to - from ? (bits >> shift > prefix) + (uint32(bits >> shift == prefix) << 16) : 0; };
        const auto load = [&](uint32 i, uint32 (&of)[4]) {
            uint4 four = make_uint4(0, 0, 0, 0);
            if (i < last) four = *reinterpret_cast<const uint4 *>(scores() + i);
            of[0] = classify(i, four.x), of[1] = classify(i + 1, four.y), of[2] = classify(i + 2, four.z), of[3] = classify(i + 3, four.w);
            if (i >= last) of[0] = of[1] = of[2] = of[3] = 0;
            return of[0] + of[1] + of[2] + of[3];
        };
        uint32 of[4], both = 0;  // above in the low half, equal in the high one
#pragma unroll 2
        for (uint32 i = mine + 4 * lane; i < last; i += FOURS) both += load(i, of);
        uint32 above = __reduce_add_sync(FULL_WARP, both & 0xffff), equal = __reduce_add_sync(FULL_WARP, both >> 16);
        if (lane == 0) shared.of_warp[warp] = above, shared.also_of_warp[warp] = equal;
        __syncthreads();
        above = __reduce_add_sync(FULL_WARP, lane < warp ? shared.of_warp[lane % WARPS] : 0);
        equal = __reduce_add_sync(FULL_WARP, lane < warp ? shared.also_of_warp[lane % WARPS] : 0);
#pragma unroll 1
        for (uint32 chunk = mine; chunk < last; chunk += FOURS) {
            const uint32 i = chunk + 4 * lane, sum = load(i, of);
            if (!__any_sync(FULL_WARP, sum)) continue;
            const uint32 through = sum_lanes(sum);
            uint32 above_before = above + (through - sum & 0xffff), equal_before = equal + (through - sum >> 16);
#pragma unroll
            for (uint32 n = 0; n < 4; n++) {
                const bool is_above = of[n] & 1, is_equal = of[n] >> 16;
                if (is_above || (is_equal && equal_before < ties)) emit(above_before + min(equal_before, ties), i + n);
                above_before += is_above, equal_before += is_equal;
            }
            const uint32 all = __shfl_sync(FULL_WARP, through, WARP - 1);
            above += all & 0xffff, equal += all >> 16;
        }
    }
    // The best `wanted` of scores from … to−1, whose first digits are counted.
    template <typename Emit> __device__ void choose(uint32 from, uint32 to, uint32 wanted, const Emit &emit) const {
        if (wanted == 0) return;
        uint32 prefix = 0, shift = 31, ties = wanted;  // all
        const uint32 *digit = shared.first_digit;
#pragma unroll 1
        for (uint32 low = FIRST_SHIFT; wanted < to - from; low = low > DIGIT ? low - DIGIT : 0) {
            if (shift < 31) {
                count_digit(from, to, prefix, shift, low);
                digit = shared.digit;
            }
            choose_digit(digit, ties);
            prefix = prefix << shift - low | shared.chosen, shift = low, ties = shared.rank;
            if (shared.count == ties || low == 0) break;
        }
        take(from, to, prefix, shift, ties, emit);
    }

    __device__ void write_id(uint32 place, uint32 id) const {
        const List &to = s.selected;
        as<int32>(to.ids + row.seq * to.ids_seq + row.list * to.ids_pos + row.head * to.ids_head + place * to.ids_entry) = id;
    }
    // By the first CTA, as are all that follow.
    __device__ void list_tokens() const {
        const uint32 weighed = min(end, known), from = min(begin, weighed), taken = min(wanted, weighed - from), forced = init + local;
        const auto write = [&](uint32 place, uint32 token, float score) { write_id(place, token), write_score(place, score); };
        choose(from, weighed, taken, [&](uint32 place, uint32 i) { write(init + place, candidates.token(i), scores()[i]); });
        // Those without a weight rank behind.
        for (uint32 i = taken + thread; i < wanted; i += THREADS) write(init + i, candidates.token(max(begin, weighed) + i - taken), 0.0f);
        for (uint32 i = thread; i < forced; i += THREADS) {
            const uint32 token = i < init ? i : row.tokens - forced + i;
            uint32 at = known;
            if (s.scores) {
                const uint32 entry = candidates.entry_of(token / s.block_size);
                if (entry < candidates.count) at = entry * s.block_size + token % s.block_size;
            }
            write(i < init ? i : wanted + i, token, at < known ? scores()[at] : 0.0f);
        }
    }
    __device__ void list_blocks() const {
        const uint32 taken = min(wanted, end - begin), others = wanted - taken, forced = init + local;
        // If others are selected, all candidates are: before entry i there are so many others.
        const auto others_before = [&](uint32 i) { return candidates.block[begin + i] - init - i; };
        choose(begin, end, taken, [&](uint32 place, uint32 i) {
            write_id(init + place + (others > 0 ? min(others_before(i - begin), others) : 0), candidates.block[i]);
        });
        for (uint32 i = thread; i < others; i += THREADS) {
            uint32 low = 0, high = end - begin;
            while (low < high) {
                const uint32 middle = (low + high) / 2;
                if (others_before(middle) <= i)
                    low = middle + 1;
                else
                    high = middle;
            }
            write_id(init + i + low, init + i + low);
        }
        for (uint32 i = thread; i < forced; i += THREADS) write_id(i < init ? i : wanted + i, i < init ? i : row.n - forced + i);
    }
    __device__ void finish() const {
        if (OF_BLOCKS)
            list_blocks();
        else
            list_tokens();
        if (warp > 0) return;
        uint32 seen = 0;
        for (uint32 i = lane; i < s.slices * WARPS; i += WARP) seen |= shared.saw[i];
        seen = __reduce_or_sync(FULL_WARP, seen) | (clamped ? CLAMPED : 0);
        if (lane > 0) return;
        const List &to = s.selected;
        as<int32>(to.counts + row.seq * to.counts_seq + row.list * to.counts_pos + row.head * to.counts_head) = init + local + wanted;
        if (s.status) as<uint32>(s.status + row.seq * s.status_seq + row.list * s.status_pos + row.head * s.status_head) = seen;
    }

    // What is forced, and how many of which candidates are wanted besides.
    __device__ void find_quota(const Request &request) {
        const uint32 n = OF_BLOCKS ? row.n : row.tokens, k = min(uint32(max(request.budget, 0)), s.cap);
        init = min(s.init, n), local = min(s.local, n - init);
        const auto before = [&](uint32 i) { return OF_BLOCKS ? candidates.entries_before(min(uint64(i) * s.block_size, uint64(row.tokens))) : candidates.tokens_below(i); };
        begin = before(init), end = max(before(n - local), begin);
        if (OF_BLOCKS && !is_sound) begin = end = 0;  // all score alike
        const uint32 rest = OF_BLOCKS ? n - init - local : end - begin;
        wanted = min(k > init + local ? k - init - local : 0, rest);
        clamped = row.clamped || request.budget != int32(k) || request.count < 0 || uint32(request.count) > p.cap || (OF_BLOCKS && s.scores && n > s.max_blocks);
    }

    __device__ void run() {
        reinterpret_cast<uint4 *>(shared.digit)[thread] = make_uint4(0, 0, 0, 0);
        reinterpret_cast<uint4 *>(shared.first_digit)[thread] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        cluster_arrive();
        wait_for_previous_kernel();
        const uint32 number = s.by_slices.divide(blockIdx.x), of_heads = s.by_heads.divide(number), seq = s.by_lists.divide(of_heads);
        const Request request(p, seq, number - of_heads * s.kv_heads, of_heads - seq * s.lists);
        row = Row(s, number, request.lengths);
        const bool is_nan = load_queries();
        if (thread < p.kept) shared.channel[thread] = request.channel;
        const bool is_there = row.first < row.last;
        is_sound = !__syncthreads_or(is_nan && is_there);
        find_candidates(request);

        uint32 codes[ROWS][WORDS], range[2], saw = is_sound ? 0 : SAW_NAN;
        uint32 from = warp * TOKENS, exist = request_labels(from, codes, range);
        stage_queries();
        add_queries();
        find_quota(request);
        if (candidates.tokens_below(row.tokens) > known) saw |= NO_SUMMARY;
        __syncthreads();
        __syncwarp();
        cluster_wait();  // all have started
#pragma unroll 1
        for (; from < count; from += WARPS * TOKENS) {
            if (from > warp * TOKENS) exist = request_labels(from, codes, range);
            const uint32 mine = from + lane < count ? from + WARP + lane < count ? 3 : 1 : 0;
            if (exist != mine) saw |= NO_SUMMARY;
#pragma unroll 1
            for (uint32 tile = 0; tile < held.tiles; tile++) {
                float sums[TILES][4] = {};
                multiply(tile, codes, sums);
                saw |= keep(tile, from, exist, range, sums);
            }
        }
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0) store_word_to(0, &shared.saw[slice * WARPS + warp], saw);
        synchronise();
        weigh_heads();
        __syncthreads();
        if (OF_BLOCKS)
            send_blocks();
        else
            send_tokens();
        send_digits();
        synchronise();
        if (slice == 0) finish();
    }
};

template <uint32 WORDS, bool OF_BLOCKS> __device__ inline void select_held(const HeldLabelParams &p) {
    __shared__ HeldShared shared;
    allow_next_kernel();
    HeldLabels<WORDS, OF_BLOCKS>(p, shared).run();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) select_held_tokens_32(const __grid_constant__ HeldLabelParams p) { select_held<1, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_held_tokens_64(const __grid_constant__ HeldLabelParams p) { select_held<2, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_held_tokens_128(const __grid_constant__ HeldLabelParams p) { select_held<4, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_held_blocks_32(const __grid_constant__ HeldLabelParams p) { select_held<1, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_held_blocks_64(const __grid_constant__ HeldLabelParams p) { select_held<2, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) select_held_blocks_128(const __grid_constant__ HeldLabelParams p) { select_held<4, true>(p); }
