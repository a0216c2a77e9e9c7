"""The parts that run batches, and lookups of files and batches. Event loop.

Files and batches belong to an owner (server/tenancy/tenancy.py); for other owners they are a 404.
"""

from __future__ import annotations

from engine.core.errors import shorten
from engine.handle import EngineHandle
from server.batches.dispatch import Dispatcher
from server.batches.folder import DataFolder
from server.batches.objects import Batch, FileObject
from server.batches.store import Store, StoreThread
from server.batches.worker import BatchWorker
from server.http.bodies import BodyReader
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig
from server.tenancy.tenancy import Tenancy


class BatchService:
    """Opens the data folder; runs batches from `start` to `stop`."""

    def __init__(self, config: AppConfig, engine: EngineHandle, bodies: BodyReader, tenancy: Tenancy) -> None:
        """Raises ConfigError for a --data-dir that cannot be used."""
        assert config.data_dir is not None
        self.folder = DataFolder(config.data_dir)
        store = Store(self.folder.database)
        self.folder.sweep(store.file_ids())
        self.store = StoreThread(store)
        # As many lines run as the engine has slots, so that they fill it while it is otherwise idle.
        max_running = engine.config.max_num_seqs
        self.worker = BatchWorker(
            self.store, self.folder, bodies, max_running=max_running, max_line_bytes=config.max_body_bytes
        )
        self._engine = engine
        self._tenancy = tenancy

    def start(self, background: Dispatcher, foreground: Dispatcher) -> None:
        """Begin to run batches, each on its owner's account."""
        engine = self._engine
        self.worker.start(
            background, foreground, engine.stats, lambda: engine.health().error is not None, self._tenancy
        )

    def close(self) -> None:
        self.store.close()
        self.folder.close()

    async def file(self, owner: str, file_id: str) -> FileObject:
        """Return a file. Raises a 404."""
        file = await self.store(lambda store: store.file(owner, file_id))
        if file is None:
            raise ApiError(404, "file_not_found", f"There is no file {shorten(file_id)!r} here.", "file_id")
        return file

    async def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises a 404."""
        batch = await self.store(lambda store: store.batch(owner, batch_id))
        if batch is None:
            raise ApiError(404, "batch_not_found", f"There is no batch {shorten(batch_id)!r} here.", "batch_id")
        return batch
