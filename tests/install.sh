#!/usr/bin/env bash
# Installs into a staging folder, then builds and runs the consumers against it, shared and static.
#
#   tests/install.sh BUILD pkgconfig|cmake SCRATCH
#
# BUILD is the CMake build folder. The tree is installed for /opt/vanward under DESTDIR and used where it lies: that it
# works there shows that it may be moved.
set -euo pipefail
build=$(realpath "$1") way=$2 scratch=$3
examples=$(realpath "$(dirname "$0")/../examples")

rm -rf "$scratch" && mkdir -p "$scratch"
scratch=$(realpath "$scratch")
DESTDIR="$scratch" cmake --install "$build" --prefix /opt/vanward >/dev/null
prefix="$scratch/opt/vanward"
lib=$(dirname "$(find "$prefix" -name libvanward.a)")

for path in "$prefix"/include/vanward.h{,pp} "$lib"/libvanward.so{,.0} "$lib"/pkgconfig/vanward{,-static}.pc \
  "$prefix"/share/doc/vanward/{LICENSE,THIRD-PARTY,README.md,docs/engine.md,docs/pictures/pages.svg,examples/batching.cpp,examples/common.h} \
  "$lib"/cmake/Vanward/VanwardConfig{,Version}.cmake; do
  test -e "$path" || { echo "not installed: $path" >&2; exit 1; }
done
outside=$(find "$scratch" -not -type d -not -path "$prefix/*")
test -z "$outside" || { echo "installed outside DESTDIR/PREFIX: $outside" >&2; exit 1; }

# The runtime package has what a program needs to run, and the other one the rest.
DESTDIR="$scratch/runtime" cmake --install "$build" --prefix /usr --component runtime >/dev/null
found=$(cd "$scratch/runtime" && find . -not -type d -printf '%f\n' | sort | sed 's/[.]so[.][0-9]*[.].*/.so.full/' | tr '\n' ' ')
test "$found" = "LICENSE THIRD-PARTY libvanward.so.0 libvanward.so.full " || { echo "the runtime component has: $found" >&2; exit 1; }

for path in "$HOME/" "$(realpath "$examples/..")/"; do
  ! grep -aqF "$path" "$lib"/libvanward.so.0 "$lib"/libvanward.a || { echo "the library names $path" >&2; exit 1; }
done

cp -r "$examples/consumer-$way" "$scratch/consumer"
cd "$scratch/consumer"
case $way in
  pkgconfig)
    export PKG_CONFIG_PATH="$lib/pkgconfig"
    make --silent
    ;;
  cmake)
    cmake -S . -B . -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
    cmake --build . >/dev/null
    ;;
esac

./consumer_shared
./consumer_static
needs() { readelf -d "$1" | grep -q 'NEEDED.*libvanward\.so\.0'; }
needs consumer_shared || { echo "consumer_shared does not use libvanward.so.0" >&2; exit 1; }
! needs consumer_static || { echo "consumer_static uses libvanward.so.0" >&2; exit 1; }
