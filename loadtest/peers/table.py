"""The servers that are compared, and the flags that serve each best on a few cores: one entry a server.

A server is present if the person names its executable; nothing is searched for or installed. All get the same model
weights, the same number formats, the same bytes of K/V and the same number of slots, as far as they can be told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.peers.process import Command
from loadtest.peers.shapes import SHAPES

GIB = 1 << 30
PRECISIONS = {
    "bf16": "sixteen bits everywhere",
    "int8": "eight-bit weights: Quire and vLLM from int8 safetensors, the others from Q8_0",
    "q8_0": "the same, with Quire too from the Q8_0 GGUF",
}


class Setup(NamedTuple):
    """What every server is to serve."""

    model: Path  # the folder that --prepare wrote
    port: int
    precision: str  # one of PRECISIONS
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    kv_gib: int


@dataclass(frozen=True, slots=True)
class Peer:
    """How one kind of server is started and spoken to."""

    name: str
    executable: str  # what the option names
    told: str  # of that, in --help
    version: Sequence[str]  # arguments that make it print its version
    command: Callable[[str, Setup], Command]
    environment: Callable[[Path], Path]  # from the executable to the folder whose size is "installed"
    fields: Callable[[int], dict[str, Any]] = lambda _max_tokens: {"ignore_eos": True}  # by max_tokens
    model_name: Callable[[Setup], str] = lambda setup: setup.model.name


def _python_prefix(python: Path) -> Path:
    return python.absolute().parents[1]  # its own folder, wherever the link leads


def _quire(python: str, setup: Setup) -> Command:
    model, quantized = {
        "bf16": ("hf", []),
        "int8": ("hf", ["--quantization", "int8"]),
        "q8_0": ("q8_0.gguf", ["--quantization", "gguf"]),
    }[setup.precision]
    argv = [
        *(python, "-m", "server", "serve", str(setup.model / model)),
        *("--port", str(setup.port)),
        *("--served-model-name", setup.model.name),
        *("--dtype", "bfloat16"),
        *("--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-model-len", str(setup.max_model_len)),
        *("--kv-cache-memory-bytes", f"{setup.kv_gib}GiB"),
        *("--num-threads", str(setup.num_threads)),
        *quantized,
    ]
    return Command(argv, {})


def _vllm(python: str, setup: Setup) -> Command:
    """Its own advice for CPUs: K/V space, threads bound to every core, Intel's OpenMP preloaded where it came along."""
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.num_threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = _python_prefix(Path(python)) / "lib" / "libiomp5.so"
    if openmp.is_file():
        environ["LD_PRELOAD"] = str(openmp)
    argv = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(setup.model / ("hf" if setup.precision == "bf16" else "w8a8"))),
        *("--host", "127.0.0.1", "--port", str(setup.port)),
        *("--served-model-name", setup.model.name),
        *("--dtype", "bfloat16"),
        *("--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-model-len", str(setup.max_model_len)),
    ]
    return Command(argv, environ)


def _llama_server(executable: str, setup: Setup) -> Command:
    """Each slot has room for the longest request: a shared cache would make every slot attend over all of it."""
    argv = [
        executable,
        *("-m", str(setup.model / ("bf16.gguf" if setup.precision == "bf16" else "q8_0.gguf"))),
        *("--host", "127.0.0.1", "--port", str(setup.port)),
        *("--alias", setup.model.name),
        *("-t", str(setup.num_threads), "-tb", str(setup.num_threads)),
        *("-np", str(setup.max_num_seqs)),
        *("-c", str(setup.max_num_seqs * setup.max_model_len)),
    ]
    return Command(argv, {})


def _openvino(python: str, setup: Setup) -> Command:
    argv = [
        *(python, str(Path(__file__).with_name("openvino_server.py"))),
        str(setup.model / ("f16.gguf" if setup.precision == "bf16" else "q8_0.gguf")),  # it reads no bfloat16 GGUF
        *("--port", str(setup.port)),
        *("--name", setup.model.name),
        *("--num-threads", str(setup.num_threads)),
        *("--kv-cache-gib", str(setup.kv_gib)),
        *("--max-num-seqs", str(setup.max_num_seqs)),
    ]
    return Command(argv, {})


_CB_BLOCK = 32  # tokens; it takes most of the machine's memory unless told how many


def _transformers(python: str, setup: Setup) -> Command:
    if setup.precision != "bf16":
        raise NotImplementedError("transformers serve has no 8-bit weights on a CPU")
    num_blocks = setup.kv_gib * GIB // (SHAPES[setup.model.name].kv_bytes_per_token * _CB_BLOCK)
    argv = [
        *(python, str(Path(python).with_name("transformers")), "serve", str(setup.model / "hf")),
        *("--continuous-batching", "--cb-block-size", str(_CB_BLOCK), "--cb-num-blocks", str(num_blocks)),
        *("--host", "127.0.0.1", "--port", str(setup.port)),
        *("--device", "cpu", "--dtype", "bfloat16"),
    ]
    return Command(argv, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setup.num_threads)})


def _transformers_fields(max_tokens: int) -> dict[str, Any]:
    """It refuses fields that it does not know; this is its way to say ignore_eos."""
    return {"generation_config": json.dumps({"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": -1})}


def _distribution(name: str) -> Sequence[str]:
    return ("-c", f"from importlib.metadata import version; print(version({name!r}))")


PEERS = (
    Peer("quire", "PYTHON", "of an environment with Quire", _distribution("quire"), _quire, _python_prefix),
    Peer("vllm", "PYTHON", "of one with vllm-cpu", _distribution("vllm-cpu"), _vllm, _python_prefix),
    Peer("llama-server", "FILE", "llama.cpp's, built here", ("--version",), _llama_server, lambda path: path),
    Peer(
        "openvino", "PYTHON", "of one with openvino-genai", _distribution("openvino-genai"), _openvino, _python_prefix
    ),
    Peer(
        "transformers",
        "PYTHON",
        "of one with transformers[serving]",
        _distribution("transformers"),
        _transformers,
        _python_prefix,
        _transformers_fields,
        lambda setup: str(setup.model / "hf"),
    ),
)
QUIRE = PEERS[0].name
DEFAULT_EXECUTABLES = {QUIRE: sys.executable}


def version(peer: Peer, executable: str) -> str:
    """What a server says of its version; empty if it cannot be asked."""
    command = [executable, *peer.version]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in (said.stdout + said.stderr).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("version")), lines[0] if lines else "")


def installed_bytes(path: Path) -> int:
    """What a file or a folder takes, each file once; links are not followed out of it."""
    if path.is_file():
        return path.stat().st_size
    files = (file.lstat() for file in path.rglob("*") if not file.is_dir())
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in files}.values())
