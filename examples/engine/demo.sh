#!/bin/sh
# demo.sh ENGINE [OPTION…]: runs the engine on the real model, or says that it cannot be fetched and runs the tiny random one.
set -eu
engine=$1
shift
if model=$("$(dirname -- "$0")/fetch_model.sh"); then
    exec "$engine" --model "$model" "$@"
fi
echo 'SmolLM2 could not be fetched (no network?); running a tiny random model instead.'
exec "$engine" --tiny "$@"
