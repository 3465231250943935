"""Decode steps of an 8B-shaped model whose keys and values lie in host memory, by each strategy of a decoder on a tiered cache.

    python benches/gpu/tiered_decoder.py [--out FILE] [--quick]

The layers are those of layer.py, at 131,072 tokens and a budget of 4096 (1/32 of the context) by AXIS; a layer has slots for the share SHARE of
its blocks. Steps follow each other in one CUDA graph, each with queries of its own, which the layer's attention takes instead of those that its
products give. `resident` is SERIAL on keys and values in device memory, with the same tokens and queries. GPU time of one layer, microseconds, medians;
`mib` and `missed` are what a layer copies in a step, and the share of the named blocks that were not in a slot. SPARDA and ASYNC_TLS attend
lists of their own; VANWARD attends SERIAL's. `coding`: of the cache's blocks. In int4 the cache has as many slots, of a quarter of the bytes; in
int4_decoded slots of 16 bits, which codes are decoded into as they arrive.

Misses are not drawn at random: they come from queries that drift. For each query head, q(t) = ρ·q(t−1) + √(1−ρ²)·noise, made periodic, so that
the last step of a replay leads to the first one of the next; the foreseen query is q cos θ + e sin θ, and e drifts as q does. ρ and θ are fitted before anything is
timed, by the library's own selection and as many least-recently-used slots as are timed, to what a trace showed of attention over 16K
tokens of Gemma-3-270M at the same share of the context, with slots of twice the selection: MISSED of a step's blocks have no slot without
prefetch, and EXPOSED have none after the foreseen list of 1.25 times as many blocks was fetched. `model` has what the fit reached, `moved` the blocks that travel with
prefetch (0.163 in the trace). The token of all steps has one position, so that no block leaves the tail: its copy to a slot, one in 64
steps, is not in the figures.

`dense` is attention over all tokens, of one position and of 9 as a round of 8 drafts is verified, in steps whose rows are dense: whole blocks are
read in host memory. `gb` is what that reads in a second, in 10^9 bytes, and `over_copy` its time as a multiple of a plain copy of as
many bytes from pinned memory.
"""

import math
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
STRATEGIES = {
    "serial": {},
    "async_tls": dict(strategy=Strategy.ASYNC_TLS),
    "sparda": dict(strategy=Strategy.SPARDA, ratio=RATIO),
    "vanward": dict(strategy=Strategy.VANWARD, predict=Predict.FORESEEN, ratio=RATIO),
    "vanward_scores": dict(strategy=Strategy.VANWARD, ratio=RATIO),
}
OWN_LISTS = ("async_tls", "sparda")
CODINGS = {"exact": {}, "int4": dict(coding="int4"), "int4_decoded": dict(coding="int4", slot_coding="decoded")}
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


def misses(lists, slots, ahead=None):
    """Shares of the selected blocks that have no slot when they are attended, and that travel, with so many `slots` for each KV head."""
    exposed = moved = total = 0
    for head in range(len(lists[0])):
        cached = OrderedDict()

        def name(blocks):
            missed = 0
            for block in blocks:
                missed += block not in cached
                cached[block] = True
                cached.move_to_end(block)
            while len(cached) > slots:
                cached.popitem(last=False)
            return missed

        for turn in range(2):  # what the first steps miss is not counted
            for t, of_heads in enumerate(lists):
                early = name(ahead[t][head]) if ahead else 0
                late = name(of_heads[head])
                if turn:
                    exposed, moved, total = exposed + late, moved + early + late, total + len(of_heads[head])
    return exposed / total, moved / total


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


def measure(session, timer, rows, quick):
    weights = [Weights() for _ in range(LAYERS)]
    trace = dict(k=BUDGET // BLOCK, slots=int(SHARE * CONTEXT // BLOCK), missed=MISSED, exposed=EXPOSED)
    fitted, length = None, CONTEXT - BLOCK // 2
    for batch in (1,) if quick else (1, 2, 4):
        sequences = Pages(session, batch, CONTEXT, LAYERS)
        fitted = fitted or fit(session, sequences, rows, **trace)
        queries = Queries(batch, sequences.layers, *fitted)
        slots = int(SHARE * batch * KV_HEADS * sequences.blocks)
        row = dict(batch=batch, context=CONTEXT, budget=BUDGET, layers=sequences.layers, share=SHARE)
        with decoder_of(session, sequences, BUDGET // BLOCK, positions=9) as of_pages:
            resident = Drifting(of_pages, sequences, weights, queries, length)
            resident.step(begin=torch.zeros_like(resident.lens))
            resident.run_all()
            row["resident"] = resident.time(timer)
            for coding, options in CODINGS.items():
                with vanward.KvCache(
                    session, layers=sequences.layers, kv_heads=KV_HEADS, block_size=BLOCK, key_dim=DIM, value_dim=DIM, dtype="bfloat16",
                    max_sequences=batch, max_blocks=sequences.blocks, host_blocks=batch * sequences.blocks, slots=slots, **options,
                ) as cache:
                    strategies(session, timer, rows, cache, coding, resident, of_pages, dict(row, coding=coding))
        del sequences, queries, resident
        torch.cuda.empty_cache()


def strategies(session, timer, rows, cache, coding, resident, of_pages, row):
    """Each strategy on a cache, against steps that are resident."""
    sequences, length = resident.sequences, CONTEXT - BLOCK // 2
    for name, policy in STRATEGIES.items():
        with tiered_decoder(session, cache, sequences, BUDGET // BLOCK, **policy) as decoder:
            numbers = write(cache, decoder, sequences, length)
            steps = Drifting(decoder, sequences, resident.weights, resident.queries, length, cache, numbers)
            steps.run_all()
            if name not in OWN_LISTS:
                check(name, steps, resident, coding)
            row[name], mib, missed = steps.count(timer)
            del steps
            if name == "serial":
                dense(timer, rows, decoder, cache, sequences, numbers, of_pages, length, coding)
        rows.put("strategy", coding=coding, batch=sequences.batch, strategy=name, layer=row[name], over_resident=row[name] / row["resident"],
                 serial_over_it=row["serial"] / row[name], mib=mib, missed=missed)
        for n in numbers.tolist():
            cache.free(n, stream=stream())
        torch.cuda.synchronize()
    rows.put("layer", **row)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20)
