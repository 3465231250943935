#!/usr/bin/env python3
"""Bytes that a tiered cache copies for a model's own selections: the same slots for every layer, and slots shared out by counters.

    benches/layer_slots.py [TRACE] [--shares PERCENT ...] [--head-dim D]

TRACE is a file of `vanward-engine --trace` (benches/traces). A cache on a CPU session, with the trace's blocks, holds the sequence: each step appends its token and
resolves the lists of every layer; the newest two blocks lie in the tail, and get slots when they leave it, as in a decoder. With the same slots for every layer the
first half of the steps is counted, and `vwd_kv_cache_share_slots` shares the same number out by those misses. Both then run through the whole trace from empty slots.
The second half is what is compared: it was not counted for the shares.

- `share`: slots of all layers, in percent of all runs (a block of one KV head)
- `equal`: MiB that a step of all traced layers copies, mean of the second half
- `shared`: the same with slots shared out; again: once more, by the misses that the shared slots had in the first half
- `slots`: the fewest and the most slots of a layer, as multiples of equal ones

Shares in which a layer has no room for a step's lists are left out.

`selected` are the lists alone, as SERIAL resolves them; `foreseen` has the foreseen lists of 1.25 times as many blocks resolved before, as VANWARD and SPARDA do.
Needs numpy. It takes some seconds.
"""

import argparse
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bindings" / "python"))
import vanward  # noqa: E402

BLOCK = 16


def read(path):
    """steps[t][layer] = (selected, foreseen), each [heads][blocks]."""
    steps = [{}]
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            steps.append({})
            continue
        about, lists = line.split(":")
        of_layer = steps[-1].setdefault(int(about.split()[0]), ([], []))
        for heads, part in zip(of_layer, lists.split("|")):
            heads.append([int(word) for word in part.split()])
    return [list(step.values()) for step in steps if step]


def block_list(heads):
    """A BlockList of one sequence, with slots."""
    ids = np.zeros((1, len(heads), max(map(len, heads))), np.int32)
    counts = np.array([[len(head) for head in heads]], np.int32)
    for row, head in zip(ids[0], heads):
        row[: len(head)] = head
    return vanward.BlockList(ids, counts, slots=np.zeros_like(ids))


class Replay:
    def __init__(self, session, steps, head_dim):
        self.session, self.dim = session, head_dim
        self.layers, self.heads = len(steps[0]), len(steps[0][0][0])
        self.lists = [[tuple(map(block_list, kinds)) for kinds in step] for step in steps]
        self.newest = [max(max(head) for kinds in step for head in kinds[0]) for step in steps]
        self.blocks = self.newest[-1] + 1
        longest = lambda kind: max(len(head) for step in steps for kinds in step for head in kinds[kind])  # noqa: E731
        self.least = [self.heads * longest(kind) for kind in range(2)]

    def run(self, layer_slots, foreseen):
        """The misses of each layer in the first half of the steps, and the bytes that a step of the second half copies."""
        number, begin = np.zeros(1, np.int32), np.zeros(1, np.int32)
        with vanward.KvCache(self.session, layers=self.layers, kv_heads=self.heads, block_size=BLOCK, key_dim=self.dim, value_dim=self.dim, dtype="float16",
                             max_sequences=1, max_blocks=self.blocks, host_blocks=self.blocks, layer_slots=layer_slots, hold=1) as cache:
            cache.extend(cache.add(), self.blocks * BLOCK)
            half = len(self.lists) // 2
            for t, lists in enumerate(self.lists):
                end = (self.newest[t] + 1) * BLOCK
                if end > begin[0]:
                    new = np.zeros((1, end - begin[0], self.heads, self.dim), np.float16)
                    for layer in range(self.layers):
                        cache.append(layer=layer, sequences=number, begin=begin, k=new, v=new)
                    begin[0] = end
                if t == half:
                    misses, before = [cache.layer_info(layer).misses for layer in range(self.layers)], cache.info().bytes_fetched
                for layer, (selected, ahead) in enumerate(lists):
                    for wanted in (ahead, selected) if foreseen else (selected,):
                        cache.resolve(layer=layer, sequences=number, wanted=wanted)
                        cache.wait(layer)
            return misses, (cache.info().bytes_fetched - before) / (len(self.lists) - half)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=pathlib.Path, default=ROOT / "benches/traces/smollm2-135m-code.txt")
    parser.add_argument("--shares", nargs="+", type=float, default=[4, 6, 8, 12, 16, 24], metavar="PERCENT", help="slots, of all runs")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="channels of a head of the trace's model")
    o = parser.parse_args()
    with vanward.Session("cpu") as session:
        replay = Replay(session, read(o.trace), o.head_dim)
        print(f"{o.trace.name}: {len(replay.lists)} steps, {replay.layers} layers, {replay.heads} KV heads, {replay.blocks} blocks\n")
        print("| lists | share | slots a layer | equal, MiB a step | shared | | again | | slots |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for foreseen, least in enumerate(replay.least):
            for share in o.shares:
                slots = int(share / 100 * replay.heads * replay.blocks)
                if slots < least:
                    continue
                given = [slots] * replay.layers
                found = []
                for _ in range(3):
                    misses, copied = replay.run(given, foreseen)
                    found.append(copied / 2**20)
                    most = (min(given) / slots, max(given) / slots)
                    given = vanward.KvCache.share_slots(total=slots * replay.layers, least=least, slots=given, misses=misses)
                equal, *shared = found
                cells = " | ".join(f"{mib:.3f} | {100 * (mib / equal - 1):+.0f} %" for mib in shared)
                print(f"| {'foreseen' if foreseen else 'selected'} | {share:g} % | {slots} | {equal:.3f} | {cells} | {most[0]:.2f} … {most[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
