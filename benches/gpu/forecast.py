"""What a forecast's list covers of the blocks that a layer's own queries select, and what attention over that list is worth, on steps of a model.

    python benches/gpu/forecast.py FOLDER [--device cuda | cpu] [--out FILE] [--block N] [--k N]

FOLDER is what examples/forecast/export.py wrote: activations of a text that the forecast was not fitted on. All of it goes through the library's calls,
on one device: vwd_forecast_load and _project, vwd_index_update, vwd_select_blocks, and a decoder of as many layers.

`coverage`: lists of ⌈1.25·k⌉ blocks by the forecast queries beside those of k blocks by the layer's own, for each KV head of the text's last positions.
`covers` is the share of the blocks of the latter that are among the former, `chosen` the same without the blocks that are always listed, the first one
and the newest four. `worst` is the smallest share of any KV head in the mean of its positions. On a GPU `as_on_cpu` is the share of lists of both kinds
that a CPU session makes, too.

`decoder`: the same positions as steps of one token, by SERIAL, which waits for its selection, and by FORESEEN, which attends the forecast's list. Errors
are those of a layer's result against dense attention, relative in norm. Steps are not timed: decoder.py does so, at the shape of a larger model.

Shares and errors are in percent.
A CPU session needs numpy alone, a GPU torch, too.
"""

import argparse
import json
import math
import pathlib
import sys

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bindings" / "python"))
import vanward  # noqa: E402
from vanward import BlockList, DecoderMode, DecoderPolicy, Index, Rope, RopeStyle, SelectMethod, Strategy  # noqa: E402

INIT, LOCAL, RATIO = 1, 4, 1.25
METHODS = {SelectMethod.MINMAX: Index.minmax, SelectMethod.AXIS: Index.axis}


class Host:
    """Arrays of a CPU session."""

    name = "cpu"

    def place(self, array):
        return numpy.ascontiguousarray(array)

    def back(self, array):
        return array


class Gpu:
    """Arrays of a CUDA session."""

    def __init__(self):
        import torch

        self.torch, self.name = torch, torch.cuda.get_device_name()

    def place(self, array):
        return self.torch.from_numpy(numpy.ascontiguousarray(array)).cuda()

    def back(self, array):
        self.torch.cuda.synchronize()
        return array.cpu().numpy()


class Text:
    """What export.py wrote of a text."""

    def __init__(self, folder):
        self.forecast = folder / "closed.safetensors"
        data = (folder / "steps.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        about = header.pop("__metadata__")
        self.layers, self.theta = [int(n) for n in about["layers"].split()], float(about["theta"])
        self.found = {}
        for name, tensor in header.items():
            assert tensor["dtype"] == "F16", name
            first, last = tensor["data_offsets"]
            self.found[name] = numpy.frombuffer(data[end + first : end + last], numpy.float16).reshape(tensor["shape"])
        self.tokens, self.kv_heads, self.dim = self.of(0, "keys").shape
        self.rows, self.heads = self.of(0, "q").shape[:2]
        self.at = numpy.arange(self.tokens - self.rows, self.tokens, dtype=numpy.int32)

    def of(self, n, name):
        return self.found[f"{n}.{name}"]

    def rope(self):
        return Rope(rotary_dim=self.dim, theta=self.theta, style=RopeStyle.INTERLEAVED)

    def queries(self, n):
        """A layer's own, after the rotary embedding."""
        turns = self.at[:, None, None] * self.theta ** (-numpy.arange(0, self.dim, 2) / self.dim)
        cosine, sine = numpy.cos(turns), numpy.sin(turns)
        q = self.of(n, "q").astype(numpy.float64)
        a, b = q[..., 0::2], q[..., 1::2]
        return numpy.stack([a * cosine - b * sine, a * sine + b * cosine], -1).reshape(q.shape).astype(numpy.float16)


class Lists:
    """A session's selections for the last positions of a text: which blocks, [rows, KV heads, blocks]."""

    def __init__(self, session, device, text, block):
        self.session, self.device, self.text, self.block, self.indices = session, device, text, block, {}
        self.lens = device.place(numpy.array([text.tokens], numpy.int32))
        self.forecast = vanward.Forecast.load(session, text.forecast)

    def index(self, n, method):
        if (n, method) not in self.indices:
            keys = self.device.place(self.text.of(n, "keys")[None])
            index = METHODS[method](keys, batch=1, tokens=self.text.tokens, block_size=self.block)
            self.session.index_update(index=index, k=keys, seq_lens=self.lens, begin=self.device.place(numpy.zeros(1, numpy.int32)))
            self.indices[n, method] = keys, index
        return self.indices[n, method][1]

    def of(self, n, method, q, k):
        place, shape = self.device.place, (1, self.text.rows, self.text.kv_heads)
        selected = BlockList(place(numpy.zeros((*shape, k), numpy.int32)), place(numpy.zeros(shape, numpy.int32)))
        self.session.select_blocks(method=method, block_size=self.block, k=k, init_blocks=INIT, local_blocks=LOCAL, index=self.index(n, method), q=q[None],
                                   seq_lens=self.lens, selected=selected)
        ids, counts = (self.device.back(x)[0] for x in (selected.ids, selected.counts))
        assert (counts == k).all(), "lists that are not full"
        listed = numpy.zeros((*shape[1:], -(-self.text.tokens // self.block)), bool)
        numpy.put_along_axis(listed, ids.astype(numpy.int64), True, -1)
        return listed

    def own(self, n, method, k):
        return self.of(n, method, self.device.place(self.text.queries(n)), k)

    def foreseen(self, n, method, k):
        place, text = self.device.place, self.text
        q = place(numpy.zeros((text.rows, text.heads, text.dim), numpy.float16))
        self.forecast.project(layer=n, rope=text.rope(), x=place(text.of(n, "x")), positions=place(text.at), q=q)
        return self.of(n, method, q, k)


def coverage(lists, beside, k, put):
    """`beside` are Lists of a CPU session, or None."""
    text, longer = lists.text, math.ceil(RATIO * k)
    j, last = numpy.arange(-(-text.tokens // lists.block)), text.at[:, None] // lists.block
    chosen = ((j >= INIT) & (j <= last - LOCAL))[:, None]
    for method in METHODS:
        found = []
        for n, layer in enumerate(text.layers):
            own, foreseen = lists.own(n, method, k), lists.foreseen(n, method, longer)
            share = lambda a, axes=None: 100 * (a & foreseen).sum(axes) / a.sum(axes)  # noqa: B023, E731
            row = dict(covers=share(own), chosen=share(own & chosen), worst=share(own, (0, 2)).min())
            if beside:
                same = [(a == b).all(-1).mean() for a, b in ((own, beside.own(n, method, k)), (foreseen, beside.foreseen(n, method, longer)))]
                row["as_on_cpu"] = 100 * sum(same) / 2
            put("coverage", method=method.name, layer=layer, **row)
            found.append(row)
        put("coverage", method=method.name, layer="mean", **{name: sum(row[name] for row in found) / len(found) for name in found[0]})


def decoded(session, device, text, block, mode=DecoderMode.SPARSE, foreseen=None, **policy):
    """[steps, layers, heads, DIM]: the results of the last positions; the first one makes the summaries, and is left out. `foreseen` is a forecast."""
    pages, place, layers = text.tokens // block, device.place, range(len(text.layers))
    table, out = place(numpy.arange(pages, dtype=numpy.int32)[None]), place(numpy.zeros((text.rows, len(layers), text.heads, text.dim), numpy.float32))
    kv = [[place(text.of(n, name).reshape(pages, block, text.kv_heads, text.dim).copy()) for name in ("keys", "values")] for n in layers]
    new = [[place(text.of(n, name)[text.at]) for name in ("keys", "values")] for n in layers]
    q, x = [place(text.queries(n)) for n in layers], [place(text.of(n, "x")) for n in layers]
    lens, begin = [place(text.at[i : i + 1] + 1) for i in range(text.rows)], place(numpy.zeros(1, numpy.int32))
    with vanward.Decoder(session, dtype="float16", layers=len(layers), max_rows=1, query_heads=text.heads, kv_heads=text.kv_heads, key_dim=text.dim,
                         value_dim=text.dim, page_size=block, pages=pages, block_size=block,
                         policy=DecoderPolicy(init_blocks=INIT, local_blocks=LOCAL, **policy)) as decoder:
        for i in range(text.rows):
            decoder.begin(mode=mode, positions=1, seq_lens=lens[i], page_table=table, begin=begin if i == 0 else None)
            for n in layers:
                if foreseen:
                    decoder.foresee(layer=n, forecast=foreseen, map=n, rope=text.rope(), x=x[n][i : i + 1])
            for n in layers:
                (k, v), (new_k, new_v) = kv[n], new[n]
                decoder.attend(layer=n, k=k, v=v, new_k=new_k[i : i + 1], new_v=new_v[i : i + 1], q=q[n][i : i + 1], out=out[i : i + 1, n])
        return device.back(out)[1:].astype(numpy.float64)


def steps(session, device, text, forecast, block, k, put):
    error = lambda a, b: 100 * numpy.linalg.norm(a - b) / numpy.linalg.norm(b)  # noqa: E731
    for method in METHODS:
        run = lambda **more: decoded(session, device, text, block, method=method, k=k, **more)  # noqa: B023, E731
        dense, serial = run(mode=DecoderMode.DENSE), run()
        ahead = run(strategy=Strategy.FORESEEN, ratio=RATIO, foreseen=forecast)
        assert not numpy.array_equal(serial, ahead), "nothing was foreseen"
        for n, layer in enumerate(text.layers):
            put("decoder", method=method.name, layer=layer, serial=error(serial[:, n], dense[:, n]), foreseen=error(ahead[:, n], dense[:, n]))
        put("decoder", method=method.name, layer="all", serial=error(serial, dense), foreseen=error(ahead, dense))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", help="file for one JSON object a row")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block, and of a page")
    parser.add_argument("--k", type=int, default=32, help="blocks that are selected for a KV head")
    o = parser.parse_args()
    text, device = Text(o.folder), Host() if o.device == "cpu" else Gpu()
    file = open(o.out, "w") if o.out else None

    def put(what, **row):
        row = {key: float(value) if isinstance(value, numpy.floating) else value for key, value in row.items()}
        print(f"{what:12}", "  ".join(f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()), flush=True)
        if file:
            print(json.dumps({"what": what, **row}), file=file, flush=True)

    with vanward.Session(o.device) as session, vanward.Session("cpu") as cpu:
        put("machine", device=device.name, vanward=vanward.__version__, tokens=text.tokens, positions=text.rows, block=o.block, k=o.k, ratio=RATIO)
        lists = Lists(session, device, text, o.block)
        coverage(lists, None if o.device == "cpu" else Lists(cpu, Host(), text, o.block), o.k, put)
        steps(session, device, text, lists.forecast, o.block, o.k, put)


if __name__ == "__main__":
    main()
