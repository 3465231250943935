"""What the GPU benchmarks share: how a call is timed, the floors beside it, where rows go, and the command line."""

import argparse
import ctypes
import json
import math
import pathlib
import statistics
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bindings" / "python"))
import vanward  # noqa: E402

_FLUSH_BYTES = 256 << 20  # larger than any L2 cache
_CODE_BYTES = 128 << 10  # more than the instructions that a multiprocessor keeps
_PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry empty() { ret; }
.visible .entry evict_code(.param .u64 data) {
.reg .f32 %f<9>;
.reg .u64 %r<3>;
ld.param.u64 %r1, [data];
cvta.to.global.u64 %r2, %r1;
LOADS
FMAS
st.global.f32 [%r2], %f0;
ret;
}
"""


def _ptx():
    """A kernel that does nothing, and one of _CODE_BYTES of instructions, 16 bytes each, that runs them once."""
    loads = "\n".join(f"ld.global.f32 %f{n}, [%r2+{4 * n}];" for n in range(8))
    fmas = "\n".join(f"fma.rn.f32 %f{n % 8}, %f{n % 8}, %f{(n + 3) % 8}, %f{(n + 5) % 8};" for n in reversed(range(_CODE_BYTES // 16)))
    return _PTX.replace("LOADS", loads).replace("FMAS", fmas).encode()


class Timer:
    def __init__(self):
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._cuda = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._empty, self._evict_code = ctypes.c_void_p(), ctypes.c_void_p()
        assert self._cuda.cuModuleLoadData(ctypes.byref(module), _ptx()) == 0
        for kernel, name in [(self._empty, b"empty"), (self._evict_code, b"evict_code")]:
            assert self._cuda.cuModuleGetFunction(ctypes.byref(kernel), module, name) == 0
        self._data = ctypes.c_uint64(self._flush.data_ptr())
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._data))
        self._multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def launch_empty(self, _=0):
        self._launch(self._empty, 1, None)

    def _launch(self, kernel, ctas, arguments):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert self._cuda.cuLaunchKernel(kernel, ctas, 1, 1, 32, 1, 1, 0, stream, arguments, None) == 0

    def event(self, call, sets, repeats=100):
        """Median microseconds of call(i) between two events, the host's time in it. No cache holds set i."""
        for i in range(10):
            call(i % sets)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        self._flush.fill_(1)
        torch.cuda.synchronize()
        for i, (begin, end) in enumerate(pairs):
            begin.record()
            call(i % sets)
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3

    def queued(self, call, sets, repeats=40):
        """Median microseconds of call(i) between two events, all enqueued before the first call begins."""
        for i in range(3):
            call(i % sets)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)  # some milliseconds
        for i, (begin, end) in enumerate(pairs):
            begin.record()
            call(i % sets)
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3

    def graph(self, call, sets, replays=15, before=lambda: None, calls=None):
        """
        Median microseconds of one of twenty calls or more, or of `calls`, in a CUDA graph: GPU time. Before a replay `before` is called, and the cache is
        filled by reads: it holds neither a set nor anything to write back, which would be paid for by the first calls.
        """
        calls = calls or (20 if sets >= 20 else sets * math.ceil(20 / sets))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())  # which makes the call's inputs
        with torch.cuda.stream(side):
            for i in range(3):
                call(i % sets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i % sets)
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            self._flush.view(torch.int64).sum()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
        return statistics.median(times)

    def among(self, call, sets):
        """
        Median microseconds that call(i) adds to a CUDA graph in which a read that fills the cache goes before each, as a layer's weights
        do in an engine: it cannot begin before the other one ends.
        """
        return self._after(lambda: self._flush.view(torch.int64).sum(), call, sets)

    def cold(self, call, sets):
        """
        As `among`, with a kernel of many instructions before the read: those of the call have to come from memory, too. An upper bound: where the call's
        instructions take the place of that kernel's, what this one then takes longer counts as the call's, up to 9 microseconds.
        """

        def fill():
            self._launch(self._evict_code, 2 * self._multiprocessors, self._arguments)
            self._flush.view(torch.int64).sum()

        return self._after(fill, call, sets)

    def _after(self, fill, call, sets):
        def both(i):
            fill()
            call(i)

        return self.graph(both, sets) - self.graph(lambda i: fill(), sets)

    def timeline(self, call, sets, repeats=20):
        """
        When the kernels of call(i) begin and end, in microseconds from the first one's beginning, medians: "kernel 0.0-3.1 ...". The profiler adds some time
        to each, and a kernel that may start early waits for the one before it.
        """
        call(0)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for i in range(repeats):
                self._flush.view(torch.int64).sum()
                torch.cuda.synchronize()
                call(i % sets)
                torch.cuda.synchronize()
        events = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        found = sorted(((e.time_range.start, e.time_range.end, e.name) for e in events if "reduce" not in e.name and "em" != e.name[:2]))
        names = [name for _, _, name in found]
        count = len(names) // repeats
        if count == 0 or names != names[:count] * repeats:
            return f"{len(names)} kernels in {repeats} calls: {sorted(set(names))}"
        begin = [found[n - n % count][0] for n in range(len(found))]
        median = lambda k, edge: statistics.median(found[n][edge] - begin[n] for n in range(k, len(found), count))  # noqa: E731
        return "  ".join(f"{names[k]} {median(k, 0):.1f}-{median(k, 1):.1f}" for k in range(count))

    def copy(self, size):
        """Median microseconds of a copy that reads and writes half of so many bytes each."""
        sets = min(20, max(2, math.ceil((384 << 20) / size)))
        buffers = [torch.empty(2, size // 2, dtype=torch.uint8, device="cuda") for _ in range(sets)]
        return self.graph(lambda i: buffers[i][0].copy_(buffers[i][1]), sets)


class Rows:
    """One JSON object a line, and a readable line on stdout."""

    def __init__(self, path):
        self._file = open(path, "w") if path else None

    def put(self, what, **row):
        cells = (f"{key}={self.short(value)}" for key, value in row.items())
        print(f"{what:12}", "  ".join(cells), flush=True)
        if self._file:
            self._file.write(json.dumps({"what": what, **row}) + "\n")
            self._file.flush()

    @staticmethod
    def short(value):
        if not isinstance(value, float):
            return str(value)
        return f"{value:.2f}" if value == 0 or abs(value) >= 0.05 else f"{value:.4f}"


def run(about, measure, scratch_bytes=0, has_goals=False, parts=(), choices=None):
    """
    The benchmark's command line: measure(session, timer, rows, quick). Calls that are captured find so much scratch. `has_goals`: quick may be
    "goals", for the points that have a goal. `parts`: names of which --only chooses some; measure then takes those to measure, too. `choices`: options
    of the benchmark's own, {name: arguments of add_argument}; measure then takes all options in place of quick, and the first row has them.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file for one JSON object a row")
    parser.add_argument("--quick", action="store_true", help="a few points of the grid")
    if has_goals:
        parser.add_argument("--goals", dest="quick", action="store_const", const="goals", help="the points that have a goal, without torch beside")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=f"some of: {', '.join(parts)}")
    for name, about_it in (choices or {}).items():
        parser.add_argument(f"--{name}", **about_it)
    options = parser.parse_args()
    chosen = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in vars(options).items() if name != "out" and value}
    torch.manual_seed(0)
    timer, rows = Timer(), Rows(options.out)
    with vanward.Session("cuda") as session:
        info = session.info()
        rows.put("machine", device=torch.cuda.get_device_name(), torch=torch.__version__, vanward=vanward.__version__,
                 driver=info.driver_version, load_microseconds=info.load_microseconds, **(chosen if choices else {}))
        if scratch_bytes:
            # A stream cannot be given scratch while it captures.
            torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
            session.reserve(scratch_bytes, stream=torch.cuda.graph.default_capture_stream.cuda_stream)
        measure(session, timer, rows, options if choices else options.quick, *([options.only] if parts else []))
