// Attention to keys and values in INT4 of 128 channels (variant int4_128): up to 16 rows of a KV head and list.
//
//   key = mean + w∘(H·(s·(c − 7.5))),  value = H·(s·(c − 7.5)),  H: Hadamard's matrix, symmetric and its own inverse
//   q·key = q·mean + s·(Σ t_c·c − 7.5·Σ t_c) with t = H·(w∘q), which is made once a CTA, in float16, divided by a power of two a row
//   Σ p·value = H·Σ p·s·(c − 7.5): the sum is turned back in registers, once a warp
//
// The first tokens of a sequence and its newest ones are of 16 bits. Coded tiles come first; then the sum is turned, and tiles of 16 bits follow
// as in attention/decode128.cuh, whose rows, joins and results these are, too. Kernels attention_int4_128_<type>_4 and _8 take up to four and eight
// rows (rows8.cuh), _16 nine to sixteen (rows16.cuh).
//
// Bytes: 130 a token and KV head, and 2·D for the mean of each block. Which channel is which of a product's is free as long as both operands
// agree, so that lanes take codes from where they lie.
//
// A code is float16 without arithmetic: its four bits are those of a subnormal number.
//
// How a row's tokens are split depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention_int4/rows16.cuh"
#include "attention_int4/rows8.cuh"

// Where a tile lies: its first token, −1 where no row sees the tile; page and row, of coded tiles among the pages of codes; the page of its block's
// mean, −1 where there is none.
struct alignas(16) LocatedTile {
    int32 position, page;
    uint32 row;
    int32 mean_page;
};
// What a warp keeps in shared memory, where registers are short: where its next 32 tiles lie, from tile `located` on, and what the lengths say.
struct Int4Kept {
    LocatedTile tiles[WARP];
    uint32 located, fully_seen, exact;  // bit n: tile n is seen by all rows; is not coded
    Reach reach;
    int32 end_of_coded, seen_begin, seen_end;
    uint32 entries, count;  // of the list; tiles of the warp
    // Tiles that are not coded: the first one, which is requested early; bit n: of 32 tiles from 32n on some are not, the last bit stands for all later ones.
    uint32 early_exact, exact_batches;
    uint32 unused[2];
};
static_assert(sizeof(Int4Kept) == KEPT_BYTES);
// Reads a word of shared memory now: the compiler keeps it in no register for later.
template <typename T> __device__ inline T read_kept(const T &x) {
    uint32 bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(shared_address(&x)) : "memory");
    return T(bits);
}

// One CTA. Its phases: request_first_tiles, stream_coded_tiles, attend_exact_tiles; then the join of the form.
template <typename Form>
struct Int4Decode128 {
    using Compute = typename Form::Compute;
    using Queries = Rows16Queries<Compute::QUERY_PITCH>;
    using Join = typename Form::Join;
    static constexpr uint32 STAGES = Form::STAGES, RING = STAGES * sizeof(CodedPair), EXACT_STAGE = sizeof(TokenInfo) + 2 * TILE * Compute::PITCH;
    static_assert(Form::EXACT_IS_APART || RING >= EXACT_STAGE);
    static constexpr uint32 QUERY_ROWS = 16;  // that Queries copies
    static constexpr uint32 NONE = ~0u;

    const Int4Params &p;
    Compute compute;
    uint32 lane;
    // The warp's memory: the ring, in its place or behind it a tile that is not coded, and what is kept.
    CodedPair *ring;
    char *exact_stage;
    Int4Kept &kept;
    // Where the lane copies from, in page 0 and row 0.
    const char *key, *value, *k_scale, *v_scale, *mean;
    // The cursor over coded tiles: those of the kept ones that are not requested yet.
    uint32 ahead;
    int32 requested_block;             // of the coded tile that was requested last
    int32 weights[4];                  // of channels 4·lane … 4·lane + 3; where there are none, any words
    uint32 is_fully_seen, has_second;  // bit n: every row sees all of stage n; it has two tiles

    __device__ Int4Decode128(const Int4Params &p, const WorkItem &item, char *shared)
        : p(p), compute(p.to, shared), lane(compute.lane), ring(reinterpret_cast<CodedPair *>(shared + compute.warp * Form::WARP_BYTES)),
          exact_stage(reinterpret_cast<char *>(ring) + (Form::EXACT_IS_APART ? RING : 0)),
          kept(*reinterpret_cast<Int4Kept *>(shared + (compute.warp + 1) * Form::WARP_BYTES - sizeof(Int4Kept))) {
        key = pin_in_register(p.k.at(0, lane / 4, item.head) + lane % 4 * 16);
        value = pin_in_register(p.v.at(0, lane / 4, item.head) + lane % 4 * 16);
        k_scale = pin_in_register(p.k_scale.at(0, 0, item.head));
        v_scale = pin_in_register(p.v_scale.at(0, 0, item.head));
        mean = pin_in_register(p.means.at(0, 0, item.head) + lane % TILE * 16);
    }
    // Found anew where it is needed, and in no register between.
    __device__ WorkItem item() const { return work_item_of(p.to, p.to.ctas.divide(pin_in_register(blockIdx.x))); }
    // The warp's first unit, and from one to the next.
    __device__ uint32 first_unit() const {
        const uint32 block = pin_in_register(blockIdx.x);
        return threadIdx.x / WARP * p.to.ctas.value + block - p.to.ctas.divide(block) * p.to.ctas.value;
    }
    __device__ uint32 unit_step() const { return p.to.ctas.value * WARPS; }

    // Entries of tiles `tile` … `tile` + 31, a lane each.
    struct Entries {
        int32 id, previous;
        uint32 entry, within;
        bool is_requested;
    };
    // Requests them before the length of their list is known.
    __device__ Entries request_entries(const WorkItem &item, uint32 tile) const {
        const AttentionParams &to = p.to;
        const uint32 mine = tile + lane, unit = to.unit_tiles.divide(mine);
        const uint32 number = (first_unit() + unit * unit_step()) * to.unit_tiles.value + mine - unit * to.unit_tiles.value, x = number * TILE;
        Entries found;
        found.entry = to.block.divide(x);
        found.within = x - found.entry * to.block.value;
        found.is_requested = number < to.most_units && (!to.ids.data || found.entry < to.list_capacity);
        const bool is_listed = found.is_requested && to.ids.data;
        const char *const length = to.seq_lens.at(item.seq), *const at = is_listed ? to.ids.at(item.seq, item.position, item.head, found.entry) : length;
        found.id = load_word(at);
        found.previous = load_word(is_listed && found.entry ? at - to.ids.step[3] : length);
        return found;
    }
    __device__ void request_first_tiles(const WorkItem &item, const Queries &queries) {
        const AttentionParams &to = p.to;
        const Entries found = request_entries(item, 0);
        const char *const at = to.seq_lens.at(item.seq);
        const int32 length = load_word(at), rows_seen = load_word(to.q_lens.data ? to.q_lens.at(item.seq) : at);
        const int32 listed = load_word(to.ids.data ? to.counts.at(item.seq, item.position, item.head) : at), coded_len = load_word(p.coded_lens.at(item.seq));
        queries.request();
#pragma unroll
        for (uint32 n = 0; n < 4; n++) weights[n] = load_word(p.weights.data ? p.weights.at(item.head, lane * 4 + n) : at);
        requested_block = -1;
        const Reach reach = Reach::of(to, item, clamped(length, to.token_capacity), to.q_lens.data ? clamped(rows_seen, to.positions) : to.positions);
        const uint32 entries = to.ids.data ? clamped(listed, to.list_capacity) : 0, tiles = units_of(to, reach, entries), first = first_unit();
        const uint32 units = to.unit_tiles.divide(tiles + to.unit_tiles.value - 1);
        const bool has_rows = to.own_lists || reach.queries == int32(to.positions);
        if (lane == 0) {
            kept.reach = reach;
            kept.end_of_coded = coded_end(p, coded_len, reach.length);
            kept.seen_end = to.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
            kept.seen_begin = to.window ? max((to.own_lists ? reach.end : reach.length) - int32(to.window), 0) : 0;
            kept.entries = entries;
            kept.early_exact = NONE;
            kept.exact_batches = 0;
            kept.count = units > first ? ((units - first - 1) / unit_step() + 1) * to.unit_tiles.value : 0;
        }
        __syncwarp();
        is_fully_seen = has_second = 0;
        locate(item, 0, found);
    }
    // Finds where 32 tiles lie, for the cursor.
    __device__ void locate(const WorkItem &item, uint32 from, const Entries &found) {
        const AttentionParams &to = p.to;
        const Reach reach = kept.reach;
        const int32 block = to.block.value;
        const int64 at = (to.ids.data ? offset(found.id, block) : (reach.begin & ~int32(TILE - 1)) + offset(found.entry, block)) + found.within;
        bool exists = found.is_requested && from + lane < kept.count && at < reach.end && at + TILE > reach.begin;
        if (to.ids.data) exists &= found.entry < kept.entries && found.id >= 0 && (found.entry == 0 || found.id != found.previous);
        const uint32 token = exists ? uint32(at) : 0;
        bool is_coded = exists && ::is_coded(p, token, kept.end_of_coded);
        const View<2> &table = is_coded ? p.table : to.table;
        const uint32 number = !table.data ? 0 : is_coded ? p.page.divide(token) : to.page.divide(token);
        const uint32 mean_number = p.mean_table.data ? p.mean_rows.divide(p.block.divide(token)) : 0;
        const bool has_mean = is_coded && mean_number < p.most_mean_pages && p.block.divide(token) - mean_number * p.mean_rows.value < p.mean_rows.value;
        const char *const nothing = to.seq_lens.at(item.seq);
        int32 page = load_word(exists && table.data ? table.at(item.seq, number) : nothing);
        int32 mean_page = load_word(has_mean && p.mean_table.data ? p.mean_table.at(item.seq, mean_number) : nothing);
        if (!table.data) page = item.seq;
        if (!p.mean_table.data) mean_page = item.seq;
        if (!has_mean || uint32(mean_page) >= p.mean_pages) mean_page = -1;
        exists &= uint32(page) < (is_coded ? p.pages : to.pages);
        is_coded &= exists;
        kept.tiles[lane] = {exists ? int32(token) : -1, page, token - number * (is_coded ? p.page.value : to.page.value), mean_page};
        const uint32 fully_seen = __ballot_sync(FULL_WARP, exists && int32(token) >= kept.seen_begin && int32(token + TILE) <= kept.seen_end);
        ahead = __ballot_sync(FULL_WARP, is_coded);
        const uint32 exact = __ballot_sync(FULL_WARP, exists && !is_coded);
        if (lane == 0) {
            kept.located = from;
            kept.fully_seen = fully_seen;
            kept.exact = exact;
        }
        __syncwarp();
        if (exact) note_exact(item, from, exact);
    }
    __device__ void note_exact(const WorkItem &item, uint32 located, uint32 exact) {
        // Where it lies in the place of the ring, the ring must not be needed any more.
        const bool is_early = kept.early_exact == NONE && (Form::EXACT_IS_APART || !ahead && !located && WARP >= kept.count);
        const uint32 from = __ffs(exact) - 1;
        __syncwarp();
        if (lane == 0) {
            kept.exact_batches |= 1u << min(located / WARP, 31u);
            if (is_early) kept.early_exact = located + from;
        }
        __syncwarp();
        if (!is_early) return;
        request_exact(item, from);
        end_copies();
    }
    // Moves the cursor to a coded tile that is not requested yet; false where none is left.
    __device__ bool find_next() {
        while (!ahead) {
            const uint32 next = read_kept(kept.located) + WARP;
            if (next >= read_kept(kept.count)) return false;
            const WorkItem item = this->item();
            __syncwarp();
            locate(item, next, request_entries(item, next));
        }
        return true;
    }
    // Takes the tile at the cursor, of those that are kept.
    __device__ LocatedTile take() {
        const uint32 from = __ffs(ahead) - 1;
        ahead &= ahead - 1;
        return kept.tiles[from];
    }
    // Requests keys and values of one tile of a pair.
    __device__ void request_codes(CodedPair &pair, uint32 second, const LocatedTile &tile) const {
        const int32 k_row = p.k.step[1], v_row = p.v.step[1];
        const char *const from_key = key + offset(tile.page, int32(p.k.step[0])) + offset(tile.row, k_row);
        const char *const from_value = value + offset(tile.page, int32(p.v.step[0])) + offset(tile.row, v_row);
        const uint32 keys = shared_address(pair.keys) + second * (TILE * CodedPair::KEY_PITCH) + lane * 16;
        const uint32 values = shared_address(pair.values) + second * (TILE * CodedPair::VALUE_PITCH) + lane / 4 * CodedPair::VALUE_PITCH + lane % 4 * 16;
        static_assert(CodedPair::KEY_PITCH == 4 * 16);
        const bool whole_line = !p.to.ids.data;
        copy_codes(keys, from_key, whole_line);
        copy_codes(keys + 8 * CodedPair::KEY_PITCH, from_key + 8 * int64(k_row), whole_line);
        copy_codes(values, from_value, whole_line);
        copy_codes(values + 8 * CodedPair::VALUE_PITCH, from_value + 8 * int64(v_row), whole_line);
    }
    // Requests the scales of the pair's tokens and the means of its tiles: a lane has a token of each kind, and a part of its tile's mean.
    __device__ void request_scales(CodedPair &pair, const LocatedTile &tile, bool is_there) {
        const uint32 token = lane % TILE, block = p.block.divide(tile.position);
        const auto request = [&](uint32 n, const View<3> &scales) {
            const char *const from = (n ? v_scale : k_scale) + offset(tile.page, int32(scales.step[0])) + offset(tile.row + token, int32(scales.step[1]));
            const uint32 shift = uint32(uint64(from)) % 4;
            copy_4(shared_address(&pair.scale[n][lane]), from - shift, is_there);
            pair.scale_shift[n][lane] = shift * 8;
        };
        request(0, p.k_scale);
        request(1, p.v_scale);
        const uint32 mean_row = p.mean_table.data ? block - p.mean_rows.divide(block) * p.mean_rows.value : block;
        const bool has_mean = tile.mean_page >= 0;
        // Products with the mean of the tile before are known by then.
        const int32 first_block = __shfl_sync(FULL_WARP, block, 0), before = lane < TILE ? requested_block : first_block;
        requested_block = __shfl_sync(FULL_WARP, block, TILE);
        if (int32(block) != before) copy_16(shared_address(pair.mean[0]) + lane * 16, mean + (has_mean ? offset(tile.mean_page, int32(p.means.step[0])) + offset(mean_row, int32(p.means.step[1])) : 0), has_mean);
        if (token == 0) pair.block[lane / TILE] = block;
    }
    // Requests a tile that is not coded.
    __device__ void request_exact(const WorkItem &item, uint32 from) {
        const AttentionParams &to = p.to;
        const LocatedTile tile = kept.tiles[from];
        const char *const from_key = to.k.at(tile.page, tile.row + lane / 8, item.head) + lane % 8 * 16;
        const char *const from_value = to.v.at(tile.page, tile.row + lane / 8, item.head) + lane % 8 * 16;
        load_tile<Compute>(lane, exact_stage, keys_of_lane<Compute>(exact_stage, lane), from_key, from_value, int32(to.k.step[1]), int32(to.v.step[1]),
                           kept.fully_seen >> from & 1, kept.reach, [&] { return tile.position; });
    }

    // The ring turns: the oldest pair is attended to, the next one requested in its place. At first all stages are requested.
    __device__ void stream_coded_tiles() {
        uint32 in_flight = 0;
#pragma unroll 1
        for (uint32 step = 0, at = 0;; step++, at = at + 1 == STAGES ? 0 : at + 1) {
            if (step >= STAGES) {
                if (step == STAGES) open_queries();
                if (!in_flight) break;
                wait_copies<STAGES - 1>();
                __syncwarp();
                if (!(is_fully_seen >> at & 1)) compute.read_reach(item(), kept.reach, 0);
                compute.attend_coded(ring[at], shared_address(plain()), turned(), is_fully_seen >> at & 1, has_second >> at & 1);
                __syncwarp();
                in_flight--;
            }
            in_flight += request_pair(at);
        }
        if (compute.mean_of >= 0) compute.turn_acc();
    }
    // Requests the next two coded tiles, or the last one, as a stage of the ring; in any case it ends a group of copies. Returns whether there was one.
    __device__ uint32 request_pair(uint32 at) {
        CodedPair &pair = ring[at];
        uint32 count = 0;
        LocatedTile own;
        is_fully_seen |= 1u << at;
#pragma unroll 1
        for (; count < 2 && find_next(); count++) {
            if (!(read_kept(kept.fully_seen) >> (__ffs(ahead) - 1) & 1)) is_fully_seen &= ~(1u << at);
            const LocatedTile tile = take();
            if (count <= lane / TILE) own = tile;
            request_codes(pair, count, tile);
        }
        if (count) {
            // A second tile that is not there has no scales, and the mean of the first.
            bool is_there = lane / TILE < count;
            if (!(is_fully_seen >> at & 1)) {
                const int32 position = own.position + int32(lane % TILE);
                is_there &= position >= kept.reach.begin && position < kept.reach.end;
                pair.position[lane] = is_there ? position : -1;
            }
            request_scales(pair, own, is_there);
        }
        has_second = (has_second & ~(1u << at)) | (count >> 1) << at;
        end_copies();
        return count != 0;
    }
    // Queries as they are, behind them turned ones.
    __device__ char *plain() const {
        extern __shared__ __align__(128) char shared[];
        return shared + WARPS * Form::WARP_BYTES;
    }
    __device__ char *turned() const { return plain() + QUERY_ROWS * Compute::QUERY_PITCH; }
    __device__ void open_queries() {
        Queries::arrival().wait(0);
        float w[4];
#pragma unroll
        for (uint32 n = 0; n < 4; n++) w[n] = p.weights.data ? valid_weight(__int_as_float(weights[n])) : 1.0f;
        TurnedQueries::turn<Form::ROWS>(p, w, plain(), Compute::QUERY_PITCH, turned());
        __syncthreads();
        compute.turned_to_registers(turned());
    }

    __device__ void attend_exact_tiles() {
        const uint32 count = read_kept(kept.count), exact_batches = read_kept(kept.exact_batches);
        if (exact_batches) {
            compute.read_reach(item(), kept.reach, 0);
            compute.queries_to_registers(shared_address(plain()));
        }
#pragma unroll 1
        for (uint32 begin = 0; exact_batches && begin < count; begin += WARP) {
            if (!(exact_batches >> min(begin / WARP, 31u) & 1)) continue;
            const WorkItem item = this->item();
            if (begin != read_kept(kept.located)) locate(item, begin, request_entries(item, begin));
#pragma unroll 1
            for (uint32 exact = read_kept(kept.exact); exact; exact &= exact - 1) {
                const uint32 from = __ffs(exact) - 1;
                if (begin + from != read_kept(kept.early_exact)) {
                    request_exact(item, from);
                    end_copies();
                }
                wait_copies<0>();
                __syncwarp();
                compute.attend(exact_stage, read_kept(kept.fully_seen) >> from & 1);
                __syncwarp();
            }
        }
        if (count) compute.finish();
    }
};

template <typename Form>
__device__ inline void attention_int4_128(const Int4Params &p) {
    using Cta = Int4Decode128<Form>;
    extern __shared__ __align__(128) char shared[];
    __shared__ typename Cta::Join::Shared states;
    __shared__ uint32 words[WARP];
    Cta::Queries::open();
    const uint32 word = request_parameters(p);
    if (threadIdx.x < WARP) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(words + threadIdx.x)), "r"(word) : "memory");
    const uint32 number = p.to.ctas.divide(blockIdx.x), ctas = p.to.ctas.value;
    Cta cta(p, work_item_of(p.to, number), shared);
    {
        const WorkItem item = work_item_of(p.to, number);
        const typename Cta::Queries queries(p.to, item, 0, cta.plain());
        __syncthreads();  // the queries' barrier is open
        allow_next_kernel();
        wait_for_previous_kernel();
        cta.request_first_tiles(item, queries);
    }
    cta.stream_coded_tiles();
    cta.attend_exact_tiles();
    const WorkItem item = cta.item();
    typename Cta::Join join(p.to, item, states, shared, ctas, blockIdx.x - number * ctas, number);
    join.join_and_write(cta.compute, item, false, 0, 0);
}

#define INT4_KERNEL(name, ...)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, __VA_ARGS__::CTAS) name(const __grid_constant__ Int4Params p) {            \
        attention_int4_128<__VA_ARGS__>(p);                                                                                          \
    }
