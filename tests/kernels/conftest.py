"""The Triton kernels: on a CUDA device where there is one, else on the CPU under Triton's interpreter.

tests/conftest.py has chosen which. What a device does and the interpreter of Triton 3.6 does not is mended here; what only the
interpreter allows is refused, here and by tests/fake_kernels.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]  # Triton is made for Linux alone


def mend() -> None:
    """Mend the interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[str] = set()  # modules whose functions can be called
    builder, patch_tensor = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    cast, dot, patch_lang = builder.cast_impl, builder.create_dot, interpreter._patch_lang
    floats = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }

    def patch(tensor: Any, scope: Any) -> None:
        """A scalar is an array of one number, of which NumPy 2.4 makes no bound of a loop."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_once(function: Any) -> Any:
        """It patches the language at every call of every function within a kernel, milliseconds each; once is enough."""
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_lang(function)
        return SimpleNamespace(restore=lambda: None)

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        """To bfloat16 it cuts digits off, or takes integers for bits; devices round."""
        if target.scalar != tl.bfloat16 or source.dtype.scalar not in (tl.float32, tl.int8):
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    def fp8_cast(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        """To fp8 it rounds ties up and loses the carry; devices round to even, and what is too large to the largest."""
        numbers = torch.frombuffer(bytearray(source.data.tobytes()), dtype=floats[source.dtype.scalar]).float()
        if target.scalar == tl.float8e4nv:
            numbers = numbers.clamp(-448.0, 448.0)
        bits = numbers.to(floats[target.scalar]).view(torch.uint8).numpy()
        kind = interpreter._get_np_dtype(target)
        return interpreter.TensorHandle(bits.view(kind).reshape(source.data.shape), target.scalar)

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """It multiplies the bits of bfloat16 as if they were integers."""
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_once, patch
    builder.cast_impl, builder.create_dot = rounding_cast, wide_dot
    builder.create_fp_to_fp = fp8_cast


def tighten() -> None:
    """Have the interpreter take no more than a device does."""
    from triton.backends.nvidia.compiler import min_dot_size
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    masked_load, set_attr = builder.create_masked_load, handle.set_attr

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        """It makes zeros of what a mask leaves out; on a device, without `other`, anything may stand there."""
        if other is None:
            kind = interpreter._get_np_dtype(pointers.get_element_ty())
            garbage = np.full((*pointers.data.shape, np.dtype(kind).itemsize), 0xFF, np.uint8).view(kind)[..., 0]
            other = interpreter.TensorHandle(garbage, pointers.get_element_ty())
        return masked_load(self, pointers, mask, other, *rest)

    def promise(self: Any, name: str, values: Any) -> None:
        """Check that a number divides as promised: a device then loads several values at once, and faults if it does not."""
        if name == "tt.divisibility" and (self.data % values[-1] != 0).any():
            raise AssertionError(f"{self.data.tolist()} are no multiples of {values[-1]}")
        set_attr(self, name, values)

    builder.create_masked_load, handle.set_attr = load, promise
    # Tensor cores sum up sixteen products at least; here one is enough.
    interpreter.interpreter_builder.codegen_fns["min_dot_size"] = min_dot_size(None)


def hasten() -> None:
    """Have the interpreter keep what it computes again for every number: types, shapes, and numpy's names of types."""
    import triton.language as tl
    from triton.runtime import interpreter

    types: dict[Any, Any] = {}  # block types, by element and shape; types of pointers
    shapes: dict[int, tuple[Any, dict[str, Any]]] = {}  # by a type's id: the type, and what its tensors have in common
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    def new_type(cls: Any, element: Any, shape: Any) -> Any:
        if cls is not tl.block_type or not all(type(size) is int for size in shape):
            return object.__new__(cls)
        key = id(element), *shape  # a type holds its element, so that no other gets the id
        return types[key] if key in types else types.setdefault(key, object.__new__(cls))

    def init_type(self: Any, element: Any, shape: Any) -> None:
        if not vars(self):
            make_type(self, element, shape)

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        known = shapes.get(id(kind))
        if known is not None and known[0] is kind:
            vars(self).update(known[1])
            self.handle = handle
            return
        make_tensor(self, handle, kind)
        shapes[id(kind)] = kind, {name: value for name, value in vars(self).items() if name != "handle"}

    def new_pointer(cls: Any, element_ty: Any, address_space: int = 1, const: bool = False) -> Any:
        key = cls, id(element_ty), address_space, const
        return types[key] if key in types else types.setdefault(key, object.__new__(cls))

    def patch_attribute(package: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(package, name, bound)

    # An overflow is computed, and then not asserted: that takes another option, or TRITON_DEBUG.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.TensorHandle.__post_init__ = lambda self: None  # asks whether an array has the size of its type
    tl.block_type.__new__, tl.block_type.__init__, tl.tensor.__init__ = new_type, init_type, init_tensor
    tl.pointer_type.__new__ = new_pointer
    interpreter._patch_attr = patch_attribute
    name = interpreter._get_np_dtype
    named = cache(name)
    # A pointer has no hash.
    interpreter._get_np_dtype = lambda kind: (
        name(kind) if isinstance(kind.scalar, tl.pointer_type) else named(kind.scalar)
    )


def hasten_operands() -> None:
    """Have the interpreter keep the types that two operands are brought to, and each constant.

    Operands are not spread to their common shape, as numpy does so itself where it computes with them.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    kept: dict[Any, Any] = {}  # by both types or constants and the rules: the operands, for their ids; the results
    semantic = interpreter.interpreter_semantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def key_of(operand: Any) -> Any:
        return id(operand.type) if isinstance(operand, tl.tensor) else (type(operand), operand)

    def bring(operand: Any, known: Any) -> Any:
        if not isinstance(operand, tl.tensor):
            return known
        if operand.type is known.type:
            return operand
        return tl.tensor(semantic.cast(operand, known.type.scalar).handle, known.type)

    def checked(lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        key = key_of(lhs), key_of(rhs), rules, *named.items()
        if key not in kept:
            kept[key] = lhs, rhs, *check(lhs, rhs, *rules, **named)
        _, _, left, right = kept[key]
        return bring(lhs, left), bring(rhs, right)

    def spread(operand: Any, kind: Any) -> Any:
        if operand.handle.data.shape == getattr(kind, "shape", operand.handle.data.shape):
            return operand if operand.type is kind else tl.tensor(operand.handle, kind)
        data = np.broadcast_to(operand.handle.data, kind.shape)
        return tl.tensor(interpreter.TensorHandle(data, operand.handle.dtype), kind)

    def broadcasted(lhs: Any, rhs: Any) -> Any:
        key = id(lhs.type), id(rhs.type)
        if key not in kept:
            kept[key] = lhs, rhs, *(each.type for each in broadcast(lhs, rhs))
        _, _, left, right = kept[key]
        return spread(lhs, left), spread(rhs, right)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, broadcasted


if not torch.cuda.is_available() and find_spec("triton"):
    from tests.fake_kernels import watch

    mend()
    tighten()
    hasten()
    hasten_operands()
    watch()
