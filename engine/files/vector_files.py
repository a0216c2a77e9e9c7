"""Reads how a model makes vectors or scores of texts: sentence-transformers' files, and the labels of a classifier. No torch.

Without such files a decoder's vector is its last token's state, an encoder's the mean of all, of length one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ModelLoadError
from engine.core.types import Pooling
from engine.files.hf_config import HFConfig
from engine.system.regular_file import read_json, read_object

MODULES = "modules.json"
_CLASSIFIER, _STEPS, _REWARD = "ForSequenceClassification", "ForProcessRewardModel", "RewardModel"
_MAX_BYTES = 1 << 20
_POOLINGS = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid"}
_GGUF_POOLINGS = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}
_GGUF_RANK = 4


class DenseModule(NamedTuple):
    """A product of pooled vectors, in a folder beside the model, or by its name in the model's own file."""

    place: Path | str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """How one vector is made of a text, or one score of each label."""

    pooling: Pooling = Pooling.LAST
    normalizes: bool = True
    is_embedder: bool = False  # sentence-transformers' files are there: it makes vectors alone
    dense: tuple[DenseModule, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()  # names, and what comes before a text
    default_prompt: str | None = None  # its name
    max_tokens: int | None = None  # of a text
    lowers: bool = False  # texts are read in lower case
    labels: tuple[str, ...] = ()  # of a classifier
    activation: str = ""  # of a classifier's scores: sigmoid, softmax or none
    pair_activation: str = ""  # of the score of a pair of texts
    label_tokens: tuple[str, ...] = ()  # whose rows of an LM head are a classifier
    is_difference: bool = False  # there are two, and the score is how much likelier the second is
    is_reward: bool = False  # the head is a reward model's
    is_qwen3_reranker: bool = False  # pairs are written into Qwen3-Reranker's template

    @property
    def served(self) -> str:
        """Return what a model without an LM head does, for an error."""
        if not self.labels:
            return "serves vectors alone. Send texts to /v1/embeddings"
        if len(self.labels) == 1:
            return "scores texts alone. Send pairs to /v1/rerank or /v1/score, single texts to /v1/classify"
        return f"scores {len(self.labels)} labels alone. Send texts to /v1/classify"

    def prompt(self, name: str | None) -> str | None:
        """Return what comes before a text of a kind, "" for none; None for a name that is not known."""
        known = dict(self.prompts)
        name = self.default_prompt if name is None else name
        others = {"query": "", "document": known.get("passage", "")}
        return "" if name is None else known.get(name, others.get(name))


def is_classifier(values: Mapping[str, Any]) -> bool:
    """Return whether a config names a class that scores labels."""
    return _is_named(values, _CLASSIFIER, _REWARD)


def _is_named(values: Mapping[str, Any], *endings: str) -> bool:
    names = values.get("architectures")
    return isinstance(names, (list, tuple)) and any(str(name).endswith(endings) for name in names)


def read_vectors(config: HFConfig, path: Path, *, is_encoder: bool) -> VectorSettings:
    """Return the settings of the model at a path. Raises ModelLoadError."""
    if is_classifier(config.values):
        return _classifier(config, is_encoder=is_encoder)
    found = VectorSettings(pooling=Pooling.MEAN if is_encoder else Pooling.LAST)
    if not (path / MODULES).is_file():
        number = config.integer("pooling_type", 0)  # of a GGUF file, as its dense modules
        if number == _GGUF_RANK:
            raise ModelLoadError(f"{config.source} is a reranker without a head; convert the model again.")
        parts = config.section("parts_behind").values
        dense = tuple([DenseModule(name, inputs, outputs, bias, "") for name, (outputs, inputs, bias) in parts.items()])
        pooling = _GGUF_POOLINGS.get(number, found.pooling)
        return replace(found, pooling=pooling, dense=dense, is_embedder=is_encoder or number > 0)
    found = replace(found, is_embedder=True, normalizes=False)
    for module in _list_of(path / MODULES):
        if Path(module.text("path", "")).name != module.text("path", ""):
            raise module.error("path", "a folder beside the model")
        folder = path / module.text("path", "")
        kind = module.text("type").rpartition(".")[2]
        if kind == "Pooling":
            found = replace(found, pooling=_pooling(_object(folder / "config.json")))
        elif kind == "Dense":
            found = replace(found, dense=(*found.dense, _dense(folder)))
        elif kind == "Normalize":
            found = replace(found, normalizes=True)
        elif kind != "Transformer":
            raise module.error("type", "Transformer, Pooling, Dense or Normalize; sparse vectors are not served")
    spoken, limits = (
        _object(path / name, is_needed=False)
        for name in ("config_sentence_transformers.json", "sentence_bert_config.json")
    )
    prompts = spoken.section("prompts")
    return replace(
        found,
        prompts=tuple((name, prompts.text(name, "")) for name in prompts.values),
        default_prompt=spoken.text("default_prompt_name") if spoken.has("default_prompt_name") else None,
        max_tokens=limits.optional_size("max_seq_length"),
        lowers=limits.flag("do_lower_case"),
    )


def _classifier(config: HFConfig, *, is_encoder: bool) -> VectorSettings:
    named, tokens = config.section("id2label").values, tuple[str, ...]()
    labels = [str(named[key]) for key in sorted(named, key=lambda key: int(key) if str(key).isdigit() else 0)]
    labels = labels or [f"LABEL_{index}" for index in range(config.size("num_labels", 2))]
    is_reranker = config.flag("is_original_qwen3_reranker")
    if config.has("classifier_from_token"):
        tokens = config.texts("classifier_from_token")
        labels = [*tokens]
    is_difference = is_reranker or config.text("method", "") == "from_2_way_softmax"
    if is_difference and len(tokens) != 2:
        raise config.error("classifier_from_token", "two tokens, of which the second means yes")
    labels = labels[1:] if is_difference else labels
    is_reward = _is_named(config.values, _REWARD)
    if is_reward:  # of a whole answer, or whether a step is right, whatever the file says
        labels = [f"LABEL_{index}" for index in range(2 if _is_named(config.values, _STEPS) else 1)]
    usual = ("" if is_reward else "sigmoid") if len(labels) == 1 else "softmax"
    kind = config.text("problem_type", "")
    chosen = {"regression": "", "multi_label_classification": "sigmoid"}.get(kind, usual)
    given = config.section("sentence_transformers").text(
        "activation_fn", config.text("sbert_ce_default_activation_function", "")
    )
    pair = _ACTIVATIONS.get(given.rpartition(".")[2], chosen) if given else chosen
    pooling = Pooling.CLS if is_encoder else Pooling.LAST
    if config.has("classifier_pooling"):
        pooling = Pooling.CLS if config.text("classifier_pooling") in ("cls", "bos") else Pooling.MEAN
    return VectorSettings(
        pooling=pooling, normalizes=False, labels=tuple(labels), activation=chosen, pair_activation=pair,
        label_tokens=tokens, is_difference=is_difference, is_reward=is_reward, is_qwen3_reranker=is_reranker,
    )  # fmt: skip


def _pooling(config: HFConfig) -> Pooling:
    """Return the pooling of a module; older files have a flag for each."""
    flags = {key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token"): key
             for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True}  # fmt: skip
    names = [config.text("pooling_mode")] if config.has("pooling_mode") else list(flags)
    if len(names) != 1 or names[0] not in _POOLINGS:
        raise ModelLoadError(
            f"{config.source}: vectors are pooled by {' and '.join(names) or 'nothing'}; Quire has one of {', '.join(_POOLINGS)}."
        )
    config.require(config.flag("include_prompt", True) or names[0] == "lasttoken", "include_prompt", "true")
    return _POOLINGS[names[0]]


def _dense(folder: Path) -> DenseModule:
    config = _object(folder / "config.json")
    name = config.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    config.require(name in _ACTIVATIONS, "activation_function", f"one of {', '.join(_ACTIVATIONS)}")
    sizes = config.size("in_features"), config.size("out_features")
    return DenseModule(folder, *sizes, config.flag("bias", True), _ACTIVATIONS[name])


def _object(path: Path, *, is_needed: bool = True) -> HFConfig:
    if not (is_needed or path.exists()):
        return HFConfig({}, str(path))
    missing = f"{path} is missing, which {MODULES} names; download the model again."
    return HFConfig(read_object(path, _MAX_BYTES, ModelLoadError, missing), str(path))


def _list_of(path: Path) -> list[HFConfig]:
    """Return the objects in a JSON list. Raises ModelLoadError."""
    try:
        values = read_json(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ModelLoadError(f"{path} is no list of modules; download the model again.")
    return [HFConfig(value, str(path)) for value in values]
