"""An answer that a client sends back has the tokens it was generated in, through every API, and is another tenant's to none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from harness import CONFIG, Live

from engine.adapters import Adapters

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# The parrot says letters in the order of the alphabet, one by one, and the tokenizer joins any two of them.
PAIRS = {pair: 200 + index for index, pair in enumerate(map("".join, itertools.pairwise(ascii_lowercase)))}
QUESTION = {"role": "user", "content": "Q" * 40}
CHAT = "/v1/chat/completions"


@pytest.fixture
def live(serve: Callable[..., Live], tmp_path: Path) -> Live:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants:\n  - {name: ann, key: ann}\n  - {name: bob, key: bob}\n")
    adapters = Adapters(read_adapter, 1)
    (tmp_path / "shift").write_text("1")
    adapters.load("shift", str(tmp_path / "shift"))
    return serve(template=TEMPLATE, pairs=PAIRS, tenants=tenants, runner=AdaptableParrot, adapters=adapters)


def post(live: Live, path: str, key: str = "ann", **fields: Any) -> dict[str, Any]:
    response = httpx.post(live.url + path, json=fields, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return response.json()


def reply(live: Live, said: str, **fields: Any) -> list[int]:
    """The prompt in which an answer comes back."""
    messages = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "R"}]
    made = post(live, CHAT, messages=messages, max_tokens=1, return_token_ids=True, **fields)
    return made["prompt_token_ids"]


def test_an_answer_comes_back_in_its_tokens_and_to_its_tenant_and_model_alone(live: Live) -> None:
    made = post(live, CHAT, messages=[QUESTION], max_tokens=16, return_token_ids=True)
    [choice] = made["choices"]
    said, whole = choice["message"]["content"], made["prompt_token_ids"] + choice["token_ids"]
    assert reply(live, said)[: len(whole)] == whole
    for other in ({"key": "bob"}, {"cache_salt": "s"}, {"model": "shift"}):
        assert reply(live, said, **other)[: len(whole)] != whole
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{live.url}/metrics").text.splitlines() if line[0] != "#")
    counts = [lines[f'quire_history_answers{kind}_total{{model_name="parrot"}}'] for kind in ("", "_used")]
    assert counts == ["4.0", "1.0"]


def test_every_api_finds_the_answers_of_every_other(live: Live) -> None:
    """48 tokens are whole blocks with the answer's own tokens; the question alone is 32."""
    turns = {"messages": [QUESTION], "max_tokens": 16}
    chat = post(live, CHAT, **turns)["choices"][0]["message"]
    message = post(live, "/v1/messages", **turns)["content"][0]["text"]
    response = post(live, "/v1/responses", input=[QUESTION], max_output_tokens=16)
    said = response["output"][0]["content"][0]["text"]
    assert chat["content"] == message == said
    again = {"messages": [QUESTION, chat, {"role": "user", "content": "R"}], "max_tokens": 1}
    assert post(live, CHAT, **again)["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    usage = post(live, "/v1/messages", **again)["usage"]
    assert usage["cache_read_input_tokens"] >= 48
    counted = post(live, "/v1/messages/count_tokens", messages=again["messages"])["input_tokens"]
    assert counted == usage["cache_read_input_tokens"] + usage["input_tokens"]
    follow = {"input": [{"role": "user", "content": "R"}], "previous_response_id": response["id"]}
    details = post(live, "/v1/responses", max_output_tokens=1, **follow)["usage"]["input_tokens_details"]
    assert details["cached_tokens"] >= 48


@pytest.mark.parametrize("off", [{"history_cache": 0}, {"config": replace(CONFIG, enable_prefix_caching=False)}])
def test_it_can_be_off(serve: Callable[..., Live], off: dict[str, Any]) -> None:
    live = serve(template=TEMPLATE, pairs=PAIRS, **off)
    said = post(live, CHAT, messages=[QUESTION], max_tokens=16)["choices"][0]["message"]["content"]
    assert reply(live, said)[45] == PAIRS[said[:2]]
    assert "quire_history" not in httpx.get(f"{live.url}/metrics").text
