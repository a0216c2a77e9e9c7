"""KVCacheManager against a memory that remembers what it was written for: a state machine over all of its block calls.

The machine does what the scheduler does around the manager, one sequence at a time and without overlap. The reference
knows none of the manager's structures. A cell of its memory, (block, offset), holds the tokens that its K/V was computed
from, so a sequence that reads another's K/V, or K/V that a later owner has overwritten, is seen at once. From which blocks
the living hold it derives what has to be available, and when there has to be room.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.budget import StepTime
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.page_table import NO_BLOCK
from engine.core.sequence import Account, Sequence, Status
from engine.core.stats import Stats
from tests.integrity import check_kv
from tests.pure.driver import config, request

SIZE, SLOTS = 4, 4


class History(NamedTuple):
    """What K/V was computed from."""

    salt: str
    tokens: tuple[int, ...]


def history(seq: Sequence, stop: int) -> History:
    """What the K/V of a sequence's position stop - 1 is computed from."""
    return History(seq.request.cache_salt, tuple(seq.tokens[:stop]))


class Memory:
    """Cells of K/V, as a device would have them."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], History] = {}

    def write(self, seq: Sequence, position: int) -> None:
        """Compute one position."""
        self._cells[self._cell(seq, position)] = history(seq, position + 1)

    def copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            if (source, offset) in self._cells:
                self._cells[target, offset] = self._cells[source, offset]

    def check(self, seq: Sequence) -> None:
        """Raise AssertionError unless each computed position has what it was computed from."""
        for position in range(seq.num_computed):
            assert self._cells.get(self._cell(seq, position)) == history(seq, position + 1), f"position {position}"

    def _cell(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.kv.blocks[position // SIZE], position % SIZE


class NoMemory(Memory):
    """That of a model without full attention: its first group has no cells."""

    def write(self, seq: Sequence, position: int) -> None:
        assert seq.kv.blocks[position // SIZE] == NO_BLOCK

    def check(self, seq: Sequence) -> None:
        assert set(seq.kv.blocks) <= {NO_BLOCK}


class KVManagerMachine(RuleBasedStateMachine):
    """`waiting` sequences have nothing; `living` ones have slots and blocks."""

    @initialize(num_blocks=st.integers(4, 14))
    def start(self, num_blocks: int) -> None:
        sizes = config(num_blocks=num_blocks, block_size=SIZE, max_num_seqs=SLOTS)
        self.num_blocks, self.num_made = num_blocks, 0
        self.kv = KVCacheManager(sizes, Stats(), StepTime())
        self.memory = Memory()
        self.waiting: list[Sequence] = []
        self.living: list[Sequence] = []
        self.shown: set[History] = set()  # full blocks that were published at any time
        self.copies: set[int] = set()  # blocks published after another with the same history: they may have no name

    # -- what the reference knows ------------------------------------------------------------------------------------

    def held(self) -> set[int]:
        return {block for seq in self.living for block in seq.kv.blocks}

    def num_available(self) -> int:
        return self.num_blocks - len(self.held())

    def published(self) -> dict[History, int]:
        """What the living have shown, which cannot go while they hold it, and where the first of them has it."""
        shown: dict[History, int] = {}
        for seq in self.living:
            for index in range(seq.kv.num_published):
                if seq.kv.blocks[index] not in self.copies:
                    shown.setdefault(history(seq, (index + 1) * SIZE), seq.kv.blocks[index])
        return shown

    def num_surely_found(self, seq: Sequence) -> int:
        """Blocks of a waiting sequence that must be found; its last token is always computed."""
        shown, stops = self.published(), range(SIZE, len(seq.tokens), SIZE)
        return next((at for at, stop in enumerate(stops) if history(seq, stop) not in shown), len(stops))

    # -- what the scheduler does -------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from(["", "", "salt"]),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(self, prompt: list[int], salt: str, n: int) -> None:
        name = f"r{self.num_made}"
        made = request(name, tuple(prompt), max_tokens=30, n=n, cache_salt=salt)
        names = self.kv.first_names(made)
        self.waiting.append(Sequence(made, 0, self.num_made, self.num_made, SIZE, names, Account()))
        self.num_made += 10

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), reserve=st.integers(0, 3))
    def admit(self, data: st.DataObject, reserve: int) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        num_needed = -(-len(seq.tokens) // SIZE) + reserve
        held, num_available, num_found = self.held(), self.num_available(), self.num_surely_found(seq)
        has_slots = SLOTS - sum(len(each.kv.slots) for each in self.living) >= seq.num_slots
        hint = self.kv.lookup(seq)
        loads = self.kv.allocate(seq, reserve=reserve)
        if loads is None:
            assert not has_slots or num_available < num_needed - num_found, "there was room"
            assert not seq.kv.blocks
            return
        found = seq.kv.blocks[: seq.kv.num_published]
        assert not loads
        assert has_slots
        assert num_found <= len(found)
        assert len(found) * SIZE == hint == seq.num_computed < len(seq.tokens)
        assert num_available >= num_needed - len(held.intersection(found)), "what others need was given away"
        assert held.isdisjoint(seq.kv.blocks[len(found) :]), "a block has two owners"
        self.waiting.remove(seq)
        self.living.append(seq)
        seq.move(Status.PREFILL)

    @precondition(lambda self: any(seq.status is Status.PREFILL for seq in self.living))
    @rule(data=st.data(), most=st.integers(1, 12), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, most: int, token: int) -> None:
        """A chunk of a prompt; with its end come the first tokens, one a choice."""
        seq = data.draw(st.sampled_from([seq for seq in self.living if seq.status is Status.PREFILL]))
        stop = min(seq.num_planned + most, len(seq.tokens))
        self.finish_chunk(seq, stop, token)

    def finish_chunk(self, seq: Sequence, stop: int, token: int) -> None:
        """Compute a chunk; an answer forks at the end of its prompt."""
        self.write(seq, stop)
        children: list[Sequence] = []
        if stop == len(seq.tokens):
            seq.move(Status.RUNNING)
            if not seq.is_forked:
                seq.is_forked = True
                children = [seq.fork(choice, seq.seq_id + choice) for choice in range(1, seq.params.n)]
                self.kv.fork(seq, children)
                self.living += children
            for index, each in enumerate((seq, *children)):
                each.tokens.append((token + index) % 2)

    @precondition(lambda self: any(seq.status is Status.RUNNING for seq in self.living))
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.living if seq.status is Status.RUNNING]))
        if seq.num_planned >= seq.kv.writable_until:
            blocks, step = list(seq.kv.blocks), InFlightStep()
            others = {block for each in self.living if each is not seq for block in each.kv.blocks}
            needs_block = not seq.kv.shares_tail or blocks[-1] in others
            num_available = self.num_available()
            is_extended = self.kv.extend(seq, step)
            assert is_extended == (num_available > 0 or not needs_block)
            if not is_extended:
                assert seq.kv.blocks == blocks
                return
            for source, target in step.copies:
                self.memory.copy(source, target)
        self.write(seq, len(seq.tokens))
        seq.tokens.append(token)

    def siblings(self) -> list[tuple[Sequence, Sequence]]:
        """Pairs of answers to one request."""
        running = [seq for seq in self.living if seq.status is Status.RUNNING]
        return [(a, b) for a in running for b in running if a is not b and a.request is b.request]

    @precondition(siblings)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """An answer of several goes on from where another of them stands, as beams do."""
        seq, other = data.draw(st.sampled_from(self.siblings()))
        self.num_made += 10
        self.kv.reassign(seq, other, self.num_made)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), ends=st.booleans())
    def leave(self, data: st.DataObject, ends: bool) -> None:
        """A sequence ends, or is preempted and waits to be computed again."""
        seq = data.draw(st.sampled_from(self.living))
        self.living.remove(seq)
        self.shown |= {history(seq, stop) for stop in range(SIZE, seq.num_computed + 1, SIZE)}
        self.kv.free(seq)
        assert not seq.kv.blocks
        if not ends:
            seq.move(Status.PREEMPTED)
            self.waiting.append(seq)

    def write(self, seq: Sequence, stop: int) -> None:
        """Compute positions up to `stop`; none of them may be another's, nor one that others can find."""
        others = {block for each in self.living if each is not seq for block in each.kv.blocks if block != NO_BLOCK}
        for position in range(seq.num_computed, stop):
            assert seq.kv.blocks[position // SIZE] not in others, "another holds what is written"
            self.memory.write(seq, position)
        seq.num_computed = seq.num_planned = stop
        if seq.num_computed >= seq.kv.next_publish:
            first = seq.kv.num_published
            self.kv.publish(seq)
            for index in range(first, seq.kv.num_published):
                self.note_published(history(seq, (index + 1) * SIZE), seq.kv.blocks[index])

    def note_published(self, content: History, block: int) -> None:
        """The first block with a history is found; the cache may evict it while a sequence holds a later one."""
        self.copies.discard(block)
        if content in self.shown:
            self.copies.add(block)
        self.shown.add(content)

    # -- what holds at all times -------------------------------------------------------------------------------------

    @invariant()
    def memory_is_right(self) -> None:
        for seq in self.living:
            self.memory.check(seq)

    @invariant()
    def books_agree(self) -> None:
        check_kv(self.kv, self.living, ())
        assert self.kv.pool.num_available == self.num_available()


class OtherMemory:
    """What layers with windows and recurrent state keep, beside the cells of those with full attention."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        self._windows = windows
        self._cells: dict[tuple[int, int], object] = {}  # (block, offset), or a whole block of a state at offset -1

    def compute(self, seq: Sequence, stop: int) -> None:
        """Compute positions up to `stop`; what they read must be there and right."""
        start, state = seq.num_computed, seq.kv.state
        if state.slot:
            read = state.source if state.is_moved else state.slot
            state.is_moved = False
            assert bool(read) == (start > 0)
            for part, block in enumerate(read):
                assert self._cells.get((block, -1)) == (part, history(seq, start)), f"the state at {start} is not read"
            for part, block in enumerate(state.slot):
                self._cells[block, -1] = part, history(seq, stop)
        for group, (window, table) in enumerate(zip(self._windows, seq.kv.tables[1:], strict=True)):
            for position in range(start, stop):
                self._cells[table[position // SIZE], position % SIZE] = group, history(seq, position + 1)
            for position in range(max(start - window + 1, 0), stop):
                cell = self._cells.get((table[position // SIZE], position % SIZE))
                assert cell == (group, history(seq, position + 1)), f"position {position} of a window"

    def copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            if (source, offset) in self._cells:
                self._cells[target, offset] = self._cells[source, offset]


class MixedManagerMachine(KVManagerMachine):
    """The same over random mixtures of groups: full or not, several windows, recurrent, or none at all."""

    @initialize(
        num_blocks=st.integers(16, 60),
        windows=st.lists(st.sampled_from([1, 3, 4, 9]), max_size=2),
        state_blocks=st.integers(0, 3),
        has_full=st.booleans(),
    )
    def start(self, num_blocks: int, windows: list[int], state_blocks: int, has_full: bool) -> None:  # type: ignore[override]
        super().start(num_blocks)
        sizes = {"windows": tuple(windows), "state_blocks": state_blocks, "max_num_seqs": SLOTS, "has_full": has_full}
        self.kv = KVCacheManager(config(num_blocks=num_blocks, block_size=SIZE, **sizes), Stats(), StepTime())  # type: ignore[arg-type]
        self.other = OtherMemory(tuple(windows))
        if not has_full:
            self.memory = NoMemory()

    def held(self) -> set[int]:
        return {block for seq in self.living for table in seq.kv.held for block in table if block >= 0}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), reserve=st.integers(0, 3))
    def admit(self, data: st.DataObject, reserve: int) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        hint, has_none = self.kv.lookup(seq), not self.living
        if self.kv.allocate(seq, reserve=reserve) is None:
            needed = self.kv.config.max_blocks(len(seq.tokens), 2 + seq.num_slots) + 3 * self.kv._num_groups
            assert not (has_none and self.num_blocks >= needed), "an empty pool had no room"
            assert not seq.kv.held
            return
        assert seq.num_computed == hint < len(seq.tokens)
        assert self.kv.pool.num_available >= self.kv.pool.num_owed
        self.waiting.remove(seq)
        self.living.append(seq)
        seq.move(Status.PREFILL)

    @precondition(lambda self: any(seq.status is Status.PREFILL for seq in self.living))
    @rule(data=st.data(), most=st.integers(1, 12), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, most: int, token: int) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.living if seq.status is Status.PREFILL]))
        stop = min(seq.num_planned + most, self.kv.reach(seq))
        if stop <= seq.num_planned:
            return
        stop = self.kv.chunk_end(seq, stop)
        self.kv.cover(seq, stop, InFlightStep())
        self.finish_chunk(seq, stop, token)

    def write(self, seq: Sequence, stop: int) -> None:
        state = [*seq.kv.state.slot]
        others = {block for each in self.living if each is not seq for table in each.kv.held for block in table}
        assert others.isdisjoint(state), "another may read the slot that is written"
        if self.kv._recurrent is not None:
            assert not any(self.kv._recurrent.content(block) for block in state), "it can be found"
        self.other.compute(seq, stop)
        super().write(seq, stop)

    @precondition(lambda self: any(seq.status is Status.RUNNING for seq in self.living))
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.living if seq.status is Status.RUNNING]))
        if seq.num_planned >= seq.kv.writable_until:
            step = InFlightStep()
            if not self.kv.extend(seq, step):
                return
            for source, target in step.copies:
                self.memory.copy(source, target)
                self.other.copy(source, target)
        self.write(seq, len(seq.tokens))
        seq.tokens.append(token)


TestKVManager = KVManagerMachine.TestCase
TestKVManager.settings = settings(max_examples=60, stateful_step_count=60)
TestMixedManager = MixedManagerMachine.TestCase
TestMixedManager.settings = settings(max_examples=60, stateful_step_count=60)
