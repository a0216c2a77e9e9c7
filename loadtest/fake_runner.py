"""A Runner without a model, with deterministic tokens, for tests and simulations.

With memory, a step writes each token into the block and offset that its page table names and draws the next token from
a hash of *everything it reads back through the page table*. A block that was freed too early, shared without a copy or
mapped to the wrong place therefore changes the tokens. In a block of a group of layers with a sliding window a position
holds a hash of the tokens up to it and of the group; a step asserts that it finds these in the window of every position
that it computes. A slot of recurrent state holds a hash of all tokens before a position; a step asserts that each slice
reads that of the position where it begins, and that no row reads or writes what another one writes. Tables are kept by
row and group, as plans report them. Without memory a draw costs a few hundred nanoseconds.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.kv.tiers import Transfer
from engine.core.rows import Rows, SequenceSlice
from engine.core.spans import Span, divided
from engine.core.stats import TransferKind
from engine.core.step import Drafted, Fault, PendingStep, StepPlan, StepResult, count_agreeing
from engine.core.types import TokenLogprob


def mix(*values: int) -> int:
    """Return a 64-bit hash of integers, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value % (1 << 64))) * 0xBF58476D1CE4E5B9 % (1 << 64)
        state ^= state >> 29
    return state


def with_vectors(tokens: abc.Sequence[int], spans: abc.Iterable[Span]) -> list[int]:
    """Return the tokens with numbers that stand for vectors in their places."""
    found = list(tokens)
    for span in spans:
        content = int.from_bytes(span.digest[:8], "little")
        found[span.start : span.end] = [mix(content, offset) % (1 << 31) for offset in range(span.length)]
    return found


def hidden_state(history: abc.Sequence[int]) -> list[int]:
    """Return a hidden state that depends on all of these tokens; in units of POOLED_UNIT, from -1 to 1."""
    return [mix(index, *history) % (1 << 25) - (1 << 24) for index in range(4)]


def likeliest(first: int, history: abc.Sequence[int], num: int, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return a beam's likeliest next tokens, which depend on its whole history; `first` is the best."""
    state, logprob, top = mix(*history), 0.0, []
    for i in range(num):
        logprob -= (mix(state, i) % 1000 + 1) / 1000
        top.append(((first + i) % vocab_size, logprob))
    return tuple(top)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: a fixed part, one for each computed token, one for each token of context."""

    step_s: float = 0.005
    token_s: float = 0.0001
    context_s: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Return the simulated duration of a step."""
        context = sum(start + count for start, count in plan.spans) if self.context_s else 0
        num_tokens = plan.num_tokens + sum(num for _, num in plan.drafts)
        return self.step_s + self.token_s * num_tokens + self.context_s * context


# (all tokens read back, up to and including the drawn position's predecessor; seed) -> next token
Choose = Callable[[abc.Sequence[int], int], int]


class FakeStep(PendingStep):
    """A launched fake step."""

    def __init__(self, result: StepResult, before_wait: Callable[[], None], uncertain: abc.Sequence[int] = ()) -> None:
        self._result, self._before_wait = result, before_wait
        self.uncertain = uncertain  # blocks of states that it writes or brings up to date, and those that it loads

    def wait(self) -> StepResult:
        """Return the result, after the simulated time."""
        self._before_wait()
        return self._result


class FakeRunner:
    """Answers plans for a vocabulary of `vocab_size` tokens.

    `choose` replaces the hash (it implies memory). `sleep` is called with each step's cost in seconds. `fail` maps a slice to
    a sentence for requests that shall fail. Of drafted tokens a share of `acceptance` are right.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int = 512,
        memory: bool = True,
        choose: Choose | None = None,
        cost: CostModel | None = None,
        sleep: Callable[[float], None] = lambda _: None,
        fail: Callable[[SequenceSlice], str | None] | None = None,
        acceptance: float = 0.8,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self._block_size = config.block_size
        self._pages = [[-1] * config.block_size for _ in range(config.num_blocks)] if memory else None
        self._windows, self._has_full = config.windows, config.has_full
        self._states: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # read and written, by row
        self._midway: dict[int, tuple[tuple[int, ...], int]] = {}  # of this step: written after so many positions
        self._drafted: dict[int, abc.Sequence[int]] = {}  # the last drafts of each row, whose inputs are kept
        self._replays: dict[int, int] = {}  # of this step
        self._host_pages = [[-1] * config.block_size for _ in range(config.num_host_blocks)]
        self._arriving: abc.Sequence[tuple[int, int]] = ()  # swapped in by the last step, not there yet
        self.rows = Rows()
        self._spans: dict[int, tuple[Span, ...]] = {}  # of each row
        self.tables: dict[int, list[list[int]]] = {}  # of each row, by slot and group
        self._choose = choose
        self._cost = cost
        self._sleep = sleep
        self._fail = fail
        self._acceptance = acceptance

    def begin(self) -> None:
        """Do nothing."""

    def run(self, plan: StepPlan) -> FakeStep:
        """Compute a step."""
        self.num_steps += 1
        slices, num_drafts = self.rows.follow(plan), dict(plan.drafts)
        self._follow_tables(plan)
        errors: dict[int, Fault] = {}
        logprobs: dict[int, TokenLogprob] = {}
        prompt_logprobs: dict[int, abc.Sequence[TokenLogprob]] = {}
        pooled: dict[int, abc.Sequence[int]] = {}
        drafted: dict[int, Drafted] = {}
        result = StepResult([], logprobs, prompt_logprobs, pooled, errors, (), drafted)
        if self._pages is not None:
            self._move_blocks(plan, self._pages)
        written = self._move_states(plan, slices)
        for index, piece in enumerate(slices):
            history = self._write(piece)
            message = self._fail(piece) if self._fail is not None else None
            if message is not None:
                errors[index] = Fault(message)
            elif index in num_drafts:
                drafted[index] = self._draw_drafted(piece, history, num_drafts[index])
            drawn = [self._draw(piece, history, sample.seed) for sample in piece.samples]
            for token in drawn:
                if piece.params.beam is not None:
                    top = likeliest(token, history, piece.params.logprobs or 0, self.vocab_size)
                    logprobs[len(result.token_ids)] = TokenLogprob(*top[0], 1, top)
                elif piece.params.logprobs is not None:
                    logprobs[len(result.token_ids)] = self._logprob(token, piece.params.logprobs)
                result.token_ids.append(token)
            if piece.prompt_logprobs >= 0:
                following = piece.tokens[piece.start + 1 : min(piece.start + piece.num_tokens + 1, piece.num_prompt)]
                prompt_logprobs[index] = [self._logprob(token, piece.prompt_logprobs) for token in following]
            if piece.pooled_positions:
                states = [hidden_state(history[: piece.start + i + 1]) for i in piece.pooled_positions]
                pooled[index] = [sum(column) for column in zip(*states, strict=True)]
        self.rows.learn(slices, result)
        seconds = self._cost.seconds(plan) if self._cost is not None else 0.0
        return FakeStep(result, partial(self._sleep, seconds), [*written, *(block for _, block in plan.swap_in)])

    def transfer(self, transfer: Transfer, slots: dict[int, list[int]]) -> None:
        """Carry out what a Transport would, between host blocks and a store's `slots`."""
        if self._pages is not None:
            self._arrive(self._pages)
        if transfer.kind is TransferKind.SAVE:
            slots[transfer.slot] = list(self._host_pages[transfer.host_block])
        else:
            self._host_pages[transfer.host_block] = list(slots[transfer.slot])

    def read_blocks(self, blocks: abc.Sequence[int], rows: Any) -> None:
        """Copy blocks out: tokens instead of K/V, four bytes each."""
        assert self._pages is not None
        for block, row in zip(blocks, rows, strict=True):
            row[:] = memoryview(array("i", self._pages[block])).cast("B")

    def write_blocks(self, blocks: abc.Sequence[int], rows: Any) -> None:
        """Copy blocks in."""
        assert self._pages is not None
        for block, row in zip(blocks, rows, strict=True):
            self._pages[block] = list(array("i", row.tobytes()))

    def use_idle_moment(self) -> bool:
        """Return False: there is nothing to do."""
        return False

    def close(self) -> None:
        """Do nothing."""

    def _move_blocks(self, plan: StepPlan, pages: list[list[int]]) -> None:
        """Move blocks out of the pool as early, and into it as late, as the contract allows."""
        self._arrive(pages)
        for source, host in plan.swap_out:
            self._host_pages[host] = list(pages[source])
        for source, destination in plan.copies:
            pages[destination] = list(pages[source])
        self._arriving = plan.swap_in
        arriving = {destination for _, destination in plan.swap_in}
        slots = *plan.slots, *(chunk.slot for chunk in plan.chunks)
        tables = [table for slot in slots for table in self.tables[slot]]
        states = [move.read for move in plan.states]
        if not all(arriving.isdisjoint(table) for table in (*tables, *states)):
            self._arrive(pages)

    def _follow_tables(self, plan: StepPlan) -> None:
        """Bring the tables up to date."""
        for row in plan.rows:
            self.tables[row.slot] = list(map(list, row.tables))
            self._spans[row.slot] = row.spans
        for slot, group, index, block in plan.entries:
            table = self.tables[slot][group]
            table[index : index + 1] = [block]
            assert index < len(table), "a table has a gap"

    def _arrive(self, pages: list[list[int]]) -> None:
        for host, destination in self._arriving:
            pages[destination] = list(self._host_pages[host])
        self._arriving = ()

    def _write(self, piece: SequenceSlice) -> list[int]:
        """Store the slice's tokens through its page table and read the whole context back."""
        if self._pages is None:
            return []
        size, stop = self._block_size, piece.start + piece.num_tokens
        first, *others = self.tables[piece.slot]
        spans = self._spans[piece.slot]
        assert divided(spans, stop) is None, "an atomic span is divided"
        tokens = with_vectors(piece.tokens, spans) if spans else piece.tokens
        for position in range(piece.start, stop) if self._has_full else ():
            self._pages[first[position // size]][position % size] = tokens[position]
        if self._has_full:
            history = [token for block in first[: -(-stop // size)] for token in self._pages[block]][:stop]
        else:  # nothing but windows and states tells what came before
            history = list(tokens[:stop])
        if self._windows or self._states:
            states = list(accumulate(history, mix))
            if self._states and not piece.drafts:
                self._compute_state([0, *states], piece, self._pages)
            for group, (window, table) in enumerate(zip(self._windows, others, strict=True)):
                hashes = [mix(group, state) % (1 << 31) for state in states]
                self._compute_window(hashes, piece.start, window, table, self._pages)
        return history

    def _move_states(self, plan: StepPlan, slices: abc.Iterable[SequenceSlice]) -> list[int]:
        """Note the slots of each row's state, and return what the step changes; what it writes may be no other row's."""
        if self._pages is None:
            return []
        self._states |= {move.slot: (move.read, move.written) for move in plan.states}
        self._midway = {move.slot: (move.midway, move.midway_after) for move in plan.states if move.midway}
        self._replays = dict(plan.replays)
        rows = {piece.slot: self._states[piece.slot] for piece in slices} if self._states else {}
        kept = {slot: blocks for slot, (blocks, _) in self._midway.items()}
        for slot, (_, written) in rows.items():
            others = [blocks for other, row in rows.items() if other != slot for blocks in (*row, kept.get(other, ()))]
            assert set(written).isdisjoint(chain(*others)), "a row reads or writes a state that another one writes"
            assert set(kept.get(slot, ())).isdisjoint(chain(*others, *rows[slot])), "a snapshot is not its own"
        brought_up = [block for slot in self._replays for block in rows[slot][0]]
        return [*brought_up, *chain(*kept.values(), *(written for _, written in rows.values()))]

    def _compute_state(self, states: list[int], piece: SequenceSlice, pages: list[list[int]]) -> None:
        """Go on from the state before the slice, which must be right, to the one after it."""
        read, written = self._states[piece.slot]
        self._states[piece.slot] = written, written
        assert bool(read) == (piece.start > 0), "a state is missing, or is not that of the beginning"
        num_drafts = self._replays.pop(piece.slot, 0)
        before, drafts = piece.start - num_drafts, self._drafted.pop(piece.slot, ())
        assert list(drafts[:num_drafts]) == piece.tokens[before : piece.start], (
            "a draft is taken in that was not accepted"
        )
        for part, block in enumerate(read):
            assert pages[block] == self._state(part, states[before]), "a state is of another position"
            pages[block] = self._state(part, states[piece.start])
        midway, after = self._midway.get(piece.slot, ((), 0))
        assert after < piece.num_tokens, "a snapshot is of no position within the chunk"
        for part, block in enumerate(midway):
            pages[block] = self._state(part, states[piece.start + after])
        for part, block in enumerate(written):
            pages[block] = self._state(part, states[-1])

    def _state(self, part: int, state: int) -> list[int]:
        """Return the content of one of the blocks of a state."""
        return [mix(part, state) % (1 << 31)] * self._block_size

    def _compute_window(
        self, states: list[int], start: int, window: int, table: abc.Sequence[int], pages: list[list[int]]
    ) -> None:
        """Store the states of positions `start` and after; all in their windows must be there, and right."""
        size = self._block_size
        for position in range(start, len(states)):
            pages[table[position // size]][position % size] = states[position]
        for position in range(max(start - window + 1, 0), len(states)):
            block = table[position // size]
            assert block >= 0, f"the block of position {position} was freed too early"
            assert pages[block][position % size] == states[position], f"position {position} was overwritten"

    def _draw_drafted(self, piece: SequenceSlice, history: list[int], num_drafts: int) -> Drafted:
        """Draft, write the drafts behind the slice, and sample from what is read back at every position."""
        seed, start, future = piece.samples[0].seed, piece.start, list(history)
        drafts: list[int] = []
        for ahead in range(num_drafts):
            token = self._draw(piece.at(start + ahead), future, seed)
            is_right = mix(seed, start, ahead) % 1000 < 1000 * self._acceptance
            drafts.append(token if is_right else (token + 1) % self.vocab_size)
            future.append(drafts[-1])
        rows = [piece.at(start + ahead) for ahead in range(num_drafts + 1)]
        read = self._write(piece._replace(tokens=[*piece.tokens, *drafts], num_tokens=num_drafts + 1, drafts=drafts))
        self._drafted[piece.slot] = drafts
        drawn = [self._draw(row, read[: row.start + 1], seed) for row in rows]
        failed = (ahead for ahead, row in enumerate(rows) if self._fail is not None and self._fail(row) is not None)
        drawn = drawn[: next(failed, len(rows))]  # a row that fails does so when it is the first of a step
        token_ids = drawn[: count_agreeing(drawn, drafts)]
        num_top = piece.params.logprobs
        logprobs = None if num_top is None else tuple([self._logprob(token, num_top) for token in token_ids])
        return Drafted(token_ids, num_drafts, logprobs)

    def _draw(self, piece: SequenceSlice, history: list[int], seed: int) -> int:
        if self._choose is not None:
            return self._choose(history, seed)
        position = piece.start + piece.num_tokens
        banned: frozenset[int] = frozenset()
        if position - piece.num_prompt < piece.sampling.min_tokens:
            banned = piece.params.eos_token_ids | piece.params.stop_token_ids
        token = mix(seed if piece.sampling.temperature > 0 else 0, position, *history) % self.vocab_size
        while token in banned:
            token = (token + 1) % self.vocab_size
        return token

    def _logprob(self, token: int, num_top: int) -> TokenLogprob:
        """Return a made-up but well-formed entry: the sampled token first, its neighbours after it."""
        top = tuple(((token + i) % self.vocab_size, -0.5 - i) for i in range(num_top))
        return TokenLogprob(token, -0.5, 1, top)
