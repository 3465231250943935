// Verification and packing in one launch: the formulas of verify.cu and pack.cu.
//
// Bytes: those of pack.cu, and 2·B·γ tokens per CTA out of L2.
//
// Cut: no CTA waits for another. Each verifies the whole batch itself and copies its tiles; one more CTA writes the results. Cheaper than
// any hand-over between CTAs while the tokens are few: the host picks this kernel for those sizes. The first tile of each warp holds
// the likeliest rows; it is requested before the tokens have come and dropped if they say no.
//
//   request tokens ─┬─ accepted[] (shared) ─ barrier ─ sum before ─ store tile ─ per further tile: as pack
//   request tile ───┘                                  last CTA: write results, sums, write offsets
//
// On entry: batch ≤ MAX_SUMMED_BATCH; no output overlaps an input.

#include "pack.cuh"
#include "verify.cuh"

struct VerifyPackParams {
    VerifyParams verify;
    PackParams pack;
};

template <typename Token>
__device__ inline void verify_pack(const VerifyPackParams &p) {
    __shared__ int32 accepted[MAX_SUMMED_BATCH];
    const uint32 batch = p.verify.batch, ctas = gridDim.x - 1;
    const auto counts = [&](uint32 seq) { return uint32(accepted[seq]); };
    const bool copies = blockIdx.x < ctas;

    Acceptance<Token> acceptance{p.verify};
    acceptance.request();
    const Lane early(p.pack, p.pack.layout[0], 0, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
    uint4 held[SLOTS];
    early.load(copies ? p.pack.gamma : 0, held);
    acceptance.finish(accepted);

    if (copies) {
        const SummedOffsets offsets{counts, 0, 0};
        store_tile(p.pack, early, offsets, held);
        copy_rows(p.pack, ctas, 1, offsets);
        return;
    }
    for (uint32 seq = blockDim.x - 1 - threadIdx.x; seq < batch; seq += blockDim.x)
        write_result<Token>(p.verify, seq, accepted[seq], row_length(p.verify, seq));
    write_offsets(p.pack, counts, 0, batch, 0);
    if (p.verify.committed)
        for (uint32 seq = threadIdx.x / WARP; seq < batch; seq += blockDim.x / WARP)
            write_committed<Token>(p.verify, seq, accepted[seq], threadIdx.x % WARP, WARP);
}

extern "C" __global__ void __launch_bounds__(512, 2) verify_pack_i32(const __grid_constant__ VerifyPackParams p) {
    verify_pack<int32>(p);
}

extern "C" __global__ void __launch_bounds__(512, 2) verify_pack_i64(const __grid_constant__ VerifyPackParams p) {
    verify_pack<int64>(p);
}
