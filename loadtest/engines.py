"""Builds the real engine in this process, for benchmarks of its steps.

Imports are inside the functions, because `quire bench` needs neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop import Engine


def build(settings: Sequence[str]) -> Engine:
    """Return a daemon's engine, one step at a time and not started."""
    from engine.sources.model_source import find_model
    from engine.startup.build import build_engine
    from server.settings.flags import load_settings

    given = load_settings([*settings, "--no-async-scheduling"])
    return build_engine(given.engine_config(find_model(given.model).path), lambda _: None)


def device_of(settings: Sequence[str]) -> str:
    """Return where an engine of these flags computes: "cpu" or "cuda"."""
    from engine.runtime.execution.device import resolve_device
    from server.settings.flags import load_settings

    return str(resolve_device(load_settings(settings).device).type)
