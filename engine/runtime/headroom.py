"""Prepares memory of the K/V pool while the engine is idle.

The pool is fresh memory: the first write to a page waits until the system has found and cleared it. A server under load
makes first writes until it has used its whole pool once. Blocks are handed out in ascending order, so the next ones are
known. Engine thread; main memory only.
"""

from __future__ import annotations

from torch import Tensor

from engine.runtime import huge_pages

_AHEAD_BYTES = 512 << 20  # prepared beyond the used part: enough for a burst; an idle server holds this much too much
_PIECE_BYTES = 2 << 20  # one piece; a request that arrives meanwhile waits for it


class Headroom:
    """Tracks how far into the pool memory is prepared."""

    def __init__(self, blocks: Tensor) -> None:
        """`blocks`: the pool, [num_blocks, ...], contiguous."""
        self._blocks = blocks
        block_bytes = max(blocks[0].nbytes, 1)
        self._piece, self._ahead = -(-_PIECE_BYTES // block_bytes), _AHEAD_BYTES // block_bytes
        self._num_ready = 0
        self._wait_until = 0  # blocks in use before the system is asked again, after it refused

    def grow(self, num_used: int) -> bool:
        """Prepare another piece (milliseconds) beyond the first `num_used` blocks; return False if there is enough.

        Also False if the system refuses or cannot do it; it is asked again after one more piece is in use.
        """
        begin = max(self._num_ready, num_used)
        end = min(num_used + self._ahead, len(self._blocks))
        if begin >= end or num_used < self._wait_until:
            return False
        end = min(begin + self._piece, end)
        if not huge_pages.populate(self._blocks[begin:end]):
            self._wait_until = num_used + self._piece
            return False
        self._num_ready = end
        return True
