"""What a selection leaves out, as one term of attention: what each part costs, in one process.

    python benches/gpu/remainder.py [--out FILE] [--quick]

8 KV heads of 128 channels, groups of 4, blocks of 64 tokens, bfloat16, summaries of AXIS in INT4. Every result is compared with torch's before it is
timed. `select` is vwd_select_blocks of 128 blocks without log_mass (`lists`) and with it (`with_mass`). `update` is vwd_remainder_update where no block
became whole (`nothing`), where one did (`block`), and of all tokens (`all`); `copy` is the time in which the device copies as many bytes as the keys
and values of these tokens have, half of them read. `attend` is vwd_attention over 64 blocks of 32K tokens, without a state (`listed`), with one (`state`),
and with the term (`term`); `attend int4` is the same over keys and values in INT4 but for the first and the last block, where a page has the codes of all
tokens of a head side by side. `step` is both calls in one graph, vwd_select_blocks of so many blocks of 128K tokens and vwd_attention over the list that it
writes: without log_mass and a state (`listed`), with a state (`state`), and with log_mass and the term (`term`); `times` is `term` over `state`. GPU times of a
call, or of these two, in a CUDA graph, microseconds, medians; inputs are in no cache.
"""

import math

import torch

import attention
import int4
import selection
from timing import run, vanward

HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 64
QUERIES = HEADS * GROUP


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def torch_log_mass(case, i, listed):
    """ln Σ S·e^(q·mean)·cosh(.7·q·axis) over the whole blocks that the lists [B, Hk, k] leave out."""
    codes, ranges = case.first[i], case.second[i]
    batch, rows = codes.shape[:2]
    numbers = torch.stack([codes & 15, codes >> 4], -1).double().view(batch, rows, HEADS, 2, DIM // 32, 32)
    scale, least = ranges.double().view(batch, rows, HEADS, 2, DIM // 32, 2).unbind(-1)
    mean, axis = (least[..., None] + scale[..., None] * numbers).flatten(-2).permute(3, 0, 2, 4, 1)
    q = case.q.view(batch, HEADS, -1, DIM).double() / math.sqrt(DIM)
    along = 0.7 * (q @ axis).abs()
    mass = q @ mean + along + torch.log1p(torch.exp(-2 * along)) + math.log(BLOCK / 2)
    is_listed = torch.zeros(batch, HEADS, rows, dtype=torch.bool, device="cuda").scatter_(2, listed.long(), True)
    return mass.masked_fill(is_listed[:, :, None], -math.inf).logsumexp(-1).flatten(1)


def select(session, timer, rows, quick):
    for batch, tokens in [(1, 32 << 10), (1, 128 << 10), (8, 32 << 10), (8, 128 << 10)][: 2 if quick else 4]:
        case = selection.Case(session, batch, tokens, 128, "axis")
        log_mass = torch.empty(batch, QUERIES, device="cuda")

        def call(i, **more):
            case.prepared(i, torch.cuda.current_stream().cuda_stream, **more)()

        with_mass = lambda i: call(i, log_mass=log_mass)  # noqa: E731
        with_mass(0)
        torch.cuda.synchronize()
        wanted = torch_log_mass(case, 0, case.ids)
        apart = (log_mass.double() - wanted).abs().max().item()
        assert apart < 1e-3, f"batch {batch} tokens {tokens}: log_mass is {apart:.1e} apart"
        lists, mass = (timer.graph(each, case.sets) for each in (call, with_mass))
        rows.put("select", batch=batch, tokens=tokens, lists=lists, with_mass=mass, adds=mass - lists)


class Sums:
    """Keys and values of `sets` caches of one sequence, and what is kept of them."""

    def __init__(self, session, tokens, sets):
        self.session, self.tokens, self.sets = session, tokens, sets
        pages = tokens // BLOCK
        self.keys, self.values = ([random(pages, BLOCK, HEADS, DIM) for _ in range(sets)] for _ in range(2))
        for k, v in zip(self.keys, self.values):
            v += 0.5 * k + 0.25
        self.table = torch.randperm(pages, device="cuda").int()[None]
        self.lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        self.kept = [vanward.Remainder.empty(k, v, sequences=1) for k, v in zip(self.keys, self.values)]

    def count(self, tokens):
        """So many tokens are counted."""
        for kept in self.kept:
            kept.tokens.fill_(tokens)

    def update(self, i):
        kv = vanward.PagedKV(self.keys[i], self.values[i], self.lens, page_table=self.table)
        stream = torch.cuda.current_stream().cuda_stream
        self.session.prepare_remainder_update(block_size=BLOCK, kv=kv, remainder=self.kept[i], stream=stream)()

    def check(self):
        self.count(0)
        self.update(0)
        torch.cuda.synchronize()
        kept = self.kept[0]
        assert (kept.tokens == self.tokens - BLOCK).all(), "tokens"
        k, v = (x[0][self.table[0].long()][1:].flatten(0, 1).double() for x in (self.keys, self.values))
        mean_k, mean_v = k.mean(0), v.mean(0)
        covariance = torch.einsum("tgc,tgd->gcd", k - mean_k, v - mean_v) / len(k)
        for found, wanted in ((kept.mean_k, mean_k), (kept.mean_v, mean_v), (kept.covariance, covariance)):
            assert error(found[0], wanted) < 1e-4, f"{self.tokens} tokens: error {error(found[0], wanted):.1e}"


def update(session, timer, rows, quick):
    for tokens in [32 << 10] if quick else [32 << 10, 128 << 10]:
        sums = Sums(session, tokens, 2 if tokens > 64 << 10 else 4)
        sums.check()
        whole = tokens - BLOCK

        def timed(counted):
            return timer.graph(sums.update, sums.sets, before=lambda: sums.count(counted), calls=sums.sets)

        size = 2 * tokens * HEADS * DIM * 2
        rows.put("update", tokens=tokens, nothing=timed(whole), block=timed(whole - BLOCK), all=timed(0), copy=timer.copy(size))


class Term:
    """What the lists of a case of attention leave out."""

    def make_term(self):
        self.log_mass = 4 + torch.randn(self.batch, QUERIES, device="cuda")
        self.remainders = []
        for _ in range(self.sets):
            kept = vanward.Remainder.empty(self.keys[0], self.values[0], sequences=self.batch)
            kept.tokens.fill_(self.blocks * BLOCK - BLOCK)
            kept.mean_v.normal_()
            kept.covariance.normal_(std=0.3)
            self.remainders.append(kept)
        self.state = vanward.AttentionState(*self.states())

    def calls(self):
        """Attention without a state, with one, and with the term."""
        term = lambda i: dict(remainder=self.remainders[i], log_mass=self.log_mass)  # noqa: E731
        return dict(listed=self.attention, state=lambda i, stream: self.attention(i, stream, state=self.state),
                    term=lambda i, stream: self.attention(i, stream, state=self.state, **term(i)))

    def check_term(self, keys, values, most=1e-2):
        """Of set 0, whose lists name these keys and values [B, Hk, tokens, D]."""
        torch.cuda.synchronize()
        q = self.q.double().view(self.batch, HEADS, GROUP, DIM) / math.sqrt(DIM)
        kept, mass = self.remainders[0], self.log_mass.double().view(self.batch, HEADS, GROUP, 1)
        term = kept.mean_v.double()[:, :, None] + 0.5 * (q @ kept.covariance.double())
        scores = torch.cat([q @ keys.double().transpose(-1, -2), mass], -1).softmax(-1)
        wanted = (scores[..., :-1] @ values.double() + scores[..., -1:] * term).view(self.batch, QUERIES, DIM)
        assert error(self.out, wanted) < most, f"batch {self.batch}: error {error(self.out, wanted):.1e}"


class Attended(attention.Case, Term):
    """Lists of so many blocks of bfloat16."""

    def __init__(self, session, batch, tokens, blocks=64):
        super().__init__(session, batch, tokens, blocks * BLOCK)
        self.make_term()

    def check_listed(self):
        self.check_term(self.gathered(self.keys, 0), self.gathered(self.values, 0))


class Coded(int4.Int4Case, Term):
    """Lists of 64 blocks of INT4."""

    is_coded = True

    def __init__(self, session, batch, tokens):
        super().__init__(session, batch, tokens, 64 * BLOCK)
        self.make_term()

    def check_listed(self):
        self.check_term(*(self.gathered([x], 0) for x in self.decoded))


def attend(session, timer, rows, quick):
    for name, make in (("attend", Attended), ("attend int4", Coded)):
        for batch in (1,) if quick else (1, 8):
            case = make(session, batch, 32 << 10)
            calls = {name: case.on_current_stream(prepare) for name, prepare in case.calls().items()}
            calls["term"](0)
            case.check_listed()
            times = {name: timer.graph(call, case.sets) for name, call in calls.items()}
            rows.put(name, batch=batch, **times, adds=times["term"] - times["state"])


def step(session, timer, rows, quick):
    for batch, blocks in [(1, 64), (8, 64), (1, 128), (8, 128)][:: 2 if quick else 1]:
        case, selects = Attended(session, batch, 128 << 10, blocks), selection.Case(session, batch, 128 << 10, blocks, "axis")
        sets = min(case.sets, selects.sets)
        case.q, case.ids, case.counts = selects.q, [selects.ids] * case.sets, selects.counts

        def both(attends, **more):
            def prepare(i, stream):
                calls = selects.prepared(i, stream, **more), attends(i, stream)
                return lambda: [call() for call in calls]

            return case.on_current_stream(prepare, sets)

        calls = {name: both(attends, **(dict(log_mass=case.log_mass) if name == "term" else {})) for name, attends in case.calls().items()}
        calls["term"](0)
        torch.cuda.synchronize()
        wanted = torch_log_mass(selects, 0, selects.ids)
        apart = (case.log_mass.double() - wanted).abs().max().item()
        assert apart < 1e-3, f"batch {batch}: log_mass is {apart:.1e} apart"
        case.check_listed()
        times = {name: min(timer.graph(call, sets) for _ in range(2)) for name, call in calls.items()}
        rows.put("step", batch=batch, blocks=blocks, **times, adds=times["term"] - times["state"], times=times["term"] / times["state"])


def measure(session, timer, rows, quick):
    select(session, timer, rows, quick)
    update(session, timer, rows, quick)
    attend(session, timer, rows, quick)
    step(session, timer, rows, quick)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=64 << 20)
