#!/usr/bin/env python3
"""Compiles libggml-cuda.so of llama.cpp from its unmodified source, for GPUs of compute capability 9.0: `build_ggml.py GGML INCLUDE OUT GGML_BASE`.

GGML is ggml's folder of the source, INCLUDE holds headers of CCCL and cuBLAS, GGML_BASE is the libggml-base.so that the library is loaded
beside. nvcc is found in PATH. Instances of templates that the benchmark does not reach are left out: other head dimensions, other
quantisations of weights, other types of KV cache. A function of theirs ends the process with its name.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time

INSTANCES = ["fattn-mma-f16-instance-ncols1_*-ncols2_[1248].cu", "fattn-tile-instance-dkq128-dv128.cu", "fattn-vec-instance-f16-f16.cu",
             "mmq-instance-q4_[01].cu", "mmq-instance-q8_0.cu"]
# As ggml's CMakeLists.txt has them for a release build with loadable backends.
FLAGS = ["-O3", "-DNDEBUG", "-std=c++17", "-use_fast_math", "-extended-lambda", "-gencode=arch=compute_90,code=sm_90", "-compress-mode=size",
         "-Xcompiler=-fPIC,-Wno-pedantic", "-w", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_DL", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED",
         "-DGGML_CUDA_PEER_MAX_BATCH_SIZE=128", "-DGGML_CUDA_USE_GRAPHS", "-DGGML_SCHED_MAX_COPIES=4", "-D_GNU_SOURCE", "-D_XOPEN_SOURCE=600",
         '-DGGML_CUDA_FA_QUANTS="f16-f16"']
CACHE_TYPES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16"]
FLAGS += [f"-DGGML_CUDA_FA_{k.upper()}_{v.upper()}={int(k == v == 'f16')}" for k in CACHE_TYPES for v in CACHE_TYPES]
# Long ones first, so that the last one to end began early.
SLOW = ["ggml-cuda", "fattn-mma", "mmvq", "mmq", "fattn", "mmf", "mmvf"]


def names(library, kind):
    """Mangled names of C++ that have no version: those of the standard library have one."""
    output = subprocess.run(["nm", "-D", kind, library], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name for name in (line.split()[-1] for line in output.splitlines()) if name.startswith("_Z") and "@" not in name}


def link(library, objects, ggml_base, folder):
    """Links, first without what was left out, then with functions in its place that say so. Returns their names."""
    # The driver and cuBLAS are the machine's: here are their names alone.
    absent = []
    for name in ["libcuda.so.1", "libcublas.so.13"]:
        absent.append(folder / f"{name.split('.')[0]}-by-name.so")
        subprocess.run(["g++", "-shared", "-x", "c", os.devnull, f"-Wl,-soname,{name}", "-o", absent[-1]], check=True)
    toolkit = pathlib.Path(shutil.which("nvcc")).resolve().parents[1]
    runtime = next(file for pattern in ["lib64", "lib", "targets/*/lib"] for file in toolkit.glob(f"{pattern}/libcudart_static.a"))
    command = ["g++", "-shared", "-fPIC", "-o", library, *objects, "-Wl,--no-as-needed", ggml_base, *absent, runtime, "-lrt", "-lpthread", "-ldl",
               "-Wl,-rpath,$ORIGIN"]
    subprocess.run(command, check=True)
    left_out = sorted(names(library, "--undefined-only") - names(ggml_base, "--defined-only"))
    text = "".join(f'extern "C" void {name}() {{ fputs("left out: {name}\\n", stderr); abort(); }}\n' for name in left_out)
    source = folder / "left_out.cpp"
    source.write_text("#include <cstdio>\n#include <cstdlib>\n" + text)
    subprocess.run([*command[:3], source, *command[3:]], check=True)
    return left_out


def main(ggml, include, out, ggml_base, only=None):
    begin = time.monotonic()
    folder = ggml / "src/ggml-cuda"
    files = sorted(folder.glob("*.cu")) + [file for pattern in INSTANCES for file in sorted((folder / "template-instances").glob(pattern))]
    files.sort(key=lambda file: next((n for n, part in enumerate(SLOW) if file.stem.startswith(part)), len(SLOW)))
    files = [file for file in files if only is None or file.stem in only]
    objects = out / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    def compile(file):
        made = objects / f"{file.stem}.o"
        if not made.exists():
            started = time.monotonic()
            partial = objects / f"{file.stem}.partial.o"
            subprocess.run(["nvcc", *FLAGS, "-I", ggml / "include", "-I", ggml / "src", "-isystem", include, "-isystem", include / "cccl", "-c", file, "-o",
                            partial], check=True)
            partial.rename(made)
            print(f"{file.stem}: {time.monotonic() - started:.0f} s", flush=True)
        return made

    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        made = list(pool.map(compile, files))
    library = out / "libggml-cuda.so"
    left_out = link(library, made, ggml_base, objects)
    print(f"{library}: {len(files)} files, {len(left_out)} functions left out, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main(*(pathlib.Path(argument).resolve() for argument in sys.argv[1:5]), only=sys.argv[5:] or None)
