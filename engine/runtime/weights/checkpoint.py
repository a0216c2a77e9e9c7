"""The interface of weight files: a config.json, and named tensors to copy one at a time.

The GGUF reader translates names to Hugging Face's, so models know one spelling. engine/runtime/models/load.py chooses
the reader. Loading happens once, on the thread that builds the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.core.types import Progress
from engine.runtime.native.quantised import QuantisedRows

Report = Callable[[Progress], None]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MARGIN = 1 << 24  # elements of difference up to which tensors are compared one by one
# Buffers in old checkpoints that every model computes itself.
_COMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attention.bias")


class StoredTensor(NamedTuple):
    """One tensor of a file; `copy_to` converts it into a tensor of the same shape.

    `quantised` returns the rows as stored, if they can be multiplied in that format.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str
    copy_to: Callable[[Tensor], None]
    quantised: Callable[[], QuantisedRows] | None = None


Keep = Callable[[StoredTensor], None]


class Checkpoint(Protocol):
    """An open checkpoint."""

    config: Mapping[str, Any]  # as in config.json
    source: str  # for errors: the file the config came from

    def tensors(self) -> Iterable[StoredTensor]:
        """Yield every tensor, file by file; a tensor is read by its `copy_to`."""
        ...


def fill(
    targets: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    report: Report,
    *,
    tied_head: bool,
    keepers: Mapping[str, Keep] | None = None,
) -> None:
    """Copy a checkpoint into a model's empty weights, each exactly once.

    Quantised tensors with a keeper go there as stored instead of being copied, and so do tensors that become fp8. An
    embedding that is also the head is copied as well.
    """
    keepers = keepers or {}
    stored = [tensor for tensor in checkpoint.tensors() if not tensor.name.endswith(_COMPUTED)]
    heads = [tensor for tensor in stored if tied_head and tensor.name == _HEAD]
    stored = [tensor for tensor in stored if tensor not in heads]
    names = {tensor.name for tensor in stored}
    missing, unexpected = sorted(targets.keys() - names), sorted(names - targets.keys())
    if missing or unexpected:
        what = [f"it lacks {_listed(missing)}"] if missing else []
        what += [f"it has {_listed(unexpected)} that its config does not call for"] if unexpected else []
        hint = "; it was saved without its LM head, as models for embeddings alone are" if missing == [_HEAD] else ""
        raise ModelLoadError(f"{checkpoint.source} does not match its weights: {', and '.join(what)}{hint}.")
    total, done = sum(tensor.num_bytes for tensor in stored), 0
    for tensor in stored:
        target = targets[tensor.name]
        if tensor.shape != tuple(target.shape):
            raise ModelLoadError(
                f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, but the config asks for "
                f"{list(target.shape)}."
            )
        is_kept = tensor.quantised is not None or target.dtype == torch.float8_e4m3fn
        keep = keepers.get(tensor.name) if is_kept else None
        if keep is not None:
            keep(tensor)
        if keep is None or (tied_head and tensor.name == _EMBEDDING):
            tensor.copy_to(target)
        done += tensor.num_bytes
        report(Progress("weights", tensor.name, done, total, "bytes"))
    for head in heads:
        _require_tied(head, targets[_EMBEDDING])


def check_size(checkpoint: Checkpoint, num_weights: int) -> None:
    """Raise, before allocating, if a config needs far more weights than the files hold.

    `fill` reports smaller differences, with the tensor's name.
    """
    stored = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors())
    if num_weights > 2 * stored + _MARGIN:
        raise ModelLoadError(
            f"{checkpoint.source} does not match its weights: it calls for {num_weights} elements, and the files hold {stored}."
        )


def _require_tied(head: StoredTensor, embedding: Tensor) -> None:
    """Raise if a checkpoint holds a tied head that differs from the embedding."""
    second = torch.empty(head.shape, dtype=embedding.dtype)
    head.copy_to(second)
    if not torch.equal(second, embedding.cpu()):
        raise ModelLoadError(
            f"{head.file}: {_HEAD!r} differs from {_EMBEDDING!r}, though the config ties them; set "
            "'tie_word_embeddings' to false in config.json."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
