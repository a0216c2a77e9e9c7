"""An endpoint is added by one file and one line: it is then served, checked, described and in the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from harness import Live

from server import app
from tests.reference.pages import pages


@pytest.fixture
def http(serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(app, "ENDPOINTS", [*app.ENDPOINTS, "tests.examples.endpoint"])
    with httpx.Client(base_url=serve().url) as client:
        yield client


def test_it_answers_and_checks_its_body(http: httpx.Client) -> None:
    answer = http.post("/v1/count_words", json={"text": "one two three", "colour": "red"})
    assert answer.json()["num_words"] == 3
    assert answer.headers["x-quire-ignored-fields"] == "colour"
    assert http.post("/v1/count_words", json={"text": 3}).json()["error"]["param"] == "text"
    assert http.post("/v1/count_words", json={"text": "", "model": "other"}).status_code == 404


def test_it_is_described(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    operation = document["paths"]["/v1/count_words"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/CountWordsBody")
    assert "CountedWords" in document["components"]["schemas"]
    row = "| `POST /v1/count_words` | Count the words of a text. | [CountWordsBody](fields.md#countwordsbody) |"
    assert row in pages()["api.md"]
