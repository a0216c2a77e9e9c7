"""Rotary position embeddings: every published way of stretching them.

torch is imported where it computes, so that a config can be read and refused before the seconds that import takes.

A scaling is a frozen dataclass that yields inverse frequencies; adding one is a class and a line in `_SCALINGS`. Keys
are cached after rotation, so one set of frequencies serves an engine's whole life: the scalings that depend on the
sequence's length (dynamic NTK, LongRoPE) are fixed for the longest sequence the engine will accept. Within the positions
of the config dynamic NTK stretches nothing. LongRoPE has two lists, and the start says which is in force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig

if TYPE_CHECKING:
    from torch import Tensor


class Frequencies(NamedTuple):
    """inverse [dim / 2] float32, in radians a position; `magnitude` scales cos and sin; axes [dim / 2] int64, if several."""

    inverse: Tensor
    magnitude: float = 1.0
    axes: Tensor | None = None


class Basis(NamedTuple):
    """The input of every scaling: base wavelength, rotated dimensions, longest sequence."""

    theta: float
    dim: int
    served_len: int

    def inverse(self) -> Tensor:
        """The frequencies of RoPE as first published."""
        import torch

        return 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)


class Scaling(Protocol):
    """A way to reach positions the model was not first trained on."""

    def frequencies(self, basis: Basis) -> Frequencies: ...


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One layer's rotary embedding: base wavelength, rotated dimensions, and the scaling."""

    theta: float
    dim: int
    scaling: Scaling
    axes: tuple[int, ...] = ()  # of which of a position's three axes each frequency is; empty: positions have one

    def frequencies(self, served_len: int) -> Frequencies:
        """Return the frequencies for up to `served_len` positions. Raises ModelLoadError."""
        import torch

        try:
            found = self.scaling.frequencies(Basis(self.theta, self.dim, served_len))
        except (ArithmeticError, ValueError) as error:
            raise ModelLoadError(f"The config's rope settings give no frequencies ({error}): {self}.") from error
        if not (found.inverse.isfinite().all() and math.isfinite(found.magnitude)):
            raise ModelLoadError(f"The config's rope settings give frequencies that are not finite: {self}.")
        return found._replace(axes=torch.tensor(self.axes)) if self.axes else found

    def remark(self, served_len: int) -> str:
        """Return a line for the log about frequencies that `served_len` decides; "" for none."""
        scaling = self.scaling
        if not isinstance(scaling, LongRope) or scaling.short == scaling.long:
            return ""
        return describe_longrope(served_len, scaling.trained_len)


def describe_longrope(served_len: int, trained_len: int) -> str:
    """Return a line for the log: the list of LongRoPE's factors that is in force, and why."""
    if served_len <= trained_len:
        return f"LongRoPE's short factors, as contexts of up to {served_len} tokens are within the first {trained_len}"
    return (
        f"LongRoPE's long factors for all requests, as contexts may be longer than {trained_len} tokens; where all are "
        f"shorter, --max-model-len {trained_len} takes the short factors, which are more accurate there"
    )


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation: all angles divided by `factor`; as first published by 1."""

    factor: float

    def frequencies(self, basis: Basis) -> Frequencies:
        return Frequencies(basis.inverse() / self.factor)


@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """A larger base once sequences outgrow `trained_len`."""

    factor: float
    trained_len: int

    def frequencies(self, basis: Basis) -> Frequencies:
        length = max(basis.served_len, self.trained_len)
        stretch = self.factor * length / self.trained_len - (self.factor - 1)
        theta = basis.theta * stretch ** (basis.dim / (basis.dim - 2))
        return Frequencies(basis._replace(theta=theta).inverse())


@dataclass(frozen=True, slots=True)
class Llama3:
    """Long waves divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_len: int

    def frequencies(self, basis: Basis) -> Frequencies:
        inverse = basis.inverse()
        turns = self.trained_len * inverse / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return Frequencies((1 - keep) * inverse / self.factor + keep * inverse)


@dataclass(frozen=True, slots=True)
class Yarn:
    """NTK by parts: fast dimensions kept, slow ones interpolated, attention sharpened."""

    factor: float
    trained_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    magnitude: float

    def frequencies(self, basis: Basis) -> Frequencies:
        import torch

        dim = basis.dim

        def dimension(turns: float) -> float:
            return dim * math.log(self.trained_len / (turns * 2 * math.pi)) / (2 * math.log(basis.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = (high - low) or 0.001
        keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        inverse = basis.inverse()
        return Frequencies(inverse / self.factor * (1 - keep) + inverse * keep, self.magnitude)


@dataclass(frozen=True, slots=True)
class LongRope:
    """A factor for each dimension: one list up to `trained_len` positions, another beyond."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_len: int
    magnitude: float

    def frequencies(self, basis: Basis) -> Frequencies:
        import torch

        factors = self.long if basis.served_len > self.trained_len else self.short
        return Frequencies(basis.inverse() / torch.tensor(factors), self.magnitude)


@dataclass(frozen=True, slots=True)
class Proportional:
    """The frequencies of whole heads, of which the slow ones do not turn: the first `part` do."""

    part: float
    factor: float

    def frequencies(self, basis: Basis) -> Frequencies:
        inverse = basis.inverse() / self.factor
        inverse[int(self.part * basis.dim // 2) :] = 0.0
        return Frequencies(inverse)


class RopeReader(NamedTuple):
    """Shared by the readers below: the rope object, trained length, rotated dimensions, context."""

    params: HFConfig
    trained_len: int
    dim: int
    max_positions: int


def _llama3(rope: RopeReader) -> Scaling:
    p = rope.params
    return Llama3(p.positive("factor"), p.number("low_freq_factor"), p.number("high_freq_factor"), rope.trained_len)


def _yarn(rope: RopeReader) -> Scaling:
    p = rope.params
    factor = p.positive("factor", rope.max_positions / rope.trained_len)
    magnitude = p.optional_number("attention_factor")
    if magnitude is None:
        mscale, mscale_all = p.number("mscale", 0.0), p.number("mscale_all_dim", 0.0)
        growth = 0.1 * math.log(factor) if factor > 1 else 0.0
        both = mscale and mscale_all
        magnitude = (growth * mscale + 1) / (growth * mscale_all + 1) if both else growth + 1
    return Yarn(
        factor=factor,
        trained_len=rope.trained_len,
        beta_fast=p.number("beta_fast", 0.0) or 32.0,
        beta_slow=p.number("beta_slow", 0.0) or 1.0,
        truncate=p.flag("truncate", True),
        magnitude=magnitude,
    )


def _longrope(rope: RopeReader) -> Scaling:
    p = rope.params
    magnitude = p.optional_number("attention_factor")
    if magnitude is None:
        factor = p.positive("factor", rope.max_positions / rope.trained_len)
        magnitude = math.sqrt(1 + math.log(factor) / math.log(rope.trained_len)) if factor > 1 else 1.0
    for key in ("short_factor", "long_factor"):
        if len(p.numbers(key)) != rope.dim // 2:
            raise p.error(key, f"{rope.dim // 2} numbers, one for each pair of rotated dimensions")
    return LongRope(p.numbers("short_factor"), p.numbers("long_factor"), rope.trained_len, magnitude)


_SCALINGS: Mapping[str, Callable[[RopeReader], Scaling]] = {
    "default": lambda _: Linear(1.0),
    "mrope": lambda _: Linear(1.0),  # in three axes, see _axes
    "linear": lambda rope: Linear(rope.params.positive("factor")),
    "dynamic": lambda rope: DynamicNTK(rope.params.positive("factor"), rope.max_positions),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": lambda rope: Proportional(
        rope.params.number("partial_rotary_factor", 1.0), rope.params.positive("factor", 1.0)
    ),
}


def read_rope(params: HFConfig, config: HFConfig, *, theta: float, head_dim: int, max_positions: int) -> RopeConfig:
    """Return a RopeConfig from `rope_parameters` or `rope_scaling`; `theta` is the default base."""
    partial = params.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    kind = params.text("rope_type", params.text("type", "default"))
    if kind not in _SCALINGS:
        raise params.error("rope_type" if params.has("rope_type") else "type", f"one of {', '.join(_SCALINGS)}")
    # Phi-3 writes the trained length beside the rope object, and transformers lets that one win.
    trained_len = config.optional_size("original_max_position_embeddings")
    if trained_len is None:
        trained_len = params.size("original_max_position_embeddings", max_positions)
    dim = head_dim if kind == "proportional" else int(head_dim * min(max(partial, 0.0), 2.0))
    if not 2 <= dim <= head_dim or dim % 2:
        raise ModelLoadError(
            f"{config.source}: {dim} of a head's {head_dim} dimensions are to be rotated; it must be an even number of them."
        )
    try:
        scaling = _SCALINGS[kind](RopeReader(params, trained_len, dim, max_positions))
    except (ArithmeticError, ValueError) as error:
        raise ModelLoadError(f"{params.source}: the rope settings give no frequencies ({error}).") from error
    return RopeConfig(params.positive("rope_theta", theta), dim, scaling, _axes(params, config, dim // 2))


def _axes(params: HFConfig, config: HFConfig, num: int) -> tuple[int, ...]:
    """Return the axis of each frequency of a rotation in three; none where there is one, or where sections do not fit."""
    sections = params.numbers("mrope_section") if params.has("mrope_section") else ()
    if len(sections) != 3 or sum(sections) != num:
        return ()
    if not str(config.values.get("text_of", "")).startswith("qwen3"):
        return tuple(axis for axis, size in enumerate(sections) for _ in range(int(size)))
    return tuple(index % 3 if index < 3 * sections[index % 3] else 0 for index in range(num))  # interleaved
