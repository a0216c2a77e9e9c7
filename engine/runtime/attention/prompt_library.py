"""Uses another library's attention for steps with prompts, over the Triton backend's pool.

Published figures put decode kernels like ours level with the best, and prompt kernels at 60 to 77 % of
FlashAttention-3. So a library gets whole steps with prompts, including their decodes. Steps of decodes alone use our
kernels, which can be captured in a graph. The start checks what the library lacks, and that it reads this pool
correctly. Engine thread, except for the checks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.backend import Batch
from engine.runtime.attention.reference import dense_attention
from engine.runtime.kv_layout import AttentionSpec

HALVES = (torch.bfloat16, torch.float16)


class PromptLibrary(Protocol):
    """An adapter of a library, one for each engine; table.py has asked whether the library is there."""

    name: str

    def refusal(self, spec: AttentionSpec, dtype: torch.dtype) -> str | None:
        """Return what it lacks for such layers, after "it has no ..."; None if nothing."""
        ...

    def prepare(self, batch: Batch) -> None:
        """Prepare a step with prompts."""
        ...

    def attend(self, spec: AttentionSpec, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        """Return attention of q [T, heads, head_dim] over the pools, in q's shape."""
        ...


def check_library(
    library: PromptLibrary, spec: AttentionSpec, dtype: torch.dtype, block_size: int, device: torch.device
) -> None:
    """Raise ConfigError unless a small step of such a layer is correct."""
    lacking = library.refusal(spec, dtype)
    if lacking is None:
        lacking = _try(library, spec, dtype, block_size, device)
    if lacking is not None:
        raise ConfigError(
            f"--attention-backend is {library.name!r}, but it has no {lacking}, which this model needs; use 'triton'."
        )


def _try(
    library: PromptLibrary, spec: AttentionSpec, dtype: torch.dtype, block_size: int, device: torch.device
) -> str | None:
    """Run a prompt and a decode, each after a full block, in blocks out of order."""
    steps, tables = [(block_size, 3), (block_size, 1)], [[3, 1], [0, 2]]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def ints(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    contexts = [start + num for start, num in steps]
    batch = Batch(
        ids=torch.zeros(4, dtype=torch.int64, device=device),
        positions=torch.zeros(4, dtype=torch.int64, device=device),
        kv_slots=torch.zeros(4, dtype=torch.int64, device=device),
        block_tables=ints(tables),
        query_starts=ints([0, 3, 4]),
        context_lens=ints(contexts),
        sample_rows=torch.zeros(0, dtype=torch.int64, device=device),
        query_lens_host=[num for _, num in steps],
        context_lens_host=contexts,
        block_tables_host=tables,
    )
    q = draw(4, spec.num_heads, spec.head_dim)
    pools = [draw(4, spec.num_kv_heads, block_size, spec.head_dim) for _ in "kv"]
    try:
        library.prepare(batch)
        out = library.attend(spec, q, *pools)
    except Exception as error:  # any error of the library
        return f"way to do it here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    row = 0
    for (start, num), table in zip(steps, tables, strict=True):
        keys, values = (pool[table].transpose(1, 2).flatten(0, 1)[: start + num].double() for pool in pools)
        exact = dense_attention(spec, q[row : row + num].double(), keys, values, start)
        bound = 4 * torch.finfo(dtype).eps * values.abs().max()
        if not bool((out[row : row + num].double() - exact).abs().max() <= bound):
            return "right result over a pool of this layout"
        row += num
    return None
