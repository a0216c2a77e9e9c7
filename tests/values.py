"""Writes the values that cross an EngineHandle as bytes, and reads them back. JSON with the names of types; no pickle.

Only the types of TYPES can be written: whatever else gets through the door of an engine is found by the tests that run
with the engine in another process.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PosixPath
from typing import Any

import numpy as np

from engine import handle
from engine.core import config, errors, page_table, stats, types
from engine.files.vector_files import DenseModule
from engine.images import Image
from engine.settings.kv_events_config import KVEventsConfig
from engine.settings.peer import Peer
from engine.text.grammars import spec

_MODULES = (handle, config, errors, page_table, stats, types, spec)
_NOT_VALUES = (
    handle.Command,
    handle.EngineHandle,
    types.StepEvents,
    types.PlainTokens,
    Enum,
    page_table.SequenceKV,
    page_table.StateSlots,
    page_table.Ticket,
)


def _is_value(kind: object) -> bool:
    if not isinstance(kind, type) or kind in _NOT_VALUES:
        return False
    return is_dataclass(kind) or issubclass(kind, Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


TYPES: dict[str, type] = {
    **{kind.__name__: kind for module in _MODULES for kind in vars(module).values() if _is_value(kind)},
    "KVEventsConfig": KVEventsConfig,
    "Peer": Peer,
    "DenseModule": DenseModule,
    "Image": Image,
    "Histogram": stats.Histogram,
}


def dumps(value: object) -> bytes:
    """Return a value's bytes."""
    return json.dumps(_written(value)).encode()


def loads(data: bytes) -> Any:
    """Return the value of such bytes."""
    return _read(json.loads(data))


def _written(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in (tuple, list):
        return {kind.__name__: [_written(each) for each in value]}
    if kind is frozenset:
        return {"frozenset": sorted(map(_written, value), key=json.dumps)}
    if kind is dict:
        return {"dict": [[_written(key), _written(each)] for key, each in value.items()]}
    if kind is PosixPath:
        return {"path": str(value)}
    if kind is np.ndarray:
        return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    assert TYPES.get(kind.__name__) is kind, f"{kind} may not cross"
    if isinstance(value, Enum):
        return {kind.__name__: value.name}
    return {kind.__name__: [_written(getattr(value, name)) for name in _names(kind)]}


def _names(kind: Any) -> tuple[str, ...]:
    if kind is stats.Histogram:
        return ("bounds", "counts", "sum")
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else kind._fields


def _read(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    [(name, inner)] = document.items()
    if name == "bytes":
        return bytes.fromhex(inner)
    if name in ("tuple", "list", "frozenset"):
        return {"tuple": tuple, "list": list, "frozenset": frozenset}[name](_read(each) for each in inner)
    if name == "dict":
        return {_read(key): _read(each) for key, each in inner}
    if name == "path":
        return PosixPath(inner)
    if name == "array":
        dtype, shape, data = inner
        return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)
    kind: Any = TYPES[name]
    if issubclass(kind, Enum):
        return kind[inner]
    values = dict(zip(_names(kind), map(_read, inner), strict=True))
    if kind is stats.Histogram:
        made = stats.Histogram(values["bounds"])
        made.counts, made.sum = values["counts"], values["sum"]
        return made
    return kind(**values)
