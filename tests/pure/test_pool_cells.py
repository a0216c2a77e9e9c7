"""The pool in cells (server/operations/live.py) against a count block by block."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.core.stats import SequenceView, Snapshot
from server.operations.live import MAX_CELLS, NO_OWNER, OTHERS, summarise

SIZE = 4  # tokens a block


def view(seq_id: int, blocks: list[int], num_computed: int) -> SequenceView:
    return SequenceView(
        seq_id=seq_id, request_id="r", tenant="t", choice=0, status="running", num_prompt=1, num_tokens=num_computed,
        num_computed=num_computed, num_cached=0, num_preemptions=0, arrival_s=0.0, first_scheduled_s=None,
        first_token_s=None, tables=(tuple(blocks),),
    )  # fmt: skip


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, Snapshot, int, int]:
    """A pool's blocks, its snapshot, how many blocks are shown, and in how many cells."""
    num_blocks = draw(st.integers(1, 60))
    blocks = draw(st.permutations(range(num_blocks)))
    num_held = draw(st.integers(0, num_blocks))
    tables = draw(st.lists(st.sets(st.sampled_from(blocks[:num_held])), max_size=5)) if num_held else []
    views = [view(i, sorted(table), draw(st.integers(0, len(table) * SIZE))) for i, table in enumerate(tables)]
    findable = bytearray(num_blocks)
    for block in draw(st.sets(st.sampled_from(blocks))):
        findable[block] = 1
    snapshot = Snapshot(0, 0, 0, bytes(findable), tuple(views), ())
    return num_blocks, snapshot, draw(st.integers(1, num_blocks + 5)), draw(st.integers(1, 20))


@given(pools())
def test_each_cell_counts_its_blocks(pool: tuple[int, Snapshot, int, int]) -> None:
    num_blocks, snapshot, num_shown, max_cells = pool
    holders: dict[int, list[int]] = {block: [] for block in range(num_blocks)}
    tokens = dict.fromkeys(range(num_blocks), 0)
    for each in snapshot.sequences:
        for index, block in enumerate(each.tables[0]):
            holders[block].append(each.seq_id)
            tokens[block] = max(tokens[block], min(max(each.num_computed - index * SIZE, 0), SIZE))
    cells = summarise(
        snapshot, num_blocks, SIZE, is_visible=lambda each: each.seq_id % 2 == 0, num_shown=num_shown,
        max_cells=max_cells,
    )  # fmt: skip
    assert cells.num_blocks == min(num_blocks, num_shown)
    used = [block for block in range(num_blocks) if holders[block] or snapshot.findable[block]]
    assert cells.num_used == max(used, default=-1) + 1
    rows = [row for length, *row in cells.runs for _ in range(length)]
    assert len(rows) == -(-cells.num_blocks // cells.blocks_per_cell) <= max_cells
    assert all(left[1:] != right[1:] for left, right in zip(cells.runs, cells.runs[1:], strict=False))
    for i, (held, shared, cached, computed, owner) in enumerate(rows):
        first = i * cells.blocks_per_cell
        blocks = range(first, min(first + cells.blocks_per_cell, cells.num_blocks))
        assert held == sum(bool(holders[block]) for block in blocks)
        assert shared == sum(len(holders[block]) > 1 for block in blocks)
        assert cached == sum(snapshot.findable[block] and not holders[block] for block in blocks)
        assert computed == sum(tokens[block] for block in blocks)
        owners = Counter(holders[block][-1] for block in blocks if holders[block])
        shown = Counter({(OTHERS if each % 2 else each): 0 for each in owners})
        for each, number in owners.items():
            shown[OTHERS if each % 2 else each] += number
        assert owner in (shown or {NO_OWNER})
        for each, number in shown.items():
            assert number * 2 <= held or owner == each, "the majority's"


def test_a_large_pool_takes_a_bounded_number_of_cells() -> None:
    snapshot = Snapshot(0, 0, 0, b"\1\0" * 50_000, (view(7, list(range(1, 100_000, 3)), 10**6),), ())
    cells = summarise(snapshot, 100_000, SIZE)
    assert cells.blocks_per_cell == 25
    assert sum(run[0] for run in cells.runs) == 4000 <= MAX_CELLS
