"""The images of requests: read, decoded and prepared for the model, one at a time on a thread of their own.

Callers are served in rotation. What an image takes, as it was sent or fetched and as the model's tower takes it, counts on
its caller until its request ends. A client that leaves stops the work on its images. Event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from weakref import WeakValueDictionary

import numpy as np
from fastapi import Request as HttpRequest
from numpy.typing import NDArray

from engine.core.errors import OverloadedError
from engine.core.kv.prefix_cache import chain_root
from engine.system.calls import step_back
from engine.text.fields.chat import Conversation, ImageSource
from engine.text.images.decoder import ImageDecoder
from engine.text.images.preprocessor import ImagePreprocessor, PreparedImage
from engine.text.images.sources import LocalSources
from server.answers.media import MediaFetcher
from server.http.bodies import HeldBytes
from server.http.middleware import CALLER, state_of
from server.http.threads import Worker, unless_disconnected
from server.settings.app_config import AppConfig

MAX_HELD_BYTES = 2 << 30  # of all images of open requests; 80 of a megapixel each in Qwen3-VL
_MAX_FETCHES = 4  # of a caller, at a time
_PARAM = "messages"  # which refusals name


Prepare = Callable[[NDArray[np.uint8]], PreparedImage]


class ImageReader:
    """Makes what a conversation's images are to the engine."""

    def __init__(self, preprocessor: ImagePreprocessor, config: AppConfig) -> None:
        self._preprocessor, self._decoder = preprocessor, ImageDecoder()
        self._local, self._fetcher = LocalSources(config.allowed_local_media_path), MediaFetcher(config)
        self._fetches = WeakValueDictionary[str, asyncio.Semaphore]()  # by caller
        self._worker = Worker("quire-images", step_back)
        self._current: Event | None = None  # set when the client of the image that is worked on has left
        self._held = HeldBytes(MAX_HELD_BYTES)

    async def read(self, http: HttpRequest, chat: Conversation) -> Sequence[PreparedImage]:
        """Return the images of a conversation, in order. Raises InvalidRequestError or OverloadedError."""
        sources = chat.images
        if not sources:
            return ()
        self._preprocessor.check_count(len(sources), _PARAM)
        account = state_of(http.scope).account
        root = chain_root(getattr(chat, "cache_salt", ""), owner="" if account is None else account.cache_owner)
        prepare = partial(
            self._preprocessor.prepare, param=_PARAM, root=root, num=len(sources), wishes=chat.mm_processor_kwargs
        )
        return await unless_disconnected(http.receive, self._read_all(sources, prepare))

    def close(self) -> None:
        """End the decoder's process and the thread."""
        self._decoder.close()
        self._worker.close()

    async def _read_all(self, sources: Sequence[ImageSource], prepare: Prepare) -> list[PreparedImage]:
        return [await self._read(source, prepare) for source in sources]

    async def _read(self, source: ImageSource, prepare: Prepare) -> PreparedImage:
        caller, num_held = CALLER.get(), 0

        def hold(num_bytes: int) -> None:
            nonlocal num_held
            if not self._held.take(caller, num_bytes):
                message = f"{self._held.of(caller)} bytes of your images wait for answers; try again later."
                raise OverloadedError(message, retry_after_s=1.0)
            num_held += num_bytes

        try:
            hold(len(source.url))
            places = self._fetches.setdefault(caller, asyncio.Semaphore(_MAX_FETCHES))
            async with places:
                fetched = await self._fetcher.fetch(source.url, _PARAM, hold)
            prepared = await self._prepare(source, fetched, prepare)
            hold(sum(each.nbytes for each in prepared.image.arrays.values()))
        except BaseException:  # a client that leaves, too
            self._held.give(caller, num_held)
            raise
        weakref.finalize(prepared.image, self._held.give, caller, num_held)
        return prepared

    async def _prepare(self, source: ImageSource, fetched: bytes | None, prepare: Prepare) -> PreparedImage:
        left = Event()

        def work() -> PreparedImage:
            self._current = left
            try:
                file = self._local.read(source.url, _PARAM) if fetched is None else fetched
                pixels = self._decoder.decode(file, _PARAM, longest=source.longest, is_wanted=lambda: not left.is_set())
                return prepare(pixels)
            finally:
                self._current = None

        try:
            return await self._worker.run(work)
        except asyncio.CancelledError:
            left.set()
            if self._current is left:
                self._decoder.interrupt()
            raise
