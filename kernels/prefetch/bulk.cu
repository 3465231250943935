// Gather of contiguous blocks by bulk copies: target[to] = source[from] for each pair, through shared memory.
//
// Bytes: each block crosses the bus once, which is the floor; the device writes it once. The bus needs about two microseconds' worth of
// bytes in flight, which takes no computation: a few CTAs keep some hundred KiB of pieces in flight.
//
// Work split: blocks are split into pieces, which are dealt to all warps of the grid. A warp has a ring of stages in shared memory; one
// lane requests a piece into each stage, and writes the oldest piece to the device when it has arrived. All lanes look up pairs, 32 ahead.
//
//   look up 32 pairs ─ [look up the next 32] ─ for each piece: wait for a free stage ─ request ─ … ─ wait for arrival ─ write
//
// Variants: gather_bulk for lists on the device, gather_bulk_given for entries that the host looked up. vectors.cu takes blocks that are
// not one run of bytes in both tensors, and devices below compute capability 9.0.
//
// On entry: blocks, and all addresses, are multiples of 16 bytes; pairs · pieces < 2^31; shared memory holds warps · stages pieces.
//
// targets: compute_90

#include "prefetch/params.cuh"
#include "prefetch/ring.cuh"

#include "prefetch/layout.cuh"

constexpr uint32 THREADS = 128, MOST_STAGES = 64;  // the largest number of stages of a CTA

struct Piece {
    const char *source;
    char *target;
    uint32 bytes;  // 0: none
};

template <typename Pairs>
__device__ Piece find_piece(const BulkParams &p, const Pairs &pairs, uint32 item) {
    const uint32 entry = p.pieces.divide(item), n = item - entry * p.pieces.value;
    int64 from, to;
    const bool exists = pairs.find(entry, from, to);
    const int64 at = int64(n) * p.piece;
    return {p.source + from + at, p.target + to + at, exists ? n + 1 == p.pieces.value ? p.last : p.piece : 0};
}

template <typename Pairs>
__device__ void copy_bulk(const BulkParams &p, const Pairs &pairs) {
    extern __shared__ __align__(128) char stages[];
    __shared__ __align__(8) uint64 arrived[MOST_STAGES];
    __shared__ Destination destinations[MOST_STAGES];
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // Consecutive pieces go to consecutive CTAs, so that few pieces keep all CTAs busy.
    const uint32 all = gridDim.x * (blockDim.x / WARP), first = warp * gridDim.x + blockIdx.x;
    const uint32 items = pairs.entries * p.pieces.value;
    const Piece none = {nullptr, nullptr, 0};
    const uint32 stage = warp * p.stages;
    const uint32 begin = shared_address(stages) + stage * p.piece;
    Ring ring(begin, p.piece, lane == 0 ? p.stages : 0, arrived + stage, destinations + stage);
    wait_for_previous_kernel();
    uint32 item = first + lane * all;
    Piece next = item < items ? find_piece(p, pairs, item) : none;
    const uint32 end = pairs.end() * p.pieces.value;
    if (first >= end) return;
    for (uint32 batch = first; batch < end; batch += WARP * all) {
        const Piece piece = next;
        item += WARP * all;
        next = item < end ? find_piece(p, pairs, item) : none;
        for (uint32 left = __ballot_sync(FULL_WARP, piece.bytes != 0); left; left &= left - 1) {
            const uint32 from = __ffs(left) - 1;
            const auto source = __shfl_sync(FULL_WARP, reinterpret_cast<uint64>(piece.source), from);
            const auto target = __shfl_sync(FULL_WARP, reinterpret_cast<uint64>(piece.target), from);
            const uint32 bytes = __shfl_sync(FULL_WARP, piece.bytes, from);
            if (lane == 0) ring.add(reinterpret_cast<const char *>(source), reinterpret_cast<char *>(target), bytes);
            __syncwarp();
        }
    }
    // An earlier call would make the next kernel's CTAs resident, where they wait and take the place of kernels on other streams.
    allow_next_kernel();
    if (lane == 0) ring.drain();
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

KERNEL gather_bulk(const __grid_constant__ BulkParams p, const __grid_constant__ Lists pairs) { copy_bulk(p, pairs); }
KERNEL gather_bulk_given(const __grid_constant__ BulkParams p, const __grid_constant__ Given pairs) { copy_bulk(p, pairs); }
