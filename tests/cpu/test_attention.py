"""One suite for every attention backend, against the definition in float64 on contiguous keys and values."""

from __future__ import annotations

import random

import pytest
import torch

from engine.core.errors import ConfigError
from engine.runtime.attention import BACKENDS, table
from engine.runtime.attention.backend import AttentionBackend, Batch
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import SMALLEST_PEAK, AttentionSpec, from_pool, pool_shape, to_pool
from engine.runtime.native.library import Library, native
from tests.reference_attention import dense_attention

CPU = torch.device("cpu")
NUM_BLOCKS = 96
needs_kernels = pytest.mark.skipif(native() is None, reason="no native kernels here and no C compiler to make them")
HERE = [
    pytest.param(name, marks=needs_kernels if name == "cpu_native" else ()) for name in BACKENDS if name != "triton"
]
SPECS = {
    "gqa": AttentionSpec(6, 2, 16, 0.25),
    "mha": AttentionSpec(4, 4, 8, 0.3),
    "mqa": AttentionSpec(4, 1, 32, 0.2),
    "window": AttentionSpec(6, 2, 16, 0.25, window=20),
    "tiny_window": AttentionSpec(6, 2, 16, 0.25, window=1),
    "softcap": AttentionSpec(6, 2, 16, 0.9, softcap=2.0),
    "sinks": AttentionSpec(4, 2, 16, 0.25, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "latent": AttentionSpec(6, 1, 40, 0.25, value_dim=32),
    "wide_latent": AttentionSpec(20, 1, 72, 0.15, value_dim=56),  # more heads than a task has rows; a tail
    "all": AttentionSpec(4, 2, 16, 0.7, window=70, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}
# (tokens already computed, tokens of this step)
STEPS = {
    "one_decode": [(37, 1)],
    "few_decodes": [(5, 1), (150, 1)],
    "many_decodes": [(0, 1), (3, 1), (15, 1), (16, 1), (63, 1), (64, 1), (130, 1), (77, 1)],
    "prompt": [(0, 41)],
    "chunks": [(32, 17), (7, 30), (0, 16)],
    "mixed": [(0, 33), (9, 1), (20, 1), (40, 5), (64, 1), (80, 1), (1, 1), (99, 1)],
}


def empty_pools(
    backend: AttentionBackend, spec: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """K and V full of NaN; int8 numbers are full of what they like, and their scales are NaN."""
    shape = pool_shape(spec, num_blocks, block_size, dtype)
    if dtype == torch.int8:
        return [torch.full(shape, -1, dtype=dtype) for _ in range(2)]
    return [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]


class Pools:
    """A pool filled with NaN, where every sequence's history lies in scattered or adjacent blocks."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> None:
        self.backend, self.spec, self.block_size = backend, spec, block_size
        self.k, self.v = empty_pools(backend, spec, NUM_BLOCKS, block_size, dtype)

    def run(
        self,
        queries: list[torch.Tensor],
        keys: list,
        values: list,
        steps: list,
        tables: list,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: the last `num` of each sequence's keys and values are new, the rest were stored before."""
        batch = make_batch(steps, tables, self.block_size)
        batch.ends = ends
        self.backend.prepare(batch)
        new_k, new_v = (
            torch.cat([x[start : start + num] for x, (start, num) in zip(xs, steps, strict=True)])
            for xs in (keys, values)
        )
        return self.backend.attend(self.spec, torch.cat(queries), new_k, new_v, self.k, self.v)


def make_batch(steps: list, tables: list, block_size: int) -> Batch:
    lens = [num for _, num in steps]
    positions = torch.cat([torch.arange(start, start + num) for start, num in steps])
    slots = [
        tables[s][p // block_size] * block_size + p % block_size
        for s, (start, num) in enumerate(steps)
        for p in range(start, start + num)
    ]
    widest = max(map(len, tables))
    return Batch(
        ids=torch.zeros(sum(lens), dtype=torch.int64),
        positions=positions,
        kv_slots=torch.tensor(slots),
        block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32),
        query_starts=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        context_lens=torch.tensor([start + num for start, num in steps], dtype=torch.int32),
        sample_rows=torch.tensor([], dtype=torch.int64),
        query_lens_host=lens,
        context_lens_host=[start + num for start, num in steps],
        block_tables_host=tables,
    )


def make_tables(steps: list, block_size: int, is_scattered: bool) -> list[list[int]]:
    """Block tables of sequences that share the pool; one more block each than needed, as the scheduler may reserve."""
    blocks = list(range(NUM_BLOCKS))
    if is_scattered:
        random.Random(7).shuffle(blocks)
    return [[blocks.pop(0) for _ in range((start + num) // block_size + 1)] for start, num in steps]


def make_rows(spec: AttentionSpec, steps: list) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random keys and values; of latents, the values are the keys' first numbers."""
    keys, values = (
        [torch.randn(start + num, spec.num_kv_heads, spec.head_dim) for start, num in steps] for _ in range(2)
    )
    return keys, [k[..., : spec.value_dim] for k in keys] if spec.is_latent else values


@pytest.mark.parametrize("is_scattered", [False, True], ids=["adjacent", "scattered"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", HERE)
def test_equals_the_definition(name: str, spec: AttentionSpec, steps: list, is_scattered: bool) -> None:
    torch.manual_seed(3)
    block_size = 16
    pools = Pools(load_backend(name, CPU), spec, block_size, torch.float32)
    tables = make_tables(steps, block_size, is_scattered)
    keys, values = make_rows(spec, steps)
    queries = [torch.randn(start + num, spec.num_heads, spec.head_dim) for start, num in steps]

    before = [(0, start) for start, _ in steps if start]
    chosen = [s for s, (start, _) in enumerate(steps) if start]
    if before:
        pools.run([queries[s][: steps[s][0]] for s in chosen], [keys[s] for s in chosen], [values[s] for s in chosen],
                  before, [tables[s] for s in chosen])  # fmt: skip
    out = pools.run([q[start:] for q, (start, _) in zip(queries, steps, strict=True)], keys, values, steps, tables)

    expected = [
        dense_attention(spec, queries[s][start:], keys[s], values[s], start) for s, (start, _) in enumerate(steps)
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("spec", [SPECS["gqa"], SPECS["window"], SPECS["all"]], ids=["gqa", "window", "all"])
@pytest.mark.parametrize("name", HERE)
def test_tokens_of_an_image_see_each_other_both_ways(name: str, spec: AttentionSpec, is_int8: bool) -> None:
    torch.manual_seed(3)
    steps, spans = [(12, 170), (5, 1), (0, 30)], {0: [(15, 150), (160, 166)], 2: [(0, 30)]}
    backend = load_backend(name, CPU)
    assert backend.capabilities.both_ways
    pools = Pools(backend, spec, 16, torch.int8 if is_int8 else torch.float32)
    tables, (keys, values) = make_tables(steps, 16, is_scattered=True), make_rows(spec, steps)
    queries = [torch.randn(start + num, spec.num_heads, spec.head_dim) for start, num in steps]
    pools.run([q[:start] for q, (start, _) in zip(queries[:2], steps, strict=False)], keys[:2], values[:2],
              [(0, start) for start, _ in steps[:2]], tables[:2])  # fmt: skip
    ends = [torch.arange(start, start + num, dtype=torch.int32) + 1 for start, num in steps]
    for index, found in spans.items():
        for begin, end in found:
            ends[index][begin - steps[index][0] : end - steps[index][0]] = end
    new = [q[start:] for q, (start, _) in zip(queries, steps, strict=True)]
    out = pools.run(new, keys, values, steps, tables, torch.cat(ends))
    expected = [dense_attention(spec, new[s], keys[s], values[s], start, ends[s]) for s, (start, _) in enumerate(steps)]
    tolerance = 6e-2 if is_int8 else 2e-5
    torch.testing.assert_close(out, torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 4, 64, 128])
@pytest.mark.parametrize("name", HERE)
def test_block_sizes_and_half_precision(name: str, block_size: int, dtype: torch.dtype) -> None:
    """Within a few roundings of the half type, at every block size, and whatever NaN the pool held before."""
    torch.manual_seed(5)
    spec = AttentionSpec(6, 2, 16, 0.25)
    steps = [(0, 1), (2, 1), (5, 1), (1, 1), (7, 1), (0, 9)]
    pools = Pools(load_backend(name, CPU), spec, block_size, dtype)
    tables = make_tables(steps, block_size, is_scattered=True)
    keys, values = ([torch.randn(s + n, 2, 16).to(dtype) for s, n in steps] for _ in range(2))
    queries = [torch.randn(s + n, 6, 16).to(dtype) for s, n in steps]
    for position in range(7):  # token by token, so that blocks are begun, continued and filled by decode steps
        live = [s for s, (start, _) in enumerate(steps) if start > position]
        if live:
            pools.run([queries[s][position : position + 1] for s in live], [keys[s] for s in live],
                      [values[s] for s in live], [(position, 1)] * len(live), [tables[s] for s in live])  # fmt: skip
    out = pools.run([q[start:] for q, (start, _) in zip(queries, steps, strict=True)], keys, values, steps, tables)
    expected = [dense_attention(spec, queries[s][i:], keys[s], values[s], i) for s, (i, _) in enumerate(steps)]
    tolerance = 2e-2 if dtype is torch.bfloat16 else 3e-3
    torch.testing.assert_close(out, torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [STEPS["many_decodes"], STEPS["mixed"]], ids=["many_decodes", "mixed"])
@pytest.mark.parametrize("spec", [SPECS["gqa"], SPECS["mha"], SPECS["all"]], ids=["gqa", "mha", "all"])
@pytest.mark.parametrize("name", HERE)
def test_an_int8_pool(name: str, spec: AttentionSpec, steps: list, dtype: torch.dtype) -> None:
    """Tight to the definition over keys and values rounded likewise, and near to it over the keys and values given."""
    torch.manual_seed(3)
    pools = Pools(load_backend(name, CPU), spec, 16, torch.int8)
    tables = make_tables(steps, 16, is_scattered=True)
    keys, values = (
        [torch.randn(start + num, spec.num_kv_heads, spec.head_dim).to(dtype) for start, num in steps] for _ in range(2)
    )
    queries = [torch.randn(start + num, spec.num_heads, spec.head_dim).to(dtype) for start, num in steps]
    chosen = [s for s, (start, _) in enumerate(steps) if start]
    pools.run([queries[s][: steps[s][0]] for s in chosen], [keys[s] for s in chosen], [values[s] for s in chosen],
              [(0, steps[s][0]) for s in chosen], [tables[s] for s in chosen])  # fmt: skip
    out = pools.run([q[start:] for q, (start, _) in zip(queries, steps, strict=True)], keys, values, steps, tables)
    rounded_keys, rounded_values = (
        [from_pool(to_pool(x, torch.int8), torch.float32) for x in xs] for xs in (keys, values)
    )
    for k, v, tolerance in (
        (rounded_keys, rounded_values, 2e-5 if dtype is torch.float32 else 2e-2),
        (keys, values, 6e-2),
    ):
        expected = [dense_attention(spec, queries[s][i:], k[s], v[s], i) for s, (i, _) in enumerate(steps)]
        torch.testing.assert_close(out, torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_int8_pool_loses_no_more_than_its_rounding(library: Library, dtype: torch.dtype, head_dim: int) -> None:
    """With a key that takes most of the weight, whose value is small, and queries with a large number; and NaN is seen."""
    torch.manual_seed(4)
    assert native() is library
    spec, steps = AttentionSpec(6, 2, head_dim, head_dim**-0.5), [(299, 1), (140, 60), (0, 17)]
    pools = Pools(load_backend("cpu_native", CPU), spec, 16, torch.int8)
    tables, (keys, values) = make_tables(steps, 16, is_scattered=True), make_rows(spec, steps)
    queries = [torch.randn(num, 6, head_dim) for _, num in steps]
    for q, k, v in zip(queries, keys, values, strict=True):
        q[:, :, 5] = 40
        k[:, :, 5] *= 0.02
        k[0], v[0] = q[-1].unflatten(0, (2, 3)).mean(1) * 0.03, v[0] / 50
    queries, keys, values = ([x.to(dtype) for x in xs] for xs in (queries, keys, values))
    pools.run([torch.zeros(start, 6, head_dim, dtype=dtype) for start, _ in steps[:2]], keys[:2], values[:2],
              [(0, start) for start, _ in steps[:2]], tables[:2])  # fmt: skip
    out = pools.run(queries, keys, values, steps, tables)
    rounded = [[from_pool(to_pool(x, torch.int8), torch.float64) for x in xs] for xs in (keys, values)]
    expected = [
        dense_attention(spec, q.double(), k, v, start)
        for q, k, v, (start, _) in zip(queries, *rounded, steps, strict=True)
    ]
    tolerance = 6e-4 if dtype is torch.float16 else 6e-3
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    for broken in (torch.nan, torch.inf, -torch.inf):
        for rows in (queries, keys, values):
            rows[1][-1, 1, 7], whole = broken, rows[1][-1, 1, 7].item()
            out = pools.run(queries, keys, values, steps, tables)
            assert out[60].isnan().any()
            assert torch.cat([out[:1], out[61:]]).isfinite().all()
            rows[1][-1, 1, 7] = whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_an_int8_pool_are_within_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(50, 3, 16) * 10.0 ** torch.randint(-4, 4, (50, 3, 1))).to(dtype)
    rows[7, 1] = 0
    rows[8] = rows[6] / rows[6].abs().amax(-1, keepdim=True) * 2e-37
    steps = rows.float().abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK) / 127
    error = (from_pool(to_pool(rows, torch.int8), torch.float32) - rows.float()).abs()
    assert (error <= steps * 0.5001).all()
    for broken in (torch.nan, torch.inf, -torch.inf):
        rows[9, 0, 3] = broken
        read = from_pool(to_pool(rows, torch.int8), dtype)
        assert read[9, 0].isnan().all()
        assert read[9, 1:].isfinite().all()


def test_the_definition_itself_equals_an_explicit_loop() -> None:
    torch.manual_seed(1)
    spec = AttentionSpec(4, 2, 8, 0.5, window=3, softcap=2.0, sinks=torch.tensor([0.1, 0.2, -0.3, 1.0]))
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = dense_attention(spec, q, k, v, start=2)
    assert spec.sinks is not None
    for i in range(3):
        for head in range(4):
            seen = range(i, i + 3)  # position i + 2 sees itself and two before it
            scores = [2.0 * torch.tanh(q[i, head] @ k[j, head // 2] * 0.5 / 2.0) for j in seen]
            weights = [torch.exp(score) for score in scores]
            total = sum(weights) + torch.exp(spec.sinks[head])
            expected = sum(w / total * v[j, head // 2] for w, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(out[i, head], expected)


def test_layers_with_different_windows_share_a_step() -> None:
    """Prepared once, a backend serves both kinds of layers of a model that alternates them."""
    torch.manual_seed(2)
    backend = load_backend("torch", CPU)
    steps, block_size = [(40, 1)] * 6, 16
    tables = make_tables(steps, block_size, is_scattered=True)
    backend.prepare(make_batch(steps, tables, block_size))
    for spec in (SPECS["gqa"], SPECS["window"], SPECS["gqa"]):
        k_pool, v_pool = (torch.randn(pool_shape(spec, NUM_BLOCKS, block_size)) for _ in range(2))
        q, k, v = torch.randn(6, 6, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
        out = backend.attend(spec, q, k, v, k_pool, v_pool)
        for s in range(6):
            keys, values = (pool[tables[s]].transpose(1, 2).flatten(0, 1)[:41] for pool in (k_pool, v_pool))
            expected = dense_attention(spec, q[s : s + 1], keys, values, 40)
            torch.testing.assert_close(out[s : s + 1], expected, atol=2e-5, rtol=2e-5)


def test_a_backend_that_does_not_run_here_is_refused_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(table, "has_triton", lambda device: True)
    with pytest.raises(ConfigError) as caught:
        load_backend("cpu_native", cuda)
    assert str(caught.value) == (
        "--attention-backend is 'cpu_native', which is for CPUs, and the device is 'cuda'; this machine has torch, "
        "triton, or use 'auto'."
    )
    assert table.describe_choice("auto", cuda) == "triton"
