"""Reads the headers of a GGUF model that is split into files, PREFIX-00001-of-00003.gguf and so on.

The first file has the metadata, each has some tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.core.errors import ModelLoadError
from engine.files.gguf_header import GGUFHeader, read_header

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def stem(path: Path) -> str:
    """Return a file's name without its ending, and without the number of the part."""
    name = _NAME.fullmatch(path.name)
    return path.stem if name is None else name[1]


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model that exist, by their names: the parts of a split one, else the file itself."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    return parts[:1] if len(parts) == 1 else [each for each in parts if each.exists()]


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file, the first part's first; another file is its only part."""
    split = _NAME.fullmatch(name)
    return [name] if split is None else [_part(split[1], index, int(split[3])) for index in range(int(split[3]))]


def read_parts(path: Path) -> dict[Path, GGUFHeader]:
    """Return the headers of all parts by their paths, the first part's first. Raises ModelLoadError.

    A file that is not split is its only part.
    """
    header = read_header(path)
    count = header.metadata.get("split.count", 0)
    if type(count) is not int or count <= 1:
        return {path: header}
    number = header.metadata.get("split.no")
    name = _NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count or number != int(name[2]) - 1:
        raise ModelLoadError(
            f"{path} is one of {count} parts of a model but is not named as such; parts are named "
            f"NAME-00001-of-{count:05}.gguf and so on."
        )
    if number != 0:
        raise ModelLoadError(f"{path} is a part of a split model; name the first part, {_part(name[1], 0, count)}.")
    paths = [path.with_name(each) for each in part_names(path.name)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise ModelLoadError(
            f"{path} has {count} parts, and {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''} "
            f"{'is' if len(missing) == 1 else 'are'} missing; download all parts into one folder."
        )
    parts = {path: header} | {each: read_header(each) for each in paths[1:]}
    _check(parts, count)
    return parts


def _check(parts: dict[Path, GGUFHeader], count: int) -> None:
    """Raise ModelLoadError unless the parts belong together."""
    names: set[str] = set()
    for index, (path, header) in enumerate(parts.items()):
        if (header.metadata.get("split.count"), header.metadata.get("split.no")) != (count, index):
            raise ModelLoadError(f"{path} is not part {index + 1} of {count}; download it again.")
        for tensor in header.tensors:
            if tensor.name in names:
                raise ModelLoadError(f"{path} has tensor {tensor.name!r}, which an earlier part has too.")
            names.add(tensor.name)
    first = next(iter(parts))
    total = parts[first].metadata.get("split.tensors.count", len(names))
    if total != len(names):
        raise ModelLoadError(
            f"{first} names {total} tensors, but its {count} parts hold {len(names)}; download the parts again."
        )


def _part(prefix: str, index: int, count: int) -> str:
    return f"{prefix}-{index + 1:05}-of-{count:05}.gguf"
