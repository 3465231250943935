"""Sampling and verification of sampled drafts beside FlashInfer and torch, in one process.

    python benches/gpu/sample.py [--out FILE] [--quick | --goals]

Batch 1 … 256, γ 0 … 8, V 32000 … 151936, bfloat16 and float32 logits, without filters, with top-k 50 and top-p .95, and with top-p alone, with and
without draft rows. FlashInfer takes probabilities: its
softmax is timed with it and alone. `copy` is
a device copy that moves as many bytes as the logits have, half of them read. `graph` is GPU time, from calls in a CUDA graph. `cold` is what the call
adds to a graph in which a kernel of many instructions and a read that fills the cache go before each, as in an engine: its instructions come from
memory, too. `floor` has kernels that read the same logits by as many CTAs and copies (`sample_read.py`): `read` finds the largest numbers, `weigh` also
adds up the weights, and neither draws. Microseconds, medians; logits are in no cache.
"""

import math

import torch

from sample_read import SampleRead
from timing import run, vanward

try:
    import flashinfer
except ImportError:
    flashinfer = None


# Filters of a call. `top_p` alone keeps some 2,300 of 128,256 such logits, with `top_k` at most 50.
NO_FILTERS, ALL_FILTERS, TOP_P = (), ("top_k", "top_p"), ("top_p",)


class Case:
    """`sets` data sets of one shape."""

    def __init__(self, session, sets, batch, gamma, tokens, dtype, filters, has_rows):
        self.session, self.sets, self.gamma, self.filters, self.has_rows = session, sets, gamma, filters, has_rows
        self.logits = [torch.randn(batch, gamma + 1, tokens, device="cuda", dtype=dtype) * 3 for _ in range(sets)]
        ids = lambda *shape: torch.randint(0, tokens, shape, device="cuda", dtype=torch.int32)  # noqa: E731
        self.draft = [ids(batch, gamma) for _ in range(sets)]
        self.rows = [torch.randn(batch, gamma, tokens, device="cuda", dtype=dtype) * 3 for _ in range(sets)] if has_rows else None
        self.temperature = torch.full((batch,), 0.8, device="cuda")
        self.top_p = torch.full((batch,), 0.95, device="cuda")
        self.top_k = torch.full((batch,), 50, device="cuda", dtype=torch.int32)
        self.seeds = torch.arange(batch, device="cuda", dtype=torch.int64)
        self.positions = torch.zeros(batch, device="cuda", dtype=torch.int64)
        self.committed = torch.empty(batch, gamma + 1, device="cuda", dtype=torch.int32)
        self.next_token = torch.empty(batch, device="cuda", dtype=torch.int32)

    def arguments(self, i):
        filters = {name: getattr(self, name) for name in self.filters}
        rows = dict(draft_rows=self.rows[i]) if self.has_rows and self.gamma else {}
        return dict(draft=self.draft[i], target=self.logits[i], temperature=self.temperature, seeds=self.seeds, positions=self.positions,
                    committed=self.committed, next_token=self.next_token, **filters, **rows)

    def ours(self):
        by_stream = {}

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in by_stream:
                by_stream[stream] = [self.session.prepare_verify_sample(**self.arguments(i), stream=stream) for i in range(self.sets)]
            by_stream[stream][i]()

        return call

    def check(self):
        """On the CPU the library commits the same."""
        self.ours()(0)
        torch.cuda.synchronize()
        with vanward.Session("cpu") as cpu:
            given = {name: t.cpu() for name, t in self.arguments(0).items()}
            cpu.verify_sample(**given)
        assert torch.equal(self.committed.cpu(), given["committed"]), "committed"

    def softmax(self, i):
        return torch.softmax(self.logits[i].float() / 0.8, -1)

    def chain(self, i):
        """FlashInfer's verification: softmax of the target, and of the draft or one-hot rows."""
        target = self.softmax(i)
        if self.has_rows:
            draft = torch.softmax(self.rows[i].float() / 0.8, -1)
        else:
            draft = torch.nn.functional.one_hot(self.draft[i].long(), target.shape[-1]).float()
        return flashinfer.sampling.chain_speculative_sampling(draft, self.draft[i], target)

    def plain(self, i):
        if self.filters:
            return flashinfer.sampling.top_k_top_p_sampling_from_logits(self.logits[i][:, 0].float() / 0.8, self.top_k, self.top_p)
        return flashinfer.sampling.sampling_from_logits(self.logits[i][:, 0].float() / 0.8)

    def torch(self, i):
        """Plain sampling of every row, as a verification by coupling would need it."""
        p = self.softmax(i)
        return torch.argmax(p / torch.empty_like(p).exponential_(), -1)


def points(quick):
    """Vocabulary, γ and batch: the first two vary at a vocabulary of 128256, then the vocabulary does."""
    if quick == "goals":
        return [(128256, 5, batch) for batch in (1, 8, 32, 128)]
    if quick:
        return [(128256, gamma, batch) for gamma in (0, 5) for batch in (1, 32)]
    grid = [(128256, gamma, batch) for gamma in (0, 5) for batch in (1, 8, 32, 128, 256)]
    grid += [(128256, gamma, batch) for gamma in (1, 3, 8) for batch in (1, 32)]
    return grid + [(tokens, gamma, batch) for tokens in (32000, 151936) for gamma in (0, 5) for batch in (1, 32)]


def measure(session, timer, rows, quick):
    rows.put("peer", flashinfer=flashinfer.__version__ if flashinfer else "none")
    reading = SampleRead() if torch.cuda.get_device_capability() >= (9, 0) else None
    for tokens, gamma, batch in points(quick):
        for dtype in (torch.bfloat16,) if quick == "goals" else (torch.bfloat16, torch.float32):
            for filters in (NO_FILTERS, ALL_FILTERS, TOP_P):
                for has_rows in (False, True) if gamma and filters != TOP_P else (False,):
                    size = batch * ((gamma + 1) + (gamma if has_rows else 0)) * tokens * dtype.itemsize
                    sets = min(20, max(2, math.ceil((384 << 20) / size)))
                    case = Case(session, sets, batch, gamma, tokens, dtype, filters, has_rows)
                    if batch <= 8:
                        case.check()
                    row = dict(batch=batch, gamma=gamma, tokens=tokens, dtype=str(dtype), filters="+".join(filters), draft_rows=has_rows, bytes=size)
                    ours = case.ours()
                    row.update(vanward_graph=timer.graph(ours, sets), vanward_cold=timer.cold(ours, sets), copy=timer.copy(size))
                    if quick != "goals":
                        row.update(softmax_graph=timer.graph(case.softmax, sets), torch_graph=timer.graph(case.torch, sets))
                    if flashinfer and gamma and not filters:
                        row.update(flashinfer_event=timer.event(case.chain, sets))
                    elif flashinfer and not gamma and filters != TOP_P:
                        row.update(flashinfer_event=timer.event(case.plain, sets))
                    rows.put("sample", **row)
                    if reading and reading.takes(case.logits[0]) and not filters and not has_rows:
                        rows.put("floor", batch=batch, gamma=gamma, tokens=tokens, bytes=size, vanward_graph=row["vanward_graph"], **reading.times(case.logits, timer))
                    if quick == "goals":
                        rows.put("kernels", batch=batch, filters="+".join(filters), draft_rows=has_rows, timeline=timer.timeline(case.ours(), sets))
                    del case


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=16 << 20, has_goals=True)
