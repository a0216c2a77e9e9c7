"""Makes the places behind the KV pool: host blocks, for preempted sequences and cached blocks, and a disk behind those.

What copying and computing cost here is measured first, and nothing is kept that would not pay. Start-up thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.kv.swap_costs import min_swap_tokens
from engine.core.types import Progress
from engine.runtime.disk_store import DiskStore
from engine.runtime.fingerprint import fingerprint
from engine.runtime.host_memory import available_memory
from engine.runtime.runner import ModelRunner, warm_up_plan
from engine.runtime.swap import HostPool, count_host_blocks, measure_costs

Report = Callable[[Progress], None]

_GIB = 1 << 30
_MEASURED_TOKENS = {"cpu": 128, "cuda": 8192}  # of a prompt, to know what computing anew costs


def open_tiers(
    runner: ModelRunner, config: EngineConfig, settings: SchedulerConfig, dtype: torch.dtype, report: Report
) -> tuple[SchedulerConfig, DiskStore | None]:
    """Settings with what there is of both. Raises ConfigError or MemoryBudgetError."""
    asked = {"--swap-space": config.swap_space, "--kv-offload-gib": config.kv_offload_gib}
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
    settings = _measure(runner, pool, num_blocks, settings, device, report)
    if not settings.num_host_blocks:
        runner.close_host_pool()
        return settings, None
    settings = replace(settings, host_caching=config.kv_offload_gib > 0)
    if folder is None:
        return settings, None
    store = _open_disk(pool, folder, config, bytes_per_block, fingerprint(config, str(dtype), runner.blocks), report)
    return replace(settings, num_disk_blocks=store.num_slots), store


def _measure(
    runner: ModelRunner,
    pool: HostPool,
    num_blocks: int,
    settings: SchedulerConfig,
    device: torch.device,
    report: Report,
) -> SchedulerConfig:
    """From which length on copying is sooner done than computing; no host blocks if it never is."""
    num_tokens = min(_MEASURED_TOKENS[device.type], settings.max_num_batched_tokens, settings.max_model_len)

    def compute() -> int:
        runner.run(warm_up_plan(settings, num_seqs=1, num_tokens=num_tokens)).wait()
        return num_tokens

    wait = (lambda: None) if device.type == "cpu" else partial(torch.cuda.synchronize, device)
    costs = measure_costs(pool, compute, min(num_blocks, settings.num_blocks), wait)
    least = min_swap_tokens(costs, settings.block_size)
    rates = (
        f"a block of {settings.block_size} tokens takes {costs.block_s * 1e3:.3g} ms out and back, and "
        f"{settings.block_size * costs.token_s * 1e3:.3g} ms to compute"
    )
    if least is None:
        report(Progress("swap_space", f"none: {rates}, so everything is computed anew"))
        return settings
    report(Progress("swap_space", f"{num_blocks} blocks, worth copying for {least} tokens or more: {rates}"))
    return replace(settings, num_host_blocks=num_blocks, swap_costs=costs)


def _open_disk(
    pool: HostPool, folder: Path, config: EngineConfig, bytes_per_block: int, name: str, report: Report
) -> DiskStore:
    num_slots = int(config.kv_offload_disk_gib * _GIB) // bytes_per_block
    if not num_slots:
        raise ConfigError(
            f"--kv-offload-disk-gib is {config.kv_offload_disk_gib:g}, less than one block of K/V "
            f"({bytes_per_block / (1 << 20):.2f} MiB); raise it."
        )
    store = DiskStore(folder, name, num_slots, bytes_per_block)
    store.serve(pool.row, pool.finish_copies)
    report(Progress("kv_offload", f"{num_slots} blocks in {folder}, {len(store.kept)} of them kept from before"))
    return store
