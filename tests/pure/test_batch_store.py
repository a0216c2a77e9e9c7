"""The work queue of batches: what is taken, recorded, given back, and what a daemon that was killed leaves behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from engine.core.errors import ConfigError
from engine.core.stats import Stats
from server.batches.dispatch import Dispatcher, write_files
from server.batches.folder import DataFolder, NewFile
from server.batches.lines import Line
from server.batches.objects import Batch, BatchStatus, FileObject, Purpose
from server.batches.store import COMPLETED, FAILED, Outcome, PendingLine, Result, Store, StoreThread
from server.batches.worker import BatchWorker
from server.http.bodies import BodyReader
from server.openai.batches import cancel_batch
from server.tenancy.tenancy import DEFAULT, Tenancy
from tests.patience import PATIENCE_S

ME = DEFAULT
FILE = "file-" + "a" * 32
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    folder = DataFolder(tmp_path)
    yield folder
    folder.close()


@pytest.fixture
def store(folder: DataFolder) -> Iterator[Store]:
    store = Store(folder.database)
    store.add_file(ME, FileObject(id=FILE, bytes=1, created_at=1, filename="in", purpose=Purpose.BATCH))
    yield store
    store.close()


def batch(name: str, status: BatchStatus = BatchStatus.IN_PROGRESS) -> Batch:
    return Batch(
        id=name,
        endpoint="/v1/completions",
        model="m",
        input_file_id=FILE,
        completion_window="1h",
        status=status,
        created_at=1,
        expires_at=3601,
    )


def queue(store: Store, name: str, num_lines: int, owner: str = ME) -> None:
    assert store.add_batch(owner, batch(name))
    store.add_lines(name, [Line(i, i * 10, 10, f"{name}-{i}") for i in range(1, num_lines + 1)])


def keys(lines: list[PendingLine]) -> list[tuple[str, int]]:
    return [(line.batch_id, line.number) for line in lines]


def take(store: Store, running: list[tuple[str, int]], limit: int) -> list[PendingLine]:
    return store.take_lines(dict.fromkeys(running, ME), limit, {ME: limit})


def done(line: PendingLine, outcome: int = COMPLETED) -> Outcome:
    return Outcome(line, outcome, json.dumps(line.custom_id).encode(), USAGE if outcome == COMPLETED else None)


def test_the_oldest_batch_goes_first_and_what_runs_is_not_taken_again(store: Store) -> None:
    queue(store, "one", 3)
    queue(store, "two", 3)
    first = take(store, [], 2)
    assert keys(first) == [("one", 1), ("one", 2)]
    assert keys(take(store, keys(first), 2)) == [("one", 3), ("two", 1)]
    store.update("one", lambda each: each.move(BatchStatus.CANCELLING, 5))
    assert keys(take(store, [], 9)) == [("two", 1), ("two", 2), ("two", 3)]


def test_an_outcome_counts_once_however_often_it_is_told(store: Store) -> None:
    queue(store, "one", 3)
    lines = take(store, [], 3)
    store.record([done(lines[0]), done(lines[1], FAILED)])
    store.record([done(lines[0]), done(lines[2])])
    told = store.batch(ME, "one")
    assert told is not None
    assert (told.request_counts.completed, told.request_counts.failed) == (2, 1)
    assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (6, 4, 10)
    assert [current.has_lines for current in store.open_batches()] == [False]
    assert take(store, [], 9) == []


def test_attempts_are_those_that_nobody_gave_back(store: Store, folder: DataFolder) -> None:
    queue(store, "one", 1)
    [line] = take(store, [], 1)
    assert line.attempts == 1
    store.give_back([("one", 1)])
    [line] = take(store, [], 1)
    assert line.attempts == 1
    again = Store(folder.database)  # the daemon was killed
    [line] = take(again, [], 1)
    assert line.attempts == 2
    again.close()


def test_a_custom_id_is_one_lines(store: Store) -> None:
    store.add_batch(ME, batch("one"))
    store.add_batch(ME, batch("two"))
    same = [Line(1, 0, 1, "x"), Line(2, 1, 1, "y"), Line(3, 2, 1, "x")]
    assert [line.number for line in store.add_lines("one", same)] == [3]
    assert store.add_lines("two", same[:2]) == []


def test_files_are_in_the_inputs_order_and_unrun_lines_say_why(store: Store, folder: DataFolder) -> None:
    queue(store, "one", 5)
    lines = take(store, [], 5)
    store.record([done(lines[3]), done(lines[0]), done(lines[2], FAILED)])
    output, errors = write_files(folder, batch("one"), BatchStatus.EXPIRED, 9.0)
    assert output is not None
    assert errors is not None
    assert folder.path_of(output.id).read_text().splitlines() == ['"one-1"', '"one-4"']
    failed, *never = map(json.loads, folder.path_of(errors.id).read_text().splitlines())
    assert failed == "one-3"
    assert [entry["custom_id"] for entry in never] == ["one-2", "one-5"]
    assert {entry["error"]["code"] for entry in never} == {"batch_expired"}
    store.finish("one", [output, errors], lambda each: each.move(BatchStatus.EXPIRED, 9))
    assert store.open_batches() == []
    assert store.file_ids() == {FILE, output.id, errors.id}
    store.record([done(lines[1])])  # too late: it is nobody's
    told = store.batch(ME, "one")
    assert told is not None
    assert told.request_counts.completed == 2


def test_an_input_that_is_read_stays(store: Store, tmp_path: Path) -> None:
    content = tmp_path / FILE
    content.touch()
    store.add_batch(ME, batch("one"))
    assert store.delete_file(ME, FILE, content) == "one"
    assert content.exists()
    store.update("one", lambda each: each.move(BatchStatus.FAILED, 2))
    assert store.delete_file(ME, FILE, content) is None
    assert not content.exists()
    assert not store.add_batch(ME, batch("two")), "its input is gone"


def test_a_change_that_fails_changes_nothing(store: Store) -> None:
    queue(store, "one", 1)

    def fail(each: Batch) -> None:
        each.move(BatchStatus.FAILED, 2)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - ours, just above
        store.update("one", fail)
    assert [current.batch.status for current in store.open_batches()] == [BatchStatus.IN_PROGRESS]


def test_batches_that_ended_long_ago_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batches.store.MAX_ENDED", 2)
    store.add_batch(ME, batch("open"))
    for name in "abcd":
        store.add_batch(ME, batch(name))
        store.update(name, lambda each: each.move(BatchStatus.COMPLETED, 2))
    assert [each.id for each in store.batches(ME, None, 9)] == ["d", "c", "open"]
    assert [each.id for each in store.batches(ME, "d", 1)] == ["c"]


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(ConfigError, match="version 9, not 2"):
        Store(tmp_path / "batches.sqlite")


# What version 1 made, before files and batches had owners.
VERSION_1 = """
CREATE TABLE files (seq INTEGER PRIMARY KEY, id TEXT UNIQUE, purpose TEXT, document TEXT);
CREATE TABLE batches (seq INTEGER PRIMARY KEY, id TEXT UNIQUE, input TEXT, is_open INTEGER, document TEXT);
CREATE INDEX open_batches ON batches (seq) WHERE is_open;
CREATE TABLE lines (
    batch TEXT, number INTEGER, start INTEGER, size INTEGER, custom_id TEXT,
    attempts INTEGER DEFAULT 0, outcome INTEGER DEFAULT 0, entry BLOB,
    UNIQUE (batch, custom_id)
);
CREATE INDEX lines_by_outcome ON lines (batch, outcome, number);
PRAGMA user_version = 1;
"""


def test_a_database_without_owners_becomes_the_operators(tmp_path: Path) -> None:
    """Until then all keys of a server were one account, which is what DEFAULT is."""
    file = FileObject(id=FILE, bytes=1, created_at=1, filename="in", purpose=Purpose.BATCH)
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        db.executescript(VERSION_1)
        db.execute(
            "INSERT INTO files (id, purpose, document) VALUES (?, ?, ?)", (FILE, "batch", file.model_dump_json())
        )
        db.execute(
            "INSERT INTO batches (id, input, is_open, document) VALUES (?, ?, 1, ?)",
            ("one", FILE, batch("one").model_dump_json()),
        )
        db.execute("INSERT INTO lines (batch, number, start, size, custom_id) VALUES ('one', 1, 0, 5, 'a')")
    db.close()
    for _ in range(2):  # what was brought up to date is opened as it is
        store = Store(tmp_path / "batches.sqlite")
        assert store.file(DEFAULT, FILE) == file
        assert store.batch(DEFAULT, "one") == batch("one")
        assert (store.file("other", FILE), store.batch("other", "one")) == (None, None)
        assert store.take_lines({}, 5, {"other": 5}) == []
        store.close()
    store = Store(tmp_path / "batches.sqlite")
    assert [line.owner for line in take(store, [], 5)] == [DEFAULT]
    store.add_file("other", file.model_copy(update={"id": "file-" + "b" * 32}))
    store.close()


def test_owners_take_turns_and_none_runs_beyond_its_room(store: Store) -> None:
    file = FileObject(id="", bytes=1, created_at=1, filename="in", purpose=Purpose.BATCH)
    for owner in "bc":
        store.add_file(owner, file.model_copy(update={"id": f"file-{owner}"}))
        assert store.add_batch(owner, batch(f"of-{owner}").model_copy(update={"input_file_id": f"file-{owner}"}))
        store.add_lines(f"of-{owner}", [Line(i, i * 10, 10, str(i)) for i in range(1, 10)])
    queue(store, "first", 9)
    queue(store, "second", 9)
    running = dict.fromkeys([("first", 1), ("first", 2)], ME)
    taken = store.take_lines(running, 5, {ME: 5, "b": 5})  # c has left the file
    assert [line.owner for line in taken] == ["b", "b", "b", ME, "b"]
    assert keys(taken)[3] == ("first", 3)
    taken = store.take_lines({}, 20, {ME: 11, "b": 2, "c": 0})
    assert [line.batch_id for line in taken if line.owner == ME] == ["first"] * 9 + ["second"] * 2
    assert [line.owner for line in taken].count("b") == 2
    assert len(taken) == 13


def test_a_batch_reads_no_file_of_another_owner(store: Store, tmp_path: Path) -> None:
    content = tmp_path / FILE
    content.touch()
    assert not store.add_batch("other", batch("one"))
    assert store.delete_file("other", FILE, content) is None
    assert store.file(ME, FILE) is not None
    assert content.exists()


def test_batches_of_one_owner_push_out_none_of_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batches.store.MAX_ENDED", 2)
    queue(store, "mine", 1)
    store.update("mine", lambda each: each.move(BatchStatus.COMPLETED, 2))
    other = FileObject(id="file-o", bytes=1, created_at=1, filename="in", purpose=Purpose.BATCH)
    store.add_file("other", other)
    for name in "abcd":
        store.add_batch("other", batch(name).model_copy(update={"input_file_id": "file-o"}))
        store.update(name, lambda each: each.move(BatchStatus.COMPLETED, 2))
    assert [each.id for each in store.batches("other", None, 9)] == ["d", "c"]
    assert [each.id for each in store.batches(ME, None, 9)] == ["mine"]


def test_a_file_is_there_whole_or_not_at_all(folder: DataFolder, tmp_path: Path) -> None:
    new = NewFile(folder.path_of(FILE))
    with new:
        new.write(b"half")
        assert [path.name for path in (tmp_path / "files").iterdir()] == [FILE + ".tmp"]
    assert list((tmp_path / "files").iterdir()) == []
    new = NewFile(folder.path_of(FILE))
    with new:
        new.write(b"whole")
        new.keep()
    assert folder.path_of(FILE).read_bytes() == b"whole"
    folder.sweep({FILE})
    assert folder.path_of(FILE).exists()
    folder.sweep(set())
    assert not folder.path_of(FILE).exists()
    assert tmp_path.joinpath("files").stat().st_mode & 0o077 == 0
    with pytest.raises(AssertionError):
        folder.path_of("../lock")


def test_a_folder_has_one_owner(folder: DataFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another daemon uses"):
        DataFolder(tmp_path)


def test_a_folder_whose_file_system_has_no_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(ConfigError, match=r"which cannot be locked \(No locks available\); give another"):
        DataFolder(tmp_path)


def test_lines_that_are_being_taken_when_the_daemon_leaves_have_not_been_attempted(
    store: Store, folder: DataFolder
) -> None:
    queue(store, "one", 3)
    store.update("one", lambda each: setattr(each, "expires_at", 1 << 40))
    is_asked, may_go_on = threading.Event(), threading.Event()

    class SlowStore(StoreThread):
        async def __call__(self, work: Callable[[Store], Result]) -> Result:
            def slow(store: Store) -> Result:
                result = work(store)
                if isinstance(result, list) and any(isinstance(each, PendingLine) for each in result):
                    is_asked.set()
                    assert may_go_on.wait(PATIENCE_S)
                return result

            return await super().__call__(slow)

    async def leave() -> None:
        thread = SlowStore(store)
        models = SimpleNamespace(
            engines=[SimpleNamespace(config=SimpleNamespace(max_num_seqs=2), stats=Stats())], is_dead=False
        )
        worker = BatchWorker(thread, folder, BodyReader(1000, 1 << 20), models, 100)  # type: ignore[arg-type]
        unused = Dispatcher(lambda *_: pytest.fail("a line has begun"), lambda _: None, is_background=True)
        tenancy = Tenancy((), None, lambda *_: None)
        worker.start(unused, unused, tenancy)
        await asyncio.to_thread(is_asked.wait, PATIENCE_S)
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0)
        may_go_on.set()
        await stopping
        await thread(lambda store: None)

    asyncio.run(leave())
    assert [line.attempts for line in take(store, [], 3)] == [1, 1, 1]


def test_a_file_is_on_the_disk_before_its_name_is_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loss of power leaves is decided by the order of these calls."""
    folder = DataFolder(tmp_path)
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("sync", os.fstat(fd).st_ino)))
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        calls.append(("rename", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    file = NewFile(folder.path_of(FILE))
    with file:
        file.write(b"content")
        assert not calls
        written = folder.path_of(FILE).with_name(FILE + ".tmp").stat().st_ino
        file.keep()
        assert folder.path_of(FILE).read_bytes() == b"content"
    names = (tmp_path / "files").stat().st_ino
    assert calls == [("sync", written), ("rename", written), ("sync", names)]
    folder.close()


def test_what_the_database_has_told_outlasts_a_loss_of_power(store: Store) -> None:
    settings = {name: store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")}
    assert settings == {"synchronous": 2, "journal_mode": "wal"}, "2 is FULL: a commit is on the disk when it returns"


async def test_a_batch_whose_files_are_being_written_is_completed(store: Store) -> None:
    assert store.add_batch(ME, batch("b", BatchStatus.FINALIZING))
    service = Mock(
        batch=AsyncMock(return_value=store.batch(ME, "b")), store=AsyncMock(side_effect=lambda work: work(store))
    )
    assert (await cancel_batch(service, ME, "b")).status is BatchStatus.FINALIZING
