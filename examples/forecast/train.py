"""Trains SparDA's Forecast, one vector for each KV head, and compares it with the closed form of vwd_forecast_solve.

    python examples/forecast/train.py MODEL.gguf [--out FOLDER] [--train FILE ...] [--test FILE ...] [--pieces N] [--steps N]

Activations of the model over both texts are computed in torch (model.py). Four files of docs/forecast.md's format are written to FOLDER and loaded
again by the library, which selects with what they forecast over the end of the test text:

    closed            a query for each query head, fitted by vwd_forecast_accumulate and _solve; selection by AXIS
    vector            one vector for each KV head, the sum of its queries, fitted likewise; selection by MEAN_DOT
    trained           `vector`, trained further; selection by MEAN_DOT
    …-memory          the same with the token's past queries among the inputs (VWD_FORECAST_MEMORY)

What is trained: f of layer l+1 scores the mean keys of windows, a block by the larger of the windows that it shares, and softmax over the blocks makes
a distribution Q. P is the one that the true attention has, its mass by block, a mean over the query heads of the KV head. The loss is KL(P ‖ Q) over the blocks
that the Forecast's list could hold, and one bucket of all others. Blocks that are always selected are left out of both.
"""

import argparse
import hashlib
import math
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings" / "python"))
import vanward  # noqa: E402
from model import Activations, Llama  # noqa: E402
from vanward import BlockList, Forecast, Index, Rope, RopeStyle, SelectMethod  # noqa: E402

BLOCK, WINDOW = 16, 32  # a window every block: block j lies in windows j − 1 and j
INIT, LOCAL = 1, 4
K, RATIO = 32, 1.25
LISTED = math.ceil(RATIO * K)
RIDGE = 1e-3
WORKERS = 2  # layers that are trained at once, each on one thread
FROM = 2 * K * BLOCK  # positions before have few blocks to choose from
ROWS = 256  # positions in a training step


# --- what attention does ----------------------------------------------------------------------------------------------


def masses(model, layer, positions):
    """[positions, KV heads, blocks]: the share of attention that each block has, the mean over the query heads of a KV head."""
    keys = layer.keys
    q = model.rotate(layer.q[positions], model.angles(positions)).unflatten(1, (model.kv_heads, -1))
    blocks = math.ceil(len(keys) / BLOCK)
    found = []
    for rows, at in zip(q.split(128), positions.split(128)):
        scores = torch.einsum("nhgd,thd->nhgt", rows, keys) * model.dim**-0.5
        scores.masked_fill_(torch.arange(len(keys)) > at[:, None, None, None], -torch.inf)
        mass = F.pad(scores.softmax(-1).mean(2), (0, blocks * BLOCK - len(keys)))
        found.append(mass.unflatten(-1, (blocks, BLOCK)).sum(-1))
    return torch.cat(found)


def chosen(positions, blocks):
    """[positions, 1, blocks]: which blocks are selected by their score, neither always nor never."""
    j, last = torch.arange(blocks), positions[:, None] // BLOCK
    return ((j >= INIT) & (j <= last - LOCAL))[:, None]


def window_means(keys):
    """[windows, KV heads, D], one every block."""
    halves = keys[: len(keys) // BLOCK * BLOCK].unflatten(0, (-1, BLOCK)).mean(1)
    return (halves[:-1] + halves[1:]) / 2


# --- inputs of a forecast ---------------------------------------------------------------------------------------------


def normed(x):
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)


def summed(model, q):
    """[T, KV heads, D]: the queries of each KV head, added up."""
    return q.unflatten(1, (model.kv_heads, -1)).sum(2)


def before(q):
    """Each token's row is that of the token before."""
    return F.pad(q[:-1], (0, 0, 0, 0, 1, 0))


def inputs(x, previous=None):
    parts = [normed(x)] + ([previous.flatten(1)] if previous is not None else []) + [torch.ones(len(x), 1)]
    return torch.cat(parts, 1)


# --- closed form and training -----------------------------------------------------------------------------------------


def options(model, heads, memory):
    return dict(layers=model.layers - 1, input_dim=model.hidden, q_heads=heads, head_dim=model.dim, ridge=RIDGE, memory=memory)


def fit(session, model, texts, path, of_query, memory):
    """The closed form: of_query gives the rows that are forecast."""
    heads = of_query(texts[0][0].q[:1]).shape[1]
    with Forecast(session, **options(model, heads, memory)) as forecast:
        for layers in texts:
            for i in range(model.layers - 1):
                q = of_query(layers[i + 1].q).contiguous()
                forecast.accumulate(layer=i, x=layers[i].x, q=q, **(dict(previous=before(q)) if memory else {}))
        forecast.solve()
        forecast.save(path)


def ridge(z, memory_from):
    """The matrix that the closed form factors, for whitened inputs."""
    gram = (z.T @ z).double()
    diagonal, scale = gram.diagonal(), torch.empty(len(gram), dtype=torch.double)
    past = torch.zeros(len(gram), dtype=torch.bool)
    past[memory_from:-1] = True
    for kind in (past, ~past):
        if kind.any():
            scale[kind] = diagonal[kind].mean()
    return gram + RIDGE * scale.diag()


class Aims:
    """What attention does in a layer of a text, past FROM: the blocks that a list could hold, with their shares P, and the share of the others."""

    def __init__(self, model, layer):
        self.at = torch.arange(FROM, len(layer.keys))
        self.cosine, self.sine = model.angles(self.at)
        self.means = window_means(layer.keys).transpose(0, 1).contiguous()
        mass = masses(model, layer, self.at)
        self.allowed = chosen(self.at, mass.shape[-1]).contiguous()
        p = mass * self.allowed
        self.p, self.blocks = (p / p.sum(-1, keepdim=True).clamp_min(1e-20)).topk(LISTED - INIT - LOCAL, -1)
        self.rest = (1 - self.p.sum(-1)).clamp_min(0)

    def loss(self, model, f, rows):
        """KL(P ‖ Q) of vectors f [rows, KV heads, D], which stand before the rotary embedding."""
        f = model.rotate(f, (self.cosine[rows], self.sine[rows]))
        scores = torch.einsum("nhd,hwd->nhw", f, self.means)
        scores = torch.maximum(F.pad(scores, (0, 1), value=-torch.inf), F.pad(scores, (1, 0), value=-torch.inf))
        scores = scores.masked_fill(~self.allowed[rows], -1e4)
        log_q = scores.gather(-1, self.blocks[rows]) - scores.logsumexp(-1, keepdim=True)
        p, rest = self.p[rows], self.rest[rows]
        among = (p * (p.clamp_min(1e-20).log() - log_q)).sum(-1)
        others = (1 - log_q.exp().sum(-1)).clamp_min(1e-6)
        return (among + rest * (rest.clamp_min(1e-20) / others).log()).mean()


def train_map(model, aims, rows_of, weight, steps, rate, random):
    """A map [out, inputs] that starts as `weight`, and the loss of each step; rows_of are the inputs of each text's tokens."""
    # In inputs that are white, all directions learn at one rate.
    tokens = sum(map(len, rows_of))
    factor = torch.linalg.cholesky(ridge(torch.cat(rows_of), model.hidden) / tokens)
    white = [torch.linalg.solve_triangular(factor, rows[aim.at].double().T, upper=False).T.float() for rows, aim in zip(rows_of, aims)]
    scale = model.dim**-0.5 / (model.heads // model.kv_heads)
    turned = ((weight * scale).double() @ factor).float().T.contiguous().requires_grad_()
    size = torch.zeros(model.kv_heads, 1, requires_grad=True)  # how sharp each head's distribution is, as a logarithm
    adam = torch.optim.Adam([{"params": [turned], "lr": rate * turned.detach().square().mean().sqrt().item()}, {"params": [size], "lr": 10 * rate}])
    schedule, losses = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps), []
    for step in range(steps):
        aim, rows = aims[step % len(aims)], white[step % len(aims)]
        at = torch.randint(len(rows), (ROWS,), generator=random)
        loss = aim.loss(model, (rows[at] @ turned).unflatten(1, (model.kv_heads, -1)) * size.exp(), at)
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    turned = (turned.unflatten(1, (model.kv_heads, -1)) * size.exp()).flatten(1).detach()
    return torch.linalg.solve_triangular(factor.T, turned.double(), upper=True).T.float().contiguous(), losses


def train(model, texts, starts, paths, steps, rate):
    """
    Trains the maps of the files `starts`, without memory and with it, and writes them to `paths`. Returns of both the mean loss over all maps, of the first
    tenth of the steps and of the last one.
    """
    start, maps, losses = [load_file(path) for path in starts], [{}, {}], [[], []]

    def one(i):
        aims = [Aims(model, layers[i + 1]) for layers in texts]
        for memory in (False, True):
            rows_of = [inputs(layers[i].x, before(summed(model, layers[i + 1].q)) if memory else None) for layers in texts]
            name, random = f"layer.{i}.weight", torch.Generator().manual_seed(i)
            maps[memory][name], found = train_map(model, aims, rows_of, start[memory][name], steps, rate, random)
            losses[memory].append(found)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, range(model.layers - 1)))
    torch.set_num_threads(threads)
    for memory in (False, True):
        save_file(maps[memory], paths[memory], metadata={
            "format": "vanward.forecast", "version": "2", "flags": str(int(memory)), "layers": str(model.layers - 1),
            "input_dim": str(model.hidden), "q_heads": str(model.kv_heads), "head_dim": str(model.dim)})
    part = math.ceil(steps / 10)
    mean = lambda found: sum(map(sum, found)) / sum(map(len, found))  # noqa: E731
    return [(mean([of_map[:part] for of_map in found]), mean([of_map[-part:] for of_map in found])) for found in losses]


# --- what lists hold --------------------------------------------------------------------------------------------------


class Lists:
    """Selections of the library for the last `rows` positions of a text."""

    def __init__(self, session, model, text, rows):
        self.session, self.model, self.text = session, model, text
        self.tokens = len(text[0].x)
        self.lens = torch.tensor([self.tokens], dtype=torch.int32)
        self.at = torch.arange(self.tokens - rows, self.tokens)
        self.indices = {}

    def index(self, layer, method):
        if (layer, method) not in self.indices:
            self.indices = {key: index for key, index in self.indices.items() if key[0] == layer} | {(layer, method): self.made(layer, method)}
        return self.indices[layer, method]

    def made(self, layer, method):
        keys = self.text[layer].keys[None].contiguous()
        room = dict(batch=1, tokens=self.tokens)
        index = Index.axis(keys, **room, block_size=BLOCK) if method == SelectMethod.AXIS else Index.mean(keys, **room, window=WINDOW, stride=BLOCK)
        self.session.index_update(index=index, k=keys, seq_lens=self.lens, begin=torch.zeros_like(self.lens))
        return index

    def of(self, layer, method, q, k):
        """[rows, KV heads, blocks]: which blocks are listed."""
        shape = (1, len(self.at), self.model.kv_heads)
        selected = BlockList(torch.zeros(*shape, k, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32))
        self.session.select_blocks(method=method, block_size=BLOCK, k=k, init_blocks=INIT, local_blocks=LOCAL, index=self.index(layer, method), q=q[None],
                                   seq_lens=self.lens, selected=selected)
        assert (selected.counts == k).all()
        return torch.zeros(*shape[1:], math.ceil(self.tokens / BLOCK)).scatter_(-1, selected.ids[0].long(), 1.0).bool()

    def true(self, layer, method, k):
        """The lists that the layer's own queries give."""
        q = self.text[layer].q if method == SelectMethod.AXIS else summed(self.model, self.text[layer].q)
        return self.of(layer, method, self.model.rotate(q[self.at], self.model.angles(self.at)).contiguous(), k)

    def foreseen(self, layer, forecast, rope):
        """The lists that a forecast gives, from the stream that enters the layer before."""
        info = forecast.info()
        own = info.q_heads == self.model.heads
        q = torch.empty(len(self.at), info.q_heads, info.head_dim)
        past = self.text[layer].q if own else summed(self.model, self.text[layer].q)
        previous = dict(previous=before(past)[self.at].contiguous()) if info.memory else {}
        forecast.project(layer=layer - 1, rope=rope, x=self.text[layer - 1].x[self.at].contiguous(), positions=self.at.int(), q=q, **previous)
        return self.of(layer, SelectMethod.AXIS if own else SelectMethod.MEAN_DOT, q, LISTED)


def compare(session, model, text, paths, rows):
    """For each layer and file the shares of AXIS's own K blocks and of attention's mass that the list of LISTED holds, forced blocks left out; `own` are
    lists of the layer's true queries by AXIS, and of their sums by MEAN_DOT."""
    lists, rope = Lists(session, model, text, rows), Rope(rotary_dim=model.dim, theta=model.theta, style=RopeStyle.INTERLEAVED)
    forecasts = {name: Forecast.load(session, path) for name, path in paths.items()}
    table = []
    for layer in range(1, model.layers):
        mass = masses(model, text[layer], lists.at)
        free = chosen(lists.at, mass.shape[-1])
        true = lists.true(layer, SelectMethod.AXIS, K) & free
        share = lambda listed: ((mass * (listed & free)).sum() / (mass * free).sum()).item()  # noqa: B023, E731
        found = {}
        own = {"own queries": lists.true(layer, SelectMethod.AXIS, LISTED), "own sum": lists.true(layer, SelectMethod.MEAN_DOT, LISTED)}
        for name, listed in {**own, **{name: lists.foreseen(layer, forecast, rope) for name, forecast in forecasts.items()}}.items():
            found[name] = ((true & listed).sum().item() / true.sum().item(), share(listed))
        table.append(found)
    return table


def show(table):
    names = list(table[0])
    mean = {name: tuple(sum(row[name][n] for row in table) / len(table) for n in range(2)) for name in names}
    for n, what in enumerate((f"share of the {K} blocks that AXIS selects", "share of attention's mass")):
        print(f"\n{what}, forced blocks left out\n")
        print("| layer | " + " | ".join(names) + " |\n" + "|---:" * (len(names) + 1) + "|")
        for at, row in [*enumerate(table, 1), ("mean", mean)]:
            print(f"| {at} | " + " | ".join(f"{row[name][n]:.3f}" for name in names) + " |")


def activations(model, tokens, folder):
    """What model.run gives; kept in a folder, if there is one, and found there again."""
    if folder is None:
        return model.run(tokens)
    path = pathlib.Path(folder) / f"{hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]}.safetensors"
    if not path.exists():
        layers, loss = model.run(tokens)
        tensors = {f"{i}.{name}": getattr(layer, name).contiguous() for i, layer in enumerate(layers) for name in ("x", "q", "keys")}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"loss": str(loss)})
    with safe_open(path, "pt") as file:
        layers = [Activations(*(file.get_tensor(f"{i}.{name}") for name in ("x", "q", "keys"))) for i in range(model.layers)]
        return layers, float(file.metadata()["loss"])


def text_of(files):
    return "\n".join(pathlib.Path(file).read_text() for file in files)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", default="forecasts", help="folder for the files")
    parser.add_argument("--keep", help="folder for activations, which a second run finds there: 0.7 GB for 4096 tokens of SmolLM2-135M")
    parser.add_argument("--train", nargs="+", default=sorted((ROOT / "docs").glob("*.md")), help="texts to learn from")
    parser.add_argument("--test", nargs="+", default=[ROOT / "THIRD-PARTY"], help="texts to compare over")
    parser.add_argument("--compare", action="store_true", help="only compare: an earlier run has left the files in the folder")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a piece of text")
    parser.add_argument("--pieces", type=int, default=4, help="pieces of the training text")
    parser.add_argument("--rows", type=int, default=256, help="last positions of the test text that lists are made for")
    parser.add_argument("--steps", type=int, default=300, help="steps of each layer and file")
    parser.add_argument("--rate", type=float, default=0.003, help="Adam's rate, as a multiple of the map's root mean square")
    o = parser.parse_args()
    torch.manual_seed(0)
    begin = time.process_time(), time.monotonic()

    def say(what):
        print(f"{time.process_time() - begin[0]:6.0f} s of processor time, {time.monotonic() - begin[1]:.0f} s: {what}", flush=True)

    model = Llama(o.model)
    train_tokens, test_tokens = (model.tokens(text_of(files)) for files in (o.train, o.test))
    if len(train_tokens) < o.tokens * o.pieces or len(test_tokens) < o.tokens:
        parser.error(f"{len(train_tokens)} tokens to learn from and {len(test_tokens)} to compare over; expected {o.tokens * o.pieces} and {o.tokens}")
    texts = []
    for piece in train_tokens.split(o.tokens)[: 0 if o.compare else o.pieces]:
        texts.append(activations(model, piece, o.keep))
        say(f"activations of {len(piece)} tokens; loss of the last 256: {texts[-1][1]:.3f}")
    test, loss = activations(model, test_tokens[: o.tokens], o.keep)
    say(f"activations of the test text; loss {loss:.3f}")
    texts = [layers for layers, _ in texts]
    out = pathlib.Path(o.out)
    out.mkdir(parents=True, exist_ok=True)
    names = [f"{name}{more}" for name in ("closed", "vector", "trained") for more in ("", "-memory")]
    paths = {name: out / f"{name}.safetensors" for name in names}
    with vanward.Session("cpu") as session:
        if not o.compare:
            for memory, more in enumerate(("", "-memory")):
                fit(session, model, texts, paths["closed" + more], lambda q: q, bool(memory))
                fit(session, model, texts, paths["vector" + more], lambda q: summed(model, q), bool(memory))
            say("closed form")
            both = lambda name: [paths[name], paths[f"{name}-memory"]]  # noqa: E731
            losses = train(model, texts, both("vector"), both("trained"), o.steps, o.rate)
            say("training; loss " + ", with memory ".join(f"{first:.4f} to {last:.4f}" for first, last in losses))
        show(compare(session, model, test, paths, o.rows))
        say("lists")


if __name__ == "__main__":
    main()
