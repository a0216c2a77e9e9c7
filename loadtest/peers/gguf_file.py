"""Writes GGUF files: the matrices quantised, or made of random blocks.

A block of random codes with the right scale costs nothing to make, and its products take as long as those of trained
weights. Small models hold their own numbers in the types that `gguf` can quantise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from numpy.typing import NDArray

from engine.files.gguf_kinds import Kind
from loadtest.errors import LoadtestError
from loadtest.shapes import Shape


class _Block(NamedTuple):
    """Where random bytes need a value; `std` is that of the numbers of a block with scale 1."""

    std: float
    scale: int  # the offset of a float16, from the end if it is negative
    low: float = 0.0  # the float16 after it, in scales
    constant: slice = slice(0)  # bytes of scales within the block
    byte: int = 0xAA  # all six-bit scales are 42, four-bit ones 10


_BLOCKS = {
    Kind.Q4_0: _Block(4.61, 0),
    Kind.Q4_1: _Block(4.61, 0, -7.5),
    Kind.Q5_0: _Block(9.23, 0),
    Kind.Q5_1: _Block(9.23, 0, -15.5),
    Kind.IQ4_NL: _Block(71, 0),
    Kind.Q2_K: _Block(11.2, 80, 1.5, slice(0, 16)),
    Kind.Q3_K: _Block(22.9, 108, 0, slice(96, 108)),
    Kind.Q4_K: _Block(194, 0, 7.5, slice(4, 16)),
    Kind.Q5_K: _Block(388, 0, 15.5, slice(4, 16)),
    Kind.Q6_K: _Block(591, 208, 0, slice(192, 208), 32),
    Kind.IQ4_XS: _Block(710, 0, 0, slice(2, 8)),
    Kind.IQ3_XXS: _Block(120, 0),
    Kind.IQ3_S: _Block(140, 0),
    Kind.IQ2_XXS: _Block(53, 0),
    Kind.IQ2_XS: _Block(56, 0),
    Kind.IQ2_S: _Block(56, 0),
    Kind.IQ1_S: _Block(7.2, 0),
    Kind.IQ1_M: _Block(7.2, -7),
    Kind.TQ1_0: _Block(0.82, -2),
    Kind.TQ2_0: _Block(0.71, -2),
    Kind.Q1_0: _Block(1, 0),
    Kind.Q2_0: _Block(0.71, 0),
}
_BYTES = {Kind.MXFP4: (slice(1), 120), Kind.NVFP4: (slice(4), 4)}  # scales of a byte, each 2 to the 7th less than 1
_EXACT = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0)
_QUANTISED = (*_EXACT, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4)  # by `gguf`
_MANY = 1e8  # weights; quantising more takes minutes
_HEADS = {kind: kind for kind in _EXACT}  # others: Q6_K
_FILE_TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15}  # llama.cpp's, of files that OpenVINO reads
_MIXED = {"q4_k_m": Kind.Q4_K, "q5_k_m": Kind.Q5_K}  # half of the layers have some matrices in Q6_K


class Source(Protocol):
    """The tensors of a model by their GGUF names."""

    shape: Shape
    shapes: dict[str, tuple[int, ...]]
    is_random: bool

    def get(self, name: str) -> NDArray[np.float32]: ...


def write_gguf(source: Source, tokenizer: dict[str, Any], path: Path, name: str) -> None:
    """Write matrices in a format, and vectors and routers in float32, as llama.cpp's converter does."""
    writer = GGUFWriter(path, source.shape.arch, use_temp_file=False)
    _add_settings(writer, source.shape)
    if name in _FILE_TYPES:
        writer.add_file_type(_FILE_TYPES[name])  # OpenVINO refuses a file without
    _add_tokenizer(writer, tokenizer)
    kinds = {tensor: _kind(source, tensor, name) for tensor in source.shapes}
    for tensor, kind in kinds.items():
        *rows, columns = source.shapes[tensor]
        if columns % kind.block:
            raise LoadtestError(
                f"{kind.name} has blocks of {kind.block}; {tensor} of {source.shape.name} is {columns} wide."
            )
        nbytes = int(np.prod(rows)) * columns // kind.block * kind.num_bytes
        writer.add_tensor_info(tensor, source.shapes[tensor], np.dtype(np.float32), nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in kinds.items():
        if source.is_random and kind not in (_EXACT if source.shape.decode_weights > _MANY else _QUANTISED):
            writer.write_tensor_data(
                random_blocks(tensor, source.shapes[tensor], kind, source.shape.stds[tensor != "token_embd.weight"])
            )
        else:
            writer.write_tensor_data(_quantized(source.get(tensor), kind))
    writer.close()


def _quantized(values: NDArray[np.float32], kind: Kind) -> NDArray[Any]:
    if kind not in _QUANTISED:
        raise LoadtestError(f"gguf cannot quantise to {kind.name}; llama-quantize can.")
    stored: NDArray[Any] = quantize(values, kind)
    return stored


def random_blocks(name: str, shape: tuple[int, ...], kind: Kind, std: float) -> NDArray[np.uint8]:
    """Return blocks of random numbers around zero, seeded by the tensor's name."""
    rng = np.random.default_rng(list(name.encode()))
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // kind.block, kind.num_bytes), np.uint8)
    if kind in (Kind.TQ2_0, Kind.Q2_0):  # 0 instead of 2, which is not around zero
        blocks &= ~((blocks & blocks >> 1 & 0x55) << 1)
    if kind in _BYTES:
        place, byte = _BYTES[kind]
        blocks[:, place] = byte
        return blocks.reshape(*shape[:-1], -1)
    field = _BLOCKS[kind]
    numbers = (std / field.std, std / field.std * field.low)[: 2 if field.low else 1]
    scales = np.array(numbers, np.float16).view(np.uint8)
    blocks[:, field.constant] = field.byte
    if kind is Kind.IQ1_M:  # in the high halves of four bytes
        halves = [byte << 4 & 240 for two in scales for byte in (two, two >> 4)]
        blocks[:, field.scale :: 2] = blocks[:, field.scale :: 2] & 15 | halves
    else:
        blocks[:, (at := field.scale % kind.num_bytes) : at + len(scales)] = scales
    return blocks.reshape(*shape[:-1], -1)


def _kind(source: Source, tensor: str, name: str) -> Kind:
    """Return the type of a tensor as llama-quantize chooses it."""
    kind: Kind
    kind, layers = _MIXED.get(name) or Kind[name.upper()], source.shape.layers
    if len(source.shapes[tensor]) == 1 or tensor.endswith((".bias", "gate_inp.weight")):
        return Kind.F32
    if source.shape.arch == "gpt-oss" and "_exps" not in tensor:
        return Kind.Q8_0
    if tensor in ("token_embd.weight", "output.weight"):
        return _HEADS.get(kind, Kind.Q8_0 if source.shape.hidden % 256 else Kind.Q6_K)
    if name in _MIXED and any(role in tensor for role in ("attn_v", "ffn_down")):
        index = int(tensor.split(".")[1])
        if index < layers // 8 or index >= 7 * layers // 8 or (index - layers // 8) % 3 == 2:
            return Kind.Q6_K
    return kind


def _add_settings(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name(shape.name)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
    if shape.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(shape.ffn)
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.arch in ("granite", "granitemoe"):
        writer.add_embedding_scale(shape.more["embedding_multiplier"])
        writer.add_attention_scale(shape.more["attention_multiplier"])
        writer.add_residual_scale(shape.more["residual_multiplier"])
        writer.add_logit_scale(shape.more["logits_scaling"])


def fitted(metadata: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Return a tokenizer's metadata, cut or extended to the vocabulary; a random model may draw any id."""
    known: list[str] = metadata["tokenizer.ggml.tokens"][:vocab]
    more = [f"Ġfill{index}" for index in range(len(known), vocab)]
    names = set(known)
    merges = [merge for merge in metadata["tokenizer.ggml.merges"] if merge.replace(" ", "", 1) in names]
    return metadata | {
        "tokenizer.ggml.tokens": known + more,
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"][: len(known)] + [1] * len(more),
        "tokenizer.ggml.merges": merges,
    }


def _add_tokenizer(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(metadata["tokenizer.chat_template"])
