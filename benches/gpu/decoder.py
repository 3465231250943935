"""Decode steps of an 8B-shaped model through vwd_decoder, by each strategy, and rounds of drafting and verifying, in CUDA graphs.

    python benches/gpu/decoder.py [--out FILE] [--quick | --goals] [--only PART …]

The layers are those of layer.py; the decoder appends, keeps the summaries and attends. `dense` and the strategies are steps of one position;
`foreseen` and `prr_foreseen` are given queries a layer ahead, without a projection, and `prr` predicts right, since every replay has the same queries.
`forecast` is FORESEEN, too, and projects each layer's queries from the residual stream by a random map of rank RANK of its own. `by_budget` are the
same decoders with a budget that vwd_budget_profile measured for the point: they are SERIAL where the strategy does not pay. `profile` are the
times that it measured, of attention and selection alone, with every prediction right and lists of k blocks. `round` is
lossless decoding: `drafts` sparse steps (AXIS; by SERIAL, or by FORESEEN as in `forecast`), one dense step of drafts + 1 positions, and
vwd_decoder_accept. `gain_95`, `gain_98` and `gain_99` are its speed over `dense` where a draft token is accepted with probability 0.95, 0.98 and
0.988, assumptions. --goals times what a goal names: AXIS without budgets, and rounds. GPU time of one layer, microseconds, medians.
"""

import json
import tempfile

import torch

from layer import BLOCK, DIM, HEADS, INIT, LOCAL, PAGE, Sequences, Stack, Weights, random
from predict import Maps
from timing import run, vanward
from vanward import DecoderMode, DecoderPolicy, Predict, SelectMethod, Strategy

LAYERS = 8
RANK = 128
STRATEGIES = {
    "serial": {},
    "prr": dict(strategy=Strategy.PRR),
    "prr_foreseen": dict(strategy=Strategy.PRR, predict=Predict.FORESEEN),
    "foreseen": dict(strategy=Strategy.FORESEEN),
    "forecast": dict(strategy=Strategy.FORESEEN),
}
GOALS = ("serial", "prr", "foreseen", "forecast")
PARTS = ("strategies", "round")


class Pages(Sequences):
    """Keys and values alone: the decoder has summaries of its own."""

    def summarise(self):
        pass


class Steps(Stack):
    """Steps of `positions` positions through a decoder, the last one of them at position `length` − 1."""

    def __init__(self, decoder, sequences, weights, positions=1, length=None, mode=DecoderMode.SPARSE, ahead=None, forecast=None):
        super().__init__(sequences, weights, positions)
        self.decoder, self.mode, self.ahead, self.forecast = decoder, mode, ahead, forecast
        length = length or sequences.context
        self.lens = torch.full_like(sequences.lens, length)
        self.v = torch.empty_like(self.k)

    def append(self, i, v):
        self.v.copy_(v)

    def foresee(self, i):
        if i >= self.sequences.layers:
            return
        if self.ahead is not None:
            self.run("foresee", i, lambda: self.decoder.prepare_foresee(layer=i, q=self.ahead))
        elif self.forecast is not None:
            # The same residual stream for each layer: it stays where it is, and the time does not depend on it.
            self.run("foresee", i, lambda: self.decoder.prepare_foresee(layer=i, forecast=self.forecast, map=i, x=self.first))

    def attend(self, i):
        s = self.sequences
        rows = (s.batch, self.positions) if self.positions > 1 else (s.batch,)
        shaped = lambda t: t.view(*rows, *t.shape[-2:])  # noqa: E731
        self.run("attend", i, lambda: self.decoder.prepare_attend(
            layer=i, k=s.keys[i], v=s.values[i], new_k=shaped(self.k), new_v=shaped(self.v), q=shaped(self.q), out=shaped(self.out)))

    def step(self, begin=None):
        for i in range(self.sequences.layers):
            self.one(i, begin)

    def one(self, i, begin=None):
        """Layer i of a step."""
        if i == 0:
            self.decoder.begin(
                mode=self.mode, positions=self.positions, seq_lens=self.lens, page_table=self.sequences.table, begin=begin,
                shortest=self.sequences.context - 64, stream=torch.cuda.current_stream().cuda_stream)
            self.foresee(0)
        self.foresee(i + 1)
        self.layer(i, self.attend)


def decoder_of(session, sequences, k, positions=1, method=SelectMethod.AXIS, budget=None, **policy):
    # A prediction has all blocks here: every replay has the same queries.
    with_budget = dict(budget=budget, coverage=1.0) if budget else {}
    return vanward.Decoder(
        session, dtype="bfloat16", **with_budget, layers=sequences.layers, max_rows=sequences.batch, max_positions=positions, query_heads=HEADS,
        kv_heads=sequences.kv_heads, key_dim=DIM, value_dim=DIM, page_size=PAGE, pages=len(sequences.keys[0]), block_size=BLOCK,
        policy=DecoderPolicy(method=method, k=k, init_blocks=INIT, local_blocks=LOCAL, **policy))


def budget_of(session, sequences, k, method):
    """Times of the point's strategies, in a profile of its own."""
    return vanward.Budget.profile(
        session, dtype="bfloat16", query_heads=HEADS, kv_heads=sequences.kv_heads, key_dim=DIM, value_dim=DIM, page_size=PAGE, block_size=BLOCK, k=k,
        method=method, init_blocks=INIT, local_blocks=LOCAL, max_draft=1, contexts=[sequences.context],
        batches=[sequences.batch], ratios=[1.0, 1.25], samples=9, limit_bytes=16 << 30)


def times_of(budget):
    """The first time of each strategy in a budget's file, which docs/budget.md describes."""
    with tempfile.NamedTemporaryFile() as file:
        budget.save(file.name)
        data = open(file.name, "rb").read()
    size = int.from_bytes(data[:8], "little")
    offsets = {name: about["data_offsets"][0] + 8 + size for name, about in json.loads(data[8 : 8 + size]).items() if "data_offsets" in about}
    return {name: memoryview(data)[offsets[name] :][:4].cast("f")[0] for name in ("serial", "prr", "prr_foreseen", "foreseen")}


def prepare(steps):
    """Makes the summaries of all tokens."""
    steps.step(torch.zeros_like(steps.lens))
    torch.cuda.synchronize()


def check(session, sequences, weights):
    """PRR gives what SERIAL gives to rounding, and a budget that covers all blocks is dense."""
    found = {}
    for name, policy, mode, k in [("dense", {}, DecoderMode.DENSE, 64), ("all", {}, DecoderMode.SPARSE, sequences.blocks),
                                  ("serial", {}, DecoderMode.SPARSE, 64), ("prr", dict(strategy=Strategy.PRR), DecoderMode.SPARSE, 64)]:
        torch.manual_seed(1)
        with decoder_of(session, sequences, k, **policy) as decoder:
            steps = Steps(decoder, sequences, weights, mode=mode)
            prepare(steps)
            for _ in range(3):
                steps.step()
            torch.cuda.synchronize()
            found[name] = steps.x.float()
    error = lambda a, b: ((found[a] - found[b]).norm() / found[b].norm()).item()  # noqa: E731
    assert torch.equal(found["all"], found["dense"]), "all blocks selected is not dense attention"
    assert error("prr", "serial") < 3e-2, f"PRR: error {error('prr', 'serial'):.1e}"


class Round:
    """`drafts` sparse steps, the dense step that verifies them, and what accepts."""

    def __init__(self, decoder, sequences, weights, drafts, forecast):
        base = sequences.context - drafts
        self.drafting = [Steps(decoder, sequences, weights, length=base + n, forecast=forecast) for n in range(drafts)]
        self.verifying = Steps(decoder, sequences, weights, drafts + 1, mode=DecoderMode.DENSE)
        batch = sequences.batch
        self.tokens = torch.zeros(batch, drafts, dtype=torch.int32, device="cuda")
        self.target = torch.zeros(batch, drafts + 1, dtype=torch.int32, device="cuda")
        self.accepted, self.next = (torch.empty(batch, dtype=torch.int32, device="cuda") for _ in range(2))
        self.decoder = decoder

    def __call__(self, _=0):
        for steps in self.drafting:
            steps.step()
        self.verifying.step()
        self.decoder.accept(draft=self.tokens, target=self.target, accepted=self.accepted, next_token=self.next,
                            stream=torch.cuda.current_stream().cuda_stream)


def measure(session, timer, rows, quick, only=PARTS):
    weights = [Weights() for _ in range(LAYERS)]
    maps = Maps(session, LAYERS, RANK)
    for_goals = quick == "goals"
    points = [(1, 32, 4096), (1, 128, 4096), (1, 512, 4096), (8, 32, 2048), (8, 128, 4096)]
    if for_goals:
        points = [(1, 128, 4096), (1, 512, 4096), (8, 128, 4096)]
    elif quick:
        points = points[:2]
    checked = False
    for batch, thousands, budget in points:
        context, k = thousands << 10, budget // BLOCK
        sequences = Pages(session, batch, context, LAYERS)
        if not checked:
            check(session, sequences, weights)
            checked = True
        row = dict(batch=batch, context=context, budget=budget, layers=sequences.layers)
        by_budget = dict(batch=batch, context=context, budget=budget)

        def time(method, name, policy, budget=None):
            with decoder_of(session, sequences, k, method=method, budget=budget, **policy) as decoder:
                ahead = random(batch, HEADS, DIM) if "foreseen" in name else None
                steps = Steps(decoder, sequences, weights, ahead=ahead, forecast=maps.forecast if name == "forecast" else None)
                prepare(steps)
                if "dense" not in row:
                    row["dense"] = timer.graph(Steps(decoder, sequences, weights, mode=DecoderMode.DENSE).one, sequences.layers, replays=9)
                return timer.graph(steps.one, sequences.layers, replays=9)

        for method in (SelectMethod.AXIS,) if for_goals else (SelectMethod.AXIS, SelectMethod.MINMAX):
            if "strategies" not in only:
                time(method, "serial", {})  # and dense
                break
            profile = None if for_goals else budget_of(session, sequences, k, method)
            if profile:
                rows.put("profile", batch=batch, context=context, budget=budget, method=method.name.lower(), **times_of(profile))
            for name in GOALS if for_goals else STRATEGIES:
                column, policy = f"{method.name.lower()}_{name}", STRATEGIES[name]
                row[column] = time(method, name, policy)
                if profile:
                    by_budget[column] = row[column] if name == "serial" else time(method, name, policy, profile)
            if profile:
                profile.close()
        if "strategies" in only:
            rows.put("strategies", **row)
            if not for_goals:
                rows.put("by_budget", **by_budget)
        for name in ("serial", "forecast") if "round" in only else ():
            forecast = maps.forecast if name == "forecast" else None
            for drafts in (8,) if quick and not for_goals else (4, 8, 12, 15):
                with decoder_of(session, sequences, k, drafts + 1, **STRATEGIES[name]) as decoder:
                    prepare(Steps(decoder, sequences, weights, forecast=forecast))
                    one = timer.graph(Round(decoder, sequences, weights, drafts, forecast), 1, replays=9, calls=1) / sequences.layers
                gain = {f"gain_{p * 100:.0f}": (1 - p ** (drafts + 1)) / (1 - p) * row["dense"] / one for p in (0.95, 0.98, 0.988)}
                rows.put("round", batch=batch, context=context, budget=budget, by=name, drafts=drafts, round=one, dense=row["dense"], **gain)
        del sequences
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20, has_goals=True, parts=PARTS)
