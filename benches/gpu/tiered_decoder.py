"""Decode steps of an 8B-shaped model whose keys and values lie in host memory, by each strategy of a decoder on a tiered cache.

    python benches/gpu/tiered_decoder.py [--out FILE] [--quick] [--batch N ...] [--kv-heads N ...] [--trace NAME ...] [--coding NAME ...]
                                         [--strategy NAME ...] [--dense N ...] [--replays N]

The layers are those of layer.py, with 8 or 2 KV heads for their 32 query heads (2 as in MiniCPM4.1), at 131,072 tokens and a budget of 4096 (1/32 of the
context) by AXIS; a layer has slots for the share SHARE of its blocks. Steps follow each other in one CUDA graph, each with queries of its own, which the
layer's attention takes instead of those that its products give. `resident` is SERIAL on keys and values in device memory, with the same tokens and queries.
GPU time of one layer, microseconds, medians; `mib` and `missed` are what a layer copies in a step, and the share of the named blocks that were not in a
slot. SPARDA and ASYNC_TLS attend lists of their own; VANWARD attends SERIAL's. `coding`: of the cache's blocks. In int4 the cache has as many slots, of a
quarter of the bytes; in int4_decoded slots of 16 bits, which codes are decoded into as they arrive.

Misses are not drawn at random: they come from queries that drift. For each query head, q(t) = ρ·q(t−1) + √(1−ρ²)·noise, made periodic, so that
the last step of a replay leads to the first one of the next; the foreseen query is q cos θ + e sin θ, and e drifts as q does. ρ and θ are fitted before anything is
timed, by the library's own selection and as many least-recently-used slots as are timed, to two figures of real text: the share of a step's blocks that have no slot
without prefetch, and that of those which have none after the foreseen list of 1.25 times as many blocks was fetched. A model's lists cannot be replayed: a decoder
selects by queries, and no queries over other keys give a list of another model. `trace` says whose figures they are:

- gemma: MISSED and EXPOSED, of Gemma-3-270M over 16K tokens, 1/32 selected, with slots of twice the selection. The trace is not in the repository.
- smollm2: of the lists in benches/traces, of SmolLM2-135M over 6,000 tokens of program code in blocks of 16, 1/38 selected, counted by this script with slots
  for as large a share of the blocks as is timed: the row `trace`, whose `moved` are the blocks that travel with prefetch.

`model` has what the fit reached (`moved` was 0.163 in Gemma's trace). The token of all steps has one position, so that no block leaves the tail: its copy to a
slot, one in 64 steps, is not in the figures.

`dense` (--dense: of which batches) is attention over all tokens of 8 KV heads, of one position and of 9 as a round of 8 drafts is verified, in steps whose
rows are dense: whole blocks are read in host memory. `gb` is what that reads in a second, in 10^9 bytes, and `over_copy` its time as a multiple of a plain copy of as
many bytes from pinned memory.

Of the cases in CASES those are timed whose numbers, names and codings the options have; without options all. --quick is --batch 1. Every cache has the host memory
of the largest one, which the session pins once.
"""

import math
import pathlib
from collections import OrderedDict

import torch

from decoder import Pages, Steps, decoder_of
from layer import BLOCK, DIM, HEADS, INIT, KV_HEADS, LOCAL, Weights, random
from timing import run, vanward
from vanward import DecoderMode, DecoderPolicy, Predict, SelectMethod, Strategy

CONTEXT, BUDGET = 128 << 10, 4096
LAYERS, STEPS, REPLAYS = 4, 96, 7
SHARE = 0.12
RATIO = 1.25
MISSED, EXPOSED = 0.090, 0.031
SMOLLM2 = pathlib.Path(__file__).parents[1] / "traces" / "smollm2-135m-code.txt"
COLD = 32  # steps of a trace that fill its slots, and are not counted
STRATEGIES = {
    "serial": {},
    "async_tls": dict(strategy=Strategy.ASYNC_TLS),
    "sparda": dict(strategy=Strategy.SPARDA, ratio=RATIO),
    "vanward": dict(strategy=Strategy.VANWARD, predict=Predict.FORESEEN, ratio=RATIO),
    "vanward_scores": dict(strategy=Strategy.VANWARD, ratio=RATIO),
}
OWN_LISTS = ("async_tls", "sparda")
CODINGS = {"exact": {}, "int4": dict(coding="int4"), "int4_decoded": dict(coding="int4", slot_coding="decoded")}
CASES = [  # KV heads, batch, the model whose misses they are, codings
    (8, 1, "gemma", CODINGS),
    (8, 1, "smollm2", ("exact", "int4")),
    (2, 1, "gemma", ("exact",)),
    (8, 2, "gemma", CODINGS),
    (8, 4, "gemma", CODINGS),
    (2, 4, "gemma", ("exact",)),
    (8, 8, "gemma", ("exact", "int4")),
]
HOST_RUNS = {"exact": 2 * BLOCK * DIM * 2, "int4": BLOCK * DIM + 2 * BLOCK + 2 * DIM, "int4_decoded": BLOCK * DIM + 2 * BLOCK + 2 * DIM}  # bytes
OPTIONS = {
    "batch": dict(nargs="+", type=int, default=sorted({case[1] for case in CASES}), metavar="N", help="sequences"),
    "kv-heads": dict(nargs="+", type=int, default=[8, 2], metavar="N"),
    "trace": dict(nargs="+", choices=("gemma", "smollm2"), default=["gemma", "smollm2"], help="whose misses"),
    "coding": dict(nargs="+", choices=CODINGS, default=list(CODINGS), metavar="NAME", help=f"some of: {', '.join(CODINGS)}"),
    "strategy": dict(nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="NAME", help=f"SERIAL, and some of: {', '.join(STRATEGIES)}"),
    "dense": dict(nargs="*", type=int, default=[1, 2, 4], metavar="N", help="batches whose dense rows are timed, of 8 KV heads and gemma's misses"),
    "replays": dict(type=int, default=REPLAYS, metavar="N", help="replays of each graph, of which the median is taken"),
}
# How far results may be from those of exact keys and values in device memory, relative in norm: rounding, or what four bits cost normals.
ERRORS = {"exact": 3e-2, "int4": 0.3, "int4_decoded": 0.3}


def stream():
    return torch.cuda.current_stream().cuda_stream


# --- queries that drift -----------------------------------------------------------------------------------------------


def drift(noise, rho):
    """Of independent normals [STEPS, …] a periodic process whose neighbours have the correlation `rho`."""
    turn = torch.exp(-2j * math.pi * torch.arange(len(noise), device=noise.device) / len(noise))
    gain = 1 / (1 - rho * turn)
    gain /= (gain.abs() ** 2).mean().sqrt()
    return torch.fft.ifft(torch.fft.fft(noise, dim=0) * gain.view(-1, *[1] * (noise.ndim - 1)), dim=0).real


def foreseen(queries, noise, angle):
    return queries * math.cos(angle) + noise * math.sin(angle)


class Selections:
    """The blocks that the library selects of one layer and sequence."""

    def __init__(self, session, sequences):
        self.session, self.kv_heads, self.lens = session, sequences.kv_heads, sequences.lens[:1]
        table = sequences.table[:1]
        self.index = vanward.Index.axis(sequences.keys[0], batch=1, tokens=sequences.context, block_size=BLOCK)
        session.index_update(index=self.index, k=sequences.keys[0], seq_lens=self.lens, page_table=table,
                             begin=torch.zeros_like(self.lens), stream=stream())

    def of(self, queries, k, local):
        """Sets of block numbers, for each of `queries` [STEPS, HEADS, DIM] and KV head."""
        lists = []
        for q in queries.bfloat16():
            ids = torch.empty(1, self.kv_heads, k, dtype=torch.int32, device="cuda")
            counts = torch.empty(1, self.kv_heads, dtype=torch.int32, device="cuda")
            self.session.select_blocks(method=SelectMethod.AXIS, block_size=BLOCK, k=k, init_blocks=INIT, local_blocks=local, index=self.index,
                                       q=q[None], seq_lens=self.lens, selected=vanward.BlockList(ids, counts), stream=stream())
            lists.append(ids)
        return torch.cat(lists).tolist()


def misses(lists, slots, ahead=None, cold=None):
    """
    Shares of the selected blocks that have no slot when they are attended, and that travel, with so many `slots` for each KV head. The lists follow each
    other in a circle, or, with `cold`, once, and the first steps are not counted. The newest two blocks are in a tail, and get slots when they leave it.
    """
    order = list(range(len(lists))) * (2 if cold is None else 1)
    first = len(lists) if cold is None else cold
    exposed = moved = total = 0
    for head in range(len(lists[0])):
        cached = OrderedDict()

        def name(blocks, newest):
            missed = 0
            for block in blocks:
                missed += block not in cached and block < newest - 1
                cached[block] = True
                cached.move_to_end(block)
            while len(cached) > slots:
                cached.popitem(last=False)
            return missed

        for n, t in enumerate(order):
            newest = max(lists[t][head])
            early = name(ahead[t][head], newest) if ahead else 0
            late = name(lists[t][head], newest)
            if n >= first:
                exposed, moved, total = exposed + late, moved + early + late, total + len(lists[t][head])
    return exposed / total, moved / total


def traced(path, share):
    """What a file of `vanward-engine --trace` misses, mean of its layers, with slots for so large a share of the blocks: with and without the foreseen lists."""
    text = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    steps = [step.splitlines() for step in "\n".join(text).strip().split("\n\n")]
    numbers = lambda part: [int(word) for word in part.split()]  # noqa: E731
    layers = {}  # of each: steps of [selected, foreseen], both by head
    for step in steps:
        of_step = {}
        for line in step:
            about, lists = line.split(":")
            for found, part in zip(of_step.setdefault(about.split()[0], ([], [])), lists.split("|")):
                found.append(numbers(part))
        for layer, lists in of_step.items():
            layers.setdefault(layer, []).append(lists)
    selected, ahead = ([[lists[n] for lists in of_layer] for of_layer in layers.values()] for n in range(2))
    blocks = max(max(head) for of_head in selected[0] for head in of_head) + 1
    slots = int(share * blocks)
    mean = lambda found: [sum(values) / len(layers) for values in zip(*found)]  # noqa: E731
    missed, _ = mean(misses(lists, slots, cold=COLD) for lists in selected)
    exposed, moved = mean(misses(lists, slots, early, cold=COLD) for lists, early in zip(selected, ahead))
    return dict(k=len(selected[0][0][0]), blocks=blocks, slots=slots, missed=missed, exposed=exposed, moved=moved)


def bisect(low, high, wanted, share):
    """Where `share`, which rises, is `wanted`."""
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < wanted else (low, middle)
    return (low + high) / 2


def fit(session, sequences, rows, k, slots, missed, exposed, **about):
    """The drift, and the angle of foreseen queries, with which lists of k blocks and so many `slots` of a KV head come near both shares."""
    selections = Selections(session, sequences)
    noise, other = (torch.randn(STEPS, HEADS, DIM, device="cuda") for _ in range(2))
    shares = lambda x: misses(selections.of(drift(noise, 1 - x), k, LOCAL), slots)  # noqa: E731
    change = bisect(0.0, 0.5, missed, lambda x: shares(x)[0])
    queries, error = drift(noise, 1 - change), drift(other, 1 - change)
    lists = selections.of(queries, k, LOCAL)

    def with_prefetch(angle):
        ahead = selections.of(foreseen(queries, error, angle), math.ceil(RATIO * k), LOCAL)
        return misses(lists, slots, ahead)

    angle = bisect(0.0, 1.5, exposed, lambda x: with_prefetch(x)[0])
    exposed, moved = with_prefetch(angle)
    rows.put("model", **about, rho=1 - change, cosine=math.cos(angle), missed=misses(lists, slots)[0], exposed=exposed, moved=moved)
    return 1 - change, angle


# --- steps ------------------------------------------------------------------------------------------------------------


class Queries:
    """Of each step and layer: queries, and those that a layer ahead foresees."""

    def __init__(self, batch, layers, rho, angle):
        shape = (STEPS, layers, batch, HEADS, DIM)
        true = drift(torch.randn(shape, device="cuda"), rho)
        # Fourier transforms leave steps side by side in memory; kernels want channels so.
        self.ahead = foreseen(true, drift(torch.randn(shape, device="cuda"), rho), angle).bfloat16().contiguous()
        self.true = true.bfloat16().contiguous()


class Drifting(Steps):
    """Steps, one after the other, on the engine's pages or on a cache."""

    def __init__(self, decoder, sequences, weights, queries, length, cache=None, numbers=None, mode=DecoderMode.SPARSE):
        super().__init__(decoder, sequences, weights, length=length, mode=mode)
        self.queries, self.cache, self.numbers = queries, cache, numbers

    def enter(self, begin):
        on = dict(sequences=self.numbers) if self.cache else dict(page_table=self.sequences.table)
        self.decoder.begin(mode=self.mode, seq_lens=self.lens, begin=begin, shortest=self.sequences.context - BLOCK, stream=stream(), **on)

    def one(self, n, begin=None):
        """Layer n % layers of step n // layers."""
        self.t, i = divmod(n, self.sequences.layers)
        if i == 0:
            self.enter(begin)
            self.foresee(0)
        self.foresee(i + 1)
        self.layer(i, self.attend)

    def foresee(self, i):
        if self.cache and i < self.sequences.layers:
            t = self.t
            self.run("foresee", (t, i), lambda: self.decoder.prepare_foresee(layer=i, q=self.queries.ahead[t, i, : self.rows]))

    def attend(self, i):
        s, t, row = self.sequences, self.t, lambda x: x.view(-1, *x.shape[-2:])
        pages = {} if self.cache else dict(k=s.keys[i], v=s.values[i])
        self.run("attend", (t, i), lambda: self.decoder.prepare_attend(
            layer=i, new_k=self.k, new_v=self.v, q=self.queries.true[t, i, : self.rows], out=row(self.out), **pages))

    def wait(self):
        """A graph does not know of copies that were begun outside of it."""
        for i in range(self.sequences.layers if self.cache else 0):
            self.cache.wait(i, stream=stream())

    def step(self, t=0, begin=None):
        for i in range(self.sequences.layers):
            self.one(t * self.sequences.layers + i, begin)

    def run_all(self):
        """Every step once: the next ones find what these leave."""
        self.step(begin=self.lens - 2)
        for t in range(STEPS):
            self.step(t)
        torch.cuda.synchronize()

    def time(self, timer, replays=REPLAYS):
        calls = STEPS * self.sequences.layers
        return timer.graph(self.one, calls, replays=replays, before=self.wait, calls=calls)

    def count(self, timer, replays=REPLAYS):
        """The time of a layer, the MiB that it copies in a step, and the share of the named blocks that had no slot."""
        before = self.cache.info()
        took = self.time(timer, replays)
        after = self.cache.info()
        calls = replays * STEPS * self.sequences.layers + 3  # the timer's warm-up
        missed, hit = after.misses - before.misses, after.hits - before.hits
        return took, (after.bytes_fetched - before.bytes_fetched) / calls / (1 << 20), missed / (missed + hit)


def write(cache, decoder, sequences, length):
    """The sequences' tokens, a block at a time, to the cache and to the decoder's summaries. Returns the sequences' numbers in the cache."""
    added = [cache.add(stream=stream()) for _ in range(sequences.batch)]
    for n in added:
        cache.extend(n, sequences.context, stream=stream())
    numbers = torch.tensor(added, dtype=torch.int32, device="cuda")
    decoder.reset(stream=stream())
    rows = [torch.empty(sequences.batch, BLOCK, sequences.kv_heads, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    calls = [decoder.prepare_attend(layer=i, new_k=rows[0], new_v=rows[1]) for i in range(sequences.layers)]
    lens, counts = (torch.empty(sequences.batch, dtype=torch.int32, device="cuda") for _ in range(2))
    for block in range(math.ceil(length / BLOCK)):
        lens.fill_(min(length, (block + 1) * BLOCK))
        counts.fill_(min(BLOCK, length - block * BLOCK))
        decoder.begin(positions=BLOCK, seq_lens=lens, q_lens=counts, sequences=numbers, stream=stream())
        pages = sequences.table[:, block]
        for i, call in enumerate(calls):
            for to, of in zip(rows, (sequences.keys[i], sequences.values[i])):
                torch.index_select(of, 0, pages, out=to)
            call(stream())
    torch.cuda.synchronize()
    return numbers


def tiered_decoder(session, cache, sequences, k, **policy):
    return vanward.Decoder(
        session, cache=cache, dtype="bfloat16", layers=sequences.layers, max_rows=sequences.batch, max_positions=BLOCK, query_heads=HEADS,
        kv_heads=sequences.kv_heads, key_dim=DIM, value_dim=DIM, block_size=BLOCK,
        policy=DecoderPolicy(method=SelectMethod.AXIS, k=k, init_blocks=INIT, local_blocks=LOCAL, **policy))


def check(name, steps, resident, coding):
    """A step on the cache gives what the same one gives where all is resident."""
    found = []
    for side in (resident, steps):
        side.first.copy_(steps.first)
        side.step(1)
        torch.cuda.synchronize()
        found.append((side.x.float(), side.out.float()))
    for got, want in zip(found[1], found[0]):
        error = ((got - want).norm() / want.norm()).item()
        assert error < ERRORS[coding], f"{name}, {coding}: error {error:.1e}"


def bus(timer):
    """10^9 bytes a second of a plain copy from pinned memory."""
    pinned, there = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return len(pinned) / timer.queued(lambda _: there.copy_(pinned, non_blocking=True), 1, repeats=5) / 1e3


def dense(timer, rows, decoder, cache, sequences, numbers, of_pages, length, coding):
    batch = sequences.batch
    size = batch * (length // BLOCK - 1) * BLOCK * KV_HEADS * (2 * DIM * 2 if coding == "exact" else DIM + 2 + 2 * DIM / BLOCK)
    copy = size / bus(timer) / 1e3
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    for positions in (1, 9):
        q, k, v = (random(batch, positions, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        outs = [torch.empty_like(q) for _ in range(2)]
        step = dict(mode=DecoderMode.DENSE, positions=positions, seq_lens=lens)
        decoder.begin(**step, sequences=numbers, stream=stream())
        of_pages.begin(**step, page_table=sequences.table, stream=stream())
        calls = [decoder.prepare_attend(layer=i, new_k=k, new_v=v, q=q, out=outs[0]) for i in range(sequences.layers)]
        for i in range(sequences.layers):
            calls[i](stream())
            of_pages.prepare_attend(layer=i, new_k=k, new_v=v, q=q, out=outs[1], k=sequences.keys[i], v=sequences.values[i])(stream())
            torch.cuda.synchronize()
            error = ((outs[0].float() - outs[1].float()).norm() / outs[1].float().norm()).item()
            assert error < ERRORS[coding], f"dense, {coding}, {positions} positions, layer {i}: error {error:.1e}"
        wait = lambda: [cache.wait(i, stream=stream()) for i in range(sequences.layers)]  # noqa: E731
        took = timer.graph(lambda n: calls[n](stream()), sequences.layers, replays=5, before=wait, calls=sequences.layers)
        rows.put("dense", coding=coding, batch=batch, context=CONTEXT, positions=positions, attend=took, copy=copy, over_copy=took / copy, gb=size / took / 1e3)


def measure(session, timer, rows, options):
    batches = [1] if options.quick else options.batch
    cases = [(kv_heads, batch, trace, [coding for coding in codings if coding in options.coding]) for kv_heads, batch, trace, codings in CASES
             if kv_heads in options.kv_heads and batch in batches and trace in options.trace and not set(codings).isdisjoint(options.coding)]
    # Asked for by every layer of every cache, so that it is pinned once.
    host = max((batch * CONTEXT // BLOCK * kv_heads * HOST_RUNS[coding] for kv_heads, batch, _, codings in cases for coding in codings), default=0)
    smollm2 = traced(SMOLLM2, SHARE)
    rows.put("trace", **smollm2)
    traces = {"gemma": (MISSED, EXPOSED), "smollm2": (smollm2["missed"], smollm2["exposed"])}
    length = CONTEXT - BLOCK // 2
    weights = {kv_heads: [Weights(kv_heads) for _ in range(LAYERS)] for kv_heads in (8, 2)}
    fitted = {}
    for kv_heads, batch, trace, codings in cases:
        sequences, about = Pages(session, batch, CONTEXT, LAYERS, kv_heads), dict(trace=trace, kv_heads=kv_heads)
        if (trace, kv_heads) not in fitted:
            fitted[trace, kv_heads] = fit(session, sequences, rows, BUDGET // BLOCK, int(SHARE * sequences.blocks), *traces[trace], **about)
        queries = Queries(batch, sequences.layers, *fitted[trace, kv_heads])
        slots = int(SHARE * batch * kv_heads * sequences.blocks)
        row = dict(**about, batch=batch, context=CONTEXT, budget=BUDGET, layers=sequences.layers, share=SHARE)
        with decoder_of(session, sequences, BUDGET // BLOCK, positions=9) as of_pages:
            resident = Drifting(of_pages, sequences, weights[kv_heads], queries, length)
            resident.step(begin=torch.zeros_like(resident.lens))
            resident.run_all()
            row["resident"] = resident.time(timer, options.replays)
            for coding in codings:
                with vanward.KvCache(
                    session, layers=sequences.layers, kv_heads=kv_heads, block_size=BLOCK, key_dim=DIM, value_dim=DIM, dtype="bfloat16",
                    max_sequences=batch, max_blocks=sequences.blocks, host_blocks=host // (kv_heads * HOST_RUNS[coding]), slots=slots, **CODINGS[coding],
                ) as cache:
                    strategies(session, timer, rows, options, cache, coding, resident, of_pages, dict(row, coding=coding))
        del sequences, queries, resident
        torch.cuda.empty_cache()


def strategies(session, timer, rows, options, cache, coding, resident, of_pages, row):
    """Each strategy on a cache, against steps that are resident."""
    sequences, length = resident.sequences, CONTEXT - BLOCK // 2
    for name, policy in STRATEGIES.items():
        if name != "serial" and name not in options.strategy:
            continue
        with tiered_decoder(session, cache, sequences, BUDGET // BLOCK, **policy) as decoder:
            numbers = write(cache, decoder, sequences, length)
            steps = Drifting(decoder, sequences, resident.weights, resident.queries, length, cache, numbers)
            steps.run_all()
            if name not in OWN_LISTS:
                check(name, steps, resident, coding)
            row[name], mib, missed = steps.count(timer, options.replays)
            del steps
            if name == "serial" and (row["kv_heads"], row["trace"]) == (KV_HEADS, "gemma") and sequences.batch in options.dense:
                dense(timer, rows, decoder, cache, sequences, numbers, of_pages, length, coding)
        rows.put("strategy", trace=row["trace"], kv_heads=sequences.kv_heads, coding=coding, batch=sequences.batch, strategy=name, layer=row[name], over_resident=row[name] / row["resident"],
                 serial_over_it=row["serial"] / row[name], mib=mib, missed=missed)
        for n in numbers.tolist():
            cache.free(n, stream=stream())
        torch.cuda.synchronize()
    rows.put("layer", **row)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20, choices=OPTIONS)
