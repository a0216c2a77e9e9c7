"""Measures the code itself, for the table in CONTRIBUTING.md.

A warm streamed chat request to the real application over the real engine is traced on all threads: every function of
`engine` and `server` that runs counts with all of its lines, and so does its file.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from loadtest.errors import LoadtestError
from loadtest.output import print_table, save_json

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
BEGIN, END = "<!-- figures: python -m loadtest house --update CONTRIBUTING.md -->", "<!-- end of figures -->"
_LOADED = "import sys, engine.core.scheduling.scheduler; print(sum(name.startswith('engine.') for name in sys.modules))"
_CHAT = {"messages": [{"role": "user", "content": "Count from 1 to 20."}], "max_tokens": 12, "stream": True}


class HouseError(LoadtestError):
    """The figures cannot be written; the message says why."""


class Row(NamedTuple):
    """One figure, as the report shows it."""

    name: str
    value: str
    wanted: str  # at most
    detail: str = ""


def trace_token() -> dict[str, int]:
    """Trace a warm streamed chat request; return how many lines of each file ran."""
    functions: dict[str, set[CodeType]] = {}
    roots = tuple(f"{ROOT / package}/" for package in ("engine", "server"))

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if is_tracing and name.startswith(roots):
            functions.setdefault(str(Path(name).relative_to(ROOT)), set()).add(frame.f_code)

    is_tracing = False
    threading.settrace(note)
    sys.settrace(note)

    async def ask() -> None:
        nonlocal is_tracing
        import httpx

        from engine.sources.model_source import find_model
        from engine.startup.build import build_engine
        from engine.text.tokenizer import load_tokenizer
        from server.app import create_app
        from server.settings.settings import Settings

        source, settings = find_model(None), Settings(max_model_len=2048)
        engine = build_engine(settings.engine_config(source.path), lambda _: None)
        app = create_app(engine, load_tokenizer(source.path), settings.app_config(source.path, source.name))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            for attempt in range(2):
                is_tracing = attempt == 1
                answer = await client.post("http://127.0.0.1/v1/chat/completions", json=_CHAT)
                assert answer.status_code == 200, answer.text
            is_tracing = False

    try:
        asyncio.run(ask())
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return {name: len(set().union(*map(_lines, codes))) for name, codes in functions.items()}


def measure() -> list[Row]:
    """Return all figures."""
    traced = trace_token()
    return [
        Row("traced token: lines of the functions that run", f"{sum(traced.values()):,}", "2,700"),
        Row(
            "traced token: files / lines in them",
            f"{len(traced)} / {_total([ROOT / name for name in traced]):,}",
            "50 / 8,500",
        ),
        *measure_sources(),
    ]


def measure_sources() -> list[Row]:
    """Return the figures that need no model: they are read from the sources."""
    core, server = list(_sources("engine/core")), list(_sources("server"))
    tops = [path for path in server if path.parent == ROOT / "server"]
    loaded = subprocess.run([sys.executable, "-c", _LOADED], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    from engine.core.sequence import Sequence

    python = _total([*_sources("engine"), *server])
    long = [name for package in ("engine", "server", "loadtest") for name in _long_functions(package)]
    circles = import_circles()
    num_within = sum(map(len, circles.packages))
    return [
        Row("engine/core: files / lines", f"{len(core)} / {_total(core):,}", "34 / 5,600"),
        Row("engine modules that importing the scheduler loads", loaded.stdout.strip(), "32"),
        Row("server: files at its top level / lines", f"{len(tops)} / {_total(server):,}", "12 / 10,000"),
        Row("engine and server: lines of Python", f"{python:,}", "30,000"),
        Row("loadtest: lines of Python", f"{_total(list(_sources('loadtest'))):,}", "9,000"),
        Row("slots of a Sequence", f"{len(Sequence.__slots__)}", "38"),
        Row("tuned constants of engine/core", f"{sum(map(_count_constants, core))}", "35"),
        Row("import circles: files / top packages", f"{len(circles.files)} / {len(circles.tops)}", "0 / 0"),
        Row("inner packages that are part of an import circle", f"{num_within}", "0"),
        Row(f"functions of more than {MAX_FUNCTION_LINES} lines", f"{len(long)}", "0", " ".join(long)),
    ]


class Circles(NamedTuple):
    """Groups that import each other: files, top packages, inner packages."""

    files: list[list[str]]
    tops: list[list[str]]
    packages: list[list[str]]


def import_circles() -> Circles:
    """Find the import circles of quire, engine and server.

    Imports inside functions count, too, and so does a package that imports from one that contains it.
    """
    paths = {_module(path): path for package in ("quire", "engine", "server") for path in _sources(package)}
    files: Graph = {name: {each for each in _imports(path) if each in paths} - {name} for name, path in paths.items()}
    tops: Graph = {}
    packages: Graph = {}
    for name, imported in files.items():
        for other in imported:
            tops.setdefault(name.partition(".")[0], set()).add(other.partition(".")[0])
            ours, theirs = (paths[each].parent.relative_to(ROOT) for each in (name, other))
            if ours != theirs and ours.parts[0] == theirs.parts[0]:
                packages.setdefault(str(ours), set()).add(str(theirs))
    return Circles(_circles(files), _circles(tops), _circles(packages))


Graph = dict[str, set[str]]


def _circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other."""
    reached = {node: _reachable(graph, node) for node in graph}
    groups = {tuple(sorted(other for other in reached[node] if node in reached.get(other, ()))) for node in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        for node in graph.get(left.pop(), set()) - found:
            found.add(node)
            left.append(node)
    return found


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _sources(package: str) -> Iterator[Path]:
    return filter(_has_code, sorted((ROOT / package).rglob("*.py")))


@cache
def _has_code(path: Path) -> bool:
    """Return whether there is more in a file than a docstring, for example of a package."""
    return not all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _total(paths: list[Path]) -> int:
    return sum(map(_count, paths))


def _lines(code: CodeType) -> range:
    numbers = [line for _, _, line in code.co_lines() if line]
    return range(code.co_firstlineno, max(numbers, default=code.co_firstlineno) + 1)


def _count_constants(path: Path) -> int:
    """Return how many module constants are numbers other than 0 and 1."""
    found = 0
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            numbers = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            found += any(isinstance(each, int | float) and each not in (0, 1) for each in numbers)
    return found


def _long_functions(package: str) -> Iterator[str]:
    for path in _sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{path.relative_to(ROOT)}:{node.name} ({num_lines})"


def update(path: Path, rows: list[Row]) -> None:
    """Replace the table between BEGIN and END. Raises HouseError without them."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise HouseError(f"{path} has no {BEGIN} and {END}, where the figures go.")
    lines = ["| figure | now | wanted |", "|---|---|---|", *(f"| {' | '.join(row[:3])} |" for row in rows)]
    path.write_text("\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"]), encoding="utf-8")


def read_table(path: Path) -> dict[str, str]:
    """Return the figures that a document shows, by name."""
    table = path.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[3:]]
    return {row[1]: row[2] for row in cells if len(row) > 2}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `house`."""
    parser.add_argument("--files", action="store_true", help="list the files that the token goes through, with lines")
    parser.add_argument("--update", type=Path, metavar="FILE", help="write the table into this document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.files:
        for name, num_lines in sorted(trace_token().items()):
            print(f"{num_lines:>5} of {_count(ROOT / name):>4}  {name}")
        return 0
    rows = measure()
    print_table(("figure", "now", "wanted"), (row[:3] for row in rows))
    for row in rows:
        if row.detail:
            print(f"{row.name}: {row.detail}")
    for circle in import_circles().packages:
        print(f"these packages import each other in a circle: {', '.join(circle)}")
    if options.update:
        update(options.update, rows)
    save_json(options.json, {row.name: row.value for row in rows})
    return 0
