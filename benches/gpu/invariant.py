"""What it costs that every sequence has the same bits in every batch: attention in batch-invariant sessions, made for 1, 8 and 64 sequences.

    python benches/gpu/invariant.py [--out FILE] [--quick]

32 query heads on 8 KV heads of 128 channels, bfloat16, pages and blocks of 64 tokens. Rows are of `batch` sequences of `tokens` tokens, page
tables with room for `room` tokens, all tokens or a list of `listed`, and `positions` query positions. `usual` is a session that is not
batch-invariant; `made_for_n` has invariant_batch n, and `scratch_n` are the MiB of scratch that its call takes. Before it is timed a call of all
sequences is compared with a call of the first one alone, bit by bit, and where all tokens are read a call of several positions with one of the
last position. Microseconds of a call in a CUDA graph, medians; inputs are in no cache.
"""

import torch

from attention import BLOCK, Positions
from timing import run, vanward

MADE_FOR = (1, 8, 64)
SCRATCH = 1 << 30
POINTS = [
    (1, 32 << 10, 0, 4096), (8, 32 << 10, 0, 4096), (64, 8 << 10, 0, 4096),
    (1, 8 << 10, 0, 0), (1, 32 << 10, 0, 0), (1, 128 << 10, 0, 0), (8, 8 << 10, 0, 0), (8, 8 << 10, 128 << 10, 0), (8, 32 << 10, 0, 0),
    (64, 8 << 10, 0, 0),
]


class Roomy(Positions):
    """Sequences whose page tables have room for more tokens."""

    def __init__(self, session, batch, tokens, budget, positions, room):
        super().__init__(session, batch, tokens, budget, positions)
        self.table = torch.nn.functional.pad(self.table, (0, room // BLOCK - self.blocks)).contiguous()

    def bits(self, sequences, positions):
        """What the last positions of the first sequences are given."""
        q = self.q[:sequences, self.positions - positions :].contiguous()
        out = torch.empty_like(q)
        kv = vanward.PagedKV(self.keys[0], self.values[0], self.lens[:sequences], page_table=self.table[:sequences])
        lists = {}
        if self.is_listed:
            lists = dict(block_size=BLOCK, list=vanward.BlockList(self.ids[0][:sequences], self.counts[:sequences]))
        self.session.prepare_attention(kv=kv, q=q, out=out, stream=torch.cuda.current_stream().cuda_stream, **lists)()
        torch.cuda.synchronize()
        return out[0].view(torch.int16)

    def check_bits(self):
        together = self.bits(self.batch, self.positions)
        assert torch.equal(together, self.bits(1, self.positions)), "a sequence alone"
        if not self.is_listed:
            assert torch.equal(together[-1:], self.bits(1, 1)), "a position alone"


def measure(session, timer, rows, quick):
    made_for = {n: vanward.Session(device="cuda", scratch_bytes=SCRATCH, invariant_batch=n) for n in MADE_FOR}
    for invariant in made_for.values():
        invariant.reserve(SCRATCH, stream=torch.cuda.graph.default_capture_stream.cuda_stream)
    for batch, tokens, room, listed in POINTS[:2] if quick else POINTS:
        case = Roomy(session, batch, tokens, listed, 1, room or tokens)
        for positions in (1, 9):
            case.ask(positions)
            row = dict(batch=batch, tokens=tokens, room=room or tokens, listed=listed or "all", positions=positions)
            case.session = session
            call = case.call()
            call(0)
            case.check()
            row["usual"] = timer.graph(call, case.sets)
            for n, invariant in made_for.items():
                case.session = invariant
                case.check_bits()
                call = case.call()
                call(0)
                case.check()
                row[f"made_for_{n}"] = timer.graph(call, case.sets)
                row[f"scratch_{n}"] = case.attention(0, 0, listed=case.is_listed).scratch() / 2**20
            rows.put("attention", **row)
        del case


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20)
