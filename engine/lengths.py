"""Keeps the last run's sequence lengths in a file, for `--block-size auto`.

One small JSON file a model. A file that cannot be read or written only costs the choice its data: nothing fails.
Start-up thread, and the engine thread at its end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from engine.regular_file import read_json

_MAX_BYTES = 1 << 20
_VERSION = 1


class LengthsFile:
    """The file of one model."""

    def __init__(self, model: str) -> None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "lengths"
        name = blake2b(model.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        self._path = folder / f"{name}.json"

    def load(self) -> list[int]:
        """Return the lengths of the last run, or none."""
        with suppress(OSError, ValueError, TypeError):
            document = read_json(self._path, _MAX_BYTES)
            if isinstance(document, dict) and document.get("version") == _VERSION:
                return [length for length in document.get("lengths", ()) if isinstance(length, int) and length > 0]
        return []

    def save(self, lengths: Sequence[int]) -> None:
        """Replace the file, unless nothing was served."""
        if not lengths:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({"version": _VERSION, "lengths": list(lengths)}), encoding="utf-8")
            written.replace(self._path)
