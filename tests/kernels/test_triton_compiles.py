"""The kernels compile for a device, which the interpreter says nothing about; and none needs memory for registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own, since kernels are either interpreted or compiled."""
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, script], env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = """
        _act_mul_kernel _add_rms_norm _add_to_tokens _choose _copy_best _count_tokens _decode_kernel _find_candidates
        _find_peaks _merge_kernel _prefill_kernel _quantise_rows _rotate_and_store _search_borders _store_kernel _tally
    """
    assert done.stdout.split() == expected.split()
