"""Making and keeping grammars: what holds up others, what is kept and for how long, and what a grammar that grows may take."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from harness import byte_tokenizer

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.core.types import Grammar, GrammarKey
from engine.text.grammars import compiler as compiler_module
from engine.text.grammars import guidance
from engine.text.grammars.compiler import MAX_ENTRIES, MAX_TEXT, GrammarCache, GrammarCompiler
from engine.text.grammars.guidance import GuidanceGrammar, GuidanceVocabulary
from engine.text.grammars.spec import GrammarKind, GrammarSpec
from engine.text.grammars.trial import GrammarError
from engine.text.grammars.trial_process import private_bytes, to_guidance
from tests.pure.hostile_grammars import HOSTILE, SLOW

WAIT_S = 120.0
NUM_WORDS = 9


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


FINE = regex("[a-f]{3}")


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler()
    made.use(byte_tokenizer().vocabulary(257))
    made.compile(regex("warm"), "x").result()
    yield made
    made.close()


def made_by(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
    """Compile a grammar, and find it by its name."""
    compiler.compile(spec, "x").result(WAIT_S)
    return compiler.hold(GrammarKey(spec.digest))


def compiling(work: Callable[[GrammarCompiler], Awaitable[None]]) -> None:
    """Do something with a compiler, on an event loop."""

    async def run() -> None:
        compiler = GrammarCompiler()
        compiler.use(byte_tokenizer().vocabulary(257))
        try:
            await asyncio.wait_for(work(compiler), WAIT_S)
        finally:
            compiler.close()

    asyncio.run(run())


def slow_worker_waits(compiler: GrammarCompiler) -> threading.Event:
    """Return what lets the slow worker go on; until then no slow grammar is done, however fast the machine is."""
    compiler._quick.cpu_s = 0.05  # less than a slow grammar takes anywhere
    go_on = threading.Event()
    compiler._slow.pool.submit(go_on.wait, WAIT_S)
    return go_on


def test_slow_grammars_hold_up_no_other(compiler: GrammarCompiler) -> None:
    """All that is slow waits for one worker; the other one is there for the rest."""
    go_on = slow_worker_waits(compiler)
    slow = [compiler._find(spec, "x") for spec in SLOW[:3]]
    assert made_by(compiler, FINE).start().count_allowed(b"abc") == 3
    assert not any(future.done() for future in slow)
    go_on.set()
    for future in slow:
        outcome(future)


def test_only_so_many_slow_grammars_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_SLOW", 2)
    compiler = GrammarCompiler()
    compiler.use(byte_tokenizer().vocabulary(257))
    go_on = slow_worker_waits(compiler)
    try:
        futures = [compiler._find(spec, "x") for spec in SLOW]
        assert all(isinstance(outcome(future), OverloadedError) for future in futures[2:])
        assert not any(future.done() for future in futures[:2])
        go_on.set()
        kinds = GuidanceGrammar | GrammarError
        assert all(isinstance(outcome(future), kinds) for future in futures[:2])
        assert isinstance(outcome(compiler._find(SLOW[-1], "x")), kinds)  # there is a place again
    finally:
        compiler.close()


def outcome(future: Future[GuidanceGrammar]) -> object:
    error = future.exception(WAIT_S)
    return future.result() if error is None else error


def test_those_that_wait_when_it_closes_are_refused() -> None:
    compiler = GrammarCompiler()
    compiler.use(byte_tokenizer().vocabulary(257))
    slow_worker_waits(compiler).set()
    futures = [compiler._find(spec, "x") for spec in SLOW]
    compiler.close()
    assert any(isinstance(outcome(future), OverloadedError) for future in futures)
    with pytest.raises(OverloadedError, match="shutting down"):
        compiler.compile(FINE, "x").result()


def test_hostile_grammars_take_no_memory_here(compiler: GrammarCompiler) -> None:
    """Each would take 40 to 200 MiB in this process."""
    before = private_bytes(Path("/proc/self/statm").read_bytes())
    assert max(len(spec.text) for spec in HOSTILE.values()) <= MAX_TEXT  # or it is not even tried
    outcomes = {name: outcome(compiler._find(spec, "x")) for name, spec in HOSTILE.items()}
    assert sum(isinstance(error, InvalidRequestError) for error in outcomes.values()) >= len(HOSTILE) - 3
    del outcomes
    compiler._cache = GrammarCache()
    gc.collect()
    assert private_bytes(Path("/proc/self/statm").read_bytes()) - before < 16 << 20


def test_a_refusal_names_the_field_and_is_remembered() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for _ in range(2):
            with pytest.raises(
                InvalidRequestError, match=r"structured_outputs cannot be used: .*make it smaller"
            ) as caught:
                await asyncio.wrap_future(compiler.compile(HOSTILE["nested counts"], "structured_outputs"))
            assert caught.value.param == "structured_outputs"
            compiler._start = None  # type: ignore[method-assign, assignment]  # it is not made again

    compiling(work)


def test_the_same_grammar_is_made_once_for_all_who_wait() -> None:
    async def work(compiler: GrammarCompiler) -> None:
        compiled: list[float] = []
        compiler.observe = compiled.append
        await asyncio.gather(*(asyncio.wrap_future(compiler.compile(FINE, "x")) for _ in range(5)))
        await asyncio.wrap_future(compiler.compile(FINE, "x"))
        assert len(compiled) == 1

    compiling(work)


def test_a_thread_may_wait_for_a_grammar() -> None:
    """As the offline API does; the refusals are those of an event loop."""
    compiler = GrammarCompiler()
    compiler.use(byte_tokenizer().vocabulary(257))
    try:
        made = made_by(compiler, FINE)
        assert made_by(compiler, FINE) is made
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=r"x cannot be used: .*unclosed group"):
                compiler.compile(regex("("), "x").result()
    finally:
        compiler.close()


def test_a_grammar_that_broke_is_made_again() -> None:
    """Its matchers share a lexer, which stays broken once it ran into a limit."""

    async def work(compiler: GrammarCompiler) -> None:
        await asyncio.wrap_future(compiler.compile(FINE, "x"))
        first = compiler.hold(GrammarKey(FINE.digest))
        matcher = first.start()
        matcher.accept(ord("z"))
        assert matcher.error() is not None
        await asyncio.wrap_future(compiler.compile(FINE, "x"))
        assert compiler.hold(GrammarKey(FINE.digest)) is not first

    compiling(work)


class Built(GuidanceGrammar):
    """One that was said to take so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(VOCABULARY, to_guidance({"kind": "regex", "text": "a+"}), num_bytes)


VOCABULARY = GuidanceVocabulary(byte_tokenizer().vocabulary(257).tokenizer_json, 257, frozenset({256}))


def test_grammars_are_kept_by_bytes() -> None:
    kept = GrammarCache(max_bytes=100_000)
    for i in range(4):
        kept.put(regex(f"a{i}"), Built(30_000))
    assert kept.get(regex("a0")) is None
    assert all(kept.get(regex(f"a{i}")) is not None for i in (2, 3))
    assert kept.num_bytes <= 100_000


def test_grammars_are_kept_by_count_too() -> None:
    kept = GrammarCache()
    for i in range(MAX_ENTRIES + 10):
        kept.put(regex(f"a{i}"), GrammarError("no"))
    assert kept.get(regex("a9")) is None
    with pytest.raises(GrammarError, match="no"):
        kept.get(regex("a10"))


def test_what_is_being_followed_counts_though_it_is_not_kept() -> None:
    kept = GrammarCache(max_bytes=100_000)
    followed = Built(200_000)
    kept.put(regex("big"), followed)
    assert kept.get(regex("big")) is None
    with pytest.raises(OverloadedError, match="try again"):
        kept.check_room()
    del followed
    kept.check_room()
    assert kept.num_bytes == 0


class Meter:
    """Reads what the test says."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.per_call = 0

    def read(self) -> int:
        self.num_bytes += self.per_call
        return self.num_bytes


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    made = Meter()
    monkeypatch.setattr(guidance, "_memory", made.read)
    return made


def test_a_grammar_that_grows_fails_the_requests_that_follow_it(meter: Meter) -> None:
    grammar, other = Built(0), Built(0)
    matcher, bystander = grammar.start(), other.start()
    meter.per_call = guidance.MAX_GROWN_BYTES // 4
    matcher.accept(ord("a"))
    matcher.accept(ord("a"))
    matcher.accept(ord("a"))
    assert grammar.is_worn  # and not given to others any more
    assert matcher.error() is None
    masks = np.zeros((1, NUM_WORDS), np.int32)
    grammar.fill_masks([matcher], masks.ctypes.data, NUM_WORDS)
    matcher.accept(ord("a"))
    assert "smaller" in (matcher.error() or "")
    assert bystander.error() is None
    assert not other.is_worn


def test_masks_are_right_however_they_are_filled(meter: Meter) -> None:
    grammars = [Built(0) for _ in range(12)]
    matchers = [grammar.start() for grammar in grammars]
    masks = np.zeros((12, NUM_WORDS), np.int32)
    for step in range(80):
        meter.per_call = 2 << 20 if step == 60 else 0
        if step == 20:
            meter.per_call = 100 << 10
        masks[:] = 0
        grammars[0].fill_masks(matchers, masks.ctypes.data, NUM_WORDS)
        assert (masks == masks[0]).all()
        assert masks[0].any()
    assert all(grammar.is_worn for grammar in grammars)  # it is not known which one took 2 MiB at step 60
    assert not any(grammar.is_quiet for grammar in grammars)  # so each is filled alone


def test_a_grammar_that_becomes_quiet_while_masks_are_filled_leaves_none_empty(meter: Meter) -> None:
    meter.per_call = 0
    quiet, other = Built(0), Built(0)
    while not quiet.is_quiet:
        quiet.charge(0)
    matchers = [quiet.start(), *[other.start() for _ in range(12)]]
    masks = np.zeros((13, NUM_WORDS), np.int32)
    while not other.is_quiet:
        masks[:] = 0
        other.fill_masks(matchers, masks.ctypes.data, NUM_WORDS)
        assert masks.any(axis=1).all()
