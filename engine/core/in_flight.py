"""A step from its plan to its commit, or to its rollback if nothing of it was computed.

It is not in step.py, which the runtime imports: the runtime must not see sequences. Engine thread.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import chain

from engine.core.budget import Load
from engine.core.sequence import Sequence
from engine.core.step import Chunk, KnownId, Pairs, RowStart, Sample, StateMove, StepPlan, TableEntry

_NO_LOAD = Load()


@dataclass(slots=True)
class InFlightStep:
    """What a plan will carry, its sequences by slice, and the children of those that fork.

    What steps of decodes do without is a tuple, as in the plan: nothing is made of it while it is empty.
    """

    positions: list[int] = field(default_factory=list)  # the first of each slice
    sequences: list[Sequence] = field(default_factory=list)
    slots: tuple[int, ...] = ()  # of those that decode
    choices: abc.Sequence[tuple[str, int]] = ()  # of those that decode: (request id, choice)
    chunks: tuple[Chunk, ...] = ()
    rows: tuple[RowStart, ...] = ()
    entries: tuple[TableEntry, ...] = ()
    ids: tuple[KnownId, ...] = ()
    copies: Pairs = ()
    states: tuple[StateMove, ...] = ()
    replays: Pairs = ()
    children: dict[int, list[Sequence]] = field(default_factory=dict)  # by slice index
    swap_out: Pairs = ()
    swap_in: Pairs = ()
    num_drafts: dict[int, int] = field(default_factory=dict)  # by slice index
    arrivals: dict[Sequence, int] = field(default_factory=dict)  # whose blocks it loads, and their positions before
    num_decodes: int = 0  # the first slices: one token each, which is sampled from
    num_samples: int = 0
    step_id: int = -1
    planned_s: float = 0.0
    load: Load = _NO_LOAD  # of steps with prompts only

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum([chunk.num_tokens for chunk in self.chunks])

    def plan(self) -> StepPlan:
        """Return the plan, which nothing changes from now on."""
        return StepPlan(
            self.step_id,
            self.num_tokens,
            self.num_samples,
            self.slots,
            tuple(self.positions[: self.num_decodes]),
            self.chunks,
            self.rows,
            self.entries,
            self.ids,
            self.copies,
            self.swap_out,
            self.swap_in,
            tuple(self.num_drafts.items()),
            self.states,
            self.replays,
        )

    def sizes(self, index: int) -> tuple[int, int, int]:
        """Return the first position of a slice, and its numbers of tokens and samples."""
        if index < self.num_decodes:
            return self.positions[index], 1, 1
        chunk = self.chunks[index - self.num_decodes]
        return chunk.start, chunk.num_tokens, len(chunk.samples)

    def largest(self, request_ids: Container[str]) -> str | None:
        """Return the request with the most tokens and samples in the step; of equals, the last."""
        sizes = [sum(self.sizes(index)[1:]) for index in range(len(self.sequences))]
        ours = [i for i, seq in enumerate(self.sequences) if seq.request_id in request_ids]
        return self.sequences[max(ours, key=lambda i: (sizes[i], i))].request_id if ours else None

    @property
    def all_sequences(self) -> Iterator[Sequence]:
        """Return all sequences that the step names."""
        return chain(self.sequences, self.arrivals, *self.children.values())

    @property
    def loaded_hosts(self) -> list[int]:
        """Return the host blocks that the step holds until it is settled."""
        return [host for host, _ in self.swap_in]

    def add_loads(self, seq: Sequence, blocks: list[tuple[int, int]]) -> None:
        """Load blocks, (host block, block), of a sequence that was just admitted."""
        self.swap_in += tuple(blocks)
        self.arrivals[seq] = seq.kv.num_published * seq.kv.block_size

    def add_chunk(self, seq: Sequence, start: int, count: int, samples: tuple[Sample, ...]) -> None:
        """Add a slice of `count` known positions of a sequence; `samples` are taken from the last."""
        wants = seq.params.prompt_logprobs if seq.wants_prompt_logprobs else None
        self.add_row(seq)
        self.chunks += (Chunk(seq.slot, start, count, samples, -1 if wants is None else wants),)
        self.positions.append(start)
        self.sequences.append(seq)
        self.num_samples += len(samples)

    def add_row(self, seq: Sequence) -> None:
        """Add what the runner lacks of a sequence's row: its ids and tables, if it has to begin it, and its state."""
        if not seq.has_row:
            self.rows += (seq.start_row(),)
        state = seq.kv.state
        if state.is_moved:
            self.states += (
                StateMove(seq.slot, tuple(state.source), tuple(state.slot), tuple(state.midway), state.midway_after),
            )
            state.is_moved, state.midway, state.midway_after = False, [], 0
        if state.num_behind:
            self.replays += ((seq.slot, state.num_behind),)
            state.num_behind = 0

    def add_beam(self, seq: Sequence, position: int) -> None:
        """Add a beam's last token, which the search has chosen."""
        self.ids += (KnownId(seq.slot, position, seq.tokens[position]),)


def roll_back(in_flight: deque[InFlightStep]) -> dict[Sequence, bool]:
    """Roll back the plans in flight; returns whether each of their sequences can continue.

    A choice that was forked in them cannot, nor can a sequence whose last block was to be filled by a copy: the
    copied block may have been written to since. Nor can one that has lost its state, or its windows.
    """
    stand: dict[Sequence, bool] = {}
    while in_flight:
        step = in_flight.pop()
        filled = {destination for _, destination in step.copies}
        for index, seq in enumerate(step.sequences):
            children = step.children.get(index, ())
            lost = [place for table in seq.kv.tables for place, block in enumerate(table) if block in filled]
            stand[seq] = stand.get(seq, True) and not (lost or seq.kv.is_lost)
            if lost:
                _shorten(seq, min(lost))
            for child in children:  # of the blocks it was forked with, only published ones are surely computed
                stand[child] = False
                _shorten(child, child.kv.num_published)
            for each in (seq, *children):
                each.has_row = False
        for seq, num_found in step.arrivals.items():  # they keep their blocks, whose contents are lost
            stand.setdefault(seq, not seq.kv.is_lost)
            seq.num_computed = num_found
            seq.has_row = False
    for seq in stand:
        seq.num_planned = seq.num_computed
    return stand


def _shorten(seq: Sequence, num_blocks: int) -> None:
    """Count no positions behind these blocks; windows there were freed when later positions were computed."""
    seq.num_computed = min(seq.num_computed, num_blocks * seq.kv.block_size)
    seq.kv.is_lost = seq.kv.is_lost or len(seq.kv.tables) > 1
