"""Adapters by name, and that nobody finds K/V in the prefix cache that another adapter made."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from engine.adapters import Adapters
from engine.core.config import SchedulerConfig
from engine.core.errors import AdapterConflictError, AdapterLoadError, AdapterNotFoundError
from engine.core.kv.prefix_cache import chain_root
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Adapter, Request, SamplingParams
from engine.resources import EngineResources
from loadtest.fake_runner import FakeRunner
from tests.patience import PATIENCE_S


@dataclass(frozen=True, eq=False)
class Named:
    name: str
    digest: bytes


def read(name: str, path: str) -> Named:
    if path == "damaged":
        raise AdapterLoadError("It is damaged.")
    return Named(name, path.encode().ljust(32))


def test_what_is_loaded_is_found_until_it_is_unloaded() -> None:
    adapters = Adapters(read, 2)
    assert "a" not in adapters.loaded
    loaded = adapters.load("a", "1")
    adapters.load("b", "2")
    assert adapters.loaded["a"] is loaded
    assert [(each.adapter.name, each.path) for each in adapters.loaded.values()] == [("a", "1"), ("b", "2")]
    adapters.unload("a")
    assert "a" not in adapters.loaded
    with pytest.raises(AdapterNotFoundError, match="No adapter 'a' is loaded"):
        adapters.unload("a")


def test_names_are_taken_once() -> None:
    adapters = Adapters(read, 2)
    adapters.load("a", "1")
    with pytest.raises(AdapterConflictError, match="'a' is loaded already"):
        adapters.load("a", "2")


def test_what_requests_still_use_takes_room() -> None:
    adapters = Adapters(read, 1)
    used = adapters.hold(adapters.load("a", "1").adapter)
    with pytest.raises(AdapterConflictError, match="1 adapters are held, and --max-loras is 1; unload one first"):
        adapters.load("b", "2")
    adapters.unload("a")
    with pytest.raises(AdapterConflictError, match="1 of them unloaded but still used by requests"):
        adapters.load("b", "2")
    with pytest.raises(AdapterNotFoundError):
        adapters.hold(Adapter("a", used.digest))
    del used
    gc.collect()
    adapters.load("b", "2")


def test_one_that_is_loaded_again_is_found_as_long_as_a_request_uses_either() -> None:
    adapters = Adapters(read, 2)
    resources = EngineResources(adapters)
    adapter = adapters.load("a", "1").adapter
    params = SamplingParams(max_tokens=1, adapter=adapter)
    request = Request(request_id="", prompt=(1,), params=params, arrival_s=0.0)
    first = resources.hold(request)
    adapters.unload("a")
    assert adapters.load("a", "1").adapter == adapter
    second = resources.hold(request)
    assert second[0] is not first[0]
    adapters.unload("a")
    del second
    gc.collect()
    assert resources.find(adapter) is first[0]


def test_one_that_cannot_be_read_takes_no_room() -> None:
    adapters = Adapters(read, 1)
    for _ in range(3):
        with pytest.raises(AdapterLoadError):
            adapters.load("a", "damaged")
    adapters.load("a", "1")


def test_reading_stops_nobody_who_looks() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(name: str, path: str) -> Named:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return read(name, path)

    adapters = Adapters(slow, 1)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(adapters.load, "a", "1")
        assert begun.wait(PATIENCE_S)
        assert "a" not in adapters.loaded
        assert not adapters.loaded
        go_on.set()
        assert coming.result(PATIENCE_S) is adapters.loaded["a"]


def test_a_chain_begins_with_salt_and_adapter() -> None:
    roots = [chain_root(salt, digest) for salt in ("", "a" * 32) for digest in (b"", b"a" * 32, b"b" * 32)]
    assert len(set(roots)) == 6
    assert chain_root("", b"") == chain_root("")


def test_cached_blocks_are_found_by_requests_of_the_same_adapter_alone() -> None:
    """Also by one that was loaded again, if it is the same."""
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler, runner = Scheduler(config), FakeRunner(config)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    found = []
    for number, name in enumerate(("", "a", "b", "a", "", "b")):
        adapter = Adapter(str(number), read("", name).digest) if name else None
        request = Request(
            request_id=str(number), prompt=(7,) * 13, params=replace(params, adapter=adapter), arrival_s=0.0
        )
        scheduler.add(request)
        before = scheduler.stats.prefix_hit_tokens
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.commit(plan, runner.run(plan).wait(), 0.0)
        found.append(scheduler.stats.prefix_hit_tokens - before)
    assert found == [0, 0, 0, 12, 12, 12]
