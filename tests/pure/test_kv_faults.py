"""KVCacheManager under faults: steps in flight and rolled back, transfers late, failed or doubled, aborts at any time.

A state machine plays scheduler, device and transport around the manager, two steps deep. The reference is a device whose
cells remember what their K/V was computed from. It runs launched steps as late as it may, writes garbage where a copy
fails, and carries out transfers when they are reported, so bytes that reach a wrong owner are seen at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.budget import StepTime
from engine.core.in_flight import InFlightStep, roll_back
from engine.core.kv.imports import PrefixImport, places_at
from engine.core.kv.manager import KVCacheManager
from engine.core.kv.prefix_cache import name_block
from engine.core.kv.tiers import Transfer
from engine.core.sequence import Account, Sequence, Status
from engine.core.stats import Stats, TransferKind
from tests.integrity import check_kv
from tests.pure.driver import config, request

SIZE = 4
History = tuple[str, tuple[int, ...]]  # salt and tokens that K/V was computed from


# Few beginnings, so that prompts share blocks.
PATTERNS = [[first, 1, 0, 1, first] * 3 for first in range(3)]
PROMPTS = st.builds(
    lambda first, length, tail: PATTERNS[first][:length] + tail,
    st.integers(0, 2),
    st.integers(1, 14),
    st.lists(st.integers(0, 1), max_size=3),
)


def history(seq: Sequence, stop: int) -> History:
    """What the K/V of position stop - 1 is computed from."""
    return seq.request.cache_salt, tuple(seq.tokens[:stop])


class Op(NamedTuple):
    """One thing that a step does on the device."""

    source: tuple[str, int]  # a block: its memory and number
    target: tuple[str, int]
    cell: tuple[int, History] | None = None  # written instead of a copy


class Device:
    """The pool, host memory and a store: blocks of cells."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], dict[int, History]] = {}
        self.launched: deque[list[Op]] = deque()

    def read(self, block: tuple[str, int]) -> dict[int, History]:
        return self.blocks.get(block, {})

    def run(self, ops: list[Op]) -> None:
        for source, target, cell in ops:
            self.blocks[target] = self.read(target) | dict([cell]) if cell else dict(self.read(source))

    def catch_up(self) -> None:
        """Run what was launched, in order."""
        for ops in self.launched:
            self.run(ops)
            ops.clear()


class FaultMachine(RuleBasedStateMachine):
    """`waiting` sequences hold a ticket at most; `leaving` ones are held by steps in flight alone."""

    @initialize(
        num_blocks=st.integers(5, 12),
        num_host=st.integers(2, 12),
        mode=st.sampled_from(["", "caching", "offloads", "offloads", "offloads"]),
    )
    def begin(self, num_blocks: int, num_host: int, mode: str) -> None:
        sizes = {"num_blocks": num_blocks, "num_host_blocks": num_host, "block_size": SIZE, "max_num_seqs": 4}
        offloads = mode == "offloads"
        self.kv = KVCacheManager(
            config(enable_prefix_caching=bool(mode), host_caching=offloads, num_disk_blocks=12 * offloads, **sizes),
            Stats(),
            StepTime(),
        )
        self.device = Device()
        self.names: dict[bytes, History] = {}
        self.num_made = 0
        self.waiting: list[Sequence] = []
        self.living: list[Sequence] = []
        self.leaving: dict[Sequence, bool] = {}  # and whether they end
        self.steps: deque[InFlightStep] = deque()
        self.transfers: list[Transfer] = []
        self.reported: list[Transfer] = []
        self.imports: list[PrefixImport] = []
        if offloads:
            self.fill_store()

    def fill_store(self) -> None:
        """The store has the patterns' first blocks from an earlier process."""
        kept = []
        for tokens in PATTERNS:
            chain = self.kv.first_names(request("r", tuple(tokens)))
            for index in range(3):
                name, slot = name_block(chain, tokens, index, SIZE), len(kept)
                self.names[name] = "", tuple(tokens[: (index + 1) * SIZE])
                self.device.blocks["store", slot] = {
                    at: ("", tuple(tokens[: index * SIZE + at + 1])) for at in range(SIZE)
                }
                kept.append((name, slot))
        self.kv.tiers.restore("disk", kept)

    def note_names(self, seq: Sequence) -> None:
        chain = self.kv.first_names(seq.request)
        for index in range(len(seq.tokens) // SIZE):
            name = name_block(chain, seq.tokens, index, SIZE)
            self.names[name] = history(seq, (index + 1) * SIZE)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "", "", "salt"]))
    def submit(self, prompt: list[int], salt: str) -> None:
        made = request(f"r{self.num_made}", tuple(prompt), max_tokens=40, cache_salt=salt)
        names = self.kv.first_names(made)
        seq = Sequence(made, 0, self.num_made, self.num_made, SIZE, names, Account())
        self.num_made += 1
        self.kv.prefetch(seq)
        self.waiting.append(seq)

    @rule(turns=st.integers(1, 8), most=st.integers(1, 9), depth=st.integers(0, 3), admits=st.integers(0, 2))
    def serve(self, turns: int, most: int, depth: int, admits: int) -> None:
        """Plan and commit some steps."""
        for _ in range(turns):
            if len(self.steps) < 2:
                self.launch(admits, most)
            while len(self.steps) > depth:
                self.commit()

    @precondition(lambda self: len(self.steps) < 2)
    @rule(admits=st.integers(0, 2), most=st.integers(1, 9))
    def launch(self, admits: int, most: int) -> None:
        """Plan a step: grow what runs, preempting if need be, and admit some; the device may run it later."""
        step = InFlightStep()
        for seq in list(self.living):
            self.plan_chunk(seq, min(seq.num_planned + most, len(seq.tokens)), step)
        for seq in list(self.waiting)[:admits]:
            loads = self.kv.allocate(seq, reserve=0)
            if loads is not None:
                self.waiting.remove(seq)
                self.living.append(seq)
                seq.move(Status.PREFILL)
                if loads:
                    step.add_loads(seq, loads)
                if admits == 1:
                    self.plan_chunk(seq, min(seq.num_planned + most, len(seq.tokens)), step)
        step.swap_out = self.kv.tiers.host.take_due()
        ops = [Op(("pool", block), ("host", host)) for block, host in step.swap_out]
        ops += [Op(("pool", source), ("pool", target)) for source, target in step.copies]
        ops += [Op(("host", host), ("pool", block)) for host, block in step.swap_in]
        for chunk, seq in zip(step.chunks, step.sequences, strict=True):
            for at in range(chunk.start, chunk.start + chunk.num_tokens):
                target = ("pool", seq.kv.blocks[at // SIZE])
                ops.append(Op(target, target, (at % SIZE, history(seq, at + 1))))
        self.steps.append(step)
        self.device.launched.append(ops)

    def plan_chunk(self, seq: Sequence, stop: int, step: InFlightStep) -> None:
        if seq not in self.living or stop <= seq.num_planned:
            return
        while stop > seq.kv.writable_until:
            if not self.kv.extend(seq, step):
                if self.leaving or self.living[-1].is_in_flight:
                    return
                self.leave(self.living[-1], ends=False)
                if seq not in self.living:
                    return
        step.add_chunk(seq, seq.num_planned, stop - seq.num_planned, ())
        seq.num_planned = stop

    @precondition(lambda self: self.steps)
    @rule()
    def commit(self) -> None:
        step = self.steps.popleft()
        self.device.run(self.device.launched.popleft())
        self.kv.committed(step)
        for chunk, seq in zip(step.chunks, step.sequences, strict=True):
            seq.num_computed = chunk.start + chunk.num_tokens
            if seq.num_computed == len(seq.tokens):
                seq.tokens.append(sum(seq.tokens) % 2)
        for seq in dict.fromkeys([*step.sequences, *step.arrivals]):
            if seq.num_computed >= seq.kv.next_publish and seq.kv.blocks:
                self.kv.publish(seq)
            self.note_names(seq)
            if seq in self.living and len(seq.tokens) > seq.num_prompt + 6:
                self.leave(seq, ends=True)
            self.settle(seq)

    @precondition(lambda self: self.steps)
    @rule(num_run=st.integers(0, 6), copies_fail=st.sampled_from([False] * 19 + [True]))
    def roll_back(self, num_run: int, copies_fail: bool) -> None:
        """The device has no memory for a step, or fails in the middle of its copies."""
        self.device.run(self.device.launched[0][:num_run])
        self.device.launched.clear()
        for step in self.steps:
            self.kv.rolled_back(step)
        for seq, is_whole in roll_back(self.steps).items():
            if seq in self.leaving:
                self.settle(seq)
            elif not is_whole:
                self.leave(seq, ends=False)
        if copies_fail:
            self.kv.tiers.host.give_up()

    @precondition(lambda self: self.living or self.waiting)
    @rule(data=st.data(), ends=st.booleans())
    def go(self, data: st.DataObject, ends: bool) -> None:
        """A sequence is preempted or ends, wherever it is."""
        seq = data.draw(st.sampled_from(self.living + self.waiting))
        if seq in self.living:
            self.leave(seq, ends)
        elif ends:
            self.waiting.remove(seq)
            self.kv.discard(seq)

    def leave(self, seq: Sequence, ends: bool) -> None:
        self.living.remove(seq)
        seq.move(Status.DONE if ends else Status.PREEMPTED)
        self.leaving[seq] = ends
        if ends:
            self.kv.leave(seq)
            self.kv.exclude_from_cache(seq)
        self.settle(seq)

    def settle(self, seq: Sequence) -> None:
        if seq.is_in_flight or seq not in self.leaving:
            return
        ends = self.leaving.pop(seq)
        if not ends:
            self.kv.suspend(seq)
            self.waiting.append(seq)
        self.kv.free(seq)

    # -- the transport -----------------------------------------------------------------------------------------------

    def start_transfers(self) -> None:
        self.transfers += self.kv.tiers.start(0.0)

    @rule()
    def transfer(self) -> None:
        """Everything goes well for a while."""
        self.start_transfers()
        while self.transfers:
            self.report_one(self.transfers[0], is_good=True)
            self.start_transfers()

    @rule(data=st.data(), is_good=st.booleans())
    def report(self, data: st.DataObject, is_good: bool) -> None:
        """A transfer ends, in any order and at any time; a failed one has written garbage."""
        self.start_transfers()
        if not self.transfers:
            return
        self.report_one(data.draw(st.sampled_from(self.transfers)), is_good)

    def report_one(self, transfer: Transfer, is_good: bool) -> None:
        self.transfers.remove(transfer)
        self.device.catch_up()
        host, slot = ("host", transfer.host_block), ("store", transfer.slot)
        source, target = (host, slot) if transfer.kind is TransferKind.SAVE else (slot, host)
        if is_good:
            self.check_content(transfer.name, source)
            self.device.run([Op(source, target)])
        else:
            self.device.blocks[target] = dict.fromkeys(range(SIZE), ("garbage", ()))
        self.kv.tiers.finish([(transfer, is_good)])
        self.reported.append(transfer)

    @precondition(lambda self: self.reported)
    @rule(data=st.data(), is_good=st.booleans())
    def report_again(self, data: st.DataObject, is_good: bool) -> None:
        assert not self.kv.tiers.finish([(data.draw(st.sampled_from(self.reported)), is_good)])

    @precondition(lambda self: not self.steps)
    @rule(fails=st.booleans())
    def spill(self, fails: bool) -> None:
        pairs = self.kv.tiers.spill()
        if fails:
            self.kv.tiers.unstage()
        else:
            self.device.run([Op(("pool", block), ("host", host)) for block, host in pairs])
            self.start_transfers()

    @precondition(lambda self: not self.imports)
    @rule(prompt=PROMPTS, reserve=st.integers(0, 2))
    def begin_import(self, prompt: list[int], reserve: int) -> None:
        names = self.kv.first_names(request("i", tuple(prompt)))
        if names[0]:
            places = places_at(self.kv.config, len(prompt) // SIZE)
            imported = self.kv.imports.begin(names, prompt, places, reserve=reserve)
            assert imported is not None
            self.imports.append(imported)

    @precondition(lambda self: self.imports)
    @rule(data=st.data(), is_good=st.booleans())
    def end_import(self, data: st.DataObject, is_good: bool) -> None:
        """Its bytes arrive, between steps; or garbage does."""
        imported = data.draw(st.sampled_from(self.imports))
        self.imports.remove(imported)
        self.device.catch_up()
        for place, block in zip(imported.places, imported.blocks, strict=True):
            for at in range(SIZE):
                content = "", tuple(imported.tokens[: place.at * SIZE + at + 1])
                self.device.blocks.setdefault(("pool", block), {})[at] = content if is_good else ("garbage", ())
        (self.kv.imports.finish if is_good else self.kv.imports.cancel)(imported)
        for index, name in enumerate(imported.chain[1:]):
            self.names[name] = "", tuple(imported.tokens[: (index + 1) * SIZE])

    # -- what holds at all times -------------------------------------------------------------------------------------

    def check_content(self, name: bytes, block: tuple[str, int]) -> None:
        salt, tokens = self.names[name]
        first = len(tokens) - SIZE
        expected = {at: (salt, tokens[: first + at + 1]) for at in range(SIZE)}
        assert self.device.read(block) == expected, f"{block} has not what its name says"

    @invariant()
    def memory_is_right(self) -> None:
        for seq in self.living:
            if not seq.is_in_flight:
                for at in range(seq.num_computed):
                    cells = self.device.read(("pool", seq.kv.blocks[at // SIZE]))
                    assert cells.get(at % SIZE) == history(seq, at + 1), f"position {at} of {seq.seq_id}"
        if not self.steps:
            for name, block in self.kv._cache._block_of.items():
                self.check_content(name, ("pool", block))
            host = self.kv.tiers.host
            for name, block in host._block_of.items():
                if host.has_content(name, block):
                    self.check_content(name, ("host", block))

    @invariant()
    def books_agree(self) -> None:
        check_kv(self.kv, [*self.living, *self.leaving], self.steps)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for seq in [*self.living]:
            self.leave(seq, ends=True)
        for seq in self.waiting:
            self.kv.discard(seq)
        while self.steps:
            self.commit()
        for seq in self.waiting:
            self.kv.discard(seq)
        for imported in self.imports:
            self.kv.imports.cancel(imported)
        self.start_transfers()
        self.kv.tiers.finish([(transfer, False) for transfer in self.transfers])
        pools: list[Any] = [self.kv.pool, self.kv.tiers.host.pool, *(s.pool for s in self.kv.tiers.stores.values())]
        assert [pool.num_held for pool in pools] == [0] * len(pools), "something is held when nothing lives"


TestKVFaults = FaultMachine.TestCase
TestKVFaults.settings = settings(max_examples=200, stateful_step_count=100)
