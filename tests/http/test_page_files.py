"""The page's files and the endpoint behind its live view, as plain HTTP. tests/browser/ looks at them in a browser."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Live, eventually

import server
from engine.core.config import SchedulerConfig
from engine.handle import TakeSnapshot
from server.telemetry.live import MIN_AGE_S

Serve = Callable[..., Live]
FOLDER = Path(server.__file__).parent / "page"
KINDS = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
SERVED = (path for path in FOLDER.rglob("*") if path.suffix[1:] in KINDS and path.name != "index.html")
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in SERVED)
VENDORED = ("dompurify/", "highlight/", "katex/", "markdown-it/")


def look(live: Live, query: str = "", **headers: str) -> dict[str, Any]:
    response = httpx.get(live.url + "/v1/engine/live" + query, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


# -- files -------------------------------------------------------------------------------------------------------------


def test_every_file_is_served_open_typed_and_under_a_strict_policy(serve: Serve) -> None:
    url = serve(api_keys=("k",)).url
    for path, name in [("/", "index.html"), *((f"/page/{name}", name) for name in FILES)]:
        response = httpx.get(url + path)
        assert response.status_code == 200, path
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"].startswith(KINDS[name.rpartition(".")[2]])
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert policy.endswith("require-trusted-types-for 'script'; trusted-types dompurify")
        head = httpx.head(url + path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", response.headers["etag"])
        again = httpx.get(url + path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_the_page_names_only_files_that_are_there_and_no_other_host() -> None:
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', (FOLDER / "index.html").read_text()))
    ours = [name for name in FILES if not name.startswith(VENDORED)]
    for name in ours:
        text = (FOLDER / name).read_text()
        named |= set(re.findall(r'(?:from "|import "|import\(")\./([^"]+)"', text)) | set(
            re.findall(r'href: "page/([^"]+)"', text)
        )
        assert "//" not in re.sub(r"//www\.w3\.org/2000/svg|(?m:(^|\s)// .*$)", "", text), f"{name} names an address"
        assert "innerHTML" not in text, f"{name} could make markup of what a model says"
        assert ("purify" in text) == (name == "sanitised.js"), "one module makes nodes of markup"
    sheet = (FOLDER / "katex" / "katex.min.css").read_text()
    named |= {"katex/" + name for name in re.findall(r"url\((fonts/[^)]+\.woff2)\)", sheet)}
    assert named == set(FILES), "a file is missing, or nobody uses it"
    assert all((FOLDER / folder / "LICENSE").stat().st_size > 1000 for folder in VENDORED)


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/index.html", "/page/../page/app.js", "/page/%2e%2e/live.py"]
)
def test_nothing_else_of_the_file_system_is_served(live: Live, path: str) -> None:
    with closing(http.client.HTTPConnection(live.url.removeprefix("http://"))) as connection:
        connection.request("GET", path)  # as spelled, where httpx would resolve the dots
        assert connection.getresponse().status == 404


def test_no_page_turns_the_page_and_its_endpoint_off(serve: Serve) -> None:
    url = serve(page=False).url
    assert [httpx.get(url + path).status_code for path in ("/", "/page/app.js", "/v1/engine/live")] == [404] * 3
    guarded = serve(page=False, api_keys=("k",)).url
    assert httpx.get(guarded + "/").status_code == 401, "nothing is open that is not there"


# -- the live view -----------------------------------------------------------------------------------------------------


def test_the_live_view_asks_for_the_key(serve: Serve) -> None:
    live = serve(api_keys=("k",))
    assert httpx.get(live.url + "/v1/engine/live").status_code == 401
    assert look(live, authorization="Bearer k")["object"] == "engine.live"


def test_what_runs_and_waits_is_shown_with_its_blocks_and_no_text(serve: Serve) -> None:
    config = SchedulerConfig(
        num_blocks=64, block_size=16, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=256
    )
    live = serve(config=config, step_s=0.1)
    body = {"prompt": ["secret " * 5, "secret " * 5 + "two", "third"], "max_tokens": 400, "stream": True}
    with httpx.stream("POST", live.url + "/v1/completions", json=body) as response:
        chunks = response.iter_lines()
        first = next(chunks)
        seen = look(live)
        while not all(each["num_tokens"] > each["num_prompt"] for each in seen["sequences"][:2]):
            time.sleep(MIN_AGE_S)
            seen = look(live)
    assert seen["requests"] == {"running": 2, "waiting": 1, "preempted": 0}
    assert [each["status"] for each in seen["sequences"]] == ["running", "running", "waiting"]
    assert [each["num_blocks"] > 0 for each in seen["sequences"]] == [True, True, False]
    assert seen["blocks"]["held"] + seen["blocks"]["cached"] + seen["blocks"]["free"] == 64 == seen["num_blocks"]
    runs = seen["cells"]["runs"]
    assert sum(n for n, *_ in runs) == 64
    assert [sum(n * run[i] for n, *run in runs) for i in (0, 2)] == [
        seen["blocks"][name] for name in ("held", "cached")
    ]
    running, _, waiting = seen["sequences"]
    assert running["arrival_s"] <= running["first_scheduled_s"] <= running["first_token_s"] <= seen["time_s"]
    assert (waiting["first_scheduled_s"], waiting["first_token_s"]) == (None, None)
    assert "secret" not in str(seen)
    [tag] = {each["tag"] for each in seen["sequences"]}
    assert f'"id":"cmpl-{tag}' in first, "who asked finds his own"
    assert len(tag) == 8, "and nobody learns the whole of another's"
    eventually(lambda: look(live)["blocks"]["held"] == 0)


def test_an_ended_sequence_is_reported_with_its_last_token(serve: Serve) -> None:
    live = serve()
    body = {"prompt": ["hello|", "and you|"], "n": 2, "max_tokens": 40}
    answered = httpx.post(live.url + "/v1/completions", json=body).json()
    eventually(lambda: len(look(live)["ended"]) == 4)
    seen = look(live)
    ends = seen["ended"]
    assert {each["tag"] for each in ends} == {answered["id"].removeprefix("cmpl-")[:8]}
    assert [(each["prompt"], each["choice"], each["num_tokens"]) for each in ends] == [
        ("0", 0, 12), ("0", 1, 12), ("1", 0, 16), ("1", 1, 16),
    ]  # fmt: skip
    assert sum(each["num_tokens"] for each in ends) - 2 * 6 - 2 * 8 == answered["usage"]["completion_tokens"]
    assert {each["finish_reason"] for each in ends} == {"stop"}
    assert look(live, f"?since={seen['time_s']}")["ended"] == []


def test_many_who_look_at_once_cost_one_look(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.telemetry.live, "MIN_AGE_S", 60.0)
    live = serve()
    looks = []
    ask = live.engine.control
    monkeypatch.setattr(live.engine, "control", lambda command: (looks.append(command), ask(command))[1])
    assert [look(live)["object"] for _ in range(5)] == ["engine.live"] * 5
    assert looks == [TakeSnapshot()]


def test_an_engine_that_does_not_come_round_to_it_is_a_503(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.telemetry.live, "PATIENCE_S", 0.05)
    live = serve()
    live.gate.close()
    with httpx.stream("POST", live.url + "/v1/completions", json={"prompt": "hello|", "stream": True}) as response:
        eventually(lambda: live.engine.health().busy)
        refused = httpx.get(live.url + "/v1/engine/live")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_busy")
        live.gate.open()
        response.read()
    time.sleep(MIN_AGE_S)
    monkeypatch.undo()
    assert look(live)["totals"]["finished"] == 1
