"""Request bodies: what is accepted is read, what is neutral passes, what is said about faults stays short."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from engine.core.errors import ContextLengthError, InvalidRequestError
from engine.core.types import SamplingParams
from engine.text.chat.choice import Delta
from engine.text.chat.limits import ModelLimits
from engine.text.fields.body import MAX_FAULTS, MAX_FIELDS, Refused, RequestBody
from engine.text.requests.chat_preprocessor import _SHARED
from engine.text.types import Content, SamplingDefaults
from server.answers.body import ChatBody, StreamOptions
from server.answers.formatter import ChunkMeta, frame
from server.anthropic.messages import MessagesBody
from server.openai.chat import ChatFormatter
from server.openai.completions import CompletionBody, CompletionFormatter, completion_params
from server.openai.responses.body import ResponsesBody
from server.operations.tokens import DetokenizeBody, TokenizeBody
from server.protocol.errors import to_api_error

BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, StreamOptions)
ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(path.read_text() for room in ("server", "engine/text") for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize(("body", "name"), [(body, name) for body in BODIES for name in body.model_fields], ids=str)
def test_every_declared_field_is_read_somewhere(body: type[RequestBody], name: str) -> None:
    assert name in _SHARED or re.search(rf"(self|body|options|stream_usage|fields|chat)\.{name}\b", SOURCE), (
        f"{body.__name__}.{name} is never read"
    )


@pytest.mark.parametrize("body", BODIES)
def test_a_field_is_one_thing_only(body: type[RequestBody]) -> None:
    kinds = [body.model_fields.keys(), body.NO_OPS, body.HINTS.keys(), body.UNSUPPORTED.keys()]
    assert len(set().union(*kinds)) == sum(map(len, kinds))


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": None},
        {"suffix": ""},
        {"use_beam_search": False},
        {"response_format": {"type": "text"}},
        {"length_penalty": 1.0},
        {"guided_json": None},
        {"stream_interval": 1},
        {"guided_decoding_backend": ""},
    ],
)
def test_a_value_that_asks_for_nothing_passes(fields: dict[str, object]) -> None:
    assert CompletionBody.model_validate({"prompt": "x", **fields}).ignored_fields() == []


@pytest.mark.parametrize("name", sorted(ChatBody.UNSUPPORTED))
def test_every_unsupported_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], name: {"some": "value"}})
    error = to_api_error(refused.value)
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert error.message.startswith(f"{name} is not supported: ")


class Inner(RequestBody):
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {"verbosity": Refused(("medium",))}
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {"colour": ("any",)}


class Outer(RequestBody):
    text: list[Inner]


def test_a_nested_field_is_named_in_full() -> None:
    with pytest.raises(ValidationError) as refused:
        Outer.model_validate({"text": [{"colour": "any"}, {"verbosity": "low"}]})
    error = to_api_error(refused.value)
    assert (error.param, error.code) == ("text.1.verbosity", "unsupported_parameter")
    assert error.message.startswith("text.1.verbosity is not supported: ")


def test_the_unknown_fields_of_items_are_named_once() -> None:
    body = Outer.model_validate({"text": [{"colour": "red", "a": 1}, {"a": 2}, {"colour": "any"}]})
    assert body.ignored_fields() == ["text.colour", "text.a"]


@pytest.mark.parametrize("name", sorted(ChatBody.HINTS))
def test_a_hint_is_dropped_and_named(name: str) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], name: {"some": "value"}})
    assert body.ignored_fields() == [name]


@pytest.mark.parametrize("name", sorted(ChatBody.NO_OPS))
def test_no_ops_pass_untold(name: str) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], name: "value"})
    assert body.ignored_fields() == []


def test_ignored_names_are_fit_for_a_header() -> None:
    body = CompletionBody.model_validate({"prompt": "x", "a\r\nb": 1, "é": 2, "y" * 1000: 3})
    names = body.ignored_fields()
    assert names[:2] == [r"a\r\nb", r"\xe9"]
    assert all(name.isascii() and name.isprintable() and len(name) < 300 for name in names)


NUMBERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "priority",
    "top_logprobs",
)
WRONG: dict[str, Any] = {name: {} for name in NUMBERS}


def test_a_validation_message_is_short_and_never_repeats_the_input() -> None:
    secret = "hunter2" * 1000
    with pytest.raises(ValidationError) as wrong:
        ChatBody.model_validate({"messages": [{"role": secret, "content": 5}] * 500, **WRONG})
    error = to_api_error(wrong.value)
    assert "hunter2" not in error.message
    assert error.message.count(";") == MAX_FAULTS
    assert "messages.1" not in error.message, "a list stops at its first fault"


def _request_bodies(base: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    for each in base.__subclasses__():
        if each.__module__ != "engine.llm.params":  # keyword arguments, not a body
            yield each
        yield from _request_bodies(each)


def _collections(schema: Any) -> Iterator[dict[str, Any]]:
    """All lists and dicts within a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict", "set", "frozenset", "tuple"):
            yield schema
        for inner in schema.values():
            yield from _collections(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _collections(inner)


@pytest.mark.parametrize("body", list(dict.fromkeys(_request_bodies())), ids=lambda body: body.__name__)
def test_every_list_and_dict_of_a_body_stops_at_its_first_fault(body: type[RequestBody]) -> None:
    body.model_rebuild()  # a body is built at its first use
    found = list(_collections(body.__pydantic_core_schema__))
    assert [schema for schema in found if not schema.get("fail_fast") and schema["type"] in ("list", "dict")] == []
    assert body not in (ChatBody, MessagesBody, ResponsesBody) or len(found) > 5


@pytest.mark.parametrize("body", list(dict.fromkeys(_request_bodies())), ids=lambda body: body.__name__)
def test_no_object_of_a_body_has_many_fields(body: type[RequestBody]) -> None:
    with pytest.raises(ValidationError) as refused:
        body.model_validate({f"u{index}": 1 for index in range(MAX_FIELDS + 1)})
    assert "send at most 1024" in to_api_error(refused.value).message


def test_what_nobody_foresaw_is_told_nothing_about() -> None:
    error = to_api_error(KeyError("secret"))
    assert (error.status, error.code) == (500, "internal_error")
    assert "secret" not in error.message


class Vocabulary:
    """As much of a tokenizer as sampling parameters need."""

    eos_token_ids = frozenset({7})
    sampling_defaults = SamplingDefaults(temperature=0.6, top_k=40)


LIMITS = ModelLimits(
    vocab_size=100,
    max_model_len=64,
    pool_tokens=48,
    max_logprobs=5,
    has_priorities=True,
    tokenizer=Vocabulary(),
)


def params(**fields: Any) -> SamplingParams:
    return completion_params(CompletionBody.model_validate({"prompt": "x", **fields}), LIMITS)


def test_a_seed_is_always_set_and_fits_64_bits() -> None:
    assert params(seed=5) == params(seed=5)
    assert params(seed=-1).seed == 2**64 - 1
    drawn = {params().seed for _ in range(10)}
    assert len(drawn) == 10
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_the_models_defaults_hold_where_a_request_is_silent() -> None:
    assert (params().temperature, params().top_k) == (0.6, 40)
    asked = params(temperature=0, top_k=-1, ignore_eos=True)
    assert (asked.temperature, asked.top_k, asked.eos_token_ids) == (0.0, 0, frozenset())
    assert params(temperature=1e-9).temperature == 0.0


def test_a_search_goes_by_no_recommendation() -> None:
    found = params(use_beam_search=True, n=2)
    assert (found.temperature, found.top_k) == (1.0, 0)


def test_a_bound_of_the_model_holds_for_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vocabulary, "sampling_defaults", SamplingDefaults(max_new_tokens=9))
    assert [params(max_tokens=asked).max_tokens for asked in (5, 9, 20)] == [5, 9, 9]
    assert params().max_tokens == 9
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 10, more than max_tokens \(9\)"):
        params(min_tokens=10, max_tokens=20)


def test_every_sampling_field_reaches_the_engine() -> None:
    asked = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1.0,
        "frequency_penalty": 2.0, "n": 3, "min_tokens": 2, "max_tokens": 9, "logprobs": 4, "prompt_logprobs": 5,
    }  # fmt: skip
    given = params(**asked, logit_bias={"9": -3.0}, stop_token_ids=[8])
    assert {name: getattr(given, name) for name in asked} == asked
    assert (given.logit_bias, given.stop_token_ids, given.eos_token_ids) == (((9, -3.0),), {8}, {7})


def test_an_answers_default_length_is_what_context_and_pool_leave() -> None:
    assert LIMITS.rest_of_context(10, "messages") == 39  # the pool is smaller, and the last token needs no block
    assert ModelLimits.rest_of_context(replace(LIMITS, pool_tokens=1000), 10, "messages") == 54
    with pytest.raises(ContextLengthError, match="64"):
        LIMITS.rest_of_context(64, "messages")


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize(("body_class", "make"), [(ChatBody, ChatFormatter), (CompletionBody, CompletionFormatter)])
def test_a_text_put_into_its_frame_is_the_chunk_of_that_text(
    body_class: type[Any], make: type[Any], options: dict[str, bool] | None
) -> None:
    fields = {"stream": True, "stream_options": options, "messages": [{"role": "user", "content": "?"}], "prompt": "?"}
    body = body_class.model_validate({name: fields[name] for name in fields if name in body_class.model_fields})
    meta = ChunkMeta(id_prefix="x", model='"\\0"\0', tokenizer=None, prompts=[[1]], answer_id="0")  # type: ignore[arg-type]
    formatter = make(body, meta)
    usage = {} if options is None else {"usage": None}
    for index, text in [(0, "one"), (0, '"\\u0000" \0\n\u2028'), (2, "é😀"), (0, "two")]:
        delta = Delta([Content(text)], token_ids=[7])
        (chunk,) = formatter.chunks(index, delta, **usage)
        assert formatter.news([(index, delta)], lambda: None) == frame(chunk)
