"""Runs batches: checks their input, runs lines, records outcomes, writes files.

One task of the event loop, in turns. Each turn does the work that is due according to the database, so a restarted daemon
continues, and a line with an outcome never runs twice. If the daemon is killed, a running line runs again, at most
MAX_ATTEMPTS times.

Lines run in the background: their steps run only while there is no other work. If no line ends for PATIENCE_S, and most
steps were not background steps, one line at a time runs like a client's request until background steps resume.

Lines run on the account of their batch's owner, within its limits, and owners take turns. If an owner is missing from
--tenants, its batches wait until it returns or their window ends.

Files and batches belong to an owner (server/tenancy/tenancy.py); for other owners they are a 404.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.core.shown import shorten
from server.answers.models import Models
from server.batches.dispatch import Dispatcher, answered, unanswered, write_files
from server.batches.folder import DataFolder
from server.batches.lines import MAX_ERRORS, MAX_LINES, Piece, read_body, read_piece
from server.batches.objects import Batch, BatchStatus, FileObject, LineError, LineErrors
from server.batches.store import OpenBatch, Outcome, PendingLine, Store, StoreThread
from server.http.bodies import BodyReader
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig
from server.tenancy.tenancy import Account, Tenancy

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
RETRY_S = 1.0  # after the engine was full, or the disk failed
MAX_REST_S = 60.0  # between two turns
PATIENCE_S = 60.0  # without the end of a background line, until one runs in the foreground
PROBE_S = 1.0  # after a line ran in the foreground, to see if the background moves
INPUT_LOST = "The input file cannot be read any more; upload it again."
NOT_NOW = (429, 503)  # statuses that are not about the line
# Codes of a 503 that lasts until an operator acts.
LASTING = frozenset({"model_failed", "model_not_loaded", "engine_dead", "guard_unavailable"})

Key = tuple[str, int]  # a batch, and the number of a line


class Running(NamedTuple):
    """A running line, until its outcome is recorded."""

    line: PendingLine
    account: Account | None
    task: asyncio.Task[None]


class _NotNowError(Exception):
    """The engine is full, or the tenant at its limit; the line returns to the queue."""


class BatchWorker:
    """`start` once, `wake` when a batch was added or changed, `stop` once."""

    def __init__(
        self, store: StoreThread, folder: DataFolder, bodies: BodyReader, models: Models, max_line_bytes: int
    ) -> None:
        self._store = store
        self._folder = folder
        self._bodies = bodies
        self._models = models
        self._max_line_bytes = max_line_bytes
        self._running: dict[Key, Running] = {}  # the oldest first
        self._hurried: Key | None = None  # the line that runs, or ran last, in the foreground
        self._due_s = 0.0  # when the background will have been stalled for too long
        self._lead_before = 0  # the background's lead when the watch began
        self._ended: dict[Key, Outcome | None] = {}  # not recorded yet; None gives the line back to the queue
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self, background: Dispatcher, foreground: Dispatcher, tenancy: Tenancy) -> None:
        """Begin to run lines, each on its owner's account."""
        self._tenancy = tenancy
        self._background = background
        self._foreground = foreground
        self._task = asyncio.create_task(self._main())

    def wake(self) -> None:
        self._news.set()

    async def stop(self) -> None:
        """Stop, without counting running lines as attempts. Idempotent."""
        self._is_stopping = True
        self.wake()
        if self._task is not None:
            await asyncio.shield(self._task)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        reason = ""  # of a stall, which is logged once
        while not self._is_stopping:
            rest_s = RETRY_S
            try:
                rest_s = await self._turn()
                if reason:
                    logger.info("batches go on")
                reason = ""
            except Exception as error:  # most likely the disk
                found = str(error) or type(error).__name__
                if found != reason:
                    logger.exception("batches are stalled; trying again every second")
                reason = found
            if not self._is_stopping:
                with suppress(asyncio.TimeoutError):  # not the builtin's before Python 3.11
                    await asyncio.wait_for(self._news.wait(), rest_s)
            self._news.clear()
        with suppress(OSError, sqlite3.Error):
            stopped = await self._interrupt(list(self._running))
            await self._store(lambda store: store.give_back(stopped))

    async def _turn(self) -> float:
        """Do what is due; return the seconds until the next turn at the latest."""
        await self._record()
        now, next_s = time.time(), MAX_REST_S
        poll_s = RETRY_S if self._tenancy.has_file else MAX_REST_S  # no event reports that a tenant has room again
        for current in await self._store(lambda store: store.open_batches()):
            batch = current.batch
            if batch.status is BatchStatus.VALIDATING:
                await self._validate(batch)
            elif (end := _end_of(current, now)) is not None:
                await self._finish(batch, end)
            else:
                next_s = min(next_s, batch.expires_at - now, poll_s)
        # As many lines run as the engines have slots, so that they fill them while those are otherwise idle; one loads its model.
        room = (sum(engine.config.max_num_seqs for engine in self._models.engines) or 1) - len(self._running)
        if not self._running:
            self._watch(PATIENCE_S)
        if room > 0 and not self._models.is_dead and not self._is_stopping:
            accounts = self._tenancy.owners
            for line in await self._take(room, accounts):
                self._begin(line, accounts[line.owner], self._background)
        return max(min(next_s, await self._hurry()), 0.01)

    async def _take(self, room: int, accounts: Mapping[str, Account | None]) -> list[PendingLine]:
        """Return the lines to begin."""
        running = {key: running.line.owner for key, running in self._running.items()}
        num_running = Counter(running.values())
        rooms = {
            owner: room if account is None else int(min(room, account.room_for_lines(num_running[owner])))
            for owner, account in accounts.items()
        }
        return await self._store(lambda store: store.take_lines(running, room, rooms))

    async def _hurry(self) -> float:
        """If lines are stalled, run the oldest in the foreground; return seconds to wait."""
        if not self._running or self._hurried in self._running:
            return MAX_REST_S
        rest_s = self._due_s - time.monotonic()
        if rest_s > 0:
            return rest_s
        if self._lead() >= self._lead_before:  # background steps run; the lines are long
            self._watch(PATIENCE_S)
            return PATIENCE_S
        key, (line, account, task) = next(iter(self._running.items()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():  # else it ended in time
            del self._running[key]
            self._hurried = key
            self._begin(line, account, self._foreground)
        return MAX_REST_S

    def _watch(self, patience_s: float) -> None:
        """Expect the end of a background line within this time."""
        self._due_s = time.monotonic() + patience_s
        self._lead_before = self._lead()

    def _lead(self) -> int:
        """Return the number of background steps minus that of all other steps."""
        stats = [engine.stats for engine in self._models.engines]
        return sum(2 * each.background_steps - each.steps for each in stats)

    def _begin(self, line: PendingLine, account: Account | None, dispatcher: Dispatcher) -> None:
        task = asyncio.create_task(self._run(line, account, dispatcher))
        self._running[line.batch_id, line.number] = Running(line, account, task)

    # -- a line ------------------------------------------------------------------------------------------------------

    async def _run(self, line: PendingLine, account: Account | None, dispatcher: Dispatcher) -> None:
        key = line.batch_id, line.number
        outcome: Outcome | None = None
        try:
            outcome = await self._ask(line, account, dispatcher)
        except _NotNowError:
            self._ended[key] = None
            self.wake()
            return
        except Exception:  # it counts as an attempt
            logger.exception("line %d of batch %s could not be run", line.number, line.batch_id)
        self._watch(PATIENCE_S if dispatcher is self._background else PROBE_S)
        if outcome is not None:
            self._ended[key] = outcome
        else:
            self._running.pop(key, None)
        self.wake()

    async def _ask(self, line: PendingLine, account: Account | None, dispatcher: Dispatcher) -> Outcome | None:
        """Return the outcome of a line, or None if the engine died. Raises _NotNowError."""
        if line.attempts > MAX_ATTEMPTS:
            message = f"The server ended {MAX_ATTEMPTS} times while this request ran; it is not tried again."
            return unanswered(line, "too_many_attempts", message)
        try:
            path = self._folder.path_of(line.file_id)
            document = await asyncio.to_thread(read_body, path, self._bodies, line.start, line.size)
        except ApiError as error:
            if error.status >= 500:
                raise
            return unanswered(line, error.code, error.message)
        except (OSError, ValueError) as error:
            if _is_passing(error):
                await asyncio.sleep(RETRY_S)
                raise _NotNowError from error
            logger.error("a batch's input cannot be read any more: %s", error)  # noqa: TRY400 - nothing to trace
            return unanswered(line, "input_lost", INPUT_LOST)
        reply = await dispatcher.ask(line.endpoint, document, account)
        # What lasts would hold up other lines; at the end of the daemon nothing does.
        if reply.status in NOT_NOW and (self._models.is_draining or reply.error_code not in LASTING):
            await asyncio.sleep(RETRY_S)
            raise _NotNowError
        return None if reply.status >= 500 and self._models.is_dead else answered(line, reply)

    async def _record(self) -> None:
        """Store what ended lines came to. If the disk fails, the next turn tries again."""
        ended = dict(self._ended)
        outcomes = [outcome for outcome in ended.values() if outcome is not None]
        returned = [key for key, outcome in ended.items() if outcome is None]
        if outcomes:
            await self._store(lambda store: store.record(outcomes))
        if returned:
            await self._store(lambda store: store.give_back(returned))
        for key in ended:
            del self._ended[key]
            self._running.pop(key, None)

    async def _interrupt(self, keys: list[Key]) -> list[Key]:
        """Cancel running lines, record what ended in time, and return the others."""
        tasks = [self._running[key].task for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._record()
        return [key for key in keys if self._running.pop(key, None) is not None]

    # -- a batch -----------------------------------------------------------------------------------------------------

    async def _validate(self, batch: Batch) -> None:
        """Check all lines and queue them, after dropping those of a killed daemon."""
        await self._store(lambda store: store.clear_lines(batch.id))
        path, piece, total = self._folder.path_of(batch.input_file_id), Piece(), 0
        errors: list[LineError] = []
        while not piece.is_last and total <= MAX_LINES and len(errors) < MAX_ERRORS:
            if self._is_stopping:
                return  # the next daemon begins again
            read = partial(read_piece, path, batch.endpoint, self._bodies, self._max_line_bytes, piece)
            try:
                piece = await asyncio.to_thread(read)
            except OSError as error:
                if _is_passing(error):
                    raise  # the next turn begins again
                logger.error("a batch's input cannot be read any more: %s", error)  # noqa: TRY400 - nothing to trace
                errors, total = [LineError(code="input_lost", message=INPUT_LOST)], 1
                break
            errors += piece.errors
            for line in await self._store(partial(Store.add_lines, batch_id=batch.id, lines=piece.lines)):
                message = "custom_id is that of another line; give each its own."
                errors.append(
                    LineError(code="duplicate_custom_id", message=message, param="custom_id", line=line.number)
                )
            total += len(piece.lines)
        if total > MAX_LINES:
            message = f"The file has more than {MAX_LINES} requests; split it."
            errors = [LineError(code="too_many_requests", message=message)]
        elif not total and not errors:
            errors = [LineError(code="empty_file", message="The file has no requests; put one on each line.")]
        await self._settle(batch, total, sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS])

    async def _settle(self, batch: Batch, total: int, errors: list[LineError]) -> None:
        """Start a checked batch or fail it, unless it was cancelled meanwhile."""

        def change(batch: Batch) -> None:
            if batch.status is not BatchStatus.VALIDATING:
                return
            if errors:
                batch.errors = LineErrors(data=errors)
                batch.move(BatchStatus.FAILED, time.time())
            else:
                batch.request_counts.total = total
                batch.move(BatchStatus.IN_PROGRESS, time.time())

        if errors:
            await self._store(lambda store: store.clear_lines(batch.id))
        settled = await self._store(lambda store: store.update(batch.id, change))
        logger.info("batch %s: %s, %d requests, %d errors", batch.id, settled.status.value, total, len(errors))
        self.wake()

    async def _finish(self, batch: Batch, end: BatchStatus) -> None:
        """Stop a batch's lines, write its files, and end it."""
        await self._interrupt([key for key in self._running if key[0] == batch.id])
        if end is not BatchStatus.CANCELLED:
            await self._store(
                lambda store: store.update(batch.id, lambda b: b.move(BatchStatus.FINALIZING, time.time()))
            )
        output, errors = await asyncio.to_thread(write_files, self._folder, batch, end, time.time())

        def change(batch: Batch) -> None:
            batch.output_file_id = None if output is None else output.id
            batch.error_file_id = None if errors is None else errors.id
            batch.move(end, time.time())

        files = [file for file in (output, errors) if file is not None]
        try:
            ended = await self._store(lambda store: store.finish(batch.id, files, change))
        except (OSError, sqlite3.Error):  # the next turn writes other files
            for file in files:
                self._folder.path_of(file.id).unlink(missing_ok=True)
            raise
        counts = ended.request_counts
        logger.info(
            "batch %s: %s, %d of %d completed, %d failed, %d tokens in, %d out",
            *(batch.id, end.value, counts.completed, counts.total, counts.failed),
            *(ended.usage.input_tokens, ended.usage.output_tokens),
        )


def _is_passing(error: Exception) -> bool:
    """Return whether a file was not opened for lack of file descriptors or memory, of which there will be some again."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _end_of(current: OpenBatch, now: float) -> BatchStatus | None:
    """Return how a checked batch has to end now, or None."""
    batch = current.batch
    if batch.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if not current.has_lines:
        return BatchStatus.COMPLETED
    if batch.expires_at <= now or batch.status is BatchStatus.FINALIZING:
        return BatchStatus.EXPIRED
    return None


class BatchService:
    """Opens the data folder; `worker` runs its batches."""

    def __init__(self, config: AppConfig, models: Models, bodies: BodyReader) -> None:
        """Raises ConfigError for a --data-dir that cannot be used."""
        assert config.data_dir is not None
        self.folder = DataFolder(config.data_dir)
        try:
            store = Store(self.folder.database)
            self.folder.sweep(store.file_ids())
        except (OSError, sqlite3.Error) as error:
            message = f"--data-dir is {str(config.data_dir)!r}, whose files cannot be used ({error}); give another."
            raise ConfigError(message) from error
        self.store = StoreThread(store)
        self.worker = BatchWorker(self.store, self.folder, bodies, models, config.max_body_bytes)

    def close(self) -> None:
        self.store.close()
        self.folder.close()

    async def file(self, owner: str, file_id: str, param: str = "file_id") -> FileObject:
        """Return a file. Raises a 404."""
        file = await self.store(lambda store: store.file(owner, file_id))
        if file is None:
            raise ApiError(404, "file_not_found", f"There is no file {shorten(file_id)!r} here.", param)
        return file

    async def batch(self, owner: str, batch_id: str, param: str = "batch_id") -> Batch:
        """Return a batch. Raises a 404."""
        batch = await self.store(lambda store: store.batch(owner, batch_id))
        if batch is None:
            raise ApiError(404, "batch_not_found", f"There is no batch {shorten(batch_id)!r} here.", param)
        return batch
