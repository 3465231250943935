#!/usr/bin/env python3
"""Runs make targets one after the other, shows what they print, and adds up what their test runners counted.

Every target runs even where an earlier one failed. The exit status is 0 when each of them exited with 0.
"""

import re
import subprocess
import sys
import time


class Count:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def __iadd__(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        return self

    def __str__(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def read(self, line):
        """One line of cargo test, ctest, go test -v or unittest."""
        if m := re.match(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", line):
            passed, failed, skipped = map(int, m.groups())
            self.add(passed, failed, skipped)
        elif m := re.match(r"\s*\d+/\d+ Test +#\d+: .*?(Passed|\*\*\*(?:Skipped|Not Run.*?|.*?)) +[\d.]+ sec", line):
            verdict = m.group(1)
            self.add(verdict == "Passed", "***" in verdict and "Skipped" not in verdict, "Skipped" in verdict)
        elif m := re.match(r"\s*--- (PASS|FAIL|SKIP): ", line):
            self.add(m.group(1) == "PASS", m.group(1) == "FAIL", m.group(1) == "SKIP")
        elif m := re.match(r"Ran (\d+) tests? in ", line):
            self.add(int(m.group(1)), 0, 0)
        elif m := re.match(r"(?:OK|FAILED) \((.*)\)$", line):
            numbers = {k: int(v) for k, v in (part.split("=") for part in m.group(1).split(", "))}
            failed = numbers.get("failures", 0) + numbers.get("errors", 0)
            skipped = numbers.get("skipped", 0)
            self.add(-failed - skipped, failed, skipped)

    def add(self, passed, failed, skipped):
        self.passed += int(passed)
        self.failed += int(failed)
        self.skipped += int(skipped)


def run(target):
    """The counts and the exit status of one target."""
    count = Count()
    command = ["make", "--no-print-directory", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as make:
        for line in make.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            count.read(line)
    return count, make.returncode


def main(targets):
    total, failures, table = Count(), [], []
    for target in targets:
        print(f"\n=== make {target}", flush=True)
        begin = time.monotonic()
        count, status = run(target)
        total += count
        if status != 0:
            failures.append(target)
            if count.failed == 0:  # it failed outside a test: a build, a lint
                total.add(0, 1, 0)
        table.append(f"  {target:<12} {'ok' if status == 0 else 'FAILED':<7} {time.monotonic() - begin:6.0f} s   {count}")
    print("\n" + "\n".join(table))
    print(total)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
