"""Measures the code itself, for the table in CONTRIBUTING.md.

A warm streamed chat request to the real application over the real engine is traced on all threads: every function of
`engine` and `server` that runs counts with all of its lines, and so does its file.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from loadtest.errors import LoadtestError
from loadtest.output import print_table, save_json

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
OTHERS = ("quire", "loadtest", "tools", "tests", "monitoring", "docker", "deploy")
BEGIN, END = "<!-- figures: python -m tools house --update CONTRIBUTING.md -->", "<!-- end of figures -->"
_CHAT = {
    "messages": [{"role": "user", "content": "Count from 1 to 20."}],
    "max_tokens": 12,
    "ignore_eos": True,
    "seed": 1,
    "stream": True,
}


class Row(NamedTuple):
    """One figure, as the report shows it."""

    name: str
    value: str
    wanted: str  # at most
    detail: str = ""


class Traced(NamedTuple):
    """A warm streamed chat request."""

    lines: dict[str, int]  # of the functions that ran, by file
    num_calls: int  # until the request is submitted
    num_switches: int  # of these, calls into another file than the one before


def trace_chat() -> Traced:
    """Trace a warm streamed chat request on all threads."""
    functions: dict[str, set[CodeType]] = {}
    calls: list[str] = []  # the file of each, until the request is submitted
    seen: set[FrameType] = set()  # a generator's frame is entered whenever it goes on
    roots = tuple(f"{ROOT / package}/" for package in ("engine", "server"))
    is_tracing = is_submitted = False

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        nonlocal is_submitted
        code = frame.f_code
        if not is_tracing or not code.co_filename.startswith(roots):
            return
        name = str(Path(code.co_filename).relative_to(ROOT))
        functions.setdefault(name, set()).add(code)
        if threading.current_thread() is not threading.main_thread() or is_submitted or code.co_name[0] == "<":
            return
        if frame not in seen:
            seen.add(frame)
            calls.append(name)
            is_submitted = code.co_name == "submit" and name.startswith("engine/")

    threading.settrace(note)
    sys.settrace(note)

    async def ask() -> None:
        nonlocal is_tracing
        import httpx

        from engine.sources.model_source import find_model
        from engine.startup.build import build_engine
        from engine.text.tokenizer_files import load_tokenizer
        from server.app import create_app
        from server.settings.settings import Settings

        source, settings = find_model(None), Settings(max_model_len=2048)
        engine = build_engine(settings.engine_config(source.path), lambda _: None)
        app = create_app(engine, load_tokenizer(source.path), settings.app_config(source.path, source.name))
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            app.state.metrics.loop_lag.stop()  # a timer, which runs at any moment
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
    assert is_submitted, "the engine has no function `submit` that was called"
    num_switches = sum(one != other for one, other in pairwise(calls))
    return Traced(
        {name: len(set().union(*map(_lines, codes))) for name, codes in functions.items()}, len(calls), num_switches
    )


def measure() -> list[Row]:
    """Return all figures."""
    traced = trace_chat()
    num_lines, total = sum(traced.lines.values()), _total(ROOT / name for name in traced.lines)
    return [
        Row("traced token: lines of the functions that run", f"{num_lines:,}", "3,000"),
        Row("traced token: files / lines in them", f"{len(traced.lines)} / {total:,}", "52 / 10,000"),
        Row(
            "traced chat: calls before submission / file switches",
            f"{traced.num_calls} / {traced.num_switches}",
            "110 / 40",
        ),
        *measure_sources(),
    ]


def measure_sources() -> list[Row]:
    """Return the figures that need no model: they are read from the sources."""
    served = [*_sources("engine"), *_sources("server")]
    everything = [*served, *(path for package in OTHERS for path in _sources(package))]
    core = list(_sources("engine/core"))
    native = [path for suffix in ("c", "h") for path in (ROOT / "engine").rglob(f"*.{suffix}")]
    page = [path for path in (ROOT / "server" / "page").iterdir() if path.suffix in (".js", ".css", ".html")]
    broad = [each for path in served for each in broad_excepts(path)]
    long = [name for path in served for name in _long_functions(path)]
    circles = import_circles()
    return [
        Row(
            "engine and server: Python statements",
            f"{sum(_parsed(path).num_statements for path in served):,}",
            "32,500",
        ),
        Row("repository: Python statements", f"{sum(_parsed(path).num_statements for path in everything):,}", "76,300"),
        Row("engine and server: lines of Python", f"{_total(served):,}", "51,000"),
        Row("engine: lines of C", f"{_total(native):,}", "6,300"),
        Row("page: lines without vendored files", f"{_total(page):,}", "3,500"),
        Row("engine/core: files / lines", f"{len(core)} / {_total(core):,}", "34 / 6,200"),
        Row("loadtest: lines of Python", f"{_total(_sources('loadtest')):,}", "9,000"),
        Row("import circles: files / top packages", f"{len(circles.files)} / {len(circles.tops)}", "0 / 0"),
        Row("packages that are part of an import circle", f"{sum(map(len, circles.packages))}", "0"),
        Row(
            "broad excepts / without a reason",
            f"{len(broad)} / {sum(not each.has_reason for each in broad)}",
            "25 / 0",
            " ".join(each.place for each in broad if not each.has_reason),
        ),
        Row(f"functions of more than {MAX_FUNCTION_LINES} lines outside Triton", f"{len(long)}", "0", " ".join(long)),
    ]


class BroadExcept(NamedTuple):
    """A handler of any exception that does not raise it again."""

    place: str
    has_reason: bool  # in a comment on its first two lines


def broad_excepts(path: Path) -> Iterator[BroadExcept]:
    """Find the handlers of Exception, BaseException or everything; one that ends in `raise` hides nothing."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in (handler for each in statements(ast.parse(text)) for handler in getattr(each, "handlers", ())):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        is_broad = any(each is None or ast.unparse(each) in ("Exception", "BaseException") for each in caught)
        if is_broad and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None):
            yield BroadExcept(
                f"{path.relative_to(ROOT)}:{node.lineno}", "#" in "".join(lines[node.lineno - 1 : node.lineno + 1])
            )


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
    files: Graph = {
        name: {each for each in _parsed(path).imported if each in paths} - {name} for name, path in paths.items()
    }
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


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements within a node; expressions, the most nodes of a file, have none."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def _sources(package: str) -> Iterator[Path]:
    return (path for path in sorted((ROOT / package).rglob("*.py")) if _parsed(path).has_code)


class _Parsed(NamedTuple):
    """What the figures need of a file."""

    has_code: bool  # more than a docstring, for example of a package
    num_statements: int
    imported: tuple[str, ...]
    functions: tuple[tuple[str, int], ...]  # each with its lines


@cache
def _parsed(path: Path) -> _Parsed:
    """Return what a file holds; it is parsed once, and its tree is not kept."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found, imported, functions = list(statements(tree)), list[str](), list[tuple[str, int]]()
    for node in found:
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
    has_code = not all(isinstance(node, ast.Expr) for node in tree.body)
    return _Parsed(has_code, len(found), tuple(imported), tuple(functions))


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _total(paths: Iterable[Path]) -> int:
    return sum(map(_count, paths))


def _lines(code: CodeType) -> range:
    numbers = [line for _, _, line in code.co_lines() if line]
    return range(code.co_firstlineno, max(numbers, default=code.co_firstlineno) + 1)


def _long_functions(path: Path) -> Iterator[str]:
    """Find functions of many lines in files that have no kernel of Triton."""
    if "triton" not in _parsed(path).imported:
        for name, num_lines in _parsed(path).functions:
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{path.relative_to(ROOT)}:{name} ({num_lines})"


def update(path: Path, rows: list[Row]) -> None:
    """Replace the table between BEGIN and END. Raises LoadtestError without them."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise LoadtestError(f"{path} has no {BEGIN} and {END}, where the figures go.")
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
        for name, num_lines in sorted(trace_chat().lines.items()):
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
