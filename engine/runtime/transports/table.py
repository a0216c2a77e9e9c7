"""Opens the tiers behind the KV pool: host blocks, for preempted sequences and cached blocks, and a disk. Start-up thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.types import Progress
from engine.runtime.fingerprint import fingerprint
from engine.runtime.host_memory import available_memory
from engine.runtime.runner import ModelRunner
from engine.runtime.transports.disk import DiskStore
from engine.runtime.transports.host import HostPool, count_host_blocks

Report = Callable[[Progress], None]

_GIB = 1 << 30


def open_tiers(
    runner: ModelRunner, config: EngineConfig, settings: SchedulerConfig, dtype: torch.dtype, report: Report
) -> tuple[SchedulerConfig, DiskStore | None]:
    """Settings with what there is of both. Raises ConfigError or MemoryBudgetError."""
    asked = {"--swap-space": config.swap_space, "--kv-offload-config": config.kv_offload_gib}
    flags = [flag for flag, num_gib in asked.items() if num_gib]
    if not flags:
        return settings, None
    device = runner.blocks[0].device
    bytes_per_block = sum(view[0].nbytes for view in runner.blocks)
    # On a CPU they are in a file, and that has its own way to say that there is no room.
    limit = None if device.type == "cpu" else available_memory()
    num_blocks = count_host_blocks(sum(asked.values()), bytes_per_block, limit, " + ".join(flags))
    folder = None if config.kv_offload_dir is None else Path(config.kv_offload_dir).expanduser()
    pool = runner.open_host_pool(num_blocks, folder)
    report(Progress("swap_space", f"{num_blocks} blocks in host memory"))
    settings = replace(settings, num_host_blocks=num_blocks, host_caching=config.kv_offload_gib > 0)
    if folder is None:
        return settings, None
    store = _open_disk(pool, folder, config, bytes_per_block, fingerprint(config, str(dtype), runner.blocks), report)
    return replace(settings, num_disk_blocks=store.num_slots), store


def _open_disk(
    pool: HostPool, folder: Path, config: EngineConfig, bytes_per_block: int, name: str, report: Report
) -> DiskStore:
    num_slots = int(config.kv_offload_disk_gib * _GIB) // bytes_per_block
    if not num_slots:
        raise ConfigError(
            f"--kv-offload-config: disk_gib is {config.kv_offload_disk_gib:g}, less than one block of K/V "
            f"({bytes_per_block / (1 << 20):.2f} MiB); raise it."
        )
    store = DiskStore(folder, name, num_slots, bytes_per_block)
    store.serve(pool.row, pool.finish_copies)
    report(Progress("kv_offload", f"{num_slots} blocks in {folder}, {len(store.kept)} of them kept from before"))
    return store
