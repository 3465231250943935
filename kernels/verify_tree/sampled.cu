// Verification of draft trees by sampling. src/ops/verify_tree/mod.rs has the walk, src/ops/draw the mathematics of draws and of draft tokens
// that are tried in turn.
//
// Bytes: the N·V logits of each tree are read once, and Vd for each node that has children and was drawn from a row. What follows reads from
// the L2 cache: a segment for each draw, the groups of tokens that a filter may keep, and a row of target and draft for each child that is refused.
//
// Where children are tried in turn, rows are many and nothing is filtered, path.cu does all in one launch.
//
// Work split: as in sample/. verify_tree_segments has a CTA for some segments of each node's row, and of the row that its children were
// drawn from. verify_tree_rows has a CTA for each of these rows; a coupled or greedy row gives its token there. The last CTA of a request
// walks its tree, unless children are tried in turn: that does verify_tree_walk, with a cluster of CTAs for each request (one CTA where there are no
// clusters). All CTAs of a cluster walk the same way, share the segments of the two rows that a refusal reads, and exchange what they have summed.
//
//   verify_tree_segments   load 32 numbers a thread ─ largest of the CTA ─ weights, sums ─ record
//   verify_tree_rows       records ─ [filters] ─ sum of the row ─ [token] ─ record
//                          └ last of a request, greedy or coupled: node ─ token ─ child ─ …
//   verify_tree_walk       node ─ child ─ [refused: segments of this CTA ─ exchange ─ next child …] ─ child of the child …
//                          └ first of a cluster: [token] ─ cut ─ results
//
// Rows of nodes are taken without the stop tokens that min_remaining forbids at their depth (early.cuh).
//
// On entry: 1 ≤ N ≤ MOST_NODES, M ≥ 1; 1 ≤ V, Vd ≤ 2^20; a counter of each request is 0; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "verify_tree/tree.cuh"

template <bool ANY> __device__ inline void record_nodes(const SampledTreeParams &p) {
    __shared__ SegmentShared shared;
    wait_for_previous_kernel();
    allow_next_kernel();
    const SamplingParams &sampling = p.sampling;
    const uint32 n = sampling.per_row_ctas.divide(blockIdx.x), cta = blockIdx.x - n * sampling.per_row_ctas.value;
    const uint32 i = sampling.per_request.divide(n), slot = n - i * sampling.per_request.value;
    const Tree tree(p, sampling.first + i);
    if (tree.needs(slot)) record_segments<ANY>(shared, tree.source(slot, tree.early.at(tree.depth(slot, 0))), n, cta, tree.is_greedy(), false);
}

extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, SEGMENT_CTAS) verify_tree_segments(const __grid_constant__ SampledTreeParams p) {
    record_nodes<false>(p);
}
extern "C" __global__ void __launch_bounds__(SEGMENT_THREADS, ANY_SEGMENT_CTAS) verify_tree_segments_any(const __grid_constant__ SampledTreeParams p) {
    record_nodes<true>(p);
}

// The walk through a tree, and what it finds. `writes`: this CTA writes it.
struct Walk {
    const SampledTreeParams &p;
    DrawShared &shared;
    Nodes &nodes;
    const Tree &tree;
    const RowRecord *rows;  // of the request
    bool writes;
    uint32 status;

    // The lowest child of a node with the token that the node's row gives.
    __device__ int64 follow(int32 node, bool may_go_on, int32 &child) const {
        const int64 token = rows[node].token;
        if (may_go_on) child = nodes.child(shared, tree.count, node, node, [&](int32 c) { return nodes.token[c] == token; });
        return token;
    }

    // decide(node, depth, may_go_on, child) gives the token of a node at this depth, and the child that the walk goes on to, if any.
    template <typename Decide> __device__ void run(const Decide &decide) {
        const uint32 i = tree.request;
        status = (nodes.load(tree) ? BROKEN_LINK : 0) | (tree.given > int32(p.nodes) ? CLAMPED : 0);
        uint32 places = 0;  // that are written
        int64 next = -1;
        for (int32 node = tree.count > 0 ? 0 : NONE; node != NONE;) {
            const uint32 of_row = rows[node].status;
            status |= of_row & ~NO_TOKEN;
            int64 token = -1;
            int32 child = NONE;
            if (of_row & NO_TOKEN) status |= NODE_WITHOUT_TOKEN;
            else token = decide(node, places, places + 1 < p.places, child);
            if (writes && threadIdx.x == 0) {
                as<int32>(p.path.at(i, places)) = node;
                if (p.committed) store_integer(p.committed.at(i, places), p.token_bytes, token);
            }
            ++places;
            next = token;
            node = child;
        }
        if (writes) end(places, next);
    }

private:
    __device__ void end(uint32 places, int64 next) const {
        const uint32 i = tree.request;
        for (uint32 j = places + threadIdx.x; j < p.places; j += DRAW_THREADS) {
            as<int32>(p.path.at(i, j)) = -1;
            if (p.committed) store_integer(p.committed.at(i, j), p.token_bytes, -1);
        }
        end_sampled_walk(p, i, places, next, status);
    }
};

struct RowsShared {
    DrawShared draw;
    union {
        FilterShared filter;
        Nodes nodes;
    };
};

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 2) verify_tree_rows(const __grid_constant__ SampledTreeParams p) {
    __shared__ RowsShared shared;
    allow_next_kernel();
    wait_for_previous_kernel();
    const SamplingParams &sampling = p.sampling;
    const uint32 n = blockIdx.x, i = sampling.per_request.divide(n), rows = sampling.per_request.value, slot = n - i * rows;
    const Tree tree(p, sampling.first + i);
    if (tree.needs(slot)) {
        const bool draws = p.rule == COUPLED && !tree.is_greedy();
        // The position of a node follows from its depth.
        const uint32 depth = tree.depth(slot, draws ? MOST_NODES : 0);
        Source source = tree.source(slot, tree.early.at(depth));
        const uint64 number = draws ? sampling.number(tree.request, depth, DRAW, 0) : 0;
        const RowRecord found = decide_row<true>(shared.draw, &shared.filter, source, n, tree.is_greedy(), false, draws, number);
        if (threadIdx.x == 0) sampling.rows[n] = found;
    }
    if (p.rule != COUPLED || !is_last_of_request(shared.draw, sampling.counters[i], rows)) return;
    Walk walk = {p, shared.draw, shared.nodes, tree, sampling.rows + (n - slot), true, 0};
    walk.run([&](int32 node, uint32, bool may_go_on, int32 &child) { return walk.follow(node, may_go_on, child); });
}

// --- children that are tried in turn ----------------------------------------------------------------------------------------------

struct WalkShared {
    DrawShared draw;
    Nodes nodes;
    ClusterShared cluster;
    uint32 refused[MOST_NODES];
    SegmentFactors factors[MOST_SEGMENTS];
    SegmentRecord draft[MOST_SEGMENTS];  // of the node's draft row, from which tokens are taken
    float taken[SEGMENT];                // of a Trial
};

// The walk of a request whose children are tried in turn. All CTAs of its cluster take it.
struct Trials {
    const SampledTreeParams &p;
    WalkShared &shared;
    const Tree &tree;
    SegmentRecord *segments;  // of the request
    const RowRecord *rows;
    Walk walk;
    Cluster cluster;

    __device__ Trials(const SampledTreeParams &p, WalkShared &shared, const Tree &tree, SegmentRecord *segments, const RowRecord *rows)
        : p(p), shared(shared), tree(tree), segments(segments), rows(rows), walk{p, shared.draw, shared.nodes, tree, rows, cluster_rank() == 0, 0},
          cluster(shared.cluster) {}

    __device__ void run() {
        walk.run([&](int32 node, uint32 depth, bool may_go_on, int32 &child) {
            return tree.is_greedy() ? walk.follow(node, may_go_on, child) : try_children(node, depth, may_go_on, child);
        });
    }

private:
    __device__ SummedRow row(uint32 slot, const Forbidden &forbidden) const {
        return {tree.source(slot, forbidden), segments + uint64(slot) * p.sampling.per_row.value, rows[slot]};
    }
    __device__ int32 next_child(int32 node, int32 after) const {
        return shared.nodes.child(shared.draw, tree.count, node, after, [](int32) { return true; });
    }
    // The row that a node's children were drawn from. Each CTA keeps its own records of it.
    __device__ SummedRow draft_row(int32 node) const {
        SummedRow draft = row(p.nodes + node, {});
        for (uint32 s = threadIdx.x; s < draft.source.segments(); s += DRAW_THREADS) shared.draft[s] = draft.records[s];
        draft.records = shared.draft;
        __syncthreads();
        return draft;
    }

    __device__ int64 try_children(int32 node, uint32 depth, bool may_go_on, int32 &child) {
        const SamplingParams &sampling = p.sampling;
        const SummedRow target = row(node, tree.early.at(depth));
        int32 next = may_go_on ? next_child(node, node) : NONE;
        const bool reads_draft = sampling.draft_rows.data && next != NONE;
        // Without a row of drafts any row stands for it; one from which nothing is forbidden takes fewer registers.
        Trial<true> trial(shared.draw, shared.taken, shared.factors, target, reads_draft ? draft_row(node) : row(node, {}), reads_draft,
                          shared.refused);
        for (uint32 rank = 0; next != NONE; ++rank) {
            const int32 token = shared.nodes.token[next];
            if (token >= 0) {
                if (reads_draft) walk.status |= rows[p.nodes + node].status & SAW_NAN;
                if (trial.accepts_token(token, sampling.number(tree.request, depth, ACCEPT, rank))) {
                    child = next;
                    return token;
                }
                if (!trial.refuse(cluster, token, p.rule == DISTINCT)) {
                    walk.status |= NO_RESIDUAL;
                    break;
                }
            }
            next = next_child(node, next);
        }
        return walk.writes ? int64(trial.draw_rest(sampling.number(tree.request, depth, DRAW, 0))) : -1;
    }
};

extern "C" __global__ void __launch_bounds__(DRAW_THREADS, 1) verify_tree_walk(const __grid_constant__ SampledTreeParams p) {
    __shared__ WalkShared shared;
    allow_next_kernel();
    cluster_start();
    wait_for_previous_kernel();
    const SamplingParams &sampling = p.sampling;
    const uint32 i = blockIdx.x / cluster_ctas(), first = i * sampling.per_request.value;
    const Tree tree(p, sampling.first + i);
    Trials trials(p, shared, tree, sampling.segments + uint64(first) * sampling.per_row.value, sampling.rows + first);
    cluster_started();
    trials.run();
}
