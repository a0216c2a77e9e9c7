#!/usr/bin/env bash
# One GPU in one command: tests on the device, every kernel, the engine, the server, vLLM beside it. Needs no network.
#
#   bash loadtest/gpu.sh                  run it: three stages of at most nine minutes, results to $OUT or loadtest/results
#   bash loadtest/gpu.sh tests            one stage, or several: tests, speed, beside
#   bash loadtest/gpu.sh --rehearse       run every part on a CPU with tiny shapes, with the packages of the GPU's image
#   bash loadtest/gpu.sh --tune           search better tile sizes for attention, nothing else
#   bash loadtest/gpu.sh --wheels DIR     fetch what the image lacks (tools/gpu/wheels.txt)
#
# Wheels in the folder wheels/, or in $QUIRE_WHEELS, are used. Other arguments go to
# `python -m tools.gpu`: --only PART ..., --limit SECONDS, --commit HASH.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
    python=$PWD/.venv/bin/python
fi

if [ "${1:-}" = --wheels ]; then
    folder=${2:?a folder to fetch the wheels to}
    platforms=()
    for minor in {39..17}; do # of glibc, each of which pip takes for itself alone; the image has 2.39
        platforms+=(--platform "manylinux_2_${minor}_x86_64")
    done
    "$python" -m pip --disable-pip-version-check download --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --constraint constraints.txt \
        --requirement tools/gpu/wheels.txt --dest "$folder"
    du -sh "$folder"
    exit
fi

wheels=${QUIRE_WHEELS:-wheels}
unset QUIRE_WHEELS # the server would read it as an unknown setting
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
is_rehearsal=$([[ " $* " == *" --rehearse "* ]] && echo yes || true)
# The wheels are for the image's Python; a rehearsal with another one links its own packages.
if compgen -G "$wheels/*.whl" >/dev/null &&
    { [ -z "$is_rehearsal" ] || "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; }; then
    "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$scratch/site" "$wheels"/*.whl
    export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi
if [ -n "$is_rehearsal" ]; then
    "$python" -m tools.gpu.image "$scratch/image"
    python=$scratch/image/bin/python
fi

if [ -n "${OUT:-}" ]; then
    out=$OUT
elif [ -n "$is_rehearsal" ]; then
    out=${TMPDIR:-/tmp}/quire-gpu-rehearsal
else
    name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr -cs '[:alnum:]\n' - || true)
    out=loadtest/results/gpu-${name:-unknown}-$(date -u +%Y-%m-%dT%H%M)
fi
mkdir -p "$out"

# Tearing the tracer down after a trace would break graphs that are launched later.
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TEARDOWN_CUPTI=0
"$python" -m tools.gpu --out "$out" "$@" 2>&1 | tee "$out/log.txt"
