"""deploy/kubernetes/components/router/quire.conf in nginx: two daemons, and a stand-in for a router that knows chats alone."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from harness import Live

from tests.nginx import CONF, NGINX, nginx
from tests.patience import PATIENCE_S, eventually

KEYS = tuple(f"sk-{number}" for number in range(64))  # so many that each daemon owns one, wherever the hash falls
CHATS = {"/v1/chat/completions", "/v1/completions"}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi|", "max_tokens": 4}}

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is missing: apt-get install nginx-light")


class StandIn(ThreadingHTTPServer):
    """A router in turns, as strict as the real ones: it passes on chats, completions and the one header with the key."""

    def __init__(self, daemons: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.turns = itertools.cycle(daemons)
        self.asked: list[str] = []


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        headers = {"content-type": "application/json", "authorization": self.headers.get("authorization", "")}
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path not in CHATS:
            del headers["authorization"]
        with suppress(httpx.TransportError):
            answer = httpx.post(next(self.server.turns) + self.path, content=body, headers=headers, timeout=PATIENCE_S)
            self.send_response(answer.status_code)
            for name in ("content-type", "content-length"):
                self.send_header(name, answer.headers[name])
            self.end_headers()
            self.wfile.write(answer.content)

    def log_message(self, *args: object) -> None:
        pass


class Fleet:
    """Two daemons, the stand-in and nginx, with the configuration that is shipped."""

    def __init__(self, daemons: list[Live], router: StandIn, url: str) -> None:
        self.daemons, self.router, self.url = daemons, router, url

    def client(self, key: str = KEYS[0]) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def owner_of(self, key: str) -> int:
        """Return which daemon has this key's responses."""
        with self.client(key) as client:
            made = client.post("/v1/responses", json={"input": "hi|", "max_output_tokens": 4}).json()["id"]
            path, headers = f"/v1/responses/{made}", client.headers
        found = [httpx.get(each.url + path, headers=headers).status_code for each in self.daemons]
        assert sorted(found) == [200, 404]
        return found.index(200)

    @cached_property
    def keys(self) -> list[str]:
        """A key of each daemon."""
        owners: dict[int, str] = {}
        for key in KEYS:
            owners.setdefault(self.owner_of(key), key)
            if len(owners) == 2:
                break
        return [owners[0], owners[1]]


@contextmanager
def running(folder: Path, keys: tuple[str, ...] = KEYS) -> Iterator[Fleet]:
    with ExitStack() as stack:
        options = {"api_keys": keys}
        lives = [Live(data_dir=folder / str(place), **options) for place in range(2)]
        for each in lives:
            stack.enter_context(each.serving())
        router = stack.enter_context(StandIn([each.url for each in lives]))
        threading.Thread(target=router.serve_forever, args=(0.02,), daemon=True).start()
        stack.callback(router.shutdown)
        addresses = [each.url.removeprefix("http://") for each in lives]
        url = stack.enter_context(nginx(folder, addresses, f"127.0.0.1:{router.server_port}"))
        yield Fleet(lives, router, url)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("nginx")) as found:
        yield found


def chain(fleet: Fleet, key: str, num: int) -> list[int]:
    """Continue a response again and again; return the number of input tokens of each."""
    sizes, last = [], None
    with fleet.client(key) as client:
        for _ in range(num):
            body = {"input": "a", "max_output_tokens": 4, "previous_response_id": last}
            answer = client.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            last = answer.json()["id"]
            sizes.append(answer.json()["usage"]["input_tokens"])
    return sizes


def test_twenty_responses_follow_one_another(fleet: Fleet) -> None:
    with ThreadPoolExecutor(2) as pool:
        for sizes in pool.map(lambda key: chain(fleet, key, 20), fleet.keys):
            assert len(sizes) == 20
            assert sizes == sorted(set(sizes)), "each has all before it"


def test_files_and_batches_are_found(fleet: Fleet) -> None:
    for key in fleet.keys:
        with fleet.client(key) as client:
            file = ("a.jsonl", json.dumps(LINE).encode())
            uploaded = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"}).json()["id"]
            assert client.get(f"/v1/files/{uploaded}").status_code == 200
            asked = {"input_file_id": uploaded, "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = client.post("/v1/batches", json=asked).json()["id"]
            eventually(lambda c=client, b=batch: c.get(f"/v1/batches/{b}").json()["status"] == "completed")
            result = client.get(f"/v1/batches/{batch}").json()["output_file_id"]
            assert "hi" in client.get(f"/v1/files/{result}/content").text
            assert batch in {each["id"] for each in client.get("/v1/batches").json()["data"]}
            assert client.delete(f"/v1/files/{uploaded}").status_code == 200


def test_chats_and_completions_go_to_the_router_and_nothing_else_does(fleet: Fleet) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    fleet.router.asked.clear()
    with fleet.client() as client:
        for path, body in {
            "/v1/chat/completions": chat,
            "/v1/completions": {"prompt": "hi|"},
            "/v1/messages": chat,
            "/v1/messages/count_tokens": chat,
            "/v1/responses/input_tokens": {"input": "hi"},
            "/tokenize": {"prompt": "hi"},
        }.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        for path in ("/v1/models", "/v1/models/parrot", "/health", "/ready", "/version"):
            assert client.get(path).status_code == 200
    assert fleet.router.asked == ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_the_key_arrives_in_either_header(fleet: Fleet, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    body = {"input": "hi|"} if path == "/v1/responses" else chat
    for headers in ({"authorization": f"bearer  {KEYS[1]}"}, {"x-api-key": KEYS[1]}):
        assert httpx.post(fleet.url + path, json=body, headers=headers).status_code == 200
    for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {}):
        assert httpx.post(fleet.url + path, json=body, headers=headers).status_code == 401


def test_both_headers_have_one_owner(fleet: Fleet) -> None:
    for key in fleet.keys:
        made = httpx.post(fleet.url + "/v1/responses", json={"input": "hi|"}, headers={"x-api-key": key}).json()["id"]
        with fleet.client(key) as client:
            assert client.get(f"/v1/responses/{made}").status_code == 200


def test_events_are_passed_on_as_they_come(fleet: Fleet) -> None:
    allowed = threading.Semaphore(4)
    stepping = fleet.daemons[fleet.owner_of(KEYS[0])].runner
    before, stepping._sleep = stepping._sleep, lambda _: allowed.acquire(timeout=PATIENCE_S)  # type: ignore[assignment]
    body = {"messages": [{"role": "user", "content": "abcdefghijklmnop"}], "max_tokens": 16, "stream": True}
    with fleet.client() as client, client.stream("POST", "/v1/messages", json=body) as answer:
        lines = (line for line in answer.iter_lines() if "text_delta" in line)
        assert "a" in next(lines)  # the engine has made four of the steps
        stepping._sleep = before
        allowed.release(100)
        assert "p" in list(lines)[-1]


def test_what_one_daemon_has_is_refused(fleet: Fleet) -> None:
    with fleet.client() as client:
        for path in ("/metrics", "/load", "/v1/engine/live", "/server_info"):
            answer = client.get(path)
            assert answer.status_code == 404
            assert f"{path} describes or changes one daemon" in answer.json()["error"]["message"]
        assert client.post("/v1/load_lora_adapter", json={}).json()["error"]["code"] == "not_found"


def test_a_large_body_is_not_nginx_to_refuse(fleet: Fleet) -> None:
    with fleet.client() as client:
        upload = {"file": ("a.jsonl", json.dumps(LINE).encode() + b"\n" + b" " * (4 << 20))}
        answer = client.post("/v1/files", files=upload, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text


def test_without_keys_the_address_decides(tmp_path: Path) -> None:
    with running(tmp_path, keys=()) as fleet:
        assert len(chain(fleet, "", 20)) == 20
        with fleet.client("") as client:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200


def test_a_daemon_that_is_gone(tmp_path: Path) -> None:
    """New work goes to the other one; what it stores is a 503, not another daemon's 404."""
    with Live(api_keys=KEYS, data_dir=tmp_path / "data").serving() as live, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # so that no other process listens on its port
        addresses = [live.url.removeprefix("http://"), f"127.0.0.1:{gone.getsockname()[1]}"]
        with nginx(tmp_path, addresses, addresses[1]) as url:
            stored: list[httpx.Response] = []
            for key in KEYS:
                headers = {"authorization": f"Bearer {key}"}
                answer = httpx.post(f"{url}/v1/responses", json={"input": "hi|"}, headers=headers)
                assert answer.status_code == 200
                stored.append(httpx.get(f"{url}/v1/files", headers=headers))
                if {each.status_code for each in stored} == {200, 503}:
                    break
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hi|"}, headers=headers)
    assert {each.status_code for each in stored} == {200, 503}
    lost = [each for each in [*stored, answer] if each.status_code == 503]
    assert all(each.json()["error"]["code"] == "daemon_lost" for each in lost)
    assert all(each.headers["retry-after"] == "1" for each in lost)
    assert answer.status_code == 503


def test_the_daemons_are_the_same_in_both_lists() -> None:
    """The hash of a key finds the same one only if they are in the same words."""
    blocks = dict(re.findall(r"upstream (\w+) \{(.*?)\n\}", CONF.read_text(), re.DOTALL))
    owners, stores = (re.findall(r"server (\S+)", blocks[name]) for name in ("quire_owner", "quire_store"))
    assert owners == stores
