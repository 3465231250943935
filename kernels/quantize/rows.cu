// Coding of keys and values in INT4 where their rows have 64 or 128 channels of 16 bits side by side: what quantize.cu does, to the bit. A
// device of 9.0 copies as many bytes in .4 to .7 of the time.
//
// Work split: a CTA takes every `slices`th block of one layer, sequence and KV head; while it waits for the rows of a block, the multiprocessor's
// other CTAs code. CTAs of neighbouring KV heads are neighbours, as their rows are in memory.
//
//   for each block: copies of its rows ─ sums ─ codes
//
// On entry: D = Dv is the kernel's; rows of keys, values and codes begin on 16 bytes; S is a multiple of 16, at most MOST_TOKENS. The dynamic shared
// memory has the rows of a block.
//
// targets: compute_80

#include "common/barrier.cuh"
#include "quantize/params.cuh"
#include "quantize/rows.cuh"

// Where the tokens of a block lie: side by side in one page, or, where pages are shorter, wherever each token's page is.
struct Tokens {
    const View<2> &table;
    uint32 seq, pages, page_size, first;  // pages of the tensor, tokens of a page, the block's first token
    bool is_in_one;
    int32 page;                           // if the block is in one
    uint32 at;

    __device__ Tokens(const View<2> &table, uint32 seq, uint32 pages, uint32 page_size, uint32 first, uint32 block)
        : table(table), seq(seq), pages(pages), page_size(page_size), first(first), is_in_one(page_size >= block), page(-1), at(0) {
        if (is_in_one) find(0, page, at);
    }
    // The page of token n of the block, below 0 where it has none, and its row there.
    __device__ void find(uint32 n, int32 &page, uint32 &at) const {
        const uint32 t = first + n, column = t / page_size;
        page = find_page(table, seq, column, pages);
        at = t - column * page_size;
    }
};

template <uint32 DIM> struct Work {
    const QuantizeParams &p;
    const LayerData &layer;
    uint32 seq, head;

    __device__ Tokens exact(uint32 j) const { return {p.table, seq, p.pages, p.page_size, j * p.block, p.block}; }
    __device__ Tokens coded(uint32 j) const { return {p.coded_table, seq, p.coded_pages, p.coded_page_size, j * p.block, p.block}; }

    // Requests the rows of block j. Whether all tokens of which this thread copies a part have pages.
    __device__ bool request(uint32 j, uint32 rows) const {
        using R = Rows<DIM>;
        const Tokens from = exact(j), to = coded(j);
        const uint32 piece = threadIdx.x % R::PIECES, begin = threadIdx.x / R::PIECES;
        constexpr uint32 AT_ONCE = CODE_THREADS / R::PIECES;
        const char *const keys = layer.k + head * p.k[2] + piece * 16, *const values = layer.v + head * p.v[2] + piece * 16;
        const auto copy = [&](uint32 n, int32 page, uint32 at) {
            copy_16(rows + R::place(0, n, p.block, piece), keys + page * p.k[0] + at * p.k[1]);
            copy_16(rows + R::place(1, n, p.block, piece), values + page * p.v[0] + at * p.v[1]);
        };
        if (from.is_in_one && to.is_in_one) {
            if (from.page < 0 || to.page < 0) return false;
#pragma unroll 4
            for (uint32 n = begin; n < p.block; n += AT_ONCE) copy(n, from.page, from.at + n);
            return true;
        }
        bool has_pages = true;
#pragma unroll 1
        for (uint32 n = begin; n < p.block; n += AT_ONCE) {
            int32 page, coded_page;
            uint32 at, coded_at;
            from.find(n, page, at);
            to.find(n, coded_page, coded_at);
            has_pages &= page >= 0 && coded_page >= 0;
            if (page >= 0) copy(n, page, at);
        }
        return has_pages;
    }

    // Where the mean of block j goes; null where it has no row.
    __device__ char *mean_place(uint32 j) const {
        const uint32 column = p.mean_rows == 0 ? 0 : j / p.mean_rows;
        if (p.mean_rows == 0 || column >= p.mean_columns) return nullptr;
        const int32 page = find_page(p.mean_table, seq, column, p.mean_pages);
        return page < 0 ? nullptr : layer.means + page * p.means[0] + j % p.mean_rows * p.means[1] + head * p.means[2];
    }

    // Codes block j, whose rows are there.
    __device__ void code(uint32 j, const char *rows, KeyChannels<DIM> &channels) const {
        const bool is_key = threadIdx.x < PART_THREADS;
        const auto store_mean = [&](uint32 c, float sum) {
            char *const means = mean_place(j);
            if (!means) return 0.0f;
            const float mean = __fdiv_rn(sum, float(p.block));
            store_number(means + c * p.means[3], p.mean_type, mean);
            return round_number(mean, p.mean_type);
        };
        const Tokens to = coded(j);
        const auto &of_codes = is_key ? p.codes_k : p.codes_v;
        const auto &of_scales = is_key ? p.k_scale : p.v_scale;
        char *const all_codes = (is_key ? layer.codes_k : layer.codes_v) + head * of_codes[2];
        char *const all_scales = (is_key ? layer.k_scale : layer.v_scale) + head * of_scales[2];
        const auto place = [&](uint32 n, char *&codes, char *&scale) {
            int32 page = to.page;
            uint32 at = to.at + n;
            if (!to.is_in_one) to.find(n, page, at);
            codes = all_codes + page * of_codes[0] + at * of_codes[1];
            scale = all_scales + page * of_scales[0] + at * of_scales[1];
        };
        code_rows(rows, p.block, p.dtype, layer.weights, is_key ? p.factor : p.value_factor, channels, store_mean, place);
    }
};

template <uint32 DIM> __device__ inline void quantize(const QuantizeParams &p) {
    extern __shared__ __align__(16) char rows[];
    __shared__ KeyChannels<DIM> channels;
    const uint32 head = blockIdx.x % p.heads, list = blockIdx.x / p.heads;
    const uint32 slice = list % p.slices, seq = list / p.slices % p.batch, number = list / p.slices / p.batch;
    const Work<DIM> work{p, p.layer[number], seq, head};

    const Blocks blocks(p, seq);
    if (slice == 0 && head == 0 && number == 0 && threadIdx.x == 0) blocks.store_length(p, seq);
    if (blocks.first + slice >= blocks.last) return;

    if (const uint32 c = threadIdx.x; work.layer.weights && c < DIM)
        channels.weight[c / SPAN][c % SPAN] = weight_of(as<float>(work.layer.weights + head * p.weights[0] + c * p.weights[1]));
    for (uint32 j = blocks.first + slice; j < blocks.last; j += p.slices) {
        const bool has_pages = work.request(j, shared_address(rows));
        end_copies();
        wait_copies<0>();
        if (__syncthreads_and(has_pages)) work.code(j, rows, channels);
        __syncthreads();
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(CODE_THREADS, 5)

KERNEL kv_quantize_64(const __grid_constant__ QuantizeParams p) { quantize<64>(p); }
KERNEL kv_quantize_128(const __grid_constant__ QuantizeParams p) { quantize<128>(p); }
