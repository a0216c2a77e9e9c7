"""The types that cross the threads: requests in, token events out; frozen values.

The engine sees token ids only, never text; times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from engine.core.errors import ErrorValue
from engine.core.spans import Span


class FinishReason(str, Enum):
    """Why a sequence ended. Every accepted (request, index) ends with exactly one of these."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled (the server adds: a stop string was found)
    LENGTH = "length"  # max_tokens were generated
    CONTENT_FILTER = "content_filter"  # a guard found the text unsafe
    ABORT = "abort"  # the client left, or the daemon shut down
    ERROR = "error"  # this request alone failed; the event says why
    DROPPED = "dropped"  # not computed, because it could not be in time; the event says why


class AbortCause(str, Enum):
    """Who ended a request early; a label of the abort counter."""

    DISCONNECT = "disconnect"
    STOP_STRING = "stop_string"
    CONTENT_FILTER = "content_filter"
    SHUTDOWN = "shutdown"
    ERROR = "error"


class Pooling(str, Enum):
    """How a prompt's final hidden states become one vector."""

    LAST = "last"  # the last token's, which has seen all the others
    MEAN = "mean"
    CLS = "cls"  # the first token's, in models whose tokens attend both ways


class Adapter(NamedTuple):
    """A LoRA adapter by name and content; its weights live until the last request that has it ends."""

    name: str
    digest: bytes  # 32 bytes that depend on all of its content: K/V of one adapter is never shared with another


class Matcher(Protocol):
    """The state of one sequence in its grammar. Engine thread."""

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. Never raises: after a token that does not fit, `error()` says so."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest accepted prefix, without advancing."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens, all of which were accepted."""

    def is_complete(self) -> bool:
        """Return whether only the end of the answer can follow."""

    def error(self) -> str | None:
        """Return why the matcher failed, if it did; then it allows nothing any more."""


class Grammar(Protocol):
    """What an answer must match, opaque here; the sampler asks a matcher what may come next."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer; a matcher allows them where the answer is complete."""

    def start(self) -> Matcher:
        """Return a matcher before the first token. Takes microseconds: the slow work was done before."""

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        """Write the masks of tokens that these matchers, of any grammar of this class, allow next.

        Row i at `address` has `num_words` 32-bit words; token t is bit t % 32 of word t // 32, set where it is allowed.
        """


class TagIds(NamedTuple):
    """The ids of the tags around thoughts, each of which is one token."""

    opening: int
    closing: int


class Thinking(NamedTuple):
    """How thoughts come before an answer."""

    tags: TagIds
    begins_within: bool  # the prompt has opened them
    budget: int | None  # tokens; None for as many as the model likes


class GrammarKey(NamedTuple):
    """What an answer must match, by name: a compiled grammar, and the thoughts before it."""

    digest: bytes = b""  # of its specification; empty where only thoughts are bounded
    thinking: Thinking | None = None
    end_ids: frozenset[int] = frozenset()  # with `thinking`: the tokens that end an answer


class EarlyStopping(Enum):
    """When a beam search with enough finished answers is over; the values are the API's."""

    NO = False  # when no beam, as long as it is now, would be better than the worst of them
    YES = True  # immediately
    NEVER = "never"  # when no beam can become better than the worst of them, however long


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How to search; see beams.py."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Ranges are validated at the HTTP edge; here they are trusted.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filter off. Penalties follow OpenAI (presence,
    frequency: over generated tokens) and CTRL (repetition: over prompt and generated tokens, 1 is off).
    `logprobs` None returns none, k >= 0 the sampled token's and the k best, of the model's raw distribution.
    `max_tokens` 0 computes the prompt only, for scoring. With a `grammar` the sequence
    stops where the grammar is complete. With `beam` the n best answers of a search are reported at its end; it uses the
    model's own log probabilities, and ignores the fields from temperature to logit_bias.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None  # only these can be sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # after all but the last of one's tokens, the last cannot be sampled
    seed: int = 0  # always set: the edge draws one for a request that named none, so a preempted one resumes alike
    n: int = 1
    min_tokens: int = 0  # end and stop tokens cannot be sampled before this many
    eos_token_ids: frozenset[int] = frozenset()  # empty when the client asked to ignore_eos
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarKey | None = None
    adapter: Adapter | None = None
    beam: BeamParams | None = None

    @property
    def rules_out_tokens(self) -> bool:
        """Return whether the client restricts which tokens can be sampled."""
        return self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def is_penalized(self) -> bool:
        """Return whether any of the three penalties is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_tokens(self) -> bool:
        """Return whether logits of single tokens are edited before a draw."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None

    @property
    def reads_text(self) -> bool:
        """Return whether draws depend on more of the text than its last token."""
        return self.is_penalized or bool(self.bad_words) or self.grammar is not None

    @property
    def draws_plainly(self) -> bool:
        """Return whether all draws need only logits, temperature, filters and noise, and nothing but the draws is wanted."""
        asks_more = self.logprobs is not None or self.prompt_logprobs is not None or self.beam is not None
        return not (asks_more or self.min_tokens or self.adapter or self.reads_text or self.edits_tokens)

    @property
    def num_sequences(self) -> int:
        """Return how many sequences run concurrently."""
        return self.n if self.beam is None else self.beam.width


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt becomes a vector. Nothing is generated: what a plan asks of any request is constant."""

    pooling: Pooling
    adapter: Adapter | None = None
    max_tokens: ClassVar[int] = 0
    n: ClassVar[int] = 1
    num_sequences: ClassVar[int] = 1
    seed: ClassVar[int] = 0
    logprobs: ClassVar[int | None] = None
    prompt_logprobs: ClassVar[int | None] = None
    grammar: ClassVar[GrammarKey | None] = None
    beam: ClassVar[BeamParams | None] = None
    rules_out_tokens: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    eos_token_ids: ClassVar[frozenset[int]] = frozenset()
    stop_token_ids: ClassVar[frozenset[int]] = frozenset()


Params = SamplingParams | PoolingParams  # of a request: it generates, or becomes a vector


class Pin(NamedTuple):
    """A wish that the K/V of a prompt's beginning stays cached longer than other K/V, if there is room."""

    num_tokens: int
    seconds: float  # from the request's arrival; without end it is the operator's


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked, after validation. `request_id` is unique in the engine, and ours."""

    request_id: str
    prompt: tuple[int, ...]
    params: Params
    arrival_s: float
    priority: int = 0  # lower is served first, as in vLLM
    cache_salt: str = ""  # requests with different salts never share cached blocks
    cache_owner: str = ""  # nor do those of different owners
    pins: tuple[Pin, ...] = ()
    turn_end: int = 0  # of a conversation: so many of its first tokens begin the next turn's prompt too; 0: not known
    deadline_s: float | None = None  # seconds from its arrival in which the whole answer is wanted, or none of it
    max_queue_s: float | None = None  # ... in which it is to be started
    is_background: bool = False  # runs in steps that no other work needs, under every policy
    is_held: bool = False  # its tokens are not sent one by one: a guard's verdict, or an answer that waits for verdicts
    is_further: bool = False  # an input of a client's request that is not its first one
    spans: tuple[Span, ...] = ()  # of the prompt, in order, where vectors stand instead of ids
    images: tuple[Any, ...] = ()  # engine.images.Image, opaque here: those that the spans name
    tenant: str = ""  # on whose account it runs; "" is a tenant like any other
    weight: float = 1.0  # that tenant's, under the policy `fair`: with 2 it gets twice what others get

    @property
    def longest_atomic(self) -> int:
        """Return the length of the longest span that is computed in one step."""
        return max([span.length for span in self.spans if span.is_atomic], default=0)


class TokenLogprob(NamedTuple):
    """One position's log probabilities: the chosen token, and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]


class PromptInfo(NamedTuple):
    """What is known once a prompt has been computed; part of the first event of each choice."""

    num_cached_tokens: int
    logprobs: tuple[TokenLogprob | None, ...] | None  # one entry a prompt token, None for the first
    queue_s: float = 0.0  # as in RequestTimings, but known early, for answers that are cut short
    prefill_s: float = 0.0
    num_host_tokens: int = 0  # of the cached ones, those that came from host memory ...
    num_disk_tokens: int = 0  # ... and from a store behind it
    num_pinned_tokens: int = 0  # of the prompt's first tokens, those that are retained for this request
    pooled: tuple[float, ...] | None = None  # the vector that PoolingParams ask for, of the model's own length
    num_matched_tokens: int = (
        0  # whose K/V was found; more than the cached ones if no state or window was left to resume
    )


class RequestTimings(NamedTuple):
    """A finished sequence's history in seconds and counts; part of its terminal event."""

    queue_s: float  # arrival until first scheduled
    prefill_s: float  # first scheduled until first token
    decode_s: float  # first token until last
    num_preemptions: int
    num_drafted: int = 0  # tokens, by speculation ...
    num_accepted: int = 0  # ... and of these, those that were drawn
    preempted_s: tuple[float, ...] = ()  # when it was preempted: the ends of the steps before


class TokenEvent(NamedTuple):
    """What happened to one sequence in one step. Each (request_id, choice) ends once."""

    request_id: str
    choice: int  # which of the request's n, from 0
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None  # not None: terminal
    stop_reason: int | None = None  # the stop token id that was hit, None for end-of-sequence
    prompt: PromptInfo | None = None
    timings: RequestTimings | None = None
    error: ErrorValue | None = None


_make = tuple.__new__


class PlainTokens(NamedTuple):
    """One token each of sequences that go on: events that say no more. The lists never change."""

    choices: Sequence[tuple[str, int]]  # (request id, choice)
    token_ids: Sequence[int]
    indices: range  # in both

    def events(self) -> Iterator[TokenEvent]:
        for index in self.indices:
            # A NamedTuple's own constructor is a Python function and costs 150 ns more.
            token_ids = (self.token_ids[index],)
            yield _make(TokenEvent, (*self.choices[index], token_ids, None, None, None, None, None, None))


class StepEvents:
    """The events of a step, in plan order; any thread may iterate over them.

    Most are single tokens of sequences that go on, which become events in the iterator, not on the engine thread.
    """

    __slots__ = ("entries",)

    def __init__(self, events: Iterable[TokenEvent] = ()) -> None:
        self.entries: list[TokenEvent | PlainTokens] = [*events]

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __iter__(self) -> Iterator[TokenEvent]:
        for entry in self.entries:
            if isinstance(entry, TokenEvent):
                yield entry
            else:
                yield from entry.events()

    def is_plain(self, num_tokens: int) -> bool:
        """Return whether these are so many tokens of sequences that go on, and nothing else."""
        entries = self.entries
        return len(entries) == 1 and isinstance(entries[0], PlainTokens) and len(entries[0].indices) == num_tokens


class Progress(NamedTuple):
    """Progress of the start: a stage, what it found, and how far it is where that can be counted."""

    stage: str  # "weights", "kv_pool", "warm_up", ...
    detail: str = ""
    done: int = 0
    total: int = 0  # 0: not countable
    unit: str = ""  # "bytes", "tensors", ...


ReportProgress = Callable[[Progress], None]
