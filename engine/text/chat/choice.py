"""Turns the engine's events into the text of one choice of an answer.

A stream takes a delta whenever there is something new, a plain answer takes one at the end: the same code serves both.
One object for each choice, on one thread. Independent of HTTP and JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.errors import ServerError, ShuttingDownError
from engine.core.types import FinishReason, PromptInfo, TokenEvent, TokenLogprob
from engine.text.chat.chat_format import MessageParser
from engine.text.chat.history import ChatTurn
from engine.text.tokenizer import Detokenizer, StopStrings, TextTokenizer
from engine.text.types import CallArguments, CallBegin, Content, Piece, Reasoning

_FAILURES = frozenset({FinishReason.ERROR, FinishReason.DROPPED, FinishReason.ABORT})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the text of an answer is made."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string or stop token in the text
    skip_special_tokens: bool = True
    hidden_ids: frozenset[int] = frozenset()  # further tokens that are left out of the text
    min_tokens: int = 0  # stop strings count only in the text after these
    ending_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens
    echo: bool = False  # the text begins with the prompt
    make_parser: Callable[[], MessageParser] | None = None  # of parsers that find thoughts and calls in the text
    max_calls: int | None = None  # the answer ends where a further call begins
    turn: ChatTurn | None = None  # of a conversation, which remembers the answer's ids
    is_judged: bool = False  # a guard decides whether they are remembered


@dataclass(slots=True)
class CallDelta:
    """The new part of a call; its first delta has the name."""

    index: int
    name: str | None
    arguments: str
    id: str = ""  # the model's, if it gave one


@dataclass(slots=True)
class DeltaLogprobs:
    """The log probabilities of tokens of a delta."""

    entries: list[TokenLogprob | None] = field(default_factory=list)  # None: the first token of an echoed prompt
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each of them begins in the choice's text
    of_text: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # of pieces for the user, by their place


@dataclass(slots=True)
class Delta:
    """The new part of a choice; text may follow its tokens once it is certain."""

    pieces: list[Piece] = field(default_factory=list)  # in order; neighbours of one kind are joined
    num_calls_before: int = 0  # calls begun in earlier deltas
    token_ids: list[int] = field(default_factory=list)
    scored: DeltaLogprobs | None = None  # made with the first: a stream makes a delta for each token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt: PromptInfo | None = None
    has_called: bool = False  # of the last delta: True if there was any call
    filtered: Sequence[str] | None = None  # of the last delta, if a guard ended the choice: the categories

    @property
    def logprobs(self) -> Sequence[TokenLogprob | None]:
        """Return log probabilities, in order; None is the first token of an echoed prompt."""
        return () if self.scored is None else self.scored.entries

    @property
    def text_alone(self) -> str | None:
        """Return the text for the user if there is nothing else but its tokens, as nearly always."""
        if self.scored is not None or self.finish_reason is not None or self.prompt is not None:
            return None
        return self.pieces[0].text if len(self.pieces) == 1 and type(self.pieces[0]) is Content else None

    @property
    def text(self) -> str:
        """Return the text for the user."""
        if len(self.pieces) == 1 and type(self.pieces[0]) is Content:  # as nearly always
            return self.pieces[0].text
        return "".join([piece.text for piece in self.pieces if type(piece) is Content])

    @property
    def reasoning(self) -> str:
        """Return the thoughts."""
        return "".join([piece.text for piece in self.pieces if type(piece) is Reasoning])

    @property
    def calls(self) -> list[CallDelta]:
        """Return the parts of calls; the first may continue a call of an earlier delta."""
        calls: list[CallDelta] = []
        num_calls = self.num_calls_before
        for piece in self.pieces:
            if isinstance(piece, CallBegin):
                calls.append(CallDelta(num_calls, piece.name, "", piece.id))
                num_calls += 1
            elif isinstance(piece, CallArguments):
                if not calls:
                    calls.append(CallDelta(num_calls - 1, None, ""))
                calls[-1].arguments += piece.text
        return calls

    def add(self, piece: Piece) -> None:
        """Append a piece, or join it to the last one."""
        pieces = self.pieces
        if not pieces or type(pieces[-1]) is not type(piece) or isinstance(piece, CallBegin):
            pieces.append(piece)
        else:
            pieces[-1] = type(piece)(pieces[-1][0] + piece.text)


class Choice:
    """`accept` events until `is_done`; `take` the delta since the last call."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], rules: TextRules) -> None:
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None  # made with the first token: requests that only read have none
        self._stops = StopStrings(rules.stops, include_in_output=rules.include_stop) if rules.stops else None
        self._prompt = prompt
        self._rules = rules
        self._hidden_ids = rules.hidden_ids if rules.include_stop else rules.hidden_ids | rules.ending_ids
        self._parser = rules.make_parser() if rules.make_parser else None
        self._ids: list[int] = []  # for `turn`
        self._unread: list[TokenLogprob] = []  # of tokens of which the parser has made nothing yet
        self._unshown: list[TokenLogprob] = []  # of tokens whose text may still become a stop string
        self._num_calls = 0
        self._num_chars = 0  # of all text so far, including text that a stop string cuts off
        self._delta = Delta()
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_done = False

    def accept(self, event: TokenEvent) -> bool:
        """Process an event; return True if it was the last to be shown. Raises its error."""
        if event.finish_reason in _FAILURES:
            raise _failure(event)
        if event.prompt is not None:
            self._delta.prompt = event.prompt
            if self._rules.echo:
                self._echo(event.prompt)
        for position, token_id in enumerate(event.token_ids):
            self._add(token_id, event.logprobs[position] if event.logprobs else None)
            if self.is_done:
                return True
        if event.finish_reason is not None:
            text = self._detokenizer.flush() if self._detokenizer else ""
            if self._parser is None:
                self._show_text(text)
            else:
                self._read(self._parser, text)
                self._show(self._parser.finish())
            self._finish(event.finish_reason, event.stop_reason)
        return self.is_done

    @property
    def num_echoed(self) -> int:
        """The tokens of the prompt that its first event makes text of."""
        return len(self._prompt) if self._rules.echo else 0

    def drop(self) -> None:
        """End without an answer, instead of raising the error of a dropped request."""
        self._finish(FinishReason.DROPPED, None)

    def block(self, categories: Sequence[str]) -> None:
        """End the choice without what was not taken, which a guard found unsafe."""
        before, reason = self._delta.num_calls_before, FinishReason.CONTENT_FILTER
        prompt = self._delta.prompt or (None if self.num_tokens else PromptInfo(0, None))  # it marks the first delta
        self._delta = Delta(prompt=prompt, num_calls_before=before, finish_reason=reason, filtered=categories)
        self.is_done = True

    @property
    def pending(self) -> Delta:
        """Return what the next `take` returns, so far."""
        return self._delta

    def news(self) -> Delta | None:
        """Return the delta since the last call; None, and it goes on, while the text of its tokens is not certain."""
        delta = self._delta
        return self.take() if delta.pieces or delta.scored or delta.finish_reason else None

    def take(self) -> Delta:
        """Return the delta since the last call."""
        delta, self._delta = self._delta, Delta()
        self._delta.num_calls_before = self._num_calls
        return delta

    def _echo(self, prompt: PromptInfo) -> None:
        """Begin the text with the prompt."""
        detokenizer = self._make_detokenizer()
        for position, token_id in enumerate(self._prompt):
            if prompt.logprobs is not None:
                self._note(token_id, prompt.logprobs[position])
            text = detokenizer.push(token_id)
            self._num_chars += len(text)
            self._add_text(text)

    def _add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.num_tokens += 1
        self._delta.token_ids.append(token_id)
        if logprob is not None:
            self._note(token_id, logprob)
        if self._rules.turn is not None:
            self._ids.append(token_id)
        if token_id not in self._hidden_ids:
            if logprob is not None:
                self._unread.append(logprob)
            detokenizer = self._detokenizer or self._make_detokenizer()
            text = detokenizer.push(token_id)
            if self._parser is None:
                self._show_text(text)
            else:
                self._read(self._parser, text)

    def _make_detokenizer(self) -> Detokenizer:
        context = () if self._rules.echo else self._prompt
        self._detokenizer = Detokenizer(self._tokenizer, context, skip_special_tokens=self._rules.skip_special_tokens)
        return self._detokenizer

    def _note(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Add the log probability of a token."""
        scored = self._scored()
        scored.token_ids.append(token_id)
        scored.entries.append(logprob)
        scored.offsets.append(self._num_chars)

    def _scored(self) -> DeltaLogprobs:
        """Return the log probabilities of the delta."""
        if self._delta.scored is None:
            self._delta.scored = DeltaLogprobs()
        return self._delta.scored

    def _read(self, parser: MessageParser, text: str) -> None:
        """Show the pieces that the parser finds in text."""
        was_reasoning = parser.is_reasoning
        self._show(parser.push(text))
        if was_reasoning or parser.is_reasoning:  # thoughts come first, so all tokens so far are theirs
            self.num_reasoning_tokens = self.num_tokens
            self._unread.clear()

    def _show(self, pieces: Sequence[Piece]) -> None:
        """Show pieces of text, until a stop string or a call too many ends them."""
        for piece in pieces:
            if self.is_done:
                return
            if isinstance(piece, Content):
                self._show_text(piece.text)
                continue
            if self._stops is not None:  # a stop string does not reach over what is no text
                self._add_text(self._stops.flush())
            if isinstance(piece, CallBegin):
                if self._num_calls == self._rules.max_calls:
                    self._finish(FinishReason.STOP, None)
                    return
                self._num_calls += 1
            self._delta.add(piece)
            self._unread.clear()

    def _show_text(self, text: str) -> None:
        """Show text, except an end that may still become a stop string."""
        self._num_chars += len(text)
        if text and self._unread:
            self._unshown += self._unread
            self._unread.clear()
        if self._stops is None or self.num_tokens <= self._rules.min_tokens:
            self._add_text(text)
            return
        self._add_text(self._stops.push(text))
        if self._stops.matched is not None:
            self._finish(FinishReason.STOP, self._stops.matched)

    def _add_text(self, text: str) -> None:
        if text:
            self._delta.add(Content(text))
            if self._unshown:
                self._scored().of_text.setdefault(len(self._delta.pieces) - 1, []).extend(self._unshown)
                self._unshown.clear()

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        if self.is_done:
            return
        if self._stops is not None:
            self._add_text(self._stops.flush())
        self._delta.finish_reason, self._delta.stop_reason = reason, stop_reason
        self._delta.has_called = self._num_calls > 0
        self.is_done = True
        if not self._rules.is_judged:
            self.remember()

    def remember(self) -> None:
        """Let the conversation, if it is of one, remember the answer's ids: they can be quoted from then on."""
        if self._rules.turn is not None and self._ids:
            has_end, num_cut = self._ids[-1] in self._rules.ending_ids, self._stops.num_cut if self._stops else 0
            self._rules.turn.remember(self._ids, has_end=has_end, num_cut=num_cut)


def _failure(event: TokenEvent) -> Exception:
    """Return the error of an event that ends an answer without success."""
    if event.finish_reason is FinishReason.ABORT:
        return ShuttingDownError("The server is shutting down and cut this answer short; send the request again.")
    if event.error is None:
        return ServerError("This request failed in the engine; the server's log says why.")
    return event.error.exception()
