"""The long operations of a vision tower on a CPU: by the native library, and in blocks of rows. Engine thread.

A tower is code for torch. Here its matrix products and attentions go to the library, which makes them on the team of threads
that steps have, where the library has their type. Between blocks a computation can be interrupted (pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.runtime.native.library import DTYPES, AttendArgs, Library, Pool, StoreArgs, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear
from engine.runtime.schemes.linear import Product, pack

_BLOCK = 1 << 30  # multiplications; some 5 ms of two cores with bfloat16 instructions
_KEYS = 128  # of a block of the library's pool
_WIDTH = 16  # of which a head's width is a multiple, or attention is slow


class TowerOps(TorchFunctionMode):
    """Runs the long operations of a module's code."""

    def __init__(self, model: nn.Module) -> None:
        """Pack the matrices of a module's linear layers, of which only the packed form stays."""
        super().__init__()
        self._library, self._products = native(), dict[Tensor, Product]()
        for layer in model.modules():
            if type(layer) is nn.Linear:
                self._products[layer.weight] = product = pack(layer.weight.detach(), layer.bias)
                if isinstance(product, NativeLinear):
                    layer.weight.data = layer.weight.new_zeros(()).expand_as(layer.weight)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[1] in self._products:
            x, weight = args[:2]
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return _by_rows(self._products[weight], rows, weight.numel()).view(*x.shape[:-1], len(weight))
        if func is F.conv3d:  # of patches, which are its batch
            return _by_rows(lambda rows: func(rows, *args[1:], **kwargs), args[0], args[1].numel())
        if func is F.scaled_dot_product_attention and _sees_all(*args[3:], **kwargs):
            q, k, v = args[:3]
            if self._library is None or q.dtype not in FLOAT_FORMATS or not q.shape == k.shape == v.shape:
                return _by_rows(lambda rows: func(rows, *args[1:], **kwargs), q, 2 * k.numel(), -2)
            scale = kwargs.get("scale") or q.shape[-1] ** -0.5
            return torch.stack(
                [self._attend(self._library, *of_image, scale) for of_image in zip(q, k, v, strict=True)]
            )
        return func(*args, **kwargs)

    def _attend(self, library: Library, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention [heads, T, width] of an image that sees all of itself."""
        queries, keys, values = [_padded(heads.transpose(0, 1)) for heads in (q, k, v)]
        found = _by_rows(_Keys(library, keys, values, scale), queries, 2 * keys.numel())
        return found[..., : q.shape[-1]].transpose(0, 1)


class _Keys:
    """The keys and values of an image, [T, heads, width] each, in a pool of the library."""

    def __init__(self, library: Library, keys: Tensor, values: Tensor, scale: float) -> None:
        num_keys, heads, width = keys.shape
        self._library, self._scale = library, scale
        self._pool = torch.empty(2, -(-num_keys // _KEYS), heads, _KEYS, width, dtype=keys.dtype)
        self._blocks, self._num_keys = torch.arange(self._pool.shape[1], dtype=torch.int32), num_keys
        k, v = self._pool
        self._args = Pool(k.data_ptr(), v.data_ptr(), k.stride(1), k.stride(0), heads, width, _KEYS)
        self._args.dtype = DTYPES[keys.dtype]
        slots = torch.arange(num_keys)
        rows = keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0)
        library.store(StoreArgs(self._args, *rows, num_keys, slots.data_ptr()))

    def __call__(self, queries: Tensor) -> Tensor:
        """Return the results of some queries [T, heads, width]."""
        num, heads, _ = queries.shape
        starts, ends = torch.tensor([0, num], dtype=torch.int32), torch.full((num,), self._num_keys, dtype=torch.int32)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        args = AttendArgs(
            self._args, queries.data_ptr(), out.data_ptr(), queries.stride(0), heads, 1, len(self._blocks)
        )
        args.query_starts, args.context_lens = starts.data_ptr(), ends.data_ptr()
        args.block_tables, args.ends, args.scale = self._blocks.data_ptr(), ends.data_ptr(), self._scale
        self._library.attend(args)
        return out


def _sees_all(attn_mask: Tensor | None = None, _dropout: float = 0.0, is_causal: bool = False, **_: Any) -> bool:
    return attn_mask is None and not is_causal


def _padded(rows: Tensor) -> Tensor:
    """Return rows [T, heads, width] as the library reads them, with zeros up to a width that it is made for."""
    _, heads, width = rows.shape
    if width % _WIDTH == 0 and rows.stride()[1:] == (width, 1):
        return rows
    padded = rows.new_zeros(len(rows), heads, -(-width // _WIDTH) * _WIDTH)
    padded[..., :width] = rows
    return padded


def _by_rows(product: Callable[[Tensor], Tensor], x: Tensor, num_products: int, dim: int = 0) -> Tensor:
    """Return the product of blocks of rows of x, each of which takes so many multiplications."""
    parts = [product(rows) for rows in x.split(max(_BLOCK // num_products, 1), dim)]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
