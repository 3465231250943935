// Gather of contiguous blocks by bulk copies: target[to] = source[from] for each pair, through shared memory.
//
// Bytes: each block crosses the bus once, which is the floor; the device writes it once. What the bus needs is bytes in flight, about two
// microseconds' worth, and no multiprocessor needs to compute for that: a few CTAs hold some hundred KiB of pieces under way.
//
// Cut: blocks into pieces, pieces over all warps of the grid. A warp has a ring of stages; one lane asks for a piece in each, and hands
// the oldest on to the device when it has come. All lanes look up the pairs, 32 ahead.
//
//   look up 32 pairs ─ [next 32 under way] ─ for each piece: stage free? ─ request ─ … ─ arrived? ─ pass on
//
// On entry: blocks, and all addresses, are multiples of 16 bytes; pairs · pieces < 2^31; shared memory holds warps · stages pieces.
//
// targets: compute_90

#include "prefetch/params.cuh"
#include "prefetch/ring.cuh"

#include "prefetch/layout.cuh"

constexpr uint32 THREADS = 128, MOST_STAGES = 64;  // of a CTA

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
    extern __shared__ __align__(128) char room[];
    __shared__ __align__(8) uint64 arrived[MOST_STAGES];
    __shared__ Landing landing[MOST_STAGES];
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // CTA after CTA, so that few pieces keep all of them busy.
    const uint32 all = gridDim.x * (blockDim.x / WARP), first = warp * gridDim.x + blockIdx.x;
    const uint32 items = pairs.entries * p.pieces.value;
    const Piece none = {nullptr, nullptr, 0};
    const uint32 stage = warp * p.stages;
    const uint32 begin = shared_address(room) + stage * p.piece;
    Ring ring(begin, p.piece, lane == 0 ? p.stages : 0, arrived + stage, landing + stage);
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
    // Not before: what is resident and waits takes room from kernels on other streams.
    allow_next_kernel();
    if (lane == 0) ring.drain();
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

KERNEL gather_bulk(const __grid_constant__ BulkParams p, const __grid_constant__ Lists pairs) { copy_bulk(p, pairs); }
KERNEL gather_bulk_given(const __grid_constant__ BulkParams p, const __grid_constant__ Given pairs) { copy_bulk(p, pairs); }
