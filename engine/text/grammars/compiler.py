"""Compiles grammars beside the event loop and the engine, and keeps them.

    compile(spec) -> kept already? -> being made? -> maker.py, on a thread of its own -> Grammar

Why a grammar cannot be used is kept too, so that a client that repeats itself costs nothing. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.core.errors import OverloadedError
from engine.core.grammar import Grammar
from engine.text.detokenizer import Tokenizer
from engine.text.grammars.kept import KeptGrammars
from engine.text.grammars.maker import MAX_TRIAL_S, GrammarMaker, about
from engine.text.grammars.spec import GrammarSpec
from engine.text.grammars.trials import GrammarError

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar

logger = logging.getLogger(__name__)

MAX_WAITING = 64


class GrammarCompiler:
    """Text becomes a Grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None]) -> None:
        """`observe` gets the seconds that each grammar took which was not kept already."""
        self._maker = GrammarMaker(tokenizer, vocab_size, observe)
        self._kept = KeptGrammars()
        self._waiting: dict[GrammarSpec, asyncio.Future[GuidanceGrammar]] = {}

    async def compile(self, spec: GrammarSpec, param: str) -> Grammar:
        """The grammar. Raises InvalidRequestError about `param` if it cannot be, OverloadedError if too many wait."""
        self._maker.check(spec, param)
        try:
            grammar = self._kept.get(spec)
            if grammar is None:
                grammar = await asyncio.shield(self._waiting.get(spec) or self._begin(spec))  # others may wait for it
        except GrammarError as error:
            raise about(error, param) from error
        return grammar

    async def warm_up(self) -> None:
        """Make ready what the first grammar would wait for. Holds the GIL for 0.2 s with 49,152 tokens."""
        try:
            await asyncio.wrap_future(self._maker.warm_up())
        except OverloadedError:
            return  # the machine is busy, or all of this is about to end; the first grammar will see
        except GrammarError as error:
            logger.warning("structured outputs cannot be served: %s", error)

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        self._maker.close()

    def _begin(self, spec: GrammarSpec) -> asyncio.Future[GuidanceGrammar]:
        if len(self._waiting) >= MAX_WAITING:
            raise OverloadedError(
                f"{len(self._waiting)} grammars wait to be compiled already; try again later.",
                retry_after_s=MAX_TRIAL_S,
            )
        self._kept.check_room()
        future = self._waiting[spec] = asyncio.wrap_future(self._maker.submit(spec))
        future.add_done_callback(lambda done: self._settle(spec, done))
        return future

    def _settle(self, spec: GrammarSpec, done: asyncio.Future[GuidanceGrammar]) -> None:
        """Keep what came of it, unless that was no fault of the grammar's."""
        del self._waiting[spec]
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._kept.put(spec, done.result())
        elif isinstance(error, GrammarError):
            self._kept.put(spec, error)
