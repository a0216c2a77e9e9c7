"""Compiles grammars beside the event loop and the engine, and keeps them.

    compile(spec) -> kept already? -> worker thread: trial process -> llguidance in this process -> Grammar

The cache and the count of who waits are the event loop's; two workers do the rest. What failed is kept too, so that a
client that repeats itself costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.core.grammar import Grammar
from server.errors import shorten
from server.structured.spec import GrammarSpec, Kind
from server.structured.trials import MAX_TRIAL_S, GrammarError, TrialError, Trials
from server.text import Tokenizer

if TYPE_CHECKING:
    from server.structured.guidance import Vocabulary

MAX_TEXT = 64 << 10  # characters of a grammar; masks of a constant this long still take 40 ms
MAX_KEPT = 256
MAX_WAITING = 64
KEPT_TRIAL_S = 60.0  # a trial without an end is not repeated so soon
NUM_WORKERS = 2
_STACK_BYTES = 32 << 20


class GrammarCompiler:
    """Text becomes a Grammar. Event loop only."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None]) -> None:
        """`observe` is told the seconds that each grammar took which was not kept already."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._observe = observe
        # llguidance takes forced text that spells a special token for that token, and then finds that it does not fit.
        self._special = [name for name in tokenizer.special_tokens if len(name) > 1]
        self._kept: OrderedDict[GrammarSpec, asyncio.Future[Grammar]] = OrderedDict()
        self._num_waiting = 0
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="quire-grammar")
        self._local = threading.local()  # each worker's trial process
        self._trials: list[Trials] = []
        self._lock = threading.Lock()  # the workers', around what follows
        self._vocabulary: Vocabulary | None = None

    async def compile(self, spec: GrammarSpec, param: str) -> Grammar:
        """The grammar. Raises InvalidRequestError about `param` if it cannot be, OverloadedError if too many wait."""
        if len(spec.text) > MAX_TEXT:
            raise InvalidRequestError(
                f"{param} has {len(spec.text)} characters; a grammar may have at most {MAX_TEXT}.", param=param
            )
        named = None if spec.kind is Kind.GRAMMAR else next(filter(spec.text.__contains__, self._special), None)
        if named is not None:
            raise InvalidRequestError(
                f"{param} has the text {named!r}, which is a special token of this model; a constrained answer cannot "
                "spell it. A Lark grammar can call for the token itself.",
                param=param,
            )
        future = self._kept.get(spec)
        if future is None:
            future = self._begin(spec)
        else:
            self._kept.move_to_end(spec)
        try:
            return await asyncio.shield(future)  # others may wait for the same one
        except GrammarError as error:
            raise InvalidRequestError(f"{param} cannot be used: {shorten(str(error))}.", param=param) from error

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for trials in self._trials:
            trials.close()

    def _begin(self, spec: GrammarSpec) -> asyncio.Future[Grammar]:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} grammars wait to be compiled already; try again later.", retry_after_s=MAX_TRIAL_S
            )
        before = threading.stack_size(_STACK_BYTES)
        try:
            work = self._pool.submit(self._compile, spec)  # starts a thread, the first times
        finally:
            threading.stack_size(before)
        future = self._kept[spec] = asyncio.wrap_future(work)
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

    # -- worker threads ----------------------------------------------------------------------------------------------

    def _compile(self, spec: GrammarSpec) -> Grammar:
        begun_s = time.perf_counter()
        try:
            trials = getattr(self._local, "trials", None)
            if trials is None:
                trials = self._local.trials = Trials(self._tokenizer.special_tokens)
                self._trials.append(trials)
            grammar = trials.run(spec)
            from server.structured.guidance import GuidanceGrammar

            return GuidanceGrammar(self._tokens(), grammar)
        finally:
            self._observe(time.perf_counter() - begun_s)

    def _tokens(self) -> Vocabulary:
        """Made for the first grammar: a daemon that nobody asks for structure starts without."""
        with self._lock:
            if self._vocabulary is None:
                from server.structured.guidance import Vocabulary

                tokenizer = self._tokenizer
                self._vocabulary = Vocabulary(tokenizer.to_json(), self._vocab_size, tokenizer.eos_token_ids)
            return self._vocabulary
