"""A decoder layer of an 8B-shaped model, with attention dense and sparse, in one CUDA graph: what an engine gains.

    python benches/gpu/layer.py [--out FILE] [--quick]

Hidden size 4096, MLP 14336, 32 query heads on 8 KV heads of 128 channels, bfloat16, random weights; several layers follow each other, each
with weights, pages of 64 tokens and summaries of its own, so that nothing is in a cache. A layer is: norm, projections, rotary embedding,
append to the pages, attention, output projection, norm, MLP: matrix products by cuBLAS, the rest by torch, unfused. `floor` is the layer
without attention. `dense` reads all tokens, by the library and, where FlashInfer is installed, by its XQA; `sparse` is index update,
selection and attention over `budget` tokens by the library, and `update` and `select` are the layer with those parts alone. `beside` is
`sparse` with the update of the summaries on a second stream, beside what follows attention: the next step's selection finds it done, and
the newest blocks are always selected. `verify` rows are a pass over several positions of each sequence, dense, with the update of their
summaries: `gain` is the speed of lossless decoding that drafts by `sparse` (AXIS) and verifies so, over the best dense one, computed from these times
where each draft token is accepted with probability `accepted`, an assumption. `calls` rows are sequences of SHORTEST tokens, where calls read
hardly anything: what launches and dependent accesses alone take. GPU time of one layer, microseconds, medians.
"""

import torch
import torch.nn.functional as F

from timing import run, vanward

try:
    import flashinfer
    from flashinfer.xqa import xqa
except ImportError:
    flashinfer = None

HIDDEN, MLP = 4096, 14336
HEADS, KV_HEADS, DIM = 32, 8, 128
PAGE = BLOCK = 64
INIT, LOCAL = 1, 2
ACCEPTED = 0.95
SHORTEST = 4 * BLOCK
MEMORY = 0.8  # of what the device has free, for pages


def random(*shape, scale=1.0):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


class Sequences:
    """Keys, values and summaries of `layers` layers for `batch` sequences of `context` tokens."""

    def __init__(self, session, batch, context, layers=4, kv_heads=KV_HEADS):
        self.session, self.batch, self.context, self.kv_heads = session, batch, context, kv_heads
        self.blocks = context // PAGE
        size = 2 * batch * context * kv_heads * DIM * 2
        self.layers = max(2, min(layers, int(MEMORY * torch.cuda.mem_get_info()[0] / size)))
        pages = batch * self.blocks
        self.keys, self.values = ([random(pages, PAGE, kv_heads, DIM) for _ in range(self.layers)] for _ in range(2))
        self.table = torch.randperm(pages, device="cuda").int().view(batch, self.blocks)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.summarise()

    def summarise(self):
        batch, context = self.batch, self.context
        make = {"axis": vanward.Index.axis, "minmax": vanward.Index.minmax}
        room = dict(batch=batch, tokens=context, block_size=BLOCK)
        self.indices = {method: [make[method](keys, **room) for keys in self.keys] for method in make}
        for method in make:
            for i in range(self.layers):
                self.update(method, i, torch.zeros_like(self.lens))(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    def update(self, method, i, begin):
        return self.session.prepare_index_update(
            index=self.indices[method][i], k=self.keys[i], seq_lens=self.lens, page_table=self.table, begin=begin
        )


class Weights:
    def __init__(self, kv_heads=KV_HEADS):
        self.qkv = random((HEADS + 2 * kv_heads) * DIM, HIDDEN, scale=HIDDEN**-0.5)
        self.out = random(HIDDEN, HEADS * DIM, scale=(HEADS * DIM) ** -0.5)
        self.up = random(2 * MLP, HIDDEN, scale=HIDDEN**-0.5)
        self.down = random(HIDDEN, MLP, scale=MLP**-0.5)
        self.norms = [torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2)]


class Stack:
    """The layers over the last `positions` tokens of each sequence."""

    def __init__(self, sequences, weights, positions=1):
        self.sequences, self.weights, self.positions = sequences, weights, positions
        batch, self.rows, self.kv_heads = sequences.batch, sequences.batch * positions, sequences.kv_heads
        at = sequences.context - positions + torch.arange(positions, device="cuda").repeat(batch)
        angles = at[:, None, None] * 500000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
        self.cosine = torch.cat([angles.cos()] * 2, -1).bfloat16()
        self.sine = torch.cat([-angles.sin(), angles.sin()], -1).bfloat16()
        pages = sequences.table[torch.arange(batch, device="cuda").repeat_interleave(positions), at // PAGE]
        self.slots = pages.long() * PAGE + at % PAGE
        self.begin = sequences.lens - positions
        self.first = random(self.rows, HIDDEN)
        self.q, self.out = (random(batch, positions, HEADS, DIM) for _ in range(2))
        self.k = random(self.rows, self.kv_heads, DIM)
        self.side = torch.cuda.Stream()
        self.calls = {}

    def layer(self, i, attend):
        """attend(i) fills self.out from self.q; what it returns is called at the end of the layer."""
        weights = self.weights[i]
        x = self.first if i == 0 else self.x
        qkv = F.linear(F.rms_norm(x, (HIDDEN,), weights.norms[0]), weights.qkv).view(self.rows, -1, DIM)
        turning = qkv[:, : HEADS + self.kv_heads]
        rolled, straight = turning.roll(DIM // 2, -1), turning * self.cosine
        torch.addcmul(straight[:, :HEADS], rolled[:, :HEADS], self.sine, out=self.q.view(self.rows, HEADS, DIM))
        torch.addcmul(straight[:, HEADS:], rolled[:, HEADS:], self.sine, out=self.k)
        self.append(i, qkv[:, HEADS + self.kv_heads :])
        finish = attend(i)
        x = torch.addmm(x, self.out.view(self.rows, -1), weights.out.T)
        up = F.linear(F.rms_norm(x, (HIDDEN,), weights.norms[1]), weights.up)
        self.x = torch.addmm(x, F.silu(up[:, :MLP]) * up[:, MLP:], weights.down.T)
        if finish:
            finish()

    def append(self, i, v):
        flat = (-1, self.kv_heads, DIM)
        self.sequences.keys[i].view(flat).index_copy_(0, self.slots, self.k)
        self.sequences.values[i].view(flat).index_copy_(0, self.slots, v)

    # --- attention of a layer ---------------------------------------------------------------------------------------

    def nothing(self, i):
        return None

    def run(self, name, i, prepare):
        """A call that is prepared once, on the stream that is current."""
        if (name, i) not in self.calls:
            self.calls[name, i] = prepare()
        self.calls[name, i](torch.cuda.current_stream().cuda_stream)

    def kv(self, i):
        s = self.sequences
        return vanward.PagedKV(s.keys[i], s.values[i], s.lens, page_table=s.table)

    def dense(self, i):
        self.run("dense", i, lambda: self.sequences.session.prepare_attention(kv=self.kv(i), q=self.q, out=self.out))

    def xqa(self, i):
        s = self.sequences
        if not hasattr(self, "scratch"):
            self.scratch = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
            self.counters = torch.zeros(1 << 20, dtype=torch.int32, device="cuda").view(torch.uint32)
            self.peer_lens = s.lens[:, None].contiguous().view(torch.uint32)
        xqa(self.q, s.keys[i], s.values[i], s.table, self.peer_lens, self.out, self.scratch, self.counters, self.kv_heads, PAGE)

    def update(self, method, i):
        self.run(f"update {method}", i, lambda: self.sequences.update(method, i, self.begin))

    def room(self, k):
        ids = torch.empty(self.sequences.batch, self.kv_heads, k, dtype=torch.int32, device="cuda")
        return vanward.BlockList(ids, torch.empty(self.sequences.batch, self.kv_heads, dtype=torch.int32, device="cuda"))

    def select(self, method, k, i):
        self.selected = self.__dict__.setdefault(f"selected_{k}", self.room(k))
        s = self.sequences
        self.run(f"select {method} {k}", i, lambda: s.session.prepare_select_blocks(
            method=method, block_size=BLOCK, k=k, init_blocks=INIT, local_blocks=LOCAL, index=s.indices[method][i], q=self.q[:, -1],
            seq_lens=s.lens, selected=self.selected))

    def attend(self, k, i):
        chosen = self.__dict__[f"selected_{k}"]
        self.run(f"attend {k}", i, lambda: self.sequences.session.prepare_attention(
            kv=self.kv(i), q=self.q[:, -1], out=self.out[:, -1], block_size=BLOCK, list=chosen))

    def update_and_select(self, method, k, i):
        self.update(method, i)
        self.select(method, k, i)

    def sparse(self, method, k, i):
        self.update_and_select(method, k, i)
        self.attend(k, i)

    def sparse_beside(self, method, k, i):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.update(method, i)
        self.select(method, k, i)
        self.attend(k, i)
        return lambda: torch.cuda.current_stream().wait_stream(self.side)

    def verify(self, i):
        self.update("axis", i)
        self.dense(i)

    # --- checks -----------------------------------------------------------------------------------------------------

    def result(self, attend):
        """The stack's output, and the last layer's attention."""
        for i in range(self.sequences.layers):
            finish = attend(i)
            assert finish is None
        for i in range(self.sequences.layers):
            self.layer(i, attend)
        torch.cuda.synchronize()
        return self.x.clone(), self.out.clone()

    def check(self):
        """Selecting every block gives dense attention's bits; the peer's output is ours but for rounding."""
        want, attended = self.result(self.dense)
        k = self.sequences.blocks
        for method in self.sequences.indices:
            got, _ = self.result(lambda i: self.sparse(method, k, i))
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            assert error < 1e-2, f"{method}: all blocks selected: error {error:.1e}"
        if flashinfer and self.positions == 1:
            self.xqa(self.sequences.layers - 1)
            torch.cuda.synchronize()
            error = ((self.out.float() - attended.float()).norm() / attended.float().norm()).item()
            assert error < 2e-2, f"XQA: error {error:.1e}"

    def time_parts(self, timer, method, k):
        parts = {
            "update": lambda i: self.update(method, i),
            "select": lambda i: self.update_and_select(method, k, i),
            "sparse": lambda i: self.sparse(method, k, i),
            "beside": lambda i: self.sparse_beside(method, k, i),
        }
        return {f"{method}_{name}": self.time(timer, attend) for name, attend in parts.items()}

    def time(self, timer, attend):
        return timer.graph(lambda i: self.layer(i, attend), self.sequences.layers, replays=9)


def measure(session, timer, rows, quick):
    rows.put("peer", flashinfer=flashinfer.__version__ if flashinfer else "none")
    weights = [Weights() for _ in range(4)]
    side = torch.cuda.Stream()
    session.reserve(64 << 20, stream=side.cuda_stream)
    points = [(1, 32, 4096), (1, 128, 4096), (1, 512, 4096), (8, 32, 2048), (8, 128, 4096), (16, 64, 4096)]
    for batch, thousands, budget in points[:2] if quick else points:
        context, k = thousands << 10, budget // BLOCK
        sequences = Sequences(session, batch, context)
        stack = Stack(sequences, weights)
        stack.side = side
        if context == 32 << 10:
            stack.check()
        row = dict(batch=batch, context=context, budget=budget, layers=sequences.layers, floor=stack.time(timer, stack.nothing))
        row["dense"] = stack.time(timer, stack.dense)
        dense = row["dense"]
        if flashinfer:
            row["dense_xqa"] = stack.time(timer, stack.xqa)
            dense = min(dense, row["dense_xqa"])
        for method in sequences.indices:
            row.update(stack.time_parts(timer, method, k))
        row["speed"] = dense / min(row["axis_sparse"], row["minmax_sparse"])
        rows.put("layer", **row)
        for drafts in (4, 8) if not quick else (4,):
            several = Stack(sequences, weights, drafts + 1)
            verify = several.time(timer, several.verify)
            tokens = (1 - ACCEPTED ** (drafts + 1)) / (1 - ACCEPTED)
            gain = tokens * dense / (drafts * row["axis_sparse"] + verify)
            rows.put("verify", batch=batch, context=context, budget=budget, drafts=drafts, verify=verify, sparse=row["axis_sparse"],
                     dense=dense, accepted=ACCEPTED, tokens=tokens, gain=gain)
            del several
        del stack, sequences
        torch.cuda.empty_cache()
    for batch in (1, 8):
        stack = Stack(Sequences(session, batch, SHORTEST), weights)
        stack.side = side
        row = dict(batch=batch, context=SHORTEST, floor=stack.time(timer, stack.nothing), dense=stack.time(timer, stack.dense))
        for method in stack.sequences.indices:
            row.update(stack.time_parts(timer, method, INIT + LOCAL))
        rows.put("calls", **row)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20)
