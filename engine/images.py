"""An image as it crosses from preprocessing to the engine: what a vision tower takes, as numbers, by digest. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)  # without slots, as resources refer to it weakly
class Image:
    """An image after preprocessing; the digest stands for all else, and spans of a prompt name it."""

    digest: bytes  # of the arrays, and of the processor's options
    arrays: Mapping[str, NDArray[Any]]  # by the processor's own names (pixel_values, image_grid_thw, ...)
    num_tokens: int  # vectors that it becomes
    grid: tuple[int, int, int] | None = None  # frames, rows and columns of the vectors, where positions have three axes


class VectorMaker(Protocol):
    """Makes the vectors of images between steps, on the engine thread."""

    def has(self, digest: bytes) -> bool:
        """Return whether an image's vectors are there."""

    def advance(self, digests: Sequence[bytes], seconds: float) -> None:
        """Work on the vectors of the first of some images, which requests hold, for about so long."""

    def close(self) -> None:
        """End the work."""
