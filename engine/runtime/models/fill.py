"""Loads a checkpoint into a model, part by part. Runs once, on the thread that builds the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from engine.core.errors import MemoryBudgetError, ModelLoadError
from engine.core.types import Progress, ReportProgress
from engine.runtime.layers.parts import Load
from engine.runtime.models.complete import COMPUTED, EMBEDDING, HEAD, listed
from engine.runtime.native.library import native
from engine.runtime.native.packer import Packer
from engine.runtime.weights.checkpoint import Checkpoint, StoredTensor
from engine.system.host_limits import available_memory

_GIB = 1 << 30
_MARGIN = 1 << 24  # elements of difference up to which tensors are compared one by one


def fill(
    loads: Sequence[Load],
    checkpoint: Checkpoint,
    report: ReportProgress,
    *,
    is_tied: bool = False,
    is_part: bool = False,
) -> None:
    """Load the parts of a model in order; the files must hold their tensors and, unless it is a part, no others.

    If the head is tied to the embedding, a second head in the files must equal it.
    """
    wanted = {name: shape for load in loads for name, shape in load.shapes.items()}
    found = checkpoint.tensors(wanted)
    stored = {
        tensor.name: tensor
        for tensor in found
        if not tensor.name.endswith(COMPUTED) and (tensor.name in wanted or not is_part)
    }
    head = stored.pop(HEAD, None) if is_tied else None
    _check(wanted, stored, checkpoint.config.source)
    sizes = {name: int(stored[name].num_bytes * load.share) for load in loads for name in load.shapes}
    total, done = sum(sizes.values()), 0
    library = native()
    packer = Packer() if library is None else library.packer
    with packer.behind():
        for load in loads:
            load.take({name: stored[name] for name in load.shapes})
            for name in load.shapes:
                done += sizes[name]
                packer.after(partial(report, Progress("weights", name, done, total, "bytes")))
    if head is not None:
        _require_tied(head, stored[EMBEDDING])


def check_size(checkpoint: Checkpoint, num_weights: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise, before allocating, if a config needs far more weights than there are.

    Files hold so many; random weights need main memory, and a GPU raises by itself. `fill` reports smaller differences,
    with the tensor's name.
    """
    source, stored = checkpoint.config.source, checkpoint.num_weights
    if stored is not None:
        if num_weights > 2 * stored + _MARGIN:
            raise ModelLoadError(
                f"{source} does not match its weights: it calls for {num_weights} elements, and the files hold {stored}."
            )
        return
    num_bytes, room = num_weights * dtype.itemsize, available_memory()
    if device.type == "cpu" and num_bytes > room:
        raise MemoryBudgetError(
            f"config.json calls for {num_bytes / _GIB:.1f} GiB of weights, and this machine has {room / _GIB:.1f} GiB of memory "
            "left; choose a smaller model or a smaller --dtype."
        )


def _check(wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor], source: str) -> None:
    """Raise ModelLoadError unless the files hold the wanted tensors, in the wanted shapes."""
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unexpected:
        what = [f"it lacks {listed(missing)}"] if missing else []
        what += [f"it has {listed(unexpected)} that its config does not call for"] if unexpected else []
        raise ModelLoadError(f"{source} does not match its weights: {', and '.join(what)}.")
    for name, tensor in stored.items():
        if tensor.shape != wanted[name]:
            raise ModelLoadError(
                f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, but the config asks for "
                f"{list(wanted[name])}."
            )


def _require_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise if a checkpoint holds a tied head that differs from the embedding."""
    first, second = torch.empty(embedding.shape), torch.empty(head.shape)
    embedding.copy_to(first)
    head.copy_to(second)
    if not torch.equal(first, second):
        raise ModelLoadError(
            f"{head.file}: {HEAD!r} differs from {EMBEDDING!r}, though the config ties them; set "
            "'tie_word_embeddings' to false in config.json."
        )
