"""Compiles grammars beside the event loop and the engine, and keeps them.

    compile(spec) -> kept already? -> maker.py, on a thread of its own -> Grammar

What failed is kept too, so that a client that repeats itself costs nothing. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from engine.core.errors import OverloadedError
from engine.core.grammar import Grammar
from server.structured.maker import GrammarMaker, about
from server.structured.spec import GrammarSpec
from server.structured.trials import MAX_TRIAL_S, GrammarError, TrialError
from server.text import Tokenizer

logger = logging.getLogger(__name__)

MAX_KEPT = 256
MAX_WAITING = 64
KEPT_TRIAL_S = 60.0  # a trial without an end is not repeated so soon


class GrammarCompiler:
    """Text becomes a Grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None]) -> None:
        """`observe` is told the seconds that each grammar took which was not kept already."""
        self._maker = GrammarMaker(tokenizer, vocab_size, observe)
        self._kept: OrderedDict[GrammarSpec, asyncio.Future[Grammar]] = OrderedDict()
        self._num_waiting = 0

    async def compile(self, spec: GrammarSpec, param: str) -> Grammar:
        """The grammar. Raises InvalidRequestError about `param` if it cannot be, OverloadedError if too many wait."""
        self._maker.check(spec, param)
        future = self._kept.get(spec)
        if future is None:
            future = self._begin(spec)
        else:
            self._kept.move_to_end(spec)
        try:
            return await asyncio.shield(future)  # others may wait for the same one
        except GrammarError as error:
            raise about(error, param) from error

    async def warm_up(self) -> None:
        """Make ready what the first grammar would wait for. Holds the GIL for 0.2 s with 49,152 tokens."""
        try:
            await asyncio.wrap_future(self._maker.warm_up())
        except TrialError:
            return  # the machine is busy, or all of this is about to end; the first grammar will see
        except GrammarError as error:
            logger.warning("structured outputs cannot be served: %s", error)

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        self._maker.close()

    def _begin(self, spec: GrammarSpec) -> asyncio.Future[Grammar]:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} grammars wait to be compiled already; try again later.", retry_after_s=MAX_TRIAL_S
            )
        future = self._kept[spec] = asyncio.wrap_future(self._maker.submit(spec))
        self._num_waiting += 1
        future.add_done_callback(lambda done: self._settle(spec, done))
        return future

    def _settle(self, spec: GrammarSpec, done: asyncio.Future[Grammar]) -> None:
        """Keep what came of it, unless that was no fault of the grammar's."""
        self._num_waiting -= 1
        if done.cancelled() or not isinstance(done.exception(), GrammarError | None):
            self._kept.pop(spec, None)
        elif isinstance(done.exception(), TrialError):
            done.get_loop().call_later(KEPT_TRIAL_S, self._kept.pop, spec, None)
        while len(self._kept) > MAX_KEPT and next(iter(self._kept.values())).done():
            self._kept.popitem(last=False)
