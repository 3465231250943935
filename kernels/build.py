#!/usr/bin/env python3
"""Compiles kernels/FAMILY/*.cu to kernels/ptx/FAMILY/*.ptx and writes kernels/ptx/manifest.json.

    build.py                 compile everything (fetches the CUDA 12.4 compiler into .cache/ the first time; needs no GPU and no toolkit)
    build.py --check-ptxas   assemble every PTX for each architecture it must run on; print registers, spills and stack; fail on
                             spills or stack in any kernel that its source does not list in a line "// cold: name, name", and on
                             machine code that is not what is committed

A source is compiled for each target of its line "// targets: compute_80, compute_90a" (verify/verify.cu -> ptx/verify/verify.compute_80.ptx, …),
and the PTX is assembled for the first device that it runs on (cubin/verify/verify.compute_80.cubin): a driver takes 20 s to do that itself.
Includes are relative to kernels/. tests/ptx_manifest.rs checks, without a compiler, that what is committed is what the sources say.
"""

import argparse
import ctypes
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
CUBIN = KERNELS / "cubin"
TOOLCHAIN = KERNELS.parent / ".cache" / "cuda-12.4"
PACKAGES = {
    "nvidia-cuda-nvrtc-cu12": "12.4.127",
    "nvidia-cuda-runtime-cu12": "12.4.127",
    "nvidia-cuda-nvcc-cu12": "12.4.131",
}
FLAGS = ["--std=c++17", "--restrict", "--no-display-error-number"]
# What a PTX target has to assemble for: it runs on every later chip, except that one with an "a" runs on its own only. Machine code
# is committed for the first; it runs on later chips of the same major version.
ARCHITECTURES = {"compute_80": ["sm_80", "sm_89", "sm_90"], "compute_90": ["sm_90"], "compute_90a": ["sm_90a"]}


def toolchain() -> pathlib.Path:
    root = TOOLCHAIN / "nvidia"
    if not (TOOLCHAIN / "complete").exists():
        requirements = [f"{name}=={version}" for name, version in PACKAGES.items()]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--target", TOOLCHAIN, *requirements], check=True)
        (TOOLCHAIN / "complete").touch()
    return root


def directive(source: pathlib.Path, name: str) -> list[str]:
    found = re.search(rf"^// {name}: (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    return re.split(r",\s*", found.group(1).strip()) if found else []


def outputs():
    """Every (source, target, PTX path)."""
    for source in sorted(KERNELS.glob("*/*.cu")):
        targets = directive(source, "targets")
        if not targets:
            sys.exit(f'{source.relative_to(KERNELS)} has no line "// targets: …"')
        for target in targets:
            yield source, target, PTX / source.parent.name / f"{source.stem}.{target}.ptx"


class Nvrtc:
    def __init__(self, root: pathlib.Path):
        self.lib = ctypes.CDLL(str(root / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.include = root / "cuda_runtime" / "include"

    def check(self, result: int):
        if result:
            raise RuntimeError(self.lib.nvrtcGetErrorString(result).decode())

    def text(self, program, what: str) -> str:
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.value.decode("utf-8")

    def compile(self, source: pathlib.Path, target: str) -> str:
        program = ctypes.c_void_p()
        self.check(self.lib.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
        # Header paths reach the compiler only as search folders, so that no machine's path ends up in the PTX.
        options = [f"--gpu-architecture={target}", *FLAGS, f"--include-path={KERNELS}", f"--include-path={self.include}"]
        result = self.lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        log = self.text(program, "ProgramLog").strip()
        if log:
            print(log, file=sys.stderr)
        if result or "warning" in log:
            sys.exit(f"{source.name} does not compile cleanly for {target}")
        return self.text(program, "PTX")


def cubin_of(ptx: pathlib.Path) -> pathlib.Path:
    return CUBIN / ptx.relative_to(PTX).with_suffix(".cubin")


def assemble(ptx: pathlib.Path, arch: str, to: pathlib.Path) -> str:
    """What the assembler says of each kernel."""
    ptxas = toolchain() / "cuda_nvcc" / "bin" / "ptxas"
    ptxas.chmod(0o755)
    run = subprocess.run([ptxas, "-v", f"-arch={arch}", ptx, "-o", to], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return run.stderr


def sha256(paths) -> dict[str, str]:
    return {p.relative_to(KERNELS).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths)}


def build():
    nvrtc = Nvrtc(toolchain())
    for stale in [*PTX.rglob("*.ptx"), *CUBIN.rglob("*.cubin")]:
        stale.unlink()
    targets = {}
    for source, target, ptx in outputs():
        ptx.parent.mkdir(parents=True, exist_ok=True)
        ptx.write_text(nvrtc.compile(source, target), encoding="utf-8")
        targets[ptx.relative_to(KERNELS).as_posix()] = target
        cubin_of(ptx).parent.mkdir(parents=True, exist_ok=True)
        assemble(ptx, ARCHITECTURES[target][0], cubin_of(ptx))
    manifest = {
        "compiler": PACKAGES,
        "flags": FLAGS,
        "targets": targets,
        "sources": sha256([*KERNELS.glob("*/*.cu"), *KERNELS.glob("*/*.cuh"), KERNELS / "build.py"]),
        "ptx": sha256(PTX.rglob("*.ptx")),
        "cubin": sha256(CUBIN.rglob("*.cubin")),
    }
    (PTX / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"{len(targets)} files in {PTX.relative_to(KERNELS.parent)} and in {CUBIN.relative_to(KERNELS.parent)}")


def check_ptxas():
    failures = []
    folder = tempfile.TemporaryDirectory()
    assembled = pathlib.Path(folder.name) / "cubin"
    print(f"{'kernel':32} {'for':7} {'registers':>9} {'spills':>6} {'stack':>6} {'shared':>6}")
    for source, target, ptx in outputs():
        cold = directive(source, "cold")
        for arch in ARCHITECTURES[target]:
            entries = assemble(ptx, arch, assembled).split("Compiling entry function '")[1:]
            if arch == ARCHITECTURES[target][0] and assembled.read_bytes() != cubin_of(ptx).read_bytes():
                failures.append(f"{cubin_of(ptx).relative_to(KERNELS)} is not what {ptx.relative_to(KERNELS)} assembles to")
            for entry in entries:
                kernel = entry.split("'")[0]
                used = {}
                for key, pattern in (("registers", r"Used (\d+) registers"), ("stack", r"(\d+) bytes stack frame"),
                                     ("stores", r"(\d+) bytes spill stores"), ("loads", r"(\d+) bytes spill loads"),
                                     ("shared", r"(\d+) bytes smem")):
                    found = re.search(pattern, entry)
                    used[key] = int(found.group(1)) if found else 0
                spills = used["stores"] + used["loads"]
                print(f"{kernel:32} {arch:7} {used['registers']:9} {spills:6} {used['stack']:6} {used['shared']:6}")
                if kernel not in cold and (spills or used["stack"]):
                    failures.append(f"{kernel} for {arch}: {spills} bytes spilled, {used['stack']} bytes of stack")
    if failures:
        sys.exit("\n".join(failures))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--check-ptxas", action="store_true")
if parser.parse_args().check_ptxas:
    check_ptxas()
else:
    build()
