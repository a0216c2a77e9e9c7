"""The documents' pages and the fenced blocks in them.

A block that a test cannot run stands below a comment with the reason:

    <!-- not run: needs Docker -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"  # in the pages; tests put that of a daemon in its place
GENERATED = {ROOT / "docs/models.md", *(ROOT / "docs/reference").glob("*.md")}
FRONT = [ROOT / name for name in ("README.md", "SERVING.md", "CONTRIBUTING.md")]
PAGES = FRONT + sorted(set((ROOT / "docs").rglob("*.md")) - GENERATED)

_FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why a test does not run it."""

    page: Path
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Return a page's path, as an id of a test."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, all or those in some languages."""
    whole = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(whole):
        if not languages or found["language"] in languages:
            indent = found["indent"]
            text = "".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
            line = whole.count("\n", 0, found.start("language")) + 1
            yield Block(page, line, found["language"], text, found["reason"] or "")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell block: a line each, continued lines joined, without comments and here-documents."""
    text = re.sub(r"<<'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", text, flags=re.DOTALL | re.MULTILINE)
    quoted = False
    command = ""
    for line in text.replace("\\\n", " ").splitlines():
        command += line
        quoted ^= line.count("'") % 2 == 1
        if quoted:
            command += "\n"
            continue
        bare = re.sub(r"\s#\s.*$", "", command).strip()
        if bare and not bare.startswith("#"):
            yield bare
        command = ""
