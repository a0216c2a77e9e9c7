"""The images of requests: read, decoded and prepared for the model, one at a time on a thread of their own.

Callers are served in rotation. What an image takes, as it was sent and as the model's tower takes it, counts on its caller
until its request ends. A client that leaves stops the work on its images. Event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from threading import Event

from fastapi import Request as HttpRequest

from engine.core.errors import OverloadedError
from engine.text.fields.chat import Conversation, ImageSource
from engine.text.images.decoder import ImageDecoder
from engine.text.images.preprocessor import ImagePreprocessor, PreparedImage
from engine.text.images.sources import LocalSources
from server.answers.media import MediaFetcher
from server.http.bodies import HeldBytes
from server.http.middleware import CALLER
from server.http.threads import Worker, unless_disconnected
from server.settings.app_config import AppConfig

MAX_HELD_BYTES = 2 << 30  # of all images of open requests; 80 of a megapixel each in Qwen3-VL
_MAX_FETCHES = 8  # at a time
_PARAM = "messages"  # which refusals name


class ImageReader:
    """Makes what a conversation's images are to the engine."""

    def __init__(self, preprocessor: ImagePreprocessor, config: AppConfig) -> None:
        self._preprocessor, self._decoder = preprocessor, ImageDecoder()
        self._local, self._fetcher = LocalSources(config.allowed_local_media_path), MediaFetcher(config)
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)
        self._worker = Worker("quire-images")
        self._current: Event | None = None  # set when the client of the image that is worked on has left
        self._held = HeldBytes(MAX_HELD_BYTES)

    async def read(self, http: HttpRequest, chat: Conversation) -> Sequence[PreparedImage]:
        """Return the images of a conversation, in order. Raises InvalidRequestError or OverloadedError."""
        sources = chat.images
        if not sources:
            return ()
        self._preprocessor.check_count(len(sources), _PARAM)
        return await unless_disconnected(http.receive, self._read_all(sources))

    def close(self) -> None:
        """End the decoder's process and the thread."""
        self._decoder.close()
        self._worker.close()

    async def _read_all(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        return [await self._read(source) for source in sources]

    async def _read(self, source: ImageSource) -> PreparedImage:
        caller, num_bytes = CALLER.get(), 0
        try:
            num_bytes += self._hold(caller, len(source.url))
            prepared = await self._prepare(source)
            num_bytes += self._hold(caller, sum(each.nbytes for each in prepared.image.arrays.values()))
        except BaseException:  # a client that leaves, too
            self._held.give(caller, num_bytes)
            raise
        weakref.finalize(prepared.image, self._held.give, caller, num_bytes)
        return prepared

    def _hold(self, caller: str, num_bytes: int) -> int:
        if self._held.take(caller, num_bytes):
            return num_bytes
        held = self._held.of(caller)
        raise OverloadedError(f"{held} bytes of your images wait for answers; try again later.", retry_after_s=1.0)

    async def _prepare(self, source: ImageSource) -> PreparedImage:
        async with self._fetches:
            fetched = await self._fetcher.fetch(source.url, _PARAM)
        left = Event()

        def work() -> PreparedImage:
            self._current = left
            try:
                file = self._local.read(source.url, _PARAM) if fetched is None else fetched
                pixels = self._decoder.decode(file, _PARAM, longest=source.longest, is_wanted=lambda: not left.is_set())
                return self._preprocessor.prepare(pixels, _PARAM)
            finally:
                self._current = None

        try:
            return await self._worker.run(work)
        except asyncio.CancelledError:
            left.set()
            if self._current is left:
                self._decoder.interrupt()
            raise
