"""Typed access to a checkpoint's config.json.

Families read their settings through this module, which knows Hugging Face's spelling but no model. As in that library,
null means absent. A value that is missing or of the wrong type is a ModelLoadError that names the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from engine.core.errors import ModelLoadError

_MAX_SIZE = 1 << 40
FLOAT_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number

T = TypeVar("T", int, float, bool, str)
Known = TypeVar("Known")


class HFConfig:
    """A config.json, or one object inside it; `source` is named in errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: int | None = None) -> int:
        return self._read(key, int, default)

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """Return an integer of at least 1, within the bounds of memory."""
        found = self.integer(key, default)
        self.require(found >= 1, key, "an integer of at least 1")
        self.require(found <= most, key, f"at most {most}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.values.get(key)
        if type(value) is int and abs(value) < _MAX_SIZE:  # JSON writes 10000.0 and 10000 alike
            return float(value)
        found = self._read(key, float, default)
        self.require(math.isfinite(found), key, "a finite number")
        return found

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        found = self.number(key, default)
        self.require(found > 0, key, "a number above 0")
        return found

    def flag(self, key: str, default: bool = False) -> bool:
        return self._read(key, bool, default)

    def float_type(self, in_16_bits: str | None = None) -> str:
        """Return what --dtype auto is for the model: its own, or what takes the place of 16 bits here. Raises ModelLoadError."""
        name = str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in FLOAT_TYPES:
            raise ModelLoadError(f"{self.source}: dtype {name!r} is not one of {', '.join(FLOAT_TYPES)}; set --dtype.")
        return name if in_16_bits is None or name == "float32" else in_16_bits

    def text(self, key: str, default: str | None = None) -> str:
        return self._read(key, str, default)

    def chosen(self, key: str, known: Mapping[str, Known], default: str | None = None) -> Known:
        """Return what a string stands for."""
        name = self.text(key, default)
        self.require(name in known, key, f"one of {', '.join(known)}")
        return known[name]

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def optional_size(self, key: str) -> int | None:
        return self.size(key) if self.has(key) else None

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def optional_positive(self, key: str) -> float | None:
        return self.positive(key) if self.has(key) else None

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        values = self._list(key)
        if not all(isinstance(value, (int, float)) and abs(value) < _MAX_SIZE for value in values):
            raise self.error(key, "a list of finite numbers")
        return tuple(float(value) for value in values)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._list(key)
        self.require(all(isinstance(value, str) for value in values), key, "a list of strings")
        return tuple(values)

    def section(self, key: str) -> HFConfig:
        """Return the object under `key`; an empty one if it is absent."""
        value = self.values[key] if self.has(key) else {}
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return HFConfig(value, f"{self.source}, {key}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, wanted: str) -> ModelLoadError:
        """Return the error for an unusable value; `wanted` names the usable ones."""
        value = self.values.get(key)
        found = "is missing" if value is None else f"is {value!r:.200}"
        return ModelLoadError(f"{self.source}: {key!r} {found}; Quire needs {wanted}.")

    def require(self, condition: bool, key: str, wanted: str) -> None:
        """Raise that error unless the value is usable."""
        if not condition:
            raise self.error(key, wanted)

    def refuse(self, key: str, why: str) -> None:
        """Raise if the setting is on: it changes the answer and is not implemented."""
        if self.values.get(key):
            raise ModelLoadError(
                f"{self.source}: {key!r} is {self.values[key]!r:.200}, which Quire cannot serve: {why}."
            )

    def _read(self, key: str, kind: type[T], default: T | None) -> T:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not kind:
            raise self.error(key, {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind])
        return value

    def _list(self, key: str) -> Sequence[Any]:
        value = self.values.get(key)
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "a list")
        return value
