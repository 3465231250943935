"""The driver as the tests play it, with its environment. The first argument of the program that imports this says where it was built."""

import os
import pathlib
import subprocess
import sys

import releases
from output import Output

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


def run(release, model, options, command, further=None, **arguments):
    """`further` is added to the environment."""
    beside = EMULATOR if options and "DEVICES" in options else None
    line = release.command(DRIVER, model, command, *(f"{name}={value}" for name, value in arguments.items()), beside=beside)
    done = subprocess.run(line, env={**environment(options), **(further or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=3000)
    if done.returncode != 0:
        raise AssertionError(f"{options} {command} {arguments}: exit status {done.returncode}\n{done.stdout}{done.stderr[-2000:]}")
    return Output(done.stdout)
