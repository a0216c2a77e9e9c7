"""The work queue of batches: what is taken, recorded, given back, and what a daemon that was killed leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.core.stats import Stats
from server.batches.dispatch import Dispatcher
from server.batches.folder import DataFolder
from server.batches.lines import Line
from server.batches.outputs import write_files
from server.batches.store import COMPLETED, FAILED, Outcome, PendingLine, Store
from server.batches.thread import Result, StoreThread
from server.batches.worker import BatchWorker
from server.protocol.batches import Batch, BatchStatus, FileObject, Purpose
from tests.patience import PATIENCE_S

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
    store.add_file(FileObject(id=FILE, bytes=1, created_at=1, filename="in", purpose=Purpose.BATCH))
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


def queue(store: Store, name: str, num_lines: int) -> None:
    store.add_batch(batch(name))
    store.add_lines(name, [Line(i, i * 10, 10, f"{name}-{i}") for i in range(1, num_lines + 1)])


def keys(lines: list[PendingLine]) -> list[tuple[str, int]]:
    return [(line.batch_id, line.number) for line in lines]


def done(line: PendingLine, outcome: int = COMPLETED) -> Outcome:
    return Outcome(line, outcome, json.dumps(line.custom_id).encode(), USAGE if outcome == COMPLETED else None)


def test_the_oldest_batch_goes_first_and_what_runs_is_not_taken_again(store: Store) -> None:
    queue(store, "one", 3)
    queue(store, "two", 3)
    first = store.take_lines(set(), 2)
    assert keys(first) == [("one", 1), ("one", 2)]
    assert keys(store.take_lines(set(keys(first)), 2)) == [("one", 3), ("two", 1)]
    store.update("one", lambda each: each.move(BatchStatus.CANCELLING, 5))
    assert keys(store.take_lines(set(), 9)) == [("two", 1), ("two", 2), ("two", 3)]


def test_an_outcome_counts_once_however_often_it_is_told(store: Store) -> None:
    queue(store, "one", 3)
    lines = store.take_lines(set(), 3)
    store.record([done(lines[0]), done(lines[1], FAILED)])
    store.record([done(lines[0]), done(lines[2])])
    told = store.batch("one")
    assert told is not None
    assert (told.request_counts.completed, told.request_counts.failed) == (2, 1)
    assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (6, 4, 10)
    assert [current.has_lines for current in store.open_batches()] == [False]
    assert store.take_lines(set(), 9) == []


def test_attempts_are_those_that_nobody_gave_back(store: Store, folder: DataFolder) -> None:
    queue(store, "one", 1)
    [line] = store.take_lines(set(), 1)
    assert line.attempts == 1
    store.give_back([("one", 1)])
    [line] = store.take_lines(set(), 1)
    assert line.attempts == 1
    again = Store(folder.database)  # the daemon was killed
    [line] = again.take_lines(set(), 1)
    assert line.attempts == 2
    again.close()


def test_a_custom_id_is_one_lines(store: Store) -> None:
    store.add_batch(batch("one"))
    store.add_batch(batch("two"))
    same = [Line(1, 0, 1, "x"), Line(2, 1, 1, "y"), Line(3, 2, 1, "x")]
    assert [line.number for line in store.add_lines("one", same)] == [3]
    assert store.add_lines("two", same[:2]) == []


def test_files_are_in_the_inputs_order_and_unrun_lines_say_why(store: Store, folder: DataFolder) -> None:
    queue(store, "one", 5)
    lines = store.take_lines(set(), 5)
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
    told = store.batch("one")
    assert told is not None
    assert told.request_counts.completed == 2


def test_an_input_that_is_read_stays(store: Store, tmp_path: Path) -> None:
    content = tmp_path / FILE
    content.touch()
    store.add_batch(batch("one"))
    assert store.delete_file(FILE, content) == "one"
    assert content.exists()
    store.update("one", lambda each: each.move(BatchStatus.FAILED, 2))
    assert store.delete_file(FILE, content) is None
    assert not content.exists()
    assert not store.add_batch(batch("two")), "its input is gone"


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
    store.add_batch(batch("open"))
    for name in "abcd":
        store.add_batch(batch(name))
        store.update(name, lambda each: each.move(BatchStatus.COMPLETED, 2))
    assert [each.id for each in store.batches(None, 9)] == ["d", "c", "open"]
    assert [each.id for each in store.batches("d", 1)] == ["c"]


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(ConfigError, match="version 9, not 1"):
        Store(tmp_path / "batches.sqlite")


def test_a_file_is_there_whole_or_not_at_all(folder: DataFolder, tmp_path: Path) -> None:
    new = folder.create(FILE)
    with new:
        new.write(b"half")
        assert [path.name for path in (tmp_path / "files").iterdir()] == [FILE + ".tmp"]
    assert list((tmp_path / "files").iterdir()) == []
    new = folder.create(FILE)
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
        worker = BatchWorker(thread, folder, max_running=2, max_line_bytes=100)
        nobody = Dispatcher(lambda *_: pytest.fail("a line has begun"))
        worker.start(nobody, nobody, Stats(), is_dead=lambda: False)
        await asyncio.to_thread(is_asked.wait, PATIENCE_S)
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0)
        may_go_on.set()
        await stopping
        await thread(lambda store: None)

    asyncio.run(leave())
    assert [line.attempts for line in store.take_lines(set(), 3)] == [1, 1, 1]


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
    file = folder.create(FILE)
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
