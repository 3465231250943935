#!/usr/bin/env python3
"""Compiles kernels/FAMILY/*.cu to kernels/ptx/FAMILY/*.ptx, which is committed, and assembles that to machine code, which is not.

    build.py                       compile the sources whose inputs changed, and assemble what that gave as --check-ptxas does
    build.py --all                 compile every source
    build.py --only select/means   compile kernels/select/means.cu alone, changed or not; several names may follow
    build.py --assemble            assemble the PTX whose machine code is missing or old into kernels/cubin, which git ignores
    build.py --check-ptxas         assemble every PTX for each architecture it must run on; print registers, spills and stack; fail on
                                   spills or stack in any kernel that its source does not list in a line "// cold: name, name". What it
                                   assembles for the first device of each PTX is kept, as by --assemble

The CUDA 12.4 compiler is fetched into .cache/ the first time; no GPU and no toolkit is needed.

A source is compiled for each target of its line "// targets: compute_80, compute_90a" (verify/verify.cu -> ptx/verify/verify.compute_80.ptx, …).
Kernels of compute_80 that are those of compute_90 without what lets them start early are kept once, in the file of compute_90: a line
"// .entry name" stands for each in the other file, which does not exist where it would hold nothing else. expanded, here and in build.rs, puts
them back.
The inputs of a PTX file are the source and the headers that it includes, without comments, the target, the compiler's version and its flags.
kernels/ptx/manifest.json has a line for each PTX file: the hash of its inputs and its own. After a merge, take either side's files and run
`make kernels`: what agrees with neither side's line is compiled again.

The PTX is assembled for the first device that it runs on (cubin/verify/verify.compute_80.cubin, next to a copy of the PTX): a driver takes
20 s to do that itself. build.rs puts machine code into the library where the copy equals the PTX.
Includes are relative to kernels/. tests/ptx_manifest.rs checks, without a compiler, that the committed PTX is what the sources say.
"""

import argparse
import concurrent.futures
import ctypes
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
CUBIN = KERNELS / "cubin"
MANIFEST = PTX / "manifest.json"
TOOLCHAIN = KERNELS.parent / ".cache" / "cuda-12.4"
PACKAGES = {
    "nvidia-cuda-nvrtc-cu12": "12.4.127",
    "nvidia-cuda-runtime-cu12": "12.4.127",
    "nvidia-cuda-nvcc-cu12": "12.4.131",
}
FLAGS = ["--std=c++17", "--restrict", "--no-display-error-number"]
# What a PTX target has to assemble for: it runs on every later chip, except that one with an "a" runs on its own only. Machine code
# is made for the first; it runs on later chips of the same major version.
ARCHITECTURES = {"compute_80": ["sm_80", "sm_89", "sm_90"], "compute_90": ["sm_90"], "compute_90a": ["sm_90a"]}


def toolchain() -> pathlib.Path:
    root = TOOLCHAIN / "nvidia"
    if not (TOOLCHAIN / "complete").exists():
        requirements = [f"{name}=={version}" for name, version in PACKAGES.items()]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--target", TOOLCHAIN, *requirements], check=True)
        (root / "cuda_nvcc" / "bin" / "ptxas").chmod(0o755)
        (TOOLCHAIN / "complete").touch()
    return root


def in_parallel(function, jobs: list) -> list:
    """The results, in order. Processes, because the compiler library compiles one program at a time."""
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, jobs))


# --- what there is to compile ----------------------------------------------------------------------------------------------


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


def name_of(path: pathlib.Path) -> str:
    """The path inside kernels/ptx without its extension: the key in the manifest."""
    return path.relative_to(PTX).with_suffix("").as_posix()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def included(source: pathlib.Path) -> list[pathlib.Path]:
    """The source and the headers that it includes, directly or through others, sorted."""
    found, open_ones = {source}, [source]
    while open_ones:
        for name in re.findall(r'^#include "(.+)"', open_ones.pop().read_text(encoding="utf-8"), re.MULTILINE):
            header = KERNELS / name
            if header not in found:
                found.add(header)
                open_ones.append(header)
    return sorted(found)


def without_comments(text: str) -> str:
    """A line that has a quotation mark before its comment keeps the comment."""
    lines = (line if '"' in line.split("//")[0] else line.split("//")[0] for line in text.splitlines())
    return "".join(line.strip() + "\n" for line in lines if line.strip())


def inputs(source: pathlib.Path, target: str) -> str:
    """The hash of everything that the PTX follows from; tests/ptx_manifest.rs computes it, too."""
    text = "".join(f"{name}=={version}\n" for name, version in sorted(PACKAGES.items()))
    text += "".join(f"{flag}\n" for flag in [*FLAGS, target])
    for path in included(source):
        text += f"// {path.relative_to(KERNELS).as_posix()}\n" + without_comments(path.read_text(encoding="utf-8"))
    return sha256(text.encode())


# --- PTX -------------------------------------------------------------------------------------------------------------------


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

    def compile(self, source: pathlib.Path, target: str) -> tuple[str, str]:
        """The PTX, empty if there is an error, and the compiler's messages."""
        program = ctypes.c_void_p()
        self.check(self.lib.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
        # Header paths reach the compiler only as search folders, so that no machine's path ends up in the PTX.
        options = [f"--gpu-architecture={target}", *FLAGS, f"--include-path={KERNELS}", f"--include-path={self.include}"]
        result = self.lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        log = self.text(program, "ProgramLog").strip()
        return "" if result or "warning" in log else self.text(program, "PTX"), log


def shortened(ptx: str) -> str:
    """PTX without comments, indentation, blank lines and the constants that no instruction names, and with short names: registers as r12 and not
    %r12, parameters as P0, labels, which a function has for itself, as $34."""
    lines = (re.sub(r"[ \t]+", " ", line.split("//")[0].strip()).replace(", ", ",") for line in ptx.splitlines())
    names = ((r"\$L__BB\d+_", "$"), (r"%rd(?=[\d<])", "%d"), (r"%([a-z]{1,2})(?=[\d<])", r"\1"), (r"\b\w+_param_(?=\d)", "P"))
    for pattern, name in names:
        lines = [re.sub(pattern, name, line) for line in lines]
    lines = [line for line in lines if line]
    uses = {}
    for line in lines:
        for word in re.findall(r"[\w$]+", line):
            uses[word] = uses.get(word, 0) + 1
    declared = re.compile(r"\.(?:global|const) (?:\.\w+ |\d+ )*([\w$]+)(?:\[\d*\])?(?: =.*)?;$")
    unused = lambda line: (found := declared.match(line)) and uses[found.group(1)] == 1
    return "".join(line + "\n" for line in lines if not unused(line))


def for_8_0(ptx: str) -> str:
    """PTX of compute_90 for compute_80, where that is the same but for what lets kernels start early: the instructions griddepcontrol."""
    lines = (line for line in ptx.splitlines() if not line.startswith("griddepcontrol"))
    return "".join(line.replace(".target sm_90", ".target sm_80") + "\n" for line in lines)


def parts(ptx: str) -> dict[str, str]:
    """What stands before the first kernel, as "", then the text of each kernel up to the next one."""
    return {re.match(r"(?:\.visible \.entry (\w+))?", part)[1] or "": part for part in re.split(r"(?m)^(?=\.visible \.entry )", ptx)}


def shared(older: str, newer: str) -> str:
    """PTX of compute_80 as it is kept beside that of compute_90; empty where it need not be kept."""
    if older == for_8_0(newer):
        return ""
    other = parts(for_8_0(newer))
    return "".join(f"// .entry {name}\n" if name and other.get(name) == text else text for name, text in parts(older).items())


def expanded(kept: str, newer: str) -> str:
    """The reverse of shared."""
    other = parts(for_8_0(newer))
    return re.sub(r"(?m)^// \.entry (\w+)\n", lambda found: other[found[1]], kept)


def newer_than(ptx: pathlib.Path) -> str:
    """The PTX of compute_90 beside a file of compute_80, or nothing."""
    newer = ptx.with_name(ptx.name.replace(".compute_80.", ".compute_90."))
    return newer.read_text(encoding="utf-8") if newer != ptx and newer.exists() else ""


def kept_of(ptx: pathlib.Path) -> str:
    """What the PTX file holds, or would hold."""
    return ptx.read_text(encoding="utf-8") if ptx.exists() else for_8_0(newer_than(ptx))


def text_of(ptx: pathlib.Path) -> str:
    """The PTX, whole."""
    return expanded(kept_of(ptx), newer_than(ptx))


def compiled(job) -> tuple[str, str]:
    source, target, ptx = job
    text, log = Nvrtc(toolchain()).compile(source, target)
    if text:
        ptx.parent.mkdir(parents=True, exist_ok=True)
        ptx.write_text(shortened(text), encoding="utf-8")
    else:
        log += f"\n{source.relative_to(KERNELS)} does not compile cleanly for {target}"
    return log, name_of(ptx)


def recorded() -> dict[str, set]:
    """What the manifest says of each PTX file: pairs of hashes, of which an unfinished merge may leave two."""
    lines = {}
    text = MANIFEST.read_text(encoding="utf-8") if MANIFEST.exists() else ""
    for name, of_inputs, of_ptx in re.findall(r'^ *"(.+)": \{"inputs": "(\w+)", "ptx": "(\w+)"\}', text, re.MULTILINE):
        lines.setdefault(name, set()).add((of_inputs, of_ptx))
    return lines


def build(everything: bool, only: list[str]):
    jobs = list(outputs())
    unknown = set(only) - {f"{source.parent.name}/{source.stem}" for source, _, _ in jobs}
    if unknown:
        sys.exit(f"no such source: {', '.join(sorted(unknown))}")
    for stale in set(PTX.rglob("*.ptx")) - {ptx for _, _, ptx in jobs}:
        stale.unlink()

    wanted = {name_of(ptx): inputs(source, target) for source, target, ptx in jobs}
    known = recorded()

    def up_to_date(ptx: pathlib.Path) -> bool:
        return (wanted[name_of(ptx)], sha256(kept_of(ptx).encode())) in known.get(name_of(ptx), ())

    def chosen(source: pathlib.Path, ptx: pathlib.Path) -> bool:
        return f"{source.parent.name}/{source.stem}" in only if only else everything or not up_to_date(ptx)

    changed = [job for job in jobs if chosen(job[0], job[2])]
    unchanged = {ptx for _, _, ptx in jobs if up_to_date(ptx)}
    toolchain()  # so that not each process fetches it
    logs = in_parallel(compiled, changed)
    failed = [log for log, _ in logs if log]
    for _, _, ptx in jobs:
        if ptx.exists() and (newer := newer_than(ptx)):
            kept = shared(text_of(ptx), newer)
            ptx.write_text(kept, encoding="utf-8") if kept else ptx.unlink()
    entries = {}
    for source, target, ptx in jobs:
        name = name_of(ptx)
        is_new = (source, target, ptx) in changed or ptx in unchanged
        # What was left as it is keeps its line, so that the test of the manifest still tells that it is old.
        text = kept_of(ptx)
        pairs = [(wanted[name], sha256(text.encode()))] if is_new and text else sorted(known.get(name, ()))
        if pairs:
            entries[name] = pairs[0]
    lines = [f'    "{name}": {{"inputs": "{a}", "ptx": "{b}"}}' for name, (a, b) in sorted(entries.items())]
    head = {"build.py": sha256(pathlib.Path(__file__).read_bytes()), "compiler": PACKAGES, "flags": FLAGS}
    if failed:
        sys.exit("\n\n".join(failed))
    MANIFEST.write_text(json.dumps(head, indent=2)[:-2] + ',\n  "ptx": {\n' + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")
    print(f"{len(changed)} of {len(jobs)} files in {PTX.relative_to(KERNELS.parent)} compiled")
    if changed:
        check_ptxas(changed)


# --- machine code ------------------------------------------------------------------------------------------------------------


def assemble(ptx: pathlib.Path, arch: str, to: pathlib.Path) -> str:
    """What the assembler says of each kernel."""
    ptxas = toolchain() / "cuda_nvcc" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".ptx") as file:
        file.write(text_of(ptx))
        file.flush()
        run = subprocess.run([ptxas, "-v", f"-arch={arch}", file.name, "-o", to], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return run.stderr


def assembled(job):
    """What the assembler says; the machine code is kept."""
    _, target, ptx = job
    copy = CUBIN / ptx.relative_to(PTX)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.unlink(missing_ok=True)
    text = text_of(ptx)
    said = assemble(ptx, ARCHITECTURES[target][0], copy.with_suffix(".cubin"))
    copy.write_text(text, encoding="utf-8")
    return said


def assemble_all():
    jobs = list(outputs())
    kept = {CUBIN / ptx.relative_to(PTX) for _, _, ptx in jobs}
    for stale in {*CUBIN.glob("*/*.ptx"), *CUBIN.glob("*/*.cubin")}:
        if stale.with_suffix(".ptx") not in kept:
            stale.unlink()

    def up_to_date(ptx: pathlib.Path) -> bool:
        copy = CUBIN / ptx.relative_to(PTX)
        return copy.exists() and copy.read_text(encoding="utf-8") == text_of(ptx)

    old = [job for job in jobs if not up_to_date(job[2])]
    toolchain()
    in_parallel(assembled, old)
    print(f"{len(old)} of {len(jobs)} files in {CUBIN.relative_to(KERNELS.parent)} assembled")


def checked(job) -> tuple[list[str], list[str]]:
    """A line for each kernel, and what is wrong."""
    source, target, ptx = job
    cold, lines, failures = directive(source, "cold"), [], []
    first, *others = ARCHITECTURES[target]
    said = {first: assembled(job)}
    # Where there is PTX of compute_90, a device of 9.0 takes that.
    for arch in (each for each in others if each != "sm_90" or "compute_90" not in directive(source, "targets")):
        with tempfile.NamedTemporaryFile() as file:
            said[arch] = assemble(ptx, arch, pathlib.Path(file.name))
    for arch, text in said.items():
        for entry in text.split("Compiling entry function '")[1:]:
            kernel = entry.split("'")[0]
            used = {}
            for key, pattern in (("registers", r"Used (\d+) registers"), ("stack", r"(\d+) bytes stack frame"),
                                 ("stores", r"(\d+) bytes spill stores"), ("loads", r"(\d+) bytes spill loads"),
                                 ("shared", r"(\d+) bytes smem")):
                found = re.search(pattern, entry)
                used[key] = int(found.group(1)) if found else 0
            spills = used["stores"] + used["loads"]
            lines.append(f"{kernel:32} {arch:7} {used['registers']:9} {spills:6} {used['stack']:6} {used['shared']:6}")
            if kernel not in cold and (spills or used["stack"]):
                failures.append(f"{kernel} for {arch}: {spills} bytes spilled, {used['stack']} bytes of stack")
    return lines, failures


def check_ptxas(jobs):
    toolchain()
    results = in_parallel(checked, jobs)
    print(f"{'kernel':32} {'for':7} {'registers':>9} {'spills':>6} {'stack':>6} {'shared':>6}")
    for lines, _ in results:
        print(*lines, sep="\n")
    failures = [failure for _, of_one in results for failure in of_one]
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true")
    which.add_argument("--only", nargs="+", default=[], metavar="FAMILY/NAME")
    which.add_argument("--assemble", action="store_true")
    which.add_argument("--check-ptxas", action="store_true")
    arguments = parser.parse_args()
    if arguments.check_ptxas:
        check_ptxas(list(outputs()))
    elif arguments.assemble:
        assemble_all()
    else:
        build(arguments.all, arguments.only)
