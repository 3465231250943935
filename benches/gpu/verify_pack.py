"""Verification and packing beside torch, in one process: eager, in a CUDA graph, torch.compile, packing by a mask.

    python benches/gpu/verify_pack.py [--out FILE] [--quick | --goals]

The grid is that of the report this is compared with (batch 1 … 32, γ 8 … 128, α .3 … .9, KV width 128 … 2048) and goes on
to batch 1024 and γ = 5. Every result is compared with torch's before it is timed. `event` is one call between two CUDA events, the
host's time in it; `graph` is GPU time, from calls in a CUDA graph. `end` is the same call with two stop tokens, lengths, and the results
that tell where requests end, and `ratio` (with --goals, without torch beside) its time as a multiple of that without. Microseconds, medians; inputs are in no cache.
"""

import math

import torch

from timing import run

ALPHAS = (0.3, 0.6, 0.9)
GAMMAS = (5, 8, 64, 128)


def tokens(batch, gamma, alpha, seed):
    """Draft and target with k ~ Binomial(γ, α) accepted tokens a row."""
    random = torch.Generator().manual_seed(seed)
    k = torch.distributions.Binomial(gamma, torch.tensor(alpha)).sample((batch,)).long()
    draft = torch.randint(0, 4096, (batch, gamma), generator=random)
    target = torch.randint(0, 4096, (batch, gamma + 1), generator=random)
    position = torch.arange(gamma)
    agrees = position[None] < k[:, None]
    target[:, :gamma] = torch.where(agrees, draft, (draft + 1) % 4096)
    return draft.int().cuda(), target.int().cuda()


def torch_verify(draft, target):
    """The eager chain of the report: compare, any, argmax, select, gather."""
    gamma = draft.shape[1]
    differs = draft != target[:, :gamma]
    refused = differs.any(1)
    first = differs.to(torch.int64).argmax(1)
    accepted = torch.where(refused, first, torch.full_like(first, gamma))
    return accepted, target.gather(1, accepted[:, None]).squeeze(1)


def torch_mask_pack(rows, accepted):
    return rows[torch.arange(rows.shape[1], device="cuda")[None] < accepted[:, None]]


class Case:
    """`sets` data sets of one shape, the library's prepared calls on each, and torch's."""

    def __init__(self, session, sets, batch, gamma, alpha, width=None):
        self.inputs = [tokens(batch, gamma, alpha, seed) for seed in range(min(sets, 16))]
        self.inputs = [tuple(t.clone() for t in self.inputs[i % len(self.inputs)]) for i in range(sets)]
        self.accepted = [torch.empty(batch, dtype=torch.int32, device="cuda") for _ in range(sets)]
        self.next_token = [torch.empty(batch, dtype=torch.int32, device="cuda") for _ in range(sets)]
        self.session, self.width = session, width
        # No request ends, so that the same tokens are committed.
        self.end = [
            dict(
                stop=torch.tensor([5000, 5001], dtype=torch.int32, device="cuda"),
                remaining=torch.full((batch,), 1 << 20, dtype=torch.int32, device="cuda"),
                committed_len=torch.empty(batch, dtype=torch.int32, device="cuda"),
                finish=torch.empty(batch, dtype=torch.uint8, device="cuda"),
            )
            for _ in range(sets)
        ]
        if width:
            self.rows = [torch.randn(batch, gamma, width, device="cuda", dtype=torch.float16) for _ in range(sets)]
            self.packed = [torch.empty(batch * gamma, width, device="cuda", dtype=torch.float16) for _ in range(sets)]
            self.offsets = [torch.empty(batch + 1, dtype=torch.int32, device="cuda") for _ in range(sets)]

    def _verify_arguments(self, i):
        draft, target = self.inputs[i]
        return dict(draft=draft, target=target, accepted=self.accepted[i], next_token=self.next_token[i])

    def _pack_arguments(self, i):
        return dict(rows=[self.rows[i]], packed=[self.packed[i]], offsets=self.offsets[i])

    def prepared(self, kind, stream):
        """call(i) on a stream; 'two_step' is vwd_verify and then vwd_pack, '…_end' also cuts."""
        sets = range(len(self.inputs))
        cuts = kind.endswith("_end")
        kind = kind.removesuffix("_end")
        arguments = [{**self._verify_arguments(i), **(self.end[i] if cuts else {})} for i in sets]
        if kind == "verify":
            calls = [self.session.prepare_verify(**arguments[i], stream=stream) for i in sets]
        elif kind == "verify_pack":
            calls = [
                self.session.prepare_verify_pack(**arguments[i], **self._pack_arguments(i), stream=stream) for i in sets
            ]
        else:
            verify = self.prepared("verify", stream)
            pack = [
                self.session.prepare_pack(accepted=self.accepted[i], **self._pack_arguments(i), stream=stream)
                for i in sets
            ]
            return lambda i: (verify(i), pack[i]())
        return lambda i: calls[i]()

    def on_current_stream(self, kind):
        """call(i) on whichever stream is current: each stream's calls are prepared on first use."""
        by_stream = {}

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in by_stream:
                by_stream[stream] = self.prepared(kind, stream)
            by_stream[stream](i)

        return call

    def check(self):
        stream = torch.cuda.current_stream().cuda_stream
        accepted, next_token = torch_verify(*self.inputs[0])
        kind = "verify_pack" if self.width else "verify"
        for kind in (kind, f"{kind}_end"):
            self.accepted[0].fill_(-1)
            self.prepared(kind, stream)(0)
            assert torch.equal(self.accepted[0].long(), accepted), "accepted"
            assert torch.equal(self.next_token[0], next_token), "next_token"
            if self.width:
                packed = torch_mask_pack(self.rows[0], accepted)
                assert torch.equal(self.packed[0][: len(packed)], packed), "packed"
                assert int(self.offsets[0][-1]) == len(packed), "offsets"
        assert torch.equal(self.end[0]["committed_len"].long(), accepted + 1), "committed_len"
        assert not self.end[0]["finish"].any(), "finish"

    def packed_bytes(self):
        return int(torch_verify(*self.inputs[0])[0].sum()) * self.width * 2


def with_cut(timer, plain, cut, sets):
    found = dict(vanward_graph=timer.graph(plain, sets), end_graph=timer.graph(cut, sets))
    return dict(**found, ratio=found["end_graph"] / found["vanward_graph"])


def verify(session, timer, rows, quick):
    compiled = None if quick == "goals" else torch.compile(torch_verify, dynamic=False)
    for batch in (1, 32, 1024) if quick else (1, 4, 16, 32, 128, 512, 1024):
        for gamma in (5, 8, 128) if quick else GAMMAS:
            for alpha in (0.6,) if quick else ALPHAS:
                sets = 100
                case = Case(session, sets, batch, gamma, alpha)
                case.check()
                ours, ours_end = case.on_current_stream("verify"), case.on_current_stream("verify_end")
                peer = lambda i: torch_verify(*case.inputs[i])  # noqa: E731
                row = dict(batch=batch, gamma=gamma, alpha=alpha)
                if quick == "goals":
                    rows.put("verify", **row, **with_cut(timer, ours, ours_end, sets))
                    continue
                row.update(vanward_event=timer.event(ours, sets), empty_event=timer.event(timer.launch_empty, sets))
                row.update(torch_event=timer.event(peer, sets))
                if batch in (1, 32) and gamma in (8, 128) and alpha == 0.6:
                    row.update(compile_event=timer.event(lambda i: compiled(*case.inputs[i]), sets))
                row.update(vanward_graph=timer.graph(ours, sets), torch_graph=timer.graph(peer, sets))
                row.update(end_event=timer.event(ours_end, sets), end_graph=timer.graph(ours_end, sets))
                rows.put("verify", **row)


def verify_pack(session, timer, rows, quick):
    for batch in (4, 32, 128) if quick else (1, 4, 16, 32, 128, 512, 1024):
        for gamma in (5, 8, 128) if quick else GAMMAS:
            for width in (2048,) if quick else (128, 512, 1024, 2048):
                for alpha in (0.9,) if quick else ALPHAS:
                    sets = min(100, max(3, math.ceil((384 << 20) / (batch * gamma * width * 2))))
                    case = Case(session, sets, batch, gamma, alpha, width)
                    case.check()
                    peer = lambda i: torch_mask_pack(case.rows[i], torch_verify(*case.inputs[i])[0])  # noqa: E731
                    one, two = case.on_current_stream("verify_pack"), case.on_current_stream("two_step")
                    row = dict(batch=batch, gamma=gamma, width=width, alpha=alpha, packed_bytes=case.packed_bytes())
                    cut = case.on_current_stream("verify_pack_end")
                    if quick == "goals":
                        rows.put("verify_pack", **row, **with_cut(timer, one, cut, sets))
                        continue
                    row.update(vanward_event=timer.event(one, sets), two_step_event=timer.event(two, sets))
                    row.update(torch_event=timer.event(peer, sets, 40))
                    row.update(vanward_graph=timer.graph(one, sets), two_step_graph=timer.graph(two, sets))
                    row.update(end_event=timer.event(cut, sets), end_graph=timer.graph(cut, sets))
                    rows.put("verify_pack", **row)
                    del case, peer, one, two, cut


def measure(session, timer, rows, quick):
    if quick != "goals":  # to import it takes seconds
        torch._dynamo.config.cache_size_limit = 64
    verify(session, timer, rows, quick)
    verify_pack(session, timer, rows, quick)


if __name__ == "__main__":
    run(__doc__, measure, has_goals=True)
