"""The forward pass in C against the same decoder's own, operation by operation in torch, over one paged batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from test_attention import NUM_BLOCKS, make_batch, make_tables

from engine.runtime.attention.table import load_backend
from engine.runtime.layers import mixture
from engine.runtime.layers.parts import LayerAttention
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.runtime.native.decoder import Streams
from engine.runtime.native.library import Library, native
from engine.runtime.pool.kv_cache import KVCache
from engine.settings.engine_config import EngineConfig
from tests.cpu import test_models_families as families
from tests.cpu.dense_attention import DenseAttention

# One or two of each form: biases, kinds of norm and where they stand, windows, soft caps, partial and missing rotation.
NAMES = ("llama-tied-biased", "qwen3", "gemma", "gemma2", "gemma3", "olmo2", "phi3", "granite", "smollm3")
NAMES += ("gemma3n", "gemma4", "gemma4-shared", "gemma4-unified")
NAMES += ("qwen3_5-attention", "nemotron_h-attention")
MOE_NAMES = ("gemma4-moe", "qwen2-moe", "granitemoe", "gpt-oss", "glm4-moe", "olmoe", "nemotron_h-latent-attention")
LATENT_NAMES = ("deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "deepseek_v3-halves-biased")
# Layers of one part, of which the first and the last do not attend.
SINGLE = {"layers_block_type": ["mlp", "full_attention", "moe", "full_attention", "mlp"]}
CASES = families.CASES | {
    "nemotron_h-attention": families.Case("NemotronHConfig", families.NEMOTRON | SINGLE),
    "nemotron_h-latent-attention": families.Case(
        "NemotronHConfig", families.NEMOTRON | SINGLE | {"moe_latent_size": 32}
    ),
}
STEPS = [(0, 9), (30, 1), (3, 1), (17, 5)]  # (tokens cached, tokens now) of each sequence
CPU = torch.device("cpu")


class Piecewise:
    """The same pool and batch, but every layer's attention is a call of its own."""

    paged_step = None
    from_projected = None

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._cache(layer, q, k, v)


@contextmanager
def by_definition() -> Iterator[None]:
    """Compute mixtures of experts in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture.MoE, "__call__", lambda self, x, _=None, routed=None: self._total(x, routed).to(x.dtype))
        yield


def run(
    model: Decoder, *, in_one_call: bool, rows: torch.Tensor | None, layers: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Hidden states of the last of two steps, cached positions and then STEPS; its streams; then the pool's content."""
    backend = load_backend("cpu_native", CPU)
    cache = KVCache(model.states, backend, num_blocks=NUM_BLOCKS, block_size=4, dtype=model.dtype, device=CPU)
    attention: LayerAttention = cache if in_one_call else Piecewise(cache)
    tables = make_tables(STEPS, 4, is_scattered=True)
    generator = torch.Generator().manual_seed(5)
    cached = [(0, start) for start, _ in STEPS]
    known = [(step, table) for step, table in zip(cached, tables, strict=True) if step[1]]
    for steps, used, wanted in (
        ([step for step, _ in known], [table for _, table in known], torch.empty(0, dtype=torch.int64)),
        (STEPS, tables, rows),
    ):
        batch = make_batch(steps, used, 4)
        batch.ids = torch.randint(3, 128, batch.ids.shape, generator=generator)
        backend.prepare(batch)
        out = torch.empty(len(batch.ids), len(layers), model.config.hidden_size, dtype=model.dtype)
        streams = Streams(layers, out) if wanted is rows and layers else None
        with torch.inference_mode(), by_definition() if not in_one_call else nullcontext():
            hidden = model.forward(batch.ids, batch.positions, attention, wanted, streams=streams)
    return [hidden, out, *cache.blocks]


@pytest.mark.in_turns
@pytest.mark.parametrize("name", NAMES + MOE_NAMES + LATENT_NAMES)
def test_one_call_says_what_the_parts_say(library: Library, name: str, tmp_path: Path) -> None:
    library.use_threads(2)
    families.write_tiny(CASES[name], tmp_path)
    model = families.load(tmp_path)
    assert model._native is not None
    for rows in (None, torch.tensor([8, 9, 10, 15]), torch.tensor([0, 0, 0, 1, *[15] * 20])):  # n > 1 repeats a row
        ours, parts = (run(model, in_one_call=is_one, rows=rows)[0] for is_one in (True, False))
        torch.testing.assert_close(ours, parts, atol=2e-4, rtol=2e-4)
        assert parts.std() > 0.1


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-shared", "gemma4-unified", "nemotron_h-attention"])
def test_rows_that_go_on_alone_have_the_bits_of_all(library: Library, name: str, tmp_path: Path) -> None:
    """Behind the last layer that keeps keys and values; a row may be of any slice, and stand twice."""
    library.use_threads(2)
    families.write_tiny(CASES[name], tmp_path)
    model = families.load(tmp_path)
    whole = run(model, in_one_call=True, rows=None)[0]
    for rows in ([8, 9, 10, 15], [0, 3, 3, 15], [13, 2], [9]):
        assert torch.equal(run(model, in_one_call=True, rows=torch.tensor(rows))[0], whole[rows])


@pytest.mark.parametrize("name", ["granite", "gemma2", "olmo2", "qwen2-moe", "nemotron_h-attention"])
def test_one_call_copies_the_streams_of_its_parts(library: Library, name: str, tmp_path: Path) -> None:
    """The stream that enters a layer is what transformers calls its hidden state; the last goes with all rows."""
    library.use_threads(2)
    theirs = families.save_tiny(CASES[name], tmp_path)
    model = families.load(tmp_path)
    last = len(model._layers)
    for rows, layers in ((None, (0, 1, last)), (torch.tensor([8, 15]), (0, last - 1))):
        ours, parts = (run(model, in_one_call=is_one, rows=rows, layers=layers)[:2] for is_one in (True, False))
        torch.testing.assert_close(ours, parts, atol=2e-4, rtol=2e-4)
        assert (ours[1][:, 0] - ours[1][:, 1]).std() > 0.01
    ids = torch.randint(3, 128, (9,))
    attention, out = DenseAttention(model.states), torch.empty(9, 2, model.config.hidden_size)
    with torch.inference_mode():
        model.forward(ids, torch.arange(9), attention, streams=Streams((1, 2), out))
        expected = theirs(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(out, torch.stack([states[0] for states in expected[1:3]], 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gemma3n"])  # norms before, around and behind the parts
def test_bfloat16_keeps_the_stream_in_float32(name: str, tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("no native library and no C compiler")
    families.save_tiny(CASES[name], tmp_path).bfloat16().float().save_pretrained(tmp_path)
    truth = families.load(tmp_path)
    config = EngineConfig(model=str(tmp_path))
    rounded = load_model(config, CPU, torch.bfloat16, lambda progress: None)
    assert isinstance(rounded, Decoder)
    expected, *_ = run(truth, in_one_call=True, rows=None)
    in_one, in_parts = (run(rounded, in_one_call=is_one, rows=None)[0].float() - expected for is_one in (True, False))
    assert in_one.square().mean() < 0.9 * in_parts.square().mean()
