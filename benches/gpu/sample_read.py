"""What bounds sampling without filters: kernels that read the same bfloat16 logits in the same shape, and leave out the rest.

Used by sample.py. Rows are cut into segments of 4096 logits. Where rows are few a cluster of eight CTAs has a row, four segments each, in shared memory; a
team of two warps has a segment, and every warp tells all CTAs of the cluster what it has found. (Of the fewest rows the library's clusters are of sixteen
CTAs.) Where rows are many each of the twelve warps of a CTA, one on each multiprocessor, goes through segments of its own by bulk copies of 8 KiB, two at a
time. Both read what the library reads, by as many CTAs and copies.

`read` finds each segment's largest logit. `weigh` also adds up the segment's weights, by the operations that docs/verify-sample.md counts. Nothing is drawn,
no row is put together from its segments, and no request from its rows: what a call takes beyond them is that, and to read what is asked of each request.
"""

import ctypes
import math

import torch

from launch import Module

_SOURCE = rb"""
using uint = unsigned int;
using ulong = unsigned long long;
constexpr uint SEGMENT = 4096, STRIP = 8, WARP = 32, BYTES = SEGMENT * 2, ALL = 0xffffffff;

struct Params {
    const char *logits;  // [rows, tokens], tokens a multiple of 8
    uint4 *out;          // of each segment: its largest number, 0, its sum
    float c;             // log2 e / temperature
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
__device__ uint larger(uint a, uint b) {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
__device__ void larger(uint4 &a, const uint4 &b) { a = {larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w)}; }
__device__ uint key_of(float x) {
    const uint bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ float number_of(uint key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }
// The largest number of a warp's strips.
__device__ float largest(const uint4 &four) {
    const uint two = larger(larger(four.x, four.y), larger(four.z, four.w));
    return number_of(__reduce_max_sync(ALL, key_of(fmaxf(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000)))));
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
// The sum of a strip's weights, in 2^-40.
__device__ ulong sum(const uint4 &strip, float m, float c) {
    float w[8];
#pragma unroll
    for (uint e = 0; e < 8; ++e) {
        const uint word = e < 2 ? strip.x : e < 4 ? strip.y : e < 6 ? strip.z : strip.w;
        w[e] = weight(__uint_as_float(e % 2 ? word & 0xffff0000 : word << 16), m, c);
    }
    const float all = __fadd_rn(__fadd_rn(__fadd_rn(w[0], w[1]), __fadd_rn(w[2], w[3])), __fadd_rn(__fadd_rn(w[4], w[5]), __fadd_rn(w[6], w[7])));
    return __float2ull_rz(__fmul_rn(all, 1099511627776.0f));
}
__device__ ulong warp_sum(ulong x) {
#pragma unroll
    for (uint step = 1; step < WARP; step *= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}
// Fills a lane's strip up past the row's end.
__device__ void fill(uint place) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0xff80ff80) : "memory");
}
__device__ void begin() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
extern __shared__ __align__(128) char stages[];

constexpr uint STREAM_WARPS = 12, STAGES = 2;

template <bool WEIGHS> __device__ void stream(const Params &p) {
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
        expect(barrier, tokens_of(n) * 2);
        copy(at + turn % STAGES * BYTES, p.logits + (ulong(n / p.segments) * p.tokens + n % p.segments * SEGMENT) * 2, tokens_of(n) * 2, barrier);
    };
    ask(first, 0);
#pragma unroll 1
    for (uint n = first, turn = 0; n < past; ++n, ++turn) {
        const uint stage = at + turn % STAGES * BYTES;
        wait(barriers[warp][turn % STAGES], turn / STAGES);
        if (turn == 0) ask(n + 1, 1);
        const uint tokens = tokens_of(n);
        for (uint h = tokens / STRIP / WARP; h < SEGMENT / STRIP / WARP; ++h)
            if ((h * WARP + lane) * STRIP >= tokens) fill(stage + (h * WARP + lane) * 16);
        uint4 best = load(stage + lane * 16);
#pragma unroll 5
        for (uint h = 1; h < SEGMENT / STRIP / WARP; ++h) larger(best, load(stage + (h * WARP + lane) * 16));
        const float m = largest(best);
        ulong found = 0;
        __syncwarp();
        if (WEIGHS) {
#pragma unroll 2
            for (uint k = 0; k < SEGMENT / STRIP / WARP; ++k) found += sum(load(stage + (lane * 16 + (k ^ lane % 16)) * 16), m, p.c);
            found = warp_sum(found);
        }
        if (lane == 0) p.out[n] = {__float_as_uint(m), 0, uint(found), uint(found >> 32)};
        if (tokens < SEGMENT) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        ask(n + STAGES, turn + STAGES);
    }
}

constexpr uint CTAS = 8, TEAMS = 4, THREADS = 256, WARPS = THREADS / WARP, TEAM = WARPS / TEAMS, PART = SEGMENT / TEAM;

template <bool WEIGHS> __device__ void cluster(const Params &p) {
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
        const uint s = rank * TEAMS + threadIdx.x, bytes = tokens_of(s) * 2;
        expect(copied[threadIdx.x], bytes);
        if (bytes) copy(address(stages) + threadIdx.x * BYTES, p.logits + (ulong(row) * p.tokens + s * SEGMENT) * 2, bytes, copied[threadIdx.x]);
    }
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    __syncthreads();
    const uint s = rank * TEAMS + team, place = address(stages) + team * BYTES + warp % TEAM * PART * 2, tokens = tokens_of(s);
    wait(copied[team], 0);
    for (uint k = 0; k < PART / STRIP / WARP; ++k)
        if (warp % TEAM * PART + (k * WARP + lane) * STRIP >= tokens) fill(place + (k * WARP + lane) * 16);
    __syncwarp();
    uint4 best = load(place + lane * 16);
#pragma unroll
    for (uint k = 1; k < PART / STRIP / WARP; ++k) larger(best, load(place + (k * WARP + lane) * 16));
    float m = largest(best);
    if (lane == 0) numbers[warp] = m;
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(team + 1), "r"(TEAM * WARP) : "memory");
    m = fmaxf(numbers[team * TEAM], numbers[team * TEAM + 1]);
    ulong found = 0;
    if (WEIGHS && tokens) {
#pragma unroll 2
        for (uint k = 0; k < PART / STRIP / WARP; ++k) found += sum(load(place + (lane * 8 + (k ^ lane % 8)) * 16), m, p.c);
        found = warp_sum(found);
    }
    if (lane < CTAS) {
        uint there, arrived;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(&parts[rank * WARPS + warp])), "r"(lane));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(arrived) : "r"(address(&told)), "r"(lane));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(there), "r"(__float_as_uint(m)), "r"(0), "r"(uint(found)), "r"(uint(found >> 32)), "r"(arrived) : "memory");
    }
    wait(told, 0);
    // Each CTA has been told all, and writes what is its own.
    const uint own = rank * TEAMS + threadIdx.x;
    if (threadIdx.x < TEAMS && own < p.segments) {
        const uint4 a = parts[own * TEAM], b = parts[own * TEAM + 1];
        const ulong both = (ulong(a.w) << 32 | a.z) + (ulong(b.w) << 32 | b.z);
        p.out[row * p.segments + own] = {a.x, 0, uint(both), uint(both >> 32)};
    }
}

extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) stream_read(const __grid_constant__ Params p) { stream<false>(p); }
extern "C" __global__ void __launch_bounds__(STREAM_WARPS * WARP, 1) stream_weigh(const __grid_constant__ Params p) { stream<true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 5) cluster_read(const __grid_constant__ Params p) { cluster<false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 5) cluster_weigh(const __grid_constant__ Params p) { cluster<true>(p); }
"""
_SEGMENT = 4096


class _Params(ctypes.Structure):
    _fields_ = [("logits", ctypes.c_void_p), ("out", ctypes.c_void_p), ("c", ctypes.c_float)]
    _fields_ += [(name, ctypes.c_uint) for name in ("tokens", "segments", "rows")]


class SampleRead:
    """Needs compute capability 9.0."""

    _SHAPES = {"stream": (12 * 32, 12 * 2 * 8192), "cluster": (256, 4 * 8192)}  # threads of a CTA, bytes of its shared memory

    def __init__(self):
        self._module = Module(_SOURCE)
        names = [(shape, what) for shape in self._SHAPES for what in ("read", "weigh")]
        self._kernels = {(shape, what): self._module.kernel(f"{shape}_{what}", self._SHAPES[shape][1]) for shape, what in names}
        self._multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    @staticmethod
    def takes(logits):
        return logits.dtype == torch.bfloat16 and logits.shape[-1] % 8 == 0 and logits.shape[-1] <= 32 * _SEGMENT

    def call(self, logits, what):
        """call(i) for sets of logits [batch, rows, tokens], in the shape that the library takes them in."""
        tokens = logits[0].shape[-1]
        rows, segments = logits[0].numel() // tokens, -(-tokens // _SEGMENT)
        shape = "cluster" if rows * -(-segments // 4) <= 6 * self._multiprocessors else "stream"
        threads, shared = self._SHAPES[shape]
        ctas = rows * 8 if shape == "cluster" else min(self._multiprocessors, -(-rows * segments // 12))
        out = torch.zeros(rows, segments, 4, dtype=torch.int32, device="cuda")
        prepared = []
        for each in logits:
            params = _Params(each.data_ptr(), out.data_ptr(), math.log2(math.e) / 0.8, tokens, segments, rows)
            prepared.append((params, (ctypes.c_void_p * 1)(ctypes.addressof(params))))
        kernel = self._kernels[shape, what]

        def call(i):
            self._module.launch(kernel, (ctas, 1, 1), threads, shared, prepared[i][1], 8 if shape == "cluster" else 0)

        call(0)
        self._check(logits[0].reshape(rows, tokens), out, what)
        return call

    @staticmethod
    def _check(logits, out, what):
        rows, segments = out.shape[:2]
        numbers = torch.full((rows, segments * _SEGMENT), -math.inf, device="cuda")
        numbers[:, : logits.shape[1]] = logits.float()
        numbers = numbers.view(rows, segments, _SEGMENT)
        largest = numbers.amax(2)
        assert torch.equal(out[:, :, 0].view(torch.float32), largest), "not the largest logits"
        sums = (numbers.double() - largest[:, :, None]).div_(0.8).exp_().sum(2) if what == "weigh" else torch.zeros_like(largest).double()
        found = out[:, :, 2:].contiguous().view(torch.int64)[:, :, 0].double() / 2**40
        assert torch.allclose(found, sums, rtol=1e-5, atol=0), "not the sums of weights"

    def times(self, logits, timer):
        """Median microseconds of `read` and of `weigh`."""
        return {what: timer.graph(self.call(logits, what), len(logits)) for what in ("read", "weigh")}
