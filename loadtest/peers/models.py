"""Writes the models of a comparison in each server's format.

A model's folder has `hf/` (bfloat16 safetensors, config, tokenizer), `bf16.gguf` and `f16.gguf`, and in eight bits
`q8_0.gguf` and `w8a8/` (int8 rows with a scale each). SmolLM2's weights are dequantised from the embedded file. The
shapes of Qwen2.5 have random weights and SmolLM2's tokenizer, extended to their vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.gguf_header import read_header
from engine.text.gguf_tokenizer import build_tokenizer
from loadtest.peers.safetensors_file import Entry, write_safetensors
from loadtest.shapes import Shape

Matrix = NDArray[np.float32]


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FILE_TYPES = {
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.BF16: LlamaFileType.MOSTLY_BF16,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


def prepare(shape: Shape, source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write the missing files of a model; `source` is the embedded GGUF file."""
    metadata = read_header(source).metadata
    tensors = _Stored(shape, source) if shape.is_embedded else _Random(shape)
    writers: dict[str, Callable[[Path], None]] = {
        "hf": lambda path: _write_hf(shape, tensors, metadata, path),
        "w8a8": lambda path: _write_w8a8(shape, tensors, metadata, path),
        "bf16.gguf": lambda path: _write_gguf(shape, tensors, metadata, path, GGMLQuantizationType.BF16),
        "f16.gguf": lambda path: _write_gguf(shape, tensors, metadata, path, GGMLQuantizationType.F16),
        "q8_0.gguf": lambda path: _write_gguf(shape, tensors, metadata, path, GGMLQuantizationType.Q8_0),
    }
    for name, write in writers.items():
        path = folder / shape.name / name
        if path.exists():
            say(f"{path} is there")
            continue
        say(f"writing {path}")
        unfinished = path.with_name(f"unfinished-{name}")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        unfinished.rename(path)


class Weights:
    """The tensors of a model by their GGUF names, in float32."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        width, kv_width = shape.hidden, shape.kv_heads * shape.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (width, width),
            "attn_k.weight": (kv_width, width),
            "attn_v.weight": (kv_width, width),
            "attn_output.weight": (width, width),
            "ffn_norm.weight": (width,),
            "ffn_gate.weight": (shape.ffn, width),
            "ffn_up.weight": (shape.ffn, width),
            "ffn_down.weight": (width, shape.ffn),
        }
        if shape.bias:
            layer |= {"attn_q.bias": (width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
        self.shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, width)}
        for index in range(shape.layers):
            self.shapes |= {f"blk.{index}.{name}": size for name, size in layer.items()}
        self.shapes["output_norm.weight"] = (width,)

    def get(self, name: str) -> Matrix:
        raise NotImplementedError

    def hf(self, name: str) -> Matrix:
        """Return a tensor in transformers' order: Llama rotates halves, not pairs."""
        values = self.get(name)
        role = name.split(".")[-2]
        if self.shape.arch != "llama" or role not in ("attn_q", "attn_k"):
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

    def get(self, name: str) -> Matrix:
        size = self.shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(size, np.float32)
        if name.endswith(".bias"):
            return np.zeros(size, np.float32)
        rng = np.random.default_rng(list(name.encode()))
        return _through_bfloat16(np.float32(0.02) * rng.standard_normal(size, np.float32))


def bfloat16_bits(values: Matrix) -> NDArray[np.uint16]:
    """Return the bits of bfloat16, rounded to nearest even; numbers are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _through_bfloat16(values: Matrix) -> Matrix:
    """Round to bfloat16, so that eight-bit weights are made of the same numbers."""
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def int8_rows(values: Matrix) -> tuple[NDArray[np.int8], Matrix]:
    """Return each row as int8, and the scales of the rows."""
    scales = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / np.float32(127)
    return np.rint(values / scales).astype(np.int8), scales.astype(np.float32)


def _bits(tensors: Weights, name: str) -> NDArray[np.uint16]:
    return bfloat16_bits(tensors.hf(name))


def _int8(tensors: Weights, name: str) -> NDArray[np.int8]:
    return int8_rows(tensors.hf(name))[0]


def _scales(tensors: Weights, name: str) -> Matrix:
    return int8_rows(tensors.hf(name))[1]


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if layer := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        return f"model.layers.{layer[1]}.{_HF_NAMES[layer[2]]}.{kind}"
    return f"{_HF_NAMES[stem]}.{kind}"


def _write_hf(shape: Shape, tensors: Weights, metadata: dict[str, Any], path: Path) -> None:
    path.mkdir(exist_ok=True)
    _write_tokenizer(shape, metadata, path)
    _write_json(path / "config.json", _hf_config(shape))
    entries = [
        Entry(_hf_name(name), "BF16", size, partial(_bits, tensors, name)) for name, size in tensors.shapes.items()
    ]
    write_safetensors(path / "model.safetensors", entries)


def _write_w8a8(shape: Shape, tensors: Weights, metadata: dict[str, Any], path: Path) -> None:
    """Write int8 rows in vLLM's compressed-tensors layout."""
    path.mkdir(exist_ok=True)
    _write_tokenizer(shape, metadata, path)
    _write_json(path / "config.json", _hf_config(shape) | {"quantization_config": _W8A8})
    entries = []
    for name, size in tensors.shapes.items():
        hf_name = _hf_name(name)
        if len(size) == 1 or name == "token_embd.weight":
            entries.append(Entry(hf_name, "BF16", size, partial(_bits, tensors, name)))
        else:
            entries.append(Entry(hf_name, "I8", size, partial(_int8, tensors, name)))
            entries.append(Entry(hf_name + "_scale", "F32", (size[0], 1), partial(_scales, tensors, name)))
    write_safetensors(path / "model.safetensors", entries)


_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def _hf_config(shape: Shape) -> dict[str, Any]:
    return shape.config() | {"bos_token_id": 1, "eos_token_id": 2}


def _fillers(shape: Shape, known: int) -> Iterator[str]:
    """Yield names for the ids that the tokenizer lacks; a random model may draw them."""
    return (f"Ġfill{index}" for index in range(known, shape.vocab))


def _write_tokenizer(shape: Shape, metadata: dict[str, Any], folder: Path) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    document = json.loads(build_tokenizer(metadata).to_str())
    document["model"]["vocab"] |= {token: len(tokens) + i for i, token in enumerate(_fillers(shape, len(tokens)))}
    Tokenizer.from_str(json.dumps(document)).save(str(folder / "tokenizer.json"))
    special = {role: tokens[metadata[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos")}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special["bos"],
            "eos_token": special["eos"],
            "pad_token": special["eos"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.context,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_gguf(
    shape: Shape, tensors: Weights, metadata: dict[str, Any], path: Path, kind: GGMLQuantizationType
) -> None:
    """Write matrices in `kind` and vectors in float32, as llama.cpp's converter does."""
    writer = GGUFWriter(path, shape.arch, use_temp_file=False)
    writer.add_name(shape.name)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    fillers = list(_fillers(shape, len(metadata["tokenizer.ggml.tokens"])))
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"] + fillers)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"] + [1] * len(fillers))
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(metadata["tokenizer.chat_template"])
    for name, size in tensors.shapes.items():
        values = tensors.get(name)
        if len(size) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
