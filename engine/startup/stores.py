"""The tiers of cached blocks behind host memory, and what opens them: a new one is a file and a line of STORES.

Opened by the thread that starts the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.core.config import SchedulerConfig, StoreSize
from engine.core.errors import ConfigError
from engine.core.types import Progress
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.stores import disk
from engine.runtime.stores.disk import DiskStore
from engine.runtime.stores.folder import Folder, SharedStore
from engine.runtime.stores.host import count_host_blocks
from engine.runtime.stores.tier import Opening, Tier
from engine.settings.engine_config import EngineConfig
from engine.startup.fingerprint import ModelContent, fingerprint
from engine.system.host_limits import available_memory
from engine.system.regular_file import expanded

_MAX_NAMES = 1 << 18  # blocks of others that are remembered: about 100 MB


def _open_shared(opening: Opening) -> Tier | None:
    """Open the other daemons' parts of this one's folder, if it has one."""
    own = opening.opened["disk"].store if "disk" in opening.opened else None
    if not isinstance(own, DiskStore):
        return None
    folder = Folder(own.folder, opening.fingerprint, opening.block_bytes, own.name)
    return Tier(SharedStore(folder, min(4 * own.num_slots, _MAX_NAMES)), opening.pool, is_shared=True)


STORES: dict[str, Callable[[Opening], Tier | None]] = {
    "disk": disk.open_tier,
    "shared": _open_shared,
}


def open_tiers(
    runner: ModelRunner,
    config: EngineConfig,
    settings: SchedulerConfig,
    dtype: torch.dtype,
    report: Callable[[Progress], None],
    content: ModelContent | None = None,
) -> tuple[SchedulerConfig, dict[str, Tier]]:
    """Open host memory and the configured stores. Raises ConfigError and others.

    Returns the settings with their sizes, and the tiers.
    """
    asked = {"--swap-space": config.swap_space, "--kv-offload-config": config.kv_offload_gib}
    flags = [flag for flag, num_gib in asked.items() if num_gib]
    if not flags:
        return settings, {}
    if not settings.has_full:
        raise ConfigError(
            "No layer of this model keeps every position, so nothing is kept below its KV pool; "
            f"leave out {' and '.join(flags)}."
        )
    block_bytes = sum(view[0].nbytes for view in runner.blocks)
    # On a CPU host blocks are in a file, which reports a shortage itself.
    limit = None if runner.blocks[0].device.type == "cpu" else available_memory()
    num_blocks = count_host_blocks(sum(asked.values()), block_bytes, limit, " + ".join(flags))
    folder = None if config.kv_offload_dir is None else expanded(config.kv_offload_dir)
    pool = runner.open_host_pool(num_blocks, folder)
    report(Progress("swap_space", f"{num_blocks} blocks in host memory"))
    tiers: dict[str, Tier] = {}
    # Host memory ends with this process, and needs no name.
    kv_name = "" if content is None else fingerprint(config, str(dtype), runner.blocks, content, runner.groups)
    opening = Opening(config, pool, block_bytes, kv_name, report, tiers)
    try:
        for name, open_tier in STORES.items():
            tier = open_tier(opening)
            if tier is not None:
                tiers[name] = tier
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    sizes = tuple(StoreSize(name, tier.store.num_slots, tier.is_shared) for name, tier in tiers.items())
    caches = config.kv_offload_gib > 0
    return replace(settings, num_host_blocks=num_blocks, host_caching=caches, stores=sizes), tiers
