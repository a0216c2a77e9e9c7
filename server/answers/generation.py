"""Turns the engine's events into deltas of an answer's choices, and counts its tokens.

Event loop only. Stands between the mailbox (client.py) and the formatters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from engine.core.errors import QuireError
from engine.core.types import AbortCause, FinishReason, PromptInfo, Request, TokenEvent
from engine.text.chat.choice import Choice, Delta, TextRules
from engine.text.tokenizer import TextTokenizer
from server.answers.client import Answer
from server.http.threads import run_slowly
from server.protocol.documents import Usage
from server.telemetry.events import Timeline

TURN_EVENTS = 32  # about 2 ms; a step of an answer with a thousand choices has a thousand
MAX_INLINE_ECHO = 256  # tokens of a prompt that are read on the event loop, about 5 ms
_DRAWN = (None, FinishReason.STOP, FinishReason.LENGTH)

ChoiceDelta = tuple[int, Delta]  # what is new in a choice, by its number among all choices of all prompts


class Generation:
    """The choices of an open answer, read by `next_deltas` or `all_deltas`."""

    def __init__(self, answer: Answer, requests: Sequence[Request], tokenizer: TextTokenizer, rules: TextRules) -> None:
        self._answer = answer
        self._prompt_of = {request.request_id: index for index, request in enumerate(requests)}
        self._n = requests[0].params.n
        self._num_prompt_tokens = sum(len(request.prompt) for request in requests)
        self._num_image_tokens = sum([span.length for request in requests for span in request.spans])
        self._choices = [Choice(tokenizer, request.prompt, rules) for request in requests for _ in range(self._n)]
        self._tells_reasoning = rules.make_parser is not None
        self.num_open = len(self._choices)  # of which deltas are to come
        self._beam, self._num_beam_tokens = requests[0].params.beam, 0
        self._prompts: dict[int, PromptInfo] = {}  # by the prompt's index
        self._pinned_tokens: dict[int, int] | None = {} if any(request.pins for request in requests) else None
        self.timeline = Timeline(len(self._choices))

    @property
    def usage(self) -> Usage:
        """Return the token counts so far."""
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self._choices) if self._tells_reasoning else None
        pinned = None if self._pinned_tokens is None else sum(self._pinned_tokens.values())
        return Usage.of(
            self._num_prompt_tokens, num_tokens, self._prompts.values(), num_reasoning, pinned, self._num_image_tokens
        )

    @property
    def prompt_info(self) -> PromptInfo | None:
        """Return what is known of the first prompt, once it has been computed."""
        return self._prompts.get(0)

    @property
    def num_drawn_tokens(self) -> int:
        """Return the number of generated tokens, of a beam search in all beams."""
        return self.usage.completion_tokens if self._beam is None else self._num_beam_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of prompt tokens that were found in the prefix cache."""
        return sum([prompt.num_cached_tokens for prompt in self._prompts.values()])

    async def next_deltas(self) -> list[ChoiceDelta]:
        """Wait for new deltas and return them, [] when all choices are done.

        Raises the error of a choice that failed.
        """
        news: list[ChoiceDelta] = []
        while self.num_open and not news:
            news = self._take(await self._listen())
        return news

    async def all_deltas(self, *, settled: bool = False) -> list[Delta]:
        """Wait for the end and return one delta a choice, in order.

        If `settled`, wait as `settle` does.
        """
        while self.num_open:
            await self._listen()
        deltas = []
        for number, choice in enumerate(self._choices, start=1):
            deltas.append(choice.take())
            if not number % TURN_EVENTS:
                await asyncio.sleep(0)
        if settled:
            await self.settle()
        return deltas

    async def settle(self) -> None:
        """Wait until the engine has ended every choice, after the last delta.

        A choice that a stop string ended takes one step longer.
        """
        while not self.timeline.is_complete:
            await self._listen()

    def deltas_now(self, events: list[TokenEvent]) -> list[ChoiceDelta] | None:
        """Take tokens that go on and nothing else, and return the new deltas; None, and all is left, if there is more."""
        if len(events) >= TURN_EVENTS or self._beam is not None:
            return None
        for event in events:  # a loop, since a generator would cost each token half a microsecond
            if event.finish_reason is not None or event.prompt is not None:
                return None
        heard = []
        for event in events:
            index = self._prompt_of[event.request_id] * self._n + event.choice
            self.timeline.hear(index, event)
            choice = self._choices[index]
            if not choice.is_done:
                if choice.accept(event):
                    self._end(index, event)
                heard.append(index)
        events.clear()
        return self._take(heard if len(heard) < 2 else dict.fromkeys(heard))

    def _take(self, heard: Iterable[int]) -> list[ChoiceDelta]:
        """Return the deltas of choices that have something to show."""
        news = []
        for index in heard:
            delta = self._choices[index].news()
            if delta is not None:
                news.append((index, delta))
        return news

    def _end(self, index: int, event: TokenEvent) -> None:
        """Count a choice that is done with this event."""
        self.num_open -= 1
        if event.finish_reason is None:
            self.timeline.stop(index)
            self._answer.stop(event.request_id, event.choice, AbortCause.STOP_STRING)

    async def _listen(self) -> list[int]:
        """Wait for events, hand them on, and return the choices that had one."""
        heard: dict[int, None] = {}  # ordered, each once
        for number, event in enumerate(await self._answer.take(), start=1):
            if not number % TURN_EVENTS:
                await asyncio.sleep(0)  # let other requests run
            prompt = self._prompt_of[event.request_id]
            index = prompt * self._n + event.choice
            choice = self._choices[index]
            self.timeline.hear(index, event)
            # A search reports each step as an event of its first choice; an error or abort is no step.
            if self._beam is not None and not event.choice and event.finish_reason in _DRAWN:
                self._num_beam_tokens += self._beam.width
            if choice.is_done:
                continue  # a stop string ended it; later tokens are not shown
            if event.prompt is not None:
                self._prompts[prompt] = event.prompt
                if self._pinned_tokens is not None:
                    self._pinned_tokens.setdefault(prompt, event.prompt.num_pinned_tokens)
            try:
                is_done = choice.accept(event) if event.prompt is None else await _accept(choice, event)
            except QuireError:
                self._answer.close(AbortCause.ERROR)  # one failed, so the others are ended too
                raise
            if is_done:
                self._end(index, event)
            heard[index] = None
        return list(heard)


async def _accept(choice: Choice, event: TokenEvent) -> bool:
    """Hand an event with a prompt to a choice; a long echo is decoded on the slow thread."""
    if choice.num_echoed > MAX_INLINE_ECHO:
        return await run_slowly(lambda: choice.accept(event))
    return choice.accept(event)
