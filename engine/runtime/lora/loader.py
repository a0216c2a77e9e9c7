"""Loads an adapter from a PEFT folder, on any thread, while the engine continues.

Weights are read from adapter_model.safetensors only, because a pickled file can run code. Everything is checked against
the model before any tensor is read in full.

An adapter in memory is two thin matrices for each matrix that it changes, and its rows. It is immutable, and read by the engine
thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, c_void_p
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.core.errors import AdapterLoadError
from engine.core.rows import SequenceSlice
from engine.core.types import Adapter
from engine.hub.files import LORA_WEIGHTS
from engine.runtime.layers.parts import AdaptedMatrix, Target
from engine.runtime.native.arena import Arena
from engine.runtime.native.library import AdaptersArgs, LowRankArgs
from engine.runtime.schemes.linear import Addend, Linear, pack
from engine.runtime.transfer import to_device
from engine.runtime.weights.checkpoint import FLOATS
from engine.runtime.weights.safetensors import language_name
from engine.sources.adapter_config import LoraConfig, check_folder


class LowRank(NamedTuple):
    """A term of a product x W^T: (x down^T) up^T; `up` includes the adapter's scale."""

    down: Linear  # [rank, inputs]
    up: Linear  # [outputs, rank], an Addend's


class LoraAdapter:
    """The matrices of an adapter, and what requests name it by."""

    def __init__(self, name: str, digest: bytes, layers: Sequence[Sequence[LowRank | None]]) -> None:
        """`layers` has an entry for each layer, with an entry for each AdaptedMatrix."""
        self.name, self.digest, self.layers = name, digest, layers
        self.native = _describe(layers)


class AdapterRows(NamedTuple):
    """The rows of a step that use one adapter."""

    adapter: LoraAdapter
    rows: Tensor  # [R] int64, on the model's device


def group_rows(
    slices: Sequence[SequenceSlice], device: torch.device, find: Callable[[Adapter], LoraAdapter]
) -> list[AdapterRows]:
    """Group the step's tokens by adapter; tokens without one are in no group."""
    found: dict[Adapter, list[int]] = {}
    end = 0
    for piece in slices:
        begin, end = end, end + piece.num_tokens
        adapter = piece.params.adapter
        if adapter is not None:
            found.setdefault(adapter, []).extend(range(begin, end))
    return [AdapterRows(find(adapter), to_device(rows, torch.int64, device)) for adapter, rows in found.items()]


def addends(groups: Sequence[AdapterRows], layer: int, place: AdaptedMatrix, x: Tensor) -> list[Addend]:
    """Return the adapters' terms of the product of x [T, inputs] with one matrix."""
    return [
        Addend(group.rows, _low(low_rank, x.index_select(0, group.rows)), low_rank.up)
        for group in groups
        if (low_rank := group.adapter.layers[layer][place]) is not None
    ]


def _low(low_rank: LowRank, x: Tensor) -> Tensor:
    """Return x down^T, unrounded if the native library continues with it."""
    return low_rank.down.in_float32(x) if low_rank.down.args is not None else low_rank.down(x)


class NativeAdapters:
    """A step's groups for the native library; `args` is valid while this lives."""

    def __init__(self, groups: Sequence[AdapterRows], num_rows: int) -> None:
        self._of_rows = torch.full((num_rows,), -1, dtype=torch.int32)
        self._layers = (c_void_p * len(groups))()
        for index, (adapter, rows) in enumerate(groups):
            assert adapter.native is not None
            self._of_rows[rows] = index
            self._layers[index] = addressof(adapter.native)
        num_layers = min((len(adapter.layers) for adapter, _ in groups), default=0)  # all have the model's last
        self.args = AdaptersArgs(addressof(self._layers), self._of_rows.data_ptr(), len(groups), num_layers)


def _describe(layers: Sequence[Sequence[LowRank | None]]) -> Array[LowRankArgs] | None:
    """Describe the adapter to the native library; None if that lacks a matrix."""
    described = (LowRankArgs * (len(layers) * len(AdaptedMatrix)))()
    for at, low_rank in enumerate(low_rank for places in layers for low_rank in places):
        if low_rank is not None:
            down, up = low_rank.down.args, low_rank.up.args
            if down is None or up is None:
                return None
            described[at] = LowRankArgs(down, up)
    return described


_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class _Part(NamedTuple):
    """The two matrices of one module, in their file."""

    target: Target
    rank: int
    scale: float
    module: str


class LoraLoader:
    """Reads adapters for one model."""

    def __init__(
        self, targets: Mapping[str, Target], *, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`targets` are the model's matrices by their checkpoint names."""
        self._targets, self._max_rank, self._dtype, self._device = targets, max_rank, dtype, device

    def load(self, name: str, folder: str) -> LoraAdapter:
        """Read, check and pack. Raises AdapterNotFoundError or AdapterLoadError."""
        path = Path(folder)
        try:
            return self._load(name, path)
        except (SafetensorError, OSError) as error:
            raise AdapterLoadError(f"{path} cannot be read ({error}); save it again.") from error
        except (MemoryError, RuntimeError) as error:  # torch raises the latter when memory is short
            raise AdapterLoadError(
                f"{path} cannot be loaded ({type(error).__name__}: {error}); if memory is short, unload another adapter first."
            ) from error

    @torch.inference_mode()
    def _load(self, name: str, path: Path) -> LoraAdapter:
        config = check_folder(path)
        with _open(path) as file:
            parts = self._check(path, config, file)
            digest = blake2b(digest_size=32, person=b"quire.adapter")
            merged: dict[tuple[int, AdaptedMatrix], list[tuple[_Part, Tensor, Tensor]]] = {}
            for part in parts:
                sides = [file.get_tensor(_tensor_name(part.module, side)) for side in "AB"]
                digest.update(f"{part.module} {part.scale} {part.rank} ".encode())  # the rank is where a matrix ends
                for side in sides:
                    digest.update(f"{side.dtype}".encode() + side.contiguous().view(torch.uint8).numpy().data)
                merged.setdefault((part.target.layer, part.target.place), []).append((part, sides[0], sides[1]))
        arena = Arena()
        num_layers = 1 + max(target.layer for target in self._targets.values())
        layers: list[list[LowRank | None]] = [[None] * len(AdaptedMatrix) for _ in range(num_layers)]
        for (layer, place), matrices in sorted(merged.items(), key=lambda item: item[0]):
            layers[layer][place] = self._merge(matrices, arena)
        return LoraAdapter(name, digest.digest(), layers)

    def step_bytes(self, num_tokens: int) -> int:
        """Return the additional bytes of a step whose tokens all have adapters."""
        return num_tokens * max(sum(target.shape) for target in self._targets.values()) * self._dtype.itemsize

    def adapter_bytes(self) -> int:
        """Return the bytes of an adapter of the highest rank that changes every matrix."""
        wholes = {(target.layer, target.place): target.shape for target in self._targets.values()}
        ranks = dict.fromkeys(wholes, 0)
        for target in self._targets.values():
            ranks[target.layer, target.place] += self._max_rank
        return sum(sum(shape) * ranks[key] for key, shape in wholes.items()) * self._dtype.itemsize

    def _check(self, folder: Path, config: LoraConfig, file: Any) -> list[_Part]:
        """Return the parts of the file, by module."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            found = _NAME.fullmatch(name)
            if found is None or language_name(found["module"]) not in self._targets:
                raise AdapterLoadError(self._unknown(folder, name, found))
            view = file.get_slice(name)
            if view.get_dtype() not in FLOATS:
                raise AdapterLoadError(f"{folder}: {name} is stored as {view.get_dtype()}; it must be a float.")
            shapes.setdefault(found["module"], {})[found["side"]] = tuple(view.get_shape())
        if not shapes:
            raise AdapterLoadError(f"{folder} holds no LoRA weights.")
        return [self._part(folder, config, module, sides) for module, sides in sorted(shapes.items())]

    def _part(self, folder: Path, config: LoraConfig, module: str, sides: Mapping[str, tuple[int, ...]]) -> _Part:
        # Of a model inside another, modules have its name before theirs.
        target, rank = self._targets[language_name(module) or module], config.rank_of(module)
        if rank > self._max_rank:
            raise AdapterLoadError(
                f"{folder}: the rank of {module} is {rank}, more than --max-lora-rank {self._max_rank}; raise that."
            )
        for side, expected in (("A", (rank, target.shape[1])), ("B", (target.num_rows, rank))):
            if side not in sides:
                raise AdapterLoadError(f"{folder} lacks {_tensor_name(module, side)}.")
            if sides[side] != expected:
                raise AdapterLoadError(
                    f"{folder}: {_tensor_name(module, side)} has shape {list(sides[side])}, and a rank of {rank} for this "
                    f"model asks for {list(expected)}; it may be another model's adapter."
                )
        return _Part(target, rank, config.scale_of(module), module)

    def _unknown(self, folder: Path, name: str, found: re.Match[str] | None) -> str:
        known = sorted({target.rpartition(".")[2] for target in self._targets})
        if found is None:
            return f"{folder}: {name!r} is not a LoRA weight as PEFT names them; only those are supported."
        return (
            f"{folder}: it changes {found['module']}, which this model cannot have changed; {', '.join(known)} can be."
        )

    def _merge(self, parts: list[tuple[_Part, Tensor, Tensor]], arena: Arena) -> LowRank:
        """Merge the parts' pairs into one pair, each part in separate rows and columns."""
        num_outputs, num_inputs = parts[0][0].target.shape
        rank = sum(part.rank for part, _, _ in parts)
        rank += rank % 2  # the native library multiplies pairs
        down, up = torch.zeros(rank, num_inputs), torch.zeros(num_outputs, rank)
        at = 0
        for (target, own_rank, scale, _), a, b in parts:
            a, b = a if target.input_order is None else a[:, target.input_order], b.float() * scale
            b = b if target.row_order is None else b[target.row_order]
            down[at : at + own_rank] = a
            up[target.first_row : target.first_row + len(b), at : at + own_rank] = b
            at += own_rank
        down, up = (side.to(self._device, self._dtype) for side in (down, up))
        activation = parts[0][0].target.activation
        return LowRank(
            Linear(pack(down, arena=arena)), Linear(pack(up, activation=activation, arena=arena), activation)
        )


def _open(folder: Path) -> Any:
    path = folder / LORA_WEIGHTS
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise AdapterLoadError(f"{path} is truncated or not a safetensors file ({error}); save it again.") from None


def _tensor_name(module: str, side: str) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"
