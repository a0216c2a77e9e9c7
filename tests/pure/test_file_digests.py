"""Digests of files: what they are, what is kept of them, and what is not believed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from engine.core.errors import ModelLoadError
from engine.files import file_digests
from engine.files.file_digests import FileDigests
from tests.patience import eventually

PIECE = 100


@contextmanager
def no_room() -> Iterator[None]:
    """Let files grow to ten bytes only; more fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that keeps digests; every file counts as settled."""
    monkeypatch.setattr(file_digests, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(file_digests, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(file_digests, "_READ_BYTES", 7)
    monkeypatch.setattr(file_digests, "_TICK_NS", -(10**18))
    return tmp_path / "cache" / "digests.json"


def digest(path: Path) -> str:
    return FileDigests([path]).get()[path]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def rewrite(path: Path, content: bytes) -> None:
    """Write other content in place and set the times back; the time of change cannot be."""
    before = path.stat()

    def is_noticed() -> bool:  # the clock of files stands still for some milliseconds
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return path.stat().st_ctime_ns != before.st_ctime_ns

    eventually(is_noticed)


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "_piece", lambda path, *_: pytest.fail(f"{path} is read"))


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3])
def test_a_digest_is_of_all_bytes_whatever_the_threads(tmp_path: Path, size: int) -> None:
    content = bytes(i * i % 251 for i in range(size))
    pieces = [content[at : at + PIECE] for at in range(0, max(size, 1), PIECE)]
    head = f"quire {file_digests._VERSION} {PIECE} {size} ".encode()
    expected = sha256(head + b"".join(sha256(piece).digest() for piece in pieces)).hexdigest()
    paths = [written(tmp_path / str(each), content) for each in range(3)]
    assert FileDigests(paths).get() == dict.fromkeys(paths, expected)
    for at in {0, size // 2, size - 1} if size else ():
        other = bytearray(content)
        other[at] ^= 1
        assert digest(written(tmp_path / "other", bytes(other))) != expected


def test_a_file_is_read_once_and_a_copy_has_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a", b"x" * 250)
    first = digest(path)
    copy = Path(shutil.copy2(path, tmp_path / "b"))
    assert digest(copy) == first
    (tmp_path / "link").symlink_to(path)
    no_reading(monkeypatch)
    assert digest(path) == digest(copy) == digest(tmp_path / "link") == first


def test_other_content_with_the_same_size_and_times_has_another_digest(tmp_path: Path) -> None:
    path = written(tmp_path / "a", b"x" * 250)
    first = digest(path)
    rewrite(path, b"x" * 249 + b"y")
    assert digest(path) != first
    written(tmp_path / "b", b"z" * 250).replace(path)
    assert digest(path) == digest(written(tmp_path / "c", b"z" * 250))


def test_what_may_change_unnoticed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(file_digests, "_TICK_NS", 10**18)
    digest(written(tmp_path / "a", b"x"))
    assert not cache.exists()


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"version": 1}', b'{"version": 1, "digests": [1]}',
        b'{"version": 99, "digests": {"KEY": "wrong"}}', b'{"version": 1, "digests": {"KEY": 5}}',
        b'{"version": 1, "digests": {"KEY": "wrong"}}' + b" " * (1 << 20), "mode", "fifo", "folder",
    ],
)  # fmt: skip
def test_a_cache_that_is_damaged_or_open_to_others_is_not_believed(
    tmp_path: Path, cache: Path, damage: bytes | str
) -> None:
    path = written(tmp_path / "a", b"x" * 250)
    right = digest(path)
    [key] = json.loads(cache.read_bytes())["digests"]
    if damage == "mode":
        cache.write_text(json.dumps({"version": 1, "digests": {key: "wrong"}}))
        cache.chmod(0o666)
    else:
        cache.unlink()
        if damage == "fifo":
            os.mkfifo(cache)
        elif damage == "folder":
            cache.mkdir()
        else:
            assert isinstance(damage, bytes)
            cache.write_bytes(damage.replace(b"KEY", key.encode()))
    assert digest(path) == right


def test_the_cache_is_bounded_and_private(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "_MAX_KEPT", 3)
    paths = [written(tmp_path / str(each), bytes([each])) for each in range(7)]
    for path in paths:
        digest(path)
    assert len(json.loads(cache.read_bytes())["digests"]) == 3
    assert [cache.stat().st_mode & 0o777, cache.parent.stat().st_mode & 0o777] == [0o600, 0o700]
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]
    no_reading(monkeypatch)
    FileDigests(paths[4:]).get()


def test_a_full_disk_keeps_no_part_of_a_cache(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "a", b"x" * 9)
    with no_room():
        right = digest(path)
    assert list(cache.parent.iterdir()) == []
    assert digest(path) == right
    assert list(cache.parent.iterdir()) == [cache]


def test_a_cache_that_cannot_be_written_costs_a_reading(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file in place of the folder")
    path = written(tmp_path / "a", b"x")
    assert digest(path) == digest(path)


@pytest.mark.parametrize("when", ["before", "while", "after", "kept"])
@pytest.mark.parametrize("how", ["rewritten", "replaced", "cut", "removed"])
def test_a_file_that_changes_while_a_model_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, how: str
) -> None:
    path, piece = written(tmp_path / "a", b"x" * 250), file_digests._piece
    changed = threading.Lock()

    def change() -> None:
        if changed.acquire(blocking=False):
            if how == "rewritten":
                rewrite(path, b"y" * 250)
            elif how == "replaced":
                written(tmp_path / "b", b"x" * 250).replace(path)
            elif how == "cut":
                path.write_bytes(b"x" * 99)
            else:
                path.unlink()

    def around(*args: object) -> bytes:
        found = piece(*args)  # type: ignore[arg-type]
        change()
        return found

    if when == "kept":
        digest(path)
    digests = FileDigests([path])
    if when == "while":
        monkeypatch.setattr(file_digests, "_piece", around)
    if when == "after":
        digests.begin()
        wait(digests._pieces[path])
    if when != "while":
        change()
    with pytest.raises(ModelLoadError, match=r"changed while it was being loaded; start again|No such file"):
        digests.get()


@pytest.mark.parametrize("kind", ["absent", "fifo", "folder"])
def test_what_is_no_file_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ModelLoadError, match=r"a cannot be read: .*\."):
        FileDigests([path])


def test_stop_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "usable_cpus", lambda: 4)
    digests = FileDigests([written(tmp_path / "a", bytes(50 * PIECE))])
    digests.begin()
    digests.stop()
    assert not any(thread.name.startswith("file-digests") for thread in threading.enumerate())
