"""A decode daemon and its prefill daemon: answers are what one daemon alone says, whatever happens between the two."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import Live, eventually
from test_lifecycle import asked

from engine.adapters import Adapters
from engine.core.kv.tiers import Tiers
from engine.core.types import Request, SamplingParams
from engine.runtime.stores.folder import KnownPart
from server.answers import handoff
from server.answers.body import KVTransferParams
from server.answers.handoff import _remote_salt
from tests.patience import PATIENCE_S

TEXT = "The quick brown fox jumps over the lazy dog, again and again, until it is tired of it"  # 85 tokens, 5 blocks

Serve = Callable[..., Live]
Post = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runner computes a prompt in no time, and so would wait for no other daemon."""
    monkeypatch.setattr(handoff, "LEAST_PATIENCE_S", PATIENCE_S)


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


def test_a_daemon_that_hangs_is_not_asked_again_and_again(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asks = 0.0, []
    pauses_of = handoff.Pauses
    monkeypatch.setattr(handoff, "Pauses", lambda _: pauses_of(lambda: now))
    ask_for = handoff.Receiver._ask

    async def count(receiver: handoff.Receiver, request: Request) -> KVTransferParams | None:
        asks.append(request.request_id)
        return await ask_for(receiver, request)

    monkeypatch.setattr(handoff.Receiver, "_ask", count)
    prefill = serve(role="prefill", kv_connector_dir=folder)
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url, prefill_timeout_s=0.2)
    prefill.gate.close()
    for index in range(4):
        assert ask(decode, cache_salt=f"hangs{index}")["choices"][0]["text"] == TEXT[:20]
    assert len(asks) == 1
    now = 1.0
    for index in range(4):
        ask(decode, cache_salt=f"probed{index}")
    assert len(asks) == 2, "one probe"
    prefill.gate.open()
    prefill.check_idle()
    now = 2.0
    ask(decode, cache_salt="early")
    assert len(asks) == 2
    monkeypatch.setattr(decode.context.receiver, "_timeout_s", PATIENCE_S)
    now = 3.0
    for index in range(2):
        ask(decode, cache_salt=f"well{index}")
    assert len(asks) == 4
    assert handoffs(decode) == {"failed": 9, "received": 2}


def test_a_request_waits_no_longer_than_computing_its_prompt_takes(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "LEAST_PATIENCE_S", 0.0)
    monkeypatch.setattr(Tiers, "compute_s", lambda *_: 0.05)
    prefill = serve(role="prefill", kv_connector_dir=folder)
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url, prefill_timeout_s=3600.0)
    prefill.gate.close()
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}
    prefill.gate.open()


def test_a_hurried_request_and_a_refused_one_have_nobody_else_wait(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant could otherwise turn the hand-over off for all."""
    prefill = serve(role="prefill", kv_connector_dir=folder)
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url)
    with monkeypatch.context() as patch:
        patch.setattr(handoff.Receiver, "_limit_s", lambda *_: 0.05)
        prefill.gate.close()
        ask(decode, cache_salt="hurried")
    prefill.gate.open()
    prefill.check_idle()
    with monkeypatch.context() as patch:
        patch.setattr(handoff, "_remote_salt", lambda _: "x" * 10_000)  # a 400
        ask(decode, cache_salt="refused")
    ask(decode, cache_salt="calm")
    assert handoffs(decode) == {"failed": 2, "received": 1}


def test_pauses_double_up_to_a_bound_and_one_probe_is_enough() -> None:
    now = 0.0
    pauses = handoff.Pauses(lambda: now)
    lengths = []
    assert pauses.begin()
    assert pauses.begin(), "all ask while the daemon is well"
    pauses.fail()
    pauses.fail()  # together with the first
    for _ in range(9):
        begun = now
        while not pauses.begin():
            now += 0.5
        lengths.append(now - begun)
        assert not pauses.begin(), "one request probes"
        pauses.fail()
    assert lengths == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    now += 64
    assert pauses.begin()
    pauses.leave()  # its client left
    assert pauses.begin()
    pauses.succeed()
    assert pauses.begin()
    assert pauses.begin()


@pytest.mark.parametrize("owner", ["", "acme"])
def test_owners_are_kept_apart_on_the_prefill_daemon(owner: str) -> None:
    """It knows the decode daemon by one key, so the salt that it is sent has to tell owners apart."""
    request = Request(request_id="r", prompt=(1,), params=SamplingParams(max_tokens=1), arrival_s=0.0, cache_salt="s")
    salts = {_remote_salt(replace(request, cache_owner=name)) for name in (owner, "other")}
    assert len(salts) == 2
    assert _remote_salt(replace(request, cache_owner=owner, cache_salt="t")) not in salts


def test_tenants_of_a_decode_daemon_share_nothing_on_the_prefill_daemon(
    serve: Serve, folder: Path, tmp_path: Path
) -> None:
    """Neither is faster because the other has asked the same: also not by what the prefill daemon has cached."""
    prefill = serve(role="prefill", kv_connector_dir=folder, api_keys=("secret",))
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: ann, key: ann-key}, {name: bob, key: bob-key}]")
    decode = serve(role="decode", kv_connector_dir=folder, prefill_url=prefill.url, api_keys=("secret",),
                   tenants=tenants)  # fmt: skip
    for key in ("ann-key", "bob-key"):
        assert send(decode, COMPLETIONS, BODIES[COMPLETIONS], key).status_code == 200
    assert handoffs(decode) == {"received": 2}
    assert not prefill.engine.stats.prefix_hit_tokens


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
    decode.require_thread()
    look = KnownPart.look

    def damage(self: KnownPart) -> None:
        path = folder / f"{self.name}.kv"
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
        look(self)

    monkeypatch.setattr(KnownPart, "look", damage)
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}


def test_a_folder_that_has_become_unusable_costs_no_answer(
    pair: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode = pair
    decode.require_thread()
    monkeypatch.setattr(KnownPart, "look", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert ask(decode)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}


# -- a router between the two, as vLLM's ---------------------------------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": TEXT + "|", "max_tokens": 20, "logprobs": 1},
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 20, "logprobs": True},
}
DO_PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None}}


@pytest.fixture
def apart(serve: Serve, folder: Path) -> tuple[Live, Live]:
    """A prefill daemon and a decode daemon that have no folder in common."""
    prefill = serve(role="prefill", kv_connector_dir=folder, kv_connector_listen="127.0.0.1:0", api_keys=("secret",))
    assert prefill.context.sender is not None
    peer = f"127.0.0.1:{prefill.context.sender.port}"
    decode = serve(role="decode", kv_connector_dir=folder.with_name("other"), kv_connector_peers=(peer,),
                   api_keys=("secret",))  # fmt: skip
    return prefill, decode


def send(live: Live, path: str, body: dict[str, Any], key: str = "secret") -> httpx.Response:
    return httpx.post(f"{live.url}{path}", json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", BODIES)
def test_a_router_takes_a_request_through_both_daemons(apart: tuple[Live, Live], post: Post, path: str) -> None:
    prefill, decode = apart
    body = BODIES[path]
    computed = send(prefill, path, body | DO_PREFILL).json()
    transfer = computed["kv_transfer_params"]
    assert computed["usage"]["completion_tokens"] == 1
    assert transfer["do_remote_prefill"]
    assert not transfer["do_remote_decode"]
    assert (transfer["remote_num_tokens"], len(transfer["remote_block_ids"])) == (80, 5)
    answered = send(decode, path, body | {"kv_transfer_params": transfer})
    assert answered.headers.get("x-quire-ignored-fields") is None
    assert answered.json()["choices"] == post(path, **body)["choices"]
    assert answered.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert "kv_transfer_params" not in answered.json()
    again = send(decode, path, body | {"kv_transfer_params": transfer})
    assert again.json()["choices"] == answered.json()["choices"]
    assert handoffs(decode) == {"received": 1, "short": 1}


def test_what_cannot_be_taken_is_computed(apart: tuple[Live, Live]) -> None:
    """A parcel of another prompt, of another tenant, that was taken, or that never was."""
    prefill, decode = apart
    transfer = send(prefill, COMPLETIONS, BODIES[COMPLETIONS] | DO_PREFILL).json()["kv_transfer_params"]
    cases: list[dict[str, Any]] = [
        {"prompt": "An" + TEXT[2:] + "|"},
        {"cache_salt": "mine"},
        {"kv_transfer_params": transfer | {"remote_request_id": "0" * 32}},
        {"kv_transfer_params": transfer | {"remote_host": None, "remote_port": None}},
        {"kv_transfer_params": {"do_remote_prefill": True}},
    ]
    for number, change in enumerate(cases):
        changed = {"cache_salt": str(number), "kv_transfer_params": transfer} | BODIES[COMPLETIONS] | change
        prompt = changed["prompt"]
        assert send(decode, COMPLETIONS, changed).json()["choices"][0]["text"] == prompt[:20]
    assert handoffs(decode) == {"failed": len(cases)}
    taken = send(decode, COMPLETIONS, BODIES[COMPLETIONS] | {"kv_transfer_params": transfer})
    assert taken.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 80, "none of these took it away"


BAD_TRANSFERS: list[tuple[str, dict[str, Any]]] = [
    ("remote_host", {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 22}}),
    ("remote_host", {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1"}}),
    ("kv_transfer_params", {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}}),
    ("prompt", {"kv_transfer_params": {"do_remote_prefill": True}, "prompt": ["a", "b"]}),
    *(
        (field, {"kv_transfer_params": {"do_remote_prefill": True, field: value}})
        for field in ("remote_request_id", "remote_host", "adapter")
        for value in ("a\0b", "a/b", "\u00e4", "a\n", " ", "a" * 256)
    ),
]


def test_bad_transfers_are_refused(apart: tuple[Live, Live]) -> None:
    for param, fields in BAD_TRANSFERS:
        answer = send(apart[1], COMPLETIONS, BODIES[COMPLETIONS] | fields)
        assert answer.status_code == 400, (fields, answer.text)
        assert param in answer.json()["error"]["param"], fields


def test_a_prompt_for_another_daemon_is_no_stream(apart: tuple[Live, Live]) -> None:
    prefill, decode = apart
    assert send(prefill, COMPLETIONS, BODIES[COMPLETIONS] | DO_PREFILL | {"stream": True}).status_code == 400
    assert send(prefill, COMPLETIONS, {"prompt": "short"} | DO_PREFILL).json()["kv_transfer_params"] is None
    ignored = send(decode, COMPLETIONS, BODIES[COMPLETIONS] | DO_PREFILL)
    assert ignored.headers["x-quire-ignored-fields"] == "kv_transfer_params"
    assert ignored.json()["usage"]["completion_tokens"] == 20


def test_a_decode_daemon_asks_a_prefill_daemon_of_another_machine(
    apart: tuple[Live, Live], serve: Serve, tmp_path: Path
) -> None:
    prefill, _ = apart
    assert prefill.context.sender is not None
    peer = f"127.0.0.1:{prefill.context.sender.port}"
    decode = serve(role="decode", prefill_url=prefill.url, kv_connector_dir=tmp_path / "third", api_keys=("secret",),
                   kv_connector_peers=(peer,))  # fmt: skip
    assert ask(decode)["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert handoffs(decode) == {"received": 1}
