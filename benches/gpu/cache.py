"""The tiered KV cache: what a step costs, how fast misses travel, and what they cost the kernels beside them.

    python benches/gpu/cache.py [--out FILE] [--quick]

Blocks of 64 tokens, bfloat16. From step to step a list keeps its blocks but for the share `new`, which are drawn at random; slots are
twice the list, and before the steps are timed they hold the list before the first and blocks that no step names: each step misses its new
blocks, and `missed` says which share that was. `resolve`: GPU time of one call in a CUDA graph; 16 channels, since nothing of them is read.
`travel`: resolve, fetch and wait, in a graph; GB/s (10^9 bytes) of what travelled. `beside`: a kernel that adds 1 to words of 1 GiB, and
products of matrices, alone and while a list travels. The CTAs that copy are 4, those that decode 16, and stay until all has come: kernels whose CTAs find no room
beside them lose their multiprocessors (of 132 that is 3 or 12 %), and what no longer fits into a wave of CTAs makes one more. `layer`: what a
layer of a decoder costs that asks for the next one's blocks where it begins: resolve and fetch, products of matrices that take about
100 µs, wait, attend; `slower` than without new blocks. `append`: an append of `tokens` tokens to each sequence; of one token that is written
again, `again`; of a block of tokens that is written again, and of one that makes a block leave the tail in every step, `leaves`, which copies the page of the
block that leaves to slots. Microseconds, medians. `coding`: of the cache's blocks; in int4 an append codes what becomes whole beside the stream, and
in int4_decoded slots have 16 bits, which codes are decoded into as they arrive. Attention over slots is compared with attention over the tokens, or over their
codes, before anything is timed.
"""

import itertools
import statistics

import torch

from timing import run, vanward

BLOCK = 64
STEPS = 20
CODINGS = {"exact": {}, "int4": dict(coding="int4"), "int4_decoded": dict(coding="int4", slot_coding="decoded")}


def stream():
    return torch.cuda.current_stream().cuda_stream


class Case:
    """A cache of one layer with `batch` sequences of `blocks` blocks, and lists of `count` of them for each step."""

    def __init__(self, session, batch, heads, dim, blocks, count, new, slots=2, coding="exact"):
        self.coding = coding
        self.session, self.batch, self.heads, self.dim, self.blocks, self.count, self.slots = session, batch, heads, dim, blocks, count, slots
        entries = batch * heads * count
        self.cache = vanward.KvCache(session, layers=1, kv_heads=heads, block_size=BLOCK, key_dim=dim, value_dim=dim, dtype="bfloat16",
                                     max_sequences=batch, max_blocks=blocks + 4, host_blocks=batch * (blocks + 4), slots=slots * entries,
                                     **CODINGS[coding])
        self.tokens = blocks * BLOCK + 5
        self.k = torch.randn(1, self.tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
        for n in range(batch):
            assert self.cache.add(stream=stream()) == n
            self.cache.extend(n, self.tokens, stream=stream())
            number, begin = (torch.tensor([x], dtype=torch.int32, device="cuda") for x in (n, 0))
            self.cache.append(layer=0, sequences=number, begin=begin, k=self.k, v=self.k, stream=stream())
        self.numbers = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.counts = torch.full((batch, heads), count, dtype=torch.int32, device="cuda")
        self.missed = torch.zeros_like(self.counts)
        # The lists of each step, then those of the one before the first.
        before, *steps = map(self.slotted, self.drift(new))
        self.lists = [*steps, before]
        self.calls = {}

    def slotted(self, ids):
        return vanward.BlockList(ids, self.counts, torch.zeros_like(ids))

    def drift(self, new):
        shape = (self.batch, self.heads, self.blocks)
        rank = torch.rand(shape, device="cuda")
        for _ in range(STEPS + 1):
            yield rank.argsort(-1)[..., : self.count].sort(-1).values.int().contiguous()
            # Some of those in the list leave, and as many of the others come.
            leaving = torch.rand(shape, device="cuda") < new
            listed = rank.argsort(-1).argsort(-1) < self.count
            rank = torch.where(listed & leaving, 2.0, torch.where(listed, -1.0, torch.rand(shape, device="cuda")))

    def forget(self):
        """Slots hold the list before the first step, and blocks of none."""
        if len(self.lists) == STEPS + 1:
            rank = torch.rand(self.batch, self.heads, self.blocks, device="cuda")
            for of in self.lists:
                rank.scatter_(-1, of.ids.long(), 2.0)
            unnamed = rank.argsort(-1)[..., : self.slots * self.count]
            assert (rank.gather(-1, unnamed) < 1).all(), "too few blocks"
            self.lists += [self.slotted(ids.sort(-1).values.int().contiguous()) for ids in unnamed.split(self.count, -1)]
        for i in reversed(range(STEPS, len(self.lists))):
            self.travel(i)

    def resolve(self, i):
        key = (i, stream())
        if key not in self.calls:
            more = dict(layer=0, sequences=self.numbers, wanted=self.lists[i], missed_counts=self.missed, stream=stream())
            self.calls[key] = self.cache.prepare_resolve(**more)
        self.calls[key]()

    def travel(self, i):
        self.resolve(i)
        self.cache.fetch(0, stream=stream())
        self.cache.wait(0, stream=stream())

    def attention(self, i):
        key = ("attention", i, stream())
        if key not in self.calls:
            view = self.cache.view(0)
            self.q = torch.ones(self.batch, 4 * self.heads, self.dim, device="cuda", dtype=torch.bfloat16)
            self.out = torch.empty_like(self.q)
            self.calls[key] = self.session.prepare_attention(kv=vanward.PagedKV(view.k, view.v, self.lens, int4=view.int4), q=self.q, out=self.out,
                                                             block_size=BLOCK, list=self.lists[i], stream=stream())
        self.calls[key]()

    def coded(self):
        """The same tokens in pages, coded as the cache codes them: all but the first block and the two newest."""
        batch, tokens, heads, dim = self.batch, self.tokens, self.heads, self.dim
        codes, scales = ([torch.zeros(batch, tokens, heads, *more, device="cuda", dtype=torch.uint8) for _ in range(2)] for more in ((dim // 2,), ()))
        means = torch.zeros(batch, self.blocks + 1, heads, dim, device="cuda", dtype=torch.bfloat16)
        lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
        k_scale, v_scale = map(vanward.float8_e4m3fn, scales)
        int4 = vanward.Int4KV(BLOCK, *codes, k_scale, v_scale, lens, means, exact_tokens=BLOCK)
        whole = self.k.expand(batch, -1, -1, -1).contiguous()
        newest = torch.full_like(self.lens, (self.blocks - 1) * BLOCK)
        self.session.kv_quantize(layers=[vanward.PagedKV(whole, whole, newest, int4=int4)], stream=stream())
        return vanward.PagedKV(whole, whole, self.lens, int4=int4)

    def check(self):
        whole = self.k.expand(self.batch, -1, -1, -1)
        self.lens = torch.full((self.batch,), self.tokens, dtype=torch.int32, device="cuda")
        kv = vanward.PagedKV(whole, whole, self.lens) if self.coding == "exact" else self.coded()
        for i in range(STEPS):
            self.travel(i)
            self.attention(i)
            expected = torch.empty_like(self.out)
            listed = vanward.BlockList(self.lists[i].ids, self.counts)
            self.session.attention(kv=kv, q=self.q, out=expected, block_size=BLOCK, list=listed,
                                   stream=stream())
            torch.cuda.synchronize()
            if self.coding == "int4_decoded":  # keys and values that codes stand for are rounded
                error = ((self.out.float() - expected.float()).norm() / expected.float().norm()).item()
                assert error < 3e-2, f"step {i}: error {error:.1e}"
            else:
                assert torch.equal(self.out, expected), f"step {i}"

    def share_missed(self):
        self.forget()
        torch.cuda.synchronize()
        before = self.cache.info()
        for i in range(STEPS):
            self.travel(i)
        torch.cuda.synchronize()
        after = self.cache.info()
        missed, hit = after.misses - before.misses, after.hits - before.hits
        return missed / (missed + hit), (after.bytes_fetched - before.bytes_fetched) / STEPS

    def time(self, timer, call):
        return timer.graph(call, STEPS, before=self.forget)


def resolves(session, timer, rows):
    for batch, count, new in ((8, 128, 0.0), (8, 128, 0.1), (8, 128, 0.3), (1, 128, 0.1), (32, 64, 0.1)):
        case = Case(session, batch, 8, 16, 2048 if batch < 32 else 512, count, new)
        case.check()
        missed, _ = case.share_missed()
        rows.put("resolve", batch=batch, heads=8, count=count, new=new, missed=missed, graph=case.time(timer, case.resolve))


def travels(session, timer, rows):
    grid = ((16, 2, 512, 64, 0.1), (1, 8, 2048, 128, 0.1), (1, 8, 2048, 128, 0.5))
    for coding, (batch, heads, blocks, count, new) in itertools.product(CODINGS, grid):
        case = Case(session, batch, heads, 128, blocks, count, new, coding=coding)
        case.check()
        missed, size = case.share_missed()
        time = case.time(timer, case.travel)
        rows.put("travel", coding=coding, batch=batch, heads=heads, count=count, new=new, missed=missed, graph=time, gbs=size / time / 1e3)


def appends(session, timer, rows):
    heads, dim, whole = 8, 128, 4
    for coding, batch in itertools.product(CODINGS, (1, 8, 32)):
        blocks = whole + STEPS
        with vanward.KvCache(session, layers=1, kv_heads=heads, block_size=BLOCK, key_dim=dim, value_dim=dim, dtype="bfloat16",
                             max_sequences=batch, max_blocks=blocks, host_blocks=batch * blocks, slots=batch * heads * 64,
                             **CODINGS[coding]) as cache:
            for n in range(batch):
                assert cache.add(stream=stream()) == n
            numbers = torch.arange(batch, dtype=torch.int32, device="cuda")
            k = torch.randn(batch, blocks * BLOCK, heads, dim, device="cuda", dtype=torch.bfloat16)
            begins = [torch.full((batch,), n * BLOCK, dtype=torch.int32, device="cuda") for n in range(blocks)]

            def append(begin, tokens):
                some = k[:, :tokens]
                cache.append(layer=0, sequences=numbers, begin=begin, k=some, v=some, stream=stream())

            def reset():
                for n in range(batch):
                    cache.extend(n, blocks * BLOCK, stream=stream())
                    cache.truncate(n, 0, stream=stream())
                    cache.extend(n, blocks * BLOCK, stream=stream())
                append(begins[0], whole * BLOCK)

            last = begins[whole - 1]
            for kind, tokens, call in (
                ("again", 1, lambda i: append(last, 1)),
                ("again", BLOCK, lambda i: append(last, BLOCK)),
                ("leaves", BLOCK, lambda i: append(begins[whole + i], BLOCK)),
            ):
                reset()  # for the calls that come before the timed ones
                time = timer.graph(call, STEPS, before=reset)
                rows.put("append", coding=coding, batch=batch, heads=heads, tokens=tokens, kind=kind, graph=time)
            assert cache.info().dropped_tokens == 0


def matrices():
    """Products of matrices that take about 100 µs."""
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    y = torch.empty_like(x)
    return lambda *_: [torch.mm(x, w, out=y) for w in weights]


def beside(session, rows):
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    kernels = (("add", lambda: torch.add(a.view(torch.int32), 1, out=b.view(torch.int32))), ("products", matrices()))
    for coding, (kernel, call) in itertools.product(CODINGS, kernels):
        case = Case(session, 16, 2, 128, 512, 64, 1.0, coding=coding)
        times = {False: [], True: []}
        for n in range(40):
            travelling = n % 2 == 1
            torch.cuda.synchronize()
            if travelling:
                case.resolve(n % STEPS)
                case.cache.fetch(0, stream=stream())
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            case.cache.wait(0, stream=stream())
            torch.cuda.synchronize()
            times[travelling].append(begin.elapsed_time(end) * 1e3)
        alone, with_copies = statistics.median(times[False]), statistics.median(times[True])
        rows.put("beside", coding=coding, kernel=kernel, alone=alone, travelling=with_copies, slower=with_copies / alone)


def layers(session, timer, rows):
    products = matrices()
    alone = timer.graph(products, STEPS)
    none = None
    for coding, new in itertools.product(CODINGS, (0.0, 0.05, 0.1, 0.2)):
        case = Case(session, 1, 8, 128, 2048, 128, new, coding=coding)

        def step(i):
            case.resolve(i)
            case.cache.fetch(0, stream=stream())
            products(i)
            case.cache.wait(0, stream=stream())
            case.attention(i)

        case.check()
        missed, size = case.share_missed()
        time = case.time(timer, step)
        none = time if new == 0.0 else none
        rows.put("layer", coding=coding, new=new, missed=missed, mib=size / (1 << 20), products=alone, graph=time, slower=time / none)


def measure(session, timer, rows, quick):
    with torch.cuda.stream(torch.cuda.Stream()):
        resolves(session, timer, rows)
        travels(session, timer, rows)
        appends(session, timer, rows)
        beside(session, rows)
        layers(session, timer, rows)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20)
