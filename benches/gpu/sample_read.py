"""What bounds sampling: kernels that read the same logits in the same shape, and leave out the rest.

Used by sample.py. Rows are cut into segments of 8 KiB. Where rows are few a cluster of eight CTAs has a row of bfloat16, and one of sixteen a row of float32,
four segments each, in shared memory; a team of two warps has a segment, and every warp tells all CTAs of the cluster what it has found. (Of the fewest rows
the library's clusters are of sixteen CTAs, too.) Where rows are many each of the twelve warps of a CTA, one on each multiprocessor, goes through segments of its own
by bulk copies, two at a time. Both read what the library reads, by as many CTAs and copies.

`read` finds each segment's largest logit. `weigh` also adds up the segment's weights, by the operations that docs/verify-sample.md counts. Nothing is drawn,
no row is put together from its segments, and no request from its rows: what a call takes beyond them is that, and to read what is asked of each request.

`top_p` and `top_k` have each row in the shared memory of a cluster, however many rows there are. They find its largest logit, and then a bound in two
turns of 256 bins: how far tokens lie below the largest, to a 2048th of a factor of two in weight. `top_p` weighs each token in the first turn, and those of one bin in
the second; `top_k` counts them. The exact bound, what it keeps, and the draw are left out. They are no floor: each token is an atomic addition of 64 bits to shared
memory, which the library does without. A call that takes longer than they do has room.
"""

import ctypes
import math

import torch

from launch import Module

_SCALE = math.log2(math.e) / 0.8

_SOURCE = rb"""
using uint = unsigned int;
using ulong = unsigned long long;
#define INFINITY __int_as_float(0x7f800000)
constexpr uint WARP = 32, BYTES = 8192, UNITS = BYTES / 16, ALL = 0xffffffff;
struct bf16 { unsigned short bits; };

struct Params {
    const char *logits;  // [rows, tokens], rows a multiple of 16 bytes
    uint4 *out;          // of each segment: its largest number, 0, its sum; of a row's first one, where a bound is searched: 0, the bound, what lies above
    float c;             // log2 e / temperature
    float most;          // a bound is where so many tokens, or so much of their mass, are reached
    uint tokens, segments, rows;
};

__device__ uint address(const void *p) { return __cvta_generic_to_shared(p); }
__device__ void open(const ulong &barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address(&barrier)) : "memory");
}
__device__ void expect(const ulong &barrier, uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes) : "memory");
}
__device__ void wait(const ulong &barrier, uint phase) {
    asm volatile("{\n\t.reg .pred done;\nagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}"
                 ::"r"(address(&barrier)), "r"(phase & 1) : "memory");
}
__device__ void copy(uint to, const char *from, uint bytes, const ulong &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(address(&barrier)) : "memory");
}
__device__ uint4 load(uint from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}
// The numbers of 16 bytes.
template <typename T> struct Of;
template <> struct Of<bf16> {
    static constexpr uint COUNT = 8, NONE = 0xff80ff80;
    static __device__ void larger(uint &a, uint b) { asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); }
    static __device__ float number(const uint (&words)[4], uint e) { return __uint_as_float(e % 2 ? words[e / 2] & 0xffff0000 : words[e / 2] << 16); }
    static __device__ float largest(uint word) { return fmaxf(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)); }
};
template <> struct Of<float> {
    static constexpr uint COUNT = 4, NONE = 0xff800000;
    static __device__ void larger(uint &a, uint b) { a = __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b))); }
    static __device__ float number(const uint (&words)[4], uint e) { return __uint_as_float(words[e]); }
    static __device__ float largest(uint word) { return __uint_as_float(word); }
};
template <typename T> constexpr uint SEGMENT = UNITS * Of<T>::COUNT;
template <typename T> __device__ void larger(uint4 &a, const uint4 &b) {
    Of<T>::larger(a.x, b.x), Of<T>::larger(a.y, b.y), Of<T>::larger(a.z, b.z), Of<T>::larger(a.w, b.w);
}
__device__ uint key_of(float x) {
    const uint bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ float number_of(uint key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }
// The largest number of a warp's strips.
template <typename T> __device__ float largest(uint4 four) {
    Of<T>::larger(four.x, four.y), Of<T>::larger(four.z, four.w), Of<T>::larger(four.x, four.z);
    return number_of(__reduce_max_sync(ALL, key_of(Of<T>::largest(four.x))));
}
__device__ float weight(float x, float m, float c) {
    const float d = fmaxf(__fmul_rn(__fsub_rn(x, m), c), -100.0f);
    const float whole = __fadd_rn(d, 12582912.0f), f = __fsub_rn(d, __fsub_rn(whole, 12582912.0f));
    float p = __uint_as_float(0x3aaddd0b);
    p = __fmaf_rn(p, f, __uint_as_float(0x3c1e7544));
    p = __fmaf_rn(p, f, __uint_as_float(0x3d635ba9));
    p = __fmaf_rn(p, f, __uint_as_float(0x3e75fcde));
    p = __fmaf_rn(p, f, __uint_as_float(0x3f317215));
    p = __fmaf_rn(p, f, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(whole) << 23));
}
// The sum of the weights of 16 bytes, in 2^-40.
template <typename T> __device__ ulong sum(const uint4 &four, float m, float c) {
    constexpr uint COUNT = Of<T>::COUNT;
    const uint words[4] = {four.x, four.y, four.z, four.w};
    float w[COUNT];
#pragma unroll
    for (uint e = 0; e < COUNT; ++e) w[e] = weight(Of<T>::number(words, e), m, c);
#pragma unroll
    for (uint step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (uint e = 0; e < COUNT; e += 2 * step) w[e] = __fadd_rn(w[e], w[e + step]);
    return __float2ull_rz(__fmul_rn(w[0], 1099511627776.0f));
}
__device__ ulong warp_sum(ulong x) {
#pragma unroll
    for (uint step = 1; step < WARP; step *= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}
// Fills 16 bytes up past the row's end.
template <typename T> __device__ void fill(uint place) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(Of<T>::NONE) : "memory");
}
__device__ void begin() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
extern __shared__ __align__(128) char stages[];

constexpr uint STREAM_WARPS = 12, STAGES = 2;

template <typename T, bool WEIGHS> __device__ void stream(const Params &p) {
    constexpr uint SEGMENT = ::SEGMENT<T>, COUNT = Of<T>::COUNT, SIZE = sizeof(T);
    __shared__ ulong barriers[STREAM_WARPS][STAGES];
    const uint lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, number = warp * gridDim.x + blockIdx.x, warps = gridDim.x * STREAM_WARPS;
    const uint at = address(stages) + warp * STAGES * BYTES;
    const ulong all = ulong(p.rows) * p.segments;
    const uint first = all * number / warps, past = all * (number + 1) / warps;
    if (lane < STAGES) open(barriers[warp][lane]);
    __syncwarp();
    begin();
    const auto tokens_of = [&](uint n) { return min(p.tokens - n % p.segments * SEGMENT, SEGMENT); };
    const auto ask = [&](uint n, uint turn) {
        if (lane || n >= past) return;
        const ulong &barrier = barriers[warp][turn % STAGES];
        expect(barrier, tokens_of(n) * SIZE);
        copy(at + turn % STAGES * BYTES, p.logits + (ulong(n / p.segments) * p.tokens + n % p.segments * SEGMENT) * SIZE, tokens_of(n) * SIZE, barrier);
    };
    ask(first, 0);
#pragma unroll 1
    for (uint n = first, turn = 0; n < past; ++n, ++turn) {
        const uint stage = at + turn % STAGES * BYTES;
        wait(barriers[warp][turn % STAGES], turn / STAGES);
        if (turn == 0) ask(n + 1, 1);
        const uint tokens = tokens_of(n);
        for (uint h = tokens / COUNT / WARP; h < UNITS / WARP; ++h)
            if ((h * WARP + lane) * COUNT >= tokens) fill<T>(stage + (h * WARP + lane) * 16);
        uint4 best = load(stage + lane * 16);
#pragma unroll 5
        for (uint h = 1; h < UNITS / WARP; ++h) larger<T>(best, load(stage + (h * WARP + lane) * 16));
        const float m = largest<T>(best);
        ulong found = 0;
        __syncwarp();
        if (WEIGHS) {
#pragma unroll 2
            for (uint k = 0; k < UNITS / WARP; ++k) found += sum<T>(load(stage + (lane * 16 + (k ^ lane % 16)) * 16), m, p.c);
            found = warp_sum(found);
        }
        if (lane == 0) p.out[n] = {__float_as_uint(m), 0, uint(found), uint(found >> 32)};
        if (tokens < SEGMENT) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        ask(n + STAGES, turn + STAGES);
    }
}

constexpr uint TEAMS = 4, THREADS = 256, WARPS = THREADS / WARP, TEAM = WARPS / TEAMS, PART = UNITS / TEAM, BINS = 256;
enum What { READS, WEIGHS, BOUNDS_P, BOUNDS_K };

// A cluster's shared memory: what is counted of each bin in each of two turns.
struct Search {
    ulong bins[2][BINS], warps[WARPS], above;
    uint digit;
};

// The bin in which `most` is reached, of all CTAs' bins; `above` is what lies in those before it.
template <uint CTAS> __device__ void reach(Search &search, uint turn, ulong above, float most, bool is_share) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const uint lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    ulong own = 0;
#pragma unroll
    for (uint cta = 0; cta < CTAS; ++cta) {
        uint there;
        ulong part;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(&search.bins[turn][threadIdx.x])), "r"(cta));
        asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(part) : "r"(there) : "memory");
        own += part;
    }
    ulong past = own;
#pragma unroll
    for (uint step = 1; step < WARP; step *= 2) {
        const ulong before = __shfl_up_sync(ALL, past, step);
        if (lane >= step) past += before;
    }
    if (lane == WARP - 1) search.warps[warp] = past;
    __syncthreads();
    ulong all = 0;
    for (uint w = 0; w < WARPS; ++w) {
        if (w < warp) past += search.warps[w];
        all += search.warps[w];
    }
    // A share is one of the first turn's sum.
    if (is_share && turn == 0 && threadIdx.x == 0) search.above = __float2ull_rz(__fmul_rn(float(all), most));
    __syncthreads();
    const ulong least = is_share ? search.above : ulong(most);
    __syncthreads();
    if (above + past >= least && above + past - own < least) search.digit = threadIdx.x, search.warps[0] = above + past - own;
    __syncthreads();
}

// Finds the bound of a row that the cluster has in shared memory: how far it lies below the largest number, in 2048ths of an order of magnitude of weights.
template <typename T, uint CTAS, bool COUNTS> __device__ void bound(const Params &p, Search &search, uint place, float m, uint row, uint rank) {
    const uint lane = threadIdx.x % WARP;
    ulong above = 0;
    uint high = 0;
#pragma unroll
    for (uint turn = 0; turn < 2; ++turn) {
#pragma unroll 2
        for (uint k = 0; k < PART / WARP; ++k) {
            const uint4 four = load(place + (k * WARP + lane) * 16);
            const uint words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (uint e = 0; e < Of<T>::COUNT; ++e) {
                const float x = Of<T>::number(words, e), far = fminf(__fmul_rn(__fmul_rn(__fsub_rn(m, x), p.c), 2048.0f), 65535.0f);
                const uint digits = uint(far);
                if (turn ? digits / BINS == high : x > -INFINITY)
                    atomicAdd(&search.bins[turn][turn ? digits % BINS : digits / BINS], COUNTS ? 1 : __float2ull_rz(__fmul_rn(weight(x, m, p.c), 1099511627776.0f)));
            }
        }
        reach<CTAS>(search, turn, above, p.most, !COUNTS);
        above = search.warps[0];
        if (turn == 0) high = search.digit;
    }
    if (rank == 0 && threadIdx.x == 0) p.out[row * p.segments] = {0, high * BINS + search.digit, uint(above), uint(above >> 32)};
    // Others may still read this CTA's bins.
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <typename T, What WHAT> __device__ void cluster(const Params &p) {
    constexpr uint SEGMENT = ::SEGMENT<T>, COUNT = Of<T>::COUNT, SIZE = sizeof(T), CTAS = 4 * SIZE;
    __shared__ ulong copied[TEAMS], told;
    __shared__ alignas(16) uint4 parts[CTAS * WARPS];
    __shared__ float numbers[WARPS];
    const uint lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, rank = blockIdx.x % CTAS, row = blockIdx.x / CTAS, team = warp / TEAM;
    if (threadIdx.x < TEAMS) open(copied[threadIdx.x]);
    if (threadIdx.x == 0) open(told), expect(told, CTAS * WARPS * 16);
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    begin();
    const auto tokens_of = [&](uint s) { return s < p.segments ? min(p.tokens - s * SEGMENT, SEGMENT) : 0; };
    if (threadIdx.x < TEAMS) {
        const uint s = rank * TEAMS + threadIdx.x, bytes = tokens_of(s) * SIZE;
        expect(copied[threadIdx.x], bytes);
        if (bytes) copy(address(stages) + threadIdx.x * BYTES, p.logits + (ulong(row) * p.tokens + s * SEGMENT) * SIZE, bytes, copied[threadIdx.x]);
    }
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    __syncthreads();
    const uint s = rank * TEAMS + team, place = address(stages) + team * BYTES + warp % TEAM * PART * 16, tokens = tokens_of(s);
    wait(copied[team], 0);
    for (uint k = 0; k < PART / WARP; ++k)
        if ((warp % TEAM * PART + k * WARP + lane) * COUNT >= tokens) fill<T>(place + (k * WARP + lane) * 16);
    __syncwarp();
    uint4 best = load(place + lane * 16);
#pragma unroll
    for (uint k = 1; k < PART / WARP; ++k) larger<T>(best, load(place + (k * WARP + lane) * 16));
    float m = largest<T>(best);
    if (lane == 0) numbers[warp] = m;
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(team + 1), "r"(TEAM * WARP) : "memory");
    m = fmaxf(numbers[team * TEAM], numbers[team * TEAM + 1]);
    ulong found = 0;
    if (WHAT == WEIGHS && tokens) {
#pragma unroll 2
        for (uint k = 0; k < PART / WARP; ++k) found += sum<T>(load(place + (lane * 8 + (k ^ lane % 8)) * 16), m, p.c);
        found = warp_sum(found);
    }
    if (lane < CTAS) {
        uint there, arrived;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(&parts[rank * WARPS + warp])), "r"(lane));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(arrived) : "r"(address(&told)), "r"(lane));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(there), "r"(__float_as_uint(m)), "r"(0), "r"(uint(found)), "r"(uint(found >> 32)), "r"(arrived) : "memory");
    }
    if constexpr (WHAT == BOUNDS_P || WHAT == BOUNDS_K) {
        __shared__ Search search;
        search.bins[0][threadIdx.x] = search.bins[1][threadIdx.x] = 0;
        wait(told, 0);
        float all = -INFINITY;
        for (uint n = lane; n < CTAS * WARPS; n += WARP) all = fmaxf(all, __uint_as_float(parts[n].x));
        all = number_of(__reduce_max_sync(ALL, key_of(all)));
        __syncthreads();
        bound<T, CTAS, WHAT == BOUNDS_K>(p, search, place, all, row, rank);
    } else {
        wait(told, 0);
        // Each CTA has been told all, and writes what is its own.
        const uint own = rank * TEAMS + threadIdx.x;
        if (threadIdx.x < TEAMS && own < p.segments) {
            const uint4 a = parts[own * TEAM], b = parts[own * TEAM + 1];
            const ulong both = (ulong(a.w) << 32 | a.z) + (ulong(b.w) << 32 | b.z);
            p.out[row * p.segments + own] = {a.x, 0, uint(both), uint(both >> 32)};
        }
    }
}

#define STREAM(type, what, weighs) \
    extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) stream_##what##_##type(const __grid_constant__ Params p) { stream<type, weighs>(p); }
#define CLUSTER(type, what, form) \
    extern "C" __global__ void __launch_bounds__(THREADS, 5) cluster_##what##_##type(const __grid_constant__ Params p) { cluster<type, form>(p); }
STREAM(bf16, read, false)
STREAM(bf16, weigh, true)
STREAM(float, read, false)
STREAM(float, weigh, true)
CLUSTER(bf16, read, READS)
CLUSTER(bf16, weigh, WEIGHS)
CLUSTER(bf16, top_p, BOUNDS_P)
CLUSTER(bf16, top_k, BOUNDS_K)
CLUSTER(float, read, READS)
CLUSTER(float, weigh, WEIGHS)
CLUSTER(float, top_p, BOUNDS_P)
CLUSTER(float, top_k, BOUNDS_K)
"""
_BYTES = 8192  # of a segment


class _Params(ctypes.Structure):
    _fields_ = [("logits", ctypes.c_void_p), ("out", ctypes.c_void_p), ("c", ctypes.c_float), ("most", ctypes.c_float)]
    _fields_ += [(name, ctypes.c_uint) for name in ("tokens", "segments", "rows")]


class SampleRead:
    """Needs compute capability 9.0."""

    _SHAPES = {"stream": (12 * 32, 12 * 2 * _BYTES), "cluster": (256, 4 * _BYTES)}  # threads of a CTA, bytes of its shared memory
    _TYPES = {torch.bfloat16: "bf16", torch.float32: "float"}
    _MOST = dict(top_p=0.95, top_k=50)

    def __init__(self):
        self._module = Module(_SOURCE)
        self._kernels = {}
        for shape, (_, shared) in self._SHAPES.items():
            for what in ("read", "weigh") + (("top_p", "top_k") if shape == "cluster" else ()):
                for name in self._TYPES.values():
                    self._kernels[shape, what, name] = self._module.kernel(f"{shape}_{what}_{name}", shared, has_large_clusters=shape == "cluster")
        self._multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    @classmethod
    def takes(cls, logits):
        size = logits.shape[-1] * logits.element_size()
        return logits.dtype in cls._TYPES and size % 16 == 0 and -(-size // _BYTES) <= 16 * logits.element_size()

    def call(self, logits, what):
        """call(i) for sets of logits [batch, rows, tokens]: in the shape that the library takes them in, or in clusters where a bound is searched."""
        tokens, size = logits[0].shape[-1], logits[0].element_size()
        rows, segments, ctas = logits[0].numel() // tokens, -(-tokens * size // _BYTES), 4 * size
        is_few = rows * -(-segments // 4) <= 6 * self._multiprocessors
        shape = "cluster" if is_few or what in self._MOST else "stream"
        threads, shared = self._SHAPES[shape]
        grid = rows * ctas if shape == "cluster" else min(self._multiprocessors, -(-rows * segments // 12))
        out = torch.zeros(rows, segments, 4, dtype=torch.int32, device="cuda")
        prepared = []
        for each in logits:
            params = _Params(each.data_ptr(), out.data_ptr(), _SCALE, self._MOST.get(what, 0), tokens, segments, rows)
            prepared.append((out, params, (ctypes.c_void_p * 1)(ctypes.addressof(params))))  # what the kernel writes lives as long as the call
        kernel = self._kernels[shape, what, self._TYPES[logits[0].dtype]]

        def call(i):
            self._module.launch(kernel, (grid, 1, 1), threads, shared, prepared[i][2], ctas if shape == "cluster" else 0)

        call(0)
        # Some thousand rows in double precision would not fit.
        check = self._check_bound if what in self._MOST else self._check
        check(logits[0].reshape(rows, tokens)[:64], out[:64], what)
        return call

    @staticmethod
    def _check(logits, out, what):
        rows, segments = out.shape[:2]
        numbers = torch.full((rows, segments * (_BYTES // logits.element_size())), -math.inf, device="cuda")
        numbers[:, : logits.shape[1]] = logits.float()
        numbers = numbers.view(rows, segments, -1)
        largest = numbers.amax(2)
        assert torch.equal(out[:, :, 0].view(torch.float32), largest), "not the largest logits"
        sums = (numbers.double() - largest[:, :, None]).div_(0.8).exp_().sum(2) if what == "weigh" else torch.zeros_like(largest).double()
        found = out[:, :, 2:].contiguous().view(torch.int64)[:, :, 0].double() / 2**40
        assert torch.allclose(found, sums, rtol=1e-5, atol=0), "not the sums of weights"

    @classmethod
    def _check_bound(cls, logits, out, what):
        """So much lies above the bound, and with what lies at it the aim is reached."""
        far = logits.float().amax(1, keepdim=True) - logits.float()
        digits = (far * torch.tensor(_SCALE, device="cuda") * 2048).clamp_(max=65535).int()
        weights = (far.double() / -0.8).exp_() if what == "top_p" else torch.ones_like(far, dtype=torch.float64)
        bound, aim = out[:, :1, 1], cls._MOST[what] * (weights.sum(1) if what == "top_p" else 1)
        above, here = ((weights * kept).sum(1) for kept in (digits < bound, digits == bound))
        found = out[:, :1, 2:].contiguous().view(torch.int64)[:, 0, 0].double() / (2**40 if what == "top_p" else 1)
        assert torch.allclose(found, above, rtol=1e-5, atol=0), "not what lies above the bound"
        assert ((above < aim * 1.0001) & (above + here > aim * 0.9999)).all(), "not the bound"

    def times(self, logits, timer, kinds=("read", "weigh")):
        """Median microseconds of each of these kinds."""
        return {what: timer.graph(self.call(logits, what), len(logits)) for what in kinds}
