"""The service of files and batches, which the routes call. Event loop.

Files and batches belong to an owner (server/tenancy/tenancy.py); for other owners they are a 404. Raises ApiError for
every error that a client can cause.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncIterable
from math import ceil
from pathlib import Path

from engine.core.errors import shorten
from engine.loop import Engine
from server.batches.dispatch import Dispatcher
from server.batches.folder import DataFolder
from server.batches.objects import OPEN, Batch, BatchBody, BatchStatus, FileObject, Purpose, window_seconds
from server.batches.outputs import new_file_id
from server.batches.store import Store, StoreThread
from server.batches.upload import Form
from server.batches.worker import BatchWorker
from server.errors import ApiError
from server.http.bodies import BodyReader
from server.settings.app_config import AppConfig
from server.tenancy.tenancy import Tenancy

MAX_FILES = 10_000  # of an owner
MAX_OPEN_BATCHES = 100
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchService:
    """Opens the data folder; runs batches from `start` to `stop`."""

    def __init__(self, config: AppConfig, engine: Engine, bodies: BodyReader, tenancy: Tenancy) -> None:
        """Raises ConfigError for a --data-dir that cannot be used."""
        assert config.data_dir is not None
        self._folder = DataFolder(config.data_dir)
        store = Store(self._folder.database)
        self._folder.sweep(store.file_ids())
        self._store = StoreThread(store)
        # As many lines run as the engine has slots, so that they fill it while it is otherwise idle.
        max_running = engine.config.max_num_seqs
        self._worker = BatchWorker(
            self._store, self._folder, bodies, max_running=max_running, max_line_bytes=config.max_body_bytes
        )
        self._engine = engine
        self._tenancy = tenancy

    def start(self, background: Dispatcher, foreground: Dispatcher) -> None:
        """Begin to run batches, each on its owner's account."""
        engine = self._engine
        self._worker.start(
            background, foreground, engine.stats, lambda: engine.health().error is not None, self._tenancy
        )

    async def stop(self) -> None:
        """Stop the running lines, which the next daemon runs. Idempotent."""
        await self._worker.stop()

    def close(self) -> None:
        self._store.close()
        self._folder.close()

    # -- files -------------------------------------------------------------------------------------------------------

    async def upload(self, owner: str, content_type: str, stream: AsyncIterable[bytes]) -> FileObject:
        """Store the file of a form."""
        if await self._store(lambda store: store.num_files(owner)) >= MAX_FILES:
            message = f"{MAX_FILES} files are kept here already; delete some with DELETE /v1/files/{{id}}."
            raise ApiError(429, "too_many_files", message, type="rate_limit_error")
        file_id = new_file_id()
        new = self._folder.create(file_id)
        with new:
            form = Form(content_type, new)
            await form.read(stream)
            _check_form(form, new.num_bytes)
            await asyncio.to_thread(new.keep)
        assert form.filename is not None, "a form without a file is refused"
        file = FileObject(
            id=file_id, bytes=new.num_bytes, created_at=int(time.time()), filename=form.filename, purpose=Purpose.BATCH
        )
        try:
            await self._store(lambda store: store.add_file(owner, file))
        except sqlite3.Error:
            self._folder.path_of(file_id).unlink()
            raise
        return file

    async def file(self, owner: str, file_id: str) -> FileObject:
        file = await self._store(lambda store: store.file(owner, file_id))
        if file is None:
            raise ApiError(404, "file_not_found", f"There is no file {shorten(file_id)!r} here.", "file_id")
        return file

    async def content(self, owner: str, file_id: str) -> Path:
        """Return the path of a file's content. Raises a 404 if it is gone."""
        path = self._folder.path_of((await self.file(owner, file_id)).id)
        if not path.exists():
            raise ApiError(
                404, "file_not_found", "The file's deletion was cut short and its content is gone.", "file_id"
            )
        return path

    async def files(
        self, owner: str, after: str | None, limit: int, purpose: str | None, *, newest_first: bool
    ) -> list[FileObject]:
        """Return up to `limit` files after `after`."""
        if after is not None:
            await self.file(owner, after)
        return await self._store(lambda store: store.files(owner, after, limit, purpose, newest_first=newest_first))

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete a file that no open batch reads."""
        path = self._folder.path_of((await self.file(owner, file_id)).id)
        reader = await self._store(lambda store: store.delete_file(owner, file_id, path))
        if reader is not None:
            message = f"The file is the input of {reader}, which has not ended; cancel that first."
            raise ApiError(409, "file_in_use", message, "file_id")

    # -- batches -----------------------------------------------------------------------------------------------------

    async def create(self, owner: str, body: BatchBody, model: str) -> Batch:
        """Create a batch over a file."""
        if body.endpoint not in ENDPOINTS:
            message = f"endpoint is {shorten(body.endpoint)!r}; batches are for {', '.join(ENDPOINTS)}."
            raise ApiError(400, "invalid_value", message, "endpoint")
        file = await self.file(owner, body.input_file_id)
        if file.purpose is not Purpose.BATCH:
            message = f"{file.id} is of purpose {file.purpose.value}; upload the input with purpose 'batch'."
            raise ApiError(400, "invalid_value", message, "input_file_id")
        if await self._store(lambda store: store.num_open(owner)) >= MAX_OPEN_BATCHES:
            message = f"{MAX_OPEN_BATCHES} batches wait or run already; try again when one has ended."
            raise ApiError(429, "too_many_batches", message, type="rate_limit_error")
        now = time.time()
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            model=model,
            input_file_id=file.id,
            completion_window=body.completion_window,
            status=BatchStatus.VALIDATING,
            created_at=int(now),
            expires_at=ceil(now) + window_seconds(body.completion_window),
            metadata=body.metadata,
        )
        if not await self._store(lambda store: store.add_batch(owner, batch)):
            raise ApiError(404, "file_not_found", f"The file {file.id} has just been deleted.", "input_file_id")
        self._worker.wake()
        return batch

    async def batch(self, owner: str, batch_id: str) -> Batch:
        batch = await self._store(lambda store: store.batch(owner, batch_id))
        if batch is None:
            raise ApiError(404, "batch_not_found", f"There is no batch {shorten(batch_id)!r} here.", "batch_id")
        return batch

    async def batches(self, owner: str, after: str | None, limit: int) -> list[Batch]:
        """Return up to `limit` batches after `after`, newest first."""
        if after is not None:
            await self.batch(owner, after)
        return await self._store(lambda store: store.batches(owner, after, limit))

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch; the lines that have run are in its files."""

        def change(batch: Batch) -> None:
            if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                batch.move(BatchStatus.CANCELLING, time.time())

        batch = await self.batch(owner, batch_id)
        if batch.status not in OPEN:
            message = f"The batch is {batch.status.value} already; only one that has not ended can be cancelled."
            raise ApiError(409, "batch_ended", message, "batch_id")
        batch = await self._store(lambda store: store.update(batch_id, change))
        self._worker.wake()
        return batch


def _check_form(form: Form, num_bytes: int) -> None:
    purpose = form.fields.get("purpose")
    if purpose != Purpose.BATCH.value:
        message = "purpose: Field required" if purpose is None else f"purpose is {shorten(purpose)!r}"
        raise ApiError(400, "invalid_value", f"{message}; files here are for batches: give 'batch'.", "purpose")
    unknown = sorted(name for name in form.fields if name != "purpose")
    if unknown:
        message = f"{shorten(unknown[0])} is not supported: files are kept until they are deleted; leave it out."
        raise ApiError(400, "unsupported_parameter", message, unknown[0])
    if not num_bytes:
        raise ApiError(400, "invalid_value", "The file is empty; put one request on each line.", "file")
