"""One choice of an answer: takes the engine's events, gives text with all that belongs to it.

One object a choice, on the event loop. Streaming takes a delta whenever there is something new, a plain answer takes
one at the end: the same code for both. Knows tokens and text, no HTTP and no JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.errors import ServerError, ShuttingDownError
from engine.core.types import FinishReason, PromptInfo, TokenEvent, TokenLogprob
from server.text import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a request wants its text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string or stop token in the text
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings count only in what comes after these
    ending_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens
    echo: bool = False  # begin with the prompt


@dataclass(slots=True)
class Delta:
    """What is new in a choice. Tokens come as they are drawn; their text may follow later, when it is certain."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)  # None: the first token of an echoed prompt
    logprob_ids: list[int] = field(default_factory=list)  # the tokens that `logprobs` speak of
    offsets: list[int] = field(default_factory=list)  # where in the choice's text each of them begins
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt: PromptInfo | None = None

    @property
    def is_silent(self) -> bool:
        """True if a streaming client need not hear of it yet: tokens whose text is still to come."""
        return not (self.text or self.logprobs or self.finish_reason)


class Choice:
    """accept events until `is_done`; take what has come up so far."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], rules: TextRules) -> None:
        context = () if rules.echo else prompt
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=rules.skip_special_tokens)
        self._stops = StopStrings(rules.stops, include_in_output=rules.include_stop) if rules.stops else None
        self._prompt = prompt
        self._rules = rules
        self._num_chars = 0  # of all text so far, cut or not
        self._delta = Delta()
        self.num_tokens = 0
        self.is_done = False

    def accept(self, event: TokenEvent) -> bool:
        """Take in an event; True if it was the last to be shown. Raises its error, if it has one, or ShuttingDownError if the daemon cut it short."""
        if event.finish_reason is FinishReason.ERROR:
            raise event.error or ServerError("This request failed in the engine; the server's log says why.")
        if event.finish_reason is FinishReason.ABORT:
            raise ShuttingDownError("The server is shutting down and cut this answer short; send the request again.")
        if event.prompt is not None:
            self._begin(event.prompt)
        for position, token_id in enumerate(event.token_ids):
            self._add(token_id, event.logprobs[position] if event.logprobs else None)
            if self.is_done:
                return True
        if event.finish_reason is not None:
            self._settle(self._detokenizer.flush())
            self._finish(event.finish_reason, event.stop_reason)
        return self.is_done

    @property
    def is_silent(self) -> bool:
        """True if there is nothing yet that a streaming client has to hear."""
        return self._delta.is_silent

    def take(self) -> Delta:
        """What has come since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _begin(self, prompt: PromptInfo) -> None:
        self._delta.prompt = prompt
        if not self._rules.echo:
            return
        for position, token_id in enumerate(self._prompt):
            if prompt.logprobs is not None:
                self._note(token_id, prompt.logprobs[position])
            text = self._detokenizer.push(token_id)
            self._num_chars += len(text)
            self._delta.text += text

    def _add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.num_tokens += 1
        self._delta.token_ids.append(token_id)
        if logprob is not None:
            self._note(token_id, logprob)
        if self._rules.include_stop or token_id not in self._rules.ending_ids:
            self._settle(self._detokenizer.push(token_id))

    def _note(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self._delta.logprob_ids.append(token_id)
        self._delta.logprobs.append(logprob)
        self._delta.offsets.append(self._num_chars)

    def _settle(self, text: str) -> None:
        """Show text, as far as no stop string may still come of it."""
        self._num_chars += len(text)
        if self._stops is None or self.num_tokens <= self._rules.min_tokens:
            self._delta.text += text
            return
        self._delta.text += self._stops.push(text)
        if self._stops.matched is not None:
            self._finish(FinishReason.STOP, self._stops.matched)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        if self.is_done:
            return
        if self._stops is not None:
            self._delta.text += self._stops.flush()
        self._delta.finish_reason, self._delta.stop_reason = reason, stop_reason
        self.is_done = True
