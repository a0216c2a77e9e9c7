"""A ring of messages in memory that processes share: one writes, all others read every message.

    words 0 ..    number of messages written; then one word a reader, how many it has read
    from 4096     slots of equal size, used in turn: a word with the size of a message, and its bytes

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
_NUM_SLOTS = 4  # as many messages may be unread: two steps that overlap, with copies of blocks
_SPIN_S = 0.002  # longer than the host takes between two steps
_NAP_S = 50e-6  # of a writer that waits for room
_POLL_S = 1.0
_MOMENT_S = 0.1


class Patience:
    """Time to wait for other processes, of which a pause of this one takes a moment: those were paused, too."""

    def __init__(self, seconds: float) -> None:
        self._left_s, self._last_s = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Return whether it is used up; called all the while."""
        now_s = time.monotonic()
        self._left_s -= min(now_s - self._last_s, _MOMENT_S)
        self._last_s = now_s
        return self._left_s <= 0


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
        memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        self._counts = np.frombuffer(memory[:_HEAD_BYTES], np.int64)
        size = (len(memory) - _HEAD_BYTES) // (_NUM_SLOTS * _WORD) * _WORD
        self._slots = [memory[at : at + size] for at in range(_HEAD_BYTES, _HEAD_BYTES + _NUM_SLOTS * size, size)]
        self._num = 0  # messages until now

    @property
    def max_bytes(self) -> int:
        """Return the size of the largest message."""
        return len(self._slots[0]) - _WORD


class RingWriter(_Mapped):
    """The first rank's end."""

    def __init__(self, descriptor: int, wakers: Sequence[int], *, timeout_s: float) -> None:
        """`wakers` are the eventfds that the readers sleep on."""
        super().__init__(descriptor)
        self._wakers, self._timeout_s = wakers, timeout_s

    def send(self, parts: Sequence[NDArray[Any]]) -> None:
        """Send a message to all readers. Raises RingError."""
        end, size = _WORD, sum(part.nbytes for part in parts)
        if size > self.max_bytes:
            raise RingError(f"A message of {size} bytes is larger than the ring has room for.")
        self._await_slot()
        slot = self._slots[self._num % _NUM_SLOTS]
        slot[:_WORD] = size.to_bytes(_WORD, "little")
        for part in parts:
            if part.nbytes:  # memory without a size cannot be cast
                slot[end : end + part.nbytes] = part.data.cast("B")
                end += part.nbytes
        self._num += 1
        self._counts[0] = self._num
        for waker in self._wakers:
            os.eventfd_write(waker, 1)

    def _await_slot(self) -> None:
        """Wait until all readers have read the message that the next one overwrites."""
        patience = Patience(self._timeout_s)
        while self._num - self._counts[1 : 1 + len(self._wakers)].min() >= _NUM_SLOTS:
            if patience.is_over():
                raise RingError(f"A rank of the model read no message for {self._timeout_s:g} s.")
            time.sleep(_NAP_S)


class RingReader(_Mapped):
    """Another rank's end."""

    def __init__(self, descriptor: int, waker: int, place: int, *, spins: bool) -> None:
        """`place` counts the readers from 0."""
        super().__init__(descriptor)
        self._waker, self._place = waker, 1 + place
        self._spins = spins and platform.machine() == "x86_64"
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def receive(self) -> memoryview:
        """Wait for the next message, and return its memory, which is valid until `release`."""
        end_s = time.monotonic() + (_SPIN_S if self._spins else 0.0)
        while self._counts[0] == self._num:
            if time.monotonic() >= end_s and self._poll.poll(_POLL_S * 1000):
                os.eventfd_read(self._waker)
        slot = self._slots[self._num % _NUM_SLOTS]
        return slot[_WORD : _WORD + int.from_bytes(slot[:_WORD], "little")]

    def release(self) -> None:
        """Give the memory of the last message back."""
        self._num += 1
        self._counts[self._place] = self._num
