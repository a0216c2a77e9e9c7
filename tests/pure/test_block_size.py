"""--block-size auto: fragmentation against speed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.scheduling.scheduler import Scheduler
from engine.loop import Engine
from engine.startup.block_size import CANDIDATES, choose, lengths_path, load_lengths, save_lengths, waste
from loadtest.fake_runner import FakeRunner
from tests.pure.driver import VOCAB, config, request
from tests.pure.test_loop import Listener


@given(st.lists(st.integers(1, 4000), min_size=1), st.sampled_from(CANDIDATES))
def test_waste_is_less_than_a_block_a_sequence_and_grows_with_the_block(lengths: list[int], size: int) -> None:
    held = sum(-(-length // size) * size for length in lengths)
    assert 0 <= waste(lengths, size) * held <= len(lengths) * (size - 1) + 1e-6
    assert waste(lengths, size) <= waste(lengths, 2 * size) + 1e-12


@pytest.mark.parametrize(
    ("speeds", "length", "expected"),
    [
        ({8: 0.35, 16: 1.0, 32: 0.95, 64: 0.95}, 250, 16),  # two cores: the fastest blocks waste little
        ({16: 0.9, 32: 0.95, 64: 1.0}, 3900, 64),  # long sequences fill large blocks
        ({16: 0.9, 32: 0.95, 64: 1.0}, 20, 32),  # short ones do not
    ],
)
def test_speed_and_waste_are_weighed(speeds: dict[int, float], length: int, expected: int) -> None:
    assert choose(speeds, [length] * 100) == expected


@pytest.mark.parametrize("lengths", [[], [2000] * 63])
def test_with_few_lengths_it_is_the_smallest_of_the_fast(lengths: list[int]) -> None:
    assert choose({8: 1.0, 16: 2.9, 32: 3.0, 64: 2.0}, lengths) == 16


def test_lengths_are_kept_by_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_lengths(lengths_path("m"), [3, 4, 5])
    save_lengths(lengths_path("m"), [])  # a run that served nothing
    assert load_lengths(lengths_path("m")) == [3, 4, 5]
    assert load_lengths(lengths_path("other")) == []
    (file,) = tmp_path.rglob("*.json")
    for broken in ("", "[]", '{"version": 2, "lengths": [1]}', '{"version": 1, "lengths": 7}', "\0"):
        file.write_text(broken)
        assert load_lengths(lengths_path("m")) == []


def test_the_engine_keeps_its_lengths_at_its_end() -> None:
    settings, kept = config(), []
    engine = Engine(
        Scheduler(settings), FakeRunner(settings, vocab_size=VOCAB), vocab_size=VOCAB, keep_lengths=kept.append
    )
    listener = Listener()
    engine.start(listener)
    engine.submit(request("r", (1, 2, 3), max_tokens=2, eos_token_ids=frozenset()))
    listener.wait_for(lambda: ("r", 0) in listener.ends)
    engine.stop(0)
    assert [list(lengths) for lengths in kept] == [[5]]
