"""Memory that is made ready ahead of its use: how far it goes, and that nothing in it changes."""

from __future__ import annotations

import pytest
import torch

from engine.runtime import huge_pages
from engine.runtime.pool import kv_cache
from engine.runtime.pool.kv_cache import Headroom

_MIB = 1 << 20


def _grown(room: Headroom, num_used: int) -> int:
    count = 0
    while room.grow(num_used):
        count += 1
    return count


@pytest.fixture
def populated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges that were made ready, by the first value of their first and last block."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "populate", lambda x: ranges.append((int(x[0, 0]), int(x[-1, 0]))) or True)
    return ranges


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, populated: list[tuple[int, int]]) -> Headroom:
    monkeypatch.setattr(kv_cache, "_AHEAD_BYTES", 8 * _MIB)
    return Headroom(torch.arange(20).view(20, 1).expand(20, _MIB // 8))


def test_it_stays_so_far_ahead_of_use(room: Headroom, populated: list[tuple[int, int]]) -> None:
    assert _grown(room, 0) == 4
    assert _grown(room, 3) == 2
    assert _grown(room, 16) == 2, "far beyond what was ready"
    assert populated == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 10), (16, 17), (18, 19)]


def test_a_system_that_says_no_is_asked_again_when_more_is_used(
    room: Headroom, populated: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    def refuse(_: object) -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "populate", refuse)
        for num_used in (1, 1, 2, 3, 3, 4):  # a piece has two blocks
            assert _grown(room, num_used) == 0
        assert num_asked == 2
    assert _grown(room, 4) == 0
    assert _grown(room, 5) == 4
    assert populated == [(5, 6), (7, 8), (9, 10), (11, 12)]


def test_what_is_written_stays() -> None:
    memory = huge_pages.zeros((8, _MIB), torch.uint8)
    memory[2] = 7
    huge_pages.populate(memory[1:6])
    assert (memory[2] == 7).all()
    assert int(memory.sum(dtype=torch.int64)) == 7 * _MIB
