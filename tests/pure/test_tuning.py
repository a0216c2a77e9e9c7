"""`quire tune` on machines of which the step times are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import LoadtestError
from loadtest.tuning.command import config_file
from loadtest.tuning.probe import Load, Probe
from loadtest.tuning.tuner import BlockFigure, Goal, OpenProbe, choose_block, doublings, knee, largest, tune


@given(st.integers(0, 300), st.integers(1, 8))
def test_the_largest_good_size_is_found_with_few_questions(limit: int, grain: int) -> None:
    asked = []

    def is_good(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = largest(is_good, 1, 256, grain=grain)
    assert found == min(limit, 256) // grain * grain
    assert len(asked) == len(set(asked)) <= 9


def test_the_knee_is_the_smallest_size_near_the_best_rate() -> None:
    assert doublings(16, 100) == [16, 32, 64, 100]
    assert doublings(16, 16) == [16]
    assert knee({16: 5.0, 32: 9.8, 64: 10.0, 100: 9.0}.__getitem__, [16, 32, 64, 100], 0.97) == 32


class Machine:
    """Step times by a formula, and a count of the engines that were opened."""

    def __init__(self, step_s: Callable[[Load, int], float], most: int = 128) -> None:
        self.step_s, self.most, self.opened = step_s, most, 0

    def opener(self) -> OpenProbe:
        @contextmanager
        def open_probe(block_size: int) -> Iterator[Probe]:
            self.opened += 1
            seconds: dict[Load, float] = {}
            probe: Any = SimpleNamespace(
                config=SimpleNamespace(block_size=block_size, max_model_len=4096),
                seconds=seconds,
                spreads=[0.01, 0.02, 0.3],
                most_sequences=lambda _: self.most,
                step_s=lambda load: seconds.setdefault(load, self.step_s(load, block_size)),
            )
            yield cast(Probe, probe)

        return open_probe


def _linear(load: Load, block_size: int) -> float:
    """5 ms a step, 0.5 ms a sequence, 0.25 ms a prompt's token; blocks of 8 take half as long again."""
    seconds = 0.005 + 0.0005 * load.num_seqs + 0.00025 * load.num_prompt_tokens
    return seconds * (1.5 if block_size == 8 else 1.0)


def test_with_a_target_no_step_of_the_settings_is_longer() -> None:
    goal = Goal(context=512, target_s=0.04)
    tuned = tune(Machine(_linear).opener(), goal, [16, 8, 32], 2048, lambda _: None)
    assert _linear(Load(0, 0, tuned.chunk), 16) <= 0.02 < _linear(Load(0, 0, tuned.chunk + 8), 16)
    full = Load(tuned.max_num_seqs, 512, tuned.chunk)
    assert _linear(full, 16) <= 0.04 < _linear(full._replace(num_seqs=tuned.max_num_seqs + 4), 16)
    assert _linear(Load(0, 0, tuned.max_num_batched_tokens), 16) <= 0.04
    assert tuned.block_size == 16, "blocks of 8 are slower, and blocks of 32 waste more"


def test_without_a_target_the_most_tokens_a_second_count() -> None:
    tuned = tune(Machine(_linear).opener(), Goal(context=512), [16], 2048, lambda _: None)
    assert tuned.max_num_seqs == 128
    assert tuned.max_num_batched_tokens == tuned.max_num_seqs + tuned.chunk
    assert not tuned.blocks


@pytest.mark.parametrize("target_s", [0.001, 0.0142])
def test_a_target_that_cannot_be_met_is_told(target_s: float) -> None:
    with pytest.raises(LoadtestError, match=r"--target-itl-ms is .*set it higher"):
        tune(Machine(lambda load, size: _linear(load, size) + 0.01 * load.num_seqs).opener(),
             Goal(512, target_s), [16], 2048, lambda _: None)  # fmt: skip


def test_a_pool_without_room_is_told() -> None:
    with pytest.raises(LoadtestError, match="--context is 4000"):
        tune(Machine(_linear, most=0).opener(), Goal(context=4000), [16], 2048, lambda _: None)


def test_a_context_beyond_the_model_is_told() -> None:
    with pytest.raises(LoadtestError, match="--context is 4096, and the longest sequence here has 4096 tokens"):
        tune(Machine(_linear).opener(), Goal(context=4096), [16], 2048, lambda _: None)


def test_of_blocks_nearly_as_fast_the_smallest_is_chosen() -> None:
    assert choose_block([BlockFigure(16, 98, 100), BlockFigure(8, 60, 100), BlockFigure(64, 100, 99)]) == 16
    assert choose_block([BlockFigure(16, 100, 50), BlockFigure(32, 50, 100)]) == 16


def test_the_file_is_what_serve_takes(tmp_path: Any) -> None:
    from server.settings.flags import load_settings

    tuned = tune(Machine(_linear).opener(), Goal(512, 0.04), [16], 2048, lambda _: None)
    text = config_file(tuned, Goal(512, 0.04), "some.gguf", {"num_threads": 2, "kv_cache_dtype": "int8"})
    assert yaml.safe_load(text)["num-threads"] == 2
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    settings = load_settings(["--config", str(path)])
    assert (settings.model, settings.max_num_seqs) == ("some.gguf", tuned.max_num_seqs)
    assert (settings.max_num_batched_tokens, settings.block_size) == (tuned.max_num_batched_tokens, 16)
