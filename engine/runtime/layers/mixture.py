"""A mixture of experts: a router, experts, and the shared expert of some families.

The torch operations here define the arithmetic on every device; the native library computes the same in one call, and
Triton kernels in a few launches (mixture_cuda.py). The router and the sum over experts are float32. Each expert is an
MLP of 2-D matrices, so any scheme can store it. Latent experts (Nemotron 3) read a narrower product with x, and another
product leads back; the router and the shared expert read x.

Gemma 4's feed-forward has a dense MLP beside the mixture, each with norms before and after it; the router reads the stream through
a further norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.runtime.cuda.available import has_triton, uses_triton
from engine.runtime.layers.mlp import MLP, widths_of
from engine.runtime.layers.model_config import ModelConfig, MoEConfig
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.layers.parts import LayerAdapters, Load, Maker
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import LinearArgs, PartArgs, RouterArgs, native
from engine.runtime.native.mixture import Mixture
from engine.runtime.native.parts import describe_part, norm_args
from engine.runtime.native.structs import structure
from engine.runtime.routing import GroupScoring, RouterConfig, Scoring
from engine.runtime.schemes.linear import Linear, Scheme, clamped_mul

if TYPE_CHECKING:
    from engine.runtime.layers.mixture_cuda import CudaExperts

# As moe.h has them.
_SCORING_CODES = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1}
_GROUP_SCORING_CODES = {GroupScoring.MAX: 0, GroupScoring.TOP2: 1}
_SMALLEST_SUM = 1e-20  # added to a sum of sigmoids before a division, as in DeepSeek-V3


class Router:
    """Chooses experts for each token, and weighs them. Float32 in every model type."""

    def __init__(self, config: RouterConfig, hidden_size: int, make: Maker) -> None:
        self._config = config
        make = make._replace(dtype=torch.float32, scheme=Scheme(make.scheme.storage))
        self.linear = make.linear({"gate": config.num_experts}, hidden_size, bias=config.has_bias)
        self.expert_scale = (
            make.tensor("gate.per_expert_scale", config.num_experts) if config.has_expert_scale else None
        )
        self.correction = (
            make.tensor("gate.e_score_correction_bias", config.num_experts) if config.has_correction else None
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 weights and integer experts [T, num_chosen] of x [T, hidden], the best expert first."""
        weights, chosen = self._choose(x)
        return (weights if self.expert_scale is None else weights * self.expert_scale[chosen]), chosen

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, logits = self._config, self.linear(x.float())
        if uses_triton(logits):
            from engine.runtime.cuda.routing import route

            return route(logits, self.correction, config)
        # Softmax is monotone, so logits choose as probabilities do, and do not tie by underflow.
        scores = logits if config.scoring is Scoring.SOFTMAX else logits.sigmoid()
        choice = scores if self.correction is None else scores + self.correction
        if config.num_groups > 1:
            choice = _best_groups(choice, config)
        chosen = _top(choice, config.num_chosen)
        if config.scoring is Scoring.SOFTMAX:
            scores = (logits - logits.amax(-1, keepdim=True)).exp()
        weights = scores.gather(-1, chosen)
        if config.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
        elif config.scoring is Scoring.SOFTMAX:
            weights = weights / scores.sum(-1, keepdim=True)
        return weights * config.scale, chosen

    def describe(self) -> RouterArgs:
        """Describe the router to the native library, which has its matrix."""
        config = self._config
        return RouterArgs(
            self.linear.args,
            num_experts=config.num_experts,
            num_chosen=config.num_chosen,
            num_groups=config.num_groups,
            num_chosen_groups=config.num_chosen_groups,
            scoring=_SCORING_CODES[config.scoring],
            group_scoring=_GROUP_SCORING_CODES[config.group_scoring],
            is_normalised=config.is_normalised,
            scale=config.scale,
        )


LatentExpertsArgs = structure("latent_experts")  # for the native library: a mixture between two products


class MoE:
    """The weighted sum of each token's experts, plus the shared expert."""

    def __init__(self, config: MoEConfig, hidden_size: int, make: Maker) -> None:
        self._clamp, self._activation, self._group = config.clamp, config.activation, make.group
        self.mixture: Mixture | None = None  # the native library's: all of this, or between latents the routed experts
        self.experts: CudaExperts | None = None  # the kernels', for all but the router and the shared expert
        self.router = Router(config.router, hidden_size, make)
        self.latents: tuple[Linear, Linear] | None = None
        if config.latent_width:
            names = {"fc1_latent_proj": config.latent_width}, {"fc2_latent_proj": hidden_size}
            self.latents = make.linear(names[0], hidden_size), make.linear(names[1], config.latent_width)
        self.gate_up, self.down = [], []
        for expert in range(config.router.num_experts):
            own = make.within(f"experts.{expert}", plan=_plan("expert_width"))
            gate_up, down = _expert(config, config.width, config.latent_width or hidden_size, own)
            self.gate_up.append(gate_up)
            self.down.append(down)
        if make.device.type == "cuda" and has_triton(make.device):
            make.loads.append(Load({}, lambda _: self.stack()))  # before the next layer, which reuses their memory
        self.shared_gate_up = self.shared_down = self.shared_gate = None
        if config.shared_width:
            own = make.within("shared_expert", plan=_plan("shared_width"))
            self.shared_gate_up, self.shared_down = _expert(config, config.shared_width, hidden_size, own)
        if config.has_shared_gate:
            plain = make._replace(dtype=torch.float32, scheme=Scheme(make.scheme.storage))
            self.shared_gate = plain.linear({"shared_expert_gate": 1}, hidden_size)
        make.loads.append(Load({}, lambda _: self._complete(make)))

    @property
    def is_capturable(self) -> bool:
        """Return whether kernels compute it: the definition counts tokens on the host."""
        return self.experts is not None

    def __call__(
        self,
        x: Tensor,
        adapters: LayerAdapters | None = None,  # noqa: ARG002 - a FeedForward's
        routed: Tensor | None = None,
    ) -> Tensor:
        """Return [T, hidden] of x [T, hidden]; the router reads `routed`, if given. Adapters never change experts."""
        if self.experts is not None:
            y = self._in_kernels(self.experts, x, routed)
            self._group.all_reduce(y)
            return y
        total = self._total(x, routed) if self.latents or self.mixture is None else self.mixture(x, routed)
        self._group.all_reduce(total)
        return total.to(x.dtype)

    def _total(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return a float32 total [T, hidden] of this rank alone, by the definition."""
        return self._with_shared(self._routed(x, routed), x)

    def _with_shared(self, total: Tensor, x: Tensor) -> Tensor:
        """Add the shared expert, if there is one, to a float32 total [T, hidden]."""
        shared = self._shared(x)
        if shared is not None:
            total += shared if self.shared_gate is None else shared * self.shared_gate(x.float()).sigmoid()
        return total

    def stack(self) -> None:
        """Stack the loaded experts for the kernels, if no scheme has packed them."""
        from engine.runtime.layers.mixture_cuda import stack_experts

        self.experts = stack_experts(self.gate_up, self.down, self._clamp or self._activation)

    def describe(self) -> PartArgs | None:
        experts = None if self.mixture is None else self.mixture.describe()
        if self.latents is None or experts is None:
            return experts
        narrow, widen = _args_of(self.latents)
        self._args = LatentExpertsArgs(experts=experts, narrow=narrow, widen=widen)  # C keeps its address
        shared = _args_of([self.shared_gate_up, self.shared_down])
        if shared and (mlp := describe_part("mlp", shared)):
            self._args.shared = mlp
        return describe_part("latent_experts", args=self._args)

    def _complete(self, make: Maker) -> None:
        """Make the native library's mixture of the loaded one, if that holds every matrix; else note the first it lacks."""
        library, lacking = native(), (name for name, linear in self._matrices() if linear.args is None)
        missing = next(lacking, None)
        if missing is not None and make.lacking is not None:
            make.lacking.append(make.prefix + missing)
        if library is None or missing is not None:
            return
        shared = [] if self.latents is not None else [self.shared_gate_up, self.shared_down]
        self.mixture = Mixture(
            library,
            self.router.describe(),
            _args_of([*self.gate_up, *shared[:1]]),
            _args_of([*self.down, *shared[1:]]),
            correction=self.router.correction,
            expert_scale=self.router.expert_scale,
            shared_gate=None if self.shared_gate is None else self.shared_gate.args,
            clamp=None if self._clamp is None else (self._clamp.alpha, self._clamp.limit),
        )

    def _matrices(self) -> Iterator[tuple[str, Linear]]:
        """Yield every matrix with its name in a checkpoint."""
        yield "gate", self.router.linear
        shared = () if self.shared_gate_up is None else (("shared_expert", self.shared_gate_up, self.shared_down),)
        experts = ((f"experts.{i}", *pair) for i, pair in enumerate(zip(self.gate_up, self.down, strict=True)))
        for name, gate_up, down in (*experts, *shared):
            assert gate_up is not None
            assert down is not None
            yield f"{name}.{'gate' if self._activation.is_gated else 'up'}_proj", gate_up
            yield f"{name}.down_proj", down
        if self.shared_gate is not None:
            yield "shared_expert_gate", self.shared_gate
        if self.latents is not None:
            yield from zip(("fc1_latent_proj", "fc2_latent_proj"), self.latents, strict=True)

    def _routed(self, x: Tensor, routed: Tensor | None) -> Tensor:
        """Return the float32 sum over each token's experts, added in the order of their ranks."""
        weights, chosen = self.router(x if routed is None else routed)
        if self.latents is not None:
            x = self.latents[0](x)
        ranks = self._one_by_one(x, chosen).view(*chosen.shape, -1).unbind(1)
        total = ranks[0] * weights[:, :1]
        for rank, output in enumerate(ranks[1:], 1):
            total.addcmul_(output, weights[:, rank, None])
        return total if self.latents is None else self.latents[1].in_float32(total.to(x.dtype))

    def _one_by_one(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return each token's experts' outputs, float32 [T * num_chosen, hidden]."""
        by_expert = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        outputs = torch.empty(chosen.numel(), x.shape[1], device=x.device)
        for expert, places in enumerate(by_expert.split(counts)):
            if len(places):
                inner = self._inner(self.gate_up[expert], x.index_select(0, places // chosen.shape[1]))
                outputs[places] = self.down[expert].in_float32(inner)
        return outputs

    def _in_kernels(self, experts: CudaExperts, x: Tensor, routed: Tensor | None) -> Tensor:
        """Return all of it without waiting for the device."""
        chosen = self.router(x if routed is None else routed)
        if self.latents is not None:
            total = self.latents[1].in_float32(experts(self.latents[0](x), *chosen))
            return self._with_shared(total, x).to(x.dtype)
        gate = None if self.shared_gate is None else self.shared_gate(x.float())
        return experts(x, *chosen, self._shared(x), gate)

    def _shared(self, x: Tensor) -> Tensor | None:
        """Return the shared expert's output in float32, before its gate; None without one."""
        if self.shared_gate_up is None or self.shared_down is None:
            return None
        return self.shared_down.in_float32(self._inner(self.shared_gate_up, x))

    def _inner(self, gate_up: Linear, x: Tensor) -> Tensor:
        """Return activation(gate x) * up x in x's type."""
        inner, clamp = gate_up(x), self._clamp
        return inner if clamp is None else clamped_mul(inner, clamp.alpha, clamp.limit)


def make_mixture(config: ModelConfig, layer: int, make: Maker) -> MoE:
    """Return the mixture of a layer."""
    moe = config.layers[layer].moe
    assert moe is not None, "the layer has the settings of a mixture"
    return MoE(moe, config.hidden_size, make.within("mlp"))


def _plan(width: str) -> Plan:
    """Return how ranks divide an expert along its width."""
    return {"gate_proj": colwise(width), "up_proj": colwise(width), "down_proj": rowwise(width)}


def _expert(config: MoEConfig, width: int, hidden_size: int, make: Maker) -> tuple[Linear, Linear]:
    """Return an expert's matrices, without a place for adapters."""
    rows, activation = widths_of(config.activation, width), None if config.clamp else config.activation
    gate_up = make.linear(rows, hidden_size, bias=config.has_bias, activation=activation)
    return gate_up, make.linear({"down_proj": hidden_size}, width, bias=config.has_bias)


def _args_of(linears: Sequence[Linear | None]) -> list[LinearArgs]:
    """Return the native library's descriptions of the matrices that there are."""
    return [linear.args for linear in linears if linear is not None and linear.args is not None]


def _top(choice: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of each row, descending; ties to the lowest index."""
    return choice.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _best_groups(choice: Tensor, config: RouterConfig) -> Tensor:
    """Return the choices of experts in the best groups of neighbours, -inf for all others."""
    grouped = choice.unflatten(-1, (config.num_groups, -1))
    num_best = 1 if config.group_scoring is GroupScoring.MAX else 2
    best = _top(grouped.topk(num_best).values.sum(-1), config.num_chosen_groups)
    is_kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, best, value=True)
    return grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)


_NORMS = {  # their names in a checkpoint
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm_1",
    "before_router": "moe.gate_norm",
    "before_experts": "pre_feedforward_layernorm_2",
    "after_experts": "post_feedforward_layernorm_2",
}
BesideArgs = structure("beside")  # for the native library: both parts and their norms


class MLPBesideMixture:
    """norm(mlp(norm x)) + norm(experts(norm x))."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker) -> None:
        moe, hidden = config.layers[layer].moe, config.hidden_size
        assert moe is not None, "the layer has the settings of a mixture"
        self._mlp, self._experts = MLP(config, layer, make), MoE(moe, hidden, make.within("moe"))
        self._norms = {place: RMSNorm(make, name, hidden, config) for place, name in _NORMS.items()}
        router = self._norms["before_router"]
        make.loads.append(Load({}, lambda _: router.weight.mul_(hidden**-0.5)))

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the experts."""
        return self._experts.is_capturable

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Return [T, hidden] of the stream x [T, hidden], which stays as it is."""
        norms = self._norms
        dense = norms["after_mlp"](self._mlp(norms["before_mlp"](x), adapters))
        experts = self._experts(norms["before_experts"](x), routed=norms["before_router"](x))
        return dense + norms["after_experts"](experts)

    def describe(self) -> PartArgs | None:
        mlp, experts = self._mlp.describe(), self._experts.describe()
        if mlp is None or experts is None:
            return None
        norms = {place: norm_args(norm.weight) for place, norm in self._norms.items()}
        self._args = BesideArgs(mlp=mlp, experts=experts, **norms)  # C keeps its address
        return describe_part("beside", args=self._args)
