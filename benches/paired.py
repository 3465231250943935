#!/usr/bin/env python3
"""Runs two builds of benches/attention_rate.rs in turn and prints a Markdown table of both.

    benches/paired.py BEFORE AFTER ROUNDS [PART…]
    benches/paired.py 'VANWARD_INSTRUCTIONS=avx2 PROGRAM' 'VANWARD_INSTRUCTIONS=avx512 PROGRAM' ROUNDS [PART…]

A program may follow what its environment adds. Each round runs both programs, with the parts of names that choose cases. A figure is the median of its rounds, in GFLOP/s of
the CPU time of one thread; for plain reads it is in GB/s. The order changes from round to round, so that what else the machine
does reaches both alike.
"""

import os
import statistics
import subprocess
import sys


def results(program, parts):
    """name → rate of each case."""
    *settings, path = program.split()
    environment = {**os.environ, **dict(setting.split("=", 1) for setting in settings)}
    lines = subprocess.run([path, *parts], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    for line in lines:
        *name, _, flops, rate = line.split()
        yield " ".join(name), float(rate if name[0] == "read" else flops)


def main(before, after, rounds, *parts):
    rates = {}
    for n in range(int(rounds)):
        order = [(0, before), (1, after)]
        for side, program in order if n % 2 == 0 else order[::-1]:
            for name, rate in results(program, parts):
                rates.setdefault(name, ([], []))[side].append(rate)
    print("| case | before | after | ratio |")
    print("|---|---|---|---|")
    for name, sides in rates.items():
        old, new = map(statistics.median, sides)
        print(f"| {name} | {old:.1f} | {new:.1f} | {new / old:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
