"""Host and Origin: what a web page that is not allowed in gets, and everybody else. Raw sockets where clients tidy up."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from harness import Live, eventually

from server.settings.origins import Authority, is_same_origin, names_host, names_origin
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
COMPLETION = {"prompt": "hello|", "max_tokens": 3}
TENANTS = "tenants: [{name: a, key: secret}]"


def exchange(live: Live, *lines: str, version: str = "1.1", target: str = "GET /v1/models") -> tuple[int, str]:
    """The status and the body of what is answered to a request of these header lines."""
    host, port = live.url.removeprefix("http://").split(":")
    raw = "\r\n".join([f"{target} HTTP/{version}", *lines, "connection: close", "", ""])
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(raw.encode("latin-1"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def code_of(body: str) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8000", "127.0.0.1:", "192.168.1.5:80", "10.0.0.1", "8.8.8.8", "127.0.0.1.", "127.1", "0:8000",
        "0x7f000001", "[::1]", "[::1]:8000", "[fe80::1]", "[2001:DB8::1]:8000", "[::ffff:127.0.0.1]",
        "localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "a.b.localhost.:9", "",
    ],
)  # fmt: skip
def test_addresses_and_loopback_names_are_answered(live: Live, host: str) -> None:
    assert exchange(live, f"host: {host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "EVIL.example:8000", "evil.example.", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example",
        "1.2.3.4.5", "quire", "a_b", "localhost.localdomain", "127.0.0.1.nip.io", "256.1.1.1",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "target", ["GET /v1/models", "GET /", "GET /metrics", "POST /v1/completions", "HEAD /v1/files"]
)
def test_other_names_are_refused_on_every_path_that_tells_something(live: Live, host: str, target: str) -> None:
    status, body = exchange(live, f"host: {host}", target=target)
    assert status == 403
    if not target.startswith("HEAD"):
        assert code_of(body) == "host_not_allowed"
        assert f"--allowed-hosts {host.lower().partition(':')[0].removesuffix('.')}," in body


@pytest.mark.parametrize(
    "host",
    [
        "[evil.example]", "[::1", "::1", "[]", "a b", "localhost/", "evil.example@127.0.0.1", "127.0.0.1, evil.example", "[::1]x",
        "localhost:80:80", "localhost:x", "[::1%25lo]", "*", "é", ".", ":8000", "\u00a0localhost", "http://localhost",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(live: Live, host: str) -> None:
    status, body = exchange(live, f"host: {host}")
    assert (status, code_of(body)) == (400, "invalid_host")


def test_several_hosts_are_refused_and_none_is_no_browsers(live: Live) -> None:
    status, body = exchange(live, "host: 127.0.0.1", "host: 127.0.0.1")
    assert (status, code_of(body)) == (400, "invalid_host")
    assert exchange(live, "host: evil.example", "host: 127.0.0.1")[0] == 400
    for version in ("1.0", "1.1"):
        assert exchange(live, version=version)[0] == 200
        assert exchange(live, "host: evil.example", version=version)[0] == 403


def test_an_absolute_target_goes_before_host(live: Live) -> None:
    evil, own = "GET http://evil.example/v1/models", "GET http://127.0.0.1:8000/v1/models"
    assert exchange(live, "host: 127.0.0.1", target=evil)[0] == 403
    assert exchange(live, "host: evil.example", target=own)[0] == 200
    assert exchange(live, "host: 127.0.0.1", target="GET HTTP://evil.example:80/v1/models?x=//127.0.0.1/")[0] == 403
    assert exchange(live, "host: 127.0.0.1", target="GET http://127.0.0.1@evil.example/v1/models")[0] == 400
    assert exchange(live, "host: evil.example", target="GET /v1/models?x=http://127.0.0.1/")[0] == 403
    for odd in ("GET http://evil.example", "CONNECT evil.example:80", "GET *", "GET evil.example/v1/models"):
        assert exchange(live, "host: 127.0.0.1", target=odd)[0] >= 400, odd
    assert exchange(live, "host: evil.example", target="OPTIONS *")[0] == 403


def test_probes_may_ask_by_any_name(live: Live) -> None:
    for path in ("/health", "/ready", "/health/"):
        assert exchange(live, "host: quire.default.svc", target=f"GET {path}")[0] == 200
    unknown = httpx.get(f"{live.url}/health", params={"model": "x"}, headers={"host": "evil.example"})
    assert (unknown.status_code, "parrot" in unknown.text) == (404, False), "a probe's caller learns only a status"


def test_names_may_be_allowed(serve: Serve) -> None:
    live = serve(allowed_hosts=("quire", "*.example.com"))
    for host in ("quire", "QUIRE.:8000", "a.example.com", "a.b.example.com"):
        assert exchange(live, f"host: {host}")[0] == 200
    for host in ("example.com", "evilexample.com", "quire.evil.example", "xquire"):
        assert exchange(live, f"host: {host}")[0] == 403
    assert exchange(serve(allowed_hosts=("*",)), "host: evil.example")[0] == 200


def test_with_a_key_any_name_is_answered(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(TENANTS, encoding="utf-8")
    for live in (serve(api_keys=("secret",)), serve(tenants=tmp_path / "tenants.yaml")):
        assert exchange(live, "host: evil.example")[0] == 401
        assert exchange(live, "host: evil.example", "authorization: Bearer secret")[0] == 200


def send(live: Live, method: str = "POST", path: str = "/v1/completions", **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, live.url + path, json=COMPLETION if method == "POST" else None, headers=names)


@pytest.fixture(scope="module", params=[(), ("secret",)], ids=["no key", "a key"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Live]:
    with Live(api_keys=request.param).serving() as live:
        yield live


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "chrome-extension://abc"},
        {"origin": "file://"},
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": "https://evil.example", "sec_fetch_site": "none"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_what_pages_of_other_origins_send_changes_nothing(attacked: Live, headers: dict[str, str]) -> None:
    live = attacked
    if live.context.config.api_keys:
        headers = {**headers, "authorization": "Bearer secret"}
    for method, path in (("POST", "/v1/completions"), ("DELETE", "/v1/responses/x"), ("POST", "/v1/files")):
        refused = send(live, method, path, **headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "origin_not_allowed"
        shown = headers.get("origin", "null")
        assert f"--allowed-origins {shown}." in refused.json()["error"]["message"]
    assert live.engine.stats.generation_tokens == 0
    assert send(live, "GET", "/v1/models", **headers).status_code == 200, "reading is the browser's to refuse"
    assert "access-control-allow-origin" not in send(live, "GET", "/v1/models", **headers).headers


def test_what_the_own_page_and_programs_send_is_answered(serve: Serve) -> None:
    live = serve()
    port = live.url.rpartition(":")[2]
    for headers in (
        {},
        {"origin": live.url},
        {"origin": live.url, "sec_fetch_site": "same-origin"},
        {"origin": "https://quire.example", "sec_fetch_site": "same-origin"},  # a proxy that changes Host
        {"origin": f"https://127.0.0.1:{port}"},  # a proxy that speaks TLS
        {"origin": f"http://LOCALHOST.:{port}".lower(), "host": f"localhost:{port}"},
        {"origin": "https://[::1]", "host": "[::1]:443"},
        {"origin": "http://[::1]", "host": "[0:0::1]:80"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_mode": "cors"},  # fetch outside of browsers sends nothing else
    ):
        assert send(live, **headers).status_code == 200, headers
    assert send(live, origin="null", sec_fetch_site="same-origin").status_code == 200


def test_a_second_host_is_not_the_own_origin(serve: Serve) -> None:
    live = serve(api_keys=("secret",))  # with a key any host is answered, but none of two is the page's
    host = live.url.removeprefix("http://")
    lines = (f"host: {host}", "host: evil.example", f"origin: {live.url}", "authorization: Bearer secret")
    assert exchange(live, *lines, "content-length: 0", target="POST /v1/completions")[0] == 403


def test_a_second_origin_or_site_helps_nobody(live: Live) -> None:
    own, length = f"origin: {live.url}", "content-length: 0"
    host = f"host: {live.url.removeprefix('http://')}"
    target = "POST /v1/completions"
    assert exchange(live, host, length, own, target=target)[0] == 400, "no body: but it was let in"
    assert exchange(live, host, length, own, "origin: https://evil.example", target=target)[0] == 403
    sites = ("sec-fetch-site: same-origin", "sec-fetch-site: cross-site")
    assert exchange(live, host, length, *sites, target=target)[0] == 403


ALLOWED = ("https://chat.example", "http://localhost:3000", "tauri://localhost", "chrome-extension://*")


@pytest.mark.parametrize("origin", [*ALLOWED[:3], "chrome-extension://abcdefghijklmnop"])
def test_origins_that_are_allowed_may_ask_and_read(serve: Serve, origin: str) -> None:
    live = serve(allowed_origins=ALLOWED)
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "content-type,authorization"}
    preflight = send(live, "OPTIONS", origin=origin, access_control_request_private_network="true", **asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-headers"] == "content-type,authorization"
    assert preflight.headers["access-control-allow-private-network"] == "true"
    answered = send(live, origin=origin, sec_fetch_site="cross-site")
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, origin)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "https://chat.example.evil", "http://chat.example", "tauri://other", "null", "x://*"],
)
def test_others_are_refused_their_preflight_too(serve: Serve, live: Live, origin: str) -> None:
    for other in (serve(allowed_origins=ALLOWED), live):
        preflight = send(other, "OPTIONS", origin=origin, access_control_request_method="POST")
        assert (preflight.status_code, preflight.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in preflight.headers
        assert send(other, origin=origin).status_code == 403


def test_a_star_allows_every_origin_but_no_other_host(serve: Serve) -> None:
    live = serve(allowed_origins=("*",))
    for origin in ("https://a.example", "null", "moz-extension://x"):
        answered = send(live, origin=origin, sec_fetch_site="cross-site")
        assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (200, "*")
    assert send(live, origin="https://a.example", host="evil.example").status_code == 403


def test_a_refusal_reads_no_body_is_logged_and_is_in_anthropics_words_there(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    live = serve()
    caplog.set_level("INFO", logger="server.http.middleware")
    refused = send(live, path="/v1/messages", origin="https://evil.example")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert refused.headers["x-request-id"]
    eventually(lambda: bool(caplog.records))  # logged once the answer is sent
    assert [vars(record)["status"] for record in caplog.records] == [403]
    upload = ("host: 127.0.0.1", "origin: null", "content-length: 1000000")  # of which nothing is sent
    assert exchange(live, *upload, target="POST /v1/files")[0] == 403


@pytest.mark.parametrize(
    ("text", "host", "port", "is_address"),
    [
        ("Quire:80", "quire", "80", False), ("[::0001]:1", "[::1]", "1", True), ("1.2.3.4", "1.2.3.4", "", True),
        ("1.2.3.4.", "1.2.3.4", "", True), ("a-b_c.d", "a-b_c.d", "", False),
    ],
)  # fmt: skip
def test_authorities(text: str, host: str, port: str, is_address: bool) -> None:
    assert Authority.parse(text) == (host, port, is_address)


def test_what_names_what() -> None:
    assert is_same_origin("https://a", "a:443")
    assert not is_same_origin("https://a", "a:80")
    assert not is_same_origin("https://a", "b")
    assert not is_same_origin("tauri://a", "a")
    assert not is_same_origin("null", "null")
    assert names_host(["*.b.c"], "a.b.c")
    assert not names_host(["*.b.c"], "b.c")
    assert names_origin(["tauri://*"], "tauri://localhost")
    assert not names_origin(["tauri://*"], "tauri")


def test_compose_answers_to_the_name_that_prometheus_asks_by() -> None:
    root = Path(__file__).parents[2]
    services = yaml.safe_load((root / "docker-compose.yml").read_text())["services"]
    scraped = yaml.safe_load((root / "monitoring/prometheus.compose.yml").read_text())["scrape_configs"]
    (target,) = scraped[0]["static_configs"][0]["targets"]
    for name in ("quire-gpu", "quire-cpu"):
        allowed = services[name]["environment"]["QUIRE_ALLOWED_HOSTS"].partition("$")[0].split(",")
        assert {target.partition(":")[0], name} <= set(allowed)
