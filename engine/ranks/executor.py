"""Starts the processes of the other ranks, sends them what they compute, and notices when one is lost.

A rank that ends or takes part in nothing for PATIENCE_S is the engine's death: no step can be computed without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.core import errors
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, DeviceLostError, DeviceMemoryError, ModelLoadError, QuireError
from engine.ranks.worker import Start
from engine.runtime.execution.packet import Kind, Step, encode
from engine.runtime.native.functions import GroupError
from engine.runtime.native.library import native
from engine.runtime.parallel.cpu_groups import open_group
from engine.runtime.parallel.group import SINGLE, Group, least
from engine.runtime.parallel.ring import Patience, RingError, RingWriter, make_memory
from engine.runtime.pool.batch import DecodeRows, Packet, Ranks
from engine.settings.engine_config import EngineConfig
from engine.system.host_limits import processor_share, usable_cpus
from engine.system.numa import stay_on_node

Error = TypeVar("Error", bound=BaseException)
PATIENCE_S = 60.0  # for a rank that takes part in nothing; longer than a step
_RING_BYTES = 128 << 20  # of addresses; a page is memory once it is written
_NAP_S = 20e-6  # between looks at a GPU
_END_S = 2.0  # for a rank to end by itself
_SHARED = Path("/dev/shm")  # noqa: S108 - a private folder in it
_ROOT = Path(__file__).resolve().parents[2]
# What a rank needs of the environment: no keys, no settings.
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "CC")
_LIBRARIES = (  # ... and what its libraries read
    *("PYTHON", "LC_", "LD_", "XDG_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_"),
)


def start_ranks(config: EngineConfig, device: torch.device) -> Executor:
    """Start the other ranks of a model. Raises ConfigError for more ranks than GPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < config.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size is {config.tensor_parallel_size}, and this machine has {torch.cuda.device_count()} GPUs."
        )
    return Executor(config, config.num_threads or max(usable_cpus() // config.tensor_parallel_size, 1))


class Executor(Ranks):
    """The other ranks of one model, as processes of this machine: the Ranks of a ModelRunner."""

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        """Start the processes, which load their slices while this one loads its own."""
        self.size, self.num_threads = config.tensor_parallel_size, num_threads
        shared = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
        self.folder = shared / f"quire-ranks-{uuid.uuid4().hex}"  # for the moment in which the ranks meet
        self.shares_ids = False  # where steps overlap, the next one begins before the host knows the ids
        self.on_loss: Callable[[QuireError], None] = lambda _: None
        self.group: Group = SINGLE
        self._loss: QuireError | None = None
        self._said: list[set[str]] = [set() for _ in range(self.size - 1)]
        self._hears = threading.Condition()
        self._is_aborted = False
        self._stays_on_node = config.numa == "distribute"
        self._is_closing = False
        ring = make_memory(_RING_BYTES)
        wakers = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(self.size - 1)]
        self._ring = RingWriter(ring, wakers, timeout_s=PATIENCE_S)
        self._descriptors = [ring, *wakers]
        given = {each.name: getattr(config, each.name) for each in fields(config)}
        changed = {each.name: given[each.name] for each in fields(config) if given[each.name] != each.default}
        if config.cpu_kernels == "auto" and (library := native()) is not None:
            changed["cpu_kernels"] = (
                library.isa.name.lower()
            )  # what tiles are worth may be in no file that other ranks could read
        spins = self.size <= processor_share()
        starts = [
            Start(
                changed,
                1 + place,
                self.size,
                str(self.folder),
                ring,
                waker,
                spins,
                num_threads,
                PATIENCE_S,
                os.getpid(),
            )
            for place, waker in enumerate(wakers)
        ]
        self._processes: list[Future[subprocess.Popen[str]]] = [Future() for _ in starts]
        self._watchers = [
            threading.Thread(target=self._watch, args=(place, start), name=f"quire-rank-{1 + place}", daemon=True)
            for place, start in enumerate(starts)
        ]
        for watcher in self._watchers:
            watcher.start()

    # -- the runner's end ----------------------------------------------------------------------------------------------

    def meet(self, device: torch.device) -> Group:
        """Open the group of all ranks, whose calls fail when one is lost. Raises what a rank has said."""
        if (library := native()) is not None:
            library.use_threads(self.num_threads)
        self._await("here")
        self.folder.mkdir(mode=0o700)  # which the ranks wait for
        self._device = device
        self.group = open_group(self.folder, 0, self.size, device, timeout_s=PATIENCE_S)
        if device.type == "cpu" and self._stays_on_node:
            stay_on_node(0, self.size)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.group

    def _await(self, word: str) -> None:
        """Wait until all ranks have said a word, however long they load."""
        with self._hears:
            self._hears.wait_for(lambda: self._is_aborted or all(word in said for said in self._said))
        if self._is_aborted:
            raise self._loss or DeviceLostError("a rank of the model missed another while they started")

    def send(self, work: Packet | DecodeRows, *, draws: bool) -> None:
        self._is_shared = self.shares_ids and draws
        self._ring.send(encode(Step(work, self._is_shared)))

    def share(self, last_ids: Tensor) -> None:
        if self._is_shared:
            self.group.broadcast(last_ids)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        self._ring.send(encode(copies))

    def capture(self) -> None:
        self._ring.send(encode(Kind.CAPTURE))

    def least_room(self, room: int) -> int:
        self._await("loaded")
        self._ring.send(encode(Kind.AGREE))
        return least(self.group, room, self._device)

    def hold_to_share(self) -> None:
        self._ring.send(encode(Kind.LIMIT))

    def await_event(self, event: Any) -> None:
        """Wait until the device has reached an event; nothing else ends a wait for a collective in a graph."""
        patience = Patience(PATIENCE_S)
        while not (has_ended := bool(event.query())) and not self._is_aborted and not patience.is_over():
            time.sleep(_NAP_S)
        if self._is_aborted or not has_ended:  # aborted collectives end without their sums
            raise GroupError("A rank of the model did not take part in a step.")

    def configure(self, config: SchedulerConfig) -> None:
        """Have the ranks allocate the pool with these sizes. Raises ConfigError if a step does not fit the ring."""
        widest = -(-config.max_model_len // config.block_size)
        longest = 8 * (3 + config.num_groups) * config.max_num_batched_tokens
        longest += 8 * config.max_num_seqs * (6 + config.num_groups * widest)  # where all rows begin
        if longest > self._ring.max_bytes:
            raise ConfigError(
                f"A step of --max-num-seqs {config.max_num_seqs} with contexts of {config.max_model_len} tokens is too large "
                "for --tensor-parallel-size; lower one of them."
            )
        self._await("loaded")
        self._ring.send(encode(config))

    def close(self) -> bool:
        """End the processes; return whether one was lost, and a GPU may wait for it. Idempotent."""
        if self._is_closing:
            return self._is_aborted
        self._is_closing = True
        with suppress(RingError):
            if self._loss is None:
                self._ring.send(encode(Kind.CLOSE))
        can_end = self._loss is None and all("loaded" in said for said in self._said)
        processes = [each.result() for each in self._processes if each.exception() is None]
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S if can_end else 0)
            process.kill()
            process.wait()
        for watcher in self._watchers:
            watcher.join()
        if not self._is_aborted:
            self.group.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self._is_aborted

    # -- losses --------------------------------------------------------------------------------------------------------

    def explain(self, error: Error) -> Error | QuireError:
        """Return why a call failed: a rank's own error, if it has said one, or that it is lost."""
        if isinstance(error, DeviceMemoryError):  # the other ranks have computed the step, or wait in it
            return DeviceLostError(f"a step does not fit the memory of the model's first rank: {error}")
        if not isinstance(error, (GroupError, RingError)):
            return error
        for watcher in self._watchers:
            watcher.join(0.5)  # a rank that ends has its last word
        return self._loss or DeviceLostError(str(error))

    def watch_for(self, engine_fails: Callable[[QuireError], None]) -> None:
        """Call a function when a rank is lost, also between steps; at once if one was lost before."""
        self.on_loss = engine_fails
        if self._loss is not None:
            engine_fails(self._loss)

    def _watch(self, place: int, start: Start) -> None:
        """Start a rank and read what it says, until it ends. Runs on a thread.

        The kernel ends a rank with the thread that has started it, which is why it is this one.
        """
        try:
            self._follow(place, start)
        except Exception as error:  # its end would go unnoticed, and the engine would wait for it
            self._lose(DeviceLostError(f"rank {start.rank} cannot be watched ({type(error).__name__}: {error})"))

    def _follow(self, place: int, start: Start) -> None:
        name = f"rank {start.rank} of the model"
        try:
            process = _spawn(start)
        except OSError as error:
            self._processes[place].set_exception(error)
            self._lose(DeviceLostError(f"{name} could not be started: {error.strerror}"))
            return
        self._processes[place].set_result(process)
        said: dict[str, str] = {}
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if (facts := _facts_of(line)) is None:
                    continue
                said = facts
                with self._hears:
                    self._said[place].update(said)
                    self._hears.notify_all()
        code = process.wait()
        if not self._is_closing:
            is_first = "lost" not in said  # a rank that misses another is not the one to name
            cause = f"signal {-code}" if code < 0 else f"status {code}"
            self._lose((_error_of(said) or DeviceLostError(f"{name} ended ({cause})")) if is_first else None)

    def _lose(self, loss: QuireError | None) -> None:
        """Let all calls fail: no step can be computed any more."""
        with self._hears:
            self._loss, self._is_aborted = self._loss or loss, True
            self._hears.notify_all()
        self.group.abort()
        if self._loss is not None:
            self.on_loss(self._loss)


def _spawn(start: Start) -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith(_LIBRARIES)
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(  # noqa: S603 - a module of this program
        [sys.executable, "-m", "engine.ranks.worker", json.dumps(start._asdict())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(start.ring, start.waker),
        env=environment,
        start_new_session=True,  # Ctrl-C is for the daemon, which drains first
    )


def _facts_of(line: str) -> dict[str, str] | None:
    """Return what a rank says in a line; None for the print of a library that it imports."""
    with suppress(ValueError):
        facts = json.loads(line)
        if isinstance(facts, dict):
            return facts
    return None


def _error_of(said: dict[str, str]) -> QuireError | None:
    """Return the error that a rank has said."""
    if "error" not in said:
        return None
    kind: Any = getattr(errors, said["error"], None)
    is_known = isinstance(kind, type) and issubclass(kind, (ConfigError, ModelLoadError, errors.MemoryBudgetError))
    return kind(said["message"]) if is_known else DeviceLostError(f"{said['error']}: {said['message']}")
