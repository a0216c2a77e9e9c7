#!/usr/bin/env bash
# One GPU in one command: tests on the device, every kernel, the engine, the server. Needs no network.
#
#   bash loadtest/gpu.sh                  run it: under 8 minutes, results to $OUT or loadtest/results/gpu-NAME-DATE
#   bash loadtest/gpu.sh --rehearse       run every part on a CPU with tiny shapes, to check the script
#   bash loadtest/gpu.sh --tune           search better tile sizes for attention, nothing else
#   bash loadtest/gpu.sh --wheels DIR     fetch what an image with torch and transformers lacks (loadtest/gpu/wheels.txt)
#
# Wheels in the folder wheels/, or in $QUIRE_WHEELS, are used. Other arguments go to
# `python -m loadtest.gpu`: --only PART ..., --limit SECONDS, --commit HASH.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=$PWD/.venv/bin/python
fi

if [ "${1:-}" = --wheels ]; then
    folder=${2:?a folder to fetch the wheels to}
    platforms=()
    for version in 2_28 2_17; do
        platforms+=(--platform "manylinux_${version}_x86_64")
    done
    "$python" -m pip --disable-pip-version-check download --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --constraint constraints.txt \
        --requirement loadtest/gpu/wheels.txt --dest "$folder"
    du -sh "$folder"
    exit
fi

wheels=${QUIRE_WHEELS:-wheels}
unset QUIRE_WHEELS # the server would read it as an unknown setting
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$scratch/site" "$wheels"/*.whl
    export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ -n "${OUT:-}" ]; then
    out=$OUT
elif [[ " $* " == *" --rehearse "* ]]; then
    out=${TMPDIR:-/tmp}/quire-gpu-rehearsal
else
    name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -cs '[:alnum:]\n' - || true)
    out=loadtest/results/gpu-${name:-unknown}-$(date -u +%Y-%m-%d)
fi
mkdir -p "$out"

# Tearing the tracer down after a trace would break graphs that are launched later.
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TEARDOWN_CUPTI=0
"$python" -m loadtest.gpu --out "$out" "$@" 2>&1 | tee "$out/log.txt"
