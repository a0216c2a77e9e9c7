"""Weights quantised to float8_e4m3fn at load, with a scale for each row, multiplied by CUDA's tensor cores."""

from __future__ import annotations

from functools import partial

import torch

from engine.runtime.cuda.available import has_triton
from engine.runtime.schemes.linear import Product
from engine.runtime.schemes.scheme import FOREIGN, Circumstances, Matrix, Scheme
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
        """Return why it is not available; None if it is."""
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
        """Return the product in fp8, or in the model's type for a head or unsuitable sides."""
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
        """Return how many of the checkpoint's matrices are in fp8."""
        odd = f"; {self._num_plain}, of sides that are no multiples of {MULTIPLE}, stay as they are"
        return f"fp8: {self._num_fp8} matrices{odd if self._num_plain else ''}"
