"""Writes hybrids of random weights (hybrids.json): checkpoints, and GGUF files by llama.cpp's converter and quantiser.

Names and shapes of tensors are those of transformers' modules. A large tensor repeats 16 million numbers, which is no
faster to multiply. A GGUF file needs a checkout of llama.cpp in which `llama-quantize` is built.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import ByteLevel

from engine.files.gguf_header import read_header
from loadtest.errors import LoadtestError
from loadtest.peers.gguf_file import fitted
from loadtest.peers.models import bfloat16_bits, write_tokenizer
from loadtest.peers.safetensors_file import Entry, write_safetensors

_MANY = 1 << 24  # random numbers; a larger tensor repeats them
# transformers reads any tokenizer of some model types by its own rules, which the converter does not know for this one.
_CONVERT = """
import runpy, sys
from pathlib import Path
from transformers.models.auto import tokenization_auto

tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.clear()
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def prepare(config: Mapping[str, Any], source: Path, folder: Path, files: Sequence[str], llama_cpp: Path) -> None:
    """Write the named files of a model that are missing; `source` is the embedded GGUF file."""
    if others := [file for file in files if file != "hf" and not file.endswith(".gguf")]:
        raise LoadtestError(f"{folder.name} is written as hf and GGUF, not as {others[0]}.")
    metadata = fitted(read_header(source).metadata, config["vocab_size"])
    metadata = _as_gemmas(metadata) if config["model_type"] == "gemma4_text" else metadata
    folder.mkdir(parents=True, exist_ok=True)
    needed = {"hf", *files} | ({"bf16.gguf"} if set(files) - {"hf"} else set())
    for file in sorted(needed, key=["hf", "bf16.gguf", *files].index):
        path, unfinished = folder / file, folder / f"unfinished-{file}"
        if path.exists():
            continue
        if file == "hf":
            write_checkpoint(config, unfinished)
            write_tokenizer(metadata, unfinished, config["max_position_embeddings"])
        else:
            _convert(folder, unfinished, path.stem, llama_cpp)
        unfinished.rename(path)


def _as_gemmas(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a byte-level tokenizer as one of whole characters, whose last 256 tokens are bytes."""
    plain = ByteLevel()
    tokens = [plain.decode([token]).replace(" ", "▁") for token in metadata["tokenizer.ggml.tokens"]]
    seen: set[str] = set()
    for index, token in enumerate(tokens):
        if "�" in token or token in seen:
            tokens[index] = f"▁part{index}"
        seen.add(token)
    tokens[-256:] = (f"<0x{byte:02X}>" for byte in range(256))
    merges = [
        [plain.decode([part]).replace(" ", "▁") for part in merge.split(" ")]
        for merge in metadata["tokenizer.ggml.merges"]
    ]
    known = set(tokens)
    return metadata | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(parts) for parts in merges if {*parts, "".join(parts)} <= known],
        "tokenizer.ggml.add_space_prefix": False,
    }


def _convert(folder: Path, path: Path, kind: str, llama_cpp: Path) -> None:
    convert, quantise = llama_cpp / "convert_hf_to_gguf.py", llama_cpp / "build/bin/llama-quantize"
    if not (convert.is_file() and quantise.is_file()):
        raise LoadtestError(
            f"GGUF files of hybrids are written by {convert} and {quantise}: name a server in a checkout of it."
        )
    if kind == "bf16":
        command: list[str | Path] = [sys.executable, "-c", _CONVERT, convert, folder / "hf"]
        command += ["--outtype", "bf16", "--outfile", path]
    else:
        command = [quantise, folder / "bf16.gguf", path, kind]
    if status := subprocess.run(command, check=False).returncode:  # noqa: S603 - llama.cpp's own
        raise LoadtestError(f"{command[0]} ended with status {status}; its output says why.")


def write_checkpoint(config: Mapping[str, Any], folder: Path, make: Callable[..., NDArray[Any]] | None = None) -> None:
    """Write config.json and weights: vectors in float32, others in bfloat16; random ones if `make` is not given."""
    folder.mkdir(parents=True, exist_ok=True)
    make = make or partial(random_bits, config["model_type"])
    entries = [
        Entry(name, "F32" if len(size) == 1 else "BF16", size, partial(make, name, size))
        for name, size in tensor_shapes(config).items()
    ]
    write_safetensors(folder / "model.safetensors", entries)
    document = {**config, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(document, indent=2), encoding="utf-8")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model by transformers' names."""
    import torch
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        tensors = model_class(model_class.config_class(**config)).state_dict()
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    shapes = {_stored_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
    return shapes | (_mtp_shapes(shapes, config) if config.get("mtp_num_hidden_layers") else {})


def _stored_name(name: str) -> str:
    """Return the name in a file: transformers renames the experts of Granite as it loads them."""
    for part, stored in (("gate_up_proj", "input_linear.weight"), ("down_proj", "output_linear.weight")):
        name = name.replace(f"block_sparse_moe.experts.{part}", f"block_sparse_moe.{stored}")
    return name


def _mtp_shapes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of Qwen 3.5's MTP head, which transformers drops: a layer like the last, which attends."""
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    layer = {name.replace(last, "mtp.layers.0."): size for name, size in shapes.items() if name.startswith(last)}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return layer | {"mtp.fc.weight": (hidden, 2 * hidden)} | {f"mtp.{name}.weight": (hidden,) for name in norms}


def random_bits(kind: str, name: str, size: tuple[int, ...]) -> NDArray[Any]:
    """Return a tensor of a type of model as it lies in a file."""
    rng = np.random.default_rng(list(name.encode()))
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, size)).astype(np.float32)
    if len(size) == 1:
        is_offset = kind.startswith("qwen3_5") and not name.endswith("linear_attn.norm.weight")  # norms of 1 + weight
        return np.full(size, float(not is_offset and not name.endswith("bias")), np.float32)
    numbers = rng.standard_normal(min(math.prod(size), _MANY), np.float32) * np.float32(0.02)
    return np.resize(bfloat16_bits(numbers), size)
