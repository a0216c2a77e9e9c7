"""The optional attention libraries themselves, where they are installed, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.errors import ConfigError
from engine.runtime.attention import LIBRARIES
from engine.runtime.attention.table import load_backend
from engine.runtime.attention.triton_paged import TritonPagedAttention
from tests.kernels.test_triton_attention import Case, make_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
STEPS = [(0, 9), (700, 1), (333, 5), (0, 1), (15, 2), (0, 300)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [{}, {"window": 24}, {"softcap": 3.0}], ids=["full", "window", "softcap"])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (128, 4), (256, 8)])
@pytest.mark.parametrize("name", list(LIBRARIES))
def test_a_library_that_is_not_refused_is_right(
    name: str, dim: int, group: int, variant: dict[str, Any], dtype: torch.dtype
) -> None:
    """Twice, for what is kept from one step to the next."""
    case = Case(make_spec(dim, group, **variant), STEPS, 16, dtype, seed=dim)
    device = case.q.device
    try:
        backend = load_backend(name, device)
        assert isinstance(backend, TritonPagedAttention)
        backend.check(case.spec, dtype, 16, device)
    except ConfigError as error:
        pytest.skip(f"not on this machine: {error}")
    case.store_all(is_new_too=False)
    for _ in range(2):
        backend.prepare(case.batch())
        case.check(backend.attend(case.spec, case.q, *case.new(), case.k_pool, case.v_pool))
