// Packing accepted rows of several tensors.
//
//   offsets[i] = Σ_{i' < i} k[i'] · packed[offsets[i] + j] = rows[i, j] for j < k[i], offsets[i] + j < cap
//
// Bytes: every accepted row is read once and written once; floor = 2 · bytes / copy bandwidth.
//
// Work split: no CTA waits for another. A warp takes a tile of the input; its CTA sums the counts of the sequences before the tile (B ints
// from L2) and copies the accepted rows. One additional CTA writes the offsets. The first `early_ctas` CTAs load their first tiles before
// they know the counts, which the previous kernel may still be computing.
//
//   early CTAs: load tile ─ read accepted[] ─ sum counts ─ store tile
//   other CTAs: read accepted[] ─ sum counts ─ load tile ─ store tile            last CTA: read accepted[] ─ sum ─ write offsets
//
// Variants: pack for up to MAX_SUMMED_BATCH sequences; beyond that pack_offsets writes the offsets and pack_large reads them. The kernels
// named general take rows of any form, the others rows of the common form (types.cuh).
//
// On entry: B·γ < 2^31; tiles < 2^31; no output overlaps an input; the rows were written before the previous kernel began.
//
// targets: compute_80, compute_90

#include "pack/pack.cuh"

constexpr uint32 OFFSETS_PER_CTA = 1024;
constexpr uint32 SUMMED_BY_WARP = 160;  // the number of counts up to which a warp alone sums as fast as its CTA

template <typename Params>
struct Accepted {
    const Params &p;
    __device__ uint32 operator()(uint32 seq) const {
        return min(max(as<int32>(p.accepted + offset(seq, p.accepted_seq)), 0), int32(p.gamma));
    }
    // The sum of the counts of sequences begin … end − 1, by a warp.
    __device__ uint32 sum(uint32 begin, uint32 end) const {
        uint32 total = 0;
#pragma unroll 4
        for (uint32 seq = begin + threadIdx.x % WARP; seq < end; seq += WARP) total += (*this)(seq);
        return __reduce_add_sync(FULL_WARP, total);
    }
};
template <typename Params> Accepted(const Params &) -> Accepted<Params>;

// The first tile of a warp, which is of layout 0. Early CTAs load it at once, the others when they know the counts.
template <typename Form>
struct FirstTile {
    const Lane<Form> lane;
    const bool early;
    uint4 units[SLOTS];

    __device__ FirstTile(const PackParams<Form> &p, const Tensors &tensors)
        : lane(p, tensors, p.layout[0], 0, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP), early(blockIdx.x < p.early_ctas) {
        if (early) lane.load(p.gamma, units);
    }
    template <typename Offsets>
    __device__ void copy(const PackParams<Form> &p, const Offsets &offsets) {
        const uint32 count = offsets.count(lane);
        if (!early) lane.load(count, units);
        if (__any_sync(FULL_WARP, lane.pos < count)) store_tile(p, lane, offsets, units);
    }
};

// Adds the counts of the sequences before `end` to a total in shared memory, by a CTA.
template <typename Params>
__device__ inline void add_counts(const Params &p, uint32 end, uint32 &total) {
    uint32 sum = 0;
    for (uint32 i = threadIdx.x; i < end; i += blockDim.x) sum += Accepted{p}(i);
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (threadIdx.x % WARP == 0) atomicAdd(&total, sum);
    __syncthreads();
}

template <typename Params>
__device__ inline void pack_rows(const Params &p, const Tensors &tensors) {
    __shared__ uint32 begin, before;  // the first sequence of the CTA's first tile, and the sum of the counts before that sequence
    const uint32 ctas = gridDim.x - 1;
    if (blockIdx.x == ctas) {
        wait_for_previous_kernel();
        write_offsets(p, SummedOffsets{Accepted{p}, 0, 0}, 0, p.batch, threadIdx.x / WARP, blockDim.x / WARP);
        return;
    }
    FirstTile first(p, tensors);
    if (threadIdx.x == 0) {
        begin = first.lane.warp_seq;
        before = 0;
    }
    __syncthreads();
    wait_for_previous_kernel();
    SummedOffsets offsets{Accepted{p}, 0, 0};
    if (begin >= SUMMED_BY_WARP && __syncthreads_or(first.lane.pos < offsets.count(first.lane))) {
        add_counts(p, begin, before);
        offsets.begin = begin;
        offsets.before = before;
    }
    first.copy(p, offsets);
    copy_rows(p, tensors, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, ctas * (blockDim.x / WARP), 1, offsets);
}

// Writes the offsets of a batch of any size: CTA c takes OFFSETS_PER_CTA sequences and itself sums the counts before them.
template <typename Params>
__device__ inline void write_all_offsets(const Params &p) {
    allow_next_kernel();
    __shared__ uint32 before;
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    wait_for_previous_kernel();
    const uint32 first = blockIdx.x * OFFSETS_PER_CTA;
    add_counts(p, first, before);
    write_offsets(p, SummedOffsets{Accepted{p}, first, before}, first, min(first + OFFSETS_PER_CTA, p.batch), threadIdx.x / WARP,
                  blockDim.x / WARP);
}

template <typename Params>
struct WrittenOffsets {
    const Params &p;
    template <typename Lane>
    __device__ uint32 count(const Lane &lane) const {
        return lane.end ? Accepted{p}(lane.seq) : 0;
    }
    template <typename Lane>
    __device__ uint32 offset(const Lane &lane) const {
        const char *address = p.offsets + ::offset(lane.seq, p.offsets_seq);
        return p.offsets_bytes == 8 ? as<int64>(address) : as<int32>(address);
    }
};

template <typename Params>
__device__ inline void pack_large_rows(const Params &p, const Tensors &tensors) {
    FirstTile first(p, tensors);
    wait_for_previous_kernel();
    const WrittenOffsets<Params> offsets{p};
    first.copy(p, offsets);
    copy_rows(p, tensors, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, gridDim.x * (blockDim.x / WARP), 1, offsets);
}

#define KERNEL extern "C" __global__ void __launch_bounds__(256, 4)

KERNEL pack(const __grid_constant__ PackParams<Common> p, const __grid_constant__ Tensors tensors) { pack_rows(p, tensors); }
KERNEL pack_general(const __grid_constant__ PackParams<General> p, const __grid_constant__ Tensors tensors) { pack_rows(p, tensors); }
KERNEL pack_offsets(const __grid_constant__ PackParams<Common> p) { write_all_offsets(p); }
KERNEL pack_offsets_general(const __grid_constant__ PackParams<General> p) { write_all_offsets(p); }
KERNEL pack_large(const __grid_constant__ PackParams<Common> p, const __grid_constant__ Tensors tensors) { pack_large_rows(p, tensors); }
KERNEL pack_large_general(const __grid_constant__ PackParams<General> p, const __grid_constant__ Tensors tensors) {
    pack_large_rows(p, tensors);
}
