#!/usr/bin/env python3
"""Writes what a GPU benchmark measured as a page under benches/results, one table for each kind of row.

    benches/gpu/page.py NAME SCRIPT ROWS.jsonl      writes benches/results/NAME.md from what benches/gpu/SCRIPT.py --out gave
"""

import ast
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent


def cell(value):
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(rows):
    heads = [key for key in rows[0] if key != "what"]
    lines = [heads, ["---:"] * len(heads)] + [[cell(row[key]) for key in heads] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(name, script, path):
    rows = [json.loads(line) for line in open(path)]
    about = {key: value for key, value in rows[0].items() if key != "what"}
    text = ast.get_docstring(ast.parse((HERE / f"{script}.py").read_text()))
    kinds = dict.fromkeys((row["what"], *(key for key in row)) for row in rows[1:])
    parts = [f"# {script}, {name}", ", ".join(f"{key} {value}" for key, value in about.items()) + ".", text]
    for what, *keys in kinds:
        parts += [f"## {what}", table([row for row in rows[1:] if row["what"] == what and list(row) == keys])]
    (HERE.parent / "results" / f"{name}.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
