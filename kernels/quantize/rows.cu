// Coding of keys and values in INT4 where their rows have 64 or 128 channels of 16 bits side by side: what quantize.cu does, to the bit. A
// device of 9.0 copies as many bytes in .5 of the time.
//
// Work split: two CTAs take every `slices`th block of one layer, sequence and KV head, one its keys and the other its values, in turn, since keys take
// longer. A CTA requests the rows of its next block before it codes one. CTAs of neighbouring KV heads are neighbours, as their rows are in memory.
//
//   for each block: copies of the next one's rows ─ sums, of keys ─ codes
//
// On entry: D = Dv is the kernel's; rows of keys, values and codes begin on 16 bytes; S is a multiple of 16, at most MOST_TOKENS. The dynamic shared
// memory has the rows of two blocks, keys or values.
//
// targets: compute_80

#include "common/barrier.cuh"
#include "quantize/params.cuh"
#include "quantize/rows.cuh"

// What a table says is page p of a sequence; nothing waits for it before it is used.
__device__ inline int32 request_page(const View<2> &table, uint32 seq, uint32 p) {
    int32 page = p == 0 ? int32(seq) : -1;
    asm volatile("{\n\t.reg .pred has_table;\n\t"
                 "setp.ne.u64 has_table, %2, 0;\n\t"
                 "@has_table ld.global.s32 %0, [%1];\n\t}" : "+r"(page) : "l"(table.at(seq, p)), "l"(table.data));
    return page;
}

// Where the tokens of a block lie: side by side in one page, or, where pages are shorter, wherever each token's page is.
struct Tokens {
    const View<2> &table;
    uint32 seq, pages, page_size, first;  // pages of the tensor, tokens of a page, the block's first token
    bool is_in_one;
    int32 page;                           // of the first token, as the table has it, and its row there
    uint32 at;

    __device__ Tokens(const View<2> &table, uint32 seq, uint32 pages, uint32 page_size, uint32 j, uint32 block)
        : table(table), seq(seq), pages(pages), page_size(page_size), first(j * block), is_in_one(page_size >= block), at(0) {
        uint32 column = j;
        if (page_size != block) {
            column = first / page_size;
            at = first - column * page_size;
        }
        page = request_page(table, seq, column);
    }
    __device__ bool has_page() const { return page >= 0 && uint32(page) < pages; }
    // The page of token n of the block, below 0 where it has none, and its row there.
    __device__ void find(uint32 n, int32 &page, uint32 &at) const {
        const uint32 t = first + n, column = t / page_size;
        page = find_page(table, seq, column, pages);
        at = t - column * page_size;
    }
};

// A part of a block: its keys or its values.
template <class R> struct Work {
    const QuantizeParams &p;
    const LayerData &layer;
    uint32 seq, head, j;
    bool is_key;

    __device__ Tokens exact() const { return {p.table, seq, p.pages, p.page_size, j, p.block}; }
    __device__ Tokens coded() const { return {p.coded_table, seq, p.coded_pages, p.coded_page_size, j, p.block}; }

    // Where the codes of token t go, and its scale.
    template <bool IS_KEY> __device__ void place(const Tokens &to, uint32 t, char *&codes, char *&scale) const {
        const auto &of_codes = IS_KEY ? p.codes_k : p.codes_v;
        const auto &of_scales = IS_KEY ? p.k_scale : p.v_scale;
        int32 page = to.page;
        uint32 at = to.at + t;
        if (!to.is_in_one) to.find(t, page, at);
        codes = (IS_KEY ? layer.codes_k : layer.codes_v) + head * of_codes[2] + page * of_codes[0] + at * of_codes[1];
        scale = (IS_KEY ? layer.k_scale : layer.v_scale) + head * of_scales[2] + page * of_scales[0] + at * of_scales[1];
    }

    // Requests the rows. Whether all tokens of which this thread copies a part have pages. Four threads copy a row.
    template <bool IS_KEY> __device__ bool request(uint32 rows) const {
        const Tokens from = exact(), to = coded();
        const uint32 piece = threadIdx.x % 4, begin = threadIdx.x / 4, at_once = blockDim.x / 4;
        // The gap behind a row's last span keeps where its codes go, and its scale: registers are for the row while it is turned.
        if (const uint32 t = threadIdx.x / R::LANES; threadIdx.x % R::LANES == 0 && t < p.block) {
            char *codes, *scale;
            place<IS_KEY>(to, t, codes, scale);
            asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(rows + (t + 1) * R::PITCH - 16), "l"(codes), "l"(scale) : "memory");
        }
        const auto &step = IS_KEY ? p.k : p.v;
        const char *const data = (IS_KEY ? layer.k : layer.v) + head * step[2] + piece * 16;
        rows += R::place(begin, piece);
        const auto copy = [&](const char *row) {
#pragma unroll
            for (uint32 n = 0; n < R::PIECES; n += 4) copy_16(rows + R::place(0, n), row + n * 16);
        };
        if (from.is_in_one && to.is_in_one) {
            if (!from.has_page() || !to.has_page()) return false;
            const char *row = data + from.page * step[0] + (from.at + begin) * step[1];
            const int64 distance = at_once * step[1];
#pragma unroll 4
            for (uint32 n = begin; n < p.block; n += at_once, row += distance, rows += at_once * R::PITCH) copy(row);
            return true;
        }
        bool has_pages = true;
#pragma unroll 1
        for (uint32 n = begin; n < p.block; n += at_once, rows += at_once * R::PITCH) {
            int32 page, coded_page;
            uint32 at, coded_at;
            from.find(n, page, at);
            to.find(n, coded_page, coded_at);
            has_pages &= page >= 0 && coded_page >= 0;
            if (page >= 0) copy(data + page * step[0] + at * step[1]);
        }
        return has_pages;
    }
    __device__ bool request(uint32 rows) const { return is_key ? request<true>(rows) : request<false>(rows); }

    // Codes the rows, which are there.
    __device__ void code(const char *rows, KeyChannels<R> &channels) const {
        if (is_key) {
            // The mean of a block that has no row for it is 0.
            const uint32 column = p.mean_rows <= 1 ? j : j / p.mean_rows, at = j - column * p.mean_rows;
            const bool has_row = p.mean_rows > 0 && column < p.mean_columns;
            const int32 page = has_row ? request_page(p.mean_table, seq, column) : -1;
            const auto store_mean = [&](uint32 c, float sum) {
                if (page < 0 || uint32(page) >= p.mean_pages) return 0.0f;
                const float mean = __fdiv_rn(sum, float(p.block));
                char *const means = layer.means + page * p.means[0] + at * p.means[1] + head * p.means[2];
                store_number(means + c * p.means[3], p.mean_type, mean);
                return round_number(mean, p.mean_type);
            };
            const bool all_moderate = find_means<R>(rows, p.block, p.dtype, layer.weights, threadIdx.x, blockDim.x, channels, store_mean);
            if (!__syncthreads_and(all_moderate)) {
                const Tokens to = coded();
                if (threadIdx.x < WARP)
                    code_extreme_keys<R>(rows, p.block, p.dtype, p.factor, channels,
                                         [&](uint32 t, char *&codes, char *&scale) { place<true>(to, t, codes, scale); });
                return;
            }
        }
        const uint32 t = threadIdx.x / R::LANES;
        if (t >= p.block) return;
        const char *const row = rows + t * R::PITCH;
        const auto find_place = [&](char *&codes, char *&scale) {
            asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(codes), "=l"(scale) : "r"(shared_address(row) + R::PITCH - 16) : "memory");
        };
        code_row<R>(row, threadIdx.x % R::LANES, p.dtype, is_key, layer.weights, is_key ? p.factor : p.value_factor, channels, find_place);
    }
};

constexpr uint32 LANES = 2;  // neighbouring threads that have a row

template <uint32 DIM> __device__ inline void quantize(const QuantizeParams &p) {
    using R = Rows<DIM, LANES>;
    extern __shared__ __align__(16) char rows[];
    __shared__ KeyChannels<R> channels;
    const uint32 head = blockIdx.x % p.heads, half = blockIdx.x / p.heads, list = half / 2;
    const uint32 slice = list % p.slices, seq = list / p.slices % p.batch, number = list / p.slices / p.batch;
    const LayerData &layer = p.layer[number];

    const Blocks blocks(p, seq);
    if (slice == 0 && head == 0 && number == 0 && half % 2 == 0 && threadIdx.x == 0) blocks.store_length(p, seq);
    uint32 j = blocks.first + slice;
    if (j >= blocks.last) return;

    if (layer.weights)
        for (uint32 c = threadIdx.x; c < DIM; c += blockDim.x)
            channels.set_weight(c, weight_of(as<float>(layer.weights + head * p.weights[0] + c * p.weights[1])));
    // Keys go to the first half of the rows, values to the second.
    bool is_key = half % 2 == 0;
    const auto part = [&](uint32 j, bool is_key) { return Work<R>{p, layer, seq, head, j, is_key}; };
    const auto place = [&](bool is_key) { return rows + (is_key ? 0 : p.block * R::PITCH); };
    bool has_pages = part(j, is_key).request(shared_address(place(is_key)));
    end_copies();
#pragma unroll 1
    for (; j < blocks.last; j += p.slices, is_key = !is_key) {
        bool next_has_pages = true;
        if (j + p.slices < blocks.last) next_has_pages = part(j + p.slices, !is_key).request(shared_address(place(!is_key)));
        end_copies();
        wait_copies<1>();
        if (__syncthreads_and(has_pages)) part(j, is_key).code(place(is_key), channels);
        __syncthreads();
        has_pages = next_has_pages;
    }
}

extern "C" __global__ void __launch_bounds__(640, 1) kv_quantize_64(const __grid_constant__ QuantizeParams p) { quantize<64>(p); }
extern "C" __global__ void __launch_bounds__(640, 1) kv_quantize_128(const __grid_constant__ QuantizeParams p) { quantize<128>(p); }
