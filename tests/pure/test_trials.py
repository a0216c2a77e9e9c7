"""The processes in which grammars are tried: what they refuse and how, and that they outlive whatever they try."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from engine.core.errors import OverloadedError
from engine.text.grammars.spec import ANY_OBJECT, GrammarSpec, Kind
from engine.text.grammars.trial import MAX_BUILT_BYTES
from engine.text.grammars.trials import GrammarError, SlowError, Trials, clean
from tests.pure.byte_vocabulary import byte_tokenizer_json
from tests.pure.hostile_grammars import HOSTILE, SLOW

FINE = GrammarSpec(Kind.REGEX, "a+")
LONG_S = 30.0  # of CPU time, which nothing here takes
SPECIAL = ("<end>", "[CALL]")
SETUP = {"tokenizer": byte_tokenizer_json(*SPECIAL), "vocab_size": 258, "end_ids": [256]}
# These end at the first token that calls for the pattern, which the trial's few answers do not.
LATE = ("pattern of a property", "nested unicode", "tag")


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(lambda: SETUP, num_lanes=2)
    yield made
    made.close()


def pid(trials: Trials) -> int:
    assert trials._running is not None
    return trials._running.process.pid


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in LATE])
def test_what_explodes_is_refused_and_harms_nothing_else(trials: Trials, name: str) -> None:
    trials.run(FINE, lane=0, cpu_s=LONG_S)
    process = pid(trials)
    with pytest.raises(GrammarError) as caught:
        trials.run(HOSTILE[name], lane=0, cpu_s=LONG_S)
    words = str(caught.value)
    assert "make it smaller" in words or "schema too large" in words or "nested" in words or "recursion limit" in words
    assert "\n" not in words
    assert trials.run(FINE, lane=0, cpu_s=LONG_S).num_bytes < MAX_BUILT_BYTES
    assert pid(trials) == process


def test_a_crash_of_the_library_is_a_refusal(trials: Trials) -> None:
    """A rule within a rule within a rule overflows the stack on which it is compiled, if memory does not end first."""
    deep = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(200_000)) + '\nr200000: "a"'
    with pytest.raises(GrammarError, match="make it smaller"):
        trials.run(GrammarSpec.of_lark(deep), lane=0, cpu_s=LONG_S)
    assert trials.run(FINE, lane=0, cpu_s=LONG_S)


def test_a_grammar_that_takes_too_long_is_ended(trials: Trials) -> None:
    with pytest.raises(SlowError, match=r"more than 0\.05 s of CPU time.*make it smaller"):
        trials.run(SLOW[0], lane=0, cpu_s=0.05)
    assert trials.run(SLOW[0], lane=1, cpu_s=LONG_S)


def test_a_grammar_that_takes_too_much_memory_is_ended(trials: Trials) -> None:
    """Else this one would go on for 17 s of CPU time."""
    with pytest.raises(GrammarError, match=r"too much memory.*make it smaller"):
        trials.run(HOSTILE["long optional"], lane=0, cpu_s=LONG_S)


def test_memory_is_measured_for_each_grammar_alone(trials: Trials) -> None:
    """Whatever was tried before: freed memory that is used again would count as none."""
    sizes = [trials.run(spec, lane=0, cpu_s=LONG_S).num_bytes for spec in (SLOW[0], FINE, SLOW[0], FINE)]
    assert min(sizes[0], sizes[2]) > 16 << 20
    assert max(sizes[1], sizes[3]) < 4 << 20


def test_special_tokens_have_their_ids(trials: Trials) -> None:
    assert trials.run(GrammarSpec.of_lark('start: "a" <[257]> <end>'), lane=0, cpu_s=LONG_S)
    with pytest.raises(GrammarError, match="1000"):
        trials.run(GrammarSpec.of_lark("start: <[1000]>"), lane=0, cpu_s=LONG_S)


def test_text_that_spells_a_special_token_is_refused(trials: Trials) -> None:
    with pytest.raises(GrammarError, match="special token"):
        trials.run(GrammarSpec(Kind.REGEX, r"\[CALL\]"), lane=0, cpu_s=LONG_S)


def test_a_process_that_was_killed_is_replaced(trials: Trials) -> None:
    trials.run(FINE, lane=0, cpu_s=LONG_S)
    assert trials._running is not None
    killed = trials._running.process
    os.killpg(killed.pid, signal.SIGKILL)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    for lane in (0, 1):
        assert trials.run(FINE, lane=lane, cpu_s=LONG_S)
    assert pid(trials) != killed.pid


def test_a_lane_that_ends_while_it_is_asked_is_no_fault_of_the_grammar(trials: Trials) -> None:
    """Its connection is gone: whoever asks is to try again, and can."""
    trials.run(FINE, lane=1, cpu_s=LONG_S)
    assert trials._running is not None
    trials._running.lanes[1].close()
    with pytest.raises(OverloadedError, match="try again"):
        trials.run(FINE, lane=1, cpu_s=LONG_S)
    assert trials.run(FINE, lane=1, cpu_s=LONG_S)


def test_a_tokenizer_that_the_library_cannot_read_is_said() -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        Trials(lambda: {**SETUP, "tokenizer": "{}"}, num_lanes=1).run(FINE, lane=0, cpu_s=LONG_S)


def test_closed_is_closed() -> None:
    closed = Trials(lambda: SETUP, num_lanes=1)
    closed.close()
    closed.close()
    with pytest.raises(OverloadedError):
        closed.run(FINE, lane=0, cpu_s=LONG_S)


def test_two_of_the_same_are_the_same() -> None:
    """The key of the cache; the order of properties is the order in which they are to be written."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert GrammarSpec.of_json_schema(schema) == GrammarSpec.of_json_schema(dict(schema))
    other = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert GrammarSpec.of_json_schema(schema) != GrammarSpec.of_json_schema(other)
    assert ANY_OBJECT._replace(whitespace=" ?") != ANY_OBJECT


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ('2(5): Expected token\n   1 | start: foo\n   2 | foo "x"\n           ^\n', "2(5): Expected token"),
        ("lexer error: too many\n<non-verbose/>", "lexer error: too many"),
        ("NoExtensionBias\n<non-verbose/>", "no text can match it"),
        ("", "no text can match it"),
    ],
)
def test_messages_are_one_line(message: str, told: str) -> None:
    assert clean(message) == told
