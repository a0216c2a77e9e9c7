"""A ring of messages in memory that processes share: one writes, all others read every message.

    words 0 ..    number of messages written; then one word a reader, how many it has read
    from 4096     messages, each a word with its size and its bytes, from a multiple of 8; a size of -1 skips to the start

A reader spins for a moment, where each rank has a core, and then sleeps on an eventfd, so an idle engine uses no processor
time. The memory has no name and ends with its processes. Only x86 keeps the order of stores that spinning relies on.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HEAD_BYTES = 4096
_WORD = 8
_SKIP = -1
_WARM_BYTES = 256 << 10  # the ring begins again after so many, if it can: they stay in the caches, and have their pages
_SPIN_S = 0.002  # longer than the host takes between two steps
_NAP_S = 50e-6  # of a writer that waits for room
_POLL_S = 1.0


class RingError(RuntimeError):
    """A reader did not make room in time."""


def make_memory(num_bytes: int) -> int:
    """Return a descriptor of anonymous shared memory; its pages exist once they are written."""
    descriptor = os.memfd_create("quire-ring")
    os.ftruncate(descriptor, _HEAD_BYTES + num_bytes)
    return descriptor


class _Mapped:
    """The memory in one process."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        view = memoryview(self._map)
        self._counts = np.frombuffer(view[:_HEAD_BYTES], np.int64)
        self._bytes = view[_HEAD_BYTES:]
        self._words = np.frombuffer(self._bytes, np.int64)
        self._capacity = len(self._bytes)
        self._at = 0  # where the next message begins


class RingWriter(_Mapped):
    """The first rank's end."""

    def __init__(self, descriptor: int, wakers: Sequence[int], *, timeout_s: float) -> None:
        """`wakers` are the eventfds that the readers sleep on."""
        super().__init__(descriptor)
        self._wakers, self._timeout_s = list(wakers), timeout_s
        self._ends: list[int] = []  # of messages that some reader has not read: bytes written until then
        self._num_written = 0  # bytes, over all rounds
        self._num_read = 0  # bytes that every reader has read
        self._num_settled = 0  # messages that every reader has read

    @property
    def max_bytes(self) -> int:
        """Return the size of the largest message that always finds room."""
        return self._capacity // 2 - 2 * _WORD

    def send(self, parts: Sequence[NDArray[Any]]) -> None:
        """Send a message to all readers. Raises RingError."""
        size = sum(part.nbytes for part in parts)
        needed = _WORD + -(-size // _WORD) * _WORD
        if needed > self._capacity // 2:
            raise RingError(f"A message of {size} bytes is larger than the ring has room for.")
        rest = self._capacity - self._at
        if needed + _WORD > rest or (
            self._at >= _WARM_BYTES and self._has_room(rest + needed)
        ):  # a word is for the mark
            self._await(rest)
            self._words[self._at // _WORD] = _SKIP
            self._num_written += rest
            self._at = 0
        self._await(needed)
        begin = self._at + _WORD
        for part in parts:
            if part.nbytes:  # memory without a size cannot be cast
                self._bytes[begin : begin + part.nbytes] = part.data.cast("B")
            begin += part.nbytes
        self._words[self._at // _WORD] = size
        self._at += needed
        self._num_written += needed
        self._ends.append(self._num_written)
        self._counts[0] += 1
        for waker in self._wakers:
            os.eventfd_write(waker, 1)

    def _await(self, num_bytes: int) -> None:
        """Wait until the readers have made room."""
        end_s = time.monotonic() + self._timeout_s
        while not self._has_room(num_bytes):
            if time.monotonic() > end_s:
                raise RingError(f"A rank of the model read no message for {self._timeout_s:g} s.")
            time.sleep(_NAP_S)

    def _has_room(self, num_bytes: int) -> bool:
        """Return whether so many more bytes overwrite nothing that a reader has yet to read."""
        if self._num_written + num_bytes - self._num_read <= self._capacity:
            return True
        slowest = int(self._counts[1 : 1 + len(self._wakers)].min())
        if slowest > self._num_settled:
            done = slowest - self._num_settled
            self._num_read, self._num_settled = self._ends[done - 1], slowest
            del self._ends[:done]
        return self._num_written + num_bytes - self._num_read <= self._capacity


class RingReader(_Mapped):
    """Another rank's end."""

    def __init__(self, descriptor: int, waker: int, place: int, *, spins: bool) -> None:
        """`place` counts the readers from 0."""
        super().__init__(descriptor)
        self._waker, self._place = waker, 1 + place
        self._spins = spins and platform.machine() == "x86_64"
        self._num = 0
        self._next = 0
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def receive(self) -> memoryview:
        """Wait for the next message, and return its memory, which is valid until `release`."""
        end_s = time.monotonic() + (_SPIN_S if self._spins else 0.0)
        while self._counts[0] == self._num:
            if time.monotonic() >= end_s and self._poll.poll(_POLL_S * 1000):
                os.eventfd_read(self._waker)
        size = int(self._words[self._at // _WORD])
        if size == _SKIP:
            self._at = 0
            size = int(self._words[0])
        self._next = self._at + _WORD + -(-size // _WORD) * _WORD
        return self._bytes[self._at + _WORD : self._at + _WORD + size]

    def release(self) -> None:
        """Give the memory of the last message back."""
        self._num += 1
        self._at = self._next
        self._counts[self._place] = self._num
