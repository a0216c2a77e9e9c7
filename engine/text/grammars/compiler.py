"""Compiles grammars on worker threads, and caches them.

    compile(spec) -> cached? -> being built? -> builder.py, on a worker thread -> Grammar

A refusal is cached too, so a client that repeats itself costs nothing. Any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError, OverloadedError, shorten
from engine.core.types import Grammar
from engine.text.grammars.builder import MAX_TRIAL_S, GrammarBuilder
from engine.text.grammars.cache import GrammarCache
from engine.text.grammars.spec import GrammarSpec
from engine.text.grammars.trial import GrammarError
from engine.text.types import Tokenizer

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar

logger = logging.getLogger(__name__)

MAX_WAITING = 64


class GrammarCompiler:
    """`compile` specs on an event loop, or `compile_now` on another thread."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None] = lambda _: None
    ) -> None:
        """`observe` gets the seconds that each grammar took which was not cached."""
        self._builder = GrammarBuilder(tokenizer, vocab_size, observe)
        self._lock = threading.Lock()  # guards the two below
        self._cache = GrammarCache()
        self._waiting: dict[GrammarSpec, Future[GuidanceGrammar]] = {}

    async def compile(self, spec: GrammarSpec, param: str) -> Grammar:
        """Return the grammar. Raises InvalidRequestError or OverloadedError."""
        try:
            # Shielded, because other requests may wait for the same grammar.
            return await asyncio.shield(asyncio.wrap_future(self._find(spec, param)))
        except GrammarError as error:
            raise _about(error, param) from error

    def compile_now(self, spec: GrammarSpec, param: str) -> Grammar:
        """Return the grammar, blocking the calling thread. Raises as `compile` does."""
        try:
            return self._find(spec, param).result()
        except GrammarError as error:
            raise _about(error, param) from error

    async def warm_up(self) -> None:
        """Prepare for the first grammar. Holds the GIL for 0.2 s with 49,152 tokens."""
        try:
            await asyncio.wrap_future(self._builder.warm_up())
        except OverloadedError:
            return  # the machine is busy, or the daemon is shutting down; the first grammar tries again
        except GrammarError as error:
            logger.warning("structured outputs cannot be served: %s", error)

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        self._builder.close()

    def _find(self, spec: GrammarSpec, param: str) -> Future[GuidanceGrammar]:
        """Return a future of the grammar, which is cached, being built, or started."""
        self._builder.check(spec, param)
        with self._lock:
            grammar = self._cache.get(spec)
            if grammar is not None:
                done: Future[GuidanceGrammar] = Future()
                done.set_result(grammar)
                return done
            if spec in self._waiting:
                return self._waiting[spec]
            if len(self._waiting) >= MAX_WAITING:
                raise OverloadedError(
                    f"{len(self._waiting)} grammars wait to be compiled already; try again later.",
                    retry_after_s=MAX_TRIAL_S,
                )
            self._cache.check_room()
            future = self._waiting[spec] = self._builder.submit(spec)
        future.add_done_callback(lambda done: self._settle(spec, done))  # before the waiters' own
        return future

    def _settle(self, spec: GrammarSpec, done: Future[GuidanceGrammar]) -> None:
        """Cache the result, unless it failed for a reason that is not the grammar's."""
        error = None if done.cancelled() else done.exception()
        with self._lock:
            del self._waiting[spec]
            if isinstance(error, GrammarError):
                self._cache.put(spec, error)
            elif error is None and not done.cancelled():
                self._cache.put(spec, done.result())


def _about(error: GrammarError, param: str) -> InvalidRequestError:
    """Return the error with the field that it is about."""
    return InvalidRequestError(f"{param} cannot be used: {shorten(str(error))}.", param=param)
