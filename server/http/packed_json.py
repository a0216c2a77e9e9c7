"""Packs a large JSON document for another process, in parts that are cheap to read again.

Pure functions, run by server/http/body_child.py, which packs, and by the slow thread, which unpacks.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import reduce
from itertools import islice
from operator import getitem
from typing import Any

from pydantic_core import from_json

_LONG_TEXT = 256  # characters; a longer string travels by itself
_LONG = 32  # items; a longer list or object of short scalars travels in slices
_SLICE = 4096  # items that are read in one call, which holds the GIL for 1 ms

Place = list[str | int]


def pack(tree: Any) -> list[bytes]:
    """Return a document as parts that are cheap to read: long items beside the JSON."""
    places: list[Place] = []
    parts: list[bytes] = []
    small = _without_long(tree, [], places, parts)
    return [_to_json([small, places]), *parts]


def _without_long(value: Any, at: Place, places: list[Place], parts: list[bytes]) -> Any:
    """Return the value, with everything that was appended to `parts` left out."""
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        places.append(at)
        parts.append(value.encode())
        return None
    if not isinstance(value, dict | list):
        return value
    if len(value) > _LONG and _is_flat(value.values() if isinstance(value, dict) else value):
        slices = _slices(value)
        places += [at] * len(slices)
        parts += slices
        return type(value)()
    if isinstance(value, dict):
        return {name: _without_long(item, [*at, name], places, parts) for name, item in value.items()}
    return [_without_long(item, [*at, index], places, parts) for index, item in enumerate(value)]


def _is_flat(items: Collection[Any]) -> bool:
    """Return whether items are all scalars and short texts."""
    types = set(map(type, items))
    if types & {dict, list}:
        return False
    return str not in types or not any(isinstance(item, str) and len(item) > _LONG_TEXT for item in items)


def _slices(value: dict[str, Any] | list[Any]) -> list[bytes]:
    """Return a list or object as JSON in slices."""
    items = iter(value.items() if isinstance(value, dict) else value)
    return [_to_json(type(value)(islice(items, _SLICE))) for _ in range(0, len(value), _SLICE)]


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def unpack(parts: list[bytearray]) -> Any:
    """Return the document that was packed. Empties the list."""
    parts.reverse()
    root: Any
    root, places = from_json(parts.pop())
    holder = [root]
    for place in places:
        path = [0, *place]
        target, last, part = reduce(getitem, path[:-1], holder), path[-1], parts.pop()
        if target[last] is None:
            target[last] = part.decode()
        elif isinstance(target[last], dict):
            target[last].update(from_json(part))
        else:
            target[last].extend(from_json(part))
    return holder[0]
