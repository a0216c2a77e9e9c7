"""Makes grammars, on threads of its own: text -> trial process -> llguidance in this process -> Grammar.

A grammar gets the quick worker's short time first; what needs longer goes to the slow worker, so that a queue of grammars
made to be slow delays no other by more than these short times. Only what passed its trial, within the trial's limits of
time and memory, is built again in this process.

`check` and `submit` may be called by any thread; the caller keeps what was made (kept.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.core.errors import InvalidRequestError, OverloadedError, shorten
from engine.text.detokenizer import Tokenizer
from engine.text.grammars.spec import ANY_OBJECT, GrammarSpec, Kind
from engine.text.grammars.trials import GrammarError, SlowError, Trials

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar, Vocabulary

MAX_TEXT = 64 << 10  # characters of a grammar; masks of a constant this long still take 20 ms
QUICK_S = 0.1  # of CPU time: ten times what a common schema takes
MAX_TRIAL_S = 1.0  # of CPU time: four times what the largest sensible schema takes
MAX_SLOW = 8  # waiting for the slow worker
_STACK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Worker:
    """A thread, its lane to the trial process, and the CPU time it gives a grammar."""

    lane: int
    cpu_s: float
    pool: ThreadPoolExecutor


@dataclass(slots=True)
class _Job:
    """A grammar on its way."""

    spec: GrammarSpec
    made: Future[GuidanceGrammar] = field(default_factory=Future)
    begun_s: float = field(default_factory=time.perf_counter)
    is_counted: bool = True


class GrammarMaker:
    """Two workers, the trial process, and the model's vocabulary as llguidance has it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None]) -> None:
        """`observe` gets the seconds that each grammar took, from a worker."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._observe = observe
        # llguidance takes forced text that spells a special token for that token, and then finds that it does not fit.
        self._special = [name for name in tokenizer.special_tokens if len(name) > 1]
        self._quick = _Worker(0, QUICK_S, ThreadPoolExecutor(1, thread_name_prefix="quire-grammar"))
        self._slow = _Worker(1, MAX_TRIAL_S, ThreadPoolExecutor(1, thread_name_prefix="quire-grammar-slow"))
        self._trials = Trials(self._setup, num_lanes=2)
        self._lock = threading.Lock()  # the workers', around what follows
        self._vocabulary: Vocabulary | None = None
        self._num_slow = 0

    def check(self, spec: GrammarSpec, param: str) -> None:
        """Raise InvalidRequestError about `param` for what can be told without a trial."""
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

    def submit(self, spec: GrammarSpec) -> Future[GuidanceGrammar]:
        """The grammar, in a while; or a GrammarError, or an OverloadedError if it was not tried."""
        return self._begin(self._quick, _Job(spec))

    def warm_up(self) -> Future[GuidanceGrammar]:
        """Make ready what the first grammar would wait for: the trial process, and the vocabulary. A GrammarError if it cannot be."""
        return self._begin(self._quick, _Job(ANY_OBJECT, is_counted=False))

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        for worker in (self._quick, self._slow):
            worker.pool.shutdown(wait=False, cancel_futures=True)
        self._trials.close()

    def _begin(self, worker: _Worker, job: _Job) -> Future[GuidanceGrammar]:
        before = threading.stack_size(_STACK_BYTES)
        try:
            queued = worker.pool.submit(self._run, worker, job)  # starts a thread, the first time
        finally:
            threading.stack_size(before)
        queued.add_done_callback(lambda done: done.cancelled() and job.made.cancel())
        return job.made

    def _setup(self) -> dict[str, Any]:
        """What the trial process needs to know of the model."""
        return {
            "tokenizer": self._tokenizer.to_json(),
            "vocab_size": self._vocab_size,
            "end_ids": sorted(self._tokenizer.eos_token_ids),
        }

    # -- worker threads ----------------------------------------------------------------------------------------------

    def _run(self, worker: _Worker, job: _Job) -> None:
        """Make it, or hand it on to the slow worker."""
        grammar: GuidanceGrammar | None = None
        error: BaseException | None = None
        try:
            grammar = self._make(worker, job.spec)
        except SlowError as slow:
            if worker is self._quick:
                error = self._hand_on(job)
                if error is None:
                    return
            else:
                error = slow
        except BaseException as unexpected:
            error = unexpected
        if job.is_counted:
            self._observe(time.perf_counter() - job.begun_s)
        if not job.made.set_running_or_notify_cancel():
            return
        if error is not None:
            job.made.set_exception(error)
        else:
            assert grammar is not None
            job.made.set_result(grammar)

    def _hand_on(self, job: _Job) -> OverloadedError | None:
        """Queue it for the slow worker, unless too many wait there."""
        with self._lock:
            if self._num_slow >= MAX_SLOW:
                return OverloadedError(
                    f"{self._num_slow} grammars that take long to compile wait already; try again later, or make it smaller.",
                    retry_after_s=MAX_TRIAL_S * MAX_SLOW,
                )
            self._num_slow += 1
        try:
            self._begin(self._slow, job)
        except RuntimeError:  # all of this is about to end
            job.made.cancel()
        return None

    def _make(self, worker: _Worker, spec: GrammarSpec) -> GuidanceGrammar:
        try:
            tried = self._trials.run(spec, lane=worker.lane, cpu_s=worker.cpu_s)
            from engine.text.grammars.guidance import GuidanceGrammar

            return GuidanceGrammar(self._tokens(), tried.grammar, tried.num_bytes)
        finally:
            if worker is self._slow:
                with self._lock:
                    self._num_slow -= 1

    def _tokens(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                from engine.text.grammars.guidance import Vocabulary

                tokenizer = self._tokenizer
                self._vocabulary = Vocabulary(tokenizer.to_json(), self._vocab_size, tokenizer.eos_token_ids)
            return self._vocabulary


def about(error: GrammarError, param: str) -> InvalidRequestError:
    """The error, saying which field it is about."""
    return InvalidRequestError(f"{param} cannot be used: {shorten(str(error))}.", param=param)
