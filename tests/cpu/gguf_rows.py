"""Random rows of GGUF's types, their values by other programs' rules, and files of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from engine.files.gguf_kinds import Kind

gguf.GGML_QUANT_SIZES.setdefault(Kind.Q2_0, (Kind.Q2_0.block, Kind.Q2_0.num_bytes))  # for its writer


def scale_places(kind: Kind) -> list[int]:
    """Where a block of a type has float16 scales."""
    if kind.name in ("Q6_K", "Q3_K", "Q2_K", "TQ1_0", "TQ2_0"):
        return [kind.num_bytes - 4, kind.num_bytes - 2] if kind is Kind.Q2_K else [kind.num_bytes - 2]
    if kind in (Kind.MXFP4, Kind.NVFP4):
        return []
    return [0, 2] if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]


def put_scales(blocks: np.ndarray, kind: Kind, place: int, scales: np.ndarray) -> None:
    """Write a float16 for each block; IQ1_M has it in the high four bits of its last four words."""
    halves = scales.astype(np.float16)[..., None]
    if kind is not Kind.IQ1_M:
        blocks[..., place : place + 2] = halves.view(np.uint8)
        return
    nibbles = (halves.view(np.uint16) >> np.arange(0, 16, 4, np.uint16) & 15) << 4
    blocks[..., -7::2] = blocks[..., -7::2] & 15 | nibbles.astype(np.uint8)


def random_rows(num_rows: int, num_inputs: int, kind: Kind, *, scale: float = 2**-7) -> np.ndarray:
    """Random blocks of a type, their scales `scale` times a power of two or, where a block has more, small integers."""
    generator = np.random.default_rng(int(kind))
    rows = generator.integers(0, 256, (num_rows, num_inputs // kind.block, kind.num_bytes), np.uint8)
    for place in scale_places(kind):
        put_scales(rows, kind, place, np.float16(scale) * 2.0 ** generator.integers(-2, 3, rows.shape[:2]))
    if kind is Kind.MXFP4:
        rows[..., 0] = generator.integers(117, 122, rows.shape[:2])
    return rows.reshape(num_rows, -1)


def floats_of(rows: np.ndarray, kind: Kind) -> Tensor:
    """What `gguf` makes of rows; for the types that it lacks what ggml.h says: d * (2 * bit - 1), and d * (crumb - 1)."""
    if kind not in (Kind.Q1_0, Kind.Q2_0):
        return torch.from_numpy(gguf.quants.dequantize(rows, kind))
    bits = 1 if kind is Kind.Q1_0 else 2
    found = []
    for block in rows.reshape(-1, kind.num_bytes):
        (scale,) = block[:2].copy().view(np.float16).astype(np.float32)
        whole = int.from_bytes(block[2:].tobytes(), "little")
        codes = [whole >> bits * i & (1 << bits) - 1 for i in range(kind.block)]
        found.append([scale * np.float32(2 * code - 1 if bits == 1 else code - 1) for code in codes])
    return torch.tensor(np.array(found)).view(len(rows), -1)


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Rows of `values` in the layout of `kind`; gguf cannot write K and IQ types, so those get random bytes."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        *rows, width = values.shape
        return random_rows(int(np.prod(rows)), width, kind).reshape(*rows, -1)


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write what a writer to a path was given, and return the path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
