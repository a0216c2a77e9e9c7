"""A chat template that does too much, over HTTP: its request ends with a 400, and others go on meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Live
from test_bad_input import error_of

from engine.core.errors import ConfigError
from engine.text import chat_template
from engine.text.chat_template import read_template
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{% for m in messages %}{% if m.content == 'go' %}" + ENDLESS + "{% endif %}{{ m.content }}|{% endfor %}"


def say(text: str, times: int = 1) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}] * times


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_a_template_without_end_is_a_400(serve: Callable[..., Live], path: str) -> None:
    live = serve(template=BOMB)
    with httpx.Client(base_url=live.url) as http:
        fields: dict[str, Any] = {"input": "go"} if path == "/v1/responses" else {"messages": say("go")}
        answer = http.post(path, json={"max_tokens": 4, **fields} if path != "/v1/responses" else fields)
        assert answer.status_code == 400
        assert "too much time or memory" in answer.text
        assert "--chat-template" in answer.text
        assert http.post(CHAT, json={"messages": say("hi"), "max_tokens": 4}).status_code == 200


def test_a_client_cannot_bring_a_template(http: httpx.Client) -> None:
    for path in (CHAT, "/tokenize"):
        error = error_of(http.post(path, json={"messages": say("hi"), "chat_template": BOMB}), 400)
        assert error["param"] == "chat_template"


def test_a_long_conversation_is_rendered_beside_the_event_loop(
    live: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = live.context.tokenizer.chat_template
    assert template is not None
    begin, wait, threads = template.begin, template._ask_child, []

    def observed(*args: Any, **kwargs: Any) -> str | Callable[[], str]:
        threads.append(threading.current_thread().name)
        return begin(*args, **kwargs)

    def waiting(question: str) -> str:
        threads.append(threading.current_thread().name)
        return wait(question)

    monkeypatch.setattr(template, "begin", observed)
    monkeypatch.setattr(template, "_ask_child", waiting)
    monkeypatch.setattr(chat_template, "MAX_INPUT", 1000)
    for messages in (say("hi"), say("h", 60)):
        http.post("/tokenize", json={"messages": messages})
    here, *beside = threads
    assert [name.rpartition("_")[0] for name in beside] == ["quire-slow", "quire-rendering"]
    assert here not in beside


def test_others_are_served_while_a_template_works_without_end(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_HERE_S", -1.0)
    live = serve(template=BOMB)
    template = live.context.tokenizer.chat_template
    assert template is not None
    template.render(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs={},
    )
    pid = template._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it takes as long as the test likes
    with httpx.Client(base_url=live.url) as http, ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(
            httpx.post, live.url + CHAT, json={"messages": say("hi"), "max_tokens": 4}, timeout=PATIENCE_S
        )
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a|", "max_tokens": 4}).status_code == 200
        assert not stuck.done()
        os.kill(pid, signal.SIGCONT)
        assert stuck.result(PATIENCE_S).status_code == 200


def test_a_template_file_is_a_small_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        read_template("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_template(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "none"))
    (tmp_path / "big").write_text("x" * 10_000_000)
    with pytest.raises(ConfigError, match="more than"):
        read_template(str(tmp_path / "big"))
