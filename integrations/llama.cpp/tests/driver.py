"""The driver as the tests play it: with what environment, and what it prints. The first argument of the program that imports this says where it was built."""

import os
import pathlib
import re
import subprocess
import sys

import quality
import releases

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
LIBRARY = BUILD / "libggml-vanward.so"
DRIVER = BUILD / "llama-driver"
EMULATOR = releases.ROOT / "build/emulator/release"
LONG = os.environ.get("VANWARD_LLAMA_LONG") == "1"


def environment(options):
    """Without Vanward if `options` is None; otherwise with it, and with these of its options."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VANWARD_", "GGML_", "LLAMA_"))}
    if options is None:
        return clean
    clean = {**clean, "GGML_BACKEND_PATH": str(LIBRARY), **{f"VANWARD_GGML_{key}": str(value) for key, value in options.items()}}
    return {**clean, "LD_LIBRARY_PATH": str(EMULATOR)} if "DEVICES" in options else clean


class Output:
    """What the driver printed."""

    def __init__(self, text):
        self.text = text
        lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        self.counters = (quality.counters(text) or [{}])[-1]
        self.sum = lines.get("sum")
        self.tops = lines.get("tops", "").split()
        self.leads = [float(lead) for lead in lines.get("leads", "").split()]
        self.embeddings = [[float.fromhex(number) for number in found.split()] for found in re.findall(r"^embedding (.*)$", text, re.MULTILINE)]
        self.loss = float(lines["tokens"].split()[2]) if "tokens" in lines else None

    def __getitem__(self, counter):
        return self.counters.get(counter, 0)


def run(release, model, options, command, further=None, **arguments):
    """`further` is added to the environment."""
    beside = EMULATOR if options and "DEVICES" in options else None
    line = release.command(DRIVER, model, command, *(f"{name}={value}" for name, value in arguments.items()), beside=beside)
    done = subprocess.run(line, env={**environment(options), **(further or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=3000)
    if done.returncode != 0:
        raise AssertionError(f"{options} {command} {arguments}: exit status {done.returncode}\n{done.stdout}{done.stderr[-2000:]}")
    return Output(done.stdout)
