"""/v1/responses over HTTP: what a chat is made of, what its answer is told as, and the responses that are stored.

The parrot repeats the last message, so a test writes there what the model shall say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import openai
import pydantic
import pytest
from harness import CONFIG, END, Live, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_bad_input import error_of

from engine.core.types import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.choice import CallDelta, Choice, Delta, TextRules
from engine.text.reasoning import REASONING_TAGS
from engine.text.tools.json_calls import HERMES
from engine.text.types import CallArguments, CallBegin, Content
from server.answers.formatter import ChunkMeta
from server.openai.responses.body import ResponsesBody
from server.openai.responses.formatter import ResponsesFormatter
from server.protocol.documents import Usage

Serve = Callable[..., Live]
PATH = "/v1/responses"
LONG = replace(CONFIG, max_model_len=4096, num_blocks=1024)
# Templates of our own that speak as the families' documentation has it.
SAYS = (
    "{% if tools %}{% set a = '<tool_call>' %}{% endif %}{% set b = '</think>' %}{% if enable_thinking %}{% endif %}"
    "{{ messages[-1].content }}|"
)
SHOWS = "{% if tools %}{% set a = '<tool_call>' %}{% endif %}{{ messages | tojson }}{{ (tools or []) | tojson }}|"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[..., httpx.Client]]:
    """A client of a server with some template, one server a template."""
    clients: dict[str, httpx.Client] = {}
    with ExitStack() as stack:

        def client(template: str) -> httpx.Client:
            if template not in clients:
                live = stack.enter_context(Live(template=template, config=LONG).serving())
                clients[template] = stack.enter_context(httpx.Client(base_url=live.url))
            return clients[template]

        yield client


@pytest.fixture
def says(servers: Callable[..., httpx.Client]) -> httpx.Client:
    return servers(SAYS)


def create(http: httpx.Client, asked: Any, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, json={"input": asked, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(http: httpx.Client, text: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, after checking that each is named and numbered."""
    response = http.post(PATH, json={"input": text, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def order_of(events: list[dict[str, Any]]) -> list[str]:
    """Types of events in order, of runs of the same kind of delta one."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(types) if not (kind.endswith("delta") and types[i - 1] == kind)]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def seen(http: httpx.Client, **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages and tools that the template was given: the parrot says them."""
    answer = text_of(create(http, fields.pop("input"), **fields))
    messages, end = json.JSONDecoder().raw_decode(answer)
    return messages, json.loads(answer[end:])


def test_an_answer_has_every_field(http: httpx.Client) -> None:
    answer = create(http, "hello", instructions="Be brief. ", metadata={"a": "b"}, temperature=0.5, top_p=0.9)
    created, completed = answer.pop("created_at"), answer.pop("completed_at")
    assert 0 <= completed - created < 60
    assert answer.pop("id").startswith("resp_")
    [item] = answer.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Be brief. hello", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    cached = answer["usage"]["input_tokens_details"].pop("cached_tokens")
    assert cached in (0, 15)
    assert answer == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief. ",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "parrot",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.9,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 16,
            "input_tokens_details": {"cache_write_tokens": 0},
            "output_tokens": 16,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 32,
        },
    }


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
THOUGHTS = [name.replace("output_text", "reasoning_text") for name in TEXT]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
BEGUN, DONE = ["created", "in_progress"], ["output_item.done"]


def test_a_stream_of_text(http: httpx.Client) -> None:
    events = events_of(http, "hello")
    assert order_of(events) == [*BEGUN, *TEXT, *DONE, "completed"]
    created, in_progress, added, part_added, *deltas, done, part_done, item_done, completed = events
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    item = added["item"]
    assert item == {**item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert part_added["part"] == part
    at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    for event in (part_added, *deltas, done, part_done):
        assert {name: event[name] for name in at} == at
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == "hello"
    assert part_done["part"] == {**part, "text": "hello"}
    whole = {**item, "status": "completed", "content": [part_done["part"]]}
    assert item_done["item"] == whole
    assert completed["response"]["output"] == [whole]
    assert completed["response"]["usage"]["output_tokens"] == 6
    assert completed["response"]["id"] == created["response"]["id"]


def test_a_stream_of_thoughts_words_and_calls(says: httpx.Client) -> None:
    text = f"<think>Well.</think>I ask.{CALL}{CALL}"
    events = events_of(says, text, tools=[WEATHER])
    called = [*CALLED, *DONE]
    assert order_of(events) == [*BEGUN, *THOUGHTS, *DONE, *TEXT, *DONE, *called, *called, "completed"]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Well."}]
    assert output[0]["summary"] == []
    assert [item["arguments"] for item in output[2:]] == ['{"city": "Rome"}'] * 2
    assert len({item["call_id"] for item in output[2:]}) == 2
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    for index, item in enumerate(output):
        own = [event for event in events if event.get("item_id") == item["id"]]
        assert own
        assert {event["output_index"] for event in own} == {index}
    plain = create(says, text, tools=[WEATHER])["output"]
    for item in (*output, *plain):
        del item["id"]
        item.pop("call_id", None)
    assert plain == output


def test_words_behind_a_call_are_a_message_of_their_own(says: httpx.Client) -> None:
    events = events_of(says, f"{CALL}And now?", tools=[WEATHER])
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message"]
    assert text_of(events[-1]["response"]) == "And now?"
    whole = create(says, f"{CALL}And now?", tools=[WEATHER])
    assert [item["type"] for item in whole["output"]] == ["function_call", "message"]


def test_an_answer_that_says_nothing_is_an_empty_message(says: httpx.Client) -> None:
    events = events_of(says, "")
    assert order_of(events) == [*BEGUN, *[name for name in TEXT if "delta" not in name], *DONE, "completed"]
    assert text_of(create(says, "")) == ""


def test_an_answer_cut_short_is_incomplete(says: httpx.Client) -> None:
    answer = create(says, "hello", max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["completed_at"] is None
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    events = events_of(says, f"I ask.{CALL}", tools=[WEATHER], max_output_tokens=70)
    assert events[-1]["type"] == "response.incomplete"
    assert [item["status"] for item in events[-1]["response"]["output"]] == ["completed", "incomplete"]


def test_a_failure_within_a_stream_is_its_last_event(serve: Serve) -> None:
    live = serve(fail=lambda piece: "This prompt broke the model." if piece.start > 8 else None)
    with httpx.Client(base_url=live.url) as http:
        events = events_of(http, "hello")
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert "broke the model" in failed["error"]["message"]
        error_of(http.get(f"{PATH}/{failed['id']}"), 404)


def test_items_become_messages(servers: Callable[..., httpx.Client]) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "2", "name": "add", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "And 4."},
        {"role": "user", "content": "Thanks"},
    ]
    messages, tools = seen(servers(SHOWS), input=items, instructions="sys", tools=[WEATHER, ADD])
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": {}}},
    ]
    assert messages == [
        {"role": "system", "content": "sys"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I ask.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
        {"role": "tool", "content": "4", "tool_call_id": "2", "name": "add"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "And 4."},
        {"role": "user", "content": "Thanks"},
    ]
    functions = [{name: value for name, value in tool.items() if name != "type"} for tool in (WEATHER, ADD)]
    assert tools == [{"type": "function", "function": function} for function in functions]


def test_functions_of_namespaces_are_called_by_their_full_name(
    servers: Callable[..., httpx.Client], says: httpx.Client
) -> None:
    """Codex sends the tools of an MCP server so, and finds the one that is called by both names."""
    tools = [ADD, {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER, ADD]}]
    call = CALL.replace("weather", "mcp__sky__weather")
    answer = create(says, call, tools=tools)
    assert answer["tools"] == tools
    [item] = answer["output"]
    assert (item["namespace"], item["name"]) == ("mcp__sky", "weather")
    events = [event["item"] for event in events_of(says, call, tools=tools) if "item" in event]
    assert [(item["namespace"], item["name"]) for item in events] == 2 * [("mcp__sky", "weather")]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    turns = [{"role": "user", "content": "x"}, item, output]
    messages, shown = seen(servers(SHOWS), input=turns, tools=tools)
    names = ["add", "mcp__sky__weather", "mcp__sky__add"]
    assert [tool["function"]["name"] for tool in shown] == names
    assert messages[1]["tool_calls"][0]["function"]["name"] == messages[2]["name"] == names[1]
    assert text_of(create(says, [output], tools=tools, previous_response_id=answer["id"])) == "sunny"
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "mcp__sky__add"}]}
    assert [
        tool["function"]["name"] for tool in seen(servers(SHOWS), input="x", tools=tools, tool_choice=only)[1]
    ] == names[2:]
    hosted = {**tools[1], "tools": [{"type": "custom", "name": "a"}]}
    assert error_of(says.post(PATH, json={"input": "x", "tools": [hosted]}), 400)["param"] == "tools.0.tools.0.type"


def test_tool_choice(servers: Callable[..., httpx.Client], says: httpx.Client) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    _, tools = seen(servers(SHOWS), input="x", tools=[WEATHER, ADD], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert seen(servers(SHOWS), input="x", tools=[WEATHER], tool_choice="none")[1] == []
    one = create(says, CALL + CALL, tools=[WEATHER], parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]] == ["function_call"]
    for choice in (allowed, {"type": "function", "name": "weather"}, "none"):
        assert create(says, "x", tools=[WEATHER, ADD], tool_choice=choice, max_output_tokens=1)["tool_choice"] == choice


def test_a_conversation_goes_on_from_a_stored_response(servers: Callable[..., httpx.Client]) -> None:
    http = servers(SHOWS)
    first = create(http, "one", instructions="not carried over")
    second = create(http, "two", previous_response_id=first["id"], instructions="sys")
    assert second["previous_response_id"] == first["id"]
    messages, _ = json.JSONDecoder().raw_decode(text_of(second))
    said = {"role": "assistant", "content": text_of(first)}
    system, one, two = (
        {"role": role, "content": text} for role, text in (("system", "sys"), ("user", "one"), ("user", "two"))
    )
    assert messages == [system, one, said, two]
    counted = http.post(
        f"{PATH}/input_tokens", json={"input": "two", "previous_response_id": first["id"], "instructions": "sys"}
    )
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}


def test_calls_of_a_stored_response_are_answered(says: httpx.Client) -> None:
    first = create(says, CALL, tools=[WEATHER])
    [call] = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    assert text_of(create(says, [output], tools=[WEATHER], previous_response_id=first["id"])) == "sunny"
    refused = error_of(says.post(PATH, json={"input": [output]}), 400)
    assert refused["param"] == "input"
    assert "no function_call" in refused["message"]


def test_references_stand_for_stored_items(servers: Callable[..., httpx.Client]) -> None:
    """AI SDK sends the answers before as references, and OpenAI's API lets `type` be left out."""
    http = servers(SHOWS)
    first = create(http, "one")
    [said] = first["output"]
    [asked] = http.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    references = [{"type": "item_reference", "id": asked["id"]}, {"id": said["id"]}]
    whole = [{"role": "user", "content": "one"}, {"role": "assistant", "content": text_of(first)}]
    second = create(http, [*references, {"role": "user", "content": "two"}])
    messages, _ = json.JSONDecoder().raw_decode(text_of(second))
    assert messages == [*whole, {"role": "user", "content": "two"}]
    counted = http.post(f"{PATH}/input_tokens", json={"input": [*references, {"role": "user", "content": "two"}]})
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"]
    http.delete(f"{PATH}/{first['id']}")
    third = create(http, "three", previous_response_id=second["id"])  # it has the items themselves
    assert json.JSONDecoder().raw_decode(text_of(third))[0][:2] == whole
    assert create(http, [*references, {"role": "user", "content": "four"}])["status"] == "completed"
    for contents in (["old", "other"], ["new"]):  # a client's own ids, one of which it uses again
        create(http, [{"role": "user", "content": each, "id": f"msg_{place}"} for place, each in enumerate(contents)])
    both = create(http, [{"type": "item_reference", "id": name} for name in ("msg_0", "msg_1")])
    assert [each["content"] for each in json.JSONDecoder().raw_decode(text_of(both))[0]] == ["new", "other"]
    gone = error_of(http.post(PATH, json={"input": [{"type": "item_reference", "id": "msg_x"}]}), 404)
    assert (gone["code"], gone["param"]) == ("item_not_found", "input")
    assert "'msg_x'" in gone["message"]


def test_calls_are_answered_by_references(says: httpx.Client) -> None:
    [call] = create(says, CALL, tools=[WEATHER])["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    assert text_of(create(says, [{"type": "item_reference", "id": call["id"]}, output], tools=[WEATHER])) == "sunny"


def test_stored_responses_are_retrieved_listed_and_deleted(http: httpx.Client) -> None:
    answer = create(http, [{"role": "user", "content": text} for text in ("a", "b", "c")])
    at = f"{PATH}/{answer['id']}"
    assert http.get(at).json() == answer
    listed = http.get(f"{at}/input_items", params={"limit": 2}).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["c", "b"]
    assert listed["has_more"]
    assert (listed["first_id"], listed["last_id"]) == tuple(item["id"] for item in listed["data"])
    rest = http.get(f"{at}/input_items", params={"after": listed["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["a"]
    assert not rest["has_more"]
    in_order = http.get(f"{at}/input_items", params={"order": "asc"}).json()["data"]
    assert in_order[0]["content"] == [{"type": "input_text", "text": "a"}]
    assert http.delete(at).json() == {"id": answer["id"], "object": "response", "deleted": True}
    for missing in (http.get(at), http.delete(at), http.get(f"{at}/input_items")):
        assert error_of(missing, 404)["code"] == "response_not_found"
    gone = error_of(http.post(PATH, json={"input": "x", "previous_response_id": answer["id"]}), 404)
    assert (gone["code"], gone["param"]) == ("previous_response_not_found", "previous_response_id")
    assert answer["id"] in gone["message"]


def test_streamed_answers_are_stored_and_unwanted_ones_are_not(http: httpx.Client) -> None:
    completed = events_of(http, "hello")[-1]["response"]
    assert http.get(f"{PATH}/{completed['id']}").json() == completed
    unwanted = create(http, "hello", store=False)
    assert unwanted["store"] is False
    error_of(http.get(f"{PATH}/{unwanted['id']}"), 404)


def test_a_server_may_store_none(serve: Serve) -> None:
    with httpx.Client(base_url=serve(max_stored_responses=0).url) as http:
        answer = create(http, "hello")
        assert answer["store"] is False
        assert "--max-stored-responses" in error_of(http.get(f"{PATH}/{answer['id']}"), 404)["message"]
        assert error_of(http.post(PATH, json={"input": "x", "store": True}), 400)["param"] == "store"


def test_structured_answers(says: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    assert create(says, '{"a": 1}', text=text)["text"] == text
    bad = {"format": {"type": "json_schema", "name": "it", "schema": {"type": "nothing"}}}
    assert error_of(says.post(PATH, json={"input": "x", "text": bad}), 400)["param"] == "text.format"


def test_logprobs_are_of_the_text(http: httpx.Client) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = create(http, "hello", **fields)["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == list("hello")
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    events = events_of(http, "hello", **fields)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == part["logprobs"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


def test_fields_of_chat_mean_the_same(http: httpx.Client) -> None:
    assert create(http, "x", min_tokens=3, stop_token_ids=[5], max_output_tokens=4, top_k=1, seed=1)
    assert text_of(create(http, "hello", stop=["lo"])) == "hel"
    held = events_of(http, "hello", stop=["llx"], include=["message.output_text.logprobs"])
    for events in (events_of(http, "hello", stop=["lo"]), held):
        assert events[-1]["type"] == "response.completed"
    refused = error_of(http.post(PATH, json={"input": "x", "min_tokens": 5, "max_output_tokens": 4}), 400)
    assert refused["param"] == "min_tokens"
    told = http.post(PATH, json={"input": "x", "colour": "red", "text": {"size": 1}}).headers
    assert told["x-quire-ignored-fields"] == "colour, text.size"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": ["x"]}, "input.0", "invalid_value"),
        ({"input": [{"content": "x"}]}, "input.0", "invalid_value"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role", "invalid_value"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "invalid_type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input",
            "unsupported_parameter",
        ),
        ({"input": [{"type": "item_reference"}]}, "input.0", "invalid_value"),
        ({"input": [{"type": 5}]}, "input.0.type", "invalid_value"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input.0", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input", "invalid_value"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 600}, "max_output_tokens", "context_length_exceeded"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"system": "s"}, "system", "unsupported_parameter"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_json", "invalid_value"),
        ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "missing_required_parameter"),
        ({"tools": [ADD, ADD]}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"schema": {}}}}, "text.format.schema", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_required_parameter"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort", "invalid_value"),
        ({"include": [5]}, "include.0", "invalid_type"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(http.post(PATH, json={"input": "x", **fields}), 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert param.partition(".")[0] in error["message"]
    assert "max_tokens" not in error["message"].replace("max_tokens is not supported", ""), "it is max_output_tokens"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "before=x", "limits=3"])
def test_a_page_that_cannot_be(http: httpx.Client, query: str) -> None:
    answer = create(http, "x")
    assert error_of(http.get(f"{PATH}/{answer['id']}/input_items?{query}"), 400)["param"] == query.partition("=")[0]


@pytest.fixture
def sdk(says: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{says.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openais_client(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="parrot", input="hello", instructions="Be brief.")
    assert answer.output_text == "hello"
    assert answer.usage.output_tokens == 6
    again = sdk.responses.create(model="parrot", input="again", previous_response_id=answer.id)
    assert again.output_text == "again"
    assert sdk.responses.retrieve(answer.id).output_text == "hello"
    for fields in ({}, {"include": ["message.input_image.image_url"], "limit": 1, "order": "asc"}):
        assert [item.content[0].text for item in sdk.responses.input_items.list(answer.id, **fields)] == ["hello"]  # type: ignore[arg-type]
    assert sdk.responses.input_tokens.count(model="parrot", input="hello").input_tokens == 6
    sdk.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(answer.id)


def test_openais_client_puts_a_stream_together(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model="parrot", input=f"I ask.{CALL}", tools=[WEATHER]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "I ask."
    assert final.output[1].arguments == '{"city": "Rome"}'


class Point(pydantic.BaseModel):
    x: int


def test_openais_client_parses(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.parse(model="parrot", input='{"x": 4}', text_format=Point)
    assert answer.output_parsed == Point(x=4)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model="parrot", input="x", background=True)
    assert refused.value.param == "background"


READER = ChatFormat(tags=REASONING_TAGS["qwen3"]).parser_factory(HERMES, {"weather": {}}, begins_within=False)
SAID = f"<think>Well.</think>I ask.{CALL}\n{CALL}And now?".encode()


@given(cuts=st.sets(st.integers(1, len(SAID) - 1)))
def test_items_do_not_depend_on_how_many_tokens_came_at_once(cuts: set[int]) -> None:
    """Texts that may become a stop string come before the call that follows, log probabilities with their text alone."""
    tokenizer = byte_tokenizer()
    rules = TextRules(make_parser=READER, stops=("ask.?", "now?!"), ending_ids=frozenset({END}))
    choice = Choice(tokenizer, (), rules)
    meta = ChunkMeta(id_prefix="resp", model="m", tokenizer=tokenizer, prompts=[()], answer_id="1")
    body = ResponsesBody.model_validate({"input": "x", "include": ["message.output_text.logprobs"]})
    formatter = ResponsesFormatter(body, meta, SamplingParams(max_tokens=1))
    frames = b""
    for begin, end in pairwise([0, *sorted(cuts), len(SAID)]):
        reason = FinishReason.STOP if end == len(SAID) else None
        ids = (*SAID[begin:end], END) if reason else tuple(SAID[begin:end])
        logprobs = tuple(TokenLogprob(token_id, -1.0, 1, ()) for token_id in ids)
        choice.accept(TokenEvent("r", 0, token_ids=ids, logprobs=logprobs, finish_reason=reason))
        frames += formatter.news([(0, choice.take())], lambda: Usage.of(0, 0))
    frames += formatter.closing(Usage.of(0, 0), None)
    events = [json.loads(line.removeprefix(b"data: ")) for line in frames.splitlines() if line.startswith(b"data: ")]
    told: dict[str, str] = {}
    for event in events:
        if "delta" in event:
            told[event["item_id"]] = told.get(event["item_id"], "") + event["delta"]
    items = events[-1]["response"]["output"]
    texts = [item.get("arguments") or "".join(part["text"] for part in item.get("content", ())) for item in items]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert texts == ["Well.", "I ask.", '{"city": "Rome"}', '{"city": "Rome"}', "And now?"]
    assert list(told.values()) == texts
    parts = [part for item in items for part in item.get("content", ()) if part["type"] == "output_text"]
    shown = ["".join(each["token"] for each in part["logprobs"]) for part in parts]
    assert shown == ["I ask.", "}\n</tool_call>And now?"]  # a mark belongs to the text behind it


def test_pieces_stay_in_order_and_join_their_neighbours() -> None:
    delta = Delta(num_calls_before=1)
    for piece in (CallArguments('"'), CallArguments("}"), Content(" A"), Content("nd"), CallBegin("add"), Content("!")):
        delta.add(piece)
    assert delta.pieces == [CallArguments('"}'), Content(" And"), CallBegin("add"), Content("!")]
    assert delta.text == " And!"
    assert delta.calls == [CallDelta(0, None, '"}'), CallDelta(1, "add", "")]
