// Stop tokens that come too early: nodes whose depth is below min_remaining do not give them.
#pragma once

#include "verify_tree/params.cuh"

// The depth of a node, or `most` where that is less. A link that names no lower node ends the way to the root.
__device__ inline uint32 depth_of(const View<2> &parents, uint32 request, int32 node, uint32 most) {
    uint32 depth = 0;
    for (; node > 0 && depth < most; ++depth) {
        const int32 parent = as<int32>(parents.at(request, node));
        node = parent < node ? parent : -1;
    }
    return depth;
}

// The stop tokens of a request, and where they come too early.
struct EarlyStops {
    const EndParams &p;
    uint32 request;
    uint32 least;  // depth from which on nodes give them; 0 where none is too early

    __device__ EarlyStops(const EndParams &p, uint32 request) : p(p), request(request), least(0) {
        if (!p.stops || !p.min_remaining) return;
        End end;
        end.load(p, request);
        if (!end.ignores) least = max(end.least, 0);
    }
    // What a node of this depth cannot give.
    __device__ Forbidden at(uint32 depth) const {
        return {{p.stop.at(request), {p.stop.step[1]}}, depth < least ? p.stops : 0, p.stop_bytes};
    }
};
