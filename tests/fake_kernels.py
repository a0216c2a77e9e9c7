"""Has Triton's interpreter compare the accesses of a kernel's programs, and say which bytes it reads and writes.

The interpreter runs programs one after the other, and each from its first line to its last. A device promises neither: two
programs run at the same time, and one thread of a program may load a number before another stores it. So every launch refuses
what is right in the interpreter's order only. The bytes go to the device of tests/fake_device.py, if one is made up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from tests import fake_device
from tests.fake_device import Access, Held
from tests.fake_order import OrderError, place

_SEVERAL = -1  # programs
_MOST_BYTES = 1 << 30  # of memory whose accesses are compared; of more, tests want to know the bounds alone


class _Memory(NamedTuple):
    """Memory that a launch was given."""

    address: int
    num_bytes: int
    held: Held | None  # on the device

    @property
    def place(self) -> str:
        return "a tensor" if self.held is None else self.held.place


class _Marks:
    """What has been accessed of one memory, by numbers of one size, at the first byte of each."""

    def __init__(self, num_bytes: int) -> None:
        # The program that read or wrote it, from 1 on; between which barriers; and what place of a block read it.
        self.reader, self.writer, self.read, self.written = np.zeros((4, num_bytes), np.int32)
        self.lane = np.zeros(num_bytes, np.int64)


class _Touched:
    """The bytes that one launch has touched of the tensors it was given."""

    def __init__(self, name: str, memories: Sequence[_Memory]) -> None:
        self._name, self._program, self._section = name, 0, 0
        self._memories = sorted({each.address: each for each in memories}.values(), key=lambda each: each.address)
        self._begins = [each.address for each in self._memories]
        self._marks: dict[tuple[int, int], _Marks] = {}  # by memory, and bytes of a number
        self.fault = ""  # the first one; the interpreter wraps what is raised while it runs

    def begin_program(self) -> None:
        """Note that another program runs."""
        self._program += 1
        self._section += 1

    def pass_barrier(self) -> None:
        """Note that all threads of the program have come so far."""
        self._section += 1

    def note(self, kept: NDArray[np.int64], lanes: NDArray[np.int64], item: int, access: _Access) -> None:
        """Note an access to numbers at these addresses, each by a place of a block."""
        while len(kept):
            at = bisect_right(self._begins, int(kept.min())) - 1
            memory = self._memories[at]
            is_here = kept < memory.address + memory.num_bytes - item + 1
            if at < 0 or not is_here.any():
                byte = int(kept.min()) - memory.address
                self._refuse(f"goes beyond its tensors, to byte {byte} of {memory.num_bytes} of {memory.place}")
                raise OrderError(self.fault)  # there may be nothing, which would end this process
            if memory.num_bytes > _MOST_BYTES:
                return
            if (at, item) not in self._marks:
                self._marks[at, item] = _Marks(memory.num_bytes)
            if fault := access(self, self._marks[at, item], kept[is_here] - memory.address, lanes[is_here]):
                self._refuse(f"{fault} of {memory.place}")
            kept, lanes = kept[~is_here], lanes[~is_here]

    def load(self, marks: _Marks, at: NDArray[np.int64], lanes: NDArray[np.int64]) -> str:
        """Note a load; return what is wrong with it."""
        writer, reader = marks.writer[at], marks.reader[at]
        is_other = (marks.read[at] == self._section) & (marks.lane[at] != lanes)
        marks.lane[at] = np.where(is_other, _SEVERAL, lanes)
        marks.read[at] = self._section
        marks.reader[at] = np.where((reader == 0) | (reader == self._program), self._program, _SEVERAL)
        if ((writer != 0) & (writer != self._program)).any():
            return "loads what another program stores"
        if ((writer != 0) & (marks.written[at] == self._section)).any():
            return "loads what another thread may have yet to store, without a barrier in between, at a number"
        return ""

    def store(self, marks: _Marks, at: NDArray[np.int64], lanes: NDArray[np.int64]) -> str:
        """Note a store; return what is wrong with it."""
        writer, reader = marks.writer[at], marks.reader[at]
        marks.writer[at], marks.written[at] = self._program, self._section
        if ((writer != 0) & (writer != self._program)).any():
            return "stores where another program does"
        if ((reader != 0) & (reader != self._program)).any():
            return "stores what another program loads"
        if ((marks.read[at] == self._section) & (marks.lane[at] != lanes)).any():
            return "stores what another thread may have yet to load, without a barrier in between, at a number"
        return "stores two numbers in the same place" if len(np.unique(at)) < len(at) else ""

    def add(self, marks: _Marks, at: NDArray[np.int64], _: NDArray[np.int64]) -> str:
        """Note an atomic operation, which other programs may make at the same place."""
        marks.writer[at], marks.written[at] = self._program, self._section
        return ""

    def _refuse(self, fault: str) -> None:
        self.fault = self.fault or f"{place(self._name)} {fault}"

    def accesses(self) -> list[Access]:
        """Return what was touched on the device."""
        found = []
        for (at, item), marks in self._marks.items():
            held = self._memories[at].held
            for flags, is_write in ((marks.reader, False), (marks.writer, True)):
                first = np.flatnonzero(flags)
                if held is not None and len(first):
                    found.append(Access(held, (first[:, None] + np.arange(item)).reshape(-1), is_write))
        return found


# What notes an access, and returns what is wrong with it.
_Access = Callable[[_Touched, _Marks, NDArray[np.int64], NDArray[np.int64]], str]
_touched: _Touched | None = None  # by the launch that runs
_run = GridExecutor.__call__


def _launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Run a kernel, on the fake device if its tensors are there."""
    tensors = list(_tensors([*args, *kwargs.values()]))
    device, name = fake_device._active, self.fn.__name__
    is_on_device = device is not None and any(map(device.is_on_device, tensors))
    if is_on_device and not all(map(device.is_on_device, tensors)):  # type: ignore[union-attr]
        raise RuntimeError(f"{place(name)}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    memories = [_memory(each, device.find(each) if device is not None else None) for each in tensors]

    def compute() -> list[Access]:
        global _touched  # noqa: PLW0603 - the interpreter runs one kernel at a time
        touched = _touched = _Touched(name, memories)
        try:
            with fake_device.away():
                _run(self, *args, **kwargs)
        except InterpreterError:  # which has an error's text alone
            if not touched.fault:
                raise
        finally:
            _touched = None
        if touched.fault:
            raise OrderError(touched.fault)
        return touched.accesses()

    if device is not None and is_on_device:
        device.launch_kernel(name, compute)
    else:
        compute()


def _memory(tensor: Tensor, held: Held | None) -> _Memory:
    storage = tensor.untyped_storage()
    return _Memory(storage.data_ptr(), storage.nbytes(), held)


def _noting(access: Callable[..., Any], mask_at: int | None, note: _Access) -> Callable[..., Any]:
    """Return an access of the interpreter's that is noted; its pointers are the first argument that is a pointer's."""

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if _touched is not None:
            pointers = next(each for each in args if hasattr(each, "data") and each.data.dtype == np.uint64)
            is_kept = np.bool_(True) if mask_at is None else args[mask_at].data.astype(np.bool_)
            lanes = np.flatnonzero(np.broadcast_to(is_kept, pointers.data.shape))
            kept = pointers.data.reshape(-1)[lanes].astype(np.int64)
            item = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
            _touched.note(kept, lanes + (pointers.data.size << 32), item, note)
        return access(self, *args, **options)

    return noted


def _telling(call: Callable[..., Any], tell: Callable[[_Touched], None]) -> Callable[..., Any]:
    """Return a method of the interpreter that first reports to the launch."""

    def told(*args: Any) -> Any:
        if _touched is not None:
            tell(_touched)
        return call(*args)

    return told


def watch() -> None:
    """Have all launches compare their accesses. Nothing undoes it."""
    GridExecutor.__call__ = _launch
    builder = InterpreterBuilder
    builder.create_masked_load = _noting(builder.create_masked_load, 1, _Touched.load)
    builder.create_masked_store = _noting(builder.create_masked_store, 2, _Touched.store)
    builder.create_atomic_rmw = _noting(builder.create_atomic_rmw, 3, _Touched.add)
    builder.create_atomic_cas = _noting(builder.create_atomic_cas, None, _Touched.add)
    builder.set_grid_idx = _telling(builder.set_grid_idx, _Touched.begin_program)
    builder.create_barrier = _telling(builder.create_barrier, _Touched.pass_barrier)


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
