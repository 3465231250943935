// Selection by the INT4 labels of the tokens of candidate blocks, where all that follows from them fits in the shared memory of a cluster.
//
// What is computed is what labels.cu computes, for one query position a list. Products never leave the chip:
//
//   request queries, channels, candidates, lengths ─ request labels ─ products ─ largest and sums ─ all CTAs ─ weights, scores, bins ─ all CTAs
//   ─ … ─ cut ─ ids
//
// Cut: a cluster of CTAs for each list, neighbouring candidate tokens for each CTA. A warp takes 64 of them, four lanes a token, and multiplies
// them with eight heads at a time on the tensor cores. A code c stands there as 16 + c, exact in bfloat16, a query as a sum of one or three such
// numbers; scales and minima follow in float32:
//
//   Σ_c q_c·(min + scale·code_c) = scale·(Σ_c q_c·(16 + code_c) − 16·Σ_c q_c) + min·Σ_c q_c
//
// Of each 64 tokens and head the largest product, and the sum of 2^(product − largest), go to all CTAs of the cluster: always of 64, so sums
// depend neither on the cluster nor on the batch. Scores stay where they are made, and all CTAs find the cut together (cluster_cut.cuh).
//
// CTAs tell each other by words that travel together with the news of their arrival (st.async): a barrier of the cluster that orders memory
// would wait for all that was written to it. There is one that does not, so that all have started before anything is sent. Nothing returns
// early, and each CTA awaits all that is sent to it before it ends. Instructions count as much as bytes: 16 warps take turns.
//
// Bytes: the labels of the candidates, once: 2.4 MB for 8192 tokens of 64 channels and 8 heads, .6 µs. The rest is latency.
//
// On entry: one query position for each list; up to MOST_HEADS heads; rows of codes are single runs aligned to 16 bytes; up to HELD_BLOCKS
// candidates; `unit` is a multiple of 64, and of the tokens of a block where blocks are selected.
//
// targets: compute_90

#include "common/cluster_cut.cuh"
#include "select/candidates.cuh"
#include "select/codes.cuh"

constexpr uint32 THREADS = 512, WARPS = THREADS / WARP;
constexpr uint32 TOKENS = 64, TILES = TOKENS / 16;    // of a warp, at a time; rows of 16 that the tensor cores take
constexpr uint32 ROWS = TOKENS / 8;                   // tokens of which a lane has channels
constexpr uint32 HEADS = 8, MOST_HEADS = 16;          // of a tile, of a list
constexpr uint32 MOST_CTAS = 8;
constexpr uint32 HELD_BLOCKS = 2048, IDS = HELD_BLOCKS / THREADS;
constexpr float LOG2_E = 1.44269504f;
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

constexpr uint32 FLOAT16_NAN = 0x7e00;

struct HeldShared {
    ClusterCutShared<THREADS> cut;
    int64 codes[WARPS][TOKENS];  // where those of a warp's tokens begin
    int32 block[HELD_BLOCKS];
    float2 of_head[MOST_HEADS];        // the largest product, and what weights are multiplied by
    alignas(8) float sum[MOST_HEADS];  // of a query's kept channels
    alignas(16) uint32 channel[32 * 4];
    alignas(16) uint8 is_nan[WARPS];  // a query is
    uint32 saw[MOST_CTAS * WARPS];    // in the first CTA: each warp of the cluster
    int32 of_warp[WARPS], also_of_warp[WARPS];
    Barrier weighed;  // partial sums are here
};

// Where things of a list begin, found while the kernel before this one still runs: announced, so that addresses are in registers by then.
struct Places {
    const char *ids, *before, *channels, *query;         // a thread's, with the id before its own; query: a warp's, from its lane on
    const char *counts, *lens, *query_lens, *budgets;    // null where none are given
    const char *codes, *scales, *minima;                 // of a head; of a sequence's page, where there is no table

    __device__ Places(const LabelParams &p, uint32 seq, uint32 head, uint32 list) {
        const List &given = p.candidates;
        const SelectParams &s = p.select;
        const uint32 thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, page = s.place.table ? 0 : seq;
        ids = given.ids + seq * given.ids_seq + list * given.ids_pos + head * given.ids_head + thread * given.ids_entry;
        counts = given.counts + seq * given.counts_seq + list * given.counts_pos + head * given.counts_head;
        lens = s.seq_lens + seq * s.seq_lens_seq, channels = p.channels + head * p.channels_head + thread * p.channels_channel;
        query_lens = s.q_lens ? s.q_lens + seq * s.q_lens_seq : nullptr, budgets = s.budgets ? s.budgets + seq * s.budgets_seq : nullptr;
        query = s.q + seq * s.q_seq + list * s.q_pos + (head * s.group + warp) * s.q_head + lane * s.q_channel;
        codes = p.codes.at(page, 0, head), scales = p.scales.at(page, 0, head), minima = p.minima.at(page, 0, head);
        if (thread < p.cap) prefetch(ids);
        if (thread < p.kept) prefetch(channels);
        if (warp < s.group && lane < s.dim) prefetch(query);
        prefetch(counts), prefetch(lens);
        if (s.place.pages > 0 && s.place.rows > 0) prefetch(codes), prefetch(scales), prefetch(minima);
        before = ids - given.ids_entry;
    }
    // What labels follow from is in registers from here on.
    __device__ void hold() {
        ids = held(ids), before = held(before), counts = held(counts), lens = held(lens);
        query_lens = held(query_lens), budgets = held(budgets), channels = held(channels);
    }
};

// What is asked for before anything is known. Nothing of it is looked at before all is asked for.
struct Request {
    static constexpr uint32 AT_ONCE = 4;
    int32 budget, tokens, queries, count, id[IDS], before[IDS];  // candidates that are given, this thread's, and the one before each
    uint32 channel;                                              // the kept channel of this thread
    uint32 bits[AT_ONCE];                                        // of a warp's query, if it has one: channels from its lane on, WARP apart

    __device__ Request(const LabelParams &p, const Places &places) {
        const SelectParams &s = p.select;
        const uint32 thread = threadIdx.x, lane = thread % WARP;
        const int64 step = p.candidates.ids_entry;
        // What labels follow from comes first, and in this order.
#pragma unroll
        for (uint32 n = 0; n < IDS; n++) id[n] = before[n] = -1;
        if (thread < p.cap) id[0] = ask_bits<4>(places.ids);
        if (thread < p.cap && thread > 0) before[0] = ask_bits<4>(places.before);
        count = ask_bits<4>(places.counts), tokens = ask_bits<4>(places.lens), queries = s.positions, budget = s.k;
        if (places.query_lens) queries = ask_bits<4>(places.query_lens);
        if (places.budgets) budget = ask_bits<4>(places.budgets);
        channel = s.dim;  // of zeros
        if (thread < p.kept) channel = ask_bits<4>(places.channels);
#pragma unroll
        for (uint32 n = 0; n < AT_ONCE; n++) bits[n] = 0;
        if (thread / WARP < s.group) {
            const bool is_wide = s.q_type == FLOAT32;
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                const char *at = places.query + n * WARP * s.q_channel;
                if (lane + n * WARP < s.dim && is_wide) bits[n] = as<uint32>(at);
                if (lane + n * WARP < s.dim && !is_wide) bits[n] = as<uint16>(at);
            }
        }
        if (p.cap > THREADS) {
            asm volatile("" ::: "memory");  // mostly they are not there: a branch is shorter than what it skips
#pragma unroll
            for (uint32 n = 1; n < IDS; n++) {
                if (thread + n * THREADS >= p.cap) break;
                id[n] = ask_bits<4>(places.ids + n * THREADS * step), before[n] = ask_bits<4>(places.before + n * THREADS * step);
            }
        }
    }
};

// WORDS of eight channels are a lane's of a token.
template <uint32 WORDS, bool OF_BLOCKS> struct HeldLabels {
    const HeldLabelParams &held;
    const LabelParams &p;
    const SelectParams &s;
    HeldShared &shared;
    const uint32 thread, warp, lane, slice, heads;
    uint32 limit;         // tokens that the list sees and for which the index has room
    uint32 share;         // units of a CTA, at most
    uint32 first, count;  // this CTA's candidate tokens
    uint32 known;         // candidate tokens below the limit: the first ones
    bool is_sound;        // the query holds no NaN
    bool clamped;
    int32 budget;
    uint32 begin, end, wanted, init, local;  // so many of begin … end−1, of candidate tokens or blocks; and first and last ones, which are forced
    Row row;
    Candidates candidates;

    __device__ HeldLabels(const HeldLabelParams &held, HeldShared &shared)
        : held(held), p(held.labels), s(held.labels.select), shared(shared), thread(threadIdx.x), warp(thread / WARP), lane(thread % WARP),
          slice(cluster_rank()), heads(held.labels.select.group) {}

    // Scores and products of this CTA's tokens or blocks, partial sums of the whole list, queries.
    __device__ float *scores() const { return row_scores; }
    __device__ float *products() const { return row_scores + held.products / 4; }
    __device__ float2 *partials() const { return reinterpret_cast<float2 *>(row_scores + held.partials / 4); }
    __device__ uint2 *queries() const { return reinterpret_cast<uint2 *>(row_scores + held.queries / 4); }
    __device__ uint32 parts() const { return (known + TOKENS - 1) / TOKENS; }

    // A head's query in float32 for each warp: it lies where scores come later.
    __device__ void keep_queries(const Request &request, const Places &places) const {
        constexpr uint32 AT_ONCE = Request::AT_ONCE;
        bool is_nan = false;
        float x[AT_ONCE];
        widen_queries(request.bits, s.q_type, x);
#pragma unroll 1
        for (uint32 c = lane; warp < heads; ) {
#pragma unroll
            for (uint32 n = 0; n < AT_ONCE; n++) {
                is_nan |= x[n] != x[n];
                if (c + n * WARP < s.dim) scores()[warp * s.dim + c + n * WARP] = x[n];
            }
            c += AT_ONCE * WARP;
            if (c - lane >= s.dim) break;
            const uint32 left = (s.dim + WARP - 1 - min(c, s.dim)) / WARP;
            ::load_queries(places.query + (c - lane) * s.q_channel, WARP * s.q_channel, left, s.q_type, x);
        }
        is_nan = __any_sync(FULL_WARP, is_nan);
        if (lane == 0) shared.is_nan[warp] = is_nan;
    }
    // Splits the kept channels into numbers of bfloat16, laid out as lanes read them: [words, steps, tiles, terms, lanes].
    __device__ void stage_queries() const {
        const uint32 from_last = WARPS - 1 - warp, word = from_last % WORDS, tile = from_last / WORDS, head = tile * HEADS + lane / 4;
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
        if (warp < heads) {
#pragma unroll
            for (uint32 n = 0; n < WORDS; n++) {
                const uint32 channel = shared.channel[n * WARP + lane];
                if (channel < s.dim) sum += scores()[warp * s.dim + channel];
            }
#pragma unroll
            for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        }
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
        budget = __shfl_sync(FULL_WARP, request.budget, 0);  // here it is awaited; later, labels would be with it
        uint32 count = entries;
        if (!__syncthreads_and(is_clean)) {
            const auto id_of = [&](uint32 base) { return shared.block[base + thread]; };
            count = keep_ascending<THREADS>(entries, row.n, id_of, shared.block, shared.of_warp, shared.also_of_warp);
        }
        candidates = {shared.block, count, s.block_size, row.tokens, s.by_block};
        limit = min(row.tokens, s.place.capacity);
        const uint32 most = min(count * s.block_size, limit);  // of known
        share = held.by_units.divide(most + held.by_units.value - 1);
        first = min(slice * share * held.unit, most), this->count = min(share * held.unit, most - first);
    }
    // The candidate tokens below the limit. What is asked for before is on its way.
    __device__ void find_known() {
        known = candidates.tokens_below(limit);
        first = min(first, known), count = min(count, known - first);
    }

    // Asks for the labels of the CTA's tokens from `from` on: eight tokens' channels, and two tokens' scale and minimum, whose presence is told.
    // `misses`: one is not there that should be.
    __device__ uint32 request_labels(const Places &places, uint32 from, uint32 (&codes)[ROWS][WORDS], uint32 (&range)[2][2],
                                     bool &misses) const {
        const uint32 last = max(first + count, 1u) - 1;
        uint32 n[2], exist = 0;
#pragma unroll
        for (uint32 t = 0; t < 2; t++) {
            const uint32 at = from + t * WARP + lane;
            const uint32 token = candidates.token(min(first + at, last));  // without a branch, both are looked up at once
            n[t] = at < count ? token : limit;
            exist |= uint32(n[t] < limit) << t;
        }
        const uint32 due = exist;
        int64 at_codes[2] = {}, at_scales[2] = {}, at_minima[2] = {};
        if (s.place.table) {
            uint32 page[2];
#pragma unroll
            for (uint32 t = 0; t < 2; t++) {
                const uint32 number = n[t] / s.place.rows;
                n[t] -= number * s.place.rows, page[t] = s.place.pages;
                if (exist >> t & 1) page[t] = as<uint32>(s.place.table + row.seq * s.place.table_seq + number * s.place.table_page);
            }
#pragma unroll
            for (uint32 t = 0; t < 2; t++) {
                if (page[t] >= s.place.pages) exist &= ~(1u << t);
                at_codes[t] = page[t] * p.codes.page, at_scales[t] = page[t] * p.scales.page, at_minima[t] = page[t] * p.minima.page;
            }
        }
        misses = exist != due;
        __syncwarp();  // what was there is read
#pragma unroll
        for (uint32 t = 0; t < 2; t++) {
            const bool exists = exist >> t & 1;
            const char *scale = places.scales + at_scales[t] + n[t] * p.scales.row;
            const char *least = places.minima + at_minima[t] + n[t] * p.minima.row;
            range[t][0] = 0, range[t][1] = FLOAT16_NAN;  // no product
            if (exists) range[t][0] = as<uint16>(scale);
            if (exists) range[t][1] = as<uint16>(least);
            shared.codes[warp][t * WARP + lane] = exists ? at_codes[t] + n[t] * p.codes.row : 0;  // of what is not there, others
        }
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++)
#pragma unroll
            for (uint32 word = 0; word < WORDS; word++) codes[j][word] = 0;
        if (!__any_sync(FULL_WARP, exist)) return exist;
        const char *own = places.codes + lane % 4 * 4 * WORDS;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) load_words(own + shared.codes[warp][8 * j + lane / 4], codes[j]);
        return exist;
    }
    // Products of these tokens' codes with a tile of heads; of_q: sums of the queries of this lane's two.
    __device__ void multiply(uint32 tile, const uint32 (&codes)[ROWS][WORDS], const float2 &of_q, float (&sums)[TILES][4]) const {
#pragma unroll
        for (uint32 m = 0; m < TILES; m++) sums[m][0] = sums[m][2] = -16.0f * of_q.x, sums[m][1] = sums[m][3] = -16.0f * of_q.y;
        // Mostly there is one term: it needs no loop.
        const uint2 *q = queries() + tile * held.terms * WARP + lane;
        const uint32 step_terms = held.tiles * held.terms * WARP;
        uint2 first[WORDS * 2];
#pragma unroll
        for (uint32 step = 0; step < WORDS * 2; step++) first[step] = q[step * step_terms];
#pragma unroll
        for (uint32 step = 0; step < WORDS * 2; step++) {
            uint32 a[TILES][4];
#pragma unroll
            for (uint32 m = 0; m < TILES; m++)
#pragma unroll
                for (uint32 i = 0; i < 4; i++) a[m][i] = widen_codes(codes[2 * m + i % 2][step / 2], 2 * (step % 2) + i / 2);
#pragma unroll
            for (uint32 m = 0; m < TILES; m++) multiply_add(sums[m], a[m], first[step]);
#pragma unroll 1
            for (uint32 term = 1; term < held.terms; term++) {
                const uint2 b = q[step * step_terms + term * WARP];
#pragma unroll
                for (uint32 m = 0; m < TILES; m++) multiply_add(sums[m], a[m], b);
            }
        }
    }
    // The largest of the products of a head, and the sum. Lanes apart by four have the same two.
    __device__ void reduce(const float (&products)[TILES][4], float (&most)[2], float (&sum)[2]) const {
#pragma unroll
        for (uint32 n = 0; n < 2; n++) {
            most[n] = minus_infinity(), sum[n] = 0.0f;
#pragma unroll
            for (uint32 j = 0; j < ROWS; j++) most[n] = fmaxf(most[n], products[j / 2][j % 2 * 2 + n]);
#pragma unroll
            for (uint32 bit = 4; bit < WARP; bit *= 2) most[n] = fmaxf(most[n], __shfl_xor_sync(FULL_WARP, most[n], bit));
            const float from_most = most[n] > minus_infinity() ? most[n] : 0.0f;
#pragma unroll
            for (uint32 j = 0; j < ROWS; j++) sum[n] += exp2_fast(products[j / 2][j % 2 * 2 + n] - from_most);
#pragma unroll
            for (uint32 bit = 4; bit < WARP; bit *= 2) sum[n] += __shfl_xor_sync(FULL_WARP, sum[n], bit);
        }
    }
    // Makes −inf of what is not finite or not there. Says whether one that is there is NaN.
    __device__ uint32 leave_out(uint32 h, uint32 exist, float (&products)[TILES][4]) const {
        const uint32 there[2] = {__ballot_sync(FULL_WARP, exist & 1), __ballot_sync(FULL_WARP, exist & 2)};
        uint32 saw = 0;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) {
            const bool exists = there[j / 4] >> 8 * (j % 4) + lane / 4 & 1;
#pragma unroll
            for (uint32 n = 0; n < 2; n++) {
                float &product = products[j / 2][j % 2 * 2 + n];
                if (exists && h + n < heads && is_sound && product != product) saw = SAW_NAN;
                if (!exists || !(fabsf(product) < -minus_infinity())) product = minus_infinity();
            }
        }
        return saw;
    }
    // Keeps the products with a head of the CTA's tokens from `from` on, in two columns at a time; the largest and the sum go to all CTAs.
    // range: scale and minimum of two tokens, in units of exponents.
    __device__ uint32 keep(uint32 tile, uint32 from, uint32 exist, const float2 (&range)[2], const float2 &of_q,
                           float (&products)[TILES][4]) const {
        const uint32 h = tile * HEADS + lane % 4 * 2;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++) {
            const uint32 owner = 8 * (j % 4) + lane / 4;
            const float of_code = __shfl_sync(FULL_WARP, range[j / 4].x, owner), least = __shfl_sync(FULL_WARP, range[j / 4].y, owner);
            float *product = &products[j / 2][j % 2 * 2];
            product[0] = fmaf(of_code, product[0], least * of_q.x), product[1] = fmaf(of_code, product[1], least * of_q.y);
        }
        float most[2], sum[2];
        uint32 saw = 0;
        reduce(products, most, sum);
        // As most often none is: what is not finite shows in one of them.
        const auto is_odd = [&](uint32 n) { return sum[n] != sum[n] || !(fabsf(most[n]) < -minus_infinity()); };
        if (__any_sync(FULL_WARP, is_odd(0) || is_odd(1))) {
            saw = leave_out(h, exist, products);
            reduce(products, most, sum);
        }
        const uint4 both = make_uint4(__float_as_uint(most[0]), __float_as_uint(sum[0]), __float_as_uint(most[1]), __float_as_uint(sum[1]));
        const uint32 number = (first + from) / TOKENS;
        if (lane / 4 < s.slices && h < heads) send_four(lane / 4, partials() + number * held.pitch + h, both, shared.weighed);
        float *to = this->products() + (from + lane / 4) * held.pitch + h;
#pragma unroll
        for (uint32 j = 0; j < ROWS; j++, to += 8 * held.pitch)
            if (h < held.pitch) *reinterpret_cast<float2 *>(to) = make_float2(products[j / 2][j % 2 * 2], products[j / 2][j % 2 * 2 + 1]);
        return saw;
    }
    // So many bytes are sent to each CTA, and to the first one more.
    __device__ void await_parts() const {
        const uint32 of_warps = slice == 0 ? s.slices * WARPS * 4 : 0;
        shared.weighed.expect(parts() * ((heads + 1) / 2) * 16 + of_warps);
    }

    // By a warp for each head; weights of heads that are not there are 0.
    __device__ void weigh_heads() const {
        if (warp >= held.pitch) return;
        const float2 *of = partials() + warp;
        const uint32 parts = warp < heads ? this->parts() : 0;
        // Read once, as most often these are all.
        constexpr uint32 AT_ONCE = 4;
        float2 some[AT_ONCE];
        float most = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) {
            some[i] = make_float2(minus_infinity(), 0.0f);
            if (lane + i * WARP < parts) some[i] = of[(lane + i * WARP) * held.pitch];
        }
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) most = fmaxf(most, some[i].x);
#pragma unroll 4
        for (uint32 n = lane + AT_ONCE * WARP; n < parts; n += WARP) most = fmaxf(most, of[n * held.pitch].x);
        most = score_of(__reduce_max_sync(FULL_WARP, sort_key(most)));
        const float from_most = most > minus_infinity() ? most : 0.0f;
#pragma unroll
        for (uint32 i = 0; i < AT_ONCE; i++) sum = fmaf(some[i].y, exp2_fast(some[i].x - from_most), sum);
#pragma unroll 4
        for (uint32 n = lane + AT_ONCE * WARP; n < parts; n += WARP)
            sum = fmaf(of[n * held.pitch].y, exp2_fast(of[n * held.pitch].x - from_most), sum);
#pragma unroll
        for (uint32 bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
        if (!OF_BLOCKS) sum *= float(heads);
        if (lane == 0) shared.of_head[warp] = make_float2(from_most, sum > 0.0f && is_sound ? __fdividef(1.0f, sum) : 0.0f);
    }
    // Softmax mass of the CTA's token n, over its heads.
    __device__ float mass(uint32 n) const {
        const float4 *of = reinterpret_cast<const float4 *>(products() + n * held.pitch);
        const float2 *by = shared.of_head;
        float sum = 0.0f;
#pragma unroll 1
        for (uint32 h = 0; h < held.pitch; h += 4, of++, by += 4) {
            const float x[4] = {of->x, of->y, of->z, of->w};
#pragma unroll
            for (uint32 i = 0; i < 4; i++) sum = fmaf(exp2_fast(x[i] - by[i].x), by[i].y, sum);
        }
        return sum;
    }
    // The mass of each candidate block of this CTA, by a few lanes.
    __device__ void score_blocks(const ClusterCut<THREADS> &cut) const {
        const uint32 lanes = held.lanes, log_lanes = __ffs(lanes) - 1, within = lane & (lanes - 1), step = THREADS >> log_lanes;
        const uint32 of_warp = WARP >> log_lanes;
        const uint32 rounded = (cut.end - cut.begin + of_warp - 1) & ~(of_warp - 1);  // lanes of a warp go together
        for (uint32 n = thread >> log_lanes; n < rounded; n += step) {
            const uint32 entry = cut.begin + n;
            float sum = 0.0f;
#pragma unroll 2
            for (uint32 t = within; t < s.block_size; t += lanes) {
                const uint32 at = entry * s.block_size + t;
                if (entry < cut.end && at < known) sum += mass(at - first);
            }
            for (uint32 bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
            if (within > 0 || entry >= cut.end) continue;
            cut.put(entry, sum);
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

    __device__ void write_id(uint32 place, uint32 id) const {
        const List &to = s.selected;
        as<int32>(to.ids + row.seq * to.ids_seq + row.list * to.ids_pos + row.head * to.ids_head + place * to.ids_entry) = id;
    }
    // Of scores that add up to 2^log_all at most the wanted-th largest is at most 2^…; but for rounding.
    __device__ static int32 log_most(int32 log_all, uint32 wanted) { return log_all - (31 - __clz(max(wanted, 1u))); }
    // By all CTAs: each scores its own, and lists what of them is in; the first one lists the rest.
    __device__ void list_tokens() const {
        const uint32 weighed = min(end, known), from = min(begin, weighed), taken = min(wanted, weighed - from), forced = init + local;
        ClusterCut<THREADS> cut(shared.cut, scores(), slice, s.slices, first, first + count, from, weighed, log_most(0, taken));
#pragma unroll 2
        for (uint32 i = cut.first + lane; i < cut.last; i += WARP) cut.put(i, mass(i - first));
        cut.find(taken);
        cut.take([&](uint32 place, uint32 i) {
            write_id(init + place, candidates.token(i));
            write_score(init + place, cut.score(i));
        });
        // Those without a weight rank behind.
        for (uint32 i = taken + thread; slice == 0 && i < wanted; i += THREADS) {
            write_id(init + i, candidates.token(max(begin, weighed) + i - taken));
            write_score(init + i, 0.0f);
        }
        for (uint32 i = thread; i < forced; i += THREADS) {
            const uint32 token = i < init ? i : row.tokens - forced + i, place = i < init ? i : wanted + i;
            if (slice == 0) write_id(place, token);
            if (!s.scores) continue;
            const uint32 entry = candidates.entry_of(token / s.block_size);
            const uint32 at = entry < candidates.count ? entry * s.block_size + token % s.block_size : known;
            if (cut.begin <= at && at < cut.end)
                write_score(place, cut.score(at));
            else if (slice == 0 && at >= known)
                write_score(place, 0.0f);
        }
    }
    __device__ void list_blocks() const {
        // The last CTA has also those for which the index has no room: they weigh nothing.
        const uint32 blocks = share * held.unit_blocks, own = min(slice * blocks, candidates.count);
        const uint32 own_end = slice + 1 == s.slices ? candidates.count : min(own + blocks, candidates.count);
        ClusterCut<THREADS> cut(shared.cut, scores(), slice, s.slices, own, own_end, begin, end, log_most(32 - __clz(heads - 1), wanted));
        score_blocks(cut);
        const uint32 taken = min(wanted, end - begin), others = wanted - taken, forced = init + local;
        // If others are selected, all candidates are: before entry i there are so many others.
        const auto others_before = [&](uint32 i) { return candidates.block[begin + i] - init - i; };
        cut.find(taken);
        cut.take([&](uint32 place, uint32 i) {
            write_id(init + place + (others > 0 ? min(others_before(i - begin), others) : 0), candidates.block[i]);
        });
        if (slice > 0) return;
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
    // By the first CTA, which was told what all warps saw.
    __device__ void report() const {
        if (slice > 0 || warp < WARPS - 1) return;
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
        const uint32 n = OF_BLOCKS ? row.n : row.tokens, k = min(uint32(max(budget, 0)), s.cap);
        init = min(s.init, n), local = min(s.local, n - init);
        const auto before = [&](uint32 i) { return OF_BLOCKS ? candidates.entries_before(min(uint64(i) * s.block_size, uint64(row.tokens))) : candidates.tokens_below(i); };
        begin = before(init), end = max(before(n - local), begin);
        if (OF_BLOCKS && !is_sound) begin = end = 0;  // all score alike
        const uint32 rest = OF_BLOCKS ? n - init - local : end - begin;
        wanted = min(k > init + local ? k - init - local : 0, rest);
        clamped = row.clamped || budget != int32(k) || request.count < 0 || uint32(request.count) > p.cap || (OF_BLOCKS && s.scores && n > s.max_blocks);
    }

    __device__ void run() {
        shared.cut.open();
        if (thread == 0) shared.weighed.open(1);
        __syncwarp();
        cluster_start();
        const uint32 number = s.by_slices.divide(blockIdx.x), of_heads = s.by_heads.divide(number), seq = s.by_lists.divide(of_heads);
        Places places(p, seq, number - of_heads * s.kv_heads, of_heads - seq * s.lists);
        places.hold();
        wait_for_previous_kernel();
        const Request request(p, places);
        row = Row(s, number, Lengths(request.tokens, request.queries));
        keep_queries(request, places);
        if (thread < p.kept) shared.channel[thread] = request.channel;
        find_candidates(request);

        uint32 codes[ROWS][WORDS], range[2][2], from = warp * TOKENS;
        bool misses;
        uint32 exist = request_labels(places, from, codes, range, misses);
        // While labels are on their way.
        const bool is_there = row.first < row.last;
        const uint4 are_nan = *reinterpret_cast<const uint4 *>(shared.is_nan);
        is_sound = !is_there || (are_nan.x | are_nan.y | are_nan.z | are_nan.w) == 0;
        stage_queries();
        add_queries();
        find_known();
        uint32 saw = is_sound ? 0 : SAW_NAN;
        if (limit < row.tokens && candidates.tokens_below(row.tokens) > known) saw |= NO_SUMMARY;
        if (thread == 0) await_parts();
        __syncthreads();
        cluster_started();
#pragma unroll 1
        for (; from < count; from += WARPS * TOKENS) {
            if (from > warp * TOKENS) exist = request_labels(places, from, codes, range, misses);
            if (misses) saw |= NO_SUMMARY;
            const float scale = s.scale * LOG2_E;
            float2 of_code_and_least[2];
#pragma unroll
            for (uint32 t = 0; t < 2; t++)
                of_code_and_least[t] = make_float2(scale * widen_float16(range[t][0]), scale * widen_float16(range[t][1]));
#pragma unroll 1
            for (uint32 tile = 0; tile < held.tiles; tile++) {
                float sums[TILES][4];
                const float2 of_q = *reinterpret_cast<const float2 *>(&shared.sum[tile * HEADS + lane % 4 * 2]);
                multiply(tile, codes, of_q, sums);
                saw |= keep(tile, from, exist, of_code_and_least, of_q, sums);
            }
        }
        saw = __reduce_or_sync(FULL_WARP, saw);
        if (lane == 0) send_word(0, &shared.saw[slice * WARPS + warp], saw, shared.weighed);
        find_quota(request);  // while the others' are on their way
        shared.weighed.wait(0);
        weigh_heads();
        report();
        __syncthreads();
        if (OF_BLOCKS)
            list_blocks();
        else
            list_tokens();
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
