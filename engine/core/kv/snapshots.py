"""The group of layers with recurrent state: the slots of sequences, and snapshots to resume from. Engine thread.

A state holds all positions before one, in bytes that do not depend on their number. Its place is a slot: some blocks of the
pool, anywhere in it, so that states and K/V share one pool, one order of eviction and the same copies. All recurrent
layers of a model are one group, since their states are kept and resumed together.

K/V writes can be repeated, a recurrence cannot. So a chunk reads one slot and writes one, as its plan says:

    plain decode           both are the sequence's slot
    the first chunk        it reads none: the runner begins with zeros
    after a hit, a fork    it reads the snapshot, or the parent's slot, which others may read too; it writes a fresh one
    at a kept boundary     it reads the old slot, which becomes a snapshot, and writes a fresh one
    across a kept boundary it writes the state there into a fresh slot, which becomes a snapshot, and goes on

So nothing is copied. A slot that was left is held until the step that reads it is committed; then it gets the name of the
prefix that ends there, and is cached. The slot that a sequence writes is never named: a step in flight may have advanced
it. After a rollback it is lost, and the sequence resumes from its last snapshot.

A step with drafts cannot know how many of them are right: it writes the state after its first position, and the runner
keeps the inputs of the drafts. The next step first takes those that were accepted into the slot that it reads. So that
this step begins at each boundary, drafts end there.

A snapshot is kept where prompts are likely to branch: at the last boundary that the next turn of a conversation surely
has, else at the last two boundaries of an input (the last token of an equal prompt is computed, so it resumes one block
earlier than a longer one), at pinned prefixes, where another prompt branched or waits to, every so often in long
prompts, and at the last boundary of an answer, because its end is known one step late. Chunks of prompts end there, or at
the next one if the runner writes the state midway and there is room. A boundary is kept only if no other sequence needs the
blocks; a prompt's is then copied to host memory from the slot, which the sequence goes on in.

A conversation needs its last snapshot only: once the next turn has its own, the one that it resumed from is evicted before
all others, here and below, unless another prompt was seen to leave there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.groups import Group, fill
from engine.core.kv.prefix_cache import DIGEST_BYTES, Listener, PrefixCache, name_block
from engine.core.page_table import TO_LOAD, LeftSlot, StateSlots
from engine.core.sequence import Sequence

WORTH = 4  # an answer's end goes below the pool if it saves this part of what K/V in its place would


class RecurrentGroup(Group):
    """The slots that sequences hold. A snapshot's blocks are the parts of one content, at the boundary's last block."""

    def __init__(
        self, number: int, config: SchedulerConfig, cache: PrefixCache, listener: Listener | None = None
    ) -> None:
        super().__init__(number, config, cache, listener)
        self._left = dict[bytes, None]()  # the snapshots that a prompt was seen to leave, those found last at the end

    # -- where to keep one ---------------------------------------------------------------------------------------------

    def _prompt_ends(self, seq: Sequence) -> set[int]:
        """Return the boundaries at which the next turn, or an equal prompt, leaves a sequence's prompt."""
        size, turn_end, num_prompt = self._block_size, seq.request.turn_end, seq.num_prompt
        return {end // size * size for end in ((turn_end,) if turn_end else (num_prompt - 1, num_prompt))}

    def _ends(self, seq: Sequence) -> set[int]:
        """Return the boundaries of a sequence's known tokens that are kept, beside those of long prompts."""
        size, num_known, pins = self._block_size, len(seq.tokens), seq.request.pins
        pinned = [end // size * size for pin in pins for end in (pin.num_tokens - 1, pin.num_tokens)]
        known = [end // size * size for end in (num_known - 1, num_known)] if num_known > seq.num_prompt else []
        behind = [end for end in known if end > seq.num_prompt]
        return {seq.kv.branch, *self._prompt_ends(seq), *pinned, *behind}

    def _ends_within(self, seq: Sequence, start: int, stop: int) -> list[int]:
        """Return the boundaries in a chunk of a prompt that are kept, in order."""
        every = (start // self._every + 1) * self._every
        return sorted(end for end in {*self._ends(seq), every} if start < end < stop) if seq.kv.is_cacheable else []

    def chunk_end(self, seq: Sequence, start: int, stop: int) -> int:
        """Return where a chunk of a prompt up to `stop` ends: at the first boundary that is kept, unless midway is."""
        ends = self._ends_within(seq, start, stop)
        if ends and self._config.writes_midway and self._has_spare(2):  # beside the slot that it goes on in
            del ends[0]
        return ends[0] if ends else stop

    def _has_spare(self, num_slots: int) -> bool:
        """Return whether there are blocks for so many slots beyond those that running sequences may need next."""
        num_next = self._config.num_paged_groups * self._config.max_num_seqs
        return self.pool.num_spare >= num_slots * len(self._suffixes) + num_next

    def keep_ahead(self, seq: Sequence, position: int) -> bool:
        """Have a prompt keep its state at a boundary, where another leaves it; returns whether it will. It keeps one such."""
        if seq.kv.branch <= seq.num_planned < position:
            seq.kv.branch = position
        return seq.kv.branch == position

    def _is_kept(self, seq: Sequence, position: int) -> bool:
        size = self._block_size
        if position % size or not position or not seq.kv.is_cacheable:
            return False
        is_answer = position > seq.num_prompt and position >= len(seq.tokens) - 1
        return is_answer or position % self._every == 0 or position in self._ends(seq)

    # -- a sequence's slots --------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, num_blocks: int, saved: Seq[int] | None) -> int:
        """Give a sequence the state at a boundary, or that of its ticket; returns the blocks that it takes of the pool.

        It holds none of them yet. There is none at the beginning. One that is loaded is left like a snapshot.
        """
        slot = [TO_LOAD] * len(self._suffixes) if num_blocks or saved is not None else []
        if saved is None and num_blocks:
            slot = self.blocks_of(seq.kv.chain[num_blocks]) or slot
        seq.kv.state = StateSlots(slot, is_shared=True)
        if saved is None and num_blocks and not self._was_left(seq.kv.chain[num_blocks]):
            seq.kv.state.continued = seq.kv.chain[num_blocks]
        return sum([block == TO_LOAD or not self.pool.is_held(block) for block in slot])

    def resume(self, seq: Sequence) -> None:
        """Hold the state that `begin` has found."""
        if TO_LOAD not in seq.kv.state.slot:
            for block in seq.kv.state.slot:
                self.pool.fork(block)
            self.branch(seq.kv.state.slot)

    def fill(self, seq: Sequence) -> list[int]:
        """Return a new slot for a state that `begin` has not found."""
        return fill(seq.kv.state.slot, self.pool)

    def owed(self, seq: Sequence) -> int:
        """Return how many blocks a sequence must find for its next chunk, and for a slot each once it forks."""
        state, num_rows = seq.kv.state, len(seq.kv.slots) or seq.num_slots
        num_slots = (state.is_shared or not state.slot) + (num_rows if num_rows > 1 else 0)
        return num_slots * len(self._suffixes)

    def cover(self, seq: Sequence, stop: int, _step: InFlightStep) -> None:
        """Choose the slots for the next chunk of a prompt."""
        self._advance(seq)
        start = seq.num_planned
        ends = self._ends_within(seq, start, stop) if self._config.writes_midway else ()
        if ends and self._has_spare(1):
            state, slot = seq.kv.state, self.pool.alloc_many(len(self._suffixes))
            state.midway, state.midway_after, state.is_moved = slot, ends[0] - start, True
            self._leave_slot(seq, LeftSlot(ends[0], slot, stop))

    def extend(self, seq: Sequence, _step: InFlightStep, *, is_copied: bool) -> None:  # noqa: ARG002 - WindowGroup's parameters
        """Choose the slots for the next position."""
        self._advance(seq)

    def _advance(self, seq: Sequence) -> None:
        """Go on in the same slot, or leave it for a fresh one."""
        state, start = seq.kv.state, seq.num_planned
        has_spare = self._has_spare(1)
        state.source, is_kept = state.slot, self._is_kept(seq, start)
        if is_kept and not has_spare:
            self._keep_below(seq, start)
        if state.is_shared or not state.slot or (has_spare and is_kept):
            if state.slot:
                self._leave_slot(seq, LeftSlot(start, state.slot, start + (state.num_behind > 0)))
            state.slot, state.is_shared, state.is_moved = self.pool.alloc_many(len(self._suffixes)), False, True

    def _leave_slot(self, seq: Sequence, left: LeftSlot) -> None:
        """Hold a slot until the step that reads it is committed, which the sequence notices then."""
        seq.kv.state.held.append(left)
        seq.kv.next_publish = min(seq.kv.next_publish, seq.kv.state.due)
        seq.fast_commit_until = min(seq.fast_commit_until, seq.kv.next_publish)

    def _keep_below(self, seq: Sequence, position: int) -> None:
        """Copy the state at a boundary of a prompt to host memory, before the next step writes to its slot."""
        state = seq.kv.state
        is_plain = bool(state.slot) and not state.is_shared and not state.num_behind
        # A step in flight might still fail.
        if self._listener is None or not is_plain or not seq.num_computed == position <= seq.num_prompt:
            return
        boundary = name_block(seq.kv.chain, seq.tokens, position // self._block_size - 1, self._block_size)
        for name, block in zip(self.names(boundary), state.slot, strict=True):
            self._listener.leaves(name, block)

    def publish(self, seq: Sequence, num_known: int) -> None:
        """Name the slots that were left at boundaries, once the steps that wrote them are committed."""
        size, state, chain = self._block_size, seq.kv.state, seq.kv.chain
        for position, slot, ready_at in state.held:
            if position and not position % size and ready_at <= num_known:
                if self.register(chain, seq.tokens, position // size - 1, slot):
                    if position == seq.request.turn_end // size * size:
                        self._supersede(state.continued)
                    elif position == seq.kv.branch:
                        self._was_left(chain[position // size])
                    self.pool.weigh(slot, self._saved(chain, position // size))
                if position <= seq.num_prompt:
                    self.branch(slot)

    def _saved(self, chain: Seq[bytes], num_blocks: int) -> float:
        """Return what a snapshot saves, a byte: without it, prompts are computed from the snapshot before it on."""
        lasting = (at for at in range(num_blocks - 1, 0, -1) if self._branches.intersection(self.blocks_of(chain[at])))
        return (num_blocks - next(lasting, 0)) / len(self._suffixes)

    def _was_left(self, name: bytes) -> bool:
        """Note that a prompt leaves a snapshot; returns whether another one did before."""
        was_left = name in self._left
        self._left.pop(name, None)
        self._left[name] = None
        if len(self._left) > self.pool.num_blocks:
            del self._left[next(iter(self._left))]
        return was_left

    def _supersede(self, name: bytes) -> None:
        """Evict a snapshot first, here and below: its conversation has a later one."""
        self._branches.difference_update(self.blocks_of(name))
        self._pass_by(name)
        if self._listener is not None:
            for part in self.names(name):
                self._listener.pass_by(part)

    def slide(self, seq: Sequence) -> None:
        """Release the slots that no step reads any more; of an answer's snapshots the last one stays."""
        state = seq.kv.state
        while state.due <= seq.num_computed:
            position, slot, _ = state.held.pop(0)
            self.pool.free(*slot)
            if position > seq.num_prompt and self.content(slot[0]) is not None:
                self._pass_by(state.last)
                state.last = self._name_of[slot[0]][:DIGEST_BYTES]

    def _pass_by(self, name: bytes) -> None:
        """Evict a snapshot before all others, if it is cached and no prompt may branch there."""
        if not self._branches.issuperset(self.blocks_of(name)):
            for part in self.names(name):
                self.pass_by(part)

    def roll_back(self, seq: Sequence, start: int) -> None:
        """Release all slots: that of the sequence is lost. What was left and computed, up to `start`, can be found."""
        if seq.kv.state.slot:
            if seq.kv.is_cacheable:
                self.publish(seq, min(start, len(seq.tokens)))
            self.free(seq)
            seq.kv.state, seq.kv.is_lost = StateSlots(), True

    def free(self, seq: Sequence) -> None:
        """Remove a holder of all slots of a sequence, whose last snapshot others may go on from."""
        last, chain = seq.kv.state.last, seq.kv.chain
        # Another holder may have named it: a beam that is left out of the cache has no names itself.
        if last in chain[1:] and WORTH * self._saved(chain, chain.index(last)) >= 1:
            self.branch(self.blocks_of(last))
        for slot in seq.kv.state.tables:
            self.branch(slot)
            self.pool.free(*slot)
