"""The scheduler's settings, resolved to numbers and checked; engine/startup/build.py makes them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.core.page_table import blocks_for

FEW_TOKENS = (
    "--max-num-batched-tokens is {c.max_num_batched_tokens}, less than --max-num-seqs ({c.max_num_seqs}); every running "
    "sequence needs one token of a step's budget."
)
_MAX_DRAFTED_ROWS = 256  # of logits in a step with drafts: with a large vocabulary each takes several megabytes
_LEAST = {
    "num_blocks": 1,
    "block_size": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "num_host_blocks": 0,
    "num_speculative_tokens": 0,
    "state_blocks": 0,
}


Points = tuple[tuple[int, float], ...]  # (how many, seconds), ascending


class DraftCosts(NamedTuple):
    """What speculation costs, in seconds, as measured at the start; no points are no cost."""

    plain: Points = ()  # a step without drafts, by its rows
    checking: Points = ()  # a step with drafts, by its rows
    drafting: Points = ()  # one more draft each, by the number of sequences


FREE = DraftCosts()


class StoreSize(NamedTuple):
    """A store of cached blocks behind main memory."""

    name: str
    num_slots: int
    is_shared: bool = False  # others write to it, and it is only read here


class GroupKind(NamedTuple):
    """A group of layers. What computing a position needs of it is in the last `window` - 1 positions before that one."""

    name: str  # of its kind, in metrics
    window: int
    num_parts: int = 1  # blocks of a content: of a state it is the position before, in several blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """All that the scheduler needs to know of the machine, the model and the settings."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    pinned_share: float = 0.0  # most of each tier's blocks that may be pinned
    policy: str = "fcfs"
    target_itl_s: float | None = None  # between two tokens of a sequence
    target_ttft_s: float | None = None
    num_host_blocks: int = 0  # in main memory, for the K/V of preempted sequences
    host_caching: bool = False  # blocks evicted from the pool stay cached in main memory
    stores: tuple[StoreSize, ...] = ()  # of cached blocks behind main memory
    num_speculative_tokens: int = 0  # most that a runner drafts for a sequence in a step
    draft_costs: DraftCosts = FREE
    # Groups of layers beside those with full attention, by the positions that a token attends to: see kv/groups.py.
    windows: tuple[int, ...] = ()
    has_full: bool = True  # some layers keep every position; else the first group has no layers, and takes no blocks
    state_blocks: int = 0  # of the pool, that the recurrent state of a sequence takes: see kv/snapshots.py
    writes_midway: bool = False  # the runner can write the state at a boundary within a chunk of a prompt, too
    # Of a model that attends both ways: each prompt is computed in one step, together with others up to so many tokens.
    whole_step: int = 0

    @property
    def max_num_rows(self) -> int:
        """Return the most rows of logits in a step, drafts included: what memory is measured for."""
        return max(self.max_num_seqs, min(self.max_num_seqs * (1 + self.num_speculative_tokens), _MAX_DRAFTED_ROWS))

    @property
    def groups(self) -> tuple[GroupKind, ...]:
        """Return all groups of layers, by number: full attention, windows, recurrent state."""
        windows = [GroupKind(f"window {window}", window) for window in self.windows]
        states = [GroupKind("recurrent", 2, self.state_blocks)] if self.state_blocks else []
        return (GroupKind("full", self.max_model_len), *windows, *states)

    @property
    def num_groups(self) -> int:
        """Return how many groups have a page table each, the first included; recurrent ones have none."""
        return 1 + len(self.windows)

    @property
    def num_paged_groups(self) -> int:
        """Return how many groups of layers take a block for some positions."""
        return self.has_full + len(self.windows)

    def window_blocks(self, window: int, num_positions: int, longest_atomic: int = 0) -> int:
        """Return the blocks that a sequence needs in a group with this window to go on from any of its positions.

        A window may begin and end within a block, the step in flight may need another, and so may drafts. An atomic span
        is computed in one step, with the windows of all its positions.
        """
        window += longest_atomic
        others = blocks_for(self.num_speculative_tokens, self.block_size) + 2
        return min(blocks_for(window, self.block_size) + others, blocks_for(num_positions, self.block_size))

    def max_blocks(self, num_positions: int, num_states: int = 2, longest_atomic: int = 0) -> int:
        """Return the most blocks that a sequence with K/V of so many positions needs, in all groups.

        A sequence that resumes reads one state and writes another.
        """
        windows = sum([self.window_blocks(window, num_positions, longest_atomic) for window in self.windows])
        full = blocks_for(num_positions, self.block_size) if self.has_full else 0
        return full + windows + num_states * self.state_blocks

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            _require(value >= least, f"{name} is {value}; it must be at least {least}.")
        for name in ("target_itl_s", "target_ttft_s"):
            value = getattr(self, name)
            _require(value is None or 0.0 < value < inf, f"{name} is {value}; it must be a number of seconds above 0.")
        _require(
            self.has_full or not self.num_host_blocks,
            "Without layers that keep every position nothing is kept below the pool; leave out host memory.",
        )
        for window in self.windows:
            _require(window >= 1, f"A window is {window} tokens; it must be at least 1.")
        share = self.pinned_share
        _require(0.0 <= share < 1.0, f"pinned_share is {share}; it must be at least 0 and less than 1.")
        assert self.host_caching or not self.stores, "stores are behind host blocks"
        _require(self.max_num_batched_tokens >= self.max_num_seqs, FEW_TOKENS.format(c=self))


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)
