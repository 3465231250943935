"""Attention over selected blocks beside FlashInfer, in one process.

    python benches/gpu/peers.py [--out FILE] [--quick]

32 query heads on 8 KV heads of 128 channels, pages and blocks of 64 tokens, a list for each KV head. FlashInfer has one list for a
sequence, so it is given each KV head as a sequence of its own, in a cache that is laid out so. `xqa` is its kernel for decoding on
Hopper, `decode` the faster form of BatchDecodeWithPagedKVCacheWrapper (on tensor cores or not), `block_sparse`
BlockSparseAttentionWrapper, which takes one list for all heads. `step` is selection, by MINMAX or by AXIS in INT4, and attention over what it
selected, in one graph, beside XQA over all tokens; `latents` MLA beside BatchMLAPagedAttentionWrapper. `among` is what a call adds to a
graph in which a read that fills the cache goes before each, as a layer's weights do in an engine. Every result is compared with torch's in float32
before it is timed; `error` is relative in norm. GPU time from calls in a CUDA graph, microseconds, medians; inputs are in no cache.
"""

import itertools
import math

import flashinfer
import torch
from flashinfer.xqa import xqa

import attention
import selection
from attention import BLOCK, DIM, GROUP, HEADS, KV_HEADS
from timing import run, vanward

FLOAT8 = torch.float8_e4m3fn
_workspace = None


def workspace():
    """FlashInfer's scratch; XQA wants counters of zero beside it."""
    global _workspace
    if _workspace is None:
        bytes_ = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        _workspace = bytes_, torch.zeros(1 << 20, dtype=torch.int32, device="cuda").view(torch.uint32)
    return _workspace


class Paged:
    """Sequences of `tokens` tokens each, of which torch knows the answer, as FlashInfer's calls read them."""

    def __init__(self, sequences, kv_heads, tokens, positions=1, dtype=torch.bfloat16):
        self.sequences, self.kv_heads, self.tokens, self.positions, self.dtype = sequences, kv_heads, tokens, positions, dtype
        self.listed = tokens // BLOCK
        size = 2 * sequences * tokens * kv_heads * DIM * torch.tensor([], dtype=dtype).element_size()
        self.sets = min(20, max(2, math.ceil((384 << 20) / size)))
        pages = 2 * sequences * self.listed
        shape = (pages, 2, BLOCK, kv_heads, DIM)
        self.pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(self.sets)]
        self.table = torch.randperm(pages, device="cuda")[: sequences * self.listed].view(sequences, self.listed).int()
        heads = kv_heads * GROUP
        self.q = torch.randn(sequences, positions, heads, DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)

    def error(self):
        """Of the last position, which sees every token."""
        torch.cuda.synchronize()
        pages = self.pools[0][self.table.long()].float()
        keys, values = (pages[:, :, n].flatten(1, 2).transpose(1, 2) for n in range(2))
        q = self.q[:, -1].float().view(self.sequences, self.kv_heads, GROUP, DIM)
        want = (q @ keys.transpose(-1, -2) / math.sqrt(DIM)).softmax(-1) @ values
        got = self.out[:, -1].float().view_as(want)
        return ((got - want).norm() / want.norm()).item()

    def xqa(self):
        lens = torch.full((self.sequences, 1), self.tokens, dtype=torch.int32, device="cuda").view(torch.uint32)
        scratch, counters = workspace()
        more = {}
        q, out = self.q[:, None], self.out[:, None]
        if self.positions == 1:
            q, out = self.q, self.out
        else:
            mask = torch.zeros(self.sequences, self.positions, 2, dtype=torch.int32, device="cuda")
            mask[:, :, 0] = torch.tensor([(2 << n) - 1 for n in range(self.positions)], device="cuda")
            more = dict(q_seq_len=self.positions, mask=mask.to(torch.uint16))

        def call(i):
            pool = self.pools[i]
            xqa(q, pool[:, 0], pool[:, 1], self.table, lens, out, scratch, counters, self.kv_heads, BLOCK, **more)

        return call

    def decode(self, on_tensor_cores):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()[0], "NHD", use_tensor_cores=on_tensor_cores)
        begins = torch.arange(0, self.sequences * self.listed + 1, self.listed, dtype=torch.int32, device="cuda")
        last = torch.full((self.sequences,), BLOCK, dtype=torch.int32, device="cuda")
        wrapper.plan(begins, self.table.flatten(), last, self.kv_heads * GROUP, self.kv_heads, DIM, BLOCK,
                     q_data_type=torch.bfloat16, kv_data_type=self.dtype)
        return lambda i: wrapper.run(self.q[:, 0], self.pools[i], out=self.out[:, 0])

    def timed(self, timer, call, worst=2e-2):
        call(0)
        error = self.error()
        assert error < worst, f"error {error:.1e}"
        return timer.graph(call, self.sets), error


class EightBits(attention.Case):
    """Keys and values in FP8."""

    def __init__(self, *args):
        super().__init__(*args)
        self._narrow = [[x.to(FLOAT8) for x in of] for of in (self.keys, self.values)]
        self.keys, self.values = ([x.bfloat16() for x in of] for of in self._narrow)

    def kv(self, i):
        keys, values = (vanward.float8_e4m3fn(of[i].view(torch.uint8)) for of in self._narrow)
        return vanward.PagedKV(keys, values, self.lens, page_table=self.table)


def timed(timer, case, call):
    call(0)
    case.check()
    return timer.graph(call, case.sets)


def lists(session, timer, rows, quick):
    for batch, budget in [(1, 4096)] if quick else [(1, 1024), (1, 2048), (1, 4096), (1, 8192), (4, 4096), (16, 4096)]:
        case = attention.Case(session, batch, 32 << 10, budget)
        row = dict(batch=batch, tokens=budget, vanward_graph=timed(timer, case, case.on_current_stream(case.attention)))
        peer = Paged(batch * KV_HEADS, 1, budget)
        row["xqa_graph"], row["xqa_error"] = peer.timed(timer, peer.xqa())
        row["vanward_among"] = timer.among(case.on_current_stream(case.attention), case.sets)
        row["xqa_among"] = timer.among(peer.xqa(), peer.sets)
        row["decode_graph"] = min(peer.timed(timer, peer.decode(cores))[0] for cores in (False, True))
        rows.put("lists", **row, ratio=min(row["xqa_graph"], row["decode_graph"]) / row["vanward_graph"])
    for batch, budget in [] if quick else [(1, 1024), (1, 4096), (1, 8192), (4, 4096), (16, 4096)]:
        case = EightBits(session, batch, 32 << 10, budget)
        row = dict(batch=batch, tokens=budget, vanward_graph=timed(timer, case, case.on_current_stream(case.attention)))
        peer = Paged(batch * KV_HEADS, 1, budget, dtype=FLOAT8)
        row["xqa_graph"], row["xqa_error"] = peer.timed(timer, peer.xqa(), 6e-2)
        rows.put("float8", **row, ratio=row["xqa_graph"] / row["vanward_graph"])


def positions(session, timer, rows):
    """Four query positions over one list."""
    for batch, budget in [(1, 4096), (1, 8192), (8, 4096)]:
        case = attention.Case(session, batch, 32 << 10, budget)
        q = torch.randn(batch, 4, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        four = case.on_current_stream(lambda i, stream: session.prepare_attention(
            kv=case.kv(i), q=q, out=out, stream=stream, block_size=BLOCK, list=vanward.BlockList(case.ids[i], case.counts)))
        case.q, case.out = q[:, 3], out[:, 3]
        row = dict(batch=batch, tokens=budget, vanward_graph=timed(timer, case, four))
        peer = Paged(batch * KV_HEADS, 1, budget, positions=4)
        row["xqa_graph"], _ = peer.timed(timer, peer.xqa())
        rows.put("positions", **row, ratio=row["xqa_graph"] / row["vanward_graph"])


def block_sparse(session, timer, rows):
    tokens = 32 << 10
    pools = [torch.randn(2, tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q = torch.randn(1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    for budget in (1024, 4096, 8192):
        listed = budget // BLOCK
        ids = torch.randperm(tokens // BLOCK)[:listed].sort().values.int().cuda()
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace()[0])
        wrapper.plan(torch.tensor([0, listed], dtype=torch.int32, device="cuda"), ids, 1, tokens, 1, BLOCK, HEADS, KV_HEADS, DIM,
                     q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        case = attention.Case(session, 1, tokens, budget)
        ours = timed(timer, case, case.on_current_stream(case.attention))
        theirs = timer.graph(lambda i: wrapper.run(q, pools[i][0], pools[i][1]), len(pools))
        rows.put("block_sparse", tokens=budget, vanward_graph=ours, block_sparse_graph=theirs, ratio=theirs / ours)


def latents(session, timer, rows):
    """MLA over 2048 listed tokens: ours in blocks of 64, the peer's in pages of one token."""
    for heads in (16, 128):
        for batch in (1, 8, 64):
            case = attention.Latents(session, batch, heads)
            ours = case.call(BLOCK, case.ids)
            ours(0)
            case.check(BLOCK, case.ids)
            row = dict(batch=batch, heads=heads, vanward_graph=timer.graph(ours, case.sets))

            tokens = case.tokens[0][:, 0].long()
            places = (case.table.long().gather(1, tokens // BLOCK) * BLOCK + tokens % BLOCK).int()
            begins = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
            lens = torch.full((batch,), places.shape[1], dtype=torch.int32, device="cuda")
            wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace()[0], backend="fa3")
            widths = attention.VALUE, attention.LATENT - attention.VALUE
            wrapper.plan(begins, begins * places.shape[1], places.flatten(), lens, heads, *widths, 1, False, attention.LATENT_SCALE,
                         torch.bfloat16, torch.bfloat16)
            split = lambda x: [part.contiguous() for part in x.split(widths, -1)]  # noqa: E731
            q, caches = split(case.q), [split(x.view(-1, 1, attention.LATENT)) for x in case.latents]
            case.out = wrapper.run(*q, *caches[0])
            case.check(1, case.tokens)
            row["mla_graph"] = timer.graph(lambda i: wrapper.run(*q, *caches[i], out=case.out), case.sets)
            rows.put("latents", **row, ratio=row["mla_graph"] / row["vanward_graph"])


def steps(session, timer, rows, quick):
    context = 128 << 10
    for batch in (1,) if quick else (1, 8):
        peer = Paged(batch, KV_HEADS, context)
        full, _ = peer.timed(timer, peer.xqa())
        for method, budget in itertools.product(("axis", "minmax"), (4096, 8192)):
            choice = selection.Case(session, batch, context, budget // BLOCK, method)
            case = attention.Case(session, batch, context, budget)
            select = choice.on_current_stream()
            select(0)
            case.ids, case.counts = [choice.ids] * case.sets, choice.counts
            attend = case.on_current_stream(case.attention)
            attend(0)
            case.check()

            def both(i):
                select(i % choice.sets)
                attend(i % case.sets)

            time = timer.graph(both, 20)
            rows.put("step", method=method, batch=batch, context=context, tokens=budget, vanward_graph=time, xqa_graph=full, ratio=full / time)


def measure(session, timer, rows, quick):
    rows.put("peer", flashinfer=flashinfer.__version__)
    lists(session, timer, rows, quick)
    steps(session, timer, rows, quick)
    if not quick:
        positions(session, timer, rows)
        block_sparse(session, timer, rows)
        latents(session, timer, rows)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20)
