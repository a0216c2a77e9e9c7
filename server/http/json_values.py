"""JSON documents as requests send them: how much they hold, how they are checked, and how one travels between processes.

Pure functions, run by the event loop on small bodies and by server/http/body_child.py on large ones.
"""

from __future__ import annotations

import json
from array import array
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json

from server.errors import ApiError

# What takes the memory of several numbers counts as several.
CONTAINER_WEIGHT = 32  # an object or a list, with its first item
STRING_WEIGHT = 4  # a text or a field's name
_PIECE_BYTES = 1 << 16
_LONG_TEXT = 256  # characters; a longer string travels by itself
_LONG_LIST = 32  # items; a longer list of integers travels as an array
_SLICE = 4096  # items of a list or object that are read in one call, which holds the GIL for 1 ms

Checked = TypeVar("Checked", bound=BaseModel)
Place = list[str | int]


def most_values(raw: bytes | bytearray) -> int:
    """An upper bound of count_values, 3 ms for a million bytes: what stands within strings counts, too."""
    return 1 + _marks(raw) + _strings(raw.count(b'"'))


def count_values(raw: bytes | bytearray) -> int:
    """The JSON values of a document, some of which count as several."""
    total, num_quotes, carried = 1, 0, b""
    for start in range(0, len(raw), _PIECE_BYTES):
        piece = carried + raw[start : start + _PIECE_BYTES]
        kept = piece.rstrip(b"\\")  # an escape is not cut in two
        carried = piece[len(kept) :]
        texts = kept.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        total += _marks(b"".join(texts[num_quotes % 2 :: 2]))
        num_quotes += len(texts) - 1
    return total + _strings(num_quotes)


def _marks(text: bytes | bytearray) -> int:
    """What commas, colons and brackets tell: each value but the first stands behind a comma or is a container's first."""
    num_containers = text.count(b"[") + text.count(b"{")
    return text.count(b",") + text.count(b":") + (CONTAINER_WEIGHT - 1) * num_containers


def _strings(num_quotes: int) -> int:
    """What strings count beyond the value, or the colon behind a name, that is counted already."""
    return (STRING_WEIGHT - 1) * (num_quotes // 2)


def too_many(count: int, most: int) -> ApiError:
    """The answer to a document with too many values."""
    message = (
        f"The body has {count} JSON values, where a string counts as {STRING_WEIGHT} and a list or object as "
        f"{CONTAINER_WEIGHT}; at most {most} are read (--max-json-values). Send fewer, or several requests."
    )
    return ApiError(400, "too_many_values", message)


def check_count(raw: bytes | bytearray, most: int) -> None:
    """Raise a 400 for a document with more than so many values."""
    if most_values(raw) > most and (count := count_values(raw)) > most:
        raise too_many(count, most)


def parse(raw: bytes | bytearray) -> Any:
    """The document. Raises a 400 for what is not JSON."""
    try:
        return from_json(raw)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"Invalid JSON: {error}") from error


def read(model: type[Checked], raw: bytes | bytearray) -> Checked:
    """The document as a model. Raises a 400, ValidationError, or what the model's own checks raise."""
    return model.model_validate(parse(raw))


def pack(tree: Any) -> list[bytes]:
    """A document as parts that are cheap to read again: long texts and lists of integers stand beside the JSON."""
    places: list[tuple[Place, str]] = []
    parts: list[bytes] = []
    small = _without_long(tree, [], places, parts)
    return [json.dumps([small, places]).encode(), *parts]


def _without_long(value: Any, at: Place, places: list[tuple[Place, str]], parts: list[bytes]) -> Any:
    """The value, None in the place of what is appended to `parts`."""
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
    """A long list or object of scalars as JSON of parts of it; integers that fit an array are left to that."""
    scalars = value.values() if isinstance(value, dict) else value
    if set(map(type, scalars)) & {dict, list} or (isinstance(value, list) and _numbers(value) is not None):
        return None
    starts = range(0, len(value), _SLICE)
    if isinstance(value, list):
        return [json.dumps(value[start : start + _SLICE]).encode() for start in starts]
    items = iter(value.items())
    return [json.dumps(dict(islice(items, _SLICE))).encode() for _ in starts]


def _numbers(values: list[Any]) -> array[int] | None:
    """A long list of nothing but integers, if they fit."""
    if len(values) <= _LONG_LIST or set(map(type, values)) != {int}:
        return None
    furthest = max(max(values), ~min(values))  # noqa: PLW3301 - unpacked, a million are arguments
    code = "i" if furthest < 1 << 31 else "q"
    return array(code, values) if furthest < 1 << 63 else None


def unpack(parts: list[bytearray]) -> Any:
    """The document that was packed. Empties the list as it goes."""
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
