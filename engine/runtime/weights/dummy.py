"""Random weights for any model's config, to benchmark any size without a checkpoint.

Seeded, and scaled to keep activations finite. A few million numbers are drawn once and repeated, because drawing
billions would take a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from engine.runtime.weights.checkpoint import Checkpoint, StoredTensor, open_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

_SCALE = 0.02  # the usual initialisation
_NUM_DRAWN = (1 << 22) - 3  # odd, so that the rows of a matrix differ
_ELEMENT_BYTES = 2  # as a file would have them
_ZERO, _ONE = methodcaller("zero_"), methodcaller("fill_", 1.0)  # of a tensor


class DummyCheckpoint(Checkpoint):
    """Norms of 1, biases of 0, and random matrices, for a model of any other format."""

    files: Sequence[Path] = ()

    def __init__(self, path: Path, seed: int) -> None:
        self.config = open_checkpoint("auto", path).config
        self._seed = seed
        self.files = [path / "config.json" if path.is_dir() else path]
        self._drawn: Tensor | None = None

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterator[StoredTensor]:
        for name, shape in wanted.items():
            copy_to = _ZERO if name.endswith(".bias") else _ONE if "norm" in name else self._tile
            yield StoredTensor(name, shape, math.prod(shape) * _ELEMENT_BYTES, name, copy_to)

    def _tile(self, target: Tensor) -> None:
        drawn = self._drawn = _draw(self._seed, target) if self._drawn is None else self._drawn
        flat = target.view(-1)
        for start in range(0, flat.numel(), drawn.numel()):
            part = flat[start : start + drawn.numel()]
            part.copy_(drawn[: part.numel()])


def _draw(seed: int, target: Tensor) -> Tensor:
    """Return random numbers in a tensor's type, on its device."""
    import torch

    return (torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(seed)) * _SCALE).to(target)
