// Verification and packing in one launch: the formulas of verify.cu and pack.cu.
//
// Bytes: the bytes of pack.cu, and 2·B·γ tokens per cluster from L2.
//
// Work split: no cluster of CTAs waits for another. Each cluster verifies the whole batch: each of its CTAs verifies a share and sends the
// counts to the others through shared memory; then each CTA copies its tiles. The last cluster copies nothing; it writes the results and
// the offsets. The first tile of each warp holds the rows that are likeliest to be accepted; it is loaded before the tokens have arrived, and dropped
// if its rows are not accepted.
//
//   load tokens ─┬─ find first mismatches ─ send counts to the cluster ─ sum counts ─ store tile ─ copy further tiles as pack.cu
//   load tile ───┘                          last cluster: write results and offsets
//
// Variants: verify_pack_* for γ ≤ 32, verify_pack_long_* for longer rows; both take tensors of the common form only (types.cuh). With an end
// (verify/end.cuh) verify_pack_end_* and verify_pack_end_long_*: what is packed follows the cut.
//
// On entry: batch ≤ MAX_SUMMED_BATCH; γ ≤ TOKEN_SLOTS · WARP; the grid is a whole number of clusters; no output overlaps an input.
//
// targets: compute_80, compute_90

#include "common/cluster.cuh"
#include "pack/pack.cuh"
#include "verify/verify.cuh"

constexpr uint32 MAX_THREADS = 384;
using AcceptedTable = SharedTable<MAX_SUMMED_BATCH>;

// How the sequences end that this CTA verified, beside the cluster's table of what is accepted.
template <typename Ends>
struct CutTable {
    uint8 entry[MAX_SUMMED_BATCH];  // finish, and whether there is a next token

    __device__ void put(uint32 seq, const Cut &cut) { entry[seq] = cut.finish << 1 | cut.has_next(); }
    __device__ Cut get(uint32 seq, uint32 accepted) const { return {accepted, accepted + (entry[seq] & 1), uint32(entry[seq] >> 1)}; }
};
template <>
struct CutTable<NoEnd> {
    __device__ void put(uint32, const Cut &) {}
    __device__ Cut get(uint32, uint32 accepted) const { return {accepted, accepted + 1, GOES_ON}; }
};

// The tiles of tokens that one warp verifies: every `stride`th tile of its CTA's share of the batch from `first` on, AT_ONCE at a time.
template <typename Token, uint32 SLOTS, typename Ends>
struct WarpTiles {
    static constexpr uint32 AT_ONCE = (SLOTS == 1 ? 16 : 8) / sizeof(Token), STOPS = SLOTS > 1 ? 2 : sizeof(Token) == 4 ? 4 : 3;  // registers are few
    const VerifyParams<Common> &p;
    const Ends &ends;
    uint32 first, stride, end;
    TokenTile<Token, SLOTS> tiles[AT_ONCE];
    TileEnd<Token, SLOTS, Ends, STOPS> tile_ends[AT_ONCE];

    __device__ WarpTiles(const VerifyParams<Common> &p, const Ends &ends) : p(p), ends(ends) {
        const uint32 begin = cluster_rank() * p.share, log_rows = SLOTS == 1 ? 5 - p.log_lanes : 0;
        first = (begin >> log_rows) + threadIdx.x / WARP;
        stride = blockDim.x / WARP;
        end = (min(begin + p.share, p.batch) + (1u << log_rows) - 1) >> log_rows;
        request(first);
    }
    __device__ void request(uint32 tile) {
#pragma unroll
        for (uint32 t = 0; t < AT_ONCE; ++t)
            if (tile + t * stride < end) {
                tiles[t].place(p, tile + t * stride);
                tile_ends[t].load(p, ends, tiles[t].row);
                tiles[t].load(p);
            }
    }
    __device__ void verify(AcceptedTable &accepted, CutTable<Ends> &cuts) {
        for (uint32 tile = first; tile < end; tile += AT_ONCE * stride, request(tile))
#pragma unroll
            for (uint32 t = 0; t < AT_ONCE; ++t) {
                if (tile + t * stride >= end) break;
                const Cut cut = tile_ends[t].cut(p, ends, tiles[t]);
                if (tiles[t].pos > 0 || tiles[t].row >= p.batch) continue;
                accepted.entry[tiles[t].row] = cut.accepted;
                cuts.put(tiles[t].row, cut);
            }
    }
};

// The counts of accepted rows, from the cluster's table.
struct Counts {
    const AcceptedTable &accepted;
    __device__ uint32 operator()(uint32 seq) const { return accepted.entry[seq]; }
    // The sum of the counts of sequences 0 … end − 1, by a warp: whole chunks of 16, then the rest.
    __device__ uint32 sum(uint32, uint32 end) const {
        const uint32 lane = threadIdx.x % WARP, rest = end % 16;
        uint32 total = lane < rest ? accepted.entry[end - rest + lane] : 0;
        for (uint32 chunk = lane; chunk < end / 16; chunk += WARP) {
            const uint4 v = reinterpret_cast<const uint4 *>(accepted.entry)[chunk];
            total = __dp4a(v.x, 0x01010101u, __dp4a(v.y, 0x01010101u, __dp4a(v.z, 0x01010101u, __dp4a(v.w, 0x01010101u, total))));
        }
        return __reduce_add_sync(FULL_WARP, total);
    }
};

// The first tile of a warp, which goes through shared memory: if it went through registers, the warp would wait for it together with the
// tokens.
struct EarlyRows {
    uint4 (&units)[SLOTS][MAX_THREADS];

    __device__ void request(const Lane<Common> &lane, uint32 limit) {
        limit = min(limit, lane.end);
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) {
            const char *source = lane.source(u);
            if (lane.position(u) < limit)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&units[u][threadIdx.x])), "l"(source) : "memory");
        }
    }
    __device__ void store(const Lane<Common> &lane, uint32 cap, uint32 first_row, uint32 count) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        uint4 rows[SLOTS];
#pragma unroll
        for (uint32 u = 0; u < SLOTS; ++u) rows[u] = units[u][threadIdx.x];
        lane.store(first_row, min(count, max(cap, first_row) - first_row), rows);
    }
};

template <typename Token, uint32 TOKEN_SLOTS, typename Ends = NoEnd>
__device__ inline void verify_pack(const VerifyParams<Common> &v, const PackParams<Common> &p, const Tensors &tensors, const Ends &ends = {}) {
    __shared__ AcceptedTable accepted;
    __shared__ CutTable<Ends> cuts;
    __shared__ uint4 first_units[SLOTS][MAX_THREADS];
    const uint32 ctas = gridDim.x - cluster_ctas(), warp = threadIdx.x / WARP * ctas + blockIdx.x;
    const bool copies = blockIdx.x < ctas;
    WarpTiles<Token, TOKEN_SLOTS, Ends> tokens(v, ends);
    accepted.open(v.share, v.batch);
    const Lane<Common> early(p, tensors, p.layout[0], 0, warp);
    EarlyRows rows{first_units};
    if (copies) rows.request(early, v.gamma);
    tokens.verify(accepted, cuts);
    accepted.exchange(v.share, v.batch);

    const SummedOffsets offsets{Counts{accepted}, 0, 0};
    if (copies) {
        rows.store(early, p.cap, offsets.offset(early), offsets.count(early));
        copy_rows(p, tensors, warp, ctas * (blockDim.x / WARP), 1, offsets);
    } else {
        const uint32 begin = cluster_rank() * v.share, end = min(begin + v.share, v.batch);
        const uint32 this_warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
        // The offsets are dealt from the last warp on, because each thread of the first warps writes the results of a sequence.
        write_offsets(p, offsets, begin, end, warps - 1 - this_warp, warps);
        using Row = PaddedRow<Token, VerifyParams<Common>>;
        for (uint32 seq = begin + threadIdx.x; seq < end; seq += blockDim.x)
            write_result<Token>(v, ends, Row(v, seq), cuts.get(seq, accepted.entry[seq]));
        if (!v.committed) return;
        for (uint32 seq = begin + this_warp; seq < end; seq += warps)
            write_committed<Token>(v, Row(v, seq), cuts.get(seq, accepted.entry[seq]), threadIdx.x % WARP, WARP);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(MAX_THREADS)
#define PARAMETERS const __grid_constant__ VerifyParams<Common> v, const __grid_constant__ PackParams<Common> p, const __grid_constant__ Tensors t

// γ ≤ 32: a tile holds whole rows. Beyond, a tile holds TOKEN_SLOTS · 32 tokens of a row.
KERNEL verify_pack_i32(PARAMETERS) { verify_pack<int32, 1>(v, p, t); }
KERNEL verify_pack_i64(PARAMETERS) { verify_pack<int64, 1>(v, p, t); }
KERNEL verify_pack_long_i32(PARAMETERS) { verify_pack<int32, TOKEN_SLOTS>(v, p, t); }
KERNEL verify_pack_long_i64(PARAMETERS) { verify_pack<int64, TOKEN_SLOTS>(v, p, t); }
KERNEL verify_pack_end_i32(PARAMETERS, const __grid_constant__ EndParams end) { verify_pack<int32, 1>(v, p, t, end); }
KERNEL verify_pack_end_i64(PARAMETERS, const __grid_constant__ EndParams end) { verify_pack<int64, 1>(v, p, t, end); }
KERNEL verify_pack_end_long_i32(PARAMETERS, const __grid_constant__ EndParams end) { verify_pack<int32, TOKEN_SLOTS>(v, p, t, end); }
KERNEL verify_pack_end_long_i64(PARAMETERS, const __grid_constant__ EndParams end) { verify_pack<int64, TOKEN_SLOTS>(v, p, t, end); }
