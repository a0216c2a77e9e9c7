"""An image as it crosses from preprocessing to the engine: what a vision tower takes, as numbers, by digest. Any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)  # without slots, as resources refer to it weakly
class Image:
    """An image after preprocessing; the digest stands for all else, and spans of a prompt name it."""

    digest: bytes  # of the arrays, and of the processor's options
    arrays: Mapping[str, NDArray[Any]]  # by the processor's own names (pixel_values, image_grid_thw, ...)
    num_tokens: int  # vectors that it becomes
    grid: tuple[int, int, int] | None = None  # frames, rows and columns of the vectors, where positions have three axes
