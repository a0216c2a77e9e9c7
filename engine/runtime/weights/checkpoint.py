"""The interface of weight files: a config.json, and named tensors that are read one at a time.

Readers translate names to Hugging Face's, so models know one spelling. engine/files/formats.py lists the readers. Imports no
torch, because a config is read before torch is imported.

Packed modules are found in the headers. The tensors decide: a module is packed if its weight is stored as codes, whatever the config's lists say. A config that
contradicts them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from engine.core.errors import ModelLoadError
from engine.files.formats import choose_format
from engine.files.hf_config import HFConfig
from engine.files.quant_config import QuantConfig
from engine.runtime.native.rows import StoredRows
from engine.system.regular_file import expanded

if TYPE_CHECKING:
    import torch
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

    tower: Sequence[StoredTensor] = ()  # of a vision half in another file

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

    def held_bytes(self, of_float: int, of_matrix: int | None) -> float:  # noqa: ARG002 - of those with files
        """Return the bytes of the weights in memory, by the headers.

        A float takes `of_float`; a number of a matrix `of_matrix`, or None: as it is stored, packed.
        """
        return 0

    def headers(self) -> Headers:
        """Return the stored types and shapes of a quantised checkpoint's tensors."""
        return {}

    def tensors(self, wanted: Mapping[str, tuple[int, ...]]) -> Iterable[StoredTensor]:
        """Yield every tensor, file by file; random weights yield those `wanted`, name to shape."""
        raise NotImplementedError

    def towers(self) -> Sequence[StoredTensor]:
        """Return the tensors beside those of the language model, under the names in the files."""
        return self.tower


def open_checkpoint(load_format: str, path: Path, seed: int = 0, mmproj: str | None = None) -> Checkpoint:
    """Return the checkpoint at a path, its config read; `seed` is of random weights, `mmproj` the file of its vision half.

    Raises ModelLoadError, and ConfigError for a model that has its vision half in its own files.
    """
    checkpoint: Checkpoint = resolve_name(choose_format(load_format, path).reader)(path, seed)
    if mmproj is not None:
        resolve_name("engine.runtime.weights.mmproj:add_tower")(checkpoint, path, expanded(mmproj))
    return checkpoint


class Cut(NamedTuple):
    """Elements `first` and on of the `total` along a side."""

    first: int
    num: int
    total: int

    def scaled(self, size: int) -> Cut | None:
        """Return the same part of a side of another size, as scales have it; None if it is no whole number.

        Blocks have sides of a power of two; where the last is not full, the sides show another number.
        """
        if size == self.total:
            return self
        each, rest = divmod(self.total, size)
        if rest or each & (each - 1) or self.first % each or self.num % each:
            return None
        return Cut(self.first // each, self.num // each, size)


class Span(NamedTuple):
    """A part of a module: outputs and inputs of the whole one; None: all."""

    rows: Cut | None = None
    inputs: Cut | None = None


def cut(tensor: StoredTensor, *sides: Cut | None) -> StoredTensor:
    """Return a part of a tensor; a side without a cut is whole."""
    wanted = [each if each is not None else Cut(0, dim, dim) for each, dim in zip(sides, tensor.shape, strict=False)]
    wanted += [Cut(0, dim, dim) for dim in tensor.shape[len(wanted) :]]
    if all(each.num == each.total for each in wanted):
        return tensor
    shape = tuple(each.num for each in wanted)
    num_bytes = tensor.num_bytes * math.prod(shape) // math.prod(tensor.shape)
    rows, copy_rows = tensor.rows, tensor.copy_rows
    if rows is None or copy_rows is None:
        return tensor._replace(shape=shape, num_bytes=num_bytes, rows=None, copy_to=partial(_copy_part, tensor, wanted))

    def part() -> StoredRows:
        return _cut_rows(rows(), wanted[0], wanted[1])

    return tensor._replace(
        shape=shape, num_bytes=num_bytes, rows=part, copy_to=lambda target: copy_rows(part(), target)
    )


def _cut_rows(stored: StoredRows, rows: Cut, inputs: Cut) -> StoredRows:
    """Return a part of rows, which does not cut the blocks of a GGUF type."""
    step, row_bytes = stored.rows.strides[0], stored.rows.shape[1]
    begin, end = (inputs.first + n for n in (0, inputs.num))
    begin, end = begin * row_bytes // inputs.total, end * row_bytes // inputs.total
    return stored._replace(
        rows=stored.rows[rows.first : rows.first + rows.num, begin:end],
        offset=stored.offset + rows.first * step + begin,
    )


def _copy_part(tensor: StoredTensor, sides: Sequence[Cut], target: Tensor) -> None:
    """Read a whole tensor, and copy a part of it: for vectors, and for tensors that do not lie in rows."""
    whole = target.new_empty(tensor.shape)
    tensor.copy_to(whole)
    for dim, side in enumerate(sides):
        whole = whole.narrow(dim, side.first, side.num)
    target.copy_(whole)


TYPES = {  # bytes of an element, and torch's name
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"), "I64": (8, "int64"),
    "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"), "U8": (1, "uint8"), "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu"),
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16", "F64")
CODES = ("I8", "U8", "I16", "I32", "I64", "F8_E4M3", "F8_E8M0")
_WEIGHTS = (".weight_packed", ".qweight", "_blocks", ".weight")  # the names of a module's codes
# Scales of activations and of the KV cache: Quire chooses its own. A packed weight's shape is known from the config.
UNUSED = (
    ".input_scale",
    ".activation_scale",
    ".activation_scale_ub",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".weight_format",
    ".weight_shape",
)


class Header(NamedTuple):
    """A tensor's stored type and shape."""

    kind: str
    shape: tuple[int, ...]


Headers = Mapping[str, Header]


def dtype_of(kind: str) -> torch.dtype:
    """Return torch's type for a stored one."""
    import torch

    return getattr(torch, TYPES[kind][1])


def is_packed(headers: Headers, module: str) -> bool:
    """Return whether a module's weight is stored as codes."""
    found = next((headers[module + end] for end in _WEIGHTS if module + end in headers), None)
    return found is not None and found.kind in CODES


def module_of(name: str) -> str | None:
    """Return the module whose weight or codes a tensor is; None for other tensors."""
    return next((name.removesuffix(end) for end in _WEIGHTS if name.endswith(end)), None)


def check_packed(config: QuantConfig, headers: Headers) -> None:
    """Raise ModelLoadError for packed modules that the config excludes, or that a model cannot read."""
    for name, header in headers.items():
        module = module_of(name)
        if module is None or header.kind not in CODES:
            continue
        if len(header.shape) < 2:
            raise ModelLoadError(
                f"{config.source}: tensor {name!r} is stored as {header.kind}, and only matrices can be; download the "
                "model again."
            )
        if config.of(module) is None:
            raise ModelLoadError(
                f"{config.source} says that {module!r} is not quantised, but it is stored as {header.kind}; correct its "
                "list of exceptions, or download the model again."
            )
