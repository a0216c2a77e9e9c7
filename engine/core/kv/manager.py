"""The only way to K/V blocks: page tables, the prefix cache, and the tiers behind the pool. Engine thread.

A prompt's blocks are allocated together, so a prompt that has started never stalls for memory. A block with several
holders is copied before it is written. Tails are freed before heads, so the prefix cache evicts them first.

The cache here is that of the layers with full attention. Layers with sliding windows, see groups.py, and those with
recurrent state, see snapshots.py, are in groups of their own beside them, over the same pool; most models have none. A
sequence needs blocks of all groups: those of its prompt in the first group are allocated when it is admitted, those of the
others chunk by chunk; until then they are owed to it, and nothing else gets them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable

from engine.core.budget import StepTime
from engine.core.config import SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.groups import WindowGroup, last_boundary
from engine.core.kv.imports import PrefixImports
from engine.core.kv.pins import Pins
from engine.core.kv.prefix_cache import BlockIndex, PrefixCache, Unkept, name_block, request_names
from engine.core.kv.snapshots import RecurrentGroup
from engine.core.kv.tiers import Tiers
from engine.core.page_table import NEVER, NO_BLOCK, StateSlots, blocks_for
from engine.core.sequence import Sequence
from engine.core.spans import divided
from engine.core.stats import Stats
from engine.core.types import Request

MAX_FETCHES = 3  # of the same blocks, after which a prompt is computed: host memory may be too small for them


class KVCacheManager:
    """Blocks and runner rows, allocated and freed sequence by sequence."""

    def __init__(self, config: SchedulerConfig, stats: Stats, times: StepTime) -> None:
        """`times` estimates what computing takes, which bounds how long a request waits for a store."""
        self._max_num_seqs = config.max_num_seqs
        self._caching, self._has_host = config.enable_prefix_caching, config.num_host_blocks > 0
        max_pinned = int(config.num_blocks * config.pinned_share)
        self.pins = Pins(stats, max_pinned // config.num_groups)
        self.tiers = Tiers(config, stats, self.pins, times)
        self._listener = self.tiers if config.host_caching else None
        self._names_answers = config.host_caching or config.state_blocks > 0
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.block_size = config.block_size
        self._cache = (PrefixCache if config.has_full else Unkept)(
            config.num_blocks, config.block_size, self._listener, self.pins.until, max_pinned
        )
        self.pool = self._cache.pool
        self._windows = [
            WindowGroup(number, config, self._cache, self._listener) for number in range(1, config.num_groups)
        ]
        has_states, number = config.state_blocks > 0, config.num_groups
        self._recurrent = RecurrentGroup(number, config, self._cache, self._listener) if has_states else None
        # All groups but the first, in the order in which a ticket has them.
        self._others: tuple[WindowGroup | RecurrentGroup, ...] = (
            *self._windows,
            *([] if self._recurrent is None else [self._recurrent]),
        )
        self.config, self._num_groups = config, config.num_paged_groups
        self.indexes: tuple[BlockIndex, ...] = (self._cache, *self._others)  # by the number of the group
        self.pins.targets += self.indexes
        self._cache.dependents = self._others
        self.imports = PrefixImports(self._cache, self._others, self.tiers.host, config)
        self.note_request: Callable[[Request, list[bytes]], None] | None = None  # for KV events

    @property
    def groups(self) -> list[tuple[str, BlockIndex]]:
        """Return the groups of layers, each with the name of its kind in metrics."""
        groups = [(kind.name, index) for kind, index in zip(self.config.groups, self.indexes, strict=True)]
        return groups if self.config.has_full else groups[1:]

    def first_names(self, request: Request) -> list[bytes]:
        """Return how a request's chain of names begins, and remember for KV events what of it they are."""
        names = request_names(request, self.config)
        if self.note_request is not None:
            self.note_request(request, names)
        return names

    @property
    def has_slot(self) -> bool:
        """True if a runner row is free."""
        return bool(self._slots)

    def allocate(self, seq: Sequence, *, reserve: int) -> list[tuple[int, int]] | None:
        """Take runner rows, and the blocks that are allocated at the start; None if that leaves too few blocks.

        `reserve` blocks of each group have to stay available, a search's headroom, and what is owed. Cached blocks come
        first. Returns the blocks that the step has to load, from the sequence's ticket or host memory, as (host block,
        block). What host memory has lost since `prefetch` is fetched again once there is room: None until then too.
        """
        seq.kv.is_fetched_again = False
        if len(self._slots) < seq.num_slots:
            return None
        size, tokens, pool = self.block_size, seq.tokens, self.pool
        is_reading = self._caching and not seq.needs_every_position
        hits, hosts = self._match(seq) if is_reading else ([], [])
        self._cache.hold(hits)
        ticket = seq.kv.useful_ticket(len(hits) * size)
        missing = blocks_for(len(tokens), size) - len(hits) if self.config.has_full else 0
        missing += reserve * self._num_groups
        seq.kv.tables = (hits,)
        num_found = len(hits) + len(hosts)
        saved = [None] * len(self._others) if ticket is None else ticket.others
        missing += sum([group.begin(seq, num_found, table) for group, table in zip(self._others, saved, strict=True)])
        self._owe(seq)
        missing += max(seq.headroom - seq.kv.num_owed, 0)  # the beams' blocks were those of all groups
        has_room = pool.num_spare >= missing
        seq.kv.is_fetched_again = has_room and ticket is None and self._fetch_again(seq, num_found)
        if not has_room or seq.kv.is_fetched_again:
            self._cache.release(hits)
            seq.kv.tables, seq.kv.state = (), StateSlots()
            self._owe(seq, 0)
            return None
        num_hits, num_loaded = len(hits), num_found * size  # positions, with those before
        seq.kv.num_published = num_hits
        if ticket is not None:
            hosts, num_loaded, others = ticket.blocks[num_hits:], ticket.num_tokens, ticket.other_blocks
        elif others := self._find_others(seq, num_found):
            seq.kv.num_published = min([num_hits, *(group.window_at(num_found).start for group in self._others)])
        if hosts or others:  # before the pool evicts blocks to host memory, which may evict these
            self.tiers.take(seq, hosts, others)
        for group in self._others:
            group.resume(seq)
        blocks = seq.kv.blocks
        blocks += self._cache.take(blocks_for(len(tokens), size) - num_hits, after=hits[-1] if hits else -1)
        filled = [block for group in self._others for block in group.fill(seq)]
        seq.num_computed = seq.num_planned = num_loaded
        seq.kv.writable_until = seq.kv.capacity
        if self._caching or self._others:
            seq.kv.next_publish = (seq.kv.num_published + 1) * size
            if seq.request.pins:
                self._pin(seq, 0, num_hits)
        self.discard(seq)
        loads = [*zip(hosts, blocks[num_hits:], strict=False), *zip(others, filled, strict=True)]
        seq.kv.is_arriving = bool(loads)
        seq.take_slots([self._slots.pop() for _ in range(seq.num_slots)])
        return loads

    def _find_others(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Return the host blocks with what the pool lacks of other groups at a boundary."""
        names = [name for group in self._others for name in group.lacking(seq.kv.chain, num_blocks)]
        return [self.tiers.host.find(name) for name in names]

    def _owe(self, seq: Sequence, num_owed: int | None = None) -> None:
        """Bring up to date how many blocks of the other groups a sequence may still need."""
        if num_owed is None:
            num_owed = sum([group.owed(seq) for group in self._others])
        self.pool.num_owed += num_owed - seq.kv.num_owed
        seq.kv.num_owed = num_owed

    def prefetch(self, seq: Sequence) -> bool:
        """Start loading blocks that only a store has; returns whether to park the sequence."""
        if not (self._caching and self.tiers.stores) or seq.needs_every_position:
            return False
        num_found = sum(map(len, self._match(seq)))
        num_hits = len(self._cache.match(seq.kv.chain, seq.tokens, len(seq.tokens) - 1))
        return self.tiers.prefetch(seq, self._others, num_hits, num_found)

    def _fetch_again(self, seq: Sequence, num_found: int) -> bool:
        """Start loading again what stores have and host memory has lost; returns whether to park the sequence."""
        kv = seq.kv
        if num_found >= kv.num_coming or kv.num_awaited or kv.num_fetches == MAX_FETCHES:
            return False  # with some awaited, it has waited for them long enough
        kv.num_fetches += 1
        return self.prefetch(seq)

    def lookup(self, seq: Sequence) -> int:
        """Return how many positions of a waiting sequence are cached, or on their way from a store."""
        if not self._caching or seq.needs_every_position:
            return 0
        num_blocks = max(sum(map(len, self._match(seq))), seq.kv.num_coming if seq.kv.num_awaited else 0)
        return min(num_blocks * self.block_size, len(seq.tokens) - 1)

    def _match(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """Return the cached blocks that a sequence begins with, and the host blocks after them; every group can resume there.

        The last token is always computed: its hidden state is what the first draw comes from.
        """
        kv, versions = seq.kv, (self.pool.version, self.tiers.host.pool.version)
        if kv.matched_at != (*versions, len(seq.tokens)):
            hits = self._cache.match(kv.chain, seq.tokens, len(seq.tokens) - 1)
            hosts = self.tiers.find(seq, len(hits)) if self._has_host else []
            kv.branch = (len(hits) + len(hosts)) * self.block_size
            if self._others:
                num_blocks = last_boundary(self._others, kv.chain, len(hits) + len(hosts), self.tiers.has)
                hits, hosts = hits[:num_blocks], hosts[: max(num_blocks - len(hits), 0)]
            kv.matched, kv.matched_at = (hits, hosts), (self.pool.version, versions[1], len(seq.tokens))
        return list(kv.matched[0]), list(kv.matched[1])

    def has_room_for(self, sequences: Iterable[Sequence], *, reserve: int) -> bool:
        """Return whether rows and blocks are free for all of these, if they find nothing cached, and `reserve` blocks of each group."""
        num_slots, num_blocks = 0, reserve
        for seq in sequences:
            num_slots += seq.num_slots
            num_blocks += blocks_for(len(seq.tokens), self.block_size)
        return len(self._slots) >= num_slots and self.pool.num_spare >= num_blocks * self._num_groups

    def find_leader(self, seq: Sequence, leaders: Iterable[Sequence]) -> tuple[Sequence, int] | None:
        """Return which running prompt computes what a waiting one lacks, and the positions after which it finds that; or None.

        A prompt with recurrent state has to keep that where the other leaves, which it may have passed.
        """
        if not self._caching or seq.needs_every_position or seq.kv.ticket is not None:
            return None
        size, num = self.block_size, sum(map(len, self._match(seq)))
        if num >= (most := (len(seq.tokens) - 1) // size):
            return None

        def name(of: Sequence) -> bytes:
            return name_block(of.kv.chain, of.tokens, num, size)

        for leader in leaders:
            last = min(most, leader.num_prompt // size)
            if num < last and name(leader) == name(seq):
                while num < last and name(leader) == name(seq):
                    num += 1
                is_kept = self._recurrent is None or self._recurrent.keep_ahead(leader, num * size)
                return (leader, num * size + (self._recurrent is not None)) if is_kept else None
        return None

    def enough(self, victims: Iterable[Sequence], seq: Sequence, num_reserved: int) -> list[Sequence]:
        """Return the shortest prefix of victims that frees enough for a sequence; none if all do not."""
        num_slots, num_blocks, found = len(self._slots), self.pool.num_available, list[Sequence]()
        needed = self.config.max_blocks(len(seq.tokens), longest_atomic=seq.request.longest_atomic)
        needed += num_reserved * self._num_groups + seq.headroom + self.pool.num_owed
        for victim in victims:
            found.append(victim)
            num_slots += len(victim.kv.slots)
            needed -= victim.kv.num_owed
            for table in victim.kv.held:
                num_blocks += sum([block != NO_BLOCK and not self.pool.is_shared(block) for block in table])
            if num_slots >= seq.num_slots and num_blocks >= needed:
                return found
        return []

    def reach(self, seq: Sequence) -> int:
        """Return the position up to which the available blocks let a prompt be computed."""
        if not self._windows:
            return len(seq.tokens)
        # What a chunk takes beyond what is kept for the sequence must not be kept for others, or for its later chunks.
        num_available, owed = self.pool.num_available, [group.owed(seq) for group in self._windows]
        ahead = range(1, num_available // len(self._windows) + 1)
        num_spare = max(num_available - self.pool.num_owed, 0)
        num_blocks = len(seq.kv.tables[1])
        num_blocks += bisect_right(ahead, num_spare, key=lambda num: sum([max(num - each, 0) for each in owed]))
        # From the prompt's end on, `extend` keeps all tables of a sequence equally long.
        most = len(seq.tokens) - (num_blocks < len(seq.kv.blocks))
        return min(num_blocks * self.block_size, most)

    def chunk_end(self, seq: Sequence, stop: int) -> int:
        """Return where the next chunk of a prompt, up to `stop` at most, ends."""
        if self._recurrent is None:
            return stop
        stop = self._recurrent.chunk_end(seq, seq.num_planned, stop)
        span = divided(seq.request.spans, stop)
        return stop if span is None else span.start if span.start > seq.num_planned else span.end

    def cover(self, seq: Sequence, stop: int, step: InFlightStep) -> None:
        """Take what a prompt's next chunk, up to `stop` within its reach, needs in the other groups."""
        for group in self._others:
            group.cover(seq, stop, step)
        if self._others:
            self._owe(seq)

    def has_blocks_for(self, num_sequences: int) -> bool:
        """Return whether so many sequences can each be extended by a block of each group."""
        return self.pool.num_spare >= num_sequences * self._num_groups

    def extend(self, seq: Sequence, step: InFlightStep) -> bool:
        """Give a sequence what its next position needs in each group; False if there is too little.

        That is a block of each, or a copy of the last one if others hold it, and a slot for its state.
        """
        kv, pool, has_full = seq.kv, self.pool, self.config.has_full
        for windowed in self._windows:
            windowed.slide(seq)
        blocks = kv.tables[0]
        # All tables share their tails alike.
        is_copied = kv.shares_tail and self._num_groups > 0 and pool.is_shared(kv.tables[not has_full][-1])
        needs_block = is_copied or not kv.shares_tail
        missing = self._num_groups if needs_block else 0
        if missing and pool.is_exhausted:
            return False
        if self._others and missing + kv.num_owed and pool.num_spare < missing:
            return False
        if needs_block and not has_full:
            if not is_copied:
                blocks.append(NO_BLOCK)
        elif needs_block:
            if not is_copied:
                blocks.append(pool.alloc(after=blocks[-1]))
            else:
                copied, blocks[-1] = blocks[-1], pool.alloc()
                pool.free(copied)
                step.copies += ((copied, blocks[-1]),)
            step.entries += ((seq.slot, 0, len(blocks) - 1, blocks[-1]),)
        kv.shares_tail, kv.writable_until = False, len(blocks) * self.block_size
        if self._others:
            for group in self._others:
                group.extend(seq, step, is_copied=is_copied)
            if kv.num_owed or self._recurrent is not None:  # else all tables are complete, as they were
                self._owe(seq)
        return True

    def fork(self, parent: Sequence, children: Collection[Sequence]) -> None:
        """Give each child one of the parent's slots, and share all of its blocks."""
        slots = parent.kv.slots
        parent.take_slots(slots[:1])
        for child, slot in zip(children, slots[1:], strict=True):
            child.take_slots([slot])
            self._hold_all(child)
        for sharer in (parent, *children):
            self._share_tail(sharer)

    def reassign(self, seq: Sequence, other: Sequence, seq_id: int) -> None:
        """Replace a sequence's blocks by another's, shared. No plan in flight may name the sequence.

        Its own blocks are an abandoned beam's, and are not published.
        """
        self._hold_all(other)
        self._free_all(seq)
        seq.follow(other, seq_id)
        for sharer in (seq, other):
            self._share_tail(sharer)

    def _hold_all(self, seq: Sequence) -> None:
        """Add a holder to every block of a sequence that another one goes on from."""
        for table in (*seq.kv.tables, seq.kv.state.slot):
            for block in table:
                if block != NO_BLOCK:
                    self.pool.fork(block)

    def _free_all(self, seq: Sequence) -> None:
        """Remove a holder of every block of a sequence; its tables are replaced or cleared next."""
        self._cache.release(seq.kv.blocks)
        for group in self._others if seq.kv.tables else ():
            group.free(seq)

    def _share_tail(self, sharer: Sequence) -> None:
        sharer.kv.shares_tail = sharer.num_planned % self.block_size != 0
        sharer.kv.writable_until = 0 if sharer.kv.shares_tail else sharer.kv.capacity
        sharer.kv.state.is_shared = True
        self._owe(sharer)

    def publish(self, seq: Sequence) -> None:
        """Publish all full, computed blocks, and free what its other groups have left."""
        # With overlap, the K/V of a token may be there that an abort discarded: the token is unknown.
        num_known, kv = min(seq.num_computed, len(seq.tokens)), seq.kv
        full = num_known // self.block_size
        if kv.is_cacheable:
            self._cache.register(kv.chain, seq.tokens, kv.blocks, kv.num_published, full)
            for group in self._others:
                group.publish(seq, num_known)
            if seq.request.pins:
                self._pin(seq, kv.num_published, full)
            kv.num_published = full
        for group in self._others:
            group.slide(seq)
        if kv.num_owed or self._recurrent is not None:  # else all tables are complete, as they were
            self._owe(seq)
        due = (full + 1) * self.block_size
        # An answer is named at its end, but block by block if lower tiers or snapshots need the names. What is computed again
        # after a preemption is published as it is computed, so that windows free what they have passed.
        is_due = due <= (len(seq.tokens) if self._windows else seq.num_prompt) or self._names_answers
        kv.next_publish = min(due, kv.state.due) if is_due else NEVER

    def _pin(self, seq: Sequence, first: int, stop: int) -> None:
        """Pin those of a sequence's published blocks first .. stop - 1 that its request wants to be retained."""
        request, size = seq.request, self.block_size
        for index in range(first, min(stop, max(pin.num_tokens for pin in request.pins) // size)):
            seconds = max([pin.seconds for pin in request.pins if (index + 1) * size <= pin.num_tokens])
            until = request.arrival_s + seconds
            if not self.pins.keep(seq.kv.chain, index, until):
                return
            for group in self._others:
                for pin in request.pins:
                    group.keep(seq.kv.chain, index, pin.num_tokens)
            seq.kv.num_pinned = max(seq.kv.num_pinned, (index + 1) * size)

    def leave(self, seq: Sequence) -> None:
        """Make all computed blocks of a sequence findable, before it frees them."""
        num_known = min(seq.num_computed, len(seq.tokens))
        full = num_known // self.block_size
        if seq.kv.is_cacheable and not seq.kv.is_arriving:
            for group in self._others:
                group.publish(seq, num_known)
            if full > seq.kv.num_published:
                self._cache.register(seq.kv.chain, seq.tokens, seq.kv.blocks, seq.kv.num_published, full)

    def exclude_from_cache(self, seq: Sequence) -> None:
        """Publish nothing more of a sequence: its last blocks may be incomplete or wrong."""
        seq.kv.is_cacheable, seq.kv.next_publish = False, NEVER

    def free(self, seq: Sequence) -> None:
        """Free all blocks and slots; the sequence is as if nothing was computed. Its blocks can be found."""
        self.leave(seq)
        self._slots += reversed(seq.kv.slots)
        self._free_all(seq)
        seq.reset()
        self._owe(seq, 0)

    # -- preempted sequences -----------------------------------------------------------------------------------------

    def suspend(self, seq: Sequence) -> None:
        """Save a preempted sequence as a ticket, before it is freed, if that pays."""
        seq.kv.ticket = self.tiers.host.save(seq)
        seq.kv.num_saved = 0 if seq.kv.ticket is None else seq.kv.ticket.num_tokens

    def discard(self, seq: Sequence) -> None:
        """Release a sequence's ticket, if it has one."""
        if seq.kv.ticket is not None:
            self.tiers.host.discard(seq.kv.ticket)
            seq.kv.ticket = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def committed(self, step: InFlightStep) -> None:
        """Note that a step is done: its copies and loads have arrived."""
        if step.arrivals:
            self._arrived(step)
        if self._has_host:
            self.tiers.settle(step, is_done=True)

    def rolled_back(self, step: InFlightStep) -> None:
        """Note that nothing of a step was done: its copies never arrived."""
        self._arrived(step)
        self.tiers.settle(step, is_done=False)
        for seq in step.arrivals if self._others else ():
            self._roll_back_others(seq, 0)
            seq.kv.is_lost = True
        for index, seq in enumerate(step.sequences if self._others else ()):
            for each in (seq, *step.children.get(index, ())):
                self._roll_back_others(each, step.positions[index])

    def _roll_back_others(self, seq: Sequence, start: int) -> None:
        for group in self._others:
            group.roll_back(seq, start)
        self._owe(seq)

    def dropped(self, step: InFlightStep) -> None:
        """Note that a step was not launched, because it became empty."""
        self._arrived(step)
        self.tiers.host.release(step.loaded_hosts)

    def _arrived(self, step: InFlightStep) -> None:
        for seq in step.arrivals:
            seq.kv.is_arriving = False

    @property
    def num_leaked(self) -> int:
        """Return how many blocks and rows are held where no sequence lives: 0, but for a bug."""
        num_rows = self._max_num_seqs - len(self._slots)
        return num_rows + self.pool.num_held - len(self.imports.held) + self.tiers.num_leaked
