"""The engine thread: drives the engines of all models in turns, because they share the cores.

One thread, since the native library has one team of threads: a second caller would compute alone beside it. Turns go by
measured time: of the engines with work, the next is the one that has used the fewest seconds for its share. One that was
idle keeps nothing from that time. A step is the shortest turn, so an engine plans its step beside the streams of the others
(`Beside` in core/budget.py); if it has prompts alone, a step as long as it may be counts as one of theirs, so they alternate. A guard's verdicts are not
planned beside streams that wait for verdicts.

An engine's error ends that engine. Its end, which may write its cache to disk, runs on another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.core.budget import Beside

_QUIET_S = 0.1  # without a message for this long, no client waits while other work is done


class Driven(Protocol):
    """The part of an engine that its thread uses."""

    share: float  # of the time, against the other engines' shares
    used_s: float  # seconds of turns divided by the share; the arbiter's

    @property
    def is_ready(self) -> bool:
        """Return whether there are messages or work."""

    @property
    def is_urgent(self) -> bool:
        """Return whether some of that is not background work."""

    @property
    def stream_s(self) -> float:
        """Return the seconds of a step of its streams; 0 while it has none."""

    @property
    def is_seen(self) -> bool:
        """Return whether it has any request but those that are held."""

    @property
    def target_itl_s(self) -> float | None:
        """Return the gap between two tokens that its streams aim at."""

    def turn(self, beside: Beside | None) -> bool:
        """Take in messages and make a step; return whether there will be another turn. Raises nothing.

        `beside` is what other engines do; None while they are idle.
        """

    def chores(self) -> Iterator[None]:
        """Do a quiet moment's work in parts, between which messages are looked for."""


class Arbiter:
    """Its thread runs while there are engines. `changed` guards their inboxes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self._clock = clock
        self._engines: list[Driven] = []
        self._thread: threading.Thread | None = None
        self._used_s = 0.0  # of the engine that had the last turn, before it: one that was idle begins there

    def add(self, engine: Driven) -> None:
        """Drive an engine until its last turn. Any thread."""
        with self.changed:
            self._engines = [*self._engines, engine]
            self.changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="quire-engine", daemon=True)
                self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether engines are driven."""
        return self._thread is not None and self._thread.is_alive()

    def _main(self) -> None:
        while True:
            engines = self._engines
            ready = [engine for engine in engines if engine.is_ready]
            if not ready:
                self._rest(engines)
                continue
            engine, lives = self.give_turn(ready)
            if not lives and not self._remove(engine):
                return

    def give_turn(self, ready: list[Driven]) -> tuple[Driven, bool]:
        """Give the next of some engines its turn; return it, and whether there will be another."""
        if len(ready) == 1:
            return ready[0], ready[0].turn(None)
        engine = self._next(ready)
        return engine, self._share(engine, ready)

    def _next(self, ready: list[Driven]) -> Driven:
        """Return the engine whose turn it is; background work waits for other work."""
        return min([each for each in ready if each.is_urgent] or ready, key=lambda each: max(each.used_s, self._used_s))

    def _share(self, engine: Driven, ready: list[Driven]) -> bool:
        """Give an engine a turn beside others, and count it."""
        streaming = [each for each in ready if each.stream_s and (each.is_seen or engine.is_seen)]
        others_s = sum([each.stream_s for each in streaming if each is not engine])
        targets = [each.target_itl_s for each in streaming]
        beside = Beside(others_s, min([target for target in targets if target is not None], default=None))
        weight = others_s / beside.prompts_s(others_s) if others_s and not engine.stream_s else 1.0
        self._used_s, begun_s = max(engine.used_s, self._used_s), self._clock()
        lives = engine.turn(beside)
        engine.used_s = self._used_s + (self._clock() - begun_s) * weight / engine.share
        return lives

    def _remove(self, engine: Driven) -> bool:
        """Drive an engine no longer; return whether there are others."""
        with self.changed:
            self._engines = [each for each in self._engines if each is not engine]
            if not self._engines:
                self._thread = None
            return bool(self._engines)

    def _rest(self, engines: list[Driven]) -> None:
        """Wait for messages; in a quiet moment, engines check for leaks and prepare, little by little."""
        if self._wait(engines, _QUIET_S):
            return
        for engine in engines:
            for _ in engine.chores():
                if self._wait(engines, 0.0):
                    return
        self._wait(engines, None)

    def _wait(self, engines: list[Driven], timeout_s: float | None) -> bool:
        """Wait for messages, or another engine; return whether there are some."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self._engines is not engines or any(engine.is_ready for engine in engines), timeout_s
            )
