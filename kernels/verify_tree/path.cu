// Verification of draft trees by sampling, where children are tried in turn, rows are logits without filters, and clusters have room for them. The
// mathematics is that of sampled.cu; the bits are the same.
//
// Bytes: a row of the target, and one that children were drawn from, for each node of the path. Rows of other nodes are not read.
//
// Work split: a cluster of CTAs for each request. Each CTA takes every ctas-th segment of the two rows of a node, and keeps their weights in shared
// memory: a refusal reads these and nothing else. All CTAs walk the same way; what each sums goes to all of them. The CTA that has the segment
// of the last token writes the results.
//
//   node ─ load its rows ─ largest numbers ─ weights, sums ─ exchange ─ child ─ accepted: next node
//                                                            └ refused: difference of weights, sums ─ exchange ─ next child
//   segment of the last token ─ strip ─ token ─ cut ─ results
//
// On entry: 1 ≤ N ≤ MOST_NODES, M ≥ 1; 1 ≤ V, Vd ≤ MOST_PATH_SEGMENTS · SEGMENT; no CTA has more than MOST_CTA_PATH_SEGMENTS; no stop token is forbidden,
// nothing is filtered, and draft rows have no map; no output overlaps an input.
//
// targets: compute_90

#include "common/relaxed.cuh"
#include "verify_tree/tree.cuh"

constexpr uint32 TARGET = 0, DRAFT = 1;

// Set in a sum where there was something that is no number. Warps have one each, so that up to eight of them are added up.
constexpr uint32 NAN_BIT = 60;

// What a segment comes to: its largest number and the sum of its weights, or its lowest token with that number where the request is greedy.
struct PathShared {
    struct Parts {
        uint32 largest[2][DRAW_WARPS];  // keys, of target and draft
        uint64 sum[2][DRAW_WARPS];
    };
    DrawShared draw;
    Nodes nodes;
    float number[2][MOST_NODES];  // of a node's token in the rows of its parent
    uint16 path[MOST_NODES];
    uint64 random[2][DRAW_THREADS];  // numbers of the first children of a node, and of its draw; nodes take turns
    uint32 refused[MOST_NODES];
    Parts parts[3];  // taken in turn: one is written while slower warps read another
    // One half is written, by other CTAs, while slower warps read the other.
    SegmentSum rows[2][2][MOST_PATH_SEGMENTS];  // of target and draft
    SegmentSum rest[2][MOST_PATH_SEGMENTS];
};

// The sum over a warp, below 2^64.
__device__ inline uint64 wide_warp_sum(uint64 value) {
    const uint32 low = value & 0xffffff, middle = value >> 24 & 0xffffff, high = value >> 48;
    return __reduce_add_sync(FULL_WARP, low) + (uint64(__reduce_add_sync(FULL_WARP, middle)) << 24) +
           (uint64(__reduce_add_sync(FULL_WARP, high)) << 48);
}

// A row that was summed. Each warp sums it by itself; a lane has the segments with its number and with that plus 32.
struct PathRow {
    const SegmentSum *segments;
    uint32 count;
    RowSum sum;

    __device__ SegmentSum segment(uint32 s) const {
        if (s >= count) return {minus_infinity(), 0};
        return {segments[s].largest, segments[s].sum & ((1ull << NAN_BIT) - 1)};
    }
    __device__ bool saw_nan() const {
        bool found = false;
        for (uint32 s = threadIdx.x % WARP; s < count; s += WARP) found |= segments[s].sum >> NAN_BIT != 0;
        return __any_sync(FULL_WARP, found);
    }
    __device__ void add_up(const Scale &scale) {
        uint32 key = 0;
        for (uint32 s = threadIdx.x % WARP; s < count; s += WARP) key = max(key, key_of(segment(s).sum ? segments[s].largest : minus_infinity()));
        sum.largest = number_of(__reduce_max_sync(FULL_WARP, max(key, key_of(minus_infinity()))));
        uint64 share = 0;
        for (uint32 s = threadIdx.x % WARP; s < count; s += WARP) share += share_of(segment(s), scale, sum.largest);
        sum.total = wide_warp_sum(share);
    }
    __device__ double probability(float x, uint32 token, const Scale &scale) const {
        return probability_of(x, segment(token / SEGMENT), scale, sum);
    }
    __device__ float factor(uint32 s, const Scale &scale) const {
        const SegmentSum found = segment(s);
        return sum.total && found.sum ? __double2float_rn(factor_of(found, scale, sum)) : 0.0f;
    }
    // What a random number below 2^53 draws.
    __device__ Drawn draw(const Scale &scale, uint64 number) const {
        const uint64 at = target_of(number, sum.total);
        uint64 before = 0;
        for (uint32 base = 0;; base += WARP) {
            const SegmentSum mine = segment(base + threadIdx.x % WARP);
            const uint64 share = share_of(mine, scale, sum.largest), through = before + warp_sum_through(share);
            const uint32 beyond = __ballot_sync(FULL_WARP, at < through);
            if (beyond || base + WARP >= count) {
                const uint32 owner = beyond ? __ffs(beyond) - 1 : 0;
                uint64 target = 0;
                if (threadIdx.x % WARP == owner) target = target_inside(mine, scale, sum.largest, at - (through - share));
                target = __shfl_sync(FULL_WARP, target, owner);
                return {base + owner, __shfl_sync(FULL_WARP, mine.largest, owner), target};
            }
            before = __shfl_sync(FULL_WARP, through, WARP - 1);
        }
    }
};

// The walk of a request. All CTAs of its cluster take it.
struct PathWalk {
    const SampledTreeParams &p;
    PathShared &shared;
    float4 *weights;  // of the segments of this CTA, in dynamic shared memory
    const Tree &tree;
    const uint32 rank, ctas, segments;  // the last of either row
    uint32 own;                         // segments of this CTA
    uint32 status, places, node_turn, rest_turn;

    // What belongs to the node where the walk is.
    bool has_draft;
    PathRow target, draft, rest;
    float factors;  // lane 2k has that of the target's segment k of this CTA, lane 2k + 1 that of the draft's
    uint32 count;   // tokens that were refused
    double b, mass;
    bool has_rest;

    __device__ PathWalk(const SampledTreeParams &p, PathShared &shared, float4 *weights, const Tree &tree)
        : p(p), shared(shared), weights(weights), tree(tree), rank(cluster_rank()), ctas(cluster_ctas()),
          segments((max(p.sampling.tokens, p.sampling.draft_rows.data ? p.sampling.draft_tokens : 0) + SEGMENT - 1) / SEGMENT) {
        own = rank < segments ? (segments - rank - 1) / ctas + 1 : 0;
        status = places = node_turn = rest_turn = 0;
    }

    __device__ void run() {
        status = (shared.nodes.load(tree) ? BROKEN_LINK : 0) | (tree.given > int32(p.nodes) ? CLAMPED : 0);
        int64 next = -1;
        uint32 writer = 0;
        for (int32 node = tree.count > 0 ? 0 : NONE; node != NONE;) {
            if (threadIdx.x == 0) shared.path[places] = node;
            node = tree.is_greedy() ? follow(node, next) : try_children(node, next, writer);
        }
        __syncthreads();
        if (writer == rank) end(next);
    }

private:
    __device__ Source source(int32 node, uint32 of) const { return tree.source(of == DRAFT ? p.nodes + node : node, {}); }
    __device__ float4 &weight(uint32 k, uint32 of, uint32 h, uint32 half) const {
        return weights[(((k * 2 + of) * STRIPS + h) * 2 + half) * DRAW_THREADS + threadIdx.x];
    }
    __device__ void load_weights(uint32 k, uint32 of, uint32 h, float (&x)[STRIP]) const {
#pragma unroll
        for (uint32 half = 0; half < 2; ++half) {
            const float4 four = weight(k, of, h, half);
            x[4 * half] = four.x, x[4 * half + 1] = four.y, x[4 * half + 2] = four.z, x[4 * half + 3] = four.w;
        }
    }
    __device__ void store_weights(uint32 k, uint32 of, uint32 h, const float (&x)[STRIP]) const {
#pragma unroll
        for (uint32 half = 0; half < 2; ++half) weight(k, of, h, half) = {x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
    }
    __device__ int32 next_child(int32 node, int32 after) const {
        return shared.nodes.child(shared.draw, tree.count, node, after, [](int32) { return true; });
    }

    // Sends what the warps of this CTA have of segment k of a row to all CTAs. A warp does so.
    __device__ void send(const PathShared::Parts &part, uint32 of, uint32 k, SegmentSum *to, bool is_token) const {
        const uint32 lane = threadIdx.x % WARP;
        const float largest = number_of(__reduce_max_sync(FULL_WARP, part.largest[of][lane % DRAW_WARPS]));
        const uint64 mine = lane < DRAW_WARPS ? part.sum[of][lane] : is_token ? 0xffffffff : 0;
        uint64 sum;
        if (is_token) sum = __reduce_min_sync(FULL_WARP, uint32(mine)) | uint64(__any_sync(FULL_WARP, mine >> NAN_BIT != 0)) << NAN_BIT;
        else sum = wide_warp_sum(mine);
        uint32 *const there = reinterpret_cast<uint32 *>(to + rank + k * ctas);
        if (lane < ctas) {
            store_two_to(lane, there, {__float_as_uint(largest), 0});
            store_two_to(lane, there + 2, {uint32(sum), uint32(sum >> 32)});
        }
    }
    __device__ static void exchange() {
        __syncthreads();
        cluster_arrive();
        cluster_wait();
    }

    // Brings the rows of a node into the L2 cache, of which it has some already where the walk was expected to come here.
    __device__ void prefetch_rows(int32 node) const {
        const bool is_draft = threadIdx.x >= DRAW_THREADS / 2;
        if (is_draft && !p.sampling.draft_rows.data) return;
        const Source row = source(node, is_draft ? DRAFT : TARGET);
        for (uint32 k = 0; k < own; ++k) prefetch_lines(row.row, rank + k * ctas);
    }
    // Loads the rows of a node, sums them, and keeps their weights. `meanwhile` is done while they are loaded.
    template <typename Meanwhile> __device__ void sum_rows(const Source (&rows)[2], const Meanwhile &meanwhile) {
        const uint32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const bool is_greedy = tree.is_greedy();
        node_turn ^= 1;
        SegmentSum(&to)[2][MOST_PATH_SEGMENTS] = shared.rows[node_turn];
#pragma unroll 1
        for (uint32 k = 0; k < own; ++k) {
            const uint32 s = rank + k * ctas;
            PathShared::Parts &part = shared.parts[k % 3];
            StoredNumbers stored[2];
            stored[TARGET].load(rows[TARGET].row, s, false);
            if (has_draft) stored[DRAFT].load(rows[DRAFT].row, s, false);
            if (k == 0) meanwhile();
            Numbers numbers[2];
            bool nan[2] = {};
#pragma unroll
            for (uint32 of = 0; of < 2; ++of) {
                if (of == DRAFT && !has_draft) continue;
                stored[of].widen(rows[of].row.type, numbers[of].x);
                float best = minus_infinity();
#pragma unroll
                for (uint32 h = 0; h < STRIPS; ++h)
#pragma unroll
                    for (uint32 e = 0; e < STRIP; ++e) best = larger_or_nan(best, numbers[of].x[h][e]);
                nan[of] = __any_sync(FULL_WARP, best != best);
                if (nan[of]) best = numbers[of].largest();
                const uint32 key = __reduce_max_sync(FULL_WARP, key_of(best));
                if (lane == 0) part.largest[of][warp] = key;
            }
            __syncthreads();
            if (k && warp < (has_draft ? 2 : 1)) send(shared.parts[(k - 1) % 3], warp, k - 1, to[warp], is_greedy);
#pragma unroll
            for (uint32 of = 0; of < 2; ++of) {
                if (of == DRAFT && !has_draft) continue;
                const float largest = number_of(__reduce_max_sync(FULL_WARP, part.largest[of][lane % DRAW_WARPS]));
                uint64 sum = 0;
                if (is_greedy) {
                    uint32 first = 0xffffffff;
#pragma unroll
                    for (uint32 h = STRIPS; h-- > 0;)
#pragma unroll
                        for (uint32 e = STRIP; e-- > 0;)
                            if (numbers[of].x[h][e] == largest) first = s * SEGMENT + Numbers::place(h) + e;
                    sum = __reduce_min_sync(FULL_WARP, first);
                } else {
                    const Scale scale = {false, rows[of].scale.c};
#pragma unroll
                    for (uint32 h = 0; h < STRIPS; ++h) {
                        if (scale.has_powers(largest)) scale.weigh_powers(numbers[of].x[h], largest, minus_infinity());
                        else scale.weigh(numbers[of].x[h], largest);
                        if (!(largest > minus_infinity())) {
#pragma unroll
                            for (uint32 e = 0; e < STRIP; ++e) numbers[of].x[h][e] = 0.0f;
                        }
                        store_weights(k, of, h, numbers[of].x[h]);
                        sum += Scale::in_integers(numbers[of].x[h]);
                    }
                    sum = warp_sum(sum);
                }
                if (lane == 0) part.sum[of][warp] = sum | uint64(nan[of]) << NAN_BIT;
            }
        }
        __syncthreads();
        if (own && warp < (has_draft ? 2 : 1)) send(shared.parts[(own - 1) % 3], warp, own - 1, to[warp], is_greedy);
        exchange();
        target = {to[TARGET], segments, {}}, draft = {to[DRAFT], segments, {}};
    }

    // The factor that this lane has of the node's rows.
    __device__ float factor(const Scale &of_target, const Scale &of_draft) const {
        const uint32 lane = threadIdx.x % WARP, s = rank + lane / 2 * ctas;
        if (lane >= 2 * own) return 0.0f;
        if (lane % 2 == TARGET) return target.factor(s, of_target);
        return has_draft ? draft.factor(s, of_draft) : 0.0f;
    }

    // Weights max(p − b·q, 0) of segment k of this CTA.
    __device__ void load_rest(uint32 k, Numbers &numbers) const {
        const float of_target = __shfl_sync(FULL_WARP, factors, 2 * k + TARGET), of_draft = __shfl_sync(FULL_WARP, factors, 2 * k + DRAFT);
        const float times = __double2float_rn(b);
#pragma unroll
        for (uint32 h = 0; h < STRIPS; ++h) {
            float off[STRIP] = {};
            load_weights(k, TARGET, h, numbers.x[h]);
            if (has_draft) load_weights(k, DRAFT, h, off);
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e)
                numbers.x[h][e] = fmaxf(__fsub_rn(__fmul_rn(numbers.x[h][e], of_target), __fmul_rn(times, __fmul_rn(off[e], of_draft))), 0.0f);
        }
    }
    // Makes the weight of a token in a row 0, if this CTA has it.
    __device__ void take_out(uint32 token, uint32 of) const {
        const uint32 s = token / SEGMENT, strip = token % SEGMENT / STRIP;
        if (s % ctas != rank || strip % DRAW_THREADS != threadIdx.x) return;
        reinterpret_cast<float *>(&weight(s / ctas, of, strip / DRAW_THREADS, token % STRIP / 4))[token % 4] = 0.0f;
    }

    // Goes on to the next token; false if no token has more of p than of what is taken off.
    __device__ bool refuse(int32 child, const Source (&rows)[2]) {
        const uint32 token = shared.nodes.token[child], lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        if (threadIdx.x == 0) shared.refused[count] = token;
        ++count;
        take_out(token, TARGET);
        if (has_draft) {
            b = __dadd_rn(b, mass);
            if (p.rule == DISTINCT && token < p.sampling.draft_tokens) {
                b = __dmul_rn(b, forget(token, shared.number[DRAFT][child], rows[DRAFT]));
                factors = factor(rows[TARGET].scale, rows[DRAFT].scale);
            }
        }
        const Scale scale = Scale::of(true, 1.0f);
        SegmentSum *const to = shared.rest[rest_turn ^= 1];
#pragma unroll 1
        for (uint32 k = 0; k < own; ++k) {
            PathShared::Parts &part = shared.parts[k % 3];
            Numbers numbers;
            load_rest(k, numbers);
            const uint32 key = __reduce_max_sync(FULL_WARP, key_of(numbers.largest()));
            if (lane == 0) part.largest[0][warp] = key;
            __syncthreads();
            if (k && warp == 0) send(shared.parts[(k - 1) % 3], 0, k - 1, to, false);
            const float largest = number_of(__reduce_max_sync(FULL_WARP, part.largest[0][lane % DRAW_WARPS]));
            uint64 sum = 0;
            if (largest > 0.0f) sum = warp_sum(numbers.sum(0, scale, largest) + numbers.sum(1, scale, largest));
            if (lane == 0) part.sum[0][warp] = sum;
        }
        __syncthreads();
        if (own && warp == 0) send(shared.parts[(own - 1) % 3], 0, own - 1, to, false);
        exchange();
        rest = {to, segments, {}};
        rest.add_up(scale);
        mass = __dmul_rn(double(rest.sum.largest), __ddiv_rn(double(rest.sum.total), double(ONE)));
        return has_rest = rest.sum.total != 0;
    }

    // Takes a token, whose number is x, out of the draft's row; what part of the row is left. Each CTA does so with its own copy of the sums.
    __device__ double forget(uint32 token, float x, const Source &row) {
        const uint32 s = token / SEGMENT;
        SegmentSum left = draft.segment(s);
        __syncthreads();
        if (x < left.largest) {
            // The weights of other tokens stay as they are: a strip loses one.
            AnyStrip stored;
            const uint32 first = token / STRIP * STRIP;
            stored.load(row.row, first, false);
            float numbers[STRIP];
            stored.widen(row.row.type, numbers);
            row.clean(first, numbers);
            for (uint32 n = 0; n + 1 < count; ++n) leave_out(shared.refused[n] - first, numbers);
            const uint64 before = row.scale.sum(numbers, left.largest);
            leave_out(token - first, numbers);
            left.sum -= before - row.scale.sum(numbers, left.largest);
        } else {
            Numbers numbers;
            row.load(s, numbers);
            for (uint32 n = 0; n < count; ++n)
                if (shared.refused[n] / SEGMENT == s) numbers.set(shared.refused[n] % SEGMENT, minus_infinity());
            left = sum_segment(shared.draw, numbers, row.scale);
            if (s % ctas == rank) {
#pragma unroll
                for (uint32 h = 0; h < STRIPS; ++h) {
                    if (left.sum) row.scale.weigh(numbers.x[h], left.largest);
#pragma unroll
                    for (uint32 e = 0; e < STRIP; ++e) numbers.x[h][e] = left.sum ? numbers.x[h][e] : 0.0f;
                    store_weights(s / ctas, DRAFT, h, numbers.x[h]);
                }
            }
        }
        if (threadIdx.x == 0) shared.rows[node_turn][DRAFT][s] = left;
        __syncthreads();
        const RowSum whole = draft.sum;
        draft.add_up(row.scale);
        if (draft.sum.total == 0) return 0.0;
        return __ddiv_rn(__dmul_rn(double(draft.sum.total), double(row.scale.weight(draft.sum.largest, whole.largest))), double(whole.total));
    }
    __device__ static void leave_out(uint32 at, float (&x)[STRIP]) {
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e)
            if (at == e) x[e] = minus_infinity();
    }

    // Notes what a node's row of the target says of it; whether it has a token.
    __device__ bool arrive() {
        ++places;
        uint32 key = 0;
        for (uint32 s = threadIdx.x % WARP; s < segments; s += WARP) key = max(key, key_of(target.segments[s].largest));
        target.sum.largest = number_of(__reduce_max_sync(FULL_WARP, key));
        if (target.saw_nan()) status |= SAW_NAN;
        const bool has_token = target.sum.largest > minus_infinity();
        if (!has_token) status |= NODE_WITHOUT_TOKEN;
        return has_token;
    }

    // The lowest child of a node with the token that the node's row gives.
    __device__ int32 follow(int32 node, int64 &token) {
        const Source rows[2] = {source(node, TARGET), source(node, TARGET)};
        has_draft = false;
        prefetch_rows(node);
        sum_rows(rows, [] {});
        token = -1;
        if (!arrive()) return NONE;
        uint32 first = 0xffffffff;
        for (uint32 s = threadIdx.x % WARP; s < segments; s += WARP)
            if (target.segments[s].largest == target.sum.largest) first = min(first, uint32(target.segments[s].sum));
        const int32 found = __reduce_min_sync(FULL_WARP, first);
        token = found;
        if (places >= p.places) return NONE;
        return shared.nodes.child(shared.draw, tree.count, node, node, [&](int32 c) { return shared.nodes.token[c] == found; });
    }

    __device__ int32 try_children(int32 node, int64 &token, uint32 &writer) {
        const SamplingParams &sampling = p.sampling;
        const uint32 depth = places;
        prefetch_rows(node);
        int32 next = places + 1 < p.places ? next_child(node, node) : NONE;
        has_draft = sampling.draft_rows.data && next != NONE;
        const Source rows[2] = {source(node, TARGET), source(node, has_draft ? DRAFT : TARGET)};
        const uint32 t = threadIdx.x;
        constexpr uint32 LAST = DRAW_THREADS - 1;
        sum_rows(rows, [&] {
            // Threads of nodes that a tree has, and the last one.
            if (t == LAST) shared.random[node_turn][t] = sampling.number(tree.request, depth, DRAW, 0);
            else if (int32(t) < tree.count) shared.random[node_turn][t] = sampling.number(tree.request, depth, ACCEPT, t);
            if (next == NONE) return;
            for (int32 c = next + int32(threadIdx.x); c < tree.count; c += DRAW_THREADS) {
                const int32 drafted = shared.nodes.token[c];
                if (shared.nodes.parent[c] != node || drafted < 0) continue;
                shared.number[TARGET][c] = rows[TARGET].number(drafted);
                if (has_draft && uint32(drafted) < sampling.draft_tokens) shared.number[DRAFT][c] = rows[DRAFT].number(drafted);
            }
        });
        if (next != NONE) prefetch_rows(next);
        token = -1, writer = 0;
        if (!arrive()) return NONE;
        const Scale scale = rows[TARGET].scale;
        target.add_up(scale);
        if (has_draft) draft.add_up(rows[DRAFT].scale);
        factors = factor(scale, rows[DRAFT].scale);
        count = 0, b = 0.0, mass = 1.0, has_rest = false;
        for (uint32 rank_of_child = 0; next != NONE; ++rank_of_child) {
            const int32 drafted = shared.nodes.token[next];
            if (drafted >= 0) {
                if (has_draft && draft.saw_nan()) status |= SAW_NAN;
                const bool is_known = rank_of_child < LAST;
                const uint64 number = is_known ? shared.random[node_turn][rank_of_child] : sampling.number(tree.request, depth, ACCEPT, rank_of_child);
                if (accepts_child(next, number, scale, rows[DRAFT].scale)) return next;
                if (!refuse(next, rows)) {
                    status |= NO_RESIDUAL;
                    break;
                }
            }
            next = next_child(node, next);
            if (next != NONE) prefetch_rows(next);
        }
        const uint64 number = shared.random[node_turn][LAST];
        const Scale drawn_by = has_rest ? Scale::of(true, 1.0f) : scale;
        PathRow from = target;
        if (has_rest) from = rest;
        const Drawn drawn = from.draw(drawn_by, number);
        writer = drawn.segment % ctas;
        if (writer == rank) token = draw_from(rows[TARGET], drawn_by, drawn);
        return NONE;
    }
    __device__ bool accepts_child(int32 child, uint64 number, const Scale &scale, const Scale &of_draft) const {
        const uint32 token = shared.nodes.token[child];
        for (uint32 n = 0; n < count; ++n)
            if (shared.refused[n] == token) return false;
        double q = 1.0;
        if (has_draft) q = token < p.sampling.draft_tokens ? draft.probability(shared.number[DRAFT][child], token, of_draft) : 0.0;
        return accepts(number, target.probability(shared.number[TARGET][child], token, scale), q, b, mass);
    }
    // Loads segments of what is drawn from.
    struct Remaining {
        const PathWalk &walk;
        const Source &target;

        __device__ void load(uint32 s, Numbers &numbers) const {
            if (walk.has_rest) walk.load_rest(s / walk.ctas, numbers);
            else target.load(s, numbers);
        }
    };
    __device__ uint32 draw_from(const Source &row, const Scale &scale, const Drawn &drawn) const {
        return draw_inside(shared.draw, Remaining{*this, row}, scale, drawn.segment, drawn.largest, drawn.target);
    }

    // Writes the results.
    __device__ void end(int64 next) const {
        const uint32 i = tree.request;
        for (uint32 j = threadIdx.x; j < p.places; j += DRAW_THREADS) {
            as<int32>(p.path.at(i, j)) = j < places ? int32(shared.path[j]) : -1;
            const int64 token = j + 1 < places ? int64(shared.nodes.token[shared.path[j + 1]]) : j + 1 == places ? next : -1;
            if (p.committed) store_integer(p.committed.at(i, j), p.token_bytes, token);
        }
        end_sampled_walk(p, i, places, next, status);
    }
};

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1) verify_tree_path(const __grid_constant__ SampledTreeParams p) {
    extern __shared__ float4 path_weights[];
    __shared__ PathShared shared;
    allow_next_kernel();
    cluster_start();
    wait_for_previous_kernel();
    const Tree tree(p, p.sampling.first + blockIdx.x / cluster_ctas());
    PathWalk walk(p, shared, path_weights, tree);
    cluster_started();
    walk.run();
}
