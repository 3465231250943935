"""Attention over selected blocks, and its repair, beside torch, in one process.

    python benches/gpu/attention.py [--out FILE] [--quick] [--only PART ...]

32 query heads on 8 KV heads of 128 channels, bfloat16, pages and blocks of 64 tokens, a list for each KV head. Every result is
compared with torch's in float32 before it is timed. `graph` is GPU time, from calls in a CUDA graph; `event` is one call between
two CUDA events, the host's time in it. `copy` is the time in which the device copies as many bytes as are attended to, half of them
read; `gather_read` that of a kernel that reads them by the same lists and joins partial results, and computes nothing, and
`gather_read_of_9` the same with the results of nine positions. torch gathers the listed blocks and calls scaled_dot_product_attention;
dense, it calls that alone. `state` and `partials` keep the state of a row, or of each block. `among` is what the call adds to a graph
in which a read that fills the cache goes before each, as a layer's weights do in an engine. `forms` are four query positions over a
shared list, FP8 keys and values, and lists of single tokens, beside one position over blocks of bfloat16. `latents` is MLA: keys of 576
channels whose first 512 are the values, one for all heads, and lists of 2048 tokens, in blocks and single. `positions` are 1 to 16
query positions of a sequence, as a verification of drafts has them, over all tokens and over a list that they share, `of_1_among` and
`of_9_among` after a read that fills the cache, and `repaired positions` those of which a prediction missed a share. `cells` are pages of
one token, of sequences that alternate in one cache, beside pages of a block. `trees` are the nodes of a draft tree with random parents,
beside one position and beside a chain of as many. `batches` are sequences that have `room` for so many tokens, and are as long, ragged, or all
but one a sixteenth as long, over all tokens: by the variant that the library chooses, and by others that are forced. `widths` are heads of 64
and of 256 channels, of 1 to 16 query positions, over all tokens and over lists; `narrow` are FP8 keys and values of 64 channels. `floors` has `read_of_1`, `read_of_9` and `read_of_16` beside them: that kernel with the results of as
many positions, over the same list or over all tokens; a `ratio` is to one position. Microseconds, medians; inputs are in no cache.
"""

import functools
import itertools
import math

import torch
import torch.nn.functional as F

from gather_read import GatherRead
from timing import run, vanward

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
LATENT, VALUE, LATENT_SCALE = 576, 512, 192**-0.5
GROUP = HEADS // KV_HEADS


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def lists(batch, blocks, count):
    """Distinct blocks for each sequence and KV head, ascending."""
    chosen = torch.rand(batch, KV_HEADS, blocks, device="cuda").argsort(-1)[..., :count]
    return chosen.sort(-1).values.int()


class Case:
    """`sets` caches of one shape, each with a list of `budget` tokens, and the library's calls on each."""

    def __init__(self, session, batch, tokens, budget, block=BLOCK, dim=DIM):
        self.dim = dim
        self.session, self.batch, self.block, self.blocks, self.count = session, batch, block, tokens // block, budget // block
        self.bytes = 2 * batch * budget * KV_HEADS * self.dim * 2
        cache = 2 * batch * tokens * KV_HEADS * self.dim * 2
        self.sets = min(20, max(2, math.ceil((384 << 20) / self.bytes)), max(2, (16 << 30) // cache))
        self.q = random(batch, HEADS, self.dim)
        self.lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        pages = batch * self.blocks
        self.keys, self.values = ([random(pages, block, KV_HEADS, self.dim) for _ in range(self.sets)] for _ in range(2))
        self.table = torch.randperm(pages, device="cuda").int().view(batch, self.blocks)
        self.ids = [lists(batch, self.blocks, self.count) for _ in range(self.sets)]
        self.counts = torch.full((batch, KV_HEADS), self.count, dtype=torch.int32, device="cuda")
        self.out = torch.empty(batch, HEADS, self.dim, device="cuda", dtype=torch.bfloat16)

    def kv(self, i):
        return vanward.PagedKV(self.keys[i], self.values[i], self.lens, page_table=self.table)

    def attention(self, i, stream, listed=True, **more):
        if listed:
            more.update(block_size=self.block, list=vanward.BlockList(self.ids[i], self.counts))
        return self.session.prepare_attention(kv=self.kv(i), q=self.q, out=self.out, stream=stream, **more)

    def kept(self, cap):
        """Room for a state of each entry."""
        return vanward.AttentionPartials(*self.states(cap))

    def states(self, *entries):
        return [torch.empty(self.batch, HEADS, *entries, *tail, device="cuda") for tail in ((self.dim,), (), ())]

    def on_current_stream(self, prepare, sets=None):
        """call(i) on whichever stream is current: each stream's calls, of so many sets or all, are prepared on first use."""
        by_stream = {}

        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in by_stream:
                by_stream[stream] = [prepare(n, stream) for n in range(sets or self.sets)]
            by_stream[stream][i]()

        return call

    def gathered(self, of, i):
        """[B, Hk, count·S, D] of the listed blocks."""
        pages = self.table[:, None].expand(-1, KV_HEADS, -1).gather(2, self.ids[i].long()).long()
        heads = torch.arange(KV_HEADS, device="cuda")[None, :, None]
        return of[i][pages, :, heads].flatten(2, 3)

    def torch_listed(self, i):
        keys, values = self.gathered(self.keys, i), self.gathered(self.values, i)
        return F.scaled_dot_product_attention(self.q[:, :, None], keys, values, enable_gqa=True).squeeze(2)

    def torch_dense(self, i):
        view = lambda x: x.view(self.batch, -1, KV_HEADS, self.dim).transpose(1, 2)  # noqa: E731
        return F.scaled_dot_product_attention(self.q[:, :, None], view(self.keys[i]), view(self.values[i]), enable_gqa=True)

    def check(self, i=0):
        torch.cuda.synchronize()
        q = self.q.float().view(self.batch, KV_HEADS, GROUP, self.dim)
        scores = q @ self.gathered(self.keys, i).float().transpose(-1, -2) / math.sqrt(self.dim)
        want = (scores.softmax(-1) @ self.gathered(self.values, i).float()).view(self.batch, HEADS, self.dim)
        error = (self.out.float() - want).norm() / want.norm()
        assert error < 1e-2, f"error {error:.1e}"


def attend(session, timer, rows, quick):
    floor = GatherRead()
    points = [(1, 256), (1, 1024), (1, 2048), (1, 4096), (1, 8192), (4, 4096), (16, 4096)]
    for batch, budget in points[3:5] if quick else points:
        case = Case(session, batch, 32 << 10, budget)
        attention = case.on_current_stream(case.attention)
        attention(0)
        case.check()
        kept = case.kept(case.count)
        keeping = case.on_current_stream(lambda i, stream: case.attention(i, stream, partials=kept))
        state = vanward.AttentionState(*case.states())
        with_state = case.on_current_stream(lambda i, stream: case.attention(i, stream, state=state))
        row = dict(batch=batch, tokens=budget, copy=timer.copy(case.bytes), gather_read=floor.time(case, timer))
        row.update(vanward_graph=timer.graph(attention, case.sets))
        row.update(state_graph=timer.graph(with_state, case.sets), partials_graph=timer.graph(keeping, case.sets))
        row.update(vanward_among=timer.among(attention, case.sets))
        row.update(torch_graph=timer.graph(case.torch_listed, case.sets))
        row.update(vanward_event=timer.event(attention, case.sets))
        rows.put("attention", **row)


def sizes(session, timer, rows, _quick):
    """Blocks and pages of other sizes."""
    for budget in (1024, 2048, 4096, 8192):
        row = dict(tokens=budget)
        for block in (16, 32, 64, 128, 256):
            case = Case(session, 1, 32 << 10, budget, block)
            call = case.on_current_stream(case.attention)
            call(0)
            case.check()
            row[f"blocks_of_{block}"] = timer.graph(call, case.sets)
        rows.put("sizes", **row)


def misses(case, ids, percent):
    """A prediction of as many blocks, of which a share was not selected."""
    missed = math.ceil(case.count * percent / 100)
    order = torch.rand(case.batch, KV_HEADS, case.blocks, device="cuda").scatter_(2, ids.long(), 2.0).argsort(-1)
    keep = torch.rand(case.batch, KV_HEADS, case.count, device="cuda").argsort(-1)[..., missed:]
    return torch.cat([ids.gather(2, keep), order[..., :missed].int()], -1).sort(-1).values.contiguous()


def repairs(case, percent, kept, states):
    """The library's repair by mode, where the prediction missed a share of the lists. `kept` and `states` have room for what was kept."""
    right, predicted = case.ids, [misses(case, ids, percent) for ids in case.ids]
    case.ids = predicted
    for i in range(case.sets):
        case.attention(i, torch.cuda.current_stream().cuda_stream, partials=kept[i], state=states[i])()
    case.ids = right

    def repaired(mode, i, stream):
        from_kept = dict(predicted_partials=kept[i]) if mode == "exact" else dict(predicted_state=states[i])
        return case.session.prepare_repair(
            mode=mode, block_size=BLOCK, kv=case.kv(i), q=case.q, out=case.out, stream=stream, **from_kept,
            predicted=vanward.BlockList(predicted[i], case.counts), selected=vanward.BlockList(right[i], case.counts),
        )

    call = {mode: case.on_current_stream(functools.partial(repaired, mode)) for mode in ("exact", "superset")}
    call["exact"](0)
    case.check()
    return call


def room(case):
    """Partials and a state for each cache."""
    return [case.kept(case.count) for _ in range(case.sets)], [vanward.AttentionState(*case.states()) for _ in range(case.sets)]


def repair(session, timer, rows, quick):
    """Repair of a prediction that missed a share of 128 blocks, which it had others for."""
    for batch in (1,) if quick else (1, 8):
        case = Case(session, batch, 32 << 10, 128 * BLOCK)
        attention = case.on_current_stream(case.attention)
        attention(0)
        case.check()
        anew = timer.graph(attention, case.sets)
        kept = room(case)
        for percent in (0, 2, 10, 30, 100):
            call = repairs(case, percent, *kept)
            row = {f"{mode}_graph": timer.graph(call[mode], case.sets) for mode in call}
            rows.put("repair", batch=batch, missed=f"{percent} %", anew_graph=anew, **row)


def dense(session, timer, rows, _quick):
    for tokens in (32 << 10, 128 << 10):
        case = Case(session, 1, tokens, tokens)
        case.table = torch.arange(case.blocks, device="cuda").int()[None]
        ours = case.on_current_stream(lambda i, stream: case.attention(i, stream, listed=False))
        ours(0)
        case.check()
        row = dict(tokens=tokens, copy=timer.copy(case.bytes), vanward_graph=timer.graph(ours, case.sets))
        rows.put("dense", **row, torch_graph=timer.graph(case.torch_dense, case.sets))


def scattered(case, budget):
    """For each cache a list of single tokens, and what torch attends to."""
    chosen = [torch.rand(1, KV_HEADS, case.blocks * BLOCK, device="cuda").argsort(-1)[..., :budget].sort(-1).values for _ in range(case.sets)]
    heads = torch.arange(KV_HEADS, device="cuda")[None, :, None]

    def gathered(of, i):
        pages = case.table[0].long()[chosen[i] // BLOCK]
        return of[i][pages, chosen[i] % BLOCK, heads]

    case.gathered = gathered
    return [ids.int() for ids in chosen]


def forms(session, timer, rows, _quick):
    """Other lists, rows and types than those above, beside blocks of the same number of tokens."""

    def put(form, budget, case, blocks, call):
        rows.put("forms", form=form, tokens=budget, blocks_graph=blocks, vanward_graph=timer.graph(call, case.sets))

    for budget in (1024, 4096, 8192):
        case = Case(session, 1, 32 << 10, budget)
        blocks = timer.graph(case.on_current_stream(case.attention), case.sets)

        q = random(1, 4, HEADS, DIM)
        out = torch.empty_like(q)
        four = case.on_current_stream(lambda i, stream: session.prepare_attention(
            kv=case.kv(i), q=q, out=out, stream=stream, block_size=BLOCK, list=vanward.BlockList(case.ids[i], case.counts)))
        four(0)
        # The last position sees every token.
        case.q, case.out = q[:, 3], out[:, 3]
        case.check()
        put("four positions", budget, case, blocks, four)

        case.q, case.out = random(1, HEADS, DIM), torch.empty(1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        eight_bits = [[x.to(torch.float8_e4m3fn) for x in of] for of in (case.keys, case.values)]
        case.keys, case.values = ([x.bfloat16() for x in of] for of in eight_bits)
        case.kv = lambda i: vanward.PagedKV(
            *(vanward.float8_e4m3fn(of[i].view(torch.uint8)) for of in eight_bits), case.lens, page_table=case.table)
        narrow = case.on_current_stream(case.attention)
        narrow(0)
        case.check()
        put("float8_e4m3fn", budget, case, blocks, narrow)

    case = Case(session, 1, 32 << 10, 1024)
    blocks = timer.graph(case.on_current_stream(case.attention), case.sets)
    ids, counts = scattered(case, 1024), torch.full((1, KV_HEADS), 1024, dtype=torch.int32, device="cuda")
    tokens = case.on_current_stream(lambda i, stream: session.prepare_attention(
        kv=case.kv(i), q=case.q, out=case.out, stream=stream, block_size=1, list=vanward.BlockList(ids[i], counts)))
    tokens(0)
    case.check()
    put("single tokens", 1024, case, blocks, tokens)


class Positions(Case):
    """Several query positions of each sequence, the last tokens of it, over a shared list or over all tokens."""

    def __init__(self, session, batch, tokens, budget, positions, dim=DIM):
        super().__init__(session, batch, tokens, budget or tokens, dim=dim)
        self.is_listed = bool(budget)
        self.ask(positions)
        if not self.is_listed:
            self.ids = [torch.arange(self.blocks, device="cuda").int().expand(batch, KV_HEADS, -1)] * self.sets

    def ask(self, positions):
        """New queries, of so many positions."""
        self.positions = positions
        self.q = random(self.batch, positions, HEADS, self.dim)
        self.out = torch.empty_like(self.q)

    def states(self, *entries):
        return [torch.empty(self.batch, self.positions, HEADS, *entries, *tail, device="cuda") for tail in ((self.dim,), (), ())]

    def call(self, **more):
        return self.on_current_stream(lambda i, stream: self.attention(i, stream, listed=self.is_listed, **more))

    def sees(self, row, node):
        """Whether a row of the first sequence sees the token of another."""
        return node <= row

    def check(self, i=0):
        """Every position of the first sequence: a token before them is seen by all."""
        torch.cuda.synchronize()
        keys, values = (self.gathered(of, i)[0].float() for of in (self.keys, self.values))
        offsets = torch.arange(self.block, device="cuda")
        tokens = (self.ids[i][0].long()[..., None] * self.block + offsets).flatten(1)
        root = int(self.lens[0]) - self.positions
        for n in range(self.positions):
            q = self.q[0, n].float().view(KV_HEADS, GROUP, self.dim)
            scores = q @ keys.transpose(-1, -2) / math.sqrt(self.dim)
            for node in range(self.positions):
                if not self.sees(n, node):
                    scores.masked_fill_((tokens == root + node)[:, None], -math.inf)
            want = (scores.softmax(-1) @ values).view(HEADS, self.dim)
            error = (self.out[0, n].float() - want).norm() / want.norm()
            assert error < 1e-2, f"position {n}: error {error:.1e}"


def positions(session, timer, rows, quick):
    floor = GatherRead()
    points = [(1, 32 << 10, 0), (1, 128 << 10, 0), (1, 512 << 10, 0), (8, 32 << 10, 0), (8, 128 << 10, 0)]
    points += [(1, 32 << 10, listed << 10) for listed in (1, 2, 4, 8, 16)] + [(8, 32 << 10, 2048), (8, 32 << 10, 4096)]
    for batch, tokens, budget in points[:1] if quick else points:
        row = dict(batch=batch, tokens=tokens, listed=budget or "all")
        for count in (1, 2, 4, 5, 8, 9, 16):
            case = Positions(session, batch, tokens, budget, count)
            call = case.call()
            call(0)
            case.check()
            row[f"of_{count}"] = timer.graph(call, case.sets)
            if budget and count in (1, 9):
                row[f"of_{count}_among"] = timer.among(call, case.sets)
        if budget and torch.cuda.get_device_capability() >= (9, 0):
            row["gather_read_of_9"] = floor.time(case, timer, 36)
        rows.put("positions", **row)


class Cells(Positions):
    """Sequences whose tokens alternate in one cache of single tokens, a page each."""

    def __init__(self, session, batch, tokens, budget, positions):
        super().__init__(session, batch, tokens, budget, positions)
        self.cells = torch.arange(batch * tokens, device="cuda").int().view(tokens, batch).T.contiguous()

    def kv(self, i):
        keys, values = (of[i].view(-1, 1, KV_HEADS, DIM) for of in (self.keys, self.values))
        return vanward.PagedKV(keys, values, self.lens, page_table=self.cells)

    def gathered(self, of, i):
        tokens = (self.ids[i].long()[..., None] * self.block + torch.arange(self.block, device="cuda")).flatten(2)
        cells = self.cells[:, None].long().expand(-1, KV_HEADS, -1).gather(2, tokens)
        return of[i].view(-1, KV_HEADS, DIM)[cells, torch.arange(KV_HEADS, device="cuda")[None, :, None]]


def cells(session, timer, rows, quick):
    points = [(1, 32 << 10, 4096), (4, 32 << 10, 4096), (1, 32 << 10, 0), (4, 32 << 10, 0)]
    for batch, tokens, budget in points[:2] if quick else points:
        row = dict(batch=batch, tokens=tokens, listed=budget or "all")
        for count in (1, 4, 9):
            for name, kind in dict(pages=Positions, cells=Cells).items():
                case = kind(session, batch, tokens, budget, count)
                call = case.call()
                call(0)
                case.check()
                row[f"{name}_of_{count}"] = timer.graph(call, case.sets)
        rows.put("cells", **row)


class Tree(Positions):
    """The nodes of a draft tree, whose parents are drawn at random."""

    def __init__(self, session, batch, tokens, budget, nodes):
        super().__init__(session, batch, tokens, budget, nodes)
        random = torch.Generator().manual_seed(nodes)
        self.paths = [{0}]
        for n in range(1, nodes):
            self.paths.append(self.paths[int(torch.randint(0, n, (1,), generator=random))] | {n})
        words = [[sum(1 << n % 32 for n in path if n // 32 == word) for word in range(-(-nodes // 32))] for path in self.paths]
        self.mask = torch.tensor([words] * batch, dtype=torch.int64).to(torch.uint32).cuda()

    def call(self):
        return super().call(tree=self.mask)

    def sees(self, row, node):
        return node in self.paths[row]


def trees(session, timer, rows, quick):
    points = [(1, 32 << 10, 0), (1, 128 << 10, 0), (8, 32 << 10, 0), (1, 32 << 10, 4096), (1, 32 << 10, 8192), (8, 32 << 10, 4096)]
    for batch, tokens, budget in points[3:4] if quick else points:
        row = dict(batch=batch, tokens=tokens, listed=budget or "all")
        for name, case in dict(
            one=Positions(session, batch, tokens, budget, 1),
            chain_of_16=Positions(session, batch, tokens, budget, 16),
            tree_of_8=Tree(session, batch, tokens, budget, 8),
            tree_of_16=Tree(session, batch, tokens, budget, 16),
            tree_of_64=Tree(session, batch, tokens, budget, 64),
        ).items():
            call = case.call()
            call(0)
            case.check()
            row[name] = timer.graph(call, case.sets)
        rows.put("trees", **row)


def floors(session, timer, rows, quick):
    """What bounds several positions: a kernel that reads the same bytes and joins as many rows of states, and computes nothing."""
    reads = GatherRead()
    for tokens, budget in [(32 << 10, 4096)] if quick else [(32 << 10, 0), (128 << 10, 0), (32 << 10, 4096), (32 << 10, 8192)]:
        row = dict(batch=1, tokens=tokens, listed=budget or "all")
        for name, case in dict(
            one=Positions(session, 1, tokens, budget, 1),
            of_9=Positions(session, 1, tokens, budget, 9),
            chain_of_16=Positions(session, 1, tokens, budget, 16),
            tree_of_16=Tree(session, 1, tokens, budget, 16),
        ).items():
            call = case.call()
            call(0)
            case.check()
            row[name] = timer.graph(call, case.sets)
        read = {f"read_of_{count}": reads.time(case, timer, joined) for count, joined in ((1, None), (9, 36), (16, 64))}
        rows.put("floors", **row, **read, **{f"{name}_ratio": row[name] / row["one"] for name in ("of_9", "chain_of_16", "tree_of_16")},
                 **{f"{name}_ratio": read[name] / row["one"] for name in ("read_of_9", "read_of_16")})


def repaired_positions(session, timer, rows, quick):
    """Repair of several query positions over shared lists of 128 blocks, beside attention to the lists."""
    for batch in (1,) if quick else (1, 8):
        times = {}
        for count in (1, 4, 9, 16):
            case = Positions(session, batch, 32 << 10, 128 * BLOCK, count)
            call = case.call()
            call(0)
            case.check()
            times["anew", "", count] = timer.graph(call, case.sets)
            kept = room(case)
            for percent in (2, 30):
                for mode, call in repairs(case, percent, *kept).items():
                    times[mode, f"{percent} %", count] = timer.graph(call, case.sets)
        for mode, missed in dict.fromkeys(key[:2] for key in times):
            of = {f"of_{count}": times[mode, missed, count] for count in (1, 4, 9, 16)}
            rows.put("repaired positions", batch=batch, mode=mode, missed=missed, **of)


LENGTHS = {  # of the tokens that sequences have room for
    "equal": lambda share: torch.ones_like(share),
    "ragged": lambda share: 0.05 + 0.95 * share,
    "one long": lambda share: torch.full_like(share, 1 / 16),
}


class Batch(Positions):
    """One query position of several sequences, over all of their tokens or those of a window."""

    def __init__(self, session, batch, tokens, window, fp8):
        super().__init__(session, batch, tokens, 0, 1)
        self.tokens, self.window, self.fp8 = tokens, window, fp8
        if fp8:
            self.keys, self.values = ([x.to(torch.float8_e4m3fn) for x in of] for of in (self.keys, self.values))

    def set_lengths(self, name):
        share = torch.rand(self.batch, generator=torch.Generator().manual_seed(1))
        lens = (LENGTHS[name](share) * self.tokens).int()
        lens[0] = self.tokens
        self.lens.copy_(lens)
        seen = lens.clamp(max=self.window) if self.window else lens
        self.bytes = int(seen.sum()) * 2 * KV_HEADS * DIM * (1 if self.fp8 else 2)

    def time(self, session, timer):
        self.session = session
        call = self.call(window=self.window)
        call(0)
        if not self.window and not self.fp8:
            self.check()
        return timer.graph(call, self.sets)


def batches(session, timer, rows, quick):
    points = [(8, 2 << 10, 0, False), (16, 4 << 10, 0, False), (17, 4 << 10, 0, False), (32, 8 << 10, 0, False)]
    points += [(64, tokens << 10, 0, False) for tokens in (1, 2, 4, 8, 16)] + [(256, 512, 0, False), (256, 2 << 10, 0, False), (8, 128 << 10, 0, False)]
    points += [(64, 32 << 10, window, False) for window in (128, 1024)] + [(64, tokens << 10, 0, True) for tokens in (2, 8, 16)]
    forced = {name: vanward.Session("cuda", variants=f"attention={name}") for name in ("decode128", "verify128", "mma")}
    for other in forced.values():
        other.reserve(256 << 20, stream=torch.cuda.graph.default_capture_stream.cuda_stream)
    for batch, tokens, window, fp8 in points[6:7] if quick else points:
        case = Batch(session, batch, tokens, window, fp8)
        for name in LENGTHS:
            case.set_lengths(name)
            row = dict(batch=batch, room=tokens, window=window, fp8=fp8, lengths=name, copy=timer.copy(case.bytes), chosen=case.time(session, timer))
            row.update({variant: case.time(other, timer) for variant, other in forced.items() if not (fp8 and variant == "verify128")})
            rows.put("batches", **row)
        del case
        torch.cuda.empty_cache()
    for other in forced.values():
        other.close()


def times_of(case, timer, **sessions):
    """The time of the case's call by each session, whose result is checked first."""
    times = {}
    for name, session in sessions.items():
        case.session = session
        call = case.call()
        call(0)
        case.check()
        times[name] = timer.graph(call, case.sets)
    return times


def widths(session, timer, rows, quick):
    points = [(1, 32 << 10, 0), (1, 128 << 10, 0), (8, 32 << 10, 0), (8, 128 << 10, 0)]
    points += [(64, tokens << 10, 0) for tokens in (2, 8)] + [(256, 512, 0), (1, 32 << 10, 4096), (1, 32 << 10, 8192), (8, 32 << 10, 4096)]
    with vanward.Session("cuda", variants="attention=mma") as other:
        other.reserve(256 << 20, stream=torch.cuda.graph.default_capture_stream.cuda_stream)
        for dim, (batch, tokens, budget) in itertools.product((64, 256), points[:1] if quick else points):
            case = Positions(session, batch, tokens, budget, 1, dim=dim)
            copy = timer.copy(case.bytes)
            for count in (1, 4, 9, 16):
                case.ask(count)
                by = times_of(case, timer, chosen=session, mma=other)
                rows.put("widths", dim=dim, batch=batch, tokens=tokens, listed=budget or "all", positions=count, copy=copy, **by)
            if dim == 64:
                narrow(case, session, other, timer, rows, copy / 2)
            del case
            torch.cuda.empty_cache()


def narrow(case, session, other, timer, rows, copy):
    """The same keys and values in FP8, of one and of two query positions."""
    eight_bits = [[x.to(torch.float8_e4m3fn) for x in of] for of in (case.keys, case.values)]
    case.keys, case.values = ([x.bfloat16() for x in of] for of in eight_bits)
    case.kv = lambda i: vanward.PagedKV(
        *(vanward.float8_e4m3fn(of[i].view(torch.uint8)) for of in eight_bits), case.lens, page_table=case.table)
    for count in (1, 2):
        case.ask(count)
        listed = case.count * case.block if case.is_listed else "all"
        by = times_of(case, timer, chosen=session, mma=other)
        rows.put("narrow", batch=case.batch, tokens=case.blocks * case.block, listed=listed, positions=count, half_copy=copy, **by)


class Latents:
    """`sets` caches of latents, each with lists of `budget` tokens, and the library's calls on each."""

    on_current_stream = Case.on_current_stream

    def __init__(self, session, batch, heads, budget=2048, tokens=16 << 10):
        self.session, self.batch, self.blocks = session, batch, tokens // BLOCK
        self.bytes = batch * budget * LATENT * 2
        self.sets = min(20, max(2, math.ceil((384 << 20) / self.bytes)))
        self.q, self.out = random(batch, heads, LATENT), random(batch, heads, VALUE)
        self.lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(batch * self.blocks, device="cuda").int().view(batch, self.blocks)
        self.latents = [random(batch * self.blocks, BLOCK, 1, LATENT) for _ in range(self.sets)]
        self.ids, self.tokens = ([self.some(tokens // size, budget // size) for _ in range(self.sets)] for size in (BLOCK, 1))

    def some(self, count, chosen):
        return torch.rand(self.batch, 1, count, device="cuda").argsort(-1)[..., :chosen].sort(-1).values.int()

    def attention(self, block, ids, i, stream):
        kv = vanward.PagedKV(self.latents[i], self.latents[i][..., :VALUE], self.lens, page_table=self.table)
        counts = torch.full((self.batch, 1), ids[i].shape[-1], dtype=torch.int32, device="cuda")
        listed = vanward.BlockList(ids[i], counts)
        return self.session.prepare_attention(
            kv=kv, q=self.q, out=self.out, stream=stream, block_size=block, list=listed, scale=LATENT_SCALE)

    def call(self, block, ids):
        return self.on_current_stream(functools.partial(self.attention, block, ids))

    def torch_listed(self, i):
        """Heads are rows of one head."""
        pages = self.table.gather(1, self.ids[i][:, 0].long()).long()
        keys = self.latents[i][pages].view(self.batch, 1, -1, LATENT)
        return F.scaled_dot_product_attention(self.q[:, None], keys, keys[..., :VALUE], scale=LATENT_SCALE).squeeze(1)

    def check(self, block, ids, i=0):
        torch.cuda.synchronize()
        places = (ids[i][:, 0].long()[..., None] * block + torch.arange(block, device="cuda")).flatten(1)
        keys = self.latents[i][self.table.long().gather(1, places // BLOCK), places % BLOCK, 0].float()
        want = (self.q.float() @ keys.transpose(-1, -2) * LATENT_SCALE).softmax(-1) @ keys[..., :VALUE]
        error = (self.out.float() - want).norm() / want.norm()
        assert error < 1e-2, f"error {error:.1e}"


def latents(session, timer, rows, quick):
    for heads in (16,) if quick else (16, 128):
        for batch in (1, 8, 64):
            case = Latents(session, batch, heads)
            row = dict(batch=batch, heads=heads, copy=timer.copy(case.bytes))
            for name, block, ids in (("vanward", BLOCK, case.ids), ("single_tokens", 1, case.tokens)):
                call = case.call(block, ids)
                call(0)
                case.check(block, ids)
                row[f"{name}_graph"] = timer.graph(call, case.sets)
            rows.put("latents", **row, torch_graph=timer.graph(case.torch_listed, case.sets))


PARTS = dict(attend=attend, repair=repair, dense=dense, positions=positions, batches=batches, widths=widths, floors=floors, cells=cells, trees=trees,
             repaired_positions=repaired_positions, latents=latents, sizes=sizes, forms=forms)


def measure(session, timer, rows, quick, only):
    for name in only:
        if name == "floors" and torch.cuda.get_device_capability() < (9, 0):
            continue
        if not quick or name not in ("sizes", "forms"):
            PARTS[name](session, timer, rows, quick)


if __name__ == "__main__":
    run(__doc__, measure, scratch_bytes=256 << 20, parts=tuple(PARTS))
