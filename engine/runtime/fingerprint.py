"""Names what K/V depends on besides tokens: weights, types, layout, kernels.

Start-up thread. Weights are identified by their files' names, sizes and modification times. A copied file has another
fingerprint: that costs a cache, and never gives a wrong answer. Daemons of several machines need one fingerprint for
copies: `by_content` reads the files, except those of the hub's cache, whose names are their digests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from pathlib import Path

from torch import Tensor

from engine.config import EngineConfig
from engine.gguf_parts import part_paths
from engine.regular_file import check_regular
from engine.runtime.native.library import native
from engine.runtime.weights.formats import SUFFIXES

_VERSION = 1  # version of a block's content; raise it when a kernel's results change
_TOLD_BY = (".safetensors", ".json", *SUFFIXES)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 1 << 20


def fingerprint(config: EngineConfig, dtype: str, blocks: Sequence[Tensor], *, by_content: bool = False) -> str:
    """Return a digest for file names; `blocks` are KVCache's views of the pool."""
    library = native()
    facts = {
        "version": _VERSION,
        "weights": _contents(Path(config.model)) if by_content else _files(Path(config.model)),
        "load_format": config.load_format,
        "seed": config.seed if config.load_format == "dummy" else None,
        "hf_overrides": config.hf_overrides,
        "model_impl": config.model_impl,
        "dtype": dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "block_size": config.block_size,
        "attention_backend": config.attention_backend,
        "device": blocks[0].device.type,
        "kernels": None if library is None else library.isa.name,
        "layout": [[str(view.dtype), *view.shape[1:]] for view in blocks],
    }
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, person=b"quire.kv").hexdigest()


def _files(path: Path) -> list[tuple[str, int, int]]:
    stats = [(file.name, file.stat()) for file in _told_by(path)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _contents(path: Path) -> list[str]:
    """Return the SHA-256 of each file; hashlib releases the GIL, so threads read in parallel."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_digest, _told_by(path)))


def _told_by(path: Path) -> list[Path]:
    files = sorted(path.iterdir()) if path.is_dir() else part_paths(path)
    return [file for file in files if file.suffix in _TOLD_BY]


def _digest(path: Path) -> str:
    stored = path.resolve().name
    if _SHA256.fullmatch(stored):
        return stored
    check_regular(path)
    digest, descriptor = sha256(), os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while piece := os.read(descriptor, _READ_BYTES):
            digest.update(piece)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
