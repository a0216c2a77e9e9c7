"""Calls of the native library, recorded with all memory they read, and made again by a library for another machine.

An image is a file with tables of the calls and of kinds of parts, then the memory of each call. `replay.c` maps it at an address
of its own, for which pointers in structures are changed. Structures are the same on every 64-bit machine with low bytes first.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Array, Structure, addressof, sizeof, string_at
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.runtime.native.decoder import NativeDecoder
from engine.runtime.native.library import Library
from engine.runtime.native.ops import NativeLinear

DRIVER = Path(__file__).with_name("replay.c")
_OUT, _BASE, _TABLE, _ENTRY = 0x100000000000, 0x110000000000, 1 << 16, 64  # as in replay.c


class Recording:
    """Calls, and their results here."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._calls: list[bytes] = []
        self._memory = bytearray()
        self._copies: dict[tuple[int, int], tuple[int, bytes]] = {}  # of regions without pointers: the last, and where
        self.results: list[Tensor] = []

    @contextmanager
    def __call__(self, *roots: Any) -> Iterator[None]:
        """Record the products and forward passes of a block; `roots` lead to the memory that they use."""
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch, NativeDecoder, "forward", "forward", "hidden", roots)
            self._patch(patch, NativeLinear, "__call__", "gemm", "y", roots)
            yield

    def _patch(
        self, patch: pytest.MonkeyPatch, owner: type, method: str, entry: str, out: str, roots: Sequence[Any]
    ) -> None:
        whole, inner = getattr(owner, method), getattr(self.library, entry)
        used: list[Any] = []
        places: list[int] = []

        def in_python(*args: Any, **kwargs: Any) -> Tensor:
            used[:] = [*args, *kwargs.values(), *roots]
            result = whole(*args, **kwargs)
            numbers = places.pop(), result.nbytes
            self._calls.append(_entry(f"quire_{entry}", *numbers))
            self.results.append(result.clone())
            return result

        def in_c(args: Structure) -> None:
            ours = type(args).from_buffer_copy(args)
            setattr(ours, out, _OUT)
            places.append(self._copy(ours, used))
            inner(args)

        patch.setattr(owner, method, in_python)
        patch.setattr(self.library, entry, in_c)

    def _copy(self, args: Structure, used: Sequence[Any]) -> int:
        """Append the memory of a call, but for what has not changed since it was copied; return the address of `args` there."""
        regions = np.array(_joined(_memory([args, *used])))
        places = []
        for begin, end, has_pointers in regions.tolist():
            content = string_at(begin, end - begin)
            place, known = self._copies.get((begin, end), (0, None))
            if has_pointers or content != known:
                self._memory += bytes((begin - len(self._memory)) % _ENTRY)
                place = _BASE + 2 * _TABLE + len(self._memory)
                self._memory += content
                self._copies[begin, end] = place, content
            places.append(place)
        moves = np.array(places) - regions[:, 0]
        for place, (begin, end, has_pointers) in zip(places, regions.tolist(), strict=True):
            if has_pointers:
                at = place - _BASE - 2 * _TABLE
                words = np.frombuffer(self._memory[at : at + end - begin], np.int64).copy()
                nearest = np.maximum(np.searchsorted(regions[:, 0], words, "right") - 1, 0)
                is_inside = (words >= regions[nearest, 0]) & (words < regions[nearest, 1])
                for index, kind in enumerate(self.library._kinds.values()):
                    words[words == kind] = _BASE + _TABLE + index * _ENTRY + 48
                words[is_inside] += moves[nearest[is_inside]]
                self._memory[at : at + end - begin] = words.tobytes()
        return int(addressof(args) + moves[np.searchsorted(regions[:, 0], addressof(args), "right") - 1])

    def replay(self, command: Sequence[str], image: Path) -> list[Tensor]:
        """Return the results of a driver's kernels: `command` runs it with a library."""
        kinds = [_entry(f"kind_{name}", 0, 0) for name in self.library._kinds]
        tables = (b"".join(entries).ljust(_TABLE, b"\0") for entries in (self._calls, kinds))
        image.write_bytes(b"".join((*tables, self._memory)))
        run = subprocess.run([*command, str(image)], capture_output=True, check=False)
        image.unlink()  # up to 2 GB, which would stay on the disk with others until later runs
        assert run.returncode == 0, run.stderr.decode()
        flat = torch.frombuffer(bytearray(run.stdout), dtype=torch.uint8)
        parts = flat.split([each.nbytes for each in self.results])
        return [part.clone().view(each.dtype).view(each.shape) for part, each in zip(parts, self.results, strict=True)]


def _entry(name: str, first: int, second: int) -> bytes:
    """Return an entry of a table: a name, and two numbers."""
    return name.encode().ljust(48, b"\0") + np.array([first, second]).tobytes()


def _memory(roots: Iterable[Any]) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, has pointers) of the tensors, arrays and structures that objects lead to."""
    seen: set[int] = set()
    queue = list(roots)
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType | Library):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            whole = each.untyped_storage()
            begin, size = (each.data_ptr(), each.nbytes) if each.is_contiguous() else (whole.data_ptr(), whole.nbytes())
            yield begin, begin + size, False
        elif isinstance(each, np.ndarray):
            yield each.ctypes.data, each.ctypes.data + each.nbytes, False
        elif isinstance(each, Structure | Array):
            yield addressof(each), addressof(each) + sizeof(each), True
        else:
            queue += gc.get_referents(each)


def _joined(memory: Iterable[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Return regions in order, those that overlap as one."""
    found: list[tuple[int, int, bool]] = []
    for begin, end, has_pointers in sorted(memory):
        if found and begin < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end), found[-1][2] or has_pointers
        elif end > begin:
            found.append((begin, end, has_pointers))
    return found
