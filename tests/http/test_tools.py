"""Tools and reasoning over HTTP: what goes into the prompt, and what a client gets of what the model writes.

The parrot repeats the last message, so a test writes there what the model shall say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from harness import CONFIG, Live, byte_tokenizer
from test_completions import stream

from engine.core.errors import ConfigError
from engine.core.types import FinishReason, PromptInfo
from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.choice import Delta
from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.json_calls import FORCED
from engine.text.tools.section_calls import KIMI_K2
from engine.text.types import CallArguments, CallBegin, Content, Reasoning
from server.answers.body import ChatBody
from server.answers.formatter import ChunkMeta
from server.openai.chat import ChatFormatter
from server.protocol.documents import Usage

PATH = "/v1/chat/completions"
SAYS = "{{ messages[-1].content }}|"
# Templates of our own that speak as the families' documentation has it.
HERMES = "{% if tools %}{% set a = '<tool_call>' %}{% endif %}" + SAYS
THINKING = "{% if tools %}{% set a = '<tool_call>' %}{% endif %}{% set b = '</think>' %}" + SAYS
OPENED = "{% set b = '</think>' %}" + SAYS + "{{ '<think>' if enable_thinking }}"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = {"tools": [WEATHER, ADD]}


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[..., httpx.Client]]:
    """A client of a server with some template, one server a template and settings."""
    clients: dict[str, httpx.Client] = {}
    with ExitStack() as stack:

        def client(**options: Any) -> httpx.Client:
            key = repr(options)
            if key not in clients:
                live = stack.enter_context(Live(**options).serving())
                clients[key] = stack.enter_context(httpx.Client(base_url=live.url))
            return clients[key]

        yield client


@pytest.fixture
def hermes(servers: Callable[..., httpx.Client]) -> httpx.Client:
    return servers(template=HERMES)


def choice_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_call_is_taken_out_of_the_text(hermes: httpx.Client) -> None:
    choice = choice_of(hermes.post(PATH, json=say(CALL, **TOOLS)))
    [call] = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def test_arguments_without_end_stay_the_text_they_are(hermes: httpx.Client) -> None:
    call = {"function": {"name": "weather", "arguments": "[" * 5000}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "so?"}]
    assert choice_of(hermes.post(PATH, json={"messages": messages}))["message"]["content"] == "so?"


def test_words_and_two_calls(hermes: httpx.Client) -> None:
    text = f"Let me see.\n{CALL}\n" + CALL.replace("Rome", "Oslo")
    choice = choice_of(hermes.post(PATH, json=say(text, **TOOLS, logprobs=True)))
    assert choice["message"]["content"] == "Let me see."
    arguments = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert arguments == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    assert len(choice["logprobs"]["content"]) == len(text) + 1  # of every token, and the end's


def test_a_streamed_call_begins_with_its_name(hermes: httpx.Client) -> None:
    chunks = stream(hermes, PATH, **say(CALL + CALL.replace("Rome", "Oslo"), **TOOLS))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    parts = [part for delta in deltas[1:] for part in delta.get("tool_calls", [])]
    for index, city in enumerate(("Rome", "Oslo")):
        own = [part for part in parts if part["index"] == index]
        assert (own[0]["type"], own[0]["function"]["name"]) == ("function", "weather")
        assert all(part.keys() == {"index", "function"} for part in own[1:])
        assert all(part["function"].keys() == {"arguments"} for part in own[1:])
        assert json.loads("".join(part["function"]["arguments"] for part in own)) == {"city": city}
    assert len(parts) > 4, "the arguments came in one piece"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)


def test_a_chunk_has_thoughts_or_text_or_calls() -> None:
    """Also of a delta with all of them, as a client that reads slowly gets it."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]})
    tokenizer = byte_tokenizer()
    meta = ChunkMeta(id_prefix="chatcmpl", model="parrot", tokenizer=tokenizer, prompts=[[1]], answer_id="1")
    formatter = ChatFormatter(body, meta)
    pieces = [Reasoning("Hm."), Content("I ask."), CallBegin("weather"), CallArguments("{}")]
    whole = Delta(pieces, finish_reason=FinishReason.STOP, prompt=PromptInfo(0, None), has_called=True)
    for delta in (whole, replace(whole, prompt=None)):
        frames = formatter.news([(0, delta)], lambda: Usage.of(1, 4)).decode().split("\n\n")[:-1]
        choices = [json.loads(each.removeprefix("data: "))["choices"][0] for each in frames]
        assert [choice["finish_reason"] for choice in choices][-2:] == [None, "tool_calls"]
        kinds = [set(choice["delta"]) for choice in choices[-3:]]
        assert kinds == [{"reasoning", "reasoning_content"}, {"content"}, {"tool_calls"}]


def test_openais_client_puts_a_streamed_call_together(hermes: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{hermes.base_url}/v1", api_key="any", max_retries=0) as client:
        asked = say(f"I ask.{CALL}{CALL}", **TOOLS)
        with client.chat.completions.stream(model="parrot", **asked) as events:
            message = events.get_final_completion().choices[0].message
    assert message.content == "I ask."
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Rome"}'] * 2


def test_one_call_is_enough_without_parallel_calls(hermes: httpx.Client) -> None:
    choice = choice_of(hermes.post(PATH, json=say(CALL * 3, **TOOLS, parallel_tool_calls=False)))
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_none_neither_shows_tools_nor_finds_calls(hermes: httpx.Client) -> None:
    choice = choice_of(hermes.post(PATH, json=say(CALL, **TOOLS, tool_choice="none")))
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert choice_of(hermes.post(PATH, json=say(CALL)))["message"]["content"] == CALL


def test_a_call_cut_short_is_of_length_and_a_broken_one_content(hermes: httpx.Client) -> None:
    choice = choice_of(hermes.post(PATH, json=say(CALL, **TOOLS, max_tokens=57)))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'
    broken = "<tool_call>weather(Rome)</tool_call>"
    choice = choice_of(hermes.post(PATH, json=say(broken, **TOOLS)))
    assert (choice["message"]["content"], choice["finish_reason"]) == (broken, "stop")


def test_stop_strings_are_looked_for_in_content_alone(hermes: httpx.Client) -> None:
    choice = choice_of(hermes.post(PATH, json=say(f"Rom.{CALL} Rome", **TOOLS, stop=["Rome"])))
    assert choice["message"]["content"] == "Rom. "
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


def test_turns_with_calls_reach_the_template_as_objects(servers: Callable[..., httpx.Client]) -> None:
    template = (
        "{{ tools | map(attribute='function.name') | join('+') }};"
        "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
        "{{ call.id }}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}"
        "{% else %}{{ message.role }}{{ message.tool_call_id }}{{ message.content }}{% endif %};{% endfor %}"
        "{{ '<tool_call>' if false }}|"
    )
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    choice = choice_of(servers(template=template).post(PATH, json={"messages": messages, **TOOLS}))
    assert choice["message"]["content"] == "weather+add;userhi;c1weatherRome;toolc1sun;toolrain;"


def test_a_template_without_tools_is_told_of_them_in_words(servers: Callable[..., httpx.Client]) -> None:
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    called = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "tool_calls": [called, called]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]
    client = servers(template=template, config=replace(CONFIG, max_model_len=2048))
    asked = {"messages": messages, **TOOLS, "return_token_ids": True, "max_tokens": 1}
    response = client.post(PATH, json={**asked, "tools": [ADD]})
    assert response.status_code == 200, response.text
    prompt = bytes(response.json()["prompt_token_ids"]).decode()
    assert prompt.startswith("[system]Be brief.\n\nYou can call these functions")
    assert json.dumps(ADD["function"]) in prompt
    assert prompt.endswith(
        f"[assistant]{CALL}\n{CALL}[user]<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    )
    plain = client.post("/tokenize", json={"messages": messages[:1]}).json()
    assert bytes(plain["tokens"]) == b"[system]Be brief."
    told = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}], "tools": [ADD]}).json()
    assert bytes(told["tokens"]).decode().startswith("[system]You can call")


def test_calls_in_an_unknown_way_are_refused_or_stay_text(servers: Callable[..., httpx.Client]) -> None:
    template = "{% if tools %}{% endif %}" + SAYS
    error = servers(template=template).post(PATH, json=say(CALL, **TOOLS)).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]
    choice = choice_of(servers(template=template, tool_call_parser="none").post(PATH, json=say(CALL, **TOOLS)))
    assert choice["message"]["content"] == CALL
    named = servers(template=template, tool_call_parser="mistral")
    [call] = choice_of(named.post(PATH, json=say('[TOOL_CALLS]add{"a": 1}', **TOOLS)))["message"]["tool_calls"]
    assert (len(call["id"]), call["function"]["arguments"]) == (9, '{"a": 1}')


def test_reasoning_is_told_apart(servers: Callable[..., httpx.Client]) -> None:
    client = servers(template=THINKING)
    text = f"<think>\nHm, {CALL}\n</think>\n\nYes."
    response = client.post(PATH, json=say(text, tools=[WEATHER], stop=["Hm"]))
    message = choice_of(response)["message"]
    assert message["reasoning_content"] == message["reasoning"] == f"Hm, {CALL}"
    assert message["content"] == "Yes."
    assert "tool_calls" not in message
    usage = response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": text.index("\n\nYes")}
    message = choice_of(client.post(PATH, json=say(text, include_reasoning=False)))["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    message = choice_of(client.post(PATH, json=say(text, max_tokens=20)))["message"]
    assert (message["content"], message["reasoning"]) == (None, "Hm, <tool_ca")


def test_reasoning_streams(servers: Callable[..., httpx.Client]) -> None:
    chunks = stream(servers(template=THINKING), PATH, **say(f"<think>Hm.</think>Yes.{CALL}", tools=[WEATHER]))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert any("tool_calls" in delta for delta in deltas)


def test_a_template_that_opens_the_thoughts(servers: Callable[..., httpx.Client]) -> None:
    client = servers(template=OPENED)
    unsaid = "<think>"  # the parrot leaves out as much as stands behind the bar
    for effort, kwargs, reasoning, content in (
        ("none", {}, None, "1234567a</think>b"),
        ("high", {}, "a", "b"),
        ("high", {"enable_thinking": False}, None, "1234567a</think>b"),
        (None, {"enable_thinking": True}, "a", "b"),
    ):
        assert len(unsaid) == 7
        asked = say("1234567a</think>b", reasoning_effort=effort, chat_template_kwargs=kwargs)
        message = choice_of(client.post(PATH, json=asked))["message"]
        assert (message.get("reasoning"), message["content"]) == (reasoning, content)


def test_thinking_is_switched_by_a_field_too(servers: Callable[..., httpx.Client]) -> None:
    """As Alibaba's API has it; what says more goes before it."""
    client = servers(template=OPENED, default_chat_template_kwargs={"enable_thinking": False})
    for fields, reasons in (
        ({}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"enable_thinking": False, "reasoning_effort": "high"}, True),
        ({"enable_thinking": False}, False),
    ):
        asked = say("1234567a</think>b", **fields)
        answer = client.post(PATH, json=asked)
        assert "x-quire-ignored-fields" not in answer.headers
        counted = client.post("/tokenize", json={name: asked[name] for name in ("messages", *fields)})
        assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]
        assert "x-quire-ignored-fields" not in counted.headers
        assert ("reasoning" in choice_of(answer)["message"]) is reasons, fields
    for odd in ("no", 0):
        assert client.post(PATH, json=say("x", enable_thinking=odd)).json()["error"]["param"] == "enable_thinking"


def test_strict_tools_have_schemas_that_can_be_enforced(servers: Callable[..., httpx.Client]) -> None:
    """With tool_choice auto too; what the parrot says is not constrained by anything."""
    strict = {**WEATHER["function"], "strict": True}
    cannot = {**strict, "parameters": {"properties": {"tags": {"type": "array", "uniqueItems": True}}}}
    for template in (HERMES, HERMES.replace("<tool_call>", "[TOOL_CALLS]")):
        client = servers(template=template)
        for function, fields, status in (
            (strict, {}, 200),
            (strict, {"parallel_tool_calls": False}, 200),
            (cannot, {}, 400),
            (cannot, {"tool_choice": "none"}, 200),
            ({**cannot, "strict": False}, {}, 200),
            ({**cannot, "strict": None, "name": "x"}, {"tool_choice": "required"}, 200),
        ):
            tools = [{"type": "function", "function": function}, ADD]
            response = client.post(PATH, json=say("hello", tools=tools, **fields))
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == "tools"
                assert "uniqueItems" in response.json()["error"]["message"]


def test_calls_in_xml(servers: Callable[..., httpx.Client]) -> None:
    client = servers(template=HERMES.replace("<tool_call>", "<tool_call><function="))
    text = "So.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    choice = choice_of(client.post(PATH, json=say(text, **TOOLS)))
    assert choice["message"]["content"] == "So."
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    chunks = stream(client, PATH, **say(text, **TOOLS))
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "Rome"}'
    tools = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
    assert client.post(PATH, json=say(text, tools=tools)).status_code == 200


def test_a_template_with_channels() -> None:
    """The parrot cannot write their marks, for it stops at a bar."""
    tokenizer = byte_tokenizer("{% if tools %}{% endif %}<|start|>assistant<|channel|>x<|message|>")
    text = '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}'
    chat_format = ChatFormat.of(tokenizer)
    make = chat_format.parser_factory(chat_format.tool_format, {"add": {}}, begins_within=False)
    assert make is not None
    reader = make()
    assert reader.push(text) + reader.finish() == [Reasoning("Hm."), CallBegin("add"), CallArguments('{"a": 1}')]
    make = ChatFormat.of(tokenizer, tool_call_parser="none").parser_factory(None, {}, begins_within=False)
    assert make is not None
    assert {type(piece) for piece in make().push(text)} == {Reasoning}
    forced = chat_format.parser_factory(FORCED, {"add": {}}, begins_within=False)
    assert forced is not None
    assert forced().push('[{"name": "add", "arguments": {}}]') == [CallBegin("add"), CallArguments("{}")]
    with pytest.raises(ConfigError, match="--reasoning-parser is none"):
        ChatFormat.of(tokenizer, reasoning_parser="none")
    with pytest.raises(ConfigError, match="has no channels"):
        ChatFormat.of(byte_tokenizer(HERMES), tool_call_parser="harmony")


def test_the_ids_that_a_model_gives_its_calls_reach_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kimi's do, with marks that the parrot can write. Anthropic's ids have another alphabet."""
    marks = {"openings": ("<calls>",), "section_end": "</calls>", "call": ("<call>", "</call>"), "inner": ("<with>",)}
    header = KIMI_K2.header.replace(r"<\|tool_call_argument_begin\|>", "<with>")
    monkeypatch.setitem(TOOL_FORMATS, "kimi_bare", replace(KIMI_K2, header=header, **marks))
    text = '<calls><call>functions.add:3<with>{"a": 1}</call></calls>'
    template = "{% if tools %}{% endif %}" + SAYS
    with (
        Live(template=template, tool_call_parser="kimi_bare").serving() as live,
        httpx.Client(base_url=live.url) as client,
    ):
        [call] = choice_of(client.post(PATH, json=say(text, **TOOLS)))["message"]["tool_calls"]
        assert (call["id"], call["function"]["arguments"]) == ("functions.add:3", '{"a": 1}')
        deltas = [chunk["choices"][0]["delta"] for chunk in stream(client, PATH, **say(text, **TOOLS))]
        ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
        assert ids == ["functions.add:3"]
        tools = [{"type": "function", "name": "add"}]
        output = client.post("/v1/responses", json={"input": text, "tools": tools}).json()["output"]
        assert [item["call_id"] for item in output] == ["functions.add:3"]
        asked = {**say(text), "tools": [{"name": "add", "input_schema": {"type": "object"}}], "max_tokens": 100}
        [block] = client.post("/v1/messages", json=asked).json()["content"]
        assert block["id"].startswith("toolu_")
