"""Reads a model's config, without torch: of a folder, or of a file that holds its metadata.

A checkpoint that takes images or sound, too, holds the settings of its language model under `text_config`, or beside those of
its towers. They replace the whole config, because the language model is served alone.

Quire serves causal language models whose state is keys and values. Tables list transformers' other kinds, which are refused;
families.py and transformers_adapter.py refuse the remaining ones while they read a config.

--hf-overrides has other values. The rope is spelled `rope_scaling` beside `rope_theta` in older files, and `rope_parameters` since transformers 5. An override may
use either spelling, whichever the file has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, ModelLoadError
from engine.files.hf_config import HFConfig
from engine.files.vector_files import is_classifier, read_vectors
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.models.encoder_families import ENCODERS
from engine.runtime.models.families import FAMILIES, read_config
from engine.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from engine.settings.engine_config import EngineConfig

# Kinds of the hub that are another kind in everything. For text, a rotation in three axes is that in one.
_ALIASES = {
    "kimi_k2": "deepseek_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Kinds with a language model inside that sees images or sound as tokens, and its kind where the config does not name it.
_WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
}
# Those whose images attend both ways, Gemma 4's where their configs say so.
BOTH_WAYS = ("gemma3", "gemma4", "gemma4_unified")
TOWERS = (
    *BOTH_WAYS, "idefics3", "internvl", "lfm2_vl", "llava_onevision", "mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip  # those of them whose images are served
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
# What published checkpoints leave out of `text_config`, as transformers has it.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "gemma4_unified_text": {"use_bidirectional_attention": "vision"},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}


def read_model_config(path: Path, load_format: str = "auto", overrides: Mapping[str, Any] | None = None) -> HFConfig:
    """Return the language model's settings. Raises ModelLoadError for unservable kinds, too."""
    return servable(open_checkpoint(load_format, path).config, overrides)


def servable(config: HFConfig, overrides: Mapping[str, Any] | None = None) -> HFConfig:
    """Return the language model's settings, with --hf-overrides. Raises ModelLoadError for unservable kinds."""
    config = _text_half(override(config, overrides))
    values = config.values
    refuse_unservable(values, config.source)
    if is_classifier(values) and values["model_type"] not in {*FAMILIES, *ENCODERS, *_ALIASES}:
        raise ModelLoadError(
            f"{config.source}: Quire does not score labels with models of the kind {values['model_type']!r}; serve one of "
            f"{', '.join(ENCODERS)}, or a decoder such as Qwen3."
        )
    if values["model_type"] not in _ALIASES:
        return config
    return HFConfig({**values, "model_type": _ALIASES[values["model_type"]]}, config.source)


def _text_half(config: HFConfig) -> HFConfig:
    """Return the settings of the language model inside another, with `text_of`, the kind of that; or the config itself."""
    values = config.values
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _WRAPPERS:
        return config
    text = {key: value for key, value in values.items() if key not in OTHER_INPUTS}  # of Qwen 2 VL, without an object
    if config.has("text_config"):
        text = dict(config.section("text_config").values)
    text_kind = text.get("model_type")
    text["model_type"] = text_kind if isinstance(text_kind, str) and text_kind != kind else _WRAPPERS[kind]
    if _ALIASES.get(text["model_type"], text["model_type"]) not in FAMILIES:
        return config
    beside = {key: values[key] for key in ("dtype", "torch_dtype") if values.get(key)}
    for key in ("architectures", "tie_word_embeddings"):  # of the whole, where it has them
        if key in values:
            text[key] = values[key]
    if (
        kind == "llava"
        and config.has("vision_config")
        and config.section("vision_config").values.get("model_type") == "pixtral"
    ):
        kind = "pixtral"  # as it was published before Mistral 3
    return HFConfig({**_LEFT_OUT.get(text["model_type"], {}), **beside, **text, "text_of": kind}, config.source)


def read_own(checkpoint: Checkpoint, path: Path) -> ModelConfig:
    """Return the settings of a model that Quire's decoder runs. Raises ModelLoadError."""
    config = read_config(checkpoint.config.values, checkpoint.config.source)
    vectors = read_vectors(checkpoint.config, path, is_encoder=config.both_ways)
    if vectors.is_embedder or vectors.labels:
        return replace(config, has_head=False, tied_head=False)
    return config if config.tied_head or not checkpoint.is_body else replace(config, has_head=False)


def check_mtp(model: HFConfig, config: ModelConfig | None) -> None:
    """Raise ConfigError for a model without MTP layers; `config` None: transformers' code runs it."""
    if config is None:
        raise ConfigError(
            "MTP layers read the model's hidden states, and transformers' code runs this model, which does not show them; "
            "choose the method ngram or draft_model."
        )
    if not config.num_mtp_layers:
        raise ConfigError(
            f"{model.source or 'the model'} counts no MTP layers, as 'num_nextn_predict_layers' of DeepSeek-V3 and "
            "GLM-4.5 to 4.7 does, and 'mtp_num_hidden_layers' of Qwen 3.5; choose the method ngram or draft_model."
        )


def require_readable(checkpoint: Checkpoint, *, is_own: bool) -> None:
    """Raise ModelLoadError for quantised weights of a model that transformers' code runs."""
    if checkpoint.quantization is not None and not is_own:
        raise ModelLoadError(
            f"{checkpoint.config.source}: the weights are quantized by {checkpoint.quantization.method!r}, and transformers' "
            "code runs this model, which cannot read them here; serve the checkpoint they were made from, or one of "
            f"Quire's own families ({', '.join(FAMILIES)}) without --model-impl."
        )


def is_native(config: EngineConfig, model: HFConfig, path: Path) -> bool:
    """Return whether Quire's decoder runs the model, instead of transformers' code.

    Raises ConfigError if transformers' is asked for and cannot read the file."""
    if config.model_impl == "transformers" and path.is_file():
        kind = path.suffix.removeprefix(".").upper()
        raise ConfigError(
            f"--model-impl is 'transformers', and {path} is a {kind} file, which Quire's own models alone serve; leave it out."
        )
    if is_encoder(model.values) and config.model_impl == "transformers":
        raise ConfigError(
            f"--model-impl is 'transformers', and {model.source} is an encoder, which Quire's own code runs; leave it out."
        )
    is_own = model.values.get("model_type") in FAMILIES or is_encoder(model.values)
    return is_own if config.model_impl == "auto" else config.model_impl == "quire"


def is_encoder(values: Mapping[str, Any]) -> bool:
    """Return whether Quire's encoder runs a model, not its decoder."""
    return values.get("model_type") in ENCODERS and not values.get("is_decoder")


_QWEN3_RERANKER: Mapping[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
_ROPES = ("rope_scaling", "rope_parameters")
_STRETCHING = ("yarn", "linear")  # kinds of rope that multiply the length a model was made for by their factor
_LENGTH, _TRAINED = "max_position_embeddings", "original_max_position_embeddings"


def _is_reranker(source: str) -> bool:
    """Return whether the name of a file, its folder or its repository in the hub's cache is Qwen3-Reranker's."""
    parts = Path(source).parts
    names = [*parts[-2:], *(part for part in parts if part.startswith("models--"))]
    return any("qwen3-reranker" in name.lower() for name in names)


def override(config: HFConfig, overrides: Mapping[str, Any] | None) -> HFConfig:
    """Return a config with other values for some keys; those of an object that it has are merged. Raises ConfigError.

    A causal model that is called Qwen3-Reranker is one: its config.json does not say so.
    """
    if config.values.get("model_type") == "qwen3" and not is_classifier(config.values) and _is_reranker(config.source):
        overrides = {**_QWEN3_RERANKER, **(overrides or {})}
    if not overrides:
        return config
    values = dict(config.values)
    for key, value in overrides.items():
        if key in _ROPES or (key == "rope_theta" and values.get("rope_parameters")):
            _override_rope(values, {key: value} if key == "rope_theta" else value)
        elif isinstance(value, Mapping) and isinstance(values.get(key), Mapping):
            values[key] = {**values[key], **value}
        else:
            values[key] = value
    if _LENGTH not in overrides and any(overrides.get(key) for key in _ROPES):
        _stretch(values)
    return HFConfig(values, f"{config.source} with --hf-overrides")


def _override_rope(values: dict[str, Any], given: Any) -> None:
    """Merge settings of the rope into the object that has them; null takes the scaling away."""
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    stored = values.get(name) or {}
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"--hf-overrides: {name} is {given!r}; it must be an object or null.")
    if given is None:
        given = {"rope_type": "default"}
        stored = {key: value for key, value in stored.items() if key == "rope_theta" or isinstance(value, Mapping)}
    is_nested = [any(isinstance(value, Mapping) for value in each.values()) for each in (stored, given)]
    if stored and is_nested[0] != is_nested[1]:
        kinds = ", ".join(stored) if is_nested[0] else "one object for all layers"
        raise ConfigError(f"--hf-overrides: the rope of this model has {kinds}; write its settings in that form.")
    values[name] = {**stored, **given}
    if name == "rope_scaling" and "rope_theta" in given:
        values["rope_theta"] = given["rope_theta"]


def _stretch(values: dict[str, Any]) -> None:
    """Multiply the longest sequence by the factor of the rope, as vLLM does."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    assert isinstance(rope, dict), "an override has set it"
    factor, longest = rope.get("factor"), values.get(_LENGTH)
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _STRETCHING or not isinstance(factor, int | float) or not isinstance(longest, int):
        return
    trained = rope.setdefault(_TRAINED, longest)
    if isinstance(trained, int):
        values[_LENGTH] = max(longest, int(trained * factor))


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
# Their code in transformers computes attention itself, so it cannot use a paged pool.
_OWN_ATTENTION = (
    "big_bird", "biogpt", "bloom", "blt", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj",
    "megatron-bert", "mpt", "openai-gpt", "reformer", "rembert", "stablelm", "trocr", "xglm", "xlnet",
)  # fmt: skip
# Their attention is not a sum over one paged cache of keys and values a layer, or their layers have parts that Quire lacks.
_OTHER_ATTENTION = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), "attends to tokens that an index chooses"),
    **dict.fromkeys(_OWN_ATTENTION, "has attention that transformers cannot exchange"),
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
