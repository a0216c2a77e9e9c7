"""Makes grammars, on threads of its own: text -> trial process -> llguidance in this process -> Grammar.

`check` and `submit` may be called by any thread; who asks keeps what was made (compiler.py for the event loop, the
offline API for itself).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError
from engine.core.grammar import Grammar
from server.errors import shorten
from server.structured.spec import ANY_OBJECT, GrammarSpec, Kind
from server.structured.trials import GrammarError, Trials
from server.text import Tokenizer

if TYPE_CHECKING:
    from server.structured.guidance import Vocabulary

MAX_TEXT = 64 << 10  # characters of a grammar; masks of a constant this long still take 40 ms
NUM_WORKERS = 2
_STACK_BYTES = 32 << 20


class GrammarMaker:
    """Two workers, each with a trial process, and the model's vocabulary as llguidance has it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, observe: Callable[[float], None]) -> None:
        """`observe` is told the seconds that each grammar took, by a worker."""
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._observe = observe
        # llguidance takes forced text that spells a special token for that token, and then finds that it does not fit.
        self._special = [name for name in tokenizer.special_tokens if len(name) > 1]
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="quire-grammar")
        self._local = threading.local()  # each worker's trial process
        self._trials: list[Trials] = []
        self._lock = threading.Lock()  # the workers', around what follows
        self._vocabulary: Vocabulary | None = None

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

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        """The grammar, or a GrammarError, in a while."""
        return self._begin(self._timed, spec)

    def warm_up(self) -> Future[Grammar]:
        """Have made what the first grammar would wait for: a trial process, and the vocabulary. A GrammarError if it cannot be."""
        return self._begin(self._make, ANY_OBJECT)

    def close(self) -> None:
        """End the workers and their processes. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for trials in self._trials:
            trials.close()

    def _begin(self, work: Callable[[GrammarSpec], Grammar], spec: GrammarSpec) -> Future[Grammar]:
        before = threading.stack_size(_STACK_BYTES)
        try:
            return self._pool.submit(work, spec)  # starts a thread, the first times
        finally:
            threading.stack_size(before)

    # -- worker threads ----------------------------------------------------------------------------------------------

    def _timed(self, spec: GrammarSpec) -> Grammar:
        begun_s = time.perf_counter()
        try:
            return self._make(spec)
        finally:
            self._observe(time.perf_counter() - begun_s)

    def _make(self, spec: GrammarSpec) -> Grammar:
        trials = getattr(self._local, "trials", None)
        if trials is None:
            trials = self._local.trials = Trials(self._tokenizer.special_tokens)
            self._trials.append(trials)
        grammar = trials.run(spec)
        from server.structured.guidance import GuidanceGrammar

        return GuidanceGrammar(self._tokens(), grammar)

    def _tokens(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                from server.structured.guidance import Vocabulary

                tokenizer = self._tokenizer
                self._vocabulary = Vocabulary(tokenizer.to_json(), self._vocab_size, tokenizer.eos_token_ids)
            return self._vocabulary


def about(error: GrammarError, param: str) -> InvalidRequestError:
    """The error, saying which field it is about."""
    return InvalidRequestError(f"{param} cannot be used: {shorten(str(error))}.", param=param)
