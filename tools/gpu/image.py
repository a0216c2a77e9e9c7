"""Makes an environment of what the GPU's image has, and of the wheels that are carried there, for a rehearsal.

    python -m tools.gpu.image DIR          then DIR/bin/python runs as there

It links packages of this environment: those that image.txt names with what they need here, and of wheels.txt no more than
is named, since nothing else is carried. Anything else cannot be imported. Versions that differ from the image's are printed.
"""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path, PurePath
from typing import NamedTuple

from packaging.requirements import Requirement

_HERE = Path(__file__).parent
IMAGE, WHEELS = _HERE / "image.txt", _HERE / "wheels.txt"
PYTHON = (3, 12)  # the image's


class Package(NamedTuple):
    """A line of one of the lists; "" for a version that is not known."""

    name: str
    version: str


def read_packages(path: Path) -> list[Package]:
    """Return the packages that a list names, spelled in the one way that compares."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [Package(normalised(name), version) for name, _, version in (line.partition("==") for line in lines if line)]


def normalised(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(folder: Path) -> int:
    """Make the environment; print what differs from the image."""
    venv.create(folder, symlinks=True, with_pip=False)
    version = ".".join(map(str, sys.version_info[:2]))
    site = folder / "lib" / f"python{version}" / "site-packages"
    remarks = [f"Python {version}, there {'.'.join(map(str, PYTHON))}"] if sys.version_info[:2] != PYTHON else []
    for package in read_packages(IMAGE):
        remarks += _compared(package)
    for name in {*needed(each.name for each in read_packages(IMAGE)), *(each.name for each in read_packages(WHEELS))}:
        _link(name, site)
    print(f"Of the image's packages, {len(remarks)} differ here: {'; '.join(remarks) or 'none'}")
    return 0


def needed(names: Iterable[str], environment: Mapping[str, str] | None = None, stop: Collection[str] = ()) -> set[str]:
    """Return installed packages with all that they need, except what only those in `stop` need."""
    found: set[str] = set()
    coming = [Requirement(name) for name in names]
    while coming:
        package = coming.pop()
        name = normalised(package.name)
        if name in stop or (name in found and not package.extras):
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for each in map(Requirement, required):
            extras = package.extras or {""}
            values = [dict(environment or {}) | {"extra": extra} for extra in extras]
            if each.marker is None or any(map(each.marker.evaluate, values)):
                coming.append(each)
    return found


def _compared(package: Package) -> Iterator[str]:
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        yield f"{package.name} is not installed"
    else:
        if package.version and package.version != version:
            yield f"{package.name} {version}, there {package.version}"


def _link(name: str, site: Path) -> None:
    """Link a package's files, if it is installed; a folder that is the package's alone as a whole, with its bytecode."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    for file in {_linked(file) for file in found.files or () if ".." not in file.parts}:
        target = site / file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(found.locate_file(file))))


def _linked(file: PurePath) -> PurePath:
    """Return what is linked for a package's file: its outermost folder, unless several packages have files there."""
    return file if len(set(_owners().get(file.parts[0], ()))) > 1 else PurePath(file.parts[0])


@cache
def _owners() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
