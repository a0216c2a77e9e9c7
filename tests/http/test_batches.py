"""Files and batches over HTTP: the SDK's own calls, lines that fail, cancelling, expiry, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness import CONFIG, Live, eventually

from engine.core.config import SchedulerConfig
from engine.core.errors import OverloadedError
from server.batches import worker
from server.batches.folder import NewFile
from server.openai.batches import OpenFile
from server.telemetry import request_log
from tests.patience import PATIENCE_S, POLL_S

Serve = Callable[..., Live]
Lines = list[dict[str, Any] | str]


@pytest.fixture
def served(serve: Serve, tmp_path: Path) -> Live:
    return serve(data_dir=tmp_path / "data")


@pytest.fixture
def client(served: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def completion(custom_id: str, prompt: str = "hello|", **fields: Any) -> dict[str, Any]:
    body = {"model": "parrot", "prompt": prompt, "max_tokens": 300, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: Lines) -> bytes:
    return b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines)


def create(client: openai.OpenAI, lines: Lines, **fields: Any) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, **asked)  # type: ignore[arg-type]


def ended(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    def has_ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch.id)
        return batch.status in ("completed", "failed", "cancelled", "expired")

    eventually(has_ended)
    return batch


def entries(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


# -- the way it goes well ----------------------------------------------------------------------------------------------


def test_a_batch_through_the_sdk(client: openai.OpenAI, served: Live) -> None:
    asked = [completion(f"line-{i}", f"text {i}|") for i in range(200)]
    batch = create(client, asked, metadata={"job": "nightly"})
    assert batch.status == "validating"
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"job": "nightly"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (200, 200, 0)
    assert batch.error_file_id is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = entries(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in asked]
    assert [answer["response"]["body"]["choices"][0]["text"] for answer in answers] == [f"text {i}" for i in range(200)]
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    found = httpx.get(f"{served.url}/v1/requests/{answers[-1]['response']['request_id']}").json()
    assert found["state"] == "finished"
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.bytes) == ("batch_output", len(client.files.content(output.id).content))


def test_lines_push_no_answer_out_of_the_history(client: openai.OpenAI, served: Live) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "a line of more than one block|"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert ended(client, create(client, [line], endpoint="/v1/chat/completions")).status == "completed"
    assert "quire_prefix_ends_total{" not in httpx.get(f"{served.url}/metrics").text


def test_lines_push_no_client_out_of_the_book(
    client: openai.OpenAI, served: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "RECENT", 2)
    online = httpx.post(f"{served.url}/v1/completions", json={"prompt": "hello|"}).headers["x-request-id"]
    batch = ended(client, create(client, [completion(str(i)) for i in range(6)]))
    lines = [answer["response"]["request_id"] for answer in entries(client, batch.output_file_id)]
    asked = [httpx.get(f"{served.url}/v1/requests/{name}").status_code for name in (online, *lines)]
    assert asked[0] == 200
    assert sorted(asked[1:]) == [200, 200, 404, 404, 404, 404]


def test_chat_lines(client: openai.OpenAI) -> None:
    body = {"messages": [{"role": "user", "content": "hé"}]}
    line = {"custom_id": "é", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = ended(client, create(client, [line], endpoint="/v1/chat/completions"))
    [answer] = entries(client, batch.output_file_id)
    assert answer["custom_id"] == "é"
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hé"


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/embeddings", {"input": "text 1"}, "list"),
        ("/v1/responses", {"input": "text 1"}, "response"),
        ("/v1/score", {"text_1": "text", "text_2": [" 1"]}, "list"),
        ("/pooling", {"input": "text 1"}, "list"),
    ],
)
def test_lines_for_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any], kind: str) -> None:
    lines: Lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i in range(3)]
    batch = ended(client, create(client, lines, endpoint=endpoint))
    assert [entry["response"]["body"]["object"] for entry in entries(client, batch.output_file_id)] == [kind] * 3
    assert batch.usage.input_tokens >= 18


def test_what_an_endpoint_refuses_is_that_lines_answer(client: openai.OpenAI) -> None:
    lines = [
        completion("good"),
        completion("hot", temperature=7),
        completion("other", model="gpt-9"),
        completion("odd", colour="red"),
    ]
    batch = ended(client, create(client, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    good, odd = entries(client, batch.output_file_id)
    assert (good["custom_id"], odd["custom_id"]) == ("good", "odd")
    assert odd["response"]["ignored_fields"] == ["colour"]
    hot, other = entries(client, batch.error_file_id)
    assert (hot["custom_id"], hot["response"]["status_code"]) == ("hot", 400)
    assert hot["response"]["body"]["error"]["param"] == "temperature"
    assert other["response"]["status_code"] == 404


def test_lists_have_pages(client: openai.OpenAI) -> None:
    batches = [ended(client, create(client, [completion("a")])) for _ in range(3)]
    assert [each.id for each in client.batches.list(limit=2)] == [each.id for each in reversed(batches)]
    page = client.batches.list(limit=2)
    assert len(page.data) == 2
    assert page.has_more
    inputs = [each.input_file_id for each in batches]
    assert [each.id for each in client.files.list(purpose="batch", order="asc")] == inputs
    assert [each.id for each in client.files.list(purpose="batch", order="asc", limit=1)] == inputs
    assert len(list(client.files.list())) == 6


def test_what_is_missing_is_named_by_the_field_that_asked_for_it(served: Live) -> None:
    body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
    answers = [
        httpx.post(f"{served.url}/v1/batches", json=body),
        *(httpx.get(f"{served.url}/v1/{kind}?after=x") for kind in ("files", "batches")),
        *(httpx.get(f"{served.url}/v1/{kind}/x") for kind in ("files", "batches")),
    ]
    params = [answer.json()["error"]["param"] for answer in answers]
    assert params == ["input_file_id", "after", "after", "file_id", "batch_id"]


def test_no_other_user_reads_the_database(serve: Serve, tmp_path: Path) -> None:
    """The folder may have been there, open to all."""
    tmp_path.chmod(0o755)
    (tmp_path / "batches.sqlite").touch(0o644)
    serve(data_dir=tmp_path)
    assert {path.stat().st_mode & 0o77 for path in tmp_path.glob("batches.sqlite*")} == {0}


def test_files_come_and_go(client: openai.OpenAI, served: Live, tmp_path: Path) -> None:
    content = bytes(range(256)) * 8000  # several pieces, and nothing of it is text
    file = client.files.create(file=("../../etc/passwd", content), purpose="batch")
    assert (file.filename, file.bytes, file.status) == ("../../etc/passwd", len(content), "processed")
    assert client.files.content(file.id).content == content
    assert [path.name for path in (tmp_path / "data/files").iterdir()] == [file.id]
    assert client.files.delete(file.id).deleted
    assert list((tmp_path / "data/files").iterdir()) == []
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            call(file.id)


def test_a_file_that_is_deleted_while_it_is_read_is_sent_whole(tmp_path: Path) -> None:
    content, sent = bytes(range(256)) * 1000, list[Any]()
    path = tmp_path / "file"
    path.write_bytes(content)
    answer = OpenFile(path.open("rb"))
    path.unlink()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": [(b"range", b"bytes=7-")], "asgi": {"spec_version": "2.4"}}
    asyncio.run(answer(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 206
    assert b"".join(each["body"] for each in sent[1:]) == content[7:]
    assert answer._file.closed


# -- input that is wrong -----------------------------------------------------------------------------------------------

BAD_LINES: list[tuple[dict[str, Any] | str, str, str | None]] = [
    ("{", "invalid_json", None),
    ("[]", "invalid_type", None),
    ("[" * 10_000, "invalid_json", None),
    ("[" * 100_000, "too_many_values", None),
    (completion("x") | {"method": "GET"}, "invalid_value", "method"),
    (completion("x") | {"url": "/v1/chat/completions"}, "invalid_value", "url"),
    (completion("x") | {"custom_id": ""}, "invalid_value", "custom_id"),
    (completion("x") | {"custom_id": 7}, "invalid_type", "custom_id"),
    (completion("x") | {"body": "hello"}, "invalid_type", "body"),
    (completion("x") | {"extra": 1}, "unknown_parameter", "extra"),
    ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "missing_required_parameter", "body"),
    (completion("x", stream=True), "unsupported_parameter", "body.stream"),
    (completion("good"), "duplicate_custom_id", "custom_id"),
    (completion("x", prompt="a" * 70_000), "request_too_large", None),
]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("narrow")
    with Live(data_dir=folder, max_body_bytes=1 << 16, max_file_bytes=1 << 20).serving() as live:
        yield live


@pytest.mark.parametrize(("line", "code", "param"), BAD_LINES, ids=[f"{code}-{param}" for _, code, param in BAD_LINES])
def test_a_malformed_line_fails_the_batch_with_its_number(
    narrow: Live, line: Any, code: str, param: str | None
) -> None:
    if isinstance(line, str) and len(line) > 1 << 16:
        line = line[:60_000]
    with openai.OpenAI(base_url=narrow.url + "/v1", api_key="any", max_retries=0) as client:
        batch = ended(client, create(client, [completion("good"), "", line, completion("last")]))
    assert batch.status == "failed"
    [error] = batch.errors.data
    assert (error.code, error.line, error.param) == (code, 3, param)
    assert len(error.message) < 400
    assert "at line" not in error.message  # of the line, not of the file
    assert "permitted, not" not in error.message  # whatever the value of a field that has no place
    assert batch.output_file_id is None


def test_many_errors_are_told_up_to_a_bound(client: openai.OpenAI) -> None:
    batch = ended(client, create(client, ["?"] * 500))
    assert [error.line for error in batch.errors.data] == list(range(1, 51))


def test_a_file_without_requests(client: openai.OpenAI) -> None:
    batch = ended(client, create(client, ["", "  "]))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")


def test_blank_lines_a_mark_and_no_last_break(client: openai.OpenAI) -> None:
    content = b"\xef\xbb\xbf" + jsonl([completion("a"), ""]) + jsonl([completion("b")]).rstrip()
    file = client.files.create(file=content, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = ended(client, batch)
    assert [entry["custom_id"] for entry in entries(client, batch.output_file_id)] == ["a", "b"]


BODY = b'--X\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
FILE = BODY % (b"file", b'; filename="a"', b"{}")
PURPOSE = BODY % (b"purpose", b"", b"batch")
UPLOADS = [
    (FILE, "missing", "purpose: Field required"),
    (PURPOSE, "nothing", "file: Field required"),
    (FILE + BODY % (b"purpose", b"", b"vision"), "vision", "purpose is 'vision'"),
    (FILE + PURPOSE + FILE, "two", "two files"),
    (PURPOSE + BODY % (b"file", b'; filename="a"', b""), "empty", "The file is empty"),
    (FILE + PURPOSE + BODY % (b"expires_after[seconds]", b"", b"3600"), "expiry", "expires_after"),
    (FILE + BODY % (b"purpose", b"", b"b" * 5000), "long", "longer than 4096 bytes"),
    (FILE + PURPOSE * 20, "many", "more than 16 parts"),
]


@pytest.mark.parametrize(("parts", "_id", "told"), UPLOADS, ids=[each[1] for each in UPLOADS])
def test_uploads_that_are_refused(narrow: Live, parts: bytes, _id: str, told: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=X"}
    answer = httpx.post(f"{narrow.url}/v1/files", content=parts + b"--X--\r\n", headers=headers)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert not list(narrow.context.batches.folder._files.glob("*.tmp"))


@pytest.mark.parametrize(
    ("content", "content_type", "told"),
    [
        (b"{}", "application/json", "The Content-Type is not multipart/form-data"),
        (b"{}", "multipart/form-data", "The Content-Type is not multipart/form-data"),
        (b"{}", "multipart/form-data; boundary=" + 300 * "a", "a boundary of at most 256 bytes"),
        (b"nonsense", "multipart/form-data; boundary=X", "The form cannot be read"),
        (FILE + PURPOSE, "multipart/form-data; boundary=X", "before its closing boundary"),
    ],
)
def test_what_is_no_form(narrow: Live, content: bytes, content_type: str, told: str) -> None:
    answer = httpx.post(f"{narrow.url}/v1/files", content=content, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_a_full_disk_is_told(narrow: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: NewFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(NewFile, "write", fail)
    files = {"file": ("a", b"{}"), "purpose": (None, "batch")}
    answer = httpx.post(f"{narrow.url}/v1/files", files=files)
    assert answer.status_code == 507
    assert answer.json()["error"]["code"] == "insufficient_storage"
    assert not list(narrow.context.batches.folder._files.glob("*.tmp"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError()])
def test_a_stall_is_logged_once_and_when_it_ends(
    error: OSError, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.batches.worker.RETRY_S", 0.01)
    num_failed, keep = 0, NewFile.keep

    def fail(file: NewFile) -> None:
        nonlocal num_failed
        num_failed += 1
        if num_failed in range(2, 7):  # the first is the input's
            raise error
        keep(file)

    monkeypatch.setattr(NewFile, "keep", fail)
    live = serve(data_dir=tmp_path)
    caplog.set_level("INFO", "server.batches.worker")
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        assert ended(client, create(client, [completion("a")])).status == "completed"
    eventually(lambda: "batches go on" in caplog.text)
    said = [record.message for record in caplog.records]
    assert [said.count(f"batches {each}") for each in ("are stalled; trying again every second", "go on")] == [1, 1]


def test_a_file_that_is_too_large(narrow: Live) -> None:
    def pieces() -> Iterator[bytes]:
        yield PURPOSE + b'--X\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(64):
            yield b"a" * (1 << 15)

    headers = {"content-type": "multipart/form-data; boundary=X"}
    answer = httpx.post(f"{narrow.url}/v1/files", content=pieces(), headers=headers)
    assert answer.status_code == 413
    assert "--max-file-bytes" in answer.json()["error"]["message"]
    assert not list(narrow.context.batches.folder._files.glob("*.tmp"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
def test_batches_that_are_refused(narrow: Live, fields: dict[str, Any], param: str) -> None:
    with openai.OpenAI(base_url=narrow.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, [completion("a")], **fields)
        assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_x")
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.batches.list(limit=101)
        with pytest.raises(openai.NotFoundError):
            client.batches.list(after="batch_x")


def test_without_a_folder_there_is_a_sentence(live: Live) -> None:
    answer = httpx.get(f"{live.url}/v1/batches")
    assert answer.status_code == 501
    assert "--data-dir" in answer.json()["error"]["message"]


# -- ends that come early ----------------------------------------------------------------------------------------------


def test_cancelling_keeps_what_has_run(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, step_s=0.002, config=SchedulerConfig(**FEW_SLOTS))
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        short = [completion(f"short-{i}") for i in range(2)]
        batch = create(client, [*short, *[completion(f"long-{i}", "endless") for i in range(40)]])
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
        with pytest.raises(openai.ConflictError, match="has not ended"):
            client.files.delete(batch.input_file_id)
        live.gate.close()
        assert client.batches.cancel(batch.id).status == "cancelling"
        live.gate.open()
        batch = ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        assert [entry["custom_id"] for entry in entries(client, batch.output_file_id)] == ["short-0", "short-1"]
        never = entries(client, batch.error_file_id)
        assert len(never) == 40
        assert {entry["error"]["code"] for entry in never} == {"batch_cancelled"}
        assert all(entry["response"] is None for entry in never)
        assert batch.request_counts.failed == 0
        with pytest.raises(openai.ConflictError, match="cancelled already"):
            client.batches.cancel(batch.id)
        assert client.files.delete(batch.input_file_id).deleted
    live.check_idle()


FEW_SLOTS = {"num_blocks": 256, "block_size": 16, "max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 64}


def test_a_window_that_ends(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, step_s=0.01)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        lines: Lines = [completion("short"), *[completion(f"long-{i}", "endless") for i in range(50)]]
        batch = ended(client, create(client, lines, completion_window="1s"))
        assert batch.status == "expired"
        assert batch.expires_at <= batch.expired_at
        never = entries(client, batch.error_file_id)
        assert {entry["error"]["code"] for entry in never} == {"batch_expired"}
        assert len(never) + len(entries(client, batch.output_file_id)) == len(lines)
    live.check_idle()


# -- beside those who wait ---------------------------------------------------------------------------------------------


def test_whoever_waits_goes_first(serve: Serve, tmp_path: Path) -> None:
    """A batch holds every slot; a request that comes takes as many steps as on an idle engine, and one or two more."""
    live = serve(data_dir=tmp_path, step_s=0.001)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        batch = create(client, [completion(f"{i}", "endless", max_tokens=400) for i in range(100)])
        eventually(lambda: live.engine.stats.num_background_running == CONFIG.max_num_seqs)
        live.gate.close()
        before = live.runner.num_steps
        with client.completions.create(model="parrot", prompt="now|", stream=True) as stream:
            live.gate.open()
            text = "".join(chunk.choices[0].text for chunk in stream)
        assert text == "now"
        # Its prompt, its three letters and its end; the step that ran when it came; those until the client has read it.
        assert live.runner.num_steps - before < 60
        assert live.engine.stats.ttft_s.count == 1, "the batch's own waits are in no latency"
        assert client.batches.cancel(batch.id).status == "cancelling"
        ended(client, batch)


def test_a_server_that_is_never_idle_runs_one_line_at_a_time(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients whose requests have no end leave no step to the background."""
    monkeypatch.setattr("server.batches.worker.PATIENCE_S", 0.2)
    monkeypatch.setattr("server.batches.worker.PROBE_S", 0.05)
    live = serve(data_dir=tmp_path, step_s=0.002, config=replace(CONFIG, max_model_len=100_000, num_blocks=8000))
    live.require_thread()  # statistics from another process take longer than these steps
    taken = 0

    def watch(*requests: Any) -> None:
        nonlocal taken
        foreground = sum(not request.is_background for request in requests)
        taken += foreground
        assert live.engine.stats.num_running - live.engine.stats.num_background_running + foreground <= 3
        submit(*requests)

    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        endless = {"model": "parrot", "prompt": "endless", "stream": True, "max_tokens": 90_000}
        with client.completions.create(**endless) as one, client.completions.create(**endless) as other:
            next(iter(one))
            next(iter(other))
            submit, live.engine.submit = live.engine.submit, watch
            batch = create(client, [completion(str(i)) for i in range(20)])
            eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
            assert taken >= 5
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 20)
        assert taken < 20, "with the clients gone the rest runs in the background again"
    live.check_idle()


def test_lines_that_take_long_are_left_alone_on_an_idle_server(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.worker.PATIENCE_S", 0.05)
    live = serve(data_dir=tmp_path, step_s=0.002)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        batch = ended(client, create(client, [completion(str(i), "endless", max_tokens=200) for i in range(4)]))
        assert (batch.status, batch.request_counts.completed) == ("completed", 4)
    assert live.engine.stats.generation_tokens == 4 * 200, "none was begun a second time"
    assert live.engine.stats.background_steps == live.engine.stats.steps
    live.check_idle()


def test_a_full_queue_is_waited_for(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """429 says nothing of a line: it is asked for again."""
    monkeypatch.setattr("server.batches.worker.RETRY_S", 0.01)
    live = serve(data_dir=tmp_path)
    refused = 0
    submit = live.engine.submit

    def refuse_some(*requests: Any) -> None:
        nonlocal refused
        if refused < 5:
            refused += 1
            raise OverloadedError("The queue is full.", retry_after_s=1.0)
        submit(*requests)

    monkeypatch.setattr(live.engine, "submit", refuse_some)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        batch = ended(client, create(client, [completion(str(i)) for i in range(8)]))
        assert (batch.status, batch.request_counts.completed, refused) == ("completed", 8, 5)


def test_a_line_that_ends_daemon_after_daemon_is_given_up(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.worker.MAX_ATTEMPTS", 0)
    batch = ended(client, create(client, [completion("a")]))
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    [entry] = entries(client, batch.error_file_id)
    assert (entry["custom_id"], entry["response"], entry["error"]["code"]) == ("a", None, "too_many_attempts")


def test_an_input_that_is_lost_is_each_lines_error(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, config=SchedulerConfig(**FEW_SLOTS))
    live.gate.close()
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        batch = create(client, [completion(str(i)) for i in range(5)])
        eventually(lambda: live.context.client.num_open == 2)
        (tmp_path / "files" / batch.input_file_id).unlink()
        live.gate.open()
        batch = ended(client, batch)
        assert [entry["custom_id"] for entry in entries(client, batch.output_file_id)] == ["0", "1"]
        assert [entry["error"]["code"] for entry in entries(client, batch.error_file_id)] == ["input_lost"] * 3


@pytest.mark.parametrize("reader", ["read_piece", "read_body"])
def test_an_input_is_not_lost_while_too_many_files_are_open(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    read, faults = getattr(worker, reader), [errno.EMFILE, errno.ENFILE, errno.ENOMEM]

    def read_when_it_may(*arguments: Any) -> Any:
        if faults:
            raise OSError(faults.pop(), "not now")
        return read(*arguments)

    monkeypatch.setattr(worker, "RETRY_S", POLL_S)
    monkeypatch.setattr(worker, reader, read_when_it_may)
    batch = ended(client, create(client, [completion("a")]))
    assert (batch.status, batch.request_counts.completed, faults) == ("completed", 1, [])


def test_keys_guard_files(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, api_keys=("secret",))
    assert httpx.get(f"{live.url}/v1/files").status_code == 401
    with openai.OpenAI(base_url=live.url + "/v1", api_key="secret", max_retries=0) as client:
        assert ended(client, create(client, [completion("a")])).status == "completed"


def test_an_application_that_stops_leaves_lines_to_the_next(tmp_path: Path) -> None:
    with Live(data_dir=tmp_path, step_s=0.001).serving() as live:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
            batch = create(client, [completion(str(i), f"{i}|") for i in range(300)])
            eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 10)
        stop_worker(live)
    with Live(data_dir=tmp_path).serving() as live, openai.OpenAI(base_url=live.url + "/v1", api_key="any") as client:
        batch = ended(client, batch)
        assert [entry["custom_id"] for entry in entries(client, batch.output_file_id)] == [str(i) for i in range(300)]
        assert live.engine.stats.prompt_tokens < sum(len(f"{i}|") for i in range(300)), (
            "finished lines do not run again"
        )


def stop_worker(live: Live) -> None:
    """As the daemon does when it is told to leave; the harness waits for an idle engine first."""
    loop = live.context.client._loop
    asyncio.run_coroutine_threadsafe(live.context.batches.worker.stop(), loop).result(PATIENCE_S)
