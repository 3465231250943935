"""The exact top k of rows of scores beside torch.topk and, where it can be imported, FlashInfer's, in one process.

    python benches/gpu/topk.py [--out FILE] [--quick]

Float32 scores from a normal distribution. Every result is compared with a stable sort before it is timed. `graph` is GPU time, from
calls in a CUDA graph; `ascending` gives ids by index, `best_first` in order, as the peers do. `floor` is the time in which the device
copies as many bytes as the scores have, half of them read. Microseconds, medians; inputs are in no cache.
"""

import math

import torch

from timing import run

try:
    import flashinfer
except ImportError:
    flashinfer = None

SHAPES = [(8, 2048, 128), (8, 8192, 128), (64, 8192, 128), (64, 16384, 128), (8, 131072, 128), (64, 131072, 128), (8, 131072, 2048),
          (64, 131072, 2048)]
MORE = [(8, 32768, 128), (1, 131072, 2048), (1, 1 << 20, 2048), (8, 1 << 20, 2048), (256, 2048, 128), (256, 8192, 128), (256, 131072, 2048)]


class Case:
    def __init__(self, session, rows, n, k):
        self.session, self.k = session, k
        self.sets = min(20, max(2, math.ceil((384 << 20) / (rows * n * 4))))
        self.scores = [torch.randn(rows, n, device="cuda") for _ in range(self.sets)]
        self.ids = torch.empty(rows, k, dtype=torch.int32, device="cuda")
        self.counts = torch.empty(rows, dtype=torch.int32, device="cuda")
        self.values = torch.empty(rows, k, device="cuda")

    def on_current_stream(self, order):
        """call(i) on whichever stream is current: each stream's calls are prepared on first use."""
        by_stream = {}

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in by_stream:
                by_stream[stream] = [
                    self.session.prepare_topk(
                        k=self.k, order=order, scores=scores, ids=self.ids, counts=self.counts, values=self.values, stream=stream
                    )
                    for scores in self.scores
                ]
            by_stream[stream][i]()

        return call

    def check(self):
        best = self.scores[0].sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
        for order, expected in (("best_first", best), ("ascending", best.sort(dim=-1).values)):
            self.on_current_stream(order)(0)
            torch.cuda.synchronize()
            assert torch.equal(self.ids.long(), expected), order
            assert torch.equal(self.values, self.scores[0].gather(1, expected)), "values"
            assert (self.counts == self.k).all(), "counts"


def measure(session, timer, rows, quick):
    for count, n, k in SHAPES if quick else SHAPES + MORE:
        case = Case(session, count, n, k)
        case.check()
        row = dict(rows=count, n=n, k=k, floor=timer.copy(count * n * 4))
        for order in ("ascending", "best_first"):
            row[f"{order}_graph"] = timer.graph(case.on_current_stream(order), case.sets)
        row["torch_graph"] = timer.graph(lambda i: case.scores[i].topk(k, dim=-1), case.sets)
        if flashinfer:
            row["flashinfer_graph"] = timer.graph(lambda i: flashinfer.top_k(case.scores[i], k), case.sets)
        rows.put("topk", **row)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=16 << 20)
