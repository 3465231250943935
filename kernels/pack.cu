// Packing accepted rows of several tensors.
//
//   offsets[i] = Σ_{i' < i} k[i'] · packed[offsets[i] + j] = rows[i, j] for j < k[i], offsets[i] + j < cap
//
// Bytes: every accepted row read once and written once; floor = 2 · bytes / copy bandwidth.
//
// Cut: no CTA waits for another. A warp takes a tile of the input, a CTA adds up the counts of the sequences before (B ints out of L2), and
// what was accepted is copied. One more CTA writes the offsets. The first CTAs request their tiles before they know the counts, which the
// kernel before may still be computing.
//
//   first CTAs: request tile ─ accepted[] ─ sum before ─ store tile
//   others:     accepted[] ─ sum before ─ request tile ─ store tile              last CTA: accepted[] ─ sums ─ write offsets
//
// Beyond MAX_SUMMED_BATCH sequences, pack_offsets writes the offsets and pack_large reads them.
//
// On entry: B·γ < 2^31; tiles < 2^31; no output overlaps an input; the rows were written before the kernel before began.
//
// targets: compute_80, compute_90

#include "pack.cuh"

constexpr uint32 OFFSETS_PER_CTA = 1024;
constexpr uint32 SUMMED_BY_WARP = 160;  // counts that a warp adds up as fast by itself as with its CTA

struct Accepted {
    const PackParams &p;
    __device__ uint32 operator()(uint32 seq) const { return min(max(at<int32>(p.accepted, seq * p.accepted_seq), 0), int32(p.gamma)); }
};

// The first tile of a warp: of layout 0. The first CTAs request it at once, the others once the counts are there.
struct FirstTile {
    const Lane lane;
    const bool early;
    uint4 held[SLOTS];

    __device__ FirstTile(const PackParams &p)
        : lane(p, p.layout[0], 0, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP), early(blockIdx.x < p.early_ctas) {
        if (early) lane.load(p.gamma, held);
    }
    template <typename Offsets>
    __device__ void copy(const PackParams &p, const Offsets &offsets) {
        const uint32 count = offsets.count(lane);
        if (!early) lane.load(count, held);
        if (__any_sync(FULL_WARP, lane.pos < count)) store_tile(p, lane, offsets, held);
    }
};

// Adds the counts before `end` to a total in shared memory, by a CTA.
__device__ inline void add_counts(const PackParams &p, uint32 end, uint32 &total) {
    uint32 sum = 0;
    for (uint32 i = threadIdx.x; i < end; i += blockDim.x) sum += Accepted{p}(i);
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (threadIdx.x % WARP == 0) atomicAdd(&total, sum);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(256, 4) pack(const __grid_constant__ PackParams p) {
    __shared__ uint32 begin, before;  // the sequence of the CTA's first tile, the sum of the counts before it
    const uint32 ctas = gridDim.x - 1;
    if (blockIdx.x == ctas) {
        wait_for_previous_kernel();
        write_offsets(p, Accepted{p}, 0, p.batch, 0);
        return;
    }
    FirstTile first(p);
    if (threadIdx.x == 0) {
        begin = first.lane.warp_seq;
        before = 0;
    }
    __syncthreads();
    wait_for_previous_kernel();
    SummedOffsets<Accepted> offsets{Accepted{p}, 0, 0};
    if (begin >= SUMMED_BY_WARP && __syncthreads_or(first.lane.pos < offsets.count(first.lane))) {
        add_counts(p, begin, before);
        offsets.begin = begin;
        offsets.before = before;
    }
    first.copy(p, offsets);
    copy_rows(p, ctas, 1, offsets);
}

// Offsets of any batch: CTA c owns OFFSETS_PER_CTA sequences and adds up all before them itself.
extern "C" __global__ void __launch_bounds__(256, 4) pack_offsets(const __grid_constant__ PackParams p) {
    allow_next_kernel();
    __shared__ uint32 before;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    wait_for_previous_kernel();
    const uint32 first = blockIdx.x * OFFSETS_PER_CTA;
    add_counts(p, first, before);
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
    FirstTile first(p);
    wait_for_previous_kernel();
    const WrittenOffsets offsets{p};
    first.copy(p, offsets);
    copy_rows(p, gridDim.x, 1, offsets);
}
