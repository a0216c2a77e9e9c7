"""Web pages of other sites in a real browser: what they can read of the daemon, and what they can make it do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM
from tests.http.harness import Live, eventually
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
NAMES = "MAP evil.example 127.0.0.1, MAP quire.example 127.0.0.1"  # what DNS says, an attacker's or our own

# Everything that a page can try; "opaque" is an answer that it may not read, "failed" none at all.
ATTEMPTS = """async url => {
  const attempt = async (path, options) => {
    try {
      const answer = await fetch(url + path, options);
      return answer.type === "opaque" ? "opaque" : answer.status + " " + (await answer.text()).slice(0, 2000);
    } catch (error) {
      return "failed";
    }
  };
  const body = JSON.stringify({ prompt: "hello|", max_tokens: 5 });
  const line = JSON.stringify({
    custom_id: "a", method: "POST", url: "/v1/completions", body: { prompt: "x", max_tokens: 1 },
  });
  const form = () => {
    const data = new FormData();
    data.append("purpose", "batch");
    data.append("file", new Blob([line]), "stolen.jsonl");
    return data;
  };
  const json = { "content-type": "application/json" };
  return {
    read: await attempt("/v1/models", {}),
    metrics: await attempt("/metrics", {}),
    files: await attempt("/v1/files", {}),
    ask: await attempt("/v1/completions", { method: "POST", headers: json, body }),
    askBlindly: await attempt("/v1/completions", { method: "POST", mode: "no-cors", body }),
    upload: await attempt("/v1/files", { method: "POST", body: form() }),
    uploadBlindly: await attempt("/v1/files", { method: "POST", mode: "no-cors", body: form() }),
    uploadUnnamed: await attempt("/v1/files", {
      method: "POST", mode: "no-cors", body: form(), referrerPolicy: "no-referrer",
    }),
    remove: await attempt("/v1/files/file-1", { method: "DELETE" }),
  };
}"""
FORM = """url => {
  document.body.innerHTML = `<form method="post" enctype="multipart/form-data" action="${url}/v1/files">
    <input name="purpose" value="batch"><input name="file" type="file"></form>`;
  const files = new DataTransfer();
  files.items.add(new File(["{}"], "stolen.jsonl"));
  document.querySelector("[type=file]").files = files.files;
  document.querySelector("form").submit();
}"""
SANDBOX = """url => {
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-forms allow-scripts";
  frame.srcdoc = `<form method="post" enctype="text/plain" action="${url}/v1/completions"><input name='{"prompt":"x' value='"}'>
    </form><script>document.querySelector("form").submit();</script>`;
  document.body.append(frame);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for which two names are this machine."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: no chromium is installed (on Debian: apt-get install chromium)")
    options: dict[str, Any] = {"executable_path": CHROMIUM, "args": [f"--host-resolver-rules={NAMES}"]}
    with sync_playwright() as playwright, playwright.chromium.launch(**options) as launched:
        yield launched


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context() as context:
        opened = context.new_page()
        opened.set_default_timeout(PATIENCE_S * 1000)
        yield opened


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>A page</title><body>")

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """The port of another web server on this machine, with an empty page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def port(live: Live) -> str:
    return live.url.rpartition(":")[2]


def num_files(live: Live) -> int:
    return len(httpx.get(live.url + "/v1/files").json()["data"])


def num_refused(live: Live) -> int:
    """POSTs that were answered with a 403."""
    line = 'quire_http_requests_total{method="POST",route="unmatched",status="403"} '
    found = [
        each.removeprefix(line) for each in httpx.get(live.url + "/metrics").text.splitlines() if each.startswith(line)
    ]
    return int(float(found[0])) if found else 0


def test_a_rebound_name_reads_and_changes_nothing(serve: Serve, page: Page, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path)
    answered = page.goto(f"http://evil.example:{port(live)}/")
    assert answered is not None
    assert answered.status == 403
    assert answered.json()["error"]["code"] == "host_not_allowed"
    found = page.evaluate(ATTEMPTS, "")
    assert {name: said[:3] for name, said in found.items()} == dict.fromkeys(found, "403")
    assert num_files(live) == 0
    assert live.engine.stats.generation_tokens == 0


def test_a_name_that_is_allowed_serves_the_page_and_the_api(serve: Serve, page: Page, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, allowed_hosts=("quire.example",))
    page.goto(f"http://quire.example:{port(live)}/")
    found = page.evaluate(ATTEMPTS, "")
    assert found.pop("remove").startswith("404")
    assert found.pop("askBlindly").startswith("400"), "let in, but its content type is not JSON's"
    assert {name: said[:3] for name, said in found.items()} == dict.fromkeys(found, "200")
    assert num_files(live) == 3


@pytest.mark.parametrize("name", ["evil.example", "localhost", "127.0.0.1"])
def test_a_page_of_another_origin_reads_and_changes_nothing(
    serve: Serve, page: Page, site: int, tmp_path: Path, name: str
) -> None:
    """The same machine on another port is another origin, though the same site."""
    live = serve(data_dir=tmp_path)
    page.goto(f"http://{name}:{site}/")
    found = page.evaluate(ATTEMPTS, live.url)
    blind = {"askBlindly", "uploadBlindly", "uploadUnnamed"}
    assert found == {attempt: "opaque" if attempt in blind else "failed" for attempt in found}
    eventually(lambda: num_refused(live) == 4)
    page.evaluate(SANDBOX, live.url)
    eventually(lambda: num_refused(live) == 5)
    page.evaluate(FORM, live.url)
    eventually(lambda: num_refused(live) == 6)
    assert num_files(live) == 0
    assert live.engine.stats.generation_tokens == 0


def test_an_origin_that_is_allowed_asks_and_reads(serve: Serve, page: Page, site: int, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, allowed_origins=(f"http://evil.example:{site}",))
    page.goto(f"http://evil.example:{site}/")
    found = page.evaluate(ATTEMPTS, live.url)
    assert found["ask"].startswith("200")
    assert '"text":"hello"' in found["ask"]
    assert found["remove"].startswith("404")
    readable = ("read", "metrics", "files", "ask", "upload")
    assert {name: found[name][:3] for name in readable} == dict.fromkeys(readable, "200")
    assert num_files(live) >= 2, "a browser may send the third without its origin"
    other = page.context.new_page()
    other.goto(f"http://localhost:{site}/")
    assert other.evaluate(ATTEMPTS, live.url)["ask"] == "failed"


def test_the_daemons_own_page_works_by_each_of_its_names(serve: Serve, page: Page) -> None:
    live = serve(allowed_hosts=("quire.example",))
    for name in ("127.0.0.1", "localhost", "quire.example"):
        page.goto(f"http://{name}:{port(live)}/")
        box = page.get_by_label("Message", exact=True)
        box.fill("hello")
        box.press("Enter")
        expect(page.locator(".answer .text").last).to_have_text("hello")
    eventually(lambda: live.context.client.num_open == 0)
