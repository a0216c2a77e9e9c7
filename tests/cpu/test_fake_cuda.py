"""The engine for CUDA on a device that is made of this machine's CPU: the tests of a GPU run there, and say the same."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="this machine has no Triton, whose interpreter it takes")
def test_tests_of_a_gpu_run_on_a_device_made_of_a_cpu() -> None:
    """All are collected. Of the kernels', those that need the interpreter are skipped where there is a device."""
    on_it = "(graphs and depth1) or (come_back and parts and auto and dtype1) or (tower and Qwen) or mpnet"
    interpreted = "triton_ranks or (triton_experts and over_latents) or (triton_packed and model_of_codes)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.fake_cuda"]
    command += ["-o", "addopts=", "-W", "default", "tests/gpu", "tests/kernels"]  # as in the GPU's run
    command += ["-k", f"{on_it} or {interpreted}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "4 passed" in run.stdout
