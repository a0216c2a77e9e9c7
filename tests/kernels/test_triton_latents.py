"""Attention over latents by the Triton backend, against the definition in float64, and through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.cuda.attention_decode import Splits
from engine.runtime.cuda.attention_latent import attend_latent_decodes
from engine.runtime.cuda.attention_tuning import PromptTile, choose_latent_tuning
from engine.runtime.cuda.store import view_pool
from engine.runtime.kv_layout import AttentionSpec
from tests.cpu.test_models_families import CASES, write_tiny
from tests.gpu.test_engine_cuda import build
from tests.kernels.test_triton_attention import CAPABILITY, DEVICE, Case, far_apart, greedy
from tests.reference_attention import reference_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows without keys, from NumPy
V2_LITE = AttentionSpec(16, 1, 576, 0.1147, value_dim=512)
SMALL = AttentionSpec(20, 1, 40, 0.2, value_dim=24)  # sides that no power of two divides, more heads than a tile has
MIXED = [(0, 9), (20, 1), (33, 5), (40, 1), (0, 1)]


class Latents(Case):
    """Sequences whose values are the first numbers of their keys; the second pool must not be touched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.values = [x[..., : self.spec.out_dim] for x in self.keys]

    def store_all(self, *, is_new_too: bool) -> None:
        values, self.values = self.values, self.keys
        super().store_all(is_new_too=is_new_too)
        self.values = values
        self.v_pool.fill_(torch.nan)


@pytest.mark.parametrize(
    ("spec", "block_size", "dtype", "splits"),
    [
        (V2_LITE, 64, torch.bfloat16, Splits(1, 1)),
        (V2_LITE, 16, torch.bfloat16, Splits(3, 32)),
        (SMALL, 16, torch.float32, Splits(3, 16)),
        (SMALL, 8, torch.float16, Splits(1, 1)),
    ],
    ids=["whole", "split", "odd_sides", "halves"],
)
def test_decodes(spec: AttentionSpec, block_size: int, dtype: torch.dtype, splits: Splits) -> None:
    """Ragged contexts, splits with nothing for the later ones, and a slice that stands for none."""
    case = Latents(spec, [(0, 1), (50, 1), (67, 1)], block_size, dtype, seed=3)
    case.store_all(is_new_too=True)
    batch, pad = case.batch(), {"dtype": torch.int32, "device": DEVICE}
    tensors = {
        "slices": torch.arange(4, **pad),
        "query_starts": torch.arange(5, **pad),
        "context_lens": torch.cat([batch.context_lens, torch.zeros(1, **pad)]),
        "block_tables": torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:1], 1 << 30)]),
    }
    out = torch.full((4, spec.num_heads, spec.out_dim), torch.nan, dtype=dtype, device=DEVICE)
    tile = choose_latent_tuning(spec.num_heads, dtype.itemsize, CAPABILITY).decode
    q, pool = torch.cat([case.q, case.q[:1]]), view_pool(case.k_pool, case.k_pool)
    attend_latent_decodes(spec, q, out, pool, **tensors, num=4, splits=splits, tile=tile)
    case.check(out[:3])
    assert (out[3] == 0).all()


@pytest.mark.parametrize(
    ("spec", "steps", "block_size", "dtype"),
    [
        (SMALL, MIXED, 16, torch.float32),
        (SMALL, MIXED[1:2] + MIXED[3:], 1, torch.bfloat16),
        (V2_LITE, [(90, 3), (5, 1)], 16, torch.bfloat16),
    ],
    ids=["mixed", "decodes", "wide"],
)
def test_a_step_through_the_backend(spec: AttentionSpec, steps: list, block_size: int, dtype: torch.dtype) -> None:
    case = Latents(spec, steps, block_size, dtype, seed=4)
    case.store_all(is_new_too=False)
    keys, _ = case.new()
    backend = TritonPagedAttention()
    backend.check(spec, dtype)
    backend.prepare(case.batch())
    out = backend.attend(spec, case.q, keys, keys[..., : spec.out_dim], case.k_pool, case.v_pool)
    assert out.shape == (len(case.q), spec.num_heads, spec.out_dim)
    case.check(out)
    assert case.v_pool.isnan().all()


def test_latents_may_lie_beyond_what_32_bits_count() -> None:
    case = Latents(SMALL, [(20, 1), (7, 30), (33, 1)], 16, torch.bfloat16, seed=5)
    case.k_pool = far_apart(case.k_pool)
    case.store_all(is_new_too=False)
    keys, backend = case.new()[0], TritonPagedAttention()
    backend.prepare(case.batch())
    case.check(backend.attend(SMALL, case.q, keys, keys, case.k_pool, case.v_pool))


def test_a_prompt_in_parts() -> None:
    """As after a long context, whose few tiles would leave most of the device idle; some rows see no key of a part."""
    tuning = choose_latent_tuning(SMALL.num_heads, 4, CAPABILITY)
    cut = tuning.prompt_cut._replace(min_keys=16, programs_per_sm=64)
    tuning = tuning._replace(prompt=PromptTile(16, 16, 4, 1), prompt_cut=cut)
    case = Latents(SMALL, [(60, 4), (0, 2)], 16, torch.float32, seed=6)
    case.store_all(is_new_too=False)
    keys: Tensor = case.new()[0]
    backend = TritonPagedAttention(latent_tuning=tuning)
    backend.prepare(case.batch())
    case.check(backend.attend(SMALL, case.q, keys, keys, case.k_pool, case.v_pool))
    assert next(iter(backend._step.work.values())).num_parts > 5


def test_latents_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ConfigError, match="serves latents of at most 512, and the model's is 600; use 'torch'"):
        TritonPagedAttention().check(AttentionSpec(16, 1, 640, 0.1, value_dim=600), torch.bfloat16)


def test_an_engine_says_what_it_says_with_the_reference(tmp_path: Path) -> None:
    write_tiny(CASES["deepseek_v3"], tmp_path)
    with reference_attention():
        expected = greedy(build(tmp_path, "cpu", attention_backend="torch"))
    tried = build(tmp_path, DEVICE.type, attention_backend="triton", max_num_batched_tokens=20)
    assert greedy(tried) == expected
