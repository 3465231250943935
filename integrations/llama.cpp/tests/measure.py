#!/usr/bin/env python3
"""CPU time per token of SmolLM2-135M in llama.cpp: stock, dense through Vanward, and sparse. `measure.py BUILD [NAME=VALUE …]`

BUILD is where libggml-vanward.so and llama-driver were built. Names: depth, count, threads, step, release (npm or debian).
The programs stand side by side, each with its prompt decoded, and take turns of `step` tokens, in another order each time; every turn's
CPU time is compared with the stock program's turn for the same tokens.
"""

import os
import pathlib
import random
import statistics
import subprocess
import sys

import releases

VARIANTS = {
    "stock": {},
    "stock -fa off": {},
    "dense": {"VANWARD_GGML_STRATEGY": "dense"},
    "minmax 50%": {"VANWARD_GGML_BUDGET": "50%"},
    "minmax 25%": {"VANWARD_GGML_BUDGET": "25%"},
    "axis 25%": {"VANWARD_GGML_BUDGET": "25%", "VANWARD_GGML_METHOD": "axis"},
}


def main(build, settings):
    release = {"npm": releases.npm, "debian": releases.debian}[settings.pop("release", "npm")]()
    step = int(settings.pop("step", 16))
    wanted = settings.pop("variants", ",".join(VARIANTS)).split(",")
    arguments = [f"{name}={value}" for name, value in settings.items()]
    command = release.command(build / "llama-driver", releases.model(), "steps", f"text={releases.text(build)}", *arguments)
    programs = {}
    for name in wanted:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("VANWARD_", "GGML_"))}
        if not name.startswith("stock"):
            environment |= {"GGML_BACKEND_PATH": str(build / "libggml-vanward.so"), "VANWARD_GGML_DENSE_BELOW": "0", **VARIANTS[name]}
        flash = ["flash=0"] if name.endswith("-fa off") else []
        programs[name] = subprocess.Popen(command + flash, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL)
    for program in programs.values():
        program.stdout.readline()
    turns = {name: [] for name in wanted}
    for _ in range(int(settings["count"]) // step):
        for name in random.sample(wanted, len(wanted)):
            programs[name].stdin.write(f"{step}\n")
            programs[name].stdin.flush()
            _, tokens, cpu, wall = programs[name].stdout.readline().split()
            turns[name].append((float(cpu) / int(tokens), float(wall) / int(tokens)))
    results = {name: program.communicate()[0].splitlines() for name, program in programs.items()}
    tops = {name: next(line for line in lines if line.startswith("tops")).split()[1:] for name, lines in results.items()}
    print("| | CPU ms per token | × stock | wall ms | × stock | loss | top token equal |\n|---|---|---|---|---|---|---|")
    for name in wanted:
        cells = [name]
        for clock in range(2):
            ratios = [turn[clock] / stock[clock] for turn, stock in zip(turns[name], turns["stock"])]
            cells += [f"{1e3 * statistics.median(turn[clock] for turn in turns[name]):.1f}", f"{statistics.median(ratios):.2f}"]
        loss = next(line for line in results[name] if line.startswith("tokens")).split()[3]
        equal = sum(a == b for a, b in zip(tops[name], tops["stock"])) / len(tops["stock"])
        print(f"| {' | '.join(cells)} | {float(loss):.4f} | {100 * equal:.1f} % |", flush=True)


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    main(pathlib.Path(sys.argv[1]).resolve(), {"depth": "4096", "count": "256", "threads": "1", **given})
