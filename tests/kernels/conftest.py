"""The Triton kernels: on a CUDA device where there is one, else on the CPU under Triton's interpreter.

Triton reads the variable when it is imported, so it is set here, before a test module of this folder is. Three things that
a device does and the interpreter of Triton 3.6 does not are mended with it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]  # Triton is made for Linux alone


def interpret() -> None:
    """Choose the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch_tensor = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    cast, dot = builder.cast_impl, builder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        """A scalar is an array of one number, of which NumPy 2.4 makes no bound of a loop."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        """To bfloat16 it cuts digits off; devices round."""
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """It multiplies the bits of bfloat16 as if they were integers."""
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang_tensor, builder.cast_impl, builder.create_dot = patch, rounding_cast, wide_dot


if not torch.cuda.is_available() and find_spec("triton"):
    interpret()
