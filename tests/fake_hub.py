"""A small model hub on loopback: the HTTP API that Quire uses of one, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".bin")  # stored as the hub's large files: elsewhere, behind a redirection


@dataclass
class FakeHub:
    """Its repositories, its faults, and the requests it has had."""

    url: str = ""
    repos: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str | None = None  # the only one that may read
    # What befalls the next requests for a file, or for the "listing": a status, "hang", "html", "no range",
    # ("cut", N): the connection ends after N bytes; ("size", N): the file has N bytes instead; ("content", BYTES):
    # these come instead.
    faults: dict[str, list[Any]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # "listing", "config.json", "model.gguf 100-"
    authorizations: set[str | None] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)

    def fault(self, name: str) -> Any:
        """Return what befalls this request for a file."""
        return self.faults[name].pop(0) if self.faults.get(name) else None

    def named(self, repo: str) -> list[str]:
        """Return the files that were asked for, without ranges."""
        return sorted({request.split()[0] for request in self.requests} - {"listing"})


def digest(content: bytes) -> str:
    """The digest of a large file."""
    return hashlib.sha256(content).hexdigest()


def git_digest(content: bytes) -> str:
    """The digest of any other file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def refusing_url() -> Iterator[str]:
    """Yield the URL of a port that refuses connections: it is bound, but no server listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub until the end of the block."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.block_on_close = False
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.authorizations.add(self.headers["Authorization"])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._list(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._content(found[1], found[2])
        else:
            self._refuse(404)

    def _list(self, repo: str, revision: str | None) -> None:
        self.hub.requests.append("listing")
        if self._is_faulty("listing"):
            return
        if repo not in self.hub.repos or not self._may_read():
            self._refuse(404 if self.headers["Authorization"] else 401, "RepoNotFound")
        elif revision not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            files = [self._sibling(name, content) for name, content in self.hub.repos[repo].items()]
            self._send(json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode())

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        size = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
        if name.endswith(LARGE):
            size["lfs"] = {"sha256": digest(content), "size": len(content), "pointerSize": 1}
        return size

    def _file(self, repo: str, name: str) -> None:
        if repo in self.hub.gated:
            self.hub.requests.append(name)
            return self._refuse(403 if self.headers["Authorization"] else 401, "GatedRepo")
        if name not in self.hub.repos.get(repo, {}):
            self.hub.requests.append(name)
            return self._refuse(404, "EntryNotFound")
        if not name.endswith(LARGE):
            return self._content(repo, name)
        content = self.hub.repos[repo][name]
        self.send_response(302)
        self.send_header("Location", f"{self.hub.url}/cdn/{repo}/{name}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{digest(content)}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _content(self, repo: str, name: str) -> None:
        content = self.hub.repos[repo][name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if self.command == "GET":
            self.hub.requests.append(name if asked is None else f"{name} {asked[1]}-{asked[2]}")
        fault = self.hub.fault(name) if self.command == "GET" else None
        if isinstance(fault, int):
            return self._refuse(fault)
        if fault is not None and fault[0] == "size":
            content = content[: fault[1]].ljust(fault[1], b"?")
        if fault is not None and fault[0] == "content":
            content = fault[1]
        cut = fault[1] if fault is not None and fault[0] == "cut" else None
        if asked is None or fault == "no range":
            return self._send(content, etag=git_digest(content), sent=cut)
        start, end = int(asked[1]), int(asked[2] or len(content) - 1)
        stated = f"bytes {start}-{min(end, len(content) - 1)}/{len(content)}"
        return self._send(content[start : end + 1], 206, stated, sent=cut)

    def _send(
        self, content: bytes, status: int = 200, content_range: str = "", *, etag: str = "", sent: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        if content_range:
            self.send_header("Content-Range", content_range)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        if sent is not None:
            self.close_connection = True

    def _may_read(self) -> bool:
        return self.hub.token is None or self.headers["Authorization"] == f"Bearer {self.hub.token}"

    def _is_faulty(self, name: str) -> bool:
        """Answer with the fault that is due, if there is one."""
        fault = self.hub.fault(name)
        if fault == "hang":
            self.hub.released.wait()
            self.close_connection = True
        elif fault == "html":
            self._send(b"<html>Sign in to the network</html>")
        elif isinstance(fault, int):
            self._refuse(fault)
        return fault is not None

    def _refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def folder_of(path: Path) -> dict[str, bytes]:
    """Return the files of a model folder, as a repository holds them."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
