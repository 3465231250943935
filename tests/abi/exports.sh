#!/usr/bin/env bash
# Compares what a shared library exports, and its soname, with the committed list.
#
#   tests/abi/exports.sh LIBRARY
set -euo pipefail
list=$(dirname "$0")/exports.txt
{
  readelf -d "$1" | sed -n 's/.*Library soname: \[\(.*\)\]/\1/p'
  nm -D --defined-only "$1" | awk '{print $3}' | LC_ALL=C sort
} | diff -u "$list" - || { echo "the exports of $1 differ from $list" >&2; exit 1; }
