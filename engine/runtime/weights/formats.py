"""The formats of weight files, by the names of --load-format. A format is one module and one line of FORMATS.

The module has three functions: `read_config(path)` returns the HFConfig without importing torch, `check(path)` raises
ModelLoadError for weights that cannot be opened, also without torch, and `open_checkpoint(path, seed)` returns a
Checkpoint. Standard library only; a format's module is imported when a path is of that format.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.core.errors import ModelLoadError

if TYPE_CHECKING:
    from engine.runtime.weights.checkpoint import Checkpoint
    from engine.runtime.weights.hf_config import HFConfig


class FileFormat(NamedTuple):
    """Where weights come from."""

    suffix: str | None  # of the files that users name; "" for a folder, None for anything
    module: str

    def accepts(self, path: Path) -> bool:
        """Return whether an existing path is of this format."""
        if self.suffix:
            return path.suffix == self.suffix and path.is_file()
        return self.suffix is None or path.is_dir()

    def read_config(self, path: Path) -> HFConfig:
        """Return the model's config as config.json spells it. Raises ModelLoadError."""
        config: HFConfig = import_module(self.module).read_config(path)
        return config

    def check(self, path: Path) -> None:
        """Raise ModelLoadError for weights that cannot be opened."""
        import_module(self.module).check(path)

    def open(self, path: Path, seed: int) -> Checkpoint:
        """Return the checkpoint; `seed` is for random weights. Raises ModelLoadError."""
        checkpoint: Checkpoint = import_module(self.module).open_checkpoint(path, seed)
        return checkpoint


FORMATS = {  # `auto` takes the first that accepts the path
    "safetensors": FileFormat("", "engine.runtime.weights.safetensors"),
    "gguf": FileFormat(".gguf", "engine.runtime.weights.gguf"),
    "dummy": FileFormat(None, "engine.runtime.weights.dummy"),
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
