// What ends a request whose tree was walked.
#pragma once

#include "verify_tree/params.cuh"

template <typename Token>
__device__ inline void end_walk(const VerifyTreeParams &, const NoEnd &, uint32, bool) {}

// Cuts what a walk commits, once the CTA has written it. t_j is the token of the node after path[j], and the last t the next token,
// which `always_next` says is there whatever it is. Params: VerifyTreeParams or SampledTreeParams.
template <typename Token, typename Params>
__device__ inline void end_walk(const Params &p, const EndParams &ends, uint32 seq, bool always_next) {
    __shared__ uint32 stop;
    if (threadIdx.x == 0) stop = NEVER;
    __syncthreads();
    End end;
    SomeStops<> stops;
    end.load(ends, seq);
    stops.load(ends, seq, 0);
    const uint32 k = as<int32>(p.accepted.at(seq));
    const Token next = as<Token>(p.next_token.at(seq));
    // A tree without nodes commits nothing; a node without a logit has no token.
    const uint32 n = as<int32>(p.path.at(seq, 0)) < 0 ? 0 : k + (always_next || next >= 0);
    for (uint32 j = threadIdx.x; j < n; j += blockDim.x) {
        const Token token[1] = {j < k ? as<Token>(p.tokens.at(seq, as<int32>(p.path.at(seq, j + 1)))) : next};
        if (j >= end.first_to_stop() && stop_bits(ends, seq, stops, token)) atomicMin(&stop, j);
    }
    __syncthreads();
    const Cut cut = end.cut(k, n, stop);
    const uint32 nodes = end.remaining > 0 ? cut.accepted + 1 : 0;
    for (uint32 j = threadIdx.x; j <= k; j += blockDim.x) {
        if (j >= nodes) as<int32>(p.path.at(seq, j)) = -1;
        if (p.committed && j >= cut.committed) as<Token>(p.committed.at(seq, j)) = -1;
    }
    if (threadIdx.x > 0) return;
    as<int32>(p.accepted.at(seq)) = cut.accepted;
    if (cut.committed <= k) as<Token>(p.next_token.at(seq)) = -1;
    write_end(ends, seq, cut);
}
