"""Packs a large JSON document for another process, in parts that are cheap to read again.

Pure functions, run by server/http/body_child.py, which packs, and by the slow thread, which unpacks.
"""

from __future__ import annotations

import json
from array import array
from itertools import islice
from typing import Any

from pydantic_core import from_json

_LONG_TEXT = 256  # characters; a longer string travels by itself
_LONG_LIST = 32  # items; a longer list of integers travels as an array
_SLICE = 4096  # items of a list or object that are read in one call, which holds the GIL for 1 ms

Place = list[str | int]


def pack(tree: Any) -> list[bytes]:
    """Return a document as parts that are cheap to read again: long texts and lists of integers beside the JSON."""
    places: list[tuple[Place, str]] = []
    parts: list[bytes] = []
    small = _without_long(tree, [], places, parts)
    return [json.dumps([small, places]).encode(), *parts]


def _without_long(value: Any, at: Place, places: list[tuple[Place, str]], parts: list[bytes]) -> Any:
    """Return the value with None in the place of everything that was appended to `parts`."""
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        places.append((at, ""))
        parts.append(value.encode())
        return None
    if isinstance(value, dict | list) and len(value) > _SLICE and (whole := _sliced(value)) is not None:
        places += [(at, "{" if isinstance(value, dict) else "[")] * len(whole)
        parts += whole
        return type(value)()
    if isinstance(value, dict):
        return {name: _without_long(item, [*at, name], places, parts) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    numbers = _numbers(value)
    if numbers is None:
        return [_without_long(item, [*at, index], places, parts) for index, item in enumerate(value)]
    places.append((at, numbers.typecode))
    parts.append(numbers.tobytes())
    return None


def _sliced(value: dict[str, Any] | list[Any]) -> list[bytes] | None:
    """Return a long list or object of scalars as JSON slices; None for integers, which travel as an array."""
    scalars = value.values() if isinstance(value, dict) else value
    if set(map(type, scalars)) & {dict, list} or (isinstance(value, list) and _numbers(value) is not None):
        return None
    starts = range(0, len(value), _SLICE)
    if isinstance(value, list):
        return [json.dumps(value[start : start + _SLICE]).encode() for start in starts]
    items = iter(value.items())
    return [json.dumps(dict(islice(items, _SLICE))).encode() for _ in starts]


def _numbers(values: list[Any]) -> array[int] | None:
    """Return a long list of integers as an array, or None."""
    if len(values) <= _LONG_LIST or set(map(type, values)) != {int}:
        return None
    furthest = max(max(values), ~min(values))  # noqa: PLW3301 - unpacked, a million are arguments
    code = "i" if furthest < 1 << 31 else "q"
    return array(code, values) if furthest < 1 << 63 else None


def unpack(parts: list[bytearray]) -> Any:
    """Return the document that was packed. Empties the list."""
    parts.reverse()
    root: Any
    root, places = from_json(parts.pop())
    holder = [root]
    for at, code in places:
        part = parts.pop()
        target: Any = holder
        step: str | int = 0
        for following in at:
            target, step = target[step], following
        if code == "{":
            target[step].update(from_json(part))
        elif code == "[":
            target[step].extend(from_json(part))
        else:
            target[step] = _list(code, part) if code else part.decode()
    return holder[0]


def _list(code: str, part: bytearray) -> list[int]:
    numbers = array(code)
    numbers.frombytes(part)
    return numbers.tolist()
