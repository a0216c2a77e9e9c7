"""Runs a mixture of experts in the C library: routing and all products are one call. layers/mixture.py is the definition."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof

import torch
from torch import Tensor

from engine.runtime.native.library import DTYPES, Library, LinearArgs, MixtureArgs, MixtureCall, PartArgs, RouterArgs
from engine.runtime.native.parts import describe_part


class Mixture:
    """The description of a router and its experts."""

    def __init__(
        self,
        library: Library,
        router: RouterArgs,
        gate_up: Sequence[LinearArgs],
        down: Sequence[LinearArgs],
        *,
        correction: Tensor | None = None,
        expert_scale: Tensor | None = None,
        shared_gate: LinearArgs | None = None,
        clamp: tuple[float, float] | None = None,
    ) -> None:
        """`router` has its numbers and its matrix set; an expert more than it has is shared, and may have a gate.

        gate_up applies the activation, unless that is a clamp: gpt-oss's alpha and limit.
        """
        has_shared = len(gate_up) > router.num_experts
        assert len(gate_up) == len(down) == router.num_experts + has_shared
        assert router.num_chosen <= router.num_experts // router.num_groups * router.num_chosen_groups
        description = MixtureArgs(router, has_shared=has_shared)
        if shared_gate is not None:
            description.shared_gate = shared_gate
        if clamp is not None:
            description.clamp_alpha, description.clamp_limit = clamp
        if correction is not None:
            description.router.correction = correction.data_ptr()
        if expert_scale is not None:
            description.router.expert_scale = expert_scale.data_ptr()
        self._arrays = [(LinearArgs * len(linears))(*linears) for linears in (gate_up, down)]
        description.gate_up, description.down = map(addressof, self._arrays)
        description.gate_up_formats, description.down_formats = map(_formats, (gate_up, down))
        self._library, self._description = library, description
        self._correction, self._expert_scale = correction, expert_scale
        self._dtype = next(dtype for dtype, code in DTYPES.items() if code == down[0].dtype)

    def describe(self) -> PartArgs | None:
        """Return the description of a part, valid while this object lives."""
        return describe_part("mixture", args=self._description)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return the sum of the experts' results, float32 [T, hidden], of contiguous x and `routed` [T, hidden]."""
        return self.explain(x, routed)[0]

    def explain(self, x: Tensor, routed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum, and the experts [T, ranks] of each row with their weights, the shared one last."""
        router = self._description.router
        assert x.is_contiguous()
        assert (x.dtype, x.shape[1]) == (self._dtype, router.gate.k)
        y = torch.empty(x.shape, dtype=torch.float32)
        ranks = router.num_chosen + self._description.has_shared
        chosen, weights = torch.empty(len(x), ranks, dtype=torch.int32), torch.empty(len(x), ranks)
        addresses = (addressof(self._description), *(tensor.data_ptr() for tensor in (x, y, chosen, weights)))
        self._library.mixture(MixtureCall(*addresses, len(x), None if routed is None else routed.data_ptr()))
        return y, chosen, weights


def _formats(linears: Sequence[LinearArgs]) -> int:
    """Return the formats of matrices as bits."""
    return sum(1 << number for number in {linear.format for linear in linears})
