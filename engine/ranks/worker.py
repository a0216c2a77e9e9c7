"""A process that holds one rank's part of a model, and does what the first rank sends.

It has no scheduler and no sequences: it loads its slices of the weights, allocates its part of the pool and computes forward
passes. It says over standard output that it is loaded, or as a JSON line why it cannot go on. It ends with its parent,
whatever ends that one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.core.config import SchedulerConfig
from engine.core.types import Progress
from engine.runtime.attention.table import load_backend
from engine.runtime.execution.device import resolve_device, share_threads
from engine.runtime.execution.device_memory import free_share, hold_to_share
from engine.runtime.execution.packet import Kind, RankMessage, Step, decode
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model, resolve_dtype
from engine.runtime.native.functions import GroupError
from engine.runtime.native.library import choose_kernels, native
from engine.runtime.parallel.cpu_groups import open_group
from engine.runtime.parallel.group import Group, least
from engine.runtime.parallel.ring import RingReader
from engine.runtime.pool.batch import DecodeRows, Packet, PacketBuffers, scored_portions
from engine.runtime.pool.groups import regroup
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.pool_size import resolve_kv_dtype
from engine.runtime.pool.row_tables import RowTables
from engine.settings.engine_config import EngineConfig
from engine.system.numa import stay_on_node

if TYPE_CHECKING:
    from engine.runtime.execution.decode_graphs import DecodeGraphs  # needs Triton, which a CPU-only machine may lack

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.01
_said = 1  # the descriptor that the first rank reads


class Start(NamedTuple):
    """What a worker is started with, as JSON: its argument."""

    config: dict[str, Any]  # the EngineConfig's fields that are not default
    rank: int
    size: int
    folder: str  # where the ranks meet, once all of them are there
    ring: int  # descriptors
    waker: int
    spins: bool
    num_threads: int
    timeout_s: float
    parent: int  # the process whose end is this one's


class Worker:
    """The rank's model and pool."""

    def __init__(self, start: Start) -> None:
        config = self._config = EngineConfig(**start.config)
        if config.device != "cpu" and torch.cuda.is_available():
            # Before anything asks about the current one, and takes the first GPU's memory.
            torch.cuda.set_device(start.rank)
        device = resolve_device(config.device)
        choose_kernels(config.cpu_kernels if device.type == "cpu" else "off", is_portable=config.portable_bits)
        if (library := native()) is not None:
            library.use_threads(start.num_threads)  # the group spins only where each thread has a core
        self._device = device
        _say(here="")
        folder = Path(start.folder)
        while not folder.exists():  # however long the others import their modules
            time.sleep(_POLL_S)
        self._group: Group = open_group(folder, start.rank, start.size, device, timeout_s=start.timeout_s)
        if device.type == "cpu" and config.numa == "distribute":
            stay_on_node(start.rank, start.size)
        self._model: CausalLM = load_model(config, device, resolve_dtype(config, device), _ignore, self._group)
        share_threads(start.num_threads, self._model)
        self._dtype = resolve_kv_dtype(config.kv_cache_dtype, self._model.dtype, self._model.states)
        self._backend = load_backend(config.attention_backend, device)
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None

    def serve(self, ring: RingReader) -> None:
        """Do what messages ask for, until the last one."""
        with torch.inference_mode():
            while (message := decode(ring.receive())) is not Kind.CLOSE:
                self._do(message)
                ring.release()
        self._group.close()

    def _do(self, message: RankMessage) -> None:
        if isinstance(message, SchedulerConfig):
            self._configure(message)
        elif message is Kind.CAPTURE:
            self._capture()
        elif message is Kind.AGREE:
            least(self._group, free_share(self._device, self._config.gpu_memory_utilization), self._device)
        elif message is Kind.LIMIT:
            hold_to_share(self._device, self._config.gpu_memory_utilization)
        elif isinstance(message, Step):
            if isinstance(message.work, DecodeRows):
                assert self._graphs is not None
                self._tables.write(message.work.changes)
                self._graphs.launch(message.work)
            else:
                self._compute(message.work)
            if message.is_shared:
                self._group.broadcast(self._last_ids)
        else:
            assert self._cache is not None
            assert not isinstance(message, Kind)
            self._cache.copy_blocks(message)

    def _configure(self, sizes: SchedulerConfig) -> None:
        self._sizes, self._graphs = sizes, None  # graphs refer to the old pool
        self._cache = None  # the old pool is freed before the new one is allocated
        self._cache = KVCache(
            self._model.states,
            self._backend,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            dtype=self._dtype,
            device=self._device,
            max_rows=sizes.max_num_seqs,
            max_drafts=sizes.num_speculative_tokens,
            groups=regroup(self._model.states, self._dtype, sizes.windows),
        )
        self._tables = RowTables(sizes)
        self._buffers = PacketBuffers(sizes, self._device, self._tables)
        self._last_ids = torch.zeros(sizes.max_num_seqs + 1, dtype=torch.int64, device=self._device)

    def _capture(self) -> None:
        """Capture what ModelRunner.capture does, in the same order."""
        from engine.runtime.execution.decode_graphs import DecodeGraphs

        assert self._cache is not None
        self._graphs = DecodeGraphs(self._model, self._cache, self._sizes, self._last_ids, self._tables, self._group)
        self._graphs.capture(_ignore)

    def _compute(self, packet: Packet) -> None:
        """Compute what ModelRunner.run does before it draws."""
        model, cache = self._model, self._cache
        assert cache is not None
        batch = self._buffers.to_batch(self._buffers.fill(packet), self._last_ids)
        cache.prepare(batch)
        hidden = model.forward(batch.ids, batch.positions, cache, None if packet.keeps_all else batch.sample_rows)
        for rows in packet.scored:
            for portion in scored_portions(hidden, rows, model.vocab_size):
                model.logits(portion)
        if packet.num_samples:
            model.logits(hidden.index_select(0, batch.sample_rows) if packet.keeps_all else hidden)


def _ignore(_: Progress) -> None:
    """The first rank reports progress for all."""


def _say(**facts: str) -> None:
    os.write(_said, (json.dumps(facts) + "\n").encode())


def _end_with(parent: int) -> None:
    """End this process when its parent ends, even while it is stopped or computes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was asked for
        sys.exit(1)


def main() -> int:
    """Serve one rank; returns the exit status."""
    global _said  # noqa: PLW0603 - the process's own output
    _said = os.dup(1)
    os.dup2(2, 1)  # a library's print is not a message
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the daemon drains first, and then ends this process
    start = Start(**json.loads(sys.argv[1]))
    _end_with(start.parent)
    try:
        worker = Worker(start)
        _say(loaded="")
        worker.serve(RingReader(start.ring, start.waker, start.rank - 1, spins=start.spins))
    except GroupError as error:
        _say(lost=str(error))
        return 1
    except Exception as error:  # the first rank logs it
        traceback.print_exc()
        _say(error=type(error).__name__, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
