"""The servers that are compared, with the flags that suit each on a few cores.

A server takes part if its executable is named; nothing is searched for or installed. All get the same model weights,
number formats, bytes of K/V and number of slots, as far as their flags allow.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadtest.peers.process import Command

PRECISIONS = {
    "bf16": "sixteen bits everywhere",
    "int8": "eight-bit weights: Quire and vLLM from int8 safetensors, the others from Q8_0",
}
_FILES = {
    "quire": {"bf16": "hf", "int8": "hf"},
    "vllm": {"bf16": "hf", "int8": "w8a8"},
    "llama-server": {"bf16": "bf16.gguf", "int8": "q8_0.gguf"},
    "ik-llama": {"bf16": "bf16.gguf", "int8": "q8_0.gguf"},
    "openvino": {"bf16": "f16.gguf", "int8": "q8_0.gguf"},  # it reads no bfloat16 GGUF
}
GGUF_FORMATS = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4",
    "q2_k", "q3_k", "q4_k", "q4_k_m", "q5_k", "q5_k_m", "q6_k", "iq4_xs", "iq3_xxs", "iq3_s",
    "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4", "q1_0", "q2_0",
)  # fmt: skip
PACKED_FORMATS = (
    "w4a16", "w8a16", "w8a8", "awq", "gptq", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp4-packed", "nf4",
)  # fmt: skip
FORMATS = (*GGUF_FORMATS, *PACKED_FORMATS)


def file_of(peer: str, precision: str) -> str:
    """Return the file of a model's folder that a server reads; "" if it reads none."""
    if precision in GGUF_FORMATS:
        return f"{precision}.gguf" if peer in ("quire", "llama-server", "ik-llama") else ""
    if precision in PACKED_FORMATS:
        return precision if peer in ("quire", "vllm") else ""
    return _FILES[peer][precision]


class Setup(NamedTuple):
    """The model and the limits, equal for every server."""

    model: Path  # the folder that --prepare wrote
    port: int
    precision: str  # one of PRECISIONS
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    kv_gib: float


@dataclass(frozen=True, slots=True)
class Peer:
    """How one kind of server is started and spoken to."""

    name: str
    executable: str  # what the option names
    purpose: str  # of that, in --help
    version: Sequence[str]  # arguments that make it print its version
    command: Callable[[str, Setup], Command]
    environment: Callable[[Path], Path]  # from the executable to the folder whose size is "installed"


def _python_prefix(python: Path) -> Path:
    return python.absolute().parents[1]  # its own folder, wherever the link leads


def _quire(python: str, setup: Setup) -> Command:
    argv = [
        *(python, "-m", "server", "serve", str(setup.model / file_of("quire", setup.precision))),
        *("--port", str(setup.port)),
        *("--served-model-name", setup.model.name),
        *(("--dtype", "bfloat16") if setup.precision in PRECISIONS else ()),  # it dequantises what is stored
        *("--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-model-len", str(setup.max_model_len)),
        *("--kv-cache-memory-bytes", f"{setup.kv_gib:g}GiB"),
        *("--num-threads", str(setup.num_threads)),
        *(("--quantization", "int8") if setup.precision == "int8" else ()),
    ]
    return Command(argv, {})


def _vllm(python: str, setup: Setup) -> Command:
    """Follow vLLM's advice for CPUs: bound threads, Intel's OpenMP preloaded."""
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": f"{setup.kv_gib:g}",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.num_threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = _python_prefix(Path(python)) / "lib" / "libiomp5.so"
    if openmp.is_file():
        environ["LD_PRELOAD"] = str(openmp)
    argv = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(setup.model / file_of("vllm", setup.precision))),
        *("--host", "127.0.0.1", "--port", str(setup.port)),
        *("--served-model-name", setup.model.name),
        *("--dtype", "bfloat16"),
        *("--max-num-seqs", str(setup.max_num_seqs)),
        *("--max-model-len", str(setup.max_model_len)),
        "--enable-prompt-tokens-details",  # usage says what was cached
    ]
    return Command(argv, environ)


def _llama_server(executable: str, setup: Setup) -> Command:
    """Give each slot room for the longest request."""
    argv = [
        executable,
        *("-m", str(setup.model / file_of("llama-server", setup.precision))),
        *("--host", "127.0.0.1", "--port", str(setup.port)),
        *("--alias", setup.model.name),
        *("-t", str(setup.num_threads), "-tb", str(setup.num_threads)),
        *("-np", str(setup.max_num_seqs)),
        *("-c", str(setup.max_num_seqs * setup.max_model_len)),
    ]
    return Command(argv, {})


def _ik_llama(executable: str, setup: Setup) -> Command:
    """Keep it from writing llama.log into the current folder."""
    command = _llama_server(executable, setup)
    return command._replace(argv=[*command.argv, "--log-disable"])


def _openvino(python: str, setup: Setup) -> Command:
    argv = [
        *(python, str(Path(__file__).with_name("openvino_server.py"))),
        str(setup.model / file_of("openvino", setup.precision)),
        *("--port", str(setup.port)),
        *("--name", setup.model.name),
        *("--num-threads", str(setup.num_threads)),
        *("--kv-cache-gib", f"{setup.kv_gib:g}"),
        *("--max-num-seqs", str(setup.max_num_seqs)),
    ]
    return Command(argv, {})


def _distribution(name: str) -> Sequence[str]:
    return ("-c", f"from importlib.metadata import version; print(version({name!r}))")


PEERS = (
    Peer("quire", "PYTHON", "of an environment with Quire", _distribution("quire-serve"), _quire, _python_prefix),
    Peer("vllm", "PYTHON", "of one with vllm-cpu", _distribution("vllm-cpu"), _vllm, _python_prefix),
    Peer("llama-server", "FILE", "llama.cpp's, built here", ("--version",), _llama_server, lambda path: path),
    Peer("ik-llama", "FILE", "ik_llama.cpp's llama-server", ("--version",), _ik_llama, lambda path: path),
    Peer(
        "openvino", "PYTHON", "of one with openvino-genai", _distribution("openvino-genai"), _openvino, _python_prefix
    ),
)
QUIRE = PEERS[0].name
DEFAULT_EXECUTABLES = {QUIRE: sys.executable}


def version(peer: Peer, executable: str) -> str:
    """Return the version that a server prints; "" if it cannot be run."""
    command = [executable, *peer.version]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in (printed.stdout + printed.stderr).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("version")), lines[0] if lines else "")


def installed_bytes(path: Path) -> int:
    """Return the size of a file or folder, each file once; links are not followed."""
    if path.is_file():
        return path.stat().st_size
    files = (file.lstat() for file in path.rglob("*") if not file.is_dir())
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in files}.values())
