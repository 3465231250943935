#!/usr/bin/env python3
"""Draws the pictures of docs/engine.md: docs/pictures/draw.py writes pages.svg, tiers.svg and streams.svg beside itself."""

from pathlib import Path

INK, LIGHT = "#333", "#999"
BLUE, GREEN, ORANGE, GREY = "#cfe2f9", "#d4edd2", "#fbe0c2", "#eee"


class Picture:
    def __init__(self, width, height):
        self.width, self.height, self.parts = width, height, []

    def box(self, x, y, width, height, fill, text=""):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{INK}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle")

    def text(self, x, y, text, anchor="start", fill=INK):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{text}</text>')

    def arrow(self, x, y, to_x, to_y):
        self.parts.append(f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{LIGHT}" marker-end="url(#tip)"/>')

    def write(self, name):
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" font-family="sans-serif" font-size="12">\n'
                f'<rect width="{self.width}" height="{self.height}" fill="white"/>\n'
                '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
                f'<path d="M0 0 8 4 0 8z" fill="{LIGHT}"/></marker>\n')
        Path(__file__).with_name(name).write_text(head + "\n".join(self.parts) + "\n</svg>\n")


def pages():
    p = Picture(720, 300)
    p.text(20, 24, "page_table [B, max_pages]")
    for row, (name, entries, fill) in enumerate((("sequence 0", (2, 0, 5), BLUE), ("sequence 1", (2, 3, -1), GREEN))):
        y = 36 + row * 30
        p.text(20, y + 18, name)
        for n, entry in enumerate(entries):
            p.box(100 + n * 40, y, 40, 26, GREY if entry in (2, -1) else fill, "−1" if entry < 0 else str(entry))
    p.text(250, 54, "both begin with page 2, which they share;")
    p.text(250, 84, "−1 is no page")
    fills = {0: BLUE, 2: GREY, 3: GREEN, 5: BLUE}
    p.text(20, 132, "k, v [pages, P, Hk, D]")
    for n in range(6):
        p.box(170 + n * 85, 112, 75, 34, fills.get(n, "white"), f"page {n}")
        p.arrow(207 + n * 85, 148, 207 + n * 85, 186)
    p.text(20, 210, "index [pages, rows, Hk, …]")
    for n in range(6):
        p.box(170 + n * 85, 188, 37, 34, fills.get(n, "white"), "Σ")
        p.box(208 + n * 85, 188, 37, 34, fills.get(n, "white"), "Σ")
    p.text(20, 254, "Here a page of P tokens has two blocks of S = P / 2, and so two rows of the index, which uses the same table.")
    p.text(20, 276, "Selection reads the index and names blocks of a sequence; attention finds their tokens through the table.")
    p.write("pages.svg")


def tiers():
    p = Picture(720, 270)
    p.text(20, 40, "host memory")
    p.text(20, 56, "every whole block", fill=LIGHT)
    for n in range(12):
        p.box(150 + n * 46, 24, 42, 34, ORANGE, str(n))
    p.text(20, 190, "device, a layer's pool")
    for n, block in enumerate((12, 11, "")):
        p.box(150 + n * 46, 174, 42, 34, BLUE, str(block))
    for n, block in enumerate((0, 3, 4, 9, 7, "")):
        p.box(310 + n * 46, 174, 42, 34, GREEN, str(block))
    p.text(150, 228, "tail: the two newest blocks")
    p.text(310, 228, "slots: blocks that selections named, one KV head each")
    p.arrow(217, 172, 217 + 440, 62)
    p.text(240, 112, "append: a full block is written back", fill=LIGHT)
    p.arrow(150 + 9 * 46 + 21, 60, 469, 172)
    p.text(530, 150, "fetch: what was missed", fill=LIGHT)
    p.text(20, 256, "resolve gives each selected block its slot; the slot that was named least recently makes room.")
    p.write("tiers.svg")


def streams():
    p = Picture(720, 210)
    lanes = ("caller's stream", "selection", "copies")
    for n, lane in enumerate(lanes):
        p.text(20, 58 + n * 50, lane)
        p.parts.append(f'<line x1="130" y1="{54 + n * 50}" x2="700" y2="{54 + n * 50}" stroke="{LIGHT}"/>')
    p.box(135, 38, 80, 32, GREY, "q, k, v")
    p.box(220, 38, 60, 32, BLUE, "append")
    p.box(300, 38, 170, 32, GREEN, "attention of the guess")
    p.box(520, 38, 70, 32, GREEN, "repair")
    p.box(600, 38, 90, 32, GREY, "MLP")
    p.box(290, 88, 60, 32, BLUE, "update")
    p.box(355, 88, 70, 32, BLUE, "select")
    p.box(430, 138, 85, 32, ORANGE, "fetch")
    p.arrow(280, 60, 290, 96)
    p.arrow(425, 110, 432, 138)
    p.arrow(515, 146, 540, 72)
    p.text(20, 198, "Time runs to the right. The guess is attended while the true list is made and what it lacks travels; repair joins both.")
    p.write("streams.svg")


pages()
tiers()
streams()
