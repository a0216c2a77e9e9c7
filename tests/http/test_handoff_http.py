"""A router between a prefill and a decode daemon: answers are what one daemon alone says, whatever happens between the two."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import Live

from engine.adapters import Adapters
from engine.core.kv.tiers import Tiers
from engine.handle import ReceivePrefix
from engine.runtime.stores.folder import KnownPart
from server.answers import handoff
from tests.patience import PATIENCE_S

TEXT = "The quick brown fox jumps over the lazy dog, again and again, until it is tired of it"  # 85 tokens, 5 blocks

Serve = Callable[..., Live]
Post = Callable[..., dict[str, Any]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": TEXT + "|", "max_tokens": 20, "logprobs": 1},
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 20, "logprobs": True},
}
DO_PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None}}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runner computes a prompt in no time, and so would wait for no other daemon."""
    monkeypatch.setattr(handoff, "LEAST_PATIENCE_S", PATIENCE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "parcels"


@pytest.fixture
def pair(serve: Serve, folder: Path) -> tuple[Live, Live]:
    """Two daemons that have a folder in common."""
    both = {"kv_connector_dir": folder, "api_keys": ("secret",)}
    return serve(role="prefill", **both), serve(role="decode", **both)


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


def offer(prefill: Live, key: str = "secret", **fields: Any) -> dict[str, Any]:
    """What a router has of the prefill daemon, for the decode daemon."""
    answer = send(prefill, COMPLETIONS, BODIES[COMPLETIONS] | fields | DO_PREFILL, key)
    assert answer.status_code == 200, answer.text
    return {"kv_transfer_params": answer.json()["kv_transfer_params"]}


def ask(pair: tuple[Live, Live], key: str = "secret", **fields: Any) -> dict[str, Any]:
    """The answer of both, as a router asks them."""
    answer = send(pair[1], COMPLETIONS, BODIES[COMPLETIONS] | fields | offer(pair[0], key, **fields), key)
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
    alone = post(COMPLETIONS, prompt=TEXT + "|", max_tokens=20, logprobs=1, n=2)
    both = ask(pair, n=2)
    assert both["choices"] == alone["choices"]
    assert both["choices"][0]["text"] == TEXT[:20]
    assert both["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert prefill.engine.stats.prompt_tokens == 86
    assert handoffs(decode) == {"received": 1}
    assert not list(folder.iterdir())


def test_streams_go_the_same_way(pair: tuple[Live, Live]) -> None:
    prefill, decode = pair
    body = BODIES[COMPLETIONS] | {"max_tokens": 9} | offer(prefill) | {"stream": True}
    with httpx.stream(
        "POST", f"{decode.url}{COMPLETIONS}", json=body, headers={"authorization": "Bearer secret"}
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"]) == TEXT[:9]
    assert handoffs(decode) == {"received": 1}


def test_prompts_of_adapters_go_the_same_way_where_both_daemons_have_them(
    serve: Serve, folder: Path, tmp_path: Path
) -> None:
    """Told apart from the model's own, and from others of the same name, by their content."""
    paths = [tmp_path / name for name in ("one", "two")]
    for distance, path in enumerate(paths, start=1):
        path.write_text(str(distance))
    adapters = [Adapters(read_adapter, 2) for _ in range(2)]
    for each, other in zip(adapters, paths, strict=True):
        each.load("same", str(paths[0]))
        each.load("other", str(other))
    fakes = {"runner": AdaptableParrot, "kv_connector_dir": folder, "api_keys": ("secret",)}
    prefill = serve(role="prefill", adapters=adapters[0], **fakes)
    decode = serve(role="decode", adapters=adapters[1], **fakes)
    shifted = "".join(chr(ord(letter) + 1) for letter in TEXT[:20])
    assert ask((prefill, decode), model="same")["choices"][0]["text"] == shifted
    assert handoffs(decode) == {"received": 1}
    assert ask((prefill, decode))["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"received": 2}, "an adapter's K/V is not the model's own"
    assert ask((prefill, decode), model="other")["choices"][0]["text"] != shifted
    assert handoffs(decode) == {"received": 2, "failed": 1}, "the prefill daemon's of that name is another"


def test_prompts_without_a_whole_block_and_scores_are_computed_where_they_are_asked_for(
    pair: tuple[Live, Live],
) -> None:
    prefill, decode = pair
    assert offer(prefill, prompt="Hello|") == {"kv_transfer_params": None}
    assert ask(pair, prompt="Hello|")["choices"][0]["text"] == "Hello"
    ask(pair, echo=True, max_tokens=0)
    assert handoffs(decode) == {}


def test_a_daemon_that_fails_is_not_asked_again_and_again(
    pair: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder cannot be read: that costs no answer, and is logged once."""
    _, decode = pair
    decode.require_thread()
    now, look = 0.0, Mock(side_effect=PermissionError(13, "Permission denied"))
    pauses = handoff.Pauses(lambda: now)
    decode.context.receiver._pauses["shared memory"] = pauses
    with monkeypatch.context() as patch:
        patch.setattr(KnownPart, "look", look)
        for index in range(4):
            assert ask(pair, cache_salt=f"fails{index}")["choices"][0]["text"] == TEXT[:20]
        assert look.call_count == 1
        now = 1.0
        for index in range(4):
            ask(pair, cache_salt=f"probed{index}")
        assert look.call_count == 2, "one probe"
    now = 2.0
    ask(pair, cache_salt="early")
    now = 3.0
    for index in range(2):
        ask(pair, cache_salt=f"well{index}")
    assert handoffs(decode) == {"failed": 9, "received": 2}
    told = [record.getMessage() for record in caplog.records if "computed here" in record.getMessage()]
    assert len(told) == 1


def test_a_request_waits_no_longer_than_computing_its_prompt_takes(
    pair: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits no longer than its deadline, and makes no other request wait."""
    _, decode = pair
    decode.require_thread()
    is_slow = True
    control = decode.context.receiver._engine.control

    def begun(command: Any) -> Any:
        return Future() if is_slow and isinstance(command, ReceivePrefix) else control(command)

    monkeypatch.setattr(decode.context.receiver, "_engine", Mock(wraps=decode.context.receiver._engine, control=begun))
    with monkeypatch.context() as patch:
        patch.setattr(handoff.Receiver, "_limit_s", lambda *_: 0.05)
        assert ask(pair, cache_salt="hurried")["choices"][0]["text"] == TEXT[:20]
    is_slow = False
    ask(pair, cache_salt="calm")
    assert handoffs(decode) == {"failed": 1, "received": 1}
    is_slow = True
    monkeypatch.setattr(handoff, "LEAST_PATIENCE_S", 0.0)
    monkeypatch.setattr(Tiers, "compute_s", lambda *_: 0.05)
    assert ask(pair, cache_salt="slow")["choices"][0]["text"] == TEXT[:20]
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


def test_tenants_share_nothing_on_either_daemon(serve: Serve, folder: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants: [{name: ann, key: ann-key}, {name: bob, key: bob-key}]")
    both = {"kv_connector_dir": folder, "api_keys": ("secret",), "tenants": tenants}
    prefill, decode = serve(role="prefill", **both), serve(role="decode", **both)
    for key in ("ann-key", "bob-key"):
        ask((prefill, decode), key)
    assert handoffs(decode) == {"received": 2}
    assert not prefill.engine.stats.prefix_hit_tokens
    stolen = BODIES[COMPLETIONS] | {"cache_salt": "new"} | offer(prefill, "ann-key", cache_salt="new")
    assert send(decode, COMPLETIONS, stolen, "bob-key").json()["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"received": 2, "failed": 1}


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
    assert ask(pair)["choices"][0]["text"] == TEXT[:20]
    assert handoffs(decode) == {"failed": 1}


# -- over TCP ------------------------------------------------------------------------------------------------------------


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
        for field in ("remote_request_id", "remote_host")
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
