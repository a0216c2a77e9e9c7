"""LoRA adapters as clients see them: models of their own, side by side, that come and go while the server runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import APP, CONFIG, Live, eventually

from engine.adapters import Adapters
from engine.handle import UnloadAdapter
from server.answers.models import Entry, Models
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for distance in (1, 2, 3, 4):
        (tmp_path / f"by{distance}").write_text(str(distance))
    (tmp_path / "damaged").write_text("many")
    return tmp_path


@pytest.fixture
def adapters(folder: Path) -> Adapters:
    loaded = Adapters(read_adapter, 3)
    loaded.load("next", str(folder / "by1"))
    loaded.load("org/after", str(folder / "by2"))
    return loaded


@pytest.fixture
def parrot(serve: Serve, adapters: Adapters) -> Live:
    return serve(adapters=adapters, runner=AdaptableParrot, allow_runtime_lora_updating=True)


@pytest.fixture
def client(parrot: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=parrot.url) as client:
        yield client


def say(client: httpx.Client, model: str | None, text: str = "hal", **fields: Any) -> str:
    body = {"prompt": f"{text}|", "max_tokens": len(text), "model": model} | fields
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "parrot")
    return str(answer.json()["choices"][0]["text"])


def load(client: httpx.Client, name: str, path: Path) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_models_lists_adapters_with_what_they_change(client: httpx.Client, folder: Path) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["parrot", "bird", "next", "org/after"]
    assert [cards["parrot"]["parent"], cards["parrot"]["root"]] == [None, APP.model]
    assert [cards["next"]["parent"], cards["next"]["root"]] == ["parrot", str(folder / "by1")]
    assert cards["next"]["max_model_len"] == cards["parrot"]["max_model_len"]
    assert client.get("/v1/models/org/after").json() == cards["org/after"]


def test_a_request_names_an_adapter_as_its_model(client: httpx.Client) -> None:
    told = {None: "hal", "parrot": "hal", "bird": "hal", "next": "ibm", "org/after": "jcn"}
    for model, text in told.items():
        assert say(client, model) == text
    with ThreadPoolExecutor(20) as pool:  # many at once say what each says alone
        texts = list(pool.map(lambda model: say(client, model, "hal" * 9), list(told) * 4))
    assert texts == [text * 9 for text in told.values()] * 4


MESSAGES = [{"role": "user", "content": "hal"}]
ENDPOINTS = [
    ("/v1/completions", {"prompt": "hal|"}, lambda a: a["choices"][0]["text"]),
    ("/v1/chat/completions", {"messages": MESSAGES}, lambda a: a["choices"][0]["message"]["content"]),
    ("/v1/responses", {"input": "hal"}, lambda a: a["output"][0]["content"][0]["text"]),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, lambda a: a["content"][0]["text"]),
]


@pytest.mark.parametrize(("path", "body", "text"), ENDPOINTS, ids=[path for path, _, _ in ENDPOINTS])
def test_every_endpoint_that_generates(
    client: httpx.Client, path: str, body: dict[str, Any], text: Callable[[Any], str]
) -> None:
    answer = client.post(path, json=body | {"model": "next"})
    assert text(answer.json()) == "ibm"
    assert answer.json()["model"] == "next"
    entry = client.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert (entry["endpoint"], entry["adapter"]) == (path, "next")
    answer = client.post(path, json=body | {"model": "nobody"})
    assert answer.status_code == 404
    assert "use parrot or bird or next or org/after" in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": "hal"}), ("/v1/score", {"text_1": "h", "text_2": "al"})],
)
def test_what_is_read_is_read_with_the_adapter(
    parrot: Live, client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    asked: list[object] = []
    parrot.runner._fail = lambda piece: asked.append(piece.params.adapter)  # type: ignore[func-returns-value]
    assert client.post(path, json=body | {"model": "next"}).json()["model"] == "next"
    assert {getattr(adapter, "name", None) for adapter in asked} == {"next"}


LEAVING = [*((path, body) for path, body, _ in ENDPOINTS), ("/v1/score", {"text_1": "h", "text_2": "al"})]
LEAVING += [("/v1/embeddings", {"input": "hal"})]


@pytest.mark.parametrize(("path", "body"), LEAVING, ids=[path for path, _ in LEAVING])
def test_the_model_does_not_answer_for_an_adapter_that_leaves_while_its_request_is_read(
    parrot: Live, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    find = Models.find

    def find_and_unload(models: Models, name: str | None) -> Entry:
        entry = find(models, name)
        if name in parrot.engine.adapters:
            parrot.engine.control(UnloadAdapter(str(name))).result(PATIENCE_S)
        return entry

    monkeypatch.setattr(Models, "find", find_and_unload)
    answer = client.post(path, json=body | {"model": "next"})
    assert answer.status_code == 404, answer.text
    assert "No adapter 'next' is loaded." in answer.text
    assert client.post(path, json=body | {"model": "bird"}).status_code == 200


def test_a_score_has_the_name_of_an_adapter_that_leaves_meanwhile(parrot: Live, client: httpx.Client) -> None:
    parrot.gate.close()
    with ThreadPoolExecutor(1) as pool:
        body = {"text_1": "h", "text_2": "al", "model": "next"}
        answer = pool.submit(client.post, "/v1/score", json=body)
        eventually(lambda: parrot.context.client.num_open == 1)
        assert unload(client, "next").status_code == 200
        parrot.gate.open()
        assert answer.result().json()["model"] == "next"


def test_token_counts_and_tokens_know_the_name(client: httpx.Client) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "hal"}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses/input_tokens", {"input": "hal"}),
    ):
        assert client.post(path, json=body | {"model": "next"}).status_code == 200


def test_cached_blocks_are_no_other_adapters(client: httpx.Client) -> None:
    def cached(model: str) -> int:
        body = {"prompt": "x" * 100, "max_tokens": 1, "model": model}
        return int(client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(model) for model in ("parrot", "next", "org/after", "next", "bird", "org/after")] == [
        *(0, 0, 0),
        *(96, 96, 96),
    ]


def test_adapters_take_part_in_preemption(serve: Serve, adapters: Adapters) -> None:
    small = replace(CONFIG, num_blocks=12, max_num_seqs=8, max_model_len=160)
    live = serve(config=small, adapters=adapters, runner=AdaptableParrot, step_s=0.001)
    with httpx.Client(base_url=live.url) as client, ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(lambda model: say(client, model, "hal" * 12), ["next", None, "org/after"] * 3))
    assert texts == ["ibm" * 12, "hal" * 12, "jcn" * 12] * 3
    assert live.engine.stats.preemptions > 0


def test_one_is_loaded_and_unloaded_while_others_stream(parrot: Live, client: httpx.Client, folder: Path) -> None:
    body = {"prompt": "hal" * 20 + "|", "max_tokens": 60, "stream": True}
    parrot.gate.close()
    with (
        client.stream("POST", "/v1/completions", json=body | {"model": "next"}) as adapted,
        client.stream("POST", "/v1/completions", json=body) as plain,
    ):
        assert load(client, "third", folder / "by3").status_code == 200
        assert unload(client, "next").status_code == 200
        assert client.post("/v1/completions", json=body | {"model": "next"}).status_code == 404
        assert [card["id"] for card in client.get("/v1/models").json()["data"]][2:] == ["org/after", "third"]
        full = load(client, "fourth", folder / "by4")
        assert full.status_code == 409
        assert "3 adapters are held, 1 of them unloaded but still used by requests" in full.text
        parrot.gate.open()
        for stream, text in ((adapted, "ibm"), (plain, "hal")):
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
            assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text * 20
    assert say(client, "third") == "kdo"
    eventually(lambda: load(client, "fourth", folder / "by4").status_code == 200)  # the memory of "next" is free
    assert say(client, "fourth") == "lep"


def test_a_name_may_come_back_as_something_else(client: httpx.Client, folder: Path) -> None:
    assert say(client, "next", "hal" * 9) == "ibm" * 9
    unload(client, "next")
    load(client, "next", folder / "by4")
    assert say(client, "next", "hal" * 9) == "lep" * 9


def test_what_cannot_be_loaded_is_told(client: httpx.Client, folder: Path) -> None:
    for name, path, status, code, param, words in (
        ("next", folder / "by3", 409, "adapter_conflict", "lora_name", "'next' is loaded already"),
        ("bird", folder / "by3", 409, "adapter_conflict", "lora_name", "what a model here is called"),
        ("new", folder / "none", 404, "adapter_not_found", "lora_path", "There is nothing at"),
        ("new", folder / "damaged", 400, "invalid_value", "lora_path", "holds no number"),
        ("", folder / "by3", 400, "invalid_value", "lora_name", "at least 1 character"),
    ):
        answer = load(client, name, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        assert words in error["message"]
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b", "load_inplace": True})
    assert answer.json()["error"]["param"] == "load_inplace"
    assert unload(client, "new").json()["error"]["code"] == "adapter_not_found"
    assert unload(client, "parrot").status_code == 404
    assert len(client.get("/v1/models").json()["data"]) == 4


def test_loading_is_off_unless_it_was_asked_for(serve: Serve, adapters: Adapters, folder: Path) -> None:
    live = serve(adapters=adapters, runner=AdaptableParrot)
    with httpx.Client(base_url=live.url) as client:
        for answer in (load(client, "third", folder / "by3"), unload(client, "next")):
            assert answer.status_code == 501
            assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]
        assert say(client, "next") == "ibm"


def test_loading_needs_the_key(serve: Serve, adapters: Adapters, folder: Path) -> None:
    live = serve(adapters=adapters, api_keys=("secret",), allow_runtime_lora_updating=True)
    with httpx.Client(base_url=live.url) as client:
        assert load(client, "third", folder / "by3").status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert load(client, "third", folder / "by3").status_code == 200


def test_metrics_count_adapters_and_what_they_are_asked(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": ["a|", "b|"], "model": "next", "max_tokens": 1})
    say(client, None)
    lines = client.get("/metrics").text.splitlines()
    assert 'quire_lora_adapters{model_name="parrot"} 2.0' in lines
    assert 'quire_lora_requests_total{adapter="next"} 2.0' in lines
    assert not any(line.startswith("quire_lora_requests_total") and "parrot" in line for line in lines)
