"""Times two builds of the library in one run, and says what the second one takes of the first one's time.

    python benches/gpu/beside.py BEFORE AFTER [--out FILE] [--rounds N] [--seconds S] [--quick] [SCRIPT ...]

BEFORE and AFTER are folders that `make gpu-bundle` has made, each with benchmarks and a binding of its own. Each SCRIPT (`attention`, …) runs as a
process of one build and then of the other, N rounds long, so that what changes on the machine meets both. Of each measurement the least of the
rounds counts. Rows of both builds are paired by their names and whole numbers, and of these every column of microseconds is compared. Columns of a
peer (torch, copies, reads) are compared, too: that they differ says how much the machine does.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

NOT_TIMES = re.compile(r"over|error|ratio|share|gb|mib|rate|times|missed|speed|bytes|driver|load|host|hits|floor")
PEERS = re.compile(r"torch|copy|read|plain|empty|matmul|sdpa|index_select|memcpy|flashinfer|topk_|single")


def measured(folder, script, arguments, limit):
    """The rows of one run, {} where it does not end well."""
    out = pathlib.Path(f"{script}-{pathlib.Path(folder).name}.jsonl").absolute()
    library = str((pathlib.Path(folder) / "lib/libvanward.so.0").absolute())
    command = [sys.executable, f"benches/gpu/{script}.py", "--out", str(out), *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env={**os.environ, "VANWARD_LIBRARY": library}, timeout=limit, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        print(f"{script} of {folder}: more than {limit:.0f} s", flush=True)
        return {}
    if done.returncode:
        print(f"{script} of {folder}: exit status {done.returncode}\n{done.stderr[-600:]}", flush=True)
    found = {}
    for row in map(json.loads, out.open()):
        if row["what"] == "machine":
            continue
        name = " ".join(str(value) if key == "what" else f"{key}={value}" for key, value in row.items() if not isinstance(value, float))
        times = {key: value for key, value in row.items() if isinstance(value, float) and not NOT_TIMES.search(key)}
        found.update({(script, name, key): value for key, value in times.items()})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs=2, metavar="BUILD")
    parser.add_argument("scripts", nargs="*", default=["attention", "selection", "topk", "predict", "cache", "verify_pack"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after so many")
    parser.add_argument("--quick", action="store_true", help="a few points of each grid")
    parser.add_argument("--out", help="file for one JSON object a measurement")
    options = parser.parse_args()
    begin, arguments = time.monotonic(), ["--quick"] if options.quick else []
    least = [{}, {}]
    for number in range(options.rounds):
        for script in options.scripts:
            for build, folder in enumerate(options.builds):
                left = options.seconds - (time.monotonic() - begin)
                rows = measured(folder, script, arguments, left) if left > 0 else {}
                for key, value in rows.items():
                    least[build][key] = min(value, least[build].get(key, value))
            print(f"round {number + 1}, {script}: {time.monotonic() - begin:.0f} s", flush=True)
    both = [(key, least[0][key], least[1][key]) for key in least[0] if key in least[1] and least[0][key] > 0]
    with open(options.out or os.devnull, "w") as file:
        for (script, name, column), before, after in both:
            file.write(json.dumps(dict(what=script, row=name, column=column, before=before, after=after, ratio=after / before)) + "\n")
    for script in options.scripts:
        for kind, is_peer in (("library", False), ("peers", True)):
            ratios = sorted((after / before, key) for key, before, after in both if key[0] == script and bool(PEERS.search(key[2])) == is_peer)
            if ratios:
                values = [ratio for ratio, _ in ratios]
                print(f"{script:12} {kind:8} {len(values):4} measurements, median {statistics.median(values):.3f}, "
                      f"{values[0]:.3f} … {values[-1]:.3f}, {sum(value > 1.02 for value in values)} above 1.02")
                for ratio, (_, name, column) in ratios[::-1] if not is_peer else []:
                    if ratio > 1.02:
                        print(f"    {ratio:.3f}  {name} {column}")


if __name__ == "__main__":
    main()
