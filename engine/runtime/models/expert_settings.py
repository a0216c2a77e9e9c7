"""The mixtures of experts of model families, from their config.json: one setting a layer.

Families spell the same router in several ways; models/families.py calls the function that knows the spelling. A value
that no router can have is a ModelLoadError that names the key. No torch.
"""

from __future__ import annotations

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation, Clamp
from engine.runtime.layers.model_config import Mixtures, MoEConfig
from engine.runtime.models.common_settings import num_layers
from engine.runtime.routing import GroupScoring, RouterConfig, Scoring

_MAX_EXPERTS = 1 << 17  # of all layers; published models have up to 30,000

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def qwen_experts(hf: HFConfig, *, num_experts: int, num_chosen: int, width: int, shared_width: int = 0) -> Mixtures:
    """Return the mixtures of Qwen 2 and 3; the numbers are the family's defaults."""
    if hf.values.get("num_experts") == 0:
        return [None] * num_layers(hf)
    router = RouterConfig(
        num_experts=_num_experts(hf, num_experts),
        num_chosen=hf.size("num_experts_per_tok", num_chosen),
        is_normalised=hf.flag("norm_topk_prob"),
    )
    shared_width = hf.size("shared_expert_intermediate_size", shared_width) if shared_width else 0
    moe = MoEConfig(
        router=router,
        width=hf.size("moe_intermediate_size", width),
        activation=_silu(hf),
        shared_width=shared_width,
        has_shared_gate=bool(shared_width),
    )
    step, dense = hf.size("decoder_sparse_step", 1), hf.numbers("mlp_only_layers") if hf.has("mlp_only_layers") else ()
    return _checked(hf, [None if i in dense or (i + 1) % step else moe for i in range(num_layers(hf))])


def mixtral_experts(hf: HFConfig, *, shared_width: int = 0) -> Mixtures:
    """Return Mixtral's mixtures, and Granite's: a softmax over the chosen experts."""
    router = RouterConfig(
        num_experts=_num_experts(hf, 8), num_chosen=hf.size("num_experts_per_tok", 2), is_normalised=True
    )
    moe = MoEConfig(router=router, width=hf.size("intermediate_size"), activation=_silu(hf), shared_width=shared_width)
    return _everywhere(hf, moe)


def granite_experts(hf: HFConfig, *, shared_width: int) -> Mixtures:
    """Return Granite's mixtures with a shared expert, which has no gate; `shared_width` is the family's default."""
    return mixtral_experts(hf, shared_width=hf.integer("shared_intermediate_size", shared_width))


def olmoe_experts(hf: HFConfig) -> Mixtures:
    """Return OLMoE's mixtures."""
    router = RouterConfig(
        num_experts=_num_experts(hf, 64),
        num_chosen=hf.size("num_experts_per_tok", 8),
        is_normalised=hf.flag("norm_topk_prob"),
    )
    return _everywhere(hf, MoEConfig(router=router, width=hf.size("intermediate_size"), activation=_silu(hf)))


def gemma4_experts(hf: HFConfig, activation: Activation) -> Mixtures:
    """Return Gemma 4's mixtures, which stand beside dense MLPs."""
    if not hf.flag("enable_moe_block"):
        return [None] * num_layers(hf)
    router = RouterConfig(
        num_experts=hf.size("num_experts"),
        num_chosen=hf.size("top_k_experts"),
        is_normalised=True,
        has_expert_scale=True,
    )
    width = hf.size("moe_intermediate_size")
    return _everywhere(hf, MoEConfig(router=router, width=width, activation=activation, is_beside_mlp=True))


def gpt_oss_experts(hf: HFConfig) -> Mixtures:
    """Return gpt-oss's mixtures: biases everywhere, and a clamped activation."""
    router = RouterConfig(
        num_experts=_num_experts(hf, 128),
        num_chosen=hf.size("num_experts_per_tok", 4),
        is_normalised=True,
        has_bias=True,
    )
    clamp = Clamp(alpha=hf.positive("swiglu_alpha", 1.702), limit=hf.positive("swiglu_limit", 7.0))
    width = hf.size("intermediate_size")
    return _everywhere(hf, MoEConfig(router=router, width=width, activation=_silu(hf), clamp=clamp, has_bias=True))


def deepseek_v2_experts(hf: HFConfig) -> Mixtures:
    """Return DeepSeek-V2's mixtures: softmax scores, groups by their best expert."""
    method = hf.text("topk_method", "greedy")
    hf.require(method in ("greedy", "group_limited_greedy"), "topk_method", "'greedy' or 'group_limited_greedy'")
    is_grouped = method == "group_limited_greedy"
    router = RouterConfig(
        num_experts=_num_experts(hf, 64),
        num_chosen=hf.size("num_experts_per_tok"),
        is_normalised=hf.flag("norm_topk_prob"),
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=hf.size("n_group") if is_grouped else 1,
        num_chosen_groups=hf.size("topk_group") if is_grouped else 1,
    )
    return _deepseek_layers(hf, router, width=1407, num_shared=2, num_dense=0)


def deepseek_v3_experts(hf: HFConfig) -> Mixtures:
    """Return DeepSeek-V3's mixtures: sigmoid scores, a bias that only chooses, groups by their two best."""
    router = _sigmoid_router(hf, num_experts=256, num_groups=8, num_chosen_groups=4, scale=2.5)
    return _deepseek_layers(hf, router, width=2048, num_shared=1, num_dense=3)


def glm4_experts(hf: HFConfig) -> Mixtures:
    """Return GLM-4.5's mixtures, which are DeepSeek-V3's with other defaults."""
    router = _sigmoid_router(hf, num_experts=128, num_groups=1, num_chosen_groups=1, scale=1.0)
    return _deepseek_layers(hf, router, width=1408, num_shared=1, num_dense=1)


def lfm2_experts(hf: HFConfig) -> Mixtures:
    """Return LFM2's mixtures: sigmoid scores, a bias that only chooses, no shared expert."""
    router = RouterConfig(
        num_experts=_num_experts(hf, 32),
        num_chosen=hf.size("num_experts_per_tok", 4),
        scoring=Scoring.SIGMOID,
        is_normalised=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        has_correction=hf.flag("use_expert_bias", True),
    )
    moe = MoEConfig(router=router, width=hf.size("moe_intermediate_size", 1792), activation=_silu(hf))
    num_dense = hf.integer("num_dense_layers", 2)
    return _checked(hf, [moe if i >= num_dense else None for i in range(num_layers(hf))])


def nemotron_experts(hf: HFConfig) -> Mixtures:
    """Return Nemotron 3's mixtures, which have DeepSeek-V3's router, no gates, and perhaps latent experts."""
    hf.require(hf.integer("n_shared_experts", 1) == 1, "n_shared_experts", "1")
    router = _sigmoid_router(hf, num_experts=8, num_groups=1, num_chosen_groups=1, scale=1.0, num_chosen=2)
    moe = MoEConfig(
        router=router,
        width=hf.size("moe_intermediate_size", 7688),
        activation=Activation.RELU2,
        shared_width=hf.size("moe_shared_expert_intermediate_size", 7688),
        latent_width=hf.optional_size("moe_latent_size") or 0,
    )
    return _everywhere(hf, moe)


def glm4_lite_experts(hf: HFConfig) -> Mixtures:
    """Return GLM-4.7-Flash's mixtures: those of GLM-4.5, in the layers that `mlp_layer_types` names."""
    router = _sigmoid_router(hf, num_experts=64, num_groups=1, num_chosen_groups=1, scale=1.8, num_chosen=4)
    if not hf.has("mlp_layer_types"):
        return _deepseek_layers(hf, router, width=1536, num_shared=1, num_dense=1)
    types = hf.texts("mlp_layer_types")
    if len(types) != num_layers(hf) or not {"dense", "sparse"}.issuperset(types):
        raise hf.error("mlp_layer_types", f"{num_layers(hf)} entries, each dense or sparse")
    sparse = HFConfig({**hf.values, "first_k_dense_replace": 0}, hf.source)
    moes = _deepseek_layers(sparse, router, width=1536, num_shared=1, num_dense=0)
    return [None if kind == "dense" else moe for kind, moe in zip(types, moes, strict=True)]


def _sigmoid_router(
    hf: HFConfig, *, num_experts: int, num_groups: int, num_chosen_groups: int, scale: float, num_chosen: int = 8
) -> RouterConfig:
    return RouterConfig(
        num_experts=_num_experts(hf, num_experts),
        num_chosen=hf.size("num_experts_per_tok", num_chosen),
        scoring=Scoring.SIGMOID,
        is_normalised=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", scale),
        has_correction=True,
        num_groups=hf.size("n_group", num_groups),
        num_chosen_groups=hf.size("topk_group", num_chosen_groups),
        group_scoring=GroupScoring.TOP2,
    )


def _deepseek_layers(hf: HFConfig, router: RouterConfig, *, width: int, num_shared: int, num_dense: int) -> Mixtures:
    """Return a mixture for each layer after the first dense ones."""
    width = hf.size("moe_intermediate_size", width)
    moe = MoEConfig(
        router=router,
        width=width,
        activation=_silu(hf),
        shared_width=width * hf.integer("n_shared_experts", num_shared),
    )
    first, step = hf.integer("first_k_dense_replace", num_dense), hf.size("moe_layer_freq", 1)
    return _checked(hf, [moe if i >= first and i % step == 0 else None for i in range(num_layers(hf))])


def _everywhere(hf: HFConfig, moe: MoEConfig) -> Mixtures:
    return _checked(hf, [moe] * num_layers(hf))


def _checked(hf: HFConfig, moes: Mixtures) -> Mixtures:
    """Return the mixtures. Raises ModelLoadError for a router that cannot choose."""
    moe = next((moe for moe in moes if moe is not None), None)
    if moe is None:
        return moes
    router = moe.router
    if router.num_experts * len(moes) > _MAX_EXPERTS:
        raise ModelLoadError(
            f"{hf.source}: {len(moes)} layers of {router.num_experts} experts are more than any model has; the file is damaged."
        )
    group = router.num_experts // router.num_groups
    if router.num_experts % router.num_groups or (router.group_scoring is GroupScoring.TOP2 and group < 2):
        raise hf.error("n_group", f"a number of groups that divides {router.num_experts} experts, two or more a group")
    hf.require(router.num_chosen_groups <= router.num_groups, "topk_group", f"at most {router.num_groups} groups")
    if router.num_chosen > router.num_chosen_groups * group:
        raise hf.error("num_experts_per_tok", f"at most {router.num_chosen_groups * group} experts to choose from")
    if moe.shared_width < 0:
        key = "n_shared_experts" if hf.has("n_shared_experts") else "shared_intermediate_size"
        raise hf.error(key, "0 or more")
    return moes


def _num_experts(hf: HFConfig, default: int) -> int:
    """Return the number of experts, under any name: transformers writes one model's in two ways."""
    return hf.size(next((key for key in _COUNTS if hf.has(key)), _COUNTS[0]), default)


def _silu(hf: HFConfig) -> Activation:
    hf.require(hf.text("hidden_act", "silu") in ("silu", "swish"), "hidden_act", "'silu' in a mixture of experts")
    return Activation.SILU
