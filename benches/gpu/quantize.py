"""Coding keys and values in INT4, beside a copy of as many bytes, in one process.

    python benches/gpu/quantize.py [--out FILE] [--quick]

8 KV heads of 128 channels, bfloat16, pages and blocks of 64 tokens. `step` codes one block of each sequence in 32 layers in one call, as a step does whose
blocks become full; `layer` is the call's time for one of them. `bulk` codes all blocks of one layer. Each result is decoded and compared with the keys and
values before it is timed. GPU time of a call in a CUDA graph, microseconds, medians, of inputs that are in no cache. `copy` is a copy that reads and
writes as many bytes together, `share` how much of its speed coding has.
"""

import math

import torch

from attention import BLOCK, DIM, KV_HEADS, random
from int4 import hadamard
from timing import run, vanward

LAYERS = 32
READ, WRITTEN = 2 * DIM * 2, DIM + 2 + 2 * DIM / BLOCK  # bytes of a token and KV head


class Caches:
    """`layers` layers of `batch` sequences of `blocks` blocks, exact and coded."""

    def __init__(self, session, layers, batch, blocks):
        self.session, self.batch = session, batch
        pages, device = batch * blocks, dict(device="cuda")
        self.table = torch.randperm(pages, **device).int().view(batch, blocks)
        self.lens = torch.full((batch,), blocks * BLOCK, dtype=torch.int32, **device)
        codes = lambda: torch.empty(pages, BLOCK, KV_HEADS, DIM // 2, dtype=torch.uint8, **device)  # noqa: E731
        scales = lambda: torch.zeros(pages, BLOCK, KV_HEADS, dtype=torch.uint8, **device).view(torch.float8_e4m3fn)  # noqa: E731
        self.coded_lens = torch.zeros_like(self.lens)
        self.layers = []
        for _ in range(layers):
            means = torch.empty(pages, 1, KV_HEADS, DIM, dtype=torch.bfloat16, **device)
            int4 = vanward.Int4KV(block_size=BLOCK, k=codes(), v=codes(), k_scale=scales(), v_scale=scales(), page_table=self.table,
                                  coded_lens=self.coded_lens, means=means, mean_table=self.table)
            k, v = (random(pages, BLOCK, KV_HEADS, DIM) for _ in range(2))
            self.layers.append((int4, k, v))

    def call(self, first, last):
        """Codes blocks first … last − 1 of each sequence and layer."""
        lens, begin = torch.full_like(self.lens, last * BLOCK), torch.full_like(self.lens, first * BLOCK)
        kvs = [vanward.PagedKV(k=k, v=v, seq_lens=lens, page_table=self.table, int4=int4) for int4, k, v in self.layers]
        prepared = {}

        def call():
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in prepared:
                prepared[stream] = self.session.prepare_kv_quantize(layers=kvs, begin=begin, stream=stream)
            prepared[stream]()

        return call

    def check(self, first, last):
        """What was coded is within what four bits lose of normal numbers."""
        turn = hadamard(DIM)
        for int4, k, v in (self.layers[0], self.layers[-1]):
            page = self.table[:, first:last].flatten().long()
            for codes, scale, exact, mean in ((int4.k, int4.k_scale, k, int4.means), (int4.v, int4.v_scale, v, None)):
                c, step = codes[page].int(), scale[page].float()[..., None]
                y = (torch.stack([c & 15, c >> 4], -1).flatten(-2) - 7.5) * step
                decoded = y @ turn + (0 if mean is None else mean[page].float())
                found = ((decoded - exact[page].float()).norm() / exact[page].float().norm()).item()
                assert found < 0.15, f"error {found:.2f}"


def step(session, timer, rows, quick):
    for batch in (1,) if quick else (1, 8, 32):
        size = LAYERS * batch * BLOCK * KV_HEADS * READ
        sets = min(40, max(2, math.ceil((384 << 20) / size)))
        caches = Caches(session, LAYERS, batch, sets)
        calls = [caches.call(i, i + 1) for i in range(sets)]
        calls[1]()
        caches.check(1, 2)
        took, copy = timer.graph(lambda i: calls[i](), sets), timer.copy(int(size * (1 + WRITTEN / READ)))
        rows.put("step", batch=batch, layers=LAYERS, quantize=took, layer=took / LAYERS, copy=copy, share=copy / took)


def bulk(session, timer, rows, quick):
    for batch, tokens in [(1, 32 << 10)] if quick else [(1, 32 << 10), (1, 128 << 10), (8, 32 << 10)]:
        size = batch * tokens * KV_HEADS * READ
        sets = max(2, math.ceil((384 << 20) / size))
        every = [Caches(session, 1, batch, tokens // BLOCK) for _ in range(sets)]
        calls = [caches.call(0, tokens // BLOCK) for caches in every]
        calls[0]()
        every[0].check(0, tokens // BLOCK)
        took, copy = timer.graph(lambda i: calls[i](), sets), timer.copy(int(size * (1 + WRITTEN / READ)))
        rows.put("bulk", batch=batch, tokens=tokens, quantize=took, copy=copy, share=copy / took)


def measure(session, timer, rows, quick):
    step(session, timer, rows, quick)
    bulk(session, timer, rows, quick)


if __name__ == "__main__":
    run(__doc__, measure)
