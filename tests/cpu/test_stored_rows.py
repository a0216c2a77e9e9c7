"""Rows that are packed while they are read from a file equal rows packed from memory, and can be looked up again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.errors import ModelLoadError
from engine.files.gguf_kinds import Kind
from engine.runtime.native.library import Library, WeightFormat, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear
from engine.runtime.native.rows import OpenFile, StoredRows, in_halves
from tests.cpu.gguf_rows import floats_of, random_rows
from tests.cpu.native_linears import int8, quantised

NUM_ROWS, NUM_INPUTS, SKIPPED = 80, 256, 64  # the last tile of 32 rows is not full


@pytest.fixture(name="library")
def fixture_library() -> Library:
    library = native()
    if library is None:
        pytest.skip("no native kernels")
    return library


def in_file(rows: np.ndarray, kind: Kind, path: Path, head_rows: int = 0) -> StoredRows:
    """Write rows behind some other bytes, and return where they are."""
    path.write_bytes(bytes(SKIPPED) + rows.tobytes())
    return StoredRows(int(kind), rows, OpenFile(path), SKIPPED, head_rows)


@pytest.mark.parametrize("head_rows", [0, 16])
@pytest.mark.parametrize(
    "kind",
    [
        Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q2_K, Kind.IQ4_XS, Kind.MXFP4, Kind.NVFP4,
        Kind.IQ2_S, Kind.IQ1_S, Kind.IQ1_M, Kind.TQ1_0, Kind.Q1_0,
    ],
)  # fmt: skip
def test_quantised_rows(library: Library, kind: Kind, head_rows: int, tmp_path: Path) -> None:
    rows = random_rows(NUM_ROWS, NUM_INPUTS, kind)
    stored = in_file(rows, kind, tmp_path / "rows", head_rows)
    ids = torch.tensor([79, 0, 33, 79])
    found = quantised(library, [stored], NUM_INPUTS, torch.float32, None).rows(ids)
    ordered = StoredRows(int(kind), in_halves(rows, head_rows))
    assert torch.equal(found, quantised(library, [ordered], NUM_INPUTS, torch.float32, None).rows(ids))
    expected = floats_of(ordered.rows, kind)[ids]
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=float(expected.abs().amax()) * 2**-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_floats(library: Library, kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    stored_as = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    weight = torch.randn(NUM_ROWS, NUM_INPUTS, generator=torch.Generator().manual_seed(0)).to(stored_as)
    weight[0, :3] = torch.tensor([torch.inf, -0.0, 1e-7])
    stored = in_file(weight.view(torch.uint8).numpy(), kind, tmp_path / "rows")
    linear = NativeLinear(library, FLOAT_FORMATS[dtype], [stored], NUM_INPUTS, dtype)
    assert torch.equal(linear.rows(torch.arange(NUM_ROWS)), weight.to(dtype))


@pytest.mark.parametrize("activation", [0, 1])
def test_floats_that_are_quantised(library: Library, activation: int, tmp_path: Path) -> None:
    weight = torch.randn(2 * NUM_ROWS, NUM_INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = [
        in_file(half.view(torch.uint8).numpy(), Kind.BF16, tmp_path / str(i)) for i, half in enumerate(weight.chunk(2))
    ]
    linear = NativeLinear(library, WeightFormat.INT8, parts, NUM_INPUTS, torch.bfloat16, None, activation)
    x = torch.randn(5, NUM_INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(linear(x), int8(library, weight, None, activation)(x))


def test_a_file_that_was_cut(library: Library, tmp_path: Path) -> None:
    rows = np.zeros((NUM_ROWS, 272), np.uint8)
    stored = in_file(rows, Kind.Q8_0, tmp_path / "rows")
    (tmp_path / "rows").write_bytes(bytes(100))
    with pytest.raises(ModelLoadError, match="shorter"):
        quantised(library, [stored], NUM_INPUTS, torch.float32, None)
