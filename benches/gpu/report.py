#!/usr/bin/env python3
"""Turns what the GPU benchmarks wrote into a page under benches/results.

    benches/gpu/report.py NAME TORCH.jsonl FLOORS.jsonl…      writes benches/results/NAME.md

The files come from benches/gpu/verify_pack.py and, one a run, bin/gpu_floors (`./run bench` of the GPU bundle). Of several
runs each figure is the median.
"""

import json
import pathlib
import statistics
import sys

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def rows(path):
    return [json.loads(line) for line in open(path)]


def merged(runs):
    """Rows whose figures are the medians of the runs'; all runs have the same rows in the same order."""
    about = ("what", "device", "batch", "gamma", "alpha", "dim", "call", "tensors", "launches", "packed_bytes")
    return [
        {key: value if key in about else statistics.median(row[key] for row in same) for key, value in same[0].items()}
        for same in zip(*runs)
    ]


def table(head, lines):
    cells = lambda values: "| " + " | ".join(values) + " |"  # noqa: E731
    return "\n".join([cells(head), cells(["---"] + ["---:"] * (len(head) - 1))] + [cells(line) for line in lines])


def us(value):
    return f"{value:.2f}" if value is not None else ""


def targets(floors):
    """(what, target, median and worst of the grid, met) of each promise."""
    verify = [row for row in floors if row["what"] == "verify"]
    packs = [row for row in floors if row["what"] == "verify_pack"]
    host = [row for row in floors if row["what"] == "host_ns"]

    def worst(what, limit, values):
        value, where = max(values)
        met = sum(value <= limit for value, _ in values)
        median = statistics.median(value for value, _ in values)
        verdict = "met" if met == len(values) else f"**missed**: {met} of {len(values)} meet it"
        return [what, f"≤ {limit}", f"{median:.2f}", f"{value:.2f} ({where})", verdict]

    def at(row):
        return f"B={row['batch']} γ={row['gamma']}" + (f" kv={row['dim']}" if "dim" in row else "") + f" α={row['alpha']}"

    def ratios(chosen, top, bottom):
        return [(row[top] / row[bottom], at(row)) for row in chosen]

    small = [row for row in verify if row["batch"] * row["gamma"] <= 4096]
    flat = {}
    for row in verify:
        flat.setdefault((row["batch"], row["gamma"]), []).append(row["graph"])
    spread = [(max(times) / min(times), f"B={b} γ={g}") for (b, g), times in flat.items()]
    megabyte = [row for row in packs if row["packed_bytes"] <= 1 << 20]
    one = lambda batch: [  # noqa: E731
        row for row in packs if (row["batch"], row["gamma"], row["dim"], row["alpha"]) == (batch, 128, 2048, 0.9)
    ]
    over_bare = lambda call: [  # noqa: E731
        ((row["time"] - row["bare"]) / 1e3, f"{row['tensors']} tensors" if row["tensors"] else "B=32 γ=8")
        for row in host if row["call"] == call and row["tensors"] <= 64
    ]
    lines = [
        worst("verify / empty kernel, event, B·γ ≤ 4096", 1.3, ratios(small, "event", "empty")),
        worst("verify / empty kernel, event, B ≤ 1024, γ ≤ 128", 1.5, ratios(verify, "event", "empty")),
        worst("verify, slowest α / fastest α, graph", 1.1, spread),
        worst("verify_pack / two steps, graph", 1.0, ratios(packs, "graph", "two_step_graph")),
        worst("verify_pack / two steps, event", 1.0, ratios(packs, "event", "two_step_event")),
        worst("verify_pack / empty kernel, event, ≤ 1 MB packed", 1.8, ratios(megabyte, "event", "empty")),
        worst("verify_pack − copy, 15 MB, event, µs", 3.0, [(r["event"] - r["copy_event"], at(r)) for r in one(32)]),
        worst("verify_pack / copy, 60 MB, event", 1.15, ratios(one(128), "event", "copy_event")),
        worst("verify, host time over a bare launch, µs", 1.0, over_bare("verify")),
        worst("pack, host time over its bare launches, µs", 1.0, over_bare("pack")),
        worst("verify_pack, host time over its bare launches, µs", 1.0, over_bare("verify_pack")),
    ]
    return table(["", "target", "median", "worst", ""], lines)


def page(floors, torch, name, runs):
    machine, peer = floors[0]["device"], torch[0]
    parts = [
        f"# Verification and packing, {name}",
        f"{machine}; torch {peer['torch']}, vanward {peer['vanward']}. Made by `make gpu-bundle`, `./run bench` on the "
        "machine with the GPU, and `benches/gpu/report.py`. Microseconds, medians. *event*: one call between two CUDA events, "
        "the host's time in it. *graph*: one of several calls in a CUDA graph, GPU time. No cache holds the inputs: it is "
        f"evicted before, and data sets rotate. Calls that are compared in *event* take turns. Medians of {runs} runs of "
        "the whole grid; torch's of one.",
        "## Targets",
        targets(floors),
        f"Kernels loaded, and compiled by the driver or taken from its cache, in {peer['load_microseconds']} µs.",
        "## The host's time in one call, from C",
        "Nanoseconds, B=32 γ=8. *bare*: the same launches, with the same parameters, without the library.",
        table(
            ["call", "tensors", "launches", "time", "bare", "over bare"],
            [
                [r["call"], str(r["tensors"]), str(r["launches"])]
                + [f"{value:.0f}" for value in (r["time"], r["bare"], r["time"] - r["bare"])]
                for r in floors if r["what"] == "host_ns"
            ],
        ),
        "## verify, from C",
        table(
            ["B", "γ", "α", "event", "empty kernel", "ratio", "graph"],
            [
                [str(r["batch"]), str(r["gamma"]), str(r["alpha"]), us(r["event"]), us(r["empty"]),
                 us(r["event"] / r["empty"]), us(r["graph"])]
                for r in floors if r["what"] == "verify"
            ],
        ),
        "## verify_pack, from C",
        table(
            ["B", "γ", "KV width", "α", "MB", "event", "two steps", "copy", "empty", "graph", "two steps", "copy"],
            [
                [str(r["batch"]), str(r["gamma"]), str(r["dim"]), str(r["alpha"]), us(r["packed_bytes"] / 1e6)]
                + [us(r[key]) for key in ("event", "two_step_event", "copy_event", "empty", "graph", "two_step_graph",
                                          "copy_graph")]
                for r in floors if r["what"] == "verify_pack"
            ],
        ),
        "## verify beside torch, from Python",
        table(
            ["B", "γ", "α", "event", "empty", "eager", "compile", "graph", "eager in a graph", "with an end, event", "graph"],
            [
                [str(r["batch"]), str(r["gamma"]), str(r["alpha"])]
                + [us(r.get(key)) for key in ("vanward_event", "empty_event", "torch_event", "compile_event",
                                              "vanward_graph", "torch_graph", "end_event", "end_graph")]
                for r in torch if r["what"] == "verify"
            ],
        ),
        "## verify_pack beside torch (verify, then pack by a mask), from Python",
        table(
            ["B", "γ", "KV width", "α", "MB", "event", "two steps", "torch", "graph", "two steps", "with an end, event", "graph"],
            [
                [str(r["batch"]), str(r["gamma"]), str(r["width"]), str(r["alpha"]), us(r["packed_bytes"] / 1e6)]
                + [us(r.get(key)) for key in ("vanward_event", "two_step_event", "torch_event", "vanward_graph",
                                              "two_step_graph", "end_event", "end_graph")]
                for r in torch if r["what"] == "verify_pack"
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main():
    name, torch, runs = sys.argv[1], rows(sys.argv[2]), [rows(path) for path in sys.argv[3:]]
    floors = merged(runs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(page(floors, torch, name, len(runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
