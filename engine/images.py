"""An image as it crosses from preprocessing to the engine: what a vision tower takes, as numbers, by digest. Any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from engine.core.errors import ConfigError
from engine.settings.setting import unknown_key

_LIMIT = "--limit-mm-per-prompt"
_KINDS = ("image", "video", "audio")  # vLLM's; of the last two, prompts have none
_MAX_IMAGES = 32  # in a prompt


@dataclass(frozen=True, eq=False)  # without slots, as resources refer to it weakly
class Image:
    """An image after preprocessing; the digest stands for all else, and spans of a prompt name it."""

    digest: bytes  # of the arrays, and of the processor's options
    arrays: Mapping[str, NDArray[Any]]  # by the processor's own names (pixel_values, image_grid_thw, ...)
    num_tokens: int  # vectors that it becomes
    grid: tuple[int, int, int] | None = None  # frames, rows and columns of the vectors, where positions have three axes


def most_images(limits: Mapping[str, Any] | None) -> int:
    """Return how many images a prompt may have, as --limit-mm-per-prompt says. Raises ConfigError."""
    limits = limits or {}
    if unknown := [key for key in limits if key not in _KINDS]:
        raise unknown_key(_LIMIT, unknown[0], _KINDS)
    found = limits.get("image", _MAX_IMAGES)
    count = found.get("count", _MAX_IMAGES) if isinstance(found, Mapping) else found
    if type(count) is not int or count < 0:
        raise ConfigError(f'{_LIMIT}: image is {found!r}; it must be a whole number, as in {{"image": 4}}.')
    return count


class VectorMaker(Protocol):
    """Makes the vectors of images between steps, on the engine thread."""

    def has(self, digest: bytes) -> bool:
        """Return whether an image's vectors are there."""

    def advance(self, digests: Sequence[bytes], seconds: float) -> None:
        """Work on the vectors of the first of some images, which requests hold, for about so long."""

    def close(self) -> None:
        """End the work."""
