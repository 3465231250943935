"""Attention to keys and values in INT4 beside bfloat16, in one process.

    python benches/gpu/int4.py [--out FILE] [--quick]

The cases are those of attention.py: 32 query heads on 8 KV heads of 128 channels, pages and blocks of 64 tokens. The first and the last block
of each sequence stay in bfloat16; all others are coded by torch here, with weights from 0.5 to 1.5. `listed` attends to a list of so many tokens for
each KV head, `dense` to all tokens. `error` is that of the result against float32 attention to the decoded keys and values, relative in norm; `coded` is
that of the decoded ones against bfloat16, which keys that are drawn at random make larger than those of a model. `bf16` and `int4` are GPU times of a
call in a CUDA graph, microseconds, medians, of inputs that are in no cache; `ratio` is the second over the first, and `read` the time in which the device
reads as many bytes as INT4 has. `by_head` and `ratio_by_head` are those of codes and scales of which a page has all tokens of a head side by side, which
strides say; elsewhere a page has all heads of a token side by side. `positions` is 9 where a token and eight drafts are verified, of which the last one
has to see what a single position does. `widths` are `listed` and `dense` of heads of 64 and of 256 channels. `kept` is attention over a list that also
keeps partials of each block, and `repair` the repair in EXACT of a prediction of as many blocks that missed a share of them, by `int4_mma`.
"""

import copy
import math

import torch

from attention import BLOCK, DIM, HEADS, KV_HEADS, Case, random, repairs, room
from timing import run, vanward

GROUP = HEADS // KV_HEADS
DRAFTED = 9


def hadamard(n):
    h = torch.ones(1, 1, device="cuda")
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)


class Coder:
    """The format of vwd_int4_kv, in torch."""

    def __init__(self, dim):
        self.turn = hadamard(dim)

    def encode(self, x):
        """Codes of [..., dim] and the scale of each row; what they stand for."""
        y = x.float() @ self.turn
        scale = (y.abs().amax(-1) / 7.5).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        step = scale.float()[..., None]
        codes = (y / step).floor().clamp(-8, 7)
        packed = (codes + 8).to(torch.uint8)
        return packed[..., 0::2] | packed[..., 1::2] << 4, scale, (codes + 0.5) * step @ self.turn


class Int4Case(Case):
    """A case whose caches are coded, too."""

    is_coded = False  # whether its calls read the codes by default, in pages that have a head's tokens side by side

    def __init__(self, session, batch, tokens, budget, dim=DIM):
        super().__init__(session, batch, tokens, budget, dim=dim)
        coder = Coder(dim)
        self.weights = torch.rand(KV_HEADS, dim, device="cuda") + 0.5
        self.int4, self.by_head, self.decoded = [], [], None
        for i in range(self.sets):
            parts = [self._coded(coder, k, v) for k, v in zip(self.keys[i].split(2048), self.values[i].split(2048))]
            k, k_scale, v, v_scale, means, *decoded = (torch.cat(part) for part in zip(*parts))
            self.int4.append(vanward.Int4KV(
                block_size=BLOCK, exact_tokens=BLOCK, k=k, v=v, k_scale=k_scale, v_scale=v_scale, page_table=self.table,
                coded_lens=torch.full_like(self.lens, tokens - BLOCK), means=means, mean_table=self.table, weights=self.weights))
            heads_first = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, *(y.view(torch.uint8) for y in (k_scale, v_scale))))
            k, v, k_scale, v_scale = heads_first
            k_scale, v_scale = (x.view(torch.float8_e4m3fn) for x in (k_scale, v_scale))
            self.by_head.append(vanward.Int4KV(
                block_size=BLOCK, exact_tokens=BLOCK, k=k, v=v, k_scale=k_scale, v_scale=v_scale, page_table=self.table,
                coded_lens=torch.full_like(self.lens, tokens - BLOCK), means=means, mean_table=self.table, weights=self.weights))
            if i == 0:
                self.decoded = [self._with_exact(*pair) for pair in zip(decoded, (self.keys[0], self.values[0]))]
        self.read_bytes = batch * budget * KV_HEADS * (dim + 2 + 2 * dim // BLOCK)

    def _coded(self, coder, keys, values):
        means = keys.float().mean(1, keepdim=True).bfloat16()
        k, k_scale, decoded = coder.encode((keys.float() - means.float()) / self.weights)
        v, v_scale, values = coder.encode(values)
        return k, k_scale, v, v_scale, means, means.float() + decoded * self.weights, values

    def _with_exact(self, decoded, exact):
        """Tokens as the library reads them: the first and the last block of each sequence as they are."""
        for page in (self.table[:, 0].long(), self.table[:, -1].long()):
            decoded[page] = exact[page].float()
        return decoded

    def kv(self, i):
        kv = super().kv(i)
        if self.is_coded:
            kv.int4 = self.by_head[i]
        return kv

    def that_reads_codes(self):
        """This case, whose calls read the codes by default."""
        case = copy.copy(self)
        case.is_coded = True
        return case

    def coded_attention(self, i, stream, listed=True, by_head=False):
        kv = self.kv(i)
        kv.int4 = (self.by_head if by_head else self.int4)[i]
        more = dict(block_size=self.block, list=vanward.BlockList(self.ids[i], self.counts)) if listed else {}
        return self.session.prepare_attention(kv=kv, q=self.q, out=self.out, stream=stream, **more)

    def expected(self, keys, values, listed):
        """Attention in float32, of set 0."""
        q = self.q.float().view(self.batch, KV_HEADS, GROUP, self.dim)
        if listed:
            pick = lambda x: self.gathered([x], 0).float()  # noqa: E731
        else:
            pick = lambda x: x[self.table.long()].view(self.batch, -1, KV_HEADS, self.dim).transpose(1, 2).float()  # noqa: E731
        keys, values = pick(keys), pick(values)
        scores = q @ keys.transpose(-1, -2) / math.sqrt(self.dim)
        return (scores.softmax(-1) @ values).view(self.batch, HEADS, self.dim)

    def check_coded(self, what, listed=True):
        """The result of set 0."""
        torch.cuda.synchronize()
        found = error(self.out, self.expected(*self.decoded, listed))
        assert found < 1e-2, f"{what} batch {self.batch}: error {found:.1e}"
        return found

    def check(self, i=0):
        if self.is_coded:
            self.check_coded("listed")
        else:
            super().check(i)


def error(found, wanted):
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def point(session, timer, rows, what, batch, tokens, budget, listed, dim=DIM):
    case = Int4Case(session, batch, tokens, budget, dim)
    exact = case.on_current_stream(lambda i, stream: case.attention(i, stream, listed=listed))
    coded = case.on_current_stream(lambda i, stream: case.coded_attention(i, stream, listed=listed))
    by_head = case.on_current_stream(lambda i, stream: case.coded_attention(i, stream, listed=listed, by_head=True))
    wanted = case.expected(*case.decoded, listed)
    for call in (by_head, coded):
        case.out.zero_()
        call(0)
        found = case.check_coded(what, listed)
    row = dict(batch=batch, tokens=budget, **({} if dim == DIM else dict(dim=dim)), error=found, coded=error(wanted, case.expected(case.keys[0], case.values[0], listed)))
    bf16, int4, apart = (min(timer.graph(call, case.sets) for _ in range(2)) for call in (exact, coded, by_head))
    rows.put(what, **row, bf16=bf16, int4=int4, ratio=int4 / bf16, by_head=apart, ratio_by_head=apart / bf16,
             read=timer.copy(2 * case.read_bytes) / 2)


def drafts(session, timer, rows, what, batch, tokens, budget, listed):
    case = Int4Case(session, batch, tokens, budget)
    case.on_current_stream(lambda i, stream: case.coded_attention(i, stream, listed=listed))(0)
    single = case.out.float()
    case.q = torch.cat([random(batch, DRAFTED - 1, HEADS, DIM), case.q[:, None]], 1)
    case.out = torch.empty_like(case.q)
    exact = case.on_current_stream(lambda i, stream: case.attention(i, stream, listed=listed))
    coded = case.on_current_stream(lambda i, stream: case.coded_attention(i, stream, listed=listed))
    by_head = case.on_current_stream(lambda i, stream: case.coded_attention(i, stream, listed=listed, by_head=True))
    for call in (by_head, coded):
        case.out.zero_()
        call(0)
        torch.cuda.synchronize()
        found = error(case.out[:, -1], single)
        assert found < 1e-2, f"{what} batch {batch} tokens {budget}: error {found:.1e}"
    bf16, int4, apart = (min(timer.graph(call, case.sets) for _ in range(2)) for call in (exact, coded, by_head))
    rows.put(what, batch=batch, tokens=budget, positions=DRAFTED, bf16=bf16, int4=int4, ratio=int4 / bf16, by_head=apart,
             ratio_by_head=apart / bf16, read=timer.copy(2 * case.read_bytes) / 2)


def kept(session, timer, rows, quick):
    """Partials, and the repair in EXACT that takes them: 128 blocks, of which the prediction missed a share."""
    for batch in (1,) if quick else (1, 8):
        case = Int4Case(session, batch, 32 << 10, 128 * BLOCK)
        forms = dict(bf16=case, int4=case.that_reads_codes())
        spare = room(case)

        def timed(prepare):
            by_form = {name: case.on_current_stream(lambda i, stream, form=form: prepare(form, i, stream)) for name, form in forms.items()}
            by_form["int4"](0)
            case.check_coded("kept")
            times = {name: timer.graph(call, case.sets) for name, call in by_form.items()}
            return dict(times, ratio=times["int4"] / times["bf16"])

        rows.put("anew", batch=batch, **timed(lambda form, i, stream: form.attention(i, stream)))
        rows.put("kept", batch=batch, **timed(lambda form, i, stream: form.attention(i, stream, partials=spare[0][i])))
        for percent in (2,) if quick else (2, 10, 30):
            times = {name: timer.graph(repairs(form, percent, *spare)["exact"], case.sets) for name, form in forms.items()}
            rows.put("repair", batch=batch, missed=f"{percent} %", **times, ratio=times["int4"] / times["bf16"])


def measure(session, timer, rows, quick):
    for batch, budget in [(1, 4096), (1, 8192), (16, 4096)][: 2 if quick else 3]:
        point(session, timer, rows, "listed", batch, 32 << 10, budget, True)
    for batch, tokens in [(1, 32 << 10), (1, 128 << 10), (8, 32 << 10)][: 2 if quick else 3]:
        point(session, timer, rows, "dense", batch, tokens, tokens, False)
    for batch, tokens, budget in [(1, 32 << 10, 4096), (1, 32 << 10, 0), (1, 128 << 10, 0), (8, 32 << 10, 0)][: 2 if quick else 4]:
        drafts(session, timer, rows, "listed drafts" if budget else "dense drafts", batch, tokens, budget or tokens, budget > 0)
    for dim in (64, 256):
        for batch, budget in [(1, 4096), (16, 4096), (1, 0)][: 1 if quick else 3]:
            point(session, timer, rows, "widths", batch, 32 << 10, budget or 32 << 10, budget > 0, dim)
    kept(session, timer, rows, quick)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=64 << 20)
