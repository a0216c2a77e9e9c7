"""Checks that a CUDA device can be used, before minutes of loading. Start-up thread."""

from __future__ import annotations

import re

import torch

from engine.core.errors import ConfigError

_FIRST_WITH_BFLOAT16 = (8, 0)


def explain_absence() -> str:
    """Return the reason why torch sees no CUDA device."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return (
        f"torch ({torch.__version__}, made for CUDA {torch.version.cuda}) sees no CUDA device here; nvidia-smi says "
        "whether there is one, and whether its driver is recent enough"
    )


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError for a GPU without kernels in torch's build, or without `dtype`."""
    capability = torch.cuda.get_device_capability(device)
    gpu = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
    built_for = torch.cuda.get_arch_list()
    if not _runs_on(built_for, capability):
        raise ConfigError(
            f"This torch ({torch.__version__}) has no kernels for {gpu}, only for {', '.join(built_for)}; install one "
            "that was built for it, or use --device cpu."
        )
    if dtype == torch.bfloat16 and capability < _FIRST_WITH_BFLOAT16:
        raise ConfigError(
            f"{gpu} cannot multiply bfloat16, which needs 8.0 or newer; set --dtype to float16, or to float32 if the "
            "model's numbers are too large for that."
        )


def _runs_on(built_for: list[str], capability: tuple[int, int]) -> bool:
    """Return whether code runs on a GPU: sm_XY on its generation, compute_XY on newer ones."""
    targets = [match for match in map(re.compile(r"(sm|compute)_(\d+)(\d)([a-z]?)").fullmatch, built_for) if match]
    for kind, major, minor, suffix in (match.groups() for match in targets):
        target = int(major), int(minor)
        if target == capability or (
            not suffix and target <= capability and (kind == "compute" or target[0] == capability[0])
        ):
            return True
    return not targets  # a build without a list
