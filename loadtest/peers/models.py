"""Writes the models of a comparison in each server's format.

A model's folder has `hf/` (bfloat16 safetensors, config, tokenizer), a GGUF file for each format, and folders of packed
safetensors. SmolLM2's weights are dequantised from the embedded file. Other shapes have random weights and SmolLM2's
tokenizer, extended to their vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.files.gguf_header import read_header
from engine.text.gguf_tokenizer import build_tokenizer
from loadtest.errors import LoadtestError
from loadtest.peers.gguf_file import fitted, write_gguf
from loadtest.peers.packed import PACKINGS, group_of, save_packed
from loadtest.peers.safetensors_file import Entry, write_safetensors
from loadtest.shapes import Shape

Matrix = NDArray[np.float32]


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GRANITE_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_PERMUTED = ("llama", "granite", "granitemoe")  # their GGUF files rotate neighbours


def prepare(shape: Shape, source: Path, folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Write the named files that are missing; `source` is the embedded GGUF file."""
    metadata = fitted(read_header(source).metadata, shape.vocab)
    tensors = _Stored(shape, source) if shape.is_embedded else _Random(shape)
    for name in names:
        path = folder / shape.name / name
        if path.exists():
            say(f"{path} is there")
            continue
        say(f"writing {path}")
        unfinished = path.with_name(f"unfinished-{name}")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        if shape.arch == "gpt-oss" and path.suffix != ".gguf":
            raise LoadtestError(f"{shape.name} is written as GGUF alone, not as {name}.")
        if name == "hf":
            _write_hf(shape, tensors, metadata, unfinished)
        elif path.suffix == ".gguf":
            write_gguf(tensors, metadata, unfinished, path.stem)
        else:
            _write_packed(shape, tensors, metadata, unfinished, name)
        unfinished.rename(path)


class Weights:
    """The tensors of a model by their GGUF names, in float32."""

    is_random = False

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        width, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (query, width),
            "attn_k.weight": (key, width),
            "attn_v.weight": (key, width),
            "attn_output.weight": (width, query),
            "ffn_norm.weight": (width,),
        }
        if shape.bias:
            layer |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if shape.qk_norm:
            sizes = (query, key) if shape.qk_norm == "whole" else (shape.head_dim, shape.head_dim)
            layer |= {f"attn_{role}_norm.weight": (size,) for role, size in zip("qk", sizes, strict=True)}
        mlp = {"gate": (shape.ffn, width), "up": (shape.ffn, width), "down": (width, shape.ffn)}
        if shape.experts:
            layer["ffn_gate_inp.weight"] = (shape.experts, width)
            layer |= {f"ffn_{role}_exps.weight": (shape.experts, *size) for role, size in mlp.items()}
        else:
            layer |= {f"ffn_{role}.weight": size for role, size in mlp.items()}
        if shape.arch == "gpt-oss":
            layer["post_attention_norm.weight"] = layer.pop("ffn_norm.weight")
            layer |= {"attn_output.bias": (width,), "attn_sinks.weight": (shape.heads,)}
            layer |= {
                name.replace("weight", "bias"): size[:-1] for name, size in layer.items() if name.startswith("ffn_")
            }
        self.shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, width)}
        for index in range(shape.layers):
            self.shapes |= {f"blk.{index}.{name}": size for name, size in layer.items()}
        self.shapes["output_norm.weight"] = (width,)
        if not shape.is_tied:
            self.shapes["output.weight"] = (shape.vocab, width)
        self._last: tuple[str, Matrix] = ("", np.empty(0, np.float32))  # experts are read one by one

    def get(self, name: str) -> Matrix:
        raise NotImplementedError

    def expert(self, name: str, index: int) -> Matrix:
        if name != self._last[0]:
            self._last = (name, self.get(name))
        values: Matrix = self._last[1][index]
        return values

    def hf(self, name: str) -> Matrix:
        """Return a tensor in transformers' order: Llama rotates halves, not pairs."""
        values = self.get(name)
        role = name.split(".")[-2]
        if self.shape.arch not in _PERMUTED or role not in ("attn_q", "attn_k"):
            return values
        heads = self.shape.heads if role == "attn_q" else self.shape.kv_heads
        pairs = values.reshape(heads, -1, 2, values.shape[-1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


class _Stored(Weights):
    """The weights of the embedded file, dequantised."""

    def __init__(self, shape: Shape, source: Path) -> None:
        super().__init__(shape)
        self._tensors = {tensor.name: tensor for tensor in GGUFReader(source).tensors}

    def get(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        return _through_bfloat16(dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name]))


class _Random(Weights):
    """Normal weights seeded by the tensor's name; norms are 1 and biases 0."""

    is_random = True

    def get(self, name: str) -> Matrix:
        size = self.shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(size, np.float32)
        if name.endswith(".bias"):
            return np.zeros(size, np.float32)
        rng = np.random.default_rng(list(name.encode()))
        return _through_bfloat16(
            np.float32(self.shape.stds[not name.startswith("token_embd")]) * rng.standard_normal(size, np.float32)
        )


def bfloat16_bits(values: Matrix) -> NDArray[np.uint16]:
    """Return the bits of bfloat16, rounded to nearest even; numbers are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _through_bfloat16(values: Matrix) -> Matrix:
    """Round to bfloat16, so that eight-bit weights are made of the same numbers."""
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def _bits(make: Callable[[], Matrix]) -> NDArray[np.uint16]:
    return bfloat16_bits(make())


def _hf_tensors(tensors: Weights) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Matrix]]]:
    """Yield name, shape and values of a checkpoint's tensors, in transformers' order and names."""
    for name, size in tensors.shapes.items():
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        prefix, role = (f"model.layers.{layer[1]}.", layer[2]) if layer else ("", stem)
        gate = name.replace("ffn_up", "ffn_gate")
        if role in _HF_NAMES:
            yield f"{prefix}{_HF_NAMES[role]}.{kind}", size, partial(tensors.hf, name)
        elif tensors.shape.arch != "granitemoe" and role == "ffn_gate_inp":
            yield f"{prefix}mlp.gate.weight", size, partial(tensors.get, name)
        elif tensors.shape.arch != "granitemoe":
            part = f"{role.split('_')[1]}_proj.weight"
            for index in range(size[0]):
                yield f"{prefix}mlp.experts.{index}.{part}", size[1:], partial(tensors.expert, name, index)
        elif role == "ffn_up_exps":
            both = (size[0], 2 * size[1], size[2])
            yield f"{prefix}{_GRANITE_NAMES[role]}.weight", both, partial(_stacked, tensors, gate, name)
        elif role in _GRANITE_NAMES:
            yield f"{prefix}{_GRANITE_NAMES[role]}.weight", size, partial(tensors.get, name)


def _stacked(tensors: Weights, first: str, second: str) -> Matrix:
    return np.concatenate([tensors.get(first), tensors.get(second)], axis=1)


def _write_hf(shape: Shape, tensors: Weights, metadata: dict[str, Any], path: Path) -> None:
    path.mkdir(exist_ok=True)
    write_tokenizer(metadata, path, shape.context)
    _write_json(path / "config.json", _hf_config(shape))
    entries = [Entry(name, "BF16", size, partial(_bits, make)) for name, size, make in _hf_tensors(tensors)]
    write_safetensors(path / "model.safetensors", entries)


def _write_packed(shape: Shape, tensors: Weights, metadata: dict[str, Any], path: Path, name: str) -> None:
    """Write the projections packed, all others in bfloat16. Layers of random models are alike."""
    packing, group = PACKINGS[name], group_of(shape.hidden, shape.heads * shape.head_dim, shape.ffn)
    path.mkdir(exist_ok=True)
    write_tokenizer(metadata, path, shape.context)
    _write_json(path / "config.json", _hf_config(shape) | {"quantization_config": packing.config(group)})
    save_packed(_hf_tensors(tensors), path / "model.safetensors", packing, group, alike=tensors.is_random)


def _hf_config(shape: Shape) -> dict[str, Any]:
    return shape.config() | {"bos_token_id": 1, "eos_token_id": 2}


def write_tokenizer(metadata: dict[str, Any], folder: Path, context: int) -> None:
    """Write the files of a tokenizer, and the ids that begin and end texts."""
    tokens = metadata["tokenizer.ggml.tokens"]
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    special = {role: tokens[metadata[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos")}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special["bos"],
            "eos_token": special["eos"],
            "pad_token": special["eos"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
