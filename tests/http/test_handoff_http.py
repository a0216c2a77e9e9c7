"""A decode daemon and its prefill daemon: answers are what one daemon alone says, whatever happens between the two."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import Live, eventually
from test_lifecycle import asked

from engine.adapters import Adapters
from engine.runtime.transports.shared_memory import SharedMemory

TEXT = "The quick brown fox jumps over the lazy dog, again and again, until it is tired of it"  # 85 tokens, 5 blocks

Serve = Callable[..., Live]
Post = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "parcels"


@pytest.fixture
def pair(serve: Serve, folder: Path) -> tuple[Live, Live]:
    prefill = serve(role="prefill", kv_connector_dir=folder, api_keys=("secret",))
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url, api_keys=("secret",))
    return prefill, decode


def ask(live: Live, **fields: Any) -> dict[str, Any]:
    body = {"prompt": TEXT + "|", "max_tokens": 20, "logprobs": 1} | fields
    answer = httpx.post(f"{live.url}/v1/completions", json=body, headers={"authorization": "Bearer secret"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def handoffs(live: Live) -> dict[str, float]:
    text = httpx.get(f"{live.url}/metrics", headers={"authorization": "Bearer secret"}).text
    lines = [line for line in text.splitlines() if line.startswith("quire_handoffs_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_an_answer_is_the_same_and_its_prompt_was_computed_elsewhere(
    pair: tuple[Live, Live], folder: Path, post: Post
) -> None:
    prefill, decode = pair
    alone = post("/v1/completions", prompt=TEXT + "|", max_tokens=20, logprobs=1, n=2)
    apart = ask(decode, n=2)
    assert apart["choices"] == alone["choices"]
    assert apart["choices"][0]["text"] == TEXT[:20]
    assert apart["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert prefill.engine.stats.prompt_tokens == 86
    assert handoffs(decode) == {"received": 1}
    assert not list(folder.iterdir())
    ask(decode)
    assert handoffs(decode) == {"received": 1, "short": 1}, "what is cached is not asked for again"


def test_streams_and_chats_go_the_same_way(pair: tuple[Live, Live]) -> None:
    _, decode = pair
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9, "stream": True}
    with httpx.stream(
        "POST", f"{decode.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer secret"}
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"])
    assert said == TEXT[:9]
    assert handoffs(decode) == {"received": 1}


def test_prompts_of_adapters_go_the_same_way_where_both_daemons_have_them(
    serve: Serve, folder: Path, tmp_path: Path
) -> None:
    """Told apart from the model's own by their content; the names are each daemon's own."""
    paths = [tmp_path / name for name in ("one", "two")]
    for distance, path in enumerate(paths, start=1):
        path.write_text(str(distance))
    adapters = [Adapters(read_adapter, 2) for _ in range(2)]
    adapters[0].load("first", str(paths[0]))
    adapters[1].load("uno", str(paths[0]))
    adapters[1].load("due", str(paths[1]))
    fakes = {"runner": AdaptableParrot, "kv_connector_dir": folder, "api_keys": ("secret",)}
    prefill = serve(role="prefill", adapters=adapters[0], **fakes)
    decode = serve(role="decode", adapters=adapters[1], prefill_url=prefill.url, **fakes)
    shifted = "".join(chr(ord(letter) + 1) for letter in TEXT[:20])
    assert ask(decode, model="uno")["choices"][0]["text"] == shifted
    assert handoffs(decode) == {"received": 1}
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"received": 2}, "an adapter's K/V is not the model's own"
    assert prefill.engine.stats.prompt_tokens == 2 * 86
    assert not prefill.engine.stats.prefix_hit_tokens
    assert ask(decode, model="due")["choices"][0]["text"] != shifted
    assert handoffs(decode) == {"received": 2, "failed": 1}, "the prefill daemon has not got this one"
    assert prefill.engine.stats.prompt_tokens == 2 * 86


def test_a_prefill_daemon_that_knows_no_adapters_hands_over_nothing_of_theirs(
    serve: Serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one takes the field for none of its own, and computes the model's own K/V."""
    (tmp_path / "one").write_text("1")
    adapters = Adapters(read_adapter, 2)
    adapters.load("one", str(tmp_path / "one"))
    fakes = {"runner": AdaptableParrot, "kv_connector_dir": folder, "api_keys": ("secret",)}
    prefill = serve(role="prefill", **fakes)
    decode = serve(role="decode", adapters=adapters, prefill_url=prefill.url, **fakes)
    post = httpx.AsyncClient.post

    async def older(self: httpx.AsyncClient, path: str, *, json: dict[str, Any]) -> httpx.Response:
        return await post(self, path, json={**json, "adapter": None})

    monkeypatch.setattr(httpx.AsyncClient, "post", older)
    assert ask(decode, model="one")["choices"][0]["text"] == "".join(chr(ord(letter) + 1) for letter in TEXT[:20])
    assert handoffs(decode) == {"failed": 1}


def test_short_prompts_and_scores_are_computed_where_they_are_asked_for(pair: tuple[Live, Live]) -> None:
    prefill, decode = pair
    assert ask(decode, prompt="Hello|")["choices"][0]["text"] == "Hello"
    ask(decode, prompt=TEXT, echo=True, max_tokens=0)
    assert handoffs(decode) == {"short": 1}
    assert not prefill.engine.stats.prompt_tokens


def test_without_a_prefill_daemon_prompts_are_computed_here_and_that_is_told_once(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{bound.getsockname()[1]}"
        decode = serve(role="decode", kv_connector_dir=folder, prefill_url=nowhere, api_keys=("secret",))
        for index in range(3):
            assert ask(decode, prompt=f"{index}{TEXT}|")["choices"][0]["text"] == f"{index}{TEXT}"[:20]
    assert handoffs(decode) == {"failed": 3}
    told = [record.getMessage() for record in caplog.records if "computed here" in record.getMessage()]
    assert len(told) == 1
    assert nowhere in told[0]


@pytest.mark.parametrize("key", ["other", "secret"])
def test_a_daemon_that_refuses_costs_no_answer(serve: Serve, folder: Path, key: str) -> None:
    """Another key, or a daemon that is no prefill daemon."""
    other = serve(api_keys=(key,))
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=other.url, api_keys=("secret",))
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}


def test_a_slow_prefill_daemon_is_not_waited_for(serve: Serve, folder: Path) -> None:
    prefill = serve(role="prefill", kv_connector_dir=folder)
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url, prefill_timeout_s=0.2,
                   api_keys=("secret",))  # fmt: skip
    prefill.gate.close()
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}
    prefill.gate.open()
    prefill.check_idle()


def test_a_client_that_leaves_ends_the_prefill(serve: Serve, folder: Path) -> None:
    prefill = serve(role="prefill", kv_connector_dir=folder)
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url)
    prefill.gate.close()
    with asked(decode, "/v1/completions", prompt=TEXT):
        eventually(lambda: prefill.context.client.num_open == 1)
    eventually(lambda: prefill.context.client.num_open == 0)
    prefill.gate.open()


def test_a_damaged_parcel_is_computed_anew(
    pair: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    _, decode = pair
    whole = SharedMemory.open

    def damage(self: SharedMemory, name: str, layout: Any) -> Any:
        path = folder / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return whole(self, name, layout)

    monkeypatch.setattr(SharedMemory, "open", damage)
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}


def test_a_folder_that_has_become_unusable_costs_no_answer(
    pair: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode = pair
    monkeypatch.setattr(SharedMemory, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}


def test_a_server_of_another_role_computes_nothing_for_others(live: Live) -> None:
    answer = httpx.post(f"{live.url}/v1/internal/prefill", json={"prompt": [1, 2, 3]})
    assert answer.status_code == 501
    assert "role prefill in --kv-transfer-config" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"prompt": []}, {"prompt": [999_999]}, {"prompt": "text"}, {}, {"prompt": [1] * 600}])
def test_bad_prompts_are_refused(serve: Serve, folder: Path, body: dict[str, Any]) -> None:
    prefill = serve(role="prefill", kv_connector_dir=folder)
    answer = httpx.post(f"{prefill.url}/v1/internal/prefill", json=body)
    assert answer.status_code == 400, answer.text
