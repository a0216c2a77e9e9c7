"""Does work of a start outside of Python while modules are imported: memory, reading of files.

Importing torch and the HTTP side holds the GIL for most of a second. C code called through ctypes runs without it, so each
part here starts a thread that uses another core meanwhile, as torch_ahead.py does before. All of it is optional: what is not
done ahead is done by its first user. The order of a start is in server/serve.py. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from engine.files.gguf_header import part_paths
from engine.runtime.native.backed_memory import BackedMemory
from engine.runtime.native.packed_file import PackedFile
from engine.runtime.native.rows import OpenFile
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import local_path
from engine.startup.torch_ahead import has_gpu
from engine.system.host_limits import available_memory
from engine.system.regular_file import expanded

_SECOND_NODE = Path("/sys/devices/system/node/node1")
_READ = 4 << 20  # bytes
_SHARE = 0.95  # of the files' bytes; some tensors of every model are not packed


def runs_on_cpu(config: EngineConfig) -> bool:
    """Return whether a model runs on the CPU, as far as that is known without torch."""
    return config.device == "cpu" or (config.device == "auto" and not has_gpu())


def weight_files(config: EngineConfig) -> list[Path]:
    """Return the files of a model's weights; none of one that is not here yet, or has none."""
    path = local_path(config.model)
    if path is None or config.load_format == "dummy":
        return []
    return sorted(path.glob("*.safetensors")) if path.is_dir() else part_paths(path)


class WeightMemory(NamedTuple):
    """Where packed weights will be: memory with pages, or a file that has them, or will have."""

    memory: BackedMemory | None = None
    kept: PackedFile | None = None


def begin_weights(config: EngineConfig) -> WeightMemory:
    """Begin to map weights that are packed already, or to read a model's files and back memory for what is packed."""
    files = weight_files(config)
    kept = _open_kept(config) if files else None
    return WeightMemory(None if kept is not None and kept.is_found else _begin_packing(config, files), kept)


def _open_kept(config: EngineConfig) -> PackedFile | None:
    """Return the file of packed weights in --weights-cache, found or to be written; None without that setting."""
    if config.weights_cache is None or not _packs(config) or config.tensor_parallel_size > 1:
        return None
    facts = (
        config.dtype,
        config.quantization,
        config.load_format,
        config.cpu_kernels,
        config.portable_bits,
        config.speculative_config,
    )
    model = json.dumps([str(Path(config.model).resolve()), *facts, config.hf_overrides, config.mmproj], default=str)
    return PackedFile(expanded(config.weights_cache), config.weights_cache_size, model)


def _packs(config: EngineConfig) -> bool:
    """Return whether rows of files will be packed on a CPU."""
    return runs_on_cpu(config) and config.cpu_kernels != "off" and config.quantization != "int8"


def _begin_packing(config: EngineConfig, files: Sequence[Path]) -> BackedMemory | None:
    """Begin to read a model's files, and return memory for packed weights, a little less than the files.

    Return None unless the weights will be packed on a CPU. Nothing is begun where the files would fill the memory.
    """
    num_bytes = sum(file.stat().st_size for file in files)
    if not num_bytes or num_bytes > available_memory() // 2:
        return None
    Thread(target=_read, args=(files,), name="read-ahead", daemon=True).start()
    if _SECOND_NODE.exists():  # the pages would all be of the node of the thread that touches them
        return None
    if not _packs(config):
        return None
    try:
        return BackedMemory(int(_SHARE * num_bytes))
    except (OSError, OverflowError, ValueError):  # too large for this process
        return None


def _read(files: Iterable[Path]) -> None:
    """Let the system read files into its cache. It takes no more than some megabytes a call, and does not wait."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with suppress(OSError):
            file = OpenFile(path)
            for begin in range(0, path.stat().st_size, _READ):
                os.posix_fadvise(file.number, begin, _READ, os.POSIX_FADV_WILLNEED)
