#!/usr/bin/env python3
"""Runs the CUDA cases of the conformance suite, and the GPU suite, on the emulated device.

Usage: run.py <folder of the emulated libcuda.so> [<part of a case's name>]

Each case is a process, as many at a time as there are processors. Every case runs on a device of compute capability 9.0; those of the
conformance suite again with warps, CTAs and copies in other orders while races are looked for, and on a device of 8.0.
"""

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time

DEVICES = {
    "9.0": {},
    "9.0, other orders, races": {"VANWARD_EMULATOR_SEED": "1", "VANWARD_EMULATOR_RACES": "1"},
    "8.0": {"VANWARD_EMULATOR_CAPABILITY": "80", "VANWARD_EMULATOR_MULTIPROCESSORS": "108"},
}

# What an emulated device has not: work that still runs when a call has returned; the time to do so much.
NOT_HERE = {"pinned_memory_is_reused_after_its_stream_has_passed", "selections_of_1000_replays_are_the_same_bits"}
# Takes minutes: once is enough.
LONG = {"cuda::select_follows_sequences_that_grow_and_shrink"}


def executables():
    """The suites, built: name and path."""
    command = ["cargo", "test", "--locked", "--no-run", "--message-format=json", "--test", "conformance", "--test", "gpu"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    messages = [json.loads(line) for line in lines if line.startswith("{")]
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


def cases(executable, environment):
    listed = subprocess.run([executable, "--list"], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    names = re.findall(r"^(\S+): test$", listed, re.MULTILINE)
    return [name for name in names if not name.startswith("cpu::") and name not in NOT_HERE]


def run(job):
    device, executable, case, environment = job
    begin = time.monotonic()
    done = subprocess.run(
        [executable, "--exact", case], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    passed = done.returncode == 0 and "1 passed" in done.stdout
    print(f"{device}: {case} ... {'ok' if passed else 'FAILED'} ({time.monotonic() - begin:.1f} s)", flush=True)
    if not passed:
        print(done.stdout, flush=True)
    return passed


def main(folder, part=""):
    suites, jobs = executables(), []
    for device, settings in DEVICES.items():
        path = os.pathsep.join(filter(None, [os.path.abspath(folder), os.environ.get("LD_LIBRARY_PATH")]))
        library = os.path.join(os.path.abspath(folder), "libcuda.so")
        environment = os.environ | settings | {
            "LD_LIBRARY_PATH": path,
            "VANWARD_REQUIRE_GPU": "1",
            # The emulated driver itself tells which of its functions are called.
            "VANWARD_CUPTI": library,
            "VANWARD_CACHE_OPERATIONS": "1000",
        }
        for suite in ("conformance", "gpu"):
            if suite == "gpu" and settings:
                continue
            names = [name for name in cases(suites[suite], environment) if part in name and not (settings and name in LONG)]
            jobs += [(device, suites[suite], name, environment) for name in names]
    # What takes longest begins first.
    jobs.sort(key=lambda job: job[2] not in LONG)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(run, jobs))
    failed = results.count(False)
    print(f"test result: {'FAILED' if failed else 'ok'}. {len(results) - failed} passed; {failed} failed; 0 ignored")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
