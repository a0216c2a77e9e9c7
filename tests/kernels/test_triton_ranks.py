"""Graphs on several ranks: each captures and launches the same, and one that fails ends all.

Two ranks are threads here, of which one runs at a time, over a made-up CUDA: a graph is its computation, and a collective
is refused where the other rank makes another one, or is not in the same graph. It never ran on two GPUs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.errors import DeviceLostError
from engine.ranks.executor import Executor
from engine.ranks.worker import Worker
from engine.runtime.attention.table import load_backend
from engine.runtime.execution import decode_graphs
from engine.runtime.execution.decode_graphs import DecodeGraphs, Outputs, graph_sizes, long_graph_sizes
from engine.runtime.execution.packet import Kind, encode
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.native.functions import GroupError
from engine.runtime.parallel.ring import RingReader, RingWriter
from engine.runtime.pool.kv_cache import KVCache
from engine.settings.engine_config import EngineConfig
from tests.cpu import ranks
from tests.cpu.model_driver import request, serve, settings
from tests.cpu.test_rank_processes import ring
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks of one CPU need Triton's interpreter"),
]
CPU = torch.device("cpu")
CONFIG = settings(max_num_seqs=3, max_model_len=16, num_blocks=12)
_place = threading.local()  # where this thread's rank is: "eager", or the graph that it captures or launches


class FakeCuda:
    """Graphs that are computed again by `replay`, at the addresses of their capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda, compute, launch = self, DecodeGraphs._compute, DecodeGraphs.launch
        self.captured: dict[int, list[tuple[int, int]]] = {0: [], 1: []}  # by rank, in order
        self.replayed: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

        class Graph:
            made: tuple[DecodeGraphs, int, int]
            outputs: Outputs

            def replay(self) -> None:
                graphs, size, context = self.made
                cuda.replayed[graphs._group.rank].append((size, context))
                with at(("replay", size, context)):
                    for old, new in zip(self.outputs, compute(graphs, size, context), strict=True):
                        old.copy_(new)

        def note(graphs: DecodeGraphs, size: int, context: int) -> Outputs:
            graph = getattr(_place, "graph", None)
            if graph is None:
                with at(("warm", size, context)):
                    return compute(graphs, size, context)
            cuda.captured[graphs._group.rank].append((size, context))
            graph.made = graphs, size, context
            with at(("capture", size, context)):
                graph.outputs = compute(graphs, size, context)
            return graph.outputs

        @contextmanager
        def record(graph: Graph, **_: object) -> Iterator[None]:
            _place.graph = graph
            try:
                yield
            finally:
                _place.graph = None

        @contextmanager
        def stream(_: object) -> Iterator[None]:
            yield

        class Stream:
            def wait_stream(self, other: object) -> None:
                pass

        class Torch:
            cuda = SimpleNamespace(
                is_available=lambda: True, graph_pool_handle=lambda: 0, CUDAGraph=Graph, graph=record, stream=stream,
                current_stream=Stream, Stream=Stream,
            )  # fmt: skip

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

        monkeypatch.setattr(decode_graphs, "torch", Torch())
        monkeypatch.setattr(decode_graphs, "_recording_stream", Stream)
        monkeypatch.setattr(DecodeGraphs, "_compute", note)
        monkeypatch.setattr(  # a runner on CUDA copies the results before the next launch, too
            DecodeGraphs, "launch", lambda graphs, rows: Outputs(*(each.clone() for each in launch(graphs, rows)))
        )


@contextmanager
def at(place: object) -> Iterator[None]:
    before, _place.name = getattr(_place, "name", "eager"), place
    try:
        yield
    finally:
        _place.name = before


class Meeting:
    """What two threads exchange; the one that holds the baton runs."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.barrier = threading.Barrier(2)
        self.brought: list[Any] = [None, None]

    def exchange(self, rank: int, name: str, x: Tensor) -> list[Tensor]:
        self.brought[rank] = name, getattr(_place, "name", "eager"), x.shape, x.clone()
        self.baton.release()
        try:
            self.barrier.wait(PATIENCE_S)
            (*ours, _), (*theirs, _) = self.brought
            parts = [each[-1] for each in self.brought]
            self.barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise GroupError("a rank is gone") from None
        finally:
            self.baton.acquire()
        assert ours == theirs, "the ranks are not in the same place"
        return parts


class ThreadGroup:
    """One of the two."""

    size, address = 2, None

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self._meeting = rank, meeting

    def all_reduce(self, x: Tensor) -> None:
        first, second = self._meeting.exchange(self.rank, "all_reduce", x)
        x.copy_(first + second)

    def gather(self, x: Tensor, out: Tensor | None) -> None:
        parts = self._meeting.exchange(self.rank, "gather", x)
        if out is not None:
            out.copy_(torch.cat(parts, 1)[:, : out.shape[1]])

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, "broadcast", x)[0])

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        pass


class PoliteReader:
    """A ring's reader that holds no baton while it waits."""

    def __init__(self, reader: RingReader, baton: threading.Lock) -> None:
        self._reader, self._baton, self.release = reader, baton, reader.release

    def receive(self) -> memoryview:
        self._baton.release()
        try:
            return self._reader.receive()
        finally:
            self._baton.acquire()


class Pair:
    """A runner of two ranks, the second of which is a thread."""

    def __init__(
        self, folder: Path, writer: RingWriter, reader: RingReader, config: SchedulerConfig, *, depth: int = 0
    ) -> None:
        self.meeting = Meeting()
        self.loss: BaseException | None = None
        self._load = lambda rank, group: (ranks.load(folder, group, load_format="dummy"), load_backend("triton", CPU))
        self._reader = PoliteReader(reader, self.meeting.baton)
        self.executor = self._executor(writer, shares_ids=depth > 0)
        self.thread = threading.Thread(target=self._work, daemon=True)  # where the first rank fails, it waits for ever
        self.meeting.baton.acquire()
        self.thread.start()
        model, backend = self._load(0, self.executor.group)
        pool = KVCache(model.states, backend, num_blocks=config.num_blocks, block_size=4, dtype=model.dtype, device=CPU)
        self.executor.configure(config)
        self.runner = ModelRunner(model, pool, config, CPU, None, self.executor)

    def _executor(self, writer: RingWriter, *, shares_ids: bool) -> Executor:
        executor = Executor.__new__(Executor)
        executor.group, executor.shares_ids, executor.size = ThreadGroup(self.meeting, 0), shares_ids, 2
        executor._ring, executor._said, executor._hears = writer, [{"here", "loaded"}], threading.Condition()
        executor._loss, executor._is_aborted, executor._watchers = None, False, []
        executor.on_loss = lambda _: None
        return executor

    def _work(self) -> None:
        with self.meeting.baton:
            try:
                worker = Worker.__new__(Worker)
                worker._group, worker._device, worker._dtype = ThreadGroup(self.meeting, 1), CPU, torch.float32
                worker._model, worker._backend = self._load(1, worker._group)
                worker._config, worker._cache, worker._graphs = EngineConfig(model=""), None, None
                worker.serve(self._reader)  # type: ignore[arg-type]
            except Exception as error:  # as a watcher hears it of a process
                self.loss = error
                self.executor._lose(DeviceLostError(f"rank 1: {error}"))

    def close(self) -> None:
        self.executor._ring.send(encode(Kind.CLOSE))
        self.meeting.baton.release()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


WISHES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 9.0}]
REQUESTS = [  # of tokens whose embeddings the second rank has
    request(f"r{at}", prompt, max_tokens=5, **wish)
    for at, (prompt, wish) in enumerate(zip([[7, 9, 43], [31], [8, 4, 6, 31, 7, 42]], WISHES, strict=True))
]


def test_both_ranks_capture_and_launch_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap the other rank knows ids only from the first: drawn in the graph, or again after it."""
    model = ranks.load(folder, ranks.SINGLE, load_format="dummy")
    expected = [serve(model, CONFIG, asked).ids for asked in (REQUESTS[:2], REQUESTS)]
    monkeypatch.setattr(decode_graphs, "_PLANNED_CONTEXT", 8)
    cuda = FakeCuda(monkeypatch)
    with ring(1 << 16) as (writer, [reader]):
        pair = Pair(folder, writer, reader, CONFIG, depth=1)
        pair.runner.capture(lambda _: None)
        served = [serve(model, CONFIG, asked, depth=1, runner=pair.runner).ids for asked in (REQUESTS[:2], REQUESTS)]
        pair.close()
    assert pair.loss is None
    assert served == expected
    assert cuda.captured[0] == cuda.captured[1]
    assert len(cuda.captured[0]) == len(graph_sizes(3)) + len(long_graph_sizes(3))
    assert cuda.replayed[0] == cuda.replayed[1]
    assert {context for _, context in cuda.replayed[0]} == {8, 16}
    assert {size for size, _ in cuda.replayed[0]} >= {3}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_capture_is_the_one_error(
    failing: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    compute = DecodeGraphs._compute

    def fail(graphs: DecodeGraphs, size: int, context: int) -> Outputs:
        if size == 2 and graphs._group.rank == failing:
            raise RuntimeError("no memory for a graph")
        return compute(graphs, size, context)

    monkeypatch.setattr(DecodeGraphs, "_compute", fail)
    with ring(1 << 16) as (writer, [reader]):
        pair = Pair(folder, writer, reader, CONFIG)
        with pytest.raises(RuntimeError) as caught:
            pair.runner.capture(lambda _: None)
        assert "no memory for a graph" in str(pair.executor.explain(caught.value))
        pair.executor.group.abort()  # as Executor.close kills the processes
        pair.close()
