"""Builds grammars on two worker threads, each after a trial in a process.

A grammar first gets the quick worker's short time. One that needs longer goes to the slow worker, so a queue of grammars
made to be slow delays no other by more than these short times. Only a grammar that passed its trial, within the limits of
time and memory there, is built again in this process.

Any thread may call `check` and `submit`; compiler.py caches the results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.text.grammars.spec import ANY_OBJECT, GrammarKind, GrammarSpec
from engine.text.grammars.trial import GrammarTrial, SlowError, VocabularySource
from engine.text.types import Tokenizer

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar, GuidanceVocabulary

MAX_TEXT = 64 << 10  # characters of a grammar; masks of a constant this long still take 20 ms
QUICK_S = 0.1  # of CPU time: ten times what a common schema takes
MAX_TRIAL_S = 1.0  # of CPU time: four times what the largest sensible schema takes
MAX_SLOW = 8  # grammars that wait for the slow worker
_SLOW_IDLE_S = 60.0  # after which the slow worker's process ends; the quick worker's stays
_STACK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Worker:
    """A thread, its trial process, and the CPU time that it gives a grammar."""

    trial: GrammarTrial
    cpu_s: float
    pool: ThreadPoolExecutor


@dataclass(slots=True)
class _Job:
    """A grammar that is being built."""

    spec: GrammarSpec
    built: Future[GuidanceGrammar] = field(default_factory=Future)
    started_s: float = field(default_factory=time.perf_counter)
    is_counted: bool = True


class GrammarBuilder:
    """Two workers with trial processes, and the vocabulary for llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None]) -> None:
        """`observe` gets the seconds that each grammar took, from a worker thread."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._observe = observe
        # llguidance reads forced text that spells a special token as that token, and then finds that it does not fit.
        self._special = [name for name in tokenizer.special_tokens if len(name) > 1]
        self._quick = _Worker(
            GrammarTrial(self._source), QUICK_S, ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        )
        self._slow = _Worker(
            GrammarTrial(self._source, idle_s=_SLOW_IDLE_S),
            MAX_TRIAL_S,
            ThreadPoolExecutor(1, thread_name_prefix="quire-grammar-slow"),
        )
        self._lock = threading.Lock()  # guards the two below
        self._vocabulary: GuidanceVocabulary | None = None
        self._num_slow = 0

    def check(self, spec: GrammarSpec, param: str) -> None:
        """Raise InvalidRequestError for a grammar that is refused without a trial."""
        if len(spec.text) > MAX_TEXT:
            raise InvalidRequestError(
                f"{param} has {len(spec.text)} characters; a grammar may have at most {MAX_TEXT}.", param=param
            )
        named = None if spec.kind is GrammarKind.LARK else next(filter(spec.text.__contains__, self._special), None)
        if named is not None:
            raise InvalidRequestError(
                f"{param} has the text {named!r}, which is a special token of this model; a constrained answer cannot "
                "spell it. A Lark grammar can call for the token itself.",
                param=param,
            )

    def submit(self, spec: GrammarSpec) -> Future[GuidanceGrammar]:
        """Return a future, which may fail with GrammarError or OverloadedError."""
        return self._start(self._quick, _Job(spec))

    def warm_up(self) -> Future[GuidanceGrammar]:
        """Start the trial process and load the vocabulary; may fail with GrammarError."""
        return self._start(self._quick, _Job(ANY_OBJECT, is_counted=False))

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        for worker in (self._quick, self._slow):
            worker.pool.shutdown(wait=False, cancel_futures=True)
            worker.trial.close()

    def _start(self, worker: _Worker, job: _Job) -> Future[GuidanceGrammar]:
        before = threading.stack_size(_STACK_BYTES)
        try:
            queued = worker.pool.submit(self._run, worker, job)  # starts a thread, the first time
        finally:
            threading.stack_size(before)
        queued.add_done_callback(lambda done: done.cancelled() and job.built.cancel())
        return job.built

    def _source(self) -> VocabularySource:
        tokenizer = self._tokenizer
        return VocabularySource(tokenizer.to_json(), self._vocab_size, tokenizer.eos_token_ids)

    # -- worker threads ----------------------------------------------------------------------------------------------

    def _run(self, worker: _Worker, job: _Job) -> None:
        """Build a grammar, or pass it to the slow worker."""
        grammar: GuidanceGrammar | None = None
        error: BaseException | None = None
        try:
            grammar = self._build(worker, job.spec)
        except SlowError as slow:
            if worker is self._quick:
                error = self._pass_on(job)
                if error is None:
                    return
            else:
                error = slow
        except BaseException as unexpected:
            error = unexpected
        if job.is_counted:
            self._observe(time.perf_counter() - job.started_s)
        if not job.built.set_running_or_notify_cancel():
            return
        if error is not None:
            job.built.set_exception(error)
        else:
            assert grammar is not None
            job.built.set_result(grammar)

    def _pass_on(self, job: _Job) -> OverloadedError | None:
        """Queue a job for the slow worker, unless too many wait there."""
        with self._lock:
            if self._num_slow >= MAX_SLOW:
                return OverloadedError(
                    f"{self._num_slow} grammars that take long to compile wait already; try again later, or make it smaller.",
                    retry_after_s=MAX_TRIAL_S * MAX_SLOW,
                )
            self._num_slow += 1
        try:
            self._start(self._slow, job)
        except RuntimeError:  # the builder is closing
            job.built.cancel()
        return None

    def _build(self, worker: _Worker, spec: GrammarSpec) -> GuidanceGrammar:
        try:
            tried = worker.trial.run(spec, cpu_s=worker.cpu_s)
            from engine.text.grammars.guidance import GuidanceGrammar

            return GuidanceGrammar(self._tokens(), tried.grammar, tried.num_bytes)
        finally:
            if worker is self._slow:
                with self._lock:
                    self._num_slow -= 1

    def _tokens(self) -> GuidanceVocabulary:
        with self._lock:
            if self._vocabulary is None:
                from engine.text.grammars.guidance import GuidanceVocabulary

                self._vocabulary = GuidanceVocabulary(*self._source())
            return self._vocabulary
