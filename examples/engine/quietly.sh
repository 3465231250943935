#!/bin/sh
# quietly.sh WHAT COMMAND…: runs the command behind one line that says how far it is; shows all that it printed where it fails.
set -eu
what=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
begin=$(date +%s)
[ -t 2 ] || echo "$what" >&2
"$@" >"$log" 2>&1 &
while kill -0 $! 2>/dev/null; do
    [ ! -t 2 ] || printf '\r%s: %d crates compiled, %d s ' "$what" "$(grep -c '^ *Compiling' "$log")" $(($(date +%s) - begin)) >&2
    sleep 0.5
done
[ ! -t 2 ] || printf '\r%79s\r' '' >&2
if wait $!; then exit 0; fi
cat "$log" >&2
exit 1
