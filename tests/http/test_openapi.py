"""/openapi.json tells the truth: every route is in it, and what is sent and answered is what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from harness import Live

Validate = Callable[[httpx.Response], None]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def check(document: dict[str, Any], schema: dict[str, Any], instance: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(instance)


def test_what_it_names_is_there(document: dict[str, Any], http: httpx.Client) -> None:
    assert document["info"]["title"] == "Quire"
    assert {"/v1/chat/completions", "/v1/models/{name}", "/tokenize", "/metrics"} <= document["paths"].keys()
    for path, item in document["paths"].items():
        for method in item:
            assert http.request(method, path.replace("{name}", "parrot")).status_code != 405, f"{method} {path}"
    assert http.get("/v1/completions").status_code == 405  # which is what is looked for


REQUESTS = [
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "include_metrics": True}),
    ("/v1/chat/completions", {"messages": HELLO, "n": 2, "prompt_logprobs": 1, "return_token_ids": True, "seed": None}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop": "i"},
    ),
    ("/v1/completions", {"prompt": "one|", "logprobs": 1, "echo": True, "user": "someone"}),
    ("/v1/completions", {"prompt": [[104, 124], [105, 124]], "stop": ["x", "y"], "prompt_logprobs": 0}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [104, 105]}),
    ("/v1/embeddings", {"input": ["hello", "you"], "dimensions": 3}),
    ("/v1/embeddings", {"input": [[104, 105]], "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "one", "text_2": [" two", " three"], "reduction": "sum"}),
]


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
def test_requests_and_answers_are_as_it_says(
    document: dict[str, Any], http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    operation = document["paths"][path]["post"]
    check(document, operation["requestBody"]["content"]["application/json"]["schema"], fields)
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    check(document, operation["responses"]["200"]["content"]["application/json"]["schema"], answer.json())


def test_what_is_refused_is_not_what_it_says_either(document: dict[str, Any], http: httpx.Client) -> None:
    operation = document["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    for fields in ({}, {"messages": []}, {"messages": HELLO, "temperature": 3}, {"messages": HELLO, "stop": ["x"] * 5}):
        with pytest.raises(jsonschema.ValidationError):
            check(document, body, fields)
        refused = http.post("/v1/chat/completions", json=fields)
        assert refused.status_code == 400
        check(document, operation["responses"]["4XX"]["content"]["application/json"]["schema"], refused.json())


def test_models_and_streams(document: dict[str, Any], http: httpx.Client) -> None:
    answer = document["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    check(document, answer, http.get("/v1/models").json())
    streams = {
        path
        for path, item in document["paths"].items()
        for operation in item.values()
        if "text/event-stream" in operation["responses"].get("200", {}).get("content", {})
    }
    assert {"/v1/chat/completions", "/v1/completions"} <= streams


def test_with_keys_it_asks_for_one(serve: Callable[..., Live]) -> None:
    live = serve(api_keys=("right",))
    assert httpx.get(live.url + "/openapi.json").status_code == 401
    document = httpx.get(live.url + "/openapi.json", headers={"authorization": "Bearer right"}).json()
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/health"]["get"]["security"] == []
