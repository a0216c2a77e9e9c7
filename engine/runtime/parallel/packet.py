"""Messages from the first rank to the others, as bytes: steps as arrays, sizes as JSON; nothing is pickled.

int64   kind and counts, then a step's longs and its pairs (copies, scored rows), or a text's bytes, padded
int32   a step's ints
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from engine.core.config import SchedulerConfig
from engine.runtime.batch import Packet

_NUM_HEADS = 9


class Kind(IntEnum):
    """What a message asks for."""

    STEP = 0  # a forward pass and its logits
    COPY = 1  # copies of blocks alone
    CONFIGURE = 2  # a new pool: the fields of a SchedulerConfig
    CLOSE = 3


class Step(NamedTuple):
    """A step's packet, and whether the drawn ids follow."""

    packet: Packet
    is_shared: bool


def encode_step(packet: Packet, *, is_shared: bool) -> list[NDArray[Any]]:
    """Return the parts of a message, whose memory is the packet's."""
    pairs = [*packet.copies, *packet.scored]
    head = np.array(
        (
            Kind.STEP,
            packet.num_slices,
            packet.num_tokens,
            packet.num_samples,
            len(packet.longs),
            len(packet.copies),
            len(packet.scored),
            packet.keeps_all,
            is_shared,
        ),
        np.int64,
    )
    parts: list[NDArray[Any]] = [head, packet.longs]
    if pairs:
        parts.append(np.array(pairs, np.int64).reshape(-1))
    return [*parts, packet.ints]


def encode_copies(copies: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
    """Return the parts of a message with copies alone."""
    return [_head(Kind.COPY, len(copies)), np.array(copies, np.int64).reshape(-1)]


def encode_config(config: SchedulerConfig) -> list[NDArray[Any]]:
    """Return the parts of a message with the sizes of the pool and of steps."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    text = json.dumps(sizes).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)
    return [_head(Kind.CONFIGURE, len(padded) // 8), np.frombuffer(padded, np.int64)]


def encode_close() -> list[NDArray[Any]]:
    """Return the parts of the last message."""
    return [_head(Kind.CLOSE)]


# What a forward pass depends on; the rest is the scheduler's.
_SIZES = ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")


def _head(kind: Kind, count: int = 0) -> NDArray[np.int64]:
    head = np.zeros(_NUM_HEADS, np.int64)
    head[:2] = kind, count
    return head


def decode(message: memoryview) -> Step | list[tuple[int, int]] | SchedulerConfig | None:
    """Return what a message asks for, in its memory; None for the end."""
    head = np.frombuffer(message, np.int64, _NUM_HEADS)
    kind, first = Kind(head[0]), _NUM_HEADS * 8
    if kind is Kind.STEP:
        return _decode_step(head.tolist(), message[first:])
    if kind is Kind.COPY:
        return _pairs(np.frombuffer(message, np.int64, 2 * int(head[1]), first))
    if kind is Kind.CONFIGURE:
        sizes: Mapping[str, Any] = json.loads(bytes(message[first : first + 8 * int(head[1])]))
        return SchedulerConfig(**sizes)
    return None


def _decode_step(head: Sequence[int], rest: memoryview) -> Step:
    _, num_slices, num_tokens, num_samples, num_longs, num_copies, num_scored, keeps_all, is_shared = head
    num_pairs = 2 * (num_copies + num_scored)
    all_longs = np.frombuffer(rest, np.int64, num_longs + num_pairs)
    pairs = _pairs(all_longs[num_longs:])
    ints = np.frombuffer(rest, np.int32, offset=8 * len(all_longs))
    starts, contexts = ints[: num_slices + 1], ints[num_slices + 1 : 2 * num_slices + 1]
    tables = ints[2 * num_slices + 1 :].reshape(num_slices, -1)
    packet = Packet(
        longs=all_longs[:num_longs],
        ints=ints,
        num_slices=num_slices,
        num_tokens=num_tokens,
        num_samples=num_samples,
        copies=pairs[:num_copies],
        scored=pairs[num_copies:],
        keeps_all=bool(keeps_all),
        query_lens=np.diff(starts).tolist(),
        contexts=contexts.tolist(),
        tables=cast("Sequence[Sequence[int]]", tables),
    )
    return Step(packet, bool(is_shared))


def _pairs(numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(first, second) for first, second in numbers.reshape(-1, 2).tolist()]
