"""Weights of a quantised checkpoint, multiplied as stored where this device has a product for them.

On a CPU the native library multiplies rows of 4 or 8 bits. On CUDA tensor cores multiply FP8 with a scale for a row or
for a part, and kernels decode other codes of 4 or 8 bits. Other matrices are dequantised while they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from engine.runtime.cuda.available import has_fp8, has_triton
from engine.runtime.native.build import Isa
from engine.runtime.native.library import WeightFormat, native
from engine.runtime.native.ops import format_for, is_served_quantised
from engine.runtime.native.rows import RepackedRows
from engine.runtime.schemes.linear import (
    FOREIGN,
    Circumstances,
    Matrix,
    Product,
    Scheme,
    native_product,
    native_refusal,
)
from engine.runtime.weights.stored.packed import Blocks, repacked
from engine.runtime.weights.stored.storage import Storage

MULTIPLE = 16  # multiple required of both dimensions of a weight
FIRST_CAPABILITY = (9, 0)  # compute capability; the first with a product that scales every row


class Fp8Scheme(Scheme):
    """Any weights but the head's, rounded to FP8 on CUDA; only asked for by name."""

    def __init__(self, storage: Storage | None = None) -> None:
        super().__init__(storage)
        self._num_fp8 = self._num_plain = 0

    @classmethod
    def refusal(cls, here: Circumstances) -> str | None:
        device, dtype = here.device, str(here.dtype).removeprefix("torch.")
        if device.type != "cuda":
            return f"fp8 weights are for a CUDA device, and the device is {device}; choose int8"
        if not here.is_own:
            return FOREIGN
        capability = torch.cuda.get_device_capability(device)
        if capability < FIRST_CAPABILITY:
            return (
                f"it needs compute capability {'.'.join(map(str, FIRST_CAPABILITY))} or newer, and "
                f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; leave it out"
            )
        if not has_triton(device):
            return "it needs the package triton; install it, or leave it out"
        if here.dtype != torch.bfloat16:
            return f"its products are bfloat16, and --dtype is {dtype!r}; set it to bfloat16"
        return None

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Return whether a device multiplies FP8 with a scale for each row."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
            return False
        return has_triton(device)

    def product(self, matrix: Matrix) -> Product:
        if matrix.is_head:
            return super().product(matrix)
        if any(side % MULTIPLE for side in matrix.shape):
            self._num_plain += len(matrix.bundles)
            return super().product(matrix)
        from engine.runtime.cuda.fp8_linear import Fp8Linear  # imports Triton, which a CPU-only machine may lack

        self._num_fp8 += len(matrix.bundles)
        weight = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
        product = Fp8Linear(weight, matrix.bias)
        for bundle in matrix.bundles:
            product.load(bundle.first_row, bundle.num_rows, partial(self.dequantise, bundle))
        return product

    def summary(self) -> str:
        odd = f"; {self._num_plain}, of sides that are no multiples of {MULTIPLE}, stay as they are"
        return f"fp8: {self._num_fp8} matrices{odd if self._num_plain else ''}"


_BITS = {2: "4", 3: "4", 8: "8", 39: "4"}  # of a weight, by GGUF's numbers


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: waking others for scales takes longer than they save, above all on a busy machine."""
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num)


class StoredScheme(Scheme):
    """A matrix is kept as stored if all of its parts can be multiplied so, else dequantised."""

    def __init__(self, storage: Storage | None = None) -> None:
        super().__init__(storage)
        self._counts: Counter[str] = Counter()

    @classmethod
    def is_default(cls, here: Circumstances) -> bool:
        """Return whether the weights of a quantised checkpoint are faster than floats; on a CPU --dtype asks for these."""
        is_fast = here.library is not None and here.library.prefers_codes and not here.is_dtype_named
        return (here.device.type != "cpu" or is_fast) and cls.refusal(here) is None

    @classmethod
    def refusal(cls, here: Circumstances) -> str | None:
        if here.storage.method is None:
            return "the checkpoint is not quantised; int8 quantises any on a CPU, and fp8 on CUDA"
        if not here.is_own:
            return FOREIGN
        return native_refusal(here) if here.device.type == "cpu" else None

    def product(self, matrix: Matrix) -> Product:
        is_on_cpu = matrix.device.type == "cpu"
        made = self._native(matrix) if is_on_cpu else self._fp8(matrix) or self._packed(matrix)
        if made is not None:
            return made
        if any(self.storage.is_packed(bundle.name) for bundle in matrix.bundles):
            self._counts[f"dequantised to {str(matrix.dtype).removeprefix('torch.')}"] += len(matrix.bundles)
        return super().product(matrix)

    def _native(self, matrix: Matrix) -> Product | None:
        """Return the native library's product; None if no rows hold the matrix."""
        library = native()
        if library is None or matrix.dense is not None:
            return None
        parts: list[RepackedRows] = []
        for bundle in matrix.bundles:
            with _one_thread():
                packed = self.storage.unpack(bundle.name, bundle.tensors)
                rows = None if packed is None else repacked(packed)
            if rows is None:
                return None
            parts.append(rows)
        kinds = [part.kind for part in parts]
        if not is_served_quantised(kinds):
            return None
        self._counts.update(f"in {_BITS[kind]} bits" for kind in kinds)
        goes_whole = library.isa is Isa.AMX and not matrix.is_head and all(part.has_one_scale for part in parts)
        return native_product(library, WeightFormat.INT8 if goes_whole else format_for(kinds), parts, matrix)

    def _fp8(self, matrix: Matrix) -> Product | None:
        """Return the product on tensor cores; None if the matrix is not FP8 with scales for rows."""
        if matrix.dtype != torch.bfloat16 or matrix.is_head or any(side % MULTIPLE for side in matrix.shape):
            return None
        if not Fp8Scheme.serves(matrix.device):
            return None
        parts = [self.storage.unpack(bundle.name, bundle.tensors) for bundle in matrix.bundles]
        blocks = [part for part in parts if isinstance(part, Blocks) and part.scales.shape[1] == 1]
        if len(blocks) < len(parts) or any(part.block[0] != 1 for part in blocks):
            return None
        from engine.runtime.cuda.fp8_linear import Fp8Linear  # imports Triton, which a CPU-only machine may lack

        product = Fp8Linear(torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device), matrix.bias)
        for bundle, part in zip(matrix.bundles, blocks, strict=True):
            product.store(bundle.first_row, part.values.read(), part.scales)
        self._counts["in fp8"] += len(matrix.bundles)
        return product

    def _packed(self, matrix: Matrix) -> Product | None:
        """Return the product of our kernels, which decode codes; None if they lack a part's, or for a head."""
        if matrix.is_head or matrix.dense is not None or not has_triton(matrix.device):
            return None
        unpacked = [self.storage.unpack(bundle.name, bundle.tensors) for bundle in matrix.bundles]
        parts = [part for part in unpacked if part is not None]
        if len(parts) < len(unpacked):
            return None
        from engine.runtime.cuda.packed import pack_rows  # imports Triton, which a CPU-only machine may lack
        from engine.runtime.cuda.packed_linear import PackedProduct

        rows = pack_rows(parts)
        if rows is None or (rows.kind == "fp8" and not has_fp8(matrix.device)):
            return None
        self._counts["in 4 bits" if rows.kind in ("int4", "mxfp4") else "in 8 bits"] += len(parts)
        return PackedProduct(rows._replace(bias=matrix.bias).on(matrix.device))

    def summary(self) -> str:
        """Return how the packed matrices are multiplied."""
        found = ", ".join(f"{count} {how}" for how, count in sorted(self._counts.items()))
        return f"{self.storage.method}: matrices as stored: {found}" if found else ""
