"""Why the prefix cache gave a prompt no more: each cause in words, to the tenant of the earlier prompt alone, and counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import CONFIG, Live, eventually
from test_requests import listed

from engine.adapters import Adapters

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
CHAT = "/v1/chat/completions"
SYSTEM = "You help. It is 12:02. Be brief, and kind."
QUESTION = "What is the longest river of all in Europe?"
STATES = replace(CONFIG, state_blocks=2, num_blocks=64)

Ask = Callable[..., dict[str, Any]]


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * 9]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def ask(live: Live, *contents: str, key: str = "", **fields: Any) -> dict[str, Any]:
    """The fields `prefix` of a conversation's requests: a system message, questions and answers; `said` is its answer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=live.url, headers=headers) as http:
        answer = http.post(CHAT, json={"messages": turns(*contents), "max_tokens": 20, **fields})
        assert answer.status_code == 200, answer.text
        told = http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()["prefix"]
    return {**told, "said": answer.json()["choices"][0]["message"]["content"], "id": answer.headers["x-request-id"]}


def num_tokens(*contents: str) -> int:
    """The tokens of a conversation, up to the answer."""
    return sum(len(f"[{turn['role']}] {turn['content']}") + 1 for turn in turns(*contents)) + len("[assistant] ")


def counted(live: Live) -> dict[str, float]:
    found = {}
    for line in httpx.get(f"{live.url}/metrics").text.splitlines():
        if line.startswith("quire_prefix_ends_total{"):
            found[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return found


def test_a_conversation_says_where_it_leaves_the_one_before(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE)
    refused = {"messages": turns(SYSTEM, QUESTION), "max_tokens": CONFIG.max_model_len}
    assert httpx.post(live.url + CHAT, json=refused).status_code == 400  # and the prompt is not remembered
    first = ask(live, SYSTEM, QUESTION)
    assert (first["cause"], first["message"]) == ("new", "Nothing earlier goes on like this prompt after token 0.")
    told = ask(live, SYSTEM, QUESTION, first["said"][:8] + "!", "And the second?")
    assert told["message"] == (
        f"The prompt leaves your earlier request {first['id'][:8]} in its answer, at token {num_tokens(SYSTEM, QUESTION) + 8}: "
        f"`{first['said'][:8]}![user]` for `{first['said'][:-1]}`."
    )
    again = ask(live, SYSTEM, QUESTION, first["said"], "And the second?")
    assert (again["cause"], again["position"]) == (
        "extended",
        num_tokens(SYSTEM, QUESTION) + 19,
    )  # the last is computed now
    broken = ask(live, SYSTEM.replace("02", "03"), QUESTION, first["said"], "And the second?")
    place = len("[system] You help. It is 12:0")
    assert (broken["cause"], broken["position"], broken["reusable_tokens"]) == ("broken", place, place // 16 * 16)
    assert broken["message"] == (
        f"The prefix broke at token {place} of your earlier request {again['id'][:8]}: `12:03.` for `12:02.`, in the system "
        "message."
    )
    ask(live, SYSTEM.replace("02", "03"), QUESTION, first["said"], "And the second?", broken["said"], "And the third?")
    assert httpx.get(f"{live.url}/v1/requests/{broken['id']}").json()["prefix"]["message"] == broken["message"]
    [shown] = [entry for entry in listed(live) if entry["id"] == broken["id"][:8]]
    assert shown["prefix"]["message"] == f"{broken['message'].split(':')[0]}."  # the list has no text
    assert counted(live) == {"new": 1, "extended": 2, "answer": 1, "broken": 1}


def test_a_prompt_that_is_no_conversation_says_where_it_leaves_the_one_before(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE)

    def complete(prompt: str | list[str] | list[int]) -> dict[str, Any] | None:
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": prompt, "max_tokens": 20})
        name = answer.headers["x-request-id"]
        told: dict[str, Any] | None = httpx.get(f"{live.url}/v1/requests/{name}").json()["prefix"]
        return told and {**told, "said": answer.json()["choices"][0]["text"], "id": name}

    refused = {"prompt": SYSTEM + QUESTION, "max_tokens": CONFIG.max_model_len}
    assert httpx.post(f"{live.url}/v1/completions", json=refused).status_code == 400  # and the prompt is not remembered
    first = complete(SYSTEM + QUESTION)
    assert first is not None
    assert first["cause"] == "new"
    left = complete(SYSTEM + QUESTION + first["said"][:4] + "!")
    assert left is not None
    assert (left["cause"], left["position"]) == ("answer", len(SYSTEM + QUESTION) + 4)
    rest = f"{QUESTION}{first['said']} And the second?"
    more = complete(list(map(ord, SYSTEM + rest)))
    assert more is not None
    assert (more["cause"], more["position"]) == ("extended", len(SYSTEM + QUESTION) + 19)
    broken = complete(SYSTEM.replace("02", "03") + rest)
    assert broken is not None
    assert broken["message"].endswith(": `12:03.` for `12:02.`.")
    assert complete([SYSTEM, QUESTION]) is None  # two prompts, of which none is the request's
    assert counted(live) == {"new": 1, "extended": 1, "answer": 1, "broken": 1}
    ask(live, SYSTEM, QUESTION, add_special_tokens=True)
    again = ask(live, SYSTEM, QUESTION, add_special_tokens=True)
    assert (again["cause"], again["position"]) == ("answer", num_tokens(SYSTEM, QUESTION))


def test_what_was_evicted_or_has_no_snapshot(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE, config=replace(CONFIG, num_blocks=14, max_model_len=224))
    first = ask(live, SYSTEM, QUESTION)
    for letter in "xy":
        ask(live, letter * 150)
    evicted = ask(live, SYSTEM, QUESTION)
    common = num_tokens(SYSTEM, QUESTION)
    assert (evicted["cause"], evicted["reusable_tokens"]) == ("evicted", common // 16 * 16)
    tag = f"your earlier request {first['id'][:8]}"
    assert evicted["message"] == f"Evicted after position 0: {tag} has {common} tokens in common."
    live = serve(template=TEMPLATE, config=STATES)
    ask(live, SYSTEM, QUESTION)
    left = ask(live, SYSTEM, QUESTION[:-9] + "Africa?")
    matched = (common - len("Europe?<end>[assistant] ") + 4) // 16 * 16
    assert (left["cause"], left["position"]) == ("no_state", 0)
    assert left["message"].startswith(
        f"No snapshot after position 0, though the K/V of {matched} tokens is there: your "
    )
    assert ask(live, SYSTEM, QUESTION[:-9] + "Asia?")["cause"] == "new"  # the branch has a snapshot now


def test_what_keeps_prompts_apart(serve: Callable[..., Live], tmp_path: Path) -> None:
    adapters = Adapters(read_adapter, 1)
    (tmp_path / "shift").write_text("1")
    adapters.load("shift", str(tmp_path / "shift"))
    live = serve(template=TEMPLATE, runner=AdaptableParrot, adapters=adapters)
    ask(live, SYSTEM, QUESTION)
    for cause, words, fields in (
        ("other_salt", "Kept apart by cache_salt", {"cache_salt": "s"}),
        ("other_adapter", "Kept apart by the adapter", {"model": "shift"}),
        ("unread", "Not looked for", {"prompt_logprobs": 0}),
    ):
        told = ask(live, SYSTEM, QUESTION, **fields)
        assert (told["cause"], told["message"].startswith(words)) == (cause, True)
    assert ask(live, "")["cause"] == "new"
    live = serve(template="{{ messages[0].content }}")
    assert ask(live, "short")["cause"] == "short"


def test_a_prompt_waits_for_one_that_begins_alike(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE, config=replace(CONFIG, max_num_batched_tokens=16))
    live.gate.close()
    told: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: told.append(ask(live, SYSTEM, QUESTION))) for _ in range(2)]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        eventually(lambda number=number: live.context.client.num_open == number)
    live.gate.open()
    for thread in threads:
        thread.join()
    assert sorted(each["cause"] for each in told) == ["extended", "new"]


def test_a_prompt_that_was_cut_short(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE, config=replace(CONFIG, max_num_batched_tokens=16))
    live.gate.close()
    with closing(HTTPConnection("127.0.0.1", httpx.URL(live.url).port)) as line:
        body = json.dumps({"messages": turns(SYSTEM, QUESTION)})
        line.request("POST", CHAT, body, {"content-type": "application/json"})
        eventually(lambda: live.context.client.num_open == 1)
    eventually(lambda: live.context.client.num_open == 0)
    live.gate.open()
    assert ask(live, SYSTEM, QUESTION)["cause"] == "unfinished"


def test_a_prompt_that_was_forgotten(serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.chat.history.MAX_PROMPTS", 1)
    live = serve(template=TEMPLATE)
    broken = SYSTEM.replace("02", "03")
    ask(live, SYSTEM, QUESTION, "a", "b")
    name = ask(live, broken, QUESTION, "a", "b")["id"]
    ask(live, "Another")
    assert ask(live, SYSTEM, QUESTION, "a", "b")["cause"] == "forgotten"
    told = httpx.get(f"{live.url}/v1/requests/{name}").json()["prefix"]
    assert told["message"].endswith(": `12:03.` for `12:02.`.")  # but not in which message, whose prompt is gone


def test_no_tenant_is_told_of_another_s_prompt(serve: Callable[..., Live], tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants:\n  - {name: ann, key: ann}\n  - {name: bob, key: bob}\n")
    live = serve(template=TEMPLATE, tenants=tenants, api_keys=("plain",))
    for key, user in (("ann", ""), ("bob", ""), ("plain", "x"), ("plain", "y")):
        told = ask(live, SYSTEM, QUESTION + key + user, key=key, user=user)
        assert told["cause"] == ("forgotten" if user == "y" else "new")  # `user` keeps no K/V apart, but all words
        assert told["reusable_tokens"] == 0
        mine = ask(live, SYSTEM.replace("02", "03"), QUESTION + key + user, key=key, user=user)
        assert mine["cause"] == ("forgotten" if user == "y" else "broken")
    assert {"12:02", "12:03"} & set(str(listed(live, "plain")).split()) == set()


def test_it_is_off_with_the_history(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE, history_cache=0)
    with httpx.Client(base_url=live.url) as http:
        answer = http.post(CHAT, json={"messages": turns(SYSTEM), "max_tokens": 2})
        assert http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()["prefix"] is None
    assert counted(live) == {}
