"""--block-size auto: fragmentation against speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.block_size import CANDIDATES, BlockSizeChooser, waste
from engine.core.config import EngineConfig, SchedulerConfig
from engine.core.errors import ConfigError, NeverFitsError
from engine.core.fake_runner import FakeRunner
from engine.core.scheduler import Scheduler
from engine.loop import Engine
from tests.patience import eventually
from tests.pure.driver import VOCAB, config, request, solo
from tests.pure.test_loop import Listener

EVEN = dict.fromkeys(CANDIDATES, 1.0)


@given(st.lists(st.integers(1, 4000), min_size=1), st.sampled_from(CANDIDATES))
def test_waste_is_less_than_a_block_a_sequence_and_grows_with_the_block(lengths: list[int], size: int) -> None:
    held = sum(-(-length // size) * size for length in lengths)
    assert 0 <= waste(lengths, size) * held <= len(lengths) * (size - 1) + 1e-6
    assert waste(lengths, size) <= waste(lengths, 2 * size) + 1e-12


def test_nothing_is_concluded_from_a_few_lengths_nor_right_after_a_change() -> None:
    chooser = BlockSizeChooser(EVEN)
    assert chooser.better_than(128, [17] * 63, 63) is None
    assert chooser.better_than(128, [17] * 64, 64) == 8
    assert chooser.better_than(8, [128] * 100, 100) is None
    assert chooser.better_than(128, [17] * 128, 127) is None
    assert chooser.better_than(128, [17] * 128, 128) == 8


@pytest.mark.parametrize(
    ("speeds", "length", "current", "expected"),
    [
        ({8: 0.35, 16: 1.0, 32: 0.95, 64: 0.95}, 250, 16, None),  # two cores: the fastest blocks waste little
        ({8: 0.35, 16: 1.0, 32: 0.95, 64: 0.95}, 250, 64, 16),
        ({16: 0.9, 32: 0.95, 64: 1.0}, 3900, 16, 64),  # long sequences fill large blocks
        ({16: 0.9, 32: 0.95, 64: 1.0}, 20, 64, 32),  # short ones do not
        ({16: 1.0, 32: 1.01}, 32, 16, None),  # not worth the cache
    ],
)
def test_speed_and_waste_are_weighed(speeds: dict[int, float], length: int, current: int, expected: int | None) -> None:
    assert BlockSizeChooser(speeds).better_than(current, [length] * 100, 100) == expected


def test_it_begins_with_the_smallest_of_the_fast() -> None:
    assert BlockSizeChooser({8: 1.0, 16: 2.9, 32: 3.0, 64: 2.0}).first == 16


def test_an_idle_engine_cuts_its_pool_anew_and_says_the_same_as_before() -> None:
    settings = config(num_blocks=24, block_size=8)
    runner = FakeRunner(settings, vocab_size=VOCAB)
    engine = Engine(Scheduler(settings), runner, vocab_size=VOCAB, block_sizes=BlockSizeChooser({4: 1.0, 8: 1.0}))
    listener = Listener()
    engine.start(listener)
    try:
        for index in range(64):
            engine.submit(request(f"r{index}", (index % VOCAB, 1), max_tokens=1, eos_token_ids=frozenset()))
        eventually(lambda: engine.stats.repartitions > 0)
        assert (engine.config.block_size, engine.config.num_blocks) == (4, 48)
        assert engine.stats.blocks_free + engine.stats.blocks_cached == 48
        assert engine.stats.blocks_waste == pytest.approx(0.25)
        asked = request("after", tuple(range(1, 20)), max_tokens=9, n=2)
        engine.submit(asked)
        listener.wait_for(lambda: {("after", 0), ("after", 1)} <= listener.ends.keys())
        assert [listener.said("after", choice) for choice in range(2)] == [solo(asked, c)[0] for c in range(2)]
    finally:
        engine.stop(0)
    assert not engine.stats.integrity_failures


def test_what_was_let_in_while_the_pool_was_cut_and_does_not_fit_ends_alone() -> None:
    settings = config(num_blocks=45, block_size=4, max_model_len=180)
    listener = Listener()

    class Cutting(FakeRunner):
        def repartition(self, config: SchedulerConfig) -> None:
            super().repartition(config)
            engine.submit(request("big", tuple([1] * 170), max_tokens=10))

    runner = Cutting(settings, vocab_size=VOCAB)
    engine = Engine(Scheduler(settings), runner, vocab_size=VOCAB, block_sizes=BlockSizeChooser({4: 1.0, 8: 2.0}))
    engine.start(listener)
    try:
        for index in range(64):
            engine.submit(request(f"r{index}", (index % VOCAB,) * 8, max_tokens=1, eos_token_ids=frozenset()))
        listener.wait_for(lambda: ("big", 0) in listener.ends)
        assert isinstance(listener.ends["big", 0].error, NeverFitsError)
        engine.submit(asked := request("after", (1, 2, 3)))
        listener.wait_for(lambda: ("after", 0) in listener.ends)
        assert listener.said("after") == solo(asked, 0)[0]
    finally:
        engine.stop(0)


@pytest.mark.parametrize(
    "other", [{"swap_space": 1.0}, {"kv_offload_gib": 1.0}, {"speculative_config": '{"method": "ngram"}'}]
)
def test_what_is_measured_for_one_size_does_not_go_with_auto(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--block-size auto does not go with"):
        EngineConfig(model="m", block_size=None, **other)  # type: ignore[arg-type]
