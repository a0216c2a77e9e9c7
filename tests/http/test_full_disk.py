"""A full disk is a 507 that reaches the client, whatever is being written and however the client sends."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from harness import Live, eventually

from server.batches.dispatch import new_file_id
from server.batches.folder import DataFolder, NewFile
from server.http import connection
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
LARGE = 30_000_000  # more than the sockets of both sides hold


def form(num_bytes: int) -> bytes:
    head = b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--B\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    return head + b"x" * num_bytes + b"\r\n--B--\r\n"


def connect(live: Live) -> closing[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    return closing(socket.create_connection((host, int(port)), timeout=PATIENCE_S))


def head(path: str, num_bytes: int, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: multipart/form-data; boundary=B", *headers)
    return "\r\n".join((*lines, f"content-length: {num_bytes}", "", "")).encode()


def answer(sock: socket.socket) -> bytes:
    """All of one answer with a JSON body."""
    data = b""
    while not data.endswith(b"}}"):
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


def upload(live: Live, num_bytes: int) -> httpx.Response:
    files = {"file": ("x.jsonl", b"x" * num_bytes), "purpose": (None, "batch")}
    return httpx.post(f"{live.url}/v1/files", files=files)


def create(live: Live, file_id: str) -> httpx.Response:
    metadata = {f"key{i}": "v" * 500 for i in range(16)}
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", "metadata": metadata}
    return httpx.post(f"{live.url}/v1/batches", json=body)


def check_full(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (507, "insufficient_storage")


# -- a real disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (folder / "fill").open("wb", buffering=0) as file:  # noqa: PT012
        while True:
            file.write(bytes(4096))


def test_everything_on_a_full_disk_is_a_507_and_goes_on_when_there_is_room(serve: Serve, small_disk: Path) -> None:
    live = serve(data_dir=small_disk / "data")
    kept = upload(live, 10_000).json()["id"]
    check_full(upload(live, 5_000_000))
    fill(small_disk)
    check_full(create(live, kept))
    check_full(upload(live, 10))
    assert [path.name for path in (small_disk / "data/files").iterdir()] == [kept], "no half of a file is left"
    assert httpx.get(f"{live.url}/v1/batches").json()["data"] == []
    deleted = httpx.delete(f"{live.url}/v1/files/{kept}")
    assert deleted.status_code == 200, "that makes room"
    (small_disk / "fill").unlink()
    again = upload(live, 10_000).json()["id"]
    assert create(live, again).status_code == 200


@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive", "expect: 100-continue"])
def test_the_507_reaches_a_client_that_sends_all_before_it_reads(serve: Serve, small_disk: Path, header: str) -> None:
    live = serve(data_dir=small_disk / "data")
    body = form(LARGE)
    with connect(live) as sock:
        sock.sendall(head("/v1/files", len(body), header) + body)
        assert b" 507 " in answer(sock)


# -- without one -------------------------------------------------------------------------------------------------------


def test_a_database_that_cannot_grow_is_a_507(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path)
    kept = upload(live, 10).json()["id"]
    live.context.batches.store._store._db.execute("PRAGMA max_page_count = 1")  # as many as it has
    for _ in range(100):
        response = create(live, kept)
        if response.status_code != 200:
            break
    check_full(response)
    files = {path.name for path in (tmp_path / "files").iterdir()}
    while (response := upload(live, 10)).status_code == 200:
        files.add(response.json()["id"])
    check_full(response)
    assert {path.name for path in (tmp_path / "files").iterdir()} == files, "what is not known takes no room"


def test_a_deletion_that_was_cut_short_can_be_repeated(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path)
    file_id = upload(live, 10).json()["id"]
    (tmp_path / "files" / file_id).unlink()
    assert httpx.get(f"{live.url}/v1/files/{file_id}/content").status_code == 404
    assert httpx.delete(f"{live.url}/v1/files/{file_id}").status_code == 200
    assert httpx.get(f"{live.url}/v1/files").json()["data"] == []


def test_a_draft_whose_last_bytes_have_no_room_is_gone(tmp_path: Path) -> None:
    """They are written when it is closed, which fails again."""
    folder = DataFolder(tmp_path)
    file = NewFile(folder.path_of(new_file_id()))
    file._file.close()
    file._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the draft closes it
    with pytest.raises(OSError, match="No space left"), file:  # noqa: PT012
        file.write(b"some")
        file.keep()
    assert list((tmp_path / "files").iterdir()) == []
    folder.close()


# -- an answer before the request's end --------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
@pytest.mark.parametrize("status", [401, 413])
def test_a_refusal_reaches_a_client_that_sends_all_before_it_reads(serve: Serve, header: str, status: int) -> None:
    live = serve(max_body_bytes=1000) if status == 413 else serve(api_keys=("k",))
    with connect(live) as sock:
        sock.sendall(head("/v1/completions", LARGE, header) + b"x" * LARGE)
        assert b" %d " % status in answer(sock)
        if "close" in header:
            assert sock.recv(1) == b""
        else:  # the connection is as good as new
            sock.sendall(head("/v1/completions", 1, header) + b"x")
            assert b"HTTP/1.1 4" in answer(sock)


@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
def test_the_rest_of_an_answered_request_is_not_waited_for_without_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    live = serve(max_body_bytes=1000)
    with connect(live) as sock:
        sock.sendall(head("/v1/completions", LARGE, header) + b"x" * 10)
        assert b" 413 " in answer(sock)
        assert sock.recv(1) == b""


def test_a_client_that_leaves_after_its_answer_leaves_nothing(serve: Serve) -> None:
    live = serve(max_body_bytes=1000)
    with connect(live) as sock:
        sock.sendall(head("/v1/completions", LARGE) + b"x" * 10)
        assert b" 413 " in answer(sock)
    eventually(lambda: httpx.get(f"{live.url}/load").json()["server_load"] == 0)
