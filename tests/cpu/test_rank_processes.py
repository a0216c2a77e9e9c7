"""Ranks: what the first one sends arrives as it was, and a lost one is the engine's end. test_ranks.py tests the model."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, DeviceLostError, DeviceMemoryError, QuireError
from engine.core.rows import SequenceSlice
from engine.core.step import StepPlan
from engine.core.types import FinishReason, TokenEvent
from engine.loop import Engine
from engine.ranks import executor, worker
from engine.runtime.execution.packet import Kind, RankMessage, Step, decode, encode
from engine.runtime.native.functions import GroupError
from engine.runtime.native.library import native
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.parallel.ring import RingError, RingReader, RingWriter, make_memory
from engine.runtime.pool.batch import BatchBuilder, DecodeRows, Packet, PacketBuffers
from engine.runtime.pool.row_tables import RowTables
from engine.settings.engine_config import EngineConfig
from loadtest.fake_runner import FakeStep
from tests.cpu import ranks
from tests.cpu.test_engine_build import build, folder  # noqa: F401 - a fixture
from tests.cpu.test_models_families import CASES, write_tiny
from tests.free_drafts import FREE_DRAFTS
from tests.patience import PATIENCE_S, eventually
from tests.pure.driver import request
from tests.pure.test_scheduler_properties import SchedulerMachine

CPU = torch.device("cpu")


@contextmanager
def ring(
    num_bytes: int = 4096, num_readers: int = 1, timeout_s: float = PATIENCE_S
) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    memory = make_memory(num_bytes)
    wakers = [os.eventfd(0) for _ in range(num_readers)]
    readers = [RingReader(memory, waker, place, spins=bool(place)) for place, waker in enumerate(wakers)]
    yield RingWriter(memory, wakers, timeout_s=timeout_s), readers
    for each in (memory, *wakers):
        os.close(each)


# -- the ring ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3)), max_size=60))
def test_every_reader_reads_every_message_whole_and_in_order(messages: list[tuple[int, int]]) -> None:
    """Readers may be behind by some messages, the second by one less."""
    with ring(num_readers=2) as (writer, readers):
        waiting: list[list[bytes]] = [[], []]

        def read(place: int) -> None:
            assert bytes(readers[place].receive()) == waiting[place].pop(0)
            readers[place].release()

        for number, (size, num_behind) in enumerate(messages):
            text = bytes((number + at) % 256 for at in range(size * 8))
            for place in range(2):
                while len(waiting[place]) > max(num_behind - place, 0):
                    read(place)
            writer.send([np.frombuffer(text[:8], np.uint8), np.frombuffer(text[8:], np.uint8)])
            for each in waiting:
                each.append(text)
        for place in range(2):
            while waiting[place]:
                read(place)


def test_a_reader_sleeps_until_a_message_comes() -> None:
    with ring() as (writer, [reader]):
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(bytes(reader.receive())))
        thread.start()
        writer.send([np.arange(3)])
        thread.join()
    assert got == [np.arange(3).tobytes()]


def test_a_ring_without_room_is_an_error() -> None:
    with ring(timeout_s=0.01) as (writer, _):
        with pytest.raises(RingError, match="larger than the ring"):
            writer.send([np.zeros(4096, np.uint8)])
        for _ in range(4):
            writer.send([np.zeros(1000, np.uint8)])
        with pytest.raises(RingError, match="read no message"):
            writer.send([np.zeros(1000, np.uint8)])


# -- packets -----------------------------------------------------------------------------------------------------------


def passed(message: RankMessage) -> Any:
    """Return what a reader makes of a message."""
    return decode(memoryview(b"".join(part.tobytes() for part in encode(message))))


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), pairs, st.booleans(), st.booleans(), st.data())
def test_a_packet_arrives_as_it_was(
    lens: list[int], scored: Any, keeps_all: bool, is_shared: bool, data: st.DataObject
) -> None:
    num_tokens, num_slices = sum(lens), len(lens)
    starts = np.cumsum([0, *lens])
    contexts = [each + 7 for each in lens]
    packet = Packet(
        longs=np.arange(3 * num_tokens + num_slices),
        ints=np.concatenate([starts, contexts]).astype(np.int32),
        slots=np.arange(num_slices),
        changes=np.arange(2 * data.draw(st.integers(0, 4)), dtype=np.int32).reshape(-1, 2),
        num_slices=num_slices,
        num_tokens=num_tokens,
        num_samples=num_slices,
        scored=scored,
        keeps_all=keeps_all,
        query_lens=lens,
        contexts=contexts,
    )
    found = passed(Step(packet, is_shared))
    assert found.is_shared is is_shared
    for one, other in zip(found.work, packet, strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.integers(1, 9), st.integers(0, 4), st.booleans())
def test_a_captured_step_arrives_as_it_was(num_rows: int, num_changes: int, is_shared: bool) -> None:
    changes = np.arange(2 * num_changes, dtype=np.int32).reshape(-1, 2)
    rows = DecodeRows(np.arange(11 * num_rows).reshape(11, -1), changes)
    found = passed(Step(rows, is_shared))
    assert found.is_shared is is_shared
    for one, other in zip(found.work, rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_messages_arrive_as_they_were() -> None:
    sizes = SchedulerConfig(num_blocks=9, block_size=4, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=8)
    for message in (
        sizes,
        replace(sizes, windows=(5, 1 << 30)),
        replace(sizes, state_blocks=2, num_speculative_tokens=3),
        [(1, 2), (3, 4)],
        *(kind for kind in Kind if kind >= Kind.CAPTURE),
    ):
        assert passed(message) == message


class RankedMachine(SchedulerMachine):
    """Any history of the scheduler, with a second rank that knows only what a ring has brought it."""

    @initialize(
        depth=st.integers(0, 2),
        num_blocks=st.integers(10, 24),
        windows=st.sampled_from([(), (5,), (2, 9)]),
        budget=st.integers(6, 30),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "fair"]),
    )
    def start(  # type: ignore[override]
        self, depth: int, budget: int, caching: bool, windows: tuple[int, ...], num_blocks: int, **changes: Any
    ) -> None:
        sizes = {"num_host_blocks": 0, "host_caching": False, "num_disk_blocks": 0, "num_speculative_tokens": 0}
        sizes |= {"windows": windows, "num_blocks": num_blocks * (1 + len(windows))}
        times = {"target_itl_s": None, "target_ttft_s": None}
        super().start(depth, budget, caching, cost=None, **sizes, **times, **changes)
        sizes_of = self.driver.scheduler.config
        self.tables, self.theirs = RowTables(sizes_of), RowTables(sizes_of)
        self.builder = BatchBuilder(sizes_of, CPU, self.tables)
        self.buffers = PacketBuffers(sizes_of, CPU, self.theirs)
        self.last_ids = torch.zeros(sizes_of.max_num_seqs + 1, dtype=torch.int64)
        self.pages = np.full((sizes_of.num_blocks, sizes_of.block_size), -1)
        self.held = ring(1 << 16)
        self.writer, [self.reader] = self.held.__enter__()
        self.run_first, self.driver.runner.run = self.driver.runner.run, self.run_both  # type: ignore[method-assign]

    def run_both(self, plan: StepPlan) -> FakeStep:
        _, slices = self.driver.written.get(plan.step_id, (b"", []))
        changes, first = self.tables.follow(plan), self.run_first(plan)
        if plan.copies:
            self.writer.send(encode(plan.copies))
            self.copy(decode(self.reader.receive()))
            self.reader.release()
        if slices:
            self.writer.send(encode(Step(self.builder.prepare(slices, changes), is_shared=False)))
            self.compute(decode(self.reader.receive()), slices)
            self.reader.release()
        slots = [sample.slot for piece in slices for sample in piece.samples]
        self.last_ids[slots] = torch.tensor(first._result.token_ids, dtype=torch.int64)
        return first

    def copy(self, copies: Any) -> None:
        for source, destination in copies:
            self.pages[destination] = self.pages[source]

    def compute(self, step: Any, slices: list[SequenceSlice]) -> None:
        """Store and read back as FakeRunner does; its memory must say the same."""
        packet = step.work
        batch = self.buffers.to_batch(self.buffers.fill(packet), self.last_ids)
        self.pages.reshape(-1)[batch.kv_slots.numpy()] = batch.ids.numpy()
        for other in batch.others:
            self.pages.reshape(-1)[other.kv_slots.numpy()] = batch.ids.numpy()
        theirs = self.driver.runner._pages
        windows = (1 << 30, *self.driver.scheduler.config.windows)
        for piece, context in zip(slices, packet.contexts, strict=True):
            tables = self.theirs.rows[:, piece.slot]
            for window, table in zip(windows, tables, strict=True):
                first = max(context - piece.num_tokens - window + 1, 0)
                at, place = np.divmod(np.arange(first, context), self.pages.shape[1])
                expected = np.array(theirs, object)[tables[0][at], place]
                np.testing.assert_array_equal(self.pages[table[at], place], expected.astype(int))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "held"):
            self.held.__exit__(None, None, None)


TestRankedPaging = RankedMachine.TestCase
TestRankedPaging.settings = settings(max_examples=20, stateful_step_count=25)


# -- processes ---------------------------------------------------------------------------------------------------------


class Asked:
    """An engine of two ranks, and what it said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[TokenEvent] = []
        self.has_ended = threading.Event()
        engine.start(self.events.extend, self.has_ended.set)

    def ask(self, max_tokens: int, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        self.engine.submit(request("r", prompt, max_tokens=max_tokens, eos_token_ids=frozenset(), temperature=0.0))

    @property
    def end(self) -> TokenEvent | None:
        return next((event for event in self.events if event.finish_reason is not None), None)


def workers(parent: int | None = None) -> list[int]:
    """Return the processes of other ranks that a process has started, by default this one."""
    wanted = parent or os.getpid()
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_child(entry, wanted)]


def _is_child(entry: Path, parent: int) -> bool:
    try:
        is_worker = b"engine.ranks.worker" in (entry / "cmdline").read_bytes()
        return is_worker and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def tokens(engine: Engine, prompt: tuple[int, ...] = (1, 2, 3)) -> list[int]:
    asked = Asked(engine)
    asked.ask(12, prompt)
    eventually(lambda: asked.end is not None)
    engine.stop(0)
    return [token for event in asked.events for token in event.token_ids]


def test_two_ranks_say_what_one_says(folder: str) -> None:  # noqa: F811 - the fixture
    through_gloo = tokens(build(folder, tensor_parallel_size=2, cpu_kernels="off"))
    alone = tokens(build(folder))
    assert len(alone) == 12
    assert through_gloo == alone
    assert tokens(build(folder, tensor_parallel_size=2, async_scheduling=True)) == alone
    assert workers() == []


def test_ranks_keep_the_inputs_of_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with recurrent state needs them in the next step; each rank has memory for its part."""
    monkeypatch.setattr("engine.startup.speculation.measure_draft_costs", lambda *_, **__: FREE_DRAFTS)
    write_tiny(CASES["qwen3_5"], tmp_path)
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    prompt = (5, 6, 7, 8, 9) * 6
    alone = tokens(build(str(tmp_path)), prompt)
    engine = build(str(tmp_path), tensor_parallel_size=2, **drafts)
    assert tokens(engine, prompt) == alone
    assert engine.stats.spec_draft_tokens > 0


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def check_lost(asked: Asked, sentence: str) -> None:
    """The engine ends for this reason, answers no more, and has no ranks."""
    asked.has_ended.wait(PATIENCE_S)
    assert sentence in str(asked.engine.health().error)
    with pytest.raises(QuireError):
        asked.ask(1)
    assert workers() == []
    runner: Any = asked.engine._runner
    assert hasattr(runner._runner, "_model"), "a GPU may wait for the lost rank, so nothing is released"


@pytest.mark.parametrize(("loses", "sentence"), [(kill, "signal 9"), (stop, "did not take part")])
def test_a_lost_rank_is_the_engines_end(folder: str, loses: Callable[[int], None], sentence: str) -> None:  # noqa: F811
    engine = build(folder, tensor_parallel_size=2)
    group: Any = engine._runner._close.__self__.group  # type: ignore[attr-defined]
    if loses is stop:
        group._args.timeout_ms = 500
    asked = Asked(engine)
    [worker] = workers()
    asked.ask(500)
    eventually(lambda: bool(asked.events))
    loses(worker)
    check_lost(asked, sentence)
    assert asked.end is not None
    assert asked.end.finish_reason is FinishReason.ERROR


def test_a_fault_of_another_rank_is_the_starts_fault(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    spawn = executor._spawn

    def spawn_wrong(start: Any) -> Any:
        return spawn(start._replace(config={**start.config, "max_model_len": 100_000}))

    monkeypatch.setattr(executor, "_spawn", spawn_wrong)
    with pytest.raises(ConfigError, match="--max-model-len is 100000"):
        build(folder, tensor_parallel_size=2)
    assert workers() == []


def test_ranks_end_with_their_parent(folder: str) -> None:  # noqa: F811
    """Also one that is stopped: the kernel kills it."""
    code = (
        "import sys, time; from tests.cpu.test_engine_build import build; from tests.cpu.test_rank_processes import workers;"
        f"build({folder!r}, tensor_parallel_size=2); print(*workers(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        stop(worker)
        parent.kill()
    eventually(
        lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]
    )


def test_ranks_outlive_the_thread_that_built_the_engine_get_no_secrets_may_print_and_are_missed_when_idle(
    folder: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parent's end is its thread's, to the kernel. What a library prints when it is imported is no message."""
    (tmp_path / "sitecustomize.py").write_text("print('WARNING: an old processor'); print(5)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    with ThreadPoolExecutor(1) as aside:
        engine = aside.submit(build, folder, tensor_parallel_size=2).result()
    [process] = workers()
    assert b"secret" not in Path(f"/proc/{process}/environ").read_bytes()
    asked = Asked(engine)
    asked.ask(12)
    eventually(lambda: asked.end is not None)
    assert sum(len(event.token_ids) for event in asked.events) == 12
    kill(process)
    check_lost(asked, "signal 9")


def test_a_rank_that_cannot_start_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    before = set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(sys, "executable", "/absent/python")
    with pytest.raises(DeviceLostError, match="rank 1 of the model could not be started: No such file"):
        build(folder, tensor_parallel_size=2)
    gc.collect()  # the error's traceback holds the ring
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_a_rank_that_ends_before_it_is_there_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """As where a module cannot be imported."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DeviceLostError, match=r"rank 1 of the model ended \(status 1\)"):
        build(folder, tensor_parallel_size=2)


def test_a_rank_waits_for_the_others_before_it_opens_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience of the group is for a rank that is lost, not for one that imports its modules slowly."""
    done: list[str] = []

    class MetError(Exception):
        pass

    def sleep(_: float) -> None:
        done.append("waits")
        (tmp_path / "here").mkdir()

    def open_group(*_: object, **__: object) -> None:
        raise MetError

    for name in ("choose_kernels", "native"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    monkeypatch.setattr(worker, "_say", lambda **facts: done.extend(facts))
    monkeypatch.setattr(worker, "open_group", open_group)
    monkeypatch.setattr(worker.time, "sleep", sleep)
    start = worker.Start({"model": "m", "device": "cpu"}, 1, 2, str(tmp_path / "here"), 0, 0, False, 1, 1.0, 1)
    with pytest.raises(MetError):
        worker.Worker(start)
    assert done == ["here", "waits"]


@pytest.mark.parametrize(("numa", "stays"), [("distribute", True), ("numactl", False)])
def test_ranks_stay_on_their_nodes_before_they_load(
    numa: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the memory of their weights is there, too."""
    asked: list[tuple[int, ...]] = []

    class LoadsError(Exception):
        pass

    def load_model(*_: object) -> None:
        raise LoadsError

    for module in (worker, executor):
        monkeypatch.setattr(module, "native", lambda: None)
        monkeypatch.setattr(module, "open_group", lambda *_, **__: SINGLE)
        monkeypatch.setattr(module, "stay_on_node", lambda *place: asked.append(place))
    for name in ("choose_kernels", "resolve_dtype", "_say"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    monkeypatch.setattr(worker, "load_model", load_model)
    start = worker.Start({"model": "m", "device": "cpu", "numa": numa}, 1, 2, str(tmp_path), 0, 0, False, 1, 1.0, 1)
    with pytest.raises(LoadsError):
        worker.Worker(start)
    assert asked == [(1, 2)] * stays
    says = """import signal; print('{"here": ""}', flush=True); signal.pause()"""
    process = subprocess.Popen([sys.executable, "-c", says], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(executor, "_spawn", lambda _: process)
    ranks = executor.Executor(EngineConfig(model="", tensor_parallel_size=2, numa=numa), 1)
    ranks.meet(torch.device("cpu"))
    process.kill()
    ranks.close()
    assert asked == [(1, 2), (0, 2)] * stays


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_asks_for_nothing_on_the_first_ranks_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does would open a context there, which takes half a gigabyte."""
    current, asked, opened = [0], list[int](), list[torch.device]()

    def open_group(_path: Path, _rank: int, _size: int, device: torch.device, **_: object) -> None:
        opened.append(device)
        raise GroupError("enough")

    for call, found in (
        ("is_available", lambda: True),
        ("set_device", current.append),
        ("current_device", lambda: current[-1]),
        ("set_per_process_memory_fraction", lambda _: asked.append(current[-1])),
    ):
        monkeypatch.setattr(torch.cuda, call, found)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # not to be left behind
    for call in ("choose_kernels", "native", "_say"):
        monkeypatch.setattr(worker, call, lambda *_, **__: None)
    monkeypatch.setattr(worker, "open_group", open_group)
    start = worker.Start({"model": "m", "device": name}, 1, 2, str(tmp_path), 0, 0, False, 1, 1.0, 1)
    with pytest.raises(GroupError):
        worker.Worker(start)
    assert (asked, opened) == ([1], [torch.device("cuda", 1)])


def test_an_interrupted_start_ends_the_ranks(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.startup.build.load_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(folder, tensor_parallel_size=2)
    assert workers() == []


@pytest.mark.parametrize(
    "changes",
    [{"swap_space": 1.0}, {"kv_offload_gib": 1.0}, {"max_loras": 2, "allow_runtime_lora_updating": True}],
)
def test_what_works_on_one_device_alone_is_refused(folder: str, changes: dict[str, object]) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 2"):
        build(folder, tensor_parallel_size=2, **changes)


class Event:
    """A GPU's event that is reached after some looks, or never."""

    def __init__(self, num_looks: float) -> None:
        self.num_looks = num_looks

    def query(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0


def test_a_wait_for_a_gpu_ends_when_a_rank_is_lost_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else ends it: a collective in a CUDA graph has no limit of time."""
    first = executor.Executor.__new__(executor.Executor)
    first._is_aborted, first._watchers, first._loss = False, [], None
    first.await_event(Event(3))
    monkeypatch.setattr(executor, "PATIENCE_S", 0.0)
    with pytest.raises(GroupError, match="did not take part"):
        first.await_event(Event(float("inf")))
    first._is_aborted = True
    with pytest.raises(GroupError):  # it is reached, but the sums are not made
        first.await_event(Event(0))
    assert isinstance(first.explain(DeviceMemoryError("full")), DeviceLostError), "the others have begun the step"
    assert str(first.explain(KeyError("other"))) == "'other'"


def test_the_first_rank_learns_which_gpu_has_least_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the other one keep to its share of memory. Two threads stand for the ranks, over gloo."""
    held: list[float] = []
    monkeypatch.setattr(worker, "free_share", lambda device, share: int(share * 100))
    monkeypatch.setattr(worker, "hold_to_share", lambda device, share: held.append(share))
    first, other = executor.Executor.__new__(executor.Executor), worker.Worker.__new__(worker.Worker)
    other._config, other._device = EngineConfig(model="", gpu_memory_utilization=0.5), CPU
    first._said, first._hears, first._loss, first._device = [{"loaded"}], threading.Condition(), None, CPU
    first._is_aborted = False
    with ring() as (first._ring, [reader]), ThreadPoolExecutor(1) as thread:

        def serve() -> None:
            other._group = ranks.open_kind("gloo", 1, tmp_path, 2, timeout_s=PATIENCE_S)
            other.serve(reader)

        served = thread.submit(serve)
        first.group = ranks.open_kind("gloo", 0, tmp_path, 2, timeout_s=PATIENCE_S)
        assert first.least_room(70) == 50
        assert first.least_room(30) == 30
        first.hold_to_share()
        first._ring.send(encode(Kind.CLOSE))
        served.result(PATIENCE_S)
    assert held == [0.5]


def test_all_ranks_have_the_first_ones_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each would choose: sums must have one order."""
    starts: list[worker.Start] = []

    def spawn(start: worker.Start) -> subprocess.Popen[str]:
        starts.append(start)
        return subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(executor, "_spawn", spawn)
    executor.Executor(EngineConfig(model="", tensor_parallel_size=2), 1).close()
    library = native()
    assert starts[0].config.get("cpu_kernels") == (None if library is None else library.isa.name.lower())


def test_a_rank_that_misses_another_while_it_loads_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a rank says so and ends, without an error of its own."""
    says = """print('{"here": ""}'); print('{"lost": "no answer"}')"""

    def spawn(_: object) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", says], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(executor, "_spawn", spawn)
    ranks = executor.Executor(EngineConfig(model="", tensor_parallel_size=2), 1)
    with pytest.raises(DeviceLostError, match="missed another"):
        ranks.least_room(1)
    ranks.close()


class LateStore(dist.Store):  # type: ignore[misc, name-defined] # torch has it
    """A store that is read once an event is set, or after a while."""

    def __init__(self, store: Any, event: threading.Event) -> None:
        super().__init__()
        self.store, self.event = store, event

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.event.wait(0.1)
        found: bytes = self.store.get(key)
        return found

    def wait(self, keys: list[str], *limit: Any) -> None:
        self.event.wait(0.1)
        self.store.wait(keys, *limit)


@pytest.mark.parametrize("attempt", range(5))  # gloo's choice of who connects to whom differs from one to the next
def test_a_group_is_open_once_all_ranks_have_read_its_folder(
    attempt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank removes the folder then."""
    make, has_left, place = dist.FileStore, threading.Event(), tmp_path / str(attempt)  # type: ignore[attr-defined] # torch has it
    rank, stores = threading.local(), []  # a store that ends makes its file again, perhaps while the folder is removed

    def meet(number: int) -> Group:
        rank.number = number
        group = ranks.open_kind("gloo", number, place, 2, timeout_s=PATIENCE_S)
        if number == 0:
            shutil.rmtree(place)
            has_left.set()
        return group

    def store(path: str, size: int) -> Any:
        stores.append(make(path, size) if rank.number == 0 else LateStore(make(path, size), has_left))
        return stores[-1]

    place.mkdir()
    monkeypatch.setattr(dist, "FileStore", store)
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(meet, (0, 1)))
    for group in groups:
        group.close()
