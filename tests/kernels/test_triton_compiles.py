"""The kernels compile for a device, which the interpreter says nothing about; and none needs memory for registers."""

from __future__ import annotations

import subprocess


def test_kernels_compile_for_hopper(compiling: subprocess.Popen[str]) -> None:
    told, complaints = compiling.communicate()
    assert compiling.returncode == 0, complaints
    expected = """
        _act_mul_kernel _add_rms_norm _add_to_tokens _ban_tokens _choose _copy_best _count_tokens _decode_kernel _find_candidates
        _find_peaks _merge_kernel _prefill_kernel _quantise_rows _rotate_and_store _search_borders _store_kernel _tally
    """
    assert told.split() == expected.split()
