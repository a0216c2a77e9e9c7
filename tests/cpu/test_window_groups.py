"""Layers with sliding windows in groups of their own, in the real runner: the streams of one table for all layers.

Blocks that nothing holds are filled with NaN before every step. So a kernel that reads what a window has passed, beyond
the tile in which the window begins, makes the answer fail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.page_table import NO_BLOCK
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.core.step import StepPlan
from engine.core.types import Request
from engine.files.hf_config import HFConfig
from engine.runtime.execution.model_step import ModelStep
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.model_config import HeadsConfig, ModelConfig
from engine.runtime.models import families
from engine.runtime.models.load import load_model
from engine.runtime.pool.groups import EVERY, TILE_KEYS, LayerGroups, group_layers, one_group, regroup
from engine.settings.engine_config import EngineConfig
from tests.cpu.model_driver import Poisoner, TinyModel, make_runner, request, serve, settings, solo_greedy
from tools.__main__ import main as tools
from tools.groups import PHASES

LENGTH = 400
SIZE = 2 * 2 * 8 * 4  # bytes a token of a layer of `spec` in float32
ONE, TWO = (
    (SIZE // 2, SIZE),
    (SIZE // 2, SIZE, 3 * SIZE // 2, 2 * SIZE),
)  # where blocks of one and two layers can be cut
WINDOWS = (None, 9, 9, 40, 9, None, 9)  # of the layers: 2, 4 and 1 of a kind


def spec(window: int | None = None, head_dim: int = 8) -> AttentionSpec:
    return AttentionSpec(4, 2, head_dim, 0.35, window=window)


def windowed(**changes: int | bool | str) -> SchedulerConfig:
    windows = group_layers([spec(window) for window in WINDOWS], torch.float32, LENGTH).windows
    sizes = {"max_model_len": LENGTH, "num_blocks": 900} | changes
    return settings(windows=windows, **sizes)  # type: ignore[arg-type]


def run(
    config: SchedulerConfig,
    requests: Sequence[Request],
    backend: str = "auto",
    depth: int = 0,
    windows: Sequence[int | None] = WINDOWS,
) -> Scheduler:
    """Serve requests with and without groups; their streams are equal, and those of a single dense forward pass."""
    model, scheduler = TinyModel(windows=windows), Scheduler(config)
    runner = make_runner(model, config, backend)
    poisoner = Poisoner(runner, scheduler)
    served = serve(model, config, requests, depth=depth, apart=3, scheduler=scheduler, runner=poisoner)  # type: ignore[arg-type]
    plain = replace(config, windows=(), has_full=True, num_blocks=900)
    alone = serve(model, plain, requests, depth=depth, apart=3, runner=make_runner(model, plain, backend))
    assert served.ids == alone.ids
    for each in requests:
        if each.params.temperature == 0:
            assert served.ids[each.request_id, 0] == solo_greedy(model, each.prompt, each.params.max_tokens)
    assert scheduler.kv.pool.num_held == 0
    return scheduler


def prompts(*lengths: int, max_tokens: int = 20) -> list[Request]:
    numbers = torch.randint(0, 61, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    return [request(f"r{i}", numbers[:length], max_tokens=max_tokens) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(("backend", "depth"), [("auto", 0), ("auto", 1), ("torch", 1), ("torch", 0)])
def test_streams_are_those_of_one_table(backend: str, depth: int) -> None:
    asked = [*prompts(330, 150, 30), request("n", range(40), n=3, max_tokens=25, temperature=1.0, seed=2)]
    run(windowed(max_num_batched_tokens=48), asked, backend, depth)


@pytest.mark.parametrize("num_host_blocks", [0, 600])
def test_preempted_sequences_resume(num_host_blocks: int) -> None:
    config = windowed(num_blocks=330, num_host_blocks=num_host_blocks, max_num_batched_tokens=64)
    scheduler = run(config, prompts(60, 50, 55, max_tokens=100), depth=1)
    assert scheduler.stats.preemptions > 0
    assert (scheduler.stats.preempted[PreemptionKind.SWAP] > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize(("backend", "depth"), [("auto", 1), ("torch", 0)])
def test_layers_with_windows_alone_hold_nothing_else(backend: str, depth: int) -> None:
    """A pool that could not hold the longest prompt, let alone all: through chunks, forks and cache hits."""
    windows = (9, 40, 9, 9)
    groups = group_layers([spec(window) for window in windows], torch.float32, LENGTH)
    assert groups.windows == (167, 136, 136, 136)
    specs = [spec(window) for window in windows]
    assert group_layers(specs, torch.float32, LENGTH, needs_full=True) == one_group(specs, torch.float32)
    config = settings(
        windows=groups.windows,
        has_full=groups.has_full,
        max_model_len=LENGTH,
        num_blocks=350,
        max_num_batched_tokens=48,
    )  # type: ignore[arg-type]
    asked = [
        *prompts(330, 330, 150, 30, max_tokens=60),
        request("n", range(42), n=3, max_tokens=25, temperature=1.0, seed=2),
    ]
    scheduler = run(config, asked, backend, depth, windows)
    assert scheduler.stats.prefix_hit_tokens > 0
    assert [kind for kind, _ in scheduler.kv.groups] == ["window 167", *["window 136"] * 3]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_layers_with_heads_of_their_own(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in Gemma 4: two layers with windows to one with wider heads, fewer of keys; in C layer by layer, or in torch."""

    def mixed(hf: HFConfig) -> ModelConfig:
        llama = families.llama(hf)
        own = [replace(layer, window=9) for layer in llama.layers]
        own[2] = replace(own[2], window=None, rope=None, heads=HeadsConfig(num_heads=2, num_kv_heads=1, head_dim=32))
        return replace(llama, layers=tuple(own))

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    values = {
        "model_type": "llama",
        "vocab_size": 61,
        "num_hidden_layers": 3,
        "max_position_embeddings": LENGTH,
    } | sizes
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setitem(families.FAMILIES, "llama", mixed)
    asked = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    model = load_model(asked, torch.device("cpu"), torch.float32, lambda progress: None)
    groups = group_layers(model.states, torch.float32, LENGTH)
    assert groups.windows == (136,)
    config = settings(windows=groups.windows, max_model_len=LENGTH, num_blocks=250, max_num_batched_tokens=48)  # type: ignore[arg-type]
    requests = prompts(330, 330, 150, 30)
    served = serve(model, config, requests, depth=1, apart=2, runner=make_runner(model, config, backend))
    for each in requests:
        assert served.ids[each.request_id, 0] == solo_greedy(model, each.prompt, 20)


def test_a_prefix_is_found_again() -> None:
    scheduler = run(windowed(max_num_seqs=1), [*prompts(300, 300, 290, 200)])
    assert scheduler.stats.prefix_hit_tokens >= 299 // 4 * 4, "the same prompt resumes at its end"


def test_a_window_frees_what_it_has_passed() -> None:
    config = windowed(max_num_batched_tokens=16)
    model, scheduler = TinyModel(windows=WINDOWS), Scheduler(config)
    held: list[int] = []

    class Watched(Poisoner):
        def run(self, plan: StepPlan) -> ModelStep:
            tables = [seq.kv.tables[-1] for seq in scheduler.running]
            held.append(max(len(table) - table.count(NO_BLOCK) for table in tables))
            return super().run(plan)

    runner = Watched(make_runner(model, config), scheduler)
    serve(model, config, prompts(360), scheduler=scheduler, runner=runner)  # type: ignore[arg-type]
    assert max(held) <= (40 + TILE_KEYS + 16) // 4 + 2


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None, None), LayerGroups((0, 0), (0, SIZE), TWO)),
        ((9, 9), LayerGroups((1, 1), (0, SIZE), TWO, (136,))),
        ((None, 9), LayerGroups((0, 1), (0, 0), ONE, (9 + 127,))),
        ((None, 300), LayerGroups((0, 0), (0, SIZE), TWO)),
        ((9, None, 9, None), LayerGroups((1, 0, 1, 0), (0, 0, SIZE, SIZE), TWO, (136,))),
        ((9, 9, 9, None), LayerGroups((1, 2, 3, 0), (0, 0, 0, 0), ONE, (136, 136, 136))),
        ((None, None, 9), LayerGroups((0, 1, 2), (0, 0, 0), ONE, (EVERY, 136))),
    ],
)
def test_layers_are_divided_into_groups_of_equal_size(windows: tuple[int | None, ...], expected: LayerGroups) -> None:
    specs = [spec(window) for window in windows]
    found = group_layers(specs, torch.float32, LENGTH)
    assert found == expected
    assert regroup(specs, torch.float32, found.windows) == found


def test_gemma_and_gpt_oss_are_divided_with_little_waste() -> None:
    for num_full, num_windowed, num_groups in ((5, 29, 7), (10, 52, 7), (12, 12, 2), (4, 22, 7), (8, 40, 6)):
        found = group_layers([spec()] * num_full + [spec(512)] * num_windowed, torch.float32, 1 << 17)
        assert 1 + len(found.windows) == num_groups
        assert sorted(zip(found.group_of, found.place_of, strict=True)) == sorted(
            set(zip(found.group_of, found.place_of, strict=True))
        )


def test_layers_of_other_sizes_share_blocks() -> None:
    """A block has the bytes of the full layers: one of 24 numbers a head, or three of 8; K and V have other ends there."""
    found = group_layers([spec(9), spec(9), spec(None, 24), spec(9), spec(9)], torch.float32, LENGTH)
    assert found == LayerGroups((1, 1, 0, 1, 2), (0, SIZE, 0, 2 * SIZE, 0), (3 * SIZE // 2, 3 * SIZE), (136, 136))
    # The full layer is smaller than the others: half of its block is unused, and a sequence still holds less.
    assert group_layers([spec(9, 16)] * 5 + [spec()], torch.float32, LENGTH).cuts[-1] == 2 * SIZE
    # Groups would hold more than one table for all does.
    assert group_layers([spec(260, 64), spec(), spec()], torch.float32, LENGTH).windows == ()


def test_a_pool_holds_more_sequences_and_no_phase_of_load_harms_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools(["groups"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    told = {row[0]: row[1:] for row in rows if row}
    assert float(told["Gemma-3-4B"][-1]) >= 3
    assert float(told["gpt-oss-20b"][-1]) >= 1.8
    for phase in PHASES:
        running, running_alone, found, found_alone = map(int, told[phase])
        assert running >= 0.9 * running_alone
        assert found >= 0.9 * found_alone
