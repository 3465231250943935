"""What a layer of a decode step does when, by each strategy of a decoder on a tiered cache: its stages, by torch's profiler.

    python benches/gpu/stages.py [--out FILE] [--quick] [--batch N ...] [--strategy NAME ...] [--steps N] [--replays N]

The steps are those of tiered_decoder.py, of exact blocks: an 8B shape, 131,072 tokens, a budget of 4096, slots for 12 % of the blocks, queries that drift
so that as many blocks are missed as in a trace. They are captured in a CUDA graph, and the profiler records the kernels of a replay, of the first --steps
steps alone where that is given: the others run ahead of it. `resident` has all keys and values in device memory. --quick is --batch 1.

`stage` rows say, in microseconds from the layer's beginning, when the first kernel of a stage starts and the last one ends; `busy` is how long its kernels
run. They are medians of the layers whose stages are those of most layers (`same` of `of`, in `layer`), without the first and the last layer of each step. `part`
counts the times that a stage occurs. `ahead` is done for the next layer (SPARDA, VANWARD by FORESEEN), or for the same layer of the next step. `layer` rows
have the layer's time in the trace, from one beginning to the next; `graph`, a layer's share of a graph of all steps and layers without the profiler; and
`path`, the trace's time from the start of the append to the end of attention, or of the repair.

The profiler makes kernels longer, and lets none start before the one ahead of it on its stream has ended, as some do otherwise. An empty kernel marks where
a layer begins. So stages are there to be compared with each other; what a step takes, tiered_decoder.py says.
"""

import statistics
from collections import Counter

import torch

from decoder import Pages, decoder_of
from layer import BLOCK, DIM, KV_HEADS, Weights
from tiered_decoder import BUDGET, CONTEXT, EXPOSED, LAYERS, MISSED, SHARE, STEPS, STRATEGIES, Drifting, Queries, fit, stream, tiered_decoder, write
from timing import run, vanward

MARK = "empty"  # Timer.launch_empty's kernel
STAGES = {  # the beginning of a kernel's name: its stage
    "cache_append": "append",
    "cache_spill": "append",
    "decoder_append": "append",
    "cache_write_back": "write back",
    "cache_fetch": "copies",
    "cache_": "find, give",
    "index_": "summaries",
    "select_": "selection",
    "decoder_take": "selection",
    "decoder_complete": "selection",
    "decoder_remember": "selection",
    "decoder_recall": "recall, predict",
    "predictor_update": "remember scores",
    "predictor_": "recall, predict",
    "attention_": "attention",
    "join_": "attention",
    "merge_": "attention",
    "repair_": "repair",
}
BEFORE, AFTER = "projections", "output, MLP"  # all else, before the append and after it


def stage_of(name):
    return next((stage for begin, stage in STAGES.items() if name.startswith(begin)), None)


def parts_of(layer):
    """
    The stages of a layer's kernels, which are (start, end, name) in the order of their starts: {(stage, ahead, part): kernels}.

    A list that is made ahead begins with decoder_take, decoder_remember or predictor_update. The kernels that then give it slots run once for it; where
    they run again they are for a list of the layer's own. Blocks of a list made ahead are copied after those of the layer's own, whose copy is the first
    one after the kernels that give it slots.
    """
    found, ahead, is_foreseeing, has_appended, to_copy = {}, set(), False, False, False
    for start, end, name in layer:
        stage = stage_of(name)
        is_ahead = False
        if stage is None:
            stage = AFTER if has_appended else BEFORE
            found.setdefault((stage, False, 1), []).append((start, end, name))
            continue
        has_appended |= stage == "append"
        if name == "decoder_take":
            is_foreseeing = True
        if stage == "selection":
            is_ahead = is_foreseeing
        elif name.startswith("predictor_predict"):
            is_ahead = "update" in ahead
        elif stage == "find, give" and "list" in ahead and name not in ahead:
            is_ahead = True
            ahead.add(name)
        elif stage == "find, give":
            to_copy = True
        elif stage == "copies":
            is_ahead = "list" in ahead and not to_copy
            to_copy = False
        if name == "decoder_complete":
            is_foreseeing = False
        if name in ("decoder_complete", "decoder_remember"):
            ahead.add("list")
        if name == "predictor_update":
            ahead.update(("list", "update"))
        part = 1
        while any(name == other for _, _, other in found.get((stage, is_ahead, part), [])):
            part += 1
        found.setdefault((stage, is_ahead, part), []).append((start, end, name))
    return found


def layers_of(events):
    """The kernels of each layer, their times from the beginning of the mark ahead of them."""
    layers = []
    for start, end, name in sorted(events):
        if name == MARK:
            layers.append([])
            begin = start
        elif layers:
            layers[-1].append((start - begin, end - begin, name))
    return layers


def stages(events, per_step):
    """Rows of the stages of the layers in the middle of a step, how many of these layers have them, and of how many."""
    begins = sorted(start for start, _, name in events if name == MARK)
    assert begins, "the profiler recorded no kernels of the graph"
    middle = [(n, parts_of(layer)) for n, layer in enumerate(layers_of(events)) if 0 < n % per_step < per_step - 1]
    kinds = Counter(tuple(sorted(parts)) for _, parts in middle)
    common, count = kinds.most_common(1)[0]
    same = [(n, parts) for n, parts in middle if tuple(sorted(parts)) == common]
    median = lambda key, of: statistics.median(of(parts[key]) for _, parts in same)  # noqa: E731
    rows = []
    for key in common:
        stage, ahead, part = key
        names = " ".join(dict.fromkeys(name for _, _, name in same[0][1][key])) if stage not in (BEFORE, AFTER) else "torch"
        rows.append(dict(stage=stage, ahead=ahead, part=part, start=median(key, lambda kernels: kernels[0][0]),
                         end=median(key, lambda kernels: max(end for _, end, _ in kernels)),
                         busy=median(key, lambda kernels: sum(end - start for start, end, _ in kernels)), kernels=names))
    rows.sort(key=lambda row: row["start"])
    last = lambda parts: max(end for key, kernels in parts.items() if key[0] in ("attention", "repair") for _, end, _ in kernels)  # noqa: E731
    first = lambda parts: min(start for key, kernels in parts.items() if key[0] == "append" for start, _, _ in kernels)  # noqa: E731
    return rows, dict(trace=statistics.median(begins[n + 1] - begins[n] for n, _ in same),
                      path=statistics.median(last(parts) - first(parts) for _, parts in same), same=count, of=len(middle))


def trace(timer, steps, count):
    """Kernels (start, end, name) of the first `count` steps in a graph, in microseconds, by torch's profiler."""

    def one(n):
        timer.launch_empty()
        steps.one(n)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for n in range(3):
            one(n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(count * steps.sequences.layers):
            one(n)

    def come_round():
        """What is resident is what the steps before the first one leave."""
        for t in range(count, STEPS):
            steps.step(t)
        steps.wait()
        torch.cuda.synchronize()

    def replay():
        graph.replay()
        torch.cuda.synchronize()

    replay()
    come_round()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
    on_device = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return [(e.time_range.start, e.time_range.end, e.name) for e in on_device]


class Case:
    """A batch, resident or on a cache, by all strategies."""

    def __init__(self, session, timer, weights, batch, host_blocks, strategies, sequences, queries):
        self.session, self.timer, self.weights, self.batch, self.host_blocks, self.strategies = session, timer, weights, batch, host_blocks, strategies
        self.sequences, self.queries, self.length = sequences, queries, CONTEXT - BLOCK // 2

    def each(self, measure):
        """measure(name, steps) of each strategy, when its steps have run once."""
        with decoder_of(self.session, self.sequences, BUDGET // BLOCK) as decoder:
            steps = Drifting(decoder, self.sequences, self.weights, self.queries, self.length)
            steps.step(begin=torch.zeros_like(steps.lens))
            steps.run_all()
            measure("resident", steps)
            del steps
        blocks = self.sequences.blocks
        with vanward.KvCache(
            self.session, layers=self.sequences.layers, kv_heads=KV_HEADS, block_size=BLOCK, key_dim=DIM, value_dim=DIM, dtype="bfloat16",
            max_sequences=self.batch, max_blocks=blocks, host_blocks=self.host_blocks, slots=int(SHARE * self.batch * KV_HEADS * blocks),
        ) as cache:
            for name, policy in self.strategies.items():
                with tiered_decoder(self.session, cache, self.sequences, BUDGET // BLOCK, **policy) as decoder:
                    numbers = write(cache, decoder, self.sequences, self.length)
                    steps = Drifting(decoder, self.sequences, self.weights, self.queries, self.length, cache, numbers)
                    steps.run_all()
                    measure(name, steps)
                    torch.cuda.synchronize()
                    del steps
                for n in numbers.tolist():
                    cache.free(n, stream=stream())
                torch.cuda.synchronize()


def measure(session, timer, rows, options):
    batches, strategies = [1] if options.quick else options.batch, {name: STRATEGIES[name] for name in STRATEGIES if name in options.strategy}
    weights = [Weights() for _ in range(LAYERS)]
    traced = dict(k=BUDGET // BLOCK, slots=int(SHARE * CONTEXT // BLOCK), missed=MISSED, exposed=EXPOSED)
    fitted, graphs = None, {}

    def put(batch, name, steps):
        about = dict(batch=batch, strategy=name)
        of_stages, of_layer = stages(trace(timer, steps, options.steps), steps.sequences.layers)
        for row in of_stages:
            rows.put("stage", **about, **row)
        rows.put("layer", **about, graph=graphs[batch, name], **of_layer)

    def time(batch, name, steps):
        graphs[batch, name] = steps.time(timer, options.replays)

    # All is timed before anything is traced: what the profiler leaves behind might cost time.
    for of in (time, put):
        for batch in batches:
            sequences = Pages(session, batch, CONTEXT, LAYERS)
            assert sequences.layers == LAYERS, "too little device memory"
            fitted = fitted or fit(session, sequences, rows, **traced)
            queries = Queries(batch, LAYERS, *fitted)
            # All ask for the same host memory, which is pinned once.
            host_blocks = max(batches) * sequences.blocks
            Case(session, timer, weights, batch, host_blocks, strategies, sequences, queries).each(lambda name, steps: of(batch, name, steps))  # noqa: B023
            del sequences, queries
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20, choices={
        "batch": dict(nargs="+", type=int, default=[1, 4], metavar="N", help="sequences"),
        "strategy": dict(nargs="*", choices=STRATEGIES, default=list(STRATEGIES), metavar="NAME", help=f"some of: {', '.join(STRATEGIES)}"),
        "steps": dict(type=int, default=STEPS, metavar="N", help="steps that are traced"),
        "replays": dict(type=int, default=3, metavar="N", help="replays of each graph without the profiler, of which the median is taken"),
    })
