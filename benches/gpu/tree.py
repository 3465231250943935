"""Draft trees: verification and compaction beside a copy of the same bytes, in CUDA graphs.

    python benches/gpu/tree.py [--out FILE] [--quick | --goals]

Trees have N nodes with random parents. `verify` is vwd_verify_tree from the target's tokens, `logits` the same from bfloat16 logits of 128256 tokens,
`prepare` vwd_tree_prepare with all outputs. `coupled`, `independent` and `distinct` are the walks that sample, the last two with rows of bfloat16 logits that
children were drawn from, which are near the target's. `compact` moves three rows of every layer of an 8B-shaped model (64 caches of 2 KiB a row); `copy` copies as
many bytes between two buffers by torch. `bytes` are those of the logits; `floor_of_logits` is a copy
that moves as many bytes as the logits have, half of them read. Microseconds of GPU time a call, medians; logits and rows of drafts are in no cache, whatever is as small as
tokens is.
"""

import math

import torch

from timing import run, vanward

LAYERS, PAGE, HEADS, DIM, VOCABULARY = 32, 16, 8, 128, 128256


def trees(batch, nodes, seed):
    """Parents, tokens and the target's tokens of a batch; half of the nodes hold the target's token."""
    random = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[-1] + [int(torch.randint(0, n, (1,), generator=random)) for n in range(1, nodes)]] * batch)
    target = torch.randint(0, 1000, (batch, nodes), generator=random)
    guess = target.gather(1, parents.clamp(min=0))
    tokens = torch.where(torch.rand(batch, nodes, generator=random) < 0.5, guess, guess + 1)
    return [t.int().cuda() for t in (parents, tokens, target)]


def drawn_from(rows, parents, is_distinct):
    """Tokens of nodes, each drawn from the row of its parent."""
    tokens = torch.zeros_like(parents)
    for v in range(parents.shape[1]):
        children = (parents[0] == v).nonzero().flatten()
        if len(children):
            p = rows[:, v].float().softmax(-1)
            tokens[:, children] = torch.multinomial(p, len(children), replacement=not is_distinct).int()
    return tokens


def copies(x, sets):
    """So many tensors with the same contents: what a call reads of one is in no cache after the others."""
    return [x] + [x.clone() for _ in range(sets - 1)]


def empty(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="cuda")


def verify_cases(session, batch, nodes, sets):
    """Name and function(stream, i) that prepares a call with set i of what is large."""
    parents, tokens, target = trees(batch, nodes, nodes)
    outputs = dict(accepted=empty(batch), path=empty(batch, nodes), next_token=empty(batch), committed=empty(batch, nodes))
    common = dict(tokens=tokens, parents=parents, **outputs)
    yield "verify", lambda stream, i: session.prepare_verify_tree(**common, target=target, stream=stream)
    logits = copies(torch.randn(batch, nodes, VOCABULARY, device="cuda", dtype=torch.bfloat16), sets)
    yield "logits", lambda stream, i: session.prepare_verify_tree(**common, logits=logits[i], stream=stream)
    noise = dict(seeds=torch.arange(batch, device="cuda"), positions=torch.full((batch,), 1000, device="cuda"))
    sampled = common | noise
    yield "coupled", lambda stream, i: session.prepare_verify_tree(**sampled, logits=logits[i], walk="coupled", stream=stream)
    rows = copies(logits[0] + 0.5 * torch.randn_like(logits[0]), sets)
    for walk in "independent", "distinct":
        drawn = copies(drawn_from(rows[0], parents, is_distinct=walk == "distinct"), sets)
        each = [sampled | dict(logits=logits[i], draft_rows=rows[i], tokens=drawn[i]) for i in range(sets)]
        yield walk, lambda stream, i: session.prepare_verify_tree(**each[i], walk=walk, stream=stream)
    bases = torch.zeros(batch, dtype=torch.int32, device="cuda")
    form = dict(depths=empty(batch, nodes), positions=empty(batch, nodes), ranks=empty(batch, nodes))
    mask = empty(batch, nodes, -(-nodes // 32), dtype=torch.uint32)
    yield "prepare", lambda stream, i: session.prepare_tree_prepare(parents=parents, bases=bases, mask=mask, **form, stream=stream)


def compact_cases(session, batch, rows=3):
    pages = 4 * batch
    caches = [torch.randn(pages, PAGE, HEADS, DIM, device="cuda").half() for _ in range(2 * LAYERS)]
    compactor = vanward.Compactor(session, caches)
    table = torch.randperm(pages, device="cuda").int().reshape(batch, 4)
    bases = torch.full((batch,), 5, dtype=torch.int32, device="cuda")
    path = torch.tensor([[0] + [2 * n + 2 for n in range(rows)]] * batch, dtype=torch.int32, device="cuda")
    yield "compact", lambda stream, i: compactor.prepare_compact(page_table=table, bases=bases, path=path, stream=stream)
    source = torch.randn(batch * rows * 2 * LAYERS, HEADS * DIM, device="cuda").half()
    target = torch.empty_like(source)
    yield "copy", lambda stream, i: lambda: target.copy_(source)


def measure(session, timer, rows, quick):
    empty_kernel = timer.graph(timer.launch_empty, 1)
    for batch in (1, 8, 32, 64) if quick in (False, "goals") else (1, 32):
        for nodes in (8, 16, 32, 64) if quick in (False, "goals") else (8, 64):
            found, size = {}, batch * nodes * VOCABULARY * 2
            sets = min(20, max(2, math.ceil((128 << 20) / size)))
            for name, prepare in verify_cases(session, batch, nodes, sets):
                found[name] = time_of(timer, prepare, sets)
                if quick == "goals" and nodes == 8 and batch in (1, 64):
                    call = prepare(torch.cuda.current_stream().cuda_stream, 0)
                    rows.put("kernels", batch=batch, nodes=nodes, call=name, timeline=timer.timeline(lambda _: call(), 1))
            form = dict(batch=batch, nodes=nodes, bytes=size, empty=empty_kernel)
            rows.put("tree", **form, floor_of_logits=timer.copy(size), **found)
        found = {name: time_of(timer, prepare, 1) for name, prepare in compact_cases(session, batch)}
        rows.put("compact", batch=batch, **found)


def time_of(timer, prepare, sets):
    """A graph is captured on a stream of its own, so that calls are prepared there."""
    prepared = {}

    def call(i):
        stream = torch.cuda.current_stream().cuda_stream
        if (stream, i) not in prepared:
            prepared[stream, i] = prepare(stream, i)
        prepared[stream, i]()

    return timer.graph(call, sets)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=16 << 20, has_goals=True)
