"""What a model needs and gives on this machine, from its small files alone: memory by group, and the seconds of a step.

Weights are counted by the tensors that an empty model asks for, or that the header of a GGUF file lists. A step's time is the
products' by the measured rates (rates.py), and the rest by a few constants, fitted to steps of eight models on two cores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from engine.core.config import SchedulerConfig
from engine.core.errors import MemoryBudgetError, ModelLoadError
from engine.core.types import Progress
from engine.files.gguf_header import TensorInfo, read_beginning, read_parts
from engine.files.gguf_kinds import Kind
from engine.files.hf_config import HFConfig
from engine.files.quant_config import read_quantization
from engine.runtime.kv_layout import RecurrentSpec, StateSpec, attends
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.models.config_file import is_encoder, servable
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.encoder import Encoder
from engine.runtime.models.encoder_families import ENCODERS, EncoderConfig, read_encoder
from engine.runtime.models.families import FAMILIES, read_config
from engine.runtime.models.load import default_dtype
from engine.runtime.pool.groups import LayerGroups, group_layers
from engine.runtime.pool.pool_size import PoolBudget, fit_pool
from engine.runtime.pool.states import place_states
from engine.runtime.schemes.linear import Scheme
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.encoder_names import plain_name
from engine.runtime.weights.gguf import header_config
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import local_path
from engine.startup.sizes import default_step_tokens
from loadtest.rates import AT, BYTES, HELD, Rates, seconds

_BLOCK = 16  # tokens
_MAX_NUM_SEQS = 128  # a daemon's default on a CPU
_SERVED = 4096  # for which an empty model has its angles
_AS_STORED = {2: "Q2_K", 3: "Q3_K", 4: "Q4_1", 8: "Q8_0"}  # kinds that are as fast as codes of so many bits
# Beside products a step takes: seconds, seconds a layer; multiply-adds of float32 for each number of each layer's stream, of
# the recurrent states and of each pair of a prompt's positions; and bytes, of what it writes and reads of states and K/V.
_STEP_S, _LAYER_S = 1.0e-3, 36e-6
_STREAM, _STATE, _PAIR = 1200, 1.5, 0.6
_STATE_BYTES, _KV_BYTES = 0.7, 1.15
_ENCODER_STREAM, _ENCODER_PAIR = 600, 0.85  # of encoders, which also take a time a text, for Python
_TEXT_S = 0.4e-3

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}

_TABLES = ("words", "positions", "types", "distances")  # of an encoder

Weights = Mapping[tuple[str, str], int]  # how many, by role and kind; roles: layers, experts, head, embedding


class StepSeconds(NamedTuple):
    """The time of a step: by its rows and its samples, a token of context, a pair of a prompt's positions."""

    rows: dict[int, float]
    samples: dict[int, float]
    context_s: float
    pair_s: float


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A model, known by its config, before its weights are read."""

    name: str
    weights: Weights
    dtype: torch.dtype  # of what it computes
    is_plain: bool  # its weights are floats, and others can be made of them

    @property
    def own_kind(self) -> str:
        """Return the kind of its weights as floats."""
        return _KINDS[self.dtype]

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of weights whose rates a prediction needs."""
        return {kind for _, kind in self.weights} | {"BF16", "F32"}

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in memory, packed."""
        return round(sum(num * HELD[kind] for (_, kind), num in self.weights.items()))


@dataclass(frozen=True, kw_only=True)
class FittedEncoder(Weighed):
    """A model that reads each text whole, and generates nothing."""

    config: EncoderConfig

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.config.reaches)

    @property
    def state_bytes(self) -> dict[str, int]:
        """Return nothing: no text leaves a state."""
        return {}

    def as_stored(self, kind: str) -> FittedEncoder:
        """Return the model with another kind of matrices."""
        return replace(
            self, weights={(role, kind if role == "layers" else own): num for (role, own), num in self.weights.items()}
        )

    def seconds(self, rates: Rates, length: int, num: int) -> float:
        """Return the seconds of so many texts of a length, in steps of as many as fit one."""
        rows, hidden = length * num, self.config.hidden_size
        products = sum(n * seconds(rates, kind, rows) for (role, kind), n in self.weights.items() if role == "layers")
        seen = sum(length if reach is None else min(length, 2 * reach + 1) for reach in self.config.reaches)
        floats = rows * (_ENCODER_STREAM * self.num_layers * hidden + _ENCODER_PAIR * 2 * hidden * seen)
        steps_s = math.ceil(num / max(default_step_tokens("cpu") // length, 1)) * (_STEP_S + _LAYER_S * self.num_layers)
        return products + floats * rates["F32"][-1] / AT[-1] + steps_s + num * _TEXT_S


@dataclass(frozen=True, kw_only=True)
class Fitted(Weighed):
    """A model that generates."""

    config: ModelConfig
    states: Sequence[StateSpec]

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.config.layers)

    def as_stored(self, kind: str) -> Fitted:
        """Return the model with another kind of weights: its own floats, INT8, or Q4_K as in a Q4_K_M file."""
        others = "Q6_K" if kind == "Q4_K" else kind
        weights = Counter[tuple[str, str]]()
        for (role, _), num in self.weights.items():
            is_table = role in ("head", "embedding")
            weights[role, self.own_kind if (role, kind) == ("embedding", "INT8") else others if is_table else kind] += (
                num
            )
        if kind == "INT8" and self.config.tied_head:  # rounded rows cannot be looked up
            weights["embedding", self.own_kind] = self.config.vocab_size * self.config.hidden_size
        return replace(self, weights=weights)

    @cached_property
    def state_bytes(self) -> dict[str, int]:
        """Return bytes by group: of a token with full attention, in a window, of a latent; of a sequence's recurrent state."""
        found = Counter[str]()
        for spec in self.states:
            if isinstance(spec, RecurrentSpec):
                found["recurrent"] += sum(kind.num * kind.num_bytes for kind in spec.pieces)
            else:
                found["latent" if spec.is_latent else "full" if spec.window is None else "window"] += (
                    spec.bytes_a_token(self.dtype)
                )
        return dict(found)

    @cached_property
    def _groups(self) -> LayerGroups:
        return group_layers(self.states, self.dtype, self.config.max_positions)

    @property
    def _block_bytes(self) -> int:
        return _BLOCK * self._groups.cuts[-1]

    def scheduler(self, pool_bytes: int) -> SchedulerConfig:
        """Return the settings of a daemon's scheduler with a pool of so many bytes."""
        return SchedulerConfig(
            num_blocks=max(pool_bytes // self._block_bytes, 1),
            block_size=_BLOCK,
            max_model_len=self.config.max_positions,
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=default_step_tokens("cpu"),
            windows=self._groups.windows,
            has_full=self._groups.has_full,
            state_blocks=place_states(self.states, self._block_bytes).num_blocks,
            writes_midway=True,
        )

    def pool_bytes(self, length: int, num_seqs: int) -> int:
        """Return the bytes of a pool for so many sequences of a length at once."""
        return num_seqs * self.scheduler(0).max_blocks(length) * self._block_bytes

    def context(self, pool_bytes: int, num_seqs: int) -> int:
        """Return the longest context that so many sequences at once have in a pool; 0 for none."""
        blocks_of, longest = self.scheduler(0).max_blocks, self.config.max_positions
        budget = PoolBudget(pool_bytes // num_seqs)
        try:
            return fit_pool(
                budget, self._block_bytes, _BLOCK, blocks_of, model_len=longest, asked_len=None
            ).max_model_len
        except MemoryBudgetError:
            return 0

    def steps(self, rates: Rates) -> StepSeconds:
        """Return the seconds of steps."""
        multiply_s, byte_s = rates["F32"][-1] / AT[-1], rates["BF16"][0] / BYTES["BF16"]
        specs, state_bytes = attends(self.states), self.state_bytes.get("recurrent", 0)
        stream = _STREAM * self.num_layers * self.config.hidden_size
        state = _STATE * state_bytes / torch.float32.itemsize
        kv_bytes = sum(bytes_ for name, bytes_ in self.state_bytes.items() if name != "recurrent")

        def rows(num: int) -> float:
            products = sum(
                self._product(role, kind, weights, rates, num) for (role, kind), weights in self.weights.items()
            )
            return _STEP_S + _LAYER_S * self.num_layers + products + num * (stream + state) * multiply_s

        def samples(num: int) -> float:
            heads = ((kind, weights) for (role, kind), weights in self.weights.items() if role == "head")
            head = sum(weights * seconds(rates, kind, num) for kind, weights in heads)
            return (head if num else 0.0) + num * _STATE_BYTES * 2 * state_bytes * byte_s

        pairs = sum(spec.num_heads * (spec.head_dim + spec.out_dim) for spec in specs)
        at = (*AT[:-1], 64, 128, 256, 512, 1024)
        return StepSeconds(
            {0: rows(1), **{num: rows(num) for num in at}},
            {num: samples(num) for num in (0, *AT)},
            _KV_BYTES * kv_bytes * byte_s,
            _PAIR * pairs * multiply_s,
        )

    def _product(self, role: str, kind: str, weights: int, rates: Rates, num_rows: int) -> float:
        """Return the seconds of some layers' products; of experts those that some of the rows choose."""
        if role == "layers":
            return weights * seconds(rates, kind, num_rows)
        moe = next((layer.moe for layer in self.config.layers if layer.moe), None)
        if role != "experts" or moe is None:
            return 0.0
        share = moe.router.num_chosen / moe.router.num_experts
        used = 1 - (1 - share) ** num_rows
        return weights * used * seconds(rates, kind, num_rows * share / used)


def read(config: EngineConfig) -> Fitted | FittedEncoder:
    """Return a model by its small files; of a hub, nothing else is fetched. Raises ModelLoadError."""
    path = local_path(config.model)
    if path is None:
        from engine.hub.model import open_model

        found = open_model(config.model, config.revision, config.download_dir)
        if not found.is_folder:
            source = ""
            with closing(found.beginnings()) as beginnings:
                for source, content in beginnings:
                    metadata, tensors = read_beginning(content)
                    hf = None if tensors is None else header_config(metadata, tensors, source)
                    if hf is not None:
                        return _fitted(config, hf, tensors)
            if source:
                raise ModelLoadError(
                    f"{source}: its header did not arrive, or is of the first of several parts; download the model."
                )
        path = found.fetch_config(weights=False) if found.is_folder else found.fetch(_quiet)
    checkpoint = open_checkpoint("auto", path)
    if path.is_file():
        listed = [tensor for part in read_parts(path).values() for tensor in part.tensors]
        return _fitted(config, checkpoint.config, listed)
    return _fitted(config, checkpoint.config, None, path)


def _quiet(_: Progress) -> None:
    """Report nothing."""


def _fitted(
    config: EngineConfig, hf: HFConfig, tensors: Sequence[TensorInfo] | None, folder: Path | None = None
) -> Fitted | FittedEncoder:
    hf, device = servable(hf, config.hf_overrides), torch.device("cpu")
    dtype = default_dtype(hf, device, config.cpu_kernels)
    made: Callable[..., Fitted | FittedEncoder]
    own: ModelConfig | EncoderConfig
    if is_encoder(hf.values):
        own = read_encoder(hf)
        loads = Encoder(own, served_len=_SERVED, dtype=dtype, device=device, scheme=Scheme()).loads
        made = partial(FittedEncoder, config=own)
    elif hf.values.get("model_type") in FAMILIES:
        own = read_config(hf.values, hf.source)
        model = Decoder(own, served_len=_SERVED, dtype=dtype, device=device, scheme=Scheme())
        loads, made = model.loads, partial(Fitted, config=own, states=model.states)
    else:
        known = ", ".join([*FAMILIES, *ENCODERS])
        raise ModelLoadError(f"{hf.source}: only Quire's own families are foreseen ({known}).")
    weights, kind, is_plain = Counter[tuple[str, str]](), _KINDS[dtype], tensors is None
    if tensors is not None:
        shapes = {each.name: (each.shape, Kind(each.kind).name) for each in tensors}
    else:
        quantization = None if folder is None else read_quantization(hf, folder)
        if quantization is not None:
            kind, is_plain = _AS_STORED.get(quantization.default.bits if quantization.default else 0, "Q8_0"), False
        shapes = {name: (shape, kind) for load in loads for name, shape in load.shapes.items()}
    for name, (shape, stored) in shapes.items():
        if len(shape) > 1 and (role := _role(name, own)):
            is_float = stored in ("F16", "BF16") or (tensors is None and role in ("head", "embedding"))
            weights[role, _KINDS[dtype] if is_float else stored] += math.prod(shape)
    return made(name=config.model, weights=weights, dtype=dtype, is_plain=is_plain)


def _role(name: str, config: ModelConfig | EncoderConfig) -> str:
    """Return what a tensor is for, by its name in either format; "" for one that is not read."""
    if isinstance(config, EncoderConfig):
        return "embedding" if plain_name(name).partition(".")[0] in _TABLES else "layers"
    if name.startswith("blk.") and int(name.split(".")[1]) >= len(config.layers):
        return ""  # of the layers behind the last
    if "embed_tokens" in name or name.startswith(("token_embd", "per_layer_token_embd")):
        return "head" if config.tied_head and "per_layer" not in name else "embedding"
    if name.startswith(("lm_head", "output.")):
        return "head"
    return "experts" if ".experts." in name or "_exps." in name else "layers"
