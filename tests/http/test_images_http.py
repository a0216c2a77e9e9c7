"""Images in requests of every API: where they may come from, what becomes of them, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import Live

from engine.core.errors import InvalidRequestError
from engine.core.types import Request
from loadtest.__main__ import main
from server.answers import handoff, media
from server.http.bodies import HeldBytes
from server.settings.app_config import AppConfig
from tests.http.fake_images import PAD, TEMPLATE, picture, preprocessor
from tests.patience import PATIENCE_S, eventually


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(content: bytes | str, **more: Any) -> dict[str, Any]:
    url = content if isinstance(content, str) else data_url(content)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def seeing() -> Iterator[Live]:
    with Live(template=TEMPLATE, images=preprocessor, place="thread").serving() as live:
        yield live


@pytest.fixture
def http(seeing: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=seeing.url) as client:
        yield client
    seeing.check_idle()


@pytest.fixture
def requests(seeing: Live, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What reaches the engine."""
    found: list[Request] = []
    submit = seeing.engine.submit
    monkeypatch.setattr(seeing.engine, "submit", lambda *given: (found.extend(given), submit(*given))[1])
    return found


def ask(http: httpx.Client, *parts: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    return http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, **fields})


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return str(error["message"])


def test_an_image_is_vectors_in_a_prompt(http: httpx.Client, requests: list[Request]) -> None:
    answer = ask(http, text("a"), part(picture(32, 16)), text("b"), return_token_ids=True).json()
    assert answer["prompt_token_ids"] == [*b"a[", *[PAD] * 8, *b"]b|"]
    assert answer["usage"]["prompt_tokens"] == 13
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 8
    [request] = requests
    [span], [image] = request.spans, request.images
    assert (span.start, span.length, span.digest, span.is_atomic) == (2, 8, image.digest, False)
    assert image.num_tokens == 8
    assert image.grid == (1, 2, 4)
    assert image.arrays["pixel_values"].shape == (32, 48)
    assert "image_tokens" not in ask(http, text("a")).json()["usage"]["prompt_tokens_details"]


def test_streams_and_many_images(http: httpx.Client, requests: list[Request]) -> None:
    shades = (10, 20, 10)
    messages = [
        {"role": "user", "content": [part(picture(shade=shades[0])), text("x"), part(picture(shade=shades[1]))]},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": [text("z"), part(picture(shade=shades[2]))]},
    ]
    body = {"messages": messages, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    usage = next(json.loads(line[6:])["usage"] for line in reversed(lines) if '"usage":{' in line)
    assert usage["prompt_tokens_details"]["image_tokens"] == 18
    [request] = requests
    digests = [span.digest for span in request.spans]
    assert digests[0] == digests[2] != digests[1]
    assert [image.digest for image in request.images] == digests
    assert [request.prompt[span.start - 1 : span.end + 1] for span in request.spans] == [(91, *[PAD] * 6, 93)] * 3


def test_a_conversation_goes_on_behind_its_image(http: httpx.Client) -> None:
    first = [{"role": "user", "content": [part(picture(96, 96)), text("a")]}]
    both = [*first, {"role": "assistant", "content": "y"}, {"role": "user", "content": "b"}]
    other = [{"role": "user", "content": [part(picture(96, 96, shade=9)), text("a")]}]
    cached = []
    for messages in (first, both, other):
        answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 144, 0], "the image is found again, and another one of its size is not taken for it"


def test_a_mark_that_a_client_writes_is_text(http: httpx.Client, requests: list[Request]) -> None:
    for parts in ([text("<|image_pad|>"), part(picture())], [text("<|image_pad|>")]):
        assert ask(http, *parts).status_code == 200
        prompt = requests[-1].prompt
        assert bytes(prompt[:13]) == b"<|image_pad|>"
        assert prompt.count(PAD) == 6 * (len(parts) - 1)
    body = {"prompt": "<|image_pad|>", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    said = refusal(ask(http, text("a"), chat_template_kwargs={"messages": []}))
    assert "chat_template_kwargs" in said


def test_little_detail_is_fewer_tokens(http: httpx.Client) -> None:
    large = picture(800, 8, kind="JPEG")
    count = [
        ask(http, part(large, detail=detail)).json()["usage"]["prompt_tokens_details"]["image_tokens"]
        for detail in ("low", "high")
    ]
    assert count == [64, 100]
    assert "detail 'much'; it must be auto" in refusal(ask(http, part(large, detail="much")))


def test_options_of_a_request_reach_the_processor(http: httpx.Client) -> None:
    wishes = {"mm_processor_kwargs": {"max_pixels": 1024}}
    said = refusal(ask(http, part(picture()), **wishes))
    assert "has 'max_pixels': 1024; that of a request may have nothing with this model" in said
    answer = ask(http, text("a"), **wishes)
    assert answer.headers["x-quire-ignored-fields"] == "mm_processor_kwargs"
    assert "x-quire-ignored-fields" not in ask(http, text("a"), mm_processor_kwargs={}).headers


def test_the_tokenizer_counts_images(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [text("a"), part(picture())]}]
    assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == [*b"a[", *[PAD] * 6, *b"]|"]
    blocks = [text("a"), {"type": "image", "source": {"type": "base64", "data": data_url(picture())[22:]}}]
    counted = http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": blocks}]}).json()
    assert counted == {"input_tokens": 10}
    items = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(picture())}]
    counted = http.post("/v1/responses/input_tokens", json={"input": [{"role": "user", "content": items}]}).json()
    assert counted["input_tokens"] == 10


def test_messages_have_images_in_turns_and_results(http: httpx.Client, requests: list[Request]) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data_url(picture())[22:]}
    image = {"type": "image", "source": source}
    tool = {"name": "look", "input_schema": {"type": "object"}}
    messages = [
        {"role": "user", "content": [image, text("a")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [text("b"), image]}]},
    ]
    answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 2, "tools": [tool]})
    assert answer.status_code == 200, answer.text
    assert len(requests[0].spans) == 2
    by_url = {"type": "image", "source": {"type": "url", "url": data_url(picture())}}
    marked = {**by_url, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [marked, text("a" * 40)]}], "max_tokens": 2}
    assert http.post("/v1/messages", json=body).status_code == 200
    assert len(requests[1].spans) == 1
    for wrong in ({"type": "base64"}, {"type": "url"}, {"type": "file", "file_id": "f"}):
        blocks = [{"type": "image", "source": wrong}]
        said = refusal(
            http.post("/v1/messages", json={"messages": [{"role": "user", "content": blocks}], "max_tokens": 1})
        )
        assert "source" in said
    documents = [{"type": "document", "source": source}]
    said = refusal(
        http.post("/v1/messages", json={"messages": [{"role": "user", "content": documents}], "max_tokens": 1})
    )
    assert "'document' cannot be read" in said


def test_responses_keep_images(http: httpx.Client, requests: list[Request]) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(picture())}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2}
    first = http.post("/v1/responses", json=body).json()
    items = http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"] == [parts[0], {**parts[1], "detail": "auto"}]
    more = {"input": "and now?", "previous_response_id": first["id"], "max_output_tokens": 2}
    assert http.post("/v1/responses", json=more).status_code == 200
    assert [len(request.spans) for request in requests] == [1, 1]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    assert http.post("/v1/responses", json={"input": [call, output], "max_output_tokens": 2}).status_code == 200
    assert len(requests[2].spans) == 1
    said = refusal(http.post("/v1/responses", json={"input": [{"role": "user", "content": [{"type": "input_file"}]}]}))
    assert "'input_file' cannot be read" in said


def test_base64_for_urls_has_the_same_bytes(http: httpx.Client, requests: list[Request]) -> None:
    usual = data_url(picture(kind="JPEG"))
    head, _, data = usual.partition(",")
    assert data.startswith("/9j/")
    other = f"{head},{data.replace('+', '-').replace('/', '_')}"
    assert [ask(http, part(url)).status_code for url in (usual, other)] == [200, 200]
    assert requests[0].spans == requests[1].spans


def test_images_elsewhere_than_in_parts_are_not_lost(http: httpx.Client) -> None:
    """As other servers take them."""
    images = [data_url(picture())]
    for name in ("image_data", "images", "multi_modal_data"):
        for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user"}]})):
            said = refusal(http.post(f"/v1/{path}", json={**prompt, name: images}))
            assert f"{name} is not supported: send images in parts of messages" in said
    messages = [{"role": "user", "content": "a", "images": images}]
    said = refusal(http.post("/v1/chat/completions", json={"messages": messages}))
    assert "messages.0.images is not supported: send images in parts of content" in said


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([{"type": "video_url", "video_url": {"url": "x"}}], "'video_url' cannot be read; send text and images only"),
        ([{"type": "input_audio", "input_audio": {}}], "'input_audio' cannot be read"),
        ([{"type": "file", "file": {}}], "'file' cannot be read"),
        ([{"type": "image_url"}], "an image needs image_url"),
        ([part(b"hello")], "its format is not known"),
        ([part("data:image/png,abc")], "its address is not data:image/png;base64,... with its bytes."),
        ([part("data:image/png;base64,a")], "base64 is malformed"),
        ([part("data:image/png;base64,%41")], "base64 is malformed"),
        ([part("ftp://example.com/a.png")], "'ftp://example.com/a.png'"),
        ([part("/etc/passwd")], "'/etc/passwd'"),
        ([part("https://example.com/a.png")], "--allowed-media-domains"),
        ([part("http://127.0.0.1/")], "--allowed-media-domains"),
        ([part("http://host:port/")], "malformed"),
        ([part("file:///etc/passwd")], "--allowed-local-media-path"),
        ([part(picture(1, 1000))], "at most 200 times"),
        ([part(picture())] * 5, "5 images, and at most 4"),
    ],
    ids=range(16),
)
def test_images_that_are_refused(http: httpx.Client, parts: list[Any], words: str) -> None:
    assert words in refusal(ask(http, *parts))


def test_damaged_images_are_an_answer_or_a_sentence(http: httpx.Client, seeing: Live) -> None:
    """tests/pure/test_images_door.py has 2,000 of them, for the decoder alone."""
    whole, rng = [picture(kind=kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")], random.Random(5)
    statuses = set[int]()
    for number in range(60):
        file = bytearray(whole[number % 4])
        file[rng.randrange(12, len(file))] ^= rng.randrange(1, 256)
        cut = rng.choice((len(file), rng.randrange(len(file))))
        answer = ask(http, part(data_url(bytes(file[:cut]))))
        statuses.add(answer.status_code)
        if answer.status_code == 400:
            assert "messages has an image that cannot be used: " in refusal(answer)
    assert statuses == {200, 400}
    gc.collect()
    eventually(lambda: seeing.context.model.images._held.of("127.0.0.1") == 0)


def test_images_have_a_place_in_turns_of_users_and_tools(http: httpx.Client, requests: list[Request]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("b"), part(picture())]},
    ]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert [span.length for span in requests[0].spans] == [6]
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [part(picture())]}, {"role": "user", "content": "a"}]
        said = refusal(http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}))
        assert "no place for images" in said


def test_a_model_of_text_alone_says_so(live: Live) -> None:
    with httpx.Client(base_url=live.url) as client:
        assert "this server's model takes text alone" in refusal(ask(client, part(picture())))
        messages = [{"role": "user", "content": [part(picture())]}]
        assert "text alone" in refusal(client.post("/tokenize", json={"messages": messages}))
        assert client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_the_list_of_models_says_what_is_taken(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]


def test_lines_of_batches_have_images(serve: Callable[..., Live], tmp_path: Path) -> None:
    live = serve(template=TEMPLATE, images=preprocessor, place="thread", data_dir=tmp_path)
    contents = [picture(), b"broken"]
    bodies = [{"messages": [{"role": "user", "content": [part(each)]}], "max_tokens": 2} for each in contents]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    with httpx.Client(base_url=live.url) as client:
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", "\n".join(lines))}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()["id"]
        eventually(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        done = client.get(f"/v1/batches/{batch}").json()
        [answer] = client.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
        [failure] = client.get(f"/v1/files/{done['error_file_id']}/content").text.splitlines()
    assert json.loads(answer)["response"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] == 6
    assert "its format is not known" in failure


# -- doors -----------------------------------------------------------------------------------------------------------------


class Pages(BaseHTTPRequestHandler):
    """A host of images; what it was asked is in `seen`."""

    seen: list[tuple[str, str | None]] = []  # noqa: RUF012
    go_on = threading.Event()

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Cookie"]))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.send_header("Set-Cookie", "a=b")
            self.end_headers()
            return
        if kind == "wait":
            assert self.go_on.wait(PATIENCE_S)
        if kind == "drip":
            self.send_response(200)
            self.end_headers()
            while not self.go_on.wait(0.01):
                self.wfile.write(b"x")
            return
        content = picture() if kind in ("image", "wait") else bytes(int(rest)) if kind == "zeros" else b"hello"
        self.send_response(404 if kind == "none" else 200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        Pages.seen = []
        Pages.go_on.clear()
        yield server.server_port
        Pages.go_on.set()
        server.shutdown()
        thread.join()


def test_images_of_other_hosts(host: int, serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    live = serve(
        template=TEMPLATE,
        images=preprocessor,
        place="thread",
        allowed_media_domains=(f"localhost:{host}", f"127.0.0.1:{host}"),
        max_body_bytes=100_000,
    )
    base = f"http://localhost:{host}"
    with httpx.Client(base_url=live.url) as client:
        assert "private network" in refusal(ask(client, part(f"{base}/image")))
        assert not Pages.seen
        monkeypatch.setattr(media, "is_public", lambda _: True)
        assert ask(client, part(f"{base}/image")).status_code == 200
        there = f"http://127.0.0.1:{host}"
        assert ask(client, part(f"{base}/to/{there}/image")).status_code == 200
        assert [cookie for _, cookie in Pages.seen] == [None] * 3
        assert "--allowed-media-domains" in refusal(ask(client, part(f"{base}/to/http://example.com/a.png")))
        assert "--allowed-media-domains" in refusal(ask(client, part(f"{base}/to/http://localhost/a.png")))
        assert "--allowed-media-domains" in refusal(ask(client, part(f"{base}/to/file:///etc/passwd")))
        assert "--allowed-media-domains" in refusal(ask(client, part(f"http://user:word@localhost:{host}/image")))
        for name in ("a:b", "xn--a"):
            assert "could not be asked" in refusal(ask(client, part(f"{base}/to/http://{name}/c.png")))
        for name in ("xn--a", "xn--", "a:b"):
            assert "its address is malformed" in refusal(ask(client, part(f"http://{name}/a.png")))
        assert "redirects more than" in refusal(ask(client, part(f"{base}/to//to//to//to//to//to//image")))
        assert "answers 404" in refusal(ask(client, part(f"{base}/none")))
        assert "more than 100000 bytes" in refusal(ask(client, part(f"{base}/zeros/200000")))
        assert "its format is not known" in refusal(ask(client, part(f"{base}/words")))


def test_an_image_that_arrives_for_ever_is_given_up(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its bytes is in time, and all of them are not."""
    monkeypatch.setattr(media, "is_public", lambda _: True)
    monkeypatch.setattr(media, "FETCH_S", 0.5)
    hosts = (f"localhost:{host}",)
    config = AppConfig(model="m", served_model_names=("m",), allowed_media_domains=hosts, max_body_bytes=1000)
    with pytest.raises(InvalidRequestError, match="its host did not send it within"):
        fetched(config, f"http://localhost:{host}/drip")


def fetched(config: AppConfig, url: str) -> bytes | None:
    return asyncio.run(media.MediaFetcher(config).fetch(url, "messages", lambda _: None))


def test_a_name_is_resolved_once_and_all_its_addresses_are_public(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = (
        AppConfig(model="m", served_model_names=("m",), allowed_media_domains=(f"a.example:{host}",)),
        list[str](),
    )
    addresses = ["93.184.216.34", "127.0.0.1"]

    def resolve(name: str, port: int, **_: Any) -> list[Any]:
        asked.append(name)
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(media.socket, "getaddrinfo", resolve)
    with pytest.raises(InvalidRequestError, match="private network"):
        fetched(config, f"http://a.example:{host}/image")
    monkeypatch.setattr(media, "is_public", lambda _: True)
    del addresses[0]
    assert fetched(config, f"http://a.example:{host}/image") == picture()
    assert asked == ["a.example"] * 2
    is_first = iter((True, False))
    monkeypatch.setattr(media, "is_public", lambda _: next(is_first))
    with pytest.raises(InvalidRequestError, match="private network"):  # a name of a redirection is looked at, too
        fetched(config, f"http://a.example:{host}/to/http://a.example:{host}/image")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_host_shows_a_certificate_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the connection goes to an address."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(["openssl", *words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    monkeypatch.setattr(media, "is_public", lambda _: True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        hosts = [f"{name}:{server.server_port}" for name in ("localhost", "127.0.0.1")]
        config = AppConfig(model="m", served_model_names=("m",), allowed_media_domains=tuple(hosts))
        try:
            with pytest.raises(InvalidRequestError, match="could not be asked"):
                fetched(config, f"https://{hosts[0]}/image")
            trusted = ssl.create_default_context(cafile=certificate)
            monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, verify=trusted))
            assert fetched(config, f"https://{hosts[0]}/image") == picture()
            with pytest.raises(InvalidRequestError, match="could not be asked"):
                fetched(config, f"https://{hosts[1]}/image")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "192.0.0.192",
        "168.63.129.16",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "::7f00:1",
        "::ffff:0:7f00:1",
        "64:ff9b:1::7f00:1",
        "fec0::1",
        "fe80::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "2001:0:1::f5ff:fffe",
        "::ffff:93.184.216.34",
    ],
)
def test_addresses_of_private_networks(address: str) -> None:
    assert not media.is_public(media.ip_address(address))


def test_addresses_of_the_internet() -> None:
    for address in ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"):
        assert media.is_public(media.ip_address(address))


def test_files_below_a_folder(tmp_path: Path, serve: Callable[..., Live]) -> None:
    folder, outside = tmp_path / "open", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(picture())
    outside.write_bytes(picture())
    (folder / "link.png").symlink_to(outside)
    (folder / "inner.png").symlink_to(folder / "a b.png")
    live = serve(template=TEMPLATE, images=preprocessor, place="thread", allowed_local_media_path=folder)
    with httpx.Client(base_url=live.url) as client:
        for name in ("a%20b.png", "inner.png"):
            assert ask(client, part(f"file://{folder}/{name}")).status_code == 200
        for name in ("link.png", "../secret.png", "%2e%2e/secret.png", "none.png", "", "a\0b"):
            said = refusal(ask(client, part(f"file://{folder}/{name}")))
            assert "not below --allowed-local-media-path, or cannot be read" in said
            assert str(tmp_path) not in said


# -- tenants ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: ann, key: ann-key}, {name: bob, key: bob-key}]")
    return tmp_path / "tenants.yaml"


@pytest.mark.parametrize("shares", [False, True])
def test_nobody_can_tell_what_images_another_has_sent(
    serve: Callable[..., Live], tenants: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    """Vectors are kept by digest."""
    live = serve(template=TEMPLATE, images=preprocessor, place="thread", tenants=tenants, share_prefix_cache=shares)
    found: list[Request] = []
    submit = live.engine.submit
    monkeypatch.setattr(live.engine, "submit", lambda *given: (found.extend(given), submit(*given))[1])
    asked = [("ann", ""), ("ann", ""), ("bob", ""), ("ann", "salt"), ("bob", "salt"), ("bob", "salt")]
    for name, salt in asked:
        with httpx.Client(base_url=live.url, headers={"authorization": f"Bearer {name}-key"}) as client:
            assert ask(client, part(picture()), cache_salt=salt).status_code == 200
    digests = [request.images[0].digest for request in found]
    assert digests == [request.spans[0].digest for request in found]
    parts = [salt if shares else (name, salt) for name, salt in asked]
    assert [digests.index(each) for each in digests] == [parts.index(each) for each in parts]


def test_the_tokens_of_images_count_in_the_limits_of_a_tenant(serve: Callable[..., Live], tmp_path: Path) -> None:
    """A megapixel would be free of charge otherwise."""
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: ann, key: ann-key, tokens_per_minute: 200}]")
    live = serve(template=TEMPLATE, images=preprocessor, place="thread", tenants=tmp_path / "tenants.yaml")
    with httpx.Client(base_url=live.url, headers={"authorization": "Bearer ann-key"}) as client:
        first = ask(client, part(picture(96, 96)))
        assert first.json()["usage"]["prompt_tokens"] == 147
        assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 200 - 147
        ask(client, part(picture(96, 96, shade=9)))
        assert "used up its 200 tokens a minute" in refusal(ask(client, part(picture(96, 96))), 429)


# -- bounds ----------------------------------------------------------------------------------------------------------------


def test_what_images_take_counts_until_their_requests_end(serve: Callable[..., Live]) -> None:
    live = serve(template=TEMPLATE, images=preprocessor, place="thread")
    reader = live.context.model.images
    size = len(data_url(picture())) + 24 * 48 * 4 + 24
    reader._held = HeldBytes(3 * size)
    live.gate.close()
    answers: list[httpx.Response] = []

    def first() -> None:
        with httpx.Client(base_url=live.url) as client:
            answers.append(ask(client, part(picture())))

    thread = threading.Thread(target=first)
    thread.start()
    eventually(lambda: live.context.client.num_open == 1)
    with httpx.Client(base_url=live.url) as client:
        said = refusal(ask(client, part(picture()), part(picture())), 429)
        assert "bytes of your images wait" in said
        live.gate.open()
        thread.join()
        assert answers[0].status_code == 200
        gc.collect()
        eventually(lambda: reader._held.of("127.0.0.1") == 0)
        assert ask(client, part(picture())).status_code == 200


def test_who_fetches_much_holds_up_nobody(
    host: int, serve: Callable[..., Live], tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(
        template=TEMPLATE,
        images=preprocessor,
        place="thread",
        tenants=tenants,
        allowed_media_domains=(f"localhost:{host}",),
    )
    monkeypatch.setattr(media, "is_public", lambda _: True)
    base = f"http://localhost:{host}"

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as client:

            def post(key: str, path: str) -> Any:
                messages = [{"role": "user", "content": [part(f"{base}/{path}")]}]
                headers = {"authorization": f"Bearer {key}"}
                body = {"messages": messages, "max_tokens": 1}
                return asyncio.ensure_future(client.post("/v1/chat/completions", json=body, headers=headers))

            waiting = [post("ann-key", f"wait/{number}") for number in range(12)]
            await asyncio.to_thread(eventually, lambda: len(Pages.seen) == 4)
            assert (await post("bob-key", "image")).status_code == 200
            assert len(Pages.seen) == 5
            Pages.go_on.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 12

    asyncio.run(ask_all())
    assert not live.context.model.images._fetches
    live.context.model.images._held = HeldBytes(50_000)
    with httpx.Client(base_url=live.url, headers={"authorization": "Bearer ann-key"}) as client:
        assert "bytes of your images wait" in refusal(ask(client, part(f"{base}/zeros/200000")), 429)


def test_a_client_that_leaves_ends_its_fetch(
    host: int, serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(template=TEMPLATE, images=preprocessor, place="thread", allowed_media_domains=(f"localhost:{host}",))
    monkeypatch.setattr(media, "is_public", lambda _: True)
    reader = live.context.model.images

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=live.url) as client:
            messages = [{"role": "user", "content": [part(f"http://localhost:{host}/wait")]}]
            asking = asyncio.ensure_future(client.post("/v1/chat/completions", json={"messages": messages}))
            await asyncio.to_thread(eventually, lambda: Pages.seen)
            assert reader._held.of("127.0.0.1") > 0
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: reader._held.of("127.0.0.1") == 0 and not reader._fetches)
    live.check_idle()


def test_a_client_that_leaves_stops_its_image(seeing: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = seeing.context.model.images
    asked, stopped, wanted = threading.Event(), threading.Event(), list[bool]()
    decode = reader._decoder.decode

    def slow(*given: Any, is_wanted: Callable[[], bool], **more: Any) -> Any:
        asked.set()
        stopped.wait(PATIENCE_S)
        wanted.append(is_wanted())
        return decode(*given, is_wanted=is_wanted, **more)

    monkeypatch.setattr(reader._decoder, "decode", slow)
    monkeypatch.setattr(reader._decoder, "interrupt", stopped.set)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=seeing.url) as client:
            messages = [{"role": "user", "content": [part(picture())]}]
            asking = asyncio.ensure_future(client.post("/v1/chat/completions", json={"messages": messages}))
            await asyncio.to_thread(asked.wait, 60)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: wanted == [False])
    eventually(lambda: reader._held.of("127.0.0.1") == 0)
    seeing.check_idle()


# -- hand-over -------------------------------------------------------------------------------------------------------------


def test_images_are_handed_over(serve: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends both daemons the same."""
    monkeypatch.setattr(handoff, "LEAST_PATIENCE_S", PATIENCE_S)
    both = {"template": TEMPLATE, "images": preprocessor, "place": "thread", "kv_connector_dir": tmp_path}
    prefill = serve(role="prefill", **both)
    alone, decode = (serve(role="decode", **both) for _ in range(2))

    def asked(live: Live, **fields: Any) -> Any:
        with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
            answer = ask(client, part(picture(96, 96)), text("b" * 20), **fields)
            assert answer.status_code == 200, answer.text
            return answer.json()

    plain = asked(alone)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert prefill.engine.stats.prompt_tokens == 0
    offered = asked(prefill, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    answer = asked(decode, kv_transfer_params=offered)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    assert answer["choices"] == plain["choices"]


def test_images_are_measured_on_the_model_that_is_served(
    seeing: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtest.images.text_of", lambda _, num_words: "x" * num_words)
    assert main(["images", seeing.url, "--side", "8", "--rounds", "1"]) == 0
    assert "first_s" in capsys.readouterr().out
