"""What must be settled before any test module is imported.

Triton decides when it is imported whether its kernels run on a device or under its interpreter, and others than our tests
import it (torch's compiler does). So without a device the interpreter is chosen here; tests/kernels/ mends what it lacks.

No test may depend on the machine's speed: Hypothesis gets no deadline, and httpx waits as long as every other test does.
`make clients` runs tests in an environment without most of these libraries.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.patience import PATIENCE_S

if find_spec("triton") and find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("anywhere")

if find_spec("httpx"):
    from httpx._config import DEFAULT_TIMEOUT_CONFIG  # the one object behind every `timeout` that is not given: 5 s

    for phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)
