"""The guard: a model that judges prompts and answers of another, whose text is held until it has. Event loop.

A verdict is one step of the guard, in which it draws one of its labels; the categories of an unsafe text are a second request.
While it judges, the answer goes on: its events gather. The texts of an answer's verdicts begin alike, so the guard's prefix
cache has all but the newest tokens.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from engine.core.errors import ConfigError, ContextLengthError, OverloadedError, QuireError
from engine.core.types import AbortCause, FinishReason, Request, SamplingParams, TokenEvent
from engine.text.chat.choice import Delta, TextRules
from engine.text.chat.limits import num_common
from engine.text.fields.chat import ChatFields, Conversation, Message
from engine.text.fields.sampling import QueueFields
from engine.text.tokenizer import TextTokenizer
from server.answers.client import Answer, EngineClient
from server.answers.generation import ChoiceDelta, Generation
from server.answers.model import ServedModel
from server.protocol.errors import ApiError

_MAX_CATEGORY_TOKENS = 32
_AT_ONCE = 16  # verdicts on the prompts, choices or texts of one request
_QWEN_CATEGORIES = (
    "Violent|Non-violent Illegal Acts|Sexual Content or Sexual Acts|PII|Suicide & Self-Harm|Unethical Acts|"
    "Politically Sensitive Topics|Copyright Violation|Jailbreak"
)

Turns = Sequence[tuple[str, str]]  # role and text, user and assistant in turns


class _Style(NamedTuple):
    """How a guard writes its verdict, which its chat template says."""

    sign: str  # in the template
    opening: str
    labels: Sequence[str]  # from harmless to unsafe
    between: str  # the label and the categories
    categories: re.Pattern[str]


_STYLES = (
    _Style("First line must read", "\n\n", ("safe", "unsafe"), "\n", re.compile(r"\bS\d{1,2}\b")),
    _Style(
        "Safety: Controversial",
        "Safety: ",
        ("Safe", "Controversial", "Unsafe"),
        "\nCategories: ",
        re.compile(_QWEN_CATEGORIES),
    ),
)


class Verdict(NamedTuple):
    """What a guard says of the last turn of a conversation."""

    is_unsafe: bool
    num_tokens: int  # that it took
    categories: Sequence[str] = ()  # of what is unsafe


class Judge:
    """Asks a guard model for verdicts."""

    def __init__(self, model: ServedModel, client: EngineClient, style: _Style, *, is_strict: bool) -> None:
        """`is_strict` counts what is controversial as unsafe. Raises ConfigError."""
        self._model, self._client, self._style = model, client, style
        self._encode = partial(model.tokenizer.encode, add_special_tokens=False)
        spelt = [self._encode(style.opening + label) for label in style.labels]
        num = min(num_common(spelt[0], each) for each in spelt[1:])
        self._opening, self._labels = spelt[0][:num], {ids[num]: ids for ids in spelt}
        if len(self._labels) < len(spelt):
            raise ConfigError("The tokens of this guard's labels begin alike; its files do not fit each other.")
        self._unsafe = [ids[num] for ids in spelt[-2 if is_strict and len(spelt) > 2 else -1 :]]
        marks = "|".join(map(re.escape, model.tokenizer.marks))
        self._marks = re.compile(marks or r"(?!)")

    @classmethod
    def of(cls, model: ServedModel, client: EngineClient, *, is_strict: bool) -> Judge | None:
        """Return the judge that a model's chat template makes it; None for a model that is no guard."""
        template = model.tokenizer.chat_template
        found = next((style for style in _STYLES if template is not None and style.sign in template.source), None)
        return None if found is None else cls(model, client, found, is_strict=is_strict)

    async def read(self, turns: Turns, like: Request) -> Verdict:
        """Return what the guard says of the last turn, asked in the queue as the request `like`. Raises QuireError."""
        # Marks of the model in a text are broken: they would end its turn and begin the verdict, or be left out with thoughts.
        shown = [(role, self._marks.sub(lambda found: found[0][0] + " " + found[0][1:], text)) for role, text in turns]
        body = Conversation(messages=[Message(role=role, content=text) for role, text in shown])  # type: ignore[arg-type]
        text = (await self._model.render(body)).removesuffix(self._style.opening)
        if shown[-1][1].strip() not in text:
            raise QuireError("its chat template leaves the text out.")
        [prompt] = await self._model.encode([text], "messages", add_special_tokens=False)
        prompt += self._opening
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=frozenset(self._labels))
        label = (await self._run(prompt, params, like)).token_ids[0]
        if label not in self._unsafe:
            return Verdict(is_unsafe=False, num_tokens=len(prompt) + 1)
        prompt += self._labels[label][len(self._opening) :] + self._encode(self._style.between)
        ends = self._model.tokenizer.eos_token_ids
        params = SamplingParams(max_tokens=_MAX_CATEGORY_TOKENS, temperature=0.0, eos_token_ids=ends)
        named = await self._run(prompt, params, like)
        categories = dict.fromkeys(self._style.categories.findall(named.text.partition("\n")[0]))
        return Verdict(is_unsafe=True, num_tokens=len(prompt) + len(named.token_ids), categories=tuple(categories))

    async def _run(self, prompt: Sequence[int], params: SamplingParams, like: Request) -> Delta:
        request = Request(
            request_id=f"guard-{uuid.uuid4().hex}",
            prompt=tuple(prompt),
            params=params,
            arrival_s=self._client.engine.clock(),
            priority=like.priority,
            cache_salt=like.cache_salt,
            cache_owner=like.cache_owner,
            is_background=like.is_background,
            is_held=True,
            tenant=like.tenant,
            weight=like.weight,
        )
        answer = self._client.submit([request])
        with answer:
            [delta] = await Generation(answer, [request], self._model.tokenizer, TextRules()).all_deltas()
        return delta


class ContentGuard:
    """What judges the prompts and answers of one model."""

    def __init__(self, name: str, every: int, borrow: Callable[[], AbstractContextManager[Judge | None]]) -> None:
        """`every` so many tokens an answer is judged; `borrow` keeps the guard loaded, and raises where it cannot be had."""
        self.name, self.every, self._borrow = name, every, borrow

    def check(self) -> None:
        """Raise ConfigError for a model that is no guard."""
        with self._borrow() as judge:
            if judge is None:
                raise ConfigError(
                    f"--guard is {self.name!r}, but its chat template is neither Llama Guard's nor Qwen3Guard-Gen's."
                )

    async def judge(self, turns: Turns, like: Request) -> Verdict:
        """Return the verdict on the last turn. Raises ApiError: what cannot be judged is not shown."""
        try:
            with self._borrow() as judge:
                if judge is None:
                    raise QuireError("it is no guard.")
                return await judge.read(turns, like)
        except OverloadedError:  # which is soon over
            raise
        except (QuireError, ApiError) as error:
            if isinstance(error, ApiError) and error.code == "model_loading":  # which is soon over, too
                raise
            why = error.message if isinstance(error, ApiError) else str(error)
            if isinstance(error, ContextLengthError):
                message = f"The guard {self.name} cannot read a conversation this long, so it is not answered: {why}"
                raise ApiError(400, "context_length_exceeded", message, "messages") from error
            message = f"The guard {self.name} cannot judge this text now, so it is not shown: {why}"
            raise ApiError(503, "guard_unavailable", message, None, "service_unavailable_error") from error

    async def judge_each(self, turns: Iterable[Turns], likes: Iterable[Request]) -> list[Verdict]:
        """Return the verdicts on several conversations, some at a time: all might not fit the guard's queue.

        Raises ApiError, and asks for no further verdict.
        """
        room = asyncio.Semaphore(_AT_ONCE)

        async def judge(one: Turns, like: Request) -> Verdict:
            async with room:
                return await self.judge(one, like)

        judging = [asyncio.ensure_future(judge(*each)) for each in zip(turns, likes, strict=True)]
        try:
            return await asyncio.gather(*judging)
        finally:
            for each in judging:
                each.cancel()


def talks(body: QueueFields, requests: Sequence[Request], tokenizer: TextTokenizer) -> list[Turns]:
    """Return the conversation of each prompt, as guards take it."""
    if isinstance(body, ChatFields):
        return [conversation(body.messages)]
    prompts = [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in requests]
    return [[("user", prompt)] for prompt in prompts]


def conversation(messages: Sequence[Message]) -> Turns:
    """Return a conversation that begins with the user, who speaks for all but the assistant."""
    turns = [("user", "")] if messages[0].role == "assistant" else []
    for message in messages:
        calls = [f"{call.function.name} {call.function.arguments}" for call in message.tool_calls]
        text = "\n".join([message.text, *calls] if message.text else calls)
        turns = _said(turns, "assistant" if message.role == "assistant" else "user", text)
    return turns


def _said(turns: Turns, role: str, text: str) -> list[tuple[str, str]]:
    """Return a conversation with more text of a role."""
    if turns and turns[-1][0] == role:
        return [*turns[:-1], (role, f"{turns[-1][1]}\n{text}")]
    return [*turns, (role, text)]


def _answered(turns: Turns, text: str) -> Turns:
    """Return a conversation with an answer, which may continue the last message."""
    role, last = turns[-1]
    return [*turns[:-1], (role, last + text)] if role == "assistant" else [*turns, ("assistant", text)]


class GuardedGeneration(Generation):
    """A generation whose choices are taken once the guard has judged them; what it finds unsafe ends without the held text."""

    def __init__(
        self,
        guard: ContentGuard,
        turns: Sequence[Turns],
        answer: Answer,
        requests: Sequence[Request],
        tokenizer: TextTokenizer,
        rules: TextRules,
    ) -> None:
        super().__init__(answer, requests, tokenizer, replace(rules, is_judged=True))
        self._guard, self._turns, self._requests = guard, turns, requests
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._taken = [list[int]() for _ in self._choices]  # the tokens of deltas
        self._judged = [(0, "")] * len(self._choices)  # the number of tokens, and their text
        self._refused: dict[int, Verdict] = {}  # choices whose prompt is unsafe

    async def read_prompts(self) -> None:
        """Have the prompts judged, before anything is sent. Raises ApiError."""
        verdicts = await self._judge(self._turns, self._requests)
        for prompt, verdict in enumerate(verdicts):
            if verdict.is_unsafe:
                self._refused.update((prompt * self._n + choice, verdict) for choice in range(self._n))

    def deltas_now(self, events: list[TokenEvent]) -> list[ChoiceDelta] | None:  # noqa: ARG002 - none without a verdict
        return None

    async def next_deltas(self) -> list[ChoiceDelta]:
        news = await super().next_deltas()
        for index, delta in news:
            self._taken[index] += delta.token_ids
        return news

    async def _listen(self) -> list[int]:
        """Wait for events, and return the choices that were judged."""
        if self._refused:
            refused, self._refused = self._refused, {}
            for index, verdict in refused.items():
                self._block(index, verdict)
            return [*refused]
        heard = await super()._listen()
        choices, every = self._choices, self._guard.every
        due = [i for i in heard if choices[i].is_done or choices[i].num_tokens - self._judged[i][0] >= every]
        # All that was drawn: a stop string or a parser may hold text of tokens whose ids and log probabilities are sent.
        texts = {i: self._decode([*self._taken[i], *choices[i].pending.token_ids]) for i in due}
        new = {i: text for i, text in texts.items() if text != self._judged[i][1]}
        told = [_answered(self._turns[i // self._n], text) for i, text in new.items()]
        verdicts = await self._judge(told, [self._requests[i // self._n] for i in new])
        for index, verdict in zip(new, verdicts, strict=True):
            self._judged[index] = choices[index].num_tokens, texts[index]
            if verdict.is_unsafe:
                self._block(index, verdict)
        for choice in map(choices.__getitem__, due):
            if choice.is_done and choice.pending.filtered is None:
                choice.remember()
        return due

    async def _judge(self, turns: Sequence[Turns], likes: Sequence[Request]) -> list[Verdict]:
        """Wait for verdicts; where one cannot be had, the answer ends."""
        try:
            return await self._guard.judge_each(turns, likes)
        except BaseException as error:
            is_left = isinstance(error, asyncio.CancelledError)
            self._answer.close(AbortCause.DISCONNECT if is_left else AbortCause.ERROR)
            raise

    def _block(self, index: int, verdict: Verdict) -> None:
        choice = self._choices[index]
        if not choice.is_done:
            self.num_open -= 1
            request_id = self._requests[index // self._n].request_id
            self._answer.stop(request_id, index % self._n, AbortCause.CONTENT_FILTER)
        self.timeline.stop(index, FinishReason.CONTENT_FILTER)
        choice.block(verdict.categories)
