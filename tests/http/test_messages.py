"""/v1/messages over HTTP: what a chat is made of, what its answer and its errors are told as.

The parrot repeats the last message, so a test writes there what the model shall say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest
from harness import Live
from test_responses import CALL, SAYS, SHOWS, servers

Serve = Callable[..., Live]
PATH = "/v1/messages"
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SIGNATURE = "cXVpcmU="
ADD = {"name": "add", "input_schema": {"type": "object"}}

__all__ = ["servers"]  # a fixture


@pytest.fixture
def says(servers: Callable[..., httpx.Client]) -> httpx.Client:
    return servers(SAYS)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def send(http: httpx.Client, asked: Any, **fields: Any) -> httpx.Response:
    messages = asked if isinstance(asked, list) else [user(asked)]
    return http.post(PATH, json={"messages": messages, "max_tokens": 300, **fields})


def create(http: httpx.Client, asked: Any, **fields: Any) -> dict[str, Any]:
    response = send(http, asked, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(http: httpx.Client, asked: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, after checking that each is named."""
    response = send(http, asked, stream=True, **fields)
    assert response.status_code == 200, response.text
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, after checking that the envelope is whole."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4000
    envelope = response.json()
    assert envelope.keys() == {"type", "error", "request_id"}
    assert envelope["type"] == "error"
    assert envelope["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert envelope["error"].keys() == {"type", "message"}
    return envelope["error"]


def test_an_answer_has_every_field(http: httpx.Client) -> None:
    response = send(http, "hello", system="Be brief. ", metadata={"user_id": "me"})
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "x-quire-ignored-fields" not in response.headers
    answer = response.json()
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == usage["output_tokens"] == 16
    assert usage["cache_creation_input_tokens"] == 0
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "parrot",
        "content": [{"type": "text", "text": "Be brief. hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


def test_what_is_found_in_the_cache_is_counted_apart(http: httpx.Client) -> None:
    asked = "long enough for two blocks of the cache"
    create(http, asked)
    for usage in (create(http, asked)["usage"], events_of(http, asked)[-2]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(asked) + 1 - 32, 32)


def test_why_it_stops(says: httpx.Client) -> None:
    cut = create(says, "hello", max_tokens=3)
    assert (cut["stop_reason"], cut["content"]) == ("max_tokens", [{"type": "text", "text": "hel"}])
    stopped = create(says, "hello", stop_sequences=["x", "lo"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"][0]["text"] == "hel"
    *_, end, last = events_of(says, "hello", stop_sequences=["x", "lo"])
    assert (end["delta"], last) == ({"stop_reason": "stop_sequence", "stop_sequence": "lo"}, {"type": "message_stop"})
    assert create(says, "")["content"] == []


def test_a_stream_of_text(http: httpx.Client) -> None:
    start, ping, begin, *deltas, stop, end, last = events_of(http, "hello")
    message = start["message"]
    assert start["type"] == "message_start"
    assert (message["content"], message["stop_reason"], message["usage"]["input_tokens"]) == ([], None, 6)
    assert ping == {"type": "ping"}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(delta["type"], delta["index"], delta["delta"]["type"]) for delta in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(delta["delta"]["text"] for delta in deltas) == "hello"
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 6
    assert last == {"type": "message_stop"}


def test_a_stream_of_thoughts_words_and_uses(says: httpx.Client) -> None:
    asked = f"<think>Well.</think>I ask.{CALL}{CALL}"
    events = events_of(says, asked, tools=[WEATHER])
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    begun = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in begun] == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["index"] for event in begun] == [0, 1, 2, 3]
    signed = events.index(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": SIGNATURE}}
    )
    assert events[signed + 1] == {"type": "content_block_stop", "index": 0}
    names = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    names["signature_delta"] = "signature"
    told = ["", "", "", ""]
    open_block = None
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        assert event["index"] == open_block
        if event["type"] == "content_block_delta":
            told[open_block] += event["delta"][names[event["delta"]["type"]]]
        if event["type"] == "content_block_stop":
            open_block = None
    assert open_block is None
    assert told == [f"Well.{SIGNATURE}", "I ask.", '{"city": "Rome"}', '{"city": "Rome"}']
    content = create(says, asked, tools=[WEATHER])["content"]
    assert content[0] == {"type": "thinking", "thinking": "Well.", "signature": SIGNATURE}
    assert content[1] == {"type": "text", "text": "I ask."}
    assert [(use["name"], use["input"]) for use in content[2:]] == [("weather", {"city": "Rome"})] * 2
    assert all(use["id"].startswith("toolu_") for use in content[2:])


def test_input_that_is_no_object_is_told_as_it_came(says: httpx.Client) -> None:
    cut = create(says, CALL, tools=[WEATHER], max_tokens=len(CALL) - 20)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["input"] in ({"city": "R"}, {"city": "Rome"}, {})
    broken = create(says, CALL.replace('"city":', '"city" ::'), tools=[WEATHER])["content"][0]
    assert "Rome" in broken["input"]["invalid_json"]


def seen(http: httpx.Client, messages: list[Any], **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and tools that the template was given: the parrot says them."""
    answer = create(http, messages, **{"max_tokens": 2000, **fields})["content"][0]["text"]
    shown, end = json.JSONDecoder().raw_decode(answer)
    return shown, json.loads(answer[end:])


def test_blocks_become_messages(servers: Callable[..., httpx.Client]) -> None:
    uses = [
        {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "2", "name": "add", "input": {}},
    ]
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "no such thing", "is_error": True},
        {"type": "text", "text": "Go on"},
    ]
    messages = [
        user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]),
        {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "I ask."}, *uses]},
        user(results),
    ]
    system = [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]
    shown, tools = seen(servers(SHOWS), messages, system=system, tools=[WEATHER, ADD])
    calls = [
        {"id": use["id"], "type": "function", "function": {"name": use["name"], "arguments": use["input"]}}
        for use in uses
    ]
    assert shown == [
        {"role": "system", "content": "s1\ns2"},
        user("a\nb"),
        {"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
        {"role": "tool", "content": "Error: no such thing", "tool_call_id": "2", "name": "add"},
        user("Go on"),
    ]
    weather = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert tools == [
        {"type": "function", "function": weather},
        {"type": "function", "function": {"name": "add", "parameters": ADD["input_schema"]}},
    ]


def test_deferred_tools_are_known_once_a_result_refers_to_them(
    servers: Callable[..., httpx.Client], says: httpx.Client
) -> None:
    """The prompt's beginning stays as it is, so that it is found in the cache."""
    deferred = {**WEATHER, "defer_loading": True}
    _, [alone] = seen(servers(SHOWS), [user("x")], tools=[ADD, deferred])
    assert alone["function"]["name"] == "add"
    reference = {"type": "tool_reference", "tool_name": "weather"}
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "Found:"}, reference]}
    turns = [user("x"), {"role": "assistant", "content": [use]}, user([result])]
    shown, tools = seen(servers(SHOWS), turns, tools=[ADD, deferred])
    assert tools == [alone]
    definition = json.loads(shown[-1]["content"].split("<function>")[1].split("</function>")[0])
    assert definition["parameters"] == WEATHER["input_schema"]
    called = create(says, [*turns, user(CALL)], tools=[ADD, deferred])
    assert called["content"][0]["name"] == "weather"
    _, both = seen(servers(SHOWS), [user("x")], tools=[ADD, deferred, {"type": "tool_search_tool_regex_20251119"}])
    assert [tool["function"]["name"] for tool in both] == ["add", "weather"], "nothing here would find it"
    assert "'weather' that is not in tools" in error_of(send(says, turns, tools=[ADD]), 400)["message"]
    assert "no place in a message" in error_of(send(says, [user([reference])], tools=[ADD]), 400)["message"]


def test_tool_choice(servers: Callable[..., httpx.Client], says: httpx.Client) -> None:
    assert seen(servers(SHOWS), [user("x")], tools=[WEATHER], tool_choice={"type": "none"})[1] == []
    one = create(says, CALL + CALL, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["tool_use"]


def test_a_last_message_of_the_assistants_is_gone_on_with(servers: Callable[..., httpx.Client]) -> None:
    http = servers("{{ messages[-1].content }}")
    messages = [user("x"), {"role": "assistant", "content": "so far|"}]
    assert create(http, messages)["content"] == [{"type": "text", "text": "so far"}]


def test_thinking_is_bounded_where_the_model_has_thoughts(says: httpx.Client, http: httpx.Client) -> None:
    assert create(http, "x", thinking={"type": "disabled"})["content"][0]["text"] == "x"
    dropped = send(http, "x", thinking={"type": "enabled", "budget_tokens": 10}, output_config={"effort": "high"})
    assert dropped.headers["x-quire-ignored-fields"] == "thinking, output_config.effort"
    assert create(says, "x", thinking={"type": "adaptive"})["content"][0]["text"] == "x"


def test_what_is_for_billing_does_not_reach_the_model(servers: Callable[..., httpx.Client]) -> None:
    """It differs between sessions, which then would share no prefix."""
    text = {"type": "text", "text": "Be brief."}
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.8a5; cch=1;"}, text]
    with_it = seen(servers(SHOWS), [user("x")], system=system)
    assert with_it == seen(servers(SHOWS), [user("x")], system=[text])


@pytest.mark.parametrize("keep", ["all", {"type": "thinking_turns", "value": 0}])
def test_edits_of_the_context_are_hints(http: httpx.Client, keep: Any) -> None:
    """Claude Code sends one that keeps all; nothing is taken away by others, either, and the header says so."""
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    response = send(http, "x", context_management={"edits": [edit]})
    assert response.status_code == 200, response.text
    assert response.headers["x-quire-ignored-fields"] == "context_management"


def test_what_coding_agents_send(says: httpx.Client, serve: Serve) -> None:
    """`?beta=true`, hosted tools beside their own, hints, and names of models that are not served."""
    fields = {"max_tokens": 300, "tools": [ADD, {"type": "web_search_20250305", "name": "web_search"}]}
    hints = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "speed": "fast"}
    body = {"messages": [user(CALL)], **fields, **hints, "context_management": {"edits": []}}
    response = says.post(f"{PATH}?beta=true", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["stop_reason"] == "tool_use"
    dropped = set(response.headers["x-quire-ignored-fields"].split(", "))
    assert dropped == {"tools.web_search_20250305", "speed", "context_management"}, "this model takes an effort"
    assert says.post(f"{PATH}/count_tokens?beta=true", json=body).status_code == 200

    live = serve(model_aliases=("claude-*",))
    with httpx.Client(base_url=live.url) as http:
        answer = create(http, "x", model="claude-haiku-4-5-20251001")
        assert answer["model"] == "claude-haiku-4-5-20251001"
        assert "gpt-9" in error_of(send(http, "x", model="gpt-9"), 404)["message"]
        listed = [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert listed == ["parrot", "bird"]
        assert http.get("/v1/models/claude-opus-5").json()["id"] == "claude-opus-5"


def test_structured_answers(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert create(http, '{"a": 1}', output_config=config)["content"][0]["text"] == '{"a": 1}'
    bad = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    assert "output_config.format" in error_of(send(http, "x", output_config=bad), 400)["message"]
    assert create(http, '{"a": 1}', output_format=config["format"])["content"][0]["text"] == '{"a": 1}'
    assert "Invalid type: nothing" in error_of(send(http, "x", output_format=bad["format"]), 400)["message"]
    assert "only one" in error_of(send(http, "x", output_format=config["format"], output_config=config), 400)["message"]


def test_counting_is_what_is_counted(says: httpx.Client) -> None:
    fields = {"messages": [user("hello")], "system": "s", "tools": [WEATHER]}
    counted = says.post(f"{PATH}/count_tokens", json=fields).json()
    usage = create(says, fields.pop("messages"), **fields)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user([IMAGE])]}, "takes text alone"),
        ({"messages": [user([{"type": "text"}])]}, "needs text"),
        ({"messages": [user([{"type": "tool_use", "id": "1", "name": "a", "input": {}}])]}, "no place in a message"),
        ({"messages": [user([{"type": "tool_result", "tool_use_id": "1"}])]}, "no tool_use with that id"),
        ({"messages": [user("x" * 600)]}, "prompt is too long: 601 tokens > 512 maximum"),
        ({"messages": [user("x" * 9000)]}, "prompt is too long: "),
        (
            {"max_tokens": 600},
            "input length and `max_tokens` exceed context limit: 2 + 600 > 512, decrease input length or `max_tokens`",
        ),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        (
            {
                "messages": [
                    user("x"),
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]},
                ]
            },
            "tool_result",
        ),
        ({"system": [IMAGE]}, "system has a block that is not text"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ["x"]}, "send stop_sequences"),
        ({"instructions": "x"}, "send system"),
        ({"parallel_tool_calls": False}, "disable_parallel_tool_use"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [ADD, ADD]}, "two functions with the name 'add'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice names 'b'"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"compaction": {"type": "summarize"}}, "ask for a summary in messages"),
        ({"guided_regex": "x("}, "guided_regex"),
    ],
)
def test_what_cannot_be_is_a_400_that_says_so(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    response = http.post(PATH, json={"messages": [user("x")], "max_tokens": 10, **fields})
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_errors_of_every_layer_have_anthropics_shape(serve: Serve) -> None:
    live = serve(api_keys=("right",), max_body_bytes=1000)
    with httpx.Client(base_url=live.url) as http:
        assert error_of(send(http, "x"), 401)["type"] == "authentication_error"
        http.headers["x-api-key"] = "wrong"
        assert error_of(send(http, "x"), 401)["type"] == "authentication_error"
        http.headers["x-api-key"] = "right"
        assert send(http, "x").status_code == 200
        assert error_of(send(http, "x" * 1000), 413)["type"] == "request_too_large"
        assert error_of(send(http, "x", model="claude"), 404)["type"] == "not_found_error"
        assert error_of(http.get(PATH), 405)["type"] == "invalid_request_error"
        assert error_of(http.get(f"{PATH}/nothing"), 404)["type"] == "not_found_error"
        assert "param" in http.post("/v1/completions", json={}).json()["error"], "others keep OpenAI's shape"
        assert http.get("/v1/messages_of_others").json()["error"].keys() > {"param"}


def test_models_in_anthropics_shape(serve: Serve) -> None:
    live = serve(served_model_names=("a", "b", "c/d"))
    client = anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["a", "b", "c/d"]
    assert [model.id for model in client.models.list(limit=2)] == ["a", "b", "c/d"], "one page has all"
    model = client.models.retrieve("c/d")
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("c/d", "model", "c/d", 512)
    assert model.created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.models.retrieve("e")
    with httpx.Client(base_url=live.url) as http:
        page = http.get("/v1/models").json()
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "a", "c/d")
        asked = {"anthropic-version": "2023-06-01"}
        assert http.get("/v1/models", headers=asked).json() == page, "one shape for every client"


def test_what_is_no_error_of_ours_is_passed_on(serve: Serve) -> None:
    live = serve(allowed_origins=("https://good.example",))
    asked = {"origin": "https://good.example", "access-control-request-method": "PUT"}
    refused = httpx.options(live.url + PATH, headers=asked)
    assert (refused.status_code, refused.text) == (400, "Disallowed CORS method")
    assert httpx.head(live.url + PATH).status_code == 405


def test_a_failure_within_a_stream_is_its_last_event(serve: Serve) -> None:
    live = serve(fail=lambda piece: "This prompt broke the model." if piece.start > 8 else None)
    with httpx.Client(base_url=live.url) as http:
        last = events_of(http, "hello")[-1]
        assert last["type"] == "error"
        assert last["error"]["type"] == "api_error"
        assert "broke the model" in last["error"]["message"]


@pytest.fixture
def sdk(says: httpx.Client) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(says.base_url), api_key="any", max_retries=0) as client:
        yield client


def test_anthropics_client(sdk: anthropic.Anthropic) -> None:
    asked = {"model": "parrot", "max_tokens": 300, "messages": [user(f"<think>Well.</think>I ask.{CALL}")]}
    message = sdk.messages.create(**asked, tools=[WEATHER])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"city": "Rome"}
    assert message.stop_reason == "tool_use"
    assert message._request_id
    with sdk.messages.stream(**asked, tools=[WEATHER]) as stream:
        assert "".join(stream.text_stream) == "I ask."
        final = stream.get_final_message()
    assert [block.model_dump(include={"type", "text", "thinking", "input"}) for block in final.content] == [
        block.model_dump(include={"type", "text", "thinking", "input"}) for block in message.content
    ]
    assert final.usage.output_tokens == message.usage.output_tokens
    results = [{"type": "tool_result", "tool_use_id": message.content[2].id, "content": "sunny"}]
    turns = [*asked["messages"], message.to_param(), user(results)]
    assert sdk.messages.create(**{**asked, "messages": turns}, tools=[WEATHER]).content[0].text == "sunny"
    assert sdk.messages.count_tokens(model="parrot", messages=[user("hello")]).input_tokens == 6


def test_anthropics_client_runs_tools(sdk: anthropic.Anthropic) -> None:
    """It has the server keep the conversation unless an error's code says that the server cannot."""
    asked: Any = {"model": "parrot", "max_tokens": 300, "messages": [user(f"I ask.{CALL}")]}

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    runner = sdk.beta.messages.tool_runner(**asked, tools=[weather])
    assert runner.until_done().content[0].text == "sunny in Rome"
    with pytest.raises(anthropic.BadRequestError, match="send the whole conversation") as refused:
        sdk.beta.messages.create(**asked, thread={"type": "create"})
    assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_anthropics_clients_errors(sdk: anthropic.Anthropic, serve: Serve) -> None:
    with pytest.raises(anthropic.BadRequestError, match="takes text alone"):
        sdk.messages.create(model="parrot", max_tokens=5, messages=[user([IMAGE])])
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(model="claude", max_tokens=5, messages=[user("x")])
    live = serve(fail=lambda piece: "This prompt broke the model." if piece.start > 8 else None)
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        stream = client.messages.create(model="parrot", max_tokens=50, messages=[user("hello")], stream=True)
        with pytest.raises(anthropic.APIStatusError, match="broke the model"):
            list(stream)
