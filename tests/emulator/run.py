#!/usr/bin/env python3
"""Runs the CUDA cases of the conformance suite, and the GPU suite, on the emulated device.

Usage: run.py <folder of the emulated libcuda.so> [--tier quick|all] [--choose] [<part of a case's name>]

Each case is a process, as many at a time as there are processors. Tier "all" runs every case on a device of compute capability 9.0; those of the
conformance suite again with warps, CTAs and copies in other orders while races are looked for, in a third of the rounds, and on a device of 8.0.
Tier "quick" runs the cases of quick.txt on a device of 9.0: between them they launch every kernel that any case launches there, at least cost.

A kernel that the device takes and that no case launches is a failure, unless UNREACHED says why. --choose runs all cases on a device of 9.0
and writes quick.txt anew: after a kernel or a case was added or renamed.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "kernels"
QUICK = HERE / "quick.txt"

# Suites and settings of each device.
DEVICES = {
    "9.0": (("conformance", "gpu"), {}),
    # Races in global memory are reported and do not fail: some cases have two rows of a batch write one page; cache_give reads marks of slots that
    # a fetch on a side stream writes, which may be old or new; and attention reads slots once such a mark says that they have arrived, for
    # which the race checker knows no order. Random cases run the first third of their rounds: with races looked for they take twice the time.
    "9.0, other orders, races": (("conformance",), {"VANWARD_EMULATOR_SEED": "1", "VANWARD_EMULATOR_RACES": "2", "VANWARD_ROUNDS": ".34"}),
    "8.0": (("conformance", "gpu"), {"VANWARD_EMULATOR_CAPABILITY": "80", "VANWARD_EMULATOR_MULTIPROCESSORS": "108"}),
}
CAPABILITY = {"9.0": 90, "8.0": 80}

# What an emulated device has not: work that still runs when a call has returned, or beside another call's; the time to do so much.
NOT_HERE = {
    "attention_ends_though_its_contents_change",
    "decoder_on_a_cache_gives_the_same_whenever_its_copies_run",
    "sample_ends_though_its_contents_change",
    "pinned_memory_is_reused_after_its_stream_has_passed",
    "selections_of_1000_replays_are_the_same_bits",
}
# They take half a minute and more: once is enough.
LONG = {
    "cuda::budget_is_profiled_saved_loaded_and_asked",
    "cuda::budget_of_another_device_is_refused",
    "cuda::budget_profiles_each_method_of_selection_and_mode_of_repair",
    "cuda::decoder_on_a_cache_agrees_with_one_on_pages_in_every_type",
    "cuda::decoder_on_a_cache_in_int4_attends_what_single_calls_attend",
    "cuda::decoder_on_a_cache_in_int4_goes_on_from_trees_as_from_chains",
    "cuda::select_follows_sequences_that_grow_and_shrink",
    "decoder_on_a_cache_in_int4_replays_a_step_of_each_strategy",
    "selections_follow_what_the_kernel_ahead_writes",
}
# Cases of the GPU suite that run on a device of 8.0, too: they launch kernels that the conformance suite does not.
ON_8_0 = {
    "captured_gather_keeps_the_lists_of_the_host",
    "decoder_gives_the_same_bits_whenever_its_side_streams_run",
    "forecast_replays_a_graph_with_changed_contents",
    "gather_replays_a_graph_with_changed_ids",
    "kv_cache_holds_what_was_appended_after_a_hundred_thousand_operations",
    "kv_cache_is_released_with_copies_under_way",
    "predicting_calls_ask_the_driver_for_launches_alone",
    "predictor_replays_a_graph_with_changed_contents",
}

# Kernels that no case launches on a device yet, and why.
UNREACHED = {
    "no case has FP8 keys of this width in a layout that the kernel takes": (
        "attention_mma_fp8_256 sm_80",
        "attention_mma_fp8_256 sm_90",
        "attention_mma_fp8_576 sm_80",
        "attention_mma_fp8_576 sm_90",
    ),
    "cases of 576 channels run the kernels of multi-head latent attention, or the general one": (
        "attention_mma_bf16_576 sm_80",
        "attention_mma_f16_576 sm_80",
    ),
}


def executables():
    """The suites, built: name and path."""
    command = ["cargo", "test", "--locked", "--no-run", "--message-format=json", "--test", "conformance", "--test", "gpu"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    messages = [json.loads(line) for line in lines if line.startswith("{")]
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


def kernels(capability):
    """Entries, with their target, that a device of this capability loads: of each source those of the highest target that it takes."""
    best = {}
    for name in json.loads((KERNELS / "ptx/manifest.json").read_text())["ptx"]:
        source, target = name.split(".compute_")
        number = int(re.match(r"\d+", target)[0])
        if best.get(source, (0,))[0] < number <= capability:
            # Kernels of compute_80 that are those of compute_90 are kept there, and named by a line "// .entry name": kernels/build.py.
            kept = (KERNELS / "ptx" / f"{each}.ptx" for each in (name, f"{source}.compute_90"))
            best[source] = (number, next(path for path in kept if path.exists()), f"sm_{target}")
    return {
        (entry, target)
        for _, path, target in best.values()
        for entry in re.findall(r"\.entry\s+([\w$]+)", path.read_text())
    }


class Job:
    def __init__(self, device, suite, executable, case, environment):
        self.device, self.suite, self.executable, self.case, self.environment = device, suite, executable, case, environment

    def run(self):
        """Runs the case; says whether it passed, the seconds of a processor that it took, and what it launched."""
        handle, record = tempfile.mkstemp(prefix="vanward-launched-")
        os.close(handle)
        try:
            process = subprocess.Popen(
                [self.executable, "--exact", self.case],
                env=self.environment | {"VANWARD_EMULATOR_LAUNCHED": record},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.launched = {tuple(line.split()) for line in Path(record).read_text().splitlines()}
        finally:
            os.unlink(record)
        self.seconds = usage.ru_utime + usage.ru_stime
        self.passed = process.returncode == 0 and "1 passed" in output
        print(f"{self.device}: {self.case} ... {'ok' if self.passed else 'FAILED'} ({self.seconds:.1f} s)", flush=True)
        if not self.passed:
            print(output, flush=True)
        return self


def jobs_of(device, suites, folder, part):
    names, settings = DEVICES[device]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    environment = os.environ | settings | {
        "LD_LIBRARY_PATH": path,
        "VANWARD_REQUIRE_GPU": "1",
        # The emulated driver itself tells which of its functions are called.
        "VANWARD_CUPTI": str(folder / "libcuda.so"),
        "VANWARD_CACHE_OPERATIONS": "1000",
    }
    for suite in names:
        command = [suites[suite], "--list"]
        listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
        for case in re.findall(r"^(\S+): test$", listed, re.MULTILINE):
            is_left_out = case in NOT_HERE or settings and case in LONG or suite == "gpu" and device == "8.0" and case not in ON_8_0
            if part in case and not case.startswith("cpu::") and not is_left_out:
                yield Job(device, suite, suites[suite], case, environment)


def unlaunched(jobs, device):
    """Says which kernels no job launched though the device takes them; returns how many."""
    launched = set().union(*(job.launched for job in jobs if job.device.startswith(device)))
    allowed = {tuple(name.split()) for names in UNREACHED.values() for name in names}
    for name in sorted(allowed & launched):
        print(f"{device}: {' '.join(name)} is launched now: UNREACHED need not name it")
    missing = sorted(kernels(CAPABILITY[device]) - launched - allowed)
    for name in missing:
        print(f"{device}: {' '.join(name)} ... FAILED: no case launches this kernel")
    return len(missing)


def choose(jobs):
    """Cases that launch together what all launch, at least cost; the greedy choice."""
    left, chosen = set().union(*(job.launched for job in jobs)), []
    while left:
        best = max(jobs, key=lambda job: len(job.launched & left) / (job.seconds + 0.1))
        left -= best.launched
        chosen.append(best)
    print(f"{len(chosen)} cases, {sum(job.seconds for job in chosen):.0f} s of a processor")
    QUICK.write_text("".join(sorted(f"{job.suite} {job.case}\n" for job in chosen)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--tier", choices=["quick", "all"], default="all")
    parser.add_argument("--choose", action="store_true")
    options = parser.parse_intermixed_args()

    suites, failed = executables(), 0
    devices = ["9.0"] if options.tier == "quick" or options.choose else list(DEVICES)
    jobs = [job for device in devices for job in jobs_of(device, suites, options.folder.resolve(), options.part)]
    if options.tier == "quick":
        quick = {tuple(line.split()) for line in QUICK.read_text().splitlines()}
        for name in sorted(quick - {(job.suite, job.case) for job in jobs}) if not options.part else []:
            print(f"quick.txt: {' '.join(name)} ... FAILED: there is no such case")
            failed += 1
        jobs = [job for job in jobs if (job.suite, job.case) in quick]
    # What takes longest begins first.
    jobs.sort(key=lambda job: job.case not in LONG)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = list(pool.map(Job.run, jobs))

    passed = sum(job.passed for job in jobs)
    failed += len(jobs) - passed
    if not options.part:
        failed += sum(unlaunched(jobs, device) for device in CAPABILITY if device in devices)
    if options.choose and not options.part:
        choose([job for job in jobs if job.passed])
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; 0 ignored")
    return 1 if failed or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
