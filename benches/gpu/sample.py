"""Sampling and verification of sampled drafts beside FlashInfer and torch, in one process.

    python benches/gpu/sample.py [--out FILE] [--quick | --goals]

Batch 1 … 256, γ 0 … 8, V 32000 … 151936, bfloat16 and float32 logits, without filters, with top-k 50 and top-p .95, and with top-p alone, with and
without draft rows. `softmax` is torch's of the target's logits, `torch` that and a draw from each row. FlashInfer's chain_speculative_sampling takes
probabilities of both, without draft rows ones that are 1 at the draft tokens: `chain` is it alone, of what was made beforehand, `softmax_chain` with
FlashInfer's softmax of the target's logits before it. `sampling` is FlashInfer's sampling of every row, as a verification by coupling would need it:
top_k_top_p_sampling_from_logits or sampling_from_logits, of logits that were divided by the temperature beforehand, or, with top-p alone, its softmax and
top_p_sampling_from_probs. `copy` is
a device copy that moves as many bytes as the logits have, half of them read. `graph` is GPU time, from calls in a CUDA graph. `cold` is what the call
adds to a graph in which a kernel of many instructions and a read that fills the cache go before each, as in an engine: its instructions come from
memory, too. `greedy` is a call of the same shape whose requests are all greedy by their temperature. `floor` has kernels that read the same logits by
as many CTAs and copies (`sample_read.py`): `read` finds the largest numbers, `weigh` also adds up the weights, and neither draws. `search` has kernels that
search the bound of a filter in a plain way, which is no floor. Microseconds, medians; logits are in no cache.
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

    def torch(self, i):
        """Plain sampling of every row, as a verification by coupling would need it."""
        p = self.softmax(i)
        return torch.argmax(p / torch.empty_like(p).exponential_(), -1)


class Chain:
    """FlashInfer's verification of a case's drafts, by probabilities that are made beforehand."""

    def __init__(self, case):
        self.case = case
        self.target = [case.softmax(i) for i in range(case.sets)]
        self.draft = [torch.softmax(x.float() / 0.8, -1) for x in case.rows] if case.has_rows else [self.certain(x) for x in case.draft]
        batch = len(case.draft[0])
        self.accepted, self.emitted = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(2))
        self.seed, self.offset = noise()

    def certain(self, draft):
        return torch.zeros(*draft.shape, self.target[0].shape[-1], device="cuda").scatter_(2, draft.long()[..., None], 1.0)

    def alone(self, i):
        return self.verify(i, self.target[i])

    def verify(self, i, target):
        """What is committed; the two counts beside it are `accepted` and `emitted`."""
        return flashinfer.sampling.chain_speculative_sampling(self.draft[i], self.case.draft[i], target, self.accepted, self.emitted,
                                                              seed=self.seed, offset=self.offset)[0]

    def with_softmax(self, i):
        logits = self.case.logits[i]
        return self.verify(i, flashinfer.sampling.softmax(logits.flatten(0, 1), temperature=0.8).view(logits.shape))

    def check(self):
        """Drafts up to where they are refused, a token, and −1."""
        for found in (self.alone(0), self.with_softmax(0)):
            committed = (found >= 0).sum(-1, keepdim=True)
            at = torch.arange(found.shape[1], device="cuda")
            assert ((found >= 0) == (at < committed)).all() and (committed > 0).all(), "tokens after the last"
            assert ((found[:, :-1] == self.case.draft[0]) | (at[:-1] >= committed - 1)).all(), "drafts"


class Sampling:
    """FlashInfer's sampling of every row of a case."""

    def __init__(self, case):
        self.filters, self.rows = case.filters, [x.flatten(0, 1) for x in case.logits]
        self.divided = None if case.filters == TOP_P else [x.float() / 0.8 for x in self.rows]
        each = len(self.rows[0]) // len(case.top_p)
        self.top_k, self.top_p = case.top_k.repeat_interleave(each), case.top_p.repeat_interleave(each)
        self.seed, self.offset = noise()

    def __call__(self, i):
        noise = dict(seed=self.seed, offset=self.offset)
        if self.filters == TOP_P:
            p = flashinfer.sampling.softmax(self.rows[i], temperature=0.8)
            return flashinfer.sampling.top_p_sampling_from_probs(p, self.top_p, **noise)
        if self.filters:
            return flashinfer.sampling.top_k_top_p_sampling_from_logits(self.divided[i], self.top_k, self.top_p, **noise)
        return flashinfer.sampling.sampling_from_logits(self.divided[i], **noise)

    def check(self):
        """With top-k, tokens are among the likeliest."""
        found = self(0).long()
        assert ((found >= 0) & (found < self.rows[0].shape[1])).all(), "tokens"
        if self.filters == ALL_FILTERS:
            likeliest = self.rows[0].float().topk(50).values[:, -1]
            assert (self.rows[0].float().gather(1, found[:, None])[:, 0] >= likeliest).all(), "filters"


def noise():
    """A seed and an offset, in tensors, so that calls can be captured."""
    return tuple(torch.full((1,), n, dtype=torch.int64, device="cuda") for n in (1234, 0))


def points(quick):
    """Vocabulary, γ and batch: the first two vary at a vocabulary of 128256, then the vocabulary does."""
    if quick == "goals":
        return [(128256, 5, batch) for batch in (1, 8, 32, 128)]
    if quick:
        return [(128256, gamma, batch) for gamma in (0, 5) for batch in (1, 32)]
    grid = [(128256, gamma, batch) for gamma in (0, 5) for batch in (1, 8, 32, 128, 256)]
    grid += [(128256, gamma, batch) for gamma in (1, 3, 8) for batch in (1, 32)]
    return grid + [(tokens, gamma, batch) for tokens in (32000, 151936) for gamma in (0, 5) for batch in (1, 32)]


def peers(case, timer):
    """Times of FlashInfer's calls, and of the softmax before them."""
    found = {}
    if case.gamma and not case.filters:
        chain = Chain(case)
        chain.check()
        found.update(chain_graph=timer.graph(chain.alone, case.sets), softmax_chain_graph=timer.graph(chain.with_softmax, case.sets))
    if not case.has_rows:
        sampling = Sampling(case)
        sampling.check()
        found.update(sampling_graph=timer.graph(sampling, case.sets))
    return found


BESIDE = {NO_FILTERS: ("read", "weigh"), ALL_FILTERS: ("top_k",), TOP_P: ("top_p",)}


def measure(session, timer, rows, quick):
    rows.put("peer", flashinfer=flashinfer.__version__ if flashinfer else "none")
    reading = SampleRead() if torch.cuda.get_device_capability() >= (9, 0) else None
    for tokens, gamma, batch in points(quick):
        for dtype in (torch.bfloat16, torch.float32):
            for filters in (NO_FILTERS, ALL_FILTERS, TOP_P):
                for has_rows in (False, True) if gamma and filters != TOP_P else (False,):
                    size = batch * ((gamma + 1) + (gamma if has_rows else 0)) * tokens * dtype.itemsize
                    sets = min(20, max(2, math.ceil((384 << 20) / size)))
                    case = Case(session, sets, batch, gamma, tokens, dtype, filters, has_rows)
                    if batch <= 8:
                        case.check()
                    form = dict(batch=batch, gamma=gamma, tokens=tokens, dtype=str(dtype), filters="+".join(filters))
                    row, ours = dict(**form, draft_rows=has_rows, bytes=size), case.ours()
                    row.update(vanward_graph=timer.graph(ours, sets), vanward_cold=timer.cold(ours, sets), copy=timer.copy(size))
                    if quick != "goals":
                        row.update(softmax_graph=timer.graph(case.softmax, sets), torch_graph=timer.graph(case.torch, sets))
                    if flashinfer:
                        row.update(peers(case, timer))
                    rows.put("sample", **row)
                    if reading and reading.takes(case.logits[0]) and not has_rows:
                        times = reading.times(case.logits, timer, BESIDE[filters])
                        rows.put("search" if filters else "floor", **form, bytes=size, vanward_graph=row["vanward_graph"], **times)
                    if not filters and not has_rows:
                        case.temperature.zero_()
                        if batch <= 8:
                            case.check()
                        rows.put("greedy", **form, vanward_graph=timer.graph(ours, sets))
                    if quick == "goals" and dtype == torch.bfloat16 and batch in (1, 128):
                        case.temperature.fill_(0.8)
                        rows.put("kernels", batch=batch, filters="+".join(filters), draft_rows=has_rows, timeline=timer.timeline(ours, sets))
                    del case, ours


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=16 << 20, has_goals=True)
