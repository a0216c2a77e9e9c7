"""Has Triton's interpreter say which bytes a kernel reads and writes, for the order of tests/fake_device.py."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from tests import fake_device
from tests.fake_device import Access, Held
from tests.fake_order import OrderError, place


class _Touched:
    """The bytes that one launch has touched of the tensors it was given."""

    def __init__(self, memories: list[Held]) -> None:
        self._memories = sorted({each.address: each for each in memories}.values(), key=lambda each: each.address)
        self._begins = [each.address for each in self._memories]
        # By memory, whether it was written, and bytes of a number: flags of the numbers' first bytes.
        self._flags: dict[tuple[int, bool, int], NDArray[np.bool_]] = defaultdict(lambda: np.zeros(0, np.bool_))
        self.stray = ""

    def note(self, pointers: NDArray[np.uint64], mask: NDArray[np.bool_], item: int, *, is_write: bool) -> None:
        """Note the numbers that a mask keeps."""
        kept = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        while len(kept):
            at = bisect_right(self._begins, int(kept.min())) - 1
            memory = self._memories[at]
            is_here = kept < memory.address + len(memory.raw) - item + 1
            if at < 0 or not is_here.any():
                self.stray = f"byte {int(kept.min()) - memory.address} of {len(memory.raw)} of {memory.place}"
                return
            key = at, is_write, item
            if key not in self._flags:
                self._flags[key] = np.zeros(len(memory.raw), np.bool_)
            self._flags[key][kept[is_here] - memory.address] = True
            kept = kept[~is_here]

    def accesses(self) -> list[Access]:
        """Return what was touched."""
        return [
            Access(
                self._memories[at],
                (np.flatnonzero(flags)[:, None] + np.arange(item)).reshape(-1),
                is_write,
            )
            for (at, is_write, item), flags in self._flags.items()
        ]


_touched: _Touched | None = None  # by the launch that runs
_run = GridExecutor.__call__


def _launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Run a kernel, on the fake device if its tensors are there."""
    tensors = list(_tensors([*args, *kwargs.values()]))
    device, name = fake_device._active, self.fn.__name__
    if device is None or not any(map(device.is_on_device, tensors)):
        _run(self, *args, **kwargs)
        return
    if not all(map(device.is_on_device, tensors)):
        raise RuntimeError(f"{place(name)}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    memories = [held for held in map(device.find, tensors) if held is not None]

    def compute() -> list[Access]:
        global _touched  # noqa: PLW0603 - the interpreter runs one kernel at a time
        touched = _touched = _Touched(memories)
        try:
            with fake_device.away():
                _run(self, *args, **kwargs)
        finally:
            _touched = None
        if touched.stray:
            raise OrderError(f"{place(name)} goes beyond its tensors, to {touched.stray}")
        return touched.accesses()

    device.launch_kernel(name, compute)


def _noting(access: Callable[..., Any], mask_at: int | None, *, is_write: bool) -> Callable[..., Any]:
    """Return an access of the interpreter's that is noted; its pointers are the first argument that is a pointer's."""

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if _touched is not None:
            pointers = next(each for each in args if hasattr(each, "data") and each.data.dtype == np.uint64)
            is_kept = np.ones(pointers.data.shape, np.bool_) if mask_at is None else args[mask_at].data.astype(np.bool_)
            item = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
            _touched.note(pointers.data, is_kept, item, is_write=is_write)
        return access(self, *args, **options)

    return noted


@contextmanager
def watched_kernels() -> Iterator[None]:
    """Have launches of kernels on the fake device note their accesses."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", _launch))
        for name, mask_at, is_write in (
            ("create_masked_load", 1, False),
            ("create_masked_store", 2, True),
            ("create_atomic_rmw", 3, True),
            ("create_atomic_cas", None, True),
        ):
            noted = _noting(getattr(InterpreterBuilder, name), mask_at, is_write=is_write)
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, noted))
        yield


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
