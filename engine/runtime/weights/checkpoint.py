"""The interface of weight files: a config.json, and named tensors that are read one at a time.

Readers translate names to Hugging Face's, so models know one spelling. engine/files/formats.py lists the readers. Imports no
torch, because a config is read before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from engine.files.formats import choose_format
from engine.files.hf_config import HFConfig
from engine.files.quant_config import QuantConfig
from engine.runtime.native.rows import StoredRows
from engine.runtime.weights.headers import Headers

if TYPE_CHECKING:
    from torch import Tensor


class StoredTensor(NamedTuple):
    """One tensor of a file; `copy_to` converts it into a tensor of the same shape.

    `kind` is its type as safetensors names it, "" for others. `rows` returns the rows of a matrix as stored, if they lie in
    the file, each in one piece; `copy_rows` converts some of them, of which `block` inputs are stored together.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str
    copy_to: Callable[[Tensor], None]
    rows: Callable[[], StoredRows] | None = None
    kind: str = ""
    copy_rows: Callable[[StoredRows, Tensor], None] | None = None
    block: int = 1


class Checkpoint:
    """A checkpoint; making one reads its config. Here is what most have."""

    config: HFConfig
    quantization: QuantConfig | None = (
        None  # the settings of packed modules; None for plain weights, and for GGUF's rows
    )

    def check(self) -> None:
        """Raise ModelLoadError for weights that cannot be opened; without torch."""

    @property
    def files(self) -> Sequence[Path]:
        """Return the files that config and weights are read from, in the order of reading. Raises ModelLoadError."""
        raise NotImplementedError

    @property
    def is_body(self) -> bool:
        """Return whether the files hold a model that was saved without its LM head, for its vectors."""
        return False

    @property
    def num_weights(self) -> int | None:
        """Return how many elements the files hold; None for as many as asked for."""
        return None

    def headers(self) -> Headers:
        """Return the stored types and shapes of a quantised checkpoint's tensors."""
        return {}

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterable[StoredTensor]:
        """Yield every tensor, file by file; random weights yield those `wanted`, name to shape."""
        raise NotImplementedError

    def towers(self) -> Sequence[StoredTensor]:
        """Return the tensors beside those of the language model, under the names in the files."""
        return ()


def open_checkpoint(load_format: str, path: Path, seed: int = 0) -> Checkpoint:
    """Return the checkpoint at a path, its config read; `seed` is of random weights. Raises ModelLoadError."""
    checkpoint: Checkpoint = resolve_name(choose_format(load_format, path).reader)(path, seed)
    return checkpoint
