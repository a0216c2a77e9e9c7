"""The stores behind host memory, and what opens them. A new store is a file in this folder and a line of STORES.

Opened by the thread that starts the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.core.config import SchedulerConfig, StoreSize
from engine.core.types import Progress
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.transports import disk, shared_folder
from engine.runtime.transports.base import Opening, Store
from engine.runtime.transports.host import count_host_blocks
from engine.settings.engine_config import EngineConfig
from engine.startup.fingerprint import ModelContent, fingerprint
from engine.system.host_memory import available_memory

STORES: dict[str, Callable[[Opening], Store | None]] = {
    "disk": disk.open_store,
    "shared": shared_folder.open_store,
}


def open_tiers(
    runner: ModelRunner,
    config: EngineConfig,
    settings: SchedulerConfig,
    dtype: torch.dtype,
    report: Callable[[Progress], None],
    content: ModelContent | None = None,
) -> tuple[SchedulerConfig, dict[str, Store]]:
    """Open host memory and the configured stores. Raises ConfigError and others.

    Returns the settings with their sizes, and the stores.
    """
    asked = {"--swap-space": config.swap_space, "--kv-offload-config": config.kv_offload_gib}
    flags = [flag for flag, num_gib in asked.items() if num_gib]
    if not flags:
        return settings, {}
    block_bytes = sum(view[0].nbytes for view in runner.blocks)
    # On a CPU host blocks are in a file, which reports a shortage itself.
    limit = None if runner.blocks[0].device.type == "cpu" else available_memory()
    num_blocks = count_host_blocks(sum(asked.values()), block_bytes, limit, " + ".join(flags))
    folder = None if config.kv_offload_dir is None else Path(config.kv_offload_dir).expanduser()
    pool = runner.open_host_pool(num_blocks, folder)
    report(Progress("swap_space", f"{num_blocks} blocks in host memory"))
    stores: dict[str, Store] = {}
    # Host memory ends with this process, and needs no name.
    name = "" if content is None else fingerprint(config, str(dtype), runner.blocks, content)
    opening = Opening(config, pool, block_bytes, name, report, stores)
    try:
        for tier, open_store in STORES.items():
            store = open_store(opening)
            if store is not None:
                stores[tier] = store
    except BaseException:
        for store in stores.values():
            store.close()
        raise
    sizes = tuple(StoreSize(name, store.num_slots, store.is_shared) for name, store in stores.items())
    caches = config.kv_offload_gib > 0
    return replace(settings, num_host_blocks=num_blocks, host_caching=caches, stores=sizes), stores
