"""The optional attention libraries: what is handed to them, to stand-ins that do what their documentation says.

The real ones run in tests/gpu, where they are installed. The stand-ins compute by the definition from nothing but the
arguments they are given, so a wrong index tensor is a wrong result.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention import flashinfer_prompts, table, torch_varlen
from engine.runtime.attention.flashinfer_prompts import FlashInferPrompts
from engine.runtime.attention.prompt_library import PromptLibrary, check_library
from engine.runtime.attention.reference import dense_attention
from engine.runtime.attention.torch_varlen import TorchVarlen
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.pool.kv_cache import KVCache
from tests.kernels.test_triton_attention import DEVICE, Case, make_spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
STEPS = [(0, 9), (20, 1), (33, 5), (0, 1), (15, 2)]
BF16 = torch.bfloat16


def by_definition(spec: AttentionSpec, q: Tensor, starts: list[int], kv: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Each sequence's queries, which are its last positions, over its keys and values [context, heads, head_dim]."""
    rows = [q[begin:end] for begin, end in pairwise(starts)]
    results = [
        dense_attention(spec, some.double(), k.double(), v.double(), len(k) - len(some))
        for some, (k, v) in zip(rows, kv, strict=True)
    ]
    return torch.cat(results).to(q.dtype)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """torch 2.12's and later, with pages: pools [pages, page size, heads, head_dim]."""
    assert cu_seq_k is None  # FlashAttention-3 takes either it or pages
    assert seqused_k is not None
    assert block_table is not None
    assert {x.dtype for x in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert key.stride(3) == value.stride(3) == 1
    heads, kv_heads, size = query.shape[1], key.shape[2], key.shape[1]
    assert enable_gqa == (heads != kv_heads)
    left, right = window_size
    assert right == 0
    spec = AttentionSpec(heads, kv_heads, query.shape[2], scale or 0.0, window=None if left < 0 else left + 1)
    starts, contexts = cu_seq_q.tolist(), seqused_k.tolist()
    assert max_q == max(end - begin for begin, end in pairwise(starts))
    assert max_k == max(contexts)
    kv = []
    for context, blocks in zip(contexts, block_table, strict=True):
        pages = blocks[: -(-context // size)].long()
        kv.append((key[pages].flatten(0, 1)[:context], value[pages].flatten(0, 1)[:context]))
    return by_definition(spec, query, starts, kv)


class Wrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper, pools [pages, heads, page size, head_dim]."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND"
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type == BF16
        self.num_plans += 1
        window = None if window_left < 0 else window_left + 1
        self.spec = AttentionSpec(
            num_qo_heads, num_kv_heads, head_dim_qk, sm_scale or 0.0, window=window, softcap=logits_soft_cap
        )
        self.starts, self.size = qo_indptr.tolist(), page_size
        self.pages = [paged_kv_indices[a:b].long() for a, b in pairwise(paged_kv_indptr.tolist())]
        self.last = paged_kv_last_page_len.tolist()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        kv = []
        for pages, last in zip(self.pages, self.last, strict=True):
            num = (len(pages) - 1) * self.size + last
            k, v = (pool[pages].transpose(1, 2).flatten(0, 1)[:num] for pool in paged_kv_cache)
            kv.append((k, v))
        return by_definition(self.spec, q, self.starts, kv)


@pytest.fixture(params=["torch_varlen", "flashinfer"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PromptLibrary:
    """One over its stand-in, wherever this runs."""
    monkeypatch.setattr(torch_varlen, "absence", lambda device: None)
    monkeypatch.setattr(flashinfer_prompts, "absence", lambda device: None)
    if request.param == "torch_varlen":
        monkeypatch.setattr(torch_varlen, "_varlen_attn", lambda: varlen_attn)
        monkeypatch.setattr(torch_varlen, "_has_fa3", lambda device: True)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
        return TorchVarlen(DEVICE)
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    return FlashInferPrompts(DEVICE)


@pytest.mark.parametrize("variant", [{}, {"window": 7}], ids=["full", "window"])
def test_steps_with_prompts_are_the_library_s(library: PromptLibrary, variant: dict[str, Any]) -> None:
    """Layers of two kinds, steps of several shapes; a step of decodes alone stays with our kernels."""
    backend = TritonPagedAttention(library=library)
    for seed, steps in enumerate((STEPS, STEPS[::-1], [(20, 1), (3, 1)])):
        # Of the same seed, so that both have their blocks in the same places.
        cases = [Case(make_spec(64, group, **variant), steps, 16, BF16, seed) for group in (1, 4)]
        backend.prepare(cases[0].batch())
        for case in cases if seed == 0 else cases[:1]:
            case.store_all(is_new_too=False)
            case.check(backend.attend(case.spec, case.q, *case.new(), case.k_pool, case.v_pool))


def test_flashinfer_plans_once_a_step_and_never_where_the_device_may_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer_prompts, "absence", lambda device: None)
    library, case = FlashInferPrompts(DEVICE), Case(make_spec(64, 1), STEPS, 16, BF16, 0)
    used = []
    for _ in range(4):
        library.prepare(case.batch())
        for _ in range(3):
            library.attend(case.spec, case.q, case.k_pool, case.v_pool)
        used.append(next(iter(library._planned.values())))
    assert used[0] is used[2]
    assert used[1] is used[3]
    assert used[0] is not used[1]
    assert [wrapper.num_plans for wrapper in used] == [2, 2, 2, 2]


def test_what_a_library_lacks_is_told_at_start(library: PromptLibrary) -> None:
    def told(spec: AttentionSpec, dtype: torch.dtype = BF16) -> str:
        shape = {"num_blocks": 4, "block_size": 16, "dtype": dtype, "device": DEVICE}
        with pytest.raises(ConfigError) as caught:
            KVCache([spec], TritonPagedAttention(library=library), **shape)  # type: ignore[arg-type]  # mixed
        return str(caught.value)

    name = library.name
    sinks = told(make_spec(64, 1, has_sinks=True))
    assert (
        sinks
        == f"--attention-backend is {name!r}, but it has no attention sinks, which this model needs; use 'triton'."
    )
    assert "no K/V of float32" in told(make_spec(64, 1), torch.float32)
    assert "no K/V of int8" in told(make_spec(64, 1), torch.int8)
    other = make_spec(64, 1, softcap=2.0) if name == "torch_varlen" else make_spec(80, 1)
    assert ("no soft cap" if name == "torch_varlen" else "no head_dim of 80") in told(other)


def test_a_library_that_reads_our_pool_wrong_is_found_out(
    library: PromptLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, attend = make_spec(64, 1), type(library).attend
    check_library(library, spec, BF16, 16, DEVICE)

    def contiguous(self: PromptLibrary, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wrong = k.transpose(1, 2).reshape(k.shape)  # as if strides were nothing to it
        return attend(self, spec, q, wrong, v)

    monkeypatch.setattr(type(library), "attend", contiguous)
    with pytest.raises(ConfigError, match="no right result over a pool of this layout"):
        check_library(library, spec, BF16, 16, DEVICE)

    def raising(*_: object) -> Tensor:
        raise RuntimeError("page table\n is an FA3 feature")

    monkeypatch.setattr(type(library), "attend", raising)
    with pytest.raises(ConfigError, match=r"\(RuntimeError: page table is an FA3 feature\)"):
        check_library(library, spec, BF16, 16, DEVICE)


def test_cudnn_has_fewer_layers(library: PromptLibrary) -> None:
    if isinstance(library, TorchVarlen):
        library._has_fa3 = False
        assert library.refusal(make_spec(128, 1), BF16) is None
        assert "window" in str(library.refusal(make_spec(128, 1, window=8), BF16))
        assert "head_dim of 256" in str(library.refusal(make_spec(256, 1), BF16))


def test_what_does_not_run_here_is_refused_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(table, "has_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer_prompts, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_varlen, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        table.load_backend("flashinfer", cuda)
    assert str(caught.value) == (
        "--attention-backend is 'flashinfer', which needs the package flashinfer, which is not installed; this machine has "
        "torch, reference, triton, or use 'auto'."
    )
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with pytest.raises(ConfigError, match=r"'torch_varlen', which needs FlashAttention-3 .* this is torch 2\.13\.0"):
        table.load_backend("torch_varlen", cuda)
    with pytest.raises(
        ConfigError, match="'cpu_native', which is for CPUs, and the device is 'cuda'; this machine has"
    ):
        table.load_backend("cpu_native", cuda)
    told = table.describe_choice("auto", cuda)
    assert told.startswith("triton; torch_varlen needs FlashAttention-3")
    assert told.endswith("; flashinfer needs the package flashinfer, which is not installed")
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92_600)
    assert "torch_varlen is available, too" in table.describe_choice("triton", cuda)
