"""Sums over processes: shared memory against gloo, processes that stop or die, and the calls that NCCL gets."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.errors import ConfigError
from engine.runtime.native.functions import GroupError
from engine.runtime.parallel import cpu_groups as groups
from engine.runtime.parallel import nccl, ring
from tests.cpu import ranks
from tests.forked import CONTEXT
from tests.patience import PATIENCE_S


@contextmanager
def workers(target: Any, folder: Path, size: int, *args: Any) -> Iterator[list[Any]]:
    """Processes of all ranks but 0, which is this one."""
    running = [CONTEXT.Process(target=target, args=(rank, folder, size, *args)) for rank in range(1, size)]
    for worker in running:
        worker.start()
    try:
        yield running
    finally:
        for worker in running:
            worker.kill()
            worker.join()


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_says_what_gloo_says(size: int, tmp_path: Path) -> None:
    with workers(ranks.exchange, tmp_path, size) as running:
        ranks.exchange(0, tmp_path, size)
        for worker in running:
            worker.join(PATIENCE_S)
            assert worker.exitcode == 0


def sum_often(group: groups.Group) -> None:
    """More sums than a signalled process has begun."""
    for _ in range(1000):
        group.all_reduce(torch.ones(8))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_rank_that_does_not_take_part_is_an_error(kind: str, sent: signal.Signals, tmp_path: Path) -> None:
    with workers(ranks.sum_for_ever, tmp_path, 2, kind) as (worker,):
        group = ranks.open_kind(kind, 0, tmp_path, 2, timeout_s=1)
        x = torch.ones(8)
        group.all_reduce(x)
        assert x.tolist() == [2.0] * 8
        assert worker.pid is not None
        os.kill(worker.pid, sent)
        with pytest.raises(GroupError):
            sum_often(group)
        with pytest.raises(GroupError):
            group.all_reduce(x)


def test_a_pause_of_all_ranks_is_no_loss(tmp_path: Path) -> None:
    """One that goes on a little before the others finds its patience as it was."""
    with workers(ranks.sum_once, tmp_path, 2, 2.0) as (worker,):
        group, x = ranks.open_kind("shared", 0, tmp_path, 2, timeout_s=PATIENCE_S), torch.ones(8)
        assert worker.pid is not None
        time.sleep(0.2)  # it waits for this rank
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(2.2)
        os.kill(worker.pid, signal.SIGCONT)
        time.sleep(0.2)
        group.all_reduce(x)
        assert x.tolist() == [2.0] * 8
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0


def test_patience_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.05, 100.0, 100.05, 100.1, 100.15])
    monkeypatch.setattr(ring, "time", SimpleNamespace(monotonic=lambda: next(times)))
    patience = ring.Patience(0.28)
    assert [patience.is_over() for _ in range(5)] == [False, False, False, False, True]


def test_abort_ends_the_wait_of_all(tmp_path: Path) -> None:
    with workers(ranks.wait_for_ever, tmp_path, 2) as (worker,):
        group = ranks.open_kind("shared", 0, tmp_path, 2, timeout_s=PATIENCE_S)
        group.abort()
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0  # it got a GroupError
        with pytest.raises(GroupError):
            group.broadcast(torch.ones(2))


def test_a_full_shared_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a SIGBUS where it is written."""

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    library: Any = SimpleNamespace(group_bytes=lambda size: size << 19)
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 2 needs 1024 KiB in .*: No space left on device; make room"
    ):
        groups.SharedMemoryGroup(library, tmp_path, 0, 2, timeout_s=PATIENCE_S)


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    assert groups.open_group(tmp_path, 0, 1, torch.device("cpu"), timeout_s=1) is groups.SINGLE
    x = torch.ones(3)
    groups.SINGLE.all_reduce(x)
    assert x.tolist() == [1, 1, 1]


class Calls:
    """Stands for torch.distributed on a machine without GPUs, and keeps the names of the calls."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.group = SimpleNamespace(WORLD=SimpleNamespace(abort=lambda: self.found.append("abort")))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **_: Any) -> None:
            self.found.append(name)
            if name == "gather" and args[1] is not None:
                for rank, part in enumerate(args[1]):
                    part.copy_(args[0] + rank)

        return call


def test_what_nccl_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as it sets it itself
    monkeypatch.setattr(nccl, "dist", calls)
    group = nccl.NcclGroup(tmp_path, 0, 2, torch.device("cpu"), timeout_s=1)
    assert calls.found == ["FileStore", "init_process_group"]
    calls.found.clear()
    group.all_reduce(torch.arange(8.0))
    out = torch.empty(1, 3)
    group.gather(torch.tensor([[1.0, 2.0]]), out)
    assert out.tolist() == [[1, 2, 2]]
    group.broadcast(torch.ones(1))
    group.abort()
    group.close()
    assert calls.found == ["all_reduce", "gather", "broadcast", "abort", "destroy_process_group"]


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_ranks_agree_on_the_least(kind: str, tmp_path: Path) -> None:
    """Numbers beyond float32's, on whichever rank the least one is."""
    with workers(ranks.agree, tmp_path, 3, kind) as running:
        assert ranks.agree(0, tmp_path, 3, kind) == ranks.AGREED
        for worker in running:
            worker.join(PATIENCE_S)
            assert worker.exitcode == 0
