// Verification of draft trees by sampling, where children are tried in turn, rows are logits without filters, and clusters have room for them. The
// mathematics is that of sampled.cu; the bits are the same.
//
// Bytes: a row of the target, and one that children were drawn from, for each node of the path. Rows of other nodes are not read.
//
// Work split: a cluster of CTAs for each request. Each CTA takes every ctas-th segment of the two rows of a node. A thread has a strip of eight tokens of
// each; it keeps their weights in registers, or in shared memory where a CTA has more than two segments, and a refusal reads these and nothing else.
// What each CTA sums goes to all of them, together with its arrival (st.async). The first warp of each CTA awaits it and says what is next: in all CTAs
// it says the same. The CTA that has the segment of the last token writes the results.
//
//   node ─ load its rows ─ largest numbers ─ weights, sums ─ exchange ─ child ─ accepted: next node
//                                                            └ refused: difference of weights, sums ─ exchange ─ next child
//   segment of the last token ─ strip ─ token ─ cut ─ results
//
// On entry: 1 ≤ N ≤ MOST_NODES, M ≥ 1; 1 ≤ V, Vd ≤ MOST_PATH_SEGMENTS · SEGMENT; no CTA has more than MOST_CTA_PATH_SEGMENTS;
// a CTA that has more than two has dynamic shared memory for the weights of its rows; no stop token is forbidden, nothing is filtered, and draft rows have no
// map; no output overlaps an input.
//
// targets: compute_90

#include "common/relaxed.cuh"
#include "verify_tree/path.cuh"

extern __shared__ float4 path_weights[];

// The walk of a request. All CTAs of its cluster take it.
struct PathWalk {
    // Segments that a thread has in registers. If the CTA has more, dynamic shared memory keeps them, and they are taken by pairs.
    static constexpr uint32 PAIR = 2;
    const SampledTreeParams &p;
    PathShared &shared;
    const Tree &tree;
    const uint32 rank, ctas, segments;  // the last of either row
    const Scale scale;
    uint32 own;                         // segments of this CTA
    uint32 places, sends;  // nodes and rounds so far

    // What belongs to the node where the walk is.
    int32 node;
    bool has_draft;
    float weights[PAIR][2][STRIP];  // of a greedy request, numbers
    // What the first warp knows of it, which lies in shared memory between its decisions.
    PathRow target, draft, rest;
    uint32 status, children, tried, count;  // count: tokens that were refused
    double b, mass, value;                  // value: a lane's probability or factor
    bool has_rest;

    __device__ PathWalk(const SampledTreeParams &p, PathShared &shared, const Tree &tree)
        : p(p), shared(shared), tree(tree), rank(cluster_rank()), ctas(cluster_ctas()),
          segments((max(p.sampling.tokens, p.sampling.draft_rows.data ? p.sampling.draft_tokens : 0) + SEGMENT - 1) / SEGMENT),
          scale(Scale::of(false, tree.temperature)) {
        own = rank < segments ? (segments - rank - 1) / ctas + 1 : 0;
        places = sends = 0;
    }

    __device__ void run() {
        const uint32 found = (shared.nodes.load<PATH_THREADS>(tree) ? BROKEN_LINK : 0) | (tree.given > int32(p.nodes) ? CLAMPED : 0);
        if (threadIdx.x == 0) shared.state.status = found;
        if (threadIdx.x == 0) shared.step.kind = PathStep::END, shared.step.token = uint32(-1);
        for (node = tree.count > 0 ? 0 : NONE; node != NONE;) {
            if (threadIdx.x == 0) shared.path[places] = node;
            node = visit();
        }
        __syncthreads();
        const PathStep &last = shared.step;
        const bool is_drawn = last.kind == PathStep::DRAW;
        if (rank == (is_drawn ? last.drawn.segment % ctas : 0)) end(int32(is_drawn ? shared.token : last.token));
    }

private:
    __device__ static uint32 warp() { return threadIdx.x / WARP; }
    __device__ static uint32 lane() { return threadIdx.x % WARP; }
    __device__ static uint32 place(uint32 s) { return s * SEGMENT + threadIdx.x * STRIP; }
    // The row of a node, or that its children were drawn from.
    __device__ Row row(int32 node, uint32 of) const {
        const SamplingParams &s = p.sampling;
        if (of == DRAFT) return {s.draft_rows.at(tree.request, node), s.draft_rows.step[2], s.draft_tokens, s.draft_type, s.draft_adjacent != 0};
        return {s.target.at(tree.request, node), s.target.step[2], s.tokens, s.target_type, s.target_adjacent != 0};
    }
    // Loads the broken strips of the node's rows in segments k and k + 1.
    __device__ void load_broken(uint32 k) {
#pragma unroll 1
        for (uint32 n = 0; n < 2 * PAIR; ++n) {
            const uint32 of = n % 2, first = place(rank + (k + n / 2) * ctas);
            if (k + n / 2 >= own || of >= rows_of_node()) continue;
            const Row row = this->row(node, of);
            if (!is_broken(row, first)) continue;
#pragma unroll 1
            for (uint32 e = 0; e < STRIP; ++e) {
                const float x = number_at(row, first + e);
#pragma unroll
                for (uint32 m = 0; m < 2 * PAIR; ++m)
                    if (m == n) set_number(e, x, weights[m / 2][m % 2]);
            }
        }
    }
    // Weights of strip n of a thread in shared memory: of two segments, target and draft.
    __device__ static float4 &parked(uint32 k, uint32 n) {
        return path_weights[(k * 4 + n) * PATH_THREADS + threadIdx.x];
    }
    __device__ void park(uint32 k) const {
        if (own > PAIR) {
#pragma unroll
            for (uint32 n = 0; n < 4 * PAIR; ++n) {
                const float *x = weights[n / 4][n / 2 % 2] + n % 2 * 4;
                parked(k, n) = {x[0], x[1], x[2], x[3]};
            }
        }
    }
    __device__ void fetch(uint32 k) {
        if (own > PAIR) {
#pragma unroll
            for (uint32 n = 0; n < 4 * PAIR; ++n) {
                const float4 four = parked(k, n);
                float *x = weights[n / 4][n / 2 % 2] + n % 2 * 4;
                x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
            }
        }
    }
    __device__ PathSum (&rows_turn() const)[2][MOST_PATH_SEGMENTS] { return shared.rows[places % 2]; }
    __device__ uint32 rows_of_node() const { return has_draft ? 2 : 1; }

    // The first child of a node, and how many there are. The first warp notes them.
    __device__ int32 find_children(uint32 &found_all) const {
        int32 first = NONE;
        found_all = 0;
#pragma unroll 1
        for (int32 base = node + 1; base < tree.count; base += WARP) {
            const int32 c = base + int32(lane());
            const bool is_child = c < tree.count && shared.nodes.parent[c] == node;
            const uint32 found = __ballot_sync(FULL_WARP, is_child);
            if (found && first == NONE) first = base + __ffs(found) - 1;
            if (warp() == 0 && is_child) shared.children[found_all + __popc(found & ((1u << lane()) - 1))] = c;
            found_all += __popc(found);
        }
        return first;
    }
    // Brings the rows of a node into the L2 cache, a line a thread.
    __device__ void prefetch_rows(int32 node) const {
        constexpr uint32 LINE = 128;
        const uint32 rows = p.sampling.draft_rows.data ? 2 : 1;
#pragma unroll 1
        for (uint32 of = 0; of < rows; ++of) {
            const Row row = this->row(node, of);
            const uint32 bytes = row.type == FLOAT32 ? 4 : 2, lines = SEGMENT * bytes / LINE;
            if (!row.is_adjacent) continue;
#pragma unroll 1
            for (uint32 n = threadIdx.x; n < own * lines; n += PATH_THREADS) {
                const uint32 token = (rank + n / lines * ctas) * SEGMENT + n % lines * LINE / bytes;
                if (token < row.tokens) prefetch(row.data + uint64(token) * bytes);
            }
        }
    }

    // --- rounds: what the CTAs have summed of one or two rows goes to all of them ---

    // Called by all warps after a barrier; each sends what those of this CTA have of one segment of a row. `is_token`: the lowest one counts.
    __device__ void send(uint32 rows, PathSum *to, bool is_token) {
        const uint32 turn = sends++ % 2;
        const uint32 of = warp() % rows, k = warp() / rows;
        const Barrier &arrived = shared.arrived[turn];
        if (threadIdx.x == 0) arrived.expect(rows * segments * sizeof(PathSum));
        if (k >= own) return;
        const float largest = number_of(__reduce_max_sync(FULL_WARP, shared.largest[of][k][lane() % PATH_WARPS]));
        const uint64 mine = lane() < PATH_WARPS ? shared.sum[of][k][lane()] : is_token ? 0xffffffff : 0;
        const bool saw_nan = __any_sync(FULL_WARP, shared.saw_nan[of][k][lane() % PATH_WARPS]);
        const uint64 sum = is_token ? __reduce_min_sync(FULL_WARP, uint32(mine)) : warp_sum(mine);
        if (lane() < ctas)
            send_four(lane(), to + of * MOST_PATH_SEGMENTS + rank + k * ctas, {__float_as_uint(largest), saw_nan, uint32(sum), uint32(sum >> 32)}, arrived);
    }
    // Called by the first warp, which alone reads what arrives.
    __device__ void receive() const { shared.arrived[(sends - 1) % 2].wait((sends - 1) / 2); }

    // --- what all warps do ---

    template <uint32 OF> __device__ void request_row(uint32 k) {
        const Row row = this->row(node, OF);
#pragma unroll
        for (uint32 n = 0; n < PAIR; ++n)
            if (k + n < own) request_strip(row, place(rank + (k + n) * ctas), weights[n][OF]);
    }
    // Sums the rows of a node, of which the first two segments were requested.
    __device__ void sum_rows() {
        const bool is_greedy = tree.is_greedy();
#pragma unroll 1
        for (uint32 k = 0; k < own; k += PAIR) {
            if (k) {
                request_row<TARGET>(k);
                if (has_draft) request_row<DRAFT>(k);
            }
#pragma unroll
            for (uint32 n = 0; n < PAIR; ++n) {
                if (k + n >= own) continue;
                widen_strip(row(node, TARGET), place(rank + (k + n) * ctas), weights[n][TARGET]);
                if (has_draft) widen_strip(row(node, DRAFT), place(rank + (k + n) * ctas), weights[n][DRAFT]);
            }
            load_broken(k);
#pragma unroll
            for (uint32 n = 0; n < PAIR; ++n) {
                if (k + n >= own) continue;
#pragma unroll
                for (uint32 of = 0; of < 2; ++of) {
                    if (of == DRAFT && !has_draft) continue;
                    const float(&x)[STRIP] = weights[n][of];
                    float best = minus_infinity();
#pragma unroll
                    for (uint32 e = 0; e < STRIP; ++e) best = larger_or_nan(best, x[e]);
                    const bool saw_nan = __any_sync(FULL_WARP, best != best);
                    if (saw_nan) best = largest_of_strip(x);
                    const uint32 key = __reduce_max_sync(FULL_WARP, key_of(best));
                    if (lane() == 0) shared.largest[of][k + n][warp()] = key, shared.saw_nan[of][k + n][warp()] = saw_nan;
                }
            }
            park(k);
        }
        __syncthreads();
#pragma unroll 1
        for (uint32 k = 0; k < own; k += PAIR) {
            fetch(k);
#pragma unroll
            for (uint32 n = 0; n < PAIR; ++n) {
                if (k + n >= own) continue;
#pragma unroll
                for (uint32 of = 0; of < 2; ++of) {
                    if (of == DRAFT && !has_draft) continue;
                    float(&x)[STRIP] = weights[n][of];
                    const float largest = number_of(__reduce_max_sync(FULL_WARP, shared.largest[of][k + n][lane() % PATH_WARPS]));
                    uint64 sum = 0;
                    if (is_greedy) {
                        uint32 first = 0xffffffff;
#pragma unroll
                        for (uint32 e = STRIP; e-- > 0;)
                            if (x[e] == largest) first = place(rank + (k + n) * ctas) + e;
                        sum = __reduce_min_sync(FULL_WARP, first);
                    } else {
                        weigh(largest, x);
                        sum = warp_sum(Scale::in_integers(x));
                    }
                    if (lane() == 0) shared.sum[of][k + n][warp()] = sum;
                }
            }
            park(k);
        }
        __syncthreads();
        send(rows_of_node(), &rows_turn()[0][0], is_greedy);
    }
    // Weights of a strip of a segment with this largest number; NaN has none.
    __device__ void weigh(float largest, float (&x)[STRIP]) const {
        if (scale.has_powers(largest)) scale.weigh_powers(x, largest, minus_infinity());
        else scale.weigh(x, largest);
        if (!(largest > minus_infinity())) {
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) x[e] = 0.0f;
        }
    }

    // Weights max(p − b·q, 0) of this thread's strip of a segment, whose weights are in registers.
    __device__ void find_rest(uint32 k, const float (&of_row)[STRIP], const float (&of_draft_row)[STRIP], const PathStep &step, float (&x)[STRIP]) const {
        const float of_target = step.factors[2 * k + TARGET], of_draft = step.factors[2 * k + DRAFT], times = step.times;
#pragma unroll
        for (uint32 e = 0; e < STRIP; ++e) {
            x[e] = __fmul_rn(of_row[e], of_target);
            if (has_draft) x[e] = fmaxf(__fsub_rn(x[e], __fmul_rn(times, __fmul_rn(of_draft_row[e], of_draft))), 0.0f);
        }
    }
    // Sums what a refusal leaves.
    __device__ void sum_rest(const PathStep &step) {
        const uint32 s = step.token / SEGMENT, at = step.token % SEGMENT;
        const Scale scale = Scale::of(true, 1.0f);
        float x[PAIR][STRIP];
#pragma unroll 1
        for (uint32 k = 0; k < own; k += PAIR) {
            fetch(k);
#pragma unroll
            for (uint32 n = 0; n < PAIR; ++n) {
                if (k + n >= own) continue;
                if (s == rank + (k + n) * ctas && at / STRIP == threadIdx.x) set_number(at % STRIP, 0.0f, weights[n][TARGET]);
                find_rest(k + n, weights[n][TARGET], weights[n][DRAFT], step, x[n]);
                const uint32 key = __reduce_max_sync(FULL_WARP, key_of(largest_of_strip(x[n])));
                if (lane() == 0) shared.largest[0][k + n][warp()] = key;
            }
            park(k);
        }
        __syncthreads();
#pragma unroll 1
        for (uint32 k = 0; k < own; k += PAIR) {
            fetch(k);
#pragma unroll
            for (uint32 n = 0; n < PAIR; ++n) {
                if (k + n >= own) continue;
                if (own > PAIR) find_rest(k + n, weights[n][TARGET], weights[n][DRAFT], step, x[n]);
                const float largest = number_of(__reduce_max_sync(FULL_WARP, shared.largest[0][k + n][lane() % PATH_WARPS]));
                const uint64 sum = largest > 0.0f ? warp_sum(scale.sum(x[n], largest)) : 0;
                if (lane() == 0) shared.sum[0][k + n][warp()] = sum;
            }
        }
        __syncthreads();
        send(1, shared.rest[sends % 2], false);
    }
    // Sums the draft's segment of a token anew, without the tokens that were refused. Each CTA does so with its own copy of the sums.
    __device__ void sum_anew(const PathStep &step) {
        const uint32 s = step.token / SEGMENT, first = place(s);
        float x[STRIP];
        load_strip(row(node, DRAFT), first, x);
#pragma unroll 1
        for (uint32 n = 0; n < step.count; ++n) set_number(shared.refused[n] - first, minus_infinity(), x);
        const uint32 key = __reduce_max_sync(FULL_WARP, key_of(largest_of_strip(x)));
        if (lane() == 0) shared.largest[DRAFT][0][warp()] = key;
        __syncthreads();
        const float largest = number_of(__reduce_max_sync(FULL_WARP, shared.largest[DRAFT][0][lane() % PATH_WARPS]));
        weigh(largest, x);
        const uint64 sum = warp_sum(Scale::in_integers(x));
        if (lane() == 0) shared.sum[DRAFT][0][warp()] = sum;
#pragma unroll 1
        for (uint32 k = 0; k < own; k += PAIR) {
            if (s % ctas != rank || s / ctas / PAIR * PAIR != k) continue;
            fetch(k);
#pragma unroll
            for (uint32 n = 0; n < PAIR; ++n) {
                if (s / ctas != k + n) continue;
#pragma unroll
                for (uint32 e = 0; e < STRIP; ++e) weights[n][DRAFT][e] = x[e];
            }
            park(k);
        }
        __syncthreads();
    }

    // Leaves the token, which a segment of this CTA has, in `shared`.
    __device__ void draw_inside(const PathStep &step) {
        const uint32 s = step.drawn.segment, first = place(s);
        float w[STRIP] = {};
        if (step.has_rest) {
#pragma unroll 1
            for (uint32 k = 0; k < own; k += PAIR) {
                if (s / ctas / PAIR * PAIR != k) continue;
                fetch(k);
#pragma unroll
                for (uint32 n = 0; n < PAIR; ++n)
                    if (s / ctas == k + n) find_rest(k + n, weights[n][TARGET], weights[n][DRAFT], step, w);
            }
            Scale::of(true, 1.0f).weigh(w, step.drawn.largest);
        } else {
            load_strip(row(node, TARGET), first, w);
            weigh(step.drawn.largest, w);
        }
        const uint64 sum = Scale::in_integers(w), through = warp_sum_through(sum);
        if (threadIdx.x == 0) shared.token = s * SEGMENT;
        if (lane() == WARP - 1) shared.sum[0][0][warp()] = through;
        __syncthreads();
        const uint64 before = warp_sum(lane() < warp() ? shared.sum[0][0][lane()] : 0) + through - sum, target = step.drawn.target;
        if (before <= target && target < before + sum) {
            uint32 some = 0;
#pragma unroll
            for (uint32 e = 0; e < STRIP; ++e) some |= uint32(w[e] > 0.0f) << e;
            shared.token = first + pick_weight(w, some, target - before);
        }
    }

    // Takes the walk through `node`; the next one, or NONE.
    __device__ int32 visit() {
        const SamplingParams &sampling = p.sampling;
        const bool is_greedy = tree.is_greedy();
        const uint32 depth = places++, t = threadIdx.x;
        int32 first = NONE;
        request_row<TARGET>(0);
        uint32 children = 0;
        if (places < p.places) first = find_children(children);
        has_draft = !is_greedy && sampling.draft_rows.data && first != NONE;
        if (has_draft) request_row<DRAFT>(0);
        if (t == 0) shared.state.children = children;
        if (!is_greedy) {
#pragma unroll 1
            for (int32 c = t; c < tree.count; c += PATH_THREADS) {
                const int32 drafted = shared.nodes.token[c];
                if (c < first || shared.nodes.parent[c] != node || drafted < 0) continue;
                const float x = number_of_token(row(node, TARGET), drafted);
                const bool has_column = has_draft && uint32(drafted) < sampling.draft_tokens;
                const float off = has_column ? number_of_token(row(node, DRAFT), drafted) : 0.0f;
                shared.number[TARGET][c] = x, shared.number[DRAFT][c] = off;
            }
            if (t == LAST) shared.random[t] = sampling.number(tree.request, depth, DRAW, 0);
            else if (t < children) shared.random[t] = sampling.number(tree.request, depth, ACCEPT, t);
            if (first != NONE) prefetch_rows(first);
        }
        sum_rows();
        for (After after = After::ROWS;;) {
            if (warp() == 0) decide(after);
            __syncthreads();
            const PathStep &step = shared.step;
            switch (step.kind) {
            case PathStep::ACCEPT: return step.child;
            case PathStep::END: return NONE;
            case PathStep::DRAW:
                if (step.drawn.segment % ctas == rank) draw_inside(step);
                return NONE;
            case PathStep::ANEW:
                sum_anew(step);
                after = After::ANEW;
                break;
            default:
                if (step.child != NONE) prefetch_rows(step.child);
                sum_rest(step);
                after = After::REST;
            }
        }
    }

    // --- what the first warp does: it says what is next ---

    __device__ void say(uint32 kind, int32 child, uint32 token) const {
        __syncwarp();
        if (lane() != 0) return;
        shared.step.kind = kind, shared.step.child = child, shared.step.token = token;
        shared.step.count = count, shared.step.has_rest = has_rest, shared.step.times = __double2float_rn(b);
    }

    // Notes what the rows of a node say of it; whether children are to be tried.
    __device__ bool take_rows() {
        const bool saw_nan = target.load(rows_turn()[TARGET], segments);
        const bool draft_saw_nan = draft.load(rows_turn()[DRAFT], has_draft ? segments : 0);
        count = tried = 0, b = 0.0, mass = 1.0, has_rest = false;
        target.find_largest(), draft.find_largest();
        const uint32 nan = __ballot_sync(FULL_WARP, saw_nan), draft_nan = __ballot_sync(FULL_WARP, draft_saw_nan);
        if (nan || (draft_nan && has_tokens())) status |= SAW_NAN;
        if (!(target.sum.largest > minus_infinity())) {
            status |= NODE_WITHOUT_TOKEN;
            say(PathStep::END, NONE, uint32(-1));
            return false;
        }
        if (tree.is_greedy()) {
            follow();
            return false;
        }
        if (target.sum.largest < infinity() && draft.sum.largest < infinity() && (!has_draft || draft.sum.largest > minus_infinity())) {
            weigh_rows();
        } else {
            target.add_up(scale), draft.add_up(scale);
            find_values();
        }
        return true;
    }
    // Goes on to the lowest child of the node with the token that its row gives.
    __device__ void follow() const {
        uint32 first = 0xffffffff;
#pragma unroll
        for (uint32 n = 0; n < target.EACH; ++n)
            if (target.mine[n].largest == target.sum.largest) first = min(first, uint32(target.mine[n].sum));
        const int32 found = __reduce_min_sync(FULL_WARP, first);
        uint32 child = NONE;
#pragma unroll 1
        for (uint32 n = lane(); n < children; n += WARP)
            if (shared.nodes.token[shared.children[n]] == found) child = min(child, uint32(shared.children[n]));
        child = __reduce_min_sync(FULL_WARP, child);
        say(child == NONE ? PathStep::END : PathStep::ACCEPT, child, found);
    }
    // Whether a child has a token of the vocabulary.
    __device__ bool has_tokens() const {
        bool found = false;
#pragma unroll 1
        for (uint32 n = lane(); n < children; n += WARP) found |= shared.nodes.token[shared.children[n]] >= 0;
        return __any_sync(FULL_WARP, found);
    }

    // A lane's value is the factor of a segment of this CTA, or the probability of a child's token: of the target where the lane is even, else of the draft.
    struct Value {
        bool is_there, is_token;
        SegmentSum segment;  // the one whose factor it is, or in which the token lies
        float x;             // the token's number
        double none;         // what stands for one that is not there
    };
    __device__ Value value_of(uint32 of, uint32 s, bool is_token, uint32 child) const {
        Value found = {false, is_token, {minus_infinity(), 0}, minus_infinity(), is_token && of == DRAFT && !has_draft ? 1.0 : 0.0};
        if (s >= segments || (of == DRAFT && !has_draft)) return found;
        const PathSum &segment = rows_turn()[of][s];
        found.segment = {segment.largest, segment.sum};
        found.is_there = segment.sum != 0;
        if (is_token) found.x = shared.number[of][child];
        return found;
    }
    __device__ Value value_of_child(uint32 of, uint32 n) const {
        const uint32 child = n < children ? shared.children[n] : 0;
        const int32 token = shared.nodes.token[child];
        const bool is_there = n < children && token >= 0 && (of == TARGET || uint32(token) < p.sampling.draft_tokens);
        return value_of(of, is_there ? token / SEGMENT : segments, true, child);
    }
    __device__ Value value_of_lane() const {
        const uint32 of = lane() % 2, n = lane() / 2;
        if (n >= MOST_CTA_PATH_SEGMENTS) return value_of_child(of, n - MOST_CTA_PATH_SEGMENTS);
        return value_of(of, n < own ? rank + n * ctas : segments, false, 0);
    }
    // `inside`: the token's weight in its segment; `weight`: that of the segment's largest number in the row.
    __device__ static double divide(const Value &found, float inside, float weight, uint64 total) {
        if (!found.is_there || total == 0) return found.none;
        const double w = __dmul_rn(double(found.is_token ? inside : 1.0f), double(weight));
        return __ddiv_rn(__dmul_rn(w, double(ONE)), double(total));
    }
    __device__ double find_value(uint32 of, const Value &found) const {
        const float largest = of == DRAFT ? draft.sum.largest : target.sum.largest;
        const uint64 total = of == DRAFT ? draft.sum.total : target.sum.total;
        return divide(found, scale.weight(found.x, found.segment.largest), scale.weight(found.segment.largest, largest), total);
    }
    __device__ void find_values() { value = find_value(lane() % 2, value_of_lane()); }
    // Adds up both rows, and finds the values. Largest numbers are numbers, so that all weights are powers: they are found together.
    __device__ void weigh_rows() {
        constexpr uint32 EACH = PathRow::EACH, INSIDE = 2 * EACH, OF_SEGMENT = INSIDE + 1;
        const bool is_draft = lane() % 2 == DRAFT;
        const Value found = value_of_lane();
        float x[STRIP] = {};
#pragma unroll
        for (uint32 n = 0; n < EACH; ++n) {
            x[n] = __fsub_rn(target.mine[n].largest, target.sum.largest);
            x[EACH + n] = __fsub_rn(draft.mine[n].largest, draft.sum.largest);
        }
        x[INSIDE] = __fsub_rn(found.x, found.segment.largest);
        x[OF_SEGMENT] = __fsub_rn(found.segment.largest, is_draft ? draft.sum.largest : target.sum.largest);
        scale.weigh_powers(x, 0.0f, minus_infinity());
        target.add_up_weighed(x), draft.add_up_weighed(x + EACH);
        value = divide(found, x[INSIDE], x[OF_SEGMENT], is_draft ? draft.sum.total : target.sum.total);
    }
    // p or q of a child.
    __device__ double probability(uint32 of, uint32 n) const {
        if (n < CHILDREN_AT_ONCE) return __shfl_sync(FULL_WARP, value, FIRST_CHILD_LANE + 2 * n + of);
        return find_value(of, value_of_child(of, n));
    }
    __device__ bool is_refused(uint32 token) const {
        bool found = false;
#pragma unroll 1
        for (uint32 n = lane(); n < count; n += WARP) found |= shared.refused[n] == token;
        return __any_sync(FULL_WARP, found);
    }

    // Takes what has arrived or was summed, and tries children until one is accepted or refused, or none is left.
    __device__ void decide(After after) {
        recall();
        choose(after);
        keep();
    }
    __device__ void choose(After after) {
        uint32 token = shared.step.token;
        SegmentSum left;
        if (after == After::ANEW) {
            left = summed_anew();
        } else {
            receive();
            if (after == After::ROWS) {
                if (!take_rows()) return;
            } else if (!take_rest()) {
                status |= NO_RESIDUAL;
                return draw();
            }
            if (!try_children(token)) return;
            if (has_draft) b = __dadd_rn(b, mass);
            if (!has_draft || p.rule != DISTINCT || token >= p.sampling.draft_tokens) return refuse(token);
            const PathSum &whole = rows_turn()[DRAFT][token / SEGMENT];
            if (!(shared.number[DRAFT][shared.children[tried]] < whole.largest)) return say(PathStep::ANEW, NONE, token);
            left = {whole.largest, whole.sum - strip_loses(token, whole.largest)};
        }
        forget(token, left);
        refuse(token);
    }
    // Tries children until one is accepted, or none is left; otherwise the token of one that is refused.
    __device__ bool try_children(uint32 &token) {
#pragma unroll 1
        for (; tried < children; ++tried) {
            const int32 child = shared.children[tried];
            token = shared.nodes.token[child];
            if (int32(token) < 0) continue;
            const uint64 number = tried < LAST ? shared.random[tried] : p.sampling.number(tree.request, places - 1, ACCEPT, tried);
            const double of_target = probability(TARGET, tried), of_draft = probability(DRAFT, tried);
            // At first b is 0 and Z is 1.
            const bool is_accepted = count ? !is_refused(token) && accepts(number, of_target, of_draft, b, mass)
                                           : __dmul_rn(unit(number), of_draft) < of_target;
            if (is_accepted) {
                say(PathStep::ACCEPT, child, token);
                return false;
            }
            __syncwarp();
            if (lane() == 0) shared.refused[count] = token;
            ++count;
            __syncwarp();
            return true;
        }
        draw();
        return false;
    }
    __device__ void refuse(uint32 token) {
        ++tried;
        if (lane() < FIRST_CHILD_LANE) shared.step.factors[lane()] = __double2float_rn(value);
        say(PathStep::REFUSE, tried < children ? shared.children[tried] : NONE, token);
    }
    // The walk ends: a token is drawn from what is left.
    __device__ void draw() {
        PathRow from;
        from.load(has_rest ? shared.rest[(sends - 1) % 2] : rows_turn()[TARGET], segments);
        from.sum = has_rest ? rest.sum : target.sum;
        const Drawn drawn = from.draw(has_rest ? Scale::of(true, 1.0f) : scale, shared.random[LAST]);
        if (lane() == 0) shared.step.drawn = drawn;
        say(PathStep::DRAW, NONE, 0);
    }
    // Takes what a refusal has left; false if no token has more of p than of what is taken off.
    __device__ bool take_rest() {
        rest.load(shared.rest[(sends - 1) % 2], segments);
        rest.find_largest();
        rest.add_up(Scale::of(true, 1.0f));
        mass = __dmul_rn(double(rest.sum.largest), __ddiv_rn(double(rest.sum.total), double(ONE)));
        return has_rest = rest.sum.total != 0;
    }

    __device__ void recall() {
        const PathState &from = shared.state;
        target.sum = from.target, draft.sum = from.draft, rest.sum = from.rest;
        status = from.status, children = from.children, tried = from.tried, count = from.count, has_rest = from.has_rest, b = from.b, mass = from.mass, value = from.values[lane()];
    }
    __device__ void keep() const {
        PathState &to = shared.state;
        __syncwarp();
        to.values[lane()] = value;
        if (lane() == 0) {
            to.target = target.sum, to.draft = draft.sum, to.rest = rest.sum;
            to.status = status, to.tried = tried, to.count = count, to.has_rest = has_rest, to.b = b, to.mass = mass;
        }
        __syncwarp();
    }

    // What the draft's strip of a token loses with it. The weights of other tokens stay as they are.
    __device__ uint64 strip_loses(uint32 token, float largest) const {
        const uint32 first = token / STRIP * STRIP;
        float x[STRIP];
        load_strip(row(node, DRAFT), first, x);
#pragma unroll 1
        for (uint32 n = 0; n + 1 < count; ++n) set_number(shared.refused[n] - first, minus_infinity(), x);
        weigh(largest, x);
        const uint64 before = Scale::in_integers(x);
        set_number(token - first, 0.0f, x);
        return before - Scale::in_integers(x);
    }
    // Takes a token out of the draft's row, whose segment then has this left.
    __device__ void forget(uint32 token, const SegmentSum &left) {
        __syncwarp();
        if (lane() == 0) rows_turn()[DRAFT][token / SEGMENT] = {left.largest, 0, left.sum};
        __syncwarp();
        const RowSum whole = draft.sum;
        draft.load(rows_turn()[DRAFT], segments);
        draft.find_largest();
        draft.add_up(scale);
        const double part = scale.weight(draft.sum.largest, whole.largest);
        b = __dmul_rn(b, draft.sum.total ? __ddiv_rn(__dmul_rn(double(draft.sum.total), part), double(whole.total)) : 0.0);
        find_values();
    }
    // What all warps have summed anew.
    __device__ SegmentSum summed_anew() const {
        const float largest = number_of(__reduce_max_sync(FULL_WARP, shared.largest[DRAFT][0][lane() % PATH_WARPS]));
        return {largest, warp_sum(lane() < PATH_WARPS ? shared.sum[DRAFT][0][lane()] : 0)};
    }

    // Writes the results.
    __device__ void end(int64 next) const {
        const uint32 i = tree.request;
        for (uint32 j = threadIdx.x; j < p.places; j += PATH_THREADS) {
            as<int32>(p.path.at(i, j)) = j < places ? int32(shared.path[j]) : -1;
            const int64 token = j + 1 < places ? int64(shared.nodes.token[shared.path[j + 1]]) : j + 1 == places ? next : -1;
            if (p.committed) store_integer(p.committed.at(i, j), p.token_bytes, token);
        }
        end_sampled_walk(p, i, places, next, shared.state.status);
    }
};

extern "C" __global__ void __launch_bounds__(PATH_THREADS, 1) verify_tree_path(const __grid_constant__ SampledTreeParams p) {
    __shared__ PathShared shared;
    allow_next_kernel();
    if (threadIdx.x == 0) shared.arrived[0].open(1), shared.arrived[1].open(1);
    __syncwarp();
    cluster_start();
    wait_for_previous_kernel();
    const Tree tree(p, p.sampling.first + blockIdx.x / cluster_ctas());
    PathWalk walk(p, shared, tree);
    cluster_started();
    walk.run();
}
