// Attention to keys and values of 128 channels (variant decode128): the common case of decoding, in which as much time passes before the
// first key is there and after the last as between.
//
//   out = Σ softmax(scale · q · k) v over a list of blocks, or over everything, of up to 16 rows (query heads and positions of a KV head)
//
// Runs where blocks are whole tiles of 16 tokens, which lie side by side or where a page table says, strides fit in 32 bits, and FP8 has no scale
// per token: src/ops/attention/device/choose.rs.
// Keys and values of 64 and of 256 channels in 16 bits are taken likewise (variants decode64, decode256), for up to eight rows.
// Kernels attention_decode128_<type>_4 and _8 take up to four and eight rows (decode128_rows8.cuh), _16 nine to sixteen (decode128_rows16.cuh).
//
// Bytes: each key and value once, 4 · D a token of 16 bits. A work item gets as many CTAs as can each have a multiprocessor. What does not depend
// on memory is computed before the kernel waits for the previous one, and parameters are read then, too.
//
//   warp w of CTA r ── units r + ctas · (w + warps · n): the number follows from no count, so that a warp requests the entries of its units
//                      before the length of their list is known
//   one round trip: the entries of all of a warp's tiles, lengths, counts ── one: pages, queries ── one: tiles
//   warps join in shared memory, a slice of the channels each ── slices of the CTAs join through scratch, in the warp that ends last
//
// Where partials are written and there are warps enough, 2^log_share warps share a unit, and none has a second one: the unit's state is
// known once the warps have joined. Elsewhere a warp has units of its own, and adds up their states (decode128_partials.cuh).
//
// How a row's tokens are split depends on its own list and on how many lists there are, and on nothing else.
#pragma once

#include "attention/decode128_rows16.cuh"
#include "attention/decode128_rows8.cuh"

// Stands for the term of a call that has none for what its lists leave out. With one, states begin with it (attention_remainder/decode128.cuh).
struct NoTerm {
    using Params = AttentionParams;
    static constexpr bool EXISTS = false;

    __device__ NoTerm(const AttentionParams &, const WorkItem &, uint32, char *) {}
    __device__ void prefetch_first_reads() const {}
    __device__ void request_row() {}
    __device__ void request() {}
};

// One CTA. Its phases: prefetch_first_reads, request_entries, stream_tiles, join_and_write.
template <typename Form, typename Term = NoTerm>
struct Decode128 {
    using Compute = typename Form::Compute;
    using Join = typename Form::Join;
    static constexpr uint32 STAGE = Form::STAGE;

    const AttentionParams &p;
    Compute compute;
    const WorkItem &item;
    uint32 ctas, rank, lane;  // CTAs of the work item, this CTA's place among them
    Join join;
    uint32 log_share, log_teams;  // 2^log_share warps are a team, which shares a unit; a CTA has 2^log_teams of them
    uint32 first, step_units;     // the warp's first unit, and from one to the next
    Decode128Tiles tiles;
    char *warp_memory;
    UnitTotal<Compute> total;
    typename Form::Queries queries;
    Term term;
    const char *q_len, *list_count;
    bool has_partials, adds_up_units;
    uint32 unit_tiles, stages;
    char *ring;
    // What the lengths say.
    Reach reach;
    uint32 units, count;               // of the work item; tiles of the warp
    int32 seen_begin, seen_end;        // tokens that every row sees
    uint32 fully_seen, is_fully_seen;  // bit n: of the 32 tiles that are located, tile n; of the stages, stage n

    // Finds every address that parameters alone decide.
    __device__ Decode128(const AttentionParams &p, const typename Term::Params &all, const WorkItem &item, uint32 number, uint32 ctas, char *shared,
                         typename Join::Shared &states)
        : p(p), compute(p, shared, 0), item(item), ctas(ctas), rank(blockIdx.x - number * ctas), lane(compute.lane), join(p, item, states, shared, ctas, rank, number), log_share(p.log_share),
          log_teams(LOG_WARPS - log_share), first((compute.warp >> log_share) * ctas + rank), step_units(ctas << log_teams),
          tiles(p, item, first, step_units, compute.warp & ((1 << log_share) - 1), RowCopies<Compute>::LANES), warp_memory(Form::warp_memory(p, shared, compute.warp)),
          total(warp_memory), queries(p, item, lane, Form::queries_memory(p, shared, warp_memory)), term(all, item, rank, shared),
          q_len(pin_in_register(p.q_lens.data ? p.q_lens.at(item.seq) : tiles.length)),
          list_count(pin_in_register(p.ids.data ? p.counts.at(item.seq, item.position, item.head) : tiles.length)),
          has_partials(!Term::EXISTS && p.partials.acc.data), adds_up_units(has_partials && p.most_units > step_units),
          unit_tiles(adds_up_units ? pin_in_register(p.unit_tiles.value) : ~0u),
          stages(Form::MOST_STAGES > Form::LEAST_STAGES ? pin_in_register(p.stages) : Form::LEAST_STAGES),
          ring(shared + compute.warp * stages * STAGE) {}
    // Asks the L2 cache for what the CTA reads first.
    __device__ void prefetch_first_reads() const {
        preload_parameter(p.out.data);
        preload_parameter(p.lse.data);
        preload_parameter(p.sinks.data);
        preload_parameter(p.state.l.data);
        preload_parameter(p.start.acc.data);
        tiles.prefetch_first_reads(compute.warp);
        queries.prefetch(compute.warp);
        term.prefetch_first_reads();
    }
    // Requests entries, lengths and queries together, then pages, and finds where the warp's first 32 tiles lie.
    __device__ void request_entries() {
        tiles.request();
        term.request_row();
        const int32 length = load_word(tiles.length), rows_seen = load_word(q_len), listed = load_word(list_count);
        if constexpr (Form::Queries::SHARED_BY_WARPS) queries.request();
        reach = Reach::of(p, item, clamped(length, p.token_capacity), p.q_lens.data ? clamped(rows_seen, p.positions) : p.positions);
        tiles.request_page(reach);
        if constexpr (!Form::Queries::SHARED_BY_WARPS) queries.request();
        term.request();
        entries = p.ids.data ? clamped(listed, p.list_capacity) : 0;
        units = units_of(p, reach, entries);
        count = units > first ? (p.ctas.divide((units - first - 1) >> log_teams) + 1) * p.unit_tiles.value : 0;
        const bool has_rows = p.own_lists || reach.queries == int32(p.positions);
        seen_end = p.own_lists ? reach.end : has_rows ? reach.length - reach.queries + 1 : 0;
        seen_begin = p.window ? max((p.own_lists ? reach.end : reach.length) - int32(p.window), 0) : 0;
        fully_seen = is_fully_seen = 0;
        locate_tiles();
    }
    __device__ void locate_tiles() {
        tiles.locate(reach, entries);
        fully_seen = __ballot_sync(FULL_WARP, tiles.position >= seen_begin && tiles.position + int32(TILE) <= seen_end);
    }
    // Requests keys and values of a tile as stage `at` of the ring.
    __device__ void request_tile(uint32 tile, uint32 at) {
        if (tile % WARP == 0 && tile) {
            tiles.locate_entries(tile);
            tiles.request();
            tiles.request_page(reach);
            locate_tiles();
        }
        const uint32 from = tile % WARP;
        char *const to = ring + at * STAGE;
        const uint32 k_to = keys_of_lane<Compute>(to, lane);
        bool is_whole = fully_seen >> from & 1;
        if (p.log_granule < LOG_TILE) {
            tiles.turn_to(tile);
            is_whole = load_scattered_tile<Compute, Form::KEYS_ARE_A_GROUP>(tiles, tile, to, k_to, is_whole, reach);
            is_fully_seen = (is_fully_seen & ~(1u << at)) | uint32(is_whole) << at;
            return;
        }
        const char *from_key = tiles.k + __shfl_sync(FULL_WARP, tiles.key, from), *from_value = tiles.v + __shfl_sync(FULL_WARP, tiles.value, from);
        is_fully_seen = (is_fully_seen & ~(1u << at)) | uint32(is_whole) << at;
        load_tile<Compute, Form::KEYS_ARE_A_GROUP>(lane, to, k_to, from_key, from_value, tiles.k_row, tiles.v_row, is_whole, reach,
                                                     [&] { return __shfl_sync(FULL_WARP, tiles.position, from); });
    }
    // The ring turns: the oldest tile is attended to, the next one requested in its place.
    __device__ void stream_tiles() {
        uint32 part = 0, unit = first;
#pragma unroll 1
        for (uint32 step = 0, at = 0; step < count + stages; step++) {
            if (step >= stages) {
                if (step == stages) compute.read_reach(Form::late(item), reach, 0);
                Form::wait_for_keys(stages);
                __syncwarp();
                if (step == stages) {
                    queries.to_registers(compute);
                    if (adds_up_units) total.clear();
                }
                Form::attend(compute, ring + at * STAGE, is_fully_seen >> at & 1, part == 0 && !Term::EXISTS);
                __syncwarp();
            }
            if (step < count) request_tile(step, at);
            else if constexpr (Form::KEYS_ARE_A_GROUP) end_copies();
            end_copies();
            if constexpr (Form::MOST_STAGES > Form::LEAST_STAGES) at = at + 1 == stages ? 0 : at + 1;
            else at = (at + 1) % Form::LEAST_STAGES;
            if constexpr (Term::EXISTS) {
                // Tiles are on their way.
                if (step + 1 == stages) term.begin(compute, queries, reach);
            }
            // The ring is full again before a unit is done with.
            if (step >= stages && ++part == unit_tiles) {
                compute.finish();
                write_partial(p, Form::late(item), compute, unit);
                part = 0;
                unit += step_units;
                if (step + 1 == count + stages) break;
                total.template add<false>(compute);
                compute.clear();
            }
        }
        if ((count || Term::EXISTS) && !adds_up_units) compute.finish();
        else if (count) total.template add<true>(compute);
    }
    // Warps join, then the work item's CTAs; results are written, and partials of units that warps shared.
    __device__ void join_and_write() { join.join_and_write(compute, item, has_partials && !adds_up_units, log_share, units); }

    uint32 entries;  // of the list
};

// all: p, or what begins with p and has the term, too.
template <typename Form, typename Term = NoTerm>
__device__ inline void attention_decode128(const AttentionParams &p, const typename Term::Params &all) {
    extern __shared__ __align__(128) char shared[];
    __shared__ typename Form::Join::Shared states;
    __shared__ uint32 words[WARP];
    Form::Queries::open();
    request_parameters(all, words);
    const uint32 number = p.ctas.divide(blockIdx.x), ctas = pin_in_register(p.ctas.value);
    const WorkItem item = work_item_of(p, number);
    Decode128<Form, Term> cta(p, all, item, number, ctas, shared, states);
    cta.prefetch_first_reads();
    if constexpr (Form::Queries::SHARED_BY_WARPS) __syncthreads();  // the queries' barrier is open
    allow_next_kernel();
    wait_for_previous_kernel();
    cta.request_entries();
    cta.stream_tiles();
    cta.join_and_write();
}

#define DECODE128_KERNEL(name, ...)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionParams p) { \
        attention_decode128<__VA_ARGS__>(p, p);                                                         \
    }
