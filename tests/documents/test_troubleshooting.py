"""Each sentence that docs/troubleshooting.md quotes is one that the code says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.documents.pages import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`]*(?:…|\.)[^`]*)` \|", PAGE, re.MULTILINE)


@cache
def sentences() -> list[str]:
    """Return every string of the code, with … for what is filled in."""
    found = []
    for folder in ("engine", "server"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize("sentence", QUOTED)
def test_the_code_says_it(sentence: str) -> None:
    """Its constant parts are in one string of the code, in this order."""
    parts = [re.escape(part.replace("'quire serve'", "`quire serve`")) for part in sentence.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(each) for each in sentences()), f"no string of the code has {sentence!r}"


def test_there_are_some() -> None:
    assert len(QUOTED) > 25
