"""The contract between scheduler and runner: StepPlan in, StepResult out.

A plan is integers and references; it needs counts, never token values, so the next step can be planned while this one
runs. A Runner reads a plan until the end of `wait` and keeps nothing of it: the lists that a slice refers to grow on, and
a decoding sequence's slices are rewritten when the step has been committed.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.core.stats import FailureCause
from engine.core.types import Adapter, Grammar, GrammarKey, Pooling, SamplingParams, TokenLogprob

POOLED_UNIT = 2.0**-24  # as fine as float32 is for numbers near 1, about which normed hidden states are


class Sample(NamedTuple):
    """One token to sample from a slice's last position.

    The sampled id is kept for `slot`, where the next step finds it if it was planned before this one is committed.
    Randomness is keyed by (seed, position of the sampled token), by nothing else.
    """

    slot: int
    seed: int


@dataclass(slots=True)
class SequenceSlice:
    """The part of one sequence that a step computes: positions start .. start + num_tokens - 1.

    `tokens` are the ids known so far; if the last position's id is not among them, it is the one drawn for `slot` by the
    step before. `block_table` maps logical to physical blocks and covers every position of the slice; `window_tables` do so
    for each group of layers with sliding windows, where entries before the window of the first position are undefined.
    `samples` is empty where a chunk ends before the sequence does, and has n entries where a prompt of n > 1 completes.
    `prompt_logprobs` >= 0 asks for that many alternatives at each prompt position; -1 for none.
    """

    slot: int
    tokens: abc.Sequence[int]
    num_prompt: int
    start: int
    num_tokens: int
    block_table: abc.Sequence[int]
    samples: tuple[Sample, ...]
    params: SamplingParams
    prompt_logprobs: int
    seq_id: int  # unique for the engine's life: tells a runner when a slot has changed hands
    drafts: abc.Sequence[int] = ()  # a runner's own: ids supposed to follow `tokens`, the last positions of the slice
    window_tables: abc.Sequence[abc.Sequence[int]] = ()

    def at(self, start: int, num_tokens: int = 1) -> SequenceSlice:
        """Return this slice with other positions; dataclasses.replace takes six times as long."""
        return SequenceSlice(
            self.slot,
            self.tokens,
            self.num_prompt,
            start,
            num_tokens,
            self.block_table,
            self.samples,
            self.params,
            self.prompt_logprobs,
            self.seq_id,
            self.drafts,
            self.window_tables,
        )

    @property
    def pooled_positions(self) -> range:
        """Return the positions within the slice whose hidden states are wanted."""
        if self.params.pooling is None:
            return range(0)
        if self.params.pooling is Pooling.MEAN:
            return range(self.num_tokens)
        return range(self.num_tokens - (self.start + self.num_tokens == self.num_prompt), self.num_tokens)


class StepPlan(NamedTuple):
    """One forward pass: blocks to move, then every slice as one flat batch; or blocks alone.

    Blocks move in this order: `swap_out` before anything of the step is written to the pool, `copies` (copy-on-write),
    then `swap_in`, which has to be done before the first slice that reads it, and that may be a later step's.

    `num_drafts`, by slice index, is how many positions behind the slice the runner may draft and compute as well. What is
    written there and not confirmed by a draw is written again by a later step.
    """

    step_id: int
    slices: list[SequenceSlice]
    copies: list[tuple[int, int]]  # (source, destination) physical blocks; no source was a destination before
    num_tokens: int
    num_samples: int
    swap_out: abc.Sequence[tuple[int, int]] = ()  # (physical block, host block)
    swap_in: abc.Sequence[tuple[int, int]] = ()  # (host block, physical block)
    num_drafts: Mapping[int, int] = {}


class Fault(NamedTuple):
    """Why one sequence could not be computed, as a sentence and as a cause to count."""

    message: str
    cause: FailureCause = FailureCause.NOT_FINITE


class Drafted(NamedTuple):
    """What became of a slice's drafts: the tokens that would have been sampled one by one without them.

    A token is sampled behind every draft; those up to and with the first that differs from its draft are valid.
    """

    token_ids: abc.Sequence[
        int
    ]  # none if even the first draw failed: then the drafts may be why, and it is tried without
    num_drafts: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    is_end: bool = False  # with the last of the tokens the sequence's grammar is complete


def count_agreeing(drawn: abc.Sequence[int], drafts: abc.Sequence[int]) -> int:
    """Return how many sampled tokens are valid, given the drafts that they should equal."""
    for count, (token, draft) in enumerate(zip(drawn, drafts, strict=False), start=1):
        if token != draft:
            return count
    return len(drawn)


@dataclass(slots=True)
class StepResult:
    """What a step produced, in plan order.

    token_ids: one id a Sample, slices in order, samples in order within a slice.
    logprobs: by index into token_ids, for samples whose params ask for them.
    prompt_logprobs: by slice index; entry i is the log probability of the token at position start + i + 1, given all
        before it, for as many of the slice's positions as have a next *prompt* token.
    pooled: by slice index: the sum of final hidden states that `pooling` wants of the slice, in units of POOLED_UNIT.
        Whole numbers add up to the same whatever chunks a prompt was computed in.
    errors: by slice index: that sequence alone has failed and its sampled ids are void.
    ended: indices into token_ids: with this token the sequence's grammar is complete.
    drafted: by slice index, of slices that had drafts: all that is to be known of their draws, the first of which is in
        token_ids as well.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, abc.Sequence[TokenLogprob]] = field(default_factory=dict)
    pooled: Mapping[int, abc.Sequence[int]] = field(default_factory=dict)
    errors: Mapping[int, Fault] = field(default_factory=dict)
    ended: Collection[int] = ()
    drafted: Mapping[int, Drafted] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that has been launched."""

    def wait(self) -> StepResult:
        """Block until the step is done. Called once, in launch order."""
        ...


class Resources(Protocol):
    """Finds what the parameters of a plan's requests name."""

    def adapter(self, adapter: Adapter) -> Any:
        """Return the weights of an adapter."""
        ...

    def grammar(self, key: GrammarKey) -> Grammar:
        """Return a grammar."""
        ...


class Runner(Protocol):
    """Computes steps. Called by the engine thread only."""

    def begin(self) -> None:
        """Prepare for the first step, on the thread that makes all other calls."""
        ...

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch a step. With overlap the next `run` may be called before this step's `wait`.

        Raises DeviceMemoryError, as `wait` may, if the device has no memory for it: then nothing of it counts, and a
        later plan repeats it. Any other exception ends the engine.
        """
        ...

    def read_blocks(self, blocks: abc.Sequence[int], rows: Any) -> None:
        """Copy whole blocks out, as bytes: rows [blocks, bytes of a block] uint8, a numpy array."""
        ...

    def write_blocks(self, blocks: abc.Sequence[int], rows: Any) -> None:
        """Copy whole blocks in, before the next step reads them."""
        ...

    def use_idle_moment(self) -> bool:
        """Spend a few milliseconds on making later steps faster; False if there is nothing to do."""
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...
