"""Runs other causal LMs with transformers' code, over Quire's paged attention.

The batch enters as one row, [1, T], with explicit positions and no cache. Transformers calls the attention function
registered here, and the step's LayerAttention reaches it through the model's keyword arguments. The attention settings
of each layer (heads, scale, window, sinks) are not guessed from the config but recorded in one forward pass over two
tokens. A model whose state is not keys and values is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from engine.core.errors import ModelLoadError
from engine.core.types import Progress, ReportProgress
from engine.files.vector_files import VectorSettings
from engine.runtime.kv_layout import AttentionSpec, StateSpec
from engine.runtime.layers.parts import LayerAttention, Target
from engine.runtime.layers.rope_config import describe_longrope
from engine.runtime.lora.loader import AdapterRows
from engine.runtime.models.causal_lm import ModelCapabilities
from engine.runtime.models.config_file import SERVABLE_LAYERS, read_model_config
from engine.runtime.models.fill import check_size
from engine.runtime.models.pooler import Pooler
from engine.runtime.native.decoder import Streams, Vectors
from engine.runtime.weights.checkpoint import Checkpoint
from engine.settings.engine_config import EngineConfig
from engine.system.calls import foreign_code

_IMPLEMENTATION = "quire_paged"


def load_adapter(
    config: EngineConfig,
    path: Path,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    report: ReportProgress,
) -> TransformersModel:
    """Build and fill the model at `path` with transformers."""
    hf_config = read_foreign_config(path, config.hf_overrides)
    max_positions = _max_positions(hf_config, path)
    config.check_length(max_positions)
    report(Progress("weights", f"{hf_config.model_type}, through transformers"))
    check_size(checkpoint, _num_weights(hf_config, path), dtype, device)
    load = _random if config.load_format == "dummy" else _pretrained
    model = load(config, hf_config, path, dtype).to(device).eval().requires_grad_(False)
    for remark in _fix_ropes(model, config.max_model_len or max_positions, path):
        report(Progress("positions", remark))
    return TransformersModel(model, max_positions, str(path))


class TransformersModel:
    """A CausalLM around a model of transformers."""

    capabilities = ModelCapabilities()  # no graphs: other code may run on the host in between
    vectors = VectorSettings()
    pooler: Pooler | None = None
    described = None

    def __init__(self, model: Any, max_model_len: int, source: str) -> None:
        self.max_model_len = max_model_len
        self.dtype: torch.dtype = model.dtype
        self.adapter_targets: Mapping[str, Target] = {}  # adapters cannot change this model
        self._body = model.get_decoder()
        if self._body is model.get_output_embeddings():  # which ModernBERT's decoders call "decoder"
            self._body = model.base_model
        self._head = model
        # The head's forward also scales and caps; a body that returns given states keeps that behaviour.
        self._given = _Given()
        model.set_submodule(_name_of(self._body, model), self._given)
        self.vocab_size, self.states = self._overhear(next(model.parameters()).device, source)

    def _overhear(self, device: torch.device, source: str) -> tuple[int, Sequence[StateSpec]]:
        """Return the width of the logits and each layer's attention settings, from a forward pass."""
        ears, positions = _Overhear(source), torch.arange(2, device=device)

        def refuse(error: Exception) -> Exception:
            return _refusal(source, f"a first forward pass over paged attention failed ({_line(error)})")

        with foreign_code(refuse, (torch.OutOfMemoryError, ModelLoadError)), torch.inference_mode():
            hidden = self.forward(torch.tensor([0, 2], device=device), positions, ears)
            other = self.forward(torch.tensor([1, 2], device=device), positions, _Overhear(source))
            vocab_size = self.logits(hidden).shape[-1]
        # This attention mixes no tokens, so a second token that depends on the first got it another way.
        if not torch.allclose(hidden[1], other[1], rtol=1e-2, atol=1e-2, equal_nan=True):
            raise _refusal(source, "its tokens affect each other outside of attention")
        return vocab_size, ears.specs(self._body.config.get_text_config().num_hidden_layers)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: LayerAttention,
        rows: Tensor | None = None,
        adapters: Sequence[AdapterRows] = (),
        streams: Streams | None = None,
        vectors: Vectors | None = None,
    ) -> Tensor:
        """Return normed hidden states [R, hidden] of `rows` [R], or all; ids, positions [T]."""
        assert not adapters, "load_model has refused adapters"
        assert streams is None, "speculation.py has refused heads"
        assert vectors is None, "it has no tower"
        output = self._body(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, quire_attention=attention
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if rows is None else hidden.index_select(0, rows)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, vocab_size] of hidden states, in `out` if given."""
        states = hidden[None]
        self._given.states = states
        # Some heads look at the length of their inputs.
        logits: Tensor = self._head(input_ids=None, inputs_embeds=states, use_cache=False).logits[0]
        return logits.float() if out is None else out.copy_(logits)


@dataclass
class _States(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers is not typed
    """The outputs that a head may read from a body: hidden states only, None for all others."""

    cross_attentions: None = None
    shared_kv_states: None = None


class _Given(nn.Module):
    """Replaces a model's body and returns the states that it was given."""

    states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _States:
        states, self.states = self.states, None
        return _States(last_hidden_state=states)


class _Overhear:
    """Records each layer's attention settings, and returns its values."""

    paged_step, from_projected = None, None  # there is no pool, nor a backend

    def __init__(self, source: str) -> None:
        self._source = source
        self._specs: dict[int, AttentionSpec] = {}
        self._heard: list[tuple[Tensor, Tensor, int]] = []

    def hear(self, layer: int, spec: AttentionSpec, key: Tensor, value: Tensor) -> None:
        if layer in self._specs:
            raise _refusal(self._source, f"layer {layer} attends more than once")
        # A layer that reads the keys and values of another gets its very tensors.
        source = next((each for k, v, each in self._heard if k is key and v is value), None)
        self._specs[layer] = replace(spec, source=source)
        if source is None:
            self._heard.append((key, value, layer))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - the protocol's
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def specs(self, num_layers: int) -> list[AttentionSpec]:
        if sorted(self._specs) != list(range(num_layers)):
            raise _refusal(
                self._source, f"only {len(self._specs)} of its {num_layers} layers use attention that can be paged"
            )
        return [self._specs[layer] for layer in range(num_layers)]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    quire_attention: LayerAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: [1, heads, T, head_dim] -> [1, T, heads, head_dim]."""
    width = max(query.shape[-1], value.shape[-1])  # one for all in the pool; zeros change no score and add nothing
    q, k, v = (F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1])) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]  # nn.Module types its attributes as Tensor | Module
    if isinstance(quire_attention, _Overhear):
        window = _window(module, attention_mask, sliding_window)
        spec = AttentionSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=width,
            scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            window=window,
            softcap=softcap,
            sinks=s_aux,
        )
        quire_attention.hear(layer, spec, key, value)
    if quire_attention is None:
        raise ValueError("its code does not hand keyword arguments down to attention")
    return quire_attention(layer, q, k, v)[None, ..., : value.shape[-1]], None


@dataclass(frozen=True, slots=True)
class _Window:
    """Stands for the mask of a layer with a window; some models write the window there alone."""

    size: int

    def __getitem__(self, _: object) -> _Window:
        """Return itself: some models cut masks to the rows that they compute."""
        return self


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> _Window | None:
    """Return what stands for a causal mask, for the layers' attention."""
    return None if local_size is None else _Window(local_size)


AttentionInterface.register(_IMPLEMENTATION, _attend)
AttentionMaskInterface.register(_IMPLEMENTATION, _mask)


def _window(module: nn.Module, mask: object, given: int | None) -> int | None:
    """Return a layer's window. Raises ValueError for a mask that is more than causal."""
    if mask is not None and not isinstance(mask, _Window):
        raise ValueError("it builds an attention mask or bias of its own")
    if getattr(module, "is_causal", True) is False:
        raise ValueError("its attention is not causal")
    sizes = {size for size in (given, None if mask is None else mask.size) if size is not None}
    if len(sizes) > 1:
        raise ValueError(f"its mask and its attention have different windows, {sorted(sizes)}")
    return min(sizes, default=None)


def read_foreign_config(path: Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """Return a model folder's config, with --hf-overrides. Raises ModelLoadError for one that cannot be served."""
    values = read_model_config(path, overrides=overrides).values
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise _refusal(path, f"neither Quire nor transformers {transformers.__version__} knows the kind {kind!r}")
    with _transformers(path, "read its config"):
        if overrides:
            config = CONFIG_MAPPING[kind].from_dict(dict(values))
        else:
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise _refusal(path, "it is an encoder-decoder")
    if text is not config:
        raise _refusal(
            path, "its language model is part of another model; leave --model-impl at auto, or serve a text model"
        )
    ropes = getattr(text, "rope_parameters", None) or {}
    if any(isinstance(each, dict) and each.get("rope_type") in ("longrope", "dynamic") for each in ropes.values()):
        raise _refusal(path, "it has length-dependent rope scalings by layer type")
    foreign = set(getattr(text, "layer_types", None) or ()) - SERVABLE_LAYERS
    if foreign:
        raise _refusal(path, f"it has layers of type {', '.join(sorted(foreign))}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(path, f"transformers has no causal language model for {config.model_type!r}")
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model._is_stateful:  # noqa: SLF001 - how transformers' classes declare what they are
        raise _refusal(path, f"{model.__name__} keeps a recurrent state")
    if not model._supports_attention_backend:  # noqa: SLF001 - how they declare it
        raise _refusal(path, f"transformers cannot exchange the attention of {model.__name__}")
    return config


def _num_weights(hf_config: Any, path: Path) -> int:
    """Return the number of the model's parameters, without allocating them."""
    with torch.device("meta"):
        model = _build(hf_config, path)
    return sum(parameter.numel() for parameter in model.parameters())


def _pretrained(_: EngineConfig, hf_config: Any, path: Path, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    with _transformers(path, "load it"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=_IMPLEMENTATION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(f"{path} lacks {len(missing)} of the model's tensors, {missing[0]!r} first.")
    return model


def _random(config: EngineConfig, hf_config: Any, path: Path, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return _build(hf_config, path, dtype=dtype)


def _build(hf_config: Any, path: Path, **settings: Any) -> Any:
    with _transformers(path, "build it"):
        return AutoModelForCausalLM.from_config(hf_config, attn_implementation=_IMPLEMENTATION, **settings)


def _transformers(path: Path, task: str) -> AbstractContextManager[None]:
    """Refuse a model over which transformers' code raises any error but that of memory."""
    return foreign_code(
        lambda error: ModelLoadError(f"{path}: transformers cannot {task} ({_line(error)})."), (torch.OutOfMemoryError,)
    )


def _name_of(body: nn.Module, model: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is body)


def _max_positions(hf_config: Any, path: Path) -> int:
    found = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int):
        raise _refusal(path, "its config has no 'max_position_embeddings'")
    return found


def _fix_ropes(model: nn.Module, served_len: int, path: Path) -> set[str]:
    """Fix length-dependent rope scalings for the longest sequence: keys are cached rotated. Return lines for the log."""
    remarks = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in ("longrope", "dynamic"):
            continue
        inverse, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=served_len)
        module.inv_freq.copy_(inverse)  # type: ignore[operator]  # a buffer
        module.rope_type = "default"  # type: ignore[assignment]  # an ordinary attribute
        near, far = _rotation(module, inverse, [1]), _rotation(module, inverse, [1, served_len - 1])
        if not torch.equal(near, far):
            raise _refusal(path, "it rotates all tokens of a batch by the longest of its sequences")
        if kind == "longrope" and torch.allclose(near, inverse.cos() * module.attention_scaling, atol=1e-2):
            config: Any = module.config
            trained_len: int = config.rope_parameters["original_max_position_embeddings"]
            remarks.add(describe_longrope(served_len, trained_len))
    return remarks


def _rotation(module: nn.Module, inverse: Tensor, positions: list[int]) -> Tensor:
    """Return the cosines by which a module rotates the first of some positions."""
    cos: Tensor = module(inverse.new_zeros(1, 1, 1), position_ids=torch.tensor([positions], device=inverse.device))[0]
    return cos[0, 0, : len(inverse)]


def _refusal(source: object, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{source} cannot be served: {why}; serve a model of another family, such as Llama, Qwen3 or Mixtral."
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
