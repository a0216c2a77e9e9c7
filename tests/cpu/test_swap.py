"""K/V that goes to host memory and comes back: the same bits, in every layout, and so the same answers."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.core.errors import ConfigError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind, SwapDirection
from engine.core.step import StepPlan
from engine.core.types import Progress
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.stores import host as host_memory
from engine.runtime.stores import pinned
from engine.runtime.stores.host import HostPool, count_host_blocks
from engine.runtime.stores.pinned import gather, runs, scatter
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu.model_driver import CPU, TinyModel, make_runner, request, serve, settings, solo_greedy
from tests.cpu.test_engine_faults import answers
from tests.cpu.test_models_families import CASES, write_tiny
from tests.fake_device import CUDA, fake_device
from tests.fake_order import OrderError

SPECS = [AttentionSpec(4, 2, 8, 1.0), AttentionSpec(4, 1, 16, 1.0)]
NUM_BLOCKS = 7
OUT, BACK = [(6, 0), (2, 3), (0, 1)], [(1, 2), (0, 5)]  # pool to host, host to pool: 0 comes to 2, 6 to 5


def filled(backend: str, dtype: torch.dtype, device: torch.device = CPU) -> KVCache:
    """A pool of which every byte is drawn."""
    pool = KVCache(
        SPECS, load_backend(backend, device), num_blocks=NUM_BLOCKS, block_size=4, dtype=dtype, device=device
    )
    for tensor in (*pool._keys.values(), *pool._values.values()):
        tensor.copy_(torch.randint(-100, 100, tensor.shape, device=device))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_blocks_come_back_as_they_went(backend: str, dtype: torch.dtype) -> None:
    cache = filled(backend, dtype)
    assert sum(view.nbytes for view in cache.blocks) == sum(
        each.nbytes for each in (*cache._keys.values(), *cache._values.values())
    )
    before = [view.clone() for view in cache.blocks]
    host = HostPool(cache.blocks, 4)
    host.begin(StepPlan(0, swap_out=OUT))
    for view in cache.blocks:
        view[[0, 6]] = 0  # whoever has them now writes to them
    host.bring_in(StepPlan(1, swap_in=BACK))
    for view, old in zip(cache.blocks, before, strict=True):
        old[2], old[5] = old[0].clone(), old[6].clone()
        old[[0, 6]] = 0
        assert torch.equal(view, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_copies_whole_blocks_of_every_layer(backend: str, dtype: torch.dtype) -> None:
    cache = filled(backend, dtype)
    pools, before = (
        [*cache._keys.values(), *cache._values.values()],
        [pool.clone() for pool in (*cache._keys.values(), *cache._values.values())],
    )
    cache.copy_blocks([(1, 5), (2, 0)])
    for pool, old in zip(pools, before, strict=True):
        axis = list(pool.shape).index(NUM_BLOCKS)
        for source, destination in ((1, 5), (2, 0), (3, 3), (1, 1)):
            assert torch.equal(pool.select(axis, destination), old.select(axis, source))


def test_what_is_gathered_for_the_journey_is_scattered_after_it() -> None:
    """The CUDA pool's way, but for streams and pinned memory."""
    pool = filled("torch", torch.bfloat16).blocks
    rows = torch.zeros(5, sum(view[0].numel() for view in pool), dtype=torch.bfloat16)
    gather(pool, torch.tensor([6, 2]), rows[:2])
    before = [view.clone() for view in pool]
    scatter(pool, torch.tensor([1, 6]), rows[:2])
    for view, old in zip(pool, before, strict=True):
        assert torch.equal(view[[1, 6]], old[[6, 2]])
        assert torch.equal(view[[0, 2, 3, 4, 5]], old[[0, 2, 3, 4, 5]])


@pytest.mark.parametrize("num_staged", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_the_cuda_pool_moves_what_it_is_told(
    dtype: torch.dtype, num_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that compares the order of all that it does."""
    with fake_device():
        cache = filled("torch", dtype, CUDA)
        monkeypatch.setattr(pinned, "STAGING_BYTES", num_staged * sum(view[0].nbytes for view in cache.blocks))
        before = [view.clone() for view in cache.blocks]
        host = pinned.PinnedPool(cache.blocks, NUM_BLOCKS, CUDA)
        order = [5, 6, 0, 1, 2, 4, 3]
        host.begin(StepPlan(0, swap_out=[(block, 6 - block) for block in order]))
        for view in cache.blocks:
            view[:] = 0
        for pairs in ([(6 - block, block) for block in order[:4]], [(6 - block, block) for block in order[4:]]):
            host.begin(plan := StepPlan(1, swap_in=pairs))
            host.bring_in(plan)
        with pytest.raises(OrderError):
            cache.blocks[0].clone()
        host.settle()
        assert all(torch.equal(view, old) for view, old in zip(cache.blocks, before, strict=True))
        host.close()


def test_adjacent_blocks_are_one_copy() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(4, 0, 3), (2, 3, 1), (9, 4, 2)]
    assert list(runs([])) == []


MODEL = TinyModel()
_random = random.Random(7)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (3, 17, 30, 9, 22, 12)]


@pytest.mark.parametrize(("depth", "caching"), [(0, False), (1, True)], ids=["depth0", "depth1-caching"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_preempted_by_swap_says_the_same(backend: str, depth: int, caching: bool) -> None:
    config = settings(num_blocks=18, num_host_blocks=60, enable_prefix_caching=caching)
    scheduler, runner = Scheduler(config), make_runner(MODEL, config, backend)
    requests = [request(f"r{i}", prompt, max_tokens=16) for i, prompt in enumerate(PROMPTS)]
    served = serve(MODEL, config, requests, depth=depth, apart=1, scheduler=scheduler, runner=runner)
    for i, prompt in enumerate(PROMPTS):
        assert served.ids[f"r{i}", 0] == solo_greedy(MODEL, prompt, 16)
    assert scheduler.stats.preempted[PreemptionKind.SWAP] > 0
    assert scheduler.stats.swapped_blocks[SwapDirection.IN] > 0


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=["", "int8"])
def test_forks_and_penalties_survive_a_swap(kv_dtype: torch.dtype) -> None:
    asked = [
        request(f"r{i}", prompt, max_tokens=14, temperature=0.9 * (i % 2), n=1 + i % 3, frequency_penalty=0.5 * (i > 2))
        for i, prompt in enumerate(PROMPTS)
    ]
    alone: dict[tuple[str, int], list[int]] = {}
    for one in asked:
        alone |= serve(MODEL, settings(), [one], runner=make_runner(MODEL, settings(), kv_dtype=kv_dtype)).ids
    config = settings(num_blocks=20, num_host_blocks=60)
    for depth in (0, 1):
        scheduler, runner = Scheduler(config), make_runner(MODEL, config, kv_dtype=kv_dtype)
        served = serve(MODEL, config, asked, depth=depth, apart=2, scheduler=scheduler, runner=runner)
        assert served.ids == alone
        assert scheduler.stats.preempted[PreemptionKind.SWAP] > 0


# -- the setting -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> partial[EngineConfig]:
    write_tiny(CASES["qwen3"], tmp_path)
    return partial(
        EngineConfig,
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=1 << 17,
        max_model_len=64,
    )


def test_an_engine_with_swap_space_says_what_one_without_says(tiny: partial[EngineConfig]) -> None:
    told: list[Progress] = []
    without, with_swap = build_engine(tiny(), told.append), build_engine(tiny(swap_space=0.001), told.append)
    assert without.config.num_host_blocks == 0 < with_swap.config.num_host_blocks
    assert answers(with_swap) == answers(without)
    assert with_swap.stats.preempted[PreemptionKind.SWAP] > 0
    assert with_swap.stats.host_blocks_held == 0
    (line,) = [progress.detail for progress in told if progress.stage == "swap_space"]
    assert line == f"{with_swap.config.num_host_blocks} blocks in host memory"


def test_an_engine_whose_copies_fail_says_the_same(tiny: partial[EngineConfig]) -> None:
    without, broken = (build_engine(tiny(swap_space=gib), lambda _: None) for gib in (0.0, 0.001))
    broken._runner._host_pool._views.pop()  # type: ignore[attr-defined]  # so the last layer has nowhere to go
    assert answers(broken) == answers(without)
    assert broken.stats.failed_copies == 1
    assert broken.stats.preempted[PreemptionKind.SWAP] > 0 == sum(broken.stats.swapped_blocks.values())
    assert broken.stats.integrity_failures == broken.stats.host_blocks_held == 0


def test_more_than_there_is_is_refused(tmp_path: Path) -> None:
    assert count_host_blocks(3.0, 1 << 20, 3 << 30) == count_host_blocks(3.0, 1 << 20, None) == 3 << 10
    with pytest.raises(ConfigError, match=r"--swap-space is 4 GiB, .* has 3\.0 left; .* most 3"):
        count_host_blocks(4.0, 1 << 20, 3 << 30)
    with pytest.raises(ConfigError, match=r"less than one block of K/V \(1\.00 MiB\); raise it, or set it to 0"):
        count_host_blocks(0.0001, 1 << 20, 0)
    with pytest.raises(
        ConfigError, match=r"need 1\d+\.\d\d GiB in .*kv, where there is no such room \(.*\); lower them"
    ):
        host_memory.mapped_rows((1 << 30, 1 << 20), torch.int8, tmp_path / "kv")
    assert not any((tmp_path / "kv").iterdir())


def test_on_a_cpu_host_blocks_are_a_file_that_has_no_name(tmp_path: Path) -> None:
    host = HostPool(filled("torch", torch.float32).blocks, 4, tmp_path)
    assert not any(tmp_path.iterdir())
    maps = Path("/proc/self/maps").read_text()
    assert any(str(tmp_path) in line and line.endswith("(deleted)") for line in maps.splitlines())
    host.close()


def test_a_folder_in_main_memory_takes_no_more_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not host_memory._is_in_memory(Path("/proc"))
    shared = Path("/dev/shm")
    assert not shared.is_mount() or host_memory._is_in_memory(shared)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(host_memory, "_is_in_memory", lambda folder: False)
    host_memory.mapped_rows((1 << 20, 2), torch.int8, tmp_path)
    monkeypatch.setattr(host_memory, "_is_in_memory", lambda folder: folder == tmp_path)
    host_memory.mapped_rows((1 << 20, 1), torch.int8, tmp_path)
    with pytest.raises(ConfigError, match=r"it is in main memory, which has 0\.00 GiB left\); lower them"):
        host_memory.mapped_rows((1 << 20, 2), torch.int8, tmp_path)


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=r"--swap-space is .*; it must be (at least 0|a finite number)"):
        EngineConfig(model="m", swap_space=size)
