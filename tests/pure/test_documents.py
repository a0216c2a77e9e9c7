"""The documents name only what exists: files, headings, flags, metrics, alerts. The guides stay short."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.settings.foreign import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "SERVING.md", "CONTRIBUTING.md")]
GENERATED = {ROOT / "docs/models.md", *(ROOT / "docs/reference").glob("*.md")}
PAGES += sorted(set((ROOT / "docs").rglob("*.md")) - GENERATED)
MAX_WORDS = {"SERVING.md": 2000}
MAX_LINES = {"README.md": 150}
# Flags of other programs, in commands that use them, and of examples.
FOREIGN_FLAGS = {"--model_args", "--profile", "--max-wishes", "--no-deps", "--gpus", "--shm-size"}
FOREIGN_FLAGS |= {
    "--cache-threshold",
    "--build",
    "--build-arg",
    "--entrypoint",
    "--rm",
    "--strict",
    "--disable-circuit-breaker",
    "--target",
}
FOREIGN_FLAGS |= {  # of routers
    "--cb-timeout-duration-secs",
    "--health-check-interval-secs",
    "--kv-event-block-size",
    "--kv-event-model",
    "--kv-event-source",
    "--worker-startup-check-interval",
    "--worker-urls",
}


def named(page: Path) -> str:
    """Return a page's path, as an id of a test."""
    return str(page.relative_to(ROOT))


@cache
def serve_help() -> str:
    """`quire serve --help=all`, in wide lines."""
    command = [sys.executable, "-m", "server", "serve", "--help=all"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@cache
def sources() -> str:
    """All code that may declare a flag of a script, or a metric."""
    files = [path for room in ("engine", "server", "loadtest", "tools") for path in (ROOT / room).rglob("*.py")]
    rows = ROOT / "server/telemetry/metric_rows.json"
    return "".join(path.read_text(encoding="utf-8") for path in [*files, rows])


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the forge makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        is_on_the_site = target.is_relative_to(ROOT / "docs") or not page.is_relative_to(ROOT / "docs")
        assert is_on_the_site, f"{link} leads out of docs/, where the site has nothing; name the path in backquotes"


def test_the_chart_is_of_the_table() -> None:
    """README's chart has the figures of the table in docs/benchmarks.md."""
    chart = (ROOT / "docs/throughput.svg").read_text(encoding="utf-8")
    table = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").partition("### Short prompts")[2]
    ours = re.findall(r"^\| \d+ \| \*\*(\d+)\*\* \|", table.partition("### ")[0], re.MULTILINE)[:5]
    assert re.findall(r'class="value"[^>]*>(\d+)<', chart) == ours


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`((?:engine|server|quire|loadtest|tools|tests|docs|monitoring)/[\w./-]+)`", text):
        if name.startswith("loadtest/results/gpu-"):
            continue
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_flag_that_is_named_exists(page: Path) -> None:
    text = re.sub(r"^```bash.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", text)):  # of commands: tests/documents/test_blocks.py
        name = flag.replace("--no-", "--")
        known = re.search(rf"{name}\b(?!-)", serve_help().replace("-\n" + " " * 40, "-")) or f'"{flag}"' in sources()
        is_foreign = any(each in other_servers() for each in (flag, name))
        assert known or is_foreign or flag in FOREIGN_FLAGS or in_a_script(flag), flag


def other_servers() -> set[str]:
    """Flags of other servers that `quire serve` understands."""
    return {flag for rows in PROGRAMS.values() for row in rows for flag in row.flags}


def in_a_script(flag: str) -> bool:
    """Whether a shell script of ours takes a flag."""
    return flag in (ROOT / "loadtest/gpu.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_metric_that_is_named_exists(page: Path) -> None:
    for name in set(re.findall(r"quire_[a-z_]+[a-z]", page.read_text(encoding="utf-8"))):
        base = re.sub("_(total|bucket|sum|count|info)$", "", name)
        assert f'"{name}' in sources() or f'"{base}"' in sources(), name


@pytest.mark.skipif(find_spec("zensical") is None, reason="needs zensical, which needs Python 3.11")
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    """In strict mode the generator refuses links to pages and headings that do not exist."""
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "zensical.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr).partition("Traceback")[0]
    assert done.returncode == 0, report
    built = {path.relative_to(tmp_path / "build/site") for path in (tmp_path / "build/site").rglob("*.html")}
    assert {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")} <= built


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    listed = re.findall(r'= "([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert len(listed) == len(set(listed))
    assert pages <= set(listed)


@pytest.mark.parametrize("name", MAX_WORDS)
def test_a_guide_stays_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) <= MAX_WORDS[name]


@pytest.mark.parametrize("name", MAX_LINES)
def test_the_front_page_stays_one_page(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES[name]


def test_the_tour_names_what_is_there() -> None:
    """Each row names a file, and in quotes the classes and functions to look at."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tour = page.partition("## A tour in reading order")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(engine/[\w./]+)` \| ([^|]*) \|", tour, re.MULTILINE)
    num_lines = 0
    for name, look_at in rows:
        source = (ROOT / name).read_text(encoding="utf-8")
        num_lines += len(source.splitlines())
        for part in re.findall(r"`(\w+)`", look_at):
            assert re.search(rf"^\s*(?:def|class) {part}\b", source, re.MULTILINE), f"{name}: {part}"
    assert len(rows) > 5
    assert 1500 < num_lines < 3000, num_lines


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_module_that_is_run_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"python -m ((?:server|loadtest|tools|engine|tests)[\w.]*)", text)):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    for package in ("loadtest", "tools"):
        commands = (ROOT / package / "__main__.py").read_text(encoding="utf-8")
        for command in set(re.findall(rf"python -m {package} ([a-z][a-z-]*)", text)):
            assert f'"{command}"' in commands, command
