"""What must be settled before any test module is imported.

Triton decides when it is imported whether its kernels run on a device or under its interpreter, and others than our tests
import it (torch's compiler does). So without a device the interpreter is chosen here; tests/kernels/ mends what it lacks.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("triton") and find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
