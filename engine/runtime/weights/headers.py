"""Finds the packed modules of a checkpoint in the headers of its files, without torch.

The tensors decide: a module is packed if its weight is stored as codes, whatever the config's lists say. A config that
contradicts them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from engine.core.errors import ModelLoadError
from engine.files.quant_config import QuantConfig

if TYPE_CHECKING:
    import torch

TYPES = {  # bytes of an element, and torch's name
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"), "I64": (8, "int64"),
    "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"), "U8": (1, "uint8"), "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu"),
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16", "F64")
CODES = ("I8", "U8", "I16", "I32", "I64", "F8_E4M3", "F8_E8M0")
_WEIGHTS = (".weight_packed", ".qweight", "_blocks", ".weight")  # the names of a module's codes
# Scales of activations and of the KV cache: Quire chooses its own. A packed weight's shape is known from the config.
_UNUSED = (
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

    dtype: torch.dtype = getattr(torch, TYPES[kind][1])
    return dtype


def is_unused(name: str) -> bool:
    """Return whether a quantised checkpoint's tensor is read by no model."""
    return name.endswith(_UNUSED)


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
