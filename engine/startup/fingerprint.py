"""Names what K/V depends on besides tokens: the content of the model's files, types, layout, kernels.

The names of K/V that outlives a process or leaves it begin with a fingerprint, so the K/V of another model, even of a
fine-tune whose files have the same names, sizes and times, is never found. Tokenizers and templates are no part of it:
they choose the tokens, which name the blocks. Adapters are part of a block's name (lora/loader.py). Start-up thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.files.file_digests import FileDigests
from engine.handle import Layout
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.native.build import source_digest
from engine.runtime.native.library import native
from engine.runtime.pool.groups import LayerGroups
from engine.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from engine.settings.engine_config import EngineConfig
from engine.settings.speculative_config import METHODS
from engine.system.regular_file import expanded
from engine.system.version import VERSION

_DIGEST_BYTES = 20  # two models with one fingerprint take 2**80 attempts to make
# Kinds of RoPE whose frequencies follow the longest sequence that is served, in every spelling.
_BY_LENGTH = ('"dynamic"', '"longrope"', '"su"', '"long_factor"')


class ModelContent:
    """The files that K/V is computed from: config and weights of the model, and of a draft whose K/V is in the same blocks."""

    def __init__(self, config: EngineConfig) -> None:
        """Note the files as they are before they are loaded. Raises ModelLoadError."""
        drafts = config.speculation
        self._method = drafts.method if drafts is not None and METHODS[drafts.method].check else None
        asked = [config]
        if self._method is not None and drafts is not None and drafts.model is not None:
            asked.append(config.of_draft(drafts))
        checkpoints = [open_checkpoint(each.load_format, Path(each.model), each.seed) for each in asked]
        self._files = [[*each.files] for each in checkpoints]
        self._files[0] += [expanded(config.mmproj)] if config.mmproj else []
        self._digests = FileDigests(path for files in self._files for path in files)
        self._settings = [
            {
                "seed": each.seed if each.load_format == "dummy" else None,
                "hf_overrides": each.hf_overrides,
                "quantization": each.quantization,
                "served_len": each.max_model_len or config.max_model_len if _is_by_length(each, checkpoint) else None,
            }
            for each, checkpoint in zip(asked, checkpoints, strict=True)
        ]
        self._facts: list[Any] | None = None

    def begin(self) -> None:
        """Start to read the files on other threads."""
        self._digests.begin()

    def stop(self) -> None:
        """End the threads."""
        self._digests.stop()

    def facts(self) -> list[Any]:
        """Return the files' digests, once they are there, and the settings to read them. Raises ModelLoadError."""
        if self._facts is None:
            found = self._digests.get()
            digests = [[found[path] for path in files] for files in self._files]
            self._facts = [self._method, digests, self._settings]
        return self._facts


def fingerprint(
    config: EngineConfig, dtype: str, blocks: Sequence[Tensor], content: ModelContent, groups: LayerGroups
) -> str:
    """Return a digest for file names; `blocks` are KVCache's views of the pool, which `groups` of layers share."""
    library = native()
    facts = {
        "quire": VERSION,
        "libraries": [torch.__version__, metadata.version("transformers")],
        "kernels": None if library is None else [source_digest(), "any" if library.is_portable else library.isa.name],
        "content": content.facts(),
        "model_impl": config.model_impl,
        "dtype": dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "state_dtype": config.state_dtype,
        "block_size": config.block_size,
        "attention_backend": config.attention_backend,
        "device": blocks[0].device.type,
        "layout": [[str(view.dtype), *view.shape[1:]] for view in blocks],
        "groups": groups,
    }
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=b"quire.kv2").hexdigest()


@contextmanager
def reading(config: EngineConfig, *, hands_over: bool) -> Iterator[ModelContent | None]:
    """Read the model's files to name K/V by, on other threads; None if all K/V ends with this process."""
    if not hands_over and config.kv_offload_dir is None:
        yield None
        return
    content = ModelContent(config)
    content.begin()
    try:
        yield content
    finally:
        content.stop()


def layout(
    config: EngineConfig, settings: SchedulerConfig, runner: ModelRunner, dtype: torch.dtype, content: ModelContent
) -> Layout:
    """Return what two engines must have in common to exchange K/V."""
    num_bytes = sum(view[0].nbytes for view in runner.blocks)
    name = fingerprint(config, str(dtype), runner.blocks, content, runner.groups)
    return Layout(name, settings.block_size, num_bytes)


def _is_by_length(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return whether --max-model-len changes the K/V. Where it only might, the answer is yes."""
    text = json.dumps([checkpoint.config.values, config.hf_overrides], default=str)
    return any(kind in text for kind in _BY_LENGTH)
