"""Copies to a device that is late: on a made-up CUDA, a copy is made when something waits for it, or at the very end."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.rows import Rows
from engine.core.step import RowStart, plan_prompts
from engine.core.types import SamplingParams
from engine.runtime.attention.backend import Batch
from engine.runtime.execution.decode_graphs import DecodeInputs
from engine.runtime.pool.batch import BatchBuilder
from engine.runtime.pool.row_tables import RowTables
from engine.runtime.transfer import Staging, to_device

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
CONFIG = SchedulerConfig(num_blocks=40, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)


class LateDevice:
    """A queue of copies. Waiting for an event makes those that were queued before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.num_waits = 0
        device, zeros = self, torch.zeros

        class Event:
            def __init__(self) -> None:
                self.num_before = 0

            def record(self) -> None:
                self.num_before = device.num_queued

            def synchronize(self) -> None:
                late = self.num_before - device.num_done
                device.num_waits += late > 0
                for _ in range(late):
                    device.advance()

        class Pinned(torch.Tensor):
            """Host memory, whose copies to the device are late."""

            def to(self, target: torch.device, **_: object) -> torch.Tensor:  # type: ignore[override]
                plain = self.as_subclass(torch.Tensor)
                there = torch.full_like(plain, -7)
                device.add(lambda: there.copy_(plain))
                return there

        def make(*shape: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
            tensor = zeros(*shape, **options)  # type: ignore[call-overload]
            return tensor.as_subclass(Pinned) if pin_memory else tensor

        self.num_queued = self.num_done = 0
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "zeros", make)

    def add(self, task: Callable[[], object]) -> None:
        self.queue.append(task)
        self.num_queued += 1

    def advance(self) -> None:
        self.queue.popleft()()
        self.num_done += 1

    def finish(self) -> None:
        while self.queue:
            self.advance()


class Builder:
    """A BatchBuilder with tables, on a device."""

    def __init__(self, device: torch.device) -> None:
        self._tables = RowTables(CONFIG)
        self._batches = BatchBuilder(CONFIG, device, self._tables)

    def build(self, first: int) -> Batch:
        """Return the batch of two prompts of tokens that no other one has."""
        rows = [
            RowStart(
                slot, first + slot, 6, SamplingParams(max_tokens=1), 0, tuple(range(first + 10 * slot, first + 10 * slot + 6)),
                ((first + slot * 2, first + slot * 2 + 1),),
            )
            for slot in range(2)
        ]  # fmt: skip
        plan = plan_prompts(rows, [6, 6])
        self._tables.follow(plan)
        return self._batches.build(Rows().follow(plan), torch.zeros(5, dtype=torch.int64))


def test_as_many_batches_as_a_draft_model_builds_arrive_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model builds one batch for each draft, all within a step, over the same two turns of memory."""
    builder = Builder(torch.device("cpu"))
    expected = []
    for first in range(0, 25, 4):
        batch = builder.build(first)
        expected.append([x.clone() for x in (batch.ids, batch.positions, batch.kv_slots, batch.block_tables)])
    device = LateDevice(monkeypatch)
    builder = Builder(CUDA)
    batches = [builder.build(first) for first in range(0, 25, 4)]
    device.finish()
    for batch, wanted in zip(batches, expected, strict=True):
        found = (batch.ids, batch.positions, batch.kv_slots, batch.block_tables)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_two_batches_wait_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as overlapping steps have under way."""
    device = LateDevice(monkeypatch)
    builder = Builder(CUDA)
    for first in (0, 4):
        builder.build(first)
    assert device.num_waits == 0
    builder.build(8)
    assert device.num_waits > 0


def test_what_a_graph_reads_is_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    device, copy = LateDevice(monkeypatch), torch.Tensor.copy_

    def copy_later(target: torch.Tensor, source: torch.Tensor, **_: object) -> None:
        device.add(lambda: copy(target, source.as_subclass(torch.Tensor)))

    targets = [torch.zeros(3, dtype=torch.int64) for _ in range(3)]
    staging = Staging((3,), torch.int64, CUDA)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    for value, target in enumerate(targets, start=1):
        staging.begin()[:] = value
        staging.send_to(target)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    device.finish()
    assert [target.tolist() for target in targets] == [[1] * 3, [2] * 3, [3] * 3]
    assert isinstance(next(DecodeInputs(CONFIG, torch.device("cpu"), RowTables(CONFIG))._hosts), Staging)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_numbers_arrive_in_their_type(dtype: torch.dtype) -> None:
    found = to_device([1, 2, 3], dtype, torch.device("cpu"))
    assert found.dtype == dtype
    assert found.tolist() == [1, 2, 3]
    assert to_device(np.array([[1, 2]], np.int32), torch.int32, torch.device("cpu")).shape == (1, 2)
    assert to_device([], dtype, torch.device("cpu")).shape == (0,)


# Modules that send numbers themselves: before steps, on CPUs alone, or out of pinned memory of their own.
OTHERS = {
    "cuda/token_counts.py", "stores/pinned.py", "execution/model_step.py", "models/decoder.py", "models/tower_ops.py",
    "layers/mamba.py", "layers/altup.py", "layers/rope_config.py", "models/transformers_adapter.py", "transfer.py", "parallel/group.py", "weights/stored/packed.py",
}  # fmt: skip


def test_steps_send_numbers_by_one_way() -> None:
    """torch.tensor(..., device=...) and .to() from pageable memory wait for the device."""
    runtime = ROOT / "engine" / "runtime"
    found = set()
    for path in sorted(runtime.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                keywords = {keyword.arg for keyword in node.keywords}
                makes = ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
                if makes or keywords & {"pin_memory", "non_blocking"}:
                    found.add(path.relative_to(runtime).as_posix())
    assert found <= OTHERS
