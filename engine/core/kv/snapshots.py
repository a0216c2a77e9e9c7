"""The group of layers with recurrent state: the slots of sequences, and snapshots to resume from. Engine thread.

A state holds all positions before one, in bytes that do not depend on their number. Its place is a slot: some blocks of the
pool, anywhere in it, so that states and K/V share one pool, one order of eviction and the same copies. All recurrent
layers of a model are one group, since their states are kept and resumed together.

K/V writes can be repeated, a recurrence cannot. So a chunk reads one slot and writes one, as its plan says:

    plain decode           both are the sequence's slot
    the first chunk        it reads none: the runner begins with zeros
    after a hit, a fork    it reads the snapshot, or the parent's slot, which others may read too; it writes a fresh one
    at a kept boundary     it reads the old slot, which becomes a snapshot, and writes a fresh one

So nothing is copied. A slot that was left is held until the step that reads it is committed; then it gets the name of the
prefix that ends there, and is cached. The slot that a sequence writes is never named: a step in flight may have advanced
it. After a rollback it is lost, and the sequence resumes from its last snapshot.

A snapshot is kept where prompts are likely to branch: at the last two boundaries of an input (the last token of an equal
prompt is computed, so it resumes one block earlier than a longer one), at pinned prefixes, where another prompt branched,
every EVERY blocks, and at the last boundary of an answer, because its end is known one step late. Chunks of prompts end
there. A boundary is kept only if no other sequence needs the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from engine.core.config import SchedulerConfig
from engine.core.kv.prefix_cache import PrefixCache, name_block
from engine.core.sequence import Sequence
from engine.core.states import StateSlots

EVERY = 256  # blocks of a long prompt between two snapshots


class RecurrentGroup:
    """The slots that sequences hold, and those that are cached under the name of a prefix."""

    __slots__ = ("_block_size", "_kept", "_name_of", "_resumed", "_slot_of", "_slot_size", "pool")

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        """The pool is that of the layers with full attention."""
        self.pool = cache.pool
        self.pool.on_evict(self._evicted)
        self._block_size, self._slot_size = config.block_size, config.state_blocks
        self._slot_of: dict[bytes, list[int]] = {}
        self._name_of: dict[int, bytes] = {}  # of each block of a slot
        self._resumed = set[bytes]()  # snapshots that a sequence has resumed from
        self._kept = set[bytes]()  # names that pinned prefixes are resumed from

    # -- the snapshots -------------------------------------------------------------------------------------------------

    def find(self, name: bytes) -> list[int]:
        """Return the slot with the state after a prefix; empty if there is none."""
        return self._slot_of.get(name, [])

    def resumable(self, chain: Seq[bytes], num_blocks: int, _is_below: Callable[[bytes], bool]) -> int:
        """Return the last block boundary, `num_blocks` at most, that has a snapshot; there are none below the pool."""
        while num_blocks and chain[num_blocks] not in self._slot_of:
            num_blocks -= 1
        return num_blocks

    def _put(self, name: bytes, slot: list[int]) -> None:
        self._slot_of[name] = slot
        for block in slot:
            self._name_of[block] = name
            self.pool.index(block)
        if name in self._kept:
            self.pin(name)

    def drop(self, name: bytes) -> None:
        """Forget a snapshot; a part of a state is worth nothing."""
        self._resumed.discard(name)
        for block in self._slot_of.pop(name, ()):
            del self._name_of[block]
            self.pool.forget(block)

    def _evicted(self, block: int) -> None:
        if block in self._name_of:
            slot = self._slot_of[self._name_of[block]]
            slot.remove(block)
            self.drop(self._name_of.pop(block))

    def keep(self, chain: Seq[bytes], index: int, num_tokens: int) -> None:
        """Pin the state behind block `index` of a pinned prefix of so many tokens, if the prefix is resumed from it."""
        if index + 1 == num_tokens // self._block_size:
            self._kept.add(chain[index + 1])
            self.pin(chain[index + 1])

    def pin(self, name: bytes) -> None:
        """Evict this snapshot last, if it is here and a pinned prefix is resumed from it."""
        for block in self.find(name) if name in self._kept else ():
            self.pool.pin(block)

    def unpin(self, name: bytes) -> None:
        """Treat this snapshot like any other."""
        self._kept.discard(name)
        for block in self.find(name):
            self.pool.unpin(block)

    def is_owner(self, block: int) -> bool:
        """Return whether a block is of a snapshot. Raises AssertionError unless its name leads to it."""
        name = self._name_of.get(block)
        assert name is None or block in self._slot_of[name], f"block {block} is not where its state is"
        return name is not None

    # -- where to keep one ---------------------------------------------------------------------------------------------

    def _ends(self, seq: Sequence) -> set[int]:
        """Return the boundaries of a sequence's known tokens that are kept, beside those of long prompts."""
        size, lengths = (
            self._block_size,
            (seq.num_prompt, len(seq.tokens), *[pin.num_tokens for pin in seq.request.pins]),
        )
        return {seq.kv.branch, *[end // size * size for num in lengths for end in (num - 1, num)]}

    def chunk_end(self, seq: Sequence, start: int, stop: int) -> int:
        """Return where a chunk of a prompt up to `stop` ends: at the first boundary that is kept."""
        if not seq.kv.is_cacheable:
            return stop
        every = EVERY * self._block_size
        ends = [end for end in (*self._ends(seq), (start // every + 1) * every) if start < end < stop]
        return min(ends, default=stop)

    def _is_kept(self, seq: Sequence, position: int) -> bool:
        size = self._block_size
        if position % size or not position or not seq.kv.is_cacheable:
            return False
        is_answer = position > seq.num_prompt and position >= len(seq.tokens) - 1
        return is_answer or position % (EVERY * size) == 0 or position in self._ends(seq)

    # -- a sequence's slots --------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, num_blocks: int, *, loads: bool) -> int:
        """Give a sequence the state at a boundary, without holding it; returns the blocks that nothing holds yet.

        There is none at the beginning, nor if the sequence `loads` it.
        """
        slot = [] if loads or not num_blocks else self.find(seq.kv.chain[num_blocks])
        seq.kv.state = StateSlots(slot, is_shared=True)
        return sum([not self.pool.is_held(block) for block in slot])

    def resume(self, seq: Sequence) -> None:
        """Hold the state that `begin` has found."""
        if slot := seq.kv.state.slot:
            self.hold(seq)
            self.pool.found(slot)
            self._resumed.add(self._name_of[slot[0]])

    def load(self, seq: Sequence, hosts: Iterable[int]) -> None:
        """Allocate a slot for the state of a ticket."""
        seq.kv.state = StateSlots([self.pool.alloc() for _ in hosts], is_moved=True)

    def owed(self, seq: Sequence) -> int:
        """Return how many blocks a sequence must find for its next chunk, and for a slot each once it forks."""
        state, num_rows = seq.kv.state, len(seq.kv.slots) or seq.num_slots
        num_slots = (state.is_shared or not state.slot) + (num_rows if num_rows > 1 else 0)
        return num_slots * self._slot_size

    def advance(self, seq: Sequence, *, has_spare: bool) -> None:
        """Go on in the same slot, or leave it for a fresh one; `has_spare` is whether one may be kept."""
        state, start = seq.kv.state, seq.num_planned
        state.source = state.slot
        if state.is_shared or not state.slot or (has_spare and self._is_kept(seq, start)):
            if state.slot:
                state.held.append((start, state.slot))
                seq.kv.next_publish = min(seq.kv.next_publish, state.due)
            state.slot, state.is_shared, state.is_moved = self.pool.alloc_many(self._slot_size), False, True

    def publish(self, seq: Sequence, full: int) -> None:
        """Name the slots that were left at boundaries, once the steps that wrote them are committed."""
        size, state = self._block_size, seq.kv.state
        for position, slot in state.held:
            if position % size or position > full * size:
                continue
            for index in range(len(seq.kv.chain) - 1, position // size):
                name_block(seq.kv.chain, seq.tokens, index, size)
            name = seq.kv.chain[position // size]
            if name not in self._slot_of and slot[0] not in self._name_of:
                self._put(name, slot)

    def slide(self, seq: Sequence) -> None:
        """Release the slots that no step reads any more; of an answer's snapshots the last one stays."""
        state = seq.kv.state
        while state.due <= seq.num_computed:
            position, slot = state.held.pop(0)
            self.pool.free(*slot)
            if position > seq.num_prompt and slot[0] in self._name_of:
                if state.last not in self._resumed:
                    self._pass_by(state.last)
                state.last = self._name_of[slot[0]]

    def _pass_by(self, name: bytes) -> None:
        """Evict a snapshot before all others, if it is cached."""
        slot = self.find(name)
        for block in slot:
            self.pool.fork(block)
        self.pool.pass_by(*slot)

    def roll_back(self, seq: Sequence, _start: int) -> None:
        """Release all slots: that of the sequence is lost. What was left and computed can be found."""
        if seq.kv.state.slot:
            if seq.kv.is_cacheable:
                self.publish(seq, min(seq.num_computed, len(seq.tokens)) // self._block_size)
            self.free(seq)
            seq.kv.state, seq.kv.is_lost = StateSlots(), True

    def hold(self, seq: Sequence) -> None:
        """Add a holder to the slot of a sequence."""
        for block in seq.kv.state.slot:
            self.pool.fork(block)

    def free(self, seq: Sequence) -> None:
        """Remove a holder of all slots of a sequence."""
        for slot in seq.kv.state.tables:
            self.pool.free(*slot)
