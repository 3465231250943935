// The decoder's own work on the rows of a step.
//
//   decoder_distribute   which positions of each row attend a selection and which attend all tokens, for each threshold of length, and
//                        which selections can be foreseen
//   decoder_append       copies the keys and values of new tokens to their pages
//   decoder_take         copies the foreseen queries of some rows
//   decoder_complete     adds the block of each row's new token to its foreseen lists, where they end before it
//   decoder_remember     keeps the lists of rows for the next step of their sequences
//   decoder_recall       the lists that sequences had at the step before, and the block of each row's new token
//   decoder_observe      adds what a verification accepted, and recommends how many tokens to draft next
//
// Bytes: each row of channels is read once and written once; the rest is some words a row.
//
// Work split: a thread for each row (distribute, observe) or list (complete); a warp for each list (remember,
// recall), and for each position and head, of keys and of values (append, take).
//
// Sums and products of decoder_observe are rounded one by one, as on the CPU.
//
// targets: compute_80, compute_90

#include "decoder/params.cuh"

constexpr int32 SPARSE = 1, DENSE = 2;  // VWD_DECODER_*

extern "C" __global__ void __launch_bounds__(THREADS) decoder_distribute(const __grid_constant__ DistributeParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.batch) return;
    const int32 mode = p.modes.at_or(i, p.mode), tokens = max(p.seq_lens.at(i), 0);
    const bool is_taken = mode == SPARSE || mode == DENSE;
    const int32 count = is_taken ? min(max(p.q_lens.at_or(i, p.positions), 0), p.positions) : 0;
    const int32 first = max(tokens - count, 0), begin = min(max(p.begin.at_or(i, first), 0), first);
    p.rows[i] = count;
    const int32 from = p.floors ? min(max(begin, p.floors[i]), first) : begin;
    p.from[i] = is_taken ? from - int32(uint32(from) % uint32(p.page_size)) : tokens;
    if (p.places) p.places[i] = first;
    if (p.stored) {
        const uint32 size = p.page_size, whole = uint32(tokens) / size, rest = uint32(tokens) % size != 0;
        const uint32 blocks = is_taken ? min(whole + rest, p.table_blocks) : 0, stored = blocks - min(blocks, p.newest);
        p.stored[i] = stored, p.newest_counts[i] = blocks - stored;
        for (uint32 n = 0; n < p.newest; ++n) p.newest_ids[i * p.newest + n] = stored + n;
        for (uint32 w = 0; w < p.window_count; ++w) {
            const uint32 row = w * p.max_rows + i, begin = max(first + 1 - p.windows[w], 0) / size, seen = min(stored - min(begin, stored), p.seen_cap);
            p.seen_counts[row] = seen;
            for (uint32 n = 0; n < seen; ++n) p.seen_ids[uint64(row) * p.seen_cap + n] = begin + n;
        }
    }
    if (p.counted_rows) {
        const uint32 sequence = p.sequences.at_or(i, i);
        const int32 len = max(first - p.drafts, 0);
        p.counted_rows[i] = is_taken && sequence < p.sequence_count ? int32(sequence) : -1;
        p.counted_lens[i] = len, p.counted_begin[i] = min(begin, len);
    }
    for (uint32 c = 0; c < p.classes; ++c) {
        const int32 threshold = p.thresholds[c];
        const bool is_dense = mode == DENSE || (tokens <= threshold && p.shortest <= uint32(threshold));
        const int32 sparse = is_dense ? 0 : count;
        int32 *lens = p.lens + uint64(c) * KINDS * p.max_rows + i;
        const auto set = [&](Kind kind, int32 n) { lens[kind * p.max_rows] = n; };
        set(Sparse, sparse), set(Dense, count - sparse);
        set(Known, begin < first ? 0 : sparse), set(New, begin < first ? sparse : 0);
        set(Tokens, sparse > 0 ? tokens : 0);
    }
}

template <typename Unit>
__device__ inline void copy_units(const char *from, int64 from_step, char *to, int64 to_step, uint32 units) {
    for (uint32 u = threadIdx.x % WARP; u < units; u += WARP) as<Unit>(to + u * to_step) = as<Unit>(from + u * from_step);
}

// Copies a row of channels, by all lanes of the warp. Units of 16 bytes lie side by side; smaller ones are elements.
__device__ inline void copy_channels(const Copied &c, uint64 from0, uint32 from1, uint64 to0, uint32 to1, uint32 head) {
    const char *from = c.from + int64(from0) * c.from_steps[0] + from1 * c.from_steps[1] + head * c.from_steps[2];
    char *to = c.to + int64(to0) * c.to_steps[0] + to1 * c.to_steps[1] + head * c.to_steps[2];
    if (c.log_unit == 4)
        copy_units<uint4>(from, 16, to, 16, c.bytes / 16);
    else if (c.log_unit == 2)
        copy_units<uint32>(from, c.from_steps[3], to, c.to_steps[3], c.bytes / 4);
    else if (c.log_unit == 1)
        copy_units<uint16>(from, c.from_steps[3], to, c.to_steps[3], c.bytes / 2);
    else
        copy_units<uint8>(from, c.from_steps[3], to, c.to_steps[3], c.bytes);
}

__device__ inline uint32 warp_number() { return (blockIdx.x * THREADS + threadIdx.x) / WARP; }

extern "C" __global__ void __launch_bounds__(THREADS) decoder_append(const __grid_constant__ AppendParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 warp = warp_number(), part = warp % 2, cell = warp / 2;
    const uint32 head = cell % p.heads, at = cell / p.heads, n = at % p.positions, i = at / p.positions;
    if (i >= p.batch) return;
    const int32 count = p.rows[i];
    const int64 token = int64(p.seq_lens.at(i)) - count + n;
    if (int32(n) >= count || token < 0 || uint64(token) >= p.capacity) return;
    const uint32 number = uint32(token) / p.page_size, row = uint32(token) - number * p.page_size;
    const uint32 page = p.table ? as<uint32>(p.table + i * p.table_seq + number * p.table_page) : i;
    if (page < p.pages) copy_channels(p.parts[part], i, n, page, row, head);
}

extern "C" __global__ void __launch_bounds__(THREADS) decoder_take(const __grid_constant__ TakeParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 warp = warp_number(), head = warp % p.heads, at = warp / p.heads, n = at % p.positions, i = at / p.positions;
    if (i < p.batch && int32(n) < p.lens[i]) copy_channels(p.part, i, n, i, n, head);
}

extern "C" __global__ void __launch_bounds__(THREADS) decoder_complete(const __grid_constant__ CompleteParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 list = blockIdx.x * THREADS + threadIdx.x, i = list / p.heads;
    if (list >= p.lists || p.lens[i] <= 0) return;
    int32 *ids = p.ids + uint64(list) * p.capacity;
    const int32 block = int32(uint32(p.places[i]) / p.block_size);
    const uint32 n = p.counts[list];
    if (n < p.capacity && (n == 0 || ids[n - 1] < block)) ids[n] = block, p.counts[list] = n + 1;
}

// The number of entries of a list.
__device__ inline uint32 clamped(int32 count, uint32 capacity) { return min(uint32(max(count, 0)), capacity); }

extern "C" __global__ void __launch_bounds__(THREADS) decoder_remember(const __grid_constant__ PastParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 list = warp_number(), lane = threadIdx.x % WARP, i = list / p.heads;
    if (list >= p.lists || (p.lens && p.lens[i] <= 0)) return;
    const uint32 sequence = p.sequences.at_or(i, i);
    if (sequence >= p.count) return;
    const uint64 past = uint64(sequence) * p.heads + list % p.heads;
    const uint32 count = p.lens ? min(clamped(p.counts[list], p.capacity), p.past_capacity) : 0;
    for (uint32 n = lane; n < count; n += WARP) p.past_ids[past * p.past_capacity + n] = p.ids[uint64(list) * p.capacity + n];
    if (lane == 0) p.past_counts[past] = count;
}

extern "C" __global__ void __launch_bounds__(THREADS) decoder_recall(const __grid_constant__ PastParams p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 list = warp_number(), lane = threadIdx.x % WARP, i = list / p.heads;
    if (list >= p.lists) return;
    if (p.lens[i] <= 0) {
        if (lane == 0) p.counts[list] = 0;
        return;
    }
    const uint32 sequence = p.sequences.at_or(i, i);
    const int32 block = int32(uint32(p.places[i]) / p.block_size);
    const uint64 past = (sequence < p.count ? uint64(sequence) : 0) * p.heads + list % p.heads;
    const uint32 known = sequence < p.count ? min(clamped(p.past_counts[past], p.past_capacity), p.capacity - 1) : 0;
    int32 *ids = p.ids + uint64(list) * p.capacity;
    uint32 kept = known ? 0 : min(min(p.init, uint32(block)), p.capacity - 1);
    for (uint32 n = lane; n < kept; n += WARP) ids[n] = n;
    // Ids ascend, so those before the new token's block come first.
    for (uint32 first = 0; first < known; first += WARP) {
        const uint32 n = first + lane;
        const int32 id = n < known ? p.past_ids[past * p.past_capacity + n] : block;
        if (id < block) ids[n] = id;
        kept += __popc(__ballot_sync(FULL_WARP, id < block));
    }
    if (lane == 0) ids[kept] = block, p.counts[list] = kept + 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) decoder_observe(const __grid_constant__ ObserveParams p) {
    constexpr float KEPT = 0.9f, PRIOR_TRIALS = 2.0f, PRIOR_HITS = 1.6f;
    allow_next_kernel();
    wait_for_previous_kernel();
    const uint32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.rows) return;
    const uint32 sequence = p.sequences.at_or(i, i);
    if (sequence >= p.count) return;
    float hits = 0.0f, trials = 0.0f;
    if (p.accepted.data) {
        const int32 drafted = min(max(p.draft_lens.at_or(i, p.gamma), 0), p.gamma), accepted = p.accepted.at(i);
        p.total_drafted[sequence] = int32(min(int64(p.total_drafted[sequence]) + drafted, 0x7fffffffll));
        p.total_accepted[sequence] = int32(min(int64(p.total_accepted[sequence]) + accepted, 0x7fffffffll));
        hits = __fadd_rn(__fmul_rn(KEPT, p.hits[sequence]), float(accepted));
        trials = __fadd_rn(__fmul_rn(KEPT, p.trials[sequence]), float(min(drafted, accepted + 1)));
    } else {
        p.total_drafted[sequence] = p.total_accepted[sequence] = 0;
    }
    const float acceptance = __fdiv_rn(__fadd_rn(hits, PRIOR_HITS), __fadd_rn(trials, PRIOR_TRIALS));
    p.hits[sequence] = hits, p.trials[sequence] = trials, p.acceptance[sequence] = acceptance;
    // γ drafts give Σ_{j ≤ γ} p^j tokens in the time 1 + γ·cost.
    float tokens = 1.0f, power = 1.0f, rate = 1.0f;
    int32 best = 0;
    for (int32 gamma = 1; gamma <= p.most; ++gamma) {
        power = __fmul_rn(power, acceptance);
        tokens = __fadd_rn(tokens, power);
        const float found = __fdiv_rn(tokens, __fadd_rn(1.0f, __fmul_rn(float(gamma), p.cost)));
        if (found > rate) best = gamma, rate = found;
    }
    p.recommended[sequence] = best;
}
