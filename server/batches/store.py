"""The SQLite database of files, batches and their lines.

Files and batches belong to an owner (server/tenancy/tenancy.py): every query for a client names the owner.

A batch's lines are its work queue: a line without an outcome is still to run, and outcomes are kept until the batch's
files are written. Everything blocks and belongs to one thread, StoreThread's; each method is one transaction.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.core.errors import ConfigError
from server.batches.lines import Line
from server.batches.objects import OPEN, Batch, BatchStatus, FileObject
from server.tenancy.tenancy import DEFAULT

Result = TypeVar("Result")

VERSION = 2
MAX_ENDED = 10_000  # ended batches that are kept for an owner
_SCHEMA = """
CREATE TABLE files (seq INTEGER PRIMARY KEY, id TEXT UNIQUE, purpose TEXT, document TEXT, owner TEXT NOT NULL);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY, id TEXT UNIQUE, input TEXT, is_open INTEGER, document TEXT, owner TEXT NOT NULL
);
CREATE INDEX open_batches ON batches (seq) WHERE is_open;
CREATE TABLE lines (
    batch TEXT, number INTEGER, start INTEGER, size INTEGER, custom_id TEXT,
    attempts INTEGER DEFAULT 0, outcome INTEGER DEFAULT 0, entry BLOB,
    UNIQUE (batch, custom_id)
);
CREATE INDEX lines_by_outcome ON lines (batch, outcome, number);
PRAGMA user_version = 2;
"""
# From version 1, which had no owners.
_ADD_OWNERS = f"""
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '{DEFAULT}';
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '{DEFAULT}';
PRAGMA user_version = 2;
"""
TO_RUN, COMPLETED, FAILED = range(3)  # the outcomes of a line


class PendingLine(NamedTuple):
    """A line to run."""

    owner: str
    batch_id: str
    endpoint: str
    file_id: str
    number: int
    start: int
    size: int
    custom_id: str
    attempts: int  # including this one


class Outcome(NamedTuple):
    """The result of a line: its entry in the files, and its usage if it succeeded."""

    line: PendingLine
    outcome: int
    entry: bytes
    usage: dict[str, int] | None


class OpenBatch(NamedTuple):
    """A batch that has not ended, and whether lines are left to run."""

    batch: Batch
    has_lines: bool
    owner: str


class Store:
    """Opens, creates or upgrades the database. Raises ConfigError for other versions."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 10000"):
            self._db.execute(f"PRAGMA {pragma}")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        elif version == 1:
            self._db.executescript(f"BEGIN; {_ADD_OWNERS} COMMIT;")
        elif version != VERSION:
            self._db.close()
            raise ConfigError(f"--data-dir has a database of version {version}, not {VERSION}; give another folder.")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield self._db

    def close(self) -> None:
        self._db.close()

    # -- files -------------------------------------------------------------------------------------------------------

    def add_file(self, owner: str, file: FileObject) -> None:
        with self._transaction() as db:
            _insert_file(db, owner, file)

    def file(self, owner: str, file_id: str) -> FileObject | None:
        row = self._db.execute("SELECT document FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone()
        return None if row is None else FileObject.model_validate_json(row[0])

    def num_files(self, owner: str) -> int:
        return int(self._db.execute("SELECT count(*) FROM files WHERE owner = ?", (owner,)).fetchone()[0])

    def file_ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM files")}

    def files(
        self, owner: str, after: str | None, limit: int, purpose: str | None, *, newest_first: bool
    ) -> list[FileObject]:
        """Return up to `limit` of an owner's files after `after`."""
        way, order = ("<", "DESC") if newest_first else (">", "ASC")
        rows = self._db.execute(
            f"SELECT document FROM files WHERE (:after IS NULL OR seq {way} (SELECT seq FROM files WHERE id = :after)) "  # noqa: S608 - constants
            f"AND (:purpose IS NULL OR purpose = :purpose) AND owner = :owner ORDER BY seq {order} LIMIT :limit",
            {"owner": owner, "after": after, "limit": limit, "purpose": purpose},
        )
        return [FileObject.model_validate_json(row[0]) for row in rows]

    def delete_file(self, owner: str, file_id: str, content: Path) -> str | None:
        """Delete a file, unless an open batch reads it: then return the batch's id.

        The content goes first: on a full disk this makes the room that the database needs.
        """
        with self._transaction() as db:
            reader = db.execute("SELECT id FROM batches WHERE is_open AND input = ?", (file_id,)).fetchone()
            if reader is not None:
                return str(reader[0])
            if db.execute("SELECT id FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone():
                content.unlink(missing_ok=True)
                db.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return None

    # -- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, owner: str, batch: Batch) -> bool:
        """Add a batch; return False if its input is gone. Old ended ones are dropped."""
        with self._transaction() as db:
            found = db.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", (batch.input_file_id, owner))
            if found.fetchone() is None:
                return False
            db.execute(
                "INSERT INTO batches (id, input, is_open, document, owner) VALUES (?, ?, 1, ?, ?)",
                (batch.id, batch.input_file_id, batch.model_dump_json(), owner),
            )
            db.execute(
                "DELETE FROM batches WHERE NOT is_open AND owner = :owner AND "
                "seq <= (SELECT seq FROM batches WHERE owner = :owner ORDER BY seq DESC LIMIT 1 OFFSET :num)",
                {"owner": owner, "num": MAX_ENDED},
            )
            return True

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        row = self._db.execute("SELECT document FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
        return None if row is None else Batch.model_validate_json(row[0])

    def batches(self, owner: str, after: str | None, limit: int) -> list[Batch]:
        """Return up to `limit` of an owner's batches after `after`, newest first."""
        rows = self._db.execute(
            "SELECT document FROM batches WHERE owner = :owner AND "
            "(:after IS NULL OR seq < (SELECT seq FROM batches WHERE id = :after)) ORDER BY seq DESC LIMIT :limit",
            {"owner": owner, "after": after, "limit": limit},
        )
        return [Batch.model_validate_json(row[0]) for row in rows]

    def num_open(self, owner: str) -> int:
        """Return how many of an owner's batches have not ended."""
        row = self._db.execute("SELECT count(*) FROM batches WHERE is_open AND owner = ?", (owner,)).fetchone()
        return int(row[0])

    def open_batches(self) -> list[OpenBatch]:
        """Return the batches of all owners that have not ended, oldest first."""
        rows = self._db.execute(
            "SELECT document, EXISTS (SELECT 1 FROM lines WHERE batch = batches.id AND outcome = 0), owner "
            "FROM batches WHERE is_open ORDER BY seq"
        )
        return [OpenBatch(Batch.model_validate_json(document), bool(lines), owner) for document, lines, owner in rows]

    def update(self, batch_id: str, change: Callable[[Batch], None]) -> Batch:
        """Change a batch and return it."""
        with self._transaction() as db:
            return _update(db, batch_id, change)

    # -- lines -------------------------------------------------------------------------------------------------------

    def clear_lines(self, batch_id: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))

    def add_lines(self, batch_id: str, lines: Sequence[Line]) -> list[Line]:
        """Queue lines; return those whose custom_id is taken."""
        with self._transaction() as db:
            return [
                line
                for line in lines
                if not db.execute(
                    "INSERT OR IGNORE INTO lines (batch, number, start, size, custom_id) VALUES (?, ?, ?, ?, ?)",
                    (batch_id, line.number, line.start, line.size, line.custom_id),
                ).rowcount
            ]

    def take_lines(
        self, running: Mapping[tuple[str, int], str], limit: int, rooms: Mapping[str, int]
    ) -> list[PendingLine]:
        """Return the next lines to run and count an attempt; `running` ones are left out.

        `running` names the owner of each. An owner gets at most its room. Owners take turns, so that they have equally many
        running; the oldest batch of an owner goes first.
        """
        queues: dict[str, deque[PendingLine]] = {}
        with self._transaction() as db:
            for batch, _, owner in self.open_batches():
                queue, room = queues.setdefault(owner, deque()), min(limit, rooms.get(owner, 0))
                if batch.status is not BatchStatus.IN_PROGRESS or len(queue) >= room:
                    continue
                rows = db.execute(
                    "SELECT number, start, size, custom_id, attempts + 1 FROM lines WHERE batch = ? AND outcome = 0 "
                    "ORDER BY number LIMIT ?",
                    (batch.id, room + len(running)),
                ).fetchall()
                lines = [PendingLine(owner, batch.id, batch.endpoint, batch.input_file_id, *row) for row in rows]
                lines = [line for line in lines if (line.batch_id, line.number) not in running]
                queue += lines[: room - len(queue)]
            taken = _take_turns(queues, Counter(running.values()), limit)
            _count_attempts(db, [(line.batch_id, line.number) for line in taken], 1)
        return taken

    def give_back(self, lines: Collection[tuple[str, int]]) -> None:
        """Uncount the attempts of lines that were stopped on purpose."""
        with self._transaction() as db:
            _count_attempts(db, lines, -1)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Set outcomes. Those of lines that have one, or have ended, are ignored."""
        query = "UPDATE lines SET outcome = ?, entry = ? WHERE batch = ? AND outcome = 0 AND number = ?"
        new: defaultdict[str, list[Outcome]] = defaultdict(list)
        with self._transaction() as db:
            for outcome in outcomes:
                line = outcome.line
                if db.execute(query, (outcome.outcome, outcome.entry, line.batch_id, line.number)).rowcount:
                    new[line.batch_id].append(outcome)
            for batch_id, counted in new.items():
                _update(db, batch_id, partial(_count, outcomes=counted))

    def finish(self, batch_id: str, files: Sequence[FileObject], change: Callable[[Batch], None]) -> Batch:
        """Add a batch's files, drop its lines, and change it."""
        with self._transaction() as db:
            [owner] = db.execute("SELECT owner FROM batches WHERE id = ?", (batch_id,)).fetchone()
            for file in files:
                _insert_file(db, owner, file)
            db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            return _update(db, batch_id, change)


def _insert_file(db: sqlite3.Connection, owner: str, file: FileObject) -> None:
    row = (file.id, file.purpose.value, file.model_dump_json(), owner)
    db.execute("INSERT INTO files (id, purpose, document, owner) VALUES (?, ?, ?, ?)", row)


def _take_turns(queues: Mapping[str, deque[PendingLine]], num_running: Counter[str], limit: int) -> list[PendingLine]:
    """Return up to `limit` lines, each of the owner with the fewest by then."""
    taken: list[PendingLine] = []
    while len(taken) < limit and (waiting := [owner for owner, queue in queues.items() if queue]):
        owner = min(waiting, key=num_running.__getitem__)
        num_running[owner] += 1
        taken.append(queues[owner].popleft())
    return taken


def _update(db: sqlite3.Connection, batch_id: str, change: Callable[[Batch], None]) -> Batch:
    [document] = db.execute("SELECT document FROM batches WHERE id = ?", (batch_id,)).fetchone()
    batch = Batch.model_validate_json(document)
    change(batch)
    row = (batch.status in OPEN, batch.model_dump_json(), batch_id)
    db.execute("UPDATE batches SET is_open = ?, document = ? WHERE id = ?", row)
    return batch


def _count(batch: Batch, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.outcome == COMPLETED:
            batch.request_counts.completed += 1
            batch.usage.add(outcome.usage or {})
        else:
            batch.request_counts.failed += 1


def _count_attempts(db: sqlite3.Connection, lines: Collection[tuple[str, int]], change: int) -> None:
    db.executemany(
        "UPDATE lines SET attempts = attempts + ? WHERE batch = ? AND outcome = 0 AND number = ?",
        [(change, *line) for line in lines],
    )


def entries(path: Path, batch_id: str, outcome: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield custom_id and entry of lines with one outcome, on a new connection."""
    query = "SELECT custom_id, entry FROM lines WHERE batch = ? AND outcome = ? ORDER BY number"
    with closing(sqlite3.connect(path)) as db:
        yield from db.execute(query, (batch_id, outcome))


class StoreThread:
    """Runs work with the store on the one thread that it belongs to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="quire-batches")

    async def __call__(self, work: Callable[[Store], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._store)

    def close(self) -> None:
        """Finish the submitted work and close the database."""
        self._executor.shutdown()
        self._store.close()
