"""Counts the modules that a daemon imports before it is ready: `python -m tools.start_imports LOG` prints the table.

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
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")
_ROW = re.compile(r"^\| `([\w.]+)` +\| +(\d+) \|", re.MULTILINE)


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


def read_budget(text: str) -> Mapping[str, int]:
    """Return the most modules of each package that the table allows."""
    return {name: int(num) for name, num in _ROW.findall(text)}


def over(loaded: Mapping[str, Loaded], budget: Mapping[str, int]) -> list[str]:
    """Return a sentence for each package that is beyond the table; of others' packages only the names count."""
    faults = []
    for name, (num, _) in loaded.items():
        if name not in budget and name not in sys.stdlib_module_names and not name.startswith("_"):
            faults.append(f"{name} is imported at the start, and is not in the table")
        elif name.startswith(OURS) and num > budget[name]:
            faults.append(f"{num} modules of {name} are imported at the start, and the table allows {budget[name]}")
    return faults


def main() -> None:
    """Print the table of a log."""
    for name, (num, seconds) in count(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()).items():
        if name not in sys.stdlib_module_names and not name.startswith("_"):
            print(f"| `{name}` | {num} | {1000 * seconds:.1f} |")


if __name__ == "__main__":
    main()
