"""A chat template that does too much, over HTTP: its request ends with a 400, and others go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Live
from test_bad_input import error_of

from engine.core.errors import ConfigError
from server.serve import _read_template

CHAT = "/v1/chat/completions"
LOOPS = (
    "{% if messages[0].content == 'go' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[-1].content }}|"
)


def say(text: str, times: int = 1) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}] * times


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_a_template_without_end_is_a_400(serve: Callable[..., Live], path: str) -> None:
    live = serve(template=LOOPS)
    with httpx.Client(base_url=live.url) as http:
        fields: dict[str, Any] = {"input": "go"} if path == "/v1/responses" else {"messages": say("go")}
        for _ in range(2):
            answer = http.post(path, json={"max_tokens": 4, **fields} if path != "/v1/responses" else fields)
            assert answer.status_code == 400
            assert "too many steps" in answer.text
            assert "--chat-template" in answer.text
        assert http.post(CHAT, json={"messages": say("hi"), "max_tokens": 4}).status_code == 200


def test_a_client_cannot_bring_a_template(http: httpx.Client) -> None:
    for path in (CHAT, "/tokenize"):
        error = error_of(http.post(path, json={"messages": say("hi"), "chat_template": LOOPS}), 400)
        assert error["param"] == "chat_template"


def test_a_long_conversation_is_rendered_beside_the_event_loop(
    live: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = live.context.tokenizer.chat_template
    assert template is not None
    render, threads = template.render, []

    def observed(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*args, **kwargs)

    monkeypatch.setattr(template, "render", observed)
    for messages in (say("hi"), say("h", 60)):
        http.post("/tokenize", json={"messages": messages})
    assert len(threads) == 2
    assert threads[0] not in threads[1:]


def test_a_template_file_is_a_small_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        _read_template("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        _read_template(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        _read_template(str(tmp_path / "none"))
    (tmp_path / "big").write_text("x" * 10_000_000)
    with pytest.raises(ConfigError, match="more than"):
        _read_template(str(tmp_path / "big"))
