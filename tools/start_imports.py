"""Counts the modules that a daemon imports before it is ready: `python -m tools.start_imports LOG... [--update]`.

A LOG is what a daemon wrote with PYTHONPROFILEIMPORTTIME=1; of several the least times count. The table in docs/internals/start.md is a budget: a module
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
_LINE = re.compile(r"import time:\s+(-?\d+) \|\s+\d+ \|\s+(\S+)")
_ROW = re.compile(r"^\| `?([\w.]+)`? +\| +(\d+) \|.*\n", re.MULTILINE)  # the last, of all modules, has no package


class Loaded(NamedTuple):
    """The modules of one package, and their own time."""

    num_modules: int
    seconds: float


def count(log: Iterable[str]) -> dict[str, Loaded]:
    """Return the modules of each package of ours, and of each other top package."""
    found: dict[str, Loaded] = {}
    seen = set[str]()  # two threads may report one module, or a time below zero
    for line in log:
        if "ready in" in line:
            break
        if (match := _LINE.match(line)) and match[2] not in seen:
            seen.add(match[2])
            name = package_of(match[2])
            num, seconds = found.get(name, Loaded(0, 0.0))
            found[name] = Loaded(num + 1, seconds + max(int(match[1]), 0) / 1e6)
    return found


def least(starts: Iterable[Mapping[str, Loaded]]) -> dict[str, Loaded]:
    """Return the least times of several starts, slowest package first, and the most modules."""
    found: dict[str, Loaded] = {}
    for start in starts:
        for name, (num, seconds) in start.items():
            known = found.get(name, Loaded(num, seconds))
            found[name] = Loaded(max(num, known.num_modules), min(seconds, known.seconds))
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
    """Return the table's rows: package, modules, their own milliseconds; the last is of all modules."""
    named = "".join(f"| `{name}` | {num} | {1000 * s:.1f} |\n" for name, (num, s) in counted(loaded).items())
    nums, seconds = zip(*loaded.values(), strict=True)
    return f"{named}| all | {sum(nums)} | {1000 * sum(seconds):.1f} |\n"


def main() -> None:
    """Print the rows of logs, or write them into the table."""
    logs = [Path(word) for word in sys.argv[1:] if word != "--update"]
    found = rows(least(count(log.read_text(encoding="utf-8").splitlines()) for log in logs))
    if "--update" not in sys.argv:
        print(found, end="")
        return
    text = TABLE.read_text(encoding="utf-8")
    at = _ROW.search(text)
    assert at is not None, "the table has no row"
    TABLE.write_text(text[: at.start()] + found + _ROW.sub("", text[at.start() :]), encoding="utf-8")


if __name__ == "__main__":
    main()
