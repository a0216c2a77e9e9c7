"""The contract between scheduler and runner: StepPlan in, StepResult out.

A plan is frozen from its launch on, and nothing in it is as long as a context: it carries the rows that begin, the table
entries that are new, and positions. A runner keeps the rest by row (rows.py). Planning needs counts, never token
values, so the next steps can be planned while this one runs. Engine thread.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from engine.core.spans import Span
from engine.core.stats import FailureCause
from engine.core.types import Adapter, GrammarKey, Params, TokenLogprob

POOLED_UNIT = 2.0**-24  # as fine as float32 is for numbers near 1, about which normed hidden states are


class Sample(NamedTuple):
    """One token to sample from a slice's last position.

    The sampled id is the next one of the row in `slot`. Randomness is keyed by (seed, position of the sampled token), by
    nothing else.
    """

    slot: int
    seed: int


class RowStart(NamedTuple):
    """A row that begins: another sequence takes the slot, or the runner's state of the row no longer counts."""

    slot: int
    seq_id: int  # unique for the engine's life: tells a runner when a slot has changed hands
    num_prompt: int
    params: Params
    seed: int  # of its decodes
    ids: tuple[int, ...]  # all that are known
    tables: tuple[tuple[int, ...], ...]  # by group of layers, blocks in order; below 0 where a window has passed
    spans: tuple[Span, ...] = ()  # where vectors stand instead of ids
    root: bytes = b""  # the name that its blocks begin with, which rows share that may share them; empty: none does


class KnownId(NamedTuple):
    """The last id of a row, where it is not the one that the runner drew."""

    slot: int
    position: int
    token_id: int


class Chunk(NamedTuple):
    """A slice of known positions start .. start + num_tokens - 1 of a row, whose tables cover them.

    `samples` is empty where the chunk ends before the sequence does, and has n entries where a prompt of n > 1 completes.
    `prompt_logprobs` >= 0 asks for that many alternatives at each prompt position; -1 for none.
    """

    slot: int
    start: int
    num_tokens: int
    samples: tuple[Sample, ...] = ()
    prompt_logprobs: int = -1


Pairs = tuple[tuple[int, int], ...]
TableEntry = tuple[int, int, int, int]  # slot, group, an index of the row's table up to its next, the block there


class StateMove(NamedTuple):
    """The slots of a row's recurrent state, in blocks of the pool, where they are not those that it wrote last.

    In this step the row reads one and writes the other; in later steps it does both to the latter, until another move.
    What a row writes, no other row reads or writes in the same step. Rows that pad a batch have no slot. A chunk of a prompt
    may write the state after some of its positions into a third slot as well.
    """

    slot: int  # the runner row
    read: tuple[int, ...]  # empty at position 0: the state is zero, whatever the blocks hold
    written: tuple[int, ...]
    midway: tuple[int, ...] = ()
    midway_after: int = 0  # positions of the chunk


class StepPlan(NamedTuple):
    """One forward pass: blocks to move, then every slice as one flat batch; or blocks alone.

    The first slices decode: one position each of `slots`, whose id is the row's last, and from which one token is sampled.
    The others are `chunks`.

    Blocks move in this order: `swap_out` before anything of the step is written to the pool, `copies` (copy-on-write),
    then `swap_in`, which has to be done before the first slice that reads it, and that may be a later step's.

    `drafts`, pairs of a slice index and a number, are how many positions behind the slice the runner may draft and compute
    as well. What is written there and not confirmed by a draw is written again by a later step. A recurrent state cannot
    be: such a slice writes the state after its first position, and the runner keeps the inputs of its drafts. `replays`,
    pairs of a runner row and a number, are how many of them the slot that the row reads takes in before the step.
    """

    step_id: int
    num_tokens: int = 0
    num_samples: int = 0
    slots: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[RowStart, ...] = ()  # that begin before the step
    entries: tuple[TableEntry, ...] = ()  # new ones of rows that began earlier
    ids: tuple[KnownId, ...] = ()
    copies: Pairs = ()  # (source, destination) physical blocks; no source was a destination before
    swap_out: Pairs = ()  # (physical block, host block)
    swap_in: Pairs = ()  # (host block, physical block)
    drafts: Pairs = ()
    states: tuple[StateMove, ...] = ()
    replays: Pairs = ()

    @property
    def num_slices(self) -> int:
        """Return how many sequences the step computes."""
        return len(self.slots) + len(self.chunks)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the first position and the length of every slice."""
        return [(start, 1) for start in self.positions] + [(each.start, each.num_tokens) for each in self.chunks]

    def numbers(self) -> array[int]:
        """Return all of the plan as numbers, except for ids, seeds and parameters, which are the requests'."""
        found = array("q", (self.step_id, self.num_tokens, self.num_samples))
        pairs = tuple(zip(self.slots, self.positions, strict=True)), self.drafts
        chunks = [(*each[:3], len(each.samples), each.prompt_logprobs) for each in self.chunks]
        for part in (*pairs, chunks, self.entries, self.copies, self.swap_out, self.swap_in):
            found.append(len(part))
            found.extend(number for each in part for number in each)
        for row in self.rows:
            found.extend((row.slot, row.seq_id, row.num_prompt, len(row.ids), *map(len, row.tables)))
            for table in row.tables:
                found.extend(table)
        for move in self.states:
            found.extend((move.slot, len(move.read), *move.read, *move.written))
            if move.midway:
                found.extend((*move.midway, move.midway_after))
        for replay in self.replays:
            found.extend(replay)
        return found


def plan_prompts(
    rows: Iterable[RowStart], counts: Iterable[int], state_slots: Iterable[tuple[int, ...]] = ()
) -> StepPlan:
    """Return a step that begins rows, computes so many last positions of each, and samples from each.

    Recurrent states begin at zero, and are written to `state_slots`, the blocks of each row's.
    """
    begun = tuple(rows)
    chunks = tuple(
        [
            Chunk(row.slot, len(row.ids) - count, count, (Sample(row.slot, row.seed),))
            for row, count in zip(begun, counts, strict=True)
        ]
    )
    states = tuple(StateMove(row.slot, (), slot) for row, slot in zip(begun, state_slots, strict=False))
    num_tokens = sum(each.num_tokens for each in chunks)
    return StepPlan(0, num_tokens, len(chunks), chunks=chunks, rows=begun, states=states)


class Fault(NamedTuple):
    """Why one sequence could not be computed, as a sentence and as a cause to count."""

    message: str
    cause: FailureCause = FailureCause.NOT_FINITE


class Drafted(NamedTuple):
    """What became of a slice's drafts: the tokens that would have been sampled one by one without them.

    A token is sampled behind every draft; those up to and with the first that differs from its draft are valid.
    """

    token_ids: abc.Sequence[int]  # none if even the first draw failed: drafts may be why, and it is tried without
    num_drafts: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    is_end: bool = False  # with the last of the tokens the sequence's grammar is complete


def count_agreeing(drawn: abc.Sequence[int], drafts: abc.Sequence[int]) -> int:
    """Return how many sampled tokens are valid, given the drafts that they should equal."""
    for count, (token, draft) in enumerate(zip(drawn, drafts, strict=False), start=1):
        if token != draft:
            return count
    return len(drawn)


class PendingStep(Protocol):
    """A step that has been launched."""

    may_pause: bool = False  # it is computed as long as `advance` is called

    def advance(self, seconds: float) -> bool:  # noqa: ARG002 - for steps that may pause
        """Compute for about so long, if nothing else computes the step; return whether `wait` is all that is left."""
        return True

    def close(self) -> None:
        """Compute no more of a step that has paused: it is complete now, and its result is empty."""
        assert not self.may_pause, "such a step has its own"

    def wait(self) -> StepResult:
        """Block until the step is done. Called once, in launch order."""


_NONE: Mapping[int, Any] = MappingProxyType({})


@dataclass(slots=True, init=False)
class StepResult(PendingStep):
    """What a step produced, in plan order; the step itself, if it is computed when it is launched.

    token_ids: one id a Sample, slices in order, samples in order within a slice.
    logprobs: by index into token_ids, for samples whose params ask for them.
    prompt_logprobs: by slice index; entry i is the log probability of the token at position start + i + 1, given all
        before it, for as many of the slice's positions as have a next *prompt* token.
    pooled: by slice index: the sum of final hidden states that a PoolingParams wants of the slice, in units of POOLED_UNIT.
        Whole numbers add up to the same whatever chunks a prompt was computed in.
    errors: by slice index: that sequence alone has failed and its sampled ids are void.
    ended: indices into token_ids: with this token the sequence's grammar is complete.
    drafted: by slice index, of slices that had drafts: all that is to be known of their draws, the first of which is in
        token_ids as well.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprob]
    prompt_logprobs: Mapping[int, abc.Sequence[TokenLogprob]]
    pooled: Mapping[int, abc.Sequence[int]]
    errors: Mapping[int, Fault]
    ended: Collection[int]
    drafted: Mapping[int, Drafted]

    def __init__(
        self,
        token_ids: list[int],
        logprobs: Mapping[int, TokenLogprob] = _NONE,
        prompt_logprobs: Mapping[int, abc.Sequence[TokenLogprob]] = _NONE,
        pooled: Mapping[int, abc.Sequence[int]] = _NONE,
        errors: Mapping[int, Fault] = _NONE,
        ended: Collection[int] = (),
        drafted: Mapping[int, Drafted] = _NONE,
    ) -> None:
        """A dataclass's own would make a new dict for each of five that are nearly always empty."""
        self.token_ids, self.errors, self.ended, self.drafted = token_ids, errors, ended, drafted
        self.logprobs, self.prompt_logprobs, self.pooled = logprobs, prompt_logprobs, pooled

    def wait(self) -> StepResult:
        return self


Name = Adapter | GrammarKey | bytes  # bytes: the digest of an image


class Resources(Protocol):
    """Finds what a plan's requests name."""

    def find(self, name: Name) -> Any:
        """Return the weights of an adapter, a grammar, or an image."""

    def has(self, name: Name) -> bool:
        """Return whether a request holds that."""


class Runner(Protocol):
    """Computes steps. Called by the engine thread only."""

    def begin(self) -> None:
        """Prepare for the first step, on the thread that makes all other calls."""

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch a step. With overlap the next `run` may be called before this step's `wait`.

        Raises DeviceMemoryError, as `wait` may, if the device has no memory for it: then nothing of it counts, and a
        later plan repeats it. Any other exception ends the engine.
        """

    def read_blocks(self, blocks: abc.Sequence[int], rows: Any) -> None:
        """Copy whole blocks out, as bytes: rows [blocks, bytes of a block] uint8, a numpy array."""

    def write_blocks(self, blocks: abc.Sequence[int], rows: Any) -> None:
        """Copy whole blocks in, before the next step reads them."""

    def use_idle_moment(self) -> bool:
        """Spend a few milliseconds on making later steps faster; False if there is nothing to do."""

    def close(self) -> None:
        """Release threads and memory."""
