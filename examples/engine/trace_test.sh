#!/bin/sh
# What --trace writes for the tiny model: steps of a layer of two KV heads. Both lists of a line have the first block and the newest one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" --tiny --trace "$work/trace" --tokens 8 --k 6 >"$work/out"
awk -F '[:|]' '
  function fails(why) { print NR ": " why ": " $0; failed = 1; exit 1 }
  /^#/ { next }
  /^$/ { steps++; next }
  {
    lines++
    if ($1 != "2 " (lines - 1) % 2) fails("not that KV head of layer 2")
    selected = split($2, a, " ")
    foreseen = split($3, b, " ")
    if (selected != 6 || foreseen < 8 || foreseen > 9) fails("6 blocks, and 8 or 9")
    for (i = 2; i <= foreseen; i++) if (b[i] <= b[i - 1] || (i <= selected && a[i] <= a[i - 1])) fails("blocks ascend")
    if (a[1] != 0 || b[1] != 0 || a[selected] != b[foreseen] || (newest != "" && a[selected] < newest)) fails("forced blocks")
    newest = a[selected]
  }
  END { if (!failed && (steps != 8 || lines != 16)) { print steps " steps, " lines " lines"; exit 1 } }
' "$work/trace"
