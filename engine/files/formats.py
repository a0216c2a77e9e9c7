"""The formats of weight files, by the names of --load-format. A format is one class and one line of FORMATS.

The class is a Checkpoint (checkpoint.py), made of a path and a seed for random weights. Making one reads the config, and
imports no torch. Standard library only; the class is imported when a path is of that format.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ModelLoadError


class FileFormat(NamedTuple):
    """Where weights come from."""

    suffix: str | None  # of the files that users name; "" for a folder, None for anything
    reader: str  # a Checkpoint, as module:class

    def accepts(self, path: Path) -> bool:
        """Return whether an existing path is of this format."""
        if self.suffix:
            return path.suffix == self.suffix and path.is_file()
        return self.suffix is None or path.is_dir()


FORMATS = {  # `auto` takes the first that accepts the path
    "safetensors": FileFormat("", "engine.runtime.weights.safetensors:SafetensorsCheckpoint"),
    "gguf": FileFormat(".gguf", "engine.runtime.weights.gguf:GGUFCheckpoint"),
    "dummy": FileFormat(None, "engine.runtime.weights.dummy:DummyCheckpoint"),
}

SUFFIXES = tuple(each.suffix for each in FORMATS.values() if each.suffix)
LOCAL = f"a model folder or a {' or '.join(SUFFIXES)} file"  # the end of sentences that say what to name


def is_model(path: Path) -> bool:
    """Return whether an existing path is a folder, or a file of a known format."""
    return any(each.suffix is not None and each.accepts(path) for each in FORMATS.values())


def choose_format(load_format: str, path: Path) -> FileFormat:
    """Return the format of --load-format for a path. Raises ModelLoadError."""
    if load_format == "auto":
        return next(each for each in FORMATS.values() if each.accepts(path))
    chosen = FORMATS[load_format]
    if not chosen.accepts(path):
        kind = f"a {chosen.suffix} file" if chosen.suffix else "a model folder"
        raise ModelLoadError(f"--load-format is {load_format!r}, for which {path} must be {kind}; leave it out.")
    return chosen
