// Records of segments for many rows of sampled requests (variant streamed): segment_stream.cuh has the work of a warp, sample.cu what follows.
//
// targets: compute_90

#include "common/segment_stream.cuh"
#include "sample/turn.cuh"

template <bool ANY> __device__ inline void stream_rows(const SampleParams &p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Barrier arrived[STREAM_STAGES * STREAM_WARPS];
    const SamplingParams &sampling = p.sampling;
    SegmentStream stream(sampling, shared, arrived);
    wait_for_previous_kernel();
    allow_next_kernel();  // which reads arguments before it waits: they are final now
    stream.run([&](uint32 n, uint32 first, uint32 past) {
        const uint32 i = sampling.per_request.divide(n), slot = n - i * sampling.per_request.value;
        const Turn turn(p, sampling.first + i);
        if (!turn.needs(p, slot)) return;
        bool is_there;
        const Source source = turn.source(p, slot, is_there);
        if (is_there) stream.record<ANY>({source, n, turn.is_greedy(), p.logprobs && slot <= p.gamma}, first, past);
    });
}

extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) sample_segments_streamed(const __grid_constant__ SampleParams p) {
    stream_rows<false>(p);
}
extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) sample_segments_streamed_any(const __grid_constant__ SampleParams p) {
    stream_rows<true>(p);
}
