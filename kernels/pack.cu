// Packing accepted rows of several tensors.
//
//   offsets[i] = Σ_{i' < i} k[i'] · packed[offsets[i] + j] = rows[i, j] for j < k[i], offsets[i] + j < cap
//
// Bytes: every accepted row read once and written once; floor = 2 · bytes / copy bandwidth.
//
// Cut: no CTA waits for another. A warp takes a tile of the input, adds up the counts of the sequences before it (B ints out of L1 and L2)
// and copies what was accepted. One more CTA writes the offsets. The first CTAs request their tiles before they know the counts, which
// the kernel before may still be computing.
//
//   first CTAs: request tile ─ accepted[] ─ sum before ─ store tile
//   others:     accepted[] ─┬─ request tile ─┬─ store tile              last CTA: accepted[] ─ sums ─ write offsets
//                           └─ sum before ───┘
//
// Beyond MAX_SUMMED_BATCH sequences, pack_offsets writes the offsets and pack_large reads them.
//
// On entry: B·γ < 2^31; tiles of a layout < 2^31; no output overlaps an input; the rows were written before the kernel before began.
//
// targets: compute_80, compute_90

#include "pack.cuh"

constexpr uint32 OFFSETS_PER_CTA = 1024;

struct Accepted {
    const PackParams &p;
    __device__ uint32 operator()(uint32 seq) const { return min(max(at<int32>(p.accepted, seq * p.accepted_seq), 0), int32(p.gamma)); }
};

template <typename Offsets>
__device__ inline void pack_rows(const PackParams &p, uint32 ctas, const Offsets &offsets) {
    if (blockIdx.x >= p.early_ctas) {
        wait_for_previous_kernel();
        copy_rows(p, ctas, 0, offsets);
        return;
    }
    const Lane early(p, p.layout[0], 0, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
    uint4 held[SLOTS];
    early.load(p.gamma, held);
    wait_for_previous_kernel();
    store_tile(p, early, offsets, held);
    copy_rows(p, ctas, 1, offsets);
}

extern "C" __global__ void __launch_bounds__(256, 4) pack(const __grid_constant__ PackParams p) {
    if (blockIdx.x < gridDim.x - 1) {
        pack_rows(p, gridDim.x - 1, SummedOffsets{Accepted{p}});
    } else {
        wait_for_previous_kernel();
        write_offsets(p, Accepted{p}, 0, p.batch, 0);
    }
}

// Offsets of any batch: CTA c owns OFFSETS_PER_CTA sequences and adds up all before them itself.
extern "C" __global__ void __launch_bounds__(256, 4) pack_offsets(const __grid_constant__ PackParams p) {
    allow_next_kernel();
    __shared__ uint32 before;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    wait_for_previous_kernel();
    const uint32 first = blockIdx.x * OFFSETS_PER_CTA;
    uint32 sum = 0;
    for (uint32 i = threadIdx.x; i < first; i += blockDim.x) sum += Accepted{p}(i);
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (threadIdx.x % WARP == 0) atomicAdd(&before, sum);
    __syncthreads();
    write_offsets(p, Accepted{p}, first, min(first + OFFSETS_PER_CTA, p.batch), before);
}

struct WrittenOffsets {
    const PackParams &p;
    __device__ uint32 count(const Lane &lane) const { return lane.end ? Accepted{p}(lane.seq) : 0; }
    __device__ uint32 offset(const Lane &lane) const {
        return p.offsets_bytes == 8 ? at<int64>(p.offsets, lane.seq * p.offsets_seq) : at<int32>(p.offsets, lane.seq * p.offsets_seq);
    }
};

extern "C" __global__ void __launch_bounds__(256, 4) pack_large(const __grid_constant__ PackParams p) {
    pack_rows(p, gridDim.x, WrittenOffsets{p});
}
