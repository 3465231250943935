"""Block summaries and selection beside torch, in one process: torch's matmul and topk, eager and in a CUDA graph.

    python benches/gpu/selection.py [--out FILE] [--quick]

8 KV heads of 128 channels, groups of 4, blocks of 64 tokens, bfloat16 (axis: summaries in INT4), 128 blocks of nb; the first and the
two last forced. Every selection is compared with torch's before it is timed. `event` is one call between two CUDA events, the host's
time in it; `graph` is GPU time, from calls in a CUDA graph. `floor` is the time in which the device copies as many bytes as the
summaries have, half of them read. `among` is what the call adds to a graph in which a read that fills the cache goes before each, as a
layer's weights do in an engine. `paged` are the same with a page for each block and a table of pages in random order, as an engine's
pages of 64 tokens have it. `layers` are the updates of one token in all layers, by `each` layer's call or `together`; `cold` is `among`
with a kernel of many instructions before the read, after which those of the call come from memory, too. `sizes`, `groups` and `k` are other
forms of the same call for one sequence. Microseconds, medians; inputs are in no cache.
"""

import math

import torch

from timing import run, vanward

HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 64
INIT, LOCAL = 1, 2
WINDOW, STRIDE = 32, 16


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def torch_minmax(q, high, low, k):
    """Quest: the bound on q·k of each block, then the best k."""
    q = q.view(q.shape[0], HEADS, -1, DIM).float()
    positive, negative = q.clamp(min=0).sum(2).bfloat16(), q.clamp(max=0).sum(2).bfloat16()
    high, low = high.permute(0, 2, 1, 3), low.permute(0, 2, 1, 3)
    scores = (high @ positive[..., None] + low @ negative[..., None]).squeeze(-1)
    return scores.topk(k, dim=-1).indices


def torch_axis(q, codes, ranges, k):
    """AXIS from summaries in INT4: Σ_h softmax of q·mean + ln 2·cosh(q·axis), then the best k. Scores, and the blocks."""
    batch, rows = codes.shape[:2]
    numbers = torch.stack([codes & 15, codes >> 4], -1).float().view(batch, rows, HEADS, 2, DIM // 32, 32)
    scale, least = ranges.float().view(batch, rows, HEADS, 2, DIM // 32, 2).unbind(-1)
    mean, axis = (least[..., None] + scale[..., None] * numbers).flatten(-2).permute(3, 0, 2, 4, 1)
    q = q.view(batch, HEADS, -1, DIM).float() / math.sqrt(DIM)
    along = (q @ axis).abs()
    mass = (q @ mean + along + torch.log1p(torch.exp(-2 * along))).softmax(-1).sum(2)
    return mass, mass.topk(k, dim=-1).indices


class Case:
    """`sets` indices of one shape, and the library's calls on each."""

    def __init__(self, session, batch, tokens, k, method="minmax", group=GROUP, block=BLOCK):
        self.session, self.batch, self.k, self.method, self.block = session, batch, k, method, block
        self.blocks = tokens // block
        summaries = self.blocks if method == "axis" else 2 * self.blocks if method == "minmax" else tokens // STRIDE - 1
        self.bytes = batch * summaries * HEADS * (DIM + DIM // 4 if method == "axis" else DIM * 2)
        self.sets = min(20, max(2, math.ceil((384 << 20) / self.bytes)))
        self.q = random(batch, HEADS * (1 if method == "mean_dot" else group), DIM)
        self.lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        rows = summaries // 2 if method == "minmax" else summaries
        if method == "axis":
            self.first = [torch.randint(256, (batch, rows, HEADS, DIM), device="cuda", dtype=torch.uint8) for _ in range(self.sets)]
            self.second = [random(batch, rows, HEADS, DIM // 8).half() for _ in range(self.sets)]
            for ranges in self.second:
                ranges[..., 0::2].abs_().mul_(0.1)
        else:
            self.first = [random(batch, rows, HEADS, DIM) for _ in range(self.sets)]
            self.second = [x - random(*x.shape).abs() for x in self.first] if method == "minmax" else [None] * self.sets
        self.ids = torch.empty(batch, HEADS, k, dtype=torch.int32, device="cuda")
        self.counts = torch.empty(batch, HEADS, dtype=torch.int32, device="cuda")
        self.scores = torch.empty(batch, HEADS, self.blocks, device="cuda")
        self.table = torch.randperm(batch * rows, device="cuda").int().view(batch, rows)

    def index(self, i, is_paged=False):
        first, second, more = self.first[i], self.second[i], {}
        if is_paged:
            first, second, more = first.flatten(0, 1)[:, None], second.flatten(0, 1)[:, None], dict(table=self.table)
        if self.method == "minmax":
            return vanward.Index("minmax", block_size=self.block, key_max=first, key_min=second, **more)
        if self.method == "axis":
            return vanward.Index("axis", block_size=self.block, axes=first, axis_range=second, **more)
        return vanward.Index("mean", window=WINDOW, stride=STRIDE, means=self.first[i])

    def prepared(self, i, stream, is_paged=False, **more):
        return self.session.prepare_select_blocks(
            method=self.method, block_size=self.block, k=self.k, init_blocks=INIT, local_blocks=LOCAL, index=self.index(i, is_paged), q=self.q,
            seq_lens=self.lens, selected=vanward.BlockList(self.ids, self.counts), stream=stream, **more,
        )

    def on_current_stream(self, is_paged=False):
        """call(i) on whichever stream is current: each stream's calls are prepared on first use."""
        by_stream = {}

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in by_stream:
                by_stream[stream] = [self.prepared(n, stream, is_paged) for n in range(self.sets)]
            by_stream[stream][i]()

        return call

    def check(self, is_paged=False):
        """The list is the exact best of the scores that the call wrote."""
        self.prepared(0, torch.cuda.current_stream().cuda_stream, is_paged, scores=self.scores)()
        torch.cuda.synchronize()
        scores = self.scores.clone()
        scores[..., :INIT] = scores[..., self.blocks - LOCAL :] = math.inf
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        assert torch.equal(self.ids.long(), best.sort(dim=-1).values), "ids"
        assert (self.counts == min(self.k, self.blocks)).all(), "counts"
        if is_paged:
            return
        if self.method == "minmax":
            theirs = torch_minmax(self.q, self.first[0], self.second[0], self.k)
            same = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(self.ids.flatten(0, 1), theirs.flatten(0, 1)))
            assert same >= 0.9 * theirs.numel(), "torch's selection, but for its rounding and what is forced"
        if self.method == "axis":
            theirs, _ = torch_axis(self.q, self.first[0], self.second[0], self.k)
            assert torch.allclose(self.scores, theirs, rtol=2e-3, atol=1e-6), "torch's scores, but for its rounding"


def paged(case, timer):
    case.check(is_paged=True)
    ours = case.on_current_stream(is_paged=True)
    return dict(paged_graph=timer.graph(ours, case.sets), paged_among=timer.among(ours, case.sets))


def select(session, timer, rows, quick):
    shapes = [(1, 32 << 10), (1, 128 << 10), (1, 512 << 10), (8, 128 << 10)]
    for batch, tokens in shapes if quick else [(1, 8 << 10), *shapes, (1, 1 << 20), (8, 32 << 10), (64, 32 << 10)]:
        case = Case(session, batch, tokens, 128)
        case.check()
        ours = case.on_current_stream()
        peer = lambda i: torch_minmax(case.q, case.first[i], case.second[i], case.k)  # noqa: E731
        row = dict(batch=batch, tokens=tokens, floor=timer.copy(case.bytes))
        row.update(vanward_graph=timer.graph(ours, case.sets), vanward_among=timer.among(ours, case.sets))
        row.update(paged(case, timer))
        row.update(torch_graph=timer.graph(peer, case.sets))
        row.update(vanward_event=timer.event(ours, case.sets), torch_event=timer.event(peer, case.sets))
        rows.put("minmax", **row)
        case = Case(session, batch, tokens, 128, "axis")
        case.check()
        ours = case.on_current_stream()
        peer = lambda i: torch_axis(case.q, case.first[i], case.second[i], case.k)  # noqa: E731
        row = dict(batch=batch, tokens=tokens, floor=timer.copy(case.bytes))
        row.update(vanward_graph=timer.graph(ours, case.sets), vanward_among=timer.among(ours, case.sets))
        row.update(paged(case, timer))
        row.update(torch_graph=timer.graph(peer, case.sets))
        row.update(vanward_event=timer.event(ours, case.sets))
        rows.put("axis", **row)
    for method, group in (("mean_dot", 1), ("mean_softmax", 4), ("mean_softmax", 16)):
        for tokens in (32 << 10, 128 << 10):
            case = Case(session, 1, tokens, 128, method, group)
            case.check()
            ours = case.on_current_stream()
            rows.put(method, group=group, tokens=tokens, floor=timer.copy(case.bytes), vanward_graph=timer.graph(ours, case.sets))


def forms(session, timer, rows):
    """Other sizes of blocks and groups, and other numbers of blocks to select, for one sequence."""

    def put(about, tokens, k, **form):
        row = dict(tokens=tokens, k=k, **form)
        for method in ("minmax", "axis"):
            case = Case(session, 1, tokens, k, method, **form)
            case.check()
            row[f"{method}_graph"] = timer.graph(case.on_current_stream(), case.sets)
        rows.put(about, **row)

    for block in (16, 32, 64, 128):
        put("sizes", 128 << 10, 8192 // block, block=block)
    for group in (1, 4, 8, 16):
        put("groups", 128 << 10, 128, group=group)
    for k in (32, 128, 512, 2048):
        put("k", 512 << 10, k)


def build(session, timer, rows):
    """Summaries of 128K tokens at once, and of one more token."""
    tokens = 128 << 10
    k = random(tokens // BLOCK, BLOCK, HEADS, DIM)
    pages = torch.randperm(len(k), device="cuda").int()[None]
    lens, begin = (torch.tensor([n], dtype=torch.int32, device="cuda") for n in (tokens, tokens - 1))
    high, low, means = (torch.empty(1, n, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for n in (tokens // BLOCK, tokens // BLOCK, tokens // STRIDE))
    codes = torch.empty(1, tokens // BLOCK, HEADS, DIM, device="cuda", dtype=torch.uint8)
    ranges = torch.empty(1, tokens // BLOCK, HEADS, DIM // 8, device="cuda", dtype=torch.float16)
    indices = {
        "axis": vanward.Index("axis", block_size=BLOCK, axes=codes, axis_range=ranges),
        "minmax": vanward.Index("minmax", block_size=BLOCK, key_max=high, key_min=low),
        "mean": vanward.Index("mean", window=WINDOW, stride=STRIDE, means=means),
    }
    for name, index in indices.items():

        def update(_, **more):
            stream = torch.cuda.current_stream().cuda_stream
            session.prepare_index_update(index=index, k=k, seq_lens=lens, page_table=pages, stream=stream, **more)()

        one = lambda i: update(i, begin=begin)  # noqa: E731
        rows.put("index", kind=name, floor=timer.copy(k.nbytes), bulk_graph=timer.graph(update, 3), one_token_graph=timer.graph(one, 20))


def layers(session, timer, rows):
    """The update of one more token in each of 32 layers of 8K tokens: a call for each, and one for all."""
    count, tokens, near = 32, 8 << 10, 31
    for batch in (1, 8):
        lens, begin = (torch.full((batch,), n, dtype=torch.int32, device="cuda") for n in (tokens - near, tokens - near - 1))
        keys = [random(batch, tokens, HEADS, DIM) for _ in range(count)]
        for name, make in (("axis", vanward.Index.axis), ("minmax", vanward.Index.minmax)):
            indices = [make(k, batch=batch, tokens=tokens, block_size=BLOCK) for k in keys]
            common = [dict(index=index, k=k, seq_lens=lens) for index, k in zip(indices, keys)]
            for one in common:
                session.index_update(**one)
            summaries = lambda: [t for i in indices for t in (i.axes, i.axis_range, i.key_max, i.key_min) if t is not None]  # noqa: E731
            kept = [t.clone() for t in summaries()]
            updates = [session.prepare_index_update(begin=begin, **one) for one in common]
            together = session.prepare_index_update_layers(updates=updates)

            def each(_):
                for update in updates:
                    update(torch.cuda.current_stream().cuda_stream)

            def at_once(_):
                together(torch.cuda.current_stream().cuda_stream)

            at_once(0)
            same = (torch.equal(now.view(torch.uint8), were.view(torch.uint8)) for now, were in zip(summaries(), kept))
            assert all(same), "the bits of summaries built at once"
            row = dict(kind=name, batch=batch, layers=count, each_graph=timer.graph(each, 1, calls=1), together_graph=timer.graph(at_once, 1, calls=1))
            row.update(together_cold=timer.cold(at_once, 1), each_event=timer.event(each, 1), together_event=timer.event(at_once, 1))
            rows.put("layers", **row)


def labels(session, timer, rows):
    """The second level: tokens, or blocks of 16, out of 8192 candidate tokens by 64 channels in INT4."""
    kept, block, count, tokens = 64, 16, 512, 128 << 10
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    sets = 20
    indices = [
        vanward.Index(
            "label", labels=torch.randint(0, 256, (1, tokens, HEADS, kept // 2), dtype=torch.uint8, device="cuda"),
            label_scale=torch.rand(1, tokens, HEADS, device="cuda").half(), label_min=torch.randn(1, tokens, HEADS, device="cuda").half(),
            channels=torch.arange(kept, dtype=torch.int32, device="cuda").expand(HEADS, kept),
        )
        for _ in range(sets)
    ]
    ids = torch.stack([torch.randperm(tokens // block, device="cuda")[:count].sort().values for _ in range(HEADS)])[None].int()
    candidates = vanward.BlockList(ids, torch.full((1, HEADS), count, dtype=torch.int32, device="cuda"))
    q = random(1, HEADS * GROUP, DIM)
    for name, k in (("tokens", 1024), ("label_mass", 128)):
        selected = vanward.BlockList(
            torch.empty(1, HEADS, k, dtype=torch.int32, device="cuda"), torch.empty(1, HEADS, dtype=torch.int32, device="cuda")
        )
        common = dict(block_size=block, k=k, q=q, seq_lens=lens, candidates=candidates, selected=selected)

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if name == "tokens":
                session.prepare_select_tokens(index=indices[i], stream=stream, **common)()
            else:
                session.prepare_select_blocks(method="label_mass", index=indices[i], stream=stream, **common)()

        size = count * block * HEADS * (kept // 2 + 4)
        rows.put("labels", what_is_selected=name, k=k, floor=timer.copy(size), vanward_graph=timer.graph(call, sets))


def measure(session, timer, rows, quick):
    select(session, timer, rows, quick)
    if not quick:
        forms(session, timer, rows)
    labels(session, timer, rows)
    build(session, timer, rows)
    layers(session, timer, rows)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=64 << 20)
