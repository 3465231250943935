#!/usr/bin/env python3
"""Draws integrations/llama.cpp/time-per-token.svg: what a token takes against the tokens in the cache, as pages of benches/results have it.

    benches/llama_plot.py           writes the picture
    benches/llama_plot.py --check   fails where the picture is another one than the pages' figures give

Every figure is read from a table of a page, by the heading above it, the first cell of its row and the head of its column.
"""

import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / "integrations/llama.cpp/time-per-token.svg"
GPU, CPU = "2026-11-26-h200-llama", "2026-11-27-cpu-llama"
INK, LIGHT = "#333", "#ddd"
STOCK, DENSE, SPARSE, QUARTER, QUARTER_AXIS = "#7f7f7f", "#e07b00", "#1f77b4", "#9467bd", "#2ca02c"
WIDTH, HEIGHT, TOP, BOTTOM = 1000, 360, 52, 44


def tables(page):
    """The tables of a page, as lists of rows of cells, by the heading above them."""
    found, heading, inside = {}, "", False
    for line in (ROOT / f"benches/results/{page}.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            if not inside:
                found.setdefault(heading, []).append([])
            found[heading][-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line.startswith("|")
    return found


def figure(table, row, column):
    """The text of one cell, which is a number."""
    place = table[0].index(column)
    (cells,) = (cells for cells in table[2:] if cells[0] == row)
    float(cells[place])
    return cells[place]


def series_of_gpu():
    depths, quarters = tables(GPU)["AXIS in blocks of 16"][:2]
    for name, row, colour in [("stock", "stock", STOCK), ("dense", "dense", DENSE), ("4,096 tokens", "axis, 4,096 tokens", SPARSE)]:
        yield name, colour, [(int(depth), figure(depths, row, depth)) for depth in depths[0][1:]]
    yield "a quarter", QUARTER, [(int(depth), figure(quarters, "axis, blocks of 16", depth)) for depth in quarters[0][1:]]


def series_of_cpu():
    found = tables(CPU)
    of_4096 = found["Quality, 2,000 tokens after 4,096"][0]
    of_7000 = found["Time at 7,000 tokens"][0]
    time = "CPU ms per token"
    for name, row, later, colour in [
        ("stock", "stock", "stock", STOCK),
        ("dense", "every token, dense", "every token, dense", DENSE),
        ("a quarter, MINMAX", "MINMAX, 25 %", "MINMAX, 25 %", QUARTER),
        ("a quarter, AXIS", "AXIS, 25 %", None, QUARTER_AXIS),
    ]:
        yield name, colour, [(4096, figure(of_4096, row, time))] + ([(7000, figure(of_7000, later, time))] if later else [])


def text(x, y, words, anchor="start", fill=INK, size=12):
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{words}</text>'


def panel(left, width, title, unit, below, ticks, marks, series):
    """A plot whose abscissa has `ticks` at equal factors, and whose ordinate has `marks`, the lowest at the bottom."""
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    height = HEIGHT - TOP - BOTTOM

    def place(tokens, time):
        x = left + width * (math.log(tokens) - low) / (high - low)
        return round(x, 1), round(TOP + height * (1 - float(time) / marks[-1]), 1)

    yield text(left, 22, title, size=13)
    yield text(left, 40, unit)
    for mark in marks:
        x, y = place(ticks[0], mark)
        yield f'<line x1="{x:g}" y1="{y:g}" x2="{left + width:g}" y2="{y:g}" stroke="{LIGHT}"/>'
        yield text(x - 6, y + 4, f"{mark:g}", "end")
    for tick in ticks:
        x, y = place(tick, 0)
        yield f'<line x1="{x:g}" y1="{TOP}" x2="{x:g}" y2="{y:g}" stroke="{LIGHT}"/>'
        yield text(x, y + 18, f"{tick:,}", "middle")
    yield text(left + width / 2, HEIGHT - 6, below, "middle")
    for name, colour, points in series:
        places = [place(tokens, time) for tokens, time in points]
        yield f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in places)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in places:
            yield f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{colour}"/>'
        x, y = places[-1]
        yield text(x + 8, y + 4, f"{name}: {points[-1][1]}", fill=colour)


def picture():
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *panel(40, 330, "An H200, a model of 8B's shape, Q4_0, one sequence", "ms per token", "tokens in the cache", [4096, 8192, 16384, 32768, 65536, 131072],
               [0, 2, 4, 6, 8, 10, 12], series_of_gpu()),
        *panel(540, 300, "A CPU with AVX-512, one thread, SmolLM2-135M", "ms of CPU time per token",
               "tokens in the cache before the timed ones", [4096, 5120, 6144, 7000],
               [0, 10, 20, 30, 40, 50, 60], series_of_cpu()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if PICTURE.read_text() != picture():
            sys.exit(f"{PICTURE.relative_to(ROOT)} is not what the pages give: benches/llama_plot.py draws it")
    elif len(sys.argv) == 1:
        PICTURE.write_text(picture())
    else:
        sys.exit(__doc__)
