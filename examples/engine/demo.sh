#!/bin/sh
# demo.sh ENGINE [OPTION…]: runs the engine on the real model, or says that it cannot be fetched and runs the tiny random one.
# Without options it makes both tables: drafts at a context of some 6,000 tokens, single calls at one of 2,000.
set -eu
engine=$1
shift
here=$(dirname -- "$0")
if model=$("$here/fetch_model.sh"); then
    set -- --model "$model" "$@"
else
    echo 'SmolLM2 could not be fetched (no network?); running a tiny random model instead.'
    set -- --tiny "$@"
fi
if [ $# -gt 2 ] || [ "$*" = '--tiny' ]; then exec "$engine" "$@"; fi
long=$(mktemp)
trap 'rm -f "$long"' EXIT
head -c 16500 "$here/../../THIRD-PARTY" | cat - "$here/prompt.txt" >"$long"
"$engine" "$@" --drafts --tokens 48 --prompt "$long"
"$engine" "$@" --calls --tokens 32
