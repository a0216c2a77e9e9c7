"""Names what K/V depends on besides tokens: weights, types, layout, kernels.

Start-up thread. Weights are identified by their files' names, sizes and modification times. A copied file has another
fingerprint: that costs a cache, and never gives a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from engine.config import EngineConfig
from engine.gguf_parts import part_paths
from engine.runtime.native.library import native
from engine.runtime.weights.formats import SUFFIXES

_VERSION = 1  # version of a block's content; raise it when a kernel's results change
_TOLD_BY = (".safetensors", ".json", *SUFFIXES)


def fingerprint(config: EngineConfig, dtype: str, blocks: Sequence[Tensor]) -> str:
    """Return a digest for file names; `blocks` are KVCache's views of the pool."""
    library = native()
    facts = {
        "version": _VERSION,
        "weights": _files(Path(config.model)),
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
    files = sorted(path.iterdir()) if path.is_dir() else part_paths(path)
    stats = [(file.name, file.stat()) for file in files if file.suffix in _TOLD_BY]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
