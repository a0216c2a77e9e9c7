"""docs/reference/ is what the code says now, and it says something of every endpoint, field, metric, error and header."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from server.answers.body import ChatBody
from server.app import EXPOSED_HEADERS, routers
from server.http.openapi import describe
from server.openai.completions import CompletionBody
from server.protocol.errors import _TABLE, _VALIDATION_CODES
from server.telemetry.metrics import METRICS
from tests.reference.errors import ERRORS
from tests.reference.headers import REQUEST, RESPONSE
from tests.reference.pages import pages

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/reference"
PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name], "run: python -m tests.reference"


def test_no_page_is_left_over() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == set(PAGES)


def test_every_endpoint_field_and_metric_is_there() -> None:
    for router in routers():
        for route in router.routes:
            for method in route.methods - {"HEAD"}:
                assert f"| `{method} {route.path_format}` |" in PAGES["api.md"]
    page = PAGES["fields.md"]
    for body in (ChatBody, CompletionBody):
        section = page.split(f"\n### {body.__name__}\n")[1].split("\n### ")[0]
        rows, _, others = section.partition("\n**")
        assert set(re.findall(r"^\| `(\S+)` \|", rows, re.MULTILINE)) == set(body.model_fields)
        for field in body.UNSUPPORTED.keys() | body.NO_OPS | body.HINTS.keys():
            assert field in body.model_fields or f"`{field}`" in others, field
    assert page.count("\n### ") == len(set(re.findall(r"^### (.*)$", page, re.MULTILINE)))
    for metric in METRICS:
        assert f"`{metric.name}`" in PAGES["metrics.md"]


@pytest.mark.parametrize("page", ["fields.md", "answers.md"])
def test_every_field_has_a_meaning(page: str) -> None:
    schemas = describe(routers())["components"]["schemas"]
    for name in [*re.findall(r"^### (\w+)$", PAGES[page], re.MULTILINE), "ErrorDetails", "AnthropicErrorDetails"]:
        for field, own in schemas[name].get("properties", {}).items():
            assert own.get("description"), f"{name}.{field}: say what it means in its Field(description=...)"


def strings(folder: str) -> set[str]:
    """Return every string in a folder's code."""
    paths = (ROOT / folder).rglob("*.py")
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def codes() -> set[str]:
    """Return the codes of all errors that the server's code makes."""
    found = (
        {code for _, _, _, code in _TABLE} | set(_VALIDATION_CODES.values()) | {"invalid_type", "method_not_allowed"}
    )
    found |= {"response_not_found", "previous_response_not_found"}  # made from a parameter's name
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError":
                code = node.args[1] if len(node.args) > 1 else None
                if isinstance(code, ast.Constant):
                    found.add(str(code.value))
    return found


def test_every_error_code_is_there() -> None:
    assert set(ERRORS) == codes()


def test_every_header_is_there() -> None:
    known = {name.lower() for name in strings("server")}
    assert not {*REQUEST, *RESPONSE} - known
    ours = {name for name in known if re.fullmatch(r"x-(quire|ratelimit|should|request)-[a-z-]+", name)}
    assert not ours - {*REQUEST, *RESPONSE}
    assert not RESPONSE.keys() - {*EXPOSED_HEADERS}, "pages of allowed origins read them, as OpenAI's client does"
