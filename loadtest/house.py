"""Measures the code itself: what one token runs through, and how large the rooms are. CONTRIBUTING.md quotes it.

A warm streamed chat request to the real application over the real engine is traced on all threads: every function of
`engine` and `server` that runs counts with all of its lines, and so does its file.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
_LOADED = "import sys, engine.core.scheduler; print(sum(name.startswith('engine.') for name in sys.modules))"
_CHAT = {"messages": [{"role": "user", "content": "Count from 1 to 20."}], "max_tokens": 12, "stream": True}


class Row(NamedTuple):
    """One figure, as the report shows it."""

    name: str
    value: str


def trace_token() -> dict[str, int]:
    """Trace a warm streamed chat request of the embedded model; returns how many lines of each file ran."""
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

        from engine.build import build_engine
        from engine.model_source import find_model
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
    """All figures."""
    traced = trace_token()
    core, server = list(_sources("engine/core")), list(_sources("server"))
    tops = [path for path in server if path.parent == ROOT / "server"]
    loaded = subprocess.run([sys.executable, "-c", _LOADED], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    from engine.core.sequence import Sequence

    both = _total([*_sources("engine"), *server])
    long = [name for package in ("engine", "server", "loadtest") for name in _long_functions(package)]
    return [
        Row("lines of the functions of a warm streamed chat token", f"{sum(traced.values()):,}"),
        Row("files they are in", f"{len(traced)}"),
        Row("lines of these files", f"{sum(_count(ROOT / name) for name in traced):,}"),
        Row("engine/core: files / lines", f"{len(core)} / {_total(core):,}"),
        Row("modules that importing the scheduler loads", loaded.stdout.strip()),
        Row("server: files at its top level / lines in all", f"{len(tops)} / {_total(server):,}"),
        Row("engine and server: lines of Python", f"{both:,}"),
        Row("loadtest: lines of Python", f"{_total(list(_sources('loadtest'))):,}"),
        Row("slots of a Sequence", f"{len(Sequence.__slots__)}"),
        Row("constants of engine/core that are numbers", f"{sum(map(_count_constants, core))}"),
        Row(f"functions of more than {MAX_FUNCTION_LINES} lines", f"{len(long)} {' '.join(long)}".strip()),
    ]


def _sources(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.stat().st_size:
            yield path


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _total(paths: list[Path]) -> int:
    return sum(map(_count, paths))


def _lines(code: CodeType) -> range:
    numbers = [line for _, _, line in code.co_lines() if line]
    return range(code.co_firstlineno, max(numbers, default=code.co_firstlineno) + 1)


def _count_constants(path: Path) -> int:
    """Names in capitals at a module's top level that are given a number other than 0 and 1."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `house`."""
    parser.add_argument("--files", action="store_true", help="list the files that the token goes through, with lines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.files:
        for name, num_lines in sorted(trace_token().items()):
            print(f"{num_lines:>5} of {_count(ROOT / name):>4}  {name}")
        return 0
    rows = measure()
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.value}")
    if options.json:
        options.json.write_text(json.dumps(dict(rows), indent=2) + "\n", encoding="utf-8")
    return 0
