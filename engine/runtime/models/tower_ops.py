"""The long operations of a vision tower on a CPU: by the native library, others in blocks of rows. Engine thread.

A tower is code for torch. Here its matrix products and attentions go to the library, which makes them on the team of threads
that steps have, where the library has their type, and may pause within them. Torch may between blocks (pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.runtime.activation import Activation
from engine.runtime.native.library import DTYPES, AttendArgs, Library, Pool, StoreArgs, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear
from engine.runtime.schemes.linear import Product, pack

_BLOCK = 1 << 30  # multiplications; some 5 ms of two cores with bfloat16 instructions
_KEYS = 128  # of a block of the library's pool
# By a class of transformers, or what torch's has as `approximate`. Torch computes them on one thread.
_GELUS = dict.fromkeys(("GELUActivation", "none"), Activation.GELU_ALONE)
_GELUS |= dict.fromkeys(("GELUTanh", "tanh"), Activation.GELU_TANH_ALONE)
_WIDTH = 16  # of which a head's width is a multiple, or attention is slow


class TowerOps(TorchFunctionMode):
    """Runs the long operations of a module's code."""

    def __init__(self, model: nn.Module) -> None:
        """Pack the matrices of a module's linear layers, of which only the packed form stays."""
        super().__init__()
        self._library, self._products = native(), dict[Tensor, Product]()
        for layer in model.modules():
            if type(layer) in (nn.Linear, nn.Conv3d):
                self._pack(layer)
            linears = [each for each in layer.children() if type(each) is nn.Linear]
            is_mlp = len(linears) == 2 and linears[0].out_features == linears[1].in_features
            for name, each in layer.named_children():
                gelu = _GELUS.get(getattr(each, "approximate", type(each).__name__))
                if is_mlp and gelu and self._pack(linears[0], gelu):
                    setattr(layer, name, nn.Identity())

    def _pack(self, layer: Any, activation: Activation | None = None) -> bool:
        """Pack a matrix, if it is not; return whether its product includes the activation."""
        if layer.weight in self._products:
            return False
        product = self._products[layer.weight] = pack(layer.weight.detach().flatten(1), layer.bias, activation)
        if is_native := isinstance(product, NativeLinear):
            layer.weight.data = layer.weight.new_zeros(()).expand_as(layer.weight)
        return is_native

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.conv3d) and args[1] in self._products:  # one of patches, which are its batch
            x, weight = args[:2]
            product, rows = self._products[weight], x.reshape(-1, weight[0].numel()).contiguous()
            is_whole = isinstance(product, NativeLinear)
            made = product(rows) if is_whole else _by_rows(product, rows, weight.numel())
            return made.view((*x.shape[:-1], len(weight)) if func is F.linear else (-1, len(weight), 1, 1, 1))
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
        num, heads, width = keys.shape
        pool = torch.empty(2, -(-num // _KEYS), heads, _KEYS, width, dtype=keys.dtype)
        blocks, slots = torch.arange(pool.shape[1], dtype=torch.int32), torch.arange(num)
        starts, ends = torch.tensor([0, num], dtype=torch.int32), torch.full((num,), num, dtype=torch.int32)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        args = Pool(
            pool[0].data_ptr(), pool[1].data_ptr(), pool.stride(2), pool.stride(1), heads, width, _KEYS,
            dtype=DTYPES[keys.dtype],
        )  # fmt: skip
        rows = keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0)
        library.store(StoreArgs(args, *rows, num, slots.data_ptr()))
        library.attend(
            AttendArgs(
                args, queries.data_ptr(), out.data_ptr(), queries.stride(0), heads, 1, len(blocks),
                query_starts=starts.data_ptr(), context_lens=ends.data_ptr(), block_tables=blocks.data_ptr(),
                ends=ends.data_ptr(), scale=scale,
            )
        )  # fmt: skip
        return out[..., : q.shape[-1]].transpose(0, 1)


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
