// Coding of the blocks of a cache in INT4 where their rows have 64 or 128 channels of 16 bits: what cache_code does (coded.cu), to the bit, by
// quantize/rows.cuh.
//
// Work split: a CTA takes a KV head of a page that became whole.
//
//   copies of its rows ─ sums ─ codes ─ copy of these to host memory
//
// On entry: write-backs of a layer follow each other; D = Dv is the kernel's. The dynamic shared memory has the rows of a block.
//
// targets: compute_80

#include "cache/params.cuh"
#include "cache/units.cuh"
#include "cache/written.cuh"
#include "common/barrier.cuh"
#include "quantize/rows.cuh"

#include "cache/layout.cuh"

constexpr uint32 CODE_THREADS = 128, PART_THREADS = CODE_THREADS / 2;  // all, those of the keys or of the values
constexpr uint32 CODE_SPAN = 32;                                       // a thread's channels

template <uint32 DIM> __device__ inline void code(const CodeParams &p) {
    using R = Rows<DIM, DIM / CODE_SPAN>;
    extern __shared__ __align__(16) char rows[];
    __shared__ KeyChannels<R> channels;
    __shared__ bool is_extreme;  // whether weights divide numbers that are not moderate
    const Cache &cache = p.cache;
    const Coding &coding = p.coding;
    Clock &clock = *p.layer.clock;
    const uint32 heads = cache.heads.value, tokens = cache.size.value, items = clock.full * heads;
    for (uint32 item = blockIdx.x; item < items; item += gridDim.x) {
        const uint32 n = cache.heads.divide(item), g = item - n * heads;
        const Full full = p.layer.full[n];
        char *const codes = cache.coded_tail(p.layer, full.page / 4, full.page % 4, g);
        const uint32 piece = threadIdx.x % R::PIECES;
        const char *const from = p.layer.pool + (uint64(full.page) * heads + g) * cache.tail_run + piece * 16;
#pragma unroll 4
        for (uint32 t = threadIdx.x / R::PIECES; t < tokens; t += CODE_THREADS / R::PIECES) {
            copy_16(shared_address(rows) + R::place(t, piece), from + cache.parts[0] + t * cache.token[0]);
            copy_16(shared_address(rows) + R::place(tokens + t, piece), from + cache.parts[1] + t * cache.token[1]);
        }
        end_copies();
        if (const uint32 c = threadIdx.x; c < DIM) channels.set_weight(c, p.layer.weights[g * DIM + c]);
        if (threadIdx.x == 0) is_extreme = false;
        wait_copies<0>();
        __syncthreads();
        const auto store_mean = [&](uint32 c, float sum) {
            const float mean = __fdiv_rn(sum, float(tokens));
            store_number(codes + coding.mean + c * 2, coding.dtype, mean);
            return round_number(mean, coding.dtype);
        };
        const uint32 part = threadIdx.x / PART_THREADS, thread = threadIdx.x % PART_THREADS;
        const auto place = [&](uint32 t, char *&row, char *&scale) {
            row = codes + coding.parts[part] + t * (DIM / 2);
            scale = codes + coding.parts[part + 2] + t;
        };
        if (part == 0) {
            if (!find_means<R>(rows, tokens, coding.dtype, true, thread, PART_THREADS, channels, store_mean)) is_extreme = true;
            asm volatile("bar.sync 1, %0;" ::"n"(PART_THREADS) : "memory");
        }
        if (part == 0 && is_extreme) {
            if (threadIdx.x < WARP) code_extreme_keys<R>(rows, tokens, coding.dtype, coding.factor, channels, place);
        } else {
#pragma unroll 1
            for (uint32 t = thread / R::LANES; t < tokens; t += PART_THREADS / R::LANES)
                code_row<R>(rows + (part * tokens + t) * R::PITCH, thread % R::LANES, coding.dtype, part == 0, true,
                            part ? coding.value_factor : coding.factor, channels, [&](char *&row, char *&scale) { place(t, row, scale); });
        }
        __syncthreads();
        copy_units<CODE_THREADS>(codes, cache.stored(p.layer, full.block, g), cache.run, threadIdx.x);
        __syncthreads();
    }
    end_coding(clock);
}

#define KERNEL extern "C" __global__ void __launch_bounds__(CODE_THREADS)

KERNEL cache_code_64(const __grid_constant__ CodeParams p) { code<64>(p); }
KERNEL cache_code_128(const __grid_constant__ CodeParams p) { code<128>(p); }
