"""Large bodies: read in a child process, within bounds, to the same answers and the same errors as small ones."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fastapi.routing import APIRoute
from harness import Live, eventually

from loadtest.__main__ import main
from loadtest.hostile import cases, family_bytes
from server.anthropic.blocks import CacheControl
from server.app import routers
from server.http import bodies as bodies_module
from server.http.bodies import FREE_BYTES, INLINE_BYTES, BodyReader
from server.http.middleware import CALLER
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi|"}]
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
# Bodies of every JSON route, right and wrong.
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "hello|", "max_tokens": 9, "temperature": 0, "unheard_of": 1}),
    (COMPLETIONS, {"prompt": [104, 105, 124] * 40, "max_tokens": 4, "temperature": 0}),
    (COMPLETIONS, {"prompt": [[104, 124], [105, 124]], "max_tokens": 4, "logit_bias": {"5": 1, "6": -1.5}}),
    (COMPLETIONS, {"prompt": [1.5]}),
    (COMPLETIONS, {"prompt": [999] * 50}),
    (COMPLETIONS, {"prompt": "x|", "max_tokens": "5", "seed": {}}),
    (COMPLETIONS, {"prompt": "x|", "suffix": "end"}),
    (COMPLETIONS, {"prompt": "x" * 300 + "|", "max_tokens": 4, "temperature": 0}),
    (COMPLETIONS, {"prompt": "x" * 3000}),
    (CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 9, "stop": ["q"]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi|"}]}], "max_tokens": 5}),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "none", "max_tokens": 5}),
    (CHAT, {"messages": [{"role": "king", "content": 5}] * 3}),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}),
    (CHAT, {"messages": HELLO, "reasoning_effort": "low"}),
    (CHAT, {"messages": HELLO, "structured_outputs": {"json": {"type": "nonsense"}}}),
    ("/v1/responses", {"input": "hi|", "max_output_tokens": 5, "store": False}),
    ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": "hi|"}], "max_output_tokens": 5}),
    ("/v1/responses", {"input": [1, 2]}),
    ("/v1/responses", {"input": "hi|", "text": {"format": {"type": "json_schema"}}}),
    ("/v1/responses/input_tokens", {"input": "hi|", "tools": [{"type": "function", "name": "a", "parameters": {}}]}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "metadata": {"user_id": "u"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": HELLO, "system": [{"type": "text", "text": "s"}]}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/pooling", {"input": ["a", "b"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/classify", {"input": ["a", "b"]}),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [104, 105] * 30}),
    ("/detokenize", {"tokens": [104, True]}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/b"}),
    ("/v1/batches", {"input_file_id": "f", "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": "b"}}),
    ("/v1/batches", {"input_file_id": "f", "endpoint": COMPLETIONS, "completion_window": "soon"}),
]  # fmt: skip
OWN = re.compile(r'"(?:id|created|created_at|completed_at|item_id|request_id|cached_tokens)":\s*("[^"]*"|\d+)')


@pytest.fixture(scope="module")
def large() -> Iterator[Live]:
    with Live().serving() as live:
        yield live


def send(url: str, path: str, body: bytes) -> httpx.Response:
    return httpx.post(url + path, content=body, headers={"content-type": "application/json"}, timeout=PATIENCE_S)


def padded(document: Any) -> bytes:
    """The same JSON, too large to be read on the event loop."""
    return json.dumps(document).encode() + b" " * (INLINE_BYTES + 1)


def told(response: httpx.Response) -> tuple[int, str, str | None]:
    """What an answer says, without what is its own."""
    return response.status_code, OWN.sub("", response.text), response.headers.get("x-quire-ignored-fields")


@pytest.mark.parametrize(("path", "document"), BODIES)
def test_a_large_body_is_answered_as_a_small_one(large: Live, path: str, document: dict[str, Any]) -> None:
    small = send(large.url, path, json.dumps(document).encode())
    assert told(send(large.url, path, padded(document))) == told(small)
    assert small.status_code != 500


def test_every_json_route_has_the_one_door() -> None:
    exempt = {"/v1/files", "/v1/batches/{batch_id}/cancel"}  # a form that is read in pieces, and no body
    exempt |= {"/v1/models/{name:path}/load", "/v1/models/{name:path}/unload"}  # these have none
    doors = {}
    for route in (route for router in routers() for route in router.routes):
        assert isinstance(route, APIRoute)
        if "POST" in (route.methods or ()):
            calls = [getattr(part.call, "__qualname__", "") for part in route.dependant.dependencies]
            doors[route.path] = "json_body.<locals>.read" in calls
    assert {path for path, has_door in doors.items() if not has_door} == exempt
    others = {"/score", "/v1/moderations", "/v1/unload_lora_adapter", "/rerank", "/v2/rerank", "/v1/classify"}
    assert {path for path, _ in BODIES} | others == doors.keys() - exempt


def test_nothing_else_reads_a_body() -> None:
    reads = re.compile(r"model_validate_json\(await|request\.(body|form|json|stream)\(\)|\.receive\(\)")
    files = [path for path in (ROOT / "server").rglob("*.py") if reads.search(path.read_text())]
    assert files == [Path(bodies_module.__file__)]


def test_the_child_starts_with_the_first_large_body_is_replaced_and_ends_with_the_application() -> None:
    many = json.dumps({"prompt": [104] * 40_000}).encode()
    assert len(many) < INLINE_BYTES
    large = padded({"prompt": "x|"})
    with Live().serving() as live:
        child = live.context.bodies.child
        assert send(live.url, COMPLETIONS, b'{"prompt": "x|"}').status_code == 200
        assert child.pid is None, "a small body starts none"
        for body, status in ((large, 200), (many, 400)):  # many values are read there too, though they are few bytes
            assert send(live.url, COMPLETIONS, body).status_code == status
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            eventually(lambda: child._process is None or child._process.poll() is not None)
        assert send(live.url, COMPLETIONS, large).status_code == 200
        child._limit_s = 0.0
        response = send(live.url, COMPLETIONS, large)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "body_not_read")
        assert response.headers["retry-after"] == "1"
        child._limit_s = bodies_module.MAX_READ_S
        assert send(live.url, COMPLETIONS, large).status_code == 200, "a body that takes too long harms no other"
        pid = child.pid
        assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


def test_too_many_values_are_a_400_that_names_the_flag(serve: Serve) -> None:
    live = serve(max_json_values=200)
    fine, one_more = {"prompt": [104] * 129, "max_tokens": 1}, {"prompt": [104] * 130, "max_tokens": 1}
    for encode in (lambda body: json.dumps(body).encode(), padded):
        assert send(live.url, COMPLETIONS, encode(fine)).status_code == 200
        refused = send(live.url, COMPLETIONS, encode(one_more))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_values")
        assert "--max-json-values" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("make", "status", "says"),
    [
        (lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 400_000), 400, "messages.0: "),
        (lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 4_000_000), 400, "--max-json-values"),
        (lambda: b'{"messages":' + b"[" * 300_000, 400, "--max-json-values"),
        (lambda: b'{"messages":[%s]}' % b",".join([b"[]"] * 20_000), 400, "messages.0: "),
        (lambda: b'{"a":' * 9_000, 400, "recursion limit"),
        (lambda: b'{%s}' % b",".join(b'"u%d":1' % index for index in range(1_000_000)), 400, "--max-json-values"),
        (lambda: b'{%s}' % b",".join(b'"u%d":1' % index for index in range(100_000)), 400, "100000 fields; send at most 1024"),
        (lambda: b'{%s}' % b",".join(b'"u%d":1' % index for index in range(5_000)), 400, "5000 fields; send at most 1024"),
        (lambda: b'{"messages":[{"role":"user","content":"x"}],"logit_bias":{%s}}'
         % b",".join(b'"%d":null' % index for index in range(90_000)), 400, "logit_bias"),
        (lambda: b'{"messages":[{"role":"user","content":"x"}],"stop":[%s]}' % b",".join([b"1"] * 300_000), 400, "stop"),
        (lambda: b'{"messages":[{"role":"user","content":"%s"}]}' % (b"x" * 12_000_000), 400, "maximum context length"),
        (lambda: b'{"messages":[%s]}' % b",".join([b'{"role":"user","content":"%s"}' % (b"x" * 1000)] * 10_000), 400, "maximum"),
        (lambda: b" " * 400_000, 400, "The body is empty"),
        (lambda: b'{"messages":["' + b"\xff" * 400_000, 400, "Invalid JSON"),
    ],
)  # fmt: skip
def test_hostile_bodies_are_refused_in_one_sentence(
    large: Live, make: Callable[[], bytes], status: int, says: str
) -> None:
    response = send(large.url, CHAT, make())
    assert response.status_code == status, response.text
    assert says in response.json()["error"]["message"]
    assert len(response.content) < 1500


# -- the child's end -----------------------------------------------------------------------------------------------------


def test_a_body_that_takes_too_much_memory_is_a_413(serve: Serve) -> None:
    live = serve(max_json_values=10**9)
    texts = b",".join(b'"text %d"' % index for index in range(1_500_000))
    response = send(live.url, CHAT, b'{"messages":[{"role":"user","content":"x"}],"user":[%s]}' % texts)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert send(live.url, COMPLETIONS, padded({"prompt": "x|"})).status_code == 200


def test_a_large_line_of_a_batch_goes_the_same_way(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path)
    body = {"prompt": "hello|", "max_tokens": 9, "metadata": {"a": "x" * INLINE_BYTES}}
    lines = [{"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body} for name in "ab"]
    hostile = {**lines[0], "custom_id": "c", "body": {"prompt": [1] * 2_000_000}}
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any") as client:
        for content, status in ((lines, "completed"), ([*lines, hostile], "failed")):
            data = b"\n".join(json.dumps(line).encode() for line in content)
            file = client.files.create(file=("in.jsonl", data), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
            eventually(lambda batch=batch, status=status: client.batches.retrieve(batch.id).status == status)  # type: ignore[misc]
        errors = client.batches.retrieve(batch.id).errors
    assert live.context.bodies.child.pid is not None
    assert errors is not None
    assert [(error.code, error.line) for error in errors.data or ()] == [("too_many_values", 3)]


def test_a_bug_in_the_child_is_a_500_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(1000, 1 << 20)
    try:
        with caplog.at_level(logging.ERROR), pytest.raises(bodies_module.ApiError) as refused:
            reader._ask(CacheControl, bytearray(b'{"type": "ephemeral"}'), "no such member")
    finally:
        reader.close()
    assert refused.value.status == 500
    assert "KeyError" in caplog.text


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon() -> Iterator[tuple[str, int]]:
    """A process's URL and id; its child has been started."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/http/parrot_daemon.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        for path in (CHAT, COMPLETIONS):
            send(url, path, padded({"messages": HELLO, "prompt": "x|"}))
        yield url, process.pid
    finally:
        process.stdin.close()
        process.wait(PATIENCE_S)
        process.stdout.close()


LONG = "The quick brown fox, " * 50
HEAVY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ids": (COMPLETIONS, lambda: json.dumps({"prompt": [70_000 + index for index in range(900_000)]}).encode()),
    "batch of ids": ("/v1/embeddings", lambda: json.dumps({"input": [[70_000] * 400] * 2000}).encode()),
    "integers as messages": (CHAT, lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 500_000)),
    "30 MB of them": (CHAT, lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 15_000_000)),
    "messages": (CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": LONG}] * 11_000}).encode()),
    "tiny messages": (CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": "x"}] * 20_000}).encode()),
    "one message": (CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": LONG * 28_000}]}).encode()),
    "floats": (CHAT, lambda: json.dumps({"messages": HELLO, "logit_bias": [0.5 + index for index in range(900_000)]}).encode()),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAVY)
def test_daemon_and_child_grow_by_64_mib_and_4_times_the_body(daemon: tuple[str, int], name: str) -> None:
    (url, pid), (path, make) = daemon, HEAVY[name]
    body = make()
    before, largest, is_over = family_bytes(pid), 0, threading.Event()

    def weigh() -> None:
        nonlocal largest
        while not is_over.is_set():
            largest = max(largest, family_bytes(pid))
            time.sleep(0.001)

    watching = threading.Thread(target=weigh)
    watching.start()
    try:
        assert send(url, path, body).status_code == 400
    finally:
        is_over.set()
        watching.join()
    assert before < largest, "nothing was measured"
    assert largest - before < 64 * MIB + 4 * len(body), f"it grew by {(largest - before) / MIB:.0f} MiB"


def test_hostile_bodies_can_be_measured(large: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether probes were late is the machine's matter; that every case makes JSON, and is answered, is not."""
    flags = ["--base-url", large.url, "--pid", str(os.getpid()), "--seconds", "0.2", "--only", "unknown fields"]
    assert main(["hostile", *flags]) in (0, 1)
    out = capsys.readouterr().out
    assert re.search(r"a million unknown fields .* \d+ x 400 \|\n", out)
    assert re.search(r"a thousand unknown fields .* \d+ x 200 \|\n", out)
    for make in {case.make for case in cases() if case.name != "100,000 brackets" and "30 MB" not in case.name}:
        msgspec.json.decode(make(), type=msgspec.Raw)  # reads all, and keeps nothing


def test_the_reader_can_be_used_from_any_thread_and_logs_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    reader = BodyReader(1000, 1 << 20)
    reader.close()
    with caplog.at_level(logging.WARNING), pytest.raises(bodies_module.ApiError) as refused:
        reader.read_here(bodies_module.BaseModel, b" " * (INLINE_BYTES + 1))
    assert refused.value.status == 503
    assert "shutting down" in caplog.text


async def test_a_caller_holds_at_most_as_many_bytes_as_are_still_free() -> None:
    """So that one caller's unfinished bodies never refuse another's, and small bodies always have room."""
    size = 1 << 20
    reader = BodyReader(1000, size)

    async def pieces(*sizes: int) -> AsyncIterator[bytes]:
        for num_bytes in sizes:
            yield b" " * num_bytes

    async with AsyncExitStack() as waiting:

        async def hold(caller: str, num: int) -> None:
            CALLER.set(caller)
            for _ in range(num):
                assert len(await waiting.enter_async_context(reader.receive(pieces(size // 2, size // 2)))) == size
            with pytest.raises(bodies_module.ApiError, match="of your large bodies wait") as refused:
                await waiting.enter_async_context(reader.receive(pieces(size)))
            assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "1"})
            async with reader.receive(pieces(FREE_BYTES)) as small:
                assert len(small) == FREE_BYTES

        await hold("one", 4)  # of eight
        await hold("two", 2)
        await hold("three", 1)
    assert not reader._held._held
    assert reader._held.take("one", 4 << 20), "all are free again"
    async with reader.receive(pieces(size)) as raw:
        assert len(raw) == size
    reader.close()
