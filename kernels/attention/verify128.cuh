// Attention for up to 64 rows, query positions times query heads of a KV head, to 16-bit keys and values of 128 channels (variant verify128), or
// of 64 (variant verify64, for which the source includes verify64_width.cuh), by matrix products of warpgroups (wgmma). It serves the verification of drafts: 16 positions of 4 heads take little longer than one position.
//
// Runs for calls that have more rows a list than decode128 takes, on compute capability 9.0 itself: src/ops/attention/device/choose.rs.
//
// A cluster of up to 16 CTAs takes a chunk of a work item's tokens in stages of 64; CTA r takes stages r, r + ctas, … in a ring in shared memory:
//
//   copies    a warpgroup ── keys [64 tokens × channels], values [64 tokens × channels] ── 16 tokens a warp, wherever they lie
//   products  two warpgroups, each every second stage ── S [64 rows × 64 tokens] = Q · Kᵀ ── running softmax ── O [64 × channels] += P · V
//   join      (verify128_join.cuh) both warpgroups in shared memory ── the cluster, each CTA a part of the rows ── the chunks, through scratch
//
// The weights P stay in registers: the sums of the first product have the form of the second product's operand.
//
// A tile whose 16 tokens are all there and lie side by side is copied as boxes of tensors (verify128_boxes.cuh): one lane of its warp requests a box of keys
// and one of values for each 64 channels. The lanes of a warp copy other tiles, 16 bytes each at a time, and all tiles where keys or values cannot be mapped. Warps of a stage may differ.
//
//   Bytes of a stage of 128 channels: 32 KiB, 1760 cycles of a multiprocessor's share of the memory's bandwidth. Products of a stage: 512 cycles.
//   Of 64 channels both are half as many.
//
// How the tokens of a row are split depends on its own list and on the lengths of all of the call's lists, and on nothing else; where chunks are
// fixed (FixedChunks), on its own list alone.
#pragma once

#include "attention/verify128_boxes.cuh"
#include "attention/verify128_join.cuh"

static_assert(SLABS * SLAB_ELEMENTS == VERIFY_CHANNELS && STAGE_TILES <= GROUP_THREADS / WARP);
// What the rows of a sequence see, where each sees all tokens up to its own. The rows of a draft tree: TreeRows of attention_tree/rows.cuh.
struct ChainRows {
    static constexpr int32 SEEN_BY_ALL = 1;   // of the tokens of the rows: the first
    static constexpr uint32 REGISTERS = CHAIN_REGISTERS;

    __device__ explicit ChainRows(const VerifyJob &) {}
    // What any row of a work item sees, where `reach` says it for a chain.
    __device__ static Reach reach_of(const AttentionParams &, const WorkItem &, const Reach &reach) { return reach; }
    // What is seen from query position `position`, which is the thread's row i.
    __device__ void row(const VerifyJob &job, uint32 i, uint32 position, int32 &first, uint32 &count) { job.reach.row(job.p, position, first, count); }
    // Which tokens within the reach of a work item one of its rows sees, for a warp that copies them.
    struct Seen {
        // Called by the warp, before has().
        __device__ static void find(const AttentionParams &, const WorkItem &, const Reach &) {}
        // `node`: the token's number among the tokens of the rows; below 0 before them.
        __device__ static bool has(const AttentionParams &, int32 node) { return true; }
    };
    // Which scores of a stage are of tokens that a row does not see though they lie within its reach: bit n is that of the thread's score n.
    __device__ uint32 hidden(const VerifyJob &, uint32 stage) const { return 0; }
};

// Registers of a thread that copies: three warpgroups have 168 a thread to share out.
template <typename Rows> constexpr uint32 COPY_REGISTERS = 504 - GROUPS * Rows::REGISTERS;

// A warp that copies one tile, 16 tokens, of every stage; of 256 channels two warps copy. Each lane finds one granule, for as many tiles as 32 granules cover.
template <typename Rows>
struct VerifyCopies : VerifyJob {
    static constexpr uint32 CHUNKS = VERIFY_CHANNELS * 2 / 16;  // of 16 bytes in a token's keys
    static constexpr uint32 AT_ONCE = WARP / CHUNKS;            // tokens that the warp copies at a time
    static constexpr uint32 TILE_BYTES = SLABS * BOX_BYTES;     // of its keys, or of its values

    const Boxes *boxes = nullptr;  // NULL: tiles are not copied as boxes

    // Where this lane's granule lies; position −1: nowhere.
    Place place;
    const char *key, *value;
    // Rows all see the tokens seen_begin … seen_end − 1, and bit n: all tokens of lane n's granule.
    int32 seen_begin, seen_end;
    uint32 whole;
    uint32 head_in_boxes;

    __device__ static const char *of_lane(const char *address, uint32 lane) {
        return reinterpret_cast<const char *>(__shfl_sync(FULL_WARP, reinterpret_cast<uint64>(address), lane));
    }
    __device__ void keep_place(const Place &place) {
        this->place = place;
        key = p.k.at(place.page, place.row, item.head);
        value = p.v.at(place.page, place.row, item.head);
        whole = __ballot_sync(FULL_WARP, place.position >= max(seen_begin, 0) && place.position + (1 << p.log_granule) <= seen_end);
    }
    // Tells those that compute which tokens a tile has, and whether every row sees all of them. Bit n of the result: token n is there.
    __device__ uint32 note_tile(const Tiles &tiles, uint32 tile, uint32 stage) const {
        const bool exists = tile < tiles.count;
        const uint32 from = tiles.lane_of(p, tile, 0), all = (1u << (TILE >> p.log_granule)) - 1, row = lane % TILE, within = row & ((1 << p.log_granule) - 1);
        const int32 granule = __shfl_sync(FULL_WARP, place.position, from + (row >> p.log_granule));
        const int32 node = granule + int32(within) - (reach.length - reach.queries);
        const bool is_there = exists && is_reached(reach, granule, within) && Rows::Seen::has(p, node);
        if (lane == row) s.position[stage][warp * TILE + row] = is_there ? granule + int32(within) : -1;
        if (lane == 0) s.is_whole[stage][warp] = exists && (whole >> from & all) == all;
        return __ballot_sync(FULL_WARP, is_there);
    }
    // Where the lane's 16 bytes of a tile's keys or values lie, of the n-th tokens that the warp copies at a time; `to`: of the stage's.
    __device__ uint32 place_of_copy(uint32 to, uint32 n) const {
        const uint32 token = lane / CHUNKS, chunk = lane % CHUNKS;
        return to + chunk / 8 * SLAB_BYTES + (warp * TILE + token) * SLAB_WIDTH + AT_ONCE * n * SLAB_WIDTH + ((chunk % 8 ^ token ^ AT_ONCE * n % 8) * 16);
    }
    // Requests keys or values of a tile's tokens: zeros where a token is not there, since a NaN times a weight of zero would be NaN. address: where
    // the granules lie. `step` bytes lie between two tokens of one. UNROLLED: of the copies of smaller granules, as many as registers allow. ARE_WHOLE: a tile
    // of a granule whose tokens are all there takes fewer instructions, another one more.
    template <uint32 UNROLLED = 4, bool ARE_WHOLE = false>
    __device__ void copy_tile(const Tiles &tiles, uint32 tile, uint32 are_there, const char *address, int64 step, uint32 to) const {
        const uint32 from = tiles.lane_of(p, tile, 0), token = lane / CHUNKS, chunk = lane % CHUNKS;
        if (p.log_granule == LOG_TILE && (!ARE_WHOLE || are_there == FULL_WARP)) {
            const char *at = of_lane(address, from) + token * step + chunk * 16;
#pragma unroll
            for (uint32 n = 0; n < TILE / AT_ONCE; n++, at += AT_ONCE * step) copy_16(place_of_copy(to, n), at, ARE_WHOLE || are_there >> token + AT_ONCE * n & 1);
            return;
        }
#pragma unroll UNROLLED
        for (uint32 n = 0; n < TILE / AT_ONCE; n++) {
            const uint32 row = AT_ONCE * n + token, within = row & ((1 << p.log_granule) - 1);
            const char *const at = of_lane(address, from + (row >> p.log_granule)) + within * step + chunk * 16;
            copy_16(place_of_copy(to, n), at, are_there >> row & 1);
        }
    }
    // Whether a tile whose tokens `are_there` is copied as boxes.
    __device__ bool takes_boxes(uint32 are_there) const { return boxes && boxes->exist && are_there == FULL_WARP; }
    // The KV head of keys and values; pages that slots name have one.
    __device__ uint32 find_head() const { return p.slots.data ? 0 : item.head; }
    // Where a tile lies that one lane has found, for all of them.
    __device__ static Place of_lane(const Place &place, uint32 lane) {
        return {0, __shfl_sync(FULL_WARP, place.page, lane), __shfl_sync(FULL_WARP, place.row, lane)};
    }
    // Requests keys or values of a whole tile, which lies at `place`. The elected lane calls it. Products have read what a box overwrites, by the proxy by which boxes are written;
    // where lanes had copied that, those who compute have fenced it before they read it (fence_copies). So there is nothing to fence here.
    __device__ void request_boxes(const TensorMap &map, const Place &place, uint32 head, uint32 to, const Barrier &full) const {
#pragma unroll
        for (uint32 n = 0; n < SLABS; n++)
            map.copy_box(to + n * SLAB_BYTES + warp * BOX_BYTES, n * SLAB_ELEMENTS, place.row, head, place.page, full);
    }
    // The warp's first tile of a chunk that begins with unit `begin`.
    __device__ uint32 first_tile(uint32 begin) const { return begin + rank * STAGE_TILES + warp; }
    // The warp's tiles, and which tokens every row sees.
    __device__ Tiles begin() {
        const uint32 first = first_tile(cta_share.begin), end = cta_share.end;
        const bool is_one_of_chain = p.own_lists && Rows::SEEN_BY_ALL, has_rows = p.own_lists || reach.queries == int32(p.positions);
        seen_end = is_one_of_chain ? reach.end : has_rows ? reach.length - reach.queries + Rows::SEEN_BY_ALL : 0;
        seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
        Rows::Seen::find(p, item, reach);
        place = {-1, 0, 0};
        head_in_boxes = find_head();
        key = p.k.data, value = p.v.data;
        whole = 0;
        return {first, STAGE_TILES * ctas, first < end ? p.ctas.divide((end - first - 1) / STAGE_TILES) + 1 : 0};
    }
    // Tiles whose granules the warp finds at once.
    __device__ uint32 found_at_once() const { return WARP >> (LOG_TILE - p.log_granule); }
    // place_of(x) says where the granule lies that begins with token x of the list. Stages from `taken` on are free once they have been given up.
    template <typename PlaceOf>
    __device__ void run(PlaceOf place_of, uint32 taken = STAGES) {
        const uint32 count = stages();
        const Tiles tiles = begin();
        const auto find = [&](uint32 tile) {
            const uint32 x = tiles.token(p, tile);
            return x == Tiles::NOWHERE ? Place{-1, 0, 0} : place_of(x);
        };
        const uint32 at_once = found_at_once();
        Place next = find(0);
        uint32 stage = 0, turn = 0;
#pragma unroll 1
        for (uint32 step = 0; step < count; step++) {
            const uint32 uses = turn + (stage >= taken);
            if (uses) s.empty[stage].wait(uses - 1);
            if (step < tiles.count && tiles.begins(p, step)) keep_place(next);
            const uint32 are_there = note_tile(tiles, step, stage), to = shared_address(shared) + stage * STAGE_BYTES;
            if (takes_boxes(are_there)) {
                const Place at = of_lane(place, tiles.lane_of(p, step, 0));
                __syncwarp();  // what is said of the tile is written
                if (is_elected()) {
                    s.full[stage].expect(2 * TILE_BYTES);
                    request_boxes(boxes->keys, at, head_in_boxes, to, s.full[stage]);
                    request_boxes(boxes->values, at, head_in_boxes, to + VALUES_OFFSET, s.full[stage]);
                }
            } else {
                copy_tile(tiles, step, are_there, key, p.k.step[1], to);
                copy_tile(tiles, step, are_there, value, p.v.step[1], to + VALUES_OFFSET);
                await_copies(s.full[stage]);
                arrive(s.full[stage]);
            }
            if (++stage == STAGES) stage = 0, turn++;
            // While copies are under way.
            if (step + at_once < tiles.count && tiles.begins(p, step)) next = find(step + at_once);
        }
    }
};

// A warpgroup that computes every second stage of the CTA. Of a sum of 64 rows a thread has two, row lane / 4 of its warp's 16 and the one
// 8 below, and of each eight columns two neighbouring ones.
//
// Weights are multiplied by 2^LOG_UNIT, so that float16 holds small ones, too.
template <typename Type, bool IS_BFLOAT16, typename Rows, int32 LOG_UNIT = 0>
struct VerifyProducts : VerifyJob {
    using Scores = float[STAGE_TOKENS / 2];  // that a thread has of a stage

    uint32 group;
    Rows rows;
    float acc[VERIFY_CHANNELS / 2], m[2], l[2];
    // The rows see `count` tokens from `first` on.
    int32 first[2];
    uint32 count[2];

    // Both warpgroups request the queries; rows that do not exist are zeros.
    __device__ void request_queries() const {
        constexpr uint32 CHUNKS = VERIFY_CHANNELS * 2 / 16;
        const uint32 rows = rows_of(p, item), thread = group * GROUP_THREADS + warp * WARP + lane, chunk = thread % CHUNKS;
#pragma unroll
        for (uint32 row = thread / CHUNKS; row < VERIFY_ROWS; row += COMPUTE_THREADS / CHUNKS) {
            const bool exists = row < rows;
            const auto [position, head] = place_of_row(p, item, first_row(p, item) + (exists ? row : 0));
            const char *const from = p.q.at(item.seq, position, head) + query_bytes<Type>(p, chunk * 8);
            request_query<Type>(p, shared_address(shared) + QUERIES_OFFSET + chunk / 8 * QUERY_SLAB_BYTES + place_in_slab(row, chunk % 8), from, exists);
        }
        end_copies();
    }
    __device__ void await_queries() const {
        wait_copies<0>();
        fence_copies();
        sync_some(1, COMPUTE_THREADS);
    }
    __device__ void clear() {
        const uint32 existing = rows_of(p, item);
#pragma unroll
        for (uint32 n = 0; n < VERIFY_CHANNELS / 2; n++) acc[n] = 0.0f;
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            m[i] = minus_infinity(), l[i] = 0.0f, first[i] = 0, count[i] = 0;
            if (row(i) < existing) rows.row(*this, i, place_of_row(p, item, first_row(p, item) + row(i)).position, first[i], count[i]);
        }
    }
    // Begins to multiply queries and keys: addresses in shared memory.
    template <bool ARE_BFLOAT16>
    __device__ static void begin_keys(Scores &c, uint32 queries_at, uint32 keys_at) {
        const uint64 queries = operand(queries_at), keys = operand(keys_at);
#pragma unroll
        for (uint32 n = 0; n < STAGE_TOKENS / 2; n++) c[n] = 0.0f;
        begin_products(c);
#pragma unroll
        for (uint32 n = 0; n < SLABS; n++) {
#pragma unroll
            for (uint32 k = 0; k < 4; k++)
                multiply<ARE_BFLOAT16>(c, queries + (n * QUERY_SLAB_BYTES >> 4) + k * ALONG_SLAB, keys + (n * SLAB_BYTES >> 4) + k * ALONG_SLAB, n + k > 0);
        }
        end_group();
    }
    template <bool ARE_BFLOAT16>
    __device__ static void multiply_keys(Scores &c, uint32 queries_at, uint32 keys_at) {
        begin_keys<ARE_BFLOAT16>(c, queries_at, keys_at);
        wait_products<0>(c);
    }
    // Tokens that a row does not see get the score −∞.
    __device__ void mask(Scores &c, uint32 stage) const {
        const uint32 *const is_whole = s.is_whole[stage];
        if (is_whole[0] && is_whole[1] && (STAGE_TILES == 2 || (is_whole[2] && is_whole[3]))) return;
        const uint32 hidden = rows.hidden(*this, stage);
#pragma unroll
        for (uint32 j = 0; j < STAGE_TOKENS / 8; j++) {
            const int2 tokens = tokens_of(stage, j);
#pragma unroll
            for (uint32 i = 0; i < 2; i++) {
                const uint32 n = j * 4 + i * 2;
                if (uint32(tokens.x - first[i]) >= count[i] || hidden >> n & 1) c[n] = minus_infinity();
                if (uint32(tokens.y - first[i]) >= count[i] || hidden >> n & 2) c[n + 1] = minus_infinity();
            }
        }
    }
    // What a product's difference from its row's maximum is multiplied by: s · log2 e = c · factor. Never zero: −∞ times zero would be NaN.
    __device__ float factor() const { return p.soft_cap != 0.0f ? LOG2_E : fmaxf(p.scale * LOG2_E, __int_as_float(1)); }
    // Caps and masks products, and raises the rows' maxima. Returns whether one grew: the sums so far are to be scaled by `keep` then.
    __device__ bool raise_maxima(Scores &c, uint32 stage, float (&keep)[2]) {
        if (p.soft_cap != 0.0f) {
            const float slope = p.scale / p.soft_cap;
#pragma unroll
            for (uint32 n = 0; n < STAGE_TOKENS / 2; n++) c[n] = p.soft_cap * tanh_fast(c[n] * slope);
        }
        mask(c, stage);
        float top[2];
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float other = c[i * 2 + 1];
            top[i] = c[i * 2];
#pragma unroll
            for (uint32 n = i * 2 + 4; n < STAGE_TOKENS / 2; n += 4) top[i] = fmaxf(top[i], c[n]), other = fmaxf(other, c[n + 1]);
            top[i] = fmaxf(top[i], other);
        }
#pragma unroll
        for (uint32 step = 1; step < 4; step *= 2) {
#pragma unroll
            for (uint32 i = 0; i < 2; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], step));
        }
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            top[i] = fmaxf(m[i], top[i] * factor());
            keep[i] = weight(m[i], top[i]);
        }
        const bool grew = __any_sync(FULL_WARP, top[0] != m[0] || top[1] != m[1]);
        m[0] = top[0], m[1] = top[1];
        return grew;
    }
    // Turns products into weights relative to the maxima.
    __device__ void weigh_scores(Scores &c, const float (&keep)[2]) {
        const float by = factor();
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            // A row that has seen nothing yet computes −∞ − 0 and not −∞ + ∞.
            const float shift = m[i] == minus_infinity() ? 0.0f : m[i] - LOG_UNIT;
            float sum = 0.0f;
#pragma unroll
            for (uint32 n = i * 2; n < STAGE_TOKENS / 2; n += 4) {
#pragma unroll
                for (uint32 e = n; e < n + 2; e++) {
                    c[e] = exp2_fast(fmaf(c[e], by, -shift));
                    sum += c[e];
                }
            }
            l[i] = l[i] * (m[i] == minus_infinity() ? 1.0f : keep[i]) + sum;
        }
    }
    __device__ void scale_sums(const float (&keep)[2]) {
#pragma unroll
        for (uint32 n = 0; n < VERIFY_CHANNELS / 2; n++) acc[n] *= keep[n / 2 % 2];
    }
    // Weights as the operand of a product: 16 tokens of each row, two in a word.
    template <typename ValueType>
    __device__ static void pack_weights(const Scores &c, uint32 (&weights)[STAGE_TOKENS / 16][4]) {
#pragma unroll
        for (uint32 k = 0; k < STAGE_TOKENS / 16; k++) {
#pragma unroll
            for (uint32 n = 0; n < 4; n++) weights[k][n] = ValueType::pack(c[k * 8 + n * 2], c[k * 8 + n * 2 + 1]);
        }
    }
    // Begins to add values times weights to the sums.
    template <bool ARE_BFLOAT16>
    __device__ void begin_values(const uint32 (&weights)[STAGE_TOKENS / 16][4], uint32 values_at) {
        const uint64 values = operand(values_at, SLAB_BYTES);
        begin_products(acc);
#pragma unroll
        for (uint32 k = 0; k < STAGE_TOKENS / 16; k++) multiply<ARE_BFLOAT16>(acc, weights[k], values + k * ALONG_ROWS);
        end_group();
    }
    template <typename ValueType, bool ARE_BFLOAT16>
    __device__ void add_values(const Scores &c, uint32 values_at) {
        uint32 weights[STAGE_TOKENS / 16][4];
        pack_weights<ValueType>(c, weights);
        begin_values<ARE_BFLOAT16>(weights, values_at);
        wait_products<0>(acc);
    }
    // Writes acc, m and l of every row to shared memory, for the join.
    __device__ void store_sums() {
        float *const to = reinterpret_cast<float *>(shared) + group * VERIFY_ROWS * ROW_PITCH;
        constexpr float UNIT = 1.0f / (1 << LOG_UNIT);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            l[i] += __shfl_xor_sync(FULL_WARP, l[i], 1);
            l[i] += __shfl_xor_sync(FULL_WARP, l[i], 2);
        }
        // The sums take the place of the ring once all stages are computed.
        sync_some(1, COMPUTE_THREADS);
#pragma unroll
        for (uint32 i = 0; i < 2; i++) {
            float *const to_row = to + row(i) * ROW_PITCH;
            if (lane % 4 == 0) *reinterpret_cast<float2 *>(to_row + VERIFY_CHANNELS) = float2{m[i], l[i] * UNIT};
#pragma unroll
            for (uint32 j = 0; j < VERIFY_CHANNELS / 8; j++)
                *reinterpret_cast<float2 *>(to_row + j * 8 + lane % 4 * 2) = float2{acc[j * 4 + i * 2] * UNIT, acc[j * 4 + i * 2 + 1] * UNIT};
        }
        sync_some(1, COMPUTE_THREADS);
    }
    // `taken`: as VerifyCopies::run has it.
    __device__ void run(uint32 taken = STAGES) {
        const uint32 count = stages();
        await_queries();
        clear();
        uint32 stage = group, turn = 0;
#pragma unroll 1
        for (uint32 n = group; n < count; n += GROUPS) {
            Scores c;
            // The other warpgroup had the stage's turn before, whose boxes may arrive after those of later stages. A barrier tells a turn from its neighbours alone, so that
            // this turn's is asked once that turn has been given up.
            if (turn) s.empty[stage].wait(turn - 1 + (stage >= taken));
            s.full[stage].wait(turn);
            fence_copies();
            const uint32 at = shared_address(shared) + stage * STAGE_BYTES;
            multiply_keys<IS_BFLOAT16>(c, shared_address(shared) + QUERIES_OFFSET, at);
            float keep[2];
            if (raise_maxima(c, stage, keep)) scale_sums(keep);
            weigh_scores(c, keep);
            add_values<Type, IS_BFLOAT16>(c, at + VALUES_OFFSET);
            arrive(s.empty[stage]);
            stage += GROUPS;
            if (stage >= STAGES) stage -= STAGES, turn++;
        }
        store_sums();
    }
};

// Prefetches lengths, entries and pages of the list that this CTA attends to if all lists are equally long.
__device__ inline void prefetch_likely_list(const AttentionParams &p, uint32 ctas) {
    constexpr uint32 ENTRIES = 128 / sizeof(int32);
    const uint32 lane = threadIdx.x % WARP, clusters = gridDim.x / ctas, n = min(blockIdx.x / ctas * p.work_items / clusters, p.work_items - 1);
    const WorkItem item = work_item_of(p, n);
    if (lane * ENTRIES < p.list_capacity) prefetch(p.ids.at(item.seq, item.position, item.head, lane * ENTRIES));
    if (p.table.data && lane * ENTRIES * p.page.value < p.token_capacity) prefetch(p.table.at(item.seq, lane * ENTRIES));
    if (lane == 0) prefetch(p.seq_lens.at(item.seq));
    if (lane == 1) prefetch(p.counts.at(item.seq, item.position, item.head));
}

struct InCluster {
    uint32 rank, ctas;
};

// What a CTA does first: it reads the parameters, opens the barriers and finds its share.
template <typename Parameters>
__device__ inline InCluster begin_verify(const Parameters &all, const AttentionParams &p, VerifyShared &s, uint32 (&words)[WARP], uint32 arrivals) {
    request_parameters(all, words);
    s.open(p, arrivals);
    const uint32 rank = cluster_rank(), ctas = cluster_ctas();
    allow_next_kernel();
    if (threadIdx.x < WARP && p.ids.data) prefetch_likely_list(p, ctas);
    wait_for_previous_kernel();
    if (threadIdx.x < WARP) {
        const uint32 number = blockIdx.x / ctas;
        const CtaShare found = share_of(p, number, gridDim.x / ctas);
        if (threadIdx.x == 0) s.cta_share = found;
    }
    __syncthreads();
    return {rank, ctas};
}

template <typename Type, bool IS_BFLOAT16, typename Rows>
__device__ inline void attention_verify128(const AttentionParams &p, const Boxes &boxes) {
    extern __shared__ __align__(1024) char shared[];
    __shared__ VerifyShared s;
    __shared__ uint32 words[WARP];
    if (threadIdx.x == COMPUTE_THREADS) boxes.prefetch();
    const auto [rank, ctas] = begin_verify(p, p, s, words, STAGE_TILES);
    const CtaShare &cta_share = s.cta_share;
    // A CTA without a share goes the same way: the cluster's other CTAs wait for what it sends.
    const WorkItem item = work_item_of(p, cta_share.item);
    const Reach reach = Rows::reach_of(p, item, Reach::of(p, item, cta_share.length, cta_share.queries));
    // The compiler sees that lanes of a warp go the same way.
    const uint32 warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0), group = warp / 4;
    const VerifyJob job{p, cta_share, item, reach, s, shared, shared + RECEIVED_OFFSET, threadIdx.x % WARP, warp % 4, rank, ctas};
    if (group == GROUPS) {
        give_registers<COPY_REGISTERS<Rows>>();
        VerifyCopies<Rows> copies{job, &boxes};
        cluster_started();
        if (job.warp < STAGE_TILES) copies.run([&](uint32 x) { return place_of(p, item, reach, cta_share.entries, x, listed(p, item, x)); });
        if (job.warp == 0) {
            if (cta_share.chunks > 1) job.chunk_counted();
            clear_counters(p, job.lane == 0 ? arrive_at_end(p) : 0);
        }
    } else {
        take_registers<Rows::REGISTERS>();
        VerifyProducts<Type, IS_BFLOAT16, Rows> products{job, group, Rows(job)};
        cluster_started();
        products.request_queries();
        products.run();
        VerifyJoin{job, threadIdx.x}.join<false>();
    }
}

