"""Tokens a second at a fixed amount of GPU memory for keys and values: all of them there, or most of them in host memory.

    python benches/gpu/throughput.py [--out FILE] [--quick] [--units N ...] [--kv-heads N ...] [--context N ...] [--strategy NAME ...]
                                     [--points N] [--host-gib N]

The layers are those of layer.py, with 8 or 2 KV heads for their 32 query heads (2 as in MiniCPM4.1). `gib` is the memory that keys, values and AXIS's
summaries have on the device, in 2^30 bytes for MODEL_LAYERS layers: what one sequence of 131,072 tokens of 8 KV heads takes, or four (--units 1, 4).
`resident` keeps all keys and values in it, `tiered` as many slots as it has room for beside tails and summaries, each block once more in pinned host memory. Batches grow until
that memory ends, by the slots that a decoder on a cache demands, or until --host-gib of pinned memory do: 28 are enough for 16 GiB and 8 KV heads. LAYERS
layers are timed, and MODEL_LAYERS taken to last as much longer; embedding and output head are left out. `dense` and `sparse` (SERIAL, AXIS, `budget` tokens)
are resident steps through a decoder, `floor` a layer without attention, GPU time of one layer, microseconds, medians. `shared` are batches that the memory has no room for: sequences share the pages of
those that fit, and `sparse` says what a layer would take if nothing had to travel. `bus` is a plain copy from pinned memory, `gb` 10^9 bytes a second.

Steps follow each other in one CUDA graph, and misses come from queries that drift, as in tiered_decoder.py: `model` has the drift that was fitted to a
trace's misses with slots of twice the selection. For 131,072 tokens and a budget of 4096 the trace is Gemma-3-270M's over 16K tokens (1/32 selected), for 32,768 and
2048 SmolLM2-135M's over program code (1/14). What is timed has `slots` times the selection in slots, and misses accordingly. Queries
repeat after STEPS steps: where slots have room for all that these select (from some 5 to 11 times the selection on) nothing is missed, which is better than a text would be. `mib` and
`missed` are what a layer copies in a step, and the share of the named blocks that were not in a slot. SPARDA and ASYNC_TLS attend lists of their own; VANWARD
attends SERIAL's. The first layer of a step is foreseen where it begins, so that its blocks have no layer's time to travel: one layer of LAYERS, of a model's one
of MODEL_LAYERS.

`tokens` is tokens a second of the batch. `best` compares the largest of each way at the same memory; `over_sparse` and `over_dense` are against resident ones.

`papers` stands beside two figures that SparDA's authors report (arXiv 2606.04511, by its abstract and reviews: an H100, two 8B models trained for sparse attention, up to
128K tokens): decoding up to 1.7 times as fast as sparse attention with offload that waits for its blocks, at one batch, and up to 5.3 times the throughput of sparse
attention without offload, by larger batches. `over_offload` is SERIAL's layer over SPARDA's, at the batch that both were timed with where that is most.
`over_resident` is SPARDA's most tokens over those of resident sparse steps, and `bus_allows` what that would be if the copies of its largest batch took all of the
time, and nothing else any. Theirs are models on texts, and a GPU's memory less the model; their batches and misses are not in the abstract. Here memory is
set, and misses are a trace's. AsyncTLS's authors report 1.3 to 4.7 times the throughput at 48K to 96K tokens (arXiv 2604.07815); the abstract does not say of what.
"""

import math

import torch

from decoder import Pages, Steps, decoder_of
from layer import BLOCK, DIM, Weights
from tiered_decoder import OWN_LISTS, STRATEGIES, Drifting, Queries, bus, check, fit, tiered_decoder, write
from timing import run, vanward
from vanward import DecoderMode

LAYERS, MODEL_LAYERS = 4, 32
HOST_GIB = 56  # of LAYERS layers; all cases ask for the same, which is pinned once
REPLAYS = 3
RUN = 2 * BLOCK * DIM * 2  # bytes of a block's keys and values of one KV head
SUMMARY = 5 * DIM // 4
TAIL = 3  # blocks of each sequence beside the slots
UNIT = (128 << 10) // BLOCK * 8 * (RUN + SUMMARY)  # bytes of a layer for one sequence of 131,072 tokens and 8 KV heads
# What a step reads at once for a KV head of a sequence, as a multiple of k, and more: a list made ahead, or one or two selected ones.
LISTS = {"serial": (1.0, 0), "async_tls": (2.0, 1), "sparda": (1.25, 1), "vanward": (1.25, 1)}
TRACES = {  # context: budget, what was missed, and what was missed after a prefetch
    128 << 10: (4096, 0.090, 0.031),
    32 << 10: (2048, 0.058, 0.013),
}
CASES = [  # context, KV heads, units of device memory, batches
    (128 << 10, 8, 1, 4),
    (128 << 10, 2, 1, 4),
    (128 << 10, 8, 4, 3),
    (32 << 10, 8, 1, 3),
    (32 << 10, 2, 1, 3),
]


class Plan:
    """What `units` of device memory have room for in one layer, and `host` bytes of pinned memory in all of LAYERS."""

    def __init__(self, context, kv_heads, units, host):
        self.context, self.kv_heads, self.units = context, kv_heads, units
        self.blocks = context // BLOCK
        self.budget, self.missed, self.exposed = TRACES[context]
        self.k = self.budget // BLOCK
        self.memory = units * UNIT
        self.resident = self.memory // (self.blocks * kv_heads * (RUN + SUMMARY))
        self.host_blocks = host // (LAYERS * kv_heads * RUN)
        beside = kv_heads * (TAIL * RUN + self.blocks * SUMMARY)
        self.sequences = min(self.memory // (beside + self.entries("async_tls") * RUN), self.host_blocks // self.blocks)
        self.slots = (self.memory - self.sequences * beside) // RUN

    def entries(self, strategy):
        """Slots that a sequence demands."""
        ratio, more = LISTS[strategy]
        return self.kv_heads * (math.ceil(ratio * self.k) + more)

    def most(self, strategy):
        return min(self.sequences, self.slots // self.entries(strategy))

    def batches(self, points, strategy):
        """So many batches, from those that are resident to the most that a cache has room for, in equal ratios."""
        most = self.most(strategy)
        low, high = min(self.resident, self.sequences), self.sequences
        steps = {round(low * (high / low) ** (n / (points - 1))) for n in range(points)}
        return sorted({min(batch, most) for batch in steps})

    def about(self):
        return dict(context=self.context, kv_heads=self.kv_heads, gib=self.memory * MODEL_LAYERS / (1 << 30))


def doubling(most):
    """1, 2, 4 … and the most."""
    return sorted({min(1 << n, most) for n in range(most.bit_length() + 1)})


def tokens(batch, layer):
    """A second, from the microseconds of a layer."""
    return batch / (MODEL_LAYERS * layer) * 1e6


class Copies(Pages):
    """`batch` sequences on the pages of fewer: sequence n has those of n % of.batch."""

    def __init__(self, of, batch):
        self.__dict__.update(of.__dict__)
        self.batch = batch
        self.table = of.table[torch.arange(batch, device="cuda") % of.batch].contiguous()
        self.lens = of.lens[:1].repeat(batch)


class Case:
    def __init__(self, session, timer, rows, plan, weights):
        self.session, self.timer, self.rows, self.plan, self.weights = session, timer, rows, plan, weights
        self.length = plan.context - BLOCK // 2
        self.pages = Pages(session, plan.resident, plan.context, LAYERS, plan.kv_heads)
        assert self.pages.layers == LAYERS, "too little device memory"
        traced = dict(k=plan.k, slots=2 * plan.k, missed=plan.missed, exposed=plan.exposed)
        fitted = fit(session, self.pages, rows, **traced, context=plan.context, kv_heads=plan.kv_heads)
        self.queries = Queries(max(plan.sequences, plan.resident), LAYERS, *fitted)
        self.best, self.layers = {}, {}

    def keep(self, name, batch, layer):
        found = tokens(batch, layer)
        if found > self.best.get(name, (0.0,))[0]:
            self.best[name] = (found, batch)
        return found

    def steps(self, decoder, sequences, **more):
        return Drifting(decoder, sequences, self.weights, self.queries, self.length, **more)

    def resident(self, batch):
        """A batch whose keys and values are all on the device."""
        fits = batch <= self.plan.resident
        sequences = Copies(self.pages, batch)
        with decoder_of(self.session, sequences, self.plan.k) as decoder:
            steps = self.steps(decoder, sequences)
            # One row summarises each page: the first that has it.
            steps.step(begin=torch.where(torch.arange(batch, device="cuda") < self.pages.batch, 0, steps.lens - 1).int())
            steps.run_all()
            row = dict(floor=self.timer.graph(lambda i: steps.layer(i, steps.nothing), LAYERS, replays=REPLAYS), sparse=steps.time(self.timer, REPLAYS))
            if fits:
                row["dense"] = self.timer.graph(Steps(decoder, sequences, self.weights, length=self.length, mode=DecoderMode.DENSE).one, LAYERS,
                                                replays=REPLAYS)
                row.update({f"tokens_{name}": self.keep(name, batch, row[name]) for name in ("dense", "sparse")})
        self.rows.put("resident" if fits else "shared", **self.plan.about(), budget=self.plan.budget, batch=batch, **row)

    def tiered(self, cache, name, points):
        plan = self.plan
        most = Copies(self.pages, plan.most(name))
        with tiered_decoder(self.session, cache, most, plan.k, **STRATEGIES[name]) as decoder:
            numbers = write(cache, decoder, most, self.length)
            for batch in plan.batches(points, name):
                sequences = Copies(self.pages, batch)
                steps = self.steps(decoder, sequences, cache=cache, numbers=numbers[:batch])
                steps.run_all()
                if batch == plan.resident and name not in OWN_LISTS:
                    self.check(name, steps, sequences)
                layer, mib, missed = steps.count(self.timer, REPLAYS)
                self.layers[name, batch] = (layer, mib)
                slots = plan.slots / (batch * plan.kv_heads * plan.k)
                self.rows.put("tiered", **plan.about(), strategy=name, batch=batch, slots=slots, layer=layer, missed=missed, mib=mib,
                              gb=mib * 2**20 / layer / 1e3, tokens=self.keep(name, batch, layer))
            for n in numbers.tolist():
                cache.free(n, stream=torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()

    def check(self, name, steps, sequences):
        with decoder_of(self.session, sequences, self.plan.k) as decoder:
            resident = self.steps(decoder, sequences)
            resident.step(begin=torch.zeros_like(resident.lens))
            check(name, steps, resident, "exact")

    def measure(self, points, copied, strategies):
        plan = self.plan
        for batch in sorted({*doubling(plan.resident), *(batch for name in strategies for batch in plan.batches(points, name))}):
            self.resident(batch)
        with vanward.KvCache(
            self.session, layers=LAYERS, kv_heads=plan.kv_heads, block_size=BLOCK, key_dim=DIM, value_dim=DIM, dtype="bfloat16",
            max_sequences=plan.sequences, max_blocks=plan.blocks, host_blocks=plan.host_blocks, slots=plan.slots,
        ) as cache:
            for name in strategies:
                self.tiered(cache, name, points)
        for name, (found, batch) in self.best.items():
            self.rows.put("best", **plan.about(), way=name, batch=batch, tokens=found, over_sparse=found / self.best["sparse"][0],
                          over_dense=found / self.best["dense"][0])
        if {"serial", "sparda"} <= set(strategies):
            self.beside_papers(copied)

    def beside_papers(self, copied):
        layers = self.layers
        over_offload, batch = max((layers["serial", batch][0] / layers[name, batch][0], batch) for name, batch in layers
                                  if name == "sparda" and ("serial", batch) in layers)
        most = max(batch for name, batch in layers if name == "sparda")
        bus = tokens(most, layers["sparda", most][1] * 2**20 / copied / 1e3) if layers["sparda", most][1] else math.inf
        self.rows.put("papers", **self.plan.about(), over_offload=over_offload, at_batch=batch, over_resident=self.best["sparda"][0] / self.best["sparse"][0],
                      largest=most, bus_allows=bus / self.best["sparse"][0])


def measure(session, timer, rows, options):
    copied = bus(timer)
    rows.put("bus", gb=copied)
    host = (HOST_GIB // 4 if options.quick else options.host_gib) << 30
    cases = CASES[:1] if options.quick else [case for case in CASES if case[0] in options.context and case[1] in options.kv_heads and case[2] in options.units]
    weights = {kv_heads: [Weights(kv_heads) for _ in range(LAYERS)] for kv_heads in (8, 2)}
    for context, kv_heads, units, points in cases:
        plan = Plan(context, kv_heads, units, host)
        Case(session, timer, rows, plan, weights[kv_heads]).measure(options.points or points, copied, [name for name in LISTS if name in options.strategy])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=1 << 30, choices={
        "units": dict(nargs="+", type=int, default=[1, 4], metavar="N", help="device memory, in that of a sequence of 131,072 tokens and 8 KV heads"),
        "kv-heads": dict(nargs="+", type=int, default=[8, 2], metavar="N"),
        "context": dict(nargs="+", type=int, default=list(TRACES), metavar="N", help="tokens"),
        "strategy": dict(nargs="+", choices=LISTS, default=list(LISTS), metavar="NAME", help=f"some of: {', '.join(LISTS)}"),
        "points": dict(type=int, metavar="N", help="batches of each strategy, at least 2; default: as CASES has them"),
        "host-gib": dict(type=int, default=HOST_GIB, metavar="N", help="pinned memory of the layers that are timed"),
    })
