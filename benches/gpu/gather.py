"""Blocks from pinned host memory to the device, by each engine, beside torch and single copies, in one process.

    python benches/gpu/gather.py [--out FILE] [--quick]

Random blocks of 4 GiB of pinned memory, to slots in order. `kernel` reads lists on the device, `given` is the same kernel with lists on
the host, `copy` the copy engine, `auto` the library's choice for lists on the host and `of_best` its share of the better of these two;
`each` is a copy_ of each block (cudaMemcpyAsync), `torch` index_select into pinned memory and one copy. GB/s (10^9 bytes) from the median
time between two CUDA events; the host is ahead of the device for the library's engines, and its time counts for `each` and `torch`;
`kernel_graph` is one of several calls in a CUDA graph. `whole` is what the bus gives: one cudaMemcpyAsync of as many bytes that lie side
by side, timed as the engines are; `whole_graph`, in a graph. `auto`: up to how many copies of up to so many KiB the copy engine beats the
kernel, which is a device's row in src/ops/prefetch/cuda/engines.rs; of larger ones any number. `beside`: how much longer a kernel that
adds 1 to 2 GiB takes while blocks travel.
Every result is compared with the source before it is timed.
"""

import statistics

import torch

from timing import run, vanward

POOL = 4 << 30
SETS = 16
ENGINES = (("kernel", "kernel", "cuda"), ("given", "kernel", "cpu"), ("copy", "copy_engine", "cpu"), ("auto", "auto", "cpu"))


class Case:
    """`SETS` lists of `count` blocks of `size` bytes, and each way to bring them."""

    def __init__(self, session, pool, size, count):
        self.session, self.size, self.count = session, size, count
        self.source = pool.view(-1, size)
        self.target = torch.zeros(count, size, dtype=torch.uint8, device="cuda")
        self.ids = [torch.randperm(len(self.source))[:count].int() for _ in range(SETS)]
        self.lists = {"cuda": [ids.cuda() for ids in self.ids], "cpu": self.ids}
        self.rows = [[self.source[n] for n in ids.tolist()] for ids in self.ids]
        self.long = [ids.long() for ids in self.ids]
        self.staged = torch.empty(count, size, dtype=torch.uint8, pin_memory=True)

    def prepared(self, engine, place):
        """call(i) on whichever stream is current: each stream's calls are prepared on first use."""
        by_stream = {}

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in by_stream:
                more = dict(source=vanward.pinned(self.source), target=self.target, engine=engine, stream=stream)
                by_stream[stream] = [self.session.prepare_gather_blocks(source_ids=ids, **more) for ids in self.lists[place]]
            by_stream[stream][i]()

        return call

    def each(self, i):
        for to, row in enumerate(self.rows[i]):
            self.target[to].copy_(row, non_blocking=True)

    def torch(self, i):
        torch.index_select(self.source, 0, self.long[i], out=self.staged)
        self.target.copy_(self.staged, non_blocking=True)

    def whole(self, i):
        at = len(self.source) // SETS * i
        self.target.copy_(self.source[at : at + self.count], non_blocking=True)

    def check(self, call):
        self.target.zero_()
        call(0)
        torch.cuda.synchronize()
        assert torch.equal(self.target.cpu(), self.source[self.long[0]]), "blocks"

    def rate(self, time, call, repeats=40):
        self.check(call)
        return self.size * self.count / time(call, SETS, repeats) / 1e3


def most_copies(measured):
    """Of (KiB, count, GB/s of the kernel, GB/s of the copy engine): [KiB, most copies], the largest of the sizes that have the same."""
    most = {}
    for size, count, kernel, copy in sorted(measured):
        if size not in most:
            most[size] = [0, True]  # the count so far, and whether the copy engine has won up to here
        most[size][1] &= copy > kernel
        if most[size][1]:
            most[size][0] = count
    rows = []
    for size, (count, always) in most.items():
        if always and all(later for larger, (_, later) in most.items() if larger >= size):
            break
        if rows and rows[-1][1] == count:
            rows.pop()
        rows.append([size, count])
    return rows


def rates(session, pool, timer, rows, quick):
    sizes, measured = (4, 16, 64) if quick else (1, 4, 8, 16, 32, 64, 128, 256), []
    for size in sizes:
        for count in (64, 512) if quick else (16, 32, 64, 128, 256, 512):
            case = Case(session, pool, size << 10, count)
            row = dict(kib=size, count=count)
            for name, engine, place in ENGINES:
                row[name] = case.rate(timer.queued, case.prepared(engine, place))
            row["of_best"] = row["auto"] / max(row["given"], row["copy"])
            row["kernel_graph"] = case.rate(lambda call, sets, _: timer.graph(call, sets), case.prepared("kernel", "cuda"))
            gigabytes = (size << 10) * count / 1e9
            row["whole"] = gigabytes / timer.queued(case.whole, SETS) * 1e6
            row["whole_graph"] = gigabytes / timer.graph(case.whole, SETS) * 1e6
            for name, peer in (("each", case.each), ("torch", case.torch)):
                row[name] = case.rate(timer.event, peer, 5)
            rows.put("gather", **row)
            measured.append((size, count, row["given"], row["copy"]))
    for up_to, most in most_copies(measured):
        rows.put("auto", kib=up_to, most=most)


def beside(session, pool, rows):
    """A kernel that device memory limits, alone and while blocks travel on another stream."""
    a, b = (torch.empty(2 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    for size, engine, place in ((4, "kernel", "cuda"), (16, "kernel", "cuda"), (64, "copy_engine", "cpu")):
        with torch.cuda.stream(side):
            case = Case(session, pool, size << 10, 512)
            call = case.prepared(engine, place)
            call(0)
        times = {False: [], True: []}
        for n in range(40):
            travelling = n % 2 == 1
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                for i in range(SETS if travelling else 0):
                    call(i)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.add(a.view(torch.int32), 1, out=b.view(torch.int32))
            end.record()
            torch.cuda.synchronize()
            times[travelling].append(begin.elapsed_time(end) * 1e3)
        alone, with_copies = statistics.median(times[False]), statistics.median(times[True])
        rows.put("beside", kib=size, count=512, engine=engine, alone=alone, travelling=with_copies, slower=with_copies / alone)


def measure(session, timer, rows, quick):
    pool = torch.empty(POOL, dtype=torch.uint8, pin_memory=True)
    pool.view(torch.int64).copy_(torch.arange(POOL // 8, device="cuda").mul_(0x9E3779B97F4A7C15 - (1 << 64)))
    with torch.cuda.stream(torch.cuda.Stream()):
        rates(session, pool, timer, rows, quick)
        beside(session, pool, rows)


if __name__ == "__main__":
    run(__doc__, measure)
