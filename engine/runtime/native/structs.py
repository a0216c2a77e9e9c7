"""The structures that Python shares with the C library, read where they are declared: in its sources, after SHARED.

Such a structure has plain fields only: pointers, numbers of a fixed size, and structures that are shared, too. `mirror` makes
a ctypes class of one. build.py compiles a table of their fields into the library, with which `check_layout` compares the
classes. Knows no torch.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int32
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.core.errors import ConfigError

_FOLDER = Path(__file__).parent
_STRUCT = re.compile(r"^SHARED (struct (\w+) \{\n.*?^\};)\n", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DECLARATION = re.compile(r"(?:const )?(struct \w+|\w+) ([^;]+);")
_NUMBERS: Mapping[str, Any] = {
    "float": ctypes.c_float, "double": ctypes.c_double, "int32_t": c_int32, "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
}  # fmt: skip
_Class = TypeVar("_Class", bound=type[Structure])

MIRRORS: dict[str, type[Structure]] = {}  # by the names of their structures


class Shared(NamedTuple):
    """A structure's text, and the C type of each field; a pointer's is "*"."""

    file: Path
    text: str
    fields: Mapping[str, str]


def _fields(text: str) -> dict[str, str]:
    return {
        each.split("*")[-1].split()[-1]: "*" if "*" in each else kind
        for kind, names in _DECLARATION.findall(_COMMENT.sub("", text.partition("{")[2]))
        for each in names.split(",")
    }


@cache
def shared_structs() -> Mapping[str, Shared]:
    """Return the shared structures of the library: of its headers first."""
    files = (*sorted(_FOLDER.glob("*.h")), *sorted(_FOLDER.glob("*.c")))
    found = ((file, *pair) for file in files for pair in _STRUCT.findall(file.read_text("utf-8")))
    return {name: Shared(file, text, _fields(text)) for file, text, name in found}


def structure(name: str, **kinds: Any) -> type[Structure]:
    """Return a class with the fields of a structure; `kinds` are the types of pointers to objects of Python's."""
    fields = [(field, kinds.get(field) or _kind_of(kind)) for field, kind in shared_structs()[name].fields.items()]
    MIRRORS[name] = type(name, (Structure,), {"__slots__": (), "_fields_": fields})  # a name that is no field fails
    return MIRRORS[name]


def mirror(name: str, **kinds: Any) -> Callable[[_Class], _Class]:
    """Replace a class, which is a name for annotations, by that of a structure."""

    def fill(empty: _Class) -> _Class:
        made = structure(name, **kinds)
        made.__name__, made.__doc__, made.__module__ = empty.__name__, empty.__doc__, empty.__module__
        return made  # type: ignore[return-value]

    return fill


def _kind_of(kind: str) -> Any:
    if kind == "*":
        return ctypes.c_void_p
    return _NUMBERS[kind] if kind in _NUMBERS else MIRRORS[kind.removeprefix("struct ")]


def layout_source() -> str:
    """Return C of a table of the fields of all shared structures: their names, and as numbers their offsets and sizes."""
    structs = shared_structs()
    lines = [
        f'#include "{file.name}"' for file in sorted({each.file for each in structs.values()}) if file.suffix == ".h"
    ]
    lines += [each.text for each in structs.values() if each.file.suffix == ".c"]
    names, numbers = [], []
    for name, struct in structs.items():
        names.append(f'"{name}:{",".join(struct.fields)};"')
        numbers.append(f"sizeof(struct {name}), ")
        numbers += [
            f"offsetof(struct {name}, {each}), sizeof(((struct {name} *)0)->{each}), " for each in struct.fields
        ]
    lines.append("EXPORT const char *quire_layout(const int32_t **numbers) {")
    lines += ["static const int32_t all[] = {", *numbers, "};", "*numbers = all;", "return", *names, ";}"]
    return "\n".join(lines) + "\n"


def check_layout(functions: ctypes.CDLL, mirrors: Mapping[str, type[Structure]] = MIRRORS) -> None:
    """Raise ConfigError unless every mirror made so far has the fields of its structure, in their places in the library."""
    numbers = POINTER(c_int32)()
    function = functions.quire_layout
    function.restype = c_char_p
    structures = dict(text.split(":") for text in function(byref(numbers)).decode().split(";")[:-1])
    if unknown := mirrors.keys() - structures.keys():
        raise _differ(f"only the sources have struct {min(unknown)}")
    after = 0
    for name, listed in structures.items():
        fields = listed.split(",")
        at, after = after, after + 1 + 2 * len(fields)
        mirror = mirrors.get(name)
        if mirror is None:
            continue
        if odd := {field for field, *_ in mirror._fields_} ^ set(fields):
            raise _differ(f"only one of both has the field {min(odd)} of struct {name}")
        for index, field in enumerate(fields):
            theirs = (numbers[at + 1 + 2 * index], numbers[at + 2 + 2 * index])
            ours = getattr(mirror, field)
            if (ours.offset, ours.size) != theirs:
                raise _differ(
                    f"field {field} of struct {name} has {ours.size} bytes at {ours.offset}, and {theirs[1]} at {theirs[0]} in C"
                )
        if ctypes.sizeof(mirror) != numbers[at]:
            raise _differ(f"struct {name} has {ctypes.sizeof(mirror)} bytes, and {numbers[at]} in C")


def _differ(why: str) -> ConfigError:
    return ConfigError(
        f"The native kernels and their sources in engine/runtime/native/ differ: {why}; install Quire again."
    )
