"""Refuses kinds of models that cannot be served, from their config.json, without torch.

Quire serves causal language models whose state is keys and values. The tables list transformers' other kinds;
models/families.py and models/transformers_adapter.py refuse the remaining ones while they read a config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.errors import ModelLoadError

_ENCODERS = (
    "albert", "bert-generation", "convbert", "data2vec-text", "deberta", "deberta-v2", "electra", "ernie", "esm", "flaubert",
    "funnel", "ibert", "jina_embeddings_v3", "longformer", "luke", "mobilebert", "nystromformer", "roberta-prelayernorm",
    "roc_bert", "roformer", "squeezebert", "xlm", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_ENCODER_DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5",
    "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
    "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5", "whisper",
)  # fmt: skip
# Kinds whose recurrent layers are not served, and what these are.
_RECURRENT = {
    "falcon_mamba": "Mamba", "jamba": "Mamba",
    "kimi_linear": "Kimi Delta Attention", "mamba": "Mamba", "minimax": "lightning attention",
    "minimax_m1": "lightning attention", "olmo_hybrid": "Gated DeltaNet", "recurrent_gemma": "RG-LRU",
    "rwkv": "RWKV", "xlstm": "xLSTM", "zamba": "Mamba", "zamba2": "Mamba-2",
}  # fmt: skip
# Kinds whose recurrent layers are, and the types of these.
_SERVED_RECURRENT = {
    "qwen3_5_text": {"linear_attention"}, "qwen3_5_moe_text": {"linear_attention"}, "qwen3_next": {"linear_attention"},
    "granitemoehybrid": {"linear_attention", "mamba"}, "bamba": {"linear_attention", "mamba"},
    "falcon_h1": {"hybrid"}, "mamba2": {"linear_attention"},
    "nemotron_h": {"linear_attention", "mamba", "mlp", "moe"}, "lfm2": {"conv"}, "lfm2_moe": {"conv"},
    "lfm3": {"conv"},
}  # fmt: skip
_SPARSE = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")  # layers that choose the tokens they attend to
# Their code in transformers computes attention itself, so it cannot use a paged pool.
_OWN_ATTENTION = (
    "big_bird", "biogpt", "bloom", "blt", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj",
    "megatron-bert", "mpt", "openai-gpt", "reformer", "rembert", "stablelm", "trocr", "xglm", "xlnet",
)  # fmt: skip
# Their attention is not a sum over one paged cache of keys and values a layer, or their layers have parts that Quire lacks.
_OTHER_ATTENTION = {
    "diffllama": "takes the difference of two attentions a layer",
    "doge": "adds a bias of its own to attention",
    "gemma4_assistant": "drafts from the states of another model",
    "gemma4_unified_assistant": "drafts from the states of another model",
    **dict.fromkeys(
        ("muse_glimmer", "muse_glimmer_text"), "normalises embeddings, and the results of parts with another epsilon"
    ),
    "hrm_text": "runs each layer more than once a token",
    "nemotron": "does not pass to its attention what a paged cache needs",
}
SERVABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
OTHER_INPUTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "vq_config", "visual")
# Endings of the class names under `architectures` whose heads do not predict the next token.
_OTHER_HEADS = ("TokenClassification", "QuestionAnswering", "MultipleChoice")

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MAX_LAYERS, _MAX_EXPERTS = 1024, 1 << 16  # published models have up to 128, and up to 16,384
_MAX_SIZE = 1 << 40  # of any other size; what is allocated is checked against the weights


def refuse_unservable(values: Mapping[str, Any], source: str) -> None:
    """Raise ModelLoadError for a model that cannot be served, naming an alternative."""
    found = _why(values)
    if found is not None:
        raise ModelLoadError(f"{source}: {found}.")
    text = values.get("text_config")
    for settings in (values, text if isinstance(text, Mapping) else {}):
        _check_counts(settings, source)


def _why(values: Mapping[str, Any]) -> str | None:
    kind, heads = values.get("model_type"), _texts(values.get("architectures"))
    if not isinstance(kind, str):
        return f"'model_type' {'is missing' if kind is None else f'is {kind!r:.200}'}; it must name the kind of model"
    if kind in _ENCODERS and not values.get("is_decoder"):
        return (
            f"{kind!r} is an encoder that Quire does not have; for embeddings serve one of BERT's, RoBERTa's or ModernBERT's "
            "layout, or a decoder such as Qwen/Qwen3-Embedding-0.6B"
        )
    if values.get("is_encoder_decoder") is True or kind in _ENCODER_DECODERS:
        return f"{kind!r} is an encoder-decoder; serve a decoder alone, a model with a causal LM head"
    head = next((name for name in heads if name.endswith(_OTHER_HEADS)), None)
    if head is not None:
        return (
            f"{head} answers for each token, or with more than a score; serve a model whose class ends in ForCausalLM, "
            "ForSequenceClassification or ForRewardModel"
        )
    if kind in _RECURRENT:
        return (
            f"{kind!r} has {_RECURRENT[kind]} layers, which Quire does not have for this kind; serve a hybrid such as "
            "Qwen3.5 or Granite 4, or a model whose layers are all attention, such as Qwen3"
        )
    types = set(_texts(values.get("layer_types") or values.get("layers_block_type")))
    layers = types - SERVABLE_LAYERS - _SERVED_RECURRENT.get(kind, set())
    if layers:
        return (
            f"{kind!r} has layers of type {', '.join(sorted(layers)):.200}, which Quire cannot serve; serve a model whose "
            "layers are all full or sliding attention, such as Qwen3"
        )
    if kind in _SPARSE:
        return (
            f"{kind!r} attends to tokens that an index chooses, which Quire cannot; serve DeepSeek V3 or GLM-4.5, say"
        )
    if kind in _OWN_ATTENTION:
        return (
            f"{kind!r} has attention that transformers cannot exchange; serve a family such as Llama, Qwen3 or Mixtral"
        )
    if kind in _OTHER_ATTENTION:
        return f"{kind!r} {_OTHER_ATTENTION[kind]}, which Quire cannot serve; serve a family such as Llama or Qwen3"
    if any(values.get(key) for key in OTHER_INPUTS):
        return (
            f"{kind!r} takes images or sound beside text, which Quire does not; serve a text model of the same family"
        )
    if isinstance(values.get("text_config"), Mapping):
        return f"{kind!r} has its language model inside another model; serve a text model of the same family"
    return None


def _check_counts(values: Mapping[str, Any], source: str) -> None:
    """Raise for implausible sizes, before anything of that size is allocated."""
    for key, value in values.items():
        most = _MAX_LAYERS if key in _LAYER_COUNTS else _MAX_EXPERTS if key in _EXPERT_COUNTS else _MAX_SIZE
        if type(value) is int and abs(value) > most:
            raise ModelLoadError(
                f"{source}: {key!r} is {str(value)[:20]}, more than any model has; the file is damaged."
            )


def _texts(value: object) -> Sequence[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []
