"""Messages from the first rank to the others, as bytes: int64 numbers of kind and counts, then arrays; nothing is pickled.

a step              longs, scored rows, slots, ints and changes of its Packet
a captured step     fields and changes of its DecodeRows
copies, new sizes   pairs of blocks; windows, and sizes in the head
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.config import SchedulerConfig
from engine.runtime.pool.batch import DecodeRows, Packet
from engine.runtime.pool.row_tables import NO_CHANGES, Changes

_NUM_HEADS = 9
# What a forward pass depends on; the rest is the scheduler's.
_SIZES = (
    "num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "state_blocks",
    "num_speculative_tokens",
)  # fmt: skip


class Kind(IntEnum):
    """What a message asks for."""

    STEP = 0  # a forward pass and its logits
    REPLAY = 1  # a decode step, as a captured graph
    COPY = 2  # copies of blocks alone
    CONFIGURE = 3  # a new pool
    CAPTURE = 4  # graphs of decode steps
    CLOSE = 5
    AGREE = 6  # on the least memory that a GPU has left
    LIMIT = 7  # its use of memory


class Step(NamedTuple):
    """A step, and whether the drawn ids follow it."""

    work: Packet | DecodeRows
    is_shared: bool


Pairs = Sequence[tuple[int, int]]
RankMessage = Step | Pairs | SchedulerConfig | Kind  # a Kind that has no contents


def encode(message: RankMessage) -> list[NDArray[Any]]:
    """Return the parts of a message, whose memory is the step's."""
    if isinstance(message, Kind):
        return [_head(message)]
    if isinstance(message, SchedulerConfig):
        return [
            _head(Kind.CONFIGURE, *(getattr(message, name) for name in _SIZES)),
            np.array(message.windows, np.int64),
        ]
    if not isinstance(message, Step):
        return [_head(Kind.COPY), np.array(message, np.int64)]
    work, is_shared = message
    if isinstance(work, DecodeRows):
        return [_head(Kind.REPLAY, is_shared, *work.fields.shape), work.fields, work.changes]
    counts = work.num_slices, work.num_tokens, work.num_samples, len(work.longs), len(work.scored), len(work.ints)
    scored, head = np.array(work.scored, np.int64), _head(Kind.STEP, is_shared, *counts, work.keeps_all)
    return [head, work.longs, scored, work.slots, work.ints, work.changes]


def _head(*numbers: int) -> NDArray[np.int64]:
    head = np.zeros(_NUM_HEADS, np.int64)
    head[: len(numbers)] = numbers
    return head


def decode(message: memoryview) -> RankMessage:
    """Return what a message asks for, in its memory."""
    code, is_shared, *counts = np.frombuffer(message, np.int64, _NUM_HEADS).tolist()
    kind, rest = Kind(code), message[_NUM_HEADS * 8 :]
    if kind is Kind.STEP:
        return Step(_packet(rest, *counts), bool(is_shared))
    if kind is Kind.REPLAY:
        fields = np.frombuffer(rest, np.int64, counts[0] * counts[1]).reshape(counts[:2])
        return Step(DecodeRows(fields, _changes(rest, fields.nbytes)), bool(is_shared))
    if kind is Kind.COPY:
        return _pairs(np.frombuffer(rest, np.int64))
    if kind is Kind.CONFIGURE:
        windows = tuple(np.frombuffer(rest, np.int64).tolist())
        return SchedulerConfig(**dict(zip(_SIZES, (is_shared, *counts), strict=False)), windows=windows)
    return kind


def _packet(
    rest: memoryview,
    num_slices: int,
    num_tokens: int,
    num_samples: int,
    num_longs: int,
    num_scored: int,
    num_ints: int,
    keeps_all: int,
) -> Packet:
    longs = np.frombuffer(rest, np.int64, num_longs + 2 * num_scored + num_slices)
    ints = np.frombuffer(rest, np.int32, num_ints, longs.nbytes)
    starts, contexts, _ = np.split(ints, (num_slices + 1, 2 * num_slices + 1))
    return Packet(
        longs=longs[:num_longs],
        ints=ints,
        slots=longs[num_longs + 2 * num_scored :],
        changes=_changes(rest, longs.nbytes + ints.nbytes),
        num_slices=num_slices,
        num_tokens=num_tokens,
        num_samples=num_samples,
        scored=_pairs(longs[num_longs : num_longs + 2 * num_scored]),
        keeps_all=bool(keeps_all),
        query_lens=np.diff(starts).tolist(),
        contexts=contexts.tolist(),
    )


def _changes(rest: memoryview, first: int) -> Changes:
    return np.frombuffer(rest, np.int32, offset=first).reshape(-1, 2) if len(rest) > first else NO_CHANGES


def _pairs(numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(first, second) for first, second in numbers.reshape(-1, 2).tolist()]
