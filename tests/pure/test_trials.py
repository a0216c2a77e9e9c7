"""The process in which grammars are tried: what it says, and that whatever happens to it is told as the grammar's fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.structured import trials as module
from server.structured.spec import ANY_OBJECT, GrammarSpec, Kind
from server.structured.trials import GrammarError, Trials, clean

SLOW = GrammarSpec(Kind.REGEX, "a?" * 30_000)  # 15 seconds
FINE = GrammarSpec(Kind.REGEX, "a+")


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials({"<end>": 2, "[CALL]": 40_000})
    yield made
    made.close()


def test_a_grammar_that_takes_too_long_is_ended(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    trials.run(FINE)
    monkeypatch.setattr(module, "MAX_TRIAL_S", 0.2)
    with pytest.raises(GrammarError, match="takes longer than"):
        trials.run(SLOW)
    monkeypatch.undo()
    assert trials.run(FINE)


def test_a_grammar_that_crashes_the_library_harms_nobody(trials: Trials) -> None:
    """A rule within a rule within a rule overflows the stack of whoever compiles it."""
    deep = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(200_000)) + '\nr200000: "a"'
    with pytest.raises(GrammarError, match="make it smaller"):
        trials.run(GrammarSpec.of_lark(deep))
    assert trials.run(ANY_OBJECT._replace(whitespace=" ?"))


def test_special_tokens_have_their_ids(trials: Trials) -> None:
    assert trials.run(GrammarSpec.of_lark('start: "a" <[40000]> <end>'))
    with pytest.raises(GrammarError, match="40001"):
        trials.run(GrammarSpec.of_lark("start: <[40001]>"))


def test_two_of_the_same_are_the_same() -> None:
    """The key of the cache; the order of properties is the order in which they are to be written."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert GrammarSpec.of_json_schema(schema) == GrammarSpec.of_json_schema(dict(schema))
    other = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert GrammarSpec.of_json_schema(schema) != GrammarSpec.of_json_schema(other)


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
