"""Compiles grammars on worker threads, after a trial in a process, and caches them.

    compile(spec) -> cached? -> being built? -> quick worker -> (slow worker) -> Grammar
    hold(key)     -> cached, or in use? -> Grammar, and thoughts before it

A grammar first gets the quick worker's short time. One that needs longer goes to the slow worker, so a queue of grammars
made to be slow delays no other by more than these short times. Only a grammar that passed its trial, within the limits of
time and memory there, is built again in this process. A refusal is cached too, so a client that repeats itself costs
nothing. Any thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError, OverloadedError, QuireError
from engine.core.shown import shorten
from engine.core.types import Grammar, GrammarKey
from engine.text.grammars.spec import ANY_OBJECT, MAX_TEXT, GrammarKind, GrammarSpec, VocabularySource
from engine.text.grammars.thinking import ThinkingGrammar
from engine.text.grammars.trial import GrammarError, GrammarTrial, SlowError

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar, GuidanceVocabulary

MAX_ENTRIES = 256
MAX_BYTES = 512 << 20
_ERROR_BYTES = 1 << 10  # of an entry, besides its text
_RETRY_S = 10.0


class GrammarCache:
    """Grammars and errors by spec; the least recently used is dropped first.

    A grammar's memory counts for as long as a request follows it, even after it was dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSpec, GuidanceGrammar | str] = OrderedDict()
        self._alive: weakref.WeakSet[GuidanceGrammar] = weakref.WeakSet()
        self._latest: weakref.WeakValueDictionary[bytes, GuidanceGrammar] = weakref.WeakValueDictionary()

    def get(self, spec: GrammarSpec) -> GuidanceGrammar | None:
        """Return a usable grammar, or None. Raises GrammarError for a known refusal."""
        found = self._entries.get(spec)
        if found is None:
            return None
        if not isinstance(found, str) and found.is_worn:
            del self._entries[spec]
            return None
        self._entries.move_to_end(spec)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def find(self, digest: bytes) -> GuidanceGrammar | None:
        """Return the latest grammar of a digest, while it is cached or in use. Any thread."""
        return self._latest.get(digest)

    def check_room(self) -> None:
        """Drop old entries. Raises OverloadedError if grammars in use exceed the bound."""
        self._trim()
        if self.num_bytes > self._max_bytes:
            raise OverloadedError(
                f"The grammars of running requests take {self.num_bytes >> 20} MiB; try again later, or make this one smaller.",
                retry_after_s=_RETRY_S,
            )

    def put(self, spec: GrammarSpec, result: GuidanceGrammar | GrammarError) -> None:
        """Add a grammar, or the reason why there is none."""
        if isinstance(result, GrammarError):
            self._entries[spec] = str(result)
        else:
            self._entries[spec] = result
            self._alive.add(result)
            self._latest[spec.digest] = result
        self._trim()

    @property
    def num_bytes(self) -> int:
        """The memory of all entries and of all grammars in use."""
        texts = sum(4 * len(spec.text) + _ERROR_BYTES for spec in self._entries)
        return texts + sum(grammar.num_bytes for grammar in self._alive)

    def _trim(self) -> None:
        while self._entries and (len(self._entries) > MAX_ENTRIES or self.num_bytes > self._max_bytes):
            self._entries.popitem(last=False)


logger = logging.getLogger(__name__)

QUICK_S = 0.1  # of CPU time: ten times what a common schema takes
MAX_TRIAL_S = 1.0  # of CPU time: four times what the largest sensible schema takes
MAX_WAITING = 64
MAX_SLOW = 8  # grammars that wait for the slow worker
_SLOW_IDLE_S = 60.0  # after which the slow worker's process ends; the quick worker's stays
_STACK_BYTES = 32 << 20


class _Worker:
    """A thread, its trial process, and the CPU time that it gives a grammar."""

    def __init__(self, source: Callable[[], VocabularySource], cpu_s: float, *, idle_s: float = math.inf) -> None:
        self.cpu_s = cpu_s
        self.trial = GrammarTrial(source, idle_s=idle_s)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")


class GrammarCompiler:
    """`compile` specs, then `hold` what requests name by their digests; `use` names the vocabulary before the first."""

    _source: VocabularySource

    def __init__(self) -> None:
        self.observe: Callable[[float], None] = lambda _: None  # gets the seconds of each grammar that was not cached
        self._quick = _Worker(lambda: self._source, QUICK_S)
        self._slow = _Worker(lambda: self._source, MAX_TRIAL_S, idle_s=_SLOW_IDLE_S)
        self._places = threading.Semaphore(MAX_SLOW)  # in the slow worker's queue
        self._vocabulary: GuidanceVocabulary | None = None
        self._loading = threading.Lock()  # guards the vocabulary
        self._lock = threading.Lock()  # guards the two below
        self._cache = GrammarCache()
        self._waiting: dict[GrammarSpec, Future[GuidanceGrammar]] = {}

    def use(self, source: VocabularySource, warms_up: bool = False) -> None:
        """Name the vocabulary of all grammars; `warms_up` begins to prepare for the first one.

        That holds the GIL for 0.2 s with 49,152 tokens.
        """
        self._source = source
        if warms_up:
            self._start(self._quick, ANY_OBJECT, Future()).add_done_callback(_warmed)

    def compile(self, spec: GrammarSpec, param: str) -> Future[None]:
        """Return when a request may name the grammar, or InvalidRequestError or OverloadedError. It cannot be cancelled."""
        outcome: Future[None] = Future()
        outcome.set_running_or_notify_cancel()  # other requests may wait for the same grammar

        def settle(done: Future[GuidanceGrammar]) -> None:
            error = done.exception()
            if error is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(_about(error, param) if isinstance(error, GrammarError) else error)

        try:
            self._find(spec, param).add_done_callback(settle)
        except QuireError as error:
            outcome.set_exception(_about(error, param) if isinstance(error, GrammarError) else error)
        return outcome

    def hold(self, key: GrammarKey) -> Grammar:
        """Return what a key names. Raises OverloadedError if it was dropped."""
        inner = self._cache.find(key.digest) if key.digest else None
        if key.digest and inner is None:
            message = "The request's grammar was dropped before the request came; send it again."
            raise OverloadedError(message, retry_after_s=MAX_TRIAL_S)
        thinking = key.thinking
        grammar = inner if thinking is None else ThinkingGrammar(thinking, inner=inner, end_ids=key.end_ids)
        assert grammar is not None, "a key names a grammar or thoughts"
        return grammar

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        for worker in (self._quick, self._slow):
            worker.pool.shutdown(wait=False, cancel_futures=True)
            worker.trial.close()

    def _find(self, spec: GrammarSpec, param: str) -> Future[GuidanceGrammar]:
        """Return a future of the grammar, which is cached, being built, or started."""
        self._check(spec, param)
        with self._lock:
            if spec in self._waiting:
                return self._waiting[spec]
            future: Future[GuidanceGrammar] = Future()
            grammar = self._cache.get(spec)
            if grammar is not None:
                future.set_result(grammar)
                return future
            if len(self._waiting) >= MAX_WAITING:
                raise OverloadedError(
                    f"{len(self._waiting)} grammars wait to be compiled already; try again later.",
                    retry_after_s=MAX_TRIAL_S,
                )
            self._cache.check_room()
            self._waiting[spec] = future
        begun_s = time.perf_counter()
        future.add_done_callback(lambda done: self._settle(spec, done, begun_s))  # before the waiters' own
        return self._start(self._quick, spec, future)

    def _check(self, spec: GrammarSpec, param: str) -> None:
        """Raise InvalidRequestError for a grammar that is refused without a trial."""
        if len(spec.text) > MAX_TEXT:
            raise InvalidRequestError(
                f"{param} has {len(spec.text)} characters; a grammar may have at most {MAX_TEXT}.", param=param
            )
        # llguidance reads forced text that spells a special token as that token, and then finds that it does not fit.
        special = () if spec.kind is GrammarKind.LARK else self._source.special_tokens
        named = next((name for name in special if len(name) > 1 and name in spec.text), None)
        if named is not None:
            raise InvalidRequestError(
                f"{param} has the text {named!r}, which is a special token of this model; a constrained answer cannot "
                "spell it. A Lark grammar can call for the token itself.",
                param=param,
            )

    def _settle(self, spec: GrammarSpec, done: Future[GuidanceGrammar], begun_s: float) -> None:
        """Cache the result, unless it failed for a reason that is not the grammar's."""
        error = done.exception()
        with self._lock:
            del self._waiting[spec]
            if isinstance(error, GrammarError):
                self._cache.put(spec, error)
            elif error is None:
                self._cache.put(spec, done.result())
            self.observe(time.perf_counter() - begun_s)

    def _start(self, worker: _Worker, spec: GrammarSpec, built: Future[GuidanceGrammar]) -> Future[GuidanceGrammar]:
        """Queue a grammar for a worker, and return the future that gets it."""
        if worker is self._quick:
            built.set_running_or_notify_cancel()  # from now on no waiter can cancel it
        before = threading.stack_size(_STACK_BYTES)
        try:
            queued = worker.pool.submit(self._run, worker, spec, built)  # starts a thread, the first time
            queued.add_done_callback(partial(_pass_on, built))
        except RuntimeError:
            built.set_exception(_closing())
        finally:
            threading.stack_size(before)
        return built

    # -- worker threads ----------------------------------------------------------------------------------------------

    def _run(self, worker: _Worker, spec: GrammarSpec, built: Future[GuidanceGrammar]) -> None:
        """Build a grammar, or pass it to the slow worker."""
        try:
            built.set_result(self._build(worker, spec))
        except SlowError:
            if worker is self._slow:
                raise
            if self._places.acquire(blocking=False):
                self._start(self._slow, spec, built)
            else:
                built.set_exception(
                    OverloadedError(
                        f"{MAX_SLOW} grammars that take long to compile wait already; try again later, or make it smaller.",
                        retry_after_s=MAX_TRIAL_S * MAX_SLOW,
                    )
                )

    def _build(self, worker: _Worker, spec: GrammarSpec) -> GuidanceGrammar:
        try:
            tried = worker.trial.run(spec, cpu_s=worker.cpu_s)
        finally:
            if worker is self._slow:
                self._places.release()
        from engine.text.grammars.guidance import GuidanceGrammar, GuidanceVocabulary

        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = GuidanceVocabulary(*self._source[:3])
        return GuidanceGrammar(self._vocabulary, tried.grammar, tried.num_bytes)


def _warmed(done: Future[GuidanceGrammar]) -> None:
    error = done.exception()
    if isinstance(
        error, GrammarError
    ):  # else the machine is busy, or the daemon shuts down; the first grammar tries again
        logger.warning("structured outputs cannot be served: %s", error)


def _about(error: GrammarError, param: str) -> InvalidRequestError:
    """Return the error with the field that it is about."""
    return InvalidRequestError(f"{param} cannot be used: {shorten(str(error))}.", param=param)


def _pass_on(built: Future[GuidanceGrammar], queued: Future[None]) -> None:
    """Give those who wait for a grammar the error of its build."""
    error = _closing() if queued.cancelled() else queued.exception()
    if error is not None:
        built.set_exception(error)


def _closing() -> OverloadedError:
    message = "No grammar can be compiled now: the server is shutting down, or may start no further threads."
    return OverloadedError(message, retry_after_s=MAX_TRIAL_S)
