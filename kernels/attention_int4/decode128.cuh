// Attention to keys and values in INT4 of 128 channels (variant int4_128): up to 16 rows of a KV head and list at a time.
//
//   key = mean + w∘(H·(s·(c − 7.5))),  value = H·(s·(c − 7.5)),  H: Hadamard's matrix, symmetric and its own inverse
//   q·key = q·mean + s·(Σ t_c·c − 7.5·Σ t_c) with t = H·(w∘q), which is made once a CTA, divided by a power of two a row, in float16 or, of up to
//           four rows, in 15 bits
//   Σ p·value = H·Σ p·s·(c − 7.5): the sum is turned back in registers, once a warp
//
// The first tokens of a sequence and its newest ones are of 16 bits. Coded tiles come first; then the sum is turned, and tiles of 16 bits follow
// through the same ring, as in attention/decode128.cuh, whose rows, joins and results these are, too. Kernels attention_int4_128_<type>_4 and _8 take up to four and eight
// rows (rows4.cuh, rows8.cuh), _16 nine to sixteen (rows16.cuh).
//
// Bytes: 130 a token and KV head, and 2·D for the mean of each block. Which channel is which of a product's is free as long as both operands
// agree, so that lanes take codes from where they lie.
//
// Machine instructions cost more time than bytes do. So up to four tiles that lie side by side in a block are a group, which is requested, scaled and
// attended to together, and codes are operands as they lie in their byte: as float16 four bits are a subnormal number. 64 tokens take a
// warp some 900 instructions, of up to four rows 750.
//
// How a row's tokens are split depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention_int4/rows16.cuh"
#include "attention_int4/rows4.cuh"

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
    // Bit n: tile n is seen by all rows; is coded; is not; is coded, and so is the next one, which lies behind it and is of the same block.
    uint32 located, fully_seen, coded, exact, joined;
    Reach reach;
    int32 end_of_coded, seen_begin, seen_end;
    uint32 entries, count;  // of the list; tiles of the warp
    uint32 exact_batches;   // bit n: of 32 tiles from 32n on some are not coded, the last bit stands for all later ones
    uint32 unused;
};
static_assert(sizeof(Int4Kept) == KEPT_BYTES);
// Reads a word of shared memory now: the compiler keeps it in no register for later.
template <typename T> __device__ inline T read_kept(const T &x) {
    uint32 bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(shared_address(&x)) : "memory");
    return T(bits);
}

// One CTA. Its phases: request_first_tiles, stream_tiles; then the join of the form.
template <typename Form>
struct Int4Decode128 {
    using Compute = typename Form::Compute;
    using Queries = Rows16Queries<Compute::QUERY_PITCH>;
    using Join = typename Form::Join;
    static constexpr uint32 STAGES = Form::STAGES;
    static_assert(sizeof(CodedGroup) >= sizeof(TokenInfo) + 2 * TILE * Compute::PITCH);
    static constexpr uint32 QUERY_ROWS = 16;  // that Queries copies
    // What is in a stage: nothing, so many coded tiles, or one that is not coded; IS_SEEN: every row sees all of it.
    static constexpr uint32 EXACT = CodedGroup::TILES + 1, KIND = 7, IS_SEEN = 8, STAGE_BITS = 4;

    const Int4Params &p;
    Compute compute;
    uint32 lane;
    // The warp's memory: the ring, and what is kept.
    CodedGroup *ring;
    Int4Kept &kept;
    // Where the lane copies from, in page 0 and row 0.
    const char *key, *value, *k_scale, *v_scale, *mean;
    // The cursor over tiles: those of the kept ones that are not requested yet, all of one kind, and the first tile that is not located.
    uint32 ahead, next;
    bool takes_exact;       // coded tiles come first
    int32 requested_block;  // of the coded tiles that were requested last
    int32 weights[4];       // of channels 4·lane … 4·lane + 3; where there are none, any words
    uint32 stages;          // what is in each, from the lowest bits on

    __device__ Int4Decode128(const Int4Params &p, const WorkItem &item, char *shared)
        : p(p), compute(p.to, shared), lane(compute.lane), ring(reinterpret_cast<CodedGroup *>(shared + compute.warp * Form::WARP_BYTES)),
          kept(*reinterpret_cast<Int4Kept *>(shared + (compute.warp + 1) * Form::WARP_BYTES - sizeof(Int4Kept))), ahead(0), next(0), takes_exact(false),
          requested_block(-1), stages(0) {
        key = pin_in_register(p.k.at(0, lane / 4, item.head) + lane % 4 * 16);
        value = pin_in_register(p.v.at(0, lane / 4, item.head) + lane % 4 * 16);
        k_scale = pin_in_register(p.k_scale.at(0, lane, item.head));
        v_scale = pin_in_register(p.v_scale.at(0, lane, item.head));
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

    // Entries of tiles `tile` … `tile` + 31, a lane each: where they are read, before the length of their list is known, and what is there.
    struct Entries {
        const char *id_at, *previous_at;
        int32 id, previous;
        uint32 entry, within;
        bool is_requested;

        __device__ void request() {
            id = load_word(id_at);
            previous = load_word(previous_at);
        }
    };
    __device__ Entries find_entries(const WorkItem &item, uint32 tile) const {
        const AttentionParams &to = p.to;
        const uint32 mine = tile + lane, unit = to.unit_tiles.divide(mine);
        const uint32 number = (first_unit() + unit * unit_step()) * to.unit_tiles.value + mine - unit * to.unit_tiles.value, x = number * TILE;
        Entries found;
        found.entry = to.block.divide(x);
        found.within = x - found.entry * to.block.value;
        found.is_requested = number < to.most_units && (!to.ids.data || found.entry < to.list_capacity);
        const bool is_listed = found.is_requested && to.ids.data;
        const char *const length = to.seq_lens.at(item.seq);
        found.id_at = pin_in_register(is_listed ? to.ids.at(item.seq, item.position, item.head, found.entry) : length);
        found.previous_at = pin_in_register(is_listed && found.entry ? found.id_at - to.ids.step[3] : length);
        return found;
    }
    // Asks the L2 cache for what the CTA reads first: each warp for its entries, the first ones also for lengths and for 32 lines of the page tables.
    __device__ void prefetch_first_reads(const WorkItem &item, const Entries &found) const {
        const AttentionParams &to = p.to;
        if (to.ids.data) prefetch(found.id_at);
        const uint32 warp = threadIdx.x / WARP, number = lane * (128 / sizeof(int32));
        if (warp == 0) {
            if (p.table.data && uint64(number) * p.page.value < p.token_capacity) prefetch(p.table.at(item.seq, number));
            if (lane == 0) prefetch(to.seq_lens.at(item.seq));
            if (lane == 1) prefetch(p.coded_lens.at(item.seq));
            if (lane == 2 && to.ids.data) prefetch(to.counts.at(item.seq, item.position, item.head));
            if (lane == 3 && to.q_lens.data) prefetch(to.q_lens.at(item.seq));
            if (lane >= 4 && lane < 8 && p.weights.data) prefetch(p.weights.at(item.head, number % 128));
        } else if (warp == 1) {
            if (p.mean_table.data && number < p.most_mean_pages) prefetch(p.mean_table.at(item.seq, number));
        } else if (warp == 2) {
            if (to.table.data && uint64(number) * to.page.value < to.token_capacity) prefetch(to.table.at(item.seq, number));
        }
    }
    __device__ void request_first_tiles(const WorkItem &item, const Queries &queries, Entries &found) {
        const AttentionParams &to = p.to;
        found.request();
        const char *const at = to.seq_lens.at(item.seq);
        const int32 length = load_word(at), rows_seen = load_word(to.q_lens.data ? to.q_lens.at(item.seq) : at);
        const int32 listed = load_word(to.ids.data ? to.counts.at(item.seq, item.position, item.head) : at), coded_len = load_word(p.coded_lens.at(item.seq));
        queries.request();
#pragma unroll
        for (uint32 n = 0; n < 4; n++) weights[n] = load_word(p.weights.data ? p.weights.at(item.head, lane * 4 + n) : at);
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
            kept.exact_batches = 0;
            kept.count = units > first ? ((units - first - 1) / unit_step() + 1) * to.unit_tiles.value : 0;
        }
        __syncwarp();
        locate(item, 0, found);
    }
    // Finds where 32 tiles lie.
    __device__ void locate(const WorkItem &item, uint32 from, const Entries &found) {
        const AttentionParams &to = p.to;
        const Reach reach = kept.reach;
        const int32 block = to.block.value;
        const int64 at = (to.ids.data ? offset(found.id, block) : (reach.begin & ~int32(TILE - 1)) + offset(found.entry, block)) + found.within;
        bool exists = found.is_requested && from + lane < kept.count && at < reach.end && at + TILE > reach.begin;
        if (to.ids.data) exists &= found.entry < kept.entries && found.id >= 0 && (found.entry == 0 || found.id != found.previous);
        const uint32 token = exists ? uint32(at) : 0;
        const char *const nothing = to.seq_lens.at(item.seq);
        // Slots count pages of codes after the others.
        const bool in_slots = to.slots.data;
        const uint32 slot = load_word(in_slots && exists ? to.slots.at(item.seq, item.position, item.head, found.entry) : nothing);
        bool is_coded = exists && (in_slots ? slot >= to.pages : ::is_coded(p, token, kept.end_of_coded));
        const View<2> &table = is_coded ? p.table : to.table;
        const uint32 number = !table.data && !in_slots ? 0 : is_coded ? p.page.divide(token) : to.page.divide(token);
        const uint32 mean_number = p.mean_table.data ? p.mean_rows.divide(p.block.divide(token)) : 0;
        const bool has_mean = in_slots ? is_coded : is_coded && mean_number < p.most_mean_pages && p.block.divide(token) - mean_number * p.mean_rows.value < p.mean_rows.value;
        int32 page = load_word(exists && table.data ? table.at(item.seq, number) : nothing);
        int32 mean_page = load_word(has_mean && p.mean_table.data ? p.mean_table.at(item.seq, mean_number) : nothing);
        if (!table.data) page = item.seq;
        if (!p.mean_table.data) mean_page = item.seq;
        if (in_slots) mean_page = page = slot - (is_coded ? to.pages : 0);
        if (!has_mean || uint32(mean_page) >= p.mean_pages) mean_page = -1;
        exists &= uint32(page) < (is_coded ? p.pages : to.pages);
        is_coded &= exists;
        kept.tiles[lane] = {exists ? int32(token) : -1, page, token - number * (is_coded ? p.page.value : to.page.value), mean_page};
        const uint32 fully_seen = __ballot_sync(FULL_WARP, exists && int32(token) >= kept.seen_begin && int32(token + TILE) <= kept.seen_end);
        const uint32 coded = __ballot_sync(FULL_WARP, is_coded), exact = __ballot_sync(FULL_WARP, exists && !is_coded);
        // A tile that is not there has no token that follows.
        const uint32 follows = exists ? token + TILE : ~0u, after = __shfl_down_sync(FULL_WARP, exists ? token : 0, 1);
        const bool is_joined = after == follows && number == (is_coded ? p.page : to.page).divide(follows) && p.block.divide(follows) == p.block.divide(token);
        const uint32 joined = __ballot_sync(FULL_WARP, is_joined) & coded & coded >> 1;
        if (lane == 0) {
            kept.located = from;
            kept.fully_seen = fully_seen;
            kept.coded = coded;
            kept.exact = exact;
            kept.joined = joined;
            if (exact) kept.exact_batches |= 1u << min(from / WARP, 31u);
        }
        __syncwarp();
    }
    // Moves the cursor to a tile that is not requested yet; false where none is left.
    __device__ bool find_next() {
        while (!ahead) {
            const uint32 count = read_kept(kept.count);
            if (!takes_exact && next >= count) {
                takes_exact = true;
                next = 0;
            }
            if (takes_exact) {
                const uint32 batches = read_kept(kept.exact_batches);
                while (next < count && !(batches >> min(next / WARP, 31u) & 1)) next += WARP;
                if (next >= count) return false;
            }
            if (next != read_kept(kept.located)) {
                const WorkItem item = this->item();
                __syncwarp();
                Entries found = find_entries(item, next);
                found.request();
                locate(item, next, found);
            }
            ahead = read_kept(takes_exact ? kept.exact : kept.coded);
            next += WARP;
        }
        return true;
    }
    // Requests keys and values of `count` tiles.
    __device__ void request_codes(CodedGroup &group, uint32 count, const LocatedTile &tile) const {
        const int32 k_row = p.k.step[1], v_row = p.v.step[1];
        const char *from_key = key + offset(tile.page, int32(p.k.step[0])) + offset(tile.row, k_row);
        const char *from_value = value + offset(tile.page, int32(p.v.step[0])) + offset(tile.row, v_row);
        const uint32 keys = shared_address(group.keys) + lane * 16, values = shared_address(group.values) + CodedGroup::value_at(lane / 4, lane % 4);
        static_assert(CodedGroup::PITCH == 4 * 16);
        if (p.to.ids.data) copy_rows<false>(count, keys, values, from_key, from_value, k_row, v_row);
        else copy_rows<true>(count, keys, values, from_key, from_value, k_row, v_row);
    }
    // A row of codes is 64 bytes: what else is in its line of 128 is of another KV head, which reads it too where there are no lists.
    template <bool WHOLE_LINES>
    __device__ static void copy_rows(uint32 tiles, uint32 keys, uint32 values, const char *from_key, const char *from_value, int32 k_row, int32 v_row) {
        const auto copy = [](uint32 to, const char *from) {
            if constexpr (WHOLE_LINES) copy_16(to, from);
            else asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        };
#pragma unroll
        for (uint32 n = 0; n < CodedGroup::TILES * 2; n++) {
            if (n % 2 == 0 && n / 2 >= tiles) break;
            copy(keys + n * 8 * CodedGroup::PITCH, from_key);
            copy(values + n * 8 * CodedGroup::PITCH, from_value);
            from_key += 8 * int64(k_row);
            from_value += 8 * int64(v_row);
        }
    }
    // Requests scales and mean of `count` tiles. Tokens that no row sees, and those that are not there, have the scale 0.
    __device__ void request_scales(CodedGroup &group, uint32 count, const LocatedTile &tile, bool is_seen) {
        const char *of_key = k_scale + offset(tile.page, int32(p.k_scale.step[0])) + offset(tile.row, int32(p.k_scale.step[1]));
        const char *of_value = v_scale + offset(tile.page, int32(p.v_scale.step[0])) + offset(tile.row, int32(p.v_scale.step[1]));
        const uint32 key_byte = uint32(uint64(of_key)) % 4, value_byte = uint32(uint64(of_value)) % 4;
        of_key -= key_byte;
        of_value -= value_byte;
        group.scale_bytes[lane] = key_byte | (4 + value_byte) << 4;
#pragma unroll
        for (uint32 n = 0; n < 2; n++) {
            const uint32 token = lane + n * WARP;
            bool is_there = token < count * TILE;
            if (!is_seen) {
                const int32 position = tile.position + int32(token);
                is_there &= position >= kept.reach.begin && position < kept.reach.end;
                group.position[token] = is_there ? position : -1;
            }
            const uint32 further = is_there ? n * WARP : 0;
            copy_4(shared_address(&group.scale[0][token]), of_key + offset(further, int32(p.k_scale.step[1])), is_there);
            copy_4(shared_address(&group.scale[1][token]), of_value + offset(further, int32(p.v_scale.step[1])), is_there);
        }
        const uint32 block = p.block.divide(tile.position);
        // Products with the mean of the group before are known by then.
        if (int32(block) != requested_block && lane < TILE) {
            const uint32 mean_row = p.to.slots.data ? 0 : p.mean_table.data ? block - p.mean_rows.divide(block) * p.mean_rows.value : block;
            const bool has_mean = tile.mean_page >= 0;
            copy_16(shared_address(group.mean) + lane * 16, mean + (has_mean ? offset(tile.mean_page, int32(p.means.step[0])) + offset(mean_row, int32(p.means.step[1])) : 0), has_mean);
        }
        requested_block = block;
        if (lane == 0) group.block = block;
    }
    // Requests a tile that is not coded.
    __device__ void request_exact(char *stage, const LocatedTile &tile, bool is_seen) const {
        const AttentionParams &to = p.to;
        const WorkItem item = this->item();
        const char *const from_key = to.k.at(tile.page, tile.row + lane / 8, item.head) + lane % 8 * 16;
        const char *const from_value = to.v.at(tile.page, tile.row + lane / 8, item.head) + lane % 8 * 16;
        load_tile<Compute>(lane, stage, keys_of_lane<Compute>(stage, lane), from_key, from_value, int32(to.k.step[1]), int32(to.v.step[1]), is_seen, kept.reach,
                           [&] { return tile.position; });
    }

    // The ring turns: the oldest stage is attended to, the next tiles requested in its place. At first all stages are requested.
    __device__ void stream_tiles() {
#pragma unroll 1
        for (uint32 step = 0, at = 0;; step++, at = at + 1 == STAGES ? 0 : at + 1) {
            if (step >= STAGES) {
                if (step == STAGES) open_queries();
                const uint32 stage = stages >> at * STAGE_BITS, kind = stage & KIND;
                const bool is_seen = stage & IS_SEEN, is_coded = kind != 0 && kind != EXACT;
                if (!is_coded && compute.mean_of >= 0) compute.turn_acc();
                if (!kind) break;
                wait_copies<STAGES - 1>();
                __syncwarp();
                if (!is_seen) compute.read_reach(item(), kept.reach, 0);
                if (is_coded) {
                    compute.attend_coded(ring[at], kind, shared_address(plain()), turned(), is_seen);
                } else {
                    compute.queries_to_registers(shared_address(plain()));
                    compute.attend(reinterpret_cast<const char *>(&ring[at]), is_seen);
                }
                __syncwarp();
            }
            request(at);
        }
        if (read_kept(kept.count)) compute.finish();
    }
    // Requests the next coded tiles that lie side by side, or the next tile that is not coded, as a stage of the ring; in any case it ends a group of
    // copies.
    __device__ void request(uint32 at) {
        uint32 stage = 0;
        if (find_next()) {
            const uint32 from = __ffs(ahead) - 1, fully_seen = read_kept(kept.fully_seen) >> from;
            const LocatedTile tile = kept.tiles[from];
            if (takes_exact) {
                ahead &= ahead - 1;
                stage = EXACT | (fully_seen & 1) * IS_SEEN;
                request_exact(reinterpret_cast<char *>(&ring[at]), tile, fully_seen & 1);
            } else {
                const uint32 count = min(uint32(__ffs(~(read_kept(kept.joined) >> from))), CodedGroup::TILES), mask = (1u << count) - 1;
                const bool is_seen = (fully_seen & mask) == mask;
                ahead &= ~(mask << from);
                stage = count | is_seen * IS_SEEN;
                request_codes(ring[at], count, tile);
                request_scales(ring[at], count, tile, is_seen);
            }
        }
        stages = (stages & ~((KIND | IS_SEEN) << at * STAGE_BITS)) | stage << at * STAGE_BITS;
        end_copies();
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
        Compute::Turned::template turn<Form::ROWS>(p, w, plain(), Compute::QUERY_PITCH, turned());
        __syncthreads();
        compute.turned_to_registers(turned());
    }
};

template <typename Form>
__device__ inline void attention_int4_128(const Int4Params &p) {
    using Cta = Int4Decode128<Form>;
    extern __shared__ __align__(128) char shared[];
    __shared__ typename Cta::Join::Shared states;
    __shared__ uint32 words[WARP];
    Cta::Queries::open();
    request_parameters(p, words);
    const uint32 number = p.to.ctas.divide(blockIdx.x), ctas = p.to.ctas.value;
    Cta cta(p, work_item_of(p.to, number), shared);
    {
        const WorkItem item = work_item_of(p.to, number);
        const typename Cta::Queries queries(p.to, item, 0, cta.plain());
        typename Cta::Entries found = cta.find_entries(item, 0);
        cta.prefetch_first_reads(item, found);
        queries.prefetch(0);
        __syncthreads();  // the queries' barrier is open
        allow_next_kernel();
        wait_for_previous_kernel();
        cta.request_first_tiles(item, queries, found);
    }
    cta.stream_tiles();
    const WorkItem item = cta.item();
    typename Cta::Join join(p.to, item, states, shared, ctas, blockIdx.x - number * ctas, number);
    join.join_and_write(cta.compute, item, false, 0, 0);
}

#define INT4_KERNEL(name, ...)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, __VA_ARGS__::CTAS) name(const __grid_constant__ Int4Params p) {            \
        attention_int4_128<__VA_ARGS__>(p);                                                                                          \
    }
