"""docs/reference.md is what the code says now, and it says something of every endpoint and every field."""

from __future__ import annotations

import re
from pathlib import Path

from server.app import routers
from server.openai.chat import ChatBody
from server.openai.completions import CompletionBody
from server.operations.reference import reference

PAGE = Path(__file__).parents[2] / "docs/reference.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: python -m server.operations.reference > docs/reference.md"
    )


def test_it_tells_of_every_endpoint_and_field() -> None:
    page = reference()
    for router in routers():
        for route in router.routes:
            for method in route.methods - {"HEAD"}:
                assert f"| `{method} {route.path_format}` |" in page
    for body in (ChatBody, CompletionBody):
        section = page.split(f"\n### {body.__name__}\n")[1].split("\n### ")[0]
        told = dict(re.findall(r"^\| `(\S+)` \|.*\| (honoured|no-op|hint|refused)[^|]*\|$", section, re.MULTILINE))
        expected = dict.fromkeys(body.UNSUPPORTED, "refused") | dict.fromkeys(body.NO_OPS, "no-op")
        expected |= dict.fromkeys(body.HINTS, "hint")
        assert told == expected | dict.fromkeys(body.model_fields, "honoured")
    assert page.count("\n### ") == len(set(re.findall(r"^### (.*)$", page, re.MULTILINE)))
