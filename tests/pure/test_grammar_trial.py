"""The processes in which grammars are tried: what they refuse and how, and that they outlive whatever they try."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.core.errors import OverloadedError
from engine.text.fields.structured import ResponseFormat
from engine.text.grammars.spec import ANY_OBJECT, GrammarKind, GrammarSpec
from engine.text.grammars.trial import GrammarError, GrammarTrial, SlowError, VocabularySource, clean
from engine.text.grammars.trial_process import MAX_BUILT_BYTES
from tests.pure.byte_vocabulary import byte_tokenizer_json
from tests.pure.hostile_grammars import HOSTILE, SLOW

FINE = GrammarSpec(GrammarKind.REGEX, "a+")
LONG_S = 30.0  # of CPU time, which nothing here takes
SPECIAL = ("<end>", "[CALL]")
SOURCE = VocabularySource(byte_tokenizer_json(*SPECIAL), 258, frozenset({256}), SPECIAL)
# These end at the first token that calls for the pattern, which the trial's few answers do not.
LATE = ("pattern of a property", "nested unicode", "tag")


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    made = GrammarTrial(lambda: SOURCE)
    yield made
    made.close()


def pid(trial: GrammarTrial) -> int:
    found = trial._process.pid
    assert found is not None
    return found


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in LATE])
def test_what_explodes_is_refused_and_harms_nothing_else(trial: GrammarTrial, name: str) -> None:
    trial.run(FINE, cpu_s=LONG_S)
    process = pid(trial)
    with pytest.raises(GrammarError) as caught:
        trial.run(HOSTILE[name], cpu_s=LONG_S)
    words = str(caught.value)
    assert "make it smaller" in words or "schema too large" in words or "nested" in words or "recursion limit" in words
    assert "\n" not in words
    assert trial.run(FINE, cpu_s=LONG_S).num_bytes < MAX_BUILT_BYTES
    assert pid(trial) == process


def test_a_crash_of_the_library_is_a_refusal(trial: GrammarTrial) -> None:
    """A rule within a rule within a rule overflows the stack on which it is compiled, if memory does not end first."""
    deep = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(200_000)) + '\nr200000: "a"'
    with pytest.raises(GrammarError, match="make it smaller"):
        trial.run(GrammarSpec.of_lark(deep), cpu_s=LONG_S)
    assert trial.run(FINE, cpu_s=LONG_S)


def test_a_grammar_that_takes_too_long_is_ended(trial: GrammarTrial) -> None:
    with pytest.raises(SlowError, match=r"more than 0\.05 s of CPU time.*make it smaller"):
        trial.run(SLOW[0], cpu_s=0.05)
    assert trial.run(SLOW[0], cpu_s=LONG_S)


def test_a_grammar_that_takes_too_much_memory_is_ended(trial: GrammarTrial) -> None:
    """Else this one would go on for 17 s of CPU time."""
    with pytest.raises(GrammarError, match=r"too much memory.*make it smaller"):
        trial.run(HOSTILE["long optional"], cpu_s=LONG_S)


def test_memory_is_measured_for_each_grammar_alone(trial: GrammarTrial) -> None:
    """Whatever was tried before: freed memory that is used again would count as none."""
    sizes = [trial.run(spec, cpu_s=LONG_S).num_bytes for spec in (SLOW[0], FINE, SLOW[0], FINE)]
    assert min(sizes[0], sizes[2]) > 16 << 20
    assert max(sizes[1], sizes[3]) < 4 << 20


def test_special_tokens_have_their_ids(trial: GrammarTrial) -> None:
    assert trial.run(GrammarSpec.of_lark('start: "a" <[257]> <end>'), cpu_s=LONG_S)
    with pytest.raises(GrammarError, match="1000"):
        trial.run(GrammarSpec.of_lark("start: <[1000]>"), cpu_s=LONG_S)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, r"\[CALL\]"),
        (GrammarKind.CHOICE, '["[CALL]"]'),
        (GrammarKind.LARK, 'start: /[ab]/ "[CALL]" "a"'),
        (GrammarKind.LARK, 'root ::= "[CALL]" [a-z]+'),
        (GrammarKind.JSON_SCHEMA, '{"const": "[CALL]"}'),
    ],
)
def test_text_that_spells_a_special_token_is_refused(trial: GrammarTrial, kind: GrammarKind, text: str) -> None:
    """The sentence has what calls for the token, which is accepted."""
    with pytest.raises(GrammarError, match="spells a special token") as caught:
        trial.run(GrammarSpec(kind, text), cpu_s=LONG_S)
    assert "<[257]>" in str(caught.value)
    assert trial.run(GrammarSpec.of_lark('start: <[257]> "a"'), cpu_s=LONG_S)


@pytest.mark.parametrize("trigger", ["<call>", "<ca", "<call>f"])
def test_tags_have_the_tokens_of_their_marks(trigger: str) -> None:
    """As models write them: text that spells a mark would never come."""
    marks = ("<call>", "</call>")
    text = byte_tokenizer_json("<end>", marks=marks)
    tag = {"begin": "<call>f", "schema": {"const": 1}, "end": "</call>"}
    spec = ResponseFormat.model_validate({"type": "structural_tag", "structures": [tag], "triggers": [trigger]}).spec()
    assert spec is not None
    own = GrammarTrial(lambda: VocabularySource(text, 259, frozenset({256}), ("<end>",), marks))
    try:
        tried = own.run(spec, cpu_s=LONG_S)
    finally:
        own.close()
    matcher = LLMatcher(LLTokenizer(text, n_vocab=259, eos_token=256), tried.grammar, log_level=0)
    ids = [*b"so ", 257, *b"f1", 258, *b" and ", 257, *b"f1", 258, 256]
    assert matcher.deep_copy().try_consume_tokens(ids) == len(ids)
    assert matcher.try_consume_tokens([257, *b"f2"]) == 2


def test_text_that_other_tokens_may_spell_is_served(trial: GrammarTrial) -> None:
    """The token itself is not drawn: its bytes are."""
    assert trial.run(GrammarSpec.of_lark('start: TEXT "[CALL]"\nTEXT: /[a-z]*/'), cpu_s=LONG_S)


def test_a_process_that_was_killed_is_replaced(trial: GrammarTrial) -> None:
    trial.run(FINE, cpu_s=LONG_S)
    killed = pid(trial)
    os.killpg(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert trial.run(FINE, cpu_s=LONG_S)
    assert pid(trial) != killed


def test_a_process_that_ends_during_a_trial_is_no_fault_of_the_grammar(trial: GrammarTrial) -> None:
    """The client is asked to try again, and can."""
    trial.run(FINE, cpu_s=LONG_S)
    trial._process._limit_s = 0.0
    with pytest.raises(OverloadedError, match="try again"):
        trial.run(FINE, cpu_s=LONG_S)
    trial._process._limit_s = LONG_S
    assert trial.run(FINE, cpu_s=LONG_S)


def test_a_tokenizer_that_the_library_cannot_read_is_said() -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        GrammarTrial(lambda: SOURCE._replace(tokenizer_json="{}")).run(FINE, cpu_s=LONG_S)


def test_closed_is_closed() -> None:
    closed = GrammarTrial(lambda: SOURCE)
    closed.close()
    closed.close()
    with pytest.raises(OverloadedError):
        closed.run(FINE, cpu_s=LONG_S)


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
