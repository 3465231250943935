#!/usr/bin/env python3
"""CPU time per token of SmolLM2-135M in llama.cpp: stock, dense through Vanward, and sparse. `measure.py BUILD [NAME=VALUE …]`

BUILD is where libggml-vanward.so and llama-driver were built. Names: depth, count, threads, step, release (npm or debian), variants, state, turns.
The programs stand side by side, all with the state of one prompt, and take turns of `step` tokens, in another order each time; every turn's
CPU time is compared with the stock program's turn for the same tokens. CPU time bears other work on the machine; wall time does not. Losses are
over all `count` tokens, also relative to stock's and to that of dense attention, if it is among the variants; the last column is of the
tokens whose logit is .3 ahead of the next in stock. VANWARD_INSTRUCTIONS reaches Vanward; a variant such as `dense on avx2` sets it itself.
state=FILE keeps the prompt's state for further runs of that release and depth: a run on many threads may compute it for those on one.
turns=FILE gets a line of JSON for each turn when it ends.

    depth=7000 count=128                                                      time at 7,000 tokens, one thread
    depth=7000 count=128 threads=2 variants=stock,dense,'minmax 25%'          wall time on two threads, of a machine that does nothing else
    depth=7000 count=8 step=8 threads=16 variants=stock state=prompt          the prompt alone, for runs with state=prompt
    depth=2048 count=128 variants='stock,below the threshold'                 what the library costs where it takes nothing
    depth=4096 count=2000 step=50 variants='stock,dense,every block,minmax 50%,minmax 25%,axis 25%'       quality
    depth=4096 count=800 step=50 variants='stock,dense,minmax 25%,minmax 25% by 32,axis 25%'              and by the size of blocks
"""

import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

import quality
import releases
from output import Output

INSTRUCTIONS = "VANWARD_INSTRUCTIONS"
VARIANTS = {
    "stock": {},
    "stock -fa off": {},
    "below the threshold": {"VANWARD_GGML_DENSE_BELOW": "1000000"},
    "dense": {"VANWARD_GGML_STRATEGY": "dense"},
    "every block": {"VANWARD_GGML_BUDGET": "100%"},
    **{
        f"{method} {budget}{f' by {block}' if block else ''}": {
            "VANWARD_GGML_METHOD": method, "VANWARD_GGML_BUDGET": budget, **({"VANWARD_GGML_BLOCK": str(block)} if block else {})
        }
        for method in ["minmax", "axis"] for budget in ["12%", "25%", "33%", "50%"] for block in [0, 32, 64]
    },
}
USUAL = ["stock", "dense", "minmax 50%", "minmax 25%", "axis 25%"]


def main(build, settings):
    release = {"npm": releases.npm, "debian": releases.debian}[settings.pop("release", "npm")]()
    step = int(settings.pop("step", 16))
    wanted = settings.pop("variants", ",".join(USUAL)).split(",")
    kept, log = settings.pop("state", None), open(settings.pop("turns", os.devnull), "a", buffering=1)
    arguments = [f"{name}={value}" for name, value in settings.items()]
    # The prompt is ggml's whatever the variant: the first program saves its state, and the others begin with that. Without flash attention a state
    # is another one. Each program computes the last two tokens, since Vanward may wait for a graph that writes the cache.
    state = pathlib.Path(kept) if kept else build / f"measure-{os.getpid()}.state"
    command = release.command(build / "llama-driver", releases.model(), "steps", f"text={releases.text(build)}", *arguments, "unsaved=2")
    programs = {}
    for name in wanted:
        environment = {key: value for key, value in os.environ.items() if key == INSTRUCTIONS or not key.startswith(("VANWARD_", "GGML_"))}
        variant, _, instructions = name.partition(" on ")
        if not name.startswith("stock"):
            environment |= {"GGML_BACKEND_PATH": str(build / "libggml-vanward.so"), "VANWARD_GGML_DENSE_BELOW": "0", **VARIANTS[variant],
                            **({INSTRUCTIONS: instructions} if instructions else {})}
        further = "flash=0" if name.endswith("-fa off") else f"state={state}"
        programs[name] = subprocess.Popen([*command, further], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL)
        programs[name].stdout.readline()
    if not kept:
        state.unlink(missing_ok=True)
    turns = {name: [] for name in wanted}
    for _ in range(int(settings["count"]) // step):
        for name in random.sample(wanted, len(wanted)):
            programs[name].stdin.write(f"{step}\n")
            programs[name].stdin.flush()
            _, tokens, cpu, wall = programs[name].stdout.readline().split()
            turns[name].append((float(cpu) / int(tokens), float(wall) / int(tokens)))
            log.write(json.dumps({"variant": name, "tokens": int(tokens), "cpu_s": float(cpu), "wall_s": float(wall)}) + "\n")
    scores = {name: Output(program.communicate()[0]) for name, program in programs.items()}
    losses = {name: score.loss for name, score in scores.items()}
    print("| | CPU ms per token | × stock | wall ms | × stock | loss | over stock | over dense | top token equal | of those that lead by .3 |\n"
          "|---|---|---|---|---|---|---|---|---|---|")
    for name in wanted:
        cells = [name]
        for clock in range(2):
            ratios = [turn[clock] / stock[clock] for turn, stock in zip(turns[name], turns["stock"])]
            cells += [f"{1e3 * statistics.median(turn[clock] for turn in turns[name]):.1f}", f"{statistics.median(ratios):.3f}"]
        cells += quality.cells(losses[name], [losses.get(base) for base in ["stock", "dense"]])
        cells += [f"{100 * share:.1f} %" for share in scores[name].equal_tops(scores["stock"])]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    main(pathlib.Path(sys.argv[1]).resolve(), {"depth": "4096", "count": "256", "threads": "1", **given})
