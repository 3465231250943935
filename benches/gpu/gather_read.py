"""What bounds attention over lists: a kernel that reads the same listed bytes and joins as many partial results, and computes nothing.

Used by attention.py. A list is shared out over CTAs. Each looks its pages up, reads its rows of keys and values through a ring of
copies that are always in flight, folds them into as many words as the partial result of a KV head has, and stores these; the last CTA
of a list to come adds them up. Several query positions have more of a result: nine have 36 rows of a KV head and sixteen 64, of 128 channels, a maximum
and a sum each. Then the CTAs of a list are a cluster or several, as those of verify128 are: each CTA sends every other of its cluster its part of the
rows, which adds them up, and where a list has several clusters, the last CTA to come of those with the same rows adds up what they left in memory.
It is launched as the library launches its own kernels, in the shape that is best for the case.
"""

import ctypes
import functools
import math

import torch

from launch import Module

_SOURCE = rb"""
using uint = unsigned int;
constexpr int GROUP = 4, DIM = 128, ROW = DIM * 2;  // bytes of a token's key, or value
constexpr int PARTIAL = GROUP * (DIM + 2);
constexpr int THREADS = 256, LANES = ROW / 16, ROWS = THREADS / LANES;  // rows at once
constexpr int MOST_PAGES = 1024;

struct Params {
    const int *ids, *table;           // [lists, count], [B, pages]
    const char *keys, *values;        // [pages, block, heads, DIM]
    float *partials, *out;            // [lists, splits, PARTIAL], [lists, PARTIAL]; of rows [lists, clusters, MOST, PITCH], [lists, MOST, PITCH]
    uint *tickets;                    // [lists, splits], zero
    int count, log2_block, heads, pages, ctas;  // ctas: of a cluster
};

template <int STAGES> struct Shared {
    bool is_last;
    int pages[MOST_PAGES];
    uint4 landing[STAGES][4][THREADS];  // each thread's own: the key and the value of two rows
};

__device__ void copy(uint4 &to, const char *from) {
    const uint at = __cvta_generic_to_shared(&to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// What the thread reads, folded into a word.
template <int STAGES> __device__ uint read(const Params &p, Shared<STAGES> &shared) {
    const int list = blockIdx.y, splits = gridDim.x, head = list % p.heads, thread = threadIdx.x;
    const int rows = p.count * (1 << p.log2_block) / splits, first = rows * blockIdx.x, first_block = first >> p.log2_block;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = thread; first_block + i <= first + rows - 1 >> p.log2_block; i += THREADS)
        shared.pages[i] = p.table[list / p.heads * p.pages + p.ids[list * p.count + first_block + i]];
    __syncthreads();

    const int turns = rows / (2 * ROWS);
    auto ask = [&](int turn) {
        if (turn < turns) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = first + (2 * turn + i) * ROWS + thread / LANES, block = 1 << p.log2_block;
                const long long token = static_cast<long long>(shared.pages[(row >> p.log2_block) - first_block]) * block + (row & block - 1);
                const long long from = (token * p.heads + head) * ROW + thread % LANES * 16;
                copy(shared.landing[turn % STAGES][2 * i][thread], p.keys + from);
                copy(shared.landing[turn % STAGES][2 * i + 1][thread], p.values + from);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    uint sum = 0;
#pragma unroll
    for (int turn = 0; turn < STAGES - 1; turn++) ask(turn);
    for (int turn = 0; turn < turns; turn++) {
        ask(turn + STAGES - 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 x = shared.landing[turn % STAGES][i][thread];
            sum ^= x.x ^ x.y ^ x.z ^ x.w;
        }
    }
    return sum;
}

template <int STAGES> __device__ void run(const Params &p) {
    extern __shared__ __align__(16) char memory[];
    auto &shared = reinterpret_cast<Shared<STAGES> &>(memory);
    const int list = blockIdx.y, splits = gridDim.x, thread = threadIdx.x;
    const uint sum = read<STAGES>(p, shared);
    float *mine = p.partials + (list * splits + blockIdx.x) * PARTIAL;
    for (int i = thread; i < PARTIAL; i += THREADS) mine[i] = __uint_as_float(sum & 0x3fffffff);
    __syncthreads();
    if (thread == 0) {
        uint before;
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(p.tickets + list), "r"(splits - 1) : "memory");
        shared.is_last = before == splits - 1;
    }
    __syncthreads();
    if (!shared.is_last) return;
    for (int i = thread; i < PARTIAL; i += THREADS) {
        float joined = 0;
#pragma unroll 8
        for (int split = 0; split < splits; split++) joined += __ldcg(p.partials + (list * splits + split) * PARTIAL + i);
        p.out[list * PARTIAL + i] = joined;
    }
}

#if __CUDA_ARCH__ >= 900
constexpr int PITCH = DIM + 4, QUADS = DIM / 4;  // floats of a row, fours of its channels
constexpr int MOST_RECEIVED = 64;  // rows, by 16 CTAs

template <int STAGES> struct ClusterShared {
    Shared<STAGES> reading;
    alignas(16) float received[MOST_RECEIVED][PITCH];  // from each CTA of the cluster, its state of this CTA's rows
    unsigned long long arrived;
};

__device__ uint address_in(uint at, int cta) {
    uint there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(cta));
    return there;
}

struct Row {
    float4 joined{0, 0, 0, 0};
    float2 sums{0, 0};

    __device__ void add(const float4 &four, const float2 &two) {
        joined = {joined.x + four.x, joined.y + four.y, joined.z + four.z, joined.w + four.w};
        sums = {sums.x + two.x, sums.y + two.y};
    }
    __device__ void store(float *to, int quad) const {
        __stcg(reinterpret_cast<float4 *>(to) + quad, joined);
        if (quad == 0) __stcg(reinterpret_cast<float2 *>(to + DIM), sums);
    }
};

template <int STAGES, int MOST> __device__ void run_rows(const Params &p) {
    extern __shared__ __align__(16) char memory[];
    auto &shared = reinterpret_cast<ClusterShared<STAGES> &>(memory);
    const int list = blockIdx.y, ctas = p.ctas, clusters = gridDim.x / ctas, cluster = blockIdx.x / ctas, rank = blockIdx.x % ctas, thread = threadIdx.x;
    const int share = (MOST + ctas - 1) / ctas, begin = min(rank * share, MOST), own = min(share, MOST - begin);
    const uint arrived = __cvta_generic_to_shared(&shared.arrived);
    if (thread == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        const uint bytes = ctas * own * (DIM + 2) * sizeof(float);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(bytes) : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    const uint x = read<STAGES>(p, shared.reading) & 0x3fffffff;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int n = thread; n < MOST * QUADS; n += THREADS) {
        const int row = n / QUADS, quad = n % QUADS, cta = row / share;
        const uint to = address_in(__cvta_generic_to_shared(&shared.received[rank * share + row - cta * share][0]), cta);
        const uint there = address_in(arrived, cta);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %1, %1, %1}, [%2];"
                     ::"r"(to + quad * 16), "r"(x), "r"(there) : "memory");
        if (quad == 0)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %1}, [%2];"
                         ::"r"(to + DIM * 4), "r"(x), "r"(there) : "memory");
    }
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t"
                 "@!done bra again;\n\t}" ::"r"(arrived) : "memory");
    float *const out = p.out + (list * MOST + begin) * PITCH;
    float *const parts = p.partials + (list * clusters * MOST + begin) * PITCH;  // of the list's first cluster
    for (int n = thread; n < own * QUADS; n += THREADS) {
        const int row = n / QUADS, quad = n % QUADS;
        Row sum;
#pragma unroll 4
        for (int cta = 0; cta < ctas; cta++) {
            const float *from = shared.received[cta * share + row];
            sum.add(reinterpret_cast<const float4 *>(from)[quad], reinterpret_cast<const float2 *>(from + DIM)[0]);
        }
        sum.store((clusters == 1 ? out : parts + cluster * MOST * PITCH) + row * PITCH, quad);
    }
    if (clusters == 1) return;
    __syncthreads();
    if (thread == 0) {
        uint before;
        uint *const ticket = p.tickets + list * gridDim.x + rank;
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(clusters - 1) : "memory");
        shared.reading.is_last = before == clusters - 1;
    }
    __syncthreads();
    if (!shared.reading.is_last) return;
    for (int n = thread; n < own * QUADS; n += THREADS) {
        const int row = n / QUADS, quad = n % QUADS;
        Row sum;
#pragma unroll 8
        for (int part = 0; part < clusters; part++) {
            const float *from = parts + (part * MOST + row) * PITCH;
            sum.add(__ldcg(reinterpret_cast<const float4 *>(from) + quad), __ldcg(reinterpret_cast<const float2 *>(from + DIM)));
        }
        sum.store(out + row * PITCH, quad);
    }
}

#define ROWS_KERNEL(MOST, STAGES) \
    extern "C" __global__ void __launch_bounds__(THREADS) gather_read_##MOST##_rows_##STAGES(const __grid_constant__ Params p) { run_rows<STAGES, MOST>(p); }
ROWS_KERNEL(36, 3)
ROWS_KERNEL(36, 6)
ROWS_KERNEL(36, 11)
ROWS_KERNEL(64, 3)
ROWS_KERNEL(64, 6)
ROWS_KERNEL(64, 11)
#endif

extern "C" __global__ void __launch_bounds__(THREADS) gather_read_3(const __grid_constant__ Params p) { run<3>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) gather_read_6(const __grid_constant__ Params p) { run<6>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) gather_read_13(const __grid_constant__ Params p) { run<13>(p); }
"""
_PARTIAL = 4 * (128 + 2)
_PITCH = 128 + 4
_ROWS = (36, 64)  # of a KV head: nine positions, and sixteen
_STAGES = (3, 6, 13)  # four, two and one CTA on a multiprocessor
_STAGES_OF_ROWS = (3, 6, 11)  # two and one
_MOST_PAGES = 1024


class _Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("ids", "table", "keys", "values", "partials", "out", "tickets")]
    _fields_ += [(name, ctypes.c_int) for name in ("count", "log2_block", "heads", "pages", "ctas")]


class GatherRead:
    def __init__(self):
        self._module = Module(_SOURCE)
        has_clusters = torch.cuda.get_device_capability() >= (9, 0)
        self._kernels = {None: self._found("gather_read_%d", _STAGES)}
        for rows in _ROWS if has_clusters else ():
            self._kernels[rows] = self._found(f"gather_read_{rows}_rows_%d", _STAGES_OF_ROWS, 64 * _PITCH * 4 + 16)

    def _found(self, name, all_stages, received=0):
        """Kernels by their stages, those that have room, with their shared memory. `received`: bytes of rows that a cluster sends."""
        kernels = {}
        for stages in all_stages:
            shared = 16 + 4 * _MOST_PAGES + stages * (16 << 10) + received
            kernel = self._module.kernel(name % stages, shared, has_large_clusters=received > 0)
            if kernel:
                kernels[stages] = kernel, shared
        return kernels

    def call(self, case, shape, stages, rows=None):
        """
        call(i) of an attention.Case of bfloat16 with 4 query heads for each of its KV heads of 128 channels. `shape`: CTAs that share a list, or, with
        `rows`, those of a cluster and the clusters.
        """
        ctas, clusters = shape if rows else (1, shape)
        splits, lists = ctas * clusters, case.ids[0].shape[0] * case.ids[0].shape[1]
        sizes = ((lists, clusters, rows, _PITCH), (lists, rows, _PITCH)) if rows else ((lists, splits, _PARTIAL), (lists, _PARTIAL))
        partials, out = (torch.zeros(size, device="cuda") for size in sizes)
        tickets = torch.zeros(lists * splits, dtype=torch.int32, device="cuda")
        heads, pages = case.keys[0].shape[2], case.table.shape[1]
        kernel, shared = self._kernels[rows][stages]
        prepared = []
        for ids, keys, values in zip(case.ids, case.keys, case.values):
            tensors = (ids.contiguous(), case.table, keys, values, partials, out, tickets)
            params = _Params(*(t.data_ptr() for t in tensors), case.count, case.block.bit_length() - 1, heads, pages, ctas)
            prepared.append((tensors, params, (ctypes.c_void_p * 1)(ctypes.addressof(params))))

        def call(i):
            self._module.launch(kernel, (splits, lists, 1), 256, shared, prepared[i][2], ctas if rows else 0)

        call(0)
        joined = self._rows(case, ctas, clusters, rows) if rows else self._read(case, splits)
        assert torch.equal(out, joined), f"{shape} CTAs, {stages} stages: not what the lists name"
        return call

    @staticmethod
    def _words(case, splits):
        """Each thread's exclusive or of what it reads, of four words in turn, as a number: [lists, splits, 256]."""
        threads = (case.gathered(of, 0).contiguous().view(torch.int32).view(-1, splits, case.count * case.block // splits // 16, 256, 4)
                   for of in (case.keys, case.values))
        words = functools.reduce(torch.bitwise_xor, (x for of in threads for turn in of.unbind(2) for x in turn.unbind(-1)))
        return (words & 0x3FFFFFFF).view(torch.float32)

    @classmethod
    def _read(cls, case, splits):
        """What call(0) leaves, added up over the splits."""
        partials = cls._words(case, splits)[:, :, torch.arange(_PARTIAL, device="cuda") % 256]
        return functools.reduce(torch.add, partials.unbind(1))

    @classmethod
    def _rows(cls, case, ctas, clusters, rows):
        """
        The same of rows, added up over the CTAs of each cluster and then over clusters: four channels of a row are one thread's, and the maximum and
        the sum are those of the first four.
        """
        channels = torch.arange(_PITCH, device="cuda")
        quads = torch.where(channels < 128, channels // 4, 0)
        threads = (torch.arange(rows, device="cuda")[:, None] * 32 + quads) % 256
        partials = cls._words(case, ctas * clusters)[:, :, threads] * (channels < 130)
        return functools.reduce(torch.add, (functools.reduce(torch.add, of.unbind(1)) for of in partials.unflatten(1, (clusters, ctas)).unbind(1)))

    def time(self, case, timer, rows=None):
        """Median microseconds of the shape that is best for this case."""
        lists, tokens = case.ids[0].shape[0] * case.ids[0].shape[1], case.count * case.block
        shapes = [(ctas, clusters) for ctas in (2, 4, 8, 16) for clusters in (1, 2, 4, 8, 16)] if rows else [1, 2, 4, 8, 16, 32]
        fits = lambda n: tokens % (32 * n) == 0 and 64 <= n * lists <= (512 if rows else 1024) and case.count // n < _MOST_PAGES  # noqa: E731
        shapes = [shape for shape in shapes if fits(math.prod(shape) if rows else shape)]
        assert shapes, "no shape for these lists"
        return min(timer.graph(self.call(case, shape, stages, rows), case.sets) for shape in shapes for stages in self._kernels[rows])
