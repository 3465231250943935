"""Sampling and verification of sampled drafts beside FlashInfer and torch, in one process.

    python benches/gpu/sample.py [--out FILE] [--quick | --goals]

Batch 1 … 256, γ 0 … 8, V 32000 … 151936, bfloat16 and float32 logits, without filters, with top-k 50 and top-p .95, and with top-p alone, with and
without draft rows. `graph` is GPU time, from calls in a CUDA graph. `copy` is a device copy that moves as many bytes as the logits and draft rows have,
half of them read. `read` and `weigh` are kernels that read as many rows, of 128256 tokens by as many CTAs and copies (`sample_read.py`): `read` finds the
largest numbers, `weigh` also adds up the weights, and neither draws. Of 32000 tokens they may take longer than the library, and they do not take 151936.

Without draft rows a draft token is what the call itself draws in its place, with likelihood `share`, else a random one; `accepted` is how many of them a request
accepts, the mean. `share` is 1 but for some rows: all draft tokens are accepted, every row of logits counts, and no call does more. Where some are refused, a call with
filters does not decide all rows past them. With draft rows the draft tokens are random, and mostly the first is refused: rejection sampling then draws from what the
row has left. FlashInfer's chain is given the same draft tokens and accepts others of them: a token x with likelihood p(x), and not because it is what a coupled draw
gives. `chain_accepted` is its own mean, and its time is one in which it accepts so many.

`softmax` is torch's of the target's logits, `torch` that and a draw from each row; neither filters. FlashInfer's chain_speculative_sampling takes
probabilities of both, without draft rows ones that are 1 at the draft tokens: `chain` is it alone, of what was made beforehand, `softmax_chain` with
FlashInfer's softmax of the target's logits before it, and with top_k_renorm_probs and top_p_renorm_probs for filters. `sampling` is FlashInfer's sampling
of every row, as a verification by coupling would need it: top_k_top_p_sampling_from_logits or sampling_from_logits, of logits that were divided by the
temperature beforehand, or, with top-p alone, its softmax and top_p_sampling_from_probs.

Only `--goals` has `cold`, what the call adds to a graph in which a kernel of many instructions and a read that fills the cache go before each, as in an
engine: its instructions come from memory, too; and the rows `greedy`, calls of the same shape whose requests are all greedy by their temperature,
`search`, kernels that search the bound of a filter in a plain way, which is no floor, and `kernels`. Microseconds, medians; logits are in no cache.
"""

import itertools
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
        self.random = [ids(batch, gamma) for _ in range(sets)]
        self.draft = [x.clone() for x in self.random]
        self.rows = [torch.randn(batch, gamma, tokens, device="cuda", dtype=dtype) * 3 for _ in range(sets)] if has_rows else None
        self.temperature = torch.full((batch,), 0.8, device="cuda")
        self.top_p = torch.full((batch,), 0.95, device="cuda")
        self.top_k = torch.full((batch,), 50, device="cuda", dtype=torch.int32)
        self.seeds = torch.arange(batch, device="cuda", dtype=torch.int64)
        self.positions = torch.zeros(batch, device="cuda", dtype=torch.int64)
        self.committed = torch.empty(batch, gamma + 1, device="cuda", dtype=torch.int32)
        self.next_token = torch.empty(batch, device="cuda", dtype=torch.int32)
        self.accepted = torch.empty(batch, device="cuda", dtype=torch.int32)

    def share(self, likelihood):
        """Makes each draft token what the call itself draws in its place, with this likelihood, else a random one; with draft rows all are random. Returns how
        many of them a request accepts, the mean."""
        call, accepted = self.ours(), 0.0
        for i, random in enumerate(self.random):
            self.draft[i].copy_(random)
            for r in range(0 if self.has_rows else self.gamma):
                call(i)
                self.draft[i][:, r] = self.committed[:, r]
            misses = torch.rand(random.shape, device="cuda") >= likelihood
            self.draft[i][misses] = random[misses]
            call(i)
            accepted += self.accepted.float().mean().item() / self.sets
        return accepted

    def arguments(self, i):
        filters = {name: getattr(self, name) for name in self.filters}
        rows = dict(draft_rows=self.rows[i]) if self.has_rows and self.gamma else {}
        return dict(draft=self.draft[i], target=self.logits[i], temperature=self.temperature, seeds=self.seeds, positions=self.positions,
                    committed=self.committed, next_token=self.next_token, accepted=self.accepted, **filters, **rows)

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

    def for_each_row(self, settings):
        return settings.repeat_interleave(self.gamma + 1)

    def bytes(self):
        """What a call reads of a data set."""
        rows = self.rows[0].nbytes if self.has_rows else 0
        return self.logits[0].nbytes + rows

    def all_rows(self):
        """Logits and draft rows of each data set in one tensor."""
        return [torch.cat(of, 1) for of in zip(self.logits, self.rows)] if self.has_rows else self.logits

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
        self.draft = [torch.softmax(x.float() / 0.8, -1) for x in case.rows] if case.has_rows else []
        self.take_drafts()
        batch = len(case.draft[0])
        self.top_k, self.top_p = case.for_each_row(case.top_k), case.for_each_row(case.top_p)
        self.accepted, self.emitted = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(2))
        self.seed, self.offset = noise()

    def take_drafts(self):
        """Of the case as it is now."""
        if not self.case.has_rows:
            self.draft = []  # what was there may be gone before the next are made
            self.draft = [self.certain(x) for x in self.case.draft]

    def mean_accepted(self):
        """What it emits of the drafts: `accepted` counts each as if the others were accepted."""
        self.emitted.zero_()
        self.alone(0)
        return self.emitted.float().mean().item()

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
        p = flashinfer.sampling.softmax(logits.flatten(0, 1), temperature=0.8)
        for name in self.case.filters:
            renormalize = getattr(flashinfer.sampling, f"{name}_renorm_probs")
            p = renormalize(p, getattr(self, name))
        return self.verify(i, p.view(logits.shape))

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
        self.top_k, self.top_p = case.for_each_row(case.top_k), case.for_each_row(case.top_p)
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
    """Vocabulary, γ and batch: the batch varies at γ = 5 and γ = 0 and a vocabulary of 128256, then γ and the vocabulary do."""
    if quick == "goals":
        return [(128256, 5, batch) for batch in (1, 8, 32, 128)]
    if quick:
        return [(128256, gamma, batch) for gamma in (0, 5) for batch in (1, 32)]
    grid = [(128256, 5, batch) for batch in (1, 8, 32, 128, 256)] + [(128256, 0, batch) for batch in (1, 32, 256)]
    grid += [(128256, gamma, 32) for gamma in (1, 3, 8)]
    return grid + [(tokens, 5, batch) for tokens in (32000, 151936) for batch in (1, 32)]


def floors(case, reading, timer):
    found = dict(copy=timer.copy(case.bytes()), read=None, weigh=None)
    if reading and reading.takes(case.logits[0]):
        found.update(reading.times(case.all_rows(), timer))
    return found


def peers(case, chain, timer, share):
    """Times of FlashInfer's calls. Sampling of every row does not depend on the drafts."""
    found = dict(chain_graph=None, softmax_chain_graph=None, sampling_graph=None, chain_accepted=None)
    if chain:
        chain.take_drafts()
        chain.check()
        found.update(chain_graph=timer.graph(chain.alone, case.sets), softmax_chain_graph=timer.graph(chain.with_softmax, case.sets),
                     chain_accepted=chain.mean_accepted())
    if not case.has_rows and share in (1, None):
        sampling = Sampling(case)
        sampling.check()
        found.update(sampling_graph=timer.graph(sampling, case.sets))
    return found


def checked(case):
    if len(case.temperature) <= 8:
        case.check()
    return case.ours()


def bounds(case, reading, timer, rows, form):
    """What else bounds a call that has a goal, and when its kernels run."""
    call = case.ours()
    cold = timer.cold(call, case.sets)
    rows.put("cold", **form, vanward_graph=timer.graph(call, case.sets), vanward_cold=cold)
    if case.filters and reading and reading.takes(case.logits[0]) and not case.has_rows:
        what = "top_p" if case.filters == TOP_P else "top_k"
        rows.put("search", **form, filter=what, search=reading.times(case.logits, timer, (what,))[what])
    if len(case.temperature) in (1, 128) and case.logits[0].dtype == torch.bfloat16:
        rows.put("kernels", **form, timeline=timer.timeline(call, case.sets))
    if not case.filters and not case.has_rows:
        case.temperature.zero_()
        form.update(accepted=case.share(1) if case.gamma else None)
        rows.put("greedy", **form, vanward_graph=timer.graph(checked(case), case.sets))
        case.temperature.fill_(0.8)


def shares(case, quick):
    """Likelihoods that a draft token is the request's own: less than 1 at few points, and None without drafts or with draft rows."""
    if case.has_rows or not case.gamma:
        return (None,)
    batch, rows, tokens = case.logits[0].shape
    return (1, 0.7, 0) if quick is not True and (tokens, rows) == (128256, 6) and batch in (8, 32, 128, 256) else (1,)


def measure(session, timer, rows, quick):
    rows.put("peer", flashinfer=flashinfer.__version__ if flashinfer else "none")
    reading = SampleRead() if torch.cuda.get_device_capability() >= (9, 0) else None
    for (tokens, gamma, batch), dtype in itertools.product(points(quick), (torch.bfloat16, torch.float32)):
        size = batch * (2 * gamma + 1) * tokens * dtype.itemsize
        case = Case(session, min(20, max(2, math.ceil((384 << 20) / size))), batch, gamma, tokens, dtype, NO_FILTERS, gamma > 0)
        by_torch = {f"{call.__name__}_graph": timer.graph(call, case.sets) for call in (case.softmax, case.torch) if quick != "goals"}
        for has_rows in (False, True) if gamma else (False,):
            case.has_rows = has_rows
            beside = dict(**floors(case, reading, timer), **by_torch)
            chain = Chain(case) if flashinfer and gamma else None
            for filters in (NO_FILTERS, ALL_FILTERS) + (() if has_rows else (TOP_P,)):
                case.filters = filters
                for share in shares(case, quick):
                    accepted = case.share(share or 0) if gamma else None
                    form = dict(batch=batch, gamma=gamma, tokens=tokens, dtype=str(dtype), filters="+".join(filters), draft_rows=has_rows)
                    form.update(share=share, accepted=accepted)
                    row = dict(**form, bytes=case.bytes(), vanward_graph=timer.graph(checked(case), case.sets), **beside)
                    rows.put("sample", **row, **(peers(case, chain, timer, share) if flashinfer else {}))
                    if quick == "goals" and share in (1, None):
                        bounds(case, reading, timer, rows, form)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=16 << 20, has_goals=True)
