"""Adapters for the fake model: a parrot that shouts, or says everything a few letters further on."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from harness import END

from engine.core.errors import AdapterLoadError, AdapterNotFoundError
from engine.core.rows import SequenceSlice
from loadtest.fake_runner import FakeRunner


@dataclass(frozen=True, eq=False)
class Shift:
    """Letters move by `distance`."""

    name: str
    distance: int

    @property
    def digest(self) -> bytes:
        return sha256(str(self.distance).encode()).digest()


DISTANCES = {Shift("", distance).digest: distance for distance in range(30)}


def read_adapter(name: str, path: str) -> Shift:
    """A file that holds a number."""
    try:
        return Shift(name, int(Path(path).read_text()))
    except FileNotFoundError:
        raise AdapterNotFoundError(f"There is nothing at {path}.", param="lora_path") from None
    except ValueError:
        raise AdapterLoadError(f"{path} holds no number.") from None


class AdaptableParrot(FakeRunner):
    """What it draws depends on the adapter of the sequence."""

    def _draw(self, piece: SequenceSlice, history: list[int], seed: int) -> int:
        token = super()._draw(piece, history, seed)
        adapter = piece.params.adapter
        return token if adapter is None or token == END else token + DISTANCES[adapter.digest]
