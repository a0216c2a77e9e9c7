"""What stores the modules of a checkpoint: plain tensors, or those of a format (formats.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.files.quant_config import QuantConfig
from engine.runtime.weights.checkpoint import Headers, StoredTensor, is_packed

if TYPE_CHECKING:
    from engine.runtime.weights.stored.formats import Format
    from engine.runtime.weights.stored.packed import Packed, Part


class Storage:
    """The tensors of each module of a checkpoint; without settings all are plain."""

    def __init__(self, config: QuantConfig | None = None, headers: Headers | None = None) -> None:
        self._config, self._headers = config, headers or {}
        self._parts: dict[str, tuple[type[Format], Part]] = {}  # the packed modules that were asked for

    @property
    def method(self) -> str | None:
        """Return the method of a quantised checkpoint, as its config names it."""
        return None if self._config is None else self._config.method

    def shapes(self, name: str, num_rows: int, num_inputs: int) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that store a module: the endings of their names, and shapes."""
        if self._config is None or not is_packed(self._headers, name):
            return {".weight": (num_rows, num_inputs)}
        settings = self._config.of(name)
        if settings is None:
            raise ModelLoadError(f"{self._config.source} says that {name!r} is not quantised, but it is stored so.")
        from engine.runtime.weights.stored.formats import format_of  # of packed modules, which most checkpoints lack
        from engine.runtime.weights.stored.packed import Part

        part = Part(name, num_rows, num_inputs, settings, self._headers)
        self._parts[name] = format_of(part), part
        return self._parts[name][0].shapes(part)

    def is_packed(self, name: str) -> bool:
        """Return whether a module that was asked for is stored as codes."""
        return name in self._parts

    def unpack(self, name: str, tensors: Mapping[str, StoredTensor]) -> Packed | None:
        """Return a packed module's weights; None for a plain one."""
        if name not in self._parts:
            return None
        found, part = self._parts[name]
        return found.unpack(part, tensors)

    def dequantise(self, name: str, tensors: Mapping[str, StoredTensor], rows: Tensor) -> None:
        """Write a module's weights to rows [rows, inputs] of any type and device."""
        packed = self.unpack(name, tensors)
        if packed is None:
            tensors[".weight"].copy_to(rows)
        else:
            rows.copy_(packed.dequantise())
