"""From the engine's events to deltas: merging, counting, stopping, failing; no HTTP and no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from engine.core.errors import ComputeError, ErrorValue, OverloadedError, ServerError, ShuttingDownError
from engine.core.types import (
    AbortCause,
    BeamParams,
    EarlyStopping,
    FinishReason,
    PromptInfo,
    Request,
    SamplingParams,
    TokenEvent,
)
from engine.text.chat.choice import TextRules
from engine.text.tokenizer import Lengths, lengths_of
from server.answers.client import EngineClient
from server.answers.generation import TURN_EVENTS, Generation


class Bytes:
    """A tokenizer with one token a byte."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    @property
    def lengths(self) -> list[Lengths]:
        return lengths_of(self.decode)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Engine:
    """Takes notes; refuses more than `room` requests at once."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.submitted: list[str] = []
        self.aborted: list[tuple[Any, ...]] = []
        self.deliver: Any = None

    def start(self, deliver: Any, on_end: Any) -> None:
        self.deliver = deliver

    def submit(self, *asked: Request) -> None:
        if len(asked) > self.room:
            raise OverloadedError("full", retry_after_s=1.0)
        self.submitted += [request.request_id for request in asked]

    def abort(self, request_id: str, cause: AbortCause, choice: int | None = None) -> None:
        self.aborted.append((request_id, cause) if choice is None else (request_id, cause, choice))


def requests(count: int = 1, n: int = 1) -> list[Request]:
    params = SamplingParams(max_tokens=100, n=n)
    return [Request(request_id=f"r{i}", prompt=(120,), params=params, arrival_s=0.0) for i in range(count)]


def event(text: str | bytes, request: str = "r0", choice: int = 0, **fields: Any) -> TokenEvent:
    return TokenEvent(request, choice, tuple(text.encode() if isinstance(text, str) else text), **fields)


class Desk:
    """A client over the noting engine, and one generation."""

    def __init__(self, asked: list[Request], **rules: Any) -> None:
        self.engine = Engine()
        self.client = EngineClient(self.engine)
        self.client.start()
        self.answer = self.client.submit(asked)
        self.generation = Generation(self.answer, asked, Bytes(), TextRules(**rules))

    async def hear(self, *events: TokenEvent) -> None:
        """Each event is one step's delivery."""
        for each in events:
            self.engine.deliver([each])
        await asyncio.sleep(0)


def test_a_step_of_many_choices_lets_others_have_their_turn() -> None:
    async def run() -> int:
        desk = Desk(requests(90))
        turns, hearing = 0, asyncio.ensure_future(desk.generation.all_deltas())
        await asyncio.sleep(0)
        desk.engine.deliver([event("a", f"r{index}", **END) for index in range(90)])
        while not hearing.done():
            turns += 1
            await asyncio.sleep(0)
        assert [delta.text for delta in hearing.result()] == ["a"] * 90
        return turns

    assert asyncio.run(run()) > 90 / TURN_EVENTS


END = {"finish_reason": FinishReason.LENGTH}


async def test_steps_that_a_reader_missed_are_one_delta() -> None:
    desk = Desk(requests(n=2))
    await desk.hear(event("a"), event("x", choice=1), event("b"), event("c"), event("y", choice=1))
    first = await desk.generation.next_deltas()
    assert [(index, delta.text, bytes(delta.token_ids)) for index, delta in first] == [
        (0, "abc", b"abc"),
        (1, "xy", b"xy"),
    ]
    await desk.hear(event("d", **END), event("z", choice=1, **END))
    second = await desk.generation.next_deltas()
    assert [(index, delta.text, delta.finish_reason) for index, delta in second] == [
        (0, "d", FinishReason.LENGTH),
        (1, "z", FinishReason.LENGTH),
    ]
    assert await desk.generation.next_deltas() == []


async def test_half_a_character_is_not_worth_an_event_but_its_token_is_kept() -> None:
    desk = Desk(requests())
    waiting = asyncio.ensure_future(desk.generation.next_deltas())
    await desk.hear(event(b"\xc3"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await desk.hear(event(b"\xa9"))
    ((_, delta),) = await waiting
    assert (delta.text, delta.token_ids) == ("é", [0xC3, 0xA9])


async def test_tokens_that_go_on_are_deltas_at_once_and_all_else_is_left_to_the_reader() -> None:
    desk = Desk(requests(n=2))
    tokens = [event("a"), event("x", choice=1), event("b")]
    news = desk.generation.deltas_now(tokens) or []
    assert ([(index, delta.text) for index, delta in news], tokens) == ([(0, "ab"), (1, "x")], [])
    for other in (event("c", **END), event("c", prompt=PromptInfo(0, None))):
        mixed = [event("y", choice=1), other]
        assert desk.generation.deltas_now(mixed) is None
        assert len(mixed) == 2
    assert desk.generation.deltas_now([event("a")] * TURN_EVENTS) is None
    assert desk.generation.usage.completion_tokens == 3


async def test_a_stop_string_in_tokens_taken_at_once_ends_the_generation() -> None:
    desk = Desk(requests(), stops=("b",))
    waiting = asyncio.ensure_future(desk.generation.next_deltas())
    taken: list[Any] = []

    def take_now(events: list[TokenEvent]) -> bool:
        taken.extend(desk.generation.deltas_now(events) or ())
        return desk.generation.num_open > 0

    desk.answer.take_now = take_now
    await desk.hear(event("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await desk.hear(event("b"))
    assert await waiting == []
    assert [(delta.text, delta.finish_reason) for _, delta in taken] == [("a", None), ("", FinishReason.STOP)]
    assert desk.engine.aborted == [("r0", AbortCause.STOP_STRING, 0)]


async def test_an_error_while_tokens_are_taken_at_once_is_the_readers() -> None:
    desk = Desk(requests())
    waiting = asyncio.ensure_future(desk.generation.next_deltas())
    await asyncio.sleep(0)

    def take_now(_: list[TokenEvent]) -> bool:
        raise ValueError("a bug")

    desk.answer.take_now = take_now
    await desk.hear(event("a"))
    with pytest.raises(ValueError, match="a bug"):
        await waiting


async def test_usage_counts_prompts_once_and_choices_each() -> None:
    desk = Desk(requests(count=2, n=2))
    cached = PromptInfo(num_cached_tokens=7, logprobs=None)
    for request in ("r0", "r1"):
        for choice in (0, 1):
            await desk.hear(event("abc", request, choice, prompt=cached, **END))
    await desk.generation.all_deltas()
    usage = desk.generation.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 12, 14)
    assert usage.prompt_tokens_details.cached_tokens == 14


async def test_a_stop_string_aborts_its_choice_and_later_tokens_do_not_count() -> None:
    desk = Desk(requests(n=2), stops=("b",))
    await desk.hear(event("ab"), event("never", choice=0), event("x", choice=1))
    deltas = dict(await desk.generation.next_deltas())
    assert (deltas[0].text, deltas[0].finish_reason, deltas[0].stop_reason) == ("a", FinishReason.STOP, "b")
    assert desk.engine.aborted == [("r0", AbortCause.STOP_STRING, 0)]
    assert desk.generation.usage.completion_tokens == 3


async def test_a_stop_string_that_ends_with_the_last_token_needs_no_abort() -> None:
    desk = Desk(requests(), stops=("b",))
    await desk.hear(event("ab", **END))
    ((_, delta),) = await desk.generation.next_deltas()
    assert (delta.text, delta.finish_reason) == ("a", FinishReason.STOP)
    assert desk.engine.aborted == []


async def test_leaving_aborts_what_is_alive_and_nothing_else() -> None:
    desk = Desk(requests(count=2))
    with desk.answer:
        await desk.hear(event("done", "r0", **END))
    assert desk.engine.aborted == [("r1", AbortCause.DISCONNECT)]
    assert desk.client.num_open == 0
    await desk.hear(event("late", "r1"))  # nobody listens; nobody stumbles


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"finish_reason": FinishReason.ERROR, "error": ErrorValue.of(ComputeError("broken"))}, ComputeError),
        ({"finish_reason": FinishReason.ABORT}, ShuttingDownError),
    ],
)
async def test_one_that_fails_ends_the_others(fields: dict[str, Any], error: type[Exception]) -> None:
    desk = Desk(requests(count=2))
    await desk.hear(event("", "r0", **fields))
    with desk.answer, pytest.raises(error):
        await desk.generation.next_deltas()
    assert desk.engine.aborted == [("r1", AbortCause.ERROR)]


async def test_requests_that_are_refused_are_forgotten() -> None:
    engine = Engine(room=2)
    client = EngineClient(engine)
    with pytest.raises(OverloadedError):
        client.submit(requests(count=3))
    assert not engine.submitted
    assert client.num_open == 0


@pytest.mark.parametrize(
    ("reason", "drawn"), [(FinishReason.DROPPED, 0), (FinishReason.ABORT, 0), (FinishReason.STOP, 3)]
)
async def test_a_search_draws_nothing_with_what_ends_it_otherwise(reason: FinishReason, drawn: int) -> None:
    asked = requests()
    beam = BeamParams(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NEVER)
    desk = Desk([replace(asked[0], params=replace(asked[0].params, beam=beam))])
    await desk.hear(event("", finish_reason=reason))
    with suppress(ServerError):
        await desk.generation.all_deltas()
    assert desk.generation.num_drawn_tokens == drawn
