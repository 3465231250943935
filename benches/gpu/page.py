#!/usr/bin/env python3
"""Writes what the GPU benchmarks measured as pages under benches/results, one table for each kind of row, and as plots.

    benches/gpu/page.py NAME SCRIPT ROWS.jsonl      writes benches/results/NAME.md from what benches/gpu/SCRIPT.py --out gave
    benches/gpu/page.py --plot NAME SELECTION.jsonl ATTENTION.jsonl     writes benches/results/NAME.svg; needs matplotlib
    benches/gpu/page.py --layer NAME LAYER.jsonl                        likewise, of layer.py's rows
    benches/gpu/page.py --throughput NAME THROUGHPUT.jsonl              likewise, of throughput.py's rows
    benches/gpu/page.py --stages NAME STAGES.jsonl                      likewise, of stages.py's rows
"""

import ast
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent / "results"
SELECTED = 8192  # tokens that selection.py chooses: 128 blocks of 64


def cell(value):
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.05 else f"{value:.4f}"


def table(rows):
    heads = [key for key in rows[0] if key != "what"]
    lines = [heads, ["---:"] * len(heads)] + [[cell(row[key]) for key in heads] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows_of(path):
    return [json.loads(line) for line in open(path)]


def page(name, script, path):
    rows = rows_of(path)
    about = {key: value for key, value in rows[0].items() if key != "what"}
    text = ast.get_docstring(ast.parse((HERE / f"{script}.py").read_text()))
    kinds = dict.fromkeys((row["what"], *(key for key in row)) for row in rows[1:])
    parts = [f"# {script}, {name}", ", ".join(f"{key} {value}" for key, value in about.items()) + ".", text]
    for what, *keys in kinds:
        parts += [f"## {what}", table([row for row in rows[1:] if row["what"] == what and list(row) == keys])]
    (RESULTS / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def points(rows, what, past=0):
    """Rows of one sequence of more tokens than `past`, by their tokens."""
    found = {row["tokens"]: row for row in rows if row["what"] == what and row.get("batch", 1) == 1}
    return {tokens: found[tokens] for tokens in sorted(found) if tokens > past}


def series(axes, rows, key, label, more=0.0, **style):
    axes.plot(list(rows), [row[key] + more for row in rows.values()], marker="o", label=label, markersize=4, **style)


def canvas():
    """matplotlib.pyplot, set to write the same file for the same figures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    pyplot.rcParams["svg.hashsalt"] = "vanward"
    pyplot.rcParams["svg.fonttype"] = "none"  # text as text, not as outlines
    return pyplot


def shorter(svg):
    """Without indentation, and with places to a hundredth of a point."""
    return re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r"\s*\n\s*", " ", svg)).replace("> <", "><") + "\n"


def save(figure, name):
    figure.tight_layout()
    path = RESULTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    path.write_text(shorter(path.read_text()))


def plot(name, select, attention):
    """A step beside full attention and selection alone as the context grows, attention alone as the budget does."""
    pyplot = canvas()
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    select, attention = rows_of(select), rows_of(attention)
    device = attention[0]["device"]
    listed, full = points(attention, "attention"), points(attention, "dense")
    minmax, axis = (points(select, what, SELECTED) for what in ("minmax", "axis"))
    copied = "plain copy of the bytes read"
    at = listed[SELECTED]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4))
    series(left, full, "torch_graph", "full attention, torch", color="C3")
    series(left, full, "vanward_graph", "full attention, Vanward", color="C1")
    series(left, minmax, "torch_graph", "select, gather, attend: torch", at["torch_graph"], color="C7")
    series(left, minmax, "vanward_graph", "select, attend: Vanward", at["vanward_graph"], color="C0")
    series(left, axis, "vanward_graph", "… by AXIS", at["vanward_graph"], color="C4")
    left.set(title=f"One layer of a step: {SELECTED // 1024}K tokens of the context", xlabel="tokens of context")
    series(middle, minmax, "torch_graph", "MINMAX, torch", color="C7")
    series(middle, minmax, "vanward_graph", "MINMAX, Vanward", color="C0")
    series(middle, axis, "vanward_graph", "AXIS, Vanward", color="C4")
    series(middle, minmax, "floor", f"MINMAX, {copied}", color="C2", linestyle="--")
    series(middle, axis, "floor", f"AXIS, {copied}", color="C8", linestyle="--")
    middle.set(title="Selection of 128 blocks of 64 tokens", xlabel="tokens of context")
    series(right, listed, "torch_graph", "torch: gather, attend", color="C7")
    series(right, listed, "vanward_graph", "Vanward", color="C0")
    series(right, listed, "copy", copied, color="C2", linestyle="--")
    right.set(title="Attention over a list", xlabel="tokens selected")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(ylabel="µs", ylim=(axes.get_ylim()[0], 3 * axes.get_ylim()[1]))  # room for the legend
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper left")
    figure.suptitle(f"GPU time on one {device}; 32/8 heads of 128 channels, bfloat16, one sequence", fontsize="medium")
    save(figure, name)


def plot_layer(name, path):
    """A layer with attention dense and sparse, by batch and context, over the same layer without attention."""
    pyplot = canvas()
    rows = rows_of(path)
    layers = [row for row in rows if row["what"] == "layer"]
    peer = next(row["flashinfer"] for row in rows if row["what"] == "peer")
    bars = [
        (f"dense, FlashInfer {peer} (XQA)", "C7", [row["dense_xqa"] for row in layers]),
        ("dense, Vanward", "C1", [row["dense"] for row in layers]),
        ("sparse, Vanward", "C0", [min(row["axis_sparse"], row["minmax_sparse"]) for row in layers]),
    ]
    figure, axes = pyplot.subplots(figsize=(9, 3.8))
    width = 0.27
    for n, (label, colour, times) in enumerate(bars):
        places = [i + (n - 1) * width for i in range(len(layers))]
        axes.bar(places, times, 0.92 * width, label=label, color=colour)
        for place, time in zip(places, times):
            axes.text(place, time + 12, f"{time:.0f}", ha="center", fontsize="x-small")
    for i, row in enumerate(layers):
        axes.hlines(row["floor"], i - 1.5 * width, i + 1.5 * width, color="black", linewidth=1, label=None if i else "without attention")
    axes.set_xticks(range(len(layers)), [f"{row['batch']} × {row['context'] // 1024}K\n{row['budget']} read" for row in layers])
    top = 1.1 * max(max(times) for _, _, times in bars)
    axes.set(ylim=(0, top), ylabel="µs a layer", xlabel="sequences × tokens of context, tokens that sparse attention reads")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", loc="upper left")
    axes.set_title(f"A decoder layer of Llama 3 8B's shape on one {rows[0]['device']}, bfloat16, in a CUDA graph", fontsize="medium")
    save(figure, name)


def plot_throughput(name, path):
    """Tokens a second against the batch, and what a layer's time at the largest batch is made of, for each shape and amount of memory."""
    pyplot = canvas()
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = rows_of(path)
    copied = next(row["gb"] for row in rows if row["what"] == "bus")
    key = lambda row: (row["context"], row["kv_heads"], row["gib"])  # noqa: E731
    cases = list(dict.fromkeys(key(row) for row in rows if "gib" in row))
    colours = {"serial": "C0", "async_tls": "C2", "sparda": "C4", "vanward": "C1"}
    figure, panels = pyplot.subplots(2, len(cases), figsize=(3.6 * len(cases), 7), squeeze=False)
    for (above, below), case in zip(panels.T, cases):
        of = lambda what: [row for row in rows if row["what"] == what and key(row) == case]  # noqa: B023, E731
        resident, shared, tiered = of("resident"), of("shared"), of("tiered")
        for what, colour in (("dense", "C7"), ("sparse", "black")):
            above.plot([row["batch"] for row in resident], [row[f"tokens_{what}"] for row in resident], marker="o", markersize=4, color=colour,
                       label=f"resident, {what}")
        for strategy, colour in colours.items():
            found = [row for row in tiered if row["strategy"] == strategy]
            above.plot([row["batch"] for row in found], [row["tokens"] for row in found], marker="o", markersize=4, color=colour,
                       label=strategy.upper())
        above.set_xscale("log", base=2)
        above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        above.xaxis.set_minor_locator(NullLocator())
        above.set(title=f"{case[0] // 1024}K tokens, 32/{case[1]} heads, {case[2]:.0f} GiB", xlabel="sequences", ylim=(0, None))
        above.grid(alpha=0.3)
        whole = {row["batch"]: row for row in resident + shared}
        for n, strategy in enumerate(colours):
            row = max((row for row in tiered if row["strategy"] == strategy), key=lambda row: row["batch"])
            floor, sparse = whole[row["batch"]]["floor"], whole[row["batch"]]["sparse"]
            bottom = 0.0
            for top, colour, label in ((floor, "C7", "without attention"), (sparse, "C0", "selection, attention"), (row["layer"], "C3", "offload adds")):
                below.bar(n, max(0.0, top - bottom), 0.7, bottom, color=colour, label=None if n else label)
                bottom = max(bottom, top)
            below.hlines(row["mib"] * 2**20 / copied / 1e3, n - 0.42, n + 0.42, color="black", label=None if n else "the misses at a copy's rate")
        names = [f"{s.upper()}\n{max(row['batch'] for row in tiered if row['strategy'] == s)}" for s in colours]
        below.set_xticks(range(len(colours)), names, fontsize="x-small")
        below.set(xlabel="strategy, sequences")
        below.grid(axis="y", alpha=0.3)
        below.set_axisbelow(True)
    panels[0][0].set(ylabel="tokens a second")
    panels[1][0].set(ylabel="µs a layer")
    for row in panels:
        row[0].set_ylim(0, 1.45 * row[0].get_ylim()[1])  # room for the legend
        row[0].legend(fontsize="x-small", loc="upper left")
    figure.suptitle(f"Layers of an 8B shape on one {rows[0]['device']}, at a fixed amount of GPU memory for keys and values", fontsize="medium")
    save(figure, name)


LANES = {  # of plot_stages, from the top: a stage, or those that share a lane, and its colour
    ("projections", "output, MLP"): "C7",
    ("append", "write back"): "C5",
    ("summaries",): "C9",
    ("recall, predict", "remember scores"): "C8",
    ("selection",): "C0",
    ("find, give",): "C4",
    ("copies",): "C3",
    ("attention",): "C2",
    ("repair",): "C1",
}


def plot_stages(name, path):
    """When the stages of a layer run, by each strategy, for each batch."""
    pyplot = canvas()
    rows = rows_of(path)
    of = lambda what: [row for row in rows if row["what"] == what]  # noqa: E731
    batches, strategies = (list(dict.fromkeys(row[key] for row in of("layer"))) for key in ("batch", "strategy"))
    lane = {stage: n for n, stages in enumerate(LANES) for stage in stages}
    colours = list(LANES.values())
    figure, panels = pyplot.subplots(len(strategies), len(batches), figsize=(6.5 * len(batches), 1.75 * len(strategies)), squeeze=False, sharex="col")
    for column, batch in zip(panels.T, batches):
        for axes, strategy in zip(column, strategies):
            mine = lambda row: row["batch"] == batch and row["strategy"] == strategy  # noqa: B023, E731
            layer = next(filter(mine, of("layer")))
            for row in filter(mine, of("stage")):
                n = lane[row["stage"]]
                style = dict(color="white", edgecolor=colours[n], hatch="/////", linewidth=0.8) if row["ahead"] else dict(color=colours[n])
                axes.barh(n, row["end"] - row["start"], 0.8, left=row["start"], **style)
            axes.axvline(layer["trace"], color="black", linewidth=0.8)
            axes.set_yticks(range(len(LANES)), [", ".join(stages) for stages in LANES], fontsize=6)
            axes.invert_yaxis()
            title = f"{strategy.upper()}, {batch} sequence{'s' if batch > 1 else ''}"
            axes.set_title(f"{title}: {layer['trace']:.0f} µs, {layer['path']:.0f} from append to result; {layer['graph']:.0f} untraced", fontsize="small")
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
        column[-1].set(xlabel="µs from the layer's beginning", xlim=(0, None))
    figure.suptitle(f"Stages of a layer by torch's profiler on one {rows[0]['device']}; hatched: for the next layer or step", fontsize="medium")
    save(figure, name)


if __name__ == "__main__":
    if sys.argv[1] == "--plot":
        plot(*sys.argv[2:])
    elif sys.argv[1] == "--layer":
        plot_layer(*sys.argv[2:])
    elif sys.argv[1] == "--throughput":
        plot_throughput(*sys.argv[2:])
    elif sys.argv[1] == "--stages":
        plot_stages(*sys.argv[2:])
    else:
        page(*sys.argv[1:])
