"""Who may import whom (DESIGN's table), read from every file's imports; and what the core may pull in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.house import statements

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for room in ("quire", "engine", "server", "loadtest", "tools") for path in (ROOT / room).rglob("*.py")
)
THIRD_PARTY = {"torch", "numpy", "transformers", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"}


@cache
def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """The trees of all files take too much memory to be kept for other tests."""
    yield
    tree_of.cache_clear()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module a file imports, at any depth, spelled as far as the import says."""
    found: set[str] = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def within(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


# The fields of requests are declared once, for HTTP and for the offline API.
FIELDS = tuple(f"engine.text.fields.{name}" for name in ("body", "chat", "sampling", "structured", "tools"))
RULES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    # who, must never import, except in these modules
    ("quire", ("server", "loadtest", "tools", "engine.core", "engine.runtime", "engine.text"), ("quire.__main__",)),
    ("engine", ("quire",), ()),
    ("engine", ("server", "loadtest", "tools", "fastapi", "starlette"), ()),
    ("engine", ("pydantic",), FIELDS),
    (
        "engine",
        ("engine.llm",),
        tuple(
            f"engine.llm{part}" for part in ("", ".arguments", ".job", ".offline", ".params", ".prompts", ".vectors")
        ),
    ),
    ("engine.llm", ("torch", "engine.runtime", "engine.core.scheduling.scheduler"), ()),
    (
        "engine.text",
        ("torch", "engine.runtime", "engine.core.scheduling.scheduler", "engine.loop", "engine.startup.build"),
        (),
    ),
    ("engine.core", (*THIRD_PARTY, "threading", "time", "logging", "asyncio", "engine.runtime", "engine.loop"), ()),
    (
        "engine.runtime",
        ("engine.core.scheduling.scheduler", "engine.core.kv.block_pool", "engine.core.kv.manager", "engine.loop"),
        (),
    ),
    ("engine.runtime", ("engine.core.sequence", "engine.core.kv.prefix_cache", "loadtest.fake_runner"), ()),
    ("engine.runtime.attention", ("engine.runtime.layers", "engine.runtime.lora", "engine.runtime.models"), ()),
    ("engine.runtime.layers", ("engine.runtime.lora", "engine.runtime.models", "engine.runtime.pool"), ()),
    ("engine.runtime.attention.backend", ("engine.runtime.native",), ()),
    ("engine.loop", (*THIRD_PARTY, "engine.runtime", "engine.startup.build"), ()),
    ("engine.inbox", (*THIRD_PARTY, "engine.runtime", "engine.startup.build"), ()),
    ("server", ("torch", "engine.runtime", "engine.core.scheduling.scheduler", "engine.core.kv.block_pool"), ()),
    ("server", ("engine.core.kv.manager", "engine.core.sequence", "loadtest.fake_runner"), ()),
    ("server", ("loadtest",), ("server.cli",)),
    (
        "server.telemetry",
        tuple(f"server.{room}" for room in ("answers", "anthropic", "batches", "http", "openai", "operations")),
        (),
    ),
    ("server", ("tools",), ()),
    ("loadtest", ("tools",), ()),
    ("server", ("engine.startup.build",), ("server.app", "server.load", "server.serve")),
    (
        "loadtest",
        ("engine.runtime", "torch"),
        # numpy has no FP8; `quire fit` counts the tensors of an empty model, and times products; hybrids are empty modules
        ("loadtest.engines", "loadtest.peers.packed", "loadtest.peers.hybrids", "loadtest.fitted", "loadtest.rates"),
    ),
    (
        "loadtest",
        ("engine.startup.build",),
        ("loadtest.engines",),
    ),
]


def test_imports_respect_the_rooms() -> None:
    wrong = [
        f"{module_of(path)} may not import {name}"
        for room, forbidden, exceptions in RULES
        for path in FILES
        if within(module_of(path), room) and module_of(path) not in exceptions
        for name in imports_of(path)
        if within(name, *forbidden)
    ]
    assert wrong == []


def test_the_core_imports_the_standard_library_and_itself() -> None:
    for path in FILES:
        if within(module_of(path), "engine.core"):
            foreign = [name for name in imports_of(path) if not within(name, "engine.core")]
            assert {name.split(".")[0] for name in foreign} <= sys.stdlib_module_names, path


def test_there_is_no_import_circle() -> None:
    modules = {module_of(path): path for path in FILES}
    edges = {name: {other for other in imports_of(path) if other in modules} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(modules):
        visit(name, ())


def test_importing_the_scheduler_loads_no_third_party_module() -> None:
    code = (
        "import sys, engine.core.scheduling.scheduler; "
        "foreign = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names); "
        "print(sorted(name for name in foreign if not name.startswith('_') and name != 'engine'))"
    )
    output = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        tree = tree_of(path)
        assert not tree.body or ast.get_docstring(tree), f"{path} has no module docstring"


# Modules that open files of our own making or the system's, or that check a file first. Every other file may be named by a
# user: it is read through engine/system/regular_file.py, which neither blocks on a FIFO nor reads a device without end.
OPENERS = {
    "engine.system.regular_file",
    "engine.files.file_digests",  # of the hub's cache, or checked
    "engine.files.gguf_header",  # checked, then mapped
    "engine.system.host_limits",  # /proc and /sys
    "engine.runtime.stores.host",  # an unnamed one, and /proc
    "engine.runtime.models.load",  # /proc/cpuinfo
    "engine.runtime.native.build",
    "engine.runtime.native.structs",  # the C sources
    "engine.system.version",  # the commit, in a wheel
    "server.batches.folder",
    "server.batches.lines",
    "engine.system.child_process",  # pipes and /dev/null
    "engine.settings.foreign",  # its table
    "server.operations.page",
    "server.telemetry.metrics",  # its table
    "engine.text.grammars.trial_process",  # /proc
}


def opens_a_file(node: ast.AST) -> bool:
    """Whether a node is open(...), path.open("rb"), or path.read_text()."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open"
    if not isinstance(node.func, ast.Attribute):
        return False
    mode = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    reads = node.func.attr in ("read_text", "read_bytes") and isinstance(
        node.func.value, ast.Name | ast.BinOp | ast.Call
    )
    return reads or (node.func.attr == "open" and mode in ("r", "rb", "w", "wb", "xb", "r+b"))


def test_files_that_users_name_are_read_through_one_module() -> None:
    opened = {
        f"{path}:{node.lineno}"
        for path in FILES
        if module_of(path) not in OPENERS and not within(module_of(path), "loadtest", "tools")
        if re.search(r"open|read_text|read_bytes", path.read_text())  # few do, and a tree has many nodes
        for node in ast.walk(tree_of(path))
        if opens_a_file(node)
    }
    assert not opened, "use engine/system/regular_file.py"
