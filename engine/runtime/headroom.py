"""Memory of the K/V pool that is made ready while nobody waits.

The pool is fresh memory: the first write to a page waits until the system has found and cleared it, and a server under
load is always writing to pages for the first time until it has been through its whole pool. Blocks are handed out in
ascending order, so it is known what comes next. Engine thread; main memory only.
"""

from __future__ import annotations

from torch import Tensor

from engine.runtime import huge_pages

_AHEAD_BYTES = 512 << 20  # ready beyond what has been used: a burst's worth, and what an idle server takes too much
_PIECE_BYTES = 2 << 20  # at a time: a request that comes meanwhile waits for one


class Headroom:
    """How far into the pool memory is ready."""

    def __init__(self, blocks: Tensor) -> None:
        """`blocks`: the pool, [num_blocks, ...], contiguous."""
        self._blocks = blocks
        block_bytes = max(blocks[0].nbytes, 1)
        self._piece, self._ahead = -(-_PIECE_BYTES // block_bytes), _AHEAD_BYTES // block_bytes
        self._num_ready = self._num_used = 0
        self._wait_until = 0  # so many are used, after the system has said no

    def note_use(self, block: int) -> None:
        """This block is written to, and so have been those before it."""
        self._num_used = max(self._num_used, block + 1)

    def grow(self) -> bool:
        """Make another piece ready, milliseconds at most; False if there is enough.

        Or if the system has none to give, or cannot do it at all: it is asked again when a piece more is in use.
        """
        begin = max(self._num_ready, self._num_used)
        end = min(self._num_used + self._ahead, len(self._blocks))
        if begin >= end or self._num_used < self._wait_until:
            return False
        end = min(begin + self._piece, end)
        if not huge_pages.populate(self._blocks[begin:end]):
            self._wait_until = self._num_used + self._piece
            return False
        self._num_ready = end
        return True
