#!/usr/bin/env python3
"""Prints what the last `cargo bench` measured as a Markdown table, with the machine and the commit.

    benches/report.py [TARGET_DIR]

In a group that has a function named `read …`, the other functions' bandwidth is also given as a share of it: that is a
plain multi-threaded read of the same bytes, timed in the same run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def command(*words):
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown CPU"


def time(nanoseconds):
    for unit, size in [("s", 1e9), ("ms", 1e6), ("µs", 1e3)]:
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def results(target):
    """(group, function and parameter, bytes or None, median and its 95 % interval in ns) of each benchmark."""
    for path in sorted(Path(target, "criterion").glob("**/new/benchmark.json")):
        about = json.loads(path.read_text())
        median = json.loads(path.with_name("estimates.json").read_text())["median"]
        interval = median["confidence_interval"]
        name = "/".join(part for part in (about["function_id"], about["value_str"]) if part)
        size = (about["throughput"] or {}).get("Bytes")
        yield about["group_id"], name, size, median["point_estimate"], interval["lower_bound"], interval["upper_bound"]


def main(target):
    rows = list(results(target))
    reads = {(group, size): median for group, name, size, median, *_ in rows if name.split()[0] == "read"}
    print(f"`make bench`, commit {command('git', 'rev-parse', '--short', 'HEAD')}, {command('rustc', '--version')}.")
    print(f"{cpu()}, {os.cpu_count()} logical CPUs. Medians with their 95 % intervals.\n")
    print("| benchmark | median | interval | GB/s | share of a plain read |")
    print("|---|---|---|---|---|")
    for group, name, size, median, low, high in rows:
        rate = f"{size / median:.1f}" if size else ""
        read = reads.get((group, size))
        share = f"{100 * read / median:.0f} %" if size and read else ""
        print(f"| {group}/{name} | {time(median)} | {time(low)} … {time(high)} | {rate} | {share} |")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("CARGO_TARGET_DIR", "target"))
