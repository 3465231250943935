// The mean key of each block and an axis along which its keys spread.
//
//   μ = Σ_t k_t / n · x_t = k_t − μ · z = W∘x of the token with the largest Σ_c W_c·x_c², W = weights²
//   three times u_t = x_t·z, b = Σ_t u_t·x_t, z = W∘b / |u| · stored: μ − centre and b / |u| times the reach, in INT4 or as floats
//
// Bytes: the keys of the range, once; summaries are a hundredth of that. A token of a decoding step costs a block's keys.
//
// Cut: as in update.cu, `slices` CTAs for each sequence and head take turns at blocks. A unit of threads has a block: eight slots, which
// share its tokens (token t is of slot t mod 8), and in each slot the lanes of a key, eight channels each. Up to 64 tokens of 256 channels
// stay in registers; of larger blocks or keys each pass reads the keys again, which are in the caches.
//
//   keys to registers ─ sum over slots ─ less the mean ─ farthest token ─ 3 × (product of each token over lanes ─ sum over slots) ─ store
//
// Bits are those of the CPU (src/ops/index/cpu/axis.rs): products are fused, a slot adds its tokens in their order and the slots are added
// as a tree; a token's product is a sum over each eight channels, folded in halves.
//
// On entry: lanes is a power of two from 2 to 32, lanes · 8 ≥ D or lanes = 32; D is a multiple of 8, at most 576.
//
// targets: compute_80, compute_90

#include "index/turn.cuh"

constexpr uint32 SLOTS = 8, HELD = 8, BATCH = SLOTS * HELD, GROUP = 32, STEPS = 3;
constexpr uint32 MOST_CHANNELS = 576;

// What a block's threads share: `part` has what its slots have added up, `vector` is z.
template <uint32 CHANNELS> struct Shared {
    alignas(16) float part[SLOTS * CHANNELS];
    alignas(16) float mean[CHANNELS];
    alignas(16) float vector[CHANNELS];
    float square[CHANNELS];                          // W
    alignas(16) float size[THREADS], best[THREADS];  // of each slot
    uint32 farthest[THREADS];
};

// Eight channels of a token that lies anywhere.
template <uint32 BYTES> struct One {
    Eight<BYTES> eight;
    float factor;
    bool exists;
};
// Not inline: seldom called, from many places.
template <uint32 BYTES> __device__ __noinline__ One<BYTES> fetch(const Keys &k, uint32 seq, uint32 head, uint32 t, uint32 c) {
    One<BYTES> one;
    one.eight.clear(), one.factor = 1.0f;
    const char *key = k.find(seq, t, head, one.factor);
    one.exists = key != nullptr;
    if (!key) return one;
    if (k.adjacent)
        one.eight.load(key + c * BYTES);
    else
        one.eight.gather(key + c * k.channel, k.channel);
    return one;
}

// A unit's block. WIDE: keys of more than 256 channels, or blocks of more than 64 tokens; they do not stay in registers.
template <uint32 BYTES, bool WIDE> struct Block {
    static constexpr uint32 CHUNKS = WIDE ? 3 : 1;  // eight channels each, that a lane has
    using Parts = Shared<WIDE ? MOST_CHANNELS : THREADS>;
    using Tokens = float[HELD][8];

    const AxisParams &p;
    const Turn &turn;
    Parts &shared;
    const uint32 lanes, dim, members, unit, member, slot, lane, width;  // width: channels of a unit's place in what is shared
    uint32 begin = 0, n = 0;                                       // first token, and how many; 0 where there is no block
    uint32 batches = 1;                                            // of the fullest block at hand: lanes of a warp go together
    float share, of_spread;                                        // 1 / n, and how far the axis reaches by the tokens' spread
    bool is_together, exists;                                      // the tokens are in one page, and there is one
    const char *own, *own_scale;                                   // there, this slot's first

    __device__ __forceinline__ Block(const AxisParams &p, const Turn &turn, Parts &shared)
        : p(p), turn(turn), shared(shared), lanes(p.update.lanes), dim(p.update.keys.dim), members(SLOTS * lanes), unit(threadIdx.x >> log2_of(members)),
          member(threadIdx.x & (members - 1)), slot(member >> log2_of(lanes)), lane(member & (lanes - 1)), width(WIDE && lanes == WARP ? MOST_CHANNELS : lanes * 8) {}

    // Units wait for themselves only, or for those of the same warp.
    __device__ __forceinline__ void sync() const {
        const uint32 count = max(members, WARP);
        sync_threads(1 + (threadIdx.x >> log2_of(count)), count);
    }

    __device__ __forceinline__ uint32 channel(uint32 m) const { return (m * lanes + lane) * 8; }
    __device__ __forceinline__ float *mean() const { return shared.mean + unit * width; }
    __device__ __forceinline__ float *vector() const { return shared.vector + unit * width; }
    __device__ __forceinline__ float *part(uint32 s) const { return shared.part + (unit * SLOTS + s) * width; }
    __device__ __forceinline__ float square(uint32 c) const { return shared.square[c]; }

    __device__ __forceinline__ static void read(const float *from, float (&to)[8]) {
        const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w, to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
    __device__ __forceinline__ static void write(const float (&from)[8], float *to) {
        reinterpret_cast<float4 *>(to)[0] = make_float4(from[0], from[1], from[2], from[3]);
        reinterpret_cast<float4 *>(to)[1] = make_float4(from[4], from[5], from[6], from[7]);
    }

    // Where the tokens lie: most blocks are in one page.
    __device__ __forceinline__ void find() {
        const Keys &k = p.update.keys;
        uint32 page = turn.seq, row = begin;
        is_together = k.adjacent;
        if (k.table) {
            const uint32 number = k.page_of.divide(begin);
            row = begin - number * k.page_size;
            is_together &= row + n <= k.page_size;
            page = n > 0 ? as<uint32>(k.table + turn.seq * k.table_seq + number * k.table_page) : 0;
        }
        exists = page < k.pages;
        own = exists ? k.data + page * k.page + (row + slot) * k.token + turn.head * k.head + lane * 8 * BYTES : nullptr;
        own_scale = k.scale + page * k.scale_page + (row + slot) * k.scale_token + turn.head * k.scale_head;
    }

    // This slot's tokens of a batch; 0 past the last, NaN where there is no page.
    __device__ __forceinline__ void load(uint32 batch, uint32 m, Tokens &x) const {
        const Keys &k = p.update.keys;
        const uint32 c = channel(m), first = batch * BATCH + slot, last = c < dim ? n : 0;
        constexpr uint32 TOGETHER = BYTES == 4 ? 4 : 8;
#pragma unroll
        for (uint32 from = 0; from < HELD; from += TOGETHER) {
            Eight<BYTES> eight[TOGETHER];
            float factor[TOGETHER];
            uint32 absent = 0;
#pragma unroll
            for (uint32 i = 0; i < TOGETHER; i++) eight[i].clear(), factor[i] = 1.0f;
            if (is_together) {
                const char *key = own + (WIDE ? batch * BATCH * k.token + m * lanes * 8 * BYTES : 0) + from * SLOTS * k.token;
                const char *scale = own_scale + (WIDE ? batch * BATCH * k.scale_token : 0) + from * SLOTS * k.scale_token;
#pragma unroll
                for (uint32 i = 0; i < TOGETHER; i++, key += SLOTS * k.token, scale += SLOTS * k.scale_token) {
                    if (!exists || first + (from + i) * SLOTS >= last) continue;
                    eight[i].load(key);
                    if (BYTES == 1 && k.scale) factor[i] = as<float>(scale);
                }
                if (!exists) absent = ~0u;
            } else {
#pragma unroll
                for (uint32 i = 0; i < TOGETHER; i++) {
                    const uint32 t = first + (from + i) * SLOTS;
                    if (t >= last) continue;
                    const One<BYTES> one = fetch<BYTES>(k, turn.seq, turn.head, begin + t, c);
                    eight[i] = one.eight, factor[i] = one.factor;
                    if (!one.exists) absent |= 1 << i;
                }
            }
#pragma unroll
            for (uint32 i = 0; i < TOGETHER; i++) {
                float to[8];
                eight[i].widen(to, k.dtype);
#pragma unroll
                for (uint32 e = 0; e < 8; e++) x[from + i][e] = BYTES == 1 ? __fmul_rn(to[e], factor[i]) : to[e];
            }
            if (absent == 0) continue;
#pragma unroll
            for (uint32 i = 0; i < TOGETHER; i++)
                if (absent >> i & 1 && first + (from + i) * SLOTS < last)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) x[from + i][e] = __uint_as_float(0x7fc00000);
        }
    }
    // The tokens of a block that was guessed, asked for and here; 0 past the last.
    __device__ __forceinline__ void ask(const Guess &guess, Eight<BYTES> (&eight)[HELD]) const {
        const Keys &k = p.update.keys;
#pragma unroll
        for (uint32 i = 0; i < HELD; i++) {
            eight[i].clear();
            if (guess.key && unit == 0 && channel(0) < dim && slot + i * SLOTS < p.update.size)
                eight[i].ask(guess.key + (slot + i * SLOTS) * k.token + channel(0) * BYTES);
        }
    }
    __device__ __forceinline__ void take(const Eight<BYTES> (&eight)[HELD], uint32 count, Tokens &x) const {
#pragma unroll
        for (uint32 i = 0; i < HELD; i++) {
            eight[i].widen(x[i], p.update.keys.dtype);
#pragma unroll
            for (uint32 e = 0; e < 8; e++) x[i][e] = unit == 0 && slot + i * SLOTS < count ? x[i][e] : 0.0f;
        }
    }
    __device__ __forceinline__ void subtract_mean(uint32 batch, uint32 m, Tokens &x) const {
        if (channel(m) >= dim) return;
        float of[8];
        read(mean() + channel(m), of);
#pragma unroll
        for (uint32 i = 0; i < HELD; i++)
            if (batch * BATCH + slot + i * SLOTS < n)
#pragma unroll
                for (uint32 e = 0; e < 8; e++) x[i][e] = __fsub_rn(x[i][e], of[e]);
    }
    __device__ __forceinline__ void again(uint32 batch, uint32 m, Tokens &x) const {
        if (WIDE) load(batch, m, x), subtract_mean(batch, m, x);
    }

    // Adds up the lanes for each token, in halves; all lanes get all sums.
    __device__ __forceinline__ void add_lanes(float (&v)[HELD]) const {
        uint32 bit = lanes / 2;
        if (lanes < HELD) {
            for (; bit > 0; bit /= 2)
#pragma unroll
                for (uint32 i = 0; i < HELD; i++) v[i] = __fadd_rn(v[i], __shfl_xor_sync(FULL_WARP, v[i], bit));
            return;
        }
        // Each lane goes on with half of the tokens, until it has one; then it tells the others.
#pragma unroll
        for (uint32 half = HELD / 2; half > 0; half /= 2, bit /= 2) {
            const bool upper = threadIdx.x & bit;
#pragma unroll
            for (uint32 i = 0; i < half; i++) {
                const float given = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
                v[i] = __fadd_rn(kept, __shfl_xor_sync(FULL_WARP, given, bit));
            }
        }
        float sum = v[0];
        for (; bit > 0; bit /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, bit));
        const uint32 base = threadIdx.x % WARP & ~(lanes - 1);
#pragma unroll
        for (uint32 i = 0; i < HELD; i++) v[i] = __shfl_sync(FULL_WARP, sum, base | (i & 4 ? lanes / 2 : 0) | (i & 2 ? lanes / 4 : 0) | (i & 1 ? lanes / 8 : 0));
    }

    // Σ_c x_c·z_c of each token of a batch, or Σ_c W_c·x_c².
    template <bool IS_SIZE> __device__ __forceinline__ void multiply(uint32 batch, Tokens &x, float (&product)[HELD]) const {
        // As halves are folded: the first eight channels of a lane, the third, the second.
#pragma unroll 1
        for (uint32 n = 0; n < CHUNKS; n++) {
            const uint32 m = n == 0 ? 0 : CHUNKS - n;
            again(batch, m, x);
            float sums[HELD] = {};
            if (channel(m) < dim) {
                float of[8];
                if (IS_SIZE)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) of[e] = square(channel(m) + e);
                else
                    read(vector() + channel(m), of);
#pragma unroll
                for (uint32 i = 0; i < HELD; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sums[i] = fmaf(IS_SIZE ? __fmul_rn(x[i][e], of[e]) : of[e], x[i][e], sums[i]);
            }
#pragma unroll
            for (uint32 i = 0; i < HELD; i++) product[i] = n == 0 ? sums[i] : __fadd_rn(product[i], sums[i]);
        }
        add_lanes(product);
    }

    // Σ of what the slots have, `step` apart.
    __device__ __forceinline__ static float tree(const float *of, uint32 step) {
        return __fadd_rn(__fadd_rn(__fadd_rn(of[0], of[step]), __fadd_rn(of[2 * step], of[3 * step])),
                         __fadd_rn(__fadd_rn(of[4 * step], of[5 * step]), __fadd_rn(of[6 * step], of[7 * step])));
    }

    // Of tokens that are here, or are to be loaded.
    __device__ __forceinline__ void find_mean(Tokens &x, bool are_here) const {
#pragma unroll 1
        for (uint32 m = 0; m < CHUNKS; m++) {
            float sum[8] = {};
#pragma unroll 1
            for (uint32 batch = 0; batch < (WIDE ? batches : 1); batch++) {
                if (!are_here) load(batch, m, x);
#pragma unroll
                for (uint32 i = 0; i < HELD; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sum[e] = __fadd_rn(sum[e], x[i][e]);
            }
            if (channel(m) < dim) write(sum, part(slot) + channel(m));
        }
        sync();
        for (uint32 c = member; c < dim; c += members) mean()[c] = __fmul_rn(tree(part(0) + c, width), share);
        sync();
        if (!WIDE) subtract_mean(0, 0, x);
    }

    // z = W∘x of the farthest token, the first of several; where none is a number, of the first.
    __device__ __forceinline__ void find_farthest(Tokens &x) const {
        float largest = minus_infinity();
        uint32 farthest = 0;
#pragma unroll 1
        for (uint32 batch = 0; batch < (WIDE ? batches : 1); batch++) {
            float size[HELD];
            multiply<true>(batch, x, size);
#pragma unroll
            for (uint32 i = 0; i < HELD; i++) {
                const uint32 t = batch * BATCH + i * SLOTS + slot;
                if (t < n && size[i] > largest) largest = size[i], farthest = t;
            }
        }
        if (lane == 0) shared.best[unit * SLOTS + slot] = largest, shared.farthest[unit * SLOTS + slot] = farthest;
        sync();
        largest = minus_infinity(), farthest = 0;
        float of[SLOTS];
        read(shared.best + unit * SLOTS, of);
#pragma unroll
        for (uint32 s = 0; s < SLOTS; s++) {
            const float other = of[s];
            const uint32 t = shared.farthest[unit * SLOTS + s];
            if (other > largest || (other == largest && other > minus_infinity() && t < farthest)) largest = other, farthest = t;
        }
#pragma unroll 1
        for (uint32 m = 0; m < CHUNKS; m++) {
            if (slot != farthest % SLOTS || channel(m) >= dim) continue;
            again(farthest / BATCH, m, x);
            // By masks: an index would send all tokens through memory.
            uint32 bits[8] = {};
#pragma unroll
            for (uint32 i = 0; i < HELD; i++) {
                const uint32 mask = -uint32(farthest % BATCH / SLOTS == i);
#pragma unroll
                for (uint32 e = 0; e < 8; e++) bits[e] |= __float_as_uint(x[i][e]) & mask;
            }
            float z[8];
#pragma unroll
            for (uint32 e = 0; e < 8; e++) z[e] = __fmul_rn(__uint_as_float(bits[e]), square(channel(m) + e));
            write(z, vector() + channel(m));
        }
        sync();
    }

    // z = W∘Σ_t u_t·x_t / |u| with u_t = x_t·z; `axis` is it without W, of channel `member` and those that follow it, in the last step as it
    // is stored.
    __device__ __forceinline__ void step(bool is_last, Tokens &x, float (&axis)[CHUNKS]) const {
        float size = 0.0f, most = 0.0f;
#pragma unroll 1
        for (uint32 batch = 0; batch < (WIDE ? batches : 1); batch++) {
            float u[HELD];
            multiply<false>(batch, x, u);
#pragma unroll
            for (uint32 i = 0; i < HELD; i++) size = fmaf(u[i], u[i], size), most = fmaxf(most, fabsf(u[i]));
#pragma unroll 1
            for (uint32 m = 0; m < CHUNKS; m++) {
                again(batch, m, x);
                if (channel(m) >= dim) continue;
                float sum[8] = {};
                if (batch > 0) read(part(slot) + channel(m), sum);
#pragma unroll
                for (uint32 i = 0; i < HELD; i++)
#pragma unroll
                    for (uint32 e = 0; e < 8; e++) sum[e] = fmaf(x[i][e], u[i], sum[e]);
                write(sum, part(slot) + channel(m));
            }
        }
        if (lane == 0) shared.size[unit * SLOTS + slot] = size, shared.best[unit * SLOTS + slot] = most;
        sync();
        float of[SLOTS];
        read(shared.size + unit * SLOTS, of);
        size = tree(of, 1);
        // Of keys that are all the same there is no axis.
        const float shrink = size == 0.0f ? 0.0f : 1.0f / sqrtf(size);
        most = 0.0f;
        read(shared.best + unit * SLOTS, of);
#pragma unroll
        for (uint32 other = 0; other < SLOTS; other++) most = fmaxf(most, of[other]);
        const float reach = fmaxf(of_spread, __fmul_rn(__fmul_rn(0.6f, most), shrink)), last = is_last ? reach : 1.0f;
#pragma unroll
        for (uint32 m = 0; m < CHUNKS; m++) {
            const uint32 c = member + m * members;
            if (c >= dim) break;
            axis[m] = __fmul_rn(tree(part(0) + c, width), shrink);
            vector()[c] = __fmul_rn(axis[m], square(c));
            axis[m] = __fmul_rn(axis[m], last);
        }
        sync();
    }
};

// Finite; the least and the largest of a warp.
__device__ inline void find_extent(float &low, float &high) {
    const auto key = [](float x) { return int32(__float_as_uint(x)) < 0 ? ~__float_as_uint(x) : __float_as_uint(x) | 0x80000000u; };
    const auto number = [](uint32 key) { return __uint_as_float(int32(key) < 0 ? key & 0x7fffffffu : ~key); };
    low = number(__reduce_min_sync(FULL_WARP, key(low))), high = number(__reduce_max_sync(FULL_WARP, key(high)));
}

// Channel c of the mean (part 0) or the axis (part 1). All threads of a warp come here, those past the last channel with `is_there` false.
__device__ inline void store(const AxisParams &p, const Unit &unit, uint32 head, uint32 dim, uint32 part, uint32 c, bool is_there, float x, uint32 members) {
    const UpdateParams &u = p.update;
    char *to = u.first.at(unit.page, unit.row, head);
    const uint32 n = part * dim + c;
    if (!u.second.data) {
        if (is_there) store_element(to + n * u.first.channel, u.dtype, x);
        return;
    }
    bool of_numbers = !is_there || fabsf(x) < -minus_infinity();
    float low = x, high = x;
    if (members >= WARP && __all_sync(FULL_WARP, is_there && of_numbers)) {
        find_extent(low, high);
    } else {
        low = is_there ? x : -minus_infinity(), high = is_there ? x : minus_infinity();
#pragma unroll 1
        for (uint32 bit = 1; bit < min(GROUP, members); bit *= 2) {
            low = fminf(low, __shfl_xor_sync(FULL_WARP, low, bit)), high = fmaxf(high, __shfl_xor_sync(FULL_WARP, high, bit));
            of_numbers &= __shfl_xor_sync(FULL_WARP, of_numbers, bit);
        }
    }
    // What is no number makes the group none.
    const Range range = of_numbers ? Range(low + 0.0f, high) : Range(1.0f, 0.0f);
    const uint32 code = range.code(x), other = __shfl_xor_sync(FULL_WARP, code, 1);
    if (!is_there) return;
    if (c % 2 == 0) as<uint8>(to + n / 2 * u.first.channel) = code | other << 4;
    if (c % GROUP < 2) {
        const uint32 group = part * ((dim + GROUP - 1) / GROUP) + c / GROUP;
        as<uint16>(u.second.at(unit.page, unit.row, head) + (2 * group + c % GROUP) * u.second.channel) = c % 2 ? range.min_bits : range.scale_bits;
    }
}

template <uint32 BYTES, bool WIDE> __device__ inline void update_axes(const AxisParams &p) {
    using Of = Block<BYTES, WIDE>;
    __shared__ typename Of::Parts shared;
    allow_next_kernel();
    const UpdateParams &u = p.update;
    const Turn turn(u);
    Of block(p, turn, shared);
    // The guess: one block, by the first CTA.
    const bool fits = !WIDE && turn.slice == 0;
    const uint32 likely = fits ? stale_blocks(u, u.keys.lengths_now(turn.seq)).begin : 0;
    const Guess guess(u.keys, turn.seq, turn.head, likely * u.size, fits ? u.size : ~0u);
    wait_for_previous_kernel();
    const int2 lengths = u.keys.lengths_now(turn.seq);
    const uint32 page = guess.page_now();
    Eight<BYTES> eight[HELD];
    if (!WIDE) block.ask(guess, eight);
    const Stale stale = stale_blocks(u, lengths);
    bool is_right = !WIDE && guess.key && guess.page == page && stale.begin == likely && stale.end == likely + 1;

    const uint32 together = THREADS >> log2_of(block.members), joined = max(WARP >> log2_of(block.members), 1u), ahead = block.unit & ~(joined - 1);
    if (stale.begin + turn.slice * together >= stale.end) return;

    for (uint32 c = threadIdx.x; c < block.dim; c += THREADS) {
        const float w = p.weights ? as<float>(p.weights + turn.head * p.weights_head + c * p.weights_channel) : 1.0f;
        shared.square[c] = __fmul_rn(w, w);
    }
    // Threads may have guessed differently.
    is_right = __syncthreads_and(is_right);
    typename Of::Tokens x;
    if (!WIDE) block.take(eight, stale.len - likely * u.size, x);
    // Units of one warp go together.
    for (uint32 j = stale.begin + turn.slice * together + ahead; j < stale.end; j += turn.slices * together, is_right = false) {
        const Unit unit(u, turn, stale, j + block.unit - ahead);
        block.begin = unit.j * u.size;
        block.n = unit.exists ? min(u.size, stale.len - block.begin) : 0;
        block.batches = (min(u.size, stale.len - j * u.size) + BATCH - 1) / BATCH;
        if (!is_right) block.find();
        block.share = 1.0f / float(block.n), block.of_spread = 1.15f / sqrtf(float(block.n));
        float axis[Of::CHUNKS];
        block.find_mean(x, is_right);
        block.find_farthest(x);
#pragma unroll 1
        for (uint32 step = 1; step <= STEPS; step++) block.step(step == STEPS, x, axis);
#pragma unroll
        for (uint32 m = 0; m < Of::CHUNKS; m++) {
            const uint32 c = block.member + m * block.members;
            const bool is_there = c < block.dim && unit.exists;
            float mean = 0.0f;
            if (is_there) mean = block.mean()[c] - (p.centre ? as<float>(p.centre + turn.head * p.centre_head + c * p.centre_channel) : 0.0f);
            store(p, unit, turn.head, block.dim, 0, c, is_there, mean, block.members);
            store(p, unit, turn.head, block.dim, 1, c, is_there, axis[m], block.members);
        }
        block.sync();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) index_axes_8(const __grid_constant__ AxisParams p) { update_axes<1, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_axes_16(const __grid_constant__ AxisParams p) { update_axes<2, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_axes_32(const __grid_constant__ AxisParams p) { update_axes<4, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_wide_axes_8(const __grid_constant__ AxisParams p) { update_axes<1, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_wide_axes_16(const __grid_constant__ AxisParams p) { update_axes<2, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) index_wide_axes_32(const __grid_constant__ AxisParams p) { update_axes<4, true>(p); }
