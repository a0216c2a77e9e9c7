"""Answers that resume from what is left of earlier ones are, bit for bit, those of an engine that keeps nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.warm import NAMES, play


@pytest.mark.parametrize("name", NAMES)
def test_warm_answers_are_cold_answers(name: str, tmp_path: Path) -> None:
    found = play(name, num_answers=36, seed=1, folder=tmp_path)
    assert not found.wrong
    assert found.has_seen_all()
