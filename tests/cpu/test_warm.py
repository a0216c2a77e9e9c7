"""Answers that resume from what is left of earlier ones are, bit for bit, those of an engine that keeps nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.warm import NAMES, play


@pytest.mark.parametrize("name", NAMES)
def test_warm_answers_are_cold_answers(name: str, tmp_path: Path) -> None:
    found = play(name, num_answers=40, seed=1, folder=tmp_path)
    assert not found.wrong
    assert found.num_resumed > found.num_answers // 2
    assert found.num_below > 0
    assert found.num_preempted + found.num_faults > 0
