"""Counts the modules that a daemon imports before it is ready: `python -m tools.start_imports LOG [--update]`.

LOG is what the daemon wrote with PYTHONPROFILEIMPORTTIME=1. The table in docs/internals/start.md is a budget: a module
that serves one kind of request is imported when it is used, so that the start does not grow with features.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "docs" / "internals" / "start.md"
OURS = ("engine", "server", "quire")
MANY = 10  # modules of a package of others from which on the table has to name it
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_ROW = re.compile(r"^\| `([\w.]+)` +\| +(\d+) \|.*\n", re.MULTILINE)


class Loaded(NamedTuple):
    """The modules of one package, and their own time."""

    num_modules: int
    seconds: float


def count(log: Iterable[str]) -> dict[str, Loaded]:
    """Return the modules of each package of ours, and of each other top package, slowest first."""
    found: dict[str, Loaded] = {}
    for line in log:
        if match := _LINE.match(line):
            name = package_of(match[2])
            num, seconds = found.get(name, Loaded(0, 0.0))
            found[name] = Loaded(num + 1, seconds + int(match[1]) / 1e6)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def package_of(module: str) -> str:
    """Return the package that a module is counted in."""
    top, _, rest = module.partition(".")
    return module.rpartition(".")[0] if top in OURS and rest else top


def counted(loaded: Mapping[str, Loaded]) -> dict[str, Loaded]:
    """Return the packages that the table names: ours, and those of others with many modules."""
    others = sys.stdlib_module_names
    return {
        name: found
        for name, found in loaded.items()
        if name.partition(".")[0] in OURS or (found.num_modules >= MANY and name not in others and name[0] != "_")
    }


def over(loaded: Mapping[str, Loaded], table: str) -> list[str]:
    """Return a sentence for each package that is beyond the table. Of others' packages only the names count."""
    budget = {name: int(num) for name, num in _ROW.findall(table)}
    faults = []
    for name, (num, _) in counted(loaded).items():
        if name not in budget:
            faults.append(f"{name} is imported at the start ({num} modules), and the table does not name it")
        elif name.partition(".")[0] in OURS and num > budget[name]:
            faults.append(f"{num} modules of {name} are imported at the start, and the table allows {budget[name]}")
    return faults


def rows(loaded: Mapping[str, Loaded]) -> str:
    """Return the table's rows: package, modules, their own milliseconds."""
    return "".join(f"| `{name}` | {num} | {1000 * s:.1f} |\n" for name, (num, s) in counted(loaded).items())


def main() -> None:
    """Print the rows of a log, or write them into the table."""
    found = rows(count(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
    if "--update" not in sys.argv:
        print(found, end="")
        return
    text = TABLE.read_text(encoding="utf-8")
    at = _ROW.search(text)
    assert at is not None, "the table has no row"
    TABLE.write_text(text[: at.start()] + found + _ROW.sub("", text[at.start() :]), encoding="utf-8")


if __name__ == "__main__":
    main()
